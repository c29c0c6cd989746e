"""The command ``python -m p2pkv.testing.sim``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from .mutants import MUTANTS, planted
from .running import make_replayable, run_many
from .simulation import Simulation, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m p2pkv.testing.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="a mistake to plant")
    parser.add_argument("--processes", type=int, help="default: one for each processor")
    parser.add_argument("--until-found", action="store_true", help="stop at the first violation")
    parser.add_argument("--trace", action="store_true", help="run --first alone and tell all of it")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    options = parser.parse_args(arguments)
    if options.trace:
        if os.environ.get("PYTHONHASHSEED") != "0":
            os.environ["PYTHONHASHSEED"] = "0"
            os.execv(sys.executable, [sys.executable, "-m", "p2pkv.testing.sim", *sys.argv[1:]])
        make_replayable()
        return _trace(options.first, options.mutant)
    started = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    verdicts, bad = [], []
    for verdict in run_many(seeds, options.mutant, options.processes):
        verdicts.append(verdict)
        if verdict.violation:
            bad.append(verdict)
            if not options.json:
                print(f"seed {verdict.seed}: {verdict.violation[:300]}", flush=True)
            if options.until_found:
                break
    report = _report(verdicts, bad, time.monotonic() - started)
    print(json.dumps(report) if options.json else _text(report))
    return 1 if bad else 0


def _report(verdicts: list[Verdict], bad: list[Verdict], seconds: float) -> dict[str, object]:
    count = max(1, len(verdicts))
    names = ("acknowledged", "committed", "records", "generations")
    means = {name: round(sum(getattr(v, name) for v in verdicts) / count, 2) for name in names}
    healed = sorted(v.healed_ns for v in verdicts)
    return {
        "schedules": len(verdicts),
        "violations": len(bad),
        "means": means,
        "healed_ms_median": healed[len(healed) // 2] // 1_000_000 if healed else 0,
        "healed_ms_max": healed[-1] // 1_000_000 if healed else 0,
        "seconds": round(seconds, 1),
        "bad": [asdict(v) for v in sorted(bad, key=lambda v: v.seed)[:20]],
    }


def _text(report: dict[str, object]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in report.items() if name != "bad")


def _trace(seed: int, mutant: str) -> int:
    with planted(mutant):
        simulation = Simulation(seed, tracing=True)
        verdict = simulation.verdict()
        for at, words in simulation.world.trace:
            print(f"{at / 1e6:12.3f}  {words}")
        print(simulation.state())
    print(verdict)
    return 1 if verdict.violation else 0


if __name__ == "__main__":
    sys.exit(main())
