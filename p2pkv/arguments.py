"""Checking arguments and turning them into bytes, before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from p2pkv.config import Limits
from p2pkv.errors import InvalidArgument, TooLarge
from p2pkv.memory import RegisteredMemory, is_place
from p2pkv.parts import NOTHING, Parts
from p2pkv.wire import PutOptions

Key = str | bytes

TIMEOUT_S_MAX = 1e6
TTL_S_MAX = 1e9

OFFSET_MAX = (1 << 62) - 1

_BYTES_ONLY, _TEXT_ONLY = {bytes}, {str}
_NOWHERE = RegisteredMemory()


REPLICAS_MAX = 8


def encode_key(key: Key, limits: Limits) -> bytes:
    """The bytes of a key. Raises InvalidArgument, TooLarge."""
    if type(key) is not bytes:
        key = _encoded(key, "key")
    if not 0 < len(key) <= limits.key_bytes_max:
        raise _key_length(key, limits)
    return key


def encode_keys(keys: Iterable[Key], limits: Limits) -> list[bytes]:
    """The bytes of many keys. Raises InvalidArgument, TooLarge."""
    if isinstance(keys, (str, bytes, bytearray, memoryview)):
        raise InvalidArgument("keys: must be a sequence of keys, not one key")
    try:
        given = keys if isinstance(keys, (list, tuple)) else list(keys)
        if set(map(type, given)) == _TEXT_ONLY:
            encoded: list[Any] = list(map(str.encode, given))
        else:
            encoded = [key.encode() if key.__class__ is str else key for key in given]
    except TypeError:
        raise InvalidArgument(f"keys: must be iterable, not {type(keys).__name__}") from None
    except UnicodeEncodeError as e:
        raise InvalidArgument(f"key: is not valid Unicode: {e}") from None
    if encoded and (
        set(map(type, encoded)) != _BYTES_ONLY
        or not all(encoded)
        or max(map(len, encoded)) > limits.key_bytes_max
    ):
        return [encode_key(key, limits) for key in encoded]
    return encoded


def encode_prefix(prefix: Key, limits: Limits) -> bytes:
    """The bytes of a prefix, which may be empty. Raises InvalidArgument, TooLarge."""
    data = _encoded(prefix, "prefix")
    if len(data) > limits.key_bytes_max:
        raise TooLarge(f"prefix: {len(data)} bytes, limit key_bytes_max = {limits.key_bytes_max}")
    return data


def _encoded(text: Any, name: str) -> bytes:
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as e:
            raise InvalidArgument(f"{name}: is not valid Unicode: {e}") from None
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise InvalidArgument(f"{name}: must be str or bytes, not {type(text).__name__}")


def _key_length(key: bytes, limits: Limits) -> InvalidArgument:
    if not key:
        return InvalidArgument(
            f"key: is empty; it must have 1 to key_bytes_max = {limits.key_bytes_max} bytes"
        )
    return TooLarge(f"key: {len(key)} bytes, limit key_bytes_max = {limits.key_bytes_max}")


def pairs_of(items: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Keys and values of a mapping or of pairs. Raises InvalidArgument."""
    if isinstance(items, Mapping):
        return list(items), list(items.values())
    try:
        pairs = list(items)
        return [key for key, _ in pairs], [value for _, value in pairs]
    except (TypeError, ValueError):
        raise InvalidArgument("items: must be a mapping, or pairs of key and value") from None


def view_of(value: Any, name: str = "value", memory: RegisteredMemory = _NOWHERE) -> memoryview:
    """The bytes of any contiguous buffer, or at an (address, length). Raises InvalidArgument."""
    if value.__class__ is tuple and is_place(value):
        return memory.view(*value)
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"{name}: must offer its bytes as a buffer, not {type(value).__name__}"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument(f"{name}: must be contiguous (C order)")
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else NOTHING


def encode_value(value: Any, limits: Limits, memory: RegisteredMemory = _NOWHERE) -> memoryview:
    """The bytes of a value. Raises InvalidArgument, TooLarge."""
    if isinstance(value, str):
        raise InvalidArgument("value: must be bytes or a buffer, not str; encode it first")
    view = view_of(value, "value", memory)
    if view.nbytes > limits.value_bytes_max:
        raise _value_length(view.nbytes, limits)
    return view


def encode_values(
    values: Sequence[Any], limits: Limits, memory: RegisteredMemory = _NOWHERE
) -> list[memoryview]:
    """The bytes of many values. Raises InvalidArgument, TooLarge."""
    if set(map(type, values)) == _BYTES_ONLY:  # whose views are what they have to be
        views = [memoryview(value) for value in values]
        if max(map(len, views)) <= limits.value_bytes_max:
            return views
    return [encode_value(value, limits, memory) for value in values]


def encode_parts(parts: Any, limits: Limits, memory: RegisteredMemory) -> Parts:
    """The bytes of a value in one part or several. Raises InvalidArgument, TooLarge."""
    if not _is_several(parts):
        return encode_value(parts, limits, memory)
    views = tuple([view_of(part, "part", memory) for part in parts])
    size = sum(map(len, views))
    if size > limits.value_bytes_max:
        raise _value_length(size, limits)
    return views


def _value_length(size: int, limits: Limits) -> TooLarge:
    return TooLarge(f"value: {size} bytes, limit value_bytes_max = {limits.value_bytes_max}")


def _is_several(parts: Any) -> bool:
    return isinstance(parts, (list, tuple)) and not is_place(parts)


def writable(buffer: Any, memory: RegisteredMemory = _NOWHERE) -> memoryview:
    """The bytes of a buffer that a value can be copied into. Raises InvalidArgument."""
    view = view_of(buffer, "buffer", memory)
    if view.readonly:
        raise InvalidArgument("buffer: must be writable")
    return view


def encode_target(target: Any, memory: RegisteredMemory) -> Parts:
    """The bytes of one writable buffer, or of several. Raises InvalidArgument."""
    if _is_several(target):
        return tuple([writable(part, memory) for part in target])
    return writable(target, memory)


def encode_range(offset: Any, length: Any) -> tuple[int, int]:
    """First byte and number of bytes, -1 for None: up to the end. Raises InvalidArgument."""
    start = _bytes("offset", offset)
    return start, -1 if length is None else _bytes("length", length)


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, Integral) and 0 <= int(value) <= OFFSET_MAX:
        return int(value)
    raise InvalidArgument(f"{name} = {value!r}: must be a whole number of bytes, 0 or more")


def encode_ranges(ranges: Iterable[Any], count: int) -> tuple[list[int], list[int]]:
    """Starts and lengths of ``count`` (offset, length) pairs. Raises InvalidArgument."""
    try:
        encoded = [encode_range(offset, length) for offset, length in ranges]
    except (TypeError, ValueError) as e:
        if isinstance(e, InvalidArgument):
            raise
        raise InvalidArgument("ranges: must be pairs of offset and length") from None
    if len(encoded) != count:
        raise InvalidArgument(f"ranges: {len(encoded)} for {count} keys")
    return [start for start, _ in encoded], [length for _, length in encoded]


def milliseconds(name: str, seconds: float) -> int:
    """A time to live in whole milliseconds, 1 at least. Raises InvalidArgument."""
    return max(1, round(_within(name, seconds, TTL_S_MAX) * 1000))


def nanoseconds(name: str, seconds: float) -> int:
    """A timeout in nanoseconds. Raises InvalidArgument."""
    return round(_within(name, seconds, TIMEOUT_S_MAX) * 1_000_000_000)


def _within(name: str, seconds: float, bound: float) -> float:
    try:
        fits = 0 < seconds < bound
    except TypeError:
        fits = False
    if not fits:
        raise InvalidArgument(
            f"{name} = {seconds!r}: must be more than 0 and less than {bound:.0e} seconds"
        )
    return seconds


def put_options(
    if_absent: bool,
    write_once: bool,
    soft_pin: bool,
    hard_pin: bool,
    ttl: float | None,
    min_replicas: int = 0,
) -> PutOptions:
    """Checked options of a put. Raises InvalidArgument."""
    ttl_ms = 0 if ttl is None else milliseconds("ttl", ttl)
    if not 0 <= min_replicas <= REPLICAS_MAX:
        raise InvalidArgument(
            f"min_replicas = {min_replicas}: must be from 0 to {REPLICAS_MAX}, 0 for what the "
            "cluster asks for"
        )
    return PutOptions(if_absent, write_once, soft_pin, hard_pin, ttl_ms, min_replicas)
