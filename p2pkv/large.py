"""Values larger than a message: they go and come in pieces, several under way at once. Pure.

A put allocates, writes, commits: nothing is visible before the commit. A get opens the object,
reads it, and releases it. Both begin again when something goes wrong in between, until the
deadline; only a commit can leave the outcome open (Indeterminate).
"""

from __future__ import annotations

from typing import Any

from p2pkv import wire
from p2pkv.batches import CommitOne, Make, expect, no_room, out_of_range
from p2pkv.checking import ask_owner
from p2pkv.checksums import checksums_of
from p2pkv.clock import SECOND_NS
from p2pkv.errors import Conflict, CorruptValue, P2PKVError, ProtocolError
from p2pkv.keyed import keyed
from p2pkv.outcomes import DEADLINE, RETRY, error_of, gave_up, name_of
from p2pkv.parts import Copy, Parts, cut, fill, flat, size_of
from p2pkv.routing import Context, Exchange, Lost, Operation, Reply, Request, reason_of
from p2pkv.types import Member
from p2pkv.wire import Kind, PutOptions, Status

WAVE = 4
"""Pieces of a value that are under way at once."""

PIECES_PER_MESSAGE = 4
"""A piece is this part of what a message may hold."""

GOODBYE_TIMEOUT_NS = 1 * SECOND_NS
"""How long the giving back of an allocation or a token is waited for; it also ends by itself."""


def get_large(
    ctx: Context,
    copy: Copy,
    key: bytes,
    bucket: int,
    target: Parts | None,
    start: int = 0,
    length: int = -1,
    make: Make | None = None,
    check: bool = False,
) -> Operation[Any]:
    """``length`` bytes (-1: all) from ``start`` on. None: the key is not there.

    As bytes; or copied into ``target``, and how many; or in the memory that ``make`` gave.
    ``check``: compare a whole value with its checksum.
    """
    again = False
    while True:
        body = wire.Open([key])
        owner, opened = yield from _ask_owner(ctx, bucket, key, Kind.OPEN, body, Kind.OPENED)
        status = _only_status(opened.statuses)
        if status == Status.MISS:
            return None
        if status:
            raise error_of(status, key)
        token, total = _only(opened.tokens), _only(opened.sizes)
        if total > ctx.limits.value_bytes_max:
            raise ProtocolError(f"{name_of(key)}: a value of {total} bytes is over value_bytes_max")
        size = total - start if length < 0 else length
        refusal: P2PKVError | None = None
        if size < 0 or start + size > total:
            refusal = out_of_range(key, start, length, total)
        elif target is not None and size > size_of(target):
            refusal = no_room(key, size, size_of(target))
        if refusal is not None:
            yield from _goodbye(ctx, owner, Kind.RELEASE, wire.Release([token]))
            raise refusal
        if target is not None:
            room = cut(target, 0, size)
        else:
            room = make(size) if make else memoryview(bytearray(size))
        failure = yield from _read_pieces(ctx, copy, owner, token, start, room)
        yield from _goodbye(ctx, owner, Kind.RELEASE, wire.Release([token]))
        if not failure:
            wanted = opened.checksums if check and size == total else []
            if any(wanted) and checksums_of([room]) != wanted:
                checked = yield from ask_owner(ctx, key, bucket)
                if again:
                    raise checked.on_the_way(0)
                again = True
                continue
            if target is not None:
                return size
            return room if make else bytes(flat([room])[0])
        yield from _begin_again(ctx, key, failure)


def put_large(
    ctx: Context,
    key: bytes,
    bucket: int,
    value: Parts,
    options: PutOptions,
    checksums: bool = False,
) -> Operation[int]:
    """The number of copies; 0: ``if_absent`` found the key there.

    ``checksums``: whether it is given one.
    """
    again = False
    checksum = checksums_of([value])[0] if checksums else 0
    while True:
        body = wire.Alloc([key], [size_of(value)], options)
        owner, made = yield from _ask_owner(ctx, bucket, key, Kind.ALLOC, body, Kind.ALLOCATED)
        status = _only_status(made.statuses)
        if status == Status.EXISTS:
            return 0
        if status:
            raise error_of(status, key)
        allocation = _only(made.ids)
        if not allocation:
            return 1  # a write-once object with the same content is there
        failure = yield from _write_pieces(ctx, owner, allocation, value)
        if failure:
            yield from _goodbye(ctx, owner, Kind.ABORT, wire.Abort([allocation]))
        else:
            op = CommitOne(key, bucket, owner, allocation, checksum)
            yield from keyed(ctx, op)
            result = op.results[0]
            if not isinstance(result, P2PKVError):
                return int(result)
            if isinstance(result, CorruptValue) and not again:
                again, failure = True, "it was corrupted on the way"
            elif isinstance(result, Conflict):
                failure = "the allocation ended"
            else:
                raise result
        yield from _begin_again(ctx, key, failure)


def _read_pieces(
    ctx: Context, copy: Copy, owner: Member, token: int, first: int, target: Parts
) -> Operation[str]:
    """Fill ``target`` from byte ``first`` on. Returns why that failed, or nothing."""
    size = size_of(target)
    piece = ctx.limits.message_bytes_max // PIECES_PER_MESSAGE
    starts = range(0, size, piece)
    for wave in range(0, len(starts), WAVE):
        part = [(at, min(piece, size - at)) for at in starts[wave : wave + WAVE]]
        requests = [Request(owner, Kind.READ, wire.Read(token, first + at, n)) for at, n in part]
        answers = yield from ctx.exchange(requests)
        for (at, n), answer in zip(part, answers, strict=True):
            if isinstance(answer, Lost) or answer.kind == Kind.ERROR:
                return reason_of(answer)
            body: wire.Values = expect(answer, Kind.VALUES)
            if body.statuses.strip(b"\0"):
                return "the token ended"
            view = _only(wire.packed(answer.frames, body.sizes))
            if len(view) != n:
                raise ProtocolError(f"{len(view)} bytes for a read of {n}")
            fill(cut(target, at, n), view, copy)
    return ""


def _write_pieces(ctx: Context, owner: Member, allocation: int, value: Parts) -> Operation[str]:
    """Fill the allocation. Returns why that failed, or nothing."""
    piece = ctx.limits.message_bytes_max // PIECES_PER_MESSAGE
    size = size_of(value)
    starts = range(0, size, piece)
    for wave in range(0, len(starts), WAVE):
        requests = [
            Request(owner, Kind.WRITE, wire.Write(allocation, at), flat([part]))
            for at in starts[wave : wave + WAVE]
            if (part := cut(value, at, min(piece, size - at)))
        ]
        for answer in (yield from ctx.exchange(requests)):
            if isinstance(answer, Lost) or answer.kind == Kind.ERROR:
                return reason_of(answer)
            body: wire.Statuses = expect(answer, Kind.STATUSES)
            if body.statuses.strip(b"\0"):
                return "the allocation ended"
    return ""


def _ask_owner(
    ctx: Context, bucket: int, key: bytes, kind: Kind, body: wire.Body, answer_kind: Kind
) -> Operation[tuple[Member, Any]]:
    """One request that changes nothing, to the bucket's owner, until it is not sent away."""
    reason = DEADLINE
    while not ctx.expired():
        table = yield from ctx.table()
        owner = table.owner(bucket)
        reason, answered = "no owner", False
        if owner is not None:
            answer = yield from ctx.ask(Request(owner, kind, body))
            answered = isinstance(answer, Reply)
            if isinstance(answer, Lost) or answer.kind == Kind.ERROR:
                reason = reason_of(answer)
            else:
                asked = expect(answer, answer_kind)
                status = _only_status(asked.statuses)
                if status not in RETRY:
                    return owner, asked
                reason = Status(status).name.lower()
        yield from ctx.backoff()
        yield from ctx.refresh({owner: answered} if owner is not None else {})
    raise gave_up(reason, name_of(key))


def _begin_again(ctx: Context, key: bytes, reason: str) -> Operation[None]:
    if ctx.expired():
        raise gave_up(reason, name_of(key))
    yield from ctx.backoff()
    yield from ctx.refresh()


def _goodbye(ctx: Context, owner: Member, kind: Kind, body: wire.Body) -> Operation[None]:
    deadline = min(ctx.deadline, ctx.clock() + GOODBYE_TIMEOUT_NS)
    yield Exchange((Request(owner, kind, body),), deadline)


def _only(items: Any) -> Any:
    if len(items) != 1:
        raise ProtocolError(f"{len(items)} results for one key")
    return items[0]


def _only_status(statuses: bytes) -> int:
    return int(_only(statuses)) if statuses else 0
