from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from p2pkv.arena import Arena
from p2pkv.errors import ConfigError, Conflict
from p2pkv.objects import (
    HEADER_BYTES,
    METADATA_BYTES,
    Object,
    Pin,
    Reason,
    State,
    extent_bytes,
    read_header,
)
from p2pkv.store import Store
from p2pkv.store_audit import audit
from p2pkv.wire import PutOptions, Status

KIB, MIB = 1 << 10, 1 << 20
MS = 1_000_000
B = 3
PLAIN = PutOptions()
IF_ABSENT, ONCE = PutOptions(if_absent=True), PutOptions(write_once=True)
SOFT, HARD = PutOptions(soft_pin=True), PutOptions(hard_pin=True)
TTL = PutOptions(ttl_ms=10)

Make = Callable[..., Store]


@pytest.fixture
def make() -> Iterator[Make]:
    arenas: list[Arena] = []

    def make(size: int = MIB, **limits: Any) -> Store:
        arena = Arena.create(size, "store")
        arenas.append(arena)
        store = Store(arena, **{"metadata_limit_bytes": 16 * MIB, **limits})
        store.open_bucket(B)
        return store

    yield make
    for arena in arenas:
        arena.close()


@pytest.fixture
def store(make: Make) -> Iterator[Store]:
    store = make()
    yield store
    audit(store)


def alloc(store: Store, key: bytes, size: int, options: PutOptions = PLAIN, now: int = 1) -> Object:
    (item,) = store.allocate_batch([B], [key], [size], options, now)
    assert isinstance(item, Object), item
    return item


def refusal(store: Store, key: bytes, size: int, options: PutOptions = PLAIN) -> Status:
    (status,) = store.allocate_batch([B], [key], [size], options, 1)
    assert isinstance(status, Status), status
    return status


def put(
    store: Store, key: bytes, value: bytes, options: PutOptions = PLAIN, now: int = 1
) -> Status:
    (status,) = store.put_batch([B], [key], [value], options, now)
    return status


def put_ok(
    store: Store, key: bytes, value: bytes, options: PutOptions = PLAIN, now: int = 1
) -> Object:
    assert put(store, key, value, options, now) is Status.OK
    return found(store, key, now)


def found(store: Store, key: bytes, now: int = 1) -> Object:
    item = store.find(B, key, now)
    assert item is not None, key
    return item


def get(store: Store, key: bytes, now: int = 1) -> bytes | None:
    (item,) = store.get_batch([B], [key], now)
    return None if item is None else bytes(store.value(item))


def exists(store: Store, *keys: bytes, now: int = 1) -> list[bool]:
    return store.exists_batch([B] * len(keys), keys, now)


def fill(store: Store, count: int, size: int, options: PutOptions = PLAIN) -> list[bytes]:
    keys = [b"fill%04d" % i for i in range(count)]
    for key in keys:
        assert put(store, key, key[-4:] * (size // 4), options) is Status.OK
    return keys


def lost(store: Store, reason: Reason) -> int:
    return store.counters.lost[reason]


# -- putting and getting


def test_a_value_comes_back_as_it_was_put(store: Store) -> None:
    assert put(store, b"k", b"value") is Status.OK
    assert get(store, b"k") == b"value"
    assert get(store, b"other") is None
    assert (store.counters.hits, store.counters.misses) == (1, 1)


def test_an_empty_value_is_a_value(store: Store) -> None:
    put_ok(store, b"k", b"")
    assert get(store, b"k") == b""


def test_an_allocated_object_is_not_visible_until_it_is_committed(store: Store) -> None:
    item = alloc(store, b"k", 5)
    assert (exists(store, b"k"), get(store, b"k")) == ([False], None)
    assert store.stats().allocated == 1
    store.arena.write(item.offset, b"value")
    assert store.commit_batch([item], 1) == [Status.OK]
    assert get(store, b"k") == b"value"
    assert store.stats().allocated == 0


def test_an_overwrite_replaces_the_value_and_frees_the_old_extent(store: Store) -> None:
    old = put_ok(store, b"k", b"old")
    used = store.stats().used_bytes
    new = put_ok(store, b"k", b"new")
    assert get(store, b"k") == b"new"
    assert new.version > old.version
    assert old.state is State.GONE
    assert store.stats().used_bytes == used
    assert lost(store, Reason.OVERWRITTEN) == 1
    assert (store.counters.puts, store.counters.put_bytes) == (2, 6)


def test_until_the_commit_the_old_value_is_served(store: Store) -> None:
    put_ok(store, b"k", b"old")
    item = alloc(store, b"k", 3)
    store.arena.write(item.offset, b"new")
    assert get(store, b"k") == b"old"
    store.commit_batch([item], 1)
    assert get(store, b"k") == b"new"


def test_the_later_of_two_commits_stays(store: Store) -> None:
    first, second = alloc(store, b"k", 1), alloc(store, b"k", 1)
    store.arena.write(first.offset, b"1")
    store.arena.write(second.offset, b"2")
    assert store.commit_batch([second, first], 1) == [Status.OK, Status.OK]
    assert get(store, b"k") == b"1"


def test_the_same_key_twice_in_a_batch_keeps_the_last(store: Store) -> None:
    assert store.put_batch([B, B], [b"k", b"k"], [b"1", b"2"], PLAIN, 1) == [Status.OK] * 2
    assert get(store, b"k") == b"2"
    assert lost(store, Reason.OVERWRITTEN) == 1


def test_values_are_aligned_and_a_batch_lies_in_one_run(store: Store) -> None:
    sizes = [4096, 100, 0, 64]
    items = store.allocate_batch([B] * 4, [b"a", b"b", b"c", b"d"], sizes, PLAIN, 1)
    offsets = [item.offset for item in items if isinstance(item, Object)]
    assert all(offset % 64 == 0 for offset in offsets)
    ends = [offset + extent_bytes(size) for offset, size in zip(offsets, sizes, strict=True)]
    assert offsets[1:] == ends[:-1]


def test_stamp_and_checksum_are_kept(store: Store) -> None:
    (item,) = store.allocate_batch([B], [b"k"], [1], PLAIN, 1)
    assert isinstance(item, Object)
    item.stamp = 99
    store.commit_batch([item], 1, [12345])
    assert (found(store, b"k").stamp, found(store, b"k").checksum) == (99, 12345)
    header = read_header(store.arena.view, item.offset)
    assert header is not None
    assert (header.checksum, header.has_checksum) == (12345, 1)


def test_another_number_of_checksums_than_objects_changes_nothing(store: Store) -> None:
    item = alloc(store, b"k", 1)
    with pytest.raises(ValueError, match="2 checksums for 1 objects"):
        store.commit_batch([item], 1, [1, 2])
    assert store.commit_batch([item], 1) == [Status.OK]


def test_a_header_stands_before_the_value_until_its_memory_is_freed(store: Store) -> None:
    item = put_ok(store, b"k", b"value")
    header = read_header(store.arena.view, item.offset)
    assert header is not None
    assert header.key_hash == xxh3_64_intdigest(b"k")
    assert (header.size, header.version) == (5, item.version)
    store.acquire(item)
    store.delete_batch([B], [b"k"], 1)
    assert read_header(store.arena.view, item.offset) == header
    store.release(item)
    assert read_header(store.arena.view, item.offset) is None


def test_committing_twice_or_after_an_abort_is_a_conflict(store: Store) -> None:
    item, aborted = alloc(store, b"a", 1), alloc(store, b"b", 1)
    assert store.abort_batch([aborted, aborted]) == 1
    assert store.commit_batch([item, item, aborted], 1) == [
        Status.OK,
        Status.CONFLICT,
        Status.CONFLICT,
    ]
    assert exists(store, b"a", b"b") == [True, False]
    assert store.counters.puts == 1


def test_an_abort_gives_the_memory_back_and_leaves_committed_objects_alone(store: Store) -> None:
    item = alloc(store, b"k", 1000)
    assert store.abort_batch([item]) == 1
    assert (store.stats().used_bytes, store.stats().metadata_bytes) == (0, 0)
    kept = put_ok(store, b"k", b"v")
    assert store.abort_batch([kept, item]) == 0
    assert get(store, b"k") == b"v"
    assert store.counters.aborts == 1


def test_an_abort_while_the_bytes_still_come_in_keeps_the_extent(store: Store) -> None:
    item = alloc(store, b"k", 1000)
    store.acquire(item)
    store.abort_batch([item])
    assert store.stats().retiring == 1
    assert store.stats().used_bytes == extent_bytes(1000)
    store.release(item)
    assert store.stats().used_bytes == 0


def test_an_empty_batch_is_nothing(store: Store) -> None:
    assert store.put_batch([], [], [], PLAIN, 1) == []
    assert store.allocate_batch([], [], [], PLAIN, 1) == []
    assert store.commit_batch([], 1) == []
    assert store.get_batch([], [], 1) == []


# -- refusals


def test_a_bucket_that_is_not_open_has_nothing_and_takes_nothing(store: Store) -> None:
    assert store.get_batch([9], [b"k"], 1) == [None]
    assert store.exists_batch([9], [b"k"], 1) == [False]
    assert store.match([9], [b"k"], 1) == 0
    assert store.delete_batch([9], [b"k"], 1) == [Status.MISS]
    assert store.allocate_batch([9], [b"k"], [1], PLAIN, 1) == [Status.NOT_PRIMARY]
    with pytest.raises(KeyError):
        store.scan(9, b"", b"", 1, 1)


@pytest.mark.parametrize(("length", "status"), [(0, False), (1, True), (1024, True), (1025, False)])
def test_keys_have_1_to_1024_bytes(store: Store, length: int, status: bool) -> None:
    (result,) = store.allocate_batch([B], [b"k" * length], [1], PLAIN, 1)
    assert isinstance(result, Object) if status else result is Status.INVALID


def test_a_negative_size_is_invalid(store: Store) -> None:
    assert refusal(store, b"k", -1) is Status.INVALID


def test_a_value_may_fill_the_arena_and_not_a_byte_more(store: Store) -> None:
    largest = MIB - HEADER_BYTES
    assert refusal(store, b"k", largest + 1) is Status.TOO_LARGE
    assert store.counters.refused_size == 1
    assert alloc(store, b"k", largest).size == largest


def test_the_configured_limit_of_values_counts(make: Make) -> None:
    store = make(value_bytes_max=1000)
    assert refusal(store, b"k", 1001) is Status.TOO_LARGE
    assert alloc(store, b"k", 1000).size == 1000


def test_a_refused_key_does_not_hinder_the_others(store: Store) -> None:
    put_ok(store, b"there", b"v")
    keys = [b"a", b"there", b"", b"b"]
    results = store.allocate_batch([B, B, B, 9], keys, [1] * 4, IF_ABSENT, 1)
    assert isinstance(results[0], Object)
    assert results[1:] == [Status.EXISTS, Status.INVALID, Status.NOT_PRIMARY]


def test_columns_of_different_length_are_an_error(store: Store) -> None:
    with pytest.raises(ValueError, match="zip"):
        store.allocate_batch([B], [b"a", b"b"], [1, 1], PLAIN, 1)
    with pytest.raises(ValueError, match="zip"):
        store.get_batch([B], [b"a", b"b"], 1)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"metadata_limit_bytes": METADATA_BYTES + 1023}, "metadata_limit_bytes"),
        ({"hard_pin_quota": 1.01}, "hard_pin_quota"),
        ({"hard_pin_quota": -0.01}, "hard_pin_quota"),
    ],
)
def test_limits_that_make_no_sense_are_refused(
    make: Make, limits: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        make(**limits)
    assert make(metadata_limit_bytes=METADATA_BYTES + 1024, hard_pin_quota=1.0)


# -- if_absent and write_once


def test_if_absent_refuses_where_an_object_is(store: Store) -> None:
    assert put(store, b"k", b"1", IF_ABSENT) is Status.OK
    assert put(store, b"k", b"2", IF_ABSENT) is Status.EXISTS
    assert get(store, b"k") == b"1"


def test_if_absent_is_checked_again_at_the_commit(store: Store) -> None:
    first, second = alloc(store, b"k", 1, IF_ABSENT), alloc(store, b"k", 1, IF_ABSENT)
    store.arena.write(first.offset, b"1")
    used = store.stats().used_bytes
    assert store.commit_batch([first, second], 1) == [Status.OK, Status.EXISTS]
    assert get(store, b"k") == b"1"
    assert store.stats().used_bytes == used - extent_bytes(1)
    assert second.state is State.GONE
    assert store.commit_batch([second], 1) == [Status.CONFLICT]


def test_a_refused_object_twice_in_one_commit_is_freed_once(store: Store) -> None:
    second = alloc(store, b"k", 1, IF_ABSENT)
    put_ok(store, b"k", b"1")
    assert store.commit_batch([second, second], 1) == [Status.EXISTS, Status.CONFLICT]


@pytest.mark.parametrize("options", [PLAIN, ONCE, SOFT])
def test_a_put_on_a_write_once_object_is_ok_and_keeps_the_bytes(
    store: Store, options: PutOptions
) -> None:
    item = put_ok(store, b"k", b"old", ONCE)
    assert put(store, b"k", b"new", options) is Status.OK
    assert found(store, b"k") is item
    assert get(store, b"k") == b"old"
    assert store.counters.puts == 1


def test_write_once_is_checked_again_at_the_commit(store: Store) -> None:
    first, second = alloc(store, b"k", 1, ONCE), alloc(store, b"k", 1, ONCE)
    store.arena.write(first.offset, b"1")
    store.arena.write(second.offset, b"2")
    assert store.commit_batch([first, second], 1) == [Status.OK, Status.OK]
    assert get(store, b"k") == b"1"
    assert second.state is State.GONE


def test_write_once_replaces_an_ordinary_object(store: Store) -> None:
    put_ok(store, b"k", b"1")
    put_ok(store, b"k", b"2", ONCE)
    put_ok(store, b"k", b"3")
    assert get(store, b"k") == b"2"


def test_a_write_once_object_can_be_deleted_and_put_again(store: Store) -> None:
    put_ok(store, b"k", b"1", ONCE)
    assert store.delete_batch([B], [b"k"], 1) == [Status.OK]
    put_ok(store, b"k", b"2", ONCE)
    assert get(store, b"k") == b"2"


def test_an_expired_object_stands_in_nobodys_way(store: Store) -> None:
    put_ok(store, b"a", b"1", PutOptions(write_once=True, ttl_ms=1))
    put_ok(store, b"b", b"1", PutOptions(ttl_ms=1))
    assert put(store, b"a", b"2", now=1 + MS) is Status.OK
    assert put(store, b"b", b"2", IF_ABSENT, now=1 + MS) is Status.OK
    assert (get(store, b"a", 1 + MS), get(store, b"b", 1 + MS)) == (b"2", b"2")
    assert (lost(store, Reason.EXPIRED), lost(store, Reason.OVERWRITTEN)) == (2, 0)


# -- exists and match


def test_exists_and_match_touch_nothing(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    keys = fill(store, 4, KIB)
    assert exists(store, *keys, b"no") == [True] * 4 + [False]
    assert store.match([B] * 4, keys, 1) == 4
    put_ok(store, b"new", bytes(KIB))
    assert exists(store, *keys) == [False, True, True, True]
    assert (store.counters.hits, store.counters.misses) == (0, 0)


def test_match_counts_from_the_start_to_the_first_miss(store: Store) -> None:
    for key in (b"a", b"b", b"d"):
        put_ok(store, key, b"")
    keys = [b"a", b"b", b"c", b"d"]
    assert store.match([B] * 4, keys, 1) == 2
    assert store.match([B], [b"c"], 1) == 0
    assert store.match([], [], 1) == 0


# -- eviction


def test_200_puts_of_1_mib_into_64_mib_are_all_accepted(make: Make) -> None:
    store = make(64 * MIB)
    value = bytes(MIB)
    assert all(put(store, b"%d" % i, value) is Status.OK for i in range(200))
    stats = store.stats()
    assert stats.objects == 63
    assert lost(store, Reason.EVICTED) == 137
    assert store.counters.lost_bytes[Reason.EVICTED] == 137 * MIB
    audit(store)


def test_a_batch_larger_than_the_arena_evicts_its_own_beginning(make: Make) -> None:
    store = make(8 * MIB)
    keys = [b"%02d" % i for i in range(20)]
    statuses = store.put_batch([B] * 20, keys, [bytes(MIB)] * 20, PLAIN, 1)
    assert statuses == [Status.OK] * 20
    assert exists(store, keys[-1]) == [True]
    assert store.stats().objects == 7
    audit(store)


def test_the_least_recently_used_goes_first(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    keys = fill(store, 4, KIB)
    get(store, keys[0])
    put_ok(store, b"new", bytes(KIB))
    assert exists(store, *keys) == [True, False, True, True]


def test_a_chain_loses_its_tail_first_as_put_and_as_read(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    chain = [b"c%d" % i for i in range(4)]
    store.put_batch([B] * 4, chain, [bytes(KIB)] * 4, PLAIN, 1)
    put_ok(store, b"x", bytes(KIB))
    assert exists(store, *chain) == [True, True, True, False]
    store.get_batch([B] * 3, chain[:3], 1)
    store.delete_batch([B], [b"x"], 1)
    put_ok(store, b"y", bytes(2 * KIB))
    assert exists(store, *chain) == [True, True, False, False]


def test_nothing_is_evicted_while_there_is_room(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    fill(store, 4, KIB)
    assert lost(store, Reason.EVICTED) == 0
    put_ok(store, b"one more", b"")
    assert lost(store, Reason.EVICTED) == 1


def test_soft_pinned_objects_go_after_all_others(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    put_ok(store, b"soft", bytes(KIB), SOFT)
    fill(store, 3, KIB)
    put_ok(store, b"big", bytes(3 * KIB))
    assert exists(store, b"soft", b"big") == [True, True]
    put_ok(store, b"bigger", bytes(4 * KIB))
    assert exists(store, b"soft", b"big", b"bigger") == [False, False, True]


def test_hard_pinned_objects_stay_and_a_put_that_needs_their_room_is_refused(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES), hard_pin_quota=0.5)
    put_ok(store, b"hard", bytes(KIB), HARD)
    keys = fill(store, 3, KIB)
    assert refusal(store, b"big", 4 * KIB) is Status.OUT_OF_MEMORY
    assert exists(store, b"hard", *keys) == [True] * 4, "evicted for what could not fit"
    put_ok(store, b"fits", bytes(3 * KIB))
    assert exists(store, b"hard", b"fits", *keys) == [True, True, False, False, False]
    assert store.counters.refused_memory == 1
    audit(store)


def test_objects_that_are_read_are_passed_over(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    keys = fill(store, 4, KIB)
    read = found(store, keys[0])
    store.acquire(read)
    put_ok(store, b"new", bytes(KIB))
    assert exists(store, *keys) == [True, False, True, True]
    assert bytes(store.value(read)) == keys[0][-4:] * (KIB // 4)
    store.release(read)
    audit(store)


def test_if_all_are_read_the_put_is_refused(make: Make) -> None:
    store = make(2 * (KIB + HEADER_BYTES))
    items = [found(store, key) for key in fill(store, 2, KIB)]
    store.acquire_batch(items)
    assert refusal(store, b"new", KIB) is Status.OUT_OF_MEMORY
    store.release_batch(items)
    assert put(store, b"new", bytes(KIB)) is Status.OK


def test_what_is_allocated_is_not_evicted(make: Make) -> None:
    store = make(2 * (KIB + HEADER_BYTES))
    alloc(store, b"a", KIB)
    alloc(store, b"b", KIB)
    assert refusal(store, b"c", KIB) is Status.OUT_OF_MEMORY
    audit(store)


def test_a_batch_takes_what_fits_and_refuses_the_rest(make: Make) -> None:
    store = make(2 * (KIB + HEADER_BYTES))
    fill(store, 2, KIB)
    results = store.allocate_batch([B] * 3, [b"a", b"b", b"c"], [KIB] * 3, PLAIN, 1)
    assert [isinstance(r, Object) for r in results] == [True, True, False]
    assert results[2] is Status.OUT_OF_MEMORY
    audit(store)


def test_eviction_goes_on_until_a_contiguous_extent_is_free(make: Make) -> None:
    """Every second object is read a lot: what is evicted first leaves holes too small."""
    store = make(16 * (KIB + HEADER_BYTES))
    keys = fill(store, 16, KIB)
    for key in keys[1::2]:
        get(store, key)
    assert put(store, b"big", bytes(2 * KIB)) is Status.OK
    assert exists(store, *keys[::2]) == [False] * 8
    assert lost(store, Reason.EVICTED) == 9
    audit(store)


def test_the_search_for_a_contiguous_extent_passes_over_what_is_read(make: Make) -> None:
    store = make(16 * (KIB + HEADER_BYTES))
    keys = fill(store, 16, KIB)
    for key in keys[1::2]:
        get(store, key)
    read = found(store, keys[6])
    store.acquire(read)
    assert put(store, b"big", bytes(2 * KIB)) is Status.OK
    assert exists(store, *keys[:10:2]) == [False, False, False, True, False]
    store.release(read)
    audit(store)


def test_expired_objects_make_room_before_any_is_evicted(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES))
    keys = fill(store, 3, KIB)
    put_ok(store, b"timed", bytes(KIB), TTL)
    put_ok(store, b"new", bytes(KIB), now=1 + 10 * MS)
    assert exists(store, *keys) == [True] * 3
    assert (lost(store, Reason.EXPIRED), lost(store, Reason.EVICTED)) == (1, 0)


# -- the bound of metadata


def cost(count: int, key_bytes: int = 4) -> int:
    return count * (METADATA_BYTES + key_bytes)


def test_over_the_bound_of_metadata_objects_are_evicted(make: Make) -> None:
    store = make(metadata_limit_bytes=cost(10), key_bytes_max=4)
    keys = [b"%04d" % i for i in range(11)]
    for key in keys[:10]:
        put_ok(store, key, b"v")
    assert store.stats().metadata_bytes == store.metadata_limit_bytes
    assert lost(store, Reason.EVICTED) == 0
    put_ok(store, keys[10], b"v")
    assert exists(store, *keys) == [False] + [True] * 10
    audit(store)


def test_a_batch_beyond_the_bound_of_metadata_is_accepted_as_far_as_it_goes(make: Make) -> None:
    store = make(metadata_limit_bytes=cost(10), key_bytes_max=4)
    keys = [b"%04d" % i for i in range(12)]
    results = store.allocate_batch([B] * 12, keys, [1] * 12, PLAIN, 1)
    assert [isinstance(r, Object) for r in results] == [True] * 10 + [False] * 2
    assert results[10:] == [Status.OUT_OF_MEMORY] * 2
    audit(store)


def test_metadata_of_allocated_and_of_retiring_objects_counts(make: Make) -> None:
    store = make(metadata_limit_bytes=cost(2), key_bytes_max=4)
    item = put_ok(store, b"0000", b"")
    store.acquire(item)
    store.delete_batch([B], [b"0000"], 1)
    alloc(store, b"0001", 1)
    assert refusal(store, b"0002", 1) is Status.OUT_OF_MEMORY
    store.release(item)
    assert put(store, b"0002", b"") is Status.OK


def test_expired_objects_make_room_for_metadata_before_any_is_evicted(make: Make) -> None:
    store = make(metadata_limit_bytes=cost(2), key_bytes_max=4)
    put_ok(store, b"0000", b"")
    put_ok(store, b"0001", b"", TTL)
    put_ok(store, b"0002", b"", now=1 + 10 * MS)
    assert exists(store, b"0000", b"0001", b"0002") == [True, False, True]


# -- pins


def test_hard_pins_are_refused_beyond_their_quota_of_extents(make: Make) -> None:
    store = make(8 * KIB, hard_pin_quota=0.5)
    assert put(store, b"a", bytes(3 * KIB), HARD) is Status.OK
    room = 4 * KIB - extent_bytes(3 * KIB)
    assert put(store, b"b", bytes(room - HEADER_BYTES + 1), HARD) is Status.QUOTA
    assert put(store, b"b", bytes(room - HEADER_BYTES), HARD) is Status.OK
    assert store.stats().hard_pinned_bytes == store.stats().hard_pin_quota_bytes
    assert put(store, b"c", b"", HARD) is Status.QUOTA
    assert put(store, b"c", b"", SOFT) is Status.OK
    assert store.counters.refused_quota == 2
    audit(store)


def test_a_batch_of_hard_pins_is_accepted_as_far_as_the_quota_goes(make: Make) -> None:
    store = make(8 * KIB, hard_pin_quota=0.25)
    results = store.put_batch([B] * 3, [b"a", b"b", b"c"], [bytes(960)] * 3, HARD, 1)
    assert results == [Status.OK, Status.OK, Status.QUOTA]


@pytest.mark.parametrize("way", ["delete", "overwrite", "expire", "abort", "drop", "refused"])
def test_what_leaves_gives_its_quota_back(make: Make, way: str) -> None:
    store = make(8 * KIB)
    if way == "abort":
        store.abort_batch([alloc(store, b"k", KIB, HARD)])
    elif way == "refused":
        options = PutOptions(hard_pin=True, if_absent=True)
        item = alloc(store, b"k", 100, options)
        put_ok(store, b"k", b"v")
        store.commit_batch([item], 1)
    else:
        put_ok(store, b"k", bytes(KIB), PutOptions(hard_pin=True, ttl_ms=1))
        store.delete_batch([B], [b"k"] if way == "delete" else [b"other"], 1)
        if way == "overwrite":
            put_ok(store, b"k", b"")
        elif way == "drop":
            store.drop_bucket(B)
        store.expire_due(1 + MS, 10)
    assert (store.stats().hard_pinned, store.stats().hard_pinned_bytes) == (0, 0)
    audit(store)


def test_a_pin_of_a_session_keeps_an_object_until_the_last_is_gone(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES), hard_pin_quota=0.5)
    keys = fill(store, 4, KIB)
    item = found(store, keys[0])
    assert [store.pin(item), store.pin(item)] == [Status.OK] * 2
    assert store.stats().hard_pinned_bytes == extent_bytes(KIB)
    put_ok(store, b"1", bytes(KIB))
    assert store.unpin(item) is Status.OK
    put_ok(store, b"2", bytes(KIB))
    assert exists(store, keys[0]) == [True]
    assert store.unpin(item) is Status.OK
    assert store.stats().hard_pinned == 0
    put_ok(store, b"3", bytes(4 * KIB))
    assert exists(store, keys[0]) == [False]
    audit(store)


def test_unpinning_what_is_not_pinned_raises(store: Store) -> None:
    item = put_ok(store, b"k", b"")
    with pytest.raises(ValueError, match="no pin is held"):
        store.unpin(item)


def test_pins_leave_with_the_object(store: Store) -> None:
    item = put_ok(store, b"k", b"1")
    store.pin(item)
    new = put_ok(store, b"k", b"2")
    assert store.stats().hard_pinned == 0
    assert store.unpin(item) is Status.MISS
    assert store.pin(item) is Status.MISS
    assert new.pins == 0


def test_a_pin_beyond_the_quota_is_refused_and_changes_nothing(make: Make) -> None:
    store = make(8 * KIB, hard_pin_quota=0.25)
    fits, over = (
        put_ok(store, b"f", bytes(2 * KIB - HEADER_BYTES)),
        put_ok(store, b"o", bytes(2 * KIB)),
    )
    assert store.pin(over) is Status.QUOTA
    assert store.set_pin(over, Pin.HARD) is Status.QUOTA
    assert (over.pins, over.pin) == (0, Pin.NONE)
    assert store.pin(fits) is Status.OK
    audit(store)


def test_the_own_pin_of_an_object_can_be_changed(make: Make) -> None:
    store = make(4 * (KIB + HEADER_BYTES), hard_pin_quota=1)
    keys = fill(store, 4, KIB)
    soft, hard = found(store, keys[0]), found(store, keys[1])
    assert store.set_pin(soft, Pin.SOFT) is Status.OK
    assert store.set_pin(hard, Pin.HARD) is Status.OK
    store.pin(hard)
    assert store.stats().hard_pinned == 1
    put_ok(store, b"1", bytes(KIB))
    put_ok(store, b"2", bytes(KIB))
    assert exists(store, *keys) == [True, True, False, False]
    store.unpin(hard)
    assert store.stats().hard_pinned == 1
    store.set_pin(hard, Pin.NONE)
    store.set_pin(soft, Pin.NONE)
    put_ok(store, b"3", bytes(4 * KIB))
    assert exists(store, *keys) == [False] * 4
    audit(store)


# -- tokens


@pytest.mark.parametrize("way", ["delete", "overwrite", "expire", "drop", "range"])
def test_the_bytes_under_a_token_stay_whatever_happens_to_the_object(make: Make, way: str) -> None:
    store = make(8 * KIB)
    item = put_ok(store, b"k", b"precious" * 64, TTL)
    store.acquire_batch([item, item])
    view = store.value(item)
    if way == "delete":
        store.delete_batch([B], [b"k"], 1)
    elif way == "range":
        store.delete_range(B, b"", 10, 1)
    elif way == "overwrite":
        put_ok(store, b"k", b"other")
    elif way == "expire":
        assert get(store, b"k", now=1 + 10 * MS) is None
    else:
        store.drop_bucket(B)
        store.open_bucket(B)
    assert item.state is State.RETIRING
    assert (store.stats().retiring, store.stats().retiring_bytes) == (1, extent_bytes(512))
    for i in range(40):
        put_ok(store, b"churn%d" % i, b"x" * 900)
    store.release(item)
    assert bytes(view) == b"precious" * 64
    audit(store)
    store.release(item)
    assert (store.stats().retiring, store.stats().retiring_bytes) == (0, 0)
    assert item.state is State.GONE
    audit(store)


def test_a_released_object_that_is_still_there_stays(store: Store) -> None:
    item = put_ok(store, b"k", b"v")
    store.acquire(item)
    store.release(item)
    assert get(store, b"k") == b"v"


def test_a_token_on_what_has_left_is_a_conflict_and_the_batch_takes_none(store: Store) -> None:
    gone, there = put_ok(store, b"g", b""), put_ok(store, b"t", b"")
    store.delete_batch([B], [b"g"], 1)
    with pytest.raises(Conflict, match="GONE"):
        store.acquire_batch([there, gone])
    assert there.readers == 0


def test_what_has_left_but_is_being_read_may_have_more_readers(store: Store) -> None:
    item = put_ok(store, b"k", b"bytes")
    store.acquire(item)
    store.delete_batch([B], [b"k"], 1)
    store.acquire(item)
    store.release(item)
    assert (item.state, bytes(store.value(item))) == (State.RETIRING, b"bytes")
    store.release(item)
    assert item.state is State.GONE


def test_releasing_more_than_was_acquired_raises_after_the_others_are_released(
    store: Store,
) -> None:
    items = [put_ok(store, key, b"") for key in (b"1", b"2", b"3")]
    store.acquire_batch([items[0], items[2]])
    store.delete_batch([B] * 3, [b"1", b"2", b"3"], 1)
    with pytest.raises(ValueError, match="no token is held"):
        store.release_batch(items)
    assert store.stats().retiring == 0


def test_other_threads_release_through_the_queue(store: Store) -> None:
    items = [put_ok(store, b"%d" % i, b"v") for i in range(100)]
    store.acquire_batch(items)
    store.delete_batch([B] * 100, [item.key for item in items], 1)
    threads = [
        threading.Thread(target=store.release_later.extend, args=(items[i::4],)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert store.stats().retiring == 100
    assert store.reap(1) == 100
    assert (store.stats().retiring, store.stats().used_bytes) == (0, 0)
    assert store.reap(1) == 0


def test_reap_also_expires_within_its_limit(store: Store) -> None:
    for i in range(5):
        put_ok(store, b"%d" % i, b"", TTL)
    assert store.reap(1 + 10 * MS, limit=3) == 3
    assert store.reap(1 + 10 * MS) == 2


# -- expiry


def test_an_object_is_gone_when_its_time_is_over_and_not_before(store: Store) -> None:
    put_ok(store, b"k", b"v", TTL)
    end = 1 + 10 * MS
    assert get(store, b"k", end - 1) == b"v"
    assert exists(store, b"k", now=end - 1) == [True]
    assert (exists(store, b"k", now=end), store.match([B], [b"k"], end)) == ([False], 0)
    assert store.find(B, b"k", end) is None
    assert store.stats().objects == 1
    assert get(store, b"k", end) is None
    assert store.stats().objects == 0
    assert lost(store, Reason.EXPIRED) == 1


def test_the_time_to_live_counts_from_the_commit(store: Store) -> None:
    item = alloc(store, b"k", 0, TTL, now=1)
    store.commit_batch([item], 5 * MS)
    assert item.expires_at == 15 * MS


def test_a_key_twice_in_a_get_expires_once(store: Store) -> None:
    put_ok(store, b"k", b"v", TTL)
    assert store.get_batch([B, B], [b"k", b"k"], 1 + 10 * MS) == [None, None]
    assert lost(store, Reason.EXPIRED) == 1


def test_other_keys_of_a_get_are_found_beside_an_expired_one(store: Store) -> None:
    put_ok(store, b"t", b"v", TTL)
    kept = put_ok(store, b"k", b"v")
    assert store.get_batch([B] * 3, [b"k", b"t", b"k"], 1 + 10 * MS) == [kept, None, kept]
    assert store.get_batch([B], [b"k"], 1 + 10 * MS) == [kept]


def test_due_objects_are_removed_in_bounded_steps(store: Store) -> None:
    for i in range(10):
        put_ok(store, b"%d" % i, b"", TTL)
    put_ok(store, b"later", b"", PutOptions(ttl_ms=20))
    assert store.expire_due(10 * MS, 100) == 0
    assert [store.expire_due(1 + 10 * MS, 4) for _ in range(4)] == [4, 4, 2, 0]
    assert exists(store, b"later", now=1 + 10 * MS) == [True]


def test_expire_changes_the_time_to_live(store: Store) -> None:
    put_ok(store, b"k", b"", TTL)
    put_ok(store, b"f", b"", TTL)
    assert store.expire_batch([B] * 2, [b"k", b"no"], 50, 1) == [Status.OK, Status.MISS]
    assert store.expire_batch([B], [b"f"], 0, 1) == [Status.OK]
    assert (exists(store, b"k", now=50), exists(store, b"k", now=51)) == ([True], [False])
    assert store.expire_due(10**12, 100) == 1
    assert exists(store, b"f", now=10**12) == [True]


def test_expire_does_not_revive(store: Store) -> None:
    put_ok(store, b"k", b"", TTL)
    assert store.expire_batch([B], [b"k"], 50, 1 + 10 * MS) == [Status.MISS]


def test_a_negative_time_to_live_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="ttl_ns = -1"):
        store.expire_batch([B], [b"k"], -1, 1)


def test_setting_times_again_and_again_takes_bounded_memory(store: Store) -> None:
    put_ok(store, b"k", b"")
    for i in range(1, 5000):
        store.expire_batch([B], [b"k"], i, 1)
    assert len(store.expiry) <= 1024 + 3


# -- deleting


def test_delete_answers_whether_the_key_was_there(store: Store) -> None:
    put_ok(store, b"k", b"")
    keys = [b"k", b"no", b"k"]
    assert store.delete_batch([B] * 3, keys, 1) == [Status.OK, Status.MISS, Status.MISS]
    assert store.stats().used_bytes == 0
    assert lost(store, Reason.DELETED) == 1


def test_deleting_an_expired_object_is_a_miss(store: Store) -> None:
    put_ok(store, b"k", b"", TTL)
    assert store.delete_batch([B], [b"k"], 1 + 10 * MS) == [Status.MISS]
    assert lost(store, Reason.DELETED) == 0


def test_a_range_is_deleted_in_steps(store: Store) -> None:
    for i in range(10):
        put_ok(store, b"a/%d" % i, b"")
    put_ok(store, b"b", b"")
    assert store.delete_range(B, b"a/", 4, 1) == (4, True)
    assert exists(store, b"a/3", b"a/4") == [False, True]
    audit(store)
    assert store.delete_range(B, b"a/", 6, 1) == (6, False)
    assert store.delete_range(B, b"a/", 6, 1) == (0, False)
    assert exists(store, b"b") == [True]


def test_expired_objects_in_a_deleted_range_are_not_counted(store: Store) -> None:
    put_ok(store, b"a/1", b"", TTL)
    put_ok(store, b"a/2", b"")
    assert store.delete_range(B, b"a/", 10, 1 + 10 * MS) == (1, False)
    assert (lost(store, Reason.EXPIRED), lost(store, Reason.DELETED)) == (1, 1)


# -- scanning


def test_a_scan_gives_keys_in_order_and_says_whether_there_are_more(store: Store) -> None:
    for key in (b"b", b"a/2", b"a/1", b"a/3"):
        put_ok(store, key, key)
    assert store.scan(B, b"", b"", 10, 1) == (
        [(b"a/1", 3), (b"a/2", 3), (b"a/3", 3), (b"b", 1)],
        False,
    )
    assert store.scan(B, b"", b"a/", 2, 1) == ([(b"a/1", 3), (b"a/2", 3)], True)
    assert store.scan(B, b"a/2", b"a/", 2, 1) == ([(b"a/3", 3)], False)
    assert store.scan(B, b"", b"a/", 3, 1)[1] is False


def test_a_scan_passes_expired_objects_over(store: Store) -> None:
    put_ok(store, b"a", b"")
    put_ok(store, b"b", b"", TTL)
    assert store.scan(B, b"", b"", 1, 1 + 10 * MS) == ([(b"a", 0)], False)


def test_a_scan_follows_puts_and_deletes(store: Store) -> None:
    put_ok(store, b"b", b"")
    assert store.scan(B, b"", b"", 9, 1)[0] == [(b"b", 0)]
    put_ok(store, b"a", b"")
    put_ok(store, b"b", b"12")
    assert store.scan(B, b"", b"", 9, 1)[0] == [(b"a", 0), (b"b", 2)]
    store.delete_batch([B], [b"a"], 1)
    assert store.scan(B, b"", b"", 9, 1)[0] == [(b"b", 2)]


# -- buckets


def test_the_same_key_in_two_buckets_is_two_objects(store: Store) -> None:
    store.open_bucket(4)
    store.put_batch([3, 4], [b"k", b"k"], [b"three", b"four"], PLAIN, 1)
    items = store.get_batch([4, 3], [b"k", b"k"], 1)
    assert [bytes(store.value(i)) for i in items if i] == [b"four", b"three"]
    assert store.buckets[4].value_bytes == 4


def test_a_bucket_is_opened_once(store: Store) -> None:
    with pytest.raises(ValueError, match="bucket 3 is open"):
        store.open_bucket(B)
    with pytest.raises(KeyError):
        store.drop_bucket(9)


def test_dropping_a_bucket_frees_everything_and_aborts_its_allocations(store: Store) -> None:
    store.open_bucket(4)
    store.put_batch([4], [b"other"], [b""], PLAIN, 1)
    put_ok(store, b"k", b"v", HARD)
    put_ok(store, b"t", b"v", TTL)
    pending = [alloc(store, b"p", 9), alloc(store, b"q", 9, HARD)]
    assert store.drop_bucket(B) == 2
    assert store.commit_batch(pending, 1) == [Status.CONFLICT] * 2
    assert get(store, b"k") is None
    stats = store.stats()
    assert (stats.buckets, stats.objects, stats.timed, stats.hard_pinned) == (1, 1, 0, 0)
    assert stats.used_bytes == extent_bytes(0)
    assert (lost(store, Reason.DROPPED), store.counters.aborts) == (2, 2)
    assert store.open_bucket(B).objects == {}


def test_while_a_bucket_is_handed_over_every_change_is_noted(make: Make) -> None:
    store = make(6 * (KIB + HEADER_BYTES), hard_pin_quota=1)
    keys = [b"evicted", b"expired", b"pinned", b"deleted", b"aged", b"read"]
    for key in keys:
        put_ok(store, key, bytes(KIB), TTL if key == b"expired" else PLAIN)
    bucket = store.buckets[B]
    bucket.dirty = {}
    get(store, b"read")
    exists(store, *keys)
    alloc_only = alloc(store, b"evicted", 0, now=1)
    store.abort_batch([alloc_only])
    assert bucket.dirty == {b"evicted": None}, "evicted for the allocation"
    bucket.dirty = {}
    store.pin(found(store, b"pinned"))
    store.expire_batch([B], [b"aged"], 100 * MS, 1)
    store.delete_batch([B], [b"deleted"], 1)
    put_ok(store, b"put", b"")
    store.expire_due(1 + 10 * MS, 10)
    assert list(bucket.dirty) == [b"pinned", b"aged", b"deleted", b"put", b"expired"]
    bucket.dirty = None
    put_ok(store, b"put", b"")


# -- figures


def test_the_figures_add_up(store: Store) -> None:
    put_ok(store, b"a", bytes(100))
    put_ok(store, b"b", bytes(100), PutOptions(hard_pin=True, ttl_ms=1))
    read = put_ok(store, b"c", bytes(100))
    store.acquire(read)
    store.delete_batch([B], [b"c"], 1)
    alloc(store, b"d", 100)
    s = store.stats()
    assert (s.objects, s.allocated, s.retiring, s.hard_pinned, s.timed) == (2, 1, 1, 1, 1)
    assert s.value_bytes == 200
    extent = extent_bytes(100)
    assert (s.used_bytes, s.free_bytes) == (4 * extent, s.size_bytes - 4 * extent)
    assert (s.evictable_bytes, s.hard_pinned_bytes, s.retiring_bytes) == (extent,) * 3
    assert s.metadata_bytes == 4 * (METADATA_BYTES + 1)
    assert (s.free_extents, s.fragmentation, s.largest_free_bytes) == (1, 0.0, s.free_bytes)
    assert s.counters == store.counters
    assert s.counters is not store.counters
    store.release(read)


def test_the_audit_finds_what_is_wrong(store: Store) -> None:
    item = put_ok(store, b"k", b"v")
    store.policy.remove(item)
    with pytest.raises(AssertionError, match="candidate or pinned"):
        store.validate()
    store.policy.add(item)
    store.extents.metadata_bytes += 1
    with pytest.raises(AssertionError, match="metadata_bytes"):
        store.validate()
    store.extents.metadata_bytes -= 1
    store.validate()


# -- against a model

KEYS = [b"k%d" % i for i in range(8)]
OPTIONS = [
    PLAIN,
    SOFT,
    HARD,
    ONCE,
    IF_ABSENT,
    TTL,
    PutOptions(soft_pin=True, ttl_ms=3),
    PutOptions(hard_pin=True, write_once=True),
]
keys_ = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)


class StoreMachine(RuleBasedStateMachine):
    """Against a dict of values; a key may be missing only if an eviction explains it."""

    ARENA_BYTES = 6 * KIB

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(self.ARENA_BYTES, "model")
        self.store = Store(
            self.arena, metadata_limit_bytes=cost(12, 2), hard_pin_quota=0.4, key_bytes_max=2
        )
        self.now = 1
        self.serial = 0
        self.model: dict[tuple[int, bytes], tuple[Object, bytes]] = {}
        self.pending: list[tuple[Object, bytes]] = []
        self.tokens: list[tuple[Object, bytes]] = []
        self.pins: list[Object] = []
        for bucket in (0, 1):
            self.store.open_bucket(bucket)

    def teardown(self) -> None:
        self.arena.close()

    def value(self, size: int) -> bytes:
        self.serial += 1
        return (b"%06d" % self.serial * (size // 6 + 1))[:size]

    def live(self, bucket: int, key: bytes) -> tuple[Object, bytes] | None:
        """What the model has; what was evicted meanwhile is taken out of it."""
        entry = self.model.get((bucket, key))
        if entry is None:
            return None
        item = entry[0]
        if item.state is not State.COMMITTED:
            assert not item.hard_pinned, "a hard-pinned object was evicted"
            del self.model[bucket, key]
            return None
        return None if item.expires_at and item.expires_at <= self.now else entry

    def expected(self, bucket: int, key: bytes, options: PutOptions) -> Status | None:
        entry = self.live(bucket, key)
        if entry is not None and options.if_absent:
            return Status.EXISTS
        if entry is not None and entry[0].options.write_once:
            return Status.OK
        return None

    @rule(
        bucket=st.integers(0, 1),
        keys=keys_,
        size=st.integers(0, 1500),
        options=st.sampled_from(OPTIONS),
    )
    def allocate(self, bucket: int, keys: list[bytes], size: int, options: PutOptions) -> None:
        expected = [self.expected(bucket, key, options) for key in keys]
        evictable = self.store.policy
        results = self.store.allocate_batch(
            [bucket] * len(keys), keys, [size] * len(keys), options, self.now
        )
        for result, status in zip(results, expected, strict=True):
            if isinstance(result, Object):
                assert status is None
                value = self.value(size)
                self.arena.write(result.offset, value)
                self.pending.append((result, value))
            elif status is None:
                assert result in (Status.OUT_OF_MEMORY, Status.QUOTA)
                if result is Status.QUOTA:
                    assert options.hard_pin
            else:
                assert result is status
        if Status.OUT_OF_MEMORY in results and extent_bytes(size) < 256:
            assert all(victim.readers for victim in evictable.victims()), "refused too early"

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.pending)))
        batch, self.pending = self.pending[:count], self.pending[count:]
        visible = {k: entry for k in list(self.model) if (entry := self.live(*k))}
        statuses = self.store.commit_batch([item for item, _ in batch], self.now)
        for (item, value), status in zip(batch, statuses, strict=True):
            if item.version:
                assert status is Status.OK
                visible[item.bucket, item.key] = (item, value)
            else:
                assert status is (Status.EXISTS if item.options.if_absent else Status.OK)
                assert item.state is not State.COMMITTED
                there, _ = visible[item.bucket, item.key]
                assert item.options.if_absent or there.options.write_once
        self.model.update(visible)

    @precondition(lambda self: self.pending)
    @rule()
    def abort(self) -> None:
        item, _ = self.pending.pop()
        assert self.store.abort_batch([item]) == 1

    @rule(bucket=st.integers(0, 1), keys=keys_, take=st.booleans())
    def get(self, bucket: int, keys: list[bytes], take: bool) -> None:
        expected = [self.live(bucket, key) for key in keys]
        assert self.store.match([bucket] * len(keys), keys, self.now) == (
            [*expected, None].index(None)
        )
        exists = self.store.exists_batch([bucket] * len(keys), keys, self.now)
        assert exists == [entry is not None for entry in expected]
        items = self.store.get_batch([bucket] * len(keys), keys, self.now)
        for item, entry in zip(items, expected, strict=True):
            assert (item is None) == (entry is None)
            if item is not None and entry is not None:
                assert item is entry[0]
                assert bytes(self.store.value(item)) == entry[1]
                if take:
                    self.store.acquire(item)
                    self.tokens.append(entry)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), later=st.booleans())
    def release(self, data: st.DataObject, later: bool) -> None:
        item, value = self.tokens.pop(data.draw(st.integers(0, len(self.tokens) - 1)))
        assert bytes(self.store.value(item)) == value
        if later:
            self.store.release_later.append(item)
            self.store.reap(self.now, 0)
        else:
            self.store.release(item)

    @rule(bucket=st.integers(0, 1), keys=keys_)
    def delete(self, bucket: int, keys: list[bytes]) -> None:
        for key in keys:
            there = self.live(bucket, key) is not None
            statuses = self.store.delete_batch([bucket], [key], self.now)
            assert statuses == [Status.OK if there else Status.MISS]
            if there:
                del self.model[bucket, key]

    @rule(bucket=st.integers(0, 1), limit=st.integers(1, 4))
    def delete_range(self, bucket: int, limit: int) -> None:
        self.store.expire_due(self.now, 100)
        keys = sorted(k for b, k in list(self.model) if b == bucket and self.live(bucket, k))
        deleted, more = self.store.delete_range(bucket, b"k", limit, self.now)
        assert (deleted, more) == (min(limit, len(keys)), len(keys) > limit)
        for key in keys[:limit]:
            del self.model[bucket, key]

    @rule(bucket=st.integers(0, 1), key=st.sampled_from(KEYS))
    def pin(self, bucket: int, key: bytes) -> None:
        entry = self.live(bucket, key)
        if entry is not None:
            status = self.store.pin(entry[0])
            assert status in (Status.OK, Status.QUOTA)
            if status is Status.OK:
                self.pins.append(entry[0])

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        item = self.pins.pop()
        there = item.state is State.COMMITTED
        assert self.store.unpin(item) is (Status.OK if there else Status.MISS)

    @rule(bucket=st.integers(0, 1), key=st.sampled_from(KEYS), pin=st.sampled_from(list(Pin)))
    def set_pin(self, bucket: int, key: bytes, pin: Pin) -> None:
        entry = self.live(bucket, key)
        if entry is not None:
            assert self.store.set_pin(entry[0], pin) in (Status.OK, Status.QUOTA)

    @rule(bucket=st.integers(0, 1), key=st.sampled_from(KEYS), ttl=st.sampled_from([0, 2, 30]))
    def expire(self, bucket: int, key: bytes, ttl: int) -> None:
        there = self.live(bucket, key) is not None
        statuses = self.store.expire_batch([bucket], [key], ttl * MS, self.now)
        assert statuses == [Status.OK if there else Status.MISS]

    @rule(ms=st.integers(0, 5), limit=st.integers(0, 4))
    def time_passes(self, ms: int, limit: int) -> None:
        self.now += ms * MS
        assert self.store.reap(self.now, limit) <= limit
        for (bucket, key), (item, _) in list(self.model.items()):
            if item.state is not State.COMMITTED:
                self.model.pop((bucket, key))

    @rule(bucket=st.integers(0, 1))
    def drop(self, bucket: int) -> None:
        self.store.drop_bucket(bucket)
        self.store.open_bucket(bucket)
        self.model = {k: v for k, v in self.model.items() if k[0] != bucket}
        self.pending = [entry for entry in self.pending if entry[0].bucket != bucket]

    @rule(bucket=st.integers(0, 1), limit=st.integers(1, 5))
    def scan(self, bucket: int, limit: int) -> None:
        keys = sorted(k for b, k in list(self.model) if b == bucket and self.live(bucket, k))
        seen: list[bytes] = []
        more = True
        while more:
            page, more = self.store.scan(bucket, seen[-1] if seen else b"", b"k", limit, self.now)
            assert len(page) <= limit
            seen += [key for key, _ in page]
        assert seen == keys

    @invariant()
    def agrees(self) -> None:
        audit(self.store)
        for item, value in self.tokens + self.pending:
            assert bytes(self.store.value(item)) == value, "bytes under a token changed"
        for item, value in self.model.values():
            if item.state is State.COMMITTED:
                assert bytes(self.store.value(item)) == value
        readers = sum(item.readers for item in {item for item, _ in self.tokens})
        assert readers == len(self.tokens)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_what_its_readers_are_done_with_makes_room_before_anything_is_evicted(
    store: Store,
) -> None:
    """Also when nobody has taken their tokens back yet."""
    third = bytes(MIB // 3)
    put_ok(store, b"keep", bytes(100))
    old = put_ok(store, b"k", third)
    store.acquire(old)
    put_ok(store, b"k", third)
    store.release_later.append(old)
    put_ok(store, b"other", third)
    assert exists(store, b"keep", b"k", b"other") == [True] * 3
    assert store.stats().retiring == 0
