"""A queue of work that may be dropped, and is before anybody waits for it. Pure.

A cache that falls behind its engine must not hold the engine's memory: what finds no room is
refused at once, and what waited too long is not done any more. Both are counted.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from p2pkv.clock import SECOND_NS

T = TypeVar("T")


class BacklogLimits(NamedTuple):
    """Of what waits and of what is being done, together."""

    jobs_max: int = 1024
    bytes_max: int = 1 << 30
    age_max_ns: int = 30 * SECOND_NS
    """What has waited longer is dropped instead of done."""


class Entry(NamedTuple, Generic[T]):
    job: T
    size: int
    since: int
    """When it was offered."""


class Backlog(Generic[T]):
    """First in, first out. ``now`` is monotonic nanoseconds."""

    def __init__(self, limits: BacklogLimits) -> None:
        self._limits = limits
        self._waiting: deque[Entry[T]] = deque()
        self._open = True
        self.jobs = 0
        """Waiting, or being done."""
        self.bytes = 0
        self.dropped_full_total = 0
        self.dropped_old_total = 0
        self.done_total = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def offer(self, job: T, size: int, now: int) -> bool:
        """Take it in, or refuse it: there is no room, or the backlog is closed.

        A single job may be larger than ``bytes_max`` where nothing else is there.
        """
        limits = self._limits
        crowded = self.jobs and self.bytes + size > limits.bytes_max
        if not self._open or crowded or self.jobs >= limits.jobs_max:
            self.dropped_full_total += 1
            return False
        self._waiting.append(Entry(job, size, now))
        self.jobs += 1
        self.bytes += size
        return True

    def expire(self, now: int) -> list[T]:
        """Drop what has waited too long."""
        dropped: list[T] = []
        oldest = now - self._limits.age_max_ns
        while self._waiting and self._waiting[0].since < oldest:
            dropped.append(self._remove().job)
        self.dropped_old_total += len(dropped)
        return dropped

    def _remove(self) -> Entry[T]:
        entry = self._waiting.popleft()
        self._release(entry)
        return entry

    def _release(self, entry: Entry[T]) -> None:
        self.jobs -= 1
        self.bytes -= entry.size

    def take(self) -> Entry[T] | None:
        """The next job, to be done; ``done`` is to follow."""
        return self._waiting.popleft() if self._waiting else None

    def done(self, entry: Entry[T]) -> None:
        self._release(entry)
        self.done_total += 1

    def close(self) -> list[T]:
        """Refuse what is offered from now on. Returns what was still waiting."""
        self._open = False
        left = [entry.job for entry in self._waiting]
        for entry in self._waiting:
            self._release(entry)
        self._waiting.clear()
        self.dropped_full_total += len(left)
        return left
