"""Configuration: frozen structs, units in the names, limits in the types.

A value is taken from, in this order: a keyword or command-line flag, the environment
(``P2PKV_<FIELD>``), a TOML file, the default. A wrong one raises ConfigError, which names the
field, the value and what is allowed.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta as Limit

from p2pkv.errors import ConfigError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

Name = Annotated[str, Limit(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Positive = Annotated[float, Limit(gt=0, lt=1e6)]
"""Seconds; under 12 days, so that a deadline is always a number of nanoseconds."""
Duration = Annotated[float, Limit(ge=0, lt=1e6)]
Few = Annotated[int, Limit(ge=0, le=64)]
Bytes = Annotated[int, Limit(ge=0)]
Policy = Annotated[str, Limit(pattern="^(always|remote|demand|never)$")]
Port = Annotated[int, Limit(ge=0, le=65535)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the protocol, enforced by both sides before anything is allocated."""

    key_bytes_max: Annotated[int, Limit(ge=1, le=1024)] = 1024
    value_bytes_max: Annotated[int, Limit(ge=1)] = 1 * GiB
    batch_keys_max: Annotated[int, Limit(ge=1, le=65536)] = 16384
    """Keys in one message; a larger batch of the caller's goes out as several."""
    head_bytes_max: Annotated[int, Limit(ge=4 * KiB)] = 32 * MiB
    """The MessagePack part of a message: at least ``(key_bytes_max + 16)`` for each key of
    batch_keys_max and scan_keys_max."""
    message_bytes_max: Annotated[int, Limit(ge=1 * MiB)] = 64 * MiB
    """Value bytes in one message; a larger value goes in pieces (alloc, write, commit)."""
    inflight_max: Annotated[int, Limit(ge=1, le=4096)] = 64
    """Requests that one session may have under way (its credit)."""
    scan_keys_max: Annotated[int, Limit(ge=1, le=65536)] = 4096

    def __post_init__(self) -> None:
        keys = max(self.batch_keys_max, self.scan_keys_max)
        needed = keys * (self.key_bytes_max + 16)
        if self.head_bytes_max < needed:
            raise _error(
                "limits.head_bytes_max",
                self.head_bytes_max,
                f"{needed} or more, for {keys} keys of {self.key_bytes_max} bytes",
            )


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach the authority."""

    endpoints: tuple[str, ...] = ("http://127.0.0.1:2379",)
    """Members of the etcd cluster; if one does not answer, the next is asked."""
    ca_file: str = ""
    """PEM file of the authority that signed the servers' certificates."""
    cert_file: str = ""
    """PEM file of our own certificate, if etcd asks for one; with ``key_file``."""
    key_file: str = ""
    user: str = ""
    """With ``password``, if etcd has authentication switched on."""
    password: str = ""
    attempt_timeout_s: Positive = 1.0
    """One try at one endpoint; then the next endpoint is asked."""
    total_timeout_s: Positive = 8.0
    """After this long, over all tries, an operation gives up."""
    session_ttl_s: Annotated[int, Limit(ge=2, le=3600)] = 5
    """A node that is silent for so long is taken off the list of nodes."""


class SwimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes find out who is alive (SWIM with Lifeguard). 0: as ``preset`` says.

    N is the number of members. ``resolved`` has the values of the preset in place of the zeros.
    """

    preset: Annotated[str, Limit(pattern="^(local|lan|wan)$")] = "lan"
    """For nodes on one host, in one data centre, or far apart."""
    probe_interval_s: Duration = 0
    """Between two probes of one member each. local 0.1, lan 1, wan 5."""
    probe_timeout_s: Duration = 0
    """For a direct answer; then others are asked to probe, up to the end of the interval.
    local 0.05, lan 0.5, wan 3."""
    indirect_probes: Few = 0
    """Members that are asked to probe one that did not answer. 3."""
    gossip_interval_s: Duration = 0
    """Between two rounds of passing rumors on, while there are any. local 0.02, lan 0.2,
    wan 0.5."""
    gossip_nodes: Few = 0
    """Members that a round goes to. local and lan 3, wan 4."""
    push_pull_interval_s: Duration = 0
    """Between two exchanges of all states with one member; times ``1 + ceil(log2(N / 32))`` beyond
    32 members. local 5, lan 30, wan 60."""
    retransmit_mult: Few = 0
    """A rumor is passed on ``retransmit_mult * ceil(log10(N + 1))`` times. 4."""
    suspicion_mult: Few = 0
    """A suspect has ``suspicion_mult * max(1, log10(N)) * probe_interval_s`` to refute, once two
    others suspect it too. local 2, lan 4, wan 6."""
    suspicion_max_mult: Few = 0
    """And so many times as long as nobody else does. 6."""
    awareness_max: Few = 0
    """A node that has reason to doubt itself waits up to this many times longer, plus one. 8."""
    dead_keep_s: Duration = 0
    """How long a member that died or left is remembered. local 5, lan 30, wan 60."""

    def __post_init__(self) -> None:
        real = {name: getattr(self, name) or value for name, value in self._preset().items()}
        if real["probe_timeout_s"] >= real["probe_interval_s"]:
            limit = f"less than probe_interval_s = {real['probe_interval_s']}"
            raise _error("swim.probe_timeout_s", real["probe_timeout_s"], limit)

    def resolved(self) -> SwimConfig:
        """With a value in each field."""
        real = {name: getattr(self, name) or value for name, value in self._preset().items()}
        return SwimConfig(preset=self.preset, **real)

    def _preset(self) -> dict[str, Any]:
        return {name: value[_PRESETS.index(self.preset)] for name, value in _SWIM.items()}


_PRESETS = ("local", "lan", "wan")
_SWIM: dict[str, tuple[Any, Any, Any]] = {
    "probe_interval_s": (0.1, 1.0, 5.0),
    "probe_timeout_s": (0.05, 0.5, 3.0),
    "indirect_probes": (3, 3, 3),
    "gossip_interval_s": (0.02, 0.2, 0.5),
    "gossip_nodes": (3, 3, 4),
    "push_pull_interval_s": (5.0, 30.0, 60.0),
    "retransmit_mult": (4, 4, 4),
    "suspicion_mult": (2, 4, 6),
    "suspicion_max_mult": (6, 6, 6),
    "awareness_max": (8, 8, 8),
    "dead_keep_s": (5.0, 30.0, 60.0),
}


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node. Sizes in bytes, times in seconds."""

    cluster: Name = "default"
    """Clusters of different names share one etcd and know nothing of each other."""
    node_id: Name = msgspec.field(default_factory=lambda: socket.gethostname()[:64])
    """Must be kept across restarts, and be different for each node."""
    etcd: EtcdConfig = EtcdConfig()
    limits: Limits = Limits()
    swim: SwimConfig = SwimConfig()

    # -- network
    bind: str = "127.0.0.1"
    """Address to listen on (IPv4 or IPv6). Anything but loopback needs ``insecure``."""
    control_port: Port = 0
    """0: any free port; the real one is published."""
    advertise: str = ""
    """Address that others connect to, if it is not ``bind`` (required with a wildcard bind)."""
    insecure: bool = False
    """Listen beyond loopback although no keys are configured."""

    # -- placement
    weight: Annotated[float, Limit(ge=0, le=1000)] = 1.0
    """Share of the buckets, relative to the other nodes; 0: none."""
    host: str = msgspec.field(default_factory=socket.gethostname)
    """The machine; copies of a bucket go to different ones."""
    zone: str = ""
    """The rack, room or zone; copies of a bucket go to different ones."""

    # -- fixed at the cluster's creation
    bucket_count: Annotated[int, Limit(ge=1, le=65536)] = 1024
    """A power of two. A node with another count than the cluster's is refused."""

    replication_factor: Annotated[int, Limit(ge=1, le=8)] = 1
    """Copies of each bucket, on different hosts where there are enough. In force is what the
    cluster was created with."""
    min_in_sync: Annotated[int, Limit(ge=1, le=8)] = 1
    """With fewer copies in sync, writes are refused. In force is what the cluster was created
    with. 1: writes go on as long as any copy lives."""

    # -- memory
    memory_limit_bytes: Annotated[int, Limit(ge=1 * MiB)] = 1 * GiB
    """Shared memory for values."""
    metadata_limit_bytes: Bytes = 0
    """Bound for keys and index. 0: 1/8 of memory_limit_bytes, at least 16 MiB."""
    hard_pin_quota: Annotated[float, Limit(ge=0, le=1)] = 0.25
    """Share of memory_limit_bytes that hard-pinned objects may take."""
    huge_pages: bool = False
    """Ask the kernel for huge pages. It gives them to shared memory once ``advise`` is written to
    /sys/kernel/mm/transparent_hugepage/shmem_enabled; else a warning says so, and the pages are
    small."""
    prefault: bool = False
    """Take all memory at the start instead of at first use."""
    ucx: Annotated[str, Limit(pattern="^(auto|on|off)$")] = "auto"
    """Whether other hosts may reach the memory by UCX, which pins all of it. ``auto``: where there
    is an RDMA device that UCX can use. ``on``: by any transport, so also by TCP, which is for tests
    only: a client that dies may end the node. The node does not start without."""
    ucx_quarantine_s: Positive = 30.0
    """Memory that a client on another host may still write to is used for nothing else for so
    long after the client has let go of it or is dead."""

    published_index: bool = True
    """Let clients on this host find and read values in shared memory without asking the node."""
    index_limit_bytes: Bytes = 0
    """Shared memory for that index, 200 bytes an object. 0: 1/64 of memory_limit_bytes, at least
    1 MiB, at most 1 GiB. Objects that find no room in it are asked for."""

    read_threads: Annotated[int, Limit(ge=0, le=64)] = 1
    """Threads that answer clients on other hosts from the published index. 0: the node's event loop
    answers everything."""

    # -- sessions
    session_ttl_s: Positive = 30.0
    """A session that sends nothing for so long ends: its allocations, tokens and pins go."""
    alloc_deadline_s: Positive = 30.0
    """An allocation that is neither written nor committed for so long is taken back."""
    read_deadline_s: Positive = 30.0
    """A transfer token that is not used for so long is taken back."""
    sessions_max: Annotated[int, Limit(ge=1)] = 4096
    """Clients, and threads of clients, at the same time."""

    view_quota_bytes: Bytes = 0
    """What one client process may hold as views of this node's memory (``zero_copy``), which cannot
    be used for anything else meanwhile. 0: 1/4 of memory_limit_bytes."""

    # -- checksums
    checksums: Policy = "demand"
    """Which values are compared with their checksums as they arrive, by a put or with a bucket that
    moves. ``always``: all. ``remote``: not those that a client wrote through shared memory.
    ``demand``, ``never``: none. With ``never``, ``p2pkv scrub`` gives no checksums to objects that
    have none."""

    # -- moving buckets
    moves_max: Annotated[int, Limit(ge=1, le=64)] = 2
    """Buckets that one node hands over at the same time."""
    move_bytes_per_s: Annotated[int, Limit(ge=1)] = 512 * MiB
    """At most so much goes out to nodes that take over buckets."""
    drain_timeout_s: Positive = 120.0
    """How long SIGTERM waits for the buckets to be handed over."""

    # -- copies
    beacon_s: Positive = 0.125
    """Between two beacons of a primary to those who hold its copies."""
    lease_s: Positive = 0.5
    """How long a copy's grant lets a primary answer reads, and a little less than what its
    successor waits; at least 3 * beacon_s."""
    slow_s: Positive = 2.0
    """A copy that acknowledges nothing for so long is taken out of the set that must."""
    rebuild_delay_s: Positive = 10.0
    """So long after a node was lost its copies are made anew elsewhere, if it is not back."""
    compare_every_s: Annotated[float, Limit(ge=0, lt=1e6)] = 1.0
    """Each time one of this node's buckets is compared with its copies, and mended where they
    differ; up to three more that are in doubt. 0: none ever."""

    # -- trouble with etcd (design, section 6.4)
    fence_after_s: Positive = 10.0
    """Without etcd for so long, a node serves only while it is sure not to be replaced."""
    peer_contact_s: Positive = 5.0
    """How recent a heartbeat, and a peer's contact to etcd, must be to count."""
    reset_after_s: Positive = 20.0
    """Must exceed fence_after_s: the owner fences itself before anybody starts its buckets anew."""
    heartbeat_s: Positive = 0.5
    """Between two heartbeats to every other node, while this node needs their word on etcd."""
    etcd_loss: Annotated[str, Limit(pattern="^(serve|fence)$")] = "serve"
    """``fence``: without etcd for fence_after_s, always stop serving."""

    def __post_init__(self) -> None:
        if self.bucket_count & (self.bucket_count - 1):
            raise _error("bucket_count", self.bucket_count, "a power of two")
        if self.reset_after_s <= self.fence_after_s:
            raise _error("reset_after_s", self.reset_after_s, f"more than {self.fence_after_s} s")
        if self.lease_s < 3 * self.beacon_s:
            raise _error("lease_s", self.lease_s, f"at least 3 * beacon_s = {3 * self.beacon_s} s")
        if self.min_in_sync > self.replication_factor:
            allowed = f"at most replication_factor = {self.replication_factor}"
            raise _error("min_in_sync", self.min_in_sync, allowed)
        address = _address("bind", self.bind)
        if self.advertise and _address("advertise", self.advertise).is_unspecified:
            raise _error("advertise", self.advertise, "an address that others can connect to")
        if not self.advertise and address.is_unspecified:
            raise _error("advertise", "", f"an address, since bind is {self.bind}")
        if not address.is_loopback and not self.insecure:
            raise _error("bind", self.bind, "a loopback address, unless insecure is set")

    @property
    def advertised(self) -> str:
        return self.advertise or self.bind

    @property
    def metadata_bytes(self) -> int:
        return self.metadata_limit_bytes or max(16 * MiB, self.memory_limit_bytes // 8)

    @property
    def index_bytes(self) -> int:
        if not self.published_index:
            return 0
        return self.index_limit_bytes or min(max(1 * MiB, self.memory_limit_bytes // 64), 1 * GiB)


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client. Give ``etcd`` or ``seeds``."""

    cluster: Name = "default"
    etcd: EtcdConfig | None = None
    """Where the nodes are found."""
    seeds: tuple[str, ...] = ()
    """Control endpoints of some nodes, e.g. ``tcp://10.0.0.7:4711``."""
    timeout_s: Positive = 5.0
    """Deadline of a call that does not give its own."""
    limits: Limits = Limits()
    path: Annotated[str, Limit(pattern="^(auto|tcp|zmq|ucx)$")] = "auto"
    """How bytes travel. ``auto``: through shared memory on the node's host, else by UCX where both
    sides have RDMA, else over a data connection, else over ZeroMQ. ``tcp``: neither shared memory
    nor UCX. ``zmq``: no data connection either. ``ucx``: by UCX on whatever transport it finds;
    without RDMA for tests only: a node that dies may end the client."""
    ucx_reads: Annotated[str, Limit(pattern="^(auto|read|write)$")] = "auto"
    """Who moves the bytes of a get by UCX. ``read``: the client, by one-sided reads. ``write``: the
    node, into the client's memory. ``auto``: the client, where its hardware can."""
    read: Annotated[str, Limit(pattern="^(any|primary)$")] = "any"
    """Who may answer a get when a bucket's primary does not: ``any`` of its copies, with what was
    put ``write_once``, whose content cannot differ; or nobody but the ``primary``."""
    checksums: Policy = "demand"
    """``always``: puts give checksums, reads of whole values compare them. ``remote``: those
    through shared memory compare nothing. ``demand``, ``never``: neither; the nodes make and
    compare checksums when they are asked to (``p2pkv scrub``)."""
    connections_max: Annotated[int, Limit(ge=1, le=1024)] = 64
    """Threads that may use one Client at the same time; more wait for their turn."""

    def __post_init__(self) -> None:
        if (self.etcd is None) == (not self.seeds):
            raise _error("seeds", self.seeds, "either seeds or etcd_endpoints, not both or none")


def _error(field: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{field} = {value!r}: must be {allowed}")


def _address(field: str, value: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(value)
    except ValueError:
        raise _error(field, value, "an IPv4 or IPv6 address") from None


S = TypeVar("S", bound=msgspec.Struct)


def load(
    kind: type[S],
    flags: Mapping[str, Any],
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> S:
    """Compose a configuration from a TOML file, the environment and flags (strongest last).

    ``flags`` has dotted names (``etcd.endpoints``); None means "not given". The environment has
    ``P2PKV_`` names with ``__`` for the dot (``P2PKV_ETCD__ENDPOINTS=http://a:1,http://b:1``).
    Raises ConfigError.
    """
    tree: dict[str, Any] = _read_toml(file) if file else {}
    for name, value in (environ if environ is not None else os.environ).items():
        if name.startswith("P2PKV_"):
            path = name.removeprefix("P2PKV_").lower().split("__")
            leaf = _leaf_type(kind, path)
            if leaf is not None and _struct(leaf) is None:
                _put(tree, path, value)
    for name, value in flags.items():
        if value is not None:
            _put(tree, name.split("."), value)
    return build(kind, tree)


def build(kind: type[S], tree: Mapping[str, Any]) -> S:
    """Validate a tree of plain values (or of configurations). Raises ConfigError."""
    try:
        tree = msgspec.to_builtins(tree)
        _read_texts(kind, tree)
        return msgspec.convert(tree, kind, strict=False)
    except TypeError as e:
        raise ConfigError(f"not a configuration: {e}") from None
    except msgspec.ValidationError as e:
        cause = e.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(_explain(str(e), tree)) from None


def replace(config: S, **changes: Any) -> S:
    """A copy with other values, validated."""
    tree = msgspec.to_builtins(config)
    for name, value in changes.items():
        _put(tree, name.split("."), msgspec.to_builtins(value))
    return build(type(config), tree)


def _read_toml(file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"configuration file {str(file)!r}: {e}") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"configuration file {str(file)!r} is not TOML: {e}") from None


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{name} = {child!r}: must be a table")
        tree = child
    tree[path[-1]] = value


def _leaf_type(kind: Any, path: list[str]) -> Any:
    for name in path:
        kind = _struct(kind)
        hints = get_type_hints(kind, include_extras=True) if kind else {}
        if name not in hints:
            return None
        kind = hints[name]
    return kind


def _struct(kind: Any) -> Any:
    options = get_args(kind) if get_origin(kind) is not None else (kind,)
    return next((k for k in options if isinstance(k, type) and issubclass(k, msgspec.Struct)), None)


_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) *(?:([kmgt])(?:i?b)?|b?)", re.IGNORECASE)


def parse_size(text: str, field: str = "size") -> int:
    """Bytes from ``4096``, ``64MiB``, ``1.5g``; units are powers of 1,024. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _error(field, text, "a number of bytes, such as 4096, 64MiB or 1g")
    power = " kmgt".index((match[2] or " ").lower())
    return int(float(match[1]) * 1024**power) if "." in match[1] else int(match[1]) << 10 * power


def _read_texts(kind: Any, tree: Any) -> None:
    """Texts from the environment, a flag or a file: ``a,b`` for a tuple, ``64MiB`` for bytes."""
    if not isinstance(tree, dict):
        return
    for name, value in tree.items():
        hint = _leaf_type(kind, [name])
        if isinstance(value, str) and get_origin(hint) is tuple:
            tree[name] = [part for part in value.split(",") if part]
        elif isinstance(value, str) and "bytes" in name and hint is not None:
            tree[name] = parse_size(value, name)
        elif isinstance(value, dict):
            _read_texts(hint, value)


def _explain(message: str, tree: Mapping[str, Any]) -> str:
    text, _, place = message.partition(" - at `$.")
    path = place.rstrip("`").split("[")[0]
    value: Any = tree
    for name in path.split(".") if path else []:
        value = value.get(name) if isinstance(value, Mapping) else value
    return f"{path} = {value!r}: {text[0].lower()}{text[1:]}" if path else text


def local(**changes: Any) -> NodeConfig:
    """A node for trying things out on one machine."""
    return _preset("local", {"memory_limit_bytes": 256 * MiB, **_nest(changes)})


def lan(**changes: Any) -> NodeConfig:
    """A node of a cluster in one data centre."""
    return _preset("lan", _nest(changes))


def wan(**changes: Any) -> NodeConfig:
    """A node of a cluster whose nodes are far apart, or slow to reach."""
    return _preset("wan", _nest(changes))


def _preset(preset: str, tree: dict[str, Any]) -> NodeConfig:
    return build(NodeConfig, {**tree, "swim": {"preset": preset, **tree.get("swim", {})}})


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        _put(tree, name.split("."), msgspec.to_builtins(value))
    return tree


__all__ = [
    "ClientConfig",
    "EtcdConfig",
    "Limits",
    "NodeConfig",
    "SwimConfig",
    "build",
    "lan",
    "load",
    "local",
    "parse_size",
    "replace",
    "wan",
]
