"""Copying bytes, and noticing when a lent view is let go of."""

from __future__ import annotations

import gc
import random

import pytest

from p2pkv.buffers import OFF_GIL_MIN, Lending, Run, copy


@pytest.mark.parametrize("size", [0, 1, OFF_GIL_MIN - 1, OFF_GIL_MIN, OFF_GIL_MIN + 1])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_copy_is_the_same_bytes(size: int, kind: type) -> None:
    source = kind(random.Random(size).randbytes(size))
    target = bytearray(size + 2)
    copy(memoryview(target)[1:-1], memoryview(source))
    assert target == b"\0" + source + b"\0"


@pytest.mark.parametrize("size", [4, OFF_GIL_MIN])
def test_nothing_is_copied_into_memory_that_is_read_only(size: int) -> None:
    with pytest.raises(TypeError):
        copy(memoryview(bytes(size)), memoryview(bytearray(size)))


def test_a_lent_view_is_returned_when_its_last_user_lets_go() -> None:
    lending, returned = Lending(), []
    run = Run(memoryview(bytearray(b"abc")), lambda: returned.append("run"))
    view = lending.lend(run)
    other = view
    assert (bytes(view), bytes(run.view), len(lending)) == (b"abc", b"", 1)
    del view
    gc.collect()
    assert returned == []
    assert bytes(other) == b"abc"
    del other
    gc.collect()
    assert returned == ["run"]
    assert len(lending) == 0
