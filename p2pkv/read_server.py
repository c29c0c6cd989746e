"""A node's read connections: answered from the published index by threads of native code.

Whoever has the node's token, which comes with the welcome to a session, may read. The threads never
take the GIL, and look at the gate of each key's bucket as any other reader of the index does. What
they cannot answer is the owner's to answer, over a data connection.
"""

from __future__ import annotations

import secrets
import socket
from typing import Final

from p2pkv._native import reads
from p2pkv._native.reads import ReadFigures, ReadThreads
from p2pkv.errors import ConfigError

SPIN_NS: Final = 50_000
"""So long a thread polls before it sleeps, while that pays."""


class ReadServer:
    """Listens at once, answers from ``start`` on. Raises ConfigError where it cannot listen."""

    def __init__(self, address: str, threads: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as e:
            raise ConfigError(f"cannot listen on {address}: {e}") from None
        self._listener.setblocking(False)
        self._number = threads
        self._threads: ReadThreads | None = None
        self.port = int(self._listener.getsockname()[1])
        self.token = secrets.token_bytes(reads.TOKEN_BYTES)

    def start(
        self,
        index: int,
        arena: tuple[int, int],
        *,
        payload_max: int,
        stall_ns: int,
        connections_max: int,
    ) -> None:
        """``index`` is an address, ``arena`` (address, bytes); both stay mapped until ``close``.

        ``payload_max``: bytes of values in one reply. ``stall_ns``: a connection that is in the
        middle of something for longer is closed. Raises ConfigError.
        """
        self._threads = ReadThreads(
            index,
            arena,
            self._listener.fileno(),
            self.token,
            payload_max=payload_max,
            stall_ns=stall_ns,
            spin_ns=SPIN_NS,
            connections_max=connections_max,
            threads=self._number,
        )

    def figures(self) -> ReadFigures:
        if self._threads is None:
            return ReadFigures(*[0] * len(ReadFigures._fields))
        return self._threads.figures()

    def close(self) -> None:
        """Returns when nothing uses the index and the arena any more."""
        if self._threads is not None:
            self._threads.close()
        self._listener.close()
