"""Deliberate mistakes in the replicas, to see that random schedules find them.

Each replaces methods of the real classes for as long as it is planted; product code knows nothing
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from p2pkv.following import Following
from p2pkv.instructions import Changed, Discard
from p2pkv.leading import Copying, Follower, Leading
from p2pkv.leases import Leases
from p2pkv.reconfiguring import Reconfiguring
from p2pkv.replicas import Replicas
from p2pkv.replicated import Session
from p2pkv.replication import Replica
from p2pkv.testing.linearizability import Kind

from .clients import NOT_HERE, Served
from .etcd_model import EtcdModel

Patch = tuple[type, str, Any]
MUTANTS: dict[str, tuple[str, Callable[[], list[Patch]]]] = {}
"""By name: what is wrong, and the methods that make it so."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """With the mutant of this name; "": as it should be."""
    patches = MUTANTS[name][1]() if name else []
    before = [(owner, attribute, owner.__dict__[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, value in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


def mutant(description: str) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def register(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        MUTANTS[make.__name__] = description, make
        return make

    return register


# -- epochs


@mutant("whoever claims a bucket is granted it, in any epoch (I2)")
def noepoch() -> list[Patch]:
    return [(Following, "accepts_claim", lambda self, epoch: True)]


@mutant("a suffix is compared by its length, not by origin (I9)")
def origins() -> list[Patch]:
    def keep(self: Any, message: Any) -> None:
        end = min(self.last, message.base + len(message.origins))
        for seq in range(end + 1, self.last + 1):
            self.out.append(Discard(self.bucket, self.log.pop(seq)))
        self.last = max(end, self.applied)

    return [(Following, "_keep_common", keep)]


@mutant("a new primary drops what it has prepared (I9)")
def dropstaged() -> list[Patch]:
    begin = Leading._begin_tenure

    def dropping(self: Any, record: Any, now: int) -> None:
        for seq in range(self.applied + 1, self.last + 1):
            self.out.append(Discard(self.bucket, self.log.pop(seq)))
        self.last = self.applied
        begin(self, record, now)

    return [(Leading, "_begin_tenure", dropping)]


@mutant("a new primary serves before the others know of it (I9)")
def servebeforerec() -> list[Patch]:
    begin = Leading._begin_tenure

    def serving(self: Any, record: Any, now: int) -> None:
        begin(self, record, now)
        self.active = True

    return [(Leading, "_begin_tenure", serving)]


# -- the ack set


@mutant("a member need not acknowledge from when its removal is proposed (I3)")
def eagershrink() -> list[Patch]:
    propose = Reconfiguring._propose_shrunk

    def eager(self: Any, record: Any, gone: Any) -> None:
        propose(self, record, gone)
        for member in gone:
            self.followers.pop(member, None)

    return [(Reconfiguring, "_propose_shrunk", eager)]


def _advance_without(skipped: Callable[[Any, Any, Any], bool]) -> list[Patch]:
    advance = Leading.advance

    def advancing(self: Any, now: int) -> None:
        followers = self.followers
        self.followers = {m: f for m, f in followers.items() if not skipped(self, m, f)}
        advance(self, now)
        self.followers = followers

    return [(Leading, "advance", advancing)]


@mutant("a learner has to acknowledge only when it is known to be in sync (I3)")
def lateexpand() -> list[Patch]:
    return _advance_without(lambda r, m, f: not r._counted(m))


@mutant("between its last piece and its acknowledgement a learner is not waited for")
def cutnotwaited() -> list[Patch]:
    return _advance_without(lambda r, m, f: not f.confirmed and r._copied(m))


@mutant("a learner counts as in step before its last piece has arrived")
def earlylearner() -> list[Patch]:
    cut = Reconfiguring.copy_cut

    def cutting(self: Any, session: Any, now: int) -> Any:
        base = cut(self, session, now)
        if base is not None:
            self.followers[self.copying.member] = Follower(self.applied, session, now)
        return base

    return [(Reconfiguring, "copy_cut", cutting)]


@mutant("an old confirmation of the epoch counts for a member that is copied anew (I11)")
def lateconfirm() -> list[Patch]:
    take = Leading.take_new_epoch_ack

    def taking(self: Any, sender: Any, ack: Any, now: int) -> None:
        copying, self.copying = self.copying, None
        take(self, sender, ack, now)
        self.copying = copying

    return [(Leading, "take_new_epoch_ack", taking)]


@mutant("acknowledgements of an earlier session count (I11)")
def nosid() -> list[Patch]:
    def take(self: Any, sender: Any, ack: Any, now: int) -> None:
        follower = self.followers.get(sender)
        if ack.epoch == self.tenure and follower is not None:
            self._acknowledge(follower, ack.last, now)

    return [(Leading, "take_prepare_ack", take)]


@mutant("a copy may begin before the learner knows the record that it goes by (I11)")
def norevision() -> list[Patch]:
    return [(Session, "revision", property(lambda self: 0))]


@mutant("a complete copy is dropped when the planner wants others")
def voidunwanted() -> list[Patch]:
    follow = Replica._follow

    def following(self: Any, before: Any, record: Any) -> None:
        follow(self, before, record)
        unwanted = self.me.node not in record.assigned and not self._named(record)
        if self.generation and unwanted:
            self._void(lost=False)

    return [(Replica, "_follow", following)]


@mutant("a copy that was begun before is begun again by a late message (I11)")
def snapregress() -> list[Patch]:
    may = Following.may_learn

    def may_learn(self: Any, epoch: int, session: Any, sender: Any) -> bool:
        floor, own = self._copy_floor, self.session
        self._copy_floor = self.session = Session(0)
        allowed = may(self, epoch, session, sender)
        self._copy_floor, self.session = floor, own
        return allowed

    return [(Following, "may_learn", may_learn)]


@mutant("a follower leaves only for silence, not for lack of progress (I14)")
def hbonly() -> list[Patch]:
    return [(Reconfiguring, "_stuck", lambda self, follower, now: False)]


@mutant("below min_in_sync is committed what an eligible member lacks (I15)")
def bound() -> list[Patch]:
    return [(Leading, "_bound", property(lambda self: False))]


@mutant("the result of one's own transaction is not adopted (I12)")
def staleafter() -> list[Patch]:
    decided = Replica.decided
    return [
        (Replica, "decided", lambda self, change, current, now: decided(self, change, None, now))
    ]


@mutant("a commit is told once, whether it arrives or not")
def commitonce() -> list[Patch]:
    tell = Replicas._tell_commits

    def telling(self: Any, member: Any, claims: Any, now: int) -> None:
        self._doubtful.pop(member, None)
        tell(self, member, claims, now)

    return [(Replicas, "_tell_commits", telling)]


# -- promotion and reads


@mutant("a primary reads without grants (I7)")
def nolease() -> list[Patch]:
    return [(Leading, "serve_until", lambda self: 1 << 62 if self.serving else 0)]


@mutant("a grant counts from its arrival (I7)")
def leasefromack() -> list[Patch]:
    take_talk, take_grant = Replicas.take_talk, Leases.take_grant

    def talk(self: Any, message: Any, now: int) -> None:
        self.leases.arrived_ns = now
        take_talk(self, message, now)

    def grant(self: Any, sender: Any, message: Any) -> bool:
        taken = take_grant(self, sender, message)
        if taken:
            self._held[sender].until_ns = self.arrived_ns + self.lease_ns
        return taken

    return [(Replicas, "take_talk", talk), (Leases, "take_grant", grant)]


@mutant("what was granted need not lapse, neither before promotion nor before serving (I8)")
def nograce() -> list[Patch]:
    return [(Leases, "lapsed", lambda self, bucket, now: True),
            (Leases, "granted_ns", lambda self, bucket: -(1 << 62))]  # fmt: skip


@mutant("what was granted is not looked at again when the primary begins to serve (I8)")
def norecheck() -> list[Patch]:
    return [(Leases, "lapsed", lambda self, bucket, now: True)]


@mutant("the word of any earlier primary ends the waiting for grants to lapse")
def releasedbyany() -> list[Patch]:
    take = Leading.take_stepped_down

    def taking(self: Any, sender: Any, message: Any, now: int) -> None:
        take(self, sender, message, now)
        if self.tenure:
            self._released = self.tenure - 1
            self.advance(now)

    return [(Leading, "take_stepped_down", taking)]


@mutant("an eligible member is taken back although it is named no more (I15)")
def takenback() -> list[Patch]:
    def take_back(self: Any, member: Any, now: int) -> None:
        self.copying = Copying(member, Session(self.tenure))
        self.copying.cut = True
        self.followers[member] = Follower(0, None, now)
        self._offer_epoch(now)
        self.out.append(Changed(self.bucket))

    return [(Reconfiguring, "_take_back", take_back)]


@mutant("an eligible member is not asked for grants (I15)")
def eligiblenotasked() -> list[Patch]:
    def rivals(self: Any) -> list[Any]:
        return [m for m in self.followers if not self._is_learner(m)]

    return [(Leading, "rivals", rivals)]


@mutant("a learner that is proposed to be in sync is not asked for grants (I7)")
def proposednotasked() -> list[Patch]:
    def is_learner(self: Any, member: Any) -> bool:
        return not self._counted(member)

    return [(Leading, "_is_learner", is_learner)]


@mutant("a learner may be promoted (I6)")
def promoteany() -> list[Patch]:
    return [(Following, "_named", lambda self, record: bool(self.synced)),
            (Replica, "_rank", lambda self, record: 0)]  # fmt: skip


@mutant("a fenced node grants")
def fencedgrants() -> list[Patch]:
    create: Callable[..., None] = Replicas.__init__

    def creating(self: Any, *arguments: Any) -> None:
        create(self, *arguments[:-1], lambda now: True)

    return [(Replicas, "__init__", creating)]


@mutant("a restarted node is the same member as before (I10)")
def noboot() -> list[Patch]:
    register = EtcdModel.register

    def again(self: Any, node: Any) -> Any:
        self.view.boots.pop(node, None)
        return register(self, node)

    return [(EtcdModel, "register", again)]


@mutant("reads return what is prepared and not committed (I4)")
def readstaged() -> list[Patch]:
    def get(self: Any) -> None:
        if self.life.may_read(self.bucket):
            self._read(Kind.GET, self.life.pending_value(self.bucket, self.key)[0])
        else:
            self.reply(NOT_HERE)

    return [(Served, "_get", get)]
