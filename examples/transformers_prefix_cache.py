"""The prefix cache of a Hugging Face model, kept in p2pkv and used again by another process.

    python examples/transformers_prefix_cache.py

Needs torch and transformers (``pip install 'p2pkv[transformers]'``). One process runs a small Llama
over a prompt and stores the KV cache of its first 160 tokens, block by block. Another process finds
those blocks by prefix, fetches them in one batch, runs the model over the other 40 tokens only, and
shows that the logits are those of the whole prompt. Uses the cluster that ``p2pkv up`` runs on this
machine, or ``--etcd-endpoints``; else starts one for itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import p2pkv
from p2pkv.adapters.cache import Cache, CacheConfig
from p2pkv.adapters.keys import BlockKeys, Fingerprint

LAYERS, HEADS, DIMENSION, BLOCK = 2, 2, 32, 16
PROMPT_TOKENS, PREFIX_TOKENS = 200, 160
BLOCK_SHAPE = (LAYERS, 2, HEADS, BLOCK, DIMENSION)
CLOSE = 1e-4
"""How far logits may differ that were added up in another order."""
PATIENT = CacheConfig(lookup_timeout_s=2.0, transfer_timeout_s=5.0)
KEYS = BlockKeys(
    Fingerprint(model="example-llama@0", dtype="float32", block_tokens=BLOCK, layout="layers")
)


def make_model() -> Any:
    """The same weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=HEADS, head_dim=DIMENSION,
        max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_prompt() -> torch.Tensor:
    return torch.randint(0, 512, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def block_keys(tokens: torch.Tensor) -> list[bytes]:
    """The key of each whole block: its hash covers its tokens and all before them."""
    chain, last = [], b""
    for block in tokens[0].numpy()[: len(tokens[0]) // BLOCK * BLOCK].reshape(-1, BLOCK):
        last = hashlib.sha256(last + block.tobytes()).digest()
        chain.append(last)
    return KEYS.of(chain)


def blocks_of(cache: Any, tokens: int) -> list[torch.Tensor]:
    """The cache's first tokens as blocks of all layers."""
    whole = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
    return [whole[:, :, :, i : i + BLOCK].contiguous() for i in range(0, tokens, BLOCK)]


def cache_of(blocks: list[torch.Tensor], config: Any) -> Any:
    """A cache that holds these blocks."""
    cache, whole = DynamicCache(config=config), torch.cat(blocks, dim=3)
    for number, (keys, values) in enumerate(whole):
        cache.update(keys[None], values[None], number)
    return cache


@torch.no_grad()
def store(kv: Cache) -> None:
    model, prompt = make_model(), make_prompt()
    cache = DynamicCache(config=model.config)
    model(prompt[:, :PREFIX_TOKENS], past_key_values=cache)
    keys, blocks = block_keys(prompt[:, :PREFIX_TOKENS]), blocks_of(cache, PREFIX_TOKENS)
    outcomes = kv.store(keys, [block.numpy() for block in blocks], write_once=True)
    failed = [outcome for outcome in outcomes if not isinstance(outcome, int)]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(keys)} blocks are not stored: {failed[0]}")
    print(f"process {os.getpid()}: {len(keys)} blocks of {blocks[0].nbytes} bytes stored")


@torch.no_grad()
def load(kv: Cache) -> None:
    model, prompt = make_model(), make_prompt()
    keys = block_keys(prompt[:, :PREFIX_TOKENS])
    begin = time.perf_counter()
    found = kv.match(keys)
    blocks = [torch.empty(BLOCK_SHAPE) for _ in range(found)]
    came = kv.load(keys[:found], [block.numpy() for block in blocks])
    took = time.perf_counter() - begin
    usable = next((i for i, n in enumerate(came) if n != blocks[0].nbytes), found)
    print(f"process {os.getpid()}: {usable} of {len(keys)} blocks found and fetched, "
          f"{took * 1e3:.1f} ms")  # fmt: skip
    if not usable:
        raise SystemExit(f"nothing to reuse: {kv.why_miss(keys[0]).text}")
    tokens = usable * BLOCK
    cache = cache_of(blocks[:usable], model.config)
    mine = model(prompt[:, tokens:], past_key_values=cache).logits
    truth = model(prompt).logits[:, tokens:]
    wrong = cache_of([torch.zeros(BLOCK_SHAPE)] * usable, model.config)
    zeroed = model(prompt[:, tokens:], past_key_values=wrong).logits
    difference = (mine - truth).abs().max().item()
    print(f"logits of the other {PROMPT_TOKENS - tokens} tokens, with the fetched cache and all "
          f"computed: largest difference {difference:.1e}; with a cache of zeros "
          f"{(zeroed - truth).abs().max().item():.1f}")  # fmt: skip
    if difference > CLOSE:
        raise SystemExit(f"the logits differ by more than {CLOSE}")
    print("equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--etcd-endpoints", help="comma-separated; of a running cluster")
    parser.add_argument("--step", choices=["store", "load"], help="only this, in this process")
    args = parser.parse_args()
    if args.step:
        client = p2pkv.Client(args.etcd_endpoints.split(","))
        with Cache(client, PATIENT, owned=True) as kv:
            kv.connect(30.0)
            {"store": store, "load": load}[args.step](kv)
        return
    from local import endpoints

    with endpoints(args.etcd_endpoints) as etcd:
        for step in ("store", "load"):
            again = [sys.executable, __file__, f"--step={step}", "--etcd-endpoints", ",".join(etcd)]
            if subprocess.run(again, check=False).returncode:
                raise SystemExit(f"{step} failed")


if __name__ == "__main__":
    main()
