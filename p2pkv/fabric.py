"""UCX at a node: its arena for one-sided access, and the clients that may be written to.

Clients reach the arena by themselves; the node has nothing to do for that, but to be told of it
over the control connection (ATTACH), which hands out the capabilities. Where one-sided reads are
not done by hardware, the node writes what a client holds a token of into that client's memory
(PUSH).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from p2pkv import ucx_library, wire
from p2pkv.answers import Frames, Handler
from p2pkv.arena import Arena
from p2pkv.clock import MILLISECOND_NS
from p2pkv.errors import ConfigError, P2PKVError, ProtocolError
from p2pkv.objects import HEADER_BYTES, Object
from p2pkv.paths import Ability
from p2pkv.sessions import Deferred, Response, Session, Sessions
from p2pkv.store import Store
from p2pkv.ucx_memory import Region
from p2pkv.ucx_peers import Peer, RemoteRegion
from p2pkv.ucx_transfer import UcxConfig, UcxEngine, UcxUnavailable
from p2pkv.wire import Kind, Status

log = logging.getLogger("p2pkv.node")


class Fabric:
    """The engine of a node. Made by ``open``."""

    def __init__(self, engine: UcxEngine, region: Region) -> None:
        self.engine = engine
        self.ability = Ability.RDMA if engine.pull_works else Ability.TCP
        self.pushes_total = 0
        self.pushed_bytes_total = 0
        self.push_failures_total = 0
        self._region = region
        self._clients: dict[bytes, tuple[Peer, RemoteRegion]] = {}

    @classmethod
    async def open(cls, wanted: str, arena: Arena) -> Fabric | None:
        """An engine with the arena registered, which takes its time; None: there is to be none.

        ``wanted`` is ``NodeConfig.ucx``. Raises ConfigError if it is "on" and there can be none.
        """
        if wanted == "off" or (wanted == "auto" and not ucx_library.rdma_devices()):
            return None
        try:
            engine = UcxEngine(UcxConfig(options=ucx_library.options_for(wanted)))
        except UcxUnavailable as e:
            _without(wanted, e)
            return None
        if wanted == "auto" and not engine.pull_works:
            await engine.close()
            return None
        place = (arena.address, arena.size, "host")
        try:
            return cls(engine, await asyncio.to_thread(engine.register, place))
        except P2PKVError as e:
            await engine.close()
            _without(wanted, e)
            return None
        except BaseException:
            await engine.close()
            raise

    @property
    def clients(self) -> int:
        """How many may be written to."""
        return len(self._clients)

    def attach(self, session: Session, body: wire.Attach, hold_ms: int) -> wire.Attached:
        """Know a client's engine, in the place of its former one. Raises ProtocolError."""
        self.forget(session)
        peer = self.engine.connect(body.address, f"client {session.id.hex()}")
        try:
            self._clients[session.id] = peer, peer.attach(body.region)
        except BaseException:
            peer.close()
            raise
        region = self._region
        return wire.Attached(
            self.engine.address, region.handle, region.length, hold_ms, self.engine.pull_works
        )

    def forget(self, session: Session) -> None:
        """The session has ended."""
        known = self._clients.pop(session.id, None)
        if known is not None:
            known[0].close()

    def push(
        self, session: Session, body: wire.Push, sessions: Sessions, store: Store, now: int
    ) -> Response | Deferred:
        """Write what a token holds into the client's memory; answered when it is there.

        Raises ProtocolError, Busy.
        """
        known = self._clients.get(session.id)
        token = sessions.touch_token(session, body.token, now)
        if known is None or token is None:
            return _statuses(Status.CONFLICT)
        peer, remote = known
        pieces = self._pieces(body, token.items, remote)
        release = partial(store.release_batch, token.items)
        store.acquire_batch(token.items)
        try:
            transfer = self.engine.write(peer, pieces)
        except BaseException:
            release()
            raise
        answer = Deferred()
        transfer.add_done_callback(partial(self._pushed, answer, release))
        return answer

    def _pieces(
        self, body: wire.Push, items: Any, remote: RemoteRegion
    ) -> list[tuple[int, int, int, int]]:
        if not len(body.items) == len(body.starts) == len(body.sizes) == len(body.targets):
            raise ProtocolError("a push whose lists differ in length")
        base = self._region.address - HEADER_BYTES
        pieces = []
        for i, start, size, target in zip(
            body.items, body.starts, body.sizes, body.targets, strict=True
        ):
            item: Object | None = items[i] if i < len(items) else None
            if item is None or start + size > HEADER_BYTES + item.size:
                raise ProtocolError("a push of something that its token does not hold")
            if target + size > remote.length:
                raise ProtocolError("a push to outside of the client's memory")
            pieces.append((base + item.offset + start, remote.key, remote.address + target, size))
        return pieces

    def _pushed(
        self,
        answer: Deferred,
        release: Callable[[], None],
        transfer: asyncio.Future[int],
    ) -> None:
        release()
        self.pushes_total += 1
        failed = transfer.cancelled() or transfer.exception() is not None
        if failed:
            self.push_failures_total += 1
            if not transfer.cancelled():
                log.info("a push was not done: %s", transfer.exception())
        else:
            self.pushed_bytes_total += transfer.result()
        answer.complete(_statuses(Status.STALLED if failed else Status.OK))

    async def close(self) -> None:
        """Unregister the arena, and end what is under way."""
        self._clients.clear()
        await self.engine.close()


class OneSided:
    """Requests that prepare one-sided access, or ask for it. ``fabric``: None if there is none."""

    def __init__(self, fabric: Fabric | None, sessions: Sessions, store: Store) -> None:
        self._fabric = fabric
        self._sessions = sessions
        self._store = store

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What clients on other hosts ask."""
        return {Kind.ATTACH: self._on_attach, Kind.PUSH: self._on_push}

    def _on_attach(self, session: Session, body: wire.Attach, frames: Frames, now: int) -> Response:
        if self._fabric is None or session.shared is not None:
            where = "this node has no UCX" if self._fabric is None else "on control connections"
            raise ProtocolError(f"ATTACH: {where}")
        hold_ms = max(1, self._sessions.hold_ns // MILLISECOND_NS)
        return Kind.ATTACHED, self._fabric.attach(session, body, hold_ms), ()

    def _on_push(
        self, session: Session, body: wire.Push, frames: Frames, now: int
    ) -> Response | Deferred:
        if self._fabric is None or session.shared is None:
            where = "this node has no UCX" if self._fabric is None else "on data connections only"
            raise ProtocolError(f"PUSH: {where}")
        return self._fabric.push(session, body, self._sessions, self._store, now)


def _without(wanted: str, reason: Exception) -> None:
    if wanted == "on":
        raise ConfigError(f"ucx = 'on': {reason}") from None
    log.warning("no UCX, so other hosts use plain sockets: %s", reason)


def _statuses(status: Status) -> Response:
    return Kind.STATUSES, wire.Statuses(bytes([status])), ()


__all__ = ["Fabric", "OneSided"]
