"""Checksums of values: what clients ask for, what they and nodes compare, and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clientside import LATE, SMALL, A, B, Desk, Script, key_in, reply, statuses, table
from nodeside import MIB, PLAIN, Host, answered, flat, make_store, owned
from xxhash import xxh3_64_intdigest

from p2pkv import _native, ring, wire
from p2pkv.arena import Arena
from p2pkv.checksums import checksums_of
from p2pkv.errors import BatchError, CorruptValue, P2PKVError, ProtocolError
from p2pkv.handover import Cut, Failed, Incoming, Outgoing
from p2pkv.objects import Object, Reason, read_header
from p2pkv.parts import Parts
from p2pkv.replicated import Op, OpKind
from p2pkv.replicated import Session as CopySession
from p2pkv.routing import Reply
from p2pkv.sessions import Shared
from p2pkv.shared_memory import SharedArena
from p2pkv.store import Store
from p2pkv.types import BucketId, Epoch
from p2pkv.wire import Checksums, Kind, PutOptions, Status

K0, K1 = key_in(0), key_in(1)
SPLIT = table([A, B, *[A] * 6])


def parts(*pieces: bytes) -> Parts:
    return tuple(memoryview(piece) for piece in pieces)


# --- the function


@pytest.mark.parametrize("native", [True, False])
def test_a_value_in_parts_has_the_checksum_of_its_bytes_with_and_without_the_extension(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not _native.available:
        pytest.skip("the native module was not built")
    monkeypatch.setattr(_native, "available", native)
    values = [parts(b"ab", b"", b"c"), memoryview(b"abc"), parts(), memoryview(b"x" * 1000)]
    wanted = [xxh3_64_intdigest(v) for v in (b"abc", b"abc", b"", b"x" * 1000)]
    assert checksums_of(values) == wanted


@pytest.mark.parametrize("native", [True, False])
def test_copies_from_and_to_shared_memory_tell_checksums(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not _native.available:
        pytest.skip("the native module was not built")
    monkeypatch.setattr(_native, "available", native)
    with Arena.create(MIB, "sums") as made:
        arena = SharedArena.open(str(made.path), made.size, made.proof)
        assert arena is not None
        wanted = [xxh3_64_intdigest(b"abc"), xxh3_64_intdigest(b"d" * 500)]
        assert (
            arena.write_summed([64, 1024], [parts(b"a", b"bc"), memoryview(b"d" * 500)]) == wanted
        )
        room = bytearray(503)
        targets = [memoryview(room)[:3], memoryview(room)[3:]]
        assert arena.read_summed([64, 1024], targets) == wanted
        assert room == b"abc" + b"d" * 500


# --- what a client asks for


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ("always", Checksums.ALL),
        ("remote", Checksums.SENT),
        ("demand", Checksums.NONE),
        ("never", Checksums.NONE),
    ],
)
def test_reads_ask_for_the_checksums_that_their_policy_compares(policy: str, asked: int) -> None:
    desk = Desk(table(), checksums=policy)
    for operation in (
        desk.ops.get(K0),
        desk.ops.batch_get([K0]),
        desk.ops.get_into(K0, bytearray()),
    ):
        assert desk.start(operation).request.body.checksums == asked
    fresh = desk.ops.batch_get_fresh([K0], lambda size: memoryview(bytearray(size)))
    assert desk.start(fresh).request.body.checksums == asked
    assert desk.start(desk.ops.get_range(K0, 0, 1)).request.body.checksums == Checksums.NONE


@pytest.mark.parametrize("policy", ["always", "remote", "demand", "never"])
def test_a_put_is_given_checksums_when_it_is_sent_if_its_policy_makes_them(policy: str) -> None:
    desk = Desk(SPLIT, checksums=policy)
    script = desk.start(desk.ops.batch_put({K0: b"zero", K1: b"one"}, PutOptions()))
    for request, value in zip(script.requests, (b"zero", b"one"), strict=True):
        assert request.body.checksums == []
        if policy in ("always", "remote"):
            assert request.seal is not None
            request.seal()
            assert request.body.checksums == [xxh3_64_intdigest(value)]
        assert request.seal is None


# --- what a client does about a value that differs


def sent(*values: bytes | None, wrong: Sequence[int] = ()) -> Reply:
    """An answer with checksums, of which those at ``wrong`` are of other values."""
    sums = [0 if v is None else xxh3_64_intdigest(v) ^ (i in wrong) for i, v in enumerate(values)]
    codes = bytes(Status.MISS if v is None else 0 for v in values)
    data = [v or b"" for v in values]
    body = wire.Values(codes if any(codes) else b"", [len(d) for d in data], [], checksums=sums)
    return reply(body, b"".join(data)) if any(data) else reply(body)


def checked(*codes: int, offset: int = 4096) -> Reply:
    return reply(wire.Checked(bytes(codes), [offset] * len(codes)))


def careful(known: wire.Table | None = None, **changes: Any) -> Desk:
    return Desk(known or table(), checksums="always", **changes)


def outcomes(script: Script) -> list[Any]:
    assert script.done
    assert isinstance(script.error, BatchError), script.error
    return script.error.results


def test_what_agrees_is_returned_and_nobody_asked_again() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0, K1])).answer(sent(b"zero", None))
    assert script.result == [b"zero", None]


def test_the_owner_is_asked_about_a_value_that_differs_and_one_that_it_dropped_is_corrupt() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0, K1])).answer(sent(b"zero", b"one", wrong=[1]))
    assert (script.request.kind, script.request.body) == (Kind.CHECK, wire.Check([K1]))
    script.answer(checked(Status.CORRUPT))
    value, error = outcomes(script)
    assert value == b"zero"
    assert isinstance(error, CorruptValue)
    assert (error.key, error.place) == (K1, f"{A}, bucket 1, arena offset 4096")
    assert not error.may_have_taken_effect


def test_a_value_that_its_owner_has_is_read_once_more() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0, K1])).answer(sent(b"zero", b"one", wrong=[0]))
    script.answer(checked(Status.OK))
    assert (script.request.kind, script.request.body.keys) == (Kind.GET, [K0])
    assert script.answer(sent(b"zero")).result == [b"zero", b"one"]


def test_one_that_differs_twice_was_corrupted_on_the_way() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0, K1])).answer(sent(b"zero", b"one", wrong=[0]))
    script.answer(checked(Status.OK)).answer(sent(b"zero", wrong=[0]))
    error, value = outcomes(script)
    assert value == b"one"
    assert isinstance(error, CorruptValue)
    assert (error.key, error.place) == (K0, f"wire from {A}, bucket 0")


def test_one_that_left_meanwhile_is_a_miss() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0])).answer(sent(b"zero", wrong=[0]))
    script.answer(checked(Status.MISS, offset=0))
    assert script.answer(sent(None)).result == [None]


def test_an_owner_that_does_not_answer_the_question_is_no_reason_to_trust_the_value() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0])).answer(sent(b"zero", wrong=[0]))
    assert script.request.kind == Kind.CHECK
    (error,) = outcomes(script.answer(LATE).give_up())
    assert isinstance(error, P2PKVError)


def test_a_check_that_is_refused_ends_with_another_reading() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0])).answer(sent(b"zero", wrong=[0]))
    script.answer(reply(wire.Error(wire.Fault.BAD_REQUEST, "what?")))
    assert script.answer(sent(b"zero")).result == [b"zero"]


def test_a_check_with_a_status_that_it_cannot_have_ends_with_another_reading() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get([K0])).answer(sent(b"zero", wrong=[0]))
    script.answer(checked(Status.QUOTA))
    assert script.answer(sent(b"zero")).result == [b"zero"]


def test_a_single_get_that_differs_is_asked_for_again_before_the_owner_is() -> None:
    desk = careful()
    script = desk.start(desk.ops.get(K0)).answer(sent(b"zero", wrong=[0]))
    assert script.request.kind == Kind.GET
    assert script.answer(sent(b"zero")).result == b"zero"


def test_a_value_without_a_checksum_is_taken_as_it_is() -> None:
    desk = careful()
    answer = reply(wire.Values(b"", [4], [], checksums=[0]), b"zero")
    assert desk.start(desk.ops.get(K0)).answer(answer).result == b"zero"
    assert desk.start(desk.ops.batch_get([K0])).answer(answer).result == [b"zero"]


def test_delivered_values_are_summed_where_they_are_unless_there_was_no_room() -> None:
    desk = careful()
    target, small = bytearray(b"zero...."), bytearray(2)
    script = desk.start(desk.ops.batch_get_into([K0, K1], [target, small]))
    sums = [xxh3_64_intdigest(b"zero"), xxh3_64_intdigest(b"one")]
    body = wire.Values(b"", [4, 3], [], checksums=sums)
    script.answer(Reply(Kind.VALUES, body, (), delivered=True))
    size, error = outcomes(script)
    assert size == 4
    assert "does not fit" in str(error)


def test_checksums_that_the_driver_found_are_not_made_again() -> None:
    desk = careful()
    body = wire.Values(b"", [4], [], checksums=[7])
    found = Reply(Kind.VALUES, body, [b"zero"], 0, [b"zero"], False, [7])
    assert desk.start(desk.ops.batch_get([K0])).answer(found).result == [b"zero"]
    other = Reply(Kind.VALUES, body, [b"zero"], 0, [b"zero"], False, [8])
    assert desk.start(desk.ops.batch_get([K0])).answer(other).request.kind == Kind.CHECK


@pytest.mark.parametrize("how", ["frames", "delivered"])
def test_fresh_memory_is_compared_as_well(how: str) -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_get_fresh([K0], lambda n: memoryview(bytearray(n))))
    for wrong in ([0], []):
        answer = sent(b"zero", wrong=wrong)
        if how == "delivered":
            assert script.request.sink is not None
            (target,) = script.request.sink(answer.body)
            assert isinstance(target, memoryview)
            target[:] = b"zero"
            answer = Reply(Kind.VALUES, answer.body, (), delivered=True)
        script.answer(answer)
        if wrong:
            script.answer(checked(Status.OK))
    assert script.result == [b"zero"]


def test_an_answer_with_another_number_of_checksums_is_refused() -> None:
    desk = careful()
    answer = reply(wire.Values(b"", [4], [], checksums=[1, 2]), b"zero")
    script = desk.start(desk.ops.batch_get([K0])).answer(answer)
    assert isinstance(outcomes(script)[0], ProtocolError)


def test_a_put_that_arrived_damaged_is_sent_once_more_and_no_oftener() -> None:
    desk = careful()
    script = desk.start(desk.ops.batch_put({K0: b"zero", K1: b"one"}, PutOptions()))
    script.answer(statuses(0, Status.CORRUPT))
    assert script.request.body.keys == [K1]
    script.answer(statuses(Status.CORRUPT))
    stored, error = outcomes(script)
    assert stored == 1
    assert isinstance(error, CorruptValue)


# --- values in pieces

BIG = bytes(range(55))


def opened(sum_: int) -> Reply:
    return reply(wire.Opened(b"", [9], [len(BIG)], [sum_]))


def read_whole(script: Script, value: bytes = BIG) -> Script:
    """Answer all the readings of a value, and the good-bye."""
    while script.requests[0].kind == Kind.READ:
        answers = []
        for request in script.requests:
            body = request.body
            piece = value[body.offset : body.offset + body.length]
            answers.append(reply(wire.Values(b"", [len(piece)], []), piece))
        script.answer(*answers)
    assert script.request.kind == Kind.RELEASE
    return script.answer(statuses())


def large_get(desk: Desk) -> Script:
    script = desk.start(desk.ops.batch_get([K0]))
    return script.answer(reply(wire.Values(bytes([Status.LARGE]), [0], [])))


def test_a_large_value_is_compared_when_it_is_whole_and_read_twice_at_most() -> None:
    desk = careful(limits=SMALL)
    right = xxh3_64_intdigest(BIG)
    damaged = BIG[:-1] + b"?"
    script = read_whole(large_get(desk).answer(opened(right)), damaged).answer(checked(Status.OK))
    assert read_whole(script.answer(opened(right))).result == [BIG]

    script = read_whole(large_get(desk).answer(opened(right)), damaged).answer(checked(Status.OK))
    script = read_whole(script.answer(opened(right)), damaged).answer(checked(Status.OK))
    (error,) = outcomes(script)
    assert isinstance(error, CorruptValue)
    assert error.place.startswith("wire from")


def test_a_large_value_that_its_owner_dropped_is_corrupt() -> None:
    desk = careful(limits=SMALL)
    script = read_whole(large_get(desk).answer(opened(1))).answer(checked(Status.CORRUPT))
    (error,) = outcomes(script)
    assert isinstance(error, CorruptValue)
    assert error.place.endswith("arena offset 4096")


def test_a_large_value_is_not_compared_without_need() -> None:
    desk = Desk(table(), limits=SMALL)
    assert read_whole(large_get(desk).answer(opened(1))).result == [BIG]


def large_put(desk: Desk) -> Script:
    return desk.start(desk.ops.put(K0, BIG, PutOptions()))


def written(script: Script) -> Script:
    script.answer(reply(wire.Allocated(b"", [7], [64])))
    while script.requests[0].kind == Kind.WRITE:
        script.answer(*[statuses()] * len(script.requests))
    return script


def test_a_large_put_gives_its_checksum_with_the_commit_and_is_sent_twice_at_most() -> None:
    desk = careful(limits=SMALL)
    script = written(large_put(desk))
    assert script.request.body == wire.Commit([7], False, [xxh3_64_intdigest(BIG)])
    script.answer(statuses(Status.CORRUPT)).pause().routes()
    assert written(script).answer(statuses()).result == 1

    script = written(large_put(desk)).answer(statuses(Status.CORRUPT)).pause().routes()
    assert isinstance(written(script).answer(statuses(Status.CORRUPT)).error, CorruptValue)


# --- a node


@pytest.fixture
def host() -> Iterator[Host]:
    with Arena.create(8 * MIB, "sums") as arena:
        yield Host(arena)


VALUES = {b"small": b"s", b"large": b"l" * 20_000, b"other": b"o" * 300}


def put_all(host: Host, wrong: Sequence[bytes] = ()) -> list[Status]:
    sums = [xxh3_64_intdigest(v) ^ (k in wrong) for k, v in VALUES.items()]
    body = wire.Put(list(VALUES), list(map(len, VALUES.values())), PLAIN, sums)
    return host.statuses(Kind.PUT, body, [b"".join(VALUES.values())]) or [Status.OK] * len(sums)


def get(host: Host, *keys: bytes, **changes: Any) -> wire.Values:
    response = host.ask(Kind.GET, wire.Get(list(keys), **changes))
    flat(response[2])
    body: wire.Values = answered(response, Kind.VALUES)
    return body


def find(host: Host, key: bytes) -> Object:
    return next(b.objects[key] for b in host.store.buckets.values() if key in b.objects)


def rot(host: Host, key: bytes) -> None:
    host.store.value(find(host, key))[0] ^= 1


@pytest.mark.parametrize("locate", [False, True])
@pytest.mark.parametrize("keys", [[b"small"], [b"small", b"large"], [b"large", b"none", b"other"]])
def test_a_node_tells_the_checksums_that_are_asked_for(
    host: Host, keys: list[bytes], locate: bool
) -> None:
    put_all(host)
    wanted = [xxh3_64_intdigest(VALUES[k]) if k in VALUES else 0 for k in keys]
    assert get(host, *keys, locate=locate).checksums == []
    assert get(host, *keys, locate=locate, checksums=Checksums.ALL).checksums == wanted
    sent = [0 if locate and k == b"large" else w for k, w in zip(keys, wanted, strict=True)]
    assert get(host, *keys, locate=locate, checksums=Checksums.SENT).checksums == sent
    assert answered(host.ask(Kind.OPEN, wire.Open(keys)), Kind.OPENED).checksums == wanted


@pytest.mark.parametrize("arriving", list(Checksums))
def test_a_put_that_is_not_what_its_checksum_says_is_not_stored_where_the_policy_looks(
    host: Host, arriving: Checksums
) -> None:
    host.handlers.arrivals.policy = arriving
    bad = Status.CORRUPT if arriving else Status.OK
    assert put_all(host, wrong=[b"large"]) == [Status.OK, bad, Status.OK]
    there = host.statuses(Kind.EXISTS, wire.Exists(list(VALUES))) or [Status.OK] * 3
    assert there == [Status.OK, Status.MISS if arriving else Status.OK, Status.OK]
    assert host.handlers.arrivals.corrupt_total == bool(arriving)
    host.store.validate()


def test_a_damaged_put_among_refused_ones_gets_its_own_status(host: Host) -> None:
    host.handlers.arrivals.policy = Checksums.SENT
    put_all(host)
    host.replicas.served.discard(find(host, b"small").bucket)
    moved = {k for k in VALUES if find(host, k).bucket not in host.replicas.served}
    found = put_all(host, wrong=[b"large"])
    wanted = [
        Status.NOT_PRIMARY if k in moved else Status.CORRUPT if k == b"large" else Status.OK
        for k in VALUES
    ]
    assert found == wanted


@pytest.mark.parametrize("arriving", list(Checksums))
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_put_that_arrives_in_the_arena_is_compared_there(
    host: Host, arriving: Checksums, wrong: int
) -> None:
    host.handlers.arrivals.policy = arriving
    sums = [xxh3_64_intdigest(b"abc") ^ wrong, 0]
    body = wire.Put([b"k", b"l"], [3, 2], PLAIN, sums)
    filling = host.handlers.begin(host.session, Kind.PUT, 1, body, 5, 1)
    assert filling is not None
    filling.views[0][:], filling.views[1][:] = b"abc", b"de"
    bad = bool(wrong and arriving)
    got = answered(filling.finish(1), Kind.STATUSES).statuses
    assert got == (bytes([Status.CORRUPT, 0]) if bad else b"")
    assert get(host, b"k", b"l").statuses == (bytes([Status.MISS, 0]) if bad else b"")
    host.store.validate()


@pytest.mark.parametrize("arriving", list(Checksums))
@pytest.mark.parametrize("filled", [True, False])
def test_a_commit_is_compared_unless_the_client_filled_it_and_the_policy_is_remote(
    host: Host, arriving: Checksums, filled: bool
) -> None:
    host.handlers.arrivals.policy = arriving
    host.session.shared = Shared()
    made = answered(host.ask(Kind.ALLOC, wire.Alloc([b"k"], [3], PLAIN, filled)), Kind.ALLOCATED)
    if not filled:
        host.ask(Kind.WRITE, wire.Write(made.ids[0], 0), [b"abc"])
    body = wire.Commit(made.ids, filled, [5])
    bad = arriving >= (Checksums.ALL if filled else Checksums.SENT)
    assert host.statuses(Kind.COMMIT, body) == ([Status.CORRUPT] if bad else [])
    if not bad:
        assert find(host, b"k").checksum == 5
    host.store.validate()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.PUT, wire.Put([b"k"], [0], PLAIN, [1, 2])),
        (Kind.COMMIT, wire.Commit([1], False, [1, 2])),
    ],
)
def test_checksums_must_be_as_many_as_values(host: Host, kind: Kind, body: Any) -> None:
    assert "2 checksums for 1 keys" in answered(host.ask(kind, body), Kind.ERROR).message


def test_a_check_drops_what_rotted_and_tells_where_it_lay(host: Host) -> None:
    put_all(host)
    place = find(host, b"large").offset
    rot(host, b"large")
    keys = [b"small", b"large", b"none", b"large"]
    body: wire.Checked = answered(host.ask(Kind.CHECK, wire.Check(keys)), Kind.CHECKED)
    assert list(body.statuses) == [Status.OK, Status.CORRUPT, Status.MISS, Status.CORRUPT]
    assert body.offsets == [find(host, b"small").offset, place, 0, place]
    assert host.store.stats().counters.lost[Reason.CORRUPT] == 1
    assert get(host, b"large").statuses == bytes([Status.MISS])
    host.store.validate()


def test_a_check_looks_at_no_more_than_a_message_holds(host: Host) -> None:
    size = 700_000
    for key in (b"a", b"b"):
        host.put({key: bytes(size)})
    body = answered(host.ask(Kind.CHECK, wire.Check([b"a", b"b"])), Kind.CHECKED)
    assert list(body.statuses) == [Status.OK, Status.DEFERRED]


def test_a_checksum_that_is_given_later_is_in_the_header_as_well(host: Host) -> None:
    host.put({b"k": b"abc"})
    item = find(host, b"k")
    before = read_header(host.store.arena.view, item.offset)
    host.store.give_checksums([item], [77])
    after = read_header(host.store.arena.view, item.offset)
    assert before is not None
    assert after == before._replace(checksum=77, has_checksum=1)
    assert item.checksum == 77


def test_an_object_that_has_left_is_given_no_checksum(host: Host) -> None:
    host.put({b"k": b"abc"})
    item = find(host, b"k")
    host.statuses(Kind.DELETE, wire.Delete([b"k"]))
    host.store.give_checksums([item], [77])
    assert item.checksum in (None, 0)
    assert host.store.drop_corrupt([item]) == 0


# --- a bucket that is copied

MOVED = BucketId(0)


@pytest.fixture
def store() -> Iterator[Store]:
    with Arena.create(8 * MIB, "sums") as arena:
        made = make_store(arena)
        made.open_bucket(MOVED)
        yield made


def learner(store: Store, check: bool) -> Incoming:
    return Incoming(store, MOVED, A, CopySession(Epoch(1), 1), check)


def piece(seq: int, *entries: wire.Entry) -> wire.Snapshot:
    return wire.Snapshot(MOVED, 1, 1, seq, list(entries))


@pytest.mark.parametrize("check", [True, False])
def test_a_learner_that_checks_takes_nothing_of_a_piece_with_a_damaged_value(
    store: Store, check: bool
) -> None:
    learned, checksum = learner(store, check), xxh3_64_intdigest(b"abc")
    right, wrong = (wire.Entry(key, 3, checksum=checksum) for key in (b"right", b"wrong"))
    entries = [right, wire.Entry(b"none", 1), wire.Entry(b"gone", -1, checksum=5), wrong]
    status = learned.take(piece(0, *entries), [b"abc" + b"x" + b"abd"], 1)
    assert status is (Status.CORRUPT if check else Status.OK)
    there = set(store.buckets[MOVED].objects)
    assert there == (set() if check else {b"right", b"none", b"wrong"})


@pytest.mark.parametrize("check", [True, False])
def test_a_value_in_pieces_is_compared_when_the_last_is_here(store: Store, check: bool) -> None:
    learned = learner(store, check)
    entry = wire.Entry(b"k", 4, checksum=xxh3_64_intdigest(b"abcd"), piece=2)
    assert learned.take(piece(0, entry), [b"ab"], 1) is Status.OK
    last = learned.take(piece(1, msgspec.structs.replace(entry, start=2)), [b"c?"], 1)
    assert last is (Status.CORRUPT if check else Status.OK)
    assert (b"k" in store.buckets[MOVED].objects) is not check
    store.validate()


def test_an_owner_whose_value_arrives_damaged_looks_at_its_own_and_begins_again(
    store: Store,
) -> None:
    values = {b"rots": b"abc", b"stays": b"def"}
    sums = list(map(xxh3_64_intdigest, values.values()))
    store.put_batch([MOVED] * 2, list(values), list(values.values()), PLAIN, 1, checksums=sums)
    store.value(store.buckets[MOVED].objects[b"rots"])[0] ^= 1
    bucket = store.buckets[MOVED]
    outgoing = Outgoing(store, bucket, B, CopySession(Epoch(1), 1), MIB)
    copying = outgoing.run(lambda: 1)
    assert isinstance(copying.send(None), Cut)
    copying.send(0)
    with pytest.raises(Failed, match="1 were corrupt here"):
        copying.send([reply(wire.SnapshotAck(MOVED, 1, 0, Status.CORRUPT))])
    assert set(bucket.objects) == {b"stays"}
    assert store.stats().counters.lost[Reason.CORRUPT] == 1


def test_an_operation_whose_value_arrives_damaged_is_not_kept_by_a_backup(host: Host) -> None:
    host.handlers.arrivals.policy = Checksums.SENT
    key = next(k for k in VALUES)
    host.replicas.adopt({BucketId(b): owned(B, A, epoch=2, revision=2) for b in range(4)}, 1)
    op = Op(int(OpKind.PUT), key, 3, 0, 0, xxh3_64_intdigest(b"abc"))
    staged = host.journal.stage([ring.bucket_of(key, 4)], [op], 1)
    assert isinstance(staged[0], Object)
    host.store.write(staged[0].offset, b"abd")
    assert host.handlers.arrivals.corrupt_among(staged, Checksums.SENT) == set(staged)
    assert not host.store.allocated
    assert host.handlers.arrivals.corrupt_total == 1
    host.store.validate()
