"""The prefix cache of a small, randomly initialised Llama, taken from one process to another.

Needs torch and transformers. The process that stores runs the model over whole prompts; the one
that loads restores the cache of the prompt's prefix, runs the model over the rest only, and gets
the same outputs as if it had computed all by itself.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import xxhash
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import p2pkv

LAYERS, TOKENS, HEADS, DIMENSION = 8, 16, 4, 64
VALUE_SHAPE = (2, HEADS, TOKENS, DIMENSION)
VALUE_BYTES = 2 * HEADS * TOKENS * DIMENSION * 4
PREFIX_TOKENS, SUFFIX_TOKENS = 256, 16
BLOCKS = PREFIX_TOKENS // TOKENS
BLOCKS_PER_GROUP = 8
PROMPTS_MAX = 4

Cost = tuple[str, int, int, float]


def make_model(seed: int) -> Any:
    """The same weights in every process."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the order of additions, and so every bit, is the same everywhere
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIMENSION,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def block_keys(tokens: torch.Tensor) -> list[list[str]]:
    """By block and layer. A block's name covers its tokens and everything before them."""
    names: list[str] = []
    for block in tokens.numpy().reshape(-1, TOKENS):
        parent = names[-1].encode() if names else b""
        names.append(xxhash.xxh3_128_hexdigest(parent + block.tobytes()))
    groups = [names[i - i % BLOCKS_PER_GROUP] for i in range(len(names))]
    return [
        [f"llama/{{{group}}}/{name}/{layer}" for layer in range(LAYERS)]
        for group, name in zip(groups, names, strict=True)
    ]


class Prompt:
    """Tokens, the keys of the prefix's blocks, and the cache that this process computed itself."""

    def __init__(self, model: Any, tokens: torch.Tensor) -> None:
        self.prefix, self.suffix = tokens[:PREFIX_TOKENS], tokens[PREFIX_TOKENS:]
        self.keys = block_keys(self.prefix)
        self.last_keys = [keys[-1] for keys in self.keys]
        self.cache = DynamicCache(config=model.config)
        model(self.prefix[None], past_key_values=self.cache, use_cache=True)

    def value(self, block: int, layer: int) -> torch.Tensor:
        """Keys and values of one block in one layer."""
        part = slice(block * TOKENS, (block + 1) * TOKENS)
        stored = self.cache.layers[layer]
        return torch.stack([stored.keys[0, :, part], stored.values[0, :, part]]).contiguous()

    def values(self) -> list[torch.Tensor]:
        return [self.value(b, layer) for b in range(BLOCKS) for layer in range(LAYERS)]


class Workload:
    """Stores the prompts' prefix caches, and continues from them elsewhere."""

    def __init__(self, kv: p2pkv.Client, seed: int, capacity_bytes: int) -> None:
        self._kv = kv
        count = max(1, min(PROMPTS_MAX, capacity_bytes // (BLOCKS * LAYERS * VALUE_BYTES)))
        with torch.no_grad():
            self._model = make_model(seed)
            length = PREFIX_TOKENS + SUFFIX_TOKENS
            tokens = torch.randint(0, 512, (count, length))
            self._prompts = [Prompt(self._model, row) for row in tokens]
        self.title = (
            f"a random Llama of {LAYERS} layers, {count} prompts with a prefix of {PREFIX_TOKENS} "
            f"tokens; a value: {TOKENS} tokens of one layer, {HEADS} heads × {DIMENSION}, float32, "
            f"{VALUE_BYTES >> 10} KiB"
        )

    def store(self) -> Cost:
        """Put the cache of each prompt's prefix."""
        count, seconds = 0, 0.0
        for prompt in self._prompts:
            keys = [key for keys in prompt.keys for key in keys]
            items = list(zip(keys, (v.numpy() for v in prompt.values()), strict=True))
            started = time.perf_counter()
            copies = self._kv.batch_put(items, write_once=True)
            seconds += time.perf_counter() - started
            if not all(copies):
                raise RuntimeError(f"{copies.count(0)} values were not stored")
            count += len(items)
        return "prefix caches are stored (batch_put)", count, count * VALUE_BYTES, seconds

    def match(self) -> Cost:
        """Ask how much of each prompt's prefix is there."""
        started = time.perf_counter()
        answers = [self._kv.match_prefix(prompt.last_keys) for prompt in self._prompts]
        seconds = time.perf_counter() - started
        if answers != [BLOCKS] * len(self._prompts):
            raise RuntimeError(f"wrong prefixes: {answers}")
        asked = BLOCKS * len(answers)
        return "another process asks for prefixes (match_prefix)", asked, 0, seconds

    def load(self) -> Cost:
        """Read the caches, compare every byte, and continue the prompts from them."""
        count, seconds = 0, 0.0
        for prompt in self._prompts:
            found = torch.empty((BLOCKS * LAYERS, *VALUE_SHAPE))
            keys = [key for keys in prompt.keys for key in keys]
            buffers = list(found.numpy().reshape(len(keys), -1))
            started = time.perf_counter()
            sizes = self._kv.batch_get_into(keys, buffers)
            seconds += time.perf_counter() - started
            if sizes != [VALUE_BYTES] * len(keys):
                raise RuntimeError(f"{sizes.count(None)} of {len(keys)} values are missing")
            if not torch.equal(found, torch.stack(prompt.values())):
                raise RuntimeError("bytes differ")
            self._continue(prompt, found.view(BLOCKS, LAYERS, *VALUE_SHAPE))
            count += len(keys)
        what = "it reads them, compares, continues (batch_get_into)"
        return what, count, count * VALUE_BYTES, seconds

    @torch.no_grad()
    def _continue(self, prompt: Prompt, found: torch.Tensor) -> None:
        """The outputs for the rest of the prompt must be those of our own cache."""
        loaded, own = (DynamicCache(config=self._model.config) for _ in range(2))
        for layer in range(LAYERS):
            keys, values = torch.cat(list(found[:, layer]), dim=2)[:, None]
            loaded.update(keys, values, layer)
            computed = prompt.cache.layers[layer]
            own.update(computed.keys, computed.values, layer)
        suffix = prompt.suffix[None]
        outputs = [
            self._model(suffix, past_key_values=c, use_cache=True).logits for c in (loaded, own)
        ]
        if not torch.equal(*outputs):
            raise RuntimeError("the model's outputs differ")
