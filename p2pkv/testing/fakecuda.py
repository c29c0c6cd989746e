"""A GPU that is not there: its memory is the host's, and its copies happen when they must.

What is put on a stream is only noted. It is carried out when somebody waits for it, so that a
program that reads or reuses memory too early finds the old bytes in it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from p2pkv.buffers import address_of
from p2pkv.errors import DeviceError


class FakeCuda:
    """A ``cuda.Driver``. ``log`` has what was asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned_bytes = 0
        self.registered: list[memoryview] = []
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
        return memoryview(bytearray(size))

    def to_host(self, device: int, target: memoryview, address: int, stream: int) -> None:
        self._check(device, address, len(target))
        self.log.append(f"to_host {len(target)} on {stream}")
        self.put_on(stream, lambda: _move(address_of(target), address, target))

    def to_device(self, device: int, address: int, source: memoryview, stream: int) -> None:
        self._check(device, address, len(source))
        self.log.append(f"to_device {len(source)} on {stream}")
        self.put_on(stream, lambda: _move(address, address_of(source), source))

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
        self.registered.append(view)
        return lambda: self.registered.remove(view)

    def _check(self, device: int, address: int, size: int) -> None:
        if size and self.device_of(address) != device:
            raise DeviceError(f"{address:#x} is not on GPU {device}")


def _move(target: int, source: int, held: memoryview) -> None:
    ctypes.memmove(target, source, len(held))


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
