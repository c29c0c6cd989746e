from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodeside import MIB, MS, PLAIN, B, S, make_store

from p2pkv.arena import Arena
from p2pkv.objects import Object
from p2pkv.sessions import Allocation, Pins, Session, Sessions
from p2pkv.store import Store
from p2pkv.wire import Kind, Status


@pytest.fixture
def store() -> Iterator[Store]:
    arena = Arena.create(MIB, "sessions")
    store = make_store(arena, [0])
    yield store
    store.validate()
    arena.close()


@pytest.fixture
def sessions(store: Store) -> Sessions:
    return Sessions(
        store, ttl_ns=30 * S, alloc_ns=10 * S, read_ns=10 * S, sessions_max=2, answers_max=3
    )


def begun(sessions: Sessions, id: bytes, now: int = 1) -> Session:
    session = sessions.begin(id, None, now)
    assert session is not None
    return session


def put(store: Store, key: bytes, value: bytes = b"v") -> Object:
    assert store.put_batch([0], [key], [value], PLAIN, 1) == [Status.OK]
    item = store.find(0, key, 1)
    assert item is not None
    return item


def allocation(store: Store, key: bytes, size: int = 10) -> Object:
    (item,) = store.allocate_batch([0], [key], [size], PLAIN, 1)
    assert isinstance(item, Object)
    return item


def test_a_known_id_goes_on_with_its_session(sessions: Sessions) -> None:
    session = begun(sessions, b"one")
    assert sessions.begin(b"one", B, 5) is session
    assert (session.member, session.last_seen, len(sessions)) == (B, 5, 1)
    assert sessions.get(b"one") is session
    assert sessions.get(b"two") is None


def test_one_session_over_the_limit_is_refused_until_another_falls_silent(
    sessions: Sessions,
) -> None:
    begun(sessions, b"one", now=1)
    begun(sessions, b"two", now=20 * S)
    assert sessions.begin(b"three", None, 30 * S) is None
    assert sessions.begin(b"two", None, 31 * S) is not None
    third = sessions.begin(b"three", None, 31 * S)
    assert third is not None
    assert sorted(s.id for s in sessions) == [b"three", b"two"]
    assert sessions.reaped == 1


def test_a_silent_session_loses_what_it_holds(store: Store, sessions: Sessions) -> None:
    silent, other = begun(sessions, b"silent"), begun(sessions, b"other", now=20 * S)
    read = put(store, b"read")
    sessions.open(silent, [read], 1)
    sessions.open(other, [read], 25 * S)
    sessions.allocate(silent, [allocation(store, b"a")], 1)
    sessions.reap(30 * S + 2)
    assert (read.readers, store.stats().allocated) == (1, 0)
    assert [s.id for s in sessions] == [b"other"]
    assert not silent.tokens
    assert not silent.allocations


def test_ending_all_leaves_nothing(store: Store, sessions: Sessions) -> None:
    for name in (b"one", b"two"):
        session = begun(sessions, name)
        item = put(store, name)
        sessions.open(session, [item], 1)
        sessions.allocate(session, [allocation(store, b"a" + name)], 1)
        assert sessions.pins.pin(name, item, 99 * S) is Status.OK
    sessions.end_all()
    stats = store.stats()
    assert (len(sessions), len(sessions.pins)) == (0, 0)
    assert (stats.allocated, stats.hard_pinned) == (0, 0)
    assert all(o.readers == 0 for o in store.buckets[0].objects.values())


def test_ids_are_never_used_twice(store: Store, sessions: Sessions) -> None:
    session = begun(sessions, b"one")
    items = [put(store, b"%d" % i) for i in range(3)]
    first = sessions.open(session, items, 1)
    sessions.release(session, first)
    second = sessions.allocate(session, [allocation(store, b"a")], 1)
    assert len({*first, *second}) == 4
    sessions.end(session)


def test_the_session_of_a_client_is_told_by_its_first_bytes(sessions: Sessions) -> None:
    assert begun(sessions, b"123456789abcdefg").owner == b"123456789"


def test_answers_of_old_writes_go_and_the_highest_of_them_is_known() -> None:
    session = Session(b"s", None, 3, 1)
    answers = {i: (Kind.STATUSES, i, ()) for i in (4, 2, 7, 5, 9)}
    for request, answer in answers.items():
        session.remember(request, answer)
    assert dict(session.answers) == {i: answers[i] for i in (7, 5, 9)}
    assert session.forgotten == 4


@settings(max_examples=200)
@given(
    size=st.integers(0, 40),
    pieces=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 20)), max_size=12),
)
def test_an_allocation_is_complete_when_every_byte_was_written(
    size: int, pieces: list[tuple[int, int]]
) -> None:
    made = Allocation(Object(b"k", 0, 64, size, 128, PLAIN), 0)
    written: set[int] = set()
    for start, length in pieces:
        end = min(start + length, size)
        if start < end:
            made.wrote(start, end)
            written.update(range(start, end))
        assert made.complete == (len(written) == size)
        assert written == {i for a, b in made.pieces for i in range(a, b)}
        assert all(x[1] < y[0] for x, y in zip(made.pieces, made.pieces[1:], strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_pins_are_those_that_were_not_given_back_and_not_over(store: Store, seed: int) -> None:
    """Against a table of (client, key) -> time; objects come and go meanwhile."""
    random_ = random.Random(seed)
    print("seed", seed)
    pins = Pins(store)
    expected: dict[tuple[bytes, bytes], tuple[Object, int]] = {}
    now = 1
    keys = [b"%d" % i for i in range(4)]
    for key in keys:
        put(store, key)
    for _ in range(300):
        owner, key = random_.choice([b"x", b"y"]), random_.choice(keys)
        item = store.find(0, key, now)
        assert item is not None
        match random_.randrange(4):
            case 0:
                until = now + random_.randrange(1, 30) * MS
                assert pins.pin(owner, item, until) is Status.OK
                held = expected.get((owner, key))
                known = held[1] if held and held[0] is item else 0
                expected[owner, key] = (item, max(until, known))
            case 1:
                pins.unpin(owner, key)
                expected.pop((owner, key), None)
            case 2:
                now += random_.randrange(10) * MS
                pins.reap(now)
                expected = {p: (o, t) for p, (o, t) in expected.items() if t > now}
            case 3:
                put(store, key)
        live = {(p, o.version) for p, (o, _) in expected.items() if store.find(0, o.key, 1) is o}
        for name in keys:
            there = store.find(0, name, 1)
            assert there is not None
            holders = sum(1 for (_, k), v in live if k == name and v == there.version)
            assert there.pins == holders
        assert len(pins) == len(expected)
    pins.clear()
    assert (len(pins), store.hard_pinned) == (0, 0)
