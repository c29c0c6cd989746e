"""Child processes that end with their parent, and directories that go with their owners.

A parent that is killed with SIGKILL can clean up nothing. So the kernel ends its children, and
whoever starts next removes what it left in the temporary directory.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LOCK = "owner.lock"


def dying_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` for subprocess.Popen: SIGKILL when the *thread* that starts it has ended.

    So the thread has to live as long as the child: the main thread, say.
    """
    prctl = ctypes.CDLL(None).prctl  # before the fork, where nothing may be loaded
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died before
            os._exit(1)

    return prepare


class OwnedDirectory:
    """A new temporary directory, with a lock that its owner and the owner's children hold.

    Making one removes those of the same prefix, and of this user, whose lock nobody holds. ``fd``
    is for the children to inherit.
    """

    def __init__(self, prefix: str) -> None:
        remove_ownerless(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        unready = self.path / f"{_LOCK}.new"
        self.fd = os.open(unready, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unready.rename(self.path / _LOCK)  # so that it is never there and free
        self._open = True

    def remove(self) -> None:
        """Nothing if that was done."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.fd)


def remove_ownerless(prefix: str) -> list[Path]:
    """Remove the directories whose owner and its children are dead; answers which."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if path.stat().st_uid == os.geteuid() and _ownerless(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _ownerless(lock: Path) -> bool:
    """Whether nobody holds it. Raises OSError if there is none, as in a directory that is just
    being made."""
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


__all__ = ["OwnedDirectory", "dying_with_parent", "remove_ownerless"]
