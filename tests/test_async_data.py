"""Data connections on an event loop: against peers that do what a test says, and against nodes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dataside import PEER, DataPeer, Wire, get, new_seed, ping, put, until
from nodeside import KIB, MIB, MS
from rawpeer import echo, table_of

from p2pkv import async_path, wire
from p2pkv.async_driver import AsyncDriver
from p2pkv.async_path import AsyncPath
from p2pkv.config import ClientConfig, Limits
from p2pkv.etcd_server import EtcdCluster
from p2pkv.routing import Lost, Request, Router
from p2pkv.stream import message
from p2pkv.testing.cluster import Cluster
from p2pkv.wire import Fault, Kind

LIMITS = Limits(key_bytes_max=64, value_bytes_max=64 * MIB, batch_keys_max=256, scan_keys_max=256,
                head_bytes_max=64 * KIB, message_bytes_max=16 * MIB, inflight_max=16)  # fmt: skip


def values_of(id: int, body: wire.Values, payload: bytes) -> bytes:
    """An answer with these values, as it comes over the connection."""
    return message(Kind.VALUES, id, 7, body, len(payload)) + payload


# -- a driver and a peer that does as it is told


class Setting:
    """A driver whose data connection to a scripted peer is ready."""

    def __init__(self, peer: DataPeer, **config: Any) -> None:
        self.peer = peer
        router = Router()
        router.install(table_of(peer.endpoint))
        self.config = ClientConfig(seeds=("tcp://127.0.0.1:1",), limits=LIMITS, **config)
        self.driver = AsyncDriver(self.config, router)

    async def ask(self, *requests: Request, timeout_s: float = 20.0) -> list[Any]:
        deadline = time.monotonic_ns() + round(timeout_s * 1e9)
        return list(await self.driver.exchange(requests, deadline))

    @property
    def path(self) -> AsyncPath | None:
        return self.driver._peers[PEER].path

    async def ready(self) -> AsyncPath:
        """Asks over ZeroMQ until there is a data connection."""
        await self.ask(ping())
        await until(lambda: self.path is not None and self.path.ready, "the data connection")
        assert self.path is not None
        return self.path

    async def __aenter__(self) -> Setting:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.driver.close()
        await asyncio.to_thread(self.peer.stop)


def setting(data: Callable[[Wire], None], **options: Any) -> Setting:
    config = {k: options.pop(k) for k in ("path",) if k in options}
    return Setting(DataPeer(options.pop("script", echo), data, **options), **config)


def echoes(peer: Wire) -> None:
    """Gives back the payload of each PUT as the value of a GET."""
    while True:
        head, payload = peer.receive()
        if head.kind == Kind.PUT:
            peer.send(Kind.VALUES, head.request, wire.Values(b"", [len(payload)], []), payload)
        else:
            peer.send(Kind.PONG, head.request, wire.Empty())


def over_data(setting: Setting) -> int:
    """Requests that did not come over ZeroMQ."""
    return setting.driver._session.used - len(setting.peer.heads)


async def test_the_first_request_goes_over_zeromq_and_those_after_the_welcome_do_not() -> None:
    async with setting(echoes) as s:
        assert [h.kind for h in s.peer.heads] == [Kind.PING]
        answers = await s.ask(*[put(b"%d" % i) for i in range(50)])
        assert [bytes(a.frames[0]) for a in answers] == [b"%d" % i for i in range(50)]
        assert len(s.peer.heads) == 1
        assert s.peer.data.connections == 1


async def test_numbers_go_on_over_both_ways() -> None:
    numbers: list[int] = []

    def notes(peer: Wire) -> None:
        while True:
            head, _ = peer.receive()
            numbers.append(head.request)
            peer.send(Kind.PONG, head.request, wire.Empty())

    async with setting(notes) as s:
        requests = [ping() for _ in range(5)]
        await s.ask(*requests)
        assert numbers == [r.id for r in requests] == sorted(set(numbers))
        assert numbers[0] > s.peer.heads[-1].request


async def test_more_requests_than_credit_wait_their_turn() -> None:
    most = 0

    def holds(peer: Wire) -> None:
        nonlocal most
        held: list[int] = []
        done = 0
        while done < 200:
            head, _ = peer.receive()
            held.append(head.request)
            most = max(most, len(held))
            if len(held) == LIMITS.inflight_max or done + len(held) == 200:
                done += len(held)
                for id in held:
                    peer.send(Kind.PONG, id, wire.Empty())
                held = []

    async with setting(holds) as s:
        answers = await asyncio.gather(*[s.ask(ping(), ping()) for _ in range(100)])
        assert all(a.kind == Kind.PONG for pair in answers for a in pair)
        assert most == LIMITS.inflight_max


async def test_answers_may_come_in_any_order() -> None:
    def backwards(peer: Wire) -> None:
        while True:
            heads = [peer.receive()[0] for _ in range(10)]
            for head in reversed(heads):
                value = b"%d" % head.request
                peer.send(Kind.VALUES, head.request, wire.Values(b"", [len(value)], []), value)

    async with setting(backwards) as s:
        requests = [get(b"k") for _ in range(10)]
        answers = await s.ask(*requests)
        assert [bytes(a.frames[0]) for a in answers] == [b"%d" % r.id for r in requests]


@pytest.mark.parametrize("size", [1, 8 * KIB, 70 * KIB, 3 * MIB, 16 * MIB])
async def test_values_of_any_size_come_as_they_are(size: int) -> None:
    value = os.urandom(size)
    buffer = bytearray(size)

    def serve(peer: Wire) -> None:
        while True:
            head, payload = peer.receive()
            assert payload in (b"", value)
            peer.send(Kind.VALUES, head.request, wire.Values(b"", [size], []), value)

    async with setting(serve) as s:
        plain, into, sent = await s.ask(
            get(b"k"), get(b"k", into=[memoryview(buffer)]), put(memoryview(value))
        )
        assert b"".join(plain.frames) == b"".join(sent.frames) == value
        assert into.delivered
        assert buffer == value


@pytest.mark.parametrize("step", [1, 13])
async def test_an_answer_may_come_byte_by_byte(step: int) -> None:
    values = [os.urandom(n) for n in (100, 0, 3000)]

    def trickles(peer: Wire) -> None:
        while True:
            head, _ = peer.receive()
            body = wire.Values(b"", list(map(len, values)), [])
            payload = b"".join(values)
            data = values_of(head.request, body, payload)
            for i in range(0, len(data), step):
                peer.sock.sendall(data[i : i + step])

    async with setting(trickles) as s:
        buffers = [memoryview(bytearray(n)) for n in (100, 0, 3000)]
        plain, into = await s.ask(get(b"a", b"b", b"c"), get(b"a", b"b", b"c", into=buffers))
        assert b"".join(plain.frames) == b"".join(values)
        assert into.delivered
        assert [bytes(b) for b in buffers] == values


# -- where there is no data connection


@pytest.mark.parametrize("how", ["forced", "refused", "mute", "no endpoint"])
async def test_without_a_data_connection_everything_goes_over_zeromq(how: str) -> None:
    config = {"path": "zmq"} if how == "forced" else {}
    peer = DataPeer(echo, echoes)
    mute = threading.Event()
    if how == "refused":
        await asyncio.to_thread(peer.data.stop)
    elif how == "mute":
        peer.data.serve = lambda w: mute.wait(20) and None
    elif how == "no endpoint":
        peer._greeted = lambda session: peer._answer(  # type: ignore[method-assign]
            session, 0, (Kind.WELCOME, wire.Welcome(PEER, 1000, {}), ())
        )
    s = Setting(peer, **config)
    for _ in range(20):
        began = time.monotonic()
        assert [a.kind for a in await s.ask(ping(), put(b"v"))] == [Kind.PONG, Kind.STATUSES]
        assert time.monotonic() - began < 1, "nobody waits for the data connection"
        await asyncio.sleep(0.01)
    if how == "mute":
        await until(lambda: s.path is None, "the attempt is given up")
    assert s.path is None
    assert peer.data.connections <= 1
    mute.set()
    s.driver.close()
    await asyncio.to_thread(peer.stop)


async def test_a_token_that_is_not_accepted_is_asked_for_again() -> None:
    peer = DataPeer(echo, echoes)
    peer.token_given = b"stale".ljust(16)
    s = Setting(peer)
    await s.ask(ping())
    await until(lambda: peer.refusals, "a refusal")
    await s.ready()
    assert (await s.ask(put(b"v")))[0].kind == Kind.VALUES
    assert (len(peer.hellos), peer.refusals, peer.data.connections) == (2, 1, 2)
    s.driver.close()
    await asyncio.to_thread(peer.stop)


# -- deadlines and cancellation


async def test_a_deadline_ends_one_call_and_the_connection_serves_the_others() -> None:
    go_on = threading.Event()

    def holds(peer: Wire) -> None:
        first, _ = peer.receive()
        second, _ = peer.receive()
        peer.send(Kind.PONG, second.request, wire.Empty())
        go_on.wait(20)
        peer.send(Kind.PONG, first.request, wire.Empty())
        echoes(peer)

    async with setting(holds) as s:
        late, good = ping(), ping()
        began = time.monotonic()
        first, second = await asyncio.gather(s.ask(late, timeout_s=0.2), s.ask(good))
        assert 0.2 <= time.monotonic() - began < 5
        assert first == [Lost("no answer", deadline=True)]
        assert second[0].kind == Kind.PONG
        assert (late.sent, s.path is not None) == (True, True)
        go_on.set()
        assert (await s.ask(put(b"v")))[0].kind == Kind.VALUES
        assert s.peer.data.connections == 1
        await until(lambda: s.path.under_way == 0, "the late answer")  # type: ignore[union-attr]


async def test_a_late_answer_goes_nowhere_and_not_into_its_buffer() -> None:
    go_on = threading.Event()
    value = b"x" * MIB

    def holds(peer: Wire) -> None:
        head, _ = peer.receive()
        go_on.wait(20)
        peer.send(Kind.VALUES, head.request, wire.Values(b"", [MIB], []), value)
        echoes(peer)

    async with setting(holds) as s:
        buffer = bytearray(MIB)
        (answer,) = await s.ask(get(b"k", into=[memoryview(buffer)]), timeout_s=0.1)
        assert answer.deadline
        go_on.set()
        assert bytes((await s.ask(put(b"v")))[0].frames[0]) == b"v"
        assert not any(buffer)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("cancel", [False, True])
async def test_a_call_that_ends_in_the_middle_of_its_answer_is_written_to_no_more(
    sink: bool, cancel: bool
) -> None:
    value = b"x" * MIB
    go_on = threading.Event()

    def halves(peer: Wire) -> None:
        head, _ = peer.receive()
        data = values_of(head.request, wire.Values(b"", [MIB // 2] * 2, []), value)
        peer.sock.sendall(data[: 700 * KIB])
        go_on.wait(20)
        peer.sock.sendall(data[700 * KIB :])
        echoes(peer)

    async with setting(halves) as s:
        buffer = bytearray(MIB)
        halves_ = [memoryview(buffer)[: MIB // 2], memoryview(buffer)[MIB // 2 :]]
        request = get(b"a", b"b", into=halves_ if sink else None)
        timeout = 20.0 if cancel else 0.3
        task = asyncio.create_task(s.ask(request, timeout_s=timeout))
        await until(lambda: s.path is not None and s.path._head is not None, "half an answer")
        await asyncio.sleep(0.05)
        if cancel:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert (await task)[0].deadline
        before = bytes(buffer)
        go_on.set()
        assert bytes((await s.ask(put(b"v")))[0].frames[0]) == b"v"
        assert (buffer == before, s.peer.data.connections) == (True, 1)


class Sluggish:
    """Reads nothing before it is told to go on."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.go_on = threading.Event()

    def __call__(self, peer: Wire) -> None:
        self.go_on.wait(20)
        while True:
            head, payload = peer.receive()
            self.received.append(payload)
            peer.send(Kind.PONG, head.request, wire.Empty())


async def test_what_was_not_begun_to_be_sent_is_not_sent_at_all() -> None:
    peer = Sluggish()
    async with setting(peer, receive_buffer=64 * KIB) as s:
        first = asyncio.create_task(s.ask(put(b"a" * (16 * MIB))))
        await until(lambda: s.path is not None and s.path._writing, "a full socket")
        queued = put(bytearray(b"b" * MIB))
        second = asyncio.create_task(s.ask(queued))
        third = asyncio.create_task(s.ask(put(b"c" * 100)))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not queued.sent
        peer.go_on.set()
        await asyncio.gather(first, third)
        assert [r[:1] for r in peer.received] == [b"a", b"c"]
        assert s.peer.data.connections == 1


async def test_a_short_rest_of_an_ended_call_is_sent_as_it_was() -> None:
    peer = Sluggish()
    async with setting(peer, receive_buffer=64 * KIB) as s:
        size = 1 * MIB
        while not (s.path is not None and s.path._writing):
            value = bytearray(b"a" * size)
            task = asyncio.create_task(s.ask(put(value)))
            await asyncio.sleep(0.01)
        path = s.path
        assert path is not None
        half = path._outgoing[0]
        assert 0 < half.left < half.size
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        value[:] = b"b" * size
        peer.go_on.set()
        assert (await s.ask(ping()))[0].kind == Kind.PONG
        assert set(b"".join(peer.received)) == {ord("a")}
        assert s.peer.data.connections == 1


async def test_a_long_rest_of_an_ended_call_ends_the_connection() -> None:
    peer = Sluggish()
    async with setting(peer, receive_buffer=64 * KIB) as s:
        other = asyncio.create_task(s.ask(ping()))
        large = put(bytearray(16 * MIB))
        task = asyncio.create_task(s.ask(large))
        await until(lambda: s.path is not None and s.path._writing, "a full socket")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert large.sent
        (answer,) = await other
        assert isinstance(answer, Lost)
        assert not answer.deadline
        peer.go_on.set()
        await s.ready()
        assert (await s.ask(ping()))[0].kind == Kind.PONG
        assert (s.peer.data.connections, b"".join(peer.received)) == (2, b"")


@pytest.mark.parametrize("receive_buffer", [0, 64 * KIB])
async def test_a_storm_of_cancellations_harms_no_byte(receive_buffer: int) -> None:
    """Each value is one byte over and over, and each buffer belongs to one call at a time."""
    chance = new_seed()
    mixed: list[int] = []

    def answer(head: wire.Head, frames: list[bytes]) -> Any:
        if head.kind == Kind.PUT:
            if len(set(b"".join(frames))) != 1:
                mixed.append(head.request)
            return Kind.STATUSES, wire.Statuses(b""), ()
        if head.kind == Kind.PING:
            return Kind.PONG, wire.Empty(), ()
        size, byte = (int(x) for x in head.body.keys[0].split(b"/"))
        return Kind.VALUES, wire.Values(b"", [size], []), (bytes([byte]) * size,)

    def serve(peer: Wire) -> None:
        while True:
            head, payload = peer.receive()
            kind, body, frames = answer(head, [payload])
            peer.send(kind, head.request, body, b"".join(frames))

    async with setting(serve, script=answer, receive_buffer=receive_buffer) as s:
        outcomes = {"done": 0, "cancelled": 0, "lost": 0}

        async def caller(n: int) -> None:
            buffer = bytearray(2 * MIB)
            for i in range(25):
                byte, size = 1 + (n * 7 + i) % 200, chance.choice((1, 5000, 90 * KIB, 2 * MIB))
                kind = chance.randrange(3)
                view = memoryview(buffer)[:size]
                if kind == 0:
                    buffer[:] = bytes([byte]) * len(buffer)
                    request = put(view)
                else:
                    buffer[:] = bytes(len(buffer))
                    key = b"%d/%d" % (size, byte)
                    request = get(key, into=[view] if kind == 1 else None)
                task = asyncio.create_task(s.ask(request))
                if chance.random() < 0.6:
                    await asyncio.sleep(chance.choice((0, 0, 0.0005, 0.002, 0.01)))
                    task.cancel()
                try:
                    (answer,) = await task
                except asyncio.CancelledError:
                    outcomes["cancelled"] += 1
                    was = bytes(buffer)
                    await asyncio.sleep(0)
                    assert buffer == was, "written to after its end"
                    continue
                if isinstance(answer, Lost):
                    outcomes["lost"] += 1
                    continue
                outcomes["done"] += 1
                if kind == 1 and answer.delivered:
                    assert buffer == bytes([byte]) * size + bytes(len(buffer) - size)
                elif kind:
                    assert b"".join(answer.frames) == bytes([byte]) * size

        await asyncio.gather(*[caller(n) for n in range(24)])
        print(outcomes, s.peer.data.connections)
        assert not mixed
        assert outcomes["done"] > 50
        assert outcomes["cancelled"] > 50
        await s.ready()
        assert (await s.ask(ping()))[0].kind == Kind.PONG
        await until(lambda: s.path.under_way == 0, "nothing is left")  # type: ignore[union-attr]


# -- peers that go, stall, or talk nonsense


async def test_a_peer_that_closes_in_the_middle_of_an_answer_is_lost_at_once() -> None:
    def dies(peer: Wire) -> None:
        head, _ = peer.receive()
        data = values_of(head.request, wire.Values(b"", [MIB], []), bytes(MIB))
        peer.sock.sendall(data[: MIB // 2])

    async with setting(dies) as s:
        began = time.monotonic()
        requests = [get(b"k", into=[memoryview(bytearray(MIB))]), put(b"v"), ping()]
        answers = await s.ask(*requests)
        assert all(isinstance(a, Lost) and not a.deadline for a in answers)
        assert time.monotonic() - began < 5
        assert [r.sent for r in requests] == [True] * 3


async def test_a_peer_that_closes_in_the_middle_of_a_request_is_lost_at_once() -> None:
    def dies(peer: Wire) -> None:
        peer.read(100_000)

    async with setting(dies) as s:
        request = put(bytes(16 * MIB))
        (answer,) = await s.ask(request)
        assert isinstance(answer, Lost)
        assert request.sent


async def test_a_lost_connection_is_made_again_by_later_calls() -> None:
    async with setting(echoes) as s:
        for n in range(2, 5):
            s.peer.data.cut()
            await until(lambda: s.path is None, "the loss")
            await s.ready()
            assert (await s.ask(put(b"v")))[0].kind == Kind.VALUES
            assert s.peer.data.connections == n


async def test_a_silent_peer_ends_calls_at_their_deadline_and_is_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_path, "SILENCE_NS", 300 * MS)
    stay = threading.Event()
    async with setting(lambda peer: stay.wait(20) and None) as s:
        path, began = s.path, time.monotonic()
        while s.path is path:
            (answer,) = await s.ask(ping(), timeout_s=0.1)
            assert answer.deadline
            assert time.monotonic() - began < 10
        assert path is not None
        assert path.closed
        assert time.monotonic() - began > 0.3
        stay.set()


@pytest.mark.parametrize(
    "nonsense",
    [
        bytes(100),
        b"\xff" * 100,
        values_of(999, wire.Values(b"", [], []), b""),
        values_of(1, wire.Values(b"", [5], []), b"123456"),
    ],
    ids=["zeros", "sizes", "nobody's answer", "an old number"],
)
async def test_nonsense_ends_the_connection_and_what_waits_on_it(nonsense: bytes) -> None:
    def talks(peer: Wire) -> None:
        while True:
            peer.receive()
            peer.sock.sendall(nonsense)

    async with setting(talks) as s:
        answers = await s.ask(ping(), put(b"v"))
        assert all(isinstance(a, Lost) and not a.deadline for a in answers)


async def test_an_answer_that_does_not_fit_its_request_ends_the_connection() -> None:
    def lies(peer: Wire) -> None:
        head, _ = peer.receive()
        data = values_of(head.request, wire.Values(b"", [5], []), b"123456")
        peer.sock.sendall(data)
        peer.receive()

    async with setting(lies) as s:
        (answer,) = await s.ask(get(b"k"))
        assert isinstance(answer, Lost)


async def test_closing_the_driver_ends_calls_under_way() -> None:
    stay = threading.Event()
    async with setting(lambda peer: stay.wait(20) and None) as s:
        task = asyncio.create_task(s.ask(ping(), put(bytes(MIB))))
        await until(lambda: s.path.under_way == 2, "the calls")  # type: ignore[union-attr]
        s.driver.close()
        assert all(isinstance(a, Lost) for a in await task)
        stay.set()


# -- sessions


async def test_a_forgotten_session_is_begun_again_and_each_write_runs_once() -> None:
    ran: list[tuple[str, bytes]] = []

    def forgets(peer: Wire) -> None:
        for _ in range(10):
            head, _ = peer.receive()
            peer.send(Kind.ERROR, head.request, wire.Error(Fault.NO_SESSION, "forgotten"))
        while True:
            head, payload = peer.receive()
            ran.append(("data", payload))
            peer.send(Kind.STATUSES, head.request, wire.Statuses(b""))

    def control(head: wire.Head, frames: list[bytes]) -> Any:
        if head.kind == Kind.PUT:
            ran.append(("zmq", frames[0]))
        return echo(head, frames)

    async with setting(forgets, script=control) as s:
        requests = [put(b"%d" % i) for i in range(10)]
        answers = await s.ask(*requests)
        assert [a.kind for a in answers] == [Kind.STATUSES] * 10
        assert sorted(v for _, v in ran) == sorted(b"%d" % i for i in range(10))
        assert len(s.peer.hellos) == 2
        assert len({r.id for r in requests}) == 10


async def test_a_write_that_may_have_run_is_not_run_again_in_a_new_session() -> None:
    def forgets(peer: Wire) -> None:
        for _ in range(2):
            head, _ = peer.receive()
            peer.send(Kind.ERROR, head.request, wire.Error(Fault.NO_SESSION, "forgotten"))
        peer.receive()

    async with setting(forgets) as s:
        unsure, fresh = put(b"1"), put(b"2")
        unsure.id = s.driver._session.next_number()
        unsure.sent = unsure.unsure = True
        number = unsure.id
        first, second = await s.ask(unsure, fresh)
        assert first.body.fault == Fault.NO_SESSION
        assert second.kind == Kind.STATUSES
        assert unsure.id == number
        assert [h.request for h in s.peer.heads if h.kind == Kind.PUT] == [fresh.id]


async def test_others_under_way_get_their_answers_before_the_session_is_begun_again() -> None:
    """What follows a refusal on the same connection may have run: nobody may send it again."""
    heads: list[wire.Head] = []
    go_on = threading.Event()

    def one(peer: Wire) -> None:
        heads.extend(peer.receive()[0] for _ in range(3))
        peer.send(Kind.ERROR, heads[0].request, wire.Error(Fault.NO_SESSION, "forgotten"))
        go_on.wait(20)
        for head in heads[1:]:
            peer.send(Kind.STATUSES, head.request, wire.Statuses(b"\x05"))
        peer.receive()

    async with setting(one) as s:
        task = asyncio.create_task(s.ask(*[put(b"%d" % i) for i in range(3)]))
        await until(lambda: len(heads) == 3, "the requests")
        await asyncio.sleep(0.05)
        assert len(s.peer.hellos) == 1
        go_on.set()
        answers = await task
        assert [a.body.statuses for a in answers] == [b"", b"\x05", b"\x05"]
        assert len([h for h in s.peer.heads if h.kind == Kind.PUT]) == 1


async def test_a_node_that_never_knows_the_session_is_not_asked_for_ever() -> None:
    def refuses(peer: Wire) -> None:
        while True:
            head, _ = peer.receive()
            peer.send(Kind.ERROR, head.request, wire.Error(Fault.NO_SESSION, "never"))

    async with setting(refuses) as s:
        s.driver._peers[PEER].link.begin_again()
        (answer,) = await s.ask(ping())
        assert answer.body.fault == Fault.NO_SESSION


# -- real nodes


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster(1) as etcd:
        yield etcd


@pytest.mark.parametrize("path", ["auto", "tcp", "zmq"])
def test_a_node_that_is_killed_and_started_again_is_used_again(
    etcd: EtcdCluster, path: str
) -> None:
    async def calls(kv: Any) -> None:
        value = os.urandom(MIB)
        for i in range(20):
            assert await kv.put(f"k{i % 4}", value) == 1
            assert await kv.get(f"k{i % 4}") == value
            await asyncio.sleep(0.005)

    async def main(cluster: Cluster) -> None:
        async with cluster.async_client(path=path, timeout=30.0) as kv:
            await calls(kv)
            (peer,) = [p for m, p in kv._driver._peers.items() if not isinstance(m, str)]
            assert (peer.path is not None and peer.path.ready) is (path != "zmq")
            gets = [
                asyncio.create_task(kv.batch_get([f"k{j}" for j in range(4)])) for _ in range(20)
            ]
            await asyncio.sleep(0.002)
            await asyncio.to_thread(cluster["n0"].kill)
            await asyncio.to_thread(cluster["n0"].start)
            for values in await asyncio.gather(*gets):
                assert all(v is None or len(v) == MIB for v in values)
            await calls(kv)

    with Cluster(1, etcd=etcd, memory_limit_bytes=64 * MIB) as cluster:
        asyncio.run(main(cluster))


@pytest.mark.parametrize("path", ["auto", "tcp"])
def test_a_paused_node_ends_calls_at_their_deadline_and_serves_again_when_it_wakes(
    etcd: EtcdCluster, path: str
) -> None:
    async def main(cluster: Cluster) -> None:
        async with cluster.async_client(path=path, timeout=30.0) as kv:
            value, asked_for = os.urandom(300 * KIB), "long" * 50  # the index has no long keys
            for _ in range(10):
                await kv.put("k", value)
                await asyncio.sleep(0.01)
            cluster["n0"].pause()
            began = time.monotonic()
            results = await asyncio.gather(
                *[kv.get(asked_for, timeout=0.3) for _ in range(50)],
                *[kv.put("k", value, timeout=0.3) for _ in range(50)],
                return_exceptions=True,
            )
            assert all(isinstance(r, Exception) for r in results)
            assert time.monotonic() - began < 3
            cluster["n0"].resume()
            assert await kv.get("k") == value
            assert await kv.put("k", b"new") == 1
            assert await kv.get("k") == b"new"

    with Cluster(1, etcd=etcd, memory_limit_bytes=64 * MIB) as cluster:
        asyncio.run(main(cluster))


def test_buckets_move_over_data_connections(etcd: EtcdCluster) -> None:
    values = {f"moved/{i}": os.urandom(100 * KIB) for i in range(200)}
    values["moved/large"] = os.urandom(5 * MIB)

    async def main(cluster: Cluster) -> None:
        async with cluster.async_client(path="zmq", timeout=30.0) as kv:
            await kv.batch_put(values)
            await asyncio.to_thread(cluster.add_node, "n1")
            assert await kv.batch_get(list(values)) == list(values.values())
            stats = await kv.stats()
            (new,) = [s.figures for m, s in stats.items() if m.startswith("n1")]
            assert new["requests_snapshot_total"] > 10
            assert new["objects"] > 10
            assert new["data_connections"] == 1, "only the other node's"

    with Cluster(1, etcd=etcd, memory_limit_bytes=64 * MIB) as cluster:
        asyncio.run(main(cluster))
