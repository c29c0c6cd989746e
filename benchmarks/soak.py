"""What a client, and a node, hold after many operations, connections and deaths: it must not grow.

    python benchmarks/soak.py                                   # a minute
    python benchmarks/soak.py --operations 10_000_000 --connects 1000 --deaths 1000

Starts etcd and one node, and does, one after the other: operations of all kinds by one client;
connects, each with calls, views and registered memory; client processes that are killed while they
hold views; deaths of the node, under one client. Throughout it notes anonymous memory, descriptors
and mappings of both processes, and what the node says about sessions and pins. The first third is
for warming up; after it none may grow. Prints the curves; ends with 1 if one grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from p2pkv import Client
from p2pkv.errors import P2PKVError
from p2pkv.testing.cluster import Cluster, wait_for

SAMPLES = 12
SESSION_TTL_S = 1.0
"""So long a node keeps the session of a client that is dead."""
KIB, MIB = 1 << 10, 1 << 20
KEYS = 256
SIZES = (100, 4 * KIB, 64 * KIB, 256 * KIB)
GROWTH = {"memory_kib": 2048.0}
"""Allowed after warming up; 0 for all but memory, whose allocators are not exact."""
MARGIN = {"node_fds": 4.0, "sessions": 4.0, "fds": 2.0, "maps": 4.0, "node_maps": 4.0}
"""What may come and go from one sample to the next."""

Sample = dict[str, float]


class Curve(NamedTuple):
    """One quantity of one phase, in the order of time."""

    phase: str
    name: str
    values: list[float]

    @property
    def growth(self) -> float:
        """The most in the last third over the most in the middle third."""
        third = len(self.values) // 3
        return max(self.values[-third:]) - max(self.values[third : 2 * third])

    @property
    def allowed(self) -> float:
        base = self.name.removeprefix("node_")
        return GROWTH.get(base, 0.0) + MARGIN.get(self.name, 0.0)

    @property
    def grew(self) -> bool:
        return self.growth > self.allowed


# -- what is looked at


def of_process(pid: int) -> Sample:
    """Anonymous memory only: pages of the node's memory count as soon as they are looked at."""
    root = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line
    )
    return {
        "memory_kib": float(status["RssAnon"].split()[0]),
        "fds": float(len(os.listdir(root / "fd"))),
        "maps": float((root / "maps").read_text().count("\n")),
    }


def sample(cluster: Cluster, observer: Client | None = None) -> Sample:
    gc.collect()
    node = of_process(cluster["n0"].pid)
    found = of_process(os.getpid()) | {f"node_{name}": value for name, value in node.items()}
    if observer is not None:
        figures = next(iter(observer.stats().values())).figures
        names = ("sessions", "pins", "data_connections")
        found |= {name: float(figures[name]) for name in names}
    return found


def curves(phase: str, samples: list[Sample]) -> list[Curve]:
    return [Curve(phase, name, [s[name] for s in samples]) for name in samples[0]]


def steps(total: int) -> Iterator[range]:
    """SAMPLES ranges that are ``total`` in all."""
    bounds = [total * i // SAMPLES for i in range(SAMPLES + 1)]
    yield from (range(a, b) for a, b in pairwise(bounds))


# -- phases


def operations(cluster: Cluster, total: int, path: str) -> list[Curve]:
    """All kinds of calls, of values that are there and of some that are not."""
    found = []
    with client(cluster, path) as kv:
        work = Mixture(kv)
        for part in steps(total):
            for i in part:
                work.operation(i)
            found.append(sample(cluster, kv))
    return curves("operations", found)


class Mixture:
    """Operations by number, each of another kind than the one before."""

    def __init__(self, kv: Client) -> None:
        self.kv = kv
        self.keys = [f"soak/{i}" for i in range(KEYS)]
        self.values = [os.urandom(SIZES[i % len(SIZES)]) for i in range(KEYS)]
        self.buffer = bytearray(max(SIZES))
        self.kinds: tuple[Callable[[int], Any], ...] = (
            self.put, self.get, self.get_into, self.view, self.get, self.batch, self.absent,
            self.delete_and_put,
        )  # fmt: skip
        kv.batch_put(zip(self.keys, self.values, strict=True))

    def operation(self, i: int) -> None:
        self.kinds[i % len(self.kinds)](i * 7919 % KEYS)

    def put(self, at: int) -> None:
        assert self.kv.put(self.keys[at], self.values[at]) == 1

    def get(self, at: int) -> None:
        assert self.kv.get(self.keys[at]) == self.values[at]

    def get_into(self, at: int) -> None:
        size = self.kv.get_into(self.keys[at], self.buffer)
        assert size is not None
        assert self.buffer[:size] == self.values[at]

    def view(self, at: int) -> None:
        view = self.kv.get(self.keys[at], zero_copy=True)
        assert view is not None
        assert bytes(view) == self.values[at]

    def batch(self, at: int) -> None:
        at = min(at, KEYS - 8)
        assert self.kv.batch_get(self.keys[at : at + 8]) == self.values[at : at + 8]

    def absent(self, at: int) -> None:
        assert self.kv.get(f"soak/none/{at}") is None
        assert self.kv.match_prefix([self.keys[at], f"soak/none/{at}"]) == 1

    def delete_and_put(self, at: int) -> None:
        assert self.kv.delete(self.keys[at])
        self.put(at)


def connects(cluster: Cluster, total: int, path: str) -> list[Curve]:
    """Clients one after the other."""
    found = []
    with client(cluster, path) as observer:
        observer.put("soak/one", os.urandom(256 * KIB))
        for part in steps(total):
            for i in part:
                connect(cluster, path, i)
            found.append(sample(cluster, observer))
    return curves("connects", found)


def connect(cluster: Cluster, path: str, i: int) -> None:
    memory = bytearray(64 * KIB)
    with client(cluster, path) as kv:
        begin = kv.register_buffer(memory)
        kv.put_from(f"soak/from/{i % KEYS}", (begin, len(memory)))
        view = kv.get("soak/one", zero_copy=True)
        assert isinstance(view, memoryview)
        assert len(view) == 256 * KIB
        view.release()
        kv.unregister_buffer(memory)


def killed_clients(cluster: Cluster, total: int, path: str) -> list[Curve]:
    """Processes that die by SIGKILL while they hold views."""
    found = []
    with client(cluster, path) as observer:
        observer.put("soak/one", os.urandom(256 * KIB))
        before = held(observer)
        for part in steps(total):
            for _ in part:
                kill_one_with_views(cluster, path)
            wait_for(lambda: held(observer) == before, "what the dead held is free")
            found.append(sample(cluster, observer))
    return curves("killed clients", found)


HOLDER = """
import sys, time
from p2pkv import Client
kv = Client(sys.argv[1].split(","), cluster=sys.argv[2], path=sys.argv[3], timeout=30.0)
view = kv.get("soak/one", zero_copy=True)
print(len(view), flush=True)
time.sleep(60)
"""


def kill_one_with_views(cluster: Cluster, path: str) -> None:
    command = [sys.executable, "-c", HOLDER, ",".join(cluster.etcd.endpoints), cluster.name, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == 256 * KIB
        finally:
            process.kill()


def held(kv: Client) -> tuple[float, float]:
    """Sessions and pins of all clients, as the node says."""
    figures = next(iter(kv.stats().values())).figures
    return float(figures["sessions"]), float(figures["pins"])


def node_deaths(cluster: Cluster, total: int, path: str) -> list[Curve]:
    """The node is killed under a client that has used it, and comes back empty."""
    found = []
    with client(cluster, path) as kv:
        wait_for(lambda: stored(kv), "the node takes puts")
        for part in steps(total):
            for _ in part:
                die_once(cluster, kv)
            found.append(sample(cluster) | {"arenas": float(len(cluster["n0"].arenas))})
    # Each node is a new process, with curves of its own.
    return [c for c in curves("node deaths", found) if not c.name.startswith("node_")]


def die_once(cluster: Cluster, kv: Client) -> None:
    view = kv.get("soak/one", zero_copy=True)
    assert view is not None
    cluster["n0"].kill()
    cluster["n0"].start()
    wait_for(lambda: stored(kv), "the node takes puts")
    assert bytes(view) == bytes(64 * KIB)  # of a node that is dead: its memory is still mapped


def stored(kv: Client) -> bool:
    try:
        return kv.put("soak/one", bytes(64 * KIB)) == 1
    except P2PKVError:
        return False


def client(cluster: Cluster, path: str) -> Client:
    return cluster.client(path=path, timeout=30.0)


# -- running


def run(options: argparse.Namespace) -> list[Curve]:
    phases: tuple[tuple[Callable[[Cluster, int, str], list[Curve]], int], ...] = (
        (operations, options.operations),
        (connects, options.connects),
        (killed_clients, options.killed_clients),
        (node_deaths, options.deaths),
    )
    found: list[Curve] = []
    more: dict[str, Any] = {"ucx": "on"} if options.path == "ucx" else {}
    with Cluster(1, memory_limit_bytes=256 * MIB, session_ttl_s=SESSION_TTL_S, **more) as cluster:
        for phase, total in phases:
            if not total:
                continue
            began = time.monotonic()
            found += phase(cluster, max(total, SAMPLES), options.path)
            print(f"{phase.__name__}: {total} in {time.monotonic() - began:.0f} s", flush=True)
    return found


def text(found: list[Curve]) -> str:
    lines = []
    for curve in found:
        some = " ".join(f"{v:.0f}" for v in curve.values[:: max(1, len(curve.values) // 8)])
        verdict = f"GREW by {curve.growth:.0f}" if curve.grew else "flat"
        lines.append(f"{curve.phase:15} {curve.name:18} {some}  {verdict}")
    return "\n".join(lines)


def number(text: str) -> int:
    value = int(text)
    if value and value < SAMPLES:
        raise argparse.ArgumentTypeError(f"{value}: must be 0 or at least {SAMPLES}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--operations", type=number, default=200_000)
    parser.add_argument("--connects", type=number, default=120)
    parser.add_argument("--killed-clients", type=number, default=24)
    parser.add_argument("--deaths", type=number, default=24)
    parser.add_argument("--path", default="auto", help="auto, tcp, zmq or ucx")
    parser.add_argument("--json", metavar="FILE", help="write the curves there")
    options = parser.parse_args()
    found = run(options)
    print(text(found))
    if options.json:
        Path(options.json).write_text(json.dumps([c._asdict() for c in found], indent=1))
    return 1 if any(curve.grew for curve in found) else 0


if __name__ == "__main__":
    sys.exit(main())
