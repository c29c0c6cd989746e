"""A vLLM engine in a process of its own: orders come in by lines of JSON, answers go out by lines.

    python vllm_engine.py '{"model": "folder", "transfer": {...}, ...}'

An order is ``{"prompts": [...]}``, with ``tokens`` and ``params`` (kv_transfer_params) if need be,
``{"reset": true}`` to forget the engine's own prefix cache, or ``{"metrics": true}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

MARK = "ANSWER "
BLOCK_TOKENS = 32


def engine(options: dict[str, Any]) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": options["model"], "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 4,
        "dtype": options.get("dtype", "float32"), "block_size": BLOCK_TOKENS, "seed": 0,
        "disable_log_stats": False, "tensor_parallel_size": options.get("ranks", 1),
    }  # fmt: skip
    if arguments["tensor_parallel_size"] == 1:
        arguments["distributed_executor_backend"] = "uni"
    if transfer := options.get("transfer"):
        ours = {"kv_connector": "P2PKVConnector", "kv_connector_module_path": "p2pkv.adapters.vllm"}
        arguments["kv_transfer_config"] = {
            **({} if "kv_connector" in transfer else ours),
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            **transfer,
        }
    return LLM(**arguments)


def make_llvmlite_plain() -> None:
    """vLLM 0.32 on a CPU asks whatever loaded modules hold for its ``__dict__``. That of llvmlite,
    which comes with LMCache, takes it for a function of its library."""
    from llvmlite.binding import ffi

    of_library = ffi._lib_wrapper.__getattr__

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return of_library(self, name)

    ffi._lib_wrapper.__getattr__ = attribute


def delete_before_loading() -> None:
    """From now on every block is deleted between its lookup and its load."""
    from p2pkv.adapters.vllm.working import Working, _names

    start = Working.start_loads

    def deleted(self: Any, plan: Any) -> None:
        if plan.loads:
            keys = self._keys_for(plan)
            names = [name for load in plan.loads for name in _names(keys, load)]
            assert all(self._cache.client.batch_delete(names))
        start(self, plan)

    Working.start_loads = deleted


class DoneEvent:
    """Stands in for CUDA's, which Mooncake's connector wants on a CPU too: there a step has ended
    when its call returns."""

    def record(self) -> None:
        """At once."""

    def synchronize(self) -> None:
        """At once."""


def generate(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = order.get("params")
    sampling = SamplingParams(
        temperature=0, max_tokens=order.get("tokens", 12), logprobs=1, ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )  # fmt: skip
    begin = time.perf_counter()
    outputs = llm.generate(order["prompts"], sampling, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [
            [max(p.logprob for p in step.values()) for step in o.outputs[0].logprobs]
            for o in outputs
        ],
        "cached": [o.num_cached_tokens for o in outputs],
        "prompt": [len(o.prompt_token_ids) for o in outputs],
        "params": [o.kv_transfer_params for o in outputs],
    }


def metrics(llm: Any) -> dict[str, float]:
    return {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:p2pkv_")}


def answer(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    if order.get("delete_before_loading"):
        delete_before_loading()
        return {}
    if order.get("reset"):
        return {"done": bool(llm.reset_prefix_cache())}
    return metrics(llm) if order.get("metrics") else generate(llm, order)


def say(content: dict[str, Any]) -> None:
    print(MARK + json.dumps(content), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("ranks", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.cuda.is_available():
        torch.cuda.Event = DoneEvent  # type: ignore[assignment,misc]
    if "LMCache" in options.get("transfer", {}).get("kv_connector", ""):
        make_llvmlite_plain()
    llm = engine(options)
    say({})
    for line in sys.stdin:
        say(answer(llm, json.loads(line)))
    if options.get("ranks", 1) == 1:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
