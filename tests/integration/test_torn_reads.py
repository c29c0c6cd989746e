"""Values that are overwritten while others read them: each read gets one version, whole.

One process writes; the content of a value says which version it is. Two others read, by every call
that reads, and must never see a mixture, a miss, or an older version after a newer one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pkv import AsyncClient, Client
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster

Place = tuple[Any, str, str]
"""Endpoints of etcd, the cluster's name, and how bytes travel."""

SECONDS = 5.0
KEYS = [f"torn/{i}" for i in range(4)]
KiB = 1 << 10
SIZE_MAX = 1024 * KiB


def size_of(version: int) -> int:
    """256 KiB to 1 MiB, another one for each version."""
    return 256 * KiB + version * 8 * 7919 % (768 * KiB)


def value_of(version: int) -> bytes:
    return np.full(size_of(version) // 8, version, dtype=np.uint64).tobytes()


def version_of(value: Any) -> int:
    """The version that a value is of. Raises AssertionError if it is not one version, whole."""
    assert value is not None, "a miss"
    words = np.frombuffer(value, dtype=np.uint64)
    version = int(words[0])
    assert len(words) * 8 == size_of(version), f"version {version} with {len(words) * 8} bytes"
    assert (words == version).all(), f"a mixture of {np.unique(words)[:10]}"
    return version


def write(kv: Client, until: float) -> int:
    version = 1
    while time.time() < until:
        version += 1
        if version % 5:
            kv.put(KEYS[version % 4], value_of(version))
        else:
            kv.batch_put(dict.fromkeys(KEYS, value_of(version)))
    return version


class Seen:
    """What a reader has seen, and how often it looked."""

    def __init__(self) -> None:
        self.versions = [0] * len(KEYS)
        self.reads = 0

    def take(self, values: list[Any]) -> None:
        for i, value in enumerate(values):
            version = version_of(value)
            assert version >= self.versions[i], f"{version} after {self.versions[i]}"
            self.versions[i] = version
            self.reads += 1


def buffers() -> list[bytearray]:
    return [bytearray(SIZE_MAX) for _ in KEYS]


def cut(into: list[bytearray], sizes: list[int | None]) -> list[Any]:
    return [None if n is None else memoryview(b)[:n] for b, n in zip(into, sizes, strict=True)]


def read(kv: Client, until: float) -> int:
    seen, into = Seen(), buffers()
    while time.time() < until:
        seen.take([kv.get(key) for key in KEYS])
        seen.take(cut(into, [kv.get_into(k, b) for k, b in zip(KEYS, into, strict=True)]))
        seen.take(kv.batch_get(KEYS))
        seen.take(cut(into, kv.batch_get_into(KEYS, into)))
        found = dict(kv.scan("torn/"))
        seen.take([found[key.encode()] for key in KEYS])
    return seen.reads


async def read_async(kv: AsyncClient, until: float) -> int:
    seen, into = Seen(), buffers()
    while time.time() < until:
        seen.take(await asyncio.gather(*[kv.get(key) for key in KEYS]))
        gets = [kv.get_into(k, b) for k, b in zip(KEYS, into, strict=True)]
        seen.take(cut(into, await asyncio.gather(*gets)))
        seen.take(await kv.batch_get(KEYS))
        seen.take(cut(into, await kv.batch_get_into(KEYS, into)))
    return seen.reads


def run(work: Callable[[Client, float], int], results: Any, begin: Any, place: Place) -> None:
    try:
        with Client(place[0], cluster=place[1], path=place[2]) as kv:
            kv.batch_get(KEYS)
            begin.wait(60)
            results.put((work.__name__, work(kv, time.time() + SECONDS)))
    except BaseException:
        results.put((work.__name__, traceback.format_exc()))


def run_async(results: Any, begin: Any, place: Place) -> None:
    async def main() -> int:
        async with AsyncClient(place[0], cluster=place[1], path=place[2]) as kv:
            await kv.batch_get(KEYS)
            begin.wait(60)
            return await read_async(kv, time.time() + SECONDS)

    try:
        results.put(("read_async", asyncio.run(main())))
    except BaseException:
        results.put(("read_async", traceback.format_exc()))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "tcp", "zmq"])
def test_readers_of_what_is_overwritten_get_one_version_whole(etcd: EtcdCluster, path: str) -> None:
    context = multiprocessing.get_context("spawn")
    with Cluster(1, etcd=etcd) as cluster:
        with cluster.client() as kv:
            kv.batch_put(dict.fromkeys(KEYS, value_of(1)))
        results: Any = context.Queue()
        rest = (results, context.Barrier(3), (cluster.etcd.endpoints, cluster.name, path))
        processes = [
            context.Process(target=run, args=(write, *rest)),
            context.Process(target=run, args=(read, *rest)),
            context.Process(target=run_async, args=rest),
        ]
        for process in processes:
            process.start()
        outcome = dict(results.get(timeout=SECONDS + 90) for _ in processes)
        for process in processes:
            process.join(10)
        print(outcome)
        failures = [text for text in outcome.values() if isinstance(text, str)]
        with cluster.client() as kv:
            assert not failures, "\n".join([*failures, str(kv.stats())])
        assert min(outcome.values()) > 100, "too little traffic to tell"
