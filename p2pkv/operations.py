"""What a client can do, as generators over the routing core. Pure.

``Operations`` checks arguments against the limits before anything is sent, and builds the
generator of each call. ``Client`` and ``AsyncClient`` only run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from p2pkv import large, ring, scanning, wire
from p2pkv.arguments import (
    Key,
    encode_key,
    encode_keys,
    encode_parts,
    encode_prefix,
    encode_range,
    encode_ranges,
    encode_target,
    encode_value,
    encode_values,
    milliseconds,
    nanoseconds,
    pairs_of,
)
from p2pkv.batches import (
    FlagBatch,
    GetBatch,
    GetFresh,
    GetRanges,
    Make,
    MatchBatch,
    PutBatch,
    PutFromSource,
    ViewBatch,
)
from p2pkv.checking import recheck
from p2pkv.checksums import READING, WRITING, checksums_of
from p2pkv.config import ClientConfig
from p2pkv.errors import BatchError, InvalidArgument, Miss, P2PKVError, Unreachable
from p2pkv.keyed import keyed
from p2pkv.memory import RegisteredMemory
from p2pkv.outcomes import name_of
from p2pkv.parts import Copy, Parts
from p2pkv.routing import (
    ABSENT,
    ASK,
    THERE,
    Context,
    Known,
    Location,
    Operation,
    Place,
    Reply,
    Request,
    Router,
    Source,
    unknown,
)
from p2pkv.scanning import ScanCursor
from p2pkv.types import Member
from p2pkv.wire import Checksums, Kind, PutOptions, Status

_MISS = bytes([Status.MISS])
_THERE = bytes([THERE])


class Operations:
    """Builds the generator of each call. One per client; has no state but the ring and ``memory``,
    the pools in which an ``(address, length)`` may stand for a buffer.
    """

    def __init__(
        self,
        config: ClientConfig,
        clock: Callable[[], int],
        random: Random,
        copy: Copy,
        router: Router | None = None,
    ) -> None:
        self.config = config
        self.limits = config.limits
        self.clock = clock
        self.random = random
        self.copy = copy
        self.router = router or Router()
        self.memory = RegisteredMemory()
        self.any_copy = config.read == "any"
        self._reading = READING.get(config.checksums, Checksums.NONE)
        self._writing = config.checksums in WRITING
        self._timeout_ns = nanoseconds("timeout_s", config.timeout_s)

    def context(self, timeout: float | None) -> Context:
        wait = self._timeout_ns if timeout is None else nanoseconds("timeout", timeout)
        return Context(self.router, self.clock, self.clock() + wait, self.random, self.limits)

    def locate(self, keys: Iterable[Key]) -> list[Location | None]:
        """Where each key lies, as the newest table says that was seen. Asks nobody."""
        encoded, table = encode_keys(keys, self.limits), self.router.table
        if table is None:
            return [None] * len(encoded)
        return table.locate(ring.buckets_of(encoded, table.bucket_count))

    def _buckets(self, ctx: Context, keys: Sequence[bytes]) -> Operation[list[int]]:
        table = self.router.table or (yield from ctx.table())
        return ring.buckets_of(keys, table.bucket_count)

    # -- get

    def get(self, key: Key, timeout: float | None = None) -> Operation[bytes | None]:
        data = encode_key(key, self.limits)
        ctx = self.context(timeout)
        results, asks = self._read([data], None)
        if not asks:
            known: bytes | None = results[0]
            return known
        answer = yield from self._quick_get(ctx, data)
        if answer is not None:
            return None if answer.body.statuses else bytes(answer.frames[0])
        value: bytes | None = _single((yield from self._ask(ctx, [data], None)))
        return value

    def _read(self, keys: list[bytes], targets: list[Parts] | None) -> Known:
        """What can be read without asking: values, or their sizes if there are targets."""
        published = self.router.published
        if published is None or self._reading == Checksums.ALL:
            return unknown(len(keys))
        return published.get(keys) if targets is None else published.get_into(keys, targets)

    def places(self, keys: list[bytes]) -> list[Place | None]:
        """Where values lie in memory of this host, as far as it can be told without asking.

        None of them if values are to be compared with their checksums.
        """
        published = self.router.published
        if published is None or self._reading == Checksums.ALL:
            return [None] * len(keys)
        return published.places(keys)

    def memories(self, keys: list[bytes]) -> list[Any]:
        """The memory of each key's owner, where it is on this host; else None."""
        table, published = self.router.table, self.router.published
        if table is None or published is None or self.router.silent:
            return [None] * len(keys)
        owners = [table.owner(bucket) for bucket in ring.buckets_of(keys, table.bucket_count)]
        return [None if owner is None else published.memory_of(owner) for owner in owners]

    def _read_plain(self, keys: Any, targets: Any) -> Known | None:
        """``_read`` of arguments that nobody has checked: what is wrong with them is not read.

        None: they are no lists of keys and of buffers; nothing was tried.
        """
        published = self.router.published
        if (
            published is None
            or self._reading
            or not (isinstance(keys, list) and isinstance(targets, list))
        ):
            return None
        if len(keys) != len(targets) or not targets or isinstance(targets[0], (tuple, list)):
            return None
        return published.get_into(keys, targets)

    def _quick_get(self, ctx: Context, key: bytes) -> Operation[Reply | None]:
        """The usual answers to a get of one key: a hit in one frame, or a miss. Else None."""
        table = None if self.router.silent else self.router.table
        owner = table.owner(ring.bucket_of(key, table.bucket_count)) if table else None
        if owner is None:
            return None
        ctx.hurry(self.any_copy)
        body = wire.Get([key], checksums=self._reading)
        answer = yield from ctx.ask(Request(owner, Kind.GET, body))
        if isinstance(answer, Reply) and answer.kind == Kind.VALUES:
            values: wire.Values = answer.body
            if values.statuses == _MISS:
                return answer
            if not values.statuses and [len(f) for f in answer.frames] == values.sizes:
                return answer if _is_whole(answer) else None
        return None

    def get_into(
        self,
        key: Key,
        target: Any,
        timeout: float | None = None,
        offset: int = 0,
        length: int | None = None,
    ) -> Operation[int | None]:
        data, targets = encode_key(key, self.limits), [encode_target(target, self.memory)]
        ctx = self.context(timeout)
        if offset == 0 and length is None:
            results = yield from self._get(ctx, [data], targets)
        else:
            start, size = encode_range(offset, length)
            results = yield from self._get_ranges(ctx, [data], targets, [start], [size])
        copied: int | None = _single(results)
        return copied

    def batch_get(
        self, keys: Iterable[Key], timeout: float | None = None
    ) -> Operation[list[bytes | None]]:
        encoded = encode_keys(keys, self.limits)
        results = yield from self._get(self.context(timeout), encoded, None)
        return _batch(results)

    def batch_get_into(
        self,
        keys: Iterable[Key],
        targets: Iterable[Any],
        timeout: float | None = None,
        ranges: Iterable[Any] | None = None,
    ) -> Operation[list[int | None]]:
        known = self._read_plain(keys, targets) if ranges is None else None
        if known is not None and not known[1]:
            return known[0]
        encoded, memory = encode_keys(keys, self.limits), self.memory
        views = [encode_target(t, memory) for t in targets]
        if len(views) != len(encoded):
            raise InvalidArgument(f"buffers: {len(views)} for {len(encoded)} keys")
        if ranges is None:
            results = yield from self._get(self.context(timeout), encoded, views, known)
        else:
            starts, lengths = encode_ranges(ranges, len(encoded))
            results = yield from self._get_ranges(
                self.context(timeout), encoded, views, starts, lengths
            )
        return _batch(results)

    def get_range(
        self, key: Key, offset: int, length: int | None, timeout: float | None = None
    ) -> Operation[bytes | None]:
        data, (start, size) = encode_key(key, self.limits), encode_range(offset, length)
        ctx = self.context(timeout)
        results = yield from self._get_ranges(ctx, [data], None, [start], [size])
        value: bytes | None = _single(results)
        return value

    def batch_get_range(
        self, keys: Iterable[Key], ranges: Iterable[Any], timeout: float | None = None
    ) -> Operation[list[bytes | None]]:
        encoded = encode_keys(keys, self.limits)
        starts, lengths = encode_ranges(ranges, len(encoded))
        ctx = self.context(timeout)
        return _batch((yield from self._get_ranges(ctx, encoded, None, starts, lengths)))

    def batch_get_fresh(
        self, keys: Iterable[Key], make: Make, timeout: float | None = None
    ) -> Operation[list[memoryview | None]]:
        """Values in the writable memory that ``make(size)`` gives for each."""
        encoded = encode_keys(keys, self.limits)
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, encoded)
        op = GetFresh(encoded, buckets, self.copy, make, self.limits.value_bytes_max, self._reading)
        op.any_copy = self.any_copy
        yield from keyed(ctx, op)
        if op.suspects:
            yield from recheck(ctx, op)
        check = bool(self._reading)
        for i in op.large:
            op.results[i] = yield from _caught(
                large.get_large(
                    ctx, self.copy, encoded[i], buckets[i], None, make=make, check=check
                )
            )
        return _batch(op.results)

    def batch_get_views(
        self, keys: Iterable[Key], timeout: float | None = None
    ) -> Operation[list[memoryview | None]]:
        """Read-only views of the values, in the memory of nodes on this host as far as may be."""
        encoded = encode_keys(keys, self.limits)
        return _batch((yield from self._views(encoded, timeout)))

    def get_view(self, key: Key, timeout: float | None = None) -> Operation[memoryview | None]:
        """As ``batch_get_views``, of one value."""
        results = yield from self._views([encode_key(key, self.limits)], timeout)
        view: memoryview | None = _single(results)
        return view

    def _views(self, keys: list[bytes], timeout: float | None) -> Operation[list[Any]]:
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = ViewBatch(keys, buckets, self.copy)
        yield from self._run_get(ctx, op)
        return [
            memoryview(value).toreadonly() if isinstance(value, bytes) else value
            for value in op.results
        ]

    def batch_get_once(
        self, keys: list[bytes], timeout: float | None
    ) -> Operation[tuple[list[int], list[Any]]]:
        """Values, and which of them are write-once (indices)."""
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = GetBatch(keys, buckets, self.copy, tell_once=True, checksums=self._reading)
        op.any_copy = self.any_copy
        yield from self._run_get(ctx, op)
        return op.once, _batch(op.results)

    def _get(
        self,
        ctx: Context,
        keys: list[bytes],
        targets: list[Parts] | None,
        known: Known | None = None,
    ) -> Operation[list[Any]]:
        results, left = self._read(keys, targets) if known is None else known
        if not left:
            return results
        if len(left) == len(keys):
            return (yield from self._ask(ctx, keys, targets))
        some = None if targets is None else [targets[i] for i in left]
        _merge(results, left, (yield from self._ask(ctx, [keys[i] for i in left], some)))
        return results

    def _ask(
        self, ctx: Context, keys: list[bytes], targets: list[Parts] | None
    ) -> Operation[list[Any]]:
        buckets = yield from self._buckets(ctx, keys)
        op = GetBatch(keys, buckets, self.copy, targets, checksums=self._reading)
        op.any_copy = self.any_copy
        yield from self._run_get(ctx, op)
        return op.results

    def _run_get(self, ctx: Context, op: GetBatch) -> Operation[None]:
        yield from keyed(ctx, op)
        if op.suspects:
            yield from recheck(ctx, op)
        keys, buckets, targets = op.keys, op.buckets, op.targets
        check = bool(self._reading)
        for i in op.large:
            target = targets[i] if targets is not None else None
            op.results[i] = yield from _caught(
                large.get_large(ctx, self.copy, keys[i], buckets[i], target, check=check)
            )

    def _get_ranges(
        self,
        ctx: Context,
        keys: list[bytes],
        targets: list[Parts] | None,
        starts: list[int],
        lengths: list[int],
    ) -> Operation[list[Any]]:
        buckets = yield from self._buckets(ctx, keys)
        op = GetRanges(keys, buckets, self.copy, targets, starts, lengths)
        op.any_copy = self.any_copy
        yield from keyed(ctx, op)
        for i in op.large:
            target = targets[i] if targets is not None else None
            op.results[i] = yield from _caught(
                large.get_large(ctx, self.copy, keys[i], buckets[i], target, starts[i], lengths[i])
            )
        return op.results

    # -- put

    def put(
        self, key: Key, value: Any, options: PutOptions, timeout: float | None = None
    ) -> Operation[int]:
        data, parts = encode_key(key, self.limits), encode_value(value, self.limits, self.memory)
        results = yield from self._put([data], [parts], options, timeout)
        return int(_single(results))

    def put_from(
        self, key: Key, parts: Any, options: PutOptions, timeout: float | None = None
    ) -> Operation[int]:
        data, value = encode_key(key, self.limits), encode_parts(parts, self.limits, self.memory)
        results = yield from self._put([data], [value], options, timeout)
        return int(_single(results))

    def batch_put(
        self,
        items: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
        options: PutOptions,
        timeout: float | None = None,
    ) -> Operation[list[int]]:
        keys, values = pairs_of(items)
        encoded = encode_keys(keys, self.limits)
        views: Sequence[Parts] = encode_values(values, self.limits, self.memory)
        results = yield from self._put(encoded, views, options, timeout)
        return _batch(results)

    def batch_put_from(
        self,
        keys: Iterable[Key],
        values: Iterable[Any],
        options: PutOptions,
        timeout: float | None = None,
    ) -> Operation[list[int]]:
        encoded, memory = encode_keys(keys, self.limits), self.memory
        parts = [encode_parts(v, self.limits, memory) for v in values]
        if len(parts) != len(encoded):
            raise InvalidArgument(f"values: {len(parts)} for {len(encoded)} keys")
        return _batch((yield from self._put(encoded, parts, options, timeout)))

    def batch_put_source(
        self,
        keys: list[bytes],
        sizes: list[int],
        source: Source,
        options: PutOptions,
        timeout: float | None = None,
    ) -> Operation[list[int]]:
        """``batch_put`` of values of up to ``message_bytes_max`` that are not in host memory."""
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = PutFromSource(keys, buckets, sizes, source, options, self._writing)
        yield from _run_put(ctx, op)
        return _batch(op.results)

    def _put(
        self,
        keys: list[bytes],
        values: Sequence[Parts],
        options: PutOptions,
        timeout: float | None,
    ) -> Operation[list[Any]]:
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        bound = self.limits.message_bytes_max
        op = PutBatch(keys, buckets, values, options, self._writing)
        if max(op.sizes, default=0) <= bound:
            yield from _run_put(ctx, op)
            return op.results
        big = [i for i, size in enumerate(op.sizes) if size > bound]
        small = sorted(set(range(len(keys))).difference(big))
        op = PutBatch(
            [keys[i] for i in small],
            [buckets[i] for i in small],
            [values[i] for i in small],
            options,
            self._writing,
        )
        yield from _run_put(ctx, op)
        results: list[Any] = [None] * len(keys)
        for i, result in zip(small, op.results, strict=True):
            results[i] = result
        for i in big:
            results[i] = yield from _caught(
                large.put_large(ctx, keys[i], buckets[i], values[i], options, self._writing)
            )
        return results

    # -- whether keys are there; deleting, keeping

    def batch_exists(
        self, keys: Iterable[Key], timeout: float | None = None, touch: bool = False
    ) -> Operation[list[bool]]:
        if touch:
            encoded = encode_keys(keys, self.limits)
            return _batch((yield from self._exists(encoded, timeout, True)))
        there = self._there(keys)
        if there and ASK not in there:
            return list(map(bool, there))
        encoded = encode_keys(keys, self.limits)
        if encoded and not there:
            return _batch((yield from self._exists(encoded, timeout, False)))
        left = [i for i, flag in enumerate(there) if flag == ASK]
        results: list[Any] = [flag == THERE for flag in there]
        if left:
            asked = [encoded[i] for i in left]
            _merge(results, left, (yield from self._exists(asked, timeout, False)))
        return _batch(results)

    def _there(self, keys: Iterable[Key]) -> bytes:
        """For each key ABSENT, THERE, or ASK where that cannot be told without asking. Empty:
        nothing can.

        Keys need no check before: one that is wrong is to be asked for.
        """
        if self.router.published is None or not isinstance(keys, list):
            return b""
        return self.router.published.exists(keys)

    def _exists(
        self, keys: list[bytes], timeout: float | None, touch: bool
    ) -> Operation[list[Any]]:
        def body(keys: list[bytes]) -> wire.Exists:
            return wire.Exists(keys, touch)

        return (yield from self._flags(Kind.EXISTS, keys, body, timeout))

    def exists(self, key: Key, timeout: float | None = None) -> Operation[bool]:
        data = encode_key(key, self.limits)
        there = self._there([data])
        if there and there[0] != ASK:
            return there[0] == THERE
        return bool(_single((yield from self._exists([data], timeout, False))))

    def batch_delete(
        self, keys: Iterable[Key], timeout: float | None = None
    ) -> Operation[list[bool]]:
        encoded = encode_keys(keys, self.limits)
        return _batch((yield from self._flags(Kind.DELETE, encoded, wire.Delete, timeout)))

    def delete(self, key: Key, timeout: float | None = None) -> Operation[bool]:
        data = encode_key(key, self.limits)
        results = yield from self._flags(Kind.DELETE, [data], wire.Delete, timeout)
        return bool(_single(results))

    def pin(
        self, keys: Iterable[Key], ttl: float, timeout: float | None = None
    ) -> Operation[list[bool]]:
        ms = milliseconds("ttl", ttl)
        encoded = encode_keys(keys, self.limits)
        return _batch(
            (yield from self._flags(Kind.PIN, encoded, lambda k: wire.Pin(k, ms), timeout))
        )

    def unpin(self, keys: Iterable[Key], timeout: float | None = None) -> Operation[list[bool]]:
        encoded = encode_keys(keys, self.limits)
        return _batch((yield from self._flags(Kind.UNPIN, encoded, wire.Unpin, timeout)))

    def expire(self, key: Key, ttl: float | None, timeout: float | None = None) -> Operation[None]:
        ms = 0 if ttl is None else milliseconds("ttl", ttl)
        data = encode_key(key, self.limits)
        results = yield from self._flags(Kind.EXPIRE, [data], lambda k: wire.Expire(k, ms), timeout)
        if not _single(results):
            raise Miss(f"{name_of(data)} is not there")

    def _flags(
        self,
        kind: Kind,
        keys: list[bytes],
        body: Callable[[list[bytes]], wire.Body],
        timeout: float | None,
    ) -> Operation[list[Any]]:
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, keys)
        op = FlagBatch(kind, keys, buckets, body)
        yield from keyed(ctx, op)
        return op.results

    # -- prefixes

    def match_prefix(self, keys: Iterable[Key], timeout: float | None = None) -> Operation[int]:
        """How many keys from the start are there: one message per owner."""
        there = self._there(keys)
        known = len(there) - len(there.lstrip(_THERE))
        is_all = bool(there) and (known == len(there) or there[known] == ABSENT)
        if is_all and ASK not in there:
            return known
        rest = encode_keys(keys, self.limits)[known:]
        if is_all:
            return known
        ctx = self.context(timeout)
        buckets = yield from self._buckets(ctx, rest)
        op = MatchBatch(rest, buckets)
        yield from keyed(ctx, op)
        return known + op.count()

    def scan_page(
        self, cursor: ScanCursor, timeout: float | None = None
    ) -> Operation[list[tuple[bytes, int]]]:
        """The next keys with their sizes; ``cursor.done`` when nothing is left."""
        return (yield from scanning.scan_page(self.context(timeout), cursor))

    def delete_range(self, prefix: Key, timeout: float | None = None) -> Operation[int]:
        """Delete every key with the prefix; how many were there."""
        cursor = ScanCursor(encode_prefix(prefix, self.limits), self.limits.scan_keys_max)
        return (yield from scanning.delete_range(self.context(timeout), cursor))

    # -- looking at the cluster

    def _chosen(self, ctx: Context, nodes: Sequence[str]) -> Operation[list[Member]]:
        """The members of these nodes, all if empty. Raises InvalidArgument if one is not up."""
        yield from ctx.table()
        yield from ctx.refresh()
        table = yield from ctx.table()
        chosen = [m for m in table.reachable() if not nodes or str(m.node) in nodes]
        unknown = set(nodes).difference(str(m.node) for m in chosen)
        if unknown:
            raise InvalidArgument(f"node: {', '.join(sorted(unknown))}: no node of this name is up")
        return chosen

    def drain(self, node: str, draining: bool, timeout: float | None = None) -> Operation[None]:
        """Let a node give everything away, or take buckets again."""
        ctx = self.context(timeout)
        (member,) = yield from self._chosen(ctx, [node])
        answer = yield from ctx.ask(Request(member, Kind.DRAIN, wire.Drain(draining)))
        if not isinstance(answer, Reply) or answer.kind != Kind.PONG:
            raise Unreachable(f"node {node!r} did not take the request to drain: ask it again")

    def scrub(
        self, members: Sequence[str], bytes_per_s: int, timeout: float | None = None
    ) -> Operation[dict[str, wire.Scrubbed]]:
        """Start a scrub (0 bytes/s: ask) at these nodes, all if empty; by ``node@boot``."""
        if not 0 <= bytes_per_s < 1 << 62:
            raise InvalidArgument(f"bytes_per_s = {bytes_per_s}: must be 0 or more")
        ctx = self.context(timeout)
        chosen = yield from self._chosen(ctx, members)
        body = wire.Scrub(bytes_per_s)
        answers = yield from ctx.exchange([Request(m, Kind.SCRUB, body) for m in chosen])
        return {
            str(m): a.body
            for m, a in zip(chosen, answers, strict=True)
            if isinstance(a, Reply) and a.kind == Kind.SCRUBBED
        }

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


def _is_whole(answer: Reply) -> bool:
    """Whether the only value of an answer is what its checksum says, if it has one."""
    wanted: list[int] = answer.body.checksums
    if not wanted or not wanted[0]:
        return True
    return checksums_of([memoryview(answer.frames[0])]) == wanted


def _run_put(ctx: Context, op: PutBatch) -> Operation[None]:
    """What did not arrive as it was sent is sent once more."""
    yield from keyed(ctx, op)
    if op.corrupt:
        again, op.corrupt = sorted(op.corrupt), []
        yield from keyed(ctx, op, again)


def _merge(results: list[Any], left: Sequence[int], asked: Sequence[Any]) -> None:
    for i, result in zip(left, asked, strict=True):
        results[i] = result


def _single(results: Sequence[Any]) -> Any:
    result = results[0]
    if isinstance(result, P2PKVError):
        raise result
    return result


def _batch(results: list[Any]) -> list[Any]:
    if any(issubclass(kind, P2PKVError) for kind in set(map(type, results))):
        raise BatchError(results)
    return results


def _caught(operation: Operation[Any]) -> Operation[Any]:
    """One key's outcome in a batch: an exception becomes its result."""
    try:
        return (yield from operation)
    except P2PKVError as e:
        return e


__all__ = [
    "Key",
    "Operations",
    "ScanCursor",
    "encode_key",
    "encode_prefix",
    "milliseconds",
]
