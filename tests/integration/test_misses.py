"""Keys that come and go under readers: what is told of them is linearizable, misses included."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from p2pkv import Client, _native
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for
from p2pkv.testing.linearizability import Kind, Operation, check

pytestmark = pytest.mark.skipif(not _native.available, reason="the native extension is not built")

KEYS = [f"k{i}" for i in range(6)]
VALUE = "there"


class Players:
    """Clients, each in a thread of its own, that write and read keys and note what they saw."""

    def __init__(self, cluster: Cluster, path: str, seed: int) -> None:
        self.cluster, self.path = cluster, path
        self.random = random.Random(seed)
        self.stop = threading.Event()
        self.seen: dict[str, list[Operation]] = {key: [] for key in KEYS}
        self.failures: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Players:
        for play in (write, write, ask_for_one, ask_for_all):
            chance = random.Random(self.random.random())
            self.threads.append(threading.Thread(target=self._run, args=(play, chance)))
            self.threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)

    def _run(self, play: Callable[..., None], chance: random.Random) -> None:
        try:
            with self.cluster.client(path=self.path, timeout=30) as kv:
                while not self.stop.is_set():
                    play(self, kv, chance)
        except BaseException as e:
            self.failures.append(e)
            raise

    def note(self, key: str, kind: Kind, called: int, result: Any) -> None:
        name = threading.current_thread().name
        done = Operation(kind, called, time.monotonic_ns(), VALUE, result, name)
        self.seen[key].append(done)  # of one key all threads append: that is atomic

    def enough(self) -> bool:
        """Whether readers have seen each key often, and often missed it."""
        reads = [[op.result for op in h if op.kind is Kind.GET] for h in self.seen.values()]
        seldom = min(min(r.count(VALUE), r.count(None)) for r in reads)
        return seldom > 20 or bool(self.failures)

    def judge(self) -> None:
        """Raises AssertionError for what no order of the operations explains."""
        assert not self.failures
        for key, history in self.seen.items():
            violation = check(sorted(history, key=lambda op: op.called))
            assert violation is None, f"{key}: {violation}"


def write(players: Players, kv: Client, chance: random.Random) -> None:
    key, called = chance.choice(KEYS), time.monotonic_ns()
    if chance.random() < 0.5:
        kv.put(key, VALUE.encode())
        players.note(key, Kind.PUT, called, None)
    else:
        players.note(key, Kind.DELETE, called, kv.delete(key))
    time.sleep(chance.random() * 0.002)  # so that readers see much of each


def ask_for_one(players: Players, kv: Client, chance: random.Random) -> None:
    key, called = chance.choice(KEYS), time.monotonic_ns()
    there = kv.exists(key) if chance.random() < 0.5 else kv.get(key) is not None
    players.note(key, Kind.GET, called, VALUE if there else None)
    time.sleep(chance.random() * 0.001)


def ask_for_all(players: Players, kv: Client, chance: random.Random) -> None:
    keys = chance.sample(KEYS, len(KEYS))
    called = time.monotonic_ns()
    if chance.random() < 0.5:
        told = kv.batch_exists(keys)
    else:
        told = [value is not None for value in kv.batch_get(keys)]
    for key, there in zip(keys, told, strict=True):
        players.note(key, Kind.GET, called, VALUE if there else None)
    count = kv.match_prefix(keys)
    if count < len(keys):  # of those before it is not told that they were there at one moment
        players.note(keys[count], Kind.GET, called, None)
    time.sleep(chance.random() * 0.001)


def answered(kv: Client, name: str) -> float:
    return sum(stats.figures[name] for stats in kv.stats().values())


@pytest.mark.parametrize(
    ("path", "figure"), [("auto", "index_misses_total"), ("tcp", "read_misses_total")]
)
def test_keys_that_come_and_go(etcd: EtcdCluster, path: str, figure: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with Cluster(1, etcd=etcd) as cluster, cluster.client() as kv:
        with Players(cluster, path, seed) as players:
            wait_for(lambda: answered(kv, figure) > 500, "misses told without asking", 60)
            wait_for(players.enough, "enough of each key", 60)
        players.judge()


@pytest.mark.parametrize("copies", [1, 2])
def test_keys_that_come_and_go_while_their_buckets_move(etcd: EtcdCluster, copies: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with Cluster(2, etcd=etcd, replication_factor=copies) as cluster:
        with Players(cluster, "auto", seed) as players:
            cluster.add_node("n2")
            cluster.wait_settled()
            wait_for(players.enough, "enough of each key", 60)
        players.judge()
        with cluster.client() as kv:
            assert answered(kv, "index_misses_total") > 100
