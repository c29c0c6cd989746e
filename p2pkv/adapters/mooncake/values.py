"""Bytes in and out, whether keys are there, and removing them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.mooncake.base import NOTHING, Base
from p2pkv.adapters.mooncake.codes import ErrorCode, NotSetUp, code_of, codes, sizes
from p2pkv.adapters.mooncake.memory import BufferHandle
from p2pkv.adapters.mooncake.types import ReplicateConfig
from p2pkv.errors import InvalidArgument, Miss, P2PKVError

REMOVE_TIMEOUT_S = 10.0
"""For what goes through all keys."""
REMOVE_BATCH = 4096
HEALTH_TIMEOUT_S = 3.0
"""One node that does not answer takes part of it."""


class ValueCalls(Base):
    """``put`` keeps the old value where the key is there, and returns 0; ``upsert`` replaces it."""

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """0, or a negative code; nothing is stored then."""
        return self.put_batch_codes("put", [key], [value], config, if_absent=True)[0]

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """``put`` that replaces."""
        return self.put_batch_codes("upsert", [key], [value], config)[0]

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """``put`` of a value that lies in several buffers."""
        return self._put_parts("put_parts", key, parts, config, if_absent=True)

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """``put_parts`` that replaces."""
        return self._put_parts("upsert_parts", key, parts, config)

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """0, or the code of the first key that failed; the others are stored."""
        return _worst(
            self.put_batch_codes("put_batch", keys, values, config, if_absent=True), keys, values
        )

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """``put_batch`` that replaces."""
        return _worst(self.put_batch_codes("upsert_batch", keys, values, config), keys, values)

    def put_batch_codes(
        self,
        what: str,
        keys: Sequence[str],
        values: Sequence[Any],
        config: ReplicateConfig | None,
        *,
        if_absent: bool = False,
    ) -> list[int]:
        """The code of each key."""
        options = self._options(config)
        return codes(
            self._batch(
                what, keys, (values,), self._value,
                lambda cache, names, parts: cache.store(
                    names, parts, if_absent=if_absent, **options
                ),
            )
        )  # fmt: skip

    def _put_parts(
        self, what: str, key: str, parts: Sequence[Any], config: ReplicateConfig | None,
        if_absent: bool = False,
    ) -> int:  # fmt: skip
        options = self._options(config)
        outcomes = self._batch(
            what, [key], ([parts],), self._parts,
            lambda cache, names, values: cache.store(
                names, values, if_absent=if_absent, **options
            ),
        )  # fmt: skip
        return codes(outcomes)[0]

    # -- reading

    def get(self, key: str) -> bytes:
        """The value; b"" for a miss and for every failure, whose cause is logged."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """``get`` of many."""
        outcomes = self._get("get", keys)
        return [o if isinstance(o, bytes) else b"" for o in outcomes]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The value in a buffer of its own; None for a miss and for every failure."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """``get_buffer`` of many."""
        outcomes = self._get("get_buffer", keys)
        return [BufferHandle(o) if isinstance(o, bytes) else None for o in outcomes]

    def _get(self, what: str, keys: Sequence[str]) -> list[Any]:
        return self._batch(what, keys, NOTHING, None, lambda cache, names, _: cache.get(names))

    def is_exist(self, key: str) -> int:
        """1 or 0; -1 before ``setup`` and for a bad key.

        A node that does not answer makes it 0: some callers take everything but 0 for a hit.
        """
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """``is_exist`` of many."""
        outcomes = self._batch(
            "is_exist", keys, NOTHING, None, lambda cache, names, _: cache.exists(names)
        )
        return [-1 if isinstance(o, P2PKVError) else int(o) for o in outcomes]

    def get_size(self, key: str) -> int:
        """Bytes of the value, or a negative code."""
        return sizes(self._sizes("get_size", [key]))[0]

    def _sizes(self, what: str, keys: Sequence[str]) -> list[Any]:
        return self._batch(what, keys, NOTHING, None, lambda cache, names, _: cache.sizes(names))

    # -- removing

    def remove(self, key: str, force: bool = False) -> int:
        """0, or -704 where the key is not there. ``force`` makes no difference: there are no
        leases, and whoever is reading reads on."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """``remove`` of many."""
        outcomes = self._batch(
            "remove", keys, NOTHING, None, lambda cache, names, _: cache.delete(names)
        )
        return codes(Miss() if o is False else o for o in outcomes)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the keys in which the pattern is found; how many, or a negative code."""
        try:
            return self._remove_matching(self._ready(), re.compile(regex_pattern))
        except (P2PKVError, re.error) as e:
            return self._refuse("remove_by_regex", e)

    def _remove_matching(self, cache: Cache, pattern: re.Pattern[str]) -> int:
        start, removed = len(self._prefix), 0
        batch: list[bytes] = []
        for key, _ in cache.client.scan_keys(self._prefix, timeout=REMOVE_TIMEOUT_S):
            if pattern.search(key[start:].decode(errors="surrogateescape")):
                batch.append(key)
            if len(batch) == REMOVE_BATCH:
                removed += sum(cache.client.batch_delete(batch, timeout=REMOVE_TIMEOUT_S))
                batch = []
        return removed + sum(cache.client.batch_delete(batch, timeout=REMOVE_TIMEOUT_S))

    def remove_all(self, force: bool = False) -> int:
        """Remove all keys of this tenant; how many, or a negative code."""
        try:
            return self._ready().client.delete_range(self._prefix, timeout=REMOVE_TIMEOUT_S)
        except P2PKVError as e:
            return self._refuse("remove_all", e)

    def _refuse(self, what: str, error: Exception) -> int:
        """The code of what went wrong, whose cause is logged."""
        self._notices.tell(what, type(error).__name__, str(error))
        if isinstance(error, P2PKVError):
            return code_of(error)
        return int(ErrorCode.INVALID_PARAMS)

    # -- health

    def health_check(self) -> int:
        """0: nodes of the cluster answer; 1: not set up, or closed; 2: none answers in 3 s."""
        try:
            self._ready().connect(HEALTH_TIMEOUT_S)
        except NotSetUp:
            return 1
        except P2PKVError as e:
            self._notices.tell("health_check", type(e).__name__, str(e))
            return 2
        return 0

    # -- beyond Mooncake

    def why_miss(self, key: str) -> str:
        """Why a key is not there, for people (see ``Cache.why_miss``)."""
        try:
            reason, text = self._ready().why_miss(self._name(key))
        except P2PKVError as e:
            return f"{type(e).__name__}: {e}"
        return f"{reason.value}: {text}"

    def figures(self) -> dict[str, int]:
        """Counts of this store, by name (see ``Cache.figures``); empty before ``setup``."""
        return self._cache.figures() if self._cache is not None else {}


def _worst(results: list[int], keys: Sequence[str], values: Sequence[Any]) -> int:
    if not keys and len(values):
        return code_of(InvalidArgument())
    return next((code for code in results if code), 0)
