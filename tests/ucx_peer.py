"""A UCX engine in a process of its own, driven by JSON lines; started by test_ucx.py.

First it says {"address", "handle", "memory"}; then it answers each line of its input:
{"do": "sum"} with the xxh3 of its memory, {"do": "push", "address", "handle", "pieces"} after a
write into the caller's memory, {"do": "counts"} with those of its engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import xxhash

from p2pkv.ucx_transfer import Peer, UcxConfig, UcxEngine


class Served:
    """The engine and its memory, filled from a seed."""

    def __init__(self, bytes_: int, seed: int, config: dict[str, Any]) -> None:
        self.engine = UcxEngine(UcxConfig(**config))
        self.memory = bytearray(random.Random(seed).randbytes(bytes_))
        self.region = self.engine.register(self.memory)
        self._peers: dict[str, Peer] = {}

    def hello(self) -> dict[str, Any]:
        return {
            "address": self.engine.address.hex(),
            "handle": self.region.handle.hex(),
            "memory": self.region.address,
        }

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "sum":
            return {"sum": xxhash.xxh3_64_hexdigest(self.memory)}
        if order["do"] == "counts":
            return self.engine.counts()
        return {"bytes": await self._push(**order)}

    async def _push(self, do: str, address: str, handle: str, pieces: list[list[int]]) -> int:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = self.engine.connect(bytes.fromhex(address), "caller")
        remote = peer.attach(bytes.fromhex(handle))
        moved = await self.engine.write(
            peer, [(self.region.address + at, remote.key, to, n) for at, to, n in pieces]
        )
        peer.detach(remote)
        return moved


async def main() -> None:
    served = Served(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps(served.hello()), flush=True)
    while line := await reader.readline():
        print(json.dumps(await served.do(json.loads(line))), flush=True)
    await served.engine.close()


if __name__ == "__main__":
    asyncio.run(main())
