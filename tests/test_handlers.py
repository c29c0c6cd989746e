from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nodeside import LIMITS, MIB, MS, PLAIN, Host, S, answered, flat

from p2pkv import ring, wire
from p2pkv.arena import Arena
from p2pkv.handlers import Handlers
from p2pkv.objects import Pin, read_header
from p2pkv.reading import LOCATE_MIN
from p2pkv.sessions import GAPS_MAX, TOKENS_MAX, Session, Shared
from p2pkv.wire import Checksums, Fault, Kind, PutOptions, Status

IF_ABSENT, ONCE = PutOptions(if_absent=True), PutOptions(write_once=True)
SOFT, HARD = PutOptions(soft_pin=True), PutOptions(hard_pin=True)
OK, MISS, CONFLICT = Status.OK, Status.MISS, Status.CONFLICT


@pytest.fixture
def host() -> Iterator[Host]:
    arena = Arena.create(8 * MIB, "handlers")
    host = Host(arena)
    yield host
    host.store.validate()
    for session in list(host.sessions):
        host.sessions.end(session)
    host.store.validate()
    assert host.store.stats().allocated == host.store.stats().retiring == 0
    arena.close()


def refused(host: Host, kind: Kind, body: Any, frames: Any = ()) -> str:
    """The message with which the whole request is refused; nothing may have changed."""
    before = host.store.stats()
    error = answered(host.ask(kind, body, frames), Kind.ERROR)
    assert error.fault == Fault.BAD_REQUEST
    assert host.store.stats() == before
    return str(error.message)


class Mixed:
    """One key in each of four buckets: served, moving, not ours, served."""

    def __init__(self, host: Host) -> None:
        self.keys = [host.keys_in(bucket, 1)[0] for bucket in range(4)]
        host.put(dict.fromkeys(self.keys, b"old"))
        host.replicas.served -= {1, 2}
        host.replicas.waiting.add(1)
        self.host = host

    def untouched(self) -> bool:
        """Whether the keys of the refused buckets are as they were."""
        self.host.replicas.served |= {1, 2}
        items = [self.host.store.find(b, self.keys[b], self.host.now) for b in (1, 2)]
        return self.host.get(*self.keys[1:3]) == [b"old", b"old"] and all(
            item is not None and item.pin is Pin.NONE and not item.expires_at and not item.pins
            for item in items
        )


@pytest.fixture
def mixed(host: Host) -> Mixed:
    return Mixed(host)


# -- who may be served


MIXED_STATUSES = [OK, Status.MOVING, Status.NOT_PRIMARY, OK]
KEYED: dict[Kind, Callable[[list[bytes]], Any]] = {
    Kind.PUT: lambda keys: wire.Put(keys, [3] * len(keys), PLAIN),
    Kind.EXISTS: wire.Exists,
    Kind.DELETE: wire.Delete,
    Kind.PIN: lambda keys: wire.Pin(keys, 1000),
    Kind.UNPIN: wire.Unpin,
    Kind.EXPIRE: lambda keys: wire.Expire(keys, 1000),
}


@pytest.mark.parametrize("kind", KEYED, ids=lambda kind: kind.name)
def test_each_key_gets_the_status_of_its_bucket_and_refused_ones_stay(
    mixed: Mixed, kind: Kind
) -> None:
    frames = [b"newNEWnewNEW"] if kind is Kind.PUT else []
    assert mixed.host.statuses(kind, KEYED[kind](mixed.keys), frames) == MIXED_STATUSES
    assert mixed.untouched()


@pytest.mark.parametrize("kind", KEYED, ids=lambda kind: kind.name)
def test_a_fenced_node_serves_no_key(mixed: Mixed, kind: Kind) -> None:
    host = mixed.host
    host.fenced = True
    frames = [b"newNEWnewNEW"] if kind is Kind.PUT else []
    stalled = Status.STALLED
    expected = [stalled, Status.MOVING, Status.NOT_PRIMARY, stalled]
    assert host.statuses(kind, KEYED[kind](mixed.keys), frames) == expected
    host.fenced = False
    assert mixed.untouched()
    assert host.get(mixed.keys[0], mixed.keys[3]) == [b"old", b"old"]


def test_a_put_takes_each_value_to_its_own_key_where_some_are_refused(mixed: Mixed) -> None:
    body = wire.Put(mixed.keys, [1, 2, 3, 4], PLAIN)
    assert mixed.host.statuses(Kind.PUT, body, [b"a", b"bb", b"ccc", b"dddd"]) == MIXED_STATUSES
    assert mixed.host.get(mixed.keys[0], mixed.keys[3]) == [b"a", b"dddd"]


@pytest.mark.parametrize("size", [1, LOCATE_MIN - 1, LOCATE_MIN])
def test_a_get_of_one_value_counts_as_its_use(host: Host, size: int) -> None:
    host.put({b"older": b"x" * size})
    host.put({b"newer": b"y" * size})
    assert next(iter(host.store.policy.victims())).key == b"older"
    assert host.get(b"older") == [b"x" * size]
    assert next(iter(host.store.policy.victims())).key == b"newer"
    assert host.store.stats().counters.hits == 1


def test_a_get_of_one_small_value_obeys_the_fence_and_the_bucket(host: Host) -> None:
    key = host.keys_in(1, 1)[0]
    host.put({key: b"v"})
    host.fenced = True
    assert answered(host.ask(Kind.GET, wire.Get([key])), Kind.VALUES).statuses == bytes(
        [Status.STALLED]
    )
    host.fenced = False
    host.replicas.served.discard(1)
    assert answered(host.ask(Kind.GET, wire.Get([key])), Kind.VALUES).statuses == bytes(
        [Status.NOT_PRIMARY]
    )
    host.replicas.served.add(1)
    assert host.get(key) == [b"v"]


def test_a_get_tells_the_refused_from_the_missing(mixed: Mixed) -> None:
    keys = [*mixed.keys, b"missing-key"]
    mixed.host.replicas.served.add(ring.bucket_of(b"missing-key", Host.BUCKETS))
    response = mixed.host.ask(Kind.GET, wire.Get(keys, tell_once=True))
    body = answered(response, Kind.VALUES)
    expected = [OK, *mixed.host.handlers.admission.admit(keys, 1)[1][1:4], MISS]
    assert list(body.statuses) == expected
    views = wire.placed(flat(response[2]), body.sizes, body.starts)
    assert bytes(views[0]) == b"old"
    assert [v.nbytes for v, s in zip(views, expected, strict=True) if s] == [0] * (
        len(expected) - expected.count(OK)
    )


def test_open_and_alloc_give_ids_only_for_what_is_served(mixed: Mixed) -> None:
    opened = answered(mixed.host.ask(Kind.OPEN, wire.Open(mixed.keys)), Kind.OPENED)
    assert list(opened.statuses) == MIXED_STATUSES
    assert [bool(t) for t in opened.tokens] == [True, False, False, True]
    assert opened.sizes == [3, 0, 0, 3]
    body = wire.Alloc(mixed.keys, [1, 2, 3, 4], PLAIN)
    made = answered(mixed.host.ask(Kind.ALLOC, body), Kind.ALLOCATED)
    assert list(made.statuses) == MIXED_STATUSES
    assert [bool(i) for i in made.ids] == [bool(o) for o in made.offsets]
    assert [bool(i) for i in made.ids] == [True, False, False, True]
    assert mixed.host.store.stats().allocated == 2
    assert mixed.untouched()


@pytest.mark.parametrize(
    ("served", "count", "status"),
    [
        ({0, 1, 2, 3}, 4, MISS),
        ({0, 1}, 2, Status.NOT_PRIMARY),
        ({1, 2, 3}, 0, Status.NOT_PRIMARY),
    ],
)
def test_a_match_ends_at_the_first_key_that_may_not_be_served(
    host: Host, served: set[int], count: int, status: Status
) -> None:
    keys = [host.keys_in(bucket, 1)[0] for bucket in range(4)]
    host.put(dict.fromkeys(keys, b""))
    host.replicas.served.intersection_update(served)
    matched = answered(host.ask(Kind.MATCH, wire.Match(keys)), Kind.MATCHED)
    assert (matched.count, matched.status) == (count, status)


def test_a_match_ends_at_the_first_missing_key(mixed: Mixed) -> None:
    host = mixed.host
    keys = [mixed.keys[0], b"nope", *mixed.keys]
    host.replicas.served.update(range(4))
    matched = answered(host.ask(Kind.MATCH, wire.Match(keys)), Kind.MATCHED)
    assert (matched.count, matched.status) == (1, MISS)
    host.replicas.served -= {1}
    host.fenced = True
    matched = answered(host.ask(Kind.MATCH, wire.Match(keys)), Kind.MATCHED)
    assert (matched.count, matched.status) == (0, Status.STALLED)


def test_a_missing_key_ends_a_match_before_one_that_is_refused(mixed: Mixed) -> None:
    keys = [mixed.keys[0], mixed.host.keys_in(0, 1, "absent")[0], mixed.keys[2]]
    matched = answered(mixed.host.ask(Kind.MATCH, wire.Match(keys)), Kind.MATCHED)
    assert (matched.count, matched.status) == (1, MISS)


# -- limits


KEYS_ONLY: dict[Kind, Callable[[list[bytes]], Any]] = {
    **KEYED,
    Kind.GET: wire.Get,
    Kind.MATCH: wire.Match,
    Kind.OPEN: wire.Open,
    Kind.ALLOC: lambda keys: wire.Alloc(keys, [3] * len(keys), PLAIN),
}


@pytest.mark.parametrize("kind", KEYS_ONLY, ids=lambda kind: kind.name)
def test_one_key_over_batch_keys_max_is_refused(host: Host, kind: Kind) -> None:
    keys = [b"%d" % i for i in range(LIMITS.batch_keys_max)]
    frames = [b"x" * 3 * len(keys)] if kind is Kind.PUT else []
    assert host.ask(kind, KEYS_ONLY[kind](keys), frames)[0] != Kind.ERROR
    keys.append(b"one more")
    frames = [b"x" * 3 * len(keys)] if kind is Kind.PUT else []
    message = refused(host, kind, KEYS_ONLY[kind](keys), frames)
    assert "65 keys, limit batch_keys_max = 64" in message


@pytest.mark.parametrize("kind", KEYS_ONLY, ids=lambda kind: kind.name)
def test_a_key_one_byte_over_key_bytes_max_is_refused(host: Host, kind: Kind) -> None:
    frames = [b"x" * 3] if kind is Kind.PUT else []
    assert host.ask(kind, KEYS_ONLY[kind]([b"k" * 64]), frames)[0] != Kind.ERROR
    message = refused(host, kind, KEYS_ONLY[kind]([b"k" * 65]), frames)
    assert "65 bytes, limit 64" in message


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.ALLOC], ids=lambda kind: kind.name)
def test_a_value_one_byte_over_value_bytes_max_is_refused(host: Host, kind: Kind) -> None:
    make = wire.Put if kind is Kind.PUT else wire.Alloc
    limit = LIMITS.value_bytes_max
    frames = [bytes(limit)] if kind is Kind.PUT else []
    assert host.ask(kind, make([b"k"], [limit], PLAIN), frames)[0] != Kind.ERROR
    frames = [bytes(limit + 1)] if kind is Kind.PUT else []
    message = refused(host, kind, make([b"k"], [limit + 1], PLAIN), frames)
    assert f"limit value_bytes_max = {limit}" in message


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.ALLOC], ids=lambda kind: kind.name)
def test_sizes_must_be_as_many_as_keys(host: Host, kind: Kind) -> None:
    make = wire.Put if kind is Kind.PUT else wire.Alloc
    assert "for 2 keys" in refused(host, kind, make([b"a", b"b"], [1], PLAIN), [b"x"])


@pytest.mark.parametrize("payload", [[], [b"abc"], [b"abcde"], [b"ab", b"c"], [b"abcd", b"e"]])
def test_a_put_whose_payload_is_not_what_it_announces_is_refused(
    host: Host, payload: list[bytes]
) -> None:
    refused(host, Kind.PUT, wire.Put([b"a", b"b"], [1, 3], PLAIN), payload)


@pytest.mark.parametrize("payload", [[b"ab", b"cd"], [b"a", b"b", b"", b"cd"], [b"abcd", b""]])
def test_a_value_of_a_put_may_span_frames(host: Host, payload: list[bytes]) -> None:
    assert host.statuses(Kind.PUT, wire.Put([b"a", b"b"], [1, 3], PLAIN), payload) == []
    assert host.get(b"a", b"b") == [b"a", b"bcd"]


def ranged(
    host: Host, keys: list[bytes], starts: list[int], lengths: list[int], locate: bool = False
) -> Any:
    response = host.ask(Kind.GET, wire.Get(keys, False, locate, starts, lengths))
    body = answered(response, Kind.VALUES)
    inline = [
        0 if at else n for n, at in zip(body.sizes, body.offsets or [0] * len(keys), strict=True)
    ]
    return body, [bytes(v) for v in wire.packed(flat(response[2]), inline)]


def test_a_range_is_answered_with_the_size_of_the_whole_value(host: Host) -> None:
    host.put({b"a": b"0123456789", b"b": b"xyz"})
    body, values = ranged(
        host, [b"a", b"b", b"none", b"a", b"b"], [3, 1, 0, 8, 3], [4, -1, 1, 3, 0]
    )
    assert values == [b"3456", b"yz", b"", b"", b""]
    assert list(body.statuses) == [0, 0, Status.MISS, Status.RANGE, 0]
    assert body.totals == [10, 3, 0, 10, 3]


def test_a_large_range_is_located_and_a_small_one_of_a_large_value_sent(host: Host) -> None:
    value = bytes(range(256)) * 400
    host.put({b"a": value})
    body, values = ranged(host, [b"a", b"a", b"a"], [100, 5, 200], [50_000, 3, -1], locate=True)
    assert values == [b"", value[5:8], b""]
    assert body.sizes == [50_000, 3, len(value) - 200]
    place = body.offsets[0]
    assert body.offsets == [place, 0, place]  # of the value, as the header stands before it
    assert host.store.arena.view[place + 100 : place + 50_100] == value[100:50_100]


def test_ranges_of_large_values_go_by_the_size_of_the_range(host: Host) -> None:
    bound = LIMITS.message_bytes_max
    host.put({b"a": bytes(bound)})
    ids = host.ask(Kind.ALLOC, wire.Alloc([b"big"], [2 * bound], PLAIN))[1].ids
    for at in (0, bound):
        assert host.statuses(Kind.WRITE, wire.Write(ids[0], at), [bytes(bound)]) == []
    assert host.statuses(Kind.COMMIT, wire.Commit(ids)) == []
    body, _ = ranged(
        host, [b"big", b"a", b"big", b"big"], [1, 0, 9, 9], [bound, bound - 10, 10, -1]
    )
    assert list(body.statuses) == [0, Status.DEFERRED, Status.DEFERRED, Status.LARGE]


@pytest.mark.parametrize(("starts", "lengths"), [([1], [1]), ([1, 2], []), ([], [1, 2])])
def test_ranges_must_be_as_many_as_keys(host: Host, starts: list[int], lengths: list[int]) -> None:
    body = wire.Get([b"a", b"b"], False, False, starts, lengths)
    assert "for 2 keys" in refused(host, Kind.GET, body)


def test_an_empty_batch_is_answered(host: Host) -> None:
    for kind, make in KEYS_ONLY.items():
        assert host.ask(kind, make([]))[0] != Kind.ERROR


@pytest.mark.parametrize("kind", [Kind.VALUES, Kind.ERROR, Kind.HELLO, Kind.SNAPSHOT])
def test_what_is_no_request_is_refused(host: Host, kind: Kind) -> None:
    error = answered(host.ask(kind, wire.Empty()), Kind.ERROR)
    assert error.fault == Fault.BAD_REQUEST
    assert f"{kind.name} is not a request" in error.message
    assert host.handlers.admission.refused == 1


def test_a_long_refusal_is_cut_to_what_a_message_may_hold(host: Host) -> None:
    _, body, _ = host.handlers.refuse(Fault.INTERNAL, "x" * 5000)
    assert len(body.message) == 1024


def test_extra_kinds_and_pings_are_answered_and_requests_counted(host: Host) -> None:
    assert answered(host.ask(Kind.STATS, wire.Empty()), Kind.NODE_STATS).figures == {"x": 1.0}
    answered(host.ask(Kind.PING, wire.Empty()), Kind.PONG)
    answered(host.ask(Kind.PING, wire.Empty()), Kind.PONG)
    assert (host.handlers.requests[Kind.STATS], host.handlers.requests[Kind.PING]) == (1, 2)


def test_every_request_keeps_its_session_alive(host: Host) -> None:
    host.now = 25 * S
    host.ask(Kind.PING, wire.Empty())
    host.sessions.reap(50 * S)
    assert host.sessions.get(host.session.id) is host.session


# -- reading


def test_get_tells_what_is_write_once_only_when_asked(host: Host) -> None:
    host.put({b"once": b"1"}, ONCE)
    host.put({b"many": b"2"})
    keys = [b"many", b"once", b"none"]
    assert answered(host.ask(Kind.GET, wire.Get(keys)), Kind.VALUES).once == b""
    assert answered(host.ask(Kind.GET, wire.Get(keys, True)), Kind.VALUES).once == b"\0\1\0"
    assert answered(host.ask(Kind.GET, wire.Get(keys[:2], True)), Kind.VALUES).once == b"\0\1"


def test_a_get_defers_what_goes_over_a_message_and_points_at_what_never_fits(host: Host) -> None:
    limit = LIMITS.message_bytes_max
    sizes = {b"half": limit // 2, b"big": limit + 1, b"rest": limit // 2, b"more": 1, b"nil": 0}
    for key, size in sizes.items():
        host.put({key: bytes([len(key)]) * size})
    response = host.ask(Kind.GET, wire.Get(list(sizes)))
    body = answered(response, Kind.VALUES)
    assert list(body.statuses) == [OK, Status.LARGE, OK, Status.DEFERRED, OK]
    views = wire.placed(flat(response[2]), body.sizes, body.starts)
    assert bytes(views[0]) == b"\4" * (limit // 2) == bytes(views[2])
    assert [len(v) for v in views] == [limit // 2, 0, limit // 2, 0, 0]


def test_a_message_that_is_full_to_the_byte_defers_nothing(host: Host) -> None:
    limit = LIMITS.message_bytes_max
    host.put({b"a": b"a" * (limit - 1), b"b": b"b"})
    assert host.get(b"a", b"b") == [b"a" * (limit - 1), b"b"]
    host.put({b"b": b"bb"})
    body = answered(host.ask(Kind.GET, wire.Get([b"a", b"b"])), Kind.VALUES)
    assert list(body.statuses) == [OK, Status.DEFERRED]


def test_exists_touches_only_when_asked(host: Host) -> None:
    host.put({b"old": b"1"})
    host.put({b"new": b"2"})
    first = lambda: next(iter(host.store.policy.victims())).key  # noqa: E731
    assert host.statuses(Kind.EXISTS, wire.Exists([b"old", b"no"])) == [OK, MISS]
    assert first() == b"old"
    assert host.statuses(Kind.EXISTS, wire.Exists([b"old", b"no"], touch=True)) == [OK, MISS]
    assert first() == b"new"


def test_puts_report_each_key(host: Host) -> None:
    host.put({b"there": b"1"})
    body = wire.Put([b"there", b"new"], [1, 1], IF_ABSENT)
    assert host.statuses(Kind.PUT, body, [b"ab"]) == [Status.EXISTS, OK]
    assert host.get(b"there", b"new") == [b"1", b"b"]


def test_delete_reports_each_key(host: Host) -> None:
    host.put({b"there": b"1"})
    assert host.statuses(Kind.DELETE, wire.Delete([b"there", b"not"])) == [OK, MISS]


# -- open, read, release


def opened(host: Host, *keys: bytes, session: Session | None = None) -> list[int]:
    body = answered(host.ask(Kind.OPEN, wire.Open(list(keys)), session=session), Kind.OPENED)
    assert body.statuses == b""
    return list(body.tokens)


def read(
    host: Host, token: int, offset: int, length: int, session: Session | None = None
) -> bytes | Status:
    response = host.ask(Kind.READ, wire.Read(token, offset, length), session=session)
    body = answered(response, Kind.VALUES)
    if body.statuses:
        assert response[2] == ()
        return Status(body.statuses[0])
    (view,) = wire.placed(flat(response[2]), body.sizes, body.starts)
    host.store.reap(host.now)
    return bytes(view)


LARGE = bytes(range(256)) * 8192  # 2 MiB


@pytest.mark.parametrize("length", [1, 1000, 300_000, LIMITS.message_bytes_max])
@pytest.mark.parametrize("fate", ["stays", "deleted", "overwritten", "expired", "dropped"])
def test_an_open_value_is_read_unchanged_whatever_becomes_of_its_key(
    host: Host, length: int, fate: str
) -> None:
    host.put({b"k": LARGE})
    (token,) = opened(host, b"k")
    if fate == "deleted":
        host.statuses(Kind.DELETE, wire.Delete([b"k"]))
    elif fate == "overwritten":
        host.put({b"k": b"other"})
    elif fate == "expired":
        host.statuses(Kind.EXPIRE, wire.Expire([b"k"], 1))
        host.now += 2 * MS
        host.store.reap(host.now)
    elif fate == "dropped":
        host.store.drop_bucket(ring.bucket_of(b"k", Host.BUCKETS))
    for key in range(3):
        host.statuses(Kind.PUT, wire.Put([b"%d" % key], [LIMITS.value_bytes_max // 2], PLAIN),
                      [b"\xff" * (LIMITS.value_bytes_max // 2)])  # fmt: skip
    for offset in (0, 12345, len(LARGE) - length):
        assert read(host, token, offset, length) == LARGE[offset : offset + length]
    assert host.statuses(Kind.RELEASE, wire.Release([token])) == []
    assert host.store.stats().retiring == 0


def test_reading_on_while_a_frame_is_on_its_way_keeps_the_bytes_until_the_last_is_gone(
    host: Host,
) -> None:
    host.put({b"k": LARGE})
    (token,) = opened(host, b"k")
    host.statuses(Kind.DELETE, wire.Delete([b"k"]))
    on_the_way = host.ask(Kind.READ, wire.Read(token, 0, MIB))[2]
    host.statuses(Kind.RELEASE, wire.Release([token]))
    assert host.store.stats().retiring == 1
    assert flat(on_the_way) == [LARGE[:MIB]]
    host.store.reap(host.now)
    assert host.store.stats().retiring == 0


@pytest.mark.parametrize(
    ("offset", "length", "message"),
    [(0, 4, "behind the end"), (3, 1, "behind the end"), (0, MIB + 1, "message_bytes_max")],
)
def test_reads_outside_of_the_value_or_over_a_message_are_refused(
    host: Host, offset: int, length: int, message: str
) -> None:
    host.put({b"k": b"abc"})
    (token,) = opened(host, b"k")
    assert message in refused(host, Kind.READ, wire.Read(token, offset, length))
    assert read(host, token, 3, 0) == b""
    assert read(host, token, 0, 3) == b"abc"


def test_another_sessions_token_is_a_conflict(host: Host) -> None:
    host.put({b"k": b"abc"})
    (token,) = opened(host, b"k")
    stranger = host.open_session(b"x", b"1")
    assert read(host, token, 0, 1, stranger) is CONFLICT
    assert host.statuses(Kind.RELEASE, wire.Release([token]), session=stranger) == [CONFLICT]
    assert host.statuses(Kind.RELEASE, wire.Release([token + 7, token])) == [CONFLICT, OK]
    assert read(host, token, 0, 1) is CONFLICT
    assert host.statuses(Kind.RELEASE, wire.Release([token])) == [CONFLICT]


def test_open_reports_misses_and_its_limit(host: Host) -> None:
    host.put({b"k": b"abc"})
    body = answered(host.ask(Kind.OPEN, wire.Open([b"k", b"no"])), Kind.OPENED)
    assert (list(body.statuses), body.sizes, bool(body.tokens[1])) == ([OK, MISS], [3, 0], False)
    for _ in range(TOKENS_MAX // 64 - 1):
        opened(host, *[b"k"] * 64)
    opened(host, *[b"k"] * 63)
    assert len(host.session.tokens) == TOKENS_MAX
    assert f"{TOKENS_MAX} open objects" in refused(host, Kind.OPEN, wire.Open([b"k"]))


def test_a_token_that_is_not_used_is_taken_back_and_use_prolongs_it(host: Host) -> None:
    host.put({b"k": b"abc", b"l": b"def"})
    used, idle = opened(host, b"k", b"l")
    host.now += 6 * S
    assert read(host, used, 0, 3) == b"abc"
    host.now += 5 * S
    host.sessions.reap(host.now)
    assert read(host, used, 0, 3) == b"abc"
    assert read(host, idle, 0, 3) is CONFLICT


# -- alloc, write, commit, abort


def allocated(host: Host, key: bytes, size: int, options: PutOptions = PLAIN) -> int:
    made = answered(host.ask(Kind.ALLOC, wire.Alloc([key], [size], options)), Kind.ALLOCATED)
    assert made.statuses == b""
    return int(made.ids[0])


def write(host: Host, id: int, offset: int, *frames: bytes) -> list[Status]:
    return host.statuses(Kind.WRITE, wire.Write(id, offset), frames)


def commit(host: Host, *ids: int) -> list[Status]:
    return host.statuses(Kind.COMMIT, wire.Commit(list(ids)))


def test_a_value_is_written_in_pieces_in_any_order_and_shows_at_the_commit(host: Host) -> None:
    host.put({b"k": b"before"})
    id = allocated(host, b"k", 10)
    assert write(host, id, 4, b"45", b"6789") == []
    assert write(host, id, 0, b"0123") == []
    assert host.get(b"k") == [b"before"]
    assert commit(host, id) == []
    assert host.get(b"k") == [b"0123456789"]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(0, 9)],
        [(1, 9)],
        [(0, 5), (0, 5)],
        [(0, 4), (5, 5)],
        [(0, 3), (0, 7), (2, 6)],
        [(0, 0), (9, 1)],
    ],
    ids=str,
)
def test_a_value_with_bytes_missing_cannot_be_committed(
    host: Host, pieces: list[tuple[int, int]]
) -> None:
    host.put({b"k": b"before"})
    id = allocated(host, b"k", 10)
    for start, length in pieces:
        assert write(host, id, start, b"x" * length) == []
    assert commit(host, id) == [Status.INVALID]
    assert host.get(b"k") == [b"before"]
    assert commit(host, id) == [CONFLICT]
    assert host.store.stats().allocated == 0


@pytest.mark.parametrize(
    "pieces", [[(0, 10)], [(0, 6), (3, 7)], [(8, 2), (0, 3), (4, 2), (2, 7)], [(0, 10), (0, 10)]],
    ids=str,
)  # fmt: skip
def test_overlapping_pieces_that_cover_the_value_are_enough(
    host: Host, pieces: list[tuple[int, int]]
) -> None:
    id = allocated(host, b"k", 10)
    for start, length in pieces:
        assert write(host, id, start, b"0123456789"[start : start + length]) == []
    assert commit(host, id) == []
    assert host.get(b"k") == [b"0123456789"]


def test_a_value_of_no_bytes_needs_no_write(host: Host) -> None:
    assert commit(host, allocated(host, b"k", 0)) == []
    assert host.get(b"k") == [b""]


def test_pieces_with_too_many_gaps_are_refused(host: Host) -> None:
    id = allocated(host, b"k", 4 * GAPS_MAX)
    for i in range(GAPS_MAX):
        assert write(host, id, 2 * i, b"x") == []
    assert f"{GAPS_MAX} separate pieces" in refused(
        host, Kind.WRITE, wire.Write(id, 3 * GAPS_MAX), [b"x"]
    )
    assert write(host, id, 0, bytes(4 * GAPS_MAX)) == []
    assert commit(host, id) == []


@pytest.mark.parametrize(
    ("offset", "frames"), [(0, [b"abc", b"d"]), (3, [b"x"]), (1 << 61, [b"x"])]
)
def test_writes_behind_the_end_are_refused_and_write_nothing(
    host: Host, offset: int, frames: list[bytes]
) -> None:
    id = allocated(host, b"k", 3)
    neighbour = allocated(host, b"l", 3)
    assert write(host, neighbour, 0, b"lll") == []
    assert "of a value of 3" in refused(host, Kind.WRITE, wire.Write(id, offset), frames)
    assert write(host, id, 0, b"kkk") == []
    assert commit(host, id, neighbour) == []
    assert host.get(b"k", b"l") == [b"kkk", b"lll"]


def test_ids_that_are_unknown_foreign_or_used_up_are_conflicts(host: Host) -> None:
    id = allocated(host, b"k", 3)
    stranger = host.open_session(b"x", b"1")
    for kind, body in (
        (Kind.WRITE, wire.Write(id, 0)),
        (Kind.COMMIT, wire.Commit([id])),
        (Kind.ABORT, wire.Abort([id])),
    ):
        assert host.statuses(kind, body, session=stranger) == [CONFLICT]
    assert write(host, id + 1, 0, b"abc") == [CONFLICT]
    assert write(host, id, 0, b"abc") == []
    assert commit(host, id, id, 99) == [OK, CONFLICT, CONFLICT]
    assert write(host, id, 0, b"xyz") == [CONFLICT]
    assert host.get(b"k") == [b"abc"]


def test_abort_gives_the_room_back(host: Host) -> None:
    used = host.store.stats().used_bytes
    id = allocated(host, b"k", 1000)
    assert host.statuses(Kind.ABORT, wire.Abort([id, id])) == [OK, CONFLICT]
    assert host.store.stats().used_bytes == used
    assert host.get(b"k") == [None]


def test_alloc_reports_why_there_is_nothing_to_fill(host: Host) -> None:
    host.put({b"once": b"1"}, ONCE)
    body = wire.Alloc([b"once", b"new"], [5, 5], ONCE)
    made = answered(host.ask(Kind.ALLOC, body), Kind.ALLOCATED)
    assert list(made.statuses) in ([], [OK, OK])
    assert made.ids[0] == 0  # it is there already, by contract with the same content
    assert made.ids[1] > 0
    absent = answered(host.ask(Kind.ALLOC, wire.Alloc([b"once"], [5], IF_ABSENT)), Kind.ALLOCATED)
    assert list(absent.statuses) == [Status.EXISTS]


def test_too_many_allocations_of_one_session_are_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.allocating.ALLOCS_MAX", 3)
    answered(host.ask(Kind.ALLOC, wire.Alloc([b"a", b"b"], [1, 1], PLAIN)), Kind.ALLOCATED)
    body = wire.Alloc([b"c", b"d"], [1, 1], PLAIN)
    assert "more than 3 allocations" in refused(host, Kind.ALLOC, body)


@pytest.mark.parametrize("fate", ["moving", "gone", "fenced", "gone and back"])
def test_a_commit_is_refused_once_the_bucket_may_not_be_served(host: Host, fate: str) -> None:
    key = host.keys_in(2, 1)[0]
    id = allocated(host, key, 3)
    assert write(host, id, 0, b"abc") == []
    replicas = host.replicas
    if fate == "fenced":
        host.fenced = True
    elif fate == "moving":
        replicas.served.discard(2)
        replicas.waiting.add(2)
    else:
        host.store.drop_bucket(2)
        replicas.served.discard(2)
    if fate == "gone and back":
        host.store.open_bucket(2)
        replicas.served.add(2)
    expected = {
        "moving": Status.MOVING, "gone": Status.NOT_PRIMARY, "fenced": Status.STALLED,
        "gone and back": CONFLICT,
    }  # fmt: skip
    assert commit(host, id) == [expected[fate]]
    assert host.store.stats().allocated == 0
    host.fenced = False
    replicas.served.add(2)
    if 2 in host.store.buckets:
        assert host.get(key) == [None]


def test_an_allocation_whose_bucket_is_gone_takes_no_more_bytes(host: Host) -> None:
    key = host.keys_in(2, 1)[0]
    id = allocated(host, key, 3)
    host.store.drop_bucket(2)
    assert write(host, id, 0, b"abc") == [CONFLICT]


def test_an_allocation_that_is_left_alone_is_taken_back_and_writes_prolong_it(host: Host) -> None:
    used, idle = allocated(host, b"a", 2), allocated(host, b"b", 2)
    host.now += 6 * S
    assert write(host, used, 0, b"a") == []
    host.now += 5 * S
    host.sessions.reap(host.now)
    assert host.store.stats().allocated == 1
    assert write(host, used, 1, b"a") == []
    assert write(host, idle, 0, b"bb") == [CONFLICT]
    assert commit(host, used, idle) == [OK, CONFLICT]


# -- puts whose bytes are still to come


def begin(host: Host, body: wire.Put, size: int | None = None, request: int = 1000) -> Any:
    size = sum(body.sizes) if size is None else size
    return host.handlers.begin(host.session, Kind.PUT, request, body, size, host.now)


def fill(filling: Any, data: bytes) -> None:
    at = 0
    for view in filling.views:
        view[:] = data[at : at + len(view)]
        at += len(view)


def test_a_put_is_filled_in_place_and_shows_when_all_bytes_are_there(host: Host) -> None:
    filling = begin(host, wire.Put([b"a", b"b"], [3, 4], PLAIN))
    fill(filling, b"aaabbbb")
    assert host.get(b"a", b"b") == [None, None]
    response = filling.finish(host.now)
    assert answered(response, Kind.STATUSES).statuses == b""
    assert host.get(b"a", b"b") == [b"aaa", b"bbbb"]
    again = host.ask(Kind.PUT, wire.Put([b"a"], [1], PLAIN), [b"x"], request=1000)
    assert again == response
    assert host.get(b"a") == [b"aaa"]


def test_a_filled_put_that_ends_early_leaves_nothing(host: Host) -> None:
    filling = begin(host, wire.Put([b"a", b"b"], [3, 4], PLAIN))
    filling.abort()
    assert host.store.stats().allocated == 0
    assert host.get(b"a") == [None]


def test_bytes_of_keys_that_are_not_stored_are_received_and_dropped(host: Host) -> None:
    host.put({b"there": b"1"})
    filling = begin(host, wire.Put([b"there", b"new"], [3, 4], IF_ABSENT))
    fill(filling, b"aaabbbb")
    statuses = answered(filling.finish(host.now), Kind.STATUSES).statuses
    assert list(statuses) == [Status.EXISTS, OK]
    assert host.get(b"there", b"new") == [b"1", b"bbbb"]


def test_a_filled_put_is_refused_where_the_bucket_left_meanwhile(host: Host) -> None:
    keys = [host.keys_in(0, 1)[0], host.keys_in(1, 1)[0]]
    filling = begin(host, wire.Put(keys, [1, 1], PLAIN))
    fill(filling, b"ab")
    host.replicas.served.discard(1)
    statuses = answered(filling.finish(host.now), Kind.STATUSES).statuses
    assert list(statuses) == [OK, Status.NOT_PRIMARY]
    assert host.store.stats().allocated == 0


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_bytes_that_arrive_after_their_bucket_left_overwrite_nothing(host: Host, end: str) -> None:
    key, other = host.keys_in(2, 1)[0], host.keys_in(1, 1)[0]
    filling = begin(host, wire.Put([key], [MIB], PLAIN))
    host.store.drop_bucket(2)
    host.store.open_bucket(2)
    while host.store.stats().free_bytes > MIB:
        host.put({other: b"o" * (MIB // 2), b"%d" % host.store.stats().objects: b"o" * (MIB // 2)})
    fill(filling, b"x" * MIB)
    assert host.get(other) == [b"o" * (MIB // 2)]
    if end == "finish":
        assert list(answered(filling.finish(host.now), Kind.STATUSES).statuses) == [CONFLICT]
    else:
        filling.abort()
    assert host.store.stats().retiring == 0
    assert host.get(key) == [None]


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (wire.Put([b"a"], [1, 2], PLAIN), 3),
        (wire.Put([b"a"], [3], PLAIN), 4),
        (wire.Put([b"a"], [3 * MIB], PLAIN), 3 * MIB),
        (wire.Put([b"k" * 65], [3], PLAIN), 3),
    ],
    ids=["counts", "sizes", "large for this arena", "key"],
)
def test_puts_that_are_not_plainly_right_are_not_begun(
    host: Host, body: wire.Put, size: int
) -> None:
    assert begin(host, body, size) is None
    assert host.store.stats().allocated == 0


def test_repeated_and_refused_puts_are_not_begun(host: Host) -> None:
    host.ask(Kind.PUT, wire.Put([b"a"], [1], PLAIN), [b"x"], request=7)
    assert begin(host, wire.Put([b"a"], [1], PLAIN), request=7) is None
    host.fenced = True
    assert begin(host, wire.Put([b"a"], [1], PLAIN)) is None


# -- repeated writes


def test_a_repeated_write_is_answered_from_memory_and_not_run_again(host: Host) -> None:
    body = wire.Put([b"k"], [1], IF_ABSENT)
    first = host.ask(Kind.PUT, body, [b"1"], request=5)
    host.statuses(Kind.DELETE, wire.Delete([b"k"]))
    assert host.ask(Kind.PUT, body, [b"1"], request=5) == first
    assert host.get(b"k") == [None]


def test_each_kind_of_write_is_remembered(host: Host) -> None:
    host.put({b"k": b"1"})
    bodies: dict[Kind, Any] = {
        **{kind: make([b"k"]) for kind, make in KEYED.items() if kind in wire.MUTATING},
        Kind.DELETE_RANGE: wire.DeleteRange([0, 1, 2, 3], b"k", 10),
        Kind.COMMIT: wire.Commit([1]),
    }
    assert bodies.keys() == wire.MUTATING - {Kind.FILLED}, "for that see test_rooms"
    frames = {Kind.PUT: [b"abc"]}
    for request, (kind, body) in enumerate(bodies.items(), 100):
        first = host.ask(kind, body, frames.get(kind, ()), request=request)
        assert host.ask(kind, body, frames.get(kind, ()), request=request) is first


def test_a_refused_request_is_not_remembered(host: Host) -> None:
    answered(host.ask(Kind.PUT, wire.Put([b"k"], [1, 1], PLAIN), request=5), Kind.ERROR)
    assert host.ask(Kind.PUT, wire.Put([b"k"], [1], PLAIN), [b"x"], request=5)[0] != Kind.ERROR
    assert host.get(b"k") == [b"x"]


def test_reads_are_not_remembered(host: Host) -> None:
    host.ask(Kind.GET, wire.Get([b"k"]), request=5)
    assert not host.session.answers


def test_answers_are_bounded_and_a_write_from_before_is_not_run_twice(host: Host) -> None:
    host.put({b"k": b"1"})
    for i in range(101, 110):
        host.ask(Kind.DELETE, wire.Delete([b"%d" % i]), request=i)
    assert list(host.session.answers) == list(range(102, 110))
    bodies = {
        Kind.DELETE: wire.Delete([b"k"]),
        Kind.DELETE_RANGE: wire.DeleteRange([0, 1, 2, 3], b"", 9),
        Kind.COMMIT: wire.Commit([1]),
    }
    for kind, body in bodies.items():
        error = answered(host.ask(kind, body, request=101), Kind.ERROR)
        assert error.fault == Fault.FORGOTTEN
    assert begin(host, wire.Put([b"k"], [1], PLAIN), request=101) is None
    assert host.get(b"k") == [b"1"]


def test_answers_belong_to_their_session(host: Host) -> None:
    other = host.open_session(b"c", b"2")
    host.ask(Kind.PUT, wire.Put([b"a"], [1], PLAIN), [b"1"], request=5)
    host.ask(Kind.PUT, wire.Put([b"b"], [1], PLAIN), [b"2"], session=other, request=5)
    assert host.get(b"a", b"b") == [b"1", b"2"]


# -- ranges


def page(host: Host, buckets: list[int], after: bytes = b"", prefix: bytes = b"", limit: int = 8
         ) -> wire.Page:  # fmt: skip
    body = wire.Scan(buckets, after, prefix, limit)
    result: wire.Page = answered(host.ask(Kind.SCAN, body), Kind.PAGE)
    return result


def scanned(host: Host, buckets: list[int], prefix: bytes, limit: int) -> list[bytes]:
    """All keys, page by page, as a client would ask for them."""
    keys: list[bytes] = []
    after = b""
    while buckets:
        got = page(host, buckets, after, prefix, limit)
        assert got.status == OK
        assert len(got.keys) <= limit
        assert got.keys or got.finished
        keys += got.keys
        buckets = buckets[got.finished :]
        after = got.keys[-1] if got.keys and not (got.finished and not got.keys) else b""
        if got.finished and got.keys and ring.bucket_of(got.keys[-1], 4) not in buckets[:1]:
            after = b""
    return keys


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_pages_give_each_key_once_in_order_of_bucket_and_key(host: Host, limit: int) -> None:
    names = [b"%03d" % i for i in range(40)]
    host.put({name: name for name in names})
    host.put({b"other": b""})
    order = [0, 1, 3, 2]
    expected = sorted(names, key=lambda k: (order.index(ring.bucket_of(k, 4)), k))
    assert scanned(host, order, b"0", limit) == expected


def test_a_page_has_sizes_and_no_more_than_the_node_allows(host: Host) -> None:
    keys = host.keys_in(1, LIMITS.scan_keys_max + 1)
    host.put({key: b"x" * i for i, key in enumerate(keys)})
    got = page(host, [1], limit=60000)
    assert (got.keys, got.finished) == (sorted(keys)[:8], 0)
    assert got.sizes == [keys.index(key) for key in got.keys]
    rest = page(host, [1], after=got.keys[-1])
    assert (rest.keys, rest.finished) == (sorted(keys)[8:], 1)


def test_after_concerns_the_first_bucket_only(host: Host) -> None:
    low, high = sorted(host.keys_in(0, 2))
    others = sorted(host.keys_in(1, 2))
    host.put(dict.fromkeys([low, high, *others], b""))
    assert page(host, [0, 1], after=low).keys == [high, *others]
    assert page(host, [0, 1], after=b"zzzz").keys == others


def test_a_scan_stops_at_a_bucket_that_may_not_be_served_and_says_why(host: Host) -> None:
    keys = [host.keys_in(bucket, 1)[0] for bucket in range(4)]
    host.put(dict.fromkeys(keys, b""))
    host.replicas.served -= {2, 3}
    host.replicas.waiting.add(2)
    got = page(host, [0, 1, 2, 3])
    assert (got.keys, got.finished, got.status) == (keys[:2], 2, Status.MOVING)
    assert page(host, [3, 0]).status == Status.NOT_PRIMARY
    host.fenced = True
    got = page(host, [0])
    assert (got.keys, got.finished, got.status) == ([], 0, Status.STALLED)


def delete_range(host: Host, buckets: list[int], prefix: bytes, limit: int = 8) -> wire.Deleted:
    body = wire.DeleteRange(buckets, prefix, limit)
    result: wire.Deleted = answered(host.ask(Kind.DELETE_RANGE, body), Kind.DELETED)
    return result


def test_delete_range_goes_on_bucket_by_bucket_within_its_limit(host: Host) -> None:
    names = [b"a%02d" % i for i in range(20)]
    host.put(dict.fromkeys([*names, b"b"], b""))
    buckets, count = [0, 1, 2, 3], 0
    while buckets:
        got = delete_range(host, buckets, b"a", 3)
        assert (got.count <= 3, got.status) == (True, OK)
        assert got.count or got.finished
        count += got.count
        buckets = buckets[got.finished :]
    assert count == 20
    assert host.get(*names, b"b") == [None] * 20 + [b""]


def test_delete_range_deletes_nothing_of_what_may_not_be_served(host: Host) -> None:
    keys = [host.keys_in(bucket, 1)[0] for bucket in range(4)]
    host.put(dict.fromkeys(keys, b""))
    host.replicas.served -= {1}
    got = delete_range(host, [0, 1, 2], b"")
    assert (got.count, got.finished, got.status) == (1, 1, Status.NOT_PRIMARY)
    host.fenced = True
    got = delete_range(host, [2], b"")
    assert (got.count, got.finished, got.status) == (0, 0, Status.STALLED)
    host.fenced = False
    host.replicas.served |= {1}
    assert host.get(*keys) == [None, b"", b"", b""]


# -- pins and expiry


def pin(host: Host, *keys: bytes, ms: int = 1000, session: Session | None = None) -> list[Status]:
    return host.statuses(Kind.PIN, wire.Pin(list(keys), ms), session=session)


def unpin(host: Host, *keys: bytes, session: Session | None = None) -> list[Status]:
    return host.statuses(Kind.UNPIN, wire.Unpin(list(keys)), session=session)


def pins_of(host: Host, key: bytes) -> int:
    item = host.store.find(ring.bucket_of(key, Host.BUCKETS), key, host.now)
    assert item is not None
    return item.pins


def test_a_pin_holds_until_its_time_and_prolonging_never_shortens_it(host: Host) -> None:
    host.put({b"k": b"1"})
    assert pin(host, b"k", b"no", ms=1000) == [OK, MISS]
    host.now += 500 * MS
    assert pin(host, b"k", ms=1000) == []
    assert pin(host, b"k", ms=1) == []
    assert (pins_of(host, b"k"), len(host.sessions.pins)) == (1, 1)
    host.sessions.reap(1 + 1400 * MS)
    assert pins_of(host, b"k") == 1
    host.sessions.reap(1 + 1500 * MS)
    assert (pins_of(host, b"k"), len(host.sessions.pins)) == (0, 0)


def test_pins_are_of_the_client_not_of_its_session_and_outlive_it(host: Host) -> None:
    host.put({b"k": b"1"})
    same, other = host.open_session(b"c", b"2"), host.open_session(b"d", b"1")
    pin(host, b"k")
    pin(host, b"k", session=same)
    assert pins_of(host, b"k") == 1
    pin(host, b"k", session=other)
    assert pins_of(host, b"k") == 2
    host.sessions.end(host.session)
    host.sessions.end(same)
    assert pins_of(host, b"k") == 2
    assert unpin(host, b"k", session=other) == []
    assert pins_of(host, b"k") == 1
    host.sessions.reap(host.now + 1001 * MS)
    assert pins_of(host, b"k") == 0


def test_unpin_ends_the_clients_pin_and_the_objects_own(host: Host) -> None:
    host.put({b"hard": b"1"}, HARD)
    host.put({b"soft": b"2"}, SOFT)
    pin(host, b"hard", b"soft")
    assert unpin(host, b"hard", b"soft", b"no") == [OK, OK, MISS]
    assert host.store.hard_pinned == 0
    assert len(host.sessions.pins) == 0


def test_the_quota_of_pinned_bytes_refuses_a_pin(host: Host) -> None:
    host.put({b"a": bytes(MIB), b"b": bytes(MIB - 64)})
    assert pin(host, b"a", b"b") == [OK, Status.QUOTA]
    assert pin(host, b"a") == []
    unpin(host, b"a")
    assert pin(host, b"b") == []


def test_a_pin_ends_with_its_object_and_the_next_one_is_pinned_anew(host: Host) -> None:
    host.put({b"k": b"1"})
    pin(host, b"k", ms=1000)
    host.put({b"k": b"2"})
    assert pins_of(host, b"k") == 0
    assert host.store.hard_pinned == 0
    assert pin(host, b"k", ms=10) == []
    assert (pins_of(host, b"k"), len(host.sessions.pins)) == (1, 1)
    host.sessions.reap(host.now + 11 * MS)
    assert pins_of(host, b"k") == 0
    host.sessions.reap(host.now + 1001 * MS)


def test_pins_of_objects_that_left_do_not_pile_up(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.sessions.pins, "_sweep_at", 10)
    monkeypatch.setattr("p2pkv.sessions.PINS_SLACK", 10)
    host.put({b"stays": b""})
    pin(host, b"stays", ms=1 << 50)
    for i in range(100):
        host.put({b"%d" % i: b""})
        assert pin(host, b"%d" % i, ms=1 << 50) == []
        host.statuses(Kind.DELETE, wire.Delete([b"%d" % i]))
    assert len(host.sessions.pins) <= 15
    assert pins_of(host, b"stays") == 1


def test_expire_counts_from_now_and_zero_means_for_ever(host: Host) -> None:
    host.put({b"a": b"1", b"b": b"2"})
    assert host.statuses(Kind.EXPIRE, wire.Expire([b"a", b"b", b"no"], 10)) == [OK, OK, MISS]
    assert host.statuses(Kind.EXPIRE, wire.Expire([b"b"], 0)) == []
    host.now += 10 * MS
    assert host.get(b"a", b"b") == [None, b"2"]


def test_a_failure_in_a_handler_is_not_an_answer(host: Host) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("broken")

    handlers = Handlers(
        host.journal, LIMITS, 4, lambda now: True,
        {Kind.ROUTES: fails},
    )  # fmt: skip
    with pytest.raises(OSError, match="broken"):
        handlers.handle(host.session, Kind.ROUTES, 1, wire.Routes(0), (), 1)


# -- for clients that have mapped the arena


def test_a_get_that_locates_tells_where_large_values_lie_and_sends_the_small(host: Host) -> None:
    large = bytes(range(256)) * (LOCATE_MIN // 256)
    host.put({b"small": b"s" * (LOCATE_MIN - 1), b"large": large, b"huge": bytes(2 * MIB)})
    host.put({b"once": large}, ONCE)
    keys = [b"small", b"large", b"none", b"huge", b"once"]
    response = host.ask(Kind.GET, wire.Get(keys, True, True))
    body = answered(response, Kind.VALUES)
    assert list(body.statuses) == [OK, OK, MISS, OK, OK]
    assert body.sizes == [LOCATE_MIN - 1, LOCATE_MIN, 0, 2 * MIB, LOCATE_MIN]
    assert body.once == b"\0\0\0\0\1"
    assert [bool(o) for o in body.offsets] == [False, True, False, True, True]
    for i in (1, 3, 4):
        header = read_header(host.store.arena.view, body.offsets[i])
        assert header is not None
        assert (header.size, header.version) == (body.sizes[i], body.versions[i])
    at = body.offsets[1]
    assert bytes(host.store.arena.view[at : at + LOCATE_MIN]) == large
    assert b"".join(flat(response[2])) == b"s" * (LOCATE_MIN - 1)


def test_locating_leaves_what_is_refused_refused_and_says_nothing_if_all_are_there(
    mixed: Mixed,
) -> None:
    host = mixed.host
    host.put({mixed.keys[0]: bytes(LOCATE_MIN), mixed.keys[3]: bytes(LOCATE_MIN)})
    body = answered(host.ask(Kind.GET, wire.Get(mixed.keys, False, True)), Kind.VALUES)
    assert list(body.statuses) == MIXED_STATUSES
    body = answered(host.ask(Kind.GET, wire.Get(mixed.keys[::3], False, True)), Kind.VALUES)
    assert (body.statuses, body.once, all(body.offsets)) == (b"", b"", True)


def shared_alloc(host: Host, key: bytes, size: int) -> tuple[int, int]:
    body = wire.Alloc([key], [size], PLAIN, True)
    made = answered(host.ask(Kind.ALLOC, body), Kind.ALLOCATED)
    return made.ids[0], made.offsets[0]


def test_memory_is_shared_over_data_connections_only(host: Host) -> None:
    message = refused(host, Kind.ALLOC, wire.Alloc([b"k"], [10], PLAIN, True))
    assert "data connections only" in message


def test_shared_memory_is_filled_by_the_client_and_committed_as_filled(host: Host) -> None:
    host.session.shared = Shared()
    id, offset = shared_alloc(host, b"k", 3)
    host.store.arena.view[offset : offset + 3] = b"abc"
    assert host.statuses(Kind.COMMIT, wire.Commit([id], True)) == []
    assert (host.get(b"k"), host.session.shared) == ([b"abc"], {})


def test_shared_memory_is_used_for_nothing_else_until_the_client_lets_go(host: Host) -> None:
    shared = host.session.shared = Shared()
    key = host.keys_in(2, 1)[0]
    id, _ = shared_alloc(host, key, 1000)
    host.store.drop_bucket(2)
    assert host.store.stats().retiring == 1
    host.sessions.reap(host.now + 31 * S)
    assert host.store.stats().retiring == 1
    host.handlers.sharing.unshare(shared, [id, id + 1])
    assert host.store.stats().retiring == 0
    host.handlers.sharing.unshare(shared, [id])


def test_an_aborted_shared_allocation_is_let_go(host: Host) -> None:
    host.session.shared = Shared()
    id, _ = shared_alloc(host, b"k", 1000)
    assert host.statuses(Kind.ABORT, wire.Abort([id])) == []
    assert (host.session.shared, host.store.stats().used_bytes) == ({}, 0)


def test_what_is_not_shared_counts_as_filled_only_by_its_bytes(host: Host) -> None:
    host.session.shared = Shared()
    other, _ = shared_alloc(host, b"l", 3)
    id = allocated(host, b"k", 3)
    assert host.statuses(Kind.COMMIT, wire.Commit([id, other], True)) == [Status.INVALID, OK]


# -- clients on other hosts


def test_what_is_located_with_a_hold_stays_until_its_token_is_given_back(host: Host) -> None:
    """Overwritten and deleted meanwhile, and although nothing else holds it."""
    values = {b"a": bytes(LOCATE_MIN), b"s": b"small", b"b": bytes(LOCATE_MIN + 1)}
    host.put(values)
    get = wire.Get([*values, b"none"], False, True, hold=True)
    body = answered(host.ask(Kind.GET, get), Kind.VALUES)
    assert [bool(at) for at in body.offsets] == [True, False, True, False]
    host.put({b"a": b"new"})
    host.statuses(Kind.DELETE, wire.Delete([b"b"]))
    assert host.store.stats().retiring == 2
    assert host.statuses(Kind.RELEASE, wire.Release([body.token])) == []
    assert host.store.stats().retiring == 0
    assert host.session.held == 0


def test_a_held_range_has_a_token_too(host: Host) -> None:
    host.put({b"a": bytes(2 * LOCATE_MIN)})
    get = wire.Get([b"a"], False, True, [10], [LOCATE_MIN], hold=True)
    assert answered(host.ask(Kind.GET, get), Kind.VALUES).token
    assert host.session.held == 1


def test_a_hold_ends_with_its_time_and_with_its_session(host: Host) -> None:
    host.put({b"a": bytes(LOCATE_MIN)})
    get = wire.Get([b"a"], False, True, hold=True)
    for end in (
        lambda: host.sessions.reap(host.now + host.sessions.hold_ns),
        lambda: host.sessions.end(host.session),
    ):
        answered(host.ask(Kind.GET, get), Kind.VALUES)
        host.statuses(Kind.DELETE, wire.Delete([b"a"]))
        assert host.store.stats().retiring == 1
        end()
        assert host.store.stats().retiring == 0
        host.put({b"a": bytes(LOCATE_MIN)})


def test_a_session_holds_a_bounded_number_of_objects(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.sessions.HELD_MAX", 1)
    host.put({b"a": bytes(LOCATE_MIN)})
    get = wire.Get([b"a"], False, True, hold=True)
    answered(host.ask(Kind.GET, get), Kind.VALUES)
    error = answered(host.ask(Kind.GET, get), Kind.ERROR)  # a use for eviction it was all the same
    assert "objects, in one session" in error.message
    assert host.session.held == 1


def remote_alloc(host: Host, key: bytes, size: int) -> int:
    body = wire.Alloc([key], [size], PLAIN, True, True)
    return answered(host.ask(Kind.ALLOC, body), Kind.ALLOCATED).ids[0]


def test_what_a_remote_client_filled_is_committed_without_quarantine(host: Host) -> None:
    host.session.shared = Shared()
    id = remote_alloc(host, b"k", 3)
    assert host.statuses(Kind.COMMIT, wire.Commit([id], True)) == []
    assert host.handlers.sharing.quarantine.held_bytes == 0
    assert not host.handlers.sharing.quarantine.remote


def test_what_a_remote_client_filled_is_compared_with_its_checksum_as_what_is_sent_is(
    host: Host,
) -> None:
    """A local client's is not: it was written in place."""
    host.handlers.arrivals.policy = Checksums.SENT
    host.session.shared = Shared()
    remote, (local, _) = remote_alloc(host, b"r", 3), shared_alloc(host, b"l", 3)
    wrong = [12345]
    assert host.statuses(Kind.COMMIT, wire.Commit([remote], True, wrong)) == [Status.CORRUPT]
    assert host.statuses(Kind.COMMIT, wire.Commit([local], True, wrong)) == []
    assert host.handlers.sharing.quarantine.held_bytes == 0


def test_room_that_a_remote_client_did_not_write_to_is_free_at_once(host: Host) -> None:
    host.session.shared = Shared()
    id = remote_alloc(host, b"k", 1000)
    assert host.statuses(Kind.ABORT, wire.Abort([id])) == []
    assert host.store.stats().used_bytes == 0


@pytest.mark.parametrize("how", ["late", "closed", "lost"])
def test_room_that_a_remote_client_may_still_write_to_is_not_used(host: Host, how: str) -> None:
    shared = host.session.shared = Shared()
    id = remote_alloc(host, b"k", 1000)
    used = host.store.stats().used_bytes
    if how == "late":
        assert host.statuses(Kind.ABORT, wire.Abort([id], True)) == []
    else:
        host.handlers.sharing.unshare_all(shared, proven=how == "closed")
    quarantine = host.handlers.sharing.quarantine
    assert host.store.stats().used_bytes == used == quarantine.held_bytes
    assert quarantine.unproven_bytes == (used if how == "lost" else 0)
    assert not shared
    assert not quarantine.remote
    host.store.release_batch(list(host.store.extents.retiring))


def test_a_local_clients_room_knows_no_quarantine(host: Host) -> None:
    shared = host.session.shared = Shared()
    shared_alloc(host, b"k", 1000)
    host.handlers.sharing.unshare_all(shared, proven=False)
    assert (host.handlers.sharing.quarantine.held_bytes, host.store.stats().used_bytes) == (0, 0)


def test_remote_writers_are_refused_while_too_much_is_in_quarantine(host: Host) -> None:
    host.session.shared = Shared()
    host.handlers.sharing.quarantine.held_bytes = host.store.arena.size
    body = wire.Alloc([b"k"], [10], PLAIN, True, True)
    error = answered(host.ask(Kind.ALLOC, body), Kind.ERROR)
    assert error.fault == Fault.NOT_READY


def test_room_for_a_remote_writer_must_be_shared(host: Host) -> None:
    host.session.shared = Shared()
    assert "must be shared" in refused(
        host, Kind.ALLOC, wire.Alloc([b"k"], [1], PLAIN, False, True)
    )
