"""Counts of what the halves did since they were last asked. Any thread may add."""

from __future__ import annotations

import threading
from collections import Counter

COUNTS = {
    "lookups": "Lookups",
    "lookups_unavailable": "Lookups of which the store did not answer all",
    "lookup_seconds": "Time of lookups",
    "hit_blocks": "Blocks found by lookups, from the start of the sequence",
    "missed_blocks": "Blocks not found by lookups",
    "loaded_blocks": "Blocks loaded, of each worker",
    "loaded_bytes": "Bytes of them",
    "load_seconds": "Time of loads",
    "load_failed_blocks": "Blocks found but not loaded: computed instead",
    "saved_blocks": "Blocks saved, of each worker",
    "saved_bytes": "Bytes of them",
    "save_seconds": "Time of saves",
    "save_failed_blocks": "Blocks not saved: refused by the store, or dropped before",
}
"""Each with what it counts."""


class Tally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: float) -> None:
        """Names are those of COUNTS."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count  # type: ignore[assignment]

    def take(self) -> dict[str, float]:
        """What was added since the last call; what was not is left out."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: count for name, count in counts.items() if count}
