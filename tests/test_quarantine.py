"""Memory that somebody on another host may still write to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2pkv.arena import Arena
from p2pkv.objects import Object, extent_bytes
from p2pkv.quarantine import SHARE_MAX, TICK_MAX_NS, Quarantine
from p2pkv.store import Store
from p2pkv.wire import PutOptions

SECOND = 1_000_000_000
MiB = 1 << 20
WAIT_NS = 5 * SECOND


@pytest.fixture
def store() -> Iterator[Store]:
    with Arena.create(8 * MiB, "quarantine") as arena:
        store = Store(arena, metadata_limit_bytes=MiB)
        store.open_bucket(0)
        yield store


def given_up(store: Store, size: int = 1000) -> Object:
    """An extent that a client was filling, as the handlers leave it."""
    (item,) = store.allocate_batch([0], [b"k"], [size], PutOptions(), 0)
    assert isinstance(item, Object)
    store.acquire(item)
    store.abort_batch([item])
    return item


def run(quarantine: Quarantine, start_ns: int, for_ns: int) -> int:
    """Look ten times a second; what was freed."""
    return sum(quarantine.reap(t) for t in range(start_ns, start_ns + for_ns + 1, SECOND // 10))


def test_an_extent_is_used_again_when_its_time_is_over_and_not_before(store: Store) -> None:
    quarantine = Quarantine(store, WAIT_NS)
    quarantine.reap(SECOND)
    quarantine.add([given_up(store)], proven=True)
    assert run(quarantine, SECOND, WAIT_NS - SECOND // 10) == 0
    assert store.stats().used_bytes == extent_bytes(1000) == quarantine.held_bytes
    assert run(quarantine, SECOND + WAIT_NS, SECOND // 10) == extent_bytes(1000)
    assert store.stats().used_bytes == 0 == quarantine.held_bytes
    store.validate()


def test_time_in_which_the_node_was_stopped_does_not_count(store: Store) -> None:
    quarantine = Quarantine(store, WAIT_NS)
    quarantine.reap(SECOND)
    quarantine.add([given_up(store)], proven=True)
    assert quarantine.reap(3600 * SECOND) == 0
    assert run(quarantine, 3600 * SECOND, WAIT_NS - TICK_MAX_NS - 1) == 0
    assert run(quarantine, 3600 * SECOND + WAIT_NS - TICK_MAX_NS, SECOND) > 0


def test_without_proof_it_waits_for_the_end_of_the_node(store: Store) -> None:
    quarantine = Quarantine(store, WAIT_NS)
    quarantine.add([given_up(store)], proven=False)
    assert run(quarantine, SECOND, 100 * WAIT_NS) == 0
    assert quarantine.unproven_bytes == quarantine.held_bytes == extent_bytes(1000)


def test_it_is_full_from_its_share_of_the_arena_on(store: Store) -> None:
    quarantine = Quarantine(store, WAIT_NS)
    quarantine.add([given_up(store, 8 * MiB // SHARE_MAX // 2)], proven=True)
    assert not quarantine.full
    quarantine.add([given_up(store, 8 * MiB // SHARE_MAX // 2)], proven=False)
    assert quarantine.full
