"""An SGLang engine in a process of its own, on a CPU: two generations of one prompt.

Run as a program with the engine's arguments in JSON, and tests/engines/sglang_cpu on PYTHONPATH;
prints one line of JSON for each generation.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PROMPT = "The quick brown fox jumps over the lazy dog. " * 14
BACKUP_TIMEOUT_S = 60.0


def main(model: str, arguments: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        context_length=1024,
        page_size=16,
        log_level="info",
        **arguments,
    )
    for _ in range(2):
        begin = time.perf_counter()
        (result,) = engine.generate([PROMPT], {"temperature": 0, "max_new_tokens": 12})
        said = {
            "tokens": result["output_ids"],
            "prompt": result["meta_info"]["prompt_tokens"],
            "cached": result["meta_info"]["cached_tokens"],
            "details": result["meta_info"].get("cached_tokens_details"),
            "seconds": time.perf_counter() - begin,
        }
        print("SAID " + json.dumps(said), flush=True)
    sys.stdin.readline()  # whoever started this has seen that all is stored
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
