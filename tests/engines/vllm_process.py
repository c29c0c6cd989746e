"""Driving the engines of ``vllm_engine.py`` from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

HERE = Path(__file__).parent
MARK = "ANSWER "
START_TIMEOUT_S = 900.0
"""An engine needs ten seconds on a machine of its own."""
ANSWER_TIMEOUT_S = 300.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_NONE: Mapping[str, str] = {}


class Engine:
    """One process. Give it up by ``close``.

    ``before``: stands before its command. ``environment``: beside the usual one.
    """

    def __init__(
        self, *, before: Sequence[str] = (), environment: Mapping[str, str] = _NONE, **options: Any
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the engine
        self._process = subprocess.Popen(
            [*before, sys.executable, str(HERE / "vllm_engine.py"), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **ENVIRONMENT, **environment},
        )  # fmt: skip
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._printed: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
            else:
                self._printed.append(line)
        self._lines.put("")

    def wait_started(self) -> None:
        self.answer(START_TIMEOUT_S)

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order, and wait for the answer."""
        self.order(**order)
        return self.answer()

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """That to the oldest order that has none yet."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"no answer within {timeout_s} s\n{self.log()}") from None
        assert line, f"the engine has ended\n{self.log()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log(self, bytes_max: int = 8000) -> str:
        """The end of what it printed."""
        self._errors.seek(0)
        return ("".join(self._printed) + self._errors.read())[-bytes_max:]

    def said(self, text: str) -> bool:
        return text in self.log(1 << 20)

    def close(self) -> int:
        """Let it end in order; its exit code."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
        code = self._process.wait(60)
        self._listener.join(60)
        assert self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            stream.close()
        return code


@contextmanager
def engines(*options: dict[str, Any]) -> Iterator[list[Engine]]:
    """Several engines, which start side by side."""
    started = [Engine(**each) for each in options]
    try:
        for engine in started:
            engine.wait_started()
        yield started
    finally:
        for engine in started:
            engine.close()
