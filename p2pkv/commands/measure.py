"""What ``p2pkv doctor`` measures: each way to each node of a running cluster."""

from __future__ import annotations

import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from p2pkv import ring, ucx_library
from p2pkv.blocking_driver import SocketDriver
from p2pkv.client import Client
from p2pkv.commands.checks import Check
from p2pkv.commands.output import size
from p2pkv.config import ClientConfig, replace
from p2pkv.errors import P2PKVError
from p2pkv.paths import Ability, choose
from p2pkv.types import Member
from p2pkv.wire import NodeStats

VALUES = 16
VALUE_BYTES = 1 << 20
ROUNDS = 5
ROUND_TRIPS = 100
TTL_S = 60.0
"""What is put for measuring goes by itself if this is interrupted."""
WARM_UPS = 5
"""Calls until the path is there: the first begins the session."""
WAYS = ("auto", "tcp", "ucx")


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One path to one node. Rates in bytes a second of values, best of ROUNDS."""

    node: str
    path: str
    """shm, ucx, tcp or zmq."""
    chosen: bool
    """Whether ``path = "auto"`` takes it."""
    why: str = ""
    """Why it is chosen."""
    round_trip_us: float = 0.0
    """Median of a call that moves no value."""
    get_bytes_per_s: float = 0.0
    put_bytes_per_s: float = 0.0
    error: str = ""


def ways(config: ClientConfig) -> list[Way]:
    """Measure all nodes that own buckets. Raises P2PKVError if no node answers."""
    with Client.from_config(replace(config, path="auto")) as kv:
        stats = {s.member: s for s in kv.stats().values()}
        keys = {m: k for m, k in _keys_of_each(kv).items() if m in stats}
    found: list[Way] = []
    for wanted in WAYS:
        for way in _all_nodes(config, wanted, stats, keys):
            if not any((w.node, w.path) == (way.node, way.path) for w in found):
                found.append(way)
    return sorted(found, key=lambda way: (way.node, not way.chosen, way.path))


def _all_nodes(
    config: ClientConfig,
    wanted: str,
    stats: Mapping[Member, NodeStats],
    keys: Mapping[Member, Sequence[str]],
) -> Iterator[Way]:
    with Client.from_config(replace(config, path=wanted)) as kv:
        for member, theirs in keys.items():
            if wanted == "ucx" and not _has_ucx(stats[member]):
                continue
            try:
                yield _measured(kv, wanted, stats[member], theirs)
            except P2PKVError as e:
                yield Way(node=str(member), path=wanted, chosen=wanted == "auto", error=str(e))


def _has_ucx(said: NodeStats) -> bool:
    """Whether it can be used between there and here."""
    there = Ability[said.labels.get("ucx", "none").upper()]
    return Ability.NONE not in (there, ucx_library.ability("ucx"))


def _keys_of_each(kv: Client) -> dict[Member, list[str]]:
    """VALUES new keys for every node that owns a bucket."""
    table = kv._ops.router.table
    assert table is not None
    keys: dict[Member, list[str]] = {}
    prefix = f"p2pkv-doctor/{secrets.token_hex(8)}"
    owners = {table.members[i] for i in set(table.owners) if i >= 0}
    for i in range(VALUES * 64 * max(1, len(owners))):
        key = f"{prefix}/{i}"
        owner = table.owner(ring.bucket_of(key.encode(), table.bucket_count))
        if owner is not None and len(keys.setdefault(owner, [])) < VALUES:
            keys[owner].append(key)
        if len(keys) == len(owners) and all(len(k) == VALUES for k in keys.values()):
            break
    return {member: found for member, found in keys.items() if found}


def _measured(kv: Client, wanted: str, said: NodeStats, keys: Sequence[str]) -> Way:
    room = int(said.figures["memory_limit_bytes"]) // 8 // len(keys)
    value = secrets.token_bytes(min(VALUE_BYTES, room))
    values = dict.fromkeys(keys, value)
    buffers = [bytearray(len(value)) for _ in keys]
    try:
        for _ in range(WARM_UPS):
            kv.batch_put(values, ttl=TTL_S)
        total = len(keys) * len(value)
        put = total / _best(lambda: kv.batch_put(values, ttl=TTL_S))
        get = total / _best(lambda: kv.batch_get_into(keys, buffers))
        trip = _median(lambda: kv.exists(keys[0]))
        path = _path_of(kv, said.member)
    finally:
        kv.batch_delete(keys)
    return Way(
        node=str(said.member),
        path=path,
        chosen=wanted == "auto",
        why=_why(path, said) if wanted == "auto" else "",
        round_trip_us=trip * 1e6,
        get_bytes_per_s=get,
        put_bytes_per_s=put,
    )


def _path_of(kv: Client, member: Member) -> str:
    driver = kv._driver
    assert isinstance(driver, SocketDriver)
    return driver.path_to(member)


def _why(path: str, said: NodeStats) -> str:
    there = Ability[said.labels.get("ucx", "none").upper()]
    choice = choose("auto", path == "shm", ucx_library.ability("auto"), there)
    return choice.why if choice.path == path else f"{choice.path} was chosen and did not work"


def _best(call: Callable[[], Any]) -> float:
    return min(_timed(call) for _ in range(ROUNDS))


def _median(call: Callable[[], Any]) -> float:
    return statistics.median(_timed(call) for _ in range(ROUND_TRIPS))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- as checks ------------------------------------------------------------------------------------


def check_of(way: Way, host: str) -> Check:
    """A way as a line of the doctor's table; ``host`` is the node's."""
    name = f"path {way.node} {way.path}"
    if way.error:
        return Check(name, "failed" if way.chosen else "note", way.error, _remedy(way, host))
    found = (
        f"get {_rate(way.get_bytes_per_s)}, put {_rate(way.put_bytes_per_s)}, "
        f"{way.round_trip_us:.0f} us"
    )
    if not way.chosen:
        return Check(name, "ok", found)
    remedy = _remedy(way, host)
    return Check(name, "note" if remedy else "ok", f"{found}; chosen: {way.why}", remedy)


def _rate(bytes_per_s: float) -> str:
    return f"{size(int(bytes_per_s))}/s"


def _remedy(way: Way, host: str) -> str:
    """What would make a better path of the one that is chosen."""
    if not way.chosen or way.path in ("shm", "ucx"):
        return ""
    if way.path == "zmq":
        return "no data connection: does a firewall let this machine reach the node's data port?"
    if host == socket.gethostname():
        return (
            "the node is on this host, but its memory cannot be mapped: run both as the same user, "
            "and in containers with one /dev/shm (--ipc=host, or a shared volume)"
        )
    advice = "; ".join(ucx_library.doctor().advice)
    return f"for RDMA both hosts need an adapter and UCX with verbs (docs/ucx.md): {advice}"


__all__ = ["Way", "check_of", "ways"]
