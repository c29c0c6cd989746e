"""What a node does with a request. Knows no transport: decoded request in, body and views out.

ZeroMQ, in-process callers and (later) the data connection share it. Everything runs to its end in
one call on the node's event loop, so no handler ever sees another's half-done work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from p2pkv import ring, wire
from p2pkv.checksums import checksums_of
from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.journal import Journal, Outcome
from p2pkv.neighbours import Neighbours, Place
from p2pkv.objects import Object, Pin, State
from p2pkv.parts import Parts
from p2pkv.payload import Payload
from p2pkv.quarantine import Quarantine
from p2pkv.replicated import OpKind
from p2pkv.sessions import ALLOCS_MAX, TOKENS_MAX, Deferred, Response, Session, Sessions
from p2pkv.store import Store
from p2pkv.types import Member
from p2pkv.wire import Checksums, Fault, Kind, Status

Frames = Sequence[wire.Buffer]

LOCATE_MIN = 8 << 10
"""Smaller values are sent along even to those who have mapped the arena."""

_MISS = bytes([Status.MISS])


class Handlers:
    """The operations of a node on its store.

    ``may_serve(now)`` is the self-fence rule, asked at every request. ``arriving`` says which
    values are compared with their checksums before they are kept. ``extra`` answers the kinds that
    concern the node as a whole. An answer that other nodes have a say in is a ``Deferred``.
    ``view_quota_bytes``: what one client may look at in the arena (0: a quarter of it).
    """

    def __init__(
        self,
        member: Member,
        journal: Journal,
        limits: Limits,
        bucket_count: int,
        may_serve: Callable[[int], bool],
        extra: Mapping[Kind, Callable[[Session, Any, Frames, int], Response | Deferred]],
        arriving: Checksums = Checksums.NONE,
        view_quota_bytes: int = 0,
        quarantine_ns: int = 30 * SECOND_NS,
    ) -> None:
        self.member = member
        self.journal = journal
        self.replicas = journal.replicas
        self.store: Store = journal.store
        self.sessions: Sessions = journal.sessions
        self.limits = limits
        self.bucket_count = bucket_count
        self.may_serve = may_serve
        self.neighbours = Neighbours(self.store.arena.view)
        self.primary = self.replicas.served
        self.view_quota_bytes = view_quota_bytes or self.store.arena.size // 4
        self.quarantine = Quarantine(self.store, quarantine_ns)
        self.held_total = 0
        """Values that were located for clients on other hosts."""
        self.remote_total = 0
        """Values for which clients on other hosts were given room."""
        self.requests: dict[int, int] = {}
        self.arriving = arriving
        self.corrupt_arrivals = 0
        """Values that did not arrive as they were sent."""
        self.refused = 0
        self._kinds: dict[int, Callable[[Session, Any, Frames, int], Response | Deferred]] = {
            Kind.GET: self._get,
            Kind.PUT: self._put,
            Kind.EXISTS: self._exists,
            Kind.MATCH: self._match,
            Kind.DELETE: self._delete,
            Kind.ALLOC: self._alloc,
            Kind.WRITE: self._write,
            Kind.COMMIT: self._commit,
            Kind.ABORT: self._abort,
            Kind.OPEN: self._open,
            Kind.READ: self._read,
            Kind.RELEASE: self._release,
            Kind.SCAN: self._scan,
            Kind.DELETE_RANGE: self._delete_range,
            Kind.PIN: self._pin,
            Kind.UNPIN: self._unpin,
            Kind.EXPIRE: self._expire,
            Kind.REPLICATE: self._replicate,
            Kind.CHECK: self._check,
            Kind.PING: lambda *_: (Kind.PONG, wire.Empty(), ()),
        }
        self.answer_also(extra)

    def answer_also(
        self, extra: Mapping[Kind, Callable[[Session, Any, Frames, int], Response | Deferred]]
    ) -> None:
        """Let others answer these kinds of requests."""
        for kind, handler in extra.items():
            self._kinds[kind] = handler

    def handle(
        self, session: Session, kind: int, request: int, body: Any, frames: Frames, now: int
    ) -> Response | Deferred:
        """Answer one request. A repeated write gets the answer of its first time."""
        session.last_seen = now
        handler = self._kinds.get(kind)
        if handler is None:
            return self.refuse(Fault.BAD_REQUEST, f"{Kind(kind).name} is not a request")
        self.requests[kind] = self.requests.get(kind, 0) + 1
        mutating = kind in wire.MUTATING
        if mutating:
            known = session.answers.get(request)
            if known is not None:
                return known
            if 0 < request <= session.forgotten:
                return self.refuse(Fault.FORGOTTEN, "the answer of this write is no longer kept")
        try:
            answer = handler(session, body, frames, now)
        except ProtocolError as e:
            return self.refuse(Fault.BAD_REQUEST, str(e))
        if mutating:
            session.remember(request, answer)
        return answer

    def refuse(self, fault: Fault, message: str) -> Response:
        self.refused += 1
        return Kind.ERROR, wire.Error(fault, message[:1024]), ()

    # -- who may be served

    def _admit(self, keys: Sequence[bytes], now: int) -> tuple[list[int], bytes]:
        """Buckets of the keys, and a status for each that may not be served (empty: all may)."""
        limits = self.limits
        if len(keys) > limits.batch_keys_max:
            raise ProtocolError(f"{len(keys)} keys, limit batch_keys_max = {limits.batch_keys_max}")
        if limits.key_bytes_max < wire.KEY_BYTES_MAX and keys:
            longest = max(map(len, keys))
            if longest > limits.key_bytes_max:
                raise ProtocolError(f"a key of {longest} bytes, limit {limits.key_bytes_max}")
        buckets = ring.buckets_of(keys, self.bucket_count)
        if self._all_readable(now) and self.primary.issuperset(buckets):
            return buckets, b""
        statuses = bytes([self._bucket_status(b, now) for b in buckets])
        return buckets, statuses if any(statuses) else b""

    def _all_readable(self, now: int) -> bool:
        """Whether whatever this node is primary of may be read, fence and grants considered."""
        replicas = self.replicas
        granted = now < replicas.reads_until or now < replicas.read_limit(now)
        return granted and self.may_serve(now)

    def _bucket_status(self, bucket: int, now: int) -> Status:
        """A node that is fenced still serves what living copies let it serve: then nobody starts
        the bucket anew."""
        replicas = self.replicas
        status = replicas.status(bucket, now)
        if not status and not self.may_serve(now) and not replicas.has_rivals(bucket):
            return Status.STALLED
        return status

    def _each(
        self,
        keys: Sequence[bytes],
        now: int,
        run: Callable[[list[int], Sequence[int], Sequence[bytes]], Sequence[int]],
    ) -> tuple[int, Any, Sequence[Any]]:
        """Statuses of ``run(items, buckets, keys)`` for the keys that may be served."""
        buckets, refused = self._admit(keys, now)
        if not refused:
            statuses = run(list(range(len(keys))), buckets, keys)
            return _statuses(statuses)
        items = [i for i, status in enumerate(refused) if not status]
        merged = bytearray(refused)
        done = run(items, [buckets[i] for i in items], [keys[i] for i in items])
        for i, status in zip(items, done, strict=True):
            merged[i] = status
        return _statuses(merged)

    # -- reading

    def _get(self, session: Session, body: wire.Get, frames: Frames, now: int) -> Response:
        starts, lengths = len(body.starts), len(body.lengths)
        if starts != lengths or starts not in (0, len(body.keys)):
            raise ProtocolError(f"{starts} starts, {lengths} lengths for {len(body.keys)} keys")
        if len(body.keys) == 1 and not (starts or body.tell_once):
            response = self._get_small(body.keys[0], body.checksums, now)
            if response is not None:
                return response
        buckets, refused = self._admit(body.keys, now)
        if refused and body.any_copy:
            found, left = self._any_copies(buckets, body.keys, refused, now)
            return self._values(session, found, left, body, now)
        if not refused:
            found = self.store.get_batch(buckets, body.keys, now)
            return self._values(session, found, b"", body, now)
        items = [i for i, status in enumerate(refused) if not status]
        found = [None] * len(body.keys)
        hits = self.store.get_batch([buckets[i] for i in items], [body.keys[i] for i in items], now)
        for i, item in zip(items, hits, strict=True):
            found[i] = item
        return self._values(session, found, refused, body, now)

    def _any_copies(
        self, buckets: Sequence[int], keys: Sequence[bytes], refused: bytes, now: int
    ) -> tuple[list[Object | None], bytes]:
        """What is here, as primary or as backup; a copy of what is written once cannot be old."""
        found: list[Object | None] = []
        statuses = bytearray(refused)
        for i, (bucket, key) in enumerate(zip(buckets, keys, strict=True)):
            item = self.store.find(bucket, key, now)
            if statuses[i]:
                if item is not None and item.options.write_once:
                    statuses[i] = Status.OK
                else:
                    item = None
            found.append(item)
        for item in found:
            if item is not None:
                self.store.use(item)
        return found, bytes(statuses) if any(statuses) else b""

    def _get_small(self, key: bytes, checksums: int, now: int) -> Response | None:
        """The value of one key, copied, where that is all there is to it; else None."""
        bucket = ring.bucket_of(key, self.bucket_count)
        if bucket not in self.primary or not self._all_readable(now):
            return None
        item = self.store.find(bucket, key, now)
        if item is None or not 0 < item.size < LOCATE_MIN:
            return None
        self.store.use(item)
        sums = [item.checksum or 0] if checksums else []
        values = wire.Values(b"", [item.size], [], checksums=sums)
        return Kind.VALUES, values, (bytes(self.store.value(item)),)

    def _values(
        self,
        session: Session,
        found: Sequence[Object | None],
        refused: bytes,
        body: wire.Get,
        now: int,
    ) -> Response:
        if body.starts:
            return self._ranges(session, found, body, refused, now)
        if body.locate and any(i is not None and i.size >= LOCATE_MIN for i in found):
            return self._located(session, found, body, refused, now)
        payload = Payload(self.store, session.packing, self.limits.message_bytes_max)
        there = [item for item in found if item is not None]
        bound = self.limits.message_bytes_max
        if len(there) == len(found) and sum([item.size for item in there]) <= bound:
            payload.add_all(there)
            sizes = [item.size for item in there]
            once = self._once(there) if body.tell_once else b""
            starts = [] if payload.packed else payload.starts
            sums = _sums_of(there) if body.checksums else []
            values = wire.Values(b"", sizes, starts, once, checksums=sums)
            return Kind.VALUES, values, payload.finish()
        statuses = self._statuses_within(found, refused, bound)
        sent = [item if not s else None for item, s in zip(found, statuses, strict=True)]
        payload.add_all([item for item in sent if item is not None])
        starts = [] if payload.packed else _with_gaps(payload.starts, sent)
        sizes = [0 if item is None else item.size for item in sent]
        once = self._once(sent) if body.tell_once else b""
        sums = _sums_of(sent) if body.checksums else []
        values = wire.Values(bytes(statuses), sizes, starts, once, checksums=sums)
        return Kind.VALUES, values, payload.finish()

    def _hold(
        self,
        session: Session,
        found: Sequence[Object | None],
        offsets: Sequence[int],
        now: int,
    ) -> int:
        """A token for the values whose offset is told."""
        items = [o for o, at in zip(found, offsets, strict=True) if o is not None and at]
        self.held_total += len(items)
        return self.sessions.hold(session, items, now) if items else 0

    def _located(
        self,
        session: Session,
        found: Sequence[Object | None],
        body: wire.Get,
        refused: bytes,
        now: int,
    ) -> Response:
        """As ``_values``, with the places of large values instead of their bytes."""
        small = [i if i is None or i.size < LOCATE_MIN else None for i in found]
        statuses = self._statuses_within(small, refused, self.limits.message_bytes_max)
        offsets, versions = [0] * len(found), [0] * len(found)
        for i, item in enumerate(found):
            if item is not None and item.size >= LOCATE_MIN:
                statuses[i] = Status.OK
                offsets[i], versions[i] = item.offset, item.version
        sent = [i if not s else None for i, s in zip(small, statuses, strict=True)]
        payload = Payload(self.store, session.packing, self.limits.message_bytes_max)
        payload.add_all([item for item in sent if item is not None])
        starts = [] if payload.packed else _with_gaps(payload.starts, sent)
        kept = [i if not s else None for i, s in zip(found, statuses, strict=True)]
        sizes = [0 if item is None else item.size for item in kept]
        once = self._once(kept) if body.tell_once else b""
        status = bytes(statuses) if any(statuses) else b""
        all_told = body.hold or body.checksums == Checksums.ALL  # hold: they cross the network
        sums = _sums_of(kept if all_told else sent) if body.checksums else []
        token = self._hold(session, found, offsets, now) if body.hold else 0
        values = wire.Values(
            status, sizes, starts, once, offsets, versions, checksums=sums, token=token
        )
        return Kind.VALUES, values, payload.finish()

    def _ranges(
        self,
        session: Session,
        found: Sequence[Object | None],
        body: wire.Get,
        refused: bytes,
        now: int,
    ) -> Response:
        """As ``_values`` and ``_located``, with a part of each value."""
        bound = self.limits.message_bytes_max
        payload = Payload(self.store, session.packing, bound)
        statuses = bytearray(refused or bytes(len(found)))
        zeros = [0] * len(found)
        sizes, offsets, versions, totals = zeros, zeros.copy(), zeros.copy(), zeros.copy()
        sent = 0
        for i, (item, start, length) in enumerate(
            zip(found, body.starts, body.lengths, strict=True)
        ):
            if item is None:
                statuses[i] = statuses[i] or Status.MISS
                continue
            totals[i] = item.size
            size = item.size - start if length < 0 else length
            if size < 0 or start + size > item.size:
                statuses[i] = Status.RANGE
            elif body.locate and size >= LOCATE_MIN:
                sizes[i], offsets[i], versions[i] = size, item.offset, item.version
            elif size > bound:
                statuses[i] = Status.LARGE
            elif sent + size > bound:
                statuses[i] = Status.DEFERRED
            else:
                payload.add_part(item, start, size)
                sizes[i] = size
                sent += size
        token = self._hold(session, found, offsets, now) if body.hold else 0
        if not any(offsets):
            offsets, versions = [], []
        status = bytes(statuses) if any(statuses) else b""
        values = wire.Values(status, sizes, [], b"", offsets, versions, totals, token=token)
        return Kind.VALUES, values, payload.finish()

    def _statuses_within(
        self, found: Sequence[Object | None], refused: bytes, bound: int
    ) -> bytearray:
        """Status of each value where some are missing or not all fit into one message."""
        statuses = bytearray(refused or bytes(len(found)))
        total = 0
        for i, item in enumerate(found):
            if statuses[i]:
                continue
            if item is None:
                statuses[i] = Status.MISS
            elif item.size > bound:
                statuses[i] = Status.LARGE
            elif total + item.size > bound:
                statuses[i] = Status.DEFERRED
            else:
                total += item.size
        return statuses

    @staticmethod
    def _once(items: Sequence[Object | None]) -> bytes:
        return bytes([item is not None and item.options.write_once for item in items])

    def _exists(self, session: Session, body: wire.Exists, frames: Frames, now: int) -> Response:
        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            if body.touch:
                there = [i is not None for i in self.store.get_batch(buckets, keys, now)]
            else:
                there = self.store.exists_batch(buckets, keys, now)
            return bytes(there).translate(_THERE)

        return self._each(body.keys, now, run)

    def _match(self, session: Session, body: wire.Match, frames: Frames, now: int) -> Response:
        buckets, refused = self._admit(body.keys, now)
        end = len(body.keys)
        if refused:
            end = len(refused) - len(refused.lstrip(b"\0"))
        count = self.store.match(buckets[:end], body.keys[:end], now)
        status = Status.MISS if count < end or not refused else refused[end]
        return Kind.MATCHED, wire.Matched(count, status), ()

    def _view(self, session: Session, body: wire.Open, now: int) -> Response:
        """Values that a client on this host looks at in the arena, until it releases them, or its
        connection is gone. Where memory is not shared it gets them sent."""
        shared = session.shared
        if shared is None:
            return self._get(session, wire.Get(body.keys), (), now)
        count = len(body.keys)
        tokens, sizes, offsets = [0] * count, [0] * count, [0] * count
        room = self.view_quota_bytes - sum(
            [o.extent_bytes for o in shared.values() if o.state is not State.ALLOCATED]
        )

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            nonlocal room
            found = self.store.get_batch(buckets, keys, now)
            statuses = bytearray()
            viewed: list[tuple[int, Object]] = []
            for i, item in zip(items, found, strict=True):
                fits = item is not None and item.extent_bytes <= room and len(shared) < TOKENS_MAX
                if item is not None and fits:
                    room -= item.extent_bytes
                    viewed.append((i, item))
                statuses.append(
                    Status.MISS if item is None else Status.OK if fits else Status.QUOTA
                )
            self.store.acquire_batch([item for _, item in viewed])
            for (i, item), id in zip(viewed, self.sessions.numbers(len(viewed)), strict=True):
                shared[id] = item
                tokens[i], sizes[i], offsets[i] = id, item.size, item.offset
            return statuses

        _, answer, _ = self._each(body.keys, now, run)
        return Kind.OPENED, wire.Opened(answer.statuses, tokens, sizes, offsets=offsets), ()

    def _open(self, session: Session, body: wire.Open, frames: Frames, now: int) -> Response:
        if body.view:
            return self._view(session, body, now)
        if len(session.tokens) + len(body.keys) > TOKENS_MAX:
            raise ProtocolError(f"more than {TOKENS_MAX} open objects in one session")
        ids, sizes, sums = [0] * len(body.keys), [0] * len(body.keys), [0] * len(body.keys)

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            found = self.store.get_batch(buckets, keys, now)
            there = [(i, o) for i, o in zip(items, found, strict=True) if o is not None]
            opened = self.sessions.open(session, [o for _, o in there], now)
            for (i, item), id in zip(there, opened, strict=True):
                ids[i], sizes[i], sums[i] = id, item.size, item.checksum or 0
            return [Status.OK if o is not None else Status.MISS for o in found]

        _, statuses, _ = self._each(body.keys, now, run)
        return Kind.OPENED, wire.Opened(statuses.statuses, ids, sizes, sums), ()

    def _read(self, session: Session, body: wire.Read, frames: Frames, now: int) -> Response:
        token = self.sessions.touch_token(session, body.token, now)
        if token is None:
            return Kind.VALUES, wire.Values(bytes([Status.CONFLICT]), [0], []), ()
        if body.length > self.limits.message_bytes_max:
            raise ProtocolError(f"a read of {body.length} bytes, limit message_bytes_max")
        if body.offset + body.length > token.item.size:
            raise ProtocolError(f"a read behind the end of a value of {token.item.size} bytes")
        payload = Payload(self.store, session.packing, self.limits.message_bytes_max)
        payload.add_part(token.item, body.offset, body.length)
        return Kind.VALUES, wire.Values(b"", [body.length], []), payload.finish()

    def _release(self, session: Session, body: wire.Release, frames: Frames, now: int) -> Response:
        if session.shared:
            views = [id for id in body.tokens if self._is_view(session.shared.get(id))]
            if views:
                self.unshare(session.shared, views)
                return _statuses(())
        return _statuses(self.sessions.release(session, body.tokens))

    @staticmethod
    def _is_view(item: Object | None) -> bool:
        return item is not None and item.state is not State.ALLOCATED

    # -- writing

    def _change(
        self,
        keys: Sequence[bytes],
        now: int,
        act: Callable[[Sequence[int], Sequence[bytes], Sequence[int], Outcome], None],
        required: int = 1,
    ) -> Response | Deferred:
        """``act(buckets, keys, at, outcome)`` for the keys that may be written; the statuses."""
        buckets, refused = self._admit(keys, now)
        outcome = Outcome(len(keys), _told, required)
        if not refused:
            act(buckets, keys, range(len(keys)), outcome)
        else:
            outcome.statuses[:] = refused
            at = [i for i, status in enumerate(refused) if not status]
            act([buckets[i] for i in at], [keys[i] for i in at], at, outcome)
        result: Response | Deferred = outcome.result
        return result

    def _put(
        self, session: Session, body: wire.Put, frames: Frames, now: int
    ) -> Response | Deferred:
        values = self._values_of(body, frames)
        sums = body.checksums
        corrupt: set[int] = set()
        if sums and self.arriving:
            real = checksums_of(values)
            corrupt = {i for i, (a, b) in enumerate(zip(sums, real, strict=True)) if a and a != b}
            self.corrupt_arrivals += len(corrupt)

        def put(
            buckets: Sequence[int], keys: Sequence[bytes], at: Sequence[int], outcome: Outcome
        ) -> None:
            if corrupt:
                for i in corrupt.intersection(at):
                    outcome.set(i, Status.CORRUPT)
                good = [n for n, i in enumerate(at) if i not in corrupt]
                buckets, keys = [buckets[n] for n in good], [keys[n] for n in good]
                at = [at[n] for n in good]
            chosen = values if len(at) == len(values) else [values[i] for i in at]
            chosen_sums = [sums[i] for i in at] if sums else None
            if self.replicas.shared.isdisjoint(buckets):
                statuses = self.store.put_batch(
                    buckets, keys, chosen, body.options, now, checksums=chosen_sums
                )
                for i, status in zip(at, statuses, strict=True):
                    outcome.set(i, status, 0 if status else 1)
                return
            sizes = [body.sizes[i] for i in at]
            made = self.store.allocate_batch(buckets, keys, sizes, body.options, now)
            for item, value in zip(made, chosen, strict=True):
                if isinstance(item, Object):
                    self.store.write(item.offset, value)
            _note_sums(made, chosen_sums or ())
            self.put_made(made, buckets, at, outcome, now)

        return self._change(body.keys, now, put, body.options.min_replicas)

    def put_made(
        self,
        made: Sequence[Object | Status],
        buckets: Sequence[int],
        at: Sequence[int],
        outcome: Outcome,
        now: int,
    ) -> None:
        """Commit what was allocated and filled, as far as this node may still serve it."""
        items = [item for item in made if isinstance(item, Object)]
        served = self.primary.issuperset([item.bucket for item in items])
        if len(items) == len(made) and served and self._all_readable(now):
            self.journal.put(items, at, outcome, now)
            return
        ready: list[Object] = []
        places: list[int] = []
        refused: list[Object] = []
        for i, item, bucket in zip(at, made, buckets, strict=True):
            status = item if not isinstance(item, Object) else self._may_commit(item, True, now)
            if isinstance(item, Object) and not status:
                ready.append(item)
                places.append(i)
            elif isinstance(item, Object):
                outcome.statuses[i] = status
                refused.append(item)
            else:
                outcome.set(i, item, 0 if item else self.journal.copies_of(bucket))
        self.store.abort_batch(refused)
        self.journal.put(ready, places, outcome, now)

    def _values_of(self, body: wire.Put, frames: Frames) -> list[Parts]:
        if len(body.sizes) != len(body.keys):
            raise ProtocolError(f"{len(body.sizes)} values for {len(body.keys)} keys")
        _check_sums(body.checksums, len(body.keys))
        values = wire.gathered(frames, body.sizes)
        self._check_sizes(body.sizes)
        return values

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        bound = self.limits.value_bytes_max
        if sizes and max(sizes) > bound:
            raise ProtocolError(f"a value of {max(sizes)} bytes, limit value_bytes_max = {bound}")

    def begin_put(
        self, session: Session, request: int, body: wire.Put, size: int, now: int
    ) -> Filling | None:
        """A put whose ``size`` payload bytes have yet to come: where they go in the arena.

        None: they are to be received elsewhere and given to ``handle``, because the request is a
        repeat or a refused one, or so large that it must evict its own beginning.
        """
        session.last_seen = now
        if (
            request in session.answers
            or 0 < request <= session.forgotten
            or len(body.sizes) != len(body.keys)
            or sum(body.sizes) != size
            or len(body.checksums) not in (0, len(body.keys))
            or size > self.store.arena.size // 4
        ):
            return None
        try:
            self._check_sizes(body.sizes)
            buckets, refused = self._admit(body.keys, now)
        except ProtocolError:
            return None
        if refused:
            return None
        self.requests[Kind.PUT] = self.requests.get(Kind.PUT, 0) + 1
        made = self.store.allocate_batch(buckets, body.keys, body.sizes, body.options, now)
        return Filling(self, session, request, body, buckets, made)

    def finish_put(
        self,
        body: wire.Put,
        buckets: Sequence[int],
        made: Sequence[Object | Status],
        now: int,
    ) -> Response | Deferred:
        """The answer of a put whose bytes have arrived."""
        _note_sums(made, body.checksums)
        corrupt = self.corrupt_among(made, Checksums.SENT)
        made = [Status.CORRUPT if item in corrupt else item for item in made]
        outcome = Outcome(len(made), _told, body.options.min_replicas)
        self.put_made(made, buckets, range(len(made)), outcome, now)
        result: Response | Deferred = outcome.result
        return result

    def corrupt_among(
        self, made: Sequence[Object | Status | None], least: Checksums
    ) -> set[Object | Status | None]:
        """Those whose bytes in the arena are not as sent, if the policy is at least ``least``.

        Their allocations end here.
        """
        if self.arriving < least:
            return set()
        summed = [item for item in made if isinstance(item, Object) and item.checksum]
        corrupt = self.store.differing(summed, [item.checksum for item in summed])
        self.store.abort_batch(corrupt)
        self.corrupt_arrivals += len(corrupt)
        return set(corrupt)

    def _delete(
        self, session: Session, body: wire.Delete, frames: Frames, now: int
    ) -> Response | Deferred:
        return self._change(
            body.keys,
            now,
            lambda buckets, keys, at, outcome: self.journal.delete(buckets, keys, at, outcome, now),
        )

    def _alloc(self, session: Session, body: wire.Alloc, frames: Frames, now: int) -> Response:
        if len(body.sizes) != len(body.keys):
            raise ProtocolError(f"{len(body.sizes)} sizes for {len(body.keys)} keys")
        if len(session.allocations) + len(body.keys) > ALLOCS_MAX:
            raise ProtocolError(f"more than {ALLOCS_MAX} allocations in one session")
        self._check_sizes(body.sizes)
        if body.shared and session.shared is None:
            raise ProtocolError("memory is shared over data connections only")
        if body.remote and not body.shared:
            raise ProtocolError("an allocation for a remote writer must be shared")
        if body.remote and self.quarantine.full:
            return self.refuse(Fault.NOT_READY, "too much memory is in quarantine")
        ids, offsets = [0] * len(body.keys), [0] * len(body.keys)

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            sizes = [body.sizes[i] for i in items]
            results = self.store.allocate_batch(buckets, keys, sizes, body.options, now)
            made = [(i, o) for i, o in zip(items, results, strict=True) if isinstance(o, Object)]
            new = self.sessions.allocate(session, [o for _, o in made], now)
            for (i, item), id in zip(made, new, strict=True):
                ids[i], offsets[i] = id, item.offset
            if body.shared:
                self._share(session, dict(zip(new, [o for _, o in made], strict=True)))
            if body.remote:
                self.quarantine.remote.update(new)
                self.remote_total += len(new)
            return [Status.OK if isinstance(r, Object) else r for r in results]

        _, statuses, _ = self._each(body.keys, now, run)
        return Kind.ALLOCATED, wire.Allocated(statuses.statuses, ids, offsets), ()

    def _share(self, session: Session, items: dict[int, Object]) -> None:
        """Hold the extents for as long as the client may write to them."""
        assert session.shared is not None
        self.store.acquire_batch(list(items.values()))
        session.shared.update(items)

    def unshare(self, shared: dict[int, Object], ids: Iterable[int]) -> None:
        """The client writes to these no more."""
        ids = [id for id in ids if id in shared]
        self.quarantine.remote.difference_update(ids)
        if ids:
            self.store.release_batch([shared.pop(id) for id in ids])

    def unshare_late(self, shared: dict[int, Object], ids: Iterable[int], proven: bool) -> None:
        """As ``unshare``, where writes from another host may still arrive."""
        late = [id for id in ids if id in shared and id in self.quarantine.remote]
        self.quarantine.remote.difference_update(late)
        if late:
            self.quarantine.add([shared.pop(id) for id in late], proven)

    def unshare_all(self, shared: dict[int, Object], proven: bool = True) -> None:
        """Its connection is closed: what the client has not committed it never will.

        ``proven``: by the client's side.
        """
        self.store.abort_batch(list(shared.values()))
        self.unshare_late(shared, list(shared), proven)
        self.unshare(shared, list(shared))

    def _write(self, session: Session, body: wire.Write, frames: Frames, now: int) -> Response:
        allocation = self.sessions.touch_allocation(session, body.id, now)
        if allocation is None:
            return _statuses([Status.CONFLICT])
        item, at = allocation.item, body.offset
        length = sum(memoryview(frame).nbytes for frame in frames)
        if at + length > item.size:
            raise ProtocolError(f"bytes {at} to {at + length} of a value of {item.size}")
        if length:
            allocation.wrote(at, at + length)
        for frame in frames:
            self.store.arena.write(item.offset + at, frame)
            at += memoryview(frame).nbytes
        return _statuses(())

    def _commit(
        self, session: Session, body: wire.Commit, frames: Frames, now: int
    ) -> Response | Deferred:
        _check_sums(body.checksums, len(body.ids))
        outcome = Outcome(len(body.ids), _told)
        ready: list[int] = []
        items: list[Object] = []
        for i, id in enumerate(body.ids):
            allocation = session.allocations.pop(id, None)
            if allocation is None:
                outcome.statuses[i] = Status.CONFLICT
                continue
            complete = allocation.complete or (body.filled and id in (session.shared or ()))
            status = self._may_commit(allocation.item, complete, now)
            if status:
                outcome.statuses[i] = status
                self.store.abort_batch([allocation.item])
            else:
                ready.append(i)
                items.append(allocation.item)
                outcome.required = max(outcome.required, allocation.item.options.min_replicas)
        _note_sums(items, [body.checksums[i] for i in ready] if body.checksums else ())
        in_place = body.filled and self.quarantine.remote.isdisjoint(body.ids)
        corrupt = self.corrupt_among(items, Checksums.ALL if in_place else Checksums.SENT)
        if corrupt:
            for i, item in zip(ready, items, strict=True):
                if item in corrupt:
                    outcome.set(i, Status.CORRUPT)
            ready = [i for i, item in zip(ready, items, strict=True) if item not in corrupt]
            items = [item for item in items if item not in corrupt]
        self.journal.put(items, ready, outcome, now)
        if session.shared:
            self.unshare(session.shared, body.ids)
        result: Response | Deferred = outcome.result
        return result

    def _may_commit(self, item: Object, complete: bool, now: int) -> Status:
        status = self._bucket_status(item.bucket, now)
        return status if status or complete else Status.INVALID

    def _abort(self, session: Session, body: wire.Abort, frames: Frames, now: int) -> Response:
        dropped = [session.allocations.pop(id, None) for id in body.ids]
        self.store.abort_batch([a.item for a in dropped if a is not None])
        if session.shared and body.late:
            self.unshare_late(session.shared, body.ids, proven=True)
        if session.shared:
            self.unshare(session.shared, body.ids)
        return _statuses([Status.CONFLICT if a is None else Status.OK for a in dropped])

    def _check(self, session: Session, body: wire.Check, frames: Frames, now: int) -> Response:
        offsets = [0] * len(body.keys)

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            found = [self.store.find(b, k, now) for b, k in zip(buckets, keys, strict=True)]
            statuses = self._statuses_of_first(found)
            there = [f for f, s in zip(found, statuses, strict=True) if f is not None and not s]
            corrupt = set(self.store.check_batch(list(dict.fromkeys(there))))
            for i, item in zip(items, found, strict=True):
                offsets[i] = 0 if item is None else item.offset
            return [
                Status.CORRUPT if item in corrupt else s
                for item, s in zip(found, statuses, strict=True)
            ]

        _, statuses, _ = self._each(body.keys, now, run)
        return Kind.CHECKED, wire.Checked(statuses.statuses, offsets), ()

    def _statuses_of_first(self, found: Sequence[Object | None]) -> list[Status]:
        """So much as one message may hold is looked at; the rest is to be asked for again."""
        statuses: list[Status] = []
        total = 0
        for item in found:
            if item is None:
                statuses.append(Status.MISS)
                continue
            too_much = total and total + item.size > self.limits.message_bytes_max
            statuses.append(Status.DEFERRED if too_much else Status.OK)
            total += 0 if too_much else item.size
        return statuses

    # -- ranges

    def _scan(self, session: Session, body: wire.Scan, frames: Frames, now: int) -> Response:
        keys: list[bytes] = []
        sizes: list[int] = []
        finished, after, limit = 0, body.after, min(body.limit, self.limits.scan_keys_max)
        status = Status.OK
        for bucket in body.buckets:
            status = self._bucket_status(bucket, now)
            if status or len(keys) >= limit:
                break
            page, more = self.store.scan(bucket, after, body.prefix, limit - len(keys), now)
            keys += [key for key, _ in page]
            sizes += [size for _, size in page]
            if more:
                break
            finished, after = finished + 1, b""
        return Kind.PAGE, wire.Page(keys, sizes, finished, status), ()

    def _delete_range(
        self, session: Session, body: wire.DeleteRange, frames: Frames, now: int
    ) -> Response | Deferred:
        count, finished, limit = 0, 0, min(body.limit, self.limits.scan_keys_max)
        status = Status.OK

        def told(outcome: Outcome) -> Response:
            ended = Status(outcome.statuses[0]) or status
            return Kind.DELETED, wire.Deleted(count, finished, ended), ()

        outcome = Outcome(1, told)
        for bucket in body.buckets:
            status = self._bucket_status(bucket, now)
            if status or count >= limit:
                break
            deleted, more, status = self.journal.delete_range(
                bucket, body.prefix, limit - count, outcome, now
            )
            count += deleted
            if more or status:
                break
            finished += 1
        result: Response | Deferred = outcome.result
        return result

    # -- pins and expiry

    def _pin(
        self, session: Session, body: wire.Pin, frames: Frames, now: int
    ) -> Response | Deferred:
        until = now + body.ttl_ms * MILLISECOND_NS

        def pin(item: Object) -> Status:
            return self.sessions.pins.pin(session.owner, item, until)

        return self._repin(session, body.keys, body.ttl_ms, now, pin)

    def _unpin(
        self, session: Session, body: wire.Unpin, frames: Frames, now: int
    ) -> Response | Deferred:
        def unpin(item: Object) -> Status:
            self.sessions.pins.unpin(session.owner, item.key)
            return self.store.set_pin(item, Pin.NONE)

        return self._repin(session, body.keys, 0, now, unpin)

    def _repin(
        self,
        session: Session,
        keys: Sequence[bytes],
        ttl_ms: int,
        now: int,
        act: Callable[[Object], Status],
    ) -> Response | Deferred:
        """Pin or unpin what is here, and tell the copies."""

        def repin(
            buckets: Sequence[int], keys: Sequence[bytes], at: Sequence[int], outcome: Outcome
        ) -> None:
            for i, bucket, key in zip(at, buckets, keys, strict=True):
                item = self.store.find(bucket, key, now)
                status = Status.MISS if item is None else act(item)
                outcome.statuses[i] = status
                if not status:
                    self.journal.pin(session.owner, bucket, key, ttl_ms, outcome, i)

        return self._change(keys, now, repin)

    def _expire(
        self, session: Session, body: wire.Expire, frames: Frames, now: int
    ) -> Response | Deferred:
        return self._change(
            body.keys,
            now,
            lambda buckets, keys, at, outcome: self.journal.expire(
                buckets, keys, body.ttl_ms, at, outcome, now
            ),
        )

    # -- operations of buckets whose primary is elsewhere

    def _replicate(
        self, session: Session, body: wire.Replicate, frames: Frames, now: int
    ) -> Response:
        arriving = Arriving(self, session, body, now)
        sizes = [len(view) for view in arriving.views]
        try:
            values = wire.gathered(frames, sizes)
        except ProtocolError:
            arriving.abort()
            raise
        for view, value in zip(arriving.views, values, strict=True):
            at = 0
            for part in value if isinstance(value, tuple) else (value,):
                view[at : at + len(part)] = part
                at += len(part)
        return arriving.finish(now)

    def begin_replicate(
        self, session: Session, body: wire.Replicate, size: int, now: int
    ) -> Arriving | None:
        """Operations whose values have yet to come: where they go in the arena."""
        session.last_seen = now
        try:
            if session.member is None or sum(_inline_sizes(body)) != size:
                return None
        except ProtocolError:
            return None
        self.requests[Kind.REPLICATE] = self.requests.get(Kind.REPLICATE, 0) + 1
        return Arriving(self, session, body, now)


class Filling:
    """A put whose bytes are arriving. ``views`` is where they go, in the order of the payload.

    Tokens keep the memory from being used for anything else until the bytes are there, even if
    the bucket leaves meanwhile.
    """

    __slots__ = (
        "_body", "_buckets", "_handlers", "_items", "_made", "_request", "_session", "views",
    )  # fmt: skip

    def __init__(
        self,
        handlers: Handlers,
        session: Session,
        request: int,
        body: wire.Put,
        buckets: Sequence[int],
        made: Sequence[Object | Status],
    ) -> None:
        self._handlers = handlers
        self._session = session
        self._request = request
        self._body = body
        self._buckets = buckets
        self._made = made
        self._items = [item for item in made if isinstance(item, Object)]
        handlers.store.acquire_batch(self._items)
        arena = handlers.store.arena.view
        self.views = [
            arena[item.offset : item.offset + size]
            if isinstance(item, Object)
            else memoryview(bytearray(size))
            for item, size in zip(made, body.sizes, strict=True)
        ]

    def finish(self, now: int) -> Response | Deferred:
        """All bytes are there."""
        self._session.last_seen = now
        known = self._session.answers.get(self._request)
        if known is not None:  # repeated on another connection, and run there meanwhile
            self.abort()
            return known
        self.views = []
        response = self._handlers.finish_put(self._body, self._buckets, self._made, now)
        self._handlers.store.release_batch(self._items)
        self._session.remember(self._request, response)
        return response

    def abort(self) -> None:
        """They will not come."""
        self.views = []
        self._handlers.store.abort_batch(self._items)
        self._handlers.store.release_batch(self._items)


class Arriving:
    """Operations from a primary whose values are arriving; as Filling."""

    __slots__ = ("_body", "_elsewhere", "_handlers", "_items", "_session", "_staged", "views")

    def __init__(
        self, handlers: Handlers, session: Session, body: wire.Replicate, now: int
    ) -> None:
        if session.member is None:
            raise ProtocolError("only nodes replicate")
        if sum(_inline_sizes(body)) > handlers.limits.message_bytes_max:
            raise ProtocolError("values over message_bytes_max")
        self._handlers = handlers
        self._session = session
        self._body = body
        ops = [op for prepare in body.prepares for op in prepare.ops]
        buckets = [prepare.bucket for prepare in body.prepares for _ in prepare.ops]
        self._staged = handlers.journal.stage(buckets, ops, now)
        self._items = [item for item in self._staged if item is not None]
        handlers.store.acquire_batch(self._items)
        arena = handlers.store.arena.view
        puts = [
            (op, item) for op, item in zip(ops, self._staged, strict=True) if op.kind == OpKind.PUT
        ]
        offsets = body.offsets or [0] * len(puts)
        self.views = [
            memoryview(bytearray(op.size))
            if item is None
            else arena[item.offset : item.offset + item.size]
            for (op, item), offset in zip(puts, offsets, strict=True)
            if not offset
        ]
        self._elsewhere = [
            Place(item, offset, version)
            for (_, item), offset, version in zip(puts, body.offsets, body.versions, strict=False)
            if offset and item is not None
        ]

    def finish(self, now: int) -> Response:
        """All bytes are there, or in the memory of the sender."""
        self.views = []
        handlers, member = self._handlers, self._session.member
        assert member is not None
        if self._elsewhere and not handlers.neighbours.pull(
            member, self._body.source, self._elsewhere
        ):
            self.abort()
            return handlers.refuse(Fault.NOT_READY, "values in another memory cannot be read")
        staged = iter(self._staged)
        values = [[next(staged) for _ in prepare.ops] for prepare in self._body.prepares]
        corrupt = handlers.corrupt_among(self._staged, Checksums.SENT)
        if corrupt:
            values = [[None if item in corrupt else item for item in some] for some in values]
        handlers.journal.give_up_unstaged(self._body.prepares, values)
        acks = handlers.replicas.take_prepares(member, self._body.prepares, values, now)
        handlers.store.release_batch(self._items)
        return Kind.REPLICATED, wire.Replicated(handlers.journal.tell_no_room(acks)), ()

    def abort(self) -> None:
        """They will not come."""
        self.views = []
        self._handlers.store.abort_batch(self._items)
        self._handlers.store.release_batch(self._items)


def _inline_sizes(body: wire.Replicate) -> list[int]:
    """Sizes of the values in the payload. Raises ProtocolError."""
    sizes = [op.size for p in body.prepares for op in p.ops if op.kind == OpKind.PUT]
    if not body.offsets:
        return sizes
    if not len(body.offsets) == len(body.versions) == len(sizes) or body.source is None:
        raise ProtocolError(f"{len(body.offsets)} places for {len(sizes)} values")
    return [size for size, offset in zip(sizes, body.offsets, strict=True) if not offset]


def _sums_of(items: Sequence[Object | None]) -> list[int]:
    return [0 if item is None else item.checksum or 0 for item in items]


def _check_sums(sums: Sequence[int], keys: int) -> None:
    if len(sums) not in (0, keys):
        raise ProtocolError(f"{len(sums)} checksums for {keys} keys")


def _note_sums(items: Sequence[Object | Status], sums: Sequence[int]) -> None:
    """Keep the checksums that came with values until these are visible."""
    for item, checksum in zip(items, sums, strict=True) if sums else ():
        if isinstance(item, Object):
            item.checksum = checksum


def _with_gaps(starts: Sequence[int], items: Sequence[Object | None]) -> list[int]:
    """Positions for all items; one without a value gets that of the value before."""
    positions = iter(starts)
    result, last = [], 0
    for item in items:
        last = last if item is None else next(positions)
        result.append(last)
    return result


_THERE = bytes([Status.MISS, Status.OK]) + bytes(range(2, 256))
"""Turns False and True into MISS and OK."""


def _told(outcome: Outcome) -> Response:
    """The answer to a write."""
    statuses, copies = outcome.statuses, outcome.copies
    several = any(n > 1 for n in copies)
    body = wire.Statuses(
        bytes(statuses) if any(statuses) else b"", bytes(copies) if several else b""
    )
    return Kind.STATUSES, body, ()


def _statuses(statuses: Sequence[int]) -> Response:
    return Kind.STATUSES, wire.Statuses(bytes(statuses) if any(statuses) else b""), ()
