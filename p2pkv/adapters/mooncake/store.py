"""``MooncakeDistributedStore``: its life, and the memory that it gives to the cluster."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from p2pkv.adapters.cache import Cache, CacheConfig
from p2pkv.adapters.mooncake import options as opts
from p2pkv.adapters.mooncake.codes import ErrorCode, code_of
from p2pkv.adapters.mooncake.contribution import Contribution, contribute
from p2pkv.adapters.mooncake.memory import MooncakeHostMemAllocator
from p2pkv.adapters.mooncake.replicas import ReplicaCalls
from p2pkv.client import Client
from p2pkv.config import ClientConfig, load
from p2pkv.errors import ConfigError, InvalidArgument, P2PKVError
from p2pkv.memory import RegisteredMemory

log = logging.getLogger("p2pkv.adapters.mooncake")

SETUP_TIMEOUT_S = 20.0
"""To find the cluster, and to get a share of it."""


class MooncakeDistributedStore(ReplicaCalls):
    """Mooncake's store, over a p2pkv cluster. Any thread may use it.

    Signatures and codes are those of ``mooncake.store`` 0.3.13; docs/mooncake.md says where it
    behaves otherwise. After ``setup`` no call takes longer than its deadline (``CacheConfig``,
    whose fields the environment can set as ``P2PKV_LOOKUP_TIMEOUT_S`` and so on), and nodes that do
    not answer are misses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._life = threading.Lock()
        self._used = False
        """``setup`` was called, with whatever result, and ``close`` was not."""
        self._hostname = ""
        self._node: ClientConfig | None = None
        self._nodes: dict[str, Contribution] = {}
        self._pool = MooncakeHostMemAllocator()
        self._pool_left = 0

    # -- life

    def setup(self, *args: Any, **more: Any) -> int:
        """Connect to the cluster: 0, or a negative code, whose cause is logged.

        Takes ``local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol,
        rdma_devices, master_server_addr, engine=None, enable_ssd_offload=False,
        ssd_offload_path='', tenant_id='default', enable_client_http_server=False,
        client_http_port=9300``, or a dictionary with these names; sizes may be texts (``16MB``).
        With ``global_segment_size`` over 0 a node with so much memory runs in this process until
        ``close``. A second ``setup`` needs a ``close`` before it, also if the first one failed.
        Raises TypeError for arguments that ``setup`` does not have.
        """
        fields = opts.given(args, more)
        return self._begin("setup", lambda: self._set_up(opts.read(fields)))

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connect without giving memory; ``alloc_from_mem_pool`` has ``mem_pool_size`` bytes."""

        def begin() -> None:
            fields = {
                "local_hostname": "localhost",
                "metadata_server": server_address or "none",
                "local_buffer_size": local_buffer_size,
            }
            self._set_up(opts.read(fields))
            self._pool_left = int(mem_pool_size)

        return self._begin("setup_dummy", begin)

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int) -> int:
        """``setup`` with what the environment says."""
        host = os.environ.get("LOCAL_HOSTNAME", "localhost")
        return self.setup(host, "none", mount_segment_size, 0, protocol, device_name, "")

    def _begin(self, what: str, begin: Any) -> int:
        with self._life:
            if self._used:
                return self._refuse(what, InvalidArgument("is set up already: close() it first"))
            self._used = True
            try:
                begin()
            except P2PKVError as e:
                self._end()
                log.error("%s failed: %s", what, e)
                return code_of(e)
        return 0

    def _set_up(self, options: opts.Options) -> None:
        """Raises P2PKVError."""
        config = opts.find(options)
        self._node = config
        if options.segment_bytes:
            self._add_node(options.segment_bytes)
        self._limits = config.limits
        self._prefix = f"mc/{options.tenant}/".encode()
        cache = Cache(Client.from_config(config), load(CacheConfig, {}), owned=True)
        self._cache = cache
        cache.connect(SETUP_TIMEOUT_S)
        if options.segment_bytes:
            self._await_share(cache.client)
        self._hostname = self._name_of_host(options.local_hostname)
        log.info("set up: cluster %s, tenant %s, %s", config.cluster, options.tenant,
                 config.etcd.endpoints if config.etcd else config.seeds)  # fmt: skip

    def _await_share(self, client: Client) -> None:
        """A cluster that has just got its first node has no bucket yet."""
        try:
            client.exists(self._prefix, timeout=SETUP_TIMEOUT_S)
        except P2PKVError as e:
            log.warning("set up, but not all of the cluster serves yet: %s", e)

    def _name_of_host(self, given: str) -> str:
        """The host's name with a port: that of its node, if it has one and none is given."""
        if ":" in given or not self._nodes:
            return given
        return f"{given}:{next(iter(self._nodes.values())).endpoint.rpartition(':')[2]}"

    def close(self) -> int:
        """Hand over what the cluster has of this process, and disconnect: 0.

        Memory is not registered any more afterwards. It may be called again, and ``setup`` after
        it.
        """
        with self._life:
            self._end()
            self._used = False
        return 0

    def _end(self) -> None:
        for name in list(self._nodes):
            self._remove_node(name, None)
        cache, self._cache = self._cache, None
        if cache is not None:
            try:
                cache.close()
            except P2PKVError as e:
                log.warning("close: %s", e)
        self._end_sessions()
        self._memory = RegisteredMemory()
        self._hostname = ""

    def get_hostname(self) -> str:
        """``local_hostname`` as given to ``setup``, with a port; empty before."""
        return self._hostname

    def get_offload_rpc_read_count(self) -> int:
        """0: nothing is offloaded."""
        return 0

    # -- memory for the cluster

    def _add_node(self, size: int) -> str:
        """Raises P2PKVError."""
        assert self._node is not None
        contribution = contribute(size, self._node)
        name = contribution.config.node_id
        self._nodes[name] = contribution
        return name

    def _remove_node(self, name: str, timeout_s: float | None) -> None:
        contribution = self._nodes.pop(name)
        try:
            if not contribution.end(timeout_s):
                log.warning("node %s left without handing over all that it held", name)
        except P2PKVError as e:
            log.warning("node %s did not leave in order: %s", name, e)

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Give ``size`` bytes more: ``ret``, ``segment_ids``, ``allocated_size``."""
        try:
            with self._life:
                self._ready()
                name = self._add_node(opts.read_size(size, "size"))
                allocated = self._nodes[name].config.memory_limit_bytes
        except P2PKVError as e:
            code = self._refuse("allocate_and_mount_segment", e)
            return {"ret": code, "segment_ids": [], "allocated_size": 0}
        return {"ret": 0, "segment_ids": [name], "allocated_size": allocated}

    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Take memory back that was given; what lies there is handed over first.

        ``grace_period_seconds``: at most so long; 0: the node's ``drain_timeout_s``.
        """
        with self._life:
            unknown = [name for name in segment_ids if name not in self._nodes]
            if unknown:
                error = InvalidArgument(f"segment_ids: {unknown} are not of this store")
                return self._refuse("unmount_and_free_segment", error)
            for name in segment_ids:
                self._remove_node(name, float(grace_period_seconds) or None)
        return 0

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """As ``unmount_and_free_segment``."""
        return self.unmount_and_free_segment(segment_ids, grace_period_seconds)

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Refused with -600: a node makes its memory itself (``allocate_and_mount_segment``)."""
        error = ConfigError(f"path = {path!r}: memory of others cannot be given to the cluster")
        return {"ret": self._refuse("mount_segment", error), "segment_ids": []}

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """0: there is none."""
        return 0

    # -- memory for the caller

    def alloc_from_mem_pool(self, size: int) -> int:
        """The address of ``size`` bytes, registered; 0 if ``setup_dummy`` gave less."""
        with self._life:
            if not 0 < size <= self._pool_left:
                return 0
            address = self._pool.alloc(size)
            if address and self.register_buffer(address, size) == int(ErrorCode.OK):
                self._pool_left -= size
                return address
        return 0


def bind_to_numa_node(node: int) -> None:
    """Does nothing: the kernel and ``numactl`` decide where memory is."""


__all__ = ["MooncakeDistributedStore", "bind_to_numa_node"]
