"""Nodes with real stores, journals and replicas, joined in memory: a test says what arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self, cast

import msgspec
from nodeside import LIMITS, MIB, MS, PLAIN, A, B, C, S, answered, flat, make_store

from p2pkv import ring, wire
from p2pkv.arena import Arena
from p2pkv.handlers import Handlers
from p2pkv.handover import Cut, Failed, Outgoing
from p2pkv.instructions import Copy
from p2pkv.journal import Journal
from p2pkv.leading import Settings, Timing
from p2pkv.learning import Learning
from p2pkv.objects import Object, Pin
from p2pkv.oversized import PIECES_PER_MESSAGE, is_alone, send_staged
from p2pkv.records import BucketRecord, Versioned
from p2pkv.replicas import Batch, Pace, Replicas
from p2pkv.replicated import OpKind
from p2pkv.routing import Exchange, Lost, Pause, Reply
from p2pkv.sessions import Deferred, Response, Session, Sessions
from p2pkv.types import BucketId, Epoch, Member, Revision
from p2pkv.wire import Kind, PutOptions, Status

BUCKETS = 4
BEACON_NS = 125 * MS
LEASE_NS = 500 * MS
SLOW_NS = 2 * S
PIECE_BYTES, PIECE_KEYS = 1024, 4
PIECE_OF_LARGE = LIMITS.message_bytes_max // PIECES_PER_MESSAGE

Content = dict[bytes, tuple[bytes, int, Pin, bool, int | None]]
"""Value, time of expiry, own pin, write-once, checksum."""


class Node:
    """One node, and shorthands for what a client asks of it."""

    def __init__(
        self, cluster: Cluster, me: Member, arena: Arena, min_in_sync: int, **store: Any
    ) -> None:
        self.me = me
        self.cluster = cluster
        self.store = make_store(arena, **store)
        self.sessions = Sessions(
            self.store, ttl_ns=1 << 60, alloc_ns=1 << 60, read_ns=1 << 60, sessions_max=9,
            answers_max=99,
        )  # fmt: skip
        self.fenced = False
        self.journal = Journal(self.store, self.sessions, lambda: cluster.now)
        self.replicas = self.journal.replicas = Replicas(
            Settings(me=me, min_in_sync=min_in_sync, timing=Timing(slow_ns=SLOW_NS)),
            Pace(beacon_ns=BEACON_NS, batch_bytes=LIMITS.message_bytes_max), LEASE_NS,
            self.journal,
            {m.node: m for m in cluster.members}.get, lambda now: not self.fenced,
        )  # fmt: skip
        self.learning = Learning(self.store, self.replicas)
        self.handlers = Handlers(
            self.journal, LIMITS, BUCKETS, lambda now: not self.fenced,
            {Kind.SNAPSHOT: self._snapshot},
        )  # fmt: skip
        self.client = self.session(b"client")
        self._requests = 0

    def session(self, name: bytes, member: Member | None = None) -> Session:
        made = self.sessions.begin(name.ljust(16, b"."), member, self.cluster.now)
        assert made is not None
        return made

    def _snapshot(self, session: Session, body: wire.Snapshot, frames: Any, now: int) -> Response:
        return Kind.SNAPSHOT_ACK, self.learning.take(body, session.member, frames, now), ()

    # -- requests of a client

    def ask(self, kind: Kind, body: Any, frames: Sequence[wire.Buffer] = (),
            session: Session | None = None, request: int = 0) -> Response | Deferred:  # fmt: skip
        """Over the wire to the handlers."""
        if not request:
            self._requests += 1
            request = self._requests
        head = wire.decode(wire.encode(kind, request, 0, body), 1 << 25)
        return self.handlers.handle(
            session or self.client, kind, request, head.body, frames, self.cluster.now
        )

    def put(self, *keys: bytes, value: bytes = b"v", **options: Any) -> Writing:
        body = wire.Put(list(keys), [len(value)] * len(keys), PutOptions(**options))
        return Writing(self.ask(Kind.PUT, body, [value] * len(keys) if value else []))

    def delete(self, *keys: bytes) -> Writing:
        return Writing(self.ask(Kind.DELETE, wire.Delete(list(keys))))

    def expire(self, *keys: bytes, ttl_ms: int) -> Writing:
        return Writing(self.ask(Kind.EXPIRE, wire.Expire(list(keys), ttl_ms)))

    def get(self, *keys: bytes, any_copy: bool = False) -> list[bytes | Status]:
        """The value of each key, or why there is none."""
        response = self.ask(Kind.GET, wire.Get(list(keys), any_copy=any_copy))
        assert not isinstance(response, Deferred)
        body = answered(response, Kind.VALUES)
        views = wire.placed(flat(response[2]), body.sizes, body.starts)
        statuses = body.statuses or bytes(len(keys))
        return [Status(s) if s else bytes(v) for s, v in zip(statuses, views, strict=True)]

    # -- what it has

    def content(self, bucket: int = 0) -> Content:
        """What it holds of a bucket, without what is expired."""
        store, now = self.store, self.cluster.now
        return {
            key: (bytes(store.value(o)), o.expires_at, o.pin, o.options.write_once, o.checksum)
            for key, o in store.buckets[BucketId(bucket)].objects.items()
            if not 0 < o.expires_at <= now
        }

    def keys(self, bucket: int = 0) -> set[bytes]:
        return set(self.content(bucket))


class Writing:
    """The answer of a write, which may come later."""

    def __init__(self, response: Response | Deferred) -> None:
        self._response = response

    @property
    def pending(self) -> bool:
        return isinstance(self._response, Deferred) and self._response.response is None

    @property
    def answer(self) -> Any:
        response = self._response
        if isinstance(response, Deferred):
            assert response.response is not None, "it is not answered yet"
            response = response.response
        return answered(response, Kind(response[0]))

    @property
    def statuses(self) -> list[Status]:
        """Of each key; empty: all OK."""
        return [Status(s) for s in self.answer.statuses]

    @property
    def copies(self) -> list[int]:
        return list(self.answer.copies)


class Cluster:
    """Nodes a, b, c. ``members`` of them that are connected exchange everything; etcd is a dict."""

    def __init__(self, stack: ExitStack, *, min_in_sync: int = 1, arena_bytes: int = MIB,
                 sizes: dict[Member, int] | None = None, **store: Any) -> None:  # fmt: skip
        self.now = 100 * S
        self.members = (A, B, C)
        self.revision = 10
        self.records: dict[BucketId, Versioned] = {}
        self.cut_off: set[Member] = set()
        """Those that nothing reaches, and nobody hears from."""
        self.drive = self._drive
        self.stage = self._stage
        self.nodes: dict[Member, Node] = {}
        for me in self.members:
            arena = stack.enter_context(Arena.create((sizes or {}).get(me, arena_bytes), "repl"))
            self.nodes[me] = Node(self, me, arena, min_in_sync, **store)
        self._links = {
            (to, sender): self.nodes[to].session(b"from " + sender.node.encode(), sender)
            for to in self.members
            for sender in self.members
        }

    def __getitem__(self, member: Member) -> Node:
        return self.nodes[member]

    def connected(self, a: Member, b: Member) -> bool:
        return a not in self.cut_off and b not in self.cut_off

    # -- etcd

    def write(self, bucket: int, **fields: Any) -> None:
        """Change a bucket's record, as somebody has done, and tell everybody who is reached."""
        old = self.records.get(BucketId(bucket))
        if old is None:
            record = BucketRecord(epoch=Epoch(1), generation=1, **fields)
        else:
            record = msgspec.structs.replace(old.record, **fields)
        self._store(BucketId(bucket), record)
        self.tell()

    def _store(self, bucket: BucketId, record: BucketRecord) -> None:
        self.revision += 1
        self.records[bucket] = Versioned(record, Revision(self.revision))

    def tell(self) -> None:
        """The watches deliver what stands in etcd."""
        for node in self.nodes.values():
            if node.me not in self.cut_off:
                node.replicas.adopt(dict(self.records), self.now)

    def decide(self) -> None:
        """Carry out what the nodes propose."""
        for node in self.nodes.values():
            if node.me in self.cut_off:
                continue
            changes, node.replicas.proposals = node.replicas.proposals, []
            for change in changes:
                current = self.records.get(change.bucket)
                if (current.mod_revision if current else 0) == change.expected:
                    self._store(change.bucket, change.record)
                node.replicas.decided(change, self.records.get(change.bucket), self.now)
        self.tell()

    # -- what nodes say to each other

    def send(self, sender: Node, to: Member, kind: Kind, body: Any, frames: list[bytes]) -> Any:
        """A request between nodes; the body of its answer. None: it was lost."""
        if not self.connected(sender.me, to):
            return None
        link = self._links[to, sender.me]
        response = self.nodes[to].ask(kind, body, frames, link)
        assert not isinstance(response, Deferred)
        return answered(response, Kind(response[0]))

    def replicate(self) -> None:
        """PREPAREs leave, arrive and are acknowledged."""
        for node in self.nodes.values():
            for batch in node.replicas.batches(self.now):
                answer = self.prepare(node, batch)
                if answer is None:
                    buckets = [p.bucket for p in batch.prepares]
                    node.replicas.not_delivered(batch.to, buckets)
                else:
                    node.journal.take_no_room(batch.to, answer.acks)
                    node.replicas.take_prepare_acks(batch.to, answer.acks, self.now)

    def prepare(self, node: Node, batch: Batch) -> Any:
        """Send a batch; the body of its answer. None: it was lost, or could not be staged."""
        if is_alone(batch.entries, LIMITS.message_bytes_max):
            if not self.stage(node, batch):
                return None
            body = wire.Replicate(batch.prepares, staged=True)
            return self.send(node, batch.to, Kind.REPLICATE, body, [])
        puts = [e.staged for e in batch.entries if e.op.kind == OpKind.PUT]
        values = [bytes(node.store.value(item)) for item in puts if item.size]
        body = wire.Replicate(batch.prepares)
        return self.send(node, batch.to, Kind.REPLICATE, body, values)

    def _stage(self, node: Node, batch: Batch) -> bool:
        return self.send_staged(node, batch, lambda body, frames: self.send(
            node, batch.to, Kind.STAGE, body, frames
        ))  # fmt: skip

    def send_staged(
        self, node: Node, batch: Batch, exchange: Callable[[wire.Stage, list[bytes]], Any]
    ) -> bool:
        """Send a value in pieces as the replicator does; ``exchange`` answers None for a loss."""
        bucket, entry = batch.prepares[0].bucket, batch.entries[0]
        sending = send_staged(
            batch.to, batch.prepares[0], node.store.value(entry.staged), PIECE_OF_LARGE,
            lambda filled: node.replicas.note_staged(batch.to, bucket, entry, filled, self.now),
            lambda: self.now,
        )  # fmt: skip
        result: Any = None
        try:
            while True:
                effect = sending.send(result)
                assert isinstance(effect, Exchange)
                bodies = [
                    exchange(cast(wire.Stage, r.body), [bytes(f) for f in r.payload])
                    for r in effect.requests
                ]
                result = [
                    Lost("cut off") if b is None else Reply(Kind.STAGED, b, ()) for b in bodies
                ]
        except StopIteration as stop:
            return bool(stop.value)

    def talk(self) -> None:
        """Small messages go to and fro until there are none."""
        for _ in range(20):
            talks = [(n.me, t) for n in self.nodes.values() for t in n.replicas.talk()]
            if not talks:
                return
            for sender, talk in talks:
                if self.connected(sender, talk.to):
                    self.nodes[talk.to].replicas.take_talk(talk, self.now)
        raise AssertionError("they never stop talking")

    def copy(self) -> None:
        """Make the copies that the nodes ask for."""
        for node in self.nodes.values():
            copies, node.replicas.copies = node.replicas.copies, []
            for copy in copies:
                try:
                    self.drive(node, copy)
                    node.replicas.copy_done(copy.bucket, copy.session, self.now)
                except Failed:
                    node.replicas.copy_failed(copy.bucket, copy.session, self.now)

    def outgoing(self, node: Node, copy: Copy, rate: int = 1 << 40) -> Outgoing:
        bucket = node.store.buckets[BucketId(copy.bucket)]
        return Outgoing(node.store, bucket, copy.to, copy.session, rate, PIECE_BYTES, PIECE_KEYS)

    def _drive(self, node: Node, copy: Copy) -> None:
        self.carry_out(node, copy, self.outgoing(node, copy))

    def carry_out(
        self,
        node: Node,
        copy: Copy,
        outgoing: Outgoing,
        exchange: Callable[[wire.Snapshot, list[bytes]], Any] | None = None,
        between: Callable[[], None] = lambda: None,
        at_cut: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry out the effects of a copy as the mover does. Raises Failed."""

        def deliver(body: wire.Snapshot, frames: list[bytes]) -> Any:
            return self.deliver(node, copy.to, body, frames)

        ask = exchange or deliver
        copying = outgoing.run(lambda: self.now)
        result: Any = None
        try:
            while True:
                effect = copying.send(result)
                result = None
                match effect:
                    case Exchange(requests=(request,)):
                        answer = ask(request.body, [bytes(f) for f in request.payload])
                        lost = isinstance(answer, Lost)
                        result = [answer if lost else Reply(Kind.SNAPSHOT_ACK, answer, ())]
                    case Pause():
                        self.now += effect.duration_ns
                    case Cut():
                        result = node.replicas.copy_cut(copy.bucket, copy.session, self.now)
                        at_cut()
                self.validate()
                between()
        except StopIteration:
            return
        finally:
            copying.close()

    def deliver(
        self, node: Node, to: Member, body: wire.Snapshot, frames: list[bytes]
    ) -> wire.SnapshotAck | Lost:
        """A piece of a copy, over the wire."""
        assert len(body.entries) <= PIECE_KEYS
        assert sum(map(len, frames)) <= PIECE_BYTES
        ack: wire.SnapshotAck | None = self.send(node, to, Kind.SNAPSHOT, body, frames)
        return Lost("cut off") if ack is None else ack

    # -- time

    def tick(self, by_ns: int = BEACON_NS) -> None:
        """Time passes for all, and everything that comes of it happens."""
        self.now += by_ns
        for node in self.nodes.values():
            node.replicas.tick(self.now)
            node.journal.tell_evictions()
            node.learning.reap(self.now)
        self.talk()
        self.replicate()
        self.talk()
        self.copy()
        self.decide()
        self.talk()
        self.validate()

    def run_until(self, condition: Callable[[], Any], ticks: int = 200) -> None:
        for _ in range(ticks):
            if condition():
                return
            self.tick()
        raise AssertionError(f"not after {ticks} ticks")

    def settle(self) -> None:
        """Until all copies are made and everything that is written is committed everywhere."""
        self.run_until(self._settled)
        for _ in range(3):
            self.tick()

    def _settled(self) -> bool:
        for bucket, versioned in self.records.items():
            record = versioned.record
            there = {m.node for m in record.in_sync if m not in self.cut_off}
            if there != set(record.assigned) or record.primary.node != record.assigned[0]:
                return False
            if bucket not in self.nodes[record.primary].replicas.served:
                return False
        return not any(r.log for n in self.nodes.values() for r in n.replicas.by_bucket.values())

    # -- situations

    def start(self, *assigned: Member, buckets: Sequence[int] = (0,)) -> Node:
        """The first is primary of these buckets, the others have copies in sync."""
        nodes = tuple(m.node for m in assigned)
        for bucket in buckets:
            self.write(bucket, primary=assigned[0], in_sync=assigned[:1], assigned=nodes)
        self.settle()
        return self.nodes[assigned[0]]

    def validate(self) -> None:
        for node in self.nodes.values():
            node.store.validate()
            if node.me not in self.cut_off:
                node.replicas.validate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.validate()


def keys_in(bucket: int, number: int, name: str = "k") -> list[bytes]:
    """``number`` keys that belong to the bucket."""
    keys: list[bytes] = []
    i = 0
    while len(keys) < number:
        key = b"%s%d" % (name.encode(), i)
        if ring.bucket_of(key, BUCKETS) == bucket:
            keys.append(key)
        i += 1
    return keys


def same(copied: Content, was: Content, tolerance_ns: int = MS) -> None:
    """Equal, but for the milliseconds of a time to live."""
    differing = copied.keys() ^ was.keys()
    assert not differing, f"{differing} are only in one of the two"
    for key, (value, expires, *rest) in copied.items():
        old_value, old_expires, *old_rest = was[key]
        assert value == old_value, key
        assert rest == old_rest, key
        assert (expires > 0) == (old_expires > 0), key
        assert abs(expires - old_expires) <= tolerance_ns, key


__all__ = ["PLAIN", "Cluster", "Node", "Object", "Writing", "keys_in", "same"]
