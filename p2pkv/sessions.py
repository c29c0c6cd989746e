"""What a node remembers of those who talk to it: allocations, tokens, answers, pins.

All of it is bounded, and goes when the session falls silent. No network, no clock.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from p2pkv.errors import ProtocolError
from p2pkv.expiry import ExpiryHeap
from p2pkv.extents import Room
from p2pkv.objects import Object, State
from p2pkv.payload import FRAMES
from p2pkv.store import Store
from p2pkv.types import Member
from p2pkv.wire import Status

OWNER_BYTES = 9
"""Sessions of one client begin with the same bytes, its id; pins belong to the client."""

ALLOCS_MAX = 65536
TOKENS_MAX = 4096
HELD_MAX = 65536
"""Objects that the tokens of one session hold."""
GAPS_MAX = 1024
"""Separate pieces of one allocation that may be written before those between them."""
PINS_SLACK = 1024
TOKEN_BYTES = 16

Response = tuple[int, Any, Sequence[Any]]
"""Kind, body and payload of an answer."""


class Deferred:
    """An answer that waits for other nodes. ``response`` is None until it is there."""

    __slots__ = ("_then", "response")

    def __init__(self) -> None:
        self.response: Response | None = None
        self._then: list[Callable[[Response], object]] = []

    def then(self, act: Callable[[Response], object]) -> None:
        """Call ``act`` with the answer, now or as soon as it is there."""
        if self.response is not None:
            act(self.response)
        else:
            self._then.append(act)

    def complete(self, response: Response) -> None:
        """This is the answer."""
        self.response = response
        waiting, self._then = self._then, []
        for act in waiting:
            act(response)


class Allocation:
    """An extent that is being filled by its session."""

    __slots__ = ("deadline", "item", "pieces")

    def __init__(self, item: Object, deadline: int) -> None:
        self.item = item
        self.pieces: list[tuple[int, int]] = []
        """What is written, as (start, end), in order; what touches is one piece."""
        self.deadline = deadline

    @property
    def complete(self) -> bool:
        return not self.item.size or self.pieces == [(0, self.item.size)]

    def wrote(self, start: int, end: int) -> None:
        """Note that these bytes are there, maybe again. Raises ProtocolError: too many gaps."""
        pieces = self.pieces
        first = bisect_left(pieces, start, key=itemgetter(1))
        last = bisect_right(pieces, end, key=itemgetter(0))
        if first < last:
            start, end = min(start, pieces[first][0]), max(end, pieces[last - 1][1])
        elif len(pieces) >= GAPS_MAX:
            raise ProtocolError(f"a value written in more than {GAPS_MAX} separate pieces")
        pieces[first:last] = [(start, end)]


class Token:
    """Objects that stay where they are: one that is read in pieces, or those of a located answer.

    Not renewed by use where the client reckons with its time (``hold``).
    """

    __slots__ = ("deadline", "items")

    def __init__(self, items: Sequence[Object], deadline: int) -> None:
        self.items = items
        self.deadline = deadline

    @property
    def item(self) -> Object:
        """The only one."""
        return self.items[0]


class Shared(dict[int, Object]):
    """What the client of one data connection may touch in the arena: objects by id, and room."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        super().__init__()
        self.room: Room | None = None

    def __bool__(self) -> bool:
        return len(self) > 0 or self.room is not None


class Session:
    """One peer's conversation."""

    __slots__ = (
        "allocations",
        "answers",
        "answers_max",
        "forgotten",
        "held",
        "id",
        "last_seen",
        "member",
        "packing",
        "shared",
        "token",
        "tokens",
    )

    def __init__(self, id: bytes, member: Member | None, answers_max: int, now: int) -> None:
        self.id = id
        self.member = member
        self.last_seen = now
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """Admits the session's data connection."""
        self.packing = FRAMES
        """How the way suits that its present request came."""
        self.shared: Shared | None = None
        """What the client fills itself, on the connection of its present request."""
        self.allocations: dict[int, Allocation] = {}
        self.tokens: dict[int, Token] = {}
        self.held = 0
        """Objects that the tokens hold."""
        self.answers: OrderedDict[int, Response | Deferred] = OrderedDict()
        self.answers_max = answers_max
        self.forgotten = 0
        """Writes up to this number may have been answered, but the answer is no longer known."""

    @property
    def owner(self) -> bytes:
        return self.id[:OWNER_BYTES]

    def remember(self, request: int, answer: Response | Deferred) -> None:
        """Keep a write's answer for a repeated request."""
        self.answers[request] = answer
        if len(self.answers) > self.answers_max:
            old, _ = self.answers.popitem(last=False)
            self.forgotten = max(self.forgotten, old)


class Sessions:
    """All sessions of a node."""

    def __init__(
        self,
        store: Store,
        *,
        ttl_ns: int,
        alloc_ns: int,
        read_ns: int,
        sessions_max: int,
        answers_max: int,
    ) -> None:
        self._store = store
        self._ttl = ttl_ns
        self._alloc_ns = alloc_ns
        self._read_ns = read_ns
        self._max = sessions_max
        self._answers_max = answers_max
        self._by_id: dict[bytes, Session] = {}
        self._next_id = 0
        self.pins = Pins(store)
        self.reaped = 0
        self.on_end: Callable[[Session], None] = lambda _: None
        """Told of each session that ends."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def get(self, id: bytes) -> Session | None:
        return self._by_id.get(id)

    def begin(self, id: bytes, member: Member | None, now: int, used: int = 0) -> Session | None:
        """The session of this id, new or known. None: there are too many.

        ``used``: the client may have had writes up to this number answered in a session of this id
        that is no longer known.
        """
        session = self._by_id.get(id)
        if session is None:
            if len(self._by_id) >= self._max:
                self.reap(now)
                if len(self._by_id) >= self._max:
                    return None
            session = self._by_id[id] = Session(id, member, self._answers_max, now)
            session.forgotten = used
        session.member = member
        session.last_seen = now
        return session

    def end(self, session: Session) -> None:
        """Take back everything that the session holds."""
        self._by_id.pop(session.id, None)
        self._store.abort_batch([a.item for a in session.allocations.values()])
        session.allocations.clear()
        self.release(session, list(session.tokens))
        self.on_end(session)

    def numbers(self, count: int) -> range:
        """Ids that nothing else has."""
        first = self._next_id + 1
        self._next_id += count
        return range(first, first + count)

    # -- allocations

    def allocate(self, session: Session, items: Sequence[Object], now: int) -> list[int]:
        """Ids under which the session fills and commits the objects."""
        ids: list[int] = []
        for item in items:
            self._next_id += 1
            session.allocations[self._next_id] = Allocation(item, now + self._alloc_ns)
            ids.append(self._next_id)
        return ids

    def touch_allocation(self, session: Session, id: int, now: int) -> Allocation | None:
        allocation = session.allocations.get(id)
        if allocation is None or allocation.item.state is not State.ALLOCATED:
            return None
        allocation.deadline = now + self._alloc_ns
        return allocation

    # -- tokens

    def open(self, session: Session, items: Sequence[Object], now: int) -> list[int]:
        """Tokens under which the session reads the objects, whatever happens to their keys."""
        return [self.hold(session, (item,), now) for item in items]

    def hold(self, session: Session, items: Sequence[Object], now: int) -> int:
        """One token for all of them. Raises ProtocolError if the session holds too much."""
        if len(session.tokens) >= TOKENS_MAX or session.held + len(items) > HELD_MAX:
            raise ProtocolError(f"{TOKENS_MAX} tokens, or {HELD_MAX} objects, in one session")
        self._store.acquire_batch(items)
        session.held += len(items)
        self._next_id += 1
        session.tokens[self._next_id] = Token(items, now + self._read_ns)
        return self._next_id

    @property
    def hold_ns(self) -> int:
        """How long a token holds at least that is not used again."""
        return min(self._read_ns, self._ttl)

    def touch_token(self, session: Session, id: int, now: int) -> Token | None:
        token = session.tokens.get(id)
        if token is not None:
            token.deadline = now + self._read_ns
        return token

    def release(self, session: Session, ids: Sequence[int]) -> list[Status]:
        tokens = [session.tokens.pop(id, None) for id in ids]
        items = [item for t in tokens if t is not None for item in t.items]
        session.held -= len(items)
        self._store.release_batch(items)
        return [Status.CONFLICT if t is None else Status.OK for t in tokens]

    # -- deadlines

    def reap(self, now: int) -> None:
        """End silent sessions, and take back what passed its deadline in the others."""
        for session in list(self._by_id.values()):
            if now - session.last_seen > self._ttl:
                self.reaped += 1
                self.end(session)
                continue
            if session.allocations:
                late = [i for i, a in session.allocations.items() if a.deadline <= now]
                self._store.abort_batch([session.allocations.pop(i).item for i in late])
            if session.tokens:
                self.release(session, [i for i, t in session.tokens.items() if t.deadline <= now])
        self.pins.reap(now)

    def end_all(self) -> None:
        for session in list(self._by_id.values()):
            self.end(session)
        self.pins.clear()


class _HeldPin:
    """A client's pin on an object."""

    __slots__ = ("expires_at", "item", "place")

    def __init__(self, place: tuple[bytes, bytes], item: Object) -> None:
        self.place = place
        self.item = item
        self.expires_at = 0


class Pins:
    """Pins by client and key, each until its time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pins: dict[tuple[bytes, bytes], _HeldPin] = {}
        self._expiry: ExpiryHeap[_HeldPin] = ExpiryHeap()
        self._sweep_at = PINS_SLACK

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, owner: bytes, item: Object, until: int) -> Status:
        """Pin an object, or prolong the pin of this owner."""
        place = (owner, item.key)
        held = self._pins.get(place)
        if held is None or held.item is not item:
            status = self._store.pin(item)
            if status is not Status.OK:
                return status
            self.unpin(*place)
            held = self._pins[place] = _HeldPin(place, item)
            self._sweep()
        if until > held.expires_at:
            self._expiry.set(held, until)
        return Status.OK

    def unpin(self, owner: bytes, key: bytes) -> None:
        held = self._pins.pop((owner, key), None)
        if held is not None:
            self._expiry.set(held, 0)
            self._store.unpin(held.item)

    def _sweep(self) -> None:
        """Drop pins whose object has left, so that they are never many more than the objects."""
        if len(self._pins) > self._sweep_at:
            left = [p for p, held in self._pins.items() if held.item.state is not State.COMMITTED]
            for place in left:
                self.unpin(*place)
            self._sweep_at = 2 * len(self._pins) + PINS_SLACK

    def reap(self, now: int) -> None:
        for held in self._expiry.due(now, len(self._expiry)):
            self.unpin(*held.place)

    def clear(self) -> None:
        for place in list(self._pins):
            self.unpin(*place)
