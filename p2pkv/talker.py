"""Small messages between replicas, over sockets of their own. Lossy.

Bulk never delays them. A message to a peer that is gone or does not read is dropped, never queued
for long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from p2pkv.config import Limits
from p2pkv.errors import ConfigError
from p2pkv.replicated import Talk
from p2pkv.transport import Waiter, configure, endpoint_of
from p2pkv.types import Member

FRAME_BYTES_MAX = 4 << 20
QUEUE_MAX = 64
DRAIN_MAX = 64


class Talker:
    """Sends a Talk to its peer, hands received ones to ``on_talk``.

    ``token`` (the cluster's fingerprint) goes in front of each, so that a node of another cluster
    that got an old port is not mistaken for a peer.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        limits: Limits,
        token: bytes,
        on_talk: Callable[[Talk], object],
    ) -> None:
        self._context = context
        self._limits = limits
        self._token = token
        self._on_talk = on_talk
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Talk)
        self._peers: dict[Member, tuple[str, zmq.Socket[bytes]]] = {}
        self._waiter: Waiter | None = None
        self.refused = 0
        """Messages that were none of this cluster's."""
        self.dropped = 0
        """Messages that no peer could take."""
        self._inbox = self._socket(zmq.PULL)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        configure(socket, self._limits)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        socket.setsockopt(zmq.RCVHWM, 4 * QUEUE_MAX)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
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

    def send(self, talk: Talk) -> None:
        """To its peer, if that can take it now."""
        peer = self._peers.get(talk.to)
        try:
            if peer is not None:
                peer[1].send_multipart([self._token, self._encoder.encode(talk)], zmq.NOBLOCK)
                return
        except zmq.Again:
            pass
        self.dropped += 1

    def _drain(self) -> bool:
        for _ in range(DRAIN_MAX):
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                if len(frames) != 2 or frames[0] != self._token:
                    raise ValueError("not of this cluster")
                talk = self._decoder.decode(frames[1])
            except (ValueError, msgspec.MsgspecError):
                self.refused += 1
                continue
            self._on_talk(talk)
        return True

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.close()
        for _, socket in self._peers.values():
            socket.close(0)
        self._peers.clear()
        self._inbox.close(0)
