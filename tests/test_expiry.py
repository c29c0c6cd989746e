from __future__ import annotations

from dataclasses import dataclass

from p2pkv.expiry import ExpiryHeap


@dataclass(eq=False)
class Entry:
    name: str
    expires_at: int = 0


def due(heap: ExpiryHeap[Entry], now: int, limit: int = 100) -> list[str]:
    names = []
    for entry in heap.due(now, limit):
        names.append(entry.name)
        heap.set(entry, 0)
    return names


def test_entries_are_due_at_their_time_the_oldest_first() -> None:
    heap: ExpiryHeap[Entry] = ExpiryHeap()
    for name, time in (("b", 20), ("a", 10), ("c", 30)):
        heap.set(Entry(name), time)
    assert due(heap, 9) == []
    assert due(heap, 20) == ["a", "b"]
    assert due(heap, 20) == []
    assert (due(heap, 30), heap.timed, len(heap)) == (["c"], 0, 0)


def test_entries_of_the_same_time_are_due_in_the_order_of_their_setting() -> None:
    heap: ExpiryHeap[Entry] = ExpiryHeap()
    for name in "abc":
        heap.set(Entry(name), 10)
    assert due(heap, 10) == ["a", "b", "c"]


def test_a_changed_time_counts_and_the_old_one_does_not() -> None:
    heap: ExpiryHeap[Entry] = ExpiryHeap()
    later, never = Entry("later"), Entry("never")
    heap.set(later, 10)
    heap.set(never, 10)
    heap.set(later, 50)
    heap.set(never, 0)
    assert heap.timed == 1
    assert due(heap, 49) == []
    assert [entry.name for entry in heap.entries()] == ["later"]
    assert due(heap, 50) == ["later"]


def test_no_more_than_the_limit_is_looked_at_stale_items_included() -> None:
    heap: ExpiryHeap[Entry] = ExpiryHeap()
    stale = Entry("stale")
    heap.set(stale, 1)
    heap.set(stale, 0)
    for name in "abc":
        heap.set(Entry(name), 10)
    assert due(heap, 10, limit=2) == ["a"]
    assert due(heap, 10, limit=1) == ["b"]
    assert due(heap, 10, limit=0) == []


def test_setting_times_again_and_again_does_not_grow_the_heap() -> None:
    heap: ExpiryHeap[Entry] = ExpiryHeap()
    entries = [Entry(str(i)) for i in range(100)]
    for time in range(1, 501):
        for entry in entries:
            heap.set(entry, time)
        assert len(heap) <= 1024 + 2 * 100 + 1
    assert (heap.timed, len(due(heap, 500, limit=10**6))) == (100, 100)


def test_an_entry_may_be_set_to_a_later_time_while_it_is_due() -> None:
    heap: ExpiryHeap[Entry] = ExpiryHeap()
    entry = Entry("a")
    heap.set(entry, 10)
    for item in heap.due(10, 100):
        heap.set(item, 20)
    assert due(heap, 19) == []
    assert due(heap, 20) == ["a"]
