"""The drivers of both clients, against peers that do what the test says, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from nodeside import MIB
from rawpeer import Answer, RawPeer, echo, error, silent, table_of

from p2pkv import wire
from p2pkv.async_driver import AsyncDriver
from p2pkv.blocking_driver import SocketDriver
from p2pkv.config import ClientConfig, Limits
from p2pkv.errors import ClosedClient, DeadlineExceeded, ForkedClient, Miss
from p2pkv.routing import Exchange, Lost, Operation, Pause, Reply, Request, Router
from p2pkv.types import BootId, Member, NodeId
from p2pkv.wire import Fault, Kind, PutOptions

LIMITS = Limits(
    key_bytes_max=64,
    batch_keys_max=256,
    scan_keys_max=256,
    head_bytes_max=64 << 10,
    message_bytes_max=1 * MIB,
    inflight_max=4,
)
PEER = Member(NodeId("n0"), BootId(1))
STRANGER = Member(NodeId("x"), BootId(1))


def exchanges(*waves: Sequence[Request], timeout_s: float = 20.0) -> Operation[list[Any]]:
    """An operation that sends waves of requests and returns the last one's answers."""
    answers: list[Any] = []
    for wave in waves:
        deadline = time.monotonic_ns() + round(timeout_s * 1e9)
        answers = yield Exchange(list(wave), deadline)
    return answers


def ping(to: Any = PEER) -> Request:
    return Request(to, Kind.PING, wire.Empty())


def put(payload: bytes = b"v", to: Any = PEER) -> Request:
    body = wire.Put([b"k"], [len(payload)], PutOptions())
    return Request(to, Kind.PUT, body, [payload])


class Driver:
    """Either driver, its calls awaited."""

    def __init__(self, kind: str, **config: Any) -> None:
        self.router = Router()
        self.config = ClientConfig(seeds=("tcp://127.0.0.1:1",), limits=LIMITS, **config)
        self.blocking = kind == "blocking"
        made: Any = SocketDriver if self.blocking else AsyncDriver
        self.driver = made(self.config, self.router)

    def ring(self, *endpoints: str, revision: int = 1) -> None:
        self.router.install(table_of(*endpoints, revision=revision))

    async def run(self, operation: Operation[Any]) -> Any:
        if self.blocking:
            return await asyncio.to_thread(self.driver.run, operation)
        return await self.driver.run(operation)

    async def ask(self, *requests: Request, timeout_s: float = 20.0) -> list[Any]:
        result: list[Any] = await self.run(exchanges(requests, timeout_s=timeout_s))
        return result


@pytest.fixture(params=["blocking", "asyncio"])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    driver = Driver(request.param)
    yield driver
    driver.driver.close()


@pytest.fixture
async def async_driver() -> AsyncIterator[Driver]:
    driver = Driver("asyncio")
    yield driver
    driver.driver.close()


def kinds(answers: Sequence[Any]) -> list[Any]:
    return [a.kind if isinstance(a, Reply) else a for a in answers]


def all_lost(answers: Sequence[Any], reason: str) -> bool:
    return all(isinstance(a, Lost) and reason in a.reason and not a.deadline for a in answers)


async def until(condition: Any, what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.002)


# -- the usual way


async def test_answers_come_in_the_order_of_the_requests(driver: Driver) -> None:
    with RawPeer() as one, RawPeer() as two:
        driver.ring(one.endpoint, two.endpoint)
        other = Member(NodeId("n1"), BootId(1))
        requests = [put(b"%d" % i, PEER if i % 3 else other) for i in range(12)]
        answers = await driver.ask(*requests)
        assert [bytes(a.frames[0]) for a in answers] == [b"%d" % i for i in range(12)]
        assert len(one.hellos) == len(two.hellos) == 1


async def test_more_requests_than_credit_wait_their_turn(driver: Driver) -> None:
    most = 0
    held: list[wire.Head] = []

    def counts(head: wire.Head, frames: list[bytes]) -> Answer:
        nonlocal most
        held.append(head)
        most = max(most, len(held))
        if len(held) == LIMITS.inflight_max or len(peer.heads) > 36:
            first = held.pop(0)
            peer._answer(peer.from_[-1], first.request, echo(first, frames))
            while held and len(peer.heads) == 40:
                rest = held.pop(0)
                peer._answer(peer.from_[-1], rest.request, echo(rest, frames))
        return None

    with RawPeer(counts) as peer:
        driver.ring(peer.endpoint)
        answers = await driver.ask(*[ping() for _ in range(40)])
        assert kinds(answers) == [Kind.PONG] * 40
        assert most == LIMITS.inflight_max
        assert [h.request for h in peer.heads] == list(range(1, 41))


async def test_large_payloads_arrive_as_they_are_both_ways(driver: Driver) -> None:
    data = os.urandom(MIB)
    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        answers = await driver.ask(*[put(data) for _ in range(8)])
        assert all(bytes(a.frames[0]) == data for a in answers)


async def test_one_connection_and_session_serve_many_operations(driver: Driver) -> None:
    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        for _ in range(30):
            assert kinds(await driver.ask(ping())) == [Kind.PONG]
        assert len(peer.hellos) == len(set(peer.from_)) == 1
        assert [h.request for h in peer.heads] == list(range(1, 31))


async def test_a_pause_is_kept(driver: Driver) -> None:
    def pauses() -> Operation[str]:
        yield Pause(30_000_000)
        return "done"

    began = time.monotonic()
    assert await driver.run(pauses()) == "done"
    assert time.monotonic() - began >= 0.03


async def test_what_an_operation_raises_comes_through_and_the_driver_goes_on(
    driver: Driver,
) -> None:
    def fails(error: Exception) -> Operation[None]:
        yield Pause(0)
        raise error

    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        for failure in (Miss("k"), ZeroDivisionError()):
            with pytest.raises(type(failure)):
                await driver.run(fails(failure))
            assert kinds(await driver.ask(ping())) == [Kind.PONG]


# -- peers that are not there, or go


async def test_peers_without_address_or_endpoint_are_lost_at_once(driver: Driver) -> None:
    driver.ring("tcp://127.0.0.1:1")
    (answer,) = await driver.ask(ping(STRANGER))
    assert answer == Lost("no address of x@1 is known")
    (answer,) = await driver.ask(ping("nonsense"))
    assert "endpoint 'nonsense'" in answer.reason


async def test_a_refused_connection_is_lost_at_once_and_nothing_was_sent(
    driver: Driver,
) -> None:
    with RawPeer() as peer:
        endpoint = peer.endpoint
    driver.ring(endpoint)
    began = time.monotonic()
    requests = [put() for _ in range(10)]
    answers = await driver.ask(*requests)
    assert all_lost(answers, f"no connection to {endpoint}")
    assert time.monotonic() - began < 5
    assert [r.sent for r in requests] == [False] * 10


async def test_a_peer_that_closes_is_lost_at_once_and_what_it_got_counts_as_sent(
    driver: Driver,
) -> None:
    with RawPeer(silent) as peer:
        driver.ring(peer.endpoint)
        requests = [put() for _ in range(6)]
        asking = asyncio.create_task(driver.ask(*requests))
        await until(lambda: len(peer.heads) == 4, "the requests")
        began = time.monotonic()
        await asyncio.to_thread(peer.stop)
        assert all_lost(await asking, "connection lost")
        assert time.monotonic() - began < 5
        assert [r.sent for r in requests] == [True] * 4 + [False] * 2


KILLED = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    socket.recv_multipart()
    print("got", flush=True)
"""


async def test_a_killed_process_is_lost_at_once(driver: Driver) -> None:
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = await asyncio.to_thread(process.stdout.readline)
        driver.ring(f"tcp://127.0.0.1:{int(port)}")
        asking = asyncio.create_task(driver.ask(put()))
        for _ in range(2):  # HELLO and the request
            assert await asyncio.to_thread(process.stdout.readline) == "got\n"
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert all_lost(await asking, "connection lost")
        assert time.monotonic() - began < 5
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


async def test_a_repeat_to_a_peer_that_is_gone_stays_sent(driver: Driver) -> None:
    with RawPeer(silent) as peer:
        driver.ring(peer.endpoint)
        request = put()
        asking = asyncio.create_task(driver.ask(request))
        await until(lambda: peer.heads, "the request")
        await asyncio.to_thread(peer.stop)
        assert all_lost(await asking, "connection lost")
    number = request.id
    assert all_lost(await driver.ask(request), "no connection")
    assert (request.sent, request.id) == (True, number)


async def test_a_peer_that_comes_back_is_used_again_with_the_same_session(
    driver: Driver,
) -> None:
    with RawPeer() as first:
        driver.ring(first.endpoint)
        await driver.ask(ping())
        session, port = first.from_[0], int(first.endpoint.rpartition(":")[2])
    request = ping()
    with RawPeer(port=port) as second:
        answers = await driver.ask(request)
        if isinstance(answers[0], Lost):  # the end of the old connection came to light just now
            answers = await driver.ask(request)
        assert kinds(answers) == [Kind.PONG]
        assert (second.hellos, second.from_) == ([session], [session])
        assert request.id == 2


async def test_one_lost_peer_does_not_touch_the_answers_of_another(driver: Driver) -> None:
    with RawPeer() as good, RawPeer() as gone:
        gone.stop()
        driver.ring(good.endpoint, gone.endpoint)
        other = Member(NodeId("n1"), BootId(1))
        answers = await driver.ask(ping(), ping(other), ping())
        assert kinds([answers[0], answers[2]]) == [Kind.PONG] * 2
        assert all_lost(answers[1:2], "no connection")


async def test_the_deadline_ends_the_waiting_for_some_answers(driver: Driver) -> None:
    def first_only(head: wire.Head, frames: list[bytes]) -> Answer:
        return echo(head, frames) if head.request == 1 else None

    with RawPeer(first_only) as peer:
        driver.ring(peer.endpoint)
        began = time.monotonic()
        answers = await driver.ask(ping(), ping(), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - began < 5
        assert kinds(answers[:1]) == [Kind.PONG]
        assert (answers[1].deadline, isinstance(answers[1], Lost)) == (True, True)
        peer.script = echo
        assert kinds(await driver.ask(ping(), ping())) == [Kind.PONG] * 2


async def test_an_answer_that_comes_after_its_deadline_is_nobodys(driver: Driver) -> None:
    late: list[tuple[bytes, int]] = []

    def holds(head: wire.Head, frames: list[bytes]) -> Answer:
        while late:
            session, number = late.pop()
            peer._answer(session, number, (Kind.STATUSES, wire.Statuses(b"\x01"), ()))
        if head.kind == Kind.PUT:
            late.append((peer.from_[-1], head.request))
            return None
        return echo(head, frames)

    with RawPeer(holds) as peer:
        driver.ring(peer.endpoint)
        (answer,) = await driver.ask(put(b""), timeout_s=0.1)
        assert answer.deadline
        assert kinds(await driver.ask(ping(), ping())) == [Kind.PONG] * 2


async def test_nonsense_from_a_peer_ends_its_connection(driver: Driver) -> None:
    def nonsense(head: wire.Head, frames: list[bytes]) -> Answer:
        peer.send_raw(peer.from_[-1], b"nonsense")
        return None

    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        for requests in ([ping()], [ping(), ping()]):
            peer.script = echo
            assert kinds(await driver.ask(ping())) == [Kind.PONG]
            peer.script = nonsense
            answers = await driver.ask(*requests)
            assert all_lost(answers, "shorter than")
        peer.script = echo
        assert kinds(await driver.ask(ping())) == [Kind.PONG]


# -- sessions


async def test_a_forgotten_session_is_begun_again_and_each_write_runs_once(
    driver: Driver,
) -> None:
    with RawPeer(sessions=True) as peer:
        driver.ring(peer.endpoint)
        await driver.ask(ping())
        peer.known.clear()
        requests = [put(b"%d" % i) for i in range(3)]
        answers = await driver.ask(*requests)
        assert kinds(answers) == [Kind.STATUSES] * 3
        written = [h.request for h in peer.heads if h.kind == Kind.PUT]
        assert sorted(written) == [r.id for r in requests]
        assert len(peer.hellos) == 2
        assert len(set(peer.hellos)) == 1


async def test_a_forgotten_session_is_begun_again_for_a_single_request(driver: Driver) -> None:
    with RawPeer(sessions=True) as peer:
        driver.ring(peer.endpoint)
        await driver.ask(ping())
        peer.known.clear()
        began = time.monotonic()
        assert kinds(await driver.ask(put())) == [Kind.STATUSES]
        assert time.monotonic() - began < 5
        assert [h.kind for h in peer.heads] == [Kind.PING, Kind.PUT]


async def test_a_peer_that_wants_no_session_of_ours_is_not_asked_for_ever(
    driver: Driver,
) -> None:
    with RawPeer(lambda *_: error(Fault.NO_SESSION, "never")) as peer:
        driver.ring(peer.endpoint)
        (answer,) = await driver.ask(ping())
        assert answer.body.fault == Fault.NO_SESSION
        assert len(peer.heads) <= 3


async def test_a_refusal_of_the_greeting_answers_everything(driver: Driver) -> None:
    def refuses(head: wire.Head, frames: list[bytes]) -> Answer:
        peer._answer(peer.from_[-1], 0, error(Fault.CLUSTER, "another cluster"))
        return None

    with RawPeer(refuses) as peer:
        driver.ring(peer.endpoint)
        answers = await driver.ask(*[ping() for _ in range(10)])
        assert [a.body.fault for a in answers] == [Fault.CLUSTER] * 10


async def test_an_error_to_one_request_is_its_answer(driver: Driver) -> None:
    def second(head: wire.Head, frames: list[bytes]) -> Answer:
        return error(Fault.BAD_REQUEST, "no") if head.request == 2 else echo(head, frames)

    with RawPeer(second) as peer:
        driver.ring(peer.endpoint)
        answers = await driver.ask(*[ping() for _ in range(3)])
        assert kinds(answers) == [Kind.PONG, Kind.ERROR, Kind.PONG]


async def test_endpoints_have_a_session_of_their_own(driver: Driver) -> None:
    """The same node as seed and as member: one connection must not take over the other."""
    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        await driver.ask(ping())
        await driver.ask(ping(peer.endpoint))
        await driver.ask(ping())
        member, seed, again = peer.from_
        assert member == again != seed
        assert member[:9] == seed[:9]


async def test_a_member_that_leaves_the_ring_and_comes_back_gets_no_number_twice(
    driver: Driver,
) -> None:
    with RawPeer() as peer, RawPeer() as other:
        second = Member(NodeId("n1"), BootId(1))
        driver.ring(peer.endpoint, other.endpoint, revision=1)
        await driver.ask(put())
        without = wire.Table("f", 2, 2, [second], [(other.endpoint,)], [-1, 0], [0, 0])
        driver.router.install(without)
        await driver.ask(ping(second))
        driver.ring(peer.endpoint, other.endpoint, revision=3)
        await driver.ask(put(), ping(second))
        await driver.ask(put())
        numbers = [h.request for h in peer.heads if h.kind != Kind.BYE]
        assert len(numbers) == len(set(numbers)) == 3
        assert len(set(peer.from_)) == 1


# -- closing


async def test_a_client_that_closes_ends_its_session(driver: Driver) -> None:
    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        await driver.ask(ping())
        driver.driver.close()
        end = time.monotonic() + 5
        while peer.heads[-1].kind != Kind.BYE:
            assert time.monotonic() < end, [h.kind for h in peer.heads]
            await asyncio.sleep(0.005)


async def test_a_closed_driver_says_so(driver: Driver) -> None:
    driver.driver.close()
    driver.driver.close()
    with pytest.raises(ClosedClient):
        await driver.ask(ping())


async def test_closing_ends_the_calls_under_way(async_driver: Driver) -> None:
    def persists() -> Operation[None]:
        while True:
            yield Exchange([ping()], time.monotonic_ns() + 10**10)

    with RawPeer(silent) as peer:
        async_driver.ring(peer.endpoint)
        once = asyncio.create_task(async_driver.ask(ping()))
        ever = asyncio.create_task(async_driver.run(persists()))
        await until(lambda: len(peer.heads) == 2, "both requests")
        async_driver.driver.close()
        assert all_lost(await asyncio.wait_for(once, 5), "closed")
        with pytest.raises(ClosedClient):
            await asyncio.wait_for(ever, 5)


# -- the blocking driver


async def test_an_interrupted_call_leaves_no_half_message() -> None:
    driver = Driver("blocking")
    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        await driver.ask(ping())

        def interrupted() -> Operation[None]:
            yield Exchange([ping()], time.monotonic_ns() + 10**9)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            driver.driver.run(interrupted())
        assert kinds(await driver.ask(put(b"x" * MIB))) == [Kind.STATUSES]
        assert len(peer.hellos) == 2
        assert peer.heads[-1].request == 3
    driver.driver.close()


async def test_threads_share_connections_up_to_the_limit_and_others_wait() -> None:
    driver = Driver("blocking", connections_max=2, timeout_s=0.3)
    with RawPeer(silent) as peer:
        driver.ring(peer.endpoint)
        running = [asyncio.create_task(driver.ask(ping(), timeout_s=1)) for _ in range(2)]
        await until(lambda: len(peer.heads) == 2, "two calls")
        with pytest.raises(DeadlineExceeded, match="connections_max = 2"):
            await driver.ask(ping())
        peer.script = echo
        await asyncio.gather(*running)
        assert kinds(await driver.ask(ping())) == [Kind.PONG]
        assert len(set(peer.from_)) == 2
    driver.driver.close()


async def test_closing_waits_for_no_call_and_the_last_one_closes_the_sockets() -> None:
    driver = Driver("blocking")
    with RawPeer(silent) as peer:
        driver.ring(peer.endpoint)
        running = asyncio.create_task(driver.ask(ping(), timeout_s=0.5))
        await until(lambda: peer.heads, "the call")
        driver.driver.close()
        assert not driver.driver._context.closed
        assert (await running)[0].deadline
        assert driver.driver._context.closed


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_a_fork_cannot_use_the_parents_driver(kind: str) -> None:
    driver = Driver(kind)
    driver.driver._pid += 1  # what a forked process sees
    with pytest.raises(ForkedClient, match="after the fork"):
        await driver.ask(ping())
    driver.driver.close()
    driver.driver._pid -= 1
    driver.driver.close()


# -- the asyncio driver


async def test_many_concurrent_calls_get_each_their_own_answer(async_driver: Driver) -> None:
    with RawPeer() as peer:
        async_driver.ring(peer.endpoint)
        calls = [async_driver.ask(put(b"%d" % i)) for i in range(300)]
        answers = await asyncio.gather(*calls)
        assert [bytes(a[0].frames[0]) for a in answers] == [b"%d" % i for i in range(300)]
        assert len(peer.hellos) == 1


async def test_a_cancelled_call_leaves_nothing_behind(async_driver: Driver) -> None:
    with RawPeer(silent) as peer:
        async_driver.ring(peer.endpoint)
        calls = [asyncio.create_task(async_driver.ask(*[ping() for _ in range(6)]))]
        await until(lambda: len(peer.heads) == 4, "the requests")
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        (link,) = async_driver.driver._peers.values()
        assert (len(link.waiting), len(link.backlog), link.link.closed) == (0, 0, False)
        peer.script = echo
        assert kinds(await async_driver.ask(ping())) == [Kind.PONG]
        assert len(peer.hellos) == 1


async def test_a_given_up_payload_leaves_with_its_connection(async_driver: Driver) -> None:
    """Its buffer belongs to the caller again, so it must not stand in a queue any more."""
    with RawPeer(silent) as peer:
        async_driver.ring(peer.endpoint)
        other = asyncio.create_task(async_driver.ask(ping()))
        await until(lambda: len(peer.heads) == 1, "the other call")
        (answer,) = await async_driver.ask(put(), timeout_s=0.1)
        assert answer.deadline
        assert all_lost(await other, "ended early")
        (link,) = async_driver.driver._peers.values()
        assert link.link.closed
        peer.script = echo
        assert kinds(await async_driver.ask(ping())) == [Kind.PONG]


async def test_a_peer_that_takes_nothing_more_does_not_stop_the_loop(
    async_driver: Driver,
) -> None:
    """Its queue is full of requests that were given up; later ones wait, and are lost in time."""
    with RawPeer() as peer:
        async_driver.ring(peer.endpoint)
        await async_driver.ask(ping())
        (link,) = async_driver.driver._peers.values()
        peer.paused.set()
        while link.link.send(Request(PEER, Kind.PING, wire.Empty(), [bytes(MIB)])):
            pass
        ticks = 0

        async def ticking() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(ticking())
        answers = await async_driver.ask(*[ping() for _ in range(8)], timeout_s=0.3)
        ticker.cancel()
        assert all(a.deadline for a in answers)
        assert ticks > 20
        assert (len(link.waiting), len(link.backlog)) == (0, 0)
        peer.paused.clear()
        await async_driver.ask(ping())


async def test_a_dead_peer_costs_nothing_while_nobody_asks_it(async_driver: Driver) -> None:
    with RawPeer() as peer:
        async_driver.ring(peer.endpoint)
        await async_driver.ask(ping())
    (link,) = async_driver.driver._peers.values()
    await until(lambda: link.link.closed, "the loss")
    opened = 0
    before = link.link.open

    def counts() -> None:
        nonlocal opened
        opened += 1
        before()

    link.link.open = counts
    await asyncio.sleep(0.3)
    assert opened == 0
    assert all_lost(await async_driver.ask(ping()), "no connection")
    assert opened == 1


async def test_requests_to_oneself_are_answered_in_process() -> None:
    calls: list[Request] = []

    def local(request: Request, answer: Callable[[Reply], None]) -> None:
        calls.append(request)
        answer(Reply(Kind.PONG, wire.Empty(), ()))

    config = ClientConfig(seeds=("tcp://127.0.0.1:1",), limits=LIMITS)
    driver = AsyncDriver(config, Router(), member=PEER, local=local, find=lambda _: ["found"])
    answers = await driver.run(exchanges([ping()], [ping(), ping(STRANGER)]))
    assert (kinds(answers[:1]), answers[1]) == ([Kind.PONG], Lost("no address of x@1 is known"))
    assert len(calls) == 2
    driver.close()


async def test_the_clients_of_one_process_are_told_apart(driver: Driver) -> None:
    second = Driver("blocking" if driver.blocking else "asyncio")
    with RawPeer() as peer:
        for one in (driver, second):
            one.ring(peer.endpoint)
            await one.ask(ping())
        assert peer.from_[0][:9] != peer.from_[1][:9]
    second.driver.close()


async def test_blocking_calls_of_many_threads_get_each_their_own_answer() -> None:
    driver = Driver("blocking", connections_max=4)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(50):
                data = b"%d-%d" % (thread, i)
                (answer,) = driver.driver.run(exchanges([put(data)]))
                assert bytes(answer.frames[0]) == data
        except BaseException as e:
            failures.append(e)

    with RawPeer() as peer:
        driver.ring(peer.endpoint)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, 30)
        assert not failures
        assert len(peer.hellos) <= 4
    driver.driver.close()
