"""Copies buckets to those who are to hold them: carries out what ``handover`` says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random
from typing import Any

from p2pkv import clock
from p2pkv.async_driver import AsyncDriver
from p2pkv.config import NodeConfig
from p2pkv.handover import PIECE_BYTES, PIECE_KEYS, Cut, Failed, NotYet, Outgoing
from p2pkv.instructions import Copy
from p2pkv.replicas import Replicas
from p2pkv.routing import Exchange, Pause
from p2pkv.store import Store

log = logging.getLogger("p2pkv.mover")

EARLY_S = 0.02
EARLY_MAX = 100
ENTRY_BYTES_MAX = 80
"""What an entry of a snapshot takes beside its key."""


class Mover:
    """Makes the copies that this node's replicas ask for, each in a task of its own.

    ``wake`` is called when the replicas have something new to say.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        replicas: Replicas,
        driver: AsyncDriver,
        random: Random,
        wake: Callable[[], object],
    ) -> None:
        self._wake = wake
        self._config = config
        self._store = store
        self._replicas = replicas
        self._driver = driver
        self._random = random
        self._running: set[asyncio.Task[None]] = set()
        self.copied_total = 0
        self.copied_bytes_total = 0
        self.failed_total = 0

    @property
    def under_way(self) -> int:
        return len(self._running)

    def start(self, copies: list[Copy], group: asyncio.TaskGroup) -> None:
        """Begin with these."""
        for copy in copies:
            task = group.create_task(self._copy(copy))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _copy(self, copy: Copy) -> None:
        bucket, session = copy.bucket, copy.session
        done = False
        try:
            for _ in range(EARLY_MAX):
                try:
                    await self._drive(copy)
                    done = True
                    break
                except NotYet:  # its watch is behind ours, by milliseconds usually
                    await asyncio.sleep(self._random.uniform(EARLY_S / 2, EARLY_S))
        except Failed as e:
            log.info("bucket %d is not copied to %s for now: %s", bucket, copy.to, e)
            await asyncio.sleep(self._random.uniform(0.1, 0.3))
        finally:
            now = clock.monotonic()
            if done:
                self._replicas.copy_done(bucket, session, now)
                self._wake()
            else:
                self.failed_total += 1
                self._replicas.copy_failed(bucket, session, now)

    def _outgoing(self, copy: Copy) -> Outgoing:
        limits = self._config.limits
        bucket = self._store.buckets.get(copy.bucket)
        if bucket is None:
            raise Failed("it is no longer here")
        return Outgoing(
            self._store,
            bucket,
            copy.to,
            copy.session,
            max(1, self._config.move_bytes_per_s // self._config.moves_max),
            min(PIECE_BYTES, limits.message_bytes_max),
            min(PIECE_KEYS, limits.head_bytes_max // (limits.key_bytes_max + ENTRY_BYTES_MAX)),
        )

    async def _drive(self, copy: Copy) -> None:
        outgoing = self._outgoing(copy)
        copying = outgoing.run(clock.monotonic)
        result: Any = None
        try:
            while True:
                effect = copying.send(result)
                result = None
                if isinstance(effect, Exchange):
                    result = await self._driver.exchange(effect.requests, effect.deadline_ns)
                elif isinstance(effect, Pause):
                    await asyncio.sleep(effect.duration_ns / 1e9)
                else:
                    assert isinstance(effect, Cut)
                    now = clock.monotonic()
                    result = self._replicas.copy_cut(copy.bucket, copy.session, now)
                if self._store.buckets.get(copy.bucket) is not outgoing.bucket:
                    raise Failed("it is no longer here")
        except StopIteration:
            self.copied_total += 1
            self.copied_bytes_total += outgoing.sent_bytes
        finally:
            copying.close()
