"""A bucket is copied from its primary to a learner, while it is being used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from nodeside import KIB, MIB, MS, PLAIN, A, B, S, make_store
from replicating import BEACON_NS, PIECE_BYTES, Cluster, Content, keys_in, same

from p2pkv import handover, wire
from p2pkv.arena import Arena
from p2pkv.errors import ProtocolError
from p2pkv.handover import Cut, Failed, Incoming, NotYet
from p2pkv.instructions import Copy
from p2pkv.objects import State
from p2pkv.replicated import Session
from p2pkv.routing import Exchange, Lost, Reply
from p2pkv.store import Store
from p2pkv.types import BucketId
from p2pkv.wire import Entry, Kind, PutOptions, Snapshot, Status

BUCKET, OTHER = BucketId(0), BucketId(1)
KEYS = keys_in(BUCKET, 60)
FILLERS = keys_in(OTHER, 9)
LARGE, OTHER_KEY = KEYS[0], KEYS[1]

Exchanged = Callable[[Snapshot, list[bytes]], wire.SnapshotAck | Lost]


class Peers:
    """A has the bucket; B is to get a copy of it."""

    def __init__(self, stack: ExitStack, target_bytes: int = MIB) -> None:
        self.cluster = stack.enter_context(Cluster(stack, sizes={B: target_bytes}))
        self.source = self.cluster.start(A, buckets=[BUCKET, OTHER])
        self.target = self.cluster[B]

    def put(self, key: bytes, value: bytes, options: PutOptions = PLAIN, checksum: int = 0) -> Any:
        body = wire.Put([key], [len(value)], options, checksums=[checksum] if checksum else [])
        return self.source.ask(Kind.PUT, body, [value] if value else [])

    def wanted(self, *assigned: Any) -> Copy:
        """The copy that A wants to make when the bucket belongs there."""
        nodes = tuple(m.node for m in assigned or (A, B))
        if self.cluster.records[BUCKET].record.assigned != nodes:
            self.cluster.write(BUCKET, assigned=nodes)
        replicas = self.source.replicas
        self.cluster.now += BEACON_NS
        replicas.tick(self.cluster.now)
        [copy], replicas.copies = replicas.copies, []
        return copy

    def drive(
        self,
        exchange: Exchanged | None = None,
        between: Callable[[], None] = lambda: None,
        rate: int = 1 << 40,
        copy: Copy | None = None,
    ) -> handover.Outgoing:
        """One attempt. Raises Failed."""
        copy = copy or self.wanted()
        cluster, replicas = self.cluster, self.source.replicas
        outgoing = cluster.outgoing(self.source, copy, rate)
        self.at_cut: Content = {}

        def note() -> None:
            self.at_cut = self.source.content()

        try:
            cluster.carry_out(self.source, copy, outgoing, exchange, between, note)
        except Failed:
            replicas.copy_failed(BUCKET, copy.session, cluster.now)
            raise
        replicas.copy_done(BUCKET, copy.session, cluster.now)
        return outgoing

    def deliver(self, body: Snapshot, frames: list[bytes]) -> wire.SnapshotAck | Lost:
        return self.cluster.deliver(self.source, B, body, frames)

    def copied(self) -> None:
        """The learner is in sync, and what it has is what the primary has."""
        self.cluster.settle()
        assert B in self.cluster.records[BUCKET].record.in_sync
        same(self.target.content(), self.source.content())


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


@pytest.fixture(autouse=True)
def _little_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", 512)


# -- the usual way


def test_everything_arrives_as_it_was(peers: Peers) -> None:
    peers.put(KEYS[0], b"1", checksum=123)
    peers.put(KEYS[1], b"")
    peers.put(KEYS[2], b"2", PutOptions(write_once=True))
    peers.put(KEYS[3], b"3", PutOptions(soft_pin=True, ttl_ms=12_345))
    peers.put(KEYS[4], b"4", PutOptions(hard_pin=True))
    peers.put(KEYS[5], bytes(range(256)) * 20, PutOptions(soft_pin=True), checksum=(1 << 64) - 1)
    peers.put(KEYS[6], b"x" * PIECE_BYTES)
    was = peers.source.content()
    peers.drive()
    same(peers.target.content(), was)
    peers.copied()


def test_a_bucket_that_belongs_elsewhere_goes_there_with_all_it_has(peers: Peers) -> None:
    for key in KEYS:
        peers.put(key, key * 20)
    was = peers.source.content()
    peers.drive(copy=peers.wanted(B))
    peers.cluster.settle()
    record = peers.cluster.records[BUCKET].record
    assert (record.primary, record.in_sync, record.epoch, record.generation) == (B, (B,), 2, 1)
    assert BUCKET not in peers.source.store.buckets
    assert peers.source.replicas.lost_buckets == 0
    same(peers.target.content(), was)
    assert peers.target.get(KEYS[0]) == [KEYS[0] * 20]


def test_an_empty_bucket_is_copied_with_one_message(peers: Peers) -> None:
    sent: list[Snapshot] = []

    def note(body: Snapshot, frames: list[bytes]) -> Any:
        sent.append(body)
        return peers.deliver(body, frames)

    outgoing = peers.drive(note)
    peers.copied()
    assert [body.last for body in sent] == [True]
    assert (outgoing.total, outgoing.sent_keys, outgoing.sent_bytes) == (0, 0, 0)


def test_what_is_written_while_it_is_copied_arrives_too(peers: Peers) -> None:
    """Before the cut with the objects, behind it as operations."""
    rand = random.Random(1)

    def busy() -> None:
        for key in KEYS[:10]:
            peers.put(key, rand.randbytes(200))

    busy()
    peers.drive(between=busy)
    assert peers.source.content() == peers.target.content() == peers.at_cut
    peers.copied()
    assert peers.target.content() != peers.at_cut


def test_from_the_cut_on_nothing_is_committed_without_the_learner(peers: Peers) -> None:
    peers.put(KEYS[0], b"1")
    answers: list[Any] = []

    def write(body: Snapshot, frames: list[bytes]) -> Any:
        if body.last:
            answers.append(peers.put(KEYS[1], b"2"))
            peers.cluster.replicate()
            assert answers[0].response is None
        return peers.deliver(body, frames)

    peers.drive(write)
    peers.cluster.replicate()
    assert answers[0].response is not None
    peers.copied()


def test_a_learner_that_vanishes_behind_the_cut_holds_writes_up_only_for_a_while(
    peers: Peers,
) -> None:
    peers.put(KEYS[0], b"1")
    with pytest.raises(Failed):
        peers.drive(lambda body, frames: Lost("gone") if body.last else peers.deliver(body, frames))
    assert not peers.source.put(KEYS[1]).pending
    peers.copied()


def test_a_value_that_ends_the_bucket_is_followed_by_the_last_message(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", MIB)
    peers.put(LARGE, b"x" * 3 * PIECE_BYTES)
    sent: list[tuple[int, bool]] = []

    def note(body: Snapshot, frames: list[bytes]) -> Any:
        sent.append((body.seq, body.last))
        return peers.deliver(body, frames)

    peers.drive(note)
    assert sent == [(0, False), (1, False), (2, False), (3, True)]
    peers.copied()


def test_passes_keep_to_the_rate_and_the_rest_does_not_wait(peers: Peers) -> None:
    for key in KEYS[:8]:
        peers.put(key, b"x" * 256)
    copy = peers.wanted()
    began = peers.cluster.now
    peers.drive(rate=1000, copy=copy)
    assert peers.cluster.now - began == 2 * 1024 * S // 1000
    peers.copied()


def test_a_bucket_that_changes_faster_than_it_is_sent_is_cut_after_a_few_passes(
    peers: Peers,
) -> None:
    for key in KEYS:
        peers.put(key, bytes(500))
    pieces = 0

    def count(body: Snapshot, frames: list[bytes]) -> Any:
        nonlocal pieces
        pieces += 1
        if not peers.at_cut:
            for key in KEYS:
                peers.put(key, bytes(500))
        return peers.deliver(body, frames)

    peers.drive(count)
    assert pieces <= (handover.PASSES_MAX + 1) * len(KEYS)
    peers.copied()


# -- large values


def test_a_large_value_that_changes_under_way_arrives_as_it_is_at_the_end(peers: Peers) -> None:
    peers.put(LARGE, b"a" * 5 * PIECE_BYTES)
    seen = 0

    def change(body: Snapshot, frames: list[bytes]) -> Any:
        nonlocal seen
        seen += 1
        if seen == 2:
            peers.put(LARGE, b"b" * 4 * PIECE_BYTES)
        if seen == 7:
            peers.put(LARGE, b"c" * 3)
        return peers.deliver(body, frames)

    peers.drive(change)
    assert peers.source.store.stats().retiring == 0
    assert seen >= 7
    peers.copied()
    assert peers.target.content()[LARGE][0] == b"ccc"


def test_the_time_to_live_of_a_large_value_does_not_grow_by_the_time_it_travels(
    peers: Peers,
) -> None:
    peers.put(LARGE, b"a" * 5 * PIECE_BYTES, PutOptions(ttl_ms=60_000))
    copy = peers.wanted()
    began = peers.cluster.now
    peers.drive(rate=1000, copy=copy)
    assert peers.cluster.now - began > 5 * S
    peers.copied()


def test_a_large_value_that_expires_under_way_does_not_arrive(peers: Peers) -> None:
    peers.put(LARGE, b"a" * 5 * PIECE_BYTES, PutOptions(ttl_ms=3_000))
    peers.put(OTHER_KEY, b"1")
    peers.drive(rate=1000)
    peers.copied()
    assert peers.target.keys() == {OTHER_KEY}
    assert peers.target.store.stats().allocated == 0


def test_a_large_value_that_expires_and_is_cleared_away_behind_the_cut_is_gone(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", MIB)
    peers.put(LARGE, b"a" * 5 * PIECE_BYTES, PutOptions(ttl_ms=200))

    def slow(body: Snapshot, frames: list[bytes]) -> Any:
        answer = peers.deliver(body, frames)
        peers.cluster.now += 40 * MS
        peers.source.store.reap(peers.cluster.now)
        return answer

    peers.drive(slow)
    peers.copied()
    assert peers.target.keys() == set()
    assert peers.target.store.stats().used_bytes == 0


def test_what_finds_no_room_is_counted_and_the_rest_is_right() -> None:
    with ExitStack() as stack:
        peers = Peers(stack, target_bytes=32 * KIB)
        for i, key in enumerate(KEYS[:30]):
            peers.put(key, b"%d" % i * 200, PutOptions(hard_pin=True))
        peers.put(KEYS[30], b"x" * 40 * KIB)
        outgoing = peers.drive()
        peers.cluster.settle()
        assert outgoing.dropped > 1
        copied = peers.target.content()
        assert len(copied) == 31 - outgoing.dropped
        assert copied.items() <= peers.source.content().items()


# -- failures


def test_a_learner_that_does_not_answer_ends_the_attempt_and_the_primary_serves_on(
    peers: Peers,
) -> None:
    for key in KEYS[:20]:
        peers.put(key, b"v" * 300)
    was = peers.source.content()
    for lost_at in range(30):
        answered = 0

        def lossy(body: Snapshot, frames: list[bytes]) -> Any:
            nonlocal answered
            answered += 1
            if answered > lost_at:  # noqa: B023
                return Lost("no answer")
            return peers.deliver(body, frames)

        try:
            peers.drive(lossy)
            break
        except Failed as e:
            reason = str(e)
        assert reason == "b@1 does not answer: no answer"
        assert peers.source.get(KEYS[0]) == [b"v" * 300]
        assert peers.source.content() == was
        assert peers.source.store.buckets[BUCKET].dirty is None
    else:
        pytest.fail("it never got through")
    assert lost_at > 6
    peers.copied()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": Status.INVALID}, "status"),
        ({"status": 99}, "status 99"),
        ({"nonce": 2}, "piece 0"),
        ({"seq": 1}, "piece 0"),
    ],
)
def test_an_acknowledgement_that_does_not_fit_ends_the_attempt(
    peers: Peers, changes: dict[str, int], message: str
) -> None:
    def odd(body: Snapshot, frames: list[bytes]) -> Any:
        fields = {"bucket": BUCKET, "nonce": body.nonce, "seq": body.seq, "status": 0}
        return wire.SnapshotAck(**{**fields, **changes})

    with pytest.raises(Failed, match=message) as error:
        peers.drive(odd)
    assert not isinstance(error.value, NotYet)
    assert BUCKET in peers.source.replicas.served


@pytest.mark.parametrize("status", [Status.MOVING, Status.NOT_PRIMARY])
def test_a_learner_that_does_not_know_of_it_yet_may_be_asked_again_soon(
    peers: Peers, status: Status
) -> None:
    with pytest.raises(NotYet):
        peers.drive(lambda body, _: wire.SnapshotAck(BUCKET, body.nonce, body.seq, status))


def test_a_refusal_of_the_whole_request_ends_the_attempt(peers: Peers) -> None:
    copying = peers.cluster.outgoing(peers.source, peers.wanted()).run(lambda: 1)
    assert next(copying) == Cut()
    assert isinstance(copying.send(0), Exchange)
    error = Reply(Kind.ERROR, wire.Error(wire.Fault.NOT_READY, "not yet"), ())
    with pytest.raises(Failed, match="refused: not yet"):
        copying.send([error])


def test_a_copy_that_is_not_wanted_any_more_ends_at_the_cut(peers: Peers) -> None:
    peers.put(KEYS[0], b"1")
    copy = peers.wanted()
    peers.cluster.write(BUCKET, assigned=(A.node,), primary=A, epoch=2)
    with pytest.raises(Failed, match="not wanted"):
        peers.drive(copy=copy)
    assert peers.source.store.buckets[BUCKET].dirty is None
    assert peers.source.get(KEYS[0]) == [b"1"]


def test_an_attempt_that_is_given_up_lets_go_of_everything(peers: Peers) -> None:
    peers.put(LARGE, b"a" * 5 * PIECE_BYTES)
    item = peers.source.store.buckets[BUCKET].objects[LARGE]
    copying = peers.cluster.outgoing(peers.source, peers.wanted()).run(lambda: 1)
    assert isinstance(next(copying), Exchange)
    assert item.readers == 1
    copying.close()
    assert item.readers == 0
    assert peers.source.store.buckets[BUCKET].dirty is None


def test_the_learner_starts_over_with_a_new_attempt(peers: Peers) -> None:
    for key in KEYS[:20]:
        peers.put(key, b"v" * 300)
    count = 0

    def fails_late(body: Snapshot, frames: list[bytes]) -> Any:
        nonlocal count
        count += 1
        return peers.deliver(body, frames) if count < 4 else Lost("gone")

    with pytest.raises(Failed):
        peers.drive(fails_late)
    peers.source.delete(*KEYS[:20:2])
    peers.drive()
    peers.copied()
    assert peers.target.keys() == set(KEYS[1:20:2])


def test_a_learner_that_forgot_ends_the_attempt(peers: Peers) -> None:
    for key in KEYS[:20]:
        peers.put(key, b"v" * 300)
    count = 0

    def restarts(body: Snapshot, frames: list[bytes]) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            peers.target.learning._forget(BUCKET)
        return peers.deliver(body, frames)

    with pytest.raises(Failed, match="status 9 to piece 2"):
        peers.drive(restarts)
    assert BUCKET in peers.source.replicas.served
    peers.copied()


# -- the learner's side


class Learner:
    """The receiving end of one attempt, on a store with the bucket open."""

    def __init__(self, arena: Arena, check: bool = False) -> None:
        self.store: Store = make_store(arena, [BUCKET])
        self.incoming = Incoming(self.store, BUCKET, A, Session(1, 1), check)

    def take(self, seq: int, *entries: Entry, frames: tuple[bytes, ...] = (), last: bool = False,
             now: int = 1) -> Status:  # fmt: skip
        body = Snapshot(BUCKET, 1, 1, seq, list(entries), last)
        try:
            return self.incoming.take(body, frames, now)
        finally:
            self.store.validate()

    @property
    def values(self) -> dict[bytes, bytes]:
        objects = self.store.buckets[BUCKET].objects
        return {key: bytes(self.store.value(item)) for key, item in objects.items()}


@pytest.fixture
def learner() -> Iterator[Learner]:
    with Arena.create(MIB, "learner") as arena:
        yield Learner(arena)


def test_a_repeated_piece_is_acknowledged_again_and_not_applied(learner: Learner) -> None:
    assert learner.take(0, Entry(b"k", 1), frames=(b"1",)) is Status.OK
    assert learner.take(1, Entry(b"k", 1), frames=(b"2",)) is Status.OK
    assert learner.take(0, Entry(b"k", 1), frames=(b"1",)) is Status.OK
    assert learner.values == {b"k": b"2"}


def test_a_gap_and_a_piece_behind_the_last_are_conflicts(learner: Learner) -> None:
    assert learner.take(1, Entry(b"k", 1), frames=(b"1",)) is Status.CONFLICT
    assert learner.take(0, last=True) is Status.OK
    assert learner.take(1, Entry(b"k", 1), frames=(b"1",)) is Status.CONFLICT
    assert learner.take(0, last=True) is Status.OK
    assert learner.values == {}


def test_what_left_meanwhile_leaves_here_too(learner: Learner) -> None:
    learner.take(0, Entry(b"k", 1), Entry(b"l", 1), frames=(b"1", b"2"))
    learner.take(1, Entry(b"k", -1), last=True)
    assert learner.values == {b"l": b"2"}


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
    learner: Learner, entries: list[Entry], frames: list[bytes]
) -> None:
    learner.take(0, Entry(b"there", 1), frames=(b"1",))
    with pytest.raises(ProtocolError):
        learner.take(1, *entries, frames=tuple(frames))
    assert learner.values.keys() == {b"there"}
    assert learner.take(1, last=True) is Status.OK


@pytest.mark.parametrize(
    "second", [Entry(b"k", 9, start=5, piece=3), Entry(b"k", 9, start=3, piece=7)]
)
def test_parts_out_of_order_or_behind_the_end_are_refused(learner: Learner, second: Entry) -> None:
    learner.take(0, Entry(b"k", 9, start=0, piece=3), frames=(b"123",))
    with pytest.raises(ProtocolError, match="of a value of 9 bytes"):
        learner.take(1, second, frames=(b"x" * second.piece,))
    assert learner.values == {}


def test_parts_of_a_value_that_found_no_room_or_was_given_up_are_passed_over(
    learner: Learner,
) -> None:
    learner.take(0, Entry(b"k", 2 * MIB, start=0, piece=3), frames=(b"123",))
    learner.take(1, Entry(b"k", 2 * MIB, start=3, piece=3), frames=(b"123",))
    assert learner.incoming.dropped == 1
    learner.take(2, Entry(b"a", 9, start=0, piece=3), frames=(b"123",))
    learner.take(3, Entry(b"b", 9, start=3, piece=3), frames=(b"456",))
    learner.take(4, Entry(b"c", 3, start=0, piece=3), frames=(b"ccc",))
    learner.take(5, last=True)
    assert learner.values.keys() == {b"c"}
    assert learner.store.stats().allocated == 0


@pytest.mark.parametrize("entry", ["ttl_ms", "flags", "checksum", "start"])
def test_negative_figures_do_not_pass_the_wire(entry: str) -> None:
    bad = Snapshot(BUCKET, 1, 1, 0, [Entry(b"k", 1, **{entry: -1})], False)
    with pytest.raises(ProtocolError, match=">= 0"):
        wire.decode(wire.encode(Kind.SNAPSHOT, 1, 0, bad), MIB)


# -- random schedules


class Schedule:
    """Random traffic on the primary while the bucket is copied, and a network that fails."""

    def __init__(self, seed: int, peers: Peers) -> None:
        self.random = random.Random(seed)
        self.peers = peers
        self.trouble = self.random.choice([0.0, 0.0, 0.01, 0.03])
        self.old: list[tuple[Snapshot, list[bytes]]] = []

    def traffic(self) -> None:
        peers, rand = self.peers, self.random
        cluster, source = peers.cluster, peers.source
        for _ in range(rand.randrange(6)):
            key = rand.choice(KEYS[:40])
            match rand.randrange(9):
                case 0 | 1 | 2:
                    size = rand.choice([0, 1, 100, 500, PIECE_BYTES, PIECE_BYTES + 1, 5000])
                    self.write(key, rand.randbytes(size))
                case 3:
                    source.delete(key)
                case 4:
                    source.expire(key, ttl_ms=rand.choice([5, 500, 100_000]))
                case 5:
                    kind, body = rand.choice(
                        [(Kind.PIN, wire.Pin([key], 100_000)), (Kind.UNPIN, wire.Unpin([key]))]
                    )
                    source.ask(kind, body)
                case 6:
                    source.put(rand.choice(FILLERS), value=bytes(100 * KIB))
                case 7:
                    source.ask(Kind.DELETE_RANGE, wire.DeleteRange([BUCKET], key[:2], 3))
                case 8:
                    cluster.now += rand.randrange(3) * MS
                    source.journal.reap(cluster.now)
                    peers.target.journal.reap(cluster.now)

    def write(self, key: bytes, value: bytes) -> None:
        rand = self.random
        options = PutOptions(
            if_absent=rand.random() < 0.1,
            write_once=rand.random() < 0.2,
            soft_pin=rand.random() < 0.2,
            hard_pin=rand.random() < 0.1,
            ttl_ms=rand.choice([0, 0, 0, 3, 100_000]),
        )
        self.peers.put(key, value, options, rand.choice([0, rand.randrange(1, 1 << 64)]))

    def exchange(self, body: Snapshot, frames: list[bytes]) -> Any:
        peers, rand = self.peers, self.random
        if rand.random() < self.trouble:
            return Lost("the request was lost")
        if rand.random() < self.trouble:
            peers.target.learning._forget(BUCKET)
        while self.old and rand.random() < 0.3:  # late and repeated pieces, of older attempts too
            peers.deliver(*rand.choice(self.old[-20:]))
        self.old.append((body, frames))
        answer = peers.deliver(body, frames)
        if rand.random() < 0.2:
            again = peers.deliver(body, frames)
            assert not isinstance(answer, Lost)
            assert not isinstance(again, Lost)
            assert again.status == answer.status
        if rand.random() < self.trouble:
            return Lost("the answer was lost")
        return answer

    def between(self) -> None:
        self.traffic()
        self.peers.source.journal.tell_evictions()
        if self.random.random() < 0.3:
            self.peers.cluster.replicate()

    def run(self) -> int:
        """Attempts until the copy is made."""
        peers = self.peers
        for attempt in range(1, 200):
            try:
                peers.drive(self.exchange, self.between)
                return attempt
            except Failed:
                assert BUCKET in peers.source.replicas.served
            self.traffic()
        raise AssertionError("200 attempts failed")


@pytest.mark.parametrize("seed", range(50))
def test_in_any_schedule_both_have_the_same_in_the_end(seed: int) -> None:
    print("seed", seed)
    with ExitStack() as stack:
        peers = Peers(stack)
        schedule = Schedule(seed, peers)
        for _ in range(20):
            schedule.traffic()
        schedule.run()
        for _ in range(5):
            schedule.between()
        cluster = peers.cluster
        cluster.settle()
        cluster.now += S  # short times to live are over, long ones not
        cluster.settle()
        # A time to live that comes as an operation counts from when it arrives.
        same(peers.target.content(), peers.source.content(), tolerance_ns=S)
        objects = peers.target.store.buckets[BUCKET].objects.values()
        assert all(o.state is State.COMMITTED for o in objects)
        assert peers.source.store.stats().allocated == 0
        assert peers.target.store.stats().allocated == 0
        was = peers.target.content()
        for old in schedule.old[-30:]:
            peers.deliver(*old)
        same(peers.target.content(), was)
