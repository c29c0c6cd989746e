from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodeside import KIB, MIB, PLAIN, flat, make_store

from p2pkv import payload, wire
from p2pkv.arena import Arena
from p2pkv.buffers import Run
from p2pkv.objects import Object
from p2pkv.payload import FRAMES, STREAM, Packing, Payload
from p2pkv.store import Store
from p2pkv.wire import Status

SMALL = Packing(gap_max=128, join_max=1 * KIB, run_max=8 * KIB)
"""FRAMES in small."""


@pytest.fixture
def store() -> Iterator[Store]:
    arena = Arena.create(4 * MIB, "payload")
    store = make_store(arena, [0])
    yield store
    store.reap(1)
    store.validate()
    assert all(o.readers == 0 for o in store.buckets[0].objects.values())
    arena.close()


def put(store: Store, values: list[bytes]) -> list[Object]:
    """Values that lie one after the other."""
    keys = [b"%d" % i for i in range(len(values))]
    assert set(store.put_batch([0] * len(keys), keys, values, PLAIN, 1)) <= {Status.OK}
    return [store.buckets[0].objects[key] for key in keys]


def values_of(collected: Payload, items: list[Object], frames: list[bytes]) -> list[bytes]:
    starts = [] if collected.packed else collected.starts
    return [bytes(v) for v in wire.placed(frames, [item.size for item in items], starts)]


def test_neighbours_leave_in_one_frame_that_is_not_copied(store: Store) -> None:
    values = [bytes([i]) * 40_000 for i in range(20)]
    items = put(store, values)
    collected = Payload(store, FRAMES, MIB)
    collected.add_all(items)
    (run,) = collected.finish()
    assert isinstance(run, Run)
    assert [item.readers for item in items] == [1] * 20
    assert values_of(collected, items, flat([run])) == values


def test_scattered_small_values_are_joined_in_one_frame(store: Store) -> None:
    items = put(store, [bytes([i]) * 100 for i in range(20)])[::2]
    collected = Payload(store, FRAMES, MIB)
    collected.add_all(items)
    (frame,) = collected.finish()
    assert isinstance(frame, bytes)
    assert len(frame) == 1000
    assert [item.readers for item in items] == [0] * 10
    assert values_of(collected, items, [frame]) == [bytes([i]) * 100 for i in range(0, 20, 2)]


def test_large_and_small_values_keep_their_order(store: Store) -> None:
    values = [b"a" * 10, b"b" * 300_000, b"c" * 10, b"d" * 300_000]
    items = put(store, values)
    order = [items[0], items[3], items[2], items[1]]
    collected = Payload(store, FRAMES, MIB)
    collected.add_all(order)
    frames = collected.finish()
    assert [type(f) for f in frames] == [bytes, Run, bytes, Run]
    expected = [values[0], values[3], values[2], values[1]]
    assert values_of(collected, order, flat(frames)) == expected


@pytest.mark.parametrize("size", [100, 600, 5_000])
def test_no_frame_is_larger_than_the_receiver_admits(store: Store, size: int) -> None:
    items = put(store, [bytes(size) for _ in range(150)])
    for chosen in (items, items[::2], items[::-1]):
        collected = Payload(store, FRAMES, 8 * KIB)
        collected.add_all(chosen)
        frames = flat(collected.finish())
        assert max(map(len, frames)) <= 8 * KIB
        assert values_of(collected, chosen, frames) == [bytes(size)] * len(chosen)
    store.reap(1)


def test_a_value_larger_than_a_frame_should_be_has_one_of_its_own(store: Store) -> None:
    items = put(store, [b"a" * 100, b"b" * 20_000, b"c" * 100])
    collected = Payload(store, SMALL, MIB)
    collected.add_all(items)
    frames = flat(collected.finish())
    assert [len(f) for f in frames] == [100, 20_000, 100]


def test_a_stream_gets_values_back_to_back_without_positions(store: Store) -> None:
    values = [b"a" * 100, b"", b"b" * 300_000, b"c" * 3_000]
    items = put(store, values)
    collected = Payload(store, STREAM, MIB)
    assert collected.packed
    collected.add_all(items)
    assert b"".join(flat(collected.finish())) == b"".join(values)


def test_values_without_bytes_need_no_frame(store: Store) -> None:
    items = put(store, [b"", b"between" * 100, b""])[::2]
    collected = Payload(store, FRAMES, MIB)
    collected.add_all(items)
    collected.add_all([])
    collected.add_part(items[0], 0, 0)
    assert collected.finish() == []
    assert values_of(collected, [*items, items[0]], []) == [b"", b"", b""]


def test_the_same_value_twice_is_sent_twice(store: Store) -> None:
    (item,) = put(store, [b"v" * 5_000])
    collected = Payload(store, SMALL, MIB)
    collected.add_all([item, item])
    assert item.readers == 2
    assert values_of(collected, [item, item], flat(collected.finish())) == [b"v" * 5_000] * 2


def test_parts_of_values_follow_each_other(store: Store) -> None:
    (item,) = put(store, [bytes(range(256)) * 40])
    collected = Payload(store, SMALL, MIB)
    for start, length in ((0, 10), (100, 5_000), (9_000, 3)):
        collected.add_part(item, start, length)
    frames = flat(collected.finish())
    value = bytes(range(256)) * 40
    assert b"".join(frames) == value[:10] + value[100:5_100] + value[9_000:9_003]
    assert collected.starts == [0, 10, 5_010]


def test_bytes_stay_until_the_frame_is_done_and_their_room_comes_back_once(store: Store) -> None:
    items = put(store, [bytes([i]) * 1_900 for i in range(4)])
    used = store.stats().used_bytes
    collected = Payload(store, SMALL, MIB)
    collected.add_all(items)
    (run,) = collected.finish()
    assert isinstance(run, Run)
    store.delete_batch([0] * 4, [item.key for item in items], 1)
    assert (store.stats().retiring, store.stats().used_bytes) == (4, used)
    assert bytes(run.view[:1_900]) == bytes(1_900)
    run.done()
    assert store.reap(1) == 4
    assert (store.stats().retiring, store.stats().used_bytes) == (0, 0)


Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "get"]),
        st.integers(0, 15),
        st.sampled_from([0, 1, 63, 64, 65, 500, 1023, 1024, 3_000, 9_000, 40_000]),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=steps,
    order=st.lists(st.integers(0, 15), min_size=1, max_size=30),
    packing=st.sampled_from([SMALL, FRAMES, STREAM]),
)
def test_positions_are_right_for_any_layout(
    steps: list[Step], order: list[int], packing: payload.Packing
) -> None:
    with Arena.create(1 * MIB, "layout") as arena:
        store = make_store(arena, [0])
        model: dict[bytes, bytes] = {}
        on_the_way: list[tuple[list[Run | wire.Buffer], Payload, list[Object], list[bytes]]] = []
        for number, (what, which, size) in enumerate(steps):
            key = b"%d" % which
            if what == "put":
                value = bytes([number % 251 + 1]) * size
                assert store.put_batch([0], [key], [value], PLAIN, 1) == [Status.OK]
                model[key] = value
            elif what == "delete":
                store.delete_batch([0], [key], 1)
                model.pop(key, None)
            else:
                wanted = [k for k in (b"%d" % i for i in order) if k in model]
                items = [store.buckets[0].objects[k] for k in wanted]
                collected = Payload(store, packing, 64 * KIB)
                collected.add_all(items)
                expected = [model[k] for k in wanted]
                on_the_way.append((list(collected.finish()), collected, items, expected))
            if len(on_the_way) > 2:
                arrive(store, on_the_way.pop(0))
        while on_the_way:
            arrive(store, on_the_way.pop(0))
        assert all(o.readers == 0 for o in store.buckets[0].objects.values())
        assert store.stats().retiring == 0


def arrive(
    store: Store, sent: tuple[list[Run | wire.Buffer], Payload, list[Object], list[bytes]]
) -> None:
    """What was sent some steps ago is received only now: it must be what it was then."""
    frames, collected, items, expected = sent
    store.validate()
    received = flat(frames)
    assert all(len(f) <= 64 * KIB for f in received)
    assert values_of(collected, items, received) == expected
    store.reap(1)
    store.validate()
