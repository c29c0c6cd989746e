"""Clients as objects: closing, forking, threads, connections, sessions, the near cache."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest
from support import KINDS, RawPeer, client_of, figure

from p2pkv import (
    AsyncClient,
    Client,
    ClosedClient,
    ConfigError,
    DeadlineExceeded,
    Unreachable,
    wire,
)
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for
from p2pkv.wire import Kind


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(2, etcd=etcd, session_ttl_s=1.0) as cluster:
        yield cluster


# -- where it can be used


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_client_says_so(cluster: Cluster, kind: str) -> None:
    with client_of(kind, cluster) as kv:
        kv.put("a", b"1")
        kv.close()
        with pytest.raises(ClosedClient):
            kv.get("a")
        kv.close()


async def test_a_close_ends_the_calls_under_way(cluster: Cluster) -> None:
    kv = cluster.async_client()
    calls = [asyncio.create_task(kv.put(f"k{i}", bytes(1 << 20))) for i in range(50)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await kv.close()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert 1 in results
    assert any(isinstance(r, Exception) for r in results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_process_is_told_to_make_its_own_client(cluster: Cluster, kind: str) -> None:
    """In a process of its own: forking one that has threads is nothing for a test run."""
    script = f"""
import asyncio, os, p2pkv
kv = p2pkv.{kind}({list(cluster.etcd.endpoints)!r}, cluster={cluster.name!r})
run = asyncio.new_event_loop().run_until_complete if {kind == "AsyncClient"} else lambda x: x
run(kv.put("fork", b"1"))
child = os.fork()
if not child:
    try:
        call = kv.get("fork")
        if {kind == "AsyncClient"}:
            call.send(None)
    except p2pkv.ForkedClient:
        kv.close()
        os._exit(77)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
assert run(kv.get("fork")) == b"1"
run(kv.close())
print("both are right")
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "both are right\n", done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_is_refused(cluster: Cluster, kind: str) -> None:
    kv = cluster.client() if kind == "Client" else cluster.async_client()
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(kv)
    if isinstance(kv, Client):
        kv.close()
    else:
        asyncio.run(kv.close())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_wants_seeds_or_etcd_and_not_both(kind: Any) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        kind()
    with pytest.raises(ConfigError, match="seeds"):
        kind(["http://127.0.0.1:1"], ["tcp://127.0.0.1:1"])


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_where_nobody_listens_are_unreachable_in_time(cluster: Cluster, kind: str) -> None:
    config = {"etcd": None, "seeds": ["tcp://127.0.0.1:1", "tcp://[::1]:1"]}
    with client_of(kind, cluster, **config) as kv:
        began = time.monotonic()
        with pytest.raises(Unreachable, match="no node gave the ring"):
            kv.get("a", timeout=0.7)
        assert 0.6 < time.monotonic() - began < 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_one_good_seed_is_enough(cluster: Cluster, kind: str) -> None:
    seeds = ["tcp://127.0.0.1:1", cluster.endpoint("n1")]
    with client_of(kind, cluster, etcd=None, seeds=seeds) as kv:
        assert kv.put("a", b"1") == 1
        assert len(kv.stats()) == 2


# -- threads


def test_eight_threads_use_one_client(cluster: Cluster) -> None:
    with cluster.client() as kv, ThreadPoolExecutor(8) as pool:
        begin = threading.Barrier(8)

        def work(number: int) -> int:
            begin.wait()
            for i in range(200):
                key, value = f"t{number}/{i % 10}", b"%d/%d" % (number, i) * (1 + i * 20)
                kv.put(key, value)
                assert kv.get(key) == value
                keys = [f"t{number}/{j}" for j in range(10)]
                assert kv.batch_get(keys)[i % 10] == value
            return number

        assert list(pool.map(work, range(8))) == list(range(8))


async def test_many_calls_at_once_share_one_asyncio_client(cluster: Cluster) -> None:
    async with cluster.async_client() as kv:
        puts = [kv.put(f"at once/{i}", b"%d" % i) for i in range(1000)]
        assert await asyncio.gather(*puts) == [1] * 1000
        values = await asyncio.gather(*[kv.get(f"at once/{i}") for i in range(1000)])
        assert values == [b"%d" % i for i in range(1000)]


async def test_a_cancelled_call_leaves_the_client_in_order(cluster: Cluster) -> None:
    async with cluster.async_client() as kv:
        await kv.put("large", bytes(8 << 20))
        for i in range(30):
            call = asyncio.create_task(
                kv.get("large") if i % 2 else kv.put("large", bytes(8 << 20))
            )
            other = asyncio.create_task(kv.get("large"))
            for _ in range(i % 5):
                await asyncio.sleep(0)
            call.cancel()
            assert await other == bytes(8 << 20)


def test_connections_max_bounds_the_sessions_of_a_client(cluster: Cluster) -> None:
    with Client.from_config(cluster.client_config(connections_max=2)) as kv:
        wait_for(lambda: sessions(kv) <= 4, "the sessions of other tests have ended")
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda i: kv.put(f"k{i}", b""), range(200))) == [1] * 200
            assert sessions(kv) <= 2 * (2 + 2 + 1)


def sessions(kv: Any) -> float:
    return figure(kv, "sessions")


def test_a_thread_that_gets_no_connection_in_time_is_told(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster:
        config = cluster.client_config(connections_max=1, timeout_s=0.5, path="zmq")
        with Client.from_config(config) as kv:
            kv.put("a", b"1")
            cluster["n0"].pause()
            with ThreadPoolExecutor(2) as pool:
                calls = [pool.submit(kv.get, "a", timeout=30.0) for _ in range(2)]
                refused, _ = wait(calls, return_when=FIRST_COMPLETED)
                with pytest.raises(DeadlineExceeded, match="connections_max = 1"):
                    refused.pop().result()
                cluster["n0"].resume()
            assert sum(call.exception() is None for call in calls) == 1
            assert kv.get("a") == b"1"


# -- sessions


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_was_idle_for_longer_than_its_session_goes_on(
    cluster: Cluster, kind: str
) -> None:
    with cluster.client() as other:
        wait_for(lambda: sessions(other) <= 4, "the sessions of other tests have ended")
        with client_of(kind, cluster) as kv:
            kv.batch_put({f"idle{i}": b"1" for i in range(50)})
            for call in (
                lambda: kv.get("idle0") == b"1",
                lambda: kv.put("idle1", b"2") == 1,
                lambda: kv.batch_get(["idle1", "idle2", "idle3"]) == [b"2", b"1", b"1"],
            ):
                wait_for(lambda: sessions(other) <= 4, "the client's sessions have ended")
                began = time.monotonic()
                assert call()
                assert time.monotonic() - began < 1.0


def test_what_a_session_had_allocated_is_taken_back_when_it_falls_silent(cluster: Cluster) -> None:
    key = cluster.key_of("n0")
    with cluster.client() as kv, RawPeer(cluster.endpoint("n0"), cluster.name) as peer:
        body = wire.Alloc([key.encode()], [1 << 20], wire.PutOptions())
        assert peer.ask(Kind.ALLOC, body).body.statuses == b""
        assert figure(kv, "allocations") == 1
        wait_for(lambda: figure(kv, "allocations") == 0, "the allocation is taken back")
        assert not kv.exists(key)


def test_a_token_keeps_a_value_that_is_overwritten_until_its_session_ends(cluster: Cluster) -> None:
    key = cluster.key_of("n0", prefix="token")
    with cluster.client() as kv, RawPeer(cluster.endpoint("n0"), cluster.name) as peer:
        kv.put(key, b"old" * 1000)
        token = peer.ask(Kind.OPEN, wire.Open([key.encode()])).body.tokens[0]
        kv.put(key, b"new" * 1000)
        assert figure(kv, "memory_retiring_bytes") > 0
        peer.send(wire.encode(Kind.READ, 2, 0, wire.Read(token, 0, 3000)))
        assert bytes(peer.receive()[1][0]) == b"old" * 1000
        wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "the old value goes")
        assert peer.ask(Kind.READ, wire.Read(token, 0, 3000)).kind == Kind.ERROR


# -- the near cache


@pytest.mark.parametrize("kind", KINDS)
def test_the_near_cache_serves_write_once_values_and_nothing_else(
    cluster: Cluster, kind: str
) -> None:
    with (
        client_of(kind, cluster) as plain,
        client_of(kind, cluster, near_cache_bytes=1 << 20) as kv,
    ):
        plain.put("once", b"1", write_once=True)
        plain.put("often", b"1")
        assert kv.batch_get(["once", "often"]) == [b"1", b"1"]
        before = figure(plain, "requests_get_total")
        assert kv.get("once") == b"1"
        assert figure(plain, "requests_get_total") == before
        plain.put("often", b"2")
        assert kv.get("often") == b"2"
        kv.delete("once")
        assert kv.get("once") is None
        plain.delete_range("")
