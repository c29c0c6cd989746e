"""Values on their way out of the arena: as few frames as possible, none copied if large.

A frame costs tens of microseconds to send without a copy, a copy of 256 KiB about as much. So
values that lie next to each other in the arena, as those of one batch put do, leave as one piece
(with the headers between them; the receiver is told the positions), and what lies scattered and
small is joined.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.buffers import Run
from p2pkv.objects import Object
from p2pkv.store import Store
from p2pkv.wire import Buffer

GAP_MAX = 128
"""Bytes between two values that are sent along rather than ending the piece: header, padding."""

RUN_MAX = 4 << 20
"""A longer piece is cut between two values: the receiver's allocator maps (and faults in) fresh
memory for very large frames, which halves the rate."""

JOIN_MAX = 256 << 10
"""Pieces below this are copied and joined."""


class Payload:
    """Collects the frames of one message; ``starts[i]`` is the position of value i."""

    def __init__(self, store: Store) -> None:
        self.frames: list[Buffer | Run] = []
        self.starts: list[int] = []
        self._store = store
        self._view = store.arena.view
        self._position = 0
        self._small: list[memoryview] = []
        self._runs: list[tuple[int, int, Sequence[Object]]] = []

    def add_all(self, items: Sequence[Object]) -> None:
        """Append the values of committed objects, in order."""
        starts, position = self.starts, self._position
        begin = end = -1
        first = 0
        for i, item in enumerate(items):
            offset = item.offset
            together = 0 <= offset - end <= GAP_MAX and offset + item.size - begin <= RUN_MAX
            if not together or begin < 0:
                if begin >= 0:
                    self._piece(begin, end, items[first:i])
                    position += end - begin
                begin, first = offset, i
            starts.append(position + offset - begin)
            end = offset + item.size
        if begin >= 0:
            self._piece(begin, end, items[first:])
            position += end - begin
        self._position = position

    def add_part(self, item: Object, start: int, length: int) -> None:
        """Append a part of one value."""
        self.starts.append(self._position)
        begin = item.offset + start
        self._piece(begin, begin + length, (item,))
        self._position += length

    def _piece(self, begin: int, end: int, items: Sequence[Object]) -> None:
        if end - begin < JOIN_MAX:
            if end > begin:
                self._small.append(self._view[begin:end])
            return
        self._flush()
        store = self._store
        store.acquire_batch(items)
        later = store.release_later
        self.frames.append(Run(self._view[begin:end], lambda: later.extend(items)))

    def _flush(self) -> None:
        if self._small:
            self.frames.append(b"".join(self._small))
            self._small = []

    def finish(self) -> list[Buffer | Run]:
        self._flush()
        return self.frames
