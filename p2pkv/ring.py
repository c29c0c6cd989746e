"""Key to bucket, and which nodes should hold which bucket. Pure.

The placement is an explicit table, not a function of the key: it is computed once, stored in etcd
and moved bucket by bucket. ``plan`` computes it from the nodes and the table before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from p2pkv import _native
from p2pkv.errors import InvalidArgument
from p2pkv.types import BucketId, NodeId

HASH_SCHEME = "xxh3_64/tag"
"""Names how a key becomes a bucket; stored in ``meta``, compared when a node joins."""

OVER, UNDER = 0.02, 0.08
"""What a node may hold beyond its share, and lack of it, before copies are moved because of it.

Too many evict early and make a hot node; too few only leave some room unused, and each is a move
saved. So the second is wider.
"""

_SHARE_MIN = 1e-9

G = TypeVar("G", bound=Hashable)

Table = tuple[tuple[NodeId, ...], ...]
"""By bucket: the nodes that should hold it, primary first."""


# -- keys ------------------------------------------------------------------------------------------


def route(key: bytes) -> bytes:
    """The part of a key that decides its bucket: what stands in the first ``{…}``, or all of it.

    As with the hash tags of Redis Cluster, an empty or unclosed one does not count.
    """
    return _tag(key) or key


def bucket_of(key: bytes, bucket_count: int) -> BucketId:
    """The bucket of a key. ``bucket_count`` is a power of two."""
    return BucketId(xxh3_64_intdigest(_tag(key) or key) & (bucket_count - 1))


def buckets_of(keys: Sequence[bytes], bucket_count: int) -> list[int]:
    """``bucket_of`` for each key, in one go; natively, where that was built."""
    if _native.available:
        return _native.buckets_of(keys if isinstance(keys, list) else list(keys), bucket_count)
    return buckets_without_native(keys, bucket_count)


def buckets_without_native(keys: Sequence[bytes], bucket_count: int) -> list[int]:
    """``buckets_of`` in Python. Keys of one tag cost least next to each other."""
    mask = bucket_count - 1
    if b"{" not in b"".join(keys):  # one search for all of them
        return [hashed & mask for hashed in map(xxh3_64_intdigest, keys)]
    return _buckets_of_tagged(keys, mask)


def _buckets_of_tagged(keys: Sequence[bytes], mask: int) -> list[int]:
    digest = xxh3_64_intdigest
    result: list[int] = []
    append = result.append
    head, bucket = b"", 0  # the last key up to the end of its tag, and its bucket
    for key in keys:
        if head and key.startswith(head):
            append(bucket)
        elif b"{" not in key:
            append(digest(key) & mask)
        else:
            start = key.find(b"{") + 1
            end = key.find(b"}", start)
            head, tag = (key[: end + 1], key[start:end]) if end > start else (b"", key)
            bucket = digest(tag) & mask
            append(bucket)
    return result


def bucket_of_prefix(prefix: bytes, bucket_count: int) -> BucketId | None:
    """The one bucket of all keys that start with ``prefix``; None if they may be in several."""
    tag = _tag(prefix)
    return BucketId(xxh3_64_intdigest(tag) & (bucket_count - 1)) if tag else None


def _tag(key: bytes) -> bytes:
    start = key.find(b"{") + 1
    if not start:
        return b""
    end = key.find(b"}", start)
    return key[start:end] if end > start else b""


# -- placement -------------------------------------------------------------------------------------


class NodeSpec(msgspec.Struct, frozen=True):
    """What the placement knows of a node. One of weight 0 keeps nothing and gets nothing."""

    weight: float = 1.0
    host: str = ""
    zone: str = ""
    """Nodes of one host, hosts of one zone may fail together. Without a label each is its own."""


def plan(
    nodes: Mapping[NodeId, NodeSpec],
    previous: Sequence[tuple[NodeId, ...]],
    replication_factor: int,
) -> Table:
    """Say which nodes should hold each bucket of ``previous``, primary first.

    Copies stay where they are as long as that is legal: on a node that takes buckets, and spread
    over zones and hosts as evenly as their number allows. Missing copies go, in the order of
    weighted rendezvous hashing (Schindelhauer and Schomaker 2005), to nodes below their share.
    Then copies move until each node is near its share (``OVER``, ``UNDER``), if need be along a
    chain of nodes; last, primaries are levelled in the same way among the holders of each bucket.

    A share is the node's part of all copies by weight, as far as the spread allows: with two hosts
    and two copies each host has one copy of everything, whatever its weight.

    Equal input gives equal output. A bucket gets fewer copies if there are fewer nodes. Raises
    InvalidArgument for a replication factor below 1 and a weight that is negative or not finite.
    """
    if replication_factor < 1:
        raise InvalidArgument(f"replication_factor = {replication_factor}: must be at least 1")
    for name, spec in nodes.items():
        if not (0 <= spec.weight < math.inf):
            raise InvalidArgument(
                f"weight = {spec.weight} of {name}: must be finite and not below 0"
            )
    placement = _Placement(nodes, previous, replication_factor)
    if not placement.names:
        return ((),) * len(previous)
    placement.keep()
    placement.fill()
    placement.level_copies()
    placement.choose_primaries()
    return placement.table()


class _Placement:
    """One run of ``plan``. Nodes are numbered in the order of their names."""

    def __init__(
        self,
        nodes: Mapping[NodeId, NodeSpec],
        previous: Sequence[tuple[NodeId, ...]],
        replication_factor: int,
    ) -> None:
        self.names = sorted(name for name, spec in nodes.items() if spec.weight > 0)
        self.weights = [nodes[name].weight for name in self.names]
        self.encoded = [name.encode() for name in self.names]
        self.bucket_count = len(previous)
        self.copies_wanted = min(replication_factor, len(self.names))
        index = {name: i for i, name in enumerate(self.names)}
        self.before = [[index[n] for n in dict.fromkeys(held) if n in index] for held in previous]
        self.spread = _Spread([nodes[name] for name in self.names], self.copies_wanted)
        self.shares = self.spread.shares(self.weights, self.bucket_count)
        self.held: list[list[int]] = [[] for _ in previous]
        self.count = [0] * len(self.names)
        self.primary: list[int] = []

    def preference(self, bucket: int, node: int) -> float:
        """Weighted rendezvous: an exponential variate of rate ``weight``; the smallest wins."""
        uniform = ((xxh3_64_intdigest(self.encoded[node], bucket) >> 12) + 0.5) / (1 << 52)
        return -math.log(uniform) / self.weights[node]

    def by_preference(self, bucket: int) -> list[int]:
        return sorted(range(len(self.names)), key=lambda node: self.preference(bucket, node))

    def keep(self) -> None:
        for bucket, before in enumerate(self.before):
            held = self.held[bucket]
            for node in before:
                if len(held) < self.copies_wanted and self.spread.allows(held, node):
                    held.append(node)
                    self.count[node] += 1

    def fill(self) -> None:
        limits = [math.ceil(share) for share in self.shares]
        for bucket, held in enumerate(self.held):
            if len(held) == self.copies_wanted:
                continue
            order = self.by_preference(bucket)
            while len(held) < self.copies_wanted:
                node = self._pick(held, order, limits)
                held.append(node)
                self.count[node] += 1

    def _pick(self, held: list[int], order: list[int], limits: list[int]) -> int:
        """The preferred node below its share; if there is none, the least loaded one."""
        allowed = [n for n in order if n not in held and self.spread.allows(held, n)]
        for node in allowed:
            if self.count[node] < limits[node]:
                return node
        return min(allowed, key=lambda n: self.count[n] / self.shares[n])

    def level_copies(self) -> None:
        def candidates(source: int) -> list[int]:
            return [b for b, held in enumerate(self.held) if source in held]

        def legal(bucket: int, source: int, target: int) -> bool:
            held = self.held[bucket]
            return source in held and target not in held and self._replaceable(held, source, target)

        def move(bucket: int, source: int, target: int) -> None:
            held = self.held[bucket]
            held[held.index(source)] = target

        _Level(self.count, self.shares, candidates, legal, move, self.preference).run()

    def _replaceable(self, held: list[int], source: int, target: int) -> bool:
        return self.spread.trivial or self.spread.allows([n for n in held if n != source], target)

    def choose_primaries(self) -> None:
        count = [0] * len(self.names)
        parts = _portion(float(self.bucket_count), self.weights, [float(c) for c in self.count])
        shares = [max(part, _SHARE_MIN) for part in parts]
        self.primary = [-1] * self.bucket_count
        for bucket, held in enumerate(self.held):
            before = self.before[bucket]
            if before and before[0] in held:
                self.primary[bucket] = before[0]
                count[before[0]] += 1
        for bucket, held in enumerate(self.held):
            if self.primary[bucket] < 0:
                node = min(held, key=lambda n: ((count[n] + 1) / shares[n], n))
                self.primary[bucket] = node
                count[node] += 1
        self._level_primaries(count, shares)

    def _level_primaries(self, count: list[int], shares: list[float]) -> None:
        def candidates(source: int) -> list[int]:
            return [b for b, node in enumerate(self.primary) if node == source]

        def legal(bucket: int, source: int, target: int) -> bool:
            return self.primary[bucket] == source and target in self.held[bucket]

        def move(bucket: int, _source: int, target: int) -> None:
            self.primary[bucket] = target

        _Level(count, shares, candidates, legal, move, self.preference).run()

    def table(self) -> Table:
        return tuple(
            tuple(self.names[n] for n in (primary, *(n for n in held if n != primary)))
            for primary, held in zip(self.primary, self.held, strict=True)
        )


class _Spread:
    """How many copies of one bucket a zone and a host may have: as few as can be.

    The limits are those of nested groups, so a legal set of copies can always be completed, and
    shares that respect them can always be met.
    """

    def __init__(self, specs: Sequence[NodeSpec], copies: int) -> None:
        self.zone = [
            spec.zone or f"\0{spec.host}" if spec.zone or spec.host else f"\0\0{i}"
            for i, spec in enumerate(specs)
        ]
        self.host = [
            (zone, spec.host or f"\0{i}")
            for i, (zone, spec) in enumerate(zip(self.zone, specs, strict=True))
        ]
        self.copies = copies
        sizes = {host: self.host.count(host) for host in self.host}
        self.host_limit = _smallest_limit(list(sizes.values()), copies)
        room: dict[str, int] = {}
        for host, size in sizes.items():
            room[host[0]] = room.get(host[0], 0) + min(size, self.host_limit)
        self.zone_limit = _smallest_limit(list(room.values()), copies)
        self.host_room = {host: min(size, self.host_limit) for host, size in sizes.items()}
        self.zone_room = {zone: min(size, self.zone_limit) for zone, size in room.items()}
        self.trivial = len(room) == len(specs)

    def allows(self, held: Sequence[int], node: int) -> bool:
        """Whether ``node`` may be added to the holders of a bucket."""
        if self.trivial:
            return True
        zone, host = self.zone[node], self.host[node]
        if sum(self.host[n] == host for n in held) >= self.host_limit:
            return False
        return sum(self.zone[n] == zone for n in held) < self.zone_limit

    def shares(self, weights: Sequence[float], bucket_count: int) -> list[float]:
        """How many copies each node should have: by weight, zone by zone and host by host."""
        total = float(bucket_count * self.copies)
        room = {zone: float(n * bucket_count) for zone, n in self.zone_room.items()}
        by_zone = _divide(total, self.zone, weights, room)
        by_host: dict[tuple[str, str], float] = {}
        for zone, amount in by_zone.items():
            members = [n for n, other in enumerate(self.zone) if other == zone]
            hosts = [self.host[n] for n in members]
            room_of_host = {host: float(self.host_room[host] * bucket_count) for host in hosts}
            by_host |= _divide(amount, hosts, [weights[n] for n in members], room_of_host)
        result = [0.0] * len(weights)
        for host, amount in by_host.items():
            members = [n for n, other in enumerate(self.host) if other == host]
            caps = [float(bucket_count)] * len(members)
            parts = _portion(amount, [weights[n] for n in members], caps)
            for n, part in zip(members, parts, strict=True):
                result[n] = max(part, _SHARE_MIN)
        return result


def _smallest_limit(sizes: Sequence[int], copies: int) -> int:
    """The smallest number per group that leaves room for ``copies`` in all groups together."""
    limit = 1
    while sum(min(size, limit) for size in sizes) < copies:
        limit += 1
    return limit


def _divide(
    total: float, group_of: Sequence[G], weights: Sequence[float], caps: Mapping[G, float]
) -> dict[G, float]:
    """``total`` among groups, by the sum of their members' weights."""
    weight_of: dict[G, float] = {}
    for group, weight in zip(group_of, weights, strict=True):
        weight_of[group] = weight_of.get(group, 0.0) + weight
    groups = list(weight_of)
    parts = _portion(total, list(weight_of.values()), [caps[group] for group in groups])
    return dict(zip(groups, parts, strict=True))


def _portion(total: float, weights: Sequence[float], caps: Sequence[float]) -> list[float]:
    """``total`` in proportion to the weights, no part over its cap (water-filling).

    The caps leave room for ``total``. Who would get too much gets the cap; the rest share what is
    left.
    """
    result = [0.0] * len(weights)
    open_parts = sorted(range(len(weights)), key=lambda i: caps[i] / weights[i])
    weight_left = math.fsum(weights)
    for i in open_parts:
        result[i] = min(caps[i], max(0.0, total) * weights[i] / weight_left)
        total -= result[i]
        weight_left = max(weight_left - weights[i], 1e-300)
    return result


class _Level:
    """Moves units (copies or primaries) between nodes until each is near its share.

    A move takes a bucket from a node with too many, or gives one to a node with too few. Where no
    bucket can go directly, the shortest chain of nodes is used (an augmenting path), so that a node
    stays over only if the spread leaves no other way.
    """

    def __init__(
        self,
        count: list[int],
        shares: Sequence[float],
        candidates: Callable[[int], list[int]],
        legal: Callable[[int, int, int], bool],
        move: Callable[[int, int, int], None],
        preference: Callable[[int, int], float],
    ) -> None:
        self.count = count
        self.share = shares
        self.low = [math.floor(share * (1 - UNDER)) for share in shares]
        self.high = [math.ceil(share * (1 + OVER)) for share in shares]
        self.candidates = candidates
        self.legal = legal
        self.move = move
        self.preference = preference
        self.queues: dict[tuple[int, int], deque[int]] = {}

    def run(self) -> None:
        """Each chain brings a node that is out of bounds nearer to them, or ends the search."""
        stuck: set[int] = set()
        while (start := self._worst(stuck)) is not None:
            if not self._relieve(start):
                stuck.add(start)

    def _worst(self, stuck: set[int]) -> int | None:
        """The node furthest out of its bounds."""
        worst, distance = None, 0
        for n, count in enumerate(self.count):
            out = max(count - self.high[n], self.low[n] - count)
            if out > distance and n not in stuck:
                worst, distance = n, out
        return worst

    def _relieve(self, node: int) -> bool:
        """Move one unit away from a node that is over, or to one that is under."""
        over = self.count[node] > self.high[node]
        chain = self._chain(node, away=over)
        if chain is None:
            return False
        for near, far in reversed(list(pairwise(chain))):
            source, target = (near, far) if over else (far, near)
            bucket = self._movable(source, target)
            if bucket is None:
                return False  # an earlier hop of this chain took the spread's last room
            self.move(bucket, source, target)
            self.count[source] -= 1
            self.count[target] += 1
        return True

    def _chain(self, start: int, away: bool) -> list[int] | None:
        """Shortest chain from ``start`` to a node that can take (``away``) or give a unit."""
        reached: dict[int, int] = {start: start}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for other in self._by_load(lightest_first=away):
                if other in reached:
                    continue
                source, target = (node, other) if away else (other, node)
                if self._movable(source, target) is None:
                    continue
                reached[other] = node
                if self._ends(other, away):
                    return self._path(reached, other)
                queue.append(other)
        return None

    def _by_load(self, lightest_first: bool) -> list[int]:
        nodes = range(len(self.count))
        sign = 1 if lightest_first else -1
        return sorted(nodes, key=lambda n: sign * (self.count[n] - self.share[n]) / self.share[n])

    def _ends(self, node: int, away: bool) -> bool:
        return self.count[node] < self.high[node] if away else self.count[node] > self.low[node]

    @staticmethod
    def _path(reached: Mapping[int, int], end: int) -> list[int]:
        path = [end]
        while reached[path[-1]] != path[-1]:
            path.append(reached[path[-1]])
        return path[::-1]

    def _movable(self, source: int, target: int) -> int | None:
        """A bucket that may go from one node to the other; what ``target`` prefers comes first."""
        queue = self.queues.get((source, target))
        if queue is None:
            queue = self.queues[source, target] = deque(
                sorted(self.candidates(source), key=lambda b: self.preference(b, target))
            )
        while queue:
            if self.legal(queue[0], source, target):
                return queue[0]
            queue.popleft()
        return None
