"""The example with Hugging Face's transformers, as it stands."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("torch") is None,
        reason="transformers or torch is not installed: scripts/test-engines transformers",
    ),
]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "transformers_prefix_cache.py"


def test_another_process_gets_the_logits_from_the_stored_prefix() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 of 10 blocks found and fetched" in done.stdout
    assert done.stdout.splitlines()[-1] == "equal"
    processes = {line.split(":")[0] for line in done.stdout.splitlines() if "process" in line}
    assert len(processes) == 2
