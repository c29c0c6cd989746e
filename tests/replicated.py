"""A few nodes' replicas, driven step by step: messages arrive when a test says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.instructions import Copy, Entry
from p2pkv.leading import Settings, Timing
from p2pkv.records import BucketChange, BucketRecord, Versioned
from p2pkv.replicas import Batch, Committed, Pace, Replicas
from p2pkv.replicated import Op, OpKind, PrepareAck, Session, Talk
from p2pkv.replication import Replica
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

BUCKET = BucketId(7)
LEASE_NS = 500 * MILLISECOND_NS
BEACON_NS = 125 * MILLISECOND_NS
SLOW_NS = 2 * SECOND_NS


def member(name: str, boot: int = 1) -> Member:
    return Member(NodeId(name), BootId(boot))


def put(key: str, size: int = 1) -> Op:
    return Op(int(OpKind.PUT), key.encode(), size=size)


class Objects:
    """Writes down what it is told to do."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.discarded: list[str] = []
        self.unknown: list[Any] = []
        self.done: list[tuple[Any, int]] = []
        self.dropped: list[bool] = []
        self.opened = 0
        self.hidden = 0

    def apply(self, committed: Sequence[Committed], now: int) -> None:
        for _, entries, copies in committed:
            self.applied += [e.op.key.decode() for e in entries]
            self.done += [(e.ticket, copies) for e in entries if e.ticket is not None]

    def discard(self, bucket: BucketId, entry: Entry) -> None:
        self.discarded.append(entry.op.key.decode())

    def abandon(self, bucket: BucketId, entry: Entry) -> None:
        self.unknown.append(entry.ticket)

    def hide(self, bucket: BucketId) -> None:
        self.hidden += 1

    def open(self, bucket: BucketId) -> None:
        self.opened += 1

    def drop(self, bucket: BucketId, lost: bool) -> None:
        self.dropped.append(lost)


class Node:
    """One node, and shorthands for what a test wants to know of its replica of BUCKET."""

    def __init__(self, cluster: Cluster, name: str, min_in_sync: int) -> None:
        self.me = member(name)
        self.cluster = cluster
        self.objects = Objects()
        self.fenced = False
        timing = Timing(slow_ns=SLOW_NS)
        settings = Settings(me=self.me, min_in_sync=min_in_sync, timing=timing)
        self.replicas = Replicas(
            settings, Pace(beacon_ns=BEACON_NS), LEASE_NS, self.objects,
            cluster.registered.get, lambda now: not self.fenced,
        )  # fmt: skip

    @property
    def replica(self) -> Replica:
        return self.replicas.by_bucket[BUCKET]

    @property
    def serves(self) -> bool:
        """Whether it would answer a read now."""
        now = self.cluster.now
        limit = self.replicas.read_limit(now)
        return BUCKET in self.replicas.served and (
            now < limit or now < self.replicas.serve_until(BUCKET)
        )

    def learns_record(self, versioned: Versioned | None = None) -> None:
        """Its watch delivers what stands in etcd, or an older state of it."""
        record = versioned or self.cluster.etcd
        self.replicas.adopt({BUCKET: record}, self.cluster.now)

    def write(self, key: str) -> None:
        self.replicas.submit(BUCKET, put(key), None, key)

    def batches(self) -> list[Batch]:
        return self.replicas.batches(self.cluster.now)

    def takes(self, batch: Batch, sender: Node) -> list[PrepareAck]:
        staged = [[None] * len(p.ops) for p in batch.prepares]
        acks = self.replicas.take_prepares(sender.me, batch.prepares, staged, self.cluster.now)
        self.replicas.settle(self.cluster.now)
        return acks

    def acknowledged(self, acks: Sequence[PrepareAck], by: Node) -> None:
        self.replicas.take_prepare_acks(by.me, acks, self.cluster.now)

    def proposal(self) -> BucketChange:
        """The one change that it wants."""
        [change] = self.replicas.proposals
        self.replicas.proposals = []
        return change

    def copy(self) -> Copy:
        """The one copy that it wants to be made."""
        [copy] = self.replicas.copies
        self.replicas.copies = []
        return copy


class Cluster:
    """Nodes a, b, c; etcd is one record."""

    def __init__(self, names: str = "abc", min_in_sync: int = 1) -> None:
        self.now = 100 * SECOND_NS
        self.registered: dict[NodeId, Member] = {NodeId(n): member(n) for n in names}
        self.nodes = {n: Node(self, n, min_in_sync) for n in names}
        self.etcd: Versioned | None = None
        self._revision = 10

    def __iter__(self) -> Any:
        return iter(self.nodes.values())

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    # -- etcd

    def set_record(self, **fields: Any) -> Versioned:
        """Change the record, as somebody has done."""
        if self.etcd is None:
            record = BucketRecord(epoch=Epoch(1), generation=1, **fields)
        else:
            record = msgspec.structs.replace(self.etcd.record, **fields)
        self._revision += 1
        self.etcd = Versioned(record, Revision(self._revision))
        return self.etcd

    def carry_out(self, change: BucketChange) -> Versioned | None:
        """What stands in etcd after a guarded change."""
        current = self.etcd.mod_revision if self.etcd else 0
        if change.expected == current:
            self._revision += 1
            self.etcd = Versioned(change.record, Revision(self._revision))
        return self.etcd

    def decide(self, node: Node) -> BucketChange:
        """Carry out the node's proposal and tell it."""
        change = node.proposal()
        node.replicas.decided(change, self.carry_out(change), self.now)
        return change

    # -- messages

    def talks(self, sender: Node) -> list[Talk]:
        """What it has to say, taken from it; to be delivered by hand, or not."""
        return sender.replicas.talk()

    def deliver(self, talks: Iterable[Talk], to: str = "abc") -> None:
        for talk in talks:
            if talk.to.node in to:
                self.nodes[talk.to.node].replicas.take_talk(talk, self.now)

    def talk(self, among: str = "abc") -> None:
        """Small messages go to and fro until there are none; those to others are lost."""
        for _ in range(20):
            talks = [t for n in among if n in self.nodes for t in self.talks(self.nodes[n])]
            if not talks:
                return
            self.deliver(talks, among)
        raise AssertionError("they never stop talking")

    def tick(self, among: str = "abc", by_ns: int = BEACON_NS) -> None:
        """Time passes, and all among them say what they have to say."""
        self.now += by_ns
        for name in among:
            if name in self.nodes:
                self.nodes[name].replicas.tick(self.now)
        self.talk(among)

    def replicate(self, sender: Node, to: str = "abc") -> None:
        """PREPAREs leave, arrive and are acknowledged; those to others are lost."""
        for batch in sender.batches():
            if batch.to.node in to:
                receiver = self.nodes[batch.to.node]
                sender.acknowledged(receiver.takes(batch, sender), receiver)

    # -- situations

    def start(self, *names: str, assigned: Sequence[str] = ()) -> Node:
        """The first of ``names`` is primary, the others are in sync, and all know it."""
        first = self.nodes[names[0]]
        assigned = tuple(assigned or names)
        self.set_record(primary=first.me, in_sync=(first.me,), assigned=assigned[:1])
        for node in self:
            node.learns_record()
        first.replicas.tick(self.now)
        self.set_record(assigned=assigned)
        for node in self:
            node.learns_record()
        for name in names[1:]:
            self.make_copy(first, self.nodes[name])
        self.tick()
        return first

    def make_copy(self, primary: Node, learner: Node) -> None:
        """The primary brings a missing member into step, up to the record."""
        self.tick("")
        primary.replicas.tick(self.now)
        copy = primary.copy()
        assert copy.to == learner.me
        base = self.begin_copy(copy, primary, learner)
        assert learner.replicas.learned(BUCKET, copy.session, base, self.now)
        primary.replicas.copy_done(BUCKET, copy.session, self.now)
        for _ in range(3):
            self.tick()
            if primary.replicas.proposals:
                break
        self.decide(primary)
        for node in self:
            node.learns_record()
        self.tick()

    def begin_copy(self, copy: Copy, primary: Node, learner: Node) -> int:
        """All but the last piece has arrived; what the last piece is as of."""
        assert learner.replicas.may_learn(BUCKET, copy.session, primary.me)
        learner.replicas.begin_learning(BUCKET, copy.session, self.now)
        base = primary.replicas.copy_cut(BUCKET, copy.session, self.now)
        assert base is not None
        return base

    def validate(self) -> None:
        for node in self:
            node.replicas.validate()


def session(epoch: int, nonce: int = 0) -> Session:
    return Session(epoch, nonce)
