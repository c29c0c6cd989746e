"""Host pools of SGLang, and a program that stores or loads pages by its own backend for Mooncake.

    p2pkv mooncake-shim -- python sglang_pages.py store

with tests/engines/sglang_cpu on PYTHONPATH; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LAYERS, HEADS, WIDTH, PAGE, TOKENS = 2, 4, 16, 16, 512
PAGES = 24
MOONCAKE = {
    "master_server_address": "unused:1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
    "local_hostname": "localhost", "global_segment_size": 0, "check_server": False,
}  # fmt: skip


def host_pool(layout: str = "page_first", dtype: Any = None, heads: int = HEADS) -> Any:
    """SGLang's own host pool of keys and values, over device layers in host memory."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    dtype = dtype or torch.float32

    def layers() -> tuple[Any, ...]:
        shape = (TOKENS + PAGE, heads, WIDTH)
        return tuple(torch.zeros(shape, dtype=dtype) for _ in range(LAYERS))

    def addresses(tensors: Any) -> Any:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)

    k, v = layers(), layers()
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=addresses(k), v_data_ptrs=addresses(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=WIDTH, v_head_dim=WIDTH,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=TOKENS,
        start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def hashes(count: int = PAGES, start: int = 0) -> list[str]:
    """As SGLang makes them: chained SHA-256 over pages of tokens."""
    from sglang.srt.mem_cache.utils import get_hash_str

    whole: Any = get_hash_str(list(range(count * PAGE)), None, page_size=PAGE)
    return list(whole[start:])


def main(mode: str) -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    pool = host_pool()
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="tiny", extra_config=MOONCAKE,
    )  # fmt: skip
    storage = StorageBackendFactory.create_backend("mooncake", config, pool)
    storage.register_mem_pool_host(pool)
    indices = pool.alloc(PAGES * PAGE)
    torch.manual_seed(1)
    content = torch.rand(pool.kv_buffer.shape)
    said: dict[str, Any] = {"before": storage.batch_exists(hashes())}
    if mode == "store":
        pool.kv_buffer.copy_(content)
        said["done"] = sum(storage.batch_set_v1(hashes(), indices))
    else:
        pool.kv_buffer.zero_()
        said["done"] = sum(storage.batch_get_v1(hashes(), indices))
        loaded = [pool.get_data_page(int(i), flat=True).clone() for i in indices[::PAGE]]
        pool.kv_buffer.copy_(content)
        stored = [pool.get_data_page(int(i), flat=True) for i in indices[::PAGE]]
        said["equal"] = all(map(torch.equal, loaded, stored))
    print("SAID " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
