"""Telling the cause behind a code, once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from logging import Logger
from typing import Any

from p2pkv import clock
from p2pkv.errors import P2PKVError

EVERY_NS = 60 * clock.SECOND_NS
KINDS_MAX = 256


class Notices:
    """Logs each kind of trouble at its first time, and then once a minute with how often it came.

    A code tells little, and b"" tells nothing; but a line for each key of a batch would be worse.
    """

    def __init__(self, log: Logger, every_ns: int = EVERY_NS) -> None:
        self._log = log
        self._every = every_ns
        self._told: dict[tuple[str, str], tuple[int, int]] = {}
        """For each kind, when it was told, and how often it came since."""
        self._lock = threading.Lock()

    def tell(self, what: str, kind: str, text: str) -> None:
        """``what`` was called, and ``kind`` of trouble came of it."""
        now = clock.monotonic()
        with self._lock:
            at, more = self._told.get((what, kind), (now - self._every, 0))
            if now - at < self._every:
                self._told[what, kind] = (at, more + 1)
                return
            if len(self._told) >= KINDS_MAX:
                self._told.clear()
            self._told[what, kind] = (now, 0)
        again = f" (and {more} times more since this was told last)" if more else ""
        self._log.warning("%s: %s%s", what, text, again)

    def tell_outcomes(self, what: str, outcomes: Sequence[Any]) -> None:
        """The errors among the outcomes of keys, the first of each kind."""
        for kind in set(map(type, outcomes)):
            if issubclass(kind, P2PKVError):
                first = next(o for o in outcomes if type(o) is kind)
                self.tell(what, kind.__name__, str(first))
