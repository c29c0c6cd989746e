"""What keeps clusters apart and nodes in their place, and what a node leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import KINDS, client_of, configured, embedded_node

from p2pkv import Client, ClientConfig, ClusterMismatch
from p2pkv.arena import SHM_DIRECTORY
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(1, etcd=etcd) as cluster:
        yield cluster


def test_two_clusters_on_one_etcd_do_not_see_each_other(
    cluster: Cluster, etcd: EtcdCluster
) -> None:
    """Not even with nodes of the same names."""
    with Cluster(1, etcd=etcd) as other, cluster.client() as a, other.client() as b:
        a.put("key", b"a")
        assert b.get("key") is None
        b.put("key", b"b")
        assert (a.get("key"), b.get("key")) == (b"a", b"b")
        assert list(a.stats()) == list(b.stats()) == ["n0@1"]
        assert b.delete_range("") == 1
        assert a.get("key") == b"a"


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_of_another_cluster_is_refused_by_a_node(cluster: Cluster, kind: str) -> None:
    config = ClientConfig(seeds=(cluster.endpoint("n0"),), cluster="another", timeout_s=10.0)
    with configured(kind, config) as kv, pytest.raises(ClusterMismatch, match="not 'another'"):
        kv.get("a")


def test_a_node_with_another_bucket_count_is_refused(cluster: Cluster) -> None:
    node = cluster.add_node("other", wait=False, bucket_count=128)
    assert node.wait() == 2
    assert "ClusterMismatch" in node.log()
    assert "bucket_count = 64" in node.log()
    assert "128" in node.log()
    assert node.arenas == []


def test_a_second_process_with_the_same_node_id_is_refused(cluster: Cluster) -> None:
    with cluster.client() as kv:
        kv.put("kept", b"1")
        second = cluster.add_node("n0", wait=False)
        assert second.wait() == 2
        assert "NodeIdInUse" in second.log()
        assert "'n0'" in second.log()
        assert second.arenas == []
        assert kv.get("kept") == b"1"
        assert list(kv.stats()) == ["n0@1"]


def refused(cluster: Cluster, name: str, message: str, **changes: Any) -> None:
    """A node with these values does not start, says why, and leaves nothing behind."""
    node = cluster.add_node(name, wait=False, **changes)
    assert node.wait() == 2
    assert "ConfigError" in node.log()
    assert message in node.log()
    assert node.arenas == []
    assert set(cluster.view().nodes) == {"n0"}


def test_a_node_with_more_memory_than_there_is_is_refused(cluster: Cluster) -> None:
    refused(cluster, "large", f"memory_limit_bytes = {1 << 60}", memory_limit_bytes=1 << 60)


def test_a_node_whose_times_leave_no_room_is_refused(cluster: Cluster) -> None:
    refused(cluster, "hasty", "peer_contact_s = 1.9", peer_contact_s=1.9)


def test_a_node_whose_port_is_taken_is_refused(cluster: Cluster) -> None:
    port = int(cluster.endpoint("n0").rpartition(":")[2])
    refused(cluster, "taken", f"port {port}", control_port=port)


def test_a_clean_stop_leaves_nothing_in_shared_memory(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster:
        assert len(cluster["n0"].arenas) == 1
        cluster["n0"].terminate()
        assert cluster["n0"].arenas == []


def test_what_a_killed_node_left_in_shared_memory_goes_when_the_next_one_starts(
    etcd: EtcdCluster,
) -> None:
    with Cluster(1, etcd=etcd) as cluster:
        killed = cluster["n0"]
        killed.kill()
        left = killed.arenas
        assert len(left) == 1
        cluster.add_node("n1", wait=False)
        cluster.wait(lambda: not left[0].exists(), "the next node has removed it")


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_path_over_ipv6(kind: str) -> None:
    with Cluster(2, host="::1") as cluster, client_of(kind, cluster) as kv:
        assert cluster.endpoint("n0").startswith("tcp://[::1]:")
        values = {f"k{i}": b"%d" % i * 1000 for i in range(200)}
        kv.batch_put(values)
        assert kv.batch_get(list(values)) == list(values.values())
        assert len(list(kv.scan("k"))) == 200
        cluster.add_node()
        assert kv.batch_get(list(values)) == list(values.values())
        with Client(seeds=cluster.endpoint("n2"), cluster=cluster.name) as seeded:
            assert seeded.get("k7") == values["k7"]
        assert kv.delete_range("") == 200


def test_an_embedded_node_leaves_nothing_behind(etcd: EtcdCluster) -> None:
    with Cluster(0, etcd=etcd) as cluster:
        with embedded_node(cluster, "embedded-once") as (node, loop):
            cluster.wait_settled(["embedded-once"])
            assert loop.run(node.client().put("a", b"1")) == 1
        assert not list(Path(SHM_DIRECTORY).glob("p2pkv-embedded-once-*"))
        assert cluster.view().nodes == {}
