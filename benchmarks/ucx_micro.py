"""Bandwidth of one-sided writes and reads by UCX, beside a plain socket, between two processes.

    python benchmarks/ucx_micro.py                       both here, over TCP
    python benchmarks/ucx_micro.py --tls ""              both here, over what UCX chooses
    python benchmarks/ucx_micro.py serve --bind 10.0.0.2 --port 7777 --tls rc       on one host
    python benchmarks/ucx_micro.py --peer 10.0.0.2:7777 --tls rc                    on the other

Batches of 16 pieces each (fewer from 4 MiB on, so that a batch has at most 64 MiB), medians of the
runs; the bytes are verified after each size. ``--device cuda`` has this side's memory on a GPU (by
cupy). ``--json`` for machines. The serving side answers anyone who can connect: keep it among
machines that you trust, for the minute that it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import xxhash

from p2pkv.ucx_transfer import Peer, RemoteRegion, UcxConfig, UcxEngine

KiB, MiB = 1 << 10, 1 << 20
SIZES = (64 * KiB, 256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB)
TOTAL_MAX, PIECES_MAX = 64 * MiB, 16
SECONDS, RUNS_MIN = 1.0, 5
ORDER = struct.Struct("<cII")  # P(ut), G(et) or H(ash); pieces; bytes each


def engine_for(tls: str) -> UcxEngine:
    return UcxEngine(UcxConfig(options={"TLS": tls} if tls else {}, timeout_s=30))


def views(memory: memoryview, pieces: int, size: int) -> list[memoryview]:
    return [memory[i * size : (i + 1) * size] for i in range(pieces)]


# -- plain sockets --------------------------------------------------------------------------------


def send_all(s: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        sent = s.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


def receive_all(s: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        got = s.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        if got == 0:
            raise ConnectionError("the other side hung up")
        while parts and got >= len(parts[0]):
            got -= len(parts.pop(0))
        if got:
            parts[0] = parts[0][got:]


def answer(s: socket.socket, hello: bytes, memory: memoryview) -> None:
    """One connection of the other side: its orders, one after the other."""
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.sendall(struct.pack("<I", len(hello)) + hello)
    head = bytearray(ORDER.size)
    with s, suppress(ConnectionError):
        while True:
            receive_all(s, [memoryview(head)])
            what, pieces, size = ORDER.unpack(head)
            if pieces * size > TOTAL_MAX:
                return
            if what == b"P":
                receive_all(s, views(memory, pieces, size))
                s.sendall(b"k")
            elif what == b"G":
                send_all(s, views(memory, pieces, size))
            else:
                s.sendall(xxhash.xxh3_64_digest(memory[: pieces * size]))


async def serve(bind: str, port: int, tls: str) -> None:
    engine = engine_for(tls)
    memory = bytearray(os.urandom(MiB) * (TOTAL_MAX // MiB))
    region = engine.register(memory)
    hello = json.dumps(
        {
            "address": engine.address.hex(),
            "handle": region.handle.hex(),
            "transports": engine.transports,
        }
    ).encode()
    listener = socket.create_server((bind, port), family=family(bind))
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)

    def accept() -> None:
        while True:
            s, _ = listener.accept()
            threading.Thread(
                target=answer, args=(s, hello, memoryview(memory)), daemon=True
            ).start()

    threading.Thread(target=accept, daemon=True).start()
    await asyncio.get_running_loop().create_future()


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Plain:
    """The other side by a plain socket."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        length = struct.unpack("<I", self._take(4))[0]
        self.hello: dict[str, Any] = json.loads(self._take(length))

    def _take(self, length: int) -> bytes:
        out = bytearray(length)
        receive_all(self._socket, [memoryview(out)])
        return bytes(out)

    def put(self, memory: memoryview, pieces: int, size: int) -> None:
        send_all(
            self._socket,
            [memoryview(ORDER.pack(b"P", pieces, size)), *views(memory, pieces, size)],
        )
        self._take(1)

    def get(self, memory: memoryview, pieces: int, size: int) -> None:
        self._socket.sendall(ORDER.pack(b"G", pieces, size))
        receive_all(self._socket, views(memory, pieces, size))

    def digest(self, pieces: int, size: int) -> bytes:
        self._socket.sendall(ORDER.pack(b"H", pieces, size))
        return self._take(8)

    def close(self) -> None:
        self._socket.close()


# -- memory here ----------------------------------------------------------------------------------


class Memory:
    """The bytes on this side: of the host, or of a GPU with a copy on the host to look at."""

    def __init__(self, engine: UcxEngine, device: str) -> None:
        self.host = memoryview(bytearray(TOTAL_MAX))
        self._gpu: Any = None
        if device == "host":
            self.region = engine.register(self.host)
        else:
            import cupy

            self._gpu = cupy.zeros(TOTAL_MAX, dtype=cupy.uint8)
            self.region = engine.register((self._gpu.data.ptr, TOTAL_MAX, device))

    def fill(self, data: bytes) -> None:
        self.host[: len(data)] = data
        if self._gpu is not None:
            import cupy
            import numpy as np

            self._gpu[: len(data)] = cupy.asarray(np.frombuffer(data, dtype=np.uint8))
            cupy.cuda.runtime.deviceSynchronize()

    def digest(self, length: int) -> bytes:
        if self._gpu is not None:
            return xxhash.xxh3_64_digest(self._gpu[:length].get().tobytes())
        return xxhash.xxh3_64_digest(self.host[:length])


# -- measuring ------------------------------------------------------------------------------------


async def gb_per_s(work: Callable[[], Awaitable[object]], total: int) -> float:
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < RUNS_MIN or time.perf_counter() < end:
        start = time.perf_counter()
        await work()
        times.append(time.perf_counter() - start)
    return total / statistics.median(times) / 1e9


async def measure(
    engine: UcxEngine, plain: Plain, peer: Peer, remote: RemoteRegion, memory: Memory, size: int
) -> dict[str, Any]:
    pieces = min(PIECES_MAX, TOTAL_MAX // size)
    total, here = pieces * size, memory.region.address
    table = [(here + i * size, remote.key, remote.address + i * size, size) for i in range(pieces)]

    async def socket_put() -> None:
        plain.put(memory.host, pieces, size)

    async def socket_get() -> None:
        plain.get(memory.host, pieces, size)

    row: dict[str, Any] = {"bytes": size, "pieces": pieces}
    row["socket_put"] = await gb_per_s(socket_put, total)
    row["socket_get"] = await gb_per_s(socket_get, total)
    memory.fill(os.urandom(min(total, MiB)) * max(1, total // MiB))
    row["ucx_write"] = await gb_per_s(lambda: engine.write(peer, table), total)
    if plain.digest(pieces, size) != memory.digest(total):
        raise SystemExit(f"{size} bytes: what was written is not what is there")
    memory.fill(bytes(total))
    try:
        row["ucx_read"] = await gb_per_s(lambda: engine.read(peer, table), total)
    except TimeoutError as e:
        row["ucx_read"] = None
        print(f"read of {size} bytes: {e}", file=sys.stderr)
    else:
        if plain.digest(pieces, size) != memory.digest(total):
            raise SystemExit(f"{size} bytes: what was read is not what is there")
    return row


async def run(host: str, port: int, tls: str, device: str) -> dict[str, Any]:
    engine, plain = engine_for(tls), Plain(host, port)
    peer = engine.connect(bytes.fromhex(plain.hello["address"]), f"{host}:{port}")
    remote = peer.attach(bytes.fromhex(plain.hello["handle"]))
    memory = Memory(engine, device)
    rows = [await measure(engine, plain, peer, remote, memory, size) for size in SIZES]
    result = {
        "peer": peer.name,
        "transports": peer.transports,
        "pull_works": engine.pull_works,
        "device": device,
        "rows": rows,
    }
    plain.close()
    await engine.close()
    return result


def run_both(tls: str, device: str) -> dict[str, Any]:
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", "--tls", tls], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        return asyncio.run(run("127.0.0.1", port, tls, device))
    finally:
        server.kill()
        server.wait()


def print_result(result: dict[str, Any]) -> None:
    print(f"peer {result['peer']}, {result['device']} memory, lanes {result['transports']}")
    print(f"reads by hardware: {'yes' if result['pull_works'] else 'no (emulated)'}; GB/s:")
    names = ("socket_put", "ucx_write", "socket_get", "ucx_read")
    print(f"{'batch':>14}" + "".join(f"{name:>12}" for name in names))
    for row in result["rows"]:
        batch = f"{row['pieces']} × {row['bytes'] // KiB} KiB"
        figures = (row[name] for name in names)
        print(
            f"{batch:>14}" + "".join("       stuck" if f is None else f"{f:12.2f}" for f in figures)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mode", nargs="?", choices=["run", "serve"], default="run")
    parser.add_argument("--tls", default="tcp", help='UCX_TLS; "" leaves the choice to UCX')
    parser.add_argument("--peer", help="host:port of one that serves; default: start one here")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--device", choices=["host", "cuda"], default="host")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.mode == "serve":
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(args.bind, args.port, args.tls))
        return
    if args.peer:
        host, _, port = args.peer.rpartition(":")
        result = asyncio.run(run(host.strip("[]"), int(port), args.tls, args.device))
    else:
        result = run_both(args.tls, args.device)
    print(json.dumps(result)) if args.json else print_result(result)


if __name__ == "__main__":
    main()
