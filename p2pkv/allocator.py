"""Offset allocator over ``[0, size)``: extents of a memory that this module never touches. Pure.

Two-level segregated fit (M. Masmano, I. Ripoll, A. Crespo, J. Real, "TLSF: a new dynamic memory
allocator for real-time systems", ECRTS 2004): free extents are binned by size, sixteen bins to
each power of two, and a bitmap finds the first bin that is large enough. Extents and their sizes
are kept outside the memory, so freed neighbours are found in a table instead of a block header.

Unlike plain TLSF it also looks into the bin that the size itself falls into, so that an
allocation fails only if no free extent is large enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

GRANULE = 64
"""Alignment of offsets and sizes, in bytes: one cache line."""

_FINE_BITS = 4
_FINE_BINS = 1 << _FINE_BITS


def round_up(size: int) -> int:
    """``size`` in bytes as a whole number of granules."""
    return (size + GRANULE - 1) & -GRANULE


def bin_of(size: int) -> int:
    """The bin of a free extent: exact below 32 granules, then sixteen bins per power of two."""
    granules = size // GRANULE
    shift = granules.bit_length() - _FINE_BITS - 1
    return granules if shift <= 0 else (shift << _FINE_BITS) + (granules >> shift)


class Allocator:
    """Hands out extents of ``[0, size)``; every offset and length is a multiple of GRANULE.

    ``size`` is in bytes, at least one granule, and rounded down to whole granules.
    """

    __slots__ = ("_bins", "_bitmap", "_ends", "_free", "_used", "free_bytes", "size")

    def __init__(self, size: int) -> None:
        if size < GRANULE:
            raise ValueError(f"size = {size}: must be at least {GRANULE} bytes")
        self.size = size & -GRANULE
        self.free_bytes = 0
        self._bins: dict[int, dict[int, dict[int, None]]] = {}  # bin -> size -> offsets
        self._bitmap = 0
        self._free: dict[int, int] = {}  # offset -> size
        self._ends: dict[int, int] = {}  # end -> offset, of free extents
        self._used: dict[int, int] = {}  # offset -> size
        self._insert(0, self.size)
        self.free_bytes = self.size

    # -- figures

    @property
    def used_bytes(self) -> int:
        return self.size - self.free_bytes

    @property
    def used_extents(self) -> int:
        return len(self._used)

    @property
    def free_extents(self) -> int:
        return len(self._free)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free extent: what a single allocation could get."""
        return max(self._bins[self._bitmap.bit_length() - 1]) if self._bitmap else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside the largest free extent: 0 is none."""
        return 1 - self.largest_free / self.free_bytes if self.free_bytes else 0.0

    def size_of(self, offset: int) -> int:
        """Bytes of the allocated extent at ``offset``. Raises ValueError if there is none."""
        try:
            return self._used[offset]
        except KeyError:
            raise _not_allocated(offset) from None

    # -- allocation

    def alloc(self, size: int) -> int | None:
        """The offset of a new extent of at least ``size`` bytes, or None if none is free.

        Raises ValueError if ``size`` is not positive.
        """
        needed = _checked(size)
        offset = self._carve(needed)
        if offset is not None:
            self._used[offset] = needed
        return offset

    def alloc_batch(self, sizes: Sequence[int]) -> list[int] | None:
        """One extent for each size, or None and nothing changed.

        They lie one after the other, ascending, if one free extent can hold them all.
        Raises ValueError if a size is not positive.
        """
        if not sizes:
            return []
        _checked(min(sizes))
        needed = _rounded(sizes)
        start = self._carve(sum(needed))
        if start is None:
            return self._alloc_scattered(needed)
        offsets = list(accumulate(needed[:-1], initial=start))
        self._used.update(zip(offsets, needed, strict=True))
        return offsets

    def split(self, offset: int, sizes: Sequence[int]) -> list[int]:
        """Cuts extents of these sizes off the start of an allocated one; what is left stays one.

        Raises ValueError if there is none at ``offset``, it is too small, or a size is not
        positive.
        """
        whole = self.size_of(offset)
        if not sizes:
            return []
        _checked(min(sizes))
        needed = _rounded(sizes)
        total = sum(needed)
        if total > whole:
            raise ValueError(f"sizes of {total} bytes: the extent at {offset} has {whole}")
        offsets = list(accumulate(needed[:-1], initial=offset))
        self._used.update(zip(offsets, needed, strict=True))
        if total < whole:
            self._used[offset + total] = whole - total
        return offsets

    def _alloc_scattered(self, sizes: list[int]) -> list[int] | None:
        offsets: list[int] = []
        for size in sizes:
            offset = self.alloc(size)
            if offset is None:
                self.free_batch(offsets)
                return None
            offsets.append(offset)
        return offsets

    def free(self, offset: int) -> int:
        """Gives an extent back; answers the size of the free extent that it is now part of.

        Raises ValueError if ``offset`` is not that of an allocated extent.
        """
        size = self._used.pop(offset, None)
        if size is None:
            raise _not_allocated(offset)
        return self._release(offset, size)

    def free_batch(self, offsets: Iterable[int]) -> int:
        """Gives extents back; answers the size of the largest free extent that came of it.

        Runs of neighbours, in either direction, cost one step together. Raises ValueError, with
        nothing changed, if one is not allocated or given twice.
        """
        largest = 0
        start = end = -1
        for offset, size in self._disown(offsets):
            if offset == end:
                end += size
            elif offset + size == start:
                start = offset
            else:
                if end > start:
                    largest = max(largest, self._release(start, end - start))
                start, end = offset, offset + size
        return max(largest, self._release(start, end - start)) if end > start else largest

    def _disown(self, offsets: Iterable[int]) -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        pop = self._used.pop
        try:
            for offset in offsets:
                taken.append((offset, pop(offset)))
        except KeyError:
            self._used.update(taken)
            raise _not_allocated(offset) from None
        return taken

    # -- the free extents

    def _carve(self, size: int) -> int | None:
        """The lowest part of a fitting free extent; what is left of it stays free."""
        found = self._fitting(size)
        if found is None:
            return None
        offset, extent = found
        self._remove(offset, extent)
        if extent > size:
            self._insert(offset + size, extent - size)
        self.free_bytes -= size
        return offset

    def _fitting(self, size: int) -> tuple[int, int] | None:
        """(offset, size) of a free extent: of this very size, else of a larger bin, else any."""
        own = bin_of(size)
        sizes = self._bins.get(own)
        if sizes is None or size not in sizes:
            above = self._bitmap >> (own + 1)
            if above:
                sizes = self._bins[own + (above & -above).bit_length()]
                extent = next(reversed(sizes))
            else:
                extent = min((s for s in sizes or () if s > size), default=0)
                if not extent:
                    return None
        else:
            extent = size
        assert sizes is not None
        return next(reversed(sizes[extent])), extent

    def _release(self, offset: int, size: int) -> int:
        self.free_bytes += size
        after = self._free.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        before = self._ends.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            size += offset - before
            offset = before
        self._insert(offset, size)
        return size

    def _insert(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._ends[offset + size] = offset
        index = bin_of(size)
        sizes = self._bins.get(index)
        if sizes is None:
            sizes = self._bins[index] = {}
            self._bitmap |= 1 << index
        offsets = sizes.get(size)
        if offsets is None:
            sizes[size] = {offset: None}
        else:
            offsets[offset] = None

    def _remove(self, offset: int, size: int) -> None:
        del self._free[offset]
        del self._ends[offset + size]
        index = bin_of(size)
        sizes = self._bins[index]
        offsets = sizes[size]
        del offsets[offset]
        if not offsets:
            del sizes[size]
            if not sizes:
                del self._bins[index]
                self._bitmap &= ~(1 << index)

    def validate(self) -> None:
        """Raises AssertionError unless the extents tile the memory and the tables agree."""
        position, was_free = 0, False
        extents = [(o, s, True) for o, s in self._free.items()]
        extents += [(o, s, False) for o, s in self._used.items()]
        for offset, size, free in sorted(extents):
            assert offset == position, f"gap or overlap at {position}: next extent at {offset}"
            assert size > 0, f"empty extent at {offset}"
            assert size % GRANULE == 0, f"extent of {size} bytes at {offset}"
            assert not (free and was_free), f"free neighbours not merged at {offset}"
            position, was_free = offset + size, free
        assert position == self.size, f"extents end at {position}, not at {self.size}"
        assert self.free_bytes == sum(self._free.values()), "free_bytes is wrong"
        assert self._ends == {o + s: o for o, s in self._free.items()}, "table of ends is wrong"
        binned = {o: s for sizes in self._bins.values() for s, os in sizes.items() for o in os}
        assert binned == self._free, "bins and free extents differ"
        assert all(bin_of(s) == b for b, sizes in self._bins.items() for s in sizes), "wrong bin"
        assert all(os for sizes in self._bins.values() for os in sizes.values()), "empty size"
        assert self._bitmap == sum(1 << b for b in self._bins), "bitmap is wrong"


def _checked(size: int) -> int:
    if size <= 0:
        raise ValueError(f"size = {size}: must be positive")
    return (size + GRANULE - 1) & -GRANULE


def _rounded(sizes: Sequence[int]) -> list[int]:
    if sizes.count(sizes[0]) == len(sizes):  # as is usual
        return [round_up(sizes[0])] * len(sizes)
    return [(size + GRANULE - 1) & -GRANULE for size in sizes]


def _not_allocated(offset: int) -> ValueError:
    return ValueError(f"offset = {offset}: not the start of an allocated extent")
