"""A client's read connection to one node: reads that the node answers without its event loop.

The node's read server (``read_server``) looks into the published index. What that does not answer
is left to the owner: it is asked over the data connection, see ``data_path``.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from errno import EPROTO, ETIMEDOUT
from typing import Any

from p2pkv import _native, wire
from p2pkv._native import reads
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.parts import flat
from p2pkv.routing import Reply, Request
from p2pkv.stream import SPIN_NS, Closed, Late, configure, parse_endpoint
from p2pkv.wire import Kind, Status

_STATUSES: dict[int, Status] = {
    0: Status.OK,
    reads.MISS_BYTE: Status.MISS,
    reads.ASK_BYTE: Status.DEFERRED,
}
"""What a byte of an answer to EXISTS or MATCH means."""
_FLAGS = bytes(_STATUSES.get(byte, Status.DEFERRED) for byte in range(256))
_OF_NO_SIZE = {reads.MISS: Status.MISS, reads.ASK: Status.DEFERRED}


class ReadLink:
    """A blocking read connection. Used by one thread at a time.

    Raises OSError, ValueError from the constructor when the node cannot be reached. After Closed,
    Late or ProtocolError it is of no more use.
    """

    def __init__(self, endpoint: str, token: bytes, limits: Limits, timeout_s: float) -> None:
        if len(token) != reads.TOKEN_BYTES:
            raise ValueError(f"a token of {len(token)} bytes")
        self.endpoint = endpoint
        sock = socket.create_connection(parse_endpoint(endpoint), timeout_s)
        try:
            configure(sock)
            sock.sendall(reads.preface(token))
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._end = reads.ReadEnd(sock.fileno(), 2 * limits.message_bytes_max, SPIN_NS)

    def close(self) -> None:
        self._socket.close()

    def call(self, request: Request, kind: int, deadline_ns: int) -> Reply | None:
        """``ask`` and ``receive``."""
        body: Any = request.body
        if request.sink is not None:
            _check(self._end.ask(kind, body.keys, deadline_ns))
            return self.receive(request, deadline_ns)
        error, table, values = self._end.call(kind, body.keys, deadline_ns)
        _check(error)
        return _values(table, values) if values is not None else _reply(request, table)

    def ask(self, request: Request, kind: int, deadline_ns: int) -> None:
        """Send a request that ``kind_of`` knows. Raises Closed, Late."""
        body: Any = request.body
        _check(self._end.ask(kind, body.keys, deadline_ns))

    def receive(self, request: Request, deadline_ns: int) -> Reply | None:
        """The reply to what was asked; None: all of it is for the owner to answer.

        Items whose status is DEFERRED are for the owner. Raises Closed, Late, ProtocolError.
        """
        error, table = self._end.table(deadline_ns)
        _check(error)
        if request.kind != Kind.GET:
            return _reply(request, table)
        if request.sink is None:
            error, values = self._end.values(table, deadline_ns)
            _check(error)
            return _values(table, values)
        if table.count(reads.ASK) == len(table):
            return None
        body = _described(table)
        self._scatter(request.sink(body), sum(body.sizes), deadline_ns)
        return Reply(Kind.VALUES, body, (), 0, None, True)

    def _scatter(self, targets: Sequence[Any], size: int, deadline_ns: int) -> None:
        pieces = [piece for piece in flat(targets) if len(piece)]
        if sum(map(len, pieces)) != size:
            raise ProtocolError(f"values of {size} bytes for other buffers")
        if pieces:
            _check(self._end.into(pieces, deadline_ns))


def kind_of(request: Request) -> int:
    """What a read connection calls this request; 0: it is not for a read connection."""
    body: Any = request.body
    if request.direct or request.kind not in _KINDS or not 0 < len(body.keys) <= reads.KEYS_MAX:
        return 0
    if request.kind == Kind.GET and (body.tell_once or body.starts or body.checksums):
        return 0
    if request.kind == Kind.EXISTS and body.touch:
        return 0
    return _KINDS[request.kind]


_KINDS = {Kind.GET: reads.GET, Kind.EXISTS: reads.EXISTS, Kind.MATCH: reads.MATCH}


def _described(sizes: list[int]) -> wire.Values:
    """What an answer says of its values. Those that are DEFERRED are for the owner."""
    if min(sizes) >= 0:
        return wire.Values(b"", sizes, [])
    statuses = bytes([_OF_NO_SIZE[size] if size < 0 else Status.OK for size in sizes])
    return wire.Values(statuses, [max(size, 0) for size in sizes], [])


def _values(sizes: list[int], values: list[bytes | None]) -> Reply | None:
    if sizes.count(reads.ASK) == len(sizes):
        return None
    return Reply(Kind.VALUES, _described(sizes), [v for v in values if v], 0, values)


def _reply(request: Request, table: Any) -> Reply | None:
    """The answer to EXISTS or MATCH."""
    if request.kind == Kind.EXISTS:
        if table.count(reads.ASK_BYTE) == len(table):
            return None
        statuses = table.translate(_FLAGS) if any(table) else b""
        return Reply(Kind.STATUSES, wire.Statuses(statuses), ())
    count, of_next = table
    if count == 0 and of_next == reads.ASK_BYTE:
        return None
    return Reply(Kind.MATCHED, wire.Matched(count, _STATUSES[of_next]), ())


def _check(error: int) -> None:
    if not error:
        return
    if error == ETIMEDOUT:
        raise Late
    if error == EPROTO:
        raise ProtocolError("not the reply of a read server")
    raise Closed(_native.describe(error))
