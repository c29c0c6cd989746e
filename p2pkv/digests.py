"""Whether copies of a bucket are the same: stamps, digests, slices, differences. Pure.

Every write has a *stamp*, the same on all copies: its place in the bucket's log, or, where nobody
else had to have it, a number of the node that made it. A bucket's *digest* is the sum of a hash of
key and stamp over its objects, so it changes with each object in constant time and does not depend
on their order (an incremental hash: M. Bellare, D. Micciancio, "A new paradigm for collision-free
hashing", EUROCRYPT 1997). It finds mistakes, not forgeries.

Objects that expire are in no digest: each node lets them go by its own clock.

Copies are compared as of one operation of the log. Each *notes* its digest when that is carried
out. Where digests differ, notes are taken of *slices*: hash of the key and stamp of each object
whose hash begins with given bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from p2pkv.objects import Bucket
from p2pkv.types import Member

SEQ_BITS = 40
SLICE_OBJECTS = 2048
"""So many objects a slice has, about."""
SLICE_BITS_MAX = 16
NOTES_MAX = 64
"""Notes that a node keeps."""

_MASK = (1 << 64) - 1
_SLICE = Struct(">BH")

key_hash = xxh3_64_intdigest
mark = xxh3_64_intdigest
"""What an object adds to the digest: ``mark(key, stamp)``."""


def stamp_of(epoch: int, seq: int) -> int:
    """The stamp of an operation, by the epoch that it was first proposed in and its number."""
    return (epoch << SEQ_BITS) + seq & _MASK


class Slice(NamedTuple):
    """The objects whose key hash begins with the ``bits`` bits of ``number``."""

    bits: int
    number: int

    def encode(self) -> bytes:
        return _SLICE.pack(self.bits, self.number)

    @classmethod
    def decode(cls, data: bytes) -> Slice | None:
        """None: it is no slice, but the digest of the whole bucket that is asked for."""
        if len(data) != _SLICE.size:
            return None
        bits, number = _SLICE.unpack(data)
        return cls(bits, number) if bits <= SLICE_BITS_MAX and number >> bits == 0 else None


def slices(objects: int) -> Iterator[Slice]:
    """All slices of a bucket with so many objects."""
    bits = min((max(0, objects - 1) // SLICE_OBJECTS).bit_length(), SLICE_BITS_MAX)
    return (Slice(bits, number) for number in range(1 << bits))


class Note(NamedTuple):
    """What a copy held when an operation was carried out."""

    position: int
    """The stamp of that operation."""
    objects: int
    digest: int
    stamps: Mapping[int, int] | None
    """Of a slice: by key hash the stamp of each object in it."""
    unsettled: Collection[int] = ()
    """Key hashes of which this node is ahead of its log; nothing is to be concluded of them."""


def take_note(
    bucket: Bucket, position: int, part: Slice | None, unsettled: Iterable[bytes]
) -> Note:
    """The state of a bucket's objects, those that expire left out."""
    stamps = None if part is None else _stamps(bucket, part)
    return Note(
        position,
        len(bucket.objects),
        bucket.digest & _MASK,
        stamps,
        {key_hash(key) for key in unsettled},
    )


def _stamps(bucket: Bucket, part: Slice) -> dict[int, int]:
    shift = 64 - part.bits
    hashed = ((key_hash(key), item) for key, item in bucket.objects.items())
    return {
        hash_: item.stamp
        for hash_, item in hashed
        if hash_ >> shift == part.number and not item.expires_at
    }


class Notes:
    """The last note of each bucket; the oldest goes when there are too many."""

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, bucket: int, note: Note) -> None:
        self._notes.pop(bucket, None)
        while len(self._notes) >= NOTES_MAX:
            del self._notes[next(iter(self._notes))]
        self._notes[bucket] = note

    def last(self, bucket: int) -> Note | None:
        return self._notes.get(bucket)

    def at(self, bucket: int, position: int) -> Note | None:
        """The note that was taken there, if it still is the last one."""
        note = self._notes.get(bucket)
        return note if note is not None and note.position == position else None


def pack(stamps: Mapping[int, int]) -> bytes:
    """Pairs of key hash and stamp, 16 bytes each."""
    pairs = array("Q")
    for pair in stamps.items():
        pairs.extend(pair)
    return pairs.tobytes()


def unpack(data: bytes) -> dict[int, int]:
    """Raises ValueError if they are no pairs."""
    pairs = array("Q")
    pairs.frombytes(data)
    if len(pairs) % 2:
        raise ValueError(f"{len(pairs)} numbers are no pairs")
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


class Difference(NamedTuple):
    """Key hashes of which a copy differs from the primary's."""

    missing: list[int]
    """The copy lacks them, as it may when it has no room."""
    stale: list[int]
    """The copy has another write: it must not."""
    extra: list[int]
    """The primary lacks them."""


def difference(primary: Note, copy: Mapping[int, int]) -> Difference:
    """How a copy's slice differs from the primary's, both as of the same operation."""
    ours = primary.stamps or {}
    sure = primary.unsettled
    return Difference(
        [h for h in ours if h not in copy and h not in sure],
        [h for h, stamp in ours.items() if copy.get(h, stamp) != stamp and h not in sure],
        [h for h in copy if h not in ours and h not in sure],
    )


class MissingCopies:
    """How many objects members in sync have no copy of, as far as their primary, this node, knows.

    A member tells how many it gave up; comparing tells how many it lacks.
    """

    def __init__(self) -> None:
        self._missing: dict[int, dict[Member, int]] = {}

    def add(self, bucket: int, member: Member, count: int) -> None:
        """It gave up so many more."""
        here = self._missing.setdefault(bucket, {})
        here[member] = here.get(member, 0) + count

    def set(self, bucket: int, counts: Mapping[Member, int]) -> None:
        """So many each member lacks; others are none of this bucket's any more."""
        kept = {member: count for member, count in counts.items() if count}
        if kept:
            self._missing[bucket] = kept
        else:
            self._missing.pop(bucket, None)

    def members(self, bucket: int) -> Collection[Member]:
        """Those that lack something."""
        return self._missing.get(bucket, {}).keys()

    def buckets(self, member: Member) -> list[int]:
        """Where this one lacks something."""
        return [bucket for bucket, here in self._missing.items() if member in here]

    def retain(self, members: Mapping[int, Collection[Member]]) -> None:
        """Forget all but these buckets of ours and their members."""
        for bucket, here in list(self._missing.items()):
            others = members.get(bucket, ())
            self.set(bucket, {m: n for m, n in here.items() if m in others})

    @property
    def total(self) -> int:
        return sum(sum(here.values()) for here in self._missing.values())


class Turns:
    """Which bucket is compared next: those in doubt, and between them all in turn."""

    def __init__(self, doubts_between: int = 3) -> None:
        self._doubtful: dict[int, None] = {}
        self._members: dict[int, object] = {}
        self._between = doubts_between
        self._since = 0
        self._last = -1

    def doubt(self, bucket: int) -> None:
        """Compare it soon."""
        self._doubtful[bucket] = None

    def next(self, buckets: Mapping[int, object]) -> int | None:
        """One of ``buckets``, whose values say who is in step; a change of these is a doubt.

        None: the next turn is one of those that are for doubts, and there are none.
        """
        for bucket, members in buckets.items():
            if self._members.get(bucket) != members:
                self._doubtful[bucket] = None
        self._members = dict(buckets)
        if self._since < self._between:
            self._since += 1
            return self._doubt(buckets)
        self._since = 0
        self._last = min(
            buckets, key=lambda bucket: (bucket <= self._last, bucket), default=self._last
        )
        return self._last if buckets else None

    def _doubt(self, buckets: Mapping[int, object]) -> int | None:
        while self._doubtful:
            bucket = next(iter(self._doubtful))
            del self._doubtful[bucket]
            if bucket in buckets:
                return bucket
        return None
