"""What a node listens on. Bound before others are told of the node, served once it is composed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import zmq

from p2pkv import clock
from p2pkv._native.index import Writer
from p2pkv.arena import Arena
from p2pkv.config import NodeConfig
from p2pkv.data_server import DataServer
from p2pkv.frontend import Frontend
from p2pkv.gossip import SOCKETS_MAX, Gossip
from p2pkv.read_server import ReadServer
from p2pkv.records import NodeRecord
from p2pkv.transport import ServerSocket, endpoint_of
from p2pkv.types import BootId, Member

Heard = tuple[Mapping[bytes, Callable[[bytes], None]], Callable[[Member], object]]
"""Who is given each kind of message, and who is told of peers whose connection broke."""


class Listeners:
    """Control and data connections, read connections, and two sockets for what nodes tell each
    other: ``gossip`` (who is alive) and ``talks`` (of replicas).

    Listens at once, on ``config.bind``. Raises ConfigError where it cannot. ``token`` tells the
    messages of this cluster's nodes from others'.
    """

    def __init__(
        self, config: NodeConfig, token: bytes, gossip: Heard, talks: Heard, reads: bool
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_MAX + 2 * config.sessions_max)
        self.server = ServerSocket(self.context, config.limits)
        self.gossip = Gossip(self.context, config.limits, token, *gossip)
        self.talks = Gossip(self.context, config.limits, token, *talks)
        self.data = DataServer(
            config.limits, clock.seconds(config.read_deadline_s), 2 * config.sessions_max
        )
        self.reads: ReadServer | None = None
        self._config = config
        try:
            self._bind(reads)
        except BaseException:
            self.close()
            raise

    def _bind(self, reads: bool) -> None:
        config = self._config
        if reads and config.read_threads:
            self.reads = ReadServer(config.bind, config.read_threads)
        port = self.server.bind(config.bind, config.control_port)
        self.control_endpoint = self._endpoint(port)
        self.gossip_endpoint = self._endpoint(self.gossip.bind(config.bind))
        self.talks_endpoint = self._endpoint(self.talks.bind(config.bind))
        self.data_endpoint = self._endpoint(self.data.bind(config.bind))

    def _endpoint(self, port: int) -> str:
        return endpoint_of(self._config.advertised, port)

    @property
    def reads_place(self) -> tuple[str, bytes] | None:
        """Endpoint and token of the read connections."""
        return None if self.reads is None else (self._endpoint(self.reads.port), self.reads.token)

    def record(self) -> NodeRecord:
        """What etcd is told of this node; the boot is for the authority to give."""
        config = self._config
        return NodeRecord(
            boot=BootId(0),
            control=(self.control_endpoint,),
            gossip=(self.gossip_endpoint,),
            data=(self.data_endpoint,),
            replication=(self.talks_endpoint,),
            weight=config.weight,
            host=config.host,
            zone=config.zone,
            capacity_bytes=config.memory_limit_bytes,
        )

    def start(self, frontend: Frontend, arena: Arena, published: Writer | None) -> None:
        """Serve what comes in from now on."""
        self.server.start(frontend.on_message)
        self.data.start(frontend)
        if self.reads is not None and published is not None:
            self.reads.start(
                published.address,
                (arena.address, arena.size),
                payload_max=self._config.limits.message_bytes_max,
                stall_ns=clock.seconds(self._config.read_deadline_s),
                connections_max=2 * self._config.sessions_max,
            )
        self.gossip.start()
        self.talks.start()

    def close(self) -> None:
        """What was said last on ``gossip`` and ``talks`` has a moment to leave."""
        if self.reads is not None:
            self.reads.close()
        self.data.close()
        self.server.close()
        self.gossip.close()
        self.talks.close()
        self.context.term()
