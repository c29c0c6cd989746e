"""A replica's part as a follower: the log, epochs, and how it comes by the bucket's data. Pure.

The log has the operations behind ``applied``, which are prepared and not committed. What is
committed is applied to the objects at once and leaves the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pkv.instructions import Apply, Changed, Discard, Drop, Entry, Instruction, Open, Tell
from p2pkv.records import BucketRecord
from p2pkv.replicated import LOG_ENTRIES_MAX, NewEpoch, NewEpochAck, Prepare, PrepareAck, Session
from p2pkv.types import BucketId, Member, Revision


class Following:
    """See the module. A primary has the same log, and takes nothing of others (``tenure``)."""

    def __init__(self, bucket: BucketId, me: Member, out: list[Instruction]) -> None:
        self.bucket = bucket
        self.me = me
        self.out = out
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
        self.tenure = 0
        """The epoch in which we are primary; 0: we are not."""
        self._copy_floor = Session(0)
        """Copies up to this one are over (invariant I11)."""

    def _counted(self, member: Member) -> bool:
        record = self.record
        return record is not None and (member in record.in_sync or member in record.eligible)

    def _named(self, record: BucketRecord) -> bool:
        return self.me in record.in_sync or self.me in record.eligible

    def accepts_claim(self, epoch: int) -> bool:
        """Whether whoever is primary in ``epoch`` may serve as far as we are concerned."""
        if epoch < self.epoch_seen:
            return False
        self._see_epoch(epoch)
        return True

    def _see_epoch(self, epoch: int) -> None:
        """A higher epoch ends what we were in a lower one (invariant I2)."""
        if epoch > self.epoch_seen:
            self.epoch_seen = epoch
            if self.tenure and (self.record is None or self.record.epoch != epoch):
                self.out.append(Changed(self.bucket))

    def _void(self, lost: bool) -> None:
        """The data here is nobody's any more."""
        for entry in self.log.values():
            self.out.append(Discard(self.bucket, entry))
        self.log = {}
        self.synced = self.generation = self.applied = self.last = 0
        self._copy_floor = max(self._copy_floor, self.session)
        self.out.append(Drop(self.bucket, lost))

    # -- operations

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

    def _commit_to(self, end: int) -> None:
        out, bucket, log = self.out, self.bucket, self.log
        for seq in range(self.applied + 1, min(end, self.last) + 1):
            self.applied = seq
            out.append(Apply(bucket, log.pop(seq)))

    # -- a new primary

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
