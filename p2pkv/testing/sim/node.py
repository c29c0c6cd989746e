"""A node: the real replicas, driven as a process would drive them. A life ends with its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2pkv.instructions import Entry
from p2pkv.leading import Settings, Timing
from p2pkv.records import BucketChange, Versioned, View
from p2pkv.replicas import Batch, Pace, Replicas
from p2pkv.replicated import Op, OpKind, Prepare, PrepareAck, Talk
from p2pkv.types import BucketId, Member, NodeId
from p2pkv.wire import Status

from . import plan as measures
from .audit import Auditor
from .copying import Copier, Piece, Student
from .etcd_model import EtcdModel
from .objects import SimObjects, Ticket
from .world import Network, World

SENDS_MAX = 32
"""Batches for one member that follow on each other at once."""

Answer = Callable[[Any], None]


class Surroundings(msgspec.Struct):
    """What all nodes share."""

    world: World
    network: Network
    etcd: EtcdModel
    auditor: Auditor
    plan: measures.Plan
    evict: Callable[[Any, BucketId, bytes], None]
    """Has a node give a value up, on the record."""


class SimNode:
    """A place where processes live, one after the other. It has a clock, and may be paused."""

    def __init__(self, around: Surroundings, number: int) -> None:
        rng = around.world.rng
        self.around = around
        self.number = number
        self.name = NodeId(f"n{number}")
        self.life: Life | None = None
        self.others: list[SimNode] = []
        self.paused_until = 0
        self._rate = 1 + rng.uniform(-measures.RATE_ERROR, measures.RATE_ERROR)
        self._offset = rng.randrange(1, 10**12)
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def clock(self) -> int:
        return self._offset + int(self.around.world.now * self._rate)

    @property
    def paused(self) -> bool:
        return self.paused_until > self.around.world.now

    def do(self, life: Life, what: Callable[..., None], *arguments: Any) -> None:
        """Do something in a life, unless it is over; later, if it is paused."""
        if life is not self.life:
            return
        if self.paused or self._waiting:
            self._waiting.append((what, arguments))
            return
        what(*arguments)
        life.flush()

    def receive(self, what: str, *arguments: Any) -> None:
        """A message for whoever lives here now."""
        if self.life is not None:
            self.do(self.life, getattr(self.life, what), *arguments)

    def pause(self, duration_ns: float) -> None:
        world = self.around.world
        if self.life is not None and not self.paused:
            world.note(self.name, "paused for", int(duration_ns) // 1_000_000, "ms")
            self.paused_until = world.now + int(duration_ns)
            world.after(duration_ns, self.wake)

    def wake(self) -> None:
        """All that came in the meantime is there at once; timers may run before it."""
        if self.paused:
            return
        if self.life is not None and self.around.world.rng.random() < 0.5:
            self.life.tick()
        waiting, self._waiting = self._waiting, []
        for what, arguments in waiting:
            if self.life is not None:
                what(*arguments)
                self.life.flush()

    def boot(self) -> None:
        """A new process starts, with empty memory, once it reaches etcd."""
        if self.life is not None:
            return
        if not self.around.etcd.reached_by(self.number):
            self.around.world.after(50 * measures.TICK_NS // 15, self.boot)
            return
        member = self.around.etcd.register(self.name)
        self.around.world.note(member, "boots")
        self.life = Life(self, member)
        self.life.start()

    def crash(self) -> None:
        if self.life is not None:
            self.around.world.note(self.life.me, "crashes")
            self.around.auditor.lives.pop(self.life.me, None)
            self.life = None
            self._waiting.clear()
            self.paused_until = 0


class Life:
    """One process."""

    def __init__(self, node: SimNode, me: Member) -> None:
        around = node.around
        self.node = node
        self.me = me
        self.world, self.network = around.world, around.network
        self.etcd, self.auditor = around.etcd, around.auditor
        self.round_trips = around.plan.round_trips
        self.view = View()
        self.objects = SimObjects(self, around.auditor)
        timing = Timing(
            resend_ns=measures.RESEND_NS,
            slow_ns=measures.SLOW_NS,
            promote_step_ns=measures.PROMOTE_STEP_NS,
        )
        settings = Settings(me=me, min_in_sync=around.plan.min_in_sync, timing=timing)
        pace = Pace(beacon_ns=measures.BEACON_NS, entries_max=3, batch_bytes=4, copies_max=2)
        self.replicas = Replicas(
            settings, pace, measures.LEASE_NS, self.objects, self._member_of,
            lambda now: not self.fenced(now),
        )  # fmt: skip
        self.copiers: dict[int, Copier] = {}
        self.students: dict[int, Student] = {}
        self.contact_ns = node.clock()
        """When the last sign of life that etcd confirmed was sent."""
        self._contacts: list[tuple[int, int]] = []
        """Signs of life, and the revisions at which they were confirmed, that do not count yet."""
        self._seen = 0
        """How much of etcd's history has been followed."""
        self._kept_alive_ns = node.clock()

    def start(self) -> None:
        self.auditor.lives[self.me] = self
        self.view = self.etcd.snapshot()
        self._seen = len(self.etcd.events)
        self.replicas.adopt(dict(self.view.buckets), self.now)
        self.world.after(self.world.rng.random() * measures.TICK_NS, self._ticking)
        self.world.after(self.network.delay_ns(), self._watching)
        self.flush()

    @property
    def now(self) -> int:
        return self.node.clock()

    @property
    def over(self) -> bool:
        return self.node.life is not self

    def _member_of(self, node: NodeId) -> Member | None:
        record = self.view.nodes.get(node)
        return Member(node, record.boot) if record is not None else None

    def fenced(self, now: int) -> bool:
        return now - self.contact_ns > measures.FENCE_NS

    # -- time

    def _ticking(self) -> None:
        if self.over:
            return
        if not self.node.paused:
            self.tick()
        self.world.after(measures.TICK_NS * self.world.rng.uniform(0.7, 1.3), self._ticking)

    def tick(self) -> None:
        now = self.now
        if now - self._kept_alive_ns > measures.SESSION_NS // 4:
            self._kept_alive_ns = now
            self.ask_etcd(
                lambda: self.etcd.keep_alive(self.me),
                lambda revision: self._in_contact(now, revision),
            )
        answers = now - self.contact_ns < measures.SESSION_NS // 2
        self.replicas.tick(now, answers)
        self._make_room(now)
        for copier in list(self.copiers.values()):
            copier.tick(now)
        for student in list(self.students.values()):
            student.tick(now)
        self.flush()
        self.auditor.check(self)

    def _make_room(self, now: int) -> None:
        """Evict a value now and then, and give up what has lived long enough."""
        if self.world.rng.random() < 0.02:
            for bucket in list(self.replicas.served):
                for key, (_, ttl_ms) in sorted(self.objects.stores.get(bucket, {}).items()):
                    if ttl_ms or self.world.rng.random() < 0.2:
                        self.world.after(0, self.node.do, self, self.evict, bucket, key)

    def evict(self, bucket: BucketId, key: bytes) -> None:
        replica = self.replicas.get(bucket)
        if replica is None or not replica.writable or self.fenced(self.now):
            return
        if self.pending_value(bucket, key)[0] is not None:
            self.node.around.evict(self, bucket, key)

    def _in_contact(self, sent_ns: int, revision: int) -> None:
        """etcd has answered. It counts once what stood there then has been read."""
        self._contacts.append((sent_ns, revision))
        self._count_contacts()

    def _count_contacts(self) -> None:
        while self._contacts and self._contacts[0][1] <= self.view.revision:
            self.contact_ns = max(self.contact_ns, self._contacts.pop(0)[0])

    # -- sending

    def flush(self) -> None:
        """Let everything out that wants to leave."""
        if self.over:
            return
        for _ in range(SENDS_MAX):
            batches = self.replicas.batches(self.now) if self.replicas.has_unsent else []
            for batch in batches:
                self._send_batch(batch)
            if not batches:
                break
        for talk in self.replicas.talk():
            self.send(talk.to, "take_talk", self._encoded(talk))
        proposals, self.replicas.proposals = self.replicas.proposals, []
        for change in proposals:
            self.propose(change)
        copies, self.replicas.copies = self.replicas.copies, []
        for copy in copies:
            self.copiers[copy.bucket] = Copier(self, copy)

    def _encoded(self, message: Any) -> Any:
        if not self.round_trips:
            return message
        return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))

    def send(self, to: Member, what: str, *arguments: Any) -> None:
        target = int(to.node[1:])
        peer = self.node.others[target]
        self.network.send(self.node.number, target, peer.receive, what, *arguments)

    def hear_of_death(self, member: Member) -> None:
        self.replicas.suspect(member)

    def take_talk(self, talk: Talk) -> None:
        self.replicas.take_talk(talk, self.now)

    def _send_batch(self, batch: Batch) -> None:
        values = [e.staged.value for e in batch.entries]
        prepares = [self._encoded(p) for p in batch.prepares]
        self.send(batch.to, "take_batch", self.me, batch.to, prepares, values)
        buckets = [p.bucket for p in batch.prepares]
        self.world.after(
            measures.PREPARE_TIMEOUT_NS, self.node.do, self, self._give_up_batch, batch.to, buckets
        )

    def _give_up_batch(self, to: Member, buckets: Sequence[int]) -> None:
        """As with an answer that did not come; some did, which must do no harm."""
        if self.world.rng.random() < 0.2:
            self.replicas.not_delivered(to, buckets)

    def take_batch(
        self, sender: Member, to: Member, prepares: Sequence[Prepare], values: Sequence[Any]
    ) -> None:
        if to != self.me:
            return
        staged, start = [], 0
        for prepare in prepares:
            staged.append([self.objects.stage(v) for v in values[start : start + len(prepare.ops)]])
            start += len(prepare.ops)
        acks = self.replicas.take_prepares(sender, prepares, staged, self.now)
        self.world.after(0, self.node.do, self, lambda: self.replicas.settle(self.now))
        self.send(sender, "take_acks", self.me, sender, [self._encoded(a) for a in acks])

    def take_acks(self, sender: Member, to: Member, acks: Sequence[PrepareAck]) -> None:
        if to == self.me:
            self.replicas.take_prepare_acks(sender, acks, self.now)

    # -- etcd

    def ask_etcd(
        self, request: Callable[[], Any], answer: Answer, lost: Answer | None = None
    ) -> None:
        """Have ``request`` carried out in etcd. Request and answer may be late or lost."""
        rng, number = self.world.rng, self.node.number
        open_ = [True]

        def close(how: Answer | None, value: Any) -> None:
            if open_:
                open_.clear()
                if how is not None:
                    how(value)

        def arrive() -> None:
            if not self.etcd.reached_by(number):
                return
            value = request()
            if self.etcd.reached_by(number) and rng.random() >= self.network.loss:
                self.world.after(self.network.delay_ns(), self.node.do, self, close, answer, value)

        if rng.random() >= self.network.loss:
            self.world.after(self.network.delay_ns(), arrive)
        timeout = measures.ETCD_TIMEOUT_NS * rng.uniform(0.8, 1.2)
        self.world.after(timeout, self.node.do, self, close, lost, None)

    def propose(self, change: BucketChange) -> None:
        """Issue the change until its outcome is known."""

        def decided(current: Versioned | None) -> None:
            self.world.note(self.me, "proposed", change.record, "stands", current)
            self.replicas.decided(change, current, self.now)

        self.ask_etcd(lambda: self.etcd.change(change), decided, lambda _: self.propose(change))

    def _watching(self) -> None:
        """Follow etcd's history: in order, late, some states of a record left out."""
        if self.over:
            return
        if self.etcd.reached_by(self.node.number) and not self.node.paused:
            events = self.etcd.events
            limit = len(events)
            if self.world.rng.random() < 0.5:
                limit = min(limit, self._seen + 1)
            if limit > self._seen:
                news, self._seen = events[self._seen : limit], limit
                self.world.after(0, self.node.do, self, self._take_news, news)
        self.world.after(self.network.delay_ns() + measures.TICK_NS / 3, self._watching)

    def _take_news(self, news: Sequence[Any]) -> None:
        buckets: dict[BucketId, Versioned | None] = {}
        for revision, field, key, value in news:
            self.view.revision = revision
            target = getattr(self.view, field)
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value
            if field == "buckets":
                buckets[key] = value
            elif field == "boots":
                self.replicas.forget([Member(key, boot) for boot in range(1, value)])  # type: ignore[arg-type]
        if buckets:
            self.replicas.adopt(buckets, self.now)
        self._count_contacts()

    # -- reading and writing

    def may_read(self, bucket: int) -> bool:
        """As the read path decides it: by the limit for all buckets, else for this one."""
        replicas, now = self.replicas, self.now
        if bucket not in replicas.served or self.fenced(now):
            return False
        return now < replicas.read_limit(now) or replicas.status(bucket, now) == Status.OK

    def pending_value(self, bucket: int, key: bytes) -> tuple[Any, Entry | None]:
        """What a key will be when all that is prepared is committed, and the last to change it."""
        replica = self.replicas.by_bucket[bucket]
        for seq in range(replica.last, replica.applied, -1):
            entry: Entry = replica.log[seq]
            kind = entry.op.kind
            if kind == OpKind.DELETE_RANGE and key.startswith(entry.op.key):
                return None, entry
            if entry.op.key == key and kind != OpKind.EXPIRE:
                return (entry.staged.value if kind == OpKind.PUT else None), entry
        found = self.objects.stores[bucket].get(key)
        return (found[0] if found else None), None

    def submit(self, bucket: BucketId, op: Op, value: Any, tell: Callable[[bool], None]) -> None:
        """Have an operation committed; to be called only while the replica is writable."""
        replica = self.replicas.by_bucket[bucket]
        if bucket not in self.replicas.shared:
            replica.note_written(1)
            self.objects.write(bucket, replica.applied, replica.tenure, op, value)
            tell(True)
            return
        ticket = Ticket(tell)
        ticket.entry = self.replicas.submit(bucket, op, self.objects.stage(value), ticket)

    # -- copies

    def take_piece(self, piece: Piece) -> None:
        if piece.to != self.me:
            return
        student = self.students.get(piece.bucket)
        if piece.index == 0 and (student is None or student.session < piece.session):
            if not self.replicas.may_learn(piece.bucket, piece.session, piece.sender):
                return
            self.replicas.begin_learning(piece.bucket, piece.session, self.now)
            student = self.students[piece.bucket] = Student(self, piece)
        if student is not None and student.session == piece.session:
            student.take(piece)

    def take_piece_ack(self, bucket: int, to: Member, session: Any, index: int) -> None:
        copier = self.copiers.get(bucket)
        if to == self.me and copier is not None and copier.session == session:
            copier.acknowledged(index)

    def dropped(self, bucket: int) -> None:
        """The bucket's objects have been let go of."""
        self.students.pop(bucket, None)
