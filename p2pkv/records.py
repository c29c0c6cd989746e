"""What stands in etcd, and the guard under which it may change. Pure.

One cluster's keys, under ``/p2pkv/<cluster>/``::

    meta          Meta           written once, at the cluster's creation
    nodes/<id>    NodeRecord     under the node's session: there while the process keeps it alive
    boots/<id>    decimal        highest boot ever registered, never deleted
    buckets/<b>   BucketRecord   who owns the bucket; token: mod_revision
    planner       Member         under a session: the one node that plans placement

Values are JSON, so that ``etcdctl get --prefix`` is readable when nothing else works.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

FORMAT_VERSION = 1


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters that are fixed when a cluster is created."""

    format_version: int = FORMAT_VERSION
    bucket_count: int
    hash_scheme: str
    replication_factor: int = 1
    min_in_sync: int = 1
    fingerprint: str
    """Random; tells a cluster that was deleted and made again from its predecessor."""


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A running node: how to reach it and what it can carry."""

    boot: BootId
    control: tuple[str, ...]
    """ZeroMQ endpoints for requests, best first, e.g. ``tcp://10.0.0.7:4711``, ``tcp://[::1]:4711``."""
    gossip: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    replication: tuple[str, ...] = ()
    """Where it takes the small messages of replicas."""
    public_key: str = ""
    weight: float = 1.0
    host: str = ""
    zone: str = ""
    capacity_bytes: int = 0
    draining: bool = False
    """The node wants to leave: it takes no bucket and gives its own away."""


class BucketRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who owns a bucket. ``epoch`` rises with every change of ``primary`` or ``generation``."""

    epoch: Epoch
    generation: int
    """Rises when the bucket starts again empty, because all copies were lost."""
    primary: Member
    in_sync: tuple[Member, ...]
    eligible: tuple[Member, ...] = ()
    assigned: tuple[NodeId, ...]
    """Where the planner wants the copies, primary first. The owner moves them there."""


class Versioned(msgspec.Struct, frozen=True):
    """A bucket's record and the token that guards its next change."""

    record: BucketRecord
    mod_revision: Revision


class BucketChange(msgspec.Struct, frozen=True):
    """Put ``record`` if the bucket's ``mod_revision`` still is ``expected`` (0: does not exist)."""

    bucket: BucketId
    expected: Revision
    record: BucketRecord


class View(msgspec.Struct, kw_only=True):
    """Everything of one cluster at one revision."""

    revision: Revision = Revision(0)
    meta: Meta | None = None
    nodes: dict[NodeId, NodeRecord] = msgspec.field(default_factory=dict)
    boots: dict[NodeId, BootId] = msgspec.field(default_factory=dict)
    buckets: dict[BucketId, Versioned] = msgspec.field(default_factory=dict)
    planner: Member | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in a View up to ``revision``; None stands for a record that was deleted.

    ``meta`` and ``planner`` are UNSET if they did not change. ``gap``: states in between were not
    seen (everything was read anew, or a node record changed twice).
    """

    revision: Revision
    gap: bool = False
    meta: Meta | msgspec.UnsetType | None = msgspec.UNSET
    nodes: dict[NodeId, NodeRecord | None] = msgspec.field(default_factory=dict)
    boots: dict[NodeId, BootId | None] = msgspec.field(default_factory=dict)
    buckets: dict[BucketId, Versioned | None] = msgspec.field(default_factory=dict)
    planner: Member | msgspec.UnsetType | None = msgspec.UNSET

    def __bool__(self) -> bool:
        """Whether anything changed."""
        rest = self.meta is not msgspec.UNSET or self.planner is not msgspec.UNSET
        return bool(self.nodes or self.boots or self.buckets or rest)


def apply(view: View, delta: Delta) -> None:
    """Bring ``view`` to ``delta.revision``."""
    _apply(view.nodes, delta.nodes)
    _apply(view.boots, delta.boots)
    _apply(view.buckets, delta.buckets)
    if not isinstance(delta.meta, msgspec.UnsetType):
        view.meta = delta.meta
    if not isinstance(delta.planner, msgspec.UnsetType):
        view.planner = delta.planner
    view.revision = delta.revision


def difference(old: View, new: View) -> Delta:
    """The delta that brings ``old`` to ``new``."""
    return Delta(
        revision=new.revision,
        meta=msgspec.UNSET if old.meta == new.meta else new.meta,
        nodes=_difference(old.nodes, new.nodes),
        boots=_difference(old.boots, new.boots),
        buckets=_difference(old.buckets, new.buckets),
        planner=msgspec.UNSET if old.planner == new.planner else new.planner,
    )


K = TypeVar("K")
V = TypeVar("V")


def _apply(target: dict[K, V], changes: dict[K, V | None]) -> None:
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


def _difference(old: dict[K, V], new: dict[K, V]) -> dict[K, V | None]:
    changes: dict[K, V | None] = {k: v for k, v in new.items() if old.get(k) != v}
    changes.update((k, None) for k in old.keys() - new.keys())
    return changes
