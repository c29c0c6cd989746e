"""Who is alive, among real processes that are killed, stopped and told to leave."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from p2pkv.commands.survey import ask_nodes
from p2pkv.testing.cluster import Cluster
from p2pkv.wire import NodeStats

KNOWN_WITHIN_S = 3.0
"""The bound of the preset is 0.4 s; the rest is for the machine that runs the tests."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


class Eyes:
    """Asks the nodes how they see each other."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.endpoints = {node.name: cluster.endpoint(node.name) for node in cluster}

    def stats(self, name: str) -> NodeStats:
        endpoint = self.endpoints[name]
        stats = ask_nodes(self.cluster.client_config(timeout_s=5.0), [endpoint])[endpoint].stats
        assert stats is not None, name
        return stats

    def sees(self, name: str) -> dict[str, str]:
        members = self.stats(name).labels["members"].split(",")
        found = dict(m.split("=") for m in members if m)
        return {member.partition("@")[0]: status for member, status in found.items()}

    def wait(self, name: str, status: str, *by: str) -> float:
        """Until all of ``by`` see it so; how long that took, in seconds."""
        began = time.monotonic()
        self.cluster.wait(
            lambda: all(self.sees(other).get(name) == status for other in by),
            f"{name} is {status} for {by}",
        )
        return time.monotonic() - began


@pytest.fixture
def eyes(cluster: Cluster) -> Eyes:
    eyes = Eyes(cluster)
    for name, *others in (("n0", "n1", "n2"), ("n1", "n0", "n2"), ("n2", "n0", "n1")):
        eyes.wait(name, "alive", *others)
    return eyes


def test_a_killed_process_is_dead_for_all_others_at_once(cluster: Cluster, eyes: Eyes) -> None:
    cluster["n2"].kill()
    assert eyes.wait("n2", "dead", "n0", "n1") < KNOWN_WITHIN_S


def test_a_stopped_process_is_back_when_it_goes_on_and_blames_no_one(
    cluster: Cluster, eyes: Eyes
) -> None:
    blamed_before = eyes.stats("n2").figures["gossip_away_total"]
    cluster["n2"].pause()
    eyes.wait("n2", "dead", "n0", "n1")
    cluster["n2"].resume()
    eyes.wait("n2", "alive", "n0", "n1")
    assert eyes.sees("n2") == {"n0": "alive", "n1": "alive"}
    figures = eyes.stats("n2").figures
    assert figures["gossip_away_total"] > blamed_before
    assert figures["gossip_refuted_total"] >= 1


def test_a_process_that_is_told_to_end_has_left(cluster: Cluster, eyes: Eyes) -> None:
    assert cluster["n2"].terminate() == 0
    eyes.wait("n2", "left", "n0", "n1")
    for name in ("n0", "n1"):
        assert "n2@1 is dead" not in cluster[name].log(1 << 20)


def test_a_process_that_starts_again_is_alive_in_its_next_life(
    cluster: Cluster, eyes: Eyes
) -> None:
    cluster["n2"].kill()
    cluster["n2"].start()
    cluster.wait(
        lambda: "n2@2=alive" in eyes.stats("n0").labels["members"].split(","), "its next life"
    )


def test_nodes_that_are_well_ask_nobody_about_etcd_and_say_little(
    cluster: Cluster, eyes: Eyes
) -> None:
    before = {name: eyes.stats(name).figures for name in eyes.endpoints}
    began = time.monotonic()
    cluster.wait(lambda: time.monotonic() - began > 3, "some probes")
    for name in eyes.endpoints:
        figures = eyes.stats(name).figures
        elapsed_s = figures["uptime_s"] - before[name]["uptime_s"]
        sent = figures["gossip_sent_total"] - before[name]["gossip_sent_total"]
        asked = figures["heartbeats_sent_total"] - before[name]["heartbeats_sent_total"]
        assert asked == 0
        assert 1 <= sent / elapsed_s < 60, "a ping and an answer ten times a second, and some"
