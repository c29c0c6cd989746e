"""What p2pkv did, by vLLM's own hooks: a line in its log, and metrics of its /metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from p2pkv.adapters.vllm.tally import COUNTS


class Stats(KVConnectorStats):
    """Counts of COUNTS in ``data``; those of workers and scheduler add up."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        counts: dict[str, int | float] = {name: round(self.data[name], 4) for name in self.data}
        for what, size in (("load", "loaded_bytes"), ("save", "saved_bytes")):
            seconds = self.data.get(f"{what}_seconds", 0)
            if seconds:
                counts[f"{what}_gb_per_s"] = round(self.data.get(size, 0) / seconds / 1e9, 3)
        return counts

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """A counter ``vllm:p2pkv_<name>`` for each of COUNTS."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {
            name: counter(
                name=f"vllm:p2pkv_{name}", documentation=f"p2pkv: {text}.", labelnames=labelnames
            )
            for name, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(count)
