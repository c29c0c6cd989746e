"""Requests that read: values whole, in part, in pieces or by their place, and what there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pkv import answers, ring, wire
from p2pkv.admission import Admission
from p2pkv.answers import Frames, Handler
from p2pkv.errors import ProtocolError
from p2pkv.objects import Object
from p2pkv.payload import Payload
from p2pkv.sessions import TOKENS_MAX, Response, Session, Sessions
from p2pkv.sharing import Sharing
from p2pkv.store import Store
from p2pkv.wire import Checksums, Kind, Status

LOCATE_MIN = 8 << 10
"""Smaller values are sent along even to those who have mapped the arena."""


class Reading:
    """Answers by what the store holds."""

    def __init__(
        self, admission: Admission, sharing: Sharing, store: Store, sessions: Sessions
    ) -> None:
        self.held_total = 0
        """Values that were located for clients on other hosts."""
        self._admission = admission
        self._limits = admission.limits
        self._sharing = sharing
        self._store = store
        self._sessions = sessions

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """The kinds of requests that read."""
        return {
            Kind.GET: self._get,
            Kind.EXISTS: self._exists,
            Kind.MATCH: self._match,
            Kind.OPEN: self._open,
            Kind.READ: self._read,
            Kind.RELEASE: self._release,
            Kind.SCAN: self._scan,
            Kind.CHECK: self._check,
        }

    # -- values

    def _get(self, session: Session, body: wire.Get, frames: Frames, now: int) -> Response:
        starts, lengths = len(body.starts), len(body.lengths)
        if starts != lengths or starts not in (0, len(body.keys)):
            raise ProtocolError(f"{starts} starts, {lengths} lengths for {len(body.keys)} keys")
        if len(body.keys) == 1 and not (starts or body.tell_once):
            response = self._get_small(body.keys[0], body.checksums, now)
            if response is not None:
                return response
        buckets, refused = self._admission.admit(body.keys, now)
        if refused and body.any_copy:
            found, left = self._any_copies(buckets, body.keys, refused, now)
            return self._values(session, found, left, body, now)
        if not refused:
            found = self._store.get_batch(buckets, body.keys, now)
            return self._values(session, found, b"", body, now)
        items = [i for i, status in enumerate(refused) if not status]
        found = [None] * len(body.keys)
        hits = self._store.get_batch(
            [buckets[i] for i in items], [body.keys[i] for i in items], now
        )
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
            item = self._store.find(bucket, key, now)
            if statuses[i]:
                if item is not None and item.options.write_once:
                    statuses[i] = Status.OK
                else:
                    item = None
            found.append(item)
        for item in found:
            if item is not None:
                self._store.use(item)
        return found, bytes(statuses) if any(statuses) else b""

    def _get_small(self, key: bytes, checksums: int, now: int) -> Response | None:
        """The value of one key, copied, where that is all there is to it; else None."""
        bucket = ring.bucket_of(key, self._admission.bucket_count)
        if bucket not in self._admission.primary or not self._admission.all_readable(now):
            return None
        item = self._store.find(bucket, key, now)
        if item is None or not 0 < item.size < LOCATE_MIN:
            return None
        self._store.use(item)
        sums = [item.checksum or 0] if checksums else []
        values = wire.Values(b"", [item.size], [], checksums=sums)
        return Kind.VALUES, values, (bytes(self._store.value(item)),)

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
        payload = Payload(self._store, session.packing, self._limits.message_bytes_max)
        there = [item for item in found if item is not None]
        bound = self._limits.message_bytes_max
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
        return self._sessions.hold(session, items, now) if items else 0

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
        statuses = self._statuses_within(small, refused, self._limits.message_bytes_max)
        offsets, versions = [0] * len(found), [0] * len(found)
        for i, item in enumerate(found):
            if item is not None and item.size >= LOCATE_MIN:
                statuses[i] = Status.OK
                offsets[i], versions[i] = item.offset, item.version
        sent = [i if not s else None for i, s in zip(small, statuses, strict=True)]
        payload = Payload(self._store, session.packing, self._limits.message_bytes_max)
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
        bound = self._limits.message_bytes_max
        payload = Payload(self._store, session.packing, bound)
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
                there = [i is not None for i in self._store.get_batch(buckets, keys, now)]
            else:
                there = self._store.exists_batch(buckets, keys, now)
            return bytes(there).translate(_THERE)

        return self._admission.each(body.keys, now, run)

    def _match(self, session: Session, body: wire.Match, frames: Frames, now: int) -> Response:
        buckets, refused = self._admission.admit(body.keys, now)
        end = len(body.keys)
        if refused:
            end = len(refused) - len(refused.lstrip(b"\0"))
        count = self._store.match(buckets[:end], body.keys[:end], now)
        status = Status.MISS if count < end or not refused else refused[end]
        return Kind.MATCHED, wire.Matched(count, status), ()

    def _open(self, session: Session, body: wire.Open, frames: Frames, now: int) -> Response:
        if body.view:
            if session.shared is None:  # the memory is not: it gets them sent
                return self._get(session, wire.Get(body.keys), (), now)
            return self._sharing.view(session, body, now)
        if len(session.tokens) + len(body.keys) > TOKENS_MAX:
            raise ProtocolError(f"more than {TOKENS_MAX} open objects in one session")
        ids, sizes, sums = [0] * len(body.keys), [0] * len(body.keys), [0] * len(body.keys)

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            found = self._store.get_batch(buckets, keys, now)
            there = [(i, o) for i, o in zip(items, found, strict=True) if o is not None]
            opened = self._sessions.open(session, [o for _, o in there], now)
            for (i, item), id in zip(there, opened, strict=True):
                ids[i], sizes[i], sums[i] = id, item.size, item.checksum or 0
            return [Status.OK if o is not None else Status.MISS for o in found]

        _, statuses, _ = self._admission.each(body.keys, now, run)
        return Kind.OPENED, wire.Opened(statuses.statuses, ids, sizes, sums), ()

    def _read(self, session: Session, body: wire.Read, frames: Frames, now: int) -> Response:
        token = self._sessions.touch_token(session, body.token, now)
        if token is None:
            return Kind.VALUES, wire.Values(bytes([Status.CONFLICT]), [0], []), ()
        if body.length > self._limits.message_bytes_max:
            raise ProtocolError(f"a read of {body.length} bytes, limit message_bytes_max")
        if body.offset + body.length > token.item.size:
            raise ProtocolError(f"a read behind the end of a value of {token.item.size} bytes")
        payload = Payload(self._store, session.packing, self._limits.message_bytes_max)
        payload.add_part(token.item, body.offset, body.length)
        return Kind.VALUES, wire.Values(b"", [body.length], []), payload.finish()

    def _release(self, session: Session, body: wire.Release, frames: Frames, now: int) -> Response:
        if session.shared and self._sharing.release_views(session.shared, body.tokens):
            return answers.statuses(())
        return answers.statuses(self._sessions.release(session, body.tokens))

    def _scan(self, session: Session, body: wire.Scan, frames: Frames, now: int) -> Response:
        keys: list[bytes] = []
        sizes: list[int] = []
        finished, after, limit = 0, body.after, min(body.limit, self._limits.scan_keys_max)
        status = Status.OK
        for bucket in body.buckets:
            status = self._admission.bucket_status(bucket, now)
            if status or len(keys) >= limit:
                break
            page, more = self._store.scan(bucket, after, body.prefix, limit - len(keys), now)
            keys += [key for key, _ in page]
            sizes += [size for _, size in page]
            if more:
                break
            finished, after = finished + 1, b""
        return Kind.PAGE, wire.Page(keys, sizes, finished, status), ()

    def _check(self, session: Session, body: wire.Check, frames: Frames, now: int) -> Response:
        offsets = [0] * len(body.keys)

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            found = [self._store.find(b, k, now) for b, k in zip(buckets, keys, strict=True)]
            statuses = self._statuses_of_first(found)
            there = [f for f, s in zip(found, statuses, strict=True) if f is not None and not s]
            corrupt = set(self._store.check_batch(list(dict.fromkeys(there))))
            for i, item in zip(items, found, strict=True):
                offsets[i] = 0 if item is None else item.offset
            return [
                Status.CORRUPT if item in corrupt else s
                for item, s in zip(found, statuses, strict=True)
            ]

        _, statuses, _ = self._admission.each(body.keys, now, run)
        return Kind.CHECKED, wire.Checked(statuses.statuses, offsets), ()

    def _statuses_of_first(self, found: Sequence[Object | None]) -> list[Status]:
        """So much as one message may hold is looked at; the rest is to be asked for again."""
        statuses: list[Status] = []
        total = 0
        for item in found:
            if item is None:
                statuses.append(Status.MISS)
                continue
            too_much = total and total + item.size > self._limits.message_bytes_max
            statuses.append(Status.DEFERRED if too_much else Status.OK)
            total += 0 if too_much else item.size
        return statuses


def _sums_of(items: Sequence[Object | None]) -> list[int]:
    return [0 if item is None else item.checksum or 0 for item in items]


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
