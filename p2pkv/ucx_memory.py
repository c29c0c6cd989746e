"""Registered memory of a UCX engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from p2pkv.errors import ClosedClient, Conflict, InvalidArgument, OutOfMemory, TooLarge
from p2pkv.ucx_handles import CHUNKS_MAX, KEY_BYTES_MAX, pack_region
from p2pkv.ucx_library import extension, say

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEVICES: Final = {"": "ANY_MEMORY", "host": "HOST", "cuda": "CUDA", "rocm": "ROCM"}


class Region:
    """Registered memory. Made by ``UcxEngine.register``."""

    __slots__ = ("_keep", "_native", "_regions", "address", "device", "handle", "length")

    def __init__(
        self, regions: Regions, native: Any, address: int, length: int, device: str, keep: Any
    ) -> None:
        self._regions = regions
        self._native = native
        self._keep = keep
        self.address = address
        """Where it is in this process."""
        self.length = length
        self.device = device
        self.handle = b""
        """For the peer's ``attach``; a capability: whoever has it may read and write all of it."""

    def close(self) -> None:
        """Unregister; peers' access fails from now on. Any thread. Nothing if it is closed.

        Raises Conflict while batches of this engine use it.
        """
        self._regions.unregister(self)


class Regions:
    """All of an engine's. Any thread, since pinning gigabytes takes its time."""

    def __init__(self, native: Any, chunk_bytes: int) -> None:
        self._native = native
        self._chunk_bytes = chunk_bytes
        self._ffi, self._lib = extension()
        self._lock = threading.Lock()
        self._all: set[Region] = set()

    def register(self, memory: Buffer | tuple[int, int, str]) -> Region:
        """Make memory reachable for peers and usable in batches. Any thread.

        ``memory`` is a writable contiguous buffer, kept until the region is closed, or
        ``(address, length, device)`` of memory that the caller keeps; device is "host", "cuda",
        "rocm" or "" (UCX finds out). Regions do not overlap. Raises InvalidArgument, TooLarge,
        Conflict (overlap), OutOfMemory (it cannot be pinned).
        """
        address, length, device, keep = self._place(memory)
        with self._lock:
            if self._native is None:
                raise ClosedClient("the UCX engine was closed")
            region = Region(self, self._map(address, length, device), address, length, device, keep)
            try:
                region.handle = self._pack(region)
            except BaseException:
                self._lib.p2pkv_ucx_region_unmap(region._native)
                raise
            self._all.add(region)
        return region

    def _place(self, memory: Any) -> tuple[int, int, str, Any]:
        if isinstance(memory, tuple):
            address, length, device = memory
            keep = None
        else:
            try:
                keep = self._ffi.from_buffer("char[]", memory, require_writable=True)
            except (TypeError, ValueError, BufferError) as e:
                raise InvalidArgument(f"memory: must be a writable contiguous buffer: {e}") from e
            address, length, device = int(self._ffi.cast("uintptr_t", keep)), len(keep), "host"
        if device not in DEVICES:
            raise InvalidArgument(f"device = {device!r}: must be one of {', '.join(DEVICES)}")
        if not (length > 0 and address > 0 and address + length <= 1 << 64):
            raise InvalidArgument(f"memory: {length} bytes at {address:#x}")
        if length > CHUNKS_MAX * self._chunk_bytes:
            raise TooLarge(
                f"memory: {length} bytes; at most {CHUNKS_MAX} chunks of "
                f"chunk_bytes = {self._chunk_bytes}"
            )
        return address, length, device, keep

    def _map(self, address: int, length: int, device: str) -> Any:
        out = self._ffi.new("p2pkv_ucx_region **")
        kind = getattr(self._lib, f"P2PKV_UCX_{DEVICES[device]}")
        error = self._lib.p2pkv_ucx_region_map(
            self._native, address, length, self._chunk_bytes, kind, out
        )
        if error == self._lib.P2PKV_UCX_OVERLAP:
            raise Conflict(f"memory: {length} bytes at {address:#x} overlap a registered region")
        if error != 0:
            raise OutOfMemory(
                f"memory: {length} bytes at {address:#x} cannot be registered: {say(error)}; "
                "see the limit of locked memory (`p2pkv doctor`)"
            )
        return out[0]

    def _pack(self, region: Region) -> bytes:
        out, length = self._ffi.new("uint8_t[]", KEY_BYTES_MAX), self._ffi.new("size_t *")
        keys = []
        for chunk in range(self._lib.p2pkv_ucx_region_chunks(region._native)):
            error = self._lib.p2pkv_ucx_region_pack(
                region._native, chunk, out, KEY_BYTES_MAX, length
            )
            if error != 0:
                raise OutOfMemory(f"no remote key for chunk {chunk}: {say(error)}")
            keys.append(bytes(self._ffi.buffer(out, length[0])))
        return pack_region(region.address, region.length, self._chunk_bytes, keys)

    def unregister(self, region: Region) -> None:
        with self._lock:
            if region not in self._all:
                return
            if self._lib.p2pkv_ucx_region_unmap(region._native) != 0:
                raise Conflict(f"region at {region.address:#x}: batches under way use it")
            self._all.discard(region)
            region._keep = None

    def close(self, deadline_ns: int) -> int:
        """Close the native engine and with it all regions. Returns the batches left unfinished."""
        with self._lock:
            native, self._native = self._native, None
            unfinished: int = self._lib.p2pkv_ucx_engine_close(native, deadline_ns)
            for region in self._all:
                region._keep = None
            self._all.clear()
        return unfinished


__all__ = ["DEVICES", "Region", "Regions"]
