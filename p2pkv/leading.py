"""A replica's part as primary, while those who follow it stay the same. Pure.

It brings the followers into step with its epoch, sends them the log, commits what all of them
have, and knows what may be served: with which grants, and when what an older primary was granted
has lapsed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.following import Following
from p2pkv.instructions import Abandon, Changed, Entry, Instruction, Open, Tell
from p2pkv.leases import Leases
from p2pkv.records import BucketChange, BucketRecord
from p2pkv.replicated import NewEpoch, NewEpochAck, PrepareAck, Session, SteppedDown
from p2pkv.types import BucketId, Member


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


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all buckets of a node."""

    me: Member
    min_in_sync: int = 1
    timing: Timing = Timing()


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


class Leading(Following):
    """See the module."""

    def __init__(
        self, bucket: BucketId, settings: Settings, leases: Leases, out: list[Instruction]
    ) -> None:
        super().__init__(bucket, settings.me, out)
        self.min_in_sync = settings.min_in_sync
        self.timing = settings.timing
        self.leases = leases
        self.active = False
        self.followers: dict[Member, Follower] = {}
        self.handing: Member | None = None
        """Who is to be primary next, once all is committed."""
        self.copying: Copying | None = None
        self.proposing: BucketChange | None = None
        """What etcd has not answered yet."""
        self._reconcile_to = 0
        self._released = 0
        """The epoch whose primary told us that it serves no more."""
        self._offered_ns = 0

    # -- what may be served

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
    def copies(self) -> int:
        """How many members in sync have each committed operation, this one included."""
        assert self.record is not None
        in_sync = self.record.in_sync
        return 1 + len([m for m in self.followers if m in in_sync])

    @property
    def writable(self) -> bool:
        """Whether writes may be accepted: also what ``min_in_sync`` asks for (invariant I15)."""
        return self.serving and (self.min_in_sync <= 1 or self.copies >= self.min_in_sync)

    # -- writing

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

    def _resend(self, now: int) -> None:
        unconfirmed = any(not f.confirmed for f in self.followers.values())
        if unconfirmed and now - self._offered_ns >= self.timing.resend_ns // 4:
            self._offer_epoch(now)
        for follower in self.followers.values():
            late = now - follower.sent_ns >= self.timing.resend_ns
            if follower.confirmed and late and follower.acked < follower.sent:
                follower.sent = follower.acked

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

    def _activate(self, now: int) -> None:
        """Serve, once everything of before is committed and nobody else can be serving."""
        if self.applied < self._reconcile_to:
            return
        released = self._released and self._released == self.tenure - 1
        if released or self.leases.lapsed(self.bucket, now):
            self.active = True
            self.out.append(Changed(self.bucket))

    # -- a new primary brings the others into step

    def _begin_tenure(self, record: BucketRecord, now: int) -> None:
        self._end_tenure()
        self.tenure = self.synced = record.epoch
        self.session = Session(record.epoch)
        self._reconcile_to = self.last
        self.followers = {m: Follower(0, None, now) for m in record.in_sync if m != self.me}
        self._offer_epoch(now)
        self.advance(now)

    def _start_empty(self, record: BucketRecord) -> None:
        self.out.append(Open(self.bucket))
        self.generation = record.generation

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

    def _void(self, lost: bool) -> None:
        self._end_tenure()
        super()._void(lost)

    def _offer_epoch(self, now: int) -> None:
        self._offered_ns = now
        origins = [self.log[s].origin for s in range(self.applied + 1, self._reconcile_to + 1)]
        message = NewEpoch(self.bucket, self.tenure, self.applied, origins)
        for member, follower in self.followers.items():
            if not (follower.confirmed or self._copied(member)):
                self.out.append(Tell(member, message))

    def _unconfirmed(self) -> bool:
        return self.applied < self._reconcile_to or any(
            not f.confirmed for f in self.followers.values()
        )

    def _copied(self, member: Member) -> bool:
        """Whether it comes into step by a copy instead."""
        copying = self.copying
        return copying is not None and copying.member == member and copying.session.nonce > 0

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


_FOR_EVER = 1 << 62
