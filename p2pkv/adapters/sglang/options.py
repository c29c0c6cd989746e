"""What ``"p2pkv"`` in SGLang's storage configuration may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta as Limit

from p2pkv.adapters.options import ClusterOptions
from p2pkv.config import Positive, build
from p2pkv.errors import ConfigError

SECTION = "p2pkv"
ZERO_COPY = "interface_v1"
BATCH_PAGES = 128
"""SGLang asks for so many pages at a time, counted from where it begins."""


class Options(ClusterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds."""

    model: str = ""
    """Name of the model for the cache; empty: SGLang's. To be set where engines have the same model
    under different paths, and changed when its weights change."""
    namespace: str = ""
    """Engines with different ones share nothing."""
    blocks_per_group: Annotated[int, Limit(ge=1, le=BATCH_PAGES)] = 1
    """Consecutive pages that lie on one node. Over 1, SGLang's own option
    ``hicache_storage_pass_prefix_keys`` must be true, and this must divide 128."""
    ttl_s: Positive | None = None
    """After which pages expire; None: never."""


def read(extra: Mapping[str, Any]) -> tuple[Options, bool]:
    """The options, and whether SGLang uses the zero-copy interface. Raises ConfigError."""
    section = extra.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION} = {section!r}: must be an object with p2pkv's options")
    options = build(Options, section)
    zero_copy = bool(extra.get(ZERO_COPY, 0))
    if BATCH_PAGES % options.blocks_per_group:
        raise ConfigError(
            f"blocks_per_group = {options.blocks_per_group}: must divide {BATCH_PAGES}"
        )
    if options.blocks_per_group > 1 and not zero_copy:
        raise ConfigError(
            f"blocks_per_group = {options.blocks_per_group}: must be 1 without {ZERO_COPY} = 1, "
            "since the other interface does not say where in a sequence a page stands"
        )
    return options, zero_copy


__all__ = ["Options", "read"]
