"""Many schedules, on all processors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import NamedTuple

from p2pkv.types import Member

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


def make_replayable() -> None:
    """Let a seed mean the same in each process that has PYTHONHASHSEED=0.

    The order of a set follows the hashes of what is in it, and a struct's hash is, by itself, one
    of where its class lies in memory, too.
    """
    Member.__hash__ = _hash_by_value  # type: ignore[method-assign, assignment]


def _hash_by_value(member: Member) -> int:
    return hash((member.node, member.boot))


def new_pool(processes: int | None = None) -> Pool:
    """Processes in which a seed means the same. Default: one for each processor."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        return get_context("spawn").Pool(processes, make_replayable)
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def run_many(
    seeds: Sequence[int], mutant: str = "", processes: int | None = None
) -> Iterator[Verdict]:
    """Verdicts in any order, from several processes."""
    with new_pool(processes) as pool:
        orders = [Order(seed, mutant) for seed in seeds]
        yield from pool.imap_unordered(run, orders, chunksize=4)
