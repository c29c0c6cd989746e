"""Damage: a proxy that flips bytes on their way, and a hand in a node's arena."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from pathlib import Path
from typing import Self

MARK = b"*flip-one-of-us*"
"""What a value is made of that shall be hit: wherever a stream is cut, a whole one is there."""
PROXY = "127.0.0.2"
CHUNK_BYTES = 256 << 10


def value_of(size: int, seed: int = 0) -> bytes:
    """A value that a proxy recognizes; another for each seed."""
    return (bytes([65 + seed]) + MARK * (size // len(MARK) + 1))[:size]


class FlippingProxy:
    """Stands at ``PROXY`` for the ports of 127.0.0.1 that it is told, and passes everything on.

    ``to_client`` and ``to_node``: how many chunks, of those with a MARK, are yet to be damaged.
    A node's peers come this way if it is started with ``advertise=PROXY``.
    """

    def __init__(self) -> None:
        self.to_client = 0
        self.to_node = 0
        self.flipped = 0
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._sockets: list[socket.socket] = []

    def serve(self, port: int) -> None:
        listener = socket.create_server((PROXY, port))
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                client, _ = listener.accept()
                node = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            self._sockets += [client, node]
            for args in ((client, node, "to_node"), (node, client, "to_client")):
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, budget: str) -> None:
        try:
            while data := source.recv(CHUNK_BYTES):
                target.sendall(self._damaged(data, budget))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _damaged(self, data: bytes, budget: str) -> bytes:
        with self._lock:
            at = data.find(MARK) if getattr(self, budget) else -1
            if at < 0:
                return data
            setattr(self, budget, getattr(self, budget) - 1)
            self.flipped += 1
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self._listeners + self._sockets:
            one.close()


def damage(arena: Path, value: bytes, at: int = 17) -> None:
    """Flip one bit of the value, wherever it lies in the arena. It must lie there once."""
    fd = os.open(arena, os.O_RDWR)
    try:
        with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
            place = memory.find(value)
            assert place >= 0, "the value is not in the arena"
            assert memory.find(value, place + 1) < 0, "the value is in the arena more than once"
            memory[place + at] ^= 1
    finally:
        os.close(fd)
