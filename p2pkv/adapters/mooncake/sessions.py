"""Values that are written and read layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.mooncake.codes import ErrorCode, codes
from p2pkv.adapters.mooncake.pointers import Addresses, PointerCalls
from p2pkv.adapters.mooncake.types import ReplicateConfig
from p2pkv.buffers import copy
from p2pkv.errors import Conflict, InvalidArgument, Miss, OutOfMemory

STAGED_BYTES_MAX = 1 << 30
"""Values that are being written, of all sessions of a store."""


class Staged(NamedTuple):
    """A value that is being written."""

    value: memoryview
    options: dict[str, Any]


class SessionCalls(PointerCalls):
    """A value that is written in ranges is put together here and stored at the session's end.

    Until then nobody else sees anything of it. ``STAGED_BYTES_MAX`` (1 GiB) bounds what is put
    together at one time; more is refused with -200.
    """

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[str, Staged] = {}
        self._staged_bytes = 0
        self._reading: set[str] = set()
        self._sessions_lock = threading.Lock()

    # -- writing

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Begin to write values of these sizes: the code of each."""
        options = self._options(config)

        def begin(_: Cache, names: list[bytes], wanted: list[Any]) -> list[Any]:
            return [self._stage(key, size, options) for key, size in wanted]

        outcomes = self._batch("batch_put_session_start", keys, (keys, sizes), self._wanted, begin)
        return codes(outcomes)

    def _wanted(self, key: str, size: int) -> tuple[str, int]:
        if not 0 < size <= self._limits.value_bytes_max:
            limit = self._limits.value_bytes_max
            raise InvalidArgument(f"size = {size}: must be 1 to {limit} bytes")
        return key, size

    def _stage(self, key: str, size: int, options: dict[str, Any]) -> Any:
        with self._sessions_lock:
            if key in self._staged:
                return Conflict(f"key {key!r}: is being written already")
            if self._staged_bytes + size > STAGED_BYTES_MAX:
                return OutOfMemory(f"{size} bytes more than may be written at one time")
            self._staged[key] = Staged(memoryview(bytearray(size)), options)
            self._staged_bytes += size
        return True

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Addresses],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ranges of values: the bytes that were written of each, or its code."""
        outcomes = self._batch(
            "batch_put_from_multi_buffer_ranges",
            keys,
            (keys, all_buffer_ptrs, all_sizes, all_dst_offsets),
            self._pieces,
            lambda _, names, pieces: [_fill(each) for each in pieces],
        )
        return [o if isinstance(o, int) else codes([o])[0] for o in outcomes]

    def _pieces(
        self, key: str, pointers: Addresses, sizes: Sequence[int], offsets: Sequence[int]
    ) -> list[tuple[memoryview, memoryview]]:
        """Where bytes go, and where they are. Raises InvalidArgument, before any is copied."""
        if not len(pointers) == len(sizes) == len(offsets):
            raise InvalidArgument(
                f"{len(pointers)} addresses, {len(sizes)} sizes, {len(offsets)} offsets"
            )
        staged = self._staged.get(key)
        if staged is None:
            raise InvalidArgument(f"key {key!r}: is not being written")
        pieces = []
        for pointer, size, offset in zip(pointers, sizes, offsets, strict=True):
            source = self._memory.view(pointer, size)
            if offset < 0 or offset + size > len(staged.value):
                raise InvalidArgument(
                    f"{size} bytes at {offset}: the value has {len(staged.value)}"
                )
            pieces.append((staged.value[offset : offset + size], source))
        return pieces

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Store what was written: the code of each. A key that fails is not written any more."""
        staged = [self._unstage(key) for key in keys]

        def store(cache: Cache, names: list[bytes], values: list[Any]) -> list[Any]:
            outcomes: list[Any] = [Miss("it is not being written")] * len(names)
            for items in _alike(values):
                stored = cache.store(
                    [names[i] for i in items],
                    [values[i].value for i in items],
                    if_absent=True,
                    **values[items[0]].options,
                )
                for i, outcome in zip(items, stored, strict=True):
                    outcomes[i] = outcome
            return outcomes

        outcomes = self._batch("batch_put_session_end", keys, (staged,), lambda value: value, store)
        return codes(outcomes)

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Forget what was written: 0, or -704 where nothing was."""
        return [
            0 if self._unstage(key) is not None else int(ErrorCode.OBJECT_NOT_FOUND) for key in keys
        ]

    def _unstage(self, key: str) -> Staged | None:
        with self._sessions_lock:
            staged = self._staged.pop(key, None)
            self._staged_bytes -= len(staged.value) if staged is not None else 0
        return staged

    # -- reading

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Begin to read values in ranges: 0 where a key is there, else its code."""
        sizes = self._sizes("batch_get_session_start", keys)
        found = codes(Miss() if size is None else size for size in sizes)
        with self._sessions_lock:
            self._reading.update(k for k, code in zip(keys, found, strict=True) if not code)
        return found

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Addresses],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ranges of values: the bytes of each, or its code.

        A key that was evicted meanwhile is -704: a session keeps nothing from eviction.
        """
        lists = (all_buffer_ptrs, all_sizes, all_src_offsets)
        outcomes = self._batch(
            "batch_get_into_multi_buffer_ranges", keys, (keys, *lists), self._parts_of, _prepared
        )
        results = codes(outcomes)
        good = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, list)]
        flat = [(i, place, part) for i in good for place, part in outcomes[i]]
        read = self._read_ranges(
            "batch_get_into_multi_buffer_ranges",
            [keys[i] for i, _, _ in flat],
            [place for _, place, _ in flat],
            [part for _, _, part in flat],
        )
        for (i, _, _), size in zip(flat, read, strict=True):
            results[i] = size if size < 0 or results[i] < 0 else results[i] + size
        return results

    def _parts_of(
        self, key: str, pointers: Addresses, sizes: Sequence[int], offsets: Sequence[int]
    ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        if not len(pointers) == len(sizes) == len(offsets):
            raise InvalidArgument(
                f"{len(pointers)} addresses, {len(sizes)} sizes, {len(offsets)} offsets"
            )
        if key not in self._reading:
            raise InvalidArgument(f"key {key!r}: is not being read")
        return [
            ((pointer, size), (offset, size))
            for pointer, size, offset in zip(pointers, sizes, offsets, strict=True)
        ]

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """0, also for keys that are not being read."""
        with self._sessions_lock:
            self._reading.difference_update(keys)
        return 0

    def _end_sessions(self) -> None:
        with self._sessions_lock:
            self._staged.clear()
            self._staged_bytes = 0
            self._reading.clear()


def _prepared(_: Cache, names: list[bytes], prepared: list[Any]) -> list[Any]:
    return prepared


def _fill(pieces: list[tuple[memoryview, memoryview]]) -> int:
    for target, source in pieces:
        copy(target, source)
    return sum(len(target) for target, _ in pieces)


def _alike(values: Sequence[Staged | None]) -> Iterator[list[int]]:
    """Indices of the values that are stored with the same options."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, staged in enumerate(values):
        if staged is not None:
            groups.setdefault(tuple(sorted(staged.options.items())), []).append(i)
    yield from groups.values()
