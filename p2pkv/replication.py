"""One bucket's replica on one node: roles, epochs, the log, promotion, catching up. Pure.

Primary-backup with the configuration in etcd, after W. Lin et al., "PacificA: Replication in
log-based distributed storage systems" (MSR-TR-2008-25) and L. Lamport, D. Malkhi, L. Zhou,
"Vertical Paxos and primary-backup replication" (PODC 2009). ``docs/design.md`` has the invariants
I1 to I16 that the comments name.

A replica is told what happened (a record from etcd, a message, the time) by method calls, and
appends what is to be done to ``out``: values, carried out in order by whoever owns it. It holds
neither objects nor sockets: operations and staged values are opaque to it.

It is made in steps, each of which knows nothing of those built on it: ``following`` (the log),
``leading`` (the log as the primary has it), ``reconfiguring`` (whom the primary waits for), and
here what the record in etcd makes of it all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

import msgspec

from p2pkv.instructions import Changed, Instruction, Tell
from p2pkv.leading import Settings
from p2pkv.leases import Leases
from p2pkv.reconfiguring import Reconfiguring
from p2pkv.records import BucketChange, BucketRecord, Versioned
from p2pkv.replicated import SteppedDown
from p2pkv.types import BucketId, Epoch, Member, NodeId


class Role(Enum):
    """What a replica is to its bucket."""

    ABSENT = "absent"
    LEARNER = "learner"
    BACKUP = "backup"
    RECONCILING = "reconciling"
    """Primary, not sure yet that all others know and have its log."""
    GRACE = "grace"
    """Primary, while an older one may still be serving on what we granted."""
    ACTIVE = "active"
    STALLED = "stalled"
    """Primary without a grant of every other member: it cannot answer reads."""
    HANDING = "handing"
    """Primary on its way to somebody else: clients ask again in a moment."""


class Replica(Reconfiguring):
    """See the module. ``member_of`` tells the registered life of a node, if it seems to live."""

    def __init__(
        self,
        bucket: BucketId,
        settings: Settings,
        leases: Leases,
        member_of: Callable[[NodeId], Member | None],
        out: list[Instruction],
    ) -> None:
        super().__init__(bucket, settings, leases, member_of, out)
        self._adopted_ns = 0

    @property
    def role(self) -> Role:
        if self.tenure:
            if self.handing is not None:
                return Role.HANDING
            if self.active:
                return Role.ACTIVE
            return Role.RECONCILING if self._unconfirmed() else Role.GRACE
        if not self.synced:
            return Role.ABSENT
        return Role.BACKUP if self._counted(self.me) else Role.LEARNER

    # -- the record

    def adopt(self, new: Versioned | None, now: int) -> None:
        """What stands in etcd; older news are passed over."""
        if new is None or new.mod_revision <= self.revision:
            return
        before, record = self.record, new.record
        self.record, self.revision = record, new.mod_revision
        if before is None or before.epoch != record.epoch:
            self._adopted_ns = now
        self._see_epoch(record.epoch)
        if record.generation != self.generation and self.generation:
            self._void(lost=True)
        if record.primary == self.me:
            self._lead(record, now)
        else:
            self._follow(before, record)
        self.out.append(Changed(self.bucket))

    def _lead(self, record: BucketRecord, now: int) -> None:
        if self.tenure == record.epoch:
            if self.proposing is None:
                self._drop_shrunk(record)
            self.advance(now)
            return
        if not self.synced:
            if record.in_sync != (self.me,) or self.generation:
                return  # an in-sync member without data cannot be: it is out by its progress
            self._start_empty(record)
        self._begin_tenure(record, now)

    def _follow(self, before: BucketRecord | None, record: BucketRecord) -> None:
        resigned = self.tenure if self.handing == record.primary else 0
        self._end_tenure()
        if resigned and record.epoch == resigned + 1:
            self.out.append(Tell(record.primary, SteppedDown(self.bucket, Epoch(resigned))))
        if not self.generation or self._named(record):
            return
        left = before is not None and self._named(before)
        over = record.epoch != (self.synced or self._copy_floor.epoch)
        # A copy that is complete may count already for the primary, whoever else is wanted now.
        unwanted = not self.synced and self.me.node not in record.assigned
        if left or over or unwanted:
            self._void(lost=False)

    def decided(self, change: BucketChange, current: Versioned | None, now: int) -> None:
        """What became of a proposal is known: ``current`` is what stands in etcd after it."""
        if self.proposing is change:
            self.proposing = None
            if current is not None and current.record != change.record:
                self._hand_to(None)
        self.adopt(current, now)
        if self.tenure and self.proposing is None and not self.inferior:
            assert self.record is not None
            self._drop_shrunk(self.record)
            self.advance(now)

    # -- promotion

    def may_promote(self, now: int, dead: Collection[Member]) -> bool:
        """Whether to try to take over from the primary.

        Its silence is what counts; that it is thought to be gone only shortens the waiting.
        """
        record = self.record
        if record is None or self.tenure or self.proposing is not None or not self.synced:
            return False
        if record.primary == self.me or not self._named(record):
            return False
        if record.generation != self.generation:
            return False
        heard_ns = self.leases.granted_ns(self.bucket)
        if now - heard_ns <= self.leases.grace_ns:
            return False  # whatever else is to be waited for
        gone = record.primary in dead
        wait = self.leases.grace_ns if gone else max(self.leases.grace_ns, self.timing.slow_ns)
        wait += self._rank(record) * self.timing.promote_step_ns
        if not gone:
            heard_ns = max(heard_ns, self._adopted_ns)
        return now - heard_ns > wait

    def _rank(self, record: BucketRecord) -> int:
        backups = [m for m in (*record.in_sync, *record.eligible) if m != record.primary]
        order = {node: i for i, node in enumerate(record.assigned)}
        backups.sort(key=lambda m: (order.get(m.node, len(order)), m))
        return backups.index(self.me)

    def promote(self) -> None:
        """Propose ourselves as the next primary (invariant I6: only one in sync, of this boot)."""
        record = self.record
        assert record is not None
        others = [m for m in record.in_sync if m not in (record.primary, self.me)]
        eligible = [m for m in record.eligible if m != self.me]
        in_sync = (self.me, *others)
        if len(in_sync) < self.min_in_sync:
            eligible.append(record.primary)
        else:
            eligible = []
        self._propose(
            msgspec.structs.replace(
                record,
                epoch=Epoch(record.epoch + 1),
                primary=self.me,
                in_sync=in_sync,
                eligible=tuple(dict.fromkeys(eligible)),
            )
        )

    # -- checking

    @property
    def _name(self) -> str:
        return f"bucket {self.bucket} on {self.me}"

    def validate(self) -> None:
        """Raises AssertionError, with what is wrong, if the state contradicts itself."""
        assert self.applied <= self.last, f"{self._name}: applied {self.applied} of {self.last}"
        assert set(self.log) == set(range(self.applied + 1, self.last + 1)), f"{self._name}: log"
        assert self.synced <= self.epoch_seen, f"{self._name}: in step with an unseen epoch"
        if self.tenure:
            assert self.synced == self.tenure, f"{self._name}: primary without a log"
            assert self.me not in self.followers, f"{self._name}: follows itself"
            record = self.record
            if record is not None and record.epoch == self.tenure:
                missing = set(record.in_sync) - set(self.followers) - {self.me}
                assert not missing, f"{self._name}: {missing} in sync but not in the ack set (I3)"
        else:
            assert not self.active, f"{self._name}: active without being primary"
            assert not self.followers, f"{self._name}: followers without being primary"
