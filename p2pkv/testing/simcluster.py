"""A cluster as the client's generators see it: members that answer, a clock, a bad network. Pure.

``SimCluster.run`` carries out an operation's effects as the drivers do, against members that keep
their objects in dicts and follow the rules of the real ones: a repeated write (same number, same
member) gets its first answer and does not run again; what is no longer known is refused as
FORGOTTEN; a bucket is served by its owner only. Between any two messages anything may happen that
``trouble`` allows. All chance comes from one ``Random``, all time from a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, TypeVar

from p2pkv import ring, wire
from p2pkv.clock import MILLISECOND_NS
from p2pkv.config import Limits
from p2pkv.parts import flat
from p2pkv.routing import Answer, Exchange, Lost, Operation, Pause, Peer, Reply, Request
from p2pkv.types import BootId, Member, NodeId
from p2pkv.wire import Fault, Kind, Status

T = TypeVar("T")

EFFECTS_MAX = 20_000
SEED_ENDPOINT = "tcp://seed:1"
LIMITS = Limits(
    key_bytes_max=64,
    value_bytes_max=1024,
    batch_keys_max=4,
    message_bytes_max=64,
    scan_keys_max=3,
)


class Trouble:
    """How likely each mishap is: of each message, or (``ring``, ``stall``) before each exchange."""

    def __init__(self, *, refused: float = 0, lost: float = 0, answer_lost: float = 0,
                 late: float = 0, silence: float = 0, twice: float = 0, ring: float = 0,
                 crash: float = 0, stall: float = 0, forget: float = 0) -> None:  # fmt: skip
        self.refused = refused
        """No connection: the message certainly did not leave."""
        self.lost = lost
        """The connection breaks before the message is there."""
        self.answer_lost = answer_lost
        """It breaks after the message is handled."""
        self.late = late
        """It breaks, and the message is handled later, maybe after its repeat."""
        self.silence = silence
        """No answer until the deadline; with equal chance, the message was handled."""
        self.twice = twice
        """The message is handled twice."""
        self.ring = ring
        """A bucket starts or ends moving, or a member comes or leaves in good order."""
        self.crash = crash
        """A member is gone, with all that it held."""
        self.stall = stall
        """A member stops serving, or serves again."""
        self.forget = forget
        """A member forgets the session."""


class Execution:
    """One write that a member carried out for one key."""

    def __init__(self, kind: Kind, key: bytes, value: bytes, status: int, generation: int) -> None:
        self.kind = kind
        self.key = key
        self.value = value
        self.status = status
        self.generation = generation


class SimMember:
    """One node: a store per bucket, and what it remembers of the one session."""

    def __init__(self, cluster: SimCluster, member: Member) -> None:
        self.cluster = cluster
        self.member = member
        self.stores: dict[int, dict[bytes, bytes]] = {}
        self.moving: set[int] = set()
        self.stalled = False
        self.table = cluster.table()
        self.answers: dict[int, Reply] = {}
        self.first_known = 0
        """Writes with lower numbers may have run before the session was forgotten."""
        self.next_id = 1
        self.allocations: dict[int, tuple[bytes, int, bytearray, wire.PutOptions]] = {}
        self.allocated: dict[int, bytes] = {}
        """The key of every allocation that there ever was."""
        self.tokens: dict[int, bytes] = {}

    def handle(self, request: Request) -> Reply:
        if request.kind not in wire.MUTATING:
            return self._run(request)
        known = self.answers.get(request.id)
        if known is None:
            if request.id < self.first_known:
                return self._error(Fault.FORGOTTEN, "the session was forgotten")
            known = self.answers[request.id] = self._run(request)
        return known

    def forget(self) -> None:
        self.answers.clear()
        self.allocations.clear()
        self.tokens.clear()
        self.first_known = self.cluster.next_request

    def written_by(self, request: Request) -> list[bytes]:
        """The keys that a write names."""
        if request.kind == Kind.COMMIT:
            return [self.allocated[request.body.ids[0]]]  # type: ignore[attr-defined]
        mutating = request.kind in wire.MUTATING
        return list(getattr(request.body, "keys", ())) if mutating else []

    def _run(self, request: Request) -> Reply:
        handler = getattr(self, f"_{request.kind.name.lower()}")
        kind, body, frames = handler(request.body, request.payload)
        return Reply(kind, body, frames, self.table.revision)

    def _error(self, fault: Fault, message: str) -> Reply:
        return Reply(Kind.ERROR, wire.Error(fault, message), (), self.table.revision)

    # -- who may be served

    def status_of(self, bucket: int) -> Status:
        if self.stalled:
            return Status.STALLED
        if bucket in self.moving:
            return Status.MOVING
        return Status.OK if bucket in self.stores else Status.NOT_PRIMARY

    def _bucket(self, key: bytes) -> int:
        return ring.bucket_of(key, self.cluster.bucket_count)

    def _each(self, keys: Sequence[bytes], run: Any) -> tuple[Kind, wire.Body, Any]:
        statuses = bytes(
            self.status_of(self._bucket(key)) or run(i, key) for i, key in enumerate(keys)
        )
        return Kind.STATUSES, wire.Statuses(statuses if any(statuses) else b""), ()

    def _store(self, key: bytes) -> dict[bytes, bytes]:
        return self.stores[self._bucket(key)]

    # -- reading

    def _get(self, body: wire.Get, frames: Any) -> tuple[Kind, wire.Body, Any]:
        statuses = bytearray()
        values: list[bytes] = []
        totals: list[int] = []
        room = self.cluster.limits.message_bytes_max
        for i, key in enumerate(body.keys):
            status = int(self.status_of(self._bucket(key)))
            value = b"" if status else self._store(key).get(key)
            totals.append(len(value or b""))
            if value is not None and body.starts and not status:
                end = len(value) if body.lengths[i] < 0 else body.starts[i] + body.lengths[i]
                status = Status.RANGE if max(body.starts[i], end) > len(value) else Status.OK
                value = b"" if status else value[body.starts[i] : end]
            if value is None:
                status, value = Status.MISS, b""
            elif len(value) > self.cluster.limits.message_bytes_max:
                status, value = Status.LARGE, b""
            elif len(value) > room:
                status, value = Status.DEFERRED, b""
            room -= len(value)
            statuses.append(status)
            values.append(value)
        sizes = [len(v) for v in values]
        starts: list[int] = []
        if self.cluster.random.random() < 0.5:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
        payload = [b"".join(values)] if any(values) else []
        told = bytes(statuses) if any(statuses) else b""
        totals = totals if body.starts else []
        return Kind.VALUES, wire.Values(told, sizes, starts, totals=totals), payload

    def _exists(self, body: wire.Exists, frames: Any) -> tuple[Kind, wire.Body, Any]:
        return self._each(body.keys, lambda _, k: 0 if k in self._store(k) else Status.MISS)

    def _match(self, body: wire.Match, frames: Any) -> tuple[Kind, wire.Body, Any]:
        for count, key in enumerate(body.keys):
            status = self.status_of(self._bucket(key))
            if status or key not in self._store(key):
                return Kind.MATCHED, wire.Matched(count, status or Status.MISS), ()
        return Kind.MATCHED, wire.Matched(len(body.keys), Status.MISS), ()

    def _open(self, body: wire.Open, frames: Any) -> tuple[Kind, wire.Body, Any]:
        key = body.keys[0]
        status = self.status_of(self._bucket(key)) or (
            Status.OK if key in self._store(key) else Status.MISS
        )
        if status:
            return Kind.OPENED, wire.Opened(bytes([status]), [0], [0]), ()
        token = self._new_id()
        self.tokens[token] = self._store(key)[key]
        return Kind.OPENED, wire.Opened(b"", [token], [len(self.tokens[token])]), ()

    def _read(self, body: wire.Read, frames: Any) -> tuple[Kind, wire.Body, Any]:
        value = self.tokens.get(body.token)
        if value is None:
            return Kind.VALUES, wire.Values(bytes([Status.CONFLICT]), [0], []), ()
        piece = value[body.offset : body.offset + body.length]
        return Kind.VALUES, wire.Values(b"", [len(piece)], []), [piece]

    def _release(self, body: wire.Release, frames: Any) -> tuple[Kind, wire.Body, Any]:
        for token in body.tokens:
            self.tokens.pop(token, None)
        return Kind.STATUSES, wire.Statuses(b""), ()

    # -- writing

    def _put(self, body: wire.Put, frames: Any) -> tuple[Kind, wire.Body, Any]:
        values = [b"".join(flat([v])) for v in wire.gathered(frames, body.sizes)]
        return self._each(
            body.keys, lambda i, key: self._set(key, values[i], body.options, Kind.PUT)
        )

    def _set(self, key: bytes, value: bytes, options: wire.PutOptions, kind: Kind) -> int:
        store = self._store(key)
        status = Status.EXISTS if options.if_absent and key in store else Status.OK
        if not status:
            store[key] = value
        self._log(kind, key, value, status)
        return status

    def _delete(self, body: wire.Delete, frames: Any) -> tuple[Kind, wire.Body, Any]:
        def run(_: int, key: bytes) -> int:
            status = Status.MISS if self._store(key).pop(key, None) is None else Status.OK
            self._log(Kind.DELETE, key, b"", status)
            return status

        return self._each(body.keys, run)

    def _log(self, kind: Kind, key: bytes, value: bytes, status: int) -> None:
        generation = self.cluster.generations[self._bucket(key)]
        self.cluster.executed.append(Execution(kind, key, value, status, generation))
        self.cluster.note(key)

    def _flag(self, body: Any, frames: Any) -> tuple[Kind, wire.Body, Any]:
        return self._each(body.keys, lambda _, k: 0 if k in self._store(k) else Status.MISS)

    _pin = _unpin = _expire = _flag

    def _alloc(self, body: wire.Alloc, frames: Any) -> tuple[Kind, wire.Body, Any]:
        key = body.keys[0]
        status = self.status_of(self._bucket(key))
        if not status and body.options.if_absent and key in self._store(key):
            status = Status.EXISTS
        if status:
            return Kind.ALLOCATED, wire.Allocated(bytes([status]), [0], [0]), ()
        id = self._new_id()
        self.allocated[id] = key
        self.allocations[id] = (key, 0, bytearray(body.sizes[0]), body.options)
        return Kind.ALLOCATED, wire.Allocated(b"", [id], [0]), ()

    def _write(self, body: wire.Write, frames: Any) -> tuple[Kind, wire.Body, Any]:
        if body.id not in self.allocations:
            return Kind.STATUSES, wire.Statuses(bytes([Status.CONFLICT])), ()
        key, written, value, options = self.allocations[body.id]
        data = b"".join(frames)
        value[body.offset : body.offset + len(data)] = data
        self.allocations[body.id] = (key, written + len(data), value, options)
        return Kind.STATUSES, wire.Statuses(b""), ()

    def _commit(self, body: wire.Commit, frames: Any) -> tuple[Kind, wire.Body, Any]:
        key, written, value, options = self.allocations.pop(body.ids[0], (b"", 0, b"", None))
        if options is None:
            status: int = Status.CONFLICT
        else:
            assert written >= len(value), "committed before all was written"
            status = self.status_of(self._bucket(key))
            status = status or self._set(key, bytes(value), options, Kind.COMMIT)
        return Kind.STATUSES, wire.Statuses(bytes([status]) if status else b""), ()

    def _abort(self, body: wire.Abort, frames: Any) -> tuple[Kind, wire.Body, Any]:
        for id in body.ids:
            self.allocations.pop(id, None)
        return Kind.STATUSES, wire.Statuses(b""), ()

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    # -- ranges

    def _keys_of(self, bucket: int, prefix: bytes, after: bytes = b"") -> list[bytes]:
        return sorted(k for k in self.stores[bucket] if k.startswith(prefix) and k > after)

    def _scan(self, body: wire.Scan, frames: Any) -> tuple[Kind, wire.Body, Any]:
        keys: list[bytes] = []
        finished, after, status = 0, body.after, Status.OK
        for bucket in body.buckets:
            status = self.status_of(bucket)
            if status or len(keys) >= body.limit:
                break
            found = self._keys_of(bucket, body.prefix, after)
            more = len(found) > body.limit - len(keys)
            keys += found[: body.limit - len(keys)]
            if more:
                break
            finished, after = finished + 1, b""
        return (
            Kind.PAGE,
            wire.Page(keys, [len(self._store(k)[k]) for k in keys], finished, status),
            (),
        )

    def _delete_range(self, body: wire.DeleteRange, frames: Any) -> tuple[Kind, wire.Body, Any]:
        count, finished, status = 0, 0, Status.OK
        for bucket in body.buckets:
            status = self.status_of(bucket)
            if status or count >= body.limit:
                break
            found = self._keys_of(bucket, body.prefix)
            for key in found[: body.limit - count]:
                del self.stores[bucket][key]
                self._log(Kind.DELETE_RANGE, key, b"", Status.OK)
            more = len(found) > body.limit - count
            count += min(len(found), body.limit - count)
            if more:
                break
            finished += 1
        return Kind.DELETED, wire.Deleted(count, finished, status), ()

    # -- the node

    def _routes(self, body: wire.Routes, frames: Any) -> tuple[Kind, wire.Body, Any]:
        return Kind.TABLE, self.table, ()

    def _stats(self, body: wire.Empty, frames: Any) -> tuple[Kind, wire.Body, Any]:
        return Kind.NODE_STATS, wire.NodeStats(self.member, {}, {}), ()


class SimCluster:
    """The members, the ring that is in force, the network to them, and the clock."""

    def __init__(
        self,
        random: Random,
        *,
        members: int = 3,
        bucket_count: int = 8,
        limits: Limits = LIMITS,
        trouble: Trouble | None = None,
    ) -> None:
        self.random = random
        self.bucket_count = bucket_count
        self.limits = limits
        self.trouble = trouble or Trouble()
        self.now = 1_000 * MILLISECOND_NS
        self.revision = 1
        self.owners: list[Member | None] = [None] * bucket_count
        self.generations = [1] * bucket_count
        self.members: dict[Member, SimMember] = {}
        self.executed: list[Execution] = []
        self.seen: dict[bytes, set[bytes | None]] = {}
        """The contents that each watched key has had."""
        self.next_request = 1
        self.late: list[tuple[Member, Request]] = []
        self.unanswered: set[bytes] = set()
        """Keys of writes that left and got no answer."""
        self.effects = 0
        self._boots = 0
        for _ in range(members):
            self.join()
        for bucket in range(bucket_count):
            self._start(bucket)
        self.tell_all()

    def clock(self) -> int:
        return self.now

    # -- the ring

    def table(self) -> wire.Table:
        members = list(self.members)
        numbers = {m: i for i, m in enumerate(members)}
        return wire.Table(
            "sim",
            self.revision,
            self.bucket_count,
            members,
            [(f"tcp://{m}:1",) for m in members],
            [numbers[o] if o is not None else -1 for o in self.owners],
            list(self.generations),
        )

    def tell_all(self) -> None:
        """Every member learns the ring as it is."""
        for member in self.members.values():
            member.table = self.table()

    def join(self) -> Member:
        self._boots += 1
        member = Member(NodeId(f"n{self._boots}"), BootId(1))
        self.members[member] = SimMember(self, member)
        self.revision += 1
        return member

    def _start(self, bucket: int) -> None:
        """The bucket begins empty, somewhere."""
        owner = self.random.choice(list(self.members))
        self.owners[bucket] = owner
        self.members[owner].stores[bucket] = {}
        self.revision += 1
        self.note_all()

    def restart_lost(self) -> None:
        """Buckets without an owner begin anew, in the next generation."""
        for bucket, owner in enumerate(self.owners):
            if owner is None:
                self.generations[bucket] += 1
                self._start(bucket)

    def move(self, bucket: int, to: Member) -> None:
        owner = self.owners[bucket]
        if owner is None or owner == to:
            return
        self.members[owner].moving.discard(bucket)
        self.members[to].stores[bucket] = self.members[owner].stores.pop(bucket)
        self.owners[bucket] = to
        self.revision += 1

    def leave(self, member: Member) -> None:
        """In good order: its buckets go to others first."""
        others = [m for m in self.members if m != member]
        for bucket, owner in enumerate(self.owners):
            if owner == member:
                self.move(bucket, self.random.choice(others))
        self._gone(member)

    def crash(self, member: Member) -> None:
        for bucket, owner in enumerate(self.owners):
            if owner == member:
                self.owners[bucket] = None
        self._gone(member)
        self.note_all()

    def _gone(self, member: Member) -> None:
        del self.members[member]
        self.revision += 1

    # -- what is true

    def value(self, key: bytes) -> bytes | None:
        bucket = ring.bucket_of(key, self.bucket_count)
        owner = self.owners[bucket]
        return None if owner is None else self.members[owner].stores[bucket].get(key)

    def watch(self, keys: Iterable[bytes]) -> None:
        """Collect in ``seen`` what these keys contain from now on."""
        self.seen = {key: {self.value(key)} for key in keys}

    def note(self, key: bytes) -> None:
        if key in self.seen:
            self.seen[key].add(self.value(key))

    def note_all(self) -> None:
        for key in self.seen:
            self.note(key)

    # -- running operations

    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation's effects. Raises what it raises."""
        result: Any = None
        self.effects = 0
        self.unanswered.clear()
        try:
            while True:
                effect = operation.send(result)
                self.effects += 1
                assert self.effects < EFFECTS_MAX, "an operation without end"
                self._mishaps()
                if isinstance(effect, Exchange):
                    result = self.exchange(effect)
                elif isinstance(effect, Pause):
                    assert effect.duration_ns > 0
                    self.now += effect.duration_ns
                    result = None
                else:
                    result = [SEED_ENDPOINT]
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            self._deliver_late()

    def exchange(self, effect: Exchange) -> list[Answer]:
        there = self.now + self.random.randrange(MILLISECOND_NS)
        self.now = max(self.now, min(there, effect.deadline_ns))
        answers = [self._send(request, effect.deadline_ns) for request in effect.requests]
        if any(isinstance(a, Lost) and a.deadline for a in answers):
            self.now = max(self.now, effect.deadline_ns)
        return answers

    def _send(self, request: Request, deadline_ns: int) -> Answer:
        if self.now >= deadline_ns:
            return Lost("no answer", deadline=True)
        member = self._member_of(request.to)
        trouble, chance = self.trouble, self.random.random
        if not request.id:
            request.id, self.next_request = self.next_request, self.next_request + 1
        if member is None or chance() < trouble.refused:
            return Lost("no connection")
        request.sent = True
        keys = member.written_by(request)
        answer = self._through(member, request, trouble)
        if isinstance(answer, Lost):
            self.unanswered.update(keys)
        return answer

    def _through(self, member: SimMember, request: Request, trouble: Trouble) -> Answer:
        chance = self.random.random
        if chance() < trouble.lost:
            return Lost("connection lost")
        if chance() < trouble.late:
            self.late.append((member.member, request))
            return Lost("connection lost")
        if chance() < trouble.silence:
            if chance() < 0.5:
                member.handle(request)
            return Lost("no answer", deadline=True)
        reply = member.handle(request)
        if chance() < trouble.twice:
            reply = member.handle(request)
        return Lost("connection lost") if chance() < trouble.answer_lost else reply

    def _member_of(self, peer: Peer) -> SimMember | None:
        if isinstance(peer, str):
            return self.random.choice(list(self.members.values()))
        return self.members.get(peer)

    def _deliver_late(self) -> None:
        for to, request in self.late:
            if to in self.members:
                self.members[to].handle(request)
        self.late.clear()

    def _mishaps(self) -> None:
        random, trouble = self.random, self.trouble
        chance = random.random
        if chance() < trouble.ring:
            self._change_ring()
        if chance() < trouble.crash and len(self.members) > 1:
            self.crash(random.choice(list(self.members)))
        if chance() < trouble.stall:
            member = random.choice(list(self.members.values()))
            member.stalled = not member.stalled
        if chance() < trouble.forget:
            random.choice(list(self.members.values())).forget()
        if self.late and chance() < 0.3:
            self._deliver_late()
        for member in self.members.values():
            if chance() < 0.5:
                member.table = self.table()

    def _change_ring(self) -> None:
        random = self.random
        for member in list(self.members.values()):
            for bucket in list(member.moving):
                if random.random() < 0.3:
                    self.move(bucket, random.choice(list(self.members)))
                    member.moving.discard(bucket)
        choice = random.randrange(6)
        bucket = random.randrange(self.bucket_count)
        owner = self.owners[bucket]
        if choice == 0 and owner is not None:
            self.members[owner].moving.add(bucket)
        elif choice in (1, 2):
            self.move(bucket, random.choice(list(self.members)))
        elif choice == 3:
            self.restart_lost()
        elif choice == 4 and len(self.members) < 5:
            self.join()
        elif choice == 5 and len(self.members) > 1:
            self.leave(random.choice(list(self.members)))

    def calm(self) -> None:
        """No more mishaps; everything that is owned is served."""
        self.trouble = Trouble()
        self.restart_lost()
        for member in self.members.values():
            member.moving.clear()
            member.stalled = False
        self.tell_all()
