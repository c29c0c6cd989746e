from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pkv import EtcdConfig, Node, NodeConfig, NodeThread, figures
from p2pkv.errors import AuthorityUnavailable, ClosedClient, ForkedClient, P2PKVError, TooLarge
from p2pkv.etcd_server import EtcdCluster
from p2pkv.hosted import LoopDriver
from p2pkv.routing import Operation, Pause


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster(1) as cluster:
        yield cluster


def config_of(etcd: EtcdCluster, cluster: str, node: str = "n") -> NodeConfig:
    return NodeConfig(
        cluster=cluster,
        node_id=node,
        bucket_count=16,
        memory_limit_bytes=16 << 20,
        etcd=EtcdConfig(endpoints=etcd.endpoints),
    )


def test_a_blocking_program_hosts_a_node_and_uses_it_from_any_thread(etcd: EtcdCluster) -> None:
    with NodeThread(config_of(etcd, "threads")) as node:
        kv = node.client(timeout=10)

        def work(i: int) -> bool:
            key, value = f"k{i}", b"v" * i * 1000
            kv.put(key, value)
            return kv.get(key) == value

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(40)))
        assert len(list(kv.scan_keys())) == 40
        with pytest.raises(TooLarge):
            kv.put("k" * 5000, b"")
        assert node.node.stats().figures["objects"] == 40


def test_a_stopped_node_says_so_and_its_thread_is_gone(etcd: EtcdCluster) -> None:
    node = NodeThread(config_of(etcd, "stopped"))
    with pytest.raises(ClosedClient, match="not running"):
        node.client()
    node.stop()
    node.start()
    kv = node.client()
    kv.put("k", b"v")
    node.stop()
    node.stop()
    assert not any(t.name == "p2pkv-node" for t in threading.enumerate())
    with pytest.raises(ClosedClient, match="has stopped"):
        kv.get("k")
    with pytest.raises(ClosedClient):
        node.drain()


def test_a_call_that_waits_while_the_node_stops_ends(etcd: EtcdCluster) -> None:
    node = NodeThread(config_of(etcd, "waiting"))
    node.start()
    kv = node.client(timeout=60)
    started = threading.Event()

    def waits() -> Operation[None]:
        started.set()
        yield Pause(60_000_000_000)

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(kv._driver.run, waits())
        assert started.wait(10)
        node.stop()
        with pytest.raises(ClosedClient, match="has stopped"):
            call.result(10)


def test_calls_that_race_with_the_end_get_an_answer_or_a_clear_error(etcd: EtcdCluster) -> None:
    node = NodeThread(config_of(etcd, "race"))
    node.start()
    kv = node.client(timeout=5)
    ended: list[BaseException] = []

    def calls() -> None:
        try:
            while True:
                kv.put("k", b"v")
        except BaseException as e:
            ended.append(e)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    node.stop()
    for thread in threads:
        thread.join(15)
    assert len(ended) == 4
    assert all(isinstance(e, P2PKVError) for e in ended), ended


def test_an_own_node_cannot_be_waited_for_on_its_own_loop(etcd: EtcdCluster) -> None:
    with NodeThread(config_of(etcd, "own-loop")) as node:
        kv = node.client()

        async def blocking() -> None:
            kv.get("k")

        with pytest.raises(RuntimeError, match="would wait for itself"):
            node._call(blocking)
        assert kv.get("k") is None


def test_a_fork_cannot_use_the_parents_node(etcd: EtcdCluster) -> None:
    with NodeThread(config_of(etcd, "fork")) as node:
        kv = node.client()
        assert isinstance(kv._driver, LoopDriver)
        kv._driver._pid += 1  # what a forked process sees
        with pytest.raises(ForkedClient):
            kv.get("k")


def test_a_node_that_cannot_start_raises_and_leaves_no_thread() -> None:
    etcd = EtcdConfig(endpoints=("http://127.0.0.1:1",), total_timeout_s=0.3, attempt_timeout_s=0.1)
    node = NodeThread(NodeConfig(node_id="n", etcd=etcd, memory_limit_bytes=1 << 20))
    with pytest.raises(AuthorityUnavailable):
        node.start()
    assert not any(t.name == "p2pkv-node" for t in threading.enumerate())


def test_draining_gives_everything_to_the_others(etcd: EtcdCluster) -> None:
    with NodeThread(config_of(etcd, "drain", "a")) as first:
        kv = first.client()
        kv.batch_put({f"k{i}": b"%d" % i for i in range(100)})
        with NodeThread(config_of(etcd, "drain", "b")) as second:
            assert first.drain(30)
            assert first.node.stats().figures["buckets_owned"] == 0
            there = second.client()
            assert there.batch_get([f"k{i}" for i in range(100)]) == [b"%d" % i for i in range(100)]


async def test_the_figures_are_named_by_unit_and_tell_what_was_done(etcd: EtcdCluster) -> None:
    async with Node(config_of(etcd, "figures")) as node:
        kv = node.client()
        await kv.put("k", b"12345")
        await kv.get("k")
        await kv.get("none")
        await kv.delete("k")
        stats = figures.collect(node)
    assert stats.member == node.member
    assert {"version", "endpoint", "host", "zone", "arena", "planner", "serving"} <= set(
        stats.labels
    )
    expected = {
        "puts_total": 1, "put_bytes_total": 5, "hits_total": 1, "misses_total": 1, "objects": 0,
        "objects_deleted_total": 1, "requests_put_total": 1, "requests_get_total": 2,
        "requests_delete_total": 1, "buckets_owned": 16, "memory_limit_bytes": 16 << 20,
        "buckets_taken_away_total": 0, "allocations": 0,
    }  # fmt: skip
    assert {name: stats.figures[name] for name in expected} == expected
    assert 0 <= stats.figures["etcd_contact_age_s"] < 5
    counts = {"members_seen", "sessions", "pins", "objects", "allocations", "data_connections"}
    counts |= {"members_suspected", "members_dead", "members_left", "gossip_awareness"}
    counts |= {"buckets_backed_up", "buckets_served", "buckets_waiting", "buckets_copying"}
    counts |= {"index_slots", "index_objects", "index_refused_objects", "read_connections"}
    counts |= {"ucx_clients", "copies_missing", "values_staged"}
    units = ("_total", "_s", "_bytes", "_ratio", "_owned", "_moving", "_learning")
    unnamed = [n for n in stats.figures if n not in counts and not n.endswith(units)]
    assert unnamed == [], unnamed


async def test_an_event_loop_is_made_for_the_thread() -> None:
    from p2pkv.hosted import new_event_loop

    loop = new_event_loop()
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.close()
