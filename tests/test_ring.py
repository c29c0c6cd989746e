from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from p2pkv import ring
from p2pkv.errors import InvalidArgument
from p2pkv.ring import NodeSpec, Table, bucket_of, bucket_of_prefix, buckets_of, plan, route
from p2pkv.types import NodeId

# -- keys


@pytest.mark.parametrize(
    ("key", "part"),
    [
        (b"plain", b"plain"),
        (b"{tag}rest", b"tag"),
        (b"a{tag}b{other}", b"tag"),
        (b"a{}b{other}", b"a{}b{other}"),
        (b"a{open", b"a{open"),
        (b"a}b{tag}", b"tag"),
        (b"{{tag}}", b"{tag"),
        (b"close}only", b"close}only"),
        (b"", b""),
    ],
)
def test_a_key_is_routed_by_its_first_tag(key: bytes, part: bytes) -> None:
    assert route(key) == part
    assert bucket_of(key, 1024) == xxh3_64_intdigest(part) % 1024


def test_the_bucket_of_a_key_never_changes() -> None:
    """The scheme is written into clusters: other values here would lose their data."""
    assert ring.HASH_SCHEME == "xxh3_64/tag"
    assert [bucket_of(key, 1024) for key in (b"user:1", b"{user:1}:name", b"")] == [257, 257, 194]


keys = st.binary(max_size=12) | st.text("{}ab", max_size=9).map(str.encode)


@given(st.lists(keys), st.sampled_from([1, 2, 1024, 65536]))
def test_a_batch_gives_the_bucket_of_each_key(batch: list[bytes], bucket_count: int) -> None:
    expected = [bucket_of(key, bucket_count) for key in batch]
    assert buckets_of(batch, bucket_count) == expected
    assert ring.buckets_without_native(batch, bucket_count) == expected


@given(st.binary(max_size=1024), st.binary(max_size=1024))
def test_long_keys_and_tags_have_their_buckets_in_a_batch_too(tag: bytes, rest: bytes) -> None:
    batch = [tag + rest, b"{" + tag + b"}" + rest, tag, rest]
    assert buckets_of(batch, 65536) == [bucket_of(key, 65536) for key in batch]


@pytest.mark.parametrize("key", ["text", None, 7, bytearray(b"a")])
def test_what_is_no_key_has_no_bucket(key: Any) -> None:
    with pytest.raises(TypeError):
        buckets_of([b"a", key], 1024)


@given(keys, keys)
def test_a_prefix_with_a_bucket_has_all_its_keys_there(prefix: bytes, rest: bytes) -> None:
    bucket = bucket_of_prefix(prefix, 1024)
    assert bucket is None or bucket == bucket_of(prefix + rest, 1024)


@pytest.mark.parametrize("prefix", [b"", b"a", b"{a", b"{}", b"{}{a}"])
def test_a_prefix_without_a_whole_tag_may_be_anywhere(prefix: bytes) -> None:
    assert bucket_of_prefix(prefix, 1024) is None
    assert len({bucket_of(prefix + b"%d" % i, 1024) for i in range(9)}) > 1


def test_a_prefix_with_a_whole_tag_is_in_one_bucket() -> None:
    assert bucket_of_prefix(b"a{tag}", 1024) == bucket_of(b"tag", 1024)


# -- placement


def nodes(count: int, **weights: float) -> dict[NodeId, NodeSpec]:
    names = {f"n{i}": 1.0 for i in range(count)} | weights
    return {NodeId(name): NodeSpec(weight) for name, weight in names.items()}


def first_plan(specs: Mapping[NodeId, NodeSpec], buckets: int, copies: int) -> Table:
    return plan(specs, [()] * buckets, copies)


def copies_of(table: Table) -> Counter[NodeId]:
    return Counter(node for held in table for node in held)


def primaries_of(table: Table) -> Counter[NodeId]:
    return Counter(held[0] for held in table)


def moved(before: Table, after: Table) -> int:
    """Copies that have to be shipped."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def load(counts: Mapping[NodeId, int], specs: Mapping[NodeId, NodeSpec]) -> float:
    """The largest load in relation to what the weights ask for."""
    weight = sum(spec.weight for spec in specs.values())
    total = sum(counts.values())
    shares = {n: total * spec.weight / weight for n, spec in specs.items() if spec.weight}
    return max(counts[n] / share for n, share in shares.items())


SIZES = [(1024, 3, 1), (1024, 5, 3), (4096, 16, 1), (4096, 16, 3), (1024, 16, 3), (2048, 50, 2)]


@pytest.mark.parametrize(("buckets", "count", "copies"), SIZES)
def test_a_first_plan_is_level(buckets: int, count: int, copies: int) -> None:
    specs = nodes(count)
    table = first_plan(specs, buckets, copies)
    assert all(len(set(held)) == copies for held in table)
    assert load(copies_of(table), specs) < 1.01
    assert load(primaries_of(table), specs) < 1.035


@pytest.mark.parametrize(("buckets", "count", "copies"), SIZES)
def test_a_node_that_joins_gets_its_part_and_nothing_else_moves(
    buckets: int, count: int, copies: int
) -> None:
    before = first_plan(nodes(count), buckets, copies)
    specs = nodes(count, x=1.0)
    after = plan(specs, before, copies)
    share = buckets * copies / (count + 1)
    assert 0.9 * share <= moved(before, after) <= share
    assert moved(before, after) == copies_of(after)[NodeId("x")]
    assert load(copies_of(after), specs) < 1.03
    assert load(primaries_of(after), specs) < 1.05


@pytest.mark.parametrize(("buckets", "count", "copies"), SIZES)
@pytest.mark.parametrize("drained", [False, True])
def test_when_a_node_leaves_only_its_copies_move(
    buckets: int, count: int, copies: int, drained: bool
) -> None:
    before = first_plan(nodes(count), buckets, copies)
    specs = nodes(count, n0=0.0)
    if not drained:
        del specs[NodeId("n0")]
    after = plan(specs, before, copies)
    assert copies_of(after)[NodeId("n0")] == 0
    assert moved(before, after) == copies_of(before)[NodeId("n0")]
    assert load(copies_of(after), specs) < 1.03
    assert load(primaries_of(after), specs) < 1.05


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_changed_weight_moves_the_difference(weight: float) -> None:
    before = first_plan(nodes(16), 4096, 3)
    specs = nodes(16, n3=weight)
    after = plan(specs, before, 3)
    share = 4096 * 3 * weight / (15 + weight)
    assert moved(before, after) <= abs(share - 4096 * 3 / 16) + 16
    assert load(copies_of(after), specs) < 1.03


def test_a_small_change_of_weight_moves_nothing() -> None:
    before = first_plan(nodes(16), 4096, 3)
    assert moved(before, plan(nodes(16, n3=1.01), before, 3)) == 0


def test_a_plan_of_a_plan_is_the_same_plan() -> None:
    specs = nodes(7, x=2.5)
    table = first_plan(specs, 512, 3)
    assert plan(specs, table, 3) == table


def test_the_order_of_the_nodes_does_not_matter() -> None:
    specs = nodes(9)
    shuffled = dict(reversed(specs.items()))
    assert first_plan(specs, 256, 3) == first_plan(shuffled, 256, 3)


def test_a_plan_never_changes() -> None:
    """Equal on all machines and versions of Python: the hash is fixed."""
    assert first_plan(nodes(4), 8, 2) == (
        ("n0", "n3"),
        ("n1", "n2"),
        ("n2", "n1"),
        ("n1", "n2"),
        ("n0", "n1"),
        ("n2", "n0"),
        ("n3", "n0"),
        ("n3", "n1"),
    )


def test_the_primary_stays_where_it_is() -> None:
    before = first_plan(nodes(8), 1024, 3)
    after = plan(nodes(8, x=1.0), before, 3)
    stayed = sum(old[0] == new[0] for old, new in zip(before, after, strict=True))
    assert stayed >= 1024 * (1 - 1.2 / 9)


def test_primaries_that_all_lie_on_one_node_are_spread_without_moving_copies() -> None:
    specs = nodes(3)
    before = [("n0", "n1", "n2")] * 300
    after = plan(specs, before, 3)  # type: ignore[arg-type]
    assert moved(before, after) == 0  # type: ignore[arg-type]
    assert load(primaries_of(after), specs) < 1.03


def test_more_copies_are_added_to_those_that_are_there() -> None:
    before = first_plan(nodes(6), 256, 1)
    after = plan(nodes(6), before, 3)
    assert moved(before, after) <= 256 * 2 + 6
    assert load(copies_of(after), nodes(6)) < 1.05


def test_fewer_copies_are_what_is_left_of_those_that_are_there() -> None:
    before = first_plan(nodes(6), 256, 3)
    after = plan(nodes(6), before, 1)
    assert [held[0] for held in after] == [held[0] for held in before]


def test_with_fewer_nodes_than_copies_each_node_has_all() -> None:
    table = first_plan(nodes(2), 16, 3)
    assert all(set(held) == {"n0", "n1"} for held in table)


@pytest.mark.parametrize("specs", [{}, {NodeId("n0"): NodeSpec(0)}])
def test_without_a_node_that_takes_buckets_they_lie_nowhere(
    specs: dict[NodeId, NodeSpec],
) -> None:
    assert plan(specs, [(NodeId("n0"),), ()], 2) == ((), ())


def test_unknown_and_repeated_nodes_of_the_table_before_are_dropped() -> None:
    gone, n0 = NodeId("gone"), NodeId("n0")
    assert plan(nodes(1), [(gone, n0, n0)], 3) == ((n0,),)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(InvalidArgument, match=r"weight = .* of n0"):
        plan(nodes(1, n0=weight), [()], 1)


def test_less_than_one_copy_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="replication_factor = 0"):
        plan(nodes(1), [()], 0)


# -- spread


def labelled(*labels: tuple[str, str], weight: float = 1.0) -> dict[NodeId, NodeSpec]:
    return {NodeId(f"n{i}"): NodeSpec(weight, *label) for i, label in enumerate(labels)}


def test_copies_lie_on_different_hosts() -> None:
    specs = labelled(("h0", ""), ("h0", ""), ("h1", ""), ("h1", ""), ("h2", ""), ("h2", ""))
    table = first_plan(specs, 512, 3)
    assert all(len({specs[n].host for n in held}) == 3 for held in table)
    assert load(copies_of(table), specs) < 1.03


def test_a_host_alone_against_a_large_one_has_a_copy_of_all() -> None:
    specs = labelled(("h0", ""), ("h1", ""), ("h1", ""), ("h1", ""))
    table = first_plan(specs, 300, 2)
    assert copies_of(table)[NodeId("n0")] == 300
    assert copies_of(table)[NodeId("n1")] == pytest.approx(100, abs=3)
    assert primaries_of(table)[NodeId("n0")] < 100


def test_nodes_without_a_host_count_as_hosts_of_their_own() -> None:
    specs = labelled(("", ""), ("", ""), ("h", ""), ("h", ""))
    table = first_plan(specs, 128, 3)
    assert not any({"n2", "n3"} <= set(held) for held in table)


def test_more_copies_than_hosts_are_spread_as_evenly_as_can_be() -> None:
    specs = labelled(("h0", ""), ("h0", ""), ("h0", ""), ("h1", ""), ("h1", ""))
    table = first_plan(specs, 128, 3)
    for held in table:
        assert sorted(Counter(specs[n].host for n in held).values()) == [1, 2]


def test_zones_come_before_hosts() -> None:
    specs = labelled(("h0", "z0"), ("h1", "z0"), ("h2", "z0"), ("h0", "z1"), ("h1", "z1"))
    table = first_plan(specs, 256, 2)
    assert all(len({specs[n].zone for n in held}) == 2 for held in table)


def test_copies_that_a_new_label_puts_on_one_host_are_separated() -> None:
    before = first_plan(nodes(4), 256, 2)
    specs = labelled(("h0", ""), ("h0", ""), ("h1", ""), ("h2", ""))
    after = plan(specs, before, 2)
    assert all(len({specs[n].host for n in held}) == 2 for held in after)


def test_a_zone_that_comes_back_is_filled_again() -> None:
    specs = labelled(*(("", f"z{i % 3}") for i in range(9)))
    full = first_plan(specs, 512, 3)
    two = {n: spec for n, spec in specs.items() if spec.zone != "z2"}
    after = plan(specs, plan(two, full, 3), 3)
    assert load(copies_of(after), specs) < 1.03
    assert all(len({specs[n].zone for n in held}) == 3 for held in after)


@st.composite
def clusters(draw: st.DrawFn) -> dict[NodeId, NodeSpec]:
    names = draw(st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=8, unique=True))
    weight = st.just(1.0) | st.floats(0, 8) | st.just(0.0)
    host, zone = st.sampled_from(["", "h0", "h1", "h2"]), st.sampled_from(["", "", "z0", "z1"])
    return {NodeId(name): NodeSpec(draw(weight), draw(host), draw(zone)) for name in names}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(clusters(), st.integers(1, 4)), min_size=1, max_size=4))
def test_any_sequence_of_clusters_is_planned_legally(
    steps: list[tuple[dict[NodeId, NodeSpec], int]],
) -> None:
    table: Table = ((),) * 64
    for specs, copies in steps:
        table = plan(specs, table, copies)
        takers = {n for n, spec in specs.items() if spec.weight > 0}
        for held in table:
            assert len(set(held)) == len(held) == min(copies, len(takers))
            assert takers.issuperset(held)
        check_spread(specs, takers, table)
        assert plan(specs, table, copies) == table


def check_spread(specs: Mapping[NodeId, NodeSpec], takers: set[NodeId], table: Table) -> None:
    """No host, and no zone, has more copies of a bucket than it must."""
    zone = {n: specs[n].zone or f"zone of {specs[n].host or n}" for n in takers}
    host = {n: (zone[n], specs[n].host or n) for n in takers}
    sizes = Counter(host.values())
    for held in table:
        by_host = Counter(host[n] for n in held)
        by_zone = Counter(zone[n] for n in held)
        most = max(by_host.values(), default=0)
        assert most <= 1 or sum(min(size, most - 1) for size in sizes.values()) < len(held)
        room: Counter[str] = Counter()
        for (z, _), size in sizes.items():
            room[z] += min(size, most)
        most = max(by_zone.values(), default=0)
        assert most <= 1 or sum(min(n, most - 1) for n in room.values()) < len(held)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_no_node_is_over_its_cap_whatever_came_before(seed: int) -> None:
    rng = random.Random(seed)
    names = [NodeId(f"n{i}") for i in range(rng.randint(4, 10))]
    specs = {n: NodeSpec(rng.choice([1.0, 1.0, 2.0])) for n in names}
    copies = rng.randint(1, 2)
    before = [tuple(rng.sample(names[:4], copies)) for _ in range(128)]
    table = plan(specs, before, copies)
    weight = sum(spec.weight for spec in specs.values())
    for n, spec in specs.items():
        cap = math.ceil((1 + ring.OVER) * min(128, 128 * copies * spec.weight / weight))
        assert copies_of(table)[n] <= cap


def test_a_chain_of_nodes_is_used_where_no_copy_can_move_directly() -> None:
    """n3 can take nothing from n0, whose every bucket it shares; it must come over n1 or n2."""
    a, b, c, d = (NodeId(f"n{i}") for i in range(4))
    before = [(a, d)] * 60 + [(a, b)] * 30 + [(b, c)] * 30
    table = plan(nodes(4), before, 2)
    assert load(copies_of(table), nodes(4)) <= 62 / 60


def test_a_large_plan_is_made_in_less_than_a_second() -> None:
    start = time.process_time()
    first_plan(nodes(16), 4096, 3)
    assert time.process_time() - start < 1


def test_a_chain_that_takes_its_own_room_is_given_up() -> None:
    """Two hops, 0 to 1 to 2, of which the first to be made forbids the other."""
    lies_on = {0: 0, 1: 0, 2: 1}
    moves: list[tuple[int, int]] = []

    def legal(bucket: int, source: int, target: int) -> bool:
        return lies_on[bucket] == source and target == source + 1 and not moves

    def move(bucket: int, source: int, target: int) -> None:
        lies_on[bucket] = target
        moves.append((source, target))

    def candidates(source: int) -> list[int]:
        return [bucket for bucket, node in lies_on.items() if node == source]

    counts, shares = [5, 1, 0], [2.0, 2.0, 2.0]
    full = ring._Level(counts, shares, candidates, legal, move, lambda bucket, node: 0.0)
    full.high = [2, 1, 2]
    full.run()
    assert moves == [(1, 2)]
    assert counts == [5, 0, 1]
