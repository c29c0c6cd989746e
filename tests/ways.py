"""A node, and clients that reach it on every way there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from p2pkv import AsyncClient, Client, EtcdConfig, NodeConfig, NodeThread
from p2pkv.config import ClientConfig, Limits
from p2pkv.etcd_server import EtcdCluster

KIB, MIB = 1 << 10, 1 << 20
LIMITS = Limits(message_bytes_max=1 * MIB, value_bytes_max=8 * MIB)
"""Small, so that values of a few MiB go in pieces."""

WAYS = ["hosted", "auto", "tcp", "zmq", "asyncio"]


class Blocking:
    """An AsyncClient whose calls are waited for on a loop of its own."""

    def __init__(self, config: ClientConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient.from_config(config)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            return self._loop.run_until_complete(result) if asyncio.iscoroutine(result) else result

        return call

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@contextmanager
def a_node(limits: Limits = LIMITS, memory_bytes: int = 256 * MIB) -> Iterator[NodeThread]:
    with EtcdCluster(1) as etcd:
        config = NodeConfig(
            cluster="ways",
            node_id="n",
            bucket_count=16,
            memory_limit_bytes=memory_bytes,
            limits=limits,
            etcd=EtcdConfig(endpoints=etcd.endpoints),
        )
        with NodeThread(config) as node:
            yield node


@contextmanager
def a_client(node: NodeThread, way: str) -> Iterator[Any]:
    config = ClientConfig(
        cluster="ways",
        seeds=(node.node.endpoint,),
        timeout_s=20.0,
        limits=node.node.config.limits,
        path="auto" if way in ("hosted", "asyncio") else way,
    )
    client: Any
    if way == "hosted":
        client = node.client(timeout=20.0)
    else:
        client = Blocking(config) if way == "asyncio" else Client.from_config(config)
    client.put("warm", b"up")  # the data connection exists once the first call has an answer
    yield client
    client.close()
