"""Tensors of GPUs straight from and to the memory of a node on the same host."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ways import KIB, MIB, a_client, a_node

from p2pkv import Client, NodeThread, cuda, gpu_arena, staging
from p2pkv.config import ClientConfig, Limits
from p2pkv.cuda import Run
from p2pkv.errors import BatchError, DeviceError, TensorMismatch
from p2pkv.testing.fakecuda import FakeCuda

LIMITS = Limits(message_bytes_max=4 * MIB, value_bytes_max=16 * MIB)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeThread]:
    with a_node(LIMITS) as node:
        yield node


def near(client: Any) -> Any:
    """The client, once it has the node's memory."""
    end, ops = time.monotonic() + 10, getattr(client, "_client", client)._ops
    while ops.memories([b"any"]) == [None]:
        assert time.monotonic() < end, "the node's memory is not shared"
        client.get("any")
    return client


@pytest.fixture(scope="module", params=["auto", "asyncio"])
def kv(node: NodeThread, request: pytest.FixtureRequest) -> Iterator[Any]:
    with a_client(node, request.param) as client:
        yield near(client)


@pytest.fixture(scope="module")
def far(node: NodeThread) -> Iterator[Any]:
    """A client that copies nothing from or to the node's memory itself."""
    with a_client(node, "tcp") as client:
        yield client


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    yield from a_gpu(FakeCuda())


def a_gpu(fake: FakeCuda) -> Iterator[FakeCuda]:
    staging.forget_stages()
    with cuda.using(fake):
        yield fake
    staging.forget_stages()
    gpu_arena.forget()
    assert fake.faults == []
    assert fake.registered_bytes == 0


def numbers(*shape: int) -> Any:
    return np.frombuffer(os.urandom(int(np.prod(shape))), np.uint8).reshape(shape)


def kinds(gpu: FakeCuda) -> list[str]:
    return [line.partition(" ")[0] for line in gpu.log]


# --- puts and gets


def test_a_put_is_one_copy_that_is_waited_for_before_it_is_committed(
    kv: Any, far: Any, gpu: FakeCuda
) -> None:
    data = numbers(MIB)
    array = gpu.array(np.zeros_like(data), stream=7)
    array.write_later(data)
    assert kv.put_tensor("put", array) == 1
    assert gpu.log == [f"register {256 * MIB}", f"to_host {MIB} on 7", "wait for 7"]
    assert np.array_equal(far.get_tensor("put"), data)


def test_a_get_is_one_copy_that_has_arrived(kv: Any, far: Any, gpu: FakeCuda) -> None:
    data = numbers(MIB)
    far.put_tensor("get", data)
    out = gpu.array(np.zeros_like(data), stream=5)
    out.write_later(np.ones_like(data))  # comes before, as it was started before
    assert kv.get_tensor("get", out=out) is out
    assert np.array_equal(out.host, data)
    assert gpu.log == [f"register {256 * MIB}", f"to_device {MIB} on 5", "wait for 5"]


def test_a_batch_is_waited_for_once(kv: Any, gpu: FakeCuda) -> None:
    pool = numbers(2, 2, 16, 32 * KIB)
    keys = [f"block{i}" for i in range(16)]
    blocks = [gpu.array(pool[:, :, i], stream=3) for i in range(16)]
    assert kv.batch_put_tensor(zip(keys, blocks, strict=True)) == [1] * 16
    assert kinds(gpu) == ["register", *["to_host"] * 64, "wait"]
    gpu.log.clear()
    other = np.zeros_like(pool)
    outs = [gpu.array(other[:, :, 15 - i], stream=3) for i in range(16)]
    assert kv.batch_get_tensor(keys, outs=outs) == outs
    assert np.array_equal(other[:, :, ::-1], pool)
    assert kinds(gpu) == [*["to_device"] * 64, "wait"]


def test_each_stream_of_a_batch_is_waited_for(kv: Any, gpu: FakeCuda) -> None:
    data = [numbers(100 * KIB) for _ in range(4)]
    arrays = [gpu.array(np.zeros_like(d), stream=3 + i % 2) for i, d in enumerate(data)]
    for array, d in zip(arrays, data, strict=True):
        array.write_later(d)
    keys = [f"stream{i}" for i in range(4)]
    kv.batch_put_tensor(zip(keys, arrays, strict=True))
    assert sorted(gpu.log[-2:]) == ["wait for 3", "wait for 4"]
    outs = [gpu.array(np.zeros_like(d), stream=5 + i % 2) for i, d in enumerate(data)]
    kv.batch_get_tensor(keys, outs=outs)
    assert all(np.array_equal(o.host, d) for o, d in zip(outs, data, strict=True))
    assert sorted(gpu.log[-2:]) == ["wait for 5", "wait for 6"]


def test_what_is_found_missing_and_mistaken_is_told_as_elsewhere(kv: Any, gpu: FakeCuda) -> None:
    data = numbers(200 * KIB)
    kv.put_tensor("found", data)
    kv.put("other", bytes(200 * KIB + 64))
    outs = [gpu.array(np.zeros(200 * KIB + (i == 3), np.uint8)) for i in range(4)]
    with pytest.raises(BatchError) as e:
        kv.batch_get_tensor(["found", "missing", "other", "found"], outs=outs)
    found, missing, other, shape = e.value.results
    assert found is outs[0]
    assert np.array_equal(outs[0].host, data)
    assert missing is None
    assert isinstance(other, TensorMismatch)
    assert isinstance(shape, TensorMismatch)
    assert not outs[3].host.any()


def test_host_and_gpu_tensors_mix_in_a_put(kv: Any, gpu: FakeCuda) -> None:
    data = [numbers(300 * KIB) for _ in range(3)]
    assert kv.batch_put_tensor({"a": data[0], "b": gpu.array(data[1]), "c": data[2]}) == [1] * 3
    assert all(np.array_equal(kv.get_tensor(k), d) for k, d in zip("abc", data, strict=True))
    assert kinds(gpu) == ["register", "to_host", "wait"]


def test_of_a_key_that_comes_twice_the_last_stays(kv: Any, gpu: FakeCuda) -> None:
    data = [numbers(300 * KIB) for _ in range(2)]
    kv.batch_put_tensor([("twice", gpu.array(data[0])), ("twice", data[1])])
    assert np.array_equal(kv.get_tensor("twice"), data[1])


def test_small_and_very_large_tensors_are_put_by_way_of_pinned_memory(
    kv: Any, gpu: FakeCuda
) -> None:
    for size in (1 * KIB, 5 * MIB):
        staging.forget_stages()
        data = numbers(size)
        kv.put_tensor("size", gpu.array(data))
        assert "pinned" in kinds(gpu)
        gpu.log.clear()
        out = gpu.array(np.zeros_like(data))
        kv.get_tensor("size", out=out)
        assert np.array_equal(out.host, data)
        assert kinds(gpu)[-2:] == ["to_device", "wait"]
        assert "pinned" not in kinds(gpu)
        gpu.log.clear()


# --- what happens meanwhile


def test_a_value_that_leaves_while_the_gpu_copies_is_asked_for_again(
    kv: Any, far: Any, gpu: FakeCuda
) -> None:
    old, new = numbers(MIB), numbers(MIB)
    kv.put_tensor("torn", old)
    out = gpu.array(np.zeros_like(old))

    def overwrite() -> None:
        far.put_tensor("torn", new)
        for i in range(8):  # whatever the old value's memory is used for next
            far.put_tensor(f"filler{i}", numbers(MIB))

    gpu.before_copies = overwrite
    assert kv.get_tensor("torn", out=out) is out
    assert np.array_equal(out.host, new)
    assert "pinned" in kinds(gpu)


def test_a_key_that_is_deleted_while_the_gpu_copies_is_old_or_missing_never_torn(
    kv: Any, far: Any, gpu: FakeCuda
) -> None:
    for round in range(8):
        old = numbers(512 * KIB)
        kv.put_tensor("gone", old)
        out = gpu.array(np.zeros_like(old))

        def delete(round: int = round) -> None:
            far.delete("gone")
            for i in range(round):
                far.put_tensor(f"filler{i}", numbers(512 * KIB))

        gpu.before_copies = delete
        if kv.get_tensor("gone", out=out) is not None:
            assert np.array_equal(out.host, old)


def allocations(client: Any) -> int:
    """Room that the node keeps for puts."""
    (node,) = client.stats().values()
    return int(node.figures["allocations"])


def test_a_put_that_the_driver_refuses_gives_its_room_back(
    kv: Any, far: Any, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv.put_tensor("refused", numbers(10))
    before = allocations(far)
    gather: Callable[..., None] = gpu.gather
    calls: list[int] = []

    def refuse(device: int, runs: list[Run], stream: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise DeviceError("cuMemcpyDtoHAsync: an illegal address")
        gather(device, runs, stream)

    monkeypatch.setattr(gpu, "gather", refuse)
    arrays = {f"refused{i}": gpu.array(numbers(300 * KIB)) for i in range(3)}
    with pytest.raises(DeviceError, match="illegal address"):
        kv.batch_put_tensor(arrays)
    assert kinds(gpu) == ["register", "to_host", "wait"]
    assert kv.batch_exists(list(arrays)) == [False] * 3
    end = time.monotonic() + 10
    while allocations(far) > before:
        assert time.monotonic() < end, "the node still keeps room for the put"
        time.sleep(0.01)
    assert kv.batch_put_tensor(arrays) == [1] * 3
    kv.batch_delete(list(arrays))


def test_a_get_that_the_driver_refuses_waits_for_what_was_begun(
    kv: Any, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = numbers(300 * KIB)
    kv.batch_put({"r0": b"", "r1": b""})
    kv.batch_put_tensor({"r0": data, "r1": data})
    scatter: Callable[..., None] = gpu.scatter

    def refuse(device: int, runs: list[Run], stream: int) -> None:
        if "to_device" in kinds(gpu):
            raise DeviceError("cuMemcpyHtoDAsync: an illegal address")
        scatter(device, runs, stream)

    monkeypatch.setattr(gpu, "scatter", refuse)
    with pytest.raises(DeviceError, match="illegal address"):
        kv.batch_get_tensor(["r0", "r1"], outs=[gpu.array(np.zeros_like(data)) for _ in range(2)])
    assert kinds(gpu) == ["register", "to_device", "wait"]


def test_all_streams_are_waited_for_though_one_fails(gpu: FakeCuda) -> None:
    arrays = [gpu.array(np.zeros(3), stream=s) for s in (3, 4)]
    for array in arrays:
        array.write_later(np.ones(3))
    mark: Callable[..., Any] = gpu.mark

    def failing(device: int, stream: int) -> Any:
        if stream == 9:
            raise DeviceError("cuEventRecord: invalid handle")
        return mark(device, stream)

    gpu.mark = failing  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="invalid handle"):
        cuda.wait_for([(0, 3), (0, 9), (0, 4)])
    assert all(array.host.all() for array in arrays)


# --- other ways


def test_a_put_that_finds_no_way_through_the_memory_is_staged(gpu: FakeCuda) -> None:
    """More than a quarter of the node's memory at once goes over the connection."""
    data = numbers(3 * MIB)
    with a_node(LIMITS, 8 * MIB) as node, a_client(node, "auto") as client:
        assert near(client).put_tensor("large", gpu.array(data)) == 1
        assert "pinned" in kinds(gpu)
        assert np.array_equal(client.get_tensor("large"), data)


@pytest.mark.parametrize("checksums", ["remote", "always"])
def test_a_put_has_the_checksum_that_the_policy_asks_for(
    node: NodeThread, gpu: FakeCuda, checksums: str
) -> None:
    data = numbers(300 * KIB)
    seeds = (node.node.endpoint,)
    config = ClientConfig(cluster="ways", seeds=seeds, limits=LIMITS, checksums=checksums)
    with Client.from_config(config) as client:
        near(client).put_tensor("sum", gpu.array(data))
        assert kinds(gpu) == ["register", "to_host", "wait"]
        out = gpu.array(np.zeros_like(data))
        gpu.log.clear()
        client.get_tensor("sum", out=out)
        assert np.array_equal(out.host, data)
        # with "always" a value is compared, which takes the processor
        assert ("pinned" in kinds(gpu)) == (checksums == "always")


# --- registering


def test_memory_that_cannot_be_registered_is_said_once_and_done_without(
    kv: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = numbers(MIB)
    for gpu in a_gpu(FakeCuda(registers=False)):
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                kv.put_tensor("refused", gpu.array(data))
                out = gpu.array(np.zeros_like(data))
                kv.get_tensor("refused", out=out)
                assert np.array_equal(out.host, data)
        said = [r.getMessage() for r in caplog.records if "does not register" in r.getMessage()]
        assert len(said) == 1
        assert "operation not supported" in said[0]
        assert kinds(gpu).count("register") == 1


def test_a_mapping_is_registered_once_in_a_process(node: NodeThread, gpu: FakeCuda) -> None:
    data = numbers(MIB)
    with a_client(node, "auto") as one, a_client(node, "auto") as two:
        for client in (near(one), near(two)):
            client.put_tensor("once", gpu.array(data))
            client.get_tensor("once", out=gpu.array(np.zeros_like(data)))
    assert kinds(gpu).count("register") == 1


def test_memory_is_registered_in_chunks_as_it_is_used_and_copies_end_with_them(
    kv: Any, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_arena, "CHUNK_BYTES", 64 * KIB)
    data = numbers(300 * KIB)
    kv.put_tensor("chunks", gpu.array(data))
    out = gpu.array(np.zeros_like(data))
    kv.get_tensor("chunks", out=out)
    assert np.array_equal(out.host, data)
    assert 300 * KIB <= gpu.registered_bytes <= 6 * 64 * KIB
    copied = [int(line.split()[1]) for line in gpu.log if line.startswith("to_device")]
    assert len(copied) > 4
    assert sum(copied) == 300 * KIB
    assert max(copied) <= 64 * KIB


def test_registrations_end_before_the_memory_is_unmapped(gpu: FakeCuda) -> None:
    with a_node(LIMITS, 32 * MIB) as node:
        with a_client(node, "auto") as client:
            near(client).put_tensor("end", gpu.array(numbers(MIB)))
            assert gpu.registered_bytes == 32 * MIB
        del client
        gc.collect()
        assert gpu.registered_bytes == 0
        assert gpu.faults == []


def test_a_forked_process_leaves_registrations_alone(node: NodeThread, gpu: FakeCuda) -> None:
    with a_client(node, "auto") as client:
        near(client).put_tensor("fork", gpu.array(numbers(MIB)))
        gpu.log.clear()
        child = os.fork()
        if not child:
            gpu_arena.forget()
            os._exit(len(gpu.log))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gpu.registered_bytes
    del client
