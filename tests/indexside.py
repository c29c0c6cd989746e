"""An index with an arena of objects in one file, as a node has them; readers in any process."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from p2pkv._native import index
from p2pkv.objects import CLEARED_HEADER, HEADER_BYTES, Object, State, write_header
from p2pkv.wire import PutOptions

BUCKETS = 16
FOR_EVER = (1 << 64) - 1
PAGE = mmap.ALLOCATIONGRANULARITY


class Place:
    """The memory of a node without the node: an arena, and behind it an index."""

    def __init__(self, path: str, arena_bytes: int, slots: int) -> None:
        self.path = path
        self.arena_bytes = -(-arena_bytes // PAGE) * PAGE
        self.index_bytes = index.bytes_for(slots, BUCKETS)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self.arena_bytes + self.index_bytes)

    def mapped(self) -> tuple[mmap.mmap, mmap.mmap]:
        """Arena and index."""
        arena = mmap.mmap(self._file, self.arena_bytes)
        return arena, mmap.mmap(self._file, self.index_bytes, offset=self.arena_bytes)

    def writer(self) -> index.Writer:
        return index.Writer(self.mapped()[1], BUCKETS)

    def map(self) -> index.Map:
        arena, memory = self.mapped()
        return index.Map(memory, arena)

    def reader(self) -> index.Reader:
        return index.Reader([self.map()])

    def close(self) -> None:
        os.close(self._file)
        os.unlink(self.path)


@contextmanager
def place(arena_bytes: int = 1 << 20, slots: int = 256) -> Iterator[Place]:
    made = Place(tempfile.mktemp(prefix="p2pkv-test-", dir="/dev/shm"), arena_bytes, slots)
    try:
        yield made
    finally:
        made.close()


def an_object(
    key: bytes, offset: int = HEADER_BYTES, size: int = 64, version: int = 1, bucket: int = 0
) -> Object:
    made = Object(key, bucket, offset, size, size + HEADER_BYTES, PutOptions(), version=version)
    made.state = State.COMMITTED
    return made


def fill(arena: mmap.mmap, item: Object, value: bytes) -> None:
    """Write a value and its header."""
    arena[item.offset : item.offset + item.size] = value
    write_header(memoryview(arena), item)


def clear(arena: mmap.mmap, item: Object) -> None:
    arena[item.offset - HEADER_BYTES : item.offset] = CLEARED_HEADER


def open_all(writer: index.Writer, until: int = FOR_EVER) -> None:
    writer.open_gates(array("Q", [until] * BUCKETS))


def soon(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def keys_of(items: Iterable[Object]) -> list[bytes]:
    return [item.key for item in items]
