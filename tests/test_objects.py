from __future__ import annotations

import gc

import pytest
from xxhash import xxh3_64_intdigest

from p2pkv.objects import (
    CLEARED_HEADER,
    HEADER_BYTES,
    Bucket,
    Object,
    State,
    extent_bytes,
    extents_bytes,
    read_header,
    write_header,
)
from p2pkv.types import BucketId
from p2pkv.wire import PutOptions


def item(key: bytes = b"k", size: int = 5, checksum: int | None = None) -> Object:
    return Object(key, 1, 64, size, extent_bytes(size), PutOptions(), version=7, checksum=checksum)


@pytest.mark.parametrize(("size", "extent"), [(0, 64), (1, 128), (64, 128), (65, 192)])
def test_a_value_takes_its_granules_and_a_header(size: int, extent: int) -> None:
    assert extent_bytes(size) == extent
    assert extents_bytes([size, size]) == [extent, extent]


def test_objects_are_told_apart_by_identity_and_ignored_by_the_garbage_collector() -> None:
    one, other = item(), item()
    assert one != other
    assert len({one, other}) == 2
    assert not gc.is_tracked(one)


@pytest.mark.parametrize("checksum", [None, 0, 2**64 - 1])
def test_a_header_tells_key_size_version_and_checksum(checksum: int | None) -> None:
    memory = memoryview(bytearray(2 * HEADER_BYTES))
    write_header(memory, item(b"key", 5, checksum))
    header = read_header(memory, HEADER_BYTES)
    assert header is not None
    assert header.key_hash == xxh3_64_intdigest(b"key")
    assert (header.size, header.version, header.state) == (5, 7, State.COMMITTED)
    assert (header.checksum, header.has_checksum) == (checksum or 0, bool(checksum))
    assert bytes(memory[HEADER_BYTES:]) == bytes(HEADER_BYTES)


def test_cleared_or_foreign_memory_has_no_header() -> None:
    memory = memoryview(bytearray(2 * HEADER_BYTES))
    write_header(memory, item())
    memory[:HEADER_BYTES] = CLEARED_HEADER
    assert read_header(memory, HEADER_BYTES) is None
    memory[:HEADER_BYTES] = b"\xff" * HEADER_BYTES
    assert read_header(memory, HEADER_BYTES) is None


def bucket(*keys: bytes) -> Bucket:
    made = Bucket(BucketId(1))
    for key in keys:
        made.objects[key] = item(key)
    return made


@pytest.mark.parametrize(
    ("prefix", "after", "expected"),
    [
        (b"", b"", [b"a", b"b/1", b"b/2", b"b\xff", b"c"]),
        (b"b/", b"", [b"b/1", b"b/2"]),
        (b"b", b"b/1", [b"b/2", b"b\xff"]),
        (b"b\xff", b"", [b"b\xff"]),
        (b"b", b"a", [b"b/1", b"b/2", b"b\xff"]),
        (b"b", b"c", []),
        (b"", b"b/", [b"b/1", b"b/2", b"b\xff", b"c"]),
        (b"d", b"", []),
        (b"", b"c", []),
    ],
)
def test_keys_are_found_by_prefix_and_start(
    prefix: bytes, after: bytes, expected: list[bytes]
) -> None:
    made = bucket(b"c", b"b/2", b"a", b"b\xff", b"b/1")
    start, end = made.keys_with(prefix, after)
    assert made.order[start:end] == expected


def test_the_order_of_keys_is_kept_until_it_is_set_aside() -> None:
    made = bucket(b"b", b"a")
    first = made.order
    assert first == [b"a", b"b"]
    assert made.order is first
    made.sorted_keys = None
    assert made.order is not first
    assert len(made) == 2
