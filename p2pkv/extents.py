"""Extents of objects, and the tokens of their readers.

An object that is given up keeps its extent, bytes untouched, until its last reader is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from p2pkv.allocator import Allocator
from p2pkv.arena import Arena
from p2pkv.errors import Conflict
from p2pkv.objects import CLEARED_HEADER, HEADER_BYTES, METADATA_BYTES, Object, State

_ALLOCATED, _COMMITTED, _RETIRING, _GONE = State


class Users(Protocol):
    """Who else looks at values: threads that find them in the published index."""

    def held(self, objects: Iterable[Object]) -> list[Object]:
        """Those of the objects, which nobody can find any more, that are being used."""


class Room:
    """Memory that is not an object's yet: somebody fills it from its start, value by value."""

    __slots__ = ("end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __len__(self) -> int:
        return self.end - self.start


class Extents:
    """The arena's space as objects take it and give it back."""

    __slots__ = (
        "allocator",
        "lent",
        "metadata_bytes",
        "release_later",
        "retiring",
        "retiring_bytes",
        "rooms",
        "users",
        "view",
    )

    def __init__(self, arena: Arena, users: Users | None = None) -> None:
        self.view = arena.view
        self.users = users
        self.allocator = Allocator(arena.size)
        self.metadata_bytes = 0
        """Cost of all objects that have an extent."""
        self.retiring: dict[Object, None] = {}
        self.retiring_bytes = 0
        self.rooms: set[Room] = set()
        self.lent: dict[Object, None] = {}
        """Of the retiring those without readers, which ``users`` still told of."""
        self.release_later: deque[Object] = deque()

    @property
    def value_bytes_max(self) -> int:
        """The largest value that an empty arena holds."""
        return self.allocator.size - HEADER_BYTES

    def take(self, lengths: Sequence[int]) -> list[int] | None:
        """Offsets of values in extents of ``lengths`` bytes, in one run if there is one.

        None, and nothing taken: not all fit.
        """
        offsets = self.allocator.alloc_batch(lengths)
        return None if offsets is None else [offset + HEADER_BYTES for offset in offsets]

    def take_one(self, length: int) -> int | None:
        """Offset of one value, or None."""
        offset = self.allocator.alloc(length)
        return None if offset is None else offset + HEADER_BYTES

    # -- room ahead of objects

    @property
    def rooms_bytes(self) -> int:
        return sum(map(len, self.rooms))

    def open_room(self, offset: int) -> Room:
        """Makes what ``take_one`` gave a room."""
        start = offset - HEADER_BYTES
        room = Room(start, start + self.allocator.size_of(start))
        self.rooms.add(room)
        return room

    def carve(self, room: Room, lengths: Sequence[int]) -> list[int]:
        """Offsets of values in extents of ``lengths`` bytes from the start of the room.

        Raises ValueError if it is too small, or was closed.
        """
        if room not in self.rooms:
            raise ValueError("the room was closed")
        starts = self.allocator.split(room.start, lengths)
        room.start += sum(lengths)
        if room.start == room.end:
            self.rooms.discard(room)
        return [start + HEADER_BYTES for start in starts]

    def give_up(self, offsets: Iterable[int]) -> None:
        """Frees extents that were carved and became no objects."""
        self.allocator.free_batch([offset - HEADER_BYTES for offset in offsets])

    def close_room(self, room: Room) -> None:
        """Frees what is left of it. May be called again."""
        if room in self.rooms:
            self.rooms.discard(room)
            self.allocator.free(room.start)

    # -- objects

    def charge(self, items: Sequence[Object]) -> None:
        """Counts the records of new objects."""
        self.metadata_bytes += len(items) * METADATA_BYTES + sum([len(o.key) for o in items])

    def give_back(self, items: Collection[Object]) -> int:
        """Frees the extents of objects that nobody reads; those of the others wait.

        Answers the size of the largest free extent that came of it.
        """
        waiting = [item for item in items if item.readers]
        if waiting:
            self._retire(waiting)
            items = [item for item in items if not item.readers]
        lent = self._lent(items)
        if lent:
            self._retire(lent)
            items = [item for item in items if item not in self.lent]
        return self._free(items)

    def _retire(self, items: Collection[Object]) -> None:
        for item in items:
            item.state = _RETIRING
            self.retiring[item] = None
            self.retiring_bytes += item.extent_bytes

    def _lent(self, items: Collection[Object]) -> Sequence[Object]:
        """Notes and answers those whose values threads of this process still use."""
        if self.users is None or not items:
            return ()
        lent = self.users.held(items)
        self.lent.update(dict.fromkeys(lent))
        return lent

    def _free(self, items: Collection[Object]) -> int:
        view = self.view
        starts: list[int] = []
        for item in items:
            item.state = _GONE
            start = item.offset - HEADER_BYTES
            view[start : item.offset] = CLEARED_HEADER
            starts.append(start)
        self.metadata_bytes -= len(items) * METADATA_BYTES + sum([len(o.key) for o in items])
        return self.allocator.free_batch(starts)

    def acquire_batch(self, items: Sequence[Object]) -> None:
        """One token for each object. Raises Conflict, taking none, if one has left the store.

        One that is still being read may have more readers: its bytes stay until the last is done.
        """
        for item in items:
            if item.state is not _ALLOCATED and item.state > _COMMITTED and not item.readers:
                raise Conflict(f"object of {len(item.key)}-byte key is {item.state.name}")
        for item in items:
            item.readers += 1

    def release_batch(self, items: Sequence[Object]) -> None:
        """Gives one token of each object back.

        Raises ValueError, after all others, if one has no token.
        """
        done: list[Object] = []
        foreign: list[Object] = []
        for item in items:
            if item.readers <= 0:
                foreign.append(item)
                continue
            item.readers -= 1
            if item.state is _RETIRING and not item.readers:
                done.append(item)
        self._finish(done)
        if foreign:
            raise ValueError(f"no token is held on {foreign[0]!r}")

    def _finish(self, items: Sequence[Object]) -> None:
        if self._lent(items):
            items = [item for item in items if item not in self.lent]
        for item in items:
            del self.retiring[item]
            self.retiring_bytes -= item.extent_bytes
        if items:
            self._free(items)

    def reap(self) -> int:
        """Takes what is in ``release_later`` at the moment; answers how many tokens."""
        if self.lent:
            lent, self.lent = self.lent, {}
            self._finish([item for item in lent if not item.readers])
        queue = self.release_later
        items = [queue.popleft() for _ in range(len(queue))]
        self.release_batch(items)
        return len(items)
