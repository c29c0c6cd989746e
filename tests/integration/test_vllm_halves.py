"""The halves of vLLM's connector with real nodes; vLLM itself is in tests/engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from vllmside import FINGERPRINT, Memory, chain, request

from p2pkv.adapters.cache import Cache, CacheConfig
from p2pkv.adapters.keys import BlockKeys
from p2pkv.adapters.vllm.identity import RECORDS, announce
from p2pkv.adapters.vllm.lookups import Lookups
from p2pkv.adapters.vllm.options import Options
from p2pkv.adapters.vllm.plans import LOG, StepPlan, Transfer, runs_of
from p2pkv.adapters.vllm.scheduling import Scheduling
from p2pkv.adapters.vllm.tally import Tally
from p2pkv.adapters.vllm.working import Working
from p2pkv.errors import ConfigError
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

COUNT = 20
OPTIONS = Options(blocks_per_group=8, staging_bytes=2 * 2 * 3 * Memory.block_bytes)
CONFIG = CacheConfig(
    lookup_timeout_s=0.3, transfer_timeout_s=0.3, open_first_s=0.2, open_last_s=0.5
)
SLACK_S = 2.0
"""What a loaded machine may add to a deadline."""
CHAIN = chain(COUNT)
KEYS = BlockKeys(FINGERPRINT, 0, 8).of(CHAIN)
TRANSFER = Transfer(1, "r", runs_of(CHAIN, range(COUNT), 0, COUNT, 8))
VALUES = {block: bytes([block]) * Memory.block_bytes for block in range(COUNT)}


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(3, etcd=etcd, reset_after_s=60.0, fence_after_s=50.0) as cluster:
        yield cluster


@pytest.fixture
def cache(cluster: Cluster) -> Iterator[Cache]:
    # By sockets: what a stopped node holds could still be read from its memory on this host.
    with Cache(cluster.client(path="tcp"), CONFIG, owned=True) as cache:
        cache.connect(30.0)
        cache.client.delete_range("")
        yield cache


@contextmanager
def worker(cache: Cache, blocks: dict[int, bytes]) -> Iterator[tuple[Working, Memory]]:
    memory = Memory(dict(blocks))
    half = Working(cache, memory, 0, OPTIONS, Tally())  # type: ignore[arg-type]
    yield half, memory
    half.close(10.0)


def load(half: Working) -> set[int]:
    """The blocks that failed, once the engine has been told."""
    half.start_loads(StepPlan(FINGERPRINT, [TRANSFER], []))
    wait_for(lambda: half.take_finished() == {"r"}, "the load has not ended")
    return half.take_failed()


def save(half: Working) -> None:
    half.start_saves(StepPlan(FINGERPRINT, [], [TRANSFER]))
    wait_for(half.take_saved, "the save has not ended")


def matched(cache: Cache) -> int:
    """Blocks that a scheduler finds."""
    lookups = Lookups(cache, 0.002, Tally())
    scheduling = Scheduling(lookups, OPTIONS, 4)
    scheduling.begin(FINGERPRINT, [0], None)  # type: ignore[arg-type]
    r = request(4 * COUNT + 1)

    def found() -> list[int]:
        tokens = scheduling.matched(r, 0, time.monotonic_ns())
        return [] if tokens is None else [tokens // 4]

    return int(wait_for(found, "the lookup has not ended")[0])


def test_blocks_come_as_they_were_saved_and_once_written_they_stay(cache: Cache) -> None:
    with worker(cache, VALUES) as (writer, memory):
        save(writer)
        memory.blocks = dict.fromkeys(VALUES, bytes(Memory.block_bytes))
        save(writer)
    assert matched(cache) == COUNT
    with worker(cache, {}) as (reader, memory):
        assert load(reader) == set()
        assert memory.blocks == VALUES


def test_a_block_that_vanished_fails_with_all_behind_it(cache: Cache) -> None:
    with worker(cache, VALUES) as (writer, _):
        save(writer)
    cache.client.delete(KEYS[11])
    assert matched(cache) == 11
    with worker(cache, {}) as (reader, memory):
        assert load(reader) == set(range(11, COUNT))
        assert memory.blocks == {block: VALUES[block] for block in range(11)}


def test_stopped_nodes_end_lookups_loads_and_saves_within_their_deadlines(
    cluster: Cluster, cache: Cache
) -> None:
    with worker(cache, VALUES) as (half, _):
        save(half)
        for node in cluster:
            node.pause()
        try:
            begin = time.monotonic()
            assert matched(cache) == 0
            assert load(half) == set(VALUES)
            save(half)
            assert time.monotonic() - begin < 2 * 3 * 0.3 + SLACK_S
        finally:
            for node in cluster:
                node.resume()
        wait_for(lambda: matched(cache) == COUNT, "blocks are not found again")
        assert load(half) == set()


# -- who may share


def test_an_engine_leaves_a_record_and_tells_in_what_others_differ(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    other = msgspec.structs.replace(FINGERPRINT, dtype="half")
    stranger = msgspec.structs.replace(FINGERPRINT, model="n")
    for each in (other, stranger, FINGERPRINT, FINGERPRINT):
        caplog.clear()
        with caplog.at_level("WARNING", LOG):
            announce(cache, each)
    (line,) = caplog.messages
    assert line == f"blocks of {other.digest()} are not shared: dtype: 'f', not 'half'"
    records = dict(cache.client.scan(RECORDS))
    assert records.keys() == {RECORDS.encode() + f.digest().encode()
                              for f in (other, stranger, FINGERPRINT)}  # fmt: skip


def test_a_digest_that_stands_for_something_else_is_refused(cache: Cache) -> None:
    stranger = msgspec.structs.replace(FINGERPRINT, model="n")
    cache.client.put(RECORDS + FINGERPRINT.digest(), msgspec.json.encode(stranger))
    with pytest.raises(ConfigError, match="model: 'm', not 'n'"):
        announce(cache, FINGERPRINT)


@pytest.mark.parametrize("record", [b"", b"{", b"[1]", b'{"model": 7}', b"\xff" * 100])
def test_records_that_cannot_be_read_are_passed_over(cache: Cache, record: bytes) -> None:
    cache.client.put(RECORDS + "0" * 16, record)
    announce(cache, FINGERPRINT)
    assert cache.client.exists(RECORDS + FINGERPRINT.digest())


def test_an_engine_starts_without_the_store(cluster: Cluster, cache: Cache) -> None:
    for node in cluster:
        node.pause()
    try:
        announce(cache, FINGERPRINT)
    finally:
        for node in cluster:
            node.resume()
    wait_for(lambda: cache.exists(["none"]) == [False], "the nodes do not answer again")
