"""A GPU that is not there: its memory is the host's, and its copies happen when they must.

What is put on a stream is only noted. It is carried out when somebody waits for it, so that a
program that reads or reuses memory too early finds the old bytes in it. What CUDA would not do, or
do by a detour, is refused: copies from or to memory that is neither pinned nor registered, or that
goes beyond one registration; and memory that is unmapped before its registration has ended.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from p2pkv.buffers import address_of
from p2pkv.cuda import Run
from p2pkv.errors import DeviceError


class FakeCuda:
    """A ``cuda.Driver``. ``log`` has what was asked for, in order.

    ``registers``: whether it lets host memory be registered.
    """

    def __init__(self, registers: bool = True) -> None:
        self.log: list[str] = []
        self.pinned_bytes = 0
        self.registers = registers
        self.faults: list[str] = []
        """What was done to registered memory that must not be."""
        self.before_copies: Callable[[], None] | None = None
        """Called once, before the next copy is carried out: what happens while a GPU copies."""
        self._registered: dict[int, int] = {}
        """End of each registration, by where it begins."""
        self._pinned: list[tuple[int, int]] = []
        self._kept: list[bytearray] = []
        self._plain = False
        self._copying: list[tuple[int, int]] = []
        """Begin and end of host memory that copies are under way from or to."""
        self._streams: dict[int, deque[Callable[[], object]]] = {}
        self._devices: dict[int, tuple[int, int]] = {}

    def array(self, data: Any, device: int = 0, stream: int | None = None) -> FakeArray:
        """An array on the GPU with these contents and strides."""
        array = FakeArray(self, np.asarray(data), stream)
        self.has(array, device)
        return array

    def has(self, array: FakeArray, device: int = 0) -> None:
        """The memory of an array is a GPU's."""
        self._devices[array.address] = (device, array.address + array.nbytes)

    @property
    def registered_bytes(self) -> int:
        return sum(end - begin for begin, end in self._registered.items())

    @contextmanager
    def plain_memory(self) -> Iterator[None]:
        """Copies from and to any memory of the host are allowed meanwhile."""
        self._plain = True
        try:
            yield
        finally:
            self._plain = False

    def put_on(self, stream: int, work: Callable[[], object]) -> None:
        """Have something done on a stream, after what is on it already."""
        self._streams.setdefault(stream, deque()).append(work)

    def device_of(self, address: int) -> int:
        for begin, (device, end) in self._devices.items():
            if begin <= address < end:
                return device
        raise DeviceError(f"cuPointerGetAttribute: {address:#x} is not on a GPU")

    def pinned(self, size: int) -> memoryview:
        self.log.append(f"pinned {size}")
        self.pinned_bytes += size
        memory = bytearray(size)
        self._kept.append(memory)  # so that nothing else ever lies where it is
        view = memoryview(memory)
        bisect.insort(self._pinned, (address_of(view), size))
        return view

    def gather(self, device: int, runs: Sequence[Run], stream: int) -> None:
        for host, address, size in runs:
            self._check(device, host, address, size)
            self.log.append(f"to_host {size} on {stream}")
            self._copy(stream, (host, host + size), host, address)

    def scatter(self, device: int, runs: Sequence[Run], stream: int) -> None:
        for host, address, size in runs:
            self._check(device, host, address, size)
            self.log.append(f"to_device {size} on {stream}")
            self._copy(stream, (host, host + size), address, host)

    def _copy(self, stream: int, place: tuple[int, int], target: int, source: int) -> None:
        def move() -> None:
            happens, self.before_copies = self.before_copies, None
            if happens is not None:
                happens()
            ctypes.memmove(target, source, place[1] - place[0])
            self._copying.remove(place)

        self._copying.append(place)
        self.put_on(stream, move)

    def mark(self, device: int, stream: int) -> Callable[[], None]:
        queue = self._streams.setdefault(stream, deque())
        done: list[bool] = []
        queue.append(lambda: done.append(True))

        def wait() -> None:
            self.log.append(f"wait for {stream}")
            while not done:
                queue.popleft()()

        return wait

    def register_host(self, view: memoryview) -> Callable[[], None]:
        begin, size = address_of(view), len(view)
        self.log.append(f"register {size}")
        if not self.registers:
            raise DeviceError("cuMemHostRegister_v2: operation not supported (CUDA error 801)")
        if any(begin < e and b < begin + size for b, e in self._registered.items()):
            raise DeviceError("cuMemHostRegister_v2: part of it is registered (CUDA error 712)")
        self._registered[begin] = begin + size

        def end() -> None:
            self.log.append(f"unregister {size}")
            del self._registered[begin]
            if any(begin < e and b < begin + size for b, e in self._copying):
                self.faults.append("memory was unregistered while it was copied")
            if not _is_mapped(begin, size):
                self.faults.append("memory was unmapped before its registration ended")

        return end

    def _check(self, device: int, host: int, address: int, size: int) -> None:
        if size and self.device_of(address) != device:
            raise DeviceError(f"{address:#x} is not on GPU {device}")
        if self._plain or any(b <= host and host + size <= e for b, e in self._registered.items()):
            return
        near = bisect.bisect_right(self._pinned, (host, 1 << 62)) - 1
        if near < 0 or host + size > sum(self._pinned[near]):
            raise DeviceError(f"{size} bytes at {host:#x} are neither pinned nor registered")


def _is_mapped(begin: int, size: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-size // mmap.PAGESIZE)
    residence = (ctypes.c_ubyte * pages)()
    return not libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), residence)


class FakeArray:
    """What ``__cuda_array_interface__`` shows of a numpy array."""

    def __init__(self, cuda: FakeCuda, host: Any, stream: int | None) -> None:
        self.cuda = cuda
        self.host = host
        self.stream = stream
        base = host
        while isinstance(base.base, np.ndarray):
            base = base.base
        self.address = int(base.__array_interface__["data"][0])
        self.nbytes = max(1, base.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shown = dict(self.host.__array_interface__)
        shown |= {"strides": self.host.strides, "version": 3, "stream": self.stream}
        return shown

    def write_later(self, data: Any) -> None:
        """As a kernel does that was started on the array's stream."""
        self.cuda.put_on(self.stream or 1, lambda: np.copyto(self.host, data))


def synchronize(arrays: Sequence[FakeArray]) -> None:
    """Wait for the streams of these arrays."""
    for array in arrays:
        array.cuda.mark(0, array.stream or 1)()
