"""Image features and the KV cache of text, side by side under one session's tag.

    python examples/multimodal.py

Needs numpy. A session shows two images and then talks about them. What the vision encoder made of
the images and the KV blocks of the text have the same tag, ``{session}``, so they lie on one node,
and whoever goes on with the session fetches both kinds in one batch: one message, no matter how
many values. Image features are also found by the image's content, whoever showed it first. Uses the
cluster that ``p2pkv up`` runs on this machine, or ``--etcd-endpoints``; else starts one for itself.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import numpy as np
from local import endpoints

import p2pkv

PATCHES, WIDTH = 576, 1024
"""Of one image: 24 x 24 patches, 2.25 MiB in float32."""
LAYERS, TOKENS, HEADS, DIMENSION, BLOCKS = 16, 16, 8, 64, 8
BLOCK_SHAPE = (LAYERS, 2, TOKENS, HEADS, DIMENSION)
SESSION = "session-42"


def encode_image(image: np.ndarray) -> np.ndarray:
    """Stands for a vision encoder: the same image gives the same features."""
    seed = int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal((PATCHES, WIDTH), dtype=np.float32)


def compute_block(number: int) -> np.ndarray:
    """Stands for the model's keys and values of a block of text, in all layers."""
    return np.random.default_rng(number).standard_normal(BLOCK_SHAPE, dtype=np.float32)


def image_key(session: str, image: np.ndarray) -> str:
    """By content: the same image in the session has the same key."""
    return f"{{{session}}}/image/{hashlib.sha256(image.tobytes()).hexdigest()}"


def block_key(session: str, number: int) -> str:
    return f"{{{session}}}/text/{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--etcd-endpoints", help="comma-separated; of a running cluster")
    args = parser.parse_args()
    random = np.random.default_rng(7)
    images = [random.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(2)]
    with endpoints(args.etcd_endpoints) as etcd:
        with p2pkv.Client(etcd, timeout=30.0) as kv:
            features = {image_key(SESSION, image): encode_image(image) for image in images}
            blocks = {block_key(SESSION, i): compute_block(i) for i in range(BLOCKS)}
            kv.batch_put({**features, **blocks}, write_once=True, ttl=600.0)
        with p2pkv.Client(etcd, timeout=30.0) as kv:
            go_on(kv, images)


def go_on(kv: p2pkv.Client, images: list[np.ndarray]) -> None:
    """Another worker takes the session up."""
    keys = [image_key(SESSION, image) for image in images]
    keys += [block_key(SESSION, i) for i in range(BLOCKS)]
    features = [np.empty((PATCHES, WIDTH), np.float32) for _ in images]
    blocks = [np.empty(BLOCK_SHAPE, np.float32) for _ in range(BLOCKS)]
    if kv.match_prefix(keys) < len(keys):
        raise SystemExit("not all of the session is there")
    owners = {place.member.node for place in kv.locate(keys) if place}
    begin = time.perf_counter()
    sizes = kv.batch_get_into(keys, [*features, *blocks])
    seconds = time.perf_counter() - begin
    mib = sum(size or 0 for size in sizes) / (1 << 20)
    print(f"{len(features)} images' features and {len(blocks)} blocks of text, {mib:.1f} MiB, in "
          f"one batch from {', '.join(sorted(owners))}: {seconds * 1e3:.1f} ms")  # fmt: skip
    truth = [encode_image(image) for image in images] + [compute_block(i) for i in range(BLOCKS)]
    if not all(map(np.array_equal, [*features, *blocks], truth)):
        raise SystemExit("what came is not what was stored")
    print("equal")


if __name__ == "__main__":
    main()
