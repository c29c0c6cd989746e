"""The blocking client: one instance for all threads of a process.

Each call runs its operation (see ``operations.py``) in the calling thread, with sockets of its
own while it runs: no thread hand-over, no lock held while bytes move. There is no background
thread; the ring is kept current by the answers of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, overload

from p2pkv import clock, wire
from p2pkv.arguments import put_options
from p2pkv.blocking_driver import Driver, SocketDriver
from p2pkv.buffers import copy
from p2pkv.config import ClientConfig, EtcdConfig, build
from p2pkv.errors import InvalidArgument, Miss
from p2pkv.near_cache import NearCache, near_batch_get
from p2pkv.operations import Key, Operations, ScanCursor, encode_key, encode_prefix
from p2pkv.routing import Location, Router
from p2pkv.tensors import TensorCalls


def client_config(
    etcd_endpoints: Sequence[str] | str | None,
    seeds: Sequence[str] | str | None,
    cluster: str,
    timeout: float,
    etcd: EtcdConfig | None,
    **more: Any,
) -> ClientConfig:
    """A ClientConfig from what Client and AsyncClient are given. Raises ConfigError."""
    tree: dict[str, Any] = {"cluster": cluster, "timeout_s": timeout, **more}
    if etcd is not None:
        tree["etcd"] = etcd
    elif etcd_endpoints is not None:
        endpoints = [etcd_endpoints] if isinstance(etcd_endpoints, str) else list(etcd_endpoints)
        tree["etcd"] = {"endpoints": endpoints}
    if seeds is not None:
        tree["seeds"] = [seeds] if isinstance(seeds, str) else list(seeds)
    return build(ClientConfig, tree)


class Client(TensorCalls):
    """A p2pkv cluster, from a blocking program. Thread-safe.

    Give ``etcd_endpoints`` (or ``etcd=EtcdConfig(...)`` for TLS and passwords), or ``seeds``: the
    control endpoints of some nodes. Keys are str (UTF-8) or bytes, 1 to 1,024 bytes; values are
    any contiguous buffer of 0 bytes to ``value_bytes_max`` (default 1 GiB). Wherever a buffer is
    taken, so is an ``(address, length)`` in memory that was given to ``register_buffer``. Every
    call takes ``timeout`` in seconds (default: the client's, 5.0).

    Raises, besides what each call names: InvalidArgument and TooLarge before anything is sent;
    Unreachable, DeadlineExceeded, Stalled at the deadline; Indeterminate for a write that may have
    been done; ForkedClient in a forked process. Batch calls raise BatchError, whose ``results``
    hold each key's outcome.

    ``path``: how bytes travel; ``checksums``: when values are compared with their checksums (see
    ``ClientConfig``), which raises CorruptValue. ``near_cache_bytes`` keeps values that were
    put with ``write_once`` in this process.
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
        self._setup(config, router, SocketDriver(config, router), near_cache_bytes)

    @classmethod
    def from_config(cls, config: ClientConfig, *, near_cache_bytes: int = 0) -> Self:
        """A client with all that a ClientConfig holds, e.g. limits other than the defaults."""
        router = Router()
        client = cls.__new__(cls)
        client._setup(config, router, SocketDriver(config, router), near_cache_bytes)
        return client

    def _setup(
        self, config: ClientConfig, router: Router, driver: Driver, near_cache_bytes: int = 0
    ) -> None:
        self._config = config
        self._driver = driver
        self._ops = Operations(config, clock.monotonic, Random(), copy, router)
        self._near = NearCache(near_cache_bytes) if near_cache_bytes else None

    @classmethod
    def _hosted(cls, config: ClientConfig, router: Router, driver: Driver) -> Self:
        client = cls.__new__(cls)
        client._setup(config, router, driver)
        return client

    # -- one key

    def put(self, key: Key, value: Any, *, if_absent: bool = False, write_once: bool = False,
            soft_pin: bool = False, hard_pin: bool = False, ttl: float | None = None,
            min_replicas: int = 0, timeout: float | None = None) -> int:  # fmt: skip
        """Store a value, replacing the old one. Returns the number of copies: 0 means not stored.

        ``if_absent``: store only if the key is not there (else 0). ``write_once``: promise that
        this key's content never differs, so that anyone may keep and serve it; a put on such a
        key keeps the bytes that are there. ``soft_pin``: evicted last. ``hard_pin``: never evicted,
        within the node's quota. ``ttl``: seconds until it expires. ``min_replicas``: so many
        members in sync must have it (0: what the cluster's ``min_in_sync`` says). Raises
        OutOfMemory, QuotaExceeded, NotEnoughReplicas.
        """
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        self._forget((key,))
        return self._driver.run(self._ops.put(key, value, options, timeout))

    @overload
    def get(self, key: Key, *, timeout: float | None = None) -> bytes | None: ...

    @overload
    def get(self, key: Key, *, timeout: float | None = None,
            zero_copy: bool) -> bytes | memoryview | None: ...  # fmt: skip

    def get(self, key: Key, *, timeout: float | None = None,
            zero_copy: bool = False) -> bytes | memoryview | None:  # fmt: skip
        """The value, or None if the key is not there. ``zero_copy``: see ``batch_get``."""
        if zero_copy:
            return self._driver.run(self._ops.get_view(key, timeout))
        if self._near is not None:
            return self.batch_get((key,), timeout=timeout)[0]
        return self._driver.run(self._ops.get(key, timeout))

    def put_from(self, key: Key, parts: Any, *, if_absent: bool = False, write_once: bool = False,
                 soft_pin: bool = False, hard_pin: bool = False, ttl: float | None = None,
                 min_replicas: int = 0, timeout: float | None = None) -> int:  # fmt: skip
        """``put`` of a value that lies in several buffers, one after the other: they are gathered.

        ``parts``: a sequence of contiguous buffers or ``(address, length)`` pairs, or one of them.
        """
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        self._forget((key,))
        return self._driver.run(self._ops.put_from(key, parts, options, timeout))

    def get_into(self, key: Key, target: Any, *, offset: int = 0, length: int | None = None,
                 timeout: float | None = None) -> int | None:  # fmt: skip
        """Copy the value into a writable buffer. Returns its size, or None if it is not there.

        ``target`` may be a sequence of buffers, which are filled one after the other (scattered).
        With ``offset`` and ``length`` (None: up to the end) only these bytes of the value come.
        Raises TooLarge if the target is smaller than what comes, and OutOfRange, with the value's
        size, for bytes beyond its end; the target is unchanged then.
        """
        return self._driver.run(self._ops.get_into(key, target, timeout, offset, length))

    def get_range(self, key: Key, offset: int, length: int | None = None, *,
                  timeout: float | None = None) -> bytes | None:  # fmt: skip
        """``length`` bytes of the value from ``offset`` on (None: up to the end), or None: no key.

        Raises OutOfRange, with the value's size, for bytes beyond its end.
        """
        return self._driver.run(self._ops.get_range(key, offset, length, timeout))

    def exists(self, key: Key, *, timeout: float | None = None) -> bool:
        """Whether the key is there. Neither pins it nor counts as a use."""
        return self._driver.run(self._ops.exists(key, timeout))

    def delete(self, key: Key, *, timeout: float | None = None) -> bool:
        """Delete the key; whether it was there."""
        self._forget((key,))
        return self._driver.run(self._ops.delete(key, timeout))

    def expire(self, key: Key, ttl: float | None, *, timeout: float | None = None) -> None:
        """Let the key expire after ``ttl`` seconds; None: never. Raises Miss."""
        self._driver.run(self._ops.expire(key, ttl, timeout))

    def __getitem__(self, key: Key) -> bytes:
        value = self.get(key)
        if value is None:
            raise Miss(f"key {key!r} is not there")
        return value

    def __setitem__(self, key: Key, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Key) -> None:
        if not self.delete(key):
            raise Miss(f"key {key!r} is not there")

    def __contains__(self, key: Key) -> bool:
        return self.exists(key)

    # -- batches: one message per owner, all owners at once

    def batch_put(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]], *,
                  if_absent: bool = False, write_once: bool = False, soft_pin: bool = False,
                  hard_pin: bool = False, ttl: float | None = None,
                  min_replicas: int = 0, timeout: float | None = None) -> list[int]:  # fmt: skip
        """``put`` of many (a mapping, or pairs). Returns the copies of each, in order."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        if self._near is not None:
            items = list(items.items() if isinstance(items, Mapping) else items)
            self._forget([k for k, _ in items])
        return self._driver.run(self._ops.batch_put(items, options, timeout))

    @overload
    def batch_get(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> list[bytes | None]: ...

    @overload
    def batch_get(self, keys: Iterable[Key], *, timeout: float | None = None,
                  zero_copy: bool) -> Sequence[bytes | memoryview | None]: ...  # fmt: skip

    def batch_get(self, keys: Iterable[Key], *, timeout: float | None = None,
                  zero_copy: bool = False) -> Sequence[bytes | memoryview | None]:  # fmt: skip
        """The values in the order of the keys; None where a key is not there.

        ``zero_copy``: read-only memoryviews. Those of a node on this host lie in its memory, which
        it uses for nothing else until each is released (``memoryview.release``, or with the last
        reference to it and to all that was made of it), whatever becomes of the key; they count
        against the node's ``view_quota_bytes`` (QuotaExceeded). Values of other nodes are copied
        into memory of this process, and so are all with ``path="tcp"`` or ``"zmq"``.
        """
        if zero_copy:
            return self._driver.run(self._ops.batch_get_views(keys, timeout))
        if self._near is None:
            return self._driver.run(self._ops.batch_get(keys, timeout))
        return self._driver.run(near_batch_get(self._ops, self._near, list(keys), timeout))

    def batch_put_from(self, keys: Iterable[Key], values: Iterable[Any], *,
                       if_absent: bool = False, write_once: bool = False, soft_pin: bool = False,
                       hard_pin: bool = False, ttl: float | None = None,
                       min_replicas: int = 0,
                       timeout: float | None = None) -> list[int]:  # fmt: skip
        """``put_from`` of many: the parts of each value. Returns the copies of each, in order."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl, min_replicas)
        if self._near is not None:
            keys = list(keys)
            self._forget(keys)
        return self._driver.run(self._ops.batch_put_from(keys, values, options, timeout))

    def batch_get_into(self, keys: Iterable[Key], targets: Iterable[Any], *,
                       ranges: Iterable[tuple[int, int | None]] | None = None,
                       timeout: float | None = None) -> list[int | None]:  # fmt: skip
        """``get_into`` of many: a buffer, or a sequence of them, for each key.

        ``ranges``: an (offset, length) for each key; a key may come several times. Returns the
        bytes that were copied for each; None for a miss.
        """
        return self._driver.run(self._ops.batch_get_into(keys, targets, timeout, ranges))

    def batch_get_range(self, keys: Iterable[Key], ranges: Iterable[tuple[int, int | None]], *,
                        timeout: float | None = None) -> list[bytes | None]:  # fmt: skip
        """``get_range`` of many: an (offset, length) for each key."""
        return self._driver.run(self._ops.batch_get_range(keys, ranges, timeout))

    def batch_exists(self, keys: Iterable[Key], *, timeout: float | None = None) -> list[bool]:
        """``exists`` of many."""
        return self._driver.run(self._ops.batch_exists(keys, timeout))

    def batch_delete(self, keys: Iterable[Key], *, timeout: float | None = None) -> list[bool]:
        """``delete`` of many."""
        keys = list(keys)
        self._forget(keys)
        return self._driver.run(self._ops.batch_delete(keys, timeout))

    def match_prefix(self, keys: Sequence[Key], *, timeout: float | None = None) -> int:
        """How many of the keys, from the start, are there without a gap."""
        return self._driver.run(self._ops.match_prefix(keys, timeout))

    def prefetch(self, keys: Iterable[Key], *, timeout: float | None = None) -> int:
        """Bring keys up ahead of their use, which counts as one; how many are there."""
        return sum(self._driver.run(self._ops.batch_exists(keys, timeout, touch=True)))

    # -- ranges

    def scan(self, prefix: Key = b"", *, page: int = 256,
             timeout: float | None = None) -> Iterator[tuple[bytes, bytes]]:  # fmt: skip
        """All keys with the prefix and their values, page by page; keys in no particular order.

        A key that is there throughout is seen exactly once, also while buckets move; one that is
        put or deleted meanwhile may or may not be seen. ``timeout`` is that of each page.
        """
        for keys in self._pages(prefix, page, timeout):
            values = self.batch_get([k for k, _ in keys], timeout=timeout)
            for (key, _), value in zip(keys, values, strict=True):
                if value is not None:
                    yield key, value

    def scan_keys(self, prefix: Key = b"", *, page: int = 4096,
                  timeout: float | None = None) -> Iterator[tuple[bytes, int]]:  # fmt: skip
        """As ``scan``, with the values' sizes instead of the values."""
        for keys in self._pages(prefix, page, timeout):
            yield from keys

    def _pages(
        self, prefix: Key, page: int, timeout: float | None
    ) -> Iterator[list[tuple[bytes, int]]]:
        cursor = scan_cursor(self._ops, prefix, page)
        while not cursor.done:
            yield self._driver.run(self._ops.scan_page(cursor, timeout))

    def delete_range(self, prefix: Key, *, timeout: float | None = None) -> int:
        """Delete all keys with the prefix (b"": all); how many there were."""
        if self._near is not None:
            self._near.clear()
        return self._driver.run(self._ops.delete_range(prefix, timeout))

    # -- keeping and looking

    def pin(
        self, keys: Iterable[Key], *, ttl: float = 60.0, timeout: float | None = None
    ) -> list[bool]:
        """Keep keys from eviction for ``ttl`` seconds (again: prolongs); which were there.

        Pins count against the node's quota (QuotaExceeded) and end with their time.
        """
        return self._driver.run(self._ops.pin(keys, ttl, timeout))

    def unpin(self, keys: Iterable[Key], *, timeout: float | None = None) -> list[bool]:
        """Take pins back, also those set by ``put``; which keys were there."""
        return self._driver.run(self._ops.unpin(keys, timeout))

    def locate(self, keys: Iterable[Key]) -> list[Location | None]:
        """Which node owns each key, as far as this client knows: nobody is asked.

        None where that is not known: before the first call, or for a bucket without an owner.
        """
        return self._ops.locate(keys)

    def stats(self, *, timeout: float | None = None) -> dict[str, wire.NodeStats]:
        """What each node says of itself, by ``node@boot``."""
        return self._driver.run(self._ops.stats(timeout))

    def drain(self, node: str, *, draining: bool = True, timeout: float | None = None) -> None:
        """Let a node (by id) give all its buckets and copies to the others, in the background.

        ``draining=False``: it takes buckets again. Raises InvalidArgument for a node that is not
        there, Unreachable if it does not answer.
        """
        self._driver.run(self._ops.drain(node, draining, timeout))

    def scrub(
        self, nodes: Iterable[str] = (), *, bytes_per_s: int = 0, timeout: float | None = None
    ) -> dict[str, wire.Scrubbed]:
        """Let nodes (by id; default: all) compare their objects with their checksums.

        What differs is dropped and counted. Returns at once, with how far each is, by
        ``node@boot``; ``bytes_per_s`` 0 only asks. One that is under way goes on as it began.
        Raises InvalidArgument for a node that is not there.
        """
        return self._driver.run(self._ops.scrub(list(nodes), bytes_per_s, timeout))

    # -- memory by address

    def register_buffer(self, memory: Any, length: int | None = None) -> int:
        """Let ``(address, length)`` pairs within this memory stand for buffers in all calls.

        ``memory``: a contiguous buffer, which is kept until it is unregistered; or the address of
        ``length`` bytes, which must stay there until then. Read-only memory can only be put from.
        Returns the address. Pairs that lie in no registered memory are refused (InvalidArgument).
        """
        return self._ops.memory.register(memory, length)

    def unregister_buffer(self, memory: Any) -> None:
        """Let go of registered memory, given as before or by its address.

        No call may be using it. Raises InvalidArgument if it is not registered.
        """
        self._ops.memory.unregister(memory)

    # -- life

    def _forget(self, keys: Iterable[Key]) -> None:
        if self._near is not None:
            limits = self._config.limits
            self._near.discard([encode_key(key, limits) for key in keys])

    def close(self) -> None:
        """Close the sockets. Calls that are under way in other threads end first."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Client holds sockets and cannot be pickled; make one in each process")


def scan_cursor(ops: Operations, prefix: Key, page: int) -> ScanCursor:
    """Raises InvalidArgument."""
    limit = ops.limits.scan_keys_max
    if not 1 <= page <= limit:
        raise InvalidArgument(f"page = {page}: must be 1 to {limit}")
    return ScanCursor(encode_prefix(prefix, ops.limits), page)
