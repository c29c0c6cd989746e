"""p2pkv behind LMCache, both ways in which LMCache runs.

``P2PKVL2Adapter`` is a second level for its server::

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "p2pkv.adapters.lmcache",
        "class_name": "P2PKVL2Adapter", "adapter_params": {}}'

``P2PKVConnectorAdapter`` makes the remote connector of an LMCache engine inside a process.
LMCache itself is imported with these classes only.
"""

from __future__ import annotations

from typing import Any

_FOUND_IN = {
    "P2PKVConnector": "p2pkv.adapters.lmcache.connector",
    "P2PKVConnectorAdapter": "p2pkv.adapters.lmcache.connector",
    "P2PKVL2Adapter": "p2pkv.adapters.lmcache.l2",
}


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FOUND_IN[name]), name)


__all__ = ["P2PKVConnector", "P2PKVConnectorAdapter", "P2PKVL2Adapter"]
