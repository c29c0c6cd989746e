"""Mooncake Store over TCP, and with memory shared with the storage process of the same host.

Imports nothing of p2pkv: it runs on the Python that has the wheel. All calls are those without a
copy into Python objects where there are such.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .work import MIB, Store, Work, check

REMOVED_AT_ONCE = 1000


class Mooncake(Store):
    def __init__(self, master: int, staging_bytes: int = 512 * MIB) -> None:
        self.s = _store()
        where = ("127.0.0.1", "P2PHANDSHAKE", 0, staging_bytes, "tcp", "", f"127.0.0.1:{master}")
        check(self.s.setup(*where) == 0, "setup")

    def allocate(self, nbytes: int) -> Any:
        memory = bytearray(nbytes)
        self._register(memory)
        return memory

    def _register(self, memory: bytearray) -> None:
        check(self.s.register_buffer(_address(memory), len(memory)) == 0, "register_buffer")

    def source(self, nbytes: int) -> tuple[int, Any]:
        """Memory to put from, and its address; not freed before the process ends."""
        memory = bytearray(nbytes)
        self._register(memory)
        return _address(memory), memory

    def load(self, work: Work) -> None:
        super().load(work)
        size = work.size
        self.keys = work.keys
        if getattr(self, "room", 0) < work.n * size:
            self.room = work.n * size
            self.begin, self.memory = self.source(self.room)
        for i, value in enumerate(work.values):
            ctypes.memmove(self.begin + i * size, value, size)
        self.sources = [self.begin + i * size for i in range(work.n)]
        target = _address(work.out)
        self.targets = [target + i * size for i in range(work.batch)]
        self.sizes = [size] * work.batch

    def clear(self) -> None:
        for low in range(0, len(self.keys), REMOVED_AT_ONCE):
            self.s.batch_remove(self.keys[low : low + REMOVED_AT_ONCE], True)

    def put(self, i: int) -> None:
        check(self.s.put_from(self.keys[i], self.sources[i], self.w.size) == 0, "put_from")

    def get(self, i: int) -> Any:
        return self.s.get(self.keys[i])

    def get_into(self, i: int) -> None:
        check(self.s.get_into(self.keys[i], self.targets[0], self.w.size) == self.w.size, "get")

    def batch_put(self, low: int, high: int) -> None:
        keys, sizes = self.keys[low:high], self.sizes[: high - low]
        check(not any(self.s.batch_put_from(keys, self.sources[low:high], sizes)), "batch_put_from")

    def overwrite(self, low: int, high: int) -> None:
        keys, sizes = self.keys[low:high], self.sizes[: high - low]
        codes = self.s.batch_upsert_from(keys, self.sources[low:high], sizes)
        check(not any(codes), "batch_upsert_from")

    def batch_get(self, low: int, high: int) -> Sequence[Any]:
        return list(self.s.get_batch(self.keys[low:high]))

    def batch_get_into(self, low: int, high: int) -> None:
        n = high - low
        got = self.s.batch_get_into(self.keys[low:high], self.targets[:n], self.sizes[:n])
        check(min(got) == self.w.size, "batch_get_into")

    def views(self, low: int, high: int) -> Sequence[Any]:
        return [memoryview(b) for b in self.s.batch_get_buffer(self.keys[low:high])]

    def exists(self, keys: list[str]) -> Sequence[bool]:
        return [found == 1 for found in self.s.batch_is_exist(keys)]

    def match(self, keys: list[str]) -> int:
        found = self.s.batch_is_exist(keys)
        return next((i for i, there in enumerate(found) if there != 1), len(keys))

    def close(self) -> None:
        self.s.close()


class MooncakeOnHost(Mooncake):
    """Puts from, and gets into, one pool of memory that the storage process has mapped too."""

    def __init__(self, port: int, pool_bytes: int, staging_bytes: int = 512 * MIB) -> None:
        self.s = _store()
        check(self.s.setup_dummy(pool_bytes, staging_bytes, f"127.0.0.1:{port}") == 0, "setup")
        self.pool, self.left = self.s.alloc_from_mem_pool(pool_bytes), pool_bytes
        check(bool(self.pool), "alloc_from_mem_pool")
        check(self.s.register_buffer(self.pool, pool_bytes) == 0, "register_buffer")

    def allocate(self, nbytes: int) -> Any:
        return self.source(nbytes)[1]

    def source(self, nbytes: int) -> tuple[int, Any]:
        if nbytes > self.left:
            raise MemoryError(f"{nbytes} bytes: the pool has {self.left} left")
        begin, taken = self.pool, -(-nbytes // 4096) * 4096
        self.pool, self.left = self.pool + taken, self.left - taken
        return begin, memoryview((ctypes.c_char * nbytes).from_address(begin)).cast("B")


def _store() -> Any:
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore()


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
