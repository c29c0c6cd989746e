"""Moving a bucket from its owner to the next one, while it is being used. Pure.

The owner sends all objects, then those that changed meanwhile, until little is left; then it stops
serving the bucket (requests are told to ask again in a moment), sends the rest, and changes the
bucket's record in etcd. Only after that record is written does the new owner serve; only before
it is proposed does the old one. If anything fails before the proposal, the old owner goes on.

    owner                                   next owner
      | SNAPSHOT(nonce, seq 0..)  ------------> |  learner: stores, serves nothing
      | <------------------------ SNAPSHOT_ACK  |
      |  (stops serving)                        |
      | SNAPSHOT(last) -----------------------> |
      | <------------------------ SNAPSHOT_ACK  |
      |  etcd: epoch + 1, primary = next owner  |
      |  (drops its copy)                       |  sees the record: serves

``nonce`` names one attempt and rises with each of an owner. A learner that sees a higher one starts
over, and takes no piece of an older one any more; within one, pieces come in the order of ``seq``,
each exactly once (a repeat is acknowledged again, a gap ends the attempt).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from p2pkv import wire
from p2pkv.clock import MILLISECOND_NS, SECOND_NS, Clock
from p2pkv.errors import ProtocolError
from p2pkv.objects import Bucket, Object, Pin, State
from p2pkv.records import BucketChange, BucketRecord, Versioned
from p2pkv.routing import Effect, Exchange, Operation, Pause, Reply, Request
from p2pkv.types import BucketId, Epoch, Member
from p2pkv.wire import Entry, Kind, PutOptions, Snapshot, Status

if TYPE_CHECKING:
    from p2pkv.store import Store

PIECE_BYTES = 2 << 20
PIECE_KEYS = 4096
PASSES_MAX = 8
"""Rounds over what changed meanwhile, before the bucket is stopped whatever is left."""
REST_BYTES = 4 << 20
"""So little is left that sending it while the bucket is stopped is not felt."""
ACK_TIMEOUT_NS = 5 * SECOND_NS

_WRITE_ONCE, _SOFT, _HARD = 1, 2, 4


class Failed(Exception):
    """The attempt ended; the owner goes on serving."""


class NotYet(Failed):
    """The next owner has not seen yet that it is to be that; it will in a moment."""


class Stop(msgspec.Struct, frozen=True):
    """Effect: stop serving the bucket, or serve it again."""

    stopped: bool


class Propose(msgspec.Struct, frozen=True):
    """Effect: change the record. Answer: whether it is now ours; waits until that is definite."""

    change: BucketChange


def change_of(bucket: BucketId, current: Versioned, target: Member) -> BucketChange:
    """The record that makes ``target`` the owner."""
    old = current.record
    record = BucketRecord(
        epoch=Epoch(old.epoch + 1),
        generation=old.generation,
        primary=target,
        in_sync=(target,),
        assigned=old.assigned,
    )
    return BucketChange(bucket, current.mod_revision, record)


class Outgoing:
    """One attempt to hand a bucket over; ``run`` is the generator that does it."""

    def __init__(
        self,
        store: Store,
        bucket: Bucket,
        current: Versioned,
        target: Member,
        nonce: int,
        bytes_per_s: int,
        piece_bytes: int = PIECE_BYTES,
        piece_keys: int = PIECE_KEYS,
    ) -> None:
        self.bucket = bucket
        self.target = target
        self.current = current
        self.total = len(bucket.objects)
        self.sent_keys = 0
        self.sent_bytes = 0
        self.dropped = 0
        self._store = store
        self._nonce = nonce
        self._rate = bytes_per_s
        self._piece_bytes = piece_bytes
        self._piece_keys = piece_keys
        self._seq = 0
        self._dirty: dict[bytes, None] = {}

    def run(self, clock: Clock) -> Generator[Effect | Stop | Propose, Any, bool]:
        """Move it. True: it is handed over. Raises Failed when the owner is to go on."""
        bucket = self.bucket
        bucket.dirty = self._dirty = dict.fromkeys(bucket.objects)
        try:
            passes = 0
            while self._left_bytes() > REST_BYTES and passes < PASSES_MAX:
                yield from self._send(clock, list(self._dirty), throttled=True)
                passes += 1
            yield Stop(True)
            try:
                yield from self._send(clock, list(self._dirty), throttled=False, last=True)
            except Failed:
                yield Stop(False)
                raise
            change = change_of(bucket.id, self.current, self.target)
            moved: bool = yield Propose(change)
            return moved
        finally:
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
            entries.append(_entry(key, item, now))
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
                whole = _entry(item.key, there, clock())
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
        body = Snapshot(
            self.bucket.id, self.current.record.epoch, self._nonce, self._seq, entries, last
        )
        request = Request(self.target, Kind.SNAPSHOT, body, [payload] if payload else [])
        answers = yield Exchange((request,), began + ACK_TIMEOUT_NS)
        self._check(answers[0])
        self._seq += 1
        self.sent_keys += len(entries)
        self.sent_bytes += len(payload)
        rest = began + len(payload) * SECOND_NS // self._rate - clock()
        if throttled and rest > 0:
            yield Pause(rest)

    def _check(self, answer: object) -> None:
        if not isinstance(answer, Reply):
            raise Failed(f"{self.target} does not answer: {getattr(answer, 'reason', answer)}")
        if answer.kind != Kind.SNAPSHOT_ACK:
            raise Failed(f"{self.target} refused: {getattr(answer.body, 'message', answer.kind)}")
        ack: wire.SnapshotAck = answer.body
        if ack.status in (Status.MOVING, Status.NOT_PRIMARY) and self._seq == 0:
            raise NotYet(f"{self.target} does not know of it yet")
        if ack.status or ack.nonce != self._nonce or ack.seq != self._seq:
            raise Failed(f"{self.target} answered status {ack.status} to piece {self._seq}")
        self.dropped += ack.dropped


def _entry(key: bytes, item: Object | None, now: int) -> Entry:
    if item is None or 0 < item.expires_at <= now:
        return Entry(key, -1)
    ttl = max(1, (item.expires_at - now) // MILLISECOND_NS) if item.expires_at else 0
    flags = (
        _WRITE_ONCE * item.options.write_once
        | _SOFT * (item.pin is Pin.SOFT)
        | _HARD * (item.pin is Pin.HARD)
    )
    return Entry(key, item.size, ttl, flags, item.checksum or 0)


class Incoming:
    """A bucket that this node is learning from its owner."""

    def __init__(
        self, store: Store, bucket: BucketId, source: Member, nonce: int, record: BucketRecord
    ) -> None:
        self.bucket = bucket
        self.source = source
        self.record = record
        """Of its owner, as this attempt began."""
        self.nonce = nonce
        self.complete = False
        self.dropped = 0
        self._store = store
        self._next = 0
        self._large: Object | None = None
        self._filled = 0
        if bucket in store.buckets:
            store.drop_bucket(bucket)
        store.open_bucket(bucket)

    def take(self, body: Snapshot, frames: Sequence[wire.Buffer], now: int) -> Status:
        """Store one piece. OK (also for a repeat) or CONFLICT. Raises ProtocolError."""
        if body.seq < self._next:
            return Status.OK
        if body.seq > self._next or self.complete:
            return Status.CONFLICT
        sizes = [e.piece if e.piece >= 0 else max(e.size, 0) for e in body.entries]
        values = wire.packed(frames, sizes)
        if len(body.entries) == 1 and body.entries[0].piece >= 0:
            self._take_part(body.entries[0], values[0], now)
        elif any(e.piece >= 0 for e in body.entries):
            raise ProtocolError("a part of a value among others")
        else:
            self.give_up_large()
            self._take_whole(body.entries, values, now)
        self._next += 1
        self.complete = body.last
        return Status.OK

    def _take_whole(self, entries: Sequence[Entry], values: Sequence[memoryview], now: int) -> None:
        bucket = self.bucket
        gone = [e.key for e in entries]
        self._store.delete_batch([bucket] * len(gone), gone, now)
        groups: dict[PutOptions, tuple[list[bytes], list[memoryview], list[int | None]]] = {}
        for entry, value in zip(entries, values, strict=True):
            if entry.size >= 0:
                group = groups.setdefault(_options(entry), ([], [], []))
                group[0].append(entry.key)
                group[1].append(value)
                group[2].append(entry.checksum or None)
        for options, (keys, group_values, checksums) in groups.items():
            statuses = self._store.put_batch(
                [bucket] * len(keys), keys, group_values, options, now, checksums=checksums
            )
            self.dropped += sum(1 for s in statuses if s)

    def _take_part(self, entry: Entry, value: memoryview, now: int) -> None:
        if entry.start == 0:
            self.give_up_large()
            self._store.delete_batch([self.bucket], [entry.key], now)
            made = self._store.allocate_batch(
                [self.bucket], [entry.key], [entry.size], _options(entry), now
            )[0]
            if isinstance(made, Object):
                self._large, self._filled = made, 0
            else:
                self.dropped += 1
        item = self._large
        if item is None or item.key != entry.key:
            return
        if entry.start != self._filled or entry.start + len(value) > item.size:
            raise ProtocolError(f"a piece at {entry.start} of a value of {item.size} bytes")
        self._store.arena.write(item.offset + entry.start, value)
        self._filled += len(value)
        if self._filled == item.size:
            self._store.commit_batch([item], now, [entry.checksum or None])
            ttl = entry.ttl_ms * MILLISECOND_NS  # as it is now, at the end of the transfer
            self._store.expire_batch([self.bucket], [entry.key], ttl, now)
            self._large = None

    def leads_to(self, record: BucketRecord) -> bool:
        """Whether what was learned is all that the bucket had when ``record`` was written.

        It is not, if the bucket was started anew meanwhile.
        """
        old = self.record
        return self.complete and (record.epoch, record.generation) == (
            old.epoch + 1,
            old.generation,
        )

    def give_up_large(self) -> None:
        if self._large is not None:
            self._store.abort_batch([self._large])
            self._large = None


def _options(entry: Entry) -> PutOptions:
    return PutOptions(
        write_once=bool(entry.flags & _WRITE_ONCE),
        soft_pin=bool(entry.flags & _SOFT),
        hard_pin=bool(entry.flags & _HARD),
        ttl_ms=entry.ttl_ms,
    )
