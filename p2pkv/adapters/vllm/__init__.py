"""p2pkv as vLLM's external KV cache.

``P2PKVConnector`` is what vLLM is told to use::

    --kv-transfer-config '{"kv_connector": "P2PKVConnector",
                           "kv_connector_module_path": "p2pkv.adapters.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

It stands on two halves that know nothing of vLLM's classes: ``scheduling`` decides which blocks
are loaded and saved, ``working`` moves them. ``P2PKVTier`` is a tier below vLLM's own offload to
host memory, on ``tiering``. vLLM itself is imported with these two classes only.
"""

from __future__ import annotations

from typing import Any

_FOUND_IN = {
    "P2PKVConnector": "p2pkv.adapters.vllm.connector",
    "P2PKVTier": "p2pkv.adapters.vllm.tier",
}


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FOUND_IN[name]), name)


__all__ = ["P2PKVConnector", "P2PKVTier"]
