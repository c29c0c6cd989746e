"""Requests that change what keys hold: puts, deletes, pins and expiry.

What a write does, and when it is done, is for the journal to say; here are the ways that writes
come, and the statuses that they get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from p2pkv import answers, wire
from p2pkv.admission import Admission
from p2pkv.answers import Frames, Handler
from p2pkv.arrivals import Arrivals, check_sums, note_sums
from p2pkv.clock import MILLISECOND_NS
from p2pkv.errors import ProtocolError
from p2pkv.journal import Journal, Outcome
from p2pkv.objects import Object, Pin
from p2pkv.parts import Parts
from p2pkv.sessions import Deferred, Response, Session
from p2pkv.store import Store
from p2pkv.wire import Checksums, Kind, Status


class Writing:
    """Puts that come whole, and changes by key or prefix."""

    def __init__(self, admission: Admission, arrivals: Arrivals, journal: Journal) -> None:
        self._admission = admission
        self._limits = admission.limits
        self._arrivals = arrivals
        self._journal = journal
        self._replicas = journal.replicas
        self._store: Store = journal.store
        self._sessions = journal.sessions

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The kinds of requests that change keys."""
        return {
            Kind.PUT: self._put,
            Kind.DELETE: self._delete,
            Kind.DELETE_RANGE: self._delete_range,
            Kind.PIN: self._pin,
            Kind.UNPIN: self._unpin,
            Kind.EXPIRE: self._expire,
        }

    def _change(
        self,
        keys: Sequence[bytes],
        now: int,
        act: Callable[[Sequence[int], Sequence[bytes], Sequence[int], Outcome], None],
        required: int = 1,
    ) -> Response | Deferred:
        """``act(buckets, keys, at, outcome)`` for the keys that may be written; the statuses."""
        buckets, refused = self._admission.admit(keys, now)
        outcome = Outcome(len(keys), answers.told, required)
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
        corrupt = self._arrivals.corrupt_of(values, sums)

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
            if self._replicas.shared.isdisjoint(buckets):
                statuses = self._store.put_batch(
                    buckets, keys, chosen, body.options, now, checksums=chosen_sums
                )
                outcome.set_all(at, statuses)
                return
            sizes = [body.sizes[i] for i in at]
            made = self._store.allocate_batch(buckets, keys, sizes, body.options, now)
            for item, value in zip(made, chosen, strict=True):
                if isinstance(item, Object):
                    self._store.write(item.offset, value)
            note_sums(made, chosen_sums or ())
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
        items = objects_among(made)
        served = self._admission.primary.issuperset(buckets)
        if len(items) == len(made) and served and self._admission.all_readable(now):
            self._journal.put(items, at, outcome, now)
            return
        ready: list[Object] = []
        places: list[int] = []
        refused: list[Object] = []
        for i, item, bucket in zip(at, made, buckets, strict=True):
            if not isinstance(item, Object):
                outcome.set(i, item, 0 if item else self._journal.copies_of(bucket))
            elif status := self._admission.bucket_status(bucket, now):
                outcome.statuses[i] = status
                refused.append(item)
            else:
                ready.append(item)
                places.append(i)
        self._store.abort_batch(refused)
        self._journal.put(ready, places, outcome, now)

    def _values_of(self, body: wire.Put, frames: Frames) -> list[Parts]:
        if len(body.sizes) != len(body.keys):
            raise ProtocolError(f"{len(body.sizes)} values for {len(body.keys)} keys")
        check_sums(body.checksums, len(body.keys))
        values = wire.gathered(frames, body.sizes)
        self._admission.check_sizes(body.sizes)
        return values

    def begin(
        self, session: Session, request: int, body: wire.Put, size: int, now: int
    ) -> Filling | None:
        """A put whose ``size`` payload bytes have yet to come: where they go in the arena.

        None: they are to be received elsewhere and given to ``handle``, because the request is a
        repeat or a refused one, or so large that it must evict its own beginning.
        """
        if (
            request in session.answers
            or 0 < request <= session.forgotten
            or len(body.sizes) != len(body.keys)
            or sum(body.sizes) != size
            or len(body.checksums) not in (0, len(body.keys))
            or size > self._store.arena.size // 4
        ):
            return None
        try:
            self._admission.check_sizes(body.sizes)
            buckets, refused = self._admission.admit(body.keys, now)
        except ProtocolError:
            return None
        if refused:
            return None
        made = self._store.allocate_batch(buckets, body.keys, body.sizes, body.options, now)
        return Filling(self, session, request, body, buckets, made)

    def finish(
        self,
        body: wire.Put,
        buckets: Sequence[int],
        made: Sequence[Object | Status],
        now: int,
    ) -> Response | Deferred:
        """The answer of a put whose bytes have arrived."""
        note_sums(made, body.checksums)
        corrupt = self._arrivals.corrupt_among(made, Checksums.SENT)
        if corrupt:
            made = [Status.CORRUPT if item in corrupt else item for item in made]
        outcome = Outcome(len(made), answers.told, body.options.min_replicas)
        self.put_made(made, buckets, range(len(made)), outcome, now)
        result: Response | Deferred = outcome.result
        return result

    def _delete(
        self, session: Session, body: wire.Delete, frames: Frames, now: int
    ) -> Response | Deferred:
        return self._change(
            body.keys,
            now,
            lambda buckets, keys, at, outcome: self._journal.delete(
                buckets, keys, at, outcome, now
            ),
        )

    # -- ranges

    def _delete_range(
        self, session: Session, body: wire.DeleteRange, frames: Frames, now: int
    ) -> Response | Deferred:
        count, finished, limit = 0, 0, min(body.limit, self._limits.scan_keys_max)
        status = Status.OK

        def told(outcome: Outcome) -> Response:
            ended = Status(outcome.statuses[0]) or status
            return Kind.DELETED, wire.Deleted(count, finished, ended), ()

        outcome = Outcome(1, told)
        for bucket in body.buckets:
            status = self._admission.bucket_status(bucket, now)
            if status or count >= limit:
                break
            deleted, more, status = self._journal.delete_range(
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
            return self._sessions.pins.pin(session.owner, item, until)

        return self._repin(session, body.keys, body.ttl_ms, now, pin)

    def _unpin(
        self, session: Session, body: wire.Unpin, frames: Frames, now: int
    ) -> Response | Deferred:
        def unpin(item: Object) -> Status:
            self._sessions.pins.unpin(session.owner, item.key)
            return self._store.set_pin(item, Pin.NONE)

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
                item = self._store.find(bucket, key, now)
                status = Status.MISS if item is None else act(item)
                outcome.statuses[i] = status
                if not status:
                    self._journal.pin(session.owner, bucket, key, ttl_ms, outcome, i)

        return self._change(keys, now, repin)

    def _expire(
        self, session: Session, body: wire.Expire, frames: Frames, now: int
    ) -> Response | Deferred:
        return self._change(
            body.keys,
            now,
            lambda buckets, keys, at, outcome: self._journal.expire(
                buckets, keys, body.ttl_ms, at, outcome, now
            ),
        )


def objects_among(made: Sequence[Object | Status]) -> Sequence[Object]:
    """Those that are no refusals; what was given if there is none."""
    if set(map(type, made)) == _OBJECTS_ONLY:
        return made  # type: ignore[return-value]
    return [item for item in made if isinstance(item, Object)]


_OBJECTS_ONLY = {Object}


class Filling:
    """A put whose bytes are arriving. ``views`` is where they go, in the order of the payload.

    Tokens keep the memory from being used for anything else until the bytes are there, even if
    the bucket leaves meanwhile.
    """

    __slots__ = (
        "_body", "_buckets", "_items", "_made", "_request", "_session", "_store", "_writing",
        "views",
    )  # fmt: skip

    def __init__(
        self,
        writing: Writing,
        session: Session,
        request: int,
        body: wire.Put,
        buckets: Sequence[int],
        made: Sequence[Object | Status],
    ) -> None:
        self._writing = writing
        self._session = session
        self._request = request
        self._body = body
        self._buckets = buckets
        self._made = made
        self._items = objects_among(made)
        self._store = writing._store
        self._store.acquire_batch(self._items)
        arena = self._store.arena.view
        if len(self._items) == len(made):
            self.views = [arena[item.offset : item.offset + item.size] for item in self._items]
            return
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
        response = self._writing.finish(self._body, self._buckets, self._made, now)
        self._store.release_batch(self._items)
        self._session.remember(self._request, response)
        return response

    def abort(self) -> None:
        """They will not come."""
        self.views = []
        self._store.abort_batch(self._items)
        self._store.release_batch(self._items)
