"""One bucket's replica: what it takes, what it passes over, what it asks for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from replicated import BEACON_NS, BUCKET, LEASE_NS, SLOW_NS, Cluster, Node, member, put

from p2pkv.instructions import Drop, Entry, Tell
from p2pkv.replicated import NewEpoch, NewEpochAck, PrepareAck, Session, SteppedDown, Talk
from p2pkv.replication import Role


@pytest.fixture
def pair() -> Cluster:
    """Node a is primary, b in sync."""
    cluster = Cluster("ab")
    cluster.start("a", "b")
    return cluster


@pytest.fixture
def alone() -> Cluster:
    """Node a is primary and has the only copy."""
    cluster = Cluster("ab")
    cluster.start("a")
    return cluster


# -- alone


def test_a_bucket_with_one_copy_is_read_for_ever_and_written_past_the_log(alone: Cluster) -> None:
    a = alone["a"]
    assert a.replica.alone
    assert a.replicas.serve_until(BUCKET) > alone.now + 10**18
    a.replica.note_written(3)
    assert (a.replica.applied, a.replica.last) == (3, 3)
    assert BUCKET not in a.replicas.shared


def test_a_bucket_begins_empty_where_it_is_made(alone: Cluster) -> None:
    a = alone["a"]
    assert a.objects.opened == 1
    alone.set_record(epoch=2, generation=2)
    a.learns_record()
    assert (a.objects.dropped, a.objects.opened) == ([True], 2)
    assert a.replica.active


def test_a_primary_without_the_data_that_others_have_does_not_lead(pair: Cluster) -> None:
    b = pair["b"]
    c = Node(pair, "c", 1)
    pair.set_record(epoch=2, primary=c.me, in_sync=(c.me, b.me))
    c.learns_record()
    assert c.replica.role is Role.ABSENT
    assert not c.replica.tenure


def test_older_news_are_passed_over(alone: Cluster) -> None:
    a, before = alone["a"], alone.etcd
    alone.set_record(epoch=2)
    a.learns_record()
    a.learns_record(before)
    a.replicas.adopt({BUCKET: None}, alone.now)
    assert a.replica.tenure == 2


def test_a_record_that_wants_no_copies_does_no_harm(pair: Cluster) -> None:
    a = pair["a"]
    pair.set_record(assigned=())
    a.learns_record()
    pair.tick()
    assert a.replica.active


# -- the log


def test_an_entry_describes_itself() -> None:
    assert repr(Entry(3, 2, "op", None)) == "Entry(3, epoch 2, op)"


def test_nothing_is_sent_to_who_does_not_follow_or_has_all(pair: Cluster) -> None:
    a, b = pair["a"].replica, pair["b"]
    assert a.unsent(member("x"), pair.now, 9, 9) == []
    assert a.unsent(b.me, pair.now, 9, 9) == []
    a.not_delivered(member("x"))


def test_what_is_not_acknowledged_in_time_is_sent_again(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k")
    assert len(a.batches()) == 1
    for _ in range(4):
        pair.tick()
    pair.replicate(a)
    assert b.replica.last == 1


@pytest.mark.parametrize("field", ["epoch", "session"])
def test_an_acknowledgement_of_another_time_counts_for_nothing(pair: Cluster, field: str) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k")
    [batch] = a.batches()
    [ack] = b.takes(batch, a)
    other: Any = 7 if field == "epoch" else Session(1, 99)
    a.acknowledged([msgspec.structs.replace(ack, **{field: other})], b)
    assert a.objects.applied == []
    a.acknowledged([ack, PrepareAck(BUCKET + 1, 1, 5, Session(1))], b)
    a.acknowledged([ack], b)
    assert a.objects.applied == ["k"]


def test_a_gap_is_not_taken(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k1")
    a.batches()
    a.write("k2")
    [batch] = a.batches()
    [ack] = b.takes(batch, a)
    assert ack.last == 0
    assert b.objects.discarded == ["k2"]


def test_writes_are_refused_below_min_in_sync() -> None:
    cluster = Cluster("ab", min_in_sync=2)
    a = cluster.start("a", assigned="ab")
    assert not a.replica.writable
    with pytest.raises(AssertionError, match="takes no writes"):
        a.replicas.submit(BUCKET, put("k"), None, None)


# -- a new epoch, on the side of a backup


def offer(cluster: Cluster, to: Node, **changes: Any) -> list[NewEpochAck]:
    """A NEW_EPOCH by node a, in epoch 2, and what it is answered."""
    fields: dict[str, Any] = {"bucket": BUCKET, "epoch": 2, "base": 0, "origins": []}
    message = NewEpoch(**{**fields, **changes})
    sender = cluster["a"].me
    to.replicas.take_talk(Talk(sender, to.me, new_epochs=[message]), cluster.now)
    talks = cluster.talks(to)
    return [ack for talk in talks for ack in talk.new_epoch_acks]


def test_a_new_epoch_is_confirmed_once_its_record_is_known(pair: Cluster) -> None:
    b = pair["b"]
    assert offer(pair, b) == []
    pair.set_record(epoch=2)
    b.learns_record()
    assert len(offer(pair, b)) == 1
    assert len(offer(pair, b)) == 1, "asked again, it answers again"
    assert offer(pair, b, epoch=1) == []


def test_who_lacks_what_is_committed_confirms_nothing(pair: Cluster) -> None:
    b = pair["b"]
    pair.set_record(epoch=2)
    b.learns_record()
    assert offer(pair, b, base=5) == []


def test_who_is_not_in_step_confirms_nothing(pair: Cluster) -> None:
    c = Node(pair, "c", 1)
    pair.set_record(epoch=2)
    c.learns_record()
    assert offer(pair, c) == []


def test_of_a_suffix_is_kept_what_is_the_same_by_number_and_origin(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    for key in ("k1", "k2", "k3"):
        a.write(key)
    [batch] = a.batches()
    b.takes(batch, a)
    pair.set_record(epoch=2)
    b.learns_record()
    [ack] = offer(pair, b, base=1, origins=[1, 9])
    assert ack.last == 2
    assert (b.objects.applied, b.objects.discarded) == (["k1"], ["k3"])


def test_what_a_backup_has_applied_is_not_compared_again(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k1")
    pair.replicate(a)
    pair.tick()
    assert b.replica.applied == 1
    pair.set_record(epoch=2)
    b.learns_record()
    [ack] = offer(pair, b, base=0, origins=[1])
    assert ack.last == 1


# -- a new epoch, on the side of the primary


def test_a_confirmation_from_elsewhere_counts_for_nothing(pair: Cluster) -> None:
    a = pair["a"]
    pair.set_record(epoch=2)
    a.learns_record()
    for sender, epoch in [(member("x"), 2), (pair["b"].me, 1)]:
        a.replicas.take_talk(
            Talk(sender, a.me, new_epoch_acks=[NewEpochAck(BUCKET, epoch, 0, Session(epoch))]),
            pair.now,
        )
    assert a.replica.role is Role.RECONCILING
    assert a.replicas.copy_cut(BUCKET, Session(2, 1), pair.now) is None


def test_the_word_of_the_predecessor_may_come_before_the_record(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    b.replica.take_stepped_down(a.me, SteppedDown(BUCKET, 1), pair.now)
    b.replica.take_stepped_down(a.me, SteppedDown(BUCKET, 0), pair.now)
    pair.set_record(epoch=2, primary=b.me, in_sync=(b.me,))
    b.learns_record()
    assert b.replica.active


def test_a_higher_epoch_seen_anywhere_ends_serving(pair: Cluster) -> None:
    a = pair["a"]
    assert a.serves
    assert a.replica.accepts_claim(2)
    a.replicas.tick(pair.now)
    assert not a.serves
    assert a.replicas.serve_until(BUCKET) == 0


def test_a_primary_that_etcd_has_replaced_waits_for_the_news(pair: Cluster) -> None:
    a = pair["a"]
    a.replica.record = msgspec.structs.replace(pair.etcd.record, epoch=2)  # type: ignore[union-attr]
    a.replica.tick(pair.now, [pair["b"].me])
    assert not a.replicas.proposals
    assert not a.replica.out


# -- the ack set


def test_a_copy_to_somebody_thought_dead_is_given_up() -> None:
    cluster = Cluster("ab")
    a, b = cluster.start("a", assigned="ab"), cluster["b"]
    cluster.now += BEACON_NS
    a.replicas.tick(cluster.now)
    copy = a.copy()
    a.replicas.suspect(b.me)
    a.replicas.tick(cluster.now + 1)
    assert a.replica.copying is None
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    a.replicas.copy_failed(BUCKET, copy.session, cluster.now)
    assert not a.replica.followers


def test_a_learner_that_acknowledges_nothing_holds_up_writes_for_a_while_only() -> None:
    cluster = Cluster("ab")
    a = cluster.start("a", assigned="ab")
    cluster.now += BEACON_NS
    a.replicas.tick(cluster.now)
    cluster.begin_copy(a.copy(), a, cluster["b"])
    a.write("k")
    for _ in range(3 * SLOW_NS // BEACON_NS):
        cluster.tick("a")
        if a.objects.applied:
            break
    assert a.objects.applied == ["k"]


def test_a_member_that_makes_no_progress_is_put_out(pair: Cluster) -> None:
    a = pair["a"]
    a.write("k")
    for _ in range(2 * SLOW_NS // BEACON_NS + 2):
        a.batches()  # they are lost, though talks arrive
        pair.tick()
    assert a.proposal().record.in_sync == (a.me,)


def test_who_is_no_longer_wanted_leaves_once_the_others_are_there() -> None:
    cluster = Cluster("abc")
    a = cluster.start("a", "b", "c")
    cluster.set_record(assigned=("a", "b"))
    for node in cluster:
        node.learns_record()
    cluster.tick()
    assert cluster.decide(a).record.in_sync == (a.me, cluster["b"].me)
    cluster["c"].learns_record()
    assert cluster["c"].objects.dropped == [False]


def test_a_hand_over_waits_for_what_is_not_committed(pair: Cluster) -> None:
    a = pair["a"]
    a.write("k")
    pair.set_record(assigned=("b", "a"))
    a.learns_record()
    pair.tick()
    assert a.replica.role is Role.HANDING
    assert not a.replicas.proposals
    pair.replicate(a)
    pair.tick()
    assert a.proposal().record.primary == pair["b"].me


def test_a_hand_over_that_somebody_was_faster_than_is_called_off(pair: Cluster) -> None:
    a = pair["a"]
    pair.set_record(assigned=("b", "a"))
    a.learns_record()
    pair.tick()
    pair.set_record(assigned=("a", "b"))
    pair.decide(a)
    assert a.replica.active
    assert a.replica.handing is None


def test_without_etcd_nothing_is_handed_over(pair: Cluster) -> None:
    a = pair["a"]
    pair.set_record(assigned=("b", "a"))
    a.learns_record()
    a.replicas.tick(pair.now + BEACON_NS, etcd_answers=False)
    assert a.serves


# -- taking over


def test_only_who_is_named_and_in_step_tries_to_take_over(pair: Cluster) -> None:
    late = pair.now + 10 * SLOW_NS
    a, b = pair["a"], pair["b"]
    assert b.replica.may_promote(late, ())
    assert not a.replica.may_promote(late, ())
    pair.set_record(in_sync=(a.me,))
    b.learns_record()
    assert not b.replica.may_promote(late, ())


def test_who_takes_over_below_min_in_sync_leaves_the_old_primary_eligible() -> None:
    cluster = Cluster("ab", min_in_sync=2)
    a, b = cluster.start("a", "b"), cluster["b"]
    b.replicas.suspect(a.me)
    for _ in range(LEASE_NS // BEACON_NS + 3):
        b.replicas.suspect(a.me)
        cluster.tick("b")
    record = b.proposal().record
    assert (record.in_sync, record.eligible) == ((b.me,), (a.me,))


def test_what_is_void_is_dropped(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k")
    [batch] = a.batches()
    b.takes(batch, a)
    pair.set_record(in_sync=(a.me,))
    b.learns_record()
    assert (b.objects.discarded, b.objects.dropped) == (["k"], [False])
    assert not any(isinstance(i, (Drop, Tell)) for i in b.replica.out)


# -- checking


def test_a_state_that_contradicts_itself_is_noticed(pair: Cluster) -> None:
    a = pair["a"].replica
    a.last += 1
    with pytest.raises(AssertionError, match="log"):
        a.validate()
