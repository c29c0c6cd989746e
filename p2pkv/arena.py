"""The memory of a node: one file in shared memory, mapped whole.

The file is named ``p2pkv-<hint>-<pid>-<start time>-<number>`` so that local processes of the same
user can map it, and so that the remains of a killed node can be told from the arena of a running
one: its process is gone *and* nobody holds the lock on the file. The second test is for processes
in other PID namespaces that share /dev/shm.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from p2pkv.buffers import address_of
from p2pkv.errors import ConfigError
from p2pkv.processes import start_time

log = logging.getLogger(__name__)

SHM_DIRECTORY = "/dev/shm"
THP_SWITCH = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
BULK_BYTES: Final = 256 << 10
"""From this size on a write lets other threads run: below, handing over the GIL costs more."""

_NAME = re.compile(r"p2pkv-[A-Za-z0-9._-]*-(\d+)-(\d+)-\d+")
PROOF_BYTES = 16
_HINT = re.compile(r"[A-Za-z0-9._-]{0,64}")
_MADV_POPULATE_WRITE = 23  # not in the mmap module
PREFAULT_PART_BYTES = 256 << 20
PREFAULT_THREADS_MAX = 8
_madvise: Any = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_numbers = itertools.count()


class Arena:
    """``size`` bytes of shared memory. Made by ``create``; a context manager that closes it."""

    def __init__(
        self,
        mapping: mmap.mmap,
        path: Path,
        fd: int,
        index_bytes: int = 0,
        prefault: bool = False,
    ) -> None:
        self._mapping = mapping
        self._fd = fd
        self._prefault = prefault
        self.path = path
        self.proof = os.urandom(PROOF_BYTES)
        """Stands in the file behind the memory: who reads it there has the same file before him."""
        self.size = len(mapping)
        self.index_place = (_index_offset(self.size), index_bytes)
        """Offset and bytes of the part of the file where the published index is to be."""
        os.pwrite(fd, self.proof, self.size)
        self.view = memoryview(mapping)
        self.address = address_of(self.view)
        """Where byte 0 is mapped in this process. Not to be used after ``close``."""
        self.closed = False

    @classmethod
    def create(
        cls,
        size_bytes: int,
        name_hint: str = "",
        *,
        huge_pages: bool = False,
        prefault: bool = False,
        directory: str | Path = SHM_DIRECTORY,
        index_bytes: int = 0,
    ) -> Arena:
        """Makes the file (mode 0600) and maps it; removes those of dead processes first.

        ``index_bytes`` more are for the published index; see ``map_index``.

        Without ``prefault`` pages are taken at the first write, so a full /dev/shm shows only
        then, and kills the process: prefault where others use it too. Raises ConfigError if the
        size is not positive or more than the file system has free, or if the hint is not up to 64
        of ``a-z A-Z 0-9 . _ -``. Where huge pages are asked for and the kernel has them off, a
        warning says what to do, and small ones are taken.

        Prefaulting takes seconds for each 10 GiB, on several threads and without the GIL; from an
        event loop call this by ``asyncio.to_thread``.
        """
        root = Path(directory)
        _check(size_bytes, name_hint)
        huge_pages = huge_pages and _huge_pages_given()
        remove_stale(root)
        _check_room(size_bytes, index_bytes, root)
        path, fd = _create_file(root, name_hint)
        try:
            end = (
                _index_offset(size_bytes) + index_bytes if index_bytes else size_bytes + PROOF_BYTES
            )
            os.ftruncate(fd, end)
            mapping = _map(fd, size_bytes, huge_pages, prefault)
            return cls(mapping, path, fd, index_bytes, prefault)
        except BaseException as e:
            path.unlink(missing_ok=True)
            os.close(fd)
            if isinstance(e, OSError):
                raise ConfigError(f"memory_limit_bytes = {size_bytes}: {root}: {e}") from e
            raise

    def write(self, offset: int, source: bytes | bytearray | memoryview) -> None:
        """Copies a contiguous buffer to ``offset``; from BULK_BYTES on without the GIL.

        Raises ValueError if it does not fit there, is not contiguous, or the arena is closed.
        """
        view = memoryview(source)
        size = view.nbytes
        if self.closed:
            raise ValueError("the arena is closed")
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes at offset {offset}: the arena has {self.size} bytes")
        if not view.c_contiguous:
            raise ValueError("the source buffer is not contiguous")
        if size >= BULK_BYTES:
            with self.view[offset : offset + size] as target:  # a close meanwhile waits for it
                ctypes.memmove(address_of(target), address_of(view), size)
        elif size:
            self.view[offset : offset + size] = view.cast("B")

    def map_index(self) -> mmap.mmap | None:
        """The memory of the published index, all zero at first. None: there is none."""
        offset, size = self.index_place
        if not size:
            return None
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self._prefault else 0)
        return mmap.mmap(self._fd, size, flags, offset=offset)

    def close(self) -> None:
        """Removes the file. The memory itself goes with the last view of it that is still held."""
        if self.closed:
            return
        self.closed = True
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        with suppress(BufferError):
            self.view.release()
            self._mapping.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def remove_stale(directory: str | Path = SHM_DIRECTORY) -> list[Path]:
    """Removes arenas whose process is dead, as far as permissions allow; answers which."""
    removed = []
    for path in Path(directory).iterdir():
        match = _NAME.fullmatch(path.name)
        if match and start_time(int(match[1])) != int(match[2]) and _remove_unlocked(path):
            removed.append(path)
    return removed


def huge_pages_enabled(switch: str | Path = THP_SWITCH) -> bool:
    """Whether the kernel gives huge pages to shared memory on request."""
    try:
        chosen = re.search(r"\[(\w+)\]", Path(switch).read_text())
    except OSError:
        return False
    return chosen is not None and chosen[1] in {"always", "within_size", "advise", "force"}


def _index_offset(size: int) -> int:
    """Behind memory and proof, where a mapping may begin."""
    unit = mmap.ALLOCATIONGRANULARITY
    return -(-(size + PROOF_BYTES) // unit) * unit


def _huge_pages_given() -> bool:
    """Whether the kernel gives them; a warning if not."""
    given = huge_pages_enabled()
    if not given:
        log.warning(
            "huge_pages: the kernel gives none to shared memory, so small pages are taken; for "
            "huge ones write 'advise' to %s (as root) and start again",
            THP_SWITCH,
        )
    return given


def _check(size_bytes: int, name_hint: str) -> None:
    if size_bytes <= 0:
        raise ConfigError(f"memory_limit_bytes = {size_bytes}: must be positive")
    if not _HINT.fullmatch(name_hint):
        raise ConfigError(f"name_hint = {name_hint!r}: must be up to 64 of a-z A-Z 0-9 . _ -")


def _check_room(size_bytes: int, index_bytes: int, root: Path) -> None:
    figures = os.statvfs(root)
    free = figures.f_bavail * figures.f_frsize
    if size_bytes + index_bytes > free:
        beside = f" and an index of {index_bytes}" if index_bytes else ""
        raise ConfigError(
            f"memory_limit_bytes = {size_bytes}{beside}: {root} has {free} bytes free "
            f"of {figures.f_blocks * figures.f_frsize}"
        )


def _create_file(root: Path, hint: str) -> tuple[Path, int]:
    """A new file, locked. Made anew if another process takes it for a dead one's before that."""
    pid = os.getpid()
    for _ in range(16):
        path = root / f"p2pkv-{hint}-{pid}-{start_time(pid)}-{next(_numbers)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)
    raise ConfigError(f"{root}: files made there are removed at once by another process")


def _remove_unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another user's, or just removed
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _map(fd: int, size: int, huge_pages: bool, prefault: bool) -> mmap.mmap:
    mapping = mmap.mmap(fd, size)
    if huge_pages:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if prefault:
        try:
            _populate(mapping)
        except OSError as e:
            if e.errno == errno.ENOMEM:
                raise
            os.posix_fallocate(fd, 0, size)  # older kernels; and it says so if there is no room
    return mapping


def _populate(mapping: mmap.mmap) -> None:
    """Take all pages, in parts on several threads: zeroing them is what takes the time.

    By ctypes, since ``mmap.madvise`` keeps the GIL. Raises OSError.
    """
    with memoryview(mapping) as view:
        base, size = address_of(view), len(view)

        def take(start: int) -> int:
            length = min(PREFAULT_PART_BYTES, size - start)
            if _madvise(base + start, length, _MADV_POPULATE_WRITE) == 0:
                return 0
            return ctypes.get_errno()

        threads = min(PREFAULT_THREADS_MAX, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="p2pkv-prefault") as pool:
            failures = [e for e in pool.map(take, range(0, size, PREFAULT_PART_BYTES)) if e]
    if failures:
        raise OSError(failures[0], os.strerror(failures[0]))
