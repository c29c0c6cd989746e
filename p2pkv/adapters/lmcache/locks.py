"""Which chunks are locked by how many lookups. Pure.

A pin of p2pkv's is there or not, and ends by itself; LMCache locks as often as it looks up, and
unlocks as often. What is never unlocked, since LMCache forgot it, is forgotten here as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Locks:
    """Counts by key, for ``ttl_ns`` from the last lookup. ``now`` is monotonic nanoseconds.

    At most ``keys_max`` keys are known; the pins of those that are forgotten end with their time.
    """

    def __init__(self, ttl_ns: int, keys_max: int = 1 << 20) -> None:
        self._ttl = ttl_ns
        self._keys_max = keys_max
        self._held: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """How often, and until when; the oldest first."""
        self.reaped_total = 0

    def __len__(self) -> int:
        return len(self._held)

    def lock(self, keys: Iterable[bytes], now: int) -> None:
        """These have been pinned."""
        self._reap(now)
        for key in keys:
            count, _ = self._held.pop(key, (0, 0))
            self._held[key] = (count + 1, now + self._ttl)
        while len(self._held) > self._keys_max:
            self._held.popitem(last=False)
            self.reaped_total += 1

    def unlock(self, keys: Iterable[bytes], now: int) -> list[bytes]:
        """One lock less on each. Returns those that nobody holds any more, to be unpinned."""
        self._reap(now)
        free = []
        for key in keys:
            if (held := self._held.get(key)) is None:
                continue
            count, until = held
            if count > 1:
                self._held[key] = (count - 1, until)
            else:
                del self._held[key]
                free.append(key)
        return free

    def _reap(self, now: int) -> None:
        while self._held:
            key, (_, until) = next(iter(self._held.items()))
            if until > now:
                return
            del self._held[key]
            self.reaped_total += 1


__all__ = ["Locks"]
