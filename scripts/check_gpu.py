#!/usr/bin/env python3
"""Tensors of this machine's GPU through p2pkv: right bytes, in the right order, and how fast.

    scripts/check_gpu.py                 some minutes on one GPU; torch or cupy is needed
    scripts/check_gpu.py --json          the same as JSON
    scripts/check_gpu.py --fake          a GPU that is not there, to test this script itself

Starts an etcd server and a node in this process. Exits with 1 if any byte is wrong.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

import p2pkv
from p2pkv import cuda, gpu_arena, staging
from p2pkv.arena import SHM_DIRECTORY
from p2pkv.buffers import address_of
from p2pkv.config import ClientConfig, Limits
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.fakecuda import FakeCuda

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB]
TIMES = 5
ROUNDS = 10
WAYS = [("direct", "auto"), ("staged", "tcp")]
"""Straight from and to the node's memory, or by pinned memory and a connection; and their paths."""
BUDGET_S = 10.0
"""A measurement that has taken this long is not repeated."""


class Gpu(Protocol):
    """What a framework does for the checks."""

    name: str

    def zeros(self, shape: tuple[int, ...]) -> Any: ...

    def random(self, shape: tuple[int, ...]) -> Any: ...

    def part(self, tensor: Any, block: int) -> Any:
        """``tensor[:, :, block]``."""
        ...

    def same(self, a: Any, b: Any) -> bool: ...

    def late_copy(self, target: Any, source: Any) -> Any:
        """On another stream, after a long time: copy. Returns the target as seen on that stream."""
        ...

    def place(self, tensor: Any) -> tuple[int, int, int]:
        """Device, address and stream."""
        ...

    def synchronize(self) -> None: ...

    def plain_memory(self) -> AbstractContextManager[None]:
        """Copies from and to memory that is not pinned are made meanwhile."""
        return nullcontext()


class TorchGpu(Gpu):
    """Bytes as uint8 tensors of torch."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise p2pkv.ConfigError("torch sees no GPU")
        self.torch = torch
        self.name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        self.side = torch.cuda.Stream()

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.uint8, device="cuda")

    def random(self, shape: tuple[int, ...]) -> Any:
        return self.torch.randint(0, 256, shape, dtype=self.torch.uint8, device="cuda")

    def part(self, tensor: Any, block: int) -> Any:
        return tensor[:, :, block]

    def same(self, a: Any, b: Any) -> bool:
        return bool(self.torch.equal(a, b))

    @contextmanager
    def later(self) -> Iterator[None]:
        self.side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(self.side):
            self.torch.cuda._sleep(50_000_000)
            yield

    def late_copy(self, target: Any, source: Any) -> Any:
        with self.later():
            target.copy_(source)
        return target

    def on_side(self, call: Callable[[], Any]) -> Any:
        with self.torch.cuda.stream(self.side):
            return call()

    def place(self, tensor: Any) -> tuple[int, int, int]:
        stream = self.torch.cuda.current_stream().cuda_stream
        return tensor.device.index, tensor.data_ptr(), stream

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


class CupyGpu(Gpu):
    """Bytes as uint8 arrays of cupy."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.name = f"{properties['name'].decode()}, cupy {cupy.__version__}"
        self.side = cupy.cuda.Stream(non_blocking=True)
        self.ballast = cupy.ones((4096, 4096), cupy.float32)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.cupy.zeros(shape, "uint8")

    def random(self, shape: tuple[int, ...]) -> Any:
        return self.cupy.random.randint(0, 256, shape, "uint8")

    def part(self, tensor: Any, block: int) -> Any:
        return tensor[:, :, block]

    def same(self, a: Any, b: Any) -> bool:
        return bool((a == b).all())

    def late_copy(self, target: Any, source: Any) -> Any:
        self.cupy.cuda.get_current_stream().synchronize()
        with self.side:
            for _ in range(20):
                self.ballast @ self.ballast
            target[...] = source
        return target

    def on_side(self, call: Callable[[], Any]) -> Any:
        with self.side:
            return call()

    def place(self, tensor: Any) -> tuple[int, int, int]:
        return tensor.device.id, tensor.data.ptr, self.cupy.cuda.get_current_stream().ptr

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()


class FakeGpu(Gpu):
    """Host memory in a GPU's clothes: everything but the hardware."""

    def __init__(self, fake: FakeCuda) -> None:
        self.name = "none (--fake)"
        self.fake = fake
        self.chance = np.random.default_rng(1)

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return self.fake.array(np.zeros(shape, np.uint8), stream=1)

    def random(self, shape: tuple[int, ...]) -> Any:
        return self.fake.array(self.chance.integers(0, 256, shape, np.uint8), stream=1)

    def part(self, tensor: Any, block: int) -> Any:
        return self.fake.array(tensor.host[:, :, block], stream=1)

    def same(self, a: Any, b: Any) -> bool:
        self.synchronize()
        return bool(np.array_equal(a.host, b.host))

    def late_copy(self, target: Any, source: Any) -> Any:
        seen = self.fake.array(target.host, stream=7)
        seen.write_later(source.host)
        return seen

    def on_side(self, call: Callable[[], Any]) -> Any:
        return call()

    def place(self, tensor: Any) -> tuple[int, int, int]:
        return 0, tensor.address, 1

    def synchronize(self) -> None:
        for stream in (1, 7):
            self.fake.mark(0, stream)()

    def plain_memory(self) -> AbstractContextManager[None]:
        return self.fake.plain_memory()


class Report:
    """Rows of the table, and whether all bytes were right."""

    def __init__(self, quiet: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.right = True
        self._quiet = quiet

    def add(self, check: str, size: int, **figures: Any) -> None:
        self.right = self.right and figures.get("right", True)
        self.rows.append({"check": check, "bytes": size, **figures})
        if not self._quiet:
            text = "  ".join(f"{name} {_shown(value)}" for name, value in figures.items())
            print(f"{check:<28}{_size(size):>9}  {text}", flush=True)


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def rate(size: int, call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """GB/s of the fastest of some runs."""
    fastest, begin = float("inf"), time.perf_counter()
    for _ in range(TIMES):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now - begin > BUDGET_S:
            break
    return size / fastest / 1e9


def check_copies(gpu: Gpu, size: int, report: Report) -> tuple[float, float]:
    """The limits: copies by the driver between the GPU and pinned, plain and shared memory."""
    driver, tensor = cuda.driver(), gpu.zeros((size,))
    device, address, stream = gpu.place(tensor)

    def down(memory: memoryview) -> None:
        driver.gather(device, [(address_of(memory), address, size)], stream)
        driver.mark(device, stream)()

    def up(memory: memoryview) -> None:
        driver.scatter(device, [(address_of(memory), address, size)], stream)
        driver.mark(device, stream)()

    def both(memory: memoryview) -> tuple[float, float]:
        return (
            rate(size, lambda: down(memory), gpu.synchronize),
            rate(size, lambda: up(memory), gpu.synchronize),
        )

    limits = both(driver.pinned(size))
    report.add("copy, pinned memory", size, to_host=limits[0], to_device=limits[1])
    with gpu.plain_memory():
        to_host, to_device = both(memoryview(bytearray(size)))
    report.add("copy, plain memory", size, to_host=to_host, to_device=to_device)
    with mmap.mmap(-1, size) as shared, memoryview(shared) as view:
        end = driver.register_host(view)
        to_host, to_device = both(view)
        end()
    report.add("copy, registered shared", size, to_host=to_host, to_device=to_device)
    return limits


def check_registration(kv: Any, report: Report) -> None:
    """How fast the node's memory is registered, which is done once; or why it is not."""
    (memory,) = kv._ops.memories([b"any"])
    size = len(memory.view)
    reached, start = gpu_arena.of(memory), time.perf_counter()
    reached.reach([(0, size)])
    figures = {"rate": size / (time.perf_counter() - start) / 1e9}
    report.add("node's memory, registered", size, **figures, refused=reached.refused or "no")


def check_round_trip(
    kv: Any, gpu: Gpu, size: int, limits: tuple[float, float], way: str, report: Report
) -> None:
    """One tensor to the store and back."""
    tensor, out = gpu.random((size,)), gpu.zeros((size,))
    put = rate(size, lambda: kv.put_tensor("round-trip", tensor), gpu.synchronize)
    get = rate(size, lambda: kv.get_tensor("round-trip", out=out), gpu.synchronize)
    report.add(
        f"round trip, {way}", size, put=put, get=get, put_ratio=put / limits[0],
        get_ratio=get / limits[1], right=gpu.same(tensor, out),
    )  # fmt: skip
    kv.delete("round-trip")


def check_blocks(kv: Any, gpu: Gpu, block_bytes: int, way: str, report: Report) -> None:
    """Blocks of a paged KV cache: gathered from all layers of one pool, scattered to another."""
    layers, blocks = 16, 16
    pool, other = (make((layers, 2, blocks, block_bytes)) for make in (gpu.random, gpu.zeros))
    keys = [f"{{blocks}}{i}" for i in range(blocks)]
    sources = [gpu.part(pool, i) for i in range(blocks)]
    targets = [gpu.part(other, i) for i in range(blocks)]
    size = layers * 2 * blocks * block_bytes
    pairs = list(zip(keys, sources, strict=True))
    put = rate(size, lambda: kv.batch_put_tensor(pairs), gpu.synchronize)
    get = rate(size, lambda: kv.batch_get_tensor(keys, outs=targets), gpu.synchronize)
    name = f"KV blocks of {_size(block_bytes)}, {way}"
    report.add(name, size, put=put, get=get, right=gpu.same(pool, other))
    kv.batch_delete(keys)


def check_order(kv: Any, gpu: Any, size: int, way: str, report: Report) -> None:
    """A put of what a stream will have written; a get before what a stream will read."""
    right = True
    for _ in range(ROUNDS):
        data, tensor = gpu.random((size,)), gpu.zeros((size,))
        seen = gpu.late_copy(tensor, data)
        gpu.on_side(lambda seen=seen: kv.put_tensor("order", seen))
        out = gpu.zeros((size,))
        written = gpu.late_copy(out, gpu.random((size,)))
        gpu.on_side(lambda written=written: kv.get_tensor("order", out=written))
        right = right and gpu.same(out, data)
    report.add(f"stream order, {way}", size, rounds=ROUNDS, right=right)
    kv.delete("order")


def check_dtypes(kv: Any, gpu: Any, report: Report) -> None:
    """Each dtype of the framework, bit for bit, made by it on the GPU."""
    torch = getattr(gpu, "torch", None)
    if torch is None:
        return
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"):
        raw = torch.randint(0, 2, (4096,), dtype=torch.uint8, device="cuda")
        tensor = raw.view(getattr(torch, name)).reshape(-1, 16).mT
        kv.put_tensor("dtype", tensor)
        found = kv.get_tensor("dtype", like=tensor)
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, found)]
        right = torch.equal(*bits) and found.dtype == tensor.dtype
        report.add(f"dtype {name}", 4096, right=right and found.stride() == tensor.stride())


@contextmanager
def client(seeds: tuple[str, ...], limits: Limits, path: str) -> Iterator[p2pkv.Client]:
    """A client that has a connection to the node, and its memory if the path has it."""
    config = ClientConfig(seeds=seeds, timeout_s=60.0, limits=limits, path=path)
    with p2pkv.Client.from_config(config) as made:
        for _ in range(3):  # the first answers come before there is a data connection
            made.put("warm", b"up")
        yield made


def run(gpu: Gpu, largest: int, report: Report) -> None:
    room = shutil.disk_usage(SHM_DIRECTORY).free
    sizes = [size for size in SIZES if size <= min(largest, room // 3)]
    memory = max(64 * MIB, min(5 * sizes[-1], room // 10 * 9))
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdCluster(1))
        limits = Limits(value_bytes_max=2 * GIB, message_bytes_max=2 * GIB)
        node = p2pkv.NodeThread(
            p2pkv.NodeConfig(
                node_id="check-gpu",
                bucket_count=16,
                memory_limit_bytes=memory,
                limits=limits,
                etcd=p2pkv.EtcdConfig(endpoints=etcd.endpoints),
            )
        )
        stack.enter_context(node)
        seeds = (node.node.endpoint,)
        ways = {way: stack.enter_context(client(seeds, limits, path)) for way, path in WAYS}
        check_registration(ways["direct"], report)
        for size in sizes:
            copied = check_copies(gpu, size, report)
            for way, kv in ways.items():
                check_round_trip(kv, gpu, size, copied, way, report)
        for way, kv in ways.items():
            for block_bytes in (4 * KIB, 64 * KIB, 512 * KIB):
                if 512 * block_bytes <= min(memory // 2, largest * 4):
                    check_blocks(kv, gpu, block_bytes, way, report)
            check_order(kv, gpu, sizes[min(1, len(sizes) - 1)], way, report)
            check_dtypes(kv, gpu, report)
    staging.forget_stages()
    gpu_arena.forget()


def main(arguments: list[str] | None = None, fake: FakeCuda | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="without a GPU: tests this script")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--largest", type=int, default=0, help="bytes of the largest tensor")
    options = parser.parse_args(arguments)
    report = Report(options.json)
    with ExitStack() as stack:
        if options.fake:
            fake = fake or FakeCuda()
            stack.enter_context(cuda.using(fake))
            gpu: Any = FakeGpu(fake)
        else:
            gpu = _framework()
        if not options.json:
            print(f"{gpu.name}; rates in GB/s\n")
        run(gpu, options.largest or (16 * MIB if options.fake else GIB), report)
    if options.json:
        machine = {"gpu": gpu.name, "host": platform.platform(), "cpus": os.cpu_count()}
        print(json.dumps({**machine, "right": report.right, "rows": report.rows}, indent=1))
    elif not report.right:
        print("\nSOME BYTES WERE WRONG", file=sys.stderr)
    return 0 if report.right else 1


def _framework() -> Any:
    reasons = []
    for make in (TorchGpu, CupyGpu):
        try:
            return make()
        except Exception as e:  # whatever a framework raises without a GPU
            reasons.append(f"{make.__name__}: {e}")
    sys.exit("no GPU to check (--fake does without one)\n" + "\n".join(reasons))


if __name__ == "__main__":
    sys.exit(main())
