"""Lets SGLang run on a machine without a GPU, when this directory is on PYTHONPATH.

Everything that a storage backend has to do with is SGLang's own: radix tree, controller, threads,
host pools, scheduler. Stood in for are the copies between device and host pools, the allocation
of pinned memory, and the operators of torchvision that its wheel for CUDA defines.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

TORCHVISION = ("roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward",
               "roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward",
               "deform_conv2d", "_deform_conv2d_backward", "nms", "qnms")  # fmt: skip


def copy_tokens(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def layers_to_pages(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """From layers [tokens, ...], keys before values, to pages [pages, layers, page_size, ...]."""
    layers, pages = len(src_ptrs) // 2, dst_indices[::page_size] // page_size
    for half, target in enumerate(dst_ptrs):
        for layer in range(layers):
            tokens = src_ptrs[half * layers + layer][src_indices]
            target[pages, layer] = tokens.view(len(pages), page_size, *tokens.shape[1:])


def pages_to_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def stand_in_for_copies(module: Any) -> None:
    module.transfer_kv_direct = copy_tokens
    module.transfer_kv_all_layer_direct_lf_pf = layers_to_pages
    module.transfer_kv_per_layer_direct_pf_lf = pages_to_layer


def stand_in_for_pinned_memory(module: Any) -> None:
    import torch

    def allocate(dims: Any, dtype: Any, device: str, *_: Any, **__: Any) -> Any:
        return torch.zeros(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def never_pin(module: Any) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GB, of what small machines have
    base = module.HostKVCache
    initialise = base.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **{**kwargs, "pin_memory": False})

    base.__init__ = __init__


def define_operators() -> None:
    import torch

    for name in TORCHVISION:
        try:
            torch.library.define(f"torchvision::{name}", "(Tensor a) -> Tensor")
        except RuntimeError:
            return  # they are there


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.base": never_pin,
    "sglang.srt.mem_cache.pool_host.common": stand_in_for_pinned_memory,
    "sglang.srt.mem_cache.pool_host.mha": stand_in_for_copies,
}
BEFORE: dict[str, Callable[[], None]] = {"torchvision": define_operators}


class Finder(importlib.abc.MetaPathFinder):
    """Lets the changes follow, or go before, the execution of a module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if before := BEFORE.pop(name, None):
            before()
        change = AFTER.pop(name, None)
        if change is None or (spec := importlib.util.find_spec(name)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
