"""Races between a copy, its primary and the bucket's record, message by message."""

from __future__ import annotations

import pytest
from replicated import BUCKET, Cluster, Node, session

from p2pkv.instructions import Copy
from p2pkv.replicated import NewEpochAck


@pytest.fixture
def cluster() -> Cluster:
    """Node a is primary and alone; b ought to have a copy."""
    cluster = Cluster("abc")
    cluster.start("a", assigned="ab")
    return cluster


def begin(cluster: Cluster) -> tuple[Node, Node, Copy]:
    a = cluster["a"]
    cluster.now += 10**9
    a.replicas.tick(cluster.now)
    return a, cluster["b"], a.copy()


def test_nothing_is_committed_between_the_cut_and_its_acknowledgement(cluster: Cluster) -> None:
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    a.write("k")
    cluster.tick("a")
    assert a.objects.applied == []
    assert b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    cluster.replicate(a)
    assert a.objects.applied == ["k"]


def test_the_last_piece_twice_is_answered_twice_and_changes_nothing(cluster: Cluster) -> None:
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    assert b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    a.write("k")
    cluster.replicate(a)
    assert b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    assert b.replica.last == base + 1
    cluster.validate()


def test_a_confirmation_from_before_does_not_count_for_a_copy_under_way() -> None:
    cluster = Cluster("ab")
    a, b = cluster.start("a", "b"), cluster["b"]
    cluster.set_record(epoch=2)
    for node in cluster:
        node.learns_record()
    cluster.talk()
    late = NewEpochAck(BUCKET, 2, b.replica.last, b.replica.session)
    cluster.set_record(in_sync=(a.me,))
    for node in cluster:
        node.learns_record()
    _, _, copy = begin(cluster)
    cluster.begin_copy(copy, a, b)
    a.replica.take_new_epoch_ack(b.me, late, cluster.now)
    assert not a.replica.followers[b.me].confirmed


def test_a_copy_waits_for_the_learner_to_know_that_it_was_put_out() -> None:
    cluster = Cluster("ab")
    a, b = cluster.start("a", "b"), cluster["b"]
    cluster.set_record(in_sync=(a.me,))
    a.learns_record()
    _, _, copy = begin(cluster)
    assert not b.replicas.may_learn(BUCKET, copy.session, a.me)
    b.learns_record()
    assert b.replicas.may_learn(BUCKET, copy.session, a.me)


def test_a_complete_copy_stays_though_the_planner_now_wants_others(cluster: Cluster) -> None:
    """Its primary may have missed that, and count it."""
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    assert b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    cluster.set_record(assigned=("a", "c"))
    b.learns_record()
    assert b.replica.synced


def test_an_incomplete_copy_goes_when_the_planner_wants_others(cluster: Cluster) -> None:
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    cluster.set_record(assigned=("a", "c"))
    b.learns_record()
    assert b.objects.dropped == [False]
    assert not b.replicas.learned(BUCKET, copy.session, base, cluster.now)


def test_a_copy_that_is_acknowledged_after_its_tenure_counts_for_nothing(cluster: Cluster) -> None:
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    assert b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    cluster.set_record(epoch=2)
    a.learns_record()
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    assert not a.replica.followers
    b.learns_record()
    assert not b.replica.synced


def test_the_end_of_an_older_copy_does_not_end_a_newer_one(cluster: Cluster) -> None:
    a, b, first = begin(cluster)
    assert b.replicas.may_learn(BUCKET, first.session, a.me)
    b.replicas.begin_learning(BUCKET, first.session, cluster.now)
    a.replicas.copy_failed(BUCKET, first.session, cluster.now)
    _, _, second = begin(cluster)
    base = cluster.begin_copy(second, a, b)
    b.replicas.stop_learning(BUCKET, first.session, cluster.now)
    assert b.replicas.learned(BUCKET, second.session, base, cluster.now)
    assert not b.replicas.may_learn(BUCKET, first.session, a.me)


def test_a_copy_that_will_not_be_completed_is_let_go_of(cluster: Cluster) -> None:
    _, b, copy = begin(cluster)
    b.replicas.begin_learning(BUCKET, copy.session, cluster.now)
    b.replicas.stop_learning(BUCKET, copy.session, cluster.now)
    assert b.objects.dropped == [False]


def test_a_prepare_from_before_a_copy_is_taken_for_what_it_is(cluster: Cluster) -> None:
    """What the copy holds already is discarded; what follows on it is taken: it is the same."""
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    a.write("k")
    [batch] = a.batches()
    [first] = b.takes(batch, a)
    [second] = b.takes(batch, a)
    assert (first.last, second.last) == (base + 1, base + 1)
    assert b.objects.discarded == ["k"]


def test_a_copy_by_somebody_else_than_the_primary_is_refused(cluster: Cluster) -> None:
    a, b, copy = begin(cluster)
    assert not b.replicas.may_learn(BUCKET, copy.session, cluster["c"].me)
    assert not b.replicas.may_learn(BUCKET, session(9, copy.session.nonce), a.me)


def test_the_learner_learns_what_is_committed_though_it_was_told_before_it_could_hear(
    cluster: Cluster,
) -> None:
    a, b, copy = begin(cluster)
    base = cluster.begin_copy(copy, a, b)
    cluster.tick()  # a tells b of commits that b, not in step, passes over
    b.replicas.learned(BUCKET, copy.session, base, cluster.now)
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    a.write("k")
    cluster.replicate(a)
    cluster.tick()
    assert b.objects.applied == ["k"]
