"""What the tests of the node's inner parts share: a small store, sessions and handlers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from p2pkv import ring, wire
from p2pkv.arena import Arena
from p2pkv.buffers import Run
from p2pkv.config import Limits
from p2pkv.handlers import Handlers
from p2pkv.journal import Journal
from p2pkv.leading import Settings
from p2pkv.records import BucketRecord, Versioned
from p2pkv.replicas import Pace, Replicas
from p2pkv.replicated import Grant, NewEpochAck, PrepareAck, Talk
from p2pkv.replicated import Session as InStep
from p2pkv.sessions import Response, Session, Sessions
from p2pkv.store import Store
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision
from p2pkv.wire import Kind, PutOptions, Status

KIB, MIB = 1 << 10, 1 << 20
MS, S = 1_000_000, 1_000_000_000
PLAIN = PutOptions()

A, B, C = (Member(NodeId(name), BootId(1)) for name in "abc")
LIMITS = Limits(
    key_bytes_max=64,
    value_bytes_max=4 * MIB,
    batch_keys_max=64,
    head_bytes_max=64 * KIB,
    message_bytes_max=1 * MIB,
    inflight_max=4,
    scan_keys_max=8,
)


def make_store(arena: Arena, buckets: Iterable[int] = (), **limits: Any) -> Store:
    store = Store(arena, **{"metadata_limit_bytes": 16 * MIB, "key_bytes_max": 64, **limits})
    for bucket in buckets:
        store.open_bucket(bucket)
    return store


def make_replicas(
    store: Store,
    sessions: Sessions,
    me: Member = A,
    members: Sequence[Member] = (A, B, C),
    may_grant: Callable[[int], bool] = lambda now: True,
    lease_ns: int = 500 * MS,
    **settings: Any,
) -> tuple[Journal, Replicas]:
    """The replicas of one node, and the journal that they change."""
    journal = Journal(store, sessions, lambda: 1)
    registered = {member.node: member for member in members}
    journal.replicas = Replicas(
        Settings(me=me, **settings), Pace(), lease_ns, journal, registered.get, may_grant
    )
    return journal, journal.replicas


def owned(primary: Member, *backups: Member, epoch: int = 1, revision: int = 1) -> Versioned:
    """A bucket's record as etcd has it."""
    members = (primary, *backups)
    record = BucketRecord(
        epoch=Epoch(epoch),
        generation=1,
        primary=primary,
        in_sync=members,
        assigned=tuple(member.node for member in members),
    )
    return Versioned(record, Revision(revision))


def flat(payload: Sequence[wire.Buffer | Run]) -> list[bytes]:
    """Copies of an answer's frames; the tokens of those that are lent are given back."""
    frames = []
    for part in payload:
        if isinstance(part, Run):
            frames.append(bytes(part.view))
            part.done()
        else:
            frames.append(bytes(part))
    return frames


def answered(response: Response, expected: Kind) -> Any:
    """The body of an answer, which must have the kind, and must go over the wire."""
    kind, body, _ = response
    assert kind == expected, (kind, body)
    assert wire.decode(wire.encode(Kind(kind), 1, 1, body), 1 << 25).body == body
    return body


class Host:
    """Handlers over a real store with four buckets, of which all are served at first."""

    BUCKETS = 4

    def __init__(self, arena: Arena, limits: Limits = LIMITS, **store: Any) -> None:
        self.store = make_store(arena, **store)
        self.sessions = Sessions(
            self.store,
            ttl_ns=30 * S,
            alloc_ns=10 * S,
            read_ns=10 * S,
            sessions_max=4,
            answers_max=8,
        )
        self.fenced = False
        self.journal, self.replicas = make_replicas(self.store, self.sessions, lease_ns=3600 * S)
        self.replicas.adopt({BucketId(b): owned(A) for b in range(self.BUCKETS)}, 1)
        self.handlers = Handlers(
            self.journal, limits, self.BUCKETS,
            lambda now: not self.fenced,
            {Kind.STATS: lambda *_: (Kind.NODE_STATS, wire.NodeStats(A, {}, {"x": 1.0}), ())},
        )  # fmt: skip
        self.session = self.open_session(b"c", b"1")
        self._requests = 0
        self.now = 1

    def share(self, *buckets: int, now: int = S) -> None:
        """B has a copy of these in sync, and grants their reads for an hour. To be called once."""
        record = owned(A, B, epoch=2, revision=2)
        self.replicas.adopt({BucketId(b): record for b in buckets}, now)
        acks = [NewEpochAck(b, 2, 0, InStep(2)) for b in buckets]
        self.replicas.take_talk(Talk(B, A, new_epoch_acks=acks), now)
        self.replicas.tick(now)
        [beacon] = [talk.beacon for talk in self.replicas.talk() if talk.beacon]
        self.replicas.take_talk(Talk(B, A, grant=Grant(beacon.sent_ns)), now)

    @property
    def under_way(self) -> int:
        """Writes that wait for B."""
        return sum(len(r.log) for r in self.replicas.by_bucket.values())

    def acknowledge(self, now: int = 1) -> None:
        """B has got everything that it was to get."""
        for batch in self.replicas.batches(now):
            acks = [
                PrepareAck(p.bucket, p.epoch, p.first + len(p.ops) - 1, InStep(2))
                for p in batch.prepares
            ]
            self.replicas.take_prepare_acks(B, acks, now)

    def open_session(self, client: bytes, session: bytes, now: int = 1) -> Session:
        made = self.sessions.begin(client.ljust(9, b".") + session.ljust(7, b"."), None, now)
        assert made is not None
        return made

    def ask(
        self,
        kind: Kind,
        body: Any,
        frames: Sequence[wire.Buffer] = (),
        session: Session | None = None,
        request: int = 0,
    ) -> Response:
        if not request:
            self._requests += 1
            request = self._requests
        return self.handlers.handle(session or self.session, kind, request, body, frames, self.now)

    def statuses(self, kind: Kind, body: Any, frames: Sequence[wire.Buffer] = (),
                 session: Session | None = None) -> list[Status]:  # fmt: skip
        statuses = answered(self.ask(kind, body, frames, session), Kind.STATUSES).statuses
        return [Status(s) for s in statuses]

    def put(self, values: dict[bytes, bytes], options: PutOptions = PLAIN) -> None:
        sizes = [len(v) for v in values.values()]
        body = wire.Put(list(values), sizes, options)
        frames = [value for value in values.values() if value]
        assert self.statuses(Kind.PUT, body, frames) == []

    def get(self, *keys: bytes) -> list[bytes | None]:
        response = self.ask(Kind.GET, wire.Get(list(keys)))
        body = answered(response, Kind.VALUES)
        views = wire.placed(flat(response[2]), body.sizes, body.starts)
        statuses = body.statuses or bytes(len(keys))
        return [None if s else bytes(v) for s, v in zip(statuses, views, strict=True)]

    def keys_in(self, bucket: int, number: int, name: str = "k") -> list[bytes]:
        """``number`` keys that belong to the bucket."""
        keys: list[bytes] = []
        i = 0
        while len(keys) < number:
            key = b"%s%d" % (name.encode(), i)
            if ring.bucket_of(key, self.BUCKETS) == bucket:
                keys.append(key)
            i += 1
        return keys
