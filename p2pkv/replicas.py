"""All replicas of one node: what they say to each other, in as few messages as possible. Pure.

Requests, records and messages go in; objects change through ``Objects`` at once, and everything
that takes time comes out as lists that a driver empties: messages to peers, proposals to etcd,
copies to be made. Nothing here waits, and no message is per key: what one peer has to be told
about all buckets leaves together.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec

from p2pkv.clock import MILLISECOND_NS
from p2pkv.instructions import (
    Abandon,
    Apply,
    Changed,
    Copy,
    Discard,
    Drop,
    Entry,
    Instruction,
    Open,
    Propose,
    Tell,
)
from p2pkv.leading import Settings
from p2pkv.leases import Leases
from p2pkv.records import BucketChange, Versioned
from p2pkv.replicated import (
    Beacon,
    Commit,
    Grant,
    NewEpoch,
    NewEpochAck,
    Prepare,
    PrepareAck,
    Session,
    SteppedDown,
    Talk,
)
from p2pkv.replication import Replica, Role
from p2pkv.types import BucketId, Member, NodeId
from p2pkv.wire import Status

log = logging.getLogger("p2pkv.replicas")

BATCH_BYTES = 16 << 20
TALK_ITEMS_MAX = 2048
"""Messages about single buckets in one Talk; the rest goes in another."""


class Committed(NamedTuple):
    """Operations of one bucket that are committed."""

    bucket: BucketId
    entries: list[Entry]
    copies: int
    """How many members in sync have them; 0 on a node that is not primary."""


class Objects(Protocol):
    """The objects of this node, as replicas change them. ``staged`` values are its own business."""

    def apply(self, committed: Sequence[Committed], now: int) -> None:
        """Carry out committed operations, each bucket's in their order, and answer who waits
        (``ticket``)."""

    def discard(self, bucket: BucketId, entry: Entry) -> None:
        """Free what is staged; who waits is told, as for ``abandon``."""

    def abandon(self, bucket: BucketId, entry: Entry) -> None:
        """Tell who waits that the outcome is unknown, and clear ``ticket``. What is staged
        stays."""

    def open(self, bucket: BucketId) -> None: ...

    def drop(self, bucket: BucketId, lost: bool) -> None: ...

    def hide(self, bucket: BucketId) -> None:
        """Who reads without asking asks from here on, until ``served_until`` is told again."""


class Batch(msgspec.Struct, frozen=True):
    """PREPAREs of several buckets for one member, and the entries whose values go along."""

    to: Member
    prepares: list[Prepare]
    entries: list[Entry]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and how much at once."""

    beacon_ns: int = 125 * MILLISECOND_NS
    entries_max: int = 1024
    """Operations of one bucket in one batch."""
    batch_bytes: int = BATCH_BYTES
    """A batch is full with so many value bytes; the next one follows at once. No more than a
    message holds: so what no message holds is the last of its batch."""
    copies_max: int = 4
    """Copies that this node makes at the same time."""


class Replicas:
    """See the module.

    ``may_grant(now)`` tells whether this node may let others serve: one that is fenced may not
    (its word would keep a bucket alive that others start anew).
    """

    def __init__(
        self,
        settings: Settings,
        pace: Pace,
        lease_ns: int,
        objects: Objects,
        member_of: Callable[[NodeId], Member | None],
        may_grant: Callable[[int], bool],
    ) -> None:
        self.me = settings.me
        self.leases = Leases(lease_ns)
        self.served: set[int] = set()
        """Buckets that this node is primary of and may serve, as far as etcd and peers agree."""
        self.shared: set[int] = set()
        """Buckets of ours whose writes go through the log, because others must have them too."""
        self.waiting: set[int] = set()
        """Buckets of ours that will be served in a moment, here or elsewhere."""
        self.proposals: list[BucketChange] = []
        self.copies: list[Copy] = []
        self.talks: dict[Member, list[Any]] = {}
        self.dead: set[Member] = set()
        """Those that are thought to be gone: a hint, which lapses after ``slow_ns``."""
        self._suspected: dict[Member, int] = {}
        self.by_bucket: dict[int, Replica] = {}
        self.reads_until = 0
        """Until then all served buckets may be read; after that, ask ``serve_until`` for each."""
        self.promotions = 0
        self.shrinks = 0
        self.lost_buckets = 0
        self._settings = settings
        self._pace = pace
        self._objects = objects
        self._member_of = member_of
        self._may_grant = may_grant
        self._out: list[Instruction] = []
        self._unsent: set[int] = set()
        self._uncommitted: dict[Member, dict[int, int]] = {}
        """By member and bucket what it was told last to be committed."""
        self._doubtful: dict[Member, dict[int, int]] = {}
        """By member and bucket since when it is being told so; until it answers a beacon."""
        self._heard: dict[Member, int] = {}
        self._claims: dict[Member, dict[int, int]] | None = None
        self._peers: set[Member] | None = None
        self._beacon_ns = 0
        self._fenced_ns = -(1 << 62)
        """When this node was last seen to be fenced."""
        self._restless: set[int] = set()
        self._copying: set[int] = set()
        """Buckets that are being copied from here."""
        self._unheard: set[int] = set()
        """Buckets with a follower that grants nothing: they may have to do without it."""

    # -- asking

    def get(self, bucket: int) -> Replica | None:
        return self.by_bucket.get(bucket)

    def status(self, bucket: int, now: int) -> Status:
        """Whether a bucket may be read here now, and what to say if not."""
        if bucket not in self.served:
            return Status.MOVING if bucket in self.waiting else Status.NOT_PRIMARY
        until = self.by_bucket[bucket].serve_until()
        return Status.OK if now < until else Status.STALLED

    def serve_until(self, bucket: int) -> int:
        """Until when this node may answer reads of the bucket, unless it is fenced; 0: not."""
        return self.by_bucket[bucket].serve_until() if bucket in self.served else 0

    def served_until(self, fence_ns: int, bucket_count: int) -> array[int]:
        """For each bucket the time before which nobody else may serve it; 0: we do not.

        ``fence_ns``: until when the self-fence rule lets this node serve what has no other copies.
        What the gates of the published index are set to.
        """
        untils = array("Q", bytes(8 * bucket_count))
        for bucket in self.served:
            until = self.by_bucket[bucket].serve_until()
            if not self.has_rivals(bucket):
                until = min(until, fence_ns)
            untils[bucket] = max(0, until)
        return untils

    def has_rivals(self, bucket: int) -> bool:
        """Whether other members hold copies that could be promoted."""
        replica = self.by_bucket.get(bucket)
        return replica is not None and replica.record is not None and bool(replica.rivals())

    def roles(self, bucket: int, now: int) -> Role:
        """What this node is to the bucket, for people to look at."""
        replica = self.by_bucket.get(bucket)
        if replica is None:
            return Role.ABSENT
        role = replica.role
        return Role.STALLED if role is Role.ACTIVE and replica.serve_until() <= now else role

    @property
    def holding(self) -> int:
        """Buckets that this node is primary of, or a member in sync of."""
        return sum(
            1 for r in self.by_bucket.values() if r.tenure or r.role in (Role.BACKUP, Role.LEARNER)
        )

    # -- records

    def adopt(self, news: Mapping[BucketId, Versioned | None], now: int) -> None:
        """What stands in etcd of these buckets."""
        for bucket, versioned in news.items():
            replica = self._replica(bucket)
            replica.adopt(versioned, now)
            self._follow_up(replica)
        self._settle(now)

    def decided(self, change: BucketChange, current: Versioned | None, now: int) -> None:
        """The outcome of a proposal: what stands in etcd after it."""
        replica = self._replica(change.bucket)
        replica.decided(change, current, now)
        self._changed(change.bucket)
        self._settle(now)

    def _replica(self, bucket: BucketId) -> Replica:
        replica = self.by_bucket.get(bucket)
        if replica is None:
            replica = self.by_bucket[bucket] = Replica(
                bucket, self._settings, self.leases, self._alive, self._out
            )
        return replica

    def _alive(self, node: NodeId) -> Member | None:
        member = self._member_of(node)
        return None if member in self.dead else member

    def _follow_up(self, replica: Replica) -> None:
        (self._restless.add if replica.restless else self._restless.discard)(replica.bucket)

    # -- writing

    def submit(self, bucket: int, op: Any, staged: Any, ticket: Any) -> Entry:
        """Append an operation to a bucket's log; it leaves with the next ``batches``."""
        self._unsent.add(bucket)
        self._restless.add(bucket)
        return self.by_bucket[bucket].submit(op, staged, ticket)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def talkative(self) -> bool:
        """Whether there is anything to be sent or begun."""
        return bool(self._unsent or self.talks or self.proposals or self.copies)

    def batches(
        self,
        now: int,
        busy: Collection[Member] = (),
        staging: Collection[tuple[Member, int]] = (),
    ) -> list[Batch]:
        """What is to be prepared by others and has not been sent: one batch for each member that
        is not ``busy``. ``staging``: members and buckets of which a value goes in pieces, which
        others have to wait for."""
        full: dict[Member, tuple[list[Prepare], list[Entry], int]] = {}
        left: set[int] = set()
        for bucket in self._unsent:
            replica = self.by_bucket[bucket]
            for member in replica.followers:
                waits = member in busy or (member, bucket) in staging
                if waits or self._fill(full, replica, member, now):
                    left.add(bucket)
        self._unsent = left
        self._settle(now)
        return [Batch(to, prepares, entries) for to, (prepares, entries, _) in full.items()]

    def _fill(
        self,
        full: dict[Member, tuple[list[Prepare], list[Entry], int]],
        replica: Replica,
        member: Member,
        now: int,
    ) -> bool:
        """Put what ``member`` has not seen of a bucket into its batch. True: there is more."""
        prepares, entries, size = full.get(member, ([], [], 0))
        if size >= self._pace.batch_bytes:
            return True
        pace = self._pace
        new = replica.unsent(member, now, pace.entries_max, pace.batch_bytes - size)
        if not new:
            return False
        epoch = replica.tenure
        origins = [e.origin for e in new]
        prepares.append(
            Prepare(
                replica.bucket,
                epoch,
                replica.applied,
                new[0].seq,
                [e.op for e in new],
                [] if origins == [epoch] * len(new) else origins,
            )
        )
        self._told(member, replica)
        full[member] = (prepares, entries + new, size + sum(e.op.size for e in new))
        return new[-1].seq < replica.last

    def note_staged(self, to: Member, bucket: int, entry: Entry, filled: int, now: int) -> bool:
        """See Replica."""
        self._hear(to, now)
        return self.by_bucket[bucket].note_staged(to, entry, filled, now)

    def not_delivered(self, to: Member, buckets: Iterable[int]) -> None:
        """A batch got no answer."""
        for bucket in buckets:
            self.by_bucket[bucket].not_delivered(to)
            self._unsent.add(bucket)

    def take_prepare_acks(self, sender: Member, acks: Sequence[PrepareAck], now: int) -> None:
        self._hear(sender, now)
        for ack in acks:
            replica = self.by_bucket.get(ack.bucket)
            if replica is not None:
                replica.take_prepare_ack(sender, ack, now)
                self._follow_up(replica)
        self._settle(now)

    def take_prepares(
        self, sender: Member, prepares: Sequence[Prepare], staged: Sequence[Sequence[Any]], now: int
    ) -> list[PrepareAck]:
        """Operations from a primary, with what is staged for each.

        What is committed by them waits for ``settle``, so that the acknowledgement does not.
        """
        self._hear(sender, now)
        acks: list[PrepareAck] = []
        for prepare, values in zip(prepares, staged, strict=True):
            replica = self._replica(BucketId(prepare.bucket))
            ack = replica.take_prepare(sender, prepare, values)
            if ack is not None:
                acks.append(ack)
        return acks

    def settle(self, now: int) -> None:
        """Carry out what ``take_prepares`` has left."""
        self._settle(now)

    # -- small messages

    def take_talk(self, talk: Talk, now: int) -> None:
        """Everything small that a peer had to say."""
        sender = talk.sender
        if talk.to != self.me:
            return
        self._hear(sender, now)
        for commit in talk.commits:
            self._replica(BucketId(commit.bucket)).take_commit(commit.epoch, commit.commit)
        for offer in talk.new_epochs:
            self._replica(BucketId(offer.bucket)).take_new_epoch(sender, offer)
        for ack in talk.new_epoch_acks:
            self._confirmed(sender, ack, now)
        for word in talk.stepped_down:
            self._replica(BucketId(word.bucket)).take_stepped_down(sender, word, now)
        if talk.beacon is not None:
            self._take_beacon(sender, talk.beacon, now)
        if talk.grant is not None:
            self._take_grant(sender, talk.grant)
        self._settle(now)

    def _confirmed(self, sender: Member, ack: NewEpochAck, now: int) -> None:
        replica = self._replica(BucketId(ack.bucket))
        replica.take_new_epoch_ack(sender, ack, now)
        self._uncommitted.get(sender, {}).pop(ack.bucket, None)
        self._unsent.add(replica.bucket)
        self._follow_up(replica)

    def _take_grant(self, sender: Member, grant: Grant) -> None:
        if not self.leases.take_grant(sender, grant):
            return
        self.reads_until = 0
        doubtful = self._doubtful.get(sender)
        if doubtful:
            for bucket in [b for b, since in doubtful.items() if since <= grant.sent_ns]:
                del doubtful[bucket]

    def _take_beacon(self, sender: Member, beacon: Beacon, now: int) -> None:
        if not self._may_grant(now):
            return

        def accept(bucket: int, epoch: int) -> bool:
            return self._replica(BucketId(bucket)).accepts_claim(epoch)

        grant = self.leases.take_beacon(sender, beacon, accept, now)
        self.talks.setdefault(sender, []).append(grant)

    def talk(self) -> list[Talk]:
        """The small messages that have come together, one for each peer where they fit."""
        told, self.talks = self.talks, {}
        return [
            _talk(self.me, to, items[start : start + TALK_ITEMS_MAX])
            for to, items in told.items()
            for start in range(0, len(items), TALK_ITEMS_MAX)
        ]

    # -- time

    def tick(self, now: int, etcd_answers: bool = True) -> None:
        """To be called often: a few times in a beacon interval."""
        if self.dead:
            self._forget_hints(now)
        self._note_unheard(now)
        for bucket in self._restless | self._unheard:
            replica = self.by_bucket[bucket]
            replica.tick(now, self.dead, etcd_answers)
            if replica.log:
                self._unsent.add(bucket)
            self._follow_up(replica)
        if now - self._beacon_ns >= self._pace.beacon_ns or self._claims is None:
            self._beacon_ns = now
            self._send_beacons(now)
            self._promote(now)
            self._start_copies(now)
        self._settle(now)

    def _note_unheard(self, now: int) -> None:
        """A bucket without writes has to get rid of a follower that is gone, too: without its
        grants nothing can be read, and no write would begin that finds it silent."""
        slow_ns = self._settings.timing.slow_ns
        self._unheard.clear()
        for member, claims in self._all_claims().items():
            if member in self.dead or now - self.leases.heard_ns(member) > slow_ns:
                self._unheard.update(claims)

    def _hear(self, member: Member, now: int) -> None:
        self._heard[member] = now
        if member in self.dead:
            self.dead.discard(member)
            self._suspected.pop(member, None)

    def _forget_hints(self, now: int) -> None:
        """A hint that nothing came of was wrong, maybe: we may never talk to who it is about."""
        for member in list(self.dead):
            since = self._suspected.setdefault(member, now)
            if now - since > self._settings.timing.slow_ns:
                self.dead.discard(member)
                del self._suspected[member]

    def _send_beacons(self, now: int) -> None:
        for member, claims in self._all_claims().items():
            if claims:
                beacon = self.leases.beacon(member, claims, now)
                self.talks.setdefault(member, []).append(beacon)
            self._tell_commits(member, claims, now)

    def _all_claims(self) -> dict[Member, dict[int, int]]:
        """For each member the buckets, with epochs, that need its grant."""
        if self._claims is None:
            self._claims = {}
            for bucket, replica in self.by_bucket.items():
                if replica.tenure:
                    eligible = replica.record.eligible if replica.record else ()
                    for member in {*replica.followers, *eligible}:
                        self._claims.setdefault(member, {})[bucket] = replica.tenure
        return self._claims

    def _tell_commits(self, member: Member, claims: Mapping[int, int], now: int) -> None:
        """What has been committed since ``member`` was last told, and may not have heard."""
        told = self._uncommitted.setdefault(member, {})
        doubtful = self._doubtful.setdefault(member, {})
        for bucket, epoch in claims.items():
            applied = self.by_bucket[bucket].applied
            if told.get(bucket) != applied:
                doubtful[bucket] = now
            if bucket in doubtful:
                told[bucket] = applied
                self.talks.setdefault(member, []).append(Commit(bucket, epoch, applied))

    def _told(self, member: Member, replica: Replica) -> None:
        self._uncommitted.setdefault(member, {})[replica.bucket] = replica.applied

    def _promote(self, now: int) -> None:
        if not self._may_grant(now):
            self._fenced_ns = now
        if now - self._fenced_ns <= self._settings.timing.slow_ns:
            return  # while it granted nothing itself, it could not tell who was silent
        for replica in self.by_bucket.values():
            if replica.synced and not replica.tenure and replica.may_promote(now, self.dead):
                assert replica.record is not None
                self.promotions += 1
                log.info("bucket %d: taking over from %s", replica.bucket, replica.record.primary)
                replica.promote()

    def _start_copies(self, now: int) -> None:
        for bucket in list(self._restless):
            if len(self._copying) >= self._pace.copies_max:
                return
            if self.by_bucket[bucket].start_copy(now):
                self._copying.add(bucket)

    # -- learning, on both sides; see Replica

    def copy_cut(self, bucket: int, session: Session, now: int) -> int | None:
        base = self.by_bucket[bucket].copy_cut(session, now)
        self._settle(now)
        return base

    def copy_done(self, bucket: int, session: Session, now: int) -> None:
        replica = self.by_bucket[bucket]
        if replica.copying is not None:
            self._uncommitted.get(replica.copying.member, {}).pop(bucket, None)
        replica.copy_done(session, now)
        self._unsent.add(bucket)
        self._copying.discard(bucket)
        self._start_copies(now)
        self._settle(now)

    def copy_failed(self, bucket: int, session: Session, now: int) -> None:
        self.by_bucket[bucket].copy_failed(session)
        self._copying.discard(bucket)
        self._settle(now)

    def may_learn(self, bucket: int, session: Session, sender: Member) -> bool:
        return self._replica(BucketId(bucket)).may_learn(session.epoch, session, sender)

    def begin_learning(self, bucket: int, session: Session, now: int) -> None:
        self.by_bucket[bucket].begin_learning(session)
        self._settle(now)

    def learned(self, bucket: int, session: Session, base: int, now: int) -> bool:
        learned = self.by_bucket[bucket].learned(session, base)
        self._settle(now)
        return learned

    def stop_learning(self, bucket: int, session: Session, now: int) -> None:
        self.by_bucket[bucket].stop_learning(session)
        self._settle(now)

    # -- members

    def silent(self, now: int, limit_ns: int) -> list[Member]:
        """Members that matter to us and were not heard of for so long."""
        heard = self._heard
        return [
            m for m in self._all_peers() if now - heard.get(m, 0) > limit_ns and m not in self.dead
        ]

    def _all_peers(self) -> set[Member]:
        """Those who follow us, and the primaries that we follow."""
        if self._claims is None or self._peers is None:
            self._peers = set(self._all_claims())
            for replica in self.by_bucket.values():
                if replica.synced and not replica.tenure and replica.record is not None:
                    self._peers.add(replica.record.primary)
            self._peers.discard(self.me)
        return self._peers

    def suspect(self, member: Member) -> None:
        """It is thought to be gone, until it is heard of again."""
        if member != self.me:
            self.dead.add(member)

    @property
    def remembered(self) -> set[Member]:
        """Members of whom something is kept."""
        return {*self._heard, *self._uncommitted, *self.dead, *self.leases.members}

    def forget(self, members: Collection[Member]) -> None:
        """They will not come back under these names."""
        for member in members:
            self._heard.pop(member, None)
            self._uncommitted.pop(member, None)
            self._doubtful.pop(member, None)
            self.dead.discard(member)
            self._suspected.pop(member, None)
            self.leases.forget(member)

    # -- carrying out

    def _settle(self, now: int) -> None:
        """Carry out what the replicas want, in their order."""
        while self._out:
            out, self._out[:] = self._out[:], []
            for kind, group in groupby(out, type):
                if kind is Apply:
                    self._apply(list(group), now)  # type: ignore[arg-type]
                else:
                    for instruction in group:
                        self._carry_out(instruction)

    def _apply(self, applies: Sequence[Apply], now: int) -> None:
        committed: list[Committed] = []
        for bucket, group in groupby(applies, key=_bucket_of):
            replica = self.by_bucket[bucket]
            copies = replica.copies if replica.tenure else 0
            committed.append(Committed(bucket, [a.entry for a in group], copies))
        self._objects.apply(committed, now)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Tell):
            self.talks.setdefault(instruction.to, []).append(instruction.message)
        elif isinstance(instruction, Changed):
            self._changed(instruction.bucket)
        elif isinstance(instruction, Propose):
            self._unsettle_reads(instruction.change.bucket)
            self.proposals.append(instruction.change)
        elif isinstance(instruction, Copy):
            self.copies.append(instruction)
        elif isinstance(instruction, Discard):
            self._objects.discard(instruction.bucket, instruction.entry)
        elif isinstance(instruction, Abandon):
            self._objects.abandon(instruction.bucket, instruction.entry)
            instruction.entry.ticket = None
        elif isinstance(instruction, Open):
            self._objects.open(instruction.bucket)
        elif isinstance(instruction, Drop):
            self.lost_buckets += instruction.lost
            self._objects.drop(instruction.bucket, instruction.lost)

    def _changed(self, bucket: BucketId) -> None:
        replica = self.by_bucket[bucket]
        serving = replica.serving
        (self.served.add if serving else self.served.discard)(bucket)
        shared = bool(replica.tenure) and (not replica.alone or replica.min_in_sync > 1)
        (self.shared.add if shared else self.shared.discard)(bucket)
        waits = not serving and bool(replica.tenure)
        (self.waiting.add if waits else self.waiting.discard)(bucket)
        self._claims = self._peers = None
        self._unsettle_reads(bucket)
        self._follow_up(replica)

    def _unsettle_reads(self, bucket: BucketId) -> None:
        """Whose grants it takes to read it has changed: what was known before counts no more."""
        self.reads_until = 0
        self._objects.hide(bucket)

    def read_limit(self, now: int) -> int:
        """Until when all served buckets may be read: worth asking when ``reads_until`` is over."""
        if self.reads_until <= now:
            self.reads_until = min(
                (self.by_bucket[b].serve_until() for b in self.served), default=1 << 62
            )
        return self.reads_until

    def validate(self) -> None:
        """Raises AssertionError if replicas or figures disagree. For tests."""
        for bucket, replica in self.by_bucket.items():
            replica.validate()
            assert (bucket in self.served) == replica.serving, f"bucket {bucket}: served"


_bucket_of = attrgetter("bucket")


def _talk(me: Member, to: Member, items: Sequence[Any]) -> Talk:
    """Later beacons and grants replace earlier ones."""
    beacon: Beacon | None = None
    grant: Grant | None = None
    commits: list[Commit] = []
    offers: list[NewEpoch] = []
    acks: list[NewEpochAck] = []
    words: list[SteppedDown] = []
    for item in items:
        if isinstance(item, Beacon):
            beacon = item
        elif isinstance(item, Grant):
            grant = item
        elif isinstance(item, Commit):
            commits.append(item)
        elif isinstance(item, NewEpoch):
            offers.append(item)
        elif isinstance(item, NewEpochAck):
            acks.append(item)
        else:
            words.append(item)
    return Talk(me, to, beacon, grant, commits, offers, acks, words)
