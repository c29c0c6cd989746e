"""What SGLang's metrics want to know: pages and rates of each transfer since they were asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from p2pkv import clock

TRANSFERS_MAX = 4096
"""So many are kept if nobody asks."""

Transfer = tuple[int, float]
"""Pages, and GiB a second."""


class Tally:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: deque[Transfer] = deque(maxlen=TRANSFERS_MAX)
        self._written: deque[Transfer] = deque(maxlen=TRANSFERS_MAX)

    @contextmanager
    def _timed(self, kept: deque[Transfer]) -> Iterator[Callable[[int, int], None]]:
        begin = clock.monotonic()

        def count(pages: int, size: int) -> None:
            seconds = max(1, clock.monotonic() - begin) / clock.SECOND_NS
            with self._lock:
                kept.append((pages, size / (1 << 30) / seconds))

        yield count

    def reading(self) -> Any:
        """A context whose value is to be called with pages and bytes at the end."""
        return self._timed(self._read)

    def writing(self) -> Any:
        return self._timed(self._written)

    def take(self, metrics: Any) -> Any:
        """Fill in SGLang's StorageMetrics, and forget."""
        with self._lock:
            read, written = list(self._read), list(self._written)
            self._read.clear()
            self._written.clear()
        metrics.prefetch_pgs += [pages for pages, _ in read]
        metrics.prefetch_bandwidth += [rate for _, rate in read]
        metrics.backup_pgs += [pages for pages, _ in written]
        metrics.backup_bandwidth += [rate for _, rate in written]
        return metrics


__all__ = ["Tally"]
