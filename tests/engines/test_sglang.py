"""p2pkv behind SGLang's own HiCache: its factory, host pools, and engine, with real nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_pages import HEADS, PAGE, PAGES, hashes, host_pool

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed: scripts/test-engines sglang",
    ),
]

HERE = Path(__file__).parent
STAND_INS = HERE / "sglang_cpu"
PATIENCE = {"lookup_timeout_s": 2.0, "transfer_timeout_s": 5.0}
LAYOUTS = ["page_first", "layer_first", "page_first_direct", "page_head"]


@pytest.fixture(scope="module", autouse=True)
def cpu() -> None:
    """Before SGLang is imported: it is to do without a GPU."""
    spec = importlib.util.spec_from_file_location("sglang_cpu", STAND_INS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        EtcdCluster(1) as etcd,
        Cluster(2, etcd=etcd, reset_after_s=60.0, fence_after_s=50.0) as cluster,
    ):
        yield cluster


@pytest.fixture(autouse=True)
def _emptied(cluster: Cluster) -> None:
    with cluster.client(timeout=20.0) as kv:
        kv.delete_range("")


class Rank:
    """A rank's pool and storage, made by SGLang's factory from its JSON."""

    def __init__(
        self, cluster: Cluster, pool: Any = None, zero_copy: bool = True, config: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self.pool = host_pool() if pool is None else pool
        where = {"etcd_endpoints": ",".join(cluster.etcd.endpoints), "cluster": cluster.name}
        extra = {
            "backend_name": "p2pkv",
            "module_path": "p2pkv.adapters.sglang",
            "class_name": "P2PKVStorage",
            "interface_v1": int(zero_copy),
            "p2pkv": {"cache": PATIENCE, **where, **options},
        }
        fields = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
            "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": True,
            "is_page_first_layout": True, "model_name": "tiny", "extra_config": extra,
        } | (config or {})  # fmt: skip
        self.storage: Any = StorageBackendFactory.create_backend(
            "dynamic", HiCacheStorageConfig(**fields), self.pool
        )
        self.storage.register_mem_pool_host(self.pool)

    def fill(self, seed: int) -> Any:
        """Indices of pages with random content."""
        import torch

        indices = self.pool.alloc(PAGES * PAGE)
        torch.manual_seed(seed)
        self.pool.kv_buffer.copy_(torch.rand(self.pool.kv_buffer.shape))
        return indices

    def contents(self, indices: Any) -> list[Any]:
        return [self.pool.get_data_page(int(i), flat=True).clone() for i in indices[::PAGE]]

    def close(self) -> None:
        self.storage.close()


@pytest.fixture
def ranks(cluster: Cluster) -> Iterator[Any]:
    made: list[Rank] = []

    def make(*args: Any, **kwargs: Any) -> Rank:
        made.append(Rank(cluster, *args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def equal(mine: list[Any], theirs: list[Any]) -> list[bool]:
    import torch

    return [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)]


def after(pages: list[str]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=pages)


# -- the zero-copy interface


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_go_from_pool_to_pool_in_every_layout(ranks: Any, layout: str) -> None:
    writer, reader, pages = ranks(host_pool(layout)), ranks(host_pool(layout)), hashes()
    mine = writer.fill(1)
    assert writer.storage.batch_exists(pages) == 0
    assert writer.storage.batch_set_v1(pages, mine) == [True] * PAGES
    assert reader.storage.batch_exists(pages) == PAGES
    here = reader.pool.alloc(PAGES * PAGE)
    assert reader.storage.batch_get_v1(pages, here) == [True] * PAGES
    assert all(equal(writer.contents(mine), reader.contents(here)))


def test_existence_ends_at_the_first_gap_and_a_load_tells_of_each_page(ranks: Any) -> None:
    rank, pages = ranks(), hashes()
    mine = rank.fill(2)
    kept = [i for i in range(PAGES) if i != 5]
    tokens = mine.reshape(PAGES, PAGE)[kept].reshape(-1)
    assert rank.storage.batch_set_v1([pages[i] for i in kept], tokens) == [True] * (PAGES - 1)
    assert rank.storage.batch_exists(pages) == 5
    assert rank.storage.batch_get_v1(pages, mine) == [i != 5 for i in range(PAGES)]


def test_pages_of_one_run_lie_on_one_node_if_asked_for(ranks: Any, cluster: Cluster) -> None:
    from p2pkv import ring

    rank, pages = ranks(blocks_per_group=8), hashes()
    mine = rank.fill(4)
    assert rank.storage.batch_set_v1(pages[:5], mine[: 5 * PAGE], after([])) == [True] * 5
    rest = rank.storage.batch_set_v1(pages[5:], mine[5 * PAGE :], after(pages[:5]))
    assert rest == [True] * (PAGES - 5)
    assert rank.storage.batch_exists(pages, after([])) == PAGES
    assert rank.storage.batch_exists(pages[20:], after(pages[:20])) == PAGES - 20
    with cluster.client() as kv:
        tags = {ring.route(key) for key, _ in kv.scan_keys("kv:")}
    assert len(tags) == PAGES // 8


def test_engines_with_another_tensor_parallelism_share_groups_of_heads(ranks: Any) -> None:
    split = {"tp_lcm_size": 2, "should_split_heads": True}
    whole = ranks(host_pool("page_head"), config=split)
    half = [
        ranks(host_pool("page_head", heads=HEADS // 2),
              config={"tp_size": 2, "tp_rank": rank, "tp_lcm_size": 2})
        for rank in range(2)
    ]  # fmt: skip
    pages, mine = hashes(), whole.fill(5)
    assert whole.storage.batch_set_v1(pages, mine) == [True] * PAGES
    for number, rank in enumerate(half):
        assert rank.storage.batch_exists(pages) == PAGES
        here = rank.pool.alloc(PAGES * PAGE)
        assert rank.storage.batch_get_v1(pages, here) == [True] * PAGES
        heads = slice(number * HEADS // 2, (number + 1) * HEADS // 2)
        for source, target in zip(mine[::PAGE], here[::PAGE], strict=True):
            theirs = whole.pool.kv_buffer[:, int(source) // PAGE, heads]
            assert equal([rank.pool.kv_buffer[:, int(target) // PAGE]], [theirs]) == [True]


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"model_name": "other"}},
        {"config": {"tp_size": 2}},
        {"config": {"tp_size": 2, "tp_rank": 1}},
        {"namespace": "other"},
        {"zero_copy": False},
        {"layout": "layer_first"},
        {"dtype": "bfloat16"},
    ],
)
def test_pages_that_would_not_fit_are_not_found(ranks: Any, other: dict[str, Any]) -> None:
    import torch

    rank, pages = ranks(), hashes()
    rank.storage.batch_set_v1(pages, rank.fill(6))
    dtype = torch.bfloat16 if other.get("dtype") else None
    pool = host_pool(other.get("layout", "page_first"), dtype)
    options = {k: v for k, v in other.items() if k not in ("layout", "dtype")}
    stranger = ranks(pool, **options)
    assert rank.storage.batch_exists(pages) == PAGES
    assert stranger.storage.batch_exists(pages) == 0


def test_what_is_there_is_not_sent_again(ranks: Any, cluster: Cluster) -> None:
    rank, pages = ranks(), hashes()
    mine = rank.fill(7)
    rank.storage.batch_set_v1(pages, mine)
    begun = list(rank.contents(mine))
    rank.pool.kv_buffer.zero_()
    assert rank.storage.batch_set_v1(pages, mine) == [True] * PAGES
    assert rank.storage.batch_get_v1(pages, mine) == [True] * PAGES
    assert all(equal(begun, rank.contents(mine)))


# -- the interface of tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_come_back_as_they_were(ranks: Any, layout: str) -> None:
    rank, pages = ranks(host_pool(layout), zero_copy=False), hashes()
    mine = rank.fill(8)
    values = rank.contents(mine)
    assert rank.storage.batch_set(pages, values) is True
    assert rank.storage.batch_exists(pages) == PAGES
    dummies = [rank.pool.get_dummy_flat_data_page() for _ in pages]
    assert all(equal(rank.storage.batch_get(pages, dummies), values))
    assert rank.storage.exists(pages[0])
    assert all(equal([rank.storage.get(pages[3])], values[3:4]))


def test_a_missing_page_is_none_in_its_place(ranks: Any) -> None:
    rank, pages = ranks(zero_copy=False), hashes()
    values = rank.contents(rank.fill(9))
    rank.storage.batch_set(pages[:3], values[:3])
    got = rank.storage.batch_get(
        pages[:5], [rank.pool.get_dummy_flat_data_page() for _ in range(5)]
    )
    assert [page is None for page in got] == [False] * 3 + [True] * 2


# -- several pools


def transfer(name: Any, keys: Any = None, indices: Any = None, policy: str = "all_pages") -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

    return PoolTransfer(
        name=name, keys=keys, host_indices=indices, hit_policy=PoolHitPolicy(policy)
    )


def test_hybrid_pools_are_stored_and_loaded_in_one_batch(ranks: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    rank, side, pages = ranks(), ranks(host_pool("layer_first")), hashes()
    for name, pool in ((PoolName.SWA, side.pool), (PoolName.INDEXER, rank.pool)):
        rank.storage.register_mem_host_pool_v2(pool, name)
    mine, others = rank.fill(10), side.fill(11)
    jobs = [transfer(PoolName.SWA, pages, others), transfer(PoolName.INDEXER, pages, mine)]
    done = rank.storage.batch_set_v2(jobs)
    assert done == {PoolName.SWA: [True] * PAGES, PoolName.INDEXER: [True] * PAGES}
    begun = side.contents(others)
    side.pool.kv_buffer.zero_()
    assert rank.storage.batch_get_v2(jobs) == done
    assert all(equal(side.contents(others), begun))


def test_the_usable_prefix_is_one_that_every_pool_can_serve(ranks: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    rank, pages = ranks(), hashes()
    rank.storage.register_mem_host_pool_v2(host_pool(), PoolName.SWA)
    rank.storage.register_mem_host_pool_v2(host_pool(), PoolName.INDEXER)
    mine = rank.fill(12)
    rank.storage.batch_set_v1(pages[:20], mine[: 20 * PAGE])
    windows = [*range(4, 8), *range(14, 18)]
    rank.storage.batch_set_v2([
        transfer(PoolName.INDEXER, pages[:16], mine[: 16 * PAGE]),
        transfer(PoolName.SWA, [pages[i] for i in windows], mine[: 8 * PAGE]),
    ])  # fmt: skip
    asked = [
        transfer(PoolName.INDEXER, pages),
        transfer(PoolName.SWA, pages[-2:], policy="trailing_pages"),
    ]
    found = rank.storage.batch_exists_v2(pages, asked)
    assert found.restorable_prefix_pages == [6, 7, 8, 16]
    assert found.kv_hit_pages == 16
    assert found.extra_pool_hit_pages == {
        PoolName.KV: 20, PoolName.INDEXER: 16, PoolName.SWA: 18,
    }  # fmt: skip


def test_a_pool_that_was_not_registered_has_nothing(ranks: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    rank, pages = ranks(), hashes()
    mine = rank.fill(13)
    rank.storage.batch_set_v1(pages, mine)
    assert rank.storage.batch_get_v2([transfer(PoolName.MAMBA, pages, mine)]) == {
        PoolName.MAMBA: [False] * PAGES
    }
    assert rank.storage.batch_exists_v2(pages, [transfer(PoolName.MAMBA, pages)]).kv_hit_pages == 0


# -- trouble


def test_nodes_that_stand_still_are_misses_in_time_and_never_an_exception(
    ranks: Any, cluster: Cluster
) -> None:
    hasty = {"lookup_timeout_s": 0.2, "transfer_timeout_s": 0.2, "open_first_s": 60.0}
    rank, pages = ranks(cache=hasty, path="tcp"), hashes()
    mine = rank.fill(14)
    assert rank.storage.batch_set_v1(pages, mine) == [True] * PAGES
    for node in cluster:
        node.pause()
    try:
        wait_for(lambda: rank.storage.batch_exists(pages) == 0, "the nodes do not stand still")
        begin = time.monotonic()
        for _ in range(10):
            assert rank.storage.batch_exists(pages) == 0
            assert rank.storage.batch_get_v1(pages, mine) == [False] * PAGES
            assert rank.storage.batch_set_v1(hashes(PAGES + 1, 1), mine) == [False] * PAGES
            assert rank.storage.batch_get(pages[:1], [rank.pool.get_dummy_flat_data_page()]) == [
                None
            ]
        assert time.monotonic() - begin < 10.0
    finally:
        for node in cluster:
            node.resume()
    with cluster.client(timeout=20.0) as kv:
        wait_for(lambda: kv.batch_exists(["any"]) == [False], "the nodes do not answer again")


def test_without_a_cluster_an_engine_starts_and_finds_nothing(ranks: Any) -> None:
    rank = ranks(etcd_endpoints=None, seeds="tcp://127.0.0.1:1", connect_timeout_s=0.2,
                 cache={"lookup_timeout_s": 0.1, "transfer_timeout_s": 0.1})  # fmt: skip
    assert rank.storage.batch_exists(hashes()) == 0
    assert rank.storage.batch_get_v1(hashes(), rank.fill(15)) == [False] * PAGES


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"blocks_per_group": 48}, "blocks_per_group"),
        ({"block_per_group": 8}, "block_per_group"),
        ({"zero_copy": False, "blocks_per_group": 8}, "interface_v1"),
        ({"config": {"model_name": None}}, "model"),
    ],
)
def test_options_are_checked_by_name(ranks: Any, options: dict[str, Any], field: str) -> None:
    from p2pkv import ConfigError

    with pytest.raises(ConfigError, match=field):
        ranks(**options)


def test_clearing_leaves_what_others_stored(ranks: Any) -> None:
    rank, other, pages = ranks(), ranks(namespace="other"), hashes()
    for each in (rank, other):
        each.storage.batch_set_v1(pages, each.fill(16))
    rank.storage.clear()
    assert rank.storage.batch_exists(pages) == 0
    assert other.storage.batch_exists(pages) == PAGES


def test_the_statistics_are_those_that_sglang_collects(ranks: Any) -> None:
    rank, pages = ranks(), hashes()
    mine = rank.fill(17)
    rank.storage.batch_set_v1(pages, mine)
    rank.storage.batch_get_v1(pages, mine)
    stats = rank.storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([PAGES], [PAGES])
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert rank.storage.get_stats().backup_pgs == []


# -- SGLang's own backend for Mooncake


def test_sglangs_backend_for_mooncake_runs_on_p2pkv(cluster: Cluster) -> None:
    assert through_mooncake(cluster, "store") == {"before": 0, "done": PAGES}
    assert through_mooncake(cluster, "load") == {"before": PAGES, "done": PAGES, "equal": True}
    with cluster.client(timeout=20.0) as kv:
        assert len(list(kv.scan_keys("mc/default/tiny_"))) == 2 * PAGES, "keys and values"


def through_mooncake(cluster: Cluster, mode: str) -> dict[str, Any]:
    """What a process said that stored pages by SGLang's own backend, or loaded them."""
    where = [f"--etcd-endpoints={','.join(cluster.etcd.endpoints)}", f"--cluster={cluster.name}"]
    program = [sys.executable, str(HERE / "sglang_pages.py"), mode]
    done = subprocess.run(
        [sys.executable, "-m", "p2pkv.cli", "mooncake-shim", *where, "--", *program],
        env={**os.environ, **PATIENT, "PYTHONPATH": with_stand_ins()},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == 1, (done.stdout + done.stderr)[-5000:]
    answer: dict[str, Any] = json.loads(said[0].removeprefix("SAID "))
    return answer


PATIENT = {"P2PKV_LOOKUP_TIMEOUT_S": "2", "P2PKV_TRANSFER_TIMEOUT_S": "5"}


def with_stand_ins() -> str:
    """PYTHONPATH for a process that is to do without a GPU."""
    return os.pathsep.join([str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])])


# -- the engine


class Engine:
    """One process; what it said of two generations. Ends when closed."""

    def __init__(self, model: Path, cluster: Cluster | None, **options: Any) -> None:
        arguments: dict[str, Any] = {}
        if cluster is not None:
            where = {"etcd_endpoints": ",".join(cluster.etcd.endpoints), "cluster": cluster.name}
            extra = {
                "backend_name": "p2pkv", "module_path": "p2pkv.adapters.sglang",
                "class_name": "P2PKVStorage", "prefetch_threshold": 16,
                "p2pkv": {"cache": PATIENCE, **where}, **options,
            }  # fmt: skip
            arguments = {
                "enable_hierarchical_cache": True, "hicache_storage_backend": "dynamic",
                "hicache_io_backend": "direct", "hicache_ratio": 2.0,
                "hicache_mem_layout": "page_first_direct",
                "hicache_write_policy": "write_through",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps(extra),
            }  # fmt: skip
        environment = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "sglang_engine.py"), str(model), json.dumps(arguments)],
            env={**os.environ, **environment, "PYTHONPATH": with_stand_ins()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.said: list[dict[str, Any]] = []
        printed = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            printed.append(line)
            if line.startswith("SAID "):
                self.said.append(json.loads(line.removeprefix("SAID ")))
            if len(self.said) == 2:
                return
        raise AssertionError("the engine ended:\n" + "".join(printed)[-8000:])

    def close(self) -> None:
        try:
            self._process.communicate("\n", timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def stored(cluster: Cluster) -> dict[bytes, int]:
    with cluster.client(timeout=20.0) as kv:
        return dict(kv.scan_keys("kv:"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    make = [sys.executable, str(HERE / "tiny_model.py"), str(folder)]
    subprocess.run(make, check=True, env={**os.environ, "PYTHONPATH": str(STAND_INS)})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("zero_copy", [0, 1])
def test_an_engine_uses_what_another_process_computed(
    cluster: Cluster, model: Path, zero_copy: int
) -> None:
    first = Engine(model, cluster, interface_v1=zero_copy)
    whole = first.said[0]["prompt"] // PAGE - 1
    wait_for(lambda: len(stored(cluster)) >= whole, f"{whole} pages are not stored", 120.0)
    first.close()
    assert first.said[0]["cached"] == 0

    second = Engine(model, cluster, interface_v1=zero_copy)
    second.close()
    assert second.said[0]["tokens"] == first.said[0]["tokens"]
    assert second.said[0]["cached"] >= whole * PAGE
    assert second.said[0]["details"]["storage"] >= whole * PAGE

    with cluster.client(timeout=20.0) as kv:
        for key, size in stored(cluster).items():
            assert kv.delete(key)
            kv.put(key, bytes(size), write_once=True)
    third = Engine(model, cluster, interface_v1=zero_copy)
    third.close()
    assert third.said[0]["tokens"] != first.said[0]["tokens"], "the stored pages are not used"
