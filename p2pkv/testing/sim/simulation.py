"""One schedule, from its seed to a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import extract_tb

from p2pkv.replication import Role
from p2pkv.types import BucketId

from . import plan as measures
from .audit import Auditor, Violation
from .clients import Client, Records, Served, check_histories
from .etcd_model import EtcdModel
from .faults import Faults
from .node import Life, SimNode, Surroundings
from .planning import Planning
from .world import Network, World


@dataclass(frozen=True)
class Verdict:
    """How a schedule went. ``violation`` is empty if all was well; its first word names it."""

    seed: int
    violation: str
    acknowledged: int
    committed: int
    records: int
    promotions: int
    generations: int
    healed_ns: int


class Simulation:
    """Five nodes, etcd, clients and faults, from a seed."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.seed = seed
        self.world = World(seed)
        self.world.tracing = tracing
        self.plan = measures.draw(self.world.rng, seed)
        self.network = Network(self.world)
        self.etcd = EtcdModel(self.world, self.plan)
        self.auditor = Auditor(self.etcd)
        self.records = Records()
        around = Surroundings(
            self.world, self.network, self.etcd, self.auditor, self.plan, self.records.evict
        )
        self.nodes = [SimNode(around, number) for number in range(measures.NODES)]
        for node in self.nodes:
            node.others = self.nodes
        for number, node in enumerate(self.nodes):
            late = number >= measures.NODES - self.plan.late_joiners
            self.world.after(self.world.rng.random() * 1e9 if late else 0, node.boot)
        self.planning = Planning(self.world, self.network, self.etcd)
        self.clients = [
            Client(around, self.nodes, self.records, n) for n in range(self.plan.clients)
        ]
        self.faults = Faults(around, self.nodes)
        self.healed_ns = 0

    def run(self) -> None:
        """Raises Violation."""
        self.world.run_until(measures.FAULTS_NS)
        self.faults.heal()
        self._await_wellness()
        self.healed_ns = self.world.now - measures.FAULTS_NS
        self._probe()
        check_histories(self.records)

    def _await_wellness(self) -> None:
        """Everything has to be well within a time, and to stay so."""
        end = self.world.now + measures.HEALING_NS
        well = 0
        while well < measures.CALM_CHECKS:
            self.world.run_until(self.world.now + measures.CHECK_NS)
            complaint = self.complaint()
            well = 0 if complaint else well + 1
            if self.world.now >= end and complaint:
                raise Violation(f"not-well: {complaint}")

    def complaint(self) -> str:
        """What is not as it should be when nothing goes wrong; empty: nothing."""
        target = self.planning.planner.target
        if not all(target) or len(target) != measures.BUCKETS:
            return f"the planner's target is {target}"
        for bucket in range(measures.BUCKETS):
            versioned = self.etcd.view.buckets.get(BucketId(bucket))
            if versioned is None:
                return f"bucket {bucket} has no record"
            record = versioned.record
            wanted = target[bucket]
            if record.primary.node != wanted[0] or set(wanted) != {m.node for m in record.in_sync}:
                return f"bucket {bucket} should be on {wanted}, is {record}"
            primary = self.auditor.lives.get(record.primary)
            if primary is None or not primary.may_read(bucket):
                return f"bucket {bucket} cannot be read"
            if not primary.replicas.by_bucket[bucket].writable:
                return f"bucket {bucket} cannot be written"
        return ""

    def _probe(self) -> None:
        """Every bucket takes a write, and all copies have the same."""
        for client in self.clients:
            client.stopped = True
        self.records.closed = True
        self.world.run_until(self.world.now + measures.CLIENT_TIMEOUT_NS)
        self._await_wellness()
        buckets = [BucketId(b) for b in range(measures.BUCKETS)]
        answers: list[object] = []
        for bucket in buckets:
            primary = self._primary(bucket)
            served = Served(primary, self.records, "probe", self.world.now, [], answers.append)
            served.serve("put", bucket, 0, "probe")
        self.world.run_until(self.world.now + measures.PROBE_NS)
        if answers != [[True]] * len(buckets):
            raise Violation(f"not-well: writes to all buckets were answered {answers}")
        for bucket in buckets:
            self._compare(bucket)

    def _primary(self, bucket: BucketId) -> Life:
        return self.auditor.lives[self.etcd.view.buckets[bucket].record.primary]

    def _compare(self, bucket: BucketId) -> None:
        record = self.etcd.view.buckets[bucket].record
        primary = self._primary(bucket)
        last = primary.replicas.by_bucket[bucket].applied
        for member in record.in_sync:
            life = self.auditor.lives[member]
            replica = life.replicas.by_bucket[bucket]
            if (
                replica.applied < last
                or life.objects.stores[bucket] != primary.objects.stores[bucket]
            ):
                raise Violation(f"not-well: {member} has applied {replica.applied} of {last}")

    def state(self) -> str:
        """All replicas, for a person to look at."""
        lines = [f"seed {self.seed}, at {self.world.now / 1e6:.3f} ms"]
        for bucket, versioned in sorted(self.etcd.view.buckets.items()):
            lines.append(f"bucket {bucket}: {versioned}")
            lines += [f"  {life.me}: {_described(life, bucket)}" for life in self.lives()]
        return "\n".join(lines)

    def lives(self) -> list[Life]:
        return [self.auditor.lives[m] for m in sorted(self.auditor.lives)]

    def verdict(self) -> Verdict:
        """Run it all."""
        try:
            self.run()
            violation = ""
        except Violation as e:
            violation = str(e)
        except Exception as e:
            where = "; ".join(f"{f.name} {f.lineno}" for f in extract_tb(e.__traceback__)[-4:])
            violation = f"{type(e).__name__}: {e} ({where})"
        generations = sum(v.record.generation - 1 for v in self.etcd.view.buckets.values())
        return Verdict(
            self.seed, violation, self.records.acknowledged, self.auditor.committed,
            sum(v.record.epoch for v in self.etcd.view.buckets.values()),
            sum(life.replicas.promotions for life in self.lives()), generations, self.healed_ns,
        )  # fmt: skip


def _described(life: Life, bucket: BucketId) -> str:
    replica = life.replicas.get(bucket)
    if replica is None or replica.role is Role.ABSENT:
        return "absent" if replica is None else f"absent, epoch seen {replica.epoch_seen}"
    followers = {
        str(m): (f.acked, f.sent, f.confirmed, f.session) for m, f in replica.followers.items()
    }
    return (
        f"{replica.role.value} gen {replica.generation} tenure {replica.tenure} synced "
        f"{replica.synced} {replica.session} seen {replica.epoch_seen} rev {replica.revision} "
        f"applied {replica.applied} last {replica.last} reads {life.may_read(bucket)} "
        f"followers {followers} copying {replica.copying and replica.copying.session} "
        f"proposing {replica.proposing}"
    )
