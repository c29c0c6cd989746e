"""The half in each worker: moves blocks between the engine's memory and the store.

Loads and saves have threads of their own, each with a buffer through which the blocks go piece by
piece. Every load that was planned is reported as finished, and every save as done, whatever comes
between: the engine holds memory until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from p2pkv.adapters.backlog import BacklogLimits
from p2pkv.adapters.cache import Cache
from p2pkv.adapters.keys import BlockKeys, Fingerprint
from p2pkv.adapters.vllm.options import Options
from p2pkv.adapters.vllm.pages import Pages, Staging
from p2pkv.adapters.vllm.plans import LOG, SavesDone, StepPlan, Transfer
from p2pkv.adapters.vllm.tally import Tally
from p2pkv.adapters.workers import Job, Workers
from p2pkv.errors import P2PKVError

log = logging.getLogger(LOG)


class Buffers:
    """As many as there are threads, so there is always one."""

    def __init__(self, pages: Pages, count: int, bytes_each: int) -> None:
        rows = max(1, bytes_each // pages.block_bytes)
        self._free: SimpleQueue[Staging] = SimpleQueue()
        for _ in range(count):
            self._free.put(pages.staging(rows))

    @contextmanager
    def lent(self) -> Iterator[Staging]:
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


class Working:
    """Any thread may ask it; plans come from one."""

    def __init__(
        self,
        cache: Cache,
        pages: Pages,
        rank: int,
        options: Options,
        tally: Tally,
        *,
        writer: bool = True,
    ) -> None:
        """``writer``: not if another worker has the same bytes, and saves them."""
        self._cache = cache
        self._pages = pages
        self._rank = rank
        self._options = options
        self._tally = tally
        self._writer = writer
        self._keys: BlockKeys | None = None
        self._fingerprint: Fingerprint | None = None
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._saved: Counter[int] = Counter()
        threads = cache.config.threads
        # Engine memory bounds what waits, so it is not bounded by bytes here.
        limits = BacklogLimits(cache.config.jobs_max, age_max_ns=cache.config._backlog().age_max_ns)
        self._loads = Workers("p2pkv-vllm-loads", threads, limits)
        self._saves = Workers("p2pkv-vllm-saves", threads, limits)
        each = options.staging_bytes // (2 * threads)
        self._load_buffers = Buffers(pages, threads, each)
        self._save_buffers = Buffers(pages, threads if writer else 0, each)

    # -- a step

    def start_loads(self, plan: StepPlan) -> None:
        """Load what is planned, beside the engine."""
        if plan.loads:
            keys, now = self._keys_for(plan), self._pages.now()
            for load in plan.loads:
                self._start_load(keys, load, now)

    def start_saves(self, plan: StepPlan) -> None:
        """Save what is planned; its blocks are complete."""
        if plan.saves:
            keys, now = self._keys_for(plan), self._pages.now()
            for save in plan.saves:
                self._start_save(keys, save, now)

    def _keys_for(self, plan: StepPlan) -> BlockKeys:
        if self._keys is None or plan.fingerprint != self._fingerprint:
            assert plan.fingerprint is not None
            self._keys = BlockKeys(plan.fingerprint, self._rank, self._options.blocks_per_group)
            self._fingerprint = plan.fingerprint
        return self._keys

    # -- loads

    def _start_load(self, keys: BlockKeys, load: Transfer, now: Any) -> None:
        blocks = load.blocks

        def run() -> None:
            loaded = 0
            try:
                loaded = self._load(_names(keys, load), blocks, now)
            finally:
                self._load_ended(load.request, blocks[loaded:])

        def drop(why: str) -> None:
            log.warning("a load of %d blocks was dropped: %s", len(blocks), why)
            self._load_ended(load.request, blocks)

        if not self._loads.submit(Job(run, drop), 0):
            drop("too many were waiting")

    def _load(self, names: Sequence[bytes], blocks: Sequence[int], now: Any) -> int:
        """How many blocks came, without a gap."""
        begin, done = time.perf_counter(), 0
        with self._load_buffers.lent() as buffer:
            for low in range(0, len(names), buffer.rows):
                part = names[low : low + buffer.rows]
                rows = [buffer.row(i) for i in range(len(part))]
                came = self._came(self._cache.load(part, rows))
                if came:
                    self._pages.scatter(buffer, blocks[low : low + came], now)
                done += came
                if came < len(part):
                    break
        size = done * self._pages.block_bytes
        self._tally.add(
            loaded_blocks=done, loaded_bytes=size, load_seconds=time.perf_counter() - begin
        )
        return done

    def _came(self, outcomes: Sequence[Any]) -> int:
        """How many values came whole before the first that did not."""
        for i, outcome in enumerate(outcomes):
            if outcome != self._pages.block_bytes:
                log.info("a block was found and not loaded: %s", _told(outcome))
                return i
        return len(outcomes)

    def _load_ended(self, request: str, failed: Sequence[int]) -> None:
        self._tally.add(load_failed_blocks=len(failed))
        with self._lock:
            self._failed.update(failed)
            self._finished.add(request)

    # -- saves

    def _start_save(self, keys: BlockKeys, save: Transfer, now: Any) -> None:
        if not self._writer:
            self._save_ended(save.job, 0)
            return
        blocks = save.blocks

        def run() -> None:
            failed = len(blocks)
            try:
                failed = self._save(_names(keys, save), blocks, now)
            finally:
                self._save_ended(save.job, failed)

        def drop(why: str) -> None:
            self._save_ended(save.job, len(blocks))

        if not self._saves.submit(Job(run, drop), 0):
            drop("too many were waiting")

    def _save(self, names: Sequence[bytes], blocks: Sequence[int], now: Any) -> int:
        """How many blocks were not stored."""
        begin, failed = time.perf_counter(), 0
        with self._save_buffers.lent() as buffer:
            for low in range(0, len(names), buffer.rows):
                part = names[low : low + buffer.rows]
                self._pages.gather(blocks[low : low + len(part)], buffer, now)
                rows = [buffer.row(i) for i in range(len(part))]
                outcomes = self._cache.store(part, rows, ttl=self._options.ttl_s, write_once=True)
                failed += sum(isinstance(o, P2PKVError) or not o for o in outcomes)
        saved = len(names) - failed
        self._tally.add(
            saved_blocks=saved,
            saved_bytes=saved * self._pages.block_bytes,
            save_seconds=time.perf_counter() - begin,
        )
        return failed

    def _save_ended(self, job: int, failed: int) -> None:
        self._tally.add(save_failed_blocks=failed)
        with self._lock:
            self._saved[job] += 1

    # -- what became of it

    def take_finished(self) -> set[str]:
        """Requests whose load has ended since the last call. To be asked before ``take_failed``."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed(self) -> set[int]:
        """Blocks that were not loaded."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def take_saved(self) -> SavesDone | None:
        """Saves that are done with."""
        with self._lock:
            saved, self._saved = self._saved, Counter()
        return SavesDone(saved) if saved else None

    # -- life

    def flush(self, timeout_s: float) -> bool:
        """Wait until no save is under way; whether that was reached."""
        return self._saves.idle(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing touches the engine's memory; whether that was reached."""
        end = time.monotonic() + timeout_s
        return self._loads.idle(timeout_s) and self._saves.idle(max(0.0, end - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Let saves end, drop what is left."""
        end = time.monotonic() + timeout_s
        self.flush(timeout_s)
        for workers in (self._loads, self._saves):
            workers.close(max(0.0, end - time.monotonic()))


def _names(keys: BlockKeys, transfer: Transfer) -> list[bytes]:
    return [name for run in transfer.runs for name in keys.of_group(run.first, run.hashes)]


def _told(outcome: Any) -> str:
    if outcome is None:
        return "it is not there any more"
    if isinstance(outcome, P2PKVError):
        return f"{type(outcome).__name__}: {outcome}"
    return f"it has {outcome} bytes"
