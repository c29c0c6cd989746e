"""Writes of buckets with copies: decided by the primary, told when all have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from nodeside import KIB, MIB, MS, A, B, C, S
from replicating import Cluster, Node, keys_in

from p2pkv import wire
from p2pkv.objects import Pin
from p2pkv.replication import Role
from p2pkv.wire import Kind, Status

K, L, M = keys_in(0, 3)
[ALONE] = keys_in(1, 1)
OK, MISS, EXISTS = Status.OK, Status.MISS, Status.EXISTS


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Bucket 0 is A's with a copy on B, bucket 1 is A's alone."""
    with ExitStack() as stack, Cluster(stack) as cluster:
        cluster.start(A, B)
        cluster.start(A, buckets=[1])
        yield cluster


@pytest.fixture
def a(cluster: Cluster) -> Node:
    return cluster[A]


@pytest.fixture
def b(cluster: Cluster) -> Node:
    return cluster[B]


# -- when a write is told, and what is read meanwhile


def test_a_put_is_told_when_the_copy_has_it_and_is_read_from_then_on(
    cluster: Cluster, a: Node, b: Node
) -> None:
    put = a.put(K, value=b"1")
    assert put.pending
    assert a.get(K) == [MISS]
    cluster.replicate()
    assert (put.statuses, put.copies) == ([], [2])
    assert a.get(K) == [b"1"]
    cluster.tick()
    assert b.content()[K][0] == b"1"


def test_a_put_of_a_bucket_with_one_copy_is_told_at_once(a: Node) -> None:
    put = a.put(ALONE)
    assert (put.statuses, put.copies) == ([], [])
    assert a.get(ALONE) == [b"v"]


def test_a_batch_over_both_kinds_of_buckets_is_told_when_the_last_is_there(
    cluster: Cluster, a: Node
) -> None:
    put = a.put(K, ALONE, L)
    assert put.pending
    assert a.get(K, ALONE, L) == [MISS, b"v", MISS]
    cluster.replicate()
    assert (put.statuses, put.copies) == ([], [2, 1, 2])
    both = a.delete(ALONE, K, M)
    cluster.replicate()
    assert both.statuses == [OK, OK, MISS]


def test_an_overwrite_shows_the_old_value_until_it_is_committed(cluster: Cluster, a: Node) -> None:
    a.put(K, value=b"old")
    cluster.replicate()
    a.put(K, value=b"new")
    assert a.get(K) == [b"old"]
    cluster.replicate()
    assert a.get(K) == [b"new"]


def test_a_repeat_of_a_pending_write_waits_for_the_same_answer(cluster: Cluster, a: Node) -> None:
    body = wire.Put([K], [1], wire.PutOptions(if_absent=True))
    first = a.ask(Kind.PUT, body, [b"1"], request=77)
    assert a.ask(Kind.PUT, body, [b"1"], request=77) is first
    cluster.replicate()
    kind, statuses, _ = a.ask(Kind.PUT, body, [b"1"], request=77).response  # type: ignore[union-attr]
    assert (kind, statuses.statuses) == (Kind.STATUSES, b"")
    assert a.replicas.by_bucket[0].last == 1


# -- decided by what is prepared, too


def test_of_two_conditional_puts_under_way_one_stores(cluster: Cluster, a: Node) -> None:
    first, second = a.put(K, value=b"1", if_absent=True), a.put(K, value=b"2", if_absent=True)
    assert second.pending, "what it was decided by is not committed"
    cluster.replicate()
    assert (first.statuses, second.statuses) == ([], [EXISTS])
    assert a.get(K) == [b"1"]


def test_a_conditional_put_behind_a_delete_under_way_stores(
    cluster: Cluster, a: Node, b: Node
) -> None:
    a.put(K, value=b"old")
    cluster.replicate()
    deleted = a.delete(K)
    put = a.put(K, value=b"new", write_once=True)
    cluster.replicate()
    assert deleted.statuses == []
    assert put.statuses == []
    cluster.tick()
    assert a.get(K) == [b"new"]
    assert b.content()[K][0] == b"new"


def test_what_is_written_once_is_not_written_again(cluster: Cluster, a: Node, b: Node) -> None:
    first = a.put(K, value=b"1", write_once=True)
    during = a.put(K, value=b"2")
    assert during.pending
    cluster.replicate()
    after = a.put(K, value=b"3")
    assert not after.pending
    assert first.statuses == during.statuses == after.statuses == []
    assert first.copies == during.copies == after.copies == [2]
    assert a.get(K) == [b"1"]
    cluster.tick()
    assert b.content()[K][0] == b"1"
    assert a.store.stats().allocated == b.store.stats().allocated == 0


def test_what_is_written_once_stays_so_while_its_time_to_live_changes(
    cluster: Cluster, a: Node, b: Node
) -> None:
    a.put(K, value=b"1", write_once=True)
    a.expire(K, ttl_ms=60_000)
    a.expire(K, ttl_ms=90_000)
    second = a.put(K, value=b"2")
    cluster.replicate()
    cluster.tick()
    assert second.statuses == []
    assert a.get(K) == [b"1"]
    assert b.content()[K][0] == b"1"


def test_a_put_that_exists_among_others_counts_its_copies(cluster: Cluster, a: Node) -> None:
    a.put(K, write_once=True)
    cluster.replicate()
    put = a.put(K, L, write_once=True)
    cluster.replicate()
    assert put.copies == [2, 2]


def test_a_delete_tells_whether_the_key_was_there_when_it_was_decided(
    cluster: Cluster, a: Node
) -> None:
    put, first, second = a.put(K), a.delete(K), a.delete(K)
    cluster.replicate()
    assert put.statuses == []
    assert first.statuses == []
    assert second.statuses == [MISS]


def test_a_delete_of_what_was_evicted_here_reaches_the_copy_that_kept_it(
    cluster: Cluster, a: Node, b: Node
) -> None:
    a.put(K)
    cluster.replicate()
    cluster.tick()
    a.store.evict_batch([0], [K])
    a.journal._evicted.clear()  # the primary died before it could tell
    deleted = a.delete(K)
    cluster.replicate()
    cluster.tick()
    assert deleted.statuses == [MISS]
    assert b.keys() == set()


def test_expiry_counts_for_what_is_there_or_on_its_way(cluster: Cluster, a: Node, b: Node) -> None:
    a.put(K)
    there, missing = a.expire(K, ttl_ms=1000), a.expire(L, ttl_ms=1000)
    assert missing.statuses == [MISS]
    assert there.pending
    cluster.replicate()
    cluster.tick()
    assert there.statuses == []
    expires = a.content()[K][1]
    assert 0 < expires <= b.content()[K][1] <= expires + S // 4
    cluster.now += 2 * S
    assert b.keys() == set()


def test_a_time_to_live_that_is_prolonged_in_time_is_prolonged_on_the_copy_that_hears_of_it_late(
    cluster: Cluster, a: Node, b: Node
) -> None:
    a.put(K, ttl_ms=200)
    cluster.replicate()
    cluster.tick()
    cluster.now += 10 * MS
    prolonged = a.expire(K, ttl_ms=60_000)
    cluster.replicate()
    assert prolonged.statuses == []
    cluster.cut_off = {B}  # the word that it is committed comes late
    cluster.now += 400 * MS
    for node in (a, b):
        node.journal.reap(cluster.now)
    assert b.keys() == set(), "it is seen by nobody"
    cluster.cut_off = set()
    cluster.tick()
    assert a.keys() == b.keys() == {K}
    assert abs(a.content()[K][1] - b.content()[K][1]) < S
    cluster.now += 64 * S
    for node in (a, b):
        node.journal.reap(cluster.now)
        assert node.store.stats().objects == 0


def test_a_miss_that_rests_on_a_delete_under_way_is_told_after_it(
    cluster: Cluster, a: Node
) -> None:
    a.put(K)
    cluster.replicate()
    a.delete(K)
    expired = a.expire(K, ttl_ms=1000)
    assert expired.pending
    cluster.replicate()
    assert expired.statuses == [MISS]


# -- ranges


def delete_range(node: Node, prefix: bytes, limit: int = 100, buckets: tuple[int, ...] = (0,)):  # type: ignore[no-untyped-def]
    from replicating import Writing

    return Writing(node.ask(Kind.DELETE_RANGE, wire.DeleteRange(list(buckets), prefix, limit)))


def test_a_range_takes_along_what_is_on_its_way_and_nothing_that_comes_later(
    cluster: Cluster, a: Node, b: Node
) -> None:
    there, coming, later = keys_in(0, 3, "range")
    a.put(there)
    cluster.replicate()
    a.put(coming)
    deleted = delete_range(a, b"range")
    put = a.put(later, if_absent=True)
    again = a.put(there, value=b"2")
    cluster.replicate()
    cluster.tick()
    assert deleted.answer.count == 2
    assert (put.statuses, again.statuses) == ([], [])
    assert a.get(there) == [b"2"]
    assert a.keys() == b.keys() == {there, later}


def test_a_range_ends_at_its_limit_for_all_copies(cluster: Cluster, a: Node, b: Node) -> None:
    keys = sorted(keys_in(0, 6, "range"))
    for key in keys:
        a.put(key)
    cluster.replicate()
    deleted = delete_range(a, b"range", limit=4)
    cluster.replicate()
    cluster.tick()
    assert (deleted.answer.count, deleted.answer.finished) == (4, 0)
    assert a.keys() == b.keys() == set(keys[4:])


def test_a_range_over_buckets_of_which_one_is_lost_under_way_is_indeterminate(
    cluster: Cluster, a: Node
) -> None:
    """Though the other one was done, and later."""
    cluster.start(A, C, buckets=[2])
    deleted = delete_range(a, b"k", buckets=(0, 2))
    cluster.write(0, primary=B, epoch=2, in_sync=(B,))
    assert deleted.pending
    cluster.replicate()
    assert deleted.answer.status == Status.INDETERMINATE


# -- pins and evictions


def test_pins_are_made_on_the_copies_as_well(cluster: Cluster, a: Node, b: Node) -> None:
    a.put(K)
    cluster.replicate()
    pinned = a.ask(Kind.PIN, wire.Pin([K, L], 5000))
    cluster.replicate()
    cluster.tick()
    assert list(pinned.response[1].statuses) == [OK, MISS]  # type: ignore[index, union-attr]
    assert len(b.sessions.pins) == 1
    a.ask(Kind.UNPIN, wire.Unpin([K]))
    cluster.replicate()
    cluster.tick()
    assert len(b.sessions.pins) == 0


def test_options_and_checksums_reach_the_copies(cluster: Cluster, a: Node, b: Node) -> None:
    body = wire.Put(
        [K], [1], wire.PutOptions(soft_pin=True, write_once=True, ttl_ms=5000), checksums=[77]
    )
    a.ask(Kind.PUT, body, [b"1"])
    cluster.replicate()
    cluster.tick()
    value, expires, *rest = b.content()[K]
    assert (value, rest) == (b"1", [Pin.SOFT, True, 77])
    assert expires > cluster.now


def test_what_the_primary_evicts_the_copies_evict(cluster: Cluster, a: Node, b: Node) -> None:
    a.put(K, L)
    cluster.replicate()
    cluster.tick()
    a.store.evict_batch([0], [K])
    assert a.keys() == {L}
    cluster.tick()
    cluster.tick()
    assert b.keys() == {L}
    assert b.journal.copies_dropped == 0
    assert not b.journal.given_up


def test_what_the_primary_gave_up_makes_room_for_what_it_was_given_up_for(
    cluster: Cluster, a: Node, b: Node
) -> None:
    """Both are full: without that the copy would lose something else, and be compared for it."""
    keys = keys_in(0, 60, "full")
    for key in keys:
        a.put(key, value=bytes(64 * KIB))
        a.journal.tell_evictions()
        cluster.replicate()
    cluster.settle()
    assert len(a.keys()) < len(keys)
    assert b.keys() == a.keys()
    assert b.journal.copies_dropped == 0


def test_what_came_back_before_its_eviction_was_told_stays(
    cluster: Cluster, a: Node, b: Node
) -> None:
    a.put(K, value=b"1")
    cluster.replicate()
    a.store.evict_batch([0], [K])
    a.put(K, value=b"2")
    cluster.tick()
    cluster.tick()
    assert a.get(K) == [b"2"]
    assert b.content()[K][0] == b"2"


def test_a_copy_without_room_goes_on_without_the_value_and_is_not_counted() -> None:
    sizes = {A: MIB, B: 32 * KIB}
    with ExitStack() as stack, Cluster(stack, sizes=sizes) as cluster:
        a = cluster.start(A, B)
        put = a.put(K, value=bytes(100 * KIB))
        small = a.put(L, value=b"1")
        cluster.replicate()
        cluster.tick()
        assert put.copies == [], "one: what found no room is no copy"
        assert small.copies == [2]
        assert cluster[B].keys() == {L}
        assert cluster[B].journal.copies_dropped == 1


def test_an_old_value_does_not_stay_on_a_copy_without_room_for_the_new_one() -> None:
    sizes = {A: MIB, B: 32 * KIB}
    with ExitStack() as stack, Cluster(stack, sizes=sizes) as cluster:
        a = cluster.start(A, B)
        a.put(K, value=b"old")
        cluster.replicate()
        a.put(K, value=bytes(100 * KIB))
        cluster.replicate()
        cluster.tick()
        assert cluster[B].keys() == set()


# -- when copies or the primary are lost


def test_a_write_under_way_when_the_copy_is_lost_is_told_with_one_copy(
    cluster: Cluster, a: Node
) -> None:
    put = a.put(K)
    cluster.cut_off = {B}
    cluster.run_until(lambda: not put.pending)
    assert (put.statuses, put.copies) == ([], [])
    assert cluster.records[0].record.in_sync == (A,)
    assert a.get(K) == [b"v"]
    assert not a.put(L).pending, "alone, it is written at once"


def test_a_write_of_a_primary_that_was_replaced_is_indeterminate(
    cluster: Cluster, a: Node, b: Node
) -> None:
    put, deleted = a.put(K), a.delete(L)
    cluster.cut_off = {A}
    cluster.run_until(lambda: 0 in b.replicas.served)
    assert put.pending
    cluster.cut_off = set()
    cluster.tell()
    assert put.statuses == deleted.statuses == [Status.INDETERMINATE]
    assert a.get(K) == [Status.NOT_PRIMARY]
    assert a.put(K).statuses == [Status.NOT_PRIMARY]
    cluster.write(0, assigned=(B.node, A.node))
    cluster.settle()
    assert a.keys() == b.keys()
    assert a.store.stats().allocated == 0


def test_what_the_copy_had_prepared_is_committed_by_it_when_it_takes_over(
    cluster: Cluster, a: Node, b: Node
) -> None:
    """The acknowledgement was lost, so nobody was told."""
    put = a.put(K)
    send = cluster.send

    def lost(*arguments: object) -> None:
        send(*arguments)  # type: ignore[arg-type]

    cluster.send = lost  # type: ignore[method-assign]
    cluster.replicate()
    cluster.send = send  # type: ignore[method-assign]
    assert put.pending
    cluster.cut_off = {A}
    cluster.run_until(lambda: 0 in b.replicas.served)
    assert b.get(K) == [b"v"]


def test_while_the_bucket_is_handed_over_writers_are_asked_to_wait(
    cluster: Cluster, a: Node
) -> None:
    put = a.put(K)
    cluster.write(0, assigned=(B.node, A.node))
    a.replicas.tick(cluster.now + 1)
    assert a.replicas.roles(0, cluster.now) is Role.HANDING
    assert a.put(L).statuses == [Status.MOVING]
    cluster.settle()
    assert put.statuses == []
    assert cluster[B].get(K, L) == [b"v", MISS]


# -- how many copies are asked for


def test_min_replicas_is_refused_where_there_are_fewer_copies(cluster: Cluster, a: Node) -> None:
    refused = a.put(K, min_replicas=3)
    assert refused.statuses == [Status.NOT_ENOUGH_REPLICAS]
    enough = a.put(K, min_replicas=2)
    cluster.replicate()
    assert (enough.statuses, enough.copies) == ([], [2])
    assert a.store.stats().allocated == 0


def test_min_replicas_that_got_lost_under_way_is_told_though_it_is_written(
    cluster: Cluster, a: Node
) -> None:
    put = a.put(K, min_replicas=2)
    cluster.cut_off = {B}
    cluster.run_until(lambda: not put.pending)
    assert put.statuses == [Status.NOT_ENOUGH_REPLICAS]
    assert a.get(K) == [b"v"]


def test_below_min_in_sync_writes_are_refused_and_those_under_way_are_told_so() -> None:
    with ExitStack() as stack, Cluster(stack, min_in_sync=2) as cluster:
        a = cluster.start(A, B)
        put = a.put(K, value=b"1")
        cluster.replicate()
        cluster.cut_off = {B}
        under_way = a.put(K, value=b"2")
        deleted = a.delete(K)
        cluster.run_until(lambda: not under_way.pending)
        assert put.copies == [2]
        assert under_way.statuses == deleted.statuses == [Status.NOT_ENOUGH_REPLICAS]
        refused = a.put(L)
        assert refused.statuses == [Status.NOT_ENOUGH_REPLICAS]
        assert a.delete(L).statuses == [Status.NOT_ENOUGH_REPLICAS]
        cluster.cut_off = set()
        cluster.settle()
        again = a.put(L)
        cluster.replicate()
        assert again.copies == [2]


def test_a_bucket_with_too_much_under_way_takes_no_more_for_the_moment(
    cluster: Cluster, a: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv.journal.IN_FLIGHT_MAX", 3)
    cluster.cut_off = {B}
    assert a.put(*keys_in(0, 3)).pending
    last = a.delete(K)
    assert last.statuses == [Status.STALLED]


# -- memory


def test_nothing_stays_allocated_on_either_side(cluster: Cluster, a: Node, b: Node) -> None:
    for i in range(30):
        a.put(K, L, value=b"%d" % i * (i % 7 * 300), if_absent=i % 3 == 0)
        if i % 4 == 0:
            a.delete(L)
        if i % 5 == 0:
            cluster.replicate()
    cluster.settle()
    assert a.content() == b.content()
    assert a.store.stats().allocated == b.store.stats().allocated == 0
    assert not a.journal.staged
    assert cluster.now > 100 * S + MS
