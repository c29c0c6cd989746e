"""Checking all objects of a node, slowly: what no longer is what its checksum says is dropped.

An object that has no checksum is given one, to be compared with the next time.

Objects are summed on a thread, without the GIL, some MiB at a time, and held by tokens meanwhile;
the rest happens on the event loop, between requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from p2pkv import clock, wire
from p2pkv.answers import Frames, Handler
from p2pkv.checksums import checksums_of
from p2pkv.objects import Object, State
from p2pkv.sessions import Response, Session
from p2pkv.store import Store
from p2pkv.wire import Kind

SLICE_BYTES = 4 << 20
"""Summed at a time, if one object is not more."""
SLICE_OBJECTS = 1024


class Scrub:
    """The scrub of a node: one at a time, started by ``ask``, carried out by ``run``.

    ``give``: whether objects without a checksum are given one.
    """

    def __init__(self, store: Store, give: bool) -> None:
        self._store = store
        self._give = give
        self._wanted = asyncio.Event()
        self._bytes_per_s = 0
        self._clear()
        self.runs = 0
        self.running = False

    def _clear(self) -> None:
        self.objects = sum(len(bucket) for bucket in self._store.buckets.values())
        self.checked = self.checked_bytes = self.without = self.corrupt = 0

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What administrators ask."""
        return {Kind.SCRUB: self._on_scrub}

    def _on_scrub(self, session: Session, body: wire.Scrub, frames: Frames, now: int) -> Response:
        return Kind.SCRUBBED, self.ask(body.bytes_per_s), ()

    def ask(self, bytes_per_s: int) -> wire.Scrubbed:
        """Start one, unless one is under way; 0 bytes/s: only tell how far it is."""
        if bytes_per_s and not self.running:
            self._bytes_per_s = bytes_per_s
            self._clear()
            self.runs += 1
            self.running = True
            self._wanted.set()
        return wire.Scrubbed(
            self.runs,
            self.running,
            self.objects,
            self.checked,
            self.checked_bytes,
            self.without,
            self.corrupt,
        )

    async def run(self) -> None:
        """Carry out what is asked for, until cancelled."""
        with ThreadPoolExecutor(1, thread_name_prefix="p2pkv-scrub") as thread:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                try:
                    await self._all(clock.monotonic(), thread)
                finally:
                    self.running = False

    async def _all(self, began: int, thread: ThreadPoolExecutor) -> None:
        objects = self._objects()
        while items := _slice(objects):
            without = [item for item in items if not item.checksum]
            self.without += len(without)
            await self._check([i for i in items if i.checksum or self._give], thread)
            self.checked += len(items)
            due = began + self.checked_bytes * clock.SECOND_NS // self._bytes_per_s
            await asyncio.sleep(max(0, due - clock.monotonic()) / 1e9)

    def _objects(self) -> Iterator[Object]:
        """All that are there when their turn comes. A bucket's keys are listed as it is reached."""
        store = self._store
        for bucket in list(store.buckets):
            for key in list(store.index[bucket]):
                item = store.index[bucket].get(key)
                if item is not None:
                    yield item

    async def _check(self, items: list[Object], thread: ThreadPoolExecutor) -> None:
        store = self._store
        store.acquire_batch(items)
        try:
            sums = await _on(thread, lambda: checksums_of([store.value(item) for item in items]))
        finally:
            store.release_batch(items)
        self.checked_bytes += sum(item.size for item in items)
        found = list(zip(items, sums, strict=True))
        self.corrupt += store.drop_corrupt([i for i, s in found if i.checksum and s != i.checksum])
        new = [(i, s) for i, s in found if not i.checksum]
        store.give_checksums([i for i, _ in new], [s for _, s in new])


def _slice(objects: Iterator[Object]) -> list[Object]:
    items: list[Object] = []
    size = 0
    for item in islice(objects, SLICE_OBJECTS):
        if item.state is State.COMMITTED:
            items.append(item)
            size += item.size
        if size >= SLICE_BYTES:
            break
    return items


async def _on(thread: ThreadPoolExecutor, job: Callable[[], list[int]]) -> list[int]:
    """Its result; even if cancelled it waits for the thread, which uses the arena."""
    future = asyncio.get_running_loop().run_in_executor(thread, job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
