"""What ``setup`` is given, both ways, and where the cluster is found."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from p2pkv.commands.connection import client_config
from p2pkv.config import ClientConfig, parse_size
from p2pkv.errors import ConfigError

log = logging.getLogger("p2pkv.adapters.mooncake")

FIELDS = (
    "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol",
    "rdma_devices", "master_server_addr", "engine", "enable_ssd_offload", "ssd_offload_path",
    "tenant_id", "enable_client_http_server", "client_http_port",
)  # fmt: skip
"""In the order in which they may be given; the first seven must be."""
REQUIRED = 7
DICT_ONLY = ("ipc_socket_path",)
WITHOUT_EFFECT = (
    "protocol", "rdma_devices", "engine", "enable_ssd_offload", "ssd_offload_path",
    "enable_client_http_server", "client_http_port", "local_buffer_size", *DICT_ONLY,
)  # fmt: skip
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Options(NamedTuple):
    """What p2pkv takes of it."""

    local_hostname: str
    segment_bytes: int
    """Memory that this process gives to the cluster; 0: none."""
    tenant: str
    addresses: tuple[str, ...]
    """Where the cluster may be: ``master_server_addr`` and ``metadata_server``."""


def given(args: tuple[Any, ...], more: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, from a dictionary, or from arguments by place and name.

    Raises TypeError, as every call does, for arguments that are not there, missing or given twice.
    """
    if (len(args) == 1 and isinstance(args[0], Mapping)) or (not args and set(more) == {"config"}):
        return dict(args[0] if args else more["config"])
    fields = dict(zip(FIELDS, args, strict=False))
    if len(args) > len(FIELDS) or fields.keys() & more.keys() or more.keys() - set(FIELDS):
        raise TypeError(f"setup(): takes a dictionary, or {', '.join(FIELDS)}")
    fields.update(more)
    missing = [name for name in FIELDS[:REQUIRED] if name not in fields]
    if missing:
        raise TypeError(f"setup(): {', '.join(missing)} missing")
    return fields


def read(fields: Mapping[str, Any]) -> Options:
    """Raises ConfigError, which names field, value and what is allowed."""
    for name in ("local_hostname", "metadata_server"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise ConfigError(f"{name} = {fields.get(name)!r}: must be given")
    _size_of_field(fields, "local_buffer_size")
    tenant = fields.get("tenant_id") or "default"
    if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
        raise ConfigError(f"tenant_id = {tenant!r}: must be 1 to 64 of a-z A-Z 0-9 . _ -")
    unknown = sorted(fields.keys() - {*FIELDS, *DICT_ONLY})
    without = sorted(n for n in WITHOUT_EFFECT if fields.get(n))
    log.info("setup: no effect here: %s; unknown: %s", without or "none", unknown or "none")
    addresses = (fields.get("master_server_addr") or "", fields["metadata_server"])
    return Options(
        fields["local_hostname"], _size_of_field(fields, "global_segment_size"), tenant, addresses
    )


def _size_of_field(fields: Mapping[str, Any], name: str) -> int:
    return read_size(fields.get(name, 0), name)


def read_size(value: Any, name: str) -> int:
    """Bytes, from a number or a text such as ``16MB``. Raises ConfigError."""
    if isinstance(value, str):
        return parse_size(value, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 62:
        raise ConfigError(f"{name} = {value!r}: must be a number of bytes, or such as 16MB")
    return int(value)


def find(options: Options) -> ClientConfig:
    """Where the cluster is.

    By the environment (``P2PKV_ETCD__ENDPOINTS``, ``P2PKV_SEEDS``); else by an address that names
    etcd (``etcd://host:2379;host:2379``) or nodes (``tcp://host:4711``); else the cluster that
    ``p2pkv up`` runs here; else etcd at its usual place. Raises ConfigError.
    """
    where: dict[str, Any] = dict.fromkeys(("cluster", "timeout", "path", "config"))
    where |= {"etcd_endpoints": None, "seeds": None}
    if not (os.environ.get("P2PKV_ETCD__ENDPOINTS") or os.environ.get("P2PKV_SEEDS")):
        where |= next(filter(None, map(_place, options.addresses)), {})
    return client_config(where)


def _place(address: str) -> dict[str, str]:
    """What an address says of the cluster, if it says anything."""
    scheme, _, rest = address.partition("://")
    hosts = [part for part in re.split("[;,]", rest) if part]
    if scheme == "etcd" and hosts:
        return {"etcd_endpoints": ",".join(f"http://{host}" for host in hosts)}
    if scheme == "tcp" and hosts:
        return {"seeds": ",".join(f"tcp://{host.removeprefix('tcp://')}" for host in hosts)}
    return {}
