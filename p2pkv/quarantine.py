"""Memory that a client on another host may still write to. No network, no clock.

A client that writes by one-sided access is given extents, and says when it is done. Where it does
not, nothing that the node knows of its own stops a write that is under way: the adapter goes on
while the client is stopped, and a client that wakes may begin one. So such an extent waits:

* After the client said that it has let go of its writes, or its kernel closed its connection (it
  is dead, or has closed its engine before), no write begins and none is sent again. What is on its
  way in the network, or in the teardown of a dead process, ends within ``wait_ns``. Only time in
  which this node ran is counted: over TCP the last write may lie in our own receive queue.
* A connection that ended in any other way (no answer, nonsense) proves nothing: the client may be
  cut off and come back in an hour. Then the extent waits for the end of the node. Both are bounded,
  as ``full`` says that nobody may be given more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from p2pkv.objects import Object
from p2pkv.store import Store

SHARE_MAX: Final = 8
"""At most one part in so many of the arena, give or take a batch."""
TICK_MAX_NS: Final = 200_000_000
"""What one look counts at most, so that time in which the node was stopped does not."""


class Quarantine:
    """Holds a token of each object in it, which keeps the extent from being used."""

    def __init__(self, store: Store, wait_ns: int) -> None:
        self.remote: set[int] = set()
        """Allocations that clients on other hosts may be writing to at the moment."""
        self.held_bytes = 0
        self.unproven_bytes = 0
        """Of those the ones that wait for the end of the node."""
        self._store = store
        self._wait_ns = wait_ns
        self._waiting: deque[tuple[int, Sequence[Object]]] = deque()
        self._ran_ns = 0
        self._looked_ns = 0

    @property
    def full(self) -> bool:
        return self.held_bytes > self._store.arena.size // SHARE_MAX

    def add(self, items: Sequence[Object], proven: bool) -> None:
        """Take over the tokens of these. ``proven``: no write to them can begin any more."""
        size = sum(item.extent_bytes for item in items)
        self.held_bytes += size
        if proven:
            self._waiting.append((self._ran_ns + self._wait_ns, items))
        else:
            self.unproven_bytes += size

    def reap(self, now: int) -> int:
        """Give back what has waited long enough; how many bytes. To be called often."""
        if self._looked_ns:
            self._ran_ns += min(now - self._looked_ns, TICK_MAX_NS)
        self._looked_ns = now
        freed = 0
        while self._waiting and self._waiting[0][0] <= self._ran_ns:
            _, items = self._waiting.popleft()
            freed += sum(item.extent_bytes for item in items)
            self._store.release_batch(items)
        self.held_bytes -= freed
        return freed


__all__ = ["SHARE_MAX", "TICK_MAX_NS", "Quarantine"]
