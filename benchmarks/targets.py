"""What p2pkv is to reach, and whether a run of ``peers.py`` did.

    python benchmarks/targets.py out.json

Speeds count as ratios within one run; the few absolute figures are for two cores of a server of
these years. ``None`` where the run has not what it takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
OVER_TCP = ("mooncake-tcp", "redis", "memcached-pylibmc", "memcached-pymemcache")
PEERS = (*OVER_TCP, "mooncake-shm", "redis-unix")
READS = {"get": ("get", "get_into"), "batch_get_into": ("batch_get_into", "batch_get")}
"""A peer that has no call for the caller's buffers is compared by the one that it has."""


class Rows:
    """Rows of a run, by place and store."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {
            (r["workload"], r["size_bytes"], r["keys"], r["store"]): r
            for r in rows
            if r["clients"] == 1 and r.get("part") != "clients"  # there they are to be compared
        }

    def rate(self, workload: str, size: int, keys: int, store: str) -> float | None:
        """Keys a second."""
        row = self._rows.get((workload, size, keys, store))
        return float(row["keys_per_s"]) if row else None

    def p50_us(self, workload: str, size: int, keys: int, store: str) -> float | None:
        row = self._rows.get((workload, size, keys, store))
        return float(row["p50_us"]) if row else None

    def best(
        self, workloads: Sequence[str], size: int, keys: int, stores: Sequence[str]
    ) -> float | None:
        rates = [self.rate(w, size, keys, s) for w in workloads for s in stores]
        return max((r for r in rates if r is not None), default=None)


Measured = Callable[[Rows], float | None]


class Target(NamedTuple):
    """``wanted``: at least, or at most where ``at_most``."""

    what: str
    unit: str
    wanted: float
    reached: Measured
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.wanted if self.at_most else value >= self.wanted


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def to_store(workload: str, size: int, keys: int, store: str, limit: str) -> Measured:
    """The rate as a share of that of a limit."""
    return lambda r: ratio(r.rate(workload, size, keys, store), r.rate(workload, size, keys, limit))


def to_peers(
    workload: str, size: int, keys: int, store: str, peers: Sequence[str] = PEERS,
    theirs: Sequence[str] = (),
) -> Measured:  # fmt: skip
    """The rate over that of the best peer, by any of its calls for the same purpose."""
    calls = theirs or READS.get(workload, (workload,))
    return lambda r: ratio(r.rate(workload, size, keys, store), r.best(calls, size, keys, peers))


def rate(workload: str, size: int, keys: int, store: str) -> Measured:
    return lambda r: r.rate(workload, size, keys, store)


def p50(workload: str, size: int, keys: int, store: str) -> Measured:
    return lambda r: r.p50_us(workload, size, keys, store)


def name_of(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def same_host() -> Iterable[Target]:
    auto = "p2pkv-auto"
    for size in (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB):
        what = f"same host, batch_get_into 32 × {name_of(size)}"
        one = ("batch_get_into", size, 32, auto)
        yield Target(what, "of memcpy", 0.85, to_store(*one, "memcpy"))
        factor = {64 * KIB: 2.0, 256 * KIB: 1.0}.get(size, 1.0)
        yield Target(what, "× best peer", factor, to_peers(*one))
    calls = ("views", "batch_get_into", "batch_get")
    views = to_peers("views", MIB, 32, auto, theirs=calls)
    yield Target("same host, views 32 × 1 MiB", "× best peer", 5.0, views)
    for size, limit in ((64 * KIB, 60.0), (1 * MIB, 160.0)):
        for call in ("get", "put"):
            what = f"same host, {call} of {name_of(size)}"
            yield Target(what, "µs", limit, p50(call, size, 1, auto), at_most=True)
            yield Target(what, "× best peer", 1.7, to_peers(call, size, 1, auto))
    yield Target("same host, get of 4 KiB", "µs", 15.0, p50("get", 4 * KIB, 1, auto), at_most=True)


def over_tcp() -> Iterable[Target]:
    tcp = "p2pkv-tcp"
    for size in (64 * KIB, 1 * MIB):
        for call, factor in (("batch_get_into", 1.0), ("batch_put", 1.4)):
            what = f"TCP, {call} 32 × {name_of(size)}"
            yield Target(what, "of a socket pair", 0.8, to_store(call, size, 32, tcp, "socket"))
            against = to_peers(call, size, 32, tcp, OVER_TCP)
            yield Target(what, "× best peer over TCP", factor, against)
    yield Target("TCP, get of 4 KiB", "µs", 50.0, p50("get", 4 * KIB, 1, tcp), at_most=True)


def small_values() -> Iterable[Target]:
    for store in ("p2pkv-auto", "p2pkv-tcp"):
        for call, wanted in (("batch_get", 450e3), ("batch_put", 300e3)):
            what = f"{store}, {call} 128 × 4 KiB"
            yield Target(what, "keys/s", wanted, rate(call, 4 * KIB, 128, store))
        for call in ("exists", "match"):
            yield Target(f"{store}, {call} of 1,000", "keys/s", 2.5e6,
                         rate(call, 4 * KIB, 1000, store))  # fmt: skip
            mooncake = to_peers(call, 4 * KIB, 100, store, ("mooncake-tcp", "mooncake-shm"))
            yield Target(f"{store}, {call} of 100", "× Mooncake", 1.2, mooncake)


def two_copies() -> Iterable[Target]:
    for call, keys in (("batch_put", 32), ("put", 1)):
        for size in (64 * KIB, 1 * MIB):
            what = f"two copies, {call} {keys} × {name_of(size)}"
            one = ("1 copy, 2 nodes", "2 copies, 2 nodes")
            yield Target(what, "of one copy", 0.45, of_one_copy(f"{call}+copies", size, keys, *one))


def of_one_copy(workload: str, size: int, keys: int, one: str, two: str) -> Measured:
    return lambda r: ratio(r.rate(workload, size, keys, two), r.rate(workload, size, keys, one))


TARGETS = (*same_host(), *over_tcp(), *small_values(), *two_copies())
ELSEWHERE = (
    "throughput that grows with the nodes: needs as many pairs of cores",
    "kills, lost writes, etcd's death: scripts/failover.py",
    "puts into a full store: tests/integration/test_memory.py",
)


def check(rows: Iterable[Row]) -> list[tuple[Target, float | None]]:
    """Each target with what was reached."""
    measured = Rows(rows)
    return [(target, target.reached(measured)) for target in TARGETS]


def table(rows: Iterable[Row]) -> str:
    """All targets of which the run says something, and how many were met."""
    found = [(target, value) for target, value in check(rows) if value is not None]
    lines = ["| what | unit | wanted | reached | met |", "|---|---|---|---|---|"]
    for target, value in found:
        sign = "≤" if target.at_most else "≥"
        yes = "yes" if target.met(value) else "**no**"
        wanted = f"{sign} {figure(target.wanted)}"
        lines.append(f"| {target.what} | {target.unit} | {wanted} | {figure(value)} | {yes} |")
    met = sum(target.met(value) for target, value in found)
    unknown = len(TARGETS) - len(found)
    lines.append(f"\n{met} of {len(found)} met; {unknown} of which this run says nothing.")
    lines += [f"Not measured here: {what}." for what in ELSEWHERE]
    return "\n".join(lines)


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def main() -> None:
    with open(sys.argv[1]) as file:
        print(table(json.load(file)["rows"]))


if __name__ == "__main__":
    main()
