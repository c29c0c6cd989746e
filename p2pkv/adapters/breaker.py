"""Circuit breakers: who has failed several times is not asked for a while. Pure.

The pattern is Michael Nygard's ("Release It!", 2007). A call of an engine is never the one that
finds out whether a peer is back: probes are made beside the calls, and until one has succeeded
every call is answered at once.

::

    CLOSED --- failures_max failures in a row ---> OPEN --- its time is over ---> PROBING
       ^                                            ^                                |
       |                                            +----- the probe failed ---------+
       +--------------------------- it succeeded ------------------------------------+
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from random import Random
from typing import Generic, NamedTuple, TypeVar

from p2pkv.clock import SECOND_NS

P = TypeVar("P", bound=Hashable)

SHIFT_MAX = 16


class State(enum.Enum):
    CLOSED = enum.auto()
    OPEN = enum.auto()
    PROBING = enum.auto()


class BreakerPolicy(NamedTuple):
    """When breakers open, and for how long."""

    failures_max: int = 2
    """Failures in a row that open one."""
    open_first_ns: int = SECOND_NS // 2
    """Until the first probe; doubled after each that fails."""
    open_last_ns: int = 10 * SECOND_NS
    probe_ns: int = SECOND_NS
    """A probe that has not ended after so long has failed."""


class Breaker:
    """One peer. ``now`` is monotonic nanoseconds."""

    __slots__ = ("failures", "policy", "reason", "rounds", "since", "state", "until")

    def __init__(self, policy: BreakerPolicy) -> None:
        self.policy = policy
        self.state = State.CLOSED
        self.failures = 0
        self.rounds = 0
        """Probes that failed since it opened."""
        self.since = 0
        """When it opened."""
        self.until = 0
        """Open: when to probe. Probing: when the probe has failed."""
        self.reason = ""

    def failed(self, reason: str, now: int, random: Random) -> bool:
        """A call has failed. Tells whether that opened the breaker.

        While it is open nothing changes: the call was under way before.
        """
        if self.state is not State.CLOSED:
            return False
        self.failures += 1
        self.reason = reason
        if self.failures < self.policy.failures_max:
            return False
        self.since = now
        self._open(now, random)
        return True

    def probe(self, now: int) -> bool:
        """Whether to probe now; then ``succeeded`` or ``probe_failed`` is to follow."""
        if self.state is State.CLOSED or now < self.until:
            return False
        self.state, self.until = State.PROBING, now + self.policy.probe_ns
        return True

    def probe_failed(self, reason: str, now: int, random: Random) -> None:
        self.rounds += 1
        self.reason = reason
        self._open(now, random)

    def _open(self, now: int, random: Random) -> None:
        policy = self.policy
        wait = min(policy.open_last_ns, policy.open_first_ns << min(self.rounds, SHIFT_MAX))
        self.state, self.until = State.OPEN, now + random.randint(wait // 2, wait)


class Trouble(NamedTuple):
    """What is known of a peer that is not asked."""

    reason: str
    since: int
    probes: int


class Breakers(Generic[P]):
    """The peers with which there is trouble; all others are asked without a look here.

    ``peers_max`` bounds how many are kept. A peer that comes on top of that takes the place of the
    one that has been there longest, which is asked again.
    """

    def __init__(self, policy: BreakerPolicy, random: Random, peers_max: int = 1024) -> None:
        self._policy = policy
        self._random = random
        self._peers_max = peers_max
        self._breakers: dict[P, Breaker] = {}
        self._keys: dict[P, bytes] = {}
        self.opened_total = 0

    def __bool__(self) -> bool:
        """Whether there is trouble with anybody."""
        return bool(self._breakers)

    def refuses(self, peer: P) -> bool:
        """Whether the peer is not to be asked."""
        breaker = self._breakers.get(peer)
        return breaker is not None and breaker.state is not State.CLOSED

    def trouble(self, peer: P) -> Trouble | None:
        """Why it is not to be asked; None if it is."""
        breaker = self._breakers.get(peer)
        if breaker is None or breaker.state is State.CLOSED:
            return None
        return Trouble(breaker.reason, breaker.since, breaker.rounds)

    def refused(self) -> int:
        """How many peers are not to be asked."""
        return sum(b.state is not State.CLOSED for b in self._breakers.values())

    def failed(self, peer: P, key: bytes, reason: str, now: int) -> bool:
        """A call has failed, and ``key`` is one by which to probe. Tells whether it opened."""
        breaker = self._breakers.get(peer)
        if breaker is None:
            if len(self._breakers) >= self._peers_max:
                self.succeeded((next(iter(self._breakers)),))
            breaker = self._breakers[peer] = Breaker(self._policy)
        self._keys[peer] = key
        opened = breaker.failed(reason, now, self._random)
        self.opened_total += opened
        return opened

    def succeeded(self, peers: Iterable[P]) -> None:
        """They have answered: there is no trouble with them."""
        for peer in peers:
            self._breakers.pop(peer, None)
            self._keys.pop(peer, None)

    def probes(self, now: int) -> list[tuple[P, bytes]]:
        """Whom to probe now, and by which key."""
        return [(peer, self._keys[peer]) for peer, b in self._breakers.items() if b.probe(now)]

    def probe_failed(self, peer: P, reason: str, now: int) -> None:
        breaker = self._breakers.get(peer)
        if breaker is not None:
            breaker.probe_failed(reason, now, self._random)

    def next_probe(self) -> int | None:
        """When one is due; None if there is nothing to probe."""
        return min((b.until for b in self._breakers.values() if b.state is not State.CLOSED),
                   default=None)  # fmt: skip
