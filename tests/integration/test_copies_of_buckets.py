"""Two copies of each bucket: what survives the death of nodes, and what callers notice of it."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
from support import Traffic, client_of, figure, new_seed

from p2pkv import NotEnoughReplicas, P2PKVError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.records import View
from p2pkv.testing.cluster import Cluster, wait_for
from p2pkv.testing.etcd import survives_kills
from p2pkv.testing.observer import lacking

COPIES: dict[str, Any] = {"replication_factor": 2, "rebuild_delay_s": 0.5}
COUNTS = range(1, 4)
"""What a put may answer while copies go from one node to another: for a moment there are three."""
FIRST_ACK_S_MAX = 15.0
"""Generous: leases and shrinking take 1 to 4 s, and the machine may be busy."""


def wait_copied(cluster: Cluster) -> View:
    """Until every bucket has all its copies, on nodes that live."""
    found: list[View] = []

    def copied() -> bool:
        found[:] = [cluster.view()]
        running = {n.name for n in cluster if n.running}
        return found[0].nodes.keys() == running and not lacking(found[0])

    cluster.wait(copied, "every bucket has its copies")
    return found[0]


def copied(etcd: EtcdCluster | None, nodes: int = 3, **config: Any) -> Cluster:
    return Cluster(nodes, etcd=etcd, **{**COPIES, **config})


@contextmanager
def settled(etcd: EtcdCluster | None, nodes: int = 3, **config: Any) -> Iterator[Cluster]:
    """A cluster in which every bucket has its copies."""
    with copied(etcd, nodes, **config) as cluster:
        wait_copied(cluster)
        yield cluster


class Writer(threading.Thread):
    """Writes keys of its own, over and over, and reads them back.

    A write whose outcome is unknown may be there or not. Everything else that a read shows must be
    what was acknowledged last. It ends at the first answer that is wrong, and keeps it.
    """

    def __init__(self, kv: Any, name: str, keys: list[str], seed: int, **options: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.possible: dict[str, set[bytes | None]] = {key: {None} for key in keys}
        self.acks: list[float] = []
        self.unknown = 0
        self.failure = ""
        self._kv = kv
        self._keys = keys
        self._options = options
        self._random = random.Random(f"{name}/{seed}")
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._write(self._random.choice(self._keys))
                self._read(self._random.choice(self._keys))
        except Exception:
            self.failure = traceback.format_exc()

    def _write(self, key: str) -> None:
        value = b"%s=%d;" % (key.encode(), len(self.acks) + self.unknown)
        value *= self._random.choice((1, 50, 2000))
        try:
            self._kv.put(key, value, **self._options)
        except P2PKVError as e:
            if not e.may_have_taken_effect:
                raise
            self.unknown += 1
            self.possible[key].add(value)
        else:
            self.acks.append(time.monotonic())
            self.possible[key] = {value}

    def _read(self, key: str) -> None:
        value = self._kv.get(key)
        assert value in self.possible[key], f"{key} is {value!r:.60}"
        self.possible[key] = {value}

    def check(self) -> None:
        """Raises AssertionError if an answer was wrong, or a key is not what it should be."""
        assert not self.failure, self.failure
        for key in self._keys:
            self._read(key)

    def first_ack_after(self, moment: float) -> float:
        """Seconds until the first write that was begun after ``moment`` was acknowledged."""
        after = wait_for(
            lambda: self.failure or [t for t in list(self.acks) if t > moment][1:],
            "a write is acknowledged",
        )
        assert not self.failure, self.failure
        return float(after[0] - moment)

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)
        assert not self.is_alive()

    def __enter__(self) -> Self:
        self.start()
        wait_for(lambda: self.failure or len(self.acks) > 20, "it writes")
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()


# -- copies


def test_put_tells_the_number_of_copies_and_both_nodes_have_the_value(etcd: EtcdCluster) -> None:
    with settled(etcd) as cluster, cluster.client() as kv:
        assert kv.put("a", b"1") == 2
        assert kv.put("large", bytes(3 << 20)) == 2
        assert kv.batch_put({f"k{i}": b"%d" % i for i in range(100)}) == [2] * 100
        assert kv.put("a", b"2", min_replicas=2) == 2
        wait_for(lambda: figure(kv, "objects") == 2 * 102, "the copies are applied")
        assert kv.delete("a")
        wait_for(lambda: figure(kv, "objects") == 2 * 101, "deletes are applied, too")


def test_more_copies_than_there_are_cannot_be_had(etcd: EtcdCluster) -> None:
    with settled(etcd) as cluster, cluster.client() as kv:
        with pytest.raises(NotEnoughReplicas):
            kv.put("a", b"1", min_replicas=3)
        assert kv.get("a") is None


def test_values_and_batches_larger_than_a_message_are_copied(etcd: EtcdCluster) -> None:
    limits = {"message_bytes_max": 1 << 20}
    values = {f"k{i}": b"%d" % i * (100 << 10) for i in range(30)} | {"large": bytes(5 << 20)}
    with (
        settled(etcd, 2, limits=limits) as cluster,
        client_of("Client", cluster, limits=limits, timeout_s=30.0) as kv,
    ):
        assert kv.batch_put(values) == [2] * 31
        wait_for(lambda: figure(kv, "objects") == 2 * 31, "the copies are applied")
        cluster["n1"].kill()
        cluster.wait(lambda: cluster.owned("n0") == 64, "n0 has taken over")
        assert kv.batch_get(list(values)) == list(values.values())


# -- nodes that die


def test_what_was_acknowledged_is_there_after_its_primary_was_killed(etcd: EtcdCluster) -> None:
    seed = new_seed()
    with settled(etcd) as cluster, cluster.client(timeout=30.0) as kv:
        hit = [cluster.key_of("n1", i) for i in range(40)]
        others = [cluster.key_of("n0", i) for i in range(20)]
        with Writer(kv, "hit", hit, seed) as one, Writer(kv, "others", others, seed) as other:
            killed = time.monotonic()
            cluster["n1"].kill()
            waited = one.first_ack_after(killed)
            print(f"first acknowledged write after {waited:.2f} s")
            assert waited < FIRST_ACK_S_MAX
            assert other.first_ack_after(killed) < FIRST_ACK_S_MAX
            wait_copied(cluster)
        one.check()
        other.check()
        assert one.unknown + other.unknown <= 4
        assert figure(kv, "buckets_taken_away_total") == 0
        assert kv.put(hit[0], b"again") == 2


def test_a_backup_that_is_killed_stops_writes_until_the_set_has_shrunk(etcd: EtcdCluster) -> None:
    """With two nodes nobody is there to take its place."""
    seed = new_seed()
    with settled(etcd, 2) as cluster, cluster.client(timeout=30.0) as kv:
        keys = [cluster.key_of("n0", i) for i in range(40)]
        with Writer(kv, "writer", keys, seed) as writer:
            killed = time.monotonic()
            cluster["n1"].kill()
            assert writer.first_ack_after(killed) < FIRST_ACK_S_MAX
        writer.check()
        assert writer.unknown == 0
        assert kv.put(keys[0], b"alone") == 1
        cluster["n1"].start()
        wait_copied(cluster)
        assert kv.put(keys[0], b"both") == 2
        cluster["n0"].kill()
        assert kv.get(keys[0], timeout=30.0) == b"both"


def test_reads_of_what_is_written_once_never_fail_while_its_primary_is_killed(
    etcd: EtcdCluster,
) -> None:
    with settled(etcd) as cluster, cluster.client(timeout=2.0) as kv:
        values = {cluster.key_of("n1", i): b"%d" % i * 100 for i in range(40)}
        assert kv.batch_put(values, write_once=True) == [2] * 40
        wait_for(lambda: figure(kv, "objects") == 80, "the copies are applied")
        slowest, reads, stop = 0.0, 0, time.monotonic() + 60
        cluster["n1"].kill()
        promoted = False
        while not promoted:
            for key, value in values.items():
                began = time.monotonic()
                assert kv.get(key) == value
                slowest = max(slowest, time.monotonic() - began)
                reads += 1
            assert kv.batch_get(list(values)) == list(values.values())
            promoted = "n1" not in {v.record.primary.node for v in cluster.view().buckets.values()}
            assert time.monotonic() < stop
        print(f"{reads} reads, the slowest took {slowest:.3f} s")


@pytest.mark.slow
def test_one_node_after_the_other_is_killed_and_comes_back(etcd: EtcdCluster) -> None:
    """Each time both copies are there again before the next one dies."""
    seed = new_seed()
    with settled(etcd) as cluster, cluster.client(timeout=30.0) as kv:
        keys = [f"key-{i}" for i in range(100)]
        with Writer(kv, "writer", keys, seed) as writer:
            for name in ("n0", "n1", "n2"):
                killed = time.monotonic()
                cluster[name].kill()
                assert writer.first_ack_after(killed) < FIRST_ACK_S_MAX
                cluster[name].start()
                wait_copied(cluster)
        writer.check()


# -- nodes that leave


def test_a_node_is_drained_under_traffic_and_no_request_fails(etcd: EtcdCluster) -> None:
    seed = new_seed()
    with settled(etcd) as cluster, Traffic(cluster, seed, copies=COUNTS) as traffic:
        assert cluster["n1"].terminate() == 0
        assert cluster["n1"].drained
        traffic.go_on()
        wait_copied(cluster)
        traffic.go_on(30)


def test_all_nodes_are_restarted_one_after_the_other_and_no_request_fails(
    etcd: EtcdCluster,
) -> None:
    seed = new_seed()
    with settled(etcd) as cluster, Traffic(cluster, seed, copies=COUNTS) as traffic:
        for name in ("n0", "n1", "n2"):
            assert cluster[name].terminate() == 0
            assert cluster[name].drained
            cluster[name].start()
            cluster.wait_settled()
            traffic.go_on(20)
        wait_copied(cluster)


# -- etcd is away


@pytest.mark.skipif(not survives_kills(), reason="this etcd loses data when it is killed")
def test_etcd_is_killed_under_load_and_no_operation_fails() -> None:
    seed = new_seed()
    with settled(None) as cluster, Traffic(cluster, seed, copies=COUNTS) as traffic:
        cluster.etcd.members[0].kill()
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            traffic.go_on(20)
        cluster.etcd.members[0].restart()
        cluster.wait_settled()
        traffic.go_on()
        wait_copied(cluster)


# -- nodes that are paused


def test_a_primary_that_was_paused_serves_nothing_stale_when_it_wakes(etcd: EtcdCluster) -> None:
    seed = new_seed()
    with settled(etcd) as cluster, cluster.client(timeout=30.0) as kv:
        keys = [cluster.key_of("n1", i) for i in range(20)]
        with Writer(kv, "writer", keys, seed) as writer:
            cluster["n1"].pause()
            paused = time.monotonic()
            assert writer.first_ack_after(paused) < 2 * FIRST_ACK_S_MAX
            # Its own clients, with connections from before, go on asking it.
            with cluster.client(timeout=30.0) as late:
                late.put(keys[0], b"of another client")
                writer.possible[keys[0]].add(b"of another client")
                cluster["n1"].resume()
                for key in keys * 5:
                    late.get(key)
            wait_copied(cluster)
        writer.check()


# -- min_in_sync


def test_below_min_in_sync_writes_are_refused_and_reads_go_on_once_the_copy_is_back(
    etcd: EtcdCluster,
) -> None:
    with settled(etcd, 2, min_in_sync=2) as cluster, cluster.client() as kv:
        key = cluster.key_of("n0")
        assert kv.put(key, b"1") == 2
        cluster["n1"].kill()

        def refused() -> bool:
            try:
                copies = kv.put(key, b"2", timeout=1.0)
            except NotEnoughReplicas:
                return True
            except P2PKVError:
                return False
            raise AssertionError(f"acknowledged with {copies} copies")

        wait_for(refused, "writes are refused")
        cluster["n1"].start()
        cluster.wait(lambda: kv.get(key, timeout=1.0) in (b"1", b"2"), "it is read again")
        wait_copied(cluster)

        def stored() -> bool:
            """Etcd may name the copy a moment before the primary knows."""
            try:
                return kv.put(key, b"3", timeout=1.0) == 2
            except NotEnoughReplicas:
                return False

        wait_for(stored, "writes are taken again")
        assert kv.get(key) == b"3"
