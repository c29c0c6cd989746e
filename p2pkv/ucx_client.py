"""A node's arena by UCX, as a blocking client reaches it."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pkv import wire
from p2pkv.clock import MILLISECOND_NS
from p2pkv.errors import ClosedClient, OutOfMemory
from p2pkv.remote_memory import RemotePlace, RemotePut, RemoteValues, runs
from p2pkv.routing import Reply
from p2pkv.ucx_blocking import BlockingEngine, BlockingPeer
from p2pkv.ucx_peers import PeerLost, TransferTimeout
from p2pkv.wire import Kind, Status

FAILURES = (PeerLost, TransferTimeout, OutOfMemory, ClosedClient)
"""Of one attempt, after which there may be another."""

Ask = Callable[[wire.Push], Reply]
"""Has the node write, and waits for its answer. Raises what it likes if there is none."""


class RemoteArena(RemotePlace):
    """One node's. It may be used until ``engine.closed``.

    Raises ProtocolError if what the node said makes no sense.
    """

    def __init__(self, engine: BlockingEngine, name: str, body: wire.Attached, reads: str) -> None:
        pull = body.pull if reads == "auto" else reads == "read"
        self.peer = BlockingPeer(name, body.address, body.region)
        super().__init__(self.peer.length, body.hold_ms * MILLISECOND_NS, pull)
        self.engine = engine
        self.stranger = False
        """The node does not know our engine (any more): it is to be introduced again."""

    def fetch(self, values: RemoteValues, asked_ns: int, ask: Ask, deadline_ns: int) -> None:
        """Bring all values to where they belong. Raises FAILURES, and what ``ask`` raises."""
        self._check()
        slot = self.engine.slot
        for moves in values.rounds:
            if self.pull:
                self.engine.move(self.peer, False, runs(moves), deadline_ns)
            else:
                self._have_written(values.pushes(moves, slot), ask)
            if time.monotonic_ns() - asked_ns > self.hold_ns:
                raise TransferTimeout(self.peer.name, "the values were not held for so long")
            values.land(moves, slot)

    def _have_written(self, push: wire.Push, ask: Ask) -> None:
        """A node that does not say that it is done may still be writing to the slot."""
        try:
            reply = ask(push)
            if reply.kind == Kind.STATUSES and not any(reply.body.statuses):
                return
            began = reply.kind == Kind.STATUSES and reply.body.statuses[0] != Status.CONFLICT
        except BaseException:
            self.engine.close()
            raise
        if began:
            self.engine.close()
        else:
            self.stranger = True
        raise PeerLost(self.peer.name, f"the node could not write to here: {_said(reply)}")

    def store(self, put: RemotePut, deadline_ns: int) -> None:
        """Write all values to where the node made room. Raises FAILURES."""
        self._check()
        slot = self.engine.slot
        for moves in put.rounds:
            put.load(moves, slot)
            self.engine.move(self.peer, True, runs(moves), deadline_ns)

    def _check(self) -> None:
        """Another batch of the same exchange may have failed, and closed the engine."""
        if self.engine.closed:
            raise ClosedClient("the UCX engine was closed")

    def close(self) -> None:
        if not self.engine.closed:
            self.engine.forget(self.peer)


def _said(reply: Reply) -> str:
    if reply.kind == Kind.STATUSES:
        return Status(reply.body.statuses[0]).name.lower()
    return str(getattr(reply.body, "message", "an unexpected answer"))


__all__ = ["FAILURES", "RemoteArena"]
