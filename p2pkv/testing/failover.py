"""The fault harness: a cluster under load is hurt in every way that it has to survive.

    report = run(Plan(seconds=60, faults=parse("kill=10,stop=3")), OwnCluster(3, replicas=2))

Processes of clients work all the time and record what they did and saw. Afterwards every key is
read once more, and the whole history is judged: see ``judge``. Which faults happen, to whom and
for how long follows from the seed; what the clients do in between does not, quite.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from p2pkv import clock, ring
from p2pkv.client import Client
from p2pkv.config import MiB
from p2pkv.errors import ConfigError, P2PKVError
from p2pkv.testing import history, judge
from p2pkv.testing.faultplan import FaultKind, plan
from p2pkv.testing.faults import Injected, Injector
from p2pkv.testing.history import Record, Recorder
from p2pkv.testing.observer import Observer
from p2pkv.testing.probe import quantiles
from p2pkv.testing.recording import RecordedClient
from p2pkv.testing.targets import Target
from p2pkv.testing.workers import Workers
from p2pkv.testing.workload import Job

START_TIMEOUT_S = 60.0
AUDIT_TIMEOUT_S = 60.0
AUDIT_BATCH = 128
FINDINGS_SHOWN_MAX = 20


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one run does. Times in seconds."""

    seconds: float = 60.0
    """At least so long; longer if the faults need it."""
    faults: dict[FaultKind, int] = {}
    seed: int = 0
    processes: int = 2
    """Of clients: the odd ones use AsyncClient, and every second pair no shared memory."""
    threads: int = 4
    """In each process. At most 8 clients should share a register, so that it can be checked."""
    operations_per_s: float = 1000.0
    """The pace of all threads together, at most."""
    operations_per_s_min: float = 100.0
    """A run that does fewer proves nothing and counts as failed."""
    timeout_s: float = 3.0
    """Of one operation."""
    registers: int = 24
    generation_s: float = 8.0
    blocks: int = 100
    value_bytes_max: int = 64 << 10
    repair_timeout_s: float = 90.0
    fault_s_max: float = 8.0
    """No fault lasts longer. What lasts longer than ``reset_after_s`` costs a bucket with one copy
    what it had."""
    fault_s: float = 0.0
    """How long each fault lasts; 0: as the seed says."""

    def __post_init__(self) -> None:
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} = {value!r}: must be from {low} to {high}")


_LIMITS = [
    ("seconds", 0.1, 1e6),
    ("processes", 1, 64),
    ("threads", 1, 64),
    ("operations_per_s", 1, 1e6),
    ("operations_per_s_min", 0, 1e6),
    ("timeout_s", 0.05, 600),
    ("registers", 1, 10_000),
    ("generation_s", 0.5, 3600),
    ("blocks", 1, 100_000),
    ("value_bytes_max", 64, 16 * MiB),
    ("repair_timeout_s", 1, 3600),
    ("fault_s_max", 0.1, 3600),
    ("fault_s", 0, 3600),
]


class Report(msgspec.Struct, kw_only=True):
    """What a run found. Times in seconds."""

    passed: bool
    reasons: list[str]
    """Why it did not pass."""
    seed: int
    cluster: str
    replicas: int
    nodes: int
    seconds: float
    faults: dict[str, int]
    skipped: dict[str, str]
    """Kinds of faults that were asked for and could not be had, and why."""
    operations: int
    operations_per_s: float
    errors: dict[str, int]
    """Operations that failed, by error; unknown outcomes are among them."""
    unknown_outcomes: int
    acked_lost: int
    stale_reads: int
    failed_write_once_reads: int
    damaged_values: int
    not_linearizable: int
    """Registers whose history nothing explains."""
    undecided: int
    evicted: int
    """Objects that made room for others; if any did, a miss proves nothing."""
    first_ack_after_kill_s: dict[str, Any]
    """From SIGKILL to the first acknowledged write, over buckets whose primary was killed."""
    first_read_after_kill_s: dict[str, Any]
    repair_s: dict[str, Any]
    """From a fault until every bucket has its copies again."""
    unavailable_s: dict[str, Any]
    """Of each register's bucket that had failing operations: how long none succeeded."""
    findings: list[str]
    violations: dict[str, str]
    events: list[dict[str, Any]]


class Watch:
    """What a run tells whoever looks on; replace the methods that are wanted."""

    def say(self, text: str) -> None:
        """What happens now."""

    def counts(self, operations: int, errors: int, elapsed_s: float, faults: int) -> None:
        """How far it is; called about twice a second."""


def run(
    wanted: Plan, target: Target, cluster: str, directory: Path | None = None,
    watch: Watch | None = None,
) -> Report:  # fmt: skip
    """Hurt a running cluster as planned, and judge it. ``directory`` keeps the history.

    Raises ConfigError for faults that make no sense, TimeoutError if the cluster is not whole to
    begin with.
    """
    watch = watch or Watch()
    with ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pkv-run-")))
        if any(directory.glob(f"*{history.SUFFIX}")):
            raise ConfigError(f"history = {str(directory)!r}: holds another run's history")
        observer = stack.enter_context(Observer(target.etcd_config(), cluster))
        session = Session(wanted, target, cluster, directory, observer, watch)
        return session.run()


class Session:
    """One run."""

    def __init__(
        self, wanted: Plan, target: Target, cluster: str, directory: Path, observer: Observer,
        watch: Watch,
    ) -> None:  # fmt: skip
        self._plan = wanted
        self._target = target
        self._cluster = cluster
        self._directory = directory
        self._observer = observer
        self._watch = watch
        self._evicted: dict[str, float] = {}
        self._skipped = {
            kind: why for kind, n in wanted.faults.items() if n and (why := target.refuses(kind))
        }
        self._faults = plan(
            {k: n for k, n in wanted.faults.items() if k not in self._skipped},
            Random(wanted.seed),
            self._pause_s(),
            wanted.fault_s_max,
            wanted.fault_s,
        )
        self._began_ns = self._ended_ns = 0
        self._stopped = threading.Event()

    def run(self) -> Report:
        """The load with the faults, the final reading, the judgement."""
        for kind, why in self._skipped.items():
            self._watch.say(f"no {kind.value}: {why}")
        with ExitStack() as stack:
            kv = stack.enter_context(self._client())
            probe = stack.enter_context(_recorder(self._directory, "probe"))
            injector = Injector(
                self._target,
                self._observer,
                RecordedClient(kv, probe, min(1.0, self._plan.timeout_s)),
                repair_timeout_s=self._plan.repair_timeout_s,
                say=self._watch.say,
            )
            if not injector.whole(START_TIMEOUT_S):
                raise TimeoutError(_told(injector.lacking()))
            failures = self._load(injector, kv)
            self._watch.say("the final reading of every key")
            unread = self._audit(kv)
            self._count_evictions(kv)
        self._watch.say("judging")
        return self._report(injector.done, failures + unread)

    # -- load and faults

    def _load(self, injector: Injector, kv: Client) -> list[str]:
        """Clients at work, and all faults; what went wrong with the harness itself."""
        with Workers(self._jobs()) as workers:
            if not _wait(lambda: workers.all_at_work, START_TIMEOUT_S):
                raise TimeoutError("the clients do not begin")
            failures: list[str] = []
            faults = threading.Thread(target=self._hurt, args=(injector, failures), daemon=True)
            self._began_ns = clock.monotonic()
            faults.start()
            try:
                while faults.is_alive() or self._elapsed_s() < self._plan.seconds:
                    self._stopped.wait(0.5)
                    self._watch.counts(
                        workers.operations, workers.errors, self._elapsed_s(), len(injector.done)
                    )
                    self._count_evictions(kv)
            finally:
                self._stopped.set()
                self._ended_ns = clock.monotonic()
                faults.join(self._plan.repair_timeout_s * 2)
            failures += [f"{n} ended by itself:\n{log}" for n, log in self._target.ended().items()]
            return failures + workers.finish()

    def _elapsed_s(self) -> float:
        return (clock.monotonic() - self._began_ns) / 1e9

    def _hurt(self, injector: Injector, failures: list[str]) -> None:
        for fault in self._faults:
            try:
                injected = injector.inject(fault, self._stopped)
            except Exception as e:
                failures.append(f"{fault.kind.value}: {type(e).__name__}: {e}")
                return
            if injected is None or injected.repair_s is None:
                failures.append(
                    f"{_told(injector.lacking())} {self._plan.repair_timeout_s} s after fault "
                    f"{len(injector.done)} of {len(self._faults)}"
                )
                return

    def _jobs(self) -> list[Job]:
        wanted = self._plan
        threads = wanted.processes * wanted.threads
        epoch_ns = clock.monotonic()
        return [
            Job(
                name=f"c{i}",
                directory=str(self._directory),
                client=self._target.client_config(
                    timeout_s=wanted.timeout_s, path="tcp" if i % 4 > 1 else "auto"
                ),
                asynchronous=bool(i % 2),
                threads=wanted.threads,
                seed=wanted.seed,
                epoch_ns=epoch_ns,
                registers=wanted.registers,
                generation_s=wanted.generation_s,
                blocks=wanted.blocks,
                value_bytes_max=wanted.value_bytes_max,
                operations_per_s=wanted.operations_per_s / threads,
            )
            for i in range(wanted.processes)
        ]

    def _pause_s(self) -> float:
        """So that the faults are spread over the time, as far as they need no longer."""
        count = sum(self._plan.faults.values())
        return max(0.3, min(5.0, self._plan.seconds / (count + 1) / 4))

    def _client(self) -> Client:
        config = self._target.client_config(timeout_s=self._plan.timeout_s)
        return Client.from_config(config)

    # -- afterwards

    def _audit(self, kv: Client) -> list[str]:
        """Read every key; what could not be read in time."""
        keys = sorted({r.key for r in history.read(self._directory)})
        deadline = time.monotonic() + AUDIT_TIMEOUT_S
        with _recorder(self._directory, judge.AUDITOR) as recorder:
            reader = RecordedClient(kv, recorder, self._plan.timeout_s)
            while keys and time.monotonic() < deadline:
                records = [
                    record
                    for start in range(0, len(keys), AUDIT_BATCH)
                    for record in reader.batch_get(keys[start : start + AUDIT_BATCH])
                ]
                keys = [r.key for r in records if not r.acknowledged]
        return [f"{len(keys)} keys could not be read at the end: {keys[:3]}"] if keys else []

    def _count_evictions(self, kv: Client) -> None:
        """Each member's figure goes with it when it dies: keep the last that was seen."""
        try:
            stats = kv.stats(timeout=1.0)
        except P2PKVError:
            return
        for member, told in stats.items():
            figure = told.figures.get("objects_evicted_total", 0)
            self._evicted[member] = max(self._evicted.get(member, 0), figure)

    def _report(self, done: list[Injected], failures: list[str]) -> Report:
        records = list(history.read(self._directory))
        evicted = int(sum(self._evicted.values()))
        verdict = judge.judge(history.by_key(records), evicted=evicted > 0)
        seconds = (self._ended_ns - self._began_ns) / 1e9
        load = sum(self._began_ns <= r.called < self._ended_ns for r in records)
        unanswered = sum(i.unanswered for i in done)
        rate = load / seconds
        reasons = [*failures, *_reasons(verdict)]
        if rate < self._plan.operations_per_s_min:
            reasons.append(
                f"{rate:.0f} operations a second prove nothing: at least "
                f"{self._plan.operations_per_s_min:.0f} are asked for"
            )
        if unanswered:
            reasons.append(f"{unanswered} probes of killed primaries' buckets were never answered")
        repairs = [i.repair_s for i in done if i.repair_s is not None]
        return Report(
            passed=not reasons,
            reasons=reasons,
            seed=self._plan.seed,
            cluster=self._cluster,
            replicas=self._observer.replication_factor(),
            nodes=len(self._target.nodes()),
            seconds=round(seconds, 1),
            faults=dict(Counter(i.kind.value for i in done)),
            skipped={kind.value: why for kind, why in self._skipped.items()},
            operations=load,
            operations_per_s=round(rate, 1),
            errors=dict(Counter(r.error for r in records if r.error).most_common()),
            unknown_outcomes=sum(r.unknown for r in records),
            acked_lost=len(verdict.lost),
            stale_reads=len(verdict.stale),
            failed_write_once_reads=len(verdict.failed_reads),
            damaged_values=len(verdict.damaged),
            not_linearizable=len(verdict.unexplained),
            undecided=len(verdict.undecided),
            evicted=evicted,
            first_ack_after_kill_s=quantiles([t for i in done for t in i.first_ack_s]),
            first_read_after_kill_s=quantiles([t for i in done for t in i.first_read_s]),
            repair_s=quantiles(repairs),
            unavailable_s=quantiles(list(unavailable(records, self._observer.bucket_count()))),
            findings=_shown(verdict),
            violations=verdict.unexplained,
            events=[_event(i, self._began_ns) for i in done],
        )


def unavailable(records: Sequence[Record], bucket_count: int) -> Iterator[float]:
    """For each bucket and each time that operations on it failed: from the first one's call to the
    next success, in seconds."""
    buckets: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        buckets[ring.bucket_of(record.key.encode(), bucket_count)].append(record)
    for of_bucket in buckets.values():
        until = _first_success(of_bucket)
        served_ns = 0
        for record in sorted((r for r in of_bucket if r.error), key=lambda r: r.called):
            if record.called >= served_ns and (served_ns := until(record.called)):
                yield (served_ns - record.called) / 1e9


def _first_success(records: Sequence[Record]) -> Callable[[int], int]:
    """When the first operation that was called at some time or later, and succeeded, returned;
    0: there is none."""
    ordered = sorted((r for r in records if r.acknowledged), key=lambda r: r.called)
    called = [r.called for r in ordered]
    first = list(accumulate((r.returned for r in reversed(ordered)), min))[::-1]

    def until(time_ns: int) -> int:
        n = bisect_left(called, time_ns)
        return first[n] if n < len(first) else 0

    return until


def _told(lacking: dict[int, str]) -> str:
    """How many buckets are not whole, and some of them."""
    some = "; ".join(f"{bucket}: {text}" for bucket, text in list(lacking.items())[:3])
    return f"{len(lacking)} buckets lack copies ({some})"


def _reasons(verdict: judge.Verdict) -> list[str]:
    counts = {
        "acknowledged writes were lost": len(verdict.lost),
        "reads were stale": len(verdict.stale),
        "reads of write-once blocks failed": len(verdict.failed_reads),
        "values were damaged": len(verdict.damaged),
        "registers are not linearizable": len(verdict.unexplained),
        "registers could not be decided": len(verdict.undecided),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _shown(verdict: judge.Verdict) -> list[str]:
    lists = (verdict.damaged, verdict.stale, verdict.lost, verdict.failed_reads)
    return [str(f) for findings in lists for f in findings[:FINDINGS_SHOWN_MAX]]


def _event(injected: Injected, began_ns: int) -> dict[str, Any]:
    fields = msgspec.to_builtins(injected)
    return {"at_s": round((fields.pop("at_ns") - began_ns) / 1e9, 3), **fields}


@contextmanager
def _recorder(directory: Path, client: str) -> Iterator[Recorder]:
    recorder = Recorder(directory, client)
    try:
        yield recorder
    finally:
        recorder.close()


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


__all__ = ["Plan", "Report", "Watch", "run", "unavailable"]
