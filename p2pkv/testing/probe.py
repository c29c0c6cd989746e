"""How soon a bucket is served again after its primary was killed: asks until it is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from typing import Any

from p2pkv import clock, ring
from p2pkv.testing.history import Record
from p2pkv.testing.recording import RecordedClient
from p2pkv.types import BucketId

PREFIX = "p/"
VALUE_BYTES = 256
GIVE_UP_S = 60.0


def keys_of_buckets(bucket_count: int) -> dict[BucketId, str]:
    """One key in each bucket."""
    found: dict[BucketId, str] = {}
    number = 0
    while len(found) < bucket_count:
        key = f"{PREFIX}{number}"
        found.setdefault(ring.bucket_of(key.encode(), bucket_count), key)
        number += 1
    return found


class Probe:
    """Writes to, and reads from, some buckets at once until each has answered. Blocking threads.

    Times count from ``since_ns``; ``tag`` makes its values differ from those of other probes.
    """

    def __init__(self, kv: RecordedClient, keys: Collection[str], since_ns: int, tag: str) -> None:
        self._kv = kv
        self._since_ns = since_ns
        self._tag = tag
        self._lock = threading.Lock()
        self.first_ack_s: list[float] = []
        self.first_read_s: list[float] = []
        self.unanswered = 0
        self._threads = [
            threading.Thread(target=act, args=(key,), daemon=True)
            for key in keys
            for act in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float = GIVE_UP_S + 30) -> None:
        """Wait until each bucket has answered, or was given up."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _write(self, key: str) -> None:
        number = 0

        def write() -> Record:
            nonlocal number
            number += 1
            return self._kv.put(key, f"{self._tag}.{number}", VALUE_BYTES)

        self._until_answered(write, self.first_ack_s)

    def _read(self, key: str) -> None:
        self._until_answered(lambda: self._kv.get(key), self.first_read_s)

    def _until_answered(self, ask: Callable[[], Record], times_s: list[float]) -> None:
        while (clock.monotonic() - self._since_ns) / 1e9 < GIVE_UP_S:
            record = ask()
            if record.acknowledged:
                with self._lock:
                    times_s.append(round((record.returned - self._since_ns) / 1e9, 4))
                return
        with self._lock:
            self.unanswered += 1


def quantiles(times_s: Collection[float]) -> dict[str, Any]:
    """The median, the 99th percentile (nearest rank) and the largest; and of how many."""
    ordered = sorted(times_s)
    if not ordered:
        return {"p50": None, "p99": None, "max": None, "count": 0}
    rank = [ordered[math.ceil(q * len(ordered)) - 1] for q in (0.5, 0.99)]
    return {"p50": round(rank[0], 4), "p99": round(rank[1], 4), "max": round(ordered[-1], 4),
            "count": len(ordered)}  # fmt: skip


__all__ = ["PREFIX", "Probe", "keys_of_buckets", "quantiles"]
