"""Driving a client's operation by hand, effect by effect."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from p2pkv import ring, wire
from p2pkv.buffers import copy
from p2pkv.clock import SECOND_NS
from p2pkv.config import ClientConfig, Limits
from p2pkv.operations import Operations
from p2pkv.routing import Exchange, Lost, Operation, Pause, Rediscover, Reply, Request, Router
from p2pkv.types import BootId, Member, NodeId
from p2pkv.wire import Kind, Status

A, B, C = (Member(NodeId(n), BootId(1)) for n in "abc")
BUCKETS = 8
TIMEOUT_S = 5.0
SMALL = Limits(key_bytes_max=16, value_bytes_max=200, batch_keys_max=4, message_bytes_max=40,
               scan_keys_max=100)  # fmt: skip

LATE = Lost("no answer", deadline=True)
BROKEN = Lost("connection lost")


def key_in(bucket: int, tag: str = "k") -> bytes:
    """A key of this bucket."""
    keys = (f"{tag}{i}".encode() for i in range(10_000))
    return next(k for k in keys if ring.bucket_of(k, BUCKETS) == bucket)


def table(
    owners: Sequence[Member | None] = (A,) * BUCKETS,
    *,
    revision: int = 1,
    members: Sequence[Member] | None = None,
    generations: Sequence[int] = (1,) * BUCKETS,
    silent: Sequence[Member] = (),
    fingerprint: str = "f",
    backups: Sequence[Sequence[Member]] = (),
) -> wire.Table:
    """A ring; its members are the owners, unless told. ``silent`` ones have no endpoint."""
    if members is None:
        members = sorted({o for o in owners if o is not None})
    numbers = {m: i for i, m in enumerate(members)}
    return wire.Table(
        fingerprint,
        revision,
        len(owners),
        list(members),
        [() if m in silent else (f"tcp://{m}:1",) for m in members],
        [-1 if o is None else numbers[o] for o in owners],
        list(generations),
        [[numbers[m] for m in some] for some in backups],
    )


class Desk:
    """A client's operations with a clock that only the test moves."""

    def __init__(
        self,
        known: wire.Table | None = None,
        limits: Limits | None = None,
        checksums: str = "demand",
        read: str = "any",
    ) -> None:
        self.now = 7 * SECOND_NS
        self.router = Router()
        if known is not None:
            self.router.install(known)
        config = ClientConfig(
            seeds=("tcp://seed:1",),
            timeout_s=TIMEOUT_S,
            limits=limits or Limits(),
            checksums=checksums,
            read=read,
        )
        self.ops = Operations(config, lambda: self.now, Random(1), copy, self.router)

    def start(self, operation: Operation[Any]) -> Script:
        return Script(self, operation)


class Script:
    """One operation under way. ``effect`` is what it waits for; then ``result`` or ``error``."""

    def __init__(self, desk: Desk, operation: Operation[Any]) -> None:
        self.desk = desk
        self.operation = operation
        self.effect: Any = None
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False
        self.send(None)

    def send(self, result: Any) -> None:
        try:
            self.effect = self.operation.send(result)
        except StopIteration as stop:
            self.result, self.done, self.effect = stop.value, True, None
        except Exception as e:
            self.error, self.done, self.effect = e, True, None

    @property
    def requests(self) -> Sequence[Request]:
        assert isinstance(self.effect, Exchange), (self.effect, self.error)
        return self.effect.requests

    @property
    def request(self) -> Request:
        assert len(self.requests) == 1
        return self.requests[0]

    def answer(self, *answers: Reply | Lost, sent: bool = True) -> Script:
        """Answer the exchange. Time passes to its deadline where an answer says so."""
        for request, answer in zip(self.requests, answers, strict=True):
            request.sent = request.sent or sent
            if isinstance(answer, Lost) and answer.deadline:
                self.desk.now = max(self.desk.now, self.effect.deadline_ns)
        self.send(list(answers))
        return self

    def pass_time(self, seconds: float) -> Script:
        self.desk.now += round(seconds * SECOND_NS)
        return self

    def pause(self) -> Script:
        assert isinstance(self.effect, Pause), (self.effect, self.error)
        self.desk.now += self.effect.duration_ns
        self.send(None)
        return self

    def routes(self, new: wire.Table | None = None) -> Script:
        """Answer the question for the ring; without a table: there is no newer one."""
        assert self.request.kind == Kind.ROUTES
        return self.answer(reply(new or table(members=[], owners=[None] * BUCKETS)))

    def found(self, *endpoints: str) -> Script:
        assert isinstance(self.effect, Rediscover), (self.effect, self.error)
        self.send(list(endpoints))
        return self

    def give_up(self) -> Script:
        """Let the deadline pass, whatever the operation waits for."""
        for _ in range(10):
            if self.done:
                return self
            if isinstance(self.effect, Pause):
                self.pause()
            elif isinstance(self.effect, Rediscover):
                self.found()
            else:
                self.desk.now = max(self.desk.now, self.effect.deadline_ns)
                self.answer(*[LATE] * len(self.requests), sent=False)
        raise AssertionError(f"goes on after its deadline: {self.effect}")


_KINDS: dict[type, Kind] = {
    body: kind for kind, body in wire.BODIES.items() if body is not wire.Empty
}


def reply(body: wire.Body, *frames: bytes) -> Reply:
    return Reply(_KINDS[type(body)], body, [memoryview(f) for f in frames])


def values(*contents: bytes | Status) -> Reply:
    """An answer to a get; a Status stands for a value that is not there."""
    statuses = bytes(c if isinstance(c, Status) else 0 for c in contents)
    data = [b"" if isinstance(c, Status) else c for c in contents]
    payload = b"".join(data)
    body = wire.Values(statuses if any(statuses) else b"", [len(d) for d in data], [])
    return reply(body, payload) if payload else reply(body)


def statuses(*codes: int) -> Reply:
    return reply(wire.Statuses(bytes(codes)))


def refused(fault: wire.Fault, message: str = "no") -> Reply:
    return reply(wire.Error(fault, message))
