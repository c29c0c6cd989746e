"""Counting hits once. Pure.

A scheduler asks for the blocks of a waiting request at every step. Only the first answer tells how
well the cache does: the same blocks, asked for again by the same request, are not counted again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class HitCounter:
    """Hits and misses in blocks, by first resolution. Remembers ``requests_max`` requests."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._counted: OrderedDict[Hashable, int] = OrderedDict()
        self.hits_total = 0
        self.misses_total = 0
        self.unavailable_total = 0
        """Misses because nobody who could have known was asked or answered; also in misses."""

    def resolved(self, request: Hashable, hits: int, misses: int, unavailable: int = 0) -> None:
        """An answer for the first ``hits + misses`` blocks of a request, hits first.

        None is a request of its own. A request that asks for more blocks than before is counted
        for those that are new.
        """
        seen = self._seen(request, hits + misses) if request is not None else 0
        new_hits = max(0, hits - seen)
        new_misses = max(0, hits + misses - max(seen, hits))
        self.hits_total += new_hits
        self.misses_total += new_misses
        self.unavailable_total += min(unavailable, new_misses)

    def _seen(self, request: Hashable, total: int) -> int:
        seen = self._counted.pop(request, 0)
        self._counted[request] = max(seen, total)
        if len(self._counted) > self._requests_max:
            self._counted.popitem(last=False)
        return seen

    def finished(self, request: Hashable) -> None:
        """The request will not ask again."""
        self._counted.pop(request, None)
