"""etcd is killed, paused and started again while the cluster is used: no call fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import Traffic, figure, new_seed

from p2pkv import Client, Unreachable
from p2pkv.testing.cluster import FAST, Cluster, wait_for
from p2pkv.testing.etcd import survives_kills


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """On an etcd of its own."""
    with Cluster(3) as cluster:
        yield cluster


def past_the_fence(cluster: Cluster, traffic: Traffic) -> None:
    """Until no node has had contact with etcd for twice the time that it may serve alone."""
    limit = 2 * FAST["fence_after_s"]

    def all_without() -> bool:
        stats = kv.stats().values()
        return len(stats) == 3 and all(s.figures["etcd_contact_age_s"] > limit for s in stats)

    with Client(seeds=traffic.endpoints, cluster=cluster.name) as kv:
        wait_for(all_without, "no node has contact with etcd")
        assert all(s.labels["serving"] == "true" for s in kv.stats().values())


@pytest.mark.skipif(not survives_kills(), reason="this etcd loses data when it is killed")
def test_etcd_is_killed_and_started_again_under_traffic(cluster: Cluster) -> None:
    seed = new_seed()
    with Traffic(cluster, seed) as traffic:
        cluster.etcd.members[0].kill()
        past_the_fence(cluster, traffic)
        traffic.go_on()
        cluster.etcd.members[0].restart()
        cluster.wait_settled()
        traffic.go_on()
        cluster.add_node()
        traffic.go_on()
        with cluster.client() as kv:
            assert figure(kv, "buckets_taken_away_total") == 0


def test_etcd_is_paused_and_goes_on_under_traffic(cluster: Cluster) -> None:
    seed = new_seed()
    with Traffic(cluster, seed) as traffic:
        cluster.etcd.members[0].pause()
        past_the_fence(cluster, traffic)
        traffic.go_on()
        cluster.etcd.members[0].resume()
        cluster.wait_settled()
        traffic.go_on()
        with cluster.client() as kv:
            assert figure(kv, "buckets_taken_away_total") == 0


@pytest.mark.skipif(not survives_kills(), reason="this etcd loses data when it is killed")
def test_etcd_restarts_while_a_node_joins_under_traffic(cluster: Cluster) -> None:
    """A bucket whose hand-over is being written just then waits for etcd; no call fails for it."""
    seed = new_seed()
    with Traffic(cluster, seed) as traffic:
        cluster.add_node(wait=False)
        cluster.wait(lambda: cluster.owned("n3") > 0, "the first buckets have moved")
        cluster.etcd.members[0].restart()
        cluster.wait_settled()
        traffic.go_on()


def test_a_new_client_finds_the_cluster_by_seeds_while_etcd_is_away(cluster: Cluster) -> None:
    endpoint = cluster.endpoint("n0")
    with cluster.client() as kv:
        kv.put("a", b"1")
    cluster.etcd.members[0].pause()
    with Client(seeds=[endpoint], cluster=cluster.name) as kv:
        assert kv.get("a") == b"1"
        assert kv.put("b", b"2") == 1
    with (
        cluster.client(timeout=1.5) as kv,
        pytest.raises(Unreachable, match="no node gave the ring"),
    ):
        kv.get("a")
    cluster.etcd.members[0].resume()
    with cluster.client() as kv:
        assert kv.batch_get(["a", "b"]) == [b"1", b"2"]


def test_sigterm_ends_a_node_although_etcd_is_away() -> None:
    with Cluster(1, drain_timeout_s=1.0) as cluster:
        cluster.etcd.members[0].pause()
        assert cluster["n0"].terminate(timeout_s=20) == 0
        assert cluster["n0"].arenas == []
        cluster.etcd.members[0].resume()
