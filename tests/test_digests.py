"""Digests of buckets, notes, differences, books: what comparing copies rests on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodeside import MIB, PLAIN, A, B, C, make_store

from p2pkv.arena import Arena
from p2pkv.digests import (
    NOTES_MAX,
    SLICE_OBJECTS,
    Difference,
    MissingCopies,
    Note,
    Notes,
    Slice,
    Turns,
    difference,
    key_hash,
    mark,
    pack,
    slices,
    stamp_of,
    take_note,
    unpack,
)
from p2pkv.objects import Bucket, Object
from p2pkv.store import Store
from p2pkv.types import BucketId
from p2pkv.wire import PutOptions

KEYS = [b"k%d" % i for i in range(6)]
NUMBERS = st.integers(0, (1 << 64) - 1)
STAMPS = st.dictionaries(NUMBERS, NUMBERS, max_size=50)


@pytest.fixture
def store() -> Iterator[Store]:
    with Arena.create(MIB, "digests") as arena:
        yield make_store(arena, [1])


def digest_of(store: Store) -> int:
    return store.buckets[BucketId(1)].digest


def bucket_of(stamps: dict[bytes, int]) -> Bucket:
    """A bucket with these objects, of which only keys and stamps matter."""
    bucket = Bucket(BucketId(1))
    for key, stamp in stamps.items():
        bucket.objects[key] = Object(key, 1, 64, 1, 128, PLAIN, stamp=stamp)
        bucket.digest += mark(key, stamp)
    return bucket


# -- stamps and digests


def test_a_stamp_names_one_operation_of_one_epoch() -> None:
    assert len({stamp_of(e, s) for e in range(1, 9) for s in (0, 1, 2, (1 << 40) - 1)}) == 32
    assert 0 <= stamp_of((1 << 24) - 1, (1 << 40) - 1) < 1 << 64


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "ttl", "many", "delete", "evict", "expire", "last", "range",
                         "restamp", "corrupt", "reap"]),
        st.sampled_from(KEYS),
        st.integers(1, 99),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_a_digest_is_that_of_what_is_there_after_any_sequence(
    steps: list[tuple[str, bytes, int]],
) -> None:
    with Arena.create(64 << 10, "digests") as arena:
        store = make_store(arena, [1])
        for now, (act, key, number) in enumerate(steps, 1):
            item = store.find(1, key, now)
            match act:
                case "put":
                    store.put_batch([1], [key], [b"v" * 9000], PLAIN, now, stamps=[number])
                case "many":
                    store.put_batch([1] * 6, KEYS, [b"v"] * 6, PLAIN, now)
                case "ttl":
                    store.put_batch([1], [key], [b"v"], PutOptions(ttl_ms=number), now)
                case "delete":
                    store.delete_batch([1], [key], now)
                case "evict":
                    store.evict_batch([1], [key])
                case "expire":
                    store.expire_batch([1], [key], number, now)
                case "last":
                    store.expire_batch([1], [key], 0, now)
                case "range":
                    store.delete_until(1, b"k", key, now)
                case "restamp" if item is not None:
                    store.restamp(item, number)
                case "corrupt" if item is not None:
                    store.drop_corrupt([item])
                case "reap":
                    store.reap(now + number)
            store.validate()


def test_two_stores_with_the_same_writes_have_the_same_digest_in_whatever_order() -> None:
    with Arena.create(MIB, "d1") as first, Arena.create(MIB, "d2") as second:
        stores = make_store(first, [1]), make_store(second, [1])
        for store, keys in zip(stores, (KEYS, KEYS[::-1]), strict=True):
            for key in keys:
                store.put_batch([1], [key], [b"v"], PLAIN, 1, stamps=[key_hash(key)])
        assert digest_of(stores[0]) == digest_of(stores[1]) > 0
        stores[0].delete_batch([1] * 6, KEYS, 2)
        assert digest_of(stores[0]) == 0


def test_another_write_of_the_same_key_changes_the_digest(store: Store) -> None:
    store.put_batch([1], [b"k"], [b"v"], PLAIN, 1)
    before = digest_of(store)
    store.put_batch([1], [b"k"], [b"v"], PLAIN, 1)
    assert digest_of(store) != before


def test_what_expires_is_in_no_digest(store: Store) -> None:
    store.put_batch([1], [b"k"], [b"v"], PutOptions(ttl_ms=5), 1)
    assert digest_of(store) == 0
    store.expire_batch([1], [b"k"], 0, 1)
    assert digest_of(store) > 0


# -- slices and notes


@given(st.integers(0, 1 << 20))
def test_slices_take_in_every_key_once(objects: int) -> None:
    parts = list(slices(objects))
    assert objects <= len(parts) * SLICE_OBJECTS
    assert len(parts) <= max(1, 2 * objects // SLICE_OBJECTS + 1)
    bucket = bucket_of({b"%d" % i: i + 1 for i in range(50)})
    if len(parts) < 9:
        seen = [h for p in parts for h in take_note(bucket, 1, p, ()).stamps or ()]
        assert sorted(seen) == sorted(map(key_hash, bucket.objects))


@given(st.integers(0, 16), st.data())
def test_a_slice_survives_the_way(bits: int, data: st.DataObject) -> None:
    part = Slice(bits, data.draw(st.integers(0, (1 << bits) - 1)))
    assert Slice.decode(part.encode()) == part


@given(st.binary(max_size=5))
def test_of_anything_else_the_whole_bucket_is_noted(data: bytes) -> None:
    part = Slice.decode(data)
    assert part is None or part.encode() == data


@given(STAMPS)
def test_stamps_survive_the_way(stamps: dict[int, int]) -> None:
    assert unpack(pack(stamps)) == stamps


@pytest.mark.parametrize("data", [b"x", b"12345678", b"x" * 17])
def test_what_is_no_pairs_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"pairs|length"):
        unpack(data)


def test_a_node_keeps_the_last_note_of_each_bucket_and_not_too_many() -> None:
    notes = Notes()
    for bucket in range(NOTES_MAX + 3):
        notes.add(bucket, Note(bucket, 0, 0, None))
    assert len(notes) == NOTES_MAX
    assert notes.at(2, 2) is None
    notes.add(5, Note(99, 0, 0, None))
    assert notes.at(5, 5) is None
    assert notes.at(5, 99) is notes.last(5) is not None


# -- differences


@given(STAMPS, STAMPS, st.sets(NUMBERS))
def test_a_difference_is_what_it_takes_to_make_the_copy_the_same(
    ours: dict[int, int], theirs: dict[int, int], more: set[int]
) -> None:
    theirs |= {h: ours[h] for h in more & ours.keys()}
    found = difference(Note(1, len(ours), 0, ours), theirs)
    mended = {h: s for h, s in theirs.items() if h not in found.extra}
    mended |= {h: ours[h] for h in (*found.missing, *found.stale)}
    assert mended == ours
    assert all(theirs[h] != ours[h] for h in found.stale)


def test_of_what_the_primary_is_ahead_of_its_log_nothing_is_concluded() -> None:
    bucket = bucket_of({b"new": 1, b"newer": 2})
    copy = {key_hash(b"gone"): 3, key_hash(b"newer"): 1}
    note = take_note(bucket, 9, Slice(0, 0), [b"new", b"newer", b"gone"])
    assert difference(note, copy) == Difference([], [], [])


# -- books


def test_missing_copies_are_counted_by_bucket_and_member() -> None:
    missing = MissingCopies()
    missing.add(1, B, 2)
    missing.add(1, B, 3)
    missing.add(2, C, 1)
    assert (missing.total, set(missing.members(1)), missing.buckets(C)) == (6, {B}, [2])
    missing.set(1, {B: 1, C: 0})
    assert (missing.total, set(missing.members(1))) == (2, {B})
    missing.set(1, {})
    assert missing.total == 1
    missing.retain({2: (B,)})
    assert (missing.total, list(missing.members(2))) == (0, [])


def test_all_buckets_have_their_turn_and_those_in_doubt_come_between() -> None:
    turns, buckets = Turns(doubts_between=1), {3: (A,), 5: (A,), 9: (A,)}
    first = [turns.next(buckets) for _ in range(6)]  # a bucket that is new is in doubt
    assert sorted(b for b in first[0::2] if b is not None) == [3, 5, 9]
    assert first[1::2] == [3, 5, 9]
    turns.doubt(9)
    assert [turns.next(buckets) for _ in range(4)] == [9, 3, None, 5]


def test_a_member_that_came_back_is_a_doubt() -> None:
    turns = Turns(doubts_between=9)
    while turns.next({1: (B,), 2: (B,)}) is not None:
        pass
    assert turns.next({1: (B,), 2: (C,)}) == 2
    assert turns.next({1: (B,), 2: (C,)}) is None


def test_a_bucket_that_is_no_longer_ours_has_no_turn() -> None:
    turns = Turns(doubts_between=1)
    turns.doubt(7)
    assert [turns.next({}), turns.next({})] == [None, None]
