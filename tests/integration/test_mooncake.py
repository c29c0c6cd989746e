"""The interface of Mooncake Store, against real nodes: what its users and engines rely on.

Most tests are named for the scenario of the other project's suites that they stand for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pkv.adapters.mooncake import (
    ErrorCode,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
)
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

INVALID, MISSING = int(ErrorCode.INVALID_PARAMS), int(ErrorCode.OBJECT_NOT_FOUND)


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    options = {"reset_after_s": 60.0, "fence_after_s": 50.0}
    # Without the index, since by that a node is read for a while after it was stopped.
    with Cluster(2, etcd=etcd, published_index=False, **options) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster is named by the environment, as for a program that knows nothing of p2pkv."""
    cluster = request.getfixturevalue("cluster")
    for name, value in environ_of(cluster).items():
        monkeypatch.setenv(name, value)


def environ_of(cluster: Cluster) -> dict[str, str]:
    return {
        "P2PKV_ETCD__ENDPOINTS": ",".join(cluster.etcd.endpoints),
        "P2PKV_CLUSTER": cluster.name,
    }


def config(segment: Any = 0, buffer: Any = "16 MB", **more: Any) -> dict[str, Any]:
    return {
        "local_hostname": "localhost",
        "metadata_server": "http://127.0.0.1:8080/metadata",
        "global_segment_size": segment,
        "local_buffer_size": buffer,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": "127.0.0.1:50051",
        **more,
    }


@pytest.fixture
def store() -> Iterator[MooncakeDistributedStore]:
    store = MooncakeDistributedStore()
    assert store.setup(config()) == 0
    store.remove_all(force=True)
    yield store
    assert store.close() == 0


class Pool:
    """Registered memory, by address."""

    def __init__(self, store: MooncakeDistributedStore, size: int, fill: bytes = b"") -> None:
        self.memory = (ctypes.c_ubyte * size)()
        self.ptr = ctypes.addressof(self.memory)
        ctypes.memmove(self.memory, fill, len(fill))
        assert store.register_buffer(self.ptr, size) == 0

    def __getitem__(self, span: slice) -> bytes:
        return bytes(self.memory[span])


# -- setup and close


def test_human_readable_sizes() -> None:
    store = MooncakeDistributedStore()
    assert store.setup(config("0MB", "16 MB")) == 0
    assert store.put("sizes", b"value") == 0
    assert store.get("sizes") == b"value"
    assert store.close() == 0


@pytest.mark.parametrize(
    "fields",
    [
        config("50%"), config(buffer="-1"), config(-1), config(tenant_id="a/b"), config(True),
        {"local_hostname": "localhost"}, {"metadata_server": "x"}, {},
    ],
)  # fmt: skip
def test_unsupported_percentage_size_and_other_bad_fields(fields: dict[str, Any]) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(fields) == INVALID
    assert store.close() == 0


def test_setup_by_place_and_by_name() -> None:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:50051") == 0
    assert store.close() == 0
    assert store.setup(**{**config(), "local_buffer_size": 0, "tenant_id": "t"}) == 0
    assert store.put("zero buffer", b"is enough") == 0
    assert store.remove_all() == 1
    assert store.close() == 0
    assert store.setup(config=config()) == 0
    assert store.close() == 0


@pytest.mark.parametrize(
    ("args", "more"),
    [
        (("localhost", "x"), {}), ((), {"nonsense": 1}), (("a",) * 14, {}),
        (("a",) * 7, {"protocol": "tcp"}),
    ],
)  # fmt: skip
def test_arguments_that_setup_does_not_have_are_a_type_error(args: Any, more: Any) -> None:
    """Callers try a dictionary and fall back on this."""
    store = MooncakeDistributedStore()
    with pytest.raises(TypeError, match=r"setup\(\)"):
        store.setup(*args, **more)
    assert store.setup(config()) == 0
    store.close()


def test_repeated_setup_requires_successful_close() -> None:
    store = MooncakeDistributedStore()
    assert store.setup(config()) == 0
    assert store.setup(config()) == INVALID
    assert store.setup_dummy(1 << 20, 1 << 20, "localhost:1") == INVALID
    assert store.health_check() == 0
    assert store.close() == 0
    assert store.setup(config()) == 0
    assert store.close() == 0


def test_failed_setup_must_be_closed_before_retry() -> None:
    store = MooncakeDistributedStore()
    assert store.setup(config("50%")) == INVALID
    assert store.setup(config()) == INVALID
    assert store.close() == 0
    assert store.setup(config()) == 0
    assert store.close() == 0


def test_double_tear_down_is_idempotent(store: MooncakeDistributedStore) -> None:
    assert (store.close(), store.close()) == (0, 0)
    assert MooncakeDistributedStore().close() == 0


def test_operations_before_setup_have_codes() -> None:
    store = MooncakeDistributedStore()
    assert store.put("a", b"x") == INVALID
    assert (store.get("a"), store.get_batch(["a", "b"])) == (b"", [b"", b""])
    assert (store.get_buffer("a"), store.get_tensor("a")) == (None, None)
    assert (store.is_exist("a"), store.batch_is_exist(["a", "b"])) == (-1, [-1, -1])
    assert (store.get_size("a"), store.remove("a"), store.remove_all()) == (INVALID,) * 3
    assert store.remove_by_regex("a") == INVALID
    assert store.register_buffer(4096, 1) == INVALID
    assert store.batch_get_into(["a"], [1], [1]) == [INVALID]
    assert store.batch_put_from(["a"], [1], [1]) == [INVALID]
    assert store.get_replica_desc("a") == []
    assert store.allocate_and_mount_segment(1)["ret"] == INVALID
    assert (store.health_check(), store.get_hostname()) == (1, "")


def test_setup_without_a_cluster_fails_with_a_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pkv.adapters.mooncake.store.SETUP_TIMEOUT_S", 0.5)
    monkeypatch.setenv("P2PKV_ETCD__ENDPOINTS", "http://127.0.0.1:1")
    store = MooncakeDistributedStore()
    assert store.setup(config()) == int(ErrorCode.RPC_FAIL)
    assert "setup failed: no node gave the ring" in caplog.text
    assert store.close() == 0


def test_the_cluster_is_found_by_the_addresses_of_mooncakes_services(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("P2PKV_ETCD__ENDPOINTS")
    host = cluster.etcd.endpoints[0].removeprefix("http://")
    node = cluster.endpoint("n0")
    for address in (f"etcd://{host};{host}", node, node + ";" + node):
        store = MooncakeDistributedStore()
        assert store.setup(config(master_server_addr=address)) == 0, address
        assert store.health_check() == 0
        assert store.close() == 0


def test_memory_is_registered_until_the_store_is_closed(store: MooncakeDistributedStore) -> None:
    pool = Pool(store, 100)
    store.close()
    assert store.setup(config()) == 0
    assert store.put_from("k", pool.ptr, 1) == INVALID
    assert store.register_buffer(pool.ptr, 100) == 0


def test_setup_needs_no_node_in_particular(cluster: Cluster) -> None:
    for node in cluster:
        store = MooncakeDistributedStore()
        node.pause()
        try:
            assert store.setup(config()) == 0
            assert store.health_check() == 0
        finally:
            node.resume()
            store.close()


def test_zero_local_buffer_size_makes_no_difference() -> None:
    store = MooncakeDistributedStore()
    assert store.setup(config(buffer=0)) == 0
    assert store.put("zero", b"x") == 0
    assert store.close() == 0


def test_dummy_clients_have_a_pool() -> None:
    store = MooncakeDistributedStore()
    assert store.setup_dummy(1 << 20, 0, "127.0.0.1:50052") == 0
    ptr = store.alloc_from_mem_pool(4096)
    ctypes.memmove(ptr, b"pooled", 6)
    assert store.put_from("pooled", ptr, 6) == 0
    assert store.get("pooled") == b"pooled"
    assert store.alloc_from_mem_pool(1 << 20) == 0
    assert store.alloc_from_mem_pool(0) == 0
    assert store.close() == 0


# -- bytes


def test_basic_put_get_exist_operations(store: MooncakeDistributedStore) -> None:
    data = b"Hello, World!"
    assert store.put("key", data) == 0
    assert store.get_size("key") == len(data)
    assert store.get("key") == data
    assert store.is_exist("key") == 1
    assert store.put("key", b"other") == 0
    assert store.get("key") == data
    assert store.upsert("key", b"other") == 0
    assert store.get("key") == b"other"
    assert store.remove("key") == 0
    assert (store.is_exist("key"), store.get_size("key")) == (0, MISSING)


def test_get_after_remove_and_remove_of_nothing(store: MooncakeDistributedStore) -> None:
    store.put("key", b"x")
    assert store.get("key") == b"x"
    assert store.remove("key") == 0
    assert store.get("key") == b""
    assert store.remove("key", force=True) == MISSING
    assert store.batch_remove(["key", "other"]) == [MISSING, MISSING]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("", b"x", INVALID), ("k", b"", INVALID), ("k", "text", INVALID), ("k", None, INVALID),
        ("k" * 1020, b"x", -400), ("\ud800", b"x", -400), (7, b"x", -400),
    ],
)  # fmt: skip
def test_bad_keys_and_values_have_codes(
    store: MooncakeDistributedStore, key: Any, value: Any, code: int
) -> None:
    assert store.put(key, value) == code
    assert store.put_batch(["good", key], [b"x", value]) == code
    assert store.get("good") == b"x"


@pytest.mark.parametrize("key", ["a\0b", "new\nline", "ключ", b"bytes", "k" * 1000, "{tag}key"])
def test_odd_keys_are_taken(store: MooncakeDistributedStore, key: Any) -> None:
    assert store.put(key, b"x") == 0
    assert store.batch_is_exist([key]) == [1]
    assert store.remove(key) == 0


@pytest.mark.parametrize(
    "value", [bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)]
)
def test_every_buffer_is_a_value(store: MooncakeDistributedStore, value: Any) -> None:
    assert store.put("k", value) == 0
    assert store.get("k") == b"abc"


def test_put_batch_and_get_batch(store: MooncakeDistributedStore) -> None:
    keys = [f"k{i}" for i in range(50)]
    values = [b"%d" % i * 100 for i in range(50)]
    assert store.put_batch(keys, values) == 0
    assert store.get_batch([*keys, "none"]) == [*values, b""]
    assert store.put_batch(keys[:2], values) == INVALID
    assert store.upsert_batch(keys, values[::-1]) == 0
    assert store.get_batch(keys) == values[::-1]


def test_put_parts(store: MooncakeDistributedStore) -> None:
    assert store.put_parts("k", b"one", bytearray(b"two"), memoryview(b"three")) == 0
    assert store.put_parts("k", b"other", config=ReplicateConfig()) == 0
    assert store.get("k") == b"onetwothree"
    assert store.upsert_parts("k", b"o", b"ther") == 0
    assert store.get("k") == b"other"
    assert (store.put_parts("none"), store.put_parts("none", b"", b"")) == (INVALID, INVALID)


def test_empty_batch_operations(store: MooncakeDistributedStore) -> None:
    assert store.put_batch([], []) == 0
    assert store.get_batch([]) == store.batch_is_exist([]) == store.batch_remove([]) == []
    assert store.batch_get_into([], [], []) == store.batch_put_from([], [], []) == []
    assert store.batch_get_buffer([]) == []
    assert store.batch_get_replica_desc([]) == {}
    assert store.batch_put_from_multi_buffers([], [], []) == []
    assert store.get_into_ranges([], [], [], [], []) == []


def test_batch_is_exist_operations(store: MooncakeDistributedStore) -> None:
    keys = [f"k{i}" for i in range(20)]
    assert store.put_batch(keys[:10], [b"x"] * 10) == 0
    assert store.batch_is_exist(keys) == [1] * 10 + [0] * 10
    assert store.batch_is_exist(["k0", "", "k19"]) == [1, -1, 0]


def test_batch_get_buffer_operations(store: MooncakeDistributedStore) -> None:
    store.put("k", b"Batch Buffer Data" * 100)
    there, missing = store.batch_get_buffer(["k", "none"])
    assert missing is None
    assert there is not None
    assert (there.size(), len(there)) == (1700, 1700)
    assert bytes(there) == b"Batch Buffer Data" * 100
    assert ctypes.string_at(there.ptr(), 5) == b"Batch"


def test_remove_by_regex(store: MooncakeDistributedStore) -> None:
    store.put_batch(["a1", "a2", "b1"], [b"x"] * 3)
    assert store.remove_by_regex("^c") == 0
    assert store.remove_by_regex("^a[0-9]$") == 2
    assert store.batch_is_exist(["a1", "a2", "b1"]) == [0, 0, 1]
    assert store.remove_by_regex("(") == INVALID
    assert store.remove_by_regex("1") == 1


def test_remove_all_leaves_other_tenants_and_other_users_of_the_cluster_alone(
    store: MooncakeDistributedStore, cluster: Cluster
) -> None:
    other = MooncakeDistributedStore()
    assert other.setup(config(tenant_id="other")) == 0
    with cluster.client() as kv:
        kv.put("key", b"native")
        assert store.put("key", b"mine") == other.put("key", b"theirs") == 0
        assert store.remove_all(force=True) == 1
        assert (kv.get("key"), other.get("key"), store.get("key")) == (b"native", b"theirs", b"")
    assert other.remove_all() == 1
    other.close()


def test_exist_scans_do_not_keep_puts_out(store: MooncakeDistributedStore) -> None:
    """A full store goes on taking puts, also when all its keys were just looked at."""
    block = bytes(1 << 20)
    keys = [f"block{i}" for i in range(200)]
    assert [store.put(key, block) for key in keys] == [0] * 200
    assert 0 < sum(store.batch_is_exist(keys)) < 200
    assert [store.put(f"more{i}", block) for i in range(50)] == [0] * 50


def test_concurrent_stress_with_barrier(store: MooncakeDistributedStore) -> None:
    seed = time.time_ns() & 0xFFFF
    print(f"seed = {seed}")
    barrier, failures = threading.Barrier(8), list[str]()

    def work(number: int) -> None:
        data = random.Random(seed + number).randbytes(200_000)
        keys = [f"t{number}/{i}" for i in range(20)]
        barrier.wait(30)
        if any(store.put(key, data) for key in keys):
            failures.append("put")
        barrier.wait(30)
        if store.get_batch(keys) != [data] * 20 or any(store.get(key) != data for key in keys):
            failures.append("get")
        barrier.wait(30)
        if any(store.batch_remove(keys)):
            failures.append("remove")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


# -- configuration of a put


def test_replicate_config_creation_and_properties() -> None:
    config = ReplicateConfig()
    assert (config.replica_num, config.preferred_segment, config.with_hard_pin) == (1, "", False)
    assert (config.soft_pin_action, config.group_ids) == (SoftPinAction.PRESERVE, None)
    config.replica_num = 3
    config.preferred_segment = "node1:12345"
    config.with_soft_pin = True
    assert config.preferred_segments == ["node1:12345"]
    assert config.soft_pin_action is SoftPinAction.ENABLE
    assert "replica_num: 3" in str(config)
    assert "soft_pin_action: ENABLE" in str(config)
    config.preferred_segment = ""
    config.with_soft_pin = False
    assert (config.preferred_segments, config.with_soft_pin) == ([], False)
    with pytest.raises(AttributeError):
        config.session_ids = ["s"]  # type: ignore[attr-defined]  # callers probe for it


def test_put_with_config_parameter(
    store: MooncakeDistributedStore, caplog: pytest.LogCaptureFixture
) -> None:
    config = ReplicateConfig()
    config.replica_num = 5
    config.preferred_segment = "elsewhere"
    config.group_ids = ["g"]
    pool = Pool(store, 100, b"x" * 100)
    assert store.put("a", b"1", config) == store.put("b", b"2", config=config) == 0
    assert store.put_batch(["c"], [b"3"], config) == 0
    assert store.put_from("d", pool.ptr, 1, config) == 0
    assert store.batch_put_from(["e"], [pool.ptr], [1], config) == [0]
    assert caplog.text.count("the cluster decides how many copies it keeps") == 1


def test_soft_pin_config_forwarding(store: MooncakeDistributedStore) -> None:
    """What is pinned outlives what is not, in a store that is full."""
    soft, hard = ReplicateConfig(), ReplicateConfig()
    soft.soft_pin_action = SoftPinAction.ENABLE
    hard.with_hard_pin = True
    block = bytes(1 << 20)
    assert store.put("plain", block) == 0
    assert store.put("soft", block, soft) == 0
    assert store.put("hard", block, hard) == 0
    for i in range(300):
        assert store.put(f"filler{i}", block) == 0
    assert store.batch_is_exist(["plain", "soft", "hard"]) == [0, 1, 1]
    assert store.batch_remove(["soft", "hard"]) == [0, 0]


# -- registered memory


def test_zero_copy_operations(store: MooncakeDistributedStore) -> None:
    data = b"Hello, Zero-Copy World! " * 1000
    pool = Pool(store, len(data) + 1024, data)
    assert store.put_from("k", pool.ptr, len(data)) == 0
    assert store.get("k") == data
    ctypes.memset(pool.memory, 0, len(data))
    assert store.get_into("k", pool.ptr, len(data) + 1024) == len(data)
    assert pool[0 : len(data)] == data
    assert store.get_into("k", pool.ptr, len(data) // 2) == INVALID
    assert store.get_into("none", pool.ptr, 100) == MISSING
    assert store.upsert_from("k", pool.ptr, 5) == 0
    assert store.get("k") == b"Hello"
    assert store.put_from_with_metadata("m", pool.ptr + 7, pool.ptr, 4, 5) == 0
    assert store.get("m") == b"HelloZero"
    assert store.unregister_buffer(pool.ptr) == 0
    assert store.unregister_buffer(pool.ptr) == INVALID


def test_addresses_that_are_not_registered_are_refused(store: MooncakeDistributedStore) -> None:
    pool = Pool(store, 100)
    assert store.put_from("k", pool.ptr + 50, 51) == INVALID
    assert store.put_from("k", pool.ptr - 1, 2) == INVALID
    assert store.get_into("k", 0, 10) == INVALID
    assert store.put_from("k", pool.ptr, 0) == INVALID
    store.put("there", b"x")
    assert store.batch_get_into(["there", "there"], [pool.ptr, 8], [100, 100]) == [1, INVALID]
    assert store.is_exist("k") == 0


def test_memory_that_is_none_cannot_be_registered(store: MooncakeDistributedStore) -> None:
    pool = Pool(store, 1 << 20)
    assert store.register_buffer(4096, 4096) == INVALID
    assert store.register_buffer(pool.ptr, 1 << 40) == INVALID
    assert store.register_buffer(pool.ptr + 10, 10) == INVALID  # overlaps
    assert store.register_buffer(pool.ptr, 0) == INVALID


def test_batch_get_into_and_put_from_operations(store: MooncakeDistributedStore) -> None:
    values = [b"one" * 100, b"two" * 20_000, b"three" * 30]
    keys = ["k0", "k1", "k2"]
    spacing = 1 << 17
    pool = Pool(store, 3 * spacing)
    pointers = [pool.ptr + i * spacing for i in range(3)]
    for pointer, value in zip(pointers, values, strict=True):
        ctypes.memmove(pointer, value, len(value))
    assert store.batch_put_from(keys, pointers, [len(v) for v in values]) == [0, 0, 0]
    assert store.batch_put_from(keys, pointers, [1, 1, 1]) == [0, 0, 0]
    assert store.get_batch(keys) == values
    ctypes.memset(pool.memory, 0, 3 * spacing)
    got = store.batch_get_into([*keys[:2], "none"], pointers, [spacing] * 3)
    assert got == [len(values[0]), len(values[1]), MISSING]
    for i in (0, 1):
        assert pool[i * spacing : i * spacing + got[i]] == values[i]
    assert store.batch_get_into(keys[:2], pointers, [spacing] * 3) == [INVALID] * 2
    assert store.batch_put_from(keys[:2], pointers, [spacing] * 3) == [INVALID] * 2
    assert store.batch_upsert_from(keys, pointers, [4, 4, 0]) == [0, 0, INVALID]


def test_multi_buffers_are_gathered_and_scattered(store: MooncakeDistributedStore) -> None:
    """A block of 32 layers, each in a place of its own."""
    layers, size, blocks = 32, 512, 16
    source = random.Random(1).randbytes(layers * blocks * size)
    pool, target = Pool(store, len(source), source), Pool(store, len(source))

    def places(base: int, block: int) -> list[int]:
        return [base + (layer * blocks + block) * size for layer in range(layers)]

    keys = [f"block{b}" for b in range(blocks)]
    sizes = [[size] * layers for _ in keys]
    pointers = [places(pool.ptr, b) for b in range(blocks)]
    assert store.batch_put_from_multi_buffers(keys, pointers, sizes) == [0] * blocks
    assert store.get_size("block3") == layers * size
    into = [places(target.ptr, b) for b in range(blocks)]
    got = store.batch_get_into_multi_buffers([*keys, "none"], [*into, into[0]], [*sizes, sizes[0]])
    assert got == [layers * size] * blocks + [MISSING]
    assert target[0 : len(source)] == source
    assert store.batch_get_into_multi_buffers(["block0"], [into[0]], [sizes[0][:-1]]) == [INVALID]
    assert store.batch_get_into_multi_buffers(["block0"], [into[0][:2]], [sizes[0][:2]], True) == [
        INVALID
    ]


def test_get_into_ranges_operations(store: MooncakeDistributedStore) -> None:
    one, two = b"0123456789ABCDEFGHIJ", b"abcdefghijklmnopqrst"
    store.put_batch(["one", "two"], [one, two])
    a, b = Pool(store, 32, b"_" * 32), Pool(store, 32, b"_" * 32)
    assert store.get_into_ranges(
        [a.ptr, b.ptr],
        [["one", "two"], ["two", "one"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 17], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    ) == [[[4, 3], [5]], [[6], [4]]]
    assert a[0:24] == b"1234____cdefg_______HIJ_"
    assert b[0:20] == b"____abcdef______ABCD"
    assert store.get_into_ranges([a.ptr], [["one", "two"]], [[[0], []]], [[[0, 1], []]],
                                 [[[4, 4], []]]) == [[[INVALID, INVALID], []]]  # fmt: skip
    assert store.get_into_ranges([a.ptr], [["one"]], [[[0]]], [[[19]]], [[[4]]]) == [[[INVALID]]]
    assert store.get_into_ranges([a.ptr], [["one"]], [[[31]]], [[[0]]], [[[4]]]) == [[[INVALID]]]
    assert store.get_into_ranges([a.ptr], [["one"]], [[[0]]], [[[-1]]], [[[4]]]) == [[[INVALID]]]
    assert store.get_into_ranges(
        [a.ptr], [["none", "one"]], [[[0], [8]]], [[[0], [0]]], [[[4], [4]]]
    ) == [[[MISSING], [4]]]
    assert store.get_into_ranges([a.ptr, b.ptr], [["one"]], [[[0]]], [[[0]]], [[[4]]]) == [
        [[INVALID]]
    ]
    assert store.get_into_ranges([a.ptr], [["one"]], [[[0], [0]]], [[[0]]], [[[4]]]) == [
        [[INVALID]]
    ]


def test_put_get_session_ranges(store: MooncakeDistributedStore) -> None:
    """Layer by layer; nobody sees a value before all its layers are there."""
    layers, page, keys = 4, 4096, ["s0", "s1", "s2"]
    data = random.Random(2).randbytes(layers * page * len(keys))
    pool, target = Pool(store, len(data), data), Pool(store, len(data))
    size = layers * page
    assert store.batch_put_session_start(keys, [size] * 3) == [0, 0, 0]
    assert store.batch_put_session_start(["s0"], [size]) == [int(ErrorCode.REPLICA_IS_NOT_READY)]
    for layer in range(layers):
        places = [[pool.ptr + i * size + layer * page] for i in range(3)]
        assert (
            store.batch_put_from_multi_buffer_ranges(
                keys, places, [[page]] * 3, [[layer * page]] * 3
            )
            == [page] * 3
        )
        assert store.batch_is_exist(keys) == [0, 0, 0]
    assert store.batch_put_from_multi_buffer_ranges(
        ["s0"], [[pool.ptr]], [[page]], [[size - 1]]
    ) == [INVALID]
    assert store.batch_put_from_multi_buffer_ranges(["other"], [[pool.ptr]], [[page]], [[0]]) == [
        INVALID
    ]
    assert store.batch_put_from_multi_buffer_ranges(["s0"], [[pool.ptr]], [[page, 1]], [[0]]) == [
        INVALID
    ]
    assert store.batch_put_session_end([*keys, "other"]) == [0, 0, 0, MISSING]
    assert store.get("s1") == data[size : 2 * size]
    assert store.batch_get_session_start([*keys, "none"]) == [0, 0, 0, MISSING]
    for layer in range(layers):
        places = [[target.ptr + i * size + layer * page] for i in range(3)]
        assert (
            store.batch_get_into_multi_buffer_ranges(
                keys, places, [[page]] * 3, [[layer * page]] * 3
            )
            == [page] * 3
        )
    assert target[0 : len(data)] == data
    assert store.batch_get_into_multi_buffer_ranges(["none"], [[target.ptr]], [[1]], [[0]]) == [
        INVALID
    ]
    assert store.batch_get_into_multi_buffer_ranges(["s0"], [[target.ptr]], [[1, 2]], [[0]]) == [
        INVALID
    ]
    assert store.batch_get_into_multi_buffer_ranges(
        ["s0"], [[target.ptr] * 2], [[1, 1]], [[0, size]]
    ) == [INVALID]
    assert store.batch_get_session_end(keys) == 0


def test_a_session_that_is_revoked_or_too_large_leaves_nothing(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.batch_put_session_start(["a", "b"], [100, 0]) == [0, INVALID]
    assert store.batch_put_session_revoke(["a", "b"]) == [0, MISSING]
    assert store.batch_put_session_end(["a"]) == [MISSING]
    monkeypatch.setattr("p2pkv.adapters.mooncake.sessions.STAGED_BYTES_MAX", 100)
    assert store.batch_put_session_start(["a", "b"], [60, 60]) == [0, -200]
    assert store.batch_put_session_revoke(["a"]) == [0]
    assert store.batch_put_session_start(["b"], [60]) == [0]


def test_host_memory_by_address() -> None:
    allocator = MooncakeHostMemAllocator()
    ptr = allocator.alloc(10_000)
    assert ptr % 4096 == 0
    ctypes.memset(ptr, 1, 10_000)
    allocator.free(ptr)
    allocator.free(ptr)
    assert allocator.alloc(0) == allocator.alloc(1 << 60) == 0


# -- tensors


def tensors() -> list[Any]:
    rng = np.random.default_rng(3)
    return [
        rng.standard_normal((4, 6)).astype(np.float32),
        rng.integers(0, 255, (3, 5, 7)).astype(np.uint8),
        np.asfortranarray(rng.standard_normal((8, 2))),
    ]


def test_put_get_tensor(store: MooncakeDistributedStore) -> None:
    keys = ["t0", "t1", "t2"]
    assert store.batch_put_tensor(keys, tensors()) == [0, 0, 0]
    for got, put in zip(store.batch_get_tensor([*keys, "none"]), [*tensors(), None], strict=True):
        np.testing.assert_array_equal(got, put)
    assert store.put_tensor("t0", tensors()[1]) == 0
    np.testing.assert_array_equal(store.get_tensor("t0"), tensors()[0])
    assert store.upsert_tensor("t0", tensors()[1]) == 0
    np.testing.assert_array_equal(store.get_tensor("t0"), tensors()[1])
    assert store.pub_tensor("t3", tensors()[0], ReplicateConfig()) == 0
    assert store.batch_pub_tensor(["t4"], tensors()[:1]) == [0]
    assert store.upsert_pub_tensor("t4", tensors()[1]) == 0
    assert store.batch_upsert_pub_tensor(["t4"], tensors()[2:]) == [0]
    assert store.batch_upsert_tensor(["t4"], tensors()[2:]) == [0]
    assert store.put_tensor("bad", "no tensor") == INVALID
    assert store.batch_put_tensor(["a", "b"], tensors()) == [INVALID, INVALID]
    store.put("bytes", b"no tensor")
    assert store.get_tensor("bytes") is None


def test_tensors_in_registered_memory(store: MooncakeDistributedStore) -> None:
    (tensor, *_) = tensors()
    assert store.put_tensor("t", tensor) == 0
    size = store.get_size("t")
    pool = Pool(store, 4096)
    over = store.get_tensor_into("t", pool.ptr, 4096)
    np.testing.assert_array_equal(over, tensor)
    assert pool.ptr <= over.ctypes.data < pool.ptr + 4096
    over[0, 0] = 7
    assert store.put_tensor_from("copy", pool.ptr, size) == 0
    assert store.get_tensor("copy")[0, 0] == 7
    assert store.upsert_tensor_from("copy", pool.ptr, size) == 0
    assert store.put_tensor_from("bad", pool.ptr, size - 1) == INVALID
    assert store.put_tensor_from("bad", pool.ptr + 1, size) == INVALID
    assert store.get_tensor_into("t", pool.ptr, 8) is None
    assert store.get_tensor_into("none", pool.ptr, 4096) is None
    out = np.zeros_like(tensor)
    assert store.get_tensor_into_cuda("t", out) == 0
    np.testing.assert_array_equal(out, tensor)
    assert store.get_tensor_into_cuda("none", out) == MISSING
    assert store.get_tensor_into_cuda("t", np.zeros(3)) == INVALID


def test_tp_single_tensor_and_batch(store: MooncakeDistributedStore) -> None:
    tensor = np.arange(4 * 10, dtype=np.float32).reshape(4, 10)
    assert store.put_tensor_with_tp("w", tensor, tp_size=4, split_dim=1) == 0
    assert all(store.is_exist(f"w_tp_{rank}") for rank in range(4))
    shards = [store.get_tensor_with_tp("w", rank, 4, 1) for rank in range(4)]
    assert [shard.shape for shard in shards] == [(4, 3), (4, 3), (4, 3), (4, 1)]
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), tensor)
    assert store.batch_put_tensor_with_tp(["a", "b"], [tensor, tensor], 0, 2) == [0, 0]
    np.testing.assert_array_equal(store.batch_get_tensor_with_tp(["a", "b"], 1, 2)[1], tensor[2:])
    assert store.put_tensor_with_tp("whole", tensor) == 0
    np.testing.assert_array_equal(store.get_tensor_with_tp("whole"), tensor)
    assert store.put_tensor_with_tp("w", tensor, tp_size=4, split_dim=2) == INVALID
    assert store.put_tensor_with_tp("w", tensor, tp_size=9) == INVALID
    assert store.batch_pub_tensor_with_tp(["a"], []) == [INVALID]
    pool = Pool(store, 4096)
    np.testing.assert_array_equal(
        store.get_tensor_with_tp_into("a", pool.ptr, 4096, 0, 2), tensor[:2]
    )
    (got,) = store.batch_get_tensor_with_tp_into(["b"], [pool.ptr], [4096], 0, 2)
    np.testing.assert_array_equal(got, tensor[:2])


# -- copies


def test_replica_descriptors(store: MooncakeDistributedStore, cluster: Cluster) -> None:
    store.put("k", b"x" * 100)
    found = store.batch_get_replica_desc(["k", "none"])
    assert found["none"] == []
    (replica,) = found["k"]
    assert replica.status is ReplicaStatus.COMPLETE
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    assert not replica.is_local_disk_replica()
    buffer = replica.get_memory_descriptor().buffer_descriptor
    assert buffer.size == 100
    assert buffer.transport_endpoint in ("n0", "n1")
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()


def test_batch_replica_clear(store: MooncakeDistributedStore) -> None:
    keys = [f"k{i}" for i in range(40)]
    store.put_batch(keys, [b"x"] * 40)
    places = {
        key: replicas[0].memory.buffer_descriptor.transport_endpoint
        for key, replicas in store.batch_get_replica_desc(keys).items()
    }
    theirs = [key for key in keys if places[key] == "n1"]
    assert 0 < len(theirs) < 40
    assert store.batch_replica_clear([*keys, "none"], "n1") == theirs
    assert store.batch_is_exist(keys) == [int(key not in theirs) for key in keys]
    assert store.batch_replica_clear(keys, "nobody") == []
    assert sorted(store.batch_replica_clear(keys)) == sorted(set(keys) - set(theirs))


def test_tasks_are_refused(store: MooncakeDistributedStore) -> None:
    assert store.create_copy_task("k", ["n1"])[1] == INVALID
    assert store.create_move_task("k", "n0", "n1")[1] == INVALID
    assert store.query_task((1, 2)) == (None, MISSING)
    assert store.get_offload_rpc_read_count() == 0
    assert store.unmount_local_disk_segment() == 0


# -- memory that a program gives


@pytest.fixture
def own(etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster without any node."""
    with Cluster(0, etcd=etcd) as cluster:
        for name, value in environ_of(cluster).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("P2PKV_BUCKET_COUNT", "64")
        yield cluster


def test_a_store_that_gives_memory_is_a_node_until_it_is_closed(
    own: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PKV_NODE_ID", "worker")
    store = MooncakeDistributedStore()
    assert store.setup(config("64MB")) == 0
    (name,) = own.view().nodes
    assert name == "worker-engine-0"
    assert store.get_hostname().startswith("localhost:")
    assert store.put("k", b"x" * 100_000) == 0
    assert store.get("k") == b"x" * 100_000
    assert store.close() == 0
    assert own.view().nodes == {}
    assert not any(t.name.startswith("p2pkv") for t in threading.enumerate())
    assert store.setup(config("64MB")) == 0
    assert store.get("k") == b""
    assert store.put("k", b"again") == 0
    assert store.close() == 0


def test_what_lies_on_a_store_that_is_closed_goes_to_the_others(own: Cluster) -> None:
    first, second = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert first.setup(config("64MB")) == 0
    assert second.setup(config("32MB")) == 0
    names = sorted(own.view().nodes)
    assert [name.rpartition("-")[2] for name in names] == ["0", "1"]
    assert [own.view().nodes[name].weight for name in names] == [0.0625, 0.03125]
    wait_for(lambda: own.owned(names[1]) > 0, "the second has no bucket")
    keys = [f"k{i}" for i in range(100)]
    assert first.put_batch(keys, [b"x" * 1000] * 100) == 0
    assert first.close() == 0
    assert second.batch_is_exist(keys) == [1] * 100
    assert second.close() == 0


def test_segments_are_given_and_taken_back(own: Cluster) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(config("32MB")) == 0
    given = store.allocate_and_mount_segment(32 << 20)
    assert (given["ret"], given["allocated_size"]) == (0, 32 << 20)
    assert len(own.view().nodes) == 2
    assert store.unmount_and_free_segment(["unknown"]) == INVALID
    assert store.unmount_and_free_segment(given["segment_ids"]) == 0
    assert len(own.view().nodes) == 1
    assert store.mount_segment("/dev/null", 4096) == {"ret": INVALID, "segment_ids": []}
    assert store.close() == 0


def test_memory_cannot_be_given_without_etcd(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("P2PKV_ETCD__ENDPOINTS")
    monkeypatch.setenv("P2PKV_SEEDS", cluster.endpoint("n0"))
    store = MooncakeDistributedStore()
    assert store.setup(config("64MB")) == INVALID
    store.close()
    assert store.setup(config(0)) == 0
    store.close()


# -- faults


def test_stopped_nodes_are_misses_soon_and_their_causes_are_told_once(
    store: MooncakeDistributedStore, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"k{i}" for i in range(64)]
    pool = Pool(store, 64 * 100, b"x" * 6400)
    pointers = [pool.ptr + i * 100 for i in range(64)]
    assert store.batch_put_from(keys, pointers, [100] * 64) == [0] * 64
    try:
        for node in cluster:
            node.pause()
        for _ in range(3):
            assert store.batch_is_exist(keys) == [0] * 64
        begin = time.perf_counter()
        for _ in range(20):
            assert store.batch_is_exist(keys) == [0] * 64
            assert store.get("k0") == b""
            codes = store.batch_get_into(keys, pointers, [100] * 64)
            assert set(codes) <= {int(ErrorCode.RPC_FAIL), int(ErrorCode.RPC_TIMEOUT)}
            assert store.put("new", b"x") in codes
        assert (time.perf_counter() - begin) / 80 < 0.02
        assert store.health_check() == 2
        told = [r for r in caplog.records if r.name == "p2pkv.adapters.mooncake"]
        assert 0 < len([r for r in told if r.getMessage().startswith("get: ")]) <= 2
    finally:
        for node in cluster:
            node.resume()
    wait_for(lambda: store.batch_is_exist(keys) == [1] * 64, "the nodes are not asked again")
    assert store.batch_get_into(keys, pointers, [100] * 64) == [100] * 64


def test_a_value_that_is_overwritten_is_read_whole_and_is_never_missing(
    store: MooncakeDistributedStore,
) -> None:
    size, stop, wrong = 1 << 20, threading.Event(), list[bytes]()
    store.put("k", b"a" * size)

    def write() -> None:
        letters = b"abcdefgh"
        i = 0
        while not stop.is_set():
            i += 1
            assert store.upsert("k", letters[i % 8 : i % 8 + 1] * size) == 0

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(100):
        value = store.get("k")
        if len(value) != size or value.count(value[:1]) != size:
            wrong.append(value[:10])
    stop.set()
    writer.join(30)
    assert wrong == []


def test_a_miss_can_be_explained_and_hits_are_counted(store: MooncakeDistributedStore) -> None:
    store.put("k", b"x")
    assert store.why_miss("k") == "present: it is there now"
    assert store.why_miss("none").startswith("never stored: ")
    store.remove("k")
    assert store.why_miss("k").startswith("deleted: ")
    assert store.why_miss("").startswith("InvalidArgument: key: is empty")
    before = store.figures()["misses_total"]
    store.batch_is_exist(["k", "none"])
    assert store.figures()["misses_total"] == before + 2
    unused = MooncakeDistributedStore()
    assert unused.figures() == {}
    assert unused.why_miss("k").startswith("NotSetUp: ")


# -- the shim


PROGRAM = """
import multiprocessing, sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

def child(queue):
    from mooncake.store import MooncakeDistributedStore as Again
    store = Again()
    code = store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:50051")
    queue.put((Again.__module__, code, store.get("from the parent")))

if __name__ == "__main__":
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:50051") == 0
    assert store.put("from the parent", b"value", ReplicateConfig()) == 0
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    module, code, value = queue.get(timeout=60)
    process.join(60)
    import mooncake
    print(module, code, value.decode(), end=" ")
    if "--other" in sys.argv:
        from mooncake.other import NAME
        print(NAME)
    store.close()
    sys.exit(7)
"""


@pytest.mark.parametrize("installed", [False, True], ids=["not installed", "installed"])
def test_programs_run_unchanged_behind_the_shim(
    cluster: Cluster, tmp_path: Path, installed: bool
) -> None:
    """Also the processes that they spawn, and whether a package ``mooncake`` is there or not."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("P2PKV_")}
    if installed:
        package = tmp_path / "site" / "mooncake"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('not this one')")
        (package / "store.py").write_text("raise ImportError('not this one')")
        (package / "other.py").write_text("NAME = 'other'")
        places = [environ.get("PYTHONPATH", ""), str(package.parent)]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", "p2pkv.cli", "mooncake-shim", "--cluster", cluster.name]
    command += ["--etcd-endpoints", cluster.etcd.endpoints[0], "--"]
    command += [sys.executable, str(tmp_path / "program.py")] + ["--other"] * installed
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    expected = "p2pkv.adapters.mooncake.store 0 value"
    assert done.stdout.strip() == expected + " other" * installed, done.stderr
    assert done.returncode == 7


def test_a_program_that_is_not_there_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "p2pkv.cli", "mooncake-shim", "--", "no-such-program"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no-such-program: No such file" in done.stderr


def test_logging_is_left_to_the_program() -> None:
    assert logging.getLogger("p2pkv.adapters.mooncake").handlers == []
