"""The class that SGLang loads as the storage of its HiCache.

Nothing is raised, and None never returned, for trouble with the store: a read that fails is a miss,
a write that fails is False, and the log tells the cause once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from p2pkv.adapters.cache import Cache, size_of
from p2pkv.adapters.notices import Notices
from p2pkv.adapters.sglang import hits
from p2pkv.adapters.sglang.identity import KV, Naming, model_name, names, page_keys
from p2pkv.adapters.sglang.options import read
from p2pkv.adapters.sglang.pages import Pages, as_buffer, buffers, pages_of
from p2pkv.adapters.sglang.tally import Tally
from p2pkv.errors import P2PKVError

log = logging.getLogger("p2pkv.adapters.sglang")

T = TypeVar("T")

CLEAR_TIMEOUT_S = 30.0


class Pool(NamedTuple):
    """A host pool: its pages, and the keys under which they are stored."""

    pages: Pages
    keys: Sequence[Any]

    def names(self, pages: Sequence[str], before: Sequence[str]) -> list[bytes]:
        return names(self.keys, pages, before)


class P2PKVStorage(HiCacheStorage):  # type: ignore[misc]
    """A rank's storage. SGLang calls it from several threads.

    Raises ConfigError for options that are not acceptable; a cluster that does not answer is
    logged.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._options, self._direct = read(storage_config.extra_config or {})
        options = self._options
        self._naming = Naming(options.model, options.namespace, options.blocks_per_group)
        model_name(storage_config, self._naming)  # before there is anything to be closed again
        self._pools: dict[str, Pool] = {}
        self._memory: set[tuple[int, int]] = set()
        self._counts_only = False
        """Whether SGLang's own pool has no memory: the others have all that is stored."""
        self._notices = Notices(log)
        self._tally = Tally()
        self._cache: Cache = options.open(log)

    # -- the pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        anchor = getattr(mem_pool_host, "anchor_entry", None)
        self._register(KV, mem_pool_host if anchor is None else anchor.host_pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        """Raises ConfigError."""
        memory = buffers(pool)
        if not memory:
            self._counts_only |= name == KV
            return
        for place in memory:  # pools may share it
            if place not in self._memory:
                self._cache.client.register_buffer(*place)
                self._memory.add(place)
        split = name == KV and self._config.should_split_heads
        pieces = self._config.tp_lcm_size // self._config.tp_size if split else 1
        pages = pages_of(name, pool, self._direct or name != KV, pieces)
        keys = page_keys(self._config, pages.facts, self._naming, pages.pieces)
        self._pools[name] = Pool(pages, keys)
        log.info("pool %s: keys begin with %s; %s", name, keys[0].prefix, pages.facts)

    # -- whether pages are there

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the pages, from the start, are there without a gap. One round trip."""
        return self._quietly("batch_exists", lambda: self._match(keys, before(extra_info)), 0)

    def _match(self, pages: Sequence[str], ahead: Sequence[str]) -> int:
        pool = self._pools.get(KV)
        if pool is None or not pages:
            return len(pages) if self._counts_only else 0
        return self._cache.match(pool.names(pages, ahead)) // len(pool.keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """The same for several pools at once, also in one round trip."""
        wanted = list(pool_transfers or ())
        found = self._quietly(
            "batch_exists_v2",
            lambda: self._match_all(keys, wanted, before(extra_info)),
            hits.NOTHING,
        )
        by_name = {transfer.name: found.pools.get(str(transfer.name), 0) for transfer in wanted}
        counts = {name: count for name, count in by_name.items() if count}
        if found.kv:
            counts = {KV: found.kv, **counts}
        return PoolTransferResult(found.usable, counts, list(found.restorable))

    def _match_all(
        self, pages: Sequence[str], transfers: Sequence[Any], ahead: Sequence[str]
    ) -> hits.Hits:
        wanted = [hits.Wanted(str(t.name), str(t.hit_policy.value), len(t.keys or ()))
                  for t in transfers]  # fmt: skip
        asked = [KV] * (KV in self._pools) + [w.name for w in wanted if w.name in self._pools]
        columns = [self._pools[name].names(pages, ahead) for name in asked]
        there = self._cache.exists([name for column in columns for name in column])
        rows, begin = {}, 0
        for name, column in zip(asked, columns, strict=True):
            flags = there[begin : begin + len(column)]
            rows[name] = hits.whole(flags, len(self._pools[name].keys))
            begin += len(column)
        return hits.fold(rows.get(KV, [self._counts_only] * len(pages)), rows, wanted)

    # -- bytes, by index into the host pools

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Whether each page has come."""
        missed = [False] * len(keys)
        jobs = [(KV, keys, host_indices)]
        return self._quietly(
            "batch_get_v1", lambda: self._load(jobs, before(extra_info))[0], missed
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Whether each page is stored, by whomever."""
        failed = [False] * len(keys)
        jobs = [(KV, keys, host_indices)]
        return self._quietly(
            "batch_set_v1", lambda: self._store(jobs, before(extra_info))[0], failed
        )

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Pages of several pools in one batch."""
        return self._each("batch_get_v2", transfers, extra_info, self._load)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._each("batch_set_v2", transfers, extra_info, self._store)

    def _each(
        self, what: str, transfers: Sequence[Any], extra_info: Any,
        act: Callable[[Any, Sequence[str]], list[list[bool]]],
    ) -> dict[Any, list[bool]]:  # fmt: skip
        jobs = [(str(t.name), t.keys or [], t.host_indices) for t in transfers]
        failed = [[False] * len(keys) for _, keys, _ in jobs]
        done = self._quietly(what, lambda: act(jobs, before(extra_info)), failed)
        return {t.name: flags for t, flags in zip(transfers, done, strict=True)}

    def _load(self, jobs: Sequence[Any], ahead: Sequence[str]) -> list[list[bool]]:
        pools = [self._pools.get(name) for name, _, _ in jobs]
        keys: list[bytes] = []
        targets: list[Any] = []
        kept = []
        for pool, (_, pages, indices) in zip(pools, jobs, strict=True):
            places, keep = pool.pages.targets(indices, len(pages)) if pool else ([], ())
            keys += pool.names(pages, ahead) if pool else ()
            targets += places
            kept.append(keep)
        with self._tally.reading() as count:
            outcomes = self._cache.load(keys, targets) if keys else []
            self._notices.tell_outcomes("load", outcomes)
            whole = [o == size_of(t) for o, t in zip(outcomes, targets, strict=True)]
            results = self._by_page(pools, jobs, whole)
            for pool, (_, _, indices), keep, there in zip(pools, jobs, kept, results, strict=True):
                if pool:
                    pool.pages.loaded(indices, keep, there)
            count(sum(map(sum, results)), sum(o for o in outcomes if isinstance(o, int)))
        return results

    def _store(self, jobs: Sequence[Any], ahead: Sequence[str]) -> list[list[bool]]:
        pools = [self._pools.get(name) for name, _, _ in jobs]
        keys: list[bytes] = []
        values: list[Any] = []
        for pool, (_, pages, indices) in zip(pools, jobs, strict=True):
            if pool:
                keys += pool.names(pages, ahead)
                values += pool.pages.values(indices, len(pages))
        with self._tally.writing() as count:
            stored = self._put_missing(keys, values)
            results = self._by_page(pools, jobs, stored)
            count(sum(map(sum, results)), sum(map(size_of, values)))
        return results

    def _put_missing(self, keys: Sequence[bytes], values: Sequence[Any]) -> list[bool]:
        """Whether each value is there afterwards; those that were are not sent."""
        if not keys:
            return []
        outcomes = self._cache.store(
            keys, values, ttl=self._options.ttl_s, write_once=True, skip_present=True
        )
        self._notices.tell_outcomes("store", outcomes)
        return [not isinstance(outcome, P2PKVError) for outcome in outcomes]

    def _by_page(
        self, pools: Sequence[Pool | None], jobs: Sequence[Any], values: Sequence[bool]
    ) -> list[list[bool]]:
        """For each job whether each page has all its values."""
        results, begin = [], 0
        for pool, (name, pages, _) in zip(pools, jobs, strict=True):
            if pool is None:
                results.append([self._counts_only and name == KV] * len(pages))
                continue
            end = begin + len(pages) * len(pool.keys)
            results.append(hits.whole(values[begin:end], len(pool.keys)))
            begin = end
        return results

    # -- bytes, in tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The tensor, filled; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        targets = list(target_locations or [None] * len(keys))
        missed = [None] * len(keys)
        return self._quietly("batch_get", lambda: self._fill(keys, targets), missed)

    def _fill(self, pages: Sequence[str], tensors: Sequence[Any]) -> list[Any]:
        pool = self._pools[KV]
        fresh = self.mem_pool_host.get_dummy_flat_data_page
        tensors = [fresh() if tensor is None else tensor for tensor in tensors]
        views = [as_buffer(tensor) for tensor in tensors]
        outcomes = self._cache.load(pool.names(pages, ()), views)
        self._notices.tell_outcomes("load", outcomes)
        rows = zip(outcomes, views, tensors, strict=True)
        return [tensor if outcome == view.nbytes else None for outcome, view, tensor in rows]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        """Whether all are stored."""
        return self._quietly("batch_set", lambda: self._put_tensors(keys, list(values)), False)

    def _put_tensors(self, pages: Sequence[str], tensors: Sequence[Any]) -> bool:
        pool = self._pools[KV]
        return all(self._put_missing(pool.names(pages, ()), list(map(as_buffer, tensors))))

    # -- looking, ending

    def clear(self) -> bool:
        """Delete all pages that have this engine's fingerprints, of every rank."""

        def act() -> bool:
            for prefix in {keys.prefix for pool in self._pools.values() for keys in pool.keys}:
                self._cache.client.delete_range(prefix, timeout=CLEAR_TIMEOUT_S)
            return True

        return self._quietly("clear", act, False)

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call; None unless it collects them."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return self._tally.take(StorageMetrics())

    def figures(self) -> dict[str, int]:
        """Those of the cache: hits, misses, peers that are not asked."""
        return self._cache.figures()

    def why_miss(self, key: str) -> Any:
        """Why a page is not there, for who looks for the cause by hand."""
        return self._cache.why_miss(self._pools[KV].names([key], ())[0])

    def close(self) -> None:
        self._quietly("close", self._cache.close, None)

    # -- trouble

    def _quietly(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """An exception ends SGLang's thread, or its request, so none may leave."""
        try:
            return call()
        except P2PKVError as e:
            self._notices.tell(what, type(e).__name__, str(e))
        except Exception as e:
            log.exception("%s failed", what)
            self._notices.tell(what, type(e).__name__, str(e))
        return otherwise


def before(extra_info: Any) -> Sequence[str]:
    """The pages ahead of a call's, as far as SGLang tells."""
    return (extra_info.prefix_keys or ()) if extra_info is not None else ()


__all__ = ["P2PKVStorage"]
