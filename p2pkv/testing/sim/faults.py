"""What goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pkv.clock import MILLISECOND_NS

if TYPE_CHECKING:
    from .node import SimNode, Surroundings

WEIGHTS = {
    "partition": 5, "bridge": 1, "one_way": 3, "etcd_cut": 4, "etcd_down": 1, "pause": 5,
    "crash": 4, "rumour": 4, "drain": 2,
}  # fmt: skip


class Faults:
    """Strikes at random until ``end``; then everything heals."""

    def __init__(self, around: Surroundings, nodes: list[SimNode]) -> None:
        self.around = around
        self.world = around.world
        self.nodes = nodes
        self.healed = False
        self._schedule()

    def _schedule(self) -> None:
        gap = self.world.rng.expovariate(1.0) * self.around.plan.fault_gap_ns
        self.world.after(gap, self._strike)

    def _strike(self) -> None:
        if self.healed:
            return
        rng = self.world.rng
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        duration = rng.choice([60, 200, 500, 1200]) * rng.uniform(0.5, 1.5) * MILLISECOND_NS
        getattr(self, f"_{kind}")(duration)
        self._schedule()

    def heal(self) -> None:
        self.healed = True
        around = self.around
        around.network.calm()
        around.etcd.cut.clear()
        around.etcd.down = False
        self.world.note("all is well again")
        for node in self.nodes:
            if node.paused:
                node.paused_until = self.world.now
                node.wake()
            around.etcd.drain(node.name, False)
            node.boot()

    # -- the network

    def _cut(self, pairs: set[tuple[int, int]], duration: float) -> None:
        self.world.note("cut", sorted(pairs), "for", int(duration) // MILLISECOND_NS, "ms")
        network = self.around.network
        network.part(pairs)
        self.world.after(duration, network.mend, pairs)

    def _pairs(self, left: set[int], right: set[int]) -> set[tuple[int, int]]:
        return {(a, b) for a in left for b in right if a != b}

    def _group(self) -> set[int]:
        return {n for n in range(len(self.nodes)) if self.world.rng.random() < 0.4}

    def _partition(self, duration: float) -> None:
        group = self._group()
        rest = set(range(len(self.nodes))) - group
        self._cut(self._pairs(group, rest) | self._pairs(rest, group), duration)

    def _bridge(self, duration: float) -> None:
        """Two halves that only one node sees both of."""
        numbers = list(range(len(self.nodes)))
        self.world.rng.shuffle(numbers)
        left, right = set(numbers[:2]), set(numbers[2:4])
        self._cut(self._pairs(left, right) | self._pairs(right, left), duration)

    def _one_way(self, duration: float) -> None:
        group = self._group()
        self._cut(self._pairs(group, set(range(len(self.nodes))) - group), duration)

    # -- etcd

    def _etcd_cut(self, duration: float) -> None:
        number = self.world.rng.randrange(len(self.nodes))
        cut = self.around.etcd.cut
        if number not in cut:
            self.world.note("no etcd for", number)
            cut.add(number)
            self.world.after(duration, cut.discard, number)

    def _etcd_down(self, duration: float) -> None:
        etcd = self.around.etcd
        if not etcd.down:
            self.world.note("etcd down")
            etcd.down = True
            self.world.after(duration, self._etcd_up)

    def _etcd_up(self) -> None:
        self.around.etcd.down = False

    # -- nodes

    def _pause(self, duration: float) -> None:
        self.world.rng.choice(self.nodes).pause(duration)

    def _crash(self, duration: float) -> None:
        node = self.world.rng.choice(self.nodes)
        life = node.life
        if life is None:
            return
        node.crash()
        self.world.after(duration, node.boot)
        for other in self.nodes:
            if other is not node and self.world.rng.random() < 0.7:
                delay = self.world.rng.uniform(5, 150) * MILLISECOND_NS
                self.world.after(delay, other.receive, "hear_of_death", life.me)

    def _rumour(self, duration: float) -> None:
        """A hint of death that is wrong."""
        rng = self.world.rng
        life = rng.choice(self.nodes).life
        if life is not None:
            for node in self.nodes:
                if rng.random() < 0.5:
                    node.receive("hear_of_death", life.me)

    def _drain(self, duration: float) -> None:
        """A node has to give everything away."""
        name = self.world.rng.choice(self.nodes).name
        etcd = self.around.etcd
        if not etcd.down:
            self.world.note("drain", name)
            etcd.drain(name, True)
            self.world.after(duration * 2, etcd.drain, name, False)
