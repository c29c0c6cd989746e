"""What checksums cost: puts and gets under each policy, side by side on one node.

    python benchmarks/checksums.py [--seconds 0.4] [--rounds 5]

Prints keys per second under ``never`` (as under ``demand``) and, for the other policies of client
and node, the ratio to it: of the best of rounds in which all policies take turns. First the
native functions alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

from p2pkv import Client, _native
from p2pkv.testing.cluster import Cluster

POLICIES = ["never", "remote", "always"]
WORK = [(1, 4 << 10), (128, 4 << 10), (32, 64 << 10), (32, 1 << 20)]


def rate(job: Callable[[], object], amount: float, seconds: float) -> float:
    """``amount`` per second, over ``seconds``."""
    begin = time.perf_counter()
    count = 0
    while time.perf_counter() - begin < seconds:
        job()
        count += 1
    return amount * count / (time.perf_counter() - begin)


def native(seconds: float) -> None:
    print("native, one thread, GB/s: size x count, checksum, without vectors, copy, both in one")
    for size, count in ((4 << 10, 64), (64 << 10, 64), (1 << 20, 64)):
        sources = _native.Pieces.sources([os.urandom(size) for _ in range(count)])
        targets = _native.Pieces.targets([bytearray(size) for _ in range(count)])
        sizes, total = [size] * count, size * count / 1e9
        jobs: list[Callable[[], object]] = [
            partial(_native.checksums, sources, sizes),
            partial(_native.checksums, sources, sizes, portable=True),
            partial(_native.copy, targets, sources),
            partial(_native.copy_checksums, targets, sources, sizes),
        ]
        print(f"{size:8} x {count}", *(f"{rate(job, total, seconds):6.1f}" for job in jobs))


def compare(path: str, seconds: float, rounds: int) -> None:
    clusters = {p: Cluster(1, memory_limit_bytes=512 << 20, checksums=p) for p in POLICIES}
    clients: dict[str, Client] = {}
    for policy, cluster in clusters.items():
        cluster.start()
        clients[policy] = cluster.client(path=path, checksums=policy)
    for count, size in WORK:
        keys = [f"{i}" for i in range(count)]
        values = [os.urandom(size) for _ in keys]
        targets = [bytearray(size) for _ in keys]
        items = dict(zip(keys, values, strict=True))
        for name in ("put", "get"):
            found: dict[str, list[float]] = {p: [] for p in POLICIES}
            for _ in range(rounds):
                for policy, kv in clients.items():
                    kv.batch_put(items)
                    put = partial(kv.batch_put, items)
                    get = partial(kv.batch_get_into, keys, targets)
                    found[policy].append(rate(put if name == "put" else get, count, seconds))
            base = max(found["never"])
            ratios = {p: max(found[p]) / base for p in POLICIES[1:]}
            print(f"{path:5} {name} {count:4} x {size:8}: {base:9.0f} keys/s",
                  *(f"{p} {r:.2f}" for p, r in ratios.items()), flush=True)  # fmt: skip
    for policy, cluster in clusters.items():
        clients[policy].close()
        cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    native(given.seconds)
    for path in ("auto", "tcp"):
        compare(path, given.seconds, given.rounds)


if __name__ == "__main__":
    main()
