"""The parts of the benchmarks that judge: bytes, targets, growth; and the drawing of plots."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import soak  # noqa: E402
import targets  # noqa: E402
from compare.processes import Spec, StoreFailed, WorkerProcess  # noqa: E402
from compare.report import table  # noqa: E402
from compare.work import RUN, Work  # noqa: E402

KIB = 1 << 10
WORK = {"size": KIB, "batch": 8, "set_bytes": 64 * KIB}


def row(store: str, **changes: Any) -> dict[str, Any]:
    made = {
        "part": "calls",
        "store": store,
        "workload": "batch_get_into",
        "size_bytes": 64 * KIB,
        "keys": 32,
        "clients": 1,
        "p50_us": 100.0,
        "p99_us": 200.0,
        "keys_per_s": 320_000,
        "gb_per_s": 20.97,
    }
    return made | changes


# -- keys and values


def test_consecutive_keys_share_a_tag_and_all_keys_differ() -> None:
    work = Work(16, 2, 16 * 2 * RUN, "me", bytearray(32))
    tags = [key[key.index("{") : key.index("}")] for key in work.keys]
    assert tags == [tag for tag in dict.fromkeys(tags) for _ in range(RUN)]
    assert len(set(work.keys + work.absent)) == 2 * work.n


def test_a_working_set_has_two_batches_however_small_it_is_to_be() -> None:
    assert Work(KIB, 32, 1, "me", bytearray(32 * KIB)).n == 64


# -- workers


@pytest.fixture
def memcpy() -> Iterator[WorkerProcess]:
    with WorkerProcess(Spec("memcpy", "limits:Memcpy", limit=True), 8 * KIB) as worker:
        worker.ask("load", **WORK)
        yield worker


def test_wrong_bytes_are_noticed(memcpy: WorkerProcess) -> None:
    with pytest.raises(StoreFailed, match="wrong answer"):
        memcpy.ask("verify", workload="batch_get_into")


@pytest.mark.parametrize("kind", ["Memcpy", "Socket"])
def test_what_was_put_comes_back_from_each_limit(kind: str) -> None:
    with WorkerProcess(Spec(kind, f"limits:{kind}", limit=True), 8 * KIB) as worker:
        worker.ask("load", **WORK)
        worker.ask("fill")
        for workload in ("batch_get_into", "get_into"):
            assert worker.ask("verify", workload=workload) == {"values": 8}


def test_writes_are_measured_in_rounds_over_all_keys(memcpy: WorkerProcess) -> None:
    figures = memcpy.ask("measure", workload="batch_put", seconds=0.01)
    assert figures["calls"] >= 5
    assert figures["p50_us"] <= figures["p99_us"]


def test_a_store_that_cannot_be_had_is_an_error_that_says_which() -> None:
    with (
        WorkerProcess(Spec("nowhere", "redis_store:Redis", port=1), 8) as worker,
        pytest.raises(StoreFailed, match="nowhere: "),
    ):
        worker.ask("load", **WORK)


# -- tables and targets


def test_a_table_compares_the_best_path_with_the_best_peer() -> None:
    rows = [row("p2pkv-auto"), row("p2pkv-tcp", keys_per_s=1), row("memcpy", keys_per_s=9e9),
            row("redis", keys_per_s=80_000), row("mooncake-shm", keys_per_s=160_000)]  # fmt: skip
    assert table(rows).splitlines()[-1].endswith("| 2.00 |")


def reached(rows: list[dict[str, Any]], unit: str) -> float | None:
    what = "same host, batch_get_into 32 × 64 KiB"
    (value,) = (v for t, v in targets.check(rows) if (t.what, t.unit) == (what, unit))
    return value


def test_a_target_is_measured_against_the_best_peer_by_its_best_call() -> None:
    ours, theirs = row("p2pkv-auto"), row("redis", workload="batch_get", keys_per_s=100_000)
    slower = row("mooncake-shm", keys_per_s=50_000)
    assert reached([ours, theirs, slower], "× best peer") == pytest.approx(3.2)


def test_a_limit_is_no_peer() -> None:
    rows = [row("p2pkv-auto"), row("memcpy", keys_per_s=400_000)]
    assert reached(rows, "of memcpy") == pytest.approx(0.8)
    assert reached(rows, "× best peer") is None


def test_what_many_clients_reach_together_meets_no_target_of_one() -> None:
    rows = [row("p2pkv-auto", clients=32), row("memcpy")]
    assert reached(rows, "of memcpy") is None


def test_times_have_an_upper_limit_and_rates_a_lower_one() -> None:
    rate = targets.Target("rate", "", 2.0, lambda _: None)
    time = targets.Target("time", "µs", 2.0, lambda _: None, at_most=True)
    assert [rate.met(1.9), rate.met(2.0), time.met(2.0), time.met(2.1)] == [
        False,
        True,
        True,
        False,
    ]


def test_the_table_of_targets_says_which_were_not_met() -> None:
    text = targets.table([row("p2pkv-auto"), row("memcpy", keys_per_s=400_000)])
    assert "| of memcpy | ≥ 0.85 | 0.80 | **no** |" in text
    assert "\n0 of 1 met" in text


# -- growth


def test_what_levels_off_after_a_third_is_flat() -> None:
    warm = [float(min(i, 4)) for i in range(12)]
    assert not soak.Curve("a", "fds", warm).grew


def test_one_descriptor_more_per_sample_is_growth() -> None:
    assert soak.Curve("a", "fds", [float(i) for i in range(12)]).grew


def test_memory_may_vary_by_two_megabytes_and_not_more() -> None:
    for last, grew in ((2048.0, False), (2049.0, True)):
        assert soak.Curve("a", "memory_kib", [0.0] * 11 + [last]).grew is grew


# -- plots


def test_plots_are_drawn_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot

    rows = [
        row(store, size_bytes=size, workload=workload)
        for store in ("p2pkv-auto", "redis", "memcpy")
        for size in (4 * KIB, 64 * KIB)
        for workload in ("batch_get_into", "batch_put", "get", "put")
    ]
    for file in plot.write(rows, tmp_path):
        assert file.read_bytes().startswith(b"\x89PNG")
