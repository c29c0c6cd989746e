"""Both ends of data connections for tests: a node's data plane alone, peers that do as told."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from nodeside import LIMITS, PLAIN, Host, S
from rawpeer import Answer, RawPeer

from p2pkv import wire
from p2pkv.arena import Arena
from p2pkv.clock import monotonic
from p2pkv.config import Limits
from p2pkv.data_server import DataServer
from p2pkv.payload import FRAMES, STREAM
from p2pkv.routing import Request
from p2pkv.sessions import Response, Session, Shared
from p2pkv.stream import PREFACE, SIZES, message
from p2pkv.types import BootId, Member, NodeId
from p2pkv.wire import Fault, Kind

PEER = Member(NodeId("n0"), BootId(1))


async def until(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        await asyncio.sleep(0.002)


def wait_until(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.002)


def ping() -> Request:
    return Request(PEER, Kind.PING, wire.Empty())


def put(value: Any, key: bytes = b"k") -> Request:
    return Request(PEER, Kind.PUT, wire.Put([key], [len(value)], PLAIN), [value])


def get(*keys: bytes, into: list[memoryview] | None = None) -> Request:
    request = Request(PEER, Kind.GET, wire.Get(list(keys)))
    if into is not None:
        request.sink = lambda body: [b[:n] for b, n in zip(into, body.sizes, strict=True)]
    return request


def new_seed() -> random.Random:
    """Chance whose seed is printed."""
    seed = time.time_ns() & 0xFFFF_FFFF
    print(f"seed = {seed}")
    return random.Random(seed)


class DataNode:
    """A node's data plane without the rest: handlers over a real store, behind a DataServer."""

    def __init__(self, arena: Arena, limits: Limits = LIMITS, stall_ns: int = 30 * S) -> None:
        self.host = Host(arena, limits)
        self.store = self.host.store
        self.session = self.host.open_session(b"data", b"1", monotonic())
        """Of the clients; the host's own serves what a test does behind their backs."""
        self.server = DataServer(limits, stall_ns)
        self.port = self.server.bind("127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.begun: list[int] = []
        """Sizes of the payloads that were announced."""

    async def __aenter__(self) -> Self:
        self.server.start(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    def welcome(self, session: Session) -> wire.Welcome:
        arena = self.store.arena
        place = (str(arena.path), arena.size, arena.proof)
        return wire.Welcome(PEER, 30_000, {}, (self.endpoint,), session.token, place)

    def admit(self, session_id: bytes, token: bytes) -> bool:
        session = self.host.sessions.get(session_id)
        return session is not None and session.token == token

    def begin(self, session_id: bytes, head: wire.Head, payload_bytes: int) -> Any:
        self.begun.append(payload_bytes)
        session = self.host.sessions.get(session_id)
        if session is None or head.kind != Kind.PUT:
            return None
        return self.host.handlers.begin(
            session, head.kind, head.request, head.body, payload_bytes, monotonic()
        )

    def respond(
        self,
        session_id: bytes,
        head: wire.Head,
        frames: Sequence[wire.Buffer],
        shared: Shared,
    ) -> Response:
        session = self.host.sessions.get(session_id)
        if session is None:
            return self.host.handlers.refuse(Fault.NO_SESSION, "no session")
        session.packing, session.shared = STREAM, shared
        try:
            return self.host.handlers.handle(
                session, head.kind, head.request, head.body, frames, monotonic()
            )
        finally:
            session.packing, session.shared = FRAMES, None

    def unshare(self, shared: Shared, proven: bool) -> None:
        self.host.handlers.sharing.unshare_all(shared, proven)

    def revision(self) -> int:
        return 7


class Wire:
    """One connection as a test's script has it: whole messages, or any bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(20)

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            got = self.sock.recv(size - len(data))
            if not got:
                raise ConnectionError("closed")
            data += got
        return bytes(data)

    def receive(self) -> tuple[wire.Head, bytes]:
        """The next message and its payload."""
        head_bytes, payload_bytes = SIZES.unpack(self.read(SIZES.size))
        return wire.decode(self.read(head_bytes), 1 << 25), self.read(payload_bytes)

    def send(self, kind: Kind, request: int, body: wire.Body, payload: bytes = b"") -> None:
        self.sock.sendall(message(kind, request, 7, body, len(payload)) + payload)


Serve = Callable[[Wire], None]


class TcpPeer:
    """Listens, and gives each connection to ``serve`` on a thread of its own."""

    def __init__(self, serve: Serve, *, receive_buffer: int = 0) -> None:
        self.serve = serve
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        if receive_buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.failures: list[BaseException] = []
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._run, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        try:
            self.serve(Wire(sock))
        except OSError:  # the other side has closed
            pass
        except BaseException as e:
            self.failures.append(e)
        finally:
            sock.close()

    def cut(self) -> None:
        """Close all connections."""
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def stop(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in [self._acceptor, *self._threads]:
            thread.join(10)
            assert not thread.is_alive()
        assert not self.failures, self.failures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class DataPeer(RawPeer):
    """A control socket that welcomes to a data endpoint, where ``data`` serves the connections.

    ``data`` gets connections whose preface is read and whose PING is answered; the session and
    token are checked.
    """

    def __init__(
        self,
        script: Callable[[wire.Head, list[bytes]], Answer],
        data: Serve,
        *,
        arena: tuple[str, int, bytes] | None = None,
        receive_buffer: int = 0,
        sessions: bool = False,
    ) -> None:
        self.token = self.token_given = b"t" * 16
        self.arena = arena
        self.refusals = 0
        self._data_script = data
        self.data = TcpPeer(self._serve, receive_buffer=receive_buffer)
        super().__init__(script, sessions=sessions)

    def _serve(self, wire_: Wire) -> None:
        _, _, session, token = PREFACE.unpack(wire_.read(PREFACE.size))
        if token != self.token or session not in self.known:
            self.refusals += 1
            self.token_given = self.token
            return
        head, _ = wire_.receive()
        assert head.kind == Kind.PING
        wire_.send(Kind.PONG, head.request, wire.Empty())
        self._data_script(wire_)

    def _greeted(self, session: bytes) -> None:
        body = wire.Welcome(PEER, 30_000, {}, (self.data.endpoint,), self.token_given, self.arena)
        self._answer(session, 0, (Kind.WELCOME, body, ()))

    def stop(self) -> None:
        super().stop()
        self.data.stop()
