from __future__ import annotations

import pytest

from p2pkv.adapters.history import Fate, History, Note, Reason, explain
from p2pkv.adapters.hits import HitCounter

S = 1_000_000_000


@pytest.mark.parametrize(
    ("note", "generation", "reason", "text"),
    [
        (None, 0, Reason.NEVER_STORED, "has not stored it"),
        (Note(Fate.STORED, 0, generation=1), 1, Reason.EVICTED, "stored 9.0 s ago, and evicted"),
        (Note(Fate.STORED, 0, generation=1), 2, Reason.LOST, "its bucket was started anew"),
        (Note(Fate.STORED, 0, generation=-1), 2, Reason.EVICTED, "evicted"),
        (Note(Fate.STORED, 0, generation=2), -1, Reason.EVICTED, "evicted"),
        (Note(Fate.STORED, 0, ttl_ns=9 * S), 0, Reason.EXPIRED, "a time to live of 9 s"),
        (Note(Fate.STORED, 0, ttl_ns=9 * S + 1), 0, Reason.EVICTED, "evicted"),
        (Note(Fate.DELETED, 0), 0, Reason.DELETED, "this process deleted it 9.0 s ago"),
        (Note(Fate.DROPPED, 0, detail="full"), 0, Reason.PUT_DROPPED, "dropped 9.0 s ago: full"),
        (Note(Fate.FAILED, 0, detail="no room"), 0, Reason.PUT_FAILED, "failed 9.0 s ago: no room"),
    ],
)
def test_the_reason_of_a_miss(
    note: Note | None, generation: int, reason: Reason, text: str
) -> None:
    why = explain(note, generation, 0, 9 * S)
    assert why.reason is reason
    assert text in why.text


def test_a_history_that_had_to_forget_says_so() -> None:
    history = History(2)
    history.note([b"a", b"b"], Note(Fate.STORED, 0))
    history.note([b"a"], Note(Fate.DELETED, 1))
    history.note([b"c"], Note(Fate.STORED, 2))
    assert history.of(b"b") is None
    assert [history.of(k) for k in (b"a", b"c")] == [Note(Fate.DELETED, 1), Note(Fate.STORED, 2)]
    why = explain(history.of(b"b"), 0, history.forgotten_total, 3)
    assert why.reason is Reason.NEVER_STORED
    assert "the last 1 keys" in why.text


def test_a_history_of_nothing_keeps_nothing() -> None:
    history = History(0)
    history.note([b"a"], Note(Fate.STORED, 0))
    assert history.of(b"a") is None


# -- hits


def counted(hits: HitCounter) -> tuple[int, int, int]:
    return hits.hits_total, hits.misses_total, hits.unavailable_total


def test_a_request_is_counted_at_its_first_resolution_only() -> None:
    hits = HitCounter(10)
    hits.resolved("r", 3, 2)
    hits.resolved("r", 3, 2)
    hits.resolved("r", 5, 0)
    assert counted(hits) == (3, 2, 0)


def test_a_request_that_grows_is_counted_for_what_is_new() -> None:
    hits = HitCounter(10)
    hits.resolved("r", 2, 1)
    hits.resolved("r", 5, 1)
    hits.resolved("r", 2, 6)
    assert counted(hits) == (2 + 2, 1 + 1 + 2, 0)


def test_calls_without_a_request_are_counted_each() -> None:
    hits = HitCounter(10)
    for _ in range(3):
        hits.resolved(None, 1, 1, 1)
    assert counted(hits) == (3, 3, 3)


def test_a_request_that_is_finished_or_forgotten_counts_anew() -> None:
    hits = HitCounter(1)
    hits.resolved("a", 1, 0)
    hits.finished("a")
    hits.finished("a")
    hits.resolved("a", 1, 0)
    hits.resolved("b", 1, 0)
    hits.resolved("a", 1, 0)
    assert counted(hits) == (4, 0, 0)


def test_misses_of_peers_that_could_not_be_asked_are_told_apart() -> None:
    hits = HitCounter(10)
    hits.resolved("r", 1, 3, 2)
    hits.resolved("r", 0, 4, 4)
    assert counted(hits) == (1, 3, 2)
