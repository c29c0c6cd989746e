"""The published index alone: what a reader may be told, and when it is told to ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pkv import _native
from p2pkv.errors import ConfigError
from p2pkv.objects import HEADER_BYTES, Object
from tests.indexside import (
    BUCKETS,
    FOR_EVER,
    Place,
    an_object,
    clear,
    fill,
    open_all,
    place,
    soon,
)

pytestmark = pytest.mark.skipif(not _native.available, reason="the native extension is not built")

if _native.available:
    from p2pkv._native import index

THERE, ASK = b"\1", b"\0"


@pytest.fixture
def spot() -> Iterator[Place]:
    with place() as made:
        yield made


class TestReading:
    def test_a_published_key_is_there_and_others_are_to_be_asked_for(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object(b"a"), an_object(b"b")])
        assert reader.exists([b"a", b"c", b"b"]) == THERE + ASK + THERE
        writer.close()

    def test_text_is_taken_as_utf8(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object("ä".encode())])
        assert reader.exists(["ä", "a"]) == THERE + ASK
        writer.close()

    @pytest.mark.parametrize("key", [b"", b"k" * 129, 7, None, "\ud800", bytearray(b"a")])
    def test_what_is_no_key_of_the_index_is_left_to_others(self, spot: Place, key: object) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object(b"a")])
        assert reader.exists([key, b"a"]) == ASK + THERE
        writer.close()

    @pytest.mark.parametrize("length", [1, 7, 8, 9, 127, 128])
    def test_keys_of_all_lengths_are_told_apart(self, spot: Place, length: int) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object(b"k" * length)])
        keys = [b"k" * n for n in range(1, 129)]
        assert reader.exists(keys) == bytes(n == length for n in range(1, 129))
        writer.close()

    def test_values_are_copied_to_where_they_are_wanted(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        items = [an_object(b"k%d" % i, 64 + 4096 * i, 100 * i, i + 1) for i in range(8)]
        arena = spot.mapped()[0]
        for i, item in enumerate(items):
            fill(arena, item, bytes([i]) * item.size)
        writer.publish(items)
        targets = [bytearray(1000) for _ in items]
        assert reader.get_into([o.key for o in items], targets) == [100 * i for i in range(8)]
        assert [bytes(t[: 100 * i]) for i, t in enumerate(targets)] == [
            bytes([i]) * 100 * i for i in range(8)
        ]
        assert reader.get([b"k3", b"none"], 1 << 20) == [b"\3" * 300, None]
        writer.close()

    def test_places_are_told_of_what_is_there_and_count_as_uses(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"a", 4096, 100, version=7)
        writer.publish([item])
        found = (0, 4096, 100, 7)
        assert reader.places([b"a", b"c", "a", None]) == [found, None, found, None]
        assert writer.take_use(item.slot)
        assert writer.figures().hits == 2
        writer.close()
        assert reader.places([b"a"]) == [None]

    @pytest.mark.parametrize(
        "target", [bytearray(99), b"\0" * 200, memoryview(bytearray(400))[::2], None, (1, 2)]
    )
    def test_what_is_wrong_with_a_target_is_left_to_others(
        self, spot: Place, target: object
    ) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"a", size=100)
        fill(spot.mapped()[0], item, b"x" * 100)
        writer.publish([item])
        assert reader.get_into([b"a"], [target]) == [None]
        writer.close()

    def test_a_value_whose_header_changed_is_not_taken(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"a", size=8)
        arena = spot.mapped()[0]
        fill(arena, item, b"12345678")
        writer.publish([item])
        clear(arena, item)
        assert reader.get([b"a"], 100) == [None]
        item.version = 2
        fill(arena, item, b"12345678")
        assert reader.get_into([b"a"], [bytearray(8)]) == [None]
        assert writer.figures().torn == 2
        writer.close()

    def test_a_place_outside_of_the_arena_is_not_looked_at(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        end = spot.arena_bytes
        items = [
            an_object(b"a", 0),
            an_object(b"b", end),
            an_object(b"c", end - 32),
        ]
        writer.publish([*items, an_object(b"d", end + (1 << 40))])
        assert reader.get([b"a", b"b", b"c", b"d"], 1 << 20) == [None] * 4
        writer.close()

    def test_values_beyond_what_is_wanted_together_are_left(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        arena = spot.mapped()[0]
        items = [an_object(b"%d" % i, 64 + 4096 * i, 100, i + 1) for i in range(3)]
        for item in items:
            fill(arena, item, b"v" * 100)
        writer.publish(items)
        assert reader.get([b"0", b"1", b"2"], 250) == [b"v" * 100, b"v" * 100, None]
        writer.close()

    def test_the_node_learns_what_was_read(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"a", size=8)
        fill(spot.mapped()[0], item, b"12345678")
        writer.publish([item])
        reader.exists([b"a"])
        assert not writer.take_use(item.slot)
        reader.get([b"a"], 100)
        assert (writer.take_use(item.slot), writer.take_use(item.slot)) == (True, False)
        assert writer.figures().hits == 2
        writer.close()


class TestGates:
    def test_nothing_is_told_of_a_bucket_whose_gate_is_closed(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        writer.publish([an_object(b"a", bucket=3), an_object(b"b", bucket=4)])
        assert reader.exists([b"a", b"b"]) == ASK + ASK
        writer.open_gates(array("Q", [FOR_EVER]), 3)
        assert reader.exists([b"a", b"b"]) == THERE + ASK
        writer.close_gate(3)
        assert reader.exists([b"a", b"b"]) == ASK + ASK
        writer.close()

    def test_a_gate_lapses_by_itself(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        writer.publish([an_object(b"a")])
        until = soon(0.05)
        open_all(writer, until)
        while time.monotonic_ns() < until:
            time.sleep(0.01)
        assert reader.exists([b"a"]) == ASK
        writer.close()

    def test_an_expired_object_is_not_told_of(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        gone, later = an_object(b"a"), an_object(b"b")
        gone.expires_at, later.expires_at = soon(-1), soon(60)
        writer.publish([gone, later])
        assert reader.exists([b"a", b"b"]) == ASK + THERE
        writer.close()

    def test_after_the_node_closed_its_index_it_is_asked(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object(b"a")])
        writer.close()
        writer.close()
        assert reader.exists([b"a"]) == ASK

    def test_a_killed_node_is_not_believed_any_more(self, spot: Place) -> None:
        """The gates are open for ever: the kernel closes them."""
        child = subprocess.Popen(
            [sys.executable, "-c", _NODE, spot.path, str(spot.arena_bytes), str(spot.index_bytes)],
            stdout=subprocess.PIPE,
            env=os.environ,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            reader = spot.reader()
            assert reader.exists([b"a"]) == THERE
            child.send_signal(signal.SIGKILL)
            child.wait(10)
            assert reader.exists([b"a"]) == ASK
        finally:
            child.kill()
            child.wait(10)


_NODE = """
import mmap, os, sys, time
from tests.indexside import BUCKETS, an_object, open_all
from p2pkv._native import index
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, int(sys.argv[3]), offset=int(sys.argv[2]))
writer = index.Writer(memory, BUCKETS)
writer.publish([an_object(b"a")])
open_all(writer)
print("ready", flush=True)
time.sleep(60)
"""


class TestWriting:
    def test_an_overwrite_takes_the_place_of_what_was_there(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        arena = spot.mapped()[0]
        old, new = an_object(b"a", 64, 3, 1), an_object(b"a", 4160, 4, 2)
        fill(arena, old, b"old")
        fill(arena, new, b"new!")
        writer.publish([old])
        writer.publish([new])
        assert old.slot == new.slot
        writer.withdraw([old])  # late: another is there
        assert reader.get([b"a"], 100) == [b"new!"]
        assert writer.figures().published == 1
        writer.close()

    def test_a_full_index_publishes_no_more_and_goes_on(self) -> None:
        with place(slots=16) as spot:
            writer, reader = spot.writer(), spot.reader()
            open_all(writer)
            items = [an_object(b"%d" % i, version=i + 1) for i in range(40)]
            writer.publish(items)
            figures = writer.figures()
            assert 0 < figures.published <= figures.slots == 16
            assert figures.refused == 40 - figures.published
            shown = bytes(item.slot >= 0 for item in items)
            assert reader.exists([o.key for o in items]) == shown
            writer.withdraw(items)
            assert writer.figures()[1:3] == (0, 0)
            writer.publish(items[:8])
            assert reader.exists([o.key for o in items[:8]]) == THERE * 8
            writer.close()

    def test_a_long_key_is_not_published_but_counted(self, spot: Place) -> None:
        writer = spot.writer()
        item = an_object(b"k" * 129)
        writer.publish([item])
        assert (item.slot, writer.figures().refused) == (index.REFUSED, 1)
        writer.withdraw([item])
        assert (item.slot, writer.figures().refused) == (index.NOWHERE, 0)
        writer.close()

    def test_memory_that_is_too_small_or_not_an_index_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="index of 64 bytes"):
            index.Writer(bytearray(64), BUCKETS)
        with place() as spot, pytest.raises(ValueError, match="not an index"):
            spot.reader()


class Machine(RuleBasedStateMachine):
    """The index against a dict, with few slots, and keys of which many share their groups."""

    def __init__(self) -> None:
        super().__init__()
        self._made = place(slots=32)
        self.spot = self._made.__enter__()
        self.writer, self.reader = self.spot.writer(), self.spot.reader()
        self.there: dict[bytes, Object] = {}
        self.open: set[int] = set()
        self.version = 0

    keys = st.integers(0, 60).map(lambda n: b"key-%d" % n + b"x" * (n * 3))

    @rule(keys=st.lists(keys, max_size=20))
    def publish(self, keys: list[bytes]) -> None:
        items = []
        for key in keys:
            self.version += 1
            item = an_object(key, HEADER_BYTES, 1, self.version, len(key) % BUCKETS)
            old = self.there.get(key)
            if old is not None and old.slot < 0:
                self.writer.withdraw([old])
            items.append(item)
            self.writer.publish([item])
            self.there[key] = item

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.there)), unique=True))
        self.writer.withdraw([self.there.pop(key) for key in keys])

    @rule(bucket=st.integers(0, BUCKETS - 1), to=st.booleans())
    def turn(self, bucket: int, to: bool) -> None:
        if to:
            self.writer.open_gates(array("Q", [FOR_EVER]), bucket)
            self.open.add(bucket)
        else:
            self.writer.close_gate(bucket)
            self.open.discard(bucket)

    @invariant()
    def readers_see_what_is_there(self) -> None:
        keys = sorted(self.there)
        items = [self.there[key] for key in keys]
        expected = bytes(o.slot >= 0 and o.bucket in self.open for o in items)
        assert self.reader.exists(keys) == expected
        absent = [b"key-%d" % n + b"x" * (n * 3) for n in range(61)]
        absent = [key for key in absent if key not in self.there]
        assert not any(self.reader.exists(absent))

    @invariant()
    def figures_agree(self) -> None:
        figures = self.writer.figures()
        slots = [o.slot for o in self.there.values()]
        assert figures.published == sum(slot >= 0 for slot in slots)
        assert figures.refused == sum(slot == index.REFUSED for slot in slots)
        assert len({s for s in slots if s >= 0}) == figures.published

    def teardown(self) -> None:
        self.writer.close()
        self._made.__exit__(None, None, None)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
