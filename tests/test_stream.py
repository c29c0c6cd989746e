"""The blocking data connection, against a peer that sends what a test wants."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dataside import PEER, TcpPeer, Wire
from nodeside import KIB, MIB, PLAIN

from p2pkv import stream, wire
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.routing import Request
from p2pkv.stream import PREFACE, SIZES, Closed, DataLink, Late, advance, message, parse_endpoint
from p2pkv.wire import Kind

LIMITS = Limits(
    key_bytes_max=64, batch_keys_max=256, scan_keys_max=256,
    head_bytes_max=64 << 10, message_bytes_max=1 << 20,
)  # fmt: skip
SESSION, TOKEN = b"s" * 16, b"t" * 16


def soon(seconds: float = 20.0) -> int:
    return time.monotonic_ns() + round(seconds * 1e9)


@contextmanager
def link_to(serve: Callable[[Wire], None], limits: Limits = LIMITS) -> Iterator[DataLink]:
    """A link to a peer that has read the preface."""

    def greeted(peer: Wire) -> None:
        assert peer.read(PREFACE.size) == stream.preface(SESSION, TOKEN)
        serve(peer)

    with TcpPeer(greeted) as peer:
        link = DataLink(peer.endpoint, SESSION, TOKEN, limits, 5.0)
        try:
            yield link
        finally:
            link.close()


def stays(peer: Wire) -> None:
    """Waits until the link closes."""
    while peer.sock.recv(1 << 16):
        continue


def values(*contents: bytes, id: int = 1, **more: Any) -> bytes:
    """An answer with these values."""
    body = wire.Values(b"", [len(c) for c in contents], [], **more)
    payload = b"".join(contents)
    return message(Kind.VALUES, id, 7, body, len(payload)) + payload


def says(*parts: bytes, pause_s: float = 0.0) -> Callable[[Wire], None]:
    def serve(peer: Wire) -> None:
        for part in parts:
            peer.sock.sendall(part)
            time.sleep(pause_s)
        stays(peer)

    return serve


# -- sending


def test_a_request_leaves_whole_whatever_the_number_and_size_of_its_pieces() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed = {seed}")
    chance = random.Random(seed)
    got: list[tuple[wire.Head, bytes]] = []

    def serve(peer: Wire) -> None:
        got.append(peer.receive())
        peer.send(Kind.PONG, got[-1][0].request, wire.Empty())

    for pieces, size in ((0, 0), (1, 3), (1, MIB), (3000, 100), (3, 300 * KIB)):
        payload = [chance.randbytes(chance.randint(1, size)) for _ in range(pieces)]
        with link_to(serve) as link:
            body = wire.Put([b"k"] * pieces, list(map(len, payload)), PLAIN)
            request = Request(PEER, Kind.PUT, body, payload)
            request.id = 9
            link.send(request, soon())
            assert request.sent
            assert link.receive(soon())[0] == 9
        head, data = got.pop()
        assert (head.kind, head.request, head.body) == (Kind.PUT, 9, body)
        assert data == b"".join(payload)


def test_the_revision_that_was_heard_last_is_told_the_peer() -> None:
    revisions: list[int] = []

    def serve(peer: Wire) -> None:
        for _ in range(2):
            head, _ = peer.receive()
            revisions.append(head.revision)
            peer.send(Kind.PONG, head.request, wire.Empty())

    with link_to(serve) as link:
        for id in (1, 2):
            request = Request(PEER, Kind.PING, wire.Empty())
            request.id = id
            link.send(request, soon())
            _, reply = link.receive(soon())
            assert (reply.kind, reply.revision) == (Kind.PONG, 7)
    assert revisions == [0, 7]


def test_a_peer_that_does_not_read_lets_the_sending_end_at_its_deadline() -> None:
    done = threading.Event()
    with link_to(lambda peer: done.wait(20) and None) as link:
        request = Request(PEER, Kind.PUT, wire.Put([b"k"], [64 * MIB], PLAIN), [bytes(64 * MIB)])
        began = time.monotonic()
        with pytest.raises(Late):
            link.send(request, soon(0.3))
        assert 0.25 <= time.monotonic() - began < 5
        assert request.sent
        done.set()


def test_a_peer_that_closes_while_it_is_sent_to_is_told_at_once() -> None:
    request = Request(PEER, Kind.PUT, wire.Put([b"k"], [64 * MIB], PLAIN), [bytes(64 * MIB)])
    with link_to(lambda peer: None) as link, pytest.raises(Closed):
        link.send(request, soon())


# -- receiving


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_messages_are_whole_however_the_bytes_come(step: int) -> None:
    contents = [os.urandom(n) for n in (0, 1, 100, 3000)]
    data = values(*contents, id=1) + values(id=2) + values(contents[3], id=3)
    with link_to(says(*[data[i : i + step] for i in range(0, len(data), step)])) as link:
        id, reply = link.receive(soon())
        assert (id, [bytes(v) for v in wire.placed(reply.frames, reply.body.sizes, [])]) == (
            1,
            contents,
        )
        assert link.receive(soon())[0] == 2
        id, reply = link.receive(soon())
        assert (id, [bytes(f) for f in reply.frames]) == (3, [contents[3]])


def test_what_follows_in_the_same_segment_is_kept() -> None:
    with link_to(says(b"".join(values(b"%d" % i, id=i) for i in range(200)))) as link:
        for i in range(200):
            id, reply = link.receive(soon())
            assert (id, bytes(reply.frames[0])) == (i, b"%d" % i)
        assert not link.buffered()


@pytest.mark.parametrize("sizes", [(5,), (100, 0, 3000), (8 * KIB, 1), (300 * KIB, 200 * KIB)])
def test_values_go_straight_to_where_the_sink_wants_them(sizes: tuple[int, ...]) -> None:
    contents = [os.urandom(n) for n in sizes]
    buffers = [memoryview(bytearray(n + 2)) for n in sizes]
    asked: list[int] = []

    def sink_of(id: int) -> Any:
        asked.append(id)
        return lambda body: [b[1 : n + 1] for b, n in zip(buffers, body.sizes, strict=True)]

    with link_to(says(values(*contents))) as link:
        _, reply = link.receive(soon(), sink_of)
    assert reply.delivered
    assert [bytes(b) for b in buffers] == [b"\0" + c + b"\0" for c in contents]
    assert asked == [1]


def test_parts_of_a_buffer_are_filled_in_their_order() -> None:
    parts = tuple(memoryview(bytearray(n)) for n in (1, 0, 10, 89))
    content = os.urandom(100)
    with link_to(says(values(content))) as link:
        _, reply = link.receive(soon(), lambda _: lambda body: [parts])
    assert reply.delivered
    assert b"".join(parts) == content


def test_large_values_become_objects_of_their_own() -> None:
    contents = [os.urandom(n) for n in (40 * KIB, 200 * KIB, 0)]
    with link_to(says(values(*contents))) as link:
        _, reply = link.receive(soon())
    assert reply.values == contents
    assert list(map(type, reply.values)) == [bytes] * 3
    assert reply.frames == contents[:2]


def test_a_head_larger_than_the_buffer_is_received() -> None:
    keys = [b"%064d" % i for i in range(2000)]
    body = wire.Page(keys, [1] * len(keys), 0, 0)
    limits = Limits()
    with link_to(says(message(Kind.PAGE, 1, 0, body, 0), values(b"x", id=2)), limits) as link:
        assert link.receive(soon())[1].body.keys == keys
        assert link.receive(soon())[0] == 2


@pytest.mark.parametrize(
    ("head", "payload"), [(0xFFFF_FFFF, 0), ((64 << 10) + 1, 0), (40, 1 << 63), (40, (2 << 20) + 1)]
)
def test_a_size_over_the_limit_is_refused_before_anything_is_allocated(
    head: int, payload: int
) -> None:
    with link_to(says(SIZES.pack(head, payload))) as link, pytest.raises(ProtocolError):
        link.receive(soon())


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(
            message(Kind.VALUES, 1, 0, wire.Values(b"", [5], []), 6) + b"123456", id="sum"
        ),
        pytest.param(
            message(Kind.VALUES, 1, 0, wire.Values(b"", [6], [], b"", [64, 64], [1, 1]), 6)
            + b"123456",
            id="places",
        ),
        pytest.param(SIZES.pack(30, 0) + bytes(30), id="nonsense"),
        pytest.param(SIZES.pack(3, 0) + bytes(3), id="short head"),
    ],
)
@pytest.mark.parametrize("sink", [False, True])
def test_an_answer_that_contradicts_itself_is_refused(answer: bytes, sink: bool) -> None:
    buffer = memoryview(bytearray(10))
    with link_to(says(answer)) as link, pytest.raises(ProtocolError):
        link.receive(soon(), lambda _: (lambda body: [buffer[: body.sizes[0]]]) if sink else None)


def test_buffers_of_another_size_than_the_value_are_refused() -> None:
    with link_to(says(values(b"12345"))) as link, pytest.raises(ProtocolError):
        link.receive(soon(), lambda _: lambda body: [memoryview(bytearray(4))])


@pytest.mark.parametrize("cut", [1, 11, 20, 45, 5000, 50_000])
def test_a_peer_that_closes_in_the_middle_is_closed(cut: int) -> None:
    answer = values(bytes(100 * KIB))

    with link_to(lambda peer: peer.sock.sendall(answer[:cut])) as link, pytest.raises(Closed):
        link.receive(soon())


@pytest.mark.parametrize("cut", [0, 1, 11, 20, 45, 5000, 50_000])
@pytest.mark.parametrize("sink", [False, True])
def test_a_peer_that_stops_in_the_middle_is_late_at_the_deadline(cut: int, sink: bool) -> None:
    answer = values(bytes(100 * KIB))
    buffer = memoryview(bytearray(100 * KIB))
    with link_to(says(answer[:cut])) as link:
        began = time.monotonic()
        with pytest.raises(Late):
            link.receive(soon(0.1), lambda _: (lambda body: [buffer]) if sink else None)
        assert 0.1 <= time.monotonic() - began < 5


def test_an_endpoint_without_listener_is_an_oserror() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        DataLink(f"tcp://127.0.0.1:{port}", SESSION, TOKEN, LIMITS, 1.0)


# -- parts


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("tcp://127.0.0.1:80", ("127.0.0.1", 80)), ("tcp://[::1]:4711", ("::1", 4711))],
)
def test_endpoints_are_taken_apart(endpoint: str, address: tuple[str, int]) -> None:
    assert parse_endpoint(endpoint) == address


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://host:80", "tcp://127.0.0.1:x", "::1"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_endpoint(endpoint)


def test_advance_leaves_exactly_the_rest() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed = {seed}")
    chance = random.Random(seed)
    for _ in range(300):
        pieces = [chance.randbytes(chance.randint(0, 5)) for _ in range(chance.randint(0, 6))]
        whole = b"".join(pieces)
        done = chance.randint(0, len(whole))
        left = advance([memoryview(p) for p in pieces], done)
        assert b"".join(left) == whole[done:]
        assert not left or len(left[0]) or not whole[done:]
