"""Reading by the published index of a node on the same host, beside memcpy and beside asking it.

    python benchmarks/index_micro.py [--json]

One node in a process of its own and one client. Batches go over a working set four times their
size, as cold as in a store; ``memcpy`` copies the same number of bytes from one such set to
another, by one thread. All ways of one row take turns; each figure is the median. Read the ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from p2pkv.client import Client
from p2pkv.routing import THERE
from p2pkv.testing.cluster import Cluster

KIB, MIB = 1 << 10, 1 << 20
BATCHES = [(32, 64 * KIB), (32, 256 * KIB), (32, MIB), (32, 4 * MIB)]
SETS = 4
RUNS = 15
Step = Callable[[], object]


def take_turns(ways: dict[str, Step], runs: int = RUNS) -> dict[str, float]:
    """Median seconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 2):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[2:]) for name, taken in seconds.items()}


class Batches:
    """Values of one size in the store, in sets, and buffers for them."""

    def __init__(self, kv: Client, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.sets = max(1, min(SETS, 256 * MIB // (count * size)))
        self.keys = [[f"{size}/{s}/{i:040d}" for i in range(count)] for s in range(self.sets)]
        self.source = np.ones((self.sets, count, size), np.uint8)
        self.target = np.ones((self.sets, count, size), np.uint8)
        self.buffers = [[memoryview(b) for b in one] for one in self.target]
        self._turn = 0
        for keys, values in zip(self.keys, self.source, strict=True):
            kv.batch_put(dict(zip(keys, values, strict=True)))

    def next(self) -> int:
        self._turn = (self._turn + 1) % self.sets
        return self._turn

    def memcpy(self) -> None:
        n, size = self.next(), self.size
        to, of = self.target[n].ctypes.data, self.source[n].ctypes.data
        for at in range(0, self.count * size, size):
            ctypes.memmove(to + at, of + at, size)

    def get_into(self, kv: Client) -> None:
        n = self.next()
        kv.batch_get_into(self.keys[n], self.buffers[n])


def published(kv: Client, keys: list[str]) -> None:
    """Wait until the client reads these by the index."""
    deadline = time.monotonic() + 10
    while set(kv._ops._there([key.encode() for key in keys])) != {THERE}:
        kv.batch_exists(keys)
        if time.monotonic() > deadline:
            raise SystemExit("the index is not in use")


def measure_batches(kv: Client, asking: Client) -> dict[str, dict[str, float]]:
    """GB/s of each way."""
    figures = {}
    for count, size in BATCHES:
        work = Batches(kv, count, size)
        published(kv, work.keys[0])
        ways: dict[str, Step] = {
            "memcpy": work.memcpy,
            "index": lambda w=work: w.get_into(kv),
            "asking": lambda w=work: w.get_into(asking),
        }
        taken = take_turns(ways)
        name = f"get {count} x {size // KIB} KiB"
        figures[name] = {way: count * size / s / 1e9 for way, s in taken.items()}
        kv.delete_range(f"{size}/")
    return figures


def measure_calls(kv: Client, asking: Client) -> dict[str, dict[str, float]]:
    """Microseconds of one call."""
    figures = {}
    for size in (4 * KIB, 64 * KIB, MIB):
        work = Batches(kv, 16, size)
        published(kv, work.keys[0])
        key, buffer = work.keys[0][0], work.buffers[0][0]
        ways: dict[str, Step] = {
            "index": lambda k=key, b=buffer: kv.get_into(k, b),
            "asking": lambda k=key, b=buffer: asking.get_into(k, b),
        }
        taken = take_turns(ways, 400)
        figures[f"one get_into of {size // KIB} KiB"] = {n: s * 1e6 for n, s in taken.items()}
        kv.delete_range(f"{size}/")
    return figures


def measure_keys(kv: Client, asking: Client) -> dict[str, dict[str, float]]:
    """Million keys a second."""
    keys = [f"key/{i:060d}" for i in range(1000)]
    kv.batch_put(dict.fromkeys(keys, b"v" * 64))
    published(kv, keys)
    figures = {}
    for n in (100, 1000):
        some = keys[:n]
        ways: dict[str, Step] = {
            "exists, index": lambda k=some: kv.batch_exists(k),
            "exists, asking": lambda k=some: asking.batch_exists(k),
            "match, index": lambda k=some: kv.match_prefix(k),
            "match, asking": lambda k=some: asking.match_prefix(k),
        }
        figures[f"{n} keys"] = {w: n / s / 1e6 for w, s in take_turns(ways, 200).items()}
    return figures


def measure_beside(kv: Client) -> dict[str, dict[str, float]]:
    """GB/s alone, and with a thread that runs nothing but Python."""
    work = Batches(kv, 64, MIB)
    published(kv, work.keys[0])
    alone = take_turns({"alone": lambda: work.get_into(kv)})["alone"]
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        beside = take_turns({"beside": lambda: work.get_into(kv)})["beside"]
    finally:
        stop.set()
        thread.join()
    kv.delete_range(f"{MIB}/")
    total = 64 * MIB / 1e9
    return {"get 64 x 1024 KiB": {"alone": total / alone, "a busy thread beside": total / beside}}


def report(figures: dict[str, dict[str, float]], unit: str) -> None:
    for row, ways in figures.items():
        base = next(iter(ways.values()))
        cells = "  ".join(f"{n} {v:.2f} ({v / base:.2f})" for n, v in ways.items())
        print(f"{row:26} {unit:9} {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    size = 1536 * MIB
    with Cluster(nodes=1, memory_limit_bytes=size, prefault=True) as cluster, ExitStack() as stack:
        kv, asking = (stack.enter_context(cluster.client()) for _ in range(2))
        asking._ops.router.published = None
        figures = {
            "gbs": measure_batches(kv, asking),
            "us": measure_calls(kv, asking),
            "mkeys": measure_keys(kv, asking),
            "beside_gbs": measure_beside(kv),
        }
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for unit, rows in figures.items():
        report(rows, unit)


if __name__ == "__main__":
    main()
