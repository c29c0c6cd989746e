from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv import membership
from p2pkv.clock import SECOND_NS
from p2pkv.config import local
from p2pkv.errors import ConfigError, InvalidArgument, ProtocolError
from p2pkv.membership import Contacts, Heartbeat, Report
from p2pkv.types import BootId, Member, NodeId, Revision

NEVER = -(1 << 62)
CONFIG = local()


def member(name: str, boot: int = 1) -> Member:
    return Member(NodeId(name), BootId(boot))


A, B, C, D = (member(name) for name in "abcd")


def s(seconds: float) -> int:
    return round(seconds * SECOND_NS)


def contacts(me: Member, *others: Member, **config: Any) -> Contacts:
    result = Contacts(local(**config), me)
    result.register([me, *others], Revision(1))
    return result


ASK = Heartbeat(B, 1, 1, (Report(B),), asks=True)


def say(who: Contacts, now: int, contact: int) -> Heartbeat:
    """The heartbeat that it sends now: of its own accord, or because it is asked."""
    beat = who.beat(now, contact) or who.answer(ASK, now, contact)
    assert beat is not None
    return beat


def exchange(now: float, **contact: tuple[Contacts, float]) -> None:
    """Those that ask send a heartbeat at ``now``, and the others hear and answer at once."""
    beats = {name: c.beat(s(now), s(at)) for name, (c, at) in contact.items()}
    for name, beat in beats.items():
        for other, (c, at) in contact.items():
            if other == name:
                continue
            c.told(contact[name][0].me, contact[name][0].told_revision(s(now)))
            if beat is not None and c.heard(beat, s(now) + 1):
                answer = c.answer(beat, s(now) + 1, s(at))
                if answer is not None:
                    contact[name][0].heard(answer, s(now) + 2)


# -- configuration


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"peer_contact_s": 1.0}, "peer_contact_s"),
        ({"peer_contact_s": 9.0}, "peer_contact_s"),
        ({"fence_after_s": 19.0}, "reset_after_s"),
    ],
)
def test_times_that_leave_no_room_are_refused(changes: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = "):
        Contacts(local(**changes), A)


# -- registration


def test_heartbeats_go_to_the_registered_members_and_to_those_that_left_lately() -> None:
    a = contacts(A, B, C)
    a.register([A, B, D], Revision(2))
    assert a.peers() == {B, C, D}


def test_a_restarted_node_replaces_its_former_life() -> None:
    a = contacts(A, B)
    a.register([A, member("b", 2)], Revision(2))
    assert a.peers() == {member("b", 2)}


def test_an_older_revision_is_refused_and_changes_nothing() -> None:
    a = contacts(A, B)
    with pytest.raises(InvalidArgument, match="revision = 0"):
        a.register([A], Revision(0))
    assert say(a, s(1), s(1)).revision == 1


def test_too_many_members_are_refused() -> None:
    a = contacts(A)
    crowd = [member(f"n{i}") for i in range(membership.MEMBERS_MAX)]
    with pytest.raises(InvalidArgument, match=str(membership.MEMBERS_MAX)):
        a.register([A, *crowd], Revision(2))
    assert a.peers() == set()


def test_only_so_many_departed_members_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "DEPARTED_MAX", 2)
    gone = [member(f"n{i}") for i in range(4)]
    a = contacts(A, *gone)
    for i in range(4):
        a.register([A, *gone[i + 1 :]], Revision(2 + i))
    for now in (100, 119):
        say(a, s(now), s(now))
        assert a.peers() == set(gone), "none left long enough ago"
    say(a, s(120), s(120))
    assert a.peers() == set(gone[2:])


def test_a_node_counts_majorities_in_the_last_set_that_it_was_in() -> None:
    a = contacts(A, B)
    a.register([B, C], Revision(2))
    assert say(a, s(1), s(1)).revision == 1
    a.register([A, B, C], Revision(3))
    assert say(a, s(2), s(2)).revision == 3


# -- heartbeats


def test_a_heartbeat_survives_the_wire() -> None:
    a, b = contacts(A, B), contacts(B, A)
    exchange(1, a=(a, 0.5), b=(b, 0.7))
    beat = say(a, s(1.5), s(0.5))
    assert membership.decode(membership.encode(beat)) == beat


def test_a_heartbeat_of_more_reports_than_members_is_refused_by_the_decoder() -> None:
    report = Report(A)
    beat = Heartbeat(A, 1, 1, (report,) * (membership.MEMBERS_MAX + 2))
    with pytest.raises(ProtocolError, match=r"heartbeat: .*length"):
        membership.decode(membership.encode(beat))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([["a", 1], -1, 1, []]),
        msgspec.msgpack.encode([["a", 1], 1, 1, [], True, "more"]),
    ],
)
def test_what_is_no_heartbeat_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="heartbeat: "):
        membership.decode(frame)


def test_a_heartbeat_tells_own_and_others_contacts_as_ages() -> None:
    a, b = contacts(A, B), contacts(B, A)
    a.heard(say(b, s(7), s(5)), s(100))
    beat = say(a, s(103.0006), s(102))
    assert beat.reports == (
        Report(A, contact_name=s(102), contact_age_ms=1000),
        Report(B, contact_name=s(5), contact_age_ms=5000, heard_sent_ns=s(7)),
    )


def test_a_node_without_contact_says_so() -> None:
    assert say(contacts(A), s(1), NEVER).reports == (Report(A),)


def test_heartbeats_sent_in_the_same_instant_have_rising_times() -> None:
    a = contacts(A)
    assert say(a, s(1), s(1)).sent_ns < say(a, s(1), s(1)).sent_ns


@pytest.mark.parametrize(
    "sender", [A, C, member("b", 0)], ids=["oneself", "a stranger", "a former life"]
)
def test_a_heartbeat_is_ignored_of(sender: Member) -> None:
    a = contacts(A, B)
    assert not a.heard(Heartbeat(sender, s(1), 1, (Report(sender, 5, 5),)), s(1))
    assert say(a, s(1), s(1)).reports[1:] == (Report(B),)


def test_an_overtaken_or_repeated_heartbeat_is_ignored() -> None:
    a, b = contacts(A, B), contacts(B, A)
    first, second = say(b, s(1), s(1)), say(b, s(2), s(2))
    assert a.heard(second, s(2))
    assert not a.heard(first, s(9))
    assert not a.heard(second, s(9))
    assert say(a, s(9), s(9)).reports[1] == Report(B, s(2), 7000, s(2))


def test_a_new_life_is_heard_before_its_registration_is_known() -> None:
    a = contacts(A, B)
    restarted = contacts(member("b", 2), A)
    assert a.heard(say(restarted, s(1), s(1)), s(1))
    assert a.peers() == {member("b", 2)}


# -- asking


def test_a_node_with_contact_asks_nothing_and_answers_who_asks() -> None:
    a, b = contacts(A, B), contacts(B, A)
    assert a.beat(s(100), s(98)) is None
    answer = a.answer(ASK, s(100), s(99))
    assert answer is not None
    assert not answer.asks
    assert b.heard(answer, s(100))
    assert b.answer(answer, s(100), s(100)) is None, "an answer wants none"


def test_a_node_asks_from_half_of_the_time_that_a_contact_counts_until_it_is_fenced() -> None:
    a = contacts(A, B, C)
    assert a.beat(s(102.4), s(100)) is None
    for now in (102.5, 110):
        beat = a.beat(s(now), s(100))
        assert beat is not None
        assert beat.asks
    assert a.beat(s(110) + 1, s(100)) is None
    assert contacts(A, B, etcd_loss="fence").beat(s(105), s(100)) is None


def test_who_asks_answers_by_its_next_heartbeat() -> None:
    a = contacts(A, B)
    assert a.answer(ASK, s(105), s(100)) is None


def test_a_node_asks_while_it_is_asked_about_an_owner_without_session() -> None:
    a = contacts(A, B, C)
    assert a.lost(s(100), {A, B, C, D}) == set()
    assert a.beat(s(100), s(100)) is None
    a.register([A, B], Revision(2))
    assert a.lost(s(101), {C}) == set()
    for now in (101, 103):
        assert a.beat(s(now), s(now)) is not None
    assert a.beat(s(103) + 1, s(103)) is None


def test_what_is_told_of_sets_of_members_counts_for_this_life_only_and_never_goes_back() -> None:
    def reset_with(*told: tuple[Member, int]) -> set[Member]:
        def tell(nodes: dict[str, Contacts]) -> None:
            nodes["a"].register([A, B], Revision(9), gap=True)
            nodes["a"].register([A, B, C], Revision(10))
            for who, revision in told:
                nodes["a"].told(who, Revision(revision))
            nodes["a"].register([A, B], Revision(11))
            nodes["b"].register([A, B], Revision(11))

        a = cluster(130, then={101.0: tell})
        return a.lost(s(130), {C})

    assert reset_with((C, 10)) == {C}
    assert reset_with((C, 10), (C, 3)) == {C}
    assert reset_with((C, 8)) == set()
    assert reset_with((member("c", 2), 10), (D, 10)) == set()


def test_an_unchanged_set_is_told_by_the_newest_revision() -> None:
    a = contacts(A, B)
    a.unchanged(Revision(7))
    a.unchanged(Revision(6))
    assert a.told_revision(s(1)) == 7
    a.register([B], Revision(8))
    a.unchanged(Revision(9))
    assert a.told_revision(s(1)) == 7, "not of a set that it is not in"


def test_who_serves_on_the_word_of_a_majority_tells_of_the_set_which_that_was_one_of() -> None:
    a, _ = outage(130)
    a.register([A, B, C, D], Revision(5))
    assert a.told_revision(s(139)) == 1
    assert a.told_revision(s(141)) == 5


def test_of_two_ages_of_one_contact_the_greater_counts() -> None:
    a = contacts(A, B, C)
    a.heard(Heartbeat(B, 1, 1, (Report(B), Report(C, s(50), 4000))), s(1))
    a.heard(Heartbeat(B, 2, 1, (Report(B), Report(C, s(50), 3000))), s(1))
    assert say(a, s(1), s(1)).reports[2].contact_age_ms == 4000
    a.heard(Heartbeat(B, 3, 1, (Report(B), Report(C, s(50), 5000))), s(1))
    assert say(a, s(1), s(1)).reports[2].contact_age_ms == 5000


def test_a_newer_contact_replaces_an_older_one_and_not_the_other_way_round() -> None:
    a = contacts(A, B, C)
    a.heard(Heartbeat(B, 1, 1, (Report(B), Report(C, s(50), 4000))), s(1))
    a.heard(Heartbeat(B, 2, 1, (Report(B), Report(C, s(51), 100))), s(1))
    a.heard(Heartbeat(B, 3, 1, (Report(B), Report(C, s(49), 9000))), s(1))
    assert say(a, s(1), s(1)).reports[2] == Report(C, s(51), 100)


def test_reports_on_strangers_and_on_other_lives_are_not_relayed() -> None:
    a = contacts(A, B, C)
    reports = (Report(B), Report(D, 5, 5), Report(member("c", 2), 5, 5))
    a.heard(Heartbeat(B, 1, 1, reports), s(1))
    assert say(a, s(1), s(1)).reports[1:] == (Report(B, heard_sent_ns=1), Report(C))


@given(
    hops=st.lists(st.tuples(st.integers(0, 3 * SECOND_NS), st.integers(0, SECOND_NS)), max_size=9)
)
def test_a_relayed_contact_never_seems_older_than_it_is(hops: list[tuple[int, int]]) -> None:
    nodes = [contacts(A, B, C), contacts(B, A, C)]
    c = contacts(C, A, B)
    now = s(100)
    nodes[0].heard(say(c, now, now), now)
    for i, (wait, flight) in enumerate(hops):
        now += wait
        beat = say(nodes[i % 2], now, NEVER)
        now += flight
        nodes[(i + 1) % 2].heard(beat, now)
    newest = say(nodes[len(hops) % 2], now, NEVER)
    report = next(r for r in newest.reports if r.member == C)
    assert report.contact_age_ms * 1_000_000 <= newest.sent_ns - s(100)


# -- the Self-fence rule


def test_a_node_serves_for_ten_seconds_after_its_last_contact() -> None:
    a = contacts(A, B, C)
    assert a.may_serve(s(110), s(100))
    assert not a.may_serve(s(110) + 1, s(100))


def outage(until: float, **config: Any) -> tuple[Contacts, Contacts]:
    """Two of three nodes go on exchanging heartbeats after everybody's last contact at 100 s."""
    a, b = contacts(A, B, C, **config), contacts(B, A, C, **config)
    now = 100.0
    while now <= until:
        exchange(now, a=(a, 100), b=(b, 100))
        now += 0.5
    return a, b


def test_a_majority_without_contact_vouches() -> None:
    a, b = outage(130)
    assert a.may_serve(s(139), s(100))
    assert b.may_serve(s(139), s(100))
    assert not a.may_serve(s(140), s(100))


def test_nobody_vouches_if_losing_etcd_is_to_fence() -> None:
    a, _ = outage(130, etcd_loss="fence")
    assert not a.may_serve(s(111), s(100))


def test_a_minority_does_not_vouch() -> None:
    a, b = contacts(A, B, C, D), contacts(B, A, C, D)
    for now in range(100, 131):
        exchange(now, a=(a, 100), b=(b, 100))
    assert not a.may_serve(s(111), s(100))


def test_a_single_node_vouches_for_itself() -> None:
    a = contacts(A)
    for now in range(100, 131):
        say(a, s(now), s(100))
    assert a.may_serve(s(131), s(100))


def test_a_majority_that_answers_too_late_does_not_vouch() -> None:
    a, b = outage(100)
    exchange(111, a=(a, 100), b=(b, 100))
    exchange(112, a=(a, 100), b=(b, 100))
    assert not a.may_serve(s(112), s(100))


def test_who_has_contact_does_not_vouch_directly_or_relayed() -> None:
    a, b = contacts(A, B, C), contacts(B, A, C)
    for now in range(100, 131):
        b.heard(Heartbeat(C, s(now), 1, (Report(C, s(now), 0),)), s(now))
        exchange(now, a=(a, 100), b=(b, 100))
    assert not a.may_serve(s(111), s(100))


def test_one_that_is_seen_and_knows_of_a_contact_outweighs_a_majority() -> None:
    a, b = contacts(A, B, C), contacts(B, A, C)
    for now in range(100, 131):
        a.heard(Heartbeat(C, s(now), 1, (Report(C, s(now), 0),)), s(now))
        exchange(now, a=(a, 100), b=(b, 100))
    assert not a.may_serve(s(111), s(100))


def test_a_heartbeat_vouches_for_the_time_that_it_answers() -> None:
    a = contacts(A, B)
    sent = say(a, s(100), s(100)).sent_ns
    for now in (106, 108):
        say(a, s(now), s(100))
    a.heard(Heartbeat(B, 1, 1, (Report(B), Report(A, heard_sent_ns=sent + s(6)))), s(109))
    assert a.may_serve(s(116), s(100))
    assert not a.may_serve(s(116.1), s(100))


def test_an_answer_to_a_heartbeat_that_was_never_sent_does_not_count() -> None:
    a = contacts(A, B)
    say(a, s(106), s(100))
    a.heard(Heartbeat(B, 1, 1, (Report(B), Report(A, heard_sent_ns=s(107)))), s(109))
    assert not a.may_serve(s(111), s(100))


def test_those_that_are_forgotten_do_not_vouch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "DEPARTED_MAX", 0)
    a = contacts(A, B)
    a.register([], Revision(2))
    say(a, s(70), s(100))
    say(a, s(100), s(100))
    assert a.peers() == set()
    say(a, s(106), s(100))
    assert not a.may_serve(s(111), s(100))


# -- the Reset rule


Action = Callable[[dict[str, Contacts]], None]


def cluster(
    until: float, quiet: Collection[str] = (), then: Mapping[float, Action] | None = None
) -> Contacts:
    """A's contacts at ``until``: A, B and C exchange heartbeats and have contact each second, until
    C dies at 100.5 s. Those that are ``quiet`` send nothing; ``then`` happens at its time."""
    nodes = {"a": contacts(A, B, C), "b": contacts(B, A, C), "c": contacts(C, A, B)}
    now, gone = 90.0, False
    while now <= until:
        if now >= 100.5 and not gone:
            gone = True
            del nodes["c"]
            for node in nodes.values():
                node.register([A, B], Revision(2))
        if then and now in then:
            then[now](nodes)
        nodes["a"].lost(s(now), {A, B, C})
        exchange(now, **{n: (node, int(now)) for n, node in nodes.items() if n not in quiet})
        now += 0.5
    return nodes["a"]


def test_a_member_is_lost_when_its_session_was_gone_for_twenty_seconds() -> None:
    a = cluster(125)
    assert a.lost(s(120.4), {A, B, C}) == set()
    assert a.lost(s(120.5) + 2, {A, B, C}) == {C}


def test_a_member_that_left_since_the_last_heartbeat_is_not_lost_yet() -> None:
    def b_leaves(nodes: dict[str, Contacts]) -> None:
        nodes["a"].register([A], Revision(3))

    assert cluster(125, then={125.0: b_leaves}).lost(s(125), {B}) == set()
    a = cluster(125)
    a.register([A], Revision(3))
    assert a.lost(s(160), {B}) == set()


def test_only_owners_are_lost() -> None:
    assert cluster(125).lost(s(125), {A, B}) == set()


def test_a_member_that_was_never_heard_or_never_registered_is_not_lost() -> None:
    a = cluster(125, quiet=["c"])
    assert a.lost(s(125), {C, D}) == set()


def test_another_life_of_the_node_is_not_lost() -> None:
    assert cluster(125).lost(s(125), {member("c", 2)}) == set()


def test_nobody_is_lost_while_a_majority_is_not_known_to_know_of_our_contact() -> None:
    a = cluster(125, quiet=["b"])
    assert a.lost(s(125), {C}) == set()


def test_nobody_is_lost_after_our_contact_ended() -> None:
    assert cluster(125).lost(s(131), {C}) == set()


def test_a_gap_in_our_contact_starts_the_time_again() -> None:
    nodes = {"a": contacts(A, B, C), "b": contacts(B, A, C), "c": contacts(C, A, B)}
    exchange(90, **{name: (node, 90) for name, node in nodes.items()})
    for name in "ab":
        nodes[name].register([A, B], Revision(2))
    del nodes["c"]
    for half_seconds in range(182, 266):
        now = half_seconds / 2
        contact = 105 if 105 <= now < 112 else now
        nodes["a"].lost(s(now), {C})
        exchange(now, **{name: (node, contact) for name, node in nodes.items()})
    assert nodes["a"].lost(s(132), {C}) == set()
    assert nodes["a"].lost(s(132) + 2, {C}) == {C}


def test_a_gap_in_the_revisions_forbids_to_declare_lost_what_was_lost_before() -> None:
    def read_anew(nodes: dict[str, Contacts]) -> None:
        nodes["a"].register([A, B], Revision(9), gap=True)

    assert cluster(150, then={110.0: read_anew}).lost(s(150), {C}) == set()


def test_a_member_that_registers_again_is_not_lost() -> None:
    def back(nodes: dict[str, Contacts]) -> None:
        nodes["a"].register([A, B, C], Revision(3))

    assert cluster(125, then={110.0: back}).lost(s(125), {C}) == set()


def test_members_that_joined_since_do_not_count_for_the_majority() -> None:
    """Of A, B and C, that C counts, only A is left; that D joined does not help."""

    def b_leaves_and_d_joins(nodes: dict[str, Contacts]) -> None:
        nodes["d"] = contacts(D, A)
        nodes["a"].register([A, D], Revision(3))
        del nodes["b"]

    assert cluster(150, then={102.0: b_leaves_and_d_joins}).lost(s(150), {C}) == set()
