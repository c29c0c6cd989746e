"""Runs a node's ``swim``: its packets over ``gossip``, its clock, and who wants to hear of members.

    liveness.subscribe(on_event)        # Alive, Suspect, Dead, Left, each with .member
    liveness.status(member)             # Status, or None

What it says is a hint: good to look sooner, to ask somebody else first, or to wait less.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from p2pkv import clock, swim_messages
from p2pkv.roster import Alive, Entry, Event
from p2pkv.swim import Action, Send, Swim
from p2pkv.swim_messages import Digest, Status
from p2pkv.types import Member

log = logging.getLogger("p2pkv.liveness")

PACKET = b"s"
"""The kind of a packet among the messages of ``gossip``."""

Subscriber = Callable[[Event], object]


class Sender(Protocol):
    """What packets go out by (``gossip.Gossip``)."""

    def add(self, member: Member, endpoint: str) -> None: ...
    def send(self, member: Member, kind: bytes, body: bytes) -> None: ...


class Liveness:
    """``run`` must run; ``take`` and ``broke`` are told what the network brings.

    ``digest`` is asked before each tick for what the node says of itself.
    """

    def __init__(self, swim: Swim, sender: Sender, digest: Callable[[], Digest]) -> None:
        self._swim = swim
        self._sender = sender
        self._digest = digest
        self._subscribers: list[Subscriber] = []
        self._sooner = asyncio.Event()
        self._waits_until_ns = 0

    # -- what is known

    @property
    def swim(self) -> Swim:
        return self._swim

    def entries(self) -> list[Entry]:
        """The other members, those that died or left lately among them."""
        return self._swim.entries()

    def status(self, member: Member) -> Status | None:
        """What is believed of a member; None: nothing is known of it."""
        return self._swim.status(member)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call it with each Alive, Suspect, Dead and Left from now on; returns what ends that.

        It is called on the event loop, and must not wait.
        """
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    # -- events

    def register(self, addresses: Mapping[Member, str]) -> None:
        """These members have a node record, with the endpoints of their gossip."""
        self._carry_out(self._swim.register(addresses, clock.monotonic()))

    def take(self, frame: bytes) -> None:
        """A packet came. Raises ProtocolError if it is none."""
        packet = swim_messages.decode(frame)
        self._carry_out(self._swim.receive(packet, clock.monotonic()))

    def broke(self, member: Member) -> None:
        """A connection to it is refused, closed or reset."""
        self._carry_out(self._swim.connection_broke(member, clock.monotonic()))

    def leave(self) -> None:
        """Say good-bye to everybody, so that nobody takes it for a death."""
        self._carry_out(self._swim.leave(clock.monotonic()))

    async def run(self) -> None:
        """Probe, gossip and conclude when it is time to. Ends when it is cancelled."""
        while True:
            self._swim.digest = self._digest()
            self._carry_out(self._swim.tick(clock.monotonic()))
            self._waits_until_ns = self._swim.due_ns
            self._sooner.clear()
            wait_s = max(0, self._waits_until_ns - clock.monotonic()) / clock.SECOND_NS
            try:
                async with asyncio.timeout(wait_s):
                    await self._sooner.wait()
            except TimeoutError:
                continue

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._sender.send(action.to, PACKET, swim_messages.encode(action.packet))
            else:
                self._tell(action)
        if self._swim.due_ns < self._waits_until_ns:
            self._sooner.set()

    def _tell(self, event: Event) -> None:
        log.info("%s is %s", event.member, type(event).__name__.lower())
        if isinstance(event, Alive):
            entry = next(e for e in self._swim.entries() if e.member == event.member)
            self._sender.add(entry.member, entry.address)
        for subscriber in list(self._subscribers):
            subscriber(event)
