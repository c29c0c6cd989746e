"""What all calls have in common: keys, outcomes of batches, codes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.mooncake.codes import InvalidKey, NotSetUp
from p2pkv.adapters.mooncake.types import ReplicateConfig
from p2pkv.adapters.notices import Notices
from p2pkv.config import Limits
from p2pkv.errors import InvalidArgument, P2PKVError
from p2pkv.memory import RegisteredMemory

log = logging.getLogger("p2pkv.adapters.mooncake")

Call = Callable[[Cache, list[bytes], list[Any]], Sequence[Any]]
"""Gets the names of keys and what was prepared for each; returns the outcome of each."""

NOTHING: Sequence[Any] = ()


class Base:
    """A store's state, and how its calls are made.

    Keys lie below ``mc/<tenant>/``, so that ``remove_all`` removes what was put here and nothing
    else. No call raises anything for trouble with the store, or for a bad value.
    """

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._prefix = b""
        self._limits = Limits()
        self._memory = RegisteredMemory()
        self._notices = Notices(log)

    def _ready(self) -> Cache:
        if self._cache is None:
            raise NotSetUp("the store is not set up: setup() must have returned 0")
        return self._cache

    def _name(self, key: Any) -> bytes:
        """Raises InvalidKey."""
        try:
            data = key.encode() if isinstance(key, str) else bytes(memoryview(key))
        except (TypeError, UnicodeEncodeError) as e:
            raise InvalidKey(f"key {key!r}: must be str (UTF-8) or bytes: {e}") from None
        room = self._limits.key_bytes_max - len(self._prefix)
        if not 0 < len(data) <= room:
            if not data:
                raise InvalidArgument("key: is empty")
            raise InvalidKey(f"key: {len(data)} bytes, limit {room}")
        return self._prefix + data

    def _batch(
        self,
        what: str,
        keys: Sequence[Any],
        columns: Sequence[Sequence[Any]],
        prepare: Callable[..., Any] | None,
        call: Call,
    ) -> list[Any]:
        """The outcome of each key: a result, or a P2PKVError, whose cause is logged.

        ``columns`` are the other arguments for each key, of which ``prepare`` makes one, or raises
        InvalidArgument: then this key has it as its outcome, and the others go on.
        """
        try:
            cache = self._ready()
            for column in columns:
                if len(column) != len(keys):
                    raise InvalidArgument(f"{len(column)} arguments for {len(keys)} keys")
        except InvalidArgument as e:
            outcomes: list[Any] = [e] * len(keys)
        else:
            outcomes = self._each(cache, keys, columns, prepare, call)
        self._tell(what, outcomes)
        return outcomes

    def _each(
        self,
        cache: Cache,
        keys: Sequence[Any],
        columns: Sequence[Sequence[Any]],
        prepare: Callable[..., Any] | None,
        call: Call,
    ) -> list[Any]:
        try:
            names = self._names(keys)
            values = [None] * len(keys) if prepare is None else list(map(prepare, *columns))
        except InvalidArgument:
            return self._one_by_one(cache, keys, columns, prepare, call)
        return list(_attempt(cache, names, values, call)) if names else []

    def _names(self, keys: Sequence[Any]) -> list[bytes]:
        """Raises InvalidArgument if any of them is bad."""
        prefix = self._prefix
        try:
            names = [prefix + key.encode() for key in keys]
        except (AttributeError, UnicodeEncodeError):
            return [self._name(key) for key in keys]
        lengths = set(map(len, names))
        if lengths and not len(prefix) < min(lengths) <= max(lengths) <= self._limits.key_bytes_max:
            raise InvalidKey("a key is empty or too long")
        return names

    def _one_by_one(
        self,
        cache: Cache,
        keys: Sequence[Any],
        columns: Sequence[Sequence[Any]],
        prepare: Callable[..., Any] | None,
        call: Call,
    ) -> list[Any]:
        """One of them is bad: find out which, and do the others."""
        outcomes: list[Any] = [None] * len(keys)
        good: list[int] = []
        names: list[bytes] = []
        values: list[Any] = []
        rows = zip(*columns, strict=True) if columns else ((),) * len(keys)
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            try:
                name = self._name(key)
                value = prepare(*row) if prepare is not None else None
            except InvalidArgument as e:
                outcomes[i] = e
            else:
                good.append(i)
                names.append(name)
                values.append(value)
        if names:
            for i, outcome in zip(good, _attempt(cache, names, values, call), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _tell(self, what: str, outcomes: Sequence[Any]) -> None:
        self._notices.tell_outcomes(what, outcomes)

    # -- values

    def _value(self, value: Any) -> memoryview:
        """A value in one buffer. Raises InvalidArgument."""
        return self._parts((value,))[0]

    def _parts(self, parts: Sequence[Any]) -> list[memoryview]:
        """A value in several buffers. Raises InvalidArgument."""
        try:
            views = [memoryview(part) for part in parts]
        except TypeError as e:
            raise InvalidArgument(f"value: must be a buffer: {e}") from None
        size = sum(view.nbytes for view in views)
        if not 0 < size <= self._limits.value_bytes_max:
            limit = self._limits.value_bytes_max
            raise InvalidArgument(f"value: {size} bytes, must be 1 to {limit}")
        return views

    def _options(self, config: ReplicateConfig | None) -> dict[str, Any]:
        """The options of a put."""
        if config is None:
            return {}
        if config.replica_num > 1:
            self._notices.tell(
                "ReplicateConfig",
                "replica_num",
                f"replica_num = {config.replica_num}: the cluster decides how many copies it keeps",
            )
        return {"soft_pin": config.with_soft_pin, "hard_pin": bool(config.with_hard_pin)}


def _attempt(cache: Cache, names: list[bytes], values: list[Any], call: Call) -> Sequence[Any]:
    try:
        return call(cache, names, values)
    except P2PKVError as e:
        return [e] * len(names)
