"""What the store keeps: objects, buckets, the header in front of each value, figures."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from p2pkv.allocator import GRANULE
from p2pkv.types import BucketId
from p2pkv.wire import PutOptions

HEADER_BYTES = GRANULE
METADATA_BYTES = 640
"""What an object costs beside its key and value: its record, and its entries in the index, the
allocator and the eviction queue. Measured: 510 (CPython 3.11, half a million objects)."""


class State(IntEnum):
    """The life of an object; it only goes on."""

    ALLOCATED = 0
    """Has its extent; the writer fills it. Not visible."""
    COMMITTED = 1
    """In the index."""
    RETIRING = 2
    """Out of the index (or given up), kept for the readers that hold a token."""
    GONE = 3
    """Its extent is free."""


class Pin(IntEnum):
    """How an object stands towards eviction."""

    NONE = 0
    SOFT = 1
    """Goes only when nothing unpinned is left."""
    HARD = 2
    """Never goes; within a quota."""


class Reason(IntEnum):
    """Why an object left."""

    EVICTED = 0
    EXPIRED = 1
    DELETED = 2
    OVERWRITTEN = 3
    DROPPED = 4
    """Its bucket was dropped."""
    CORRUPT = 5
    """Its bytes were no longer those of its checksum."""


class Object(msgspec.Struct, eq=False, gc=False):
    """One value. It refers to no container, so the garbage collector need not walk millions."""

    key: bytes
    bucket: int
    offset: int
    """Of the value in the arena, in bytes; a multiple of 64."""
    size: int
    """Bytes of the value."""
    extent_bytes: int
    """Bytes of the arena that it takes: ``extent_bytes(size)``."""
    options: PutOptions
    pin: Pin = Pin.NONE
    stamp: int = 0
    """Names the write that made it, the same on all copies (``digests``); 0: not visible yet."""
    state: State = State.ALLOCATED
    version: int = 0
    """Rises with each commit on this node; 0 before."""
    expires_at: int = 0
    """Monotonic nanoseconds; 0: never."""
    readers: int = 0
    """Transfer tokens that cover it."""
    pins: int = 0
    """Pins of sessions; as long as there is one it counts as hard-pinned."""
    checksum: int | None = None
    """XXH3 (64 bits) of the value, if the writer gave one. None or 0: none."""
    slot: int = -2
    """Where it stands in the published index; negative: nowhere (see ``_native.index``)."""

    @property
    def metadata_bytes(self) -> int:
        return METADATA_BYTES + len(self.key)

    @property
    def hard_pinned(self) -> bool:
        return self.pins > 0 or self.pin is Pin.HARD


def extent_bytes(size: int) -> int:
    """Bytes of the arena that a value of ``size`` bytes takes, header included."""
    return (size + HEADER_BYTES + GRANULE - 1) & -GRANULE


def extents_bytes(sizes: Sequence[int]) -> list[int]:
    """``extent_bytes`` of each."""
    if sizes and sizes.count(sizes[0]) == len(sizes):  # as is usual
        return [extent_bytes(sizes[0])] * len(sizes)
    return [(size + HEADER_BYTES + GRANULE - 1) & -GRANULE for size in sizes]


class Bucket:
    """The committed objects of one bucket."""

    __slots__ = ("digest", "dirty", "id", "objects", "sorted_keys", "value_bytes")

    def __init__(self, bucket: BucketId) -> None:
        self.id = bucket
        self.objects: dict[bytes, Object] = {}
        self.value_bytes = 0
        self.digest = 0
        """The sum of ``digests.mark`` of all objects that do not expire."""
        self.dirty: dict[bytes, None] | None = None
        """While not None: the keys whose object changed, in order of the first change."""
        self.sorted_keys: list[bytes] | None = None
        """To be set to None when a key comes or goes."""

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def order(self) -> list[bytes]:
        """All keys in order; sorted when first asked for after a change."""
        if self.sorted_keys is None:
            self.sorted_keys = sorted(self.objects)
        return self.sorted_keys

    def keys_with(self, prefix: bytes, after: bytes = b"") -> tuple[int, int]:
        """The range in ``order`` of the keys that start with ``prefix`` and follow ``after``."""
        order = self.order
        start = bisect_left(order, prefix)
        if after:
            start = max(start, bisect_right(order, after))
        end = len(order)
        if prefix:
            end = bisect_right(order, prefix, key=lambda key: key[: len(prefix)])
        return start, max(start, end)


class Header(NamedTuple):
    """The 64 bytes before a value, for those who read the arena without asking.

    A reader compares ``state``, ``version`` and ``key_hash`` before and after its copy: a header
    is cleared before its memory is given to anything else, and versions never come back.
    """

    magic: int
    key_hash: int
    size: int
    version: int
    checksum: int
    state: int
    has_checksum: int


MAGIC = 0x31_76_6B_70_32_70  # "p2pkv1"
HEADER = Struct("<QQQQQII16x")
CHECKSUM_AT, HAS_CHECKSUM_AT = 32, 44
_CHECKSUM, _HAS_CHECKSUM = Struct("<Q"), Struct("<I")
CLEARED_HEADER = bytes(HEADER_BYTES)
"""What stands there once the memory may be used for something else."""


def write_header(view: memoryview, item: Object) -> None:
    """Writes the header of a committed object."""
    checksum = item.checksum
    HEADER.pack_into(
        view,
        item.offset - HEADER_BYTES,
        MAGIC,
        xxh3_64_intdigest(item.key),
        item.size,
        item.version,
        checksum or 0,
        1,
        bool(checksum),
    )


def write_checksum(view: memoryview, item: Object) -> None:
    """Changes the checksum in the header of a committed object, and nothing else there."""
    start = item.offset - HEADER_BYTES
    _CHECKSUM.pack_into(view, start + CHECKSUM_AT, item.checksum or 0)
    _HAS_CHECKSUM.pack_into(view, start + HAS_CHECKSUM_AT, bool(item.checksum))


def read_header(view: memoryview, offset: int) -> Header | None:
    """The header of the value at ``offset``, or None if no committed object is there."""
    header = Header(*HEADER.unpack_from(view, offset - HEADER_BYTES))
    return header if header.magic == MAGIC and header.state == State.COMMITTED else None


class Counters(msgspec.Struct):
    """What happened since the start: numbers of objects, which only rise."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes: int = 0
    aborts: int = 0
    refused_memory: int = 0
    refused_quota: int = 0
    refused_size: int = 0
    lost: list[int] = msgspec.field(default_factory=lambda: [0] * len(Reason))
    """Committed objects that left, by Reason."""
    lost_bytes: list[int] = msgspec.field(default_factory=lambda: [0] * len(Reason))
    """Value bytes of those."""


class StoreStats(msgspec.Struct, frozen=True):
    """The store at one moment. Bytes are those of extents unless they are called value bytes."""

    buckets: int
    objects: int
    allocated: int
    """Objects that are not committed yet."""
    value_bytes: int
    size_bytes: int
    used_bytes: int
    evictable_bytes: int
    free_bytes: int
    largest_free_bytes: int
    fragmentation: float
    free_extents: int
    retiring: int
    retiring_bytes: int
    rooms_bytes: int
    """Given to clients ahead of their puts."""
    hard_pinned: int
    hard_pinned_bytes: int
    hard_pin_quota_bytes: int
    metadata_bytes: int
    metadata_limit_bytes: int
    timed: int
    """Objects that will expire."""
    counters: Counters
