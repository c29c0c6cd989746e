"""The authority in etcd: the cluster's parameters, nodes, buckets, and what happens in between."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import msgspec
import pytest

from p2pkv.authority import EtcdAuthority, Result, discover
from p2pkv.config import EtcdConfig
from p2pkv.errors import (
    AuthorityUnavailable,
    ClusterMismatch,
    ConfigError,
    Conflict,
    InvalidArgument,
    TooLarge,
)
from p2pkv.etcd import EtcdClient
from p2pkv.records import (
    BucketChange,
    BucketRecord,
    Delta,
    Meta,
    NodeRecord,
    View,
    apply,
    difference,
)
from p2pkv.testing.etcd import EtcdCluster, survives_kills
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

needs_sound_etcd = pytest.mark.skipif(
    not survives_kills(), reason="this version of etcd may lose data when it is killed"
)
_numbers = itertools.count()

META = Meta(bucket_count=1024, hash_scheme="xxh3", fingerprint="f")
NODE = NodeRecord(boot=BootId(0), control=("tcp://127.0.0.1:4711",))
N1, N2 = NodeId("n1"), NodeId("n2")


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
def config(server: EtcdCluster) -> EtcdConfig:
    return server.config(session_ttl_s=2)


@pytest.fixture
def cluster() -> str:
    return f"cluster-{next(_numbers)}"


@pytest.fixture
async def authority(config: EtcdConfig, cluster: str) -> AsyncIterator[EtcdAuthority]:
    async with EtcdAuthority(config, cluster) as authority:
        yield authority


@pytest.fixture
async def etcd(config: EtcdConfig) -> AsyncIterator[EtcdClient]:
    """Another user of the same etcd."""
    async with EtcdClient(config) as client:
        yield client


async def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def bucket(epoch: int = 1, node: NodeId = N1) -> BucketRecord:
    owner = Member(node, BootId(1))
    return BucketRecord(
        epoch=Epoch(epoch), generation=1, primary=owner, in_sync=(owner,), assigned=(node,)
    )


def change(b: int, expected: int, record: BucketRecord) -> BucketChange:
    return BucketChange(BucketId(b), Revision(expected), record)


class Follower:
    """Applies what ``follow`` yields to a view of its own."""

    def __init__(self, authority: EtcdAuthority, view: View) -> None:
        self.view = msgspec.convert(msgspec.to_builtins(view), View)
        self.deltas: list[Delta] = []
        self._task = asyncio.create_task(self._run(authority, view))

    async def _run(self, authority: EtcdAuthority, view: View) -> None:
        async with aclosing(authority.follow(view)) as deltas:
            async for delta in deltas:
                assert delta
                assert delta.revision > self.view.revision
                self.deltas.append(delta)
                apply(self.view, delta)

    async def reaches(self, wanted: View) -> None:
        """Wait for the state of ``wanted``, and compare all of it."""
        await eventually(lambda: not difference(self.view, wanted))

    async def stop(self) -> None:
        self._task.cancel()
        results = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError), results


@asynccontextmanager
async def following(authority: EtcdAuthority) -> AsyncIterator[Follower]:
    follower = Follower(authority, await authority.load())
    try:
        yield follower
    finally:
        await follower.stop()


# -- the cluster's parameters


async def test_of_racing_creators_one_wins_and_all_learn_its_parameters(
    config: EtcdConfig, cluster: str
) -> None:
    async with AsyncExitStack() as stack:
        racers = [await stack.enter_async_context(EtcdAuthority(config, cluster)) for _ in range(8)]
        wishes = [msgspec.structs.replace(META, fingerprint=str(i)) for i in range(8)]
        got = await asyncio.gather(*(r.ensure_meta(w) for r, w in zip(racers, wishes, strict=True)))
        assert len(set(got)) == 1
        assert got[0] in wishes
        assert (await racers[0].load()).meta == got[0]


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("bucket_count", 512, "set bucket_count = 1024 here"),
        ("hash_scheme", "crc", "run the version of p2pkv that created it"),
        ("format_version", 2, "run the version of p2pkv that created it"),
    ],
)
async def test_a_mismatch_says_field_both_values_and_remedy(
    authority: EtcdAuthority, cluster: str, field: str, value: object, remedy: str
) -> None:
    await authority.ensure_meta(META)
    wanted = msgspec.structs.replace(META, **{field: value})
    with pytest.raises(ClusterMismatch) as caught:
        await authority.ensure_meta(wanted)
    assert str(caught.value) == (
        f"cluster {cluster!r} was created with {field} = {getattr(META, field)!r}, "
        f"this node has {value!r}: {remedy}, or set another cluster name"
    )
    assert (await authority.load()).meta == META


async def test_replication_parameters_are_those_of_the_existing_cluster(
    authority: EtcdAuthority,
) -> None:
    created = msgspec.structs.replace(META, replication_factor=3, min_in_sync=2)
    await authority.ensure_meta(created)
    wanted = msgspec.structs.replace(META, replication_factor=1, fingerprint="other")
    assert await authority.ensure_meta(wanted) == created


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"garbage", "cannot be read"), (b'{"format_version":9,"new":1}', "format_version = 9")],
)
async def test_a_meta_record_of_another_kind_is_a_mismatch(
    authority: EtcdAuthority, etcd: EtcdClient, cluster: str, text: bytes, message: str
) -> None:
    await etcd.put(f"/p2pkv/{cluster}/meta".encode(), text)
    with pytest.raises(ClusterMismatch, match=message):
        await authority.ensure_meta(META)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "ü"])
def test_a_cluster_name_is_checked(config: EtcdConfig, name: str) -> None:
    with pytest.raises(ConfigError, match="cluster = "):
        EtcdAuthority(config, name)


async def test_two_clusters_in_one_etcd_do_not_see_each_other(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str
) -> None:
    async with EtcdAuthority(config, f"{cluster}-b") as other, following(other) as follower:
        await authority.ensure_meta(META)
        assert await authority.register(N1, NODE) == 1
        await authority.update_buckets([change(0, 0, bucket())])
        await authority.campaign(Member(N1, BootId(1)))
        assert await other.ensure_meta(msgspec.structs.replace(META, bucket_count=64))
        assert await other.register(N1, NODE) == 1
        await follower.reaches(await other.load())
        assert not follower.view.buckets
        assert follower.view.planner is None
        assert follower.view.meta is not None
        assert follower.view.meta.bucket_count == 64


async def test_discover_reads_once(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str
) -> None:
    before = asyncio.all_tasks()
    await authority.ensure_meta(META)
    await authority.update_buckets([change(7, 0, bucket())])
    view = await discover(config, cluster)
    assert view.meta == META
    assert view.buckets[BucketId(7)].record == bucket()
    await eventually(lambda: asyncio.all_tasks() == before)


# -- nodes and their sessions


async def test_each_registration_is_a_new_boot(authority: EtcdAuthority) -> None:
    async with following(authority) as follower:
        for boot in (1, 2, 3):
            assert await authority.register(N1, NODE) == boot
            view = await authority.load()
            assert view.nodes[N1] == msgspec.structs.replace(NODE, boot=BootId(boot))
            assert view.boots[N1] == boot
            await authority.deregister()
            await follower.reaches(await authority.load())
    assert not authority.superseded
    view = await authority.load()
    assert N1 not in view.nodes
    assert view.boots[N1] == 3


async def test_a_second_process_with_the_same_node_id_is_refused(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str
) -> None:
    await authority.register(N1, NODE)
    async with EtcdAuthority(config, cluster) as second:
        with pytest.raises(ConfigError, match=r"node_id = 'n1'.*boot 1 at tcp://127\.0\.0\.1:4711"):
            await second.register(N1, NODE)
    view = await authority.load()
    assert view.boots[N1] == 1
    assert N1 in view.nodes
    assert authority.session_losses == 0


async def test_a_crashed_predecessor_is_waited_for(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str
) -> None:
    async with EtcdAuthority(config, cluster) as crashing:
        await crashing.register(N1, NODE)
    assert N1 in (await authority.load()).nodes
    assert await authority.register(N1, NODE) == 2


async def _lose_session(authority: EtcdAuthority, etcd: EtcdClient) -> None:
    await etcd.revoke(authority._session.lease)


async def test_a_lost_session_is_registered_again_with_the_same_boot(
    authority: EtcdAuthority, etcd: EtcdClient
) -> None:
    await authority.register(N1, NODE)
    await authority.update_node(draining=True)
    async with following(authority) as follower:
        await _lose_session(authority, etcd)
        await eventually(lambda: len(follower.deltas) == 2)
        assert follower.deltas[0].nodes == {N1: None}
        record = msgspec.structs.replace(NODE, boot=BootId(1), draining=True)
        assert follower.deltas[1].nodes == {N1: record}
    assert authority.session_losses == 1
    assert not authority.superseded


async def test_a_session_outlives_its_ttl(authority: EtcdAuthority) -> None:
    await authority.register(N1, NODE)
    first = authority.last_contact_ns
    await asyncio.sleep(4)
    assert N1 in (await authority.load()).nodes
    assert authority.session_losses == 0
    assert first is not None
    assert authority.last_contact_ns is not None
    assert authority.last_contact_ns - first > 3e9


async def test_an_update_is_published_even_if_the_session_was_just_lost(
    authority: EtcdAuthority, etcd: EtcdClient
) -> None:
    await authority.register(N1, NODE)
    await _lose_session(authority, etcd)
    await authority.update_node(weight=2.0)
    assert (await authority.load()).nodes[N1].weight == 2.0
    await asyncio.sleep(1.5)  # the keeper notices the loss of the first lease only now
    assert authority.session_losses == 1
    assert N1 in (await authority.load()).nodes


@pytest.mark.parametrize("changes", [{"boot": 7}, {"weight": "heavy"}, {"colour": "red"}])
async def test_a_bad_update_changes_nothing(
    authority: EtcdAuthority, changes: dict[str, object]
) -> None:
    await authority.register(N1, NODE)
    with pytest.raises(InvalidArgument, match=next(iter(changes))):
        await authority.update_node(**changes)
    assert (await authority.load()).nodes[N1] == msgspec.structs.replace(NODE, boot=BootId(1))


async def test_forget_supersedes_a_process_that_follows(config: EtcdConfig, cluster: str) -> None:
    told: list[str] = []
    async with EtcdAuthority(config, cluster, on_superseded=lambda: told.append("x")) as authority:
        await authority.register(N1, NODE)
        async with following(authority) as follower:
            assert await authority.forget(N1) == 2
            await eventually(lambda: authority.superseded)
            await eventually(lambda: follower.view.boots == {N1: 2})
        with pytest.raises(Conflict):
            await authority.update_node(draining=True)
        with pytest.raises(Conflict):
            await authority.campaign(Member(N1, BootId(1)))
        assert told == ["x"]
        async with EtcdAuthority(config, cluster) as successor:
            assert await successor.register(N1, NODE) == 3


async def test_a_superseded_process_does_not_register_again(
    config: EtcdConfig, cluster: str, etcd: EtcdClient
) -> None:
    told: list[str] = []
    async with (
        EtcdAuthority(config, cluster, on_superseded=lambda: told.append("x")) as authority,
        EtcdAuthority(config, cluster) as operator,
    ):
        await authority.register(N1, NODE)
        await operator.forget(N1)
        await _lose_session(authority, etcd)
        await eventually(lambda: authority.superseded)
        assert told == ["x"]
        assert N1 not in (await operator.load()).nodes
        assert await operator.register(N1, NODE) == 3


async def test_an_update_notices_that_it_is_superseded(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str
) -> None:
    await authority.register(N1, NODE)
    async with EtcdAuthority(config, cluster) as operator:
        await operator.forget(N1)
    with pytest.raises(Conflict, match="superseded"):
        await authority.update_node(draining=True)
    assert authority.superseded


async def test_a_damaged_boot_number_is_reported(
    authority: EtcdAuthority, etcd: EtcdClient, cluster: str
) -> None:
    await etcd.put(f"/p2pkv/{cluster}/boots/n1".encode(), b"x")
    for step in (authority.forget(N1), authority.register(N1, NODE)):
        with pytest.raises(ConfigError, match=r"boots/n1.*must be a number"):
            await step


async def test_an_unknown_node_cannot_be_forgotten(authority: EtcdAuthority) -> None:
    with pytest.raises(InvalidArgument, match="'n9' was never registered"):
        await authority.forget(NodeId("n9"))


async def test_a_node_id_is_checked(authority: EtcdAuthority) -> None:
    with pytest.raises(ConfigError, match="node_id = 'a/b'"):
        await authority.register(NodeId("a/b"), NODE)


# -- the view


async def test_follow_yields_what_load_finds(authority: EtcdAuthority) -> None:
    async with following(authority) as follower:
        await authority.ensure_meta(META)
        await authority.register(N1, NODE)
        for epoch in range(1, 6):
            held = (await authority.load()).buckets
            await authority.update_buckets(
                [
                    change(b, held[BucketId(b)].mod_revision if held else 0, bucket(epoch))
                    for b in range(20)
                ]
            )
        assert await authority.campaign(Member(N1, BootId(1)))
        await follower.reaches(await authority.load())
        await authority.deregister()
        await follower.reaches(await authority.load())
        assert follower.view.planner is None
        assert not follower.view.nodes


async def test_malformed_records_are_counted_and_passed_over(
    authority: EtcdAuthority, etcd: EtcdClient, cluster: str
) -> None:
    root = f"/p2pkv/{cluster}/"
    await authority.update_buckets([change(3, 0, bucket())])
    garbage = {
        "buckets/3": b"garbage", "buckets/03": b"x", "buckets/65536": b"x", "buckets/-1": b"x",
        "nodes/n1": b'{"boot":1}', "nodes/a b": b"{}", "boots/n1": b"x", "planner": b'["n1"]',
        "strange": b"", "meta": b"[]", "nodes/\udcff": b"",
    }  # fmt: skip
    async with following(authority) as follower:
        for name, value in garbage.items():
            await etcd.put(root.encode() + name.encode(errors="surrogateescape"), value)
        await authority.update_buckets([change(4, 0, bucket())])
        await eventually(lambda: BucketId(4) in follower.view.buckets)
        assert follower.view.buckets.keys() == {3, 4}  # the last good record stays in force
        assert authority.malformed_records == len(garbage)
        view = await authority.load()
        assert view.buckets.keys() == {4}
        assert (view.nodes, view.boots, view.planner, view.meta) == ({}, {}, None, None)
        assert authority.malformed_records == 2 * len(garbage)


async def test_after_compaction_everything_that_differs_is_told(
    authority: EtcdAuthority, etcd: EtcdClient, cluster: str
) -> None:
    await authority.ensure_meta(META)
    await authority.register(N1, NODE)
    await authority.update_buckets([change(b, 0, bucket()) for b in range(4)])
    old = await authority.load()
    await authority.deregister()
    await authority.update_buckets(
        [change(1, old.buckets[BucketId(1)].mod_revision, bucket(2)), change(9, 0, bucket())]
    )
    await etcd.delete(f"/p2pkv/{cluster}/buckets/2".encode())
    await etcd.put(f"/p2pkv/{cluster}/buckets/3".encode(), b"garbage")
    await etcd.compact(await etcd.put(b"unrelated", b""))
    new = await authority.load()
    follower = Follower(authority, old)
    await eventually(lambda: bool(follower.deltas))
    assert len(follower.deltas) == 1
    delta = follower.deltas[0]
    assert delta.nodes == {N1: None}
    assert delta.buckets == {
        BucketId(1): new.buckets[BucketId(1)],
        BucketId(2): None,
        BucketId(9): new.buckets[BucketId(9)],
    }
    assert delta.boots == {}
    assert isinstance(delta.meta, msgspec.UnsetType)
    await authority.update_buckets([change(10, 0, bucket())])
    await eventually(lambda: BucketId(10) in follower.view.buckets)
    await follower.stop()


async def test_compaction_without_a_difference_is_silent(
    authority: EtcdAuthority, etcd: EtcdClient
) -> None:
    await authority.update_buckets([change(0, 0, bucket())])
    old = await authority.load()
    for _ in range(3):
        last = await etcd.put(b"unrelated", b"")
    await etcd.compact(last)
    follower = Follower(authority, old)
    await authority.update_buckets([change(1, 0, bucket())])
    await eventually(lambda: bool(follower.deltas))
    assert [set(delta.buckets) for delta in follower.deltas] == [{1}]
    await follower.stop()


# -- buckets


async def test_all_buckets_are_created_in_few_transactions(authority: EtcdAuthority) -> None:
    changes = [change(b, 0, bucket()) for b in range(1024)]
    start = time.monotonic()
    outcomes = await authority.update_buckets(changes)
    assert time.monotonic() - start < 3
    assert [o.bucket for o in outcomes] == list(range(1024))
    assert all(o.won for o in outcomes)
    view = await authority.load()
    assert view.buckets == {o.bucket: o.current for o in outcomes}
    assert len({v.mod_revision for v in view.buckets.values()}) == 9


async def test_a_failed_guard_fails_its_own_bucket_only(authority: EtcdAuthority) -> None:
    created = await authority.update_buckets([change(b, 0, bucket()) for b in range(200)])
    tokens = [o.current.mod_revision if o.current else 0 for o in created]
    rival = [change(b, tokens[b], bucket(2, N2)) for b in range(0, 200, 7)]
    taken = {o.bucket: o.current for o in await authority.update_buckets(rival)}
    ours = [change(b, tokens[b], bucket(2)) for b in range(200)]
    ours.append(change(500, 9, bucket()))
    outcomes = await authority.update_buckets(ours)
    for o in outcomes[:200]:
        if o.bucket in taken:
            assert o.lost
            assert o.current == taken[o.bucket]
        else:
            assert o.won
            assert o.current is not None
            assert o.current.record == bucket(2)
    assert outcomes[200].lost
    assert outcomes[200].current is None
    view = await authority.load()
    assert view.buckets == {o.bucket: o.current for o in outcomes[:200]}


async def test_of_two_contenders_each_bucket_has_one_winner(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str
) -> None:
    async with EtcdAuthority(config, cluster) as other:
        order = list(range(300))
        mine, theirs = await asyncio.gather(
            authority.update_buckets([change(b, 0, bucket(1, N1)) for b in order]),
            other.update_buckets([change(b, 0, bucket(1, N2)) for b in reversed(order)]),
        )
        view = await authority.load()
        for a, b in zip(mine, reversed(theirs), strict=True):
            assert {a.result, b.result} == {Result.WON, Result.LOST}
            assert a.current == b.current == view.buckets[a.bucket]


async def test_a_change_issued_again_is_won_again(authority: EtcdAuthority) -> None:
    first = await authority.update_buckets([change(0, 0, bucket())])
    again = await authority.update_buckets([change(0, 0, bucket())])
    assert first == again
    assert first[0].won


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([change(1, 0, bucket()), change(1, 0, bucket(2))], InvalidArgument),
        ([change(1, 0, bucket()), change(2, 0, bucket(1, NodeId("x" * (1 << 20))))], TooLarge),
    ],
)
async def test_bad_changes_are_refused_before_anything_is_sent(
    authority: EtcdAuthority, changes: list[BucketChange], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"bucket \d"):
        await authority.update_buckets(changes)
    assert not (await authority.load()).buckets


async def test_large_records_are_chunked_by_size(authority: EtcdAuthority) -> None:
    wide = msgspec.structs.replace(bucket(), assigned=(NodeId("x" * 100_000),))
    outcomes = await authority.update_buckets([change(b, 0, wide) for b in range(30)])
    assert all(o.won for o in outcomes)


@needs_sound_etcd
async def test_unknown_outcomes_are_settled_by_issuing_the_changes_again(cluster: str) -> None:
    """etcd is killed while 1,024 changes are under way: some are done, and nobody knows which."""
    with EtcdCluster() as server:
        config = server.config(attempt_timeout_s=0.3, total_timeout_s=0.6)
        async with EtcdAuthority(config, cluster) as authority:
            await authority.load()
            changes = [change(b, 0, bucket()) for b in range(1024)]
            updating = asyncio.create_task(authority.update_buckets(changes))
            async with EtcdClient(config) as watcher:
                await anext(watcher.watch(b"/p2pkv/", 1))  # the first chunk is there
            server.members[0].kill()
            first = await updating
            assert all(o.won or o.unknown for o in first)
            with pytest.raises(AuthorityUnavailable):
                await authority.load()
            down = await authority.update_buckets(changes)
            assert all(o.unknown and o.current is None for o in down)
            await asyncio.to_thread(server.members[0].restart)
            second = await authority.update_buckets(changes)
            assert all(o.won for o in second)
            for before, after in zip(first, second, strict=True):
                assert before.unknown or before == after
            async with EtcdClient(config) as client:
                found = await client.get_prefix(f"/p2pkv/{cluster}/buckets/".encode())
            assert {kv.version for kv in found.kvs} == {1}
            assert len(found.kvs) == 1024


# -- the planner


async def test_one_member_is_planner_until_it_resigns(config: EtcdConfig, cluster: str) -> None:
    async with AsyncExitStack() as stack:
        nodes = [NodeId(f"n{i}") for i in range(3)]
        members = []
        for node in nodes:
            authority = await stack.enter_async_context(EtcdAuthority(config, cluster))
            members.append((authority, Member(node, await authority.register(node, NODE))))
        won = await asyncio.gather(*(a.campaign(m) for a, m in members))
        assert sum(won) == 1
        first = won.index(True)
        planner, member = members[first]
        assert (await planner.load()).planner == member
        assert await planner.campaign(member)
        rival, other = members[first - 1]
        await rival.resign()  # not its to give up
        assert not await rival.campaign(other)
        await planner.resign()
        assert await rival.campaign(other)
        assert (await planner.load()).planner == other


async def test_a_planner_that_loses_its_session_loses_the_office(
    config: EtcdConfig, authority: EtcdAuthority, cluster: str, etcd: EtcdClient
) -> None:
    planner = Member(N1, await authority.register(N1, NODE))
    assert await authority.campaign(planner)
    async with EtcdAuthority(config, cluster) as other:
        rival = Member(N2, await other.register(N2, NODE))
        assert not await other.campaign(rival)
        await _lose_session(authority, etcd)
        assert await other.campaign(rival)
        await eventually(lambda: authority.session_losses == 1)
        assert not await authority.campaign(planner)


async def test_nobody_campaigns_without_a_session(authority: EtcdAuthority) -> None:
    with pytest.raises(Conflict, match="no session"):
        await authority.campaign(Member(N1, BootId(1)))


# -- trouble


@needs_sound_etcd
async def test_following_goes_on_after_etcd_was_killed_and_the_session_is_kept(
    cluster: str,
) -> None:
    with EtcdCluster() as server:
        config = server.config(session_ttl_s=5, attempt_timeout_s=0.5)
        async with EtcdAuthority(config, cluster) as authority:
            await authority.register(N1, NODE)
            async with following(authority) as follower:
                for b in range(3):
                    server.members[0].kill()
                    await asyncio.to_thread(server.members[0].restart)
                    outcome = await authority.update_buckets([change(b, 0, bucket())])
                    assert outcome[0].won
                await follower.reaches(await authority.load())
                assert [b for delta in follower.deltas for b in delta.buckets] == [0, 1, 2]
            assert authority.session_losses == 0
            assert N1 in (await authority.load()).nodes
