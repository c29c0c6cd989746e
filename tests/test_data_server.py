"""The node's side of data connections, spoken to byte by byte."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest
from dataside import DataNode, until
from nodeside import KIB, LIMITS, MIB, MS, PLAIN, S

from p2pkv import stream, wire
from p2pkv.arena import Arena
from p2pkv.clock import monotonic
from p2pkv.data_server import OUTGOING_BYTES_MAX
from p2pkv.objects import Object, State
from p2pkv.sessions import Session
from p2pkv.stream import SIZES, message
from p2pkv.wire import Kind, PutOptions, Status

STALL_NS = 200 * MS


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(32 * MIB, "data") as arena:
        yield arena


@pytest.fixture
async def node(arena: Arena) -> AsyncIterator[DataNode]:
    async with DataNode(arena, stall_ns=STALL_NS) as node:
        yield node


class Raw:
    """A client that sends any bytes."""

    def __init__(self, node: DataNode, receive_buffer: int = 0) -> None:
        self.loop = asyncio.get_running_loop()
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.setblocking(False)
        self._address = ("127.0.0.1", node.port)

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def read(self, size: int, timeout_s: float = 10.0) -> bytes:
        data = bytearray()
        async with asyncio.timeout(timeout_s):
            while len(data) < size:
                got = await self.loop.sock_recv(self.sock, size - len(data))
                if not got:
                    raise ConnectionError("closed")
                data += got
        return bytes(data)

    async def ask(self, kind: Kind, id: int, body: wire.Body, payload: bytes = b"") -> wire.Head:
        await self.send(message(kind, id, 0, body, len(payload)) + payload)
        return (await self.receive())[0]

    async def receive(self) -> tuple[wire.Head, bytes]:
        head_bytes, payload_bytes = SIZES.unpack(await self.read(SIZES.size))
        head = wire.decode(await self.read(head_bytes), 1 << 25)
        return head, await self.read(payload_bytes)

    async def closed(self, timeout_s: float = 10.0) -> bool:
        """Whether the node closes the connection."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.loop.sock_recv(self.sock, 1 << 16):
                    continue
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    async def __aenter__(self) -> Raw:
        await self.loop.sock_connect(self.sock, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()


class Greeted(Raw):
    """One that has sent a right preface."""

    def __init__(
        self, node: DataNode, session: Session | None = None, receive_buffer: int = 0
    ) -> None:
        super().__init__(node, receive_buffer)
        self._session = session or node.session

    async def __aenter__(self) -> Greeted:
        await super().__aenter__()
        await self.send(stream.preface(self._session.id, self._session.token))
        return self


def put_of(key: bytes, value: bytes, id: int = 1, options: PutOptions = PLAIN) -> bytes:
    body = wire.Put([key], [len(value)], options)
    return message(Kind.PUT, id, 0, body, len(value)) + value


GET = wire.Get([b"k"])


def objects(node: DataNode) -> list[Object]:
    return [item for b in node.store.buckets.values() for item in b.objects.values()]


async def peers_with(node: DataNode, state: Callable[[Any], Any]) -> list[Any]:
    """The connections in this state, once there is one."""
    await until(lambda: any(map(state, node.server._peers)), "a connection in this state")
    return list(filter(state, node.server._peers))


# -- who is not let in


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0",
        bytes(100_000),
        stream.MAGIC[:7] + b"X",
        stream.PREFACE.pack(stream.MAGIC, wire.VERSION + 1, b"s" * 16, b"t" * 16),
        stream.preface(b"s" * 16, b"t" * 16),
    ],
    ids=["http", "zero", "zeros", "magic", "version", "stranger"],
)
async def test_who_does_not_begin_rightly_is_dropped_at_once(node: DataNode, data: bytes) -> None:
    async with Raw(node) as raw:
        await raw.send(data)
        assert await raw.closed()
    assert (len(node.server), node.server.dropped) == (0, 1)


async def test_a_wrong_token_of_a_known_session_is_dropped(node: DataNode) -> None:
    async with Raw(node) as raw:
        await raw.send(stream.preface(node.session.id, b"t" * 16))
        assert await raw.closed()


@pytest.mark.parametrize("size", [0, 1, 8, 9, 40])
async def test_half_a_preface_is_waited_for_until_the_deadline(node: DataNode, size: int) -> None:
    session = node.session
    preface = stream.preface(session.id, session.token)
    async with Raw(node) as raw, Raw(node) as late:
        for client in (raw, late):
            await client.send(preface[:size])
        await until(lambda: len(node.server) == 2, "the connections")
        node.server.drop_stalled(monotonic())
        await raw.send(preface[size:])
        assert (await raw.ask(Kind.PING, 1, wire.Empty())).kind == Kind.PONG
        node.server.drop_stalled(monotonic() + STALL_NS + MS)
        assert await late.closed()
        assert (await raw.ask(Kind.PING, 2, wire.Empty())).kind == Kind.PONG


async def test_a_preface_and_requests_may_come_byte_by_byte(node: DataNode) -> None:
    session = node.session
    data = stream.preface(session.id, session.token) + put_of(b"k", b"value")
    async with Raw(node) as raw:
        for i in range(len(data)):
            await raw.send(data[i : i + 1])
            await asyncio.sleep(0)
        assert (await raw.receive())[0].body == wire.Statuses(b"")
    assert node.host.get(b"k") == [b"value"]


@pytest.mark.parametrize(
    "sizes",
    [
        (LIMITS.head_bytes_max + 1, 0),
        (0xFFFF_FFFF, 0),
        (40, LIMITS.message_bytes_max + 1),
        (40, (1 << 64) - 1),
    ],
)
async def test_announced_sizes_over_the_limits_are_refused_and_take_no_memory(
    node: DataNode, sizes: tuple[int, int]
) -> None:
    before = psutil.Process().memory_info().vms
    for _ in range(20):
        async with Greeted(node) as raw:
            await raw.send(SIZES.pack(*sizes))
            assert await raw.closed()
    assert node.begun == []
    assert psutil.Process().memory_info().vms - before < 16 * MIB


async def test_an_announced_size_within_the_limits_takes_no_memory_before_it_comes(
    node: DataNode,
) -> None:
    """Not even where a payload has no place yet."""
    begin = message(Kind.WRITE, 1, 0, wire.Write(1, 0), LIMITS.message_bytes_max)
    before = psutil.Process().memory_info().rss
    clients = [Greeted(node) for _ in range(64)]
    for raw in clients:
        await raw.__aenter__()
        await raw.send(begin)
    await until(lambda: len(node.begun) == 64, "the announcements")
    assert psutil.Process().memory_info().rss - before < 32 * MIB
    for raw in clients:
        raw.sock.close()
    await until(lambda: len(node.server) == 0, "the end of the connections")


@pytest.mark.parametrize(
    "data",
    [
        SIZES.pack(0, 0),
        SIZES.pack(100, 0) + bytes(100),
        SIZES.pack(21, 0) + wire.PREFIX.pack(1, 250, 0, 1, 0) + b"\x90",
        SIZES.pack(24, 0) + wire.PREFIX.pack(1, Kind.GET, 0, 1, 0) + b"\xdd\xff\xff\xff",
    ],
    ids=["no head", "zeros", "kind", "body"],
)
async def test_a_head_of_nonsense_ends_the_connection(node: DataNode, data: bytes) -> None:
    async with Greeted(node) as raw:
        assert (await raw.ask(Kind.PING, 1, wire.Empty())).kind == Kind.PONG
        await raw.send(data)
        assert await raw.closed()


# -- the usual way


async def test_many_requests_are_answered_in_their_order(node: DataNode) -> None:
    node.host.put({b"k": b"value"})
    async with Greeted(node) as raw:
        kinds = [(Kind.GET, GET), (Kind.PING, wire.Empty()), (Kind.EXISTS, wire.Exists([b"k"]))]
        sent = [(kinds[i % 3], i) for i in range(1, 1000)]
        await raw.send(b"".join(message(k, i, 0, body, 0) for (k, body), i in sent))
        for (kind, _), i in sent:
            head, payload = await raw.receive()
            assert head.request == i
            assert payload == (b"value" if kind == Kind.GET else b"")
            assert head.revision == 7


async def test_a_small_answer_gives_the_tokens_of_its_values_back(node: DataNode) -> None:
    values = {b"a": os.urandom(3 * KIB), b"b": os.urandom(3 * KIB)}
    node.host.put(values)
    async with Greeted(node) as raw:
        await raw.send(message(Kind.GET, 1, 0, wire.Get(list(values)), 0))
        assert (await raw.receive())[1] == b"".join(values.values())
    node.store.reap(monotonic())
    assert node.host.statuses(Kind.DELETE, wire.Delete(list(values))) == []
    assert node.store.stats().retiring == 0


async def test_small_answers_to_who_does_not_read_yet_arrive_whole_later(node: DataNode) -> None:
    value = os.urandom(7 * KIB)
    node.host.put({b"k": value})
    served = node.host.handlers.requests
    async with Greeted(node, receive_buffer=4 * KIB) as raw:
        for i in range(1, 1201):  # one at a time, so that each is answered at once
            before = served.get(Kind.GET, 0)
            await raw.send(message(Kind.GET, i, 0, wire.Get([b"k"]), 0))
            await until(
                lambda before=before: served.get(Kind.GET, 0) > before, "a request is served"
            )
        for i in range(1, 1201):
            head, payload = await raw.receive()
            assert (head.request, payload) == (i, value)


async def test_a_put_of_many_pieces_goes_into_the_arena_and_out_again(node: DataNode) -> None:
    values = {b"k%d" % i: os.urandom(KIB * (i + 1)) for i in range(40)}
    body = wire.Put(list(values), list(map(len, values.values())), PLAIN)
    async with Greeted(node) as raw:
        head = await raw.ask(Kind.PUT, 1, body, b"".join(values.values()))
        assert head.body == wire.Statuses(b"")
        await raw.send(message(Kind.GET, 2, 0, wire.Get(list(values)), 0))
        assert (await raw.receive())[1] == b"".join(values.values())


async def test_what_cannot_be_stored_is_received_and_refused_by_key(node: DataNode) -> None:
    node.host.put({b"a": b"old"})
    async with Greeted(node) as raw:
        body = wire.Put([b"a", b"b"], [3, 3], PutOptions(if_absent=True))
        head = await raw.ask(Kind.PUT, 1, body, b"newnew")
        assert list(head.body.statuses) == [Status.EXISTS, Status.OK]
    assert node.host.get(b"a", b"b") == [b"old", b"new"]


async def test_a_put_that_contradicts_itself_is_refused_and_the_connection_goes_on(
    node: DataNode,
) -> None:
    async with Greeted(node) as raw:
        for id, body in enumerate(
            [wire.Put([b"k"], [5], PLAIN), wire.Put([b"k"], [6, 1], PLAIN)], 1
        ):
            assert (await raw.ask(Kind.PUT, id, body, b"123456")).kind == Kind.ERROR
        assert (await raw.ask(Kind.PING, 9, wire.Empty())).kind == Kind.PONG
    assert node.host.get(b"k") == [None]


async def test_requests_of_a_session_that_is_gone_are_refused(node: DataNode) -> None:
    async with Greeted(node) as raw:
        assert (await raw.ask(Kind.PING, 1, wire.Empty())).kind == Kind.PONG
        node.host.sessions.end(node.session)
        await raw.send(put_of(b"k", b"v", 2))
        head, _ = await raw.receive()
        assert (head.kind, head.body.fault) == (Kind.ERROR, wire.Fault.NO_SESSION)


# -- puts that do not come to their end


@pytest.mark.parametrize("reset", [False, True])
async def test_a_put_whose_client_goes_in_the_middle_never_was(node: DataNode, reset: bool) -> None:
    node.host.put({b"k": b"old"})
    used = node.store.stats().used_bytes
    whole = put_of(b"k", os.urandom(900 * KIB))
    async with Greeted(node) as raw:
        await raw.send(whole[: len(whole) // 2])
        await until(lambda: node.store.stats().allocated == 1, "the beginning of the put")
        if reset:
            linger = struct.pack("ii", 1, 0)
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await until(lambda: len(node.server) == 0, "the end of the connection")
    stats = node.store.stats()
    assert (stats.allocated, stats.retiring, stats.used_bytes) == (0, 0, used)
    assert node.host.get(b"k") == [b"old"]


async def test_who_stops_in_the_middle_of_a_put_is_dropped_after_the_deadline(
    node: DataNode,
) -> None:
    whole = put_of(b"k", bytes(900 * KIB))
    async with Greeted(node) as raw:
        await raw.send(whole[:-1])
        await until(lambda: node.store.stats().allocated == 1, "the beginning of the put")
        await peers_with(node, lambda p: p._targets and len(p._targets[0]) == 1)
        node.server.drop_stalled(monotonic())
        assert len(node.server) == 1
        node.server.drop_stalled(monotonic() + STALL_NS + MS)
        assert await raw.closed()
    assert (node.store.stats().allocated, node.server.dropped) == (0, 1)


async def test_an_idle_connection_is_left_in_peace(node: DataNode) -> None:
    async with Greeted(node) as raw:
        assert (await raw.ask(Kind.PING, 1, wire.Empty())).kind == Kind.PONG
        node.server.drop_stalled(monotonic() + 3600 * S)
        assert (await raw.ask(Kind.PING, 2, wire.Empty())).kind == Kind.PONG


async def test_who_shares_memory_is_never_dropped_for_standing_still(node: DataNode) -> None:
    """Its client may be paused in the middle of writing there."""
    async with Greeted(node) as raw:
        head = await raw.ask(Kind.ALLOC, 1, wire.Alloc([b"k"], [MIB], PLAIN, True))
        assert head.body.ids[0]
        whole = put_of(b"other", bytes(100))
        await raw.send(whole[:-1])
        await until(lambda: node.begun, "half a put")
        node.server.drop_stalled(monotonic() + 3600 * S)
        assert len(node.server) == 1
        (peer,) = node.server._peers
        option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert peer._sock.getsockopt(*option) == 0, "nor does the kernel drop it"
        await raw.send(whole[-1:])
        assert (await raw.receive())[0].kind == Kind.STATUSES


async def test_shared_extents_outlive_allocation_and_session_and_go_with_the_connection(
    node: DataNode,
) -> None:
    async with Greeted(node) as raw:
        head = await raw.ask(Kind.ALLOC, 1, wire.Alloc([b"k"], [MIB], PLAIN, True))
        (offset,) = head.body.offsets
        node.host.sessions.reap(monotonic() + 20 * S)
        assert not node.session.allocations
        node.host.sessions.end(node.session)
        other = node.host.open_session(b"d", b"1", monotonic())
        fills = {b"f%d" % i: bytes([i + 1]) * (MIB - 64) for i in range(60)}
        async with Greeted(node, other) as second:
            for i, (key, value) in enumerate(fills.items(), 1):
                await second.send(put_of(key, value, i))
                assert (await second.receive())[0].body == wire.Statuses(b"")
        places = [(o.offset, o.offset + o.size) for o in objects(node)]
        assert len(places) > 20
        assert not [p for p in places if p[0] < offset + MIB and offset < p[1]]
        assert node.store.stats().retiring == 1
    await until(lambda: node.store.stats().retiring == 0, "the extent is free")


async def test_memory_is_not_shared_with_a_repeat_of_what_was_given_back(node: DataNode) -> None:
    async with Greeted(node) as raw:
        head = await raw.ask(Kind.ALLOC, 1, wire.Alloc([b"k"], [MIB], PLAIN, True))
        commit = wire.Commit(head.body.ids, True)
        assert (await raw.ask(Kind.ABORT, 2, wire.Abort(head.body.ids))).body.statuses == b""
        assert node.store.stats().used_bytes == 0
        assert (await raw.ask(Kind.COMMIT, 3, commit)).body.statuses == bytes([Status.CONFLICT])


# -- repeated puts


async def test_a_repeated_put_is_answered_again_and_not_run_again(node: DataNode) -> None:
    async with Greeted(node) as raw:
        await raw.send(put_of(b"k", b"first", 5))
        assert (await raw.receive())[0].body == wire.Statuses(b"")
        node.host.put({b"k": b"other"})
        await raw.send(put_of(b"k", b"first", 5))
        assert (await raw.receive())[0].body == wire.Statuses(b"")
    assert node.host.get(b"k") == [b"other"]


async def test_a_put_that_ran_on_another_connection_meanwhile_does_not_run_again(
    node: DataNode,
) -> None:
    whole = put_of(b"k", b"v" * 1000, 5)
    async with Greeted(node) as first, Greeted(node) as second:
        await first.send(whole[:-1])
        await until(lambda: node.store.stats().allocated == 1, "the beginning of the put")
        await second.send(whole)
        assert (await second.receive())[0].body == wire.Statuses(b"")
        node.host.put({b"k": b"later"})
        await first.send(whole[-1:])
        assert (await first.receive())[0].body == wire.Statuses(b"")
    assert node.host.get(b"k") == [b"later"]
    assert node.store.stats().allocated == 0


# -- writes that wait for other nodes


@pytest.fixture
def shared(node: DataNode) -> DataNode:
    """Its buckets have a second copy each, which acknowledges when the test says so."""
    node.host.share(*range(node.host.BUCKETS), now=monotonic())
    return node


async def test_a_late_answer_leaves_when_it_is_there_and_earlier_ones_do_not_wait_for_it(
    shared: DataNode,
) -> None:
    async with Greeted(shared) as raw:
        await raw.send(put_of(b"k", b"1", 5))
        head = await raw.ask(Kind.PING, 6, wire.Empty())
        assert (head.kind, head.request) == (Kind.PONG, 6)
        shared.host.acknowledge(monotonic())
        head, _ = await raw.receive()
        assert (head.request, head.body) == (5, wire.Statuses(b"", bytes([2])))


async def test_a_repeat_on_another_connection_joins_a_write_that_is_under_way(
    shared: DataNode,
) -> None:
    async with Greeted(shared) as first, Greeted(shared) as second:
        await first.send(put_of(b"k", b"1", 5))
        await until(lambda: shared.host.under_way, "the put is under way")
        await second.send(put_of(b"k", b"1", 5))
        await second.ask(Kind.PING, 6, wire.Empty())
        shared.host.acknowledge(monotonic())
        for raw in (first, second):
            head, _ = await raw.receive()
            assert (head.request, head.body.copies) == (5, bytes([2]))
    puts = [b for b in shared.host.replicas.by_bucket.values() if b.last]
    assert [b.last for b in puts] == [1]


@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_is_gone_before_the_answer_does_no_harm(
    shared: DataNode, reset: bool
) -> None:
    async with Greeted(shared) as raw:
        await raw.send(put_of(b"k", b"1", 5))
        await until(lambda: shared.host.under_way, "the put is under way")
        if reset:
            linger = struct.pack("ii", 1, 0)
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await until(lambda: len(shared.server) == 0, "the connection is closed")
    shared.host.acknowledge(monotonic())
    async with Greeted(shared) as raw:
        await raw.send(put_of(b"k", b"1", 5))
        assert (await raw.receive())[0].body.copies == bytes([2])
        assert (await raw.ask(Kind.GET, 7, GET)).body.sizes == [1]


async def test_a_late_answer_to_who_does_not_read_waits_in_its_turn(shared: DataNode) -> None:
    async with Greeted(shared, receive_buffer=64 * KIB) as raw:
        await raw.send(put_of(b"large", bytes(512 * KIB), 4))
        await until(lambda: shared.host.under_way, "the put is under way")
        shared.host.acknowledge(monotonic())
        await raw.receive()
        await raw.send(put_of(b"k", b"1", 5))
        get = message(Kind.GET, 6, 0, wire.Get([b"large"]), 0)
        await raw.send(get * 8)
        await peers_with(shared, lambda peer: peer._outgoing)
        shared.host.acknowledge(monotonic())
        heads = [(await raw.receive())[0] for _ in range(9)]
        assert sorted(head.request for head in heads) == [5] + [6] * 8


# -- those who are slow, and the others


async def test_who_does_not_read_is_not_read_from_and_then_dropped(node: DataNode) -> None:
    node.host.put({b"k": bytes(MIB)})
    async with Greeted(node, receive_buffer=64 * KIB) as raw, Greeted(node) as other:
        await raw.send(b"".join(message(Kind.GET, i, 0, GET, 0) for i in range(1, 1000)))
        (peer,) = await peers_with(node, lambda p: p._outgoing_bytes > OUTGOING_BYTES_MAX)
        assert peer._outgoing_bytes < OUTGOING_BYTES_MAX + 2 * MIB
        assert (await other.ask(Kind.PING, 1, wire.Empty())).kind == Kind.PONG
        (item,) = objects(node)
        assert item.readers > 0
        node.server.drop_stalled(monotonic() + STALL_NS + MS)
        assert len(node.server) == 1
        node.store.reap(monotonic())
        assert item.readers == 0


async def test_who_reads_slowly_gets_everything(node: DataNode) -> None:
    value = os.urandom(MIB)
    node.host.put({b"k": value})
    async with Greeted(node, receive_buffer=256 * KIB) as raw:
        await raw.send(b"".join(message(Kind.GET, i, 0, GET, 0) for i in range(1, 81)))
        await until(lambda: not next(iter(node.server._peers))._reading, "it is not read from")
        for i in range(1, 81):
            head, payload = await raw.receive()
            assert (head.request, payload == value) == (i, True)


async def test_an_overwritten_value_that_is_on_its_way_arrives_whole(node: DataNode) -> None:
    value = os.urandom(MIB)
    node.host.put({b"k": value})
    async with Greeted(node, receive_buffer=32 * KIB) as raw:
        await raw.send(message(Kind.GET, 1, 0, GET, 0) * 30)
        await peers_with(node, lambda p: p._outgoing)
        node.host.put({b"k": b"new"})
        for i in range(30):
            node.host.put({b"f%d" % i: os.urandom(MIB)})
        for _ in range(30):
            assert (await raw.receive())[1] in (value, b"new")
    await until(lambda: not node.server._peers, "the end")


async def test_one_busy_connection_does_not_starve_the_others(node: DataNode) -> None:
    node.host.put({b"k": bytes(100)})
    async with Greeted(node) as busy, Greeted(node) as calm:
        flood = b"".join(message(Kind.GET, i, 0, GET, 0) for i in range(1, 1001))
        answers = 0

        async def drain() -> None:
            nonlocal answers
            while got := await busy.loop.sock_recv(busy.sock, 1 << 20):
                answers += len(got)

        async def ask() -> None:
            while True:
                await busy.send(flood)

        tasks = [asyncio.create_task(drain()), asyncio.create_task(ask())]
        times = []
        for i in range(100):
            began = time.monotonic()
            assert (await calm.ask(Kind.PING, i + 1, wire.Empty())).kind == Kind.PONG
            times.append(time.monotonic() - began)
        for task in tasks:
            task.cancel()
        assert answers > 100 * KIB
        assert sorted(times)[50] < 0.05


async def test_a_session_that_is_closed_takes_its_connections_along(node: DataNode) -> None:
    async with Greeted(node) as raw, Greeted(node) as second:
        for client in (raw, second):
            assert (await client.ask(Kind.PING, 1, wire.Empty())).kind == Kind.PONG
        node.server.close_session(node.session.id)
        assert await raw.closed()
        assert await second.closed()


async def test_what_was_committed_by_put_is_an_object_like_others(node: DataNode) -> None:
    async with Greeted(node) as raw:
        await raw.send(put_of(b"k", b"value", options=PutOptions(soft_pin=True, ttl_ms=5000)))
        await raw.receive()
    (item,) = objects(node)
    assert (item.state, item.readers, item.options.soft_pin) == (State.COMMITTED, 0, True)
    assert item.expires_at > monotonic()
