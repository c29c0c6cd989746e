"""A cluster for the examples: one that is there, or one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from p2pkv.commands.connection import local_endpoints

END_TIMEOUT_S = 60.0


@contextmanager
def endpoints(given: str | None, nodes: int = 2) -> Iterator[list[str]]:
    """The etcd of a cluster named "default".

    Given ones; else those of the cluster that ``p2pkv up`` runs on this machine; else those of a
    cluster that lives as long as this context.
    """
    known = given.split(",") if given else local_endpoints("default")
    if known:
        yield known
        return
    with tempfile.TemporaryDirectory(prefix="p2pkv-example-") as state:
        command = ["up", "--json", f"--nodes={nodes}", "--memory=256MiB", "--bucket-count=64"]
        up = subprocess.Popen(
            [sys.executable, "-m", "p2pkv.cli", *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "XDG_STATE_HOME": state},
        )  # fmt: skip
        try:
            assert up.stdout is not None
            said = json.loads(up.stdout.readline() or "{}")
            if said.get("event") != "ready":
                raise SystemExit(f"the cluster did not start: {said.get('message', 'no reason')}")
            yield list(said["etcd_endpoints"])
        finally:
            up.terminate()
            up.communicate(timeout=END_TIMEOUT_S)
