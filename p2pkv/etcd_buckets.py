"""Changes of bucket records in etcd: many at once, each under its own guard."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator, Sequence

import msgspec

from p2pkv.errors import AuthorityUnavailable, InvalidArgument, TooLarge
from p2pkv.etcd import EtcdClient, get, if_revision, put
from p2pkv.etcd_view import Decoder, Keys
from p2pkv.records import BucketChange, Versioned
from p2pkv.types import BucketId, Revision

CHUNK_CHANGES_MAX = 120
"""Below etcd's limit of 128 operations in a transaction."""
CHUNK_BYTES_MAX = 1 << 20
"""Below etcd's limit of 1.5 MiB for a request."""
CHUNKS_IN_FLIGHT_MAX = 8


class Result(enum.Enum):
    """What became of a change."""

    WON = "won"
    LOST = "lost"
    UNKNOWN = "unknown"


class Outcome(msgspec.Struct, frozen=True):
    """What became of the change of one bucket.

    ``current`` is the bucket's record after it: ours if we won; if we lost, what stands there
    instead (None: nothing that can be read); None if the outcome is unknown.
    """

    bucket: BucketId
    result: Result
    current: Versioned | None = None

    @property
    def won(self) -> bool:
        """The bucket's record is the wanted one, and ``current`` has its token."""
        return self.result is Result.WON

    @property
    def lost(self) -> bool:
        """Another change came first."""
        return self.result is Result.LOST

    @property
    def unknown(self) -> bool:
        """No answer: the change may be done, or may still be done. Issue it again to find out."""
        return self.result is Result.UNKNOWN


async def update(
    client: EtcdClient, keys: Keys, decoder: Decoder, changes: Sequence[BucketChange]
) -> list[Outcome]:
    """Carry out each change whose guard holds; outcomes in the order of ``changes``.

    Changes travel in chunks, one transaction each. If a chunk's guards do not all hold, its failure
    branch reads all its buckets at that same revision: those that moved on are settled by what was
    read, the others go again without them. So each further transaction settles at least one.

    *A change whose outcome was unknown* is issued again with the same guard (by the client, or by
    the caller after ``unknown``). If an earlier attempt was carried out, the guard fails now, and
    what is read back is the wanted record itself, newer than ``expected``: that counts as won. It
    is sound because a record names the member that it makes primary, and only that member or the
    planner on its behalf writes it: equal to what we wanted means that what we wanted is in force,
    at the revision in ``current``, and nobody else takes it as meant for himself. Two
    callers that want the very same record may both be told that they won.

    Raises InvalidArgument if a bucket occurs twice, TooLarge if a record exceeds 1 MiB; then
    nothing was sent.
    """
    values = [msgspec.json.encode(change.record) for change in changes]
    _check(changes, values)
    settled: dict[BucketId, Outcome] = {}
    limit = asyncio.Semaphore(CHUNKS_IN_FLIGHT_MAX)

    async def settle(chunk: dict[BucketChange, bytes]) -> None:
        async with limit:
            await _settle(client, keys, decoder, chunk, settled)

    try:
        async with asyncio.TaskGroup() as group:
            for chunk in _chunks(changes, values):
                group.create_task(settle(chunk))
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return [settled[change.bucket] for change in changes]


async def _settle(
    client: EtcdClient,
    keys: Keys,
    decoder: Decoder,
    chunk: dict[BucketChange, bytes],
    settled: dict[BucketId, Outcome],
) -> None:
    while chunk:
        names = {change: keys.bucket(change.bucket) for change in chunk}
        try:
            done = await client.txn(
                [if_revision(names[change], change.expected) for change in chunk],
                [put(names[change], value) for change, value in chunk.items()],
                [get(names[change]) for change in chunk],
            )
        except AuthorityUnavailable:
            settled.update((c.bucket, Outcome(c.bucket, Result.UNKNOWN)) for c in chunk)
            return
        if done.succeeded:
            revision = Revision(done.revision)
            for change in chunk:
                current = Versioned(change.record, revision)
                settled[change.bucket] = Outcome(change.bucket, Result.WON, current)
            return
        waiting = {}
        for (change, value), kvs in zip(chunk.items(), done.reads, strict=True):
            if (kvs[0].mod_revision if kvs else 0) == change.expected:
                waiting[change] = value
            else:
                settled[change.bucket] = _judge(change, decoder.versioned(kvs))
        chunk = waiting


def _judge(change: BucketChange, current: Versioned | None) -> Outcome:
    """The guard failed: because of our own earlier attempt, or of somebody else's change?"""
    ours = (
        current is not None
        and current.record == change.record
        and current.mod_revision > change.expected
    )
    return Outcome(change.bucket, Result.WON if ours else Result.LOST, current)


def _check(changes: Sequence[BucketChange], values: Sequence[bytes]) -> None:
    seen: set[BucketId] = set()
    for change, value in zip(changes, values, strict=True):
        if change.bucket in seen:
            raise InvalidArgument(f"changes: bucket {change.bucket} must occur only once")
        if len(value) > CHUNK_BYTES_MAX:
            raise TooLarge(
                f"the record of bucket {change.bucket} has {len(value)} bytes; "
                f"at most {CHUNK_BYTES_MAX} are allowed"
            )
        seen.add(change.bucket)


def _chunks(
    changes: Sequence[BucketChange], values: Sequence[bytes]
) -> Iterator[dict[BucketChange, bytes]]:
    chunk: dict[BucketChange, bytes] = {}
    size = 0
    for change, value in zip(changes, values, strict=True):
        if len(chunk) == CHUNK_CHANGES_MAX or (chunk and size + len(value) > CHUNK_BYTES_MAX):
            yield chunk
            chunk, size = {}, 0
        chunk[change] = value
        size += len(value)
    if chunk:
        yield chunk
