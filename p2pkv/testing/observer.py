"""Follows a cluster's records in etcd from a blocking program, and says when it is whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import aclosing
from types import TracebackType
from typing import Self

from p2pkv.authority import EtcdAuthority
from p2pkv.config import EtcdConfig
from p2pkv.errors import AuthorityUnavailable
from p2pkv.records import View, apply
from p2pkv.testing.recording import LoopThread
from p2pkv.types import BucketId, Member

OPEN_TIMEOUT_S = 30.0


def lacking(view: View, dead: Collection[Member] = ()) -> dict[int, str]:
    """The buckets that lack copies, or have a dead member or none of the registered as primary.

    With each what etcd says of it. A bucket should have as many copies as the cluster's
    replication factor, or as there are live nodes if those are fewer. ``dead``: members known to
    have been killed, whose sessions may not have run out yet.
    """
    if view.meta is None:
        return {0: "the cluster does not exist"}
    alive = {Member(n, r.boot) for n, r in view.nodes.items()}.difference(dead)
    wanted = max(1, min(view.meta.replication_factor, len(alive)))
    found = {}
    for bucket in range(view.meta.bucket_count):
        versioned = view.buckets.get(BucketId(bucket))
        if versioned is None:
            found[bucket] = "no record"
            continue
        record = versioned.record
        copies = {record.primary, *record.in_sync}
        if not copies <= alive or len(copies) < wanted:
            members = ", ".join(map(str, record.in_sync))
            found[bucket] = f"epoch {record.epoch}, primary {record.primary}, in sync {members}"
    return found


class Observer:
    """The view of one cluster, kept current on a thread of its own. A context manager."""

    def __init__(self, config: EtcdConfig, cluster: str) -> None:
        self._config = config
        self._cluster = cluster
        self._view = View()
        self._changed = threading.Condition(threading.RLock())
        self._loop = LoopThread()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        try:
            self._task = self._loop.run(self._start(), OPEN_TIMEOUT_S)
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._loop.run(self._stop(), OPEN_TIMEOUT_S)
        self._loop.close()

    # -- what there is

    def lacking(self, dead: Collection[Member] = ()) -> dict[int, str]:
        """See the function of this name."""
        with self._changed:
            return lacking(self._view, dead)

    def members(self) -> dict[str, Member]:
        """The registered nodes, by name."""
        with self._changed:
            return {str(n): Member(n, r.boot) for n, r in self._view.nodes.items()}

    def hosts(self) -> dict[str, str]:
        """The host of each registered node."""
        with self._changed:
            return {str(n): r.host for n, r in self._view.nodes.items()}

    def primaries(self) -> dict[BucketId, Member]:
        """The primary of each bucket."""
        with self._changed:
            return {b: v.record.primary for b, v in self._view.buckets.items()}

    def bucket_count(self) -> int:
        with self._changed:
            return self._view.meta.bucket_count if self._view.meta else 0

    def replication_factor(self) -> int:
        with self._changed:
            return self._view.meta.replication_factor if self._view.meta else 1

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` holds; it is looked at whenever the records change."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    # -- on the loop

    async def _start(self) -> asyncio.Task[None]:
        authority = EtcdAuthority(self._config, self._cluster)
        await authority.open()
        try:
            view = await authority.load()
        except AuthorityUnavailable:
            await authority.close()
            raise
        with self._changed:
            self._view = view
        return asyncio.create_task(self._follow(authority, view))

    async def _follow(self, authority: EtcdAuthority, view: View) -> None:
        try:
            async with aclosing(authority.follow(view)) as deltas:
                async for delta in deltas:
                    with self._changed:
                        apply(self._view, delta)
                        self._changed.notify_all()
        finally:
            await authority.close()

    async def _stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


__all__ = ["Observer", "lacking"]
