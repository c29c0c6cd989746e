"""Values of a node on this host where they lie: read-only views of its memory, without a copy.

The node keeps what is viewed until it is told that the last view is gone, or until the kernel says
that the connection by which it was asked for is: a client that is stopped keeps its views, one that
dies does not. So views have a connection of their own, which is closed only when none is left.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from p2pkv import wire
from p2pkv.errors import ProtocolError
from p2pkv.routing import Answer, Lost, Reply, Request
from p2pkv.shared_memory import SharedArena
from p2pkv.stream import Closed, DataLink, Late, wait_for_ever
from p2pkv.wire import Kind

RELEASE_BATCH: Final = 64
"""So many views that are gone are told of at once, fewer with the next request or the last view."""


class Lessor:
    """The connection by which views of one node's memory are taken and given back.

    For any thread. ``Lessor.end`` lets it live until its last view is gone.
    """

    def __init__(self, arena: SharedArena, link: DataLink) -> None:
        self._arena = arena
        self._link = link
        wait_for_ever(link.socket)
        self._lock = threading.Lock()
        self._number = 0
        self._live: dict[int, weakref.ref[Any] | None] = {}
        self._gone: deque[int] = deque()
        """Tokens of views that are gone. Appended to at any time, by the garbage collector too."""
        self._ended = False
        self.broken = False
        """It cannot be used for more views."""

    def call(self, keys: list[bytes], deadline_ns: int) -> Answer:
        """Views of the values; ``Reply.values`` has them, with None where a status says why."""
        with self._lock:
            if self.broken or self._ended:
                return Lost("the connection of the views was lost")
            try:
                self._give_back(deadline_ns)
                return self._views(
                    len(keys), self._ask(Kind.OPEN, wire.Open(keys, True), deadline_ns)
                )
            except (Closed, Late, ProtocolError) as e:
                self.broken = True
                return Lost(str(e) or "no answer", isinstance(e, Late))
            finally:
                self._end_if_unused()

    def end(self) -> None:
        """No more views are asked for. Those that there are stay."""
        with self._lock:
            self._ended = True
            self._end_if_unused()

    # -- asking; with the lock

    def _ask(self, kind: Kind, body: wire.Body, deadline_ns: int) -> Reply:
        number = self._send(kind, body, deadline_ns)
        while True:
            id, reply = self._link.receive(deadline_ns)
            if id == number:
                return reply

    def _send(self, kind: Kind, body: wire.Body, deadline_ns: int) -> int:
        request = Request("", kind, body)
        self._number += 1
        request.id = self._number
        self._link.send(request, deadline_ns)
        return request.id

    def _give_back(self, deadline_ns: int) -> None:
        tokens = [self._gone.popleft() for _ in range(len(self._gone))]
        for token in tokens:
            self._live.pop(token, None)
        if tokens:  # its answer is passed over when the next one is waited for
            self._send(Kind.RELEASE, wire.Release(tokens), deadline_ns)

    def _end_if_unused(self) -> None:
        if (self._ended or self.broken) and len(self._live) == len(self._gone):
            self._link.close()

    # -- views

    def _views(self, count: int, reply: Reply) -> Reply:
        if reply.kind != Kind.OPENED:
            return reply
        body: wire.Opened = reply.body
        given = (len(body.tokens), len(body.sizes), len(body.offsets))
        if given != (count, count, count) or len(body.statuses) not in (0, count):
            raise ProtocolError(f"{given} tokens, sizes and places for {count} keys")
        opened = [
            (t, at, n) for t, at, n in zip(body.tokens, body.offsets, body.sizes, strict=True)
        ]
        if not all(self._arena.holds(at, n) for token, at, n in opened if token):
            raise ProtocolError("a value outside of the arena")
        views = [self._view(*place) if place[0] else None for place in opened]
        return Reply(reply.kind, body, (), reply.revision, views)

    def _view(self, token: int, offset: int, size: int) -> memoryview:
        """All that is made of the view keeps ``memory`` alive, whose end tells the node."""
        if not size:
            self._live[token] = None
            self._gone.append(token)
            return memoryview(b"")
        memory = (ctypes.c_char * size).from_buffer(self._arena.mapping, offset)
        self._live[token] = weakref.ref(memory, self._returned(token))
        return memoryview(memory).cast("B").toreadonly()

    def _returned(self, token: int) -> Callable[[object], None]:
        def returned(_: object) -> None:
            self._gone.append(token)
            if len(self._gone) >= RELEASE_BATCH or len(self._gone) == len(self._live):
                self._flush()

        return returned

    def _flush(self) -> None:
        """Tell the node now, unless the connection is in use: then who uses it does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not (self.broken or self._ended):
                self._give_back(0)
        except (Closed, Late):
            self.broken = True
        finally:
            self._end_if_unused()
            self._lock.release()


__all__ = ["Lessor"]
