"""Whether a store's index, extents, queues and figures agree. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pkv.allocator import GRANULE
from p2pkv.digests import mark
from p2pkv.objects import HEADER_BYTES, Object, State, extent_bytes, read_header

if TYPE_CHECKING:
    from p2pkv.store import Store


def audit(store: Store) -> None:
    """Raises AssertionError with the first disagreement."""
    committed = _check_index(store)
    allocated = list(store.allocated)
    assert all(o.state is State.ALLOCATED for o in allocated), "allocated object in other state"
    assert all(o.bucket in store.buckets for o in allocated), "allocated in no bucket"
    _check_policy(store, committed)
    _check_pins(store, committed + allocated)
    _check_expiry(store, committed)
    _check_extents(store, committed + allocated)


def _check_index(store: Store) -> list[Object]:
    committed: list[Object] = []
    for number, bucket in store.buckets.items():
        assert bucket.id == number, f"bucket {number} calls itself {bucket.id}"
        assert bucket.value_bytes == sum(o.size for o in bucket.objects.values()), "value_bytes"
        lasting = [o for o in bucket.objects.values() if not o.expires_at]
        assert bucket.digest == sum(mark(o.key, o.stamp) for o in lasting), "digest"
        assert bucket.order == sorted(bucket.objects), f"order of bucket {number} is stale"
        for key, item in bucket.objects.items():
            assert (item.key, item.bucket) == (key, number), f"misplaced: {item}"
            assert item.state is State.COMMITTED, f"in the index: {item}"
            header = read_header(store.arena.view, item.offset)
            assert header is not None, f"no header: {item}"
            assert (header.size, header.version) == (item.size, item.version), f"{header} of {item}"
            committed.append(item)
    versions = {o.version for o in committed}
    assert len(versions) == len(committed), "a version twice"
    return committed


def _check_policy(store: Store, committed: list[Object]) -> None:
    for item in committed:
        assert (item in store.policy) != item.hard_pinned, f"candidate or pinned: {item}"
    candidates = [item for item in committed if not item.hard_pinned]
    assert len(store.policy) == len(candidates), f"{len(store.policy)} candidates"
    assert store.evictable_bytes == sum(o.extent_bytes for o in candidates), "evictable_bytes"


def _check_pins(store: Store, live: list[Object]) -> None:
    hard = [item for item in live if item.hard_pinned]
    assert store.hard_pinned == len(hard), f"hard_pinned = {store.hard_pinned}, not {len(hard)}"
    assert store.hard_pinned_bytes == sum(o.extent_bytes for o in hard), "hard_pinned_bytes"
    assert store.hard_pinned_bytes <= store.hard_pin_quota_bytes, "over the quota of hard pins"


def _check_expiry(store: Store, committed: list[Object]) -> None:
    timed = {id(item) for item in committed if item.expires_at}
    assert store.expiry.timed == len(timed), f"timed = {store.expiry.timed}, not {len(timed)}"
    assert {id(item) for item in store.expiry.entries()} == timed, "expiry heap and index differ"


def _check_extents(store: Store, live: list[Object]) -> None:
    extents = store.extents
    extents.allocator.validate()
    retiring = list(extents.retiring)
    for item in retiring:
        assert item.state is State.RETIRING, f"among the retiring: {item}"
        assert item.readers > 0 or item in extents.lent, f"retiring without readers: {item}"
    assert extents.retiring_bytes == sum(o.extent_bytes for o in retiring), "retiring_bytes"
    holders = live + retiring
    for item in holders:
        assert item.offset % GRANULE == 0, f"not aligned: {item}"
        size = extents.allocator.size_of(item.offset - HEADER_BYTES)
        assert size == item.extent_bytes == extent_bytes(item.size), (
            f"extent of {size} bytes: {item}"
        )
    for room in extents.rooms:
        assert extents.allocator.size_of(room.start) == len(room), f"not its extent: {room}"
    used = len(holders) + len(extents.rooms)
    assert extents.allocator.used_extents == used, "an extent that no object has"
    assert extents.metadata_bytes == sum(o.metadata_bytes for o in holders), "metadata_bytes"
    assert extents.metadata_bytes <= store.metadata_limit_bytes, "over the bound of metadata"
