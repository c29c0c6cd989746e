"""Giving everything away before a node leaves, asked by its own program or by an administrator."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

from p2pkv import wire
from p2pkv.answers import Frames, Handler
from p2pkv.authority import Authority
from p2pkv.errors import AuthorityUnavailable, Conflict
from p2pkv.ownership import Ownership
from p2pkv.sessions import Response, Session
from p2pkv.wire import Kind

log = logging.getLogger("p2pkv.node")


class Draining:
    """Says in the node's record that it wants to leave; the planner and the mover do the rest."""

    def __init__(self, authority: Authority, ownership: Ownership, chance: random.Random) -> None:
        self._authority = authority
        self._ownership = ownership
        self._random = chance
        self._asked = asyncio.Event()
        self._wanted = False

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What administrators ask."""
        return {Kind.DRAIN: self._on_drain}

    def _on_drain(self, session: Session, body: wire.Drain, frames: Frames, now: int) -> Response:
        self._wanted = body.draining
        self._asked.set()
        return Kind.PONG, wire.Empty(), ()

    async def run(self) -> None:
        """Write into our record what others asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await self._authority.update_node(draining=self._wanted)
            except AuthorityUnavailable as e:
                log.warning("draining waits for etcd: %s", e)
                self._asked.set()
                await asyncio.sleep(self._random.uniform(0.5, 1.0))

    async def drain(self, limit_s: float) -> bool:
        """Whether all buckets were given away in time. False also if nobody can take them."""
        try:
            async with asyncio.timeout(limit_s):
                await self._authority.update_node(draining=True)
                while self._ownership.held:
                    if not self._others():
                        return False
                    await asyncio.sleep(0.05)
        except (TimeoutError, AuthorityUnavailable, Conflict):
            return not self._ownership.held
        return True

    def _others(self) -> bool:
        nodes, me = self._ownership.view.nodes, self._ownership.me.node
        return any(n != me and not r.draining for n, r in nodes.items())
