"""All replicas of a node: what they tell each other, when, and what is done about silence."""

from __future__ import annotations

import msgspec
import pytest
from replicated import BEACON_NS, BUCKET, LEASE_NS, SLOW_NS, Cluster, put

from p2pkv.clock import MILLISECOND_NS
from p2pkv.replicated import Op, OpKind, Talk
from p2pkv.replication import Role
from p2pkv.wire import Status


@pytest.fixture
def pair() -> Cluster:
    """Node a is primary, b in sync."""
    cluster = Cluster("ab")
    cluster.start("a", "b")
    return cluster


# -- messages


def test_every_message_survives_its_encoding() -> None:
    op = Op(int(OpKind.UNPIN), b"k", checksum=(1 << 64) - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(op), type=Op) == op
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Op(len(OpKind), b"k")), type=Op)


def test_a_talk_for_another_life_is_passed_over(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.replicas.tick(pair.now + BEACON_NS)
    [talk] = pair.talks(a)
    other = msgspec.structs.replace(talk, to=msgspec.structs.replace(talk.to, boot=9))
    b.replicas.take_talk(other, pair.now)
    assert not pair.talks(b)


def test_a_commit_is_told_again_until_a_beacon_is_answered(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k")
    pair.replicate(a)
    pair.tick("a")  # the talk with the commit is lost
    assert a.objects.applied == ["k"]
    assert b.objects.applied == []
    pair.tick()
    assert b.objects.applied == ["k"]
    pair.tick("a")
    a.replicas.tick(pair.now + 2 * BEACON_NS)
    assert all(not t.commits for t in pair.talks(a)), "it goes on telling what is known"


def test_a_batch_ends_where_it_has_enough_bytes(pair: Cluster) -> None:
    a = pair["a"]
    for n in range(5):
        a.replicas.submit(BUCKET, put(f"k{n}", size=6 << 20), None, None)
    sizes = []
    while a.replicas.has_unsent:
        [batch] = a.batches()
        sizes.append(len(batch.entries))
    assert sizes == [3, 2]


def test_what_was_not_delivered_is_sent_again(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k")
    [lost] = a.batches()
    assert not a.batches()
    a.replicas.not_delivered(lost.to, [BUCKET])
    pair.replicate(a)
    assert a.objects.applied == ["k"]
    assert b.replica.last == 1


# -- who is gone


def test_a_hint_of_death_ends_when_the_member_is_heard_of(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.replicas.suspect(b.me)
    a.replicas.take_talk(Talk(b.me, a.me), pair.now)
    assert not a.replicas.dead


def test_a_hint_of_death_lapses_where_nobody_is_talked_to() -> None:
    cluster = Cluster("ab")
    a = cluster["a"]
    a.replicas.suspect(cluster["b"].me)
    a.replicas.suspect(a.me)
    a.replicas.tick(cluster.now)
    assert a.replicas.dead
    a.replicas.tick(cluster.now + SLOW_NS + 1)
    assert not a.replicas.dead


def test_a_member_that_falls_silent_is_put_out_though_nothing_is_written(pair: Cluster) -> None:
    a = pair["a"]
    for _ in range(SLOW_NS // BEACON_NS + 2):
        pair.tick("a")
    assert a.proposal().record.in_sync == (a.me,)


def test_a_member_that_talks_but_grants_nothing_is_put_out(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    b.fenced = True
    for n in range(SLOW_NS // BEACON_NS + 2):
        if not a.replicas.proposals:
            a.write(f"k{n}")
        pair.replicate(a)
        pair.tick()
    assert a.proposal().record.in_sync == (a.me,)


def test_a_node_that_was_fenced_waits_before_it_takes_over(pair: Cluster) -> None:
    b = pair["b"]
    b.fenced = True
    for _ in range(2 * SLOW_NS // BEACON_NS):
        pair.tick("b")
    assert not b.replicas.proposals
    b.fenced = False
    pair.tick("b")
    assert not b.replicas.proposals
    pair.tick("ab")
    assert b.replica.may_promote(pair.now + 2 * SLOW_NS, ())


def test_those_who_do_not_come_back_are_forgotten_but_not_what_they_were_granted(
    pair: Cluster,
) -> None:
    a, b = pair["a"], pair["b"]
    b.replicas.suspect(a.me)
    b.replicas.forget([a.me])
    assert not b.replicas.dead
    assert not b.replicas.leases.lapsed(BUCKET, pair.now)


# -- reads


def test_reads_stop_when_the_newest_rival_has_not_granted_even_if_others_have() -> None:
    cluster = Cluster("abc")
    a, b = cluster.start("a", "b", assigned="abc"), cluster["b"]
    cluster.tick("")
    a.replicas.tick(cluster.now)
    copy = a.copy()
    c = cluster["c"]
    base = cluster.begin_copy(copy, a, c)
    assert c.replicas.learned(BUCKET, copy.session, base, cluster.now)
    a.replicas.copy_done(BUCKET, copy.session, cluster.now)
    cluster.tick()  # c grants for the first and the last time
    granted = cluster.now
    while not a.replicas.proposals:
        cluster.tick("ab", MILLISECOND_NS)
    cluster.tick("ab")
    cluster.now = granted + LEASE_NS - MILLISECOND_NS
    cluster.tick("ab", 0)
    cluster.carry_out(a.proposal())  # etcd has it; the answer is on its way
    cluster.now = granted + LEASE_NS + MILLISECOND_NS
    assert b.me in a.replica.rivals()
    assert not a.serves


def test_two_beacons_of_one_moment_have_two_names(pair: Cluster) -> None:
    leases = pair["a"].replicas.leases
    first = leases.beacon(pair["b"].me, {1: 1}, pair.now)
    second = leases.beacon(pair["b"].me, {1: 1, 2: 1}, pair.now)
    assert second.sent_ns < first.sent_ns


# -- roles


def test_roles_are_told_to_people(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    now = pair.now
    assert a.replicas.roles(BUCKET, now) is Role.ACTIVE
    assert a.replicas.roles(BUCKET, now + 2 * LEASE_NS) is Role.STALLED
    assert b.replicas.roles(BUCKET, now) is Role.BACKUP
    assert b.replicas.roles(BUCKET + 1, now) is Role.ABSENT
    assert (a.replicas.holding, b.replicas.holding) == (1, 1)


# -- asking


def test_a_status_says_whether_to_ask_elsewhere_again_or_to_wait(pair: Cluster) -> None:
    a, b = pair["a"].replicas, pair["b"].replicas
    assert a.status(BUCKET, pair.now) == Status.OK
    assert a.status(BUCKET, pair.now + 2 * LEASE_NS) == Status.STALLED
    assert b.status(BUCKET, pair.now) == Status.NOT_PRIMARY
    pair.set_record(assigned=("b", "a"))
    pair["a"].learns_record()
    pair.tick()
    assert a.status(BUCKET, pair.now) == Status.MOVING
    assert a.get(BUCKET) is pair["a"].replica


def test_what_may_be_read_without_asking_ends_with_grants_or_with_the_fence() -> None:
    alone, pair = Cluster("ab"), Cluster("ab")
    fence_ns = alone.now + 7
    first = alone.start("a").replicas
    assert not first.has_rivals(BUCKET)
    assert not first.has_rivals(BUCKET + 1)
    assert first.served_until(fence_ns, 8)[BUCKET] == fence_ns
    second = pair.start("a", "b").replicas
    assert second.has_rivals(BUCKET)
    assert second.served_until(fence_ns, 8)[BUCKET] == pair.now + LEASE_NS
    assert second.served_until(fence_ns, 8)[0] == 0


def test_silent_are_those_that_matter_and_are_not_known_to_be_gone(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    later = pair.now + BEACON_NS
    assert a.replicas.silent(later, BEACON_NS) == []
    assert a.replicas.silent(later + 1, BEACON_NS) == [b.me]
    assert b.replicas.silent(later + 1, BEACON_NS) == [a.me]
    a.replicas.suspect(b.me)
    assert a.replicas.silent(later + 1, BEACON_NS) == []


def test_a_peer_that_is_busy_gets_its_batch_later(pair: Cluster) -> None:
    a, b = pair["a"], pair["b"]
    a.write("k")
    assert a.replicas.batches(pair.now, busy={b.me}) == []
    assert a.replicas.has_unsent
    assert len(a.batches()) == 1


def test_a_full_batch_leaves_other_buckets_for_the_next() -> None:
    cluster = Cluster("ab")
    a = cluster.start("a", "b")
    a.replicas.submit(BUCKET, put("k1", size=20 << 20), None, None)
    a.replicas.submit(BUCKET, put("k2", size=20 << 20), None, None)
    assert [len(x.entries) for x in a.batches()] == [1]
    assert [len(x.entries) for x in a.batches()] == [1]
    assert a.batches() == []
