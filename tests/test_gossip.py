from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from nodeside import B, C

from p2pkv import gossip
from p2pkv.config import Limits
from p2pkv.errors import ConfigError, ProtocolError
from p2pkv.gossip import Gossip
from p2pkv.types import Member

KIND = b"k"


class Party:
    """A node's gossip, what it heard, and whose connections broke."""

    def __init__(self, context: zmq.Context[Any], token: bytes = b"cluster") -> None:
        self.heard: list[bytes] = []
        self.broken: list[Member] = []
        self.gossip = Gossip(context, Limits(), token, {KIND: self._take}, self.broken.append)
        self.endpoint = f"tcp://127.0.0.1:{self.gossip.bind('127.0.0.1')}"
        self.gossip.start()

    def _take(self, body: bytes) -> None:
        if body == b"nonsense":
            raise ProtocolError("nonsense")
        self.heard.append(body)


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


async def heard_by(receiver: Party, sender: Party, body: bytes) -> None:
    """Repeated until one arrives: those before the connection are dropped."""
    end = time.monotonic() + 10
    while body not in receiver.heard:
        assert time.monotonic() < end, "no message came"
        sender.gossip.send_all(KIND, body)
        await asyncio.sleep(0.005)


async def test_messages_reach_all_peers(parties: list[Party]) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(b, a, b"1")
    await heard_by(c, a, b"1")
    assert not a.heard


async def test_a_message_to_one_reaches_no_other(parties: list[Party]) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(b, a, b"all")
    await heard_by(c, a, b"all")
    a.gossip.send(B, KIND, b"one")
    a.gossip.send(C, KIND, b"other")
    await until(lambda: b"one" in b.heard and b"other" in c.heard, "both")
    assert b"other" not in b.heard
    assert b"one" not in c.heard


async def test_only_those_that_are_named_are_connected(parties: list[Party]) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint})
    await heard_by(b, a, b"1")
    a.gossip.connect({C: c.endpoint})
    await heard_by(c, a, b"2")
    assert b"2" not in b.heard
    # The same peer at another address: its next life.
    a.gossip.connect({C: b.endpoint})
    await heard_by(b, a, b"3")
    assert b"3" not in c.heard
    a.gossip.connect({})
    a.gossip.send_all(KIND, b"4")
    a.gossip.send(C, KIND, b"4")
    assert a.gossip.dropped >= 1


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "inproc://here", "tcp://127.0.0.1:x"])
async def test_an_address_that_is_none_is_passed_over(parties: list[Party], address: str) -> None:
    a, b, _ = parties
    a.gossip.connect({C: address, B: b.endpoint})
    await heard_by(b, a, b"1")


async def test_what_is_no_message_of_this_cluster_is_refused_and_counted(
    context: zmq.Context[Any], parties: list[Party]
) -> None:
    _, b, _ = parties
    stranger = Party(context, b"another cluster")
    stranger.gossip.connect({B: b.endpoint})
    raw: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(b.endpoint)
    bad = [[b"cluster"], [b"cluster", KIND], [b"cluster", KIND, b"1", b""], [b"", KIND, b"1"],
           [b"cluster", b"other", b"1"], [b"cluster", KIND, b"nonsense"]]  # fmt: skip
    for frames in bad:
        raw.send_multipart(frames)
    await until(lambda: b.gossip.refused == len(bad), "all refusals")
    end = time.monotonic() + 10
    while b.gossip.refused == len(bad):
        assert time.monotonic() < end
        stranger.gossip.send_all(KIND, b"1")
        await asyncio.sleep(0.005)
    assert b.heard == []
    raw.send_multipart([b"cluster", KIND, b"1"])
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
    bodies = [b"%d" % i for i in range(300)]
    for body in bodies:
        raw.send_multipart([b"cluster", KIND, body])
    await until(lambda: len(b.heard) == 300, "all messages")
    assert b.heard == bodies
    raw.close(0)


async def test_a_peer_that_does_not_read_gets_few_old_ones_and_others_get_theirs(
    context: zmq.Context[Any], parties: list[Party]
) -> None:
    a, b, _ = parties
    asleep: zmq.Socket[bytes] = context.socket(zmq.PULL)
    asleep.setsockopt(zmq.RCVHWM, 1)
    port = asleep.bind_to_random_port("tcp://127.0.0.1")
    a.gossip.connect({C: f"tcp://127.0.0.1:{port}", B: b.endpoint})
    await heard_by(b, a, b"1")
    await until(lambda: asleep.poll(0) or a.gossip.send_all(KIND, b"1"), "its connection")
    began = time.monotonic()
    for i in range(2, 5_000):
        a.gossip.send_all(KIND, b"%d" % i)
        if i % 50 == 0:
            await asyncio.sleep(0)
    assert time.monotonic() - began < 5
    await heard_by(b, a, b"last")
    assert a.gossip.dropped > 0
    asleep.close(0)


async def test_a_connection_that_breaks_is_told_at_once_and_only_once(
    context: zmq.Context[Any], parties: list[Party]
) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(b, a, b"1")
    assert a.broken == []
    b.gossip.close()
    began = time.monotonic()
    await until(lambda: a.broken, "word of the breach")
    assert time.monotonic() - began < 1
    refusals = 4 * 0.05
    await asyncio.sleep(refusals)
    assert a.broken == [B], "what is refused again is not told again"
    again: zmq.Socket[bytes] = context.socket(zmq.PULL)
    again.bind(b.endpoint)
    await until(lambda: again.poll(0) or a.gossip.send(B, KIND, b"2"), "another connection")
    again.close(0)
    await until(lambda: a.broken == [B, B], "word of the next breach")


async def test_a_connection_that_is_refused_from_the_start_is_told(parties: list[Party]) -> None:
    a, b, c = parties
    b.gossip.close()
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(c, a, b"1")
    await until(lambda: a.broken == [B], "word of the refusal")


async def test_one_that_is_named_no_more_is_not_told_of(parties: list[Party]) -> None:
    a, b, c = parties
    a.gossip.connect({B: b.endpoint, C: c.endpoint})
    await heard_by(b, a, b"1")
    a.gossip.connect({C: c.endpoint})
    b.gossip.close()
    await heard_by(c, a, b"2")
    assert a.broken == []


async def test_what_was_said_before_closing_still_leaves(parties: list[Party]) -> None:
    a, b, _ = parties
    a.gossip.connect({B: b.endpoint})
    await heard_by(b, a, b"1")
    a.gossip.send(B, KIND, b"good-bye")
    a.gossip.close()
    await until(lambda: b"good-bye" in b.heard, "the last word")


async def test_listening_where_it_cannot_be_is_a_configuration_error(
    context: zmq.Context[Any],
) -> None:
    party = Gossip(context, Limits(), b"x", {}, lambda _: None)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        party.bind("203.0.113.1")
    party.close()


def test_its_queues_are_short() -> None:
    assert gossip.QUEUE_MAX <= 64
