from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pkv.adapters.backlog import Backlog, BacklogLimits

LIMITS = BacklogLimits(jobs_max=3, bytes_max=100, age_max_ns=10)


def filled(*sizes: int) -> Backlog[str]:
    backlog: Backlog[str] = Backlog(LIMITS)
    for i, size in enumerate(sizes):
        backlog.offer(f"job{i}", size, now=i)
    return backlog


def test_jobs_come_out_as_they_went_in() -> None:
    backlog = filled(1, 2, 3)
    entries = [backlog.take() for _ in range(3)]
    assert [e.job for e in entries if e] == ["job0", "job1", "job2"]
    assert backlog.take() is None


def test_what_finds_no_room_is_refused_and_counted() -> None:
    backlog = filled(60, 40)
    assert not backlog.offer("more bytes", 1, 0)
    assert backlog.offer("no bytes", 0, 0)
    assert not backlog.offer("more jobs", 0, 0)
    assert (backlog.dropped_full_total, len(backlog)) == (2, 3)


def test_what_is_being_done_takes_room_until_it_is_done() -> None:
    backlog = filled(100)
    entry = backlog.take()
    assert entry is not None
    assert not backlog.offer("next", 1, 0)
    backlog.done(entry)
    assert backlog.offer("next", 1, 0)
    assert backlog.done_total == 1


def test_one_job_larger_than_the_bound_is_done_when_nothing_else_is_there() -> None:
    backlog = filled(1000)
    assert len(backlog) == 1
    assert not backlog.offer("next", 0, 0)


def test_what_waited_too_long_is_dropped_and_counted() -> None:
    backlog = filled(1, 1, 1)
    assert backlog.expire(10) == []
    assert backlog.expire(12) == ["job0", "job1"]
    assert (backlog.dropped_old_total, backlog.jobs, backlog.bytes) == (2, 1, 1)


def test_closed_it_gives_back_what_waits_and_takes_nothing_in() -> None:
    backlog = filled(1, 1)
    running = backlog.take()
    assert backlog.close() == ["job1"]
    assert not backlog.offer("late", 1, 0)
    assert running is not None
    backlog.done(running)
    assert (backlog.jobs, backlog.bytes, backlog.dropped_full_total) == (0, 0, 2)


@given(st.lists(st.tuples(st.sampled_from("otdx"), st.integers(0, 120)), max_size=80))
def test_it_keeps_its_bounds_and_loses_no_job(acts: list[tuple[str, int]]) -> None:
    backlog: Backlog[int] = Backlog(LIMITS)
    running = []
    seen = {"in": 0, "out": 0}
    for now, (act, size) in enumerate(acts):
        if act == "o":
            seen["in"] += backlog.offer(now, size, now)
        elif act == "t" and (entry := backlog.take()):
            running.append(entry)
        elif act == "d" and running:
            backlog.done(running.pop())
            seen["out"] += 1
        elif act == "x":
            seen["out"] += len(backlog.expire(now))
        assert seen["in"] - seen["out"] == backlog.jobs == len(backlog) + len(running)
        assert backlog.jobs <= LIMITS.jobs_max
        assert backlog.bytes <= LIMITS.bytes_max or backlog.jobs == 1
        assert bool(backlog.jobs) or backlog.bytes == 0
