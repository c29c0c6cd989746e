"""Reading DLPack capsules: the interface by which frameworks show each other their tensors.

See https://dmlc.github.io/dlpack/latest/ (version 1.1, and capsules from before 1.0).
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

from p2pkv.errors import InvalidArgument
from p2pkv.tensor_header import FLOAT8

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
CUDA_MANAGED: Final = 13
LEGACY_STREAM: Final = 1
READ_ONLY: Final = 1
VERSION: Final = (1, 0)
"""The newest layout of a capsule that is understood."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL, _FLOAT8 = 6, 7


class DlTensor(NamedTuple):
    """What a capsule says. ``strides`` are in elements; None: C order."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    address: int
    device: int | None
    """The number of the GPU; None: host memory."""
    stream: int
    readonly: bool
    keep: Any


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid: Any = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def read(tensor: Any) -> DlTensor:
    """What an object with ``__dlpack__`` is. Raises InvalidArgument.

    Work on a GPU tensor that its producer has under way comes before anything that is put on
    ``stream`` afterwards. A tensor that does not say whether it may be changed counts as
    read-only.
    """
    kind, _ = tensor.__dlpack_device__()
    on_gpu = int(kind) in (CUDA, CUDA_MANAGED)
    if not on_gpu and int(kind) not in (CPU, CUDA_HOST):
        raise InvalidArgument(f"tensor: is on a device of DLPack's kind {int(kind)}")
    options: dict[str, Any] = {"stream": LEGACY_STREAM} if on_gpu else {}
    try:
        capsule = tensor.__dlpack__(max_version=VERSION, **options)
    except TypeError:  # from before DLPack 1.0
        capsule = tensor.__dlpack__(**options)
    except (BufferError, RuntimeError) as e:
        raise InvalidArgument(f"tensor: cannot be read by DLPack: {e}") from None
    return _described(capsule, on_gpu)


def _described(capsule: Any, on_gpu: bool) -> DlTensor:
    if _is_valid(capsule, b"dltensor_versioned"):
        held = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if held.major != VERSION[0]:
            raise InvalidArgument(f"tensor: speaks DLPack {held.major}.{held.minor}, not 1")
        found, readonly = held.tensor, bool(held.flags & READ_ONLY)
    else:
        found, readonly = _Tensor.from_address(_pointer(capsule, b"dltensor")), True
    shape = tuple(found.shape[: found.ndim])
    strides = tuple(found.strides[: found.ndim]) if found.strides else None
    return DlTensor(
        dtype=_dtype(found.dtype),
        shape=shape,
        strides=strides,
        address=(found.data or 0) + found.byte_offset,
        device=found.device_id if on_gpu else None,
        stream=LEGACY_STREAM,
        readonly=readonly,
        keep=capsule,  # which gives the tensor back when it goes, as nobody has taken it over
    )


def _dtype(dtype: _DataType) -> str:
    code, bits, lanes = dtype.code, dtype.bits, dtype.lanes
    if lanes == 1 and code in _KINDS:
        return f"{_KINDS[code]}{bits}"
    if lanes == 1 and bits == 8 and code == _BOOL:
        return "bool"
    if lanes == 1 and bits == 8 and 0 <= code - _FLOAT8 < len(FLOAT8):
        return f"float8_{FLOAT8[code - _FLOAT8]}"
    return f"of DLPack's code {code} with {bits} bits and {lanes} lanes"
