"""Keys of LMCache's chunks. Pure.

LMCache names a chunk by model, rank, a chained hash of its tokens, and a salt. Which chunks follow
each other it does not say, so each has a place of its own.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

KEY_BYTES_MAX: Final = 1024
_NO_TAG = str.maketrans({"{": "%7B", "}": "%7D"})
"""What stands in braces would decide the place of a key, and so that of all keys of a model."""


class ObjectNames:
    """For LMCache's server: an ObjectKey's key."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"lmc-l2:{namespace}/"

    def of(self, key: Any) -> bytes:
        return _bounded(
            f"{self.prefix}{key.model_name}@{key.kv_rank:x}@{key.object_group_id:x}"
            f"@{key.cache_salt}@{key.chunk_hash.hex()}"
        )


class EngineNames:
    """For LMCache in a process: a CacheEngineKey's key.

    How bytes are encoded is part of it: nobody reads what he could not decode.
    """

    def __init__(self, namespace: str, serde: str, with_header: bool) -> None:
        encoding = f"{serde}+header" if with_header else serde
        self.prefix = f"lmc:{namespace}/{encoding}/"

    def of(self, key: Any) -> bytes:
        return _bounded(self.prefix + key.to_string())


def _bounded(name: str) -> bytes:
    data = name.translate(_NO_TAG).encode()
    if len(data) <= KEY_BYTES_MAX:
        return data
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[: KEY_BYTES_MAX - len(digest)] + digest


__all__ = ["EngineNames", "ObjectNames"]
