"""An LMCache engine in a process of its own: ``store`` or ``load`` of one sequence's KV cache.

Run as a program; prints one line of JSON. Everything is LMCache's but the copy between "GPU" and
memory objects, which here is one between host tensors.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, CHUNK, HEADS, DIMENSION, TOKENS = 2, 32, 2, 16, 100
STORED_TIMEOUT_S = 20.0


class HostConnector(GPUConnectorInterface):
    """Between a tensor [layers, 2, tokens, width] and memory objects."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        memory_obj.tensor.copy_(self.kv[:, :, start:end].transpose(0, 1))
        memory_obj.metadata.fmt = MemoryFormat.KV_2LTD

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        self.kv[:, :, start:end] = memory_obj.tensor.transpose(0, 1)

    def batched_from_gpu(self, objects: Any, starts: Any, ends: Any, **_: Any) -> None:
        for each in zip(objects, starts, ends, strict=True):
            self.from_gpu(*each)

    def batched_to_gpu(self, objects: Any, starts: Any, ends: Any, **_: Any) -> None:
        for each in zip(objects, starts, ends, strict=True):
            self.to_gpu(*each)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, HEADS * DIMENSION])


def engine_of(kv: torch.Tensor, extra: dict[str, Any], **changes: Any) -> Any:
    config = LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": 0.1,
            "save_unfull_chunk": True,
            "remote_serde": "naive",
            "remote_storage_plugins": ["p2pkv"],
            "extra_config": {
                "remote_storage_plugin.p2pkv.module_path": "p2pkv.adapters.lmcache",
                "remote_storage_plugin.p2pkv.class_name": "P2PKVConnectorAdapter",
                **extra,
            },
            **changes,
        }
    )
    metadata = LMCacheMetadata(
        model_name="tiny",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(LAYERS, 2, CHUNK, HEADS, DIMENSION),
        chunk_size=CHUNK,
    )
    engine = LMCacheEngineBuilder.get_or_create(
        "p2pkv-test", config, metadata, HostConnector(kv), mock_up_broadcast_fn,
        mock_up_broadcast_object_fn,
    )  # fmt: skip
    engine.post_init()
    return engine


def wait_stored(engine: Any, tokens: list[int]) -> int:
    """How many tokens are found, once it is all of them, or the time is over."""
    deadline = time.monotonic() + STORED_TIMEOUT_S
    while (found := engine.lookup(tokens)) < len(tokens) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(found)


def main(mode: str, extra: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    truth = torch.rand(LAYERS, 2, TOKENS, HEADS * DIMENSION)
    kv = truth.clone() if mode == "store" else torch.zeros_like(truth)
    tokens = list(range(1000, 1000 + TOKENS))
    engine = engine_of(kv, extra, **changes)
    before = engine.lookup(tokens)
    begin = time.perf_counter()
    if mode == "store":
        engine.store(tokens=torch.tensor(tokens))
        said = {"before": before, "found": wait_stored(engine, tokens)}
    else:
        here = int(engine.retrieve(torch.tensor(tokens)).sum())
        equal = torch.equal(kv[:, :, :here], truth[:, :, :here])
        said = {"before": before, "loaded": here, "equal": equal}
    said["seconds"] = time.perf_counter() - begin
    LMCacheEngineBuilder.destroy("p2pkv-test")
    return said


if __name__ == "__main__":
    print("SAID " + json.dumps(main(sys.argv[1], *map(json.loads, sys.argv[2:4]))), flush=True)
