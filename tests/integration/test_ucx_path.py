"""UCX as the path of clients, over TCP, which is what it can be forced to without an adapter."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import KINDS, Traffic, client_of, embedded_node, figure, new_seed

from p2pkv import ConfigError, DeadlineExceeded, P2PKVError, ucx_client
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, NodeProcess, wait_for
from p2pkv.ucx_library import doctor

FACTS = doctor({"TLS": "tcp"})
pytestmark = pytest.mark.skipif(not FACTS.usable, reason=f"no UCX here: {FACTS.why_not}")

KiB, MiB = 1 << 10, 1 << 20
READS = ["read", "write"]
QUARANTINE_S = 1.0


@pytest.fixture(scope="module", autouse=True)
def over_tcp() -> Iterator[None]:
    """For the nodes too, which inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        patch.setenv("UCX_NET_DEVICES", "lo")  # others may come and go
        yield


@pytest.fixture(scope="module")
def cluster(over_tcp: None, etcd: EtcdCluster) -> Iterator[Cluster]:
    with make_cluster(etcd, 2) as cluster:
        yield cluster


def make_cluster(etcd: EtcdCluster, nodes: int, **changes: Any) -> Cluster:
    fields = {"ucx": "on", "ucx_quarantine_s": QUARANTINE_S, "memory_limit_bytes": 96 * MiB}
    return Cluster(nodes, etcd=etcd, **{**fields, **changes})


def connected(kv: Any, cluster: Cluster) -> None:
    """Until there is a path to every node, which begins after its first answers."""

    def attached() -> bool:
        kv.batch_exists([f"warm{i}" for i in range(200)])
        return all(s.figures["ucx_clients"] for s in kv.stats().values())

    cluster.wait(attached, "the client is known to each node's UCX")


@pytest.fixture(params=[(kind, reads) for kind in KINDS for reads in READS], ids="-".join)
def kv(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Any]:
    kind, reads = request.param
    with client_of(kind, cluster, path="ucx", ucx_reads=reads, timeout_s=20.0) as kv:
        connected(kv, cluster)
        yield kv
        kv.delete_range("")


def some_values(seed: int, sizes: list[int]) -> dict[str, bytes]:
    chance = random.Random(seed)
    return {f"v{i}": chance.randbytes(size) for i, size in enumerate(sizes)}


# -- what the calls do


def test_values_of_every_size_come_back_as_they_were_put(kv: Any) -> None:
    """From nothing to more than all slots; the large ones went by UCX, both ways."""
    sizes = [0, 1, 4 * KiB, 8 * KiB, 128 * KiB, 1 * MiB, 5 * MiB + 3, 20 * MiB]
    values = some_values(new_seed(), sizes)
    allocated, held = figure(kv, "ucx_values_allocated_total"), figure(kv, "ucx_values_held_total")
    for key, value in values.items():
        assert kv.put(key, value) == 1
    assert [kv.get(key) for key in values] == list(values.values())
    assert figure(kv, "ucx_values_allocated_total") - allocated == 4
    assert figure(kv, "ucx_values_held_total") - held == 5


def test_batches_go_by_ucx_into_the_callers_buffers(kv: Any) -> None:
    values = some_values(new_seed(), [64 * KiB + i for i in range(100)])
    assert kv.batch_put(values) == [1] * 100
    assert kv.batch_get([*values, "none"]) == [*values.values(), None]
    buffers = [bytearray(len(value)) for value in values.values()]
    assert kv.batch_get_into(list(values), buffers) == [len(b) for b in buffers]
    assert buffers == list(values.values())


def test_ranges_and_scattered_parts_are_read_by_ucx(kv: Any) -> None:
    value = random.Random(new_seed()).randbytes(6 * MiB)
    kv.put_from("parts", [value[:100], value[100 : 3 * MiB], value[3 * MiB :]])
    held = figure(kv, "ucx_values_held_total")
    assert kv.get_range("parts", 1000, 5 * MiB) == value[1000 : 1000 + 5 * MiB]
    target = bytearray(100 * KiB)
    assert kv.get_into("parts", target, offset=77, length=100 * KiB) == 100 * KiB
    assert target == value[77 : 77 + 100 * KiB]
    assert figure(kv, "ucx_values_held_total") - held == 2


def test_what_would_be_viewed_on_the_nodes_host_comes_as_a_copy(cluster: Cluster) -> None:
    values = some_values(new_seed(), [100, 300 * KiB, MiB])
    with client_of("Client", cluster, path="ucx", timeout_s=20.0) as kv:
        connected(kv, cluster)
        kv.batch_put(values)
        held = figure(kv, "ucx_values_held_total")
        views = kv.batch_get(list(values), zero_copy=True)
        assert [bytes(view) for view in views] == list(values.values())
        assert figure(kv, "ucx_values_held_total") - held == 2


def test_a_client_whose_path_is_ucx_has_no_read_connections(cluster: Cluster) -> None:
    with client_of("Client", cluster, path="ucx", timeout_s=20.0) as kv:
        connected(kv, cluster)
        before = figure(kv, "read_requests_total")
        kv.put("small", b"here")
        assert kv.get("small") == b"here"
        assert figure(kv, "read_requests_total") == before


def test_nothing_is_held_once_a_call_has_ended(kv: Any) -> None:
    kv.put("held", b"x" * MiB)
    assert kv.get("held") == b"x" * MiB
    kv.delete("held")
    wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "the token is given back", 5)
    assert figure(kv, "ucx_quarantine_bytes") == 0


def test_readers_see_one_value_or_the_other_while_it_is_overwritten(
    kv: Any, cluster: Cluster
) -> None:
    stopped, failures = threading.Event(), list[BaseException]()

    def overwrite() -> None:
        try:
            with client_of("Client", cluster, path="ucx", timeout_s=20.0) as writer:
                for i in range(10**9):
                    if stopped.is_set():
                        return
                    writer.put("torn", bytes([i % 256]) * (2 * MiB))
        except BaseException as e:
            failures.append(e)

    kv.put("torn", b"\0" * (2 * MiB))
    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        seen = set()
        ending = time.monotonic() + 60
        while len(seen) < 10 and time.monotonic() < ending and not failures:
            value = kv.get("torn")
            assert len(value) == 2 * MiB
            assert value == value[:1] * (2 * MiB)
            seen.add(value[0])
    finally:
        stopped.set()
        thread.join(30)
    assert not failures
    assert len(seen) >= 10


def test_mixed_traffic_of_many_threads_stays_right(cluster: Cluster) -> None:
    with Traffic(cluster, new_seed(), path="ucx") as traffic:
        traffic.go_on(200)


# -- where it cannot be


@pytest.mark.parametrize("kind", KINDS)
def test_forced_where_the_node_has_no_ucx_it_says_so_at_once(etcd: EtcdCluster, kind: str) -> None:
    def ask(kv: Any) -> None:
        for _ in range(1000):  # the first goes over the control connection
            kv.get("anything")

    with (
        make_cluster(etcd, 1, ucx="off") as without,
        client_of(kind, without, path="ucx", timeout_s=30.0) as kv,
    ):
        began = time.monotonic()
        with pytest.raises(ConfigError, match="the node offers no UCX"):
            ask(kv)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", KINDS)
def test_auto_never_prefers_ucx_on_one_host_or_over_tcp(cluster: Cluster, kind: str) -> None:
    with client_of(kind, cluster, path="auto") as kv:
        values = some_values(1, [256 * KiB] * 40)
        kv.batch_put(values)
        assert kv.batch_get(list(values)) == list(values.values())
        assert figure(kv, "ucx_clients") == 0


def test_a_node_that_must_have_ucx_and_has_none_does_not_start(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "rc_verbs")
    cluster = make_cluster(etcd, 0)
    with cluster:
        node = cluster.add_node(wait=False)
        assert node.wait() != 0
        assert "ucx = 'on'" in node.log()


# -- trouble


def traffic_until(kv: Any, values: dict[str, bytes], stop: threading.Event) -> list[str]:
    """Puts and gets until told; what came back wrong."""
    wrong = []
    while not stop.is_set():
        try:
            kv.batch_put(values, timeout=1.0)
            found = kv.batch_get(list(values), timeout=1.0)
        except P2PKVError:
            continue
        wrong += [k for k, f in zip(values, found, strict=True) if f not in (None, values[k])]
    return wrong


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", ["killed", "paused"])
def test_a_node_in_trouble_in_the_middle_of_batches_serves_the_same_client_again(
    etcd: EtcdCluster, kind: str, reads: str, trouble: str
) -> None:
    """Its transfers fail or stand still; endpoints are made anew; no value is ever wrong."""
    if trouble == "killed" and reads == "write":
        pytest.skip("UCX over TCP may abort this process (docs/ucx.md, 'A dying peer')")
    values = some_values(new_seed(), [600 * KiB] * 20)
    stop, wrong = threading.Event(), list[list[str]]()
    with (
        make_cluster(etcd, 1) as cluster,
        client_of(kind, cluster, path="ucx", ucx_reads=reads, timeout_s=20.0) as kv,
    ):
        connected(kv, cluster)
        thread = threading.Thread(target=lambda: wrong.append(traffic_until(kv, values, stop)))
        thread.start()
        try:
            for _ in range(2):
                before = figure(kv, "ucx_values_held_total")
                wait_for(
                    lambda low=before: figure(kv, "ucx_values_held_total") > low,  # type: ignore[misc]
                    "traffic goes by UCX",
                )
                disturb(cluster["n0"], trouble)
                wait_for(lambda: kv.batch_put(values) == [1] * 20, "it serves again")
        finally:
            stop.set()
            thread.join(60)
        assert wrong == [[]]
        held = figure(kv, "ucx_values_held_total")
        assert kv.batch_get(list(values)) == list(values.values())
        assert figure(kv, "ucx_values_held_total") > held


def disturb(node: NodeProcess, trouble: str) -> None:
    if trouble == "killed":
        node.kill()
        node.start()
    else:
        node.pause()
        time.sleep(1.5)  # longer than the deadline of the calls under way
        node.resume()


def test_a_write_that_is_given_up_is_quarantined_and_lands_in_nobodys_value(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is stopped between ALLOC and the write, and wakes after the client has given up."""
    with (
        make_cluster(etcd, 1) as cluster,
        client_of("Client", cluster, path="ucx", timeout_s=20.0) as kv,
    ):
        connected(kv, cluster)
        kv.put("before", b"b" * MiB)
        node, store = cluster["n0"], ucx_client.RemoteArena.store

        def stopped_store(*arguments: Any) -> None:
            node.pause()
            store(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(ucx_client.RemoteArena, "store", stopped_store)
            with pytest.raises(DeadlineExceeded):
                kv.put("late", b"l" * (4 * MiB), timeout=0.5)
        node.resume()
        cluster.wait(lambda: figure(kv, "ucx_quarantine_bytes") >= 4 * MiB, "it is in quarantine")
        fill = {f"f{i}": bytes([i]) * MiB for i in range(200)}
        for key, value in fill.items():
            kv.put(key, value)
        found = kv.batch_get(list(fill))
        assert all(f in (None, v) for f, v in zip(found, fill.values(), strict=True))
        assert sum(f is not None for f in found) > 60
        assert kv.get("late") is None
        cluster.wait(lambda: figure(kv, "ucx_quarantine_bytes") == 0, "its time is over")
        assert figure(kv, "ucx_quarantine_unproven_bytes") == 0


CHILD = """
import sys, time
from p2pkv import Client, ucx_client
from p2pkv.config import ClientConfig, build

def never(*arguments):
    print("between", flush=True)
    time.sleep(600)

ucx_client.RemoteArena.store = never
kv = Client.from_config(build(ClientConfig, {
    "cluster": sys.argv[1], "path": "ucx", "timeout_s": 60.0,
    "etcd": {"endpoints": sys.argv[2:]},
}))
for i in range(1000):
    kv.put(f"child{i}", b"c" * (2 << 20))
"""


def test_what_a_killed_client_was_writing_to_is_quarantined_and_then_free(
    etcd: EtcdCluster,
) -> None:
    with make_cluster(etcd, 1) as cluster, cluster.client() as kv:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, cluster.name, *etcd.endpoints], stdout=subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"between\n"
            assert figure(kv, "allocations") == 1
            child.send_signal(signal.SIGKILL)
            cluster.wait(lambda: figure(kv, "ucx_quarantine_bytes") >= 2 * MiB, "in quarantine")
            assert figure(kv, "allocations") == 0
            cluster.wait(lambda: figure(kv, "ucx_quarantine_bytes") == 0, "its time is over")
            cluster.wait(lambda: figure(kv, "memory_retiring_bytes") == 0, "its memory is free")
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_has_too_much_in_quarantine_takes_puts_over_the_connection(
    etcd: EtcdCluster, kind: str
) -> None:
    with (
        make_cluster(etcd, 1, ucx_quarantine_s=600.0) as cluster,
        client_of(kind, cluster, path="ucx", timeout_s=20.0) as kv,
    ):
        connected(kv, cluster)
        for i in range(8):  # of 2 MiB each, a sixth of the memory
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, cluster.name, *etcd.endpoints],
                stdout=subprocess.PIPE,
            )
            with child:
                assert child.stdout is not None
                while not (line := child.stdout.readline()).startswith(b"between"):
                    assert line
                child.kill()
            want = (i + 1) * 2 * MiB
            cluster.wait(
                lambda low=want: figure(kv, "ucx_quarantine_bytes") >= min(low, 12 * MiB),  # type: ignore[misc]
                "in quarantine",
            )
            if figure(kv, "ucx_quarantine_bytes") > 12 * MiB:
                break
        before = figure(kv, "ucx_values_allocated_total")
        assert kv.put("on", b"o" * MiB) == 1
        assert kv.get("on") == b"o" * MiB
        assert figure(kv, "ucx_values_allocated_total") == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_has_forgotten_the_clients_engine_is_introduced_to_it_again(
    etcd: EtcdCluster, kind: str
) -> None:
    with (
        embedded_cluster(etcd) as (cluster, node),
        client_of(kind, cluster, path="ucx", ucx_reads="write", timeout_s=10.0) as kv,
    ):
        connected(kv, cluster)
        kv.put("known", b"k" * MiB)
        assert kv.get("known") == b"k" * MiB
        known = node._fabric._clients
        assert len(known) == 1
        known.clear()
        assert kv.get("known") == b"k" * MiB
        assert len(known) == 1


@contextmanager
def embedded_cluster(etcd: EtcdCluster) -> Iterator[tuple[Cluster, Any]]:
    """A cluster of one node, in this process."""
    cluster = make_cluster(etcd, 0)
    with cluster, embedded_node(cluster, "inside") as (node, _):
        cluster.wait_settled(["inside"])
        yield cluster, node


# -- nothing is left behind


def descriptors(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings(pid: int | str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_many_clients_leave_nothing_behind(etcd: EtcdCluster, kind: str) -> None:
    """P2PKV_TEST_CONNECTS sets how many, one after the other."""
    with make_cluster(etcd, 1) as cluster, cluster.client() as watcher:
        node = cluster["n0"]
        watcher.put("value", b"v" * (256 * KiB))
        count = int(os.environ.get("P2PKV_TEST_CONNECTS", "100"))

        def connect_some(times: int) -> None:
            for _ in range(times):
                with client_of(kind, cluster, path="ucx", timeout_s=20.0) as kv:
                    connected(kv, cluster)
                    assert kv.get("value") == b"v" * (256 * KiB)
                    kv.put("other", b"o" * (256 * KiB))

        def settled() -> bool:
            return figure(watcher, "ucx_clients") == 0 and figure(watcher, "sessions") <= 2

        def counts() -> list[int]:
            cluster.wait(settled, "the node has forgotten all clients")
            return [look(pid) for look in LOOKS for pid in ("self", node.pid)]

        connect_some(20)
        before = counts()
        connect_some(count)
        after = counts()
        grown = [a - b for a, b in zip(after, before, strict=True)]
        print(f"descriptors and mappings of client and node: {before}, {count} later {after}")
        assert all(g <= 10 for g in grown), f"{before} -> {after}"
        assert figure(watcher, "memory_retiring_bytes") == 0


LOOKS: list[Callable[[int | str], int]] = [descriptors, mappings]
