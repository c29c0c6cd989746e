"""Which entry to give up first. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

E = TypeVar("E", bound=Hashable)

SPARED_MAX: Final = 256
"""Entries that one search for victims may pass over because they were read elsewhere."""


class EvictionPolicy(Protocol[E]):
    """Candidates for eviction. Entries that must never go are not added, or removed again."""

    def add(self, entry: E, soft: bool = False) -> None:
        """Makes an entry that is none a candidate; a *soft* one goes when no other is left."""

    def remove(self, entry: E) -> None:
        """Takes an entry out. Raises KeyError if it is no candidate."""

    def replace_batch(self, gone: Sequence[E], come: Sequence[E]) -> None:
        """``remove`` for each that is gone, ``add`` for each that came, and ``touch_batch`` of
        those: none is soft."""

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

    ``was_read`` tells of accesses that nobody notes: whether there was one since it was asked last.
    An entry of which it is true gets a second chance (as in CLOCK: F. Corbato, "A paging experiment
    with the Multics system", 1968).
    """

    __slots__ = ("_plain", "_soft", "_was_read")

    def __init__(self, was_read: Callable[[E], bool] | None = None) -> None:
        self._was_read = was_read
        self._plain: OrderedDict[E, None] = OrderedDict()
        self._soft: OrderedDict[E, None] = OrderedDict()

    def add(self, entry: E, soft: bool = False) -> None:
        (self._soft if soft else self._plain)[entry] = None

    def remove(self, entry: E) -> None:
        (self._plain if entry in self._plain else self._soft).pop(entry)

    def replace_batch(self, gone: Sequence[E], come: Sequence[E]) -> None:
        plain = self._plain
        deque(map(plain.pop, gone), maxlen=0)
        for entry in reversed(come):  # an OrderedDict's update takes far longer
            plain[entry] = None

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
            spared: list[E] = []
            for _ in range(len(queue)):
                if not queue:
                    break
                entry = next(iter(queue))
                if len(spared) < SPARED_MAX and self._was_read and self._was_read(entry):
                    spared.append(entry)
                else:
                    yield entry
                if entry in queue:
                    queue.move_to_end(entry)
            for entry in spared:
                if entry in queue:
                    yield entry

    def __len__(self) -> int:
        return len(self._plain) + len(self._soft)

    def __contains__(self, entry: object) -> bool:
        return entry in self._plain or entry in self._soft

    def validate(self) -> None:
        """Raises AssertionError if an entry is in both queues."""
        both = self._plain.keys() & self._soft.keys()
        assert not both, f"both plain and soft: {both}"
