"""Calls of AsyncClient over each path, beside each other: data connection, shared memory, ZeroMQ.

    python benchmarks/async_micro.py [--json] [--rounds N]

One node in a process of its own, one client per path, calls taken in turns, so that what else the
machine does meets all of them. Reports medians in microseconds, and how often each path is faster
than ZeroMQ. With ``--copies`` it measures instead from which size on a copy out of shared memory
is better made on a thread: how long the loop stands still, and how long the call takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from p2pkv import AsyncClient, async_path
from p2pkv.etcd_server import EtcdCluster
from p2pkv.hosted import new_event_loop
from p2pkv.testing.cluster import Cluster

KIB, MIB = 1 << 10, 1 << 20
PATHS = ("zmq", "tcp", "auto")
WARM_UP_S = 0.2
Call = Callable[[AsyncClient], Awaitable[Any]]

KEYS = [f"k{i}" for i in range(32)]
VALUES = {key: os.urandom(64 * KIB) for key in KEYS}
LARGE = os.urandom(8 * MIB)
BUFFER = bytearray(8 * MIB)


async def _hundred(kv: AsyncClient) -> None:
    await asyncio.gather(*[kv.get("small") for _ in range(100)])


CALLS: dict[str, tuple[Call, int]] = {
    "get 4 KiB": (lambda kv: kv.get("small"), 200),
    "100 gets of 4 KiB at once": (_hundred, 6),
    "batch_get 32 x 64 KiB": (lambda kv: kv.batch_get(KEYS), 10),
    "batch_put 32 x 64 KiB": (lambda kv: kv.batch_put(VALUES), 10),
    "get_into 8 MiB": (lambda kv: kv.get_into("large", BUFFER), 5),
    "put 8 MiB": (lambda kv: kv.put("large", LARGE), 5),
}
"""What is called, and how often in a round."""


async def times_us(call: Call, kv: AsyncClient, number: int) -> list[float]:
    times = []
    for _ in range(number):
        start = time.perf_counter_ns()
        await call(kv)
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


async def open_client(cluster: Cluster, path: str) -> AsyncClient:
    """A client whose data connection, if it is to have one, is there."""
    kv = cluster.async_client(path=path)
    await kv.batch_put(VALUES)
    await kv.put("small", bytes(4 * KIB))
    await kv.put("large", LARGE)
    await asyncio.sleep(WARM_UP_S)
    return kv


async def compare(cluster: Cluster, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by call and path."""
    clients = {path: await open_client(cluster, path) for path in PATHS}
    results: dict[str, dict[str, list[float]]] = {c: {p: [] for p in PATHS} for c in CALLS}
    for name, (call, number) in CALLS.items():
        for _ in range(rounds):
            for path, kv in clients.items():
                results[name][path] += await times_us(call, kv, number)
    for kv in clients.values():
        await kv.close()
    return {c: {p: statistics.median(t) for p, t in paths.items()} for c, paths in results.items()}


async def stall_us(call: Awaitable[Any]) -> float:
    """The longest time during a call that the loop did nothing else."""
    longest, last = 0.0, time.perf_counter_ns()
    task = asyncio.ensure_future(call)
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter_ns()
        longest, last = max(longest, (now - last) / 1000), now
    await task
    return longest


async def compare_copies(cluster: Cluster, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by size: on the loop and on a thread."""
    usual = async_path.OFF_LOOP_MIN
    kv = await open_client(cluster, "auto")
    results = {}
    for size in (256 * KIB, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB):
        await kv.put("large", LARGE[:size])
        found: dict[str, list[float]] = {}
        for _ in range(10 * rounds):
            for where, least in (("loop", 1 << 62), ("thread", 0)):
                async_path.OFF_LOOP_MIN = least
                call = lambda kv: kv.get_into("large", BUFFER)  # noqa: E731
                found.setdefault(where, []).extend(await times_us(call, kv, 1))
                found.setdefault(f"{where}, stall", []).append(await stall_us(call(kv)))
        results[f"{size // KIB} KiB"] = {k: statistics.median(t) for k, t in found.items()}
    async_path.OFF_LOOP_MIN = usual
    await kv.close()
    return results


def show(results: dict[str, dict[str, float]], base: str) -> None:
    for name, found in results.items():
        print(f"{name:28}", end="")
        for column, value in found.items():
            ratio = f" ({found[base] / value:4.1f}x)" if base in found and column != base else ""
            print(f"  {column} {value:8.0f} us{ratio}", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    loop = new_event_loop()
    with EtcdCluster(1) as etcd, Cluster(1, etcd=etcd, memory_limit_bytes=512 * MIB) as cluster:
        measure = compare_copies if arguments.copies else compare
        results = loop.run_until_complete(measure(cluster, arguments.rounds))
    loop.close()
    print(json.dumps(results)) if arguments.json else show(results, "zmq")


if __name__ == "__main__":
    main()
