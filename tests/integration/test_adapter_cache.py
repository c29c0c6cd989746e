"""The cache of an engine: whatever happens to the nodes, it answers soon, and says why."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p2pkv import Client, ClosedClient, InvalidArgument
from p2pkv.adapters.cache import Cache, CacheConfig, NotAsked, Reason
from p2pkv.adapters.keys import BlockKeys, Fingerprint
from p2pkv.errors import DeadlineExceeded, P2PKVError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

LOOKUP_S = 0.2
SLACK_S = 1.0
"""What a loaded machine may add to a deadline."""
CONFIG = CacheConfig(
    lookup_timeout_s=LOOKUP_S,
    transfer_timeout_s=LOOKUP_S,
    unsized_timeout_s=LOOKUP_S,
    open_first_s=0.2,
    open_last_s=0.5,
    probe_timeout_s=0.5,
)
KEYS = [f"k{i}" for i in range(128)]
VALUES = [b"%d" % i * 500 for i in range(128)]


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    # Nodes are stopped for a while: none may be taken for dead meanwhile.
    options = {"reset_after_s": 60.0, "fence_after_s": 50.0}
    # Without the index, since by that a node is read for a while after it was stopped.
    with Cluster(3, etcd=etcd, published_index=False, **options) as cluster:
        yield cluster


@pytest.fixture
def cache(cluster: Cluster) -> Iterator[Cache]:
    with Cache(cluster.client(), CONFIG, owned=True) as cache:
        cache.connect(10.0)
        cache.client.delete_range("")
        assert cache.store(KEYS, VALUES) == [1] * len(KEYS)
        try:
            yield cache
        finally:
            for node in cluster:
                node.resume()
            wait_for(lambda: _serves(cluster), "the nodes do not answer again")


def _serves(cluster: Cluster) -> bool:
    with cluster.client(timeout=20.0) as kv:
        return kv.batch_exists(KEYS) is not None


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def stop(cluster: Cluster, *names: str) -> None:
    for name in names or ("n0", "n1", "n2"):
        cluster[name].pause()


# -- a store that is down or slow


def test_stopped_nodes_are_misses_within_the_deadline_and_then_at_once(
    cluster: Cluster, cache: Cache
) -> None:
    assert cache.match(KEYS) == len(KEYS)
    stop(cluster)
    for _ in range(CONFIG.failures_max):
        hits, took = timed(lambda: cache.match(KEYS))
        assert hits == 0
        assert took < LOOKUP_S + SLACK_S
    times = []
    for call, miss in [
        (lambda: cache.match(KEYS), 0),
        (lambda: cache.exists(KEYS), [False] * len(KEYS)),
    ] * 100:
        outcome, took = timed(call)
        assert outcome == miss
        times.append(took)
    assert statistics.median(times) < 0.005
    assert max(times) < LOOKUP_S / 2
    for outcomes in (cache.load(KEYS, buffers()), cache.store(KEYS, VALUES), cache.get(KEYS)):
        assert all(isinstance(outcome, NotAsked) for outcome in outcomes)
    assert cache.figures()["peers_refused"] == 3


def buffers() -> list[bytearray]:
    return [bytearray(len(value)) for value in VALUES]


def test_nodes_that_wake_are_asked_again_without_a_call_that_waits(
    cluster: Cluster, cache: Cache
) -> None:
    stop(cluster)
    while cache.figures()["peers_refused"] < 3:
        cache.match(KEYS)
    for node in cluster:
        node.resume()
    times = []

    def back() -> bool:
        hits, took = timed(lambda: cache.match(KEYS))
        times.append(took)
        return bool(hits == len(KEYS))

    wait_for(back, "the nodes are not asked again", 30.0)
    assert max(times) < LOOKUP_S
    assert cache.figures()["peers_refused"] == 0
    assert cache.get(KEYS) == VALUES


def test_one_stopped_node_takes_only_its_own_keys(cluster: Cluster, cache: Cache) -> None:
    stop(cluster, "n1")
    for _ in range(CONFIG.failures_max):
        cache.exists(KEYS)
    theirs = [
        place is not None and place.member.node != "n1" for place in cache.client.locate(KEYS)
    ]
    assert 0 < sum(theirs) < len(KEYS)
    there, took = timed(lambda: cache.exists(KEYS))
    assert there == theirs
    assert took < LOOKUP_S / 2
    assert cache.match(KEYS) == theirs.index(False)
    got = cache.get(KEYS)
    assert [isinstance(g, NotAsked) for g in got] == [not t for t in theirs]
    assert [g for g in got if isinstance(g, bytes)] == [
        v for v, t in zip(VALUES, theirs, strict=True) if t
    ]


def test_a_store_that_was_never_there_is_a_miss_within_the_deadline() -> None:
    with Cache(Client(seeds=["tcp://127.0.0.1:9"]), CONFIG, owned=True) as cache:
        for _ in range(CONFIG.failures_max):
            hits, took = timed(lambda: cache.match(KEYS))
            assert hits == 0
            assert took < LOOKUP_S + SLACK_S
        hits, took = timed(lambda: cache.match(KEYS))
        assert (hits, took < LOOKUP_S / 2) == (0, True)
        why = cache.why_miss("k0")
        assert why.reason is Reason.BREAKER_OPEN
        assert "the cluster" in why.text


def test_sizes_are_told_without_the_values(cache: Cache) -> None:
    big = bytes(3 << 20)
    assert cache.store(["big"], [big]) == [1]
    assert cache.sizes(["k7", "not there", "big"]) == [len(VALUES[7]), None, len(big)]


# -- counting


def test_hits_of_a_request_are_counted_once(cache: Cache) -> None:
    asked = [*KEYS[:10], "not there"]
    for _ in range(5):
        assert cache.match(asked, request="r1") == 10
    figures = cache.figures()
    assert (figures["hits_total"], figures["misses_total"]) == (10, 1)
    cache.finished("r1")
    cache.match(asked, request="r1")
    assert cache.figures()["hits_total"] == 20
    assert cache.figures()["misses_unavailable_total"] == 0


# -- work that is done later


class Outcomes:
    """What ``done`` was called with."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, outcomes: list[Any]) -> None:
        self.calls.append(outcomes)


def test_stores_and_loads_are_done_by_threads_of_the_cache(cache: Cache) -> None:
    stored, loaded, found = Outcomes(), Outcomes(), Outcomes()
    assert cache.submit_store(["a", "b"], [b"1" * 5000, [b"2", b"3"]], stored)
    assert cache.flush(10.0)
    assert stored.calls == [[1, 1]]
    targets = [bytearray(5000), bytearray(2)]
    assert cache.submit_load(["a", "b", "c"], [*targets, bytearray(1)], loaded)
    assert cache.submit_exists(["a", "c"], found)
    wait_for(lambda: loaded.calls and found.calls, "the load is not done")
    assert loaded.calls == [[5000, 2, None]]
    assert targets == [b"1" * 5000, b"23"]
    assert found.calls == [[True, False]]


def test_puts_are_dropped_before_anybody_waits(cluster: Cluster, cache: Cache) -> None:
    """A slow store: each put takes its whole deadline, and the queue has room for three."""
    config = CacheConfig(transfer_timeout_s=1.0, failures_max=1000, jobs_max=3, threads=1)
    done = Outcomes()
    with Cache(cluster.client(), config, owned=True) as slow:
        slow.connect(10.0)
        stop(cluster)
        taken, took = timed(
            lambda: [slow.submit_store([f"s{i}"], [b"x"], done) for i in range(100)]
        )
        assert took < 0.5
        assert sum(taken) == 3
        assert slow.figures()["stores_dropped_full_total"] == 97
        assert slow.flush(30.0)
        assert len(done.calls) == 3
        for node in cluster:
            node.resume()
        wait_for(lambda: _serves(cluster), "the nodes do not answer again")
        why = wait_for(lambda: _settled(slow, "s99"), "no definite reason")
        assert why.reason is Reason.PUT_DROPPED
        assert "too many puts were waiting" in why.text


def _settled(cache: Cache, key: str) -> Any:
    why = cache.why_miss(key)
    return why if why.reason not in (Reason.UNREACHABLE, Reason.BREAKER_OPEN) else None


def test_what_waits_when_the_cache_is_closed_is_dropped_and_told(
    cluster: Cluster, cache: Cache
) -> None:
    config = CacheConfig(transfer_timeout_s=1.0, failures_max=1000, threads=1)
    done = Outcomes()
    slow = Cache(cluster.client(), config, owned=True)
    slow.connect(10.0)
    stop(cluster)
    for i in range(5):
        assert slow.submit_store([f"s{i}"], [b"x"], done)
    slow.close(20.0)
    assert len(done.calls) == 5
    assert sum(isinstance(call[0], NotAsked) for call in done.calls) >= 3
    assert not slow.submit_store(["late"], [b"x"], done)
    with pytest.raises(ClosedClient):
        slow.exists(["k0"])


def test_closing_ends_every_thread(cluster: Cluster) -> None:
    before = set(threading.enumerate())
    cache = Cache(cluster.client(), CONFIG, owned=True)
    cache.connect(10.0)
    cache.submit_store(["a"], [b"x"])
    cache.submit_exists(["a"], lambda _: None)
    stop(cluster)
    try:
        cache.match(KEYS)
        cache.match(KEYS)
        assert {"p2pkv-stores-0", "p2pkv-lookups-0", "p2pkv-probes"} <= {
            t.name for t in set(threading.enumerate()) - before
        }
        cache.close(20.0)
    finally:
        for node in cluster:
            node.resume()
    assert not set(threading.enumerate()) - before


def test_a_thread_that_does_not_end_is_told(cache: Cache) -> None:
    begun, over = threading.Event(), threading.Event()

    def waits(_: list[Any]) -> None:
        begun.set()
        over.wait(30)

    cache.submit_store(["a"], [b"x"], waits)
    assert begun.wait(10)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        cache.close(0.05)
    over.set()


def test_a_job_that_fails_does_not_end_the_thread(cache: Cache) -> None:
    done = Outcomes()

    def fails(_: list[Any]) -> None:
        raise RuntimeError("meant")

    for _ in range(CONFIG.threads * 2):
        cache.submit_store(["a"], [b"x"], fails)
    cache.submit_store(["b"], [b"y"], done)
    wait_for(lambda: done.calls, "the thread has ended")


def test_a_job_with_bad_arguments_has_an_outcome_too(cache: Cache) -> None:
    done = Outcomes()
    cache.submit_store([""], [b"x"], done)
    wait_for(lambda: done.calls, "the job has no outcome")
    assert isinstance(done.calls[0][0], InvalidArgument)


def test_bad_arguments_are_raised_as_ever(cache: Cache) -> None:
    with pytest.raises(InvalidArgument, match="key: is empty"):
        cache.exists([""])
    with pytest.raises(InvalidArgument, match="values: 1 for 2 keys"):
        cache.store(["a", "b"], [b"x"])
    with pytest.raises(InvalidArgument, match="targets: 0 for 1 keys"):
        cache.load(["a"], [])
    with pytest.raises(InvalidArgument, match="ranges: 2 for 1 keys"):
        cache.load(["a"], [bytearray(1)], ranges=[(0, 1)] * 2)
    with pytest.raises(InvalidArgument, match="value"):
        cache.store(["a"], [3])


# -- why


def test_why_a_key_is_a_miss(cache: Cache) -> None:
    def reason(key: str) -> Reason:
        return cache.why_miss(key).reason

    assert reason("k0") is Reason.PRESENT
    assert reason("nobody put it") is Reason.NEVER_STORED
    cache.delete(["k1"])
    assert reason("k1") is Reason.DELETED
    cache.store(["short"], [b"x"], ttl=0.01)
    wait_for(lambda: reason("short") is Reason.EXPIRED, "it does not expire")
    with pytest.raises(P2PKVError):
        raise cache.store(["large"], [bytes(100 << 20)])[0]
    assert reason("large") is Reason.PUT_FAILED
    cache.client.delete("k2")  # as another process would
    assert reason("k2") is Reason.EVICTED


def test_an_evicted_key_is_told_from_one_that_was_never_stored(cache: Cache) -> None:
    block = bytes(2 << 20)
    names = [f"e{i}" for i in range(150)]
    for name in names:
        assert cache.store([name], [block]) == [1]
    assert cache.why_miss("e0").reason is Reason.EVICTED
    assert cache.why_miss("e149").reason is Reason.PRESENT


def test_why_of_a_stopped_owner(cluster: Cluster, cache: Cache) -> None:
    stop(cluster)
    why = cache.why_miss("k0")
    assert why.reason is Reason.UNREACHABLE
    assert "DeadlineExceeded" in why.text
    cache.why_miss("k0")
    why = cache.why_miss("k0")
    assert why.reason is Reason.BREAKER_OPEN
    assert "has not been asked for" in why.text


def test_a_key_whose_node_was_killed_is_lost_with_it(etcd: EtcdCluster) -> None:
    with Cluster(1, etcd=etcd) as cluster, Cache(cluster.client(), CONFIG, owned=True) as cache:
        cache.connect(10.0)
        cache.store(["k"], [b"x"])
        cluster["n0"].kill()
        cache.exists(["k"])
        cluster["n0"].start()
        why = wait_for(lambda: _settled(cache, "k"), "the node does not come back")
        assert why.reason is Reason.LOST


# -- few messages


def test_a_prefix_of_128_blocks_is_found_and_loaded_with_few_messages(
    cluster: Cluster, cache: Cache
) -> None:
    """Two owners, and at most three messages to each for both."""
    fingerprint = Fingerprint(model="m", dtype="bfloat16", block_tokens=16, layout="page_first")
    chains = ([bytes([n, i]) * 16 for i in range(128)] for n in range(100))
    keys = next(k for c in chains if len(owners(cache, k := BlockKeys(fingerprint).of(c))) == 2)
    blocks = [bytes([i]) * (64 << 10) for i in range(128)]
    assert cache.store(keys, blocks) == [1] * 128
    before = _requests(cache)
    targets = [bytearray(64 << 10) for _ in keys]
    assert cache.match(keys) == 128
    assert cache.load(keys, targets) == [64 << 10] * 128
    assert targets == blocks
    after = _requests(cache)
    sent = {member: after[member] - before[member] for member in after}
    asked = [n for n in sent.values() if n]
    print(f"messages: {sent}")
    assert len(asked) == 2
    assert max(asked) <= 3


def owners(cache: Cache, keys: list[bytes]) -> set[Any]:
    return {place.member for place in cache.client.locate(keys) if place is not None}


def _requests(cache: Cache) -> dict[str, float]:
    """Requests that each node has had, save for those that look at it."""
    stats = cache.client.stats(timeout=10.0)
    return {
        member: sum(
            n
            for name, n in one.figures.items()
            if name.startswith("requests_") and name not in LOOKING
        )
        for member, one in stats.items()
    }


LOOKING = {"requests_stats_total", "requests_routes_total", "requests_refused_total"}
