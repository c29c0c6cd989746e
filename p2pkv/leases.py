"""Who may serve reads, and until when: grants between pairs of nodes. Pure.

A primary may answer a read only while every other member of its ack set grants it that (invariant
I7); a new primary serves only when all that it ever granted to older epochs has lapsed (I8). Both
sides are kept per pair of nodes, not per bucket: one beacon claims all buckets at once.

Grants count from the *sending* of the beacon, on the clock of the one who is granted; what was
granted counts from *granting*, on the clock of the one who grants. That is why clocks need not
agree, only run at rates that differ by less than ``RATE_ERROR``.

After: C. Gray, D. Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file
cache consistency", SOSP 1989; the grants by replicas instead of a lock service are those of W. Lin
et al., "PacificA", MSR-TR-2008-25.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from p2pkv.replicated import Beacon, Grant
from p2pkv.types import Member

RATE_ERROR = 0.01
"""Clocks of two nodes may differ in rate by so much, each way (invariant I8's rho)."""
BEACONS_MAX = 16
"""Beacons without an answer that are remembered; older ones grant nothing any more."""

_NEVER = -(1 << 62)


def grace_ns(lease_ns: int) -> int:
    """How long what was granted may be used, on the granting node's clock."""
    return int(lease_ns * (1 + RATE_ERROR) / (1 - RATE_ERROR)) + 1


class Held:
    """What one peer has granted us."""

    __slots__ = ("claims", "refused", "sent", "until_ns")

    def __init__(self) -> None:
        self.until_ns = _NEVER
        self.claims: Mapping[int, int] = {}
        self.refused: frozenset[int] = frozenset()
        self.sent: dict[int, Mapping[int, int]] = {}
        """Claims of the beacons without an answer, by their ``sent_ns``."""


class Given:
    """What we have granted one peer."""

    __slots__ = ("claims", "granted_ns")

    def __init__(self) -> None:
        self.claims: Mapping[int, int] = {}
        self.granted_ns = _NEVER


class Leases:
    """The grants of one node, those it holds and those it gave."""

    def __init__(self, lease_ns: int) -> None:
        self.lease_ns = lease_ns
        self.grace_ns = grace_ns(lease_ns)
        self._held: dict[Member, Held] = {}
        self._given: dict[Member, Given] = {}
        self._lapsing: dict[int, int] = {}
        """By bucket, when something was last granted that its grantee no longer claims."""

    # -- as primary

    def beacon(self, to: Member, claims: Mapping[int, int], now: int) -> Beacon:
        """A beacon that claims these buckets; ``claims`` must not change afterwards."""
        held = self._held.setdefault(to, Held())
        while now in held.sent:
            now -= 1  # on a coarse clock; to count from a little earlier is safe
        held.sent[now] = claims
        while len(held.sent) > BEACONS_MAX:
            del held.sent[next(iter(held.sent))]
        return Beacon(now, dict(claims))

    def take_grant(self, sender: Member, grant: Grant) -> bool:
        """An answer to one of our beacons. False: to none that is known, or it came late."""
        held = self._held.get(sender)
        claims = held.sent.pop(grant.sent_ns, None) if held else None
        if held is None or claims is None or grant.sent_ns + self.lease_ns <= held.until_ns:
            return False
        held.until_ns = grant.sent_ns + self.lease_ns
        held.claims = claims
        held.refused = frozenset(grant.refused)
        for sent_ns in [s for s in held.sent if s < grant.sent_ns]:
            del held.sent[sent_ns]
        return True

    def held_until(self, member: Member, bucket: int, epoch: int) -> int:
        """Until when ``member`` lets us serve the bucket in this epoch."""
        held = self._held.get(member)
        if held is None or held.claims.get(bucket) != epoch or bucket in held.refused:
            return _NEVER
        return held.until_ns

    def heard_ns(self, member: Member) -> int:
        """When the last beacon was sent that ``member`` answered."""
        held = self._held.get(member)
        return _NEVER if held is None else held.until_ns - self.lease_ns

    @property
    def members(self) -> set[Member]:
        """Those who have granted something, or were."""
        return {*self._held, *self._given}

    def forget(self, member: Member) -> None:
        """It is no member any more. What it was granted is remembered."""
        self._held.pop(member, None)
        given = self._given.pop(member, None)
        if given is not None:
            self._note(given.claims, given.granted_ns)

    # -- as one of the others

    def take_beacon(
        self, sender: Member, beacon: Beacon, accept: Callable[[int, int], bool], now: int
    ) -> Grant:
        """Grant what ``accept(bucket, epoch)`` agrees to."""
        refused = [b for b, epoch in beacon.claims.items() if not accept(b, epoch)]
        given = self._given.setdefault(sender, Given())
        if given.claims.keys() != beacon.claims.keys() or refused:
            self._note(given.claims, given.granted_ns)
        barred = set(refused)
        given.claims = {b: e for b, e in beacon.claims.items() if b not in barred}
        given.granted_ns = now
        return Grant(beacon.sent_ns, refused)

    def _note(self, claims: Mapping[int, int], granted_ns: int) -> None:
        lapsing = self._lapsing
        for bucket in claims:
            lapsing[bucket] = max(lapsing.get(bucket, _NEVER), granted_ns)

    def granted_ns(self, bucket: int) -> int:
        """When we last let anybody serve the bucket."""
        latest = self._lapsing.get(bucket, _NEVER)
        for given in self._given.values():
            if bucket in given.claims:
                latest = max(latest, given.granted_ns)
        return latest

    def lapsed(self, bucket: int, now: int) -> bool:
        """Whether nobody can use any more what we granted for the bucket (invariant I8)."""
        return now - self.granted_ns(bucket) > self.grace_ns
