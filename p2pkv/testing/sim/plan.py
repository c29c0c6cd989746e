"""The measures of a schedule: how many nodes, how fast, what goes wrong how often."""

from __future__ import annotations

from random import Random

import msgspec

from p2pkv.clock import MILLISECOND_NS

NODES = 5
BUCKETS = 3
KEYS = 2
"""In each bucket."""

LEASE_NS = 120 * MILLISECOND_NS
BEACON_NS = 30 * MILLISECOND_NS
RESEND_NS = 60 * MILLISECOND_NS
SLOW_NS = 300 * MILLISECOND_NS
PROMOTE_STEP_NS = 20 * MILLISECOND_NS
TICK_NS = 15 * MILLISECOND_NS

SESSION_NS = 600 * MILLISECOND_NS
"""Of the nodes in etcd."""
FENCE_NS = 900 * MILLISECOND_NS
"""A node that long without etcd is fenced."""
RESET_NS = 600 * MILLISECOND_NS
"""A member without a session for so long may be given up by the planner."""
ETCD_TIMEOUT_NS = 150 * MILLISECOND_NS
PREPARE_TIMEOUT_NS = 80 * MILLISECOND_NS
PROBE_NS = 200 * MILLISECOND_NS
"""In which a write is done everywhere when nothing goes wrong."""
PIECE_TIMEOUT_NS = 50 * MILLISECOND_NS
PIECE_TRIES_MAX = 5
PLANNER_NS = 100 * MILLISECOND_NS
CLIENT_TIMEOUT_NS = 250 * MILLISECOND_NS

FAULTS_NS = 3000 * MILLISECOND_NS
"""Things go wrong for so long."""
HEALING_NS = 6000 * MILLISECOND_NS
"""After that much more time everything has to be well again."""
CHECK_NS = 40 * MILLISECOND_NS
CALM_CHECKS = 5
"""So many checks in a row have to find everything well."""
RATE_ERROR = 0.0099


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn once for a whole schedule."""

    replication_factor: int
    min_in_sync: int
    clients: int
    late_joiners: int
    """Nodes that are not there at first."""
    fault_gap_ns: float
    """Mean time between faults."""
    round_trips: bool
    """Whether messages go through their encoding."""


def draw(rng: Random, seed: int) -> Plan:
    return Plan(
        replication_factor=rng.choice([2, 3, 3]),
        min_in_sync=rng.choice([1, 1, 2]),
        clients=rng.choice([2, 4, 6]),
        late_joiners=rng.choice([0, 0, 1]),
        fault_gap_ns=rng.choice([120, 250, 500]) * MILLISECOND_NS,
        round_trips=seed % 16 == 0,
    )
