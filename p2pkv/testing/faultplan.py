"""Which faults happen, in which order, and for how long: all of it follows from the seed. Pure."""

from __future__ import annotations

import enum
import math
from random import Random
from typing import NamedTuple

from p2pkv.errors import ConfigError

COUNT_MAX = 10_000


class FaultKind(enum.Enum):
    """What may be done to a cluster."""

    KILL = "kill"
    """SIGKILL of a node; it is started again, empty."""
    STOP = "stop"
    """SIGSTOP of a node, and SIGCONT."""
    ETCD_KILL = "etcd_kill"
    """SIGKILL of every member of etcd; they are started again on their data."""
    ETCD_STOP = "etcd_stop"
    """SIGSTOP of every member of etcd, and SIGCONT."""
    KILL_WITHOUT_ETCD = "kill_without_etcd"
    """SIGKILL of a node while all of etcd is stopped; it starts again when etcd goes on."""
    PARTITION = "partition"
    """Packets between some machines are dropped, and flow again."""


class Cut(enum.Enum):
    """Who does not hear whom in a partition."""

    NODE_FROM_ALL = "a node from everybody"
    NODE_FROM_ETCD = "a node from etcd"
    NODE_FROM_NODE = "two nodes from each other"
    NODE_TO_NODE = "one node's packets to another"
    NODE_FROM_NODES = "a node from all nodes, but not from etcd"


DURATIONS_S = {
    FaultKind.KILL: (0.5, 4.0),
    FaultKind.STOP: (0.2, 8.0),
    FaultKind.ETCD_KILL: (0.5, 5.0),
    FaultKind.ETCD_STOP: (0.5, 8.0),
    FaultKind.KILL_WITHOUT_ETCD: (1.5, 6.0),
    FaultKind.PARTITION: (0.3, 8.0),
}
"""From the fault to its end: shorter and longer than the store's own deadlines."""


class Fault(NamedTuple):
    """One fault. ``choice`` and ``other`` (0 to 1) pick its victims among those there are then."""

    kind: FaultKind
    pause_s: float
    """How long the cluster is left alone before, once it is whole."""
    duration_s: float
    choice: float
    other: float
    cut: Cut

    def pick(self, names: list[str]) -> str:
        """The victim."""
        return names[int(self.choice * len(names))]

    def pick_other(self, names: list[str]) -> str:
        """Somebody else."""
        rest = [name for name in names if name != self.pick(names)]
        return rest[int(self.other * len(rest))]


def parse(text: str) -> dict[FaultKind, int]:
    """Counts from ``kill=30,stop=5``. Raises ConfigError."""
    counts = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        known = [kind.value for kind in FaultKind]
        if name not in known:
            raise ConfigError(f"faults = {text!r}: {name!r} must be one of {', '.join(known)}")
        if not number.isdigit() or int(number) > COUNT_MAX:
            raise ConfigError(f"faults = {text!r}: {name} needs a number, 0 to {COUNT_MAX}")
        counts[FaultKind(name)] = int(number)
    return counts


def plan(
    counts: dict[FaultKind, int],
    rng: Random,
    pause_s: float,
    duration_s_max: float = math.inf,
    duration_s: float = 0.0,
) -> list[Fault]:
    """The faults in a random order; ``pause_s`` is the mean pause between them.

    ``duration_s``: how long each lasts, whatever its kind; 0: by chance, up to ``duration_s_max``.
    """
    kinds = [kind for kind in FaultKind for _ in range(counts.get(kind, 0))]
    rng.shuffle(kinds)
    return [
        Fault(
            kind=kind,
            pause_s=rng.uniform(0.2, 1.8) * pause_s,
            duration_s=duration_s or min(duration_s_max, _log_uniform(rng, *DURATIONS_S[kind])),
            choice=rng.random(),
            other=rng.random(),
            cut=rng.choice(list(Cut)),
        )
        for kind in kinds
    ]


def _log_uniform(rng: Random, low: float, high: float) -> float:
    """Short and long times are equally likely, on a scale of factors."""
    return float(low * (high / low) ** rng.random())


__all__ = ["COUNT_MAX", "DURATIONS_S", "Cut", "Fault", "FaultKind", "parse", "plan"]
