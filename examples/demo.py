"""Three nodes on this machine keep KV-cache blocks: what happens, and what it costs.

    scripts/demo            prepares an environment and runs this

One process computes blocks and stores them; another finds them by prefix, reads them and compares
every byte with what they must be. Meanwhile one node is drained, and nothing may be lost by that.
With torch and transformers at hand the blocks are those of a small Llama, whose outputs are
compared as well; else blocks of a large model's shapes are made with numpy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import p2pkv

CLUSTER = "demo"
NODES = 3
BUCKETS = 128
MiB = 1 << 20
MEMORY_BYTES = 256 * MiB
STEP_TIMEOUT_S = 100.0
"""The longest that any one step may take."""


class Step(NamedTuple):
    """One line of the table."""

    what: str
    values: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    messages: int = 0
    transfer: bool = True
    """Whether ``seconds`` is the time of moving the bytes alone."""


# -- the cluster ----------------------------------------------------------------------------------


@contextmanager
def cluster(memory_bytes: int) -> Iterator[dict[str, Any]]:
    """``p2pkv up``, and what it says when it is ready; ends all processes."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-demo-") as state:
        up = subprocess.Popen(
            [
                sys.executable, "-m", "p2pkv.cli", "up", "--json", f"--cluster={CLUSTER}",
                f"--nodes={NODES}", f"--memory={memory_bytes}", f"--bucket-count={BUCKETS}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_STATE_HOME": state},
            text=True,
        )  # fmt: skip
        try:
            assert up.stdout is not None
            said = json.loads(up.stdout.readline() or "{}")
            if said.get("event") != "ready":
                raise SystemExit(f"the cluster did not start: {said.get('message', 'no reason')}")
            yield said
        finally:
            up.terminate()
            up.wait(30)


def messages(kv: p2pkv.Client) -> dict[str, int]:
    """Requests that each node has received so far, without those for these figures."""
    return {
        member: sum(
            int(value)
            for name, value in stats.figures.items()
            if name.startswith("requests_")
            and name not in ("requests_stats_total", "requests_refused_total")
        )
        for member, stats in kv.stats().items()
    }


# -- the two processes that use it ----------------------------------------------------------------


def engine(connection: Connection, workload: str, options: dict[str, Any]) -> None:
    """A process with a client and the workload; carries out what it is told by name."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module = importlib.import_module(workload)
    with p2pkv.Client(options["etcd_endpoints"], cluster=CLUSTER) as kv:
        kv.stats()  # connects to all nodes, so that no step is charged for it
        work = module.Workload(kv, options["seed"], options["capacity_bytes"])
        connection.send(("ready", work.title))
        while True:
            try:
                order, argument = connection.recv()
            except EOFError:
                return
            try:
                connection.send(("done", _carry_out(work, order, argument)))
            except Exception as e:
                connection.send(("failed", f"{type(e).__name__}: {e}"))


def _carry_out(work: Any, order: str, argument: Any) -> Step:
    if order == "load while":
        return load_while(work, argument)
    step: Step = Step(*getattr(work, order)())
    return step


def load_while(work: Any, pid: int) -> Step:
    """Load and verify again and again until a process has ended; at least once."""
    rounds = values = size_bytes = 0
    started = time.perf_counter()
    while True:
        last = not os.path.exists(f"/proc/{pid}")
        _, count, size, _ = work.load()
        rounds, values, size_bytes = rounds + 1, values + count, size_bytes + size
        if last:
            what = f"a node is drained; meanwhile all was read and verified {rounds} times"
            seconds = time.perf_counter() - started
            return Step(what, values, size_bytes, seconds, transfer=False)


class Engine:
    """The other end of such a process."""

    def __init__(self, workload: str, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=engine, args=(theirs, workload, options), daemon=True
        )
        self._process.start()
        theirs.close()
        self.title: str = self._receive()

    def start(self, order: str, argument: Any = None) -> None:
        self._connection.send((order, argument))

    def _receive(self) -> Any:
        if not self._connection.poll(STEP_TIMEOUT_S):
            raise SystemExit(f"no answer after {STEP_TIMEOUT_S:.0f} s")
        try:
            outcome, result = self._connection.recv()
        except EOFError:
            raise SystemExit("a process of the demonstration has died") from None
        if outcome == "failed":
            raise SystemExit(f"FAILED: {result}")
        return result

    def finish(self) -> Step:
        step: Step = self._receive()
        return step

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)


# -- what is done with it -------------------------------------------------------------------------


def run(workload: str, seed: int) -> tuple[str, list[Step]]:
    """Everything, in order."""
    free = shutil.disk_usage("/dev/shm").free
    memory_bytes = min(MEMORY_BYTES, int(free * 0.8) // NODES)
    started = time.perf_counter()
    with cluster(memory_bytes) as up:
        steps = [Step(f"etcd and {NODES} nodes start", seconds=time.perf_counter() - started)]
        # After a node has left, the others must have room for everything.
        capacity_bytes = memory_bytes * (NODES - 1) // 2
        options = {"etcd_endpoints": up["etcd_endpoints"], "seed": seed}
        options["capacity_bytes"] = capacity_bytes
        with p2pkv.Client(up["etcd_endpoints"], cluster=CLUSTER) as kv:
            writer = Engine(workload, options)
            steps.append(_measured(kv, writer, "store"))
            reader = Engine(workload, options)
            steps.append(_measured(kv, reader, "match"))
            steps.append(_measured(kv, reader, "load"))
            steps.append(_drain(kv, reader, up))
            steps.append(_measured(kv, reader, "load"))
            writer.close()
            reader.close()
        stopping = time.perf_counter()
    steps.append(Step("everything stops", seconds=time.perf_counter() - stopping))
    return reader.title, steps


def _measured(kv: p2pkv.Client, who: Engine, order: str, argument: Any = None) -> Step:
    before = messages(kv)
    who.start(order, argument)
    step = who.finish()
    return step._replace(messages=_more(messages(kv), before))


def _drain(kv: p2pkv.Client, reader: Engine, up: dict[str, Any]) -> Step:
    """Ask one node to leave (SIGTERM) while the reader goes on."""
    pid = next(p["pid"] for p in up["processes"] if p["name"] == "n2")
    before = messages(kv)
    os.kill(pid, signal.SIGTERM)
    reader.start("load while", pid)
    step = reader.finish()
    return step._replace(messages=_more(messages(kv), before))


def _more(after: dict[str, int], before: dict[str, int]) -> int:
    return sum(count - before.get(member, 0) for member, count in after.items())


def show(title: str, steps: list[Step]) -> None:
    """The table."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("what happened")
    for column in ("values", "MiB", "ms", "GB/s", "messages"):
        table.add_column(column, justify="right")
    for step in steps:
        rate = step.size_bytes / step.seconds / 1e9 if step.transfer and step.size_bytes else 0
        table.add_row(
            step.what,
            f"{step.values:,}" if step.values else "",
            f"{step.size_bytes / MiB:,.1f}" if step.size_bytes else "",
            f"{step.seconds * 1e3:,.1f}",
            f"{rate:.2f}" if rate else "",
            f"{step.messages:,}" if step.messages else "",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=7, help="of all random content")
    parser.add_argument("--numpy", action="store_true", help="no model, even if torch is there")
    arguments = parser.parse_args()
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    workload = "llama_prefix" if has_torch and not arguments.numpy else "kv_blocks"
    print(f"seed {arguments.seed}", flush=True)
    show(*run(workload, arguments.seed))
    print("Every byte that was read was what it had to be, before, while and after a node left.")


if __name__ == "__main__":
    main()
