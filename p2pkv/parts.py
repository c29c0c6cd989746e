"""A value in parts: bytes that lie in several places, taken as one run in their order. Pure.

Most values lie in one piece and are a ``memoryview``; those that do not are a tuple of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Copy = Callable[[memoryview, memoryview], None]
"""Copies source into destination of the same length (arguments: destination, source)."""

Parts = memoryview | tuple[memoryview, ...]
"""The memory of one value, to be read or to be written."""

Piece = memoryview | bytes | bytearray

NOTHING = memoryview(bytearray())


def size_of(parts: Parts) -> int:
    """Bytes of all parts."""
    return len(parts) if isinstance(parts, memoryview) else sum(map(len, parts))


def sizes_of(values: Sequence[Parts]) -> list[int]:
    """Bytes of each value."""
    if tuple not in set(map(type, values)):
        return list(map(len, values))
    return [size_of(value) for value in values]


def flat(values: Sequence[Parts]) -> list[memoryview]:
    """The parts of all values, one after the other."""
    if tuple not in set(map(type, values)):
        return list(values)  # type: ignore[arg-type]
    pieces: list[memoryview] = []
    for value in values:
        if isinstance(value, memoryview):
            pieces.append(value)
        else:
            pieces += value
    return pieces


def cut(parts: Parts, start: int, size: int) -> Parts:
    """``size`` bytes from ``start`` on, which must be there."""
    if isinstance(parts, memoryview):
        return parts[start : start + size]
    pieces: list[memoryview] = []
    for part in parts:
        if start >= len(part):
            start -= len(part)
            continue
        piece = part[start : start + size]
        pieces.append(piece)
        start, size = 0, size - len(piece)
        if not size:
            break
    return tuple(pieces)


def fill(parts: Parts, source: memoryview, copy: Copy) -> None:
    """Copy the bytes of ``source`` into parts of the same size."""
    if isinstance(parts, memoryview):
        copy(parts, source)
        return
    at = 0
    for part in parts:
        end = at + len(part)
        if end > at:
            copy(part, source[at:end])
        at = end


def joined(pieces: Sequence[Piece], join_max: int) -> list[Piece]:
    """The same bytes in fewer pieces: runs of those up to ``join_max`` bytes are copied into one.

    For transports where a piece costs more than the copy of a small one. Empty ones are left out.
    """
    result: list[Piece] = []
    small: list[Piece] = []
    for piece in pieces:
        if len(piece) <= join_max:
            small.append(piece)
            continue
        if small:
            result.append(b"".join(small))
            small = []
        result.append(piece)
    if small:
        result.append(b"".join(small))
    return [piece for piece in result if piece]
