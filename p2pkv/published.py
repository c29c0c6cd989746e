"""Reading what nodes on this host publish, without asking them.

A node tells a client, with its memory, where its index lies (see ``_native/index.h``). What that
does not tell, or must not be taken from there at the moment, is left to its owner.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from p2pkv._native.index import Reader
from p2pkv.routing import ASK, Known, Peer, Place, unknown
from p2pkv.shared_memory import SharedArena

ANY_BYTES: Final = 1 << 62


class Published:
    """The indexes that a client has mapped. For any thread."""

    __slots__ = ("_arenas", "_bytes_max", "_lock", "_reader", "answered", "asks")

    def __init__(self, bytes_max: int = ANY_BYTES) -> None:
        """``bytes_max``: values of more bytes together are left to their owners."""
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._arenas: dict[Peer, SharedArena] = {}
        self._reader: Reader | None = None
        self.answered = 0
        """Keys that were answered here. Approximate where threads count at once."""
        self.asks = 0
        """Keys that were left to their owners."""

    def add(self, peer: Peer, arena: SharedArena) -> None:
        """From here on the index of this node is looked at; those that have ended no more."""
        with self._lock:
            self._arenas[peer] = arena
            self._look()

    def prune(self) -> None:
        """Those of nodes that have ended are looked at no more."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        self._arenas = {
            peer: arena
            for peer, arena in self._arenas.items()
            if arena.index is not None and arena.index.alive
        }
        maps = [arena.index for arena in self._arenas.values() if arena.index is not None]
        self._reader = Reader(maps) if maps else None

    def clear(self) -> None:
        """Everything is left to its owner."""
        with self._lock:
            self._arenas = {}
            self._reader = None

    def __len__(self) -> int:
        return len(self._arenas)

    def exists(self, keys: list[Any]) -> bytes:
        """For each key, str or bytes, ABSENT, THERE or ASK. Empty: there is no index."""
        reader = self._reader
        if reader is None:
            return b""
        flags = reader.exists(keys)
        self._count(len(keys), flags.count(ASK))
        return flags

    def get(self, keys: list[bytes]) -> Known:
        """The values, None for one that is not there."""
        reader = self._reader
        if reader is None:
            return unknown(len(keys))
        known = reader.get(keys, self._bytes_max)
        self._count(len(keys), len(known[1]))
        return known

    def get_into(self, keys: list[Any], targets: list[Any]) -> Known:
        """The size of each value that is now in its target, one buffer for each; None for one that
        is not there."""
        reader = self._reader
        if reader is None:
            return unknown(len(keys))
        known = reader.get_into(keys, targets, self._bytes_max)
        self._count(len(keys), len(known[1]))
        return known

    def places(self, keys: list[bytes]) -> list[Place | None]:
        """Where the values lie; None: ask."""
        with self._lock:
            reader, arenas = self._reader, list(self._arenas.values())
        if reader is None:
            return [None] * len(keys)
        found = reader.places(keys)
        self._count(len(keys), found.count(None))
        return [None if at is None else Place(arenas[at[0]], *at[1:]) for at in found]

    def memory_of(self, peer: Peer) -> SharedArena | None:
        """The memory of this node, if it is looked at."""
        arena = self._arenas.get(peer)
        return arena if arena is not None and arena.index and arena.index.alive else None

    def _count(self, keys: int, asked: int) -> None:
        self.asks += asked
        self.answered += keys - asked
