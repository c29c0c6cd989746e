"""Which engines may share pages, and the names of their pages. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from p2pkv.adapters.keys import HASH_BYTES_MAX, BlockKeys, Fingerprint
from p2pkv.errors import ConfigError

KV = "kv"
"""SGLang's name of the pool that all models have."""
SHARDED_ALWAYS = "mamba"
"""A pool that is split among ranks even where the others are the same on all of them."""


class Naming(NamedTuple):
    """What a user chooses of the names."""

    model: str = ""
    namespace: str = ""
    blocks_per_group: int = 1


class PoolFacts(NamedTuple):
    """What a host pool says of its pages."""

    name: str
    kind: str
    """Its class."""
    dtype: str
    layout: str
    page_tokens: int
    page_bytes: tuple[int, ...]
    """Of each piece of a page."""


def page_keys(config: Any, facts: PoolFacts, naming: Naming, pieces: int = 1) -> list[BlockKeys]:
    """The keys of this rank's pages of one pool.

    ``config``: SGLang's HiCacheStorageConfig. ``pieces``: groups of heads that are stored apart, so
    that engines with another tensor parallelism find theirs; then there are as many keys.
    Raises ConfigError.
    """
    model = model_name(config, naming)
    ranks, rank = tensor_rank(config, facts)
    context = config.attn_cp_size * config.dcp_size
    fingerprint = Fingerprint(
        model=model,
        dtype=facts.dtype,
        block_tokens=facts.page_tokens,
        layout=f"sglang/{facts.layout}",
        tensor_parallel=ranks * pieces,
        pipeline_parallel=config.pp_size,
        context_parallel=context,
        hash_seed="sha256",
        extra=(
            ("bytes", "+".join(map(str, facts.page_bytes))),
            ("kind", facts.kind),
            ("namespace", naming.namespace),
            ("pool", facts.name),
        ),
    )
    outer = config.pp_rank * context + config.attn_cp_rank * config.dcp_size + config.dcp_rank
    first = (outer * ranks + rank) * pieces
    group = naming.blocks_per_group if facts.name == KV else 1
    return [BlockKeys(fingerprint, first + i, group) for i in range(pieces)]


def model_name(config: Any, naming: Naming) -> str:
    """Raises ConfigError."""
    model = naming.model or config.model_name
    if not model:
        raise ConfigError("model: SGLang gives no name of the model, so it must be given")
    return str(model)[:512]


def tensor_rank(config: Any, facts: PoolFacts) -> tuple[int, int]:
    """How many ranks have different pages of this pool, and which of them this one is."""
    if config.is_mla_model and not _sharded(facts):
        return 1, 0
    return config.tp_size, config.tp_rank


def _sharded(facts: PoolFacts) -> bool:
    """Of a model whose pages are the same on all ranks: whether this pool's are not."""
    draft = facts.name.startswith("draft") and "indexer" not in facts.name
    compressed = "MLA" in facts.kind or "DeepSeek" in facts.kind
    return facts.name == SHARDED_ALWAYS or (draft and not compressed)


def page_hash(page: str) -> bytes:
    """The bytes of a page's name: hexadecimal digits, if it is SGLang's own."""
    try:
        data = bytes.fromhex(page)
    except ValueError:
        data = page.encode()
    return data if 0 < len(data) <= HASH_BYTES_MAX else hashlib.sha256(page.encode()).digest()


def names(keys: Sequence[BlockKeys], pages: Sequence[str], before: Sequence[str]) -> list[bytes]:
    """The keys of consecutive pages, those of one page's pieces together.

    ``before``: the pages ahead of them from the start of the sequence, as far as they are known.
    """
    group = keys[0].blocks_per_group
    known = before[len(before) - len(before) % group :] if group > 1 else ()
    chain = [page_hash(page) for page in (*known, *pages)]
    columns = [key.of(chain, len(known)) for key in keys]
    return [name for row in zip(*columns, strict=True) for name in row]


__all__ = [
    "KV", "Naming", "PoolFacts", "model_name", "names", "page_hash", "page_keys", "tensor_rank",
]  # fmt: skip
