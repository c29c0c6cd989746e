"""The script that checks GPUs, with one that is not there."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pkv import staging
from p2pkv.cuda import Run
from p2pkv.testing.fakecuda import FakeCuda

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_gpu.py"
SMALL = ["--fake", "--json", "--largest", "1048576"]


@pytest.fixture
def check() -> Callable[..., int]:
    main: Callable[..., int] = runpy.run_path(str(SCRIPT))["main"]
    return main


def test_without_a_gpu_the_script_says_why() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert "no GPU to check" in done.stderr


def test_every_check_is_in_the_report(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(SMALL) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["right"] is True
    checks = [row["check"] for row in report["rows"]]
    of_a_size = [
        "copy, pinned memory", "copy, plain memory", "copy, registered shared",
        "round trip, direct", "round trip, staged",
    ]  # fmt: skip
    assert checks == [
        "node's memory, registered", *of_a_size, *of_a_size,
        "KV blocks of 4 KiB, direct", "stream order, direct",
        "KV blocks of 4 KiB, staged", "stream order, staged",
    ]  # fmt: skip
    assert report["rows"][0]["refused"] == "no"
    rates = [row[k] for row in report["rows"] for k in ("put", "get", "to_host") if k in row]
    assert len(rates) == 18
    assert min(rates) > 0


class Forgetful(FakeCuda):
    """Its marks are reached at once, whatever is still on the stream."""

    def mark(self, device: int, stream: int) -> Callable[[], None]:
        return lambda: None


class Lazy(FakeCuda):
    """Does not copy to the host."""

    def gather(self, device: int, runs: Sequence[Run], stream: int) -> None:
        pass


@pytest.mark.parametrize("fake", [Forgetful, Lazy])
def test_wrong_bytes_are_found(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str], fake: type[FakeCuda]
) -> None:
    assert check(SMALL, fake()) == 1
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert {row["check"] for row in rows if not row.get("right", True)} >= {
        f"{check}, {way}"
        for check in ("round trip", "stream order")
        for way in ("direct", "staged")
    }
    staging.forget_stages()
