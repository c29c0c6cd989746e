"""Memory that a program gives to the cluster: a node in its own process."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from p2pkv.authority import discover
from p2pkv.config import ClientConfig, GiB, NodeConfig, load
from p2pkv.errors import ConfigError
from p2pkv.hosted import NodeThread
from p2pkv.hostlock import NodeIdInUse

log = logging.getLogger("p2pkv.adapters.mooncake")

SLOTS_MAX = 64
"""Programs of one host that give memory at the same time."""
MEMORY_MIN = 16 << 20
DRAIN_TIMEOUT_S = 10.0


class Contribution:
    """A node that lives as long as the program gives its memory."""

    def __init__(self, node: NodeThread, config: NodeConfig) -> None:
        self._node = node
        self.config = config

    @property
    def endpoint(self) -> str:
        return self._node.node.endpoint

    def end(self, timeout_s: float | None = None) -> bool:
        """Hand over what it holds, if others are there to take it, and leave; whether all of it
        was handed over."""
        try:
            return self._node.drain(timeout_s)
        finally:
            self._node.stop()


def contribute(size: int, client: ClientConfig) -> Contribution:
    """Start a node of ``size`` bytes. Raises ConfigError, AuthorityUnavailable, ClusterMismatch.

    Its name is the host's (or ``P2PKV_NODE_ID``) with the lowest number that no living program of
    the host has: a program that is started again takes the name of the one that it was, and the
    buckets of that start again at once. Its weight is its size in GiB, so that it gets its share of
    the buckets. Every field of NodeConfig can be set by the environment (``P2PKV_BIND``,
    ``P2PKV_ADVERTISE``, ...).
    """
    if client.etcd is None:
        raise ConfigError("global_segment_size: a node needs etcd; with seeds alone it must be 0")
    size = max(size, MEMORY_MIN)
    count = _bucket_count(client)
    flags = {"cluster": client.cluster, "etcd": client.etcd, "memory_limit_bytes": size}
    if count is not None:
        flags["bucket_count"] = count
    defaults = load(NodeConfig, flags)
    if defaults.weight == 1.0:
        flags["weight"] = min(1000.0, size / GiB)
    if defaults.drain_timeout_s == NodeConfig().drain_timeout_s:
        flags["drain_timeout_s"] = DRAIN_TIMEOUT_S
    for slot in range(SLOTS_MAX):
        config = load(NodeConfig, {**flags, "node_id": f"{defaults.node_id[:48]}-engine-{slot}"})
        node = NodeThread(config)
        try:
            node.start()
        except NodeIdInUse:
            continue
        log.info("node %s gives %d bytes to cluster %s", config.node_id, size, config.cluster)
        return Contribution(node, config)
    raise ConfigError(f"global_segment_size: {SLOTS_MAX} programs of this host give memory already")


def _bucket_count(client: ClientConfig) -> int | None:
    """That of the cluster, if it exists: a node with another is refused."""
    assert client.etcd is not None
    with ThreadPoolExecutor(1) as pool:  # the caller may be on an event loop
        view = pool.submit(asyncio.run, discover(client.etcd, client.cluster)).result()
    return view.meta.bucket_count if view.meta is not None else None
