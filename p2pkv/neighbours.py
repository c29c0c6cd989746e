"""Nodes on the same host: values are taken from their memory instead of being sent.

The sender holds what it names until it has the answer. Should it have given up meanwhile (because
this node was paused, say), the header before each value tells: it is cleared before the memory is
used for anything else, and versions never come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from p2pkv.objects import Object
from p2pkv.shared_memory import SharedArena
from p2pkv.types import Member

Source = tuple[str, int, bytes]
"""File, bytes and proof of a node's memory."""

NEIGHBOURS_MAX = 64
"""Memories that are kept mapped; the one that was mapped first goes."""


class Place(NamedTuple):
    """A value in the sender's memory, and the object that is to hold it."""

    item: Object
    offset: int
    version: int


class Neighbours:
    """The memories of other nodes on this host, mapped when first needed."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._mapped: dict[Member, tuple[Source, SharedArena]] = {}
        self.pulled_bytes = 0

    def pull(self, sender: Member, source: Source | None, places: Sequence[Place]) -> bool:
        """Copy values. False: the memory cannot be read here, or it is no longer what it was."""
        arena = self._arena(sender, source)
        if arena is None or not all(arena.holds(p.offset, p.item.size) for p in places):
            return False
        view = self._view
        targets = [view[p.item.offset : p.item.offset + p.item.size] for p in places]
        arena.read([p.offset for p in places], targets)
        self.pulled_bytes += sum(p.item.size for p in places)
        return all(arena.unchanged(p.item.key, p.offset, p.item.size, p.version) for p in places)

    def _arena(self, sender: Member, source: Source | None) -> SharedArena | None:
        known = self._mapped.get(sender)
        if known is not None and known[0] == source:
            return known[1]
        arena = SharedArena.open(*source) if source is not None else None
        if source is None or arena is None:
            return None
        while len(self._mapped) >= NEIGHBOURS_MAX:
            del self._mapped[next(iter(self._mapped))]
        self._mapped[sender] = (source, arena)
        return arena
