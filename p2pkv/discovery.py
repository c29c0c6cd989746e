"""Finding a first node: from seeds, or from the node records in etcd."""

from __future__ import annotations

import asyncio
import threading

from p2pkv.config import ClientConfig
from p2pkv.errors import AuthorityUnavailable, P2PKVError


async def find(config: ClientConfig, timeout_s: float) -> list[str]:
    """Control endpoints of nodes; empty if none are known at the moment."""
    if config.etcd is None:
        return list(config.seeds)
    from p2pkv.authority import discover

    try:
        view = await asyncio.wait_for(discover(config.etcd, config.cluster), timeout_s)
    except (AuthorityUnavailable, TimeoutError):
        return []
    return [record.control[0] for record in view.nodes.values() if record.control]


def find_blocking(config: ClientConfig, timeout_s: float) -> list[str]:
    """The same for callers without an event loop, also from inside of somebody else's loop."""
    if config.etcd is None:
        return list(config.seeds)
    found: list[str] = []
    failures: list[P2PKVError] = []

    def run() -> None:
        try:
            found.extend(asyncio.run(find(config, timeout_s)))
        except P2PKVError as e:
            failures.append(e)

    thread = threading.Thread(target=run, name="p2pkv-discovery", daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0)
    if failures:
        raise failures[0]
    return found
