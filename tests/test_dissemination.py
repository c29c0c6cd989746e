from __future__ import annotations

from p2pkv.dissemination import Rumors
from p2pkv.swim_messages import Rumor, Status
from p2pkv.types import BootId, Member, NodeId


def rumor(name: str, status: Status = Status.ALIVE, incarnation: int = 0) -> Rumor:
    return Rumor(Member(NodeId(name), BootId(1)), status, incarnation)


def test_a_rumor_is_told_so_often_and_no_more() -> None:
    rumors = Rumors()
    rumors.put(rumor("a"))
    assert [len(rumors.take(5, 3)) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert not rumors


def test_the_least_told_come_first_and_no_more_than_asked_for() -> None:
    rumors = Rumors()
    rumors.put(rumor("a"))
    rumors.take(1, 9)
    rumors.put(rumor("b"))
    rumors.put(rumor("c"))
    assert rumors.take(2, 9) == [rumor("b"), rumor("c")]
    assert len(rumors.take(2, 9)) == 2
    assert len(rumors) == 3


def test_a_newer_rumor_of_a_node_takes_the_place_of_the_older() -> None:
    rumors = Rumors()
    rumors.put(rumor("a"))
    rumors.take(1, 2)
    rumors.put(rumor("a", Status.SUSPECT))
    assert rumors.take(5, 2) == [rumor("a", Status.SUSPECT)]
    assert rumors.take(5, 2) == [rumor("a", Status.SUSPECT)]
    assert rumors.take(5, 2) == []


def test_a_node_that_is_forgotten_is_talked_of_no_more() -> None:
    rumors = Rumors()
    rumors.put(rumor("a"))
    rumors.drop(NodeId("a"))
    rumors.drop(NodeId("b"))
    assert rumors.take(5, 5) == []
