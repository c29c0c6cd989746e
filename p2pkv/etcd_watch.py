"""One watch on one endpoint of etcd, until it breaks. The client makes a lasting one of many."""

from __future__ import annotations

import asyncio
from typing import Any

from p2pkv import _etcd_pb2 as pb
from p2pkv.config import EtcdConfig
from p2pkv.etcd_channels import Metadata, Rpc

_WATCH = Rpc("Watch/Watch", pb.WatchResponse)


class Compacted(Exception):
    """The history asked for is gone; ``revision`` is the oldest that is left (0: unknown)."""

    def __init__(self, revision: int = 0) -> None:
        super().__init__(f"history before revision {revision} is compacted")
        self.revision = revision


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with ``prefix``, as etcd wants it."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else b"\0"


class Broken(Exception):
    """A stream ended, or its peer is silent: go to the next endpoint."""


class Denied(Broken):
    """A watch was refused, perhaps only because its token is no longer known."""


class WatchStream:
    """One watch on one endpoint, until it breaks.

    A read under way is never cancelled to bound its time (that would cancel the call): it is
    waited for beside a timeout, and given up together with the stream.
    """

    def __init__(self, channel: Any, metadata: Metadata, config: EtcdConfig) -> None:
        self._call = _WATCH.bind(channel.stream_stream)(metadata=metadata)
        self._answer_s = config.attempt_timeout_s
        self._idle_s = 2 * config.attempt_timeout_s
        self._reading: asyncio.Future[Any] | None = None
        self._tail: list[pb.Event] = []

    async def open(self, prefix: bytes, start_revision: int) -> None:
        """Ask for the watch and wait until it is there."""
        request = pb.WatchCreateRequest(
            key=prefix,
            range_end=prefix_end(prefix),
            start_revision=start_revision,
            progress_notify=True,
            fragment=True,
        )
        await self._write(pb.WatchRequest(create_request=request))
        if not await self._readable(self._answer_s):
            raise Broken("no answer to the request for a watch")
        self._take()

    async def next_batch(self) -> list[pb.Event]:
        """The next events: complete revisions, at least one."""
        while True:
            await self._await_message()
            response = self._take()
            events = self._tail + list(response.events)
            self._tail = []
            if response.fragment and events:
                events, self._tail = _split_last_revision(events)
            if events:
                return events

    async def close(self) -> None:
        """End the call; leaves no task behind."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _await_message(self) -> None:
        if await self._readable(self._idle_s):
            return
        await self._write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
        if not await self._readable(self._answer_s):
            raise Broken("no answer to a request for progress")

    async def _readable(self, timeout_s: float) -> bool:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        return bool(done)

    async def _write(self, request: pb.WatchRequest) -> None:
        # Unlike a read, a write may be cancelled: the stream is given up then anyway. (Not by
        # wait_for: in Python 3.11 that loses a cancellation that comes together with the result.)
        try:
            async with asyncio.timeout(self._answer_s):
                await self._call.write(request)
        except TimeoutError:
            raise Broken("not connected") from None
        except asyncio.InvalidStateError:
            raise Broken("the stream ended") from None

    def _take(self) -> pb.WatchResponse:
        reading, self._reading = self._reading, None
        if reading is None or reading.cancelled():
            raise Broken("the call was cancelled")
        response = reading.result()
        if not isinstance(response, pb.WatchResponse):
            raise Broken("the stream ended")
        if response.compact_revision:
            raise Compacted(response.compact_revision)
        if response.canceled:
            reason = response.cancel_reason
            raise Denied(reason) if _is_denial(reason) else Broken(reason)
        return response


def _split_last_revision(events: list[pb.Event]) -> tuple[list[pb.Event], list[pb.Event]]:
    """A fragment may end inside a revision: keep that one until its rest is here."""
    last = events[-1].kv.mod_revision
    cut = len(events)
    while cut and events[cut - 1].kv.mod_revision == last:
        cut -= 1
    return events[:cut], events[cut:]


def _is_denial(reason: str) -> bool:
    return "permission denied" in reason or "auth" in reason
