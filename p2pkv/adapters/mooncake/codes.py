"""Return codes. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from p2pkv import errors
from p2pkv.errors import P2PKVError


class ErrorCode(enum.IntEnum):
    """Those of Mooncake's codes that are returned here, under its names."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    INVALID_KEY = -400
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901


class InvalidKey(errors.InvalidArgument):
    """A key that the store cannot take."""


class NotSetUp(errors.InvalidArgument):
    """``setup`` has not been called, has failed, or the store was closed."""


_CODES: list[tuple[type[P2PKVError], ErrorCode]] = [
    (errors.Miss, ErrorCode.OBJECT_NOT_FOUND),
    (InvalidKey, ErrorCode.INVALID_KEY),
    (errors.InvalidArgument, ErrorCode.INVALID_PARAMS),
    (errors.OutOfMemory, ErrorCode.NO_AVAILABLE_HANDLE),
    (errors.DeadlineExceeded, ErrorCode.RPC_TIMEOUT),
    (errors.CorruptValue, ErrorCode.CHECKSUM_MISMATCH),
    (errors.Conflict, ErrorCode.REPLICA_IS_NOT_READY),
    (errors.NotEnoughReplicas, ErrorCode.REPLICA_IS_NOT_READY),
    (errors.DeviceError, ErrorCode.TRANSFER_FAIL),
    (errors.Unreachable, ErrorCode.RPC_FAIL),
    (errors.Stalled, ErrorCode.RPC_FAIL),
    (errors.Indeterminate, ErrorCode.RPC_FAIL),
    (errors.AuthorityUnavailable, ErrorCode.RPC_FAIL),
    (errors.ClusterMismatch, ErrorCode.RPC_FAIL),
    (errors.ProtocolError, ErrorCode.RPC_FAIL),
    (errors.ClosedClient, ErrorCode.RPC_FAIL),
    (errors.ForkedClient, ErrorCode.RPC_FAIL),
]


def code_of(error: P2PKVError) -> int:
    """The code that stands for an error."""
    return int(next((code for kind, code in _CODES if isinstance(error, kind)), -1))


def codes(outcomes: Iterable[Any]) -> list[int]:
    """0 where a call has a result, whatever it is, else its code."""
    return [code_of(o) if isinstance(o, P2PKVError) else 0 for o in outcomes]


def sizes(outcomes: Iterable[Any]) -> list[int]:
    """The result itself, a number of bytes; a miss and an error as their codes."""
    return [
        o if isinstance(o, int)
        else int(ErrorCode.OBJECT_NOT_FOUND) if o is None
        else code_of(o)
        for o in outcomes
    ]  # fmt: skip
