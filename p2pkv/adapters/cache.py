"""The store as an engine's cache: whatever is wrong with it is a miss, and soon.

* A node that is down or slow costs at most ``failures_max`` deadlines; after that its keys are
  misses at once, until a probe beside the calls has found it back.
* Work that can wait goes to threads with bounded queues, and is dropped, and counted, before
  anybody waits for room.
* Hits are counted when a request is first resolved, however often it asks again.
* ``why_miss`` says why a key is not there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta as Limit

from p2pkv import clock
from p2pkv.adapters.backlog import BacklogLimits
from p2pkv.adapters.breaker import BreakerPolicy
from p2pkv.adapters.history import Fate, History, Note, Reason, WhyMiss, explain
from p2pkv.adapters.hits import HitCounter
from p2pkv.adapters.probing import TROUBLE, Guard, NotAsked
from p2pkv.adapters.workers import Job, Workers
from p2pkv.arguments import OFFSET_MAX, Key
from p2pkv.client import Client
from p2pkv.config import Positive
from p2pkv.errors import (
    BatchError,
    DeadlineExceeded,
    InvalidArgument,
    OutOfRange,
    P2PKVError,
    Unreachable,
)
from p2pkv.memory import is_place

Done = Callable[[list[Any]], None]
"""Gets the outcome of each key, on a thread of the cache."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient an engine's cache is. Times in seconds, sizes in bytes."""

    lookup_timeout_s: Positive = 0.1
    """For the answer whether keys are there."""
    transfer_timeout_s: Positive = 1.0
    """For loads and stores, on top of the time that their bytes take at the rate below."""
    unsized_timeout_s: Positive = 5.0
    """For loads of which nobody knows beforehand how large they are."""
    transfer_bytes_per_s_min: Annotated[int, Limit(ge=1)] = 64 << 20
    """A transfer that is slower fails."""
    failures_max: Annotated[int, Limit(ge=1, le=1000)] = 2
    """Failures in a row after which a peer is not asked."""
    open_first_s: Positive = 0.5
    """Until it is probed; doubled each time, with jitter."""
    open_last_s: Positive = 10.0
    """At most so long between two probes."""
    probe_timeout_s: Positive = 1.0
    jobs_max: Annotated[int, Limit(ge=1, le=1 << 20)] = 1024
    """Stores, and as many loads, that wait or are under way; more are dropped."""
    jobs_bytes_max: Annotated[int, Limit(ge=1)] = 1 << 30
    """Bytes of them."""
    job_age_max_s: Positive = 30.0
    """What waited longer is dropped."""
    threads: Annotated[int, Limit(ge=1, le=64)] = 2
    """For stores, as many for loads, and as many for lookups."""
    history_keys_max: Annotated[int, Limit(ge=0)] = 32768
    """Keys that ``why_miss`` knows something of."""
    requests_max: Annotated[int, Limit(ge=1)] = 8192
    """Requests whose hits are known to be counted."""

    def _policy(self) -> BreakerPolicy:
        return BreakerPolicy(
            self.failures_max,
            _ns(self.open_first_s),
            _ns(self.open_last_s),
            _ns(self.probe_timeout_s),
        )

    def _backlog(self) -> BacklogLimits:
        return BacklogLimits(self.jobs_max, self.jobs_bytes_max, _ns(self.job_age_max_s))


class Cache:
    """A client's calls as an engine wants them. Any thread may use it.

    The outcome of a key is what the client's call returns for it, or a P2PKVError as a value;
    nothing is raised for trouble with the store. Bad arguments raise InvalidArgument as ever, and
    a closed client ClosedClient. ``close`` closes the client too, if it is ``owned``.
    """

    def __init__(
        self, client: Client, config: CacheConfig | None = None, *, owned: bool = False
    ) -> None:
        self.client = client
        self.config = config = config or CacheConfig()
        self._owned = owned
        self._guard = Guard(client, config._policy())
        self._lock = threading.Lock()
        """Of the history and the counts."""
        self._history = History(config.history_keys_max)
        self._hits = HitCounter(config.requests_max)
        self._stores = Workers("p2pkv-stores", config.threads, config._backlog())
        self._loads = Workers("p2pkv-loads", config.threads, config._backlog())
        self._lookups = Workers("p2pkv-lookups", config.threads, config._backlog())
        """Not those of loads: an answer of a few bytes must not wait behind gigabytes."""

    def connect(self, timeout_s: float) -> None:
        """Get to know the cluster. Raises Unreachable, ClusterMismatch, AuthorityUnavailable.

        Not needed, but without it the first lookups may end at their deadline. A node that does
        not answer is waited for, for 5 s at most, and does not matter as long as another does.
        """
        if not self.client.stats(timeout=timeout_s):
            raise Unreachable("no node of the cluster answers")

    # -- whether keys are there

    def exists(self, keys: Sequence[Key], *, request: Hashable = None) -> list[bool]:
        """Whether each key is there, for sure; within ``lookup_timeout_s``.

        ``request``: who asks; hits are counted at its first call. Of the consecutive hits from the
        start, that is, which is what an engine can use.
        """
        return [outcome is True for outcome in self._exists(keys, request)]

    def match(self, keys: Sequence[Key], *, request: Hashable = None) -> int:
        """How many of the keys, from the start, are there without a gap. As ``exists``."""
        return _prefix(self._exists(keys, request))

    def _exists(self, keys: Sequence[Key], request: Hashable) -> list[Any]:
        timeout = self.config.lookup_timeout_s
        outcomes = self.ask(keys, lambda i: self.client.batch_exists(_of(keys, i), timeout=timeout))
        hits = _prefix(outcomes)
        unavailable = sum(isinstance(outcome, TROUBLE) for outcome in outcomes[hits:])
        with self._lock:
            self._hits.resolved(request, hits, len(keys) - hits, unavailable)
        return outcomes

    def finished(self, request: Hashable) -> None:
        """The request will not ask again."""
        with self._lock:
            self._hits.finished(request)

    def sizes(self, keys: Sequence[Key]) -> list[Any]:
        """Bytes of each value, None for a miss; within ``lookup_timeout_s``."""
        timeout = self.config.lookup_timeout_s
        beyond = [(OFFSET_MAX, 0)]  # the error tells the size, and no byte has to come

        def call(items: Sequence[int]) -> Sequence[Any]:
            return self.client.batch_get_range(
                _of(keys, items), beyond * len(items), timeout=timeout
            )

        return [o.size if isinstance(o, OutOfRange) else o for o in self.ask(keys, call)]

    # -- bytes

    def get(self, keys: Sequence[Key]) -> list[Any]:
        """Values as bytes, None for a miss; within ``unsized_timeout_s``."""
        timeout = self.config.unsized_timeout_s
        return self.ask(keys, lambda i: self.client.batch_get(_of(keys, i), timeout=timeout))

    def load(
        self,
        keys: Sequence[Key],
        targets: Sequence[Any],
        *,
        ranges: Sequence[tuple[int, int | None]] | None = None,
    ) -> list[Any]:
        """Values into targets (see ``Client.batch_get_into``): sizes, None for a miss."""
        _check_pairs("targets", targets, keys)
        if ranges is not None:
            _check_pairs("ranges", ranges, keys)
        timeout = self.patience(sum(map(size_of, targets)))

        def call(items: Sequence[int]) -> list[Any]:
            return self.client.batch_get_into(
                _of(keys, items),
                _of(targets, items),
                ranges=None if ranges is None else _of(ranges, items),
                timeout=timeout,
            )

        return self.ask(keys, call)

    def store(
        self, keys: Sequence[Key], values: Sequence[Any], *, ttl: float | None = None,
        skip_present: bool = False, **options: Any,
    ) -> list[Any]:  # fmt: skip
        """Put values, each in one buffer or in several: copies, 0 where ``if_absent`` found one.

        ``skip_present``: ask first which keys are there, and send only the others; 0 for those
        that are. ``options``: those of ``Client.put_from``.
        """
        _check_pairs("values", values, keys)
        if skip_present:
            return self._store_missing(keys, values, ttl, options)
        timeout = self.patience(sum(map(size_of, values)))
        outcomes = self.ask(
            keys,
            lambda i: self.client.batch_put_from(
                _of(keys, i), _of(values, i), ttl=ttl, timeout=timeout, **options
            ),
        )
        self._remember(keys, outcomes, 0 if ttl is None else _ns(ttl))
        return outcomes

    def _store_missing(
        self, keys: Sequence[Key], values: Sequence[Any], ttl: float | None, options: dict[str, Any]
    ) -> list[Any]:
        timeout = self.config.lookup_timeout_s
        known = self.ask(keys, lambda i: self.client.batch_exists(_of(keys, i), timeout=timeout))
        missing = [i for i, there in enumerate(known) if there is not True]
        outcomes: list[Any] = [0] * len(keys)
        if missing:
            stored = self.store(_of(keys, missing), _of(values, missing), ttl=ttl, **options)
            for i, outcome in zip(missing, stored, strict=True):
                outcomes[i] = outcome
        return outcomes

    def delete(self, keys: Sequence[Key]) -> list[Any]:
        """Delete keys: whether each was there."""
        timeout = self.config.transfer_timeout_s
        outcomes = self.ask(keys, lambda i: self.client.batch_delete(_of(keys, i), timeout=timeout))
        done = [_name(k) for k, o in zip(keys, outcomes, strict=True) if o is True]
        with self._lock:
            self._history.note(done, Note(Fate.DELETED, clock.monotonic()))
        return outcomes

    # -- later, by threads of the cache

    def submit_store(
        self, keys: Sequence[Key], values: Sequence[Any], done: Done | None = None, **options: Any
    ) -> bool:
        """``store``, later. False: dropped, since too much waits already; ``done`` is not called.

        The values' memory must stay as it is until ``done`` has been called.
        """
        keys, values = list(keys), list(values)

        def run() -> None:
            outcomes = self._attempt(keys, lambda: self.store(keys, values, **options))
            if done is not None:
                done(outcomes)

        def drop(why: str) -> None:
            self._dropped(keys, why)
            if done is not None:
                done([NotAsked(f"the put was dropped: {why}")] * len(keys))

        taken = self._stores.submit(Job(run, drop), sum(map(size_of, values)))
        if not taken:
            self._dropped(keys, "too many puts were waiting")
        return taken

    def submit_load(
        self, keys: Sequence[Key], targets: Sequence[Any], done: Done, **options: Any
    ) -> bool:
        """``load``, later. False: too much waits already, so it is a miss; ``done`` is not called.

        The targets are written to until ``done`` has been called.
        """
        keys, targets = list(keys), list(targets)
        size = sum(map(size_of, targets))
        load = partial(self.load, keys, targets, **options)
        return self._submit(self._loads, keys, size, load, done)

    def submit_exists(self, keys: Sequence[Key], done: Done, *, request: Hashable = None) -> bool:
        """``exists``, later. False: too much waits already, so all are misses."""
        keys = list(keys)
        return self._submit(self._lookups, keys, 0, partial(self._exists, keys, request), done)

    def submit_ask(
        self, keys: Sequence[Key], call: Callable[[Sequence[int]], Sequence[Any]], done: Done
    ) -> bool:
        """``ask``, later, by the threads of lookups. False: too much waits already."""
        keys = list(keys)
        return self._submit(self._lookups, keys, 0, partial(self.ask, keys, call), done)

    @classmethod
    def _submit(
        cls, workers: Workers, keys: Sequence[Key], size: int, call: Callable[[], list[Any]],
        done: Done,
    ) -> bool:  # fmt: skip
        def drop(why: str) -> None:
            done([NotAsked(f"not asked for: {why}")] * len(keys))

        return workers.submit(Job(lambda: done(cls._attempt(keys, call)), drop), size)

    @staticmethod
    def _attempt(keys: Sequence[Key], call: Callable[[], list[Any]]) -> list[Any]:
        """Whoever waits for ``done`` gets an outcome, also where a call would have raised."""
        try:
            return call()
        except P2PKVError as e:
            return [e] * len(keys)

    # -- asking

    def ask(self, keys: Sequence[Key], call: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
        """The outcome of each key, for calls that are not among those above.

        ``call`` gets indices and returns, or raises as BatchError, the outcomes of these keys; keys
        of peers in trouble are not among them.
        """
        refused = self._guard.refused(keys) if self._guard else {}
        if not refused:
            results = _outcomes(call, range(len(keys)))
            self._guard.learn(keys, results)
            return results
        asked = [i for i in range(len(keys)) if i not in refused]
        results = [refused.get(i) for i in range(len(keys))]
        if asked:
            some = _outcomes(call, asked)
            self._guard.learn(_of(keys, asked), some)
            for i, outcome in zip(asked, some, strict=True):
                results[i] = outcome
        return results

    def patience(self, size: int) -> float:
        """Seconds for the transfer of so many bytes."""
        return self.config.transfer_timeout_s + size / self.config.transfer_bytes_per_s_min

    # -- what became of keys

    def _remember(self, keys: Sequence[Key], outcomes: Sequence[Any], ttl_ns: int) -> None:
        now = clock.monotonic()
        places = self.client.locate(keys)
        notes: dict[Any, list[bytes]] = {}
        for key, outcome, place in zip(keys, outcomes, places, strict=True):
            what: Any = place.generation if place else -1
            if isinstance(outcome, P2PKVError):
                what = f"{type(outcome).__name__}: {outcome}"
            notes.setdefault(what, []).append(_name(key))
        with self._lock:
            for what, names in notes.items():
                failed = isinstance(what, str)
                note = (
                    Note(Fate.FAILED, now, detail=what)
                    if failed
                    else Note(Fate.STORED, now, ttl_ns, what)
                )
                self._history.note(names, note)

    def _dropped(self, keys: Iterable[Key], why: str) -> None:
        note = Note(Fate.DROPPED, clock.monotonic(), detail=why)
        with self._lock:
            self._history.note([_name(key) for key in keys], note)

    def why_miss(self, key: Key) -> WhyMiss:
        """Why a key is not there. Asks its owner within ``lookup_timeout_s``, and then for the ring
        within as much.

        What this process did with a key is known for the last ``history_keys_max`` keys. What
        other processes did is not: a key that one of them deleted counts as evicted.
        """
        refused = self._guard.refused([key])
        if refused:
            return WhyMiss(Reason.BREAKER_OPEN, str(refused[0]))
        timeout = self.config.lookup_timeout_s
        (there,) = self.ask([key], lambda _: self.client.batch_exists([key], timeout=timeout))
        if isinstance(there, P2PKVError):
            return WhyMiss(Reason.UNREACHABLE, f"{type(there).__name__}: {there}")
        if there:
            return WhyMiss(Reason.PRESENT, "it is there now")
        with suppress(P2PKVError):  # a new owner's index may answer before the ring tells of it
            self.client.stats(timeout=timeout)
        (place,) = self.client.locate([key])
        generation = place.generation if place is not None else -1
        with self._lock:
            note, forgotten = self._history.of(_name(key)), self._history.forgotten_total
        return explain(note, generation, forgotten, clock.monotonic())

    def figures(self) -> dict[str, int]:
        """Counts, by name; what only rises ends in ``_total``. Hits and misses are blocks."""
        hits = self._hits
        return {
            "hits_total": hits.hits_total,
            "misses_total": hits.misses_total,
            "misses_unavailable_total": hits.unavailable_total,
            **self._guard.figures(),
            **{f"stores_{name}": n for name, n in self._stores.figures().items()},
            **{f"loads_{name}": n for name, n in self._loads.figures().items()},
            **{f"lookups_{name}": n for name, n in self._lookups.figures().items()},
        }

    # -- life

    def flush(self, timeout_s: float) -> bool:
        """Wait until all stores that were submitted are done; whether that was reached."""
        return self._stores.idle(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop what waits and stop the threads. Raises DeadlineExceeded if one goes on."""
        end = time.monotonic() + timeout_s
        parts = (self._stores, self._loads, self._lookups, self._guard)
        ended = [part.close(max(0.0, end - time.monotonic())) for part in parts]
        if self._owned:
            self.client.close()
        if not all(ended):
            raise DeadlineExceeded(f"a thread of the cache did not end within {timeout_s} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()


def _outcomes(call: Callable[[Sequence[int]], Sequence[Any]], items: Sequence[int]) -> list[Any]:
    try:
        return list(call(items))
    except BatchError as e:
        return e.results
    except TROUBLE as e:
        return [e] * len(items)


def _check_pairs(name: str, values: Sequence[Any], keys: Sequence[Key]) -> None:
    if len(values) != len(keys):
        raise InvalidArgument(f"{name}: {len(values)} for {len(keys)} keys")


def _of(values: Sequence[Any], items: Sequence[int]) -> list[Any]:
    return list(values) if len(items) == len(values) else [values[i] for i in items]


def _prefix(outcomes: Sequence[Any]) -> int:
    """How many are True from the start."""
    return next((i for i, o in enumerate(outcomes) if o is not True), len(outcomes))


def size_of(value: Any) -> int:
    """Bytes of a value or target: a buffer, an (address, length), or several of them."""
    if value.__class__ is memoryview:
        return int(value.nbytes)
    if is_place(value):
        return int(value[1])
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    try:
        return memoryview(value).nbytes
    except TypeError:
        return 0  # the client's call says what is wrong with it


def _name(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _ns(seconds: float) -> int:
    return round(seconds * clock.SECOND_NS)


__all__ = ["Cache", "CacheConfig", "NotAsked", "Reason", "WhyMiss", "size_of"]
