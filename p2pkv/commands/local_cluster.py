"""etcd and nodes on this machine as child processes, for ``p2pkv up``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from p2pkv.commands import state
from p2pkv.commands.output import UNREACHABLE, Failure
from p2pkv.config import EtcdConfig
from p2pkv.orphans import dying_with_parent
from p2pkv.processes import start_time

if TYPE_CHECKING:
    from p2pkv.etcd_server import EtcdCluster, EtcdServer
    from p2pkv.records import View

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 2000


class NodeProcess:
    """One ``p2pkv node`` as a child."""

    def __init__(self, node_id: str, log: Path, options: Mapping[str, str]) -> None:
        self.node_id = node_id
        self.log = log
        self.reported = False
        arguments = [f"{name}={value}" for name, value in options.items()]
        # What is set for the cluster at large may not reach into its nodes' options.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("P2PKV_")}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "p2pkv.cli", "node", f"--node-id={node_id}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                # An interrupt at the terminal is for us: we end our children in order.
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended, and not because it was asked to."""
        return self.process.poll() not in (None, 0)

    def obituary(self) -> str:
        """How it ended."""
        code = self.process.returncode
        if code == 0:
            return f"node {self.node_id} has left, as it was asked to"
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        return f"node {self.node_id} has ended ({how}); the end of {self.log}:\n{tail(self.log)}"


class LocalCluster:
    """The processes of one cluster. ``start`` it, ``watch`` it, ``stop`` it.

    ``endpoints`` empty: an etcd of its own is started. ``memory_bytes`` is for each node.
    """

    def __init__(
        self,
        cluster: str,
        nodes: int,
        memory_bytes: int,
        bucket_count: int,
        endpoints: tuple[str, ...] = (),
        replicas: int = 1,
    ) -> None:
        self.cluster = cluster
        self.count = nodes
        self.memory_bytes = memory_bytes
        self.bucket_count = bucket_count
        self.replicas = replicas
        self.endpoints = endpoints
        self.nodes: list[NodeProcess] = []
        self._etcd: EtcdCluster | None = None
        self._etcd_reported = False

    @property
    def own_etcd(self) -> EtcdServer | None:
        return self._etcd.members[0] if self._etcd else None

    def start(self) -> None:
        """Start all processes; does not wait for the nodes. Raises AuthorityUnavailable."""
        from p2pkv.etcd_server import EtcdCluster

        if self.endpoints:
            self._view()
        else:
            self._etcd = EtcdCluster(1, dies_with_parent=True)
            self._save(False)
            self.endpoints = self._etcd.start().endpoints
        self._save(False)
        options = {
            "--cluster": self.cluster,
            "--etcd-endpoints": ",".join(self.endpoints),
            "--memory-limit-bytes": str(self.memory_bytes),
            "--bucket-count": str(self.bucket_count),
            "--replication-factor": str(self.replicas),
            "--swim-preset": "local",
        }
        directory = state.directory(self.cluster)
        for number in range(1, self.count + 1):
            node_id = f"n{number}"
            self.nodes.append(NodeProcess(node_id, directory / f"{node_id}.log", options))
            self._save(False)

    def wait_ready(self, on_step: Callable[[str], None], stopped: Callable[[], bool]) -> bool:
        """Until every bucket is where it belongs. False if ``stopped`` first. Raises Failure."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not stopped():
            for sentence in self.deaths():
                raise Failure(sentence)
            view = self._view()
            waiting = self.missing(view)
            if not waiting:
                self._save(True)
                return True
            if time.monotonic() > deadline:
                raise Failure(f"not ready after {READY_TIMEOUT_S:.0f} s: {waiting}", UNREACHABLE)
            on_step(waiting)
            time.sleep(0.1)
        return False

    def _view(self) -> View:
        import asyncio

        from p2pkv.authority import discover

        return asyncio.run(discover(EtcdConfig(endpoints=self.endpoints), self.cluster))

    def missing(self, view: View) -> str:
        """What still has to happen until the ring is complete; empty if nothing."""
        from p2pkv.planner import registered

        absent = [n.node_id for n in self.nodes if n.node_id not in view.nodes]
        if absent:
            return f"waiting for {', '.join(absent)} to register"
        total = view.meta.bucket_count if view.meta else 0
        alive = registered(view)
        settled = sum(
            v.record.primary in alive
            and v.record.assigned[:1] == (v.record.primary.node,)
            and {m.node for m in v.record.in_sync}.issuperset(v.record.assigned)
            for v in view.buckets.values()
        )
        owners = {v.record.primary.node for v in view.buckets.values()}
        idle = [n.node_id for n in self.nodes if n.node_id not in owners]
        if settled < total or total == 0:
            return f"{settled} of {total} buckets are where they belong"
        return (
            f"waiting for {', '.join(idle)} to get buckets" if idle and total >= len(alive) else ""
        )

    def deaths(self) -> Iterator[str]:
        """A sentence for each process that ended since it was last asked."""
        server = self.own_etcd
        if server is not None and not server.running and not self._etcd_reported:
            self._etcd_reported = True
            yield f"etcd has ended; the end of its log:\n{server.log_tail()}"
        for node in self.nodes:
            if not node.running and not node.reported:
                node.reported = True
                yield node.obituary()

    @property
    def failed(self) -> bool:
        """Whether any process ended without being asked to."""
        return self._etcd_reported or any(n.failed for n in self.nodes)

    @property
    def anything_left(self) -> bool:
        return any(n.running for n in self.nodes)

    def stop(self) -> None:
        """End all processes, nodes first, and forget the state."""
        for node in self.nodes:
            if node.running:
                node.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for node in self.nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        if self._etcd is not None:
            self._etcd.stop()
        state.remove(self.cluster)

    def _save(self, ready: bool) -> None:
        processes = [
            state.Process(n.node_id, n.process.pid, start_time(n.process.pid) or 0, str(n.log))
            for n in self.nodes
        ]
        server = self.own_etcd
        if server is not None and server.running:
            processes.append(state.Process("etcd", server.pid, start_time(server.pid) or 0, ""))
        state.write(state.State(self.cluster, os.getpid(), self.endpoints, tuple(processes), ready))


def tail(path: Path) -> str:
    """The end of a log file."""
    try:
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
