"""What a replica wants done, in values. Pure.

They are all that goes out of it, and are carried out in order by whoever owns it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pkv.records import BucketChange
from p2pkv.replicated import NewEpoch, NewEpochAck, Session, SteppedDown
from p2pkv.types import BucketId, Member


class Entry:
    """An operation in the log. ``origin`` is the epoch it was first proposed in; with ``seq`` it
    names the operation for ever. ``staged`` is the value on this node, ``ticket`` who waits."""

    __slots__ = ("op", "origin", "seq", "staged", "ticket")

    def __init__(self, seq: int, origin: int, op: Any, staged: Any, ticket: Any = None) -> None:
        self.seq = seq
        self.origin = origin
        self.op = op
        self.staged = staged
        self.ticket = ticket

    def __repr__(self) -> str:
        return f"Entry({self.seq}, epoch {self.origin}, {self.op})"


class Tell(msgspec.Struct, frozen=True, gc=False):
    """Send a small message. It may get lost."""

    to: Member
    message: NewEpoch | NewEpochAck | SteppedDown


class Apply(msgspec.Struct, frozen=True, gc=False):
    """An operation is committed: carry it out, and answer who waits for it."""

    bucket: BucketId
    entry: Entry


class Discard(msgspec.Struct, frozen=True, gc=False):
    """An operation that was prepared will never be committed from here: free what is staged."""

    bucket: BucketId
    entry: Entry


class Abandon(msgspec.Struct, frozen=True, gc=False):
    """We are no longer primary: who waits for this operation is told that its outcome is unknown.

    The operation stays in the log (invariant I13); whoever carries this out takes its ticket.
    """

    bucket: BucketId
    entry: Entry


class Open(msgspec.Struct, frozen=True, gc=False):
    """Hold the bucket, empty."""

    bucket: BucketId


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Let go of the bucket's objects."""

    bucket: BucketId
    lost: bool
    """Whether they were a live copy that others decided about without us."""


class Propose(msgspec.Struct, frozen=True, gc=False):
    """Change the record; then ``decided``, once the outcome is definite (invariant I12)."""

    change: BucketChange


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Send all objects to a learner; then ``copy_cut``, or ``copy_failed``."""

    bucket: BucketId
    to: Member
    session: Session


class Changed(msgspec.Struct, frozen=True, gc=False):
    """Role, followers or who may be served have changed."""

    bucket: BucketId


Instruction = Tell | Apply | Discard | Abandon | Open | Drop | Propose | Copy | Changed
