"""Which path is chosen, and why."""

from __future__ import annotations

import itertools

import pytest

from p2pkv.paths import Ability, choose

NONE, TCP, RDMA = Ability
PAIRS = list(itertools.product(Ability, Ability))


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_auto_prefers_shared_memory_to_everything(here: Ability, there: Ability) -> None:
    assert choose("auto", True, here, there).path == "shm"


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_auto_takes_ucx_only_where_both_sides_have_rdma(here: Ability, there: Ability) -> None:
    expected = "ucx" if (here, there) == (RDMA, RDMA) else "tcp"
    assert choose("auto", False, here, there).path == expected


def test_auto_says_which_side_lacks_rdma() -> None:
    assert "no RDMA here and at the node" in choose("auto", False, TCP, NONE).why
    assert "no RDMA at the node" in choose("auto", False, RDMA, TCP).why
    assert "no RDMA here" in choose("auto", False, NONE, RDMA).why


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("wanted", ["tcp", "zmq"])
def test_what_is_asked_for_is_taken(wanted: str, same: bool) -> None:
    assert choose(wanted, same, RDMA, RDMA).path == wanted


def test_forced_ucx_is_taken_on_one_host_and_over_tcp_and_warns_of_it() -> None:
    choice = choose("ucx", True, TCP, RDMA)
    assert choice.path == "ucx"
    assert "slower" in choice.why
    assert "slower" not in choose("ucx", False, RDMA, RDMA).why


@pytest.mark.parametrize(
    ("here", "there", "whose"),
    [(NONE, RDMA, "here"), (RDMA, NONE, "the node"), (NONE, NONE, "here")],
)
def test_forced_ucx_without_it_is_no_path(here: Ability, there: Ability, whose: str) -> None:
    choice = choose("ucx", True, here, there)
    assert choice.path == ""
    assert whose in choice.why
