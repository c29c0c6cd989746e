"""How the elements of a tensor lie in memory: strides, and the runs of bytes they make. Pure.

Strides are in bytes. The *order* of a tensor is its dimensions from the outermost to the innermost
as they lie in memory, the largest stride first. A tensor is stored packed, in its order: so what is
dense in memory, transposed or not, is one run, and comes back with the same strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from p2pkv.errors import InvalidArgument

DIMENSIONS_MAX = 64


class Layout(NamedTuple):
    """Where the elements are, from the first one's address on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """From one element to the next of each dimension, in bytes."""
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last. Strides must not be negative."""
        if 0 in self.shape:
            return 0
        return self.itemsize + sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )

    @property
    def reversed(self) -> bool:
        """Whether some dimension runs backwards through memory."""
        return any(s < 0 and n > 1 for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, or lie interwoven as no slicing of a dense tensor does."""
        end = self.itemsize
        for dimension in reversed(_dimensions(self.shape, self.strides)):
            stride = abs(self.strides[dimension])
            if stride < end:
                return True
            end += (self.shape[dimension] - 1) * stride
        return False

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions as they lie in memory. Empty: as they are in the shape (C order)."""
        if 0 in self.shape:
            return ()
        large = _dimensions(self.shape, self.strides)
        if large == sorted(large):
            return ()
        return (*large, *(i for i, n in enumerate(self.shape) if n == 1))

    def runs(self) -> tuple[int, list[int]]:
        """Bytes of each contiguous run, the longest there are, and where each begins, in order."""
        if 0 in self.shape:
            return 0, []
        length, outer = self.itemsize, _dimensions(self.shape, self.strides)
        while outer and self.strides[outer[-1]] == length:
            length *= self.shape[outer.pop()]
        starts = [0]
        for dimension in outer:
            steps = range(
                0, self.shape[dimension] * self.strides[dimension], self.strides[dimension]
            ) if self.strides[dimension] else [0] * self.shape[dimension]  # fmt: skip
            starts = [start + step for start in starts for step in steps]
        return length, starts


def _dimensions(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Those of more than one element, the largest stride first."""
    large = [i for i, n in enumerate(shape) if n > 1]
    return sorted(large, key=lambda i: -abs(strides[i]))


def packed(shape: Sequence[int], itemsize: int, order: Sequence[int] = ()) -> Layout:
    """The layout without gaps, with the dimensions in this order (empty: C order)."""
    strides = [0] * len(shape)
    step = itemsize
    for dimension in reversed(order or range(len(shape))):
        strides[dimension] = step
        step *= max(1, shape[dimension])
    return Layout(tuple(shape), tuple(strides), itemsize)


def check_order(order: Sequence[int], dimensions: int) -> None:
    """Raises InvalidArgument unless it names each dimension once, or is empty."""
    if order and sorted(order) != list(range(dimensions)):
        raise InvalidArgument(f"order = {list(order)}: must name {dimensions} dimensions once each")
