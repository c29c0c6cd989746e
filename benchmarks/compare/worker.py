"""A process that drives one store: reads orders and writes answers, one line of JSON each.

    python -m compare.worker '{"store": "redis_store:Redis", "options": {"port": 6379}, ...}'

The order of calls is that of the keys. Times are those of the calls alone: values are compared
byte by byte afterwards, and keys are deleted before they are put again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .work import Store, Work, check, has

WRITES = ("put", "batch_put")
NEEDS = {"kv_read": "batch_get", "kv_mixed": "batch_get"}
"""Workloads that are no calls of a store, and the call without which they cannot be done."""
CALLS_MIN = 5
WARM_UPS = 3
OVERWRITES_EVERY = 10
KEYS_ASKED = (100, 1000)

Call = Callable[[int], Any]


class Worker:
    def __init__(self, spec: dict[str, Any]) -> None:
        module, _, name = spec["store"].partition(":")
        kind = getattr(importlib.import_module(f"compare.{module}"), name)
        self.store: Store = kind(**spec["options"])
        self.owner = spec["owner"]
        self.out = self.store.allocate(spec["out_bytes"])

    def load(self, size: int, batch: int, set_bytes: int) -> dict[str, Any]:
        """Other keys and values. Says what the store can do."""
        self.w = Work(size, batch, set_bytes, self.owner, self.out)
        self.store.load(self.w)
        calls = [name for name in vars(Store) if not name.startswith("_") and has(self.store, name)]
        return {"calls": calls + [name for name, call in NEEDS.items() if call in calls]}

    def fill(self) -> dict[str, Any]:
        """Put all keys."""
        for low in range(0, self.w.n, self.w.batch):
            self.store.overwrite(low, low + self.w.batch)
        return {}

    def clear(self) -> dict[str, Any]:
        self.store.clear()
        return {}

    def measure(
        self, workload: str, seconds: float, spin: bool = False, begin_ns: int = 0
    ) -> dict[str, Any]:
        """Make calls for so long; ``begin_ns`` is when (CLOCK_MONOTONIC), for several at once."""
        base, _, count = workload.partition(":")
        call = self._call(base, int(count or 0))
        with spinning() if spin else contextlib.nullcontext():
            if base in WRITES:
                times = self._measure_writes(call, seconds, base)
            else:
                for i in range(WARM_UPS):
                    call(i)
                wait_until(begin_ns)
                times = timed(call, seconds, CALLS_MIN)
        return summary(times)

    def _measure_writes(self, call: Call, seconds: float, base: str) -> list[int]:
        """Rounds over all keys; they are deleted before each."""
        calls = self.w.n // (self.w.batch if base == "batch_put" else 1)
        times: list[int] = []
        while sum(times) < seconds * 1e9 or len(times) < CALLS_MIN:
            self.store.clear()
            left = seconds - sum(times) / 1e9
            times += timed(call, left, min(calls, CALLS_MIN), calls)
        return times

    def verify(self, workload: str) -> dict[str, Any]:
        """Compare one batch byte by byte; ``values`` of them."""
        base, w, store = workload.partition(":")[0], self.w, self.store
        span = w.at(random.randrange(w.n))
        wanted = w.values[span]
        if base in WRITES:
            store.overwrite(span.start, span.stop)
        if base in ("batch_get_into", "kv_read", "kv_mixed") and has(store, "batch_get_into"):
            w.out[:] = bytes(len(w.out))
            store.batch_get_into(span.start, span.stop)
            got: Any = w.buffers
        elif base == "get_into":
            return self._verify_get_into(span)
        elif base == "views":
            got = store.views(span.start, span.stop)
        elif base == "get" or not has(store, "batch_get"):
            got = [store.get(i) for i in range(span.start, span.stop)]
        else:
            got = store.batch_get(span.start, span.stop)
        for value, right in zip(got, wanted, strict=True):
            check(bytes(value) == right, base)
        return {"values": len(wanted)}

    def _verify_get_into(self, span: slice) -> dict[str, Any]:
        for i in range(span.start, span.stop):
            self.w.buffers[0][:] = bytes(self.w.size)
            self.store.get_into(i)
            check(bytes(self.w.buffers[0]) == self.w.values[i], "get_into")
        return {"values": span.stop - span.start}

    def close(self) -> dict[str, Any]:
        self.store.close()
        return {}

    # -- workloads

    def _call(self, base: str, count: int) -> Call:
        w, store = self.w, self.store
        if base in ("put", "get", "get_into"):
            one = getattr(store, base)
            return lambda i: one(i % w.n)
        if base in ("batch_put", "batch_get", "batch_get_into", "views", "overwrite"):
            many = getattr(store, base)
            spans = [w.at(i) for i in range(w.n // w.batch)]
            return lambda i: many(spans[i % len(spans)].start, spans[i % len(spans)].stop)
        if base == "exists":
            keys, wanted = w.probes(count)
            return lambda i: check(store.exists(keys) == wanted, base)
        if base == "match":
            there = count * 3 // 4
            keys = w.keys[:there] + w.absent[: count - there]
            return lambda i: check(store.match(keys) == there, base)
        return self._read_sequence if base == "kv_read" else self._mixed

    def _read_sequence(self, i: int) -> None:
        """What an engine does with a request: how much of its prefix is there, and fetch that."""
        w, span = self.w, self.w.at(i)
        there = w.batch
        if has(self.store, "match"):
            there = self.store.match(w.keys[span] + w.absent[span][: w.batch // 4])
            check(there == w.batch, "match")
        if has(self.store, "batch_get_into"):
            self.store.batch_get_into(span.start, span.start + there)
        else:
            self.store.batch_get(span.start, span.start + there)

    def _mixed(self, i: int) -> None:
        if i % OVERWRITES_EVERY == OVERWRITES_EVERY - 1:
            span = self.w.at(i // OVERWRITES_EVERY)
            self.store.overwrite(span.start, span.stop)
        else:
            self._read_sequence(i)


def timed(call: Call, seconds: float, calls_min: int, calls_max: int = 1 << 30) -> list[int]:
    """Nanoseconds of each call."""
    clock, times = time.perf_counter_ns, []
    end = clock() + int(seconds * 1e9)
    i = 0
    while i < calls_max and (i < calls_min or clock() < end):
        began = clock()
        call(i)
        times.append(clock() - began)
        i += 1
    return times


def summary(times: list[int]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "calls": len(times),
        "seconds": sum(times) / 1e9,
        "p50_us": statistics.median(ordered) / 1e3,
        "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1e3,
    }


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """A thread of pure Python that never waits, beside the calls."""
    stopped = False

    def spin() -> None:
        while not stopped:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped = True
        thread.join()


def wait_until(when_ns: int) -> None:
    left = when_ns - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker: Worker | None = None
    for line in sys.stdin:
        order, arguments = json.loads(line)
        try:
            worker = worker or Worker(spec)
            answer = getattr(worker, order)(**arguments)
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
