"""Flipped bytes: in a node's memory, on data connections, in ZeroMQ frames; by each policy."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flipping import PROXY, FlippingProxy, damage, value_of
from support import KINDS, client_of
from typer.testing import CliRunner

from p2pkv import BatchError, NodeThread, ring, wire
from p2pkv.cli import app
from p2pkv.errors import CorruptValue, InvalidArgument
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster
from p2pkv.types import NodeId

PATHS = ["auto", "tcp", "zmq"]
MIB = 1 << 20
ALWAYS = {"checksums": "always"}
SMALL_MESSAGES = {"message_bytes_max": MIB}


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(1, etcd=etcd, limits=SMALL_MESSAGES, checksums="always") as cluster:
        yield cluster


def data_of(size: int) -> bytes:
    return random.randbytes(size)


def corrupt_total(kv: Any) -> int:
    return sum(int(s.figures["objects_corrupt_total"]) for s in kv.stats().values())


def hit(cluster: Cluster, value: bytes, name: str = "n0") -> None:
    (arena,) = cluster[name].arenas
    damage(arena, value)


# --- in a node's memory


@pytest.mark.parametrize("size", [100, 4 << 10, 100 << 10, 3 * MIB])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_flipped_in_the_arena_is_one_keys_error_and_the_value_is_dropped(
    cluster: Cluster, kind: str, path: str, size: int
) -> None:
    keys = [f"{kind}-{path}-{size}-{i}".encode() for i in range(4)]
    values = [data_of(size) for _ in keys]
    with client_of(kind, cluster, path=path, limits=SMALL_MESSAGES, **ALWAYS) as kv:
        before = corrupt_total(kv)
        kv.batch_put(dict(zip(keys, values, strict=True)))
        assert kv.batch_get(keys) == values
        hit(cluster, values[2])
        with pytest.raises(BatchError) as raised:
            kv.batch_get(keys)
        assert raised.value.results[:2] + raised.value.results[3:] == values[:2] + values[3:]
        (error,) = raised.value.failures
        assert isinstance(error, CorruptValue)
        assert error.key == keys[2]
        assert error.place.startswith("n0@")
        assert "bucket" in error.place
        assert "arena offset" in error.place
        assert repr(keys[2]) in str(error)
        assert kv.get(keys[2]) is None
        assert corrupt_total(kv) == before + 1
        kv.batch_put({keys[2]: values[2]})
        assert kv.batch_get(keys) == values
        kv.batch_delete(keys)


@pytest.mark.parametrize("path", PATHS)
def test_single_gets_and_gets_into_buffers_raise_it(cluster: Cluster, path: str) -> None:
    with cluster.client(path=path, checksums="always") as kv:
        for size in (200, 300 << 10):
            one, two = data_of(size), data_of(size)
            kv.put("one", one)
            kv.put_from("two", [one[:7], two[7:99], two[99:]])
            kv.put("two", two)
            hit(cluster, one)
            with pytest.raises(CorruptValue, match="arena offset"):
                kv.get("one")
            hit(cluster, two)
            targets = [bytearray(100), bytearray(size - 100)]
            with pytest.raises(CorruptValue, match="arena offset"):
                kv.get_into("two", targets)
            assert kv.get_into("two", targets) is None


def test_tensors_raise_it(cluster: Cluster) -> None:
    with cluster.client(checksums="always") as kv:
        tensor = np.frombuffer(data_of(64 << 10), dtype=np.int32)
        kv.put_tensor("tensor", tensor)
        assert np.array_equal(kv.get_tensor("tensor"), tensor)
        hit(cluster, tensor.tobytes())
        with pytest.raises(CorruptValue):
            kv.get_tensor("tensor")


def test_with_remote_only_what_travels_is_compared(cluster: Cluster) -> None:
    value = data_of(100 << 10)
    with cluster.client(checksums="remote") as near:
        near.put("key", value)
        hit(cluster, value)
        damaged = near.get("key")
        assert damaged != value, "read through shared memory, which remote does not look at"
        with cluster.client(checksums="remote", path="tcp") as far, pytest.raises(CorruptValue):
            far.get("key")


@pytest.mark.parametrize("policy", ["demand", "never"])
def test_with_demand_and_never_reads_compare_nothing(cluster: Cluster, policy: str) -> None:
    value = data_of(9000)
    with cluster.client(checksums=policy) as kv:
        kv.put("key", value)
        hit(cluster, value)
        assert kv.get("key") != value
        kv.delete("key")


def test_ranges_are_not_compared_as_no_part_can_be(cluster: Cluster) -> None:
    value = data_of(9000)
    with cluster.client(checksums="always") as kv:
        kv.put("key", value)
        hit(cluster, value)
        assert kv.get_range("key", 100, 500) == value[100:600]
        assert kv.get_range("key", 0, 100) != value[:100]
        kv.delete("key")


# --- on the way


@pytest.fixture(scope="module")
def way(etcd: EtcdCluster) -> Iterator[tuple[Cluster, FlippingProxy]]:
    changes = {"checksums": "remote", "advertise": PROXY, "insecure": True}
    with (
        FlippingProxy() as proxy,
        Cluster(1, etcd=etcd, limits=SMALL_MESSAGES, **changes) as cluster,
    ):
        record = cluster.view().nodes[NodeId("n0")]
        for endpoint in (*record.control, *record.data):
            proxy.serve(int(endpoint.rpartition(":")[2]))
        yield cluster, proxy


WAYS = ["tcp", "zmq"]


@pytest.mark.parametrize("size", [1000, 200 << 10, 3 * MIB])
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_flipped_once_on_the_way_to_the_reader_is_read_again(
    way: tuple[Cluster, FlippingProxy], kind: str, path: str, size: int
) -> None:
    cluster, proxy = way
    value = value_of(size)
    with client_of(kind, cluster, path=path, limits=SMALL_MESSAGES, checksums="remote") as kv:
        kv.put("key", value)
        assert kv.get("key") == value
        before = proxy.flipped
        proxy.to_client = 1
        assert kv.batch_get(["key", "none"]) == [value, None]
        proxy.to_client = 1
        target = bytearray(size)
        assert kv.get_into("key", target) == size
        assert target == value
        proxy.to_client = 1
        assert kv.get("key") == value
        assert proxy.flipped == before + 3
        assert corrupt_total(kv) == 0


@pytest.mark.parametrize("size", [1000, 200 << 10, 3 * MIB])
@pytest.mark.parametrize("path", WAYS)
def test_a_way_that_always_flips_is_named_and_the_owner_keeps_the_value(
    way: tuple[Cluster, FlippingProxy], path: str, size: int
) -> None:
    cluster, proxy = way
    marked, plain = value_of(size), b"plain" * 20
    with client_of("Client", cluster, path=path, limits=SMALL_MESSAGES, checksums="remote") as kv:
        kv.batch_put({"marked": marked, "plain": plain})
        proxy.to_client = 1000
        with pytest.raises(BatchError) as raised:
            kv.batch_get(["plain", "marked"])
        proxy.to_client = 0
        assert raised.value.results[0] == plain
        (error,) = raised.value.failures
        assert isinstance(error, CorruptValue)
        assert error.place.startswith("wire from n0@")
        assert kv.get("marked") == marked
        assert corrupt_total(kv) == 0


@pytest.mark.parametrize("size", [1000, 200 << 10, 3 * MIB])
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_put_that_arrives_damaged_is_not_stored_but_sent_again_once(
    way: tuple[Cluster, FlippingProxy], kind: str, path: str, size: int
) -> None:
    cluster, proxy = way
    marked = value_of(size, 1)
    with client_of(kind, cluster, path=path, limits=SMALL_MESSAGES, checksums="remote") as kv:
        kv.delete("put")
        proxy.to_node = 1
        assert kv.put("put", marked) == 1
        assert proxy.to_node == 0
        assert kv.get("put") == marked
        kv.delete("put")
        proxy.to_node = 1000
        with pytest.raises(CorruptValue, match="did not arrive as it was sent"):
            kv.put("put", marked)
        proxy.to_node = 0
        assert kv.get("put") is None
        (stats,) = kv.stats().values()
        assert stats.figures["corrupt_arrivals_total"] >= 3


# --- with a bucket that moves


def test_a_value_that_rotted_does_not_move_along_and_stops_no_move(etcd: EtcdCluster) -> None:
    values = {f"key-{i}": data_of(5000) for i in range(300)}
    with (
        Cluster(1, etcd=etcd, checksums="always") as cluster,
        cluster.client(checksums="always") as kv,
    ):
        kv.batch_put(values)
        kv.put("large", large := data_of(5 * MIB))
        hit(cluster, values["key-7"])
        hit(cluster, large)
        cluster.add_node()
        cluster["n0"].terminate()
        cluster.wait_settled(["n1"])
        assert cluster["n0"].drained
        found = kv.batch_get(list(values))
        assert kv.get("large") is None
        gone = [key for key, value in zip(values, found, strict=True) if value is None]
        assert gone == ["key-7"]
        del values["key-7"]
        assert kv.batch_get(list(values)) == list(values.values())


# --- looking at all of it


def scrubbed(cluster: Cluster, kv: Any) -> list[wire.Scrubbed]:
    """What the nodes say at the end of a scrub."""
    kv.scrub(bytes_per_s=1 << 30)
    cluster.wait(lambda: not any(t.running for t in kv.scrub().values()), "the scrub goes on")
    return list(kv.scrub().values())


def test_a_scrub_gives_checksums_and_the_next_drops_what_rotted_since(etcd: EtcdCluster) -> None:
    values = {f"key-{i}": data_of(20_000) for i in range(200)}
    with Cluster(2, etcd=etcd) as cluster, cluster.client() as kv:
        kv.batch_put(values)
        with cluster.client(checksums="always") as careful:
            careful.put("with", b"checksum")
        assert all(not told.runs for told in kv.scrub().values())
        told = scrubbed(cluster, kv)
        assert (sum(t.without for t in told), sum(t.corrupt for t in told)) == (len(values), 0)
        owner = next(n for n in ("n0", "n1") if cluster.key_of(n, prefix="key"))
        key = next(k for k in values if _owner(cluster, k) == owner)
        hit(cluster, values[key], owner)
        told = scrubbed(cluster, kv)
        assert [t.runs for t in told] == [2, 2]
        assert sum(t.checked for t in told) == len(values) + 1
        assert sum(t.checked_bytes for t in told) == 20_000 * len(values) + 8
        assert (sum(t.without for t in told), sum(t.corrupt for t in told)) == (0, 1)
        assert corrupt_total(kv) == 1
        assert kv.get(key) is None
        assert sum(v is not None for v in kv.batch_get(list(values))) == len(values) - 1


def _owner(cluster: Cluster, key: str) -> str:
    view = cluster.view()
    assert view.meta is not None
    return view.buckets[ring.bucket_of(key.encode(), view.meta.bucket_count)].record.primary.node  # type: ignore[index]


def test_a_node_whose_policy_is_never_gives_no_checksums(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd, checksums="never") as cluster, cluster.client() as kv:
        kv.put("key", data_of(100))
        for _ in range(2):
            (told,) = scrubbed(cluster, kv)
            assert (told.checked, told.without, told.checked_bytes) == (1, 1, 0)


def test_the_command_tells_of_it_and_exits_with_1_for_something_corrupt(etcd: EtcdCluster) -> None:
    value = data_of(3000)
    with Cluster(1, etcd=etcd) as cluster, cluster.client(checksums="always") as kv:
        kv.batch_put({"rots": value, "stays": b"x"})

        def run(*more: str) -> tuple[int, Any]:
            args = ["scrub", "n0", "--rate", "64MiB", "--json", "--cluster", cluster.name]
            args += ["--etcd-endpoints", ",".join(cluster.etcd.endpoints), *more]
            result = CliRunner().invoke(app, args)
            return result.exit_code, json.loads(result.stdout.splitlines()[0])

        assert run()[0] == 0
        hit(cluster, value)
        code, told = run()
        assert code == 1
        (node,) = told["nodes"]
        assert node["member"].startswith("n0@")
        assert (node["objects"], node["checked"], node["corrupt"]) == (2, 2, 1)
        assert node["running"] is False
        code, told = run("--rate", "nonsense")
        assert (code, told["error"]) == (2, "ConfigError")
        with pytest.raises(InvalidArgument, match="nobody"):
            kv.scrub(["nobody"])


def test_in_process_clients_have_the_policy_of_their_node(etcd: EtcdCluster) -> None:
    value = data_of(70_000)
    with (
        Cluster(0, etcd=etcd, checksums="always") as cluster,
        NodeThread(cluster.node_config("here")) as node,
        node.client() as kv,
    ):
        kv.put("key", value)
        assert kv.get("key") == value
        damage(node.node._store.arena.path, value)
        with pytest.raises(CorruptValue, match="here@"):
            kv.get("key")
        assert kv.get("key") is None


def test_a_scrub_keeps_to_its_rate_and_is_joined_by_a_second(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster, cluster.client() as kv:
        kv.batch_put({f"key-{i}": data_of(MIB) for i in range(32)})
        kv.scrub(["n0"], bytes_per_s=8 * MIB)
        (again,) = kv.scrub(["n0"], bytes_per_s=1 << 40).values()
        assert (again.runs, again.running) == (1, True)
        (told,) = kv.scrub().values()
        assert told.checked_bytes < 32 * MIB
        assert kv.get("key-5") is not None
