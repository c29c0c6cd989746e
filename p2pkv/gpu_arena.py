"""The memory of a node on this host, as GPUs reach it: a copy between both is one DMA.

CUDA does that with memory that is registered, which pins its pages. So a mapping is registered in
chunks, each when the first copy touches it, once in a process. Where CUDA refuses (some containers
and hypervisors let nobody pin shared memory) everything goes through ``staging``.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Protocol

from p2pkv import cuda
from p2pkv.arena import SHM_DIRECTORY
from p2pkv.buffers import address_of
from p2pkv.cuda import Driver, Run
from p2pkv.errors import DeviceError

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""To pin that much takes some tens of milliseconds."""


TRIAL_BYTES = 2 << 20


class Mapped(Protocol):
    """A mapping. It is hashable, and can be referred to weakly."""

    view: memoryview


class GpuArena:
    """A mapping that is registered with CUDA as far as it is used. For any thread."""

    def __init__(self, view: memoryview, driver: Driver) -> None:
        self.driver = driver
        self.address = address_of(view)
        self.refused = ""
        """Why CUDA does not register the memory."""
        self._view = view
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._chunks: dict[int, Callable[[], None]] = {}
        """What ends the registration of each chunk."""

    def reach(self, places: Iterable[tuple[int, int]]) -> bool:
        """Register what lies at these (offset, bytes). False: CUDA refuses."""
        wanted = {chunk for offset, size in places for chunk in _chunks_of(offset, size)}
        with self._lock:
            for chunk in sorted(wanted - self._chunks.keys()):
                if self.refused or not self._register(chunk):
                    return False
        return not self.refused

    def _register(self, chunk: int) -> bool:
        start = chunk * CHUNK_BYTES
        try:
            part = self._view[start : start + CHUNK_BYTES]
            self._chunks[chunk] = self.driver.register_host(part)
        except DeviceError as e:
            self.refused = str(e)
            log.warning(
                "CUDA does not register the memory of a node on this host (%s): tensors of GPUs "
                "are copied through pinned memory instead", e,
            )  # fmt: skip
            return False
        return True

    def cut(self, runs: Sequence[Run]) -> list[Run]:
        """The same copies, none of them beyond the end of a chunk."""
        return [piece for run in runs for piece in self._pieces(*run)]

    def _pieces(self, host: int, device: int, size: int) -> Iterator[Run]:
        while size:
            part = min(size, CHUNK_BYTES - (host - self.address) % CHUNK_BYTES)
            yield host, device, part
            host, device, size = host + part, device + part, size - part

    def end(self) -> None:
        """Before the memory is unmapped. In a forked process there is nothing to be ended."""
        with self._lock:
            chunks, self._chunks = self._chunks, {}
            self.refused = self.refused or "the mapping is not used any more"
        if os.getpid() == self._pid:
            for unregister in chunks.values():
                with suppress(DeviceError):  # at the end of the program the driver may be gone
                    unregister()
        self._view = memoryview(b"")


def _chunks_of(offset: int, size: int) -> range:
    return range(offset // CHUNK_BYTES, -(-(offset + size) // CHUNK_BYTES))


_known: weakref.WeakKeyDictionary[Mapped, GpuArena] = weakref.WeakKeyDictionary()


def of(mapping: Mapped) -> GpuArena:
    """A mapping as GPUs reach it. Raises ConfigError where there is no driver.

    It ends with the last reference to the mapping, which is kept mapped until then: who copies
    holds one.
    """
    driver = cuda.driver()
    known = _known.get(mapping)
    if known is not None and known.driver is driver:
        return known
    if known is not None:
        known.end()
    made = _known[mapping] = GpuArena(mapping.view, driver)
    weakref.finalize(mapping, made.end)
    return made


def trial() -> None:
    """Registers a little shared memory, as the memory of nodes is, and ends that.

    Raises ConfigError where there is no driver, DeviceError where it refuses.
    """
    driver = cuda.driver()
    with TemporaryFile(dir=SHM_DIRECTORY) as file:
        file.truncate(TRIAL_BYTES)
        with mmap.mmap(file.fileno(), TRIAL_BYTES) as memory, memoryview(memory) as view:
            driver.register_host(view)()


def forget() -> None:
    """End all registrations; what is used again is registered again."""
    for known in list(_known.values()):
        known.end()
    _known.clear()
