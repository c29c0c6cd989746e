"""Cost per key of the store alone: no network, no copies of values.

    python benchmarks/store_micro.py [--json]

Batches of 128 values of 4 KiB, 70-byte keys, 64 buckets. Reports the median of the runs in
microseconds per key; targets: get 0.6, exists 0.25, put (allocate and commit) 2.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from p2pkv.arena import Arena
from p2pkv.eviction import LRU
from p2pkv.objects import Object
from p2pkv.store import Store
from p2pkv.wire import PutOptions

BATCH, VALUE_BYTES, BUCKETS, BATCHES, RUNS = 128, 4096, 64, 256, 7
OPTIONS = PutOptions()
Batch = tuple[list[int], list[bytes], list[int]]


def batches(count: int, tag: str) -> list[Batch]:
    made = []
    for n in range(count):
        keys = [b"%s/%064d" % (tag.encode(), n * BATCH + i) for i in range(BATCH)]
        made.append(([xxh3_64_intdigest(k) % BUCKETS for k in keys], keys, [VALUE_BYTES] * BATCH))
    return made


def fresh(work: list[Batch]) -> list[Batch]:
    """The same batches with key objects as a decoder makes them: new, not hashed yet."""
    return [(b, [bytes(bytearray(k)) for k in keys], sizes) for b, keys, sizes in work]


def put(store: Store, work: list[Batch]) -> None:
    for buckets, keys, sizes in work:
        made = store.allocate_batch(buckets, keys, sizes, OPTIONS, 1)
        store.commit_batch([item for item in made if isinstance(item, Object)], 1)


def per_key_us(step: Callable[[list[Batch]], object], work: Callable[[int], list[Batch]]) -> float:
    figures = []
    for run in range(RUNS):
        todo = fresh(work(run))
        start = time.perf_counter_ns()
        step(todo)
        figures.append((time.perf_counter_ns() - start) / 1000 / BATCH / len(todo))
    return statistics.median(figures)


def measure() -> dict[str, float]:
    base = batches(BATCHES, "base")
    size = BATCHES * BATCH * (VALUE_BYTES + 64)
    figures = {}
    with Arena.create(2 * size, "bench", prefault=True) as arena:
        store = Store(arena, metadata_limit_bytes=1 << 30)
        for bucket in range(BUCKETS):
            store.open_bucket(bucket)
        put(store, base)

        def get(work: list[Batch]) -> None:
            for buckets, keys, _ in work:
                store.get_batch(buckets, keys, 1)

        def exists(work: list[Batch]) -> None:
            for buckets, keys, _ in work:
                store.exists_batch(buckets, keys, 1)

        def match(work: list[Batch]) -> None:
            for buckets, keys, _ in work:
                store.match(buckets, keys, 1)

        def tokens(work: list[Batch]) -> None:
            for buckets, keys, _ in work:
                found = [item for item in store.get_batch(buckets, keys, 1) if item is not None]
                store.acquire_batch(found)
                store.release_batch(found)

        figures["get"] = per_key_us(get, lambda _: base)
        figures["get_with_tokens"] = per_key_us(tokens, lambda _: base)
        figures["exists"] = per_key_us(exists, lambda _: base)
        figures["match"] = per_key_us(match, lambda _: base)
        figures["put_overwrite"] = per_key_us(lambda w: put(store, w), lambda _: base)
        rounds = [batches(BATCHES // RUNS, f"new{run}") for run in range(RUNS)]
        figures["put_new"] = per_key_us(lambda w: put(store, w), lambda run: rounds[run])
        more = [batches(BATCHES, f"more{run}") for run in range(RUNS)]
        for work in more[:2]:
            put(store, fresh(work))
        figures["put_evicting"] = per_key_us(
            lambda w: put(store, w), lambda run: batches(BATCHES, f"full{run}")
        )
        store.validate()
    policy: LRU[int] = LRU()
    entries = list(range(BATCH * BATCHES))
    for entry in entries:
        policy.add(entry)
    start = time.perf_counter_ns()
    policy.touch_batch(entries)
    figures["lru_touch"] = (time.perf_counter_ns() - start) / 1000 / len(entries)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    figures = measure()
    if parser.parse_args().json:
        print(json.dumps(figures))
        return
    for name, figure in figures.items():
        print(f"{name:16} {figure:7.3f} µs/key")


if __name__ == "__main__":
    main()
