"""What a node says of its own load, for others to know."""

from __future__ import annotations

from p2pkv.async_driver import AsyncDriver
from p2pkv.clock import SECOND_NS
from p2pkv.data_server import DataServer
from p2pkv.store import Store
from p2pkv.swim_messages import Digest

RENEW_NS = SECOND_NS
"""Rates are taken over at least so long."""


class Load:
    """Makes digests of what the node's parts count, a new one each second."""

    def __init__(self, store: Store, data: DataServer, driver: AsyncDriver) -> None:
        self._store = store
        self._data = data
        self._driver = driver
        self._last = Digest()
        self._last_ns = 0
        self._put_bytes = 0
        self._reads = 0

    def digest(self, revision: int, now: int) -> Digest:
        """The newest; ``revision`` is the node's own word on its set of members."""
        if now - self._last_ns >= RENEW_NS or revision != self._last.revision:
            self._last = self._made(revision, now)
        return self._last

    def _made(self, revision: int, now: int) -> Digest:
        stats = self._store.stats()
        counters = stats.counters
        elapsed_ns = max(RENEW_NS, now - self._last_ns)
        put_bytes, self._put_bytes = counters.put_bytes - self._put_bytes, counters.put_bytes
        reads, self._reads = counters.hits - self._reads, counters.hits
        self._last_ns = now
        return Digest(
            serial=self._last.serial + 1,
            put_bytes_per_s=put_bytes * SECOND_NS // elapsed_ns,
            reads_per_s=reads * SECOND_NS // elapsed_ns,
            queue_depth=self._data.busy,
            memory_permille=min(1000, 1000 * stats.used_bytes // stats.size_bytes),
            revision=revision,
            paths_broken=self._driver.paths_broken,
        )
