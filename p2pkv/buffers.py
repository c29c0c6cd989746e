"""Buffers on their way: copies without the GIL where that pays, and views with a last user."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

OFF_GIL_MIN = 256 << 10
"""From here on a copy takes longer than giving the GIL away and taking it back."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` into ``target``; both contiguous bytes of the same length."""
    n = len(source)
    if n < OFF_GIL_MIN or source.readonly or target.readonly:
        target[:] = source
        return
    kind = ctypes.c_char * n
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), n)


class Run:
    """A piece of the arena. ``done`` gives its objects' tokens back; any thread may call it."""

    __slots__ = ("done", "view")

    def __init__(self, view: memoryview, done: Callable[[], None]) -> None:
        self.view = view
        self.done = done


class Lending:
    """Notices when the last user of a lent view lets go of it.

    The user may be ZeroMQ, which drops its reference on a thread of its own when the bytes have
    left; ``Run.done`` is called there.
    """

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[memoryview]] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, run: Run) -> memoryview:
        """The run's view; the run itself forgets it."""
        view, done = run.view, run.done
        run.view = memoryview(b"")
        lent, mark = self._lent, id(view)

        def returned(_: object) -> None:
            lent.pop(mark, None)
            done()

        lent[mark] = weakref.ref(view, returned)
        return view


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI (PEP 688 gives Python code no address)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer: Any = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer: Any = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer lies, read-only or not; valid as long as ``view`` is held."""
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))
