"""The ways by which requests reach a node: control and data connections, and its own process.

Sessions begin and end here; every answer carries the revision of the ring that it was given under.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from p2pkv import clock, wire
from p2pkv.answers import Handler
from p2pkv.buffers import Lending, Run
from p2pkv.config import NodeConfig
from p2pkv.data_server import Filling
from p2pkv.errors import ProtocolError
from p2pkv.handlers import Handlers
from p2pkv.ownership import Ownership
from p2pkv.payload import FRAMES, STREAM
from p2pkv.routing import Reply, Request
from p2pkv.sessions import Deferred, Response, Session, Sessions, Shared
from p2pkv.transport import ServerSocket, new_client_id, new_session
from p2pkv.types import Member
from p2pkv.ucx_transfer import Busy
from p2pkv.wire import Checksums, Fault, Kind

log = logging.getLogger("p2pkv.node")


class Frontend:
    """Decodes requests, finds their session, and takes the answers back the same way.

    ``welcome`` is what a new session is told, but for its token. ``on_message`` is for the control
    socket, ``local`` for callers in this process; to the data connections this is their service.
    """

    def __init__(
        self,
        config: NodeConfig,
        handlers: Handlers,
        sessions: Sessions,
        ownership: Ownership,
        server: ServerSocket,
        welcome: wire.Welcome,
    ) -> None:
        self.garbage = 0
        """Messages on control connections that could not be decoded."""
        self._config = config
        self._handlers = handlers
        self._sessions = sessions
        self._ownership = ownership
        self._server = server
        self._welcome = welcome
        self._lending = Lending()
        self._own = self._own_session(welcome.member)

    def _own_session(self, member: Member) -> Session:
        session = self._sessions.begin(new_session(new_client_id(b"l")), member, clock.monotonic())
        assert session is not None
        return session

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What clients ask to find the node that they want."""
        return {Kind.ROUTES: self._on_routes}

    def keep_alive(self, now: int) -> None:
        """The session of callers in this process has no other sign of life."""
        self._own.last_seen = now

    def _handle(self, session: Session, kind: int, request: int, body: Any,
                frames: Sequence[wire.Buffer], now: int) -> Response | Deferred:  # fmt: skip
        try:
            return self._handlers.handle(session, kind, request, body, frames, now)
        except Busy as e:
            return self._handlers.refuse(Fault.NOT_READY, str(e))
        except Exception:
            log.exception("a request of kind %s failed", Kind(kind).name)
            return self._handlers.refuse(
                Fault.INTERNAL, f"{Kind(kind).name} failed in the node; its log says why"
            )

    def _on_routes(self, session: Session, body: wire.Routes, frames: Any, now: int) -> Response:
        table = self._ownership.table()
        if body.revision > table.revision:
            table = wire.Table(
                table.fingerprint, table.revision, table.bucket_count, [], [], [], []
            )
        return Kind.TABLE, table, ()

    # -- control connections

    def on_message(self, session_id: bytes, frames: list[wire.Buffer]) -> None:
        """Answer a message of ZeroMQ, now or later."""
        now = clock.monotonic()
        try:
            head = wire.decode(frames[0], self._config.limits.head_bytes_max)
        except ProtocolError as e:
            self._on_garbage(session_id, frames[0], e)
            return
        response: Response | Deferred
        session = self._sessions.get(session_id)
        if head.kind == Kind.HELLO:
            response = self._greet(session_id, head.body, now)
        elif head.kind == Kind.BYE:
            if session is not None:
                self._sessions.end(session)
            return
        elif session is None:
            response = self._handlers.refuse(Fault.NO_SESSION, "no session; say HELLO first")
        else:
            response = self._handle(session, head.kind, head.request, head.body, frames[1:], now)
        if isinstance(response, Deferred):
            response.then(lambda answer: self._answer(session_id, head.request, answer))
        else:
            self._answer(session_id, head.request, response)

    def _answer(self, session_id: bytes, request: int, response: Response) -> None:
        kind, body, payload = response
        frame = wire.encode(Kind(kind), request, self.revision(), body)
        self._server.send(session_id, frame, payload)

    def _on_garbage(self, session_id: bytes, frame: wire.Buffer, error: ProtocolError) -> None:
        self.garbage += 1
        try:
            version, _, request = wire.peek(frame)
        except ProtocolError:
            return
        fault = Fault.VERSION if version != wire.VERSION else Fault.BAD_REQUEST
        body = wire.Error(fault, str(error)[:1024])
        self._server.send(session_id, wire.encode(Kind.ERROR, request, 0, body))

    def _greet(self, session_id: bytes, body: wire.Hello, now: int) -> Response:
        if body.cluster != self._config.cluster:
            return self._handlers.refuse(
                Fault.CLUSTER, f"this is cluster {self._config.cluster!r}, not {body.cluster!r}"
            )
        session = self._sessions.begin(session_id, body.member, now, body.used)
        if session is None:
            return self._handlers.refuse(
                Fault.SESSIONS_MAX, f"sessions_max = {self._config.sessions_max} is reached"
            )
        welcome = msgspec.structs.replace(self._welcome, token=session.token)
        return Kind.WELCOME, welcome, ()

    # -- data connections

    def admit(self, session_id: bytes, token: bytes) -> bool:
        """Whether this session was given this token."""
        session = self._sessions.get(session_id)
        return session is not None and secrets.compare_digest(session.token, token)

    def begin(self, session_id: bytes, head: wire.Head, payload_bytes: int) -> Filling | None:
        """Where the payload of this request goes, if it has a place already."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        return self._handlers.begin(
            session, head.kind, head.request, head.body, payload_bytes, clock.monotonic()
        )

    def respond(
        self,
        session_id: bytes,
        head: wire.Head,
        frames: Sequence[wire.Buffer],
        shared: Shared,
    ) -> Response | Deferred:
        """Answer a request. ``shared`` is what this connection's client fills by itself."""
        session = self._sessions.get(session_id)
        if session is None:
            return self._handlers.refuse(Fault.NO_SESSION, "no session; say HELLO first")
        session.packing, session.shared = STREAM, shared
        try:
            return self._handle(
                session, head.kind, head.request, head.body, frames, clock.monotonic()
            )
        finally:
            session.packing, session.shared = FRAMES, None

    def unshare(self, shared: Shared, proven: bool) -> None:
        """The connection is closed. ``proven``: by the client or its kernel."""
        self._handlers.sharing.unshare_all(shared, proven)

    def revision(self) -> int:
        """Of the ring, as this node knows it."""
        return int(self._ownership.revision)

    # -- callers in this process

    def local(self, request: Request, answer: Callable[[Reply], None]) -> None:
        """A request of this process to its own node."""
        now = clock.monotonic()
        request.prepare()
        body: Any = request.body
        if request.kind == Kind.GET and body.checksums == Checksums.SENT:
            body = msgspec.structs.replace(body, checksums=Checksums.NONE)  # nothing is sent
        response = self._handle(self._own, request.kind, 0, body, list(request.payload), now)
        self._own.answers.clear()
        if isinstance(response, Deferred):
            response.then(lambda late: answer(self._reply(late)))
        else:
            answer(self._reply(response))

    def _reply(self, response: Response) -> Reply:
        kind, body, payload = response
        frames = [self._lending.lend(p) if isinstance(p, Run) else p for p in payload]
        return Reply(kind, body, frames, self.revision())
