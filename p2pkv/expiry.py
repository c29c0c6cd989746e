"""When entries expire: a heap whose stale items are dropped when they surface. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

_SLACK = 1024


class Timed(Protocol):
    """Something with a time at which it expires, in monotonic nanoseconds; 0: never."""

    expires_at: int


T = TypeVar("T", bound=Timed)


class ExpiryHeap(Generic[T]):
    """Entries by ``expires_at``, which only ``set`` may change. O(log n) each.

    A changed time leaves a stale item behind. The heap holds at most 1,024 items and two for each
    entry that it held when it was last added to.
    """

    __slots__ = ("_heap", "_numbers", "timed")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._numbers = count()
        self.timed = 0
        """How many entries have a time."""

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, entry: T, expires_at: int) -> None:
        """Changes when ``entry`` expires; 0: never, as for one that is gone."""
        self.timed += (expires_at > 0) - (entry.expires_at > 0)
        entry.expires_at = expires_at
        if not expires_at:
            return
        if len(self._heap) >= 2 * self.timed + _SLACK:
            self._compact()
        heappush(self._heap, (expires_at, next(self._numbers), entry))

    def due(self, now: int, limit: int) -> Iterator[T]:
        """Entries whose time is over, the longest first; the caller must ``set`` each anew.

        Looks at no more than ``limit`` items, stale ones included.
        """
        heap = self._heap
        for _ in range(limit):
            if not heap or heap[0][0] > now:
                return
            expires_at, _, entry = heappop(heap)
            if entry.expires_at == expires_at:
                yield entry

    def _compact(self) -> None:
        latest = {id(item[2]): item for item in self._heap if item[2].expires_at == item[0]}
        self._heap[:] = latest.values()
        heapify(self._heap)

    def entries(self) -> Iterator[T]:
        """Entries with a time, in no order (for checks)."""
        return (entry for expires_at, _, entry in self._heap if entry.expires_at == expires_at)
