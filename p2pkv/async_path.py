"""The way of an asyncio client's requests to one node: a data connection, or through its memory.

All calls share it; many are under way at once and are told apart by their numbers. A call may end
before its answer is here. Then its answer is still received, to nowhere, and nothing is written to
the call's memory any more; what has not left of its payload is copied, or the connection is given
up; and room that the node made for it is given back.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from p2pkv import wire
from p2pkv.async_remote import SLOT_BYTES, Fetch, Job, RemoteArena, Store
from p2pkv.async_views import Views
from p2pkv.clock import SECOND_NS, monotonic
from p2pkv.config import Limits
from p2pkv.connection import Connection, Outgoing
from p2pkv.errors import P2PKVError, ProtocolError
from p2pkv.remote_memory import RemotePut
from p2pkv.routing import Answer, Lost, Reply, Request
from p2pkv.shared_memory import LocatedValues, Memory, SharedArena, SharedPut, message_for
from p2pkv.stream import Closed, Landing, configure, opening, parse_endpoint, preface, wait_for_ever
from p2pkv.transport import ClientSession
from p2pkv.wire import Fault, Kind

CONNECT_TIMEOUT_S = 1.0
SILENCE_NS = 5 * SECOND_NS
"""A node that was asked and has sent nothing for so long is given up when a call ends in vain."""
RESCUE_BYTES_MAX = 1 << 20
"""So much of an ended call's payload is copied to be sent to its end; for more the connection is
given up."""
OFF_LOOP_MIN = 4 << 20
"""Copies from here on are made on a thread. That costs some 100 microseconds more, and pays where
the loop would stand still for about as long (see benchmarks/async_micro.py)."""
PART_BYTES = 1 << 20
"""One receive into a value of its own asks for no more."""

NEVER_NS = 1 << 62

_NOT_SENT = Reply(Kind.ERROR, wire.Error(Fault.NOT_READY, "the connection was lost"), ())

_scratch = memoryview(bytearray(64 << 10))
"""Where bytes go that nobody wants."""


class Calls:
    """Requests that were sent together, and the future of all their answers."""

    __slots__ = ("answers", "copies", "deadline_ns", "ended", "future", "left", "requests")

    def __init__(
        self,
        requests: Sequence[Request],
        loop: asyncio.AbstractEventLoop,
        deadline_ns: int = NEVER_NS,
    ) -> None:
        self.requests = requests
        self.deadline_ns = deadline_ns
        self.answers: list[Answer | None] = [None] * len(requests)
        self.left = len(requests)
        self.ended = False
        """Nobody waits any more."""
        self.future: asyncio.Future[None] = loop.create_future()
        self.copies: set[asyncio.Future[None]] = set()
        """Copies from or to the caller's memory, on threads."""

    def fail(self, error: P2PKVError) -> None:
        """End the exchange with an error."""
        if not self.future.done():
            self.future.set_exception(error)

    def answer(self, index: int, answer: Answer) -> None:
        if self.answers[index] is None:
            self.answers[index] = answer
            self.left -= 1
            if not self.left and not self.future.done():
                self.future.set_result(None)

    async def settled(self) -> None:
        """Until no thread uses the caller's memory, however often the caller is cancelled."""
        cancelled: asyncio.CancelledError | None = None
        while self.copies:
            try:
                await asyncio.wait(self.copies)
            except asyncio.CancelledError as e:
                cancelled = e
        if cancelled is not None:
            raise cancelled


class Call:
    """One of them, on its way to its peer."""

    __slots__ = ("_calls", "_index", "asked_ns", "plain", "put", "request")

    def __init__(self, calls: Calls, index: int) -> None:
        self._calls = calls
        self._index = index
        self.request = calls.requests[index]
        self.put: SharedPut | None = None
        """What is being written to the node's memory, or committed."""
        self.asked_ns = 0
        self.plain = False
        """Whether its bytes travel on the connection, whatever else there is."""

    def answer(self, answer: Answer) -> None:
        self._calls.answer(self._index, answer)

    def fail(self, error: P2PKVError) -> None:
        self._calls.fail(error)

    @property
    def deadline_ns(self) -> int:
        return self._calls.deadline_ns

    @property
    def over(self) -> bool:
        return self._calls.ended or self._calls.answers[self._index] is not None

    def belongs_to(self, calls: Calls) -> bool:
        return self._calls is calls

    def copying(self, copy: asyncio.Future[None]) -> None:
        self._calls.copies.add(copy)
        copy.add_done_callback(self._calls.copies.discard)


class Owner(Protocol):
    """Who uses a path."""

    def path_ready(self) -> None:
        """It may be used."""

    def path_freed(self) -> None:
        """A call has its answer."""

    def path_lost(self, path: AsyncPath) -> None:
        """It is closed. ``path.refused`` are calls that have not run: the session is forgotten."""


class _Message(Outgoing):
    """A request on its way out."""

    __slots__ = ("id", "request")

    def __init__(self, message: Request, revision: int, request: Request | None) -> None:
        super().__init__(opening(message, revision), message.payload)
        self.id = message.id
        self.request = request
        """What counts as sent once the first bytes have left."""

    def begin(self) -> None:
        if self.request is not None:
            self.request.sent = True


class AsyncPath(Connection):
    """A data connection to one node, and its arena if it is on this host.

    ``off_loop`` runs a copy on a thread. ``remote`` is its arena by UCX, if it is not on this
    host. Raises OSError, ValueError if there is no way to the node's data endpoint.
    """

    def __init__(
        self,
        welcome: wire.Welcome,
        session: ClientSession,
        limits: Limits,
        shared: bool,
        owner: Owner,
        off_loop: Callable[[Callable[[], None]], asyncio.Future[None]],
        remote: RemoteArena | None = None,
    ) -> None:
        self.failures = 0
        """Of UCX, one after the other."""
        self.ready = False
        """The node has answered on it, and knows the session."""
        self.proven = False
        """It was ready once."""
        self.unreachable = False
        """The connection did not come about."""
        self.refused: list[tuple[Call, Reply]] = []
        self._session = session
        self._owner = owner
        self._off_loop = off_loop
        self._waiting: dict[int, Call | None] = {}
        """None: the call is over, its answer wanted by nobody."""
        self._copying = 0
        """Copies and UCX's transfers that may be using memory of a call or of the node."""
        self._viewing = 0
        """Calls for views, which are under way on a thread."""
        self._remote = remote
        self._by_ucx = True
        self._pushes: dict[int, Fetch] = {}
        self._landing: Landing | None = None
        self._values: list[bytes] = []
        self._parts: list[bytes] = []
        self._missing = 0
        """Bytes of the value that is arriving in an object of its own."""
        self._revision = 0
        self._asked_ns = self._heard_ns = monotonic()
        self._flush: asyncio.Handle | None = None
        loop = asyncio.get_running_loop()
        sock = _connecting(welcome)
        super().__init__(sock, loop, limits.head_bytes_max, 2 * limits.message_bytes_max)
        try:
            self._arena = self._views = None
            if shared and welcome.arena:
                self._arena = SharedArena.open(*welcome.arena, index=welcome.index)
            if self._arena is not None:
                self._views = Views(self._arena, welcome, session.id, limits)
            if self._arena is not None or remote is not None:
                wait_for_ever(sock)
            self._greet(welcome.token)
        except BaseException:
            self._stop()
            sock.close()
            raise
        self._timer = loop.call_later(CONNECT_TIMEOUT_S, self._too_late)

    def _greet(self, token: bytes) -> None:
        """Nothing is asked before a PING is answered: a wrong token is not refused in words."""
        self._queue(Outgoing(preface(self._session.id, token)))
        ping = Request("", Kind.PING, wire.Empty())
        ping.id = self._ping = self._session.next_number()
        self._queue(_Message(ping, 0, None))
        self._write()

    @property
    def arena(self) -> SharedArena | None:
        """The node's memory, where it is on this host."""
        return self._arena

    def _too_late(self) -> None:
        self.unreachable = True
        self.lose(f"no answer within {CONNECT_TIMEOUT_S:g} s")

    @property
    def under_way(self) -> int:
        """Requests that have no answer yet."""
        return len(self._waiting) + self._copying + self._viewing

    # -- sending

    def submit(self, call: Call) -> None:
        body = call.request.body
        if self._views is not None and isinstance(body, wire.Open) and body.view:
            self._viewing += 1
            asked = self._views.ask(body.keys, call.deadline_ns)
            asked.add_done_callback(partial(self._viewed, call))
            return
        place: Memory | None = self._arena or (self._remote if self._by_ucx else None)
        place = None if call.plain else place
        message = message_for(call.request, self._session, place)
        call.asked_ns = monotonic()
        self._ask(message, call, None if message.kind == Kind.ALLOC else call.request)

    def _ask(self, message: Request, call: Call | None, counts: Request | None) -> None:
        if not self._waiting:
            self._asked_ns = monotonic()
        self._waiting[message.id] = call
        self._queue(_Message(message, self._revision, counts))
        if self._flush is None:  # the first leaves at once, others of this moment together
            self._flush = self._loop.call_soon(self._send_rest)
            self._send()

    def _send_rest(self) -> None:
        self._flush = None
        if self._outgoing:
            self._send()

    def _send(self) -> None:
        if self._writing or self.closed:
            return
        try:
            self._write()
        except OSError as e:
            self._loop.call_soon(self._broken, e)

    # -- receiving

    def _note(self, got: int) -> None:
        super()._note(got)
        self._heard_ns = self.progress_ns

    def _begin_payload(self, head: wire.Head, size: int) -> None:
        call = self._call_of(head.request)
        if call is None:
            self._landing = None
        else:
            self._landing = Landing(head, size, call.request.sink)
            if self._landing.sizes:
                self._head = head
                self._values, self._parts = [], []
                self._take_ahead()
                return
        super()._begin_payload(head, size)

    def _place(self, head: wire.Head, size: int) -> list[memoryview]:
        return nowhere(size) if self._landing is None else self._landing.targets

    def _receive_payload(self) -> bool:
        if self._landing is None or not self._landing.sizes:
            return super()._receive_payload()
        try:
            part = self._sock.recv(min(self._missing, PART_BYTES))
        except BlockingIOError:
            return False
        self._note(len(part))
        self._take_part(part)
        return True

    def _take_ahead(self) -> None:
        """Begin with what was received along with the head."""
        self._next_value()
        while self._head is not None and self._start < self._end:
            end = min(self._start + self._missing, self._end)
            part = bytes(self._buffer[self._start : end])
            self._start = end
            self._take_part(part)

    def _take_part(self, part: bytes) -> None:
        self._missing -= len(part)
        if self._missing:
            self._parts.append(part)
            return
        if self._parts:
            part = b"".join([*self._parts, part])
            self._parts = []
        self._values.append(part)
        self._next_value()

    def _next_value(self) -> None:
        """Go on with the next value that has any bytes, if there is one."""
        assert self._landing is not None
        sizes, values = self._landing.sizes, self._values
        while len(values) < len(sizes):
            self._missing = sizes[len(values)]
            if self._missing:
                return
            values.append(b"")
        self._finish_payload()

    def _filled(self, head: wire.Head) -> None:
        landing, self._landing = self._landing, None
        if landing is None:
            self._take(head, Reply(head.kind, head.body, ()))
            return
        values, self._values = self._values, []
        self._take(head, landing.reply(head, values if landing.sizes else None))

    def _received(self, head: wire.Head) -> None:
        self._take(head, Reply(head.kind, head.body, (), head.revision))

    def _call_of(self, id: int) -> Call | None:
        try:
            return self._waiting[id]
        except KeyError:
            if id == self._ping and not self.proven:
                return None
            raise ProtocolError(f"an answer to request {id}, which waits for none") from None

    # -- answers

    def _take(self, head: wire.Head, reply: Reply) -> None:
        call = self._call_of(head.request)
        self._revision = head.revision
        if not self.proven:
            self._take_pong(reply)
            return
        del self._waiting[head.request]
        if (fetch := self._pushes.pop(head.request, None)) is not None:
            fetch.pushed(reply)
        elif call is None:
            self._give_back(reply)
        else:
            try:
                self._answer(call, reply)
            except ProtocolError as e:
                call.answer(Lost(str(e)))
                raise
        self._freed()

    def _give_back(self, reply: Reply) -> None:
        """What the node holds for a call that is over."""
        if reply.kind == Kind.VALUES and reply.body.token:
            self._send_off(Kind.RELEASE, wire.Release([reply.body.token]))
        elif reply.kind == Kind.ALLOCATED:
            self._send_off(Kind.ABORT, wire.Abort([id for id in reply.body.ids if id]))
        elif reply.kind == Kind.OPENED:
            self._send_off(Kind.RELEASE, wire.Release([id for id in reply.body.tokens if id]))

    def _send_off(self, kind: Kind, body: wire.Body) -> None:
        """A request whose answer nobody wants."""
        if not self.closed:
            request = Request("", kind, body)
            request.id = self._session.next_number()
            self._ask(request, None, None)

    def _take_pong(self, reply: Reply) -> None:
        if reply.kind != Kind.PONG:
            raise Closed("the node does not know the session")
        self._timer.cancel()
        self.ready = self.proven = True
        self._owner.path_ready()

    def _answer(self, call: Call, reply: Reply) -> None:
        if reply.kind == Kind.ERROR and reply.body.fault == Fault.NO_SESSION:
            self.ready = False
            call.put = None
            self.refused.append((call, reply))
        elif reply.kind == Kind.ALLOCATED and call.request.kind == Kind.PUT:
            self._fill(call, reply)
        elif reply.kind == Kind.STATUSES and call.put is not None:
            call.answer(call.put.reply(reply))
        elif call.request.kind == Kind.PUT and self._no_room(reply, call):
            call.plain = True
            self.submit(call)
        elif reply.kind == Kind.VALUES and reply.body.offsets and self._remote is not None:
            self._begin_job(Fetch(self, self._remote, call, reply))
        elif reply.kind == Kind.VALUES and reply.body.offsets and self._arena is not None:
            located = LocatedValues(self._arena, call.request, reply)
            self._copy(call, located, lambda: call.answer(located.reply()))
        else:
            call.answer(reply)

    def _freed(self) -> None:
        if self.refused and not self._waiting and not self._copying:
            # those sent before are all answered by now, so that none of them can still be run
            self.lose("the node has forgotten the session")
        elif self.ready:
            self._owner.path_freed()

    # -- through the node's memory

    def _fill(self, call: Call, reply: Reply) -> None:
        if self._remote is not None:
            self._fill_remote(self._remote, call, reply)
            return
        if self._arena is None:
            raise ProtocolError("room in a memory that is not shared")
        put = call.put = SharedPut(self._arena, call.request, reply.body)
        if put.made:
            self._copy(call, put, lambda: self._commit(call, put))
        else:
            call.answer(put.reply())

    def _commit(self, call: Call, put: SharedPut) -> None:
        if self.closed:
            call.answer(Lost("the data connection was lost"))
        elif call.over:
            self._send_off(Kind.ABORT, wire.Abort(put.ids))
        else:
            self._ask(put.commit(call.request, self._session), call, call.request)

    def _copy(self, call: Call, job: SharedPut | LocatedValues, done: Callable[[], None]) -> None:
        if job.nbytes < OFF_LOOP_MIN and not job.waits:
            job.run()
            done()
            return
        self._copying += 1
        copy = self._off_loop(job.run)
        copy.add_done_callback(partial(self._copied, call, done))
        call.copying(copy)

    def _copied(self, call: Call, done: Callable[[], None], copy: asyncio.Future[None]) -> None:
        self._copying -= 1
        try:
            copy.result()
            done()
        except (P2PKVError, OSError, asyncio.CancelledError) as e:
            call.answer(Lost(f"copy: {e}"))
            self._broken(e)
        self._close_when_written()
        if not self.closed:
            self._freed()

    def _viewed(self, call: Call, asked: asyncio.Future[Answer]) -> None:
        self._viewing -= 1
        try:
            answer = asked.result()
        except (OSError, RuntimeError, asyncio.CancelledError) as e:
            answer = Lost(f"views: {e}")
        if self.closed or isinstance(answer, Lost):
            call.answer(answer)
        else:
            self._answer(call, answer)
        if not self.closed:
            self._freed()

    # -- by UCX

    def _no_room(self, reply: Reply, call: Call) -> bool:
        """Whether the node gives no room to writers from other hosts at the moment."""
        refused = reply.kind == Kind.ERROR and reply.body.fault == Fault.NOT_READY
        return refused and self._remote is not None and not call.plain

    def _fill_remote(self, remote: RemoteArena, call: Call, reply: Reply) -> None:
        put = RemotePut(remote, call.request, reply.body, SLOT_BYTES)
        call.put = put
        if put.made:
            self._begin_job(Store(self, remote, call, put))
        else:
            call.answer(put.reply())

    def _begin_job(self, job: Job) -> None:
        self._copying += 1
        job.start()

    def forgo_ucx(self) -> None:
        """From now on all bytes travel on the connection."""
        self._by_ucx = False

    def push(self, fetch: Fetch, body: wire.Push) -> None:
        """Have the node write into a slot."""
        if self.closed:
            fetch.pushed(_NOT_SENT)
            return
        request = Request("", Kind.PUSH, body)
        request.id = self._session.next_number()
        self._pushes[request.id] = fetch
        self._ask(request, None, None)

    def job_ended(self, job: Job) -> None:
        """It has answered its call, or nobody waits for it; or it is to be committed."""
        if isinstance(job, Fetch):
            self._send_off(Kind.RELEASE, wire.Release([job.values.token]))
        elif isinstance(job, Store) and job.memory_in_use and self._remote is not None:
            self._remote.ucx.keep(self._sock)
            return  # nothing is said, and the connection stays: both would mean that it is over
        elif isinstance(job, Store) and job.complete:
            self._commit(job.call, job.put)
        elif isinstance(job, Store):
            self._send_off(Kind.ABORT, wire.Abort(job.put.ids, job.late))
        self._copying -= 1
        self._close_when_written()
        if not self.closed:
            self._freed()

    # -- ending

    def give_up(self, calls: Calls, silence: Lost) -> None:
        """These calls have ended without their answers."""
        for id, call in list(self._waiting.items()):
            if call is not None and call.belongs_to(calls):
                call.answer(silence)
                self._waiting[id] = None
                self._receive_to_nowhere(id)
                self._stop_sending(id, call)
            if self.closed:
                return
        if self._waiting and monotonic() - max(self._heard_ns, self._asked_ns) > SILENCE_NS:
            self.lose(f"the node has sent nothing for {SILENCE_NS // SECOND_NS} s")

    def _receive_to_nowhere(self, id: int) -> None:
        """Write no more to memory that is the caller's again."""
        if self._head is None or self._head.request != id or self._landing is None:
            return
        if self._landing.sizes:
            left = self._missing + sum(self._landing.sizes[len(self._values) + 1 :])
        else:
            left = sum(map(len, self._targets))
        self._landing, self._values, self._parts = None, [], []
        self._targets = nowhere(left)

    def _stop_sending(self, id: int, call: Call) -> None:
        """Read no more from memory that is the caller's again."""
        for outgoing in self._outgoing:
            if not isinstance(outgoing, _Message) or outgoing.id != id:
                continue
            if outgoing.left == outgoing.size:
                self._outgoing.remove(outgoing)
                self._outgoing_bytes -= outgoing.size
                del self._waiting[id]
                if call.put is not None:
                    self._send_off(Kind.ABORT, wire.Abort(call.put.ids))
            elif outgoing.left <= RESCUE_BYTES_MAX:
                outgoing.views = [memoryview(b"".join(outgoing.views))]
            else:
                self.lose("a call ended while its payload was being sent")
            return

    def _broken(self, error: BaseException) -> None:
        refused = isinstance(error, (ConnectionResetError, BrokenPipeError))
        self.unreachable = isinstance(error, OSError) and not refused
        self.lose(f"data connection lost: {error}")

    def lose(self, reason: str) -> None:
        """Close it; what waits has no answer."""
        if self.closed:
            return
        self._stop()
        self.ready = False
        self._timer.cancel()
        if self._flush is not None:
            self._flush.cancel()
        self._close_when_written()
        self._landing, self._values, self._parts = None, [], []
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            if call is not None:
                call.answer(Lost(reason))
        pushes, self._pushes = self._pushes, {}
        for fetch in pushes.values():
            fetch.pushed(None)
        if self._remote is not None:
            self._remote.close()
        if self._views is not None:
            self._views.end()
        self._owner.path_lost(self)

    def _close_when_written(self) -> None:
        """As long as a thread writes to the node's memory, the node must not take it back."""
        if self.closed and not self._copying:
            self._sock.close()


def _connecting(welcome: wire.Welcome) -> socket.socket:
    """A socket that is being connected to the node's data endpoint. Raises OSError, ValueError."""
    if not welcome.data:
        raise ValueError("the node has no data endpoint")
    host, port = parse_endpoint(welcome.data[0])
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setblocking(False)
        configure(sock)
        error = sock.connect_ex((host, port))
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


def nowhere(size: int) -> list[memoryview]:
    """Room for bytes that nobody wants: the same again and again."""
    whole, rest = divmod(size, len(_scratch))
    return [_scratch] * whole + ([_scratch[:rest]] if rest else [])


__all__ = ["AsyncPath", "Call", "Calls", "Owner"]
