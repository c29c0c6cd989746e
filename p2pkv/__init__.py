"""p2pkv: a peer-to-peer store for the KV cache of LLM inference."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from p2pkv._version import __version__
from p2pkv.errors import (
    AuthorityUnavailable,
    BatchError,
    ClosedClient,
    ClusterMismatch,
    ConfigError,
    Conflict,
    CorruptValue,
    DeadlineExceeded,
    DeviceError,
    ForkedClient,
    Indeterminate,
    InvalidArgument,
    Miss,
    NotEnoughReplicas,
    OutOfMemory,
    OutOfRange,
    P2PKVError,
    ProtocolError,
    QuotaExceeded,
    Stalled,
    TensorMismatch,
    TooLarge,
    Unreachable,
)

if TYPE_CHECKING:
    from p2pkv.async_client import AsyncClient
    from p2pkv.client import Client
    from p2pkv.config import ClientConfig, EtcdConfig, Limits, NodeConfig
    from p2pkv.hosted import NodeThread
    from p2pkv.node import Node

__all__ = [
    "AsyncClient",
    "AuthorityUnavailable",
    "BatchError",
    "Client",
    "ClientConfig",
    "ClosedClient",
    "ClusterMismatch",
    "ConfigError",
    "Conflict",
    "CorruptValue",
    "DeadlineExceeded",
    "DeviceError",
    "EtcdConfig",
    "ForkedClient",
    "Indeterminate",
    "InvalidArgument",
    "Limits",
    "Miss",
    "Node",
    "NodeConfig",
    "NodeThread",
    "NotEnoughReplicas",
    "OutOfMemory",
    "OutOfRange",
    "P2PKVError",
    "ProtocolError",
    "QuotaExceeded",
    "Stalled",
    "TensorMismatch",
    "TooLarge",
    "Unreachable",
    "__version__",
]

_HOMES = {
    "AsyncClient": "p2pkv.async_client",
    "Client": "p2pkv.client",
    "ClientConfig": "p2pkv.config",
    "EtcdConfig": "p2pkv.config",
    "Limits": "p2pkv.config",
    "Node": "p2pkv.node",
    "NodeConfig": "p2pkv.config",
    "NodeThread": "p2pkv.hosted",
}
"""Imported when they are first used: the command line and a client need not load the node."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
