"""Who may serve reads, and until when."""

from __future__ import annotations

import pytest

from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.leases import BEACONS_MAX, RATE_ERROR, Leases, grace_ns
from p2pkv.replicated import Grant
from p2pkv.types import BootId, Member, NodeId

LEASE_NS = 500 * MILLISECOND_NS
NOW = 100 * SECOND_NS
PEER = Member(NodeId("peer"), BootId(1))
OTHER = Member(NodeId("other"), BootId(1))


@pytest.fixture
def leases() -> Leases:
    return Leases(LEASE_NS)


def yes(bucket: int, epoch: int) -> bool:
    return True


# -- held


def test_a_grant_counts_from_the_sending_of_the_beacon(leases: Leases) -> None:
    beacon = leases.beacon(PEER, {1: 4}, NOW)
    assert leases.take_grant(PEER, Grant(beacon.sent_ns))
    assert leases.held_until(PEER, 1, 4) == NOW + LEASE_NS
    assert leases.heard_ns(PEER) == NOW


@pytest.mark.parametrize(("bucket", "epoch"), [(1, 3), (1, 5), (2, 4)])
def test_a_grant_is_for_what_the_beacon_claimed(leases: Leases, bucket: int, epoch: int) -> None:
    leases.take_grant(PEER, Grant(leases.beacon(PEER, {1: 4}, NOW).sent_ns))
    assert leases.held_until(PEER, bucket, epoch) < 0


def test_what_is_refused_is_not_granted(leases: Leases) -> None:
    beacon = leases.beacon(PEER, {1: 4, 2: 4}, NOW)
    leases.take_grant(PEER, Grant(beacon.sent_ns, [2]))
    assert leases.held_until(PEER, 1, 4) > NOW
    assert leases.held_until(PEER, 2, 4) < 0


def test_an_answer_counts_once_and_older_ones_after_it_do_not(leases: Leases) -> None:
    first = leases.beacon(PEER, {1: 4}, NOW)
    second = leases.beacon(PEER, {1: 4}, NOW + 1)
    assert leases.take_grant(PEER, Grant(second.sent_ns))
    assert not leases.take_grant(PEER, Grant(second.sent_ns))
    assert not leases.take_grant(PEER, Grant(first.sent_ns))
    assert leases.held_until(PEER, 1, 4) == NOW + 1 + LEASE_NS


def test_a_grant_that_nobody_asked_for_counts_for_nothing(leases: Leases) -> None:
    assert not leases.take_grant(PEER, Grant(NOW))
    leases.beacon(PEER, {1: 4}, NOW)
    assert not leases.take_grant(PEER, Grant(NOW + 1))
    assert not leases.take_grant(OTHER, Grant(NOW))
    assert leases.heard_ns(OTHER) < 0


def test_only_the_last_beacons_are_remembered(leases: Leases) -> None:
    for i in range(BEACONS_MAX + 1):
        leases.beacon(PEER, {1: 4}, NOW + i)
    assert not leases.take_grant(PEER, Grant(NOW))
    assert leases.take_grant(PEER, Grant(NOW + 1))


def test_beacons_of_one_moment_are_told_apart_and_never_count_from_later(leases: Leases) -> None:
    first = leases.beacon(PEER, {1: 4}, NOW)
    second = leases.beacon(PEER, {2: 4}, NOW)
    assert second.sent_ns < first.sent_ns == NOW
    leases.take_grant(PEER, Grant(second.sent_ns))
    assert leases.held_until(PEER, 1, 4) < 0


# -- given


def test_what_was_granted_lapses_after_the_grace_even_if_clocks_differ(leases: Leases) -> None:
    leases.take_beacon(PEER, Leases(LEASE_NS).beacon(OTHER, {1: 4}, 7), yes, NOW)
    grace = grace_ns(LEASE_NS)
    assert grace * (1 - RATE_ERROR) >= LEASE_NS * (1 + RATE_ERROR)
    assert not leases.lapsed(1, NOW + grace)
    assert leases.lapsed(1, NOW + grace + 1)
    assert leases.lapsed(2, NOW)


def test_a_claim_that_is_not_made_again_lapses_from_its_last_grant(leases: Leases) -> None:
    theirs = Leases(LEASE_NS)
    leases.take_beacon(PEER, theirs.beacon(OTHER, {1: 4, 2: 4}, 7), yes, NOW)
    leases.take_beacon(PEER, theirs.beacon(OTHER, {2: 4}, 8), yes, NOW + 100)
    assert (leases.granted_ns(1), leases.granted_ns(2)) == (NOW, NOW + 100)


def test_what_is_refused_now_was_granted_before(leases: Leases) -> None:
    theirs = Leases(LEASE_NS)
    leases.take_beacon(PEER, theirs.beacon(OTHER, {1: 4}, 7), yes, NOW)
    grant = leases.take_beacon(PEER, theirs.beacon(OTHER, {1: 4}, 8), lambda b, e: False, NOW + 9)
    assert grant.refused == [1]
    assert leases.granted_ns(1) == NOW


def test_who_is_forgotten_may_still_use_what_it_was_granted(leases: Leases) -> None:
    leases.take_beacon(PEER, Leases(LEASE_NS).beacon(OTHER, {1: 4}, 7), yes, NOW)
    leases.forget(PEER)
    leases.forget(OTHER)
    assert leases.granted_ns(1) == NOW
