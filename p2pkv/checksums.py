"""Checksums of values: XXH3 of 64 bits, over all parts of a value in their order. Pure.

0 stands for "none". A value whose checksum happens to be 0 counts as one that has none: one in
2^64. The native module sums a batch in one call, without the GIL; where it was not built, the
package xxhash does, value by value.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64

from p2pkv import _native
from p2pkv.parts import Parts, flat, sizes_of
from p2pkv.wire import Checksums

WRITING = frozenset({"always", "remote"})
"""Policies of a client that gives a checksum with each value it puts."""

READING = {"always": Checksums.ALL, "remote": Checksums.SENT}
"""Which checksums a client asks for, so as to compare them with what it reads."""

ARRIVING = {"always": Checksums.ALL, "remote": Checksums.SENT}
"""Which values a node compares with their checksums before it keeps them."""


def checksums_of(values: Sequence[Parts]) -> list[int]:
    """The checksum of each value."""
    if _native.available:
        return _native.checksums(flat(values), sizes_of(values))
    return [_by_package(value) for value in values]


def _by_package(value: Parts) -> int:
    state = xxh3_64()
    for part in flat([value]):
        state.update(part)
    return state.intdigest()
