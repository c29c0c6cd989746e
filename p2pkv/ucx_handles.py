"""What peers tell each other about UCX: worker addresses and registered regions, as bytes.

UCX itself trusts what it unpacks, so these travel only between authenticated peers. The digest
finds what was cut or damaged on the way; sizes are checked before anything is allocated.

Both are little endian and end with xxh3_64 of all that is before::

    address  "PKUA" u32 version, u32 bytes, the worker address
    region   "PKUR" u32 version, u64 address, u64 length, u64 chunk length, u32 chunks,
             u32 × chunks where each chunk's remote key ends, the remote keys
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from p2pkv.errors import ProtocolError

ADDRESS_BYTES_MAX: Final = 64 << 10
KEY_BYTES_MAX: Final = 16 << 10
CHUNKS_MAX: Final = 16 << 10
HANDLE_BYTES_MAX: Final = 16 << 20

_VERSION: Final = 1
_ADDRESS: Final = struct.Struct("<4sII")
_REGION: Final = struct.Struct("<4sIQQQI")
_DIGEST: Final = struct.Struct("<Q")


class RegionHandle(NamedTuple):
    """A peer's region. ``ends`` tells where in ``keys`` the remote key of each chunk ends."""

    address: int
    length: int
    chunk_length: int
    ends: array[int]
    keys: bytes


def pack_address(worker_address: bytes) -> bytes:
    """The address of a worker as sent to peers."""
    head = _ADDRESS.pack(b"PKUA", _VERSION, len(worker_address))
    return _sealed(head + worker_address)


def unpack_address(data: bytes) -> bytes:
    """The worker address in ``data``. Raises ProtocolError."""
    body = _opened(data, b"PKUA", "worker address", _ADDRESS, ADDRESS_BYTES_MAX)
    length = _ADDRESS.unpack_from(body)[2]
    if not 0 < length == len(body) - _ADDRESS.size:
        raise ProtocolError(f"worker address: says it has {length} bytes, has {len(body)} in all")
    return body[_ADDRESS.size :]


def pack_region(address: int, length: int, chunk_length: int, keys: Sequence[bytes]) -> bytes:
    """A registered region as sent to peers; ``keys`` has the remote key of each chunk."""
    head = _REGION.pack(b"PKUR", _VERSION, address, length, chunk_length, len(keys))
    ends = array("I", itertools.accumulate(len(key) for key in keys))
    return _sealed(b"".join([head, struct.pack(f"<{len(ends)}I", *ends), *keys]))


def unpack_region(data: bytes) -> RegionHandle:
    """The region in ``data``. Raises ProtocolError."""
    body = _opened(data, b"PKUR", "region", _REGION, HANDLE_BYTES_MAX)
    _, _, address, length, chunk_length, chunks = _REGION.unpack_from(body)
    if not (length > 0 and chunk_length > 0 and address > 0 and address + length <= 1 << 64):
        raise ProtocolError(f"region: {length} bytes at {address:#x} in chunks of {chunk_length}")
    if chunks > CHUNKS_MAX or chunks != (length - 1) // chunk_length + 1:
        raise ProtocolError(
            f"region: {chunks} chunks of {chunk_length} bytes for {length} bytes; "
            f"at most {CHUNKS_MAX}"
        )
    start = _REGION.size + 4 * chunks
    if len(body) < start:
        raise ProtocolError(f"region: cut off after {len(body)} bytes")
    ends = array("Q", struct.unpack_from(f"<{chunks}I", body, _REGION.size))
    keys = body[start:]
    sizes = (end - begin for begin, end in itertools.pairwise([0, *ends]))
    if ends[-1] != len(keys) or not all(0 < size <= KEY_BYTES_MAX for size in sizes):
        raise ProtocolError(f"region: {len(keys)} bytes do not hold {chunks} remote keys")
    return RegionHandle(address, length, chunk_length, ends, keys)


def _sealed(body: bytes) -> bytes:
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def _opened(data: bytes, magic: bytes, what: str, head: struct.Struct, limit: int) -> bytes:
    if not head.size + _DIGEST.size <= len(data) <= limit:
        raise ProtocolError(
            f"{what}: {len(data)} bytes; must be {head.size + _DIGEST.size} to {limit}"
        )
    body, digest = bytes(data[: -_DIGEST.size]), data[-_DIGEST.size :]
    found, version = struct.unpack_from("<4sI", body)
    if found != magic:
        raise ProtocolError(f"{what}: starts with {found!r}, must start with {magic!r}")
    if version != _VERSION:
        raise ProtocolError(f"{what}: version {version}, must be {_VERSION}")
    if _DIGEST.unpack(digest)[0] != xxhash.xxh3_64_intdigest(body):
        raise ProtocolError(f"{what}: damaged on the way (its digest does not fit)")
    return body


__all__ = [
    "ADDRESS_BYTES_MAX",
    "CHUNKS_MAX",
    "HANDLE_BYTES_MAX",
    "KEY_BYTES_MAX",
    "RegionHandle",
    "pack_address",
    "pack_region",
    "unpack_address",
    "unpack_region",
]
