"""What must hold at every moment of a schedule; seen from outside, by one who knows everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2pkv.instructions import Entry
from p2pkv.records import BucketRecord, Versioned
from p2pkv.replication import Replica
from p2pkv.types import BucketId, Member

if TYPE_CHECKING:
    from .etcd_model import EtcdModel
    from .node import Life

Operation = tuple[int, Any, Any]
"""Origin, operation, value. With its place in the history it is one of its kind."""


class Violation(Exception):
    """Something that must never happen has happened. The first word names what."""


class History:
    """What was committed of one generation of a bucket, and what its objects were after each."""

    __slots__ = ("operations", "states")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.states: list[dict[bytes, Any]] = [{}]


class Auditor:
    """Raises Violation."""

    def __init__(self, etcd: EtcdModel) -> None:
        self.etcd = etcd
        self.lives: dict[Member, Life] = {}
        """Those whose process is there, paused or not."""
        self.histories: dict[tuple[int, int], History] = {}
        self.committed = 0
        self._tenures: dict[tuple[int, int], Member] = {}
        etcd.on_record = self.recorded

    def _history(self, bucket: int, generation: int) -> History:
        key = (bucket, generation)
        found = self.histories.get(key)
        if found is None:
            found = self.histories[key] = History()
        return found

    # -- committing

    def applied(self, life: Life, bucket: int, entry: Entry, value: Any, copies: int) -> None:
        """A node has carried out what it takes to be committed."""
        replica = life.replicas.by_bucket[bucket]
        history = self._history(bucket, replica.generation)
        operation = (entry.origin, entry.op, value)
        seq = entry.seq
        if seq <= len(history.operations):
            if history.operations[seq - 1] != operation:
                raise Violation(
                    f"divergence: {life.me} has {operation} as {seq} of bucket {bucket}, "
                    f"committed was {history.operations[seq - 1]}"
                )
            self._compare(life, bucket, history, seq)
            return
        if not replica.tenure:
            raise Violation(f"early-commit: {life.me} is not primary of {bucket} and commits {seq}")
        if seq != len(history.operations) + 1:
            raise Violation(f"gap: {life.me} commits {seq} of bucket {bucket} first")
        history.operations.append(operation)
        history.states.append(dict(life.objects.stores[bucket]))
        self.committed += 1
        self._members_have(bucket, self.etcd.view.buckets[BucketId(bucket)].record)

    def _compare(self, life: Life, bucket: int, history: History, seq: int) -> None:
        store = life.objects.stores.get(bucket)
        if store != history.states[seq]:
            raise Violation(
                f"content: {life.me} has {store} of bucket {bucket} after {seq}, "
                f"not {history.states[seq]}"
            )

    def learned(self, life: Life, bucket: int) -> None:
        """A copy is complete."""
        replica = life.replicas.by_bucket[bucket]
        history = self._history(bucket, replica.generation)
        if replica.applied > len(history.operations):
            raise Violation(f"early-commit: {life.me} learned {replica.applied} of {bucket}")
        self._compare(life, bucket, history, replica.applied)

    # -- membership

    def recorded(self, bucket: BucketId, old: Versioned | None, new: Versioned) -> None:
        record = new.record
        if old is not None:
            before = old.record
            if record.epoch < before.epoch or (
                record.epoch == before.epoch
                and (record.primary != before.primary or record.generation != before.generation)
            ):
                raise Violation(f"epoch: {before} became {record}")
        if record.primary not in record.in_sync:
            raise Violation(f"record: the primary is not in sync in {record}")
        self._members_have(bucket, record)

    def dropped(self, life: Life, bucket: int) -> None:
        current = self.etcd.view.buckets.get(BucketId(bucket))
        if current is not None:
            self._members_have(bucket, current.record)

    def _members_have(self, bucket: int, record: BucketRecord) -> None:
        """Each member that may be promoted has all that was ever committed."""
        history = self._history(bucket, record.generation)
        if history.operations:
            for member in (*record.in_sync, *record.eligible):
                life = self.lives.get(member)
                if life is not None:
                    replica = life.replicas.by_bucket.get(bucket)
                    lack = _lack(replica, record.generation, history)
                    if lack:
                        raise Violation(
                            f"in-sync: {member} is named by {record} and {lack} of bucket {bucket}"
                        )

    # -- serving

    def check(self, life: Life) -> None:
        """After anything that may have changed who serves."""
        life.replicas.validate()
        expected = sum(len(r.log) for r in life.replicas.by_bucket.values())
        if life.objects.staged != expected:
            raise Violation(f"staged: {life.objects.staged} values for {expected} in the log")
        for bucket, replica in life.replicas.by_bucket.items():
            if replica.tenure:
                owner = self._tenures.setdefault((bucket, replica.tenure), life.me)
                if owner != life.me:
                    raise Violation(
                        f"two-primaries: {owner} and {life.me}, epoch {replica.tenure} of {bucket}"
                    )
            if life.may_read(bucket):
                self.may_read(life, bucket)

    def may_read(self, life: Life, bucket: int) -> None:
        """A node is about to answer a read: nobody else could."""
        replica = life.replicas.by_bucket[bucket]
        record = self.etcd.view.buckets[BucketId(bucket)].record
        if record.generation != replica.generation:
            raise Violation(f"two-readers: {life.me} serves a past generation of {bucket}")
        for other in self.lives.values():
            if other is not life and other.may_read(bucket):
                raise Violation(f"two-readers: {life.me} and {other.me} of bucket {bucket}")


def _lack(replica: Replica | None, generation: int, history: History) -> str:
    """What a member does not have that it should; empty: nothing."""
    if replica is None or replica.generation != generation or not replica.synced:
        return f"has nothing ({replica and (replica.generation, replica.synced)})"
    count = len(history.operations)
    if replica.last < count:
        return f"lacks {replica.last + 1} to {count}"
    for seq in range(replica.applied + 1, count + 1):
        entry = replica.log[seq]
        if (entry.origin, entry.op, entry.staged.value) != history.operations[seq - 1]:
            return f"has another {seq}: {entry}, not {history.operations[seq - 1]}"
    return ""
