"""Virtual time, chance, and a network that cannot be trusted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from p2pkv.clock import MILLISECOND_NS

TRACE_MAX = 4000


class World:
    """What happens when. All chance of a schedule comes from ``rng``."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0
        """True time; nodes see it through clocks of their own."""
        self.trace: deque[tuple[int, str]] = deque(maxlen=TRACE_MAX)
        self.tracing = False
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_ns: float, do: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + int(delay_ns), self._count, do, arguments))

    def run_until(self, end: int) -> None:
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, do, arguments = heapq.heappop(events)
            do(*arguments)
        self.now = end

    def note(self, *words: Any) -> None:
        if self.tracing:
            self.trace.append((self.now, " ".join(map(str, words))))


class Network:
    """Messages between places (numbers of nodes): late, lost, twice, in any order, or cut off."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        self.world = world
        self.cut: dict[tuple[int, int], int] = {}
        """How many partitions keep the first from reaching the second."""
        self.loss: float = rng.choice([0.0, 0.01, 0.05])
        self.twice = 0.01
        self.straggling = 0.01
        self.latency_ns = rng.choice([1, 3, 8]) * MILLISECOND_NS

    def calm(self) -> None:
        """From now on everything arrives, once, soon."""
        self.cut.clear()
        self.loss = self.twice = self.straggling = 0.0
        self.latency_ns = min(self.latency_ns, 3 * MILLISECOND_NS)

    def delay_ns(self) -> float:
        rng = self.world.rng
        delay = rng.expovariate(1.0) * self.latency_ns
        return delay + rng.random() * 200 * MILLISECOND_NS if self._happens("straggling") else delay

    def _happens(self, what: str) -> bool:
        chance: float = getattr(self, what)
        return chance > 0 and self.world.rng.random() < chance

    def send(self, source: int, target: int, do: Callable[..., None], *arguments: Any) -> None:
        """Have ``do(*arguments)`` done at the target, or not."""
        if (source, target) in self.cut or self._happens("loss"):
            return
        self.world.after(self.delay_ns(), self._arrive, source, target, do, arguments)
        if self._happens("twice"):
            self.world.after(self.delay_ns(), self._arrive, source, target, do, arguments)

    def _arrive(
        self, source: int, target: int, do: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if (source, target) not in self.cut:
            do(*arguments)

    def part(self, pairs: set[tuple[int, int]]) -> None:
        for pair in pairs:
            self.cut[pair] = self.cut.get(pair, 0) + 1

    def mend(self, pairs: set[tuple[int, int]]) -> None:
        for pair in pairs:
            left = self.cut.get(pair, 0) - 1
            if left > 0:
                self.cut[pair] = left
            else:
                self.cut.pop(pair, None)
