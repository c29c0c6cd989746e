"""The client's view: which node owns a key, and what to do with each answer. Pure.

An operation is a generator. It yields *effects* (``Exchange``, ``Pause``, ``Rediscover``), gets
their results sent back, and returns the operation's result. The drivers in ``client.py`` and
``async_client.py`` carry the effects out; neither knows what an operation does, and no operation
knows a socket. (The pattern is "sans I/O": https://sans-io.readthedocs.io.)

Rules of retrying, for each request that got no answer:

* A read may be sent again, to anyone.
* A write is sent again *as the same request* to the same member: the member keeps its recent
  answers and does not run it twice. When that member has left the ring, the write may be sent to
  the next owner only if the bucket was started anew since (its generation rose, so that whatever
  the first attempt did is gone); else its outcome is Indeterminate.
* Everything ends at the deadline, and waits between rounds with jitter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

import msgspec

from p2pkv import errors, wire
from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.errors import (
    DeadlineExceeded,
    P2PKVError,
    ProtocolError,
    Stalled,
    Unreachable,
)
from p2pkv.types import Member
from p2pkv.wire import Kind, Status

Peer = Member | str
"""Whom to send to: a member of the ring, or an endpoint (before the ring is known)."""

BACKOFF_FIRST_NS = 1 * MILLISECOND_NS
BACKOFF_LAST_NS = 200 * MILLISECOND_NS
ROUTES_TIMEOUT_NS = 1 * SECOND_NS

T = TypeVar("T")


# --- effects


class Request:
    """A message to be sent.

    The driver gives ``id`` at the first sending and keeps it, and sets ``sent`` once the message
    may have reached the peer. Until then the operation has certainly not run.
    """

    __slots__ = ("body", "id", "kind", "payload", "sent", "to")

    def __init__(
        self, to: Peer, kind: Kind, body: wire.Body, payload: Sequence[wire.Buffer] = ()
    ) -> None:
        self.to = to
        self.kind = kind
        self.body = body
        self.payload = payload
        self.id = 0
        self.sent = False


class Reply(msgspec.Struct, frozen=True, gc=False):
    """A peer's answer."""

    kind: int
    body: Any
    frames: Sequence[wire.Buffer]
    revision: int = 0


class Lost(msgspec.Struct, frozen=True):
    """No answer came."""

    reason: str
    deadline: bool = False
    """Whether it was the deadline that ended the waiting."""


Answer = Reply | Lost


class Exchange(msgspec.Struct, frozen=True):
    """Send all requests at once; answers in their order. Waits until ``deadline_ns`` at most."""

    requests: Sequence[Request]
    deadline_ns: int


class Pause(msgspec.Struct, frozen=True):
    """Wait."""

    duration_ns: int


class Rediscover(msgspec.Struct, frozen=True):
    """Find endpoints of nodes anew (seeds, etcd). Answer: a list of endpoints, maybe empty."""

    deadline_ns: int


Effect = Exchange | Pause | Rediscover
Operation = Generator[Effect, Any, T]


# --- the ring, as the client knows it


class Table:
    """One state of the ring."""

    __slots__ = ("bucket_count", "endpoints", "fingerprint", "generations", "members", "owners",
                 "revision")  # fmt: skip

    def __init__(self, body: wire.Table) -> None:
        if len(body.owners) != body.bucket_count or len(body.generations) != body.bucket_count:
            raise ProtocolError(f"a table of {len(body.owners)} for {body.bucket_count} buckets")
        if body.bucket_count & (body.bucket_count - 1) or not body.bucket_count:
            raise ProtocolError(f"bucket_count {body.bucket_count} is not a power of two")
        if len(body.members) != len(body.endpoints):
            raise ProtocolError("members and endpoints differ in number")
        if any(not -1 <= i < len(body.members) for i in body.owners):
            raise ProtocolError("a bucket's owner is not in the table")
        self.fingerprint = body.fingerprint
        self.revision = body.revision
        self.bucket_count = body.bucket_count
        self.members = body.members
        self.endpoints = dict(zip(body.members, body.endpoints, strict=True))
        self.owners = body.owners
        self.generations = body.generations

    def owner(self, bucket: int) -> Member | None:
        index = self.owners[bucket]
        return self.members[index] if index >= 0 else None

    def reachable(self) -> list[Member]:
        return [m for m in self.members if self.endpoints[m]]

    def split(self, buckets: Sequence[int], items: Iterable[int]) -> dict[int, list[int]]:
        """Items by index of their bucket's owner; -1: no owner."""
        owners = self.owners
        groups: dict[int, list[int]] = {}
        for item in items:
            owner = owners[buckets[item]]
            group = groups.get(owner)
            if group is None:
                groups[owner] = [item]
            else:
                group.append(item)
        return groups


class Router:
    """The newest table that was seen. Shared by all operations of a client."""

    def __init__(self) -> None:
        self.table: Table | None = None

    def install(self, body: wire.Table) -> bool:
        """Take a table unless ours is as new. A new fingerprint is another cluster: always."""
        table, old = Table(body), self.table
        if old and old.fingerprint == table.fingerprint and old.revision >= table.revision:
            return False
        self.table = table
        return True


class Context:
    """What an operation needs: the ring, the time, the deadline, and its chance."""

    __slots__ = ("attempt", "clock", "deadline", "limits", "random", "router", "wave_max")

    def __init__(
        self,
        router: Router,
        clock: Callable[[], int],
        deadline_ns: int,
        random: Random,
        limits: Any,
    ) -> None:
        self.router = router
        self.clock = clock
        self.deadline = deadline_ns
        self.random = random
        self.limits = limits
        self.attempt = 0

    def expired(self) -> bool:
        return self.clock() >= self.deadline

    def exchange(self, requests: Sequence[Request]) -> Operation[list[Answer]]:
        answers: list[Answer] = yield Exchange(requests, self.deadline)
        return answers

    def ask(self, request: Request) -> Operation[Answer]:
        answers: list[Answer] = yield Exchange((request,), self.deadline)
        return answers[0]

    def backoff(self) -> Operation[None]:
        """Wait a little: exponential, full jitter, never past the deadline."""
        cap = min(BACKOFF_LAST_NS, BACKOFF_FIRST_NS << min(self.attempt, 16))
        self.attempt += 1
        wait = min(self.random.randint(cap // 2, cap), self.deadline - self.clock())
        if wait > 0:
            yield Pause(wait)

    def table(self) -> Operation[Table]:
        """The ring; asks for it if it is not known. Raises Unreachable."""
        while self.router.table is None:
            yield from self.refresh()
            if self.router.table is None:
                if self.expired():
                    raise Unreachable(
                        "no node gave the ring before the deadline; check that the cluster runs "
                        "(p2pkv status) and that the endpoints are right"
                    )
                yield from self.backoff()
        return self.router.table

    def refresh(self, first: Peer | None = None) -> Operation[bool]:
        """Ask nodes, one after the other, for the ring. Tells whether it got a newer one."""
        table = self.router.table
        peers: list[Peer] = list(table.reachable()) if table else []
        self.random.shuffle(peers)
        if first is not None and first in peers:
            peers.remove(first)
            peers.insert(0, first)
        answered, newer = yield from self._ask_for_routes(peers[:3])
        if not answered and not self.expired():
            found: list[str] = yield Rediscover(self.deadline)
            self.random.shuffle(found)
            _, newer = yield from self._ask_for_routes(found)
        return newer

    def _ask_for_routes(self, peers: Iterable[Peer]) -> Operation[tuple[bool, bool]]:
        for peer in peers:
            now = self.clock()
            if now >= self.deadline:
                break
            table = self.router.table
            request = Request(peer, Kind.ROUTES, wire.Routes(table.revision if table else 0))
            answers: list[Answer] = yield Exchange(
                (request,), min(self.deadline, now + ROUTES_TIMEOUT_NS)
            )
            answer = answers[0]
            if isinstance(answer, Reply) and answer.kind == Kind.TABLE:
                return True, bool(answer.body.members) and self.router.install(answer.body)
        return False, False


# --- operations on keys


class Keyed:
    """A batch of one kind over keys: how it is asked, and how an answer is taken in.

    ``results[i]`` is the outcome for key i: a value, or a P2PKVError.
    """

    kind: Kind
    mutating = False
    sizes: Sequence[int] | None = None
    """Payload bytes of each key, where the request carries values."""

    def __init__(self, keys: Sequence[bytes], buckets: Sequence[int]) -> None:
        self.keys = keys
        self.buckets = buckets
        self.results: list[Any] = [None] * len(keys)

    def keys_of(self, items: Sequence[int]) -> list[bytes]:
        keys = self.keys
        return list(keys) if len(items) == len(keys) else [keys[i] for i in items]

    def put_results(self, items: Sequence[int], results: list[Any]) -> None:
        """Outcomes of ``items``, which ascend."""
        if len(items) == len(self.results):
            self.results = results
            return
        for i, result in zip(items, results, strict=True):
            self.results[i] = result

    def request(self, to: Member, items: Sequence[int]) -> Request:
        raise NotImplementedError

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        """Take in the answer for ``items``. Returns the status of each; empty: all are done."""
        raise NotImplementedError

    def settle(self, item: int, status: int) -> None:
        """Take in a final status other than OK."""
        self.results[item] = error_of(status, self.keys[item])


def error_of(status: int, key: bytes) -> P2PKVError:
    """The exception for a status that is neither success nor a reason to ask again."""
    kind, text = _FINAL.get(status, (ProtocolError, f"got the unknown status {status}"))
    return kind(f"key {key[:80]!r} {text}")


_FINAL: dict[int, tuple[type[P2PKVError], str]] = {
    Status.MISS: (errors.Miss, "is not there"),
    Status.OUT_OF_MEMORY: (errors.OutOfMemory, "found no room, and nothing may be evicted"),
    Status.QUOTA: (errors.QuotaExceeded, "is over its node's hard_pin_quota"),
    Status.TOO_LARGE: (errors.TooLarge, "has a value larger than its node's memory"),
    Status.CONFLICT: (errors.Conflict, "is no longer allocated or open"),
    Status.CORRUPT: (errors.CorruptValue, "is corrupt in the store"),
    Status.INVALID: (errors.InvalidArgument, "was refused by its node"),
    Status.INDETERMINATE: (errors.Indeterminate, "may or may not have been changed"),
}

RETRY = frozenset({Status.NOT_PRIMARY, Status.MOVING, Status.STALLED})
"""Statuses after which the key is asked for again, with a new ring and after a pause."""


class _Sent:
    """A request under way: the items it carries and the generations of their buckets."""

    __slots__ = ("generations", "items", "request")

    def __init__(self, request: Request, items: Sequence[int], generations: list[int]) -> None:
        self.request = request
        self.items = items
        self.generations = generations


def keyed(ctx: Context, op: Keyed) -> Operation[None]:
    """Run a batch until each key has its outcome in ``op.results``."""
    table = ctx.router.table or (yield from ctx.table())
    run = _Run(op, ctx.limits)
    while True:
        sent = run.requests(table)
        answers: list[Answer] = []
        if sent:
            answers = yield Exchange([s.request for s in sent], ctx.deadline)
        run.take(sent, answers)
        if not (run.pending or run.unanswered):
            return
        if ctx.expired():
            run.give_up()
            return
        if run.disturbed:
            yield from ctx.backoff()
            yield from ctx.refresh(sent[0].request.to if sent else None)
            table = ctx.router.table or table
            run.reconsider(table)


class _Run:
    """The items of one batch on their way: not asked, asked without an answer, done."""

    def __init__(self, op: Keyed, limits: Any) -> None:
        self.op = op
        self.limits = limits
        self.pending: Sequence[int] = range(len(op.keys))
        self.unanswered: list[_Sent] = []
        self.disturbed = False
        self.why: dict[int, str] = {}

    def requests(self, table: Table) -> list[_Sent]:
        """One request per owner (several where a message's limits ask for it), and the repeats."""
        op, sent = self.op, self.unanswered
        self.pending = sorted(self.pending)  # so that as many items as keys are all in order
        homeless: Sequence[int] = ()
        for owner, items in table.split(op.buckets, self.pending).items():
            if owner < 0:
                homeless = items
                self.why.update(dict.fromkeys(items, "no owner"))
                continue
            for part in _parts(items, op.sizes, self.limits):
                generations = (
                    [table.generations[op.buckets[i]] for i in part] if op.mutating else []
                )
                sent.append(_Sent(op.request(table.members[owner], part), part, generations))
        self.pending, self.unanswered, self.disturbed = list(homeless), [], bool(homeless)
        return sent

    def take(self, sent: Sequence[_Sent], answers: Sequence[Answer]) -> None:
        for one, answer in zip(sent, answers, strict=True):
            if isinstance(answer, Lost):
                self._lost(one, answer)
            elif answer.kind == Kind.ERROR:
                self._refused(one, answer.body)
            else:
                statuses = self.op.absorb(one.items, answer)
                if statuses:
                    self._settle(one.items, statuses)

    def _lost(self, one: _Sent, answer: Lost) -> None:
        self.disturbed = True
        reason = "deadline" if answer.deadline else answer.reason
        if self.op.mutating and one.request.sent:
            self.unanswered.append(one)
        else:
            self._again(one.items, reason)

    def _again(self, items: Iterable[int], reason: str) -> None:
        items = list(items)
        self.pending = [*self.pending, *items]
        self.why.update(dict.fromkeys(items, reason))

    def _refused(self, one: _Sent, body: wire.Error) -> None:
        if body.fault in (wire.Fault.NOT_READY, wire.Fault.SESSIONS_MAX, wire.Fault.NO_SESSION):
            self.disturbed = True
            self._again(one.items, body.message)
            return
        for i in one.items:
            self.op.results[i] = ProtocolError(body.message)

    def _settle(self, items: Sequence[int], statuses: bytes) -> None:
        if len(statuses) != len(items):
            raise ProtocolError(f"{len(statuses)} statuses for {len(items)} keys")
        for i, status in zip(items, statuses, strict=True):
            if status in RETRY:
                self.disturbed = True
                self._again((i,), Status(status).name.lower())
            elif status == Status.DEFERRED:
                self._again((i,), "deferred")
            elif status:
                self.op.settle(i, status)

    def reconsider(self, table: Table) -> None:
        """Writes without an answer whose member has left the ring; see the module's rules."""
        still: list[_Sent] = []
        for one in self.unanswered:
            if one.request.to in table.endpoints:
                still.append(one)
                continue
            for i, generation in zip(one.items, one.generations, strict=True):
                if table.generations[self.op.buckets[i]] > generation:
                    self._again((i,), "its owner left")
                else:
                    self.op.settle(i, Status.INDETERMINATE)
        self.unanswered = still

    def give_up(self) -> None:
        for one in self.unanswered:
            for i in one.items:
                self.op.settle(i, Status.INDETERMINATE)
        for i in self.pending:
            self.op.results[i] = gave_up(self.why.get(i, "deadline"), self.op.keys[i])


def _parts(
    items: Sequence[int], sizes: Sequence[int] | None, limits: Any
) -> Iterable[Sequence[int]]:
    keys_max, bytes_max = limits.batch_keys_max, limits.message_bytes_max
    if sizes is None or sum(sizes[i] for i in items) <= bytes_max:
        return [items[i : i + keys_max] for i in range(0, len(items), keys_max)]
    parts: list[Sequence[int]] = []
    part: list[int] = []
    total = 0
    for i in items:
        if part and (total + sizes[i] > bytes_max or len(part) == keys_max):
            parts.append(part)
            part, total = [], 0
        part.append(i)
        total += sizes[i]
    return [*parts, part]


def gave_up(reason: str, key: bytes) -> P2PKVError:
    """What to raise for a key whose operation found no end before the deadline."""
    name = f"key {key[:80]!r}"
    if reason in ("stalled", "moving", "not_primary"):
        return Stalled(f"{name}: its bucket is {reason} and the deadline passed; try again later")
    if reason in ("deadline", "deferred"):
        return DeadlineExceeded(f"{name}: no answer before the deadline")
    return Unreachable(f"{name}: its owner could not be reached before the deadline ({reason})")
