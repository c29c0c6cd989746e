"""The etcd client against real etcd servers, which are killed, paused and restarted."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from p2pkv import etcd as etcd_module
from p2pkv import etcd_server
from p2pkv.clock import SECOND_NS, monotonic
from p2pkv.config import EtcdConfig
from p2pkv.errors import AuthorityUnavailable, ConfigError, InvalidArgument
from p2pkv.etcd import Compacted, EtcdClient, LeaseLost, delete, get, if_revision, if_value, put
from p2pkv.testing.etcd import (
    EtcdCluster,
    enable_auth,
    find_etcd,
    make_certificates,
    survives_kills,
)

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
needs_sound_etcd = pytest.mark.skipif(
    not survives_kills(), reason="this version of etcd may lose data when it is killed"
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
async def client(server: EtcdCluster) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(server.config()) as client:
        yield client


@pytest.fixture
def prefix() -> bytes:
    return b"test-%d/" % next(_numbers)


async def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


class Follower:
    """Watches in a task and keeps what it got."""

    def __init__(self, client: EtcdClient, prefix: bytes, start_revision: int) -> None:
        self.revisions: list[int] = []
        self.batches: list[list[int]] = []
        self._task = asyncio.create_task(self._run(client, prefix, start_revision))

    async def _run(self, client: EtcdClient, prefix: bytes, start_revision: int) -> None:
        async with aclosing(client.watch(prefix, start_revision)) as batches:
            async for events in batches:
                self.batches.append([e.kv.mod_revision for e in events])
                self.revisions += self.batches[-1]

    async def stop(self) -> None:
        self._task.cancel()
        results = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError), results


# -- keys and transactions


async def test_a_put_is_read_and_a_delete_removes_it(client: EtcdClient, prefix: bytes) -> None:
    assert await client.get(prefix) is None
    revision = await client.put(prefix, b"1")
    kv = await client.get(prefix)
    assert kv is not None
    assert (kv.value, kv.mod_revision) == (b"1", revision)
    await client.delete(prefix)
    assert await client.get(prefix) is None


async def test_a_guarded_transaction_takes_one_branch(client: EtcdClient, prefix: bytes) -> None:
    guards, success = [if_revision(prefix, 0)], [put(prefix, b"1")]
    first = await client.txn(guards, success, [get(prefix)])
    assert (first.succeeded, first.repeated) == (True, False)
    second = await client.txn(guards, success, [get(prefix)])
    assert not second.succeeded
    assert [kv.mod_revision for kv in second.reads[0]] == [first.revision]
    third = await client.txn([if_value(prefix, b"1")], [delete(prefix), get(prefix)])
    assert third.succeeded
    assert third.reads == [[], []]


async def test_paged_reads_are_of_one_revision(
    client: EtcdClient, prefix: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "PAGE_KEYS", 7)
    names = [b"%s%02d" % (prefix, i) for i in range(50)]

    async def overwrite_all(rounds: int) -> None:
        for i in range(rounds):
            await client.txn([], [put(name, b"%d" % i) for name in names])

    await overwrite_all(1)
    writer = asyncio.create_task(overwrite_all(200))
    seen = set()
    while not writer.done():
        found = await client.get_prefix(prefix)
        assert [kv.key for kv in found.kvs] == names
        values = {kv.value for kv in found.kvs}
        assert len(values) == 1
        assert max(kv.mod_revision for kv in found.kvs) <= found.revision
        seen |= values
    await writer
    assert len(seen) > 3


async def test_a_refused_request_is_an_invalid_argument(client: EtcdClient, prefix: bytes) -> None:
    with pytest.raises(InvalidArgument, match="duplicate key"):
        await client.txn([], [put(prefix, b""), put(prefix, b"")])
    with pytest.raises(InvalidArgument, match="too many operations"):
        await client.txn([], [put(b"%s%d" % (prefix, i), b"") for i in range(129)])
    with pytest.raises(LeaseLost):
        await client.put(prefix, b"", lease=12345)
    assert await client.get(prefix) is None


async def test_a_transaction_without_an_answer_is_carried_out_once(prefix: bytes) -> None:
    with EtcdCluster() as cluster:
        config = cluster.config(attempt_timeout_s=0.3, total_timeout_s=20)
        async with EtcdClient(config) as client:
            await client.put(b"other", b"")
            cluster.members[0].pause()
            writing = asyncio.create_task(
                client.txn([if_revision(prefix, 0)], [put(prefix, b"ours")], [get(prefix)])
            )
            await asyncio.sleep(1.0)  # so that several attempts wait in the paused server
            cluster.members[0].resume()
            done = await writing
            assert done.repeated
            kv = await client.get(prefix)
            assert kv is not None
            assert (kv.version, kv.value) == (1, b"ours")
            assert done.succeeded or done.reads[0][0].value == b"ours"


# -- time


async def test_no_answer_is_authority_unavailable_within_the_total_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = EtcdConfig(endpoints=(url,), attempt_timeout_s=0.2, total_timeout_s=0.7)
        async with EtcdClient(config) as client:
            start = time.monotonic()
            with pytest.raises(AuthorityUnavailable, match=r"0\.7 s"):
                await client.get(b"x")
            assert 0.6 < time.monotonic() - start < 2.0
            assert client.last_contact_ns is None


async def test_closing_ends_calls_under_way_and_leaves_no_task() -> None:
    with EtcdCluster() as cluster:
        async with EtcdClient(cluster.config(attempt_timeout_s=10, total_timeout_s=10)) as client:
            revision = await client.put(b"x", b"")
            watching = asyncio.create_task(anext(client.watch(b"x", revision + 1)))
            await asyncio.sleep(0.2)
            cluster.members[0].pause()
            reading = asyncio.create_task(client.get(b"x"))
            renewing = asyncio.create_task(client.keep_alive(1))
            await asyncio.sleep(0.2)
        results = await asyncio.gather(watching, reading, renewing, return_exceptions=True)
        assert [type(r) for r in results] == [AuthorityUnavailable] * 3
        await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_cancelling_leaves_no_task(client: EtcdClient, prefix: bytes) -> None:
    before = asyncio.all_tasks()
    lease = await client.grant(5)
    tasks = [
        asyncio.create_task(client.hold(lease)),
        asyncio.create_task(anext(client.watch(prefix, 1 + await client.put(prefix, b"")))),
    ]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [asyncio.CancelledError] * 2
    await eventually(lambda: asyncio.all_tasks() == before)


@pytest.mark.parametrize("close", [False, True])
async def test_a_cancellation_at_any_moment_ends_a_watch(
    server: EtcdCluster, prefix: bytes, close: bool
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = asyncio.all_tasks()
    async with EtcdClient(server.config()) as writer:
        revision = await writer.put(prefix, b"")
        for _ in range(60):
            async with EtcdClient(server.config()) as client:
                watching = asyncio.create_task(_drain(client, prefix, revision))
                await asyncio.sleep(rng.uniform(0, 0.008))
                if close:
                    await client.close()
                watching.cancel()
                done, _ = await asyncio.wait({watching}, timeout=5)
                assert done
                assert watching.cancelled() or close
                assert watching.cancelled() or isinstance(
                    watching.exception(), AuthorityUnavailable
                )
    await eventually(lambda: asyncio.all_tasks() == before)


async def _drain(client: EtcdClient, prefix: bytes, revision: int) -> None:
    async with aclosing(client.watch(prefix, revision)) as batches:
        async for _ in batches:
            pass


async def test_last_contact_is_when_the_answered_request_was_sent() -> None:
    with EtcdCluster() as cluster:
        async with EtcdClient(cluster.config(attempt_timeout_s=10, total_timeout_s=10)) as client:
            before = monotonic()
            lease = await client.grant(60)
            first = client.last_contact_ns
            assert first is not None
            assert before <= first <= monotonic()
            cluster.members[0].pause()
            reading = asyncio.create_task(client.get(b"x"))
            await asyncio.sleep(0.5)
            assert client.last_contact_ns == first
            resumed = monotonic()
            cluster.members[0].resume()
            await reading
            second = client.last_contact_ns
            assert first < second <= resumed - SECOND_NS // 4
            await client.keep_alive(lease.id)
            third = client.last_contact_ns
            assert third > second
            await client.status()  # answered by a member alone, without the leader
            with pytest.raises(LeaseLost):
                await client.put(b"x", b"", lease=1)
            assert client.last_contact_ns == third


# -- leases


async def test_a_held_lease_lives_until_it_is_revoked(client: EtcdClient, prefix: bytes) -> None:
    lease = await client.grant(2)
    await client.put(prefix, b"", lease.id)
    holding = asyncio.create_task(client.hold(lease))
    done, _ = await asyncio.wait({holding}, timeout=4.5)
    assert not done
    assert await client.get(prefix) is not None
    await client.revoke(lease.id)
    await client.revoke(lease.id)
    assert await client.get(prefix) is None
    await asyncio.wait_for(holding, 3)
    assert await client.keep_alive(lease.id) == 0


# -- watching


async def test_a_watch_starts_in_the_past_and_sees_deletions(
    client: EtcdClient, prefix: bytes
) -> None:
    first = await client.put(prefix + b"a", b"1")
    await client.delete(prefix + b"a")
    await client.put(b"not-" + prefix, b"")
    last = await client.put(prefix + b"b", b"2")
    events = []
    async with aclosing(client.watch(prefix, first)) as batches:
        async for batch in batches:
            events += batch
            if batch[-1].kv.mod_revision == last:
                break
    assert [(e.type, e.kv.key.removeprefix(prefix), e.kv.value) for e in events] == [
        (0, b"a", b"1"),
        (1, b"a", b""),
        (0, b"b", b"2"),
    ]


async def test_a_watch_of_compacted_history_says_so(client: EtcdClient, prefix: bytes) -> None:
    first = await client.put(prefix, b"1")
    last = await client.put(prefix, b"2")
    await client.compact(last)
    with pytest.raises(Compacted) as caught:
        await anext(client.watch(prefix, first))
    assert caught.value.revision == last


async def test_a_watch_needs_a_start(client: EtcdClient, prefix: bytes) -> None:
    with pytest.raises(InvalidArgument, match="start_revision = 0"):
        await anext(client.watch(prefix, 0))


async def test_large_revisions_arrive_whole(client: EtcdClient, prefix: bytes) -> None:
    """A catch-up of 4.8 MB comes in fragments, cut without regard for revisions."""
    value = bytes(600 * 1024)
    revisions = []
    for i in range(4):
        done = await client.txn([], [put(b"%s%d-%d" % (prefix, i, j), value) for j in (0, 1)])
        revisions.append(done.revision)
    follower = Follower(client, prefix, revisions[0])
    await eventually(lambda: len(follower.revisions) == 8)
    await follower.stop()
    assert follower.revisions == [r for r in revisions for _ in range(2)]
    assert len(follower.batches) > 1
    assert all(len(batch) % 2 == 0 for batch in follower.batches)


async def test_an_idle_watch_survives_and_goes_on(server: EtcdCluster, prefix: bytes) -> None:
    async with EtcdClient(server.config(attempt_timeout_s=0.2)) as client:
        revision = await client.put(prefix, b"")
        follower = Follower(client, prefix, revision)
        await eventually(lambda: len(follower.revisions) == 1)
        await asyncio.sleep(1.5)  # several requests for progress
        last = await client.put(prefix, b"")
        await eventually(lambda: follower.revisions == [revision, last])
        await follower.stop()


async def _disturb(cluster: EtcdCluster, client: EtcdClient, how: str) -> list[float]:
    """Put without pause while each member in turn is lost and comes back; seconds of each put."""
    took = []
    for member in cluster.members:
        member.kill() if how == "kill" else member.pause()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            start = time.monotonic()
            await client.put(b"a/x", b"")
            took.append(time.monotonic() - start)
        member.resume() if how == "pause" else await asyncio.to_thread(member.restart)
        await asyncio.to_thread(cluster.wait, cluster.members, 20)
    return took


@needs_sound_etcd
async def test_three_members_killed_and_paused_in_turn_lose_no_event_and_no_lease() -> None:
    with EtcdCluster(3) as cluster:
        async with EtcdClient(cluster.config(total_timeout_s=20)) as client:
            first = await client.put(b"a/x", b"")
            lease = await client.grant(8)
            await client.put(b"b/lease", b"", lease.id)
            holding = asyncio.create_task(client.hold(lease))
            follower = Follower(client, b"a/", first)
            took = await _disturb(cluster, client, "kill")
            took += await _disturb(cluster, client, "pause")
            last = await client.put(b"a/x", b"")
            await eventually(lambda: last in follower.revisions)
            await follower.stop()
            # The one foreign revision is that of the key under the lease. A put that was repeated
            # has more than one revision, and each is there once.
            assert follower.revisions == [first, *range(first + 2, last + 1)]
            assert len(took) > 20
            assert not holding.done()
            assert await client.get(b"b/lease") is not None
            holding.cancel()


async def test_a_silent_member_is_left_for_the_next() -> None:
    with EtcdCluster(3) as cluster:
        async with EtcdClient(cluster.config(attempt_timeout_s=0.5, total_timeout_s=20)) as client:
            revision = await client.put(b"a/x", b"")
            follower = Follower(client, b"a/", revision)
            await eventually(lambda: len(follower.revisions) == 1)
            used = client._preferred
            cluster.members[used].pause()
            last = await client.put(b"a/x", b"")
            assert client._preferred != used
            await eventually(lambda: last in follower.revisions, timeout_s=8)
            await follower.stop()
            cluster.members[used].resume()


# -- who may


PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        enable_auth(cluster, "store", PASSWORD, "/p2pkv/")
        yield cluster


def _user(cluster: EtcdCluster, user: str, password: str) -> EtcdConfig:
    return cluster.config(user=user, password=password, total_timeout_s=15)


async def test_a_user_works_below_its_prefix_only(guarded: EtcdCluster) -> None:
    async with EtcdClient(_user(guarded, "store", PASSWORD)) as client:
        revision = await client.put(b"/p2pkv/a", b"1")
        lease = await client.grant(5)
        assert await client.keep_alive(lease.id) > 0
        async with aclosing(client.watch(b"/p2pkv/", revision)) as batches:
            assert [e.kv.value for e in await anext(batches)] == [b"1"]
        with pytest.raises(ConfigError, match=r"etcd\.user = 'store'"):
            await client.get(b"/other")
        with pytest.raises(ConfigError, match=r"etcd\.user = 'store'"):
            await anext(client.watch(b"/other", 1))


@pytest.mark.parametrize(("user", "password"), [("store", "wrong"), ("nobody", "x"), ("", "")])
async def test_wrong_credentials_name_the_field(
    guarded: EtcdCluster, user: str, password: str
) -> None:
    async with EtcdClient(_user(guarded, user, password)) as client:
        with pytest.raises(ConfigError, match=r"etcd\.user"):
            await client.get(b"/p2pkv/a")


async def test_a_call_renews_a_forgotten_token(guarded: EtcdCluster) -> None:
    async with EtcdClient(_user(guarded, "store", PASSWORD)) as client:
        await client.put(b"/p2pkv/t", b"1")
        guarded.members[0].terminate()
        await asyncio.to_thread(guarded.members[0].restart)
        await client.put(b"/p2pkv/t", b"2")


async def test_a_watch_renews_a_forgotten_token(guarded: EtcdCluster) -> None:
    async with EtcdClient(_user(guarded, "store", PASSWORD)) as client:
        first = await client.put(b"/p2pkv/t", b"1")
        follower = Follower(client, b"/p2pkv/t", first)
        await eventually(lambda: follower.revisions == [first])
        guarded.members[0].terminate()
        await asyncio.to_thread(guarded.members[0].restart)
        last = await client.put(b"/p2pkv/t", b"2")
        await eventually(lambda: last in follower.revisions)
        await follower.stop()


async def test_credentials_do_no_harm_where_etcd_wants_none(server: EtcdCluster) -> None:
    async with EtcdClient(_user(server, "store", PASSWORD)) as client:
        assert await client.get(b"x") is None


async def test_authentication_may_be_switched_on_later() -> None:
    with EtcdCluster() as cluster:
        async with EtcdClient(_user(cluster, "store", PASSWORD)) as client:
            await client.put(b"/p2pkv/a", b"1")
            enable_auth(cluster, "store", PASSWORD, "/p2pkv/")
            await client.put(b"/p2pkv/a", b"2")


@needs_openssl
async def test_tls_with_client_certificates(tmp_path: Path) -> None:
    ours, foreign = tmp_path / "ours", tmp_path / "foreign"
    for directory in (ours, foreign):
        directory.mkdir()
    files, other = make_certificates(ours), make_certificates(foreign)
    with EtcdCluster(tls=files) as cluster:
        async with EtcdClient(cluster.config()) as client:
            revision = await client.put(b"x", b"1")
            async with aclosing(client.watch(b"x", revision)) as batches:
                assert len(await anext(batches)) == 1
        for stranger in (
            cluster.config(total_timeout_s=1, ca_file=str(other.ca)),
            cluster.config(total_timeout_s=1, cert_file=str(other.cert), key_file=str(other.key)),
        ):
            async with EtcdClient(stranger) as client:
                with pytest.raises(AuthorityUnavailable):
                    await client.get(b"x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoints": ()}, "etcd.endpoints"),
        ({"endpoints": ("127.0.0.1:2379",)}, "etcd.endpoints = '127.0.0.1:2379'"),
        ({"endpoints": ("http://127.0.0.1",)}, "etcd.endpoints"),
        ({"endpoints": ("http://127.0.0.1:x",)}, "etcd.endpoints"),
        ({"endpoints": ("ftp://127.0.0.1:1",)}, "etcd.endpoints"),
        ({"endpoints": ("http://a:1", "https://b:1")}, "https://"),
        ({"endpoints": ("http://a:1",), "ca_file": "/dev/null"}, "https://"),
        ({"endpoints": ("https://a:1",), "ca_file": "/missing"}, "etcd.ca_file = '/missing'"),
        ({"endpoints": ("https://a:1",), "cert_file": "/x"}, "etcd.cert_file"),
        ({"password": "x"}, "etcd.user"),
    ],
)
def test_a_bad_configuration_names_its_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EtcdClient(EtcdConfig(**fields))  # type: ignore[arg-type]
    assert message in str(caught.value)


# -- the servers themselves


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
async def test_ipv6() -> None:
    with EtcdCluster(host="::1") as cluster:
        async with EtcdClient(cluster.config()) as client:
            assert await client.put(b"x", b"") > 0


def test_a_taken_port_is_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = etcd_server._free_address
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        taken = f"127.0.0.1:{occupant.getsockname()[1]}"
        answers = iter([taken])
        monkeypatch.setattr(etcd_server, "_free_address", lambda h: next(answers, choose(h)))
        with EtcdCluster() as cluster:
            assert cluster.endpoints != (f"http://{taken}",)
            assert cluster.members[0].healthy()


def test_a_server_that_cannot_start_shows_its_log() -> None:
    with (
        pytest.raises(AuthorityUnavailable, match="no-such-flag"),
        EtcdCluster(extra_arguments=["--no-such-flag"]),
    ):
        pass


def test_stopping_leaves_neither_process_nor_data() -> None:
    cluster = EtcdCluster().start()
    member = cluster.members[0]
    directory = cluster._directory.path
    assert member.running
    assert directory.exists()
    cluster.stop()
    cluster.stop()
    assert not member.running
    assert not directory.exists()


def test_the_binary_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_etcd()
    monkeypatch.setenv("P2PKV_ETCD", str(real))
    assert find_etcd() == real
    monkeypatch.setenv("P2PKV_ETCD", "/missing/etcd")
    with pytest.raises(ConfigError, match="P2PKV_ETCD = '/missing/etcd'"):
        find_etcd()
