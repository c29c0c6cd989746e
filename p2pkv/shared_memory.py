"""The memory of a node on the same host, and what its use makes of requests and answers.

A node on the same host lets its clients map its arena. Then a get is answered by *where* the
values lie; they are copied from there, and the header before each value, which changes before its
memory is used for anything else, tells afterwards whether the copy is good (a seqlock, seen from
the reader's side). A put asks for room, fills it, and commits. Nothing depends on the node's being
alive while bytes are copied.

That a host is the same is proven by content: the file must hold the proof that the node sent.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from p2pkv import _native, wire
from p2pkv._native.index import Map
from p2pkv.buffers import OFF_GIL_MIN, copy
from p2pkv.checksums import checksums_of
from p2pkv.clock import namespace
from p2pkv.errors import ProtocolError
from p2pkv.objects import HEADER_BYTES, read_header
from p2pkv.parts import Parts, fill, flat, size_of, sizes_of
from p2pkv.routing import Reply, Request
from p2pkv.stream import inline_sizes
from p2pkv.transport import ClientSession
from p2pkv.wire import Kind, Status

SHARED_PUT_MIN = 128 << 10
"""Puts of fewer bytes go over the connection: one round trip instead of two."""

PROOF_BYTES_MIN = 16


class Memory(Protocol):
    """A node's memory that is reached without its help: mapped, or on another host."""

    @property
    def size(self) -> int: ...

    def holds(self, offset: int, size: int) -> bool: ...


class Checked(Memory, Protocol):
    """One whose headers are here."""

    def unchanged(self, key: bytes, offset: int, size: int, version: int) -> bool: ...


class SharedArena:
    """A node's memory, mapped; once in a process for all that use it."""

    def __init__(self, mapping: mmap.mmap, fd: int, path: str) -> None:
        self.path = path
        self.mapping = mapping
        self.view = memoryview(mapping)
        self.size = len(mapping)
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)
        self._region = _native.Region(self.view) if _native.available else None
        self.index: Map | None = None
        """The index that the node publishes."""

    @classmethod
    def open(
        cls, path: str, size: int, proof: bytes, index: tuple[int, int, str] | None = None
    ) -> SharedArena | None:
        """Map the file, if it is the one that the node means, and nobody else's.

        ``index``: where the published index is in it, and whose clock its times are of.

        Another user could shorten a file of his, which kills who reads the mapping.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            status = os.fstat(fd)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not ours or len(proof) < PROOF_BYTES_MIN or os.pread(fd, len(proof), size) != proof:
                return None
            file = (cls, status.st_dev, status.st_ino, size)
            arena = _mapped.get(file) or cls(mmap.mmap(fd, size), fd, path)
            arena = _mapped.setdefault(file, arena)
            if arena.index is None and index is not None and status.st_size >= index[0] + index[1]:
                arena.index = arena._map_index(fd, *index)
            return arena
        except (OSError, ValueError, OverflowError):
            return None
        finally:
            os.close(fd)

    def _map_index(self, fd: int, offset: int, size: int, clock_of: str) -> Map | None:
        """None: it cannot be read here, so the node is asked for everything."""
        if not _native.available or clock_of != namespace():
            return None
        try:
            return Map(mmap.mmap(fd, size, offset=offset), self.view)
        except (OSError, ValueError, OverflowError):
            return None

    def holds(self, offset: int, size: int) -> bool:
        return HEADER_BYTES <= offset <= len(self.view) - size

    def read(self, offsets: Sequence[int], targets: Sequence[Parts]) -> None:
        """Copy from the arena; one native call, without the GIL."""
        if self._region is not None:
            sources = self._region.pieces(offsets, sizes_of(targets))
            _native.copy(_native.Pieces.targets(flat(targets)), sources)
            return
        for offset, target in zip(offsets, targets, strict=True):
            fill(target, self.view[offset : offset + size_of(target)], copy)

    def load(self, offset: int, size: int) -> bytes:
        """A value as an object of its own. A large one is read from the file: without the GIL."""
        if size < OFF_GIL_MIN:
            return bytes(self.view[offset : offset + size])
        value = os.pread(self._fd, size, offset)
        return value if len(value) == size else bytes(self.view[offset : offset + size])

    def write(self, offsets: Sequence[int], sources: Sequence[Parts]) -> None:
        """Copy into the arena; one native call, without the GIL."""
        if self._region is not None:
            targets = self._region.pieces(offsets, sizes_of(sources))
            _native.copy(targets, _native.Pieces.sources(flat(sources)))
            return
        for offset, source in zip(offsets, sources, strict=True):
            at = offset
            for part in flat([source]):
                self.view[at : at + len(part)] = part
                at += len(part)

    def sums(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The checksums of values that are here."""
        return checksums_of([self.view[a : a + n] for a, n in zip(offsets, sizes, strict=True)])

    def read_summed(self, offsets: Sequence[int], targets: Sequence[Parts]) -> list[int]:
        """As ``read``; the checksum of each value."""
        if self._region is None:
            self.read(offsets, targets)
            return checksums_of(targets)
        sizes = sizes_of(targets)
        sources = self._region.pieces(offsets, sizes)
        return _native.copy_checksums(_native.Pieces.targets(flat(targets)), sources, sizes)

    def write_summed(self, offsets: Sequence[int], sources: Sequence[Parts]) -> list[int]:
        """As ``write``; the checksum of each value."""
        if self._region is None:
            self.write(offsets, sources)
            return checksums_of(sources)
        sizes = sizes_of(sources)
        targets = self._region.pieces(offsets, sizes)
        return _native.copy_checksums(targets, _native.Pieces.sources(flat(sources)), sizes)

    def unchanged(self, key: bytes, offset: int, size: int, version: int) -> bool:
        """Whether what was copied from there was this value all the time."""
        header = read_header(self.view, offset)
        return (
            header is not None
            and header.version == version
            and header.size == size
            and header.key_hash == xxh3_64_intdigest(key)
        )


_mapped: weakref.WeakValueDictionary[tuple[type[SharedArena], int, int, int], SharedArena] = (
    weakref.WeakValueDictionary()
)
"""What this process has mapped, by class, device, inode and bytes."""


def message_for(request: Request, session: ClientSession, arena: Memory | None) -> Request:
    """The message that carries a request: itself, or what asks for the memory's places.

    Gives the request its number; not so a put that is to be committed, as the node forgets the
    answers of old numbers. A put that may have run is repeated as it is: the node knows its number,
    and would make room in vain.
    """
    if arena is not None and request.kind == Kind.PUT and _is_shared(arena, request):
        put: Any = request.body
        remote = not isinstance(arena, SharedArena)
        if remote and request.source is not None:
            request.prepare()  # it goes through host memory
        alloc = wire.Alloc(put.keys, put.sizes, put.options, True, remote)
        return in_other_words(request, Kind.ALLOC, alloc, session.next_number())
    request.prepare()
    if not request.id:
        request.id = session.next_number()
    body: Any = request.body
    if not isinstance(arena, SharedArena) and isinstance(body, wire.Open) and body.view:
        body = wire.Get(body.keys)
    if arena is not None and isinstance(body, wire.Get):
        hold = not isinstance(arena, SharedArena)
        body = msgspec.structs.replace(body, locate=True, hold=hold)
    if body is request.body:
        return request
    return in_other_words(request, Kind.GET, body, request.id)


def _is_shared(arena: Memory, put: Request) -> bool:
    """Small puts take one round trip less without; very large ones evict as they come."""
    body: Any = put.body
    total: int = sum(body.sizes)
    return not put.unsure and SHARED_PUT_MIN <= total <= arena.size // 4


def in_other_words(request: Request, kind: Kind, body: wire.Body, id: int) -> Request:
    """The request as another message, without its payload."""
    message = Request(request.to, kind, body)
    message.id = id
    return message


class SharedPut:
    """A put whose values the client writes to where the node made room. ``run`` writes them.

    Raises ProtocolError for an answer that makes no sense.
    """

    def __init__(self, arena: Memory, request: Request, body: wire.Allocated) -> None:
        put: Any = request.body
        if len(body.ids) != len(put.keys) or len(body.offsets) != len(put.keys):
            raise ProtocolError(f"{len(body.ids)} allocations for {len(put.keys)} keys")
        if body.statuses and len(body.statuses) != len(put.keys):
            raise ProtocolError(f"{len(body.statuses)} statuses for {len(put.keys)} keys")
        self._source = None if request.payload else request.source
        values = [] if self._source else wire.gathered(request.payload, put.sizes)
        self.made = [i for i, id in enumerate(body.ids) if id]
        self.offsets = [body.offsets[i] for i in self.made]
        self.values = [values[i] for i in self.made] if values else []
        self.ids = [body.ids[i] for i in self.made]
        self.sizes = [put.sizes[i] for i in self.made]
        self.nbytes = sum(self.sizes)
        self._arena = arena
        self._sum = request.seal is not None
        self._checksums = [put.checksums[i] for i in self.made] if put.checksums else []
        self._statuses = body.statuses or bytes(len(body.ids))
        if not all(map(arena.holds, self.offsets, self.sizes)):
            raise ProtocolError("an allocation outside of the arena")

    @property
    def waits(self) -> bool:
        """Whether ``run`` may wait for a GPU. It raises DeviceError then, too."""
        return self._source is not None

    def run(self) -> None:
        assert isinstance(self._arena, SharedArena)
        if self._source is not None:
            self._source.write(self._arena, self.made, self.offsets)
            if self._sum:
                self._checksums = self._arena.sums(self.offsets, self.sizes)
        elif self._sum:
            self._checksums = self._arena.write_summed(self.offsets, self.values)
        else:
            self._arena.write(self.offsets, self.values)

    def commit(self, request: Request, session: ClientSession) -> Request:
        """The message that makes the values visible, under the number of the put itself."""
        if not request.id:
            request.id = session.next_number()
        return in_other_words(
            request, Kind.COMMIT, wire.Commit(self.ids, True, self._checksums), request.id
        )

    def reply(self, answer: Reply | None = None) -> Reply:
        """What became of each key, by the answer to the commit, if there was any to commit."""
        statuses = bytearray(self._statuses)
        committed = (answer.body.statuses if answer else b"") or bytes(len(self.made))
        if len(committed) != len(self.made):
            raise ProtocolError(f"{len(committed)} statuses for {len(self.made)} commits")
        for i, status in zip(self.made, committed, strict=True):
            # an allocation that is gone: begin again
            statuses[i] = Status.MOVING if status == Status.CONFLICT else status
        copies = self._copies(answer.body.copies) if answer else b""
        body = wire.Statuses(bytes(statuses) if any(statuses) else b"", copies)
        return Reply(Kind.STATUSES, body, (), answer.revision if answer else 0)

    def _copies(self, committed: bytes) -> bytes:
        """Of each key; what was there, and needed no commit, counts as one."""
        if not committed:
            return b""
        if len(committed) != len(self.made):
            raise ProtocolError(f"{len(committed)} numbers of copies for {len(self.made)} commits")
        copies = bytearray([1]) * len(self._statuses)
        for i, number in zip(self.made, committed, strict=True):
            copies[i] = number
        return bytes(copies)


class LocatedValues:
    """An answer of which some values lie in the arena. ``run`` fetches them, ``reply`` checks them.

    Raises ProtocolError for an answer that makes no sense.
    """

    waits = False
    """Not for a GPU."""

    def __init__(self, arena: Checked, request: Request, reply: Reply) -> None:
        body: wire.Values = reply.body
        asked: Any = request.body
        self._keys: list[bytes] = asked.keys
        starts: Sequence[int] = () if isinstance(asked, wire.Open) else asked.starts
        _check_lists(len(self._keys), body, bool(starts))
        self._arena = arena
        self._answer = reply
        self._located = [i for i, offset in enumerate(body.offsets) if offset]
        self._totals = body.totals or body.sizes
        self._places = [body.offsets[i] for i in self._located]
        if starts:
            self._places = [body.offsets[i] + starts[i] for i in self._located]
        self._sizes = [body.sizes[i] for i in self._located]
        self.nbytes = sum(self._sizes)
        if not all(map(arena.holds, self._places, self._sizes)):
            raise ProtocolError("a value outside of the arena")
        sent = wire.placed(reply.frames, inline_sizes(body), body.starts)
        self._sum = any([body.checksums[i] for i in self._located] if body.checksums else ())
        self._sums: list[int] = []
        """Of the located values."""
        self._values: list[bytes | None] | None = None
        self._targets: Sequence[Parts] = ()
        if request.sink is None:
            self._values = [bytes(view) for view in sent]
            return
        targets = request.sink(body)
        for target, view in zip(targets, sent, strict=True):
            if len(view):
                fill(target, view, copy)
        self._targets = [targets[i] for i in self._located]

    def run(self) -> None:
        assert isinstance(self._arena, SharedArena)
        if self._values is None:
            if self._sum:
                self._sums = self._arena.read_summed(self._places, self._targets)
            else:
                self._arena.read(self._places, self._targets)
            return
        loaded = [self._arena.load(*at) for at in zip(self._places, self._sizes, strict=True)]
        for i, value in zip(self._located, loaded, strict=True):
            self._values[i] = value
        if self._sum:
            self._sums = checksums_of([memoryview(value) for value in loaded])

    def reply(self) -> Reply:
        """The answer. A value that changed while it was copied is to be asked for again."""
        answer, body, values = self._answer, self._answer.body, self._values
        whole = msgspec.structs.replace(
            body, statuses=self._statuses(), starts=[], offsets=[], versions=[]
        )
        frames = [v for v in values if v] if values is not None else ()
        found = dict(zip(self._located, self._sums, strict=True)) if self._sum else {}
        sums = [found.get(i, 0) for i in range(len(self._keys))] if found else ()
        return Reply(answer.kind, whole, frames, answer.revision, values, values is None, sums)

    def _statuses(self) -> bytes:
        body, keys, unchanged = self._answer.body, self._keys, self._arena.unchanged
        changed = [
            i
            for i in self._located
            if not unchanged(keys[i], body.offsets[i], self._totals[i], body.versions[i])
        ]
        if not changed:
            return bytes(body.statuses)
        statuses = bytearray(body.statuses or bytes(len(keys)))
        for i in changed:
            statuses[i] = Status.DEFERRED
        return bytes(statuses)


def _check_lists(keys: int, body: wire.Values, ranges: bool) -> None:
    for name in ("sizes", "offsets", "versions", "totals", "statuses", "checksums"):
        given = len(getattr(body, name))
        needed = name in ("sizes", "offsets", "versions") or (name == "totals" and ranges)
        if given != keys and (given or needed):
            raise ProtocolError(f"{given} {name} for {keys} keys")
