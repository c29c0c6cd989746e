"""Puts into room that a client of the node's host has ahead: a copy, and one message.

The client asks for room (LEASE) when it puts for the second time as much as before, and tells with
each put how much it may need next. See ``rooms`` for the node's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from p2pkv import wire
from p2pkv.objects import HEADER_BYTES, extents_bytes
from p2pkv.parts import Parts
from p2pkv.routing import Request
from p2pkv.shared_memory import SharedArena, in_other_words
from p2pkv.transport import ClientSession
from p2pkv.wire import Kind

AHEAD_MIN = 2 << 10
"""Puts of fewer bytes travel with their message, which is as fast."""
AHEAD_MAX = 16 << 20
"""For puts of more bytes a round trip is nothing, but room that nobody uses is much."""
PASSES = 64
"""So many puts go without after the node gave no room."""
SHARE_MAX = 16
"""The node gives at most one part in so many of its arena."""


class Ahead:
    """The room of one connection, as its client knows it."""

    __slots__ = ("arena", "busy", "needed", "passes", "size", "start")

    def __init__(self, arena: SharedArena) -> None:
        self.arena = arena
        self.start = self.size = 0
        self.needed = 0
        """What the last put needed."""
        self.busy = False
        """Whether a put has asked for room, or filled it, and the answer is not there yet. The
        others go without: the node takes the room back when it is asked for another."""
        self.passes = 0
        """So many puts more do not ask for room."""

    def take(self, room: tuple[int, int]) -> None:
        """The room from here on. One that is not within the arena is none."""
        self.start, self.size = room
        if self.start + self.size > self.arena.size or self.start % HEADER_BYTES:
            self.start = self.size = 0

    def put(self, request: Request) -> Filling | None:
        """The put, if it is one of those that go this way; to be tried once for each sending."""
        if self.busy or request.kind != Kind.PUT or request.unsure or request.source is not None:
            return None
        body: Any = request.body
        if not AHEAD_MIN <= sum(body.sizes) <= AHEAD_MAX:
            return None
        filling = Filling(request, sum(extents_bytes(body.sizes)), self.needed)
        if filling.needed > self.arena.size // SHARE_MAX:
            return None
        self.needed = filling.needed
        return filling if filling.needed <= self.size or self._may_ask(filling) else None

    def _may_ask(self, filling: Filling) -> bool:
        if self.passes:
            self.passes -= 1
            return False
        return filling.needed <= filling.wanted

    def refused(self) -> None:
        """The node gave no room: it is not asked again for a while."""
        self.passes = PASSES


class Filling:
    """A put of values that are to be written into the room."""

    __slots__ = ("needed", "request", "wanted")

    def __init__(self, request: Request, needed: int, before: int) -> None:
        self.request = request
        self.needed = needed
        self.wanted = min(needed, before)
        """How much room is to be asked for: for the like of the last two puts."""

    def lease(self, session: ClientSession) -> Request:
        """The message that asks for room."""
        lease = wire.Lease(self.wanted)
        return in_other_words(self.request, Kind.LEASE, lease, session.next_number())

    def write(self, ahead: Ahead, session: ClientSession) -> Request:
        """Copies the values into the room, which must be large enough. The message that puts them.

        It has the number of the put itself, so that this is not run twice if it is sent again.
        """
        request, body = self.request, self.request.body
        assert isinstance(body, wire.Put)
        start, offsets = ahead.start, _offsets(ahead.start, body.sizes)
        values = _values_of(request.payload, body.sizes)
        sums = body.checksums
        if request.seal is not None:
            sums = ahead.arena.write_summed(offsets, values)
        else:
            ahead.arena.write(offsets, values)
        ahead.take((0, 0))  # until the answer tells what is left
        filled = wire.Filled(body.keys, body.sizes, body.options, start, self.wanted, sums)
        request.id = request.id or session.next_number()
        return in_other_words(request, Kind.FILLED, filled, request.id)


def _values_of(payload: Sequence[Any], sizes: Sequence[int]) -> Sequence[Parts]:
    """The values of a put; each is one piece of the payload as a rule."""
    if list(map(len, payload)) == sizes:
        return payload
    return wire.gathered(payload, sizes)


def _offsets(start: int, sizes: Sequence[int]) -> list[int]:
    """Where values begin that lie in a room from its start on."""
    return list(accumulate(extents_bytes(sizes)[:-1], initial=start + HEADER_BYTES))
