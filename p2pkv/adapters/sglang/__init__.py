"""p2pkv as the storage behind SGLang's HiCache.

``P2PKVStorage`` is what SGLang is told to load::

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "p2pkv", "interface_v1": 1,
        "module_path": "p2pkv.adapters.sglang", "class_name": "P2PKVStorage"}'

It stands on ``identity``, which names pages, and on ``pages``, which finds their bytes; both know
nothing of SGLang's classes. SGLang itself is imported with the class only.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "P2PKVStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from p2pkv.adapters.sglang.storage import P2PKVStorage

    return P2PKVStorage


__all__ = ["P2PKVStorage"]
