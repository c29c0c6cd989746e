"""Calls of an event loop through a node's memory, against a node's real data plane."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from dataside import PEER, DataNode, get, new_seed, put, until
from nodeside import KIB, MIB, PLAIN

from p2pkv import wire
from p2pkv.arena import Arena
from p2pkv.async_path import AsyncPath, Call, Calls, nowhere
from p2pkv.clock import monotonic
from p2pkv.config import Limits
from p2pkv.routing import Lost, Reply, Request
from p2pkv.transport import ClientSession, new_client_id
from p2pkv.wire import Kind, Status

LIMITS = Limits(key_bytes_max=64, value_bytes_max=64 * MIB, batch_keys_max=256, scan_keys_max=256,
                head_bytes_max=64 * KIB, message_bytes_max=16 * MIB, inflight_max=16)  # fmt: skip


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(64 * MIB, "async") as arena:
        yield arena


class Owner:
    """Of a path that a test uses by hand."""

    def __init__(self) -> None:
        self.lost = 0

    def path_ready(self) -> None:
        pass

    def path_freed(self) -> None:
        pass

    def path_lost(self, path: AsyncPath) -> None:
        self.lost += 1


class Mapped:
    """A path to a node's real data plane, whose memory it maps. Copies wait while ``held``."""

    def __init__(self, node: DataNode, shared: bool = True) -> None:
        self.node = node
        self.owner = Owner()
        self.copies = 0
        self.held = threading.Event()
        self.held.set()
        session = ClientSession(new_client_id(b"a"))
        begun = node.host.sessions.begin(session.id, None, monotonic())
        assert begun is not None
        self.session = begun
        self.path = AsyncPath(
            node.welcome(begun), session, LIMITS, shared, self.owner, self._off_loop
        )

    def _off_loop(self, job: Callable[[], None]) -> asyncio.Future[None]:
        self.copies += 1

        def run() -> None:
            self.held.wait(20)
            job()

        return asyncio.get_running_loop().run_in_executor(None, run)

    async def __aenter__(self) -> Mapped:
        await until(lambda: self.path.ready, "the connection")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.held.set()
        self.path.lose("the end")
        await until(lambda: len(self.node.server) == 0, "the end of the connection")

    def start(self, *requests: Request) -> Calls:
        calls = Calls(requests, asyncio.get_running_loop())
        for i in range(len(requests)):
            self.path.submit(Call(calls, i))
        return calls

    async def ask(self, *requests: Request) -> list[Any]:
        calls = self.start(*requests)
        async with asyncio.timeout(20):
            await calls.future
        return list(calls.answers)

    def end(self, calls: Calls) -> None:
        self.path.give_up(calls, Lost("ended"))
        calls.ended = True


@pytest.fixture
async def node(arena: Arena) -> AsyncIterator[DataNode]:
    async with DataNode(arena, LIMITS) as node:
        yield node


@pytest.fixture
async def mapped(node: DataNode) -> AsyncIterator[Mapped]:
    async with Mapped(node) as mapped:
        yield mapped


SIZES = [100, 8 * KIB, 200 * KIB, 5 * MIB]


@pytest.mark.parametrize("size", SIZES)
async def test_what_is_put_through_memory_comes_back_through_memory(
    mapped: Mapped, size: int
) -> None:
    values = [os.urandom(size) for _ in range(2)]
    request = Request(PEER, Kind.PUT, wire.Put([b"a", b"b"], [size] * 2, PLAIN), values)
    (answer,) = await mapped.ask(request)
    assert answer.body.statuses == b""
    assert mapped.node.host.get(b"a", b"b") == values
    buffers = [memoryview(bytearray(size)) for _ in values]
    plain, into = await mapped.ask(get(b"a", b"b"), get(b"a", b"b", into=buffers))
    assert b"".join(plain.frames) == b"".join(values) == b"".join(buffers)
    assert into.delivered
    assert mapped.copies == (3 if size == 5 * MIB else 0), "large copies leave the loop"


async def test_hundreds_of_calls_at_once_get_what_is_theirs(mapped: Mapped) -> None:
    chance = new_seed()
    values = {b"%d" % i: chance.randbytes(chance.choice(SIZES[:3])) for i in range(300)}
    puts = await mapped.ask(*[put(v, k) for k, v in values.items()])
    assert all(a.body.statuses == b"" for a in puts)
    keys = list(values)
    answers = await mapped.ask(*[get(k) for k in keys for _ in range(2)])
    assert [b"".join(a.frames) for a in answers] == [values[k] for k in keys for _ in range(2)]
    assert mapped.path.under_way == 0


async def test_a_value_that_changes_while_a_thread_copies_it_is_not_returned(
    mapped: Mapped,
) -> None:
    host = mapped.node.host
    host.put({b"k": b"a" * (5 * MIB)})
    mapped.held.clear()
    calls = mapped.start(get(b"k"))
    await until(lambda: mapped.copies, "the copy")
    host.put({b"k": b"b" * (5 * MIB)})
    for i in range(12):
        host.put({b"f%d" % i: bytes(5 * MIB)})
    mapped.held.set()
    await calls.future
    answer = calls.answers[0]
    assert isinstance(answer, Reply)
    assert list(answer.body.statuses) == [Status.DEFERRED]


async def test_a_call_whose_copy_is_under_way_ends_when_the_copy_does(mapped: Mapped) -> None:
    """However often it is cancelled: the buffer is its caller's only then."""
    mapped.node.host.put({b"k": b"x" * (5 * MIB)})
    mapped.held.clear()
    calls = mapped.start(get(b"k", into=[memoryview(bytearray(5 * MIB))]))
    await until(lambda: mapped.copies, "the copy")
    mapped.end(calls)
    waiting = asyncio.create_task(calls.settled())
    for _ in range(3):
        await asyncio.sleep(0.01)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    mapped.held.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not calls.copies


async def test_room_for_a_put_that_ended_before_its_answer_is_given_back(mapped: Mapped) -> None:
    calls = mapped.start(put(b"x" * MIB))
    mapped.end(calls)
    assert mapped.path.under_way == 1, "the answer is still to come"
    await until(lambda: mapped.path.under_way == 0, "the abort")
    assert mapped.node.host.handlers.requests[Kind.ABORT] == 1
    assert mapped.node.store.stats().used_bytes == 0
    assert mapped.node.host.get(b"k") == [None]


async def test_room_for_a_put_that_ended_while_it_was_written_is_given_back(
    mapped: Mapped,
) -> None:
    mapped.held.clear()
    request = put(b"x" * (5 * MIB))
    calls = mapped.start(request)
    await until(lambda: mapped.copies, "the copy")
    mapped.end(calls)
    mapped.held.set()
    await calls.settled()
    await until(lambda: mapped.path.under_way == 0, "the abort")
    assert mapped.node.store.stats().used_bytes == 0
    assert not request.sent, "it has certainly not run"


async def test_open_objects_of_a_call_that_ended_are_released(mapped: Mapped) -> None:
    mapped.node.host.put({b"k": b"v"})
    calls = mapped.start(Request(PEER, Kind.OPEN, wire.Open([b"k"])))
    mapped.end(calls)
    await until(lambda: mapped.path.under_way == 0, "the release")
    assert not mapped.session.tokens


async def test_a_lost_connection_stays_open_as_long_as_a_thread_writes_to_the_memory(
    node: DataNode,
) -> None:
    """Else the node would give the memory to others while it is still written to."""
    async with Mapped(node) as mapped:
        mapped.held.clear()
        calls = mapped.start(put(b"x" * (5 * MIB)))
        await until(lambda: mapped.copies, "the copy")
        mapped.path.lose("a test")
        await asyncio.sleep(0.1)
        assert len(node.server) == 1
        assert node.store.stats().allocated == 1
        mapped.held.set()
        await until(lambda: len(node.server) == 0, "the end of the connection")
        assert node.store.stats().used_bytes == 0
        await calls.future
        assert isinstance(calls.answers[0], Lost)
        assert mapped.owner.lost == 1


async def test_a_storm_of_cancelled_puts_and_gets_through_memory_harms_no_byte(
    mapped: Mapped,
) -> None:
    chance = new_seed()
    host = mapped.node.host
    done = 0

    async def caller(n: int) -> None:
        nonlocal done
        key = b"%d" % n
        buffer = bytearray(5 * MIB)
        for i in range(30):
            byte, size = 1 + (n * 31 + i) % 200, chance.choice((9 * KIB, 300 * KIB, 5 * MIB))
            writing = chance.random() < 0.5
            buffer[:] = bytes([byte if writing else 0]) * len(buffer)
            view = memoryview(buffer)[:size]
            calls = mapped.start(put(view, key) if writing else get(key, into=[memoryview(buffer)]))
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice((0, 0.001, 0.005)))
                mapped.end(calls)
                await calls.settled()
                buffer[:] = b"\xff" * len(buffer)
                await asyncio.sleep(0)
                assert buffer.count(0xFF) == len(buffer)
                continue
            await calls.future
            (answer,) = calls.answers
            assert isinstance(answer, Reply)
            done += 1
            if not writing and answer.body.statuses == b"":
                value = buffer[: answer.body.sizes[0]]
                assert value.count(value[0]) == len(value)
                assert value[0] not in (0, 0xFF)

    await asyncio.gather(*[caller(n) for n in range(6)])
    await until(lambda: mapped.path.under_way == 0, "nothing is left")
    for n in range(6):
        (value,) = host.get(b"%d" % n)
        assert value is None or len(set(value)) == 1
    stats = mapped.node.store.stats()
    assert (stats.allocated, stats.retiring) == (0, 0)
    assert done > 30


def test_nowhere_takes_any_number_of_bytes_and_no_memory() -> None:
    for size in (0, 1, 64 * KIB, 100_000, 64 * MIB):
        assert sum(map(len, nowhere(size))) == size
    assert len({id(v.obj) for v in nowhere(64 * MIB)}) == 1
