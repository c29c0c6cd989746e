from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv import swim_messages
from p2pkv.errors import ProtocolError
from p2pkv.swim_messages import (
    RUMORS_MAX,
    Ack,
    AnyPacket,
    Digest,
    Gossip,
    Nack,
    Ping,
    PingRequest,
    Rumor,
    State,
    Status,
    Sync,
    decode,
    encode,
)
from p2pkv.types import BootId, Member, NodeId

A, B = (Member(NodeId(name), BootId(1)) for name in "ab")
DIGEST = Digest(7, 1 << 30, 5000, 3, 999, 42, 1)
RUMOR = Rumor(B, Status.SUSPECT, 3, "tcp://[::1]:4711", NodeId("a"))
HEADER = (A, 5, DIGEST, (RUMOR,))

PACKETS: list[AnyPacket] = [
    Ping(*HEADER, 1, B),
    PingRequest(*HEADER, 2, B),
    Ack(*HEADER, 3),
    Nack(*HEADER, 4),
    Gossip(*HEADER),
    Sync(*HEADER, (State(RUMOR, DIGEST),), answer=True),
]


@pytest.mark.parametrize("packet", PACKETS, ids=lambda p: type(p).__name__)
def test_a_packet_survives_the_wire(packet: AnyPacket) -> None:
    assert decode(encode(packet)) == packet


def raw(**changes: Any) -> bytes:
    """A ping as plain values, with changes."""
    fields = {
        "tag": "ping",
        "sender": ["a", 1],
        "incarnation": 5,
        "digest": [1],
        "rumors": [],
        "seq": 1,
        "target": ["b", 1],
        **changes,
    }
    return msgspec.msgpack.encode(list(fields.values()))


def rumor(**changes: Any) -> bytes:
    fields = {"member": ["b", 1], "status": 1, "incarnation": 3, "address": "", "by": "a"}
    return raw(rumors=[list({**fields, **changes}.values())])


def test_what_the_tests_below_spoil_is_right_as_it_is() -> None:
    assert isinstance(decode(raw()), Ping)
    assert isinstance(decode(rumor()), Ping)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        raw()[:-1],
        raw(tag="shout"),
        raw(extra=1),
        raw(sender=["", 1]),
        raw(sender=["a/b", 1]),
        raw(sender=["a" * 65, 1]),
        raw(sender=["a", -1]),
        raw(sender=["a", 1 << 62]),
        raw(incarnation=-1),
        raw(incarnation=1 << 53),
        raw(seq=-1),
        raw(digest=[-1]),
        raw(digest=[1] * 99),
        raw(digest=[0, 0, 0, 0, 1001]),
        raw(rumors=[[["b", 1], 0, 0]] * (RUMORS_MAX + 1)),
        rumor(member=["b c", 1]),
        rumor(status=4),
        rumor(address="t" * 257),
        rumor(by="not a node"),
        rumor(extra=1),
    ],
)
def test_what_is_no_packet_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="packet"):
        decode(frame)


def test_more_bytes_than_a_packet_may_have_are_not_looked_at() -> None:
    with pytest.raises(ProtocolError, match="over 1048576"):
        decode(bytes(swim_messages.PACKET_BYTES_MAX + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_packet_or_a_protocol_error(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(frame)


def test_all_states_of_the_largest_cluster_fit_into_a_packet() -> None:
    states = tuple(
        State(
            Rumor(
                Member(NodeId(f"node-{i:06}.rack-17.example"), BootId(1 << 20)),
                Status.ALIVE,
                1 << 20,
                "tcp://[2001:db8:1234:5678:9abc:def0:1234:5678]:65535",
            ),
            DIGEST,
        )
        for i in range(swim_messages.MEMBERS_MAX)
    )
    assert len(encode(Sync(*HEADER, states, answer=True))) < swim_messages.PACKET_BYTES_MAX
