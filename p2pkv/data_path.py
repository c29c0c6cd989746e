"""The way of a blocking client's requests: a data connection to each node, or through its memory.

What memory that is shared makes of requests and answers stands in ``shared_memory``; where there is
none, bytes travel on the connection, or by UCX (``ucx_client``) to and from the node's memory.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from p2pkv import _native, wire
from p2pkv.ahead import Ahead, Filling
from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.config import Limits
from p2pkv.errors import DeviceError, ProtocolError
from p2pkv.read_link import ReadLink, kind_of
from p2pkv.remote_memory import RemotePut, RemoteValues
from p2pkv.routing import Answer, Lost, Reply, Request
from p2pkv.shared_memory import LocatedValues, SharedArena, SharedPut, message_for
from p2pkv.stream import Closed, DataLink, Late, wait_for_ever
from p2pkv.transport import ClientSession
from p2pkv.ucx_client import FAILURES, RemoteArena
from p2pkv.ucx_peers import TransferTimeout
from p2pkv.views import Lessor
from p2pkv.wire import Kind

CONNECT_TIMEOUT_S = 1.0
NO_READS_NS = 5 * SECOND_NS
"""After a read connection broke, so long the owner is asked."""
UNREACHABLE_NS = 60 * SECOND_NS
"""The same after none could be made."""
GRACE_NS = 100 * MILLISECOND_NS
"""To tell the node what became of its memory, also after the deadline."""


def _is_view(path: DataPath, body: object) -> bool:
    """Whether it asks for values that can be looked at where they lie."""
    return isinstance(path.arena, SharedArena) and isinstance(body, wire.Open) and body.view


def _no_room(reply: Reply, path: DataPath, call: _Call) -> bool:
    """Whether the node gives no room to writers from other hosts at the moment."""
    refused = reply.kind == Kind.ERROR and reply.body.fault == wire.Fault.NOT_READY
    return refused and isinstance(path.arena, RemoteArena) and not call.plain


class DataPath:
    """The data connection to one node, and its arena if that can be reached, by mapping or by UCX;
    else a read connection."""

    def __init__(
        self, welcome: wire.Welcome, session: ClientSession, limits: Limits, shared: bool
    ) -> None:
        """Raises OSError, ValueError if there is no way to the node's data endpoint."""
        if not welcome.data:
            raise ValueError("the node has no data endpoint")
        self.link = DataLink(welcome.data[0], session.id, welcome.token, limits, CONNECT_TIMEOUT_S)
        self.arena: SharedArena | RemoteArena | None = None
        if shared and welcome.arena:
            self.arena = SharedArena.open(*welcome.arena, index=welcome.index)
        if self.arena is not None:
            wait_for_ever(self.link.socket)
        self.ahead = Ahead(self.arena) if isinstance(self.arena, SharedArena) else None
        """The room that we have in memory that is shared."""
        self.session = session
        self._welcome = welcome
        self._limits = limits
        self._lessor: Lessor | None = None
        self.early: list[tuple[int, Reply]] = []
        """Answers that came while another was waited for."""
        self.failures = 0
        """Of UCX, one after the other."""
        self.proven = False
        """Whether it has answered anything yet."""
        self.used_ns = time.monotonic_ns()
        """When something was last sent on the data connection, by which the session lives."""
        self._reads: ReadLink | None = None
        self._no_reads_before_ns = 0
        readable = welcome.reads is not None and self.arena is None and _native.available
        self._idle_max_ns = welcome.session_ttl_ms * MILLISECOND_NS // 4 if readable else -1

    def read(self, request: Request, deadline_ns: int) -> Answer | None:
        """What the read connection answers to a read. None: the owner is to be asked."""
        kind = kind_of(request)
        reads = self.reads() if kind else None
        if reads is None:
            return None
        request.direct = True
        try:
            return reads.call(request, kind, deadline_ns)
        except Late:
            self.drop_reads()
            return Lost("no answer", deadline=True)
        except (Closed, ProtocolError):
            self.drop_reads()
            return None

    def reads(self) -> ReadLink | None:
        """The read connection, unless something must go over the other first."""
        now = time.monotonic_ns()
        if self.arena is not None or now - self.used_ns > self._idle_max_ns:
            return None
        if self._reads is None and now >= self._no_reads_before_ns:
            self._connect(now)
        return self._reads

    def _connect(self, now: int) -> None:
        assert self._welcome.reads is not None
        self._no_reads_before_ns = now + UNREACHABLE_NS
        try:
            self._reads = ReadLink(*self._welcome.reads, self._limits, CONNECT_TIMEOUT_S)
        except (OSError, ValueError):
            return

    def drop_reads(self) -> None:
        """Something went wrong on the read connection."""
        if self._reads is not None:
            self._reads.close()
            self._reads = None
            self._no_reads_before_ns = time.monotonic_ns() + NO_READS_NS

    def lessor(self) -> Lessor:
        """What gives views of the node's memory, which is shared. Raises OSError."""
        if self._lessor is None or self._lessor.broken:
            assert isinstance(self.arena, SharedArena)
            welcome = self._welcome
            link = DataLink(
                welcome.data[0], self.session.id, welcome.token, self._limits, CONNECT_TIMEOUT_S
            )
            self._lessor = Lessor(self.arena, link)
        return self._lessor

    @property
    def name(self) -> str:
        """How values travel: shm, ucx or tcp."""
        if self.arena is None:
            return "tcp"
        return "ucx" if isinstance(self.arena, RemoteArena) else "shm"

    @property
    def spent(self) -> bool:
        """Whether it is to be made anew, with its engine introduced again."""
        arena = self.arena
        return isinstance(arena, RemoteArena) and (arena.engine.closed or arena.stranger)

    def close(self) -> None:
        """The node takes the closing for our word that we write to its memory no more: an engine
        that has not let go is closed before."""
        if isinstance(self.arena, RemoteArena):
            self.arena.close()
        self.link.close()
        if self._lessor is not None:
            self._lessor.end()
        self.drop_reads()


class _Call:
    """One request under way on a path."""

    __slots__ = ("filled", "filling", "index", "plain", "put", "request", "sent_ns")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.sent_ns = 0
        self.plain = False
        """Whether its bytes travel on the connection, whatever else there is."""
        self.put: SharedPut | None = None
        """What is being committed."""
        self.filling: Filling | None = None
        """What waits for room."""
        self.filled = False
        """Whether the answer tells of the room that is left."""


class DataExchange:
    """Requests that go out together over data paths, and their answers.

    ``broken`` are the paths that must not be used any more, ``forgotten`` those whose node does
    not know the session.
    """

    def __init__(self, requests: Sequence[Request], paths: Sequence[DataPath]) -> None:
        self.answers: list[Answer | None] = [None] * len(requests)
        self.broken: set[DataPath] = set()
        self.forgotten: set[DataPath] = set()
        self._waiting: dict[DataPath, dict[int, _Call]] = {}
        self._calls = [
            (path, _Call(request, i))
            for i, (request, path) in enumerate(zip(requests, paths, strict=True))
        ]

    def run(self, deadline_ns: int) -> list[Answer]:
        reading: dict[DataPath, tuple[ReadLink, _Call]] = {}
        for path, call in self._calls:
            body: Any = call.request.body
            reads = path.reads() if kind_of(call.request) and path not in reading else None
            if reads is not None:
                reading[path] = reads, call
            elif _is_view(path, body):
                self._view(path, call, body.keys, deadline_ns)
            else:
                self._guarded(path, call, deadline_ns)
        if reading:
            self._read(reading, deadline_ns)
        while self._waiting:
            for path in self._ready(deadline_ns):
                self._receive(path, deadline_ns)
        return [a if a is not None else Lost("not sent") for a in self.answers]

    # -- read connections

    def _read(self, reading: dict[DataPath, tuple[ReadLink, _Call]], deadline_ns: int) -> None:
        """Ask all, then take what comes. What is not answered there goes to the owners."""
        for path, (reads, call) in list(reading.items()):
            try:
                reads.ask(call.request, kind_of(call.request), deadline_ns)
            except (Closed, Late) as e:
                del reading[path]
                self._unread(path, call, e, deadline_ns)
        for path, (reads, call) in reading.items():
            try:
                reply = reads.receive(call.request, deadline_ns)
            except (Closed, Late, ProtocolError) as e:
                self._unread(path, call, e, deadline_ns)
                continue
            if reply is not None:
                self.answers[call.index] = reply
            else:
                self._guarded(path, call, deadline_ns)

    def _unread(self, path: DataPath, call: _Call, error: Exception, deadline_ns: int) -> None:
        path.drop_reads()
        if isinstance(error, Late):
            self.answers[call.index] = Lost("no answer", deadline=True)
        else:
            self._guarded(path, call, deadline_ns)

    # -- sending

    def _guarded(self, path: DataPath, call: _Call, deadline_ns: int) -> None:
        if path in self.broken:
            self.answers[call.index] = Lost("the data connection was lost")
            return
        self._waiting.setdefault(path, {})
        try:
            self._send(path, call, deadline_ns)
        except (Closed, Late, ProtocolError, DeviceError) as e:
            self._waiting[path][-1 - call.index] = call
            self._lose(path, e)

    def _view(self, path: DataPath, call: _Call, keys: list[bytes], deadline_ns: int) -> None:
        try:
            answer = path.lessor().call(keys, deadline_ns)
        except OSError as e:
            answer = Lost(f"data connection to {path.link.endpoint}: {e}")
        if isinstance(answer, Lost):
            self.broken.add(path)
        elif answer.kind == Kind.ERROR and answer.body.fault == wire.Fault.NO_SESSION:
            self.forgotten.add(path)
        self.answers[call.index] = answer

    def _send(self, path: DataPath, call: _Call, deadline_ns: int) -> None:
        request = call.request
        filling = path.ahead.put(request) if path.ahead and not call.plain else None
        if filling is not None:
            self._send_ahead(path, call, filling, deadline_ns)
            return
        self._send_alone(path, call, deadline_ns)

    def _send_ahead(self, path: DataPath, call: _Call, filling: Filling, deadline_ns: int) -> None:
        """Write to the room that is there, or ask for some."""
        ahead = path.ahead
        assert ahead is not None
        ahead.busy = True
        if filling.needed <= ahead.size:
            call.filling, call.filled = None, True
            message = filling.write(ahead, path.session)
            call.request.sent = True
        else:
            call.filling = filling
            message = filling.lease(path.session)
        self._waiting.setdefault(path, {})[message.id] = call
        path.used_ns = time.monotonic_ns()
        path.link.send(message, deadline_ns)

    def _send_alone(self, path: DataPath, call: _Call, deadline_ns: int) -> None:
        request = call.request
        message = message_for(request, path.session, None if call.plain else path.arena)
        self._waiting[path][message.id] = call
        call.sent_ns = time.monotonic_ns()
        request.sent = request.sent or message.kind != Kind.ALLOC
        path.used_ns = time.monotonic_ns()
        path.link.send(message, deadline_ns)

    # -- receiving

    def _ready(self, deadline_ns: int) -> list[DataPath]:
        paths = list(self._waiting)
        if len(paths) == 1:
            return paths
        buffered = [path for path in paths if path.early or path.link.buffered()]
        if buffered:
            return buffered
        poll = select.poll()
        by_fd = {path.link.fileno(): path for path in paths}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        left = deadline_ns - time.monotonic_ns()
        ready = poll.poll(max(0, left // 1_000_000 + 1)) if left > 0 else []
        if not ready:
            for path in paths:
                self._lose(path, Late())
        return [by_fd[fd] for fd, _ in ready]

    def _receive(self, path: DataPath, deadline_ns: int) -> None:
        waiting = self._waiting[path]
        try:
            id, reply = path.early.pop(0) if path.early else self._next(path, deadline_ns)
            path.proven = True
            call = waiting.pop(id, None)
            if call is not None:
                self._take(path, call, reply, deadline_ns)
        except (Closed, Late, ProtocolError, DeviceError) as e:
            self._lose(path, e)
            return
        if not waiting:
            del self._waiting[path]

    def _next(self, path: DataPath, deadline_ns: int) -> tuple[int, Reply]:
        sinks = {i: call.request.sink for i, call in self._waiting[path].items()}
        return path.link.receive(deadline_ns, sinks.get)

    def _take(self, path: DataPath, call: _Call, reply: Reply, deadline_ns: int) -> None:
        if path.ahead and (call.filled or call.filling):
            path.ahead.busy = False
            path.ahead.take(reply.body.room if reply.kind == Kind.STATUSES else (0, 0))
        if reply.kind == Kind.ERROR and reply.body.fault == wire.Fault.NO_SESSION:
            self.forgotten.add(path)
            if not call.request.unsure:
                call.request.sent, call.request.id = False, 0
            self.answers[call.index] = reply
        elif reply.kind == Kind.ALLOCATED and call.request.kind == Kind.PUT:
            self._fill(path, call, reply, deadline_ns)
        elif call.filling is not None:
            self._take_room(path, call, call.filling, deadline_ns)
        elif reply.kind == Kind.STATUSES and call.put is not None:
            self.answers[call.index] = call.put.reply(reply)
        elif reply.kind == Kind.VALUES and isinstance(path.arena, RemoteArena):
            self._fetch(path, path.arena, call, reply, deadline_ns)
        elif call.request.kind == Kind.PUT and _no_room(reply, path, call):
            call.plain = True
            self._waiting.setdefault(path, {})
            self._send(path, call, deadline_ns)
        elif reply.kind == Kind.VALUES and isinstance(path.arena, SharedArena):
            self._copy(path.arena, call, reply)
        else:
            self.answers[call.index] = reply

    def _take_room(self, path: DataPath, call: _Call, filling: Filling, deadline_ns: int) -> None:
        """Write to the room that was given; if it is none, ask for each extent."""
        assert path.ahead is not None
        call.filling = None
        if filling.needed <= path.ahead.size:
            self._send_ahead(path, call, filling, deadline_ns)
        else:
            path.ahead.refused()
            self._waiting.setdefault(path, {})
            self._send_alone(path, call, deadline_ns)

    def _copy(self, arena: SharedArena, call: _Call, reply: Reply) -> None:
        """Take the values that lie in memory that we share."""
        if reply.body.offsets:
            located = LocatedValues(arena, call.request, reply)
            located.run()
            reply = located.reply()
        self.answers[call.index] = reply

    def _fill(self, path: DataPath, call: _Call, reply: Reply, deadline_ns: int) -> None:
        """Write the values to where the node made room, and commit."""
        request = call.request
        if path.arena is None:
            raise ProtocolError("room in a memory that is not shared")
        put: SharedPut
        if isinstance(path.arena, RemoteArena):
            put = RemotePut(path.arena, request, reply.body, path.arena.engine.slot.size)
        else:
            put = SharedPut(path.arena, request, reply.body)
        call.put = put
        if not put.made:
            self.answers[call.index] = put.reply()
            return
        if isinstance(put, RemotePut):
            if not self._store(path, put, call, deadline_ns):
                return
        else:
            put.run()
        commit = put.commit(request, path.session)
        self._waiting[path][commit.id] = call
        request.sent = True
        path.link.send(commit, deadline_ns)

    # -- by UCX

    def _fetch(
        self, path: DataPath, arena: RemoteArena, call: _Call, reply: Reply, deadline_ns: int
    ) -> None:
        """Bring the values that the node holds for us."""
        if not reply.body.offsets:
            self.answers[call.index] = reply
            return
        values = RemoteValues(arena, call.request, reply, arena.engine.slot.size)
        try:
            arena.fetch(values, call.sent_ns, partial(self._ask, path, deadline_ns), deadline_ns)
        except FAILURES as e:
            self._failed(path, call, e)
        except (Closed, Late, ProtocolError):
            self._waiting.setdefault(path, {})[-1 - call.index] = call
            raise
        else:
            path.failures = 0
            self.answers[call.index] = values.reply()
        self._send_off(path, Kind.RELEASE, wire.Release([values.token]), deadline_ns)

    def _ask(self, path: DataPath, deadline_ns: int, push: wire.Push) -> Reply:
        """Have the node write, and let it. Answers to other requests wait."""
        assert isinstance(path.arena, RemoteArena)
        request = Request("", Kind.PUSH, push)
        request.id = path.session.next_number()
        self._waiting.setdefault(path, {})
        path.link.send(request, deadline_ns)
        while True:
            if not path.link.buffered():
                path.arena.engine.attend(path.link.fileno(), deadline_ns)
                if not path.link.readable():
                    if time.monotonic_ns() >= deadline_ns:
                        raise TransferTimeout(path.link.endpoint, "no answer to PUSH in time")
                    continue
            id, reply = self._next(path, deadline_ns)
            if id == request.id:
                return reply
            path.early.append((id, reply))

    def _store(self, path: DataPath, put: RemotePut, call: _Call, deadline_ns: int) -> bool:
        """Write the values. Where that fails the node is told that some may still arrive."""
        assert isinstance(path.arena, RemoteArena)
        try:
            path.arena.store(put, deadline_ns)
        except FAILURES as e:
            self._failed(path, call, e)
            self._send_off(path, Kind.ABORT, wire.Abort(put.ids, True), deadline_ns)
            return False
        path.failures = 0
        return True

    def _failed(self, path: DataPath, call: _Call, error: Exception) -> None:
        path.failures += 1
        self.answers[call.index] = Lost(str(error), deadline=isinstance(error, TransferTimeout))

    def _send_off(self, path: DataPath, kind: Kind, body: wire.Body, deadline_ns: int) -> None:
        """A request whose answer nobody waits for."""
        request = Request("", kind, body)
        request.id = path.session.next_number()
        path.link.send(request, max(deadline_ns, time.monotonic_ns() + GRACE_NS))

    def _lose(self, path: DataPath, error: Exception) -> None:
        self.broken.add(path)
        late = isinstance(error, Late)
        reason = "no answer" if late else f"data connection to {path.link.endpoint}: {error}"
        for call in self._waiting.pop(path, {}).values():
            self.answers[call.index] = Lost(reason, deadline=late)
        path.close()
