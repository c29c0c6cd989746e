"""ZeroMQ sockets: frames in and out, nothing of what they mean.

``Link`` is a client's (or node's) connection to one peer, ``ServerSocket`` the side that listens.
Both are non-blocking; whoever owns them waits for readiness. ``Waiter`` adapts ZeroMQ's
edge-triggered descriptor to an asyncio loop.

Every socket has bounded queues and a bound on a frame's size, discards what was not sent when it
closes, and notices a silent peer by ZMTP heartbeats.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq
from zmq.backend import zmq_poll

from p2pkv import wire
from p2pkv.buffers import Lending, Run
from p2pkv.clock import MILLISECOND_NS, SECOND_NS, monotonic
from p2pkv.config import Limits
from p2pkv.errors import ConfigError
from p2pkv.parts import joined
from p2pkv.routing import Lost, Reply, Request
from p2pkv.wire import Kind

CLIENT_ID_BYTES = 9
SESSION_BYTES = 16
HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000
LEAVE_MS = 100
"""How long a closed socket may go on to send its good-bye."""
HANDSHAKE_MS = 5_000
CONNECT_TIMEOUT_MS = 2_000
FRAME_SLACK = 64 << 10
RECEIVE_BUDGET = 64
"""Messages that one wake-up handles before others get their turn."""

JOIN_MAX = 256 << 10
"""Pieces of a payload up to here are joined: a frame costs more than the copy."""

ZERO_COPY_MIN = 64 << 10
"""Smaller frames are copied by ZeroMQ: cheaper than tracking them."""

_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def frame_bytes_max(limits: Limits) -> int:
    return max(limits.head_bytes_max, limits.message_bytes_max) + FRAME_SLACK


def endpoint_of(address: str, port: int) -> str:
    """``tcp://127.0.0.1:4711``, ``tcp://[::1]:4711``."""
    text = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    return f"tcp://{text}:{port}"


def configure(socket: zmq.Socket[bytes], limits: Limits) -> None:
    """The options that all of our sockets share."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max(limits))
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.copy_threshold = ZERO_COPY_MIN


class ClientSession:
    """A session as the client has it: its id, and the numbers of its requests.

    They go on over every link that shares it, as the peer knows a repeated write by its number.
    """

    __slots__ = ("id", "used")

    def __init__(self, client_id: bytes) -> None:
        self.id = new_session(client_id)
        self.used = 0
        """The highest number so far."""

    def next_number(self) -> int:
        self.used += 1
        return self.used


class Link:
    """A connection to one peer: sends requests, collects replies, tells when the peer is lost.

    The session's id is the socket's routing id; it is kept when the connection is made anew, so
    that the peer recognizes a repeated request. ZeroMQ does not connect again by itself: then one
    would not know whether what waited in the queue has left.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, session: ClientSession,
                 hello: wire.Hello, limits: Limits) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.session = session
        self.revision = 0
        self._context = context
        self._hello = hello
        self._limits = limits
        self.open()

    def open(self) -> None:
        """Connect. Raises ConfigError if the endpoint is none."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        configure(socket, self._limits)
        socket.setsockopt(zmq.ROUTING_ID, self.session.id)
        socket.setsockopt(zmq.SNDHWM, 2 * self._limits.inflight_max)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the requests that we have under way
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_MONITORED)
        self.socket = socket
        self.closed = False
        self.connected = False
        self.welcome: wire.Welcome | None = None
        """The peer's word on this session, once it is here."""
        self.heard_ns = 0
        self._ended = False
        self._first: list[Request] = []
        self._renewed_ns = -SECOND_NS
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"endpoint {self.endpoint!r}: {e}") from None
        self.greet()

    def greet(self) -> None:
        """Begin the session (again)."""
        hello = msgspec.structs.replace(self._hello, used=self.session.used)
        self.socket.send(wire.encode(Kind.HELLO, 0, 0, hello))

    def begin_again(self) -> bool:
        """Begin the session again; False: that was done a moment ago, and not wanted."""
        now = monotonic()
        if now - self._renewed_ns < SECOND_NS:
            return False
        if self.closed:
            self.open()
        else:
            self.welcome = None
            self.greet()
        self._renewed_ns = now
        return True

    def renew(self, waiting: Mapping[int, Request]) -> dict[int, int]:
        """The peer has no session of ours (any more), as the refusal of a request says.

        Begins it again and repeats all that waits and has not run, under new numbers: returns them
        by the old ones. What may have run in the session that is gone is left to its own refusal.
        Empty: it was begun a moment ago, so the peer does not want us.
        """
        if not self.begin_again():
            return {}
        again = {old: request for old, request in waiting.items() if not request.unsure}
        for request in again.values():
            request.id = 0
            self.send(request)
        return {old: request.id for old, request in again.items()}

    def fresh_welcome(self) -> wire.Welcome | None:
        """The peer's welcome, if the session that it speaks of is certainly still there."""
        if self.closed or self.welcome is None:
            return None
        age_ns = monotonic() - self.heard_ns
        return self.welcome if age_ns * 2 < self.welcome.session_ttl_ms * MILLISECOND_NS else None

    def reset(self) -> None:
        """Drop the connection and whatever waits in it; the next request connects anew.

        Requests whose first connection never came about have certainly not left.
        """
        if self.closed:
            return
        self.lost()
        if self._ended and not self.connected:
            for request in self._first:
                request.sent = False
        self.close()

    def leave(self) -> None:
        """End the session, so that the peer need not keep it until it has been silent for long."""
        if not self.closed and self.connected:
            bye = wire.encode(Kind.BYE, 0, self.revision, wire.Empty())
            self._close(LEAVE_MS if send_frames(self.socket, (bye,), ()) else 0)
        self.close()

    def close(self) -> None:
        if not self.closed:
            self._close(0)

    def _close(self, linger_ms: int) -> None:
        self.closed = True
        self.connected = False
        self._first.clear()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

    def send(self, request: Request) -> bool:
        """Send, or say that the queue is full."""
        if self.closed:
            self.open()
        if not request.id:
            request.id = self.session.next_number()
        request.prepare()
        head = wire.encode(request.kind, request.id, self.revision, request.body)
        payload = joined(request.payload, JOIN_MAX) if request.payload else ()
        if not send_frames(self.socket, (head,), payload):
            return False
        if not request.sent:
            request.sent = True
            if not self.connected:
                self._first.append(request)
        return True

    def receive(self) -> list[tuple[int, Reply]]:
        """All replies that are there: (request id, reply). Raises ProtocolError."""
        replies: list[tuple[int, Reply]] = []
        while (frames := receive_frames(self.socket)) is not None:
            head = wire.decode(frames[0], self._limits.head_bytes_max)
            self.heard_ns = monotonic()
            if head.kind == Kind.WELCOME:
                self.welcome = head.body
            self.connected = True
            replies.append((head.request, Reply(head.kind, head.body, frames[1:], head.revision)))
        return replies

    def lost(self) -> str | None:
        """Why the peer is gone, if it is. Reads what the monitor has to say."""
        while zmq_poll(((self.monitor, zmq.POLLIN),), 0):
            event, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
            kind = int.from_bytes(event[:2], "little")
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            elif kind != zmq.EVENT_CONNECTED:
                self._ended = True
        if not self._ended:
            return None
        return f"{'connection lost' if self.connected else 'no connection'} to {self.endpoint}"

    def silence(self) -> Lost:
        """What became of a request that has no answer at its deadline."""
        if not self.closed:
            self.lost()
        if not self.connected:
            return Lost(f"no connection to {self.endpoint}")
        return Lost("no answer", deadline=True)


def send_frames(
    socket: zmq.Socket[bytes], heads: Sequence[bytes], payload: Sequence[wire.Buffer]
) -> bool:
    """Send one message without blocking. False: the peer's queue is full (nothing was sent)."""
    try:
        if not payload:
            if len(heads) == 1:
                socket.send(heads[0], zmq.NOBLOCK)
            else:
                socket.send_multipart(heads, zmq.NOBLOCK)
            return True
        for head in heads:
            socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
        for frame in payload[:-1]:
            socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=False)
        socket.send(payload[-1], zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True


def receive_frames(socket: zmq.Socket[bytes]) -> list[wire.Buffer] | None:
    """One message, payload not copied; None: there is none.

    Asks before it receives: a poll costs a third of a refused receive.
    """
    if not zmq_poll(((socket, zmq.POLLIN),), 0):
        return None
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames: list[wire.Buffer] = [frame.buffer]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


class Waiter:
    """Calls back when a socket may be readable.

    ZeroMQ's descriptor is edge-triggered: an edge can be consumed by a send. So the owner calls
    ``poke`` after it sent outside of the callback, and the callback reads until nothing is left
    (it returns True if it stopped earlier, to be called again).
    """

    def __init__(self, socket: zmq.Socket[bytes], callback: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._fd = int(socket.getsockopt(zmq.FD))
        self._handle: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._fd, self._ready)
        self.poke()

    def poke(self) -> None:
        if self._handle is None and not self._closed:
            self._handle = self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if not self._closed and self._callback():
            self.poke()

    def close(self) -> None:
        """To be called before the socket is closed; again does no harm, even when its descriptor
        is somebody else's by then."""
        if self._closed:
            return
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        self._loop.remove_reader(self._fd)


class ServerSocket:
    """Listens for requests from ``bind`` on, and hands them on from ``start`` on."""

    def __init__(self, context: zmq.Context[Any], limits: Limits) -> None:
        self._lending = Lending()
        self.dropped = 0
        """Messages that a peer's full queue, or its absence, took."""
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        configure(socket, limits)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, 2 * limits.inflight_max)
        socket.setsockopt(zmq.RCVHWM, limits.inflight_max)
        socket.setsockopt(zmq.BACKLOG, 1024)
        self.socket = socket
        self._draining = False
        self._waiter: Waiter | None = None

    def bind(self, address: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError."""
        try:
            self.socket.bind(endpoint_of(address, port) if port else _any_port(address))
        except zmq.ZMQError as e:
            raise ConfigError(f"cannot listen on {address} port {port}: {e}") from None
        last = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        return int(last.rstrip(b"\0").rpartition(b":")[2])

    def start(self, on_message: Callable[[bytes, list[wire.Buffer]], None]) -> None:
        """``on_message(session, frames)`` is called on the event loop."""
        self._waiter = Waiter(self.socket, partial(self._drain, on_message))

    def _drain(self, on_message: Callable[[bytes, list[wire.Buffer]], None]) -> bool:
        self._draining = True
        try:
            for _ in range(RECEIVE_BUDGET):
                frames = receive_frames(self.socket)
                if frames is None:
                    return False
                if len(frames) < 2:
                    self.dropped += 1
                    continue
                on_message(bytes(frames[0]), frames[1:])
        finally:
            self._draining = False
        return True

    def send(self, session: bytes, head: bytes, payload: Sequence[wire.Buffer | Run] = ()) -> bool:
        """Answer. A peer that is gone or does not read loses the message (counted)."""
        frames = [self._lending.lend(p) if isinstance(p, Run) else p for p in payload]
        try:
            sent = send_frames(self.socket, (session, head), frames)
        except zmq.ZMQError:
            sent = False
        if not sent:
            self.dropped += 1
        if self._waiter is not None and not self._draining:
            self._waiter.poke()
        return sent

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.close()
        self.socket.close(0)


def _any_port(address: str) -> str:
    return endpoint_of(address, 0).removesuffix(":0") + ":*"


def new_client_id(kind: bytes) -> bytes:
    """What all sessions of one client begin with: a letter (not 0, for ZeroMQ) and 8 bytes."""
    return kind + os.urandom(CLIENT_ID_BYTES - 1)


def new_session(client_id: bytes) -> bytes:
    """A routing id of 16 bytes."""
    return client_id + os.urandom(SESSION_BYTES - CLIENT_ID_BYTES)
