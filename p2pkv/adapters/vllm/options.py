"""What vLLM's ``kv_connector_extra_config`` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta as Limit

from p2pkv.adapters.options import ClusterOptions
from p2pkv.config import Duration, Positive, build

Count = Annotated[int, Limit(ge=1, le=1 << 20)]


class Options(ClusterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds, sizes in bytes."""

    model: str = ""
    """Name of the model for the cache; empty: the engine's, with its revision. To be set where
    engines have the same model under different paths, and changed when its weights change."""
    namespace: str = ""
    """Engines with different ones share nothing."""
    fingerprint: str = ""
    """If given: the engine does not start with another one. The log tells it."""
    blocks_per_group: Count = 64
    """Consecutive blocks that lie on one node."""
    load_blocks_min: Count = 1
    """Shorter hits are computed instead of loaded."""
    save_generated: bool = True
    """Also blocks of generated tokens, not of prompts alone."""
    ttl_s: Positive | None = None
    """After which blocks expire; None: never."""
    lookup_wait_s: Duration = 0.002
    """So long a step of the scheduler waits for a lookup; then it goes on with other requests."""
    handover_timeout_s: Duration = 2.0
    """So long a consumer waits for the blocks that a producer said it was saving."""
    saving_share_max: Annotated[float, Limit(gt=0, le=0.9)] = 0.25
    """At most this share of the engine's blocks is held for saves that are under way."""
    staging_bytes: Annotated[int, Limit(ge=1)] = 128 << 20
    """Host memory of each worker through which blocks go, half of it for loads."""
    shutdown_timeout_s: Duration = 5.0
    """For saves that are under way when the engine ends."""


def read(extra: Mapping[str, Any]) -> Options:
    """Raises ConfigError, which names field, value and what is allowed."""
    return build(Options, extra)


__all__ = ["Options", "read"]
