"""Whom a primary waits for: it brings members in, leaves them behind, and hands over. Pure.

What it decides on, it proposes to etcd; it counts from when etcd has confirmed it. Members that
are not in sync yet are copied to first, or taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from p2pkv.instructions import Changed, Copy, Instruction, Propose
from p2pkv.leading import Copying, Follower, Leading, Settings
from p2pkv.leases import Leases
from p2pkv.records import BucketChange, BucketRecord
from p2pkv.replicated import NONCE_BITS, Session
from p2pkv.types import BucketId, Epoch, Member, NodeId


class Reconfiguring(Leading):
    """See the module. ``member_of`` tells the registered life of a node, if it seems to live."""

    def __init__(
        self,
        bucket: BucketId,
        settings: Settings,
        leases: Leases,
        member_of: Callable[[NodeId], Member | None],
        out: list[Instruction],
    ) -> None:
        super().__init__(bucket, settings, leases, out)
        self._member_of = member_of
        self._nonce = 0

    @property
    def restless(self) -> bool:
        """Whether ``tick`` has something to wait for."""
        if not self.tenure:
            return False
        if not self.active or self.log or self.copying or self.handing or self.proposing:
            return True
        record = self.record
        assert record is not None
        present = {self.me.node, *(m.node for m in self.followers)}
        return present != set(record.assigned) or self.me.node not in record.assigned[:1]

    def tick(self, now: int, dead: Collection[Member], etcd_answers: bool = True) -> None:
        """Time has passed. ``dead`` are those that are thought to be gone; without etcd nothing
        is handed over."""
        if not self.tenure or self.inferior:
            return
        self._resend(now)
        self.advance(now)
        if self.proposing is None:
            self._reconfigure(now, dead, etcd_answers)

    # -- bringing in

    def wanted(self) -> list[Member]:
        """The members that ought to have a copy and are registered; the wanted primary first."""
        assert self.record is not None
        members = map(self._member_of, self.record.assigned)
        return [m for m in members if m is not None]

    def missing(self) -> Member | None:
        """Who should get a copy next."""
        if self.record is None:
            return None
        present = {self.me, *self.followers}
        return next((m for m in self.wanted() if m not in present), None)

    def start_copy(self, now: int) -> bool:
        """Begin to bring a missing member into step, if this may be."""
        member = self.missing()
        if member is None or self.copying is not None or not self.serving or self.proposing:
            return False
        assert self.record is not None
        if member in self.record.eligible:
            self._take_back(member, now)
            return False
        self._nonce = (self._nonce + 1) % (1 << NONCE_BITS)
        nonce = (self.revision << NONCE_BITS) + self._nonce
        self.copying = Copying(member, Session(self.tenure, nonce))
        self.out.append(Copy(self.bucket, member, self.copying.session))
        return True

    def _take_back(self, member: Member, now: int) -> None:
        """An eligible member has everything: it need only confirm the epoch."""
        self.copying = Copying(member, Session(self.tenure), taken_back=True)
        self.followers[member] = Follower(0, None, now)
        self._offer_epoch(now)
        self.out.append(Changed(self.bucket))

    def copy_cut(self, session: Session, now: int) -> int | None:
        """The rest of the objects leaves now: the learner's acknowledgement counts from here.

        Returns the sequence number that the objects are as of. None: it is not wanted any more.
        """
        copying = self.copying
        if copying is None or copying.session != session or not self.active:
            return None
        copying.cut = True
        self.followers[copying.member] = Follower(self.applied, None, now)
        self.out.append(Changed(self.bucket))
        return self.applied

    def copy_done(self, session: Session, now: int) -> None:
        """The learner has got everything."""
        copying = self.copying
        follower = self.followers.get(copying.member) if copying else None
        if copying is None or copying.session != session or follower is None:
            return
        follower.confirmed = True
        follower.session = session
        follower.progress_ns = now
        self.out.append(Changed(self.bucket))
        self.advance(now)

    def copy_failed(self, session: Session) -> None:
        """The learner has not got everything."""
        copying = self.copying
        if copying is None or copying.session != session:
            return
        proposing = self.proposing
        if proposing is None or copying.member not in proposing.record.in_sync:
            self._give_up_copy()

    def _give_up_copy(self) -> None:
        assert self.copying is not None
        assert self.record is not None
        member = self.copying.member
        self.copying = None
        if member not in self.record.in_sync:
            self.followers.pop(member, None)
        if self.handing == member:
            self.handing = None
        self.out.append(Changed(self.bucket))

    # -- leaving behind

    def _reconfigure(self, now: int, dead: Collection[Member], etcd_answers: bool) -> None:
        record = self.record
        assert record is not None
        failed = {
            m
            for m, f in self.followers.items()
            if m in dead or self._silent(m, f, now) or self._stuck(f, now)
        }
        copying = self.copying
        if copying is not None and (copying.member in failed or copying.member in dead):
            self._give_up_copy()
        out_of_sync = failed.intersection(record.in_sync)
        if out_of_sync:
            self._hand_to(None)
            self._propose_shrunk(record, out_of_sync)
        elif self.log and self._bound:
            self._propose(msgspec.structs.replace(record, eligible=()))
        elif self.active:
            self._improve(record, now, etcd_answers)

    def _silent(self, member: Member, follower: Follower, now: int) -> bool:
        """It grants nothing: it is gone, cut off, or may not (it is fenced)."""
        leases = self.leases
        granted_ns = leases.held_until(member, self.bucket, self.tenure) - leases.lease_ns
        return now - max(granted_ns, follower.since_ns) > self.timing.slow_ns

    def _stuck(self, follower: Follower, now: int) -> bool:
        behind = not follower.confirmed or follower.acked < self.last
        return behind and now - follower.progress_ns > 2 * self.timing.slow_ns

    def _propose_shrunk(self, record: BucketRecord, gone: Collection[Member]) -> None:
        """Etcd confirms first, then they need not acknowledge (invariants I3, I14, I15)."""
        in_sync = tuple(m for m in record.in_sync if m not in gone)
        eligible: tuple[Member, ...] = ()
        if len(in_sync) < self.min_in_sync:
            eligible = tuple(dict.fromkeys((*record.eligible, *sorted(gone))))
        self._propose(msgspec.structs.replace(record, in_sync=in_sync, eligible=eligible))

    def _propose(self, record: BucketRecord) -> None:
        self.proposing = BucketChange(self.bucket, self.revision, record)
        self.out.append(Propose(self.proposing))

    def _drop_shrunk(self, record: BucketRecord) -> None:
        """Members that etcd confirmed to be out need not acknowledge any more (invariant I3)."""
        copying = self.copying.member if self.copying else None
        for member in [m for m in self.followers if m not in record.in_sync and m != copying]:
            del self.followers[member]
        if copying in record.in_sync:
            self.copying = None
        elif self.copying and self.copying.taken_back and not self._counted(self.copying.member):
            self._give_up_copy()  # it is named no more, and may have dropped what it had

    # -- towards what the planner wants

    def _improve(self, record: BucketRecord, now: int, etcd_answers: bool) -> None:
        """One step towards where the planner wants the bucket."""
        ready = [m for m, f in self.followers.items() if f.confirmed and f.acked >= self.applied]
        waits = self.missing() is not None
        target = None if waits or not etcd_answers else self._successor(record, ready, now)
        self._hand_to(target)
        if target is not None:
            self._hand_over(record, target, ready)
            return
        new = [m for m in ready if m not in record.in_sync and self._grants(m, now)]
        if new:
            in_sync = (*record.in_sync, *new)
            eligible = record.eligible if len(in_sync) < self.min_in_sync else ()
            eligible = tuple(m for m in eligible if m not in in_sync)
            self._propose(msgspec.structs.replace(record, in_sync=in_sync, eligible=eligible))
            return
        surplus = {m for m in record.in_sync if m.node not in record.assigned and m != self.me}
        if surplus and not waits and self._all_there(record):
            self._propose_shrunk(record, surplus)

    def _grants(self, member: Member, now: int) -> bool:
        """Whether reads would not have to wait for it if it were in sync."""
        return self.leases.held_until(member, self.bucket, self.tenure) > now

    def _all_there(self, record: BucketRecord) -> bool:
        nodes = {m.node for m in record.in_sync}
        return nodes.issuperset(record.assigned)

    def _successor(self, record: BucketRecord, ready: list[Member], now: int) -> Member | None:
        """Who is to be primary, if it has everything and was heard of just now."""
        first = record.assigned[:1]
        heirs = (m for m in ready if m.node in first)
        return next((m for m in heirs if m == self.handing or self._grants(m, now)), None)

    def _hand_to(self, target: Member | None) -> None:
        if self.handing != target:
            self.handing = target
            self.out.append(Changed(self.bucket))

    def _hand_over(self, record: BucketRecord, target: Member, ready: list[Member]) -> None:
        """Once everything is committed, and everybody who stays has it, change the record."""
        stay = [m for m in ready if m != target and m.node in record.assigned]
        if self.applied < self.last or self.followers[target].acked < self.last:
            return
        self._propose(
            msgspec.structs.replace(
                record,
                epoch=Epoch(record.epoch + 1),
                primary=target,
                in_sync=(target, *stay, *((self.me,) if self.me.node in record.assigned else ())),
                eligible=(),
            )
        )
