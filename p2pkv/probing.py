"""Whom a node probes next, what it waits for, and what it has promised to ask for others. Pure."""

from __future__ import annotations

from random import Random

from p2pkv.roster import PRESENT, Entry, Roster
from p2pkv.types import Member

RELAYS_MAX = 256
"""Probes for others that one node has under way; more requests are not answered."""


class Probe:
    """A ping that waits for its answer."""

    __slots__ = ("asked", "ends_ns", "indirect_ns", "nacks", "target")

    def __init__(self, target: Member, indirect_ns: int, ends_ns: int) -> None:
        self.target = target
        self.indirect_ns: int | None = indirect_ns
        """When others are asked to probe. None: they were."""
        self.ends_ns = ends_ns
        self.asked = 0
        """Members that were asked; each should answer something."""
        self.nacks = 0

    @property
    def due_ns(self) -> int:
        return self.ends_ns if self.indirect_ns is None else self.indirect_ns


class Relay:
    """A ping on behalf of another member."""

    __slots__ = ("asker", "ends_ns", "seq")

    def __init__(self, asker: Member, seq: int, ends_ns: int) -> None:
        self.asker = asker
        self.seq = seq
        """Of the asker's probe."""
        self.ends_ns = ends_ns


class Probing:
    """Probes and relays under way by their sequence number, and the order of the next targets.

    Each present member comes once in a shuffled round, which bounds the time to the first probe of
    one that died.
    """

    def __init__(self, roster: Roster, rng: Random) -> None:
        self._roster = roster
        self._rng = rng
        self._round: list[Member] = []
        self._seq = 0
        self.probes: dict[int, Probe] = {}
        self.relays: dict[int, Relay] = {}

    def next_target(self) -> Entry | None:
        """The next member to probe; None: nobody is there."""
        for _ in range(2):
            while self._round:
                entry = self._roster.find(self._round.pop())
                if entry is not None and entry.status in PRESENT:
                    return entry
            self._round = [entry.member for entry in self._roster.those(PRESENT)]
            self._rng.shuffle(self._round)
        return None

    def begin(self, probe: Probe) -> int:
        self._seq += 1
        self.probes[self._seq] = probe
        return self._seq

    def relay(self, relay: Relay) -> int | None:
        """Its number; None: too many are under way."""
        if len(self.relays) >= RELAYS_MAX:
            return None
        self._seq += 1
        self.relays[self._seq] = relay
        return self._seq

    def is_probed(self, member: Member) -> bool:
        return any(probe.target == member for probe in self.probes.values())

    def abandon(self) -> None:
        """This node was away: who answered meanwhile it cannot know."""
        self.probes.clear()
        self.relays.clear()

    def due(self, now: int) -> tuple[list[tuple[int, Probe]], list[tuple[int, Relay]]]:
        probes = [(seq, probe) for seq, probe in self.probes.items() if probe.due_ns <= now]
        relays = [(seq, relay) for seq, relay in self.relays.items() if relay.ends_ns <= now]
        return probes, relays

    def next_due_ns(self) -> int | None:
        dues = [probe.due_ns for probe in self.probes.values()]
        dues += [relay.ends_ns for relay in self.relays.values()]
        return min(dues, default=None)
