"""KV-cache blocks of a large model's shapes, made with numpy from a seed.

32 layers; a block is 16 tokens, for each layer keys and values of 8 heads of 128 elements in
bfloat16: 64 KiB a layer, 2 MiB in all. Several prompts share their first blocks, as those with the
same system prompt do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import xxhash

import p2pkv

LAYERS, TOKENS, HEADS, DIMENSION = 32, 16, 8, 128
BLOCK_SHAPE = (LAYERS, 2, TOKENS, HEADS, DIMENSION)
VALUE_BYTES = 2 * TOKENS * HEADS * DIMENSION * 2
BLOCKS_PER_PROMPT = 16
BLOCKS_SHARED = 4
BLOCKS_PER_GROUP = 8
"""Consecutive blocks under one tag: they are on one node, so a prefix asks few nodes."""
PROMPTS_MAX = 4

Cost = tuple[str, int, int, float]


def block_hashes(tokens: np.ndarray) -> list[str]:
    """Each block's hash covers its tokens and everything before them."""
    hashes: list[str] = []
    for block in tokens.reshape(-1, TOKENS):
        parent = hashes[-1].encode() if hashes else b""
        hashes.append(xxhash.xxh3_128_hexdigest(parent + block.tobytes()))
    return hashes


def block_keys(hashes: Sequence[str]) -> list[list[str]]:
    """By block and layer."""
    keys = []
    for i, name in enumerate(hashes):
        group = hashes[i - i % BLOCKS_PER_GROUP]
        keys.append([f"demo/{{{group}}}/{name}/{layer}" for layer in range(LAYERS)])
    return keys


class Prompt:
    """Tokens, the keys of their blocks, and what a model would have computed for them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.hashes = block_hashes(tokens)
        self.keys = block_keys(self.hashes)
        self.last_keys = [keys[-1] for keys in self.keys]
        """Stored last, so that a block that has it is complete."""
        self.blocks = [self._compute(name) for name in self.hashes]

    @staticmethod
    def _compute(name: str) -> np.ndarray:
        numbers = np.random.default_rng(int(name, 16)).standard_normal(BLOCK_SHAPE, np.float32)
        # bfloat16 is the upper half of float32; numpy has no type for it.
        return np.ascontiguousarray(numbers.view(np.uint16)[..., 1::2])


class Workload:
    """Stores prompts' blocks, and reads them back."""

    def __init__(self, kv: p2pkv.Client, seed: int, capacity_bytes: int) -> None:
        self._kv = kv
        rng = np.random.default_rng(seed)
        prompt_bytes = BLOCKS_PER_PROMPT * LAYERS * VALUE_BYTES
        count = max(1, min(PROMPTS_MAX, capacity_bytes // prompt_bytes))
        length = BLOCKS_PER_PROMPT * TOKENS
        shared = rng.integers(0, 32000, BLOCKS_SHARED * TOKENS)
        self._prompts = []
        for _ in range(count):
            rest = rng.integers(0, 32000, length - len(shared))
            self._prompts.append(Prompt(np.concatenate([shared, rest])))
        self.title = (
            f"{count} prompts of {length} tokens; a value: {TOKENS} tokens of one of {LAYERS} "
            f"layers, {HEADS} heads × {DIMENSION}, bfloat16, {VALUE_BYTES >> 10} KiB"
        )

    def store(self) -> Cost:
        """Put the blocks that are not there yet."""
        values, seconds = 0, 0.0
        for prompt in self._prompts:
            known = self._kv.match_prefix(prompt.last_keys)
            items = [
                (key, block[layer])
                for keys, block in zip(prompt.keys[known:], prompt.blocks[known:], strict=True)
                for layer, key in enumerate(keys)
            ]
            started = time.perf_counter()
            copies = self._kv.batch_put(items, write_once=True)
            seconds += time.perf_counter() - started
            if not all(copies):
                raise RuntimeError(f"{copies.count(0)} values were not stored")
            values += len(items)
        return "blocks are stored (batch_put)", values, values * VALUE_BYTES, seconds

    def match(self) -> Cost:
        """Ask how much of each prompt is there, and of one that goes another way half-way."""
        half = len(self._prompts[0].last_keys) // 2
        other = [f"{key}/other" for key in self._prompts[0].last_keys[half:]]
        questions = [(p.last_keys, len(p.last_keys)) for p in self._prompts]
        questions.append((self._prompts[0].last_keys[:half] + other, half))
        started = time.perf_counter()
        answers = [self._kv.match_prefix(keys) for keys, _ in questions]
        seconds = time.perf_counter() - started
        if answers != [expected for _, expected in questions]:
            raise RuntimeError(f"wrong prefixes: {answers}")
        asked = sum(len(keys) for keys, _ in questions)
        return "another process asks for prefixes (match_prefix)", asked, 0, seconds

    def load(self) -> Cost:
        """Read all blocks into memory of our own and compare every byte."""
        values, seconds = 0, 0.0
        for prompt in self._prompts:
            found = np.empty((len(prompt.keys), *BLOCK_SHAPE), np.uint16)
            keys = [key for keys in prompt.keys for key in keys]
            buffers = list(found.reshape(len(keys), -1))
            started = time.perf_counter()
            sizes = self._kv.batch_get_into(keys, buffers)
            seconds += time.perf_counter() - started
            if sizes != [VALUE_BYTES] * len(keys):
                raise RuntimeError(f"{sizes.count(None)} of {len(keys)} values are missing")
            if not all(map(np.array_equal, found, prompt.blocks)):
                raise RuntimeError("bytes differ")
            values += len(keys)
        return "it reads all and compares (batch_get_into)", values, values * VALUE_BYTES, seconds
