"""Nodes that are killed or paused: what callers are told, and when the buckets start again.

There is one copy of each bucket, so what a killed node held is gone. With FAST's times a bucket
of a dead node starts again, empty, some 7 s after its death: 2 to 3 s until etcd ends the node's
session, and 4 s reset_after_s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import KINDS, RawPeer, client_of, configured, figure

from p2pkv import (
    BatchError,
    DeadlineExceeded,
    Indeterminate,
    Stalled,
    Unreachable,
    ring,
    wire,
)
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import FAST, Cluster, wait_for
from p2pkv.wire import Kind, Status


@pytest.fixture
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(3, etcd=etcd) as cluster:
        yield cluster


def test_after_a_sigkill_its_keys_are_unreachable_then_missing_and_others_unaffected(
    cluster: Cluster,
) -> None:
    theirs, others = cluster.key_of("n1"), [cluster.key_of("n0"), cluster.key_of("n2")]
    with client_of("Client", cluster) as kv, client_of("AsyncClient", cluster) as too:
        kv.batch_put(dict.fromkeys([theirs, *others], b"1"))
        too.batch_get([theirs, *others])
        cluster["n1"].kill()
        began = time.monotonic()
        for client in (kv, too):
            with pytest.raises(Unreachable, match="could not be reached"):
                client.get(theirs, timeout=0.3)
            with pytest.raises(Unreachable):
                client.put(theirs, b"2", timeout=0.3)
            with pytest.raises(Unreachable):
                client.match_prefix([others[0], theirs], timeout=0.3)
            with pytest.raises(Unreachable):
                list(client.scan(theirs[:2], timeout=0.3))
            with pytest.raises(BatchError) as error:
                client.batch_get([others[0], theirs, others[1]], timeout=0.3)
            assert error.value.results[::2] == [b"1", b"1"]
            assert isinstance(error.value.results[1], Unreachable)
            assert not error.value.indeterminate
            assert client.batch_get(others, timeout=0.3) == [b"1", b"1"]
            assert len(client.stats(timeout=1.0)) == 2
        assert kv.get(theirs, timeout=20.0) is None
        assert time.monotonic() - began >= FAST["reset_after_s"]
        assert kv.put(theirs, b"3") == 1
        assert too.batch_get([theirs, *others]) == [b"3", b"1", b"1"]
        cluster.wait_settled(["n0", "n2"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_waits_through_a_death_is_done_once_the_bucket_starts_again(
    cluster: Cluster, kind: str
) -> None:
    key = cluster.key_of("n1")
    with client_of(kind, cluster) as kv:
        kv.put(key, b"1")
        cluster["n1"].kill()
        assert kv.put(key, b"2", if_absent=True, timeout=25.0) == 1
        assert kv.get(key) == b"2"


def test_a_killed_node_that_is_started_again_serves_at_once_and_empty(cluster: Cluster) -> None:
    """Its newer boot is the proof that the old memory is gone: no need to wait for the reset."""
    theirs, other = cluster.key_of("n1"), cluster.key_of("n0")
    with cluster.client(timeout=20.0) as kv:
        kv.batch_put({theirs: b"1", other: b"1"})
        cluster["n1"].kill()
        killed = time.monotonic()
        cluster["n1"].start()
        assert kv.get(theirs) is None
        assert time.monotonic() - killed < FAST["reset_after_s"]
        assert kv.put(theirs, b"2") == 1
        view = cluster.wait_settled()
        assert kv.batch_get([theirs, other]) == [b"2", b"1"]
        assert sorted(kv.stats()) == ["n0@1", "n1@2", "n2@1"]
        assert {v.record.generation for v in view.buckets.values()} == {1, 2}


def test_killed_while_it_gives_its_buckets_away_it_loses_only_what_it_still_had(
    etcd: EtcdCluster,
) -> None:
    with (
        Cluster(1, etcd=etcd, move_bytes_per_s=1 << 20) as cluster,
        cluster.client(timeout=25.0) as kv,
    ):
        values = {f"k{i}": b"%d" % i * 2000 for i in range(2000)}
        kv.batch_put(values)
        cluster.add_node(wait=False)
        cluster.wait(lambda: cluster.owned("n1") >= 8, "some buckets have moved")
        cluster["n0"].kill()
        cluster["n0"].start()
        moved = {b for b, v in cluster.view().buckets.items() if v.record.primary.node == "n1"}
        found = kv.batch_get(list(values))
        assert all(f in (None, v) for f, v in zip(found, values.values(), strict=True))
        kept = sum(f is not None for f in found)
        assert kept >= 2000 * len(moved) // 64 // 2
        assert kv.batch_put(values) == [1] * 2000
        cluster.wait_settled()
        assert kv.batch_get(list(values)) == list(values.values())


def test_the_target_of_a_move_is_killed_and_nothing_is_lost(etcd: EtcdCluster) -> None:
    with (
        Cluster(2, etcd=etcd, move_bytes_per_s=1 << 20) as cluster,
        cluster.client(timeout=25.0) as kv,
    ):
        values = {f"k{i}": b"%d" % i * 2000 for i in range(2000)}
        kv.batch_put(values)
        cluster.add_node("target", wait=False)
        cluster.wait(lambda: figure(kv, "buckets_learning") > 0, "a bucket is on its way")
        cluster["target"].pause()  # so that no more buckets arrive while we look
        gone = {b for b, v in cluster.view().buckets.items() if v.record.primary.node == "target"}
        cluster["target"].kill()
        view = cluster.wait_settled(["n0", "n1"])
        reset = {b for b, v in view.buckets.items() if v.record.generation > 1}
        assert len(reset) <= len(gone) + 4
        found = kv.batch_get(list(values))
        lost = {
            ring.bucket_of(k.encode(), 64) for k, f in zip(values, found, strict=True) if f is None
        }
        assert lost <= reset
        assert all(f in (None, v) for f, v in zip(found, values.values(), strict=True))


# -- paused


LATE = (DeadlineExceeded, Unreachable)
ASKED = "asked-" * 22
"""Begins keys that are too long for the index, of which a node is asked though it is paused."""
"""The second when the last attempt, on a new connection, did not get as far as to be answered."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_without_an_answer_is_indeterminate_and_a_read_late(
    cluster: Cluster, kind: str
) -> None:
    theirs, other = cluster.key_of("n1", prefix=ASKED), cluster.key_of("n0")
    with client_of(kind, cluster) as kv:
        kv.batch_put({theirs: b"1", other: b"1"})
        cluster["n1"].pause()
        with pytest.raises(LATE):
            kv.get(theirs, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(Indeterminate) as error:
            kv.put(theirs, b"2", timeout=0.4)
        assert error.value.may_have_taken_effect
        assert 0.3 < time.monotonic() - began < 1.0
        with pytest.raises(LATE):
            kv.get(theirs, timeout=0.3)
        with pytest.raises(Indeterminate):
            kv.delete(theirs, timeout=0.3)
        with pytest.raises(BatchError) as batch:
            kv.batch_put({other: b"2", theirs: b"2"}, timeout=0.3)
        assert batch.value.indeterminate
        assert batch.value.results[0] == 1
        assert isinstance(batch.value.results[1], Indeterminate)
        cluster["n1"].resume()
        assert kv.put(theirs, b"3") == 1
        assert kv.get(theirs) == b"3"


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_pause_is_waited_through(cluster: Cluster, kind: str) -> None:
    key = cluster.key_of("n1", prefix=ASKED)
    with client_of(kind, cluster) as kv:
        kv.put(key, b"1")
        cluster["n1"].pause()
        with pytest.raises(LATE):
            kv.get(key, timeout=0.5)
        cluster["n1"].resume()
        assert kv.get(key) == b"1"
        assert kv.stats().keys() == {"n0@1", "n1@1", "n2@1"}


def test_callers_of_a_paused_node_find_the_next_owner_of_its_buckets(cluster: Cluster) -> None:
    """One whose calls are short, and one that waits in a single call."""
    key = cluster.key_of("n1", prefix=ASKED)
    with client_of("Client", cluster) as kv, client_of("AsyncClient", cluster) as too:
        kv.put(key, b"1")
        too.put(key, b"2")
        cluster["n1"].pause()
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(too.get, key, timeout=40.0)
            cluster.wait(lambda: kv.get(key, timeout=0.5) is None, "the bucket starts again")
            assert long.result() is None
        assert kv.put(key, b"3", timeout=1.0) == 1
        assert too.get(key, timeout=1.0) == b"3"


def test_a_node_that_wakes_after_its_buckets_started_again_serves_nothing_stale(
    cluster: Cluster,
) -> None:
    """Also not to requests that lay in its sockets all the time."""
    key = cluster.key_of("n1")
    endpoint = cluster.endpoint("n1")
    get = wire.Get([key.encode()])
    with cluster.client() as kv, RawPeer(endpoint, cluster.name) as peer:
        kv.put(key, b"old")
        head = peer.ask(Kind.GET, get)
        assert head.body.sizes == [3]
        cluster["n1"].pause()
        for request in range(2, 7):
            peer.send(wire.encode(Kind.GET, request, 0, get))
        peer.send(
            wire.encode(Kind.PUT, 7, 0, wire.Put([key.encode()], [5], wire.PutOptions())), b"stale"
        )
        cluster.wait(lambda: kv.get(key, timeout=1.0) is None, "the bucket starts again")
        assert kv.put(key, b"new") == 1
        cluster["n1"].resume()
        answers = [peer.receive()[0] for _ in range(6)]
        assert [a.request for a in answers] == [2, 3, 4, 5, 6, 7]
        statuses = {a.body.statuses[0] for a in answers if a.kind != Kind.ERROR}
        assert statuses <= {Status.STALLED, Status.NOT_PRIMARY}
        until = time.monotonic() + 20
        while cluster.owned("n1") < 17:
            assert time.monotonic() < until, cluster.logs()
            assert kv.get(key) == b"new"
            with RawPeer(endpoint, cluster.name) as again:
                body: Any = again.ask(Kind.GET, get).body
            owner = not body.statuses
            assert not owner or body.sizes == [3]
            if owner:
                assert kv.get(key) == b"new"
        cluster.wait_settled()
        assert kv.get(key) == b"new"


def test_a_node_alone_without_etcd_fences_itself() -> None:
    """With etcd_loss = fence; a call gets the reason."""
    with Cluster(1, etcd_loss="fence") as cluster, cluster.client() as kv:
        kv.put("a", b"1")
        seeds = cluster.endpoint("n0")
        config = cluster.client_config(etcd=None, seeds=seeds)
        cluster.etcd.members[0].pause()
        with configured("Client", config) as seeded:
            wait_for(
                lambda: next(iter(seeded.stats().values())).labels["serving"] == "false",
                "it is fenced",
            )
            with pytest.raises(Stalled, match="stalled"):
                seeded.get("a", timeout=0.5)
            with pytest.raises(Stalled):
                seeded.put("a", b"2", timeout=0.5)
            with pytest.raises(Stalled):
                list(seeded.scan(timeout=0.5))
            cluster.etcd.members[0].resume()
            assert seeded.get("a", timeout=10.0) == b"1"
