"""Random schedules of faults against the real replicas, and mistakes that they have to find."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest

from p2pkv.testing.sim.__main__ import main
from p2pkv.testing.sim.running import Order, new_pool, run

SCHEDULES = 2000
CHUNK = 100

FOUND_SOON = {
    "noepoch": 200, "dropstaged": 50, "eagershrink": 20, "lateexpand": 60, "nolease": 200,
}  # fmt: skip
"""Mutants, and within how many schedules they have to be found; the page on testing has all."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with new_pool() as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_no_schedule_violates_an_invariant(pool: Pool, first: int) -> None:
    orders = [Order(seed) for seed in range(first, first + CHUNK)]
    verdicts = pool.map(run, orders, chunksize=4)
    assert not [v for v in verdicts if v.violation]
    assert sum(v.acknowledged for v in verdicts) > 50 * CHUNK
    assert sum(v.promotions for v in verdicts) > CHUNK / 2


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "limit"), FOUND_SOON.items())
def test_a_mistake_is_found(pool: Pool, mutant: str, limit: int) -> None:
    orders = [Order(seed, mutant) for seed in range(limit)]
    assert any(v.violation for v in pool.imap_unordered(run, orders, chunksize=2))


def test_a_seed_means_the_same_in_each_process() -> None:
    command = [sys.executable, "-m", "p2pkv.testing.sim", "--first", "709", "--trace"]
    told = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(3)]
    assert told[0] == told[1] == told[2]
    assert b"promotions" in told[0]


def test_the_command_tells_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--processes", "1", "--json"]) == 0
    assert '"violations": 0' in capsys.readouterr().out
