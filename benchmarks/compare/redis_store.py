"""Redis through redis-py with hiredis, set up for large values.

hiredis packs a command by copying all of its values into one new block; for 32 values of 1 MiB in
one MSET that cost five times as much as the transfer. So commands with large values are packed by
redis-py's own packer, which sends them from where they lie; answers are read by hiredis throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .work import KIB, Store, Work, check

PACKED_BY_HIREDIS = 16 * KIB
EXISTS = "local r={} for i,k in ipairs(KEYS) do r[i]=redis.call('EXISTS',k) end return r"
MATCH = (
    "for i,k in ipairs(KEYS) do if redis.call('EXISTS',k)==0 then return i-1 end end return #KEYS"
)


class Redis(Store):
    def __init__(self, port: int = 0, path: str = "") -> None:
        self.small = _client(port, path, large=False)
        self.large = _client(port, path, large=True)
        self.script_exists = self.small.register_script(EXISTS)
        self.script_match = self.small.register_script(MATCH)

    def load(self, work: Work) -> None:
        super().load(work)
        self.r = self.small if work.size < PACKED_BY_HIREDIS else self.large
        self.keys, self.values = work.keys, work.values

    def clear(self) -> None:
        self.small.unlink(*self.keys)

    def put(self, i: int) -> None:
        check(self.r.set(self.keys[i], self.values[i]), "set")

    def get(self, i: int) -> Any:
        return self.r.get(self.keys[i])

    def batch_put(self, low: int, high: int) -> None:
        items = dict(zip(self.keys[low:high], self.values[low:high], strict=True))
        check(self.r.mset(items), "mset")

    def batch_get(self, low: int, high: int) -> Sequence[Any]:
        return list(self.r.mget(self.keys[low:high]))

    def exists(self, keys: list[str]) -> Sequence[bool]:
        return [found == 1 for found in self.script_exists(keys)]

    def match(self, keys: list[str]) -> int:
        return int(self.script_match(keys))

    def close(self) -> None:
        self.small.close()
        self.large.close()


def _client(port: int, path: str, large: bool) -> Any:
    import redis
    from redis._parsers.encoders import Encoder
    from redis.connection import PythonRespSerializer

    options: dict[str, Any] = {"socket_read_size": 256 * KIB}
    if large:
        make_encoder: Any = Encoder
        encode = make_encoder("utf-8", "strict", False).encode
        options["command_packer"] = PythonRespSerializer(6000, encode)
    if path:
        options |= {"connection_class": redis.UnixDomainSocketConnection, "path": path}
    else:
        options["port"] = port
    client = redis.Redis(connection_pool=redis.ConnectionPool(**options))
    client.ping()
    return client
