"""Copies on real nodes: bytes that flipped, and what is found of them."""

from __future__ import annotations

import random
from typing import Any

from flipping import damage
from support import figure

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster
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
