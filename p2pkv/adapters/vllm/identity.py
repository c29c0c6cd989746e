"""Which engines may share blocks: the fingerprint of a vLLM engine, and how it is checked.

The fingerprint is in every key, so blocks of another model, type or layout are never found. That
alone would be silent: no hits, and nobody knows why. So each engine also leaves a record of its
fingerprint, and says in its log in what those of the same model differ.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from p2pkv.adapters.cache import Cache
from p2pkv.adapters.keys import Fingerprint
from p2pkv.adapters.vllm.options import Options
from p2pkv.adapters.vllm.plans import LOG, WorkerFacts
from p2pkv.errors import ConfigError, P2PKVError

log = logging.getLogger(LOG)

RECORDS = "kv-engines/"
"""Before the digests, in the keys of records."""
RECORDS_MAX = 256
"""So many are compared."""
RECORD_BYTES_MAX = 1 << 20
ANNOUNCE_TIMEOUT_S = 2.0
RANDOM = "random"
"""Instead of a seed that is another one in every process."""


def fingerprint(
    engine: Any, block_tokens: int, facts: Sequence[WorkerFacts], seed: str, options: Options
) -> Fingerprint:
    """That of an engine, by its VllmConfig and what its workers said.

    ``seed``: that of the block hashes, where the environment has none.
    Raises ConfigError if the options demand another one.
    """
    model, parallel, cache = engine.model_config, engine.parallel_config, engine.cache_config
    algorithm = cache.prefix_caching_hash_algo
    context = int(getattr(parallel, "decode_context_parallel_size", 1))
    context *= int(getattr(parallel, "prefill_context_parallel_size", 1))
    made = Fingerprint(
        model=(options.model or f"{model.model}@{model.revision or 'main'}")[:512],
        dtype=f"{model.dtype}/{cache.cache_dtype}",
        block_tokens=block_tokens,
        layout="vllm",
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=context,
        hash_seed=f"{algorithm}:{_seed(algorithm, seed)}",
        extra=(
            ("namespace", options.namespace),
            ("quantization", str(model.quantization)),
            ("memory", "|".join(sorted({fact.layout for fact in facts}))),
        ),
    )
    if options.fingerprint not in ("", made.digest()):
        raise ConfigError(
            f"fingerprint = {options.fingerprint!r}: this engine has {made.digest()}: {made}"
        )
    return made


def _seed(algorithm: str, default: str) -> str:
    """As vLLM chooses it, which it has not done yet at this time."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("xxhash"):
        log.warning(
            "block hashes by %s have a random seed: nothing is shared with other engines. Set "
            "PYTHONHASHSEED, or take sha256", algorithm,
        )  # fmt: skip
        return RANDOM
    return default if seed is None else seed


def check_same(mine: Fingerprint, other: Fingerprint | None) -> None:
    """Two fingerprints with one digest are the same one. Raises ConfigError."""
    if other is not None and mine.differences(other):
        raise ConfigError(
            f"the digest {mine.digest()} is taken by an engine that differs in "
            f"{'; '.join(mine.differences(other))}: set another namespace"
        )


def others_of_model(mine: Fingerprint, records: Mapping[str, Fingerprint]) -> list[str]:
    """For the log: why blocks of engines with the same model are not found."""
    return [
        f"blocks of {digest} are not shared: {'; '.join(mine.differences(other))}"
        for digest, other in sorted(records.items())
        if other.model == mine.model and digest != mine.digest()
    ]


def announce(cache: Cache, mine: Fingerprint) -> None:
    """Leave a record, and log what differs from others. Raises ConfigError.

    Trouble with the store is logged: the engine works without it.
    """
    try:
        records = _records(cache)
    except P2PKVError as e:
        log.warning("fingerprint %s; those of other engines are not known: %s", mine.digest(), e)
        return
    check_same(mine, records.get(mine.digest()))
    cache.store([RECORDS + mine.digest()], [msgspec.json.encode(mine)])
    log.info("fingerprint %s: %s", mine.digest(), mine)
    for line in others_of_model(mine, records):
        log.warning("%s", line)


def _records(cache: Cache) -> dict[str, Fingerprint]:
    pages = cache.client.scan_keys(RECORDS, page=RECORDS_MAX, timeout=ANNOUNCE_TIMEOUT_S)
    found = itertools.islice(pages, RECORDS_MAX)
    keys = [key for key, size in found if size <= RECORD_BYTES_MAX]
    records = {}
    for key, value in zip(keys, cache.get(keys), strict=True):
        if isinstance(value, bytes) and (record := _read(value)) is not None:
            records[key.decode(errors="replace").removeprefix(RECORDS)] = record
    return records


def _read(value: bytes) -> Fingerprint | None:
    """None: written by a version that has other fields."""
    try:
        return msgspec.json.decode(value, type=Fingerprint)
    except msgspec.DecodeError:
        return None
