"""Carries what this node's replicas say to peers and to etcd, and wakes them as time passes.

``Replicas`` decides; this module sends, waits, and tells it what came of it. Everything that comes
up in one turn of the event loop leaves together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from p2pkv import clock, wire
from p2pkv.async_driver import AsyncDriver
from p2pkv.authority import Authority
from p2pkv.config import NodeConfig
from p2pkv.errors import AuthorityUnavailable
from p2pkv.gossip import Gossip
from p2pkv.journal import Journal
from p2pkv.learning import Learning
from p2pkv.mover import Mover
from p2pkv.objects import Object
from p2pkv.oversized import PIECES_PER_MESSAGE, is_alone, send_staged
from p2pkv.ownership import Ownership
from p2pkv.reading import LOCATE_MIN
from p2pkv.records import BucketChange
from p2pkv.replicas import Batch, Replicas
from p2pkv.replicated import TALK, OpKind, Prepare, decode, encode
from p2pkv.routing import Lost, Request
from p2pkv.stream import parse_endpoint
from p2pkv.types import Member
from p2pkv.wire import Kind

log = logging.getLogger("p2pkv.replicator")

TICKS_PER_BEACON = 5
BATCHES_MAX = 4
"""Batches under way to one peer at the same time."""
BATCH_TIMEOUT_NS = 5 * clock.SECOND_NS
CONTACT_MAX_NS = 2 * clock.SECOND_NS
"""A bucket is not handed over if etcd was last heard from longer ago: it would stay stopped."""
SILENT_BEACONS = 2.5
"""A peer that was not heard of for so many beacon intervals is knocked at."""
KNOCK_TIMEOUT_S = 0.25
OP_BYTES_MAX = 2 * 1024 + 64
"""What one operation takes of a head, at most."""
APART_NS = 60 * clock.SECOND_NS
"""So long values go along to a peer that refused a batch, even if it is on this host."""
RETRY_NS = 50 * clock.MILLISECOND_NS


class Replicator:
    """See the module. ``wake`` after anything that may have given the replicas something to say."""

    def __init__(
        self,
        config: NodeConfig,
        journal: Journal,
        learning: Learning,
        ownership: Ownership,
        driver: AsyncDriver,
        sockets: Gossip,
        mover: Mover,
        authority: Authority,
        random: Random,
    ) -> None:
        self._config = config
        self._journal = journal
        self._store = journal.store
        self._replicas: Replicas = journal.replicas
        self._learning = learning
        self._ownership = ownership
        self._driver = driver
        self._sockets = sockets
        self._mover = mover
        self._authority = authority
        self._random = random
        self._under_way: dict[Member, int] = {}
        self._not_before: dict[Member, int] = {}
        """When to try again to reach a peer that could not be reached."""
        self._knocking: set[Member] = set()
        self._staging: set[tuple[Member, int]] = set()
        """Members and buckets of which a value goes there in pieces."""
        self._apart_until: dict[Member, int] = {}
        """Peers that refused a batch: they may be unable to read this node's memory."""
        self._group: asyncio.TaskGroup | None = None
        self._flush_wanted = False
        self.batches_total = 0
        self.batches_lost_total = 0
        self.prepared_total = 0
        self.prepared_bytes_total = 0

    # -- when

    async def run(self) -> None:
        """Tick until cancelled."""
        tick_s = self._config.beacon_s / TICKS_PER_BEACON
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                while True:
                    self._tick(clock.monotonic())
                    await asyncio.sleep(tick_s)
            finally:
                self._group = None  # from here on it takes no tasks

    def _tick(self, now: int) -> None:
        self._replicas.tick(now, self._etcd_answers(now))
        self._journal.tell_evictions()
        self._learning.reap(now)
        self._knock(now)
        self.flush()

    def wake(self) -> None:
        """See to it that what is new leaves in this turn of the event loop."""
        if not self._flush_wanted and self._group is not None:
            self._flush_wanted = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what there is to send, and begin what there is to begin."""
        self._flush_wanted = False
        group, replicas = self._group, self._replicas
        replicas.settle(clock.monotonic())
        if group is None:
            return
        if replicas.has_unsent:
            self._journal.tell_evictions()  # along with what they made room for
            self._send_batches(group)
        if replicas.talks:
            for talk in replicas.talk():
                self._sockets.send(talk.to, TALK, encode(talk))
        if replicas.proposals:
            changes, replicas.proposals = replicas.proposals, []
            group.create_task(self._propose(changes))
        if replicas.copies:
            copies, replicas.copies = replicas.copies, []
            self._mover.start(copies, group)

    def take(self, frame: bytes) -> None:
        """Small messages came from a peer. Raises ProtocolError if it is none."""
        self._replicas.take_talk(decode(frame), clock.monotonic())
        self.wake()

    def broke(self, member: Member) -> None:
        """The connection to a peer broke: see whether it is gone."""
        if self._group is not None and member not in self._knocking:
            self._knocking.add(member)
            self._group.create_task(self._knock_at(member))

    # -- operations

    def _send_batches(self, group: asyncio.TaskGroup) -> None:
        now = clock.monotonic()
        busy = {m for m, n in self._under_way.items() if n >= BATCHES_MAX}
        busy |= {m for m, until in self._not_before.items() if until > now}
        limits = self._config.limits
        for whole in self._replicas.batches(now, busy, self._staging):
            for batch in fitting(whole, limits.message_bytes_max, limits.head_bytes_max):
                self._begin(batch, group)

    def _begin(self, batch: Batch, group: asyncio.TaskGroup) -> None:
        self._under_way[batch.to] = self._under_way.get(batch.to, 0) + 1
        # Held from now on: before the task runs, what is committed may be overwritten and gone.
        puts = (e.staged for e in batch.entries if e.op.kind == OpKind.PUT)
        held = [item for item in puts if isinstance(item, Object)]
        self._store.acquire_batch(held)
        alone = is_alone(batch.entries, self._config.limits.message_bytes_max)
        if alone and not self._reads_here(batch.to):
            self._staging.add((batch.to, batch.prepares[0].bucket))
            group.create_task(self._send_staged(batch, held))
        else:
            group.create_task(self._send(batch, held))

    async def _send(self, batch: Batch, held: list[Object]) -> None:
        """``held``: the values that go along, of which we have a token each."""
        answer: Any = None
        try:
            answer = await self._ask(batch, *self._message(batch, held))
        finally:
            self._end(batch, held, answer)

    async def _send_staged(self, batch: Batch, held: list[Object]) -> None:
        """A value that no message holds, in pieces, and then its operation."""
        answer: Any = None
        place = batch.to, batch.prepares[0].bucket
        try:
            if await self._stage(batch, held[0]):
                body = wire.Replicate(batch.prepares, staged=True)
                answer = await self._ask(batch, body, ())
        finally:
            self._staging.discard(place)
            self._end(batch, held, answer)

    def _end(self, batch: Batch, held: list[Object], answer: Any) -> None:
        self._store.release_batch(held)
        self._under_way[batch.to] -= 1
        self._take_answer(batch, answer)

    async def _ask(self, batch: Batch, body: wire.Replicate, payload: Sequence[memoryview]) -> Any:
        request = Request(batch.to, Kind.REPLICATE, body, payload)
        deadline = clock.monotonic() + BATCH_TIMEOUT_NS
        return (await self._driver.exchange((request,), deadline))[0]

    async def _stage(self, batch: Batch, item: Object) -> bool:
        prepare, entry, to = batch.prepares[0], batch.entries[0], batch.to

        def still(filled: int) -> bool:
            now = clock.monotonic()
            return self._replicas.note_staged(to, prepare.bucket, entry, filled, now)

        piece_bytes = self._config.limits.message_bytes_max // PIECES_PER_MESSAGE
        value = self._store.value(item)
        return await self._driver.run(
            send_staged(to, prepare, value, piece_bytes, still, clock.monotonic)
        )

    def _reads_here(self, to: Member) -> bool:
        """Whether a peer takes values from this node's memory by itself."""
        apart = clock.monotonic() < self._apart_until.get(to, 0)
        return not apart and self._driver.shares_memory(to)

    def _message(self, batch: Batch, held: list[Object]) -> tuple[wire.Replicate, list[memoryview]]:
        """Values go along, except that a peer on this host is told where the large ones lie."""
        store = self._store
        large: list[Object] = []
        if self._reads_here(batch.to):
            large = [item for item in held if item.size >= LOCATE_MIN]
        if not large:
            payload = [store.value(item) for item in held if item.size]
            return wire.Replicate(batch.prepares), payload
        store.expose_batch(large)
        arena = store.arena
        body = wire.Replicate(
            batch.prepares,
            (str(arena.path), arena.size, arena.proof),
            [item.offset if item.size >= LOCATE_MIN else 0 for item in held],
            [item.version for item in held],
        )
        return body, [store.value(item) for item in held if 0 < item.size < LOCATE_MIN]

    def _take_answer(self, batch: Batch, answer: Any) -> None:
        now = clock.monotonic()
        self.batches_total += 1
        if answer is None or isinstance(answer, Lost) or answer.kind != Kind.REPLICATED:
            self.batches_lost_total += 1
            if answer is not None and not isinstance(answer, Lost):
                self._apart_until[batch.to] = now + APART_NS
            self._not_before[batch.to] = now + RETRY_NS
            self._replicas.not_delivered(batch.to, [p.bucket for p in batch.prepares])
            return
        self._not_before.pop(batch.to, None)
        self.prepared_total += len(batch.entries)
        self.prepared_bytes_total += sum(e.op.size for e in batch.entries)
        self._journal.take_no_room(batch.to, answer.body.acks)
        self._replicas.take_prepare_acks(batch.to, answer.body.acks, now)
        if self._replicas.talkative:
            self.wake()

    # -- etcd

    def _etcd_answers(self, now: int) -> bool:
        contact = self._authority.last_contact_ns
        return contact is not None and now - contact <= CONTACT_MAX_NS

    async def _propose(self, changes: list[BucketChange]) -> None:
        """Change records; go on until each outcome is definite (invariant I12)."""
        wait = 0.05
        while changes:
            try:
                outcomes = await self._authority.update_buckets(changes)
            except AuthorityUnavailable:
                outcomes = []
            known = {o.bucket: o for o in outcomes if not o.unknown}
            self._ownership.take_records((b, o.current) for b, o in known.items())
            now = clock.monotonic()
            for change in changes:
                if change.bucket in known:
                    self._replicas.decided(change, known[change.bucket].current, now)
            self.wake()
            changes = [c for c in changes if c.bucket not in known]
            if changes:
                await asyncio.sleep(self._random.uniform(wait / 2, wait))
                wait = min(wait * 2, 1.0)

    # -- who is gone

    def forget_superseded(self) -> None:
        """Keep nothing of lives of nodes that a newer one has followed."""
        boots = self._ownership.view.boots
        over = [m for m in self._replicas.remembered if boots.get(m.node, m.boot) > m.boot]
        self._replicas.forget(over)
        for member in over:
            self._not_before.pop(member, None)
            self._apart_until.pop(member, None)

    def _knock(self, now: int) -> None:
        """Look after peers that are silent. A refused connection is a process that is gone."""
        assert self._group is not None
        limit = int(SILENT_BEACONS * self._config.beacon_s * 1e9)
        for member in self._replicas.silent(now, limit):
            if member not in self._knocking:
                self._knocking.add(member)
                self._group.create_task(self._knock_at(member))

    async def _knock_at(self, member: Member) -> None:
        try:
            record = self._ownership.address_of(member)
            if record is None or not record.control:
                return
            address = parse_endpoint(record.control[0])
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(KNOCK_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(*address)
            except (ConnectionRefusedError, ConnectionResetError):
                log.warning("%s is gone: it refuses connections", member)
                self._replicas.suspect(member)
            except (OSError, TimeoutError):
                pass  # it may be only far away, or slow
            if writer is not None:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
            await asyncio.sleep(self._config.beacon_s / 2)
        finally:
            self._knocking.discard(member)


def fitting(batch: Batch, bytes_max: int, head_bytes_max: int) -> list[Batch]:
    """The batch in parts of which each fits a message, unless it is one value that does not."""
    entries = batch.entries
    small = len(entries) * OP_BYTES_MAX <= head_bytes_max
    if small and sum([entry.op.size for entry in entries]) <= bytes_max:
        return [batch]
    parts: list[Batch] = []
    room = head_room = 0
    left = iter(entries)
    for prepare in batch.prepares:
        begins: list[int] = []
        for i, op in enumerate(prepare.ops):
            if not parts or op.size > room or head_room < OP_BYTES_MAX:
                parts.append(Batch(batch.to, [], []))
                room, head_room = bytes_max, head_bytes_max
                begins.append(i)
            elif not i:
                begins.append(i)
            room -= op.size
            head_room -= OP_BYTES_MAX
            parts[-1].entries.append(next(left))
        ends = [*begins[1:], len(prepare.ops)]
        for part, start, end in zip(parts[-len(begins) :], begins, ends, strict=True):
            part.prepares.append(_cut(prepare, start, end))
    return parts


def _cut(prepare: Prepare, start: int, end: int) -> Prepare:
    """The operations from ``start`` to ``end`` alone."""
    return msgspec.structs.replace(
        prepare,
        first=prepare.first + start,
        ops=prepare.ops[start:end],
        origins=prepare.origins[start:end],
    )
