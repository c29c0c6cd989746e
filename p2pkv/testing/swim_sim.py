"""Many nodes' membership on a simulated network: how quick it is, and whom it wrongs.

    python -m p2pkv.testing.swim_sim --nodes 64 --loss 0.1 --slow 1 --seconds 3600 --json

The real state machines run in simulated time. Packets are encoded and decoded as on the wire, get
lost, and are late; nodes are slow, paused, killed, cut off and started again. ``Simulation`` is
what tests use.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from p2pkv.clock import MILLISECOND_NS, SECOND_NS, seconds
from p2pkv.config import SwimConfig
from p2pkv.roster import PRESENT, Dead, Event
from p2pkv.swim import Action, Send, Swim
from p2pkv.swim_messages import decode, encode
from p2pkv.types import BootId, Member, NodeId

LATENCY_NS = 200_000
SLOW_NS = 700 * MILLISECOND_NS
"""What a slow node needs for each packet that comes in."""


class SimNode:
    """A node: its state machine, and what befalls it."""

    def __init__(self, member: Member, swim: Swim) -> None:
        self.member = member
        self.swim = swim
        self.slow_ns = 0
        self.paused = False
        self.waiting: list[Callable[[], None]] = []
        """What comes in while it is paused."""
        self.timer_ns = -1


class Simulation:
    """``nodes`` members that know each other from the start; time stands until ``run``.

    ``loss`` is the part of packets that gets lost, ``log`` has (time, who saw it, event).
    """

    def __init__(
        self,
        nodes: int = 0,
        *,
        config: SwimConfig | None = None,
        seed: int = 0,
        loss: float = 0.0,
        introduce: bool = True,
    ) -> None:
        self.config = (config or SwimConfig()).resolved()
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = SECOND_NS
        self.nodes: dict[NodeId, SimNode] = {}
        self.cut: set[tuple[NodeId, NodeId]] = set()
        self.log: list[tuple[int, Member, Event]] = []
        self.packets: Counter[NodeId] = Counter()
        """Sent, by sender."""
        self.packet_bytes = 0
        self.packet_bytes_max = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._boots: Counter[NodeId] = Counter()
        for i in range(nodes):
            self.start(f"n{i}", introduce=False)
        if introduce:
            self.introduce()

    # -- nodes

    def start(self, name: str, introduce: bool = True) -> SimNode:
        """A node's (next) life begins. ``introduce``: all know it from etcd at once."""
        node_id = NodeId(name)
        self._boots[node_id] += 1
        member = Member(node_id, BootId(self._boots[node_id]))
        rng = random.Random(self.rng.random())
        swim = Swim(self.config, member, f"sim://{name}", rng, self.now)
        node = self.nodes[node_id] = SimNode(member, swim)
        if introduce:
            self.introduce()
        self._arm(node)
        return node

    def introduce(self, to: Iterable[SimNode] | None = None) -> None:
        """All that run are registered, and told so (or only ``to`` are told)."""
        addresses = {n.member: f"sim://{n.member.node}" for n in self.nodes.values()}
        for node in self.nodes.values() if to is None else to:
            self._handle(node, lambda n=node: n.swim.register(addresses, self.now))  # type: ignore[misc]

    def kill(self, name: str, notice: bool = True) -> Member:
        """SIGKILL. ``notice``: the kernel tells those that are connected to it."""
        node = self.nodes.pop(NodeId(name))
        if notice:
            for other in self.nodes.values():
                if self.linked(other, node):
                    self._later(LATENCY_NS, lambda o=other: self._broke(o, node.member))  # type: ignore[misc]
        return node.member

    def leave(self, name: str) -> Member:
        """SIGTERM: it says good-bye, and ends some milliseconds later."""
        node = self.nodes[NodeId(name)]
        self._carry_out(node, node.swim.leave(self.now))
        self.run(0.005)
        return self.kill(name)

    def break_connection(self, of: str, to: str) -> None:
        """One connection breaks, as when a switch forgets it; both live."""
        self._broke(self.nodes[NodeId(of)], self.nodes[NodeId(to)].member)

    def pause(self, name: str) -> None:
        self.nodes[NodeId(name)].paused = True

    def resume(self, name: str) -> None:
        node = self.nodes[NodeId(name)]
        node.paused = False
        waiting, node.waiting = node.waiting, []
        for arrived in waiting:
            arrived()
        self._fire(node)

    # -- the network

    def partition(self, names: Collection[str]) -> None:
        """Cut these off from the others, both ways."""
        inside = {NodeId(n) for n in names}
        outside = self.nodes.keys() - inside
        self.cut |= {(a, b) for a in inside for b in outside}
        self.cut |= {(b, a) for a in inside for b in outside}

    def cut_one_way(self, source: str, target: str) -> None:
        self.cut.add((NodeId(source), NodeId(target)))

    def heal(self) -> None:
        self.cut.clear()

    def linked(self, source: SimNode, target: SimNode) -> bool:
        return (source.member.node, target.member.node) not in self.cut

    def _carry_out(self, node: SimNode, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(node, action)
            else:
                self.log.append((self.now, node.member, action))
        self._arm(node)

    def _send(self, source: SimNode, action: Send) -> None:
        frame = encode(action.packet)
        self.packets[source.member.node] += 1
        self.packet_bytes += len(frame)
        self.packet_bytes_max = max(self.packet_bytes_max, len(frame))
        target = self.nodes.get(action.to.node)
        if target is None or self.rng.random() < self.loss or not self.linked(source, target):
            return
        latency_ns = round(LATENCY_NS * self.rng.uniform(0.5, 2)) + target.slow_ns
        self._later(latency_ns, lambda: self._arrive(target, frame))

    def _arrive(self, target: SimNode, frame: bytes) -> None:
        self._handle(target, lambda: target.swim.receive(decode(frame), self.now))

    def _broke(self, node: SimNode, member: Member) -> None:
        self._handle(node, lambda: node.swim.connection_broke(member, self.now))

    def _handle(self, node: SimNode, event: Callable[[], list[Action]]) -> None:
        if self.nodes.get(node.member.node) is not node:
            return
        if node.paused:
            node.waiting.append(lambda: self._handle(node, event))
            return
        self._carry_out(node, event())

    # -- time

    def _later(self, delay_ns: int, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_ns, self._order, event))

    def _arm(self, node: SimNode) -> None:
        due_ns = max(self.now, node.swim.due_ns)
        if node.timer_ns < self.now or due_ns < node.timer_ns:
            node.timer_ns = due_ns
            self._later(due_ns - self.now, lambda: self._timer(node, due_ns))

    def _timer(self, node: SimNode, due_ns: int) -> None:
        if due_ns == node.timer_ns:
            node.timer_ns = -1
            self._fire(node)

    def _fire(self, node: SimNode) -> None:
        if self.nodes.get(node.member.node) is node and not node.paused:
            self._carry_out(node, node.swim.tick(self.now))

    def run(self, duration_s: float) -> None:
        end_ns = self.now + seconds(duration_s)
        while self._queue and self._queue[0][0] <= end_ns:
            self.now, _, event = heapq.heappop(self._queue)
            event()
        self.now = end_ns

    # -- what was seen

    def seen(self, kind: type[Event], member: Member) -> dict[NodeId, int]:
        """Who saw such an event of a member, and when first."""
        found: dict[NodeId, int] = {}
        for at_ns, by, event in self.log:
            if isinstance(event, kind) and event.member == member:
                found.setdefault(by.node, at_ns)
        return found

    def events(self, kind: type[Event]) -> list[tuple[int, Member, Event]]:
        return [entry for entry in self.log if isinstance(entry[2], kind)]

    def wrong(self) -> dict[NodeId, set[NodeId]]:
        """Whom each running node does not take for alive that is, or the other way round."""
        found = {}
        for node in self.nodes.values():
            alive = {e.member for e in node.swim.entries() if e.status in PRESENT}
            others = {o.member for o in self.nodes.values() if o is not node}
            if odd := {m.node for m in alive ^ others}:
                found[node.member.node] = odd
        return found


def healthy_run(
    nodes: int, duration_s: float, *, loss: float, slow: int, seed: int, config: SwimConfig
) -> Simulation:
    """Nothing happens but loss and slowness; the first ``slow`` nodes are slow."""
    sim = Simulation(nodes, config=config, seed=seed, loss=loss)
    for i in range(slow):
        sim.nodes[NodeId(f"n{i}")].slow_ns = SLOW_NS
    sim.run(duration_s)
    return sim


def figures(sim: Simulation, duration_s: float, slow: int) -> dict[str, Any]:
    """What a healthy run cost, and whom it wronged."""
    slow_nodes = {f"n{i}" for i in range(slow)}
    suspected = [e.member.node for _, _, e in sim.log if type(e).__name__ == "Suspect"]
    dead = [e.member.node for _, _, e in sim.events(Dead)]
    sent = sum(sim.packets.values())
    return {
        "nodes": len(sim.nodes),
        "simulated_s": duration_s,
        "loss": sim.loss,
        "slow_nodes": slow,
        "packets_per_node_and_s": round(sent / len(sim.nodes) / duration_s, 2),
        "bytes_per_node_and_s": round(sim.packet_bytes / len(sim.nodes) / duration_s),
        "packet_bytes_max": sim.packet_bytes_max,
        "healthy_suspected_total": sum(n not in slow_nodes for n in suspected),
        "healthy_dead_total": sum(n not in slow_nodes for n in dead),
        "slow_suspected_total": sum(n in slow_nodes for n in suspected),
        "slow_dead_total": sum(n in slow_nodes for n in dead),
    }


def detection(nodes: int, *, notice: bool, seed: int, config: SwimConfig) -> dict[str, Any]:
    """How long it takes until all others know of a death."""
    from p2pkv.roster import Suspect

    sim = Simulation(nodes, config=config, seed=seed)
    sim.run(10 * sim.config.probe_interval_s)
    began_ns, member = sim.now, sim.kill("n1", notice=notice)
    sim.run(200 * sim.config.probe_interval_s)
    found: dict[str, Any] = {"nodes": nodes, "connections_tell": notice}
    for kind in (Suspect, Dead):
        seen = sim.seen(kind, member)
        name = f"{kind.__name__.lower()}_everywhere_s"
        complete = len(seen) == nodes - 1
        found[name] = (max(seen.values()) - began_ns) / SECOND_NS if complete else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m p2pkv.testing.swim_sim", description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--slow", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=["local", "lan", "wan"], default="lan")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    config = SwimConfig(preset=given.preset)
    short_s = min(60.0, given.seconds)
    sim = healthy_run(
        given.nodes,
        given.seconds,
        loss=given.loss,
        slow=given.slow,
        seed=given.seed,
        config=config,
    )
    report = {
        "seed": given.seed,
        "preset": given.preset,
        "healthy": figures(sim, given.seconds, given.slow),
        "scaling": [
            figures(
                healthy_run(n, short_s, loss=0, slow=0, seed=given.seed, config=config), short_s, 0
            )
            for n in (16, 64, 128)
        ],
        "death": [
            detection(given.nodes, notice=notice, seed=given.seed, config=config)
            for notice in (True, False)
        ],
    }
    print(json.dumps(report) if given.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
