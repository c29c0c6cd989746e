"""The remote connector of an LMCache engine inside a process.

LMCache cancels a call that takes too long, and frees the memory objects that were made for it. The
thread that fills them does not know that, so objects are kept here until it is done with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.lmcache.names import EngineNames
from p2pkv.adapters.lmcache.options import SECTION, read
from p2pkv.adapters.notices import Notices
from p2pkv.errors import P2PKVError

log = logging.getLogger("p2pkv.adapters.lmcache")

LISTED_MAX = 100_000
PING_TIMEOUT_S = 1.0


class P2PKVConnector(RemoteConnector):  # type: ignore[misc]
    """Raises ConfigError for options that are not acceptable; no call raises for the store."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any,
        metadata: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(config, metadata or local_cpu_backend.metadata)
        self._options = options = read((config.extra_config or {}).get(SECTION, {}))
        self._loop = loop
        self._memory = local_cpu_backend
        self._header_bytes = self.remote_metadata_bytes if self.save_chunk_meta else 0
        serde = str(config.remote_serde or "naive")
        self._names = EngineNames(options.namespace, serde, self.save_chunk_meta)
        self._notices = Notices(log)
        self._cache: Cache = options.open(log)

    # -- whether chunks are there

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many chunks, from the start, are there without a gap. One round trip."""
        return self._cache.match(list(map(self._names.of, keys)))

    def support_batched_async_contains(self) -> bool:
        return True

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        names = list(map(self._names.of, keys))
        request = lookup_id or None

        def submit(done: Callable[[Sequence[Any]], None]) -> bool:
            return self._cache.submit_exists(names, done, request=request)

        outcomes = await self._later(submit, lambda _: None)
        there = [outcome is True for outcome in outcomes or ()]
        return there.index(False) if False in there else len(there)

    # -- loads

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """A memory object for each chunk, None for a miss. All in one batch."""
        objects = [new for _ in keys if (new := self._allocate()) is not None]
        headers = [bytearray(self._header_bytes) for _ in objects]
        rows = zip(headers, objects, strict=True)
        targets = [_parts(header, memoryview(each.byte_array)) for header, each in rows]
        names = [self._names.of(key) for key in keys[: len(objects)]]
        found: list[Any] = []

        def submit(done: Callable[[Sequence[Any]], None]) -> bool:
            def take(outcomes: Sequence[Any]) -> None:
                self._notices.tell_outcomes("load", outcomes)
                found[:] = map(self._take, objects, headers, outcomes)
                done(outcomes)

            return self._cache.submit_load(names, targets, take)

        def give_up(_: object) -> None:
            _release(found or objects)

        if objects and await self._later(submit, give_up) is None:
            _release(objects)
        return [*found, *[None] * (len(keys) - len(found))]

    def support_batched_get_non_blocking(self) -> bool:
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """The memory objects of the chunks from the start up to the first miss."""
        found = await self.batched_get(keys)
        hits = found.index(None) if None in found else len(found)
        _release(found[hits:])
        return found[:hits]

    def _allocate(self) -> Any:
        """Memory for a whole chunk; None if there is none at once."""
        return self._memory.allocate(
            self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False
        )

    def _take(self, object_: Any, header: bytearray, outcome: Any) -> Any:
        """The object with what has come, shaped for it; else it is released, and None."""
        try:
            if isinstance(outcome, int):
                shaped = self._shaped(object_, header, outcome)
                if shaped is not None:
                    return shaped
        except Exception as e:
            self._notices.tell("load", type(e).__name__, f"a value that is no chunk: {e}")
        object_.ref_count_down()
        return None

    def _shaped(self, object_: Any, header: bytearray, size: int) -> Any:
        if not header:
            return self.reshape_partial_chunk(object_, size)
        chunk = RemoteMetadata.deserialize(header)
        if size != len(header) + chunk.length:
            raise ValueError(f"{size} bytes, and its header says {chunk.length}")
        whole = (self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if (chunk.shapes, chunk.dtypes, chunk.fmt) == whole:
            return object_
        other = self._memory.allocate(chunk.shapes, chunk.dtypes, chunk.fmt, busy_loop=False)
        if other is None:
            return None
        if other.get_size() != chunk.length:
            other.ref_count_down()
            raise ValueError(f"{chunk.length} bytes, and its shape needs {other.get_size()}")
        memoryview(other.byte_array).cast("B")[:] = (
            memoryview(object_.byte_array).cast("B")[: chunk.length]
        )  # fmt: skip
        object_.ref_count_down()
        return other

    # -- stores

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Store chunks that are not there yet; trouble is logged. All in one batch."""
        names = list(map(self._names.of, keys))
        values = [_parts(self._header(o), memoryview(o.byte_array)) for o in memory_objs]
        for each in memory_objs:
            each.ref_count_up()

        def submit(done: Callable[[Sequence[Any]], None]) -> bool:
            def take(outcomes: Sequence[Any]) -> None:
                self._notices.tell_outcomes("store", outcomes)
                _release(memory_objs)
                done(outcomes)

            return self._cache.submit_store(
                names, values, take,
                ttl=self._options.ttl_s, write_once=True, skip_present=True,
            )  # fmt: skip

        if await self._later(submit, lambda _: None) is None:
            _release(memory_objs)

    def _header(self, object_: Any) -> bytes:
        if not self._header_bytes:
            return b""
        size, shapes, dtypes = object_.get_size(), object_.get_shapes(), object_.get_dtypes()
        header: bytes = RemoteMetadata(
            size, shapes, dtypes, object_.get_memory_format()
        ).serialize()
        return header

    # -- the rest

    async def _later(
        self,
        submit: Callable[[Callable[[Sequence[Any]], None]], bool],
        given_up: Callable[[Sequence[Any]], None],
    ) -> Sequence[Any] | None:
        """What a thread of the cache says; None if it had no room for it.

        ``given_up`` gets it if nobody waits any more.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Sequence[Any]] = loop.create_future()

        def settle(outcomes: Sequence[Any]) -> None:
            if waiter.cancelled():
                given_up(outcomes)
            else:
                waiter.set_result(outcomes)

        if not submit(lambda outcomes: _call(loop, settle, outcomes)):
            return None
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                given_up(waiter.result())
            raise

    async def list(self) -> list[str]:
        """The names of at most 100,000 chunks."""
        return await asyncio.to_thread(_names_below, self._cache, self._names.prefix)

    def remove_sync(self, key: Any) -> bool:
        return self._cache.delete([self._names.of(key)])[0] is True

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 if a node of the cluster answers, else -1."""
        try:
            await asyncio.to_thread(self._cache.connect, PING_TIMEOUT_S)
        except P2PKVError as e:
            self._notices.tell("ping", type(e).__name__, str(e))
            return -1
        return 0

    def why_miss(self, key: Any) -> Any:
        """Why a chunk is not there, for who looks for the cause by hand."""
        return self._cache.why_miss(self._names.of(key))

    def figures(self) -> dict[str, int]:
        """Those of the cache: hits, misses, peers that are not asked."""
        return self._cache.figures()

    async def close(self) -> None:
        try:
            await asyncio.to_thread(self._cache.close)
        except P2PKVError as e:
            log.warning("close: %s", e)


class P2PKVConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes connectors for plugins whose name begins with ``p2pkv``."""

    def __init__(self) -> None:
        super().__init__("plugin://p2pkv")

    def create_connector(self, context: Any) -> Any:
        return P2PKVConnector(
            context.loop, context.local_cpu_backend, context.config, context.metadata
        )


def _parts(header: Any, body: memoryview) -> Any:
    body = body.cast("B")
    return [header, body] if header else body


def _release(objects: Sequence[Any]) -> None:
    for each in objects:
        if each is not None:
            each.ref_count_down()


def _names_below(cache: Cache, prefix: str) -> list[str]:
    try:
        keys = islice(cache.client.scan_keys(prefix), LISTED_MAX)
        return [key.decode(errors="replace").removeprefix(prefix) for key, _ in keys]
    except P2PKVError as e:
        log.warning("list: %s", e)
        return []


def _call(loop: asyncio.AbstractEventLoop, act: Callable[[Any], None], argument: Any) -> None:
    """On the loop; here if it has ended, where nobody waits any more."""
    try:
        loop.call_soon_threadsafe(act, argument)
    except RuntimeError:
        log.debug("the loop of a connector has ended before its calls")


__all__ = ["P2PKVConnector", "P2PKVConnectorAdapter"]
