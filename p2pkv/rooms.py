"""Room in the arena that a client of this host has ahead of its puts.

It writes the values there by itself, and one message (FILLED) makes them visible: as fast as a copy
and a round trip. A connection has one room at most, which it fills from the start; what is carved
off becomes the extents of objects. The rest goes back when the client asks for another, or when the
kernel says that its connection is gone; never before, as the client may be writing.

Nothing in a room can be evicted, so rooms take a small share of the arena (``store.ROOMS_SHARE``).
Who gets none asks for each extent (ALLOC).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pkv import answers, wire
from p2pkv.admission import Admission
from p2pkv.answers import Frames, Handler
from p2pkv.arrivals import Arrivals, check_sums, note_sums
from p2pkv.errors import ProtocolError
from p2pkv.extents import Room
from p2pkv.journal import Journal, Outcome
from p2pkv.objects import Object
from p2pkv.sessions import Deferred, Response, Session, Shared
from p2pkv.store import Store
from p2pkv.wire import PLAIN, Checksums, Kind, Status
from p2pkv.writing import Writing


class Rooms:
    """The requests for room, and for what was put there."""

    def __init__(
        self, admission: Admission, arrivals: Arrivals, writing: Writing, journal: Journal
    ) -> None:
        self._admission = admission
        self._arrivals = arrivals
        self._writing = writing
        self._replicas = journal.replicas
        self._store: Store = journal.store

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The kinds of requests that concern room ahead of puts."""
        return {Kind.LEASE: self._lease, Kind.FILLED: self._filled}

    def _lease(self, session: Session, body: wire.Lease, frames: Frames, now: int) -> Response:
        shared = _shared(session)
        self._replace(shared, body.size, now)
        return Kind.STATUSES, wire.Statuses(b"", b"", _place_of(shared.room)), ()

    def _replace(self, shared: Shared, size: int, now: int) -> None:
        """The client, which has just written to it for the last time, wants another room."""
        room, shared.room = shared.room, None
        if room is not None:
            self._store.close_room(room)
        shared.room = self._store.open_room(size, now)

    def _filled(
        self, session: Session, body: wire.Filled, frames: Frames, now: int
    ) -> Response | Deferred:
        shared = _shared(session)
        self._check(shared, body)
        buckets, refused = self._admission.admit(body.keys, now)
        places = self._carved(shared, body.sizes)
        if not refused and self._put_plainly(body, buckets, places, now):
            return Kind.STATUSES, wire.Statuses(b"", b"", self._next(shared, body.next, now)), ()
        made = self._made(body, buckets, places, refused, now)

        def told(outcome: Outcome) -> Response:
            kind, statuses, _ = answers.told(outcome)
            return kind, wire.Statuses(statuses.statuses, statuses.copies, room), ()

        outcome = Outcome(len(made), told, body.options.min_replicas)
        self._writing.put_made(made, buckets, range(len(made)), outcome, now)
        room = self._next(shared, body.next, now)
        result: Response | Deferred = outcome.result
        return result

    def _put_plainly(
        self, body: wire.Filled, buckets: Sequence[int], places: Sequence[int], now: int
    ) -> bool:
        """Whether all could be put without more ado, as is usual."""
        return (
            body.options == PLAIN
            and not (body.checksums and self._arrivals.policy == Checksums.ALL)
            and self._replicas.shared.isdisjoint(buckets)
            and self._store.show_batch(buckets, body.keys, body.sizes, places, body.checksums, now)
        )

    def _next(self, shared: Shared, size: int, now: int) -> tuple[int, int]:
        """The room that the client has from here on, with ``size`` bytes if that can be."""
        if size == 0 or shared.room is None or len(shared.room) < size:
            self._replace(shared, size, now)
        return _place_of(shared.room)

    def _check(self, shared: Shared, body: wire.Filled) -> None:
        """Raises ProtocolError."""
        if len(body.sizes) != len(body.keys):
            raise ProtocolError(f"{len(body.sizes)} sizes for {len(body.keys)} keys")
        check_sums(body.checksums, len(body.keys))
        self._admission.check_sizes(body.sizes)
        if shared.room is None or shared.room.start != body.start:
            raise ProtocolError(f"start = {body.start}: this connection has no room there")

    def _carved(self, shared: Shared, sizes: Sequence[int]) -> list[int]:
        """Where the values lie; the extents leave the room, whatever becomes of them."""
        assert shared.room is not None
        try:
            return self._store.carve(shared.room, sizes)
        except ValueError as e:
            raise ProtocolError(f"values that are not within their room: {e}") from None

    def _made(
        self,
        body: wire.Filled,
        buckets: Sequence[int],
        places: Sequence[int],
        refused: bytes,
        now: int,
    ) -> Sequence[Object | Status]:
        """What is to be committed, or why not."""
        made = self._store.allocate_batch(
            buckets, body.keys, body.sizes, body.options, now, places=places
        )
        note_sums(made, body.checksums)
        corrupt = self._arrivals.corrupt_among(made, Checksums.ALL)
        if corrupt:
            made = [Status.CORRUPT if item in corrupt else item for item in made]
        if not refused:
            return made
        self._store.abort_batch(
            [o for o, s in zip(made, refused, strict=True) if s and isinstance(o, Object)]
        )
        return [Status(s) if s else o for o, s in zip(made, refused, strict=True)]


def _shared(session: Session) -> Shared:
    if session.shared is None:
        raise ProtocolError("memory is shared over data connections only")
    return session.shared


def _place_of(room: Room | None) -> tuple[int, int]:
    return (0, 0) if room is None else (room.start, len(room))
