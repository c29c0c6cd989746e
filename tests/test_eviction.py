from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.eviction import LRU, EvictionPolicy


def lru(plain: str = "", soft: str = "") -> LRU[str]:
    policy: LRU[str] = LRU()
    for entry in plain:
        policy.add(entry)
    for entry in soft:
        policy.add(entry, soft=True)
    return policy


def drain(policy: EvictionPolicy[str]) -> str:
    out = ""
    for entry in policy.victims():
        policy.remove(entry)
        out += entry
    return out


def test_the_entry_that_was_added_first_goes_first() -> None:
    assert drain(lru("abc")) == "abc"


def test_a_touched_entry_goes_last() -> None:
    policy = lru("abc")
    policy.touch("a")
    assert drain(policy) == "bca"


def test_soft_pinned_entries_go_after_all_others() -> None:
    policy = lru("cd", soft="ab")
    policy.touch("c")
    assert drain(policy) == "dcab"


def test_touching_a_soft_pinned_entry_orders_it_among_its_like() -> None:
    policy = lru("c", soft="ab")
    policy.touch("a")
    assert drain(policy) == "cba"


def test_a_batch_loses_its_tail_first() -> None:
    policy = lru("xabcy")
    policy.touch_batch(["a", "b", "c"])
    assert drain(policy) == "xycba"


def test_a_batch_may_hold_soft_entries_and_strangers() -> None:
    policy = lru("abx", soft="st")
    policy.touch_batch(["a", "s", "stranger", "b"])
    assert drain(policy) == "xbats"


def test_touching_a_stranger_changes_nothing() -> None:
    policy = lru("ab")
    policy.touch("z")
    assert "z" not in policy
    assert drain(policy) == "ab"


def test_removing_a_stranger_raises() -> None:
    with pytest.raises(KeyError):
        lru("ab").remove("z")


def test_a_removed_entry_is_no_victim() -> None:
    policy = lru("ab", soft="s")
    policy.remove("a")
    policy.remove("s")
    assert len(policy) == 1
    assert drain(policy) == "b"


def test_a_victim_that_is_left_counts_as_touched() -> None:
    policy = lru("abc", soft="s")
    seen = []
    for entry in policy.victims():
        seen.append(entry)
        if entry == "b":
            policy.remove(entry)
    assert seen == ["a", "b", "c", "s"]
    assert drain(policy) == "acs"


def test_looking_at_the_first_victim_changes_nothing() -> None:
    policy = lru("abc")
    assert next(policy.victims()) == "a"
    assert drain(policy) == "abc"


def test_an_emptied_queue_ends_the_victims() -> None:
    policy = lru("ab")
    for entry in policy.victims():
        assert entry == "a"
        policy.remove("a")
        policy.remove("b")
    assert len(policy) == 0
    assert drain(policy) == ""


def test_validate_finds_an_entry_in_both_queues() -> None:
    policy = lru("a", soft="a")
    with pytest.raises(AssertionError, match="both plain and soft"):
        policy.validate()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_order_is_that_of_a_list(seed: int) -> None:
    rng = random.Random(seed)
    policy: LRU[int] = LRU()
    model: dict[bool, list[int]] = {False: [], True: []}
    soft_of: dict[int, bool] = {}

    def touch(entry: int) -> None:
        queue = model[soft_of[entry]]
        queue.remove(entry)
        queue.append(entry)

    for step in range(120):
        action = rng.randrange(4)
        if action == 0 or not soft_of:
            soft_of[step] = rng.random() < 0.3
            policy.add(step, soft_of[step])
            model[soft_of[step]].append(step)
        elif action == 1:
            entry = rng.choice(list(soft_of))
            policy.touch(entry)
            touch(entry)
        elif action == 2:
            batch = rng.sample(list(soft_of), rng.randint(1, len(soft_of)))
            policy.touch_batch(batch)
            for entry in reversed(batch):
                touch(entry)
        else:
            entry = rng.choice(list(soft_of))
            policy.remove(entry)
            model[soft_of.pop(entry)].remove(entry)
        policy.validate()
        assert len(policy) == len(soft_of)
    assert list(policy.victims()) == model[False] + model[True]


def test_replacing_a_batch_is_removing_adding_and_touching_it() -> None:
    one, other = LRU[str](), LRU[str]()
    for policy in (one, other):
        for entry in "abcd":
            policy.add(entry)
    one.replace_batch("bd", "xyz")
    for entry in "bd":
        other.remove(entry)
    for entry in "xyz":
        other.add(entry)
    other.touch_batch("xyz")
    assert list(one.victims()) == list(other.victims())
