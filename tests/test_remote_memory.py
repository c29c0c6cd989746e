"""Rounds through a slot; what is made of answers that locate values in another host's arena."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from p2pkv import _native, wire
from p2pkv.errors import ProtocolError
from p2pkv.objects import HEADER_BYTES, Object, State, write_header
from p2pkv.remote_memory import (
    PIECES_MAX,
    RemotePlace,
    RemotePut,
    RemoteValues,
    Staging,
    rounds,
    runs,
)
from p2pkv.routing import Reply, Request
from p2pkv.shared_memory import message_for
from p2pkv.transport import ClientSession, new_client_id
from p2pkv.wire import Kind, PutOptions, Status

KiB, MiB = 1 << 10, 1 << 20

spans = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 300)), max_size=20)


@given(spans, st.integers(1, 200))
def test_rounds_cover_each_byte_of_each_span_once_and_fit_their_slot(
    spans: list[tuple[int, int]], room: int
) -> None:
    covered = [
        (m.span, m.remote + i)
        for moves in rounds(spans, room)
        for m in moves
        for i in range(m.length)
    ]
    assert covered == [(n, at + i) for n, (at, size) in enumerate(spans) for i in range(size)]
    for moves in rounds(spans, room):
        assert 0 < sum(m.length for m in moves) <= room
        assert [m.local for m in moves] == [
            sum(m.length for m in moves[:i]) for i in range(len(moves))
        ]
        assert all(m.remote == spans[m.span][0] + m.start for m in moves)


def test_a_round_has_a_bounded_number_of_pieces() -> None:
    found = rounds([(i * 100, 1) for i in range(PIECES_MAX + 1)], MiB)
    assert [len(moves) for moves in found] == [PIECES_MAX, 1]


@given(spans, st.integers(1, 200))
def test_runs_are_the_same_bytes_and_join_neighbours(
    spans: list[tuple[int, int]], room: int
) -> None:
    for moves in rounds(spans, room):
        joined = runs(moves)
        assert [(at + i, to + i) for at, to, n in joined for i in range(n)] == [
            (m.local + i, m.remote + i) for m in moves for i in range(m.length)
        ]
        for (at, to, n), (next_at, next_to, _) in itertools.pairwise(joined):
            assert (at + n, to + n) != (next_at, next_to)


def test_a_header_and_its_value_are_one_piece() -> None:
    assert runs(rounds([(0, 64), (64, 1000)], MiB)[0]) == [(0, 0, 1064)]


# -- values

VALUES = {b"a": b"A" * 9000, b"b": b"", b"c": bytes(range(256)) * 400}
PLACE = RemotePlace(MiB, 10**10, True)


class Arena:
    """Another host's: objects as a node lays them out, and an answer that locates them."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.memory = bytearray(MiB)
        self.keys = list(values)
        self.offsets, self.versions = [], []
        at = HEADER_BYTES
        for version, (key, value) in enumerate(values.items(), 1):
            item = Object(key, 0, at, len(value), 0, PutOptions(), state=State.COMMITTED)
            item.version = version
            write_header(memoryview(self.memory), item)
            self.memory[at : at + len(value)] = value
            self.offsets.append(at if value else 0)
            self.versions.append(version)
            at += -(-len(value) // 64) * 64 + HEADER_BYTES
        self.sizes = [len(value) for value in values.values()]

    def answer(self, checksums: Sequence[int] = ()) -> Reply:
        body = wire.Values(
            b"", self.sizes, [], b"", self.offsets, self.versions,
            checksums=list(checksums), token=7,
        )  # fmt: skip
        return Reply(Kind.VALUES, body, ())

    def read(self, values: RemoteValues, staging: Staging) -> None:
        """What an adapter, or a node that was asked to, does."""
        slot = staging.slots[-1]
        for moves in values.rounds:
            for local, remote, length in runs(moves):
                slot.view(local, length)[:] = self.memory[remote : remote + length]
            values.land(moves, slot)


@pytest.fixture(params=[True, False], ids=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(_native, "available", False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("room", [1000, 64 * KiB, MiB])
def test_values_come_back_as_objects_or_in_the_callers_buffers(room: int) -> None:
    arena, staging = Arena(VALUES), Staging(2, room)
    request = Request("", Kind.GET, wire.Get(list(VALUES)))
    values = RemoteValues(PLACE, request, arena.answer(), room)
    arena.read(values, staging)
    assert values.reply().values == list(VALUES.values())

    buffers = [bytearray(len(value)) for value in VALUES.values()]
    halves = [(memoryview(b)[: len(b) // 2], memoryview(b)[len(b) // 2 :]) for b in buffers]
    request.sink = lambda _: halves
    values = RemoteValues(PLACE, request, arena.answer(), room)
    arena.read(values, staging)
    assert values.reply().delivered
    assert buffers == list(VALUES.values())


@pytest.mark.parametrize("damage", ["version", "key", "size", "cleared"])
def test_a_value_whose_header_does_not_fit_is_to_be_asked_for_again(damage: str) -> None:
    arena, staging = Arena(VALUES), Staging(1, MiB)
    reply = arena.answer()
    at = arena.offsets[2] - HEADER_BYTES
    place = {"key": 8, "size": 16, "version": 24, "cleared": 0}[damage]
    arena.memory[at + place : at + place + 8] = bytes(8)
    values = RemoteValues(PLACE, Request("", Kind.GET, wire.Get(list(VALUES))), reply, MiB)
    arena.read(values, staging)
    assert values.reply().body.statuses == bytes([0, 0, Status.DEFERRED])


@pytest.mark.parametrize("into", ["objects", "buffers"])
@pytest.mark.parametrize("damaged", [False, True])
def test_checksums_are_of_what_has_arrived(into: str, damaged: bool) -> None:
    """The header is whole: only the bytes of the value changed on their way."""
    arena, staging = Arena(VALUES), Staging(1, 64 * KiB)
    reply = arena.answer([xxh3_64_intdigest(value) for value in VALUES.values()])
    if damaged:
        arena.memory[arena.offsets[2] + 5] ^= 1
    request = Request("", Kind.GET, wire.Get(list(VALUES)))
    if into == "buffers":
        buffers = [memoryview(bytearray(len(value))) for value in VALUES.values()]
        request.sink = lambda _: buffers
    values = RemoteValues(PLACE, request, reply, 64 * KiB)
    arena.read(values, staging)
    found = values.reply().sums
    assert (found[0], found[1]) == (reply.body.checksums[0], 0)
    assert (found[2] != reply.body.checksums[2]) == damaged


def test_a_push_names_objects_by_their_place_among_those_that_the_token_holds() -> None:
    arena, staging = Arena(VALUES), Staging(2, MiB)
    values = RemoteValues(PLACE, Request("", Kind.GET, wire.Get(list(VALUES))), arena.answer(), MiB)
    push = values.pushes(values.rounds[0], staging.slots[1])
    assert push.token == 7
    assert push.items == [0, 0, 1, 1]
    assert push.starts == [0, HEADER_BYTES] * 2
    assert push.sizes == [HEADER_BYTES, 9000, HEADER_BYTES, 256 * 400]
    assert push.targets[0] == MiB
    assert push.targets[1] == MiB + HEADER_BYTES


@pytest.mark.parametrize("offset", [1, MiB - 8999, 1 << 40])
def test_places_outside_of_the_arena_are_refused(offset: int) -> None:
    arena = Arena(VALUES)
    arena.offsets[0] = offset
    with pytest.raises(ProtocolError, match="outside of the arena"):
        RemoteValues(PLACE, Request("", Kind.GET, wire.Get(list(VALUES))), arena.answer(), MiB)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("room", [777, MiB])
def test_a_put_is_written_where_the_node_made_room(room: int) -> None:
    chance, staging, memory = random.Random(1), Staging(1, room), bytearray(MiB)
    values = [chance.randbytes(n) for n in (5000, 0, 123_456)]
    body = wire.Put([b"a", b"b", b"c"], [len(v) for v in values], PutOptions())
    request: Any = Request("", Kind.PUT, body, [b"".join(values)[:6000], b"".join(values)[6000:]])
    put = RemotePut(PLACE, request, wire.Allocated(b"", [1, 2, 3], [64, 8192, 65536]), room)
    for moves in put.rounds:
        put.load(moves, staging.slots[0])
        for local, remote, length in runs(moves):
            memory[remote : remote + length] = staging.slots[0].view(local, length)
    assert memory[64 : 64 + 5000] == values[0]
    assert memory[65536 : 65536 + 123_456] == values[2]


class OnDevice:
    """A value that is not in host memory before it is asked for."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def part(self, items: Sequence[int]) -> OnDevice:
        return self

    def staged(self) -> Sequence[memoryview]:
        return [memoryview(self._value)]

    def write(self, memory: Any, made: Sequence[int], offsets: Sequence[int]) -> None:
        raise AssertionError("no device reaches another host's memory")


def test_a_put_from_a_device_goes_through_host_memory() -> None:
    value = random.Random(7).randbytes(200 * KiB)
    request = Request("", Kind.PUT, wire.Put([b"k"], [len(value)], PutOptions()))
    request.source = OnDevice(value)
    place = RemotePlace(4 * MiB, 10**9, True)
    message = message_for(request, ClientSession(new_client_id(b"t")), place)
    assert (message.kind, message.body.remote) == (Kind.ALLOC, True)  # type: ignore[attr-defined]
    put = RemotePut(place, request, wire.Allocated(b"", [1], [4096]), MiB)
    slot = Staging(1, MiB).slots[0]
    put.load(put.rounds[0], slot)
    assert slot.view(0, len(value)) == value
