from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv import ConfigError, ring
from p2pkv.adapters.sglang import hits
from p2pkv.adapters.sglang.identity import (
    Naming,
    PoolFacts,
    names,
    page_hash,
    page_keys,
    tensor_rank,
)
from p2pkv.adapters.sglang.options import read
from p2pkv.adapters.sglang.pages import buffers

FACTS = PoolFacts("kv", "MHATokenToKVPoolHost", "bfloat16", "page_first/direct", 16, (4096, 4096))


PLAIN = Naming()


@dataclass
class Config:
    """The fields of SGLang's HiCacheStorageConfig that names depend on."""

    model_name: str | None = "m"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False


def pages(count: int) -> list[str]:
    return [hashlib.sha256(i.to_bytes(4, "big")).hexdigest() for i in range(count)]


def first_key(config: Any, facts: PoolFacts = FACTS, naming: Naming = PLAIN) -> bytes:
    return names(page_keys(config, facts, naming), pages(1), ())[0]


def test_every_rank_has_keys_of_its_own() -> None:
    configs = [
        Config(tp_rank=t, tp_size=2, pp_rank=p, pp_size=2, attn_cp_rank=c, attn_cp_size=2)
        for t in range(2)
        for p in range(2)
        for c in range(2)
    ]
    assert len(set(map(first_key, configs))) == 8


def test_ranks_of_a_model_with_the_same_pages_on_all_of_them_share_keys() -> None:
    ranks = [Config(tp_rank=rank, tp_size=4, is_mla_model=True) for rank in range(4)]
    assert len(set(map(first_key, ranks))) == 1
    assert first_key(Config(is_mla_model=True)) == first_key(ranks[0])


@pytest.mark.parametrize(
    ("name", "kind", "sharded"),
    [
        ("kv", "MLATokenToKVPoolHost", False),
        ("indexer", "DSAIndexerPoolHost", False),
        ("mamba", "MambaPoolHost", True),
        ("draft", "MHATokenToKVPoolHost", True),
        ("draft", "MLATokenToKVPoolHost", False),
        ("draft_swa", "DeepSeekV4PagedHostPool", False),
        ("draft_indexer", "DSAIndexerPoolHost", False),
    ],
)
def test_side_pools_of_such_a_model_may_be_split_among_ranks(
    name: str, kind: str, sharded: bool
) -> None:
    config = Config(tp_rank=3, tp_size=4, is_mla_model=True)
    facts = FACTS._replace(name=name, kind=kind)
    assert tensor_rank(config, facts) == ((4, 3) if sharded else (1, 0))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float8_e4m3fn"},
        {"layout": "layer_first/direct"},
        {"page_tokens": 32},
        {"page_bytes": (2048, 2048)},
        {"name": "swa"},
        {"kind": "Other"},
    ],
)
def test_whatever_a_page_s_bytes_depend_on_is_in_its_key(change: dict[str, Any]) -> None:
    assert first_key(Config()) != first_key(Config(), FACTS._replace(**change))


def test_namespace_and_model_are_in_the_key() -> None:
    keys = [first_key(Config(), naming=n) for n in (Naming(), Naming("x"), Naming("", "y"))]
    assert len(set(keys)) == 3
    assert first_key(Config(model_name="x")) == keys[1]


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="model"):
        page_keys(Config(model_name=None), FACTS, Naming())


def test_groups_of_heads_have_the_keys_of_the_ranks_of_a_wider_engine() -> None:
    whole = names(page_keys(Config(), FACTS, Naming(), pieces=2), pages(3), ())
    halves = [
        names(page_keys(Config(tp_rank=rank, tp_size=2), FACTS, Naming()), pages(3), ())
        for rank in range(2)
    ]
    assert whole == [key for pair in zip(*halves, strict=True) for key in pair]


@given(st.integers(0, 100), st.integers(1, 40), st.sampled_from([1, 2, 8, 64]))
def test_where_a_batch_begins_makes_no_difference(begin: int, count: int, group: int) -> None:
    keys = page_keys(Config(), FACTS, Naming(blocks_per_group=group))
    chain = pages(begin + count)
    assert names(keys, chain[begin:], chain[:begin]) == names(keys, chain, ())[begin:]


def test_side_pools_are_not_grouped_since_nobody_tells_where_their_pages_stand() -> None:
    facts = FACTS._replace(name="swa")
    keys = names(page_keys(Config(), facts, Naming(blocks_per_group=8)), pages(8), ())
    assert len(set(map(ring.route, keys))) == 8


def test_page_names_that_are_no_digits_are_taken_as_they_are() -> None:
    assert page_hash("ff00") == b"\xff\x00"
    assert page_hash("page-1") == b"page-1"
    assert len(page_hash("x" * 300)) == 32


# -- options


def test_options_stand_in_a_section_of_their_own() -> None:
    options, direct = read({"backend_name": "x", "interface_v1": 1, "p2pkv": {"cluster": "c"}})
    assert (options.cluster, direct) == ("c", True)
    assert read({}) == (read({"p2pkv": {}})[0], False)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"p2pkv": "x"}, "p2pkv"),
        ({"p2pkv": {"clutser": "c"}}, "clutser"),
        ({"p2pkv": {"blocks_per_group": 0}}, "blocks_per_group"),
        ({"interface_v1": 1, "p2pkv": {"blocks_per_group": 3}}, "128"),
        ({"p2pkv": {"blocks_per_group": 2}}, "interface_v1"),
        ({"p2pkv": {"ttl_s": -1}}, "ttl_s"),
    ],
)
def test_bad_options_are_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(extra)


# -- prefixes that several pools must have


def flags(text: str) -> list[bool]:
    return [c == "x" for c in text]


def test_every_page_counts_for_one_policy_and_a_window_for_the_other() -> None:
    wanted = [hits.Wanted("all", hits.ALL_PAGES), hits.Wanted("tail", hits.TRAILING_PAGES, 2)]
    found = hits.fold(flags("xxxxx."), {"all": flags("xxxx.."), "tail": flags(".xx.xx")}, wanted)
    assert found == hits.Hits(3, 5, {"all": 4, "tail": 3}, [3])


def test_a_policy_that_is_not_known_limits_nothing() -> None:
    found = hits.fold(flags("xx"), {}, [hits.Wanted("groups", "block_groups")])
    assert found == hits.Hits(2, 2, {}, [1, 2])


def test_windows_agree_with_their_definition() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed = {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        there = [chance.random() < 0.7 for _ in range(chance.randint(0, 12))]
        need = chance.randint(1, 4)
        expected = {n for n in range(1, len(there) + 1) if all(there[max(0, n - need) : n])}
        assert hits.served(there, hits.Wanted("w", hits.TRAILING_PAGES, need)) == expected


# -- memory


class Tensor:
    """What ``buffers`` uses of torch's."""

    def __init__(self, address: int, count: int) -> None:
        self._address, self._count = address, count

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._count

    def element_size(self) -> int:
        return 2


@dataclass
class Memory:
    kv_buffer: Any
    parts: tuple[Any, ...] = ()

    def get_hybrid_pool_buffer(self) -> list[Any]:
        return list(self.parts)


def test_memory_that_overlaps_is_one_piece_and_empty_memory_none() -> None:
    whole = Tensor(1000, 500)
    assert buffers(Memory(whole, (Tensor(1000, 250), Tensor(1500, 250)))) == [(1000, 1000)]
    assert buffers(Memory([Tensor(0x9000, 8), None, Tensor(1, 0)])) == [(0x9000, 16)]
    assert buffers(Memory(None)) == []
