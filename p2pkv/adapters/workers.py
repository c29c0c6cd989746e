"""Threads that work off a backlog, and can be stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from p2pkv import clock
from p2pkv.adapters.backlog import Backlog, BacklogLimits

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """Exactly one of them is called, once, if the job was taken in."""

    run: Callable[[], None]
    drop: Callable[[str], None]
    """With the reason why it is not run."""


class Workers:
    """Some threads that run jobs in the order in which they come. They start with the first one.

    ``submit`` never waits. Any thread may call it.
    """

    def __init__(self, name: str, threads: int, limits: BacklogLimits) -> None:
        self._name = name
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._backlog: Backlog[Job] = Backlog(limits)
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, job: Job, size: int) -> bool:
        """Take a job in; ``size``: the bytes of memory that it keeps. False: there is no room."""
        with self._changed:
            taken = self._backlog.offer(job, size, clock.monotonic())
            if taken and not self._threads:
                self._start()
            self._changed.notify()
        return taken

    def _start(self) -> None:
        for i in range(self._count):
            thread = threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                dropped = self._backlog.expire(clock.monotonic())
                entry = self._backlog.take()
            for job in dropped:
                _guarded(job.drop, "it had waited too long")
            if entry is not None:
                _guarded(entry.job.run)
                with self._changed:
                    self._backlog.done(entry)
                    self._changed.notify_all()

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._backlog.jobs, timeout_s)

    def figures(self) -> dict[str, int]:
        """Counts, by name."""
        with self._changed:
            backlog = self._backlog
            return {
                "queued": len(backlog),
                "queued_bytes": backlog.bytes,
                "dropped_full_total": backlog.dropped_full_total,
                "dropped_old_total": backlog.dropped_old_total,
                "done_total": backlog.done_total,
            }

    def close(self, timeout_s: float) -> bool:
        """Drop what waits, and let what runs end. Whether all threads ended in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            left = self._backlog.close()
            self._changed.notify_all()
        for job in left:
            _guarded(job.drop, "the cache was closed")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _guarded(function: Callable[..., None], *arguments: str) -> None:
    """A job that fails must not end the thread that does all the others."""
    try:
        function(*arguments)
    except Exception:
        log.exception("a job of the cache failed")
