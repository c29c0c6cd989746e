"""Whose copies a node takes, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from nodeside import MIB, A, B, C
from replicating import Cluster, Node

from p2pkv.checksums import checksums_of
from p2pkv.objects import Object
from p2pkv.replication import Role
from p2pkv.types import BucketId, Member
from p2pkv.wire import Entry, Snapshot, Status

K = BucketId(0)
OK, CONFLICT, NOT_PRIMARY = Status.OK, Status.CONFLICT, Status.NOT_PRIMARY


class Learner:
    """Node B, to which A is to copy bucket 0. Pieces come from the test."""

    def __init__(self, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(Cluster(stack))
        self.cluster.start(A)
        self.plan(A, B)
        self.node: Node = self.cluster[B]
        self.learning = self.node.learning

    def plan(self, *assigned: Member, **fields: Any) -> None:
        self.cluster.write(K, assigned=tuple(m.node for m in assigned), **fields)

    @property
    def revision(self) -> int:
        return int(self.cluster.records[K].mod_revision)

    def takes(self, *entries: Entry, nonce: int = 1, seq: int = 0, last: bool = False,
              source: Member | None = A, epoch: int = 1, bucket: int = K, base: int = 0,
              revision: int = 0) -> Status:  # fmt: skip
        """``nonce``: counted by the primary; the record that it knows is part of it, too."""
        number = ((revision or self.revision) << 20) + nonce
        body = Snapshot(bucket, epoch, number, seq, list(entries), last, base)
        values = [b"v" * (e.piece if e.piece >= 0 else max(0, e.size)) for e in entries]
        ack = self.learning.take(body, source, [v for v in values if v], self.cluster.now)
        assert (ack.bucket, ack.nonce, ack.seq) == (bucket, number, seq)
        self.node.store.validate()
        return Status(ack.status)

    @property
    def role(self) -> Role:
        return self.node.replicas.roles(K, self.cluster.now)

    @property
    def keys(self) -> set[bytes]:
        return set(self.node.store.buckets[K].objects)


@pytest.fixture
def learner() -> Iterator[Learner]:
    with ExitStack() as stack:
        yield Learner(stack)


def test_a_complete_copy_is_a_learner_and_serves_when_the_record_says_so(learner: Learner) -> None:
    assert learner.takes(Entry(b"k", 1), last=True, base=7) is OK
    assert learner.role is Role.LEARNER
    assert learner.node.replicas.by_bucket[K].applied == 7
    assert learner.node.get(b"k") == [NOT_PRIMARY]
    learner.plan(B, A, primary=B, in_sync=(B,), epoch=2)
    learner.cluster.run_until(lambda: K in learner.node.replicas.served)
    assert learner.keys == {b"k"}


def test_an_incomplete_copy_is_none(learner: Learner) -> None:
    learner.takes(Entry(b"k", 1))
    assert learner.role is Role.ABSENT
    learner.plan(B, A, primary=B, in_sync=(B, A), epoch=2)
    assert K not in learner.node.replicas.served


@pytest.mark.parametrize(
    ("assigned", "fields"),
    [
        ((A, C), {}),
        ((C, B), {"primary": C, "in_sync": (C,), "epoch": 2}),
        ((A, B), {"epoch": 2, "generation": 2}),
        ((A, B), {"epoch": 2}),
    ],
    ids=["planned elsewhere", "another primary", "started anew", "a later epoch"],
)
def test_a_copy_under_way_that_leads_nowhere_is_dropped(
    learner: Learner, assigned: tuple[Member, ...], fields: dict[str, Any]
) -> None:
    learner.takes(Entry(b"large", 9, start=0, piece=3))
    revision = learner.revision
    learner.plan(*assigned, **fields)
    assert learner.takes(seq=1, last=True, revision=revision) is CONFLICT
    learner.learning.reap(learner.cluster.now)
    assert not learner.learning.under_way
    assert K not in learner.node.store.buckets
    assert learner.node.store.stats().used_bytes == 0


def test_a_copy_stays_while_its_primary_and_goal_stay(learner: Learner) -> None:
    revision = learner.revision
    learner.takes(Entry(b"k", 1))
    learner.plan(A, B, C)
    assert learner.takes(Entry(b"l", 1), seq=1, last=True, revision=revision) is OK
    assert learner.keys == {b"k", b"l"}


def test_only_the_primary_may_teach(learner: Learner) -> None:
    assert learner.takes(source=None) is CONFLICT
    assert learner.takes(source=C) is NOT_PRIMARY
    assert learner.takes(epoch=2) is NOT_PRIMARY
    assert learner.takes(bucket=3) is NOT_PRIMARY
    assert not learner.learning.under_way
    assert learner.takes() is OK


def test_a_primary_that_knows_a_newer_record_is_asked_to_wait(learner: Learner) -> None:
    """That record may say that we are out: a copy made before it would be void."""
    assert learner.takes(revision=learner.revision + 1) is not OK
    learner.plan(A, B)
    assert learner.takes() is OK


def test_a_member_in_sync_does_not_learn(learner: Learner) -> None:
    learner.cluster.settle()
    assert learner.role is Role.BACKUP
    assert learner.takes() is CONFLICT
    assert learner.role is Role.BACKUP


def test_an_attempt_begins_with_its_first_piece(learner: Learner) -> None:
    assert learner.takes(seq=1) is CONFLICT
    assert K not in learner.node.store.buckets
    assert learner.takes(Entry(b"k", 1)) is OK


def test_a_new_attempt_starts_over_and_an_older_one_has_no_effect(learner: Learner) -> None:
    assert learner.takes(Entry(b"old", 1), nonce=1) is OK
    assert learner.takes(Entry(b"new", 1), nonce=2) is OK
    assert learner.takes(Entry(b"old", 1), nonce=1) is CONFLICT
    assert learner.takes(seq=1, nonce=1, last=True) is CONFLICT
    assert learner.takes(seq=1, nonce=2, last=True) is OK
    assert learner.keys == {b"new"}


def test_an_attempt_that_was_forgotten_does_not_come_back(learner: Learner) -> None:
    learner.takes(Entry(b"k", 1), nonce=5)
    learner.learning._forget(K)
    assert learner.takes(Entry(b"k", 1), nonce=5) is CONFLICT
    assert learner.takes(Entry(b"k", 1), nonce=6) is OK


def test_a_repeat_of_the_last_piece_is_answered_like_the_first(learner: Learner) -> None:
    for _ in range(2):
        assert learner.takes(Entry(b"k", 1), last=True, base=3) is OK
    learner.learning.reap(learner.cluster.now)
    assert learner.role is Role.LEARNER
    assert learner.keys == {b"k"}


def test_the_primary_is_told_how_many_objects_found_no_room(learner: Learner) -> None:
    body = Snapshot(K, 1, (learner.revision << 20) + 1, 0, [Entry(b"k", 2 * MIB)])
    value = [bytes(2 * MIB)]
    ack = learner.learning.take(body, A, value, 1)
    assert (ack.status, ack.dropped) == (OK, 1)
    again = learner.learning.take(body, A, value, 1)
    assert (again.status, again.dropped) == (OK, 0)


def test_a_value_that_does_not_arrive_as_it_was_sent_is_refused_and_counted(
    learner: Learner,
) -> None:
    learner.learning.check = True
    [good] = checksums_of([memoryview(b"v")])
    assert learner.takes(Entry(b"k", 1, checksum=good ^ 1)) is Status.CORRUPT
    assert learner.learning.corrupt_arrivals == 1
    assert learner.takes(Entry(b"k", 1, checksum=good)) is OK


def test_a_value_of_a_void_copy_stays_for_who_reads_it(learner: Learner) -> None:
    learner.takes(Entry(b"k", 1), last=True)
    store = learner.node.store
    item = store.buckets[K].objects[b"k"]
    store.acquire(item)
    learner.plan(A, C, epoch=2)
    assert K not in store.buckets
    assert isinstance(item, Object)
    assert bytes(store.value(item)) == b"v"
    store.release(item)
    assert store.stats().used_bytes == 0
