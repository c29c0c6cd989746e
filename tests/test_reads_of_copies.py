"""Who may answer a read: the primary while copies grant it that, and any copy for a little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from nodeside import A, B, C, answered, flat
from replicating import LEASE_NS, Cluster, Node, keys_in

from p2pkv import wire
from p2pkv.wire import Kind, Status

ONCE, PLAIN, GONE = keys_in(0, 3)
MISS, NOT_PRIMARY, STALLED = Status.MISS, Status.NOT_PRIMARY, Status.STALLED


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Bucket 0 is A's with a copy on B, which knows that both puts are committed."""
    with ExitStack() as stack, Cluster(stack) as cluster:
        a = cluster.start(A, B)
        a.put(ONCE, value=b"once", write_once=True)
        a.put(PLAIN, value=b"plain")
        cluster.replicate()
        cluster.tick()
        yield cluster


@pytest.fixture
def a(cluster: Cluster) -> Node:
    return cluster[A]


@pytest.fixture
def b(cluster: Cluster) -> Node:
    return cluster[B]


def test_the_primary_answers_anybody(a: Node) -> None:
    assert a.get(ONCE, PLAIN, GONE) == [b"once", b"plain", MISS]
    assert a.get(ONCE, PLAIN, GONE, any_copy=True) == [b"once", b"plain", MISS]


def test_a_backup_answers_with_what_was_written_once_and_only_who_asks_for_any_copy(
    b: Node,
) -> None:
    assert b.get(ONCE, PLAIN, GONE) == [NOT_PRIMARY] * 3
    assert b.get(ONCE, PLAIN, GONE, any_copy=True) == [b"once", NOT_PRIMARY, NOT_PRIMARY]


def test_a_node_without_the_bucket_has_nothing_to_say(cluster: Cluster) -> None:
    assert cluster[C].get(ONCE, any_copy=True) == [NOT_PRIMARY]
    assert cluster[C].get(*keys_in(3, 1), any_copy=True) == [NOT_PRIMARY]


def test_a_backup_does_not_tell_what_is_not_committed(cluster: Cluster, a: Node, b: Node) -> None:
    a.put(GONE, value=b"prepared", write_once=True)
    cluster.replicate()
    assert a.get(GONE) == [b"prepared"]
    assert b.get(GONE, any_copy=True) == [NOT_PRIMARY]
    cluster.tick()
    assert b.get(GONE, any_copy=True) == [b"prepared"]


def test_a_backup_does_not_tell_what_it_knows_to_be_deleted(
    cluster: Cluster, a: Node, b: Node
) -> None:
    a.delete(ONCE)
    cluster.replicate()
    cluster.tick()
    assert b.get(ONCE, any_copy=True) == [NOT_PRIMARY]


def test_ranges_are_read_from_copies_too(b: Node) -> None:
    body = wire.Get([ONCE, PLAIN], starts=[1, 0], lengths=[2, 1], any_copy=True)
    response = b.ask(Kind.GET, body)
    assert isinstance(response, tuple)
    answer = answered(response, Kind.VALUES)
    assert list(answer.statuses) == [Status.OK, NOT_PRIMARY]
    assert b"".join(flat(response[2])) == b"nc"


def test_a_primary_without_grants_answers_as_a_copy_does(cluster: Cluster, a: Node) -> None:
    cluster.cut_off = {B}
    cluster.now += LEASE_NS
    assert a.get(ONCE, PLAIN, GONE) == [STALLED] * 3
    assert a.get(ONCE, PLAIN, GONE, any_copy=True) == [b"once", STALLED, STALLED]


def test_a_primary_that_wakes_up_late_serves_nothing_stale(
    cluster: Cluster, a: Node, b: Node
) -> None:
    """B has taken over; A has heard of nothing yet."""
    cluster.cut_off = {A}
    cluster.run_until(lambda: 0 in b.replicas.served)
    b.put(PLAIN, value=b"new")
    cluster.run_until(lambda: b.get(PLAIN) == [b"new"])
    assert 0 in a.replicas.served, "as far as it knows"
    assert a.get(PLAIN, ONCE, any_copy=True) == [STALLED, b"once"]
    assert a.put(PLAIN).statuses == [STALLED]


def test_one_copy_is_served_without_anybodys_grant(cluster: Cluster, a: Node) -> None:
    cluster.start(A, buckets=[1])
    [key] = keys_in(1, 1)
    a.put(key, value=b"1")
    cluster.cut_off = {A}
    cluster.now += 100 * LEASE_NS
    assert a.get(key) == [b"1"]
    a.fenced = True
    assert a.get(key) == [STALLED]


def test_a_fenced_primary_serves_what_a_living_copy_lets_it_serve(
    cluster: Cluster, a: Node
) -> None:
    a.fenced = True
    assert a.get(PLAIN) == [b"plain"]
    put = a.put(PLAIN, value=b"2")
    cluster.replicate()
    assert put.copies == [2]


def test_a_fenced_node_grants_nothing(cluster: Cluster, a: Node, b: Node) -> None:
    b.fenced = True
    cluster.run_until(lambda: a.get(PLAIN) == [STALLED])
    cluster.run_until(lambda: cluster.records[0].record.in_sync == (A,))
    assert a.get(PLAIN) == [b"plain"]
