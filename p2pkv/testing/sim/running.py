"""Many schedules, on all processors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from .mutants import planted
from .simulation import Simulation, Verdict


def run(seed: int, mutant: str = "") -> Verdict:
    """The verdict on one schedule, maybe with a deliberate mistake in the replicas."""
    with planted(mutant):
        return Simulation(seed).verdict()


def run_many(
    seeds: Sequence[int], mutant: str = "", processes: int | None = None
) -> Iterator[Verdict]:
    """Verdicts in any order, from several processes."""
    os.environ["PYTHONHASHSEED"] = "0"  # a seed means the same in each process
    with get_context("spawn").Pool(processes) as pool:
        arguments = [(seed, mutant) for seed in seeds]
        yield from pool.imap_unordered(_run, arguments, chunksize=8)


def _run(arguments: tuple[int, str]) -> Verdict:
    return run(*arguments)
