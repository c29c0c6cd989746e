"""Writes on their way through the replicas: decided here, carried out when all copies have them.

The primary decides what a write does (a conditional put, a delete of what is not there) by the
committed objects *and* what is prepared and not committed yet, and puts an operation into the
bucket's log that needs no condition any more. So all copies do the same, whatever each of them has
evicted. The outcome is told once the operation is committed.

Where nobody else has to have a write, as with one copy, it takes effect at once, without a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.digests import MissingCopies, Notes, Slice, key_hash, stamp_of, take_note
from p2pkv.instructions import Entry
from p2pkv.objects import Object, Pin, Reason, State
from p2pkv.oversized import Oversized
from p2pkv.replicas import Committed, Replicas
from p2pkv.replicated import (
    HARD_PIN,
    LOG_ENTRIES_MAX,
    NO_ROOM,
    SOFT_PIN,
    WRITE_ONCE,
    Op,
    OpKind,
    Prepare,
    PrepareAck,
)
from p2pkv.replication import Replica
from p2pkv.sessions import Deferred, Sessions
from p2pkv.store import Store
from p2pkv.types import BucketId, Member
from p2pkv.wire import PutOptions, Status

IN_FLIGHT_MAX = LOG_ENTRIES_MAX // 2
"""A bucket with so many operations that are not committed takes no more for the moment."""
LAPSED_KEPT_NS = 2 * SECOND_NS
"""So long what has expired stays, seen by nobody, on a node that has copies: the primary may have
prolonged its time to live just before, and the word of it is on its way."""
CORRUPT_MAX = 4096
"""Objects that were corrupt here and that another copy may still give back."""
GIVEN_UP_MAX = 16384
"""Objects that this node gave up as a backup and may want back as primary."""

_PUT, _DELETE, _EVICT, _EXPIRE, _DELETE_RANGE, _PIN, _UNPIN, _COMPARE = OpKind
_OK, _MISS, _EXISTS = Status.OK, Status.MISS, Status.EXISTS
_GONE = frozenset({int(_DELETE), int(_EVICT), int(_DELETE_RANGE)})


class Outcome(Deferred):
    """The statuses of one request, some of which are known later.

    ``copies[i]`` is how many members in sync have what key i's write did; 0: nothing was done.
    """

    __slots__ = ("_build", "_left", "copies", "required", "statuses")

    def __init__(self, size: int, build: Callable[[Outcome], Any], required: int = 1) -> None:
        super().__init__()
        self.statuses = bytearray(size)
        self.copies = bytearray(size)
        self.required = required
        """A write that fewer members have is reported, though it is done."""
        self._left = 1
        self._build = build

    def expect(self) -> None:
        """One more status will come later."""
        self._left += 1

    def set(self, at: int, status: int, copies: int = 0) -> None:
        """A status that is known now."""
        if copies and copies < self.required and not status:
            status = Status.NOT_ENOUGH_REPLICAS
        self.statuses[at] = status
        self.copies[at] = min(copies, 255)

    def set_all(self, at: Sequence[int], statuses: Sequence[int]) -> None:
        """Statuses of writes that are done here, and that nobody else must have."""
        if self.required <= 1 and len(at) == len(self.statuses) and not any(statuses):
            self.copies = bytearray(b"\1") * len(at)
            return
        for i, status in zip(at, statuses, strict=True):
            self.set(i, status, 0 if status else 1)

    def arrive(self, at: int, status: int, copies: int) -> None:
        """A status that was expected. Where a key has several, the first that is not OK stays."""
        if not self.statuses[at]:
            self.set(at, status, copies)
        self.close()

    def close(self) -> None:
        """No more will be expected (or: one that was expected is there)."""
        self._left -= 1
        if not self._left:
            self.complete(self._build(self))

    @property
    def result(self) -> Any:
        """The answer if it is complete, else this, which will have it."""
        self.close()
        return self if self.response is None else self.response


Ticket = tuple[Outcome, int, int]
"""Who waits for an entry: the outcome, the position, and the status if it is committed."""


class Journal:
    """See the module. It is the ``Objects`` that the replicas change."""

    def __init__(self, store: Store, sessions: Sessions, clock: Callable[[], int]) -> None:
        self.replicas: Replicas
        """To be set before use; each needs the other."""
        self.wake: Callable[[], object] = lambda: None
        """Called when there is something to be sent to the other copies."""
        self.store = store
        self.sessions = sessions
        self._clock = clock
        self.staged: dict[tuple[int, bytes], Entry] = {}
        """By bucket and key the last operation that is not committed."""
        self._evicted: list[tuple[int, bytes]] = []
        self._as_told = False
        self.copies_dropped = 0
        """Copies for which there was no room, or that were evicted or corrupt here, as a backup."""
        self.dropped: dict[int, int] = {}
        """By bucket how many of them its primary has not been told of."""
        self.missing = MissingCopies()
        """What others lack of the buckets that are ours."""
        self.corrupt: dict[tuple[int, int], tuple[int, int]] = {}
        """By bucket and key hash the stamp and checksum of what was corrupt here, as primary."""
        self.given_up: dict[tuple[int, int], int] = {}
        """By bucket and key hash the stamp of what this node gave up, as a backup."""
        self.notes = Notes()
        self.doubt: Callable[[int], object] = lambda bucket: None
        """Called when copies of a bucket that is ours may differ."""
        self._resent: dict[tuple[int, int], Object] = {}
        """By bucket and number the objects that are written again as they are; held by tokens."""
        self._short: dict[tuple[int, int], set[Member]] = {}
        """By bucket and number who had no room for a value that is not committed."""
        self._no_room: dict[int, int] = {}
        """By bucket the last operation for which this node had no room, as a backup."""
        self.oversized = Oversized(
            lambda bucket, op, now: self.stage([bucket], [op], now)[0],
            store.abort_batch,
            store.write,
            lambda bucket: self.replicas.get(bucket),
        )
        store.on_lost = self._note_lost

    # -- what is there, as the next operation will find it

    def _existing(self, bucket: int, key: bytes, now: int) -> Object | Entry | None:
        entry = self.staged.get((bucket, key))
        if entry is not None:
            return None if entry.op.kind in _GONE else entry
        return self.store.find(bucket, key, now)

    # -- writing

    def log_of(self, bucket: int, required: int) -> Replica | Status:
        """The bucket's replica if it takes another write, else why not."""
        replica = self.replicas.by_bucket[bucket]
        if not replica.serving:
            return Status.MOVING
        required = max(required, replica.min_in_sync)
        if required > 1 and replica.copies < required:
            return Status.NOT_ENOUGH_REPLICAS
        return Status.STALLED if len(replica.log) >= IN_FLIGHT_MAX else replica

    def copies_of(self, bucket: int) -> int:
        """How many members in sync have what is committed; who lacks some of it may lack any."""
        if bucket not in self.replicas.shared:
            return 1
        replica = self.replicas.by_bucket[bucket]
        assert replica.record is not None
        lacking = set(replica.record.in_sync).intersection(self.missing.members(bucket))
        return max(1, replica.copies - len(lacking))

    def submit(
        self, bucket: int, op: Op, staged: Any, outcome: Outcome | None, at: int, status: int
    ) -> Entry:
        tickets: list[Ticket] = []
        if outcome is not None:
            outcome.expect()
            tickets.append((outcome, at, status))
        self.wake()
        entry = self.replicas.submit(bucket, op, staged, tickets)
        self.staged[bucket, op.key] = entry
        return entry

    def _wait_for(self, entry: Entry, outcome: Outcome, at: int, status: int) -> None:
        """What was decided by an operation that is not committed is told when it is."""
        outcome.expect()
        entry.ticket.append((outcome, at, status))

    def put(self, items: Sequence[Object], at: Sequence[int], outcome: Outcome, now: int) -> None:
        """Make allocated objects, whose bytes are there, visible; or take them back."""
        shared = self.replicas.shared
        if not shared or shared.isdisjoint([item.bucket for item in items]):
            outcome.set_all(at, self.store.commit_batch(items, now))
            return
        alone = [i for i, item in enumerate(items) if item.bucket not in shared]
        if alone:
            done = self.store.commit_batch([items[i] for i in alone], now)
            outcome.set_all([at[i] for i in alone], done)
        for i, item in zip(at, items, strict=True):
            if item.bucket in shared:
                self._put(item, outcome, i, now)

    def _put(self, item: Object, outcome: Outcome, at: int, now: int) -> None:
        options = item.options
        replica = self.log_of(item.bucket, max(1, options.min_replicas))
        if item.state is not State.ALLOCATED:
            outcome.set(at, Status.CONFLICT)
            return
        if not isinstance(replica, Replica):
            self.store.abort_batch([item])
            outcome.set(at, replica)
            return
        there = self._existing(item.bucket, item.key, now)
        if there is not None and (options.if_absent or _is_write_once(there)):
            self.store.abort_batch([item])
            status = _EXISTS if options.if_absent else _OK
            if isinstance(there, Entry):
                self._wait_for(there, outcome, at, status)
            else:
                outcome.set(at, status, 0 if status else self.copies_of(item.bucket))
            return
        self.submit(item.bucket, _put_op(item), item, outcome, at, _OK)

    def delete(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        at: Sequence[int],
        outcome: Outcome,
        now: int,
    ) -> None:
        def delete(bucket: int, key: bytes, i: int) -> None:
            there = self._existing(bucket, key, now) is not None
            # Also of what is not here: another copy may have kept what this one has evicted.
            self.submit(bucket, Op(_DELETE, key), None, outcome, i, _OK if there else _MISS)

        self._each(
            buckets, keys, at, outcome, delete, lambda b, k: self.store.delete_batch(b, k, now)
        )

    def expire(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        ttl_ms: int,
        at: Sequence[int],
        outcome: Outcome,
        now: int,
    ) -> None:
        def expire(bucket: int, key: bytes, i: int) -> None:
            there = self._existing(bucket, key, now)
            if there is None:
                self._told_later(bucket, key, outcome, i, _MISS)
            else:  # its mark is what the next write has to know of the key
                flags = WRITE_ONCE * _is_write_once(there)
                op = Op(_EXPIRE, key, ttl_ms=ttl_ms, flags=flags)
                self.submit(bucket, op, None, outcome, i, _OK)

        ttl_ns = ttl_ms * MILLISECOND_NS
        self._each(
            buckets, keys, at, outcome, expire,
            lambda b, k: self.store.expire_batch(b, k, ttl_ns, now),
        )  # fmt: skip

    def _told_later(self, bucket: int, key: bytes, outcome: Outcome, at: int, status: int) -> None:
        """An outcome that rests on what may not be committed yet."""
        entry = self.staged.get((bucket, key))
        if entry is None:
            outcome.set(at, status)
        else:
            self._wait_for(entry, outcome, at, status)

    def _each(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        at: Sequence[int],
        outcome: Outcome,
        log: Callable[[int, bytes, int], None],
        act: Callable[[Sequence[int], Sequence[bytes]], Sequence[int]],
    ) -> None:
        """``log`` for what others have to do too, ``act`` at once for the rest."""
        shared = self.replicas.shared
        alone: list[int] = []
        for i, (bucket, key) in enumerate(zip(buckets, keys, strict=True)):
            if bucket not in shared:
                alone.append(i)
                continue
            replica = self.log_of(bucket, 1)
            if isinstance(replica, Replica):
                log(bucket, key, at[i])
            else:
                outcome.set(at[i], replica)
        done = act([buckets[i] for i in alone], [keys[i] for i in alone]) if alone else ()
        for i, status in zip(alone, done, strict=True):
            outcome.set(at[i], status, 0 if status else 1)

    def delete_range(
        self, bucket: int, prefix: bytes, limit: int, outcome: Outcome, now: int
    ) -> tuple[int, bool, Status]:
        """Deletes up to ``limit`` keys that start with ``prefix``, in order.

        Answers how many, whether there are more, and whether the bucket may be written.
        """
        if bucket not in self.replicas.shared:
            return *self.store.delete_range(bucket, prefix, limit, now), _OK
        replica = self.log_of(bucket, 1)
        if not isinstance(replica, Replica):
            return 0, False, replica
        keys = self._keys_with(replica, prefix, now)
        chosen, more = keys[:limit], len(keys) > limit
        last = chosen[-1] if more else b""
        op = Op(_DELETE_RANGE, prefix, extra=last)
        entry = self.submit(bucket, op, None, outcome, 0, _OK)
        self.staged.update(((bucket, key), entry) for key in chosen)
        return len(chosen), more, _OK

    def _keys_with(self, replica: Replica, prefix: bytes, now: int) -> list[bytes]:
        """Keys in order, as the next operation will find them."""
        bucket = replica.bucket
        opened = self.store.buckets[bucket]
        start, end = opened.keys_with(prefix)
        keys = set(opened.order[start:end])
        keys.update(e.op.key for e in replica.log.values() if e.op.kind == _PUT)
        return sorted(
            k for k in keys if k.startswith(prefix) and self._existing(bucket, k, now) is not None
        )

    def pin(
        self, owner: bytes, bucket: int, key: bytes, ttl_ms: int, outcome: Outcome, at: int
    ) -> None:
        """Tell the copies of a pin that was made here; ``ttl_ms`` 0: that was undone."""
        if bucket not in self.replicas.shared:
            return
        if isinstance(self.log_of(bucket, 1), Replica):
            kind = _PIN if ttl_ms else _UNPIN
            op = Op(kind, key, ttl_ms=ttl_ms, extra=owner)
            outcome.expect()
            self.replicas.submit(bucket, op, _DONE, [(outcome, at, _OK)])
            self.wake()

    # -- evictions, and what is corrupt

    def _evict_as_told(self, buckets: Sequence[int], keys: Sequence[bytes]) -> None:
        """Give up what the primary has given up: no copy is missing by that."""
        self._as_told = True
        try:
            self.store.evict_batch(buckets, keys)
        finally:
            self._as_told = False

    def _note_lost(self, items: Iterable[Object], reason: Reason) -> None:
        if self._as_told:
            return
        replicas = self.replicas
        for item in items:
            if item.bucket not in replicas.shared:
                if item.bucket not in replicas.served:
                    self._note_dropped(item.bucket)
                    self._note_given_up(item.bucket, item.key, item.stamp)
            elif reason is Reason.CORRUPT:
                self._note_corrupt(item)
            else:
                self._evicted.append((item.bucket, item.key))

    def _note_dropped(self, bucket: int) -> None:
        self.copies_dropped += 1
        self.dropped[bucket] = self.dropped.get(bucket, 0) + 1

    def _note_given_up(self, bucket: int, key: bytes, stamp: int) -> None:
        if len(self.given_up) >= GIVEN_UP_MAX:
            del self.given_up[next(iter(self.given_up))]
        self.given_up[bucket, key_hash(key)] = stamp

    def _note_corrupt(self, item: Object) -> None:
        """The others have it still, and should have kept it; see ``comparing``."""
        if len(self.corrupt) >= CORRUPT_MAX:
            del self.corrupt[next(iter(self.corrupt))]
        self.corrupt[item.bucket, key_hash(item.key)] = item.stamp, item.checksum or 0
        self.doubt(item.bucket)

    def tell_evictions(self) -> None:
        """What the primary gave up, the copies need not keep. Nobody waits for it."""
        evicted, self._evicted = self._evicted, []
        for bucket, key in evicted:
            if bucket not in self.replicas.shared:
                continue
            if not self.replicas.by_bucket[bucket].writable:
                self._evicted.append((bucket, key))
            elif key not in self.store.index[bucket] and not self._comes(bucket, key):
                self.submit(bucket, Op(_EVICT, key), None, None, 0, _OK)

    def _comes(self, bucket: int, key: bytes) -> bool:
        """Whether something is under way of the key, other than what was here being sent again."""
        entry = self.staged.get((bucket, key))
        return entry is not None and (bucket, entry.seq) not in self._resent

    # -- comparing and mending copies

    def compare(self, bucket: int, part: Slice | None, outcome: Outcome) -> None:
        """Let each copy note what it holds at this point of the log (``notes``)."""
        replica = self.log_of(bucket, 1)
        if not isinstance(replica, Replica):
            outcome.set(0, replica)
            return
        outcome.expect()
        op = Op(int(_COMPARE), b"", extra=part.encode() if part else b"")
        self.replicas.submit(bucket, op, None, [(outcome, 0, _OK)])
        self.wake()

    def _take_note(self, bucket: int, entry: Entry) -> None:
        opened = self.store.buckets.get(bucket)
        if opened is not None:
            ahead = [k for b, k in self._evicted if b == bucket]
            ahead += [k for (b, k), e in self.staged.items() if b == bucket and e.seq > entry.seq]
            position = stamp_of(entry.origin, entry.seq)
            part = Slice.decode(entry.op.extra)
            self.notes.add(bucket, take_note(opened, position, part, ahead))

    def settled(self, bucket: int, key: bytes) -> Replica | None:
        """The bucket's replica, if nothing is under way of this key and the bucket is writable."""
        replica = self.log_of(bucket, 1) if bucket in self.replicas.shared else None
        if not isinstance(replica, Replica) or (bucket, key) in self.staged:
            return None
        return replica

    def resend(self, item: Object, now: int) -> bool:
        """Write a committed object again as it is, for those who lack it. False: not now."""
        if self.settled(item.bucket, item.key) is None or item.state is not State.COMMITTED:
            return False
        ttl_ns = item.expires_at - now
        op = _put_op(item)
        if item.expires_at:
            if ttl_ns <= 0:
                return False
            op = msgspec.structs.replace(op, ttl_ms=-(-ttl_ns // MILLISECOND_NS))
        self.store.acquire(item)
        entry = self.submit(item.bucket, op, item, None, 0, _OK)
        self._resent[item.bucket, entry.seq] = item
        return True

    def restore(self, item: Object) -> bool:
        """Put back what this node lacks: an allocated object, with its bytes. False: not now, and
        it is taken back."""
        replica = self.settled(item.bucket, item.key)
        if replica is None or item.key in self.store.index[item.bucket]:
            self.store.abort_batch([item])
            return False
        self.submit(item.bucket, _put_op(item), item, None, 0, _OK)
        return True

    def give_up(self, bucket: int, key: bytes) -> bool:
        """Let the copies give up what is not here. False: not now."""
        if self.settled(bucket, key) is None or key in self.store.index[bucket]:
            return False
        self.submit(bucket, Op(int(_EVICT), key), None, None, 0, _OK)
        return True

    def _take_resent(self, bucket: int, entry: Entry) -> Object | None:
        item = self._resent.pop((bucket, entry.seq), None)
        if item is not None:
            self.store.release(item)
        return item

    # -- Objects: what the replicas want done

    def apply(self, committed: Sequence[Committed], now: int) -> None:
        puts: list[Object] = []
        for bucket, entries, _ in committed:
            before = len(puts)
            for entry in entries:
                if entry.op.kind == _PUT:
                    stamp = stamp_of(entry.origin, entry.seq)
                    resent = self._take_resent(bucket, entry) if self._resent else None
                    if resent is not None:
                        self.store.restamp(resent, stamp)
                    else:
                        entry.staged.stamp = stamp
                        puts.append(entry.staged)
                else:
                    if len(puts) > before:  # what came before it in its bucket must be there
                        self._commit(puts, now)
                        puts, before = [], 0
                    self._apply_other(bucket, entry, now)
        self._commit(puts, now)
        for bucket, entries, copies in committed:
            # What was under way when a copy was lost is committed in the end by who is left.
            short = 0 < copies < self.replicas.by_bucket[bucket].min_in_sync
            for entry in entries:
                self._unstage(bucket, entry)
                real = self._real_copies(bucket, entry, copies) if self._short else copies
                for outcome, at, status in entry.ticket or ():
                    told = Status.NOT_ENOUGH_REPLICAS if short and not status else status
                    outcome.arrive(at, told, real)

    def _real_copies(self, bucket: BucketId, entry: Entry, copies: int) -> int:
        """How many of the copies there are, as some members may have had no room."""
        short = self._short.pop((bucket, entry.seq), set())
        record = self.replicas.by_bucket[bucket].record
        return copies - len(short.intersection(record.in_sync if record else ()))

    def _commit(self, items: list[Object], now: int) -> None:
        if items:
            self.store.commit_batch(items, now, decided=True)

    def _apply_other(self, bucket: BucketId, entry: Entry, now: int) -> None:
        op, store = entry.op, self.store
        if op.kind == _DELETE:
            store.delete_batch([bucket], [op.key], now)
        elif op.kind == _EVICT:
            self._evict_as_told([bucket], [op.key])
            if op.flags & NO_ROOM:
                self._note_given_up(bucket, op.key, stamp_of(entry.origin, entry.seq))
        elif op.kind == _EXPIRE:
            self._apply_expiry(bucket, op, now)
        elif op.kind == _DELETE_RANGE:
            store.delete_until(bucket, op.key, op.extra, now)
        elif op.kind == _COMPARE:
            self._take_note(bucket, entry)
        elif entry.staged is not _DONE:
            self._apply_pin(bucket, op, now)

    def _apply_expiry(self, bucket: int, op: Op, now: int) -> None:
        """A copy hears of it later than it was decided, maybe when the old time is over."""
        ttl_ns = op.ttl_ms * MILLISECOND_NS
        late = 0 if bucket in self.replicas.served else LAPSED_KEPT_NS
        self.store.expire_batch([bucket], [op.key], ttl_ns + late if ttl_ns else 0, now - late)

    def reap(self, now: int) -> None:
        """Take away what has expired, later on a node that has copies of others' buckets; and what
        was staged in vain."""
        self.oversized.reap(now)
        copies = len(self.store.buckets) > len(self.replicas.served)
        self.store.reap(now - LAPSED_KEPT_NS if copies else now)

    def _apply_pin(self, bucket: BucketId, op: Op, now: int) -> None:
        item = self.store.find(bucket, op.key, now)
        if item is None:
            return
        if op.kind == _PIN:
            self.sessions.pins.pin(op.extra, item, now + op.ttl_ms * MILLISECOND_NS)
        else:
            self.sessions.pins.unpin(op.extra, op.key)
            self.store.set_pin(item, Pin.NONE)

    def _unstage(self, bucket: int, entry: Entry) -> None:
        staged = self.staged
        if staged.get((bucket, entry.op.key)) is entry:
            del staged[bucket, entry.op.key]
        if entry.op.kind == _DELETE_RANGE and entry.ticket is not None:
            for place in [p for p, e in staged.items() if e is entry]:
                del staged[place]

    def discard(self, bucket: BucketId, entry: Entry) -> None:
        self.abandon(bucket, entry)
        self._short.pop((bucket, entry.seq), None)
        if self._take_resent(bucket, entry) is None and isinstance(entry.staged, Object):
            self.store.abort_batch([entry.staged])

    def abandon(self, bucket: BucketId, entry: Entry) -> None:
        self._unstage(bucket, entry)
        waiting, entry.ticket = entry.ticket or (), None
        for outcome, at, _ in waiting:
            outcome.arrive(at, Status.INDETERMINATE, 0)

    def open(self, bucket: BucketId) -> None:
        if bucket in self.store.buckets:
            self.store.drop_bucket(bucket)
        self.store.open_bucket(bucket)

    def drop(self, bucket: BucketId, lost: bool) -> None:
        if bucket in self.store.buckets:
            self.store.drop_bucket(bucket)

    def hide(self, bucket: BucketId) -> None:
        self.store.hide_bucket(bucket)

    # -- staging what a primary sends

    def stage(self, buckets: Sequence[int], ops: Sequence[Op], now: int) -> list[Object | None]:
        """Room for the value of each PUT among ``ops``; None where there is none.

        What the primary has given up makes room first, though that is not committed yet: a backup
        may give up anything, and would give up something else instead.
        """
        gone = [i for i, op in enumerate(ops) if op.kind == _EVICT]
        held = [i for i in gone if buckets[i] in self.store.buckets] if gone else []
        if held:
            self._evict_as_told([buckets[i] for i in held], [ops[i].key for i in held])
        staged: list[Object | None] = [None] * len(ops)
        puts = [i for i, op in enumerate(ops) if op.kind == _PUT]
        for (flags, ttl_ms), group in groupby(puts, key=lambda i: (ops[i].flags, ops[i].ttl_ms)):
            at = list(group)
            made = self.store.allocate_batch(
                [buckets[i] for i in at],
                [ops[i].key for i in at],
                [ops[i].size for i in at],
                _options(flags, ttl_ms),
                now,
                decided=True,
            )
            for i, item in zip(at, made, strict=True):
                if isinstance(item, Object):
                    item.checksum = ops[i].checksum or None
                    staged[i] = item
        return staged

    def give_up_unstaged(
        self, prepares: Sequence[Prepare], staged: Sequence[Sequence[Object | None]]
    ) -> None:
        """Where there was no room for a value, this node goes on without that key."""
        for prepare, values in zip(prepares, staged, strict=True):
            for i, (op, item) in enumerate(zip(prepare.ops, values, strict=True)):
                if op.kind == _PUT and item is None:
                    prepare.ops[i] = Op(int(_EVICT), op.key, flags=NO_ROOM)
                    self._no_room[prepare.bucket] = prepare.first + i
                    self._note_dropped(prepare.bucket)

    def tell_no_room(self, acks: list[PrepareAck]) -> list[PrepareAck]:
        """Acknowledgements that say of which operations there is no copy here."""
        return [self._with_dropped(ack) if ack.bucket in self._no_room else ack for ack in acks]

    def _with_dropped(self, ack: PrepareAck) -> PrepareAck:
        replica = self.replicas.by_bucket[ack.bucket]
        if self._no_room[ack.bucket] <= replica.applied:
            del self._no_room[ack.bucket]
            return ack
        dropped = [seq for seq, entry in replica.log.items() if entry.op.flags & NO_ROOM]
        return msgspec.structs.replace(ack, dropped=dropped)

    def take_no_room(self, sender: Member, acks: Sequence[PrepareAck]) -> None:
        """Note who has no copy, before the acknowledgements count."""
        for ack in acks:
            for seq in ack.dropped:
                replica = self.replicas.get(ack.bucket)
                if replica is not None and ack.epoch == replica.tenure and seq in replica.log:
                    self._short.setdefault((ack.bucket, seq), set()).add(sender)


_DONE: Any = object()
"""Stands for what an operation does on the node that decided it, where it is done already."""


def _is_write_once(there: Object | Entry) -> bool:
    if isinstance(there, Object):
        return there.options.write_once
    return bool(there.op.flags & WRITE_ONCE)


def _put_op(item: Object) -> Op:
    options = item.options
    flags = (
        WRITE_ONCE * options.write_once
        | SOFT_PIN * (item.pin is Pin.SOFT)
        | HARD_PIN * (item.pin is Pin.HARD)
    )
    return Op(int(_PUT), item.key, item.size, options.ttl_ms, flags, item.checksum or 0)


def _options(flags: int, ttl_ms: int) -> PutOptions:
    return PutOptions(
        write_once=bool(flags & WRITE_ONCE),
        soft_pin=bool(flags & SOFT_PIN),
        hard_pin=bool(flags & HARD_PIN),
        ttl_ms=ttl_ms,
    )
