"""What a node does with a request. Knows no transport: decoded request in, body and views out.

ZeroMQ, in-process callers and the data connections share it. Everything runs to its end in one call
on the node's event loop, so no handler ever sees another's half-done work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from p2pkv import wire
from p2pkv.admission import Admission
from p2pkv.allocating import Allocating
from p2pkv.answers import Frames, Handler
from p2pkv.arrivals import Arrivals
from p2pkv.clock import SECOND_NS
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.journal import Journal
from p2pkv.quarantine import Quarantine
from p2pkv.reading import Reading
from p2pkv.receiving import Arriving, Receiving
from p2pkv.rooms import Rooms
from p2pkv.sessions import Deferred, Response, Session
from p2pkv.sharing import Sharing
from p2pkv.wire import Checksums, Fault, Kind
from p2pkv.writing import Filling, Writing


class Handlers:
    """The operations of a node on its store, each kind of request with the part that answers it.

    ``may_serve(now)`` is the self-fence rule, asked at every request. ``extra`` answers the kinds
    that concern the node as a whole. An answer that other nodes have a say in is a ``Deferred``.
    ``arriving`` says which values are compared with their checksums before they are kept.
    ``view_quota_bytes``: what one client may look at in the arena (0: a quarter of it).
    ``quarantine_ns``: how long memory waits that a client on another host may still write to.
    """

    def __init__(
        self,
        journal: Journal,
        limits: Limits,
        bucket_count: int,
        may_serve: Callable[[int], bool],
        extra: Mapping[Kind, Handler],
        arriving: Checksums = Checksums.NONE,
        view_quota_bytes: int = 0,
        quarantine_ns: int = 30 * SECOND_NS,
    ) -> None:
        store, sessions = journal.store, journal.sessions
        self.requests: dict[int, int] = {}
        """How many came, by kind."""
        self.admission = Admission(journal.replicas, limits, bucket_count, may_serve)
        self.arrivals = Arrivals(store, arriving)
        self.sharing = Sharing(
            self.admission, store, sessions, Quarantine(store, quarantine_ns), view_quota_bytes
        )
        self.reading = Reading(self.admission, self.sharing, store, sessions)
        self.writing = Writing(self.admission, self.arrivals, journal)
        self.allocating = Allocating(self.admission, self.sharing, self.arrivals, journal)
        self.receiving = Receiving(self.admission, self.arrivals, journal)
        self._kinds: dict[int, Handler] = {Kind.PING: lambda *_: (Kind.PONG, wire.Empty(), ())}
        rooms = Rooms(self.admission, self.arrivals, self.writing, journal)
        for part in (self.reading, self.writing, self.allocating, self.receiving, rooms):
            self.answer_also(part.handlers)
        self.answer_also(extra)

    def answer_also(self, extra: Mapping[Kind, Handler]) -> None:
        """Let others answer these kinds of requests."""
        for kind, handler in extra.items():
            self._kinds[kind] = handler

    def handle(
        self, session: Session, kind: int, request: int, body: Any, frames: Frames, now: int
    ) -> Response | Deferred:
        """Answer one request. A repeated write gets the answer of its first time."""
        session.last_seen = now
        handler = self._kinds.get(kind)
        if handler is None:
            return self.refuse(Fault.BAD_REQUEST, f"{Kind(kind).name} is not a request")
        self.requests[kind] = self.requests.get(kind, 0) + 1
        mutating = kind in wire.MUTATING
        if mutating:
            known = session.answers.get(request)
            if known is not None:
                return known
            if 0 < request <= session.forgotten:
                return self.refuse(Fault.FORGOTTEN, "the answer of this write is no longer kept")
        try:
            answer = handler(session, body, frames, now)
        except ProtocolError as e:
            return self.refuse(Fault.BAD_REQUEST, str(e))
        if mutating:
            session.remember(request, answer)
        return answer

    def begin(
        self, session: Session, kind: int, request: int, body: Any, size: int, now: int
    ) -> Filling | Arriving | None:
        """A request whose ``size`` payload bytes have yet to come: where they go in the arena.

        None: they are to be received elsewhere, and given to ``handle``.
        """
        session.last_seen = now
        begun: Filling | Arriving | None = None
        if kind == Kind.PUT:
            begun = self.writing.begin(session, request, body, size, now)
        elif kind == Kind.REPLICATE:
            begun = self.receiving.begin(session, body, size, now)
        if begun is not None:
            self.requests[kind] = self.requests.get(kind, 0) + 1
        return begun

    def refuse(self, fault: Fault, message: str) -> Response:
        """The answer to a request that is not run."""
        return self.admission.refuse(fault, message)
