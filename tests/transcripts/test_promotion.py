"""Races around a change of the primary, message by message."""

from __future__ import annotations

import pytest
from replicated import BEACON_NS, BUCKET, LEASE_NS, SLOW_NS, Cluster

from p2pkv.replicated import SteppedDown
from p2pkv.replication import Role


@pytest.fixture
def three() -> Cluster:
    """Node a is primary, b and c are in sync."""
    cluster = Cluster("abc")
    cluster.start("a", "b", "c")
    return cluster


def until_promoted(cluster: Cluster, name: str, among: str) -> None:
    """The primary is not heard of by those among, until ``name`` proposes itself."""
    for _ in range(2 * SLOW_NS // BEACON_NS):
        cluster.tick(among)
        if cluster[name].replicas.proposals:
            return
    raise AssertionError(f"{name} never tries to take over")


def test_who_is_promoted_serves_only_after_the_old_primary_cannot(three: Cluster) -> None:
    a, b, c = three["a"], three["b"], three["c"]
    b.replicas.suspect(a.me)
    c.replicas.suspect(a.me)
    three.tick("ab")  # b grants once more
    three.set_record(epoch=2, primary=b.me, in_sync=(b.me, c.me))
    for node in (b, c):
        node.learns_record()
    three.talk("bc")
    assert a.serves
    assert b.replica.role is Role.GRACE
    until = a.replicas.serve_until(BUCKET)
    while not b.replica.active:
        three.tick("bc", BEACON_NS)
    assert three.now > until
    assert not a.serves


def test_a_backup_waits_for_its_own_grant_to_lapse_whatever_it_has_heard(three: Cluster) -> None:
    a, b = three["a"], three["b"]
    three.tick()
    b.replicas.suspect(a.me)
    three.now += LEASE_NS
    b.replicas.tick(three.now)
    assert not b.replicas.proposals
    three.now += LEASE_NS // 10
    b.replicas.suspect(a.me)
    three.tick("b")
    assert b.proposal().record.epoch == 2


def test_of_two_backups_that_try_one_becomes_primary_and_the_other_follows(three: Cluster) -> None:
    a, b, c = three["a"], three["b"], three["c"]
    until_promoted(three, "b", "bc")
    while not c.replicas.proposals:
        three.tick("c")
    wants_b, wants_c = b.proposal(), c.proposal()
    assert wants_b.expected == wants_c.expected
    b.replicas.decided(wants_b, three.carry_out(wants_b), three.now)
    c.replicas.decided(wants_c, three.carry_out(wants_c), three.now)
    for _ in range(10):
        three.tick("bc")
    assert b.replica.role is Role.ACTIVE
    assert c.replica.role is Role.BACKUP
    assert a.me not in three.etcd.record.in_sync  # type: ignore[union-attr]
    three.validate()


def test_what_was_prepared_somewhere_is_committed_by_the_next_primary(three: Cluster) -> None:
    a, b = three["a"], three["b"]
    a.write("k")
    three.replicate(a, to="b")
    until_promoted(three, "b", "bc")
    three.decide(b)
    three["c"].learns_record()
    for _ in range(4):
        three.tick("bc")
        three.replicate(b, to="c")
    assert b.objects.applied == ["k"]
    three.tick("bc")
    assert three["c"].objects.applied == ["k"]


def test_who_waits_is_told_that_the_outcome_is_unknown(three: Cluster) -> None:
    a = three["a"]
    a.write("k")
    three.replicate(a, to="b")
    three.set_record(epoch=2, primary=three["b"].me)
    a.learns_record()
    assert a.objects.unknown == ["k"]
    assert a.replica.log[1].ticket is None


def test_an_entry_of_another_epoch_is_replaced_though_it_has_the_same_number(
    three: Cluster,
) -> None:
    a, b, c = three["a"], three["b"], three["c"]
    a.write("only on c")
    three.replicate(a, to="c")
    three.set_record(epoch=2, primary=b.me)
    for node in (b, a):
        node.learns_record()
    three.now += 3 * LEASE_NS
    three.set_record(epoch=2, primary=b.me, in_sync=(b.me, c.me))
    b.learns_record()
    c.learns_record()
    for _ in range(3):
        three.tick("bc")
    assert c.objects.discarded == ["only on c"]
    b.write("of b")
    three.replicate(b, to="c")
    assert b.objects.applied == ["of b"]


def test_a_prepare_before_the_new_epoch_is_not_taken(three: Cluster) -> None:
    a, b, c = three["a"], three["b"], three["c"]
    a.write("k")
    three.replicate(a, to="b")
    three.set_record(epoch=2, primary=b.me, in_sync=(b.me, c.me))
    b.learns_record()
    c.learns_record()
    b.replica.followers[c.me].confirmed = True  # as if its answer had overtaken
    b.replicas.not_delivered(c.me, [BUCKET])
    [batch] = b.batches()
    assert c.takes(batch, b) == []
    assert c.objects.discarded == ["k"]


def test_the_old_primary_is_answered_nothing_once_the_epoch_is_known(three: Cluster) -> None:
    a, b = three["a"], three["b"]
    a.write("k")
    [batch, *_] = [x for x in a.batches() if x.to == b.me]
    three.set_record(epoch=2, primary=b.me)
    b.learns_record()
    assert b.takes(batch, a) == []
    three.tick("a", BEACON_NS)
    a.replicas.tick(three.now + BEACON_NS)
    three.deliver(three.talks(a), "b")
    [talk] = three.talks(b)[:1]
    assert talk.grant is None or BUCKET in talk.grant.refused


def test_a_shrink_of_unknown_outcome_keeps_the_member_in_the_ack_set() -> None:
    cluster = Cluster("ab")
    a, b = cluster.start("a", "b"), cluster["b"]
    a.replicas.suspect(b.me)
    cluster.tick("a")
    change = a.proposal()
    stands = cluster.carry_out(change)
    a.write("k")
    cluster.tick("a")
    a.learns_record()  # the watch is faster than the answer
    assert a.objects.applied == []
    a.replicas.decided(change, stands, cluster.now)
    assert a.objects.applied == ["k"]
    assert a.objects.done == [("k", 1)]


# -- in good order


def handed_over(cluster: Cluster) -> None:
    a, b = cluster["a"], cluster["b"]
    cluster.set_record(assigned=("b", "a", "c"))
    a.learns_record()
    cluster.tick()
    assert a.replica.role is Role.HANDING
    assert not a.serves
    change = a.proposal()
    assert change.record.primary == b.me
    a.replicas.decided(change, cluster.carry_out(change), cluster.now)


def test_a_bucket_that_is_handed_over_is_served_at_once(three: Cluster) -> None:
    handed_over(three)
    b = three["b"]
    for name in "bc":
        three[name].learns_record()
    three.talk()
    assert b.replica.active


def test_without_the_word_of_the_old_primary_its_grants_have_to_lapse(three: Cluster) -> None:
    handed_over(three)
    b = three["b"]
    assert [t for t in three.talks(three["a"]) if t.stepped_down]  # lost
    for name in "bc":
        three[name].learns_record()
    three.talk()
    assert not b.replica.active
    for _ in range(2 * LEASE_NS // BEACON_NS):
        three.tick()
    assert b.replica.active


def test_the_word_of_a_primary_long_gone_does_not_shorten_the_waiting(three: Cluster) -> None:
    b = three["b"]
    three.tick()
    three.set_record(epoch=3, primary=b.me, in_sync=(b.me, three["c"].me))
    for name in "bc":
        three[name].learns_record()
    three.talk("bc")
    b.replica.take_stepped_down(three["c"].me, SteppedDown(BUCKET, 1), three.now)
    assert b.replica.role is Role.GRACE


# -- below min_in_sync


def test_nothing_is_committed_that_an_eligible_member_lacks() -> None:
    cluster = Cluster("ab", min_in_sync=2)
    a, b = cluster.start("a", "b"), cluster["b"]
    a.write("k")
    a.replicas.suspect(b.me)
    cluster.tick("a")
    assert cluster.decide(a).record.eligible == (b.me,)
    assert a.objects.applied == []
    cluster.tick("a")
    assert cluster.decide(a).record.eligible == ()
    assert a.objects.applied == ["k"]
    assert not a.replica.writable


def test_reads_need_the_grant_of_an_eligible_member() -> None:
    cluster = Cluster("ab", min_in_sync=2)
    a, b = cluster.start("a", "b"), cluster["b"]
    a.replicas.suspect(b.me)
    cluster.tick("a")
    cluster.decide(a)
    assert b.me not in a.replica.followers
    for _ in range(LEASE_NS // BEACON_NS + 1):
        cluster.tick("a")
    assert not a.serves


def test_an_eligible_member_comes_back_without_a_copy() -> None:
    cluster = Cluster("ab", min_in_sync=2)
    a, b = cluster.start("a", "b"), cluster["b"]
    a.replicas.suspect(b.me)
    cluster.tick("a")
    cluster.decide(a)
    b.learns_record()
    for _ in range(4):
        cluster.tick()
        if a.replicas.proposals:
            break
    record = cluster.decide(a).record
    assert record.in_sync == (a.me, b.me)
    assert record.eligible == ()
    assert not a.replicas.copies


def test_an_eligible_member_that_is_named_no_more_is_not_taken_back() -> None:
    """It drops what it has when it learns that, which the primary does not see."""
    cluster = Cluster("ab", min_in_sync=2)
    a, b = cluster.start("a", "b"), cluster["b"]
    a.write("k")
    a.replicas.suspect(b.me)
    cluster.tick("a")
    cluster.decide(a)
    a.replica._take_back(b.me, cluster.now)
    a.replicas._settle(cluster.now)
    cluster.talk("ab")
    assert a.replica.followers[b.me].confirmed
    cluster.tick("a")
    assert cluster.decide(a).record.eligible == ()
    assert b.me not in a.replica.followers
    assert a.replica.copying is None
    b.learns_record()
    assert b.replica.role is Role.ABSENT
