"""Values that clients fill by themselves: room first, then bytes, sent or in place, then commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pkv import answers, wire
from p2pkv.admission import Admission
from p2pkv.answers import Frames, Handler
from p2pkv.arrivals import Arrivals, check_sums, note_sums
from p2pkv.errors import ProtocolError
from p2pkv.journal import Journal, Outcome
from p2pkv.objects import Object
from p2pkv.sessions import ALLOCS_MAX, Deferred, Response, Session
from p2pkv.sharing import Sharing
from p2pkv.store import Store
from p2pkv.wire import Checksums, Fault, Kind, Status


class Allocating:
    """Allocations of sessions, from the first word to the last."""

    def __init__(
        self, admission: Admission, sharing: Sharing, arrivals: Arrivals, journal: Journal
    ) -> None:
        self.remote_total = 0
        """Values for which clients on other hosts were given room."""
        self._admission = admission
        self._sharing = sharing
        self._arrivals = arrivals
        self._journal = journal
        self._store: Store = journal.store
        self._sessions = journal.sessions

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The kinds of requests that concern allocations."""
        return {
            Kind.ALLOC: self._alloc,
            Kind.WRITE: self._write,
            Kind.COMMIT: self._commit,
            Kind.ABORT: self._abort,
        }

    def _alloc(self, session: Session, body: wire.Alloc, frames: Frames, now: int) -> Response:
        if len(body.sizes) != len(body.keys):
            raise ProtocolError(f"{len(body.sizes)} sizes for {len(body.keys)} keys")
        if len(session.allocations) + len(body.keys) > ALLOCS_MAX:
            raise ProtocolError(f"more than {ALLOCS_MAX} allocations in one session")
        self._admission.check_sizes(body.sizes)
        if body.shared and session.shared is None:
            raise ProtocolError("memory is shared over data connections only")
        if body.remote and not body.shared:
            raise ProtocolError("an allocation for a remote writer must be shared")
        if body.remote and self._sharing.quarantine.full:
            return self._admission.refuse(Fault.NOT_READY, "too much memory is in quarantine")
        ids, offsets = [0] * len(body.keys), [0] * len(body.keys)

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            sizes = [body.sizes[i] for i in items]
            results = self._store.allocate_batch(buckets, keys, sizes, body.options, now)
            made = [(i, o) for i, o in zip(items, results, strict=True) if isinstance(o, Object)]
            new = self._sessions.allocate(session, [o for _, o in made], now)
            for (i, item), id in zip(made, new, strict=True):
                ids[i], offsets[i] = id, item.offset
            if body.shared and session.shared is not None:
                self._sharing.share(
                    session.shared, dict(zip(new, [o for _, o in made], strict=True))
                )
            if body.remote:
                self._sharing.quarantine.remote.update(new)
                self.remote_total += len(new)
            return [Status.OK if isinstance(r, Object) else r for r in results]

        _, statuses, _ = self._admission.each(body.keys, now, run)
        return Kind.ALLOCATED, wire.Allocated(statuses.statuses, ids, offsets), ()

    def _write(self, session: Session, body: wire.Write, frames: Frames, now: int) -> Response:
        allocation = self._sessions.touch_allocation(session, body.id, now)
        if allocation is None:
            return answers.statuses([Status.CONFLICT])
        item, at = allocation.item, body.offset
        length = sum(memoryview(frame).nbytes for frame in frames)
        if at + length > item.size:
            raise ProtocolError(f"bytes {at} to {at + length} of a value of {item.size}")
        if length:
            allocation.wrote(at, at + length)
        for frame in frames:
            self._store.arena.write(item.offset + at, frame)
            at += memoryview(frame).nbytes
        return answers.statuses(())

    def _commit(
        self, session: Session, body: wire.Commit, frames: Frames, now: int
    ) -> Response | Deferred:
        check_sums(body.checksums, len(body.ids))
        outcome = Outcome(len(body.ids), answers.told)
        ready: list[int] = []
        items: list[Object] = []
        shared = session.shared or ()
        served = self._admission.primary if self._admission.all_readable(now) else ()
        for i, id in enumerate(body.ids):
            allocation = session.allocations.pop(id, None)
            if allocation is None:
                outcome.statuses[i] = Status.CONFLICT
                continue
            bucket = allocation.item.bucket
            status = Status.OK if bucket in served else self._admission.bucket_status(bucket, now)
            if not (status or allocation.complete or (body.filled and id in shared)):
                status = Status.INVALID
            if status:
                outcome.statuses[i] = status
                self._store.abort_batch([allocation.item])
            else:
                ready.append(i)
                items.append(allocation.item)
                outcome.required = max(outcome.required, allocation.item.options.min_replicas)
        note_sums(items, [body.checksums[i] for i in ready] if body.checksums else ())
        in_place = body.filled and self._sharing.quarantine.remote.isdisjoint(body.ids)
        corrupt = self._arrivals.corrupt_among(items, Checksums.ALL if in_place else Checksums.SENT)
        if corrupt:
            for i, item in zip(ready, items, strict=True):
                if item in corrupt:
                    outcome.set(i, Status.CORRUPT)
            ready = [i for i, item in zip(ready, items, strict=True) if item not in corrupt]
            items = [item for item in items if item not in corrupt]
        self._journal.put(items, ready, outcome, now)
        if session.shared:
            self._sharing.unshare(session.shared, body.ids)
        result: Response | Deferred = outcome.result
        return result

    def _abort(self, session: Session, body: wire.Abort, frames: Frames, now: int) -> Response:
        dropped = [session.allocations.pop(id, None) for id in body.ids]
        self._store.abort_batch([a.item for a in dropped if a is not None])
        if session.shared and body.late:
            self._sharing.unshare_late(session.shared, body.ids, proven=True)
        if session.shared:
            self._sharing.unshare(session.shared, body.ids)
        return answers.statuses([Status.CONFLICT if a is None else Status.OK for a in dropped])
