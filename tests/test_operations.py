"""What each call checks, sends, and makes of the answers."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from clientside import (
    BROKEN,
    BUCKETS,
    LATE,
    SMALL,
    A,
    B,
    Desk,
    Script,
    key_in,
    refused,
    reply,
    statuses,
    table,
    values,
)

from p2pkv import ring, wire
from p2pkv.arguments import encode_key, encode_value, view_of
from p2pkv.config import Limits
from p2pkv.errors import (
    BatchError,
    ClusterMismatch,
    Conflict,
    DeadlineExceeded,
    Indeterminate,
    InvalidArgument,
    Miss,
    OutOfMemory,
    OutOfRange,
    P2PKVError,
    ProtocolError,
    Stalled,
    TooLarge,
    Unreachable,
)
from p2pkv.operations import Operations, ScanCursor, milliseconds
from p2pkv.routing import Pause, Reply
from p2pkv.wire import Fault, Kind, PutOptions, Status

PLAIN = PutOptions()
K0, K1, K2 = key_in(0), key_in(1), key_in(2)
LIMITS = Limits()


@pytest.fixture
def desk() -> Desk:
    return Desk(table())


@pytest.fixture
def small() -> Desk:
    """Messages of 40 bytes at most: larger values go in pieces of 10."""
    return Desk(table([A, B] * 4), SMALL)


# --- arguments: nothing is sent unless all of them are good


def refuses(operation: Any) -> str:
    """The message of the InvalidArgument that comes before any effect."""
    with pytest.raises(InvalidArgument) as caught:
        operation.send(None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("", "key: is empty; it must have 1 to key_bytes_max = 1024 bytes"),
        (b"", "key: is empty; it must have 1 to key_bytes_max = 1024 bytes"),
        ("k" * 1025, "key: 1025 bytes, limit key_bytes_max = 1024"),
        ("ü" * 513, "key: 1026 bytes, limit key_bytes_max = 1024"),
        (bytearray(1025), "key: 1025 bytes, limit key_bytes_max = 1024"),
        (5, "key: must be str or bytes, not int"),
        (None, "key: must be str or bytes, not NoneType"),
        ("\ud800", "key: is not valid Unicode"),
    ],
)
def test_a_bad_key_is_refused_by_every_call(desk: Desk, bad: Any, complaint: str) -> None:
    ops, good = desk.ops, b"good"
    pairs = [(good, b""), (bad, b"")]
    calls = [
        ops.get(bad), ops.get_into(bad, bytearray(1)), ops.put(bad, b"", PLAIN), ops.exists(bad),
        ops.delete(bad), ops.expire(bad, 1), ops.batch_get([good, bad]),
        ops.batch_get_into([good, bad], [bytearray(1)] * 2), ops.batch_put(pairs, PLAIN),
        ops.batch_exists([good, bad]), ops.batch_delete([good, bad]), ops.pin([good, bad], 1),
        ops.unpin([good, bad]), ops.match_prefix([good, bad]),
    ]  # fmt: skip
    for call in calls:
        assert refuses(call).startswith(complaint)


@pytest.mark.parametrize("bound", ["a", b"a", bytearray(b"a"), memoryview(b"a")])
def test_one_key_is_not_a_sequence_of_keys(desk: Desk, bound: Any) -> None:
    assert refuses(desk.ops.batch_get(bound)) == "keys: must be a sequence of keys, not one key"


def test_keys_must_be_iterable(desk: Desk) -> None:
    assert refuses(desk.ops.batch_get(None)) == "keys: must be iterable, not NoneType"  # type: ignore[arg-type]


class Text(str):
    """A subclass of str."""


@pytest.mark.parametrize(
    "key", ["k" * 1024, "ü" * 512, b"\0", bytearray(b"ab"), memoryview(b"ab"), Text("x")]
)
def test_good_keys_are_sent_as_bytes(desk: Desk, key: Any) -> None:
    expected = key.encode() if isinstance(key, str) else bytes(key)
    assert desk.start(desk.ops.get(key)).request.body.keys == [expected]
    assert desk.start(desk.ops.batch_get([key, b"x"])).request.body.keys == [expected, b"x"]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("text", "value: must be bytes or a buffer, not str; encode it first"),
        (5, "value: must offer its bytes as a buffer, not int"),
        (None, "value: must offer its bytes as a buffer, not NoneType"),
        (np.zeros((4, 4))[:, 1], "value: must be contiguous (C order)"),
        (bytes(201), "value: 201 bytes, limit value_bytes_max = 200"),
        (np.zeros(26), "value: 208 bytes, limit value_bytes_max = 200"),
    ],
)
def test_a_bad_value_is_refused(small: Desk, bad: Any, complaint: str) -> None:
    assert refuses(small.ops.put("k", bad, PLAIN)) == complaint
    assert refuses(small.ops.batch_put([("a", b""), ("b", bad)], PLAIN)) == complaint


@pytest.mark.parametrize(
    "value",
    [b"abc", bytearray(b"abc"), array.array("d", [1, 2]), np.arange(6).reshape(2, 3), np.float32(2),
     np.zeros(0), np.zeros((0, 3)), np.zeros(2, ">i4"), np.zeros(2, "c8"), memoryview(b"")],
)  # fmt: skip
def test_any_contiguous_buffer_is_a_value(value: Any) -> None:
    view = encode_value(value, LIMITS)
    assert (view.format, view.ndim) == ("B", 1)
    assert bytes(view) == memoryview(value).tobytes()


def test_a_buffer_must_be_writable(desk: Desk) -> None:
    assert refuses(desk.ops.get_into("k", b"abc")) == "buffer: must be writable"
    assert refuses(desk.ops.batch_get_into(["k"], ["x"])).startswith("buffer: must offer")


def test_an_empty_buffer_is_one(desk: Desk) -> None:
    script = desk.start(desk.ops.get_into(K0, np.zeros(0)))
    script.answer(values(b""))
    assert (script.error, script.result) == (None, 0)


def test_each_key_needs_its_buffer(desk: Desk) -> None:
    assert refuses(desk.ops.batch_get_into(["a", "b"], [bytearray(1)])) == "buffers: 1 for 2 keys"


@pytest.mark.parametrize("items", [5, [1], [(1, 2, 3)], None])
def test_items_must_be_pairs(desk: Desk, items: Any) -> None:
    assert refuses(desk.ops.batch_put(items, PLAIN)).startswith(
        "items: must be a mapping, or pairs"
    )


@pytest.mark.parametrize("bad", [0, -1, 1e6, float("inf"), float("nan"), "5"])
def test_a_bad_timeout_is_refused_by_every_call(desk: Desk, bad: Any) -> None:
    ops = desk.ops
    calls: list[Any] = [
        ops.get("k", bad), ops.get_into("k", bytearray(1), bad), ops.put("k", b"", PLAIN, bad),
        ops.batch_exists(["k"], bad), ops.delete("k", bad), ops.match_prefix(["k"], bad),
        ops.scan_page(ScanCursor(b"", 1), bad), ops.delete_range("", bad), ops.stats(bad),
        ops.batch_get_once([b"k"], bad),
    ]  # fmt: skip
    for call in calls:
        assert refuses(call) == (
            f"timeout = {bad!r}: must be more than 0 and less than 1e+06 seconds"
        )


@pytest.mark.parametrize("bad", [0, -1, 1e9, float("nan"), "5"])
def test_a_bad_ttl_is_refused(desk: Desk, bad: Any) -> None:
    complaint = f"ttl = {bad!r}: must be more than 0 and less than 1e+09 seconds"
    assert refuses(desk.ops.expire("k", bad)) == complaint
    assert refuses(desk.ops.pin(["k"], bad)) == complaint


def test_a_ttl_is_a_millisecond_at_least() -> None:
    assert [milliseconds("ttl", s) for s in (1e-9, 0.0014, 60, 999_999_999)] == [
        1, 1, 60_000, 999_999_999_000,
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [5, None, 10**12])
def test_a_prefix_must_be_text_or_bytes(desk: Desk, bad: Any) -> None:
    assert refuses(desk.ops.delete_range(bad)) == (
        f"prefix: must be str or bytes, not {type(bad).__name__}"
    )


def test_a_prefix_is_as_long_as_a_key_at_most(desk: Desk) -> None:
    assert refuses(desk.ops.delete_range("p" * 1025)) == (
        "prefix: 1025 bytes, limit key_bytes_max = 1024"
    )
    assert desk.start(desk.ops.delete_range("p" * 1024)).request.body.prefix == b"p" * 1024


def test_what_is_too_large_is_told_from_what_is_wrong() -> None:
    with pytest.raises(TooLarge):
        encode_key("k" * 1025, LIMITS)
    with pytest.raises(TooLarge):
        encode_value(bytes(201), SMALL)
    assert view_of(memoryview(b"ab")).nbytes == 2


# --- get of one key: one message, one answer


def test_a_get_is_one_message(desk: Desk) -> None:
    script = desk.start(desk.ops.get(K0))
    assert (script.request.to, script.request.body) == (A, wire.Get([K0]))
    assert script.answer(values(b"v")).result == b"v"


def test_a_get_of_a_missing_key_is_none(desk: Desk) -> None:
    script = desk.start(desk.ops.get(K0)).answer(values(Status.MISS))
    assert (script.done, script.result, script.error) == (True, None, None)


def test_a_get_of_an_empty_value(desk: Desk) -> None:
    script = desk.start(desk.ops.get(K0)).answer(values(b""))
    assert script.answer(values(b"")).result == b""


@pytest.mark.parametrize(
    "answer", [values(Status.MOVING), refused(Fault.NOT_READY), values(b"a", b"b")]
)
def test_a_get_with_an_unusual_answer_goes_the_usual_way(desk: Desk, answer: Any) -> None:
    script = desk.start(desk.ops.get(K0)).answer(answer)
    assert script.answer(values(b"v")).result == b"v"


def test_a_get_without_an_answer_looks_at_the_ring_and_goes_the_usual_way(desk: Desk) -> None:
    script = desk.start(desk.ops.get(K0)).answer(BROKEN)
    script.routes(table([B] * BUCKETS, members=[A, B], revision=2))
    assert script.request.to == B
    assert script.answer(values(b"v")).result == b"v"


def test_after_a_call_without_an_answer_the_next_one_looks_at_the_ring_first(desk: Desk) -> None:
    """A caller whose deadlines are short would else never learn of an owner's successor."""
    desk.start(desk.ops.get(K0)).answer(LATE).give_up()
    script = desk.start(desk.ops.get(K0))
    script.routes(table([B] * BUCKETS, members=[A, B], revision=2))
    assert script.request.to == B
    assert script.answer(values(b"v")).result == b"v"


def test_a_get_has_one_deadline_whatever_way_it_goes(desk: Desk) -> None:
    end = desk.now + 5_000_000_000
    script = desk.start(desk.ops.get(K0)).answer(LATE)
    script.give_up()
    assert isinstance(script.error, DeadlineExceeded)
    assert repr(K0) in str(script.error)
    assert desk.now == end


def test_a_get_without_an_owner_waits_for_one() -> None:
    desk = Desk(table([None] * BUCKETS, members=[A]))
    script = desk.start(desk.ops.get(K0)).pause().routes(table(revision=2))
    assert script.answer(values(b"v")).result == b"v"


# --- getting into buffers


def test_values_are_copied_into_the_buffers(desk: Desk) -> None:
    buffers = [bytearray(4), np.zeros(1, np.int32), bytearray(4)]
    script = desk.start(desk.ops.batch_get_into([K0, K1, K2], buffers))
    script.answer(values(b"abc", b"\1\0\0\0", Status.MISS))
    assert script.result == [3, 4, None]
    assert buffers[0] == b"abc\0"
    assert buffers[1][0] == 1


def test_a_value_that_does_not_fit_leaves_the_buffer_as_it_was(desk: Desk) -> None:
    buffer = bytearray(b"xyz")
    script = desk.start(desk.ops.get_into(K0, buffer)).answer(values(b"abcd"))
    assert isinstance(script.error, TooLarge)
    assert str(script.error) == (f"key {K0!r}: its value of 4 bytes does not fit the buffer of 3")
    assert buffer == b"xyz"


def test_a_driver_may_receive_values_straight_into_the_buffers(desk: Desk) -> None:
    buffers = [bytearray(4), bytearray(4), bytearray(b"xyz")]
    script = desk.start(desk.ops.batch_get_into([K0, K1, K2], buffers))
    assert script.request.sink is not None
    body = wire.Values(bytes([0, Status.MISS, 0]), [2, 0, 9], [])
    targets = script.request.sink(body)
    assert [len(t) for t in targets] == [2, 0, 9]
    for target, content in zip(targets, (b"ab", b"", b"too large"), strict=True):
        target[:] = content
    script.answer(Reply(Kind.VALUES, body, [], delivered=True))
    assert isinstance(script.error, BatchError)
    size, missing, too_large = script.error.results
    assert (size, missing) == (2, None)
    assert str(too_large) == f"key {K2!r}: its value of 9 bytes does not fit the buffer of 3"
    assert buffers == [b"ab\0\0", bytes(4), b"xyz"]


def test_a_driver_is_not_told_where_values_go_that_make_no_sense(desk: Desk) -> None:
    script = desk.start(desk.ops.get_into(K0, bytearray(4)))
    assert script.request.sink is not None
    with pytest.raises(ProtocolError, match="2 values for 1 keys"):
        script.request.sink(wire.Values(b"", [1, 1], []))


def test_a_driver_may_make_the_values_itself(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_get([K0, K1]))
    assert script.request.sink is None
    body = wire.Values(bytes([0, Status.MISS]), [2, 0], [])
    script.answer(Reply(Kind.VALUES, body, [], values=[b"ab", None]))
    assert script.result == [b"ab", None]


def test_write_once_objects_are_told(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_get_once([K0, K1, K2], None))
    assert script.request.body.tell_once
    script.answer(reply(wire.Values(b"\0\1\0", [1, 0, 1], [], b"\0\0\1"), b"ac"))
    assert script.result == ([2], [b"a", None, b"c"])


# --- put


def test_a_put_carries_its_options_and_values(desk: Desk) -> None:
    options = PutOptions(if_absent=True, ttl_ms=5)
    script = desk.start(desk.ops.put(K0, b"v", options))
    assert script.request.body == wire.Put([K0], [1], options)
    assert list(script.request.payload) == [b"v"]
    assert script.answer(statuses()).result == 1


def test_a_put_that_found_the_key_there_stored_nothing(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_put([(K0, b""), (K1, b"")], PutOptions(if_absent=True)))
    assert script.answer(statuses(Status.EXISTS, 0)).result == [0, 1]


def test_the_payload_of_a_put_is_the_callers_own_memory_without_empty_parts(desk: Desk) -> None:
    one, two, three = (memoryview(bytearray(n)) for n in (3, 0, 5))
    script = desk.start(desk.ops.batch_put_from([K0, K1], [[one, two, three], three], PLAIN))
    assert [p.obj for p in script.request.payload] == [one.obj, three.obj, three.obj]
    assert script.request.body.sizes == [8, 5]
    assert script.answer(statuses()).result == [1, 1]


def ranges(total: int, *contents: bytes | Status) -> Reply:
    """An answer to a get of ranges of values that all have this size."""
    plain = values(*contents)
    body = msgspec.structs.replace(plain.body, totals=[total] * len(contents))
    return reply(body, *map(bytes, plain.frames))


def test_a_get_of_ranges_asks_for_them_and_for_nothing_else(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_get_range([K0, K1], [(2, 3), (4, None)]))
    assert script.request.body == wire.Get([K0, K1], False, False, [2, 4], [3, -1], True)
    assert script.answer(ranges(6, b"abc", b"de")).result == [b"abc", b"de"]


@pytest.mark.parametrize(
    ("total", "content"),
    [(6, b"ab"), (6, b"abcd"), (4, b"abc")],
)
def test_a_range_of_another_size_than_was_asked_for_is_an_error(
    desk: Desk, total: int, content: bytes
) -> None:
    script = desk.start(desk.ops.get_range(K0, 2, 3)).answer(ranges(total, content))
    assert isinstance(script.error, ProtocolError)


def test_a_range_beyond_the_value_tells_how_large_it_is(desk: Desk) -> None:
    script = desk.start(desk.ops.get_range(K0, 2, 3)).answer(ranges(4, Status.RANGE))
    assert isinstance(script.error, OutOfRange)
    assert script.error.size == 4


def test_ranges_without_the_sizes_of_the_values_are_an_error(desk: Desk) -> None:
    script = desk.start(desk.ops.get_range(K0, 0, 1)).answer(values(b"a"))
    assert isinstance(script.error, ProtocolError)


def test_fresh_memory_is_made_when_the_size_is_known_and_never_over_the_limit() -> None:
    desk, made = Desk(table(), SMALL), list[int]()

    def make(size: int) -> memoryview:
        made.append(size)
        return memoryview(bytearray(size))

    script = desk.start(desk.ops.batch_get_fresh([K0, K1], make))
    result = script.answer(values(b"abc", Status.MISS)).result
    assert [bytes(result[0]), result[1], made] == [b"abc", None, [3]]
    script = desk.start(desk.ops.batch_get_fresh([K0], make)).answer(values(bytes(201)))
    assert isinstance(script.error, BatchError)
    assert isinstance(script.error.results[0], ProtocolError)
    assert made == [3]


def test_an_error_of_one_key_is_raised_as_it_is_and_of_many_as_a_batch_error(desk: Desk) -> None:
    full = statuses(Status.OUT_OF_MEMORY)
    assert isinstance(desk.start(desk.ops.put(K0, b"", PLAIN)).answer(full).error, OutOfMemory)
    error = desk.start(desk.ops.batch_put({K0: b""}, PLAIN)).answer(full).error
    assert isinstance(error, BatchError)
    assert str(error).startswith("1 of 1 keys failed; first: OutOfMemory: key")
    assert not error.indeterminate


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ops.get(K0),
        lambda ops: ops.get_into(K0, bytearray(1)),
        lambda ops: ops.exists(K0),
        lambda ops: ops.delete(K0),
        lambda ops: ops.put(K0, b"", PLAIN),
        lambda ops: ops.expire(K0, 1),
    ],
)
def test_a_call_for_one_key_never_raises_a_batch_error(
    desk: Desk, call: Callable[[Operations], Any]
) -> None:
    script = desk.start(call(desk.ops)).give_up()
    assert isinstance(script.error, DeadlineExceeded)
    assert repr(K0) in str(script.error)


# --- flags


@pytest.mark.parametrize(
    ("call", "body"),
    [
        (lambda ops: ops.batch_exists([K0, K1]), wire.Exists([K0, K1])),
        (lambda ops: ops.batch_exists([K0, K1], touch=True), wire.Exists([K0, K1], True)),
        (lambda ops: ops.batch_delete([K0, K1]), wire.Delete([K0, K1])),
        (lambda ops: ops.pin([K0, K1], 1.5), wire.Pin([K0, K1], 1500)),
        (lambda ops: ops.unpin([K0, K1]), wire.Unpin([K0, K1])),
    ],
)
def test_flags_tell_which_keys_were_there(
    desk: Desk, call: Callable[[Operations], Any], body: wire.Body
) -> None:
    script = desk.start(call(desk.ops))
    assert script.request.body == body
    assert script.answer(statuses(0, Status.MISS)).result == [True, False]
    assert desk.start(call(desk.ops)).answer(statuses()).result == [True, True]


def test_flags_of_one_key(desk: Desk) -> None:
    assert desk.start(desk.ops.exists(K0)).answer(statuses()).result is True
    assert desk.start(desk.ops.exists(K0)).answer(statuses(Status.MISS)).result is False
    assert desk.start(desk.ops.delete(K0)).answer(statuses(Status.MISS)).result is False


def test_a_flag_among_statuses_to_ask_again_for(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_exists([K0, K1, K2]))
    script.answer(statuses(0, Status.MOVING, Status.MISS)).pause().routes()
    assert script.request.body.keys == [K1]
    assert script.answer(statuses()).result == [True, True, False]


def test_a_miss_beside_an_error_is_a_miss(desk: Desk) -> None:
    script = desk.start(desk.ops.pin([K0, K1], 1)).answer(statuses(Status.MISS, Status.QUOTA))
    assert isinstance(script.error, BatchError)
    assert script.error.results[0] is False


def test_expire(desk: Desk) -> None:
    script = desk.start(desk.ops.expire(K0, 2))
    assert script.request.body == wire.Expire([K0], 2000)
    assert script.answer(statuses()).error is None
    script = desk.start(desk.ops.expire(K0, None))
    assert script.request.body == wire.Expire([K0], 0)
    assert isinstance(script.answer(statuses(Status.MISS)).error, Miss)
    assert str(script.error) == f"key {K0!r} is not there"


# --- match


def matched(count: int, status: int = Status.MISS) -> Reply:
    return reply(wire.Matched(count, status))


@pytest.fixture
def halves() -> Desk:
    return Desk(table([A, B] * 4))


def test_a_match_ends_at_the_first_miss_of_any_owner(halves: Desk) -> None:
    keys = [K0, K1, key_in(2), key_in(3), key_in(4)]
    for from_a, from_b, count in [(3, 2, 5), (0, 2, 0), (3, 0, 1), (2, 1, 3), (1, 1, 2)]:
        script = halves.start(halves.ops.match_prefix(keys)).answer(
            matched(from_a), matched(from_b)
        )
        assert script.result == count


def test_a_match_asks_again_behind_what_is_known(halves: Desk) -> None:
    keys = [K0, K1, K2]
    script = halves.start(halves.ops.match_prefix(keys))
    script.answer(matched(1, Status.MOVING), matched(1)).pause().routes()
    assert script.request.body.keys == [K2]
    assert script.answer(matched(1)).result == 3


def test_a_match_does_not_ask_again_behind_a_known_miss(halves: Desk) -> None:
    keys = [K1, K0, K2]
    script = halves.start(halves.ops.match_prefix(keys))
    assert script.answer(matched(0), matched(0, Status.MOVING)).result == 0


def test_a_match_raises_the_error_of_a_key_before_the_end_only(halves: Desk) -> None:
    script = halves.start(halves.ops.match_prefix([K0, K1, K2]))
    script.answer(matched(1, Status.CORRUPT), matched(0))
    assert script.result == 1
    script = halves.start(halves.ops.match_prefix([K0, K1, K2]))
    script.answer(matched(1, Status.CORRUPT), matched(1))
    assert repr(K2) in str(script.error)


@pytest.mark.parametrize("nonsense", [matched(4), matched(1, Status.OK), values(b"")])
def test_a_match_that_makes_no_sense(desk: Desk, nonsense: Reply) -> None:
    script = desk.start(desk.ops.match_prefix([K0, K1, K2])).answer(nonsense)
    assert isinstance(script.error, ProtocolError)


def test_a_match_of_nothing(desk: Desk) -> None:
    assert desk.start(desk.ops.match_prefix([])).result == 0


# --- values larger than a message: put


def allocated(id: int = 7, status: int = 0) -> Reply:
    return reply(wire.Allocated(bytes([status]) if status else b"", [id], [0]))


BIG = bytes(range(55))


def start_put(desk: Desk, options: PutOptions = PLAIN) -> Script:
    return desk.start(desk.ops.put(K0, BIG, options))


def test_a_large_value_is_allocated_written_in_waves_and_committed(small: Desk) -> None:
    script = start_put(small)
    assert (script.request.to, script.request.body) == (A, wire.Alloc([K0], [55], PLAIN))
    script.answer(allocated())
    first = list(script.requests)
    script.answer(*[statuses()] * 4)
    second = list(script.requests)
    assert [r.body for r in first + second] == [wire.Write(7, at) for at in range(0, 55, 10)]
    assert b"".join(r.payload[0] for r in first + second) == BIG
    script.answer(statuses(), statuses())
    assert (script.request.to, script.request.body) == (A, wire.Commit([7]))
    assert script.answer(statuses()).result == 1


def written(script: Script, id: int = 7) -> Script:
    return script.answer(allocated(id)).answer(*[statuses()] * 4).answer(statuses(), statuses())


def test_large_and_small_values_of_one_batch(small: Desk) -> None:
    script = small.start(small.ops.batch_put({K1: b"s", K0: BIG, K2: b"t"}, PLAIN))
    assert [r.kind for r in script.requests] == [Kind.PUT, Kind.PUT]
    script.answer(statuses(), statuses(Status.OUT_OF_MEMORY))
    written(script).answer(statuses())
    assert isinstance(script.error, BatchError)
    one, big, full = script.error.results
    assert (one, big) == (1, 1)
    assert isinstance(full, OutOfMemory)


def test_a_large_put_that_fails_is_one_keys_failure(small: Desk) -> None:
    script = small.start(small.ops.batch_put({K1: b"s", K0: BIG}, PLAIN)).answer(statuses())
    script.answer(allocated(0, Status.QUOTA))
    assert isinstance(script.error, BatchError)
    assert script.error.results[0] == 1


@pytest.mark.parametrize(
    ("answer", "result"), [(allocated(0, Status.EXISTS), 0), (allocated(0), 1)]
)
def test_nothing_is_written_where_the_object_is_there(
    small: Desk, answer: Reply, result: int
) -> None:
    assert start_put(small).answer(answer).result == result


def test_a_large_put_that_finds_the_key_at_the_commit_stored_nothing(small: Desk) -> None:
    script = written(start_put(small, PutOptions(if_absent=True)))
    assert script.answer(statuses(Status.EXISTS)).result == 0


@pytest.mark.parametrize("answer", [statuses(Status.CONFLICT), BROKEN, refused(Fault.NO_SESSION)])
def test_a_large_put_whose_writing_fails_begins_again(small: Desk, answer: Any) -> None:
    script = start_put(small).answer(allocated()).answer(statuses(), answer, statuses(), statuses())
    assert (script.request.to, script.request.body) == (A, wire.Abort([7]))
    assert script.effect.deadline_ns == small.now + 1_000_000_000, "waits for it a second at most"
    script.answer(statuses()).pause().routes(table([B] * BUCKETS, revision=2))
    assert (script.request.to, script.request.kind) == (B, Kind.ALLOC)
    assert written(script, 8).answer(statuses()).result == 1


@pytest.mark.parametrize(
    "answer",
    [statuses(Status.CONFLICT), statuses(Status.NOT_PRIMARY), statuses(Status.MOVING),
     statuses(Status.STALLED)],
)  # fmt: skip
def test_a_commit_that_did_not_happen_begins_again(small: Desk, answer: Reply) -> None:
    script = written(start_put(small)).answer(answer)
    while isinstance(script.effect, Pause) or script.request.kind == Kind.ROUTES:
        script = script.pause() if isinstance(script.effect, Pause) else script.routes()
    assert script.request.kind == Kind.ALLOC
    assert written(script, 8).answer(statuses()).result == 1


def test_a_commit_without_an_answer_is_repeated_at_its_member(small: Desk) -> None:
    script = written(start_put(small))
    first = script.request
    script.answer(BROKEN).pause().routes(table([B] * BUCKETS, members=[A, B], revision=2))
    assert script.request is first
    assert script.answer(statuses()).result == 1


def test_a_commit_whose_member_left_is_indeterminate(small: Desk) -> None:
    script = written(start_put(small)).answer(BROKEN).pause()
    script.routes(table([B] * BUCKETS, revision=2))
    assert isinstance(script.error, Indeterminate)
    assert repr(K0) in str(script.error)


def test_a_commit_whose_bucket_began_anew_begins_again(small: Desk) -> None:
    script = written(start_put(small)).answer(BROKEN).pause()
    script.routes(table([B] * BUCKETS, generations=[2] * BUCKETS, revision=2)).pause().routes()
    assert (script.request.to, script.request.kind) == (B, Kind.ALLOC)


def test_a_commit_that_did_not_leave_begins_again(small: Desk) -> None:
    script = written(start_put(small)).answer(BROKEN, sent=False).pause().routes()
    assert script.request.kind == Kind.ALLOC


def test_a_commit_without_an_answer_until_the_deadline_is_indeterminate(small: Desk) -> None:
    assert isinstance(written(start_put(small)).answer(LATE).error, Indeterminate)


def test_a_commit_with_a_nonsensical_answer_is_indeterminate(small: Desk) -> None:
    assert isinstance(written(start_put(small)).answer(values(b"")).error, Indeterminate)


def test_a_large_put_is_refused_by_name(small: Desk) -> None:
    script = start_put(small).answer(refused(Fault.BAD_REQUEST, "over value_bytes_max"))
    assert isinstance(script.error, ProtocolError)
    script = start_put(small).answer(refused(Fault.CLUSTER))
    assert isinstance(script.error, ClusterMismatch)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(allocated(0, Status.MOVING), Stalled), (BROKEN, Unreachable), (LATE, DeadlineExceeded),
     (refused(Fault.NOT_READY), Unreachable)],
)  # fmt: skip
def test_a_large_put_that_nobody_takes_changes_nothing(
    small: Desk, answer: Any, kind: type[P2PKVError]
) -> None:
    script = start_put(small).pass_time(9).answer(answer).give_up()
    assert type(script.error) is kind
    assert repr(K0) in str(script.error)


def test_a_large_put_waits_for_an_owner() -> None:
    desk = Desk(table([None] * BUCKETS, members=[A]), SMALL)
    script = start_put(desk).pause().routes(table(revision=2))
    assert script.request.kind == Kind.ALLOC


def test_a_large_put_whose_writing_fails_until_the_deadline(small: Desk) -> None:
    script = start_put(small).answer(allocated()).answer(*[LATE] * 4).answer(LATE)
    assert isinstance(script.error, DeadlineExceeded)


@pytest.mark.parametrize(
    "nonsense",
    [reply(wire.Allocated(b"", [], [])), statuses(), reply(wire.Allocated(b"\0\0", [1], [0]))],
)
def test_a_large_put_with_a_nonsensical_answer(small: Desk, nonsense: Reply) -> None:
    assert isinstance(start_put(small).answer(nonsense).error, ProtocolError)


# --- values larger than a message: get


def opened(token: int = 9, size: int = 55, status: int = 0) -> Reply:
    return reply(wire.Opened(bytes([status]) if status else b"", [token], [size]))


def pieces(*contents: bytes) -> list[Reply]:
    return [values(c) for c in contents]


def start_get(desk: Desk, buffer: Any = None) -> Script:
    operation = desk.ops.get(K0) if buffer is None else desk.ops.get_into(K0, buffer)
    script = desk.start(operation).answer(values(Status.LARGE))
    if buffer is None:
        script.answer(values(Status.LARGE))
    assert script.request.body == wire.Open([K0])
    return script


def read(script: Script) -> Script:
    first = [r.body for r in script.requests]
    script.answer(*pieces(BIG[:10], BIG[10:20], BIG[20:30], BIG[30:40]))
    assert first + [r.body for r in script.requests] == [
        wire.Read(9, at, min(10, 55 - at)) for at in range(0, 55, 10)
    ]
    return script.answer(*pieces(BIG[40:50], BIG[50:]))


def test_a_large_value_is_opened_read_in_waves_and_released(small: Desk) -> None:
    script = read(start_get(small).answer(opened()))
    assert script.request.body == wire.Release([9])
    assert script.answer(statuses()).result == BIG


def test_a_large_value_goes_into_a_buffer(small: Desk) -> None:
    buffer = bytearray(60)
    script = read(start_get(small, buffer).answer(opened()))
    assert script.answer(BROKEN).result == 55, "the value is there, whatever became of the token"
    assert buffer == BIG + bytes(5)


def test_a_large_value_that_does_not_fit_the_buffer(small: Desk) -> None:
    script = start_get(small, bytearray(54)).answer(opened())
    assert script.request.body == wire.Release([9])
    assert isinstance(script.answer(statuses()).error, TooLarge)


def test_large_values_among_others(small: Desk) -> None:
    script = small.start(small.ops.batch_get([K0, K2, K1]))
    script.answer(values(Status.LARGE, b"two"), values(Status.MISS)).answer(
        opened(0, 0, Status.MISS)
    )
    assert script.result == [None, b"two", None]


@pytest.mark.parametrize(
    "answer",
    [reply(wire.Values(bytes([Status.CONFLICT]), [0], [])), BROKEN, refused(Fault.NO_SESSION)],
)
def test_a_large_value_whose_reading_fails_is_read_anew(small: Desk, answer: Any) -> None:
    script = start_get(small).answer(opened()).answer(values(BIG[:10]), answer, BROKEN, BROKEN)
    script.answer(BROKEN).pause().routes(table([B] * BUCKETS, revision=2))
    assert script.request.to == B
    assert read(script.answer(opened())).answer(statuses()).result == BIG


def test_the_size_of_a_large_value_is_not_trusted(small: Desk) -> None:
    script = start_get(small).answer(opened(size=201))
    assert isinstance(script.error, ProtocolError)
    assert "201 bytes is over value_bytes_max" in str(script.error)


@pytest.mark.parametrize(
    "nonsense",
    [
        values(bytes(9)),
        values(bytes(11)),
        values(b"a", b"b"),
        statuses(),
        refused(Fault.BAD_REQUEST),
    ],
)
def test_a_piece_that_makes_no_sense(small: Desk, nonsense: Reply) -> None:
    script = start_get(small).answer(opened()).answer(nonsense, *pieces(*[bytes(10)] * 3))
    assert isinstance(script.error, ProtocolError)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(opened(0, 0, Status.CORRUPT), P2PKVError), (statuses(), ProtocolError),
     (reply(wire.Opened(b"", [], [])), ProtocolError)],
)  # fmt: skip
def test_an_open_that_fails(small: Desk, answer: Reply, kind: type[P2PKVError]) -> None:
    assert isinstance(start_get(small).answer(answer).error, kind)


def test_reading_that_fails_until_the_deadline(small: Desk) -> None:
    script = start_get(small).answer(opened()).answer(*[LATE] * 4).answer(LATE)
    assert isinstance(script.error, DeadlineExceeded)


def test_the_bound_of_a_message_decides_what_is_large(small: Desk) -> None:
    assert small.start(small.ops.put(K0, bytes(40), PLAIN)).request.kind == Kind.PUT
    assert small.start(small.ops.put(K0, bytes(41), PLAIN)).request.kind == Kind.ALLOC


# --- scan


def page(*keys: bytes, finished: int = 0, status: int = 0) -> Reply:
    return reply(wire.Page(list(keys), [3] * len(keys), finished, status))


def start_scan(desk: Desk, cursor: ScanCursor) -> Script:
    return desk.start(desk.ops.scan_page(cursor))


def test_a_scan_asks_each_owner_for_all_of_its_buckets(halves: Desk) -> None:
    cursor = ScanCursor(b"", 100)
    script = start_scan(halves, cursor)
    assert (script.request.to, script.request.body) == (A, wire.Scan([0, 2, 4, 6], b"", b"", 100))
    script.answer(page(K0, K2, finished=4))
    assert script.result == [(K0, 3), (K2, 3)]
    script = start_scan(halves, cursor)
    assert script.request.body.buckets == [1, 3, 5, 7]
    assert script.answer(page(finished=4)).result == []
    assert cursor.done


def test_a_scan_goes_on_behind_the_last_key_of_a_bucket(halves: Desk) -> None:
    cursor = ScanCursor(b"", 2)
    start_scan(halves, cursor).answer(page(K0, finished=0))
    script = start_scan(halves, cursor)
    assert script.request.body == wire.Scan([0, 2, 4, 6], K0, b"", 2)
    script.answer(page(K2, finished=2))
    script = start_scan(halves, cursor)
    assert script.request.body == wire.Scan([1, 3, 5, 7], b"", b"", 2), "from the next bucket on"


def test_a_bucket_that_moved_within_a_scan_is_asked_for_at_its_new_owner(halves: Desk) -> None:
    cursor = ScanCursor(b"", 2)
    start_scan(halves, cursor).answer(page(K0, finished=0))
    halves.router.install(table([B] * BUCKETS, revision=2))
    script = start_scan(halves, cursor)
    assert (script.request.to, script.request.body.after) == (B, K0)
    assert script.request.body.buckets == list(range(8))


def test_a_scan_of_one_tag_asks_for_one_bucket(desk: Desk) -> None:
    script = start_scan(desk, ScanCursor(b"{tag}x", 9))
    assert script.request.body.buckets == [ring.bucket_of(b"{tag}", BUCKETS)]


def test_a_bucket_that_is_not_served_ends_a_page_and_is_asked_for_again(halves: Desk) -> None:
    cursor = ScanCursor(b"", 9)
    script = start_scan(halves, cursor).answer(page(K0, finished=1, status=Status.MOVING))
    assert script.result == [(K0, 3)]
    script = start_scan(halves, cursor).answer(page(finished=1, status=Status.MOVING)).pause()
    script.routes(table([B] * BUCKETS, revision=2))
    assert (script.request.to, script.request.body.buckets) == (B, [2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("answer", [BROKEN, refused(Fault.NO_SESSION)])
def test_a_lost_page_is_asked_for_again(desk: Desk, answer: Any) -> None:
    script = start_scan(desk, ScanCursor(b"", 9)).answer(answer).pause().routes()
    assert script.answer(page(K0, finished=8)).result == [(K0, 3)]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(page(status=Status.STALLED), Stalled), (BROKEN, Unreachable), (LATE, DeadlineExceeded)],
)
def test_a_scan_ends_at_its_deadline(desk: Desk, answer: Any, kind: type[P2PKVError]) -> None:
    script = start_scan(desk, ScanCursor(b"pre", 9)).pass_time(9).answer(answer)
    assert type(script.error) is kind
    assert "prefix b'pre'" in str(script.error)


def test_a_scan_waits_for_an_owner_until_its_deadline() -> None:
    desk = Desk(table([None] * BUCKETS, members=[A]))
    script = start_scan(desk, ScanCursor(b"", 9)).pause().routes(table(revision=2))
    assert script.request.kind == Kind.SCAN
    desk = Desk(table([None] * BUCKETS, members=[A]))
    script = start_scan(desk, ScanCursor(b"", 9)).pause().pass_time(9).routes()
    assert isinstance(script.error, Unreachable)
    assert "no owner" in str(script.error)


@pytest.mark.parametrize(
    "nonsense",
    [page(), page(finished=9), page(K1, finished=0), page(status=Status.EXISTS), statuses(),
     refused(Fault.BAD_REQUEST), reply(wire.Page([K0], [], 1, 0))],
)  # fmt: skip
def test_a_page_that_makes_no_sense_ends_the_scan(desk: Desk, nonsense: Reply) -> None:
    script = start_scan(desk, ScanCursor(b"", 9)).answer(nonsense)
    assert isinstance(script.error, ProtocolError)


def test_a_finished_scan_asks_nobody(desk: Desk) -> None:
    cursor = ScanCursor(b"", 9)
    start_scan(desk, cursor).answer(page(finished=8))
    assert start_scan(desk, cursor).result == []


def test_a_cursor_that_has_not_begun_is_not_done_and_finishes_nothing() -> None:
    cursor = ScanCursor(b"", 9)
    assert not cursor.done
    cursor.finish([1], 0)
    assert cursor.left is None


# --- deleting ranges


def deleted(count: int, finished: int = 0, status: int = 0) -> Reply:
    return reply(wire.Deleted(count, finished, status))


def start_delete(desk: Desk) -> Script:
    return desk.start(desk.ops.delete_range("pre"))


def test_a_range_is_deleted_at_all_owners(halves: Desk) -> None:
    script = start_delete(halves)
    assert script.request.body == wire.DeleteRange([0, 2, 4, 6], b"pre", 4096)
    script.answer(deleted(4096, 4))
    assert (script.request.to, script.request.body.buckets) == (B, [1, 3, 5, 7])
    script.answer(deleted(5, 1))
    assert script.request.body.buckets == [3, 5, 7]
    assert script.answer(deleted(0, 3)).result == 4101


def test_a_range_goes_on_in_a_bucket_that_is_not_through(desk: Desk) -> None:
    script = start_delete(desk).answer(deleted(4096, 0))
    assert script.request.body.buckets == list(range(8))
    assert script.answer(deleted(1, 8)).result == 4097


def test_a_lost_delete_is_repeated_as_the_same_request(desk: Desk) -> None:
    script = start_delete(desk)
    first = script.request
    script.answer(BROKEN).pause().routes()
    assert script.request is first
    assert script.answer(deleted(3, 8)).result == 3


def test_a_delete_whose_member_left_goes_to_the_next_owner(desk: Desk) -> None:
    script = start_delete(desk).answer(BROKEN).pause().routes(table([B] * BUCKETS, revision=2))
    script.pause().routes()
    assert script.request.to == B
    assert script.answer(deleted(0, 8)).result == 0


def test_a_delete_that_did_not_leave_is_sent_anew(desk: Desk) -> None:
    script = start_delete(desk)
    first = script.request
    script.answer(BROKEN, sent=False).pause().routes()
    assert script.request is not first


@pytest.mark.parametrize(
    ("answer", "sent", "kind"),
    [
        (deleted(0, 0, Status.STALLED), True, Stalled),
        (BROKEN, False, Unreachable),
        (LATE, False, DeadlineExceeded),
        (LATE, True, Indeterminate),
        (deleted(1, 0, Status.STALLED), True, Indeterminate),
        (refused(Fault.BAD_REQUEST), True, ProtocolError),
    ],
)
def test_a_delete_that_ends_early_is_indeterminate_if_some_may_be_gone(
    desk: Desk, answer: Any, sent: bool, kind: type[P2PKVError]
) -> None:
    script = start_delete(desk).pass_time(9).answer(answer, sent=sent)
    assert type(script.error) is kind
    assert "prefix b'pre'" in str(script.error) or kind is ProtocolError


def test_a_lost_delete_without_an_answer_until_the_deadline(desk: Desk) -> None:
    script = start_delete(desk).answer(BROKEN).pause().pass_time(9).routes()
    assert isinstance(script.error, Indeterminate)


def test_a_repeated_delete_to_a_member_that_forgot(desk: Desk) -> None:
    script = start_delete(desk).answer(BROKEN).pause().routes().answer(refused(Fault.FORGOTTEN))
    assert isinstance(script.error, Indeterminate)


@pytest.mark.parametrize("nonsense", [deleted(0), deleted(0, 9), values(b"")])
def test_a_nonsensical_answer_to_a_delete(desk: Desk, nonsense: Reply) -> None:
    assert isinstance(start_delete(desk).answer(nonsense).error, ProtocolError)


# --- stats


def test_stats_are_those_of_the_members_that_answer(halves: Desk) -> None:
    script = halves.start(halves.ops.stats()).routes()
    assert {r.to for r in script.requests} == {A, B}
    figures = wire.NodeStats(A, {}, {"up_s": 1.0})
    assert script.answer(reply(figures), LATE).result == {"a@1": figures}


def test_conflicts_are_not_hidden(desk: Desk) -> None:
    script = desk.start(desk.ops.put(K0, b"", PLAIN)).answer(statuses(Status.CONFLICT))
    assert isinstance(script.error, Conflict)
