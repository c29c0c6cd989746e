"""Buffers on their way: copies without the GIL where that pays, and views with a last user."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

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
