"""Rumors on their way: each is passed on a few times, then dropped. Pure."""

from __future__ import annotations

from p2pkv.swim_messages import Rumor
from p2pkv.types import NodeId


class Rumors:
    """The newest rumor of each node that this node still passes on, least often told first.

    At most one per node of the cluster is kept, so it needs no bound of its own.
    """

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: dict[NodeId, tuple[Rumor, int]] = {}

    def __len__(self) -> int:
        return len(self._told)

    def put(self, rumor: Rumor) -> None:
        """Pass it on, instead of what was passed on of this node before."""
        self._told[rumor.member.node] = (rumor, 0)

    def drop(self, node: NodeId) -> None:
        self._told.pop(node, None)

    def take(self, count: int, times_max: int) -> list[Rumor]:
        """At most ``count``, which counts as telling each once; after ``times_max`` it is gone."""
        if not self._told:
            return []
        chosen = sorted(self._told.values(), key=lambda told: told[1])[:count]
        for rumor, times in chosen:
            if times + 1 < times_max:
                self._told[rumor.member.node] = (rumor, times + 1)
            else:
                del self._told[rumor.member.node]
        return [rumor for rumor, _ in chosen]
