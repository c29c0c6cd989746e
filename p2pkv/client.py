"""The blocking client: one instance for all threads of a process.

Each call runs its operation (see ``operations.py``) in the calling thread, with sockets of its
own while it runs: no thread hand-over, no lock held while bytes move. There is no background
thread; the ring is kept current by the answers of the nodes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import zmq
from zmq.backend import zmq_poll

from p2pkv import clock, discovery, wire
from p2pkv.arguments import put_options
from p2pkv.buffers import copy
from p2pkv.config import ClientConfig, EtcdConfig, build
from p2pkv.data_path import DataExchange, DataPath
from p2pkv.errors import (
    ClosedClient,
    ConfigError,
    DeadlineExceeded,
    ForkedClient,
    InvalidArgument,
    Miss,
    P2PKVError,
    ProtocolError,
)
from p2pkv.operations import Key, Operations, ScanCursor, encode_key, encode_prefix
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
from p2pkv.tensors import TensorCalls
from p2pkv.transport import ClientSession, Link, new_client_id
from p2pkv.wire import Kind

T = TypeVar("T")

SPIN_NS = 100_000
SPIN_RETRY = 64
QUICK_MS = 20
NO_DATA_S = 5.0
"""After a data connection could not be made, so long everything goes over ZeroMQ."""
"""How long a single request waits before the peer's connection is looked at, too."""


class Driver(Protocol):
    """Carries out an operation's effects, blocking."""

    def run(self, operation: Operation[T]) -> T: ...

    def close(self) -> None: ...


class NearCache:
    """A bounded cache of write-once values, which cannot change while they exist.

    A key that is deleted or expires elsewhere may be served for ``age_max_ns`` more.
    """

    def __init__(self, bytes_max: int, age_max_ns: int = 60 * clock.SECOND_NS) -> None:
        self._bytes_max = bytes_max
        self._age_max = age_max_ns
        self._values: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes, now: int) -> bytes | None:
        with self._lock:
            entry = self._values.get(key)
            if entry is None:
                return None
            if now - entry[1] > self._age_max:
                self._drop(key)
                return None
            self._values.move_to_end(key)
            return entry[0]

    def put(self, key: bytes, value: bytes, now: int) -> None:
        with self._lock:
            self._drop(key)
            self._values[key] = (value, now)
            self._bytes += len(key) + len(value)
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._values)))

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._values.pop(key, None)
        if entry is not None:
            self._bytes -= len(key) + len(entry[0])


class Channel:
    """The sockets that one running operation uses: a link per peer."""

    def __init__(
        self, context: zmq.Context[Any], config: ClientConfig, router: Router, client_id: bytes
    ) -> None:
        self._context = context
        self._config = config
        self._router = router
        self._hello = wire.Hello(config.cluster)
        self._session = ClientSession(client_id)
        self._ring_session = ClientSession(client_id)
        self._links: dict[Peer, Link] = {}
        self._data: dict[Peer, DataPath] = {}
        self._no_data_before: dict[Peer, float] = {}
        self._calls = 0
        self._spin_pays = True

    def exchange(self, requests: Sequence[Request], deadline_ns: int) -> list[Answer]:
        """Send all requests, credit permitting, and wait for the answers."""
        paths = self._paths(requests)
        if paths is not None:
            answers = self._exchange_data(requests, paths, deadline_ns)
            if answers is not None:
                return answers
        return self._exchange_control(requests, deadline_ns)

    def _exchange_data(
        self, requests: Sequence[Request], paths: Sequence[DataPath], deadline_ns: int
    ) -> list[Answer] | None:
        """Over data connections. None: a node has forgotten the session, so nothing was done."""
        exchange = DataExchange(requests, paths)
        answers = exchange.run(deadline_ns)
        for peer, path in list(self._data.items()):
            if path in exchange.broken or path in exchange.forgotten:
                del self._data[peer]
                path.close()
                if path in exchange.forgotten or not path.proven:
                    self._renew(peer)
        if exchange.forgotten and len(requests) == 1 and not requests[0].unsure:
            return None
        return answers

    def _renew(self, peer: Peer) -> None:
        """The data connection's token is not accepted: begin the session again."""
        link = self._links.get(peer)
        if link is not None and not link.closed:
            link.welcome = None
            link.greet()

    def _paths(self, requests: Sequence[Request]) -> list[DataPath] | None:
        """The data path of each request, if all have one."""
        paths: list[DataPath] = []
        for request in requests:
            path = self._data.get(request.to) or self._connect(request.to)
            if path is None:
                return None
            paths.append(path)
        return paths

    def _connect(self, peer: Peer) -> DataPath | None:
        """The data path to a peer that has welcomed us."""
        link = self._links.get(peer)
        if isinstance(peer, str) or link is None or self._config.path == "zmq":
            return None
        welcome = link.fresh_welcome()
        if welcome is None:
            return None
        if time.monotonic() < self._no_data_before.get(peer, 0.0):
            return None
        try:
            shared = self._config.path == "auto"
            path = DataPath(welcome, self._session, self._config.limits, shared)
        except (OSError, ValueError):
            self._no_data_before[peer] = time.monotonic() + NO_DATA_S
            return None
        self._data[peer] = path
        return path

    def _exchange_control(self, requests: Sequence[Request], deadline_ns: int) -> list[Answer]:
        """Over ZeroMQ: what begins a session, and all for which there is no data connection."""
        exchange = _Exchange(self, requests, self._config.limits.inflight_max)
        if len(requests) == 1:
            link = self._links.get(requests[0].to)
            if link is not None and link.connected and link.send(requests[0]):
                try:
                    replies = self._replies_soon(link)
                except ProtocolError as e:
                    link.reset()
                    return [Lost(str(e))]
                for request_id, reply in replies:
                    if request_id == requests[0].id and reply.kind != Kind.ERROR:
                        return [reply]
                exchange.adopt(link, replies)
        return exchange.run(deadline_ns)

    def _replies_soon(self, link: Link) -> Sequence[tuple[int, Reply]]:
        """The usual case: an idle link, an answer within moments. Nothing: look closer."""
        if not (self._spin(link) or zmq_poll(((link.socket, zmq.POLLIN),), QUICK_MS)):
            return ()
        return link.receive()

    def _spin(self, link: Link) -> bool:
        """Poll for a moment before sleeping, which spares the wake-up of an idle core.

        Where cores are busy it only takes time from others: so it stops after it failed, and
        tries again now and then.
        """
        self._calls += 1
        if not self._spin_pays and self._calls % SPIN_RETRY:
            return False
        sockets = ((link.socket, zmq.POLLIN),)
        end = time.perf_counter_ns() + SPIN_NS
        while time.perf_counter_ns() < end:
            if zmq_poll(sockets, 0):
                self._spin_pays = True
                return True
        self._spin_pays = False
        return False

    def link(self, peer: Peer) -> Link | None:
        link = self._links.get(peer)
        if link is None:
            endpoint = self._router.endpoint(peer)
            if endpoint is None:
                return None
            session = self._ring_session if isinstance(peer, str) else self._session
            link = Link(self._context, endpoint, session, self._hello, self._config.limits)
            self._links[peer] = link
        return link

    def keep_links(self, needed: set[Peer]) -> None:
        """Close the links of members that left, and of endpoints, unless they are needed now."""
        table = self._router.table
        for peer in self._links.keys() - needed:
            if isinstance(peer, str) or (table and peer not in table.endpoints):
                self._links.pop(peer).leave()
                self._no_data_before.pop(peer, None)
                if peer in self._data:
                    self._data.pop(peer).close()

    def close(self) -> None:
        for path in self._data.values():
            path.close()
        self._data.clear()
        for link in self._links.values():
            link.leave()
        self._links.clear()


class _Exchange:
    """One exchange under way: what waits for an answer, and what waits for credit."""

    def __init__(self, channel: Channel, requests: Sequence[Request], credit: int) -> None:
        self.channel = channel
        self.requests = requests
        self.credit = credit
        self.answers: list[Answer | None] = [None] * len(requests)
        self.waiting: dict[Link, dict[int, int]] = {}
        self.backlog: dict[Link, deque[int]] = {}
        self.begun = False

    def run(self, deadline_ns: int) -> list[Answer]:
        if not self.begun:
            self._begin()
        while self.waiting:
            left = (deadline_ns - time.monotonic_ns()) / 1e6
            if left <= 0:
                self._expire()
                break
            sockets = [
                (socket, zmq.POLLIN)
                for link in self.waiting
                for socket in (link.socket, link.monitor)
            ]
            ready = zmq_poll(sockets, max(1, int(left)))
            if ready:
                for link in list(self.waiting):
                    self._progress(link)
        return [a if a is not None else Lost("not sent") for a in self.answers]

    def adopt(self, link: Link, replies: Sequence[tuple[int, Reply]]) -> None:
        """The only request was sent on ``link`` already, and these came back so far."""
        self.begun = True
        self.waiting[link] = {self.requests[0].id: 0}
        self._take(link, replies)

    def _begin(self) -> None:
        self.channel.keep_links({request.to for request in self.requests})
        for index, request in enumerate(self.requests):
            try:
                link = self.channel.link(request.to)
            except ConfigError as e:
                self.answers[index] = Lost(str(e))
                continue
            if link is None:
                self.answers[index] = Lost(f"no address of {request.to} is known")
                continue
            self.waiting.setdefault(link, {})
            if link in self.backlog or not self._submit(link, index):
                self.backlog.setdefault(link, deque()).append(index)

    def _submit(self, link: Link, index: int) -> bool:
        waiting = self.waiting[link]
        if len(waiting) >= self.credit or not link.send(self.requests[index]):
            return False
        waiting[self.requests[index].id] = index
        return True

    def _progress(self, link: Link) -> None:
        try:
            lost = link.lost()
            self._take(link, link.receive())
        except ProtocolError as e:
            lost = str(e)
        if lost is not None and link in self.waiting:
            self._lose(link, lost)

    def _take(self, link: Link, replies: Sequence[tuple[int, Reply]]) -> None:
        waiting = self.waiting[link]
        for request_id, reply in replies:
            if reply.kind == Kind.ERROR and self._refused(link, request_id, reply):
                if link not in self.waiting:
                    return
                continue
            index = waiting.pop(request_id, None)
            if index is not None:
                self.answers[index] = reply
        backlog = self.backlog.get(link)
        while backlog and self._submit(link, backlog[0]):
            backlog.popleft()
        if not waiting and not backlog:
            del self.waiting[link]

    def _refused(self, link: Link, request_id: int, reply: Reply) -> bool:
        """The peer refused the session itself, or has forgotten it. True: that is dealt with."""
        waiting = self.waiting[link]
        if reply.body.fault == wire.Fault.NO_SESSION:
            index = waiting.get(request_id)
            if index is None:  # of a request that was sent again under another number
                return True
            if self.requests[index].unsure:
                return False
            numbers = link.renew({i: self.requests[n] for i, n in waiting.items()})
            for old, new in numbers.items():
                waiting[new] = waiting.pop(old)
            return bool(numbers)
        if request_id == 0:
            for index in self._all_of(link):
                self.answers[index] = reply
            return True
        return False

    def _all_of(self, link: Link) -> list[int]:
        waiting = self.waiting.pop(link, {})
        return [*waiting.values(), *self.backlog.pop(link, ())]

    def _lose(self, link: Link, reason: str) -> None:
        for index in self._all_of(link):
            self.answers[index] = Lost(reason)
        link.reset()

    def _expire(self) -> None:
        for link in list(self.waiting):
            silence = link.silence()
            for index in self._all_of(link):
                self.answers[index] = silence
            link.reset()


class SocketDriver:
    """Runs operations over ZeroMQ in the calling thread."""

    def __init__(self, config: ClientConfig, router: Router) -> None:
        self._config = config
        self._router = router
        self._context: zmq.Context[Any] = zmq.Context()
        self._client_id = new_client_id(b"c")
        self._idle: list[Channel] = []
        self._channels = 0
        self._freed = threading.Condition()
        self._pid = os.getpid()
        self._closed = False

    def run(self, operation: Operation[T]) -> T:
        channel = self._acquire()
        try:
            return self._drive(channel, operation)
        except P2PKVError:
            raise
        except BaseException:  # an interrupt may have come in the middle of a message
            channel.close()
            raise
        finally:
            self._release(channel)

    def _acquire(self) -> Channel:
        if os.getpid() != self._pid:
            raise ForkedClient(
                "this client was made in another process, and its sockets cannot be shared: "
                "make a new Client after the fork"
            )
        with self._freed:
            if not self._freed.wait_for(self._available, self._config.timeout_s):
                raise DeadlineExceeded(
                    f"all connections_max = {self._config.connections_max} connections are in use"
                )
            if self._closed:
                raise ClosedClient("the client is closed")
            if self._idle:
                return self._idle.pop()
            self._channels += 1
        return Channel(self._context, self._config, self._router, self._client_id)

    def _available(self) -> bool:
        return self._closed or bool(self._idle) or self._channels < self._config.connections_max

    def _release(self, channel: Channel) -> None:
        with self._freed:
            self._idle.append(channel)
            if self._closed:
                self._close_idle()
            self._freed.notify()

    def _drive(self, channel: Channel, operation: Operation[T]) -> T:
        result: Any = None
        try:
            effect: Effect = operation.send(None)
            while True:
                try:
                    result = self._carry_out(channel, effect)
                except P2PKVError as e:
                    effect = operation.throw(e)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _carry_out(self, channel: Channel, effect: Effect) -> Any:
        if isinstance(effect, Exchange):
            answers = channel.exchange(effect.requests, effect.deadline_ns)
            note_lost(effect.requests, answers)
            return answers
        if isinstance(effect, Pause):
            time.sleep(effect.duration_ns / 1e9)
            return None
        left = (effect.deadline_ns - time.monotonic_ns()) / 1e9
        return discovery.find_blocking(self._config, max(left, 0.01))

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._freed:
            self._closed = True
            self._close_idle()
            self._freed.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
            self._channels -= 1
        if not self._channels and not self._context.closed:
            self._context.term()


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

    ``path``: how bytes travel (see ``ClientConfig``). ``near_cache_bytes`` keeps values that were
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
    ) -> None:
        config = client_config(etcd_endpoints, seeds, cluster, timeout, etcd, path=path)
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
            timeout: float | None = None) -> int:  # fmt: skip
        """Store a value, replacing the old one. Returns the number of copies: 0 means not stored.

        ``if_absent``: store only if the key is not there (else 0). ``write_once``: promise that
        this key's content never differs, so that anyone may keep and serve it; a put on such a
        key keeps the bytes that are there. ``soft_pin``: evicted last. ``hard_pin``: never evicted,
        within the node's quota. ``ttl``: seconds until it expires. Raises OutOfMemory,
        QuotaExceeded.
        """
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        self._forget((key,))
        return self._driver.run(self._ops.put(key, value, options, timeout))

    def get(self, key: Key, *, timeout: float | None = None) -> bytes | None:
        """The value, or None if the key is not there. Raises CorruptValue."""
        if self._near is not None:
            return self.batch_get((key,), timeout=timeout)[0]
        return self._driver.run(self._ops.get(key, timeout))

    def put_from(self, key: Key, parts: Any, *, if_absent: bool = False, write_once: bool = False,
                 soft_pin: bool = False, hard_pin: bool = False, ttl: float | None = None,
                 timeout: float | None = None) -> int:  # fmt: skip
        """``put`` of a value that lies in several buffers, one after the other: they are gathered.

        ``parts``: a sequence of contiguous buffers or ``(address, length)`` pairs, or one of them.
        """
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
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
                  timeout: float | None = None) -> list[int]:  # fmt: skip
        """``put`` of many (a mapping, or pairs). Returns the copies of each, in order."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        if self._near is not None:
            items = list(items.items() if isinstance(items, Mapping) else items)
            self._forget([k for k, _ in items])
        return self._driver.run(self._ops.batch_put(items, options, timeout))

    def batch_get(self, keys: Iterable[Key], *, timeout: float | None = None) -> list[bytes | None]:
        """The values in the order of the keys; None where a key is not there."""
        if self._near is None:
            return self._driver.run(self._ops.batch_get(keys, timeout))
        return self._driver.run(near_batch_get(self._ops, self._near, list(keys), timeout))

    def batch_put_from(self, keys: Iterable[Key], values: Iterable[Any], *,
                       if_absent: bool = False, write_once: bool = False, soft_pin: bool = False,
                       hard_pin: bool = False, ttl: float | None = None,
                       timeout: float | None = None) -> list[int]:  # fmt: skip
        """``put_from`` of many: the parts of each value. Returns the copies of each, in order."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
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

    def stats(self, *, timeout: float | None = None) -> dict[str, wire.NodeStats]:
        """What each node says of itself, by ``node@boot``."""
        return self._driver.run(self._ops.stats(timeout))

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


def near_batch_get(
    ops: Operations, near: NearCache, keys: list[Key], timeout: float | None
) -> Operation[list[bytes | None]]:
    """``batch_get`` that asks the near cache first, and feeds it."""
    encoded = [encode_key(key, ops.limits) for key in keys]
    now = ops.clock()
    results = [near.get(key, now) for key in encoded]
    missing = [i for i, value in enumerate(results) if value is None]
    if missing:
        once, values = yield from ops.batch_get_once([encoded[i] for i in missing], timeout)
        for i, value in zip(missing, values, strict=True):
            results[i] = value
        for j in once:
            near.put(encoded[missing[j]], values[j], now)
    return results


__all__ = ["Client", "Driver", "NearCache", "SocketDriver"]
