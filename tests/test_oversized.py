"""Values larger than a message reach a backup in pieces, and count only once they are prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from nodeside import LIMITS, MIB, A, B, C, S
from replicating import BEACON_NS, PIECE_OF_LARGE, SLOW_NS, Cluster, Node, keys_in

from p2pkv import oversized, wire
from p2pkv.errors import ProtocolError
from p2pkv.replicas import Batch
from p2pkv.replicated import Op, OpKind
from p2pkv.types import BucketId, Member
from p2pkv.wire import Kind, Staged, Status

KEY, OTHER = keys_in(0, 2)
SIZE = 3 * LIMITS.message_bytes_max
VALUE = bytes(range(256)) * (SIZE // 256)
OK, CONFLICT, NO_ROOM = Status.OK, Status.CONFLICT, Status.OUT_OF_MEMORY


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A is primary of buckets 0 and 1, B has the copies."""
    with ExitStack() as stack, Cluster(stack, arena_bytes=16 * MIB) as made:
        made.start(A, B, buckets=(0, 1))
        yield made


def put_of(node: Node, key: bytes = KEY, value: bytes = VALUE) -> Any:
    """The put, and the batch that its operation leaves in."""
    written = node.put(key, value=value)
    assert written.pending
    (batch,) = node.replicas.batches(node.cluster.now)
    return written, batch


def piece(start: int, length: int = 0, size: int = SIZE, seq: int = 0, **fields: Any) -> wire.Stage:
    named = {"bucket": 0, "epoch": 1, "seq": seq or 1, **fields}
    return wire.Stage(**named, op=Op(int(OpKind.PUT), KEY, size), start=start)


def take(cluster: Cluster, body: wire.Stage, length: int = 0, sender: Member | None = A) -> Staged:
    """What backup B says to a piece of the value."""
    frames = [VALUE[body.start : body.start + length]] if length else []
    node = cluster[B]
    staged = node.journal.oversized.take(body, sender, frames, cluster.now)
    node.store.validate()
    return staged


def staged_here(cluster: Cluster) -> int:
    """Objects at B that have memory and cannot be read."""
    return len(cluster[B].store.allocated)


# -- the whole way


def test_a_value_of_three_messages_is_acknowledged_with_both_copies(cluster: Cluster) -> None:
    written = cluster[A].put(KEY, value=VALUE)
    cluster.settle()
    assert written.copies == [2]
    assert cluster[B].content()[KEY][0] == VALUE
    assert cluster[B].journal.oversized.staged_bytes == SIZE


def test_nothing_is_acknowledged_by_being_staged(cluster: Cluster) -> None:
    written, batch = put_of(cluster[A])
    assert cluster.stage(cluster[A], batch)
    cluster.talk()
    assert written.pending
    assert KEY not in cluster[B].content()
    assert cluster.prepare(cluster[A], batch) is not None


def test_a_copy_that_has_no_room_is_done_without_and_told(cluster: Cluster) -> None:
    with ExitStack() as stack, Cluster(stack, sizes={A: 16 * MIB, B: MIB}) as small:
        node = small.start(A, B)
        written = node.put(KEY, value=VALUE)
        small.settle()
        assert written.statuses == written.copies == []  # done, with one copy
        assert small[B].journal.copies_dropped == 1
        assert node.content()[KEY][0] == VALUE


def test_a_new_primary_sends_on_what_it_had_prepared(cluster: Cluster) -> None:
    with ExitStack() as stack, Cluster(stack, arena_bytes=16 * MIB) as three:
        node = three.start(A, B, C)
        node.put(KEY, value=VALUE)
        batches = {batch.to: batch for batch in node.replicas.batches(three.now)}
        assert three.prepare(node, batches[B]) is not None
        three.cut_off = {A}
        three.run_until(lambda: 0 in three[B].replicas.served)
        three.run_until(lambda: KEY in three[C].content())
        assert three[B].content()[KEY][0] == VALUE
        assert three[C].content()[KEY][0] == VALUE


# -- interruptions


def test_after_a_loss_it_goes_on_where_the_backup_is(cluster: Cluster) -> None:
    node = cluster[A]
    written, batch = put_of(node)
    sent: list[int] = []

    def lossy(body: wire.Stage, frames: list[bytes]) -> Staged | None:
        sent.append(sum(map(len, frames)))
        lost = len(sent) in (4, 5)
        return None if lost else cluster.send(node, B, Kind.STAGE, body, frames)

    assert not cluster.send_staged(node, batch, lossy)
    assert cluster.send_staged(node, batch, lossy)
    assert sum(sent) == SIZE + 2 * PIECE_OF_LARGE
    assert cluster.prepare(node, batch).acks[0].last == batch.entries[0].seq
    assert written.pending  # the acknowledgement was not looked at


def test_answers_that_are_lost_cost_no_bytes(cluster: Cluster) -> None:
    node = cluster[A]
    _, batch = put_of(node)
    sent = 0

    def deaf(body: wire.Stage, frames: list[bytes]) -> Staged | None:
        nonlocal sent
        sent += sum(map(len, frames))
        staged: Staged = cluster.send(node, B, Kind.STAGE, body, frames)
        return None if body.start == 4 * PIECE_OF_LARGE else staged

    def hearing(body: wire.Stage, frames: list[bytes]) -> Staged | None:
        nonlocal sent
        sent += sum(map(len, frames))
        return cluster.send(node, B, Kind.STAGE, body, frames)

    cluster.send_staged(node, batch, deaf)
    assert cluster.send_staged(node, batch, hearing)
    assert sent == SIZE


def test_a_peer_that_takes_nothing_ends_the_attempt(cluster: Cluster) -> None:
    node = cluster[A]
    _, batch = put_of(node)
    asked = 0

    def stuck(body: wire.Stage, frames: list[bytes]) -> Staged:
        nonlocal asked
        asked += 1
        return Staged(OK, min(body.start, PIECE_OF_LARGE))

    assert not cluster.send_staged(node, batch, stuck)
    assert asked == 1 + 2 * oversized.WAVE


def test_a_primary_stops_when_the_operation_is_decided_otherwise(cluster: Cluster) -> None:
    node = cluster[A]
    _, batch = put_of(node)
    asked = 0

    def deposed(body: wire.Stage, frames: list[bytes]) -> Any:
        nonlocal asked
        asked += 1
        answer = cluster.send(node, B, Kind.STAGE, body, frames)
        if asked == 3:
            cluster.write(0, epoch=2, primary=B, in_sync=(B, A))
        return answer

    assert not cluster.send_staged(node, batch, deposed)
    assert asked <= 1 + 2 * oversized.WAVE


def half_staged(cluster: Cluster) -> Batch:
    """A value of which B has the first pieces."""
    node = cluster[A]
    _, batch = put_of(node)

    def first(body: wire.Stage, frames: list[bytes]) -> Staged | None:
        far = body.start >= 4 * PIECE_OF_LARGE
        return None if far else cluster.send(node, B, Kind.STAGE, body, frames)

    assert not cluster.send_staged(node, batch, first)
    assert staged_here(cluster) == 1
    return batch


def test_nothing_is_left_of_it_in_the_next_epoch(cluster: Cluster) -> None:
    half_staged(cluster)
    cluster.cut_off = {A}
    cluster.run_until(lambda: 0 in cluster[B].replicas.served)
    cluster[B].journal.reap(cluster.now)
    assert staged_here(cluster) == 0
    assert len(cluster[B].journal.oversized) == 0
    assert KEY not in cluster[B].content()


def test_it_is_freed_when_the_primary_falls_silent_and_nobody_follows_it(cluster: Cluster) -> None:
    half_staged(cluster)
    oversized_of_b = cluster[B].journal.oversized
    cluster[B].journal.reap(cluster.now + oversized.IDLE_NS)
    assert len(oversized_of_b) == 1
    cluster[B].journal.reap(cluster.now + oversized.IDLE_NS + 1)
    assert (len(oversized_of_b), staged_here(cluster)) == (0, 0)


def test_it_goes_with_its_bucket(cluster: Cluster) -> None:
    half_staged(cluster)
    cluster[B].store.drop_bucket(BucketId(0))
    cluster[B].store.open_bucket(BucketId(0))
    assert take(cluster, piece(PIECE_OF_LARGE, seq=1), PIECE_OF_LARGE).filled == 0
    cluster[B].journal.reap(cluster.now)
    assert (len(cluster[B].journal.oversized), staged_here(cluster)) == (0, 0)


# -- who is waited for


def test_a_backup_that_gets_pieces_slowly_stays_in_sync(cluster: Cluster) -> None:
    node = cluster[A]
    written, batch = put_of(node)

    def slow(body: wire.Stage, frames: list[bytes]) -> Any:
        for _ in range(SLOW_NS // BEACON_NS):
            cluster.now += BEACON_NS
            for each in cluster.nodes.values():
                each.replicas.tick(cluster.now)
            cluster.talk()
        return cluster.send(node, B, Kind.STAGE, body, frames)

    assert cluster.send_staged(node, batch, slow)
    assert node.replicas.proposals == []
    answer = cluster.prepare(node, batch)
    node.replicas.take_prepare_acks(B, answer.acks, cluster.now)
    assert written.copies == [2]


def test_the_same_bytes_again_are_no_progress(cluster: Cluster) -> None:
    node = cluster[A]
    _, batch = put_of(node)
    entry = batch.entries[0]
    follower = node.replicas.by_bucket[0].followers[B]
    for filled, now, progress in [(5, 1, 1), (9, 2, 2), (0, 3, 2), (9, 4, 2), (10, 5, 5)]:
        assert node.replicas.note_staged(B, 0, entry, filled, cluster.now + now)
        assert follower.progress_ns == cluster.now + progress


def test_what_follows_in_its_bucket_waits_and_other_buckets_do_not(cluster: Cluster) -> None:
    node = cluster[A]
    (elsewhere,) = keys_in(1, 1)
    put_of(node)
    node.put(OTHER, elsewhere)
    (batch,) = node.replicas.batches(cluster.now, (), {(B, 0)})
    assert [p.bucket for p in batch.prepares] == [1]
    (batch,) = node.replicas.batches(cluster.now)
    assert [op.key for p in batch.prepares for op in p.ops] == [OTHER]


def test_such_a_value_is_the_last_of_its_batch(cluster: Cluster) -> None:
    node = cluster[A]
    node.put(OTHER)
    node.put(KEY, value=VALUE)
    node.put(OTHER)
    (batch,) = node.replicas.batches(cluster.now)
    assert [e.op.key for e in batch.entries] == [OTHER, KEY]


# -- what a backup takes


def test_pieces_are_taken_in_order_and_repeats_change_nothing(cluster: Cluster) -> None:
    assert take(cluster, piece(0)) == Staged(OK, 0)
    assert take(cluster, piece(100), 100) == Staged(OK, 0)
    assert take(cluster, piece(0), 100) == Staged(OK, 100)
    assert take(cluster, piece(0), 100) == Staged(OK, 100)
    assert take(cluster, piece(50), 100) == Staged(OK, 150)
    assert staged_here(cluster) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": 0}, {"epoch": 2}, {"bucket": 3}, {"seq": 1 << 20}, {"bucket": 2},
    ],
    ids=["past epoch", "unknown epoch", "unknown bucket", "far ahead", "bucket of another"],
)  # fmt: skip
def test_what_is_not_in_step_gets_no_memory(cluster: Cluster, fields: dict[str, int]) -> None:
    assert take(cluster, piece(0, **fields)).status == CONFLICT
    assert staged_here(cluster) == 0


def test_what_is_prepared_already_gets_no_memory(cluster: Cluster) -> None:
    cluster[A].put(KEY)
    cluster.settle()
    assert take(cluster, piece(0, seq=1)).status == CONFLICT


def test_a_client_stages_nothing(cluster: Cluster) -> None:
    assert take(cluster, piece(0), sender=None).status == CONFLICT


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (piece(SIZE), 1),
        (piece(0, size=10), 11),
        (wire.Stage(0, 1, 1, Op(int(OpKind.DELETE), KEY)), 0),
    ],
    ids=["behind the end", "longer than the value", "no put"],
)
def test_pieces_that_make_no_sense_are_refused(
    cluster: Cluster, body: wire.Stage, length: int
) -> None:
    frames = [b"v" * length] if length else []
    with pytest.raises(ProtocolError, match="bytes"):
        cluster[B].journal.oversized.take(body, A, frames, cluster.now)
    assert staged_here(cluster) == 0


def test_an_operation_has_one_size(cluster: Cluster) -> None:
    take(cluster, piece(0))
    with pytest.raises(ProtocolError, match="had 3145728 bytes"):
        take(cluster, piece(0, size=SIZE - 1))


def test_a_bucket_stages_one_value(cluster: Cluster) -> None:
    assert take(cluster, piece(0, seq=1), 100).filled == 100
    assert take(cluster, piece(0, seq=2)).filled == 0
    assert staged_here(cluster) == 1


def test_a_primary_stages_no_more_than_so_many(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oversized, "VALUES_MAX", 1)
    take(cluster, piece(0), 100)
    cluster.now += S
    take(cluster, piece(0, bucket=1), 100)
    assert staged_here(cluster) == 1
    assert take(cluster, piece(100), 100) == Staged(OK, 0)


@pytest.mark.parametrize("filled", [-1, 0, SIZE - 1])
def test_what_is_not_there_as_a_whole_is_not_prepared(cluster: Cluster, filled: int) -> None:
    node = cluster[A]
    _, batch = put_of(node)
    seq = batch.entries[0].seq
    if filled >= 0:
        take(cluster, piece(0, seq=seq), filled)
    link = cluster[B].session(b"link", A)
    body = wire.Replicate(batch.prepares, staged=True)
    response: Any = cluster[B].ask(Kind.REPLICATE, body, [], link)
    assert response[0] == Kind.ERROR
    assert "staged" in response[1].message
    assert cluster[B].replicas.by_bucket[0].last < seq
    assert staged_here(cluster) == (filled >= 0)


def test_what_was_staged_is_prepared_by_itself(cluster: Cluster) -> None:
    _, batch = put_of(cluster[A])
    several = [batch.prepares[0], batch.prepares[0]]
    with pytest.raises(ProtocolError, match="by itself"):
        cluster[B].journal.oversized.claim(A, several)
