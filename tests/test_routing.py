"""How a batch finds its owners, and what becomes of each answer: one rule a test."""

from __future__ import annotations

from typing import Any

import pytest
from clientside import (
    BROKEN,
    BUCKETS,
    LATE,
    SMALL,
    A,
    B,
    C,
    Desk,
    Script,
    key_in,
    refused,
    reply,
    statuses,
    table,
    values,
)

from p2pkv import wire
from p2pkv.clock import MILLISECOND_NS, SECOND_NS
from p2pkv.errors import (
    BatchError,
    ClusterMismatch,
    Conflict,
    CorruptValue,
    DeadlineExceeded,
    Indeterminate,
    InvalidArgument,
    Miss,
    OutOfMemory,
    P2PKVError,
    ProtocolError,
    QuotaExceeded,
    Stalled,
    TooLarge,
    Unreachable,
)
from p2pkv.keyed import Keyed
from p2pkv.outcomes import error_of
from p2pkv.routing import (
    BACKOFF_LAST_NS,
    Location,
    Pause,
    Rediscover,
    Reply,
    Request,
    Router,
    Table,
)
from p2pkv.wire import Fault, Kind, PutOptions, Status

PLAIN = PutOptions()
K0, K1, K2 = key_in(0), key_in(1), key_in(2)
AB = [A, B] * (BUCKETS // 2)
"""Even buckets are A's, odd ones B's."""


def outcomes(script: Script) -> list[Any]:
    assert script.done
    if isinstance(script.error, BatchError):
        return script.error.results
    assert script.error is None, script.error
    return list(script.result)


def put(desk: Desk, *keys: bytes) -> Script:
    return desk.start(desk.ops.batch_put({k: b"v" + k for k in keys}, PLAIN))


# --- who is asked


def test_one_batch_goes_to_all_owners_at_once() -> None:
    script = put(Desk(table(AB)), K0, K1, K2)
    sent = {r.to: r.body for r in script.requests}
    assert {m: body.keys for m, body in sent.items()} == {A: [K0, K2], B: [K1]}
    assert outcomes(script.answer(statuses(), statuses())) == [1, 1, 1]


def test_results_come_in_the_order_of_the_keys() -> None:
    desk = Desk(table(AB))
    script = desk.start(desk.ops.batch_get([K1, K0, K2]))
    assert [r.to for r in script.requests] == [B, A]
    assert outcomes(script.answer(values(b"one"), values(b"zero", b"two"))) == [
        b"one", b"zero", b"two",
    ]  # fmt: skip


def test_a_batch_of_no_keys_sends_nothing() -> None:
    assert put(Desk(table())).result == []


def test_more_keys_than_a_message_may_have_go_out_as_several() -> None:
    desk = Desk(table(), SMALL)
    script = desk.start(desk.ops.batch_exists([b"%d" % i for i in range(9)]))
    assert [len(r.body.keys) for r in script.requests] == [4, 4, 1]
    answers = [statuses(0, 0, 0, 0), statuses(1, 1, 1, 1), statuses(0)]
    assert outcomes(script.answer(*answers)) == [True] * 4 + [False] * 4 + [True]


def test_more_bytes_than_a_message_may_have_go_out_as_several() -> None:
    desk = Desk(table(), SMALL)
    items = {b"%d" % i: bytes(size) for i, size in enumerate([30, 10, 1, 40, 0, 0, 0, 0, 0])}
    script = desk.start(desk.ops.batch_put(items, PLAIN))
    assert [r.body.sizes for r in script.requests] == [[30, 10], [1], [40, 0, 0, 0], [0, 0]]
    assert outcomes(script.answer(*[statuses()] * 4)) == [1] * 9


# --- the ring


def test_the_ring_is_asked_for_at_the_seeds_before_the_first_request() -> None:
    desk = Desk()
    script = desk.start(desk.ops.get(K0)).found("tcp://seed:1")
    assert script.request.to == "tcp://seed:1"
    assert script.request.body == wire.Routes(0)
    script.routes(table())
    assert (script.request.to, script.request.kind) == (A, Kind.GET)
    assert script.answer(values(b"v")).result == b"v"


def test_the_next_seed_is_asked_when_one_does_not_answer_or_talks_nonsense() -> None:
    desk = Desk()
    script = desk.start(desk.ops.get(K0)).found("tcp://1:1", "tcp://2:1", "tcp://3:1", "tcp://4:1")
    script.answer(BROKEN).answer(statuses()).answer(reply(table(generations=[1])))
    script.routes(table()).answer(values(b"v"))
    assert script.result == b"v"


def test_a_question_for_the_ring_waits_a_second_at_most() -> None:
    desk = Desk()
    script = desk.start(desk.ops.get(K0)).found("tcp://1:1", "tcp://2:1")
    assert script.effect.deadline_ns == desk.now + SECOND_NS
    script.pass_time(4.5)
    script.answer(BROKEN)
    assert script.effect.deadline_ns == desk.now + SECOND_NS // 2


def test_no_ring_before_the_deadline_is_unreachable() -> None:
    desk = Desk()
    script = desk.start(desk.ops.get(K0))
    for _ in range(200):
        if script.done:
            break
        if isinstance(script.effect, Pause):
            script.pause()
        else:
            script.found()
    assert isinstance(script.error, Unreachable)
    assert "no node gave the ring" in str(script.error)
    assert desk.now == 12 * SECOND_NS


def test_seeds_of_another_cluster_are_told_at_once() -> None:
    desk = Desk()
    script = desk.start(desk.ops.get(K0)).found("tcp://1:1", "tcp://2:1")
    script.answer(refused(Fault.CLUSTER, "this is cluster 'x', not 'y'")).answer(BROKEN)
    assert isinstance(script.error, ClusterMismatch)
    assert str(script.error) == "this is cluster 'x', not 'y'"


def test_no_more_nodes_are_asked_for_the_ring_after_the_deadline() -> None:
    desk = Desk()
    script = desk.start(desk.ops.get(K0)).found("tcp://1:1", "tcp://2:1").pass_time(5)
    script.answer(LATE)
    assert isinstance(script.error, Unreachable)


def test_who_refused_is_asked_first_for_the_ring_and_who_was_silent_last() -> None:
    for seed in range(20):
        desk = Desk(table([A, B, C, A, A, A, A, A]))
        desk.ops.random.seed(seed)
        script = desk.start(desk.ops.batch_get([K0, K1]))
        script.answer(BROKEN, values(Status.NOT_PRIMARY)).pause()
        asked = []
        while isinstance(script.effect, Rediscover) is False:
            asked.append(script.request.to)
            script.answer(BROKEN)
        assert asked == [B, C, A]


def test_three_members_are_asked_for_the_ring_then_the_seeds() -> None:
    members = [A, B, C, wire.Member("d", 1), wire.Member("e", 1)]  # type: ignore[arg-type]
    desk = Desk(table(members=members))
    script = desk.start(desk.ops.batch_get([K0])).answer(BROKEN).pause()
    script.answer(BROKEN).answer(BROKEN).answer(BROKEN).found("tcp://seed:1").routes()
    assert (script.request.to, script.request.kind) == (A, Kind.GET)


def test_members_without_an_endpoint_are_not_asked_for_the_ring() -> None:
    desk = Desk(table(AB, silent=[A]))
    script = desk.start(desk.ops.batch_get([K0])).answer(BROKEN).pause()
    assert script.request.to == B


def test_an_older_table_is_not_taken_and_one_of_another_cluster_is() -> None:
    router = Router()
    assert router.install(table(revision=5))
    assert not router.install(table(AB, revision=5))
    assert not router.install(table(AB, revision=4))
    assert router.install(table(AB, revision=6))
    assert router.install(table(revision=1, fingerprint="other"))
    assert router.table is not None
    assert router.table.owner(1) == A


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"owners": [0] * 7}, "a table of 7 for 8"),
        ({"generations": [1] * 9}, "a table of 8 for 8"),
        ({"bucket_count": 0, "owners": [], "generations": []}, "power of two"),
        ({"bucket_count": 6, "owners": [0] * 6, "generations": [1] * 6}, "power of two"),
        ({"endpoints": []}, "differ in number"),
        ({"owners": [0] * 7 + [1]}, "not in the table"),
        ({"owners": [0] * 7 + [-2]}, "not in the table"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(change: Any, complaint: str) -> None:
    good = {f: getattr(table(), f) for f in wire.Table.__struct_fields__}
    with pytest.raises(ProtocolError, match=complaint):
        Table(wire.Table(**{**good, **change}))


def test_a_client_tells_where_keys_lie_and_asks_nobody() -> None:
    desk = Desk()
    assert desk.ops.locate([K0, K1]) == [None, None]
    desk.router.install(table([A, None] * 4, generations=[3] * BUCKETS))
    assert desk.ops.locate([K0, K1]) == [Location(A, 0, 3), None]
    with pytest.raises(InvalidArgument, match="key: is empty"):
        desk.ops.locate([b""])


def test_a_cluster_with_another_number_of_buckets_ends_the_client() -> None:
    desk = Desk(table(AB))
    script = put(desk, K0, K1).answer(BROKEN, statuses(Status.MOVING)).pause()
    script.routes(table([A] * 16, generations=[1] * 16, revision=9))
    unsure, clear = outcomes(script)
    assert isinstance(unsure, Indeterminate)
    assert isinstance(clear, ClusterMismatch)
    assert "bucket_count = 16" in str(clear)


# --- a read may be sent again, to anyone


def test_a_lost_read_is_sent_to_the_new_owner() -> None:
    desk = Desk(table(AB))
    script = desk.start(desk.ops.batch_get([K0, K1]))
    script.answer(BROKEN, values(b"one")).pause().routes(table([B] * BUCKETS, revision=2))
    assert script.request.to == B
    assert script.request.body.keys == [K0]
    assert outcomes(script.answer(values(b"zero"))) == [b"zero", b"one"]


def test_a_lost_read_goes_to_the_same_member_if_the_ring_is_the_same() -> None:
    desk = Desk(table())
    first = (script := desk.start(desk.ops.batch_get([K0]))).request
    script.answer(BROKEN).pause().routes()
    assert script.request.to == A
    assert script.request is not first
    assert outcomes(script.answer(values(b"v"))) == [b"v"]


@pytest.mark.parametrize("status", [Status.NOT_PRIMARY, Status.MOVING, Status.STALLED])
def test_keys_that_are_not_served_are_asked_for_again_and_only_those(status: Status) -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0, K1, K2]))
    script.answer(values(b"zero", status, b"two")).pause()
    script.routes(table(AB, revision=2))
    assert (script.request.to, script.request.body.keys) == (B, [K1])
    assert outcomes(script.answer(values(b"one"))) == [b"zero", b"one", b"two"]


def test_values_that_did_not_fit_are_asked_for_at_once() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0, K1]))
    script.answer(values(b"zero", Status.DEFERRED))
    assert script.request.body.keys == [K1]
    assert outcomes(script.answer(values(b"one"))) == [b"zero", b"one"]


def test_an_answer_that_defers_everything_is_waited_after() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0, K1]))
    script.answer(values(Status.DEFERRED, Status.DEFERRED))
    assert isinstance(script.effect, Pause)
    script.pause().routes().give_up()
    assert all(isinstance(o, DeadlineExceeded) for o in outcomes(script))


def test_keys_without_an_owner_wait_for_one() -> None:
    desk = Desk(table([None, A] * 4))
    script = desk.start(desk.ops.batch_get([K0, K1]))
    assert script.request.body.keys == [K1]
    script.answer(values(b"one")).pause().routes(table(revision=2))
    assert script.request.body.keys == [K0]
    assert outcomes(script.answer(values(b"zero"))) == [b"zero", b"one"]


# --- a write is sent again as the same request, to the same member


def test_a_lost_write_is_repeated_as_the_same_request() -> None:
    desk = Desk(table(AB))
    first = (script := put(desk, K0)).request
    script.answer(BROKEN).pause().routes(table([B] * BUCKETS, revision=2, members=[A, B]))
    assert script.request is first, "the bucket moved, but only A knows whether the write ran"
    assert outcomes(script.answer(statuses())) == [1]


def test_a_repeated_write_that_did_not_run_goes_to_the_new_owner() -> None:
    desk = Desk(table(AB))
    first = (script := put(desk, K0)).request
    script.answer(BROKEN).pause().routes(table([B] * BUCKETS, revision=2, members=[A, B]))
    script.answer(statuses(Status.NOT_PRIMARY)).pause().routes()
    assert script.request is not first
    assert script.request.to == B
    assert outcomes(script.answer(statuses())) == [1]


def test_a_write_that_did_not_leave_goes_to_the_new_owner() -> None:
    desk = Desk(table(AB))
    script = put(desk, K0).answer(BROKEN, sent=False).pause()
    script.routes(table([B] * BUCKETS, revision=2, members=[A, B]))
    assert script.request.to == B
    assert outcomes(script.answer(statuses())) == [1]


def test_a_write_stays_unsure_when_its_repeat_does_not_leave() -> None:
    desk = Desk(table(AB))
    script = put(desk, K0).answer(BROKEN).pause().routes()
    script.request.sent = False
    script.answer(BROKEN, sent=False).pause()
    script.routes(table([B] * BUCKETS, revision=2))
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Indeterminate)


@pytest.mark.parametrize("fault", [Fault.NOT_READY, Fault.SESSIONS_MAX, Fault.NO_SESSION])
def test_a_write_that_was_refused_as_a_whole_is_sent_anew(fault: Fault) -> None:
    desk = Desk(table())
    first = (script := put(desk, K0)).request
    script.answer(refused(fault)).pause().routes()
    assert script.request is not first
    assert outcomes(script.answer(statuses())) == [1]


@pytest.mark.parametrize("fault", [Fault.NOT_READY, Fault.SESSIONS_MAX])
def test_a_repeat_that_was_refused_for_now_is_repeated(fault: Fault) -> None:
    desk = Desk(table())
    first = (script := put(desk, K0)).request
    script.answer(BROKEN).pause().routes().answer(refused(fault)).pause().routes()
    assert script.request is first
    assert outcomes(script.answer(statuses())) == [1]


@pytest.mark.parametrize("fault", [Fault.NO_SESSION, Fault.FORGOTTEN])
def test_a_repeat_to_a_member_that_forgot_is_indeterminate(fault: Fault) -> None:
    desk = Desk(table())
    script = put(desk, K0).answer(BROKEN).pause().routes().answer(refused(fault, "forgot"))
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Indeterminate)
    assert repr(K0) in str(outcome)
    assert "forgot" in str(outcome)


# --- when its member has left the ring


def test_a_write_whose_member_left_is_indeterminate_while_the_bucket_lives() -> None:
    desk = Desk(table(AB))
    script = put(desk, K0, K1).answer(BROKEN, statuses()).pause()
    script.routes(table([B] * BUCKETS, revision=2))
    unsure, stored = outcomes(script)
    assert isinstance(unsure, Indeterminate)
    assert "a@1 left" in str(unsure)
    assert repr(K0) in str(unsure)
    assert stored == 1


def test_a_write_whose_member_left_goes_to_the_next_owner_if_the_bucket_began_anew() -> None:
    desk = Desk(table())
    script = put(desk, K0, K1).answer(BROKEN).pause()
    script.routes(table([B] * BUCKETS, generations=[2] + [1] * 7, revision=2))
    assert (script.request.to, script.request.body.keys) == (B, [K0])
    stored, unsure = outcomes(script.answer(statuses()))
    assert stored == 1
    assert isinstance(unsure, Indeterminate)


def test_what_counts_is_the_generation_at_the_last_attempt() -> None:
    desk = Desk(table(AB))
    script = put(desk, K0).answer(BROKEN).pause()
    script.routes(table(AB, generations=[2] * BUCKETS, revision=2))
    script.answer(BROKEN).pause()  # it may have run in generation 2
    script.routes(table([B] * BUCKETS, generations=[2] * BUCKETS, revision=3))
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Indeterminate)


# --- an answer that makes no sense


@pytest.mark.parametrize(
    "nonsense",
    [
        values(b"v"),
        statuses(0, 0),
        statuses(Status.LARGE),
        reply(wire.Matched(1, 0)),
    ],
)
def test_nonsense_for_a_write(nonsense: Reply) -> None:
    desk = Desk(table())
    (outcome,) = outcomes(put(desk, K0).answer(nonsense))
    assert isinstance(outcome, (Indeterminate, ProtocolError))
    assert isinstance(outcome, Indeterminate) or "unexpected status" in str(outcome)
    assert repr(K0) in str(outcome)


@pytest.mark.parametrize(
    ("nonsense", "complaint"),
    [
        (statuses(0), "STATUSES|VALUES was expected"),
        (values(b"a", b"b"), "2 values for 1 keys"),
        (reply(wire.Values(b"\0\0", [1], []), b"x"), "2 statuses for 1 keys"),
        (reply(wire.Values(b"", [1], [], b"\0\0"), b"x"), "2 marks for 1 keys"),
        (reply(wire.Values(b"", [2], []), b"x"), "1 bytes for a value of 2"),
        (reply(wire.Values(b"", [2], [5]), b"x"), "outside of the payload"),
        (values(Status.EXISTS), "unexpected status 5"),
        (reply(wire.Values(bytes([99]), [0], [])), "unexpected status 99"),
    ],
)
def test_nonsense_for_a_read_is_an_error_of_its_keys_alone(nonsense: Reply, complaint: str) -> None:
    desk = Desk(table(AB))
    script = desk.start(desk.ops.batch_get([K0, K1])).answer(nonsense, values(b"one"))
    failed, good = outcomes(script)
    assert isinstance(failed, ProtocolError)
    assert repr(K0) in str(failed)
    with pytest.raises(ProtocolError, match=complaint):
        raise failed
    assert good == b"one"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.BAD_REQUEST, ProtocolError),
        (Fault.VERSION, ProtocolError),
        (Fault.CLUSTER, ClusterMismatch),
        (Fault.INTERNAL, Indeterminate),
    ],
)
def test_a_final_refusal_of_a_write(fault: Fault, kind: type[P2PKVError]) -> None:
    (outcome,) = outcomes(put(Desk(table()), K0).answer(refused(fault, "because")))
    assert type(outcome) is kind
    assert "because" in str(outcome)
    assert repr(K0) in str(outcome)


def test_a_read_that_failed_inside_of_the_node_is_an_error() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0])).answer(refused(Fault.INTERNAL))
    (outcome,) = outcomes(script)
    assert isinstance(outcome, ProtocolError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.MISS, Miss),
        (Status.OUT_OF_MEMORY, OutOfMemory),
        (Status.QUOTA, QuotaExceeded),
        (Status.TOO_LARGE, TooLarge),
        (Status.CONFLICT, Conflict),
        (Status.CORRUPT, CorruptValue),
        (Status.INVALID, InvalidArgument),
        (Status.INDETERMINATE, Indeterminate),
        (77, ProtocolError),
    ],
)
def test_each_status_has_its_error_which_names_the_key(status: int, kind: type[P2PKVError]) -> None:
    script = put(Desk(table(AB)), K0, K1).answer(statuses(status), statuses())
    failed, stored = outcomes(script)
    assert type(failed) is kind
    assert repr(K0) in str(failed)
    assert stored == 1


def test_a_long_key_is_cut_in_messages() -> None:
    assert len(str(error_of(Status.MISS, b"k" * 1024))) < 120


# --- everything ends at the deadline


def test_the_deadline_of_a_call_is_that_of_its_exchanges() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0], timeout=2.5))
    assert script.effect.deadline_ns == desk.now + round(2.5 * SECOND_NS)
    script = desk.start(desk.ops.batch_get([K0]))
    assert script.effect.deadline_ns == desk.now + 5 * SECOND_NS


def test_a_read_without_an_answer_exceeds_its_deadline() -> None:
    desk = Desk(table())
    (outcome,) = outcomes(desk.start(desk.ops.batch_get([K0])).answer(LATE))
    assert isinstance(outcome, DeadlineExceeded)
    assert repr(K0) in str(outcome)


def test_a_write_without_an_answer_is_indeterminate() -> None:
    (outcome,) = outcomes(put(Desk(table()), K0).answer(LATE))
    assert isinstance(outcome, Indeterminate)
    assert repr(K0) in str(outcome)


def test_a_write_that_waited_for_its_turn_until_the_deadline_exceeds_it() -> None:
    (outcome,) = outcomes(put(Desk(table()), K0).answer(LATE, sent=False))
    assert isinstance(outcome, DeadlineExceeded)


@pytest.mark.parametrize("status", [Status.NOT_PRIMARY, Status.MOVING, Status.STALLED])
def test_a_bucket_that_is_not_served_until_the_deadline_is_stalled(status: Status) -> None:
    script = put(Desk(table()), K0).answer(statuses(status)).pass_time(9).give_up()
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Stalled)
    assert status.name.lower() in str(outcome)
    assert repr(K0) in str(outcome)


def test_no_connection_until_the_deadline_is_unreachable() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0])).pass_time(9).answer(BROKEN)
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Unreachable)
    assert "connection lost" in str(outcome)
    assert repr(K0) in str(outcome)


def test_no_owner_until_the_deadline_is_unreachable() -> None:
    desk = Desk(table([None] * BUCKETS, members=[A]))
    script = desk.start(desk.ops.batch_get([K0])).pause().pass_time(9).give_up()
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Unreachable)
    assert "no owner" in str(outcome)


def test_nothing_is_sent_after_the_deadline() -> None:
    desk = Desk(table())
    script = put(desk, K0).answer(statuses(Status.MOVING)).pause().pass_time(9)
    script.routes()  # the answer came late
    (outcome,) = outcomes(script)
    assert isinstance(outcome, Stalled)


def test_outcomes_of_the_others_stay_when_one_key_fails() -> None:
    desk = Desk(table())
    script = put(desk, K0, K1, K2).answer(statuses(0, Status.STALLED, Status.OUT_OF_MEMORY))
    stored, stalled, full = outcomes(script.pass_time(9).give_up())
    assert stored == 1
    assert isinstance(stalled, Stalled)
    assert isinstance(full, OutOfMemory)


def test_waits_grow_up_to_their_bound_with_jitter() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0], timeout=900))
    waits = []
    for _ in range(14):
        script.answer(values(Status.MOVING))
        waits.append(script.effect.duration_ns)
        script.pause().routes()
    for i, wait in enumerate(waits):
        cap = min(BACKOFF_LAST_NS, MILLISECOND_NS << i)
        assert cap // 2 <= wait <= cap
    assert len(set(waits)) == len(waits)


def test_a_wait_does_not_pass_the_deadline() -> None:
    desk = Desk(table())
    script = desk.start(desk.ops.batch_get([K0])).pass_time(5 - 1e-7)
    script.answer(values(Status.MOVING))
    assert script.effect.duration_ns == 100
    assert script.pause().done


def test_keyed_is_made_complete_by_its_kinds() -> None:
    op = Keyed([K0], [0])
    with pytest.raises(NotImplementedError):
        op.request(A, [0])
    with pytest.raises(NotImplementedError):
        op.absorb([0], values(b""))


def test_a_request_says_nothing_of_itself_before_it_is_sent() -> None:
    request = Request(A, Kind.PING, wire.Empty())
    assert (request.id, request.sent, request.payload) == (0, False, ())
