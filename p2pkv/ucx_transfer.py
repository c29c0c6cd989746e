"""Bulk bytes between hosts by UCX: one-sided reads and writes in batches.

An engine is one UCX context and worker on the running event loop. ``register`` makes memory
reachable, ``address`` and a region's ``handle`` go to the peer over an authenticated channel,
``connect`` and ``attach`` take the peer's, ``write`` and ``read`` move a batch::

    engine = UcxEngine(UcxConfig())
    region = engine.register(arena)                       # region.handle goes to the peer
    peer = engine.connect(address, "node-3")              # its engine.address
    remote = peer.attach(handle)
    await engine.write(peer, [(region.address, remote.key, remote.address, 4096)])
    await engine.close()

A batch is posted by one native call and ends as one event; an error is the batch's and names the
peer. After an error the peer's endpoint is closed, which fails its other batches too, and the next
batch makes a new one. So do a passed deadline and a cancelled transfer, since UCX has no other way
to stop an access to memory; a transfer ends when UCX has let go of its memory. What a failed write
left in the peer's memory is undefined.

``read`` over anything but RDMA is emulated and slow, and needs the peer's loop to run: where
``pull_works`` is False ask the holder to ``write`` instead.

Everything here belongs to the loop's thread; only ``register`` and ``Region.close`` may be called
on others, and should be where gigabytes are pinned (``asyncio.to_thread``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta as Limit

from p2pkv.config import GiB, Positive, replace
from p2pkv.errors import (
    ClosedClient,
    ConfigError,
    InvalidArgument,
    OutOfMemory,
    Stalled,
    TooLarge,
)
from p2pkv.ucx_handles import ADDRESS_BYTES_MAX, pack_address, unpack_address
from p2pkv.ucx_library import (
    UcxFacts,
    UcxUnavailable,
    available,
    described,
    doctor,
    extension,
    one_sided,
    open_native,
    say,
    transports_of,
)
from p2pkv.ucx_memory import Region, Regions
from p2pkv.ucx_peers import VERBS, Link, Peer, PeerLost, RemoteRegion, Transfer, TransferTimeout

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

EVENTS: Final = 256


class UcxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine."""

    options: dict[str, str] = {}
    """UCX's own, without ``UCX_``: ``{"TLS": "rc", "NET_DEVICES": "mlx5_0:1"}``. They win over the
    environment."""
    timeout_s: Positive = 10.0
    """Deadline of a batch that is given no other."""
    chunk_bytes: Annotated[int, Limit(ge=4096)] = 1 * GiB
    """Memory is registered in chunks of at most this size: one that cannot be pinned is named, and
    no adapter has to take a whole arena as one region."""
    pieces_max: Annotated[int, Limit(ge=1, le=1 << 20)] = 16384
    """Pieces in a batch."""
    batches_max: Annotated[int, Limit(ge=1, le=1 << 20)] = 1024
    """Batches under way, to all peers together."""
    peers_max: Annotated[int, Limit(ge=1, le=1 << 20)] = 16384
    regions_per_peer_max: Annotated[int, Limit(ge=1, le=1 << 16)] = 256
    spin_us: Annotated[float, Limit(ge=0, le=1000)] = 20.0
    """Polling for a batch that was just posted, before the event descriptor is waited for."""
    budget_us: Annotated[float, Limit(ge=10, le=100_000)] = 500.0
    """Work at a time; then other tasks of the loop run."""
    drain_timeout_s: Positive = 2.0
    """How long UCX may take to let go of the memory of a transfer that is given up."""

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if "\0" in name + value:
                raise ConfigError(f"options: {name!r} = {value!r}: must be without NUL")


class Busy(Stalled):
    """As many batches are under way as the configuration allows."""


class UcxEngine:
    """UCX on the running event loop; see the module. Raises UcxUnavailable, ConfigError."""

    def __init__(self, config: UcxConfig | None = None) -> None:
        self.config = replace(config or UcxConfig())
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._ffi, self._lib = extension()
        self._native = open_native(self.config.options)
        self.transports = transports_of(described(self._native))
        """``transport/device`` of all that UCX may use."""
        self.pull_works = bool(one_sided(self.transports))
        """Whether ``read`` is done by hardware; else let the holder ``write``."""
        self._address = self._worker_address()
        self._numbers = itertools.count(1)
        self._peers: set[Peer] = set()
        self._links: dict[int, Link] = {}
        self._transfers: dict[int, Transfer] = {}
        self._regions = Regions(self._native, self.config.chunk_bytes)
        self._closing = False
        self._progress_is_due = False
        self._events = self._ffi.new("p2pkv_ucx_event[]", EVENTS)
        self._more = self._ffi.new("int *")
        self._status = self._ffi.new("int *")
        self._piece = self._ffi.new("size_t *")
        self._fd = self._lib.p2pkv_ucx_engine_event_fd(self._native)
        self._loop.add_reader(self._fd, self._progress)
        self._progress_soon()  # arms the descriptor

    # -- memory

    def register(self, memory: Buffer | tuple[int, int, str]) -> Region:
        """Make memory reachable for peers and usable in batches. Any thread.

        ``memory`` is a writable contiguous buffer, kept until the region is closed, or
        ``(address, length, device)`` of memory that the caller keeps; device is "host", "cuda",
        "rocm" or "" (UCX finds out). Regions do not overlap. Raises InvalidArgument, TooLarge,
        Conflict (overlap), OutOfMemory (it cannot be pinned).
        """
        self._check_open()
        return self._regions.register(memory)

    # -- peers

    @property
    def address(self) -> bytes:
        """This engine's address, for the peer's ``connect``."""
        return self._address

    def _worker_address(self) -> bytes:
        out, length = self._ffi.new("uint8_t[]", ADDRESS_BYTES_MAX), self._ffi.new("size_t *")
        error = self._lib.p2pkv_ucx_engine_address(self._native, out, ADDRESS_BYTES_MAX, length)
        if error != 0:
            self._lib.p2pkv_ucx_engine_close(self._native, 0)
            raise UcxUnavailable(f"no worker address: {say(error)}")
        return pack_address(bytes(self._ffi.buffer(out, length[0])))

    def connect(self, address: bytes, name: str) -> Peer:
        """The peer whose ``address`` this is; ``name`` is what errors call it.

        A peer that was restarted has a new address and needs a new Peer. Raises ProtocolError,
        TooLarge.
        """
        self._check()
        if len(self._peers) >= self.config.peers_max:
            raise TooLarge(f"peer {name!r}: there are {self.config.peers_max} peers, peers_max")
        peer = Peer(self, name, unpack_address(address))
        self._peers.add(peer)
        return peer

    def _open_link(self, peer: Peer) -> Link:
        out, number = self._ffi.new("p2pkv_ucx_link **"), next(self._numbers)
        error = self._lib.p2pkv_ucx_link_open(self._native, number, peer._address, out)
        if error != 0:
            raise PeerLost(peer.name, f"no endpoint: {say(error)}")
        link = Link(peer, number, out[0])
        self._links[number] = link
        peer._link = link
        for remote in peer._remotes.values():
            self._attach(link, remote)
        return link

    def _attach(self, link: Link, remote: RemoteRegion) -> None:
        handle = remote._handle
        error = self._lib.p2pkv_ucx_link_attach(
            link.native,
            remote.key,
            handle.address,
            handle.length,
            handle.chunk_length,
            handle.keys,
            self._ffi.from_buffer("uint64_t[]", handle.ends),
            len(handle.ends),
        )
        if error != 0:
            link.close(f"remote key of region {remote.key}: {say(error)}")
            raise PeerLost(link.peer.name, link.why)

    # -- batches

    def write(
        self,
        peer: Peer,
        pieces: Sequence[tuple[int, int, int, int]] | Buffer,
        timeout: float | None = None,
    ) -> Transfer:
        """Write local memory into the peer's; done when the bytes are there.

        A piece is ``(local address, remote region's key, remote address, length)``, its local
        memory inside one registered region; or give all pieces as one contiguous buffer of
        unsigned 64-bit numbers, four a piece. ``timeout`` in seconds.

        Raises InvalidArgument (a piece is wrong; nothing was sent), TooLarge, Busy. The transfer
        fails with PeerLost or TransferTimeout.
        """
        return self._post(peer, self._lib.P2PKV_UCX_WRITE, pieces, timeout)

    def read(
        self,
        peer: Peer,
        pieces: Sequence[tuple[int, int, int, int]] | Buffer,
        timeout: float | None = None,
    ) -> Transfer:
        """Read the peer's memory into local memory; as ``write``. See ``pull_works``."""
        return self._post(peer, self._lib.P2PKV_UCX_READ, pieces, timeout)

    def _post(self, peer: Peer, verb: int, pieces: Any, timeout: float | None) -> Transfer:
        self._check_peer(peer)
        numbers = _flat(pieces)
        count = len(numbers) // 4
        if count > self.config.pieces_max:
            raise TooLarge(f"pieces: {count} in a batch; at most {self.config.pieces_max}")
        if len(self._transfers) >= self.config.batches_max:
            raise Busy(f"{self.config.batches_max} batches are under way, batches_max")
        link = peer._link or self._open_link(peer)
        transfer = Transfer(self._loop, link, verb, count, sum(numbers[3::4]))
        number = transfer._id = next(self._numbers)
        table = self._ffi.from_buffer("p2pkv_ucx_piece[]", numbers)
        error = self._lib.p2pkv_ucx_post(link.native, verb, number, table, count, self._piece)
        if error != 0:
            raise self._refusal(peer, error, numbers)
        self._transfers[number] = link.transfers[number] = transfer
        transfer._timer = self._loop.call_later(
            self.config.timeout_s if timeout is None else timeout, transfer._expire
        )
        self._progress(int(self.config.spin_us * 1000))
        return transfer

    def _refusal(self, peer: Peer, error: int, numbers: Sequence[int]) -> Exception:
        lib, i = self._lib, self._piece[0]
        local, key, remote, length = numbers[4 * i : 4 * i + 4]
        reasons = {
            lib.P2PKV_UCX_EMPTY: "has no bytes",
            lib.P2PKV_UCX_NO_KEY: f"region {key} is not attached to peer {peer.name!r}",
            lib.P2PKV_UCX_NOT_LOCAL: f"{length} bytes at local address {local:#x} are not inside "
            "one registered region",
            lib.P2PKV_UCX_NOT_REMOTE: f"{length} bytes at remote address {remote:#x} are not "
            f"inside region {key} of peer {peer.name!r}",
        }
        if error not in reasons:
            return OutOfMemory(f"batch of {len(numbers) // 4} pieces: {say(error)}")
        return InvalidArgument(f"pieces[{i}]: {reasons[error]}")

    # -- progress

    def _progress_soon(self) -> None:
        if not self._progress_is_due and not self._closing:
            self._progress_is_due = True
            self._loop.call_soon(self._progress_due)

    def _progress_due(self) -> None:
        self._progress_is_due = False
        if self._native is not None:
            self._progress()

    def _progress(self, spin_ns: int = 0) -> None:
        count = self._lib.p2pkv_ucx_progress(
            self._native,
            spin_ns,
            int(self.config.budget_us * 1000),
            self._events,
            EVENTS,
            self._more,
            self._status,
        )
        if self._status[0] != 0:
            log.error("UCX: no event can be waited for: %s", say(self._status[0]))
            self._loop.call_later(0.01, self._progress_soon)
        for i in range(count):
            event = self._events[i]
            self._on_event(event.what, event.id, event.status)
        if self._more[0]:
            self._progress_soon()

    def _on_event(self, what: int, number: int, status: int) -> None:
        if what == self._lib.P2PKV_UCX_BATCH_DONE:
            transfer = self._transfers.pop(number)
            del transfer._link.transfers[number]
            transfer._end(status)
            if status != 0:
                transfer._link.close(f"a {VERBS[transfer._verb]} failed: {say(status)}")
        elif what == self._lib.P2PKV_UCX_LINK_LOST:
            self._links[number].close(say(status))
        else:
            self._links.pop(number).gone()

    # -- the end

    def counts(self) -> dict[str, int]:
        """Of ``links``, ``batches`` and ``regions`` in native code, and of ``peers``."""
        self._check()
        out = self._ffi.new("p2pkv_ucx_counts *")
        self._lib.p2pkv_ucx_engine_counts(self._native, out)
        return {
            "links": out.links,
            "batches": out.batches,
            "regions": out.regions,
            "peers": len(self._peers),
        }

    async def close(self) -> None:
        """Fail what is under way with PeerLost, unregister all memory, free everything.

        Takes at most about ``drain_timeout_s``, and the time to unpin memory. Nothing if closed.
        """
        if self._closing:
            return
        self._check()
        for link in list(self._links.values()):
            link.close("the engine was closed")
        self._closing = True
        try:
            await self._drain()
        finally:  # also when this is cancelled
            self._loop.remove_reader(self._fd)
            self._native = None
            freed = self._loop.run_in_executor(None, self._regions.close, time.monotonic_ns())
            self._forget()
        if unfinished := await asyncio.shield(freed):
            log.error("UCX did not finish %d batches before it was closed", unfinished)

    async def _drain(self) -> None:
        deadline = self._loop.time() + self.config.drain_timeout_s
        while self._links and self._loop.time() < deadline:
            self._progress()
            await asyncio.sleep(0 if self._more[0] else 0.0005)

    def _forget(self) -> None:
        for link in self._links.values():
            link._abandon()
            link.gone()
        self._links.clear()
        self._transfers.clear()
        self._peers.clear()

    # -- checks

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedClient("the UCX engine was closed")

    def _check(self) -> None:
        self._check_open()
        if threading.get_ident() != self._thread:
            raise InvalidArgument("a UCX engine is used on its event loop's thread only")

    def _check_peer(self, peer: Peer) -> None:
        self._check()
        if peer.closed or peer._engine is not self:
            raise InvalidArgument(f"peer {peer.name!r} is closed or of another engine")


def _flat(pieces: Any) -> memoryview[int]:
    """Four numbers for each piece. Raises InvalidArgument."""
    try:
        if isinstance(pieces, list | tuple):
            numbers = memoryview(array("Q", itertools.chain.from_iterable(pieces)))
            right = len(numbers) == 4 * len(pieces)
        else:
            view = memoryview(pieces)
            right = view.format in ("Q", "L", "=Q", "<Q") and view.itemsize == 8
            numbers = view.cast("B").cast("Q")
            right = right and len(numbers) % 4 == 0
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(f"pieces: must be four unsigned 64-bit numbers each: {e}") from None
    if not right or len(numbers) == 0:
        raise InvalidArgument("pieces: must be at least one, of four unsigned 64-bit numbers each")
    return numbers


__all__ = [
    "Busy",
    "Peer",
    "PeerLost",
    "Region",
    "RemoteRegion",
    "Transfer",
    "TransferTimeout",
    "UcxConfig",
    "UcxEngine",
    "UcxFacts",
    "UcxUnavailable",
    "available",
    "doctor",
]
