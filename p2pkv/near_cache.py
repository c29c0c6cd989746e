"""A client's own copies of values that cannot change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from p2pkv import clock
from p2pkv.operations import Key, Operations, encode_key
from p2pkv.routing import Operation


class NearCache:
    """A bounded cache of write-once values, which cannot change while they exist.

    A key that is deleted or expires elsewhere may be served for ``age_max_ns`` more.
    """

    def __init__(self, bytes_max: int, age_max_ns: int = 60 * clock.SECOND_NS) -> None:
        self._bytes_max = bytes_max
        self._age_max = age_max_ns
        self._values: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes, now: int) -> bytes | None:
        with self._lock:
            entry = self._values.get(key)
            if entry is None:
                return None
            if now - entry[1] > self._age_max:
                self._drop(key)
                return None
            self._values.move_to_end(key)
            return entry[0]

    def put(self, key: bytes, value: bytes, now: int) -> None:
        with self._lock:
            self._drop(key)
            self._values[key] = (value, now)
            self._bytes += len(key) + len(value)
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._values)))

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._values.pop(key, None)
        if entry is not None:
            self._bytes -= len(key) + len(entry[0])


def near_batch_get(
    ops: Operations, near: NearCache, keys: list[Key], timeout: float | None
) -> Operation[list[bytes | None]]:
    """``batch_get`` that asks the near cache first, and feeds it."""
    encoded = [encode_key(key, ops.limits) for key in keys]
    now = ops.clock()
    results = [near.get(key, now) for key in encoded]
    missing = [i for i, value in enumerate(results) if value is None]
    if missing:
        once, values = yield from ops.batch_get_once([encoded[i] for i in missing], timeout)
        for i, value in zip(missing, values, strict=True):
            results[i] = value
        for j in once:
            near.put(encoded[missing[j]], values[j], now)
    return results
