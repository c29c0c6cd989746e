"""Nodes that join and leave while the cluster is used: no call fails, no key is lost."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from support import KINDS, Traffic, client_of, embedded_node, figure, new_seed

from p2pkv import Client
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for


def test_a_node_joins_under_traffic(etcd: EtcdCluster) -> None:
    seed = new_seed()
    with Cluster(2, etcd=etcd) as cluster, Traffic(cluster, seed) as traffic:
        cluster.add_node()
        traffic.go_on()
        assert cluster.owned("n2") >= 17
        with cluster.client() as kv:
            assert figure(kv, "buckets_copied_total") >= 17


def test_a_node_leaves_on_sigterm_under_traffic(etcd: EtcdCluster) -> None:
    seed = new_seed()
    with Cluster(3, etcd=etcd) as cluster, Traffic(cluster, seed) as traffic:
        assert cluster["n1"].terminate() == 0
        assert cluster["n1"].drained
        assert cluster["n1"].arenas == []
        traffic.go_on()
        cluster.wait_settled(["n0", "n2"])


def test_nodes_come_and_go_under_traffic(etcd: EtcdCluster) -> None:
    """Each node is replaced by another one; then the first ones come back."""
    seed = new_seed()
    with Cluster(2, etcd=etcd) as cluster, Traffic(cluster, seed) as traffic:
        for name in ("n0", "n1"):
            cluster.add_node()
            assert cluster[name].terminate() == 0
            traffic.go_on(30)
        for name in ("n0", "n1"):
            cluster[name].start()
        cluster.wait_settled()
        traffic.go_on(30)


def test_two_nodes_leave_at_once_under_traffic(etcd: EtcdCluster) -> None:
    seed = new_seed()
    with Cluster(4, etcd=etcd) as cluster, Traffic(cluster, seed) as traffic:
        for name in ("n0", "n3"):
            cluster[name].send(signal.SIGTERM)
        for name in ("n0", "n3"):
            assert cluster[name].wait() == 0
        traffic.go_on()
        cluster.wait_settled(["n1", "n2"])


def test_the_last_node_ends_on_sigterm_although_nobody_takes_its_buckets(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster:
        assert cluster["n0"].terminate(timeout_s=10) == 0
        assert not cluster["n0"].drained


def test_what_moves_keeps_its_value_its_ttl_its_pin_and_write_once(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster, cluster.client() as kv:
        kv.put("plain", b"plain")
        kv.put("empty", b"")
        kv.put("once", b"first", write_once=True)
        kv.put("timed", b"timed", ttl=600)
        kv.put("short", b"short", ttl=4)
        kv.put("hard", b"hard", hard_pin=True)
        large = bytes(range(256)) * (20 << 12)
        kv.put("large", large)
        cluster.add_node()
        assert cluster["n0"].terminate() == 0
        assert kv.batch_get(["plain", "empty", "once", "timed", "hard"]) == [
            b"plain", b"", b"first", b"timed", b"hard",
        ]  # fmt: skip
        assert kv.get("large") == large
        kv.put("once", b"second", write_once=True)
        assert kv.get("once") == b"first"
        assert figure(kv, "hard_pinned_bytes") > 0
        wait_for(lambda: not kv.exists("short"), "the ttl goes on at the new owner")
        assert kv.exists("timed")


def test_a_value_is_read_to_its_end_while_its_bucket_moves(etcd: EtcdCluster) -> None:
    """Larger than a message, so that it goes in pieces."""
    value = bytes(range(256)) * (66 << 12)
    with (
        Cluster(1, etcd=etcd, memory_limit_bytes=256 << 20) as cluster,
        cluster.client(timeout=20) as kv,
    ):
        kv.put("large", value)
        reads, wrong, stop = [0], [0], threading.Event()

        def read() -> None:
            buffer = bytearray(len(value))
            while not stop.is_set():
                wrong[0] += kv.get_into("large", buffer) != len(value) or buffer != value
                reads[0] += 1

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: reads[0], "the value is being read")
        cluster.add_node()
        assert cluster["n0"].terminate() == 0
        seen = reads[0]
        wait_for(lambda: reads[0] > seen + 1 or not reader.is_alive(), "it is read on")
        stop.set()
        reader.join(30)
        assert wrong == [0]
        assert reads[0] > seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_during_moves_sees_what_is_there_throughout_once(
    etcd: EtcdCluster, kind: str
) -> None:
    """Other keys come and go meanwhile, and may or may not be seen."""
    seed = new_seed()
    with Cluster(1, etcd=etcd, move_bytes_per_s=4 << 20) as cluster, client_of(kind, cluster) as kv:
        there = {f"there/{i}".encode(): b"%d" % i * 100 for i in range(3000)}
        kv.batch_put(there)
        scans: list[list[tuple[bytes, bytes]]] = []
        moved: list[Any] = []

        def move() -> None:
            try:
                cluster.add_node()
                cluster.add_node()
                moved.append(cluster["n0"].terminate())
            except Exception as e:
                moved.append(e)

        mover = threading.Thread(target=move)
        with Traffic(cluster, seed):
            mover.start()
            while mover.is_alive() or len(scans) < 3:
                scans.append(list(kv.scan("there/", page=100, timeout=20)))
            mover.join()
        assert moved == [0]
        for found in scans:
            assert len(found) == len(there)
            assert dict(found) == there
        assert figure(kv, "buckets_copied_total") > 0


def test_a_node_within_a_process_joins_serves_and_drains(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster, cluster.client() as kv:
        values = {f"k{i}": b"%d" % i for i in range(500)}
        kv.batch_put(values)
        with embedded_node(cluster, "inside") as (node, loop):
            cluster.wait_settled(["n0", "inside"])
            assert loop.run(node.client().batch_get(list(values))) == list(values.values())
            assert kv.batch_get(list(values)) == list(values.values())
            assert loop.run(node.drain()) is True
            assert cluster.owned("inside") == 0
        assert kv.batch_get(list(values)) == list(values.values())


def test_a_node_of_weight_zero_gets_nothing_and_serves_clients(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster, cluster.client() as kv:
        kv.put("a", b"1")
        cluster.add_node("light", wait=False, weight=0.0)
        endpoint = cluster.wait(
            lambda: cluster.endpoint("light") if "light" in cluster.view().nodes else "",
            "it is there",
        )
        with Client(seeds=endpoint, cluster=cluster.name) as seeded:
            assert seeded.get("a") == b"1"
        assert cluster.owned("light") == 0
