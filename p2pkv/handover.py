"""Copying a bucket from its primary to a learner, while it is being used. Pure.

The primary sends all objects, then those that changed meanwhile, until little is left. Then it
*cuts*: from now on nothing is committed without the learner, so the rest that it sends is exactly
what the bucket holds as of one operation, and everything behind that comes as PREPAREs.

    primary                                 learner
      | SNAPSHOT(nonce, seq 0..)  ------------> |  stores, serves nothing
      | <------------------------ SNAPSHOT_ACK  |
      |  (cut: the learner must acknowledge)    |
      | SNAPSHOT(last, base) -----------------> |  takes PREPAREs from base + 1 on
      | <------------------------ SNAPSHOT_ACK  |
      |  etcd: the learner is in sync, or the next primary

``nonce`` names one attempt and rises with each of a primary. A learner that sees a higher one
starts over, and takes no piece of an older one any more; within one, pieces come in the order of
``seq``, each exactly once (a repeat is acknowledged again, a gap ends the attempt).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from p2pkv import wire
from p2pkv.checksums import checksums_of
from p2pkv.clock import MILLISECOND_NS, SECOND_NS, Clock
from p2pkv.errors import ProtocolError
from p2pkv.objects import Bucket, Object, Pin, State
from p2pkv.replicated import Session
from p2pkv.routing import Effect, Exchange, Operation, Pause, Reply, Request
from p2pkv.types import BucketId, Member
from p2pkv.wire import Entry, Kind, PutOptions, Snapshot, Status

if TYPE_CHECKING:
    from p2pkv.store import Store

PIECE_BYTES = 2 << 20
PIECE_KEYS = 4096
PASSES_MAX = 8
"""Rounds over what changed meanwhile, before the cut comes whatever is left."""
REST_BYTES = 4 << 20
"""So little is left that sending it while commits wait is not felt."""
ACK_TIMEOUT_NS = 5 * SECOND_NS

_WRITE_ONCE, _SOFT, _HARD = 1, 2, 4


class Failed(Exception):
    """The attempt ended; the primary goes on without the learner."""


class NotYet(Failed):
    """The learner has not seen the newest record yet; it will in a moment."""


class Cut(msgspec.Struct, frozen=True):
    """Effect: from now on nothing is committed without the learner. Answer: the operation up to
    which everything is committed, or None if the copy is not wanted any more."""


class Outgoing:
    """One attempt to copy a bucket; ``run`` is the generator that does it."""

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        target: Member,
        session: Session,
        bytes_per_s: int,
        piece_bytes: int = PIECE_BYTES,
        piece_keys: int = PIECE_KEYS,
    ) -> None:
        self.bucket = bucket
        self.target = target
        self.session = session
        self.total = len(bucket.objects)
        self.sent_keys = 0
        self.sent_bytes = 0
        self.dropped = 0
        self._store = store
        self._base = 0
        self._rate = bytes_per_s
        self._piece_bytes = piece_bytes
        self._piece_keys = piece_keys
        self._seq = 0
        self._dirty: dict[bytes, None] = {}

    def run(self, clock: Clock) -> Generator[Effect | Cut, Any, None]:
        """Copy it. Raises Failed when the learner has not got everything."""
        bucket = self.bucket
        bucket.dirty = self._dirty = dict.fromkeys(bucket.objects)
        try:
            passes = 0
            while self._left_bytes() > REST_BYTES and passes < PASSES_MAX:
                yield from self._send(clock, list(self._dirty), throttled=True)
                passes += 1
            base = yield Cut()
            if base is None:
                raise Failed("the copy is not wanted any more")
            self._base = base
            yield from self._send(clock, list(self._dirty), throttled=False, last=True)
        finally:
            if bucket.dirty is self._dirty:
                bucket.dirty = None

    def _left_bytes(self) -> int:
        objects = self.bucket.objects
        dirty = self._dirty
        return sum(objects[k].size for k in dirty if k in objects) + 64 * len(dirty)

    def _send(
        self, clock: Clock, keys: Sequence[bytes], throttled: bool, last: bool = False
    ) -> Operation[None]:
        """Send the objects of these keys as they are when their turn comes."""
        at = 0
        while at < len(keys):
            item = self.bucket.objects.get(keys[at])
            if item is not None and item.size > self._piece_bytes:
                self._clean(keys[at])
                yield from self._send_large(clock, item)
                at += 1
                continue
            entries, payload = self._next_piece(keys, at, clock())
            at += len(entries)
            yield from self._piece(entries, payload, clock, throttled, last and at == len(keys))
            if last and at == len(keys):
                return
        if last:
            yield from self._piece([], b"", clock, False, True)

    def _next_piece(self, keys: Sequence[bytes], at: int, now: int) -> tuple[list[Entry], bytes]:
        """As many objects from ``keys[at]`` on as one message takes; at least one."""
        entries: list[Entry] = []
        values: list[memoryview] = []
        room = self._piece_bytes
        for key in keys[at : at + self._piece_keys]:
            item = self.bucket.objects.get(key)
            size = 0 if item is None else item.size
            if size > room:
                break
            room -= size
            entries.append(entry_of(key, item, now))
            if item is not None and entries[-1].size >= 0:
                values.append(self._store.value(item))
            self._clean(key)
        return entries, b"".join(values)

    def _clean(self, key: bytes) -> None:
        self._dirty.pop(key, None)

    def _send_large(self, clock: Clock, item: Object) -> Operation[None]:
        """A value larger than a piece, in several; held by a token meanwhile."""
        self._store.acquire(item)
        try:
            for start in range(0, item.size, self._piece_bytes):
                length = min(self._piece_bytes, item.size - start)
                view = self._store.value(item)[start : start + length]
                there = item if item.state is State.COMMITTED else None
                whole = entry_of(item.key, there, clock())
                if whole.size < 0:  # it has left meanwhile
                    yield from self._piece([whole], b"", clock, True, False)
                    return
                entry = msgspec.structs.replace(whole, start=start, piece=length)
                yield from self._piece([entry], bytes(view), clock, True, False)
        finally:
            self._store.release(item)

    def _piece(
        self,
        entries: list[Entry],
        payload: bytes,
        clock: Clock,
        throttled: bool,
        last: bool,
    ) -> Operation[None]:
        began = clock()
        session = self.session
        body = Snapshot(
            self.bucket.id, session.epoch, session.nonce, self._seq, entries, last, self._base
        )
        request = Request(self.target, Kind.SNAPSHOT, body, [payload] if payload else [])
        answers = yield Exchange((request,), began + ACK_TIMEOUT_NS)
        self._check(answers[0], entries)
        self._seq += 1
        self.sent_keys += len(entries)
        self.sent_bytes += len(payload)
        rest = began + len(payload) * SECOND_NS // self._rate - clock()
        if throttled and rest > 0:
            yield Pause(rest)

    def _check(self, answer: object, entries: Sequence[Entry]) -> None:
        if not isinstance(answer, Reply):
            raise Failed(f"{self.target} does not answer: {getattr(answer, 'reason', answer)}")
        if answer.kind != Kind.SNAPSHOT_ACK:
            raise Failed(f"{self.target} refused: {getattr(answer.body, 'message', answer.kind)}")
        ack: wire.SnapshotAck = answer.body
        if ack.status in (Status.MOVING, Status.NOT_PRIMARY) and self._seq == 0:
            raise NotYet(f"{self.target} does not know of it yet")
        if ack.status == Status.CORRUPT:
            objects = self.bucket.objects
            sent = [objects[e.key] for e in entries if e.key in objects]
            dropped = self._store.check_batch(sent)
            raise Failed(f"a value arrived corrupt; {len(dropped)} were corrupt here")
        if ack.status or ack.nonce != self.session.nonce or ack.seq != self._seq:
            raise Failed(f"{self.target} answered status {ack.status} to piece {self._seq}")
        self.dropped += ack.dropped


def entry_of(key: bytes, item: Object | None, now: int) -> Entry:
    """An object as it is sent; None or expired: that it is gone."""
    if item is None or 0 < item.expires_at <= now:
        return Entry(key, -1)
    ttl = max(1, (item.expires_at - now) // MILLISECOND_NS) if item.expires_at else 0
    flags = (
        _WRITE_ONCE * item.options.write_once
        | _SOFT * (item.pin is Pin.SOFT)
        | _HARD * (item.pin is Pin.HARD)
    )
    return Entry(key, item.size, ttl, flags, item.checksum or 0, stamp=item.stamp)


class Incoming:
    """A bucket that this node, which has opened it, is learning from its primary."""

    def __init__(
        self,
        store: Store,
        bucket: BucketId,
        source: Member,
        session: Session,
        check: bool = False,
    ) -> None:
        self.bucket = bucket
        self.source = source
        self.session = session
        self.check = check
        """Whether values are compared with their checksums as they arrive."""
        self.complete = False
        self.dropped = 0
        self._store = store
        self._next = 0
        self._large: Object | None = None
        self._filled = 0

    def take(self, body: Snapshot, frames: Sequence[wire.Buffer], now: int) -> Status:
        """Store one piece. OK (also for a repeat), CONFLICT or CORRUPT. Raises ProtocolError."""
        if body.seq < self._next:
            return Status.OK
        if body.seq > self._next or self.complete:
            return Status.CONFLICT
        sizes = [e.piece if e.piece >= 0 else max(e.size, 0) for e in body.entries]
        values = wire.packed(frames, sizes)
        if len(body.entries) == 1 and body.entries[0].piece >= 0:
            if not self._take_part(body.entries[0], values[0], now):
                return Status.CORRUPT
        elif any(e.piece >= 0 for e in body.entries):
            raise ProtocolError("a part of a value among others")
        else:
            self.give_up_large()
            if self.check and not _is_whole(body.entries, values):
                return Status.CORRUPT
            self._take_whole(body.entries, values, now)
        self._next += 1
        self.complete = body.last
        return Status.OK

    def _take_whole(self, entries: Sequence[Entry], values: Sequence[memoryview], now: int) -> None:
        bucket = self.bucket
        gone = [e.key for e in entries]
        self._store.delete_batch([bucket] * len(gone), gone, now)
        groups: dict[PutOptions, tuple[list[Entry], list[memoryview]]] = {}
        for entry, value in zip(entries, values, strict=True):
            if entry.size >= 0:
                group = groups.setdefault(options_of(entry), ([], []))
                group[0].append(entry)
                group[1].append(value)
        for options, (new, new_values) in groups.items():
            statuses = self._store.put_batch(
                [bucket] * len(new),
                [e.key for e in new],
                new_values,
                options,
                now,
                checksums=[e.checksum or None for e in new],
                stamps=[e.stamp for e in new],
            )
            self.dropped += sum(1 for s in statuses if s)

    def _take_part(self, entry: Entry, value: memoryview, now: int) -> bool:
        """False: it was the last part, and the whole is not what its checksum says."""
        if entry.start == 0:
            self.give_up_large()
            self._store.delete_batch([self.bucket], [entry.key], now)
            made = self._store.allocate_batch(
                [self.bucket], [entry.key], [entry.size], options_of(entry), now
            )[0]
            if isinstance(made, Object):
                made.stamp = entry.stamp
                self._large, self._filled = made, 0
            else:
                self.dropped += 1
        item = self._large
        if item is None or item.key != entry.key:
            return True
        if entry.start != self._filled or entry.start + len(value) > item.size:
            raise ProtocolError(f"a piece at {entry.start} of a value of {item.size} bytes")
        self._store.arena.write(item.offset + entry.start, value)
        self._filled += len(value)
        if self._filled == item.size:
            if self.check and self._store.differing([item], [entry.checksum]):
                self.give_up_large()
                return False
            self._store.commit_batch([item], now, [entry.checksum or None])
            ttl = entry.ttl_ms * MILLISECOND_NS  # as it is now, at the end of the transfer
            self._store.expire_batch([self.bucket], [entry.key], ttl, now)
            self._large = None
        return True

    def give_up_large(self) -> None:
        if self._large is not None:
            self._store.abort_batch([self._large])
            self._large = None


def _is_whole(entries: Sequence[Entry], values: Sequence[memoryview]) -> bool:
    """Whether all values that have a checksum are what it says."""
    summed = [(e, v) for e, v in zip(entries, values, strict=True) if e.checksum and e.size >= 0]
    return checksums_of([v for _, v in summed]) == [e.checksum for e, _ in summed]


def options_of(entry: Entry) -> PutOptions:
    """As ``entry_of`` has put them down."""
    return PutOptions(
        write_once=bool(entry.flags & _WRITE_ONCE),
        soft_pin=bool(entry.flags & _SOFT),
        hard_pin=bool(entry.flags & _HARD),
        ttl_ms=entry.ttl_ms,
    )
