"""Buckets that this node is being sent by their primaries. No network, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pkv import wire
from p2pkv.answers import Frames, Handler
from p2pkv.handover import Incoming
from p2pkv.replicas import Replicas
from p2pkv.replicated import Session
from p2pkv.sessions import Response
from p2pkv.sessions import Session as Asking
from p2pkv.store import Store
from p2pkv.types import BucketId, Member
from p2pkv.wire import Kind, Status


class Learning:
    """Takes the pieces of copies, each attempt from its first piece to its last."""

    def __init__(self, store: Store, replicas: Replicas) -> None:
        self.under_way: dict[int, Incoming] = {}
        self.check = False
        """Whether values are compared with their checksums as they arrive."""
        self.corrupt_arrivals = 0
        """Pieces that did not arrive as they were sent."""
        self._store = store
        self._replicas = replicas

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What primaries send of copies that are made."""
        return {Kind.SNAPSHOT: self._on_snapshot}

    def _on_snapshot(
        self, session: Asking, body: wire.Snapshot, frames: Frames, now: int
    ) -> Response:
        return Kind.SNAPSHOT_ACK, self.take(body, session.member, frames, now), ()

    def take(
        self, body: wire.Snapshot, sender: Member | None, frames: Sequence[wire.Buffer], now: int
    ) -> wire.SnapshotAck:
        """A piece of a bucket from its primary. Raises ProtocolError."""
        session = Session(body.epoch, body.nonce)
        dropped, status = 0, Status.CONFLICT
        learned = self.under_way.get(body.bucket)
        if learned is None or learned.session != session or learned.source != sender:
            learned = self._begin(body, sender, session, now) if body.seq == 0 else None
        if learned is not None and self._still(learned):
            before = learned.dropped
            status = learned.take(body, frames, now)
            dropped = learned.dropped - before
            self.corrupt_arrivals += status is Status.CORRUPT
            if body.last and not status and not self._complete(learned, body.base, now):
                status = Status.CONFLICT
        elif sender is not None and body.seq == 0:
            status = self._why_not(body, session, sender)
        return wire.SnapshotAck(body.bucket, body.nonce, body.seq, status, dropped)

    def _begin(
        self, body: wire.Snapshot, sender: Member | None, session: Session, now: int
    ) -> Incoming | None:
        bucket = BucketId(body.bucket)
        if sender is None or not self._replicas.may_learn(bucket, session, sender):
            return None
        self._forget(bucket)
        self._replicas.begin_learning(bucket, session, now)
        learned = self.under_way[bucket] = Incoming(
            self._store, bucket, sender, session, self.check
        )
        return learned

    def _still(self, learned: Incoming) -> bool:
        """Whether the bucket that it fills is still the one that was opened for it."""
        replica = self._replicas.get(learned.bucket)
        return replica is not None and replica.learning == learned.session

    def _why_not(self, body: wire.Snapshot, session: Session, sender: Member) -> Status:
        """NOT_PRIMARY: we have not seen yet that ``sender`` is; MOVING otherwise."""
        replica = self._replicas.get(body.bucket)
        record = replica.record if replica else None
        if record is None or record.epoch < session.epoch or record.primary != sender:
            return Status.NOT_PRIMARY
        return Status.CONFLICT

    def _complete(self, learned: Incoming, base: int, now: int) -> bool:
        """Everything is here. A repeat of the last piece is answered like the first."""
        replica = self._replicas.get(learned.bucket)
        if replica is not None and replica.session == learned.session:
            return True
        return self._replicas.learned(learned.bucket, learned.session, base, now)

    def _forget(self, bucket: int) -> None:
        old = self.under_way.pop(bucket, None)
        if old is not None:
            old.give_up_large()

    def reap(self, now: int) -> None:
        """Let go of attempts that are complete or void."""
        for bucket, learned in list(self.under_way.items()):
            if learned.complete or not self._still(learned):
                self._forget(bucket)
