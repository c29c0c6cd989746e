"""What is measured: parts of a run, each a list of rows.

All stores take turns with each workload, several times over, and the figure is the median call of
the best turn, so that a busy moment of the machine does not decide.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster

from .processes import Spec, StoreFailed, WorkerProcess, cpu_seconds
from .work import KIB, MIB
from .worker import WRITES

Row = dict[str, Any]
Say = Callable[[str], None]


class Scale(NamedTuple):
    """How long, how often and over how many bytes."""

    seconds: float = 0.2
    rounds: int = 3
    set_bytes: int = 256 * MIB
    crowds: tuple[int, ...] = (1, 4, 32)
    crowd_seconds: float = 1.0
    batch_bytes: int = 256 * MIB
    """Larger batches are cut down to it, to two values at least."""
    server_bytes: int = 3072 * MIB
    """Memory of each server; a sixth of it for each node of several."""


QUICK = Scale(0.02, 1, 8 * MIB, (1, 2), 0.1, 4 * MIB, 384 * MIB)


class Place(NamedTuple):
    """One size and count of keys, and what is done with them."""

    size: int
    keys: int
    workloads: tuple[str, ...]


SINGLES = ("put", "get", "get_into")
BATCHES = ("batch_put", "batch_get", "batch_get_into")
ASKING = ("exists:100", "exists:1000", "match:100", "match:1000")
CALLS = (
    Place(4 * KIB, 128, (*SINGLES, *BATCHES, *ASKING)),
    Place(64 * KIB, 32, (*SINGLES, *BATCHES)),
    Place(256 * KIB, 32, BATCHES),
    Place(1 * MIB, 32, (*SINGLES, *BATCHES, "views")),
    Place(4 * MIB, 32, BATCHES),
)
SEQUENCES = tuple(
    Place(size, keys, ("kv_read", "kv_mixed"))
    for size, keys in ((16 * KIB, 512), (256 * KIB, 128), (1 * MIB, 64), (8 * MIB, 32))
)
SPINNING = Place(1 * MIB, 64, ("batch_get", "batch_get_into"))
CROWD = Place(4 * KIB, 32, ("get", "batch_get", "overwrite"))
CROWD_SET_BYTES = 32 * MIB
COPIES = (Place(64 * KIB, 32, ("put", "batch_put")), Place(1 * MIB, 32, ("put", "batch_put")))
CLUSTERS = {"1 copy, 2 nodes": (2, 1), "2 copies, 2 nodes": (2, 2), "2 copies, 3 nodes": (3, 2)}
"""Nodes, and copies."""


def scaled(places: Sequence[Place], scale: Scale) -> list[Place]:
    return [p._replace(keys=min(p.keys, max(2, scale.batch_bytes // p.size))) for p in places]


def out_bytes(places: Sequence[Place]) -> int:
    return max(p.size * p.keys for p in places)


# -- turns


class Turns:
    """Open workers of several stores, which take turns. Those that fail take no more part."""

    def __init__(self, scale: Scale, say: Say) -> None:
        self._scale, self._say = scale, say
        self._workers: dict[str, WorkerProcess] = {}
        self._specs: dict[str, Spec] = {}
        self._calls: dict[str, list[str]] = {}

    def add(self, spec: Spec, worker: WorkerProcess) -> None:
        self._specs[spec.name] = spec
        self._workers[spec.name] = worker

    def place(self, place: Place, *, spin: bool = False) -> list[Row]:
        """All workloads of a place, by all stores."""
        for name in list(self._workers):
            self._try(name, partial(self._load, name, place))
        rows = [r for w in place.workloads for r in self._workload(place, w, spin)]
        for name in list(self._workers):
            self._try(name, partial(self._workers[name].ask, "clear"))
        return rows

    def _load(self, name: str, place: Place) -> None:
        worker = self._workers[name]
        size = {"size": place.size, "batch": place.keys, "set_bytes": self._scale.set_bytes}
        self._calls[name] = worker.ask("load", **size)["calls"]
        if not self._specs[name].limit:
            worker.ask("fill")  # its server's memory is touched once, whatever is measured

    def _workload(self, place: Place, workload: str, spin: bool) -> list[Row]:
        self._say(f"{workload} {place.keys} x {place.size}")
        best: dict[tuple[str, bool], Row] = {}
        base = workload.partition(":")[0]
        for _ in range(self._scale.rounds):
            for name in [n for n in self._workers if base in self._calls[n]]:
                for spun in (False, True) if spin else (False,):
                    found = self._try(name, partial(self._turn, name, workload, spun))
                    old = best.get((name, spun))
                    if found and (old is None or found["p50_us"] < old["p50_us"]):
                        best[name, spun] = found
        for name in {n for n, _ in best}:
            self._finish(name, workload, base, best)
        return [self._row(place, workload, *key, figures) for key, figures in best.items()]

    def _turn(self, name: str, workload: str, spin: bool) -> Row:
        seconds = self._scale.seconds
        return self._workers[name].ask("measure", workload=workload, seconds=seconds, spin=spin)

    def _finish(self, name: str, workload: str, base: str, best: dict[Any, Row]) -> None:
        """Have all keys there for what comes next, and compare bytes: wrong ones are no figures."""
        worker = self._workers.get(name)
        if worker is None or self._specs[name].limit:
            return
        if base in WRITES:
            self._try(name, partial(worker.ask, "fill"))
        if base not in ("exists", "match"):
            checked = self._try(name, partial(worker.ask, "verify", workload=workload))
            for key in [k for k in best if k[0] == name]:
                if checked is None:
                    del best[key]
                else:
                    best[key]["verified"] = checked["values"]

    def _row(self, place: Place, workload: str, name: str, spin: bool, figures: Row) -> Row:
        base, _, count = workload.partition(":")
        keys = int(count) if count else 1 if base in SINGLES else place.keys
        moved = 0 if count else keys * place.size
        mean_us = figures["seconds"] / figures["calls"] * 1e6
        typical_us = mean_us if base == "kv_mixed" else figures["p50_us"]
        return {
            "store": name,
            "workload": base + ("+spin" if spin else ""),
            "size_bytes": place.size,
            "keys": keys,
            "clients": 1,
            "p50_us": round(figures["p50_us"], 1),
            "p99_us": round(figures["p99_us"], 1),
            "calls": figures["calls"],
            "verified": figures.get("verified", 0),
            "keys_per_s": round(keys / typical_us * 1e6),
            "gb_per_s": round(moved / typical_us / 1e3, 3),
        }

    def _try(self, name: str, do: Callable[[], Any]) -> Any:
        if name not in self._workers:
            return None
        try:
            return do()
        except StoreFailed as e:
            self._say(f"given up: {e}")
            self._workers.pop(name).close()
            return None


@contextlib.contextmanager
def turns(specs: Sequence[Spec], bytes_out: int, scale: Scale, say: Say) -> Iterator[Turns]:
    with contextlib.ExitStack() as stack:
        taking = Turns(scale, say)
        for spec in specs:
            taking.add(spec, stack.enter_context(WorkerProcess(spec, bytes_out)))
        yield taking


# -- parts


def calls(specs: Sequence[Spec], scale: Scale, say: Say) -> list[Row]:
    """Single calls and batches of each size; existence and prefixes."""
    places = scaled(CALLS, scale)
    with turns(specs, out_bytes(places), scale, say) as taking:
        return [row for place in places for row in taking.place(place)]


def sequences(specs: Sequence[Spec], scale: Scale, say: Say) -> list[Row]:
    """Sequences of KV blocks: match the prefix, then fetch it; with and without overwrites."""
    stores = [s for s in specs if not s.limit]
    places = scaled(SEQUENCES, scale)
    with turns(stores, out_bytes(places), scale, say) as taking:
        return [row for place in places for row in taking.place(place)]


def spinning(specs: Sequence[Spec], scale: Scale, say: Say) -> list[Row]:
    """Batches with and without a busy Python thread beside them."""
    places = scaled([SPINNING], scale)
    with turns(specs, out_bytes(places), scale, say) as taking:
        return taking.place(places[0], spin=True)


def copies(path: str, etcd: EtcdCluster, scale: Scale, say: Say) -> list[Row]:
    """Puts to clusters with one copy and with two."""
    places = scaled(COPIES, scale)
    with contextlib.ExitStack() as stack:
        taking = stack.enter_context(turns([], 0, scale, say))
        for name, (nodes, replicas) in CLUSTERS.items():
            cluster = stack.enter_context(
                Cluster(nodes, etcd=etcd, memory_limit_bytes=scale.server_bytes // 6, prefault=True,
                        replication_factor=replicas, min_in_sync=replicas, swim={"preset": "lan"})
            )  # fmt: skip
            spec = Spec(
                name, "p2pkv_store:P2PKV", endpoints=list(etcd.endpoints), path=path,
                cluster=cluster.name,
            )  # fmt: skip
            taking.add(spec, stack.enter_context(WorkerProcess(spec, out_bytes(places))))
        rows = [row for place in places for row in taking.place(place)]
    return [row | {"workload": f"{row['workload']}+copies"} for row in rows]


def crowds(specs: Sequence[Spec], scale: Scale, say: Say) -> list[Row]:
    """Several client processes at once: what they get together, and the slowest of them.

    All begin together. ``slowest``: the calls of the slowest over the mean of all, 1 is perfectly
    fair. ``server_us_per_call``: processor time that the store's servers took for a call.
    """
    rows: list[Row] = []
    for spec in [s for s in specs if not s.limit]:
        say(f"{max(scale.crowds)} clients of {spec.name}")
        try:
            rows += crowd(spec, scale)
        except StoreFailed as e:
            say(f"given up: {e}")
    return rows


def crowd(spec: Spec, scale: Scale, workloads: Sequence[str] = CROWD.workloads) -> list[Row]:
    """Raises StoreFailed."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(WorkerProcess(spec, CROWD.size * CROWD.keys, i, **spec.crowd))
            for i in range(max(scale.crowds))
        ]
        size = {"size": CROWD.size, "batch": CROWD.keys}
        together(workers, "load", **size, set_bytes=CROWD_SET_BYTES // len(workers))
        together(workers, "fill")
        rows = [
            crowd_row(spec, workload, workers[:count], scale.crowd_seconds)
            for workload in workloads
            for count in scale.crowds
        ]
        together(workers, "clear")
    return rows


def crowd_row(spec: Spec, workload: str, workers: list[WorkerProcess], seconds: float) -> Row:
    begin, taken = time.monotonic_ns() + 200_000_000, cpu_seconds(spec.pids)
    got = together(workers, "measure", workload=workload, seconds=seconds, begin_ns=begin)
    taken = cpu_seconds(spec.pids) - taken
    verified = sum(v["values"] for v in together(workers, "verify", workload=workload))
    rates = [g["calls"] / g["seconds"] for g in got]
    keys = 1 if workload in SINGLES else CROWD.keys
    return {
        "store": spec.name,
        "workload": workload,
        "size_bytes": CROWD.size,
        "keys": keys,
        "clients": len(workers),
        "p50_us": round(sorted(g["p50_us"] for g in got)[len(got) // 2], 1),
        "p99_us": round(max(g["p99_us"] for g in got), 1),
        "calls": sum(g["calls"] for g in got),
        "verified": verified,
        "keys_per_s": round(keys * sum(rates)),
        "gb_per_s": round(keys * CROWD.size * sum(rates) / 1e9, 3),
        "slowest": round(min(rates) * len(rates) / sum(rates), 2),
        "server_us_per_call": round(taken * 1e6 / sum(g["calls"] for g in got), 1),
    }


def together(workers: Sequence[WorkerProcess], order: str, **arguments: Any) -> list[Row]:
    """The same order to all at once. Raises StoreFailed."""
    for worker in workers:
        worker.send(order, **arguments)
    return [worker.answer() for worker in workers]
