"""The commit of a batch of objects in one call: what ``catalog`` does for each, in C."""

from __future__ import annotations

import ctypes
from typing import Any

from p2pkv._native import _python_function
from p2pkv._native.index import Writer

_commit = _python_function(
    14,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.py_object,
    ctypes.py_object,
    ctypes.py_object,
    ctypes.py_object,
    ctypes.c_ulonglong,
)


def commit_plain(
    published: Writer | None,
    arena: int,
    items: list[Any],
    buckets: dict[int, Any],
    plain: Any,
    states: tuple[Any, ...],
    version: int,
) -> list[Any] | None:
    """Makes allocated objects visible in their buckets, and publishes them if there is an index.

    Their versions follow ``version``; ``arena`` is the address of its memory, ``plain`` the options
    of a put that has none, ``states`` are ALLOCATED and COMMITTED; or nothing where the objects are
    new, without options, and have state, version and stamp already. The objects that were replaced;
    or None, and nothing was done: an object is not allocated, has options or a long key, or would
    replace one with options, pins or a time to live, or two have one key.
    """
    index = 0 if published is None else published.address
    replaced: list[Any] | None = _commit(index, arena, items, buckets, plain, states, version)
    return replaced
