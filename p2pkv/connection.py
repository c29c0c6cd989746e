"""One end of a data connection on an event loop: messages in and out, and nothing waits.

``stream`` has the framing. ``Connection`` is what the node's side and the client's have in common:
payloads are received straight to where they belong and sent from where they lie, what is to be
sent is queued and leaves with as few system calls as possible, and one wake-up does a bounded
piece of work before others get their turn.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from p2pkv import wire
from p2pkv.buffers import Run
from p2pkv.clock import monotonic
from p2pkv.errors import ProtocolError
from p2pkv.stream import IOV_MAX, SIZES, Closed, advance

BUFFER_BYTES = 64 << 10
STEPS_MAX = 32
"""Messages and receives of one wake-up."""
TURN_BYTES = 1 << 20
"""Received by one wake-up, give or take a socket's buffer."""


class Outgoing:
    """A message on its way out, and the pieces of the arena it holds."""

    __slots__ = ("dones", "left", "size", "views")

    def __init__(self, begin: bytes, payload: Sequence[Any] = ()) -> None:
        self.views = [memoryview(begin)]
        self.dones: list[Callable[[], None]] = []
        self.size = len(begin)
        for piece in payload:
            view = memoryview(piece.view if isinstance(piece, Run) else piece)
            self.size += len(view)
            self.views.append(view)
            if isinstance(piece, Run):
                self.dones.append(piece.done)
        self.left = self.size

    def begin(self) -> None:
        """Its first bytes are leaving."""

    def finish(self) -> None:
        """It has left, or never will."""
        for done in self.dones:
            done()


class Connection:
    """A connection that receives messages, and sends what is queued.

    A side says where a payload goes (``_place``), what a message does (``_received``, ``_filled``),
    and what it means that the connection broke (``_broken``).
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        head_bytes_max: int,
        payload_bytes_max: int,
    ) -> None:
        self.closed = False
        self.progress_ns = monotonic()
        """When bytes last went in either direction."""
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._head_max = head_bytes_max
        self._payload_max = payload_bytes_max
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._head: wire.Head | None = None
        """Of the message whose payload is arriving."""
        self._targets: list[memoryview] = []
        self._outgoing: deque[Outgoing] = deque()
        self._outgoing_bytes = 0
        self._turn_bytes = 0
        self._reading = self._writing = False
        self._again: asyncio.Handle | None = None
        self._read_on()

    # -- what a side does

    def _place(self, head: wire.Head, size: int) -> list[memoryview]:
        """Where the payload of this message goes, in order."""
        raise NotImplementedError

    def _received(self, head: wire.Head) -> None:
        """A message without payload is here."""
        raise NotImplementedError

    def _filled(self, head: wire.Head) -> None:
        """The payload is where ``_place`` wanted it."""
        raise NotImplementedError

    def _broken(self, error: Exception) -> None:
        """Closed, OSError, or ProtocolError: nothing more will come."""
        raise NotImplementedError

    # -- reading

    def _read_on(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)
            if self._end > self._start and self._again is None:
                self._again = self._loop.call_soon(self._readable)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._turn_bytes = 0
        try:
            more = self._take_turn()
            if self._outgoing and not self._writing:
                self._write()
        except (Closed, OSError, ProtocolError) as e:
            if not self.closed:
                self._broken(e)
            return
        if more and not self.closed:
            self._again = self._loop.call_soon(self._readable)

    def _take_turn(self) -> bool:
        """Go on until nothing is there (False), or the turn is over (True)."""
        for _ in range(STEPS_MAX):
            if self.closed or not self._step():
                return False
            if self._turn_bytes > TURN_BYTES:
                break
        return True

    def _step(self) -> bool:
        """Handle one message, or receive something. False: nothing is there now."""
        if self._head is not None:
            return self._receive_payload()
        if self._take_message():
            return True
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > BUFFER_BYTES:
                self._buffer = memoryview(bytearray(BUFFER_BYTES))
        elif self._end == len(self._buffer):
            self._make_room()
        room = self._buffer[self._end :]
        try:
            got = self._sock.recv_into(room)
        except BlockingIOError:
            return False
        self._note(got)
        self._end += got
        took = self._take_message()
        # What fitted with room to spare was all: another receive would only delay the answer.
        return got == len(room) or (took and (self._head is not None or self._end > self._start))

    def _note(self, got: int) -> None:
        if not got:
            raise Closed("the peer closed the connection")
        self._turn_bytes += got
        self.progress_ns = monotonic()

    def _make_room(self) -> None:
        rest = bytes(self._buffer[self._start : self._end])
        if len(rest) > len(self._buffer) // 2:
            self._buffer = memoryview(bytearray(2 * len(self._buffer)))
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _take_message(self) -> bool:
        """Begin with the next message in the buffer, if its head is there."""
        have = self._end - self._start
        if have < SIZES.size:
            return False
        head_bytes, payload_bytes = SIZES.unpack_from(self._buffer, self._start)
        if head_bytes > self._head_max or payload_bytes > self._payload_max:
            raise ProtocolError(f"a message of {head_bytes} + {payload_bytes} bytes")
        if have < SIZES.size + head_bytes:
            return False
        begin = self._start + SIZES.size
        self._start = begin + head_bytes
        head = wire.decode(self._buffer[begin : self._start], self._head_max)
        if payload_bytes:
            self._begin_payload(head, payload_bytes)
        else:
            self._received(head)
        return True

    def _begin_payload(self, head: wire.Head, size: int) -> None:
        self._head = head
        self._targets = [view for view in self._place(head, size) if len(view)]
        while self._targets and self._end > self._start:
            target = self._targets[0]
            n = min(len(target), self._end - self._start)
            target[:n] = self._buffer[self._start : self._start + n]
            self._start += n
            self._targets = advance(self._targets, n)
        if not self._targets:
            self._finish_payload()

    def _receive_payload(self) -> bool:
        try:
            got = self._sock.recvmsg_into(self._targets[:IOV_MAX])[0]
        except BlockingIOError:
            return False
        self._note(got)
        self._targets = advance(self._targets, got)
        if not self._targets:
            self._finish_payload()
        return True

    def _finish_payload(self) -> None:
        head, self._head = self._head, None
        assert head is not None
        self._filled(head)

    # -- writing

    def _queue(self, outgoing: Outgoing) -> None:
        """It leaves when ``_write`` is called."""
        self._outgoing.append(outgoing)
        self._outgoing_bytes += outgoing.size

    def _writable(self) -> None:
        try:
            self._write()
        except OSError as e:
            if not self.closed:
                self._broken(e)

    def _write(self) -> None:
        while self._outgoing:
            try:
                done = self._sock.sendmsg(self._next_views())
            except BlockingIOError:
                self._want_writable(True)
                return
            self.progress_ns = monotonic()
            self._has_left(done)
        self._want_writable(False)
        self._read_on()

    def _next_views(self) -> list[memoryview]:
        """As much of what is queued as one system call takes."""
        views = self._outgoing[0].views
        if len(self._outgoing) > 1 and len(views) < IOV_MAX:
            views = list(views)
            for outgoing in islice(self._outgoing, 1, None):
                views += outgoing.views[: IOV_MAX - len(views)]
                if len(views) == IOV_MAX:
                    break
        return views[:IOV_MAX]

    def _has_left(self, done: int) -> None:
        while done:
            outgoing = self._outgoing[0]
            if outgoing.left == outgoing.size:
                outgoing.begin()
            if done < outgoing.left:
                outgoing.views = advance(outgoing.views, done)
                outgoing.left -= done
                return
            done -= outgoing.left
            self._outgoing.popleft()
            self._outgoing_bytes -= outgoing.size
            outgoing.finish()

    def _want_writable(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)

    # -- ending

    def _stop(self) -> None:
        """Neither receives nor sends any more; what was queued is given up."""
        self.closed = True
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._stop_reading()
        self._want_writable(False)
        self._head, self._targets = None, []
        for outgoing in self._outgoing:
            outgoing.finish()
        self._outgoing.clear()
        self._outgoing_bytes = 0

    # a connection is told apart by identity
    __hash__ = object.__hash__
