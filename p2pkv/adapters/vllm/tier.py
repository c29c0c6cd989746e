"""``P2PKVTier``: the store as a secondary tier of vLLM's tiering offload. Needs vLLM.

::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8589934592, "secondary_tiers": [
                {"type": "P2PKVTier", "module_path": "p2pkv.adapters.vllm"}]}}'
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from p2pkv.adapters.keys import BlockKeys, Fingerprint
from p2pkv.adapters.vllm.identity import announce
from p2pkv.adapters.vllm.options import Options, read
from p2pkv.adapters.vllm.plans import LOG
from p2pkv.adapters.vllm.tiering import Tiering
from p2pkv.errors import P2PKVError

log = logging.getLogger(LOG)


class P2PKVTier(SecondaryTierManager):
    """Options are those of the connector (docs/vllm.md), as far as they say anything here."""

    cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = read(options)
        made = tier_fingerprint(
            offloading_spec.config, self._block_size_bytes, current_platform.device_type, chosen
        )
        self._cache = chosen.open(log)
        announce(self._cache, made)
        keys = BlockKeys(made, 0, 1)
        self._tiering = Tiering(self._cache, primary_kv_view, keys, chosen.ttl_s)
        self._loads: dict[int, list[bytes]] = {}

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        there = self._tiering.lookup(key, req_context.req_id)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        rows = [int(row) for row in job_metadata.chunk_ids]
        self._tiering.store(job_metadata.job_id, list(job_metadata.keys), rows)

    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._loads[job_metadata.job_id] = keys
        rows = [int(row) for row in job_metadata.chunk_ids]
        self._tiering.load(job_metadata.job_id, keys, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for ended in self._tiering.take_ended():
            keys = self._loads.pop(ended.job, None)
            if keys is not None and not ended.whole:
                self._tiering.missed(set(keys).difference(ended.good))
            good: Collection[bytes] | None = ended.good if keys is not None else None
            results.append(
                JobResult(ended.job, ended.whole, good or None, ended.seconds, ended.size)
            )
        return results

    def has_pending_work(self) -> bool:
        return self._tiering.busy

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._tiering.finished(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._tiering.step_ended()

    def drain_jobs(self) -> None:
        self._tiering.drain()

    def shutdown(self) -> None:
        """Drop what waits, let end what is under way."""
        try:
            self._cache.close()
        except P2PKVError as e:
            log.warning("shutdown: %s", e)


def tier_fingerprint(config: Any, chunk_bytes: int, device: str, options: Options) -> Fingerprint:
    """That of an engine by its OffloadingConfig.

    vLLM says when the bytes of a chunk do not depend on how many ranks made them.
    """
    parallel = config.parallel
    one = parallel.is_parallelism_agnostic or config.replicated_layout
    groups = [(group.tokens_per_block, list(group.layer_names)) for group in config.groups]
    return Fingerprint(
        model=(options.model or config.model.name)[:512],
        dtype=str(config.model.dtype),
        block_tokens=config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        layout="vllm-tier",
        tensor_parallel=1 if one else parallel.tp_size,
        pipeline_parallel=1 if one else parallel.pp_size,
        context_parallel=1 if one else parallel.dcp_size * parallel.pcp_size,
        extra=(
            ("namespace", options.namespace),
            ("memory", f"{device},{config.kv_cache_layout},{config.canonical_layout}"),
            ("chunk_bytes", str(chunk_bytes)),
            ("groups", str(groups)),
        ),
    )


__all__ = ["P2PKVTier"]
