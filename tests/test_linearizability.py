"""The checker of histories, against itself, a brute-force one, and histories with known faults."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.testing.linearizability import Kind, Operation, TooComplex, check

GET, PUT, IF_ABSENT, DELETE = Kind.GET, Kind.PUT, Kind.PUT_IF_ABSENT, Kind.DELETE


def put(value: Any, called: int, returned: int | None) -> Operation:
    return Operation(PUT, called, returned, value)


def get(result: Any, called: int, returned: int | None) -> Operation:
    return Operation(GET, called, returned, result=result)


def if_absent(value: Any, stored: bool, called: int, returned: int | None) -> Operation:
    return Operation(IF_ABSENT, called, returned, value, stored)


def delete(there: bool, called: int, returned: int | None) -> Operation:
    return Operation(DELETE, called, returned, result=there)


LINEARIZABLE = {
    "nothing": [],
    "a read of what was written": [put(1, 0, 1), get(1, 2, 3)],
    "a read beside a write sees it or not": [put(1, 0, 9), get(None, 1, 2), get(1, 3, 4)],
    "writes side by side come in either order": [put(1, 0, 9), put(2, 1, 8), get(1, 10, 11)],
    "an unknown write may be done": [put(1, 0, None), get(None, 2, 3), get(1, 4, 5)],
    "an unknown write may not be done": [put(1, 0, None), get(None, 2, 3)],
    "an unknown delete explains a miss": [put(1, 0, 1), delete(True, 2, None), get(None, 8, 9)],
    "a refused put sees an unread value": [put(1, 0, None), if_absent(2, False, 3, 4)],
    "what touches is concurrent": [put(1, 0, 5), get(None, 5, 6)],
    "of two conditional puts one wins": [if_absent(1, True, 0, 9), if_absent(2, False, 1, 8)],
    "deleted and put again": [
        put(1, 0, 1), delete(True, 2, 3), if_absent(2, True, 4, 5), get(2, 6, 7),
    ],
    "an unknown conditional put after a delete": [
        put(1, 0, 1), if_absent(2, True, 2, None), delete(True, 3, 4), get(2, 5, 6),
    ],
}  # fmt: skip

VIOLATIONS = {
    "a lost write": [put(1, 0, 1), get(None, 2, 3)],
    "a stale read": [put(1, 0, 1), put(2, 2, 3), get(1, 4, 5)],
    "a value from nowhere": [get(7, 0, 1)],
    "a value before it is written": [get(1, 0, 1), put(1, 2, 3)],
    "back to the old value": [put(1, 0, 10), put(2, 1, 9), get(1, 11, 12), get(2, 13, 14),
                              get(1, 15, 16)],
    "an unknown write taken back": [put(1, 0, None), get(1, 2, 3), get(None, 4, 5)],
    "an unknown write done twice": [
        put(1, 0, None), get(1, 2, 3), put(2, 4, 5), get(2, 6, 7), get(1, 8, 9),
    ],
    "a deleted value comes back": [put(1, 0, 1), delete(True, 2, 3), get(1, 4, 5)],
    "two conditional puts both win": [if_absent(1, True, 0, 9), if_absent(2, True, 1, 8)],
    "a put refused by nothing": [if_absent(1, False, 0, 1)],
    "a delete finds nothing": [put(1, 0, 1), delete(False, 2, 3)],
    "a delete finds what is not there": [delete(True, 0, 1)],
    "reads that see writes in opposite orders": [
        put(1, 0, 20), put(2, 0, 20), get(1, 1, 2), get(2, 3, 4), get(1, 5, 6),
    ],
}  # fmt: skip


@pytest.mark.parametrize("history", LINEARIZABLE.values(), ids=LINEARIZABLE.keys())
def test_is_linearizable(history: list[Operation]) -> None:
    assert check(history) is None


@pytest.mark.parametrize("history", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_is_a_violation(history: list[Operation]) -> None:
    assert check(history) is not None


EXPLAINED_BY_EVICTION = {
    "a miss": [put(1, 0, 1), get(None, 2, 3)],
    "a delete that finds nothing": [put(1, 0, 1), delete(False, 2, 3)],
    "a conditional put that finds nothing": [put(1, 0, 1), if_absent(2, True, 2, 3), get(2, 4, 5)],
}
NOT_EXPLAINED_BY_EVICTION = {
    "a value that comes back after a miss": [put(1, 0, 1), get(None, 2, 3), get(1, 4, 5)],
    "a stale read": [put(1, 0, 1), put(2, 2, 3), get(1, 4, 5)],
    "a value that two conditional puts stored": [
        if_absent(1, True, 0, 1), if_absent(2, True, 2, 3), get(1, 4, 5)
    ],
    "a put refused by nothing": [if_absent(1, False, 0, 1)],
}  # fmt: skip


@pytest.mark.parametrize(
    "history", EXPLAINED_BY_EVICTION.values(), ids=EXPLAINED_BY_EVICTION.keys()
)
def test_a_cache_may_forget(history: list[Operation]) -> None:
    assert check(history) is not None
    assert check(history, evictions=True) is None


@pytest.mark.parametrize(
    "history", NOT_EXPLAINED_BY_EVICTION.values(), ids=NOT_EXPLAINED_BY_EVICTION.keys()
)
def test_a_cache_may_not_invent(history: list[Operation]) -> None:
    assert check(history, evictions=True) is not None


def test_the_initial_value_can_be_given() -> None:
    assert check([get(1, 0, 1)], initial=1) is None
    assert check([if_absent(2, False, 0, 1)], initial=1) is None
    assert check([get(None, 0, 1)], initial=1) is not None


def test_a_violation_shows_the_operation_and_what_led_to_it() -> None:
    history = [
        Operation(PUT, 1_000_000_000, 1_001_000_000, "v1", client="c1"),
        Operation(PUT, 2_000_000_000, 2_250_000_000, "v2", client="c2"),
        Operation(PUT, 2_100_000_000, None, "v3", client="c3"),
        Operation(GET, 3_000_000_000, 3_000_500_000, result="v1", client="c4"),
        Operation(GET, 4_000_000_000, 4_000_500_000, result="v2", client="c5"),
    ]
    violation = check(history)
    assert violation is not None
    assert violation.operation is history[3]
    assert violation.possible == ("v2",)
    assert violation.window == tuple(history[:4])
    lines = str(violation).splitlines()
    assert lines[0].endswith("the value could be: v2")
    assert lines[1] == "   0.000000 s to  0.001000 s        c1  put v1 -> ok"
    assert lines[3].endswith("c3  put v3 -> ?")
    assert lines[4] == "   2.000000 s to  2.000500 s        c4  get -> v1   <<<"


# -- against brute force


def possible(history: Sequence[Operation], evictions: bool) -> bool:
    """Whether any order of any choice of the unknown operations explains the history."""
    known = [op for op in history if op.returned is not None]
    unknown = [op for op in history if op.returned is None]
    chosen = itertools.chain.from_iterable(
        itertools.combinations(unknown, n) for n in range(len(unknown) + 1)
    )
    return any(
        explains(order, evictions)
        for some in chosen
        for order in itertools.permutations([*known, *some])
        if in_time(order)
    )


def in_time(order: Sequence[Operation]) -> bool:
    pairs = itertools.combinations(order, 2)
    return not any(b.returned is not None and b.returned < a.called for a, b in pairs)


def explains(order: Sequence[Operation], evictions: bool) -> bool:
    """With evictions, a value vanishes as late as it can: when its absence is seen, or may be."""
    value: Any = None
    for op in order:
        known = op.returned is not None
        if evictions and (sees_nothing(op) if known else op.kind is IF_ABSENT):
            value = None
        result, after = apply(op, value)
        if op.returned is not None and op.kind is not PUT and result != op.result:
            return False
        value = after
    return True


def sees_nothing(op: Operation) -> bool:
    return {GET: op.result is None, IF_ABSENT: op.result is True, DELETE: op.result is False}.get(
        op.kind, False
    )


def apply(op: Operation, value: Any) -> tuple[Any, Any]:
    """The result and the new value."""
    if op.kind is GET:
        return value, value
    if op.kind is PUT:
        return None, op.value
    if op.kind is IF_ABSENT:
        return value is None, op.value if value is None else value
    return value is not None, None


@st.composite
def any_operation(draw: st.DrawFn) -> Operation:
    called = draw(st.integers(0, 12))
    returned = draw(st.one_of(st.none(), st.integers(called, called + 6)))
    kind = draw(st.sampled_from(Kind))
    value = draw(st.integers(1, 2))
    if kind is GET:
        return get(draw(st.sampled_from([None, 1, 2])), called, returned)
    return Operation(kind, called, returned, value, draw(st.booleans()))


@settings(max_examples=1500, deadline=None)
@given(st.lists(any_operation(), max_size=6), st.booleans())
def test_agrees_with_brute_force(history: list[Operation], evictions: bool) -> None:
    assert (check(history, evictions=evictions) is None) == possible(history, evictions)


# -- histories of a real register


def executed(rng: random.Random, operations: int, clients: int, unknown: float = 0.0,
             values: int = 0) -> list[Operation]:  # fmt: skip
    """What clients of one register see that takes their operations one at a time.

    Each value is put once, or is one of ``values``. ``unknown``: the share of the operations
    whose outcome the client does not learn; half of them are never done.
    """
    free = [0] * clients
    plans = []
    for n in range(operations):
        client = min(range(clients), key=lambda c: (free[c], c))
        called = free[client] + rng.randrange(1, 5)
        instant = called + rng.randrange(1, 100)
        free[client] = instant + rng.randrange(1, 100)
        kind = rng.choices([GET, PUT, IF_ABSENT, DELETE], [4, 4, 1, 1])[0]
        value = rng.randrange(1, values + 1) if values else n + 1
        plans.append(
            (instant, n, Operation(kind, called, free[client], value, client=f"c{client}"))
        )
    history, value = [], None
    for _, _, op in sorted(plans):
        lost = rng.random() < unknown
        if lost and rng.random() < 0.5:
            result, after = None, value
        else:
            result, after = apply(op, value)
        history.append(op._replace(result=result, returned=None if lost else op.returned))
        value = after
    return history


histories = st.builds(
    executed,
    st.randoms(use_true_random=False),
    st.integers(0, 60),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0, 3]),
)


def test_a_put_if_absent_of_unknown_outcome_may_have_followed_an_eviction() -> None:
    history = [
        Operation(PUT, 0, 1, 6),
        Operation(IF_ABSENT, 2, None, 11),
        Operation(GET, 3, 4, result=11),
    ]
    assert check(history, evictions=True) is None
    assert check(history) is not None


@settings(max_examples=300, deadline=None)
@given(histories, st.booleans())
def test_a_real_register_s_history_passes(history: list[Operation], evictions: bool) -> None:
    assert check(history, evictions=evictions) is None


@settings(max_examples=300, deadline=None)
@given(histories, st.randoms(use_true_random=False))
def test_a_get_of_a_value_overwritten_before_fails(
    history: list[Operation], rng: random.Random
) -> None:
    end = 1 + max([0, *(op.returned or op.called for op in history)])
    settled = [put("old", end, end + 1), put("new", end + 2, end + 3)]
    reads = [get("new", end + 3 + n, end + 20) for n in range(rng.randrange(4))]
    stale = get("old", end + 4, end + 5)
    assert check([*history, *settled, *reads]) is None
    assert check([*history, *settled, *reads, stale]) is not None


def mutations(history: list[Operation]) -> Iterator[list[Operation]]:
    """The history with the result of one operation changed to what it cannot have been."""
    for n, op in enumerate(history):
        if op.returned is not None and op.kind is GET:
            yield [*history[:n], op._replace(result="foreign"), *history[n + 1 :]]
        elif op.returned is not None and op.kind in (IF_ABSENT, DELETE):
            yield [*history[:n], op._replace(result=not op.result), *history[n + 1 :]]


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_one_client_s_history_with_any_wrong_result_fails(rng: random.Random, size: int) -> None:
    history = executed(rng, size, 1)
    assert check(history) is None
    for mutant in mutations(history):
        assert check(mutant) is not None


@pytest.mark.parametrize("unknown", [0.0, 0.03])
@pytest.mark.parametrize("evictions", [False, True])
def test_two_thousand_operations_of_eight_clients_take_about_a_second(
    unknown: float, evictions: bool
) -> None:
    history = executed(random.Random(7), 2000, 8, unknown)
    began = time.process_time()
    assert check(history, evictions=evictions) is None
    assert time.process_time() - began < 4.0  # a loaded machine: far from exponential, all the same


def test_what_is_too_complex_is_said_to_be() -> None:
    crowd = [put(n, 0, 1000) for n in range(24)]
    reads = [get(n, 1 + 2 * n, 2 + 2 * n) for n in range(23)]
    with pytest.raises(TooComplex, match="more than 500 configurations"):
        check([*crowd, *reversed(reads), get(23, 900, 901)], configurations_max=500)
