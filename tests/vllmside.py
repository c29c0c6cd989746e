"""What the tests of vLLM's connector share: an engine's requests and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p2pkv.adapters.keys import Fingerprint

BLOCK = 4
"""Tokens."""
FINGERPRINT = Fingerprint(model="m", dtype="f", block_tokens=BLOCK, layout="vllm")


def chain(blocks: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, i]) * 16 for i in range(blocks)]


@dataclass
class Request:
    request_id: str = "r"
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None


def request(tokens: int, **changes: Any) -> Request:
    """With a prompt of so many tokens."""
    return Request(
        num_tokens=tokens, num_prompt_tokens=tokens, block_hashes=chain(tokens // BLOCK), **changes
    )


class Buffer:
    def __init__(self, rows: int, size: int) -> None:
        self.rows = rows
        self.memory = [bytearray(size) for _ in range(rows)]

    def row(self, index: int) -> memoryview:
        return memoryview(self.memory[index])


class Memory:
    """The engine's memory, as bytes by block."""

    block_bytes = 8

    def __init__(self, blocks: dict[int, bytes]) -> None:
        self.blocks = blocks
        self.broken = False

    def now(self) -> None: ...

    def staging(self, rows: int) -> Buffer:
        return Buffer(rows, self.block_bytes)

    def gather(self, blocks: Sequence[int], into: Buffer, after: Any) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")
        for row, block in zip(into.memory, blocks, strict=False):
            row[:] = self.blocks[block]

    def scatter(self, source: Buffer, blocks: Sequence[int], after: Any) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")
        for row, block in zip(source.memory, blocks, strict=False):
            self.blocks[block] = bytes(row)
