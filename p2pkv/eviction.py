"""Which entry to give up first. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

E = TypeVar("E", bound=Hashable)


class EvictionPolicy(Protocol[E]):
    """Candidates for eviction. Entries that must never go are not added, or removed again."""

    def add(self, entry: E, soft: bool = False) -> None:
        """Makes an entry that is none a candidate; a *soft* one goes when no other is left."""

    def remove(self, entry: E) -> None:
        """Takes an entry out. Raises KeyError if it is no candidate."""

    def touch(self, entry: E) -> None:
        """Notes an access. An entry that is no candidate is ignored."""

    def touch_batch(self, entries: Sequence[E]) -> None:
        """Notes accesses of a chain, head first, such that its tail is given up first."""

    def victims(self) -> Iterator[E]:
        """Candidates in the order in which to give them up, each at most once.

        The caller may remove the entry that it was just given. One that it leaves there is taken
        to be in use, and counts as touched.
        """

    def __len__(self) -> int: ...

    def __contains__(self, entry: object) -> bool: ...


class LRU(Generic[E]):
    """Least recently used first; two queues, so that soft-pinned entries come last.

    Each operation is O(1); a batch of touches runs without a line of Python per entry.
    """

    __slots__ = ("_plain", "_soft")

    def __init__(self) -> None:
        self._plain: OrderedDict[E, None] = OrderedDict()
        self._soft: OrderedDict[E, None] = OrderedDict()

    def add(self, entry: E, soft: bool = False) -> None:
        (self._soft if soft else self._plain)[entry] = None

    def remove(self, entry: E) -> None:
        (self._plain if entry in self._plain else self._soft).pop(entry)

    def touch(self, entry: E) -> None:
        if entry in self._plain:
            self._plain.move_to_end(entry)
        elif entry in self._soft:
            self._soft.move_to_end(entry)

    def touch_batch(self, entries: Sequence[E]) -> None:
        try:
            deque(map(self._plain.move_to_end, reversed(entries)), maxlen=0)
        except KeyError:  # soft or pinned ones among them; doing the first ones twice is harmless
            for entry in reversed(entries):
                self.touch(entry)

    def victims(self) -> Iterator[E]:
        for queue in (self._plain, self._soft):
            for _ in range(len(queue)):
                if not queue:
                    break
                entry = next(iter(queue))
                yield entry
                if entry in queue:
                    queue.move_to_end(entry)

    def __len__(self) -> int:
        return len(self._plain) + len(self._soft)

    def __contains__(self, entry: object) -> bool:
        return entry in self._plain or entry in self._soft

    def validate(self) -> None:
        """Raises AssertionError if an entry is in both queues."""
        both = self._plain.keys() & self._soft.keys()
        assert not both, f"both plain and soft: {both}"
