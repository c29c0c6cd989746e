from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest

from p2pkv import ConfigError, ring
from p2pkv.adapters.lmcache.locks import Locks
from p2pkv.adapters.lmcache.names import KEY_BYTES_MAX, EngineNames, ObjectNames
from p2pkv.adapters.lmcache.options import read
from p2pkv.adapters.lmcache.tasks import Tasks


def key(**changes: Any) -> Any:
    fields = {
        "chunk_hash": b"\x01\x02", "model_name": "m", "kv_rank": 1, "object_group_id": 0,
        "cache_salt": "",
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


# -- names


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_hash": b"\x01\x03"},
        {"model_name": "n"},
        {"kv_rank": 2},
        {"object_group_id": 1},
        {"cache_salt": "alice"},
    ],
)
def test_every_field_of_a_key_is_in_its_name(change: dict[str, Any]) -> None:
    assert ObjectNames("").of(key()) != ObjectNames("").of(key(**change))


def test_namespaces_and_encodings_are_kept_apart() -> None:
    one = SimpleNamespace(to_string=lambda: "m@1@0@ff@float")
    names = [
        EngineNames("", "naive", True),
        EngineNames("", "naive", False),
        EngineNames("", "cachegen", True),
        EngineNames("x", "naive", True),
    ]
    assert len({each.of(one) for each in names}) == 4


def test_a_model_s_name_does_not_decide_where_all_its_chunks_lie() -> None:
    names = [ObjectNames("").of(key(model_name="{m}", chunk_hash=bytes([i]))) for i in range(8)]
    assert len(set(map(ring.route, names))) == 8


def test_long_names_are_cut_and_stay_distinct() -> None:
    names = {
        ObjectNames("").of(key(model_name="m" * 2000, chunk_hash=bytes([i]))) for i in range(2)
    }
    assert {len(name) for name in names} == {KEY_BYTES_MAX}
    assert len(names) == 2


# -- options


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"lock_ttl": 1}, "lock_ttl"),
        ({"lock_ttl_s": 0}, "lock_ttl_s"),
        ({"namespace": "a/b"}, "namespace"),
        ("x", "p2pkv"),
    ],
)
def test_bad_options_are_named(params: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(params)


# -- locks


def test_a_key_is_free_after_as_many_unlocks_as_locks() -> None:
    locks = Locks(100)
    locks.lock([b"a", b"b"], 0)
    locks.lock([b"a"], 1)
    assert locks.unlock([b"a", b"b"], 2) == [b"b"]
    assert locks.unlock([b"a", b"b"], 3) == [b"a"]
    assert len(locks) == 0


def test_what_was_never_locked_is_not_unpinned() -> None:
    assert Locks(100).unlock([b"a"], 0) == []


def test_locks_that_are_never_taken_back_end_with_their_time() -> None:
    locks = Locks(100)
    locks.lock([b"a"], 0)
    locks.lock([b"b"], 50)
    locks.lock([b"c"], 100)
    assert (len(locks), locks.reaped_total) == (2, 1)
    assert locks.unlock([b"a", b"b"], 101) == [b"b"]


def test_a_lock_that_is_taken_again_is_prolonged() -> None:
    locks = Locks(100)
    locks.lock([b"a"], 0)
    locks.lock([b"b"], 10)
    locks.lock([b"a"], 90)
    assert locks.unlock([b"b"], 150) == []
    assert locks.unlock([b"a"], 150) == []
    assert locks.unlock([b"a"], 150) == [b"a"]


def test_no_more_keys_are_known_than_the_limit() -> None:
    locks = Locks(100, keys_max=2)
    locks.lock([b"a", b"b", b"c"], 0)
    assert (len(locks), locks.reaped_total) == (2, 1)
    assert locks.unlock([b"a", b"b", b"c"], 1) == [b"b", b"c"]


# -- tasks


class Notifier:
    """An event descriptor, as LMCache's."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def consume(self) -> int:
        try:
            return os.eventfd_read(self._fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self._fd)


def test_a_result_is_announced_and_given_once() -> None:
    notifier = Notifier()
    tasks: Tasks[str] = Tasks(notifier, itertools.count(1))
    first, second = tasks.begin(), tasks.begin()
    assert (tasks.pop(first), notifier.consume()) == (None, 0)
    tasks.finish(first, "a")
    tasks.finish(second, "b")
    assert notifier.consume() == 2
    assert (tasks.pop(second), tasks.pop(second)) == ("b", None)
    assert (tasks.pop_all(), tasks.pop_all()) == ({first: "a"}, {})
    tasks.close()


def test_nothing_is_announced_after_the_end() -> None:
    tasks: Tasks[str] = Tasks(Notifier(), itertools.count(1))
    task = tasks.begin()
    tasks.close()
    tasks.close()
    tasks.finish(task, "late")
    assert tasks.pop(task) is None
