"""Values that no message holds, between nodes that cannot read each other's memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import client_of, figure

from p2pkv import P2PKVError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for
from p2pkv.testing.observer import lacking

MESSAGE = 1 << 20
LIMITS = {"message_bytes_max": MESSAGE}
VALUE = bytes(range(256)) * (3 * MESSAGE // 256)
HUGE = 96 * MESSAGE
OWN_MEMORY = ("unshare", "--mount", "sh", "-c",
              'mount -t tmpfs none /dev/shm && exec "$@"', "sh")  # fmt: skip
"""What comes after it has a /dev/shm of its own, as on another host."""


def _why_not() -> str:
    if os.geteuid() or not shutil.which("unshare"):
        return "own mounts need root and the program unshare"
    done = subprocess.run([*OWN_MEMORY, "true"], capture_output=True, text=True, check=False)
    return done.stderr


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "none")


@contextmanager
def apart(etcd: EtcdCluster, nodes: int = 2) -> Iterator[Cluster]:
    """Nodes with memory of their own, and two copies of each bucket."""
    copies: dict[str, Any] = {"replication_factor": 2, "rebuild_delay_s": 0.5, "limits": LIMITS}
    memory = {"memory_limit_bytes": 256 << 20}
    with Cluster(0, etcd=etcd, **copies, **memory) as cluster:
        for i in range(nodes):
            cluster.add_node(f"n{i}", wait=False, prefix=OWN_MEMORY)
        cluster.wait(lambda: len(cluster.view().nodes) == nodes, "they are registered")
        wait_copied(cluster)
        yield cluster


def wait_copied(cluster: Cluster) -> None:
    def copied() -> bool:
        view = cluster.view()
        return view.nodes.keys() == {n.name for n in cluster if n.running} and not lacking(view)

    cluster.wait(copied, "every bucket has its copies")


def client(cluster: Cluster) -> Any:
    return client_of("Client", cluster, limits=LIMITS, timeout_s=30.0)


def staged_bytes(kv: Any) -> float:
    return figure(kv, "bytes_staged_total")


class Put(threading.Thread):
    """One put, and what became of it."""

    def __init__(self, kv: Any, key: str, value: bytes) -> None:
        super().__init__(daemon=True)
        self.outcome: int | P2PKVError | None = None
        self._arguments = (key, value)
        self._kv = kv
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._kv.put(*self._arguments)
        except P2PKVError as e:
            self.outcome = e

    def ended(self) -> int | P2PKVError:
        wait_for(lambda: self.outcome is not None, "the put ends")
        assert self.outcome is not None
        return self.outcome


def test_a_value_of_three_messages_has_both_copies_and_no_bucket_is_copied_anew(
    etcd: EtcdCluster,
) -> None:
    with apart(etcd) as cluster, client(cluster) as kv:
        epochs = {b: v.mod_revision for b, v in cluster.view().buckets.items()}
        assert kv.put("three", VALUE, min_replicas=2) == 2
        assert staged_bytes(kv) == len(VALUE)
        assert kv.batch_put({f"k{i}": VALUE for i in range(5)}) == [2] * 5
        assert {b: v.mod_revision for b, v in cluster.view().buckets.items()} == epochs
        cluster["n1"].kill()
        cluster.wait(lambda: cluster.owned("n0") == 64, "n0 has taken over")
        assert kv.batch_get(["three", "k0", "k4"]) == [VALUE] * 3


def test_a_primary_killed_in_the_middle_leaves_nothing_half_written(etcd: EtcdCluster) -> None:
    with apart(etcd) as cluster, client(cluster) as kv:
        key = cluster.key_of("n1")
        assert kv.put(key, VALUE) == 2
        put = Put(kv, key, bytes(HUGE))
        before = len(VALUE)
        wait_for(lambda: staged_bytes(kv) > before + 4 * MESSAGE, "pieces are under way")
        cluster["n1"].kill()
        outcome = put.ended()
        cluster.wait(lambda: cluster.owned("n0") == 64, "n0 has taken over")
        found = kv.get(key)
        possible = [bytes(HUGE)] if isinstance(outcome, int) else [VALUE, bytes(HUGE)]
        assert found in possible
        wait_for(lambda: figure(kv, "values_staged") == 0, "what was staged is freed")


def test_a_backup_killed_in_the_middle_is_done_without(etcd: EtcdCluster) -> None:
    with apart(etcd) as cluster, client(cluster) as kv:
        key = cluster.key_of("n0")
        put = Put(kv, key, bytes(HUGE))
        wait_for(lambda: staged_bytes(kv) > 4 * MESSAGE, "pieces are under way")
        cluster["n1"].kill()
        assert put.ended() == 1
        cluster["n1"].start()
        wait_copied(cluster)
        cluster["n0"].kill()
        cluster.wait(lambda: cluster.owned("n1") == 64, "n1 has taken over")
        assert kv.get(key) == bytes(HUGE)
