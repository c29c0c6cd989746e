"""Tensors of any framework as memory: where their elements are, and arrays made of such memory.

numpy, torch, and whatever has ``__cuda_array_interface__``, ``__dlpack__`` or
``__array_interface__``. No framework is imported that the program does not use, save for numpy.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

from p2pkv import dlpack
from p2pkv.buffers import address_of
from p2pkv.errors import ConfigError, InvalidArgument
from p2pkv.layouts import Layout, packed
from p2pkv.tensor_header import ALIGNMENT, ITEMSIZES, TensorHeader

GATHER_MIN = 4 << 10
"""Runs of elements shorter than this are not gathered one by one but copied together first."""

HOST = -1
"""In the place of a device's number."""

FRAMEWORKS = ("numpy", "torch", "cupy")


class TensorMemory(NamedTuple):
    """Where a tensor's elements are. ``keep`` keeps them there."""

    dtype: str
    layout: Layout
    address: int
    """Of the first element."""
    keep: Any
    readonly: bool = False
    device: int = HOST
    """The number of the GPU."""
    stream: int = 0
    """The CUDA stream in whose order the elements are written and read."""

    @property
    def header(self) -> TensorHeader:
        return TensorHeader.of(self.dtype, self.layout)

    def view(self) -> memoryview:
        """All from the first element to the last, with the gaps between; in host memory."""
        block: Any = (ctypes.c_char * self.layout.span).from_address(self.address)
        block.keep = self.keep
        return memoryview(block).cast("B")


def numpy() -> Any:
    """The module. Raises ConfigError where it is missing."""
    try:
        import numpy
    except ImportError:
        raise ConfigError("tensors need numpy: pip install 'p2pkv[tensors]'") from None
    return numpy


# --- what a tensor is


def memory_of(tensor: Any, *, writing: bool = False) -> TensorMemory:
    """Where a tensor's elements are; ``writing``: to be changed. Raises InvalidArgument."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        memory = _of_torch(tensor, torch, writing)
    elif isinstance(tensor, (numpy().ndarray, numpy().generic)):
        memory = _of_numpy(tensor)
    elif hasattr(tensor, "__cuda_array_interface__"):
        memory = _of_interface(tensor, tensor.__cuda_array_interface__, device=True)
    elif hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        memory = _of_dlpack(tensor)
    elif hasattr(tensor, "__array_interface__"):
        memory = _of_interface(tensor, tensor.__array_interface__, device=False)
    else:
        raise InvalidArgument(
            f"tensor: must be of numpy, torch or cupy, or have __dlpack__, "
            f"__cuda_array_interface__ or __array_interface__, not {type(tensor).__name__}"
        )
    if writing and memory.readonly:
        raise InvalidArgument("out: is read-only")
    if writing and memory.layout.overlaps and memory.layout.nbytes:
        raise InvalidArgument("out: has elements that share memory, as broadcast tensors do")
    return memory


def _of_torch(tensor: Any, torch: Any, writing: bool) -> TensorMemory:
    if tensor.requires_grad:
        raise InvalidArgument("tensor: requires grad; give tensor.detach()")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidArgument("tensor: is sparse or quantized; give tensor.to_dense(), .int_repr()")
    if tensor.is_conj() or tensor.is_neg():
        if writing:
            raise InvalidArgument("out: is a lazily conjugated or negated view")
        tensor = tensor.resolve_conj().resolve_neg()
    dtype = _known_dtype(str(tensor.dtype).removeprefix("torch."))
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise InvalidArgument(f"tensor: is on the device {kind}; give tensor.cpu()")
    size = ITEMSIZES[dtype]
    layout = Layout(tuple(tensor.shape), tuple(s * size for s in tensor.stride()), size)
    if kind == "cpu":
        return TensorMemory(dtype, layout, tensor.data_ptr(), tensor)
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return TensorMemory(
        dtype, layout, tensor.data_ptr(), tensor, False, tensor.device.index, stream
    )


def _of_numpy(tensor: Any) -> TensorMemory:
    np = numpy()
    if isinstance(tensor, np.ma.MaskedArray):
        raise InvalidArgument("tensor: has a mask, which is not stored; give tensor.filled()")
    array = np.asarray(tensor)
    if not array.dtype.isnative:
        raise InvalidArgument(
            f"dtype {array.dtype}: has the other byte order; give tensor.astype('"
            f"{array.dtype.newbyteorder('=').str}')"
        )
    dtype = _known_dtype(array.dtype.name)
    address, readonly = array.__array_interface__["data"]
    layout = Layout(array.shape, array.strides, array.itemsize)
    return TensorMemory(
        dtype, layout, address, array, readonly or not isinstance(tensor, np.ndarray)
    )


def _of_interface(tensor: Any, interface: dict[str, Any], device: bool) -> TensorMemory:
    """See numpy's array interface, and numba's CUDA array interface, version 3."""
    if interface.get("mask") is not None:
        raise InvalidArgument("tensor: has a mask, which is not stored")
    dtype = _dtype_of_typestr(interface["typestr"])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    size = ITEMSIZES[dtype]
    layout = packed(shape, size) if strides is None else Layout(shape, tuple(strides), size)
    address, readonly = interface["data"]
    if not device:
        return TensorMemory(dtype, layout, address, tensor, readonly)
    from p2pkv import cuda

    number = cuda.driver().device_of(address) if layout.nbytes else 0
    stream = interface.get("stream") or cuda.LEGACY_STREAM
    return TensorMemory(dtype, layout, address, tensor, readonly, number, stream)


def _of_dlpack(tensor: Any) -> TensorMemory:
    found = dlpack.read(tensor)
    dtype = _known_dtype(found.dtype)
    size = ITEMSIZES[dtype]
    strides = found.strides
    layout = (
        packed(found.shape, size)
        if strides is None
        else Layout(found.shape, tuple(s * size for s in strides), size)
    )
    device = HOST if found.device is None else found.device
    return TensorMemory(
        dtype, layout, found.address, found.keep, found.readonly, device, found.stream
    )


def _dtype_of_typestr(text: str) -> str:
    kinds = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
    order, kind, size = text[:1], kinds.get(text[1:2], ""), text[2:]
    native = "<" if sys.byteorder == "little" else ">"
    if order not in ("|", native) or not size.isdigit():
        kind = ""
    return _known_dtype("bool" if kind == "bool" else f"{kind}{8 * int(size)}" if kind else text)


def _known_dtype(name: str) -> str:
    if name not in ITEMSIZES:
        raise InvalidArgument(f"dtype {name}: must be one of {', '.join(sorted(ITEMSIZES))}")
    return name


# --- host memory


def host_parts(memory: TensorMemory) -> tuple[TensorHeader, tuple[memoryview, ...]]:
    """The elements as they are stored, and their header; copied first only where runs are short."""
    layout = memory.layout
    length, starts = (0, []) if layout.reversed else layout.runs()
    if layout.reversed or (len(starts) > 1 and length < GATHER_MIN):
        copied = numpy().ascontiguousarray(_raw(memory))
        layout = packed(layout.shape, layout.itemsize)
        whole = memoryview(copied.reshape(-1).view("u1"))
        return TensorHeader.of(memory.dtype, layout), (whole,) if layout.nbytes else ()
    return memory.header, _runs(memory, length, starts)


def host_targets(memory: TensorMemory) -> tuple[memoryview, ...] | None:
    """Where stored elements go, or None if they lie too scattered: then ``assign`` them."""
    if memory.layout.reversed:
        return None
    length, starts = memory.layout.runs()
    if len(starts) > 1 and length < GATHER_MIN:
        return None
    return _runs(memory, length, starts)


def _runs(memory: TensorMemory, length: int, starts: list[int]) -> tuple[memoryview, ...]:
    if not starts:
        return ()
    whole = memory.view()
    return tuple([whole[start : start + length] for start in starts])


def assign(memory: TensorMemory, source: TensorMemory) -> None:
    """Copy the elements of one tensor to another of the same dtype and shape; on the host."""
    numpy().copyto(_raw(memory), _raw(source))


def _raw(memory: TensorMemory) -> Any:
    """As numpy sees it, with elements that are just bytes."""
    shape, strides, itemsize = memory.layout
    if 0 in shape:
        return numpy().empty(shape, f"V{itemsize}")
    lowest = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    extent = itemsize + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    block: Any = (ctypes.c_char * extent).from_address(memory.address + lowest)
    block.keep = memory.keep
    return numpy().ndarray(shape, f"V{itemsize}", block, -lowest, strides)


def over(header: TensorHeader, data: memoryview) -> TensorMemory:
    """Packed elements, as a tensor's memory."""
    address = address_of(data) if len(data) else 0
    return TensorMemory(header.dtype, header.layout, address, data)


def fresh_bytes(size: int) -> memoryview:
    """Writable memory that begins at a multiple of 64 bytes."""
    np = numpy()
    block = np.empty(size + ALIGNMENT, np.uint8)
    skip = -block.ctypes.data % ALIGNMENT
    return memoryview(block)[skip : skip + size]


# --- arrays out of memory


def framework_of(tensor: Any) -> str:
    """Which of FRAMEWORKS makes arrays like this one."""
    name = type(tensor).__module__.partition(".")[0]
    if name in FRAMEWORKS:
        return name
    return "cupy" if hasattr(tensor, "__cuda_array_interface__") else "numpy"


def host_array(framework: str, header: TensorHeader, data: memoryview) -> Any:
    """A tensor of numpy or torch over packed elements. Raises InvalidArgument, ConfigError."""
    return (_torch_array if framework == "torch" else _numpy_array)(header, data)


def _numpy_array(header: TensorHeader, data: memoryview) -> Any:
    np = numpy()
    shape, strides, _ = header.layout
    if header.dtype == "bfloat16" or header.dtype.startswith("float8"):
        try:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, header.dtype))
        except (ImportError, AttributeError):
            raise InvalidArgument(
                f"dtype {header.dtype}: numpy has it only with ml_dtypes (pip install ml_dtypes); "
                "or give framework='torch'"
            ) from None
    else:
        dtype = np.dtype(header.dtype)
    if not len(data):
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, data, 0, strides)


def torch_dtype(torch: Any, name: str) -> Any:
    """Raises InvalidArgument where this version of torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype {name}: this version of torch has none")
    return dtype


def _torch_array(header: TensorHeader, data: memoryview) -> Any:
    torch = imported("torch")
    dtype = torch_dtype(torch, header.dtype)
    shape, strides, itemsize = header.layout
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    return flat.as_strided(shape, [s // itemsize for s in strides])


def device_array(framework: str, header: TensorHeader, device: int) -> Any:
    """An uninitialized tensor of torch or cupy on a GPU, with the strides of what is stored."""
    shape, strides, itemsize = header.layout
    if framework == "torch":
        torch = imported("torch")
        dtype = torch_dtype(torch, header.dtype)
        steps = [s // itemsize for s in strides]
        return torch.empty_strided(shape, steps, dtype=dtype, device=f"cuda:{device}")
    cupy = imported("cupy")
    if header.dtype == "bfloat16" or header.dtype.startswith("float8"):
        raise InvalidArgument(f"dtype {header.dtype}: cupy has none; give framework='torch'")
    with cupy.cuda.Device(device):
        memory = cupy.cuda.alloc(max(1, header.layout.nbytes))
        return cupy.ndarray(shape, header.dtype, memory, strides)


def imported(framework: str) -> Any:
    """The module of a framework. Raises ConfigError where it is missing."""
    try:
        return __import__(framework)
    except ImportError:
        raise ConfigError(f"framework='{framework}': {framework} is not installed") from None


def place_of(device: Any, like: Any, framework: str | None) -> tuple[str, int]:
    """Framework and device number (HOST) that are asked for. Raises InvalidArgument."""
    if framework is None:
        asked_torch = type(device).__module__.partition(".")[0] == "torch"
        framework = "torch" if asked_torch else "numpy" if like is None else framework_of(like)
    if framework not in FRAMEWORKS:
        raise InvalidArgument(f"framework = {framework!r}: must be one of {', '.join(FRAMEWORKS)}")
    if device is not None:
        number = _device_number(device)
    elif like is not None and framework == framework_of(like):
        number = memory_of(like).device
    else:
        number = 0 if framework == "cupy" else HOST
    if framework == "numpy" and number != HOST:
        raise InvalidArgument(f"device = {device!r}: give framework='torch' or 'cupy' with it")
    if framework == "cupy" and number == HOST:
        raise InvalidArgument(f"device = {device!r}: cupy has arrays on GPUs only")
    return framework, number


def _device_number(device: Any) -> int:
    """HOST for "cpu", the number for 1, "cuda" (0), "cuda:1", or a device of torch or cupy."""
    if isinstance(device, int) and device >= 0:
        return device
    text = f"cuda:{device.id}" if hasattr(device, "id") else str(device)
    kind, _, number = text.partition(":")
    if kind == "cpu":
        return HOST
    if kind == "cuda" and (number.isdigit() or not number):
        return int(number or 0)
    raise InvalidArgument(f"device = {device!r}: must be 'cpu', 'cuda', 'cuda:N' or a number")
