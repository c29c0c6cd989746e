"""Deliberate mistakes in the replicas, to see that the suite finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MUTANTS: dict[str, Callable[[], None]] = {}


@contextmanager
def planted(name: str) -> Iterator[None]:
    yield
