"""Values larger than a message on their way to a backup: staged in pieces, then prepared by name.

    primary                                       backup
      | STAGE(bucket, epoch, seq, start 0)  ------> |  makes room
      | <--------------------------- STAGED(filled) |
      | STAGE(start filled) + bytes ------------> |  takes what follows on what it has
      | <--------------------------- STAGED(filled) |
      | REPLICATE(staged) ------------------------> |  prepares the operation

Epoch and sequence number name the value as they name its operation. Each answer says how much is
there, so whoever lost an answer, or its connection, goes on from it. What is staged is no part of
the log: nothing is committed, nor acknowledged, that is not prepared. It is freed when the backup
is no longer in step with that epoch, when another value of the bucket is staged, or when nothing
came for ``IDLE_NS``. No network, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pkv import wire
from p2pkv.clock import SECOND_NS, Clock
from p2pkv.errors import ProtocolError
from p2pkv.instructions import Entry
from p2pkv.objects import Object, State
from p2pkv.replicated import Op, OpKind, Prepare
from p2pkv.replication import Replica
from p2pkv.routing import Answer, Exchange, Operation, Reply, Request
from p2pkv.types import Member
from p2pkv.wire import Kind, Status

WAVE = 2
"""Pieces of a value that are under way at once."""
PIECES_PER_MESSAGE = 4
"""A piece is this part of what a message may hold."""
WAVE_TIMEOUT_NS = 5 * SECOND_NS
VALUES_MAX = 8
"""Values of one primary that are staged at once; a further one takes the place of the idlest."""
IDLE_NS = 30 * SECOND_NS

Stage = Callable[[int, Op, int], Object | None]
"""Makes room for the value of a bucket's operation, if there is any."""


def send_staged(
    to: Member,
    prepare: Prepare,
    value: memoryview,
    piece_bytes: int,
    still: Callable[[int], bool],
    clock: Clock,
) -> Operation[bool]:
    """Have the value of ``prepare``, which is one PUT, staged at ``to``.

    True: it may be prepared; it is there, or ``to`` has no room and goes on without it. False: not
    now. ``still(filled)`` is told of each advance, and says whether to go on.
    """
    filled, pieces = 0, [(0, 0)]  # nothing is sent before there is room, and it is known how much
    while True:
        requests = [_request(to, prepare, value, at, n) for at, n in pieces]
        answers = yield Exchange(requests, clock() + WAVE_TIMEOUT_NS)
        staged = [_staged(answer) for answer in answers]
        if any(s is not None and s.status == Status.OUT_OF_MEMORY for s in staged):
            return True
        reached = max((s.filled for s in staged if s is not None and not s.status), default=-1)
        asked = pieces == [(0, 0)]
        if not (reached > filled or (asked and reached == 0)) or not still(reached):
            return False
        filled = reached
        if filled >= len(value):
            return True
        ends = range(filled, min(len(value), filled + WAVE * piece_bytes), piece_bytes)
        pieces = [(at, min(piece_bytes, len(value) - at)) for at in ends]


def _request(to: Member, prepare: Prepare, value: memoryview, at: int, length: int) -> Request:
    body = wire.Stage(prepare.bucket, prepare.epoch, prepare.first, prepare.ops[0], at)
    return Request(to, Kind.STAGE, body, [value[at : at + length]] if length else [])


def _staged(answer: Answer) -> wire.Staged | None:
    known = isinstance(answer, Reply) and answer.kind == Kind.STAGED
    return answer.body if known else None  # type: ignore[union-attr]


class _Value:
    """A value that is being staged; ``item`` None: there is no room for it."""

    __slots__ = ("epoch", "filled", "item", "sender", "seq", "touched_ns")

    def __init__(self, sender: Member, epoch: int, seq: int, item: Object | None) -> None:
        self.sender = sender
        self.epoch = epoch
        self.seq = seq
        self.item = item
        self.filled = 0
        self.touched_ns = 0

    def is_of(self, sender: Member, epoch: int, seq: int) -> bool:
        return (self.epoch, self.seq, self.sender) == (epoch, seq, sender)

    @property
    def gone(self) -> bool:
        """Whether its memory was taken back, as when the bucket was dropped."""
        return self.item is not None and self.item.state is not State.ALLOCATED


class Oversized:
    """What is staged here, as a backup: one value of a bucket at a time."""

    def __init__(
        self,
        stage: Stage,
        free: Callable[[Sequence[Object]], object],
        write: Callable[[int, wire.Buffer], None],
        replica_of: Callable[[int], Replica | None],
    ) -> None:
        self._stage = stage
        self._free = free
        self._write = write
        self._replica_of = replica_of
        self._values: dict[int, _Value] = {}
        self.staged_bytes = 0
        """Of pieces that were taken."""

    def __len__(self) -> int:
        return len(self._values)

    def take(
        self, body: wire.Stage, sender: Member | None, frames: Sequence[wire.Buffer], now: int
    ) -> wire.Staged:
        """A piece from a primary. Raises ProtocolError."""
        op, length = body.op, sum(memoryview(frame).nbytes for frame in frames)
        if op.kind != OpKind.PUT or body.start + length > op.size:
            raise ProtocolError(f"bytes {body.start} to {body.start + length} of {op}")
        if sender is None or not self._expected(body.bucket, body.epoch, body.seq):
            return wire.Staged(Status.CONFLICT)
        value = self._values.get(body.bucket)
        if value is None or value.gone or not value.is_of(sender, body.epoch, body.seq):
            if body.start:
                return wire.Staged(Status.OK)  # begin again
            value = self._begin(body, sender, now)
        value.touched_ns = now
        if value.item is None:
            return wire.Staged(Status.OUT_OF_MEMORY)
        if value.item.size != op.size:
            raise ProtocolError(f"operation {body.seq} had {value.item.size} bytes before")
        if body.start <= value.filled:
            at = value.item.offset + body.start
            for frame in frames:
                self._write(at, frame)
                at += memoryview(frame).nbytes
            self.staged_bytes += length
            value.filled = max(value.filled, body.start + length)
        return wire.Staged(Status.OK, value.filled)

    def claim(self, sender: Member | None, prepares: Sequence[Prepare]) -> Object | None:
        """The value of the PUT that ``prepares`` are; None: there was no room for it.

        From here on it is the caller's. Raises ProtocolError if it is not here as a whole.
        """
        if sender is None or [len(p.ops) for p in prepares] != [1]:
            raise ProtocolError("what was staged is prepared by itself, by its primary")
        prepare = prepares[0]
        value = self._values.get(prepare.bucket)
        if value is None or value.gone or not value.is_of(sender, prepare.epoch, prepare.first):
            raise ProtocolError(f"operation {prepare.first} was not staged here")
        size = prepare.ops[0].size
        if value.item is not None and not value.filled == value.item.size == size:
            raise ProtocolError(f"{value.filled} of {size} bytes were staged here")
        del self._values[prepare.bucket]
        return value.item

    def reap(self, now: int) -> None:
        """Free what will not be prepared."""
        for bucket, value in list(self._values.items()):
            idle = now - value.touched_ns > IDLE_NS
            if idle or value.gone or not self._expected(bucket, value.epoch, value.seq):
                self._forget(bucket)

    def _expected(self, bucket: int, epoch: int, seq: int) -> bool:
        replica = self._replica_of(bucket)
        return replica is not None and replica.may_stage(epoch, seq)

    def _begin(self, body: wire.Stage, sender: Member, now: int) -> _Value:
        self._forget(body.bucket)
        of_sender = [b for b, v in self._values.items() if v.sender == sender]
        if len(of_sender) >= VALUES_MAX:
            self._forget(min(of_sender, key=lambda b: self._values[b].touched_ns))
        item = self._stage(body.bucket, body.op, now)
        value = self._values[body.bucket] = _Value(sender, body.epoch, body.seq, item)
        return value

    def _forget(self, bucket: int) -> None:
        value = self._values.pop(bucket, None)
        if value is not None and value.item is not None:
            self._free([value.item])


def is_alone(entries: Sequence[Entry], message_bytes_max: int) -> bool:
    """Whether a batch is one value that no message holds."""
    return len(entries) == 1 and entries[0].op.size > message_bytes_max


__all__ = ["Oversized", "is_alone", "send_staged"]
