"""Read connections: native threads that answer from the published index."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from errno import EPROTO, ETIMEDOUT

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexside import BUCKETS
from readside import MIB, TOKEN, ReadHost, S, is_closed, request, serving, until, within

from p2pkv import _native
from p2pkv._native import reads
from p2pkv.ring import bucket_of

pytestmark = pytest.mark.skipif(not _native.available, reason="the native module was not built")

THERE, MISS, ASK = 0, reads.MISS_BYTE, reads.ASK_BYTE
LARGE = 24 * MIB
"""More than the buffers of both ends take."""


@pytest.fixture
def host() -> Iterator[ReadHost]:
    with serving() as made:
        yield made


def test_a_get_brings_the_values_in_order(host: ReadHost) -> None:
    values = {b"k%d" % i: os.urandom(i * 37) for i in range(50)}
    for key, value in values.items():
        host.put(key, value)
    assert host.client().get(*reversed(values)) == list(reversed(values.values()))


def test_values_may_be_received_into_buffers(host: ReadHost) -> None:
    host.put(b"a", b"12345")
    host.put(b"b", b"678")
    client = host.client()
    assert client.ask(reads.GET, b"a", b"b") == [5, 3]
    targets = [memoryview(bytearray(2)), memoryview(bytearray(6))]
    assert client.end.into(targets, within()) == 0
    assert b"".join(targets) == b"12345678"
    assert client.get(b"b") == [b"678"]


def test_what_is_not_there_is_told_and_what_is_not_known_left_to_the_owner(host: ReadHost) -> None:
    host.put(b"a", b"1")
    long = b"k" * 1024
    client = host.client()
    assert client.ask(reads.GET, b"x", b"a", long) == [reads.MISS, 1, reads.ASK]
    assert client.end.values([reads.MISS, 1, reads.ASK], within()) == (0, [None, b"1", None])
    assert client.exists(b"x", b"y", b"a", long) == [MISS, MISS, THERE, ASK]
    figures = host.figures
    assert (figures.values, figures.misses, figures.flags, figures.absent) == (1, 1, 1, 2)
    assert figures.asks == 2


def test_exists_and_match_tell_what_is_there(host: ReadHost) -> None:
    for key in (b"a", b"b", b"d"):
        host.put(key, b"1")
    client = host.client()
    assert client.exists(b"a", b"c", b"d") == [THERE, MISS, THERE]
    assert client.match(b"a", b"b", b"c", b"d") == (2, MISS)
    assert client.match(b"a", b"b") == (2, THERE)
    assert client.match(b"c") == (0, MISS)
    assert client.match(b"a", b"k" * 129, b"c") == (1, ASK)


def test_behind_a_closed_gate_nothing_is_told(host: ReadHost) -> None:
    home = bucket_of(b"x", BUCKETS)
    host.put(b"a", b"1", bucket=home)
    host.put(b"b", b"2", bucket=(home + 1) % BUCKETS)
    host.writer.close_gate(home)
    client = host.client()
    assert client.get(b"a", b"b", b"x") == [None, b"2", None]
    assert client.exists(b"a", b"b", b"x") == [ASK, THERE, ASK]
    assert client.match(b"b", b"a") == (1, ASK)
    assert client.match(b"b", b"x") == (1, ASK)
    assert host.figures.misses == 0


def test_a_gate_is_shut_once_its_time_has_come(host: ReadHost) -> None:
    host.put(b"a", b"1")
    host.open_gates(within(0.05))
    client = host.client()
    until(lambda: client.get(b"a") == [None], "the gate is shut")
    assert client.exists(b"a", b"x") == [ASK, ASK]
    host.open_gates(within(30))
    assert client.get(b"a") == [b"1"]


def test_an_expired_value_is_left_to_the_owner(host: ReadHost) -> None:
    host.put(b"a", b"1", expires_at=time.monotonic_ns() - 1)
    host.put(b"b", b"2", expires_at=within(60))
    assert host.client().ask(reads.GET, b"a", b"b") == [reads.ASK, 1]


def test_a_node_that_has_ended_is_not_served_from(host: ReadHost) -> None:
    host.put(b"a", b"1")
    client = host.client()
    host.writer.close()
    assert client.exists(b"a", b"x") == [ASK, ASK]


def test_a_reply_carries_no_more_than_its_limit() -> None:
    with serving(payload_max=1000) as host:
        for key in (b"a", b"b", b"c"):
            host.put(key, key * 400)
        assert host.client().get(b"a", b"b", b"c") == [b"a" * 400, b"b" * 400, None]


def test_requests_may_be_sent_ahead_and_are_answered_in_order(host: ReadHost) -> None:
    for i in range(100):
        host.put(b"k%d" % i, b"%d" % i)
    sock = host.connect()
    sock.sendall(b"".join(request(reads.GET, [b"k%d" % i], id=i) for i in range(100)))
    file = sock.makefile("rb")
    for i in range(100):
        head, size = file.read(24), int.from_bytes(file.read(8), "little")
        assert int.from_bytes(head[8:12], "little") == i
        assert file.read(size) == b"%d" % i


def test_a_request_may_come_byte_by_byte(host: ReadHost) -> None:
    host.put(b"a", b"1")
    sock = host.connect(token=b"")
    for byte in reads.preface(TOKEN) + request(reads.GET, [b"a"]):
        sock.sendall(bytes([byte]))
    assert sock.makefile("rb").read(33)[32:] == b"1"


def test_a_request_larger_than_a_receive_is_answered(host: ReadHost) -> None:
    host.put(b"a", b"1")
    keys = [b"%04d" % i + b"x" * 900 for i in range(4000)]
    assert host.client().get(*keys, b"a")[-1] == b"1"


# -- peers that misbehave

HEAD = request(reads.GET, [b"a"])


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n".ljust(32),
        reads.preface(bytes(16)),
        b"P2KVREAD" + bytes([9]) + reads.preface(TOKEN)[9:],
        b"P2KVDATA" + reads.preface(TOKEN)[8:],
    ],
    ids=["http", "wrong token", "version", "another protocol"],
)
def test_who_has_no_token_is_dropped(host: ReadHost, bad: bytes) -> None:
    sock = host.connect(token=b"")
    sock.sendall(bad)
    assert is_closed(sock)
    assert host.figures.dropped == 1
    assert host.figures.requests == 0


@pytest.mark.parametrize(
    "bad",
    [
        HEAD[:4] + b"\x01" + HEAD[5:],
        HEAD[:5] + b"\x07" + HEAD[6:],
        HEAD[:6] + b"\x01" + HEAD[7:],
        HEAD[:8] + bytes(4) + HEAD[12:],
        HEAD[:8] + b"\xff\xff\xff\xff" + HEAD[12:],
        b"\xff\xff\xff\xff" + HEAD[4:],
        b"\x02\x00\x00\x00" + HEAD[4:],
        HEAD[:16] + b"\x00\x00" + HEAD[18:],
        HEAD[:16] + b"\xff\xff" + HEAD[18:],
        HEAD[:16] + b"\x02\x00" + HEAD[18:],
    ],
    ids=["version", "kind", "zeros", "no keys", "keys", "body", "short body", "empty key",
         "long key", "length"],
)  # fmt: skip
def test_nonsense_is_dropped_and_hurts_nobody_else(host: ReadHost, bad: bytes) -> None:
    host.put(b"a", b"1")
    client, sock = host.client(), host.connect()
    sock.sendall(bad)
    assert is_closed(sock)
    assert host.figures.dropped == 1
    assert client.get(b"a") == [b"1"]


def test_who_stops_in_the_middle_of_a_request_is_dropped_after_a_while() -> None:
    with serving(stall_ns=S // 10) as host:
        host.put(b"a", b"1")
        client, sock = host.client(), host.connect()
        sock.sendall(HEAD[:-1])
        silent = host.connect(token=b"")
        assert is_closed(sock)
        assert is_closed(silent)
        assert client.get(b"a") == [b"1"]
        assert host.figures.connections == 1


def test_an_idle_connection_stays() -> None:
    with serving(stall_ns=S // 20) as host:
        host.put(b"a", b"1")
        client = host.client()
        assert client.get(b"a") == [b"1"]
        sock = host.connect()
        sock.sendall(HEAD[:-1])
        assert is_closed(sock)  # so the stall has passed
        assert client.get(b"a") == [b"1"]


def test_who_does_not_read_is_dropped_and_holds_nothing_then() -> None:
    with serving(64 * MIB, stall_ns=S // 5) as host:
        item = host.put(b"large", bytes(LARGE))
        host.put(b"a", b"1")
        stopped = host.connect(receive_buffer=4096)
        stopped.sendall(request(reads.GET, [b"large"]))
        until(lambda: host.figures.values == 1, "the value is on its way")
        host.writer.withdraw([item])
        assert host.writer.held([item]) == [item]
        assert host.client().get(b"a") == [b"1"]
        until(lambda: not host.writer.held([item]), "the value is let go of")
        assert host.figures.dropped == 1


def test_a_value_that_is_overwritten_on_its_way_arrives_whole() -> None:
    with serving(64 * MIB) as host:
        value = random.Random(1).randbytes(LARGE)
        item = host.put(b"k", value)
        sock = host.connect(receive_buffer=65536)
        sock.sendall(request(reads.GET, [b"k"]))
        until(lambda: host.figures.values == 1, "the value is on its way")
        host.take_out(item)
        file = sock.makefile("rb")
        file.read(32)
        assert file.read(LARGE) == value
        until(lambda: not host.writer.held([item]), "the value is let go of")


def test_a_peer_that_dies_in_the_middle_holds_nothing() -> None:
    with serving(64 * MIB) as host:
        item = host.put(b"k", bytes(LARGE))
        sock = host.connect()
        sock.sendall(request(reads.GET, [b"k"]))
        until(lambda: host.figures.values == 1, "the value is on its way")
        sock.close()
        host.writer.withdraw([item])
        until(lambda: not host.writer.held([item]), "the value is let go of")
        until(lambda: host.figures.connections == 0, "the connection is gone")


def test_one_connection_too_many_is_closed() -> None:
    with serving(connections_max=2) as host:
        host.put(b"a", b"1")
        clients = [host.client(), host.client()]
        assert [c.get(b"a") for c in clients] == [[b"1"], [b"1"]]
        assert is_closed(host.connect())
        clients[0].sock.close()
        until(lambda: host.figures.connections == 1, "there is room again")
        assert host.client().get(b"a") == [b"1"]


def test_a_peer_that_floods_starves_nobody() -> None:
    with serving(64 * MIB) as host:
        host.put(b"large", bytes(8 * MIB))
        host.put(b"a", b"1")
        flood, stop = host.connect(), threading.Event()
        flood.sendall(request(reads.GET, [b"large"]) * 500)

        def swallow() -> None:
            room = bytearray(1 << 20)
            while not stop.is_set():
                flood.recv_into(room)

        thread = threading.Thread(target=swallow)
        thread.start()
        try:
            client = host.client()
            for _ in range(20):
                before = host.figures.bytes
                assert client.get(b"a") == [b"1"]
                assert host.figures.bytes - before <= 32 * MIB
        finally:
            stop.set()
            thread.join()


def test_many_clients_at_once_each_get_their_own() -> None:
    with serving(4 * MIB, threads=2) as host:
        values = {b"k%d" % i: random.Random(i).randbytes(i * 61) for i in range(128)}
        for key, value in values.items():
            host.put(key, value)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            chance, client = random.Random(seed), host.client()
            try:
                for _ in range(50):
                    keys = chance.sample(list(values), 20)
                    assert client.get(*keys) == [values[k] for k in keys]
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert host.figures.requests == 32 * 50


def test_values_that_are_replaced_all_the_time_are_never_torn() -> None:
    """Each value is one byte repeated; its memory is scrubbed as soon as nobody holds it."""
    with serving(32 * MIB) as host:
        size = 200_000
        current = host.put(b"k", bytes(size))
        client, done = host.client(), threading.Event()
        seen: list[bytes] = []

        def read() -> None:
            while not done.is_set():
                value = client.get(b"k")[0]
                if value is not None:
                    seen.append(value)

        thread = threading.Thread(target=read)
        thread.start()
        retired = []
        for i in range(1, 100):
            old, current = current, host.put(b"k", bytes([i]) * size)
            retired.append(old)
            held = {id(o) for o in host.writer.held(retired)}
            for item in retired:
                if id(item) not in held:
                    host.scrub(item)
            retired = [o for o in retired if id(o) in held]
            time.sleep(0.0005)
        done.set()
        thread.join()
        assert len(seen) > 10
        assert all(value == value[:1] * size for value in seen)


# -- the client's end


def test_a_server_that_ends_in_the_middle_is_noticed() -> None:
    with serving(64 * MIB) as host:
        host.put(b"k", bytes(LARGE))
        client = host.client()
        assert client.ask(reads.GET, b"k") == [LARGE]
        host.threads.close()
        error, _ = client.end.values([LARGE], within())
        assert error


def test_a_deadline_ends_the_waiting() -> None:
    a, b = socket.socketpair()
    with a, b:
        end = reads.ReadEnd(a.fileno(), MIB, 0)
        assert end.ask(reads.GET, [b"k"], within()) == 0
        assert end.table(within(0.05)) == (ETIMEDOUT, None)


def reply(sizes: list[int], *, id: int = 1, payload: int | None = None, kind: int = 1) -> bytes:
    total = sum(s for s in sizes if s >= 0) if payload is None else payload
    head = len(sizes).to_bytes(4, "little") + bytes([reads.PROTOCOL, kind, 0, 0])
    head += id.to_bytes(4, "little") + bytes(4) + total.to_bytes(8, "little")
    return head + b"".join(s.to_bytes(8, "little", signed=True) for s in sizes)


@pytest.mark.parametrize(
    "bad",
    [
        reply([1, 2]),
        reply([1], id=9),
        reply([1], kind=2),
        reply([1], payload=2),
        reply([MIB + 1]),
        reply([-3]),
        b"\xff" * 64,
    ],
    ids=["keys", "id", "kind", "payload", "too large", "size", "garbage"],
)
def test_a_reply_that_makes_no_sense_is_refused(bad: bytes) -> None:
    a, b = socket.socketpair()
    with a, b:
        end = reads.ReadEnd(a.fileno(), MIB, 0)
        assert end.ask(reads.GET, [b"k"], within()) == 0
        b.sendall(bad)
        assert end.table(within(5)) == (EPROTO, None)


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (reads.EXISTS, b"\x02"),
        (reads.MATCH, bytes([1, 0, 0, 0, 1, 0, 0, 0])),
        (reads.MATCH, bytes([0, 0, 0, 0, 0, 0, 0, 0])),
        (reads.MATCH, bytes([2, 0, 0, 0, 0, 0, 0, 0])),
        (reads.MATCH, bytes([0, 0, 0, 0, 2, 0, 0, 0])),
    ],
    ids=["flag", "a next one behind the last", "no next one", "matches", "flag of the next"],
)
def test_flags_that_make_no_sense_are_refused(kind: int, table: bytes) -> None:
    a, b = socket.socketpair()
    with a, b:
        end = reads.ReadEnd(a.fileno(), MIB, 0)
        assert end.ask(kind, [b"k"], within()) == 0
        b.sendall(reply([0], kind=kind)[:24] + table)
        assert end.table(within(5)) == (EPROTO, None)


@pytest.mark.parametrize("keys", [[], [b""], [b"k" * 1025], [b"k"] * 4097])
def test_what_no_request_can_carry_is_refused(keys: list[bytes]) -> None:
    a, b = socket.socketpair()
    with a, b:
        end = reads.ReadEnd(a.fileno(), MIB, 0)
        with pytest.raises(ValueError, match="keys"):
            end.ask(reads.GET, keys, within())


# -- the parser


def expected(data: bytes) -> int:
    """What the parser is to say, by the protocol's words."""
    if len(data) < 16:
        return 0
    body, count = (int.from_bytes(data[a:b], "little") for a, b in ((0, 4), (8, 12)))
    sane = data[4] == reads.PROTOCOL and data[5] in (1, 2, 3) and data[6:8] == b"\0\0"
    if not sane or not 1 <= count <= 4096 or not 3 * count <= body <= 4096 * 1026:
        return -1
    if len(data) < 16 + body:
        return 0
    lengths = [int.from_bytes(data[16 + 2 * i : 18 + 2 * i], "little") for i in range(count)]
    right = all(1 <= n <= 1024 for n in lengths) and 2 * count + sum(lengths) == body
    return 16 + body if right else -1


keys = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12)


@given(kind=st.integers(0, 4), names=keys, cut=st.integers(0, 600), changes=st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=3))  # fmt: skip
@settings(max_examples=1000)
def test_the_parser_takes_requests_and_nothing_else(
    kind: int, names: list[bytes], cut: int, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(request(kind, names))
    for at, byte in changes:
        if at < len(data):
            data[at] = byte
    part = bytes(data[:cut]) if cut < 300 else bytes(data)
    taken, found_kind, count = reads.parse(part)
    assert taken == expected(part)
    if taken > 0:
        assert (found_kind, count) == (part[5], int.from_bytes(part[8:12], "little"))


@given(st.binary(max_size=200))
def test_the_parser_survives_any_bytes(data: bytes) -> None:
    assert reads.parse(data)[0] == expected(data)


def test_threads_may_be_closed_twice(host: ReadHost) -> None:
    host.threads.close()
    host.threads.close()
    assert host.figures.connections == 0
