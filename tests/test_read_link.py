"""A client's read connection, against a peer that follows a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dataside import PEER, TcpPeer, Wire, get

from p2pkv import _native, wire
from p2pkv._native import reads
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.parts import Parts
from p2pkv.read_link import ReadLink, kind_of
from p2pkv.routing import Request
from p2pkv.stream import Closed, Late
from p2pkv.wire import Kind, Status

pytestmark = pytest.mark.skipif(not _native.available, reason="the native module was not built")

TOKEN = bytes(range(16))
MIB = 1 << 20


def matched(count: int, of_next: int) -> int:
    """The table of an answer to MATCH."""
    return count | of_next << 32


def within(seconds: float = 10.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def exists(*keys: bytes, touch: bool = False) -> Request:
    return Request(PEER, Kind.EXISTS, wire.Exists(list(keys), touch))


def match(*keys: bytes) -> Request:
    return Request(PEER, Kind.MATCH, wire.Match(list(keys)))


class Scripted:
    """Gives each request the next of these tables and payloads."""

    def __init__(self, *answers: tuple[list[int] | bytes | int, bytes]) -> None:
        self.answers = list(answers)

    def __call__(self, peer: Wire) -> None:
        assert peer.read(reads.PREFACE_BYTES) == reads.preface(TOKEN)
        while True:
            head = peer.read(16)
            peer.read(int.from_bytes(head[:4], "little"))
            table, payload = self.answers.pop(0)
            reply = head[8:12] + head[4:8] + head[12:16] + bytes(4)
            reply += len(payload).to_bytes(8, "little")
            if isinstance(table, list):
                table = b"".join(size.to_bytes(8, "little", signed=True) for size in table)
            elif isinstance(table, int):
                table = table.to_bytes(8, "little")
            peer.sock.sendall(reply + table + payload)


Linked = Callable[..., ReadLink]


@pytest.fixture
def linked() -> Iterator[Linked]:
    made: list[Any] = []

    def connect(*answers: Any) -> ReadLink:
        peer = TcpPeer(Scripted(*answers))
        link = ReadLink(peer.endpoint, TOKEN, Limits(message_bytes_max=MIB), 5.0)
        made.extend((link.close, peer.stop))
        return link

    yield connect
    for close in made:
        close()


def call(link: ReadLink, request: Request) -> Any:
    return link.call(request, kind_of(request), within())


def call_in_two(link: ReadLink, request: Request) -> Any:
    link.ask(request, kind_of(request), within())
    return link.receive(request, within())


ways = pytest.mark.parametrize("way", [call, call_in_two])


@ways
def test_values_come_as_objects_of_their_own(linked: Linked, way: Any) -> None:
    reply = way(linked(([3, 0, 2], b"abcde")), get(b"a", b"b", b"c"))
    assert reply.values == [b"abc", b"", b"de"]
    assert (reply.body.sizes, reply.body.statuses) == ([3, 0, 2], b"")


@ways
def test_values_come_where_the_sink_wants_them(linked: Linked, way: Any) -> None:
    targets = [memoryview(bytearray(4)), memoryview(bytearray(4))]
    reply = way(linked(([3, 2], b"abcde")), get(b"a", b"b", into=targets))
    assert reply.delivered
    assert [bytes(t) for t in targets] == [b"abc\0", b"de\0\0"]


@ways
def test_what_is_left_to_the_owner_is_deferred(linked: Linked, way: Any) -> None:
    reply = way(linked(([-1, 2], b"de")), get(b"a", b"b"))
    assert reply.values == [None, b"de"]
    assert reply.body.statuses == bytes([Status.DEFERRED, Status.OK])


@ways
@pytest.mark.parametrize(
    ("request_", "table"),
    [
        (get(b"a", b"b"), [-1, -1]),
        (get(b"a", into=[memoryview(bytearray(1))]), [-1]),
        (exists(b"a", b"b"), b"\xff\xff"),
        (match(b"a"), matched(0, reads.ASK_BYTE)),
    ],
    ids=["get", "get into", "exists", "match"],
)
def test_if_all_is_left_to_the_owner_there_is_no_answer(
    linked: Linked, way: Any, request_: Request, table: Any
) -> None:
    assert way(linked((table, b"")), request_) is None


@ways
def test_flags_tell_of_what_is_there(linked: Linked, way: Any) -> None:
    link = linked(
        (b"\0\0", b""),
        (b"\xff\0", b""),
        (b"\1\1", b""),
        (matched(2, 0), b""),
        (matched(1, reads.ASK_BYTE), b""),
        (matched(0, reads.MISS_BYTE), b""),
    )
    assert way(link, exists(b"a", b"b")).body.statuses == b""
    assert way(link, exists(b"a", b"b")).body.statuses == bytes([Status.DEFERRED, Status.OK])
    assert way(link, exists(b"a", b"b")).body.statuses == bytes([Status.MISS, Status.MISS])
    assert way(link, match(b"a", b"b")).body == wire.Matched(2, Status.OK)
    assert way(link, match(b"a", b"b")).body == wire.Matched(1, Status.DEFERRED)
    assert way(link, match(b"a", b"b")).body == wire.Matched(0, Status.MISS)


@ways
def test_values_that_are_not_there_are_told(linked: Linked, way: Any) -> None:
    link = linked(([-2, 2, -1], b"de"), ([-2], b""))
    reply = way(link, get(b"a", b"b", b"c"))
    assert reply.values == [None, b"de", None]
    assert reply.body.statuses == bytes([Status.MISS, Status.OK, Status.DEFERRED])
    assert way(link, get(b"a")).body.statuses == bytes([Status.MISS])


@ways
def test_nothing_is_written_for_values_that_are_not_there(linked: Linked, way: Any) -> None:
    targets = [memoryview(bytearray(b"xxx")), memoryview(bytearray(4))]
    reply = way(linked(([-2, 2], b"de")), get(b"a", b"b", into=targets))
    assert reply.body.statuses == bytes([Status.MISS, Status.OK])
    assert [bytes(t) for t in targets] == [b"xxx", b"de\0\0"]


def test_a_sink_for_other_sizes_is_refused(linked: Linked) -> None:
    request = get(b"a")

    def sink(_: wire.Values) -> list[Parts]:
        return [memoryview(bytearray(2))]

    request.sink = sink
    with pytest.raises(ProtocolError, match="3 bytes"):
        call(linked(([3], b"abc")), request)


def test_trouble_has_its_names(linked: Linked) -> None:
    with pytest.raises(ProtocolError, match="read server"):
        call(linked(([2], b"abc")), get(b"a"))
    silent = TcpPeer(lambda peer: time.sleep(0.5))
    link = ReadLink(silent.endpoint, TOKEN, Limits(), 5.0)
    with pytest.raises(Late):
        link.call(get(b"a"), reads.GET, within(0.05))
    link.close()
    silent.stop()
    ended = TcpPeer(lambda peer: peer.read(51) and None)
    link = ReadLink(ended.endpoint, TOKEN, Limits(), 5.0)
    with pytest.raises(Closed, match="closed"):
        link.call(get(b"a"), reads.GET, within())
    link.close()
    ended.stop()


def test_some_reads_are_for_the_owner_alone() -> None:
    assert kind_of(get(b"a")) == reads.GET
    assert kind_of(exists(b"a")) == reads.EXISTS
    assert kind_of(match(b"a")) == reads.MATCH
    assert kind_of(exists(b"a", touch=True)) == 0
    assert kind_of(Request(PEER, Kind.GET, wire.Get([b"a"], tell_once=True))) == 0
    assert kind_of(Request(PEER, Kind.GET, wire.Get([b"a"], starts=[0], lengths=[1]))) == 0
    assert kind_of(Request(PEER, Kind.GET, wire.Get([b"a"], checksums=wire.Checksums.SENT))) == 0
    assert kind_of(Request(PEER, Kind.DELETE, wire.Delete([b"a"]))) == 0
    assert kind_of(get(*[b"a"] * (reads.KEYS_MAX + 1))) == 0
    asked = get(b"a")
    asked.direct = True
    assert kind_of(asked) == 0


def test_a_token_of_another_length_is_none() -> None:
    with pytest.raises(ValueError, match="token"):
        ReadLink("tcp://127.0.0.1:1", b"short", Limits(), 1.0)
