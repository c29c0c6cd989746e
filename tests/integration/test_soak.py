"""The benchmarks run, with real servers; the client does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_parts_of_the_comparison_run_and_bytes_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    stores = "p2pkv-auto,p2pkv-tcp,p2pkv-zmq,memcpy,socket"
    text = run("peers.py", "--quick", "--stores", stores, "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    parts = {"calls", "sequences", "clients", "spin", "copies"}
    assert {r["part"] for r in rows} == parts
    stored = [r for r in rows if r["store"] not in ("memcpy", "socket")]
    moved = [r for r in stored if r["workload"] not in ("exists", "match")]
    assert all(r["verified"] > 0 for r in moved)
    assert "two copies, batch_put" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_client_and_node_hold_does_not_grow() -> None:
    counts = [
        "--operations",
        "6000",
        "--connects",
        "48",
        "--killed-clients",
        "12",
        "--deaths",
        "12",
    ]
    text = run("soak.py", *counts)
    assert text.count("flat") >= 20
