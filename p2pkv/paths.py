"""By which path the bytes of large values travel between a client and a node. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Ability(IntEnum):
    """What a process can do by UCX."""

    NONE = 0
    TCP = 1
    """One-sided access is emulated in software: slower than a plain socket."""
    RDMA = 2


class Choice(NamedTuple):
    """A path and the reason for it, in words. ``path``: shm, ucx, tcp, zmq, or "" for none."""

    path: str
    why: str


def choose(wanted: str, same_memory: bool, here: Ability, there: Ability) -> Choice:
    """The path that ``ClientConfig.path = wanted`` means.

    ``same_memory``: the node's arena can be mapped. ``here`` and ``there`` are the abilities of
    client and node.
    """
    if wanted == "ucx":
        return _forced_ucx(here, there)
    if wanted in ("tcp", "zmq"):
        return Choice(wanted, f"path = {wanted!r}")
    if same_memory:
        return Choice("shm", "the node is on this host and its memory can be mapped")
    if here is there is Ability.RDMA:
        return Choice("ucx", "RDMA on both sides")
    lacking = [name for name, has in (("here", here), ("at the node", there)) if has < Ability.RDMA]
    return Choice("tcp", f"another host's memory, and no RDMA {' and '.join(lacking)}")


def _forced_ucx(here: Ability, there: Ability) -> Choice:
    if here is Ability.NONE:
        return Choice("", "path = 'ucx', but UCX cannot be used here (see `p2pkv doctor`)")
    if there is Ability.NONE:
        return Choice("", "path = 'ucx', but the node offers no UCX (its configuration: ucx)")
    slow = Ability.TCP in (here, there)
    return Choice("ucx", "path = 'ucx'" + (", without RDMA: slower than tcp" if slow else ""))


__all__ = ["Ability", "Choice", "choose"]
