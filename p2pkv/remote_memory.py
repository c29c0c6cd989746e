"""Values in the memory of a node on another host, on their way through memory of our own.

Adapters reach only memory that was registered, which is dear; so bytes pass through a *slot* of
registered memory, and between it and the caller's buffers by one native copy for each round. A slot
also is what an access that was given up may still be writing to, so that the caller's buffers are
the caller's again when the call ends.

What is read begins with the header before each value: it tells whether the copy is good, as it does
in shared memory (``shared_memory``). The node holds the values meanwhile; see ``RemotePlace.hold``.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from p2pkv import _native, wire
from p2pkv.buffers import OFF_GIL_MIN, address_of, copy
from p2pkv.checksums import checksums_of
from p2pkv.objects import HEADER_BYTES, read_header
from p2pkv.parts import Parts, cut, fill, flat
from p2pkv.routing import Reply, Request
from p2pkv.shared_memory import LocatedValues, SharedPut

PIECES_MAX = 4096
"""Pieces of one round."""


class Staging:
    """Memory to be registered, in ``slots`` of equal size. It is a file, to be read from off the
    GIL."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.size = slots * slot_bytes
        self._fd = os.memfd_create("p2pkv-staging", os.MFD_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, self.size)
        self.view = memoryview(mmap.mmap(self._fd, self.size))
        self.address = address_of(self.view)
        self.slots = [Slot(self, i * slot_bytes, slot_bytes) for i in range(slots)]

    def close(self) -> None:
        """Give the memory back at once, once nothing can reach it any more. The slots refer to
        this and this to them, so that it would else wait for the garbage collector."""
        self.slots.clear()
        self.view.release()
        self._closing()

    def load(self, at: int, size: int) -> bytes:
        """These bytes as an object of their own."""
        if size >= OFF_GIL_MIN:
            value = os.pread(self._fd, size, at)
            if len(value) == size:
                return value
        return bytes(self.view[at : at + size])


class Slot:
    """A part of it, for one batch at a time."""

    __slots__ = ("offset", "size", "staging")

    def __init__(self, staging: Staging, offset: int, size: int) -> None:
        self.staging = staging
        self.offset = offset
        self.size = size

    def view(self, at: int, size: int) -> memoryview:
        at += self.offset
        return self.staging.view[at : at + size]


class Move(NamedTuple):
    """A piece of a span: ``start`` in it, ``remote`` in the arena, ``local`` in the slot."""

    span: int
    start: int
    remote: int
    local: int
    length: int


Round = list[Move]


def rounds(spans: Sequence[tuple[int, int]], room: int) -> list[Round]:
    """Cut spans of the arena, given as (offset, length), into rounds of ``room`` bytes at most."""
    result: list[Round] = []
    now: Round = []
    used = 0
    for span, (offset, length) in enumerate(spans):
        start = 0
        while start < length:
            if used == room or len(now) == PIECES_MAX:
                result.append(now)
                now, used = [], 0
            part = min(length - start, room - used)
            now.append(Move(span, start, offset + start, used, part))
            start += part
            used += part
    return [*result, now] if now else result


def runs(moves: Round) -> list[tuple[int, int, int]]:
    """(local, remote, length) of a round, neighbours joined: fewer pieces for the adapter."""
    joined: list[tuple[int, int, int]] = []
    for _, _, remote, local, length in moves:
        if joined:
            before = joined[-1]
            if before[0] + before[2] == local and before[1] + before[2] == remote:
                joined[-1] = (before[0], before[1], before[2] + length)
                continue
        joined.append((local, remote, length))
    return joined


class RemotePlace:
    """A node's arena on another host, as far as answers are to be checked against it."""

    def __init__(self, size: int, hold_ns: int, pull: bool) -> None:
        self.size = size
        self.hold_ns = hold_ns
        """The node keeps what it located in place for so long, counted from our request. A value
        that was here before that is whole, however late its connection's end is noticed."""
        self.pull = pull
        """Whether we read by ourselves; else the node writes when asked to."""

    def holds(self, offset: int, size: int) -> bool:
        return HEADER_BYTES <= offset <= self.size - size


class _Fetched(RemotePlace):
    """The same, with the headers that were read along."""

    def __init__(self, place: RemotePlace) -> None:
        super().__init__(place.size, place.hold_ns, place.pull)
        self.headers: dict[int, bytearray] = {}

    def unchanged(self, key: bytes, offset: int, size: int, version: int) -> bool:
        """Whether what was read there is this value."""
        header = read_header(memoryview(self.headers[offset]), HEADER_BYTES)
        return (
            header is not None
            and header.version == version
            and header.size == size
            and header.key_hash == xxh3_64_intdigest(key)
        )


class RemoteValues(LocatedValues):
    """As LocatedValues: bring each of ``rounds`` into a slot and ``land`` it, then ``reply``."""

    def __init__(self, place: RemotePlace, request: Request, reply: Reply, room: int) -> None:
        self._fetched = _Fetched(place)
        super().__init__(self._fetched, request, reply)
        self.token: int = reply.body.token
        self._offsets: list[int] = [reply.body.offsets[i] for i in self._located]
        self._chunks: list[list[bytes]] = [[] for _ in self._located]
        spans: list[tuple[int, int]] = []
        for offset, at, size in zip(self._offsets, self._places, self._sizes, strict=True):
            self._fetched.headers[offset] = bytearray(HEADER_BYTES)
            spans += ((offset - HEADER_BYTES, HEADER_BYTES), (at, size))
        self.rounds = rounds(spans, room)

    def pushes(self, moves: Round, slot: Slot) -> wire.Push:
        """The message that has the node bring a round."""
        items = [move.span // 2 for move in moves]
        starts = [
            m.remote - self._offsets[i] + HEADER_BYTES for m, i in zip(moves, items, strict=True)
        ]
        targets = [slot.offset + move.local for move in moves]
        return wire.Push(self.token, items, starts, [move.length for move in moves], targets)

    def land(self, moves: Round, slot: Slot) -> None:
        """Copy a round from the slot to where it belongs."""
        targets: list[Parts] = []
        sources: list[memoryview] = []
        for span, start, _, local, length in moves:
            which, is_value = divmod(span, 2)
            source = slot.view(local, length)
            if not is_value:
                self._fetched.headers[self._offsets[which]][start : start + length] = source
            elif self._values is None:
                targets.append(cut(self._targets[which], start, length))
                sources.append(source)
            else:
                self._chunks[which].append(slot.staging.load(slot.offset + local, length))
        if targets:
            _copy(targets, sources)

    def reply(self) -> Reply:
        if self._values is not None:
            for i, chunks in zip(self._located, self._chunks, strict=True):
                self._values[i] = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if self._sum:  # of what has arrived where it belongs
            here = self._targets
            if self._values is not None:
                here = [memoryview(self._values[i] or b"") for i in self._located]
            self._sums = checksums_of(here)
        return super().reply()


class RemotePut(SharedPut):
    """As SharedPut: ``load`` each of ``rounds`` into a slot and write it to the arena."""

    def __init__(
        self, place: RemotePlace, request: Request, body: wire.Allocated, room: int
    ) -> None:
        super().__init__(place, request, body)
        if self._sum:
            self._checksums = checksums_of(self.values)
        self.rounds = rounds(list(zip(self.offsets, self.sizes, strict=True)), room)

    def load(self, moves: Round, slot: Slot) -> None:
        """Copy a round from the caller's memory into the slot."""
        sources = flat([cut(self.values[m.span], m.start, m.length) for m in moves])
        size = sum(move.length for move in moves)
        if _native.available:
            _native.copy([slot.view(0, size)], sources)
            return
        at = 0
        for source in sources:
            slot.view(at, len(source))[:] = source
            at += len(source)


def _copy(targets: Sequence[Parts], sources: Sequence[memoryview]) -> None:
    if _native.available:
        _native.copy(_native.Pieces.targets(flat(targets)), sources)
        return
    for target, source in zip(targets, sources, strict=True):
        fill(target, source, copy)


__all__ = [
    "Move",
    "RemotePlace",
    "RemotePut",
    "RemoteValues",
    "Round",
    "Slot",
    "Staging",
    "rounds",
    "runs",
]
