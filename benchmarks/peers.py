"""p2pkv beside redis and memcached on one machine, in one run, on the same work.

    python benchmarks/peers.py --json out.json

Starts etcd, one p2pkv node, and each peer whose server and client library are found (redis-server
with redis-py and hiredis, memcached with pylibmc or pymemcache), all on loopback. One client
process makes one call at a time. For each workload all configurations take turns, ROUNDS times;
the figure is the median call of the best round, so that a busy moment of the machine does not
decide. Each ``get`` compares its value, which is in its time; after each round of ``batch_get``
and ``batch_get_into`` one whole batch is compared byte by byte, outside of the timed calls.

``memcpy`` and ``socket`` are what the machine itself can do: a copy by one thread of the same
bytes, and the same bytes through a plain socket pair.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing as mp
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pkv import Client, ClientConfig, EtcdConfig
from p2pkv.etcd_server import EtcdCluster

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 3
BATCH = 32
EXISTS = 100
SIZES = (4 * KIB, 64 * KIB, 1 * MIB)
BATCH_SIZES = (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
WORKING_SET = 256 * MIB
PATHS = ("auto", "tcp", "zmq")

Calls = dict[str, Callable[[int], Any]]


class Work:
    """Keys and values of one size; calls cycle through more than the caches hold."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.n = max(BATCH, min(4096, WORKING_SET // size)) // BATCH * BATCH
        block = os.urandom(size + self.n)
        self.keys = [f"bench/{size}/{i:060d}" for i in range(self.n)]
        self.values = [block[i : i + size] for i in range(self.n)]
        self.buffers = [memoryview(bytearray(size)) for _ in range(BATCH)]

    def batch(self, i: int) -> slice:
        at = i * BATCH % self.n
        return slice(at, at + BATCH)


def check(right: bool) -> None:
    if not right:
        raise RuntimeError("wrong bytes came back")


# --- the stores


class P2PKV:
    def __init__(self, endpoints: tuple[str, ...], path: str) -> None:
        self.name = f"p2pkv-{path}"
        config = ClientConfig(etcd=EtcdConfig(endpoints=endpoints), path=path, timeout_s=60.0)
        self.kv = Client.from_config(config)

    def store(self, w: Work) -> None:
        for i in range(w.n // BATCH):
            s = w.batch(i)
            self.kv.batch_put(zip(w.keys[s], w.values[s], strict=True))

    def calls(self, w: Work) -> Calls:
        kv, keys, values = self.kv, w.keys, w.values
        return {
            "put": lambda i: kv.put(keys[i % w.n], values[i % w.n]),
            "get": lambda i: check(kv.get(keys[i % w.n]) == values[i % w.n]),
            "batch_put": lambda i: kv.batch_put(
                zip(keys[w.batch(i)], values[w.batch(i)], strict=True)
            ),
            "batch_get": lambda i: kv.batch_get(keys[w.batch(i)]),
            "batch_get_into": lambda i: kv.batch_get_into(keys[w.batch(i)], w.buffers),
            "exists": lambda i: kv.batch_exists(exists_keys(w)),
        }

    def clear(self) -> None:
        self.kv.delete_range("bench/")


class Redis:
    name = "redis"

    def __init__(self, port: int) -> None:
        import redis

        self.r = redis.Redis(port=port)
        wait_for(self.r.ping)

    def store(self, w: Work) -> None:
        for i in range(w.n // BATCH):
            s = w.batch(i)
            self.r.mset(dict(zip(w.keys[s], w.values[s], strict=True)))

    def _exists(self, w: Work) -> list[Any]:
        pipe = self.r.pipeline(transaction=False)
        for key in exists_keys(w):
            pipe.exists(key)
        return list(pipe.execute())

    def calls(self, w: Work) -> Calls:
        r, keys, values = self.r, w.keys, w.values
        return {
            "put": lambda i: r.set(keys[i % w.n], values[i % w.n]),
            "get": lambda i: check(r.get(keys[i % w.n]) == values[i % w.n]),
            "batch_put": lambda i: r.mset(
                dict(zip(keys[w.batch(i)], values[w.batch(i)], strict=True))
            ),
            "batch_get": lambda i: r.mget(keys[w.batch(i)]),
            "exists": lambda i: self._exists(w),
        }

    def clear(self) -> None:
        self.r.flushall()


class Memcached:
    """Through pylibmc, or else pymemcache."""

    def __init__(self, port: int) -> None:
        if importlib.util.find_spec("pylibmc"):
            import pylibmc

            self.name = "memcached-pylibmc"
            wait_for(lambda: socket.create_connection(("127.0.0.1", port)).close() is None)
            self.m: Any = pylibmc.Client([f"127.0.0.1:{port}"], binary=True)
        else:
            from pymemcache.client.base import Client as Plain

            self.name = "memcached-pymemcache"
            self.m = Plain(("127.0.0.1", port))
        wait_for(lambda: self.m.set("up", b"1"))

    def store(self, w: Work) -> None:
        for i in range(w.n // BATCH):
            s = w.batch(i)
            self.set_many(dict(zip(w.keys[s], w.values[s], strict=True)))

    def set_many(self, values: dict[str, bytes]) -> None:
        (self.m.set_multi if hasattr(self.m, "set_multi") else self.m.set_many)(values)

    def get_many(self, keys: list[str]) -> Any:
        return (self.m.get_multi if hasattr(self.m, "get_multi") else self.m.get_many)(keys)

    def calls(self, w: Work) -> Calls:
        keys, values = w.keys, w.values
        if w.size >= 4 * MIB:
            return {}
        return {
            "put": lambda i: self.m.set(keys[i % w.n], values[i % w.n]),
            "get": lambda i: check(self.m.get(keys[i % w.n]) == values[i % w.n]),
            "batch_put": lambda i: self.set_many(
                dict(zip(keys[w.batch(i)], values[w.batch(i)], strict=True))
            ),
            "batch_get": lambda i: self.get_many(keys[w.batch(i)]),
        }

    def clear(self) -> None:
        self.m.flush_all()


class Memcpy:
    """What a copy by one thread takes."""

    name = "memcpy"

    def store(self, w: Work) -> None:
        self.source = memoryview(bytearray(os.urandom(MIB) * (w.n * w.size // MIB + 1)))

    def calls(self, w: Work) -> Calls:
        def copy(i: int) -> None:
            at = i * BATCH * w.size % (w.n * w.size)
            for j, buffer in enumerate(w.buffers):
                buffer[:] = self.source[at + j * w.size : at + (j + 1) * w.size]

        return {"batch_get_into": copy}

    def clear(self) -> None:
        del self.source


class Socket:
    """What the bytes take through a plain socket pair, one process sending."""

    name = "socket"

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.sock = socket.create_connection(server.getsockname())
            other, _ = server.accept()
        for end in (self.sock, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.process = mp.get_context("fork").Process(target=_send, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def store(self, w: Work) -> None:
        pass

    def calls(self, w: Work) -> Calls:
        total = BATCH * w.size

        def receive(_: int) -> None:
            self.sock.sendall(total.to_bytes(8, "little"))
            views, left = list(w.buffers), total
            while left:
                got = self.sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
                left -= got
                while got and got >= len(views[0]):
                    got -= len(views.pop(0))
                if got:
                    views[0] = views[0][got:]

        return {"batch_get_into": receive}

    def clear(self) -> None:
        pass


def _send(sock: socket.socket) -> None:
    data = memoryview(os.urandom(BATCH * max(BATCH_SIZES)))
    while asked := sock.recv(8, socket.MSG_WAITALL):
        sock.sendall(data[: int.from_bytes(asked, "little")])


def exists_keys(w: Work) -> list[str]:
    return [k for key in w.keys[: EXISTS // 2] for k in (key, key + "-")]


# --- running


def wait_for(call: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Until a server that was just started answers. Raises the last error, or TimeoutError."""
    end = time.monotonic() + timeout_s
    while True:
        last: Exception = TimeoutError(f"no server answered within {timeout_s} s")
        try:
            if call():
                return
        except Exception as e:
            last = e
        if time.monotonic() > end:
            raise last
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def measure(call: Callable[[int], Any], seconds: float) -> list[float]:
    """Seconds of each call."""
    times: list[float] = []
    for i in range(3):
        call(i)
    end = time.perf_counter() + seconds
    i = 3
    while time.perf_counter() < end or len(times) < 5:
        began = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - began)
        i += 1
    return times


def verify(store: Any, w: Work, workload: str) -> None:
    """Compare one whole batch byte by byte, outside of the timed calls."""
    s = w.batch(1)
    if workload == "batch_get":
        got = store.calls(w)["batch_get"](1)
        values = [got[k] for k in w.keys[s]] if isinstance(got, dict) else got
        check(list(values) == w.values[s])
    elif workload == "batch_get_into" and isinstance(store, P2PKV):
        store.calls(w)["batch_get_into"](1)
        check(all(b == v for b, v in zip(w.buffers, w.values[s], strict=True)))


def run(stores: list[Any], seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in sorted({*SIZES, *BATCH_SIZES}):
        w = Work(size)
        for store in stores:
            store.store(w)
        singles = ["put", "get"] if size in SIZES else []
        batches = ["batch_put", "batch_get", "batch_get_into"] if size in BATCH_SIZES else []
        exists = ["exists"] if size == 4 * KIB else []
        for workload in singles + batches + exists:
            print(f"{workload} {size}", file=sys.stderr, flush=True)
            rows += run_workload(stores, w, workload, seconds)
        for store in stores:
            store.clear()
        gc.collect()
    return rows


def run_workload(stores: list[Any], w: Work, workload: str, seconds: float) -> list[dict[str, Any]]:
    best: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for store in stores:
            call = store.calls(w).get(workload)
            if call is None:
                continue
            times = measure(call, seconds)
            verify(store, w, workload)
            old = best.get(store.name)
            if old is None or statistics.median(times) < statistics.median(old):
                best[store.name] = times
    per_call = EXISTS if workload == "exists" else BATCH if workload.startswith("batch") else 1
    moved = 0 if workload == "exists" else per_call * w.size
    return [
        {
            "store": name,
            "workload": workload,
            "size_bytes": w.size,
            "keys": per_call,
            "p50_us": round(statistics.median(times) * 1e6, 1),
            "p99_us": round(sorted(times)[len(times) * 99 // 100] * 1e6, 1),
            "keys_per_s": round(per_call / statistics.median(times)),
            "gb_per_s": round(moved / statistics.median(times) / 1e9, 3),
        }
        for name, times in best.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Median microseconds of a call, and GB/s where bytes move; ratio of the best p2pkv to the
    best peer (above 1: p2pkv is faster)."""
    names = list(dict.fromkeys(r["store"] for r in rows))
    places = list(dict.fromkeys((r["workload"], r["size_bytes"], r["keys"]) for r in rows))
    by = {(r["store"], r["workload"], r["size_bytes"]): r for r in rows}
    lines = ["| call | " + " | ".join(names) + " | best p2pkv / best peer |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for workload, size, keys in places:
        cells, ours, peers = [], [], []
        for name in names:
            row = by.get((name, workload, size))
            if row is None:
                cells.append("–")
                continue
            speed = f" ({row['gb_per_s']:.2f})" if row["gb_per_s"] else ""
            cells.append(f"{row['p50_us']:.0f}{speed}")
            if name.startswith("p2pkv"):
                ours.append(row["p50_us"])
            elif name not in ("memcpy", "socket"):
                peers.append(row["p50_us"])
        ratio = f"{min(peers) / min(ours):.2f}" if ours and peers else "–"
        what = f"{workload} {keys} × {size // KIB} KiB" if workload != "exists" else "exists × 100"
        lines.append(f"| {what} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--seconds", type=float, default=0.5, help="of calls per round")
    parser.add_argument("--paths", default=",".join(PATHS), help="p2pkv's: auto, tcp, zmq")
    options = parser.parse_args()
    processes: list[subprocess.Popen[bytes]] = []
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as directory, EtcdCluster(1) as etcd:
        try:
            stores = start(options.paths.split(","), etcd, processes, Path(directory), quiet)
            rows = run(stores, options.seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def start(
    paths: list[str],
    etcd: EtcdCluster,
    processes: list[subprocess.Popen[bytes]],
    directory: Path,
    quiet: dict[str, Any],
) -> list[Any]:
    node = [sys.executable, "-m", "p2pkv.cli", "node", "--node-id", "bench"]
    node += ["--etcd-endpoints", ",".join(etcd.endpoints), "--memory-limit-bytes", "2GiB"]
    processes.append(subprocess.Popen([*node, "--prefault"], **quiet))
    stores: list[Any] = [P2PKV(etcd.endpoints, path) for path in paths]
    wait_for(lambda: stores[0].kv.put("up", b"1", timeout=20.0))
    redis_server = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
    if redis_server and importlib.util.find_spec("redis"):
        port = free_port()
        command = [redis_server, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(directory)]  # fmt: skip
        processes.append(subprocess.Popen(command, **quiet))
        stores.append(Redis(port))
    memcached = os.environ.get("MEMCACHED") or shutil.which("memcached")
    libraries = ("pylibmc", "pymemcache")
    if memcached and any(importlib.util.find_spec(name) for name in libraries):
        port = free_port()
        command = [memcached, "-p", str(port), "-l", "127.0.0.1", "-m", "2048", "-I", "8m",
                   "-u", "nobody"]  # fmt: skip
        processes.append(subprocess.Popen(command, **quiet))
        stores.append(Memcached(port))
    return [*stores, Socket(), Memcpy()]


if __name__ == "__main__":
    main()
