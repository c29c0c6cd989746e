"""From EtcdConfig to gRPC channels, one for each endpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio

from p2pkv.config import EtcdConfig
from p2pkv.errors import ConfigError

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Limit for one answer of etcd's."""

_CHANNEL_OPTIONS = [
    # Servers refuse pings more often than every 5 s by default.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Else pings end after two on a silent stream, and a dead peer of a watch is never noticed.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Its probes are pings, too, and would make the server end the connection.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
]

Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]


class Rpc(Generic[Answer]):
    """A method of etcd: its path and the type of its answer."""

    def __init__(self, path: str, answer: Callable[[], Answer]) -> None:
        self.path = f"/etcdserverpb.{path}"
        self.answer: Any = answer

    def bind(self, connect: Callable[..., Any]) -> Any:
        return connect(
            self.path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.answer.FromString,
        )


class Channels:
    """How to reach each endpoint. Raises ConfigError for a configuration that makes no sense."""

    def __init__(self, config: EtcdConfig) -> None:
        self.targets = _targets(config)
        self._credentials = _credentials(config)

    def open(self) -> list[Any]:
        """A channel for each target, in the running event loop. Nothing is sent yet."""
        return [self._open(target) for target in self.targets]

    def _open(self, target: str) -> Any:
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, self._credentials, options=_CHANNEL_OPTIONS)


def _targets(config: EtcdConfig) -> list[str]:
    if not config.endpoints:
        raise ConfigError("etcd.endpoints = (): must have at least one URL")
    return [_target(url, config) for url in config.endpoints]


def _target(url: str, config: EtcdConfig) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        valid = None
    if not valid or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(
            f"etcd.endpoints = {url!r}: must be http://host:port or https://host:port"
        )
    if (parts.scheme == "https") != _tls(config):
        raise ConfigError(
            f"etcd.endpoints = {url!r}: must be https:// for all endpoints or for none, "
            "and https:// if ca_file is set"
        )
    return parts.netloc


def _tls(config: EtcdConfig) -> bool:
    return bool(config.ca_file) or config.endpoints[0].startswith("https://")


def _credentials(config: EtcdConfig) -> Any:
    if bool(config.cert_file) != bool(config.key_file):
        raise ConfigError("etcd.cert_file and etcd.key_file: must be given together")
    if config.password and not config.user:
        raise ConfigError("etcd.user = '': must be given with etcd.password")
    if not _tls(config):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read("ca_file", config.ca_file),
        private_key=_read("key_file", config.key_file),
        certificate_chain=_read("cert_file", config.cert_file),
    )


def _read(field: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"etcd.{field} = {path!r}: must be a readable file ({e})") from None
