"""One node's membership, packet by packet; many nodes' are in test_swim_sim.py."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import pytest

from p2pkv.clock import seconds
from p2pkv.config import SwimConfig
from p2pkv.roster import Alive, Dead, Event, Left, Suspect
from p2pkv.swim import RECONNECT_PROBES, Action, Send, Swim
from p2pkv.swim_messages import (
    Ack,
    AnyPacket,
    Digest,
    Gossip,
    Nack,
    Ping,
    PingRequest,
    Rumor,
    State,
    Status,
    Sync,
)
from p2pkv.types import BootId, Member, NodeId

P = TypeVar("P", bound=AnyPacket)
LAN = SwimConfig()
STEP_NS = seconds(0.01)


def member(name: str, boot: int = 1) -> Member:
    return Member(NodeId(name), BootId(boot))


ME, B, C, D, E = (member(name) for name in ("me", "b", "c", "d", "e"))


def header(sender: Member, *rumors: Rumor, incarnation: int = 0) -> Any:
    return sender, incarnation, Digest(), rumors


class Driven:
    """A node at time ``now``, what it sent and what it saw."""

    def __init__(self, *others: Member, config: SwimConfig = LAN, seed: int = 1) -> None:
        self.now = seconds(100)
        self.swim = Swim(config, ME, "tcp://me:1", random.Random(seed), self.now)
        self.sent: list[tuple[Member, AnyPacket]] = []
        self.events: list[Event] = []
        self.take(self.swim.register({m: f"tcp://{m.node}:1" for m in (ME, *others)}, self.now))
        self.tick()
        self.sent.clear()
        self.events.clear()

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.append((action.to, action.packet))
            else:
                self.events.append(action)

    def tick(self) -> None:
        self.take(self.swim.tick(self.now))

    def receive(self, packet: AnyPacket) -> None:
        self.take(self.swim.receive(packet, self.now))

    def broke(self, who: Member) -> None:
        self.take(self.swim.connection_broke(who, self.now))

    def run(self, duration_s: float, answering: set[Member] | None = None) -> None:
        """Let time pass, ticking when it is due; ``answering`` answer pings at once."""
        end = self.now + seconds(duration_s)
        while self.now < end:
            self.now = min(end, max(self.now + 1, self.swim.due_ns))
            self.tick()
            self._answer(answering or set())

    def _answer(self, answering: set[Member]) -> None:
        for to, packet in list(self.sent):
            if isinstance(packet, Ping) and to in answering and packet.seq:
                self.receive(Ack(*header(to), packet.seq))

    def packets(self, kind: type[P], to: Member | None = None) -> list[P]:
        return [p for who, p in self.sent if isinstance(p, kind) and to in (None, who)]

    def status(self, who: Member) -> Status | None:
        return self.swim.status(who)


# -- probing


def test_each_member_is_pinged_once_in_a_round_and_who_answers_stays_alive() -> None:
    node = Driven(B, C, D)
    node.run(3.1, {B, C, D})
    assert sorted(to for to, p in node.sent if isinstance(p, Ping)) == [B, C, D]
    assert node.packets(PingRequest) == []
    assert node.events == []
    assert node.swim.awareness == 0


def test_alone_it_sends_nothing() -> None:
    node = Driven()
    node.run(120)
    assert node.sent == []
    assert node.swim.present == 1


def test_who_does_not_answer_is_probed_by_others_then_suspected_then_dead() -> None:
    node = Driven(B, C, D, E)
    node.run(1, {C, D, E})
    while not node.packets(Ping, B):
        node.run(0.1, {C, D, E})
    node.run(0.5, {C, D, E})
    asked = {to for to, p in node.sent if isinstance(p, PingRequest) and p.target == B}
    assert asked == {C, D, E}
    assert node.status(B) == Status.ALIVE
    node.run(0.5, {C, D, E})
    assert node.events == [Suspect(B)]
    node.run(24, {C, D, E})
    assert node.events == [Suspect(B), Dead(B)]
    assert node.swim.present == 4


def test_an_answer_by_way_of_others_is_one() -> None:
    node = Driven(B, C)
    while not node.packets(PingRequest, C):
        node.run(0.1, {C})
    (request,) = node.packets(PingRequest, C)
    node.receive(Ack(*header(C), request.seq))
    node.run(0.5, {C})
    assert node.status(B) == Status.ALIVE


def test_helpers_that_keep_silent_too_make_a_node_doubt_itself() -> None:
    node = Driven(B, C, D)
    while not node.packets(PingRequest):
        node.run(0.1)
    node.run(0.5)
    assert node.swim.awareness >= 2


def test_helpers_that_say_that_they_have_no_answer_leave_no_doubt() -> None:
    node = Driven(B, C, D)
    while not node.packets(PingRequest):
        node.run(0.1, {C, D})
    for to, packet in list(node.sent):
        if isinstance(packet, PingRequest):
            for _ in range(3):
                node.receive(Nack(*header(to), packet.seq))
    node.receive(Nack(*header(C), 999))
    node.run(0.5, {C, D})
    assert node.events == [Suspect(B)]
    assert node.swim.awareness == 0


def test_a_node_that_doubts_itself_waits_longer() -> None:
    node = Driven(B)
    node.run(3)
    assert node.swim.awareness >= 1
    node.sent.clear()
    node.run(8)
    regular = [p for p in node.packets(Ping, B) if p.seq]
    assert len({p.seq for p in regular}) < 5


def test_nobody_is_probed_twice_at_the_same_time() -> None:
    node = Driven(B)
    node.broke(B)
    node.broke(B)
    node.run(0.9)
    assert len({p.seq for p in node.packets(Ping, B) if p.seq}) == 1


def test_a_ping_is_answered() -> None:
    node = Driven(B)
    node.receive(Ping(*header(B), 7, ME))
    assert [p.seq for p in node.packets(Ack, B)] == [7]


def test_a_ping_for_a_former_life_is_answered_by_word_of_this_one() -> None:
    node = Driven(B)
    node.receive(Ping(*header(B), 7, member("me", 0)))
    assert node.packets(Ack) == []
    (gossip,) = node.packets(Gossip, B)
    assert gossip.rumors[0] == Rumor(ME, Status.ALIVE, 0, "tcp://me:1")


def test_a_ping_that_was_meant_for_another_node_is_not_answered() -> None:
    node = Driven(B)
    node.receive(Ping(*header(B), 7, C))
    assert node.sent == []


# -- probing for others


def test_who_is_asked_pings_the_target_and_passes_the_answer_on() -> None:
    node = Driven(B, C)
    node.receive(PingRequest(*header(B), 7, C))
    (ping,) = node.packets(Ping, C)
    node.receive(Ack(*header(C), ping.seq))
    assert [p.seq for p in node.packets(Ack, B)] == [7]
    node.run(0.5, {B, C})
    assert node.packets(Nack) == []


def test_who_is_asked_says_in_time_that_there_is_no_answer() -> None:
    node = Driven(B, C)
    node.receive(PingRequest(*header(B), 7, C))
    node.run(0.41, {B})
    assert [p.seq for p in node.packets(Nack, B)] == [7]


def test_a_request_about_a_stranger_is_not_answered() -> None:
    node = Driven(B)
    node.receive(PingRequest(*header(B), 7, C))
    assert node.sent == []


def test_too_many_requests_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.probing.RELAYS_MAX", 1)
    node = Driven(B, C)
    node.receive(PingRequest(*header(B), 7, C))
    node.receive(PingRequest(*header(B), 8, C))
    assert len(node.packets(Ping, C)) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_an_asker_that_is_gone_meanwhile_gets_no_answer(answers: bool) -> None:
    node = Driven(B, C, D)
    node.receive(PingRequest(*header(B), 7, C))
    (ping,) = node.packets(Ping, C)
    node.receive(Gossip(*header(D, Rumor(member("b", 2), Status.ALIVE, 0, "tcp://b:2"))))
    node.sent.clear()
    if answers:
        node.receive(Ack(*header(C), ping.seq))
    node.run(0.45, {C, D})
    assert node.packets(Ack) == []
    assert node.packets(Nack) == []


def test_the_answer_of_a_suspect_carries_its_refutation_along() -> None:
    node = Driven(B, C)
    suspicion = Rumor(C, Status.SUSPECT, 0, "tcp://c:1", NodeId("b"))
    node.receive(PingRequest(*header(B, suspicion), 7, C))
    (ping,) = node.packets(Ping, C)
    assert ping.rumors[0] == suspicion, "the target is told that it is suspected"
    node.receive(Ack(*header(C, incarnation=1), ping.seq))
    (ack,) = node.packets(Ack, B)
    assert ack.rumors[0] == Rumor(C, Status.ALIVE, 1, "tcp://c:1")
    assert node.events == [Suspect(C), Alive(C)]


def test_an_answer_that_refutes_nothing_is_passed_on_all_the_same() -> None:
    node = Driven(B, C)
    suspicion = Rumor(C, Status.SUSPECT, 0, "tcp://c:1", NodeId("b"))
    node.receive(PingRequest(*header(B, suspicion), 7, C))
    (ping,) = node.packets(Ping, C)
    node.receive(Ack(*header(C), ping.seq))
    assert [p.seq for p in node.packets(Ack, B)] == [7]
    assert node.status(C) == Status.SUSPECT


# -- connections that break


def test_a_broken_connection_is_a_suspicion_at_once_and_others_are_asked_at_once() -> None:
    node = Driven(B, C, D)
    node.broke(B)
    assert node.events == [Suspect(B)]
    assert {to for to, p in node.sent if isinstance(p, PingRequest)} == {C, D}
    (ping,) = node.packets(Ping, B)
    assert ping.rumors[0].status == Status.SUSPECT


def test_a_broken_connection_confirms_what_others_suspect() -> None:
    node = Driven(B, C, D)
    for accuser in (C, D):
        suspicion = Rumor(B, Status.SUSPECT, 0, "", accuser.node)
        node.receive(Gossip(*header(accuser, suspicion)))
    node.broke(B)
    node.run(4.01, {C, D})
    assert node.events == [Suspect(B), Dead(B)]


def test_whose_connection_broke_and_who_answers_is_alive_again() -> None:
    node = Driven(B, C, D)
    node.broke(B)
    node.receive(Ack(*header(C, Rumor(B, Status.ALIVE, 1, "tcp://b:1")), 1))
    assert node.events == [Suspect(B), Alive(B)]


def test_a_broken_connection_of_the_dead_or_of_strangers_is_no_news() -> None:
    node = Driven(B, C)
    node.receive(Gossip(*header(C, Rumor(B, Status.DEAD, 0))))
    node.broke(B)
    node.broke(E)
    assert node.events == [Dead(B)]


def test_a_probe_of_one_that_died_meanwhile_is_over() -> None:
    node = Driven(B, C)
    node.broke(B)
    node.receive(Gossip(*header(C, Rumor(B, Status.DEAD, 0))))
    node.run(1.5, {C})
    assert node.events == [Suspect(B), Dead(B)]
    assert node.swim.awareness == 0


# -- rumors


def test_news_ride_on_packets_and_are_gossiped_a_few_times() -> None:
    node = Driven(B, C, D)
    node.run(5, {B, C, D})
    node.sent.clear()
    news = Rumor(member("x"), Status.ALIVE, 0, "tcp://x:1")
    node.receive(Gossip(*header(B, news)))
    node.run(10, {B, C, D})
    assert 4 <= sum(news in p.rumors for _, p in node.sent) <= 8
    node.sent.clear()
    node.run(5, {B, C, D})
    assert node.packets(Gossip) == [], "there is nothing left to say"


def test_a_suspect_and_a_dead_one_are_told_so() -> None:
    node = Driven(B, C)
    node.broke(B)
    node.receive(Ping(*header(B), 7, ME))
    (ack,) = node.packets(Ack, B)
    assert ack.rumors[0] == Rumor(B, Status.SUSPECT, 0, "tcp://b:1", NodeId("me"))
    node.receive(Gossip(*header(C, Rumor(B, Status.DEAD, 0))))
    node.receive(Ping(*header(B), 8, ME))
    assert node.packets(Ack, B)[1].rumors[0].status == Status.DEAD


def test_what_is_said_of_oneself_is_refuted_and_doubted() -> None:
    node = Driven(B)
    node.receive(Ping(*header(B, Rumor(ME, Status.SUSPECT, 0, "", B.node)), 7, ME))
    (ack,) = node.packets(Ack, B)
    assert ack.incarnation == 1
    assert Rumor(ME, Status.ALIVE, 1, "tcp://me:1") in ack.rumors
    assert node.swim.refuted_total == 1
    assert node.swim.awareness == 1
    node.receive(Gossip(*header(B, Rumor(ME, Status.SUSPECT, 0, "", B.node))))
    node.receive(Gossip(*header(B, Rumor(member("me", 0), Status.DEAD, 9))))
    assert node.swim.refuted_total == 1, "that is old"


def test_a_higher_incarnation_of_the_sender_is_as_good_as_its_rumor() -> None:
    node = Driven(B, C)
    node.broke(B)
    node.receive(Ping(*header(B, incarnation=1), 7, ME))
    assert node.events == [Suspect(B), Alive(B)]
    assert next(e for e in node.swim.entries() if e.member == B).address == "tcp://b:1"


def test_a_suspect_is_pinged_by_each_that_suspects_it_before_it_counts_as_dead() -> None:
    node = Driven(B, C)
    for accuser in ("c", "x"):
        rumor = Rumor(B, Status.SUSPECT, 0, "", NodeId(accuser))
        node.receive(Gossip(*header(C, rumor)))
    node.run(1.9, {C})
    before = len([p for p in node.packets(Ping, B) if not p.seq])
    node.run(2, {C})
    assert before == 0
    assert len([p for p in node.packets(Ping, B) if not p.seq]) == 2


def test_packets_of_strangers_do_no_more_than_introduce_them() -> None:
    node = Driven(B)
    node.receive(Ping(*header(C), 7, ME))
    assert node.sent == []
    node.receive(Ping(*header(C, Rumor(C, Status.ALIVE, 0, "tcp://c:1")), 8, ME))
    assert node.events == [Alive(C)]
    assert [p.seq for p in node.packets(Ack, C)] == [8]


def test_its_own_packets_and_those_of_who_left_are_not_heard() -> None:
    node = Driven(B, C)
    node.receive(Ping(*header(ME), 7, ME))
    node.receive(Gossip(*header(C, Rumor(B, Status.LEFT, 0))))
    node.receive(Ping(*header(B), 8, ME))
    assert node.packets(Ack) == []
    assert node.events == [Left(B)]


def test_digests_ride_on_packets() -> None:
    node = Driven(B)
    node.receive(Ping(B, 0, Digest(serial=1, memory_permille=500), (), 7, ME))
    (entry,) = node.swim.entries()
    assert entry.digest.memory_permille == 500
    node.swim.digest = Digest(serial=3, queue_depth=9)
    node.receive(Ping(*header(B), 8, ME))
    assert node.packets(Ack, B)[-1].digest.queue_depth == 9


# -- all states


def test_all_states_are_exchanged_now_and_then() -> None:
    node = Driven(B, C)
    node.run(80, {B, C})
    assert 1 <= len(node.packets(Sync)) <= 4
    assert {s.rumor.member for s in node.packets(Sync)[0].states} == {ME, B, C}


def test_all_states_are_exchanged_less_often_in_a_large_cluster() -> None:
    crowd = [member(f"n{i}") for i in range(127)]
    node = Driven(*crowd)
    node.run(300, set(crowd))
    assert 2 <= len(node.packets(Sync)) <= 4


def test_an_exchange_is_answered_and_brings_news() -> None:
    node = Driven(B)
    states = (State(Rumor(C, Status.ALIVE, 0, "tcp://c:1"), Digest(serial=5, revision=8)),)
    node.receive(Sync(*header(B), states, answer=False))
    assert node.events == [Alive(C)]
    (answer,) = node.packets(Sync, B)
    assert answer.answer
    assert {s.rumor.member: s.digest.revision for s in answer.states} == {ME: 0, B: 0, C: 8}
    node.receive(Sync(*header(B), states, answer=True))
    assert len(node.packets(Sync)) == 1, "an answer is not answered"


def test_who_is_dead_for_another_is_a_suspect_here() -> None:
    node = Driven(B, C)
    node.receive(Sync(*header(B), (State(Rumor(C, Status.DEAD, 0), Digest()),), answer=True))
    assert node.events == [Suspect(C)]


# -- being away


def test_who_was_away_blames_no_one_for_the_answers_that_it_missed() -> None:
    node = Driven(B, C, D)
    while not node.packets(Ping):
        node.run(0.1)
    for seconds_away in (1, 5, 60):
        node.now += seconds(seconds_away)
        node.tick()
        node.run(0.4, {B, C, D})
    assert node.events == []
    assert node.swim.away_total == 3
    assert node.swim.awareness > 0


def test_who_was_away_gives_suspects_their_time() -> None:
    node = Driven(B, C, D)
    node.broke(B)
    node.run(1, {C, D})
    node.now += seconds(3600)
    node.receive(Ping(*header(C), 7, ME))
    node.run(1, {C, D})
    assert node.events == [Suspect(B)]


def test_being_a_little_late_is_not_being_away() -> None:
    node = Driven(B)
    for _ in range(20):
        node.now = node.swim.due_ns + seconds(0.2)
        node.tick()
    assert node.swim.away_total == 0


def test_what_came_before_the_first_tick_was_not_missed() -> None:
    swim = Swim(LAN, ME, "tcp://me:1", random.Random(1), 0)
    swim.register({B: "tcp://b:1"}, seconds(5))
    swim.tick(seconds(9))
    assert swim.away_total == 0


# -- the dead, the registered, and leaving


def test_those_taken_for_dead_are_pinged_now_and_then_while_they_are_registered() -> None:
    node = Driven(B, C)
    node.receive(Gossip(*header(C, Rumor(B, Status.DEAD, 0))))
    node.run(2 * RECONNECT_PROBES + 0.5, {C})
    pings = node.packets(Ping, B)
    assert len(pings) == 2
    assert all(p.rumors[0].status == Status.DEAD for p in pings)
    node.receive(Ack(*header(B, incarnation=1), 0))
    assert node.events == [Dead(B), Alive(B)]


def test_those_that_died_and_are_registered_no_more_are_forgotten() -> None:
    node = Driven(B, C)
    node.receive(Gossip(*header(C, Rumor(B, Status.DEAD, 0))))
    node.take(node.swim.register({C: "tcp://c:1"}, node.now))
    node.run(32, {C})
    assert node.status(B) is None
    assert [e.member for e in node.swim.entries()] == [C]


def test_who_leaves_tells_everybody_at_once_and_is_silent_then() -> None:
    node = Driven(B, C, D)
    node.take(node.swim.leave(node.now))
    assert sorted(to for to, _ in node.sent) == [B, C, D]
    left = Rumor(ME, Status.LEFT, 0, "tcp://me:1")
    assert all(packet.rumors[0] == left for _, packet in node.sent)
    assert node.status(ME) == Status.LEFT
    node.sent.clear()
    node.receive(Ping(*header(B), 7, ME))
    node.broke(B)
    node.run(100)
    assert node.sent == []
    assert node.events == []


def test_it_is_alive_for_itself() -> None:
    node = Driven(B)
    assert node.status(ME) == Status.ALIVE
    assert node.status(member("me", 2)) is None
