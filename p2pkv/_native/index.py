"""The published index of a node (see index.h): the node's side, and that of readers.

The memory must be zero at first, aligned to 64 bytes, and shared with the readers. All calls of a
``Writer`` come from one thread at a time; ``Reader`` is for any.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from p2pkv import _native
from p2pkv._native import _python_function
from p2pkv.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

KEY_BYTES_MAX: Final = 128
"""Longer keys are not published: their owner is asked."""

STREAMING_MIN: Final = 1 << 20
"""From here on copies go around the caches, where what is read seldom is, nor is needed soon."""

NOWHERE: Final = -2
"""``slot`` of an object that is not published."""
REFUSED: Final = -1
"""``slot`` of one that was to be, but found no room."""
UNFIT: Final = -3
"""``slot`` of one whose key is long."""

_ffi, _lib = _native.core
_MAP = Struct("@NNQ")
_size, _object, _address = ctypes.c_size_t, ctypes.py_object, ctypes.c_size_t
_publish = _python_function(4, _address, _object)
_withdraw = _python_function(5, _address, _object)
_held = _python_function(6, _address, _object)
_take_use = _python_function(7, _address, ctypes.c_longlong)
_figures = _python_function(8, _address)
_exists = _python_function(9, _object, _object)
_get_into = _python_function(
    10, _object, _object, _object, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_ulonglong
)
_get = _python_function(11, _object, _object, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_ulonglong)
_places = _python_function(12, _object, _object)


def bytes_for(slots: int, buckets: int) -> int:
    """Bytes of memory for an index of so many slots (rounded up to groups of eight)."""
    return int(_lib.p2pkv_index_bytes(slots, buckets))


class Figures(NamedTuple):
    """An index at one moment; from ``hits`` on, sums over all readers."""

    slots: int
    published: int
    refused: int
    """Objects that are not published, for want of room or because of their key's length."""
    hits: int
    """Values that were read, or whose place was told."""
    misses: int
    """Values that were to be read, and were not there."""
    present: int
    """Keys that were seen to be there."""
    absent: int
    """Keys that were seen not to be there."""
    torn: int
    """Values that changed while they were copied."""


class Writer:
    """The node's side. ``close`` before the memory is unmapped."""

    __slots__ = ("_close", "_hold", "_keeper", "address", "buckets")

    def __init__(self, memory: Buffer, buckets: int) -> None:
        """Makes an index that fills the memory. Raises ConfigError if it has no room for one."""
        _native.require()
        self._hold = _ffi.from_buffer(memory, require_writable=True)
        self.address = int(_ffi.cast("uintptr_t", self._hold))
        self.buckets = buckets
        self._close = _lib.p2pkv_index_close
        self._keeper = _lib.p2pkv_index_create(self.address, len(self._hold), buckets)
        if not self._keeper:
            raise ConfigError(f"index of {len(self._hold)} bytes: {os.strerror(_ffi.errno)}")

    def publish(self, objects: Iterable[Any]) -> None:
        """Objects of the store, just committed or changed; sets their ``slot``.

        Each is to be withdrawn once it has left, but not before what takes the place of its key was
        published: so a key that is there all the time is in the index all the time.
        """
        _publish(self.address, objects)

    def withdraw(self, objects: Iterable[Any]) -> None:
        """Before their memory is given back, and before anybody is told that they left."""
        _withdraw(self.address, objects)

    def held(self, objects: Iterable[Any]) -> list[Any]:
        """Those, of objects that were withdrawn, whose values threads of this process use."""
        result: list[Any] = _held(self.address, objects)
        return result

    def take_use(self, slot: int) -> bool:
        """Whether what is there was read since this was asked last."""
        return bool(_take_use(self.address, slot))

    def open_gates(self, untils: array[int], first: int = 0) -> None:
        """For each bucket from ``first`` on: nobody else serves it before, by the monotonic clock.

        ``untils`` are unsigned 64-bit nanoseconds (``array('Q')``); 0: closed.
        """
        address, count = untils.buffer_info()
        _lib.p2pkv_index_open_gates(self.address, address, first, count)

    def close_gate(self, bucket: int) -> None:
        """Before anybody else may serve the bucket."""
        _lib.p2pkv_index_close_gate(self.address, bucket)

    def figures(self) -> Figures:
        return Figures(*_figures(self.address))

    def close(self) -> None:
        """Readers ask the node from here on. May be called again."""
        if self._keeper:
            keeper, self._keeper = self._keeper, 0
            self._close(keeper)

    def __del__(self) -> None:
        if getattr(self, "_keeper", 0):
            self.close()


class Map:
    """An index and its arena, mapped by a reader."""

    __slots__ = ("_arena", "_index", "arena_bytes", "packed")

    def __init__(self, index: Buffer, arena: Buffer) -> None:
        """Raises ValueError if no index of our layout is there."""
        _native.require()
        self._index, self._arena = _ffi.from_buffer(index), _ffi.from_buffer(arena)
        at = int(_ffi.cast("uintptr_t", self._index))
        if not _lib.p2pkv_index_check(at, len(self._index)):
            raise ValueError("not an index, or one of another layout")
        base = int(_ffi.cast("uintptr_t", self._arena))
        self.arena_bytes = len(self._arena)
        self.packed = _MAP.pack(at, base, self.arena_bytes)

    @property
    def alive(self) -> bool:
        """Whether its node lives and serves by it."""
        return bool(_lib.p2pkv_index_alive(int(_ffi.cast("uintptr_t", self._index))))


class Reader:
    """Reads by the indexes of several nodes, without asking them. Immutable; for any thread.

    Keys may be str (UTF-8) or bytes. What an index does not tell, or must not be taken from there
    at the moment, is left to the owner; so is everything that is wrong with a key or a target. An
    index tells that a key is not there, if it is not long, its node serves the bucket, and there
    was room for all objects of that.
    """

    __slots__ = ("_packed", "maps")

    def __init__(self, maps: Sequence[Map]) -> None:
        self.maps = tuple(maps)
        self._packed = b"".join(m.packed for m in self.maps)

    def exists(self, keys: list[Any]) -> bytes:
        """A byte for each key: 0: it is not there; 1: it is; 2: ask its owner."""
        result: bytes = _exists(self._packed, keys)
        return result

    def places(self, keys: list[Any]) -> list[tuple[int, int, int, int] | None]:
        """Where each value lies: number of its map, offset, size, version; None: ask its owner.

        Counts as a use. Bytes that were copied from there are the value's if the header before them
        is of this version still afterwards.
        """
        result: list[tuple[int, int, int, int] | None] = _places(self._packed, keys)
        return result

    def get_into(
        self,
        keys: list[Any],
        targets: list[Any],
        bytes_max: int = 1 << 62,
        threads: int = 1,
        streaming_min: int = STREAMING_MIN,
    ) -> tuple[list[int | None], list[int]]:
        """Copies values into writable buffers: the size of each, None if it is not there; and the
        numbers of the keys whose owners are to be asked.

        Copies up to ``bytes_max`` bytes together.
        A target whose owner is to be asked may have been written to.
        """
        result: tuple[list[int | None], list[int]] = _get_into(
            self._packed, keys, targets, bytes_max, threads, streaming_min
        )
        return result

    def get(
        self,
        keys: list[Any],
        bytes_max: int,
        threads: int = 1,
        streaming_min: int = STREAMING_MIN,
    ) -> tuple[list[bytes | None], list[int]]:
        """Values of up to ``bytes_max`` bytes together, None for what is not there; and the
        numbers of the keys whose owners are to be asked."""
        result: tuple[list[bytes | None], list[int]] = _get(
            self._packed, keys, bytes_max, threads, streaming_min
        )
        return result
