"""Frames of messages: what goes through as it was, and what is refused."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from p2pkv import wire
from p2pkv.errors import ProtocolError
from p2pkv.types import Member
from p2pkv.wire import (
    BODIES,
    PREFIX,
    PREFIX_BYTES,
    VERSION,
    Kind,
    decode,
    encode,
    packed,
    peek,
    placed,
)

HEAD_MAX = 1 << 20
KINDS = sorted(BODIES)


# --- bodies of every kind, from the types of their fields


def strategy_of(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case msgspec.inspect.IntType(gt=gt, ge=ge, lt=lt, le=le):
            low = max(x for x in (ge, None if gt is None else gt + 1, -(1 << 63)) if x is not None)
            high = min(
                x for x in (le, None if lt is None else lt - 1, (1 << 64) - 1) if x is not None
            )
            return st.integers(low, high)
        case msgspec.inspect.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=min(high or 40, 40))
        case msgspec.inspect.StrType(max_length=high):
            return st.text(max_size=min(high or 20, 20))
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.ListType(item_type=item, min_length=low):
            return st.lists(strategy_of(item), min_size=low or 0, max_size=5)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(strategy_of(item), max_size=3).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(strategy_of, items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy_of(key), strategy_of(value), max_size=4)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(strategy_of, types))
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{f.name: strategy_of(f.type) for f in fields})
    raise NotImplementedError(kind)


BODY = {kind: strategy_of(msgspec.inspect.type_info(body)) for kind, body in BODIES.items()}
MESSAGE = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), BODY[kind]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_message_comes_back_as_it_was(kind: Kind, data: st.DataObject) -> None:
    body = data.draw(BODY[kind])
    request, revision = data.draw(st.tuples(*[st.integers(0, (1 << 64) - 1)] * 2))
    head = decode(encode(kind, request, revision, body), HEAD_MAX)
    assert (head.kind, head.request, head.revision, head.body) == (kind, request, revision, body)
    assert type(head.body) is BODIES[kind]


def test_every_kind_of_message_is_covered() -> None:
    assert set(Kind) - set(BODIES) <= {Kind.HEARTBEAT}  # gossip has a codec of its own


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_any_buffer_is_decoded(buffer: Callable[[bytes], Any]) -> None:
    frame = encode(Kind.GET, 1, 2, wire.Get([b"k"]))
    assert decode(buffer(frame), HEAD_MAX).body == wire.Get([b"k"])


def test_what_was_decoded_does_not_share_the_frames_memory() -> None:
    frame = bytearray(encode(Kind.GET, 1, 2, wire.Get([b"key"])))
    body = decode(frame, HEAD_MAX).body
    frame[:] = bytes(len(frame))
    assert body == wire.Get([b"key"])


# --- what is refused


def raw(kind: int, body: Any, version: int = VERSION) -> bytes:
    return PREFIX.pack(version, kind, 0, 7, 0) + msgspec.msgpack.encode(body)


def refused(frame: bytes, head_max: int = HEAD_MAX) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frame, head_max)
    return str(caught.value)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused_but_its_number_is_known(version: int) -> None:
    frame = raw(Kind.GET, "whatever that version says", version)
    assert refused(frame) == f"protocol version {version}; this is version 1"
    assert peek(frame) == (version, Kind.GET, 7)


@pytest.mark.parametrize("kind", [6, 49, 80, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    assert refused(raw(kind, [])) == f"unknown message kind {kind}"


@pytest.mark.parametrize("size", [0, 1, PREFIX_BYTES - 1])
def test_a_short_head_is_refused(size: int) -> None:
    frame = encode(Kind.PING, 1, 1, wire.Empty())[:size]
    complaint = f"a head of {size} bytes is shorter than {PREFIX_BYTES}"
    assert refused(frame) == complaint
    with pytest.raises(ProtocolError, match=complaint):
        peek(frame)


def test_a_head_without_a_body_is_refused() -> None:
    assert refused(encode(Kind.PING, 1, 1, wire.Empty())[:PREFIX_BYTES]).startswith("PING: ")


def test_a_head_over_its_limit_is_refused_by_its_size_alone() -> None:
    frame = encode(Kind.GET, 1, 1, wire.Get([b"k"]))
    assert decode(frame, len(frame)).body.keys == [b"k"]
    assert (
        refused(frame, len(frame) - 1) == f"a head of {len(frame)} bytes is over {len(frame) - 1}"
    )
    assert refused(bytes(1000), 999) == "a head of 1000 bytes is over 999"


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        (Kind.GET, [[b""]], "length >= 1"),
        (Kind.GET, [[bytes(1025)]], "length <= 1024"),
        (Kind.GET, [[b"k"] * 65537], "length <= 65536"),
        (Kind.GET, [["text"]], "Expected `bytes`, got `str`"),
        (Kind.GET, [b"k"], "Expected `array`, got `bytes`"),
        (Kind.GET, [[b"k"], 1], "Expected `bool`, got `int`"),
        (Kind.GET, {"keys": [b"k"]}, "Expected `array`, got `object`"),
        (Kind.GET, [], "at least length 1"),
        (Kind.GET, None, "Expected `array`, got `None`"),
        (Kind.PING, ["more"], "at most length 0"),
        (Kind.DELETE, [[b"k"], "more"], "at most length 1"),
        (Kind.PUT, [[b"k"], [-1], []], ">= 0"),
        (Kind.PUT, [[b"k"], [1 << 62], []], "<= 4611686018427387903"),
        (Kind.PUT, [[b"k"], [1.5], []], "Expected `int`, got `float`"),
        (Kind.PUT, [[b"k"], [1], [0]], "Expected `bool`, got `int`"),
        (Kind.PUT, [[b"k"], [1], [False, False, False, False, -1]], ">= 0"),
        (Kind.PUT, [[b"k"], [1], [False, False, False, False, 0, 1, 1]], "at most length 6"),
        (Kind.VALUES, [b"", [-1], []], ">= 0"),
        (Kind.VALUES, [b"", [1], [-1]], ">= 0"),
        (Kind.SCAN, [[], b"", b"", 1], "length >= 1"),
        (Kind.SCAN, [[65536], b"", b"", 1], "<= 65535"),
        (Kind.SCAN, [[0], b"", bytes(1025), 1], "length <= 1024"),
        (Kind.SCAN, [[0], b"", b"", 0], ">= 1"),
        (Kind.PIN, [[b"k"], 0], ">= 1"),
        (Kind.PAGE, [[], [], -1, 0], ">= 0"),
        (Kind.PAGE, [[], [], 0, 256], "<= 255"),
        (Kind.MATCHED, [-1, 0], ">= 0"),
        (Kind.DELETED, [0, 0, -1], ">= 0"),
        (Kind.HELLO, ["c" * 257], "length <= 256"),
        (Kind.ERROR, [1, "m" * 1025], "length <= 1024"),
    ],
)  # fmt: skip
def test_a_body_that_breaks_a_limit_or_a_type_is_refused(
    kind: Kind, body: Any, complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(raw(kind, body), HEAD_MAX)


def test_keys_at_their_limits_go_through() -> None:
    keys = [b"k", bytes(1024)]
    assert decode(raw(Kind.GET, [keys]), HEAD_MAX).body.keys == keys
    assert len(decode(raw(Kind.GET, [[b"k"] * 65536]), HEAD_MAX).body.keys) == 65536


def test_trailing_bytes_are_refused() -> None:
    assert "trailing" in refused(encode(Kind.PING, 1, 1, wire.Empty()) + b"\0")


@pytest.mark.parametrize("count", range(1, 30))
def test_a_cut_off_body_is_refused(count: int) -> None:
    frame = encode(Kind.PUT, 1, 1, wire.Put([b"key"], [5], wire.PutOptions()))
    assert refused(frame[: max(PREFIX_BYTES, len(frame) - count)]).startswith("PUT: ")


ARRAY, MAP, BIN, STR = b"\xdd", b"\xdf", b"\xc6", b"\xdb"
HUGE = b"\xff\xff\xff\xf0"


@pytest.mark.parametrize(
    ("kind", "start", "announced"),
    [
        (Kind.GET, b"", ARRAY),
        (Kind.GET, b"\x91", ARRAY),
        (Kind.GET, b"\x91\x91", BIN),
        (Kind.STATUSES, b"\x91", BIN),
        (Kind.ERROR, b"\x92\x01", STR),
        (Kind.TABLE, b"\x97\xa1f\x01\x01", ARRAY),
        (Kind.TABLE, b"\x97\xa1f\x01\x01\x90\x91", ARRAY),
        (Kind.TABLE, b"\x97\xa1f\x01\x01\x90\x90", ARRAY),
        (Kind.NODE_STATS, b"\x93\x92\xa1a\x01", MAP),
        (Kind.SNAPSHOT, b"\x96\x01\x01\x01\x01", ARRAY),
        (Kind.ALLOCATED, b"\x93\xc4\x00", ARRAY),
    ],
)
def test_nothing_is_allocated_by_an_announced_size(
    kind: Kind, start: bytes, announced: bytes
) -> None:
    frame = PREFIX.pack(VERSION, kind, 0, 1, 0) + start + announced + HUGE + b"\x01"
    tracemalloc.start()
    try:
        refused(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x92\xc0"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_deep_nesting_is_refused(kind: Kind, opening: bytes) -> None:
    for prefix in (b"", b"\x91", b"\x92\xa1c"):
        refused(PREFIX.pack(VERSION, kind, 0, 1, 0) + prefix + opening * 200_000)


# --- fuzzing


def mutated(frame: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(damaged) + 1)
        match chance.randrange(5):
            case 0 if at < len(damaged):
                damaged[at] = chance.randrange(256)
            case 1 if at < len(damaged):
                damaged[at] ^= 1 << chance.randrange(8)
            case 2:
                del damaged[at : at + chance.randint(1, 8)]
            case 3:
                damaged[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                piece = damaged[at : at + chance.randint(1, 16)]
                damaged[at:at] = piece
    return bytes(damaged)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(message=MESSAGE, seed=st.integers(0, 1 << 32))
def test_a_damaged_frame_is_decoded_to_its_type_or_refused(
    message: tuple[Kind, wire.Body], seed: int
) -> None:
    chance = random.Random(seed)
    frame = encode(message[0], 1, 1, message[1])
    for _ in range(20):
        damaged = mutated(frame, chance)
        try:
            head = decode(damaged, HEAD_MAX)
        except ProtocolError:
            continue
        assert type(head.body) is BODIES[Kind(head.kind)]
        assert decode(encode(Kind(head.kind), 1, 1, head.body), HEAD_MAX).body == head.body or (
            head.kind == Kind.NODE_STATS  # a NaN among the figures differs from itself
        )


@settings(max_examples=300, deadline=None)
@given(frame=st.binary(max_size=200))
@example(frame=b"")
def test_noise_is_refused_or_decoded_but_never_raises_anything_else(frame: bytes) -> None:
    for candidate in (frame, PREFIX.pack(VERSION, Kind.PUT, 0, 1, 1) + frame):
        try:
            decode(candidate, HEAD_MAX)
        except ProtocolError:
            continue


# --- values in payloads


def contents(views: Sequence[memoryview]) -> list[bytes]:
    return [bytes(v) for v in views]


@pytest.mark.parametrize(
    ("frames", "sizes", "values"),
    [
        ([], [], []),
        ([], [0], [b""]),
        ([], [0, 0, 0], [b""] * 3),
        ([b"abc"], [3], [b"abc"]),
        ([b"abc"], [1, 2], [b"a", b"bc"]),
        ([b"abc"], [0, 1, 0, 2, 0], [b"", b"a", b"", b"bc", b""]),
        ([b"ab", b"c"], [2, 1], [b"ab", b"c"]),
        ([b"ab", b"c"], [0, 1, 1, 0, 0, 1, 0], [b"", b"a", b"b", b"", b"", b"c", b""]),
    ],
)
def test_packed_values(frames: list[bytes], sizes: list[int], values: list[bytes]) -> None:
    assert contents(packed(frames, sizes)) == values
    assert contents(placed(frames, sizes, [])) == values
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    assert contents(placed(frames, sizes, starts)) == values


@pytest.mark.parametrize(
    ("frames", "sizes", "complaint"),
    [
        ([], [1], "a payload frame of 0 bytes for a value of 1"),
        ([b"a"], [2], "a payload frame of 1 bytes for a value of 2"),
        ([b"ab", b"cd"], [1, 2, 1], "spans two payload frames"),
        ([b"ab", b"cd"], [4], "a payload frame of 2 bytes for a value of 4"),
        ([b"ab"], [1], "longer than the announced"),
        ([b"ab"], [], "longer than the announced"),
        ([b"ab", b"c"], [2], "longer than the announced"),
        ([b"ab", b""], [2], "longer than the announced"),
        ([b"", b"ab"], [2], "a payload frame of 0 bytes for a value of 2"),
    ],
)
def test_packed_values_that_do_not_match_the_payload(
    frames: list[bytes], sizes: list[int], complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        packed(frames, sizes)


@pytest.mark.parametrize(
    ("frames", "sizes", "starts", "values"),
    [
        ([b"ab--cd"], [2, 2], [0, 4], [b"ab", b"cd"]),
        ([b"ab--cd"], [2, 0, 2], [0, 6, 4], [b"ab", b"", b"cd"]),
        ([b"-ab", b"cd-"], [2, 2], [1, 3], [b"ab", b"cd"]),
        ([b"-ab", b"", b"xx", b"cd-"], [2, 0, 2], [1, 3, 5], [b"ab", b"", b"cd"]),
        ([b"ab", b"cd"], [0, 2, 0, 2, 0], [0, 0, 2, 2, 4], [b"", b"ab", b"", b"cd", b""]),
        ([], [0, 0], [0, 0], [b"", b""]),
    ],
)
def test_values_at_positions(
    frames: list[bytes], sizes: list[int], starts: list[int], values: list[bytes]
) -> None:
    assert contents(placed(frames, sizes, starts)) == values


@pytest.mark.parametrize(
    ("frames", "sizes", "starts", "complaint"),
    [
        ([b"abc"], [1], [0, 1], "2 positions for 1 values"),
        ([b"abc"], [2], [2], "outside of the payload"),
        ([b"abc"], [1], [3], "outside of the payload"),
        ([b"abc"], [1], [1 << 61], "outside of the payload"),
        ([], [1], [0], "outside of the payload"),
        ([b"ab", b"cd"], [1], [4], "outside of the payload"),
        ([b"ab", b"cd"], [2], [1], "spans two payload frames"),
        ([b"ab", b"cd"], [2, 1], [2, 0], "spans two payload frames"),
        ([b"ab", b"cd"], [3], [2], "spans two payload frames"),
        ([b"abc"], [1], [-1], "outside of the payload"),
        ([b"abc"], [1], [-3], "outside of the payload"),
        ([b"abc"], [2], [-3], "outside of the payload"),
        ([b"abc"], [-1], [2], "outside of the payload"),
    ],
)
def test_positions_that_do_not_match_the_payload(
    frames: list[bytes], sizes: list[int], starts: list[int], complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        placed(frames, sizes, starts)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_values_come_back_from_any_payload_that_holds_them(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.binary(max_size=6), max_size=8))
    frames, starts, at = [b""], [], 0
    for value in values:
        if frames[-1] and data.draw(st.booleans()):
            frames.append(b"")
        gap = data.draw(st.binary(max_size=2))
        starts.append(at + len(gap))
        frames[-1] += gap + value
        at += len(gap) + len(value)
    frames = [f for f in frames if f]
    sizes = [len(v) for v in values]
    assert contents(placed(frames, sizes, starts)) == values if starts else not values


def test_views_are_not_copies() -> None:
    frame = bytearray(b"abcd")
    one, two = packed([frame], [2, 2])
    frame[0] = ord("x")
    assert (bytes(one), bytes(two)) == (b"xb", b"cd")


def test_what_must_not_run_twice_are_requests_that_change_something() -> None:
    assert {
        Kind.PUT, Kind.FILLED, Kind.DELETE, Kind.COMMIT, Kind.DELETE_RANGE, Kind.PIN, Kind.UNPIN,
        Kind.EXPIRE,
    } == wire.MUTATING  # fmt: skip


def test_the_members_of_a_hello_go_through() -> None:
    hello = wire.Hello("c", Member("n", 3))  # type: ignore[arg-type]
    assert decode(encode(Kind.HELLO, 0, 0, hello), HEAD_MAX).body == hello
