from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pkv import planner
from p2pkv.clock import SECOND_NS
from p2pkv.errors import InvalidArgument
from p2pkv.planner import Planner, PlannerLimits
from p2pkv.records import BucketChange, BucketRecord, Meta, NodeRecord, Versioned, View
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

AT_ONCE = PlannerLimits(settle_s=0, rebuild_delay_s=0, moves_in_flight=4, moves_per_node=2)


class Cluster:
    """A View that changes are applied to, and who is alive."""

    def __init__(self, bucket_count: int = 16, copies: int = 1) -> None:
        meta = Meta(
            bucket_count=bucket_count, hash_scheme="x", replication_factor=copies, fingerprint="f"
        )
        self.view = View(meta=meta)
        self.live: set[Member] = set()
        self.lost: set[Member] = set()
        self.now = 0

    def start(self, name: str, **fields: Any) -> Member:
        """The node's next life."""
        node = NodeId(name)
        boot = BootId(self.view.boots.get(node, 0) + 1)
        self.view.boots[node] = boot
        self.view.nodes[node] = NodeRecord(boot=boot, control=(), **fields)
        self.kill_process(name)
        member = Member(node, boot)
        self.live.add(member)
        return member

    def kill_process(self, name: str) -> None:
        self.live = {m for m in self.live if m.node != name}

    def kill(self, name: str) -> None:
        """Its session is over too."""
        self.kill_process(name)
        del self.view.nodes[NodeId(name)]

    def set(self, name: str, **fields: Any) -> None:
        record = self.view.nodes[NodeId(name)]
        self.view.nodes[NodeId(name)] = msgspec.structs.replace(record, **fields)

    def step(self, planner: Planner) -> list[BucketChange]:
        """One step, whose changes are carried out."""
        changes = planner.step(self.view, self.live, self.lost, self.now)
        planner.validate()
        assert len({change.bucket for change in changes}) == len(changes)
        for change in changes:
            self.apply(change)
        return changes

    def apply(self, change: BucketChange) -> None:
        old = self.view.buckets.get(change.bucket)
        assert change.expected == (old.mod_revision if old else 0)
        self.view.revision = Revision(self.view.revision + 1)
        self.view.buckets[change.bucket] = Versioned(change.record, self.view.revision)

    def record(self, bucket: int) -> BucketRecord:
        return self.view.buckets[BucketId(bucket)].record

    def put(self, bucket: int, **fields: Any) -> None:
        versioned = self.view.buckets[BucketId(bucket)]
        record = msgspec.structs.replace(versioned.record, **fields)
        self.apply(BucketChange(BucketId(bucket), versioned.mod_revision, record))

    def moving(self) -> list[int]:
        """Buckets that live owners are moving."""
        return [
            b
            for b, v in sorted(self.view.buckets.items())
            if v.record.primary in self.live and v.record.assigned[0] != v.record.primary.node
        ]

    def hand_over(self, bucket: int) -> None:
        """What the owner does when the target has the data."""
        record = self.record(bucket)
        node = record.assigned[0]
        target = Member(node, self.view.nodes[node].boot)
        epoch = Epoch(record.epoch + 1)
        self.put(bucket, epoch=epoch, primary=target, in_sync=(target,))

    def settle(self, planner: Planner) -> int:
        """Steps and hand-overs until nothing is left to do; how many buckets were handed over."""
        moves = 0
        for _ in range(1000):
            changes = self.step(planner)
            for bucket in self.moving():
                self.hand_over(bucket)
                moves += 1
            if not changes and not self.moving():
                return moves
        raise AssertionError("the planner does not come to rest")

    def counts(self) -> dict[str, int]:
        owners = planner.owners(self.view)
        names = {m.node for m in owners if m}
        return {name: sum(m is not None and m.node == name for m in owners) for name in names}


def cluster(*names: str, bucket_count: int = 16) -> tuple[Cluster, Planner]:
    """A cluster at rest."""
    result, plan = Cluster(bucket_count), Planner(AT_ONCE)
    for name in names:
        result.start(name)
    result.settle(plan)
    return result, plan


# -- limits


@pytest.mark.parametrize(
    ("field", "value"), [("moves_in_flight", 0), ("moves_per_node", 0), ("settle_s", -1)]
)
def test_a_limit_that_makes_no_sense_is_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} = {value}"):
        PlannerLimits(**{field: value})  # type: ignore[arg-type]


# -- the table


def test_owners_by_bucket_with_none_for_buckets_without_record() -> None:
    c, _ = cluster("a", bucket_count=4)
    del c.view.buckets[BucketId(2)]
    a = Member(NodeId("a"), BootId(1))
    assert planner.owners(c.view) == [a, a, None, a]
    assert planner.owned_by(c.view, a) == [0, 1, 3]
    assert planner.owned_by(c.view, Member(NodeId("a"), BootId(2))) == []
    assert planner.registered(c.view) == {a}


def test_there_are_no_owners_before_there_is_a_cluster() -> None:
    assert planner.owners(View()) == []


def test_holders_are_all_members_that_may_have_data() -> None:
    c, _ = cluster("a", bucket_count=1)
    a, b, d = (Member(NodeId(name), BootId(1)) for name in "abd")
    c.put(0, in_sync=(a, b), eligible=(d,))
    assert planner.holders(c.view) == {a, b, d}


# -- creating buckets


def test_nothing_is_proposed_before_there_is_a_cluster() -> None:
    assert Planner().step(View(), set(), set(), 0) == []


def test_all_buckets_are_made_on_the_planned_nodes() -> None:
    c, plan = Cluster(16), Planner(AT_ONCE)
    a, b = c.start("a"), c.start("b")
    changes = c.step(plan)
    assert [change.expected for change in changes] == [0] * 16
    assert c.counts() == {"a": 8, "b": 8}
    for bucket in range(16):
        record = c.record(bucket)
        assert record.primary in (a, b)
        assert (record.epoch, record.generation) == (1, 1)
        assert record.in_sync == (record.primary,)
        assert record.assigned == (record.primary.node,) == plan.target[bucket]
    assert c.step(plan) == []


def test_the_first_plan_waits_for_more_nodes_to_come() -> None:
    c, plan = Cluster(), Planner(PlannerLimits(settle_s=0.5))
    c.start("a")
    assert c.step(plan) == []
    assert plan.pending
    c.start("b")
    c.now = SECOND_NS // 2
    assert len(c.step(plan)) == 16
    assert not plan.pending
    assert c.counts() == {"a": 8, "b": 8}


def test_a_change_that_is_taken_back_in_time_changes_nothing() -> None:
    c, plan = Cluster(), Planner(PlannerLimits(settle_s=0.5))
    c.start("a")
    c.step(plan)
    c.now += SECOND_NS
    c.step(plan)
    target = plan.target
    c.start("b")
    c.step(plan)
    c.kill("b")
    c.step(plan)
    assert not plan.pending
    assert plan.target is target


def test_no_bucket_is_made_on_a_node_that_is_not_heard_or_drains_or_has_no_weight() -> None:
    c, plan = Cluster(), Planner(AT_ONCE)
    c.start("deaf")
    c.kill_process("deaf")
    c.start("drains", draining=True)
    c.start("light", weight=0.0)
    assert c.step(plan) == []
    c.start("a")
    c.step(plan)
    assert c.counts() == {"a": 16}


def test_a_bucket_waits_if_its_node_went_after_the_plan() -> None:
    c, plan = Cluster(), Planner(PlannerLimits(settle_s=0.5))
    c.start("a")
    plan.step(c.view, c.live, c.lost, 0)
    plan.step(c.view, c.live, c.lost, SECOND_NS)
    c.kill("a")
    c.now = SECOND_NS
    assert c.step(plan) == []


# -- moving buckets


def test_a_node_that_joins_is_given_its_share() -> None:
    c, plan = cluster("a", "b", bucket_count=96)
    c.start("c")
    assert c.settle(plan) == pytest.approx(32, abs=3)
    assert c.counts()["c"] == pytest.approx(32, abs=3)


def test_a_move_is_proposed_by_assigned_alone() -> None:
    c, plan = cluster("a")
    before = {b: v.record for b, v in c.view.buckets.items()}
    c.start("b")
    for change in c.step(plan):
        assert change.record.assigned == ("b",)
        assert msgspec.structs.replace(change.record, assigned=("a",)) == before[change.bucket]


def test_few_buckets_move_at_a_time_per_source_and_target() -> None:
    c, plan = cluster("a", "b", bucket_count=64)
    c.start("c")
    c.step(plan)
    assert len(c.moving()) == 2
    assert c.step(plan) == []
    c.hand_over(c.moving()[0])
    assert len(c.step(plan)) == 1


def test_few_buckets_move_at_a_time_in_the_cluster() -> None:
    c, plan = cluster("a", "b", "c", bucket_count=64)
    for name in "def":
        c.start(name)
    c.step(plan)
    assert len(c.moving()) == AT_ONCE.moves_in_flight


def test_a_new_planner_goes_on_where_the_last_one_stopped() -> None:
    c, plan = cluster("a", "b", bucket_count=96)
    c.start("c")
    moves = 0
    for _ in range(8):
        c.step(plan)
        for bucket in c.moving()[:1]:
            c.hand_over(bucket)
            moves += 1
    assert moves + c.settle(Planner(AT_ONCE)) == pytest.approx(32, abs=4)


def test_a_draining_node_gives_all_away() -> None:
    c, plan = cluster("a", "b", "c")
    c.set("a", draining=True)
    c.settle(plan)
    assert c.counts() == {"b": 8, "c": 8}


def test_the_last_node_keeps_its_buckets_although_it_drains() -> None:
    c, plan = cluster("a")
    c.set("a", draining=True)
    assert c.settle(plan) == 0
    assert c.counts() == {"a": 16}


def test_a_move_whose_target_dies_goes_elsewhere() -> None:
    c, plan = cluster("a")
    c.set("a", draining=True)
    c.start("b")
    c.step(plan)
    moving = c.moving()
    c.kill("b")
    c.start("d")
    c.step(plan)
    assert {c.record(bucket).assigned for bucket in moving} == {("d",)}


def test_a_move_whose_target_dies_is_called_off_if_there_is_no_other() -> None:
    c, plan = cluster("a")
    c.start("b")
    c.step(plan)
    assert c.moving()
    c.kill("b")
    c.step(plan)
    assert c.moving() == []


def test_a_move_whose_target_dies_is_called_off_if_the_others_are_busy() -> None:
    c, plan = cluster("a", "b", bucket_count=8)
    c.set("a", draining=True)
    c.set("b", draining=True)
    c.start("d")
    c.step(plan)
    assert len(c.moving()) == 2
    c.start("e")
    c.step(plan)
    assert len(c.moving()) == 4
    c.kill("e")
    c.step(plan)
    assert len(c.moving()) == 2
    assert {c.record(bucket).assigned for bucket in c.moving()} == {("d",)}


def test_a_move_goes_on_while_a_new_plan_has_another_target() -> None:
    c, plan = cluster("a")
    c.start("b")
    c.step(plan)
    moving = c.moving()
    c.start("d")
    c.start("e")
    c.set("b", weight=0.01)
    c.step(plan)
    assert {c.record(bucket).assigned for bucket in moving} == {("b",)}


def test_a_move_to_a_node_that_drains_goes_elsewhere() -> None:
    c, plan = cluster("a")
    c.start("b")
    c.step(plan)
    c.set("b", draining=True)
    c.step(plan)
    assert c.moving() == []


def test_no_move_starts_to_a_node_that_is_not_heard_any_more() -> None:
    c, plan = Cluster(), Planner(PlannerLimits(settle_s=0.5))
    c.start("a")
    for c.now in (0, SECOND_NS):
        c.step(plan)
    c.start("b")
    c.now = 2 * SECOND_NS
    c.step(plan)
    c.now = 3 * SECOND_NS
    plan.step(c.view, c.live, c.lost, c.now)
    c.kill_process("b")
    assert c.step(plan) == []


def test_the_moves_of_a_dead_owner_do_not_hold_up_others() -> None:
    c, plan = cluster("a", "b", bucket_count=64)
    c.set("a", draining=True)
    c.set("b", draining=True)
    c.start("c")
    c.step(plan)
    c.kill(c.record(c.moving()[0]).primary.node)
    assert len(c.moving()) < 2
    c.step(plan)
    assert len(c.moving()) == 2


def test_the_order_of_the_backups_is_no_reason_to_change_a_record() -> None:
    c, plan = Cluster(4, copies=3), Planner(AT_ONCE)
    members = [c.start(name) for name in "abc"]
    c.step(plan)
    for bucket in range(4):
        record = c.record(bucket)
        first, *rest = record.assigned
        in_sync = (record.primary, *(m for m in members if m != record.primary))
        c.put(bucket, in_sync=in_sync, assigned=(first, *reversed(rest)))
    assert c.step(plan) == []


def test_a_lost_backup_is_replaced() -> None:
    c, plan = Cluster(1, copies=2), Planner(AT_ONCE)
    members = {name: c.start(name) for name in "abc"}
    c.step(plan)
    record = c.record(0)
    backup = record.assigned[1]
    c.put(0, in_sync=(record.primary, members[backup]))
    c.kill(backup)
    c.put(0, in_sync=(record.primary,))
    c.step(plan)
    (other,) = set("abc") - {record.primary.node, backup}
    assert c.record(0).assigned == (record.primary.node, other)


# -- buckets that are lost


def test_the_buckets_of_a_dead_node_are_left_alone() -> None:
    c, plan = cluster("a", "b")
    c.kill("a")
    assert c.step(plan) == []


def test_the_buckets_of_a_restarted_node_start_again_empty() -> None:
    c, plan = cluster("a", "b")
    old = {b: v.record for b, v in c.view.buckets.items() if v.record.primary.node == "a"}
    c.kill("a")
    c.step(plan)
    reborn = c.start("a")
    changes = c.step(plan)
    assert {change.bucket for change in changes} == old.keys()
    for bucket, before in old.items():
        assert c.record(bucket) == BucketRecord(
            epoch=Epoch(before.epoch + 1),
            generation=before.generation + 1,
            primary=reborn,
            in_sync=(reborn,),
            assigned=("a",),
        )


def test_the_buckets_of_a_member_declared_lost_go_to_those_that_live() -> None:
    c, plan = cluster("a", "b", "c")
    dead = Member(NodeId("a"), BootId(1))
    c.kill("a")
    c.lost = {dead}
    c.step(plan)
    assert c.counts() == {"b": 8, "c": 8}


def test_a_member_declared_lost_loses_its_buckets_although_it_is_heard() -> None:
    """Cut off from etcd alone: it has fenced itself."""
    c, plan = cluster("a", "b")
    del c.view.nodes[NodeId("a")]
    c.lost = {Member(NodeId("a"), BootId(1))}
    c.step(plan)
    assert c.counts() == {"b": 16}


@pytest.mark.parametrize("role", ["in_sync", "eligible"])
def test_a_bucket_is_not_lost_while_one_copy_may_come_back(role: str) -> None:
    c, plan = cluster("a", "b", bucket_count=1)
    owner, other = c.record(0).primary, Member(NodeId("z"), BootId(1))
    members = (owner, other) if role == "in_sync" else (other,)
    c.put(0, **{role: members})
    c.kill(owner.node)
    c.lost = {owner}
    assert c.step(plan) == []
    c.lost = {owner, other}
    assert len(c.step(plan)) == 1


# -- validate


@pytest.mark.parametrize(
    ("target", "story"),
    [
        ((("a",),), "misses buckets"),
        ((("a",), ("a", "b")), "bucket 1: .* are not 1"),
        ((("a",), ("z",)), "bucket 1: not all"),
    ],
)
def test_a_broken_plan_is_noticed(target: Any, story: str) -> None:
    _, plan = cluster("a", "b", bucket_count=2)
    plan._target = target
    with pytest.raises(AssertionError, match=story):
        plan.validate()


def test_a_plan_from_nowhere_is_noticed() -> None:
    plan = Planner()
    plan._target = ((NodeId("a"),),)
    with pytest.raises(AssertionError, match="without nodes"):
        plan.validate()


# -- any course of events


class AnyCourse(RuleBasedStateMachine):
    """Nodes come, go, drain and restart; owners hand over; planners are replaced."""

    names = st.sampled_from([*"abcde"])

    @initialize(copies=st.integers(1, 2), seed=st.integers(0, 1 << 16))
    def begin(self, copies: int, seed: int) -> None:
        self.c, self.plan = Cluster(12, copies), Planner(AT_ONCE)
        self.rng = random.Random(seed)
        self.before: dict[BucketId, BucketRecord] = {}
        self.c.start("a")

    @rule(name=names, weight=st.sampled_from([0.0, 1.0, 2.0]))
    def start(self, name: str, weight: float) -> None:
        self.c.start(name, weight=weight)

    @rule(name=names)
    def kill(self, name: str) -> None:
        if NodeId(name) in self.c.view.nodes:
            self.c.kill(name)

    @rule(name=names, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        if NodeId(name) in self.c.view.nodes:
            self.c.set(name, draining=draining)

    @rule()
    def hand_over(self) -> None:
        moving = [b for b in self.c.moving() if self.c.record(b).assigned[0] in self.c.view.nodes]
        if moving:
            self.c.hand_over(self.rng.choice(moving))

    @rule()
    def elect_another(self) -> None:
        self.plan = Planner(AT_ONCE)

    @rule()
    def declare_lost(self) -> None:
        members = planner.holders(self.c.view) - planner.registered(self.c.view)
        self.c.lost |= {m for m in members if m not in self.c.live}

    @rule()
    def step(self) -> None:
        self.before = {b: v.record for b, v in self.c.view.buckets.items()}
        moving = set(self.c.moving())
        for change in self.c.step(self.plan):
            self._check(change)
        assert len(self.c.moving()) <= max(len(moving), AT_ONCE.moves_in_flight)

    def _check(self, change: BucketChange) -> None:
        before, after = self.before.get(change.bucket), change.record
        if before is None:
            assert (after.epoch, after.generation) == (1, 1)
        elif after.epoch == before.epoch:
            assert msgspec.structs.replace(after, assigned=before.assigned) == before
            assert before.primary in self.c.live
        else:
            assert after.generation == before.generation + 1
            gone = planner.copies(before)
            assert all(m in self.c.lost or self.c.view.boots[m.node] > m.boot for m in gone)

    @precondition(lambda self: hasattr(self, "c"))
    @invariant()
    def every_primary_has_its_bucket_in_sync(self) -> None:
        for versioned in self.c.view.buckets.values():
            assert versioned.record.primary in versioned.record.in_sync

    def teardown(self) -> None:
        """When all is quiet, the living own all buckets whose copies are not in doubt."""
        if not hasattr(self, "c"):
            return
        self.c.view.meta = msgspec.structs.replace(self.c.view.meta, replication_factor=1)  # type: ignore[type-var]
        self.c.start("healthy")
        self.declare_lost()
        self.c.settle(self.plan)
        assert all(owner in self.c.live for owner in planner.owners(self.c.view))


TestAnyCourse = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
