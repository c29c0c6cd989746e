"""Views of a node's memory for an event loop; ``views`` says what they are.

They are asked for on a thread, as views may be given back at any moment, by any thread, over the
connection that holds them: it is a blocking one.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from p2pkv import wire
from p2pkv.clock import monotonic
from p2pkv.config import Limits
from p2pkv.routing import Answer, Lost
from p2pkv.shared_memory import SharedArena
from p2pkv.stream import DataLink
from p2pkv.views import Lessor

CONNECT_TIMEOUT_S = 1.0


class Views:
    """Takes views of one node's memory. A node that does not answer holds up its thread only."""

    def __init__(
        self, arena: SharedArena, welcome: wire.Welcome, session: bytes, limits: Limits
    ) -> None:
        self._arena = arena
        self._welcome = welcome
        self._session = session
        self._limits = limits
        self._lessor: Lessor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="p2pkv-views")

    def ask(self, keys: list[bytes], deadline_ns: int) -> asyncio.Future[Answer]:
        """As ``Lessor.call``."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, self._call, keys, deadline_ns)

    def end(self) -> None:
        """No more are asked for. Those that there are, and those under way, stay."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # -- on the thread

    def _call(self, keys: list[bytes], deadline_ns: int) -> Answer:
        if monotonic() >= deadline_ns:
            return Lost("no answer", deadline=True)
        if self._lessor is None or self._lessor.broken:
            try:
                self._lessor = Lessor(self._arena, self._connect())
            except (OSError, ValueError) as e:
                return Lost(f"data connection to {self._welcome.data[0]}: {e}")
        return self._lessor.call(keys, deadline_ns)

    def _connect(self) -> DataLink:
        welcome = self._welcome
        return DataLink(
            welcome.data[0], self._session, welcome.token, self._limits, CONNECT_TIMEOUT_S
        )

    def _end(self) -> None:
        if self._lessor is not None:
            self._lessor.end()


__all__ = ["Views"]
