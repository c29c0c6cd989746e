"""Values that say which write made them, so that a torn or foreign one is found. Pure.

A value is ``tag|size|key|`` and then a pattern that follows from these, up to its size: each part
of it belongs to one write and no other.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from xxhash import xxh3_128_digest

_NAMES_BYTES_MAX = 2048


class Fault(enum.Enum):
    """What may be wrong with the bytes of a value."""

    TORN = "torn"
    """No write made these bytes."""
    FOREIGN = "foreign"
    """They were written, to another key."""


class Reading(NamedTuple):
    """Which write a value is of, and what is wrong with it."""

    tag: str
    fault: Fault | None


def make(key: str, tag: str, size: int) -> bytes:
    """A value of ``size`` bytes, or of a few more where the names do not fit in."""
    head = f"{tag}|{size}|{key}|".encode()
    pattern = xxh3_128_digest(head)
    missing = max(0, size - len(head))
    return head + (pattern * (missing // len(pattern) + 1))[:missing]


def read(key: str, value: bytes) -> Reading:
    """Which write made ``value``, found under ``key``."""
    names = value[:_NAMES_BYTES_MAX].split(b"|", 3)[:3]
    tag, size, owner = (name.decode(errors="replace") for name in (*names, b"", b"", b"")[:3])
    if not _is_size(size, len(value)) or make(owner, tag, int(size)) != value:
        return Reading(tag, Fault.TORN)
    return Reading(tag, None if owner == key else Fault.FOREIGN)


def _is_size(text: str, size_max: int) -> bool:
    """Nothing larger than the value itself is made because its bytes say so."""
    return text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= size_max


__all__ = ["Fault", "Reading", "make", "read"]
