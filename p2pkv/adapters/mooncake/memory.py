"""Memory of the caller's, by address."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

from p2pkv.buffers import address_of
from p2pkv.errors import InvalidArgument

MAPS = Path("/proc/self/maps")


class BufferHandle(bytearray):
    """A value that was fetched: a buffer, with its address and its size."""

    def ptr(self) -> int:
        """Valid as long as the handle lives."""
        return address_of(memoryview(self)) if self else 0

    def size(self) -> int:
        return len(self)


class MooncakeHostMemAllocator:
    """Page-aligned memory by address."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def alloc(self, size: int) -> int:
        """The address of ``size`` fresh bytes, all zero; 0 if there are none to be had."""
        try:
            block = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        with self._lock:
            self._blocks[address] = block
        return address

    def free(self, ptr: int) -> None:
        """Give memory back, which must not be registered any more.

        An address that was not given out is ignored.
        """
        with self._lock:
            block = self._blocks.pop(ptr, None)
        if block is not None:
            block.close()


def check_mapped(address: int, size: int, maps: str | None = None) -> None:
    """Whether this process can read memory there: a stray pointer is an error, not a crash.

    The address space that a GPU's driver reserves for device memory cannot be read. Raises
    InvalidArgument.
    """
    end, at = address + size, address
    for line in (MAPS.read_text() if maps is None else maps).splitlines():
        span, mode = line.split(None, 2)[:2]
        low, _, high = span.partition("-")
        if int(high, 16) <= at or not mode.startswith("r"):
            continue
        if int(low, 16) > at:
            break
        at = int(high, 16)
        if at >= end:
            return
    raise InvalidArgument(
        f"{size} bytes at {address:#x}: not all of it is memory of this process that can be read "
        "(memory of a GPU cannot be registered)"
    )
