"""The nouns that all modules share."""

from __future__ import annotations

from typing import NewType

import msgspec

NodeId = NewType("NodeId", str)
"""A node's name, kept across restarts: 1 to 64 of ``a-z A-Z 0-9 . _ -``."""

BootId = NewType("BootId", int)
"""How often the node has started; it only rises (``boots/<id>`` in etcd)."""

BucketId = NewType("BucketId", int)
Epoch = NewType("Epoch", int)
Revision = NewType("Revision", int)
"""An etcd revision. The token of a record is its ``mod_revision``."""


class Member(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One life of a node. A restart is another member: its memory is empty (invariant I10)."""

    node: NodeId
    boot: BootId

    def __str__(self) -> str:
        return f"{self.node}@{self.boot}"

    @classmethod
    def parse(cls, text: str) -> Member:
        """The inverse of ``str``. Raises ValueError."""
        node, _, boot = text.rpartition("@")
        if not node:
            raise ValueError(f"not a member (node@boot): {text!r}")
        return cls(NodeId(node), BootId(int(boot)))


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an arena: ``length`` usable bytes at ``offset``."""

    offset: int
    length: int
