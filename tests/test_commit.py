"""The commit of a batch in C is the one that Python makes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from xxhash import xxh3_64_intdigest

from p2pkv import _native
from p2pkv._native.index import Writer, bytes_for
from p2pkv.arena import Arena
from p2pkv.digests import mark
from p2pkv.objects import Object, State, extents_bytes, read_header
from p2pkv.store import Store
from p2pkv.store_audit import audit
from p2pkv.wire import PutOptions, Status

pytestmark = pytest.mark.skipif(not _native.available, reason="the native extension is not built")

MIB = 1 << 20
BUCKETS = 4
PLAIN = PutOptions()


@contextmanager
def a_store(slots: int = 512) -> Iterator[Store]:
    with Arena.create(MIB, "commit", index_bytes=bytes_for(slots, BUCKETS)) as arena:
        memory = arena.map_index()
        assert memory is not None
        writer = Writer(memory, BUCKETS)
        made = Store(arena, metadata_limit_bytes=16 * MIB, published=writer)
        for bucket in range(BUCKETS):
            made.open_bucket(bucket)
        yield made
        audit(made)
        writer.close()


def put(to: Store, buckets: list[int], keys: list[bytes], options: PutOptions = PLAIN) -> None:
    sizes = [len(key) % 7 * 100 for key in keys]
    made = to.allocate_batch(buckets, keys, sizes, options, 1)
    assert to.commit_batch([item for item in made if isinstance(item, Object)], 1)


def show(to: Store, buckets: list[int], keys: list[bytes]) -> bool:
    """A put of values that lie in a room; whether all went the usual way."""
    sizes = [len(key) % 5 * 70 for key in keys]
    room = to.open_room(sum(extents_bytes(sizes)), 1)
    assert room is not None
    places = to.carve(room, sizes)
    shown = to.show_batch(buckets, keys, sizes, places, [n + 1 for n in range(len(keys))], 1)
    if not shown:
        to.extents.give_up(places)
    to.close_room(room)
    return shown


def fill(to: Store, buckets: list[int], keys: list[bytes]) -> None:
    """``show``; key by key in steps where one does not go the usual way, as long keys do not."""
    sizes = [len(key) % 5 * 70 for key in keys]
    room = to.open_room(sum(extents_bytes(sizes)), 1)
    assert room is not None
    places = to.carve(room, sizes)
    if not to.show_batch(buckets, keys, sizes, places, (), 1):
        made = to.allocate_batch(buckets, keys, sizes, PLAIN, 1, places=places)
        to.commit_batch([item for item in made if isinstance(item, Object)], 1)
    to.close_room(room)


def test_values_in_a_room_are_shown_with_their_checksums() -> None:
    with a_store() as kept:
        assert show(kept, [0, 1], [b"a", b"b"])
        assert [kept.buckets[n].objects[k].checksum for n, k in ((0, b"a"), (1, b"b"))] == [1, 2]


def test_what_does_not_go_the_usual_way_is_not_shown_and_changes_nothing() -> None:
    with a_store() as kept:
        put(kept, [0], [b"once"], PutOptions(write_once=True))
        before = _described(kept)
        for keys in ([b"new", b"once"], [b"twice", b"twice"], [b"k" * 1025, b"l"]):
            assert not show(kept, [0, 0], keys)
        kept.drop_bucket(3)
        assert not show(kept, [0, 3], [b"new", b"in no bucket"])
        kept.open_bucket(3)
        assert _described(kept) == before


def test_keys_of_every_length_have_the_hashes_of_xxhash_in_header_and_digest() -> None:
    keys = [bytes(i % 251 for i in range(length)) for length in range(1, 260)]
    with a_store() as kept:
        for key in keys:  # each alone, as a long one is not committed in C
            put(kept, [0], [key])
        for key, item in kept.buckets[0].objects.items():
            header = read_header(kept.arena.view, item.offset)
            assert header is not None
            assert header.key_hash == xxh3_64_intdigest(key)
        stamps = [(item.key, item.stamp) for item in kept.buckets[0].objects.values()]
        assert kept.buckets[0].digest == sum(mark(key, stamp) for key, stamp in stamps)


def test_a_digest_counts_the_whole_stamp() -> None:
    with a_store() as kept:
        made = kept.allocate_batch([1, 1], [b"k" * 5, b"k" * 200], [1, 1], PLAIN, 1)
        for item, stamp in zip(made, (1 << 63, 0x0123456789ABCDEF), strict=True):
            assert isinstance(item, Object)
            item.stamp = stamp
        kept.commit_batch(made, 1)  # type: ignore[arg-type]
        expected = mark(b"k" * 5, 1 << 63) + mark(b"k" * 200, 0x0123456789ABCDEF)
        assert kept.buckets[1].digest == expected


@pytest.mark.parametrize("seed", range(20))
def test_batches_leave_the_same_store_behind_as_python_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_store(64) as native, a_store(64) as plain:
        for kept in (native, plain):
            monkeypatch.setattr(_native, "available", kept is native)
            chance = random.Random(seed)
            for _ in range(30):
                _random_step(kept, chance)
        assert _described(native) == _described(plain), f"seed {seed}"
        assert native.published
        assert plain.published
        assert native.published.figures() == plain.published.figures(), f"seed {seed}"


def _random_step(kept: Store, chance: random.Random) -> None:
    count = chance.randint(1, 8)
    keys = [chance.choice((b"a", b"b", b"c" * 130)) * chance.randint(1, 2) for _ in range(count)]
    buckets = [chance.randrange(BUCKETS) for _ in keys]
    options = [PLAIN, PLAIN, PLAIN, PutOptions(ttl_ms=5), PutOptions(soft_pin=True)]
    if chance.random() < 0.1:
        bucket = kept.buckets[chance.randrange(BUCKETS)]
        bucket.dirty = {} if bucket.dirty is None else None
    if chance.random() < 0.4:
        fill(kept, buckets, keys)
    else:
        put(kept, buckets, keys, chance.choice(options))


def _described(kept: Store) -> object:
    buckets = {
        number: (
            [(key, o.offset, o.version, o.stamp, o.slot) for key, o in bucket.objects.items()],
            bucket.value_bytes,
            bucket.digest,
            bucket.dirty,
        )
        for number, bucket in kept.buckets.items()
    }
    order = [item.key for item in kept.policy.victims()]
    return buckets, order, kept.stats()


def test_an_object_that_was_not_allocated_is_a_conflict_and_the_rest_is_stored() -> None:
    with a_store() as kept:
        first, second = kept.allocate_batch([0, 0], [b"a", b"b"], [1, 1], PLAIN, 1)
        assert isinstance(first, Object)
        assert isinstance(second, Object)
        kept.abort_batch([first])
        assert kept.commit_batch([first, second], 1) == [Status.CONFLICT, Status.OK]
        assert second.state is State.COMMITTED


def test_a_bucket_that_is_closed_leaves_its_objects_uncommitted() -> None:
    with a_store() as kept:
        (item,) = kept.allocate_batch([2], [b"a"], [1], PLAIN, 1)
        assert isinstance(item, Object)
        kept.drop_bucket(2)
        assert kept.commit_batch([item], 1) == [Status.CONFLICT]
        kept.open_bucket(2)
