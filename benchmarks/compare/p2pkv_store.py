"""p2pkv by one of its paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pkv import Client, ClientConfig, EtcdConfig

from .work import Store, Work, check


class P2PKV(Store):
    def __init__(self, endpoints: list[str], path: str, cluster: str) -> None:
        etcd = EtcdConfig(endpoints=tuple(endpoints))
        config = ClientConfig(etcd=etcd, path=path, timeout_s=60.0, cluster=cluster)
        self.kv = Client.from_config(config)

    def load(self, work: Work) -> None:
        super().load(work)
        self.keys, self.values = work.keys, work.values

    def clear(self) -> None:
        self.kv.batch_delete(self.keys)

    def put(self, i: int) -> None:
        self.kv.put(self.keys[i], self.values[i])

    def get(self, i: int) -> Any:
        return self.kv.get(self.keys[i])

    def get_into(self, i: int) -> None:
        check(self.kv.get_into(self.keys[i], self.w.buffers[0]) == self.w.size, "get_into")

    def batch_put(self, low: int, high: int) -> None:
        self.kv.batch_put(zip(self.keys[low:high], self.values[low:high], strict=True))

    def batch_get(self, low: int, high: int) -> Sequence[Any]:
        return self.kv.batch_get(self.keys[low:high])

    def batch_get_into(self, low: int, high: int) -> None:
        sizes = self.kv.batch_get_into(self.keys[low:high], self.w.buffers[: high - low])
        check(None not in sizes, "batch_get_into")

    def exists(self, keys: list[str]) -> Sequence[bool]:
        return self.kv.batch_exists(keys)

    def match(self, keys: list[str]) -> int:
        return self.kv.match_prefix(keys)

    def close(self) -> None:
        self.kv.close()


class P2PKVOnHost(P2PKV):
    """A client that has the node's memory mapped, hence views."""

    def views(self, low: int, high: int) -> Sequence[Any]:
        return self.kv.batch_get(self.keys[low:high], zero_copy=True)
