"""What is believed of a member, rumor by rumor."""

from __future__ import annotations

import pytest

from p2pkv import roster as roster_module
from p2pkv.clock import seconds
from p2pkv.config import SwimConfig
from p2pkv.roster import Alive, Dead, Left, Roster, Suspect, refuted
from p2pkv.swim_messages import INCARNATION_MAX, Digest, Rumor, Status
from p2pkv.types import BootId, Member, NodeId

ALIVE, SUSPECT, DEAD, LEFT = Status
CONFIG = SwimConfig().resolved()


def member(name: str, boot: int = 1) -> Member:
    return Member(NodeId(name), BootId(boot))


ME, B, C, D = (member(name) for name in ("me", "b", "c", "d"))


def rumor(who: Member, status: Status, incarnation: int = 0, by: str = "") -> Rumor:
    return Rumor(who, status, incarnation, f"tcp://{who.node}:1", NodeId(by))


@pytest.fixture
def roster() -> Roster:
    roster = Roster(CONFIG, ME)
    roster.register({B: "tcp://b:1", C: "tcp://c:1", D: "tcp://d:1"}, 0)
    roster.events.clear()
    return roster


def believe(roster: Roster, who: Member, status: Status, incarnation: int) -> None:
    if status != ALIVE:
        roster.hear(rumor(who, status, incarnation, "d"), 0)
    else:
        roster.hear(rumor(who, status, incarnation), 0)
    roster.events.clear()


@pytest.mark.parametrize("incarnation", [4, 5, 6])
@pytest.mark.parametrize("told", Status)
@pytest.mark.parametrize("held", Status)
def test_of_two_rumors_the_later_counts_and_of_one_incarnation_the_worse(
    roster: Roster, held: Status, told: Status, incarnation: int
) -> None:
    """The whole table: held at incarnation 5, told at 4, 5 and 6."""
    believe(roster, B, held, 5)
    assert roster.entries[B.node].status == held
    roster.hear(rumor(B, told, incarnation, "d" if told == SUSPECT else ""), 1)
    if told == ALIVE:
        accepted = incarnation == 6 and held != LEFT
    elif held == told == SUSPECT:
        accepted = incarnation == 6
    else:
        accepted = incarnation >= 5 and told > held
    entry = roster.entries[B.node]
    assert entry.status == (told if accepted else held)
    assert entry.incarnation == (incarnation if accepted else 5)
    kinds = {ALIVE: Alive, SUSPECT: Suspect, DEAD: Dead, LEFT: Left}
    assert roster.events == ([kinds[told](B)] if accepted and told != held else [])
    assert roster.size == 4 - (entry.status in (DEAD, LEFT))
    assert (B.node in roster.suspicions) == (entry.status == SUSPECT)


def test_who_is_registered_is_alive_until_shown_otherwise(roster: Roster) -> None:
    assert roster.size == 4
    assert {e.member for e in roster.those([ALIVE])} == {B, C, D}
    believe(roster, B, DEAD, 0)
    roster.register({B: "tcp://b:1"}, 5)
    assert roster.entries[B.node].status == DEAD
    assert roster.events == []


def test_a_next_life_takes_the_place_of_the_former(roster: Roster) -> None:
    roster.register({member("b", 2): "tcp://b:2"}, 5)
    assert roster.events == [Dead(B), Alive(member("b", 2))]
    assert roster.find(B) is None
    assert roster.size == 4
    assert not roster.hear(rumor(B, DEAD, 9), 6), "a rumor of the former life"


def test_a_next_life_of_a_dead_one_is_only_alive(roster: Roster) -> None:
    believe(roster, B, DEAD, 0)
    roster.hear(rumor(member("b", 2), ALIVE), 5)
    assert roster.events == [Alive(member("b", 2))]


def test_a_next_life_may_be_suspected_or_over_when_one_hears_of_it(roster: Roster) -> None:
    roster.hear(rumor(member("b", 2), SUSPECT, 0, "d"), 5)
    assert roster.events == [Dead(B), Alive(member("b", 2)), Suspect(member("b", 2))]
    roster.events.clear()
    roster.hear(rumor(member("c", 2), LEFT), 5)
    assert roster.events == [Dead(C), Alive(member("c", 2)), Left(member("c", 2))]
    assert roster.size == 3


def test_a_stranger_is_met_alive_or_suspected_but_not_dead(roster: Roster) -> None:
    assert not roster.hear(rumor(member("x"), DEAD), 0)
    assert not roster.hear(rumor(member("x"), LEFT), 0)
    assert roster.hear(rumor(member("x"), SUSPECT, 0, "b"), 0)
    assert roster.hear(rumor(member("y"), ALIVE), 0)
    assert roster.size == 6


def test_there_is_a_limit_to_strangers(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "MEMBERS_MAX", 3)
    assert not roster.hear(rumor(member("x"), ALIVE), 0)
    assert roster.hear(rumor(member("b", 2), ALIVE), 0), "a next life needs no more room"


def test_accusers_shorten_the_time_and_are_passed_on(roster: Roster) -> None:
    roster.rumors.take(9, 1)
    roster.hear(rumor(B, SUSPECT, 0, "c"), 0)
    suspicion = roster.suspicions[B.node]
    assert suspicion.ends_ns == seconds(24)
    assert roster.hear(rumor(B, SUSPECT, 0, "d"), 1)
    assert seconds(4) < suspicion.ends_ns < seconds(24)
    roster.suspect(roster.entries[B.node], 2)
    assert suspicion.ends_ns == seconds(4)
    assert [r.by for r in roster.rumors.take(9, 9)] == ["me"]
    assert not roster.hear(rumor(B, SUSPECT, 0, "d"), 3)
    assert roster.events == [Suspect(B)]


def test_a_suspicion_of_a_later_incarnation_begins_anew(roster: Roster) -> None:
    roster.hear(rumor(B, SUSPECT, 0, "c"), 0)
    roster.hear(rumor(B, SUSPECT, 1, "c"), seconds(3))
    suspicion = roster.suspicions[B.node]
    assert suspicion.ends_ns == seconds(27)
    assert roster.events == [Suspect(B)]


def test_who_does_not_refute_in_time_is_dead(roster: Roster) -> None:
    assert roster.next_due_ns() is None
    roster.suspect(roster.entries[B.node], 0)
    assert roster.next_due_ns() == seconds(2)
    roster.bury(seconds(24) - 1)
    assert roster.events == [Suspect(B)]
    roster.bury(seconds(24))
    assert roster.events == [Suspect(B), Dead(B)]
    assert roster.next_due_ns() is None


def test_time_that_this_node_was_away_does_not_count(roster: Roster) -> None:
    roster.suspect(roster.entries[B.node], 0)
    roster.excuse(seconds(60))
    roster.bury(seconds(83))
    assert roster.events == [Suspect(B)]


def test_a_suspect_is_called_again_and_again_in_the_second_half_of_its_time(
    roster: Roster,
) -> None:
    roster.suspect(roster.entries[B.node], 0)
    assert roster.to_be_called(seconds(2) - 1, seconds(1)) == []
    assert [e.member for e in roster.to_be_called(seconds(2), seconds(1))] == [B]
    assert roster.to_be_called(seconds(2.9), seconds(1)) == []
    assert [e.member for e in roster.to_be_called(seconds(3), seconds(1))] == [B]


def test_the_dead_are_forgotten_when_they_are_not_registered_any_more(roster: Roster) -> None:
    believe(roster, B, DEAD, 0)
    believe(roster, C, LEFT, 0)
    roster.forget(seconds(99))
    assert {e.member for e in roster.those(Status)} == {B, C, D}
    roster.register({C: "tcp://c:1"}, seconds(99))
    assert roster.is_registered(C)
    assert not roster.is_registered(member("c", 2))
    roster.forget(seconds(30) - 1)
    assert B.node in roster.entries
    roster.forget(seconds(30))
    assert {e.member for e in roster.those(Status)} == {C, D}


def test_a_digest_is_taken_over_if_it_is_newer_and_of_this_life(roster: Roster) -> None:
    roster.believe(B, Digest(serial=2, revision=7))
    roster.believe(B, Digest(serial=1, revision=6))
    roster.believe(member("b", 2), Digest(serial=3, revision=8))
    roster.believe(member("x"), Digest(serial=3))
    assert roster.entries[B.node].digest == Digest(serial=2, revision=7)


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        (rumor(ME, SUSPECT, 3), 4),
        (rumor(ME, DEAD, 5), 6),
        (rumor(ME, LEFT, 3), 4),
        (rumor(ME, SUSPECT, 2), None),
        (rumor(ME, ALIVE, 3), None),
        (rumor(ME, ALIVE, 4), 5),
        (rumor(ME, SUSPECT, INCARNATION_MAX), None),
    ],
)
def test_what_is_said_of_oneself_is_refuted_by_a_higher_incarnation(
    told: Rumor, answer: int | None
) -> None:
    assert refuted(told, 3) == answer


def test_a_newer_incarnation_of_an_alive_one_is_news_but_no_event(roster: Roster) -> None:
    assert roster.hear(Rumor(B, ALIVE, 1), 0)
    assert roster.events == []
    assert roster.entries[B.node].address == "tcp://b:1", "kept where the rumor has none"
