"""Keys, values and buffers of one size, and the store's side of the interface."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
KEYS_MAX = 4096
RUN = 64
"""Consecutive blocks under one tag, as ``p2pkv.adapters.keys`` does it."""


class Work:
    """What one client does with values of one size: calls cycle through all keys, in order.

    The values hold ``set_bytes`` in all, more than caches do, but at least two batches. A batch is
    one sequence of KV blocks: its keys have the form that engines' adapters give them.
    """

    def __init__(self, size: int, batch: int, set_bytes: int, owner: str, out: Any) -> None:
        wanted = max(2 * batch, min(KEYS_MAX, set_bytes // size))
        self.size, self.batch = size, batch
        self.n = wanted // batch * batch
        block = os.urandom(size + self.n)
        self.values = [block[i : i + size] for i in range(self.n)]
        self.keys = block_keys(f"{owner}/{size}/{batch}", self.n)
        self.absent = block_keys(f"{owner}/{size}/{batch}/absent", self.n)
        self.out = memoryview(out)[: batch * size]
        self.buffers = [self.out[i * size : (i + 1) * size] for i in range(batch)]

    def at(self, i: int) -> slice:
        """The keys of the ``i``-th batch call."""
        low = i * self.batch % self.n
        return slice(low, low + self.batch)

    def probes(self, count: int) -> tuple[list[str], list[bool]]:
        """Keys to ask for, every second one absent, and whether each is there."""
        pairs = zip(self.keys, self.absent, strict=True)
        half = [key for pair in list(pairs)[: count // 2] for key in pair]
        return half, [True, False] * (count // 2)


def block_keys(sequence: str, count: int) -> list[str]:
    hashes = [hashlib.sha256(f"{sequence}/{i}".encode()).hexdigest() for i in range(count)]
    fingerprint = hashlib.sha256(sequence.encode()).hexdigest()[:16]
    tags = [hashes[i // RUN * RUN][:16] for i in range(count)]
    return [f"kv:{{{fingerprint}.0.{t}}}{h}" for t, h in zip(tags, hashes, strict=True)]


class Store:
    """A client of one store. What a store has no call for raises NotImplementedError, once.

    ``low`` and ``high`` are indices of ``Work.keys``. ``batch_get_into`` fills
    ``Work.buffers``; ``get_into`` the first of them. A call that fails raises.
    """

    def allocate(self, nbytes: int) -> Any:
        """Memory to receive into."""
        return bytearray(nbytes)

    def load(self, work: Work) -> None:
        """Prepare for other keys and values; not timed."""
        self.w = work

    def clear(self) -> None:
        """Delete all keys of the work; not timed."""
        raise NotImplementedError

    def put(self, i: int) -> None:
        raise NotImplementedError

    def get(self, i: int) -> Any:
        raise NotImplementedError

    def get_into(self, i: int) -> None:
        raise NotImplementedError

    def batch_put(self, low: int, high: int) -> None:
        raise NotImplementedError

    def batch_get(self, low: int, high: int) -> Sequence[Any]:
        raise NotImplementedError

    def batch_get_into(self, low: int, high: int) -> None:
        raise NotImplementedError

    def views(self, low: int, high: int) -> Sequence[Any]:
        """Values where they lie, without a copy into memory of the caller's choice."""
        raise NotImplementedError

    def overwrite(self, low: int, high: int) -> None:
        """``batch_put`` of keys that are there."""
        self.batch_put(low, high)

    def exists(self, keys: list[str]) -> Sequence[bool]:
        raise NotImplementedError

    def match(self, keys: list[str]) -> int:
        """How many keys from the start are there."""
        raise NotImplementedError

    def close(self) -> None:
        pass


def has(store: Store, name: str) -> bool:
    """Whether the store has this call."""
    return getattr(type(store), name) is not getattr(Store, name, None)


def check(right: bool, what: str) -> None:
    if not right:
        raise RuntimeError(f"{what}: wrong answer")
