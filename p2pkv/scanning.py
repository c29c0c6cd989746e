"""Going through all keys with a prefix, bucket by bucket, while buckets move. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv import ring, wire
from p2pkv.batches import expect
from p2pkv.errors import Indeterminate, P2PKVError, ProtocolError
from p2pkv.outcomes import RETRY, gave_up
from p2pkv.routing import Answer, Context, Lost, Operation, Reply, Request, Table, reason_of
from p2pkv.types import Member
from p2pkv.wire import Kind, Status

BUCKETS_MAX = 4096
"""Buckets that one request names."""


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

    def run_of(self, table: Table) -> list[int]:
        """The next bucket and all others left of its owner."""
        owners, first = table.owners, self.next_bucket
        others = [b for b in self.left or () if owners[b] == owners[first] and b != first]
        return [first, *others[: BUCKETS_MAX - 1]]

    def advance(self, buckets: Sequence[int], page: wire.Page) -> None:
        """Go on behind a page. Its last key belongs to the unfinished bucket, or to one before.

        Raises ProtocolError if the page makes no sense.
        """
        if len(page.keys) != len(page.sizes):
            raise ProtocolError(f"{len(page.sizes)} sizes for {len(page.keys)} keys")
        if page.keys:
            last = ring.bucket_of(page.keys[-1], self.bucket_count)
            if last not in buckets[: page.finished + 1]:
                raise ProtocolError("a page with a key of a bucket that was not asked for")
        self.finish(buckets, page.finished)
        if page.finished < len(buckets) and page.keys and last == buckets[page.finished]:
            self.after, self.begun = page.keys[-1], last

    def finish(self, buckets: Sequence[int], finished: int) -> None:
        """The first ``finished`` buckets are through. Raises ProtocolError."""
        if finished > len(buckets):
            raise ProtocolError(f"{finished} of {len(buckets)} buckets are finished")
        if finished and self.left is not None:
            self.after, self.begun = b"", None
            for bucket in buckets[:finished]:
                self.left.pop(bucket, None)

    @property
    def name(self) -> str:
        """How messages name the scan."""
        return f"prefix {self.prefix[:80]!r}"


def scan_page(ctx: Context, cursor: ScanCursor) -> Operation[list[tuple[bytes, int]]]:
    """The next keys with their sizes; ``cursor.done`` when nothing is left."""
    table = yield from ctx.table()
    cursor.begin(table.bucket_count)
    while not cursor.done:
        member, buckets = yield from _next_owner(ctx, cursor)
        body = wire.Scan(buckets, cursor.after, cursor.prefix, cursor.limit)
        answer = yield from ctx.ask(Request(member, Kind.SCAN, body))
        if isinstance(answer, Reply) and answer.kind != Kind.ERROR:
            page: wire.Page = expect(answer, Kind.PAGE)
            cursor.advance(buckets, page)
            if page.keys:
                return list(zip(page.keys, page.sizes, strict=True))
            if _made_progress(ctx, page):
                continue
        yield from _again(ctx, answer, member, cursor)
    return []


def delete_range(ctx: Context, cursor: ScanCursor) -> Operation[int]:
    """Delete all keys with the cursor's prefix; how many were there.

    Raises Indeterminate if it ended early and some may be gone.
    """
    count, unsure = 0, False
    try:
        table = yield from ctx.table()
        cursor.begin(table.bucket_count)
        while not cursor.done:
            member, buckets = yield from _next_owner(ctx, cursor)
            request = Request(
                member, Kind.DELETE_RANGE, wire.DeleteRange(buckets, cursor.prefix, cursor.limit)
            )
            answer, maybe_run = yield from _insist(ctx, request)
            unsure = unsure or maybe_run
            if isinstance(answer, Reply) and answer.kind != Kind.ERROR:
                deleted: wire.Deleted = expect(answer, Kind.DELETED)
                count += deleted.count
                cursor.finish(buckets, deleted.finished)
                if _made_progress(ctx, deleted):
                    continue
            yield from _again(ctx, answer, member, cursor)
    except P2PKVError as e:
        if count or unsure:
            raise Indeterminate(
                f"{cursor.name}: {count} keys were deleted, maybe more, but not all: {e}"
            ) from None
        raise
    return count


def _insist(ctx: Context, request: Request) -> Operation[tuple[Answer, bool]]:
    """Send a write, again if need be, until its member answers or has left the ring.

    Returns the last answer, and whether the write may have run without one.
    """
    answer = yield from ctx.ask(request)
    maybe_run = request.sent and isinstance(answer, Lost)
    while isinstance(answer, Lost) and maybe_run and not ctx.expired():
        yield from ctx.backoff()
        yield from ctx.refresh({request.to: False})
        table = yield from ctx.table()
        if ctx.expired() or request.to not in table.endpoints:
            break
        answer = yield from ctx.ask(request)
    return answer, maybe_run and (isinstance(answer, Lost) or answer.kind == Kind.ERROR)


def _next_owner(ctx: Context, cursor: ScanCursor) -> Operation[tuple[Member, list[int]]]:
    while True:
        table = yield from ctx.table()
        owner = table.owner(cursor.next_bucket)
        if owner is not None:
            return owner, cursor.run_of(table)
        if ctx.expired():
            raise gave_up("no owner", cursor.name)
        yield from ctx.backoff()
        yield from ctx.refresh()


def _made_progress(ctx: Context, body: wire.Page | wire.Deleted) -> bool:
    """Whether to go on at once. Raises ProtocolError for an answer that neither did nor refused."""
    if body.status:
        return False
    if not body.finished and not (isinstance(body, wire.Deleted) and body.count):
        raise ProtocolError("an answer that leaves the scan where it was")
    ctx.attempt = 0
    return True


def _again(ctx: Context, answer: Answer, member: Member, cursor: ScanCursor) -> Operation[None]:
    if isinstance(answer, Lost) or answer.kind == Kind.ERROR:
        reason = reason_of(answer)
    elif answer.body.status in RETRY:
        reason = Status(answer.body.status).name.lower()
    else:
        raise ProtocolError(f"{cursor.name}: got the unexpected status {answer.body.status}")
    if ctx.expired():
        raise gave_up(reason, cursor.name)
    yield from ctx.backoff()
    yield from ctx.refresh({member: isinstance(answer, Reply)})
