"""What a node knows of the records, and what it tells clients of them."""

from __future__ import annotations

import random

import msgspec
import pytest
from nodeside import MIB, A, B, C

from p2pkv import wire
from p2pkv.ownership import News, Ownership
from p2pkv.records import BucketRecord, Delta, Meta, NodeRecord, Versioned, View
from p2pkv.routing import Table
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

K = BucketId(0)


def record(primary: Member, *backups: Member, epoch: int = 1, generation: int = 0) -> BucketRecord:
    return BucketRecord(
        epoch=Epoch(epoch),
        generation=generation,
        primary=primary,
        in_sync=(primary, *backups),
        assigned=tuple(m.node for m in (primary, *backups)),
    )


def at(revision: int, new: BucketRecord) -> Versioned:
    return Versioned(new, Revision(revision))


def node(member: Member) -> NodeRecord:
    return NodeRecord(boot=member.boot, control=(f"tcp://{member}:1",))


class Host:
    """Ownership of node B in a cluster with four buckets, and what it told."""

    def __init__(self, buckets: dict[BucketId, Versioned] | None = None) -> None:
        view = View(
            revision=Revision(10),
            meta=Meta(bucket_count=4, hash_scheme="x", fingerprint="f"),
            nodes={m.node: node(m) for m in (A, B)},
            buckets=buckets or {},
        )
        self.ownership = Ownership(B, view, "f")
        self.changes = 0
        self.news: list[News] = []
        self.ownership.on_change = self._changed
        self.ownership.on_news = self.news.append

    def _changed(self) -> None:
        self.changes += 1

    def delta(self, revision: int, buckets: dict[BucketId, Versioned | None] | None = None,
              nodes: dict[NodeId, NodeRecord | None] | None = None) -> None:  # fmt: skip
        self.ownership.take_delta(
            Delta(revision=Revision(revision), buckets=buckets or {}, nodes=nodes or {})
        )


@pytest.fixture
def owner() -> Host:
    """B owns the bucket."""
    return Host({K: at(9, record(B))})


# -- news


def test_the_first_view_is_told_as_news(owner: Host) -> None:
    owner.ownership.begin()
    assert (owner.news, owner.changes) == ([{K: at(9, record(B))}], 1)


def test_what_the_watch_tells_is_news(owner: Host) -> None:
    new = at(11, record(A, epoch=2))
    owner.delta(11, {K: new})
    assert (owner.news, owner.changes) == ([{K: new}], 1)
    assert (owner.ownership.revision, owner.ownership.owned) == (11, 0)


def test_older_news_than_our_own_transaction_do_not_bring_the_old_record_back(
    owner: Host,
) -> None:
    ours = at(20, record(A, epoch=2))
    owner.ownership.take_records([(K, ours)])
    owner.delta(15, {K: at(15, record(B, A))})
    assert owner.ownership.view.buckets[K] == ours
    assert owner.news == [{K: ours}, {K: ours}]
    assert owner.ownership.revision == 15


def test_the_result_of_a_transaction_that_is_older_than_the_news_is_passed_over(
    owner: Host,
) -> None:
    owner.delta(20, {K: at(20, record(B, epoch=3))})
    owner.ownership.take_records([(K, at(15, record(A, epoch=2))), (K, None)])
    assert owner.ownership.view.buckets[K].mod_revision == 20
    assert (len(owner.news), owner.changes) == (1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_news_the_newest_record_wins_and_none_before_it_comes_back(
    seed: int,
) -> None:
    print("seed", seed)
    rand = random.Random(seed)
    history = [at(9, record(A))]
    for revision in range(11, 30):
        old = history[-1].record
        primary = rand.choice([A, B, C])
        history.append(at(revision, record(primary, epoch=old.epoch + (primary != old.primary))))
    host = Host({K: history[0]})
    # The watch tells in order, with gaps; results of transactions come at any time, and again.
    newest = watched = 0
    for _ in range(80):
        if rand.random() < 0.5:
            i = rand.randrange(min(newest + 3, len(history)))
            host.ownership.take_records([(K, history[i])])
        else:
            i = watched = rand.randrange(watched, len(history)) if rand.random() < 0.3 else watched
            host.delta(int(history[i].mod_revision), {K: history[i]})
        newest = max(newest, i)
        assert host.ownership.view.buckets[K] == history[newest]
        told = [v.mod_revision for news in host.news for v in news.values() if v is not None]
        assert told == sorted(told)


# -- what follows


def test_what_it_owns_and_what_it_holds_a_copy_of_are_counted() -> None:
    host = Host({
        BucketId(0): at(9, record(B, A)),
        BucketId(1): at(9, record(A, B)),
        BucketId(2): at(9, record(A, C)),
    })  # fmt: skip
    assert (host.ownership.owned, host.ownership.held) == (1, 2)


def test_affirmations_are_the_records_of_what_it_has_a_copy_of_as_they_are() -> None:
    mine, shared, other = K, BucketId(1), BucketId(2)
    host = Host({
        mine: at(9, record(B, A)),
        shared: at(10, record(A, B)),
        other: at(11, record(A)),
    })  # fmt: skip
    changes = host.ownership.affirmations()
    assert [(c.bucket, c.expected, c.record) for c in changes] == [
        (b, host.ownership.view.buckets[b].mod_revision, host.ownership.view.buckets[b].record)
        for b in (mine, shared)
    ]
    host.delta(12, {mine: at(12, record(A, epoch=2)), shared: at(12, record(A, epoch=2))})
    assert host.ownership.affirmations() == []


def test_the_registered_life_of_a_node_is_its_newest_one(owner: Host) -> None:
    again = Member(NodeId("a"), BootId(7))
    assert owner.ownership.member_of(A.node) == A
    owner.delta(11, nodes={again.node: node(again)})
    assert owner.ownership.member_of(A.node) == again
    owner.delta(12, nodes={again.node: None})
    assert owner.ownership.member_of(A.node) is None


# -- what others are told


def test_the_table_names_owners_with_their_addresses() -> None:
    host = Host({BucketId(0): at(9, record(A)), BucketId(3): at(9, record(B, generation=4))})
    table = Table(host.ownership.table())
    assert [table.owner(b) for b in range(4)] == [A, None, None, B]
    assert table.generations == [0, 0, 0, 4]
    assert table.endpoints == {A: ("tcp://a@1:1",), B: ("tcp://b@1:1",)}
    assert (table.revision, table.fingerprint, table.backups) == (10, "f", [])
    assert host.ownership.table() is host.ownership.table()


def test_the_table_names_the_backups_in_sync_and_not_the_eligible() -> None:
    lost = msgspec.structs.replace(record(B, A), eligible=(C,))
    host = Host({BucketId(0): at(9, lost), BucketId(1): at(9, record(A))})
    table = Table(host.ownership.table())
    assert [[table.members[i] for i in some] for some in table.backups] == [[A], [], [], []]


def test_an_owner_that_left_keeps_its_last_address_while_it_owns(owner: Host) -> None:
    owner.delta(11, {K: at(11, record(A, epoch=2))})
    owner.delta(12, nodes={A.node: None})
    table = Table(owner.ownership.table())
    assert (table.owner(K), table.endpoints[A]) == (A, ("tcp://a@1:1",))
    assert owner.ownership.address_of(A) == node(A)
    owner.delta(13, {K: at(13, record(B, epoch=3))})
    assert A not in Table(owner.ownership.table()).endpoints
    assert owner.ownership.address_of(A) is None


def test_an_owner_whose_address_was_never_known_has_none() -> None:
    host = Host({K: at(9, record(C)), BucketId(9): at(9, record(A))})
    table = Table(host.ownership.table())
    assert (table.owner(K), table.endpoints[C]) == (C, ())
    assert wire.decode(wire.encode(wire.Kind.TABLE, 1, 1, host.ownership.table()), MIB).body


def test_a_change_makes_a_new_table(owner: Host) -> None:
    before = owner.ownership.table()
    owner.ownership.take_records([(K, at(11, record(A, epoch=2)))])
    assert owner.ownership.table() != before
