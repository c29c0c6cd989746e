"""Who is in contact with whom, and what may follow when etcd is not. Pure.

A node that needs to know (it *asks*) sends heartbeats to all others, and they answer. Heartbeats
tell how long ago each node, as far as the sender knows, was in contact with etcd. From them follow
two decisions that must never both be taken for one member:

Self-fence (``may_serve``)
    A node goes on serving what it owns for ``fence_after_s`` after its last contact with etcd.
    That time also counts from the last moment at which a majority *vouched* for it: a majority of
    the registered members, itself included, none of which knew of a contact of any other member
    with etcd within ``peer_contact_s``. Once the time is over the node is fenced until it has a
    contact of its own; a majority that is seen later does not bring it back.

Reset (``lost``)
    A member's buckets may be started again, empty, by a node that for all of ``reset_after_s`` has
    seen the member without session, and has had proof that a majority of the registered members
    knew of a contact of its own with etcd within ``peer_contact_s`` (so there was no longer gap).

What counts as a contact
    The moment at which a request was *sent* whose answer showed this member's session to be alive.
    A node whose session was lost registers again and then writes each record that it owns again,
    unchanged and under its guard; only after that it has a contact. So a reset that was decided
    before, and is carried out late, fails at its guard.

When a node asks
    While its own contact is older than half of ``peer_contact_s``, and while it has been asked
    about an owner without session (``lost``). Otherwise it sends nothing of its own accord. The
    proof below does not need heartbeats at any time at which they are not sent: both rules rest on
    what has been *answered*, and without answers neither holds. Who asks for the sake of a reset
    has its ``reset_after_s`` of proof from the time at which it began to ask.

Who counts as registered
    Those that have a node record in etcd. As the set changes, the two sides may hold different
    ones. A node keeps to the last set that it was in itself, and tells its revision, also in the
    digests of ``swim`` (``told``): a word that is late names an older revision, which asks more of
    P. While X serves by a majority's word it tells the revision of the set in which that was one,
    should a newer set have come to it since. P counts for a majority only nodes that have been
    registered at the last revision that X told it and ever since, and needs more than half of all
    that were registered at that revision or later. So P's majority meets every majority of every
    set that X may hold. (Owners without session need not be added: they are in the set of that
    revision. A member whose revision P never heard is never lost for P.)

Why not both
    Let P declare X lost at time t. X's session ended before t - 20 s (``reset_after_s``), so its
    last contact was before that, and unless vouched for X is fenced since t - 10 s
    (``fence_after_s``). Suppose that X was vouched for without a break until t. Each vouching
    lasts 10 s from the moment e that it speaks for. So one of them, with t - 10 s <= e, was
    accepted by X before the one before it (or X's last contact) ran out, thus at a time x < t. Some
    Y is in its majority and in P's. X took Y's word from a heartbeat that answers one sent by X at
    e: Y sent it after e and before x, so between t - 10 s and t. But P had proof that throughout
    the last 20 s Y held a contact of P younger than ``peer_contact_s`` (if Y is P: that another
    member held it, from P), and heartbeats hide nothing that their sender knows. So Y did not
    vouch: a contradiction. Hence X is fenced before t and stays so until it has a contact, which
    shows it the new owner. That a process is paused and wakes only makes its x later.

    Nothing is assumed about the delay of messages; of clocks only that their rates differ less than
    10 s and 20 s do, and by less than ``_MARGIN`` leaves. It is assumed that at most one process
    at a time runs under a node id, and that what a process does after asking ``may_serve`` counts
    as done when it asked.

Each measure closes a hole of the plain rule "a majority is seen, and none of it had contact within
5 s": what is seen *now* says nothing of a reset a minute ago, when etcd has died since (hence no
way back from being fenced); a heartbeat that was long on its way tells of the contacts of *then*
(hence it must answer one of ours); sight may be one-way (hence the proof that P's contact is
known); and members that join while X is cut off could outvote those that X still counts.

Monotonic clocks of different hosts cannot be compared, so times travel as ages. The way here is not
counted, so a contact can only seem younger than it is, which fences rather than serves. Of two ages
of the same contact (named by its time on its own node's clock) the greater is nearer to the truth,
so relaying it in circles does not keep it young.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta as Limit

from p2pkv.clock import MILLISECOND_NS, seconds
from p2pkv.config import NodeConfig
from p2pkv.errors import ConfigError, InvalidArgument, ProtocolError
from p2pkv.types import BootId, Member, NodeId, Revision

HEARTBEAT = b"h"
"""The kind of a heartbeat among the messages of ``gossip``."""
HEARTBEATS_MISSED_MAX = 3
MEMBERS_MAX = 4096
"""The largest cluster, and what one heartbeat can report."""
DEPARTED_MAX = 256
"""Of the members that left, so many are remembered."""

_NEVER = -(1 << 62)
_MARGIN = 0.9
"""For clocks that run at different rates: part of ``peer_contact_s`` that a contact informs for."""

_Time = Annotated[int, Limit(ge=0, le=(1 << 63) - 1)]


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the sender of a heartbeat knows of another member."""

    member: Member
    contact_name: _Time = 0
    """Its last known contact with etcd, named by the time on its own clock. 0: none known."""
    contact_age_ms: _Time = 0
    """How long ago that was, rounded down, when the heartbeat was sent."""
    heard_sent_ns: _Time = 0
    """``sent_ns`` of the newest heartbeat that the sender had from it. 0: none."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sent each ``heartbeat_s`` to all others by who asks, and by them in answer.

    Goes on the wire as it is.
    """

    sender: Member
    sent_ns: _Time
    """On the sender's clock; rises with each heartbeat."""
    revision: _Time
    """etcd's revision of the set of registered members that the sender counts majorities in."""
    reports: Annotated[tuple[Report, ...], Limit(max_length=MEMBERS_MAX + 1)]
    """The first is about the sender itself."""
    asks: bool = False
    """Whether an answer is wanted."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Heartbeat)


def encode(heartbeat: Heartbeat) -> bytes:
    return _encoder.encode(heartbeat)


def decode(frame: bytes) -> Heartbeat:
    """Check and decode a heartbeat. Raises ProtocolError."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"heartbeat: {e}") from None


class _Peer:
    """What we know of the present life of another node. Times are on our clock."""

    __slots__ = (
        "boot",
        "contact_at_ns",
        "contact_name",
        "echo_ns",
        "heard_ns",
        "heard_sent_ns",
        "informed_since_ns",
        "informed_until_ns",
        "quiet",
        "revision",
    )

    def __init__(self, boot: BootId) -> None:
        self.boot = boot
        self.heard_ns = _NEVER
        self.heard_sent_ns = 0
        """The newest heartbeat of this peer, named by the time on its clock."""
        self.contact_name = 0
        self.contact_at_ns = _NEVER
        """Its last known contact with etcd was then, or earlier."""
        self.echo_ns = 0
        """Its newest heartbeat was sent after this time: it answers one that we sent then."""
        self.quiet = False
        """By its newest heartbeat it knew of no recent contact with etcd, save perhaps ours."""
        self.revision = Revision(-1)
        """It counts majorities in the members registered at this revision, or a later one."""
        self.informed_since_ns = _NEVER
        self.informed_until_ns = _NEVER
        """Between these two it knew, without a break, of a recent contact of ours."""


class _Tenure:
    """When a node was registered, as revisions of etcd; rather later than it was."""

    __slots__ = ("gone_ns", "joined", "left")

    def __init__(self, joined: Revision) -> None:
        self.joined = joined
        self.left: Revision | None = None
        self.gone_ns: int | None = None
        """When we noted that it was no longer registered: at the next heartbeat."""


class Contacts:
    """Contacts of this node with the others, and of all of them with etcd.

    All ``now`` are this node's monotonic nanoseconds, read *after* the message in question was
    received. Raises ConfigError if the times in ``config`` leave no room for the rules.
    """

    def __init__(self, config: NodeConfig, me: Member) -> None:
        _check(config)
        self.me = me
        self._fence_ns = seconds(config.fence_after_s)
        self._recent_ns = seconds(config.peer_contact_s)
        self._reset_ns = seconds(config.reset_after_s)
        self._seen_ns = (HEARTBEATS_MISSED_MAX + 1) * seconds(config.heartbeat_s)
        self._vouching = config.etcd_loss == "serve"

        self._peers: dict[NodeId, _Peer] = {}
        self._tenures: dict[NodeId, _Tenure] = {}
        self._registered: dict[NodeId, BootId] = {}
        self._revision: Revision | None = None
        self._history_from = Revision(0)
        self._base = frozenset({me.node})
        self._base_revision = Revision(0)

        self._own_contact_ns = _NEVER
        self._vouched_ns = _NEVER
        self._vouched_revision = Revision(0)
        """Of the set whose majority vouched."""
        self._asking_until_ns = _NEVER
        """For the sake of an owner without session."""
        self._sent_ns = 0

    # -- who is registered

    def register(self, members: Iterable[Member], revision: Revision, gap: bool = False) -> None:
        """These members have a node record in etcd at ``revision``.

        To be called for each revision at which the set changes, in order; with ``gap`` when
        revisions were missed, as after reading the whole table anew (the first call always counts
        as such). What was lost before a gap is not declared lost by this node any more. Raises
        InvalidArgument for an older revision and for more than MEMBERS_MAX members.
        """
        current = {member.node: member.boot for member in members}
        self._check_registration(current, revision)
        if gap or self._revision is None:
            self._history_from = revision
            for tenure in self._tenures.values():
                tenure.gone_ns = None
        self._revision = revision
        for node in self._registered.keys() - current.keys():
            self._tenures[node].left = revision
        for node, boot in current.items():
            if self._registered.get(node) != boot:
                self._tenures[node] = _Tenure(revision)
                self._meet(Member(node, boot))
        self._registered = current
        if current.get(self.me.node) == self.me.boot:
            self._base, self._base_revision = frozenset(current), revision

    def unchanged(self, revision: Revision) -> None:
        """The members are still the same at this revision: what others hold then is known here."""
        self._revision = max(revision, self._revision or revision)
        if self._registered.get(self.me.node) == self.me.boot:
            self._base_revision = max(revision, self._base_revision)

    def _check_registration(self, current: Mapping[NodeId, BootId], revision: Revision) -> None:
        if self._revision is not None and revision < self._revision:
            raise InvalidArgument(f"revision = {revision}: must be at least {self._revision}")
        if len(self._tenures.keys() | current.keys()) > MEMBERS_MAX:
            raise InvalidArgument(f"members: must be at most {MEMBERS_MAX} with those that left")

    def _meet(self, member: Member) -> None:
        peer = self._peers.get(member.node)
        if member.node != self.me.node and (peer is None or peer.boot < member.boot):
            self._peers[member.node] = _Peer(member.boot)

    def _note_departures(self, now: int) -> None:
        """Of too many, drop those that left first; who was lost before them stays undeclared."""
        departed = [(t.left, n, t) for n, t in self._tenures.items() if t.left is not None]
        excess = len(departed) - DEPARTED_MAX
        for i, (revision, node, tenure) in enumerate(sorted(departed, key=lambda d: d[:2])):
            if tenure.gone_ns is None:
                tenure.gone_ns = now
            elif i < excess and self._lasted(tenure.gone_ns, now):
                del self._tenures[node]
                self._peers.pop(node, None)
                self._history_from = max(self._history_from, revision)

    def peers(self) -> set[Member]:
        """The members that heartbeats go to: those registered, and those that left lately."""
        return {Member(node, peer.boot) for node, peer in self._peers.items()}

    def _fresh(self, peer: _Peer, now: int) -> bool:
        return now - peer.heard_ns <= self._seen_ns

    # -- heartbeats

    def beat(self, now: int, own_etcd_contact_ns: int) -> Heartbeat | None:
        """The heartbeat to send to each of ``peers`` now; to be called each ``heartbeat_s``.

        None: there is nothing to ask. ``own_etcd_contact_ns`` is this node's last contact as
        defined above, negative for none.
        """
        self._own_contact_ns = max(self._own_contact_ns, own_etcd_contact_ns)
        self._note_departures(now)
        asks = self._asks(now)
        heartbeat = self._heartbeat(now, asks) if asks else None
        self._renew(now)
        return heartbeat

    def answer(self, heartbeat: Heartbeat, now: int, own_etcd_contact_ns: int) -> Heartbeat | None:
        """What to send to the sender of a heartbeat that was heard.

        None: it did not ask, or the next of this node's own heartbeats answers it too.
        """
        self._own_contact_ns = max(self._own_contact_ns, own_etcd_contact_ns)
        if not heartbeat.asks or self._asks(now):
            return None
        return self._heartbeat(now, asks=False)

    def _asks(self, now: int) -> bool:
        return now <= self._asking_until_ns or (self._vouching and self._is_cut_off(now))

    def _is_cut_off(self, now: int) -> bool:
        """Without contact for some time, and not yet fenced: after that no word would help."""
        last = max(self._own_contact_ns, self._vouched_ns)
        return now - self._own_contact_ns >= self._recent_ns // 2 and now - last <= self._fence_ns

    def told_revision(self, now: int) -> Revision:
        """etcd's revision of the set of registered members that this node counts majorities in."""
        vouched = now - self._vouched_ns <= self._fence_ns
        return min(self._base_revision, self._vouched_revision) if vouched else self._base_revision

    def told(self, member: Member, revision: Revision) -> None:
        """A member said so (``told_revision``), be it long ago or by way of others."""
        peer = self._peers.get(member.node)
        if peer is not None and peer.boot == member.boot:
            peer.revision = max(peer.revision, revision)

    def _heartbeat(self, now: int, asks: bool) -> Heartbeat:
        now = self._sent_ns = max(now, self._sent_ns + 1)
        own = self._report(self.me, max(0, self._own_contact_ns), self._own_contact_ns, 0)
        others = (
            self._report(Member(node, p.boot), p.contact_name, p.contact_at_ns, p.heard_sent_ns)
            for node, p in self._peers.items()
        )
        revision = self.told_revision(now)
        return Heartbeat(self.me, self._sent_ns, revision, (own, *others), asks)

    def _report(self, member: Member, name: int, at_ns: int, heard_sent_ns: int) -> Report:
        age_ms = max(0, self._sent_ns - at_ns) // MILLISECOND_NS if name else 0
        return Report(member, name, age_ms, heard_sent_ns)

    def heard(self, heartbeat: Heartbeat, now: int) -> bool:
        """Take in a heartbeat. False: ignored, since its sender is unknown or it was overtaken."""
        sender = heartbeat.sender
        if sender.node not in self._peers:
            return False
        self._meet(sender)
        peer = self._peers[sender.node]
        if sender.boot < peer.boot or heartbeat.sent_ns <= peer.heard_sent_ns:
            return False
        peer.heard_ns, peer.heard_sent_ns = now, heartbeat.sent_ns
        self.told(sender, Revision(heartbeat.revision))
        peer.quiet = True
        for report in heartbeat.reports:
            if report.member == self.me:
                self._answered(peer, report, now)
            else:
                self._told(report, now)
                if report.contact_name and self._is_recent(report):
                    peer.quiet = False
        self._renew(now)
        return True

    def _is_recent(self, report: Report) -> bool:
        return report.contact_age_ms * MILLISECOND_NS < self._recent_ns

    def _answered(self, peer: _Peer, report: Report, now: int) -> None:
        """What a peer had from us when it sent this: of our heartbeats, and of our contacts."""
        if report.heard_sent_ns <= self._sent_ns:
            peer.echo_ns = max(peer.echo_ns, report.heard_sent_ns)
        if 0 < report.contact_name <= self._own_contact_ns:
            if now > peer.informed_until_ns:
                peer.informed_since_ns = now
            until = report.contact_name + int(_MARGIN * self._recent_ns)
            peer.informed_until_ns = max(peer.informed_until_ns, until)

    def _told(self, report: Report, now: int) -> None:
        """Keep the newest contact of each member; of two ages of it the greater."""
        peer = self._peers.get(report.member.node)
        if peer is None or peer.boot != report.member.boot:
            return
        at_ns = now - report.contact_age_ms * MILLISECOND_NS
        if report.contact_name > peer.contact_name:
            peer.contact_name, peer.contact_at_ns = report.contact_name, at_ns
        elif report.contact_name == peer.contact_name:
            peer.contact_at_ns = min(peer.contact_at_ns, at_ns)

    # -- the Self-fence rule

    def may_serve(self, now: int, last_etcd_contact_ns: int) -> bool:
        """Whether this node may act as the owner of what it owns; to be asked at each operation."""
        return now <= self.serves_until(last_etcd_contact_ns)

    def serves_until(self, last_etcd_contact_ns: int) -> int:
        """Until when it may, unless it hears something new; whoever promises more lies."""
        return max(last_etcd_contact_ns, self._vouched_ns) + self._fence_ns

    def _renew(self, now: int) -> None:
        """Note since when a majority vouches, unless the time that was left is over already."""
        last = max(self._own_contact_ns, self._vouched_ns)
        if not self._vouching or now - last > self._fence_ns:
            return
        if now - self._own_contact_ns < self._recent_ns:
            return  # not needed yet
        if any(not peer.quiet and self._fresh(peer, now) for peer in self._peers.values()):
            return
        others = (self._peers[node] for node in self._base & self._peers.keys())
        answers = sorted((peer.echo_ns for peer in others if peer.quiet), reverse=True)
        needed = len(self._base) // 2
        if needed <= len(answers):
            since = answers[needed - 1] if needed else now
            if since > self._vouched_ns:
                self._vouched_ns, self._vouched_revision = since, self._base_revision

    # -- the Reset rule

    def lost(self, now: int, owners: Collection[Member]) -> set[Member]:
        """Those of ``owners`` (members that own buckets) that may be taken for lost.

        If one is without session, this node asks from now on; to be called at least as often as
        ``beat``, as long as it is.
        """
        departed = [owner for owner in owners if self._is_departed(owner)]
        if departed:
            self._asking_until_ns = now + self._seen_ns
        return {owner for owner in departed if self._is_lost(owner, now)}

    def _is_departed(self, owner: Member) -> bool:
        tenure = self._tenures.get(owner.node)
        return tenure is not None and tenure.left is not None

    def _is_lost(self, owner: Member, now: int) -> bool:
        tenure, peer = self._tenures[owner.node], self._peers.get(owner.node)
        if tenure.gone_ns is None or not self._lasted(tenure.gone_ns, now):
            return False
        if peer is None or peer.boot != owner.boot or peer.revision < self._history_from:
            return False
        return self._majority_informed(peer.revision, now)

    def _majority_informed(self, revision: Revision, now: int) -> bool:
        """Whether more than half of all that were registered at ``revision`` or later have been so
        ever since, and have known of our contact with etcd for as long as it takes."""
        all_since = sum(t.left is None or t.left > revision for t in self._tenures.values())
        informed = sum(
            tenure.left is None and tenure.joined <= revision and self._is_informed(node, now)
            for node, tenure in self._tenures.items()
        )
        return 2 * informed > all_since

    def _is_informed(self, node: NodeId, now: int) -> bool:
        peer = self._peers.get(node)
        if peer is None:
            return node == self.me.node
        return now <= peer.informed_until_ns and self._lasted(peer.informed_since_ns, now)

    def _lasted(self, since_ns: int, now: int) -> bool:
        return now - since_ns >= self._reset_ns


def _check(config: NodeConfig) -> None:
    """The times must leave room for each other, and for clocks that differ."""
    longest = config.fence_after_s - 4 * config.heartbeat_s
    if not 4 * config.heartbeat_s <= config.peer_contact_s <= longest:
        raise ConfigError(
            f"peer_contact_s = {config.peer_contact_s}: must be at least 4 heartbeat_s, "
            f"and as much less than fence_after_s"
        )
    if config.reset_after_s < 1.1 * config.fence_after_s:
        raise ConfigError(
            f"reset_after_s = {config.reset_after_s}: must be at least 1.1 fence_after_s"
        )
