"""Tensors of several frameworks, there and back, on every way to a node."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from ways import KIB, MIB, WAYS, a_client, a_node

from p2pkv import NodeThread, arrays, cuda, dlpack, staging
from p2pkv.buffers import address_of
from p2pkv.errors import (
    BatchError,
    ConfigError,
    CorruptValue,
    DeviceError,
    InvalidArgument,
    P2PKVError,
    TensorMismatch,
)
from p2pkv.layouts import Layout, packed
from p2pkv.tensor_header import ITEMSIZES, PREFIX, TensorHeader, decode
from p2pkv.testing.fakecuda import FakeArray, FakeCuda, synchronize

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
needs_ml_dtypes = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")

NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
SMALL_FLOATS = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeThread]:
    with a_node() as node:
        yield node


@pytest.fixture(scope="module", params=WAYS)
def kv(node: NodeThread, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client that reaches the node in one of the ways there are."""
    with a_client(node, request.param) as client:
        yield client


@pytest.fixture(scope="module")
def one(node: NodeThread) -> Iterator[Any]:
    """A client on one way, for what does not depend on the way."""
    with a_client(node, "auto") as client:
        yield client


@pytest.fixture(scope="module")
def far(node: NodeThread) -> Iterator[Any]:
    """A client that does not share the node's memory: GPUs' tensors go through pinned memory."""
    with a_client(node, "tcp") as client:
        yield client


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    staging.forget_stages()
    with cuda.using(fake):
        yield fake
    staging.forget_stages()
    assert fake.faults == []


def numbers(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    """An array with random contents."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if np.dtype(dtype) == bool:
        return np.frombuffer(os.urandom(size), np.uint8).reshape(shape) > 127
    return np.frombuffer(bytearray(os.urandom(size)), dtype).reshape(shape)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, NaNs too."""
    return (
        type(a) is type(b)
        and a.dtype == b.dtype
        and tuple(a.shape) == tuple(b.shape)
        and bits(a) == bits(b)
    )


def bits(tensor: Any) -> bytes:
    if torch is not None and isinstance(tensor, torch.Tensor):
        return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bytes(np.ascontiguousarray(tensor).tobytes())


# --- numpy


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5), (2, 3, 128, 65)])
def test_an_array_comes_back_as_it_was(kv: Any, shape: tuple[int, ...]) -> None:
    array = numbers(shape)
    assert kv.put_tensor("t", array) == 1
    found = kv.get_tensor("t")
    assert same(found, array)
    assert found.flags.writeable
    assert found.flags.aligned
    out = np.zeros(shape, np.float32)
    assert kv.get_tensor("t", out=out) is out
    assert same(out, array)


@pytest.mark.parametrize("size", [5 * KIB, 300 * KIB, 3 * MIB])
def test_large_arrays_take_the_same_way(kv: Any, size: int) -> None:
    array = numbers((size,), np.uint8)
    kv.put_tensor("big", array)
    assert same(kv.get_tensor("big"), array)
    out = np.zeros(size, np.uint8)
    kv.get_tensor("big", out=out)
    assert same(out, array)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_of_numpy_is_kept(one: Any, dtype: str) -> None:
    array = numbers((3, 50), dtype)
    one.put_tensor("dtype", array)
    assert same(one.get_tensor("dtype"), array)


@needs_ml_dtypes
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_are_kept_where_numpy_has_them(one: Any, dtype: str) -> None:
    array = numbers((3, 50), getattr(ml_dtypes, dtype))
    one.put_tensor("small", array)
    assert same(one.get_tensor("small"), array)


def test_numpy_without_the_dtype_says_what_to_do(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    header = TensorHeader("bfloat16", (2,))
    one.put("b", header.encode() + b"abcd")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(InvalidArgument, match="pip install ml_dtypes"):
        one.get_tensor("b")


VIEWS = {
    "transposed": lambda a: a.T,
    "permuted": lambda a: a.transpose(2, 0, 1),
    "rows": lambda a: a[1:3],
    "inner part": lambda a: a[:, 2:5, :],
    "every second": lambda a: a[::2, :, ::2],
    "reversed": lambda a: a[::-1],
    "last only": lambda a: a[..., -1],
    "broadcast": lambda a: np.broadcast_to(a[0], (3, *a.shape[1:])),
    "fortran": np.asfortranarray,
    "windows": lambda a: as_strided(a, (3, 4), (8, 4)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scale", [1, 40])
def test_a_view_is_stored_without_what_lies_between(kv: Any, view: str, scale: int) -> None:
    array = VIEWS[view](numbers((4, 6, 8 * scale * scale)))
    kv.put_tensor("view", array)
    assert same(kv.get_tensor("view"), array)
    out = np.zeros(array.shape, array.dtype)
    kv.get_tensor("view", out=out)
    assert same(out, array)


@pytest.mark.parametrize("view", ["transposed", "permuted", "fortran"])
def test_strides_are_kept_where_nothing_lies_between(one: Any, view: str) -> None:
    array = VIEWS[view](numbers((4, 6, 8)))
    one.put_tensor("strides", array)
    assert one.get_tensor("strides").strides == array.strides


@pytest.mark.parametrize("view", [v for v in VIEWS if v not in ("broadcast", "fortran", "windows")])
@pytest.mark.parametrize("scale", [1, 40])
def test_out_may_be_a_view_and_what_lies_between_stays(kv: Any, view: str, scale: int) -> None:
    shape = (4, 6, 8 * scale * scale)
    array, whole = VIEWS[view](numbers(shape)), np.full(shape, 7, np.float32)
    kv.put_tensor("into", np.ascontiguousarray(array))
    out, expected = VIEWS[view](whole), whole.copy()
    VIEWS[view](expected)[...] = array
    assert kv.get_tensor("into", out=out) is out
    assert same(whole, expected)


def test_an_array_and_an_out_with_other_strides_fit_together(kv: Any) -> None:
    array = numbers((64, 100, 33))
    kv.put_tensor("order", array.transpose(1, 2, 0))
    out = np.zeros((100, 33, 64), np.float32)
    kv.get_tensor("order", out=out)
    assert same(out, np.ascontiguousarray(array.transpose(1, 2, 0)))


def test_a_miss_is_none(kv: Any) -> None:
    out = np.full(3, 7, np.float32)
    assert kv.get_tensor("none") is None
    assert kv.get_tensor("none", out=out) is None
    assert out.tolist() == [7, 7, 7]


def test_a_batch_of_tensors_and_outs(kv: Any) -> None:
    tensors = {f"b{i}": numbers((i, 4096)) for i in range(6)}
    assert kv.batch_put_tensor(tensors) == [1] * 6
    found = kv.batch_get_tensor([*tensors, "none"])
    assert found.pop() is None
    assert all(same(a, b) for a, b in zip(found, tensors.values(), strict=True))
    outs = [np.zeros_like(t) for t in tensors.values()]
    results = kv.batch_get_tensor(list(tensors), outs=outs)
    assert all(r is o for r, o in zip(results, outs, strict=True))
    assert all(same(a, b) for a, b in zip(outs, tensors.values(), strict=True))


def test_blocks_of_a_paged_cache_are_gathered_and_scattered(kv: Any) -> None:
    """One block of tokens over all layers and heads, out of a pool that holds many."""
    pool = numbers((8, 2, 16, 4, 512))  # layers, k and v, blocks, heads, elements
    kv.batch_put_tensor([(f"block{i}", pool[:, :, i]) for i in (3, 7)])
    other = np.zeros_like(pool)
    kv.batch_get_tensor(["block3", "block7"], outs=[other[:, :, 5], other[:, :, 0]])
    assert same(other[:, :, 5].copy(), pool[:, :, 3].copy())
    assert same(other[:, :, 0].copy(), pool[:, :, 7].copy())
    assert not other[:, :, 1:5].any()


def test_the_options_of_a_put_apply_to_tensors(one: Any) -> None:
    one.delete("once")
    assert one.put_tensor("once", numbers((2,)), if_absent=True) == 1
    assert one.batch_put_tensor({"once": numbers((3,))}, if_absent=True) == [0]
    assert one.get_tensor("once").shape == (2,)


# --- what does not fit


@pytest.mark.parametrize("out", [np.zeros((2, 4), np.float32), np.zeros((2, 3), np.int32),
                                 np.zeros((2, 2), np.float32), np.zeros(6, np.float32),
                                 np.zeros((2, 3), np.float64)[::-1]])  # fmt: skip
def test_another_dtype_or_shape_is_an_error_that_names_both(kv: Any, out: Any) -> None:
    kv.put_tensor("mismatch", numbers((2, 3)))
    wanted = f"{out.dtype}{list(out.shape)}".replace("[", r"\[")
    with pytest.raises(
        TensorMismatch, match=rf"'mismatch': is a tensor float32\[2, 3\], out is {wanted}"
    ):
        kv.get_tensor("mismatch", out=out)


def test_a_value_that_is_no_tensor_says_so(kv: Any) -> None:
    for value in (b"", b"x", bytes(5000)):
        kv.put("plain", value)
        with pytest.raises(TensorMismatch, match="'plain': its value is no tensor"):
            kv.get_tensor("plain")
        with pytest.raises(TensorMismatch, match="'plain': its value is no tensor"):
            kv.get_tensor("plain", out=np.zeros(7))


def test_each_key_of_a_batch_has_its_own_outcome(kv: Any) -> None:
    kv.put_tensor("good", numbers((2, 3)))
    kv.put("bad", b"no tensor")
    outs = [np.zeros((2, 3), np.float32) for _ in range(4)]
    outs[3] = np.zeros((3, 2), np.float32)
    keys = ["good", "bad", "none", "good"]
    with pytest.raises(BatchError) as e:
        kv.batch_get_tensor(keys, outs=outs)
    good, bad, none, shape = e.value.results
    assert good is outs[0]
    assert none is None
    assert isinstance(bad, TensorMismatch)
    assert isinstance(shape, TensorMismatch)
    with pytest.raises(BatchError) as e:
        kv.batch_get_tensor(keys)
    assert [type(r) for r in e.value.results] == [
        np.ndarray,
        TensorMismatch,
        type(None),
        np.ndarray,
    ]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ([1, 2], "not list"),
        (b"bytes", "not bytes"),
        (None, "not NoneType"),
        (np.array([object()]), "dtype object"),
        (np.zeros(3, "datetime64[s]"), "dtype datetime64"),
        (np.zeros(3, "float128" if hasattr(np, "float128") else "S3"), "dtype"),
        (np.zeros(3, [("a", "f4")]), "dtype"),
        (np.zeros(3, ">f4"), r"other byte order; give tensor.astype\('<f4'\)"),
        (np.ma.masked_array([1.0], [True]), "has a mask"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_sent(
    one: Any, tensor: Any, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        one.batch_put_tensor([("fine", numbers((1,))), ("refused", tensor)])
    assert not one.exists("refused")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"framework": "jax"}, "framework = 'jax': must be one of numpy, torch, cupy"),
        ({"device": "cuda"}, "give framework='torch' or 'cupy'"),
        ({"device": "tpu", "framework": "torch"}, "device = 'tpu'"),
        ({"device": "cpu", "framework": "cupy"}, "cupy has arrays on GPUs only"),
        ({"out": np.zeros(1), "device": "cpu"}, "out: is given"),
        ({"out": np.broadcast_to(np.zeros(1), (3,))}, "out: is read-only"),
        ({"out": as_strided(np.zeros(5), (3, 3), (8, 8))}, "share memory"),
        ({"out": b"x"}, "not bytes"),
    ],
)
def test_bad_wishes_are_refused_by_name(one: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        one.get_tensor("t", **options)
    with pytest.raises(InvalidArgument, match="outs: 1 for 2 keys"):
        one.batch_get_tensor(["a", "b"], outs=[np.zeros(1)])


def test_a_framework_that_is_missing_says_so(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="cupy is not installed"):
        one.get_tensor("t", framework="cupy")


# --- other frameworks and interfaces


class Shows:
    """A tensor that has an interface and nothing else."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.keep = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


def test_an_array_interface_is_enough(one: Any) -> None:
    array = numbers((3, 4, 5))[:, 1:3]
    one.put_tensor("shown", Shows(array, strides=array.strides))
    assert same(one.get_tensor("shown"), array)
    out = np.zeros((3, 2, 5), np.float32)
    one.get_tensor("shown", out=Shows(out))
    assert same(out, array)
    with pytest.raises(InvalidArgument, match="has a mask"):
        one.put_tensor("shown", Shows(array, mask=array))
    with pytest.raises(InvalidArgument, match="dtype >f4"):
        one.put_tensor("shown", Shows(array, typestr=">f4"))


class Capsule:
    """A tensor that has DLPack and nothing else."""

    def __init__(self, array: Any, old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("no such option")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("old", [True, False])
def test_dlpack_is_enough(one: Any, old: bool) -> None:
    for array in (
        numbers((3, 4, 5))[:, 1:3],
        numbers((), "int16"),
        numbers((2, 0)),
        numbers((9,), "complex64"),
    ):
        one.put_tensor("capsule", Capsule(array, old))
        assert same(one.get_tensor("capsule"), array)


def test_dlpack_is_written_to_only_if_it_says_that_it_may_be(one: Any) -> None:
    out = np.zeros((3,), np.float32)
    array = numbers((3,))
    one.put_tensor("capsule", array)
    with pytest.raises(InvalidArgument, match="read-only"):
        one.get_tensor("capsule", out=Capsule(out, old=True))
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        one.get_tensor("capsule", out=Capsule(out))
        assert same(out, array)


def test_a_capsule_gives_the_tensor_back_when_it_has_been_read() -> None:
    array = numbers((3,))
    before = sys.getrefcount(array)
    for old in (True, False):
        found = dlpack.read(Capsule(array, old))
        assert found.address == array.__array_interface__["data"][0]
        assert sys.getrefcount(array) > before
        del found
        assert sys.getrefcount(array) == before


class Elsewhere(Capsule):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (7, 0)


def test_a_device_that_is_not_known_is_refused(one: Any) -> None:
    with pytest.raises(InvalidArgument, match="DLPack's kind 7"):
        one.put_tensor("elsewhere", Elsewhere(numbers((1,))))


@needs_torch
@pytest.mark.parametrize("dtype", [d for d in ITEMSIZES if torch and hasattr(torch, d)])
def test_every_dtype_of_torch_is_kept(one: Any, dtype: str) -> None:
    raw = torch.frombuffer(bytearray(os.urandom(48 * ITEMSIZES[dtype])), dtype=torch.uint8)
    if dtype == "bool":
        raw = raw & 1
    tensor = raw.view(getattr(torch, dtype)).reshape(6, 8)
    one.put_tensor("torch", tensor)
    for options in ({"framework": "torch"}, {"like": tensor}, {"device": torch.device("cpu")}):
        assert same(one.get_tensor("torch", **options), tensor)
    out = torch.empty_like(tensor)
    assert one.get_tensor("torch", out=out) is out
    assert same(out, tensor)


@needs_torch
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 300, 70)])
def test_a_tensor_of_torch_comes_back_as_it_was(kv: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    kv.put_tensor("torch", tensor)
    found = kv.get_tensor("torch", framework="torch")
    assert same(found, tensor)
    found += 1  # it is the caller's own
    for view in (tensor.mT if tensor.ndim > 1 else tensor, tensor[..., :1] if shape else tensor):
        kv.put_tensor("torch", view)
        found = kv.get_tensor("torch", like=view)
        assert same(found, view)
        out = torch.zeros(view.shape)
        kv.get_tensor("torch", out=out)
        assert same(out, view)


@needs_torch
def test_strides_of_torch_are_kept(one: Any) -> None:
    tensor = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    one.put_tensor("channels", tensor)
    assert one.get_tensor("channels", framework="torch").stride() == tensor.stride()


@needs_torch
def test_what_torch_cannot_show_is_refused_with_what_to_do(one: Any) -> None:
    grad = torch.ones(3, requires_grad=True)
    with pytest.raises(InvalidArgument, match=r"requires grad; give tensor.detach\(\)"):
        one.put_tensor("torch", grad)
    with pytest.raises(InvalidArgument, match="requires grad"):
        one.get_tensor("torch", out=grad)
    with pytest.raises(InvalidArgument, match=r"give tensor.to_dense\(\)"):
        one.put_tensor("torch", torch.ones(3).to_sparse())
    with pytest.raises(InvalidArgument, match=r"on the device meta; give tensor.cpu\(\)"):
        one.put_tensor("torch", torch.ones(3, device="meta"))
    with pytest.raises(InvalidArgument, match="share memory"):
        one.get_tensor("torch", out=torch.ones(1).expand(3))
    assert one.put_tensor("torch", grad.detach()) == 1


@needs_torch
def test_lazy_conjugates_and_negatives_are_stored_as_they_read(one: Any) -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    one.put_tensor("conj", tensor.conj())
    assert same(one.get_tensor("conj", framework="torch"), tensor.conj().resolve_conj())
    one.put_tensor("neg", tensor.conj().imag)
    assert same(one.get_tensor("neg", framework="torch"), -tensor.imag)
    with pytest.raises(InvalidArgument, match="conjugated or negated"):
        one.get_tensor("conj", out=torch.zeros(5, dtype=torch.complex64).conj())


@needs_torch
def test_tensors_of_torch_and_numpy_are_the_same_to_the_store(one: Any) -> None:
    array = numbers((4, 5))
    one.put_tensor("shared", torch.from_numpy(array))
    assert same(one.get_tensor("shared"), array)
    out = torch.zeros(4, 5)
    one.put_tensor("shared", array)
    one.get_tensor("shared", out=out)
    assert same(out.numpy(), array)
    with pytest.raises(TensorMismatch, match=r"float32\[4, 5\], out is bfloat16\[4, 5\]"):
        one.get_tensor("shared", out=torch.zeros(4, 5, dtype=torch.bfloat16))


def test_cupy_arrays_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        pytest.skip(f"there is no GPU: {e}; scripts/check_gpu.py covers it")
    found = arrays.memory_of(cupy.arange(3))
    assert (found.dtype, found.device) == ("int64", 0)


# --- GPUs, with one that is not there


def test_a_gpus_array_is_read_after_what_is_under_way_on_its_stream(kv: Any, gpu: FakeCuda) -> None:
    data = numbers((64, 1000))
    array = gpu.array(np.zeros((64, 1000), np.float32), stream=77)
    array.write_later(data)
    assert kv.put_tensor("gpu", array) == 1
    assert same(kv.get_tensor("gpu"), data)


def test_a_gpus_out_has_arrived_when_the_call_returns(kv: Any, gpu: FakeCuda) -> None:
    data = numbers((64, 1000))
    kv.put_tensor("gpu", data)
    out = gpu.array(np.zeros((64, 1000), np.float32), stream=5)
    out.write_later(np.ones((64, 1000), np.float32))  # comes before, as it was started before
    assert kv.get_tensor("gpu", out=out) is out
    assert same(out.host, data)


def test_blocks_of_a_gpus_cache_are_gathered_and_scattered(kv: Any, gpu: FakeCuda) -> None:
    pool = numbers((8, 2, 16, 4, 64))
    blocks = [gpu.array(pool[:, :, i]) for i in range(16)]
    kv.batch_put_tensor({f"gpu{i}": block for i, block in enumerate(blocks)})
    other = np.zeros_like(pool)
    outs = [gpu.array(other[:, :, 15 - i]) for i in range(16)]
    kv.batch_get_tensor([f"gpu{i}" for i in range(16)], outs=outs)
    assert same(other[:, :, ::-1].copy(), pool)


def test_groups_overlap_and_stages_are_not_reused_too_early(
    far: Any, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", 100 * KIB)
    data = [numbers((40, 256)) for _ in range(9)]  # 40 KiB each: two in a stage
    arrays_ = [gpu.array(np.zeros_like(d), stream=3) for d in data]
    for array, contents in zip(arrays_, data, strict=True):
        array.write_later(contents)
    keys = [f"group{i}" for i in range(9)]
    assert far.batch_put_tensor(zip(keys, arrays_, strict=True)) == [1] * 9
    assert all(same(far.get_tensor(k), d) for k, d in zip(keys, data, strict=True))
    copies = [line.partition(" ")[0] for line in gpu.log]
    ahead = ["to_host"] * 2
    assert copies == [
        "pinned", *ahead, "wait", "pinned", *ahead, "wait", *ahead, "wait", *ahead, "wait",
        "to_host", "wait",
    ]  # fmt: skip
    gpu.log.clear()
    outs = [gpu.array(np.zeros_like(d), stream=4) for d in data]
    far.batch_get_tensor(keys, outs=outs)
    assert all(same(o.host, d) for o, d in zip(outs, data, strict=True))
    assert [line for line in gpu.log if line.startswith("pinned")] == []  # those of the puts
    assert gpu.pinned_bytes == 2 * 100 * KIB


def test_a_tensor_larger_than_a_stage_gets_memory_of_its_own(
    far: Any, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", 10 * KIB)
    data = [numbers((n,)) for n in (10, 5000, 10)]
    keys = ["s1", "s2", "s3"]
    far.batch_put_tensor(zip(keys, [gpu.array(d) for d in data], strict=True))
    outs = [gpu.array(np.zeros_like(d)) for d in data]
    far.batch_get_tensor(keys, outs=outs)
    assert all(same(o.host, d) for o, d in zip(outs, data, strict=True))


def test_host_and_gpu_tensors_mix_in_a_put_and_not_in_a_get(one: Any, gpu: FakeCuda) -> None:
    data = [numbers((100,)) for _ in range(3)]
    one.batch_put_tensor({"m0": data[0], "m1": gpu.array(data[1]), "m2": data[2]})
    assert all(same(one.get_tensor(f"m{i}"), d) for i, d in enumerate(data))
    with pytest.raises(InvalidArgument, match="all be on the host, or all on one GPU"):
        one.batch_get_tensor(["m0", "m1"], outs=[gpu.array(data[0]), np.zeros(100, np.float32)])


def test_outcomes_of_a_gpus_batch_are_per_key(far: Any, gpu: FakeCuda) -> None:
    data = numbers((10,))
    far.put_tensor("good", data)
    far.put("bad", b"x" * 500)
    outs = [gpu.array(np.zeros(10, np.float32)) for _ in range(3)]
    outs.append(gpu.array(np.zeros(11, np.float32)))
    with pytest.raises(BatchError) as e:
        far.batch_get_tensor(["good", "bad", "none", "good"], outs=outs)
    good, bad, none, shape = e.value.results
    assert good is outs[0]
    assert same(outs[0].host, data)
    assert none is None
    assert isinstance(bad, TensorMismatch)
    assert isinstance(shape, TensorMismatch)
    assert not outs[3].host.any()
    assert far.get_tensor("none", out=outs[0]) is None


def test_what_the_driver_refuses_is_an_error_and_leaves_nothing_behind(
    far: Any, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = gpu.array(numbers((10,)))
    far.put_tensor("refused", array)
    assert len(staging._stages) == 1

    def refuse(*_: Any) -> None:
        raise DeviceError("cuMemcpyDtoHAsync: an illegal address")

    monkeypatch.setattr(gpu, "gather", refuse)
    with pytest.raises(DeviceError, match="illegal address"):
        far.put_tensor("refused", array)
    assert staging._stages == []


def test_without_a_driver_a_gpus_array_is_refused(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = FakeCuda().array(numbers((3,)))
    monkeypatch.setattr(cuda, "_driver", None)
    try:
        cuda.CudaDriver()
    except P2PKVError:
        with pytest.raises(P2PKVError, match=r"needs NVIDIA's driver|cuInit"):
            one.put_tensor("gpu", array)


class GpuCapsule(Capsule):
    """DLPack on a GPU; notes for which stream it was asked."""

    asked: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options.pop("stream")
        return super().__dlpack__(**options)


def test_dlpack_on_a_gpu_is_ordered_before_the_stream_that_is_read_on(
    far: Any, gpu: FakeCuda
) -> None:
    data = numbers((30, 40))
    gpu.array(data)
    capsule = GpuCapsule(data)
    far.put_tensor("gpu-capsule", capsule)
    assert same(far.get_tensor("gpu-capsule"), data)
    assert capsule.asked == dlpack.LEGACY_STREAM
    assert "to_host 4800 on 1" in gpu.log


class Unwilling(Capsule):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not now")


def test_what_does_not_let_itself_be_read_says_why(one: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read by DLPack: not now"):
        one.put_tensor("unwilling", Unwilling(numbers((1,))))


class FakeCupy(types.ModuleType):
    """As much of cupy as is used, on the GPU that is not there."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__("cupy")

        class ndarray(FakeArray):
            def __init__(self, shape: Any, dtype: Any, memory: Any, strides: Any) -> None:
                super().__init__(gpu, np.ndarray(shape, dtype, memory, 0, strides), 9)
                gpu.has(self)

            def __setitem__(self, index: Any, source: FakeArray) -> None:
                gpu.put_on(9, lambda: self.host.__setitem__(index, source.host))

        def ascontiguousarray(array: FakeArray) -> FakeArray:
            copied = ndarray(
                array.host.shape, array.host.dtype, self.cuda.alloc(array.nbytes), None
            )
            copied[...] = array
            return copied

        self.ndarray = ndarray
        self.ascontiguousarray = ascontiguousarray
        self.cuda = types.SimpleNamespace(
            Device=lambda number: contextlib.nullcontext(),
            alloc=lambda size: np.zeros(size, np.uint8),
        )

    def array(self, data: Any) -> Any:
        made = self.ndarray(data.shape, data.dtype, self.cuda.alloc(data.nbytes), data.strides)
        made.host[...] = data
        return made


@pytest.fixture
def cupy(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy(gpu)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_arrays_are_made_on_the_gpu_with_the_strides_of_what_was_put(
    kv: Any, cupy: FakeCupy
) -> None:
    data = np.asfortranarray(numbers((20, 30)))
    kv.put_tensor("cupy", cupy.array(data))
    for options in (
        {"framework": "cupy"},
        {"like": cupy.array(data)},
        {"device": 0, "framework": "cupy"},
    ):
        found = kv.get_tensor("cupy", **options)
        assert isinstance(found, cupy.ndarray)
        assert same(found.host, data)
        assert found.host.strides == data.strides
    found = kv.batch_get_tensor(["cupy", "none"], framework="cupy")
    assert same(found[0].host, data)
    assert found[1] is None
    kv.put("cupy", TensorHeader("bfloat16", (1,)).encode() + b"ab")
    with pytest.raises(InvalidArgument, match="cupy has none; give framework='torch'"):
        kv.get_tensor("cupy", framework="cupy")


def test_arrays_in_many_runs_are_put_together_on_the_gpu(
    far: Any, cupy: FakeCupy, gpu: FakeCuda
) -> None:
    array = cupy.array(numbers((600, 10, 3)))
    array.host = array.host[:, 2:8]
    far.put_tensor("runs", array)
    assert same(far.get_tensor("runs"), np.ascontiguousarray(array.host))
    out = cupy.array(np.zeros((600, 10, 3), np.float32))
    whole, out.host = out.host, out.host[:, 2:8]
    assert far.get_tensor("runs", out=out) is out
    assert same(out.host, array.host)
    assert not whole[:, :2].any()
    assert sum("to_host" in line or "to_device" in line for line in gpu.log) == 2


def test_an_out_of_a_gpu_may_have_other_strides(far: Any, cupy: FakeCupy) -> None:
    data = numbers((20, 30))
    far.put_tensor("order", data)
    out = cupy.array(np.asfortranarray(np.zeros((20, 30), np.float32)))
    far.get_tensor("order", out=out)
    assert same(out.host, data)


# --- the driver's calls, to a library that does them with the host's memory

DRIVER = Path(__file__).parent / "native" / "fake_libcuda.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = str(tmp_path_factory.mktemp("driver") / "libcuda-fake.so")
    subprocess.run([compiler, "-Wall", "-shared", "-fPIC", "-o", library, str(DRIVER)], check=True)
    return library


def test_the_driver_is_called_with_what_it_expects(library: str) -> None:
    driver = cuda.CudaDriver(library)
    device = (ctypes.c_char * 100)()
    address = ctypes.addressof(device)
    pinned = driver.pinned(100)
    pinned[:] = bytes(range(100))
    place = address_of(pinned)
    driver.scatter(1, [(place, address, 60), (place + 60, address + 60, 40)], 7)
    back = memoryview(bytearray(50))
    driver.gather(0, [(address_of(back), address + 50, 50)], 7)
    assert bytes(back) == bytes(range(50, 100))
    assert driver.device_of((1 << 60) + address) == 1
    driver.mark(0, 7)()
    end = driver.register_host(pinned)
    end()
    del pinned
    assert ctypes.CDLL(library).left() == 0


def test_an_error_of_the_driver_is_raised_in_its_words(library: str) -> None:
    driver = cuda.CudaDriver(library)
    with pytest.raises(
        DeviceError, match=r"cuMemcpyDtoHAsync_v2: invalid handle \(CUDA error 400\)"
    ):
        driver.gather(0, [(1, 1, 1)], 8)
    with pytest.raises(DeviceError, match=r"cuDeviceGet: unknown error \(CUDA error 101\)"):
        driver.mark(2, 7)
    assert ctypes.CDLL(library).left() == 0
    with pytest.raises(ConfigError, match="needs NVIDIA's driver"):
        cuda.CudaDriver(library + ".not")


def test_the_fake_gpu_shows_what_a_program_without_waiting_would_see(gpu: FakeCuda) -> None:
    array = gpu.array(np.zeros(3), stream=1)
    array.write_later(np.ones(3))
    target = gpu.pinned(24)
    gpu.gather(0, [(address_of(target), array.address, 24)], 1)
    assert bytes(target) == bytes(24)
    synchronize([array])
    assert np.frombuffer(target).tolist() == [1, 1, 1]
    with pytest.raises(DeviceError, match="is not on a GPU"):
        gpu.gather(0, [(address_of(target), 1 << 40, 24)], 1)
    with pytest.raises(DeviceError, match="neither pinned nor registered"):
        gpu.gather(0, [(address_of(target) + 1, array.address, 24)], 1)


# --- layouts and headers


@st.composite
def views(draw: st.DrawFn) -> Any:
    """Any view that slices and transposes can give, of a small array."""
    array = np.arange(1 << 8, dtype=np.int32).reshape(draw(st.permutations([2, 4, 4, 8])))
    index = tuple(
        slice(
            draw(st.integers(0, 2)), draw(st.integers(0, 9)), draw(st.sampled_from([1, 2, 3, -1]))
        )
        if draw(st.booleans())
        else draw(st.integers(0, 1))
        for _ in range(draw(st.integers(0, 4)))
    )
    view = array[(*index, ...)]
    return view.transpose(draw(st.permutations(range(view.ndim))))


@given(array=views())
def test_the_runs_of_a_view_are_its_elements_in_the_stored_order(array: Any) -> None:
    layout = Layout(array.shape, array.strides, 4)
    assert layout.nbytes == array.nbytes
    if layout.reversed:
        return
    assert not layout.overlaps
    length, starts = layout.runs()
    assert length * len(starts) == array.nbytes
    whole = arrays.TensorMemory("int32", layout, array.__array_interface__["data"][0], array)
    found = b"".join(bytes(whole.view()[s : s + length]) for s in starts) if starts else b""
    order = layout.order or range(array.ndim)
    assert found == array.transpose(list(order)).tobytes()
    dense = packed(array.shape, 4, layout.order)
    assert dense.order == layout.order
    assert dense.runs() == ((array.nbytes, [0]) if array.size else (0, []))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(array=views(), data=st.data())
def test_any_view_comes_back_and_goes_into_any_other(
    one: Any, array: Any, data: st.DataObject
) -> None:
    one.put_tensor("any", array)
    assert same(one.get_tensor("any"), array)
    order = data.draw(st.permutations(range(array.ndim)))
    steps = [data.draw(st.sampled_from([1, 1, 2, -1])) for _ in order]
    room = np.zeros([array.shape[i] * abs(s) for i, s in zip(order, steps, strict=True)], np.int32)
    part = room[(*(slice(None, None, s) for s in steps), ...)]
    out = part.transpose(np.argsort(order)) if order else part
    assert one.get_tensor("any", out=out) is out
    assert same(out, array)


HEADERS = st.builds(
    TensorHeader,
    st.sampled_from(sorted(ITEMSIZES)),
    st.lists(st.integers(0, 5), max_size=8).map(tuple),
)


@given(header=HEADERS, data=st.data())
def test_a_header_is_read_as_it_was_written(header: TensorHeader, data: st.DataObject) -> None:
    order = data.draw(st.none() | st.permutations(range(len(header.shape))))
    header = TensorHeader(header.dtype, header.shape, tuple(order or ()))
    encoded = header.encode()
    assert len(encoded) % 64 == 0
    assert decode(encoded, len(encoded) + header.layout.nbytes, "k") == header
    with pytest.raises(CorruptValue, match="bytes for a tensor"):
        decode(encoded, len(encoded) + header.layout.nbytes + 1, "k")


@given(start=st.binary(max_size=200))
def test_no_bytes_make_a_reader_of_headers_fail_otherwise(start: bytes) -> None:
    for data in (start, TensorHeader("int8", ()).encode()[: PREFIX.size] + start):
        with pytest.raises((TensorMismatch, CorruptValue)):
            decode(data, 1 << 40, "k")


def header_with(*body: Any, version: int = 1) -> bytes:
    text = msgspec.msgpack.encode(body)
    return (PREFIX.pack(b"p2pkvT", version, len(text)) + text).ljust(1024, b"\0")


@pytest.mark.parametrize(
    ("header", "kind", "says"),
    [
        (header_with("float32", [1], version=2), TensorMismatch, "a tensor of version 2"),
        (header_with("float99", [1]), TensorMismatch, "unknown dtype 'float99'"),
        (header_with("float32", [-1]), CorruptValue, "not the header"),
        (header_with("float32", [1 << 62]), CorruptValue, "not the header"),
        (header_with("float32", [1] * 65), CorruptValue, "not the header"),
        (header_with("float32", [2, 2], [0, 0]), CorruptValue, "2 dimensions once each"),
        (header_with("float32", [2, 2], [0]), CorruptValue, "2 dimensions once each"),
        (header_with("float32", [1], [], 1), CorruptValue, "not the header"),
        (header_with("float32", [1 << 61, 1 << 61]), CorruptValue, "bytes for a tensor"),
        (header_with("x" * 1100, [1]), CorruptValue, "header of"),
    ],
)
def test_headers_that_make_no_sense_are_named(
    header: bytes, kind: type[P2PKVError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        decode(header, 1 << 40, "k")


def test_limits_of_shapes_are_kept_when_storing(one: Any) -> None:
    with pytest.raises(InvalidArgument, match="65 dimensions, limit 64"):
        TensorHeader.of("int8", Layout((1,) * 65, (1,) * 65, 1))
    with pytest.raises(InvalidArgument, match="dtype float99"):
        TensorHeader.of("float99", Layout((), (), 1))


@given(sizes=st.lists(st.integers(0, 12), max_size=20), keys_max=st.integers(1, 5))
def test_groups_are_neighbours_that_fit_together(sizes: list[int], keys_max: int) -> None:
    found = staging.groups(sizes, keys_max, 10)
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(len(sizes)))
    for part in found:
        assert sum(sizes[part]) <= 10 or part.stop - part.start == 1
        assert 0 < part.stop - part.start <= keys_max
