"""Copies on real nodes: bytes that flipped, and what is found of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from flipping import damage
from support import figure

from p2pkv.client import Client
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing import namespaces
from p2pkv.testing.cluster import Cluster
from p2pkv.testing.namespaces import Namespaces
from p2pkv.testing.observer import lacking

COMPARED: dict[str, Any] = {"replication_factor": 2, "compare_every_s": 0.1}


def test_a_value_that_flipped_in_a_primary_s_memory_comes_back_from_its_copy(
    etcd: EtcdCluster,
) -> None:
    with (
        Cluster(
            2, etcd=etcd, replication_factor=2, compare_every_s=0.1, bucket_count=16
        ) as cluster,
        cluster.client() as kv,
    ):
        cluster.wait(lambda: not lacking(cluster.view()), "every bucket has its copies")
        values = {f"k{i}": random.randbytes(5000) for i in range(64)}
        kv.batch_put(values)
        compared = lambda: figure(kv, "copies_compared_total")  # noqa: E731
        before = compared()
        cluster.wait(lambda: compared() > before + 20, "all are compared")
        assert figure(kv, "copies_differing_total") == 0
        kv.scrub(bytes_per_s=1 << 30)  # gives checksums to those that have none
        cluster.wait(lambda: not any(s.running for s in kv.scrub().values()), "scrubbed")
        (arena,) = cluster["n0"].arenas
        damage(arena, values["k7"])
        kv.scrub(bytes_per_s=1 << 30)
        cluster.wait(lambda: figure(kv, "objects_corrupt_total") == 1, "the damage is found")
        mended = lambda: figure(kv, "copies_restored_total") + figure(kv, "copies_resent_total")  # noqa: E731
        cluster.wait(lambda: mended() == 1, "it is mended")
        cluster.wait(lambda: figure(kv, "copies_missing") == 0, "no copy is missing")
        assert kv.batch_get(list(values)) == list(values.values())
        assert figure(kv, "copies_stale_total") + figure(kv, "copies_extra_total") == 0


SMALL, LARGE = 16 << 20, 64 << 20
BUCKETS = 16


def objects_of(kv: Client) -> list[float]:
    """How many each node holds."""
    return [told.figures["objects"] for told in kv.stats().values()]


def test_copies_are_the_same_again_after_a_partition_and_want_of_room() -> None:
    if why := namespaces.why_not():
        pytest.skip(why)
    with (
        Namespaces() as network,
        EtcdCluster(1, host=network.etcd_address) as etcd,
        Cluster(0, etcd=etcd, bucket_count=BUCKETS, **COMPARED) as cluster,
    ):
        for name, memory in (("n0", LARGE), ("n1", SMALL)):
            address = network.add(name)
            cluster.add_node(
                name, wait=False, prefix=network.prefix(name), bind=address, insecure=True,
                memory_limit_bytes=memory,
            )  # fmt: skip
        whole = lambda: len(cluster.view().nodes) == 2 and not lacking(cluster.view())  # noqa: E731
        cluster.wait(whole, "every bucket has its copies")
        with cluster.client(timeout=30.0) as kv:
            keys = [cluster.key_of("n0", i) for i in range(24)]
            values = {key: random.randbytes(1 << 20) for key in keys}
            for key, value in values.items():
                kv.put(key, value)
            cluster.wait(lambda: figure(kv, "copies_dropped_total") > 0, "n1 gives copies up")
            cluster.wait(lambda: figure(kv, "copies_missing") > 0, "they are known to be missing")

            n0, n1 = network.address("n0"), network.address("n1")
            network.cut(n0, n1)
            network.cut(n1, n0)
            cluster.wait(lambda: lacking(cluster.view()), "who is silent leaves the sets")
            values[keys[0]] = b"written meanwhile"
            assert kv.put(keys[0], values[keys[0]]) == 1
            network.heal()
            cluster.wait(whole, "every bucket has its copies again")

            for key in keys[4:]:
                kv.delete(key)
            cluster.wait(lambda: figure(kv, "copies_missing") == 0, "there is room for all")
            cluster.wait(lambda: objects_of(kv) == [4, 4], "each has all objects")
            differing = figure(kv, "copies_differing_total")
            assert differing > 0
            compared = figure(kv, "copies_compared_total")
            enough = compared + 4 * BUCKETS
            cluster.wait(lambda: figure(kv, "copies_compared_total") > enough, "all are compared")
            assert figure(kv, "copies_differing_total") == differing
            assert figure(kv, "copies_stale_total") == 0

            cluster["n0"].kill()
            assert [kv.get(key) for key in keys[:4]] == [values[key] for key in keys[:4]]
