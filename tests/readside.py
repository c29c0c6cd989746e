"""A node's read threads without the node, and clients that do as a test tells them."""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from indexside import BUCKETS, FOR_EVER, Place, an_object, clear, fill, place

from p2pkv._native import reads
from p2pkv.buffers import address_of
from p2pkv.objects import HEADER_BYTES, Object, extent_bytes

S = 1_000_000_000
MIB = 1 << 20
TOKEN = os.urandom(16)


def within(seconds: float = 10.0) -> int:
    return time.monotonic_ns() + int(seconds * S)


def request(kind: int, keys: list[bytes], id: int = 1) -> bytes:
    """A request as it goes over the wire."""
    body = b"".join(len(k).to_bytes(2, "little") for k in keys) + b"".join(keys)
    head = len(body).to_bytes(4, "little") + bytes([reads.PROTOCOL, kind, 0, 0])
    return head + len(keys).to_bytes(4, "little") + id.to_bytes(4, "little") + body


class ReadHost:
    """An arena with an index, and threads that serve it."""

    def __init__(self, at: Place, **options: Any) -> None:
        self.place = at
        self.arena, _ = at.mapped()
        self.writer = at.writer()
        self.open_gates()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        settings = {
            "payload_max": 64 * MIB,
            "stall_ns": 30 * S,
            "spin_ns": 0,
            "connections_max": 64,
            "threads": 1,
        }
        self.threads = reads.ReadThreads(
            self.writer.address,
            (address_of(memoryview(self.arena)), at.arena_bytes),
            self.listener.fileno(),
            TOKEN,
            **{**settings, **options},
        )
        self._next = HEADER_BYTES
        self._version = 0

    def put(self, key: bytes, value: bytes, bucket: int = 0, expires_at: int = 0) -> Object:
        self._version += 1
        item = an_object(key, self._next, len(value), self._version, bucket)
        item.expires_at = expires_at
        self._next += extent_bytes(len(value))
        fill(self.arena, item, value)
        self.writer.publish([item])
        return item

    def take_out(self, item: Object) -> None:
        """As the store does once nobody holds the value: its memory is used for something else."""
        self.writer.withdraw([item])
        if not self.writer.held([item]):
            self.scrub(item)

    def scrub(self, item: Object) -> None:
        clear(self.arena, item)
        self.arena[item.offset : item.offset + item.size] = b"\xee" * item.size

    def open_gates(self, until: int = FOR_EVER) -> None:
        self.writer.open_gates(array("Q", [until] * BUCKETS))

    @property
    def figures(self) -> reads.ReadFigures:
        return self.threads.figures()

    def connect(self, *, receive_buffer: int = 0, token: bytes = TOKEN) -> socket.socket:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(20)
        sock.connect(self.listener.getsockname())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if token:
            sock.sendall(reads.preface(token))
        return sock

    def client(self) -> ReadClient:
        return ReadClient(self.connect())

    def close(self) -> None:
        self.threads.close()
        self.listener.close()
        self.writer.close()


class ReadClient:
    """A client's end, with its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(None)
        self.end = reads.ReadEnd(sock.fileno(), 64 * MIB, 0)

    def ask(self, kind: int, *keys: bytes) -> Any:
        deadline = within()
        assert self.end.ask(kind, list(keys), deadline) == 0
        error, table = self.end.table(deadline)
        assert error == 0, error
        return table

    def get(self, *keys: bytes) -> list[bytes | None]:
        sizes = self.ask(reads.GET, *keys)
        error, values = self.end.values(sizes, within())
        assert error == 0, error
        return values

    def exists(self, *keys: bytes) -> list[int]:
        return list(self.ask(reads.EXISTS, *keys))

    def match(self, *keys: bytes) -> tuple[int, int]:
        told: tuple[int, int] = self.ask(reads.MATCH, *keys)
        return told


@contextmanager
def serving(arena_bytes: int = 1 << 20, **options: Any) -> Iterator[ReadHost]:
    with place(arena_bytes) as made:
        host = ReadHost(made, **options)
        try:
            yield host
        finally:
            host.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the peer ends the connection, whatever it sends before."""
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def until(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.002)
