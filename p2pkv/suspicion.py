"""How long to wait before a suspect counts as dead, and how far to trust oneself. Pure.

Both are from Lifeguard (Dadgar, Phillips, Currey: "Lifeguard: Local Health Awareness for More
Accurate Failure Detection", 2018), which cures SWIM of blaming healthy members when it is the
accuser that is slow.
"""

from __future__ import annotations

from math import ceil, log, log10

from p2pkv.types import NodeId

CONFIRMATIONS = 2
"""Further accusers after whom a suspicion is as short as it gets."""


def retransmits(multiplier: int, members: int) -> int:
    """How often one node passes a rumor on: ``multiplier * ceil(log10(members + 1))``."""
    return multiplier * ceil(log10(members + 1))


def shortest_ns(multiplier: int, members: int, probe_interval_ns: int) -> int:
    """``multiplier * max(1, log10(members)) * probe_interval``."""
    return round(multiplier * max(1.0, log10(max(1, members))) * probe_interval_ns)


class Suspicion:
    """A suspicion and who shares it. It gets shorter, on a log scale, with each further accuser.

    With one accuser it lasts ``longest_ns``; with ``CONFIRMATIONS`` more, or all that there can be
    in a small cluster, ``shortest_ns``.
    """

    __slots__ = (
        "_accusers",
        "_longest_ns",
        "_possible",
        "_shortest_ns",
        "_started_ns",
        "call_ns",
    )

    def __init__(
        self, by: NodeId, now: int, shortest_ns: int, longest_ns: int, members: int
    ) -> None:
        self._accusers = {by}
        self._started_ns = now
        self._shortest_ns = shortest_ns
        self._longest_ns = longest_ns
        self._possible = max(0, min(CONFIRMATIONS, members - 2))
        self.call_ns = now + shortest_ns // 2
        """When the suspect is to be told (again) by this node itself."""

    def confirm(self, by: NodeId) -> bool:
        """Another accuser. False: it was one already, or enough are known."""
        if by in self._accusers or len(self._accusers) > self._possible:
            return False
        self._accusers.add(by)
        return True

    def extend(self, by_ns: int) -> None:
        """Time that does not count, since this node could not have heard a refutation."""
        self._started_ns += by_ns
        self.call_ns += by_ns

    @property
    def ends_ns(self) -> int:
        return self._started_ns + self._duration_ns()

    def _duration_ns(self) -> int:
        further = len(self._accusers) - 1
        if further >= self._possible:
            return self._shortest_ns
        shortened = log(further + 1) / log(self._possible + 1)
        return round(self._longest_ns - shortened * (self._longest_ns - self._shortest_ns))


class Awareness:
    """This node's doubt in itself: 0 (well) to ``score_max``. It waits the longer for others."""

    __slots__ = ("_max", "score")

    def __init__(self, score_max: int) -> None:
        self._max = score_max
        self.score = 0

    def worse(self, by: int = 1) -> None:
        self.score = min(self._max, self.score + by)

    def better(self) -> None:
        self.score = max(0, self.score - 1)

    def scale(self, duration_ns: int) -> int:
        return duration_ns * (self.score + 1)
