"""A node id belongs to one process of a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from p2pkv.errors import ConfigError
from p2pkv.hostlock import HostLock

HOLD = """
import sys, time
from pathlib import Path
from p2pkv.hostlock import HostLock
lock = HostLock.acquire("c", "n", Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    lock = HostLock.acquire("c", "n", tmp_path)
    with pytest.raises(ConfigError, match=rf"node_id = 'n'.*process {os.getpid()} "):
        HostLock.acquire("c", "n", tmp_path)
    lock.release()


def test_another_node_or_cluster_is_another_lock(tmp_path: Path) -> None:
    locks = [HostLock.acquire(*name, tmp_path) for name in (("c", "n"), ("c", "m"), ("d", "n"))]
    for lock in locks:
        lock.release()


def test_a_released_lock_leaves_no_file_and_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        lock = HostLock.acquire("c", "n", tmp_path)
        lock.release()
        lock.release()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("paused", [False, True], ids=["running", "stopped"])
def test_a_live_process_keeps_it_and_a_killed_one_does_not(tmp_path: Path, paused: bool) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        if paused:
            holder.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match=str(holder.pid)):
            HostLock.acquire("c", "n", tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    HostLock.acquire("c", "n", tmp_path).release()


def test_a_file_that_vanished_before_it_was_locked_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = HostLock.acquire("c", "n", tmp_path)
    real_open, opened = os.open, []

    def open_then_lose(path: Path, *args: int) -> int:
        fd = real_open(path, *args)
        if not opened:
            first.release()
        opened.append(fd)
        return fd

    monkeypatch.setattr(os, "open", open_then_lose)
    second = HostLock.acquire("c", "n", tmp_path)
    assert len(opened) == 2
    monkeypatch.undo()
    with pytest.raises(ConfigError):
        HostLock.acquire("c", "n", tmp_path)
    second.release()


def test_what_killed_holders_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    held = HostLock.acquire("c", "held", tmp_path)
    killed = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "held\n"
    killed.kill()
    killed.communicate()
    assert (tmp_path / ".p2pkv.c.n.lock").exists()
    other = HostLock.acquire("d", "other", tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {".p2pkv.c.held.lock", ".p2pkv.d.other.lock"}
    held.release()
    other.release()
