"""What the replicas of a bucket say to each other, as it goes on the wire. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta as Limit

from p2pkv.errors import ProtocolError
from p2pkv.types import Member

BUCKETS_MAX = 65536
LOG_ENTRIES_MAX = 16384
"""Operations of one bucket that may be prepared and not committed."""

_Bucket = Annotated[int, Limit(ge=0, lt=BUCKETS_MAX)]
_Count = Annotated[int, Limit(ge=0, lt=1 << 62)]
_Key = Annotated[bytes, Limit(max_length=1024)]


class OpKind(IntEnum):
    """What an operation does to a bucket, whatever is there: the primary has decided."""

    PUT = 0
    """``key`` has this value now."""
    DELETE = 1
    EVICT = 2
    """The primary gave ``key`` up for want of room; so do the others."""
    EXPIRE = 3
    """``key`` lives ``ttl_ms`` from now; 0: for ever."""
    DELETE_RANGE = 4
    """All keys from ``key`` on that start with it, up to ``extra`` (empty: to the end)."""
    PIN = 5
    """``extra`` (a client) pins ``key`` for ``ttl_ms``."""
    UNPIN = 6
    COMPARE = 7
    """Each copy notes the digest of what it holds, or with ``extra`` one slice of it."""


class Op(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One operation. The value of a PUT travels beside it."""

    kind: Annotated[int, Limit(ge=0, le=7)]
    key: _Key
    size: Annotated[int, Limit(ge=0, lt=1 << 62)] = 0
    ttl_ms: Annotated[int, Limit(ge=0, lt=1 << 53)] = 0
    flags: Annotated[int, Limit(ge=0, lt=256)] = 0
    """WRITE_ONCE, SOFT_PIN, HARD_PIN; NO_ROOM."""
    checksum: Annotated[int, Limit(ge=0)] = 0
    extra: Annotated[bytes, Limit(max_length=1024)] = b""


WRITE_ONCE, SOFT_PIN, HARD_PIN = 1, 2, 4
NO_ROOM = 8
"""An EVICT that was a PUT, on a node that had no room for the value."""


class Session(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One time of being brought into step: by a new epoch (nonce 0), or by a copy (invariant I11).

    Later ones are greater. The nonce of a copy is made of the revision of the bucket's record that
    the primary went by, and a number of its own.
    """

    epoch: _Count
    nonce: _Count = 0

    @property
    def revision(self) -> int:
        """What the primary knew of etcd when the copy began."""
        return self.nonce >> NONCE_BITS


NONCE_BITS = 20
"""Of a copy's own number; the rest of the nonce is a revision."""


class Prepare(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """PREPARE for a run of operations of one bucket, in order; and what is committed so far."""

    bucket: _Bucket
    epoch: _Count
    commit: _Count
    first: _Count
    """Sequence number of the first."""
    ops: Annotated[list[Op], Limit(max_length=LOG_ENTRIES_MAX)]
    origins: Annotated[list[_Count], Limit(max_length=LOG_ENTRIES_MAX)] = []
    """The epoch in which each was proposed first. Empty: in this one."""


class PrepareAck(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything up to ``last`` is prepared here."""

    bucket: _Bucket
    epoch: _Count
    last: _Count
    session: Session
    dropped: Annotated[list[_Count], Limit(max_length=LOG_ENTRIES_MAX)] = []
    """Those among the prepared that have no copy here, because there was no room."""


class NewEpoch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A new primary has committed up to ``base`` and prepared ``origins`` behind it."""

    bucket: _Bucket
    epoch: _Count
    base: _Count
    origins: Annotated[list[_Count], Limit(max_length=LOG_ENTRIES_MAX)]


class NewEpochAck(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The log here is the new primary's up to ``last``."""

    bucket: _Bucket
    epoch: _Count
    last: _Count
    session: Session


class SteppedDown(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The primary of ``epoch`` has handed the bucket over and serves nothing any more."""

    bucket: _Bucket
    epoch: _Count


class Commit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything up to ``commit`` is committed."""

    bucket: _Bucket
    epoch: _Count
    commit: _Count


class Beacon(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender claims to be primary of these buckets, and asks for a grant to serve reads."""

    sent_ns: _Count
    """On the sender's clock; names the beacon."""
    claims: dict[_Bucket, _Count]
    """Epoch by bucket."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer: granted but for ``refused``, counted from the beacon's sending."""

    sent_ns: _Count
    refused: Annotated[list[_Bucket], Limit(max_length=BUCKETS_MAX)] = []


class Talk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything small that one node has to tell another at this moment. May get lost."""

    sender: Member
    to: Member
    beacon: Beacon | None = None
    grant: Grant | None = None
    commits: list[Commit] = []
    new_epochs: list[NewEpoch] = []
    new_epoch_acks: list[NewEpochAck] = []
    stepped_down: list[SteppedDown] = []


TALK = b"r"
"""The kind of a Talk among the messages of ``gossip``."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Talk)


def encode(talk: Talk) -> bytes:
    return _encoder.encode(talk)


def decode(frame: bytes) -> Talk:
    """Raises ProtocolError."""
    try:
        return _decoder.decode(frame)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a message between replicas: {e}") from None
