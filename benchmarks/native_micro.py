"""The native module beside the standard library and numpy: copies, and batches over a socket.

    python benchmarks/native_micro.py [--json]

Copies go over a working set four times the batch, or 256 MiB where that is less, so that a batch is
as cold as in a store. The socket figures are round trips over loopback TCP with a second process: a
16-byte request, then the batch gathered from one buffer there and scattered into pieces here. All
ways of one row take turns; each figure is the median. Read the ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from p2pkv import _native as native

KIB, MIB = 1 << 10, 1 << 20
COPIES = [(128, 4 * KIB), (32, 64 * KIB), (32, 256 * KIB), (32, MIB), (32, 4 * MIB)]
BATCHES = [(1, 4 * KIB), (128, 4 * KIB), (32, 64 * KIB), (64, 64 * KIB), (32, MIB)]
RUNS = 25
WAIT_NS = 10_000_000_000
SPIN_NS = 50_000
Step = Callable[[], object]
Figures = dict[str, dict[str, float]]


def take_turns(ways: dict[str, Step], runs: int) -> dict[str, float]:
    """Median seconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 2):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[2:]) for name, taken in seconds.items()}


class Sets:
    """Working sets one after the other, each as lists of views with their addresses."""

    def __init__(self, count: int, size: int) -> None:
        batch = count * size
        self.sets = max(1, min(4, 256 * MIB // batch))
        self.memory = np.ones((self.sets, count, size), np.uint8)
        self.views = [[memoryview(piece) for piece in batch] for batch in self.memory]
        self.addresses = [[piece.ctypes.data for piece in batch] for batch in self.memory]
        self.pieces = [native.Pieces.targets(views) for views in self.views]


def copy_ways(count: int, size: int) -> dict[str, Step]:
    target, source, turn = Sets(count, size), Sets(count, size), [0]

    def way(step: Callable[[int], object]) -> Step:
        def run() -> None:
            turn[0] += 1
            step(turn[0] % target.sets)

        return run

    def slices(n: int) -> None:
        for to, of in zip(target.views[n], source.views[n], strict=True):
            to[:] = of

    def memmove(n: int) -> None:
        for to, of in zip(target.addresses[n], source.addresses[n], strict=True):
            ctypes.memmove(to, of, size)

    def numpy(n: int) -> None:
        for to, of in zip(target.memory[n], source.memory[n], strict=True):
            np.copyto(to, of)

    def pieces(threads: int, streaming_min: int) -> Callable[[int], None]:
        def run(n: int) -> None:
            native.copy(
                target.pieces[n], source.pieces[n], threads=threads, streaming_min=streaming_min
            )

        return run

    def views(n: int) -> None:
        native.copy(target.views[n], source.views[n])

    never = 1 << 62
    return {
        "memoryview": way(slices),
        "memmove": way(memmove),
        "numpy": way(numpy),
        "native": way(pieces(1, native.STREAMING_MIN)),
        "native, views": way(views),
        "native, cached": way(pieces(1, never)),
        "native, streaming": way(pieces(1, 0)),
        "native, 2 threads": way(pieces(2, native.STREAMING_MIN)),
    }


def standard_send(sock: socket.socket, views: list[memoryview]) -> None:
    sent, total = sock.sendmsg(views), sum(map(len, views))
    while sent < total:
        first = 0
        while sent >= len(views[first]):
            sent -= len(views[first])
            total -= len(views[first])
            first += 1
        views = [views[first][sent:], *views[first + 1 :]]
        total -= sent
        sent = sock.sendmsg(views)


def standard_recv(sock: socket.socket, views: list[memoryview]) -> None:
    got, _, _, _ = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)
    if got != sum(map(len, views)):
        raise ConnectionError("cut short")


def native_send(sock: socket.socket, batch: native.Batch) -> None:
    _, error = native.send_all(sock.fileno(), batch, time.monotonic_ns() + WAIT_NS)
    if error:
        raise ConnectionError(native.describe(error))


def native_recv(sock: socket.socket, batch: native.Batch, spin_ns: int = 0) -> None:
    _, error = native.recv_all(sock.fileno(), batch, time.monotonic_ns() + WAIT_NS, spin_ns)
    if error:
        raise ConnectionError(native.describe(error))


def serve(told: Connection) -> None:
    """Answers each 16-byte request: count, size, and whether by the native module."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(b"\1") * (32 * MIB))
    request = bytearray(16)
    while sock.recv_into(request, 0, socket.MSG_WAITALL) == len(request):
        count, size, by_native = (
            int.from_bytes(request[at : at + n], "little") for at, n in ((0, 4), (4, 8), (12, 4))
        )
        views = [memory[i * size : (i + 1) * size] for i in range(count)]
        if by_native:
            native_send(sock, views)
        else:
            standard_send(sock, views)
    sock.close()


def socket_ways(sock: socket.socket, count: int, size: int) -> dict[str, Step]:
    views = [memoryview(bytearray(size)) for _ in range(count)]
    pieces = native.Pieces.targets(views)

    def ask(by_native: int) -> bytes:
        return (
            count.to_bytes(4, "little")
            + size.to_bytes(8, "little")
            + by_native.to_bytes(4, "little")
        )

    def standard() -> None:
        sock.sendall(ask(0))
        standard_recv(sock, views)

    def with_views() -> None:
        sock.sendall(ask(1))
        native_recv(sock, views)

    def with_pieces() -> None:
        sock.sendall(ask(1))
        native_recv(sock, pieces)

    def with_limit() -> None:
        sock.settimeout(WAIT_NS / 1e9)
        sock.sendall(ask(0))
        waiting = list(views)
        while waiting:  # a socket with a timeout does not wait for all
            got = sock.recvmsg_into(waiting)[0]
            if not got:
                raise ConnectionError("cut short")
            first = 0
            while first < len(waiting) and got >= len(waiting[first]):
                got -= len(waiting[first])
                first += 1
            waiting = [waiting[first][got:], *waiting[first + 1 :]] if got else waiting[first:]
        sock.settimeout(None)

    def with_spin() -> None:
        sock.sendall(ask(1))
        native_recv(sock, pieces, SPIN_NS)

    return {
        "standard": standard,
        "standard, timeout": with_limit,
        "native": with_pieces,
        "native, views": with_views,
        "native, spin": with_spin,
    }


def measure_copies() -> Figures:
    """GB/s of each way."""
    return {
        f"copy {count} x {size // KIB} KiB": {
            name: count * size / seconds / 1e9
            for name, seconds in take_turns(copy_ways(count, size), RUNS).items()
        }
        for count, size in COPIES
    }


def measure_sockets() -> Figures:
    """GB/s of each way."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    server.start()
    figures: Figures = {}
    if not ours.poll(30):
        raise SystemExit("the serving process did not start")
    with socket.create_connection(("127.0.0.1", ours.recv())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for count, size in BATCHES:
            runs = RUNS * (20 if count * size < MIB else 4)
            taken = take_turns(socket_ways(sock, count, size), runs)
            figures[f"socket {count} x {size // KIB} KiB"] = {
                name: count * size / seconds / 1e9 for name, seconds in taken.items()
            }
    server.join(10)
    return figures


def measure_pieces() -> Figures:
    """Nanoseconds a piece to make a batch of this many views or places in a region."""
    figures: Figures = {}
    for count in (1, 32, 128, 512):
        memory = memoryview(bytearray(count * KIB))
        views = [memory[i * KIB : (i + 1) * KIB] for i in range(count)]
        region = native.Region(memory)
        offsets, lengths = [i * KIB for i in range(count)], [KIB] * count
        ways: dict[str, Step] = {
            "views": lambda views=views: native.Pieces.targets(views),
            "region": lambda r=region, o=offsets, n=lengths: r.pieces(o, n),
        }
        taken = take_turns(ways, 500)
        figures[f"pieces {count}"] = {n: s * 1e9 / count for n, s in taken.items()}
    return figures


def report(figures: Figures, unit: str) -> None:
    for row, ways in figures.items():
        base = next(iter(ways.values()))
        cells = "  ".join(f"{n} {v:.2f} ({v / base:.2f})" for n, v in ways.items())
        print(f"{row:22} {unit}  {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    native.require()
    copies, sockets, pieces = measure_copies(), measure_sockets(), measure_pieces()
    if as_json:
        print(json.dumps({"copy_gbs": copies, "socket_gbs": sockets, "piece_ns": pieces}, indent=2))
        return
    report(copies, "GB/s")
    report(sockets, "GB/s")
    report(pieces, "ns")


if __name__ == "__main__":
    main()
