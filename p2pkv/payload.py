"""Values on their way out of the arena: as few frames as possible, none copied if large.

A frame costs tens of microseconds to send without a copy, a copy of 256 KiB about as much. So
values that lie next to each other in the arena, as those of one batch put do, leave as one piece
(with the headers between them; the receiver is told the positions), and what lies scattered and
small is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from p2pkv.buffers import Run
from p2pkv.objects import Object
from p2pkv.store import Store
from p2pkv.wire import Buffer


class Packing(NamedTuple):
    """What suits a transport."""

    gap_max: int
    """Bytes between two values that are sent along rather than ending the piece: header, padding.
    Negative: values leave one by one, packed back to back."""
    join_max: int
    """Pieces below this are copied and joined."""
    run_max: int
    """A longer piece is cut between two values."""


FRAMES = Packing(gap_max=128, join_max=256 << 10, run_max=4 << 20)
"""ZeroMQ. A receiver's allocator maps, and faults in, fresh memory for every very large frame,
which halves the rate; hence ``run_max``."""

STREAM = Packing(gap_max=-1, join_max=2 << 10, run_max=1 << 62)
"""A socket with gather and scatter: a piece costs well under a microsecond."""


class Payload:
    """Collects the frames of one message, none over ``frame_bytes_max`` if no value is.

    ``starts[i]`` is the position of value i; they stay empty where values are packed.
    """

    def __init__(self, store: Store, packing: Packing, frame_bytes_max: int) -> None:
        self.frames: list[Buffer | Run] = []
        self.starts: list[int] = []
        self._store = store
        self._packing = packing
        self._run_max = min(packing.run_max, frame_bytes_max)
        self._view = store.arena.view
        self._position = 0
        self._small: list[memoryview] = []
        self._small_bytes = 0

    def add_all(self, items: Sequence[Object]) -> None:
        """Append the values of committed objects, in order."""
        starts, position = self.starts, self._position
        gap_max, run_max = self._packing.gap_max, self._run_max
        begin = end = -1
        first = 0
        for i, item in enumerate(items):
            offset = item.offset
            together = 0 <= offset - end <= gap_max and offset + item.size - begin <= run_max
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
        if end - begin < self._packing.join_max:
            if self._small_bytes + end - begin > self._run_max:
                self._flush()
            if end > begin:
                self._small.append(self._view[begin:end])
                self._small_bytes += end - begin
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
            self._small_bytes = 0

    @property
    def packed(self) -> bool:
        """Whether the values lie back to back, so that no positions need be told."""
        return self._packing.gap_max < 0

    def finish(self) -> list[Buffer | Run]:
        self._flush()
        return self.frames
