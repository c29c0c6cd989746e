"""Many nodes on a simulated network: how quick they are, whom they wrong, what it costs.

``python -m p2pkv.testing.swim_sim`` runs the same at full length.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from p2pkv.clock import SECOND_NS
from p2pkv.config import SwimConfig
from p2pkv.roster import Alive, Dead, Left, Suspect
from p2pkv.swim_messages import Status
from p2pkv.testing.swim_sim import Simulation, detection, figures, healthy_run
from p2pkv.types import Member, NodeId

LAN, LOCAL = SwimConfig(), SwimConfig(preset="local")
SUSPICION_64_S = 7.3
"""``4 * log10(64)`` probes of a second each, and something for the way."""


def names(*numbers: int) -> list[str]:
    return [f"n{i}" for i in numbers]


def member(sim: Simulation, name: str) -> Member:
    return sim.nodes[NodeId(name)].member


def dead(sim: Simulation) -> set[str]:
    return {event.member.node for _, _, event in sim.events(Dead)}


@pytest.mark.parametrize("seed", [1, 2])
def test_no_healthy_node_dies_of_lost_packets_and_a_slow_node(seed: int) -> None:
    sim = healthy_run(64, 60, loss=0.1, slow=1, seed=seed, config=LAN)
    found = figures(sim, 60, 1)
    assert found["healthy_dead_total"] == 0, seed
    assert found["healthy_suspected_total"] > 0, "too little happened"
    assert found["slow_suspected_total"] > 0, "too little happened"


def test_where_nothing_is_lost_nobody_is_suspected() -> None:
    sim = healthy_run(64, 60, loss=0, slow=0, seed=3, config=LAN)
    assert sim.events(Suspect) == []


def test_packets_per_node_do_not_grow_with_the_cluster() -> None:
    rates = []
    for nodes in (16, 64, 128):
        sim = Simulation(nodes, seed=4)
        sim.run(10)
        sim.packets.clear()
        sim.run(30)
        rates.append(sum(sim.packets.values()) / nodes / 30)
    assert max(rates) < 1.1 * min(rates), rates
    assert max(rates) < 2.5


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_process_is_suspected_at_once_and_dead_when_its_time_is_over(seed: int) -> None:
    found = detection(64, notice=True, seed=seed, config=LAN)
    assert found["suspect_everywhere_s"] < 0.001
    assert found["dead_everywhere_s"] < SUSPICION_64_S


@pytest.mark.parametrize("seed", range(2))
def test_a_host_that_is_gone_without_a_word_is_known_everywhere_in_a_few_probes(seed: int) -> None:
    found = detection(64, notice=False, seed=seed, config=LAN)
    assert found["suspect_everywhere_s"] < 4
    assert found["dead_everywhere_s"] < 4 + SUSPICION_64_S


def test_on_one_host_a_killed_process_is_dead_everywhere_in_a_fifth_of_a_second() -> None:
    for nodes in (2, 3, 8):
        assert detection(nodes, notice=True, seed=5, config=LOCAL)["dead_everywhere_s"] < 0.25


def test_a_connection_that_breaks_between_living_nodes_kills_neither() -> None:
    sim = Simulation(16, seed=6)
    sim.run(5)
    sim.break_connection("n0", "n1")
    sim.break_connection("n1", "n0")
    assert len(sim.events(Suspect)) == 2
    sim.run(1)
    refuted = sim.seen(Alive, member(sim, "n1"))
    assert "n0" in refuted
    sim.run(60)
    assert dead(sim) == set()
    assert sim.wrong() == {}


def test_the_two_sides_of_a_partition_find_each_other_again() -> None:
    sim = Simulation(24, seed=7)
    sim.run(5)
    cut = names(*range(8))
    sim.partition(cut)
    sim.run(90)
    for node in sim.nodes.values():
        inside = node.member.node in cut
        seen = {e.member.node for e in node.swim.entries() if e.status == Status.ALIVE}
        assert seen == {n for n in sim.nodes if (n in cut) == inside} - {node.member.node}
    sim.heal()
    sim.run(30)
    assert sim.wrong() == {}


def test_who_is_paused_for_long_is_back_at_once_and_blames_no_one() -> None:
    sim = Simulation(16, seed=8)
    sim.run(5)
    paused = member(sim, "n3")
    sim.pause("n3")
    sim.run(60)
    assert len(sim.seen(Dead, paused)) == 15
    sim.resume("n3")
    sim.run(5)
    assert sim.wrong() == {}
    assert dead(sim) == {"n3"}
    blamed = {event.member.node for _, by, event in sim.events(Suspect) if by == paused}
    assert blamed == set()


def test_who_is_paused_for_a_moment_refutes() -> None:
    sim = Simulation(16, seed=9)
    sim.run(5)
    sim.pause("n3")
    sim.run(4)
    assert sim.seen(Suspect, member(sim, "n3"))
    sim.resume("n3")
    sim.run(30)
    assert dead(sim) == set()
    assert sim.wrong() == {}


def test_a_node_that_starts_anew_is_another_member() -> None:
    sim = Simulation(16, seed=10)
    sim.run(5)
    former = sim.kill("n5")
    sim.run(0.5)
    later = sim.start("n5").member
    sim.run(0.5)
    assert len(sim.seen(Dead, former)) == 15
    assert len(sim.seen(Alive, later)) == 15
    sim.run(60)
    assert sim.seen(Dead, later) == {}
    assert sim.wrong() == {}


def test_who_leaves_has_left_and_is_not_taken_for_dead() -> None:
    sim = Simulation(16, seed=11)
    sim.run(5)
    gone = sim.leave("n5")
    sim.run(30)
    assert len(sim.seen(Left, gone)) == 15
    assert dead(sim) == set()
    assert sim.events(Suspect) == []


def test_one_that_hears_only_a_few_is_kept_alive_by_them() -> None:
    """n0 and n1 cannot reach each other, in one direction or both; others can reach both."""
    sim = Simulation(16, seed=12)
    sim.cut_one_way("n0", "n1")
    sim.cut_one_way("n2", "n3")
    sim.cut_one_way("n3", "n2")
    sim.run(90)
    assert dead(sim) == set()


def test_one_that_hears_nobody_does_not_convince_the_others() -> None:
    sim = Simulation(16, seed=13)
    for i in range(1, 16):
        sim.cut_one_way(f"n{i}", "n0")
    sim.run(60)
    assert dead(sim) - {"n0"} <= {
        event.member.node for _, by, event in sim.events(Dead) if by.node == "n0"
    }
    others = [by.node for _, by, event in sim.events(Dead) if event.member.node != "n0"]
    assert set(others) <= {"n0"}


def test_many_that_join_at_once_are_known_everywhere_soon() -> None:
    """One old node hears of them from etcd; the others only by gossip."""
    sim = Simulation(8, seed=14)
    sim.run(5)
    for i in range(8, 64):
        sim.start(f"n{i}", introduce=False)
    sim.introduce(to=[sim.nodes[NodeId("n0")]])
    sim.introduce(to=[sim.nodes[NodeId(f"n{i}")] for i in range(8, 64)])
    sim.run(5)
    assert sim.wrong() == {}
    assert sim.packet_bytes_max < 16 << 10


def test_it_stays_quiet_when_all_is_said() -> None:
    sim = Simulation(16, seed=15)
    sim.run(5)
    sim.kill("n1")
    sim.run(60)
    sim.packets.clear()
    sim.run(60)
    assert sum(sim.packets.values()) / 15 / 60 < 2.5


def test_the_figures_can_be_had_from_a_shell() -> None:
    module = "p2pkv.testing.swim_sim"
    command = [sys.executable, "-m", module, "--nodes=8", "--seconds=5", "--json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    report = json.loads(done.stdout)
    assert report["healthy"]["healthy_dead_total"] == 0
    assert [run["nodes"] for run in report["scaling"]] == [16, 64, 128]
    assert report["death"][0]["dead_everywhere_s"] < 10


def test_time_stands_still_between_runs() -> None:
    sim = Simulation(4, seed=16)
    assert sim.now == SECOND_NS
    sim.run(2)
    assert sim.now == 3 * SECOND_NS
