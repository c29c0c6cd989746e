"""What the tensor calls need of CUDA: copies between host and GPU, in the order of a stream.

The driver's own interface (``libcuda``), called by ctypes, so that torch, cupy and others are
served alike and none of them is needed. Numbers of streams are those that frameworks hand out;
0 and 1 are the legacy default stream, 2 the per-thread one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from p2pkv.buffers import address_of
from p2pkv.errors import ConfigError, DeviceError

LEGACY_STREAM = 1
_DEVICE_ORDINAL = 9
_PORTABLE = 1
_MAPPED = 2
_DISABLE_TIMING = 2


Run = tuple[int, int, int]
"""A copy: address in host memory, address on the GPU, bytes."""


class Driver(Protocol):
    """Copies and memory of GPUs. Every call raises DeviceError when the driver refuses."""

    def device_of(self, address: int) -> int:
        """The number of the GPU on which this address is."""
        ...

    def pinned(self, size: int) -> memoryview:
        """Host memory that GPUs reach without a detour. It is given back with its last view."""
        ...

    def gather(self, device: int, runs: Sequence[Run], stream: int) -> None:
        """Begin to copy from a GPU, after all that was put on the stream before.

        The host memory must stay until that is done, also when an error is raised.
        """
        ...

    def scatter(self, device: int, runs: Sequence[Run], stream: int) -> None:
        """Begin to copy to a GPU, before all that is put on the stream afterwards. See above."""
        ...

    def mark(self, device: int, stream: int) -> Callable[[], None]:
        """What waits until all is done that was put on the stream before this. Call it once."""
        ...

    def register_host(self, view: memoryview) -> Callable[[], None]:
        """Let GPUs reach host memory without a detour. Returns what ends that.

        That is to be done before the memory is unmapped. No copy may go beyond the view.
        """
        ...


class CudaDriver:
    """The driver of this machine. Raises ConfigError where there is none."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as e:
            raise ConfigError(f"a tensor on a GPU needs NVIDIA's driver: {e}") from None
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._call("cuInit", ctypes.c_uint(0))

    def device_of(self, address: int) -> int:
        number = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(number), _DEVICE_ORDINAL, ctypes.c_uint64(address)
        )
        return number.value

    def pinned(self, size: int) -> memoryview:
        place = ctypes.c_void_p()
        with self._on(0):
            self._call("cuMemHostAlloc", ctypes.byref(place), ctypes.c_size_t(size), _PORTABLE)
        block: Any = (ctypes.c_char * size).from_address(place.value or 0)
        block.keep = _Owned(lambda: self._free(place))
        return memoryview(block).cast("B")

    def _free(self, place: ctypes.c_void_p) -> None:
        with suppress(DeviceError), self._on(0):  # at the end of the program it may be gone
            self._call("cuMemFreeHost", place)

    def gather(self, device: int, runs: Sequence[Run], stream: int) -> None:
        on, size, number = ctypes.c_void_p(stream), ctypes.c_size_t, ctypes.c_uint64
        with self._on(device):
            for host, address, n in runs:
                place = ctypes.c_void_p(host)
                self._call("cuMemcpyDtoHAsync_v2", place, number(address), size(n), on)

    def scatter(self, device: int, runs: Sequence[Run], stream: int) -> None:
        on, size, number = ctypes.c_void_p(stream), ctypes.c_size_t, ctypes.c_uint64
        with self._on(device):
            for host, address, n in runs:
                place = ctypes.c_void_p(host)
                self._call("cuMemcpyHtoDAsync_v2", number(address), place, size(n), on)

    def mark(self, device: int, stream: int) -> Callable[[], None]:
        event = ctypes.c_void_p()
        with self._on(device):
            self._call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
            self._call("cuEventRecord", event, ctypes.c_void_p(stream))

        def wait() -> None:
            with self._on(device):
                self._call("cuEventSynchronize", event)
                self._call("cuEventDestroy_v2", event)

        return wait

    def register_host(self, view: memoryview) -> Callable[[], None]:
        place = ctypes.c_void_p(address_of(view))
        with self._on(0):
            size = ctypes.c_size_t(len(view))
            self._call("cuMemHostRegister_v2", place, size, ctypes.c_uint(_PORTABLE | _MAPPED))

        def end() -> None:
            with self._on(0):
                self._call("cuMemHostUnregister", place)

        return end

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """With the context of this GPU that frameworks use, too."""
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(self._context(device)))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> int:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._cuda, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(error, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            raise DeviceError(f"{name}: {said} (CUDA error {error})")


class _Owned:
    """Calls ``end`` when the last reference to it goes."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def wait_for(streams: Iterable[tuple[int, int]]) -> None:
    """Until all is done that is on these streams (device, stream). Raises DeviceError.

    All are waited for, also if one of them fails.
    """
    failed: DeviceError | None = None
    for wait in [_marked(*stream) for stream in streams]:
        try:
            wait()
        except DeviceError as e:
            failed = e
    if failed is not None:
        raise failed


def _marked(device: int, stream: int) -> Callable[[], None]:
    try:
        return driver().mark(device, stream)
    except DeviceError as e:
        failure = e

    def wait() -> None:
        raise failure

    return wait


_driver: Driver | None = None


def driver() -> Driver:
    """The one in use. Raises ConfigError where there is none."""
    global _driver
    if _driver is None:
        _driver = CudaDriver()
    return _driver


@contextmanager
def using(other: Driver) -> Iterator[None]:
    """Another driver for a while, for tests."""
    global _driver
    before, _driver = _driver, other
    try:
        yield
    finally:
        _driver = before
