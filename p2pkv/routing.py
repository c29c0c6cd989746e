"""The client's view: which node owns a key, and how to ask it. Pure.

An operation is a generator. It yields *effects* (``Exchange``, ``Pause``, ``Rediscover``), gets
their results sent back, and returns the operation's result. The drivers in ``client.py`` and
``async_client.py`` carry the effects out; neither knows what an operation does, and no operation
knows a socket. (The pattern is "sans I/O": https://sans-io.readthedocs.io.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from p2pkv import wire
from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.errors import ClusterMismatch, P2PKVError, ProtocolError, Unreachable
from p2pkv.outcomes import DEADLINE, PASSING_FAULTS, refusal
from p2pkv.parts import Parts
from p2pkv.types import Member
from p2pkv.wire import Kind

Peer = Member | str
"""Whom to send to: a member of the ring, or an endpoint (before the ring is known)."""

BACKOFF_FIRST_NS = 1 * MILLISECOND_NS
BACKOFF_LAST_NS = 200 * MILLISECOND_NS
ROUTES_TIMEOUT_NS = 1 * SECOND_NS
PATIENCE_FIRST_NS = 5 * SECOND_NS
"""So long an owner may be silent before the ring is looked at; doubled each time, since what is
asked for may be large and the way slow."""
PATIENCE_WITH_COPIES_NS = 1 * SECOND_NS
"""The same where a copy could answer, or take over."""
PATIENCE_PARTS = 3
"""A read that a copy may answer gives its owner at most this part of the time that is left, so that
the copy gets its chance."""
ROUTES_PEERS_MAX = 3
"""Members that are asked for the ring before the seeds, or etcd, are."""

NOBODY: Mapping[Peer, bool] = {}

ABSENT, THERE, ASK = range(3)
"""Whether a key is there, as far as it is known without asking; see ``Reads.exists``."""

T = TypeVar("T")


# --- effects


Sink = Callable[[wire.Values], Sequence[Parts]]
"""Tells where the values of an answer go: for each memory of exactly its size."""


class Source(Protocol):
    """The values of a request that are not in host memory."""

    def part(self, items: Sequence[int]) -> Source:
        """Those of these numbers. Raises DeviceError if they could not be read before."""

    def staged(self) -> Sequence[memoryview]:
        """They, brought to host memory. Raises DeviceError."""

    def write(self, memory: Any, made: Sequence[int], offsets: Sequence[int]) -> None:
        """Copy those of these numbers to where a node on this host made room in its memory.

        All has arrived when it returns. Raises DeviceError.
        """


class Request:
    """A message to be sent.

    The driver gives ``id`` at the first sending and keeps it, and sets ``sent`` once the message
    may have reached the peer. Until then the operation has certainly not run.
    """

    __slots__ = (
        "body", "direct", "id", "kind", "payload", "seal", "sent", "sink", "source", "to", "unsure",
    )  # fmt: skip

    def __init__(
        self, to: Peer, kind: Kind, body: wire.Body, payload: Sequence[wire.Buffer] = ()
    ) -> None:
        self.to = to
        self.kind = kind
        self.body = body
        self.payload = payload
        self.id = 0
        self.sent = False
        self.unsure = False
        """An earlier sending of it got no answer: it may have run. It keeps its ``id`` for ever."""
        self.sink: Sink | None = None
        self.seal: Callable[[], None] | None = None
        """To be called by the driver before the payload is sent: it puts the values' checksums into
        the body. Not called where the driver finds them while it copies."""
        self.direct = False
        """A read that only the owner itself can answer: its published index did not."""
        self.source: Source | None = None
        """Where the payload is to come from, as long as it is not there."""

    def prepare(self) -> None:
        """To be called by the driver before it sends the payload."""
        if self.source is not None and not self.payload:
            self.payload = self.source.staged()
        if self.seal is not None:
            self.seal()


class Reply(msgspec.Struct, frozen=True, gc=False):
    """A peer's answer."""

    kind: int
    body: Any
    frames: Sequence[wire.Buffer]
    revision: int = 0
    values: Sequence[Any] | None = None
    """The values of the answer, each an object of its own, where the driver made them so."""
    delivered: bool = False
    """The values are where the request's sink wanted them."""
    sums: Sequence[int] = ()
    """Checksums of the values, where the driver found them on the way (0: not of this one)."""


class Lost(msgspec.Struct, frozen=True):
    """No answer came."""

    reason: str
    deadline: bool = False
    """Whether it was the deadline that ended the waiting."""


Answer = Reply | Lost


def note_lost(requests: Sequence[Request], answers: Sequence[Answer]) -> None:
    """For drivers, after each exchange: which requests may have run without our knowing."""
    for request, answer in zip(requests, answers, strict=True):
        if isinstance(answer, Lost) and request.sent:
            request.unsure = True


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


def reason_of(answer: Answer) -> str:
    """Why a request has to be sent again. Raises P2PKVError if that would change nothing."""
    if isinstance(answer, Lost):
        return DEADLINE if answer.deadline else answer.reason
    if answer.body.fault not in PASSING_FAULTS:
        raise refusal(answer.body, "the request")
    return str(answer.body.message)


# --- the ring, as the client knows it


class Location(NamedTuple):
    """Where a key lies, as far as the client knows."""

    member: Member
    bucket: int
    generation: int
    """Rises when the bucket is started anew, empty."""


class Table:
    """One state of the ring."""

    __slots__ = ("backups", "bucket_count", "endpoints", "fingerprint", "generations", "members",
                 "owners", "revision")  # fmt: skip

    def __init__(self, body: wire.Table) -> None:
        if len(body.owners) != body.bucket_count or len(body.generations) != body.bucket_count:
            raise ProtocolError(f"a table of {len(body.owners)} for {body.bucket_count} buckets")
        if body.bucket_count & (body.bucket_count - 1) or not body.bucket_count:
            raise ProtocolError(f"bucket_count {body.bucket_count} is not a power of two")
        if len(body.members) != len(body.endpoints):
            raise ProtocolError("members and endpoints differ in number")
        if any(not -1 <= i < len(body.members) for i in body.owners):
            raise ProtocolError("a bucket's owner is not in the table")
        if len(body.backups) not in (0, body.bucket_count):
            raise ProtocolError(f"backups of {len(body.backups)} of {body.bucket_count} buckets")
        if any(not 0 <= i < len(body.members) for backups in body.backups for i in backups):
            raise ProtocolError("a bucket's backup is not in the table")
        self.fingerprint = body.fingerprint
        self.revision = body.revision
        self.bucket_count = body.bucket_count
        self.members = body.members
        self.endpoints = dict(zip(body.members, body.endpoints, strict=True))
        self.owners = body.owners
        self.generations = body.generations
        self.backups = body.backups
        """By bucket the other members in sync, as indices; empty if no bucket has any."""

    def owner(self, bucket: int) -> Member | None:
        index = self.owners[bucket]
        return self.members[index] if index >= 0 else None

    def locate(self, buckets: Sequence[int]) -> list[Location | None]:
        """The place of each bucket; None where it has no owner."""
        return [
            Location(owner, bucket, self.generations[bucket])
            if (owner := self.owner(bucket)) is not None
            else None
            for bucket in buckets
        ]

    def reachable(self) -> list[Member]:
        return [m for m in self.members if self.endpoints[m]]

    def split(self, buckets: Sequence[int], items: Sequence[int]) -> dict[int, list[int]]:
        """Items by index of their bucket's owner; -1: no owner."""
        owners = self.owners
        if len(items) == len(buckets):
            of_all = set(map(owners.__getitem__, buckets))
        else:
            of_all = {owners[buckets[item]] for item in items}
        if len(of_all) == 1:
            return {of_all.pop(): list(items)}
        groups: dict[int, list[int]] = {}
        for item in items:
            owner = owners[buckets[item]]
            group = groups.get(owner)
            if group is None:
                groups[owner] = [item]
            else:
                group.append(item)
        return groups

    def split_around(
        self, buckets: Sequence[int], items: Sequence[int], avoided: Container[Peer]
    ) -> dict[int, list[int]]:
        """As ``split``, but what an avoided member owns goes to a backup that is not, if any."""
        members = self.members
        groups: dict[int, list[int]] = {}
        for owner, group in self.split(buckets, items).items():
            if owner < 0 or members[owner] not in avoided:
                groups.setdefault(owner, []).extend(group)
                continue
            for item in group:
                others = [i for i in self.backups[buckets[item]] if members[i] not in avoided]
                groups.setdefault(others[0] if others else owner, []).append(item)
        for group in groups.values():
            group.sort()
        return groups


class Place(NamedTuple):
    """Where a value lies in the memory of a node on this host."""

    memory: Any
    offset: int
    size: int
    version: int
    """The value's bytes are those that were copied if it is of this version still afterwards."""


Known = tuple[list[Any], Sequence[int]]
"""What is known of some keys without asking: a result for each, None if it is not there or not
known, and the numbers of those whose owners are to be asked, in order."""


def unknown(keys: int) -> Known:
    """All are to be asked for."""
    return [None] * keys, range(keys)


class Reads(Protocol):
    """What can be told without asking owners: of keys of nodes on this host."""

    def exists(self, keys: list[Any]) -> bytes:
        """For each key, str or bytes, ABSENT, THERE or ASK. Empty: nothing is known."""

    def get(self, keys: list[bytes]) -> Known:
        """The values."""

    def get_into(self, keys: list[Any], targets: list[Any]) -> Known:
        """The size of each value that is now in its target."""

    def places(self, keys: list[bytes]) -> list[Place | None]:
        """Where the values lie; None: ask."""

    def memory_of(self, peer: Peer) -> Any:
        """The memory of this node, where it is on this host; else None."""


class Router:
    """The newest table that was seen. Shared by all operations of a client."""

    def __init__(self) -> None:
        self.published: Reads | None = None
        """What can be read without asking."""
        self.table: Table | None = None
        self.silent: frozenset[Peer] = frozenset()
        """Those that did not answer, since others were asked for the ring: it may have changed
        without anybody who could have said so."""

    def endpoint(self, peer: Peer) -> str | None:
        """Where a peer is reached, if that is known."""
        if isinstance(peer, str):
            return peer
        endpoints = self.table.endpoints.get(peer) if self.table else None
        return endpoints[0] if endpoints else None

    def install(self, body: wire.Table) -> bool:
        """Take a table unless ours is as new. A new fingerprint is another cluster: always.

        Raises ProtocolError for a table that makes no sense, ClusterMismatch if the number of
        buckets is no longer what it was.
        """
        table, old = Table(body), self.table
        if old and old.bucket_count != table.bucket_count:
            raise ClusterMismatch(
                f"the cluster was created anew with bucket_count = {table.bucket_count} (it was "
                f"{old.bucket_count}): make a new client"
            )
        if old and old.fingerprint == table.fingerprint and old.revision >= table.revision:
            return False
        self.table = table
        return True


class Context:
    """What an operation needs: the ring, the time, the deadline, and its chance."""

    __slots__ = ("attempt", "clock", "deadline", "limits", "mismatch", "patience", "random",
                 "router")  # fmt: skip

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
        self.patience = PATIENCE_FIRST_NS
        self.mismatch = ""
        """What a node of another cluster said when it was asked for the ring."""

    def hurry(self, any_copy: bool) -> None:
        """This one gets less time: somebody else could answer, now (``any_copy``) or soon."""
        if self.router.table is None or not self.router.table.backups:
            return
        self.patience = min(self.patience, PATIENCE_WITH_COPIES_NS)
        if any_copy:
            left = max(0, self.deadline - self.clock())
            self.patience = min(self.patience, left // PATIENCE_PARTS)

    def expired(self) -> bool:
        return self.clock() >= self.deadline

    def exchange(self, requests: Sequence[Request]) -> Operation[list[Answer]]:
        """Ask all at once. Who has not answered after a while is given up for this attempt."""
        until = min(self.deadline, self.clock() + self.patience)
        answers: list[Answer] = yield Exchange(requests, until)
        lost = [r.to for r, a in zip(requests, answers, strict=True) if isinstance(a, Lost)]
        if lost:
            self._unheard(lost)
        return answers

    def ask(self, request: Request) -> Operation[Answer]:
        """Ask one, as ``exchange``."""
        until = min(self.deadline, self.clock() + self.patience)
        answers: list[Answer] = yield Exchange((request,), until)
        if isinstance(answers[0], Lost):
            self._unheard((request.to,))
        return answers[0]

    def _unheard(self, peers: Iterable[Peer]) -> None:
        self.patience *= 2
        self.router.silent = self.router.silent.union(peers)

    def backoff(self) -> Operation[None]:
        """Wait a little: exponential, full jitter, never past the deadline."""
        cap = min(BACKOFF_LAST_NS, BACKOFF_FIRST_NS << min(self.attempt, 16))
        self.attempt += 1
        wait = min(self.random.randint(cap // 2, cap), self.deadline - self.clock())
        if wait > 0:
            yield Pause(wait)

    def table(self) -> Operation[Table]:
        """The ring; asks for it if it is not known. Raises Unreachable, ClusterMismatch."""
        if self.router.silent and self.router.table is not None:
            yield from self.refresh(dict.fromkeys(self.router.silent, False))
        while self.router.table is None:
            yield from self.refresh()
            if self.router.table is None:
                if self.mismatch:
                    raise ClusterMismatch(self.mismatch)
                if self.expired():
                    raise Unreachable(
                        "no node gave the ring before the deadline; check that the cluster runs "
                        "(p2pkv status) and that the endpoints are right"
                    )
                yield from self.backoff()
        return self.router.table

    def refresh(self, asked: Mapping[Peer, bool] = NOBODY) -> Operation[bool]:
        """Ask nodes, one after the other, for the ring. Tells whether it got a newer one.

        ``asked``: who was asked for something just now, and whether it answered. Those that did
        come first: if they refused, they know more than we do. Those that did not come last.
        """
        table = self.router.table
        peers: list[Peer] = list(table.reachable()) if table else []
        self.random.shuffle(peers)
        peers.sort(key=lambda peer: -asked[peer] if peer in asked else -0.5)
        answered, newer = yield from self._ask_for_routes(peers[:ROUTES_PEERS_MAX])
        if not answered and not self.expired():
            try:
                found: list[str] = yield Rediscover(self.deadline)
            except P2PKVError:
                if table is None:  # nothing is under way yet; who asks learns what is wrong
                    raise
                found = []
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
            if isinstance(answer, Lost):
                continue
            if answer.kind == Kind.ERROR and answer.body.fault == wire.Fault.CLUSTER:
                self.mismatch = answer.body.message
            if answer.kind == Kind.TABLE:
                self.router.silent = frozenset()
                try:
                    return True, bool(answer.body.members) and self.router.install(answer.body)
                except ProtocolError:
                    continue
        return False, False
