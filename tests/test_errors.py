"""What the errors promise."""

from __future__ import annotations

import inspect

import pytest

from p2pkv import errors
from p2pkv.errors import BatchError, Indeterminate, Miss, NotEnoughReplicas, P2PKVError, Unreachable

KINDS: list[type[P2PKVError]] = [
    e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, P2PKVError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_few_errors_leave_open_whether_a_write_took_effect(kind: type[P2PKVError]) -> None:
    assert kind.may_have_taken_effect == (kind in (Indeterminate, NotEnoughReplicas))


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k is not BatchError], ids=lambda k: k.__name__
)
def test_a_message_reads_as_it_was_written(kind: type[P2PKVError]) -> None:
    assert str(kind("key b'k' is gone")) == "key b'k' is gone"  # KeyError would quote it
    assert str(kind()) == kind.__name__


def test_a_batch_error_holds_each_outcome_and_tells_the_first_reason() -> None:
    error = BatchError([1, Unreachable("far"), None, Miss("gone")])
    assert str(error) == "2 of 4 keys failed; first: Unreachable: far"
    assert [type(f) for f in error.failures] == [Unreachable, Miss]
    assert error.results[0] == 1
    assert not error.indeterminate
    assert BatchError([Indeterminate("who knows")]).indeterminate
