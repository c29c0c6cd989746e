"""Values in several buffers, parts of values, and memory by address, on every way to a node."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ways import KIB, MIB, WAYS, a_client, a_node

from p2pkv import NodeThread
from p2pkv.errors import BatchError, InvalidArgument, OutOfRange, ProtocolError, TooLarge
from p2pkv.memory import RegisteredMemory
from p2pkv.parts import cut, fill, flat, joined, size_of, sizes_of
from p2pkv.wire import gathered


@pytest.fixture(scope="module")
def node() -> Iterator[NodeThread]:
    with a_node() as node:
        yield node


@pytest.fixture(scope="module", params=WAYS)
def kv(node: NodeThread, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client that reaches the node in one of the ways there are."""
    with a_client(node, request.param) as client:
        yield client


def pieces(data: bytes, *ends: int) -> list[memoryview]:
    """Cut at these places, each piece in memory of its own."""
    marks = [0, *ends, len(data)]
    return [memoryview(bytearray(data[a:b])) for a, b in pairwise(marks)]


# --- gather and scatter


@pytest.mark.parametrize("size", [0, 1, 5000, 200 * KIB, 900 * KIB, 3 * MIB + 1])
def test_a_value_is_gathered_from_parts_and_scattered_into_others(kv: Any, size: int) -> None:
    value = os.urandom(size)
    assert kv.put_from("k", pieces(value, size // 3, size // 3, size // 2)) == 1
    assert kv.get("k") == value
    target = pieces(bytes(size + 10), size // 5, size // 2, size // 2)
    assert kv.get_into("k", target) == size
    assert b"".join(target) == value + bytes(10)


def test_parts_larger_than_what_is_joined_into_one_frame_arrive_as_they_are(kv: Any) -> None:
    values = [os.urandom(n * 100 * KIB) for n in (3, 1, 4, 2)]
    parts = [pieces(v, 290 * KIB if len(v) > 290 * KIB else 7) for v in values]
    keys = [f"large{i}" for i in range(4)]
    assert kv.batch_put_from(keys, parts) == [1] * 4
    assert kv.batch_get(keys) == values


def test_a_batch_mixes_single_buffers_and_several(kv: Any) -> None:
    values = [b"one", b"twothree", b"", b"four" * 50_000]
    keys = [f"mixed{i}" for i in range(4)]
    assert kv.batch_put_from(keys, [b"one", [b"two", b"", b"three"], [], (values[3],)]) == [1] * 4
    targets: list[Any] = [bytearray(3), pieces(bytes(9), 1, 2), [], (bytearray(200_000),)]
    assert kv.batch_get_into([*keys, "none"], [*targets, bytearray(1)]) == [3, 8, 0, 200_000, None]
    assert [targets[0], b"".join(targets[1]), targets[3][0]] == [b"one", b"twothree\0", values[3]]


def test_parts_may_be_any_contiguous_buffers(kv: Any) -> None:
    kv.put_from("kinds", [b"ab", bytearray(b"cd"), memoryview(b"ef"), array("h", [1])])
    assert kv.get("kinds") == b"abcdef\x01\x00"
    target = array("i", [0, 0])
    assert kv.get_into("kinds", [target]) == 8
    assert target.tobytes() == b"abcdef\x01\x00"


@pytest.mark.parametrize("size", [10, 300 * KIB, 2 * MIB])
def test_a_value_that_finds_no_room_in_all_parts_leaves_them_alone(kv: Any, size: int) -> None:
    kv.put("wide", os.urandom(size))
    target = pieces(bytes(size - 1), size // 2)
    with pytest.raises(TooLarge, match=f"{size} bytes does not fit the buffer of {size - 1}"):
        kv.get_into("wide", target)
    assert not any(b"".join(target))


def test_the_options_of_a_put_apply_to_parts(kv: Any) -> None:
    kv.delete("options")
    assert kv.put_from("options", [b"a", b"b"], if_absent=True) == 1
    assert kv.put_from("options", [b"c"], if_absent=True) == 0
    big = pieces(os.urandom(600 * KIB), 300 * KIB)
    assert kv.batch_put_from(["options", "options2"], [big, big], if_absent=True) == [0, 1]
    assert [kv.get("options"), kv.get("options2")] == [b"ab", b"".join(big)]
    kv.delete("options2")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("text", "not str"),
        (["text"], "part: must offer its bytes as a buffer, not str"),
        ([1, 2], "part: must offer its bytes as a buffer, not int"),
        ([memoryview(b"abcd")[::2]], "part: must be contiguous"),
        ([bytes(5 * MIB), bytes(4 * MIB)], "9437184 bytes, limit value_bytes_max"),
        (None, "not NoneType"),
    ],
)
def test_bad_parts_are_refused_by_name(kv: Any, parts: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        kv.put_from("bad", parts)
    assert not kv.exists("bad")


def test_numbers_of_keys_values_and_targets_must_agree(kv: Any) -> None:
    with pytest.raises(InvalidArgument, match="values: 1 for 2 keys"):
        kv.batch_put_from(["a", "b"], [[b"x"]])
    with pytest.raises(InvalidArgument, match="buffers: 1 for 2 keys"):
        kv.batch_get_into(["a", "b"], [bytearray(1)])
    with pytest.raises(InvalidArgument, match="ranges: 1 for 2 keys"):
        kv.batch_get_range(["a", "b"], [(0, 1)])
    with pytest.raises(InvalidArgument, match="buffer: must be writable"):
        kv.get_into("a", [bytearray(1), b"x"])


# --- ranges


@pytest.mark.parametrize("size", [1, 5000, 200 * KIB, 3 * MIB + 1])
def test_a_range_is_the_bytes_that_stand_there(kv: Any, size: int) -> None:
    value = os.urandom(size)
    kv.put("r", value)
    third = size // 3
    for offset, length in [(0, size), (third, third), (size, 0), (size - 1, 1), (third, None)]:
        wanted = value[offset:] if length is None else value[offset : offset + length]
        assert kv.get_range("r", offset, length) == wanted
        target = bytearray(len(wanted) + 1)
        assert kv.get_into("r", target, offset=offset, length=length) == len(wanted)
        assert target == wanted + b"\0"


def test_a_batch_has_a_range_for_each_key_and_several_of_one(kv: Any) -> None:
    value = os.urandom(256 * KIB)
    kv.batch_put({"s1": value, "s2": b"short"})
    keys = ["s1", "none", "s2", "s1", "s1"]
    ranges = [(5, 3), (0, 1), (1, None), (100_000, 50_000), (1000, 9000)]
    wanted = [value[5:8], None, b"hort", value[100_000:150_000], value[1000:10_000]]
    assert kv.batch_get_range(keys, ranges) == wanted
    targets = [pieces(bytes(50_000), 1000, 30_000) for _ in keys]
    sizes = kv.batch_get_into(keys, targets, ranges=ranges)
    assert sizes == [w if w is None else len(w) for w in wanted]
    for target, expected in zip(targets, wanted, strict=True):
        if expected is not None:
            assert b"".join(target)[: len(expected)] == expected


@pytest.mark.parametrize("size", [10, 300 * KIB, 2 * MIB])
def test_a_range_beyond_the_value_is_an_error_that_tells_its_size(kv: Any, size: int) -> None:
    kv.put("short", bytes(size))
    target = bytearray(b"x" * (size + 1))
    for offset, length in [(0, size + 1), (size + 1, 0), (size + 1, None), (size - 1, 2)]:
        with pytest.raises(OutOfRange, match=f"not within its value of {size} bytes") as e:
            kv.get_into("short", target, offset=offset, length=length)
        assert e.value.size == size
    assert target == b"x" * (size + 1)
    with pytest.raises(BatchError) as failed:
        kv.batch_get_range(["short", "short", "none"], [(0, 2), (size, 1), (size, 1)])
    first, second, third = failed.value.results
    assert (first, second.size, third) == (bytes(2), size, None)


def test_a_range_that_finds_no_room_is_too_large(kv: Any) -> None:
    kv.put("room", bytes(100))
    with pytest.raises(TooLarge, match="buffer of 10"):
        kv.get_into("room", bytearray(10), offset=50)
    assert kv.get_into("room", bytearray(10), offset=90) == 10
    assert kv.get_into("room", [], offset=100) == 0


@pytest.mark.parametrize(
    ("offset", "length", "says"),
    [
        (-1, 1, "offset = -1"),
        (0.5, 1, "offset = 0.5"),
        (0, -1, "length = -1"),
        (0, "1", "length = '1'"),
        (1 << 62, None, "offset ="),
        (None, 1, "offset = None"),
    ],
)
def test_bad_ranges_are_refused_by_name(kv: Any, offset: Any, length: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        kv.get_range("r", offset, length)
    with pytest.raises(InvalidArgument, match="ranges: must be pairs"):
        kv.batch_get_range(["r"], [1])


def test_ranges_see_one_version_of_a_value_that_is_overwritten(kv: Any, node: NodeThread) -> None:
    other = node.client(timeout=20.0)
    for turn in range(50):
        other.put("turns", bytes([turn]) * (64 * KIB + turn))
        got = kv.get_range("turns", 32 * KIB)
        assert set(got) == {turn}
        assert len(got) == 32 * KIB + turn


# --- whatever the parts and ranges are

SIZES = st.one_of(
    st.integers(0, 64),
    st.integers(8 * KIB - 2, 8 * KIB + 2),
    st.integers(128 * KIB - 2, 128 * KIB + 2),
    st.integers(256 * KIB - 2, 256 * KIB + 2),
    st.integers(0, 2 * MIB),
)


def cuts(draw: Callable[[Any], Any], size: int) -> list[int]:
    ends: list[int] = draw(st.lists(st.integers(0, size), max_size=6))
    return sorted(ends)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_parts_and_ranges_act_as_the_joined_value_does(kv: Any, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=4), label="sizes")
    values = [bytes(os.urandom(64)) * (n // 64 + 1) for n in sizes]
    values = [v[:n] for v, n in zip(values, sizes, strict=True)]
    keys = [f"any{i}" for i in range(len(values))]
    parts = [pieces(v, *cuts(data.draw, len(v))) for v in values]
    assert kv.batch_put_from(keys, parts) == [1] * len(keys)

    rooms = [n + data.draw(st.integers(-3, 3)) for n in sizes]
    targets = [pieces(bytes(max(0, n)), *cuts(data.draw, max(0, n))) for n in rooms]
    try:
        results = kv.batch_get_into(keys, targets)
    except BatchError as e:
        results = e.results
    for value, target, result in zip(values, targets, results, strict=True):
        there = b"".join(target)
        if len(value) > len(there):
            assert isinstance(result, TooLarge)
            assert not any(there)
        else:
            assert result == len(value)
            assert there == value + bytes(len(there) - len(value))

    ranges: list[tuple[int, int | None]] = []
    for n in sizes:
        offset = data.draw(st.integers(0, n + 1))
        ranges.append((offset, data.draw(st.none() | st.integers(0, max(0, n - offset) + 1))))
    try:
        got = kv.batch_get_range(keys, ranges)
    except BatchError as e:
        got = e.results
    for value, (offset, length), result in zip(values, ranges, got, strict=True):
        end = len(value) if length is None else offset + length
        if offset > len(value) or end > len(value):
            assert isinstance(result, OutOfRange)
            assert result.size == len(value)
        else:
            assert result == value[offset:end]


# --- memory by address


def test_an_address_in_registered_memory_stands_for_a_buffer(kv: Any) -> None:
    pool = bytearray(os.urandom(64 * KIB))
    address = kv.register_buffer(pool)
    try:
        assert kv.put("by-address", (address + 10, 20)) == 1
        assert kv.get("by-address") == pool[10:30]
        kv.batch_put({"p1": (address, 1), "p2": b"plain"})
        kv.batch_put_from(["p3"], [[(address + 100, 50), b"-", (address + 7, 3)]])
        assert kv.batch_get(["p1", "p2", "p3"]) == [
            pool[:1], b"plain", pool[100:150] + b"-" + pool[7:10],
        ]  # fmt: skip
        assert kv.get_into("by-address", (address + 1000, 20)) == 20
        assert pool[1000:1020] == pool[10:30]
        target = [(address + 2000, 5), (address + 3000, 100)]
        assert kv.batch_get_into(["p3"], [target], ranges=[(1, 53)]) == [53]
        assert pool[2000:2005] + pool[3000:3048] == (pool[100:150] + b"-" + pool[7:10])[1:]
    finally:
        kv.unregister_buffer(address)


def test_an_address_outside_of_registered_memory_is_refused(kv: Any) -> None:
    pool = bytearray(1000)
    with pytest.raises(InvalidArgument, match="not within a registered buffer"):
        kv.put("stray", (ctypes.addressof(ctypes.c_char.from_buffer(pool)), 10))
    address = kv.register_buffer(pool)
    for place in [(address - 1, 2), (address + 999, 2), (address + 1001, 0), (address, -1), (0, 1)]:
        with pytest.raises(InvalidArgument, match="not within a registered buffer"):
            kv.put_from("stray", [b"x", place])
        with pytest.raises(InvalidArgument, match="not within a registered buffer"):
            kv.get_into("stray", place)
    kv.unregister_buffer(pool)
    with pytest.raises(InvalidArgument, match="not within a registered buffer"):
        kv.put("stray", (address, 10))
    assert not kv.exists("stray")


def test_read_only_memory_can_be_put_from_and_not_written_to(kv: Any) -> None:
    constant = b"constant" * 100
    address = kv.register_buffer(constant)
    kv.put("constant", (address, 8))
    with pytest.raises(InvalidArgument, match="must be writable"):
        kv.get_into("constant", (address, 8))
    kv.unregister_buffer(constant)
    assert kv.get("constant") == b"constant"


def test_memory_is_registered_by_buffer_or_address_and_never_twice() -> None:
    memory = RegisteredMemory()
    block = ctypes.create_string_buffer(b"0123456789", 10)
    at = ctypes.addressof(block)
    assert memory.register(at + 2, 4) == at + 2
    assert memory.register(at + 6, 4) == at + 6
    assert memory.register(at, 2) == at
    assert bytes(memory.view(at + 3, 2)) == b"34"
    assert bytes(memory.view(at + 6, 4)) == b"6789"
    assert len(memory.view(at + 10, 0)) == 0
    with pytest.raises(InvalidArgument, match="not within"):
        memory.view(at + 5, 2)  # half in one, half in the next
    for start, length in [(at, 10), (at + 5, 1), (at + 9, 5)]:
        with pytest.raises(InvalidArgument, match="overlap the registered"):
            memory.register(start, length)
    memory.unregister(at + 2)
    with pytest.raises(InvalidArgument, match="no registered buffer begins there"):
        memory.unregister(at + 2)
    assert memory.register(at + 2, 4) == at + 2


def test_a_registered_buffer_is_kept_in_place_until_it_is_let_go() -> None:
    memory = RegisteredMemory()
    buffer = bytearray(10)
    memory.register(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    memory.unregister(buffer)
    buffer.extend(b"more")


class OnDevice:
    __cuda_array_interface__ = {"data": (4096, False)}  # noqa: RUF012


@pytest.mark.parametrize(
    ("given", "length", "says"),
    [
        (b"", None, "is empty"),
        (memoryview(b"abcd")[::2], None, "must be contiguous"),
        (b"abc", 2, "length = 2: the buffer has 3 bytes"),
        ("text", None, "not str"),
        (4096, None, "length = None"),
        (4096, 0, "length = 0"),
        (0, 10, "address = 0x0"),
        ((1 << 64) - 5, 10, "is no memory"),
        (OnDevice(), None, "device memory cannot be registered"),
    ],
)
def test_what_is_no_memory_is_not_registered(given: Any, length: int | None, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        RegisteredMemory().register(given, length)


# --- the bytes of a value, taken as one run

PARTS = st.lists(st.binary(max_size=6), max_size=6)


@given(parts=PARTS, start=st.integers(0, 40), size=st.integers(0, 40))
def test_a_cut_is_the_slice_of_the_joined_bytes(parts: list[bytes], start: int, size: int) -> None:
    whole = b"".join(parts)
    start = min(start, len(whole))
    size = min(size, len(whole) - start)
    views = tuple(memoryview(p) for p in parts)
    assert b"".join(flat([cut(views, start, size)])) == whole[start : start + size]
    assert bytes(flat([cut(memoryview(whole), start, size)])[0]) == whole[start : start + size]
    assert size_of(views) == len(whole)
    assert sizes_of([views, memoryview(whole)]) == [len(whole)] * 2


@given(parts=PARTS)
def test_filling_writes_the_parts_one_after_the_other(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    target = [bytearray(len(p)) for p in parts]

    def copy(into: memoryview, source: memoryview) -> None:
        into[:] = source

    fill(tuple(memoryview(t) for t in target), memoryview(whole), copy)
    assert target == parts


@given(parts=PARTS, join_max=st.integers(0, 8))
def test_joining_keeps_the_bytes_and_leaves_large_pieces_alone(
    parts: list[bytes], join_max: int
) -> None:
    views = [memoryview(p) for p in parts]
    result = joined(views, join_max)
    assert b"".join(result) == b"".join(parts)
    assert all(len(p) for p in result)
    large = [v for v in views if len(v) > join_max]
    assert [p for p in result if isinstance(p, memoryview)] == large
    assert sum(isinstance(p, bytes) for p in result) <= len(large) + 1


@given(frames=PARTS, data=st.data())
def test_values_are_gathered_across_frames(frames: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(frames)
    marks = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    sizes = [b - a for a, b in zip([0, *marks], [*marks, len(whole)], strict=True)]
    values = [b"".join(flat([v])) for v in gathered(frames, sizes)]
    assert [len(v) for v in values] == sizes
    assert b"".join(values) == whole
    with pytest.raises(ProtocolError, match="too short"):
        gathered(frames, [*sizes, 1])
    if whole:
        with pytest.raises(ProtocolError, match="longer than the announced"):
            gathered(frames, [len(whole) - 1])
