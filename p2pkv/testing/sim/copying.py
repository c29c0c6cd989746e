"""Copies of a bucket's objects for a learner: piece by piece, while they go on changing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from p2pkv.instructions import Copy
from p2pkv.replicated import Session
from p2pkv.types import Member

from . import plan as measures

if TYPE_CHECKING:
    from .node import Life

ROUNDS_MAX = 3
"""Rounds of objects that changed meanwhile, before the rest is cut."""


class Piece(msgspec.Struct, frozen=True):
    """Some objects; None for one that is gone. ``base``: all are there, as of this operation."""

    sender: Member
    to: Member
    bucket: Any
    session: Session
    index: int
    items: dict[bytes, Any]
    base: int | None = None


class Copier:
    """The sending side, in the primary."""

    def __init__(self, life: Life, copy: Copy) -> None:
        self.life = life
        self.bucket = copy.bucket
        self.to = copy.to
        self.session = copy.session
        self._index = -1
        self._rounds = 0
        self._tries = 0
        self._sent_ns = 0
        self._piece: Piece | None = None
        life.objects.dirty[copy.bucket] = set()
        self._keys = sorted(life.objects.stores[copy.bucket])
        life.world.note(life.me, "copies", copy.bucket, "to", copy.to, copy.session)
        self._next()

    def _over(self) -> bool:
        replica = self.life.replicas.get(self.bucket)
        return replica is None or replica.copying is None or replica.copying.session != self.session

    def _end(self) -> None:
        if self.life.copiers.get(self.bucket) is self:
            del self.life.copiers[self.bucket]
            self.life.objects.dirty.pop(self.bucket, None)
            self.life.replicas.copy_failed(self.bucket, self.session, self.life.now)

    def _next(self) -> None:
        """Send the next piece."""
        objects = self.life.objects
        base: int | None = None
        if not self._keys:
            dirty = objects.dirty[self.bucket]
            self._keys, objects.dirty[self.bucket] = sorted(dirty), set()
            self._rounds += 1
            if self._index >= 0 and (len(self._keys) < 2 or self._rounds > ROUNDS_MAX):
                base = self.life.replicas.copy_cut(self.bucket, self.session, self.life.now)
                if base is None:
                    self._end()
                    return
        count = len(self._keys) if base is not None else 1
        keys, self._keys = self._keys[:count], self._keys[count:]
        store = objects.stores[self.bucket]
        self._index += 1
        self._tries = 0
        self._piece = Piece(
            self.life.me, self.to, self.bucket, self.session, self._index,
            {key: store.get(key) for key in keys}, base,
        )  # fmt: skip
        self._send()

    def _send(self) -> None:
        assert self._piece is not None
        self._tries += 1
        self._sent_ns = self.life.now
        self.life.send(self.to, "take_piece", self._piece)

    def acknowledged(self, index: int) -> None:
        if self._over():
            self._end()
        elif index == self._index and self._piece is not None:
            if self._piece.base is None:
                self._next()
            else:
                del self.life.copiers[self.bucket]
                self.life.objects.dirty.pop(self.bucket, None)
                self.life.replicas.copy_done(self.bucket, self.session, self.life.now)

    def tick(self, now: int) -> None:
        if self._over():
            self._end()
        elif now - self._sent_ns > measures.PIECE_TIMEOUT_NS:
            if self._tries < measures.PIECE_TRIES_MAX:
                self._send()
            else:
                self._end()


class Student:
    """The receiving side, in the learner."""

    def __init__(self, life: Life, piece: Piece) -> None:
        self.life = life
        self.bucket = piece.bucket
        self.session = piece.session
        self._next = 0
        self._heard_ns = life.now
        self._complete = False

    def take(self, piece: Piece) -> None:
        """Take the next piece; one that was taken before is acknowledged again."""
        self._heard_ns = self.life.now
        if piece.index > self._next:
            return
        if piece.index == self._next and not self._complete and not self._put(piece):
            return
        self.life.send(
            piece.sender, "take_piece_ack", self.bucket, piece.sender, self.session, piece.index
        )

    def _put(self, piece: Piece) -> bool:
        store = self.life.objects.stores[self.bucket]
        for key, value in piece.items.items():
            if value is None:
                store.pop(key, None)
            else:
                store[key] = value
        self._next += 1
        if piece.base is not None:
            life = self.life
            if not life.replicas.learned(self.bucket, self.session, piece.base, life.now):
                return False
            self._complete = True
            life.auditor.learned(life, self.bucket)
        return True

    def tick(self, now: int) -> None:
        late = now - self._heard_ns > measures.PIECE_TIMEOUT_NS * measures.PIECE_TRIES_MAX * 2
        if late and not self._complete:
            del self.life.students[self.bucket]
            self.life.replicas.stop_learning(self.bucket, self.session, now)
