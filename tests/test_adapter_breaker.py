from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from p2pkv.adapters.breaker import Breaker, BreakerPolicy, Breakers, State

MS = 1_000_000
POLICY = BreakerPolicy(
    failures_max=2, open_first_ns=100 * MS, open_last_ns=1000 * MS, probe_ns=50 * MS
)


def opened(now: int = 0, seed: int = 1) -> Breaker:
    breaker, random = Breaker(POLICY), Random(seed)
    for _ in range(POLICY.failures_max):
        breaker.failed("late", now, random)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker, random = Breaker(POLICY), Random(1)
    assert not breaker.failed("late", 0, random)
    assert breaker.state is State.CLOSED
    assert breaker.failed("late", 5, random)
    assert (breaker.state, breaker.since) == (State.OPEN, 5)


def test_calls_that_were_under_way_when_it_opened_change_nothing() -> None:
    breaker = opened()
    until = breaker.until
    assert not breaker.failed("late", 10 * MS, Random(2))
    assert breaker.probe(until)
    assert not breaker.failed("late", until, Random(2))
    assert breaker.state is State.PROBING


def test_one_probe_is_made_once_its_time_is_over() -> None:
    breaker = opened()
    assert not breaker.probe(breaker.until - 1)
    now = breaker.until
    assert breaker.probe(now)
    assert not breaker.probe(now)


def test_a_probe_that_never_ends_is_made_again() -> None:
    breaker = opened()
    now = breaker.until
    breaker.probe(now)
    assert not breaker.probe(now + POLICY.probe_ns - 1)
    assert breaker.probe(now + POLICY.probe_ns)


def test_each_probe_that_fails_makes_the_wait_longer_up_to_a_bound() -> None:
    breaker, random, now = opened(), Random(3), 0
    for cap in (200, 400, 800, 1000, 1000):
        now = breaker.until
        assert breaker.probe(now)
        breaker.probe_failed("still late", now, random)
        assert cap * MS // 2 <= breaker.until - now <= cap * MS
    assert breaker.reason == "still late"


def test_a_hundred_rounds_do_not_make_the_wait_overflow() -> None:
    breaker = opened()
    for _ in range(100):
        breaker.probe_failed("late", 0, Random(4))
    assert breaker.until <= POLICY.open_last_ns


def test_breakers_that_open_together_are_not_probed_together() -> None:
    assert len({opened(seed=seed).until for seed in range(20)}) == 20


# -- all peers of a client


def all_of(peers_max: int = 4) -> Breakers[str]:
    return Breakers(POLICY, Random(5), peers_max)


def fail(breakers: Breakers[str], peer: str, now: int = 0, times: int = 2) -> None:
    for _ in range(times):
        breakers.failed(peer, b"key-of-" + peer.encode(), "late", now)


def test_only_the_peer_that_failed_is_refused() -> None:
    breakers = all_of()
    assert not breakers
    fail(breakers, "a", times=1)
    assert breakers
    assert not breakers.refuses("a")
    fail(breakers, "a", times=1)
    assert breakers.refuses("a")
    assert not breakers.refuses("b")
    assert (breakers.refused(), breakers.opened_total) == (1, 1)


def test_a_success_ends_the_row_of_failures() -> None:
    breakers = all_of()
    fail(breakers, "a", times=1)
    breakers.succeeded(["a", "unknown"])
    fail(breakers, "a", times=1)
    assert not breakers.refuses("a")


def test_a_peer_is_probed_by_the_last_key_that_failed() -> None:
    breakers = all_of()
    fail(breakers, "a")
    assert breakers.probes(0) == []
    due = breakers.next_probe()
    assert due is not None
    assert breakers.probes(due) == [("a", b"key-of-a")]
    assert breakers.refuses("a")
    assert breakers.next_probe() == due + POLICY.probe_ns
    breakers.succeeded(["a"])
    assert not breakers.refuses("a")
    assert breakers.next_probe() is None


def test_who_asks_why_a_peer_is_refused_is_told() -> None:
    breakers = all_of()
    assert breakers.trouble("a") is None
    fail(breakers, "a", now=7, times=1)
    assert breakers.trouble("a") is None
    fail(breakers, "a", now=7, times=1)
    breakers.probe_failed("a", "refused", 8)
    breakers.probe_failed("gone", "refused", 8)
    assert breakers.trouble("a") == ("refused", 7, 1)


def test_no_more_peers_are_kept_than_the_bound() -> None:
    breakers = all_of(peers_max=2)
    for peer in "abc":
        fail(breakers, peer)
    assert [breakers.refuses(peer) for peer in "abc"] == [False, True, True]


@given(
    st.lists(st.sampled_from(["fail", "ok", "probe", "probe failed", "wait"]), max_size=60),
    st.integers(0, 1 << 30),
)
def test_a_peer_in_trouble_is_always_probed_again(acts: list[str], seed: int) -> None:
    """Whatever happened, there is a time, not far off, at which a probe is due."""
    breakers: Breakers[str] = Breakers(POLICY, Random(seed))
    now = 0
    for act in acts:
        if act == "fail":
            breakers.failed("a", b"k", "late", now)
        elif act == "ok":
            breakers.succeeded(["a"])
        elif act == "probe":
            breakers.probes(now)
        elif act == "probe failed" and breakers.refuses("a"):
            breakers.probe_failed("a", "late", now)
        else:
            now += 300 * MS
        due = breakers.next_probe()
        assert (due is not None) == breakers.refuses("a")
        if due is not None:
            assert due <= now + POLICY.open_last_ns
            if due <= now:
                assert breakers.probes(now) == [("a", b"k")]
