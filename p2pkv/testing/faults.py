"""Carries out the faults of a plan, one after the other, and measures what follows each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from p2pkv import clock
from p2pkv.testing.faultplan import Fault, FaultKind
from p2pkv.testing.observer import Observer
from p2pkv.testing.probe import Probe, keys_of_buckets
from p2pkv.testing.recording import RecordedClient
from p2pkv.testing.targets import Target
from p2pkv.types import Member

PROBED_BUCKETS_MAX = 12


class Injected(msgspec.Struct, kw_only=True):
    """A fault that happened, and what followed. Times in seconds; ``at_ns`` monotonic."""

    kind: FaultKind
    at_ns: int
    victim: str
    duration_s: float
    buckets: list[int] = []
    """Those whose primary was killed."""
    first_ack_s: list[float] = []
    first_read_s: list[float] = []
    unanswered: int = 0
    """Probes that got no answer at all."""
    repair_s: float | None = None
    """From the fault until all buckets had their copies again; None: not before the deadline."""


class Injector:
    """Hurts one cluster."""

    def __init__(
        self,
        target: Target,
        observer: Observer,
        probe_client: RecordedClient,
        *,
        repair_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._observer = observer
        self._client = probe_client
        self._repair_timeout_s = repair_timeout_s
        self._say = say
        self._keys = keys_of_buckets(observer.bucket_count())
        self._dead: set[Member] = set()
        self.done: list[Injected] = []

    def whole(self, timeout_s: float | None = None) -> bool:
        """Wait until every bucket has its copies, on live members."""
        return self._observer.wait(
            lambda: not self.lacking(),
            self._repair_timeout_s if timeout_s is None else timeout_s,
        )

    def lacking(self) -> dict[int, str]:
        """The buckets that are not whole, with what etcd says of each."""
        return self._observer.lacking(self._dead)

    def inject(self, fault: Fault, stopped: threading.Event) -> Injected | None:
        """One fault, from the pause before it to the repair. None if ``stopped`` meanwhile, or if
        the cluster was not whole before."""
        if stopped.wait(fault.pause_s) or not self.whole():
            return None
        act = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.KILL_WITHOUT_ETCD: self._kill_without_etcd,
            FaultKind.PARTITION: self._partition,
        }
        injected = act.get(fault.kind, self._etcd)(fault)
        self.done.append(injected)
        return injected

    # -- each kind

    def _kill(self, fault: Fault) -> Injected:
        victim = self._primary_of_something(fault)
        member = self._observer.members()[victim]
        buckets = [b for b, m in self._observer.primaries().items() if m == member]
        self._say(f"kill {victim}, primary of {len(buckets)} buckets")
        at_ns = clock.monotonic()
        self._target.kill(victim)
        self._dead.add(member)
        probed = buckets[:: max(1, len(buckets) // PROBED_BUCKETS_MAX)][:PROBED_BUCKETS_MAX]
        keys = [self._keys[b] for b in probed]
        probe = Probe(self._client, keys, at_ns, f"probe-{len(self.done)}")
        with ThreadPoolExecutor(1) as beside:
            repair = beside.submit(self._repaired, at_ns)
            _sleep_until(at_ns, fault.duration_s)
            self._target.start_node(victim)
            duration_s = _since(at_ns)
            repair_s = repair.result()
        probe.join()
        return Injected(
            kind=fault.kind,
            at_ns=at_ns,
            victim=victim,
            duration_s=duration_s,
            buckets=[int(b) for b in buckets],
            first_ack_s=probe.first_ack_s,
            first_read_s=probe.first_read_s,
            unanswered=probe.unanswered,
            repair_s=repair_s,
        )

    def _stop(self, fault: Fault) -> Injected:
        victim = self._primary_of_something(fault)
        self._say(f"stop {victim} for {fault.duration_s:.1f} s")
        at_ns = clock.monotonic()
        self._target.pause(victim)
        try:
            _sleep_until(at_ns, fault.duration_s)
        finally:
            self._target.resume(victim)
        return self._ended(fault, at_ns, victim)

    def _etcd(self, fault: Fault) -> Injected:
        self._say(f"{fault.kind.value} for {fault.duration_s:.1f} s")
        at_ns = clock.monotonic()
        self._target.etcd_down(fault.kind)
        try:
            _sleep_until(at_ns, fault.duration_s)
        finally:
            self._target.etcd_up(fault.kind)
        return self._ended(fault, at_ns, "etcd")

    def _kill_without_etcd(self, fault: Fault) -> Injected:
        """Nobody can take over before etcd is back; all other buckets are to go on."""
        victim = self._primary_of_something(fault)
        member = self._observer.members()[victim]
        self._say(f"kill {victim} while etcd is stopped for {fault.duration_s:.1f} s")
        at_ns = clock.monotonic()
        self._target.etcd_down(FaultKind.ETCD_STOP)
        try:
            _sleep_until(at_ns, fault.duration_s / 3)
            self._target.kill(victim)
            self._dead.add(member)
            _sleep_until(at_ns, fault.duration_s)
        finally:
            self._target.etcd_up(FaultKind.ETCD_STOP)
        self._target.start_node(victim)
        return self._ended(fault, at_ns, victim)

    def _partition(self, fault: Fault) -> Injected:
        at_ns = clock.monotonic()
        try:
            what = self._target.cut(fault)
            self._say(f"partition for {fault.duration_s:.1f} s: {what}")
            _sleep_until(at_ns, fault.duration_s)
        finally:
            self._target.heal()
        return self._ended(fault, at_ns, what)

    # -- parts

    def _primary_of_something(self, fault: Fault) -> str:
        """Half of the time the node that is primary of most buckets, else any that is of one."""
        counts = Counter(str(m.node) for m in self._observer.primaries().values())
        names = sorted(name for name in self._target.nodes() if counts[name])
        if not names:
            return fault.pick(self._target.nodes())
        return max(names, key=lambda n: counts[n]) if fault.other < 0.5 else fault.pick(names)

    def _ended(self, fault: Fault, at_ns: int, victim: str) -> Injected:
        """The fault is over; wait until its traces are, too."""
        duration_s = _since(at_ns)
        self._say(f"{fault.kind.value} is over")
        return Injected(
            kind=fault.kind,
            at_ns=at_ns,
            victim=victim,
            duration_s=duration_s,
            repair_s=self._repaired(at_ns),
        )

    def _repaired(self, at_ns: int) -> float | None:
        return _since(at_ns) if self.whole() else None


def _since(at_ns: int) -> float:
    return round((clock.monotonic() - at_ns) / 1e9, 4)


def _sleep_until(at_ns: int, after_s: float) -> None:
    threading.Event().wait(max(0.0, after_s - (clock.monotonic() - at_ns) / 1e9))


__all__ = ["Injected", "Injector"]
