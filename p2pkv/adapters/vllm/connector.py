"""``P2PKVConnector``: the two halves, as vLLM wants them. Needs vLLM.

vLLM makes one object in the scheduler's process and one in each worker's. The memory of the
engine is known to the workers alone, so they say how it looks (the "handshake" of vLLM) before
anything is loaded or saved; keys, and so everything else, depend on it.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from p2pkv import clock
from p2pkv.adapters.vllm.identity import announce, fingerprint
from p2pkv.adapters.vllm.lookups import Lookups
from p2pkv.adapters.vllm.metrics import PromMetrics, Stats
from p2pkv.adapters.vllm.options import Options, read
from p2pkv.adapters.vllm.pages import TorchPages, pages_of
from p2pkv.adapters.vllm.pins import Pins
from p2pkv.adapters.vllm.plans import LOG, SavesDone, StepPlan, WorkerFacts
from p2pkv.adapters.vllm.scheduling import Scheduling
from p2pkv.adapters.vllm.tally import Tally
from p2pkv.adapters.vllm.working import Working
from p2pkv.errors import ConfigError, P2PKVError

log = logging.getLogger(LOG)

SETTLE_TIMEOUT_S = 30.0
"""Every transfer has a shorter deadline of its own."""


class Plan(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    def __init__(self, step: StepPlan) -> None:
        self.step = step


class Handshake(KVConnectorHandshakeMetadata):
    """A worker's facts on their way to the scheduler."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts


class P2PKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Blocks of vLLM in a p2pkv cluster. See docs/vllm.md for its options.

    Raises ConfigError for options that are wrong, and for models and devices whose blocks cannot
    be shared. A cluster that cannot be reached is no error: everything is a miss then.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: Options = read(transfer.kv_connector_extra_config)
        check_cacheable(kv_cache_config)
        self._tally = Tally()
        self._cache = self._options.open(log)
        self._working: Working | None = None
        self._facts: WorkerFacts | None = None
        self._pool: Any = None
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        if block_tokens != hash_tokens:
            raise ConfigError(f"blocks of {block_tokens} tokens are hashed by {hash_tokens}")
        self._block_tokens: int = block_tokens
        lookups = Lookups(self._cache, self._options.lookup_wait_s, self._tally)
        self._scheduling = Scheduling(
            lookups,
            self._options,
            block_tokens,
            writes=transfer.is_kv_producer,
            hands_over=transfer.is_kv_producer and not transfer.is_kv_consumer,
        )
        self._scheduling.refused = _refused
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                'kv_load_failure_policy is not "recompute": a failed load fails its request'
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, and nothing else."""
        return False

    # -- the scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Handshake]) -> None:
        facts = [handshake.facts for handshake in metadata.values()]
        made = fingerprint(
            self._vllm_config, self._block_tokens, facts, DEFAULT_NONE_HASH_SEED, self._options
        )
        announce(self._cache, made)
        pins = Pins(self._pool, len(facts), self._options.saving_share_max)
        self._scheduling.begin(made, [fact.rank for fact in facts], pins)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduling.matched(request, num_computed_tokens, clock.monotonic())
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request: str) -> list[int] | None:
            tables = state.get_block_ids(request)
            return tables[0] if tables else None

        return Plan(self._scheduling.plan(scheduler_output.num_scheduled_tokens, blocks_of))

    def update_connector_output(self, connector_output: Any) -> None:
        saved = connector_output.kv_connector_worker_meta
        counts = saved.counts if isinstance(saved, SavesDone) else {}
        self._scheduling.arrived(connector_output.invalid_block_ids or (), counts)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.finished(request)

    def has_pending_push_work(self) -> bool:
        """The engine goes on stepping until it has its blocks back."""
        return self._scheduling.busy

    def reset_cache(self) -> bool:
        """Delete what engines with this fingerprint have saved, as after a change of weights."""
        prefix = self._scheduling.prefix
        try:
            if prefix:
                self._cache.client.delete_range(prefix)
        except P2PKVError as e:
            log.warning("the cache was not reset: %s", e)
            return False
        return True

    # -- the worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config = self._kv_cache_config
        group = config.kv_cache_groups[0]
        pages = pages_of(kv_caches, group.layer_names, config.num_blocks, _page_bytes(group))
        replicas = int(getattr(config, "kv_tp_replicas", 1))
        parallel = self._vllm_config.parallel_config
        rank = parallel.rank % parallel.world_size
        layout = self._layout(kv_caches, group, pages)
        self._facts = WorkerFacts(rank // replicas, pages.block_bytes, layout)
        self._working = Working(
            self._cache, pages, rank // replicas, self._options, self._tally,
            writer=rank % replicas == 0,
        )  # fmt: skip

    def _layout(self, kv_caches: dict[str, Any], group: Any, pages: TorchPages) -> str:
        """All that tells how bytes lie in a block, as far as vLLM knows it."""
        layers = self._vllm_config.compilation_config.static_forward_context
        name = group.layer_names[0]
        cache, layer = kv_caches[name], layers.get(name)
        backend = layer.get_attn_backend().get_name() if layer is not None else ""
        facts = [
            pages.device.type,
            str(getattr(self._kv_cache_config, "kv_cache_layout", "")),
            f"{backend}/{getattr(layer, 'isa', '')}",
            f"{tuple(cache.shape[1:])}/{cache.stride()[1:]}/{cache.dtype}",
            f"{len(group.layer_names)}x{pages.block_bytes}",
        ]
        if pages.device.type == "cpu":
            facts.append(f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}")
        return ",".join(facts)

    def unregister_kv_caches(self) -> None:
        """Before the engine sleeps (vLLM 0.33): nothing touches its memory from here on."""
        if self._working is not None and not self._working.settle(SETTLE_TIMEOUT_S):
            log.warning("transfers are under way %s s after vLLM went to sleep", SETTLE_TIMEOUT_S)

    def restore_kv_caches(self) -> None:
        """Nothing: the memory is where it was, and what is saved of it lies in host memory."""

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake(self._facts) if self._facts is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._working is not None:
            self._working.start_loads(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests are scheduled when they are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        if self._working is not None:
            self._working.start_saves(self._get_connector_metadata().step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._working.take_finished() if self._working is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_failed() if self._working is not None else set()

    def build_connector_worker_meta(self) -> SavesDone | None:
        return self._working.take_saved() if self._working is not None else None

    # -- both

    def get_kv_connector_stats(self) -> Stats | None:
        dropped = self._scheduling.take_dropped()
        if dropped:
            self._tally.add(save_failed_blocks=dropped)
        counts = self._tally.take()
        return Stats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let saves end, for a while; disconnect."""
        if self._working is not None:
            self._working.close(self._options.shutdown_timeout_s)
        try:
            self._cache.close()
        except P2PKVError as e:
            log.warning("shutdown: %s", e)


def check_cacheable(config: Any) -> None:
    """Whether all of a model's state is in blocks that can be found by hash.

    Raises ConfigError.
    """
    groups = config.kv_cache_groups
    if len(groups) != 1 or tuple(config.prefix_cacheable_group_ids) != (0,):
        raise ConfigError(
            f"the model has {len(groups)} groups of layers with caches of different kinds; p2pkv "
            "saves one: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    kinds = (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
    other = {type(kind).__name__ for kind in kinds if not isinstance(kind, FullAttentionSpec)}
    if other:
        raise ConfigError(
            f"the model has a cache of kind {', '.join(sorted(other))}; p2pkv saves full "
            "attention: start vLLM with --disable-hybrid-kv-cache-manager"
        )


def _page_bytes(group: Any) -> dict[str, int]:
    """Bytes of a block in each layer."""
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return {name: int(specs.get(name, spec).page_size_bytes) for name in group.layer_names}


def _refused(request: str, digest: str) -> None:
    log.warning(
        "request %s was prefilled by an engine with fingerprint %s, which differs from this one's: "
        "nothing of it is loaded", request, digest,
    )  # fmt: skip


__all__ = ["P2PKVConnector"]
