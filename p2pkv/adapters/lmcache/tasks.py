"""What LMCache's controllers fetch: the results of tasks, announced by a file descriptor."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

R = TypeVar("R")

RESULTS_MAX = 1 << 16
"""The oldest of more, which nobody has fetched, are forgotten."""


class Tasks(Generic[R]):
    """Tasks of one kind. Any thread may use it.

    ``notifier`` is LMCache's: it has ``fileno``, ``notify`` and ``close``.
    """

    def __init__(self, notifier: Any, ids: itertools.count[int]) -> None:
        self._notifier = notifier
        self._ids = ids
        self._lock = threading.Lock()
        self._results: OrderedDict[int, R] = OrderedDict()
        self._open = True

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def begin(self) -> int:
        """The id of a new task; ``finish`` is to follow."""
        return next(self._ids)

    def finish(self, task: int, result: R) -> None:
        """Nothing is announced any more after ``close``: the descriptor may be another's."""
        with self._lock:
            if not self._open:
                return
            self._results[task] = result
            if len(self._results) > RESULTS_MAX:
                self._results.popitem(last=False)
            self._notifier.notify()

    def pop(self, task: int) -> R | None:
        """The result, once; None if there is none yet."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, R]:
        with self._lock:
            results, self._results = self._results, OrderedDict()
        return dict(results)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._notifier.close()


__all__ = ["Tasks"]
