"""The parts of vLLM's connector that need neither vLLM nor a node."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from vllmside import BLOCK, FINGERPRINT, Memory, Request, chain, request

from p2pkv.adapters.cache import CacheConfig
from p2pkv.adapters.keys import BlockKeys, Fingerprint
from p2pkv.adapters.vllm.identity import check_same, fingerprint, others_of_model
from p2pkv.adapters.vllm.lookups import Lookups
from p2pkv.adapters.vllm.options import Options, read
from p2pkv.adapters.vllm.pins import Pins
from p2pkv.adapters.vllm.plans import SavesDone, StepPlan, Transfer, WorkerFacts, runs_of
from p2pkv.adapters.vllm.scheduling import BLOCKS_PARAM, FINGERPRINT_PARAM, Scheduling
from p2pkv.adapters.vllm.tally import COUNTS, Tally
from p2pkv.adapters.vllm.working import Working
from p2pkv.clock import SECOND_NS
from p2pkv.errors import ConfigError, Unreachable

OPTIONS = Options(blocks_per_group=2, saving_share_max=0.5)


# -- a store of which the answers are known


class Store:
    """Stands for a Cache: answers at once, from a set of keys."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.values: dict[bytes, bytes] = dict.fromkeys(keys, b"")
        self.config = CacheConfig(threads=1)
        self.asked = 0
        self.down = False
        self.late: list[Callable[[], None]] | None = None
        """If a list: answers wait there."""
        self.slow = threading.Lock()
        """Transfers wait for whoever holds it."""

    def submit_exists(
        self, keys: list[bytes], done: Callable[[list[Any]], None], *, request: str
    ) -> bool:
        self.asked += 1

        def answer() -> None:
            done([Unreachable() if self.down else key in self.values for key in keys])

        answer() if self.late is None else self.late.append(answer)
        return True

    def finished(self, request: str) -> None: ...

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[Any]:
        outcomes: list[Any] = []
        self._wait()
        for key, row in zip(keys, rows, strict=True):
            value = None if self.down else self.values.get(key)
            if value is not None:
                row[: len(value)] = value
            outcomes.append(Unreachable() if self.down else value and len(value))
        return outcomes

    def store(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], *, ttl: float | None,
        write_once: bool,
    ) -> list[Any]:  # fmt: skip
        assert write_once
        self._wait()
        if self.down:
            return [Unreachable()] * len(keys)
        self.values |= {key: bytes(row) for key, row in zip(keys, rows, strict=True)}
        return [1] * len(keys)

    def _wait(self) -> None:
        assert self.slow.acquire(timeout=60)
        self.slow.release()


class Pool:
    """Stands for the engine's pool: counts who holds each block."""

    def __init__(self, size: int) -> None:
        self.blocks = list(range(size))
        self.held = [0] * size

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.held[block] += 1

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        for block in ordered_blocks:
            self.held[block] -= 1


class Bench:
    """The scheduler's half, in front of a store with the first ``stored`` blocks of a sequence."""

    def __init__(
        self, stored: int = 0, ranks: int = 1, pool: int = 64, options: Options = OPTIONS,
        **roles: bool,
    ) -> None:  # fmt: skip
        keys = [BlockKeys(FINGERPRINT, rank, 2) for rank in range(ranks)]
        self.store = Store(key for k in keys for key in k.of(chain(stored)))
        self.pool = Pool(pool)
        lookups = Lookups(self.store, 0.0, Tally())  # type: ignore[arg-type]
        self.scheduling = Scheduling(lookups, options, BLOCK, **roles)
        self.scheduling.begin(FINGERPRINT, range(ranks), Pins(self.pool, ranks, 0.5))
        self.now = 0

    def matched(self, request: Request, own_blocks: int = 0) -> int | None:
        return self.scheduling.matched(request, own_blocks * BLOCK, self.now)

    def admit(self, request: Request, own_blocks: int = 0) -> StepPlan:
        """The request gets the blocks 10, 11, … and is loaded, if there is anything to load."""
        tokens = self.matched(request, own_blocks)
        assert tokens is not None
        self.scheduling.allocated(request, self.table(request), tokens)
        request.num_computed_tokens = own_blocks * BLOCK + tokens
        return self.scheduling.plan({}, self.blocks_of(request))

    def compute(self, request: Request, tokens: int) -> list[Transfer]:
        """What is saved in a step that computes so many tokens."""
        plan = self.scheduling.plan({request.request_id: tokens}, self.blocks_of(request))
        request.num_computed_tokens += tokens
        return plan.saves

    @staticmethod
    def table(request: Request) -> list[int]:
        return [10 + i for i in range(-(-request.num_tokens // BLOCK))]

    def blocks_of(self, request: Request) -> Callable[[str], list[int]]:
        return lambda _: self.table(request)


def hashes(transfers: list[Transfer]) -> list[bytes]:
    return [h for t in transfers for run in t.runs for h in run.hashes]


# -- plans


def test_blocks_are_named_by_runs_that_begin_at_multiples_of_the_group() -> None:
    blocks = [10, 11, 12, 13, 14]
    names = chain(5)
    runs = runs_of(names, blocks, 1, 5, 2)
    assert [run.first for run in runs] == [names[0], names[2], names[4]]
    assert [run.hashes for run in runs] == [names[1:2], names[2:4], names[4:]]
    assert [run.blocks for run in runs] == [[11], [12, 13], [14]]


def test_the_keys_of_runs_are_those_of_the_sequence() -> None:
    keys = BlockKeys(FINGERPRINT, 3, 2)
    names = chain(7)
    runs = runs_of(names, range(7), 3, 7, 2)
    assert [k for run in runs for k in keys.of_group(run.first, run.hashes)] == keys.of(names, 3, 7)


def test_plans_travel_between_processes() -> None:
    plan = StepPlan(FINGERPRINT, [Transfer(1, "r", runs_of(chain(3), [5, 6, 7], 0, 3, 2))], [])
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(SavesDone({1: 2}))).counts == {1: 2}


def test_saves_of_several_workers_add_up() -> None:
    assert SavesDone({1: 1, 2: 1}).aggregate(SavesDone({1: 1})).counts == {1: 2, 2: 1}


# -- loads


def test_blocks_in_the_store_are_loaded_and_the_rest_is_computed() -> None:
    bench = Bench(stored=3)
    r = request(20)
    (load,) = bench.admit(r).loads
    assert load.blocks == [10, 11, 12]
    assert hashes([load]) == chain(5)[:3]


def test_the_last_token_is_computed_even_if_all_blocks_are_there() -> None:
    bench = Bench(stored=5)
    assert bench.matched(request(20)) == 16
    assert bench.matched(request(21, request_id="s")) == 20


def test_blocks_that_the_engine_has_are_not_loaded() -> None:
    bench = Bench(stored=3)
    (load,) = bench.admit(request(20), own_blocks=2).loads
    assert load.blocks == [12]


def test_nothing_is_loaded_where_the_engine_has_more_than_the_store() -> None:
    bench = Bench(stored=2)
    assert bench.matched(request(20), own_blocks=3) == 0


def test_all_ranks_must_have_a_block() -> None:
    bench = Bench(stored=3, ranks=2)
    second = BlockKeys(FINGERPRINT, 1, 2).of(chain(3))[1]
    del bench.store.values[second]
    assert bench.matched(request(20)) == BLOCK


def test_short_hits_can_be_left_to_the_engine() -> None:
    bench = Bench(stored=2, options=Options(blocks_per_group=2, load_blocks_min=3))
    assert bench.matched(request(20)) == 0


def test_a_lookup_is_asked_for_again_until_it_is_answered() -> None:
    bench = Bench(stored=3)
    bench.store.late = []
    r = request(20)
    assert bench.matched(r) is None
    assert bench.matched(r) is None
    bench.store.late[0]()
    assert bench.matched(r) == 12
    assert bench.store.asked == 1


def test_a_store_that_does_not_answer_is_a_miss() -> None:
    bench = Bench(stored=3)
    bench.store.down = True
    assert bench.matched(request(20)) == 0


def test_a_load_is_tried_once_and_again_after_a_preemption() -> None:
    bench = Bench(stored=3)
    r = request(20)
    assert bench.admit(r).loads
    r.num_computed_tokens = 0  # it failed from its first block on
    assert bench.matched(r) == 0
    r.num_preemptions = 1
    assert bench.matched(r) == 12


def test_nothing_is_done_before_the_workers_are_known() -> None:
    lookups = Lookups(Store(), 0.0, Tally())  # type: ignore[arg-type]
    scheduling = Scheduling(lookups, OPTIONS, BLOCK)
    r = request(20)
    assert scheduling.matched(r, 0, 0) == 0
    scheduling.allocated(r, [1, 2, 3, 4, 5], 0)
    assert scheduling.plan({"r": 20}, lambda _: [1, 2, 3, 4, 5]) == StepPlan(None, [], [])


# -- saves


def test_blocks_are_saved_in_the_step_that_fills_them() -> None:
    bench = Bench()
    r = request(10)
    assert bench.admit(r).loads == []
    assert hashes(bench.compute(r, 7)) == chain(1)
    assert hashes(bench.compute(r, 3)) == chain(2)[1:]
    assert bench.compute(r, 1) == []


def test_blocks_of_generated_tokens_are_saved_as_well_if_wanted() -> None:
    for wanted in (True, False):
        bench = Bench(options=Options(blocks_per_group=2, save_generated=wanted))
        r = request(7)
        bench.admit(r)
        bench.compute(r, 7)
        r.num_tokens, r.block_hashes = 8, chain(2)
        assert hashes(bench.compute(r, 1)) == (chain(2)[1:] if wanted else [])


def test_blocks_that_were_loaded_are_not_saved() -> None:
    bench = Bench(stored=3)
    r = request(20)
    bench.admit(r)
    bench.scheduling.allocated(r, bench.table(r), 0)  # as vLLM does after the load
    assert hashes(bench.compute(r, 8)) == chain(5)[3:]


def test_blocks_that_the_store_has_lost_are_saved_again() -> None:
    bench = Bench(stored=1)
    r = request(20)
    bench.admit(r, own_blocks=3)
    assert hashes(bench.compute(r, 8)) == chain(5)[1:]


def test_nothing_is_saved_twice_if_the_store_does_not_answer() -> None:
    bench = Bench()
    bench.store.down = True
    r = request(20)
    bench.admit(r, own_blocks=3)
    assert hashes(bench.compute(r, 8)) == chain(5)[3:]


def test_blocks_whose_load_failed_are_saved_when_they_are_computed() -> None:
    bench = Bench(stored=3)
    r = request(20)
    bench.admit(r)
    bench.scheduling.arrived({11, 12}, {})
    r.num_computed_tokens = BLOCK
    bench.scheduling.allocated(r, bench.table(r), 0)
    assert hashes(bench.compute(r, 16)) == chain(5)[1:]


def test_blocks_are_held_until_all_workers_have_saved_them() -> None:
    bench = Bench(ranks=2)
    r = request(10)
    bench.admit(r)
    (save,) = bench.compute(r, 10)
    assert [bench.pool.held[block] for block in (10, 11, 12)] == [1, 1, 0]
    assert bench.scheduling.busy
    bench.scheduling.arrived((), {save.job: 1})
    assert bench.pool.held[10] == 1
    bench.scheduling.arrived((), {save.job: 1})
    assert bench.pool.held[10] == 0
    assert not bench.scheduling.busy
    bench.scheduling.arrived((), {save.job: 1})  # told once too often
    assert bench.pool.held[10] == 0


def test_a_block_that_is_being_saved_is_not_saved_for_another_request() -> None:
    bench = Bench()
    first, second = request(10, request_id="a"), request(14, request_id="b")
    bench.admit(first)
    bench.admit(second)
    assert hashes(bench.compute(first, 10)) == chain(2)
    assert hashes(bench.compute(second, 14)) == chain(3)[2:]


def test_saves_that_find_no_room_are_dropped_and_counted() -> None:
    bench = Bench(pool=20)  # of which 10 may be held
    r = request(60)
    bench.admit(r)
    bench.table = lambda _: list(range(15))  # type: ignore[method-assign]
    (save,) = bench.compute(r, 60)
    assert save.blocks == list(range(10))
    assert bench.scheduling.take_dropped() == 5
    assert bench.scheduling.take_dropped() == 0


def test_what_is_held_stays_held_if_the_workers_are_told_again() -> None:
    bench = Bench()
    r = request(10)
    bench.admit(r)
    (save,) = bench.compute(r, 10)
    bench.scheduling.begin(FINGERPRINT, [0], Pins(bench.pool, 1, 0.5))
    assert bench.scheduling.busy
    bench.scheduling.arrived((), {save.job: 1})
    assert bench.pool.held[10] == 0


def test_a_consumer_saves_nothing() -> None:
    bench = Bench(writes=False)
    r = request(10)
    bench.admit(r)
    assert bench.compute(r, 10) == []


# -- from a producer to a consumer


def test_a_producer_tells_what_its_consumer_will_find() -> None:
    bench = Bench(hands_over=True)
    r = request(10)
    bench.admit(r)
    bench.compute(r, 10)
    told = bench.scheduling.finished(r)
    assert told == {FINGERPRINT_PARAM: FINGERPRINT.digest(), BLOCKS_PARAM: 2}
    assert Bench().scheduling.finished(request(10)) is None


def handed_over(blocks: Any, digest: str = "") -> dict[str, Any]:
    return {FINGERPRINT_PARAM: digest or FINGERPRINT.digest(), BLOCKS_PARAM: blocks}


def test_a_consumer_waits_for_blocks_that_are_being_saved() -> None:
    bench = Bench(stored=1)
    r = request(20, kv_transfer_params=handed_over(3))
    assert bench.matched(r) is None
    bench.store.values |= dict.fromkeys(BlockKeys(FINGERPRINT, 0, 2).of(chain(3)), b"")
    assert bench.matched(r) is None  # it does not ask at every step
    bench.now += SECOND_NS // 10
    assert bench.matched(r) is None
    assert bench.matched(r) == 12


def test_a_consumer_does_not_wait_for_ever() -> None:
    bench = Bench(stored=1)
    r = request(20, kv_transfer_params=handed_over(3))
    asked = 0
    while bench.matched(r) is None:
        asked += 1
        bench.now += SECOND_NS // 100
    assert bench.now == round(OPTIONS.handover_timeout_s * SECOND_NS)
    assert bench.store.asked < asked / 4  # with growing pauses
    assert bench.matched(r) == 4


def test_a_consumer_does_not_wait_for_a_store_that_is_down() -> None:
    bench = Bench()
    bench.store.down = True
    assert bench.matched(request(20, kv_transfer_params=handed_over(3))) == 0


@pytest.mark.parametrize("blocks", [None, "many", -1, 1 << 70])
def test_what_a_request_says_is_not_trusted(blocks: Any) -> None:
    bench = Bench(stored=4)
    assert bench.matched(request(20, kv_transfer_params=handed_over(blocks))) == 16


def test_blocks_of_a_producer_with_another_fingerprint_are_refused() -> None:
    bench = Bench(stored=3)
    told: list[tuple[str, str]] = []
    bench.scheduling.refused = lambda request, digest: told.append((request, digest))
    assert bench.matched(request(20, kv_transfer_params=handed_over(3, "other"))) == 0
    assert told == [("r", "other")]


# -- who may share


def engine(**changes: Any) -> Any:
    """What of a VllmConfig matters."""

    class Fields:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    def part(**fields: Any) -> Fields:
        return Fields(**{name: changes.get(name, value) for name, value in fields.items()})

    return Fields(
        model_config=part(model="llama", revision=None, dtype="bfloat16", quantization=None),
        parallel_config=part(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=part(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
    )  # fmt: skip


FACTS = [WorkerFacts(0, 4096, "cpu,LBHNC")]


def made(options: Options = OPTIONS, seed: str = "s", facts: Any = FACTS, tokens: int = 16,
         **changes: Any) -> Fingerprint:  # fmt: skip
    return fingerprint(engine(**changes), tokens, facts, seed, options)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "qwen"}, {"revision": "v2"}, {"dtype": "float16"}, {"quantization": "fp8"},
        {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"cache_dtype": "fp8"},
        {"decode_context_parallel_size": 2}, {"prefix_caching_hash_algo": "sha256_cbor"},
        {"seed": "t"}, {"tokens": 32}, {"facts": [WorkerFacts(0, 4096, "cuda,LBHNC")]},
        {"options": Options(namespace="n")}, {"options": Options(model="m")},
    ],
    ids=str,
)  # fmt: skip
def test_engines_that_differ_do_not_share(other: dict[str, Any]) -> None:
    assert made().digest() == made().digest()
    assert made(**other).digest() != made().digest()


def test_the_same_model_under_another_path_can_be_named() -> None:
    options = Options(model="llama-3")
    assert made(options, model="/a/llama").digest() == made(options, model="/b/llama").digest()


def test_the_hash_seed_is_the_one_that_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert made().hash_seed == "sha256:s"
    assert made(prefix_caching_hash_algo="xxhash").hash_seed == "xxhash:random"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert made().hash_seed == "sha256:7"
    assert made(prefix_caching_hash_algo="xxhash").hash_seed == "xxhash:7"


def test_a_demanded_fingerprint_is_checked() -> None:
    good = made().digest()
    assert made(Options(fingerprint=good)).digest() == good
    with pytest.raises(ConfigError, match=rf"fingerprint = '0123'.*{good}"):
        made(Options(fingerprint="0123"))


def test_what_keeps_engines_of_one_model_apart_is_told() -> None:
    mine, half, other = made(), made(dtype="float16"), made(model="qwen")
    records = {f.digest(): f for f in (mine, half, other)}
    (line,) = others_of_model(mine, records)
    assert half.digest() in line
    assert "dtype: 'bfloat16/auto', not 'float16/auto'" in line


def test_a_digest_that_another_engine_has_is_refused() -> None:
    check_same(made(), None)
    check_same(made(), made())
    with pytest.raises(ConfigError, match="model"):
        check_same(made(), made(model="qwen"))


# -- options


def test_options_are_checked_by_name() -> None:
    assert read({"cluster": "c", "save_generated": "false"}).save_generated is False
    with pytest.raises(ConfigError, match="blocks_per_group"):
        read({"blocks_per_group": 0})
    with pytest.raises(ConfigError, match="clustr"):
        read({"clustr": "c"})
    with pytest.raises(ConfigError, match="lookup_timeout_s"):
        read({"cache": {"lookup_timeout_s": -1}}).cache_config()


def test_the_cache_has_what_the_environment_and_the_options_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("P2PKV_LOOKUP_TIMEOUT_S", "0.5")
    monkeypatch.setenv("P2PKV_TRANSFER_TIMEOUT_S", "0.5")
    config = read({"cache": {"transfer_timeout_s": 2}}).cache_config()
    assert (config.lookup_timeout_s, config.transfer_timeout_s) == (0.5, 2.0)


# -- the worker's half

PLANNED = Transfer(7, "r", runs_of(chain(5), [1, 2, 3, 4, 5], 0, 5, 2))
VALUES = {block: bytes([block]) * 8 for block in PLANNED.blocks}
KEYS = BlockKeys(FINGERPRINT, 0, 2).of(chain(5))


class Worker:
    """The worker's half, with room for two blocks in each buffer."""

    def __init__(self, store: Store, blocks: dict[int, bytes], **options: Any) -> None:
        self.memory = Memory(dict(blocks))
        self.tally = Tally()
        settings = Options(blocks_per_group=2, staging_bytes=2 * 2 * Memory.block_bytes)
        self.half = Working(store, self.memory, 0, settings, self.tally, **options)  # type: ignore[arg-type]

    def save(self) -> None:
        self.half.start_saves(StepPlan(FINGERPRINT, [], [PLANNED]))
        assert self.half.flush(10)

    def load(self) -> set[int]:
        """The blocks that failed."""
        self.half.start_loads(StepPlan(FINGERPRINT, [PLANNED], []))
        assert self.half._loads.idle(10)
        assert self.half.take_finished() == {"r"}
        return self.half.take_failed()


def test_what_one_worker_saves_another_loads() -> None:
    store = Store()
    writer, reader = Worker(store, VALUES), Worker(store, {})
    writer.save()
    done = writer.half.take_saved()
    assert done is not None
    assert done.counts == {7: 1}
    assert writer.half.take_saved() is None
    assert list(store.values) == KEYS
    assert reader.load() == set()
    assert reader.memory.blocks == VALUES
    saved, loaded = writer.tally.take(), reader.tally.take()
    assert saved.keys() | loaded.keys() < COUNTS.keys()
    assert (saved["saved_blocks"], saved["saved_bytes"]) == (5, 40)
    assert (loaded["loaded_blocks"], loaded["loaded_bytes"]) == (5, 40)


@pytest.mark.parametrize("value", [None, b"short"])
def test_a_block_that_does_not_come_whole_fails_with_all_behind_it(value: bytes | None) -> None:
    store = Store()
    Worker(store, VALUES).save()
    store.values[KEYS[2]] = value  # type: ignore[assignment]
    reader = Worker(store, {})
    assert reader.load() == {3, 4, 5}
    assert reader.memory.blocks == {1: VALUES[1], 2: VALUES[2]}
    assert reader.tally.take()["load_failed_blocks"] == 3


def test_a_store_that_is_down_fails_loads_and_ends_saves() -> None:
    store = Store()
    store.down = True
    worker = Worker(store, VALUES)
    assert worker.load() == set(PLANNED.blocks)
    worker.save()
    assert worker.half.take_saved() is not None
    assert worker.tally.take()["save_failed_blocks"] == 5


def test_the_engine_hears_of_every_transfer_even_if_its_memory_fails() -> None:
    store = Store()
    Worker(store, VALUES).save()
    worker = Worker(store, VALUES)
    worker.memory.broken = True
    assert worker.load() == set(PLANNED.blocks)
    worker.save()
    assert worker.half.take_saved() is not None


def test_a_worker_with_the_bytes_of_another_saves_nothing() -> None:
    store = Store()
    worker = Worker(store, VALUES, writer=False)
    worker.save()
    assert store.values == {}
    done = worker.half.take_saved()
    assert done is not None
    assert done.counts == {7: 1}


def test_an_engine_that_sleeps_waits_for_loads_and_saves() -> None:
    for plan in (StepPlan(FINGERPRINT, [PLANNED], []), StepPlan(FINGERPRINT, [], [PLANNED])):
        store = Store()
        worker = Worker(store, VALUES)
        with store.slow:
            worker.half.start_loads(plan)
            worker.half.start_saves(plan)
            assert not worker.half.settle(0.05)
        assert worker.half.settle(10)


def test_a_worker_that_is_closed_ends_what_comes_at_once() -> None:
    worker = Worker(Store(), VALUES)
    worker.half.close(10)
    assert worker.load() == set(PLANNED.blocks)
    worker.save()
    assert worker.half.take_saved() is not None


def test_the_package_is_there_without_vllm_and_the_connector_only_with_it() -> None:
    import p2pkv.adapters.vllm as package

    with pytest.raises(AttributeError, match="P2PKVConector"):
        package.P2PKVConector  # noqa: B018
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError):
            package.P2PKVConnector  # noqa: B018
