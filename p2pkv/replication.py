"""One bucket's replica on one node: roles, epochs, the log, promotion, catching up. Pure.

Primary-backup with the configuration in etcd, after W. Lin et al., "PacificA: Replication in
log-based distributed storage systems" (MSR-TR-2008-25) and L. Lamport, D. Malkhi, L. Zhou,
"Vertical Paxos and primary-backup replication" (PODC 2009). ``docs/design.md`` has the invariants
I1 to I16 that the comments name.

A replica is told what happened (a record from etcd, a message, the time) by method calls, and
appends what is to be done to ``out``: values, carried out in order by whoever owns it. It holds
neither objects nor sockets: operations and staged values are opaque to it.

The log has the operations behind ``applied``, which are prepared and not committed. What is
committed is applied to the objects at once and leaves the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any

import msgspec

from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.leases import Leases
from p2pkv.records import BucketChange, BucketRecord, Versioned
from p2pkv.replicated import (
    LOG_ENTRIES_MAX,
    NONCE_BITS,
    NewEpoch,
    NewEpochAck,
    Prepare,
    PrepareAck,
    Session,
    SteppedDown,
)
from p2pkv.types import BucketId, Epoch, Member, NodeId, Revision


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """When a replica loses patience. Safety depends on none of these."""

    resend_ns: int = 300 * MILLISECOND_NS
    """What was sent and is not acknowledged for so long is sent again."""
    slow_ns: int = 2 * SECOND_NS
    """A member that grants nothing, or acknowledges nothing, for so long leaves the ack set."""
    promote_step_ns: int = 100 * MILLISECOND_NS
    """The second of several backups waits so much longer than the first."""
    copy_ns: int = 10 * SECOND_NS
    """A copy that was complete and does not catch up for so long is given up."""


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


# -- what is to be done


class Tell(msgspec.Struct, frozen=True, gc=False):
    """Send a small message. It may get lost."""

    to: Member
    message: NewEpoch | NewEpochAck | SteppedDown


class Apply(msgspec.Struct, frozen=True, gc=False):
    """An operation is committed: carry it out, and answer who waits for it."""

    bucket: BucketId
    entry: Entry


class Discard(msgspec.Struct, frozen=True, gc=False):
    """An operation that was prepared will never be committed from here: free what is staged."""

    bucket: BucketId
    entry: Entry


class Abandon(msgspec.Struct, frozen=True, gc=False):
    """We are no longer primary: who waits for this operation is told that its outcome is unknown.

    The operation stays in the log (invariant I13); whoever carries this out takes its ticket.
    """

    bucket: BucketId
    entry: Entry


class Open(msgspec.Struct, frozen=True, gc=False):
    """Hold the bucket, empty."""

    bucket: BucketId


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Let go of the bucket's objects."""

    bucket: BucketId
    lost: bool
    """Whether they were a live copy that others decided about without us."""


class Propose(msgspec.Struct, frozen=True, gc=False):
    """Change the record; then ``decided``, once the outcome is definite (invariant I12)."""

    change: BucketChange


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Send all objects to a learner; then ``copy_cut``, or ``copy_failed``."""

    bucket: BucketId
    to: Member
    session: Session


class Changed(msgspec.Struct, frozen=True, gc=False):
    """Role, followers or who may be served have changed."""

    bucket: BucketId


Instruction = Tell | Apply | Discard | Abandon | Open | Drop | Propose | Copy | Changed


# -- state


class Entry:
    """An operation in the log. ``origin`` is the epoch it was first proposed in; with ``seq`` it
    names the operation for ever. ``staged`` is the value on this node, ``ticket`` who waits."""

    __slots__ = ("op", "origin", "seq", "staged", "ticket")

    def __init__(self, seq: int, origin: int, op: Any, staged: Any, ticket: Any = None) -> None:
        self.seq = seq
        self.origin = origin
        self.op = op
        self.staged = staged
        self.ticket = ticket

    def __repr__(self) -> str:
        return f"Entry({self.seq}, epoch {self.origin}, {self.op})"


class Follower:
    """Another member of the ack set, as the primary knows it."""

    __slots__ = (
        "acked",
        "confirmed",
        "progress_ns",
        "sent",
        "sent_ns",
        "session",
        "since_ns",
        "staged",
        "tried",
    )

    def __init__(self, acked: int, session: Session | None, now: int) -> None:
        self.acked = acked
        self.sent = acked
        self.tried = acked
        """Up to where it was ever sent, whether or not that has to be sent again."""
        self.session = session
        """Of its acknowledgements; None until it has confirmed our epoch."""
        self.confirmed = session is not None
        self.progress_ns = now
        self.sent_ns = now
        self.since_ns = now
        self.staged = (0, 0)
        """Of the last value that went in pieces: its operation, and the bytes that got there."""


class Copying:
    """A member that is being sent the bucket's objects, or was eligible and is ``taken_back``."""

    __slots__ = ("cut", "member", "session", "taken_back")

    def __init__(self, member: Member, session: Session, taken_back: bool = False) -> None:
        self.member = member
        self.session = session
        self.taken_back = taken_back
        self.cut = taken_back
        """All objects are on their way, and it is a follower."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all buckets of a node."""

    me: Member
    min_in_sync: int = 1
    timing: Timing = Timing()


class Replica:
    """See the module. ``member_of`` tells the registered life of a node, if it seems to live."""

    def __init__(
        self,
        bucket: BucketId,
        settings: Settings,
        leases: Leases,
        member_of: Callable[[NodeId], Member | None],
        out: list[Instruction],
    ) -> None:
        self.bucket = bucket
        self.me = settings.me
        self.min_in_sync = settings.min_in_sync
        self.timing = settings.timing
        self.leases = leases
        self.out = out
        self._member_of = member_of
        self.record: BucketRecord | None = None
        self.revision = Revision(0)
        self.epoch_seen = 0
        """The highest epoch that anybody told us of; what is below is refused (invariant I2)."""
        self.generation = 0
        """Of the data here; 0: there is none."""
        self.synced = 0
        """The epoch of which our log is a prefix of the primary's; 0: it is nobody's."""
        self.session = Session(0)
        self.applied = 0
        self.last = 0
        self.log: dict[int, Entry] = {}
        # as primary
        self.tenure = 0
        """The epoch in which we are primary; 0: we are not."""
        self.active = False
        self.followers: dict[Member, Follower] = {}
        self.handing: Member | None = None
        self.copying: Copying | None = None
        self.proposing: BucketChange | None = None
        self._reconcile_to = 0
        self._released = 0
        """The epoch whose primary told us that it serves no more."""
        self._adopted_ns = 0
        self._nonce = 0
        self._offered_ns = 0
        self._copy_floor = Session(0)
        """Copies up to this one are over (invariant I11)."""

    # -- what it is

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

    def _counted(self, member: Member) -> bool:
        record = self.record
        return record is not None and (member in record.in_sync or member in record.eligible)

    def _unconfirmed(self) -> bool:
        return self.applied < self._reconcile_to or any(
            not f.confirmed for f in self.followers.values()
        )

    @property
    def copies(self) -> int:
        """How many members in sync have each committed operation, this one included."""
        assert self.record is not None
        in_sync = self.record.in_sync
        return 1 + len([m for m in self.followers if m in in_sync])

    @property
    def serving(self) -> bool:
        """Primary, active, and not on the way out. Reads need grants as well: ``serve_until``."""
        return (
            self.active
            and self.handing is None
            and 0 < self.tenure == self.epoch_seen
            and not self.inferior
        )

    @property
    def inferior(self) -> bool:
        """Whether etcd names another epoch than the one that we serve in."""
        return self.record is None or self.record.epoch != self.tenure

    def serve_until(self) -> int:
        """Until when this node may answer reads as primary (invariant I7); monotonic ns.

        Without followers there is nobody whose grant would be needed.
        """
        if not self.serving:
            return 0
        held, bucket, tenure = self.leases.held_until, self.bucket, self.tenure
        return min((held(m, bucket, tenure) for m in self.rivals()), default=_FOR_EVER)

    def rivals(self) -> list[Member]:
        """Who might be promoted: those in sync or eligible, or proposed to be.

        A learner is none yet, so that its joining interrupts no reads.
        """
        assert self.record is not None
        rivals = [m for m in self.followers if not self._is_learner(m)]
        eligible = self.record.eligible
        return rivals + [m for m in eligible if m not in self.followers] if eligible else rivals

    def _is_learner(self, member: Member) -> bool:
        assert self.record is not None
        if self.copying is None or self.copying.member != member or self._counted(member):
            return False
        return self.proposing is None or member not in self.proposing.record.in_sync

    @property
    def writable(self) -> bool:
        """Whether writes may be accepted: also what ``min_in_sync`` asks for (invariant I15)."""
        return self.serving and (self.min_in_sync <= 1 or self.copies >= self.min_in_sync)

    # -- writing, as primary

    def submit(self, op: Any, staged: Any, ticket: Any) -> Entry:
        """Append an operation. To be called only while ``writable``."""
        assert self.writable, f"bucket {self.bucket} takes no writes"
        self.last += 1
        entry = self.log[self.last] = Entry(self.last, self.tenure, op, staged, ticket)
        return entry

    @property
    def alone(self) -> bool:
        """Whether what is written is committed at once, because nobody else must have it."""
        return not self.followers and not self.log

    def note_written(self, count: int) -> None:
        """Operations were carried out here without the log, while ``alone``."""
        self.applied += count
        self.last += count

    def unsent(self, to: Member, now: int, limit: int, bytes_max: int) -> list[Entry]:
        """Entries that ``to`` has not been sent yet; they count as sent.

        At most ``limit``, and not many more than ``bytes_max`` of values, but at least one.
        """
        follower = self.followers.get(to)
        if follower is None or not follower.confirmed:
            return []
        first = max(follower.sent, self.applied) + 1
        end = min(self.last, first + limit - 1)
        if end < first:
            return []
        if follower.tried <= follower.acked:
            follower.progress_ns = now  # it had everything; only now it has something to do
        entries: list[Entry] = []
        size = 0
        for seq in range(first, end + 1):
            entry = self.log[seq]
            entries.append(entry)
            size += entry.op.size
            if size >= bytes_max:
                break
        follower.sent, follower.sent_ns = entries[-1].seq, now
        follower.tried = max(follower.tried, follower.sent)
        return entries

    def not_delivered(self, to: Member) -> None:
        """What ``to`` was sent and has not acknowledged is to be sent again."""
        follower = self.followers.get(to)
        if follower is not None:
            follower.sent = follower.acked

    def note_staged(self, to: Member, entry: Entry, filled: int, now: int) -> bool:
        """``to`` has so many bytes of a value that goes in pieces. Whether it is to go on."""
        follower = self.followers.get(to)
        if follower is None or self.log.get(entry.seq) is not entry:
            return False
        if (entry.seq, filled) > follower.staged:
            follower.staged = entry.seq, filled
            follower.progress_ns = now
        return True

    def take_prepare_ack(self, sender: Member, ack: PrepareAck, now: int) -> None:
        follower = self.followers.get(sender)
        if ack.epoch != self.tenure or follower is None or follower.session != ack.session:
            return
        self._acknowledge(follower, ack.last, now)

    def _acknowledge(self, follower: Follower, last: int, now: int) -> None:
        last = min(last, self.last)
        if last > follower.acked:
            follower.acked = last
            follower.sent = max(follower.sent, last)
            follower.progress_ns = now
        self.advance(now)

    def advance(self, now: int) -> None:
        """Commit what every member of the ack set has (invariant I4)."""
        if not self.tenure:
            return
        end = self.last
        for follower in self.followers.values():
            if not follower.confirmed:
                return
            if follower.acked < end:
                end = follower.acked
        if end > self.applied and not self._bound:
            self._commit_to(end)
        if not self.active:
            self._activate(now)

    @property
    def _bound(self) -> bool:
        """Nothing may be committed that an eligible member does not have (invariant I15)."""
        record = self.record
        return (
            record is not None and bool(record.eligible) and len(record.in_sync) < self.min_in_sync
        )

    def _commit_to(self, end: int) -> None:
        out, bucket, log = self.out, self.bucket, self.log
        for seq in range(self.applied + 1, min(end, self.last) + 1):
            self.applied = seq
            out.append(Apply(bucket, log.pop(seq)))

    def _activate(self, now: int) -> None:
        """Serve, once everything of before is committed and nobody else can be serving."""
        if self.applied < self._reconcile_to:
            return
        released = self._released and self._released == self.tenure - 1
        if released or self.leases.lapsed(self.bucket, now):
            self.active = True
            self.out.append(Changed(self.bucket))

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

    def _start_empty(self, record: BucketRecord) -> None:
        self.out.append(Open(self.bucket))
        self.generation = record.generation

    def _begin_tenure(self, record: BucketRecord, now: int) -> None:
        self._end_tenure()
        self.tenure = self.synced = record.epoch
        self.session = Session(record.epoch)
        self._reconcile_to = self.last
        self.followers = {m: Follower(0, None, now) for m in record.in_sync if m != self.me}
        self._offer_epoch(now)
        self.advance(now)

    def _drop_shrunk(self, record: BucketRecord) -> None:
        """Members that etcd confirmed to be out need not acknowledge any more (invariant I3)."""
        copying = self.copying.member if self.copying else None
        for member in [m for m in self.followers if m not in record.in_sync and m != copying]:
            del self.followers[member]
        if copying in record.in_sync:
            self.copying = None
        elif self.copying and self.copying.taken_back and not self._counted(self.copying.member):
            self._give_up_copy()  # it is named no more, and may have dropped what it had

    def _end_tenure(self) -> None:
        if not self.tenure:
            return
        self.tenure = 0
        self.active = False
        self.followers = {}
        self.handing = self.copying = self.proposing = None
        for entry in self.log.values():
            if entry.ticket is not None:
                self.out.append(Abandon(self.bucket, entry))
        self.out.append(Changed(self.bucket))

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

    def _named(self, record: BucketRecord) -> bool:
        return self.me in record.in_sync or self.me in record.eligible

    def _see_epoch(self, epoch: int) -> None:
        """A higher epoch ends what we were in a lower one (invariant I2)."""
        if epoch > self.epoch_seen:
            self.epoch_seen = epoch
            if self.tenure and (self.record is None or self.record.epoch != epoch):
                self.out.append(Changed(self.bucket))

    def _void(self, lost: bool) -> None:
        """The data here is nobody's any more."""
        self._end_tenure()
        for entry in self.log.values():
            self.out.append(Discard(self.bucket, entry))
        self.log = {}
        self.synced = self.generation = self.applied = self.last = 0
        self._copy_floor = max(self._copy_floor, self.session)
        self.out.append(Drop(self.bucket, lost))

    # -- a new primary brings the others into step

    def _offer_epoch(self, now: int) -> None:
        self._offered_ns = now
        origins = [self.log[s].origin for s in range(self.applied + 1, self._reconcile_to + 1)]
        message = NewEpoch(self.bucket, self.tenure, self.applied, origins)
        for member, follower in self.followers.items():
            if not (follower.confirmed or self._copied(member)):
                self.out.append(Tell(member, message))

    def _copied(self, member: Member) -> bool:
        """Whether it comes into step by a copy instead."""
        copying = self.copying
        return copying is not None and copying.member == member and copying.session.nonce > 0

    def take_new_epoch(self, sender: Member, message: NewEpoch) -> None:
        """Keep what the new primary has too; the rest of its log comes with PREPAREs."""
        record = self.record
        if message.epoch < self.epoch_seen or record is None or record.epoch != message.epoch:
            return
        if not self._named(record) or not self.synced or record.primary != sender:
            return
        if self.synced != message.epoch:
            if message.base > self.last:
                return
            self._commit_to(message.base)
            self._keep_common(message)
            self.synced = message.epoch
            self.session = Session(message.epoch)
        ack = NewEpochAck(self.bucket, message.epoch, self.last, self.session)
        self.out.append(Tell(sender, ack))

    def _keep_common(self, message: NewEpoch) -> None:
        """Of our suffix keep what is the new primary's too; the rest was never committed."""
        end = max(self.applied, message.base)
        for seq, origin in enumerate(message.origins, message.base + 1):
            if seq <= end:
                continue
            entry = self.log.get(seq)
            if entry is None or entry.origin != origin:
                break
            end = seq
        for seq in range(end + 1, self.last + 1):
            self.out.append(Discard(self.bucket, self.log.pop(seq)))
        self.last = end

    def take_new_epoch_ack(self, sender: Member, ack: NewEpochAck, now: int) -> None:
        follower = self.followers.get(sender)
        if follower is None or ack.epoch != self.tenure or follower.confirmed:
            return
        if self._copied(sender):
            return  # of before it had to be copied anew
        follower.confirmed = True
        follower.session = ack.session
        follower.acked = follower.sent = min(ack.last, self.last)
        follower.progress_ns = now
        self.out.append(Changed(self.bucket))
        self.advance(now)

    def take_stepped_down(self, sender: Member, message: SteppedDown, now: int) -> None:
        """The primary before us serves no more: what we granted it need not lapse first."""
        if message.epoch >= self._released and message.epoch + 1 >= self.epoch_seen:
            self._released = message.epoch
            if self.tenure:
                self.advance(now)

    # -- following

    def accepts_claim(self, epoch: int) -> bool:
        """Whether whoever is primary in ``epoch`` may serve as far as we are concerned."""
        if epoch < self.epoch_seen:
            return False
        self._see_epoch(epoch)
        return True

    def take_prepare(
        self, sender: Member, message: Prepare, staged: Sequence[Any]
    ) -> PrepareAck | None:
        """Stage operations that follow on ours. What is of no use is discarded.

        None: it is of an epoch that is over, or that we are not in step with.
        """
        origins = message.origins or [message.epoch] * len(message.ops)
        entries = [
            Entry(seq, origin, op, value)
            for seq, origin, op, value in zip(
                range(message.first, message.first + len(message.ops)),
                origins, message.ops, staged, strict=True,
            )
        ]  # fmt: skip
        if message.epoch < self.epoch_seen or self.synced != message.epoch or self.tenure:
            self.out.extend(Discard(self.bucket, entry) for entry in entries)
            return None
        self._see_epoch(message.epoch)
        for entry in entries:
            if entry.seq == self.last + 1:
                self.log[entry.seq] = entry
                self.last = entry.seq
            else:
                self.out.append(Discard(self.bucket, entry))
        self._commit_to(message.commit)
        return PrepareAck(self.bucket, message.epoch, self.last, self.session)

    def may_stage(self, epoch: int, seq: int) -> bool:
        """Whether the operation may still be prepared here, in that epoch."""
        in_step = epoch >= self.epoch_seen and self.synced == epoch and not self.tenure
        return in_step and self.last < seq <= self.last + LOG_ENTRIES_MAX

    def take_commit(self, epoch: int, commit: int) -> None:
        if epoch >= self.epoch_seen and self.synced == epoch and not self.tenure:
            self._commit_to(commit)

    # -- learning

    def may_learn(self, epoch: int, session: Session, sender: Member) -> bool:
        """Whether a copy by the primary of ``epoch`` may begin here (invariant I11).

        Not before we know the record that the primary goes by: it may be that we are out, which
        would void the copy when we hear of it.
        """
        record = self.record
        return (
            record is not None
            and record.epoch == epoch == session.epoch >= self.epoch_seen
            and record.primary == sender
            and not self._named(record)
            and self.revision >= session.revision
            and session > self._copy_floor
            and session > self.session
        )

    def begin_learning(self, session: Session) -> None:
        """Whatever was here goes; the objects come now."""
        if self.generation:
            self._void(lost=False)
        assert self.record is not None
        self.out.append(Open(self.bucket))
        self.generation = self.record.generation
        self._copy_floor = session

    def learned(self, session: Session, base: int) -> bool:
        """All objects as of ``base`` are here: from now on PREPAREs are taken.

        Asked again for the same copy, it answers the same and changes nothing.
        """
        if self.synced == session.epoch and self.session == session:
            return True
        record = self.record
        if (
            record is None
            or session != self._copy_floor
            or record.epoch != session.epoch
            or self.epoch_seen != session.epoch
            or record.generation != self.generation
            or self.synced
        ):
            return False
        self.session = session
        self.synced = session.epoch
        self.applied = self.last = base
        self.out.append(Changed(self.bucket))
        return True

    @property
    def learning(self) -> Session | None:
        """The copy that is on its way here, or has come; None if the data is void."""
        return self._copy_floor if self.generation and not self.tenure else None

    def stop_learning(self, session: Session) -> None:
        """The copy will not be completed."""
        if self.learning == session and not self.synced:
            self._void(lost=False)

    # -- as primary: who is in the ack set

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

    def _resend(self, now: int) -> None:
        unconfirmed = any(not f.confirmed for f in self.followers.values())
        if unconfirmed and now - self._offered_ns >= self.timing.resend_ns // 4:
            self._offer_epoch(now)
        for follower in self.followers.values():
            late = now - follower.sent_ns >= self.timing.resend_ns
            if follower.confirmed and late and follower.acked < follower.sent:
                follower.sent = follower.acked

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

    def _propose(self, record: BucketRecord) -> None:
        self.proposing = BucketChange(self.bucket, self.revision, record)
        self.out.append(Propose(self.proposing))

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


_FOR_EVER = 1 << 62
