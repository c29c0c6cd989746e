"""How a client's hot operations travel: a data connection to each node, or through its memory.

A node on the same host lets its clients map its arena. Then a get is answered by *where* the
values lie; they are copied from there, and the header before each value, which changes before its
memory is used for anything else, tells afterwards whether the copy is good (a seqlock, seen from
the reader's side). A put asks for room, fills it, and commits. Both fall back to bytes on the
connection; nothing depends on the node's being alive while bytes are copied.

That a host is the same is proven by content: the file must hold the proof that the node sent.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from p2pkv import _native, wire
from p2pkv.buffers import copy
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.objects import HEADER_BYTES, read_header
from p2pkv.routing import Answer, Lost, Reply, Request
from p2pkv.stream import Closed, DataLink, Late
from p2pkv.transport import ClientSession
from p2pkv.wire import Kind, Status

CONNECT_TIMEOUT_S = 1.0
SHARED_PUT_MIN = 128 << 10
"""Puts of fewer bytes go over the connection: one round trip instead of two."""


class SharedArena:
    """A node's memory, mapped."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.view = memoryview(mapping)
        self._region = _native.Region(self.view) if _native.available else None

    @classmethod
    def open(cls, path: str, size: int, proof: bytes) -> SharedArena | None:
        """Map the file, if it is the one that the node means."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if len(proof) < 16 or os.pread(fd, len(proof), size) != proof:
                return None
            return cls(mmap.mmap(fd, size))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    def holds(self, offset: int, size: int) -> bool:
        return offset >= HEADER_BYTES and offset + size <= len(self.view)

    def read(self, offsets: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copy from the arena; one native call, without the GIL."""
        if self._region is not None:
            sources = self._region.pieces(offsets, [len(t) for t in targets])
            _native.copy(_native.Pieces.targets(targets), sources)
            return
        for offset, target in zip(offsets, targets, strict=True):
            copy(target, self.view[offset : offset + len(target)])

    def write(self, offsets: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Copy into the arena; one native call, without the GIL."""
        if self._region is not None:
            targets = self._region.pieces(offsets, [len(s) for s in sources])
            _native.copy(targets, _native.Pieces.sources(sources))
            return
        for offset, source in zip(offsets, sources, strict=True):
            self.view[offset : offset + len(source)] = source

    def unchanged(self, key: bytes, offset: int, size: int, version: int) -> bool:
        """Whether what was copied from there was this value all the time."""
        header = read_header(self.view, offset)
        return (
            header is not None
            and header.version == version
            and header.size == size
            and header.key_hash == xxh3_64_intdigest(key)
        )

    def close(self) -> None:
        """The mapping goes with the last view of it."""
        self.view.release()


class DataPath:
    """The data connection to one node, and its arena if it is on this host."""

    def __init__(
        self, welcome: wire.Welcome, session: ClientSession, limits: Limits, shared: bool
    ) -> None:
        """Raises OSError, ValueError if there is no way to the node's data endpoint."""
        if not welcome.data:
            raise ValueError("the node has no data endpoint")
        self.link = DataLink(welcome.data[0], session.id, welcome.token, limits, CONNECT_TIMEOUT_S)
        self.arena = SharedArena.open(*welcome.arena) if shared and welcome.arena else None
        self.session = session
        self.proven = False
        """Whether it has answered anything yet."""

    def close(self) -> None:
        self.link.close()


class _Call:
    """One request under way on a path."""

    __slots__ = ("allocated", "index", "made", "request")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.allocated: wire.Allocated | None = None
        """Where a put was given room, while it is being committed."""
        self.made: list[int] = []


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
        for path, call in self._calls:
            self._guarded(path, call, deadline_ns)
        while self._waiting:
            for path in self._ready(deadline_ns):
                self._receive(path, deadline_ns)
        return [a if a is not None else Lost("not sent") for a in self.answers]

    # -- sending

    def _guarded(self, path: DataPath, call: _Call, deadline_ns: int) -> None:
        if path in self.broken:
            self.answers[call.index] = Lost("the data connection was lost")
            return
        self._waiting.setdefault(path, {})
        try:
            self._send(path, call, deadline_ns)
        except (Closed, Late, ProtocolError) as e:
            self._waiting[path][-1 - call.index] = call
            self._lose(path, e)

    def _send(self, path: DataPath, call: _Call, deadline_ns: int) -> None:
        request = call.request
        if not request.id:
            request.id = path.session.next_number()
        message = request
        if path.arena is not None:
            if request.kind == Kind.GET:
                body = msgspec.structs.replace(request.body, locate=True)
                message = self._as(request, request.kind, body, request.id)
            elif request.kind == Kind.PUT and self._is_shared(path.arena, request.body):
                put: Any = request.body
                alloc = wire.Alloc(put.keys, put.sizes, put.options, True)
                message = self._as(request, Kind.ALLOC, alloc, path.session.next_number())
        self._waiting[path][message.id] = call
        path.link.send(message, deadline_ns)
        request.sent = True

    @staticmethod
    def _is_shared(arena: SharedArena, body: Any) -> bool:
        """Small puts take one round trip less without; very large ones evict as they come."""
        total: int = sum(body.sizes)
        return SHARED_PUT_MIN <= total <= len(arena.view) // 4

    @staticmethod
    def _as(request: Request, kind: Kind, body: wire.Body, id: int) -> Request:
        """The request in other words, without its payload."""
        message = Request(request.to, kind, body)
        message.id = id
        return message

    # -- receiving

    def _ready(self, deadline_ns: int) -> list[DataPath]:
        paths = list(self._waiting)
        if len(paths) == 1:
            return paths
        buffered = [path for path in paths if path.link.buffered()]
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
        sinks = {i: call.request.sink for i, call in waiting.items()}
        try:
            id, reply = path.link.receive(deadline_ns, sinks.get)
            path.proven = True
            call = waiting.pop(id, None)
            if call is not None:
                self._take(path, call, reply, deadline_ns)
        except (Closed, Late, ProtocolError) as e:
            self._lose(path, e)
            return
        if not waiting:
            del self._waiting[path]

    def _take(self, path: DataPath, call: _Call, reply: Reply, deadline_ns: int) -> None:
        if reply.kind == Kind.ERROR and reply.body.fault == wire.Fault.NO_SESSION:
            self.forgotten.add(path)
            if not call.request.unsure:
                call.request.sent, call.request.id = False, 0
            self.answers[call.index] = reply
        elif reply.kind == Kind.ALLOCATED and call.request.kind == Kind.PUT:
            self._fill(path, call, reply.body, deadline_ns)
        elif reply.kind == Kind.STATUSES and call.allocated is not None:
            self.answers[call.index] = self._merged(call, reply)
        elif reply.kind == Kind.VALUES and reply.body.offsets and path.arena is not None:
            self.answers[call.index] = _copied(path.arena, call.request, reply)
        else:
            self.answers[call.index] = reply

    def _fill(self, path: DataPath, call: _Call, body: wire.Allocated, deadline_ns: int) -> None:
        """Write the values to where the node made room, and commit."""
        arena, request = path.arena, call.request
        assert arena is not None
        put: Any = request.body
        if len(body.ids) != len(put.keys) or len(body.offsets) != len(put.keys):
            raise ProtocolError(f"{len(body.ids)} allocations for {len(put.keys)} keys")
        values = wire.packed(request.payload, put.sizes)
        made = [i for i, id in enumerate(body.ids) if id]
        if not all(arena.holds(body.offsets[i], put.sizes[i]) for i in made):
            raise ProtocolError("an allocation outside of the arena")
        if not made:
            self.answers[call.index] = Reply(Kind.STATUSES, wire.Statuses(body.statuses), ())
            return
        arena.write([body.offsets[i] for i in made], [values[i] for i in made])
        call.allocated, call.made = body, made
        commit = wire.Commit([body.ids[i] for i in made], True)
        message = self._as(request, Kind.COMMIT, commit, request.id)
        self._waiting[path][message.id] = call
        path.link.send(message, deadline_ns)

    @staticmethod
    def _merged(call: _Call, reply: Reply) -> Reply:
        """Statuses of the allocations, and of the commits where there were any."""
        assert call.allocated is not None
        made = call.made
        statuses = bytearray(call.allocated.statuses or bytes(len(call.allocated.ids)))
        committed = reply.body.statuses or bytes(len(made))
        if len(committed) != len(made):
            raise ProtocolError(f"{len(committed)} statuses for {len(made)} commits")
        for i, status in zip(made, committed, strict=True):
            # an allocation that is gone: begin again
            statuses[i] = Status.MOVING if status == Status.CONFLICT else status
        body = wire.Statuses(bytes(statuses) if any(statuses) else b"")
        return Reply(Kind.STATUSES, body, (), reply.revision)

    def _lose(self, path: DataPath, error: Exception) -> None:
        self.broken.add(path)
        late = isinstance(error, Late)
        reason = "no answer" if late else f"data connection to {path.link.endpoint}: {error}"
        for call in self._waiting.pop(path, {}).values():
            self.answers[call.index] = Lost(reason, deadline=late)
        path.close()


def _copied(arena: SharedArena, request: Request, reply: Reply) -> Reply:
    """An answer with the located values copied from the arena, next to those that were sent."""
    body: wire.Values = reply.body
    asked: Any = request.body
    keys: list[bytes] = asked.keys
    if not len(keys) == len(body.sizes) == len(body.offsets) == len(body.versions):
        raise ProtocolError("the answer's lists differ in length")
    if request.sink is None:
        return _copied_as_bytes(arena, keys, reply)
    targets = list(request.sink(body))
    if not reply.delivered:
        inline = [0 if o else n for o, n in zip(body.offsets, body.sizes, strict=True)]
        for i, view in enumerate(wire.placed(reply.frames, inline, body.starts)):
            if len(view):
                copy(targets[i], view)
    located = _located(arena, body)
    arena.read([body.offsets[i] for i in located], [targets[i] for i in located])
    statuses = _verified(arena, keys, body, located)
    return Reply(reply.kind, _with(body, statuses), (), reply.revision, None, True)


def _copied_as_bytes(arena: SharedArena, keys: Sequence[bytes], reply: Reply) -> Reply:
    body: wire.Values = reply.body
    inline = [0 if o else n for o, n in zip(body.offsets, body.sizes, strict=True)]
    views = wire.placed(reply.frames, inline, body.starts)
    located = _located(arena, body)
    values: list[bytes | None] = [bytes(view) for view in views]
    for i in located:
        offset = body.offsets[i]
        values[i] = bytes(arena.view[offset : offset + body.sizes[i]])
    statuses = _verified(arena, keys, body, located)
    return Reply(reply.kind, _with(body, statuses), (), reply.revision, values)


def _located(arena: SharedArena, body: wire.Values) -> list[int]:
    located = [i for i, offset in enumerate(body.offsets) if offset]
    if not all(arena.holds(body.offsets[i], body.sizes[i]) for i in located):
        raise ProtocolError("a value outside of the arena")
    return located


def _verified(
    arena: SharedArena, keys: Sequence[bytes], body: wire.Values, located: Sequence[int]
) -> bytes:
    """The statuses; a value that changed while it was copied is to be asked for again."""
    changed = [
        i
        for i in located
        if not arena.unchanged(keys[i], body.offsets[i], body.sizes[i], body.versions[i])
    ]
    if not changed:
        return body.statuses
    statuses = bytearray(body.statuses or bytes(len(keys)))
    for i in changed:
        statuses[i] = Status.DEFERRED
    return bytes(statuses)


def _with(body: wire.Values, statuses: bytes) -> Any:
    return wire.Values(statuses, body.sizes, [], body.once)
