"""Many schedules, on all processors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from typing import NamedTuple

from .mutants import planted
from .simulation import Simulation, Verdict


class Order(NamedTuple):
    """One schedule to run, maybe with a mistake planted in the replicas."""

    seed: int
    mutant: str = ""


def run(order: Order) -> Verdict:
    """The verdict on one schedule."""
    with planted(order.mutant):
        return Simulation(order.seed).verdict()


def run_many(
    seeds: Sequence[int], mutant: str = "", processes: int | None = None
) -> Iterator[Verdict]:
    """Verdicts in any order, from several processes."""
    os.environ["PYTHONHASHSEED"] = "0"  # a seed means the same in each process
    with get_context("spawn").Pool(processes) as pool:
        orders = [Order(seed, mutant) for seed in seeds]
        yield from pool.imap_unordered(run, orders, chunksize=4)
