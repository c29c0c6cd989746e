"""Blocks of the engine that are held while they are saved. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BlockPool(Protocol):
    """vLLM's. A block that is touched is not used for anything else until it is freed."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...


class Pins:
    """By job, until all ``workers`` are done with it. At most ``share_max`` of the pool is held:
    a store that is slow must not take the engine's memory."""

    def __init__(self, pool: BlockPool, workers: int, share_max: float) -> None:
        self._pool = pool
        self._workers = workers
        self._room = int(len(pool.blocks) * share_max)
        self._held: dict[int, tuple[list[int], int]] = {}
        """The blocks of a job, and how many workers are not done with it."""
        self._blocks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def room(self) -> int:
        """How many more blocks may be held."""
        return self._room

    def __contains__(self, block: int) -> bool:
        """Whether it is held, so that it is being saved."""
        return block in self._blocks

    def take(self, job: int, blocks: list[int]) -> None:
        """Hold them; no more than there is room for, and none that is held."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._held[job] = (blocks, self._workers)
        self._blocks.update(blocks)
        self._room -= len(blocks)

    def done(self, job: int, workers: int = 1) -> None:
        """So many more workers are done with a job."""
        if job not in self._held:
            return
        blocks, left = self._held[job]
        if left > workers:
            self._held[job] = (blocks, left - workers)
            return
        del self._held[job]
        self._blocks.difference_update(blocks)
        self._room += len(blocks)
        # The end of a sequence first: what is freed first is evicted first.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
