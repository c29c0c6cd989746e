from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from p2pkv.allocator import GRANULE, Allocator, bin_of, round_up

KIB = 1024


def test_a_new_memory_is_one_free_extent() -> None:
    a = Allocator(64 * KIB)
    assert (a.size, a.free_bytes, a.used_bytes, a.largest_free) == (65536, 65536, 0, 65536)
    assert (a.free_extents, a.used_extents, a.fragmentation) == (1, 0, 0.0)
    a.validate()


def test_size_is_rounded_down_to_whole_granules() -> None:
    assert Allocator(GRANULE + 63).size == GRANULE


def test_a_memory_smaller_than_a_granule_is_refused() -> None:
    with pytest.raises(ValueError, match="size = 63: must be at least 64"):
        Allocator(GRANULE - 1)


@pytest.mark.parametrize(("size", "rounded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_allocations_take_whole_granules(size: int, rounded: int) -> None:
    a = Allocator(KIB)
    offset = a.alloc(size)
    assert offset == 0
    assert a.size_of(offset) == a.used_bytes == rounded == round_up(size)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_not_positive_are_refused(size: int) -> None:
    a = Allocator(KIB)
    with pytest.raises(ValueError, match="must be positive"):
        a.alloc(size)
    with pytest.raises(ValueError, match="must be positive"):
        a.alloc_batch([64, size])
    assert a.used_extents == 0


def test_consecutive_allocations_are_adjacent_and_ascending() -> None:
    a = Allocator(64 * KIB)
    assert [a.alloc(4096) for _ in range(8)] == [4096 * i for i in range(8)]


def test_the_whole_memory_can_be_allocated_and_one_granule_more_not() -> None:
    a = Allocator(64 * KIB)
    assert a.alloc(64 * KIB + 1) is None
    assert a.alloc(64 * KIB) == 0
    assert (a.free_bytes, a.largest_free, a.fragmentation) == (0, 0, 0.0)
    assert a.alloc(1) is None
    a.validate()


def test_a_free_extent_of_exactly_the_size_is_found() -> None:
    """Plain TLSF rounds the request up and would miss it: 65 granules are inside a bin."""
    a = Allocator(3 * 65 * GRANULE)
    first, middle, last = (a.alloc(65 * GRANULE) for _ in range(3))
    assert first is not None
    assert middle is not None
    a.free(middle)
    assert a.alloc(65 * GRANULE) == middle
    assert last == 130 * GRANULE


def test_a_larger_extent_of_the_same_bin_is_found() -> None:
    a = Allocator(67 * GRANULE)
    assert bin_of(66 * GRANULE) == bin_of(67 * GRANULE)
    assert a.alloc(66 * GRANULE) == 0
    assert a.free_bytes == GRANULE


def test_an_extent_of_the_same_bin_that_is_too_small_is_not_taken() -> None:
    a = Allocator(65 * GRANULE)
    assert bin_of(66 * GRANULE) == bin_of(65 * GRANULE)
    assert a.alloc(66 * GRANULE) is None


def test_bins_grow_with_the_size_and_split_each_power_of_two_in_sixteen() -> None:
    bins = [bin_of(n * GRANULE) for n in range(1, 5000)]
    assert bins == sorted(bins)
    assert [bin_of(n * GRANULE) for n in range(32)] == list(range(32))
    assert len({bin_of(n * GRANULE) for n in range(1024, 2048)}) == 16
    assert bin_of(2048 * GRANULE) == bin_of(2047 * GRANULE) + 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_become_one_extent(order: tuple[int, ...]) -> None:
    a = Allocator(3 * KIB)
    offsets = [a.alloc(KIB) for _ in range(3)]
    merged = 0
    for i in order:
        offset = offsets[i]
        assert offset is not None
        merged = a.free(offset)
        a.validate()
    assert merged == 3 * KIB
    assert a.free_extents == 1


def test_free_answers_the_size_of_the_extent_it_became() -> None:
    a = Allocator(4 * KIB)
    a.alloc_batch([KIB] * 4)
    assert a.free(0) == KIB
    assert a.free(2 * KIB) == KIB
    assert a.free(KIB) == 3 * KIB


def test_fragmentation_is_the_share_outside_the_largest_free_extent() -> None:
    a = Allocator(4 * KIB)
    a.alloc_batch([KIB] * 4)
    a.free(0)
    a.free(2 * KIB)
    assert (a.free_bytes, a.largest_free, a.fragmentation) == (2 * KIB, KIB, 0.5)


@pytest.mark.parametrize("offset", [64, -64, 1, 1 << 40])
def test_freeing_what_was_not_allocated_raises(offset: int) -> None:
    a = Allocator(KIB)
    a.alloc(128)
    with pytest.raises(ValueError, match=f"offset = {offset}: not the start"):
        a.free(offset)
    with pytest.raises(ValueError, match="not the start"):
        a.size_of(offset)
    a.validate()


def test_freeing_twice_raises() -> None:
    a = Allocator(KIB)
    a.alloc(64)
    a.free(0)
    with pytest.raises(ValueError, match="offset = 0: not the start"):
        a.free(0)


def test_a_batch_lies_in_one_run_if_there_is_one() -> None:
    a = Allocator(64 * KIB)
    a.alloc_batch([KIB] * 8)
    for hole in (0, 2, 4):
        a.free(hole * KIB)
    assert a.alloc_batch([1000, 64, 1]) == [8 * KIB, 9 * KIB, 9 * KIB + 64]
    a.validate()


def test_a_batch_without_a_run_is_scattered_over_the_holes() -> None:
    a = Allocator(4 * KIB)
    a.alloc_batch([KIB] * 4)
    a.free(0)
    a.free(2 * KIB)
    offsets = a.alloc_batch([KIB, KIB])
    assert sorted(offsets or []) == [0, 2 * KIB]


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    a = Allocator(4 * KIB)
    a.alloc_batch([KIB] * 4)
    a.free(0)
    a.free(2 * KIB)
    assert a.alloc_batch([KIB, KIB, 64]) is None
    assert (a.used_extents, a.free_bytes) == (2, 2 * KIB)
    a.validate()


def test_an_extent_is_cut_into_several_and_what_is_left_stays_one() -> None:
    a = Allocator(4 * KIB)
    whole = a.alloc(KIB)
    assert whole == 0
    assert a.split(whole, [100, 64]) == [0, 128]
    assert [a.size_of(offset) for offset in (0, 128, 192)] == [128, 64, KIB - 192]
    assert a.split(192, [KIB - 192]) == [192], "nothing is left"
    assert a.used_bytes == KIB
    a.validate()
    a.free_batch([0, 128, 192])
    assert a.free_extents == 1


def test_an_extent_is_cut_into_equal_parts() -> None:
    a = Allocator(4 * KIB)
    a.alloc(KIB)
    assert a.split(0, [128] * 4) == [0, 128, 256, 384]
    a.validate()


@pytest.mark.parametrize("sizes", [[KIB, 1], [0], [64, -1]])
def test_what_cannot_be_cut_off_changes_nothing(sizes: list[int]) -> None:
    a = Allocator(4 * KIB)
    a.alloc(KIB)
    with pytest.raises(ValueError, match=r"the extent at 0 has 1024|must be positive"):
        a.split(0, sizes)
    with pytest.raises(ValueError, match="not the start of an allocated extent"):
        a.split(64, [64])
    assert a.split(0, []) == []
    assert (a.size_of(0), a.used_extents) == (KIB, 1)


def test_an_empty_batch_is_nothing() -> None:
    a = Allocator(KIB)
    assert a.alloc_batch([]) == []
    assert a.free_batch([]) == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 3]])
def test_a_freed_batch_answers_the_largest_extent_that_came_of_it(order: list[int]) -> None:
    a = Allocator(6 * KIB)
    a.alloc_batch([KIB] * 6)
    assert a.free_batch([i * KIB for i in order]) == (4 * KIB if len(order) == 4 else KIB)
    a.validate()


@pytest.mark.parametrize("bad", [[0, KIB, 0], [0, KIB, 64]])
def test_a_freed_batch_with_a_double_or_foreign_extent_changes_nothing(bad: list[int]) -> None:
    a = Allocator(4 * KIB)
    a.alloc_batch([KIB] * 4)
    with pytest.raises(ValueError, match="not the start"):
        a.free_batch(bad)
    assert a.used_extents == 4
    a.validate()


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that knows which granule belongs to whom."""

    GRANULES = 300
    extents: Any = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(self.GRANULES * GRANULE)
        self.owner: list[int | None] = [None] * self.GRANULES

    def runs(self) -> list[int]:
        free = "".join("x" if owner is not None else "." for owner in self.owner)
        return [len(run) for run in free.split("x") if run]

    def note(self, offset: int, size: int) -> None:
        first, count = offset // GRANULE, -(-size // GRANULE)
        assert offset % GRANULE == 0
        assert self.owner[first : first + count] == [None] * count
        self.owner[first : first + count] = [offset] * count

    def forget(self, offset: int) -> None:
        assert offset in self.owner
        self.owner = [None if owner == offset else owner for owner in self.owner]

    @rule(target=extents, size=st.integers(1, 80 * GRANULE))
    def alloc(self, size: int) -> Any:
        fits = max(self.runs(), default=0) * GRANULE >= size
        offset = self.allocator.alloc(size)
        assert (offset is not None) == fits
        if offset is None:
            return multiple()
        self.note(offset, size)
        return offset

    @rule(target=extents, sizes=st.lists(st.integers(1, 20 * GRANULE), max_size=8))
    def alloc_batch(self, sizes: list[int]) -> Any:
        total = sum(-(-size // GRANULE) for size in sizes)
        one_run = max(self.runs(), default=0) >= total
        offsets = self.allocator.alloc_batch(sizes)
        if offsets is None:
            assert not one_run
            return multiple()
        for offset, size in zip(offsets, sizes, strict=True):
            self.note(offset, size)
        if one_run and sizes:
            assert offsets[-1] - offsets[0] == sum(round_up(size) for size in sizes[:-1])
        return multiple(*offsets)

    @rule(offset=consumes(extents))
    def free(self, offset: int) -> None:
        self.forget(offset)
        merged = self.allocator.free(offset)
        assert merged // GRANULE in self.runs()

    @rule(offsets=st.lists(consumes(extents), max_size=6))
    def free_batch(self, offsets: list[int]) -> None:
        for offset in offsets:
            self.forget(offset)
        largest = self.allocator.free_batch(offsets)
        assert largest // GRANULE in [0, *self.runs()]

    @rule(offset=st.integers(-1, GRANULES).map(lambda n: n * GRANULE))
    def foreign_free(self, offset: int) -> None:
        if offset not in self.owner:
            with pytest.raises(ValueError, match="not the start"):
                self.allocator.free(offset)

    @invariant()
    def figures_agree(self) -> None:
        self.allocator.validate()
        runs = self.runs()
        assert self.allocator.free_bytes == sum(runs) * GRANULE
        assert self.allocator.largest_free == max(runs, default=0) * GRANULE
        assert self.allocator.free_extents == len(runs)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
