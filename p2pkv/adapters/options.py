"""What the options of all adapters have in common: where the cluster is, and how patient to be."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from p2pkv.adapters.cache import Cache, CacheConfig
from p2pkv.client import Client
from p2pkv.commands.connection import client_config
from p2pkv.config import ClientConfig, Duration, load
from p2pkv.errors import P2PKVError


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds, sizes in bytes."""

    cluster: str | None = None
    etcd_endpoints: str | None = None
    """Comma-separated. Without it and ``seeds``: the environment, else the cluster that ``p2pkv
    up`` runs on this machine, else etcd at its usual place."""
    seeds: str | None = None
    """Control endpoints of some nodes, comma-separated."""
    path: str | None = None
    """How bytes travel (see ClientConfig)."""
    connect_timeout_s: Duration = 5.0
    """So long the engine's start waits for the cluster; without it, it starts all the same."""
    cache: dict[str, Any] = {}
    """Fields of CacheConfig, on top of those from the environment."""

    def client_config(self) -> ClientConfig:
        """Raises ConfigError."""
        return client_config(
            {
                "cluster": self.cluster,
                "etcd_endpoints": self.etcd_endpoints,
                "seeds": self.seeds,
                "path": self.path,
                "timeout": None,
                "config": None,
            }
        )

    def cache_config(self) -> CacheConfig:
        """Raises ConfigError."""
        return load(CacheConfig, self.cache)

    def open(self, log: logging.Logger) -> Cache:
        """A cache, and a warning if the cluster does not answer. Raises ConfigError."""
        where, config = self.client_config(), self.cache_config()
        cache = Cache(Client.from_config(where), config, owned=True)
        place = ", ".join(where.etcd.endpoints if where.etcd else where.seeds)
        try:
            cache.connect(self.connect_timeout_s)
        except P2PKVError as e:
            log.warning("cluster %r at %s: %s; all is a miss until it is", where.cluster, place, e)
        else:
            log.info("cluster %r at %s", where.cluster, place)
        return cache


__all__ = ["ClusterOptions"]
