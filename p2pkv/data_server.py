"""The data connections of a node, served from its event loop: no thread each, nothing blocks.

Requests are answered by the same handlers as those that come over ZeroMQ. The bytes of a large put
go from the socket straight into the arena, those of a get from the arena into the socket.

A peer that sends nonsense, or stops in the middle of something for ``stall_ns``, is dropped; one
that does not read its answers is not read from, and dropped after the same time. Not so one that
may be writing into the arena: only the kernel's word that it is gone ends that.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from p2pkv import wire
from p2pkv.buffers import Run
from p2pkv.clock import monotonic
from p2pkv.config import Limits
from p2pkv.connection import Connection, Outgoing
from p2pkv.errors import ConfigError, ProtocolError
from p2pkv.sessions import Deferred, Shared
from p2pkv.stream import (
    MAGIC,
    PREFACE,
    TOKEN_BYTES,
    Closed,
    configure,
    message,
    room,
    wait_for_ever,
)

ACCEPTS_MAX = 32
"""Connections that one wake-up accepts before others get their turn."""
JOINED_MAX = 8 << 10
"""Answers up to here are copied into one piece, which is less work than to keep track of it."""
OUTGOING_BYTES_MAX = 64 << 20
"""A connection with so much unsent is not read from."""

Response = tuple[int, Any, Sequence[Any]]


class Filling(Protocol):
    """A put whose bytes are arriving: ``views`` in payload order, then finish or abort."""

    views: list[memoryview]

    def finish(self, now: int) -> Response | Deferred: ...

    def abort(self) -> None: ...


class Service(Protocol):
    """What the node does with the requests of data connections."""

    def admit(self, session: bytes, token: bytes) -> bool:
        """Whether this session was given this token."""
        ...

    def begin(self, session: bytes, head: wire.Head, payload_bytes: int) -> Filling | None:
        """Where the payload of this request goes, if it has a place already."""
        ...

    def respond(
        self,
        session: bytes,
        head: wire.Head,
        frames: Sequence[wire.Buffer],
        shared: Shared,
    ) -> Response | Deferred:
        """Answer a request. ``shared`` is what this connection's client fills by itself."""
        ...

    def unshare(self, shared: Shared, proven: bool) -> None:
        """The connection is closed. ``proven``: by the client or its kernel, so that the client
        begins no write to the arena any more."""
        ...

    def revision(self) -> int: ...


class DataServer:
    """Listens for data connections."""

    def __init__(self, limits: Limits, stall_ns: int, connections_max: int = 8192) -> None:
        self.limits = limits
        self.dropped = 0
        """Connections that were closed for nonsense, for standing still, or as one too many."""
        self._stall_ns = stall_ns
        self._connections_max = connections_max
        self._listener: socket.socket | None = None
        self._peers: set[_Peer] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def busy(self) -> int:
        """Connections that are in the middle of a request or an answer."""
        return sum(peer.busy for peer in self._peers)

    def bind(self, address: str, port: int = 0) -> int:
        """Listen; returns the port. Raises ConfigError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=1024)
        except OSError as e:
            raise ConfigError(f"cannot listen on {address} port {port}: {e}") from None
        listener.setblocking(False)
        self._listener = listener
        return int(listener.getsockname()[1])

    def start(self, service: Service) -> None:
        """Accept connections, and answer what they ask by ``service``."""
        assert self._listener is not None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self._accept, service)

    def _accept(self, service: Service) -> None:
        assert self._listener is not None
        assert self._loop is not None
        for _ in range(ACCEPTS_MAX):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if len(self._peers) >= self._connections_max:
                self.dropped += 1
                sock.close()
                continue
            configure(sock)
            sock.setblocking(False)
            self._peers.add(_Peer(sock, self, service, self._loop))

    def forget(self, connection: _Peer) -> None:
        self._peers.discard(connection)

    def drop_stalled(self, now: int) -> None:
        """Close the connections that stand still in the middle of something."""
        for connection in list(self._peers):
            if (
                connection.busy
                and not connection.shared
                and now - connection.progress_ns > self._stall_ns
            ):
                self.dropped += 1
                connection.close()

    def close_session(self, session: bytes) -> None:
        for connection in list(self._peers):
            if connection.session == session:
                connection.close()

    def close(self) -> None:
        if self._listener is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in list(self._peers):
            connection.close()


class _Peer(Connection):
    """The connection of one client: its requests are answered in their order."""

    def __init__(
        self,
        sock: socket.socket,
        server: DataServer,
        service: Service,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.session = b""
        self.shared = Shared()
        """What its client may be writing into the arena by itself."""
        self._server = server
        self._service = service
        self._filling: Filling | None = None
        self._frames: list[memoryview] = []
        self._patient = False
        limits = server.limits
        super().__init__(sock, loop, limits.head_bytes_max, limits.message_bytes_max)

    @property
    def busy(self) -> bool:
        """Whether something is under way that the peer must go on with."""
        return bool(
            self._head is not None or self._outgoing or self._end > self._start or not self.session
        )

    # -- reading

    def _step(self) -> bool:
        if self._outgoing_bytes > OUTGOING_BYTES_MAX:
            self._stop_reading()
            return False
        return super()._step()

    def _take_message(self) -> bool:
        return super()._take_message() if self.session else self._take_preface()

    def _take_preface(self) -> bool:
        have = self._buffer[self._start : self._end]
        if have[: len(MAGIC)] != MAGIC[: len(have)]:
            raise ProtocolError("not a data connection")
        if len(have) < PREFACE.size:
            return False
        _, version, session, token = PREFACE.unpack_from(have)
        if version != wire.VERSION:
            raise ProtocolError("not a data connection of this version")
        if not self._service.admit(session, token):
            raise ProtocolError("no such session")
        self._start += PREFACE.size
        self.session = session
        return True

    def _place(self, head: wire.Head, size: int) -> list[memoryview]:
        self._filling = self._service.begin(self.session, head, size)
        if self._filling is not None:
            return self._filling.views
        self._frames = [room(size)]
        return self._frames

    def _filled(self, head: wire.Head) -> None:
        filling, frames = self._filling, self._frames
        self._filling, self._frames = None, []
        if filling is not None:
            self._answer_when_ready(head, filling.finish(monotonic()))
        else:
            self._respond(head, frames)

    def _received(self, head: wire.Head) -> None:
        self._respond(head, ())

    # -- answering

    def _respond(self, head: wire.Head, frames: Sequence[wire.Buffer]) -> None:
        response = self._service.respond(self.session, head, frames, self.shared)
        if self.shared and not self._patient:
            self._patient = True
            wait_for_ever(self._sock)
        self._answer_when_ready(head, response)

    def _answer_when_ready(self, head: wire.Head, response: Response | Deferred) -> None:
        if isinstance(response, Deferred):
            response.then(lambda answer: self._answer_late(head, answer))
        else:
            self._answer(head, response)

    def _answer_late(self, head: wire.Head, response: Response) -> None:
        """Called from elsewhere than this connection's events, where its errors do not belong."""
        if not self.closed:
            try:
                self._answer(head, response)
                if self._outgoing and not self._writing:  # no event of ours will do it
                    self._write()
            except OSError as e:
                self._broken(e)

    def _answer(self, head: wire.Head, response: Response) -> None:
        kind, body, payload = response
        size = sum(len(p.view) if isinstance(p, Run) else len(p) for p in payload)
        begin = message(kind, head.request, self._service.revision(), body, size)
        if size <= JOINED_MAX:
            begin, payload = _joined(begin, payload), ()
            if self._start == self._end and not self._outgoing:  # else it leaves with the others
                begin = self._send_now(begin)
                if not begin:
                    return
        self._queue(Outgoing(begin, payload))

    def _send_now(self, data: bytes) -> bytes:
        """Send an answer at once; what did not leave."""
        try:
            return data[self._sock.send(data) :]
        except BlockingIOError:
            return data

    # -- ending

    def _broken(self, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            self._server.dropped += 1
        self.close(proven=isinstance(error, (Closed, ConnectionResetError, BrokenPipeError)))

    def close(self, proven: bool = False) -> None:
        if self.closed:
            return
        self._stop()
        self._sock.close()
        if self._filling is not None:
            self._filling.abort()
            self._filling = None
        self._service.unshare(self.shared, proven)
        self._server.forget(self)


def _joined(begin: bytes, payload: Sequence[Any]) -> bytes:
    """An answer in one piece, which holds nothing of the arena."""
    if not payload:
        return begin
    data = b"".join([begin, *[p.view if isinstance(p, Run) else p for p in payload]])
    for piece in payload:
        if isinstance(piece, Run):
            piece.done()
    return data


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)
