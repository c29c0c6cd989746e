"""Which keys and values can be stored, and the limits of both, crossed by one."""

from __future__ import annotations

import array
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import KINDS, client_of, figure, new_seed

from p2pkv import AsyncClient, Client, InvalidArgument, Limits, ProtocolError, TooLarge
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster

MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(2, etcd=etcd, memory_limit_bytes=512 * MiB) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=KINDS)
def kv(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Any]:
    with client_of(request.param, cluster) as kv:
        yield kv


# -- values


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview"),
        memoryview(b"a slice of a memoryview")[2:7],
        array.array("d", [1.5, -2.5]),
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.zeros((0, 3), dtype=np.int64),
        np.float64(3.5),
    ],
    ids=[
        "bytes",
        "bytearray",
        "memoryview",
        "slice",
        "array",
        "numpy",
        "numpy empty",
        "numpy scalar",
    ],
)
def test_any_contiguous_buffer_is_a_value(kv: Any, value: Any) -> None:
    assert kv.put("buffer", value) == 1
    assert kv.get("buffer") == memoryview(value).tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "encode it first"),
        (5, "buffer"),
        (None, "buffer"),
        ([1, 2], "buffer"),
        (np.arange(10)[::2], "contiguous"),
        (np.zeros((3, 4)).T, "contiguous"),
        (memoryview(b"abcdef")[::2], "contiguous"),
    ],
    ids=["str", "int", "None", "list", "strided", "transposed", "strided view"],
)
def test_what_is_no_contiguous_buffer_is_refused(kv: Any, value: Any, message: str) -> None:
    kv.delete("refused")
    with pytest.raises(InvalidArgument, match=message):
        kv.put("refused", value)
    with pytest.raises(InvalidArgument, match=message):
        kv.batch_put({"refused": b"", "refused too": value})
    assert kv.batch_exists(["refused", "refused too"]) == [False, False]


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(16),
        array.array("q", [0, 0]),
        np.zeros(4, dtype=np.float32),
        memoryview(bytearray(16)),
    ],
    ids=["bytearray", "array", "numpy", "memoryview"],
)
def test_any_writable_contiguous_buffer_receives(kv: Any, buffer: Any) -> None:
    value = np.arange(4, dtype=np.float32)
    kv.put("into", value)
    assert kv.get_into("into", buffer) == 16
    assert memoryview(buffer).tobytes() == value.tobytes()


def test_a_strided_buffer_is_refused_as_a_receiver(kv: Any) -> None:
    kv.put("into", b"1234")
    with pytest.raises(InvalidArgument, match="contiguous"):
        kv.get_into("into", np.zeros(8, dtype=np.uint8)[::2])


@pytest.mark.parametrize(
    "size", [1, 63, 64, 4096, 65535, 65536, 262143, 262144, 262145, 3 * MiB + 1]
)
def test_values_come_back_whole(kv: Any, size: int) -> None:
    value = random.Random(size).randbytes(size)
    kv.put("whole", value)
    assert kv.get("whole") == value
    buffer = bytearray(size + 1)
    assert kv.get_into("whole", buffer) == size
    assert buffer[:size] == value


def test_a_value_larger_than_a_message_goes_in_pieces(kv: Any) -> None:
    """64 MiB is the most that one message takes."""
    value = random.Random(1).randbytes(64 * MiB + 1)
    assert kv.put("pieces", value, timeout=30) == 1
    assert kv.get("pieces", timeout=30) == value
    small = bytearray(1000)
    with pytest.raises(TooLarge, match="does not fit the buffer of 1000"):
        kv.get_into("pieces", small)
    assert small == bytes(1000)
    assert kv.put("pieces", b"", if_absent=True) == 0
    assert kv.delete("pieces")


def test_a_batch_larger_than_a_message_goes_as_several(kv: Any) -> None:
    values = {f"{{several}}{i}": bytes([i]) * (15 * MiB) for i in range(6)}
    assert kv.batch_put(values, timeout=30) == [1] * 6
    assert kv.batch_get(list(values), timeout=30) == list(values.values())
    assert kv.delete_range("{several}") == 6


def test_a_message_full_of_small_values_comes_back(kv: Any) -> None:
    """What lies between them in the arena must not lift the answer over the limit of a frame."""
    keys = [f"{{full}}{i}" for i in range(16000)]
    value = random.Random(2).randbytes(4130)
    assert sum(kv.batch_put(dict.fromkeys(keys, value), timeout=30)) == 16000
    assert kv.batch_get(keys, timeout=30) == [value] * 16000
    assert kv.delete_range("{full}") == 16000


@pytest.mark.slow
def test_a_value_of_one_gibibyte(etcd: EtcdCluster) -> None:
    """The largest that value_bytes_max allows by default; one byte more is refused at once."""
    block = random.Random(3).randbytes(MiB)
    value = bytearray(GiB)
    for i in range(1024):
        value[i * MiB : (i + 1) * MiB] = block
        value[i * MiB : i * MiB + 4] = i.to_bytes(4, "big")
    with (
        Cluster(1, etcd=etcd, memory_limit_bytes=GiB + 64 * MiB) as cluster,
        cluster.client() as kv,
    ):
        assert kv.put("huge", value, timeout=60) == 1
        buffer = bytearray(GiB)
        assert kv.get_into("huge", buffer, timeout=60) == GiB
        assert buffer == value
        value.append(0)
        with pytest.raises(TooLarge, match=f"{GiB + 1} bytes, limit value_bytes_max = {GiB}"):
            kv.put("more", value)
        assert kv.put("huge", b"small again") == 1
        assert kv.get("huge") == b"small again"


def test_a_hundred_thousand_small_keys(kv: Any) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    values = {b"many/%d" % i: rng.randbytes(rng.randrange(40)) for i in range(100_000)}
    assert sum(kv.batch_put(values, timeout=60)) == 100_000
    assert kv.batch_get(list(values), timeout=60) == list(values.values())
    found = list(kv.scan("many/", page=4096, timeout=60))
    assert len(found) == 100_000
    assert dict(found) == values
    assert kv.match_prefix(list(values), timeout=60) == 100_000
    assert kv.delete_range("many/", timeout=60) == 100_000
    assert list(kv.scan_keys("many/")) == []


# -- keys


@pytest.mark.parametrize(
    "key",
    [
        "ключ",
        "鍵",
        "🔑",
        " ",
        "\n",
        "a\0b",
        "{",
        "}",
        "{}",
        "{a",
        "a}{b}",
        "{a}{b}",
        "//",
        "k" * 1024,
    ],
)
def test_text_keys(kv: Any, key: str) -> None:
    kv.put(key, key.encode())
    assert kv.get(key) == key.encode()
    assert kv.get(key.encode()) == key.encode()
    assert kv.delete(key)


@pytest.mark.parametrize(
    "key", [b"\0", b"\0\0", b"\xff", b"\xff" * 1024, b"a\0{b\0}c", bytes(range(256))]
)
def test_binary_keys(kv: Any, key: bytes) -> None:
    kv.put(key, key)
    assert kv.get(key) == key
    assert (key, len(key)) in list(kv.scan_keys(key))
    assert (key, len(key)) in list(kv.scan_keys(key[:-1]))
    assert kv.delete(key)


def test_keys_that_begin_alike_are_told_apart(kv: Any) -> None:
    values = {b"a" * n: b"%d" % n for n in range(1, 1025, 31)}
    kv.batch_put(values)
    assert kv.batch_get(list(values)) == list(values.values())
    assert kv.delete_range("a") == len(values)


def test_a_key_of_any_buffer_is_its_bytes(kv: Any) -> None:
    kv.put(bytearray(b"buffer key"), b"1")
    assert kv.get(memoryview(b"buffer key")) == b"1"


@pytest.mark.parametrize(
    ("key", "error"),
    [("", InvalidArgument), (b"", InvalidArgument), (b"k" * 1025, TooLarge), ("ä" * 513, TooLarge),
     (5, InvalidArgument), (None, InvalidArgument)],
    ids=["empty str", "empty bytes", "1025 bytes", "1026 bytes of UTF-8", "int", "None"],
)  # fmt: skip
def test_a_key_out_of_limits_is_refused_and_nothing_is_sent(kv: Any, key: Any, error: type) -> None:
    before = figure(kv, "requests_put_total")
    with pytest.raises(error, match="key"):
        kv.put(key, b"")
    with pytest.raises(error, match="key"):
        kv.batch_put([("fine", b""), (key, b"")])
    with pytest.raises(error, match="key"):
        kv.get(key)
    assert figure(kv, "requests_put_total") == before


ASKED = "asked-" * 22
"""Makes keys too long for the index: their owners are asked for them."""


def test_keys_with_one_tag_lie_on_one_node(kv: Any, cluster: Cluster) -> None:
    keys = [f"{i}{{same}}{i}{ASKED}" for i in range(200)]
    kv.batch_put(dict.fromkeys(keys, b"x"))
    before = {m: s.figures.get("requests_get_total", 0) for m, s in kv.stats().items()}
    kv.batch_get(keys)
    after = {m: s.figures.get("requests_get_total", 0) for m, s in kv.stats().items()}
    assert sorted(after[m] - before[m] for m in after) == [0, 1]


def test_a_scan_of_a_tag_asks_one_node_once(kv: Any) -> None:
    kv.batch_put({f"{{run}}{i}": b"" for i in range(100)})
    before = figure(kv, "requests_scan_total")
    assert len(list(kv.scan_keys("{run}"))) == 100
    assert figure(kv, "requests_scan_total") == before + 1


@pytest.mark.parametrize(
    ("call", "kinds"),
    [("batch_put", "put filled"), ("batch_get", "get"), ("batch_exists", "exists"),
     ("match_prefix", "match"), ("batch_delete", "delete"), ("pin", "pin"), ("unpin", "unpin")],
)  # fmt: skip
def test_a_batch_of_a_thousand_keys_is_one_message_for_each_owner(
    kv: Any, call: str, kinds: str
) -> None:
    keys = [f"one message/{i}/{ASKED}" for i in range(1000)]
    for _ in range(2):  # the second time it asks for room, with one more message
        kv.batch_put(dict.fromkeys(keys, b"x" * 100))
    names = [f"requests_{kind}_total" for kind in kinds.split()]

    def served() -> list[float]:
        return [sum(s.figures.get(n, 0) for n in names) for s in kv.stats().values()]

    before = served()
    getattr(kv, call)(dict.fromkeys(keys, b"x" * 100) if call == "batch_put" else keys)
    assert [b - a for a, b in zip(before, served(), strict=True)] == [1, 1]


# -- limits that differ from the defaults


SMALL = Limits(
    key_bytes_max=16, value_bytes_max=3 * MiB, batch_keys_max=100, message_bytes_max=MiB,
    scan_keys_max=10, inflight_max=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def small(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(1, etcd=etcd, limits=SMALL) as cluster:
        yield cluster


def test_values_and_batches_beyond_small_limits_go_in_parts(small: Cluster) -> None:
    config = small.client_config(limits=SMALL)
    with Client.from_config(config) as kv:
        values = {f"k{i}": b"%d" % i for i in range(1001)}
        before = figure(kv, "requests_put_total")
        assert sum(kv.batch_put(values)) == 1001
        assert figure(kv, "requests_put_total") == before + 11
        assert kv.batch_get(list(values)) == list(values.values())
        assert len(list(kv.scan_keys("k", page=10))) == 1001
        large = random.Random(4).randbytes(3 * MiB)
        assert kv.put("large", large) == 1
        assert kv.get("large") == large
        with pytest.raises(TooLarge, match="value_bytes_max"):
            kv.put("larger", large + b"1")
        with pytest.raises(TooLarge, match="key_bytes_max = 16"):
            kv.put("k" * 17, b"")
        assert kv.delete_range("") == 1002


async def test_an_asyncio_client_with_small_limits(small: Cluster) -> None:
    async with AsyncClient.from_config(small.client_config(limits=SMALL)) as kv:
        await kv.batch_put({f"k{i}": b"%d" % i for i in range(201)})
        assert len(await kv.batch_get([f"k{i}" for i in range(201)])) == 201
        with pytest.raises(TooLarge, match="key_bytes_max = 16"):
            await kv.get("k" * 17)


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_refuses_what_a_client_with_larger_limits_sends(small: Cluster, kind: str) -> None:
    """Soon and by name, not by trying until the deadline."""
    with client_of(kind, small, timeout_s=30.0) as kv:
        kv.put("there", b"1")
        with pytest.raises(ProtocolError, match="17 bytes, limit 16"):
            kv.put("k" * 17, b"")
        with pytest.raises(ProtocolError, match="limit value_bytes_max"):
            kv.put("large", bytes(3 * MiB + 1))
        with pytest.raises(ProtocolError, match="limit value_bytes_max"):
            kv.put("large", bytes(65 * MiB))
        assert kv.get("there") == b"1"
