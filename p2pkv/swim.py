"""Who is alive, as far as one node can tell: SWIM with Lifeguard. Pure.

Each node probes one other at a time, in a shuffled round. Who does not answer, nor answers others
that were asked to probe it, is *suspected*; the suspicion spreads as a rumor that rides on the
packets of other probes, and unless its subject refutes it with a higher incarnation in time, it is
taken for dead. The number of packets per node does not grow with the cluster.

Beyond SWIM and Lifeguard:

* A connection that the kernel reports broken is a suspicion at once, and others are asked to probe
  at once. Since each node has a connection to each other, a process that was killed is suspected
  everywhere within milliseconds.
* A packet to one that is suspected, or taken for dead, tells it so first, that it may refute.
* A node that was away (paused, or its event loop held up) blames nobody for the answers that it
  missed: its probes are abandoned, and time to refute does not run meanwhile.
* Who holds a suspicion pings the suspect itself in the second half of the time, so that a
  refutation that got lost does not kill.
* Those taken for dead that still have a node record are pinged now and then, so that the two sides
  of a partition find each other again.

All of this is a hint. It never changes who owns what.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from random import Random

import msgspec

from p2pkv.clock import seconds
from p2pkv.config import SwimConfig
from p2pkv.probing import Probe, Probing, Relay
from p2pkv.roster import PRESENT, Entry, Event, Roster, refuted
from p2pkv.suspicion import Awareness, retransmits
from p2pkv.swim_messages import (
    RUMORS_MAX,
    Ack,
    AnyPacket,
    Digest,
    Gossip,
    Nack,
    Ping,
    PingRequest,
    Rumor,
    State,
    Status,
    Sync,
)
from p2pkv.types import Member

RECONNECT_PROBES = 5
"""So many probe intervals pass between two pings of one that is taken for dead."""
NACK_SHARE = 0.8
"""Part of the probe timeout after which a helper says that the target does not answer."""
AWAY_WORSE_MAX = 2
SCALE_FROM = 32
"""Members from which on all states are exchanged less often."""


class Send(msgspec.Struct, frozen=True):
    """Send a packet. It may get lost."""

    to: Member
    packet: AnyPacket


Action = Send | Event


class Swim:
    """The state of one node's view. Each call returns what to send and what has changed.

    All ``now`` are monotonic nanoseconds. ``tick`` is to be called at ``due_ns``, or soon after; if
    it, or another call, comes later than half a probe timeout, this node was away.
    """

    def __init__(self, config: SwimConfig, me: Member, address: str, rng: Random, now: int) -> None:
        config = config.resolved()
        self.me = me
        self.digest = Digest()
        """What this node says of itself, from the next packet on."""
        self.left = False
        self.away_total = 0
        self.refuted_total = 0
        self.sent_total = 0
        self._config = config
        self._address = address
        self._rng = rng
        self._incarnation = 0
        self._roster = Roster(config, me)
        self._probing = Probing(self._roster, rng)
        self._awareness = Awareness(config.awareness_max)
        self._interval_ns = seconds(config.probe_interval_s)
        self._timeout_ns = seconds(config.probe_timeout_s)
        self._gossip_ns = seconds(config.gossip_interval_s)
        self._actions: list[Action] = []
        self._probe_at_ns = now + round(rng.random() * self._interval_ns)
        self._gossip_at_ns = now
        self._sync_at_ns = now
        self._probes_begun = 0
        self._roster.rumors.put(self._own(Status.ALIVE))
        self.due_ns = now
        """When ``tick`` is to be called next."""
        self._ticked = False

    # -- what is known

    def entries(self) -> list[Entry]:
        """All other members that are known, those that died or left lately among them."""
        return list(self._roster.entries.values())

    def status(self, member: Member) -> Status | None:
        """What is believed of a member; None: nothing is known of it."""
        if member == self.me:
            return Status.LEFT if self.left else Status.ALIVE
        entry = self._roster.find(member)
        return entry.status if entry is not None else None

    @property
    def present(self) -> int:
        """Members that are alive or suspected, this one included."""
        return self._roster.size

    @property
    def awareness(self) -> int:
        """This node's doubt in itself; 0: none."""
        return self._awareness.score

    # -- events

    def register(self, addresses: Mapping[Member, str], now: int) -> list[Action]:
        """These members have a node record in etcd, with the addresses of their packets."""
        self._catch_up(now)
        others = {m: a for m, a in addresses.items() if m.node != self.me.node}
        self._roster.register(others, now)
        return self._taken(now)

    def receive(self, packet: AnyPacket, now: int) -> list[Action]:
        """A packet came. Those of unknown senders do no more than introduce them."""
        self._catch_up(now)
        if self.left or packet.sender.node == self.me.node:
            return []
        for rumor in packet.rumors:
            self._hear(rumor, now)
        sender = self._roster.find(packet.sender)
        if sender is not None and sender.status != Status.LEFT:
            self._hear_from(sender, packet, now)
        return self._taken(now)

    def connection_broke(self, member: Member, now: int) -> list[Action]:
        """The kernel says that a connection to a member is refused, closed or reset."""
        self._catch_up(now)
        entry = self._roster.find(member)
        if not self.left and entry is not None and entry.status in PRESENT:
            self._roster.suspect(entry, now)
            if not self._probing.is_probed(member):
                self._probe(entry, now, indirect_after_ns=0)
        return self._taken(now)

    def tick(self, now: int) -> list[Action]:
        """Do what is due."""
        self._catch_up(now)
        self._ticked = True
        if self.left:
            self._sync_at_ns = now + seconds(self._config.push_pull_interval_s)
            return self._taken(now)
        self._roster.bury(now)
        for suspect in self._roster.to_be_called(now, self._interval_ns):
            self._call(suspect)
        self._conclude(now)
        if now >= self._probe_at_ns:
            self._probe_next(now)
        if now >= self._gossip_at_ns and self._roster.rumors:
            self._gossip(now)
        if now >= self._sync_at_ns:
            self._sync(now)
        return self._taken(now)

    def leave(self, now: int) -> list[Action]:
        """Say good-bye, once in a life to everybody, for the connections that will close now."""
        self._catch_up(now)
        self._roster.rumors.put(self._own(Status.LEFT))
        for entry in self._roster.those(PRESENT):
            self._send(entry, Gossip(*self._header(entry, first=self._own(Status.LEFT))))
        self._probing.abandon()
        self.left = True
        return self._taken(now)

    def _taken(self, now: int) -> list[Action]:
        actions: list[Action] = [*self._roster.events, *self._actions]
        self._roster.events.clear()
        self._actions.clear()
        self.due_ns = max(now, self._next_ns())
        return actions

    def _next_ns(self) -> int:
        if self.left:
            return self._sync_at_ns
        times = [self._probe_at_ns, self._sync_at_ns]
        if self._roster.rumors:
            times.append(self._gossip_at_ns)
        others = (self._probing.next_due_ns(), self._roster.next_due_ns())
        return min(*times, *(t for t in others if t is not None))

    def _catch_up(self, now: int) -> None:
        """Notice that this node was away, before it draws conclusions."""
        late_ns = now - self.due_ns
        if late_ns <= self._timeout_ns // 2 or self.left or not self._ticked:
            return
        self.away_total += 1
        self._awareness.worse(min(AWAY_WORSE_MAX, 1 + late_ns // self._interval_ns))
        self._probing.abandon()
        self._roster.excuse(late_ns)
        self._probe_at_ns = now + self._timeout_ns
        self._sync_at_ns = max(self._sync_at_ns, now)
        self._gossip_at_ns = now

    # -- packets

    def _own(self, status: Status) -> Rumor:
        return Rumor(self.me, status, self._incarnation, self._address)

    def _header(
        self, to: Entry, first: Rumor | None = None
    ) -> tuple[Member, int, Digest, tuple[Rumor, ...]]:
        """The fields that all packets have. Who is suspected is told so, that it may refute."""
        if first is None and to.status != Status.ALIVE:
            first = to.rumor()
        limit = retransmits(self._config.retransmit_mult, self._roster.size)
        rumors = self._roster.rumors.take(RUMORS_MAX - 1, limit)
        told = (first, *rumors) if first is not None else tuple(rumors)
        return self.me, self._incarnation, self.digest, told

    def _send(self, to: Entry, packet: AnyPacket) -> None:
        self.sent_total += 1
        self._actions.append(Send(to.member, packet))

    def _hear(self, rumor: Rumor, now: int) -> None:
        if rumor.member.node != self.me.node:
            self._roster.hear(rumor, now)
        elif rumor.member == self.me:
            incarnation = refuted(rumor, self._incarnation)
            if incarnation is not None:
                self._incarnation = incarnation
                self.refuted_total += 1
                self._awareness.worse()
                self._roster.rumors.put(self._own(Status.ALIVE))

    def _hear_from(self, sender: Entry, packet: AnyPacket, now: int) -> None:
        if packet.incarnation > sender.incarnation:
            self._hear(Rumor(sender.member, Status.ALIVE, packet.incarnation), now)
        self._roster.believe(sender.member, packet.digest)
        match packet:
            case Ping():
                self._pinged(sender, packet)
            case PingRequest():
                self._asked(sender, packet, now)
            case Ack():
                self._acknowledged(packet, now)
            case Nack():
                self._denied(packet)
            case Sync():
                self._merge(sender, packet, now)
            case _:  # Gossip: its rumors have been heard
                pass

    # -- probes

    def _probe_next(self, now: int) -> None:
        self._probe_at_ns = now + self._awareness.scale(self._interval_ns)
        self._roster.forget(now)
        entry = self._probing.next_target()
        if entry is not None and not self._probing.is_probed(entry.member):
            self._probe(entry, now, self._awareness.scale(self._timeout_ns))
        self._probes_begun += 1
        if self._probes_begun % RECONNECT_PROBES == 0:
            self._call_back()

    def _call_back(self) -> None:
        """Ping one that is taken for dead, in case a partition is over."""
        dead = [
            e for e in self._roster.those([Status.DEAD]) if self._roster.is_registered(e.member)
        ]
        if dead:
            self._call(self._rng.choice(dead))

    def _call(self, entry: Entry) -> None:
        """A ping that tells a suspect, or one taken for dead, so. No probe waits for it."""
        self._send(entry, Ping(*self._header(entry), 0, entry.member))

    def _probe(self, entry: Entry, now: int, indirect_after_ns: int) -> None:
        ends_ns = now + self._awareness.scale(self._interval_ns)
        probe = Probe(entry.member, now + indirect_after_ns, ends_ns)
        seq = self._probing.begin(probe)
        self._send(entry, Ping(*self._header(entry), seq, entry.member))
        if not indirect_after_ns:
            self._ask_others(seq, probe, entry)

    def _conclude(self, now: int) -> None:
        """Probes and promises whose time is over."""
        probes, relays = self._probing.due(now)
        for seq, probe in probes:
            entry = self._roster.find(probe.target)
            if entry is None or entry.status not in PRESENT:
                del self._probing.probes[seq]
            elif probe.indirect_ns is not None:
                self._send(entry, Ping(*self._header(entry), seq, entry.member))
                self._ask_others(seq, probe, entry)
            else:
                self._fail(seq, probe, entry, now)
        for seq, relay in relays:
            del self._probing.relays[seq]
            asker = self._roster.find(relay.asker)
            if asker is not None:
                self._send(asker, Nack(*self._header(asker), relay.seq))

    def _ask_others(self, seq: int, probe: Probe, entry: Entry) -> None:
        probe.indirect_ns = None
        others = [e for e in self._roster.those([Status.ALIVE]) if e is not entry]
        helpers = self._rng.sample(others, min(self._config.indirect_probes, len(others)))
        probe.asked = len(helpers)
        accusation = entry.rumor() if entry.status == Status.SUSPECT else None
        for helper in helpers:
            header = self._header(helper, first=accusation)
            self._send(helper, PingRequest(*header, seq, entry.member))

    def _fail(self, seq: int, probe: Probe, entry: Entry, now: int) -> None:
        """Nobody had an answer. If helpers kept silent too, this node doubts itself."""
        del self._probing.probes[seq]
        self._awareness.worse(probe.asked - probe.nacks if probe.asked else 1)
        self._roster.suspect(entry, now)

    def _pinged(self, sender: Entry, ping: Ping) -> None:
        if ping.target == self.me:
            self._send(sender, Ack(*self._header(sender), ping.seq))
        elif ping.target.node == self.me.node:
            self._send(sender, Gossip(*self._header(sender, first=self._own(Status.ALIVE))))

    def _asked(self, asker: Entry, request: PingRequest, now: int) -> None:
        target = self._roster.find(request.target)
        if target is None:
            return
        ends_ns = now + round(NACK_SHARE * self._timeout_ns)
        seq = self._probing.relay(Relay(asker.member, request.seq, ends_ns))
        if seq is not None:
            self._send(target, Ping(*self._header(target), seq, target.member))

    def _acknowledged(self, ack: Ack, now: int) -> None:
        relay = self._probing.relays.pop(ack.seq, None)
        asker = self._roster.find(relay.asker) if relay is not None else None
        if relay is not None and asker is not None:
            alive = self._roster.find(ack.sender)
            first = alive.rumor() if alive is not None and alive.status == Status.ALIVE else None
            self._send(asker, Ack(*self._header(asker, first), relay.seq))
        if self._probing.probes.pop(ack.seq, None) is not None:
            self._awareness.better()

    def _denied(self, nack: Nack) -> None:
        probe = self._probing.probes.get(nack.seq)
        if probe is not None and probe.nacks < probe.asked:
            probe.nacks += 1

    # -- rumors, and all states

    def _gossip(self, now: int) -> None:
        self._gossip_at_ns = now + self._gossip_ns
        there = self._roster.those((*PRESENT, Status.DEAD))
        for entry in self._rng.sample(there, min(self._config.gossip_nodes, len(there))):
            header = self._header(entry)
            if header[3]:
                self._send(entry, Gossip(*header))

    def _sync(self, now: int) -> None:
        interval_ns = seconds(self._config.push_pull_interval_s)
        if self._roster.size > SCALE_FROM:
            interval_ns *= 1 + ceil(log2(self._roster.size / SCALE_FROM))
        self._sync_at_ns = now + round(interval_ns * self._rng.uniform(0.8, 1.2))
        there = self._roster.those([Status.ALIVE])
        if there:
            entry = self._rng.choice(there)
            self._send(entry, Sync(*self._header(entry), self._states(), answer=False))

    def _states(self) -> tuple[State, ...]:
        own = State(self._own(Status.ALIVE), self.digest)
        others = list(self._roster.entries.values())
        return (own, *(State(e.rumor(), e.digest) for e in others))

    def _merge(self, sender: Entry, sync: Sync, now: int) -> None:
        """Who is dead for the other is a suspect here: it may have refuted meanwhile."""
        for state in sync.states:
            rumor = state.rumor
            if rumor.status == Status.DEAD:
                rumor = msgspec.structs.replace(rumor, status=Status.SUSPECT, by=sender.member.node)
            self._hear(rumor, now)
            self._roster.believe(rumor.member, state.digest)
        if not sync.answer:
            self._send(sender, Sync(*self._header(sender), self._states(), answer=True))
