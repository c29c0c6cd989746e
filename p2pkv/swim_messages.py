"""What nodes tell each other about who is alive: rumors, digests, packets. Pure.

A packet is one MessagePack array, typed and bounded: unknown fields, a name that is none and a list
that is too long are refused while decoding. What it says is a hint; nothing here changes who owns
what.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta as Limit

from p2pkv.errors import ProtocolError
from p2pkv.types import Member, NodeId

MEMBERS_MAX = 4096
"""The largest cluster, and what one exchange of all states can hold."""
RUMORS_MAX = 24
"""Rumors that ride on one packet: some 2 KiB."""
PACKET_BYTES_MAX = 1 << 20
INCARNATION_MAX = (1 << 53) - 1

_Count = Annotated[int, Limit(ge=0, le=(1 << 62) - 1)]
_Incarnation = Annotated[int, Limit(ge=0, le=INCARNATION_MAX)]
_Address = Annotated[str, Limit(max_length=256)]
_node_id = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch


class Status(IntEnum):
    """What is believed of a member. Of two rumors of one incarnation the greater one counts."""

    ALIVE = 0
    SUSPECT = 1
    """Did not answer, or its connection broke. It has some time to refute that."""
    DEAD = 2
    LEFT = 3
    """Said good-bye itself."""


class Digest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a node is doing, in its own words; rides on each of its packets."""

    serial: _Count = 0
    """Rises with each digest of one member, so that an older one is not taken for news."""
    put_bytes_per_s: _Count = 0
    """Value bytes that were put lately."""
    reads_per_s: _Count = 0
    """Objects that were read lately."""
    queue_depth: _Count = 0
    """Data connections that are in the middle of a request or an answer."""
    memory_permille: Annotated[int, Limit(ge=0, le=1000)] = 0
    """Part of its memory that is in use."""
    revision: _Count = 0
    """etcd's revision of the set of registered members that it counts majorities in."""
    paths_broken: _Count = 0
    """Peers to which it has no data connection although it wants one."""


class Rumor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """That a member has a status."""

    member: Member
    status: Status
    incarnation: _Incarnation
    """Raised by the member itself, to refute. A rumor of a lower one is outdated."""
    address: _Address = ""
    """Where packets to it go."""
    by: NodeId = NodeId("")
    """Who suspects it. Empty with other statuses."""

    def __post_init__(self) -> None:
        _check(self.member)
        if self.by and not _node_id(self.by):
            raise ValueError(f"not a node id: {self.by!r:.80}")


class Packet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all packets."""

    sender: Member
    incarnation: _Incarnation
    digest: Digest
    rumors: Annotated[tuple[Rumor, ...], Limit(max_length=RUMORS_MAX)]

    def __post_init__(self) -> None:
        _check(self.sender)


class Ping(Packet, frozen=True, tag="ping"):
    """Answered by Ack, if the target is still in that life."""

    seq: _Count
    target: Member


class PingRequest(Packet, frozen=True, tag="request"):
    """ "Ping the target for me": answered by Ack, or by Nack when the target does not answer."""

    seq: _Count
    target: Member


class Ack(Packet, frozen=True, tag="ack"):
    seq: _Count


class Nack(Packet, frozen=True, tag="nack"):
    """The target did not answer the helper in time; the helper itself is well."""

    seq: _Count


class Gossip(Packet, frozen=True, tag="gossip"):
    """Nothing but rumors."""


class State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that is known of one member."""

    rumor: Rumor
    digest: Digest


class Sync(Packet, frozen=True, tag="sync"):
    """All states that the sender knows (push); the answer has the other's (pull)."""

    states: Annotated[tuple[State, ...], Limit(max_length=MEMBERS_MAX)]
    answer: bool


AnyPacket = Ping | PingRequest | Ack | Nack | Gossip | Sync

_decoder = msgspec.msgpack.Decoder(AnyPacket)
_encoder = msgspec.msgpack.Encoder()


def encode(packet: AnyPacket) -> bytes:
    return _encoder.encode(packet)


def decode(frame: bytes) -> AnyPacket:
    """Check and decode a packet. Raises ProtocolError."""
    if len(frame) > PACKET_BYTES_MAX:
        raise ProtocolError(f"a packet of {len(frame)} bytes is over {PACKET_BYTES_MAX}")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"packet: {e}") from None


def _check(member: Member) -> None:
    if not _node_id(member.node) or not 0 <= member.boot < 1 << 62:
        raise ValueError(f"not a member: {member!r:.120}")
