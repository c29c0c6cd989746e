"""One process per node id and host.

A newer boot of a node proves that its older life is over, so that its buckets may start again at
once. That holds only if the older process is really gone, not merely paused: hence a lock that the
kernel gives back when a process ends, and only then. Who starts a node id on another host has to
make sure of it himself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from p2pkv.errors import ConfigError

DIRECTORY = Path("/dev/shm")


class NodeIdInUse(ConfigError):
    """A live process of this host has the node id."""


class HostLock:
    """Held from ``acquire`` to ``release``, or to the end of the process."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def acquire(cls, cluster: str, node: str, directory: Path = DIRECTORY) -> HostLock:
        """Take the lock of a node of the cluster with this fingerprint.

        Also removes the files that killed nodes left. Raises NodeIdInUse if a live process has it.
        """
        remove_stale(directory)
        path = directory / f".p2pkv.{cluster}.{node}.lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
                os.close(fd)
                raise NodeIdInUse(
                    f"node_id = {node!r}: must be unique, and process {holder} on this host has "
                    "it; give this node another node_id or stop that process"
                ) from None
            if _is_at(path, fd):
                break
            os.close(fd)  # its holder removed the file between our open and our lock
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return cls(path, fd)

    def release(self) -> None:
        """Give it back; the file goes first, so that nobody locks one that is about to go."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def remove_stale(directory: Path = DIRECTORY) -> list[Path]:
    """Removes lock files that no process holds, as far as permissions allow; answers which."""
    removed = []
    for path in directory.glob(".p2pkv.*.lock"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, fd):
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
