"""The objects of one node: index, extents, pins, expiry, eviction. No network, no clock.

Everything is called from one thread, in batches; ``now`` is monotonic nanoseconds. A put has two
steps: ``allocate_batch`` gives extents, evicting what is in the way, the caller writes the bytes
into the arena, ``commit_batch`` makes them visible and retires what they replace.

Pins and tokens belong to an object, not to its key: an object that is overwritten, deleted or
expired leaves the index at once. Its bytes stay as they are until the last token is released.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from typing import Any, Final

from p2pkv import _native
from p2pkv._native.commit import commit_plain
from p2pkv._native.index import Writer
from p2pkv.allocator import round_up
from p2pkv.arena import Arena
from p2pkv.catalog import Catalog
from p2pkv.checksums import checksums_of
from p2pkv.errors import ConfigError
from p2pkv.eviction import EvictionPolicy
from p2pkv.extents import Room
from p2pkv.objects import (
    METADATA_BYTES,
    Bucket,
    Object,
    Pin,
    Reason,
    State,
    StoreStats,
    extent_bytes,
    extents_bytes,
    write_checksum,
    write_header,
)
from p2pkv.parts import Parts, size_of
from p2pkv.store_audit import audit
from p2pkv.types import BucketId
from p2pkv.wire import PLAIN, Buffer, PutOptions, Status

# Members of enumerations are looked up through a descriptor, which hot loops would feel.
_ALLOCATED, _COMMITTED, _RETIRING, _GONE = State
_PLAIN, _SOFT, _HARD = Pin
_EXPIRED = Reason.EXPIRED
_OK, _MISS, _CONFLICT = Status.OK, Status.MISS, Status.CONFLICT

ROOM_SHARE: Final = 16
"""One room is at most one part in so many of the arena,"""
ROOMS_SHARE: Final = 8
"""and all together one in so many: nothing in them can be evicted."""
ROOM_PUTS: Final = 16
"""A room has place for so many puts like the one that it is asked for,"""
ROOM_BYTES: Final = 1 << 20
"""as long as it has not more bytes."""


class Store(Catalog):
    """Objects in an arena.

    ``metadata_limit_bytes`` bounds keys and records (METADATA_BYTES + the key for each object);
    ``hard_pin_quota`` is the share of the arena that hard-pinned extents may take;
    ``published`` is the index by which others read on their own;
    ``value_bytes_max`` is lowered to what the arena could hold. Raises ConfigError for limits
    that cannot hold one object.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        metadata_limit_bytes: int,
        hard_pin_quota: float = 0.25,
        key_bytes_max: int = 1024,
        value_bytes_max: int = 1 << 30,
        policy: EvictionPolicy[Object] | None = None,
        published: Writer | None = None,
    ) -> None:
        if metadata_limit_bytes < METADATA_BYTES + key_bytes_max:
            raise ConfigError(
                f"metadata_limit_bytes = {metadata_limit_bytes}: must be at least "
                f"{METADATA_BYTES + key_bytes_max}, the cost of one object"
            )
        super().__init__(
            arena,
            metadata_limit_bytes=metadata_limit_bytes,
            hard_pin_quota=hard_pin_quota,
            policy=policy,
            published=published,
        )
        self.key_bytes_max = key_bytes_max
        self.value_bytes_max = min(value_bytes_max, self.extents.value_bytes_max)
        self.allocated: set[Object] = set()

    # -- buckets

    def open_bucket(self, bucket: int) -> Bucket:
        """Starts to hold a bucket, empty. Raises ValueError if it is open."""
        if bucket in self.buckets:
            raise ValueError(f"bucket {bucket} is open already")
        opened = self.buckets[bucket] = Bucket(BucketId(bucket))
        self.index[bucket] = opened.objects
        return opened

    def drop_bucket(self, bucket: int) -> int:
        """Forgets a bucket with everything in it; answers how many objects that were.

        Its allocations are aborted. Raises KeyError if it is not open.
        """
        dropped = self.buckets[bucket]
        self.hide_bucket(bucket)
        allocated = [item for item in self.allocated if item.bucket == bucket]
        self.abort_batch(sorted(allocated, key=lambda item: item.offset))
        objects = list(dropped.objects.values())
        self._remove(objects, Reason.DROPPED)
        del self.buckets[bucket], self.index[bucket]
        return len(objects)

    def hide_bucket(self, bucket: int) -> None:
        """Readers of the published index ask the node from here on, until its gate is opened.

        To be called before anybody else may serve the bucket.
        """
        if self.published is not None:
            self.published.close_gate(bucket)

    # -- reading

    def get_batch(
        self, buckets: Sequence[int], keys: Sequence[bytes], now: int
    ) -> list[Object | None]:
        """The object of each key, or None. Counts as access, the first key as the latest."""
        index = self.index
        found = [index[b].get(k) for b, k in zip(buckets, keys, strict=True)]
        if self.expiry.timed:
            found = self._without_expired(found, now)
        hits = [item for item in found if item is not None]
        self.policy.touch_batch(hits)
        self.counters.hits += len(hits)
        self.counters.misses += len(found) - len(hits)
        return found

    def use(self, item: Object) -> None:
        """Counts as access to what ``find`` found."""
        self.policy.touch(item)
        self.counters.hits += 1

    def exists_batch(self, buckets: Sequence[int], keys: Sequence[bytes], now: int) -> list[bool]:
        """Whether each key is there. No access: changes neither order nor figures."""
        index = self.index
        return [
            (item := index[b].get(k)) is not None and not 0 < item.expires_at <= now
            for b, k in zip(buckets, keys, strict=True)
        ]

    def match(self, buckets: Sequence[int], keys: Sequence[bytes], now: int) -> int:
        """How many keys from the start are there. No access."""
        index = self.index
        count = 0
        for bucket, key in zip(buckets, keys, strict=True):
            item = index[bucket].get(key)
            if item is None or 0 < item.expires_at <= now:
                break
            count += 1
        return count

    def find(self, bucket: int, key: bytes, now: int) -> Object | None:
        """The object of one key. No access."""
        item = self.index[bucket].get(key)
        return None if item is None or 0 < item.expires_at <= now else item

    def value(self, item: Object) -> memoryview:
        """The bytes of an object where they lie; to be looked at only while it is held."""
        return self.arena.view[item.offset : item.offset + item.size]

    def scan(
        self, bucket: int, after: bytes, prefix: bytes, limit: int, now: int
    ) -> tuple[list[tuple[bytes, int]], bool]:
        """Up to ``limit`` keys with their sizes, in order, and whether there are more.

        Keys start with ``prefix`` and follow ``after`` (empty: from the start). Raises KeyError
        if the bucket is not open.
        """
        opened = self.buckets[bucket]
        start, end = opened.keys_with(prefix, after)
        page: list[tuple[bytes, int]] = []
        order = opened.order
        for i in range(start, end):
            key = order[i]
            item = opened.objects[key]
            if 0 < item.expires_at <= now:
                continue
            if len(page) == limit:
                return page, True
            page.append((key, item.size))
        return page, False

    # -- checksums

    def differing(self, items: Sequence[Object], checksums: Sequence[int | None]) -> list[Object]:
        """Those whose bytes are not what their checksum says; 0 or None: there is none."""
        summed = [(i, s) for i, s in zip(items, checksums, strict=True) if s]
        found = checksums_of([self.value(item) for item, _ in summed])
        return [item for (item, s), real in zip(summed, found, strict=True) if s != real]

    def check_batch(self, items: Sequence[Object]) -> list[Object]:
        """Drops those whose bytes are not what their checksum says; answers which."""
        corrupt = self.differing(items, [item.checksum for item in items])
        self.drop_corrupt(corrupt)
        return corrupt

    def give_checksums(self, items: Sequence[Object], checksums: Sequence[int]) -> None:
        """Sets the checksums of objects that are still there."""
        for item, checksum in zip(items, checksums, strict=True):
            if item.state is _COMMITTED:
                item.checksum = checksum
                write_checksum(self.arena.view, item)

    def drop_corrupt(self, items: Sequence[Object]) -> int:
        """Removes objects that are corrupt and still there; answers how many."""
        there = [item for item in items if item.state is _COMMITTED]
        self._remove(there, Reason.CORRUPT)
        return len(there)

    # -- putting

    def allocate_batch(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        now: int,
        decided: bool = False,
        places: Sequence[int] | None = None,
    ) -> list[Object | Status]:
        """An object with an extent for each key, or why not.

        OK: a write-once object is there, whose content is the same by contract. EXISTS: with
        ``if_absent``. OUT_OF_MEMORY: nothing could be evicted for it. QUOTA, TOO_LARGE, INVALID,
        NOT_PRIMARY (the bucket is not open): as named. Where the arena has a free run for all,
        the extents lie there one after the other. What is allocated is never evicted: end it
        with ``commit_batch`` or ``abort_batch``. ``decided``: whatever is there is to be replaced.
        ``places``: where the values lie already, as ``carve`` gave them; those that are not taken
        are free again.
        """
        pin = _HARD if options.hard_pin else _SOFT if options.soft_pin else _PLAIN
        results: list[Object | Status] = []
        wanted: Sequence[int] = range(len(keys))
        if not self._all_admitted(buckets, keys, sizes, options, decided):
            results = [Status.OUT_OF_MEMORY] * len(keys)
            wanted = self._admitted(buckets, keys, sizes, options, now, results, decided)
            buckets = [buckets[i] for i in wanted]
            keys = [keys[i] for i in wanted]
            sizes = [sizes[i] for i in wanted]
        lengths = extents_bytes(sizes)
        if places is None:
            offsets = self._reserve(keys, lengths, now)
        else:
            offsets = self._settle(places, wanted, keys, now)
        made = [
            Object(key, bucket, offset, size, length, options, pin)
            for key, bucket, offset, size, length in zip(
                keys, buckets, offsets, sizes, lengths, strict=True
            )
            if offset is not None
        ]
        self._enter(made)
        if not results and len(made) == len(keys):
            return [*made]
        self.counters.refused_memory += len(wanted) - len(made)
        results = results or [Status.OUT_OF_MEMORY] * len(keys)
        there = [i for i, offset in zip(wanted, offsets, strict=True) if offset is not None]
        for i, item in zip(there, made, strict=True):
            results[i] = item
        return results

    def _all_admitted(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        decided: bool,
    ) -> bool:
        """Whether nothing can speak against any of the keys, as is usual."""
        lengths = set(map(len, keys))
        if options.hard_pin or not (
            len(buckets) == len(keys) == len(sizes) > 0
            and min(lengths) > 0
            and max(lengths) <= self.key_bytes_max
            and min(sizes) >= 0
            and max(sizes) <= self.value_bytes_max
            and self.buckets.keys() >= set(buckets)
        ):
            return False
        if decided:
            return True
        index = self.index
        found = [index[b].get(k) for b, k in zip(buckets, keys, strict=True)]
        if found.count(None) == len(found):
            return True
        once = [item for item in found if item is not None and item.options.write_once]
        return not (once or options.if_absent)

    def _admitted(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        now: int,
        results: list[Object | Status],
        decided: bool = False,
    ) -> list[int]:
        """Positions of the keys that nothing speaks against; the others get their result."""
        index, opened = self.index, self.buckets
        longest, largest, if_absent = self.key_bytes_max, self.value_bytes_max, options.if_absent
        wanted: list[int] = []
        for i, (bucket, key, size) in enumerate(zip(buckets, keys, sizes, strict=True)):
            if 0 <= size <= largest and 0 < len(key) <= longest and bucket in opened:
                there = None if decided else index[bucket].get(key)
                if there is None or not (if_absent or there.options.write_once):
                    wanted.append(i)
                    continue
                refusal = self._stays(there, options, now)
            else:
                refusal = self._invalid(bucket, key, size)
            if refusal is None:
                wanted.append(i)
            else:
                results[i] = refusal
        return self._within_quota(wanted, sizes, results) if options.hard_pin else wanted

    def _invalid(self, bucket: int, key: bytes, size: int) -> Status:
        if bucket not in self.buckets:
            return Status.NOT_PRIMARY
        if size < 0 or not 0 < len(key) <= self.key_bytes_max:
            return Status.INVALID
        self.counters.refused_size += 1
        return Status.TOO_LARGE

    def _stays(self, there: Object, options: PutOptions, now: int) -> Status | None:
        """What answers a put that is ``if_absent``, or meets a write-once object."""
        if 0 < there.expires_at <= now:
            return None
        if options.if_absent:
            return Status.EXISTS
        self.policy.touch(there)
        return _OK

    def _within_quota(
        self, wanted: list[int], sizes: Sequence[int], results: list[Object | Status]
    ) -> list[int]:
        room = self.hard_pin_quota_bytes - self.hard_pinned_bytes
        admitted: list[int] = []
        for i in wanted:
            needed = extent_bytes(sizes[i])
            if needed <= room:
                room -= needed
                admitted.append(i)
            else:
                results[i] = Status.QUOTA
                self.counters.refused_quota += 1
        return admitted

    def _reserve(self, keys: Sequence[bytes], lengths: list[int], now: int) -> list[int | None]:
        """An offset for each value as far as there is room, or room can be made."""
        fitting = self._metadata_room(keys, now)
        offsets = self._extents_for(lengths[:fitting], now)
        return offsets + [None] * (len(keys) - fitting)

    def _settle(
        self, places: Sequence[int], wanted: Sequence[int], keys: Sequence[bytes], now: int
    ) -> list[int | None]:
        """The places of those that are wanted, as far as there is room for metadata."""
        fitting = self._metadata_room(keys, now)
        kept = [places[i] for i in wanted[:fitting]]
        if len(kept) < len(places):
            self.extents.give_up(set(places).difference(kept))
        return kept + [None] * (len(keys) - fitting)

    def open_room(self, length: int, now: int) -> Room | None:
        """Memory for values that are not named yet, ``length`` bytes with their headers, or more.

        Evicts no more than as many bytes. None: the rooms would take more than their share of the
        arena, or there is no such extent. To be ended with ``close_room``.
        """
        most = self.extents.allocator.size // ROOM_SHARE
        if not 0 < length <= most:
            return None
        several = length * max(1, min(ROOM_PUTS, ROOM_BYTES // length, most // length))
        if self.extents.rooms_bytes + several > self.extents.allocator.size // ROOMS_SHARE:
            return None
        offset = self._extent_if_cheap(round_up(several), now)
        if offset is None and several > length:
            offset = self._extent_if_cheap(round_up(length), now)
        return None if offset is None else self.extents.open_room(offset)

    def carve(self, room: Room, sizes: Sequence[int]) -> list[int]:
        """Where values of these sizes lie in a room, one after the other from its start.

        To be given to ``allocate_batch``. Raises ValueError, and nothing is done, if they do not.
        """
        return self.extents.carve(room, extents_bytes(sizes))

    def close_room(self, room: Room) -> None:
        """Takes back what is left of a room. May be called again."""
        self.extents.close_room(room)

    def _enter(self, items: Sequence[Object]) -> None:
        self.allocated.update(items)
        self.extents.charge(items)
        if items and items[0].pin is _HARD:
            self.hard_pinned += len(items)
            self.hard_pinned_bytes += sum([item.extent_bytes for item in items])

    def commit_batch(
        self,
        items: Sequence[Object],
        now: int,
        checksums: Sequence[int | None] | None = None,
        decided: bool = False,
    ) -> list[Status]:
        """Makes objects visible, in order; their ttl counts from here.

        OK also where a write-once object came first and stays. EXISTS: another came first and
        this one was ``if_absent``. CONFLICT: the object is not (or no longer) allocated.
        ``decided``: whatever is there is replaced. ``checksums`` replace those of the objects.
        Raises ValueError for another number of them.
        """
        if checksums is not None:
            if len(checksums) != len(items):
                raise ValueError(f"{len(checksums)} checksums for {len(items)} objects")
            for item, checksum in zip(items, checksums, strict=True):
                if item.state is _ALLOCATED:
                    item.checksum = checksum
        self.allocated.difference_update(items)
        gone = self._commit_plain(items if isinstance(items, list) else list(items))
        if gone is not None:
            self._bury(gone, Reason.OVERWRITTEN)
            self._count_puts(items)
            return [_OK] * len(items)
        replaced: list[Object] = []
        before = self._version
        statuses = [self._commit(item, now, replaced, decided) for item in items]
        self.policy.touch_batch(items)
        shown = dict.fromkeys([item for item in items if item.version > before])
        if self.published is not None:
            self.published.publish(shown)
        self._bury(replaced, Reason.OVERWRITTEN)
        self._count_puts(shown)
        return statuses

    def show_batch(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        places: Sequence[int],
        checksums: Sequence[int],
        now: int,
    ) -> bool:
        """Makes values without options, which lie in ``places``, visible at once.

        As ``allocate_batch`` with those places and ``commit_batch``, where all goes the usual way.
        False, and nothing is done: one does not. ``checksums`` may be empty.
        """
        if max(map(len, keys), default=0) > self.key_bytes_max:
            return False
        if self._metadata_room(keys, now) < len(keys):
            return False
        lengths, versions = extents_bytes(sizes), range(self._version + 1, 1 << 62)
        made = [
            Object(key, bucket, place, size, length, PLAIN, _PLAIN, version, _COMMITTED, version)
            for key, bucket, place, size, length, version in zip(
                keys, buckets, places, sizes, lengths, versions, strict=False
            )
        ]
        for item, checksum in zip(made, checksums, strict=True) if checksums else ():
            item.checksum = checksum
        gone = self._commit_plain(made, ())
        if gone is None:
            return False
        self.extents.charge(made)
        if gone:
            self._bury(gone, Reason.OVERWRITTEN)
        self._count_puts(made)
        return True

    def _count_puts(self, items: Collection[Object]) -> None:
        self.counters.puts += len(items)
        self.counters.put_bytes += sum([item.size for item in items])

    def _commit_plain(
        self, items: list[Object], states: tuple[State, ...] = (_ALLOCATED, _COMMITTED)
    ) -> list[Object] | None:
        """As ``_commit`` for each item, where all are of the usual kind: what they replace.

        Usual: different keys, no option, and what they replace had none, neither pins nor a ttl.
        Else None, and nothing is done. ``states``: none for objects that are new and committed.
        """
        if _native.available:
            gone = commit_plain(
                self.published, self.arena.address, items, self.buckets, PLAIN, states,
                self._version,
            )  # fmt: skip
            self._version += 0 if gone is None else len(items)
        else:
            gone = self._commit_in_python(items, states[0] if states else _COMMITTED)
        if gone is not None:
            self.policy.replace_batch(gone, items)
            self.evictable_bytes += sum([item.extent_bytes for item in items])
            self.evictable_bytes -= sum([item.extent_bytes for item in gone])
        return gone

    def _commit_in_python(self, items: list[Object], state: State) -> list[Object] | None:
        """``_commit_plain`` where there is no extension."""
        buckets = self.buckets
        before: list[Object | None] = []
        for item in items:
            if item.options != PLAIN or item.state is not state or item.bucket not in buckets:
                return None
            there = buckets[item.bucket].objects.get(item.key)
            if there is not None and not _is_plain(there):
                return None
            before.append(there)
        if len({item.key for item in items}) < len(items):
            return None
        self._show_plain(items, before)
        if self.published is not None:
            self.published.publish(items)
        return [there for there in before if there is not None]

    def _commit(self, item: Object, now: int, replaced: list[Object], decided: bool) -> Status:
        if item.state is not _ALLOCATED:
            return _CONFLICT
        bucket = self.buckets[item.bucket]
        there = bucket.objects.get(item.key)
        if there is not None and 0 < there.expires_at <= now:
            self._remove((there,), _EXPIRED)
            there = None
        if there is None:
            bucket.sorted_keys = None
        elif not decided and (item.options.if_absent or there.options.write_once):
            self._unharden(item)
            self.extents.give_back((item,))
            return Status.EXISTS if item.options.if_absent else _OK
        else:
            self._leave(bucket, there)
            replaced.append(there)
        self._show(bucket, item, now)
        return _OK

    def expose_batch(self, items: Sequence[Object]) -> None:
        """Gives allocated objects, whose bytes are there, a header, so that a peer on this host
        which copies them can tell that they stayed what they were."""
        for item in items:
            if item.state is _ALLOCATED and not item.version:
                self._version = item.version = self._version + 1
                write_header(self.arena.view, item)

    def abort_batch(self, items: Sequence[Object]) -> int:
        """Takes allocations back; answers how many. What is committed or gone is left alone."""
        aborted = [item for item in dict.fromkeys(items) if item.state is _ALLOCATED]
        for item in aborted:
            self._unharden(item)
        self.allocated.difference_update(aborted)
        self.extents.give_back(aborted)
        self.counters.aborts += len(aborted)
        return len(aborted)

    def put_batch(
        self,
        buckets: Sequence[int],
        keys: Sequence[bytes],
        values: Sequence[Buffer | Parts],
        options: PutOptions,
        now: int,
        *,
        checksums: Sequence[int | None] | None = None,
        stamps: Sequence[int] = (),
    ) -> list[Status]:
        """Both steps at once, for values that are at hand.

        Goes in pieces of a quarter of the arena, so that a batch larger than the arena evicts its
        own beginning instead of being refused.
        """
        several = tuple in set(map(type, values))
        write: Callable[[int, Any], None] = self.write if several else self.arena.write
        sizes = [size_of(v) if isinstance(v, tuple) else memoryview(v).nbytes for v in values]
        sums = [None] * len(keys) if checksums is None else checksums
        statuses: list[Status] = []
        stored: list[Object] = []
        for part in _pieces(sizes, self.extents.allocator.size // 4):
            results = self.allocate_batch(buckets[part], keys[part], sizes[part], options, now)
            for item, stamp in zip(results, stamps[part], strict=False):
                if isinstance(item, Object):
                    item.stamp = stamp
            made, made_sums = [], []
            for item, value, checksum in zip(results, values[part], sums[part], strict=True):
                if isinstance(item, Object):
                    write(item.offset, value)
                    made.append(item)
                    made_sums.append(checksum)
            committed = iter(self.commit_batch(made, now, made_sums))
            statuses += [next(committed) if isinstance(r, Object) else r for r in results]
            stored += made
        self.policy.touch_batch(stored)
        return statuses

    def write(self, offset: int, value: Buffer | Parts) -> None:
        """Copies a value, which may be in parts, into the arena."""
        for part in value if isinstance(value, tuple) else (value,):
            self.arena.write(offset, part)
            offset += len(part)

    # -- leaving

    def delete_batch(self, buckets: Sequence[int], keys: Sequence[bytes], now: int) -> list[Status]:
        """OK or MISS for each key."""
        statuses: list[Status] = []
        deleted: list[Object] = []
        for bucket, key in zip(buckets, keys, strict=True):
            item = self.index[bucket].get(key)
            if item is None or 0 < item.expires_at <= now:
                statuses.append(_MISS)
            else:
                self._detach(item)
                deleted.append(item)
                statuses.append(_OK)
        self._bury(deleted, Reason.DELETED)
        return statuses

    def delete_range(self, bucket: int, prefix: bytes, limit: int, now: int) -> tuple[int, bool]:
        """Deletes up to ``limit`` keys that start with ``prefix``, in order.

        Answers how many, and whether there are more. Raises KeyError if the bucket is not open.
        """
        opened = self.buckets[bucket]
        order = opened.order
        start, end = opened.keys_with(prefix)
        stop = min(end, start + limit)
        items = [opened.objects[key] for key in order[start:stop]]
        expired = [item for item in items if 0 < item.expires_at <= now]
        self._remove(expired, _EXPIRED)
        live = [item for item in items if item.state is _COMMITTED]
        self._remove(live, Reason.DELETED)
        opened.sorted_keys = order[:start] + order[stop:]
        return len(live), stop < end

    def delete_until(self, bucket: int, prefix: bytes, last: bytes, now: int) -> int:
        """Deletes all keys with ``prefix`` up to ``last`` (empty: to the end); how many."""
        opened = self.buckets[bucket]
        start, end = opened.keys_with(prefix)
        limit = bisect_right(opened.order, last, start, end) - start if last else end - start
        return self.delete_range(bucket, prefix, limit, now)[0] if limit else 0

    def evict_batch(self, buckets: Sequence[int], keys: Sequence[bytes]) -> None:
        """Gives up what another node has decided to give up, if it is there."""
        found = [self.index[b].get(k) for b, k in zip(buckets, keys, strict=True)]
        items = [item for item in found if item is not None]
        for item in items:
            self._detach(item)
        self._bury(items, Reason.EVICTED)

    def expire_batch(
        self, buckets: Sequence[int], keys: Sequence[bytes], ttl_ns: int, now: int
    ) -> list[Status]:
        """Sets the time to live, from now, of what is there; 0: for ever. OK or MISS each."""
        if ttl_ns < 0:
            raise ValueError(f"ttl_ns = {ttl_ns}: must not be negative")
        statuses: list[Status] = []
        changed: list[Object] = []
        for bucket, key in zip(buckets, keys, strict=True):
            item = self.find(bucket, key, now)
            if item is not None:
                self._set_expiry(item, now + ttl_ns if ttl_ns else 0)
                changed.append(item)
            statuses.append(_MISS if item is None else _OK)
        if self.published is not None:
            self.published.publish(changed)
        return statuses

    def _without_expired(self, found: list[Object | None], now: int) -> list[Object | None]:
        expired = {i: True for i in found if i is not None and 0 < i.expires_at <= now}
        if not expired:
            return found
        self._remove(expired.keys(), _EXPIRED)
        return [None if item in expired else item for item in found]

    # -- readers

    @property
    def release_later(self) -> deque[Object]:
        """Where other threads append (or extend by) objects whose token they held; ``reap``."""
        return self.extents.release_later

    def acquire(self, item: Object) -> None:
        """Takes a token: the bytes stay as they are until it is released.

        Raises Conflict if the object has left the store.
        """
        self.extents.acquire_batch((item,))

    def release(self, item: Object) -> None:
        """Gives a token back. Raises ValueError if none is held."""
        self.extents.release_batch((item,))

    def acquire_batch(self, items: Sequence[Object]) -> None:
        """One token of each. Raises Conflict, taking none, if one has left the store."""
        self.extents.acquire_batch(items)

    def release_batch(self, items: Sequence[Object]) -> None:
        """Gives one token of each back. Raises ValueError, after the others, if one has none."""
        self.extents.release_batch(items)

    def reap(self, now: int, limit: int = 1024) -> int:
        """Housekeeping: takes the tokens in ``release_later`` and expires up to ``limit`` objects.

        Answers how many tokens and objects.
        """
        return self.extents.reap() + self.expire_due(now, limit)

    # -- figures

    def stats(self) -> StoreStats:
        """The figures of this moment; the counters are a copy."""
        extents, space = self.extents, self.extents.allocator
        return StoreStats(
            buckets=len(self.buckets),
            objects=sum(map(len, self.buckets.values())),
            allocated=len(self.allocated),
            value_bytes=sum(bucket.value_bytes for bucket in self.buckets.values()),
            size_bytes=space.size,
            used_bytes=space.used_bytes,
            evictable_bytes=self.evictable_bytes,
            free_bytes=space.free_bytes,
            largest_free_bytes=space.largest_free,
            fragmentation=space.fragmentation,
            free_extents=space.free_extents,
            retiring=len(extents.retiring),
            retiring_bytes=extents.retiring_bytes,
            rooms_bytes=extents.rooms_bytes,
            hard_pinned=self.hard_pinned,
            hard_pinned_bytes=self.hard_pinned_bytes,
            hard_pin_quota_bytes=self.hard_pin_quota_bytes,
            metadata_bytes=extents.metadata_bytes,
            metadata_limit_bytes=self.metadata_limit_bytes,
            timed=self.expiry.timed,
            counters=deepcopy(self.counters),
        )

    def validate(self) -> None:
        """Raises AssertionError if index, extents, queues and figures disagree. For tests."""
        audit(self)


def _is_plain(item: Object) -> bool:
    """Whether it goes without more ado."""
    return not (item.options != PLAIN or item.pins or item.pin or item.expires_at)


def _pieces(sizes: Sequence[int], bytes_max: int) -> Iterator[slice]:
    """Slices whose extents take up to ``bytes_max`` together, or which are one long."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        total += extent_bytes(size)
        if total > bytes_max and i > start:
            yield slice(start, i)
            start, total = i, extent_bytes(size)
    if sizes:
        yield slice(start, len(sizes))
