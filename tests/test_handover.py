from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from nodeside import KIB, MIB, MS, PLAIN, A, B, C, S, make_store

from p2pkv import handover, wire
from p2pkv.arena import Arena
from p2pkv.errors import ProtocolError
from p2pkv.handover import Failed, Incoming, Outgoing, Propose, Stop
from p2pkv.objects import Pin, State
from p2pkv.ownership import Ownership
from p2pkv.records import BucketChange, BucketRecord, Delta, Meta, NodeRecord, Versioned, View
from p2pkv.routing import Exchange, Lost, Pause, Reply
from p2pkv.store import Store
from p2pkv.types import BucketId, Epoch, Member, Revision
from p2pkv.wire import Entry, Kind, PutOptions, Snapshot, Status

MOVED, OTHER = BucketId(0), BucketId(1)
PIECE_BYTES, PIECE_KEYS = 1 * KIB, 4

Content = dict[bytes, tuple[bytes, int, Pin, bool, int | None]]
"""Value, time of expiry, own pin, write-once, checksum."""


def record(primary: Member, assigned: Member, epoch: int = 1, generation: int = 0) -> BucketRecord:
    return BucketRecord(
        epoch=Epoch(epoch),
        generation=generation,
        primary=primary,
        in_sync=(primary,),
        assigned=(assigned.node,),
    )


def view_of(records: dict[BucketId, Versioned], revision: int) -> View:
    return View(
        revision=Revision(revision),
        meta=Meta(bucket_count=2, hash_scheme="x", fingerprint="f"),
        nodes={m.node: NodeRecord(boot=m.boot, control=(f"tcp://{m.node}:1",)) for m in (A, B, C)},
        buckets=dict(records),
    )


class Registry:
    """What etcd does for a bucket's record: one writer wins under the guard; all see it later."""

    def __init__(self) -> None:
        self.revision = 10
        self.records = {
            MOVED: Versioned(record(A, B), Revision(9)),
            OTHER: Versioned(record(A, A), Revision(10)),
        }

    def write(self, new: BucketRecord) -> Versioned:
        self.revision += 1
        versioned = self.records[MOVED] = Versioned(new, Revision(self.revision))
        return versioned

    def propose(self, change: BucketChange) -> bool:
        if self.records[MOVED].mod_revision != change.expected:
            return False
        self.write(change.record)
        return True

    def delta(self) -> Delta:
        return Delta(revision=Revision(self.revision), buckets=dict(self.records))


class Peers:
    """Two nodes' stores and what they know, joined by hand."""

    def __init__(self, stack: ExitStack, target_bytes: int = MIB) -> None:
        self.registry = Registry()
        self.now = 1 * S
        self.stores: list[Store] = []
        self.nodes: list[Ownership] = []
        for member, size in ((A, MIB), (B, target_bytes)):
            arena = stack.enter_context(Arena.create(size, "handover"))
            store = make_store(arena)
            view = view_of(self.registry.records, self.registry.revision)
            self.stores.append(store)
            self.nodes.append(Ownership(member, store, view, "f"))
        self.source, self.target = self.nodes

    def outgoing(self, nonce: int = 1, rate: int = 1 << 40) -> Outgoing:
        return Outgoing(
            self.stores[0],
            self.stores[0].buckets[MOVED],
            self.source.view.buckets[MOVED],
            B,
            nonce,
            rate,
            PIECE_BYTES,
            PIECE_KEYS,
        )

    def content(self, which: int) -> Content:
        """What a node holds of the bucket, without what is expired."""
        store = self.stores[which]
        return {
            key: (
                bytes(store.value(o)), o.expires_at, o.pin, o.options.write_once, o.checksum
            )
            for key, o in store.buckets[MOVED].objects.items()
            if not 0 < o.expires_at <= self.now
        }  # fmt: skip

    def put(self, key: bytes, value: bytes, options: PutOptions = PLAIN,
            checksum: int | None = None, bucket: int = MOVED) -> Status:  # fmt: skip
        (status,) = self.stores[0].put_batch(
            [bucket], [key], [value], options, self.now, checksums=[checksum]
        )
        return status

    def deliver(self, body: Snapshot, frames: Sequence[wire.Buffer]) -> wire.SnapshotAck:
        """Over the wire to the target."""
        head = wire.decode(wire.encode(Kind.SNAPSHOT, 1, 0, body), MIB)
        assert head.body == body
        assert len(head.body.entries) <= PIECE_KEYS
        assert sum(len(f) for f in frames) <= PIECE_BYTES
        ack = self.target.take_snapshot(head.body, A, [bytes(f) for f in frames], self.now)
        self.validate()
        return ack

    def tell(self, *nodes: Ownership) -> None:
        for node in nodes:
            node.take_delta(self.registry.delta())
        self.validate()

    def servers(self) -> list[Member]:
        return [node.me for node in self.nodes if MOVED in node.served]

    def validate(self) -> None:
        assert len(self.servers()) <= 1
        for store in self.stores:
            store.validate()

    def drive(
        self,
        outgoing: Outgoing,
        exchange: Callable[[Snapshot, list[bytes]], wire.SnapshotAck | Lost] | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> bool:
        """Carry out the effects as the mover does; ``exchange`` may lose or repeat pieces."""
        moving = outgoing.run(lambda: self.now)
        exchange = exchange or self.deliver
        result: Any = None
        self.pauses: list[int] = []
        try:
            while True:
                effect = moving.send(result)
                result = None
                match effect:
                    case Exchange(requests=(request,)):
                        frames = [bytes(f) for f in request.payload]
                        answer = exchange(request.body, frames)
                        lost = isinstance(answer, Lost)
                        result = [answer if lost else Reply(Kind.SNAPSHOT_ACK, answer, ())]
                    case Pause():
                        self.pauses.append(effect.duration_ns)
                        self.now += effect.duration_ns
                    case Stop():
                        self.source.stop_serving(MOVED, effect.stopped)
                        if effect.stopped:
                            self.at_stop = self.content(0)
                    case Propose():
                        self.at_proposal = self.content(0)
                        result = self.registry.propose(effect.change)
                        self.source.take_record(MOVED, self.registry.records[MOVED])
                        if not result:
                            self.source.stop_serving(MOVED, False)
                self.validate()
                between()
        except StopIteration as stop:
            return bool(stop.value)


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


@pytest.fixture(autouse=True)
def _little_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", 512)


def same(moved: Content, was: Content) -> None:
    """Equal, but for the milliseconds of a time to live."""
    assert moved.keys() == was.keys()
    for key, (value, expires, *rest) in moved.items():
        old_value, old_expires, *old_rest = was[key]
        assert value == old_value, key
        assert rest == old_rest, key
        assert (expires > 0) == (old_expires > 0), key
        assert abs(expires - old_expires) <= 1 * MS, key


# -- the usual way


def test_everything_arrives_as_it_was(peers: Peers) -> None:
    peers.put(b"plain", b"1", checksum=123)
    peers.put(b"empty", b"")
    peers.put(b"once", b"2", PutOptions(write_once=True))
    peers.put(b"soft", b"3", PutOptions(soft_pin=True, ttl_ms=1234))
    peers.put(b"hard", b"4", PutOptions(hard_pin=True))
    peers.put(b"large", bytes(range(256)) * 20, PutOptions(soft_pin=True), checksum=(1 << 64) - 1)
    peers.put(b"exact", b"x" * PIECE_BYTES)
    was = peers.content(0)
    assert peers.drive(peers.outgoing())
    assert (peers.servers(), peers.source.lost_buckets) == ([], 0)
    assert MOVED not in peers.stores[0].buckets
    peers.tell(peers.target, peers.source)
    assert peers.servers() == [B]
    same(peers.content(1), was)
    assert peers.registry.records[MOVED].record == record(B, B, epoch=2)
    assert not peers.target.incoming


def test_an_empty_bucket_moves_with_one_message(peers: Peers) -> None:
    outgoing = peers.outgoing()
    assert peers.drive(outgoing)
    peers.tell(peers.target)
    assert (peers.servers(), peers.content(1)) == ([B], {})
    assert (outgoing.total, outgoing.sent_keys, outgoing.sent_bytes) == (0, 0, 0)


def test_what_is_left_after_the_passes_is_sent_while_stopped(peers: Peers) -> None:
    def busy() -> None:
        if MOVED in peers.source.served:
            for i in range(10):
                peers.put(b"%d" % i, random.randbytes(200))

    busy()
    assert peers.drive(peers.outgoing(), between=busy)
    peers.tell(peers.target)
    same(peers.content(1), peers.at_stop)


def test_a_value_that_ends_the_bucket_is_followed_by_the_last_message(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", MIB)
    peers.put(b"large", b"x" * 3 * PIECE_BYTES)
    sent: list[tuple[int, bool]] = []

    def note(body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck:
        sent.append((body.seq, body.last))
        return peers.deliver(body, frames)

    assert peers.drive(peers.outgoing(), note)
    assert sent == [(0, False), (1, False), (2, False), (3, True)]
    peers.tell(peers.target)
    same(peers.content(1), peers.at_stop)


def test_passes_keep_to_the_rate_and_the_rest_does_not_wait(peers: Peers) -> None:
    for i in range(8):
        peers.put(b"%d" % i, b"x" * 256)
    assert peers.drive(peers.outgoing(rate=1000))
    assert len(peers.pauses) == 2
    assert sum(peers.pauses) == 2 * 1024 * S // 1000


def test_a_large_value_that_changes_under_way_arrives_as_it_is_at_the_end(peers: Peers) -> None:
    peers.put(b"large", b"a" * 5 * PIECE_BYTES)
    seen = 0

    def change(body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck:
        nonlocal seen
        seen += 1
        if seen == 2:
            peers.put(b"large", b"b" * 4 * PIECE_BYTES)
        if seen == 7:
            peers.put(b"large", b"c" * 3)
        return peers.deliver(body, frames)

    assert peers.drive(peers.outgoing(), change)
    assert peers.stores[0].stats().retiring == 0
    assert seen >= 7
    peers.tell(peers.target)
    same(peers.content(1), peers.at_stop)
    assert peers.content(1)[b"large"][0] == b"ccc"


def test_the_time_to_live_of_a_large_value_does_not_grow_by_the_time_it_travels(
    peers: Peers,
) -> None:
    peers.put(b"large", b"a" * 5 * PIECE_BYTES, PutOptions(ttl_ms=60_000))
    assert peers.drive(peers.outgoing(rate=1000))
    assert sum(peers.pauses) > 5 * S
    peers.tell(peers.target)
    same(peers.content(1), peers.at_stop)


def test_a_large_value_that_expires_under_way_does_not_arrive(peers: Peers) -> None:
    peers.put(b"large", b"a" * 5 * PIECE_BYTES, PutOptions(ttl_ms=3_000))
    peers.put(b"stays", b"1")
    assert peers.drive(peers.outgoing(rate=1000))
    peers.tell(peers.target)
    assert peers.content(1).keys() == {b"stays"}
    assert peers.stores[1].stats().allocated == 0


def test_a_large_value_that_expires_and_is_cleared_away_while_the_owner_is_stopped_is_gone(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", MIB)
    peers.put(b"large", b"a" * 5 * PIECE_BYTES, PutOptions(ttl_ms=10))

    def slow(body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck:
        answer = peers.deliver(body, frames)
        peers.now += 4 * MS
        peers.stores[0].reap(peers.now)
        return answer

    assert peers.drive(peers.outgoing(), slow)
    peers.tell(peers.target)
    assert peers.content(1) == {}
    assert peers.stores[1].stats().used_bytes == 0


def test_what_finds_no_room_is_counted_and_the_rest_is_right() -> None:
    with ExitStack() as stack:
        peers = Peers(stack, target_bytes=32 * KIB)
        for i in range(30):
            peers.put(b"%d" % i, b"%d" % i * 200, PutOptions(hard_pin=True))
        peers.put(b"large", b"x" * 40 * KIB)
        outgoing = peers.outgoing()
        assert peers.drive(outgoing)
        assert outgoing.dropped > 1
        peers.tell(peers.target)
        moved = peers.content(1)
        assert len(moved) == 31 - outgoing.dropped
        assert moved.items() <= peers.at_stop.items()


# -- failures


def test_a_peer_that_does_not_answer_ends_the_attempt_and_the_owner_serves_on(
    peers: Peers,
) -> None:
    for i in range(20):
        peers.put(b"%d" % i, b"v" * 300)
    was = peers.content(0)
    for lost_at in range(30):
        answered = 0

        def lossy(body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck | Lost:
            nonlocal answered
            answered += 1
            if answered > lost_at:  # noqa: B023
                return Lost("no answer")
            return peers.deliver(body, frames)

        try:
            assert peers.drive(peers.outgoing(nonce=lost_at + 1), lossy)
            break
        except Failed as e:
            reason = str(e)
        assert reason == "b@1 does not answer: no answer"
        assert peers.servers() == [A]
        assert peers.content(0) == was
        assert not peers.source.moving
        assert peers.stores[0].buckets[MOVED].dirty is None
    else:
        pytest.fail("it never got through")
    assert lost_at > 6


def ack(nonce: int = 1, seq: int = 0, status: int = 0) -> wire.SnapshotAck:
    return wire.SnapshotAck(MOVED, nonce, seq, status)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ack(status=Status.CONFLICT), "status 9"),
        (ack(status=99), "status 99"),
        (ack(nonce=2), "piece 0"),
        (ack(seq=1), "piece 0"),
    ],
)
def test_an_acknowledgement_that_does_not_fit_ends_the_attempt(
    peers: Peers, answer: wire.SnapshotAck, message: str
) -> None:
    with pytest.raises(Failed, match=message):
        peers.drive(peers.outgoing(), lambda *_: answer)
    assert peers.servers() == [A]


def test_a_refusal_of_the_whole_request_ends_the_attempt(peers: Peers) -> None:
    moving = peers.outgoing().run(lambda: peers.now)
    assert next(moving) == Stop(True)
    assert isinstance(next(moving), Exchange)
    error = Reply(Kind.ERROR, wire.Error(wire.Fault.NOT_READY, "not yet"), ())
    assert moving.send([error]) == Stop(False)
    with pytest.raises(Failed, match="refused: not yet"):
        next(moving)


def test_an_attempt_that_is_given_up_lets_go_of_everything(peers: Peers) -> None:
    peers.put(b"large", b"a" * 5 * PIECE_BYTES)
    item = peers.stores[0].buckets[MOVED].objects[b"large"]
    moving = peers.outgoing().run(lambda: peers.now)
    assert isinstance(next(moving), Exchange)
    assert item.readers == 1
    moving.close()
    assert item.readers == 0
    assert peers.stores[0].buckets[MOVED].dirty is None


def test_a_lost_proposal_leaves_the_owner_as_it_was(peers: Peers) -> None:
    peers.put(b"k", b"v")

    def planner_changes_its_mind() -> None:
        if peers.registry.revision == 10:
            peers.registry.write(record(A, C))

    assert not peers.drive(peers.outgoing(), between=planner_changes_its_mind)
    assert peers.servers() == [A]
    same(peers.content(0), peers.at_stop)
    peers.tell(peers.target)
    assert (peers.servers(), peers.target.incoming) == ([A], {})
    assert MOVED not in peers.stores[1].buckets


def test_the_learner_starts_over_with_a_new_attempt(peers: Peers) -> None:
    for i in range(20):
        peers.put(b"%d" % i, b"v" * 300)
    count = 0

    def fails_late(body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck | Lost:
        nonlocal count
        count += 1
        return peers.deliver(body, frames) if count < 4 else Lost("gone")

    with pytest.raises(Failed):
        peers.drive(peers.outgoing(nonce=1), fails_late)
    for i in range(0, 20, 2):
        peers.stores[0].delete_batch([MOVED], [b"%d" % i], peers.now)
    assert peers.drive(peers.outgoing(nonce=2))
    peers.tell(peers.target)
    same(peers.content(1), peers.at_stop)


def test_a_learner_that_forgot_ends_the_attempt(peers: Peers) -> None:
    for i in range(20):
        peers.put(b"%d" % i, b"v" * 300)
    count = 0

    def restarts(body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck:
        nonlocal count
        count += 1
        if count == 3:
            peers.target.forget_incoming(MOVED)
        return peers.deliver(body, frames)

    with pytest.raises(Failed, match="status 9 to piece 2"):
        peers.drive(peers.outgoing(), restarts)
    assert peers.servers() == [A]
    assert MOVED not in peers.stores[1].buckets


# -- the learner's side


def incoming(peers: Peers) -> Incoming:
    return Incoming(peers.stores[1], MOVED, A, 1, record(A, B))


def snapshot(seq: int, *entries: Entry, last: bool = False) -> Snapshot:
    return Snapshot(MOVED, 1, 1, seq, list(entries), last)


def test_a_repeated_piece_is_acknowledged_again_and_not_applied(peers: Peers) -> None:
    learner = incoming(peers)
    first = snapshot(0, Entry(b"k", 1))
    assert learner.take(first, [b"1"], 1) is Status.OK
    assert learner.take(snapshot(1, Entry(b"k", 1)), [b"2"], 1) is Status.OK
    assert learner.take(first, [b"1"], 1) is Status.OK
    assert peers.content(1)[b"k"][0] == b"2"


def test_a_gap_and_a_piece_behind_the_last_are_conflicts(peers: Peers) -> None:
    learner = incoming(peers)
    assert learner.take(snapshot(1, Entry(b"k", 1)), [b"1"], 1) is Status.CONFLICT
    assert learner.take(snapshot(0, last=True), [], 1) is Status.OK
    assert learner.take(snapshot(1, Entry(b"k", 1)), [b"1"], 1) is Status.CONFLICT
    assert learner.take(snapshot(0, last=True), [], 1) is Status.OK
    assert peers.content(1) == {}


@pytest.mark.parametrize(
    ("entries", "frames"),
    [
        ([Entry(b"k", 2)], [b"1"]),
        ([Entry(b"k", 1)], []),
        ([Entry(b"k", 1)], [b"12"]),
        ([Entry(b"k", 9, start=0, piece=3), Entry(b"l", 0)], [b"123"]),
        ([Entry(b"k", 9, start=3, piece=3)], [b"12"]),
    ],
)
def test_pieces_that_do_not_fit_their_entries_are_refused(
    peers: Peers, entries: list[Entry], frames: list[bytes]
) -> None:
    learner = incoming(peers)
    learner.take(snapshot(0, Entry(b"there", 1)), [b"1"], 1)
    with pytest.raises(ProtocolError):
        learner.take(snapshot(1, *entries), frames, 1)
    assert peers.content(1).keys() == {b"there"}
    assert learner.take(snapshot(1, last=True), [], 1) is Status.OK


@pytest.mark.parametrize(
    "second", [Entry(b"k", 9, start=5, piece=3), Entry(b"k", 9, start=3, piece=7)]
)
def test_parts_out_of_order_or_behind_the_end_are_refused(peers: Peers, second: Entry) -> None:
    learner = incoming(peers)
    learner.take(snapshot(0, Entry(b"k", 9, start=0, piece=3)), [b"123"], 1)
    with pytest.raises(ProtocolError, match="of a value of 9 bytes"):
        learner.take(snapshot(1, second), [b"x" * second.piece], 1)
    assert peers.content(1) == {}


def test_parts_of_a_value_that_found_no_room_or_was_given_up_are_passed_over(
    peers: Peers,
) -> None:
    learner = incoming(peers)
    learner.take(snapshot(0, Entry(b"k", 2 * MIB, start=0, piece=3)), [b"123"], 1)
    learner.take(snapshot(1, Entry(b"k", 2 * MIB, start=3, piece=3)), [b"123"], 1)
    assert learner.dropped == 1
    learner.take(snapshot(2, Entry(b"a", 9, start=0, piece=3)), [b"123"], 1)
    learner.take(snapshot(3, Entry(b"b", 9, start=3, piece=3)), [b"456"], 1)
    learner.take(snapshot(4, Entry(b"c", 3, start=0, piece=3)), [b"ccc"], 1)
    learner.take(snapshot(5, last=True), [], 1)
    assert peers.content(1).keys() == {b"c"}
    assert peers.stores[1].stats().allocated == 0


@pytest.mark.parametrize(
    "entry",
    [
        b"ttl_ms", b"flags", b"checksum", b"start",
    ],
)  # fmt: skip
def test_negative_figures_do_not_pass_the_wire(entry: bytes) -> None:
    bad = Entry(b"k", 1, **{entry.decode(): -1})
    with pytest.raises(ProtocolError, match=">= 0"):
        wire.decode(wire.encode(Kind.SNAPSHOT, 1, 0, snapshot(0, bad)), MIB)


# -- random schedules


class Schedule:
    """Random traffic on the owner while the bucket moves, and a network that fails."""

    def __init__(self, seed: int, peers: Peers) -> None:
        self.random = random.Random(seed)
        self.peers = peers
        self.trouble = self.random.choice([0.0, 0.0, 0.01, 0.03])
        self.old: list[tuple[Snapshot, list[bytes]]] = []

    def traffic(self) -> None:
        peers, rand = self.peers, self.random
        store = peers.stores[0]
        for _ in range(rand.randrange(6)):
            key = b"%d" % rand.randrange(40)
            if MOVED not in peers.source.served or rand.random() < 0.1:
                peers.now += rand.randrange(3) * MS
                store.reap(peers.now)
                continue
            match rand.randrange(8):
                case 0 | 1 | 2:
                    size = rand.choice([0, 1, 100, 500, PIECE_BYTES, PIECE_BYTES + 1, 5000])
                    self.write(key, rand.randbytes(size))
                case 3:
                    store.delete_batch([MOVED], [key], peers.now)
                case 4:
                    store.expire_batch([MOVED], [key], rand.choice([0, 5, 500]) * MS, peers.now)
                case 5:
                    item = store.find(MOVED, key, peers.now)
                    if item is not None:
                        store.set_pin(item, rand.choice([Pin.NONE, Pin.SOFT, Pin.HARD]))
                case 6:
                    peers.put(b"filler%d" % rand.randrange(9), bytes(100 * KIB), bucket=OTHER)
                case 7:
                    store.delete_range(MOVED, key[:1], 3, peers.now)

    def write(self, key: bytes, value: bytes) -> None:
        rand = self.random
        options = PutOptions(
            if_absent=rand.random() < 0.1,
            write_once=rand.random() < 0.2,
            soft_pin=rand.random() < 0.2,
            hard_pin=rand.random() < 0.1,
            ttl_ms=rand.choice([0, 0, 0, 3, 1000]),
        )
        self.peers.put(key, value, options, rand.choice([None, rand.randrange(1, 1 << 64)]))

    def exchange(self, body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck | Lost:
        peers, rand = self.peers, self.random
        if rand.random() < self.trouble:
            return Lost("the request was lost")
        if rand.random() < self.trouble:
            peers.target.forget_incoming(MOVED)
        while self.old and rand.random() < 0.3:  # late and repeated pieces, of older attempts too
            peers.deliver(*rand.choice(self.old[-20:]))
        self.old.append((body, frames))
        answer = peers.deliver(body, frames)
        if rand.random() < 0.2:
            assert peers.deliver(body, frames).status == answer.status
        if rand.random() < self.trouble:
            return Lost("the answer was lost")
        return answer

    def planner(self) -> None:
        """Now and then the record changes under the owner's hands."""
        registry = self.peers.registry
        if registry.records[MOVED].record.primary == A and self.random.random() < self.trouble / 2:
            registry.write(record(A, B))
        if self.random.random() < 0.3:
            self.peers.source.take_delta(registry.delta())

    def between(self) -> None:
        self.traffic()
        self.planner()

    def run(self) -> int:
        """Attempts until it is handed over."""
        peers = self.peers
        for nonce in range(1, 200):
            try:
                if peers.drive(peers.outgoing(nonce), self.exchange, self.between):
                    return nonce
            except Failed:
                pass
            assert peers.servers() == [A]
            self.traffic()
            peers.tell(*self.random.sample(peers.nodes, self.random.randrange(3)))
            assert peers.servers() == [A]
        raise AssertionError("200 attempts failed")


@pytest.mark.parametrize("seed", range(120))
def test_any_schedule_moves_exactly_what_was_there_when_the_owner_stopped(seed: int) -> None:
    print("seed", seed)
    with ExitStack() as stack:
        peers = Peers(stack)
        schedule = Schedule(seed, peers)
        for _ in range(20):
            schedule.traffic()
        schedule.run()
        order = list(peers.nodes)
        schedule.random.shuffle(order)
        for node in order:
            peers.tell(node)
        assert peers.servers() == [B]
        moved = peers.content(1)
        unsure = {
            k
            for k, e in [*peers.at_stop.items(), *moved.items()]
            if e[1] and abs(e[1] - peers.now) <= MS
        }
        gone = {k for k, e in peers.at_stop.items() if 0 < e[1] <= peers.now} | unsure
        same(
            {k: v for k, v in moved.items() if k not in unsure},
            {k: v for k, v in peers.at_stop.items() if k not in gone},
        )
        assert all(
            o.state is State.COMMITTED for o in peers.stores[1].buckets[MOVED].objects.values()
        )
        assert peers.stores[1].stats().allocated == 0
        for old in schedule.old[-30:]:
            assert peers.deliver(*old).status != Status.OK
        same(peers.content(1), moved)


def test_the_record_of_the_next_owner_keeps_the_generation_and_the_plan() -> None:
    current = Versioned(record(A, B, epoch=7, generation=3), Revision(42))
    change = handover.change_of(MOVED, current, B)
    assert (change.bucket, change.expected) == (MOVED, 42)
    assert change.record == record(B, B, epoch=8, generation=3)


def test_a_new_attempt_drops_what_an_abandoned_copy_still_holds(peers: Peers) -> None:
    peers.stores[1].open_bucket(MOVED)
    peers.stores[1].put_batch([MOVED], [b"stale"], [b"1"], PLAIN, 1)
    incoming(peers)
    assert peers.content(1) == {}
