"""Who is there, and what is believed of each: how rumors change it. Pure.

Statuses and incarnations follow SWIM (Das, Gupta, Motivala: "SWIM: Scalable Weakly-consistent
Infection-style Process Group Membership Protocol", 2002). A member is one life of a node: a later
life takes the place of an earlier one, whatever was believed of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from p2pkv.clock import seconds
from p2pkv.config import SwimConfig
from p2pkv.dissemination import Rumors
from p2pkv.suspicion import Suspicion, shortest_ns
from p2pkv.swim_messages import INCARNATION_MAX, MEMBERS_MAX, Digest, Rumor, Status
from p2pkv.types import BootId, Member, NodeId


class Alive(msgspec.Struct, frozen=True):
    """A member is there: newly, or again after it was suspected or taken for dead."""

    member: Member


class Suspect(msgspec.Struct, frozen=True):
    """A member may have died. Alive, Dead or Left follows."""

    member: Member


class Dead(msgspec.Struct, frozen=True):
    """A member did not refute that it is dead, or its node has started anew."""

    member: Member


class Left(msgspec.Struct, frozen=True):
    """A member said good-bye."""

    member: Member


Event = Alive | Suspect | Dead | Left
_EVENTS: dict[Status, type[Event]] = {
    Status.ALIVE: Alive,
    Status.SUSPECT: Suspect,
    Status.DEAD: Dead,
    Status.LEFT: Left,
}

PRESENT = (Status.ALIVE, Status.SUSPECT)


class Entry:
    """What is believed of one member. Times are this node's monotonic nanoseconds."""

    __slots__ = (
        "address",
        "by",
        "digest",
        "incarnation",
        "member",
        "since_ns",
        "status",
    )

    def __init__(self, rumor: Rumor, now: int) -> None:
        self.member = rumor.member
        self.address = rumor.address
        self.status = rumor.status
        self.incarnation = rumor.incarnation
        self.since_ns = now
        """When its status changed."""
        self.by = NodeId("")
        """The last that was heard to suspect it."""
        self.digest = Digest()

    def rumor(self) -> Rumor:
        """What is believed, for others."""
        return Rumor(self.member, self.status, self.incarnation, self.address, self.by)


class Roster:
    """The other members. Changes are put into ``events``, and on their way to others."""

    def __init__(self, config: SwimConfig, me: Member) -> None:
        self.me = me
        self.rumors = Rumors()
        self.events: list[Event] = []
        self.entries: dict[NodeId, Entry] = {}
        self.suspicions: dict[NodeId, Suspicion] = {}
        """Of those that are suspected."""
        self.present = 0
        """Others that are alive or suspected."""
        self._registered: dict[NodeId, BootId] = {}
        self._suspicion_mult = config.suspicion_mult
        self._suspicion_max_mult = config.suspicion_max_mult
        self._probe_interval_ns = seconds(config.probe_interval_s)
        self._dead_keep_ns = seconds(config.dead_keep_s)

    @property
    def size(self) -> int:
        """Members that are present, this one included."""
        return self.present + 1

    def find(self, member: Member) -> Entry | None:
        entry = self.entries.get(member.node)
        return entry if entry is not None and entry.member == member else None

    # -- who is registered

    def register(self, addresses: Mapping[Member, str], now: int) -> None:
        """These others have a node record: who was not known is alive until shown otherwise."""
        self._registered = {member.node: member.boot for member in addresses}
        for member, address in addresses.items():
            entry = self.entries.get(member.node)
            if entry is None or entry.member.boot < member.boot:
                self.hear(Rumor(member, Status.ALIVE, 0, address), now)

    def is_registered(self, member: Member) -> bool:
        return self._registered.get(member.node) == member.boot

    def forget(self, now: int) -> None:
        """Drop those that died or left long ago and are not registered any more."""
        for entry in list(self.entries.values()):
            if entry.status in PRESENT or self.is_registered(entry.member):
                continue
            if now - entry.since_ns >= self._dead_keep_ns:
                del self.entries[entry.member.node]
                self.rumors.drop(entry.member.node)

    # -- rumors

    def hear(self, rumor: Rumor, now: int) -> bool:
        """Believe a rumor of another member, if it is news. Returns whether it was."""
        entry = self.entries.get(rumor.member.node)
        if entry is None or entry.member.boot < rumor.member.boot:
            return self._meet(entry, rumor, now)
        if entry.member != rumor.member:
            return False
        if rumor.status == entry.status == Status.SUSPECT:
            return self._suspect_again(entry, rumor, now)
        if not self._is_news(entry, rumor):
            return False
        entry.incarnation = rumor.incarnation
        entry.address = rumor.address or entry.address
        self._change(entry, rumor.status, rumor.by, now)
        return True

    @staticmethod
    def _is_news(entry: Entry, rumor: Rumor) -> bool:
        """Of one incarnation the worse rumor counts; only a higher one makes alive again."""
        if rumor.status == Status.ALIVE:
            return rumor.incarnation > entry.incarnation and entry.status != Status.LEFT
        return rumor.incarnation >= entry.incarnation and rumor.status > entry.status

    def _meet(self, former: Entry | None, rumor: Rumor, now: int) -> bool:
        if former is None and (rumor.status > Status.SUSPECT or len(self.entries) >= MEMBERS_MAX):
            return False
        if former is not None and former.status in PRESENT:
            self._change(former, Status.DEAD, NodeId(""), now)
        entry = self.entries[rumor.member.node] = Entry(rumor, now)
        entry.status = Status.ALIVE
        self.present += 1
        self.events.append(Alive(entry.member))
        self.rumors.put(entry.rumor())
        if rumor.status != Status.ALIVE:
            self._change(entry, rumor.status, rumor.by, now)
        return True

    def _suspect_again(self, entry: Entry, rumor: Rumor, now: int) -> bool:
        """Somebody else suspects it too, which shortens its time; or it refuted in between."""
        if rumor.incarnation > entry.incarnation:
            entry.incarnation = rumor.incarnation
            self._change(entry, Status.SUSPECT, rumor.by, now)
            return True
        suspicion = self.suspicions[entry.member.node]
        if rumor.incarnation < entry.incarnation or not suspicion.confirm(rumor.by):
            return False
        entry.by = rumor.by
        self.rumors.put(entry.rumor())
        return True

    def _change(self, entry: Entry, status: Status, by: NodeId, now: int) -> None:
        if entry.status != status:
            self.present += (status in PRESENT) - (entry.status in PRESENT)
            entry.status, entry.since_ns = status, now
            self.events.append(_EVENTS[status](entry.member))
        self.suspicions.pop(entry.member.node, None)
        if status == Status.SUSPECT:
            self.suspicions[entry.member.node] = self._suspicion(by, now)
        entry.by = by
        self.rumors.put(entry.rumor())

    def _suspicion(self, by: NodeId, now: int) -> Suspicion:
        shortest = shortest_ns(self._suspicion_mult, self.size, self._probe_interval_ns)
        return Suspicion(by, now, shortest, shortest * self._suspicion_max_mult, self.size)

    # -- what follows from this node's own experience

    def suspect(self, entry: Entry, now: int) -> None:
        """It did not answer this node, or its connection broke."""
        accusation = Rumor(
            entry.member, Status.SUSPECT, entry.incarnation, entry.address, self.me.node
        )
        self.hear(accusation, now)

    def bury(self, now: int) -> None:
        """Those that had their time to refute are dead."""
        for node in [n for n, suspicion in self.suspicions.items() if suspicion.ends_ns <= now]:
            self._change(self.entries[node], Status.DEAD, NodeId(""), now)

    def excuse(self, by_ns: int) -> None:
        """This node was away for so long: nobody's time to refute went by."""
        for suspicion in self.suspicions.values():
            suspicion.extend(by_ns)

    def to_be_called(self, now: int, again_after_ns: int) -> list[Entry]:
        """Suspects that had half of their time: told once more, they may still refute."""
        due = [node for node, suspicion in self.suspicions.items() if suspicion.call_ns <= now]
        for node in due:
            self.suspicions[node].call_ns = now + again_after_ns
        return [self.entries[node] for node in due]

    def next_due_ns(self) -> int | None:
        """When ``bury`` or ``to_be_called`` has something to do."""
        suspicions = self.suspicions.values()
        return min((min(s.ends_ns, s.call_ns) for s in suspicions), default=None)

    def believe(self, member: Member, digest: Digest) -> None:
        """A digest of a member, which may have come by way of others."""
        entry = self.find(member)
        if entry is not None and digest.serial > entry.digest.serial:
            entry.digest = digest

    def those(self, statuses: Iterable[Status]) -> list[Entry]:
        wanted = set(statuses)
        return [entry for entry in self.entries.values() if entry.status in wanted]


def refuted(rumor: Rumor, incarnation: int) -> int | None:
    """The incarnation that refutes a rumor about oneself; None: there is nothing to refute."""
    if rumor.incarnation < incarnation or rumor.incarnation == INCARNATION_MAX:
        return None
    if rumor.status == Status.ALIVE and rumor.incarnation == incarnation:
        return None
    return rumor.incarnation + 1
