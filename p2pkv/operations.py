"""What a client can do, as generators over the routing core. Pure.

``Operations`` checks arguments against the limits before anything is sent, and builds the
generator of each call. ``Client`` and ``AsyncClient`` only run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from p2pkv import ring, routing, wire
from p2pkv.config import ClientConfig, Limits
from p2pkv.errors import (
    BatchError,
    Conflict,
    CorruptValue,
    InvalidArgument,
    Miss,
    P2PKVError,
    ProtocolError,
    TooLarge,
)
from p2pkv.routing import Context, Keyed, Operation, Reply, Request, keyed
from p2pkv.types import Member
from p2pkv.wire import Kind, PutOptions, Status

Key = str | bytes
Copy = Callable[[memoryview, memoryview], None]
"""Copies source into destination of the same length (arguments: destination, source)."""

WAVE = 4
"""Pieces of a large value that are under way at once."""

SCAN_BUCKETS_MAX = 4096

_MISS = bytes([Status.MISS])
_HIT_OR_MISS = bytes([Status.OK, Status.MISS])


# --- checking arguments


def encode_key(key: Key, limits: Limits) -> bytes:
    """The bytes of a key. Raises InvalidArgument, TooLarge."""
    if type(key) is str:
        key = key.encode()
    elif type(key) is not bytes:
        if not isinstance(key, (str, bytes, bytearray, memoryview)):
            raise InvalidArgument(f"key: must be str or bytes, not {type(key).__name__}")
        key = key.encode() if isinstance(key, str) else bytes(key)
    if not 0 < len(key) <= limits.key_bytes_max:
        raise _key_length(key, limits)
    return key


def encode_keys(keys: Iterable[Key], limits: Limits) -> list[bytes]:
    """The bytes of many keys. Raises InvalidArgument, TooLarge."""
    if isinstance(keys, (str, bytes)):
        raise InvalidArgument("keys: must be a sequence of keys, not one key")
    encoded = [key.encode() if key.__class__ is str else key for key in keys]
    if encoded and (
        set(map(type, encoded)) != _BYTES_ONLY
        or not all(encoded)
        or max(map(len, encoded)) > limits.key_bytes_max
    ):
        return [encode_key(key, limits) for key in encoded]
    return encoded  # type: ignore[return-value]


_BYTES_ONLY = {bytes}


def _key_length(key: bytes, limits: Limits) -> InvalidArgument:
    if not key:
        return InvalidArgument("key: is empty; it must have 1 byte at least")
    return TooLarge(f"key: {len(key)} bytes, limit key_bytes_max = {limits.key_bytes_max}")


def encode_prefix(prefix: Key, limits: Limits) -> bytes:
    data = prefix.encode() if isinstance(prefix, str) else bytes(prefix)
    if len(data) > limits.key_bytes_max:
        raise TooLarge(f"prefix: {len(data)} bytes, limit {limits.key_bytes_max}")
    return data


def view_of(value: Any, name: str = "value") -> memoryview:
    """The bytes of any contiguous buffer. Raises InvalidArgument."""
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"{name}: must offer its bytes as a buffer, not {type(value).__name__}"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument(f"{name}: must be contiguous (C order)")
    return view if view.format == "B" and view.ndim == 1 else _as_bytes(view)


def _as_bytes(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")


def encode_value(value: Any, limits: Limits) -> memoryview:
    if isinstance(value, str):
        raise InvalidArgument("value: must be bytes or a buffer, not str; encode it first")
    view = view_of(value)
    if view.nbytes > limits.value_bytes_max:
        raise TooLarge(f"value: {view.nbytes} bytes, limit value_bytes_max = "
                       f"{limits.value_bytes_max}")  # fmt: skip
    return view


def writable(buffer: Any) -> memoryview:
    view = view_of(buffer, "buffer")
    if view.readonly:
        raise InvalidArgument("buffer: must be writable")
    return view


def milliseconds(name: str, seconds: float) -> int:
    if not 0 < seconds < 1e9:
        raise InvalidArgument(f"{name} = {seconds!r}: must be more than 0 and less than 1e9 s")
    return max(1, round(seconds * 1000))


# --- the batches


class GetBatch(Keyed):
    """Values as bytes, or copied into buffers; sizes as results then."""

    kind = Kind.GET

    def __init__(self, keys: Sequence[bytes], buckets: Sequence[int], copy: Copy,
                 buffers: Sequence[memoryview] | None = None) -> None:  # fmt: skip
        super().__init__(keys, buckets)
        self.copy = copy
        self.buffers = buffers
        self.large: list[int] = []
        self.once: list[int] = []
        self.tell_once = False

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(to, Kind.GET, wire.Get(self.keys_of(items), self.tell_once))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Values = _expect(reply, Kind.VALUES)
        if len(body.sizes) != len(items):
            raise ProtocolError(f"{len(body.sizes)} values for {len(items)} keys")
        views = wire.placed(reply.frames, body.sizes, body.starts)
        done = items
        if body.statuses:
            statuses = body.statuses
            done = [i for i, status in zip(items, statuses, strict=True) if not status]
            views = [v for v, status in zip(views, statuses, strict=True) if not status]
        if self.buffers is None:
            self.put_results(done, [bytes(view) for view in views])
        else:
            self._take_into(done, views, self.buffers)
        if body.once:
            self.once += [i for i, once in zip(items, body.once, strict=False) if once]
        return body.statuses

    def _take_into(
        self, items: Sequence[int], views: Sequence[memoryview], buffers: Sequence[memoryview]
    ) -> None:
        results, copy = self.results, self.copy
        for i, view in zip(items, views, strict=True):
            size, buffer = len(view), buffers[i]
            if size > len(buffer):
                results[i] = _no_room(self.keys[i], size, len(buffer))
            else:
                copy(buffer[:size], view)
                results[i] = size

    def settle(self, item: int, status: int) -> None:
        if status == Status.LARGE:
            self.large.append(item)
        elif status != Status.MISS:
            super().settle(item, status)


def _no_room(key: bytes, size: int, room: int) -> TooLarge:
    return TooLarge(
        f"key {key[:80]!r}: its value of {size} bytes does not fit the buffer of {room}"
    )


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
        join_max: int,
    ) -> None:
        super().__init__(keys, buckets)
        self.values = values
        self.sizes = [len(v) for v in values]
        self.options = options
        self.join_max = join_max

    def request(self, to: Member, items: Sequence[int]) -> Request:
        keys, sizes, values = self.keys, self.sizes or (), self.values
        if len(items) == len(keys):
            body = wire.Put(list(keys), list(sizes), self.options)
            return Request(to, Kind.PUT, body, gather(values, self.join_max))
        body = wire.Put(self.keys_of(items), [sizes[i] for i in items], self.options)
        return Request(to, Kind.PUT, body, gather([values[i] for i in items], self.join_max))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = _expect(reply, Kind.STATUSES)
        self.put_results(items, [1] * len(items))
        return body.statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.EXISTS:
            self.results[item] = 0
        else:
            super().settle(item, status)


def gather(values: Sequence[memoryview], join_max: int) -> list[wire.Buffer]:
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
        joined = b"".join(small)
        if joined:
            frames.append(joined)
    return frames


class FlagBatch(Keyed):
    """Exists, delete, pin, unpin, expire: True where the key was there."""

    def __init__(self, kind: Kind, keys: Sequence[bytes], buckets: Sequence[int],
                 body: Callable[[list[bytes]], wire.Body]) -> None:  # fmt: skip
        super().__init__(keys, buckets)
        self.kind = kind
        self.mutating = kind in wire.MUTATING
        self.body = body
        self.results = [False] * len(keys)

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(to, self.kind, self.body(self.keys_of(items)))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Statuses = _expect(reply, Kind.STATUSES)
        statuses = body.statuses or bytes(len(items))
        if len(statuses) != len(items):
            raise ProtocolError(f"{len(statuses)} statuses for {len(items)} keys")
        self.put_results(items, [not status for status in statuses])
        return statuses if statuses.strip(_HIT_OR_MISS) else b""

    def settle(self, item: int, status: int) -> None:
        if status == Status.MISS:
            self.results[item] = False
        else:
            super().settle(item, status)


def _expect(reply: Reply, kind: Kind) -> Any:
    if reply.kind != kind:
        raise ProtocolError(f"an answer of kind {reply.kind} where {kind.name} was expected")
    return reply.body


# --- the calls


class Operations:
    """Builds the generator of each call. One per client; has no state but the ring."""

    def __init__(self, config: ClientConfig, clock: Callable[[], int], random: Random,
                 copy: Copy, router: routing.Router | None = None) -> None:  # fmt: skip
        self.config = config
        self.limits = config.limits
        self.clock = clock
        self.random = random
        self.copy = copy
        self.router = router or routing.Router()
        self.join_max = 256 << 10

    def context(self, timeout: float | None) -> Context:
        if timeout is not None and not 0 < timeout < 1e6:
            raise InvalidArgument(f"timeout = {timeout!r}: must be more than 0 and under 1e6 s")
        wait = self.config.timeout_s if timeout is None else timeout
        deadline = self.clock() + round(wait * 1e9)
        return Context(self.router, self.clock, deadline, self.random, self.limits)

    def _buckets(self, ctx: Context, keys: Sequence[bytes]) -> Operation[list[int]]:
        table = self.router.table or (yield from ctx.table())
        return ring.buckets_of(keys, table.bucket_count)

    # -- get

    def get(self, key: Key, timeout: float | None = None) -> Operation[bytes | None]:
        data = encode_key(key, self.limits)
        answer = yield from self._quick_get(data, timeout)
        if answer is not None:
            return None if answer.body.statuses else bytes(answer.frames[0])
        results = yield from self._get([data], None, timeout)
        value: bytes | None = _single(results)
        return value

    def _quick_get(self, key: bytes, timeout: float | None) -> Operation[Reply | None]:
        """The usual answers to a get of one key: a hit in one frame, or a miss. Else None."""
        table = self.router.table
        owner = table.owner(ring.bucket_of(key, table.bucket_count)) if table else None
        if owner is None:
            return None
        ctx = self.context(timeout)
        answer = yield from ctx.ask(Request(owner, Kind.GET, wire.Get([key])))
        if isinstance(answer, Reply) and answer.kind == Kind.VALUES:
            body: wire.Values = answer.body
            if body.statuses == _MISS:
                return answer
            if not body.statuses and [len(f) for f in answer.frames] == body.sizes:
                return answer
        return None

    def get_into(
        self, key: Key, buffer: Any, timeout: float | None = None
    ) -> Operation[int | None]:
        data, target = encode_key(key, self.limits), [writable(buffer)]
        results = yield from self._get([data], target, timeout)
        size: int | None = _single(results)
        return size

    def batch_get(
        self, keys: Iterable[Key], timeout: float | None = None
    ) -> Operation[list[bytes | None]]:
        results = yield from self._get(encode_keys(keys, self.limits), None, timeout)
        return _batch(results)

    def batch_get_into(
        self, keys: Iterable[Key], buffers: Sequence[Any], timeout: float | None = None
    ) -> Operation[list[int | None]]:
        encoded = encode_keys(keys, self.limits)
        if len(buffers) != len(encoded):
            raise InvalidArgument(f"buffers: {len(buffers)} for {len(encoded)} keys")
        targets = [writable(b) for b in buffers]
        results = yield from self._get(encoded, targets, timeout)
        return _batch(results)

    def batch_get_once(
        self, keys: list[bytes], timeout: float | None
    ) -> Operation[tuple[list[int], list[Any]]]:
        """Values, and which of them are write-once (indices)."""
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = GetBatch(keys, buckets, self.copy)
        op.tell_once = True
        yield from self._run_get(ctx, op)
        return op.once, _batch(op.results)

    def _get(
        self, keys: list[bytes], buffers: list[memoryview] | None, timeout: float | None
    ) -> Operation[list[Any]]:
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = GetBatch(keys, buckets, self.copy, buffers)
        yield from self._run_get(ctx, op)
        return op.results

    def _run_get(self, ctx: Context, op: GetBatch) -> Operation[None]:
        yield from keyed(ctx, op)
        keys, buckets, buffers = op.keys, op.buckets, op.buffers
        for i in op.large:
            buffer = buffers[i] if buffers is not None else None
            op.results[i] = yield from _caught(self._get_large(ctx, keys[i], buckets[i], buffer))

    def _get_large(
        self, ctx: Context, key: bytes, bucket: int, buffer: memoryview | None
    ) -> Operation[Any]:
        """Open, read in pieces, release. Begins again when the owner changes in between."""
        while True:
            owner, reply = yield from self._ask_owner(ctx, bucket, key, Kind.OPEN, wire.Open([key]))
            body: wire.Opened = _expect(reply, Kind.OPENED)
            if body.statuses and body.statuses[0] == Status.MISS:
                return None
            if body.statuses and body.statuses[0]:
                raise routing.error_of(body.statuses[0], key)
            token, size = body.tokens[0], body.sizes[0]
            if buffer is not None and size > len(buffer):
                yield from ctx.ask(Request(owner, Kind.RELEASE, wire.Release([token])))
                raise _no_room(key, size, len(buffer))
            target = memoryview(bytearray(size)) if buffer is None else buffer[:size]
            whole = yield from self._read_pieces(ctx, owner, token, target)
            yield from ctx.ask(Request(owner, Kind.RELEASE, wire.Release([token])))
            if whole:
                return bytes(target) if buffer is None else size
            if ctx.expired():
                raise routing.gave_up("deadline", key)
            yield from ctx.backoff()
            yield from ctx.refresh()

    def _read_pieces(
        self, ctx: Context, owner: Member, token: int, target: memoryview
    ) -> Operation[bool]:
        piece = self.limits.message_bytes_max // 4
        starts = range(0, len(target), piece)
        for wave in range(0, len(starts), WAVE):
            part = starts[wave : wave + WAVE]
            requests = [
                Request(owner, Kind.READ, wire.Read(token, at, min(piece, len(target) - at)))
                for at in part
            ]
            answers = yield from ctx.exchange(requests)
            for at, answer in zip(part, answers, strict=True):
                if not isinstance(answer, Reply) or answer.kind != Kind.VALUES:
                    return False
                body: wire.Values = answer.body
                if body.statuses.strip(b"\0"):
                    return False
                view = wire.packed(answer.frames, body.sizes)[0]
                self.copy(target[at : at + len(view)], view)
        return True

    def _ask_owner(
        self, ctx: Context, bucket: int, key: bytes, kind: Kind, body: wire.Body
    ) -> Operation[tuple[Member, Reply]]:
        """One request that changes nothing, to the bucket's owner, until it is not sent away."""
        reason = "deadline"
        while True:
            table = yield from ctx.table()
            owner = table.owner(bucket)
            if owner is not None:
                answer = yield from ctx.ask(Request(owner, kind, body))
                if isinstance(answer, Reply) and answer.kind != Kind.ERROR:
                    statuses = answer.body.statuses
                    if not statuses or statuses[0] not in routing.RETRY:
                        return owner, answer
                    reason = Status(statuses[0]).name.lower()
                else:
                    reason = answer.reason if isinstance(answer, routing.Lost) else "refused"
            if ctx.expired():
                raise routing.gave_up(reason, key)
            yield from ctx.backoff()
            yield from ctx.refresh(owner)

    # -- put

    def put(self, key: Key, value: Any, options: PutOptions,
            timeout: float | None = None) -> Operation[int]:  # fmt: skip
        pairs = [encode_key(key, self.limits)], [encode_value(value, self.limits)]
        results = yield from self._put(*pairs, options, timeout)
        return int(_single(results))

    def batch_put(
        self,
        items: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        options: PutOptions,
        timeout: float | None = None,
    ) -> Operation[list[int]]:
        pairs = list(items.items() if isinstance(items, Mapping) else items)
        keys = encode_keys([k for k, _ in pairs], self.limits)
        values = [encode_value(v, self.limits) for _, v in pairs]
        results = yield from self._put(keys, values, options, timeout)
        return _batch(results)

    def _put(
        self, keys: list[bytes], values: list[memoryview], options: PutOptions,
        timeout: float | None,
    ) -> Operation[list[Any]]:  # fmt: skip
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        bound = self.limits.message_bytes_max
        large = [i for i, v in enumerate(values) if len(v) > bound]
        if not large:
            op = PutBatch(keys, buckets, values, options, self.join_max)
            yield from keyed(ctx, op)
            return op.results
        small = [i for i, v in enumerate(values) if len(v) <= bound]
        op = PutBatch([keys[i] for i in small], [buckets[i] for i in small],
                      [values[i] for i in small], options, self.join_max)  # fmt: skip
        yield from keyed(ctx, op)
        results: list[Any] = [None] * len(keys)
        for i, result in zip(small, op.results, strict=True):
            results[i] = result
        for i in large:
            results[i] = yield from _caught(
                self._put_large(ctx, keys[i], buckets[i], values[i], options)
            )
        return results

    def _put_large(
        self, ctx: Context, key: bytes, bucket: int, value: memoryview, options: PutOptions
    ) -> Operation[int]:
        """Allocate, write in pieces, commit. Nothing is visible before the commit."""
        while True:
            body = wire.Alloc([key], [len(value)], options)
            owner, reply = yield from self._ask_owner(ctx, bucket, key, Kind.ALLOC, body)
            allocated: wire.Allocated = _expect(reply, Kind.ALLOCATED)
            status = allocated.statuses[0] if allocated.statuses else 0
            if status == Status.EXISTS:
                return 0
            if status:
                raise routing.error_of(status, key)
            written = allocated.ids[0] == 0 or (
                yield from self._write_pieces(ctx, owner, allocated.ids[0], value)
            )
            if written and allocated.ids[0] == 0:
                return 1
            if written:
                done = yield from self._commit(ctx, key, bucket, owner, allocated.ids[0])
                if done is not None:
                    return done
            else:
                yield from ctx.ask(Request(owner, Kind.ABORT, wire.Abort([allocated.ids[0]])))
            if ctx.expired():
                raise routing.gave_up("deadline", key)
            yield from ctx.backoff()
            yield from ctx.refresh()

    def _write_pieces(
        self, ctx: Context, owner: Member, id: int, value: memoryview
    ) -> Operation[bool]:
        piece = self.limits.message_bytes_max // 4
        starts = range(0, len(value), piece)
        for wave in range(0, len(starts), WAVE):
            requests = [
                Request(owner, Kind.WRITE, wire.Write(id, at), [value[at : at + piece]])
                for at in starts[wave : wave + WAVE]
            ]
            for answer in (yield from ctx.exchange(requests)):
                if not isinstance(answer, Reply) or answer.kind != Kind.STATUSES:
                    return False
                if answer.body.statuses.strip(b"\0"):
                    return False
        return True

    def _commit(
        self, ctx: Context, key: bytes, bucket: int, owner: Member, id: int
    ) -> Operation[int | None]:
        """1 or 0 as put returns, None: begin again. Raises Indeterminate."""
        op = _CommitOne(key, bucket, owner, id)
        yield from keyed(ctx, op)
        result = op.results[0]
        if isinstance(result, Conflict):
            return None
        return int(_single([result]))

    # -- the rest of the batches

    def batch_exists(
        self, keys: Iterable[Key], timeout: float | None = None, touch: bool = False
    ) -> Operation[list[bool]]:
        encoded = encode_keys(keys, self.limits)
        return (
            yield from self._flags(Kind.EXISTS, encoded, lambda k: wire.Exists(k, touch), timeout)
        )

    def exists(self, key: Key, timeout: float | None = None) -> Operation[bool]:
        return (yield from self.batch_exists([key], timeout))[0]

    def batch_delete(
        self, keys: Iterable[Key], timeout: float | None = None
    ) -> Operation[list[bool]]:
        encoded = encode_keys(keys, self.limits)
        return (yield from self._flags(Kind.DELETE, encoded, wire.Delete, timeout))

    def delete(self, key: Key, timeout: float | None = None) -> Operation[bool]:
        results = yield from self._flags(
            Kind.DELETE, [encode_key(key, self.limits)], wire.Delete, timeout, single=True
        )
        return results[0]

    def pin(self, keys: Iterable[Key], ttl: float, timeout: float | None) -> Operation[list[bool]]:
        ms = milliseconds("ttl", ttl)
        encoded = encode_keys(keys, self.limits)
        return (yield from self._flags(Kind.PIN, encoded, lambda k: wire.Pin(k, ms), timeout))

    def unpin(self, keys: Iterable[Key], timeout: float | None) -> Operation[list[bool]]:
        encoded = encode_keys(keys, self.limits)
        return (yield from self._flags(Kind.UNPIN, encoded, wire.Unpin, timeout))

    def expire(self, key: Key, ttl: float | None, timeout: float | None) -> Operation[None]:
        ms = 0 if ttl is None else milliseconds("ttl", ttl)
        data = encode_key(key, self.limits)
        found = yield from self._flags(
            Kind.EXPIRE, [data], lambda k: wire.Expire(k, ms), timeout, single=True
        )
        if not found[0]:
            raise Miss(f"key {data[:80]!r} is not there")

    def _flags(
        self, kind: Kind, keys: list[bytes], body: Callable[[list[bytes]], wire.Body],
        timeout: float | None, single: bool = False,
    ) -> Operation[list[bool]]:  # fmt: skip
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = FlagBatch(kind, keys, buckets, body)
        yield from keyed(ctx, op)
        return [_single(op.results)] if single else _batch(op.results)

    # -- prefix match

    def match_prefix(self, keys: Iterable[Key], timeout: float | None = None) -> Operation[int]:
        """How many keys from the start are there: one message per owner."""
        encoded = encode_keys(keys, self.limits)
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, encoded)
        op = MatchBatch(encoded, buckets)
        yield from keyed(ctx, op)
        return op.count()

    # -- scan and ranges

    def scan_page(
        self, cursor: ScanCursor, timeout: float | None = None
    ) -> Operation[list[tuple[bytes, int]]]:
        """The next keys with their sizes; ``cursor.done`` when nothing is left."""
        ctx = self.context(timeout)
        table = yield from ctx.table()
        cursor.begin(table.bucket_count)
        while not cursor.done:
            member, buckets = yield from self._next_owner(ctx, cursor)
            body = wire.Scan(buckets, cursor.after, cursor.prefix, cursor.limit)
            answer = yield from ctx.ask(Request(member, Kind.SCAN, body))
            if isinstance(answer, Reply) and answer.kind == Kind.PAGE:
                page: wire.Page = answer.body
                cursor.advance(buckets, page)
                if page.keys:
                    return list(zip(page.keys, page.sizes, strict=True))
                if not page.status:
                    ctx.attempt = 0
                    continue
            yield from self._again(ctx, answer, member)
        return []

    def delete_range(self, prefix: Key, timeout: float | None = None) -> Operation[int]:
        """Delete every key with the prefix; how many were there."""
        cursor = ScanCursor(encode_prefix(prefix, self.limits), self.limits.scan_keys_max)
        ctx = self.context(timeout)
        table = yield from ctx.table()
        cursor.begin(table.bucket_count)
        count = 0
        while not cursor.done:
            member, buckets = yield from self._next_owner(ctx, cursor)
            body = wire.DeleteRange(buckets, cursor.prefix, cursor.limit)
            request = Request(member, Kind.DELETE_RANGE, body)
            answer = yield from ctx.ask(request)
            while isinstance(answer, routing.Lost) and request.sent and not ctx.expired():
                yield from ctx.backoff()
                yield from ctx.refresh(member)
                if ctx.router.table is None or member not in ctx.router.table.endpoints:
                    break
                answer = yield from ctx.ask(request)
            if isinstance(answer, Reply) and answer.kind == Kind.DELETED:
                deleted: wire.Deleted = answer.body
                count += deleted.count
                cursor.finish(buckets[: deleted.finished])
                if not deleted.status:
                    ctx.attempt = 0
                    continue
            yield from self._again(ctx, answer, member)
        return count

    def _next_owner(self, ctx: Context, cursor: ScanCursor) -> Operation[tuple[Member, list[int]]]:
        while True:
            table = yield from ctx.table()
            owner = table.owner(cursor.next_bucket)
            if owner is not None:
                buckets = cursor.run_of(table)
                return owner, buckets
            if ctx.expired():
                raise routing.gave_up("no owner", cursor.prefix or b"(scan)")
            yield from ctx.backoff()
            yield from ctx.refresh()

    def _again(self, ctx: Context, answer: routing.Answer, member: Member) -> Operation[None]:
        if isinstance(answer, routing.Lost):
            reason = "deadline" if answer.deadline else answer.reason
        elif answer.kind == Kind.ERROR:
            reason = answer.body.message
        else:
            reason = Status(answer.body.status).name.lower()
        if ctx.expired():
            raise routing.gave_up(reason, b"(scan)")
        yield from ctx.backoff()
        yield from ctx.refresh(member)

    # -- looking at the cluster

    def stats(self, timeout: float | None = None) -> Operation[dict[str, wire.NodeStats]]:
        """What each node says of itself, by ``node@boot``, without those that do not answer."""
        ctx = self.context(timeout)
        yield from ctx.table()
        yield from ctx.refresh()
        table = yield from ctx.table()
        members = table.reachable()
        answers = yield from ctx.exchange([Request(m, Kind.STATS, wire.Empty()) for m in members])
        return {
            str(m): a.body
            for m, a in zip(members, answers, strict=True)
            if isinstance(a, Reply) and a.kind == Kind.NODE_STATS
        }


class _CommitOne(FlagBatch):
    """The commit of a large value; only its allocation's member can do it."""

    def __init__(self, key: bytes, bucket: int, owner: Member, id: int) -> None:
        super().__init__(Kind.COMMIT, [key], [bucket], lambda _: wire.Commit([id]))
        self.owner = owner

    def request(self, to: Member, items: Sequence[int]) -> Request:
        return Request(self.owner, Kind.COMMIT, self.body([]))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        statuses = super().absorb(items, reply)
        if statuses and statuses[0] in routing.RETRY:
            return bytes([Status.CONFLICT])
        return statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.EXISTS:
            self.results[item] = 0
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
        body: wire.Matched = _expect(reply, Kind.MATCHED)
        if not 0 <= body.count <= len(items):
            raise ProtocolError(f"{body.count} matches among {len(items)} keys")
        if body.count == len(items):
            return b""
        at = items[body.count]
        if body.status in routing.RETRY:
            if at > self.first_miss:
                return b""
            rest = len(items) - body.count
            return bytes(body.count) + bytes([body.status]) * rest
        self.first_miss = min(self.first_miss, at)
        return b""

    def count(self) -> int:
        for i, result in enumerate(self.results[: self.first_miss]):
            if isinstance(result, P2PKVError):
                raise result
            if result is not None:
                return i
        return self.first_miss


class ScanCursor:
    """Where a scan stands: the buckets that are left, and the last key of the first of them.

    Within a bucket keys come in order, so that a page can go on after its last key whatever was
    put, deleted or moved meanwhile: a key that was there throughout is seen exactly once.
    """

    def __init__(self, prefix: bytes, limit: int) -> None:
        self.prefix = prefix
        self.limit = limit
        self.after = b""
        self.begun: int | None = None
        """The bucket that ``after`` is in; whoever owns it is asked for the rest of it next."""
        self.bucket_count = 0
        self.left: dict[int, None] | None = None

    def begin(self, bucket_count: int) -> None:
        if self.left is None:
            self.bucket_count = bucket_count
            only = ring.bucket_of_prefix(self.prefix, bucket_count)
            self.left = dict.fromkeys(range(bucket_count) if only is None else (only,))

    @property
    def done(self) -> bool:
        return self.left is not None and not self.left

    @property
    def next_bucket(self) -> int:
        return next(iter(self.left or ())) if self.begun is None else self.begun

    def run_of(self, table: routing.Table) -> list[int]:
        """The next bucket and all others left of its owner."""
        owners, first = table.owners, self.next_bucket
        others = [b for b in self.left or () if owners[b] == owners[first] and b != first]
        return [first, *others[: SCAN_BUCKETS_MAX - 1]]

    def advance(self, buckets: Sequence[int], page: wire.Page) -> None:
        """Go on behind a page. Its last key belongs to the unfinished bucket, or to one before."""
        if page.finished:
            self.after, self.begun = b"", None
        self.finish(buckets[: page.finished])
        if page.finished < len(buckets) and page.keys:
            at = buckets[page.finished]
            if ring.bucket_of(page.keys[-1], self.bucket_count) == at:
                self.after, self.begun = page.keys[-1], at

    def finish(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            if self.left is not None:
                self.left.pop(bucket, None)


# --- results


def _single(results: Sequence[Any]) -> Any:
    result = results[0]
    if isinstance(result, P2PKVError):
        raise result
    return result


def _batch(results: list[Any]) -> list[Any]:
    if any(isinstance(r, P2PKVError) for r in results):
        raise BatchError(results)
    return results


def _caught(operation: Operation[Any]) -> Operation[Any]:
    """One key's outcome in a batch: an exception becomes its result."""
    try:
        return (yield from operation)
    except (P2PKVError, CorruptValue) as e:
        return e
