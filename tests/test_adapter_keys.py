from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv import ring
from p2pkv.adapters.keys import HASH_BYTES_MAX, BlockKeys, Fingerprint
from p2pkv.config import Limits
from p2pkv.errors import InvalidArgument

PRINT = Fingerprint(model="m@1", dtype="bfloat16", block_tokens=16, layout="page_first")


def chain_of(blocks: int, seed: bytes = b"") -> list[bytes]:
    """Chained hashes, as engines make them."""
    chain, last = [], seed
    for i in range(blocks):
        last = hashlib.sha256(last + i.to_bytes(4, "big")).digest()
        chain.append(last)
    return chain


def tags(keys: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(map(ring.route, keys)))


def test_a_prefix_of_128_blocks_has_two_tags_and_distinct_keys() -> None:
    keys = BlockKeys(PRINT).of(chain_of(128))
    assert len(set(keys)) == 128
    assert len(tags(keys)) == 2


def test_the_tag_is_the_same_for_everybody_who_knows_the_prefix() -> None:
    chain = chain_of(300)
    whole = BlockKeys(PRINT).of(chain)
    assert BlockKeys(PRINT).of(chain[:150]) == whole[:150]
    assert BlockKeys(PRINT).of(chain, 70, 140) == whole[70:140]
    assert BlockKeys(PRINT).of_group(chain[64], chain[64:128]) == whole[64:128]


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 80))
def test_any_part_of_a_chain_has_the_keys_of_the_whole(a: int, b: int, group: int) -> None:
    names, chain = BlockKeys(PRINT, blocks_per_group=group), chain_of(200)
    start, stop = sorted((a, b))
    assert names.of(chain, start, stop) == names.of(chain)[start:stop]


def test_sequences_with_a_common_prefix_share_its_keys_and_nothing_else() -> None:
    chain = chain_of(100)
    fork = [*chain[:80], *chain_of(20, b"other")]
    mine, theirs = BlockKeys(PRINT).of(chain), BlockKeys(PRINT).of(fork)
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * 80 + [False] * 20


def test_different_runs_and_ranks_spread_over_the_buckets() -> None:
    keys = [
        key
        for seed in range(50)
        for rank in range(8)
        for key in BlockKeys(PRINT, rank).of(chain_of(64, b"%d" % seed))
    ]
    assert len(tags(keys)) == 50 * 8
    assert len(set(ring.buckets_of(keys, 1024))) > 300


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m@2"}, {"dtype": "float8_e4m3fn"}, {"block_tokens": 32},
        {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2},
        {"layout": "layer_first"}, {"hash_seed": "1"}, {"extra": (("lora", "x"),)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_whatever_differs_keeps_blocks_apart_and_is_named(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(PRINT, **change)
    chain = chain_of(3)
    assert not set(BlockKeys(PRINT).of(chain)) & set(BlockKeys(other).of(chain))
    (difference,) = PRINT.differences(other)
    assert difference.startswith(f"{next(iter(change))}: ")


def test_a_fingerprint_is_the_same_on_every_machine() -> None:
    """If this fails, everybody's cache becomes unreachable at the next upgrade: raise FORMAT."""
    assert PRINT.digest() == "c1ba97c2b32fef9b"
    assert BlockKeys(PRINT, 3).of([b"\x01" * 12]) == [
        b"kv:{c1ba97c2b32fef9b.3.0101010101010101}010101010101010101010101"
    ]


def test_the_order_of_what_else_must_agree_does_not_count() -> None:
    one = msgspec.structs.replace(PRINT, extra=(("a", "1"), ("b", "2")))
    two = msgspec.structs.replace(PRINT, extra=(("b", "2"), ("a", "1")))
    assert one.digest() == two.digest()
    assert one.differences(two) == []


def test_ranks_have_keys_of_their_own_below_one_prefix() -> None:
    chain = chain_of(2)
    first, second = BlockKeys(PRINT, 0), BlockKeys(PRINT, 1)
    keys = first.of(chain) + second.of(chain)
    assert len(set(keys)) == 4
    assert all(key.startswith(first.prefix.encode()) for key in keys)


def test_the_longest_hash_fits_into_a_key() -> None:
    key = BlockKeys(PRINT, 1 << 20).of([b"\xff" * HASH_BYTES_MAX])[0]
    assert len(key) <= Limits().key_bytes_max


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockKeys(PRINT, -1), "rank = -1: must be a whole number from 0"),
        (lambda: BlockKeys(PRINT, True), "rank = True"),
        (lambda: BlockKeys(PRINT, 0, 0), "blocks_per_group = 0: must be a whole number from 1"),
        (lambda: BlockKeys(PRINT).of([b""]), "block hash: 0 bytes, must be 1 to 128"),
        (lambda: BlockKeys(PRINT).of([b"x" * 129]), "block hash: 129 bytes"),
        (lambda: BlockKeys(PRINT).of(["x"]), "block hash: must be bytes, not str"),  # type: ignore[list-item]
        (lambda: BlockKeys(PRINT).of([b"x"], 0, 2), "blocks 0 to 2: the chain has 1"),
        (lambda: BlockKeys(PRINT).of([b"x"], -1), "blocks -1 to 1"),
        (lambda: BlockKeys(PRINT, 0, 2).of_group(b"x", [b"x"] * 3), "limit blocks_per_group = 2"),
        (lambda: BlockKeys(msgspec.structs.replace(PRINT, model="")), "fingerprint: .*model"),
        (lambda: BlockKeys(msgspec.structs.replace(PRINT, block_tokens=0)), "block_tokens"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_its_limit(call: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()  # type: ignore[operator]


def test_an_empty_part_has_no_keys() -> None:
    assert BlockKeys(PRINT).of([]) == []
    assert BlockKeys(PRINT).of(chain_of(5), 3, 3) == []
