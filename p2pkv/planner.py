"""What the elected node proposes so that the buckets come to lie as planned. Pure.

The planner never moves data and never takes a bucket from an owner that may be alive: it writes
into ``assigned`` where the copies should be. The owner brings them there and then writes the next
epoch itself. Only a bucket that has no owner, or whose copies are all provably gone, gets its
primary from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from p2pkv.clock import seconds
from p2pkv.errors import InvalidArgument
from p2pkv.records import BucketChange, BucketRecord, Versioned, View
from p2pkv.ring import NodeSpec, Table, plan
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

# -- the table as nodes and clients read it --------------------------------------------------------


def owners(view: View) -> list[Member | None]:
    """By bucket: its primary, or None if it has no record. Empty if there is no cluster yet."""
    count = view.meta.bucket_count if view.meta else 0
    records = map(view.buckets.get, map(BucketId, range(count)))
    return [versioned.record.primary if versioned else None for versioned in records]


def owned_by(view: View, member: Member) -> list[BucketId]:
    """The buckets whose primary is ``member``, ascending."""
    return sorted(b for b, v in view.buckets.items() if v.record.primary == member)


def holders(view: View) -> set[Member]:
    """All members that a bucket record names as holding a copy."""
    return {member for v in view.buckets.values() for member in copies(v.record)}


def registered(view: View) -> set[Member]:
    """The members that have a node record."""
    return {Member(node, record.boot) for node, record in view.nodes.items()}


def copies(record: BucketRecord) -> set[Member]:
    """The members that have, or may have, the bucket's data."""
    return {record.primary, *record.in_sync, *record.eligible}


# -- planning --------------------------------------------------------------------------------------


class PlannerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the planner acts."""

    moves_in_flight: int = 256
    """Buckets that are assigned elsewhere at the same time, in the whole cluster. Their owners move
    ``moves_max`` of them at once; the others wait there, which spares a round of planning each."""
    moves_per_node: int = 32
    """The same for one node, as source and as target."""
    settle_s: float = 0.5
    """A change of the nodes is acted upon so much later: others may come or go with it."""
    rebuild_delay_s: float = 10.0
    """A node that is gone keeps its place for so long, where there are other copies: it may be
    back, and what it held need not be copied all over the cluster."""

    def __post_init__(self) -> None:
        for field in ("moves_in_flight", "moves_per_node"):
            if getattr(self, field) < 1:
                raise InvalidArgument(f"{field} = {getattr(self, field)}: must be at least 1")
        for field in ("settle_s", "rebuild_delay_s"):
            if getattr(self, field) < 0:
                raise InvalidArgument(f"{field} = {getattr(self, field)}: must not be negative")


class _Inputs(msgspec.Struct, frozen=True):
    """All that the plan depends on besides the table before."""

    nodes: dict[NodeId, NodeSpec]
    bucket_count: int
    replication_factor: int


class Planner:
    """Keeps the plan of a cluster, and proposes the changes that lead to it.

    It can be made anew at any time (another node was elected): everything that matters stands in
    the bucket records, and ``plan`` keeps what it finds there.
    """

    def __init__(self, limits: PlannerLimits | None = None) -> None:
        self.limits = limits or PlannerLimits()
        self._settle_ns = seconds(self.limits.settle_s)
        self._rebuild_ns = seconds(self.limits.rebuild_delay_s)
        self._gone_since: dict[NodeId, int] = {}
        """Nodes that ought to hold copies and are not there."""
        self._inputs: _Inputs | None = None
        self._changed_ns: int | None = None
        self._target: Table = ()

    @property
    def target(self) -> Table:
        """By bucket: where its copies should be, primary first. Empty before the first plan."""
        return self._target

    def step(
        self, view: View, live: Collection[Member], lost: Collection[Member], now: int
    ) -> list[BucketChange]:
        """The changes to propose now; each is guarded by what ``view`` shows of its bucket.

        ``live`` are the members that are heard from, ``lost`` those that the Reset rule gives up
        (``Contacts.lost``). To be called when one of the three changed, and at least once in
        ``settle_s`` as long as ``pending``. What it proposed and is not in ``view`` yet is
        proposed again.
        """
        if view.meta is None:
            return []
        members = {m.node: m for m in registered(view) & set(live)}
        expected = self._expected_back(view, members, now)
        if not expected:
            self._replan(view, members, now)
        return _Round(self, view, members, set(live), set(lost), expected).changes()

    @property
    def pending(self) -> bool:
        """Whether a change of the nodes waits for ``settle_s`` to pass."""
        return self._changed_ns is not None

    def _expected_back(self, view: View, members: dict[NodeId, Member], now: int) -> set[NodeId]:
        """Nodes that are gone for less than ``rebuild_delay_s``, if there are other copies."""
        if view.meta is None or view.meta.replication_factor == 1:
            return set()
        named = {node for v in view.buckets.values() for node in v.record.assigned}
        since = self._gone_since
        self._gone_since = {node: since.get(node, now) for node in named - members.keys()}
        return {n for n, at in self._gone_since.items() if now - at < self._rebuild_ns}

    def _replan(self, view: View, members: dict[NodeId, Member], now: int) -> None:
        inputs = _inputs(view, members)
        if inputs == self._inputs:
            self._changed_ns = None
            return
        if self._changed_ns is None:
            self._changed_ns = now
        if now - self._changed_ns < self._settle_ns:
            return
        records = (view.buckets.get(BucketId(b)) for b in range(inputs.bucket_count))
        before = [versioned.record.assigned if versioned else () for versioned in records]
        self._target = plan(inputs.nodes, before, inputs.replication_factor)
        self._inputs, self._changed_ns = inputs, None

    def validate(self) -> None:
        """Raises AssertionError, with what is wrong, if the plan breaks its own rules."""
        if self._inputs is None:
            assert not self._target, "a plan without nodes to plan for"
            return
        takers = {node for node, spec in self._inputs.nodes.items() if spec.weight > 0}
        width = min(self._inputs.replication_factor, len(takers))
        assert len(self._target) == self._inputs.bucket_count, "the plan misses buckets"
        for bucket, nodes in enumerate(self._target):
            assert len(set(nodes)) == len(nodes) == width, (
                f"bucket {bucket}: {nodes} are not {width}"
            )
            assert takers.issuperset(nodes), f"bucket {bucket}: not all of {nodes} take buckets"


def _inputs(view: View, members: dict[NodeId, Member]) -> _Inputs:
    assert view.meta is not None
    specs = {
        node: NodeSpec(0.0 if record.draining else record.weight, record.host, record.zone)
        for node, record in view.nodes.items()
        if node in members
    }
    return _Inputs(specs, view.meta.bucket_count, view.meta.replication_factor)


class _Round:
    """One step: what is on the move already, and what may be started beside it."""

    def __init__(
        self,
        planner: Planner,
        view: View,
        members: dict[NodeId, Member],
        live: set[Member],
        lost: set[Member],
        expected: set[NodeId],
    ) -> None:
        self.limits = planner.limits
        self.target = planner.target
        self.view = view
        self.members = members
        """Those that are registered and heard from: they may be given buckets."""
        self.takers = {
            n for n in members if view.nodes[n].weight > 0 and not view.nodes[n].draining
        }
        self.expected = expected
        """Not there at the moment: what they are to hold waits for them."""
        self.live = live
        self.gone = {m for m in holders(view) if _superseded(view, m)} | lost
        self.moves = 0
        self.sources: Counter[NodeId] = Counter()
        self.targets: Counter[NodeId] = Counter()

    def changes(self) -> list[BucketChange]:
        owned = [
            (bucket, versioned)
            for bucket in map(BucketId, range(len(self.target)))
            if (versioned := self.view.buckets.get(bucket)) and self._is_owned(versioned.record)
        ]
        for _, versioned in owned:
            self._count(versioned.record, versioned.record.assigned, 1)
        changes = [self._move(bucket, versioned) for bucket, versioned in owned]
        changes += [self._start(BucketId(b), wanted) for b, wanted in enumerate(self.target)]
        return [change for change in changes if change is not None]

    # -- buckets without an owner

    def _start(self, bucket: BucketId, wanted: tuple[NodeId, ...]) -> BucketChange | None:
        """Make the bucket's record, or start it again, empty, if all its copies are gone."""
        home = self.members.get(wanted[0]) if wanted else None
        if home is None:
            return None  # the next plan will have a node that is there
        versioned = self.view.buckets.get(bucket)
        if versioned is None:
            return BucketChange(bucket, Revision(0), _fresh(home, wanted, Epoch(1), 1))
        old = versioned.record
        if not self.gone.issuperset(copies(old)):
            return None
        record = _fresh(home, wanted, Epoch(old.epoch + 1), old.generation + 1)
        return BucketChange(bucket, versioned.mod_revision, record)

    # -- buckets with an owner

    def _is_owned(self, record: BucketRecord) -> bool:
        return record.primary in self.live and record.primary not in self.gone

    def _move(self, bucket: BucketId, versioned: Versioned) -> BucketChange | None:
        record, wanted = versioned.record, self.target[bucket]
        if not wanted:
            return None
        if _in_flight(record, record.assigned):
            assigned = self._redirected(record, wanted)
        elif not _same(wanted, record.assigned) and self._affordable(record, wanted):
            assigned = wanted
            self._count(record, wanted, 1)
        else:
            return None
        if assigned == record.assigned:
            return None
        changed = msgspec.structs.replace(record, assigned=assigned)
        return BucketChange(bucket, versioned.mod_revision, changed)

    def _redirected(self, record: BucketRecord, wanted: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """A move goes on while its targets are there; else to the new ones, or it is called off."""
        if self.takers.issuperset(_incoming(record, record.assigned) - self.expected):
            return record.assigned
        self._count(record, record.assigned, -1)
        if not self._affordable(record, wanted):
            wanted = tuple(dict.fromkeys(m.node for m in (record.primary, *record.in_sync)))
        self._count(record, wanted, 1)
        return wanted

    def _affordable(self, record: BucketRecord, wanted: tuple[NodeId, ...]) -> bool:
        """Whether the bucket may start to move: targets are there, and none has too much to do."""
        incoming = _incoming(record, wanted)
        most = self.limits.moves_per_node
        return (
            self.takers.issuperset(incoming)
            and self.moves < self.limits.moves_in_flight
            and self.sources[record.primary.node] < most
            and all(self.targets[node] < most for node in incoming)
        )

    def _count(self, record: BucketRecord, assigned: tuple[NodeId, ...], by: int) -> None:
        if _in_flight(record, assigned) and self.expected.isdisjoint(assigned):
            self.moves += by
            self.sources[record.primary.node] += by
            for node in _incoming(record, assigned):
                self.targets[node] += by


def _superseded(view: View, member: Member) -> bool:
    """A newer life of the node is registered: this one's memory is gone."""
    return view.boots.get(member.node, BootId(0)) > member.boot


def _fresh(home: Member, wanted: tuple[NodeId, ...], epoch: Epoch, generation: int) -> BucketRecord:
    return BucketRecord(
        epoch=epoch, generation=generation, primary=home, in_sync=(home,), assigned=wanted
    )


def _incoming(record: BucketRecord, assigned: Iterable[NodeId]) -> set[NodeId]:
    """The nodes that have to be brought up to date for ``assigned``."""
    return set(assigned) - {member.node for member in record.in_sync}


def _in_flight(record: BucketRecord, assigned: tuple[NodeId, ...]) -> bool:
    in_sync = tuple(member.node for member in record.in_sync)
    return assigned[0] != record.primary.node or set(assigned) != set(in_sync)


def _same(a: tuple[NodeId, ...], b: tuple[NodeId, ...]) -> bool:
    """Same nodes and same primary."""
    return a[0] == b[0] and set(a) == set(b)
