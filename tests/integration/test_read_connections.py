"""Reads over TCP that the read threads of real nodes answer, also in trouble."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pkv import BatchError, Client, P2PKVError, Unreachable, _native
from p2pkv._native import reads
from p2pkv.etcd_server import EtcdCluster
from p2pkv.read_link import ReadLink
from p2pkv.testing.cluster import FAST, Cluster, wait_for

pytestmark = pytest.mark.skipif(not _native.available, reason="the native module was not built")


@pytest.fixture
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(3, etcd=etcd) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with cluster.client(path="tcp") as kv:
        yield kv


def total(kv: Client, name: str) -> float:
    return sum(stats.figures.get(name, 0) for stats in kv.stats().values())


def settled(kv: Client, keys: Iterable[str]) -> dict[str, float]:
    """The figures, once the nodes let others read all of these keys."""

    def all_there() -> bool:
        before = total(kv, "read_asks_total")
        kv.batch_get(keys)
        return total(kv, "read_asks_total") == before

    wait_for(all_there, "all is published and may be read")
    names = ("read_values_total", "read_flags_total", "read_asks_total", "requests_get_total",
             "requests_exists_total", "requests_match_total", "read_requests_total",
             "read_value_bytes_total")  # fmt: skip
    return {name: total(kv, name) for name in names}


def read_connection(kv: Client, node: str) -> ReadLink:
    """A read connection of the test's own to a node that the client has talked to."""
    driver: Any = kv._driver
    for channel in driver._idle:
        for member, path in channel._data.items():
            if member.node == node:
                return ReadLink(*path._welcome.reads, path._limits, 5.0)
    raise AssertionError(f"no connection to {node}")


def soon(seconds: float = 5.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_hits_do_not_reach_the_nodes_event_loops(cluster: Cluster, kv: Client) -> None:
    values = {f"k{i}": bytes([i]) * 5000 for i in range(60)}
    kv.batch_put(values)
    before = settled(kv, values)
    assert kv.batch_get(values) == list(values.values())
    targets = [bytearray(6000) for _ in values]
    assert kv.batch_get_into(values, targets) == [5000] * 60
    assert [bytes(t[:5000]) for t in targets] == list(values.values())
    assert kv.get("k7") == values["k7"]
    assert kv.batch_exists(values) == [True] * 60
    assert kv.match_prefix(list(values)) == 60
    after = {name: total(kv, name) for name in before}
    assert after["read_values_total"] - before["read_values_total"] == 121
    assert after["read_flags_total"] - before["read_flags_total"] == 120
    for name in ("read_asks", "requests_get", "requests_exists", "requests_match"):
        assert after[f"{name}_total"] == before[f"{name}_total"], name


def test_misses_do_not_reach_the_nodes_event_loops(cluster: Cluster, kv: Client) -> None:
    values = {f"k{i}": b"%d" % i for i in range(60)}
    kv.batch_put(values)
    before = settled(kv, values) | {n: total(kv, n) for n in ("misses_total", "read_misses_total")}
    names = [name for i in range(60) for name in (f"k{i}", f"none{i}")]
    assert kv.batch_exists(names) == [True, False] * 60
    assert kv.batch_get(names)[1::2] == [None] * 60
    assert kv.batch_get_into(["none1"], [bytearray(8)]) == [None]
    assert kv.get("none1") is None
    assert kv.match_prefix([*values, "none1", "k1"]) == 60
    after = {name: total(kv, name) for name in before}
    for name in ("read_asks", "requests_get", "requests_exists", "requests_match"):
        assert after[f"{name}_total"] == before[f"{name}_total"], name
    assert after["misses_total"] - before["misses_total"] == 62
    assert after["read_misses_total"] - before["read_misses_total"] == 60 + 62 + 1


def test_the_owner_is_asked_for_the_rest(kv: Client) -> None:
    kv.batch_put({f"k{i}": b"%d" % i for i in range(0, 40, 2)})
    long = "long/" + "x" * 500  # not published
    kv.put(long, b"long")
    kv.put("empty", b"")
    names = [*(f"k{i}" for i in range(40)), long, "empty"]
    expected = [*(b"%d" % i if i % 2 == 0 else None for i in range(40)), b"long", b""]
    assert kv.batch_get(names) == expected
    assert kv.batch_exists(names) == [value is not None for value in expected]
    targets = [bytearray(8) for _ in names]
    assert kv.batch_get_into(names, targets) == [v if v is None else len(v) for v in expected]
    assert kv.match_prefix(["k0", "k2", "k4", "k5", "k6"]) == 3
    assert kv.match_prefix(["k1", "k2"]) == 0
    assert kv.get(long) == b"long"
    assert kv.get("k1") is None
    assert kv.get("empty") == b""


def test_a_read_sees_what_was_acknowledged_before(cluster: Cluster, kv: Client) -> None:
    with cluster.client() as other:
        for i in range(200):
            other.put("k", b"%d" % i)
            assert kv.get("k") == b"%d" % i
        other.delete("k")
        assert kv.get("k") is None


def test_a_target_that_is_too_small_is_told_and_the_others_filled(kv: Client) -> None:
    kv.batch_put({"a": b"12345", "b": b"678"})
    small, right = bytearray(2), bytearray(3)
    with pytest.raises(BatchError) as error:
        kv.batch_get_into(["a", "b"], [small, right])
    assert error.value.results[1] == 3
    assert bytes(right) == b"678"
    assert bytes(small) == bytes(2)


def test_threads_that_read_at_once_get_their_own_values(kv: Client) -> None:
    values = {f"k{i}": bytes([i % 251]) * (i * 331 % 40_000) for i in range(200)}
    kv.batch_put(values)
    before = settled(kv, values)
    names, failures = list(values), []

    def work(first: int) -> None:
        try:
            for i in range(30):
                part = names[(first * 7 + i) % 150 :][:50]
                assert kv.batch_get(part) == [values[k] for k in part]
                assert kv.get(part[0]) == values[part[0]]
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    first = 32 * 3  # each thread's first request to a node, which begins its session
    assert total(kv, "requests_get_total") - before["requests_get_total"] <= first


def test_reads_alone_keep_a_session_alive(etcd: EtcdCluster) -> None:
    with (
        Cluster(1, etcd=etcd, session_ttl_s=1.0) as cluster,
        cluster.client(path="tcp") as kv,
    ):
        kv.put("k", b"1")
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert kv.get("k") == b"1"
            time.sleep(0.01)
        assert total(kv, "sessions_reaped_total") == 0
        assert total(kv, "read_values_total") > 50


def test_a_node_without_read_threads_answers_from_its_event_loop(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd, read_threads=0) as cluster, cluster.client(path="tcp") as kv:
        kv.put("k", b"1")
        assert kv.get("k") == b"1"
        assert total(kv, "requests_get_total") == 1


def test_a_node_ends_while_read_connections_are_open(cluster: Cluster, kv: Client) -> None:
    theirs = cluster.key_of("n1")
    kv.put(theirs, b"1")
    assert kv.get(theirs) == b"1"
    assert cluster["n1"].terminate() == 0
    wait_for(lambda: kv.get(theirs) == b"1", "its next owner answers")


def test_a_node_that_is_killed_in_the_middle_of_a_batch_is_unreachable(
    cluster: Cluster, kv: Client
) -> None:
    names = [cluster.key_of("n1", i) for i in range(16)]
    value = bytes(range(256)) * 4096
    kv.batch_put(dict.fromkeys(names, value))
    threading.Timer(0.2, cluster["n1"].kill).start()
    while not (failed := failures(kv, names, value)):
        pass
    assert failed == {Unreachable}


def failures(kv: Client, names: list[str], value: bytes) -> set[type]:
    """The errors of one batch. What came is right, also where something failed."""
    results: Sequence[Any]
    try:
        results = kv.batch_get(names, timeout=2.0)
    except BatchError as e:
        results = e.results
    assert all(result == value for result in results if not isinstance(result, P2PKVError))
    return {type(result) for result in results if isinstance(result, P2PKVError)}


def test_a_paused_node_that_wakes_serves_nothing_on_its_own(etcd: EtcdCluster) -> None:
    """Its buckets may have been started anew elsewhere: what it published is worth nothing now."""
    with Cluster(3, etcd=etcd, **FAST) as cluster, cluster.client(path="tcp") as kv:
        theirs = cluster.key_of("n1")
        kv.put(theirs, b"old")
        assert kv.get(theirs) == b"old"
        link = read_connection(kv, "n1")
        end = link._end
        cluster["n1"].pause()
        wait_for(lambda: stopped(cluster["n1"].pid), "all threads stand still")
        keys = [theirs.encode()]
        assert end.ask(reads.GET, keys, soon()) == 0  # waits in the node's socket
        wait_for(lambda: put_elsewhere(kv, theirs), "its buckets start anew", 60)
        assert not select.select([link._socket], [], [], 0)[0]
        cluster["n1"].resume()
        error, sizes = end.table(soon())
        assert error or sizes == [reads.ASK]
        link.close()
        assert kv.get(theirs) == b"new"


def stopped(pid: int) -> bool:
    """Whether no thread of the process runs."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in threads_of(pid)]
    return set(states) == {"T"}


def threads_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def put_elsewhere(kv: Client, key: str) -> bool:
    try:
        return kv.put(key, b"new", timeout=1.0) == 1
    except P2PKVError:
        return False


def test_figures_tell_of_read_connections(cluster: Cluster, kv: Client) -> None:
    kv.put("k", b"12345")
    before = settled(kv, ["k"])
    assert kv.get("k") == b"12345"
    assert total(kv, "read_connections") == 1
    assert total(kv, "read_requests_total") - before["read_requests_total"] == 1
    assert total(kv, "read_value_bytes_total") - before["read_value_bytes_total"] == 5
    assert total(kv, "read_connections_dropped_total") == 0
