"""The processes of clients under test: started, watched, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from p2pkv.testing.workload import JOIN_S, Job

END_TIMEOUT_S = JOIN_S + 30


class WorkerProcess:
    """One process of the workload and the last that it said of itself."""

    def __init__(self, job: Job) -> None:
        self.name = job.name
        self.operations = 0
        self.errors = 0
        self.failures: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "p2pkv.testing.workload"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        self._errors = b""
        self._listeners = [
            threading.Thread(target=listen, daemon=True)
            for listen in (self._listen, self._listen_to_errors)
        ]
        for thread in self._listeners:
            thread.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> None:
        """Ask it to end, wait for nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> list[str]:
        """Wait for its end; what went wrong in it."""
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for thread in self._listeners:
            thread.join(5)
        if code and not self.failures:
            tail = self._errors[-2000:].decode(errors="replace")
            self.failures.append(f"{self.name}: exit code {code}: {tail}")
        return self.failures

    def kill(self) -> None:
        """End it at once, whatever its state."""
        if self.running:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            self.operations, self.errors = told["operations"], told["errors"]
            self.failures += told.get("failures", [])

    def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        while chunk := self._process.stderr.read1(1 << 16):  # type: ignore[attr-defined]
            self._errors = (self._errors + chunk)[-1 << 16 :]


class Workers:
    """Several of them. A context manager that leaves none behind."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._processes: list[WorkerProcess] = []

    def __enter__(self) -> Workers:
        self._processes = [WorkerProcess(job) for job in self._jobs]
        return self

    def __exit__(self, *reason: object) -> None:
        for process in self._processes:
            process.kill()

    @property
    def operations(self) -> int:
        return sum(p.operations for p in self._processes)

    @property
    def errors(self) -> int:
        return sum(p.errors for p in self._processes)

    @property
    def all_at_work(self) -> bool:
        """Whether each has done something, or has ended."""
        return all(p.operations or not p.running for p in self._processes)

    def finish(self) -> list[str]:
        """Let each end what it has begun; what went wrong in them."""
        for process in self._processes:
            process.finish()
        return [failure for process in self._processes for failure in process.wait()]


__all__ = ["WorkerProcess", "Workers"]
