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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from p2pkv import wire
from p2pkv.buffers import Run
from p2pkv.clock import monotonic
from p2pkv.config import Limits
from p2pkv.errors import ConfigError, ProtocolError
from p2pkv.stream import (
    IOV_MAX,
    MAGIC,
    PREFACE,
    SIZES,
    TOKEN_BYTES,
    advance,
    configure,
    message,
)

BUFFER_BYTES = 64 << 10
BUDGET = 32
"""Messages of one connection that one wake-up handles before others get their turn."""
OUTGOING_BYTES_MAX = 64 << 20
"""A connection with so much unsent is not read from."""

Response = tuple[int, Any, Sequence[Any]]


class Filling(Protocol):
    """A put whose bytes are arriving: ``views`` in payload order, then finish or abort."""

    views: list[memoryview]

    def finish(self, now: int) -> Response: ...

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
        shared: dict[int, Any],
    ) -> Response:
        """Answer a request. ``shared`` is what this connection's client fills by itself."""
        ...

    def unshare(self, shared: dict[int, Any]) -> None:
        """The connection is closed: its client writes to the arena no more."""
        ...

    def revision(self) -> int: ...


class DataServer:
    """Listens for data connections."""

    def __init__(self, limits: Limits, service: Service, stall_ns: int) -> None:
        self.limits = limits
        self.service = service
        self.dropped = 0
        """Connections that were closed for nonsense or for standing still."""
        self._stall_ns = stall_ns
        self._listener: socket.socket | None = None
        self._connections: set[_Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._connections)

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

    def start(self) -> None:
        assert self._listener is not None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._loop is not None
        for _ in range(BUDGET):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            configure(sock)
            sock.setblocking(False)
            self._connections.add(_Connection(sock, self, self._loop))

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def drop_stalled(self, now: int) -> None:
        """Close the connections that stand still in the middle of something."""
        for connection in list(self._connections):
            if (
                connection.busy
                and not connection.shared
                and now - connection.progress_ns > self._stall_ns
            ):
                self.dropped += 1
                connection.close()

    def close_session(self, session: bytes) -> None:
        for connection in list(self._connections):
            if connection.session == session:
                connection.close()

    def close(self) -> None:
        if self._listener is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for connection in list(self._connections):
            connection.close()


class _Outgoing:
    """A message on its way out, and the pieces of the arena it holds."""

    __slots__ = ("dones", "size", "views")

    def __init__(self, begin: bytes, payload: Sequence[Any], size: int) -> None:
        self.views = [memoryview(begin)]
        self.dones: list[Callable[[], None]] = []
        self.size = size + len(begin)
        for piece in payload:
            if isinstance(piece, Run):
                self.views.append(piece.view)
                self.dones.append(piece.done)
            else:
                self.views.append(memoryview(piece))

    def finish(self) -> None:
        for done in self.dones:
            done()


class _Connection:
    """One peer: reads messages, has them answered, writes the answers."""

    def __init__(
        self, sock: socket.socket, server: DataServer, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.session = b""
        self.shared: dict[int, Any] = {}
        self.progress_ns = monotonic()
        self._sock = sock
        self._fd = sock.fileno()
        self._server = server
        self._loop = loop
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._head: wire.Head | None = None
        self._filling: Filling | None = None
        self._frames: list[memoryview] = []
        self._targets: list[memoryview] = []
        self._outgoing: deque[_Outgoing] = deque()
        self._outgoing_bytes = 0
        self._reading = self._writing = False
        self._closed = False
        self._again: asyncio.Handle | None = None
        self._read_on()

    @property
    def busy(self) -> bool:
        """Whether something is under way that the peer must go on with."""
        return bool(self._targets or self._outgoing or self._end > self._start or not self.session)

    # -- reading

    def _read_on(self) -> None:
        if not self._reading and not self._closed:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        try:
            for _ in range(BUDGET):
                if self._closed or not self._step():
                    return
        except ProtocolError:
            self._server.dropped += 1
            self.close()
            return
        except OSError:
            self.close()
            return
        self._again = self._loop.call_soon(self._readable)

    def _step(self) -> bool:
        """Handle one message, or receive something. False: nothing is there now."""
        if self._outgoing_bytes > OUTGOING_BYTES_MAX:
            self._reading = False
            self._loop.remove_reader(self._fd)
            return False
        if self._targets:
            return self._receive_payload()
        if self._take_message():
            return True
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            self._make_room()
        try:
            got = self._sock.recv_into(self._buffer[self._end :])
        except BlockingIOError:
            return False
        if not got:
            self.close()
            return False
        self._end += got
        self.progress_ns = monotonic()
        return self._take_message() or got == len(self._buffer) - (self._end - got)

    def _make_room(self) -> None:
        rest = bytes(self._buffer[self._start : self._end])
        if len(rest) > len(self._buffer) // 2:
            self._buffer = memoryview(bytearray(2 * len(self._buffer)))
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _take_message(self) -> bool:
        """Begin with the next message in the buffer, if its head is there."""
        if not self.session:
            return self._take_preface()
        have = self._end - self._start
        if have < SIZES.size:
            return False
        head_bytes, payload_bytes = SIZES.unpack_from(self._buffer, self._start)
        limits = self._server.limits
        if head_bytes > limits.head_bytes_max or payload_bytes > limits.message_bytes_max:
            raise ProtocolError(f"a message of {head_bytes} + {payload_bytes} bytes")
        if have < SIZES.size + head_bytes:
            return False
        begin = self._start + SIZES.size
        self._start = begin + head_bytes
        head = self._decode(self._buffer[begin : self._start])
        if payload_bytes:
            self._begin_payload(head, payload_bytes)
        else:
            self._respond(head, ())
        return True

    def _decode(self, frame: memoryview) -> wire.Head:
        return wire.decode(frame, self._server.limits.head_bytes_max)

    def _take_preface(self) -> bool:
        if self._end - self._start < PREFACE.size:
            if bytes(self._buffer[: self._end]) != MAGIC[: self._end] and self._end < len(MAGIC):
                raise ProtocolError("not a data connection")
            return False
        magic, version, session, token = PREFACE.unpack_from(self._buffer, self._start)
        self._start += PREFACE.size
        if magic != MAGIC or version != wire.VERSION:
            raise ProtocolError("not a data connection of this version")
        if not self._server.service.admit(session, token):
            raise ProtocolError("no such session")
        self.session = session
        return True

    def _begin_payload(self, head: wire.Head, size: int) -> None:
        self._head = head
        self._filling = self._server.service.begin(self.session, head, size)
        if self._filling is None:
            self._frames = [memoryview(bytearray(size))]
            self._targets = list(self._frames)
        else:
            self._targets = [v for v in self._filling.views if len(v)]
        while self._targets and self._end > self._start:
            target = self._targets[0]
            n = min(len(target), self._end - self._start)
            target[:n] = self._buffer[self._start : self._start + n]
            self._start += n
            self._targets = advance(self._targets, n)
        if not self._targets:
            self._finish_payload()

    def _receive_payload(self) -> bool:
        try:
            got = self._sock.recvmsg_into(self._targets[:IOV_MAX])[0]
        except BlockingIOError:
            return False
        if not got:
            self.close()
            return False
        self.progress_ns = monotonic()
        self._targets = advance(self._targets, got)
        if not self._targets:
            self._finish_payload()
        return True

    def _finish_payload(self) -> None:
        head, filling, frames = self._head, self._filling, self._frames
        assert head is not None
        self._head, self._filling, self._frames = None, None, []
        if filling is not None:
            self._answer(head, filling.finish(monotonic()))
        else:
            self._respond(head, frames)

    def _respond(self, head: wire.Head, frames: Sequence[wire.Buffer]) -> None:
        service = self._server.service
        self._answer(head, service.respond(self.session, head, frames, self.shared))

    # -- writing

    def _answer(self, head: wire.Head, response: Response) -> None:
        kind, body, payload = response
        size = sum(len(p.view) if isinstance(p, Run) else len(p) for p in payload)
        begin = message(kind, head.request, self._server.service.revision(), body, size)
        if not payload and not self._outgoing:
            done = self._send_now(begin)
            if done == len(begin):
                return
            begin = begin[done:]
        outgoing = _Outgoing(begin, payload, size)
        self._outgoing.append(outgoing)
        self._outgoing_bytes += outgoing.size
        if len(self._outgoing) == 1:
            self._write()

    def _send_now(self, data: bytes) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def _writable(self) -> None:
        try:
            self._write()
        except OSError:
            self.close()

    def _write(self) -> None:
        while self._outgoing:
            outgoing = self._outgoing[0]
            try:
                done = self._sock.sendmsg(outgoing.views[:IOV_MAX])
            except BlockingIOError:
                self._want_writable(True)
                return
            self.progress_ns = monotonic()
            outgoing.views = advance(outgoing.views, done)
            if not outgoing.views:
                self._outgoing.popleft()
                self._outgoing_bytes -= outgoing.size
                outgoing.finish()
        self._want_writable(False)
        self._read_on()

    def _want_writable(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)

    # -- ending

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        if self._reading:
            self._loop.remove_reader(self._fd)
        self._want_writable(False)
        self._sock.close()
        if self._filling is not None:
            self._filling.abort()
        for outgoing in self._outgoing:
            outgoing.finish()
        self._outgoing.clear()
        self._server.service.unshare(self.shared)
        self._server.forget(self)

    # a connection is told apart by identity
    __hash__ = object.__hash__


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)
