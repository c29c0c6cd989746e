"""Copying bytes without holding the GIL where that pays."""

from __future__ import annotations

import ctypes

OFF_GIL_MIN = 256 << 10
"""From here on a copy takes longer than giving the GIL away and taking it back."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` into ``target``; both contiguous bytes of the same length."""
    n = len(source)
    if n < OFF_GIL_MIN or source.readonly or target.readonly:
        target[:] = source
        return
    kind = ctypes.c_char * n
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), n)
