from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq
from nodeside import MIB
from rawpeer import RawPeer

from p2pkv import transport, wire
from p2pkv.buffers import OFF_GIL_MIN, Lending, Run, copy
from p2pkv.config import Limits
from p2pkv.errors import ConfigError, ProtocolError
from p2pkv.routing import Request
from p2pkv.transport import ClientSession, Link, ServerSocket, Waiter, endpoint_of, new_client_id
from p2pkv.wire import Kind

LIMITS = Limits(
    key_bytes_max=64,
    batch_keys_max=256,
    scan_keys_max=256,
    head_bytes_max=64 << 10,
    message_bytes_max=1 * MIB,
    inflight_max=4,
)
HEAD = wire.encode(Kind.PONG, 1, 0, wire.Empty())


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """Let the loop run until the condition is true."""
    end = time.monotonic() + timeout_s
    while not (result := condition()):
        if time.monotonic() > end:
            raise TimeoutError(what)
        await asyncio.sleep(0.002)
    return result


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


class Listener:
    """A ServerSocket and what it was told."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.messages: list[tuple[bytes, list[bytes]]] = []
        self.peers: list[zmq.Socket[bytes]] = []
        self.socket = ServerSocket(context, LIMITS)
        self.port = self.socket.bind("127.0.0.1", 0)
        self.socket.start(self._take)

    def _take(self, session: bytes, frames: list[wire.Buffer]) -> None:
        self.messages.append((session, [bytes(f) for f in frames]))

    async def peer(self, context: zmq.Context[Any], name: bytes = b"peer", rcvhwm: int = 1000
                   ) -> zmq.Socket[bytes]:  # fmt: skip
        """A raw DEALER whose connection is up."""
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.peers.append(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.setsockopt(zmq.RCVHWM, rcvhwm)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        count = len(self.messages)
        dealer.send(b"here")
        await until(lambda: len(self.messages) > count, "the peer's first message")
        return dealer


@pytest.fixture
async def listener(context: zmq.Context[Any]) -> AsyncIterator[Listener]:
    listener = Listener(context)
    yield listener
    listener.socket.close()
    for peer in listener.peers:
        peer.close(0)


async def received(dealer: zmq.Socket[bytes]) -> list[bytes]:
    await until(lambda: dealer.poll(0), "an answer")
    return dealer.recv_multipart()


# -- the listening side


async def test_messages_come_whole_and_in_order_however_many_there_are(
    context: zmq.Context[Any], listener: Listener
) -> None:
    dealer = await listener.peer(context)
    many = 3 * transport.RECEIVE_BUDGET
    for i in range(many):
        dealer.send_multipart([b"%d" % i, b"x" * 1000])
    await until(lambda: len(listener.messages) == many + 1, "all messages")
    assert [frames for _, frames in listener.messages[1:]] == [
        [b"%d" % i, b"x" * 1000] for i in range(many)
    ]


async def test_half_messages_are_dropped_and_counted(
    context: zmq.Context[Any], listener: Listener
) -> None:
    """A REQ socket's envelope, and a message of no frames at all, do no harm."""
    req: zmq.Socket[bytes] = context.socket(zmq.REQ)
    listener.peers.append(req)
    req.setsockopt(zmq.LINGER, 0)
    req.connect(f"tcp://127.0.0.1:{listener.port}")
    req.send(b"hello")
    await until(lambda: listener.messages, "the request")
    assert listener.messages[0][1] == [b"", b"hello"]
    dealer = await listener.peer(context)
    dealer.send(b"")
    await until(lambda: len(listener.messages) == 3, "the empty frame")
    assert listener.messages[2] == (b"peer", [b""])


async def test_a_frame_over_the_limit_ends_the_connection_of_its_sender_only(
    context: zmq.Context[Any], listener: Listener
) -> None:
    bad = await listener.peer(context, b"bad")
    good = await listener.peer(context, b"good")
    monitor = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bad.send(bytes(transport.frame_bytes_max(LIMITS) + 1))
    await until(lambda: monitor.poll(0), "the end of the connection")
    good.send(bytes(transport.frame_bytes_max(LIMITS)))
    await until(lambda: len(listener.messages) == 3, "the other peer's message")
    assert [name for name, _ in listener.messages] == [b"bad", b"good", b"good"]
    assert listener.socket.send(b"good", HEAD)
    assert await received(good) == [HEAD]
    bad.disable_monitor()
    monitor.close(0)


async def test_what_is_not_zmtp_does_no_harm(listener: Listener, context: zmq.Context[Any]) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
    await writer.drain()
    good = await listener.peer(context)
    assert listener.socket.send(b"peer", HEAD)
    assert await received(good) == [HEAD]
    writer.close()


async def test_an_answer_to_a_peer_that_is_gone_is_dropped_with_its_tokens(
    listener: Listener,
) -> None:
    done: list[int] = []
    view = memoryview(bytearray(MIB))
    assert not listener.socket.send(b"nobody", HEAD, [Run(view, lambda: done.append(1))])
    del view
    await until(lambda: gc.collect() is not None and done, "the token")
    assert (done, listener.socket.dropped, len(listener.socket._lending)) == ([1], 1, 0)


async def test_large_frames_are_not_copied_and_are_given_back_when_they_have_left(
    context: zmq.Context[Any], listener: Listener
) -> None:
    dealer = await listener.peer(context)
    source = bytearray(b"a" * MIB + b"b" * MIB)
    done: list[str] = []
    runs = [
        Run(memoryview(source)[:MIB], lambda: done.append("a")),
        Run(memoryview(source)[MIB:], lambda: done.append("b")),
    ]
    assert listener.socket.send(b"peer", HEAD, [runs[0], b"between", runs[1]])
    assert await received(dealer) == [HEAD, b"a" * MIB, b"between", b"b" * MIB]
    await until(lambda: len(done) == 2, "both tokens")
    assert sorted(done) == ["a", "b"]
    assert len(listener.socket._lending) == 0
    source += b"resizing needs that no view is left"


async def test_a_frame_that_cannot_leave_holds_its_memory_until_the_peer_is_gone(
    context: zmq.Context[Any], listener: Listener
) -> None:
    other: zmq.Context[Any] = zmq.Context()
    slow = await listener.peer(other, b"slow", rcvhwm=1)
    source = bytearray(MIB)
    done: list[int] = []
    sent = 0
    while listener.socket.send(b"slow", HEAD, [Run(memoryview(source), lambda: done.append(1))]):
        sent += 1
        assert sent < 1000
    # The refused one came back at once; what is queued is held.
    await until(lambda: done, "the token of the refused frame")
    assert listener.socket.dropped == 1
    assert len(listener.socket._lending) > 0
    # Others are served meanwhile.
    good = await listener.peer(context, b"good")
    assert listener.socket.send(b"good", HEAD)
    assert await received(good) == [HEAD]
    slow.close(0)
    other.term()
    await until(lambda: len(done) == sent + 1, "all tokens")
    assert len(listener.socket._lending) == 0


async def test_a_peer_that_comes_again_under_its_name_gets_the_answers(
    context: zmq.Context[Any], listener: Listener
) -> None:
    old = await listener.peer(context)
    new = await listener.peer(context)
    assert listener.socket.send(b"peer", HEAD)
    assert await received(new) == [HEAD]
    assert not old.poll(0)


async def test_listening_where_it_cannot_be_is_a_configuration_error(
    context: zmq.Context[Any], listener: Listener
) -> None:
    second = ServerSocket(context, LIMITS)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {listener.port}"):
        second.bind("127.0.0.1", listener.port)
    second.close()


async def test_it_listens_on_ipv6(context: zmq.Context[Any]) -> None:
    socket = ServerSocket(context, LIMITS)
    try:
        port = socket.bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    finally:
        socket.close()
    assert endpoint_of("::1", port) == f"tcp://[::1]:{port}"
    assert endpoint_of("10.0.0.1", 7) == "tcp://10.0.0.1:7"


async def test_a_closed_waiter_calls_no_more(context: zmq.Context[Any], listener: Listener) -> None:
    dealer = await listener.peer(context)
    calls: list[int] = []
    waiter = Waiter(dealer, lambda: bool(calls.append(1)))
    await until(lambda: calls, "the first look")
    waiter.close()
    waiter.poke()
    seen = len(calls)
    listener.socket.send(b"peer", HEAD)
    await until(lambda: dealer.poll(0), "the message")
    await asyncio.sleep(0)
    assert len(calls) == seen


async def test_a_poke_that_is_pending_when_a_waiter_closes_does_nothing(
    context: zmq.Context[Any], listener: Listener
) -> None:
    dealer = await listener.peer(context)
    calls: list[int] = []
    waiter = Waiter(dealer, lambda: bool(calls.append(1)))
    waiter.poke()
    waiter.close()
    await asyncio.sleep(0)
    assert not calls


# -- the connecting side


def link_to(context: zmq.Context[Any], endpoint: str) -> Link:
    session = ClientSession(new_client_id(b"c"))
    return Link(context, endpoint, session, wire.Hello("x"), LIMITS)


def ping() -> Request:
    return Request("", Kind.PING, wire.Empty())


def replies(link: Link) -> list[Any]:
    got = link.receive()
    end = time.monotonic() + 10
    while not got and time.monotonic() < end:
        link.socket.poll(10)
        got = link.receive()
    return got


def loss(link: Link) -> str:
    end = time.monotonic() + 10
    while (reason := link.lost()) is None:
        assert time.monotonic() < end, "the loss was not noticed"
        link.monitor.poll(10)
    return reason


def test_a_link_greets_numbers_its_requests_and_keeps_its_session(
    context: zmq.Context[Any],
) -> None:
    with RawPeer() as peer:
        link = link_to(context, peer.endpoint)
        requests = [ping(), ping()]
        assert all(link.send(r) for r in requests)
        assert [r.id for r in requests] == [1, 2]
        got = replies(link)
        assert got[0][0] == 1
        assert (got[0][1].kind, got[0][1].revision) == (Kind.PONG, 7)
        assert link.connected
        link.reset()
        assert link.closed
        last = ping()
        assert link.send(last)
        assert (last.id, link.closed) == (3, False)
        assert replies(link)[0][0] == 3
        assert peer.hellos == [link.session.id] * 2
        link.close()
        link.close()
        link.reset()


def test_links_of_one_session_never_use_a_number_twice(context: zmq.Context[Any]) -> None:
    with RawPeer() as peer:
        session = ClientSession(new_client_id(b"c"))
        links = [Link(context, peer.endpoint, session, wire.Hello("x"), LIMITS) for _ in range(2)]
        requests = [ping() for _ in range(4)]
        for i, request in enumerate(requests):
            links[i % 2].send(request)
        assert sorted(r.id for r in requests) == [1, 2, 3, 4]
        for link in links:
            link.close()


def test_where_nobody_listens_requests_have_certainly_not_left(
    context: zmq.Context[Any],
) -> None:
    with RawPeer() as peer:
        endpoint = peer.endpoint
    link = link_to(context, endpoint)
    request = ping()
    assert link.send(request)
    assert request.sent
    assert loss(link) == f"no connection to {endpoint}"
    link.reset()
    assert not request.sent


def test_a_repeat_that_finds_nobody_does_not_make_its_first_sending_undone(
    context: zmq.Context[Any],
) -> None:
    with RawPeer() as peer:
        link = link_to(context, peer.endpoint)
        request = ping()
        link.send(request)
        assert replies(link)
    assert loss(link) == f"connection lost to {peer.endpoint}"
    link.reset()
    assert request.sent
    link.send(request)
    assert loss(link) == f"no connection to {peer.endpoint}"
    link.reset()
    assert request.sent
    assert request.id == 1


def test_a_request_that_the_queue_did_not_take_is_not_sent(context: zmq.Context[Any]) -> None:
    with RawPeer() as peer:
        peer.paused.set()
        endpoint = peer.endpoint
        link = link_to(context, endpoint)
        end = time.monotonic() + 10
        while not link.connected:
            assert time.monotonic() < end
            link.lost()
        request = Request("", Kind.PUT, wire.Empty(), [bytes(MIB)])
        while link.send(request):
            assert time.monotonic() < end
            request = Request("", Kind.PUT, wire.Empty(), [bytes(MIB)])
        assert not request.sent
        link.close()
        peer.paused.clear()


def test_an_endpoint_that_is_none_is_a_configuration_error(context: zmq.Context[Any]) -> None:
    with pytest.raises(ConfigError, match="endpoint 'nonsense'"):
        link_to(context, "nonsense")


@pytest.mark.parametrize(
    "frame", [b"", b"short", bytes(30), wire.encode(Kind.PONG, 1, 0, wire.Empty())[:-1]]
)
def test_an_answer_that_is_no_message_is_a_protocol_error(
    context: zmq.Context[Any], frame: bytes
) -> None:
    with RawPeer() as peer:

        def nonsense(head: wire.Head, frames: list[bytes]) -> None:
            peer.send_raw(peer.from_[-1], frame)

        peer.script = nonsense
        link = link_to(context, peer.endpoint)
        link.send(ping())
        with pytest.raises(ProtocolError):
            replies(link)
        link.close()


# -- buffers


@pytest.mark.parametrize("size", [0, 1, OFF_GIL_MIN - 1, OFF_GIL_MIN, OFF_GIL_MIN + 1, 3 * MIB])
def test_copies_are_exact_on_both_sides_of_the_threshold(size: int) -> None:
    source = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
    for readonly in (False, True):
        target = bytearray(size + 2)
        view = memoryview(bytes(source)) if readonly else memoryview(source)
        copy(memoryview(target)[1:-1], view)
        assert target == b"\0" + source + b"\0"


def test_lent_views_are_missed_until_their_last_user_is_done() -> None:
    lending = Lending()
    done: list[str] = []
    source = bytearray(100)
    runs = [Run(memoryview(source), lambda n=name: done.append(n)) for name in "ab"]  # type: ignore[misc]
    views = [lending.lend(run) for run in runs]
    assert len(lending) == 2
    assert [len(run.view) for run in runs] == [0, 0]
    also = views[0]
    del views[0]
    assert done == []
    del also
    assert (done, len(lending)) == (["a"], 1)
    views.clear()
    assert (done, len(lending)) == (["a", "b"], 0)


async def test_a_waiter_closed_again_takes_nothing_from_who_has_its_descriptor_now() -> None:
    context: zmq.Context[Any] = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    waiter = Waiter(dealer, lambda: False)
    descriptor = int(dealer.getsockopt(zmq.FD))
    waiter.close()
    dealer.close(0)
    context.term()  # by now the descriptor is free
    ours, theirs = socket.socketpair()
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        os.dup2(ours.fileno(), descriptor)
        loop.add_reader(descriptor, readable.set)
        waiter.close()
        theirs.send(b"x")
        await asyncio.wait_for(readable.wait(), 10)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ours.close()
        theirs.close()
