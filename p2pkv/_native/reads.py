"""Read connections in native code (see read_protocol.h): a client's end, and a node's threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from p2pkv import _native
from p2pkv._native import Pieces
from p2pkv.errors import ConfigError

KEYS_MAX: Final = 4096
"""Of one request."""
GET: Final = 1
EXISTS: Final = 2
MATCH: Final = 3
ASK: Final = -1
"""Among sizes: the owner is to be asked for this value."""
MISS: Final = -2
"""Among sizes: there is no such value."""
MISS_BYTE: Final = 1
ASK_BYTE: Final = 255
"""The same in answers to EXISTS and MATCH."""
PROTOCOL: Final = 2
PREFACE_BYTES: Final = 32
TOKEN_BYTES: Final = 16

_ffi, _lib = _native.core


def _read_function(which: int, *types: type) -> Callable[..., Any]:
    if not _native.available:
        return lambda *_: _native.require()
    return ctypes.PYFUNCTYPE(ctypes.py_object, *types)(_lib.p2pkv_read_function(which))


_link, _object, _time = ctypes.c_size_t, ctypes.py_object, ctypes.c_longlong
_ask = _read_function(0, _link, ctypes.c_int, _object, _time)
_table = _read_function(1, _link, _time)
_into = _read_function(2, _link, ctypes.c_size_t, _time)
_values = _read_function(3, _link, _object, _time)
_all = _read_function(4, _link, ctypes.c_int, _object, _time)


def preface(token: bytes) -> bytes:
    """What a client's end begins with."""
    return b"P2KVREAD" + bytes([PROTOCOL]) + bytes(7) + token


def parse(data: bytes) -> tuple[int, int, int]:
    """The request that ``data`` begins with: (bytes, kind, keys); bytes 0: not all is there; -1:
    it is none."""
    kind, count = _ffi.new("uint32_t *"), _ffi.new("uint32_t *")
    taken = int(_lib.p2pkv_read_parse(data, len(data), kind, count))
    return taken, int(kind[0]), int(count[0])


class ReadEnd:
    """A client's end: one request at a time, first ``ask``, then ``table``, then the values; or
    ``call``, which is all of it.

    Errors are numbers as in ``_native``, EPROTO for what is no reply; after one the connection is
    somewhere inside a message. ``payload_max``: a reply with more bytes of values is refused.
    """

    __slots__ = ("_address", "_link")

    def __init__(self, fd: int, payload_max: int, spin_ns: int) -> None:
        _native.require()
        self._link = _ffi.new("p2pkv_read_link *")
        self._link.fd, self._link.payload_max, self._link.spin_ns = fd, payload_max, spin_ns
        self._link.spin_pays = 1
        self._address = int(_ffi.cast("uintptr_t", self._link))

    def call(
        self, kind: int, keys: list[bytes], deadline_ns: int
    ) -> tuple[int, Any, list[bytes | None] | None]:
        """(error, table, values) of a request; the values of a GET only."""
        result: tuple[int, Any, list[bytes | None] | None]
        result = _all(self._address, kind, keys, deadline_ns)
        return result

    def ask(self, kind: int, keys: list[bytes], deadline_ns: int) -> int:
        """Send a request of 1 to KEYS_MAX keys; the error, or 0. Raises ValueError, TypeError."""
        error: int = _ask(self._address, kind, keys, deadline_ns)
        return error

    def table(self, deadline_ns: int) -> tuple[int, Any]:
        """(error, table). GET: sizes, MISS or ASK; EXISTS: a byte per key, 0 if it is there,
        MISS_BYTE or ASK_BYTE; MATCH: how many keys are there, from the start, and such a byte of
        the next one (0: there is none)."""
        error, table, _ = _table(self._address, deadline_ns)
        return error, table

    def values(self, sizes: list[int], deadline_ns: int) -> tuple[int, list[bytes | None]]:
        """(error, the values): each an object of its own, None where none is sent."""
        result: tuple[int, list[bytes | None]] = _values(self._address, sizes, deadline_ns)
        return result

    def into(self, targets: Sequence[memoryview], deadline_ns: int) -> int:
        """Receive the values, one after the other, into targets of together their bytes."""
        pieces = Pieces.targets(targets)
        error: int = _into(self._address, pieces._address, deadline_ns)
        return error


class ReadFigures(NamedTuple):
    """A read server at one moment; all but ``connections`` only rise."""

    connections: int
    dropped: int
    requests: int
    values: int
    misses: int
    """Values that were asked for and are not there."""
    flags: int
    """Keys of which it said that they are there."""
    absent: int
    """Keys of which it said that they are not there."""
    asks: int
    """Keys for which the owner was to be asked."""
    bytes: int
    """Of values."""


class ReadThreads:
    """A node's end: threads that answer from the published index without the GIL.

    ``index`` and ``arena`` are (address, bytes), mapped until it is closed; ``listener`` is a
    listening non-blocking socket's number, open until then. Raises ConfigError.
    """

    def __init__(
        self,
        index: int,
        arena: tuple[int, int],
        listener: int,
        token: bytes,
        *,
        payload_max: int,
        stall_ns: int,
        spin_ns: int,
        connections_max: int,
        threads: int,
    ) -> None:
        _native.require()
        options = _ffi.new("p2pkv_read_options *")
        options.index, (options.arena, options.arena_bytes) = index, arena
        options.listener, options.payload_max = listener, payload_max
        options.stall_ns, options.spin_ns = stall_ns, spin_ns
        options.connections_max, options.threads = connections_max, threads
        _ffi.memmove(options.token, token, TOKEN_BYTES)
        error = _ffi.new("int *")
        self._stop = _lib.p2pkv_read_server_stop
        self._server = _lib.p2pkv_read_server_start(options, error)
        if not self._server:
            raise ConfigError(f"read threads: {os.strerror(error[0])}")
        self._last = ReadFigures(*[0] * len(ReadFigures._fields))

    def figures(self) -> ReadFigures:
        if self._server:
            figures = _ffi.new("uint64_t[]", len(ReadFigures._fields))
            _lib.p2pkv_read_server_figures(self._server, figures)
            self._last = ReadFigures(*figures)
        return self._last

    def close(self) -> None:
        """Close all connections, and return when no thread is left. May be called again."""
        if self._server:
            self.figures()
            server, self._server = self._server, 0
            self._stop(server)

    def __del__(self) -> None:
        if getattr(self, "_server", 0):
            self.close()
