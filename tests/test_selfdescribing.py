"""Values that say which write made them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pkv.testing.selfdescribing import Fault, Reading, make, read

names = st.text("abc/.-0123456789", min_size=1, max_size=20)


@given(names, names, st.integers(0, 5000))
def test_a_value_is_recognized(key: str, tag: str, size: int) -> None:
    value = make(key, tag, size)
    assert read(key, value) == Reading(tag, None)
    assert size <= len(value) <= max(size, 60)


def test_another_key_s_value_is_foreign() -> None:
    assert read("b", make("a", "t1", 500)) == Reading("t1", Fault.FOREIGN)


@pytest.mark.parametrize("size", [100, 4096, 70_000])
def test_a_mixture_of_two_writes_is_torn_wherever_the_seam_is(size: int) -> None:
    old, new = make("k", "t1", size), make("k", "t2", size)
    for seam in random.Random(1).sample(range(16, size - 16), 50):
        assert read("k", new[:seam] + old[seam:]).fault is Fault.TORN


@given(st.binary(max_size=200))
def test_any_other_bytes_are_torn(data: bytes) -> None:
    assert read("k", data).fault is Fault.TORN


@pytest.mark.parametrize(
    "head", [b"t|999999999999999999999|k|", b"t|-1|k|", b"t||k|", b"|||", b"t|1e3|k|"]
)
def test_a_size_that_cannot_be_is_torn(head: bytes) -> None:
    assert read("k", head).fault is Fault.TORN


def test_a_truncated_value_is_torn() -> None:
    value = make("k", "t", 1000)
    assert read("k", value[:-1]).fault is Fault.TORN
    assert read("k", value + b"x").fault is Fault.TORN
