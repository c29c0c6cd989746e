"""The committed objects of a node: index, eviction queue, expiry, pins.

All that changes when an object comes or goes changes here, together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Final

from p2pkv._native.index import Writer
from p2pkv.arena import Arena
from p2pkv.digests import mark
from p2pkv.errors import ConfigError
from p2pkv.eviction import LRU, EvictionPolicy
from p2pkv.expiry import ExpiryHeap
from p2pkv.extents import Extents
from p2pkv.objects import (
    METADATA_BYTES,
    Bucket,
    Counters,
    Object,
    Pin,
    Reason,
    State,
    write_header,
)
from p2pkv.wire import Status

MILLISECOND_NS: Final = 1_000_000
EXPIRE_STEP: Final = 256
"""Expired objects that a put without room looks for before it evicts."""

# Members of enumerations are looked up through a descriptor, which hot loops would feel.
_COMMITTED = State.COMMITTED
_SOFT, _HARD = Pin.SOFT, Pin.HARD
_EVICTED, _EXPIRED, _CORRUPT = Reason.EVICTED, Reason.EXPIRED, Reason.CORRUPT
_OK, _MISS = Status.OK, Status.MISS


class Index(dict[int, dict[bytes, Object]]):
    """Objects by bucket and key; a bucket that is not open has none."""

    _EMPTY: Final[dict[bytes, Object]] = {}

    def __missing__(self, bucket: int) -> dict[bytes, Object]:
        return self._EMPTY


class Catalog:
    """Objects in an arena; the base of Store, which says what the arguments are."""

    def __init__(
        self,
        arena: Arena,
        *,
        metadata_limit_bytes: int,
        hard_pin_quota: float,
        policy: EvictionPolicy[Object] | None,
        published: Writer | None = None,
    ) -> None:
        if not 0 <= hard_pin_quota <= 1:
            raise ConfigError(f"hard_pin_quota = {hard_pin_quota}: must be from 0 to 1")
        self.arena = arena
        self.published = published
        self.extents = Extents(arena, published)
        self.buckets: dict[int, Bucket] = {}
        self.index = Index()
        self.policy: EvictionPolicy[Object] = LRU(self._was_read) if policy is None else policy
        self.expiry: ExpiryHeap[Object] = ExpiryHeap()
        self.counters = Counters()
        self.metadata_limit_bytes = metadata_limit_bytes
        self.hard_pin_quota_bytes = int(hard_pin_quota * self.extents.allocator.size)
        self.evictable_bytes = 0
        self.hard_pinned = 0
        self.hard_pinned_bytes = 0
        self.on_lost: Callable[[Collection[Object], Reason], object] | None = None
        """Told of objects that nobody wanted to go: evicted, or corrupt."""
        self._version = 0

    # -- coming and going

    def _show(self, bucket: Bucket, item: Object, now: int) -> None:
        """Commits an allocated object. One of the same key must have left the figures before."""
        self._version = item.version = self._version + 1
        item.state = _COMMITTED
        if not item.stamp:  # nobody else has to know it by its place in a log
            item.stamp = item.version
        write_header(self.arena.view, item)
        bucket.objects[item.key] = item
        bucket.value_bytes += item.size
        if bucket.dirty is not None:
            bucket.dirty[item.key] = None
        if item.pin is not _HARD:
            self.policy.add(item, item.pin is _SOFT)
            self.evictable_bytes += item.extent_bytes
        if item.options.ttl_ms:
            self.expiry.set(item, now + item.options.ttl_ms * MILLISECOND_NS)
        else:
            bucket.digest += mark(item.key, item.stamp)

    def _show_plain(self, items: Sequence[Object], before: Sequence[Object | None]) -> None:
        """As ``_show`` for objects without options, and ``_leave`` for those in their places."""
        buckets, version, view = self.buckets, self._version, self.arena.view
        for item, there in zip(items, before, strict=True):
            bucket, key = buckets[item.bucket], item.key
            version += 1
            item.version = version
            item.state = _COMMITTED
            if not item.stamp:
                item.stamp = version
            bucket.digest += mark(key, item.stamp)
            write_header(view, item)
            bucket.objects[key] = item
            if there is None:
                bucket.sorted_keys = None
                bucket.value_bytes += item.size
            else:
                bucket.value_bytes += item.size - there.size
                bucket.digest -= mark(key, there.stamp)
            if bucket.dirty is not None:
                bucket.dirty[key] = None
        self._version = version

    def _remove(self, items: Collection[Object], reason: Reason) -> int:
        """Takes objects out of the store; answers the largest free extent that came of it."""
        for item in items:
            self._detach(item)
        return self._bury(items, reason)

    def _bury(self, items: Collection[Object], reason: Reason) -> int:
        """Counts objects that left, and gives their extents back. No reader finds them any more."""
        if self.published is not None and items:
            self.published.withdraw(items)
        self.counters.lost[reason] += len(items)
        if (reason is _EVICTED or reason is _CORRUPT) and self.on_lost is not None:
            self.on_lost(items, reason)
        self.counters.lost_bytes[reason] += sum([item.size for item in items])
        return self.extents.give_back(items)

    def _was_read(self, item: Object) -> bool:
        """Whether somebody read it by the published index since this was asked last."""
        return item.slot >= 0 and self.published is not None and self.published.take_use(item.slot)

    def _detach(self, item: Object) -> None:
        bucket = self.buckets[item.bucket]
        del bucket.objects[item.key]
        bucket.sorted_keys = None
        self._leave(bucket, item)

    def _leave(self, bucket: Bucket, item: Object) -> None:
        """What an object's leaving changes, but for the index; to be followed by ``_bury``."""
        bucket.value_bytes -= item.size
        if bucket.dirty is not None:
            bucket.dirty[item.key] = None
        if item.pins or item.pin is _HARD:
            self._unharden(item)
        else:
            self.policy.remove(item)
            self.evictable_bytes -= item.extent_bytes
        if item.expires_at:
            self.expiry.set(item, 0)
        else:
            bucket.digest -= mark(item.key, item.stamp)

    def _set_expiry(self, item: Object, expires_at: int) -> None:
        """When a committed object expires; 0: never. What expires is in no digest."""
        bucket = self.buckets[item.bucket]
        bucket.digest -= 0 if item.expires_at else mark(item.key, item.stamp)
        self.expiry.set(item, expires_at)
        bucket.digest += 0 if item.expires_at else mark(item.key, item.stamp)
        self._note_change(item)

    def restamp(self, item: Object, stamp: int) -> None:
        """A committed object was written again as it is; one that has left is left alone."""
        if item.state is _COMMITTED:
            if not item.expires_at:
                self.buckets[item.bucket].digest += mark(item.key, stamp) - mark(
                    item.key, item.stamp
                )
            item.stamp = stamp
            self._note_change(item)

    def expire_due(self, now: int, limit: int) -> int:
        """Removes expired objects, looking at no more than ``limit``; answers how many."""
        expired: list[Object] = []
        for item in self.expiry.due(now, limit):
            self._detach(item)
            expired.append(item)
        self._bury(expired, _EXPIRED)
        return len(expired)

    # -- pins

    def pin(self, item: Object) -> Status:
        """One more pin of a session: hard-pinned until all are gone. OK, MISS or QUOTA."""
        return self._repin(item, item.pin, item.pins + 1)

    def unpin(self, item: Object) -> Status:
        """One pin less. OK, or MISS if the object left, whose pins left with it.

        Raises ValueError if it has none.
        """
        if item.state is _COMMITTED and not item.pins:
            raise ValueError(f"no pin is held on {item!r}")
        return self._repin(item, item.pin, item.pins - 1)

    def set_pin(self, item: Object, pin: Pin) -> Status:
        """Changes the object's own pin. OK, MISS or QUOTA."""
        return self._repin(item, pin, item.pins)

    def _repin(self, item: Object, pin: Pin, pins: int) -> Status:
        if item.state is not _COMMITTED:
            return _MISS
        was, will = item.hard_pinned, pins > 0 or pin is _HARD
        change = (will - was) * item.extent_bytes
        if change > self.hard_pin_quota_bytes - self.hard_pinned_bytes:
            self.counters.refused_quota += 1
            return Status.QUOTA
        if not was:
            self.policy.remove(item)
        item.pin, item.pins = pin, pins
        if not will:
            self.policy.add(item, pin is _SOFT)
        self.hard_pinned += will - was
        self.hard_pinned_bytes += change
        self.evictable_bytes -= change
        self._note_change(item)
        return _OK

    def _unharden(self, item: Object) -> None:
        if item.hard_pinned:
            self.hard_pinned -= 1
            self.hard_pinned_bytes -= item.extent_bytes
            item.pins = 0

    def _note_change(self, item: Object) -> None:
        dirty = self.buckets[item.bucket].dirty
        if dirty is not None:
            dirty[item.key] = None

    # -- room

    def _metadata_room(self, keys: Sequence[bytes], now: int) -> int:
        """How many of the keys, from the first, stay within the bound of metadata."""
        extents, limit = self.extents, self.metadata_limit_bytes
        needed = METADATA_BYTES * len(keys) + sum(map(len, keys))
        if extents.metadata_bytes + needed <= limit:
            return len(keys)
        self.expire_due(now, EXPIRE_STEP)
        self._evict(metadata_bytes=extents.metadata_bytes + needed - limit)
        costs = accumulate(METADATA_BYTES + len(key) for key in keys)
        room = limit - extents.metadata_bytes
        return sum(1 for cost in costs if cost <= room)

    def _extents_for(self, lengths: list[int], now: int) -> list[int | None]:
        offsets = self.extents.take(lengths)
        if offsets is None:
            self.extents.reap()  # what was read while it was given up may be free by now
            self.expire_due(now, EXPIRE_STEP)
            needed, free = sum(lengths), self.extents.allocator.free_bytes
            if needed <= free + self.evictable_bytes:
                self._evict(bytes_=needed - free)
            offsets = self.extents.take(lengths)
        return [self._extent_for(length) for length in lengths] if offsets is None else [*offsets]

    def _extent_for(self, length: int) -> int | None:
        """An offset, if need be by evicting until a free extent is large enough.

        Evicts nothing for what cannot fit beside the pinned, the allocated and the retiring.
        """
        offset = self.extents.take_one(length)
        if offset is None and length <= self.extents.allocator.free_bytes + self.evictable_bytes:
            for victim in self.policy.victims():
                if not victim.readers and self._remove((victim,), _EVICTED) >= length:
                    return self.extents.take_one(length)
        return offset

    def _extent_if_cheap(self, length: int, now: int) -> int | None:
        """An offset, if there is one once so many bytes are free, wherever they are."""
        offset = self.extents.take_one(length)
        if offset is None:
            self.extents.reap()
            self.expire_due(now, EXPIRE_STEP)
            self._evict(bytes_=length - self.extents.allocator.free_bytes)
            offset = self.extents.take_one(length)
        return offset

    def _evict(self, bytes_: int = 0, metadata_bytes: int = 0) -> None:
        """Gives up objects until so much of both came free, or there is nothing left to evict.

        Objects that are being read are passed over, as that would free nothing.
        """
        victims: list[Object] = []
        if bytes_ > 0 or metadata_bytes > 0:
            for victim in self.policy.victims():
                if victim.readers:
                    continue
                self._detach(victim)
                victims.append(victim)
                bytes_ -= victim.extent_bytes
                metadata_bytes -= victim.metadata_bytes
                if bytes_ <= 0 and metadata_bytes <= 0:
                    break
        self._bury(victims, _EVICTED)
