"""Comparing this node's buckets with their copies, all the time and slowly, and mending them.

By the protocol copies do not differ, but for what a member gave up for want of room, and bytes
that memory did not keep. Comparing finds these, and would find mistakes of ours.

What a copy lacks, or has another write of, is written again through the log, if all copies have
room for it. What the primary lacks is put back if the copy is of the same write that was corrupt
here, or that this node gave up when it was a backup and now has room for; else the copies give it
up. Everything goes through the log, so it takes its place among the
writes of clients, and needs no rules of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

from p2pkv import clock, wire
from p2pkv.config import NodeConfig
from p2pkv.digests import (
    Difference,
    Note,
    Slice,
    Turns,
    difference,
    key_hash,
    pack,
    slices,
    unpack,
)
from p2pkv.errors import ProtocolError
from p2pkv.handover import entry_of, options_of
from p2pkv.journal import Journal, Outcome
from p2pkv.objects import METADATA_BYTES, Object, State, extent_bytes
from p2pkv.replicas import Replicas
from p2pkv.routing import Reply, Request
from p2pkv.sessions import Response, Session
from p2pkv.types import BucketId, Member
from p2pkv.wire import Kind, Status

log = logging.getLogger("p2pkv.comparing")

DOUBTS = 3
"""So many buckets in doubt are compared for each other one."""
ANSWER_TIMEOUT_NS = 2 * clock.SECOND_NS
ASKED_MAX = 16
"""How often a copy is asked for a note before it is left for another time."""
RESEND_KEYS = 256
RESEND_BYTES = 16 << 20
"""Written again after one comparison, unless one value is more."""
FETCH_KEYS = 64
SPARE_SHARE = 32
"""One part in so many of the arena is no room: it is left for writes of clients."""


class Copies(NamedTuple):
    """What one note says, here and at the members that have answered."""

    note: Note
    answers: dict[Member, wire.Compared]
    stamps: dict[Member, dict[int, int]]
    """Of a slice."""


class Peers(Protocol):
    """Who carries requests to other nodes, as ``AsyncDriver`` does."""

    async def exchange(self, requests: Sequence[Request], deadline_ns: int) -> Sequence[Any]: ...


class Comparing:
    """See the module. Both sides of it: what a primary does, and what its backups answer."""

    def __init__(
        self,
        config: NodeConfig,
        journal: Journal,
        driver: Peers,
        random: Random,
        now: Callable[[], int] = clock.monotonic,
    ) -> None:
        self._now = now
        self._config = config
        self._journal = journal
        self._store = journal.store
        self._replicas: Replicas = journal.replicas
        self._driver = driver
        self._random = random
        self._turns = Turns(DOUBTS)
        journal.doubt = self._turns.doubt
        self.compared_total = 0
        self.differing_total = 0
        self.stale_total = 0
        self.extra_total = 0
        self.resent_total = 0
        self.resent_bytes_total = 0
        self.restored_total = 0

    @property
    def handlers(self) -> Mapping[Kind, Callable[[Session, Any, Any, int], Response]]:
        """What other nodes may ask."""
        return {
            Kind.COMPARE: self._on_compare,
            Kind.FETCH: self._on_fetch,
            Kind.DROPPED: self._on_dropped,
        }

    @property
    def missing(self) -> int:
        """Copies that members in sync of this node's buckets are known to lack."""
        self._journal.missing.retain(self.in_step())
        return self._journal.missing.total

    # -- as primary: when

    async def run(self) -> None:
        """Compare one bucket after the other until cancelled."""
        every = self._config.compare_every_s / (DOUBTS + 1)
        while every:
            await asyncio.sleep(self._random.uniform(0.9 * every, 1.1 * every))
            await self.tell_dropped()
            in_step = self.in_step()
            self._journal.missing.retain(in_step)
            bucket = self._turns.next(in_step)
            if bucket is not None:
                await self.compare(BucketId(bucket), in_step[bucket])

    def in_step(self) -> dict[int, tuple[Member, ...]]:
        """Our buckets, with the other members in sync."""
        replicas = self._replicas
        found: dict[int, tuple[Member, ...]] = {}
        for bucket in replicas.shared & replicas.served:
            replica = replicas.by_bucket[bucket]
            in_sync = replica.record.in_sync if replica.record else ()
            members = tuple(m for m in in_sync if m in replica.followers)
            if members and replica.writable:
                found[bucket] = members
        return found

    # -- comparing

    async def compare(self, bucket: BucketId, members: Sequence[Member]) -> None:
        copies = await self._noted(bucket, None, members)
        if copies is None:
            return
        self.compared_total += 1
        note = copies.note
        differing = [m for m, answer in copies.answers.items() if answer.digest != note.digest]
        if differing:
            self.differing_total += 1
            await self._look_closer(bucket, note.objects, members)
        elif len(copies.answers) == len(members):
            self._journal.missing.set(bucket, {})
        for member, answer in copies.answers.items():
            if answer.room:
                for other in self._journal.missing.buckets(member)[:DOUBTS]:
                    self._turns.doubt(other)

    async def _noted(
        self, bucket: BucketId, part: Slice | None, members: Sequence[Member]
    ) -> Copies | None:
        """The notes of all copies as of one operation; None if this node made none."""
        outcome = Outcome(1, lambda done: done.statuses[0])
        self._journal.compare(bucket, part, outcome)
        outcome.close()
        status = await _told(outcome)
        note = self._journal.notes.last(bucket)
        if status is not Status.OK or note is None:
            return None
        copies = Copies(note, {}, {})
        waiting = list(members)
        for _ in range(ASKED_MAX):
            waiting = await self._ask(bucket, copies, waiting)
            if not waiting:
                break
            await asyncio.sleep(self._config.beacon_s / 4)
        return copies

    async def _ask(self, bucket: int, copies: Copies, members: Sequence[Member]) -> list[Member]:
        """Take the answers of those who have come so far; who has not."""
        body = wire.Compare(bucket, copies.note.position)
        requests = [Request(m, Kind.COMPARE, body) for m in members]
        replies = await self._driver.exchange(requests, self._now() + ANSWER_TIMEOUT_NS)
        later: list[Member] = []
        for member, reply in zip(members, replies, strict=True):
            if not isinstance(reply, Reply) or reply.kind != Kind.COMPARED:
                continue
            if reply.body.status:
                later.append(member)
                continue
            try:
                stamps = unpack(b"".join(bytes(frame) for frame in reply.frames))
            except ValueError as e:
                log.warning("bucket %d: %s answers nonsense: %s", bucket, member, e)
                continue
            copies.answers[member] = reply.body
            copies.stamps[member] = stamps
        return later

    async def _look_closer(self, bucket: BucketId, objects: int, members: Sequence[Member]) -> None:
        """Find which objects differ, slice by slice, and mend them."""
        missing = dict.fromkeys(members, 0)
        for part in slices(objects):
            copies = await self._noted(bucket, part, members)
            if copies is None or len(copies.answers) < len(members):
                return
            for member in members:
                found = difference(copies.note, copies.stamps[member])
                missing[member] += len(found.missing)
                self._report(bucket, member, found, copies.stamps[member])
            for member in members:
                extra = difference(copies.note, copies.stamps[member]).extra
                await self._mend_extra(bucket, member, extra, copies.stamps[member])
            wanted = {
                hash_
                for member in members
                for found in [difference(copies.note, copies.stamps[member])]
                for hash_ in (*found.missing, *found.stale)
            }
            if wanted and self._resend(bucket, wanted, copies):
                self._turns.doubt(bucket)
        self._journal.missing.set(bucket, missing)

    def _report(
        self, bucket: int, member: Member, found: Difference, stamps: Mapping[int, int]
    ) -> None:
        corrupt = self._journal.corrupt
        extra = [
            h
            for h in found.extra
            if (bucket, h) not in corrupt and not self._gave_up(bucket, h, stamps[h])
        ]
        self.stale_total += len(found.stale)
        self.extra_total += len(extra)
        if found.stale or extra:
            log.error(
                "bucket %d: the copy of %s has another write of %d objects, and %d that are not "
                "here; they are mended",
                bucket, member, len(found.stale), len(extra),
            )  # fmt: skip

    # -- mending

    def _resend(self, bucket: int, hashes: set[int], copies: Copies) -> bool:
        """Write these objects again, as far as all copies have room. Whether any was."""
        answers = copies.answers.values()
        room = min(answer.room for answer in answers)
        largest = min(answer.largest for answer in answers)
        now, sent, total = self._now(), 0, 0
        for key, item in list(self._store.index[bucket].items()):
            if key_hash(key) not in hashes or item.extent_bytes > min(room, largest):
                continue
            if sent == RESEND_KEYS or total >= RESEND_BYTES:
                break
            if self._journal.resend(item, now):
                sent, total, room = sent + 1, total + item.size, room - item.extent_bytes
        self.resent_total += sent
        self.resent_bytes_total += total
        return sent > 0

    async def _mend_extra(
        self, bucket: int, member: Member, hashes: Sequence[int], stamps: Mapping[int, int]
    ) -> None:
        """Objects that only the other copy has."""
        corrupt = self._journal.corrupt
        for hash_ in hashes:
            stamp = stamps[hash_]
            was = corrupt.pop((bucket, hash_), None)
            if was is not None and was[0] == stamp:
                await self._restore(bucket, member, hash_, stamp, was[1])
            elif self._gave_up(bucket, hash_, stamp):
                await self._restore(bucket, member, hash_, stamp, None)
        unknown = [h for h in hashes if (bucket, h) not in corrupt][:FETCH_KEYS]
        if unknown:
            fetched, _ = await self._fetch(bucket, member, unknown, values=False)
            for entry in fetched:
                self._journal.give_up(bucket, entry.key)

    def _gave_up(self, bucket: int, hash_: int, stamp: int) -> bool:
        """Whether this node had that write, or should have, and gave it up as a backup."""
        return self._journal.given_up.get((bucket, hash_)) == stamp

    async def _restore(
        self, bucket: int, member: Member, hash_: int, stamp: int, checksum: int | None
    ) -> None:
        """Take back from a copy what this node lacks, if it still is of the same write.

        ``checksum``: of what was corrupt here (0: not known), which is not taken without one. None:
        it was given up for want of room, and comes back only if there is room now.
        """
        entries, value = await self._fetch(bucket, member, [hash_], values=True)
        if len(entries) != 1 or entries[0].stamp != stamp:
            return
        entry = entries[0]
        expected = checksum or entry.checksum
        if checksum is None and extent_bytes(entry.size) > min(self._room()):
            return
        if checksum is not None and not expected:
            return
        [item] = self._store.allocate_batch(
            [bucket], [entry.key], [entry.size], options_of(entry), self._now(), decided=True
        )
        if not isinstance(item, Object):
            return
        item.checksum = expected or None
        self._store.acquire(item)  # the bucket may leave while the rest is fetched
        try:
            there = await self._take_rest(item, member, hash_, stamp, value)
            if there and not self._store.differing([item], [expected]):
                self._journal.given_up.pop((bucket, hash_), None)
                self.restored_total += self._journal.restore(item)
            else:
                self._store.abort_batch([item])
        finally:
            self._store.release(item)

    async def _take_rest(
        self, item: Object, member: Member, hash_: int, stamp: int, value: bytes
    ) -> bool:
        """Fill the object with ``value`` and what follows it. Whether all of it is there."""
        at = 0
        while item.state is State.ALLOCATED and len(value) <= item.size - at:
            self._store.write(item.offset + at, memoryview(value))
            at += len(value)
            if at == item.size:
                return True
            entries, value = await self._fetch(item.bucket, member, [hash_], values=True, start=at)
            if len(entries) != 1 or entries[0].stamp != stamp or not value:
                return False
        return False

    async def _fetch(
        self, bucket: int, member: Member, hashes: Sequence[int], values: bool, start: int = 0
    ) -> tuple[list[wire.Entry], bytes]:
        request = Request(member, Kind.FETCH, wire.Fetch(bucket, list(hashes), values, start))
        deadline = self._now() + ANSWER_TIMEOUT_NS
        [reply] = await self._driver.exchange((request,), deadline)
        if not isinstance(reply, Reply) or reply.kind != Kind.FETCHED:
            return [], b""
        return reply.body.entries, b"".join(bytes(frame) for frame in reply.frames)

    # -- as backup

    async def tell_dropped(self) -> None:
        """Tell each primary what this node gave up. Comparing finds what gets lost of this."""
        dropped, self._journal.dropped = self._journal.dropped, {}
        told: dict[Member, dict[int, int]] = {}
        for bucket, count in dropped.items():
            replica = self._replicas.get(bucket)
            if replica is not None and replica.record is not None and not replica.tenure:
                told.setdefault(replica.record.primary, {})[bucket] = count
        requests = [Request(m, Kind.DROPPED, wire.Dropped(d)) for m, d in told.items()]
        if requests:
            await self._driver.exchange(requests, self._now() + ANSWER_TIMEOUT_NS)

    def _on_dropped(self, session: Session, body: wire.Dropped, frames: Any, now: int) -> Response:
        member = _member_of(session)
        in_step = self.in_step()
        for bucket, count in body.copies.items():
            if member in in_step.get(bucket, ()):
                self._journal.missing.add(bucket, member, count)
                self._turns.doubt(bucket)
        return Kind.PONG, wire.Empty(), ()

    def _on_compare(self, session: Session, body: wire.Compare, frames: Any, now: int) -> Response:
        _member_of(session)
        note = self._journal.notes.at(body.bucket, body.position)
        if note is None:
            return Kind.COMPARED, wire.Compared(Status.MOVING), ()
        room, largest = self._room()
        answer = wire.Compared(Status.OK, note.objects, note.digest, room, largest)
        return Kind.COMPARED, answer, (pack(note.stamps),) if note.stamps else ()

    def _room(self) -> tuple[int, int]:
        """Bytes that can be stored without evicting anything, and of the largest free extent."""
        store, space = self._store, self._store.extents.allocator
        spare = store.metadata_limit_bytes // SPARE_SHARE + RESEND_KEYS * METADATA_BYTES
        if store.extents.metadata_bytes + spare > store.metadata_limit_bytes:
            return 0, 0
        return max(0, space.free_bytes - space.size // SPARE_SHARE), space.largest_free

    def _on_fetch(self, session: Session, body: wire.Fetch, frames: Any, now: int) -> Response:
        _member_of(session)
        wanted, bound = set(body.hashes), self._config.limits.message_bytes_max
        if body.start and len(wanted) != 1:
            raise ProtocolError(f"a part of {len(wanted)} values")
        found = [i for k, i in self._store.index[body.bucket].items() if key_hash(k) in wanted]
        entries: list[wire.Entry] = []
        values: list[bytes] = []
        for item in found:
            if body.values and item.size > bound and len(wanted) > 1:
                continue
            entries.append(entry_of(item.key, item, now))
            if body.values:
                values.append(bytes(self._store.value(item)[body.start : body.start + bound]))
                bound -= len(values[-1])
        return Kind.FETCHED, wire.Fetched(entries), [v for v in values if v]


async def _told(outcome: Outcome) -> Status:
    """What became of an operation; STALLED if that is not known in time."""
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def tell(status: Any) -> None:
        if not told.done():
            told.set_result(status)

    outcome.then(tell)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_NS / 1e9):
            return Status(await told)
    except TimeoutError:
        return Status.STALLED


def _member_of(session: Session) -> Member:
    """Raises ProtocolError if it is not another node that asks."""
    if session.member is None:
        raise ProtocolError("only nodes ask for this")
    return session.member
