"""Room ahead of puts: what a node gives, takes back, and makes of what was put there."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from nodeside import KIB, LIMITS, MIB, PLAIN, Host, answered

from p2pkv import wire
from p2pkv.arena import Arena
from p2pkv.checksums import checksums_of
from p2pkv.objects import HEADER_BYTES, extent_bytes, extents_bytes
from p2pkv.sessions import Deferred, Shared
from p2pkv.store import ROOM_BYTES, ROOM_PUTS, ROOM_SHARE, ROOMS_SHARE
from p2pkv.store_audit import audit
from p2pkv.wire import Checksums, Kind, PutOptions, Status

ROOM = MIB
IF_ABSENT, ONCE = PutOptions(if_absent=True), PutOptions(write_once=True)


class Client:
    """A connection with the arena mapped, as its node sees it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.shared = Shared()
        self.start = self.size = 0

    def ask(self, kind: Kind, body: wire.Body, request: int = 0) -> Any:
        self.host.session.shared = self.shared
        try:
            return self.host.ask(kind, body, request=request)
        finally:
            self.host.session.shared = None

    def take(self, response: Any) -> wire.Statuses:
        body: wire.Statuses = answered(response, Kind.STATUSES)
        self.start, self.size = body.room
        return body

    def lease(self, size: int = ROOM) -> int:
        """How many bytes it got."""
        self.take(self.ask(Kind.LEASE, wire.Lease(size)))
        return self.size

    def write(self, values: Sequence[bytes]) -> None:
        at = self.start
        for value in values:
            begin = at + HEADER_BYTES
            self.host.store.arena.view[begin : begin + len(value)] = value
            at += extent_bytes(len(value))

    def filled(
        self, values: dict[bytes, bytes], options: PutOptions = PLAIN, next: int = ROOM,
        sums: Sequence[int] = (),
    ) -> wire.Filled:  # fmt: skip
        """The message for values that it has written."""
        self.write(list(values.values()))
        sizes = [len(value) for value in values.values()]
        return wire.Filled(list(values), sizes, options, self.start, next, list(sums))

    def put(
        self, values: dict[bytes, bytes], options: PutOptions = PLAIN, next: int = ROOM
    ) -> list[Status]:
        body = self.take(self.ask(Kind.FILLED, self.filled(values, options, next)))
        return [Status(s) for s in body.statuses]

    def close(self) -> None:
        self.host.handlers.sharing.unshare_all(self.shared)


@pytest.fixture
def host() -> Iterator[Host]:
    with Arena.create(16 * MIB, "rooms") as arena:
        host = Host(arena)
        yield host
        audit(host.store)


@pytest.fixture
def client(host: Host) -> Client:
    return Client(host)


def used(host: Host) -> int:
    return host.store.stats().used_bytes


# -- putting


def test_values_in_the_room_become_objects_by_one_message(client: Client, host: Host) -> None:
    client.lease()
    values = {b"a": b"1" * 1000, b"b": b"", b"c": b"3" * 5000}
    assert client.put(values) == []
    assert host.get(*values) == list(values.values())
    assert host.store.stats().allocated == 0


def test_what_is_left_of_the_room_is_filled_next(client: Client, host: Host) -> None:
    client.lease(ROOM)
    start = client.start
    client.put({b"a": b"1" * 1000}, next=1000)
    assert client.start == start + extent_bytes(1000)
    assert client.size == ROOM - extent_bytes(1000)
    client.put({b"b": b"2" * 70}, next=1000)
    assert host.get(b"a", b"b") == [b"1" * 1000, b"2" * 70]


def test_a_room_that_is_too_small_for_what_may_come_is_replaced(client: Client, host: Host) -> None:
    client.lease(ROOM)
    client.put({b"a": b"1" * 1000}, next=ROOM)
    assert client.size == ROOM
    assert used(host) == extent_bytes(1000) + ROOM


def test_who_wants_no_more_room_has_none(client: Client, host: Host) -> None:
    client.lease()
    client.put({b"a": b"1" * 1000}, next=0)
    assert (client.start, client.size) == (0, 0)
    assert used(host) == extent_bytes(1000)


def test_a_put_that_fills_the_room_to_its_end_leaves_none(client: Client, host: Host) -> None:
    client.lease(ROOM)
    client.put({b"a": bytes(ROOM - HEADER_BYTES)}, next=0)
    assert used(host) == ROOM
    assert host.store.stats().rooms_bytes == 0


def test_each_key_has_its_own_outcome_and_what_is_refused_is_free(
    client: Client, host: Host
) -> None:
    host.put({b"a": b"old"})
    client.lease()
    values = {b"a": b"new" * 100, b"b": b"2" * 100}
    assert client.put(values, IF_ABSENT, next=0) == [Status.EXISTS, Status.OK]
    assert host.get(b"a", b"b") == [b"old", b"2" * 100]
    assert used(host) == extent_bytes(3) + extent_bytes(100)


def test_what_is_written_once_stays_and_counts_as_put(client: Client, host: Host) -> None:
    host.put({b"a": b"first"}, ONCE)
    client.lease()
    assert client.put({b"a": b"again"}, ONCE) == []
    assert host.get(b"a") == [b"first"]


def test_a_node_that_is_fenced_stores_nothing(client: Client, host: Host) -> None:
    client.lease()
    filled = client.filled({b"a": b"1", b"b": b"2"}, next=0)
    host.fenced = True
    body = client.take(client.ask(Kind.FILLED, filled))
    assert list(body.statuses) == [Status.STALLED] * 2
    host.fenced = False
    assert (host.get(b"a", b"b"), used(host)) == ([None, None], 0)


def test_a_repeated_put_is_answered_from_memory(client: Client, host: Host) -> None:
    client.lease()
    filled = client.filled({b"a": b"1"})
    first = client.ask(Kind.FILLED, filled, request=7)
    host.put({b"a": b"2"})
    assert client.ask(Kind.FILLED, filled, request=7) is first
    as_it_was = wire.Put([b"a"], [1], PLAIN)
    assert host.ask(Kind.PUT, as_it_was, [b"1"], request=7) is first, "without the memory"
    assert host.get(b"a") == [b"2"]


def test_of_a_bucket_with_copies_the_answer_waits_for_them(client: Client, host: Host) -> None:
    host.share(0)
    (key,) = host.keys_in(0, 1)
    host.now = 10**9
    client.lease()
    answer = client.ask(Kind.FILLED, client.filled({key: b"1"}))
    assert isinstance(answer, Deferred)
    host.acknowledge(10**9)
    assert answer.response is not None
    body = client.take(answer.response)
    assert (list(body.copies), client.size) == ([2], ROOM)


def test_values_that_are_not_what_their_checksums_say_are_not_stored(
    client: Client, host: Host
) -> None:
    host.handlers.arrivals.policy = Checksums.ALL
    client.lease()
    values = {b"a": b"1" * 100, b"b": b"2" * 100}
    good, _ = checksums_of([memoryview(value) for value in values.values()])
    body = client.take(client.ask(Kind.FILLED, client.filled(values, next=0, sums=[good, 1])))
    assert list(body.statuses) == [Status.OK, Status.CORRUPT]
    assert host.get(b"a", b"b") == [b"1" * 100, None]
    assert used(host) == extent_bytes(100)


def test_a_small_room_has_place_for_several_puts_of_the_like(client: Client, host: Host) -> None:
    needed = extent_bytes(1000)
    assert client.lease(needed) == ROOM_PUTS * needed
    for i in range(ROOM_PUTS):
        assert client.put({b"%d" % i: bytes([i]) * 1000}, next=needed) == []
    assert client.size == ROOM_PUTS * needed, "another one"


# -- what is refused changes nothing


@pytest.mark.parametrize(
    "change",
    [
        {"start": 64}, {"sizes": [1, 2]}, {"sizes": [ROOM]}, {"checksums": [1, 2]},
        {"sizes": [LIMITS.value_bytes_max + 1]},
    ],
    ids=str,
)  # fmt: skip
def test_puts_that_do_not_fit_their_room_are_refused(
    client: Client, host: Host, change: dict[str, Any]
) -> None:
    host.put({b"x": b"0"})
    client.lease()
    filled = client.filled({b"a": b"1"})
    fields = {name: getattr(filled, name) for name in filled.__struct_fields__} | change
    before = used(host)
    answered(client.ask(Kind.FILLED, wire.Filled(**fields)), Kind.ERROR)
    assert used(host) == before
    assert client.put({b"a": b"1"}) == [], "the room is what it was"


def test_room_is_given_over_data_connections_only(host: Host) -> None:
    answered(host.ask(Kind.LEASE, wire.Lease(ROOM)), Kind.ERROR)
    answered(host.ask(Kind.FILLED, wire.Filled([b"a"], [1], PLAIN, 64, 0)), Kind.ERROR)
    assert used(host) == 0


def test_one_room_and_all_rooms_have_their_share_of_the_arena(host: Host) -> None:
    space = host.store.extents.allocator.size
    assert Client(host).lease(space // ROOM_SHARE + 64) == 0
    clients = [Client(host) for _ in range(2 * ROOM_SHARE)]
    given = [client.lease(space // ROOM_SHARE) for client in clients]
    assert sum(given) == space // ROOMS_SHARE
    assert Client(host).lease(64) == 0
    clients[0].close()
    assert clients[-1].lease(space // ROOM_SHARE) == space // ROOM_SHARE


# -- coming and going


def test_a_connection_has_one_room(client: Client, host: Host) -> None:
    client.lease(ROOM)
    client.lease(ROOM)
    assert used(host) == ROOM
    assert client.lease(0) == 0
    assert used(host) == 0


def test_the_room_of_a_connection_that_is_gone_is_free(client: Client, host: Host) -> None:
    client.lease()
    client.put({b"a": b"1" * 100})
    client.write([b"2" * 100])
    client.close()
    client.close()
    assert used(host) == extent_bytes(100)


def test_the_room_outlives_the_session_as_its_client_may_be_writing(
    client: Client, host: Host
) -> None:
    client.lease()
    host.sessions.end(host.session)
    assert host.store.stats().rooms_bytes == ROOM
    client.close()
    assert used(host) == 0


def test_room_is_made_by_evicting(client: Client, host: Host) -> None:
    for i in range(300):
        host.put({b"%d" % i: bytes(64 * KIB)})
    assert client.lease(ROOM) == ROOM
    assert client.put({b"a": b"1" * 1000}) == []


@pytest.mark.parametrize("size", [4 * KIB, 64 * KIB])
def test_a_room_evicts_no_more_than_as_many_bytes(client: Client, host: Host, size: int) -> None:
    """However the oldest objects are scattered."""
    seed = time.time_ns() & 0xFFFF_FFFF
    print(f"seed = {seed}")
    keys = [b"%d" % i for i in range(host.store.arena.size // size)]
    for key in keys:
        host.put({key: bytes(size)})
    random.Random(seed).shuffle(keys)
    for key in keys:
        host.get(key)
    before = host.store.stats().objects
    (needed,) = extents_bytes([size])
    room = client.lease(needed)
    assert room == 0 or room >= needed
    assert before - host.store.stats().objects <= ROOM_BYTES // size + 1


def test_nobody_else_is_given_what_clients_may_be_writing_to() -> None:
    seed = time.time_ns() & 0xFFFF_FFFF
    print(f"seed = {seed}")
    chance = random.Random(seed)
    with Arena.create(4 * MIB, "rooms") as arena:
        host = Host(arena)
        clients = [Client(host) for _ in range(4)]
        for step in range(600):
            client = chance.choice(clients)
            sizes = [chance.choice((1, 64, 3000, 20_000)) for _ in range(chance.randint(1, 3))]
            values = {b"%d" % chance.randrange(64): b"%c" % (step % 251) * n for n in sizes}
            needed = sum(extents_bytes([len(value) for value in values.values()]))
            if chance.random() < 0.1:
                client.close()
                client.start = client.size = 0
            elif client.size < needed:
                client.lease(needed * chance.randint(1, 3))
            else:
                client.put(values, next=chance.choice((0, needed, 100_000)))
                assert host.get(*values) == list(values.values()), f"seed {seed}"
            host.put({b"other%d" % (step % 90): bytes(30_000)})
            for writer in clients:  # as if it were in the middle of a copy
                if writer.size:
                    arena.view[writer.start : writer.start + writer.size] = b"\xff" * writer.size
            audit(host.store)
        for client in clients:
            client.close()
        assert host.store.stats().rooms_bytes == 0
