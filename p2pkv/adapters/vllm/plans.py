"""What the scheduler tells the workers, and what they tell it. Pure, and travels by pickle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from p2pkv.adapters.keys import Fingerprint

LOG = "vllm.p2pkv"
"""Name of the logger: below vLLM's own, so that it goes where that goes."""


class Run(NamedTuple):
    """Blocks that have one tag (see ``adapters.keys``)."""

    first: bytes
    """Hash of the block that the run starts with, which need not be among those below."""
    hashes: list[bytes]
    blocks: list[int]
    """Where each is in the engine's cache."""


class Transfer(NamedTuple):
    """Consecutive blocks of a request that are loaded, or saved."""

    job: int
    """Its number; those of loads and saves are different ones."""
    request: str
    runs: list[Run]

    @property
    def blocks(self) -> list[int]:
        return [block for run in self.runs for block in run.blocks]


class StepPlan(NamedTuple):
    """What the workers shall do in one step of the engine."""

    fingerprint: Fingerprint | None
    """None: nothing is to be done before the workers have said how their memory looks."""
    loads: list[Transfer]
    saves: list[Transfer]


class WorkerFacts(NamedTuple):
    """What only a worker knows."""

    rank: int
    """That of its keys: workers that hold the same bytes have the same."""
    block_bytes: int
    layout: str
    """All that the order of bytes in a block depends on."""


class SavesDone:
    """How many workers are done with each save; those of several workers add up."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self.counts = Counter(counts)

    def aggregate(self, other: SavesDone) -> SavesDone:
        return SavesDone(self.counts + other.counts)


def runs_of(
    chain: Sequence[bytes], blocks: Sequence[int], start: int, stop: int, group: int
) -> list[Run]:
    """Blocks ``start`` to ``stop`` of a sequence, by their runs of ``group`` blocks.

    ``chain`` and ``blocks`` are those of the sequence from its first block on.
    """
    runs = []
    for head in range(start - start % group, stop, group):
        low, high = max(head, start), min(head + group, stop)
        runs.append(
            Run(bytes(chain[head]), list(map(bytes, chain[low:high])), list(blocks[low:high]))
        )
    return runs
