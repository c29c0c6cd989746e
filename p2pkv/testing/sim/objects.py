"""The objects of one node: a dict for each bucket, and who waits for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pkv.instructions import Entry
from p2pkv.replicas import Committed
from p2pkv.replicated import Op, OpKind
from p2pkv.types import BucketId

from .audit import Auditor

Store = dict[bytes, tuple[Any, int]]
"""Value and time to live by key."""


class Staged:
    """A value that takes memory until it is applied or discarded."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Ticket:
    """Who waits for an operation: told True (committed) or False (outcome unknown), once."""

    __slots__ = ("entry", "tell")

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self.tell: list[Callable[[bool], None]] = [tell]
        self.entry: Entry | None = None

    def done(self, committed: bool) -> None:
        waiting, self.tell = self.tell, []
        for tell in waiting:
            tell(committed)


def change(store: Store, op: Op, value: Any) -> list[bytes]:
    """Carry out an operation; the keys that it concerned."""
    key, kind = op.key, op.kind
    if kind == OpKind.PUT:
        store[key] = (value, op.ttl_ms)
    elif kind in (OpKind.DELETE, OpKind.EVICT):
        store.pop(key, None)
    elif kind == OpKind.EXPIRE:
        if key in store:
            store[key] = (store[key][0], op.ttl_ms)
    elif kind == OpKind.DELETE_RANGE:
        keys = [k for k in store if k.startswith(key)]
        for k in keys:
            del store[k]
        return keys
    return [key]


class SimObjects:
    """See ``p2pkv.replicas.Objects``."""

    def __init__(self, life: Any, auditor: Auditor) -> None:
        self.life = life
        self.auditor = auditor
        self.stores: dict[int, Store] = {}
        self.dirty: dict[int, set[bytes]] = {}
        """Keys changed since a copy of the bucket began."""
        self.staged = 0

    def stage(self, value: Any) -> Staged:
        self.staged += 1
        return Staged(value)

    def _unstage(self, staged: Any) -> Any:
        self.staged -= 1
        return staged.value

    def apply(self, committed: Sequence[Committed], now: int) -> None:
        for bucket, entries, copies in committed:
            for entry in entries:
                value = self._unstage(entry.staged)
                self._carry_out(bucket, entry.op, value)
                self.auditor.applied(self.life, bucket, entry, value, copies)
                if entry.ticket is not None:
                    entry.ticket.done(True)

    def write(self, bucket: BucketId, seq: int, origin: int, op: Op, value: Any) -> None:
        """Carry out an operation past the log, where nobody else must have it."""
        self._carry_out(bucket, op, value)
        self.auditor.applied(self.life, bucket, Entry(seq, origin, op, None), value, 1)

    def _carry_out(self, bucket: int, op: Op, value: Any) -> None:
        keys = change(self.stores[bucket], op, value)
        dirty = self.dirty.get(bucket)
        if dirty is not None:
            dirty.update(keys)

    def discard(self, bucket: BucketId, entry: Entry) -> None:
        self._unstage(entry.staged)
        if entry.ticket is not None:
            entry.ticket.done(False)

    def abandon(self, bucket: BucketId, entry: Entry) -> None:
        entry.ticket.done(False)

    def hide(self, bucket: BucketId) -> None:
        pass

    def open(self, bucket: BucketId) -> None:
        self.stores[bucket] = {}

    def drop(self, bucket: BucketId, lost: bool) -> None:
        self.stores.pop(bucket, None)
        self.dirty.pop(bucket, None)
        self.life.dropped(bucket)
        self.auditor.dropped(self.life, bucket)
