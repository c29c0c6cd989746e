"""A UCX engine for blocking callers: one batch at a time, waited for in native code.

Unlike ``ucx_transfer.UcxEngine`` it needs no event loop. It belongs to whoever holds it, one thread
at a time. A batch that fails, or is not done in time, closes its peer's endpoint; when the call
returns UCX has let go of the memory, if need be because the engine was closed, and with it all
connections.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from p2pkv.errors import ClosedClient, OutOfMemory
from p2pkv.remote_memory import Slot, Staging
from p2pkv.ucx_handles import ADDRESS_BYTES_MAX, pack_address, unpack_address, unpack_region
from p2pkv.ucx_library import UcxUnavailable, extension, open_native, say
from p2pkv.ucx_memory import Regions
from p2pkv.ucx_peers import VERBS, PeerLost, TransferTimeout

CHUNK_BYTES: Final = 1 << 30
EVENTS: Final = 16
SPIN_NS: Final = 20_000
TICK_NS: Final = 50_000_000
"""A wait comes back so often, for signals to be handled."""
DRAIN_NS: Final = 2_000_000_000
"""So long UCX may take to let go of a batch that was given up."""
_KEY: Final = 0
"""Number of the only region of each peer."""


class BlockingPeer:
    """Another engine and its region. Its endpoint is made at the first batch."""

    __slots__ = ("_address", "_link", "_number", "_region", "name")

    def __init__(self, name: str, address: bytes, region: bytes) -> None:
        """Raises ProtocolError."""
        self.name = name
        self._address = unpack_address(address)
        self._region = unpack_region(region)
        self._link: Any = None
        self._number = 0
        """Of its link."""

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def memory(self) -> int:
        """Where its region begins."""
        return self._region.address

    @property
    def length(self) -> int:
        return self._region.length


class BlockingEngine:
    """One context and one worker, with one slot of registered memory.

    ``options`` are UCX's, as in UcxConfig. Raises UcxUnavailable, OutOfMemory (the slot cannot
    be registered).
    """

    def __init__(self, slot_bytes: int, options: Mapping[str, str] | None = None) -> None:
        self._ffi, self._lib = extension()
        self._native = open_native(options or {})
        self._regions = Regions(self._native, CHUNK_BYTES)
        self._numbers = itertools.count(1)
        self._peers: dict[int, BlockingPeer] = {}
        """By the number of their link; also of links that are being closed."""
        self._events = self._ffi.new("p2pkv_ucx_event[]", EVENTS)
        self._status = self._ffi.new("int *")
        self._piece = self._ffi.new("size_t *")
        self._staging: Staging | None = None
        try:
            self.address = self._worker_address()
            self._staging = Staging(1, slot_bytes)
            self._slot = self._staging.slots[0]
            region = self._regions.register((self._staging.address, slot_bytes, "host"))
        except BaseException:
            self.close()
            raise
        self.handle = region.handle
        """Of the slot's memory, for a node that is to write to it."""

    @property
    def slot(self) -> Slot:
        return self._slot

    @property
    def closed(self) -> bool:
        return self._native is None

    def _worker_address(self) -> bytes:
        out, length = self._ffi.new("uint8_t[]", ADDRESS_BYTES_MAX), self._ffi.new("size_t *")
        error = self._lib.p2pkv_ucx_engine_address(self._native, out, ADDRESS_BYTES_MAX, length)
        if error != 0:
            raise UcxUnavailable(f"no worker address: {say(error)}")
        return pack_address(bytes(self._ffi.buffer(out, length[0])))

    # -- batches

    def move(
        self,
        peer: BlockingPeer,
        write: bool,
        runs: Sequence[tuple[int, int, int]],
        deadline_ns: int,
    ) -> None:
        """Write or read ``runs``: (place in the slot, place in the peer's region, bytes).

        Raises PeerLost, TransferTimeout; OutOfMemory if nothing was begun.
        """
        if self._native is None:
            raise ClosedClient("the UCX engine was closed")
        self._settle()
        link = peer._link or self._open(peer)
        assert self._staging is not None
        base, memory = self._staging.address, peer.memory
        pieces = self._ffi.new(
            "p2pkv_ucx_piece[]", [(base + at, _KEY, memory + there, n) for at, there, n in runs]
        )
        verb = self._lib.P2PKV_UCX_WRITE if write else self._lib.P2PKV_UCX_READ
        number = next(self._numbers)
        error = self._lib.p2pkv_ucx_post(link, verb, number, pieces, len(runs), self._piece)
        if error != 0:
            raise OutOfMemory(f"a {VERBS[verb]} by UCX was not begun: {say(error)}")
        what = f"{VERBS[verb]} of {len(runs)} pieces, {sum(n for _, _, n in runs)} bytes"
        self._finish(peer, number, what, deadline_ns)

    def _finish(self, peer: BlockingPeer, number: int, what: str, deadline_ns: int) -> None:
        """Wait for a batch."""
        try:
            status = self._await(number, peer, deadline_ns)
        except BaseException:  # an interrupt
            self.close()
            raise
        if status == 0:
            return
        self._close_link(peer)
        if status is None:
            raise TransferTimeout(peer.name, f"{what}: not done in time")
        raise PeerLost(peer.name, f"{what}: {say(status)}")

    def _await(self, number: int, peer: BlockingPeer, deadline_ns: int) -> int | None:
        """The status of a batch, or of its lost link; None at the deadline."""
        spin = SPIN_NS
        while True:
            for what, id, status in self._wait(spin, min(deadline_ns, _soon())):
                if what == self._lib.P2PKV_UCX_BATCH_DONE and id == number:
                    return status
                if what == self._lib.P2PKV_UCX_LINK_LOST and id == peer._number:
                    return status
            if time.monotonic_ns() >= deadline_ns:
                return None
            spin = 0

    def attend(self, fd: int, deadline_ns: int) -> None:
        """Let peers write to the slot until ``fd`` is readable, or for a moment.

        Over anything but RDMA their writes are carried out here.
        """
        if self._native is None:
            raise ClosedClient("the UCX engine was closed")
        self._wait(0, min(deadline_ns, _soon()), fd)

    def _settle(self) -> None:
        """Take in what happened since the last batch."""
        lost = {id for what, id, _ in self._wait(0, 0) if what == self._lib.P2PKV_UCX_LINK_LOST}
        for peer in [p for p in self._peers.values() if p._link and p._number in lost]:
            self._close_link(peer)

    def _wait(self, spin_ns: int, until_ns: int, fd: int = -1) -> list[tuple[int, int, int]]:
        """What happened: (what, id, status)."""
        count = self._lib.p2pkv_ucx_wait(
            self._native, spin_ns, until_ns, fd, self._events, EVENTS, self._status
        )
        events = [(e.what, e.id, e.status) for e in self._events[0:count]]
        for what, id, _ in events:
            if what == self._lib.P2PKV_UCX_LINK_GONE:
                del self._peers[id]
        if self._status[0] != 0:
            raise PeerLost("all", f"UCX cannot be waited for: {say(self._status[0])}")
        return events

    # -- links

    def _open(self, peer: BlockingPeer) -> Any:
        out, number = self._ffi.new("p2pkv_ucx_link **"), next(self._numbers)
        error = self._lib.p2pkv_ucx_link_open(self._native, number, peer._address, out)
        if error != 0:
            raise PeerLost(peer.name, f"no endpoint: {say(error)}")
        peer._link = out[0]
        peer._number = number
        self._peers[number] = peer
        region = peer._region
        error = self._lib.p2pkv_ucx_link_attach(
            peer._link,
            _KEY,
            region.address,
            region.length,
            region.chunk_length,
            region.keys,
            self._ffi.from_buffer("uint64_t[]", region.ends),
            len(region.ends),
        )
        if error != 0:
            self._close_link(peer)
            raise PeerLost(peer.name, f"its remote key: {say(error)}")
        return peer._link

    def forget(self, peer: BlockingPeer) -> None:
        """Close its endpoint."""
        if peer._link is not None and self._native is not None:
            self._close_link(peer)

    def _close_link(self, peer: BlockingPeer) -> None:
        """Returns when UCX has let go of all that was under way on it."""
        link, number = peer._link, peer._number
        peer._link = None
        self._lib.p2pkv_ucx_link_close(link)
        deadline_ns = time.monotonic_ns() + DRAIN_NS
        while number in self._peers:
            if time.monotonic_ns() >= deadline_ns:
                self.close()
                return
            self._wait(0, min(deadline_ns, _soon()))

    def close(self) -> None:
        """Free everything. Nothing of UCX touches memory, ours or a peer's, any more."""
        native, self._native = self._native, None
        if native is None:
            return
        for peer in self._peers.values():
            peer._link = None
        self._peers.clear()
        self._regions.close(time.monotonic_ns())
        if self._staging is not None:
            self._staging.close()


def _soon() -> int:
    return time.monotonic_ns() + TICK_NS


__all__ = ["BlockingEngine", "BlockingPeer"]
