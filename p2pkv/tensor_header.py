"""What stands before the elements of a tensor in its value: dtype, shape and order. Pure.

::

    magic "p2pkvT" · version u8 · 0 u8 · bytes of MessagePack u16 · MessagePack · zeros

The elements follow, packed, at the next multiple of 64 bytes. A header depends on nothing but
dtype, shape and order, so a reader that expects a tensor can compare bytes.
"""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Annotated

import msgspec
from msgspec import Meta as Limit

from p2pkv.errors import CorruptValue, InvalidArgument, TensorMismatch
from p2pkv.layouts import DIMENSIONS_MAX, Layout, check_order, packed

MAGIC = b"p2pkvT"
VERSION = 1
ALIGNMENT = 64
HEADER_BYTES_MAX = 1024
PREFIX = Struct("<6sBxH")

FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
"""The formats of eight bits, in the order of DLPack's codes."""

ITEMSIZES: dict[str, int] = {
    "bool": 1, "bfloat16": 2, "complex64": 8, "complex128": 16,
    **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64)},
    **{f"float8_{name}": 1 for name in FLOAT8},
}  # fmt: skip
"""Bytes of an element of each dtype, by the names that numpy, ml_dtypes and torch share."""


class TensorHeader(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """What a stored tensor is."""

    dtype: Annotated[str, Limit(max_length=32)]
    shape: Annotated[
        tuple[Annotated[int, Limit(ge=0, lt=1 << 62)], ...], Limit(max_length=DIMENSIONS_MAX)
    ]
    order: Annotated[
        tuple[Annotated[int, Limit(ge=0, lt=DIMENSIONS_MAX)], ...],
        Limit(max_length=DIMENSIONS_MAX),
    ] = ()
    """See ``layouts``."""

    @classmethod
    def of(cls, dtype: str, layout: Layout) -> TensorHeader:
        """Raises InvalidArgument for a dtype that cannot be stored."""
        if dtype not in ITEMSIZES:
            raise InvalidArgument(f"dtype {dtype}: must be one of {', '.join(sorted(ITEMSIZES))}")
        if len(layout.shape) > DIMENSIONS_MAX:
            raise InvalidArgument(f"{len(layout.shape)} dimensions, limit {DIMENSIONS_MAX}")
        return cls(dtype, layout.shape, layout.order)

    @property
    def layout(self) -> Layout:
        """Of the elements as they are stored."""
        return packed(self.shape, ITEMSIZES[self.dtype], self.order)

    def encode(self) -> bytes:
        body = _encoder.encode(self)
        return (PREFIX.pack(MAGIC, VERSION, len(body)) + body).ljust(_padded(len(body)), b"\0")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TensorHeader)


def header_bytes(start: memoryview | bytes, name: str) -> int:
    """How long the header is that begins so. Raises TensorMismatch, CorruptValue."""
    if len(start) < PREFIX.size or bytes(start[: len(MAGIC)]) != MAGIC:
        raise TensorMismatch(f"{name}: its value is no tensor")
    _, version, length = PREFIX.unpack_from(start)
    if version != VERSION:
        raise TensorMismatch(f"{name}: a tensor of version {version}; this is version {VERSION}")
    if _padded(length) > HEADER_BYTES_MAX:
        raise CorruptValue(f"{name}: a tensor's header of {length} bytes")
    return _padded(length)


def decode(value: memoryview | bytes, size: int, name: str) -> TensorHeader:
    """The header of a value of ``size`` bytes, of which at least the header is given.

    Raises TensorMismatch, CorruptValue.
    """
    length = header_bytes(value, name)
    _, _, body = PREFIX.unpack_from(value)
    try:
        header = _decoder.decode(value[PREFIX.size : PREFIX.size + body])
        check_order(header.order, len(header.shape))
    except (msgspec.MsgspecError, InvalidArgument) as e:
        raise CorruptValue(f"{name}: not the header of a tensor: {e}") from None
    if header.dtype not in ITEMSIZES:
        raise TensorMismatch(f"{name}: a tensor of the unknown dtype {header.dtype!r}")
    if size != length + prod(header.shape) * ITEMSIZES[header.dtype]:
        raise CorruptValue(f"{name}: {size} bytes for a tensor {header}")
    return header


def _padded(body: int) -> int:
    return -(-(PREFIX.size + body) // ALIGNMENT) * ALIGNMENT
