"""The asyncio client. Same operations as the blocking one, another driver.

All calls of one client share a connection per peer; many may be under way at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, overload

from p2pkv import clock, wire
from p2pkv.arguments import put_options
from p2pkv.async_driver import AsyncDriver
from p2pkv.buffers import copy
from p2pkv.client import client_config, scan_cursor
from p2pkv.config import ClientConfig, EtcdConfig
from p2pkv.near_cache import NearCache, near_batch_get
from p2pkv.operations import Key, Operations, encode_key
from p2pkv.routing import Location, Router
from p2pkv.tensors import AsyncTensorCalls


class AsyncClient(AsyncTensorCalls):
    """A p2pkv cluster, from an asyncio program.

    Arguments, calls, results and errors are those of ``Client``; every call is awaited, and
    ``scan`` is an async iterator. Belongs to the event loop on which it is first used.
    A call may be cancelled: its buffers are the caller's again when the cancellation is through; a
    write may have been done, or not.
    """

    def __init__(
        self,
        etcd_endpoints: Sequence[str] | str | None = None,
        seeds: Sequence[str] | str | None = None,
        *,
        cluster: str = "default",
        timeout: float = 5.0,
        etcd: EtcdConfig | None = None,
        path: str = "auto",
        near_cache_bytes: int = 0,
        checksums: str = "demand",
    ) -> None:
        config = client_config(
            etcd_endpoints, seeds, cluster, timeout, etcd, path=path, checksums=checksums
        )
        router = Router()
        self._setup(config, router, AsyncDriver(config, router), near_cache_bytes)

    @classmethod
    def from_config(cls, config: ClientConfig, *, near_cache_bytes: int = 0) -> Self:
        """See ``Client.from_config``."""
        router = Router()
        client = cls.__new__(cls)
        client._setup(config, router, AsyncDriver(config, router), near_cache_bytes)
        return client

    def _setup(
        self, config: ClientConfig, router: Router, driver: AsyncDriver, near_cache_bytes: int = 0
    ) -> None:
        self._config = config
        self._driver = driver
        self._ops = Operations(config, clock.monotonic, Random(), copy, router)
        self._near = NearCache(near_cache_bytes) if near_cache_bytes else None

    @classmethod
    def _hosted(cls, config: ClientConfig, router: Router, driver: AsyncDriver) -> Self:
        client = cls.__new__(cls)
        client._setup(config, router, driver)
        return client

    # -- one key

    async def put(self, key: Key, value: Any, *, if_absent: bool = False, write_once: bool = False,
                  soft_pin: bool = False, hard_pin: bool = False, ttl: float | None = None,
                  min_replicas: int = 0, timeout: float | None = None) -> int:  # fmt: skip
        """See ``Client.put``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        self._forget((key,))
        return await self._driver.run(self._ops.put(key, value, options, timeout))

    @overload
    async def get(self, key: Key, *, timeout: float | None = None) -> bytes | None: ...

    @overload
    async def get(self, key: Key, *, timeout: float | None = None,
                  zero_copy: bool) -> bytes | memoryview | None: ...  # fmt: skip

    async def get(self, key: Key, *, timeout: float | None = None,
                  zero_copy: bool = False) -> bytes | memoryview | None:  # fmt: skip
        """See ``Client.get``."""
        if zero_copy:
            return await self._driver.run(self._ops.get_view(key, timeout))
        if self._near is not None:
            return (await self.batch_get((key,), timeout=timeout))[0]
        return await self._driver.run(self._ops.get(key, timeout))

    async def put_from(self, key: Key, parts: Any, *, if_absent: bool = False,
                       write_once: bool = False, soft_pin: bool = False, hard_pin: bool = False,
                       ttl: float | None = None,
                       min_replicas: int = 0, timeout: float | None = None) -> int:  # fmt: skip
        """See ``Client.put_from``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        self._forget((key,))
        return await self._driver.run(self._ops.put_from(key, parts, options, timeout))

    async def get_into(self, key: Key, target: Any, *, offset: int = 0, length: int | None = None,
                       timeout: float | None = None) -> int | None:  # fmt: skip
        """See ``Client.get_into``."""
        return await self._driver.run(self._ops.get_into(key, target, timeout, offset, length))

    async def get_range(self, key: Key, offset: int, length: int | None = None, *,
                        timeout: float | None = None) -> bytes | None:  # fmt: skip
        """See ``Client.get_range``."""
        return await self._driver.run(self._ops.get_range(key, offset, length, timeout))

    async def exists(self, key: Key, *, timeout: float | None = None) -> bool:
        """See ``Client.exists``."""
        return await self._driver.run(self._ops.exists(key, timeout))

    async def delete(self, key: Key, *, timeout: float | None = None) -> bool:
        """See ``Client.delete``."""
        self._forget((key,))
        return await self._driver.run(self._ops.delete(key, timeout))

    async def expire(self, key: Key, ttl: float | None, *, timeout: float | None = None) -> None:
        """See ``Client.expire``."""
        await self._driver.run(self._ops.expire(key, ttl, timeout))

    # -- batches

    async def batch_put(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]], *,
                        if_absent: bool = False, write_once: bool = False, soft_pin: bool = False,
                        hard_pin: bool = False, ttl: float | None = None,
                        min_replicas: int = 0,
                        timeout: float | None = None) -> list[int]:  # fmt: skip
        """See ``Client.batch_put``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        if self._near is not None:
            items = list(items.items() if isinstance(items, Mapping) else items)
            self._forget([k for k, _ in items])
        return await self._driver.run(self._ops.batch_put(items, options, timeout))

    @overload
    async def batch_get(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> list[bytes | None]: ...

    @overload
    async def batch_get(self, keys: Iterable[Key], *, timeout: float | None = None,
                        zero_copy: bool) -> Sequence[bytes | memoryview | None]: ...  # fmt: skip

    async def batch_get(
        self, keys: Iterable[Key], *, timeout: float | None = None, zero_copy: bool = False
    ) -> Sequence[bytes | memoryview | None]:
        """See ``Client.batch_get``."""
        if zero_copy:
            return await self._driver.run(self._ops.batch_get_views(keys, timeout))
        if self._near is None:
            return await self._driver.run(self._ops.batch_get(keys, timeout))
        return await self._driver.run(near_batch_get(self._ops, self._near, list(keys), timeout))

    async def batch_put_from(self, keys: Iterable[Key], values: Iterable[Any], *,
                             if_absent: bool = False, write_once: bool = False,
                             soft_pin: bool = False, hard_pin: bool = False,
                             ttl: float | None = None,
                             min_replicas: int = 0,
                             timeout: float | None = None) -> list[int]:  # fmt: skip
        """See ``Client.batch_put_from``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        if self._near is not None:
            keys = list(keys)
            self._forget(keys)
        return await self._driver.run(self._ops.batch_put_from(keys, values, options, timeout))

    async def batch_get_into(self, keys: Iterable[Key], targets: Iterable[Any], *,
                             ranges: Iterable[tuple[int, int | None]] | None = None,
                             timeout: float | None = None) -> list[int | None]:  # fmt: skip
        """See ``Client.batch_get_into``."""
        return await self._driver.run(self._ops.batch_get_into(keys, targets, timeout, ranges))

    async def batch_get_range(self, keys: Iterable[Key],
                              ranges: Iterable[tuple[int, int | None]], *,
                              timeout: float | None = None) -> list[bytes | None]:  # fmt: skip
        """See ``Client.batch_get_range``."""
        return await self._driver.run(self._ops.batch_get_range(keys, ranges, timeout))

    async def batch_exists(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> list[bool]:
        """See ``Client.batch_exists``."""
        return await self._driver.run(self._ops.batch_exists(keys, timeout))

    async def batch_delete(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> list[bool]:
        """See ``Client.batch_delete``."""
        keys = list(keys)
        self._forget(keys)
        return await self._driver.run(self._ops.batch_delete(keys, timeout))

    async def match_prefix(self, keys: Sequence[Key], *, timeout: float | None = None) -> int:
        """See ``Client.match_prefix``."""
        return await self._driver.run(self._ops.match_prefix(keys, timeout))

    async def prefetch(self, keys: Iterable[Key], *, timeout: float | None = None) -> int:
        """See ``Client.prefetch``."""
        return sum(await self._driver.run(self._ops.batch_exists(keys, timeout, touch=True)))

    # -- ranges

    async def scan(self, prefix: Key = b"", *, page: int = 256,
                   timeout: float | None = None) -> AsyncIterator[tuple[bytes, bytes]]:  # fmt: skip
        """See ``Client.scan``."""
        async for keys in self._pages(prefix, page, timeout):
            values = await self.batch_get([k for k, _ in keys], timeout=timeout)
            for (key, _), value in zip(keys, values, strict=True):
                if value is not None:
                    yield key, value

    async def scan_keys(
        self, prefix: Key = b"", *, page: int = 4096, timeout: float | None = None
    ) -> AsyncIterator[tuple[bytes, int]]:
        """See ``Client.scan_keys``."""
        async for keys in self._pages(prefix, page, timeout):
            for item in keys:
                yield item

    async def _pages(
        self, prefix: Key, page: int, timeout: float | None
    ) -> AsyncIterator[list[tuple[bytes, int]]]:
        cursor = scan_cursor(self._ops, prefix, page)
        while not cursor.done:
            yield await self._driver.run(self._ops.scan_page(cursor, timeout))

    async def delete_range(self, prefix: Key, *, timeout: float | None = None) -> int:
        """See ``Client.delete_range``."""
        if self._near is not None:
            self._near.clear()
        return await self._driver.run(self._ops.delete_range(prefix, timeout))

    # -- keeping and looking

    async def pin(
        self, keys: Iterable[Key], *, ttl: float = 60.0, timeout: float | None = None
    ) -> list[bool]:
        """See ``Client.pin``."""
        return await self._driver.run(self._ops.pin(keys, ttl, timeout))

    async def unpin(self, keys: Iterable[Key], *, timeout: float | None = None) -> list[bool]:
        """See ``Client.unpin``."""
        return await self._driver.run(self._ops.unpin(keys, timeout))

    def locate(self, keys: Iterable[Key]) -> list[Location | None]:
        """See ``Client.locate``."""
        return self._ops.locate(keys)

    async def stats(self, *, timeout: float | None = None) -> dict[str, wire.NodeStats]:
        """See ``Client.stats``."""
        return await self._driver.run(self._ops.stats(timeout))

    async def drain(
        self, node: str, *, draining: bool = True, timeout: float | None = None
    ) -> None:
        """See ``Client.drain``."""
        await self._driver.run(self._ops.drain(node, draining, timeout))

    async def scrub(
        self, nodes: Iterable[str] = (), *, bytes_per_s: int = 0, timeout: float | None = None
    ) -> dict[str, wire.Scrubbed]:
        """See ``Client.scrub``."""
        return await self._driver.run(self._ops.scrub(list(nodes), bytes_per_s, timeout))

    # -- memory by address

    def register_buffer(self, memory: Any, length: int | None = None) -> int:
        """See ``Client.register_buffer``."""
        return self._ops.memory.register(memory, length)

    def unregister_buffer(self, memory: Any) -> None:
        """See ``Client.unregister_buffer``."""
        self._ops.memory.unregister(memory)

    # -- life

    def _forget(self, keys: Iterable[Key]) -> None:
        if self._near is not None:
            limits = self._config.limits
            self._near.discard([encode_key(key, limits) for key in keys])

    async def close(self) -> None:
        """Close the sockets; calls under way end with ClosedClient or Unreachable."""
        await self._driver.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        await self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an AsyncClient holds sockets and cannot be pickled")
