"""The data connection's framing, and its client side: plain TCP, one round trip an operation.

::

    preface   "P2KVDATA" · version u8 · session id (16 bytes) · token (16 bytes)     client, once
    message   head bytes u32 · payload bytes u64 · head (see ``wire``) · payload     both ways

The token is handed out over the control channel (WELCOME), so whoever has none is not listened to.
There is no answer to the preface: a peer that does not accept it closes the connection.
"""

from __future__ import annotations

import errno
import ipaddress
import mmap
import select
import socket
import time
from collections.abc import Callable, Sequence
from struct import Struct

from p2pkv import wire
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.parts import flat
from p2pkv.routing import Reply, Request, Sink

MAGIC = b"P2KVDATA"
TOKEN_BYTES = 16
SESSION_BYTES = 16
PREFACE = Struct("<8sB16s16s")
SIZES = Struct("<IQ")
IOV_MAX = 1024
BUFFER_BYTES = 64 << 10
SOCKET_BUFFER_BYTES = 4 << 20

DIRECT_MIN = 32 << 10
"""Values from here on are received into objects of their own, smaller ones together."""

LAZY_MIN = 256 << 10

READ_AHEAD_BYTES = 8 << 10
TICK = Struct("@ll").pack(0, 50_000)
"""Blocking calls return after 50 ms at the latest, to look at the deadline."""

SPIN_NS = 60_000
SPIN_RETRY = 64


class Closed(Exception):
    """The peer closed the connection, or it broke."""


class Late(Exception):
    """The deadline passed."""


def preface(session: bytes, token: bytes) -> bytes:
    return PREFACE.pack(MAGIC, wire.VERSION, session, token)


def message(kind: int, request: int, revision: int, body: wire.Body, payload_bytes: int) -> bytes:
    """The part of a message before its payload."""
    head = wire.encode(wire.Kind(kind), request, revision, body)
    return SIZES.pack(len(head), payload_bytes) + head


def opening(request: Request, revision: int) -> bytes:
    """The part of a request before its payload."""
    size = sum(map(len, request.payload))
    return message(request.kind, request.id, revision, request.body, size)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises ValueError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    ipaddress.ip_address(host)
    return host, int(port)


def configure(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def wait_for_ever(sock: socket.socket) -> None:
    """Let a peer be paused as long as it likes, where both sides use one memory.

    Else the kernel closes a connection whose peer does not read, and what the peer was given to
    write to would be used for something else while it is still going to write.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def room(size: int) -> memoryview:
    """Memory for a payload that was announced. Much of it is only taken as the bytes come."""
    return memoryview(mmap.mmap(-1, size) if size >= LAZY_MIN else bytearray(size))


def advance(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after ``done`` bytes."""
    for i, view in enumerate(views):
        size = len(view)
        if done < size:
            return [view[done:], *views[i + 1 :]] if done else views[i:]
        done -= size
    return []


def inline_sizes(body: wire.Values) -> list[int]:
    """Bytes of each value in the payload: none for those in the arena. Raises ProtocolError."""
    if not body.offsets:
        return body.sizes
    if len(body.offsets) != len(body.sizes):
        raise ProtocolError(f"{len(body.offsets)} places of {len(body.sizes)} values")
    return [0 if at else n for n, at in zip(body.sizes, body.offsets, strict=True)]


class Landing:
    """Where the payload of an answer goes: into ``targets``, in order.

    Or, if ``sizes`` are given, each value into an object of its own.
    """

    __slots__ = ("delivered", "frames", "sizes", "targets")

    def __init__(self, head: wire.Head, size: int, sink: Sink | None) -> None:
        """Raises ProtocolError if the answer says something else of its values."""
        self.delivered = False
        self.frames: Sequence[wire.Buffer] = ()
        self.sizes: Sequence[int] = ()
        body = head.body
        if isinstance(body, wire.Values) and not body.starts:
            inline = inline_sizes(body)
            if sum(inline) != size:
                raise ProtocolError(f"a payload of {size} bytes for other values")
            if sink is not None and not body.offsets:  # those with offsets are all placed later
                self.targets = [t for t in flat(sink(body)) if len(t)]
                if sum(map(len, self.targets)) != size:
                    raise ProtocolError(f"a payload of {size} bytes for other buffers")
                self.delivered = True
                return
            if sink is None and size >= DIRECT_MIN * len(inline):
                self.targets, self.sizes = [], inline
                return
        self.targets = [room(size)]
        self.frames = list(self.targets)

    def reply(self, head: wire.Head, values: Sequence[bytes] | None = None) -> Reply:
        """The answer, with everything in its place. ``values``: those of ``sizes``."""
        frames = self.frames if values is None else [v for v in values if v]
        return Reply(head.kind, head.body, frames, head.revision, values, self.delivered)


class DataLink:
    """A blocking data connection to one peer. Used by one thread at a time.

    Raises OSError from the constructor when the peer cannot be reached.
    """

    def __init__(
        self, endpoint: str, session: bytes, token: bytes, limits: Limits, timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self.revision = 0
        self._limits = limits
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._calls = 0
        self._spin_pays = True
        sock = socket.create_connection(parse_endpoint(endpoint), timeout_s)
        try:
            configure(sock)
            sock.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, TICK)
            sock.sendall(preface(session, token))
        except BaseException:
            sock.close()
            raise
        self.socket = sock

    def close(self) -> None:
        self.socket.close()

    def fileno(self) -> int:
        return self.socket.fileno()

    # -- sending

    def send(self, request: Request, deadline_ns: int) -> None:
        """Send a request whole. Raises Closed, Late."""
        payload = [memoryview(p) for p in request.payload]
        begin = opening(request, self.revision)
        request.sent = True
        if payload:
            self._send_all([memoryview(begin), *payload], deadline_ns)
            return
        self._send_all([memoryview(begin)], deadline_ns)

    def _send_all(self, views: list[memoryview], deadline_ns: int) -> None:
        while True:
            try:
                views = advance(views, self.socket.sendmsg(views[:IOV_MAX]))
            except BlockingIOError:
                _check(deadline_ns)
            except OSError as e:
                raise _closed(e) from None
            if not views:
                return

    # -- receiving

    def readable(self) -> bool:
        """Whether something is here, or the end."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def buffered(self) -> bool:
        """Whether bytes of a next message are here already."""
        return self._end > self._start

    def receive(
        self, deadline_ns: int, sink_of: Callable[[int], Sink | None] = lambda _: None
    ) -> tuple[int, Reply]:
        """The next message: (request id, reply). Raises Closed, Late, ProtocolError.

        ``sink_of(request id)`` may give the request's sink (see ``routing.Sink``).
        """
        self._need(SIZES.size, deadline_ns, spin=True)
        head_bytes, payload_bytes = SIZES.unpack_from(self._buffer, self._start)
        limits = self._limits
        if head_bytes > limits.head_bytes_max or payload_bytes > 2 * limits.message_bytes_max:
            raise ProtocolError(f"a message of {head_bytes} + {payload_bytes} bytes")
        self._start += SIZES.size
        self._need(head_bytes, deadline_ns)
        frame = self._buffer[self._start : self._start + head_bytes]
        head = wire.decode(frame, limits.head_bytes_max)
        self._start += head_bytes
        self.revision = head.revision
        if not payload_bytes:
            return head.request, Reply(head.kind, head.body, (), head.revision)
        landing = Landing(head, payload_bytes, sink_of(head.request))
        if landing.sizes:
            values = [self._take(n, deadline_ns) if n else b"" for n in landing.sizes]
            return head.request, landing.reply(head, values)
        self._fill(landing.targets, deadline_ns)
        return head.request, landing.reply(head)

    def _take(self, size: int, deadline_ns: int) -> bytes:
        """One value as an object of its own, received straight into it."""
        ahead = min(size, self._end - self._start)
        parts = [bytes(self._buffer[self._start : self._start + ahead])] if ahead else []
        self._start += ahead
        left = size - ahead
        while left:
            try:
                got = self.socket.recv(left, socket.MSG_WAITALL)
            except BlockingIOError:
                _check(deadline_ns)
                continue
            except OSError as e:
                raise _closed(e) from None
            if not got:
                raise Closed("the peer closed the connection")
            parts.append(got)
            left -= len(got)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fill(self, targets: list[memoryview], deadline_ns: int) -> None:
        """Receive into the targets, first what was read ahead."""
        while targets and self._end > self._start:
            target = targets[0]
            n = min(len(target), self._end - self._start)
            target[:n] = self._buffer[self._start : self._start + n]
            self._start += n
            targets = advance(targets, n)
        while targets:
            try:
                got = self.socket.recvmsg_into(targets[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                _check(deadline_ns)
                continue
            except OSError as e:
                raise _closed(e) from None
            if not got:
                raise Closed("the peer closed the connection")
            targets = advance(targets, got)

    def _need(self, size: int, deadline_ns: int, spin: bool = False) -> None:
        """Have ``size`` bytes in the buffer; may read a little ahead."""
        if self._end == self._start:
            self._start = self._end = 0
        if self._end - self._start >= size:
            return
        if self._start + size > len(self._buffer):
            self._make_room(size)
        if spin and self._spin():
            spin = False
        while self._end - self._start < size:
            stop = max(self._start + size, min(self._end + READ_AHEAD_BYTES, len(self._buffer)))
            try:
                got = self.socket.recv_into(self._buffer[self._end : stop])
            except BlockingIOError:
                _check(deadline_ns)
                continue
            except OSError as e:
                raise _closed(e) from None
            if not got:
                raise Closed("the peer closed the connection")
            self._end += got

    def _make_room(self, size: int) -> None:
        rest = self._buffer[self._start : self._end]
        buffer = self._buffer
        if size > len(buffer):
            buffer = memoryview(bytearray(size))
        moved = bytes(rest)
        buffer[: len(moved)] = moved
        self._buffer, self._start, self._end = buffer, 0, len(moved)

    def _spin(self) -> bool:
        """Look for the answer for a moment before sleeping, as long as that pays."""
        self._calls += 1
        if not self._spin_pays and self._calls % SPIN_RETRY:
            return False
        end = time.perf_counter_ns() + SPIN_NS
        view = self._buffer[self._end : self._end + READ_AHEAD_BYTES]
        while time.perf_counter_ns() < end:
            try:
                got = self.socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                break
            self._end += got
            self._spin_pays = True
            return True
        self._spin_pays = False
        return False


def _check(deadline_ns: int) -> None:
    if time.monotonic_ns() >= deadline_ns:
        raise Late


def _closed(error: OSError) -> Closed:
    return Closed(error.strerror or errno.errorcode.get(error.errno or 0, "connection error"))
