"""A second level for LMCache's server.

LMCache's controllers submit tasks and wait at file descriptors; p2pkv's threads do the work, and
bounded queues keep it from piling up. What finds no room, or fails, is a miss or a failed store.

A lookup pins what it finds for ``lock_ttl_s``. Pins belong to this process's session with each
node: they end when LMCache unlocks, with their time, or when the session falls silent, so a server
that dies leaves nothing locked.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from p2pkv import clock
from p2pkv.adapters.cache import Cache
from p2pkv.adapters.lmcache.locks import Locks
from p2pkv.adapters.lmcache.names import ObjectNames
from p2pkv.adapters.lmcache.options import read
from p2pkv.adapters.lmcache.tasks import Tasks
from p2pkv.adapters.notices import Notices
from p2pkv.errors import P2PKVError, QuotaExceeded

log = logging.getLogger("p2pkv.adapters.lmcache")


class P2PKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Any thread may use it. Raises ConfigError for options that are not acceptable.

    ``l1_memory_desc``: LMCache's whole first level, whose memory is known once and for all.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._options = options = read(params)
        self._names = ObjectNames(options.namespace)
        self._notices = Notices(log)
        ids = itertools.count(1)
        self._stores: Tasks[Any] = Tasks(create_event_notifier(), ids)
        self._lookups: Tasks[Any] = Tasks(create_event_notifier(), ids)
        self._loads: Tasks[Any] = Tasks(create_event_notifier(), ids)
        self._lock = threading.Lock()
        """Of the locks."""
        self._locks = Locks(round(options.lock_ttl_s * clock.SECOND_NS))
        self._cache: Cache = options.open(log)
        self._pool = (0, 0)
        if l1_memory_desc is not None and l1_memory_desc.size > 0:
            self._pool = (int(l1_memory_desc.ptr), int(l1_memory_desc.size))
            self._cache.client.register_buffer(*self._pool)

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # -- stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        task = self._stores.begin()
        sizes = [int(o.get_size()) for o in objects]

        def done(outcomes: Sequence[Any]) -> None:
            self._notices.tell_outcomes("store", outcomes)
            new = [i for i, o in enumerate(outcomes) if isinstance(o, int) and o > 0]
            self._notify_keys_stored([keys[i] for i in new], [sizes[i] for i in new])
            failed = any(isinstance(outcome, P2PKVError) for outcome in outcomes)
            self._stores.finish(task, L2StoreResult(not failed, sum(sizes[i] for i in new)))

        values = self._memory(objects)
        if values is None or not self._cache.submit_store(
            list(map(self._names.of, keys)), values, done,
            ttl=self._options.ttl_s, write_once=True, skip_present=True,
        ):  # fmt: skip
            self._stores.finish(task, L2StoreResult(False, 0))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    # -- lookups

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        task, names = self._lookups.begin(), list(map(self._names.of, keys))

        def done(outcomes: Sequence[Any]) -> None:
            self._notices.tell_outcomes("lookup", outcomes)
            with self._lock:
                pinned = [n for n, o in zip(names, outcomes, strict=True) if o is True]
                self._locks.lock(pinned, clock.monotonic())
            there = [o is True or isinstance(o, QuotaExceeded) for o in outcomes]
            self._lookups.finish(task, bitmap(there))

        if not self._cache.submit_ask(names, lambda items: self._pin(names, items), done):
            self._lookups.finish(task, bitmap([False] * len(keys)))
        return task

    def _pin(self, names: Sequence[bytes], items: Sequence[int]) -> Sequence[Any]:
        return self._cache.client.pin(
            [names[i] for i in items],
            ttl=self._options.lock_ttl_s,
            timeout=self._cache.config.lookup_timeout_s,
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """What cannot be unpinned now unpins itself."""
        with self._lock:
            free = self._locks.unlock(map(self._names.of, keys), clock.monotonic())
        if free:
            self._cache.submit_ask(
                free, lambda items: self._unpin([free[i] for i in items]), lambda _: None
            )

    def _unpin(self, names: Sequence[bytes]) -> Sequence[Any]:
        timeout = self._cache.config.transfer_timeout_s
        return self._cache.client.unpin(names, timeout=timeout)

    # -- loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        task = self._loads.begin()
        sizes = [int(o.get_size()) for o in objects]

        def done(outcomes: Sequence[Any]) -> None:
            self._notices.tell_outcomes("load", outcomes)
            there = [o == size for o, size in zip(outcomes, sizes, strict=True)]
            self._notify_keys_accessed([k for k, hit in zip(keys, there, strict=True) if hit])
            self._loads.finish(task, bitmap(there))

        targets = self._memory(objects)
        if targets is None or not self._cache.submit_load(
            list(map(self._names.of, keys)), targets, done
        ):
            self._loads.finish(task, bitmap([False] * len(keys)))
        return task

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    def _memory(self, objects: Sequence[Any]) -> list[Any] | None:
        """Addresses within the pool, buffers outside of it; None if that is no host memory."""
        start, length = self._pool
        found: list[Any] = []
        try:
            for each in objects:
                address, size = int(each.data_ptr), int(each.get_size())
                if start <= address and address + size <= start + length:
                    found.append((address, size))
                else:
                    found.append(memoryview(each.byte_array).cast("B"))
        except (NotImplementedError, TypeError, RuntimeError) as e:
            self._notices.tell("memory", type(e).__name__, f"objects that are no host memory: {e}")
            return None
        return found

    # -- the rest

    def delete(self, keys: list[Any]) -> None:
        names = list(map(self._names.of, keys))
        sizes = self._cache.sizes(names)
        outcomes = self._cache.delete(names)
        self._notices.tell_outcomes("delete", outcomes)
        gone = [i for i, o in enumerate(outcomes) if o is True and isinstance(sizes[i], int)]
        self._notify_keys_deleted([keys[i] for i in gone], [sizes[i] for i in gone])

    def report_status(self) -> dict[str, Any]:
        """Healthy as long as it works: a cluster that does not answer is misses, not an error."""
        with self._lock:
            locked, reaped = len(self._locks), self._locks.reaped_total
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "cluster": self._options.client_config().cluster,
            "locked": locked,
            "locks_reaped_total": reaped,
            **self._cache.figures(),
        }

    def why_miss(self, key: Any) -> Any:
        """Why a chunk is not there, for who looks for the cause by hand."""
        return self._cache.why_miss(self._names.of(key))

    def close(self) -> None:
        try:
            self._cache.close()
        except P2PKVError as e:
            log.warning("close: %s", e)
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()


def bitmap(flags: Sequence[bool]) -> Any:
    """LMCache's, with these bits."""
    bits = Bitmap(len(flags))
    for i, flag in enumerate(flags):
        if flag:
            bits.set(i)
    return bits


__all__ = ["P2PKVL2Adapter"]
