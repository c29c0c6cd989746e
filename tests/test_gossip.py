from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from nodeside import A, B, C

from p2pkv import gossip
from p2pkv.config import Limits
from p2pkv.errors import ConfigError
from p2pkv.gossip import Gossip
from p2pkv.membership import Heartbeat
from p2pkv.types import Member


def heartbeat(sender: Member, sent: int = 1) -> Heartbeat:
    return Heartbeat(sender, sent, 1, ())


class Party:
    """A node's gossip and the heartbeats that it heard."""

    def __init__(self, context: zmq.Context[Any], token: bytes = b"cluster") -> None:
        self.heard: list[Heartbeat] = []
        self.gossip = Gossip(context, Limits(), token, self.heard.append)
        self.endpoint = f"tcp://127.0.0.1:{self.gossip.bind('127.0.0.1')}"
        self.gossip.start()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
async def parties(context: zmq.Context[Any]) -> Any:
    made = [Party(context) for _ in range(3)]
    yield made
    for party in made:
        party.gossip.close()


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.002)


async def heard_by(receiver: Party, sender: Party, beat: Heartbeat) -> None:
    """Repeated, as heartbeats are, until one arrives: those before the connection are dropped."""
    end = time.monotonic() + 10
    while beat not in receiver.heard:
        assert time.monotonic() < end, "no heartbeat came"
        sender.gossip.send(beat)
        await asyncio.sleep(0.005)


async def test_heartbeats_reach_all_peers(parties: list[Party]) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(b, a, heartbeat(A))
    await heard_by(c, a, heartbeat(A))
    assert not a.heard


async def test_only_those_that_are_named_are_connected(parties: list[Party]) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint})
    await heard_by(b, a, heartbeat(A, 1))
    a.gossip.connect({C: c.endpoint})
    await heard_by(c, a, heartbeat(A, 2))
    assert heartbeat(A, 2) not in b.heard
    # The same peer at another address: its next life.
    a.gossip.connect({C: b.endpoint})
    await heard_by(b, a, heartbeat(A, 3))
    assert heartbeat(A, 3) not in c.heard
    a.gossip.connect({})
    a.gossip.send(heartbeat(A, 4))


async def test_an_address_that_is_none_is_passed_over(parties: list[Party]) -> None:
    a, b, _ = parties
    a.gossip.connect({C: "nonsense", B: b.endpoint})
    await heard_by(b, a, heartbeat(A))


async def test_what_is_no_heartbeat_of_this_cluster_is_refused_and_counted(
    context: zmq.Context[Any], parties: list[Party]
) -> None:
    _, b, _ = parties
    beat = msgspec.msgpack.encode(heartbeat(A))
    stranger = Party(context, b"another cluster")
    stranger.gossip.connect({B: b.endpoint})
    raw: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(b.endpoint)
    bad = [[b"cluster"], [b"cluster", beat, b""], [b"cluster", b"\xff"], [b"cluster", beat[:-1]],
           [b"", beat], [b"cluster", b""]]  # fmt: skip
    for frames in bad:
        raw.send_multipart(frames)
    await until(lambda: b.gossip.refused == len(bad), "all refusals")
    end = time.monotonic() + 10
    while b.gossip.refused == len(bad):
        assert time.monotonic() < end
        stranger.gossip.send(heartbeat(C))
        await asyncio.sleep(0.005)
    assert b.heard == []
    raw.send_multipart([b"cluster", beat])
    await until(lambda: b.heard, "a right one after the wrong ones")
    raw.close(0)
    stranger.gossip.close()


async def test_more_than_one_look_takes_is_heard_too(
    context: zmq.Context[Any], parties: list[Party]
) -> None:
    _, b, _ = parties
    raw: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(b.endpoint)
    for i in range(300):
        raw.send_multipart([b"cluster", msgspec.msgpack.encode(heartbeat(A, i))])
    await until(lambda: len(b.heard) == 300, "all heartbeats")
    assert [h.sent_ns for h in b.heard] == list(range(300))
    raw.close(0)


async def test_a_peer_that_does_not_read_gets_few_old_ones_and_others_get_theirs(
    context: zmq.Context[Any], parties: list[Party]
) -> None:
    a, b, _ = parties
    asleep: zmq.Socket[bytes] = context.socket(zmq.PULL)
    asleep.setsockopt(zmq.RCVHWM, 1)
    port = asleep.bind_to_random_port("tcp://127.0.0.1")
    a.gossip.connect({C: f"tcp://127.0.0.1:{port}", B: b.endpoint})
    await heard_by(b, a, heartbeat(A, 1))
    await until(lambda: asleep.poll(0) or a.gossip.send(heartbeat(A, 1)), "its connection")
    began = time.monotonic()
    for i in range(2, 5_000):
        a.gossip.send(heartbeat(A, i))
        if i % 50 == 0:
            await asyncio.sleep(0)
    assert time.monotonic() - began < 5
    await heard_by(b, a, heartbeat(A, 6_000))
    asleep.close(0)


async def test_a_peer_that_is_not_there_holds_nothing_up(parties: list[Party]) -> None:
    a, b, c = parties
    b.gossip.close()
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(c, a, heartbeat(A))


async def test_listening_where_it_cannot_be_is_a_configuration_error(
    context: zmq.Context[Any],
) -> None:
    party = Gossip(context, Limits(), b"x", lambda _: None)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        party.bind("203.0.113.1")
    party.close()


def test_its_queues_are_short() -> None:
    assert gossip.QUEUE_MAX <= 64
