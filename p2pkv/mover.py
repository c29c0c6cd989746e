"""Hands buckets over, a few at a time: carries out what ``handover`` says."""

from __future__ import annotations

import asyncio
import itertools
import logging
from random import Random
from typing import Any

from p2pkv import clock
from p2pkv.async_driver import AsyncDriver
from p2pkv.authority import Authority
from p2pkv.config import NodeConfig
from p2pkv.errors import AuthorityUnavailable
from p2pkv.handover import PIECE_BYTES, PIECE_KEYS, Failed, NotYet, Outgoing, Propose, Stop
from p2pkv.ownership import Ownership
from p2pkv.records import BucketChange
from p2pkv.routing import Exchange, Pause
from p2pkv.store import Store
from p2pkv.types import BucketId, Member

log = logging.getLogger("p2pkv.mover")

CHECK_INTERVAL_S = 0.5
EARLY_S = 0.02
EARLY_MAX = 100
RETRY_FIRST_S = 0.2
RETRY_LAST_S = 5.0
CONTACT_MAX_NS = 1 * clock.SECOND_NS
"""A bucket is not stopped if etcd was last heard from longer ago: it would stay stopped."""
ENTRY_BYTES_MAX = 80
"""What an entry of a snapshot takes beside its key."""


class Mover:
    """Moves this node's buckets to where the planner wants them."""

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        ownership: Ownership,
        driver: AsyncDriver,
        authority: Authority,
        random: Random,
    ) -> None:
        self._config = config
        self._store = store
        self._ownership = ownership
        self._driver = driver
        self._authority = authority
        self._random = random
        self._nonces = itertools.count(1)
        self._wanted = asyncio.Event()
        self._running: dict[BucketId, asyncio.Task[None]] = {}
        self._failures: dict[BucketId, int] = {}
        self._not_before: dict[BucketId, int] = {}
        self._early: dict[BucketId, int] = {}
        self.moved_total = 0
        self.moved_bytes_total = 0
        self.failed_total = 0

    @property
    def under_way(self) -> int:
        return len(self._running)

    def wake(self) -> None:
        """The ring has changed."""
        self._wanted.set()

    async def run(self) -> None:
        """Start what is to be moved, at most ``moves_max`` at a time, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wanted.clear()
                pause_s = self._start_some(group)
                try:
                    async with asyncio.timeout(pause_s):
                        await self._wanted.wait()
                except TimeoutError:
                    continue

    def _start_some(self, group: asyncio.TaskGroup) -> float:
        """Start what may start now. Returns the seconds after which to look again."""
        now = clock.monotonic()
        look_ns = now + clock.seconds(CHECK_INTERVAL_S)
        for bucket, target in self._ownership.departures():
            if len(self._running) >= self._config.moves_max:
                break
            if bucket in self._running:
                continue
            not_before = self._not_before.get(bucket, 0)
            if not_before > now:
                look_ns = min(look_ns, not_before)
                continue
            outgoing = self._outgoing(bucket, target)
            self._running[bucket] = group.create_task(self._move(bucket, outgoing))
        return max(0.001, (look_ns - now) / 1e9)

    def _outgoing(self, bucket: BucketId, target: Member) -> Outgoing:
        limits = self._config.limits
        return Outgoing(
            self._store,
            self._store.buckets[bucket],
            self._ownership.view.buckets[bucket],
            target,
            next(self._nonces),
            max(1, self._config.move_bytes_per_s // self._config.moves_max),
            min(PIECE_BYTES, limits.message_bytes_max),
            min(PIECE_KEYS, limits.head_bytes_max // (limits.key_bytes_max + ENTRY_BYTES_MAX)),
        )

    async def _move(self, bucket: BucketId, outgoing: Outgoing) -> None:
        try:
            if await self._drive(outgoing):
                self.moved_total += 1
                self.moved_bytes_total += outgoing.sent_bytes
                self._failures.pop(bucket, None)
                self._early.pop(bucket, None)
                self._not_before.pop(bucket, None)
        except NotYet as e:
            self._wait_for_target(bucket, e)
        except Failed as e:
            self._postpone(bucket)
            log.info("bucket %d stays for now: %s", bucket, e)
        finally:
            del self._running[bucket]
            self._wanted.set()

    def _wait_for_target(self, bucket: BucketId, reason: NotYet) -> None:
        """The watch of the next owner is behind ours, by milliseconds usually."""
        tries = self._early[bucket] = self._early.get(bucket, 0) + 1
        if tries > EARLY_MAX:
            self._early.pop(bucket)
            self._postpone(bucket)
            log.info("bucket %d stays for now: %s", bucket, reason)
            return
        wait = clock.seconds(self._random.uniform(EARLY_S / 2, EARLY_S))
        self._not_before[bucket] = clock.monotonic() + wait

    def _postpone(self, bucket: BucketId) -> None:
        self.failed_total += 1
        failures = self._failures[bucket] = self._failures.get(bucket, 0) + 1
        cap = min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
        wait = clock.seconds(self._random.uniform(cap / 2, cap))
        self._not_before[bucket] = clock.monotonic() + wait

    async def _drive(self, outgoing: Outgoing) -> bool:
        moving = outgoing.run(clock.monotonic)
        result: Any = None
        try:
            while True:
                effect = moving.send(result)
                result = None
                if isinstance(effect, Exchange):
                    result = await self._driver.exchange(effect.requests, effect.deadline_ns)
                elif isinstance(effect, Pause):
                    await asyncio.sleep(effect.duration_ns / 1e9)
                elif isinstance(effect, Stop):
                    if effect.stopped and not self._etcd_answers():
                        moving.close()
                        raise Failed("etcd does not answer")
                    self._ownership.stop_serving(outgoing.bucket.id, effect.stopped)
                else:
                    assert isinstance(effect, Propose)
                    result = await self._propose(effect.change)
                if self._store.buckets.get(outgoing.bucket.id) is not outgoing.bucket:
                    moving.close()
                    return isinstance(effect, Propose) and bool(result)
        except StopIteration as stop:
            return bool(stop.value)

    def _etcd_answers(self) -> bool:
        contact = self._authority.last_contact_ns
        return contact is not None and clock.monotonic() - contact <= CONTACT_MAX_NS

    async def _propose(self, change: BucketChange) -> bool:
        """Change the record; go on until the outcome is definite (invariant I12)."""
        wait = 0.05
        while True:
            try:
                outcome = (await self._authority.update_buckets([change]))[0]
            except AuthorityUnavailable:
                outcome = None
            if outcome is not None and not outcome.unknown:
                self._ownership.take_record(change.bucket, outcome.current)
                if not outcome.won:
                    self._ownership.stop_serving(change.bucket, False)
                return outcome.won
            await asyncio.sleep(self._random.uniform(wait / 2, wait))
            wait = min(wait * 2, 1.0)
