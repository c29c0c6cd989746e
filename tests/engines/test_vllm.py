"""vLLM itself, with a small model on the CPU, and its cache in real nodes.

The engines run in processes of their own. ``cached`` is what vLLM says of a request: the tokens of
its prompt that were not computed.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from vllm_process import Engine, engines

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

pytestmark = pytest.mark.timeout(1800)

SLOW_S = 120.0
"""For what takes no time on a machine of its own."""
BLOCK = 32
"""Tokens."""
TOKENS = 12
LAYERS = 2
BLOCK_BYTES = LAYERS * 2 * BLOCK * 2 * 32 * 4
"""Keys and values of 2 heads with 32 numbers of 4 bytes."""


def prompt(number: int, characters: int = 180) -> str:
    """Prompts with different numbers have no block in common. A character is a token."""
    return (f"{number}: the quick brown fox jumps over the lazy dog. " * 10)[:characters]


def whole(characters: int = 180) -> int:
    """Tokens of a prompt that can be loaded: all full blocks."""
    return characters // BLOCK * BLOCK


def stored(cluster: Cluster, prefix: str = "kv:") -> dict[bytes, int]:
    """Keys of blocks, and their sizes."""
    with cluster.client(timeout=20.0) as kv:
        return dict(kv.scan_keys(prefix))


def wait_saved(cluster: Cluster, blocks: int, prefix: str = "kv:") -> None:
    wait_for(
        lambda: len(stored(cluster, prefix)) >= blocks, f"{blocks} blocks are not saved", SLOW_S
    )


def transfer(cluster: Cluster, role: str = "kv_both", **options: Any) -> dict[str, Any]:
    where = {"etcd_endpoints": ",".join(cluster.etcd.endpoints), "cluster": cluster.name}
    return {"kv_role": role, "kv_connector_extra_config": where | options}


def ask(engine: Engine, *prompts: str, **more: Any) -> dict[str, Any]:
    """Generate, without what the engine itself remembers."""
    forget(engine)
    return engine.ask(prompts=list(prompts), tokens=TOKENS, **more)


def forget(engine: Engine) -> None:
    """Reset the engine's own prefix cache.

    It refuses while saves hold blocks, and learns of their end when it steps.
    """
    wait_for(
        lambda: engine.ask(reset=True)["done"] or engine.ask(prompts=["x"], tokens=1) is None,
        "the engine's prefix cache is not reset",
        SLOW_S,
    )


# -- two engines that share


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(2, etcd=etcd) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(cluster: Cluster, model: Path) -> Iterator[list[Engine]]:
    """A producer and a consumer."""
    each = [{"model": str(model), "transfer": transfer(cluster, f"kv_{role}")}
            for role in ("producer", "consumer")]  # fmt: skip
    with engines(*each) as pair:
        yield pair


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames:
        with request.getfixturevalue("cluster").client(timeout=20.0) as kv:
            kv.delete_range("kv:")


def test_another_process_loads_what_one_has_saved(cluster: Cluster, pair: list[Engine]) -> None:
    producer, consumer = pair
    computed = ask(producer, prompt(1), prompt(2))
    assert computed["cached"] == [0, 0]
    wait_saved(cluster, 2 * ((180 + TOKENS - 1) // BLOCK))
    assert set(stored(cluster).values()) == {BLOCK_BYTES}
    loaded = ask(consumer, prompt(1), prompt(2))
    assert loaded["cached"] == [whole(), whole()]
    assert loaded["tokens"] == computed["tokens"]
    for one, other in zip(loaded["logprobs"], computed["logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_producer_says_what_it_saves_and_the_consumer_waits_for_it(
    cluster: Cluster, pair: list[Engine]
) -> None:
    producer, consumer = pair
    prefilled = ask(producer, prompt(3))
    (params,) = prefilled["params"]
    assert params["p2pkv_blocks"] == (180 + TOKENS - 1) // BLOCK
    decoded = ask(consumer, prompt(3), params=params)  # at once: saves may be under way
    assert decoded["cached"] == [whole()]
    assert decoded["tokens"] == prefilled["tokens"]
    refused = ask(consumer, prompt(3), params=params | {"p2pkv_fingerprint": "0" * 16})
    assert refused["cached"] == [0]
    assert refused["tokens"] == prefilled["tokens"]
    assert consumer.said("was prefilled by an engine with fingerprint 0000")


def test_a_consumer_saves_nothing(cluster: Cluster, pair: list[Engine]) -> None:
    ask(pair[1], prompt(4))
    figures = pair[1].ask(metrics=True)
    assert "vllm:p2pkv_saved_blocks" not in figures or not figures["vllm:p2pkv_saved_blocks"]
    assert stored(cluster) == {}


def test_blocks_that_have_another_size_are_computed(cluster: Cluster, pair: list[Engine]) -> None:
    producer, consumer = pair
    computed = ask(producer, prompt(5))
    wait_saved(cluster, (180 + TOKENS - 1) // BLOCK)
    replace_all(cluster, b"too short")
    again = ask(consumer, prompt(5))
    assert again["tokens"] == computed["tokens"]
    assert consumer.ask(metrics=True)["vllm:p2pkv_load_failed_blocks"] >= whole() // BLOCK


def test_what_is_loaded_is_used(cluster: Cluster, pair: list[Engine]) -> None:
    producer, consumer = pair
    computed = ask(producer, prompt(6))
    wait_saved(cluster, (180 + TOKENS - 1) // BLOCK)
    replace_all(cluster, bytes(BLOCK_BYTES))
    wrong = ask(consumer, prompt(6))
    assert wrong["cached"] == [whole()]
    assert wrong["tokens"] != computed["tokens"]


def replace_all(cluster: Cluster, value: bytes) -> None:
    with cluster.client(timeout=20.0) as kv:
        for key in stored(cluster):
            assert kv.delete(key)
            kv.put(key, value)


def test_figures_are_told_by_vllms_metrics(cluster: Cluster, pair: list[Engine]) -> None:
    producer, consumer = pair
    ask(producer, prompt(7))
    wait_saved(cluster, (180 + TOKENS - 1) // BLOCK)
    before = consumer.ask(metrics=True)
    ask(consumer, prompt(7))
    after = consumer.ask(metrics=True)
    blocks = whole() // BLOCK
    assert gained(before, after, "hit_blocks") >= blocks
    assert gained(before, after, "loaded_blocks") == blocks
    assert gained(before, after, "loaded_bytes") == blocks * BLOCK_BYTES
    assert producer.ask(metrics=True)["vllm:p2pkv_saved_bytes"] >= blocks * BLOCK_BYTES


def gained(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[f"vllm:p2pkv_{name}"] - before.get(f"vllm:p2pkv_{name}", 0)


def test_keys_that_vanish_between_lookup_and_load_are_computed(
    cluster: Cluster, pair: list[Engine]
) -> None:
    producer, consumer = pair
    computed = ask(producer, prompt(8))
    wait_saved(cluster, (180 + TOKENS - 1) // BLOCK)
    consumer.ask(delete_before_loading=True)  # from here on, so this test is the pair's last
    again = ask(consumer, prompt(8))
    assert again["tokens"] == computed["tokens"]
    assert consumer.said("it is not there any more")
    assert len(stored(cluster)) < (180 + TOKENS - 1) // BLOCK


# -- engines that must not share


def test_an_engine_with_another_dtype_finds_nothing_and_says_why(
    etcd: EtcdCluster, model: Path
) -> None:
    with Cluster(1, etcd=etcd) as cluster:
        option = {"model": str(model), "transfer": transfer(cluster)}
        with engines(option) as (first,):
            ask(first, prompt(1))
            wait_saved(cluster, whole() // BLOCK)
            with engines(option | {"dtype": "bfloat16"}) as (other,):
                assert ask(other, prompt(1))["cached"] == [0]
                assert other.said("are not shared: dtype: 'torch.bfloat16/auto', not")
                digests = {key.split(b".")[0] for key in stored(cluster)}
                wait_saved(cluster, 2 * (whole() // BLOCK))
                assert len(digests) == 2


# -- nodes that die or stop


def test_two_copies_outlive_a_node_that_dies_under_an_engine(
    etcd: EtcdCluster, model: Path
) -> None:
    # By sockets: what a stopped node holds could still be read from its memory on this host.
    with (
        Cluster(3, etcd=etcd, replication_factor=2, fence_after_s=100.0, reset_after_s=120.0)
        as cluster,
        engines({"model": str(model), "transfer": transfer(cluster, path="tcp")}) as (engine,),
    ):  # fmt: skip
        numbers = range(10, 16)
        computed = [ask(engine, prompt(n)) for n in numbers]
        wait_saved(cluster, len(numbers) * (whole() // BLOCK))
        cluster.wait_settled()

        # One is killed while a batch is under way: every request is answered, rightly.
        forget(engine)
        engine.order(prompts=[prompt(n) for n in numbers], tokens=TOKENS)
        cluster["n0"].kill()
        answers = engine.answer()
        assert answers["tokens"] == [c["tokens"][0] for c in computed]

        # Once the others have taken over, all is there.
        cluster.wait_settled()
        wait_for(
            lambda: all(ask(engine, prompt(n))["cached"] == [whole()] for n in numbers),
            "not everything is found after a node has died",
            SLOW_S,
        )


def test_a_store_that_stands_still_at_most_doubles_the_time_of_a_request(
    etcd: EtcdCluster, model: Path
) -> None:
    # By sockets: what a stopped node holds could still be read from its memory on this host.
    with (
        Cluster(3, etcd=etcd, fence_after_s=100.0, reset_after_s=120.0) as cluster,
        engines(
            {"model": str(model)},
            {"model": str(model), "transfer": transfer(cluster, path="tcp")},
        ) as (bare, engine),
    ):  # fmt: skip
        for each in (bare, engine):
            timed(each, 0)
        for node in cluster:
            node.pause()
        try:  # one after the other, so that both see the same machine
            pairs = [(timed(bare, n), timed(engine, n)) for n in range(1, 21)]
        finally:
            for node in cluster:
                node.resume()
        without, stopped = (sorted(times) for times in zip(*pairs, strict=True))
        print(f"seconds for a request, median, worst and sum: without a store {told(without)}; "
              f"with one that stands still {told(stopped)}; "
              f"worst ratio of a pair {max(b / a for a, b in pairs):.2f}")  # fmt: skip
        assert sum(stopped) <= 2 * sum(without)
        assert statistics.median(stopped) <= 2 * statistics.median(without)


def timed(engine: Engine, number: int) -> float:
    """Seconds for a request that nobody has seen before, with 100 tokens to generate."""
    answer = engine.ask(prompts=[prompt(1000 + number)], tokens=100)
    assert answer["cached"] == [0]
    return float(answer["seconds"])


def told(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f}, {max(seconds):.3f}, {sum(seconds):.2f}"


# -- several ranks


def test_tensor_parallel_ranks_save_and_load_their_own_blocks(
    etcd: EtcdCluster, model: Path
) -> None:
    with Cluster(1, etcd=etcd) as cluster:
        option = {"model": str(model), "transfer": transfer(cluster), "ranks": 2}
        with engines(option) as (first,):
            computed = first.ask(prompts=[prompt(1)], tokens=TOKENS)
            wait_saved(cluster, 2 * (whole() // BLOCK))
        assert set(stored(cluster).values()) == {BLOCK_BYTES // 2}
        with engines(option) as (second,):
            loaded = second.ask(prompts=[prompt(1)], tokens=TOKENS)
        assert loaded["cached"] == [whole()]
        assert loaded["tokens"] == computed["tokens"]


# -- through other connectors


def test_vllms_connector_for_mooncake_runs_on_p2pkv(
    etcd: EtcdCluster, model: Path, tmp_path: Path
) -> None:
    settings = {
        "mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "16MB",
        "protocol": "tcp", "metadata_server": "P2PHANDSHAKE", "master_server_address": "unused:1",
    }  # fmt: skip
    (tmp_path / "mooncake.json").write_text(json.dumps(settings))
    with Cluster(2, etcd=etcd) as cluster:
        option = {
            "model": str(model),
            "transfer": {"kv_connector": "MooncakeStoreConnector"},
            "before": shim(cluster),
            "environment": {"MOONCAKE_CONFIG_PATH": str(tmp_path / "mooncake.json")},
        }
        with engines(option) as (first,):
            computed = ask(first, prompt(1))
            assert computed["cached"] == [0]
            wait_saved(cluster, whole() // BLOCK, "mc/default/")
        with engines(option) as (second,):
            loaded = ask(second, prompt(1))
        assert loaded["cached"] == [whole()]
        assert loaded["tokens"] == computed["tokens"]


def test_lmcaches_server_behind_vllm_finds_its_chunks_in_p2pkv(
    etcd: EtcdCluster, model: Path, tmp_path: Path
) -> None:
    chunk = 64
    with Cluster(2, etcd=etcd) as cluster:
        for start in ("cold", "with a new engine and a new server"):
            with lmcache_server(cluster, chunk, tmp_path / "log") as port:
                where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
                option = {
                    "model": str(model),
                    "environment": LMCACHE,
                    "transfer": {
                        "kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": where,
                    },
                }  # fmt: skip
                with engines(option) as (engine,):
                    answer = ask(engine, prompt(1))
                    wait_saved(cluster, whole() // chunk, "lmc-l2:")
            if start == "cold":
                assert answer["cached"] == [0]
                computed = answer
    assert answer["cached"] == [whole() // chunk * chunk]
    assert answer["tokens"] == computed["tokens"]


LMCACHE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}


@contextmanager
def lmcache_server(cluster: Cluster, chunk: int, log: Path) -> Iterator[int]:
    """A server with p2pkv as its second level: its port."""
    where = {
        "etcd_endpoints": ",".join(cluster.etcd.endpoints), "cluster": cluster.name,
        "cache": {"lookup_timeout_s": 5.0, "transfer_timeout_s": 5.0},
    }  # fmt: skip
    level2 = {
        "type": "plugin", "module_path": "p2pkv.adapters.lmcache", "class_name": "P2PKVL2Adapter",
        "adapter_params": where,
    }  # fmt: skip
    port, web, figures = free_ports(3)
    command = [
        str(Path(sys.executable).parent / "lmcache"), "server", f"--port={port}",
        f"--http-port={web}", f"--prometheus-port={figures}", f"--chunk-size={chunk}",
        "--l1-size-gb=0.25", "--eviction-policy=LRU", "--supported-transfer-mode=auto",
        "--l2-adapter", json.dumps(level2),
    ]  # fmt: skip
    with log.open("w+") as out:
        server = subprocess.Popen(command, env=os.environ | LMCACHE, stdout=out, stderr=out)
        try:
            wait_for(lambda: server.poll() is not None or answers(web), "no server", SLOW_S)
            assert server.poll() is None, log.read_text()[-5000:]
            yield port
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def free_ports(count: int) -> list[int]:
    """LMCache's server wants to be told. Below the ephemeral ones, which its clients may get."""
    free: list[int] = []
    with ExitStack() as held:
        for port in random.sample(range(12000, 20000), 100):
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                free.append(port)
            if len(free) == count:
                return free
    raise AssertionError("no free ports")


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def shim(cluster: Cluster) -> list[str]:
    """The command that stands before a program for Mooncake."""
    where = [f"--etcd-endpoints={','.join(cluster.etcd.endpoints)}", f"--cluster={cluster.name}"]
    return [sys.executable, "-m", "p2pkv.cli", "mooncake-shim", *where, "--"]


# -- parts that need vLLM's packages and no engine


def layers(blocks: int, parts: int, device: str = "cpu") -> dict[str, Any]:
    """Caches of two layers, with a block in ``parts`` rows of the first dimension."""
    import torch

    shape = (blocks * parts, 2, 8 // parts, 16)
    numbers = torch.randint(0, 1 << 30, (2, *shape), dtype=torch.int32, device=device)
    return {"a": numbers[0], "b": numbers[1]}


PAGE = 2 * 8 * 16 * 4
"""Bytes of a block in each of these layers."""


@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_of_tensors_are_gathered_and_scattered_whole(parts: int) -> None:
    from p2pkv.adapters.vllm.pages import pages_of

    source, target = layers(6, parts), layers(6, parts)
    kept = target["a"].clone()
    sizes = dict.fromkeys(source, PAGE)
    reader, writer = (pages_of(each, ["a", "b"], 6, sizes) for each in (source, target))
    staging = reader.staging(3)
    reader.gather([4, 0], staging, reader.now())
    page = source["a"].view(6, -1)[4].numpy().tobytes()
    assert bytes(staging.row(0)) == page + source["b"].view(6, -1)[4].numpy().tobytes()
    writer.scatter(staging, [1, 5], writer.now())
    for name in source:
        assert target[name].view(6, -1)[1].equal(source[name].view(6, -1)[4])
        assert target[name].view(6, -1)[5].equal(source[name].view(6, -1)[0])
    assert target["a"].view(6, -1)[0].equal(kept.view(6, -1)[0])


def test_layers_that_share_their_memory_count_once() -> None:
    from p2pkv.adapters.vllm.pages import pages_of

    caches = layers(6, 1)
    caches["c"] = caches["a"]
    assert pages_of(caches, list(caches), 6, dict.fromkeys(caches, PAGE)).block_bytes == 2 * PAGE


def test_memory_in_which_blocks_do_not_lie_whole_is_refused() -> None:
    from p2pkv.adapters.vllm.pages import pages_of
    from p2pkv.errors import ConfigError

    caches = {"a": layers(6, 1)["a"].transpose(0, 1).contiguous().transpose(0, 1)}
    with pytest.raises(ConfigError, match=r"layer a: .* is not 6 blocks of 1024 bytes each"):
        pages_of(caches, ["a"], 6, {"a": PAGE})


def test_the_tier_answers_as_vllm_asks(cluster: Cluster) -> None:
    from types import SimpleNamespace as Of

    import numpy
    from vllm.v1.kv_offload.base import LookupResult, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    parallel = Of(
        tp_size=2, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False
    )  # fmt: skip
    config = Of(
        model=Of(name="m", dtype="float16"), cache=Of(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=parallel, replicated_layout=False, canonical_layout=False, kv_cache_layout="LBHNC",
        groups=[Of(tokens_per_block=16, layer_names=("a",))],
    )  # fmt: skip
    where = transfer(cluster)["kv_connector_extra_config"]
    memory = bytearray(b"".join(bytes([row]) * 512 for row in range(8)))
    tier = SecondaryTierFactory.create_secondary_tier(
        {"type": "P2PKVTier", "module_path": "p2pkv.adapters.vllm", **where},
        memoryview(memory).cast("B", (8, 512)),
        Of(config=config),
    )
    request = Of(req_id="r")
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(3)]

    def found() -> list[Any]:
        answers = [tier.lookup(key, request) for key in keys]
        tier.on_schedule_end(None)
        return [] if LookupResult.RETRY in answers else answers

    assert wait_for(found, "no answer") == [LookupResult.MISS] * 3
    tier.on_request_finished(request)
    tier.submit_store(TransferJob(1, keys[:2], numpy.array([5, 6]), False, request))
    (stored_job,) = wait_for(tier.get_finished_jobs, "the store has not ended")
    assert (stored_job.job_id, stored_job.success) == (1, True)
    assert wait_for(found, "no answer") == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    tier.submit_load(TransferJob(2, keys, numpy.array([0, 1, 2]), True, request))
    (load_job,) = wait_for(tier.get_finished_jobs, "the load has not ended")
    assert not load_job.success
    assert set(load_job.successful_keys) == set(keys[:2])
    assert [memory[row * 512] for row in range(3)] == [5, 6, 2]
    assert not tier.has_pending_work()
    tier.drain_jobs()
    tier.shutdown()
