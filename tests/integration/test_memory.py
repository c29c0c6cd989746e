"""A node that is full: what a put evicts, what it must not, and what pins do about it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import KINDS, client_of, figure

from p2pkv import BatchError, OutOfMemory, QuotaExceeded, TooLarge
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

MiB = 1 << 20


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    """One node of 64 MiB; a quarter of it may be pinned."""
    with Cluster(1, etcd=etcd) as cluster:
        yield cluster


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Any]:
    with client_of(request.param, cluster) as kv:
        yield kv
        kv.delete_range("")


def fill(kv: Any, count: int, begin: int = 0) -> None:
    for i in range(begin, begin + count):
        assert kv.put(f"fill/{i}", bytes([i % 251]) * MiB) == 1


def push_out(kv: Any, key: str) -> None:
    """Put until the key is evicted; one that was just read stays while its bytes are on the way."""

    def gone() -> bool:
        fill(kv, 100)
        return not kv.exists(key)

    wait_for(gone, f"{key} is evicted", 10)


def test_a_full_node_accepts_every_put(kv: Any) -> None:
    """200 MiB into 64 MiB; asking for what is there changes nothing about that."""
    fill(kv, 200)
    keys = [f"fill/{i}" for i in range(200)]
    there = kv.batch_exists(keys)
    assert 55 <= sum(there) <= 64
    assert there == sorted(there), "the oldest went first"
    assert kv.match_prefix(keys[-50:]) == 50
    fill(kv, 200, 200)
    assert 55 <= sum(kv.batch_exists([f"fill/{i}" for i in range(400)])) <= 64
    assert kv.get("fill/399") == bytes([399 % 251]) * MiB


def test_asking_for_existence_is_no_use(kv: Any) -> None:
    fill(kv, 50)
    for _ in range(3):
        assert kv.exists("fill/0")
        assert kv.match_prefix(["fill/0"]) == 1
    fill(kv, 30, 50)
    assert not kv.exists("fill/0")


def test_a_get_is_a_use(kv: Any) -> None:
    fill(kv, 50)
    assert kv.get("fill/0") == bytes(MiB)
    assert kv.prefetch(["fill/1"]) == 1
    fill(kv, 30, 50)
    assert kv.batch_exists(["fill/0", "fill/1", "fill/2"]) == [True, True, False]


def test_a_batch_larger_than_the_node_is_accepted(kv: Any) -> None:
    values = {f"b{i}": bytes([i]) * MiB for i in range(100)}
    assert kv.batch_put(values, timeout=20) == [1] * 100
    found = kv.batch_get(list(values), timeout=20)
    assert sum(value is not None for value in found) >= 45
    assert all(f in (None, v) for f, v in zip(found, values.values(), strict=True))


def test_soft_pinned_objects_go_last(kv: Any) -> None:
    kv.put("soft", b"s" * MiB, soft_pin=True)
    fill(kv, 200)
    assert kv.get("soft") == b"s" * MiB


def test_soft_pinned_objects_go_when_nothing_else_is_left(kv: Any) -> None:
    for i in range(100):
        assert kv.put(f"soft{i}", bytes(MiB), soft_pin=True) == 1
    assert kv.exists("soft99")
    assert not kv.exists("soft0")


def test_hard_pinned_objects_never_go(kv: Any) -> None:
    kv.put("hard", b"h" * MiB, hard_pin=True)
    fill(kv, 200)
    assert kv.get("hard") == b"h" * MiB


def test_hard_pins_stop_at_the_quota_and_change_nothing_beyond(kv: Any) -> None:
    """16 MiB, headers included."""
    for i in range(15):
        assert kv.put(f"hard{i}", bytes(MiB), hard_pin=True) == 1
    with pytest.raises(QuotaExceeded):
        kv.put("hard15", bytes(MiB), hard_pin=True)
    assert not kv.exists("hard15")
    assert kv.put("plain", bytes(MiB)) == 1
    kv.delete("hard0")
    assert kv.put("hard15", bytes(MiB), hard_pin=True) == 1


def test_a_pin_keeps_a_key_until_it_is_taken_back(kv: Any) -> None:
    kv.put("pinned", b"p" * MiB)
    assert kv.pin(["pinned"], ttl=600) == [True]
    fill(kv, 100)
    assert kv.get("pinned") == b"p" * MiB
    assert kv.unpin(["pinned"]) == [True]
    push_out(kv, "pinned")


def test_a_pin_ends_with_its_time(kv: Any) -> None:
    kv.put("pinned", b"p" * MiB)
    kv.pin(["pinned"], ttl=0.2)
    wait_for(lambda: figure(kv, "pins") == 0, "the pin ends")
    push_out(kv, "pinned")


def test_unpin_takes_back_the_pin_of_a_put(kv: Any) -> None:
    kv.put("hard", bytes(MiB), hard_pin=True)
    assert kv.unpin(["hard"]) == [True]
    push_out(kv, "hard")


def test_pins_beyond_the_quota_fail_for_their_keys_only(kv: Any) -> None:
    fill(kv, 30)
    keys = [f"fill/{i}" for i in range(30)]
    with pytest.raises(BatchError) as error:
        kv.pin(keys)
    results = error.value.results
    assert results[:15] == [True] * 15
    assert all(isinstance(r, QuotaExceeded) for r in results[15:])
    kv.unpin(keys)


def test_two_clients_pins_of_one_key_are_two(kv: Any, cluster: Cluster) -> None:
    kv.put("pinned", bytes(MiB))
    with cluster.client() as other:
        other.pin(["pinned"])
        kv.pin(["pinned"])
        kv.unpin(["pinned"])
        fill(kv, 100)
        assert kv.exists("pinned")
        other.unpin(["pinned"])
        push_out(kv, "pinned")


def test_a_value_larger_than_the_node_is_too_large(kv: Any) -> None:
    kv.put("there", b"1")
    with pytest.raises(TooLarge, match="larger than its node's memory"):
        kv.put("large", bytes(64 * MiB + 1), timeout=20)
    with pytest.raises(TooLarge, match="larger than its node's memory"):
        kv.put("large", bytes(64 * MiB), timeout=20)
    assert kv.get("there") == b"1"


def test_where_nothing_can_be_evicted_a_put_is_out_of_memory(etcd: EtcdCluster) -> None:
    with (
        Cluster(1, etcd=etcd, memory_limit_bytes=8 * MiB, hard_pin_quota=1.0) as cluster,
        cluster.client() as kv,
    ):
        for i in range(7):
            kv.put(f"hard{i}", bytes(MiB), hard_pin=True)
        with pytest.raises(OutOfMemory):
            kv.put("more", bytes(2 * MiB))
        with pytest.raises(BatchError) as error:
            kv.batch_put({"fits": b"1", "more": bytes(2 * MiB)})
        assert error.value.results[0] == 1
        assert isinstance(error.value.results[1], OutOfMemory)
        kv.delete("hard0")
        kv.delete("hard1")
        assert kv.put("more", bytes(MiB)) == 1


def test_metadata_is_bounded_and_small_objects_evict_each_other(etcd: EtcdCluster) -> None:
    with (
        Cluster(1, etcd=etcd, metadata_limit_bytes=1 * MiB) as cluster,
        cluster.client() as kv,
    ):
        for begin in range(0, 10_000, 1000):
            assert sum(kv.batch_put({f"k{i}": b"" for i in range(begin, begin + 1000)})) == 1000
        assert figure(kv, "metadata_bytes") <= MiB
        assert 1000 <= figure(kv, "objects") <= MiB // 640
        assert kv.exists("k9999")


def test_readers_of_what_is_evicted_get_it_whole_or_not_at_all(cluster: Cluster) -> None:
    wrong: list[str] = []
    reads = [0]
    stop = threading.Event()

    def read() -> None:
        with cluster.client() as kv:
            while not stop.is_set():
                for i, value in enumerate(kv.batch_get([f"turn/{i}" for i in range(8)])):
                    reads[0] += value is not None
                    if value is not None and value.count(value[:1]) != MiB:
                        wrong.append(f"turn/{i}")

    reader = threading.Thread(target=read)
    reader.start()
    with cluster.client() as kv:
        i = 0
        while reads[0] < 400 and not wrong:
            kv.put(f"turn/{i % 8}", bytes([i % 251]) * MiB)
            kv.put(f"evicting/{i}", bytes(8 * MiB))
            i += 1
        stop.set()
        reader.join(30)
        kv.delete_range("")
    assert not wrong
