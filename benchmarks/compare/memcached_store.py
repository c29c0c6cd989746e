"""memcached through pylibmc (libmemcached) or pymemcache (pure Python).

pylibmc speaks the text protocol without Nagle's algorithm: with it each large set waits for a
delayed acknowledgement. It sends a batch put as single sets, pymemcache as one block; it reads a
batch get faster. Neither has a call that asks for several keys without their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .work import Store, Work, check


class Memcached(Store):
    """What both libraries have in common, under pylibmc's names."""

    m: Any

    def load(self, work: Work) -> None:
        super().load(work)
        self.keys, self.values = work.keys, work.values

    def put(self, i: int) -> None:
        check(self.m.set(self.keys[i], self.values[i]), "set")

    def get(self, i: int) -> Any:
        return self.m.get(self.keys[i])


class Pylibmc(Memcached):
    def __init__(self, port: int) -> None:
        import pylibmc

        self.m = pylibmc.Client([f"127.0.0.1:{port}"], behaviors={"tcp_nodelay": True})

    def clear(self) -> None:
        self.m.delete_multi(self.keys)

    def close(self) -> None:
        self.m.disconnect_all()

    def batch_put(self, low: int, high: int) -> None:
        items = dict(zip(self.keys[low:high], self.values[low:high], strict=True))
        check(not self.m.set_multi(items), "set_multi")

    def batch_get(self, low: int, high: int) -> Sequence[Any]:
        found = self.m.get_multi(self.keys[low:high])
        return [found[key] for key in self.keys[low:high]]


class Pymemcache(Memcached):
    DELETED_AT_ONCE = 100
    """It reads no answer before all is sent."""

    def __init__(self, port: int) -> None:
        from pymemcache.client.base import Client

        self.m = Client(("127.0.0.1", port), default_noreply=False, no_delay=True)

    def close(self) -> None:
        self.m.close()

    def clear(self) -> None:
        for low in range(0, len(self.keys), self.DELETED_AT_ONCE):
            self.m.delete_many(self.keys[low : low + self.DELETED_AT_ONCE])

    def batch_put(self, low: int, high: int) -> None:
        items = dict(zip(self.keys[low:high], self.values[low:high], strict=True))
        check(not self.m.set_many(items), "set_many")

    def batch_get(self, low: int, high: int) -> Sequence[Any]:
        found = self.m.get_many(self.keys[low:high])
        return [found[key] for key in self.keys[low:high]]
