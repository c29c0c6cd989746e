"""Buckets in which nobody writes: what has to happen to them happens all the same."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from nodeside import MIB, MS, A, B, S, make_replicas, make_store, owned

from p2pkv.arena import Arena
from p2pkv.records import BucketRecord, Versioned
from p2pkv.replicas import Replicas
from p2pkv.sessions import Sessions
from p2pkv.types import BucketId, Member, Revision
from p2pkv.wire import Status

BUCKET = BucketId(0)
STEP = 50 * MS


class Pair:
    """The primary A and the backup B of one bucket; no operation is ever done."""

    def __init__(self, arena: Arena) -> None:
        self.now = S
        self.nodes = {me: self._replicas(me, arena) for me in (A, B)}
        self.revision = 0
        self._decide(msgspec.structs.replace(owned(A).record, assigned=(A.node, B.node)))

    def _decide(self, record: BucketRecord) -> None:
        """It stands in etcd now, and both know."""
        self.revision += 1
        for replicas in self.nodes.values():
            replicas.adopt({BUCKET: Versioned(record, Revision(self.revision))}, self.now)

    def join(self) -> None:
        """B gets its copy and comes into step."""
        primary, backup = self.nodes[A], self.nodes[B]
        self.run(1.0)
        (copy,) = primary.copies
        assert backup.may_learn(BUCKET, copy.session, A)
        backup.begin_learning(BUCKET, copy.session, self.now)
        base = primary.copy_cut(BUCKET, copy.session, self.now)
        assert base is not None
        assert backup.learned(BUCKET, copy.session, base, self.now)
        primary.copy_done(BUCKET, copy.session, self.now)
        self.run(1.0)
        change = primary.proposals.pop()
        assert change.record.in_sync == (A, B)
        self.revision += 1
        decided = Versioned(change.record, Revision(self.revision))
        primary.decided(change, decided, self.now)
        backup.adopt({BUCKET: decided}, self.now)
        self.run(1.0)

    def _replicas(self, me: Member, arena: Arena) -> Replicas:
        store = make_store(arena)
        sessions = Sessions(store, ttl_ns=30 * S, alloc_ns=10 * S, read_ns=10 * S,
                            sessions_max=4, answers_max=8)  # fmt: skip
        return make_replicas(store, sessions, me)[1]

    def run(self, seconds: float, alive: tuple[Member, ...] = (A, B)) -> None:
        for _ in range(int(seconds * S / STEP)):
            self.now += STEP
            for me in alive:
                self.nodes[me].tick(self.now)
                for talk in self.nodes[me].talk():
                    if talk.to in alive:
                        self.nodes[talk.to].take_talk(talk, self.now)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Arena.create(1 * MIB, "quiet") as arena:
        pair = Pair(arena)
        pair.join()
        assert pair.nodes[A].status(BUCKET, pair.now) == Status.OK
        assert not pair.nodes[A].proposals
        yield pair


@pytest.mark.parametrize("suspected", [True, False], ids=["suspected", "only silent"])
def test_a_bucket_without_writes_lets_go_of_a_backup_that_is_gone(
    pair: Pair, suspected: bool
) -> None:
    if suspected:
        pair.nodes[A].suspect(B)
    pair.run(4.0, alive=(A,))
    assert pair.nodes[A].status(BUCKET, pair.now) == Status.STALLED
    (change,) = pair.nodes[A].proposals
    assert change.record.in_sync == (A,)


def test_a_backup_that_is_there_is_kept_however_little_happens(pair: Pair) -> None:
    pair.run(60.0)
    assert not pair.nodes[A].proposals
    assert pair.nodes[A].status(BUCKET, pair.now) == Status.OK
