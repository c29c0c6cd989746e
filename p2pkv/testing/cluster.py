"""A real cluster for tests: etcd, and nodes as processes that can be killed, paused and started.

    with Cluster(nodes=3, memory_limit_bytes=64 << 20) as cluster, cluster.client() as kv:
        kv.put("a", b"1")
        cluster["n0"].kill()
        cluster["n0"].start()
        cluster.wait_settled()

All waits are for conditions, with a deadline, and end at once when a process that they need has
died. What the nodes print is kept and is part of each TimeoutError.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Self

import msgspec

from p2pkv import ring
from p2pkv.arena import SHM_DIRECTORY, remove_stale
from p2pkv.async_client import AsyncClient
from p2pkv.authority import discover
from p2pkv.client import Client
from p2pkv.config import ClientConfig, EtcdConfig, NodeConfig, build, replace
from p2pkv.errors import P2PKVError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.records import View
from p2pkv.types import Member, NodeId

TIMEOUT_S = 60.0
POLL_S = 0.02
LOG_TAIL_BYTES = 4000
FAST: dict[str, Any] = {
    "bucket_count": 64,
    "memory_limit_bytes": 64 << 20,
    "heartbeat_s": 0.2,
    "peer_contact_s": 1.0,
    "fence_after_s": 2.0,
    "reset_after_s": 4.0,
    "swim": {"preset": "local"},
}
"""Defaults of a test's nodes: small, and quick to notice trouble."""

clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()
"""Those that were made and not thrown away yet, for whoever reports a failure."""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """What ``condition`` returns once that is true. Raises TimeoutError, with what was awaited."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s} s: {what}")
        time.sleep(POLL_S)
    return result


class NodeProcess:
    """A node and its process. Made by Cluster. ``prefix`` stands before its command, which it has
    to become (by exec): signals go to the process that it starts."""

    def __init__(self, config: NodeConfig, log: Path, prefix: Sequence[str] = ()) -> None:
        self.config = config
        self.name = config.node_id
        self.paused = False
        self._log = log
        self._prefix = list(prefix)
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []
        self._log_begins = 0

    def start(self, **changes: Any) -> None:
        """Start the process, with other values in its configuration. Does not wait for it."""
        if self.running:
            raise RuntimeError(f"{self.name} is running")
        self.config = replace(self.config, **changes) if changes else self.config
        file = self._log.with_suffix(".toml")
        file.write_text(_toml(self.config))
        command = [sys.executable, "-m", "p2pkv.cli", "node", "--json", f"--config={file}"]
        with self._log.open("ab") as log:
            self._log_begins = log.tell()
            self._process = subprocess.Popen(
                [*self._prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("P2PKV_")},
                start_new_session=True,
            )
        self._pids.append(self._process.pid)
        self.paused = False
        weakref.finalize(self, _reap, self._process)

    @property
    def running(self) -> bool:
        """Whether the process lives (also while it is paused)."""
        return self._process is not None and self._process.poll() is None

    @property
    def serves(self) -> bool:
        """Whether it lives and has said that it serves.

        Until then it may pass over SIGINT: a shell starts its background jobs, and what they
        start, with that ignored, and a node asks for it only after its imports.
        """
        if not self.running:
            return False
        with self._log.open("rb") as log:
            log.seek(self._log_begins)
            return b'{"event":"ready"' in log.read()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def arenas(self) -> list[Path]:
        """What this node's processes have, or have left, in shared memory."""
        begins = tuple(f"p2pkv-{self.name}-{pid}-" for pid in self._pids)
        return [p for p in Path(SHM_DIRECTORY).iterdir() if p.name.startswith(begins)]

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.send(Signals.SIGKILL)
        self.wait()

    def terminate(self, timeout_s: float = TIMEOUT_S) -> int:
        """SIGTERM: the node drains and ends. Waits for it; returns the exit code."""
        self.send(Signals.SIGTERM)
        return self.wait(timeout_s)

    @property
    def drained(self) -> bool:
        """Whether the last process that ended in order had handed all its buckets over."""
        lines = [line for line in self.log().splitlines() if line.startswith("{")]
        return bool(lines) and json.loads(lines[-1]).get("drained") is True

    def pause(self) -> None:
        """SIGSTOP: the process keeps its connections and does nothing. Returns when it stands."""
        pid = self.pid
        self.send(Signals.SIGSTOP)
        self.paused = True
        wait_for(lambda: _stands_still(pid), f"{self.name} stops")

    def resume(self) -> None:
        """SIGCONT."""
        self.send(Signals.SIGCONT)
        self.paused = False

    def send(self, number: Signals) -> None:
        """Send a signal, and wait for nothing."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code, once the process has ended. Raises TimeoutError."""
        assert self._process is not None, f"{self.name} was never started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self.name} has not ended in {timeout_s} s\n{self.log()}"
            ) from None

    def end(self) -> None:
        """Whatever its state: have no process afterwards."""
        if self.running:
            self.resume()
            self.kill()

    def log(self, bytes_max: int = LOG_TAIL_BYTES) -> str:
        """The end of what the node printed."""
        text = self._log.read_bytes()[-bytes_max:] if self._log.exists() else b""
        return f"--- {self.name}\n{text.decode(errors='replace')}"


class Cluster:
    """Nodes ``n0``, ``n1``, … as processes, on an etcd of their own or on a shared one.

    ``config`` are fields of NodeConfig that differ from FAST. A context manager: it starts the
    nodes and waits until the buckets are spread over them. At its end every node is stopped, and
    AssertionError is raised if one that ended in order has left its arena.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        etcd: EtcdCluster | None = None,
        name: str = "",
        host: str = "127.0.0.1",
        **config: Any,
    ) -> None:
        self.name = name or f"test-{secrets.token_hex(4)}"
        self._own_etcd = etcd is None
        self.etcd = etcd or EtcdCluster(1, host=host)
        self._count = nodes
        self._config = {**FAST, "bind": host, **config}
        self._nodes: dict[str, NodeProcess] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="p2pkv-logs-"))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        clusters.add(self)

    # -- life

    def start(self) -> Self:
        """Start everything and wait until the buckets are spread over the nodes."""
        try:
            if self._own_etcd:
                self.etcd.start()
            for _ in range(self._count):
                self.add_node(wait=False)
            if self._count:
                self.wait_settled()
        except BaseException:
            self.stop(check=False)
            raise
        return self

    def stop(self, check: bool = True) -> None:
        """Stop everything: serving nodes by SIGINT, without draining, the others by SIGKILL."""
        ended = [n for n in self if n.serves and not n.paused]
        try:
            for node in ended:
                node.send(Signals.SIGINT)
            for node in ended:
                node.wait()
            left = [path for node in ended for path in node.arenas]
            assert not (check and left), f"left in shared memory after a clean end: {left}"
        finally:
            for node in self:
                node.end()
            remove_stale()
            if self._own_etcd:
                self.etcd.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.stop(check=error is None)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        await asyncio.to_thread(self.stop, error is None)

    # -- nodes

    def __getitem__(self, name: str) -> NodeProcess:
        return self._nodes[name]

    def __iter__(self) -> Iterator[NodeProcess]:
        return iter(list(self._nodes.values()))

    def node_config(self, name: str, **changes: Any) -> NodeConfig:
        """The configuration that a node of this cluster has, e.g. for one in this process."""
        # Some tests kill nodes often: each attempt at a stale connection must end soon.
        etcd = {"endpoints": self.etcd.endpoints, "session_ttl_s": 2}
        fields = {"cluster": self.name, "node_id": name, "etcd": etcd, **self._config, **changes}
        return build(NodeConfig, fields)

    def add_node(
        self, name: str = "", *, wait: bool = True, prefix: Sequence[str] = (), **changes: Any
    ) -> NodeProcess:
        """Start one more node; by default wait until it has its share of the buckets.

        ``prefix`` stands before its command, e.g. to run it in another network namespace.
        """
        name = name or f"n{len(self._nodes)}"
        log = self._directory / f"{name}-{len(self._nodes)}.log"
        node = NodeProcess(self.node_config(name, **changes), log, prefix)
        self._nodes[name if name not in self._nodes else f"{name}-{len(self._nodes)}"] = node
        node.start()
        if wait:
            self.wait_settled()
        return node

    # -- clients

    def etcd_config(self) -> EtcdConfig:
        return self.etcd.config()

    def client_config(self, **changes: Any) -> ClientConfig:
        fields = {"cluster": self.name, "etcd": {"endpoints": self.etcd.endpoints}, **changes}
        return build(ClientConfig, fields)

    def client(self, **changes: Any) -> Client:
        """A new client; ``changes`` are its arguments."""
        return Client(self.etcd.endpoints, cluster=self.name, **changes)

    def async_client(self, **changes: Any) -> AsyncClient:
        """A new asyncio client."""
        return AsyncClient(self.etcd.endpoints, cluster=self.name, **changes)

    # -- what etcd says

    def view(self) -> View:
        """All records. Raises AuthorityUnavailable. Not for use on an event loop."""
        return asyncio.run(discover(self.etcd_config(), self.name))

    def endpoint(self, name: str) -> str:
        """Where a registered node listens."""
        return self.view().nodes[NodeId(name)].control[0]

    def owned(self, name: str) -> int:
        """How many buckets a node of this name owns, whichever its boot."""
        return sum(v.record.primary.node == name for v in self.view().buckets.values())

    def key_of(self, name: str, index: int = 0, prefix: str = "of") -> str:
        """A key in a bucket of this node; another for each ``index``."""
        view = self.view()
        assert view.meta is not None
        owned = {b for b, v in view.buckets.items() if v.record.primary.node == name}
        if not owned:
            raise LookupError(f"{name} owns no bucket")
        keys = (f"{prefix}-{name}-{i}" for i in range(1 << 30))
        mine = (k for k in keys if ring.bucket_of(k.encode(), view.meta.bucket_count) in owned)
        for _ in range(index):
            next(mine)
        return next(mine)

    # -- waiting

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """What ``condition`` returns once that is true. Raises TimeoutError, with all logs.

        An error of p2pkv in it counts as "not yet".
        """
        last: list[P2PKVError] = []

        def tolerant() -> Any:
            try:
                return condition()
            except P2PKVError as e:
                last[:] = [e]
                return None

        try:
            return wait_for(tolerant, what, timeout_s)
        except TimeoutError as e:
            raise TimeoutError(f"{e} (last error: {last})\n{self.logs()}") from None

    def wait_settled(
        self, names: Iterable[str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> View:
        """Until every bucket has an owner, all of ``names`` have their share, and nothing moves.

        ``names`` are those that are to own buckets; default: all running nodes. Nodes of this
        process count where they are named. Raises TimeoutError; AssertionError if one has died.
        """
        chosen = [n.name for n in self if n.running] if names is None else list(names)
        found: list[View] = []
        why: list[str] = [""]

        def settled() -> bool:
            for node in self:
                if node.name in chosen and not node.running:
                    raise AssertionError(f"{node.name} has died\n{node.log()}")
            view = self.view()
            why[0] = unsettled(view, chosen)
            found[:] = [view]
            return not why[0]

        try:
            self.wait(settled, "the buckets are not settled", timeout_s)
        except TimeoutError as e:
            raise TimeoutError(f"{why[0]}: {e}") from None
        return found[0]

    def logs(self) -> str:
        """The end of what each node printed."""
        return "\n".join(node.log() for node in self)


def unsettled(view: View, names: Iterable[str]) -> str:
    """Why the buckets do not lie as they should with these nodes; empty if they do."""
    if view.meta is None:
        return "the cluster does not exist"
    wanted = set(names)
    if len(view.buckets) != view.meta.bucket_count:
        return f"{len(view.buckets)} of {view.meta.bucket_count} buckets have an owner"
    there = {Member(n, r.boot) for n, r in view.nodes.items()}
    missing = wanted - {m.node for m in there}
    if missing:
        return f"{sorted(missing)} are not registered"
    records = [v.record for v in view.buckets.values()]
    moving = sum(r.primary not in there or r.assigned[0] != r.primary.node for r in records)
    counts = Counter(r.primary.node for r in records)
    share = view.meta.bucket_count / max(1, len(wanted))
    short = any(counts[NodeId(n)] < int(0.8 * share) for n in wanted)
    if moving or short or counts.keys() - wanted:
        return f"{moving} buckets are to move; owners: {dict(counts)}; wanted: {sorted(wanted)}"
    return ""


def _stands_still(pid: int) -> bool:
    """Whether all threads of the process are stopped, which they are not at once."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Leave no child behind when its owner forgot it."""
    if process.poll() is None:
        process.kill()
        process.wait()


def _toml(config: NodeConfig) -> str:
    """A configuration file. (JSON's strings, numbers, booleans and lists are TOML's, too.)"""
    fields = msgspec.to_builtins(config)
    tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
    lines = _toml_lines({k: v for k, v in fields.items() if k not in tables})
    for name, table in tables.items():
        lines += [f"[{name}]", *_toml_lines(table)]
    return "\n".join(lines)


def _toml_lines(fields: dict[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
