"""The examples that need nothing but numpy, as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_image_features_and_text_come_in_one_batch_from_one_node(etcd: EtcdCluster) -> None:
    with Cluster(2, etcd=etcd, name="default") as cluster:
        done = subprocess.run(
            [
                sys.executable, str(EXAMPLES / "multimodal.py"), "--etcd-endpoints",
                ",".join(cluster.etcd.endpoints),
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in one batch from n" in done.stdout
    assert done.stdout.splitlines()[-1] == "equal"
