"""What ``p2pkv doctor`` looks at."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections.abc import Iterator
from importlib import metadata

import msgspec

from p2pkv.commands import survey
from p2pkv.commands.output import Failure, size
from p2pkv.commands.survey import Buckets, Said
from p2pkv.config import ClientConfig, EtcdConfig
from p2pkv.errors import ConfigError, DeviceError, P2PKVError

ETCD_RECOMMENDED = (3, 6, 14)
ETCD_LOSES_DATA = ((3, 5, 0), (3, 5, 2))
FILES_NEEDED = 8192
LIBRARIES = ("pyzmq", "msgspec", "grpcio", "protobuf", "xxhash", "cffi", "typer", "rich")
SHM = "/dev/shm"


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. ``state``: ok, note (works, could be better) or failed."""

    check: str
    state: str
    found: str
    remedy: str = ""


# -- this machine ---------------------------------------------------------------------------------


def machine(memory_bytes: int) -> Iterator[Check]:
    """What can be told without a cluster."""
    yield _python()
    for library in LIBRARIES:
        yield _library(library)
    yield _uvloop()
    yield _native()
    yield _ucx()
    yield _gpu()
    yield _shared_memory(memory_bytes)
    yield _locked_memory(memory_bytes)
    yield _huge_pages()
    yield _open_files()


def _python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if platform.python_implementation() == "CPython":
        return Check("python", "ok", found)
    return Check("python", "note", found, "CPython is what p2pkv is tested with")


def _library(name: str) -> Check:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "failed", "missing", f"pip install {name}")
    if name == "pyzmq":
        import zmq

        found += f" (libzmq {zmq.zmq_version()})"
    return Check(name, "ok", found)


def _uvloop() -> Check:
    try:
        return Check("uvloop", "ok", metadata.version("uvloop"))
    except metadata.PackageNotFoundError:
        remedy = "pip install uvloop: a node answers faster with it than with asyncio's own loop"
        return Check("uvloop", "note", "missing", remedy)


def _native() -> Check:
    from p2pkv import _native

    if _native.available:
        return Check("native part", "ok", "built")
    remedy = "bulk is slower without it: apt-get install gcc python3-dev, then install p2pkv again"
    return Check("native part", "note", "missing", remedy)


def _ucx() -> Check:
    from p2pkv import ucx_library

    facts = ucx_library.doctor()
    if not facts.usable:
        remedy = "only RDMA needs it; docs/ucx.md says how to get a libucp that has it"
        return Check("ucx", "note", facts.why_not, remedy)
    transports = sorted({transport.partition("/")[0] for transport in facts.transports})
    found = f"libucp {facts.version} ({facts.source}: {facts.library}), {', '.join(transports)}"
    if facts.rdma:
        return Check("ucx", "ok", found, "; ".join(facts.advice))
    return Check("ucx", "note", f"{found}; no RDMA: {facts.rdma_reason}", "; ".join(facts.advice))


def _gpu() -> Check:
    from p2pkv import gpu_arena

    try:
        gpu_arena.trial()
    except ConfigError:
        return Check("gpu", "ok", "no NVIDIA driver here")
    except DeviceError as e:
        remedy = (
            "tensors of GPUs are copied through pinned memory instead of straight from and to the "
            f"memory of nodes on this host: let CUDA pin memory of {SHM} (docs/tensors.md)"
        )
        return Check("gpu", "note", f"shared memory cannot be registered: {e}", remedy)
    return Check("gpu", "ok", "CUDA registers shared memory")


def _shared_memory(memory_bytes: int) -> Check:
    figures = os.statvfs(SHM)
    free = figures.f_bavail * figures.f_frsize
    found = f"{size(free)} free of {size(figures.f_blocks * figures.f_frsize)}"
    if free >= memory_bytes:
        return Check(SHM, "ok", found)
    remedy = (
        f"a node with memory_limit_bytes = {size(memory_bytes)} does not fit: lower it, or "
        f"`mount -o remount,size={memory_bytes * 5 // 4} {SHM}` (containers: --shm-size)"
    )
    return Check(SHM, "failed", found, remedy)


def _locked_memory(memory_bytes: int) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= memory_bytes:
        return Check("locked memory", "ok", _limit(limit))
    remedy = (
        "only registering memory with an RDMA device needs more: `ulimit -l unlimited`, or "
        "LimitMEMLOCK=infinity in the systemd unit"
    )
    return Check("locked memory", "note", _limit(limit), remedy)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else size(number)


def _huge_pages() -> Check:
    from p2pkv.arena import THP_SWITCH, huge_pages_enabled

    if huge_pages_enabled():
        return Check("huge pages", "ok", "available to shared memory")
    remedy = f"to use huge_pages = true: `echo advise > {THP_SWITCH}`"
    return Check("huge pages", "note", "off for shared memory", remedy)


def _open_files() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = str(limit) if limit != resource.RLIM_INFINITY else "unlimited"
    if limit == resource.RLIM_INFINITY or limit >= FILES_NEEDED:
        return Check("open files", "ok", found)
    remedy = (
        f"each session takes a socket: `ulimit -n {FILES_NEEDED}` or LimitNOFILE={FILES_NEEDED} "
        "for the default sessions_max"
    )
    return Check("open files", "note", found, remedy)


# -- the cluster ----------------------------------------------------------------------------------


def cluster(config: ClientConfig) -> Iterator[Check]:
    """etcd and the nodes, as far as they can be reached."""
    if config.etcd is not None:
        for endpoint in config.etcd.endpoints:
            yield asyncio.run(_etcd(config.etcd, endpoint))
    yield from _nodes(config)


async def _etcd(config: EtcdConfig, endpoint: str) -> Check:
    from p2pkv.etcd import EtcdClient

    name = f"etcd {endpoint}"
    try:
        async with EtcdClient(msgspec.structs.replace(config, endpoints=(endpoint,))) as client:
            await client.status()
            started = time.perf_counter()
            version = (await client.status()).version
    except P2PKVError as e:
        return Check(name, "failed", str(e), "start etcd, or correct --etcd-endpoints")
    found = f"version {version}, {(time.perf_counter() - started) * 1e3:.1f} ms"
    remedy = etcd_advice(version)
    return Check(name, "note" if remedy else "ok", found, remedy)


def etcd_advice(version: str) -> str:
    """What to do about an etcd of this version; empty if nothing."""
    try:
        numbers = tuple(int(part) for part in version.split("-")[0].split("."))
    except ValueError:
        return "the version is not known here; 3.6.14 or later is recommended"
    if ETCD_LOSES_DATA[0] <= numbers <= ETCD_LOSES_DATA[1]:
        return "3.5.0 to 3.5.2 can corrupt their data when killed: use 3.6.14 or later"
    if numbers < ETCD_RECOMMENDED:
        return (
            "3.6.14 or later is recommended: before 3.6.9, 3.5.28 and 3.4.42 a paused member can "
            "answer a read from the past (etcd issue 20418)"
        )
    return ""


def _nodes(config: ClientConfig) -> Iterator[Check]:
    try:
        view = survey.read_view(config) if config.etcd is not None else None
    except (Failure, P2PKVError) as e:
        yield Check("nodes", "failed", str(e), "start nodes (`p2pkv node`, or `p2pkv up` to try)")
        return
    places = survey.control_endpoints(view) if view else {e: e for e in config.seeds}
    said = survey.ask_nodes(config, list(places.values()))
    if not places:
        yield Check("nodes", "failed", "none is registered", "start some with `p2pkv node`")
    for who, place in places.items():
        yield _node(str(who), place, said[place])
    if view is not None:
        yield _ring(survey.count_buckets(view))


def _node(who: str, place: str, said: Said) -> Check:
    name = f"node {said.stats.member if said.stats else who}"
    if said.stats is None:
        remedy = "is the process there, and does a firewall let this machine reach the address?"
        return Check(name, "failed", f"{place}: {said.reason}", remedy)
    found = f"{place}, {said.round_trip_us / 1e3:.1f} ms"
    if said.stats.labels.get("serving") != "true":
        return Check(name, "failed", f"{found}, not serving", "it has lost etcd: see its log")
    return Check(name, "ok", found)


def _ring(buckets: Buckets) -> Check:
    found = (
        f"{buckets.total} buckets, {buckets.moving} moving, {buckets.without_owner} without "
        f"owner, {buckets.lost_owner} whose owner is gone"
    )
    if not buckets.without_owner + buckets.lost_owner:
        return Check("ring", "ok", found)
    remedy = (
        "nodes that are gone are replaced by themselves after reset_after_s; `p2pkv forget NODE` "
        "says that one never comes back"
    )
    return Check("ring", "failed", found, remedy)
