"""With copies, a client asks a backup when an owner does not answer; few writes go there again."""

from __future__ import annotations

from typing import Any

import pytest
from clientside import (
    BROKEN,
    BUCKETS,
    LATE,
    A,
    B,
    C,
    Desk,
    Script,
    key_in,
    reply,
    statuses,
    table,
    values,
)

from p2pkv import Indeterminate, ProtocolError, wire
from p2pkv.clock import SECOND_NS
from p2pkv.routing import Exchange, Pause, Table
from p2pkv.wire import Status

K0, K1 = key_in(0), key_in(1)
NOT_PRIMARY, MISS = Status.NOT_PRIMARY, Status.MISS


def ring(primary: Any = A, backup: Any = B, revision: int = 1, **more: Any) -> wire.Table:
    """Bucket 0 has a copy; bucket 1 is C's alone."""
    owners = [primary, C] + [C] * (BUCKETS - 2)
    backups = [[backup]] + [[]] * (BUCKETS - 1)
    return table(owners, members=[A, B, C], backups=backups, revision=revision, **more)


@pytest.fixture
def desk() -> Desk:
    return Desk(ring())


def asked(script: Script) -> list[tuple[Any, Any]]:
    """Who is asked, and for what."""
    return [(r.to, r.body.keys) for r in script.requests]


# -- reads


@pytest.mark.parametrize("lost", [BROKEN, LATE], ids=["broken", "late"])
def test_the_backup_of_an_owner_that_does_not_answer_is_asked_at_once(
    desk: Desk, lost: Any
) -> None:
    script = desk.start(desk.ops.batch_get([K0], None))
    assert asked(script) == [(A, [K0])]
    script.answer(lost)
    assert asked(script) == [(B, [K0])], "without a pause, and without a look at the ring"
    assert script.request.body.any_copy
    script.answer(values(b"v"))
    assert script.result == [b"v"]


def test_an_owner_with_copies_has_a_second_to_answer(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_get([K0], None))
    assert isinstance(script.effect, Exchange)
    assert script.effect.deadline_ns - desk.now == SECOND_NS


def test_of_a_short_deadline_the_owner_gets_a_third_so_that_its_backup_has_a_chance(
    desk: Desk,
) -> None:
    script = desk.start(desk.ops.batch_get([K0], 0.3))
    assert isinstance(script.effect, Exchange)
    assert script.effect.deadline_ns - desk.now == SECOND_NS // 10
    desk.now = script.effect.deadline_ns
    script.answer(LATE)
    assert asked(script) == [(B, [K0])]
    assert script.effect.deadline_ns > desk.now


@pytest.mark.parametrize("mode", ["any", "primary"])
def test_what_only_the_owner_may_answer_has_all_the_time_there_is(mode: str) -> None:
    desk = Desk(ring(), read=mode)
    read = desk.ops.batch_get([K0], 0.3) if mode == "primary" else desk.ops.batch_exists([K0], 0.3)
    script = desk.start(read)
    assert isinstance(script.effect, Exchange)
    assert script.effect.deadline_ns - desk.now == round(0.3 * SECOND_NS)


def test_of_a_batch_only_the_keys_of_the_lost_owner_go_to_its_backup(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_get([K1, K0], None))
    by_owner = dict(asked(script))
    assert by_owner == {A: [K0], C: [K1]}
    answers = [BROKEN if r.to == A else values(b"1") for r in script.requests]
    script.answer(*answers)
    assert asked(script) == [(B, [K0])]
    script.answer(values(b"0"))
    assert script.result == [b"1", b"0"]


def test_what_the_backup_may_not_tell_waits_for_the_next_primary(desk: Desk) -> None:
    """A miss is only ever the primary's word."""
    script = desk.start(desk.ops.batch_get([K0], None))
    script.answer(BROKEN).answer(values(NOT_PRIMARY))
    assert isinstance(script.effect, Pause)
    script.pause().routes()
    assert asked(script) == [(B, [K0])]
    script.answer(values(NOT_PRIMARY)).pause()
    script.routes(ring(B, C, revision=2))
    assert asked(script) == [(B, [K0])]
    script.answer(values(MISS))
    assert (script.result, script.error) == ([None], None)


def test_a_backup_that_is_lost_too_leaves_the_owner(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_get([K0], None))
    script.answer(BROKEN).answer(BROKEN)
    assert asked(script) == [(A, [K0])], "there is nobody else"
    script.answer(values(b"v"))
    assert script.result == [b"v"]


def test_where_no_bucket_has_copies_the_ring_is_looked_at_first() -> None:
    desk = Desk(table([A] * BUCKETS))
    script = desk.start(desk.ops.batch_get([K0], None)).answer(BROKEN)
    assert isinstance(script.effect, Pause)


def test_with_read_primary_nobody_else_is_asked() -> None:
    desk = Desk(ring(), read="primary")
    script = desk.start(desk.ops.batch_get([K0], None))
    assert not script.request.body.any_copy
    script.answer(BROKEN)
    assert isinstance(script.effect, Pause)
    script.pause().routes()
    assert asked(script) == [(A, [K0])]


# -- writes


def written(desk: Desk, sent: bool = True, **options: Any) -> Script:
    """A put whose owner cannot be reached any more, and is no longer in the ring."""
    script = desk.start(desk.ops.put(K0, b"v", wire.PutOptions(**options)))
    script.answer(BROKEN, sent=sent).pause()
    return script.routes(table([B] + [C] * 7, members=[B, C], revision=2))


def test_a_write_without_an_answer_is_sent_to_its_member_again_and_not_to_a_copy(
    desk: Desk,
) -> None:
    script = desk.start(desk.ops.put(K0, b"v", wire.PutOptions()))
    first = script.request
    script.answer(BROKEN).pause().routes()
    assert script.request is first
    assert script.request.to == A
    script.answer(reply(wire.Statuses(b"", bytes([2]))))
    assert script.result == 2


def test_a_write_whose_member_left_without_an_answer_is_indeterminate(desk: Desk) -> None:
    script = written(desk)
    assert isinstance(script.error, Indeterminate)


def test_what_is_written_once_is_written_again_at_the_next_owner(desk: Desk) -> None:
    """Whoever of the two comes second finds the same value there."""
    script = written(desk, write_once=True)
    assert (script.request.to, script.request.body.keys) == (B, [K0])
    script.answer(reply(wire.Statuses(b"", bytes([2]))))
    assert script.result == 2


def test_a_conditional_put_is_not_repeated_since_its_answer_would_be_another(desk: Desk) -> None:
    script = written(desk, write_once=True, if_absent=True)
    assert isinstance(script.error, Indeterminate)


def test_a_write_that_never_left_goes_to_the_next_owner(desk: Desk) -> None:
    script = written(desk, sent=False)
    assert script.request.to == B
    script.answer(statuses())
    assert script.result == 1


@pytest.mark.parametrize("once", [False, True])
def test_a_write_moves_on_from_a_member_that_cannot_be_reached_and_owns_it_no_more(
    desk: Desk, once: bool
) -> None:
    """It is in the ring still, as a dead node is until its session ends."""
    script = desk.start(desk.ops.put(K0, b"v", wire.PutOptions(write_once=once)))
    script.answer(BROKEN).pause().routes(ring(B, C, revision=2))
    assert script.request.to == A, "one broken connection proves nothing"
    script.answer(BROKEN).pause().routes()
    if once:
        assert script.request.to == B
    else:
        assert isinstance(script.error, Indeterminate)


def test_a_late_member_is_not_taken_for_gone(desk: Desk) -> None:
    script = desk.start(desk.ops.put(K0, b"v", wire.PutOptions(), 600.0))
    script.answer(LATE).pause().routes(ring(B, C, revision=2))
    for _ in range(3):
        assert script.request.to == A
        script.answer(LATE).pause().routes()
    script.answer(statuses())
    assert script.result == 1


def test_the_copies_of_each_key_of_a_batch_are_told(desk: Desk) -> None:
    script = desk.start(desk.ops.batch_put({K0: b"0", K1: b"1"}, wire.PutOptions()))
    answers = {A: reply(wire.Statuses(b"", bytes([2]))), C: statuses()}
    script.answer(*[answers[r.to] for r in script.requests])
    assert script.result == [2, 1]


def test_numbers_of_copies_that_do_not_fit_the_keys_are_an_error(desk: Desk) -> None:
    script = desk.start(desk.ops.put(K0, b"v", wire.PutOptions()))
    script.answer(reply(wire.Statuses(b"", bytes([2, 2]))))
    assert isinstance(script.error, Indeterminate)


# -- the ring


@pytest.mark.parametrize("backups", [[[1]], [[3]] * BUCKETS, [[-1]] * BUCKETS])
def test_a_ring_whose_backups_make_no_sense_is_refused(backups: list[list[int]]) -> None:
    body = wire.Table("f", 1, BUCKETS, [A, B, C], [()] * 3, [0] * BUCKETS, [1] * BUCKETS, backups)
    with pytest.raises(ProtocolError, match="backup"):
        Table(body)
