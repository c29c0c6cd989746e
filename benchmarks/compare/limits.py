"""What the machine can do with the same bytes: a copy by one thread, and a plain socket pair."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import struct
from typing import Any

from .work import MIB, Store, Work

HEADER = struct.Struct("<?QQ")
SET_BYTES = 512 * MIB


class Memcpy(Store):
    """``batch_get_into`` copies out of a working set, ``batch_put`` into it."""

    def load(self, work: Work) -> None:
        super().load(work)
        self.memory = memoryview(bytearray(b"\1") * (work.n * work.size))

    def clear(self) -> None:
        pass

    def put(self, i: int) -> None:
        self.batch_put(i, i + 1)

    def get_into(self, i: int) -> None:
        size = self.w.size
        self.w.buffers[0][:] = self.memory[i * size : (i + 1) * size]

    def batch_put(self, low: int, high: int) -> None:
        memory, size = self.memory, self.w.size
        for i in range(low, high):
            memory[i * size : (i + 1) * size] = self.w.values[i]

    def batch_get_into(self, low: int, high: int) -> None:
        memory, size = self.memory, self.w.size
        for i, buffer in zip(range(low, high), self.w.buffers, strict=False):
            buffer[:] = memory[i * size : (i + 1) * size]


class Socket(Store):
    """One request and one answer for each call, scattered and gathered by one system call where
    the kernel can; another process at the other end, which does nothing else."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.sock = socket.create_connection(server.getsockname())
            other, _ = server.accept()
        for end in (self.sock, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.process = mp.get_context("fork").Process(
            target=_serve, args=(other, self.sock), daemon=True
        )
        self.process.start()
        other.close()

    def clear(self) -> None:
        pass

    def put(self, i: int) -> None:
        self.batch_put(i, i + 1)

    def get_into(self, i: int) -> None:
        self.batch_get_into(i, i + 1)

    def batch_put(self, low: int, high: int) -> None:
        size = self.w.size
        header = HEADER.pack(True, low * size, (high - low) * size)
        _send_all(self.sock, [memoryview(part) for part in (header, *self.w.values[low:high])])
        self.sock.recv(1, socket.MSG_WAITALL)

    def batch_get_into(self, low: int, high: int) -> None:
        size = self.w.size
        self.sock.sendall(HEADER.pack(False, low * size, (high - low) * size))
        views = self.w.buffers[: high - low]
        while views:
            views = _rest(views, self.sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])

    def close(self) -> None:
        self.sock.close()
        self.process.join(10)


def _serve(sock: socket.socket, unused: socket.socket) -> None:
    unused.close()
    memory = memoryview(bytearray(os.urandom(MIB)) * (SET_BYTES // MIB))
    while len(header := sock.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
        put, at, size = HEADER.unpack(header)
        views = [memory[at : at + size]]
        if not put:
            sock.sendall(views[0])
            continue
        while views:
            views = _rest(views, sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0])
        sock.sendall(b"1")


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        views = _rest(views, sock.sendmsg(views))


def _rest(views: list[Any], moved: int) -> list[Any]:
    """What is left of the views after so many bytes."""
    if not moved:
        raise ConnectionError("the other end has closed the connection")
    done = 0
    while done < len(views) and moved >= len(views[done]):
        moved -= len(views[done])
        done += 1
    views = views[done:]
    if moved:
        views[0] = views[0][moved:]
    return views
