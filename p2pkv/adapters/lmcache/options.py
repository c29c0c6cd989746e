"""What ``adapter_params``, or ``"p2pkv"`` in LMCache's ``extra_config``, may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta as Limit

from p2pkv.adapters.options import ClusterOptions
from p2pkv.config import Positive, build
from p2pkv.errors import ConfigError

Namespace = Annotated[str, Limit(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")]
SECTION = "p2pkv"


class Options(ClusterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds."""

    namespace: Namespace = ""
    """Engines with different ones share nothing. To be changed when a model's weights change."""
    ttl_s: Positive | None = None
    """After which chunks expire; None: never."""
    lock_ttl_s: Positive = 30.0
    """So long a chunk that was looked up is kept from eviction, unless it is unlocked before."""


def read(params: Any) -> Options:
    """Raises ConfigError."""
    if not isinstance(params, Mapping):
        raise ConfigError(f"{SECTION} = {params!r}: must be an object with p2pkv's options")
    return build(Options, params)


__all__ = ["SECTION", "Options", "read"]
