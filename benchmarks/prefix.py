"""What an engine pays to find and load a prefix: 128 blocks of 64 KiB.

    python benchmarks/prefix.py [--path auto|tcp] [--json]

``match`` and ``load`` of ``p2pkv.adapters.cache.Cache`` beside a plain ``batch_get_into`` of the
same keys and a ``batch_exists``, which take turns on the same two nodes. Targets: at most 1.5 times
the plain call, and at most 3 messages to each owner.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from p2pkv import Client
from p2pkv.adapters.cache import Cache, CacheConfig
from p2pkv.adapters.keys import BlockKeys, Fingerprint
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster

BLOCKS, BLOCK_BYTES = 128, 64 << 10
SEQUENCES, ROUNDS = 16, 15
RATIO_MAX, MESSAGES_MAX = 1.5, 3
PATIENT = CacheConfig(lookup_timeout_s=5.0, transfer_timeout_s=10.0)
FINGERPRINT = Fingerprint(model="m", dtype="bfloat16", block_tokens=16, layout="page_first")
SENT = ("requests_", "read_requests_")
LOOKING = {"requests_stats_total", "requests_routes_total", "requests_refused_total"}
"""Requests that look at a node, such as those of this count."""
Sequence = list[bytes]


def sequences(kv: Client) -> list[Sequence]:
    """Keys of sequences whose blocks lie on both nodes."""
    made: list[Sequence] = []
    for n in range(1000):
        chain = [hashlib.sha256(f"{n}/{i}".encode()).digest() for i in range(BLOCKS)]
        keys = BlockKeys(FINGERPRINT).of(chain)
        if len({place.member for place in kv.locate(keys) if place is not None}) == 2:
            made.append(keys)
        if len(made) == SEQUENCES:
            return made
    raise SystemExit("no keys lie on both nodes")


def requests(kv: Client) -> dict[str, float]:
    """How many each node has had."""
    return {
        node: sum(n for name, n in stats.figures.items()
                  if name.startswith(SENT) and name not in LOOKING)
        for node, stats in kv.stats(timeout=10.0).items()
    }  # fmt: skip


def measure(cache: Cache) -> dict[str, Any]:
    kv = cache.client
    kv.batch_exists(["any"])  # from now on it knows who owns what
    work = sequences(kv)
    block = bytes(range(256)) * (BLOCK_BYTES // 256)
    for keys in work:
        assert cache.store(keys, [block] * BLOCKS) == [1] * BLOCKS
    memory = bytearray(BLOCKS * BLOCK_BYTES)
    view = memoryview(memory)
    targets = [view[i : i + BLOCK_BYTES] for i in range(0, len(memory), BLOCK_BYTES)]

    def engine(keys: Sequence) -> None:
        assert cache.match(keys) == BLOCKS
        assert cache.load(keys, targets) == [BLOCK_BYTES] * BLOCKS

    ways: dict[str, Callable[[Sequence], Any]] = {
        "match and load": engine,
        "batch_get_into": lambda keys: kv.batch_get_into(keys, targets),
        "batch_exists": kv.batch_exists,
    }
    took = {way: statistics.median(times) * 1e6 for way, times in turns(ways, work).items()}
    before = requests(kv)
    engine(work[0])
    after = requests(kv)
    return {
        "us": {way: round(us) for way, us in took.items()},
        "ratio": round(took["match and load"] / took["batch_get_into"], 2),
        "messages": {node: after[node] - before[node] for node in after},
    }


def turns(
    ways: dict[str, Callable[[Sequence], Any]], work: list[Sequence]
) -> dict[str, list[float]]:
    """Seconds of each call; the first round, in which connections are made, is not counted.

    Each way goes through all sequences before the next does: right after another one it would find
    their bytes in the processor's cache.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):
        for way, call in ways.items():
            for keys in work:
                begin = time.perf_counter()
                call(keys)
                if turn:
                    times[way].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", choices=["auto", "tcp"], default="tcp")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = 4 * SEQUENCES * BLOCKS * BLOCK_BYTES
    with (
        EtcdCluster(1) as etcd,
        Cluster(2, etcd=etcd, memory_limit_bytes=size) as cluster,
        Cache(cluster.client(path=options.path), PATIENT, owned=True) as cache,
    ):
        cache.connect(10.0)
        figures = {"path": options.path} | measure(cache)
    figures["reached"] = (
        figures["ratio"] <= RATIO_MAX and max(figures["messages"].values()) <= MESSAGES_MAX
    )
    if options.json:
        print(json.dumps(figures))
        return
    for way, us in figures["us"].items():
        print(f"{way:<15} {us:>7} us")
    print(f"ratio {figures['ratio']} (at most {RATIO_MAX}), messages {figures['messages']}")


if __name__ == "__main__":
    main()
