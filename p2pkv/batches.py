"""The kinds of batches over keys: how each is asked, and how its answers are taken in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from p2pkv import wire
from p2pkv.checksums import checksums_of
from p2pkv.errors import OutOfRange, ProtocolError, QuotaExceeded, TooLarge
from p2pkv.keyed import Keyed
from p2pkv.outcomes import name_of
from p2pkv.parts import Copy, Parts, cut, fill, flat, sizes_of
from p2pkv.routing import Reply, Request, Source
from p2pkv.types import Member
from p2pkv.wire import Checksums, Kind, PutOptions, Status

T = TypeVar("T")

Make = Callable[[int], memoryview]
"""Gives writable memory of so many bytes, for one value."""

_HIT_OR_MISS = bytes([Status.OK, Status.MISS])


def expect(reply: Reply, kind: Kind) -> Any:
    """The body of an answer of this kind. Raises ProtocolError."""
    if reply.kind != kind:
        raise ProtocolError(f"an answer of kind {reply.kind} where {kind.name} was expected")
    return reply.body


def check_number(name: str, got: int, keys: int) -> None:
    if got != keys:
        raise ProtocolError(f"{got} {name} for {keys} keys")


class GetBatch(Keyed):
    """Values as bytes, or copied into targets; then the results are sizes.

    ``large`` are the items whose values are larger than a message, ``once`` those that are
    write-once, where ``tell_once`` asked for it, ``suspects`` those whose value was not what its
    checksum says, where ``checksums`` asked for them; their results are errors.
    """

    kind = Kind.GET

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        copy: Copy,
        targets: Sequence[Parts] | None = None,
        tell_once: bool = False,
        checksums: Checksums = Checksums.NONE,
    ) -> None:
        super().__init__(keys, buckets)
        self.copy = copy
        self.checksums = checksums
        self.targets = targets
        self.rooms: Sequence[int] = () if targets is None else sizes_of(targets)
        """Bytes of each target."""
        self.tell_once = tell_once
        self.large: list[int] = []
        self.once: list[int] = []
        self.suspects: list[int] = []

    def body(self, items: Sequence[int]) -> wire.Get:
        return wire.Get(
            self.keys_of(items),
            self.tell_once,
            any_copy=self.any_copy,
            checksums=self.checksums,
        )

    def request(self, to: Member, items: Sequence[int]) -> Request:
        request = Request(to, Kind.GET, self.body(items))
        if self.targets is not None:
            request.sink = lambda body: self.sink(items, body)
        return request

    def sink(self, items: Sequence[int], body: wire.Values) -> list[Parts]:
        """Where the values of an answer go; those that find no room go nowhere."""
        check_number("values", len(body.sizes), len(items))
        targets, rooms = self.targets or (), self.rooms
        return [
            targets[i]
            if size == rooms[i]
            else cut(targets[i], 0, size)
            if size < rooms[i]
            else memoryview(bytearray(size))
            for i, size in zip(items, body.sizes, strict=True)
        ]

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Values = expect(reply, Kind.VALUES)
        check_number("values", len(body.sizes), len(items))
        if body.statuses:
            check_number("statuses", len(body.statuses), len(items))
        self.check(items, body)
        done = items
        if body.statuses:
            done = [i for i, status in zip(items, body.statuses, strict=True) if not status]
        values: Sequence[Any] = ()
        if reply.delivered:
            sizes = _where_ok(body.sizes, body.statuses)
            self.take_sizes(done, sizes)
            if body.checksums:
                values = [self.where(i, size) for i, size in zip(done, sizes, strict=True)]
        elif reply.values is not None:
            values = _where_ok(reply.values, body.statuses)
            self.put_results(done, list(values))
        else:
            views = wire.placed(reply.frames, body.sizes, body.starts)
            values = _where_ok(views, body.statuses)
            self.take_views(done, values)
        if body.once:
            check_number("marks", len(body.once), len(items))
            self.once += [i for i, once in zip(items, body.once, strict=True) if once]
        if not body.checksums:
            return body.statuses
        corrupt = self._corrupt(items, done, values, body, reply.sums)
        return _with_corrupt(items, body.statuses, corrupt) if corrupt else body.statuses

    def _corrupt(
        self,
        items: Sequence[int],
        done: Sequence[int],
        values: Sequence[Any],
        body: wire.Values,
        sums: Sequence[int],
    ) -> set[int]:
        """Those of ``done`` whose value is not what its checksum says."""
        check_number("checksums", len(body.checksums), len(items))
        wanted = dict(zip(items, body.checksums, strict=True))
        found = dict(zip(items, sums, strict=True)) if sums else {}
        to_sum = {
            i: value if isinstance(value, (memoryview, tuple)) else memoryview(value)
            for i, value in zip(done, values, strict=True)
            if wanted[i] and not found.get(i) and value is not None
        }
        found.update(zip(to_sum, checksums_of(list(to_sum.values())), strict=True))
        return {i for i in done if wanted[i] and found.get(i, wanted[i]) != wanted[i]}

    def where(self, item: int, size: int) -> Parts | None:
        """Where a delivered value is; None: nowhere, as there was no room for it."""
        target, room = (self.targets or ())[item], self.rooms[item]
        return None if size > room else cut(target, 0, size)

    def check(self, items: Sequence[int], body: wire.Values) -> None:
        """Raises ProtocolError for an answer to something else than what was asked."""

    def take_views(self, items: Sequence[int], views: Sequence[memoryview]) -> None:
        """The values of ``items``, which are copied from here."""
        if self.targets is None:
            self.put_results(items, [bytes(view) for view in views])
            return
        results, copy, targets, rooms = self.results, self.copy, self.targets, self.rooms
        for i, view in zip(items, views, strict=True):
            size, room = len(view), rooms[i]
            if size > room:
                results[i] = no_room(self.keys[i], size, room)
            else:
                target = targets[i]
                fill(target if size == room else cut(target, 0, size), view, copy)
                results[i] = size

    def take_sizes(self, items: Sequence[int], sizes: Sequence[int]) -> None:
        """The values of ``items`` are where ``sink`` said."""
        rooms = self.rooms
        fits = [
            size if size <= rooms[i] else no_room(self.keys[i], size, rooms[i])
            for i, size in zip(items, sizes, strict=True)
        ]
        self.put_results(items, fits)

    def settle(self, item: int, status: int) -> None:
        if status == Status.LARGE:
            self.large.append(item)
        elif status != Status.MISS:
            super().settle(item, status)
            if status == Status.CORRUPT:
                self.suspects.append(item)


class GetRanges(GetBatch):
    """A range of each value: ``lengths[i]`` bytes from ``starts[i]``; -1: up to its end."""

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        copy: Copy,
        targets: Sequence[Parts] | None,
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        super().__init__(keys, buckets, copy, targets)
        self.starts = starts
        self.lengths = lengths
        self.totals: dict[int, int] = {}
        """Sizes of the values that are too small."""

    def body(self, items: Sequence[int]) -> wire.Get:
        starts, lengths = [self.starts[i] for i in items], [self.lengths[i] for i in items]
        return wire.Get(self.keys_of(items), False, False, starts, lengths, self.any_copy)

    def check(self, items: Sequence[int], body: wire.Values) -> None:
        totals = body.totals
        check_number("sizes of values", len(totals), len(items))
        statuses = body.statuses or bytes(len(items))
        for i, status, size, total in zip(items, statuses, body.sizes, totals, strict=True):
            start, length = self.starts[i], self.lengths[i]
            if status == Status.RANGE:
                self.totals[i] = total
            elif not status and (
                size != (total - start if length < 0 else length) or start + size > total
            ):
                raise ProtocolError(
                    f"{size} bytes from {start} of {total}, where {length} were asked for"
                )

    def settle(self, item: int, status: int) -> None:
        if status == Status.RANGE:
            self.results[item] = out_of_range(
                self.keys[item], self.starts[item], self.lengths[item], self.totals[item]
            )
        else:
            super().settle(item, status)


class GetFresh(GetBatch):
    """Values in memory that ``make`` gives once their size is known: the results."""

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        copy: Copy,
        make: Make,
        size_max: int,
        checksums: Checksums = Checksums.NONE,
    ) -> None:
        super().__init__(keys, buckets, copy, (), checksums=checksums)
        self.make = make
        self.size_max = size_max
        self.made: dict[int, memoryview] = {}

    def sink(self, items: Sequence[int], body: wire.Values) -> list[Parts]:
        check_number("values", len(body.sizes), len(items))
        statuses = body.statuses or bytes(len(items))
        for i, status, size in zip(items, statuses, body.sizes, strict=True):
            self.made[i] = self._memory(0 if status else size)
        return [self.made[i] for i in items]

    def _memory(self, size: int) -> memoryview:
        if size > self.size_max:
            raise ProtocolError(f"a value of {size} bytes is over value_bytes_max")
        return self.make(size)

    def take_views(self, items: Sequence[int], views: Sequence[memoryview]) -> None:
        for i, view in zip(items, views, strict=True):
            target = self.results[i] = self._memory(len(view))
            self.copy(target, view)

    def take_sizes(self, items: Sequence[int], sizes: Sequence[int]) -> None:
        self.put_results(items, [self.made[i] for i in items])

    def where(self, item: int, size: int) -> Parts | None:
        return self.made[item]


class ViewBatch(GetBatch):
    """Values to be looked at: where they lie in a node's memory, or else in a copy of our own."""

    kind = Kind.OPEN

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(to, Kind.OPEN, wire.Open(self.keys_of(items), True))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        if reply.kind != Kind.OPENED:
            return super().absorb(items, reply)
        body: wire.Opened = reply.body
        values = reply.values
        if values is None or len(values) != len(items):
            raise ProtocolError(f"views of other values than those of {len(items)} keys")
        for i, value in zip(items, values, strict=True):
            self.results[i] = value
        return body.statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.QUOTA:
            name = name_of(self.keys[item])
            self.results[item] = QuotaExceeded(
                f"{name}: this client's views are over its node's view_quota_bytes: release some"
            )
        else:
            super().settle(item, status)


def _where_ok(values: Sequence[T], statuses: bytes) -> list[T]:
    if not statuses:
        return list(values)
    return [v for v, status in zip(values, statuses, strict=True) if not status]


def _with_corrupt(items: Sequence[int], statuses: bytes, corrupt: set[int]) -> bytes:
    before = statuses or bytes(len(items))
    return bytes(
        [Status.CORRUPT if i in corrupt else s for i, s in zip(items, before, strict=True)]
    )


def no_room(key: bytes, size: int, room: int) -> TooLarge:
    """The exception for a buffer that is smaller than the value."""
    return TooLarge(f"{name_of(key)}: its value of {size} bytes does not fit the buffer of {room}")


def out_of_range(key: bytes, start: int, length: int, size: int) -> OutOfRange:
    """The exception for a range that is not within the value."""
    wanted = "up to the end" if length < 0 else f"{length} bytes"
    return OutOfRange(
        f"{name_of(key)}: {wanted} from byte {start} are not within its value of {size} bytes", size
    )


class PutBatch(Keyed):
    """Results: the copies of each stored key, 0 where ``if_absent`` found one."""

    kind = Kind.PUT
    mutating = True

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        values: Sequence[Parts],
        options: PutOptions,
        checksums: bool = False,
    ) -> None:
        super().__init__(keys, buckets)
        self.values = values
        self.sizes: list[int] = sizes_of(values)
        self.options = options
        self.repeatable = options.write_once and not options.if_absent
        self.checksums = checksums
        self.corrupt: list[int] = []
        """Items that did not arrive as they were sent, and were not stored."""

    def request(self, to: Member, items: Sequence[int]) -> Request:
        keys, sizes, values = self.keys, self.sizes, self.values
        if len(items) == len(keys):
            body = wire.Put(list(keys), list(sizes), self.options)
        else:
            values = [values[i] for i in items]
            body = wire.Put(self.keys_of(items), [sizes[i] for i in items], self.options)
        request = Request(to, Kind.PUT, body, _payload(values))
        if self.checksums:
            request.seal = partial(_seal, request, values)
        return request

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = expect(reply, Kind.STATUSES)
        if body.copies:
            check_number("numbers of copies", len(body.copies), len(items))
        self.put_results(items, list(body.copies) or [1] * len(items))
        return body.statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.EXISTS:
            self.results[item] = 0
        else:
            super().settle(item, status)
            if status == Status.CORRUPT and self.checksums:
                self.corrupt.append(item)


class PutFromSource(PutBatch):
    """Puts values that are not in host memory; they are brought there only if they must."""

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        sizes: list[int],
        source: Source,
        options: PutOptions,
        checksums: bool = False,
    ) -> None:
        super().__init__(keys, buckets, (), options, checksums)
        self.sizes = sizes
        self.source = source

    def request(self, to: Member, items: Sequence[int]) -> Request:
        sizes = [self.sizes[i] for i in items]
        request = Request(to, Kind.PUT, wire.Put(self.keys_of(items), sizes, self.options))
        request.source = self.source.part(items)
        if self.checksums:
            request.seal = lambda: _seal(request, wire.gathered(request.payload, sizes))
        return request


def _seal(request: Request, values: Sequence[Parts]) -> None:
    request.seal = None
    request.body = msgspec.structs.replace(request.body, checksums=checksums_of(values))


def _payload(values: Sequence[Parts]) -> list[memoryview]:
    pieces = flat(values)
    return pieces if all(pieces) else [piece for piece in pieces if piece]


class FlagBatch(Keyed):
    """Exists, delete, pin, unpin, expire: True where the key was there."""

    def __init__(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        body: Callable[[list[bytes]], wire.Body],
    ) -> None:
        super().__init__(keys, buckets)
        self.kind = kind
        self.mutating = kind in wire.MUTATING
        self.body = body

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(to, self.kind, self.body(self.keys_of(items)))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = expect(reply, Kind.STATUSES)
        statuses = body.statuses or bytes(len(items))
        check_number("statuses", len(statuses), len(items))
        self.put_results(items, [not status for status in statuses])
        return statuses if statuses.strip(_HIT_OR_MISS) else b""

    def settle(self, item: int, status: int) -> None:
        if status != Status.MISS:
            super().settle(item, status)


class CommitOne(Keyed):
    """The commit of one allocation, which is its member's only: it ends with Conflict elsewhere.

    Result: the number of copies, or 0 where ``if_absent`` found the key there.
    """

    kind = Kind.COMMIT
    mutating = True
    bound = True

    def __init__(
        self, key: bytes, bucket: int, owner: Member, allocation: int, checksum: int = 0
    ) -> None:
        super().__init__([key], [bucket])
        self.owner = owner
        self.allocation = allocation
        self.checksums = [checksum] if checksum else []

    def request(self, to: Member, items: Sequence[int]) -> Request:
        body = wire.Commit([self.allocation], False, self.checksums)
        return Request(self.owner, Kind.COMMIT, body)

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = expect(reply, Kind.STATUSES)
        if body.copies:
            check_number("numbers of copies", len(body.copies), 1)
        self.results = list(body.copies) or [1]
        return body.statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.EXISTS:
            self.results = [0]
        else:
            super().settle(item, status)


class MatchBatch(Keyed):
    """Each owner says how many of its keys, from the start, are there."""

    kind = Kind.MATCH

    def __init__(self, keys: Sequence[bytes], buckets: Sequence[int]) -> None:
        super().__init__(keys, buckets)
        self.first_miss = len(keys)

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(to, Kind.MATCH, wire.Match(self.keys_of(items)))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Matched = expect(reply, Kind.MATCHED)
        if body.count > len(items):
            raise ProtocolError(f"{body.count} matches among {len(items)} keys")
        if body.count == len(items):
            return b""
        if body.status == Status.OK:
            raise ProtocolError(f"{body.count} matches among {len(items)} keys, and no reason why")
        at = items[body.count]
        if body.status == Status.MISS:
            self.first_miss = min(self.first_miss, at)
        if at >= self.first_miss:
            return b""
        return bytes(body.count) + bytes([body.status]) * (len(items) - body.count)

    def count(self) -> int:
        """How many keys from the start are there. Raises the error of a key before the end."""
        for result in self.results[: self.first_miss]:
            if result is not None:
                raise result
        return self.first_miss
