"""Heartbeats between nodes: who of the others is in contact with etcd, asked when it matters."""

from __future__ import annotations

import asyncio

from p2pkv import clock, membership
from p2pkv.authority import Authority
from p2pkv.gossip import Gossip
from p2pkv.liveness import Liveness
from p2pkv.membership import HEARTBEAT, Contacts
from p2pkv.types import Revision


class Heartbeats:
    """Sends what ``contacts`` wants to be said, and gives it what others say. Lossy."""

    def __init__(
        self,
        authority: Authority,
        contacts: Contacts,
        liveness: Liveness,
        gossip: Gossip,
        every_s: float,
    ) -> None:
        self.sent_total = 0
        self._authority = authority
        self._contacts = contacts
        self._liveness = liveness
        self._gossip = gossip
        self._every_s = every_s

    async def run(self) -> None:
        """Ask the others about etcd when their word is needed, until cancelled."""
        while True:
            for entry in self._liveness.entries():
                self._contacts.told(entry.member, Revision(entry.digest.revision))
            heartbeat = self._contacts.beat(clock.monotonic(), self._authority.contact_ns)
            if heartbeat is not None:
                self.sent_total += 1
                self._gossip.send_all(HEARTBEAT, membership.encode(heartbeat))
            await asyncio.sleep(self._every_s)

    def take(self, frame: bytes) -> None:
        """A heartbeat of another node. Raises ProtocolError."""
        heartbeat, now = membership.decode(frame), clock.monotonic()
        if self._contacts.heard(heartbeat, now):
            answer = self._contacts.answer(heartbeat, now, self._authority.contact_ns)
            if answer is not None:
                self.sent_total += 1
                self._gossip.send(heartbeat.sender, HEARTBEAT, membership.encode(answer))
