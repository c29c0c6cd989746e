"""The kinds of batches over keys: how each is asked, and how its answers are taken in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from p2pkv import wire
from p2pkv.errors import ProtocolError, TooLarge
from p2pkv.keyed import Keyed
from p2pkv.outcomes import name_of
from p2pkv.routing import Reply, Request
from p2pkv.types import Member
from p2pkv.wire import Kind, PutOptions, Status

T = TypeVar("T")

Copy = Callable[[memoryview, memoryview], None]
"""Copies source into destination of the same length (arguments: destination, source)."""

JOIN_MAX = 256 << 10
"""Values up to here are joined into one frame."""

_HIT_OR_MISS = bytes([Status.OK, Status.MISS])


def expect(reply: Reply, kind: Kind) -> Any:
    """The body of an answer of this kind. Raises ProtocolError."""
    if reply.kind != kind:
        raise ProtocolError(f"an answer of kind {reply.kind} where {kind.name} was expected")
    return reply.body


def _check_number(name: str, got: int, keys: int) -> None:
    if got != keys:
        raise ProtocolError(f"{got} {name} for {keys} keys")


class GetBatch(Keyed):
    """Values as bytes, or copied into buffers; then the results are sizes.

    ``large`` are the items whose values are larger than a message, ``once`` those that are
    write-once, where ``tell_once`` asked for it.
    """

    kind = Kind.GET

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        copy: Copy,
        buffers: Sequence[memoryview] | None = None,
        tell_once: bool = False,
    ) -> None:
        super().__init__(keys, buckets)
        self.copy = copy
        self.buffers = buffers
        self.tell_once = tell_once
        self.large: list[int] = []
        self.once: list[int] = []

    def request(self, to: Member, items: Sequence[int]) -> Request:
        request = Request(to, Kind.GET, wire.Get(self.keys_of(items), self.tell_once))
        if self.buffers is not None:
            request.sink = lambda body: self._targets(items, body)
        return request

    def _targets(self, items: Sequence[int], body: wire.Values) -> list[memoryview]:
        """Where the values of an answer go; those that find no room go nowhere."""
        _check_number("values", len(body.sizes), len(items))
        buffers = self.buffers or ()
        return [
            buffers[i][:size] if size <= len(buffers[i]) else memoryview(bytearray(size))
            for i, size in zip(items, body.sizes, strict=True)
        ]

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Values = expect(reply, Kind.VALUES)
        _check_number("values", len(body.sizes), len(items))
        if body.statuses:
            _check_number("statuses", len(body.statuses), len(items))
        done = items
        if body.statuses:
            done = [i for i, status in zip(items, body.statuses, strict=True) if not status]
        if reply.delivered:
            self._take_sizes(done, _where_ok(body.sizes, body.statuses))
        elif reply.values is not None:
            self.put_results(done, _where_ok(reply.values, body.statuses))
        else:
            views = wire.placed(reply.frames, body.sizes, body.starts)
            self._take_views(done, _where_ok(views, body.statuses))
        if body.once:
            _check_number("marks", len(body.once), len(items))
            self.once += [i for i, once in zip(items, body.once, strict=True) if once]
        return body.statuses

    def _take_views(self, items: Sequence[int], views: Sequence[memoryview]) -> None:
        if self.buffers is None:
            self.put_results(items, [bytes(view) for view in views])
        else:
            self._take_into(items, views, self.buffers)

    def _take_sizes(self, items: Sequence[int], sizes: Sequence[int]) -> None:
        buffers = self.buffers or ()
        fits = [
            size if size <= len(buffers[i]) else no_room(self.keys[i], size, len(buffers[i]))
            for i, size in zip(items, sizes, strict=True)
        ]
        self.put_results(items, fits)

    def _take_into(
        self, items: Sequence[int], views: Sequence[memoryview], buffers: Sequence[memoryview]
    ) -> None:
        results, copy = self.results, self.copy
        for i, view in zip(items, views, strict=True):
            size, buffer = len(view), buffers[i]
            if size > len(buffer):
                results[i] = no_room(self.keys[i], size, len(buffer))
            else:
                copy(buffer[:size], view)
                results[i] = size

    def settle(self, item: int, status: int) -> None:
        if status == Status.LARGE:
            self.large.append(item)
        elif status != Status.MISS:
            super().settle(item, status)


def _where_ok(values: Sequence[T], statuses: bytes) -> list[T]:
    if not statuses:
        return list(values)
    return [v for v, status in zip(values, statuses, strict=True) if not status]


def no_room(key: bytes, size: int, room: int) -> TooLarge:
    """The exception for a buffer that is smaller than the value."""
    return TooLarge(f"{name_of(key)}: its value of {size} bytes does not fit the buffer of {room}")


class PutBatch(Keyed):
    """Results: 1 for each stored key, 0 where ``if_absent`` found one."""

    kind = Kind.PUT
    mutating = True

    def __init__(
        self,
        keys: Sequence[bytes],
        buckets: Sequence[int],
        values: Sequence[memoryview],
        options: PutOptions,
        join_max: int = JOIN_MAX,
    ) -> None:
        super().__init__(keys, buckets)
        self.values = values
        self.sizes: list[int] = [len(v) for v in values]
        self.options = options
        self.join_max = join_max

    def request(self, to: Member, items: Sequence[int]) -> Request:
        keys, sizes, values = self.keys, self.sizes, self.values
        if len(items) == len(keys):
            body = wire.Put(list(keys), list(sizes), self.options)
            return Request(to, Kind.PUT, body, gather(values, self.join_max))
        body = wire.Put(self.keys_of(items), [sizes[i] for i in items], self.options)
        return Request(to, Kind.PUT, body, gather([values[i] for i in items], self.join_max))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = expect(reply, Kind.STATUSES)
        self.put_results(items, [1] * len(items))
        return body.statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.EXISTS:
            self.results[item] = 0
        else:
            super().settle(item, status)


def gather(values: Sequence[memoryview], join_max: int = JOIN_MAX) -> list[wire.Buffer]:
    """Payload frames: small values joined (a frame costs more than the copy), large ones alone."""
    frames: list[wire.Buffer] = []
    small: list[memoryview] = []
    for value in values:
        if len(value) <= join_max:
            small.append(value)
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(value)
    if small:
        frames.append(b"".join(small))
    return [frame for frame in frames if frame]


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
        _check_number("statuses", len(statuses), len(items))
        self.put_results(items, [not status for status in statuses])
        return statuses if statuses.strip(_HIT_OR_MISS) else b""

    def settle(self, item: int, status: int) -> None:
        if status != Status.MISS:
            super().settle(item, status)


class CommitOne(Keyed):
    """The commit of one allocation, which is its member's only: it ends with Conflict elsewhere.

    Result: 1, or 0 where ``if_absent`` found the key there.
    """

    kind = Kind.COMMIT
    mutating = True
    bound = True

    def __init__(self, key: bytes, bucket: int, owner: Member, allocation: int) -> None:
        super().__init__([key], [bucket])
        self.owner = owner
        self.allocation = allocation

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(self.owner, Kind.COMMIT, wire.Commit([self.allocation]))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = expect(reply, Kind.STATUSES)
        self.results = [1]
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
