"""Load against a running cluster, with every byte checked.

Each client is a process of its own with one Client, one call at a time. Only the calls are timed;
the results are compared in between. Rates of several clients are summed.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from random import Random
from typing import Any

import msgspec

from p2pkv.client import Client
from p2pkv.config import ClientConfig
from p2pkv.errors import InvalidArgument, P2PKVError

WORKLOADS = (
    "put", "get", "get_into", "batch_put", "batch_get", "batch_get_into", "exists", "match",
)  # fmt: skip
SIZES = (128, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
WORKING_SET_BYTES = 256 << 20
"""Bytes that all clients together cycle through, for each size."""
KEYS_MAX = 4096
EXISTS_KEYS = 100
START_TIMEOUT_S = 60.0


class Row(msgspec.Struct, frozen=True):
    """One measurement. ``ops_per_s`` counts calls; a batch call has ``batch`` keys."""

    workload: str
    size_bytes: int
    batch: int
    clients: int
    path: str
    ops_per_s: float
    gb_per_s: float
    p50_us: float
    p99_us: float
    errors: int


class _Job(msgspec.Struct, frozen=True):
    workload: str
    size_bytes: int
    batch: int
    seconds: float
    keys: int


def run(
    config: ClientConfig,
    *,
    workloads: Sequence[str] = WORKLOADS,
    sizes: Sequence[int] = SIZES,
    batch: int = 32,
    clients: Sequence[int] = (1,),
    seconds: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure. ``seconds`` is the time of calls per row and client.

    Raises InvalidArgument for an unknown workload or a value out of range, and P2PKVError if the
    cluster cannot be used.
    """
    _check(workloads, sizes, batch, clients, seconds)
    rows: list[Row] = []
    for count in clients:
        for size in sizes:
            keys = max(2 * batch, min(KEYS_MAX, WORKING_SET_BYTES // count // max(size, 1)))
            jobs = [_Job(w, size, _batch_of(w, batch), seconds, keys) for w in workloads]
            progress(f"{size} B, {count} client{'s' * (count > 1)}")
            rows += _run_size(config, jobs, count)
    return rows


def _check(workloads: Sequence[str], sizes: Sequence[int], batch: int, clients: Sequence[int],
           seconds: float) -> None:  # fmt: skip
    unknown = [w for w in workloads if w not in WORKLOADS]
    if unknown:
        raise InvalidArgument(f"workload {unknown[0]!r}: must be one of {', '.join(WORKLOADS)}")
    if not 1 <= batch <= 4096:
        raise InvalidArgument(f"batch = {batch}: must be 1 to 4096")
    if any(not 0 <= s <= 1 << 30 for s in sizes):
        raise InvalidArgument(f"sizes = {list(sizes)}: each must be 0 to 1 GiB")
    if any(not 1 <= c <= 256 for c in clients):
        raise InvalidArgument(f"clients = {list(clients)}: each must be 1 to 256")
    if not 0 < seconds <= 3600:
        raise InvalidArgument(f"seconds = {seconds}: must be more than 0, at most 3600")


def _batch_of(workload: str, batch: int) -> int:
    if workload in ("exists", "match"):
        return EXISTS_KEYS
    return batch if workload.startswith("batch") else 1


def _run_size(config: ClientConfig, jobs: list[_Job], clients: int) -> list[Row]:
    context = mp.get_context("spawn")
    barrier = context.Barrier(clients)
    results: Any = context.Queue()
    workers = [
        context.Process(target=_worker, args=(config, jobs, i, barrier, results), daemon=True)
        for i in range(clients)
    ]
    for worker in workers:
        worker.start()
    try:
        budget = START_TIMEOUT_S + 4 * sum(j.seconds for j in jobs) + 60.0
        reports = [_next_report(results, workers, budget) for _ in workers]
    finally:
        for worker in workers:
            worker.join(5.0)
            if worker.is_alive():
                worker.kill()
    return [_row(job, clients, config.path, [r[i] for r in reports]) for i, job in enumerate(jobs)]


def _next_report(results: Any, workers: Sequence[Any], budget_s: float) -> list[Any]:
    end = time.monotonic() + budget_s
    while time.monotonic() < end:
        try:
            report = results.get(timeout=0.5)
        except queue.Empty:
            if any(w.exitcode not in (None, 0) for w in workers):
                raise P2PKVError("a client process of the benchmark died") from None
            continue
        if isinstance(report, str):
            raise P2PKVError(report)
        return list(report)
    raise P2PKVError(f"the benchmark's clients did not end within {budget_s:.0f} s")


def _row(job: _Job, clients: int, path: str, reports: Sequence[tuple[list[int], int]]) -> Row:
    rate = sum(len(t) / (sum(t) / 1e9) for t, _ in reports if t)
    times = sorted(x for t, _ in reports for x in t) or [0]
    moved = 0 if job.workload in ("exists", "match") else job.size_bytes * job.batch
    return Row(
        workload=job.workload,
        size_bytes=job.size_bytes,
        batch=job.batch,
        clients=clients,
        path=path,
        ops_per_s=round(rate, 1),
        gb_per_s=round(rate * moved / 1e9, 4),
        p50_us=round(times[len(times) // 2] / 1e3, 1),
        p99_us=round(times[min(len(times) - 1, len(times) * 99 // 100)] / 1e3, 1),
        errors=sum(e for _, e in reports),
    )


# --- in the client processes


def _worker(config: ClientConfig, jobs: list[_Job], who: int, barrier: Barrier,
            results: Any) -> None:  # fmt: skip
    try:
        with Client.from_config(config) as kv:
            data = _Data(jobs[0], who)
            data.store(kv)
            report = []
            for job in jobs:
                barrier.wait(START_TIMEOUT_S)
                report.append(_measure(kv, job, data))
            barrier.wait(START_TIMEOUT_S)
            kv.batch_delete(data.keys)
        results.put(report)
    except Exception as e:
        barrier.abort()
        results.put(f"{type(e).__name__}: {e}")


class _Data:
    """Keys and values of one client, made from a seed."""

    def __init__(self, job: _Job, who: int) -> None:
        random = Random(f"{job.size_bytes}/{who}")
        self.keys = [f"bench/{who}/{random.getrandbits(256):064x}" for _ in range(job.keys)]
        block = random.randbytes(job.size_bytes + len(self.keys))
        self.values = [memoryview(block)[i : i + job.size_bytes] for i in range(len(self.keys))]
        buffers = min(4096, max(64, (64 << 20) // max(1, job.size_bytes)))
        self.buffers = [memoryview(bytearray(job.size_bytes)) for _ in range(buffers)]

    def store(self, kv: Client) -> None:
        step = max(1, min(256, (16 << 20) // max(1, len(self.values[0]))))
        for i in range(0, len(self.keys), step):
            kv.batch_put(zip(self.keys[i : i + step], self.values[i : i + step], strict=True))


def _measure(kv: Client, job: _Job, data: _Data) -> tuple[list[int], int]:
    """Durations of all calls in nanoseconds, and how many went wrong."""
    times: list[int] = []
    errors = 0
    call = _CALLS[job.workload]
    spent, at, limit = 0, 0, int(job.seconds * 1e9)
    while spent < limit:
        if at + job.batch > len(data.keys):
            at = 0
        try:
            duration, right = call(kv, job, data, at)
        except P2PKVError:
            duration, right = 0, False
            spent += limit // 100
        errors += not right
        spent += duration
        times.append(duration)
        at += job.batch
    return times, errors


Timed = tuple[int, bool]


def _timed(call: Callable[[], Any]) -> tuple[int, Any]:
    began = time.perf_counter_ns()
    result = call()
    return time.perf_counter_ns() - began, result


def _put(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    duration, copies = _timed(lambda: kv.put(data.keys[at], data.values[at]))
    return duration, copies >= 1


def _get(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    duration, value = _timed(lambda: kv.get(data.keys[at]))
    return duration, value == data.values[at]


def _get_into(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    buffer = data.buffers[at % len(data.buffers)]
    duration, size = _timed(lambda: kv.get_into(data.keys[at], buffer))
    return duration, size == job.size_bytes and buffer == data.values[at]


def _batch_put(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    pairs = list(zip(data.keys[at : at + job.batch], data.values[at : at + job.batch], strict=True))
    duration, copies = _timed(lambda: kv.batch_put(pairs))
    return duration, all(copies)


def _batch_get(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    keys = data.keys[at : at + job.batch]
    duration, values = _timed(lambda: kv.batch_get(keys))
    return duration, values == data.values[at : at + job.batch]


def _batch_get_into(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    keys, buffers = data.keys[at : at + job.batch], data.buffers[: job.batch]
    duration, sizes = _timed(lambda: kv.batch_get_into(keys, buffers))
    right = all(s == job.size_bytes for s in sizes)
    return duration, right and buffers == data.values[at : at + job.batch]


def _half_there(data: _Data, at: int) -> tuple[list[str], list[bool]]:
    there = [data.keys[(at + i) % len(data.keys)] for i in range(EXISTS_KEYS // 2)]
    keys = [k for key in there for k in (key, key + "-")]
    return keys, [True, False] * len(there)


def _exists(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    keys, expected = _half_there(data, at)
    duration, found = _timed(lambda: kv.batch_exists(keys))
    return duration, found == expected


def _match(kv: Client, job: _Job, data: _Data, at: int) -> Timed:
    keys = [data.keys[(at + i) % len(data.keys)] for i in range(EXISTS_KEYS - 1)] + ["none"]
    duration, count = _timed(lambda: kv.match_prefix(keys))
    return duration, count == EXISTS_KEYS - 1


_CALLS: dict[str, Callable[[Client, _Job, _Data, int], Timed]] = {
    "put": _put,
    "get": _get,
    "get_into": _get_into,
    "batch_put": _batch_put,
    "batch_get": _batch_get,
    "batch_get_into": _batch_get_into,
    "exists": _exists,
    "match": _match,
}
