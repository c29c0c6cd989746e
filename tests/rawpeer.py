"""A peer of the client's drivers that does what a test tells it to, over a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import zmq

from p2pkv import wire
from p2pkv.types import BootId, Member, NodeId
from p2pkv.wire import Fault, Kind

Answer = tuple[Kind, wire.Body, Sequence[bytes]] | None
Script = Callable[[wire.Head, list[bytes]], Answer]

LIMIT = 1 << 26


def echo(head: wire.Head, frames: list[bytes]) -> Answer:
    """Answers a PING; gives the payload of a PUT back."""
    if head.kind == Kind.PING:
        return Kind.PONG, wire.Empty(), ()
    return Kind.STATUSES, wire.Statuses(b""), frames


def silent(head: wire.Head, frames: list[bytes]) -> Answer:
    return None


def error(fault: Fault, message: str = "") -> Answer:
    return Kind.ERROR, wire.Error(fault, message), ()


class RawPeer:
    """A ROUTER on a thread of its own. ``script`` gives the answer to each request, or None.

    With ``sessions`` it refuses requests of sessions that did not say HELLO (or were forgotten).
    """

    def __init__(self, script: Script = echo, *, sessions: bool = False, port: int = 0) -> None:
        self.script = script
        self.sessions = sessions
        self.known: set[bytes] = set()
        self.heads: list[wire.Head] = []
        """All requests, HELLO not among them."""
        self.hellos: list[bytes] = []
        self.from_: list[bytes] = []
        self.paused = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        last = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        self.endpoint = last.rstrip(b"\0").decode()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.paused.is_set() and self._socket.poll(10):
                    self._one()
                elif self.paused.is_set():
                    time.sleep(0.005)
        except BaseException as e:
            self._failure = e
        finally:
            self._socket.close(0)
            self._context.term()

    def _one(self) -> None:
        session, frame, *frames = self._socket.recv_multipart()
        head = wire.decode(frame, LIMIT)
        if head.kind == Kind.HELLO:
            self.hellos.append(session)
            self.known.add(session)
            self._greeted(session)
            return
        if self.sessions and session not in self.known:
            self._answer(session, head.request, error(Fault.NO_SESSION))
            return
        self.heads.append(head)
        self.from_.append(session)
        if head.kind != Kind.BYE:
            self._answer(session, head.request, self.script(head, frames))

    def _greeted(self, session: bytes) -> None:
        """HELLO was said; a WELCOME is not sent."""

    def _answer(self, session: bytes, request: int, answer: Answer) -> None:
        if answer is not None:
            kind, body, payload = answer
            self._socket.send_multipart([session, wire.encode(kind, request, 7, body), *payload])

    def send_raw(self, *frames: bytes) -> None:
        """From the script only (the thread's socket)."""
        self._socket.send_multipart(list(frames))

    def stop(self) -> None:
        """Closes the connections at once, as a killed process does."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def table_of(*endpoints: str, revision: int = 1) -> wire.Table:
    """A ring in which member i owns bucket i."""
    members = [Member(NodeId(f"n{i}"), BootId(1)) for i in range(len(endpoints))]
    count = 1 << (len(endpoints) - 1).bit_length()
    owners = [i if i < len(endpoints) else -1 for i in range(count)]
    return wire.Table("f", revision, count, members, [(e,) for e in endpoints], owners, [0] * count)
