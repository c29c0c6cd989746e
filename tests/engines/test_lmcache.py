"""p2pkv behind LMCache's own classes, with real nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        importlib.util.find_spec("lmcache") is None,
        reason="LMCache is not installed: scripts/test-engines lmcache",
    ),
]

HERE = Path(__file__).parent
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
CHUNK_BYTES = 8192
PATIENCE = {"lookup_timeout_s": 2.0, "transfer_timeout_s": 5.0}
"""For machines that do much at once; what is tested is not speed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        EtcdCluster(1) as etcd,
        Cluster(2, etcd=etcd, reset_after_s=60.0, fence_after_s=50.0) as cluster,
    ):
        yield cluster


def params(cluster: Cluster, **more: Any) -> dict[str, Any]:
    return {
        "etcd_endpoints": ",".join(cluster.etcd.endpoints),
        "cluster": cluster.name,
        "cache": PATIENCE,
        **more,
    }


# -- the second level of the server


class Level2:
    """An adapter made by LMCache from its JSON, over the memory of a first level."""

    def __init__(self, options: dict[str, Any], chunks: int = 16) -> None:
        import torch
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
            PluginL2AdapterConfig,
            _create_plugin_adapter,
        )

        self.pool = torch.zeros(chunks * CHUNK_BYTES, dtype=torch.uint8)
        config = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "p2pkv.adapters.lmcache",
                "class_name": "P2PKVL2Adapter",
                "adapter_params": options,
            }
        )
        desc = L1MemoryDesc(self.pool.data_ptr(), self.pool.numel(), 4096)
        self.adapter: Any = _create_plugin_adapter(config, desc)

    def object(self, index: int, size: int = CHUNK_BYTES, pool: Any = None) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        memory = self.pool if pool is None else pool
        shape = torch.Size([size])
        metadata = MemoryObjMetadata(
            shape=shape, dtype=torch.uint8, address=index * CHUNK_BYTES, phy_size=size,
            fmt=MemoryFormat.BINARY, ref_count=1, shapes=[shape], dtypes=[torch.uint8],
        )  # fmt: skip
        raw = memory[index * CHUNK_BYTES : index * CHUNK_BYTES + size]
        return TensorMemoryObj(raw, metadata, None)

    def stored(self, task: int, timeout_s: float = 20.0) -> Any:
        """As LMCache's controller does: wait at the descriptor, then fetch."""
        results: dict[int, Any] = {}
        self._wait(self.adapter.get_store_event_fd(), timeout_s, lambda: results.update(
            self.adapter.pop_completed_store_tasks()) or task in results)  # fmt: skip
        return results[task]

    def found(self, task: int, timeout_s: float = 20.0) -> list[bool]:
        return self._bits(
            self.adapter.get_lookup_and_lock_event_fd(),
            self.adapter.query_lookup_and_lock_result, task, timeout_s,
        )  # fmt: skip

    def loaded(self, task: int, timeout_s: float = 20.0) -> list[bool]:
        return self._bits(
            self.adapter.get_load_event_fd(), self.adapter.query_load_result, task, timeout_s
        )

    def _bits(self, fd: int, query: Any, task: int, timeout_s: float) -> list[bool]:
        results: list[Any] = []
        self._wait(fd, timeout_s, lambda: results.append(query(task)) or results[-1] is not None)
        assert query(task) is None, "a result is given once"
        return results[-1]

    @staticmethod
    def _wait(fd: int, timeout_s: float, done: Any) -> None:
        from lmcache.v1.platform import consume_fd

        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            ready, _, _ = select.select([fd], [], [], max(0.0, left))
            assert ready, f"nothing was announced within {timeout_s} s"
            consume_fd(fd)


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bool(bitmap.test(i)) for i in range(count)]


def key(index: int, model: str = "m", **more: Any) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(index.to_bytes(32, "big"), model, 0x01010000, **more)


@pytest.fixture
def level2(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Level2]:
    level = Level2(params(cluster, namespace=request.node.name[:100].replace("[", "-").rstrip("]")))
    yield level
    level.adapter.close()


def test_what_one_server_stores_another_finds_and_loads(cluster: Cluster, level2: Level2) -> None:
    keys = [key(i) for i in range(8)]
    for i in range(8):
        level2.object(i).raw_data.fill_(i + 1)
    result = level2.stored(
        level2.adapter.submit_store_task(keys, list(map(level2.object, range(8))))
    )
    assert result.is_successful()
    assert result.bytes_transferred() == 8 * CHUNK_BYTES

    other = Level2(params(cluster, namespace=level2.adapter._options.namespace))
    try:
        asked = [*keys, key(99)]
        hits = other.found(other.adapter.submit_lookup_and_lock_task(asked, {}))
        assert bits(hits, 9) == [True] * 8 + [False]
        objects = list(map(other.object, range(9)))
        assert bits(other.loaded(other.adapter.submit_load_task(asked, objects)), 9) == (
            [True] * 8 + [False]
        )
        assert [int(o.raw_data[0]) for o in objects] == [*range(1, 9), 0]
        assert [int(o.raw_data[-1]) for o in objects] == [*range(1, 9), 0]
    finally:
        other.adapter.close()


def test_the_three_descriptors_are_distinct(level2: Level2) -> None:
    adapter = level2.adapter
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3


def test_what_is_there_is_not_sent_again(level2: Level2) -> None:
    keys, objects = [key(0), key(1)], [level2.object(0), level2.object(1)]
    first = level2.stored(level2.adapter.submit_store_task(keys[:1], objects[:1]))
    second = level2.stored(level2.adapter.submit_store_task(keys, objects))
    assert [first.bytes_transferred(), second.bytes_transferred()] == [CHUNK_BYTES, CHUNK_BYTES]
    assert level2.adapter.get_usage().total_bytes_used == 2 * CHUNK_BYTES


def test_objects_outside_of_the_first_level_are_stored_too(level2: Level2) -> None:
    import torch

    elsewhere = torch.full((CHUNK_BYTES,), 7, dtype=torch.uint8)
    outside = level2.object(0, pool=elsewhere)
    assert level2.stored(level2.adapter.submit_store_task([key(0)], [outside])).is_successful()
    inside = level2.object(3)
    assert bits(level2.loaded(level2.adapter.submit_load_task([key(0)], [inside])), 1) == [True]
    assert bool((inside.raw_data == 7).all())


@pytest.mark.parametrize("size", [CHUNK_BYTES // 2, CHUNK_BYTES - 1])
def test_a_chunk_of_another_size_is_a_miss(level2: Level2, size: int) -> None:
    assert level2.stored(
        level2.adapter.submit_store_task([key(0)], [level2.object(0, size)])
    ).is_successful()
    load = level2.adapter.submit_load_task([key(0)], [level2.object(1)])
    assert bits(level2.loaded(load), 1) == [False]


def test_salts_groups_and_models_are_kept_apart(level2: Level2) -> None:
    stored = key(0)
    level2.stored(level2.adapter.submit_store_task([stored], [level2.object(0)]))
    others = [key(0, cache_salt="bob"), key(0, object_group_id=1), key(0, "n")]
    hits = level2.found(level2.adapter.submit_lookup_and_lock_task([stored, *others], {}))
    assert bits(hits, 4) == [True, False, False, False]


def pins(cluster: Cluster) -> int:
    """How many the nodes hold."""
    with cluster.client() as kv:
        return int(sum(stats.figures["pins"] for stats in kv.stats().values()))


def test_a_lookup_pins_until_there_were_as_many_unlocks(cluster: Cluster, level2: Level2) -> None:
    adapter = level2.adapter
    level2.stored(adapter.submit_store_task([key(0)], [level2.object(0)]))
    before = pins(cluster)
    for _ in range(2):
        level2.found(adapter.submit_lookup_and_lock_task([key(0), key(1)], {}))
    assert (pins(cluster), adapter.report_status()["locked"]) == (before + 1, 1)
    adapter.submit_unlock([key(0), key(1)])
    assert (pins(cluster), adapter.report_status()["locked"]) == (before + 1, 1)
    adapter.submit_unlock([key(0), key(1)])
    wait_for(lambda: pins(cluster) == before, "the pin is not taken back")
    assert adapter.report_status()["locked"] == 0


def test_what_is_never_unlocked_ends_with_its_time(cluster: Cluster) -> None:
    before = pins(cluster)
    level = Level2(params(cluster, namespace="forgetful", lock_ttl_s=1.0))
    try:
        level.stored(level.adapter.submit_store_task([key(0)], [level.object(0)]))
        level.found(level.adapter.submit_lookup_and_lock_task([key(0)], {}))
        assert pins(cluster) == before + 1
        wait_for(lambda: pins(cluster) == before, "the pin does not end")
        level.adapter.submit_unlock([key(5)])
        status = level.adapter.report_status()
        assert (status["locked"], status["locks_reaped_total"]) == (0, 1)
    finally:
        level.adapter.close()


def test_deleting_tells_the_listeners(level2: Level2) -> None:
    level2.stored(level2.adapter.submit_store_task([key(0)], [level2.object(0)]))
    level2.adapter.delete([key(0), key(1)])
    assert level2.adapter.get_usage().total_bytes_used == 0
    hits = level2.found(level2.adapter.submit_lookup_and_lock_task([key(0)], {}))
    assert bits(hits, 1) == [False]


def test_nodes_that_stand_still_are_misses_in_time_and_no_task_is_lost(cluster: Cluster) -> None:
    hasty = {"lookup_timeout_s": 0.2, "transfer_timeout_s": 0.2, "open_first_s": 60.0}
    level = Level2(params(cluster, namespace="standstill", cache=hasty, path="tcp"))
    keys = [key(i) for i in range(16)]
    objects = list(map(level.object, range(16)))
    assert level.stored(level.adapter.submit_store_task(keys, objects)).is_successful()
    for node in cluster:
        node.pause()
    try:
        wait_for(
            lambda: (
                not any(bits(level.found(level.adapter.submit_lookup_and_lock_task(keys, {})), 16))
            ),
            "the nodes do not stand still",
        )
        begin = time.monotonic()
        for _ in range(10):
            lookup = level.adapter.submit_lookup_and_lock_task(keys, {})
            load = level.adapter.submit_load_task(keys, objects)
            store = level.adapter.submit_store_task([key(100)], objects[:1])
            assert bits(level.found(lookup), 16) == [False] * 16
            assert bits(level.loaded(load), 16) == [False] * 16
            assert not level.stored(store).is_successful()
        assert time.monotonic() - begin < 10.0
    finally:
        for node in cluster:
            node.resume()
        level.adapter.close()
    with cluster.client(timeout=20.0) as kv:
        wait_for(lambda: kv.batch_exists(["any"]) == [False], "the nodes do not answer again")


def test_options_are_checked_by_name() -> None:
    with pytest.raises(Exception, match="lock_ttl"):
        Level2({"lock_ttl": 3})


def test_lmcache_s_own_bench_stores_loads_and_verifies(cluster: Cluster) -> None:
    spec = {
        "type": "plugin",
        "module_path": "p2pkv.adapters.lmcache",
        "class_name": "P2PKVL2Adapter",
        "adapter_params": params(cluster, namespace="bench"),
    }
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "lmcache"), "bench", "l2", "--l2-adapter",
            json.dumps(spec), "--num-keys", "16", "--data-size-kb", "64", "--rounds", "2",
            "--no-skip-verify",
        ],
        env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said[-3000:] + done.stderr[-3000:]
    assert said.count("Total success:                                                32") == 2, said


# -- the connector of an engine in a process


def engine(cluster: Cluster, mode: str, namespace: str, extra: Any = None, **changes: Any) -> Any:
    config = {"p2pkv": params(cluster, namespace=namespace), **(extra or {})}
    done = subprocess.run(
        [
            sys.executable, str(HERE / "lmcache_engine.py"), mode, json.dumps(config),
            json.dumps(changes),
        ],
        env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(lines) == 1, (done.stdout + done.stderr)[-5000:]
    return json.loads(lines[0].removeprefix("SAID "))


@pytest.mark.parametrize("header", [True, False])
def test_an_engine_loads_what_another_process_stored(cluster: Cluster, header: bool) -> None:
    extra = {"save_chunk_meta": header}
    name = f"engine-{header}"
    stored = engine(cluster, "store", name, extra)
    assert (stored["before"], stored["found"]) == (0, 100)
    loaded = engine(cluster, "load", name, extra)
    assert (loaded["before"], loaded["loaded"], loaded["equal"]) == (100, 100, True)
