"""p2pkv: a peer-to-peer store for the KV cache of LLM inference."""

from p2pkv._version import __version__
from p2pkv.async_client import AsyncClient
from p2pkv.client import Client
from p2pkv.config import ClientConfig, EtcdConfig, Limits, NodeConfig
from p2pkv.errors import (
    AuthorityUnavailable,
    BatchError,
    ClosedClient,
    ClusterMismatch,
    ConfigError,
    Conflict,
    CorruptValue,
    DeadlineExceeded,
    ForkedClient,
    Indeterminate,
    InvalidArgument,
    Miss,
    OutOfMemory,
    P2PKVError,
    ProtocolError,
    QuotaExceeded,
    Stalled,
    TooLarge,
    Unreachable,
)
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
    "EtcdConfig",
    "ForkedClient",
    "Indeterminate",
    "InvalidArgument",
    "Limits",
    "Miss",
    "Node",
    "NodeConfig",
    "OutOfMemory",
    "P2PKVError",
    "ProtocolError",
    "QuotaExceeded",
    "Stalled",
    "TooLarge",
    "Unreachable",
    "__version__",
]
