"""Whether the process that made something still runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from p2pkv.processes import start_time

DEAD_PID = 2**22 + 1  # above the kernel's limit


def test_a_process_keeps_its_start_time() -> None:
    started = start_time(os.getpid())
    assert started
    assert start_time(os.getpid()) == started


def test_a_dead_process_has_no_start_time() -> None:
    assert start_time(DEAD_PID) is None


def test_a_zombie_has_no_start_time() -> None:
    """It is there until its parent asks for it, and holds nothing any more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while start_time(child.pid) is not None:
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.01)
    os.kill(child.pid, 0)  # still there
    assert child.wait() == 0
