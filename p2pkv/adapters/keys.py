"""Names of KV blocks: who may share them, and which lie together. Pure.

An engine names a block by a chained hash of all tokens up to its end, so equal names mean equal
prefixes. Two things are missing in that name. Blocks of another model, dtype or layout must not be
found under it: the *fingerprint* keeps them apart. And neighbours scatter over all nodes, since
hashes know no neighbourhood: so the blocks of a run get one *tag*, the part of a key that decides
its place (see ``ring.route``).

::

    kv:{5f1d0c9a3b7e2d64.0.91ab03f2c4d5e687}4c0e…   key of a block
        fingerprint      | first hash of its run   its own hash, whole
                         rank

A prefix of 128 blocks has two runs of 64, hence two owners; different runs, and the ranks of one
run, spread over the cluster. All blocks of a run stand at multiples of ``blocks_per_group`` from
the start of the sequence, so everybody who knows the prefix finds the same tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta as Limit

from p2pkv.errors import InvalidArgument

PREFIX = "kv:"
TAG_HASH_BYTES = 8
"""Of the hash that starts a run: enough to spread runs; the whole hash of each block is in its
key."""
HASH_BYTES_MAX = 128
FORMAT = 1
"""Rises when keys of the same blocks become others."""

Text = Annotated[str, Limit(min_length=1, max_length=512)]
Count = Annotated[int, Limit(ge=1, le=1 << 20)]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two engines must have in common for one to read the other's blocks."""

    model: Text
    """Its name with its revision."""
    dtype: Text
    """Of the cache's elements."""
    block_tokens: Count
    """Tokens in a block."""
    layout: Text
    """How the bytes of a block are ordered, e.g. ``page_first``, with the engine's name if only
    that engine orders them so."""
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    context_parallel: Count = 1
    hash_seed: str = ""
    """Of the engine's block hashes: with another seed the same prefix has other hashes."""
    extra: tuple[tuple[str, str], ...] = ()
    """Whatever else must agree, as names and values; their order does not count."""

    def digest(self) -> str:
        """16 hexadecimal digits, the same on every machine and with every version of Python."""
        fields = msgspec.structs.asdict(self)
        fields["extra"] = sorted(self.extra)
        return xxhash.xxh3_64_hexdigest(_encoder.encode([FORMAT, *fields.values()]))

    def differences(self, other: Fingerprint) -> list[str]:
        """The fields in which another differs, for people: why nothing of it is found."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        mine["extra"], theirs["extra"] = sorted(self.extra), sorted(other.extra)
        return [f"{n}: {mine[n]!r}, not {theirs[n]!r}" for n in mine if mine[n] != theirs[n]]


_encoder = msgspec.msgpack.Encoder()


class BlockKeys:
    """The keys of one rank's blocks.

    ``blocks_per_group``: the blocks of a run that lie together. Raises InvalidArgument.
    """

    __slots__ = ("_head", "_tagged", "blocks_per_group", "digest", "rank")

    def __init__(self, fingerprint: Fingerprint, rank: int = 0, blocks_per_group: int = 64) -> None:
        _check_fingerprint(fingerprint)
        self.rank = _at_least("rank", rank, 0)
        self.blocks_per_group = _at_least("blocks_per_group", blocks_per_group, 1)
        self.digest = fingerprint.digest()
        self._head = f"{PREFIX}{{{self.digest}."
        self._tagged = f"{self._head}{rank}."

    @property
    def prefix(self) -> str:
        """That of all keys of this fingerprint, of every rank: to scan them, or delete them."""
        return self._head

    def of(self, chain: Sequence[bytes], start: int = 0, stop: int | None = None) -> list[bytes]:
        """The keys of blocks ``start`` to ``stop`` (None: the last) of a sequence.

        ``chain``: the hashes of the sequence's blocks from its very first on. Raises
        InvalidArgument for a hash that is empty or longer than 128 bytes, and for a range that is
        not within the chain.
        """
        stop = len(chain) if stop is None else stop
        if not 0 <= start <= stop <= len(chain):
            raise InvalidArgument(f"blocks {start} to {stop}: the chain has {len(chain)}")
        group, keys = self.blocks_per_group, list[bytes]()
        first = start - start % group
        for run in range(first, stop, group):
            head = self._head_of(chain[run])
            for block in chain[max(run, start) : min(run + group, stop)]:
                keys.append(head + _digits(block))
        return keys

    def of_group(self, first: bytes, blocks: Sequence[bytes]) -> list[bytes]:
        """The keys of blocks of one run, for who knows the hash of the run's ``first`` block."""
        if len(blocks) > self.blocks_per_group:
            raise InvalidArgument(
                f"blocks: {len(blocks)}, limit blocks_per_group = {self.blocks_per_group}"
            )
        head = self._head_of(first)
        return [head + _digits(block) for block in blocks]

    def _head_of(self, first: bytes) -> bytes:
        return f"{self._tagged}{_checked(first)[:TAG_HASH_BYTES].hex()}}}".encode()


def _digits(block: bytes) -> bytes:
    return _checked(block).hex().encode()


def _checked(block: Any) -> bytes:
    if not isinstance(block, bytes):
        raise InvalidArgument(f"block hash: must be bytes, not {type(block).__name__}")
    if not 0 < len(block) <= HASH_BYTES_MAX:
        raise InvalidArgument(f"block hash: {len(block)} bytes, must be 1 to {HASH_BYTES_MAX}")
    return block


def _check_fingerprint(fingerprint: Fingerprint) -> None:
    """Its constructor checks nothing; limits stand in the types."""
    try:
        msgspec.convert(msgspec.to_builtins(fingerprint), Fingerprint)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"fingerprint: {e}") from None


def _at_least(name: str, value: Any, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 1 << 20:
        raise InvalidArgument(f"{name} = {value!r}: must be a whole number from {low} to {1 << 20}")
    return value


__all__ = ["BlockKeys", "Fingerprint"]
