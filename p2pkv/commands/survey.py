"""What etcd and the nodes say of a cluster, gathered for ``status``, ``ring`` and ``doctor``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from p2pkv import clock
from p2pkv.blocking_driver import SocketDriver
from p2pkv.commands.output import MISS, USAGE, Failure
from p2pkv.config import ClientConfig
from p2pkv.planner import registered
from p2pkv.records import BucketRecord, View
from p2pkv.routing import Answer, Exchange, Operation, Reply, Request, Router
from p2pkv.types import BucketId, Member, NodeId
from p2pkv.wire import Empty, Kind, NodeStats


def read_view(config: ClientConfig) -> View:
    """The cluster's records. Raises AuthorityUnavailable, and Failure without etcd or cluster."""
    from p2pkv.authority import discover

    if config.etcd is None:
        raise Failure("this needs etcd: give --etcd-endpoints instead of --seeds", USAGE)
    view = asyncio.run(discover(config.etcd, config.cluster))
    if view.meta is None:
        places = ", ".join(config.etcd.endpoints)
        raise Failure(f"there is no cluster {config.cluster!r} in the etcd at {places}", MISS)
    return view


class Said(msgspec.Struct, frozen=True):
    """A node's answer: its figures, or why there are none."""

    stats: NodeStats | None
    reason: str
    round_trip_us: float
    """Of a request on a connection that is open."""


def ask_nodes(config: ClientConfig, endpoints: Sequence[str]) -> dict[str, Said]:
    """Ask each endpoint, all at once. Silence and refusals are answers too."""
    if not endpoints:
        return {}
    driver = SocketDriver(config, Router())
    try:
        with ThreadPoolExecutor(min(len(endpoints), config.connections_max, 16)) as threads:
            said = threads.map(lambda e: driver.run(_ask(e, config.timeout_s)), endpoints)
            return dict(zip(endpoints, said, strict=True))
    finally:
        driver.close()


def _ask(endpoint: str, timeout_s: float) -> Operation[Said]:
    """Twice, since the first time includes making the connection."""
    deadline = clock.monotonic() + clock.seconds(timeout_s)
    (answer,) = yield Exchange([Request(endpoint, Kind.STATS, Empty())], deadline)
    started = clock.monotonic()
    if isinstance(answer, Reply):
        (answer,) = yield Exchange([Request(endpoint, Kind.STATS, Empty())], deadline)
    return _said(answer, (clock.monotonic() - started) / 1e3)


def _said(answer: Answer, round_trip_us: float) -> Said:
    if not isinstance(answer, Reply):
        return Said(None, answer.reason, 0.0)
    if answer.kind != Kind.NODE_STATS:
        return Said(None, getattr(answer.body, "message", "an unexpected answer"), 0.0)
    return Said(answer.body, "", round_trip_us)


class Share(msgspec.Struct):
    """One node's part of the ring, in buckets."""

    owned: int = 0
    assigned: int = 0
    """Where the plan wants them."""
    arriving: int = 0
    leaving: int = 0


class Buckets(msgspec.Struct):
    """The ring as a whole, in buckets."""

    total: int
    without_owner: int = 0
    """No node has ever been given them."""
    moving: int = 0
    """Owned by another node than the plan wants."""
    lost_owner: int = 0
    """Owned by a node that is not registered any more."""
    short_of_copies: int = 0
    """Served, with fewer copies than the cluster is to keep."""


def count_buckets(view: View) -> Buckets:
    """How many buckets are not as they should be."""
    total = view.meta.bucket_count if view.meta else 0
    factor = view.meta.replication_factor if view.meta else 1
    alive = registered(view)
    buckets = Buckets(total)
    for bucket in map(BucketId, range(total)):
        versioned = view.buckets.get(bucket)
        if versioned is None:
            buckets.without_owner += 1
        elif versioned.record.primary not in alive:
            buckets.lost_owner += 1
        elif moving(versioned.record):
            buckets.moving += 1
        if versioned is not None and len(alive.intersection(versioned.record.in_sync)) < factor:
            buckets.short_of_copies += 1
    return buckets


def moving(record: BucketRecord) -> bool:
    """Whether the bucket is not where the plan wants it."""
    return record.assigned[:1] != (record.primary.node,)


def shares(view: View) -> dict[NodeId, Share]:
    """Each node's part, also of nodes that own buckets and are gone."""
    result = {node: Share() for node in sorted(view.nodes)}
    for versioned in view.buckets.values():
        record = versioned.record
        owner = result.setdefault(record.primary.node, Share())
        owner.owned += 1
        target = result.setdefault(record.assigned[0], Share()) if record.assigned else None
        if target is not None:
            target.assigned += 1
        if target is not None and target is not owner:
            owner.leaving += 1
            target.arriving += 1
    return result


def control_endpoints(view: View) -> Mapping[Member, str]:
    """Where each registered node is asked."""
    return {Member(n, r.boot): r.control[0] for n, r in view.nodes.items() if r.control}


__all__ = [
    "Buckets",
    "Said",
    "Share",
    "ask_nodes",
    "control_endpoints",
    "count_buckets",
    "moving",
    "read_view",
    "shares",
]
