"""Copies that differ are found, counted and mended; those that may differ are not taken for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest
from nodeside import KIB, LIMITS, MIB, A, B, C
from replicating import Cluster, Node, keys_in

from p2pkv import journal, wire
from p2pkv.comparing import Comparing
from p2pkv.config import NodeConfig
from p2pkv.digests import key_hash
from p2pkv.objects import Object
from p2pkv.routing import Lost, Reply, Request
from p2pkv.types import BucketId, Member
from p2pkv.wire import Kind

KEYS = keys_in(0, 40)
K, L, M = KEYS[:3]
BUCKET = BucketId(0)
VALUE = b"v" * 200


class Peers:
    """Carries requests to the other nodes, and lets time pass for the cluster."""

    def __init__(self, cluster: Cluster, me: Member) -> None:
        self.cluster = cluster
        self.me = me
        self.lost: set[Kind] = set()

    async def exchange(self, requests: Sequence[Request], deadline_ns: int) -> Sequence[Any]:
        return [self._carry(request) for request in requests]

    def _carry(self, request: Request) -> Reply | Lost:
        cluster = self.cluster
        assert isinstance(request.to, Member)
        if request.kind in self.lost or not cluster.connected(self.me, request.to):
            return Lost("cut off")
        node, link = cluster.nodes[request.to], cluster._links[request.to, self.me]
        response = node.ask(request.kind, request.body, [], link)
        assert isinstance(response, tuple)
        kind, body, payload = response
        body = wire.decode(wire.encode(Kind(kind), 1, 1, body), 1 << 25).body
        return Reply(kind, body, [bytes(part) for part in payload])


class Compared(Cluster):
    """A cluster whose nodes compare when a test says so."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        super().__init__(stack, **options)
        self.peers = {me: Peers(self, me) for me in self.members}
        config = NodeConfig(cluster="c", node_id="a", etcd=("127.0.0.1:1",), beacon_s=0.004,
                            limits=LIMITS)  # fmt: skip
        self.sides = {
            me: Comparing(config, node.journal, self.peers[me], random.Random(1), lambda: self.now)
            for me, node in self.nodes.items()
        }
        for me, node in self.nodes.items():
            node.handlers.answer_also(self.sides[me].handlers)

    def compare(self, primary: Member = A, rounds: int = 1) -> Comparing:
        """The primary compares the bucket, and everything that comes of it happens."""
        asyncio.run(self._compare(self.sides[primary], rounds))
        return self.sides[primary]

    async def _compare(self, side: Comparing, rounds: int) -> None:
        for _ in range(rounds):
            members = side.in_step()[BUCKET]
            task = asyncio.create_task(side.compare(BUCKET, members))
            while not task.done():
                await asyncio.sleep(0)
                self.tick()
            await task
            self.tick()

    def tell_dropped(self) -> None:
        for side in self.sides.values():
            asyncio.run(side.tell_dropped())


@pytest.fixture
def cluster() -> Iterator[Compared]:
    """Bucket 0 is A's with copies on B and C; all have 40 objects."""
    with ExitStack() as stack, Compared(stack) as cluster:
        cluster.start(A, B, C)
        fill(cluster, cluster[A])
        yield cluster


def fill(cluster: Cluster, node: Node) -> None:
    for key in KEYS:
        node.put(key, value=VALUE)
        cluster.replicate()
    cluster.settle()


def lose(node: Node, *keys: bytes) -> None:
    """Objects are gone from a copy, and nobody knows why."""
    node.store.delete_batch([0] * len(keys), keys, 1)


def item_of(node: Node, key: bytes) -> Object:
    return node.store.buckets[BUCKET].objects[key]


def damage(node: Node, key: bytes) -> None:
    node.store.value(item_of(node, key))[3] ^= 1


def same(cluster: Cluster, *members: Member) -> bool:
    """Whether the copies are the same, values and stamps."""
    found = []
    for member in members or cluster.members:
        node = cluster[member]
        objects = node.store.buckets[BUCKET].objects
        found.append({k: (bytes(node.store.value(o)), o.stamp) for k, o in objects.items()})
    return all(one == found[0] for one in found)


def test_copies_that_are_the_same_are_found_to_be(cluster: Compared) -> None:
    side = cluster.compare()
    assert (side.compared_total, side.differing_total, side.missing) == (1, 0, 0)
    assert same(cluster)


def test_a_copy_that_lost_objects_is_found_counted_and_mended(cluster: Compared) -> None:
    lose(cluster[B], K, L)
    assert not same(cluster)
    side = cluster.compare()
    assert (side.differing_total, side.missing, side.resent_total) == (1, 2, 2)
    assert (side.stale_total, side.extra_total) == (0, 0)
    side = cluster.compare()
    assert (side.compared_total, side.differing_total, side.missing) == (2, 1, 0)
    assert same(cluster)
    assert cluster[B].content()[K][0] == VALUE


def test_a_copy_of_another_write_is_replaced(cluster: Compared) -> None:
    b = cluster[B]
    b.store.put_batch([0], [K], [b"an old one"], wire.PutOptions(), 1, stamps=[7])
    side = cluster.compare(rounds=2)
    assert (side.differing_total, side.stale_total, side.missing) == (1, 1, 0)
    assert same(cluster)


def test_what_only_a_copy_has_is_given_up(cluster: Compared) -> None:
    cluster[C].store.put_batch([0], [b"{k}extra"], [b"1"], wire.PutOptions(), 1)
    side = cluster.compare(rounds=2)
    assert (side.differing_total, side.extra_total) == (1, 1)
    assert same(cluster)


def test_what_was_corrupt_at_the_primary_comes_back_from_a_copy(cluster: Compared) -> None:
    a = cluster[A]
    store = a.store
    for node in cluster.nodes.values():
        item = item_of(node, K)
        node.store.give_checksums([item], [wire_sum(VALUE)])
    damage(a, K)
    assert store.check_batch([item_of(a, K)])
    assert K not in a.content()
    side = cluster.compare(rounds=2)
    assert (side.restored_total, side.extra_total) == (1, 0)
    assert a.content()[K][0] == VALUE
    assert same(cluster)


def test_what_is_corrupt_everywhere_is_not_put_back(cluster: Compared) -> None:
    for node in cluster.nodes.values():
        node.store.give_checksums([item_of(node, K)], [wire_sum(VALUE)])
        damage(node, K)
    cluster[A].store.check_batch([item_of(cluster[A], K)])
    side = cluster.compare(rounds=2)
    assert side.restored_total == 0
    assert all(K not in node.content() for node in cluster.nodes.values())


def test_what_was_corrupt_and_was_written_anew_is_not_overwritten(cluster: Compared) -> None:
    a = cluster[A]
    a.store.drop_corrupt([item_of(a, K)])
    a.put(K, value=b"newer")
    cluster.settle()
    side = cluster.compare()
    assert (side.restored_total, side.differing_total) == (0, 0)
    assert a.content()[K][0] == b"newer"


LARGE = 3 * LIMITS.message_bytes_max + 5


@pytest.fixture
def roomy() -> Iterator[Compared]:
    """As ``cluster``, with room for values that no message holds."""
    with ExitStack() as stack, Compared(stack, arena_bytes=16 * MIB) as cluster:
        cluster.start(A, B, C)
        yield cluster


def hog(node: Node, size: int) -> Object:
    """Take memory that cannot be evicted."""
    node.store.open_bucket(BucketId(3))
    [item] = node.store.allocate_batch([3], [b"hog"], [size], wire.PutOptions(), 1)
    assert isinstance(item, Object)
    return item


def take_over(cluster: Compared) -> None:
    """A dies, B becomes primary; C has a copy."""
    cluster.cut_off = {A}
    cluster.run_until(lambda: BUCKET in cluster[B].replicas.served)


@pytest.mark.parametrize("size", [200 * KIB, LARGE])
def test_a_new_primary_gets_back_what_it_had_no_room_for(roomy: Compared, size: int) -> None:
    a, b = roomy[A], roomy[B]
    memory = hog(b, 16 * MIB - 600 * KIB if size == LARGE else 15 * MIB + 900 * KIB)
    value = random.Random(size).randbytes(size)
    a.put(K, value=value)
    roomy.settle()
    assert K not in b.content()
    b.store.abort_batch([memory])
    take_over(roomy)
    side = roomy.compare(B, rounds=2)
    assert (side.restored_total, side.extra_total, side.missing) == (1, 0, 0)
    assert b.content()[K][0] == value
    assert same(roomy, B, C)
    assert not b.journal.given_up


def test_what_there_is_no_room_for_is_not_got_back(roomy: Compared) -> None:
    b = roomy[B]
    hog(b, 15 * MIB + 900 * KIB)
    roomy[A].put(K, value=bytes(200 * KIB))
    roomy.settle()
    take_over(roomy)
    side = roomy.compare(B, rounds=2)
    assert (side.restored_total, side.extra_total) == (0, 0)
    assert K not in roomy[C].content()


def test_a_new_primary_gets_nothing_back_of_another_write(cluster: Compared) -> None:
    b = cluster[B]
    b.store.drop_corrupt([item_of(b, K)])
    (place,) = b.journal.given_up
    b.journal.given_up[place] += 1
    take_over(cluster)
    side = cluster.compare(B, rounds=2)
    assert (side.restored_total, side.extra_total) == (0, 1)
    assert K not in cluster[C].content()


def test_what_changes_while_it_is_got_back_is_left_alone(roomy: Compared) -> None:
    b, c = roomy[B], roomy[C]
    roomy[A].put(K, value=bytes(LARGE))
    roomy.settle()
    b.store.drop_corrupt([item_of(b, K)])
    take_over(roomy)
    exchange, peers = roomy.peers[B].exchange, roomy.peers[B]

    async def changing(requests: Sequence[Request], deadline_ns: int) -> Sequence[Any]:
        if any(isinstance(r.body, wire.Fetch) and r.body.start for r in requests):
            c.store.restamp(item_of(c, K), item_of(c, K).stamp + 1)
        return await exchange(requests, deadline_ns)

    peers.exchange = changing  # type: ignore[method-assign]
    side = roomy.compare(B)
    assert side.restored_total == 0
    assert not b.store.allocated


def test_part_of_several_values_is_refused(cluster: Compared) -> None:
    body = wire.Fetch(BUCKET, [1, 2], True, 5)
    kind, told, _ = cast(
        tuple[Any, Any, Any], cluster[B].ask(Kind.FETCH, body, [], cluster._links[B, A])
    )
    assert kind == Kind.ERROR
    assert "2 values" in told.message


def test_no_more_is_remembered_of_what_was_given_up_than_so_much(
    cluster: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "GIVEN_UP_MAX", 2)
    b = cluster[B]
    b.store.drop_corrupt([item_of(b, key) for key in (K, L, M)])
    assert list(b.journal.given_up) == [(0, key_hash(L)), (0, key_hash(M))]


def test_what_was_corrupt_at_a_copy_is_told_and_mended(cluster: Compared) -> None:
    b = cluster[B]
    b.store.drop_corrupt([item_of(b, K)])
    cluster.tell_dropped()
    assert cluster.sides[A].missing == 1
    side = cluster.compare(rounds=2)
    assert (side.missing, side.resent_total) == (0, 1)
    assert same(cluster)


def test_copies_differ_by_no_write_that_is_under_way(cluster: Compared) -> None:
    a = cluster[A]
    writing = [a.put(key, value=b"2") for key in KEYS[:9]]
    deleting = a.delete(*KEYS[9:12])
    side = cluster.compare()
    assert not any(w.pending for w in [*writing, deleting])
    assert side.differing_total == 0
    assert same(cluster)


def test_what_the_primary_evicted_and_has_not_told_is_no_difference(cluster: Compared) -> None:
    a = cluster[A]
    a.store.evict_batch([0, 0], [K, L])
    side = cluster.compare(rounds=2)
    assert (side.extra_total, side.resent_total, side.missing) == (0, 0, 0)
    assert same(cluster)
    assert K not in cluster[B].content()


def test_what_expires_at_other_times_is_no_difference(cluster: Compared) -> None:
    a = cluster[A]
    a.put(K, value=b"1", ttl_ms=10_000)
    cluster.settle()
    lose(cluster[B], K)
    assert cluster.compare().differing_total == 0


def test_a_copy_that_does_not_answer_is_left_for_another_time(cluster: Compared) -> None:
    lose(cluster[B], K)
    cluster.peers[A].lost = {Kind.COMPARE}
    side = cluster.compare()
    assert (side.differing_total, side.resent_total) == (0, 0)
    cluster.peers[A].lost = set()
    assert cluster.compare().resent_total == 1


def test_an_object_keeps_its_time_to_live_when_it_is_written_again(cluster: Compared) -> None:
    a = cluster[A]
    a.put(K, value=b"1", ttl_ms=60_000)
    cluster.settle()
    before = item_of(a, K).expires_at
    assert a.journal.resend(item_of(a, K), cluster.now)
    lose(cluster[B], K)
    cluster.settle()
    assert item_of(a, K).expires_at == before
    assert abs(item_of(cluster[B], K).expires_at - before) < 1_000_000_000


def test_an_object_that_is_written_again_and_evicted_meanwhile_is_gone_everywhere(
    cluster: Compared,
) -> None:
    a = cluster[A]
    assert a.journal.resend(item_of(a, K), cluster.now)
    a.store.evict_batch([0], [K])
    cluster.settle()
    assert same(cluster)
    assert all(K not in node.content() for node in cluster.nodes.values())
    assert all(node.store.stats().retiring == 0 for node in cluster.nodes.values())


# -- memory pressure


@pytest.fixture
def tight() -> Iterator[Compared]:
    """B, which has the copies, has room for half of what A has."""
    with ExitStack() as stack, Compared(stack, sizes={B: 64 * KIB, A: MIB}) as cluster:
        cluster.start(A, B)
        yield cluster


def test_copies_that_are_given_up_are_counted_at_the_primary(tight: Compared) -> None:
    a, b = tight[A], tight[B]
    for key in KEYS:
        a.put(key, value=b"v" * 3000)
        tight.replicate()
    tight.settle()
    lacking = len(a.content().keys() - b.content().keys())
    assert lacking > 5
    tight.tell_dropped()
    assert tight.sides[A].missing == lacking
    side = tight.compare()
    assert side.missing == lacking, "comparing finds the same"
    assert side.resent_total == 0, "it would only drive others out"
    assert (side.stale_total, side.extra_total) == (0, 0)


def test_copies_are_made_again_when_there_is_room(tight: Compared) -> None:
    a = tight[A]
    test_copies_that_are_given_up_are_counted_at_the_primary(tight)
    a.delete(*KEYS[12:])
    tight.settle()
    side = tight.compare(rounds=6)
    assert side.missing == 0
    assert side.resent_total > 0
    assert same(tight, A, B)


def test_a_put_that_the_copy_had_no_room_for_has_one_copy(tight: Compared) -> None:
    a = tight[A]
    put = a.put(K, value=b"v" * 3000)
    tight.replicate()
    assert put.copies == [2]
    large = a.put(L, value=b"v" * (100 * KIB))
    tight.replicate()
    assert large.copies in ([], [1]), "empty: one each"
    demanding = a.put(M, value=b"v" * (100 * KIB), min_replicas=2)
    tight.replicate()
    assert demanding.statuses == [wire.Status.NOT_ENOUGH_REPLICAS]


def test_nobody_else_than_a_node_may_compare(cluster: Compared) -> None:
    for kind, body in [
        (Kind.COMPARE, wire.Compare(0, 1)),
        (Kind.FETCH, wire.Fetch(0, [1])),
        (Kind.DROPPED, wire.Dropped({0: 1})),
    ]:
        response = cluster[A].ask(kind, body)
        assert isinstance(response, tuple)
        assert response[0] == Kind.ERROR


def wire_sum(value: bytes) -> int:
    from p2pkv.checksums import checksums_of

    return checksums_of([memoryview(value)])[0]
