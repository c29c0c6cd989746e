"""How requests are answered, and the shapes of answer that several kinds of request have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pkv import wire
from p2pkv.journal import Outcome
from p2pkv.sessions import Deferred, Response, Session
from p2pkv.wire import Kind

Frames = Sequence[wire.Buffer]
"""Values of a request, in as many pieces as they came."""

Handler = Callable[[Session, Any, Frames, int], Response | Deferred]
"""Answers one kind of request: the session, the body, the values, the time."""


def statuses(statuses: Sequence[int]) -> Response:
    """A status for each key, in short form if all are OK."""
    return Kind.STATUSES, wire.Statuses(bytes(statuses) if any(statuses) else b""), ()


def told(outcome: Outcome) -> Response:
    """The answer to a write."""
    statuses, copies = outcome.statuses, outcome.copies
    several = any(n > 1 for n in copies)
    body = wire.Statuses(
        bytes(statuses) if any(statuses) else b"", bytes(copies) if several else b""
    )
    return Kind.STATUSES, body, ()
