"""How much of a prefix can be used when several pools must have it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


class Wanted(NamedTuple):
    """A pool beside the one of keys and values, and which of its pages a prefix needs.

    ``all_pages``: every one. ``trailing_pages``: the last ``trailing`` ones. Any other policy does
    not limit the prefix.
    """

    name: str
    policy: str
    trailing: int = 1


class Hits(NamedTuple):
    """In pages."""

    usable: int
    """The longest prefix that all pools can serve."""
    kv: int
    pools: dict[str, int]
    """For each pool the longest prefix that it could serve."""
    restorable: Sequence[int]
    """Every length that all pools can serve: of windows there may be gaps between."""


NOTHING = Hits(0, 0, {}, ())


def fold(kv: Sequence[bool], there: Mapping[str, Sequence[bool]], wanted: Sequence[Wanted]) -> Hits:
    """From whether each page is there, by pool; a pool that is not known has none."""
    pages = leading(kv)
    lengths = set(range(1, pages + 1))
    pools = {}
    for pool in wanted:
        found = there.get(pool.name, (False,) * len(kv))
        possible = served(found[:pages], pool)
        if possible is None:
            continue
        pools[pool.name] = max(possible, default=0)
        lengths &= possible
    return Hits(max(lengths, default=0), pages, pools, sorted(lengths))


def served(there: Sequence[bool], pool: Wanted) -> set[int] | None:
    """The lengths of prefixes that a pool can serve; None: it does not matter."""
    if pool.policy == ALL_PAGES:
        return set(range(1, leading(there) + 1))
    if pool.policy != TRAILING_PAGES:
        return None
    need, run, lengths = max(1, pool.trailing), 0, set()
    for length, is_there in enumerate(there, 1):
        run = run + 1 if is_there else 0
        if run >= min(need, length):
            lengths.add(length)
    return lengths


def whole(flags: Sequence[bool], each: int) -> list[bool]:
    """For pages that are stored as so many values: whether all of them are there."""
    return [all(flags[i : i + each]) for i in range(0, len(flags), each)]


def leading(there: Sequence[bool]) -> int:
    """How many are there from the start."""
    return next((i for i, is_there in enumerate(there) if not is_there), len(there))


__all__ = ["NOTHING", "Hits", "Wanted", "fold", "leading", "served", "whole"]
