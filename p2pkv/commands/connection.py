"""Where a client command finds its cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from p2pkv.config import ClientConfig, load

DEFAULT_ENDPOINT = "http://127.0.0.1:2379"


def client_config(given: Mapping[str, Any]) -> ClientConfig:
    """From a command's options, the environment, a file, or a cluster that runs here.

    Options for etcd put aside seeds from the environment, and the other way round. A given
    timeout is one for etcd as well.
    Raises ConfigError.
    """
    flags = {
        "etcd.endpoints": given["etcd_endpoints"],
        "seeds": given["seeds"],
        "cluster": given["cluster"],
        "timeout_s": given["timeout"],
        "path": given["path"],
    }
    environ = dict(os.environ)
    if flags["seeds"] is not None:
        environ = {k: v for k, v in environ.items() if not k.startswith("P2PKV_ETCD__")}
    elif flags["etcd.endpoints"] is not None:
        environ.pop("P2PKV_SEEDS", None)
    if not _names_cluster(flags, environ) and given["config"] is None:
        cluster = flags["cluster"] or environ.get("P2PKV_CLUSTER") or "default"
        flags["etcd.endpoints"] = ",".join(local_endpoints(cluster) or [DEFAULT_ENDPOINT])
    if flags["timeout_s"] is not None and flags["seeds"] is None:
        flags["etcd.total_timeout_s"] = flags["timeout_s"]
    return load(ClientConfig, flags, given["config"], environ)


def _names_cluster(flags: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    named = flags["seeds"] or flags["etcd.endpoints"]
    return bool(named or environ.get("P2PKV_SEEDS") or environ.get("P2PKV_ETCD__ENDPOINTS"))


def local_endpoints(cluster: str) -> list[str]:
    """The etcd of the cluster that ``p2pkv up`` runs on this machine; empty if it runs none."""
    from p2pkv.commands.state import running

    state = running(cluster)
    return list(state.endpoints) if state else []
