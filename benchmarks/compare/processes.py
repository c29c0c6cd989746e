"""Processes of the benchmark: servers, and workers that drive stores."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 180.0
BENCHMARKS = Path(__file__).parent.parent


class StoreFailed(Exception):
    """A store, or the worker that drives it, did not do what was asked."""


class Spec:
    """How to drive a store: its name in tables, its class and the arguments of that.

    ``python``: which interpreter the worker runs on. ``crowd``: arguments that differ for a client
    that is one of many. ``pids``: its server processes, most of whose work is this store's.
    ``limit``: no store, but what the machine can do; nothing to verify.
    """

    def __init__(
        self,
        name: str,
        store: str,
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        crowd: dict[str, Any] | None = None,
        pids: Sequence[int] = (),
        limit: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.store, self.python, self.options = name, store, python, options
        self.environment = environment or {}
        self.crowd = crowd or {}
        self.pids = tuple(pids)
        self.limit = limit


class WorkerProcess:
    """One client process of a store. A context manager."""

    def __init__(self, spec: Spec, out_bytes: int, client: int = 0, **options: Any) -> None:
        self.name = spec.name
        work = {
            "store": spec.store,
            "options": {**spec.options, **options},
            "owner": f"{spec.name}/{client}",
            "out_bytes": out_bytes,
        }
        path = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._process = subprocess.Popen(
            [spec.python, "-m", "compare.worker", json.dumps(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "P2PKV_BENCH_VERBOSE" not in os.environ else None,
            env={**environment, **spec.environment},
        )
        self._pending = b""

    def send(self, order: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([order, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise StoreFailed(f"{self.name}: the worker has died") from None

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Raises StoreFailed."""
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s))
        if "error" in answer:
            raise StoreFailed(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Raises StoreFailed."""
        self.send(order, **arguments)
        return self.answer()

    def _line(self, deadline: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise StoreFailed(f"{self.name}: no answer in time")
                got = os.read(pipe.fileno(), 1 << 16)
                if not got:
                    raise StoreFailed(f"{self.name}: the worker has died ({self._process.wait()})")
                self._pending += got
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def close(self) -> None:
        """Nothing if that was done."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        try:
            self.ask("close")
            self._process.stdin.close()
            self._process.wait(10)
        except (StoreFailed, subprocess.TimeoutExpired):
            pass
        finally:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Servers:
    """Server processes, which end together. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **environment: str) -> None:
        log = self.directory / f"{Path(command[0]).name}-{len(self._processes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                cwd=self.directory, env={**os.environ, **environment},
            )  # fmt: skip
        self._processes.append(process)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._processes[-1].pid

    def start_on_port(self, command: Callable[[int], Sequence[str]], **environment: str) -> int:
        """The port, once the server listens there. Raises StoreFailed."""
        port = free_port()
        self.start(command(port), **environment)
        self.wait(lambda: connects(port), f"{command(port)[0]} on port {port}")
        return port

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until the server that was started last is ready. Raises StoreFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if self._processes[-1].poll() is not None:
                raise StoreFailed(f"{what}: ended with {self._processes[-1].returncode}")
            if time.monotonic() > deadline:
                raise StoreFailed(f"{what}: not ready after {START_TIMEOUT_S} s")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def connects(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that the processes have taken so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
