"""Reading by the index that a node publishes, and views of its memory, with real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import figure

from p2pkv import AsyncClient, Client, InvalidArgument, QuotaExceeded, _native
from p2pkv.errors import DeadlineExceeded, P2PKVError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.routing import ABSENT, ASK
from p2pkv.testing.cluster import FAST, Cluster, wait_for

pytestmark = pytest.mark.skipif(not _native.available, reason="the native extension is not built")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(1, etcd=etcd, view_quota_bytes=16 * MIB) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client
        client.delete_range(b"")


def shown(kv: Client, key: str) -> bool:
    """Whether the key is found without asking; what there was to be set up is."""
    kv.exists(key)
    return 1 in kv._ops._there([key.encode()])


def publish(kv: Client, values: dict[str, bytes]) -> None:
    kv.batch_put(values)
    for key in values:
        wait_for(lambda key=key: shown(kv, key), f"{key} in the index", 10)


def requests(kv: Client) -> float:
    return sum(v for k, v in _figures(kv).items() if k.startswith(("requests_get", "requests_exi")))


def _figures(kv: Client) -> dict[str, float]:
    (stats,) = kv.stats().values()
    return stats.figures


class TestReading:
    def test_reads_ask_nobody(self, kv: Client) -> None:
        values = {f"k{i}": os.urandom(10 * KIB) for i in range(10)}
        publish(kv, values)
        before = requests(kv)
        keys, buffer = list(values), bytearray(10 * KIB)
        for _ in range(5):
            assert kv.batch_get(keys) == list(values.values())
            assert kv.get_into("k3", buffer) == len(buffer)
            assert buffer == values["k3"]
            assert kv.batch_exists(keys) == [True] * 10
            assert kv.match_prefix(keys) == 10
        assert requests(kv) == before
        assert figure(kv, "index_hits_total") >= 100

    def test_misses_ask_nobody(self, kv: Client) -> None:
        publish(kv, {"a": b"1", "b": b"2"})
        told = figure(kv, "index_misses_total"), figure(kv, "misses_total")
        before, buffer = requests(kv), bytearray(8)
        assert kv.batch_exists(["a", "x", "b", "y"]) == [True, False, True, False]
        assert kv.match_prefix(["a", "b", "x", "a"]) == 2
        assert not kv.exists("x")
        assert kv.get("x") is None
        assert kv.get_into("x", buffer) is None
        assert kv.batch_get(["x", "a", "y"]) == [None, b"1", None]
        assert requests(kv) == before
        assert figure(kv, "index_misses_total") - told[0] == 2 + 1 + 1 + 1 + 1 + 2
        assert figure(kv, "misses_total") - told[1] == 4

    def test_a_bad_key_is_refused_beside_one_that_is_missing(self, kv: Client) -> None:
        publish(kv, {"a": b"1"})
        bad: list[Any] = ["x", 7]
        for call in (kv.batch_exists, kv.match_prefix, kv.batch_get):
            with pytest.raises(InvalidArgument, match="key"):
                call(bad)

    def test_what_the_index_does_not_tell_is_asked_for(self, kv: Client) -> None:
        long = "long" * 50
        publish(kv, {"a": b"1"})
        kv.put(long, b"2")
        assert kv.batch_get(["a", long, "none"]) == [b"1", b"2", None]
        assert kv.batch_exists([long, "a", "none"]) == [True, True, False]
        assert kv.match_prefix(["a", long, "none", "a"]) == 2
        assert figure(kv, "index_refused_objects") == 1

    def test_each_write_is_seen_by_all_once_it_is_acknowledged(
        self, cluster: Cluster, kv: Client
    ) -> None:
        with cluster.client() as other:
            publish(other, {"k": b"0"})
            for i in range(300):
                kv.put("k", b"%d" % i)
                assert other.get("k") == b"%d" % i
                if i % 10 == 0:
                    kv.delete("k")
                    assert other.get("k") is None
                    assert not other.exists("k")
                    assert other.match_prefix(["k"]) == 0
                kv.put(f"new{i}", b"1")
                assert other.exists(f"new{i}")
                assert other.get(f"new{i}") == b"1"

    def test_an_expired_key_is_not_read(self, kv: Client) -> None:
        publish(kv, {"k": b"1"})
        kv.expire("k", 0.05)
        wait_for(lambda: kv.get("k") is None, "k expired", 5)
        assert not kv.exists("k")

    def test_what_is_read_by_the_index_is_evicted_last(self, etcd: EtcdCluster) -> None:
        with Cluster(1, etcd=etcd, memory_limit_bytes=16 * MIB) as one, one.client() as kv:
            publish(kv, {f"k{i}": bytes(MIB) for i in range(12)})
            assert kv.get("k11") is not None  # it would be the first, as the end of its batch
            for i in range(5):
                kv.put(f"more{i}", bytes(MIB))
            assert kv.get("k11") is not None
            assert kv.get("k10") is None

    def test_a_node_without_an_index_is_asked(self, etcd: EtcdCluster) -> None:
        with Cluster(1, etcd=etcd, published_index=False) as one, one.client() as kv:
            for _ in range(5):
                kv.put("k", b"1")
                assert kv.get("k") == b"1"
            assert len(kv._ops.router.published) == 0


class TestOwnership:
    def test_after_a_sigkill_nothing_is_read_any_more(self, etcd: EtcdCluster) -> None:
        with Cluster(1, etcd=etcd) as one, one.client() as kv:
            publish(kv, {"k": b"old"})
            one["n0"].kill()
            with pytest.raises(P2PKVError):
                kv.get("k", timeout=0.2)
            one["n0"].start()
            assert kv.get("k", timeout=30) is None

    def test_a_stopped_node_is_not_read_when_another_may_own_its_buckets(
        self, etcd: EtcdCluster
    ) -> None:
        with Cluster(3, etcd=etcd) as three, three.client() as kv, three.client() as late:
            key = three.key_of("n1")
            missing = f"{{{key}}}missing".encode()  # of the same bucket
            publish(kv, {key: b"old"})
            publish(late, {key: b"old"})
            assert late._ops._there([missing]) == bytes([ABSENT])
            three["n1"].pause()
            try:
                assert late.get(key) == b"old"
                time.sleep(FAST["fence_after_s"])  # the rule is about this time
                assert late._ops._there([key.encode(), missing]) == bytes([ASK, ASK])
                deadline = time.monotonic() + 60
                while not _put(kv, key):
                    assert time.monotonic() < deadline
                for _ in range(100):
                    assert late.get(key, timeout=20) == b"new"
            finally:
                three["n1"].resume()
            for _ in range(100):
                assert late.get(key, timeout=20) == b"new"

    def test_values_are_read_right_while_their_buckets_move(self, etcd: EtcdCluster) -> None:
        with Cluster(1, etcd=etcd) as moving, moving.client(timeout=30) as kv:
            writer = moving.client(timeout=30)
            keys = [f"k{i}" for i in range(100)]
            publish(kv, dict.fromkeys(keys, b"0"))
            moving.add_node("n1")
            for i in range(1, 60):
                writer.batch_put(dict.fromkeys(keys, b"%d" % i))
                assert kv.batch_get(keys) == [b"%d" % i] * 100
                assert kv.match_prefix(keys) == 100
                writer.put(f"more{i}", b"1")
                assert kv.exists(f"more{i}")
            moving.wait_settled()
            writer.close()


def _put(kv: Client, key: str) -> bool:
    try:
        return bool(kv.put(key, b"new", timeout=1.0))
    except P2PKVError:
        return False


class TestViews:
    def test_a_view_is_the_value_whatever_becomes_of_its_key(self, kv: Client) -> None:
        value = os.urandom(MIB)
        publish(kv, {"k": value})
        view = kv.get("k", zero_copy=True)
        assert isinstance(view, memoryview)
        assert view.readonly
        kv.put("k", bytes(MIB))
        kv.delete("k")
        for i in range(200):  # three times the memory
            kv.put(f"fill{i}", os.urandom(MIB))
        assert view == value

    def test_views_lie_in_the_node_s_memory_and_a_miss_is_none(self, kv: Client) -> None:
        publish(kv, {"a": b"1" * 100, "b": b"", "c": b"3" * 300})
        kv.batch_get(["a"], zero_copy=True)
        views = kv.batch_get(["a", "none", "b", "c"], zero_copy=True)
        assert [v if v is None else bytes(v) for v in views] == [b"1" * 100, None, b"", b"3" * 300]
        assert figure(kv, "requests_open_total") >= 2

    def test_released_views_give_the_memory_back(self, kv: Client) -> None:
        publish(kv, {"k": bytes(MIB)})
        view = kv.get("k", zero_copy=True)
        part = view[10:20]
        kv.delete("k")
        del view
        gc.collect()
        assert figure(kv, "memory_retiring_bytes") >= MIB, "a part is still held"
        part.release()
        wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "memory given back", 10)

    def test_views_over_the_quota_are_refused_and_others_not(self, kv: Client) -> None:
        publish(kv, {f"k{i}": bytes(4 * MIB) for i in range(5)})
        views = [kv.get(f"k{i}", zero_copy=True) for i in range(3)]
        with pytest.raises(QuotaExceeded, match="view_quota_bytes"):
            kv.get("k3", zero_copy=True)
        assert kv.get("k3") == bytes(4 * MIB)
        views.clear()
        assert kv.get("k3", zero_copy=True) == bytes(4 * MIB)

    def test_the_views_of_a_killed_client_go(self, cluster: Cluster, kv: Client) -> None:
        publish(kv, {"k": bytes(MIB)})
        endpoints = ",".join(cluster.etcd.endpoints)
        child = subprocess.Popen(
            [sys.executable, "-c", _VIEWER, endpoints, cluster.name], stdout=subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"viewing\n"
            kv.delete("k")
            assert figure(kv, "memory_retiring_bytes") >= MIB
            child.send_signal(signal.SIGKILL)
            wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "views reaped", 10)
        finally:
            child.kill()
            child.wait(10)

    def test_views_outlive_their_client(self, cluster: Cluster, kv: Client) -> None:
        value = os.urandom(MIB)
        publish(kv, {"k": value})
        with cluster.client() as other:
            other.exists("k")
            other.exists("k")
            view = other.get("k", zero_copy=True)
        kv.delete("k")
        for i in range(100):
            kv.put(f"fill{i}", os.urandom(MIB))
        assert view == value
        del view
        wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "memory given back", 10)

    @pytest.mark.parametrize("path", ["tcp", "zmq"])
    def test_without_shared_memory_a_view_is_of_a_copy(
        self, cluster: Cluster, kv: Client, path: str
    ) -> None:
        publish(kv, {"k": b"value" * 1000})
        with cluster.client(path=path) as other:
            for _ in range(3):
                view = other.get("k", zero_copy=True)
                assert isinstance(view, memoryview)
                assert (bytes(view), view.readonly) == (b"value" * 1000, True)
                assert other.get("none", zero_copy=True) is None


async def _shared(kv: AsyncClient, key: str) -> None:
    """Until the client has the memory mapped."""
    async with asyncio.timeout(10):
        while 1 not in kv._ops._there([key.encode()]):
            await kv.exists(key)
            await asyncio.sleep(0.01)


async def _view(kv: AsyncClient, key: str) -> memoryview:
    await _shared(kv, key)
    view = await kv.get(key, zero_copy=True)
    assert isinstance(view, memoryview)
    return view


class TestViewsOfAnEventLoop:
    async def test_a_view_is_the_value_whatever_becomes_of_its_key(
        self, cluster: Cluster, kv: Client
    ) -> None:
        value = os.urandom(MIB)
        kv.put("k", value)
        async with cluster.async_client() as other:
            view = await _view(other, "k")
            assert view.readonly
            await other.put("k", bytes(MIB))
            await other.delete("k")
            for i in range(100):
                await other.put(f"fill{i}", os.urandom(MIB))
            assert view == value

    async def test_a_batch_is_in_order_and_a_miss_is_none(
        self, cluster: Cluster, kv: Client
    ) -> None:
        kv.batch_put({"a": b"1" * 100, "b": b"", "c": b"3" * 300})
        async with cluster.async_client() as other:
            await _shared(other, "a")
            opened = figure(kv, "requests_open_total")
            views = await other.batch_get(["a", "none", "b", "c"], zero_copy=True)
            assert [v if v is None else bytes(v) for v in views] == [
                b"1" * 100, None, b"", b"3" * 300,
            ]  # fmt: skip
            assert figure(kv, "requests_open_total") == opened + 1

    async def test_views_give_the_memory_back_also_after_their_client_is_closed(
        self, cluster: Cluster, kv: Client
    ) -> None:
        value = os.urandom(MIB)
        kv.put("k", value)
        async with cluster.async_client() as other:
            view = await _view(other, "k")
        kv.delete("k")
        for i in range(100):
            kv.put(f"fill{i}", os.urandom(MIB))
        assert view == value
        assert figure(kv, "memory_retiring_bytes") >= MIB
        view.release()
        del view
        wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "memory given back", 10)

    async def test_views_over_the_quota_are_refused(self, cluster: Cluster, kv: Client) -> None:
        kv.batch_put({f"k{i}": bytes(4 * MIB) for i in range(5)})
        async with cluster.async_client() as other:
            views = [await _view(other, f"k{i}") for i in range(3)]
            with pytest.raises(QuotaExceeded, match="view_quota_bytes"):
                await other.get("k3", zero_copy=True)
            views.clear()
            assert await other.get("k3", zero_copy=True) == bytes(4 * MIB)

    async def test_a_node_that_does_not_answer_holds_up_nothing_else(
        self, cluster: Cluster, kv: Client
    ) -> None:
        kv.put("k", b"value" * 1000)
        async with cluster.async_client() as other:
            before = await _view(other, "k")
            cluster["n0"].pause()
            try:
                asked = [
                    asyncio.create_task(other.get("k", zero_copy=True, timeout=0.5))
                    for _ in range(4)
                ]
                asked[0].cancel()
                longest, last = 0.0, time.monotonic()
                while not all(task.done() for task in asked):
                    await asyncio.sleep(0.005)
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()
                assert longest < 0.4, "the loop stood still"
                for task in asked[1:]:
                    assert isinstance(task.exception(), DeadlineExceeded)
            finally:
                cluster["n0"].resume()
            assert before == b"value" * 1000
            assert await other.get("k", zero_copy=True, timeout=20) == b"value" * 1000

    async def test_what_a_call_asked_for_that_was_cancelled_is_given_back(
        self, cluster: Cluster, kv: Client
    ) -> None:
        kv.put("k", bytes(MIB))
        async with cluster.async_client() as other:
            await _shared(other, "k")
            for _ in range(20):
                asked = asyncio.create_task(other.get("k", zero_copy=True))
                await asyncio.sleep(0)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            assert len(await _view(other, "k")) == MIB
            kv.delete("k")
            gc.collect()
            await asyncio.to_thread(
                wait_for, lambda: figure(kv, "memory_retiring_bytes") == 0, "memory given back", 10
            )

    @pytest.mark.parametrize("path", ["tcp", "zmq"])
    async def test_without_shared_memory_a_view_is_of_a_copy(
        self, cluster: Cluster, kv: Client, path: str
    ) -> None:
        kv.put("k", b"value" * 1000)
        async with cluster.async_client(path=path) as other:
            for _ in range(3):
                view = await other.get("k", zero_copy=True)
                assert isinstance(view, memoryview)
                assert (bytes(view), view.readonly) == (b"value" * 1000, True)
                assert await other.get("none", zero_copy=True) is None


_VIEWER = """
import sys, time
from p2pkv import Client
kv = Client(sys.argv[1].split(","), cluster=sys.argv[2])
kv.exists("k"), kv.exists("k")
view = kv.get("k", zero_copy=True)
assert kv._ops.router.published and len(view) == 1 << 20
print("viewing", flush=True)
time.sleep(60)
"""
