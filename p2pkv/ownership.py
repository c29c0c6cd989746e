"""What this node holds and may serve, as the records in etcd say. No network, no clock.

A bucket is here in one of three ways: *served* (the record names us as primary), *moving* (we are
its primary and have stopped serving it, to hand it over), or *learned* (its owner sends it to us).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pkv import handover, wire
from p2pkv.records import BucketChange, BucketRecord, Delta, NodeRecord, Versioned, View, apply
from p2pkv.store import Store
from p2pkv.types import BucketId, Member, NodeId, Revision
from p2pkv.wire import Status


class Ownership:
    """The node's copy of the authority's view, and its consequences for the store.

    ``served`` and ``moving`` are shared with the handlers and changed in place.
    """

    def __init__(self, me: Member, store: Store, view: View, fingerprint: str) -> None:
        self.me = me
        self.view = view
        self.served: set[int] = set()
        self.moving: set[int] = set()
        self.incoming: dict[int, handover.Incoming] = {}
        self.lost_buckets = 0
        """Buckets of ours that were given away without us (this node was taken for dead)."""
        self.bucket_count = view.meta.bucket_count if view.meta else 0
        self.on_change: Callable[[], None] = lambda: None
        self._store = store
        self._fingerprint = fingerprint
        self._held: dict[int, int] = {}
        self._attempts: dict[int, tuple[Member, int]] = {}
        """Of each bucket the newest attempt to send it here, by its owner and nonce."""
        self._addresses: dict[Member, NodeRecord] = {}
        self._table: wire.Table | None = None
        self._remember_addresses(view.nodes)
        for bucket in view.buckets:
            self._adopt(bucket)

    # -- news

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
        for bucket in delta.buckets:
            self._adopt(bucket)
        self._changed()

    def take_record(self, bucket: BucketId, new: Versioned | None) -> None:
        """The result of a transaction of our own, which the watch may tell later."""
        known = self.view.buckets.get(bucket)
        if new is None or (known is not None and known.mod_revision >= new.mod_revision):
            return
        self.view.buckets[bucket] = new
        self._adopt(bucket)
        self._changed()

    def _changed(self) -> None:
        self._table = None
        self.on_change()

    def _remember_addresses(self, nodes: Any) -> None:
        for node, record in nodes.items():
            if record is not None:
                self._addresses[Member(node, record.boot)] = record

    # -- consequences

    def _adopt(self, bucket: BucketId) -> None:
        versioned = self.view.buckets.get(bucket)
        record = versioned.record if versioned else None
        if record is not None and record.primary == self.me:
            self._own(bucket, record)
        else:
            self._disown(bucket, record)

    def _own(self, bucket: BucketId, record: BucketRecord) -> None:
        held = self._held.get(bucket)
        if held == record.generation:
            return
        learned = self.incoming.pop(bucket, None)
        if held is not None or learned is None or not learned.leads_to(record):
            if bucket in self._store.buckets:
                self._store.drop_bucket(bucket)
            self._store.open_bucket(bucket)
        self._held[bucket] = record.generation
        self.moving.discard(bucket)
        self.served.add(bucket)

    def _disown(self, bucket: BucketId, record: BucketRecord | None) -> None:
        if self._held.pop(bucket, None) is not None:
            if bucket not in self.moving:
                self.lost_buckets += 1
            self.served.discard(bucket)
            self.moving.discard(bucket)
            self._store.drop_bucket(bucket)
            return
        learned = self.incoming.get(bucket)
        if learned is not None and (
            record is None
            or record.primary != learned.source
            or record.generation != learned.record.generation
            or record.assigned[0] != self.me.node
        ):
            self.forget_incoming(bucket)

    def stop_serving(self, bucket: BucketId, stopped: bool) -> None:
        """Stop serving a bucket that is ours, or serve it again."""
        if bucket in self._held:
            (self.served.discard if stopped else self.served.add)(bucket)
            (self.moving.add if stopped else self.moving.discard)(bucket)

    def holds(self, bucket: BucketId) -> bool:
        return bucket in self._held

    def affirmations(self) -> list[BucketChange]:
        """The records that name us as owner, to be written again as they are."""
        return [
            BucketChange(bucket, versioned.mod_revision, versioned.record)
            for bucket, versioned in self.view.buckets.items()
            if versioned.record.primary == self.me
        ]

    @property
    def held(self) -> int:
        """How many buckets are ours."""
        return len(self._held)

    # -- learning

    def take_snapshot(
        self, body: wire.Snapshot, source: Member | None, frames: Sequence[wire.Buffer], now: int
    ) -> wire.SnapshotAck:
        """A piece of a bucket from its owner."""
        bucket = BucketId(body.bucket)
        status = self._may_learn(bucket, body, source)
        dropped = 0
        if status is Status.OK and source is not None:
            learned = self.incoming.get(bucket)
            if learned is None or learned.nonce != body.nonce or learned.source != source:
                last_source, last_nonce = self._attempts.get(bucket, (source, 0))
                if body.seq != 0 or (last_source == source and body.nonce <= last_nonce):
                    return wire.SnapshotAck(bucket, body.nonce, body.seq, Status.CONFLICT)
                learned = self._begin_learning(bucket, source, body.nonce)
            before = learned.dropped
            status = learned.take(body, frames, now)
            dropped = learned.dropped - before
        return wire.SnapshotAck(bucket, body.nonce, body.seq, status, dropped)

    def _begin_learning(self, bucket: BucketId, source: Member, nonce: int) -> handover.Incoming:
        self.forget_incoming(bucket)
        self._attempts[bucket] = (source, nonce)
        record = self.view.buckets[bucket].record
        learned = handover.Incoming(self._store, bucket, source, nonce, record)
        self.incoming[bucket] = learned
        return learned

    def _may_learn(self, bucket: BucketId, body: wire.Snapshot, source: Member | None) -> Status:
        versioned = self.view.buckets.get(bucket)
        if versioned is None or bucket in self._held:
            return Status.CONFLICT
        record = versioned.record
        if record.primary != source or record.epoch != body.epoch:
            return Status.NOT_PRIMARY
        return Status.OK if record.assigned[0] == self.me.node else Status.MOVING

    def forget_incoming(self, bucket: BucketId) -> None:
        learned = self.incoming.pop(bucket, None)
        if learned is not None:
            learned.give_up_large()
            self._store.drop_bucket(bucket)

    # -- giving away

    def departures(self) -> list[tuple[BucketId, Member]]:
        """Buckets of ours that the planner wants elsewhere, with their next owner, if it lives."""
        result: list[tuple[BucketId, Member]] = []
        for bucket in self.served:
            record = self.view.buckets[BucketId(bucket)].record
            node = record.assigned[0]
            if node != self.me.node and (member := self.member_of(node)) is not None:
                result.append((BucketId(bucket), member))
        return result

    def member_of(self, node: NodeId) -> Member | None:
        """The registered life of a node."""
        record = self.view.nodes.get(node)
        return None if record is None else Member(node, record.boot)

    def address_of(self, member: Member) -> NodeRecord | None:
        """The last known record of a member, also after it left, while it owns a bucket."""
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
        for bucket, versioned in self.view.buckets.items():
            if bucket < self.bucket_count:
                owner = versioned.record.primary
                owners[bucket] = members.setdefault(owner, len(members))
                generations[bucket] = versioned.record.generation
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
        )

    @property
    def revision(self) -> Revision:
        return self.view.revision
