from __future__ import annotations

import random

import pytest

from p2pkv import probing
from p2pkv.config import SwimConfig
from p2pkv.probing import Probe, Probing, Relay
from p2pkv.roster import Roster
from p2pkv.swim_messages import Rumor, Status
from p2pkv.types import BootId, Member, NodeId

ME, *OTHERS = (Member(NodeId(name), BootId(1)) for name in ("me", "a", "b", "c", "d"))


@pytest.fixture
def roster() -> Roster:
    roster = Roster(SwimConfig().resolved(), ME)
    roster.register(dict.fromkeys(OTHERS, "tcp://x:1"), 0)
    return roster


def bury(roster: Roster, member: Member) -> None:
    roster.hear(Rumor(member, Status.DEAD, 0), 0)


def test_each_member_comes_once_in_a_round_in_another_order_each_time(roster: Roster) -> None:
    probing = Probing(roster, random.Random(1))
    orders = set()
    for _ in range(20):
        found = [probing.next_target() for _ in OTHERS]
        members = tuple(entry.member for entry in found if entry is not None)
        assert set(members) == set(OTHERS)
        orders.add(members)
    assert len(orders) > 5


def test_those_that_died_since_the_round_began_are_passed_over(roster: Roster) -> None:
    probing = Probing(roster, random.Random(1))
    first = probing.next_target()
    assert first is not None
    rest = set(OTHERS) - {first.member}
    gone = sorted(rest)[0]
    bury(roster, gone)
    found = [probing.next_target() for _ in range(2)]
    assert {entry.member for entry in found if entry is not None} == rest - {gone}


def test_without_others_there_is_no_target(roster: Roster) -> None:
    probing = Probing(roster, random.Random(1))
    for member in OTHERS:
        bury(roster, member)
    assert probing.next_target() is None


def test_probes_and_relays_are_due_at_their_times() -> None:
    under_way = Probing(Roster(SwimConfig().resolved(), ME), random.Random(1))
    assert under_way.next_due_ns() is None
    a, b = OTHERS[:2]
    probe = Probe(a, indirect_ns=50, ends_ns=100)
    seq = under_way.begin(probe)
    relay_seq = under_way.relay(Relay(b, 9, 70))
    assert under_way.is_probed(a)
    assert not under_way.is_probed(b)
    assert under_way.next_due_ns() == 50
    assert under_way.due(49) == ([], [])
    assert under_way.due(50) == ([(seq, probe)], [])
    probe.indirect_ns = None
    probes, relays = under_way.due(70)
    assert probes == []
    assert [(s, relay.asker, relay.seq) for s, relay in relays] == [(relay_seq, b, 9)]
    assert under_way.due(100)[0] == [(seq, probe)]
    under_way.abandon()
    assert under_way.next_due_ns() is None


def test_only_so_many_probes_are_made_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "RELAYS_MAX", 2)
    under_way = Probing(Roster(SwimConfig().resolved(), ME), random.Random(1))
    numbers = [under_way.relay(Relay(OTHERS[0], i, 70)) for i in range(3)]
    assert numbers == [1, 2, None]
