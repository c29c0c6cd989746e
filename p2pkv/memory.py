"""Memory that a program has registered, so that it can name parts of it by address.

Engines hand out pointers into pools of their own. A pool is registered once; afterwards an
``(address, length)`` inside of it stands for a buffer, and one outside of every pool is refused:
a stray pointer is an error, not a crash.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from numbers import Integral
from typing import Any, TypeGuard

from p2pkv.buffers import address_of
from p2pkv.errors import InvalidArgument

ADDRESS_MAX = (1 << 64) - 1


def is_place(value: Any) -> TypeGuard[tuple[int, int]]:
    """Whether it is an ``(address, length)``: a tuple of two whole numbers."""
    if value.__class__ is not tuple or len(value) != 2:
        return False
    address, length = value
    if address.__class__ is int and length.__class__ is int:
        return True
    return isinstance(address, Integral) and isinstance(length, Integral)


class RegisteredMemory:
    """Pools by address. Any thread may use it."""

    def __init__(self) -> None:
        self._pools: tuple[tuple[int, ...], tuple[memoryview, ...]] = ((), ())
        """Addresses in order, and the memory there. Replaced whole: readers need no lock."""
        self._lock = threading.Lock()

    def register(self, memory: Any, length: int | None = None) -> int:
        """Take in a buffer, or ``length`` bytes at an address. Returns the address.

        A buffer is kept alive, and cannot be resized, until it is unregistered. Raises
        InvalidArgument for what is empty, no contiguous host memory, or overlaps a pool.
        """
        view = _view_at(memory, length) if isinstance(memory, Integral) else _view(memory, length)
        address = address_of(view)
        with self._lock:
            starts, views = self._pools
            i = bisect_right(starts, address)
            if i and starts[i - 1] + len(views[i - 1]) > address:
                raise _overlap(address, len(view), starts[i - 1], len(views[i - 1]))
            if i < len(starts) and address + len(view) > starts[i]:
                raise _overlap(address, len(view), starts[i], len(views[i]))
            self._pools = (
                (*starts[:i], address, *starts[i:]),
                (*views[:i], view, *views[i:]),
            )
        return address

    def unregister(self, memory: Any) -> None:
        """Let go of a pool, given as it was registered or by its address.

        Raises InvalidArgument if it is not registered.
        """
        address = int(memory) if isinstance(memory, Integral) else address_of(_view(memory, None))
        with self._lock:
            starts, views = self._pools
            if address not in starts:
                raise InvalidArgument(f"address {address:#x}: no registered buffer begins there")
            i = starts.index(address)
            self._pools = (starts[:i] + starts[i + 1 :], views[:i] + views[i + 1 :])

    def view(self, address: int, length: int) -> memoryview:
        """The memory there. Raises InvalidArgument unless it lies within one pool."""
        starts, views = self._pools
        i = bisect_right(starts, address) - 1
        if i >= 0 and length >= 0:
            start, pool = address - starts[i], views[i]
            if start + length <= len(pool):
                return pool[start : start + length]
        raise InvalidArgument(
            f"{length} bytes at address {address:#x}: not within a registered buffer; "
            "register_buffer must be given the pool first"
        )


def _view_at(address: Any, length: int | None) -> memoryview:
    if not isinstance(length, Integral) or length < 1:
        raise InvalidArgument(f"length = {length!r}: must be 1 or more bytes with an address")
    if not 0 < address <= ADDRESS_MAX - length:
        raise InvalidArgument(f"address = {address:#x}: with {length} bytes it is no memory")
    return memoryview((ctypes.c_ubyte * int(length)).from_address(int(address))).cast("B")


def _view(buffer: Any, length: int | None) -> memoryview:
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        where = " (device memory cannot be registered)" if _on_device(buffer) else ""
        raise InvalidArgument(
            f"buffer: must be host memory that offers the buffer protocol, or an address, "
            f"not {type(buffer).__name__}{where}"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument("buffer: must be contiguous (C order)")
    if not view.nbytes:
        raise InvalidArgument("buffer: is empty")
    if length is not None and length != view.nbytes:
        raise InvalidArgument(f"length = {length}: the buffer has {view.nbytes} bytes")
    return view.cast("B")


def _on_device(buffer: Any) -> bool:
    return hasattr(buffer, "__cuda_array_interface__")


def _overlap(address: int, size: int, other: int, other_size: int) -> InvalidArgument:
    return InvalidArgument(
        f"{size} bytes at {address:#x} overlap the registered {other_size} bytes at {other:#x}"
    )
