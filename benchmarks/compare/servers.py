"""The stores that are there: their servers are started, and how to drive them is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from p2pkv import Client, ucx_library
from p2pkv.config import ClientConfig, build
from p2pkv.errors import ConfigError, P2PKVError
from p2pkv.etcd_server import EtcdCluster

from .processes import Servers, Spec, StoreFailed, free_port
from .work import MIB

PATHS = ("auto", "tcp", "zmq", "ucx")


class Wanted(NamedTuple):
    """Which stores, by name, and with how much memory each."""

    names: Sequence[str]
    memory_bytes: int
    mooncake_python: str


def start_all(
    wanted: Wanted, servers: Servers, etcd: EtcdCluster, say: Callable[[str], None]
) -> list[Spec]:
    """Start what is wanted and there. ``say`` is told what is left out, and why."""
    found: list[Spec] = [Spec("socket", "limits:Socket", limit=True)]
    found.append(Spec("memcpy", "limits:Memcpy", limit=True))
    for start in (p2pkv_nodes, redis, memcached, mooncake):
        try:
            found.extend(start(servers, etcd, wanted))
        except StoreFailed as e:
            say(f"left out: {e}")
    order = {name: i for i, name in enumerate(NAMES)}
    return sorted((s for s in found if s.name in wanted.names), key=lambda s: order[s.name])


def p2pkv_nodes(servers: Servers, etcd: EtcdCluster, wanted: Wanted) -> Iterator[Spec]:
    """One node for all paths but UCX, which has another that registers its memory."""
    paths = [path for path in PATHS if f"p2pkv-{path}" in wanted.names]
    pids: dict[str, int] = {}
    if set(paths) - {"ucx"}:
        pids["bench"] = _node(servers, etcd, wanted.memory_bytes, "bench")
    for path in paths:
        if path == "ucx":
            require_ucx()
            pids["bench-ucx"] = _node(
                servers, etcd, wanted.memory_bytes, "bench-ucx", "--ucx", "on"
            )
        kind = "P2PKVOnHost" if path == "auto" else "P2PKV"
        cluster = "bench-ucx" if path == "ucx" else "bench"
        yield Spec(
            f"p2pkv-{path}", f"p2pkv_store:{kind}", endpoints=list(etcd.endpoints), path=path,
            cluster=cluster, pids=[pids[cluster]],
        )  # fmt: skip


def require_ucx() -> None:
    """Raises StoreFailed if clients do not know this path, or no libucp can be loaded."""
    try:
        build(ClientConfig, {"seeds": ["tcp://127.0.0.1:1"], "path": "ucx"})
    except ConfigError as e:
        raise StoreFailed(f"p2pkv-ucx: {e}") from None
    facts = ucx_library.doctor()
    if not facts.usable:
        raise StoreFailed(f"p2pkv-ucx: {facts.why_not}")


def _node(servers: Servers, etcd: EtcdCluster, memory_bytes: int, cluster: str, *more: str) -> int:
    command = [sys.executable, "-m", "p2pkv.cli", "node", "--prefault"]
    command += ["--node-id", cluster, "--cluster", cluster]
    command += ["--etcd-endpoints", ",".join(etcd.endpoints)]
    servers.start([*command, "--memory-limit-bytes", str(memory_bytes), *more])

    def ready() -> bool:
        try:
            with Client(etcd.endpoints, cluster=cluster, timeout=1.0) as kv:
                return kv.put("up", b"1") == 1
        except P2PKVError:
            return False

    servers.wait(ready, f"node {cluster}")
    return servers.pid


def redis(servers: Servers, etcd: EtcdCluster, wanted: Wanted) -> Iterator[Spec]:
    """Nothing is written to disk, and freed memory is kept: large values are stored without a page
    fault each. Over TCP and over a socket file."""
    program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
    names = [name for name in ("redis", "redis-unix") if name in wanted.names]
    if not (names and program and find_spec("redis")):
        return
    path = str(servers.directory / "redis.sock")
    port = servers.start_on_port(
        lambda port: [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                      "--appendonly", "no", "--unixsocket", path],
        MALLOC_CONF="dirty_decay_ms:-1,muzzy_decay_ms:-1",
    )  # fmt: skip
    where: dict[str, dict[str, Any]] = {"redis": {"port": port}, "redis-unix": {"path": path}}
    for name in names:
        yield Spec(name, "redis_store:Redis", pids=[servers.pid], **where[name])


def memcached(servers: Servers, etcd: EtcdCluster, wanted: Wanted) -> Iterator[Spec]:
    program = os.environ.get("MEMCACHED") or shutil.which("memcached")
    libraries = {"pylibmc": "Pylibmc", "pymemcache": "Pymemcache"}
    names = [n for n in libraries if f"memcached-{n}" in wanted.names and find_spec(n)]
    if not (names and program):
        return
    user = "root" if os.getuid() == 0 else str(os.getuid())
    port = servers.start_on_port(
        lambda port: [program, "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-u", user,
                      "-m", str(wanted.memory_bytes // MIB), "-I", "16m", "-c", "1024"],
    )  # fmt: skip
    for name in names:
        yield Spec(f"memcached-{name}", f"memcached_store:{libraries[name]}", port=port,
                   pids=[servers.pid])  # fmt: skip


def mooncake(servers: Servers, etcd: EtcdCluster, wanted: Wanted) -> Iterator[Spec]:
    """A master and a storage process, from the environment that ``python`` belongs to.

    ``MOONCAKE_LIBRARY_PATH``: where its libraries lie (libibverbs, …), if not in the system.
    """
    python = wanted.mooncake_python
    if not python or not {"mooncake-tcp", "mooncake-shm"} & set(wanted.names):
        return
    tools = Path(python).parent
    check_import = [python, "-c", "import mooncake.store"]
    libraries = os.environ.get("MOONCAKE_LIBRARY_PATH", "")
    environment = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    tried = subprocess.run(
        check_import, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if tried.returncode:
        raise StoreFailed(f"mooncake: {(tried.stderr.strip() or '?').splitlines()[-1]}")
    master = servers.start_on_port(
        lambda port: [str(tools / "mooncake_master"), "--rpc_address=127.0.0.1",
                      f"--rpc_port={port}", "--metrics_host=127.0.0.1",
                      f"--metrics_port={free_port()}"],
        **environment,
    )  # fmt: skip
    pids = [servers.pid]
    storage = servers.start_on_port(
        lambda port: [str(tools / "mooncake_client"), "--host=127.0.0.1", f"--port={port}",
                      f"--global_segment_size={wanted.memory_bytes // MIB} MB",
                      f"--master_server_address=127.0.0.1:{master}",
                      "--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--threads=1"],
        **environment,
    )  # fmt: skip
    pids.append(servers.pid)
    small: dict[str, Any] = {"staging_bytes": 64 * MIB}
    if "mooncake-tcp" in wanted.names:
        yield Spec(
            "mooncake-tcp", "mooncake_store:Mooncake", master=master,
            python=python, environment=environment, pids=pids, crowd=small,
        )  # fmt: skip
    if "mooncake-shm" in wanted.names:
        yield Spec(
            "mooncake-shm", "mooncake_store:MooncakeOnHost", port=storage,
            pool_bytes=wanted.memory_bytes // 2, python=python, environment=environment,
            pids=pids, crowd={**small, "pool_bytes": 64 * MIB},
        )  # fmt: skip


NAMES = (
    *(f"p2pkv-{path}" for path in PATHS), "mooncake-shm", "mooncake-tcp", "redis-unix", "redis",
    "memcached-pylibmc", "memcached-pymemcache", "socket", "memcpy",
)  # fmt: skip
