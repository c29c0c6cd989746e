"""Time as a value that is passed in: monotonic nanoseconds."""

from __future__ import annotations

import os
import time
from typing import Protocol

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000


class Clock(Protocol):
    """Anything that tells monotonic nanoseconds; its zero has no meaning."""

    def __call__(self) -> int: ...


def monotonic() -> int:
    """The clock of production. It goes on while the process is stopped, which fencing relies on."""
    return time.monotonic_ns()


def namespace() -> str:
    """Names whose clock this is: processes of one host may have different ones (containers)."""
    try:
        return os.readlink("/proc/self/ns/time")
    except OSError:
        return ""


def seconds(value: float) -> int:
    """Seconds as nanoseconds."""
    return round(value * SECOND_NS)
