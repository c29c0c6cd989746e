"""Heartbeats between nodes, over sockets of their own, so that bulk never delays them. Lossy.

A heartbeat to a peer that is gone or does not read is dropped, never queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from p2pkv.config import Limits
from p2pkv.errors import ConfigError
from p2pkv.membership import Heartbeat
from p2pkv.transport import Waiter, configure, endpoint_of
from p2pkv.types import Member

FRAME_BYTES_MAX = 1 << 20
QUEUE_MAX = 8


class Gossip:
    """Sends heartbeats to each peer's endpoint, hands received ones to ``on_heartbeat``.

    ``token`` (the cluster's fingerprint) goes in front of each, so that a node of another cluster
    that got an old port is not mistaken for a peer.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        limits: Limits,
        token: bytes,
        on_heartbeat: Callable[[Heartbeat], object],
    ) -> None:
        self._context = context
        self._limits = limits
        self._token = token
        self._on_heartbeat = on_heartbeat
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)
        self._peers: dict[Member, tuple[str, zmq.Socket[bytes]]] = {}
        self._waiter: Waiter | None = None
        self.refused = 0
        """Messages that were no heartbeat of this cluster."""
        self._inbox = self._socket(zmq.PULL)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        configure(socket, self._limits)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        socket.setsockopt(zmq.RCVHWM, 64)
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
        for member, (endpoint, socket) in list(self._peers.items()):
            if peers.get(member) != endpoint:
                socket.close(0)
                del self._peers[member]
        for member, endpoint in peers.items():
            if member not in self._peers:
                socket = self._socket(zmq.PUSH)
                try:
                    socket.connect(endpoint)
                except zmq.ZMQError:
                    socket.close(0)
                    continue
                self._peers[member] = (endpoint, socket)

    def send(self, heartbeat: Heartbeat) -> None:
        """To every peer that can take it now."""
        frames = [self._token, self._encoder.encode(heartbeat)]
        for _, socket in self._peers.values():
            try:
                socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                continue

    def _drain(self) -> bool:
        for _ in range(64):
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                if len(frames) != 2 or frames[0] != self._token:
                    raise ValueError("not of this cluster")
                heartbeat = self._decoder.decode(frames[1])
            except (ValueError, msgspec.MsgspecError):
                self.refused += 1
                continue
            self._on_heartbeat(heartbeat)
        return True

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.close()
        for _, socket in self._peers.values():
            socket.close(0)
        self._peers.clear()
        self._inbox.close(0)
