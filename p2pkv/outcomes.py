"""What a status, a refusal or the lack of an answer means to the caller. Pure.

Some say "ask again", the others are errors, each under its own name and with the key that it
concerns.
"""

from __future__ import annotations

from p2pkv import errors
from p2pkv.errors import P2PKVError, ProtocolError
from p2pkv.wire import Error, Fault, Status

RETRY = frozenset({Status.NOT_PRIMARY, Status.MOVING, Status.STALLED})
"""Statuses after which the key is asked for again, with a new ring and after a pause."""

PASSING_FAULTS = frozenset({Fault.NOT_READY, Fault.SESSIONS_MAX, Fault.NO_SESSION})
"""Refusals of a whole request, which has not run, after which it may be sent again."""

DEADLINE, DEFERRED = "deadline", "deferred"

_FINAL: dict[int, tuple[type[P2PKVError], str]] = {
    Status.MISS: (errors.Miss, "is not there"),
    Status.OUT_OF_MEMORY: (errors.OutOfMemory, "found no room, and nothing may be evicted"),
    Status.QUOTA: (errors.QuotaExceeded, "is over its node's hard_pin_quota"),
    Status.TOO_LARGE: (errors.TooLarge, "has a value larger than its node's memory"),
    Status.CONFLICT: (errors.Conflict, "is no longer allocated or open"),
    Status.CORRUPT: (errors.CorruptValue, "did not arrive as it was sent"),
    Status.INVALID: (errors.InvalidArgument, "was refused by its node"),
    Status.NOT_ENOUGH_REPLICAS: (errors.NotEnoughReplicas, "has fewer copies than asked for"),
    Status.INDETERMINATE: (errors.Indeterminate, "may or may not have been changed"),
}

_BUCKET_WAITS = {Status(status).name.lower() for status in RETRY}


def name_of(key: bytes) -> str:
    """How messages name a key."""
    return f"key {key[:80]!r}"


def error_of(status: int, key: bytes) -> P2PKVError:
    """The exception for a status that is neither success nor a reason to ask again."""
    kind, text = _FINAL.get(status, (ProtocolError, f"got the unexpected status {status}"))
    return kind(f"{name_of(key)} {text}")


def refusal(error: Error, what: str) -> P2PKVError:
    """The exception for a refused request that it makes no sense to repeat."""
    kind = errors.ClusterMismatch if error.fault == Fault.CLUSTER else ProtocolError
    return kind(f"{what}: refused: {error.message}")


def indeterminate(why: str, what: str) -> errors.Indeterminate:
    """The exception for a write of which nobody knows whether it ran."""
    return errors.Indeterminate(f"{what} may or may not have been changed: {why}")


def gave_up(reason: str, what: str) -> P2PKVError:
    """What to raise where the deadline passed, and ``reason`` was the last one to go on asking."""
    if reason in _BUCKET_WAITS:
        return errors.Stalled(
            f"{what}: its bucket is {reason} and the deadline passed; try again later"
        )
    if reason in (DEADLINE, DEFERRED):
        return errors.DeadlineExceeded(f"{what}: no answer before the deadline")
    return errors.Unreachable(
        f"{what}: its owner could not be reached before the deadline ({reason})"
    )
