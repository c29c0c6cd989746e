"""A tier below vLLM's own host memory: chunks between that memory and the store.

vLLM asks for chunks one by one, within a step of its scheduler, and gathers its answers in the
next ones. So questions are collected and asked together at the end of the step, beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.keys import BlockKeys
from p2pkv.errors import InvalidArgument


class Ended(NamedTuple):
    """A job of which vLLM is to be told."""

    job: int
    good: list[bytes]
    """Chunks that were loaded, or stored."""
    whole: bool
    """Whether these are all."""
    seconds: float
    size: int
    """Bytes of the good ones."""


class Chunk:
    """What is known of a chunk that somebody asks for."""

    __slots__ = ("askers", "there")

    def __init__(self) -> None:
        self.there: bool | None = None
        """None: not known yet."""
        self.askers: set[str] = set()


class Tiering:
    """Calls come from one thread, vLLM's scheduler; none of them waits but ``drain``."""

    def __init__(
        self, cache: Cache, memory: memoryview, keys: BlockKeys, ttl_s: float | None = None
    ) -> None:
        """``memory``: rows of vLLM's host memory, each with room for a chunk.

        Raises InvalidArgument if it is not writable and contiguous.
        """
        if memory.ndim != 2 or not memory.c_contiguous or memory.readonly:
            raise InvalidArgument("memory: must be writable, contiguous, and have two dimensions")
        self._cache = cache
        self._memory = memory.cast("B")
        self._row_bytes = memory.nbytes // memory.shape[0] if memory.shape else 0
        self._keys = keys
        self._ttl_s = ttl_s
        self._chunks: dict[bytes, Chunk] = {}
        self._asked: dict[str, set[bytes]] = {}
        """Chunks by request."""
        self._to_ask: list[bytes] = []
        self._answers: SimpleQueue[tuple[list[bytes], list[Any]]] = SimpleQueue()
        self._lock = threading.Condition()
        self._running = 0
        self._ended: list[Ended] = []

    def _names(self, chunks: Iterable[bytes]) -> list[bytes]:
        """Keys: of a chunk alone nobody knows which run it belongs to."""
        return [name for chunk in chunks for name in self._keys.of_group(chunk, [chunk])]

    # -- whether chunks are there

    def lookup(self, chunk: bytes, request: str) -> bool | None:
        """Whether it is there; None: ask again in a later step."""
        self._hear()
        known = self._chunks.get(chunk)
        if known is None:
            known = self._chunks[chunk] = Chunk()
            self._to_ask.append(chunk)
        known.askers.add(request)
        self._asked.setdefault(request, set()).add(chunk)
        return known.there

    def step_ended(self) -> None:
        """Ask for all that was looked up in this step."""
        self._hear()
        chunks, self._to_ask = self._to_ask, []
        if chunks:
            answers = self._answers
            if not self._cache.submit_exists(
                self._names(chunks), lambda outcomes: answers.put((chunks, outcomes))
            ):
                answers.put((chunks, [False] * len(chunks)))

    def finished(self, request: str) -> None:
        """The request will not ask again: what only it asked for is forgotten."""
        for chunk in self._asked.pop(request, ()):
            known = self._chunks.get(chunk)
            if known is not None:
                known.askers.discard(request)
                if not known.askers:
                    del self._chunks[chunk]

    def _hear(self) -> None:
        while True:
            try:
                chunks, outcomes = self._answers.get_nowait()
            except Empty:
                return
            for chunk, there in zip(chunks, outcomes, strict=True):
                if chunk in self._chunks:
                    self._chunks[chunk].there = there is True

    # -- bytes

    def store(self, job: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy rows of memory to the store; vLLM leaves them alone until the job has ended."""

        def submit(done: Callable[[list[Any]], None]) -> bool:
            values = [self._row(row) for row in rows]
            return self._cache.submit_store(
                self._names(chunks), values, done, write_once=True, ttl=self._ttl_s
            )

        self._start(job, list(chunks), submit, lambda outcome: isinstance(outcome, int))

    def load(self, job: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy chunks into rows of memory. Chunks that did not come whole are misses."""

        def submit(done: Callable[[list[Any]], None]) -> bool:
            targets = [self._row(row) for row in rows]
            return self._cache.submit_load(self._names(chunks), targets, done)

        self._start(job, list(chunks), submit, lambda outcome: outcome == self._row_bytes)

    def _row(self, index: int) -> memoryview:
        return self._memory[index * self._row_bytes : (index + 1) * self._row_bytes]

    def _start(
        self,
        job: int,
        chunks: list[bytes],
        submit: Callable[[Callable[[list[Any]], None]], bool],
        is_good: Callable[[Any], bool],
    ) -> None:
        begin = time.perf_counter()

        def done(outcomes: list[Any]) -> None:
            pairs = zip(chunks, outcomes, strict=True)
            good = [chunk for chunk, outcome in pairs if is_good(outcome)]
            size = len(good) * self._row_bytes
            ended = Ended(job, good, good == chunks, time.perf_counter() - begin, size)
            with self._lock:
                self._ended.append(ended)
                self._running -= 1
                self._lock.notify_all()

        with self._lock:
            self._running += 1
        if not submit(done):
            done([None] * len(chunks))

    def take_ended(self) -> list[Ended]:
        """Jobs that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def missed(self, chunks: Iterable[bytes]) -> None:
        """These were there and did not come: they count as misses for whoever asks now."""
        for chunk in chunks:
            if chunk in self._chunks:
                self._chunks[chunk].there = False

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self._running or self._ended)

    def drain(self) -> None:
        """Wait until no job touches the memory. Each has a deadline, so this ends."""
        with self._lock:
            self._lock.wait_for(lambda: not self._running)
