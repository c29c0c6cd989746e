"""The published index alone: what a reader may be told, and when it is told to ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from indexside import (
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

from p2pkv import _native
from p2pkv.errors import ConfigError
from p2pkv.objects import HEADER_BYTES, Object
from p2pkv.ring import bucket_of

pytestmark = pytest.mark.skipif(not _native.available, reason="the native extension is not built")

if _native.available:
    from p2pkv._native import index

HERE = str(Path(__file__).parent)
ABSENT, THERE, ASK = b"\0", b"\1", b"\2"


tagged = st.text("{}ab", min_size=1, max_size=40).map(str.encode)


@pytest.fixture
def spot() -> Iterator[Place]:
    with place() as made:
        yield made


class TestReading:
    def test_a_published_key_is_there_and_others_are_not(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object(b"a"), an_object(b"b")])
        assert reader.exists([b"a", b"c", b"b"]) == THERE + ABSENT + THERE
        writer.close()

    def test_text_is_taken_as_utf8(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        writer.publish([an_object("ä".encode())])
        assert reader.exists(["ä", "a"]) == THERE + ABSENT
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
        sizes = [100 * i for i in range(8)]
        assert reader.get_into([o.key for o in items], targets) == (sizes, [])
        assert [bytes(t[: 100 * i]) for i, t in enumerate(targets)] == [
            bytes([i]) * 100 * i for i in range(8)
        ]
        assert reader.get([b"k3", b"none"], 1 << 20) == ([b"\3" * 300, None], [])
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
        assert reader.get_into([b"a"], [target]) == ([None], [0])
        writer.close()

    def test_a_value_whose_header_changed_is_not_taken(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"a", size=8)
        arena = spot.mapped()[0]
        fill(arena, item, b"12345678")
        writer.publish([item])
        clear(arena, item)
        assert reader.get([b"a"], 100) == ([None], [0])
        item.version = 2
        fill(arena, item, b"12345678")
        assert reader.get_into([b"a"], [bytearray(8)]) == ([None], [0])
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
        assert reader.get([b"a", b"b", b"c", b"d"], 1 << 20) == ([None] * 4, [0, 1, 2, 3])
        writer.close()

    def test_values_beyond_what_is_wanted_together_are_left(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        arena = spot.mapped()[0]
        items = [an_object(b"%d" % i, 64 + 4096 * i, 100, i + 1) for i in range(3)]
        for item in items:
            fill(arena, item, b"v" * 100)
        writer.publish(items)
        assert reader.get([b"0", b"1", b"2"], 250) == ([b"v" * 100, b"v" * 100, None], [2])
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
        writer.close()

    def test_what_was_told_is_counted_by_what_was_wanted(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"a", size=8)
        fill(spot.mapped()[0], item, b"12345678")
        writer.publish([item])
        reader.exists([b"a", b"x", b"y", b"z", b"k" * 129])
        reader.get([b"a", b"x"], 100)
        reader.get_into([b"a", b"x"], [bytearray(8), bytearray(8)])
        figures = writer.figures()
        assert (figures.hits, figures.misses, figures.present, figures.absent) == (2, 2, 1, 3)
        writer.close()


class TestMisses:
    """When a key that is not in the index is told not to be there."""

    def test_only_where_the_gate_of_the_bucket_is_open(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        bucket = bucket_of(b"x", BUCKETS)
        others = array("Q", [FOR_EVER] * BUCKETS)
        others[bucket] = 0
        writer.open_gates(others)
        assert reader.exists([b"x"]) == ASK
        assert reader.get([b"x"], 100) == ([None], [0])
        writer.open_gates(array("Q", [FOR_EVER]), bucket)
        assert reader.exists([b"x"]) == ABSENT
        assert reader.get([b"x"], 100) == ([None], [])
        writer.close_gate(bucket)
        assert reader.exists([b"x"]) == ASK
        writer.close()

    def test_not_after_the_gate_has_lapsed_or_the_node_has_ended(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer, soon(-0.001))
        assert reader.exists([b"x"]) == ASK
        open_all(writer)
        assert reader.exists([b"x"]) == ABSENT
        writer.close()
        assert reader.exists([b"x"]) == ASK

    def test_not_while_an_object_of_the_bucket_found_no_room(self) -> None:
        with place(slots=8) as spot:
            writer, reader = spot.writer(), spot.reader()
            open_all(writer)
            keys = [b"%d" % i for i in range(30)]
            items = [an_object(k, bucket=bucket_of(k, BUCKETS), version=1) for k in keys]
            writer.publish(items)
            out = {item.bucket for item in items if item.slot == index.REFUSED}
            assert 0 < len(out) < BUCKETS
            others = [b"other-%d" % i for i in range(100)]
            told = reader.exists(others)
            assert {bucket_of(k, BUCKETS) for k, f in zip(others, told, strict=True) if f} == out
            writer.withdraw(items)
            assert reader.exists(others) == ABSENT * 100
            writer.close()

    def test_not_of_a_long_key_whose_objects_keep_no_other_from_it(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        long = b"k" * 129
        writer.publish([an_object(long, bucket=bucket_of(b"x", BUCKETS))])
        assert reader.exists([long, b"x"]) == ASK + ABSENT
        writer.close()

    def test_not_of_an_object_that_has_expired_and_was_not_taken_out(self, spot: Place) -> None:
        """Its owner may be prolonging its life at this moment."""
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        item = an_object(b"x")
        item.expires_at = soon(-1)
        writer.publish([item])
        assert reader.exists([b"x"]) == ASK
        writer.withdraw([item])
        assert reader.exists([b"x"]) == ABSENT
        writer.close()

    def test_not_after_a_publication_failed(self, spot: Place) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        broken: Any = an_object(b"b")
        broken.size = "large"
        with pytest.raises(TypeError):
            writer.publish([an_object(b"a"), broken])
        assert reader.exists([b"a", b"x"]) == THERE + ASK
        writer.close()

    def test_a_target_that_is_none_is_left_to_others_for_a_missing_key_too(
        self, spot: Place
    ) -> None:
        writer, reader = spot.writer(), spot.reader()
        open_all(writer)
        targets: list[Any] = [bytearray(8), b"read-only", None]
        assert reader.get_into([b"x", b"y", b"z"], targets) == ([None] * 3, [1, 2])
        writer.close()

    def test_of_several_nodes_the_one_that_serves_the_bucket_tells(self) -> None:
        with place() as one, place() as two:
            writers = one.writer(), two.writer()
            reader = index.Reader([one.map(), two.map()])
            bucket = bucket_of(b"x", BUCKETS)
            open_all(writers[0])
            assert reader.exists([b"x"]) == ABSENT
            writers[0].close_gate(bucket)
            assert reader.exists([b"x"]) == ASK
            writers[1].open_gates(array("Q", [FOR_EVER]), bucket)
            assert reader.exists([b"x"]) == ABSENT
            writers[1].publish([an_object(b"x", bucket=bucket)])
            assert reader.exists([b"x"]) == THERE
            for writer in writers:
                writer.close()

    def test_a_node_that_has_ended_hides_none_that_serves_its_buckets(self) -> None:
        with place() as one, place() as two:
            first, second = one.writer(), two.writer()
            reader = index.Reader([one.map(), two.map()])
            open_all(first)
            open_all(second)
            first.close()
            assert reader.exists([b"x"]) == ABSENT
            assert second.figures().absent == 1
            second.close()

    @given(key=st.binary(min_size=1, max_size=128) | tagged)
    def test_the_bucket_is_that_of_the_ring(self, key: bytes) -> None:
        """Told by which gate it takes to be open."""
        with place() as spot:
            writer, reader = spot.writer(), spot.reader()
            writer.open_gates(array("Q", [FOR_EVER]), bucket_of(key, BUCKETS))
            assert reader.exists([key]) == ABSENT
            writer.close()

    def test_a_key_that_is_always_there_is_never_missed(self, spot: Place) -> None:
        """While another process overwrites it, and puts and deletes others around it."""
        child = _start(_OVERWRITER, spot)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            reader = spot.reader()
            seen = set()
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                told = reader.exists([b"kept", b"comes-and-goes"] * 50)
                assert 0 not in told[::2]
                seen |= set(told[1::2])
            assert {0, 1} <= seen
        finally:
            child.kill()
            child.wait(10)

    def test_a_key_that_is_away_only_while_the_gate_is_closed_is_never_missed(
        self, spot: Place
    ) -> None:
        """A bucket that goes to another node and comes back, again and again."""
        child = _start(_MOVER, spot)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            reader = spot.reader()
            seen = set()
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                seen |= set(reader.exists([b"moving"] * 100))
            assert seen == {1, 2}
        finally:
            child.kill()
            child.wait(10)


def _start(program: str, spot: Place) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program, spot.path, str(spot.arena_bytes), str(spot.index_bytes)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])},
    )


_OVERWRITER = """
import mmap, os, sys, time
from indexside import BUCKETS, an_object, open_all
from p2pkv._native import index
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, int(sys.argv[3]), offset=int(sys.argv[2]))
writer = index.Writer(memory, BUCKETS)
open_all(writer)
kept = an_object(b"kept", version=1)
writer.publish([kept])
print("ready", flush=True)
end, version = time.monotonic() + 60, 2
while time.monotonic() < end:
    new, other = an_object(b"kept", version=version), an_object(b"comes-and-goes", version=version)
    others = [an_object(b"%d" % (version + i), version=version) for i in range(9)]
    writer.publish([new, other, *others])
    writer.withdraw([kept])
    kept, version = new, version + 10
    writer.withdraw([other, *others])
"""


_MOVER = """
import mmap, os, sys, time
from array import array
from indexside import BUCKETS, FOR_EVER, an_object
from p2pkv.ring import bucket_of
from p2pkv._native import index
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, int(sys.argv[3]), offset=int(sys.argv[2]))
writer = index.Writer(memory, BUCKETS)
print("ready", flush=True)
end, version, bucket = time.monotonic() + 60, 1, bucket_of(b"moving", BUCKETS)
while time.monotonic() < end:
    item = an_object(b"moving", version=version, bucket=bucket)
    writer.publish([item])
    writer.open_gates(array("Q", [FOR_EVER]), bucket)
    version += 1
    writer.close_gate(bucket)
    writer.withdraw([item])
"""


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
        child = _start(_NODE, spot)
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
from indexside import BUCKETS, an_object, open_all
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
        assert reader.get([b"a"], 100) == ([b"new!"], [])
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
            told = reader.exists([o.key for o in items])
            assert [flag == 1 for flag in told] == [item.slot >= 0 for item in items]
            writer.withdraw(items)
            assert writer.figures()[1:3] == (0, 0)
            writer.publish(items[:8])
            assert reader.exists([o.key for o in items[:8]]) == THERE * 8
            writer.close()

    def test_a_long_key_is_not_published_but_counted(self, spot: Place) -> None:
        writer = spot.writer()
        item = an_object(b"k" * 129)
        writer.publish([item])
        assert (item.slot, writer.figures().refused) == (index.UNFIT, 1)
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
            item = an_object(key, HEADER_BYTES, 1, self.version, bucket_of(key, BUCKETS))
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
        keys = [b"key-%d" % n + b"x" * (n * 3) for n in range(61)]
        assert list(self.reader.exists(keys)) == [self.told(key) for key in keys]

    def told(self, key: bytes) -> int:
        """What a reader is to be told of a key."""
        bucket, item = bucket_of(key, BUCKETS), self.there.get(key)
        left_out = any(o.bucket == bucket and o.slot == index.REFUSED for o in self.there.values())
        if len(key) > index.KEY_BYTES_MAX or bucket not in self.open:
            return 2
        if item is not None:
            return 1 if item.slot >= 0 else 2
        return 2 if left_out else 0

    @invariant()
    def figures_agree(self) -> None:
        figures = self.writer.figures()
        slots = [o.slot for o in self.there.values()]
        assert figures.published == sum(slot >= 0 for slot in slots)
        assert figures.refused == sum(slot in (index.REFUSED, index.UNFIT) for slot in slots)
        assert len({s for s in slots if s >= 0}) == figures.published

    def teardown(self) -> None:
        self.writer.close()
        self._made.__exit__(None, None, None)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
