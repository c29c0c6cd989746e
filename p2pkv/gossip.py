"""Small messages between nodes, over sockets of their own, so that bulk never delays them. Lossy.

A message to a peer that is gone or does not read is dropped, never queued. What the kernel says of
a connection (refused, closed, reset, no answer for long) is told to whoever wants to know: it is
the first sign of a death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import zmq

from p2pkv.config import Limits
from p2pkv.errors import ConfigError, ProtocolError
from p2pkv.transport import CONNECT_TIMEOUT_MS, LEAVE_MS, Waiter, configure, endpoint_of
from p2pkv.types import Member

FRAME_BYTES_MAX = 1 << 20
QUEUE_MAX = 8
INBOX_MAX = 64
UNANSWERED_MS = 5_000
"""The kernel gives up a connection when the other side has acknowledged nothing for so long."""
SOCKETS_MAX = 3 * 4096 + 256
"""Of the context: each peer takes three, one to send and two to hear what becomes of it."""

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITORED = _BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED

Handler = Callable[[bytes], object]
"""Takes a message's body. Raises ProtocolError if it is none."""


class _Peer:
    """A connection to one peer, which is made again by itself."""

    def __init__(
        self, endpoint: str, socket: zmq.Socket[bytes], on_broken: Callable[[], object]
    ) -> None:
        self.endpoint = endpoint
        self.socket = socket
        self._on_broken = on_broken
        self._told = False
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_MONITORED)
        self._waiter = Waiter(self._monitor, self._drain)

    def _drain(self) -> bool:
        """Tell of a breach once, until there is a connection again."""
        for _ in range(16):
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            broken = bool(int.from_bytes(event[:2], "little") & _BROKEN)
            if broken and not self._told:
                self._on_broken()
            self._told = broken
        return True

    def close(self, linger_ms: int) -> None:
        self._waiter.close()
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger_ms)


class Gossip:
    """Sends to peers, and hands what comes in to the handler of its kind.

    ``token`` (the cluster's fingerprint) goes in front of each message, so that a node of another
    cluster that got an old port is not mistaken for a peer. ``on_broken`` is called with the peer
    whose connection broke, or was refused.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        limits: Limits,
        token: bytes,
        handlers: Mapping[bytes, Handler],
        on_broken: Callable[[Member], object],
    ) -> None:
        self._context = context
        self._limits = limits
        self._token = token
        self._handlers = handlers
        self._on_broken = on_broken
        self._peers: dict[Member, _Peer] = {}
        self._waiter: Waiter | None = None
        self.refused = 0
        """Messages that were none of this cluster."""
        self.dropped = 0
        """Messages to peers that could not take them."""
        self._inbox = self._socket(zmq.PULL)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        configure(socket, self._limits)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)  # its cost would grow with the cluster
        socket.setsockopt(zmq.TCP_MAXRT, UNANSWERED_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        socket.setsockopt(zmq.RCVHWM, INBOX_MAX)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def bind(self, address: str) -> int:
        """Listen on any free port; returns it. Raises ConfigError."""
        try:
            return self._inbox.bind_to_random_port(endpoint_of(address, 0).removesuffix(":0"))
        except zmq.ZMQError as e:
            raise ConfigError(f"cannot listen on {address}: {e}") from None

    def start(self) -> None:
        self._waiter = Waiter(self._inbox, self._drain)

    def connect(self, peers: Mapping[Member, str]) -> None:
        """Be connected to exactly these."""
        for member in self._peers.keys() - peers.keys():
            self._peers.pop(member).close(0)
        for member, endpoint in peers.items():
            self.add(member, endpoint)

    def add(self, member: Member, endpoint: str) -> None:
        """Be connected to this one too. An endpoint that is none is passed over."""
        peer = self._peers.get(member)
        if peer is not None and peer.endpoint == endpoint:
            return
        if peer is not None:
            self._peers.pop(member).close(0)
        if not endpoint.startswith("tcp://"):
            return
        peer = _Peer(endpoint, self._socket(zmq.PUSH), lambda: self._on_broken(member))
        try:
            peer.socket.connect(endpoint)
            self._peers[member] = peer
        except zmq.ZMQError:
            peer.close(0)

    def send(self, member: Member, kind: bytes, body: bytes) -> None:
        """To one peer, if it can take it now."""
        peer = self._peers.get(member)
        try:
            if peer is None:
                raise zmq.Again
            peer.socket.send_multipart([self._token, kind, body], zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1

    def send_all(self, kind: bytes, body: bytes) -> None:
        """To every peer that can take it now."""
        for member in self._peers:
            self.send(member, kind, body)

    def _drain(self) -> bool:
        for _ in range(64):
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self._take(frames)
            except ProtocolError:
                self.refused += 1
        return True

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[0] != self._token:
            raise ProtocolError("not of this cluster")
        handler = self._handlers.get(frames[1])
        if handler is None:
            raise ProtocolError("of an unknown kind")
        handler(frames[2])

    def close(self) -> None:
        """What was said last has a moment to leave."""
        if self._waiter is not None:
            self._waiter.close()
        for peer in self._peers.values():
            peer.close(LEAVE_MS)
        self._peers.clear()
        self._inbox.close(0)
