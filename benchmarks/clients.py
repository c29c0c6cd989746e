"""Many client processes on one node at once, over TCP: what they get together, and the slowest.

    python benchmarks/clients.py --clients 32

Starts etcd and one node. Each client process makes one call at a time for SECONDS; all begin
together. ``slowest`` is the calls of the slowest client over the mean of all: 1 is perfectly fair.
``node`` is the processor time that the node took for a call, ``values`` how many of the values its
read threads sent (the rest its event loop did).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

from p2pkv import Client, ClientConfig, EtcdConfig
from p2pkv.etcd_server import EtcdCluster

SIZE = 4096
KEYS = 4096
WORK = {"get": 1, "batch_get": 32, "batch_put": 32}
"""Calls, and keys of each."""


def connect(endpoints: tuple[str, ...], path: str) -> Client:
    etcd = EtcdConfig(endpoints=endpoints)
    return Client.from_config(ClientConfig(etcd=etcd, path=path, timeout_s=60.0))


def key(i: int) -> str:
    return f"bench/{i % KEYS:060d}"


def call_of(kv: Client, work: str, value: bytes, first: int) -> Callable[[int], Any]:
    n = WORK[work]
    sets = [[key(first + i * n + j) for j in range(n)] for i in range(KEYS // n)]
    if work == "get":
        return lambda i: kv.get(sets[i % len(sets)][0])
    if work == "batch_get":
        return lambda i: kv.batch_get(sets[i % len(sets)])
    return lambda i: kv.batch_put(dict.fromkeys(sets[i % len(sets)], value))


def client(
    number: int, options: Any, endpoints: tuple[str, ...], work: str, start: Barrier, done: Any
) -> None:
    kv = connect(endpoints, options.path)
    call = call_of(kv, work, bytes(SIZE), number * 131)
    for i in range(3):
        call(i)
    start.wait()
    calls, end = 0, time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        call(calls)
        calls += 1
    done.put(calls)
    kv.close()


def run(options: Any, endpoints: tuple[str, ...], work: str, node: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    start, done = context.Barrier(options.clients + 1), context.Queue()
    processes = [
        context.Process(target=client, args=(i, options, endpoints, work, start, done))
        for i in range(options.clients)
    ]
    for process in processes:
        process.start()
    start.wait()
    before = cpu_seconds(node)
    calls = [done.get() for _ in processes]
    taken = cpu_seconds(node) - before
    for process in processes:
        process.join()
    mean = sum(calls) / len(calls)
    return {
        "work": work,
        "clients": options.clients,
        "keys_per_call": WORK[work],
        "calls_per_s": round(sum(calls) / options.seconds),
        "keys_per_s": round(WORK[work] * sum(calls) / options.seconds),
        "slowest": round(min(calls) / mean, 2),
        "node_us_per_call": round(taken * 1e6 / sum(calls), 1),
    }


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def values_read(kv: Client) -> float:
    return sum(s.figures.get("read_values_total", 0) for s in kv.stats().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--path", default="tcp", help="tcp, zmq or auto")
    parser.add_argument("--work", default=",".join(WORK))
    options = parser.parse_args()
    command = [sys.executable, "-m", "p2pkv.cli", "node", "--node-id", "bench", "--prefault"]
    with EtcdCluster(1) as etcd:
        command += ["--etcd-endpoints", ",".join(etcd.endpoints), "--memory-limit-bytes", "1GiB"]
        node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            kv = connect(etcd.endpoints, options.path)
            kv.batch_put({key(i): bytes(SIZE) for i in range(KEYS)})
            for work in options.work.split(","):
                before = values_read(kv)
                row = run(options, etcd.endpoints, work, node.pid)
                row["values"] = round(values_read(kv) - before)
                print(json.dumps(row), flush=True)
        finally:
            node.terminate()
            node.wait()


if __name__ == "__main__":
    main()
