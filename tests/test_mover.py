"""Copies that the replicas ask for are made over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from random import Random

import pytest
from nodeside import MIB, A, B
from rawpeer import Answer, RawPeer
from replicating import BEACON_NS, BUCKETS, Cluster, keys_in, same

from p2pkv import clock, handover, mover, wire
from p2pkv.async_driver import AsyncDriver
from p2pkv.config import ClientConfig, Limits, NodeConfig
from p2pkv.instructions import Copy
from p2pkv.mover import Mover
from p2pkv.routing import Router
from p2pkv.types import BucketId
from p2pkv.wire import Kind, Status

LIMITS = Limits(
    key_bytes_max=64,
    batch_keys_max=256,
    scan_keys_max=256,
    head_bytes_max=64 << 10,
    message_bytes_max=1 * MIB,
)


class Setting:
    """A mover of node A, and node B behind a real socket."""

    def __init__(self, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(Cluster(stack, arena_bytes=8 * MIB))
        self.cluster.now = clock.monotonic()
        self.source = self.cluster.start(A, buckets=range(BUCKETS))
        self.target = self.cluster[B]
        for bucket in range(BUCKETS):
            self.source.put(*keys_in(bucket, 20), value=b"v" * 1000)
        self.peer = RawPeer(self._answer)
        self.before: Callable[[wire.Snapshot], Answer | None] = lambda body: None
        router = Router()
        router.install(
            wire.Table("f", 1, 1, [A, B], [(), (self.peer.endpoint,)], [0], [0])
        )  # fmt: skip
        self.driver = AsyncDriver(
            ClientConfig(seeds=(self.peer.endpoint,), limits=LIMITS), router, member=A
        )
        self.woken = 0
        config = NodeConfig(limits=LIMITS, moves_max=2, move_bytes_per_s=64 * MIB)
        self.mover = Mover(
            config, self.source.store, self.source.replicas, self.driver, Random(1), self._wake
        )

    def _wake(self) -> None:
        self.woken += 1

    def _answer(self, head: wire.Head, frames: list[bytes]) -> Answer:
        body: wire.Snapshot = head.body
        refusal = self.before(body)
        if refusal is not None:
            return refusal
        return Kind.SNAPSHOT_ACK, self.target.learning.take(body, A, frames, self.cluster.now), ()

    def wanted(self) -> list[Copy]:
        """The copies that A wants to make, of every bucket."""
        for bucket in range(BUCKETS):
            if self.cluster.records[BucketId(bucket)].record.assigned != (A.node, B.node):
                self.cluster.write(bucket, assigned=(A.node, B.node))
        replicas = self.source.replicas
        self.cluster.now = max(clock.monotonic(), self.cluster.now + BEACON_NS)
        replicas.tick(self.cluster.now)
        copies, replicas.copies = replicas.copies, []
        return copies

    async def make(self, copies: list[Copy]) -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            self.mover.start(copies, group)

    def check(self) -> None:
        """Everything is in sync on both."""
        self.cluster.settle()
        for bucket in range(BUCKETS):
            same(self.target.content(bucket), self.source.content(bucket))
            assert len(self.target.content(bucket)) >= 20

    def close(self) -> None:
        self.driver.close()
        self.peer.stop()


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    with ExitStack() as stack:
        setting = Setting(stack)
        yield setting
        setting.close()


def refusal(body: wire.Snapshot, status: Status) -> Answer:
    return Kind.SNAPSHOT_ACK, wire.SnapshotAck(body.bucket, body.nonce, body.seq, status), ()


async def test_all_copies_that_are_asked_for_are_made_side_by_side(setting: Setting) -> None:
    copies = setting.wanted()
    assert [copy.bucket for copy in copies] == list(range(BUCKETS))
    most = 0

    def watch(body: wire.Snapshot) -> None:
        nonlocal most
        most = max(most, setting.mover.under_way)

    setting.before = watch
    await setting.make(copies)
    assert most > 1
    assert (setting.mover.under_way, setting.woken) == (0, BUCKETS)
    assert (setting.mover.copied_total, setting.mover.failed_total) == (BUCKETS, 0)
    assert setting.mover.copied_bytes_total == BUCKETS * 20_000
    setting.check()


async def test_a_learner_that_does_not_know_of_it_yet_is_asked_again_at_once(
    setting: Setting,
) -> None:
    asked: dict[int, int] = {}

    def knows_later(body: wire.Snapshot) -> Answer | None:
        asked[body.bucket] = asked.get(body.bucket, 0) + 1
        if asked[body.bucket] > 5:
            return None
        return refusal(body, (Status.MOVING, Status.NOT_PRIMARY)[asked[body.bucket] % 2])

    setting.before = knows_later
    await setting.make(setting.wanted())
    assert setting.mover.failed_total == 0
    setting.check()


async def test_a_learner_that_never_knows_of_it_is_given_up(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "EARLY_MAX", 3)
    asked: dict[int, int] = {}

    def never(body: wire.Snapshot) -> Answer:
        asked[body.bucket] = asked.get(body.bucket, 0) + 1
        return refusal(body, Status.NOT_PRIMARY)

    setting.before = never
    await setting.make(setting.wanted())
    assert set(asked.values()) == {3}
    assert setting.mover.failed_total == BUCKETS
    assert setting.source.replicas.served == set(range(BUCKETS))


async def test_a_copy_that_fails_is_asked_for_again(setting: Setting) -> None:
    setting.before = lambda body: refusal(body, Status.CONFLICT)
    first = setting.wanted()
    await setting.make(first)
    assert (setting.mover.failed_total, setting.mover.copied_total) == (BUCKETS, 0)
    assert setting.source.replicas.served == set(range(BUCKETS))
    setting.before = lambda body: None
    second = setting.wanted()
    assert [copy.bucket for copy in second] == [copy.bucket for copy in first]
    assert all(b.session > a.session for a, b in zip(first, second, strict=True))
    await setting.make(second)
    assert setting.mover.copied_total == BUCKETS
    setting.check()


async def test_a_bucket_that_is_taken_away_under_way_ends_its_copy(setting: Setting) -> None:
    """Whoever owns it now; and that is not counted as a copy."""
    loop = asyncio.get_running_loop()
    asked, go_on = asyncio.Event(), asyncio.Event()

    def waits(body: wire.Snapshot) -> None:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)

    setting.before = waits
    making = asyncio.create_task(setting.make(setting.wanted()))
    await asked.wait()
    for bucket in range(BUCKETS):
        setting.cluster.write(bucket, primary=B, in_sync=(B,), assigned=(B.node,), epoch=2)
    go_on.set()
    await making
    assert (setting.mover.copied_total, setting.mover.failed_total) == (0, BUCKETS)
    assert not setting.source.store.buckets


async def test_a_bucket_that_is_gone_before_its_copy_begins_does_no_harm(setting: Setting) -> None:
    copies = setting.wanted()
    for bucket in range(BUCKETS):
        setting.cluster.write(bucket, primary=B, in_sync=(B,), assigned=(B.node,), epoch=2)
    await setting.make(copies)
    assert (setting.mover.copied_total, setting.mover.failed_total) == (0, BUCKETS)


async def test_values_larger_than_a_message_go_in_pieces_that_fit(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", 1000)
    [key] = keys_in(3, 1, "large")
    value = bytes(range(256)) * 12_000
    setting.source.store.put_batch([3], [key], [value], wire.PutOptions(), setting.cluster.now)
    sizes: list[int] = []

    def watch(body: wire.Snapshot) -> None:
        sizes.append(sum(e.piece if e.piece >= 0 else max(0, e.size) for e in body.entries))

    setting.before = watch
    await setting.make(setting.wanted())
    assert max(sizes) == LIMITS.message_bytes_max
    assert setting.target.content(3)[key][0] == value
    setting.check()
