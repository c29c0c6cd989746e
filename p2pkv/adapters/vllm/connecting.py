"""Connecting an engine to its cluster."""

from __future__ import annotations

import logging

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.vllm.options import Options
from p2pkv.adapters.vllm.plans import LOG
from p2pkv.client import Client
from p2pkv.errors import P2PKVError

log = logging.getLogger(LOG)

CONNECT_TIMEOUT_S = 5.0


def connected(options: Options) -> Cache:
    """The cluster as a cache; one that does not answer is no error.

    Raises ConfigError.
    """
    config = options.client_config()
    cache = Cache(Client.from_config(config), options.cache_config(), owned=True)
    where = config.etcd.endpoints if config.etcd else config.seeds
    try:
        cache.connect(CONNECT_TIMEOUT_S)
        log.info("connected to cluster %s, found by %s", config.cluster, where)
    except P2PKVError as e:
        log.warning("cluster %s, looked for by %s: %s. Going on without", config.cluster, where, e)
    return cache
