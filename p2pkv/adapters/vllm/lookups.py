"""Lookups that never hold the scheduler: they go on beside it, and it asks again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.vllm.tally import Tally
from p2pkv.errors import P2PKVError


class Found:
    """What a lookup found, once ``ready``."""

    __slots__ = ("blocks", "complete", "ready")

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.blocks = 0
        """How many there are from the start, on behalf of all ranks."""
        self.complete = False
        """Whether the block behind them is known not to be there."""


class Lookups:
    """Of requests, by their id.

    The first question of a request waits for its answer for up to ``wait_s``, which most answers
    need less than; later ones do not wait at all.
    """

    def __init__(self, cache: Cache, wait_s: float, tally: Tally) -> None:
        self._cache = cache
        self._wait_s = wait_s
        self._tally = tally
        self._found: dict[str, Found] = {}

    def found(
        self, request: str, keys: Callable[[], list[bytes]], keys_per_block: int
    ) -> Found | None:
        """The answer, or None: not yet. ``keys``: those of each block side by side."""
        found = self._found.get(request)
        if found is None:
            found = self._found[request] = Found()
            self._ask(request, keys(), keys_per_block, found)
            found.ready.wait(self._wait_s)
        return found if found.ready.is_set() else None

    def known(self, request: str) -> Found | None:
        """The answer, if there is one: nothing is asked."""
        found = self._found.get(request)
        return found if found is not None and found.ready.is_set() else None

    def forget(self, request: str) -> None:
        """The next question of this request is a new one."""
        self._found.pop(request, None)

    def finished(self, request: str) -> None:
        self.forget(request)
        self._cache.finished(request)

    def _ask(self, request: str, keys: list[bytes], keys_per_block: int, found: Found) -> None:
        begin = time.perf_counter()

        def done(outcomes: list[Any]) -> None:
            self._answer(found, outcomes, keys_per_block, begin)

        if not self._cache.submit_exists(keys, done, request=request):
            self._answer(found, [], keys_per_block, begin)

    def _answer(self, found: Found, outcomes: list[Any], keys_per_block: int, begin: float) -> None:
        hits = next((i for i, there in enumerate(outcomes) if there is not True), len(outcomes))
        found.blocks = hits // keys_per_block
        unavailable = not outcomes or any(isinstance(o, P2PKVError) for o in outcomes)
        found.complete = not unavailable
        found.ready.set()
        self._tally.add(
            lookups=1,
            lookups_unavailable=int(unavailable),
            lookup_seconds=time.perf_counter() - begin,
            hit_blocks=found.blocks,
            missed_blocks=len(outcomes) // keys_per_block - found.blocks,
        )
