"""One process of clients under test: ``python -m p2pkv.testing.workload`` with a job on its input.

The first line of standard input is a Job as JSON. Threads work until the input ends; each writes
what it did to a history file of its own. Every half second a line of JSON on standard output says
how far they are.

Two kinds of keys are used. *Registers* are few and everybody writes them, so that clients collide;
they are replaced by new ones every few seconds, which keeps each one's history short enough to be
checked. *Blocks* are written once by one thread and read by all threads of the process, as an
inference engine does; each thread keeps a bounded number of them and deletes the oldest.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from p2pkv import clock
from p2pkv.async_client import AsyncClient
from p2pkv.client import Client
from p2pkv.config import ClientConfig
from p2pkv.testing.history import Recorder
from p2pkv.testing.recording import Blocking, RecordedClient

REPORT_S = 0.5
JOIN_S = 30.0
REGISTER, BLOCK = "r/", "w/"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do."""

    name: str
    """Of the process; part of the names of its threads, of its blocks and of its files."""
    directory: str
    """Where the history files go."""
    client: ClientConfig
    asynchronous: bool
    """Use AsyncClient."""
    threads: int
    seed: int
    epoch_ns: int
    """Monotonic time from which the generations of registers are counted."""
    registers: int = 24
    generation_s: float = 8.0
    blocks: int = 100
    """Blocks that one thread keeps."""
    value_bytes_max: int = 64 << 10
    operations_per_s: float = 100.0
    """The pace of each thread, at most."""


def has_read_any(kind: type[Any] = Client) -> bool:
    """Whether reads can be told to take any replica."""
    return "read" in inspect.signature(kind.get).parameters


class Worker:
    """What one client thread does, from ``thread.start`` until ``stopped`` is set."""

    def __init__(self, job: Job, index: int, kv: Any, blocks: deque[str],
                 stopped: threading.Event) -> None:  # fmt: skip
        name = f"{job.name}.{index}"
        self.name = name
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.recorder = Recorder(Path(job.directory), name)
        self.failure = ""
        self._job = job
        self._kv = RecordedClient(kv, self.recorder, job.client.timeout_s)
        self._random = random.Random(f"{job.seed}/{name}")
        self._blocks = blocks
        """Of all threads: those that were acknowledged and not yet chosen to be deleted."""
        self._own: deque[str] = deque()
        self._stopped = stopped
        self._number = 0
        self._any: dict[str, Any] = {"read": "any"} if has_read_any() else {}

    def _run(self) -> None:
        acts: list[tuple[Callable[[], object], int]] = [
            (self._get, 30), (self._put, 20), (self._put_if_absent, 8), (self._delete, 6),
            (self._batch_get, 4), (self._batch_put, 4), (self._write_block, 10),
            (self._read_block, 20), (self._read_blocks, 6),
        ]  # fmt: skip
        weights = [weight for _, weight in acts]
        pause = 1 / self._job.operations_per_s
        due = time.monotonic()
        try:
            while not self._stopped.wait(max(0.0, due - time.monotonic())):
                due = max(due, time.monotonic() - 1.0) + pause * self._random.uniform(0.5, 1.5)
                self._random.choices(acts, weights)[0][0]()
        except Exception as e:
            self.failure = f"{self.name}: {type(e).__name__}: {e}"
        finally:
            self.recorder.close()

    # -- registers

    def _register(self) -> str:
        return self._some_registers(1)[0]

    def _some_registers(self, count: int) -> list[str]:
        job = self._job
        generation = (clock.monotonic() - job.epoch_ns) // int(job.generation_s * 1e9)
        chosen = self._random.sample(range(job.registers), min(count, job.registers))
        return [f"{REGISTER}{generation}/{i}" for i in chosen]

    def _tag(self) -> str:
        self._number += 1
        return f"{self.name}-{self._number}"

    def _size(self) -> int:
        """Anything from a few bytes to the largest, small ones as likely as large ones."""
        return int(2 ** self._random.uniform(6, self._job.value_bytes_max.bit_length() - 1))

    def _get(self) -> None:
        self._kv.get(self._register())

    def _put(self) -> None:
        self._kv.put(self._register(), self._tag(), self._size())

    def _put_if_absent(self) -> None:
        self._kv.put(self._register(), self._tag(), self._size(), if_absent=True)

    def _delete(self) -> None:
        self._kv.delete(self._register())

    def _batch_get(self) -> None:
        self._kv.batch_get(self._some_registers(6))

    def _batch_put(self) -> None:
        self._kv.batch_put({key: self._tag() for key in self._some_registers(3)}, self._size())

    # -- blocks

    def _write_block(self) -> None:
        if len(self._own) >= self._job.blocks:
            self._delete_block(self._own.popleft())
        key = f"{BLOCK}{self.name}/{self._number}"
        if self._kv.put(key, self._tag(), self._size(), write_once=True).acknowledged:
            self._own.append(key)
            self._blocks.append(key)

    def _delete_block(self, key: str) -> None:
        self._blocks.remove(key)
        self._kv.delete(key)

    def _some_blocks(self, count: int) -> list[str]:
        known = list(self._blocks.copy())
        return self._random.sample(known, min(count, len(known)))

    def _read_block(self) -> None:
        for key in self._some_blocks(1):
            self._kv.get(key, **self._any)

    def _read_blocks(self) -> None:
        if keys := self._some_blocks(16):
            self._kv.batch_get(keys, **self._any)


def make_client(config: ClientConfig, asynchronous: bool) -> Any:
    """A client with calls that block, and ``close``."""
    if asynchronous:
        return Blocking(lambda: AsyncClient.from_config(config))
    return Client.from_config(config)


def work(job: Job, ended: Callable[[float], bool], tell: Callable[[dict[str, Any]], None]) -> bool:
    """Let the threads work until ``ended`` (which waits so many seconds); whether all went well."""
    stopped = threading.Event()
    kv = make_client(job.client, job.asynchronous)
    blocks: deque[str] = deque()
    workers = [Worker(job, i, kv, blocks, stopped) for i in range(job.threads)]
    for worker in workers:
        worker.thread.start()
    while not ended(REPORT_S):
        tell(progress(workers))
    stopped.set()
    deadline = time.monotonic() + JOIN_S
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [f"{w.name}: a call has not ended" for w in workers if w.thread.is_alive()]
    failures = stuck + [w.failure for w in workers if w.failure]
    tell({**progress(workers), "failures": failures})
    if not stuck:
        kv.close()
    return not failures


def progress(workers: list[Worker]) -> dict[str, Any]:
    return {
        "operations": sum(w.recorder.operations for w in workers),
        "errors": sum(w.recorder.errors for w in workers),
    }


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    good = work(job, ended.wait, lambda line: print(json.dumps(line), flush=True))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
