"""Runs operations on an event loop: for the asyncio client, and for nodes among themselves.

All calls share one control link and one data connection per peer; many may be under way at once.
A session begins over the control link, which also serves as long as there is no data connection,
or where none can be had.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import zmq

from p2pkv import discovery, paths, ucx_library, wire
from p2pkv.async_path import OFF_LOOP_MIN, AsyncPath, Call, Calls
from p2pkv.async_remote import AsyncUcx, RemoteArena
from p2pkv.clock import SECOND_NS, monotonic
from p2pkv.config import ClientConfig
from p2pkv.errors import (
    ClosedClient,
    ConfigError,
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
from p2pkv.transport import ClientSession, Link, Waiter, new_client_id
from p2pkv.types import Member
from p2pkv.ucx_library import UcxUnavailable
from p2pkv.ucx_transfer import UcxConfig, UcxEngine
from p2pkv.wire import Kind

log = logging.getLogger(__name__)

T = TypeVar("T")
Local = Callable[[Request, Callable[[Reply], None]], None]
"""Answers a request in process, at once or later."""
OffLoop = Callable[[Callable[[], None]], "asyncio.Future[None]"]

NO_UCX_NS = 30 * SECOND_NS
"""After UCX failed UCX_FAILURES_MAX times, so long bytes go another way, if the path is free."""
UCX_FAILURES_MAX = 3
NO_DATA_NS = 5 * SECOND_NS
"""After a data connection could not be made, so long everything goes over ZeroMQ."""
COPY_THREADS = 2

_LATE = Lost("no answer", deadline=True)
_CLOSED = Lost("the client was closed")


class _Peer:
    """One peer: what waits for an answer on its control link, and what waits for credit.

    ``path`` is its data connection, if there is one or one is being made.
    """

    def __init__(
        self,
        to: Peer,
        link: Link,
        session: ClientSession,
        config: ClientConfig,
        data: bool,
        off_loop: OffLoop,
        published: Published,
        ucx: Callable[[], AsyncUcx],
    ) -> None:
        self.path: AsyncPath | None = None
        self._to = to
        self.link = link
        self._session = session
        self._config = config
        self._credit = config.limits.inflight_max
        self._no_data_before = 0 if data else 1 << 63
        self._off_loop = off_loop
        self._published = published
        self.waiting: dict[int, Call] = {}
        self.backlog: deque[Call] = deque()
        self._closed = False
        self._ucx = ucx
        self._no_ucx_before = 0
        self._attaching = False
        self._hopeless: ConfigError | None = None
        """Why there can be no path as it must be."""
        self._attached: RemoteArena | None = None
        """The node's arena by UCX, for the next path."""
        self._listen()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.backlog or self._on_path)

    @property
    def path_broken(self) -> bool:
        """Whether making a data connection failed, and will be tried again."""
        return self.path is None and 0 < self._no_data_before < 1 << 63

    @property
    def _on_path(self) -> int:
        return 0 if self.path is None else self.path.under_way

    def _listen(self) -> None:
        self._waiters = (
            Waiter(self.link.socket, self._readable),
            Waiter(self.link.monitor, self._readable),
        )

    # -- sending

    def submit(self, call: Call) -> None:
        """Send, or keep it until there is credit."""
        if self.backlog or not self._send(call):
            self.backlog.append(call)

    def _send(self, call: Call) -> bool:
        if len(self.waiting) + self._on_path >= self._credit:
            return False
        path = self.path
        if path is None:
            path = self._connect()
        if path is not None and path.ready:
            path.submit(call)
            return True
        if self._hopeless is not None:
            call.fail(self._hopeless)
            return True
        if self._attaching and self._config.path == "ucx":
            return False
        return self._send_control(call)

    def _send_control(self, call: Call) -> bool:
        if self.link.closed:
            self.link.open()
            self._listen()
        sent = self.link.send(call.request)
        if sent:
            self.waiting[call.request.id] = call
        self._waiters[0].poke()
        return sent

    def _send_backlog(self) -> None:
        while self.backlog and not self._closed and self._send(self.backlog[0]):
            self.backlog.popleft()

    # -- the control link

    def _readable(self) -> bool:
        try:
            lost = self.link.lost()
            for request_id, reply in self.link.receive():
                self._take(request_id, reply)
        except ProtocolError as e:
            self._lose(str(e))
            return False
        if lost is not None:
            self._lose(lost)
            if self.path is not None:
                self.path.lose(lost)
            return False
        if self.path is None:
            self._connect()
        self._send_backlog()
        return False

    def _take(self, request_id: int, reply: Reply) -> None:
        if reply.kind == Kind.ERROR:
            if reply.body.fault == wire.Fault.NO_SESSION and self._renewed(request_id):
                return
            if request_id == 0:
                self._end_all(reply)
                return
        call = self.waiting.pop(request_id, None)
        if call is not None:
            call.answer(reply)

    def _renewed(self, request_id: int) -> bool:
        """The peer has forgotten the session. True: that is dealt with."""
        if request_id not in self.waiting:  # of a request that was sent again under another number
            return True
        requests = {i: call.request for i, call in self.waiting.items()}
        if requests[request_id].unsure:
            return False
        numbers = self.link.renew(requests)
        for old, new in numbers.items():
            self.waiting[new] = self.waiting.pop(old)
        return bool(numbers)

    def _end_all(self, answer: Answer) -> None:
        """End what waits on the control link, or for credit."""
        calls = [*self.waiting.values(), *self.backlog]
        self.waiting.clear()
        self.backlog.clear()
        for call in calls:
            call.answer(answer)

    def _lose(self, reason: str) -> None:
        """Drop the control link; the next request that needs it connects anew."""
        self._close_waiters()
        self.link.reset()
        self._end_all(Lost(reason))

    # -- the data connection

    def _connect(self) -> AsyncPath | None:
        """Begin to make one, if the peer has welcomed us. Until it is ready it is not used."""
        link = self.link
        if link.closed or link.welcome is None or monotonic() < self._no_data_before:
            return None
        if self._attached is None and self._by_ucx(link.welcome):
            self._attach()
            return None
        if self._hopeless is not None:
            return None
        remote, self._attached = self._attached, None
        shared = self._config.path == "auto" and remote is None
        try:
            self.path = AsyncPath(
                link.welcome,
                self._session,
                self._config.limits,
                shared,
                self,
                self._off_loop,
                remote,
            )
        except (OSError, ValueError):
            if remote is not None:
                remote.close()
            self._no_data_before = monotonic() + NO_DATA_NS
        return self.path

    # -- UCX

    def _by_ucx(self, welcome: wire.Welcome) -> bool:
        """Whether the way to the node's memory is UCX."""
        wanted = self._config.path
        choice = paths.choose(wanted, False, ucx_library.ability(wanted), Ability(welcome.ucx))
        if not choice.path:
            self._hopeless = ConfigError(f"{self.link.endpoint}: {choice.why}")
        if choice.path != "ucx" or (wanted != "ucx" and monotonic() < self._no_ucx_before):
            return False
        return wanted == "ucx" or not welcome.arena or SharedArena.open(*welcome.arena) is None

    def _attach(self) -> None:
        """Exchange addresses and keys over the control connection; then there is a path."""
        if self._attaching:
            return
        try:
            ucx = self._ucx()
        except P2PKVError as e:
            self._without_ucx(str(e))
            return
        body = wire.Attach(ucx.engine.address, ucx.region.handle)
        calls = Calls([Request("", Kind.ATTACH, body)], asyncio.get_running_loop())
        calls.future.add_done_callback(lambda _: self._take_attached(ucx, calls.answers[0]))
        self._attaching = self._send_control(Call(calls, 0))

    def _take_attached(self, ucx: AsyncUcx, answer: Answer | None) -> None:
        self._attaching = False
        if self._closed:
            return
        if not isinstance(answer, Reply) or answer.kind != Kind.ATTACHED:
            self._without_ucx("the node did not answer to ATTACH")
            return
        try:
            reads = self._config.ucx_reads
            self._attached = RemoteArena(ucx, self.link.endpoint, answer.body, reads)
        except P2PKVError as e:
            self._without_ucx(str(e))
            return
        self._connect()

    def _without_ucx(self, why: str) -> None:
        log.warning("%s: no UCX for now: %s", self.link.endpoint, why)
        self._no_ucx_before = monotonic() + NO_UCX_NS
        if self._config.path == "ucx":
            calls, self.backlog = self.backlog, deque()
            for call in calls:
                call.answer(Lost(f"path = 'ucx': {why}"))
        else:
            self._send_backlog()

    def path_ready(self) -> None:
        if self.path is not None and self.path.arena is not None:
            self._published.add(self._to, self.path.arena)
        self._send_backlog()

    def path_freed(self) -> None:
        path = self.path
        if path is not None and path.failures >= UCX_FAILURES_MAX and self._config.path == "auto":
            self._without_ucx(f"{path.failures} failures, one after the other")
            path.forgo_ucx()
            path.failures = 0
        if self.backlog:
            self._send_backlog()

    def path_lost(self, path: AsyncPath) -> None:
        self.path = None
        self._published.prune()
        if self._closed:
            again = False
        elif path.proven and not path.refused:
            again = True
        else:
            again = not path.unreachable and self._begin_again()
            if not again:
                self._no_data_before = monotonic() + NO_DATA_NS
        for call, reply in path.refused:
            if again and not call.request.unsure:
                call.request.sent, call.request.id = False, 0
                self.backlog.append(call)
            else:
                call.answer(reply)
        self._send_backlog()

    def _begin_again(self) -> bool:
        """The peer does not know the session, or not the token that we have."""
        closed = self.link.closed
        begun = self.link.begin_again()
        if begun and closed:
            self._listen()
        self._waiters[0].poke()
        return begun

    # -- ending

    def give_up(self, calls: Calls) -> None:
        """They ended without all answers. A payload may still be queued in the control socket."""
        self.backlog = deque(call for call in self.backlog if not call.belongs_to(calls))
        left = [i for i, call in self.waiting.items() if call.belongs_to(calls)]
        silence = self.link.silence() if left else _LATE
        payload = any(self.waiting[i].request.payload for i in left)
        for i in left:
            self.waiting.pop(i).answer(silence)
        if payload:
            self._lose("a request with a payload ended early")
        if self.path is not None:
            self.path.give_up(calls, _LATE)
        self._send_backlog()

    def _close_waiters(self) -> None:
        for waiter in self._waiters:
            waiter.close()

    def close(self) -> None:
        self._closed = True
        self._close_waiters()
        self.link.leave()
        self._end_all(_CLOSED)
        if self.path is not None:
            self.path.lose(_CLOSED.reason)
        if self._attached is not None:
            self._attached.close()


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
        engine: UcxEngine | None = None,
    ) -> None:
        self._config = config
        self._router = router
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._hello = wire.Hello(config.cluster, member)
        client_id = new_client_id(b"n" if member else b"a")
        self._session = ClientSession(client_id)
        self._ring_session = ClientSession(client_id)
        self._published = router.published = Published(OFF_LOOP_MIN)
        self._member = member
        self._local = local
        self._find = find
        self._finding: asyncio.Task[list[str]] | None = None
        self._peers: dict[Peer, _Peer] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._engine = engine
        self._ucx: AsyncUcx | None = None
        self._pid = os.getpid()
        self.closed = False

    @property
    def paths_broken(self) -> int:
        """Peers to which there is no data connection although one is wanted."""
        return sum(peer.path_broken for peer in self._peers.values())

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
        calls = Calls(requests, loop, deadline_ns)
        used: set[_Peer] = set()
        for index, request in enumerate(requests):
            self._submit(calls, index, request, used)
        if calls.left:
            await self._wait(calls, used, deadline_ns, loop)
        return [a if a is not None else _LATE for a in calls.answers]

    def _submit(self, calls: Calls, index: int, request: Request, used: set[_Peer]) -> None:
        if self._local is not None and request.to == self._member:
            self._local(request, partial(calls.answer, index))
            return
        try:
            peer = self._peer(request.to)
            if peer is None:
                calls.answer(index, Lost(f"no address of {request.to} is known"))
                return
            used.add(peer)
            peer.submit(Call(calls, index))
        except ConfigError as e:
            calls.answer(index, Lost(str(e)))

    async def _wait(
        self,
        calls: Calls,
        used: set[_Peer],
        deadline_ns: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        left = max((deadline_ns - time.monotonic_ns()) / 1e9, 0.0)
        timer = loop.call_later(left, _finish, calls.future)
        try:
            await calls.future
        finally:
            timer.cancel()
            if calls.left:
                for peer in used:
                    peer.give_up(calls)
            calls.ended = True
            if calls.copies:
                await calls.settled()

    def shares_memory(self, to: Peer) -> bool:
        """Whether the peer is known to be on this host, each able to map the other's memory."""
        peer = self._peers.get(to)
        path = None if peer is None else peer.path
        return path is not None and path.ready and path.arena is not None

    def _peer(self, to: Peer) -> _Peer | None:
        peer = self._peers.get(to)
        if peer is None:
            endpoint = self._router.endpoint(to)
            if endpoint is None:
                return None
            self._forget_old_members()
            ring = isinstance(to, str)
            session = self._ring_session if ring else self._session
            link = Link(self._context, endpoint, session, self._hello, self._config.limits)
            data = not ring and self._config.path != "zmq"
            peer = self._peers[to] = _Peer(
                to,
                link,
                session,
                self._config,
                data,
                self._off_loop,
                self._published,
                self._ucx_of_all,
            )
        return peer

    def _forget_old_members(self) -> None:
        table = self._router.table
        for to, peer in list(self._peers.items()):
            old = isinstance(to, str) or (table is not None and to not in table.endpoints)
            if old and peer.idle:
                self._peers.pop(to).close()

    def _off_loop(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Run a copy on a thread. Not on the loop's own pool: the program may have filled it."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="p2pkv-copy")
        return asyncio.get_running_loop().run_in_executor(self._threads, job)

    def _ucx_of_all(self) -> AsyncUcx:
        """Raises P2PKVError where there is none."""
        if self._ucx is None:
            if self._engine is None and self._member is not None:
                raise UcxUnavailable("this node does without (its configuration: ucx)")
            own = self._engine is None
            options = ucx_library.options_for(self._config.path)
            engine = self._engine or UcxEngine(UcxConfig(options=options))
            self._ucx = AsyncUcx(engine, own)
        if self._ucx.spent:
            raise Unreachable("no memory is left for UCX after failures: make a new client")
        return self._ucx

    async def aclose(self) -> None:
        """As ``close``, and wait until UCX has let go of all memory."""
        self.close()
        ucx, self._ucx = self._ucx, None
        if ucx is not None:
            await ucx.close()

    def close(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        self._published.clear()
        if self._finding is not None:
            self._finding.cancel()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        if self._own_context:
            self._context.term()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


__all__ = ["AsyncDriver"]
