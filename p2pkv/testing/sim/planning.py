"""The real planner, with a view that is late and answers that get lost."""

from __future__ import annotations

from p2pkv.planner import Planner, PlannerLimits, registered
from p2pkv.records import BucketChange, View
from p2pkv.types import Member

from . import plan as measures
from .etcd_model import EtcdModel
from .world import Network, World

LIMITS = PlannerLimits(settle_s=0.05)


class Planning:
    """The elected node that plans; now and then another one is elected."""

    def __init__(self, world: World, network: Network, etcd: EtcdModel) -> None:
        self.world = world
        self.network = network
        self.etcd = etcd
        self.planner = Planner(LIMITS)
        self._read()

    def _read(self) -> None:
        if not self.etcd.down:
            delay = self.network.delay_ns() * 3
            self.world.after(delay, self._plan, self.etcd.snapshot(), self.etcd.lost())
        self.world.after(measures.PLANNER_NS * self.world.rng.uniform(0.3, 1.5), self._read)

    def _plan(self, view: View, lost: set[Member]) -> None:
        if self.world.rng.random() < 0.02:
            self.planner = Planner(LIMITS)
        changes = self.planner.step(view, registered(view), lost, self.world.now)
        for change in changes:
            if self.world.rng.random() >= self.network.loss:
                self.world.after(self.network.delay_ns(), self._write, change)

    def _write(self, change: BucketChange) -> None:
        if not self.etcd.down:
            self.etcd.restart_lost(change)
