"""What each call of a client does: Client, AsyncClient, and the one within a node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import KINDS, Blocking, client_of, embedded_node

from p2pkv import BatchError, InvalidArgument, Miss, QuotaExceeded, TooLarge
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(2, etcd=etcd) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=[*KINDS, "Node.client"])
def kv(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Any]:
    if request.param != "Node.client":
        with client_of(request.param, cluster) as kv:
            yield kv
        return
    with embedded_node(cluster, "inside") as (node, loop):
        cluster.wait_settled(["n0", "n1", "inside"])
        yield Blocking(node.client(), loop)
        loop.run(node.drain())


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A prefix for the keys of one test."""
    return request.node.name + "/"


def test_put_then_get(kv: Any, name: str) -> None:
    assert kv.put(name, b"value") == 1
    assert kv.get(name) == b"value"


def test_get_of_a_missing_key_is_none(kv: Any, name: str) -> None:
    assert kv.get(name) is None


def test_put_replaces(kv: Any, name: str) -> None:
    kv.put(name, b"a longer value than the next")
    kv.put(name, b"next")
    assert kv.get(name) == b"next"


def test_empty_value_is_a_value(kv: Any, name: str) -> None:
    assert kv.put(name, b"") == 1
    assert kv.get(name) == b""
    assert kv.exists(name)


def test_put_if_absent_keeps_what_is_there(kv: Any, name: str) -> None:
    assert kv.put(name, b"first", if_absent=True) == 1
    assert kv.put(name, b"second", if_absent=True) == 0
    assert kv.get(name) == b"first"


def test_write_once_keeps_what_is_there(kv: Any, name: str) -> None:
    assert kv.put(name, b"first", write_once=True) == 1
    assert kv.put(name, b"again", write_once=True) == 1
    assert kv.put(name, b"plain") == 1
    assert kv.get(name) == b"first"


def test_a_write_once_key_can_be_deleted_and_put_anew(kv: Any, name: str) -> None:
    kv.put(name, b"first", write_once=True)
    assert kv.delete(name)
    kv.put(name, b"second", write_once=True)
    assert kv.get(name) == b"second"


def test_get_into_copies_and_tells_the_size(kv: Any, name: str) -> None:
    kv.put(name, b"12345")
    buffer = bytearray(b"........")
    assert kv.get_into(name, buffer) == 5
    assert buffer == b"12345..."


def test_get_into_of_a_missing_key_is_none_and_leaves_the_buffer(kv: Any, name: str) -> None:
    buffer = bytearray(b"....")
    assert kv.get_into(name, buffer) is None
    assert buffer == b"...."


def test_get_into_a_buffer_too_small_raises_and_leaves_it(kv: Any, name: str) -> None:
    kv.put(name, b"12345")
    buffer = bytearray(b"....")
    with pytest.raises(TooLarge, match="5 bytes does not fit the buffer of 4"):
        kv.get_into(name, buffer)
    assert buffer == b"...."


def test_get_into_a_read_only_buffer_is_refused(kv: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match="writable"):
        kv.get_into(name, b"....")


def test_exists(kv: Any, name: str) -> None:
    assert kv.exists(name) is False
    kv.put(name, b"")
    assert kv.exists(name) is True


def test_delete_tells_whether_the_key_was_there(kv: Any, name: str) -> None:
    kv.put(name, b"x")
    assert kv.delete(name) is True
    assert kv.delete(name) is False
    assert kv.get(name) is None


def test_a_key_is_gone_after_its_ttl(kv: Any, name: str) -> None:
    kv.put(name, b"x", ttl=0.3)
    began = time.monotonic()
    assert kv.get(name) == b"x"
    wait_for(lambda: kv.get(name) is None, "the key expires")
    assert time.monotonic() - began >= 0.25


def test_expire_sets_a_ttl_and_takes_it_back(kv: Any, name: str) -> None:
    kv.put(name + "goes", b"x")
    kv.put(name + "stays", b"x", ttl=0.4)
    kv.expire(name + "goes", 0.1)
    kv.expire(name + "stays", None)
    wait_for(lambda: not kv.exists(name + "goes"), "the key expires")
    until = time.monotonic() + 0.5
    wait_for(lambda: time.monotonic() > until, "the first ttl is over")
    assert kv.get(name + "stays") == b"x"


def test_expire_of_a_missing_key_raises_miss(kv: Any, name: str) -> None:
    with pytest.raises(Miss):
        kv.expire(name, 1.0)


@pytest.mark.parametrize("ttl", [0, -1.0, 1e9, float("nan")])
def test_a_ttl_out_of_range_is_refused(kv: Any, name: str, ttl: float) -> None:
    with pytest.raises(InvalidArgument, match="ttl"):
        kv.put(name, b"x", ttl=ttl)
    assert not kv.exists(name)


def test_a_timeout_out_of_range_is_refused(kv: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        kv.get(name, timeout=0)


def test_batch_put_and_batch_get_keep_the_order(kv: Any, name: str) -> None:
    values = {f"{name}{i}": b"%d" % i for i in range(500)}
    assert kv.batch_put(values) == [1] * 500
    keys = [*reversed(values), name + "missing"]
    assert kv.batch_get(keys) == [*reversed(values.values()), None]


def test_batch_put_takes_pairs_and_the_last_of_a_key_wins(kv: Any, name: str) -> None:
    assert kv.batch_put([(name, b"1"), (name, b"2")]) == [1, 1]
    assert kv.get(name) == b"2"


def test_batch_put_if_absent_tells_which_were_stored(kv: Any, name: str) -> None:
    kv.put(name + "old", b"1")
    assert kv.batch_put({name + "old": b"2", name + "new": b"2"}, if_absent=True) == [0, 1]
    assert kv.batch_get([name + "old", name + "new"]) == [b"1", b"2"]


def test_batch_get_of_one_key_many_times(kv: Any, name: str) -> None:
    kv.put(name, b"x")
    assert kv.batch_get([name] * 100) == [b"x"] * 100


def test_empty_batches_do_nothing(kv: Any) -> None:
    assert kv.batch_put({}) == []
    assert kv.batch_get([]) == []
    assert kv.batch_get_into([], []) == []
    assert kv.batch_exists([]) == []
    assert kv.batch_delete([]) == []
    assert kv.match_prefix([]) == 0


def test_batch_get_into_fills_each_buffer(kv: Any, name: str) -> None:
    kv.batch_put({name + "a": b"AAA", name + "b": b"BB"})
    buffers = [bytearray(3), bytearray(3), bytearray(3)]
    assert kv.batch_get_into([name + "a", name + "-", name + "b"], buffers) == [3, None, 2]
    assert buffers == [b"AAA", b"\0\0\0", b"BB\0"]


def test_batch_get_into_tells_of_each_buffer_too_small(kv: Any, name: str) -> None:
    kv.batch_put({name + "a": b"AAA", name + "b": b"BB"})
    buffers = [bytearray(2), bytearray(2)]
    with pytest.raises(BatchError) as error:
        kv.batch_get_into([name + "a", name + "b"], buffers)
    assert isinstance(error.value.results[0], TooLarge)
    assert error.value.results[1] == 2
    assert buffers == [b"\0\0", b"BB"]


def test_batch_get_into_wants_a_buffer_for_each_key(kv: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match="buffers: 1 for 2 keys"):
        kv.batch_get_into([name + "a", name + "b"], [bytearray(1)])


def test_batch_exists_and_batch_delete(kv: Any, name: str) -> None:
    kv.batch_put({name + "a": b"", name + "b": b""})
    keys = [name + "a", name + "-", name + "b"]
    assert kv.batch_exists(keys) == [True, False, True]
    assert kv.batch_delete(keys) == [True, False, True]
    assert kv.batch_exists(keys) == [False, False, False]


def test_one_key_where_many_are_wanted_is_refused(kv: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match="sequence of keys"):
        kv.batch_get(name)


def test_match_prefix_counts_from_the_start_to_the_first_gap(kv: Any, name: str) -> None:
    keys = [f"{name}{i}" for i in range(100)]
    kv.batch_put(dict.fromkeys(keys, b"x"))
    assert kv.match_prefix(keys) == 100
    kv.delete(keys[63])
    assert kv.match_prefix(keys) == 63
    kv.delete(keys[0])
    assert kv.match_prefix(keys) == 0


def test_prefetch_tells_how_many_are_there(kv: Any, name: str) -> None:
    kv.batch_put({name + "a": b"", name + "b": b""})
    assert kv.prefetch([name + "a", name + "b", name + "c"]) == 2


def test_scan_gives_keys_and_values_of_a_prefix(kv: Any, name: str) -> None:
    values = {f"{name}{i}".encode(): b"%d" % i for i in range(300)}
    kv.batch_put(values)
    kv.put("x" + name, b"not this")
    found = list(kv.scan(name, page=7))
    assert len(found) == 300
    assert dict(found) == values


def test_scan_keys_gives_sizes(kv: Any, name: str) -> None:
    kv.batch_put({name + "a": b"1", name + "b": b"22"})
    assert sorted(kv.scan_keys(name)) == [(f"{name}a".encode(), 1), (f"{name}b".encode(), 2)]


def test_scan_of_nothing_is_empty(kv: Any, name: str) -> None:
    assert list(kv.scan(name)) == []


def test_scan_passes_over_expired_keys(kv: Any, name: str) -> None:
    kv.put(name + "stays", b"")
    kv.put(name + "goes", b"", ttl=0.05)
    wait_for(lambda: not kv.exists(name + "goes"), "the key expires")
    assert [key for key, _ in kv.scan(name)] == [f"{name}stays".encode()]


@pytest.mark.parametrize("page", [0, 4097])
def test_a_page_out_of_range_is_refused(kv: Any, page: int) -> None:
    with pytest.raises(InvalidArgument, match="page"):
        list(kv.scan(page=page))


def test_delete_range_deletes_what_has_the_prefix(kv: Any, name: str) -> None:
    kv.batch_put({f"{name}a{i}": b"" for i in range(100)})
    kv.put(name + "b", b"")
    assert kv.delete_range(name + "a") == 100
    assert kv.delete_range(name + "a") == 0
    assert [key for key, _ in kv.scan(name)] == [f"{name}b".encode()]


def test_pin_and_unpin_tell_which_keys_were_there(kv: Any, name: str) -> None:
    kv.put(name, b"x")
    assert kv.pin([name, name + "-"]) == [True, False]
    assert kv.unpin([name, name + "-"]) == [True, False]


def test_a_pin_beyond_the_quota_is_refused(kv: Any, name: str) -> None:
    """The quota is a quarter of 64 MiB."""
    key, large = name + "{t}", bytes(17 << 20)
    kv.put(key, large)
    with pytest.raises(BatchError) as error:
        kv.pin([key])
    assert isinstance(error.value.results[0], QuotaExceeded)
    with pytest.raises(QuotaExceeded, match="hard_pin_quota"):
        kv.put(key + "2", large, hard_pin=True)
    assert kv.get(key) == large
    assert not kv.exists(key + "2")
    kv.delete(key)


def test_stats_has_one_entry_for_each_node(kv: Any, cluster: Cluster) -> None:
    stats = kv.stats()
    assert {"n0@1", "n1@1"} <= set(stats)
    assert stats["n0@1"].figures["memory_limit_bytes"] == 64 << 20
    assert sum(s.figures["buckets_owned"] for s in stats.values()) == 64


def test_dictionary_access_of_the_blocking_client(cluster: Cluster, name: str) -> None:
    with cluster.client() as kv:
        kv[name] = b"x"
        assert kv[name] == b"x"
        assert name in kv
        del kv[name]
        assert name not in kv
        with pytest.raises(Miss):
            kv[name]
        with pytest.raises(KeyError):
            del kv[name]
