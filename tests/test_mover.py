from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from nodeside import MIB, PLAIN, A, B, make_store
from rawpeer import Answer, RawPeer

from p2pkv import clock, handover, mover, wire
from p2pkv.arena import Arena
from p2pkv.async_driver import AsyncDriver
from p2pkv.config import ClientConfig, Limits, NodeConfig
from p2pkv.errors import AuthorityUnavailable
from p2pkv.etcd_buckets import Outcome, Result
from p2pkv.mover import Mover
from p2pkv.ownership import Ownership
from p2pkv.records import BucketChange, BucketRecord, Delta, Meta, NodeRecord, Versioned, View
from p2pkv.routing import Router
from p2pkv.types import BucketId, Epoch, Member, Revision
from p2pkv.wire import Kind, Status

LIMITS = Limits(
    key_bytes_max=64,
    batch_keys_max=256,
    scan_keys_max=256,
    head_bytes_max=64 << 10,
    message_bytes_max=1 * MIB,
)
BUCKETS = 8


def record(primary: Member, assigned: Member, epoch: int = 1) -> BucketRecord:
    return BucketRecord(
        epoch=Epoch(epoch),
        generation=0,
        primary=primary,
        in_sync=(primary,),
        assigned=(assigned.node,),
    )


def view(endpoint: str) -> View:
    return View(
        revision=Revision(10),
        meta=Meta(bucket_count=BUCKETS, hash_scheme="x", fingerprint="f"),
        nodes={
            A.node: NodeRecord(boot=A.boot, control=("tcp://127.0.0.1:1",)),
            B.node: NodeRecord(boot=B.boot, control=(endpoint,)),
        },
        buckets={BucketId(b): Versioned(record(A, B), Revision(10)) for b in range(BUCKETS)},
    )


class Authority:
    """Records under a guard. ``trouble`` is asked before each answer, and may replace it."""

    def __init__(self, records: dict[BucketId, Versioned]) -> None:
        self.records = records
        self.revision = 10
        self.calls = 0
        self.trouble: Callable[[BucketChange], str] = lambda change: ""
        self.silent = False

    @property
    def last_contact_ns(self) -> int | None:
        return None if self.silent else clock.monotonic()

    async def update_buckets(self, changes: Sequence[BucketChange]) -> list[Outcome]:
        (change,) = changes
        self.calls += 1
        trouble = self.trouble(change)
        if trouble == "unavailable":
            raise AuthorityUnavailable("etcd does not answer")
        if trouble == "unknown, not done":
            return [Outcome(change.bucket, Result.UNKNOWN)]
        current = self.records[change.bucket]
        won = current.mod_revision == change.expected or current.record == change.record
        if current.mod_revision == change.expected:
            self.write(change.bucket, change.record)
        if trouble == "unknown, done":
            return [Outcome(change.bucket, Result.UNKNOWN)]
        result = Result.WON if won else Result.LOST
        return [Outcome(change.bucket, result, self.records[change.bucket])]

    def write(self, bucket: BucketId, new: BucketRecord) -> None:
        self.revision += 1
        self.records[bucket] = Versioned(new, Revision(self.revision))


class Setting:
    """A mover of node A, and node B behind a real socket."""

    def __init__(self, arenas: list[Arena], moves_max: int = 2) -> None:
        self.store, target_store = (make_store(arena) for arena in arenas)
        self.peer = RawPeer(self.answer)
        self.target = Ownership(B, target_store, view(self.peer.endpoint), "f")
        self.target_store = target_store
        self.before: Callable[[wire.Snapshot], Answer | None] = lambda body: None
        self.source = Ownership(A, self.store, view(self.peer.endpoint), "f")
        self.authority = Authority(dict(self.source.view.buckets))
        for bucket in range(BUCKETS):
            keys = [b"%d-%d" % (bucket, i) for i in range(20)]
            self.store.put_batch([bucket] * 20, keys, [b"v" * 1000] * 20, PLAIN, 1)
        router = Router()
        router.install(self.source.table())
        self.driver = AsyncDriver(
            ClientConfig(seeds=(self.peer.endpoint,), limits=LIMITS), router, member=A
        )
        config = NodeConfig(limits=LIMITS, moves_max=moves_max, move_bytes_per_s=20 * MIB)
        self.mover = Mover(
            config, self.store, self.source, self.driver, self.authority, Random(1)  # type: ignore[arg-type]
        )  # fmt: skip
        self.source.on_change = self.mover.wake
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.mover.run())

    def answer(self, head: wire.Head, frames: list[bytes]) -> Answer:
        body: wire.Snapshot = head.body
        refusal = self.before(body)
        if refusal is not None:
            return refusal
        return Kind.SNAPSHOT_ACK, self.target.take_snapshot(body, A, frames, 1), ()

    async def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 20) -> None:
        """Lets the mover run until the condition is true."""
        if self.task is None:
            self.start()
        assert self.task is not None
        end = time.monotonic() + timeout_s
        while not condition():
            if self.task.done():
                self.task.result()
            assert time.monotonic() < end, what
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        self.driver.close()
        self.peer.stop()
        self.store.validate()
        self.target_store.validate()

    def all_moved(self) -> bool:
        self.target.take_delta(
            Delta(revision=Revision(self.authority.revision), buckets=dict(self.authority.records))
        )
        counts = [len(self.target_store.buckets.get(b, ())) for b in range(BUCKETS)]
        return self.target.served == set(range(BUCKETS)) and counts == [20] * BUCKETS


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    with Arena.create(4 * MIB, "source") as source, Arena.create(4 * MIB, "target") as target:
        yield [source, target]


@pytest.fixture
async def setting(arenas: list[Arena], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setting]:
    monkeypatch.setattr(mover, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(mover, "RETRY_FIRST_S", 0.01)
    setting = Setting(arenas)
    yield setting
    await setting.close()


async def test_all_buckets_go_where_they_belong_a_few_at_a_time(setting: Setting) -> None:
    most = 0

    def watch(body: wire.Snapshot) -> None:
        nonlocal most
        most = max(most, setting.mover.under_way)

    setting.before = watch
    await setting.until(lambda: setting.source.held == 0, "the moves")
    await setting.until(lambda: setting.mover.under_way == 0, "the end")
    assert most == 2
    assert (setting.mover.moved_total, setting.mover.failed_total) == (BUCKETS, 0)
    assert setting.mover.moved_bytes_total == BUCKETS * 20_000
    assert setting.source.lost_buckets == 0
    assert setting.all_moved()


@pytest.mark.parametrize("trouble", ["unavailable", "unknown, done", "unknown, not done"])
async def test_a_proposal_is_made_again_until_its_outcome_is_known(
    setting: Setting, trouble: str
) -> None:
    """And while it is not known the bucket is served by nobody."""
    seen: dict[int, int] = {}

    def unclear(change: BucketChange) -> str:
        assert change.bucket in setting.source.moving
        assert change.bucket not in setting.source.served
        seen[change.bucket] = seen.get(change.bucket, 0) + 1
        return trouble if seen[change.bucket] < 3 else ""

    setting.authority.trouble = unclear
    await setting.until(lambda: setting.source.held == 0, "the moves")
    assert set(seen.values()) == {3}
    assert setting.all_moved()


async def test_a_proposal_that_lost_is_taken_up_again_with_the_new_record(
    setting: Setting,
) -> None:
    again: set[int] = set()

    def overtaken(change: BucketChange) -> str:
        if change.bucket not in again:
            again.add(change.bucket)
            setting.authority.write(change.bucket, record(A, B))
        return ""

    setting.authority.trouble = overtaken
    await setting.until(lambda: setting.source.held == 0, "the moves")
    assert (setting.mover.moved_total, setting.authority.calls) == (BUCKETS, 2 * BUCKETS)
    assert setting.all_moved()


async def test_a_next_owner_that_does_not_know_of_it_yet_is_asked_again_at_once(
    setting: Setting,
) -> None:
    asked: dict[int, int] = {}

    def knows_later(body: wire.Snapshot) -> Answer | None:
        asked[body.bucket] = asked.get(body.bucket, 0) + 1
        if asked[body.bucket] > 5:
            return None
        status = (Status.MOVING, Status.NOT_PRIMARY)[asked[body.bucket] % 2]
        return Kind.SNAPSHOT_ACK, wire.SnapshotAck(body.bucket, body.nonce, body.seq, status), ()

    setting.before = knows_later
    await setting.until(lambda: setting.source.held == 0, "the moves")
    assert setting.mover.failed_total == 0
    assert setting.all_moved()


async def test_a_bucket_that_fails_to_move_is_served_and_tried_again_later(
    setting: Setting,
) -> None:
    refusals: dict[int, list[float]] = {}

    def refuses(body: wire.Snapshot) -> Answer | None:
        times = refusals.setdefault(body.bucket, [])
        if len(times) < 4:
            times.append(time.monotonic())
            ack = wire.SnapshotAck(body.bucket, body.nonce, body.seq, Status.CONFLICT)
            return Kind.SNAPSHOT_ACK, ack, ()
        return None

    setting.before = refuses
    await setting.until(lambda: len(refusals) == BUCKETS, "the first refusals")
    assert setting.source.held == BUCKETS
    await setting.until(lambda: setting.source.held == 0, "the moves")
    assert setting.mover.failed_total == 4 * BUCKETS
    for times in refusals.values():
        gaps = [b - a for a, b in pairwise(times)]
        assert all(gap >= 0.005 * 2**i for i, gap in enumerate(gaps))
    assert setting.all_moved()


async def test_a_bucket_that_is_taken_away_under_way_ends_its_move(setting: Setting) -> None:
    """Whoever owns it now; and that is not counted as a move."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    go_on = asyncio.Event()

    def waits(body: wire.Snapshot) -> None:
        loop.call_soon_threadsafe(asked.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)

    setting.before = waits
    setting.start()
    await asked.wait()
    changes: dict[BucketId, Versioned | None] = {
        BucketId(b): Versioned(record(B, B, epoch=2), Revision(20)) for b in range(BUCKETS)
    }
    setting.source.take_delta(Delta(revision=Revision(20), buckets=changes))
    go_on.set()
    await setting.until(lambda: setting.mover.under_way == 0, "the end of the moves")
    assert (setting.mover.moved_total, setting.authority.calls) == (0, 0)
    assert setting.source.held == 0
    assert not setting.store.buckets


async def test_a_bucket_that_is_gone_before_its_move_begins_does_no_harm(
    setting: Setting,
) -> None:
    async with asyncio.TaskGroup() as group:
        setting.mover._start_some(group)
        setting.source.take_delta(
            Delta(revision=Revision(20), buckets={BucketId(b): None for b in range(BUCKETS)})
        )
    assert (setting.mover.moved_total, setting.source.held) == (0, 0)


async def test_values_larger_than_a_message_go_in_pieces_that_fit(
    arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REST_BYTES", 1000)
    setting = Setting(arenas, moves_max=1)
    large = bytes(range(256)) * 8192
    setting.store.put_batch([3], [b"large"], [large], PLAIN, 1)
    sizes: list[int] = []

    def watch(body: wire.Snapshot) -> None:
        sizes.append(sum(e.piece if e.piece >= 0 else max(0, e.size) for e in body.entries))

    setting.before = watch
    await setting.until(lambda: setting.source.held == 0, "the moves")
    assert max(sizes) == LIMITS.message_bytes_max
    item = setting.target_store.buckets[3].objects[b"large"]
    assert bytes(setting.target_store.value(item)) == large
    await setting.close()


async def test_no_bucket_is_stopped_while_etcd_is_silent(setting: Setting) -> None:
    """A record cannot be changed then, so nobody could take it over."""
    stopped = 0
    stop_serving = setting.source.stop_serving

    def counts(bucket: BucketId, stop: bool) -> None:
        nonlocal stopped
        stopped += stop
        stop_serving(bucket, stop)

    setting.authority.silent = True
    setting.source.stop_serving = counts  # type: ignore[method-assign]
    await setting.until(lambda: setting.mover.failed_total >= BUCKETS, "some attempts")
    assert (stopped, len(setting.source.served)) == (0, BUCKETS)
    setting.authority.silent = False
    await setting.until(lambda: setting.source.held == 0, "the moves")
    assert setting.all_moved()
