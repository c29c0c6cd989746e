"""The asyncio client. Same operations as the blocking one, another driver.

All calls of one client share a link per peer; many may be under way at once. A node uses the same
driver to speak to other nodes, and serves its own share in process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from p2pkv import clock, discovery, wire
from p2pkv.buffers import copy
from p2pkv.client import NearCache, client_config, near_batch_get, put_options, scan_cursor
from p2pkv.config import ClientConfig, EtcdConfig
from p2pkv.errors import ClosedClient, ConfigError, ForkedClient, P2PKVError, ProtocolError
from p2pkv.operations import Key, Operations, encode_key
from p2pkv.routing import (
    Answer,
    Effect,
    Exchange,
    Lost,
    Operation,
    Pause,
    Peer,
    Reply,
    Request,
    Router,
    note_lost,
)
from p2pkv.transport import ClientSession, Link, Waiter, new_client_id
from p2pkv.types import Member
from p2pkv.wire import Kind

T = TypeVar("T")
Local = Callable[[Request], Reply]
"""Answers a request in process."""


class _Exchange:
    """Requests that were sent together, and the future of all their answers."""

    __slots__ = ("answers", "future", "left", "requests")

    def __init__(self, requests: Sequence[Request], loop: asyncio.AbstractEventLoop) -> None:
        self.requests = requests
        self.answers: list[Answer | None] = [None] * len(requests)
        self.left = len(requests)
        self.future: asyncio.Future[None] = loop.create_future()

    def answer(self, index: int, answer: Answer) -> None:
        if self.answers[index] is None:
            self.answers[index] = answer
            self.left -= 1
            if not self.left and not self.future.done():
                self.future.set_result(None)


class _PeerLink:
    """A link on the event loop: what waits for an answer, and what waits for credit."""

    def __init__(self, link: Link, credit: int) -> None:
        self.link = link
        self.credit = credit
        self.waiting: dict[int, tuple[_Exchange, int]] = {}
        self.backlog: deque[tuple[_Exchange, int]] = deque()
        self._listen()

    def _listen(self) -> None:
        self._waiters = (
            Waiter(self.link.socket, self._readable),
            Waiter(self.link.monitor, self._readable),
        )

    def submit(self, exchange: _Exchange, index: int) -> None:
        """Send, or keep it until there is credit."""
        if self.link.closed:
            self.link.open()
            self._listen()
        if self.backlog or not self._send((exchange, index)):
            self.backlog.append((exchange, index))
        self._waiters[0].poke()

    def _send(self, entry: tuple[_Exchange, int]) -> bool:
        request = entry[0].requests[entry[1]]
        if len(self.waiting) >= self.credit or not self.link.send(request):
            return False
        self.waiting[request.id] = entry
        return True

    def _readable(self) -> bool:
        try:
            lost = self.link.lost()
            for request_id, reply in self.link.receive():
                self._take(request_id, reply)
        except ProtocolError as e:
            lost = str(e)
        if lost is not None:
            self.lose(lost)
        sent = False
        while self.backlog and self._send(self.backlog[0]):
            self.backlog.popleft()
            sent = True
        return sent

    def _take(self, request_id: int, reply: Reply) -> None:
        if reply.kind == Kind.ERROR:
            if reply.body.fault == wire.Fault.NO_SESSION and self._renewed(request_id):
                return
            if request_id == 0:
                self._end_all(reply)
                return
        entry = self.waiting.pop(request_id, None)
        if entry is not None:
            entry[0].answer(entry[1], reply)

    def _renewed(self, request_id: int) -> bool:
        """The peer has forgotten the session. True: that is dealt with."""
        if request_id not in self.waiting:  # of a request that was sent again under another number
            return True
        requests = {i: e.requests[index] for i, (e, index) in self.waiting.items()}
        if requests[request_id].unsure:
            return False
        numbers = self.link.renew(requests)
        for old, new in numbers.items():
            self.waiting[new] = self.waiting.pop(old)
        return bool(numbers)

    def _end_all(self, answer: Answer) -> None:
        entries = [*self.waiting.values(), *self.backlog]
        self.waiting.clear()
        self.backlog.clear()
        for exchange, index in entries:
            exchange.answer(index, answer)

    def lose(self, reason: str) -> None:
        """End everything under way; the next request connects anew."""
        self._close_waiters()
        self.link.reset()
        self._end_all(Lost(reason))

    def give_up(self, exchange: _Exchange) -> None:
        """An exchange ended without its answers. Its payload may still be queued in the socket."""
        left = [i for i, (e, _) in self.waiting.items() if e is exchange]
        payload = any(exchange.requests[self.waiting[i][1]].payload for i in left)
        silence = self.link.silence()
        for i in left:
            exchange.answer(self.waiting.pop(i)[1], silence)
        self.backlog = deque(entry for entry in self.backlog if entry[0] is not exchange)
        if payload:
            self.lose("a request with a payload ended early")

    def _close_waiters(self) -> None:
        for waiter in self._waiters:
            waiter.close()

    def close(self) -> None:
        self._close_waiters()
        self.link.close()
        self._end_all(Lost("the client was closed"))


class AsyncDriver:
    """Runs operations on an event loop. ``local`` answers what is meant for ``member`` itself."""

    def __init__(
        self,
        config: ClientConfig,
        router: Router,
        context: zmq.Context[Any] | None = None,
        member: Member | None = None,
        local: Local | None = None,
        find: Callable[[float], list[str]] | None = None,
    ) -> None:
        self._config = config
        self._router = router
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._hello = wire.Hello(config.cluster, member)
        client_id = new_client_id(b"n" if member else b"a")
        self._session = ClientSession(client_id)
        self._ring_session = ClientSession(client_id)
        self._member = member
        self._local = local
        self._find = find
        self._finding: asyncio.Task[list[str]] | None = None
        self._peers: dict[Peer, _PeerLink] = {}
        self._pid = os.getpid()
        self.closed = False

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation to its end. Raises what it raises, ClosedClient, ForkedClient."""
        if os.getpid() != self._pid:
            raise ForkedClient(
                "this client was made in another process, and its sockets cannot be shared: "
                "make a new AsyncClient after the fork"
            )
        if self.closed:
            raise ClosedClient("the client is closed")
        try:
            effect: Effect = operation.send(None)
            while True:
                try:
                    result = await self._carry_out(effect)
                except P2PKVError as e:
                    effect = operation.throw(e)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Exchange):
            answers = await self.exchange(effect.requests, effect.deadline_ns)
            note_lost(effect.requests, answers)
            return answers
        if isinstance(effect, Pause):
            await asyncio.sleep(effect.duration_ns / 1e9)
            return None
        return await self._rediscover(effect.deadline_ns)

    async def _rediscover(self, deadline_ns: int) -> list[str]:
        left = max((deadline_ns - time.monotonic_ns()) / 1e9, 0.01)
        if self._find is not None:
            return self._find(left)
        if self._finding is None or self._finding.done():  # one search serves all calls
            self._finding = asyncio.create_task(discovery.find(self._config, left))
        finding = self._finding
        done, _ = await asyncio.wait({finding}, timeout=left)
        return list(finding.result()) if done and not finding.cancelled() else []

    async def exchange(self, requests: Sequence[Request], deadline_ns: int) -> list[Answer]:
        """Send all requests, credit permitting, and wait for the answers. Raises ClosedClient."""
        if self.closed:
            raise ClosedClient("the client is closed")
        loop = asyncio.get_running_loop()
        exchange = _Exchange(requests, loop)
        used: set[_PeerLink] = set()
        for index, request in enumerate(requests):
            self._submit(exchange, index, request, used)
        if exchange.left:
            await self._wait(exchange, used, deadline_ns, loop)
        return [a if a is not None else Lost("no answer", deadline=True) for a in exchange.answers]

    def _submit(
        self, exchange: _Exchange, index: int, request: Request, used: set[_PeerLink]
    ) -> None:
        if self._local is not None and request.to == self._member:
            exchange.answer(index, self._local(request))
            return
        try:
            peer = self._peer(request.to)
        except ConfigError as e:
            exchange.answer(index, Lost(str(e)))
            return
        if peer is None:
            exchange.answer(index, Lost(f"no address of {request.to} is known"))
            return
        used.add(peer)
        peer.submit(exchange, index)

    async def _wait(
        self,
        exchange: _Exchange,
        used: set[_PeerLink],
        deadline_ns: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        left = max((deadline_ns - time.monotonic_ns()) / 1e9, 0.0)
        timer = loop.call_later(left, _finish, exchange.future)
        try:
            await exchange.future
        finally:
            timer.cancel()
            if exchange.left:
                for peer in used:
                    peer.give_up(exchange)

    def _peer(self, to: Peer) -> _PeerLink | None:
        peer = self._peers.get(to)
        if peer is None:
            endpoint = self._endpoint(to)
            if endpoint is None:
                return None
            self._forget_old_members()
            session = self._ring_session if isinstance(to, str) else self._session
            link = Link(self._context, endpoint, session, self._hello, self._config.limits)
            peer = self._peers[to] = _PeerLink(link, self._config.limits.inflight_max)
        return peer

    def _endpoint(self, to: Peer) -> str | None:
        if isinstance(to, str):
            return to
        table = self._router.table
        endpoints = table.endpoints.get(to) if table else None
        return endpoints[0] if endpoints else None

    def _forget_old_members(self) -> None:
        table = self._router.table
        for to, peer in list(self._peers.items()):
            old = isinstance(to, str) or (table is not None and to not in table.endpoints)
            if old and not peer.waiting and not peer.backlog:
                self._peers.pop(to).close()

    def close(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        if self._finding is not None:
            self._finding.cancel()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._own_context:
            self._context.term()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncClient:
    """A p2pkv cluster, from an asyncio program.

    Arguments, calls, results and errors are those of ``Client``; every call is awaited, and
    ``scan`` is an async iterator. Belongs to the event loop on which it is first used. Bytes travel
    over ZeroMQ, whatever ``path`` says.
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
    ) -> None:
        config = client_config(etcd_endpoints, seeds, cluster, timeout, etcd, path=path)
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
                  timeout: float | None = None) -> int:  # fmt: skip
        """See ``Client.put``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        self._forget((key,))
        return await self._driver.run(self._ops.put(key, value, options, timeout))

    async def get(self, key: Key, *, timeout: float | None = None) -> bytes | None:
        """See ``Client.get``."""
        if self._near is not None:
            return (await self.batch_get((key,), timeout=timeout))[0]
        return await self._driver.run(self._ops.get(key, timeout))

    async def get_into(self, key: Key, buffer: Any, *, timeout: float | None = None) -> int | None:
        """See ``Client.get_into``."""
        return await self._driver.run(self._ops.get_into(key, buffer, timeout))

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
                        timeout: float | None = None) -> list[int]:  # fmt: skip
        """See ``Client.batch_put``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        if self._near is not None:
            items = list(items.items() if isinstance(items, Mapping) else items)
            self._forget([k for k, _ in items])
        return await self._driver.run(self._ops.batch_put(items, options, timeout))

    async def batch_get(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> list[bytes | None]:
        """See ``Client.batch_get``."""
        if self._near is None:
            return await self._driver.run(self._ops.batch_get(keys, timeout))
        return await self._driver.run(near_batch_get(self._ops, self._near, list(keys), timeout))

    async def batch_get_into(
        self, keys: Iterable[Key], buffers: Sequence[Any], *, timeout: float | None = None
    ) -> list[int | None]:
        """See ``Client.batch_get_into``."""
        return await self._driver.run(self._ops.batch_get_into(keys, buffers, timeout))

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

    async def stats(self, *, timeout: float | None = None) -> dict[str, wire.NodeStats]:
        """See ``Client.stats``."""
        return await self._driver.run(self._ops.stats(timeout))

    # -- life

    def _forget(self, keys: Iterable[Key]) -> None:
        if self._near is not None:
            limits = self._config.limits
            self._near.discard([encode_key(key, limits) for key in keys])

    async def close(self) -> None:
        """Close the sockets; calls under way end with ClosedClient or Unreachable."""
        self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        await self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an AsyncClient holds sockets and cannot be pickled")
