"""This node's copy of what stands in etcd, and what it tells others of it. No network, no clock.

What a record means for a bucket is the business of ``replication``; here the newest record of each
is kept, and the addresses of members, and the ring is made for clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from p2pkv import wire
from p2pkv.planner import copies
from p2pkv.records import BucketChange, Delta, NodeRecord, Versioned, View, apply
from p2pkv.types import BucketId, Member, NodeId, Revision

News = Mapping[BucketId, Versioned | None]


class Ownership:
    """The view. ``on_news`` is told of bucket records that are new, ``on_change`` of any change."""

    def __init__(self, me: Member, view: View, fingerprint: str) -> None:
        self.me = me
        self.view = view
        self.bucket_count = view.meta.bucket_count if view.meta else 0
        self.on_news: Callable[[News], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        self._fingerprint = fingerprint
        self._addresses: dict[Member, NodeRecord] = {}
        self._table: wire.Table | None = None
        self._remember_addresses(view.nodes)

    # -- news

    def begin(self) -> None:
        """Tell of everything that the first view has."""
        self.on_news(dict(self.view.buckets))
        self._changed()

    def take_delta(self, delta: Delta) -> None:
        """News from the watch. Records that are older than what we know are passed over."""
        current = self.view.buckets
        stale = {
            b
            for b, new in delta.buckets.items()
            if new is not None and b in current and current[b].mod_revision > new.mod_revision
        }
        kept = {b: current[b] for b in stale}
        apply(self.view, delta)
        current.update(kept)
        self._remember_addresses(delta.nodes)
        self.on_news({b: current.get(b) for b in delta.buckets})
        self._changed()

    def take_records(self, records: Iterable[tuple[BucketId, Versioned | None]]) -> None:
        """Results of transactions of our own, which the watch may tell later."""
        current = self.view.buckets
        new: dict[BucketId, Versioned | None] = {}
        for bucket, versioned in records:
            known = current.get(bucket)
            if versioned is None or (known and known.mod_revision >= versioned.mod_revision):
                continue
            new[bucket] = current[bucket] = versioned
        if new:
            self.on_news(new)
            self._changed()

    def _changed(self) -> None:
        self._table = None
        self.on_change()

    def _remember_addresses(self, nodes: Mapping[NodeId, NodeRecord | None]) -> None:
        for node, record in nodes.items():
            if record is not None:
                self._addresses[Member(node, record.boot)] = record

    # -- what follows

    def affirmations(self) -> list[BucketChange]:
        """The records that name us as holding a copy, to be written again as they are.

        Not those that name us as primary alone: with a backup that counts as alive again, its
        primary may serve.
        """
        return [
            BucketChange(bucket, versioned.mod_revision, versioned.record)
            for bucket, versioned in self.view.buckets.items()
            if self.me in copies(versioned.record)
        ]

    @property
    def held(self) -> int:
        """How many buckets name us as their primary or as in sync."""
        me = self.me
        return sum(
            1
            for v in self.view.buckets.values()
            if v.record.primary == me or me in v.record.in_sync
        )

    @property
    def owned(self) -> int:
        """How many buckets name us as their primary."""
        return sum(1 for v in self.view.buckets.values() if v.record.primary == self.me)

    def member_of(self, node: NodeId) -> Member | None:
        """The registered life of a node."""
        record = self.view.nodes.get(node)
        return None if record is None else Member(node, record.boot)

    def address_of(self, member: Member) -> NodeRecord | None:
        """The last known record of a member, also after it left, while it has a bucket."""
        return self._addresses.get(member)

    # -- what others are told

    def table(self) -> wire.Table:
        """The ring for clients: owners, dead ones too, with the last known addresses."""
        if self._table is None:
            self._table = self._build_table()
        return self._table

    def _build_table(self) -> wire.Table:
        members: dict[Member, int] = {}
        for node, record in self.view.nodes.items():
            members.setdefault(Member(node, record.boot), len(members))
        owners = [-1] * self.bucket_count
        generations = [0] * self.bucket_count
        backups: list[list[int]] = [[] for _ in range(self.bucket_count)]
        for bucket, versioned in self.view.buckets.items():
            if bucket < self.bucket_count:
                record_ = versioned.record
                owners[bucket] = members.setdefault(record_.primary, len(members))
                generations[bucket] = record_.generation
                backups[bucket] = [
                    members.setdefault(m, len(members))
                    for m in record_.in_sync
                    if m != record_.primary
                ]
        addresses = self._addresses = {m: r for m, r in self._addresses.items() if m in members}
        endpoints = [addresses[m].control if m in addresses else () for m in members]
        return wire.Table(
            self._fingerprint,
            int(self.view.revision),
            self.bucket_count,
            list(members),
            endpoints,
            owners,
            generations,
            backups if any(backups) else [],
        )

    @property
    def revision(self) -> Revision:
        return self.view.revision
