"""A node's arena by UCX, as clients on an event loop reach it.

All calls of a client share one engine and a few slots of registered memory; who finds none free
waits for one. A batch goes round by round: between the slot and the arena by UCX, between the slot
and the caller's memory by a copy on the loop, which a slot is small enough for.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from p2pkv import wire
from p2pkv.clock import MILLISECOND_NS, monotonic
from p2pkv.errors import Conflict, P2PKVError
from p2pkv.remote_memory import RemotePlace, RemotePut, RemoteValues, Round, Slot, Staging, runs
from p2pkv.routing import Lost, Reply
from p2pkv.ucx_peers import PeerLost, Transfer, TransferTimeout
from p2pkv.ucx_transfer import UcxEngine
from p2pkv.wire import Kind, Status

if TYPE_CHECKING:
    from p2pkv.async_path import AsyncPath, Call

SLOTS: Final = 8
SLOT_BYTES: Final = 4 << 20


class AsyncUcx:
    """What a client has of UCX. Raises what ``UcxEngine.register`` raises.

    ``own``: the engine is the client's, and is closed with it.
    """

    def __init__(self, engine: UcxEngine, own: bool) -> None:
        self.engine = engine
        self._own = own
        self._staging = Staging(SLOTS, SLOT_BYTES)
        self.region = engine.register((self._staging.address, self._staging.size, "host"))
        self._free = list(self._staging.slots)
        self._wanted: deque[Callable[[Slot], None]] = deque()
        self._retired = 0
        self._sockets: list[socket.socket] = []

    @property
    def spent(self) -> bool:
        """Whether no slot is left."""
        return self._retired == SLOTS

    def borrow(self, use: Callable[[Slot], None]) -> None:
        """Call ``use`` with a slot, now or when one is free."""
        if self._free:
            use(self._free.pop())
        else:
            self._wanted.append(use)

    def give_back(self, slot: Slot) -> None:
        if self._wanted:
            self._wanted.popleft()(slot)
        else:
            self._free.append(slot)

    def retire(self) -> None:
        """A slot is not used again, as somebody may still write to it."""
        self._retired += 1
        while self.spent and self._wanted:
            self._wanted.popleft()(_NO_SLOT)

    def keep(self, sock: socket.socket) -> None:
        """Keep a connection open, whose end would say that we write no more, until that is so."""
        self._sockets.append(sock)

    async def close(self) -> None:
        """Have UCX let go of everything."""
        if self._own:
            await self.engine.close()
        else:
            try:
                self.region.close()
            except Conflict:  # in use: it goes with its engine
                return
        self._staging.close()
        for sock in self._sockets:
            sock.close()


_NO_SLOT: Any = None


class RemoteArena(RemotePlace):
    """One node's, for one path. Raises ProtocolError, TooLarge."""

    def __init__(self, ucx: AsyncUcx, name: str, body: wire.Attached, reads: str) -> None:
        self.ucx = ucx
        self.peer = ucx.engine.connect(body.address, name)
        try:
            self.remote = self.peer.attach(body.region)
        except BaseException:
            self.peer.close()
            raise
        pull = body.pull if reads == "auto" else reads == "read"
        super().__init__(self.remote.length, body.hold_ms * MILLISECOND_NS, pull)

    def move(self, write: bool, slot: Slot, moves: Round) -> Transfer:
        """Raises P2PKVError if nothing was begun."""
        here, there, key = slot.staging.address + slot.offset, self.remote.address, self.remote.key
        pieces = [(here + at, key, there + offset, n) for at, offset, n in runs(moves)]
        act = self.ucx.engine.write if write else self.ucx.engine.read
        return act(self.peer, pieces)

    def close(self) -> None:
        self.peer.close()


class Job:
    """A batch on its way through a slot. ``path.job_ended`` is called once."""

    def __init__(self, path: AsyncPath, arena: RemoteArena, call: Call) -> None:
        self.path = path
        self.arena = arena
        self.call = call
        self.memory_in_use = False
        """UCX has not let go of the slot, nor of the node's memory."""
        self._slot: Slot = _NO_SLOT
        self._moves: Round = []

    def start(self) -> None:
        self.arena.ucx.borrow(self._begin)

    def _begin(self, slot: Slot) -> None:
        self._slot = slot
        if slot is _NO_SLOT:
            self._fail(Lost("no memory is left for UCX after failures: make a new client"))
        else:
            self._step()

    def _step(self) -> None:
        raise NotImplementedError

    def _moved(self, transfer: Any) -> None:
        error = PeerLost("all", "closed") if transfer.cancelled() else transfer.exception()
        if error is None:
            self._done()
            return
        self.memory_in_use = isinstance(error, TransferTimeout) and error.memory_in_use
        self._fail(Lost(str(error), deadline=isinstance(error, TransferTimeout)))

    def _done(self) -> None:
        raise NotImplementedError

    def _fail(self, why: Lost) -> None:
        self.path.failures += 1
        self.call.answer(why)
        self._end()

    def _end(self) -> None:
        slot, self._slot = self._slot, _NO_SLOT
        self.path.job_ended(self)
        if slot is not _NO_SLOT:
            if self.memory_in_use:
                self.arena.ucx.retire()
            else:
                self.arena.ucx.give_back(slot)


class Fetch(Job):
    """Values from the arena to where they belong."""

    def __init__(self, path: AsyncPath, arena: RemoteArena, call: Call, reply: Reply) -> None:
        super().__init__(path, arena, call)
        self.values = RemoteValues(arena, call.request, reply, SLOT_BYTES)
        self._rounds: Iterator[Round] = iter(self.values.rounds)

    def _step(self) -> None:
        moves = None if self.call.over else next(self._rounds, None)
        if moves is None:
            if not self.call.over:
                self.path.failures = 0
                self.call.answer(self.values.reply())
            self._end()
            return
        self._moves = moves
        if not self.arena.pull:
            self.path.push(self, self.values.pushes(moves, self._slot))
            return
        try:
            transfer = self.arena.move(False, self._slot, moves)
        except P2PKVError as e:
            self._fail(Lost(str(e)))
        else:
            transfer.add_done_callback(self._moved)

    def pushed(self, reply: Reply | None) -> None:
        """The node's answer to PUSH; None: there is none, and it may still be writing."""
        began = reply is None or reply.kind == Kind.STATUSES
        if reply is not None and reply.kind == Kind.STATUSES:
            if not any(reply.body.statuses):
                self._done()
                return
            began = reply.body.statuses[0] != Status.CONFLICT
        self.memory_in_use = began
        self._fail(Lost("the node could not write the values to here"))
        if not began:
            self.path.lose("the node does not know our UCX engine: it is introduced again")

    def _done(self) -> None:
        if monotonic() - self.call.asked_ns > self.arena.hold_ns:
            self._fail(Lost("the values were not held for so long"))
            return
        if not self.call.over:
            self.values.land(self._moves, self._slot)
        self._step()


class Store(Job):
    """Values to where the node made room for them; then they are committed."""

    def __init__(self, path: AsyncPath, arena: RemoteArena, call: Call, put: RemotePut) -> None:
        super().__init__(path, arena, call)
        self.put = put
        self.late = False
        """Whether some of it may still arrive in the arena."""
        self.complete = False
        self._rounds: Iterator[Round] = iter(put.rounds)

    def _step(self) -> None:
        moves = None if self.call.over or self.path.closed else next(self._rounds, None)
        if moves is None:
            self.complete = not self.call.over
            self.path.failures = 0
            self._end()
            return
        try:
            self.put.load(moves, self._slot)
            transfer = self.arena.move(True, self._slot, moves)
        except P2PKVError as e:
            self._fail(Lost(str(e)))
        else:
            transfer.add_done_callback(self._moved)

    def _done(self) -> None:
        self._step()

    def _fail(self, why: Lost) -> None:
        self.late = True
        super()._fail(why)


__all__ = ["SLOT_BYTES", "AsyncUcx", "Fetch", "Job", "RemoteArena", "Store"]
