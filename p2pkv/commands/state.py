"""What is known on this machine of a cluster that ``p2pkv up`` runs here.

Under ``$XDG_STATE_HOME/p2pkv/<cluster>`` (default ``~/.local/state``): ``lock``, held by the
process that runs the cluster for as long as it lives; ``state.json``; and a log of each process.
Whether the cluster runs is told by the lock alone: a file left by a crash misleads nobody.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import msgspec

from p2pkv.errors import ConfigError
from p2pkv.processes import start_time


class Process(msgspec.Struct, frozen=True):
    """A process, and when it started (clock ticks since boot), since process ids come again."""

    name: str
    pid: int
    started: int
    log: str

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started


class State(msgspec.Struct, frozen=True):
    """The content of ``state.json``."""

    cluster: str
    pid: int
    endpoints: tuple[str, ...]
    processes: tuple[Process, ...] = ()
    ready: bool = False


def directory(cluster: str) -> Path:
    """Where the cluster's files are. Raises ConfigError for a bad name."""
    from p2pkv.etcd_view import NAME

    if not NAME.fullmatch(cluster):
        raise ConfigError(f"cluster = {cluster!r}: must be 1 to 64 of a-z A-Z 0-9 . _ -")
    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(root) / "p2pkv" / cluster


class Lock:
    """The right to run a cluster here. Held until the process ends or ``release`` is called."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @classmethod
    def take(cls, cluster: str) -> Lock | None:
        """None if another process has it."""
        path = directory(cluster) / "lock"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file)

    def release(self) -> None:
        self._file.close()


def read(cluster: str) -> State | None:
    """What was written last, whether or not it runs; None if there is nothing readable."""
    try:
        data = (directory(cluster) / "state.json").read_bytes()
        return msgspec.json.decode(data, type=State)
    except (OSError, msgspec.DecodeError):
        return None


def write(state: State) -> None:
    """Replace the file as a whole."""
    path = directory(state.cluster) / "state.json"
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(path)


def remove(cluster: str) -> None:
    (directory(cluster) / "state.json").unlink(missing_ok=True)


def running(cluster: str) -> State | None:
    """The state of a cluster that runs here now."""
    if not (directory(cluster) / "lock").exists():
        return None
    lock = Lock.take(cluster)
    if lock is not None:
        lock.release()
        return None
    return read(cluster)


def left_behind(cluster: str) -> list[Process]:
    """Processes that live although the one that ran them was killed."""
    state = read(cluster)
    return [p for p in state.processes if p.alive] if state else []
