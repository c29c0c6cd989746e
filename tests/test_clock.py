"""Time as nanoseconds."""

from __future__ import annotations

from p2pkv import clock


def test_the_clock_of_production_does_not_go_back() -> None:
    times = [clock.monotonic() for _ in range(1000)]
    assert times == sorted(times)


def test_seconds_are_rounded_to_nanoseconds() -> None:
    assert [clock.seconds(s) for s in (0, 1.5, 1e-9, 4e-10)] == [0, 1_500_000_000, 1, 0]
