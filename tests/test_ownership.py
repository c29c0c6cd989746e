from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from nodeside import MIB, PLAIN, A, B, C, make_store

from p2pkv import wire
from p2pkv.arena import Arena
from p2pkv.objects import Object
from p2pkv.ownership import Ownership
from p2pkv.records import BucketRecord, Delta, Meta, NodeRecord, Versioned, View
from p2pkv.routing import Table
from p2pkv.store import Store
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision
from p2pkv.wire import Entry, Snapshot, Status

K = BucketId(0)


def record(
    primary: Member, assigned: Member | None = None, epoch: int = 1, generation: int = 0
) -> BucketRecord:
    return BucketRecord(
        epoch=Epoch(epoch),
        generation=generation,
        primary=primary,
        in_sync=(primary,),
        assigned=((assigned or primary).node,),
    )


def at(revision: int, new: BucketRecord) -> Versioned:
    return Versioned(new, Revision(revision))


def node(member: Member, **more: object) -> NodeRecord:
    return NodeRecord(boot=member.boot, control=(f"tcp://{member}:1",), **more)  # type: ignore[arg-type]


class Host:
    """Ownership of node B over a real store of a cluster with four buckets."""

    def __init__(self, arena: Arena, buckets: dict[BucketId, Versioned] | None = None) -> None:
        self.store: Store = make_store(arena)
        view = View(
            revision=Revision(10),
            meta=Meta(bucket_count=4, hash_scheme="x", fingerprint="f"),
            nodes={m.node: node(m) for m in (A, B)},
            buckets=buckets or {},
        )
        self.ownership = Ownership(B, self.store, view, "f")
        self.changes = 0
        self.ownership.on_change = self._changed

    def _changed(self) -> None:
        self.changes += 1

    def delta(self, revision: int, buckets: dict[BucketId, Versioned | None] | None = None,
              nodes: dict[NodeId, NodeRecord | None] | None = None) -> None:  # fmt: skip
        self.ownership.take_delta(
            Delta(revision=Revision(revision), buckets=buckets or {}, nodes=nodes or {})
        )
        self.store.validate()

    def learns(self, *entries: Entry, nonce: int = 1, seq: int = 0, last: bool = False,
               source: Member | None = A, epoch: int = 1, bucket: int = K) -> Status:  # fmt: skip
        body = Snapshot(bucket, epoch, nonce, seq, list(entries), last)
        values = [b"v" * (e.piece if e.piece >= 0 else max(0, e.size)) for e in entries]
        ack = self.ownership.take_snapshot(body, source, [v for v in values if v], 1)
        assert (ack.bucket, ack.nonce, ack.seq) == (bucket, nonce, seq)
        return Status(ack.status)

    def put(self, key: bytes) -> None:
        assert self.store.put_batch([K], [key], [b"v"], PLAIN, 1) == [Status.OK]

    def keys(self) -> set[bytes]:
        return set(self.store.buckets[K].objects)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(MIB, "ownership") as arena:
        yield arena


@pytest.fixture
def owner(arena: Arena) -> Host:
    """B owns the bucket."""
    return Host(arena, {K: at(9, record(B))})


@pytest.fixture
def learner(arena: Arena) -> Host:
    """A owns the bucket, which is to go to B."""
    return Host(arena, {K: at(9, record(A, B))})


# -- what is served


def test_the_buckets_of_the_first_view_are_served_from_the_start(owner: Host) -> None:
    assert (owner.ownership.served, owner.ownership.held) == ({K}, 1)
    assert owner.ownership.holds(K)
    assert owner.keys() == set()


def test_a_bucket_that_is_given_away_is_dropped_and_counted(owner: Host) -> None:
    owner.put(b"k")
    owner.delta(11, {K: at(11, record(A, epoch=2))})
    assert (owner.ownership.served, owner.ownership.lost_buckets) == (set(), 1)
    assert not owner.store.buckets
    assert owner.changes == 1


def test_a_deleted_record_ends_the_ownership(owner: Host) -> None:
    owner.delta(11, {K: None})
    assert (owner.ownership.held, owner.store.buckets) == (0, {})


def test_news_that_leave_us_the_owner_change_nothing(owner: Host) -> None:
    owner.put(b"k")
    owner.delta(11, {K: at(11, record(B, A))})
    assert (owner.keys(), owner.ownership.served) == ({b"k"}, {K})


def test_a_higher_generation_starts_empty(owner: Host) -> None:
    owner.put(b"k")
    owner.ownership.stop_serving(K, True)
    owner.delta(11, {K: at(11, record(B, epoch=2, generation=1))})
    assert (owner.keys(), owner.ownership.served, owner.ownership.moving) == (set(), {K}, set())


def test_a_bucket_can_be_stopped_and_served_again_but_only_ours(owner: Host) -> None:
    ownership = owner.ownership
    ownership.stop_serving(K, True)
    assert (ownership.served, ownership.moving, ownership.held) == (set(), {K}, 1)
    ownership.stop_serving(K, False)
    assert (ownership.served, ownership.moving) == ({K}, set())
    ownership.stop_serving(BucketId(1), True)
    ownership.stop_serving(BucketId(1), False)
    assert (ownership.served, ownership.moving) == ({K}, set())


def test_a_bucket_that_leaves_while_it_moves_is_not_counted_as_taken_away(owner: Host) -> None:
    owner.ownership.stop_serving(K, True)
    owner.ownership.take_record(K, at(11, record(A, epoch=2)))
    assert (owner.ownership.moving, owner.ownership.lost_buckets) == (set(), 0)


# -- news out of order


def test_older_news_than_our_own_transaction_do_not_bring_the_old_owner_back(
    owner: Host,
) -> None:
    owner.ownership.take_record(K, at(20, record(A, epoch=2)))
    owner.delta(15, {K: at(15, record(B, A))})
    assert owner.ownership.held == 0
    assert owner.ownership.view.buckets[K] == at(20, record(A, epoch=2))
    assert owner.ownership.revision == 15


def test_the_result_of_a_transaction_that_is_older_than_the_news_is_passed_over(
    owner: Host,
) -> None:
    owner.delta(20, {K: at(20, record(B, epoch=3))})
    owner.ownership.take_record(K, at(15, record(A, epoch=2)))
    owner.ownership.take_record(K, None)
    assert owner.ownership.served == {K}
    assert owner.changes == 1


def test_the_same_news_twice_change_nothing(owner: Host) -> None:
    won = at(11, record(B, epoch=2, generation=1))
    owner.ownership.take_record(K, won)
    owner.put(b"k")
    owner.delta(11, {K: won})
    owner.ownership.take_record(K, won)
    assert owner.keys() == {b"k"}


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_of_news_the_newest_record_wins_and_none_before_it_comes_back(
    arena: Arena, seed: int
) -> None:
    print("seed", seed)
    rand = random.Random(seed)
    host = Host(arena, {K: at(9, record(A))})
    history = [at(9, record(A))]
    for revision in range(11, 30):
        old = history[-1].record
        primary = rand.choice([A, B, C])
        moved = primary != old.primary
        lost = moved and rand.random() < 0.5
        history.append(
            at(revision, record(primary, epoch=old.epoch + moved, generation=old.generation + lost))
        )
    # The watch tells in order, with gaps; results of transactions come at any time, and again.
    newest = watched = 0
    for _ in range(80):
        if rand.random() < 0.5:
            i = rand.randrange(min(newest + 3, len(history)))
            host.ownership.take_record(K, history[i])
        else:
            i = watched = rand.randrange(watched, len(history)) if rand.random() < 0.3 else watched
            host.delta(int(history[i].mod_revision), {K: history[i]})
        newest = max(newest, i)
        expected = history[newest].record
        assert host.ownership.view.buckets[K] == history[newest]
        assert host.ownership.holds(K) == (expected.primary == B)
        assert (K in host.store.buckets) == (expected.primary == B)
        host.store.validate()


# -- learning


def test_a_complete_copy_is_served_when_the_record_says_so(learner: Host) -> None:
    assert learner.learns(Entry(b"k", 1), last=True) is Status.OK
    assert learner.ownership.served == set()
    learner.delta(11, {K: at(11, record(B, epoch=2))})
    assert (learner.ownership.served, learner.keys()) == ({K}, {b"k"})
    assert not learner.ownership.incoming


def test_an_incomplete_copy_is_not_served(learner: Host) -> None:
    learner.learns(Entry(b"k", 1))
    learner.delta(11, {K: at(11, record(B, epoch=2))})
    assert (learner.ownership.served, learner.keys()) == ({K}, set())


@pytest.mark.parametrize(
    "later", [record(B, epoch=2, generation=1), record(B, epoch=3), record(B, epoch=1)], ids=str
)
def test_a_copy_does_not_outlive_what_it_is_a_copy_of(learner: Host, later: BucketRecord) -> None:
    """The bucket was started anew, or was elsewhere meanwhile: the copy may be old."""
    learner.learns(Entry(b"k", 1), last=True)
    learner.delta(15, {K: at(15, later)})
    assert (learner.ownership.served, learner.keys()) == ({K}, set())


@pytest.mark.parametrize(
    "later",
    [
        None,
        record(C, B, epoch=2),
        record(A, C),
        record(A, B, epoch=2, generation=1),
    ],
    ids=["deleted", "other owner", "planned elsewhere", "started anew"],
)  # fmt: skip
def test_a_copy_that_leads_nowhere_is_dropped(learner: Host, later: BucketRecord | None) -> None:
    learner.learns(Entry(b"large", 9, start=0, piece=3))
    learner.learns(Entry(b"k", 1), seq=1, last=True)
    learner.delta(11, {K: None if later is None else at(11, later)})
    assert (learner.ownership.incoming, learner.store.buckets) == ({}, {})
    assert learner.store.stats().used_bytes == 0


def test_a_copy_stays_while_its_owner_and_goal_stay(learner: Host) -> None:
    learner.learns(Entry(b"k", 1))
    learner.delta(11, {K: at(11, record(A, B))})
    assert learner.learns(Entry(b"l", 1), seq=1, last=True) is Status.OK
    learner.delta(12, {K: at(12, record(B, epoch=2))})
    assert learner.keys() == {b"k", b"l"}


def test_only_the_owner_may_teach_and_only_what_is_planned(learner: Host) -> None:
    assert learner.learns(source=None) is Status.NOT_PRIMARY
    assert learner.learns(source=C) is Status.NOT_PRIMARY
    assert learner.learns(epoch=2) is Status.NOT_PRIMARY
    assert learner.learns(bucket=3) is Status.CONFLICT
    learner.delta(11, {K: at(11, record(A, C))})
    assert learner.learns() is Status.MOVING
    learner.delta(12, {K: at(12, record(B, epoch=2))})
    assert learner.learns(source=B, epoch=2) is Status.CONFLICT
    assert not learner.ownership.incoming


def test_an_attempt_begins_with_its_first_piece(learner: Host) -> None:
    assert learner.learns(seq=1) is Status.CONFLICT
    assert not learner.store.buckets
    assert learner.learns(Entry(b"k", 1)) is Status.OK


def test_a_new_attempt_starts_over_and_an_older_one_has_no_effect(learner: Host) -> None:
    assert learner.learns(Entry(b"old", 1), nonce=1) is Status.OK
    assert learner.learns(Entry(b"new", 1), nonce=2) is Status.OK
    assert learner.learns(Entry(b"old", 1), nonce=1) is Status.CONFLICT
    assert learner.learns(seq=1, nonce=1, last=True) is Status.CONFLICT
    assert learner.learns(seq=1, nonce=2, last=True) is Status.OK
    learner.delta(11, {K: at(11, record(B, epoch=2))})
    assert learner.keys() == {b"new"}


def test_an_attempt_that_was_forgotten_does_not_come_back(learner: Host) -> None:
    learner.learns(Entry(b"k", 1), nonce=5)
    learner.ownership.forget_incoming(K)
    assert learner.learns(Entry(b"k", 1), nonce=5) is Status.CONFLICT
    assert learner.learns(Entry(b"k", 1), nonce=6) is Status.OK


def test_attempts_of_another_owner_count_anew(learner: Host) -> None:
    learner.learns(Entry(b"k", 1), nonce=5)
    learner.delta(11, {K: at(11, record(C, B, epoch=2))})
    assert learner.learns(Entry(b"l", 1), nonce=1, source=C, epoch=2) is Status.OK


def test_the_owner_is_told_how_many_objects_found_no_room(learner: Host) -> None:
    body = Snapshot(K, 1, 1, 0, [Entry(b"k", 2 * MIB)])
    ack = learner.ownership.take_snapshot(body, A, [bytes(2 * MIB)], 1)
    assert (ack.status, ack.dropped) == (Status.OK, 1)
    again = learner.ownership.take_snapshot(body, A, [bytes(2 * MIB)], 1)
    assert (again.status, again.dropped) == (Status.OK, 0)


def test_a_copy_is_no_place_for_a_value_that_is_read_elsewhere(learner: Host) -> None:
    learner.learns(Entry(b"k", 1), last=True)
    item = learner.store.buckets[K].objects[b"k"]
    learner.store.acquire(item)
    learner.ownership.forget_incoming(K)
    assert isinstance(item, Object)
    assert bytes(learner.store.value(item)) == b"v"
    learner.store.release(item)
    assert learner.store.stats().used_bytes == 0


# -- giving away


def test_departures_are_what_is_planned_at_a_node_that_lives(arena: Arena) -> None:
    host = Host(
        arena,
        {
            BucketId(0): at(9, record(B, A)),
            BucketId(1): at(9, record(B, B)),
            BucketId(2): at(9, record(B, C)),
            BucketId(3): at(9, record(A, B)),
        },
    )
    assert host.ownership.departures() == [(BucketId(0), A)]
    again = Member(NodeId("c"), BootId(7))
    host.delta(11, nodes={again.node: node(again)})
    assert sorted(host.ownership.departures()) == [(BucketId(0), A), (BucketId(2), again)]
    host.ownership.stop_serving(BucketId(0), True)
    assert host.ownership.departures() == [(BucketId(2), again)]


def test_affirmations_are_our_records_as_they_are(owner: Host) -> None:
    (change,) = owner.ownership.affirmations()
    assert (change.bucket, change.expected, change.record) == (K, 9, record(B))
    owner.delta(11, {K: at(11, record(A, epoch=2))})
    assert owner.ownership.affirmations() == []


# -- what others are told


def test_the_table_names_owners_with_their_addresses(arena: Arena) -> None:
    host = Host(arena, {BucketId(0): at(9, record(A)), BucketId(3): at(9, record(B, generation=4))})
    table = Table(host.ownership.table())
    assert [table.owner(b) for b in range(4)] == [A, None, None, B]
    assert table.generations == [0, 0, 0, 4]
    assert table.endpoints == {A: ("tcp://a@1:1",), B: ("tcp://b@1:1",)}
    assert (table.revision, table.fingerprint) == (10, "f")
    assert host.ownership.table() is host.ownership.table()


def test_an_owner_that_left_keeps_its_last_address_while_it_owns(owner: Host) -> None:
    owner.delta(11, {K: at(11, record(A, epoch=2))})
    owner.delta(12, nodes={A.node: None})
    table = Table(owner.ownership.table())
    assert (table.owner(K), table.endpoints[A]) == (A, ("tcp://a@1:1",))
    owner.delta(13, {K: at(13, record(B, epoch=3))})
    assert A not in Table(owner.ownership.table()).endpoints


def test_an_owner_whose_address_was_never_known_has_none(arena: Arena) -> None:
    host = Host(arena, {K: at(9, record(C)), BucketId(9): at(9, record(A))})
    table = Table(host.ownership.table())
    assert (table.owner(K), table.endpoints[C]) == (C, ())
    assert wire.decode(wire.encode(wire.Kind.TABLE, 1, 1, host.ownership.table()), MIB).body


def test_a_change_makes_a_new_table(owner: Host) -> None:
    before = owner.ownership.table()
    owner.ownership.take_record(K, at(11, record(A, epoch=2)))
    assert owner.ownership.table() != before
