"""Carries out a blocking client's operations, in the thread that calls.

An operation has sockets of its own while it runs (``Channel``); they are kept for the next one.
What is usual goes over data connections (see ``data_path``), the rest over ZeroMQ.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import zmq
from zmq.backend import zmq_poll

from p2pkv import clock, discovery, paths, ucx_library, wire
from p2pkv.config import ClientConfig
from p2pkv.data_path import DataExchange, DataPath
from p2pkv.errors import (
    ClosedClient,
    ConfigError,
    DeadlineExceeded,
    ForkedClient,
    P2PKVError,
    ProtocolError,
    Unreachable,
)
from p2pkv.paths import Ability
from p2pkv.published import Published
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
from p2pkv.shared_memory import SharedArena
from p2pkv.transport import ClientSession, Link, new_client_id
from p2pkv.types import Member
from p2pkv.ucx_blocking import BlockingEngine
from p2pkv.ucx_client import RemoteArena
from p2pkv.wire import Kind

T = TypeVar("T")

SPIN_NS = 100_000
"""How long a request on ZeroMQ is polled for before its thread sleeps, while that pays."""
SPIN_RETRY = 64
QUICK_MS = 20
"""How long a single request waits before the peer's connection is looked at, too."""
NO_UCX_S = 30.0
"""After UCX failed UCX_FAILURES_MAX times, so long bytes go another way, if the path is free."""
UCX_FAILURES_MAX = 3
UCX_SLOT_BYTES = 16 << 20
ATTACH_TIMEOUT_S = 2.0
NO_DATA_S = 5.0
"""After a data connection could not be made, so long everything goes over ZeroMQ."""


class Driver(Protocol):
    """Carries out an operation's effects, blocking."""

    def run(self, operation: Operation[T]) -> T: ...

    def close(self) -> None: ...


class Channel:
    """The sockets that one running operation uses: a link per peer."""

    def __init__(
        self,
        context: zmq.Context[Any],
        config: ClientConfig,
        router: Router,
        client_id: bytes,
        published: Published,
    ) -> None:
        self._context = context
        self._config = config
        self._router = router
        self._published = published
        self._hello = wire.Hello(config.cluster)
        self._session = ClientSession(client_id)
        self._ring_session = ClientSession(client_id)
        self._links: dict[Peer, Link] = {}
        self._data: dict[Peer, DataPath] = {}
        self._no_data_before: dict[Peer, float] = {}
        self._no_ucx_before: dict[Peer, float] = {}
        self._engine: BlockingEngine | None = None
        self._calls = 0
        self._spin_pays = True

    def exchange(self, requests: Sequence[Request], deadline_ns: int) -> list[Answer]:
        """Send all requests, credit permitting, and wait for the answers."""
        if len(requests) == 1:
            path = self._data.get(requests[0].to)
            answer = path.read(requests[0], deadline_ns) if path is not None else None
            if answer is not None:
                return [answer]
        try:
            ways = self._paths(requests, deadline_ns)
        except Unreachable as e:
            return [Lost(str(e)) for _ in requests]
        if ways is not None:
            answers = self._exchange_data(requests, ways, deadline_ns)
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
            if self._worn(peer, path) or path in exchange.broken or path in exchange.forgotten:
                del self._data[peer]
                path.close()
                self._published.prune()
                if path in exchange.forgotten or not path.proven:
                    self._renew(peer)
        if exchange.forgotten and len(requests) == 1 and not requests[0].unsure:
            return None
        return answers

    def _worn(self, peer: Peer, path: DataPath) -> bool:
        """Whether UCX does not work on it (any more)."""
        if path.failures >= UCX_FAILURES_MAX and self._config.path == "auto":
            self._no_ucx_before[peer] = time.monotonic() + NO_UCX_S
            return True
        return path.spent

    def _renew(self, peer: Peer) -> None:
        """The data connection's token is not accepted: begin the session again."""
        link = self._links.get(peer)
        if link is not None and not link.closed:
            link.welcome = None
            link.greet()

    def _paths(self, requests: Sequence[Request], deadline_ns: int) -> list[DataPath] | None:
        """The data path of each request, if all have one."""
        paths: list[DataPath] = []
        for request in requests:
            path = self._data.get(request.to) or self._connect(request.to, deadline_ns)
            if path is None:
                return None
            paths.append(path)
        return paths

    def _connect(self, peer: Peer, deadline_ns: int) -> DataPath | None:
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
        try:
            path.arena = path.arena or self._attach(peer, welcome, deadline_ns)
        except BaseException:
            path.close()
            raise
        self._data[peer] = path
        if isinstance(path.arena, SharedArena):
            self._published.add(peer, path.arena)
        return path

    # -- UCX

    def _attach(self, peer: Member, welcome: wire.Welcome, deadline_ns: int) -> RemoteArena | None:
        """The peer's arena by UCX, if that is the path to it.

        Where it must be, raises ConfigError if it cannot, Unreachable if it does not at the moment.
        """
        wanted = self._config.path
        choice = paths.choose(wanted, False, ucx_library.ability(wanted), Ability(welcome.ucx))
        if not choice.path:
            raise ConfigError(f"{peer}: {choice.why}")
        if choice.path != "ucx" or time.monotonic() < self._no_ucx_before.get(peer, 0.0):
            return None
        try:
            return self._introduce(peer, deadline_ns)
        except P2PKVError as e:
            if wanted == "ucx":
                raise Unreachable(f"{peer}: path = 'ucx': {e}") from None
            self._no_ucx_before[peer] = time.monotonic() + NO_UCX_S
            return None

    def _introduce(self, peer: Member, deadline_ns: int) -> RemoteArena:
        """Exchange addresses and keys over the control connection."""
        if self._engine is None or self._engine.closed:
            self._engine = BlockingEngine(
                UCX_SLOT_BYTES, ucx_library.options_for(self._config.path)
            )
        body = wire.Attach(self._engine.address, self._engine.handle)
        limit_ns = min(deadline_ns, time.monotonic_ns() + clock.seconds(ATTACH_TIMEOUT_S))
        (answer,) = self._exchange_control([Request(peer, Kind.ATTACH, body)], limit_ns)
        if isinstance(answer, Lost):
            raise Unreachable(answer.reason)
        if answer.kind != Kind.ATTACHED:
            raise ProtocolError(getattr(answer.body, "message", "an unexpected answer to ATTACH"))
        return RemoteArena(self._engine, str(peer), answer.body, self._config.ucx_reads)

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

    def path_to(self, peer: Peer) -> str:
        """How values travel to and from a peer now: shm, ucx, tcp, or zmq."""
        path = self._data.get(peer)
        return "zmq" if path is None else path.name

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
        if self._engine is not None:  # before the nodes hear of the end
            self._engine.close()
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
        self._published = router.published = Published()
        self._idle: list[Channel] = []
        self._channels = 0
        self._freed = threading.Condition()
        self._pid = os.getpid()
        self._closed = False

    def run(self, operation: Operation[T]) -> T:
        self._check_process()
        if self._closed:
            raise ClosedClient("the client is closed")
        try:
            first = operation.send(None)
        except StopIteration as stop:  # nobody had to be asked
            return stop.value  # type: ignore[no-any-return]
        channel = self._acquire()
        try:
            return self._drive(channel, operation, first)
        except P2PKVError:
            raise
        except BaseException:  # an interrupt may have come in the middle of a message
            channel.close()
            raise
        finally:
            self._release(channel)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedClient(
                "this client was made in another process, and its sockets cannot be shared: "
                "make a new Client after the fork"
            )

    def _acquire(self) -> Channel:
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
        return Channel(self._context, self._config, self._router, self._client_id, self._published)

    def _available(self) -> bool:
        return self._closed or bool(self._idle) or self._channels < self._config.connections_max

    def _release(self, channel: Channel) -> None:
        with self._freed:
            self._idle.append(channel)
            if self._closed:
                self._close_idle()
            self._freed.notify()

    def _drive(self, channel: Channel, operation: Operation[T], effect: Effect) -> T:
        result: Any = None
        try:
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

    def path_to(self, peer: Peer) -> str:
        """How the last operation's values travel to and from a peer: shm, ucx, tcp, or zmq."""
        with self._freed:
            return self._idle[-1].path_to(peer) if self._idle else "zmq"

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._freed:
            self._closed = True
            self._published.clear()
            self._close_idle()
            self._freed.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
            self._channels -= 1
        if not self._channels and not self._context.closed:
            self._context.term()
