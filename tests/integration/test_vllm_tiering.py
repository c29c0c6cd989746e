"""The tier below vLLM's host memory, with real nodes. Its class for vLLM is in tests/engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllmside import FINGERPRINT

from p2pkv.adapters.cache import Cache, CacheConfig
from p2pkv.adapters.keys import BlockKeys
from p2pkv.adapters.vllm.tiering import Ended, Tiering
from p2pkv.errors import InvalidArgument
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

ROWS, ROW_BYTES = 16, 4096
CHUNKS = [bytes([i]) * 36 for i in range(8)]
CONFIG = CacheConfig(
    lookup_timeout_s=0.3, transfer_timeout_s=0.3, open_first_s=0.2, open_last_s=0.5
)


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(2, etcd=etcd, reset_after_s=60.0, fence_after_s=50.0) as cluster:
        yield cluster


@pytest.fixture
def cache(cluster: Cluster) -> Iterator[Cache]:
    # By sockets: what a stopped node holds could still be read from its memory on this host.
    with Cache(cluster.client(path="tcp"), CONFIG, owned=True) as cache:
        cache.connect(30.0)
        cache.client.delete_range("")
        yield cache


def tier(cache: Cache, fill: int = 0) -> tuple[Tiering, bytearray]:
    """A tier, and its memory, in which each row has a number of its own on top of ``fill``."""
    memory = bytearray(b"".join(bytes([fill + row]) * ROW_BYTES for row in range(ROWS)))
    view = memoryview(memory).cast("B", (ROWS, ROW_BYTES))
    return Tiering(cache, view, BlockKeys(FINGERPRINT, 0, 1)), memory


def row(memory: bytearray, index: int) -> bytes:
    return bytes(memory[index * ROW_BYTES : (index + 1) * ROW_BYTES])


def ended(tiering: Tiering) -> Ended:
    (job,) = wait_for(tiering.take_ended, "the job has not ended")
    return Ended(*job)


def lookup(tiering: Tiering, chunks: list[bytes], request: str = "r") -> list[bool | None]:
    """As vLLM does: in a step, and again in later steps until there is an answer."""
    for chunk in chunks:
        tiering.lookup(chunk, request)
    tiering.step_ended()

    def answers() -> list[bool | None]:
        found = [tiering.lookup(chunk, request) for chunk in chunks]
        return [] if None in found else found

    return list(wait_for(answers, "no answer"))


def test_chunks_come_back_from_the_rows_they_were_stored_from(cache: Cache) -> None:
    first, _ = tier(cache)
    first.store(1, CHUNKS, [3, 1, 4, 5, 9, 2, 6, 8])
    job = ended(first)
    assert (job.job, job.good, job.whole, job.size) == (1, CHUNKS, True, 8 * ROW_BYTES)
    second, memory = tier(cache, fill=100)
    assert lookup(second, CHUNKS) == [True] * 8
    second.load(2, CHUNKS[:3], [10, 11, 0])
    assert ended(second).whole
    assert [row(memory, r)[0] for r in (10, 11, 0)] == [3, 1, 4]
    assert row(memory, 12)[0] == 112


def test_lookups_of_a_step_are_asked_together_and_answered_later(cache: Cache) -> None:
    tiering, _ = tier(cache)
    tiering.store(1, CHUNKS[:2], [0, 1])
    ended(tiering)
    assert [tiering.lookup(chunk, "r") for chunk in CHUNKS] == [None] * 8
    assert lookup(tiering, CHUNKS) == [True, True] + [False] * 6


def test_what_was_known_is_forgotten_with_the_last_that_asked(cache: Cache) -> None:
    tiering, _ = tier(cache)
    assert lookup(tiering, CHUNKS[:1], "a") == [False]
    assert tiering.lookup(CHUNKS[0], "b") is False
    tiering.store(1, CHUNKS[:1], [0])
    ended(tiering)
    tiering.finished("a")
    assert tiering.lookup(CHUNKS[0], "b") is False
    tiering.finished("b")
    assert lookup(tiering, CHUNKS[:1], "c") == [True]


def test_a_chunk_that_vanished_or_has_another_size_is_not_among_the_good(cache: Cache) -> None:
    tiering, _ = tier(cache)
    tiering.store(1, CHUNKS[:4], [0, 1, 2, 3])
    ended(tiering)
    keys = [BlockKeys(FINGERPRINT, 0, 1).of_group(c, [c])[0] for c in CHUNKS]
    assert lookup(tiering, CHUNKS[:4]) == [True] * 4
    cache.client.delete(keys[1])
    cache.client.delete(keys[2])
    cache.client.put(keys[2], b"short")
    tiering.load(2, CHUNKS[:4], [8, 9, 10, 11])
    job = ended(tiering)
    assert (job.good, job.whole) == ([CHUNKS[0], CHUNKS[3]], False)
    tiering.missed(CHUNKS[1:3])
    assert lookup(tiering, CHUNKS[:4]) == [True, False, False, True]


def test_jobs_end_even_if_nobody_answers(cluster: Cluster, cache: Cache) -> None:
    tiering, memory = tier(cache)
    before = bytes(memory)
    for node in cluster:
        node.pause()
    try:
        assert lookup(tiering, CHUNKS) == [False] * 8
        tiering.store(1, CHUNKS, list(range(8)))
        assert ended(tiering).good == []
        tiering.load(2, CHUNKS, list(range(8)))
        tiering.drain()
        assert ended(tiering).good == []
        assert not tiering.busy
        assert memory == before
    finally:
        for node in cluster:
            node.resume()
    wait_for(lambda: cache.exists(["none"]) == [False], "the nodes do not answer again")


@pytest.mark.parametrize(
    "memory", [memoryview(b"ab" * 8).cast("B", (2, 8)), memoryview(bytearray(16))]
)
def test_memory_that_cannot_be_used_is_refused(cache: Cache, memory: memoryview) -> None:
    with pytest.raises(InvalidArgument, match="memory"):
        Tiering(cache, memory, BlockKeys(FINGERPRINT, 0, 1))
