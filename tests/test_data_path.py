"""Requests over data connections and through a node's memory: blocking, against a real store."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from dataside import PEER, DataNode, TcpPeer, Wire, new_seed, until
from nodeside import KIB, MIB, PLAIN, S

from p2pkv import ring, wire
from p2pkv.ahead import AHEAD_MIN, PASSES, Ahead
from p2pkv.arena import Arena
from p2pkv.checksums import checksums_of
from p2pkv.clock import monotonic
from p2pkv.config import Limits
from p2pkv.data_path import DataExchange, DataPath
from p2pkv.errors import ProtocolError
from p2pkv.objects import HEADER_BYTES
from p2pkv.parts import Parts
from p2pkv.routing import Lost, Reply, Request
from p2pkv.shared_memory import (
    SHARED_PUT_MIN,
    LocatedValues,
    SharedArena,
    SharedPut,
    message_for,
)
from p2pkv.store import ROOM_SHARE
from p2pkv.stream import PREFACE
from p2pkv.transport import ClientSession, new_client_id
from p2pkv.wire import Fault, Kind, PutOptions, Status

LIMITS = Limits(key_bytes_max=64, value_bytes_max=16 * MIB, batch_keys_max=256, scan_keys_max=256,
                head_bytes_max=64 * KIB, message_bytes_max=16 * MIB, inflight_max=4)  # fmt: skip


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(32 * MIB, "path") as arena:
        yield arena


@pytest.fixture
async def node(arena: Arena) -> AsyncIterator[DataNode]:
    async with DataNode(arena, LIMITS) as node:
        yield node


class Caller:
    """A client with one data path, its exchanges on a thread."""

    def __init__(self, node: DataNode, shared: bool = True) -> None:
        self.node = node
        self._session = ClientSession(new_client_id(b"c"))
        begun = node.host.sessions.begin(self._session.id, None, monotonic())
        assert begun is not None
        self.session = begun
        self._shared = shared
        self.exchange: Any = None

    async def __aenter__(self) -> Caller:
        welcome = self.node.welcome(self.session)
        self.path = await asyncio.to_thread(DataPath, welcome, self._session, LIMITS, self._shared)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.path.close()
        await until(lambda: len(self.node.server) == 0, "the end of the connection")

    async def ask(self, *requests: Request, timeout_s: float = 10.0) -> list[Any]:
        self.exchange = DataExchange(requests, [self.path] * len(requests))
        deadline = time.monotonic_ns() + round(timeout_s * 1e9)
        return await asyncio.to_thread(self.exchange.run, deadline)

    async def get(self, *keys: bytes, sink: Any = None) -> Any:
        request = Request(PEER, Kind.GET, wire.Get(list(keys)))
        request.sink = sink
        (answer,) = await self.ask(request)
        return answer

    async def put(self, values: dict[bytes, Any], options: PutOptions = PLAIN) -> Any:
        (answer,) = await self.ask(put_of(values, options))
        return answer


def put_of(values: dict[bytes, Any], options: PutOptions = PLAIN) -> Request:
    sizes = [len(v) for v in values.values()]
    payload = [v for v in values.values() if v]
    return Request(PEER, Kind.PUT, wire.Put(list(values), sizes, options), payload)


@pytest.fixture
async def caller(node: DataNode) -> AsyncIterator[Caller]:
    async with Caller(node) as caller:
        yield caller


def into(buffers: Sequence[Parts]) -> Callable[[wire.Values], Sequence[Parts]]:
    return lambda body: [
        b[:n] if isinstance(b, memoryview) else b for b, n in zip(buffers, body.sizes, strict=True)
    ]


def served(node: DataNode, kind: Kind) -> int:
    return node.host.handlers.requests.get(kind, 0)


class Meddled(SharedArena):
    """An arena with which something happens between an answer and the copy."""

    meddle: Callable[[], object] = staticmethod(lambda: None)

    def read(self, offsets: Sequence[int], targets: Sequence[Parts]) -> None:
        self.meddle()
        super().read(offsets, targets)

    def load(self, offset: int, size: int) -> bytes:
        self.meddle()
        return super().load(offset, size)


def meddle(caller: Caller, act: Callable[[], object]) -> None:
    """``act`` runs, once, on the node's loop while the next answer is being copied."""
    loop = asyncio.get_running_loop()

    async def acts() -> None:
        act()

    def once() -> None:
        arena.meddle = lambda: None  # type: ignore[method-assign]
        asyncio.run_coroutine_threadsafe(acts(), loop).result(10)

    welcome = caller.node.welcome(caller.session)
    assert welcome.arena is not None
    arena = Meddled.open(*welcome.arena)
    assert isinstance(arena, Meddled)
    arena.meddle = once  # type: ignore[method-assign]
    caller.path.arena = arena


# -- reading from the arena


async def test_small_and_large_values_and_misses_come_as_they_are(caller: Caller) -> None:
    values = {b"%d" % n: os.urandom(n) for n in (0, 1, 8191, 8192, 100_000, 300_000, 4 * MIB)}
    caller.node.host.put(values)
    answer = await caller.get(*values, b"none")
    assert list(answer.values) == [*values.values(), b""]
    assert set(map(type, answer.values)) == {bytes}
    assert list(answer.body.statuses) == [0] * 7 + [Status.MISS]


async def test_a_single_large_value_is_one_frame_too(caller: Caller) -> None:
    """So that the quick way for one key can take it."""
    caller.node.host.put({b"k": b"v" * MIB})
    answer = await caller.get(b"k")
    assert list(map(len, answer.frames)) == answer.body.sizes == [MIB]
    assert answer.body.statuses == b""


async def test_values_are_copied_into_buffers_and_their_parts(caller: Caller) -> None:
    values = {b"a": os.urandom(100), b"b": os.urandom(MIB), b"c": os.urandom(20_000)}
    caller.node.host.put(values)
    parts = tuple(memoryview(bytearray(n)) for n in (1, 0, 9_999, 10_000))
    buffers: list[Parts] = [memoryview(bytearray(200)), memoryview(bytearray(MIB)), parts]
    answer = await caller.get(*values, sink=into(buffers))
    assert answer.delivered
    assert [bytes(buffers[0])[:100], bytes(buffers[1]), b"".join(parts)] == list(values.values())


async def test_ranges_of_large_values_are_read_from_the_arena(caller: Caller) -> None:
    value = os.urandom(MIB)
    caller.node.host.put({b"k": value})
    body = wire.Get([b"k", b"k", b"k"], False, False, [5, 0, MIB - 3], [500_000, 10, -1])
    (answer,) = await caller.ask(Request(PEER, Kind.GET, body))
    assert list(answer.values) == [value[5:500_005], value[:10], value[-3:]]
    assert answer.body.totals == [MIB] * 3


@pytest.mark.parametrize("sink", [False, True])
async def test_a_value_that_is_overwritten_during_the_copy_is_to_be_asked_for_again(
    caller: Caller, sink: bool
) -> None:
    host = caller.node.host
    host.put({b"a": b"a" * MIB, b"b": b"b" * MIB})
    fills = {b"f%d" % i: bytes(MIB) for i in range(29)}

    def overwrite() -> None:
        host.put({b"b": b"B" * MIB})
        host.put(fills)

    meddle(caller, overwrite)
    buffers = [memoryview(bytearray(MIB)) for _ in range(2)]
    answer = await caller.get(b"a", b"b", sink=into(buffers) if sink else None)
    assert answer.body.statuses[1] == Status.DEFERRED
    answer = await caller.get(b"b")
    assert answer.values == [b"B" * MIB]


@pytest.mark.parametrize("how", ["deleted", "evicted", "dropped"])
async def test_what_leaves_during_the_copy_and_whose_memory_is_used_again_is_not_returned(
    caller: Caller, how: str
) -> None:
    host = caller.node.host
    host.put({b"a": b"a" * MIB})

    def leave() -> None:
        if how == "deleted":
            host.statuses(Kind.DELETE, wire.Delete([b"a"]))
        elif how == "dropped":
            for bucket in list(host.store.buckets):
                host.store.drop_bucket(bucket)
                host.store.open_bucket(bucket)
        for i in range(40):
            host.put({b"f%d" % i: bytes([i + 1]) * MIB})

    meddle(caller, leave)
    answer = await caller.get(b"a")
    assert list(answer.body.statuses) == [Status.DEFERRED]


async def test_readers_during_endless_overwriting_get_one_version_whole(caller: Caller) -> None:
    host = caller.node.host

    def value(n: int) -> bytes:
        return (b"%07d;" % n) * (32 * KIB)

    host.put({b"k": value(0)})
    seen: set[bytes] = set()
    deferred = 0
    for n in range(1, 120):
        reading = asyncio.create_task(caller.get(b"k"))
        for _ in range(5):
            host.put({b"k": value(n)})
            await asyncio.sleep(0)
        answer = await reading
        if answer.body.statuses:
            deferred += 1
            continue
        got = answer.values[0]
        assert got == got[:8] * (32 * KIB), "a mixture"
        seen.add(got[:8])
    print(f"{len(seen)} versions seen, {deferred} asked for again")
    assert len(seen) > 20


# -- writing to the arena


async def test_large_puts_are_written_to_the_arena_and_small_ones_sent(caller: Caller) -> None:
    large, small = os.urandom(SHARED_PUT_MIN), os.urandom(AHEAD_MIN - 1)
    assert (await caller.put({b"l": large})).body.statuses == b""
    assert (served(caller.node, Kind.ALLOC), served(caller.node, Kind.COMMIT)) == (1, 1)
    assert (await caller.put({b"s": small})).body.statuses == b""
    huge = os.urandom(caller.node.store.arena.size // 4 + 1)
    assert (await caller.put({b"h": huge})).body.statuses == b""
    assert (served(caller.node, Kind.ALLOC), served(caller.node, Kind.PUT)) == (1, 2)
    assert caller.node.host.get(b"l", b"s", b"h") == [large, small, huge]
    assert not caller.node.session.allocations


async def test_values_in_pieces_are_written_in_their_order(caller: Caller) -> None:
    pieces = [os.urandom(n) for n in (MIB, 1, 300_000, 17)]
    request = Request(PEER, Kind.PUT, wire.Put([b"a", b"b"], [MIB + 1, 300_017], PLAIN), pieces)
    (answer,) = await caller.ask(request)
    assert answer.body.statuses == b""
    assert caller.node.host.get(b"a", b"b") == [b"".join(pieces[:2]), b"".join(pieces[2:])]


async def test_each_key_of_a_large_put_has_its_own_outcome(caller: Caller) -> None:
    caller.node.host.put({b"a": b"old"})
    values = {b"a": bytes(MIB), b"b": bytes(MIB)}
    answer = await caller.put(values, PutOptions(if_absent=True))
    assert list(answer.body.statuses) == [Status.EXISTS, Status.OK]
    answer = await caller.put(values, PutOptions(if_absent=True))
    assert list(answer.body.statuses) == [Status.EXISTS] * 2
    assert caller.node.store.stats().allocated == 0


async def test_nothing_is_held_after_many_large_puts(caller: Caller) -> None:
    for i in range(50):
        await caller.put({b"%d" % (i % 3): bytes([i]) * MIB})
    stats = caller.node.store.stats()
    assert (stats.allocated, stats.retiring, stats.objects) == (0, 0, 3)


async def test_a_client_that_is_paused_before_it_writes_never_hits_what_others_put(
    caller: Caller,
) -> None:
    """Not after the allocation's deadline, nor after its session's."""
    host, store = caller.node.host, caller.node.store
    alloc = Request(PEER, Kind.ALLOC, wire.Alloc([b"mine"], [4 * MIB], PLAIN, True))
    (answer,) = await caller.ask(alloc)
    late = put_of({b"mine": b"x" * (4 * MIB)})
    put = SharedPut(caller.path.arena, late, answer.body)  # type: ignore[arg-type]

    host.sessions.reap(monotonic() + 20 * S)
    assert not caller.session.allocations
    others = {b"o%d" % i: bytes([i + 1]) * MIB for i in range(60)}
    for key, value in others.items():
        host.put({key: value})
    put.run()
    there = [k for k in others if host.get(k) != [None]]
    assert len(there) > 20
    assert [host.get(k) for k in there] == [[others[k]] for k in there]
    assert store.stats().retiring == 1

    commit = Request(PEER, Kind.COMMIT, wire.Commit(put.ids, True))
    (answer,) = await caller.ask(commit)
    assert list(put.reply(answer).body.statuses) == [Status.MOVING], "it is to be put again"
    assert store.stats().retiring == 0
    assert host.get(b"mine") == [None]


async def test_what_a_client_holds_is_free_when_its_connection_closes(node: DataNode) -> None:
    async with Caller(node) as caller:
        await caller.ask(Request(PEER, Kind.ALLOC, wire.Alloc([b"k"], [MIB], PLAIN, True)))
        assert node.store.stats().allocated == 1
        node.host.sessions.end(caller.session)
        assert node.store.stats().retiring == 1
    assert node.store.stats().used_bytes == 0


# -- room ahead of puts


def ahead_of(caller: Caller) -> Ahead:
    ahead = caller.path.ahead
    assert ahead is not None
    return ahead


async def test_from_the_third_put_of_the_like_on_one_message_is_enough(caller: Caller) -> None:
    values = {b"%d" % i: os.urandom(AHEAD_MIN) for i in range(8)}
    for i, value in values.items():
        assert (await caller.put({i: value})).body.statuses == b""
    kinds = [served(caller.node, k) for k in (Kind.PUT, Kind.LEASE, Kind.FILLED, Kind.ALLOC)]
    assert kinds == [1, 1, 7, 0]
    assert caller.node.host.get(*values) == list(values.values())


async def test_a_batch_of_pieces_goes_into_the_room_in_its_order(caller: Caller) -> None:
    pieces = [os.urandom(n) for n in (MIB, 1, 300_000, 17)]
    for _ in range(3):
        request = Request(PEER, Kind.PUT, wire.Put([b"a", b"b"], [MIB + 1, 300_017], PLAIN), pieces)
        (answer,) = await caller.ask(request)
        assert answer.body.statuses == b""
    assert served(caller.node, Kind.FILLED) == 2
    assert caller.node.host.get(b"a", b"b") == [b"".join(pieces[:2]), b"".join(pieces[2:])]


async def test_a_put_into_the_room_gives_the_checksums_that_are_wanted(caller: Caller) -> None:
    for value in (os.urandom(100_000) for _ in range(3)):
        request = put_of({b"k": value})
        request.seal = lambda: None
        await caller.ask(request)
    item = caller.node.store.find(ring.bucket_of(b"k", 4), b"k", 1)
    assert item is not None
    assert item.checksum == checksums_of([memoryview(value)])[0]


async def test_puts_of_all_sizes_one_after_the_other_are_all_right(caller: Caller) -> None:
    chance = new_seed()
    for _ in range(60):
        sizes = [chance.choice((0, 1, 5000, 40_000, 200_000)) for _ in range(chance.randint(1, 4))]
        values = {b"%d" % i: chance.randbytes(size) for i, size in enumerate(sizes)}
        assert (await caller.put(values)).body.statuses == b""
        assert caller.node.host.get(*values) == list(values.values())
    assert served(caller.node, Kind.FILLED) > 0
    assert caller.node.store.stats().allocated == 0


async def test_of_puts_that_leave_together_one_has_the_room(caller: Caller) -> None:
    """A second one that asked for room would end the first one's, which is being written to."""
    for turn in range(6):
        values = {b"%d" % i: os.urandom(50_000 + 10_000 * turn) for i in range(5)}
        answers = await caller.ask(*(put_of({key: value}) for key, value in values.items()))
        assert [a.body.statuses for a in answers] == [b""] * 5
        assert caller.node.host.get(*values) == list(values.values())
    assert served(caller.node, Kind.FILLED) > 0
    assert caller.node.store.stats().allocated == 0


async def test_a_client_that_gets_no_room_asks_for_extents(caller: Caller) -> None:
    store = caller.node.store
    others = [store.open_room(store.arena.size // ROOM_SHARE, 1) for _ in range(ROOM_SHARE)]
    assert None in others, "all is given"
    for i in range(3):
        assert (await caller.put({b"k": bytes([i]) * MIB})).body.statuses == b""
    assert caller.node.host.get(b"k") == [bytes([2]) * MIB]
    kinds = [served(caller.node, kind) for kind in (Kind.FILLED, Kind.ALLOC, Kind.COMMIT)]
    assert kinds == [0, 3, 3]


async def test_a_client_that_got_no_room_does_not_ask_with_every_put(caller: Caller) -> None:
    store = caller.node.store
    for _ in range(ROOM_SHARE):
        store.open_room(store.arena.size // ROOM_SHARE, 1)
    for _ in range(PASSES):
        await caller.put({b"k": bytes(AHEAD_MIN)})
    assert served(caller.node, Kind.LEASE) == 1
    for room in list(store.extents.rooms):
        store.close_room(room)
    for _ in range(4):
        await caller.put({b"k": bytes(AHEAD_MIN)})
    assert served(caller.node, Kind.LEASE) == 2
    assert served(caller.node, Kind.FILLED) > 0


async def test_room_that_a_client_has_is_free_when_its_connection_closes(node: DataNode) -> None:
    async with Caller(node) as caller:
        for _ in range(3):
            await caller.put({b"k": bytes(MIB)})
        assert node.store.stats().rooms_bytes == ahead_of(caller).size > 0
    node.host.statuses(Kind.DELETE, wire.Delete([b"k"]))
    assert node.store.stats().used_bytes == 0


async def test_a_put_into_room_that_the_node_does_not_know_is_refused_and_the_next_one_is_not(
    caller: Caller,
) -> None:
    for _ in range(2):
        await caller.put({b"k": bytes(MIB)})
    ahead_of(caller).start += HEADER_BYTES
    assert (await caller.put({b"k": b"1" * (MIB - 64)})).kind == Kind.ERROR
    assert (await caller.put({b"k": b"2" * MIB})).body.statuses == b""
    assert caller.node.host.get(b"k") == [b"2" * MIB]


@pytest.mark.parametrize("room", [(64, 1 << 40), (1, 1000), (1 << 40, 64)])
async def test_room_at_an_impossible_place_is_none(arena: Arena, room: tuple[int, int]) -> None:
    mapped = SharedArena.open(str(arena.path), arena.size, arena.proof)
    assert mapped is not None
    ahead = Ahead(mapped)
    ahead.take(room)
    assert ahead.size == 0


async def test_a_put_into_the_room_that_may_have_run_is_not_run_twice(caller: Caller) -> None:
    for _ in range(2):
        await caller.put({b"k": b"old" * MIB})
    request = put_of({b"k": b"v" * MIB})
    (answer,) = await caller.ask(request)
    assert answer.body.statuses == b""
    caller.node.host.put({b"k": b"other"})
    request.unsure = True
    (answer,) = await caller.ask(request)
    assert answer.body.statuses == b""
    assert caller.node.host.get(b"k") == [b"other"]


async def test_a_put_that_may_have_run_is_repeated_as_it_is(caller: Caller) -> None:
    request = put_of({b"k": b"v" * MIB})
    (answer,) = await caller.ask(request)
    assert answer.body.statuses == b""
    caller.node.host.put({b"k": b"other"})
    request.unsure = True
    (answer,) = await caller.ask(request)
    assert answer.body.statuses == b""
    assert caller.node.host.get(b"k") == [b"other"]
    assert (served(caller.node, Kind.ALLOC), caller.node.store.stats().allocated) == (1, 0)


# -- sessions


async def test_a_forgotten_session_is_reported_and_nothing_counts_as_sent(caller: Caller) -> None:
    await caller.get(b"k")
    caller.node.host.sessions.end(caller.session)
    requests = [put_of({b"k": b"v"}), put_of({b"l": b"v" * MIB})]
    answers = await caller.ask(*requests)
    assert [a.body.fault for a in answers] == [Fault.NO_SESSION] * 2
    assert [(r.sent, r.id) for r in requests] == [(False, 0)] * 2
    assert caller.exchange.forgotten == {caller.path}


async def test_a_write_that_may_have_run_in_a_forgotten_session_keeps_its_number(
    caller: Caller,
) -> None:
    request = put_of({b"k": b"v"})
    await caller.ask(request)
    request.unsure, number = True, request.id
    caller.node.host.sessions.end(caller.session)
    (answer,) = await caller.ask(request)
    assert answer.body.fault == Fault.NO_SESSION
    assert (request.sent, request.id) == (True, number)


# -- nodes that go, or answer nonsense


async def test_the_memory_of_a_node_that_is_gone_can_still_be_read(node: DataNode) -> None:
    async with Caller(node) as caller:
        node.host.put({b"k": b"v" * MIB})
        reply = await caller.get(b"k")
        assert reply.values == [b"v" * MIB]
        shared = caller.path.arena
        assert shared is not None
        (item,) = [o for b in node.store.buckets.values() for o in b.objects.values()]
        place = item.offset
        os.unlink(node.store.arena.path)
        node.server.close()
        (answer,) = await caller.ask(put_of({b"k": bytes(MIB)}))
        assert isinstance(answer, Lost)
        assert shared.load(place, MIB) == b"v" * MIB
        shared.write([place], [memoryview(b"w" * MIB)])


SOME = wire.Values(b"", [100], [], b"", [64], [1])
HOSTILE_GETS = {
    "outside": wire.Values(b"", [MIB], [], b"", [1 << 40], [1]),
    "over the end": wire.Values(b"", [MIB], [], b"", [32 * MIB - 64], [1]),
    "in the first header": wire.Values(b"", [64], [], b"", [1], [1]),
    "too many": wire.Values(b"", [100] * 2, [], b"", [64] * 2, [1] * 2),
    "no versions": wire.Values(b"", [100], [], b"", [64], []),
    "statuses": wire.Values(b"\0\0", [100], [], b"", [64], [1]),
}
HOSTILE_PUTS = {
    "outside": wire.Allocated(b"", [1], [1 << 40]),
    "over the end": wire.Allocated(b"", [1], [32 * MIB - MIB + 1]),
    "in the first header": wire.Allocated(b"", [1], [1]),
    "too many": wire.Allocated(b"", [1, 2], [64, 64]),
    "no places": wire.Allocated(b"", [1], []),
    "statuses": wire.Allocated(b"\0\0", [1], [64]),
}


def hostile(arena: Arena, body: wire.Body, then: wire.Body | None = None) -> Any:
    """A path to a peer that answers so."""
    kinds = {wire.Values: Kind.VALUES, wire.Allocated: Kind.ALLOCATED, wire.Statuses: Kind.STATUSES}

    def serve(peer: Wire) -> None:
        peer.read(PREFACE.size)
        for answer in filter(None, (body, then)):
            head, _ = peer.receive()
            peer.send(kinds[type(answer)], head.request, answer)
        peer.receive()

    peer = TcpPeer(serve)
    place = (str(arena.path), arena.size, arena.proof)
    welcome = wire.Welcome(PEER, 1000, {}, (peer.endpoint,), b"t" * 16, place)
    return peer, DataPath(welcome, ClientSession(new_client_id(b"c")), LIMITS, True)


@pytest.mark.parametrize("name", HOSTILE_GETS)
@pytest.mark.parametrize("sink", [False, True])
async def test_an_answer_with_impossible_places_ends_the_connection(
    arena: Arena, name: str, sink: bool
) -> None:
    peer, path = hostile(arena, HOSTILE_GETS[name])
    request = Request(PEER, Kind.GET, wire.Get([b"k"]))
    if sink:
        request.sink = lambda body: [memoryview(bytearray(n)) for n in body.sizes]
    exchange = DataExchange([request], [path])
    (answer,) = await asyncio.to_thread(exchange.run, time.monotonic_ns() + 10 * S)
    assert isinstance(answer, Lost)
    assert exchange.broken == {path}
    await asyncio.to_thread(peer.stop)


@pytest.mark.parametrize("name", HOSTILE_PUTS)
async def test_room_at_impossible_places_is_not_written_to(arena: Arena, name: str) -> None:
    peer, path = hostile(arena, HOSTILE_PUTS[name])
    before = bytes(arena.view[: 4 * MIB]), bytes(arena.view[-4 * MIB :])
    request = put_of({b"k": b"x" * MIB})
    exchange = DataExchange([request], [path])
    (answer,) = await asyncio.to_thread(exchange.run, time.monotonic_ns() + 10 * S)
    assert isinstance(answer, Lost)
    assert not request.sent, "nothing was committed"
    assert before == (bytes(arena.view[: 4 * MIB]), bytes(arena.view[-4 * MIB :]))
    await asyncio.to_thread(peer.stop)


async def test_a_commit_that_answers_for_others_is_no_answer(arena: Arena) -> None:
    made = wire.Allocated(b"", [1], [64])
    peer, path = hostile(arena, made, wire.Statuses(bytes(2)))
    request = put_of({b"k": b"x" * MIB})
    exchange = DataExchange([request], [path])
    (answer,) = await asyncio.to_thread(exchange.run, time.monotonic_ns() + 10 * S)
    assert isinstance(answer, Lost)
    assert request.sent
    await asyncio.to_thread(peer.stop)


def test_what_a_get_and_a_put_become_with_shared_memory(arena: Arena) -> None:
    session = ClientSession(new_client_id(b"c"))
    shared = SharedArena.open(str(arena.path), arena.size, arena.proof)
    get = Request(PEER, Kind.GET, wire.Get([b"k"], True))
    message = message_for(get, session, shared)
    assert (message.id, message.body) == (get.id, wire.Get([b"k"], True, True))
    put = put_of({b"k": bytes(MIB)})
    message = message_for(put, session, shared)
    assert (message.kind, message.payload) == (Kind.ALLOC, ())
    assert (message.id, put.id) == (session.used, 0), "the put's number is that of the commit"
    commit = SharedPut(shared, put, wire.Allocated(b"", [5], [64])).commit(put, session)  # type: ignore[arg-type]
    assert (commit.id, commit.body) == (put.id, wire.Commit([5], True))
    assert put.id == session.used == message.id + 1
    put.unsure = True
    assert message_for(put, session, shared) is put
    assert message_for(put, session, None) is put


def test_an_answer_is_checked_against_what_was_asked(arena: Arena) -> None:
    shared = SharedArena.open(str(arena.path), arena.size, arena.proof)
    assert shared is not None
    request = Request(PEER, Kind.GET, wire.Get([b"k"], False, True, [5], [10]))
    with pytest.raises(ProtocolError, match="totals"):
        LocatedValues(shared, request, Reply(Kind.VALUES, SOME, ()))


# -- which file is the node's memory


def test_the_file_with_the_proof_is_mapped(arena: Arena) -> None:
    shared = SharedArena.open(str(arena.path), arena.size, arena.proof)
    assert shared is not None
    arena.view[100:105] = b"hello"
    assert bytes(shared.view[100:105]) == b"hello"
    assert shared.load(100, 5) == b"hello"
    arena.view[MIB : 2 * MIB] = b"x" * MIB
    assert shared.load(MIB, MIB) == b"x" * MIB


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p, n, proof: (p + "x", n, proof), id="path"),
        pytest.param(lambda p, n, proof: ("", n, proof), id="no path"),
        pytest.param(lambda p, n, proof: (p + "\0", n, proof), id="zero"),
        pytest.param(lambda p, n, proof: (p, n - 1, proof), id="size"),
        pytest.param(lambda p, n, proof: (p, n + 4096, proof), id="larger"),
        pytest.param(lambda p, n, proof: (p, 1 << 62, proof), id="huge"),
        pytest.param(lambda p, n, proof: (p, 1 << 70, proof), id="overflow"),
        pytest.param(lambda p, n, proof: (p, 0, proof), id="nothing"),
        pytest.param(lambda p, n, proof: (p, n, bytes(16)), id="proof"),
        pytest.param(lambda p, n, proof: (p, n, proof[:15]), id="short proof"),
        pytest.param(lambda p, n, proof: (p, n, b""), id="no proof"),
        pytest.param(lambda p, n, proof: (os.path.dirname(p), n, proof), id="directory"),
        pytest.param(lambda p, n, proof: ("/dev/zero", n, bytes(16)), id="device"),
    ],
)
def test_any_other_file_is_not_mapped(
    arena: Arena, change: Callable[[str, int, bytes], tuple[str, int, bytes]]
) -> None:
    files = set(os.listdir("/proc/self/fd"))
    assert SharedArena.open(*change(str(arena.path), arena.size, arena.proof)) is None
    assert set(os.listdir("/proc/self/fd")) == files


def test_neither_a_link_nor_a_pipe_is_mapped(arena: Arena, tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(arena.path)
    os.mkfifo(pipe)
    for path in (link, pipe):
        assert SharedArena.open(str(path), arena.size, arena.proof) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_mapped(arena: Arena) -> None:
    """He could shorten it, which would kill this process."""
    os.chown(arena.path, 65534, 65534)
    assert SharedArena.open(str(arena.path), arena.size, arena.proof) is None


def test_a_mapping_that_is_no_longer_needed_gives_its_files_back(arena: Arena) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert SharedArena.open(str(arena.path), arena.size, arena.proof) is not None
    assert len(os.listdir("/proc/self/fd")) == files
