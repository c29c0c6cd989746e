"""Operations from the primaries of buckets that this node has a copy of."""

from __future__ import annotations

from collections.abc import Mapping

from p2pkv import wire
from p2pkv.admission import Admission
from p2pkv.answers import Frames, Handler
from p2pkv.arrivals import Arrivals
from p2pkv.errors import ProtocolError
from p2pkv.journal import Journal
from p2pkv.neighbours import Neighbours, Place
from p2pkv.replicated import OpKind
from p2pkv.sessions import Response, Session
from p2pkv.store import Store
from p2pkv.wire import Checksums, Fault, Kind


class Receiving:
    """Receives values, from messages or from a neighbour's memory, and acknowledges."""

    def __init__(self, admission: Admission, arrivals: Arrivals, journal: Journal) -> None:
        self._admission = admission
        self._arrivals = arrivals
        self._journal = journal
        self._store: Store = journal.store
        self._neighbours = Neighbours(journal.store.arena.view)

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What primaries ask of copies."""
        return {Kind.REPLICATE: self._replicate, Kind.STAGE: self._stage}

    def _stage(self, session: Session, body: wire.Stage, frames: Frames, now: int) -> Response:
        return Kind.STAGED, self._journal.oversized.take(body, session.member, frames, now), ()

    def _replicate(
        self, session: Session, body: wire.Replicate, frames: Frames, now: int
    ) -> Response:
        arriving = Arriving(self, session, body, now)
        sizes = [len(view) for view in arriving.views]
        try:
            values = wire.gathered(frames, sizes)
        except ProtocolError:
            arriving.abort()
            raise
        for view, value in zip(arriving.views, values, strict=True):
            at = 0
            for part in value if isinstance(value, tuple) else (value,):
                view[at : at + len(part)] = part
                at += len(part)
        return arriving.finish(now)

    def begin(self, session: Session, body: wire.Replicate, size: int, now: int) -> Arriving | None:
        """Operations whose values have yet to come: where they go in the arena."""
        try:
            if session.member is None or sum(_inline_sizes(body)) != size:
                return None
        except ProtocolError:
            return None
        return Arriving(self, session, body, now)


class Arriving:
    """Operations from a primary whose values are arriving; as Filling of ``writing``."""

    __slots__ = ("_body", "_elsewhere", "_items", "_receiving", "_session", "_staged", "views")

    def __init__(
        self, receiving: Receiving, session: Session, body: wire.Replicate, now: int
    ) -> None:
        if session.member is None:
            raise ProtocolError("only nodes replicate")
        if sum(_inline_sizes(body)) > receiving._admission.limits.message_bytes_max:
            raise ProtocolError("values over message_bytes_max")
        self._receiving = receiving
        self._session = session
        self._body = body
        ops = [op for prepare in body.prepares for op in prepare.ops]
        buckets = [prepare.bucket for prepare in body.prepares for _ in prepare.ops]
        if body.staged:
            self._staged = [receiving._journal.oversized.claim(session.member, body.prepares)]
        else:
            self._staged = receiving._journal.stage(buckets, ops, now)
        self._items = [item for item in self._staged if item is not None]
        receiving._store.acquire_batch(self._items)
        arena = receiving._store.arena.view
        puts = [
            (op, item) for op, item in zip(ops, self._staged, strict=True) if op.kind == OpKind.PUT
        ]
        offsets = body.offsets or [0] * len(puts)
        self.views = [
            memoryview(bytearray(op.size))
            if item is None
            else arena[item.offset : item.offset + item.size]
            for (op, item), offset in zip(puts, offsets, strict=True)
            if not (offset or body.staged)
        ]
        self._elsewhere = [
            Place(item, offset, version)
            for (_, item), offset, version in zip(puts, body.offsets, body.versions, strict=False)
            if offset and item is not None
        ]

    def finish(self, now: int) -> Response:
        """All bytes are there, or in the memory of the sender."""
        self.views = []
        receiving, member = self._receiving, self._session.member
        assert member is not None
        if self._elsewhere and not receiving._neighbours.pull(
            member, self._body.source, self._elsewhere
        ):
            self.abort()
            return receiving._admission.refuse(
                Fault.NOT_READY, "values in another memory cannot be read"
            )
        staged = iter(self._staged)
        values = [[next(staged) for _ in prepare.ops] for prepare in self._body.prepares]
        corrupt = receiving._arrivals.corrupt_among(self._staged, Checksums.SENT)
        if corrupt:
            values = [[None if item in corrupt else item for item in some] for some in values]
        receiving._journal.give_up_unstaged(self._body.prepares, values)
        acks = receiving._journal.replicas.take_prepares(member, self._body.prepares, values, now)
        receiving._journal.wake()
        receiving._store.release_batch(self._items)
        return Kind.REPLICATED, wire.Replicated(receiving._journal.tell_no_room(acks)), ()

    def abort(self) -> None:
        """They will not come."""
        self.views = []
        self._receiving._store.abort_batch(self._items)
        self._receiving._store.release_batch(self._items)


def _inline_sizes(body: wire.Replicate) -> list[int]:
    """Sizes of the values in the payload. Raises ProtocolError."""
    if body.staged:
        return []
    sizes = [op.size for p in body.prepares for op in p.ops if op.kind == OpKind.PUT]
    if not body.offsets:
        return sizes
    if not len(body.offsets) == len(body.versions) == len(sizes) or body.source is None:
        raise ProtocolError(f"{len(body.offsets)} places for {len(sizes)} values")
    return [size for size, offset in zip(sizes, body.offsets, strict=True) if not offset]
