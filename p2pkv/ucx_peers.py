"""Peers of a UCX engine: endpoints, and batches under way over them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from p2pkv.errors import Conflict, DeadlineExceeded, TooLarge, Unreachable
from p2pkv.ucx_handles import RegionHandle, unpack_region
from p2pkv.ucx_library import status_text

if TYPE_CHECKING:
    from p2pkv.ucx_transfer import UcxEngine

log = logging.getLogger(__name__)

VERBS: Final = ("write", "read")


class PeerLost(Unreachable):
    """The peer died, cannot be reached, or its endpoint was closed under the batch."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"peer {peer!r}: {message}")
        self.peer = peer


class TransferTimeout(DeadlineExceeded):
    """The batch was not done at its deadline; its endpoint was closed.

    ``memory_in_use``: UCX did not let go of the batch's memory in time either and may still access
    it. It stays registered, and must stay allocated, until the engine is closed.
    """

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"peer {peer!r}: {message}")
        self.peer = peer
        self.memory_in_use = False


class RemoteRegion:
    """A peer's registered memory. Made by ``Peer.attach``; pieces name it by ``key``."""

    __slots__ = ("_handle", "address", "key", "length")

    def __init__(self, key: int, handle: RegionHandle) -> None:
        self._handle = handle
        self.key = key
        """Number among the peer's regions; holds across reconnects."""
        self.address = handle.address
        self.length = handle.length


class Transfer(asyncio.Future[int]):
    """A batch under way. Its result is the number of bytes moved.

    ``cancel`` closes the peer's endpoint; the transfer is cancelled when UCX has let go.
    """

    __slots__ = ("_bytes", "_count", "_id", "_link", "_reason", "_timer", "_verb")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, link: Link, verb: int, count: int, total: int
    ) -> None:
        super().__init__(loop=loop)
        self._link = link
        self._verb = verb
        self._count = count
        self._bytes = total
        self._id = 0
        self._reason: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self, msg: Any = None) -> bool:
        """Begin to cancel. Returns False if it is done already."""
        if self.done():
            return False
        self._give_up(asyncio.CancelledError(*([] if msg is None else [msg])))
        return True

    def __str__(self) -> str:
        return f"{VERBS[self._verb]} of {self._count} pieces, {self._bytes} bytes"

    def _expire(self) -> None:
        if not self.done():
            self._give_up(TransferTimeout(self._link.peer.name, f"{self}: not done in time"))

    def _give_up(self, reason: BaseException) -> None:
        if self._reason is None or isinstance(reason, asyncio.CancelledError):
            self._reason = reason
        self._link.close(f"its endpoint was closed after a {VERBS[self._verb]} was given up")

    def _end(self, status: int) -> None:
        """UCX is done with it, or (status 0 and a reason) it is not waited for any longer."""
        if self._timer is not None:
            self._timer.cancel()
        if self.done():
            return
        if isinstance(self._reason, asyncio.CancelledError):
            super().cancel(*self._reason.args)
        elif status == 0 and self._reason is None:
            self.set_result(self._bytes)
        else:
            self.set_exception(self._reason or self._failure(status))

    def _failure(self, status: int) -> PeerLost:
        why = self._link.why or status_text(status)
        return PeerLost(self._link.peer.name, f"{self}: {why}")


class Link:
    """A peer's endpoint, from its making to the end of the last access to memory."""

    __slots__ = ("closed", "drain_timer", "engine", "id", "native", "peer", "transfers", "why")

    def __init__(self, peer: Peer, number: int, native: Any) -> None:
        self.peer = peer
        self.engine = peer._engine
        self.id = number
        self.native = native
        self.transfers: dict[int, Transfer] = {}
        self.why = ""
        self.closed = False
        self.drain_timer: asyncio.TimerHandle | None = None

    def close(self, why: str) -> None:
        """Give up what is under way; the peer makes a new one at the next use."""
        if self.closed:
            return
        self.closed = True
        self.why = self.why or why
        if self.peer._link is self:
            self.peer._link = None
        self.engine._lib.p2pkv_ucx_link_close(self.native)
        loop, config = self.engine._loop, self.engine.config
        self.drain_timer = loop.call_later(config.drain_timeout_s, self._abandon)
        self.engine._progress_soon()

    def _abandon(self) -> None:
        for transfer in self.transfers.values():
            log.error("peer %r: %s: UCX still has its memory", self.peer.name, transfer)
            if transfer._reason is None:
                transfer._reason = TransferTimeout(self.peer.name, f"{transfer}: {self.why}")
            if isinstance(transfer._reason, TransferTimeout):
                transfer._reason.memory_in_use = True
            transfer._end(0)

    def gone(self) -> None:
        if self.drain_timer is not None:
            self.drain_timer.cancel()


class Peer:
    """Another engine. Made by ``UcxEngine.connect``; its endpoint is made at the first batch."""

    __slots__ = ("_address", "_engine", "_link", "_remotes", "closed", "name")

    def __init__(self, engine: UcxEngine, name: str, worker_address: bytes) -> None:
        self._engine = engine
        self._address = worker_address
        self._remotes: dict[int, RemoteRegion] = {}
        self._link: Link | None = None
        self.name = name
        self.closed = False

    def attach(self, handle: bytes) -> RemoteRegion:
        """The region whose ``Region.handle`` this is. Raises ProtocolError, TooLarge."""
        self._engine._check_peer(self)
        limit = self._engine.config.regions_per_peer_max
        if len(self._remotes) >= limit:
            raise TooLarge(f"peer {self.name!r}: has {limit} regions, regions_per_peer_max")
        key = next(k for k in range(limit) if k not in self._remotes)
        remote = RemoteRegion(key, unpack_region(handle))
        if self._link is not None:
            self._engine._attach(self._link, remote)
        self._remotes[key] = remote
        return remote

    def detach(self, remote: RemoteRegion) -> None:
        """Forget a region. Raises Conflict while batches under way use it."""
        self._engine._check_peer(self)
        if self._remotes.get(remote.key) is not remote:
            return
        lib, link = self._engine._lib, self._link
        if link is not None and (
            lib.p2pkv_ucx_link_detach(link.native, remote.key) == lib.P2PKV_UCX_IN_USE
        ):
            raise Conflict(f"peer {self.name!r}: batches under way use region {remote.key}")
        del self._remotes[remote.key]

    @property
    def connected(self) -> bool:
        """Whether it has an endpoint at the moment."""
        return self._link is not None

    @property
    def transports(self) -> tuple[str, ...]:
        """``transport/device`` of the endpoint's lanes; empty without one, or before UCX 1.15."""
        self._engine._check()
        if self._link is None:
            return ()
        out = self._engine._ffi.new("char[]", 4096)
        self._engine._lib.p2pkv_ucx_link_transports(self._link.native, out, 4096)
        return tuple(self._engine._ffi.string(out).decode().split())

    def close(self) -> None:
        """Close the endpoint; batches under way fail with PeerLost."""
        if self.closed:
            return
        self._engine._check()
        self.closed = True
        self._engine._peers.discard(self)
        if self._link is not None:
            self._link.close("closed here")


__all__ = ["VERBS", "Link", "Peer", "PeerLost", "RemoteRegion", "Transfer", "TransferTimeout"]
