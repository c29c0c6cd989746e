"""Addresses and handles as bytes: what is packed comes back, anything else is refused."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from p2pkv.errors import ProtocolError
from p2pkv.ucx_handles import (
    ADDRESS_BYTES_MAX,
    CHUNKS_MAX,
    KEY_BYTES_MAX,
    pack_address,
    pack_region,
    unpack_address,
    unpack_region,
)

keys = st.lists(st.binary(min_size=1, max_size=80), min_size=1, max_size=20)


def seal(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@given(st.binary(min_size=1, max_size=2000))
def test_an_address_comes_back(address: bytes) -> None:
    assert unpack_address(pack_address(address)) == address


@given(
    keys,
    st.integers(1, 2**40),
    st.integers(0, 2**20),
    st.integers(1, 2**40),
)
def test_a_region_comes_back(keys: list[bytes], chunk: int, short: int, address: int) -> None:
    length = chunk * len(keys) - short % chunk
    handle = unpack_region(pack_region(address, length, chunk, keys))
    assert (handle.address, handle.length, handle.chunk_length) == (address, length, chunk)
    starts = [0, *handle.ends[:-1]]
    assert [handle.keys[a:b] for a, b in zip(starts, handle.ends, strict=True)] == keys


@given(keys, st.data())
def test_one_wrong_byte_is_noticed(keys: list[bytes], data: st.DataObject) -> None:
    for packed, unpack in [
        (pack_region(4096, 100 * len(keys), 100, keys), unpack_region),
        (pack_address(keys[0]), unpack_address),
    ]:
        at = data.draw(st.integers(0, len(packed) - 1))
        change = data.draw(st.integers(1, 255))
        bad = bytearray(packed)
        bad[at] ^= change
        with pytest.raises(ProtocolError):
            unpack(bytes(bad))
        with pytest.raises(ProtocolError):
            unpack(packed[:at])


@given(st.binary(max_size=300))
def test_sealed_nonsense_is_refused(body: bytes) -> None:
    for magic, unpack in [(b"PKUR", unpack_region), (b"PKUA", unpack_address)]:
        with pytest.raises(ProtocolError):
            unpack(seal(magic + struct.pack("<I", 2) + body))
        with pytest.raises(ProtocolError):
            unpack(seal(body))


@pytest.mark.parametrize(
    ("address", "length", "chunk", "chunks", "ends", "bytes_"),
    [
        (0, 100, 100, 1, [1], 1),
        (4096, 0, 100, 1, [1], 1),
        (4096, 100, 0, 1, [1], 1),
        (2**64 - 50, 100, 100, 1, [1], 1),
        (4096, 100, 100, 2, [1, 2], 2),
        (4096, 200, 100, 1, [1], 1),
        (4096, CHUNKS_MAX + 1, 1, CHUNKS_MAX + 1, [], 0),
        (4096, 2**63, 1, 2**32 - 1, [], 0),
        (4096, 200, 100, 2, [1], 0),
        (4096, 200, 100, 2, [2, 1], 1),
        (4096, 200, 100, 2, [1, 1], 1),
        (4096, 200, 100, 2, [1, 3], 2),
        (4096, 100, 100, 1, [KEY_BYTES_MAX + 1], KEY_BYTES_MAX + 1),
    ],
)
def test_regions_that_do_not_add_up_are_refused(
    address: int, length: int, chunk: int, chunks: int, ends: list[int], bytes_: int
) -> None:
    body = struct.pack("<4sIQQQI", b"PKUR", 1, address, length, chunk, chunks)
    body += struct.pack(f"<{len(ends)}I", *ends) + bytes(bytes_)
    with pytest.raises(ProtocolError, match="region"):
        unpack_region(seal(body))


def test_sizes_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ProtocolError, match="bytes; must be"):
        unpack_address(bytes(ADDRESS_BYTES_MAX + 1))
