"""Real sockets and real time under the state machine: three nodes' membership in one process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq
from nodeside import A, B, C

from p2pkv import clock
from p2pkv.config import Limits, SwimConfig
from p2pkv.errors import ProtocolError
from p2pkv.gossip import Gossip
from p2pkv.liveness import PACKET, Liveness
from p2pkv.roster import Alive, Dead, Event, Suspect
from p2pkv.swim import Swim
from p2pkv.swim_messages import Digest, Status
from p2pkv.types import Member

LOCAL = SwimConfig(preset="local")


class Party:
    """One node's membership, and what it tells its subscribers."""

    def __init__(self, context: zmq.Context[Any], member: Member) -> None:
        self.member = member
        self.events: list[Event] = []
        self.digest = Digest(serial=1, revision=member.boot)
        self.gossip = Gossip(
            context,
            Limits(),
            b"cluster",
            {PACKET: lambda frame: self.liveness.take(frame)},
            lambda other: self.liveness.broke(other),
        )
        self.address = f"tcp://127.0.0.1:{self.gossip.bind('127.0.0.1')}"
        swim = Swim(LOCAL, member, self.address, random.Random(member.node), clock.monotonic())
        self.liveness = Liveness(swim, self.gossip, lambda: self.digest)
        self.unsubscribe = self.liveness.subscribe(self.events.append)
        self.gossip.start()
        self.task = asyncio.create_task(self.liveness.run())

    def meet(self, *others: Party) -> None:
        addresses = {other.member: other.address for other in others}
        self.gossip.connect(addresses)
        self.liveness.register(addresses)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        self.gossip.close()


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


@pytest.fixture
async def parties() -> AsyncIterator[list[Party]]:
    context: zmq.Context[Any] = zmq.Context()
    parties = [Party(context, member) for member in (A, B, C)]
    for party in parties:
        party.meet(*(other for other in parties if other is not party))
    yield parties
    for party in parties:
        await party.stop()
    context.term()


async def hear_each_other(parties: list[Party]) -> None:
    """Until each has heard of each other's digest, so that all connections are there."""

    def heard() -> bool:
        entries = [entry for party in parties for entry in party.liveness.entries()]
        return all(entry.digest.revision == 1 for entry in entries)

    await until(heard, "digests of all")


async def test_those_that_are_registered_are_alive_and_tell_of_themselves(
    parties: list[Party],
) -> None:
    await hear_each_other(parties)
    assert parties[0].events[:2] == [Alive(B), Alive(C)]
    assert parties[0].liveness.status(B) == Status.ALIVE


async def test_one_that_is_gone_is_suspected_at_once_and_dead_soon(parties: list[Party]) -> None:
    await hear_each_other(parties)
    a, b, c = parties
    await c.stop()
    began = time.monotonic()
    await until(lambda: a.liveness.status(C) == b.liveness.status(C) == Status.DEAD, "its death")
    took_s = time.monotonic() - began
    assert took_s < 5, "by its connection, and not by all timeouts in a row"
    for party in (a, b):
        of_c = [event for event in party.events if event.member == C]
        assert of_c[0] == Alive(C)
        assert of_c[-2:] == [Suspect(C), Dead(C)]


async def test_one_that_says_good_bye_has_left(parties: list[Party]) -> None:
    await hear_each_other(parties)
    a, b, c = parties
    c.liveness.leave()
    await c.stop()
    await until(lambda: a.liveness.status(C) == b.liveness.status(C) == Status.LEFT, "its leaving")
    assert Dead(C) not in a.events + b.events


async def test_a_member_that_is_only_heard_of_is_connected_too(parties: list[Party]) -> None:
    await hear_each_other(parties)
    a, b, _ = parties
    context: zmq.Context[Any] = zmq.Context()
    newcomer = Party(context, Member(C.node, type(C.boot)(2)))
    newcomer.meet(a)
    await until(lambda: b.liveness.status(newcomer.member) == Status.ALIVE, "word of it")
    assert Dead(C) in b.events
    await until(
        lambda: any(
            entry.member == newcomer.member and entry.digest.serial
            for entry in b.liveness.entries()
        ),
        "its own word",
    )
    await newcomer.stop()
    context.term()


async def test_a_subscription_ends_when_it_is_ended(parties: list[Party]) -> None:
    await hear_each_other(parties)
    a, b, c = parties
    a.unsubscribe()
    before = list(a.events)
    await c.stop()
    await until(lambda: a.liveness.status(C) == b.liveness.status(C) == Status.DEAD, "its death")
    assert a.events == before


async def test_a_frame_that_is_no_packet_is_refused(parties: list[Party]) -> None:
    with pytest.raises(ProtocolError):
        parties[0].liveness.take(b"nonsense")
