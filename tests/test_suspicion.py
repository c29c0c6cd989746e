from __future__ import annotations

from math import log10

import pytest

from p2pkv.suspicion import Awareness, Suspicion, retransmits, shortest_ns
from p2pkv.types import NodeId

A, B, C, D = map(NodeId, "abcd")


@pytest.mark.parametrize(("members", "times"), [(1, 4), (9, 4), (10, 8), (99, 8), (100, 12)])
def test_rumors_are_passed_on_more_often_in_larger_clusters(members: int, times: int) -> None:
    assert retransmits(4, members) == times


@pytest.mark.parametrize(("members", "ns"), [(0, 4000), (1, 4000), (10, 4000), (1000, 12000)])
def test_suspects_have_more_time_in_larger_clusters(members: int, ns: int) -> None:
    assert shortest_ns(4, members, 1000) == ns


def test_a_suspicion_gets_shorter_with_each_further_accuser_on_a_log_scale() -> None:
    suspicion = Suspicion(A, 100, 1_000, 6_000, 10)
    assert suspicion.ends_ns == 6_100
    assert suspicion.confirm(B)
    half_way = 6_000 - log10(2) / log10(3) * 5_000
    assert suspicion.ends_ns == 100 + round(half_way)
    assert suspicion.confirm(C)
    assert suspicion.ends_ns == 1_100


def test_an_accuser_counts_once_and_a_fourth_does_not_count() -> None:
    suspicion = Suspicion(A, 0, 1_000, 6_000, 10)
    assert not suspicion.confirm(A)
    assert suspicion.confirm(B)
    assert not suspicion.confirm(B)
    assert suspicion.confirm(C)
    assert not suspicion.confirm(D)


@pytest.mark.parametrize(("members", "further"), [(1, 0), (2, 0), (3, 1), (4, 2), (100, 2)])
def test_in_a_small_cluster_all_others_are_enough(members: int, further: int) -> None:
    suspicion = Suspicion(A, 0, 1_000, 6_000, members)
    accusers = [B, C][:further]
    for accuser in accusers:
        assert suspicion.ends_ns > 1_000
        suspicion.confirm(accuser)
    assert suspicion.ends_ns == 1_000


def test_time_away_does_not_count() -> None:
    suspicion = Suspicion(A, 0, 1_000, 6_000, 10)
    assert suspicion.call_ns == 500
    suspicion.extend(300)
    assert suspicion.ends_ns == 6_300
    assert suspicion.call_ns == 800


def test_doubt_in_oneself_stretches_time_within_limits() -> None:
    awareness = Awareness(8)
    assert awareness.scale(10) == 10
    awareness.better()
    assert awareness.score == 0
    awareness.worse(3)
    assert awareness.scale(10) == 40
    awareness.worse(100)
    assert awareness.scale(10) == 90
    awareness.better()
    assert awareness.score == 7
