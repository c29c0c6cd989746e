"""Garbage, half messages, huge announced sizes: counted, answered or dropped; nobody else notices.

Each test runs beside the traffic of honest clients, which must not see an error.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from support import RawPeer, Traffic, figure, new_seed

from p2pkv import Client, stream, wire
from p2pkv.etcd_server import EtcdCluster
from p2pkv.sessions import OWNER_BYTES
from p2pkv.testing.cluster import Cluster, wait_for
from p2pkv.types import Member, NodeId
from p2pkv.wire import PREFIX, VERSION, Fault, Kind, Status

KiB, MiB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(1, etcd=etcd, session_ttl_s=5.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def endpoint(cluster: Cluster) -> str:
    return cluster.endpoint("n0")


@pytest.fixture(scope="module", autouse=True)
def traffic(cluster: Cluster) -> Iterator[Traffic]:
    with Traffic(cluster, new_seed(), keys=60) as traffic:
        yield traffic


@pytest.fixture(autouse=True)
def nobody_notices(traffic: Traffic) -> Iterator[None]:
    yield
    traffic.go_on(5)


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as kv:
        yield kv


@pytest.fixture
def peer(endpoint: str, cluster: Cluster) -> Iterator[RawPeer]:
    with RawPeer(endpoint, cluster.name) as peer:
        yield peer
        assert peer.ask(Kind.PING, wire.Empty(), request=999).kind == Kind.PONG, (
            "it is still served"
        )


def head(kind: int, body: bytes, request: int = 7, version: int = VERSION) -> bytes:
    return PREFIX.pack(version, kind, 0, request, 0) + body


def packed(*values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


# -- over the limits of a message


BAD_BODIES = {
    "a key of 1025 bytes": (Kind.GET, packed([b"k" * 1025], False)),
    "an empty key": (Kind.GET, packed([b""], False)),
    "65537 keys": (Kind.EXISTS, packed([b"k"] * 65537, False)),
    "a key that is text": (Kind.GET, packed(["k"], False)),
    "a body of another type": (Kind.GET, msgspec.msgpack.encode({"keys": []})),
    "no body": (Kind.GET, b""),
    "half a body": (Kind.GET, packed([b"key"], False)[:-3]),
    "more than a body": (Kind.GET, packed([b"key"], False) + b"\0"),
    "an unknown field": (Kind.DELETE, packed([b"key"], 1)),
    "a negative size": (Kind.PUT, packed([b"k"], [-1], [False] * 4 + [0])),
    "a size of 2**63": (Kind.ALLOC, packed([b"k"], [1 << 63], [False] * 4 + [0])),
    "an array of 4 G announced": (Kind.GET, b"\x92\xdd\xff\xff\xff\xff"),
    "a key of 4 GB announced": (Kind.GET, b"\x92\x91\xc6\xff\xff\xff\xff"),
    "a map of 4 G announced": (Kind.HELLO, b"\xdf\xff\xff\xff\xff"),
    "arrays in arrays": (Kind.GET, b"\x91" * 200_000),
    "a ttl of 2**60": (Kind.EXPIRE, packed([b"k"], 1 << 60)),
    "a page of 0": (Kind.SCAN, packed([0], b"", b"", 0)),
    "no bucket": (Kind.SCAN, packed([], b"", b"", 1)),
    "bucket 65536": (Kind.SCAN, packed([65536], b"", b"", 1)),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_out_of_form_is_answered_with_its_request_id(
    peer: RawPeer, kv: Client, name: str
) -> None:
    kind, body = BAD_BODIES[name]
    before = figure(kv, "garbage_total")
    peer.send(head(kind, body))
    answer, _ = peer.receive()
    assert (answer.kind, answer.request) == (Kind.ERROR, 7)
    assert answer.body.fault == Fault.BAD_REQUEST
    assert len(answer.body.message) <= 1024
    assert figure(kv, "garbage_total") == before + 1


BAD_REQUESTS: dict[str, tuple[Kind, wire.Body, Sequence[bytes]]] = {
    "16385 keys": (Kind.EXISTS, wire.Exists([b"k"] * 16385), ()),
    "no value": (Kind.PUT, wire.Put([b"bad"], [1], wire.PutOptions()), ()),
    "a value too short": (Kind.PUT, wire.Put([b"bad"], [3], wire.PutOptions()), (b"xx",)),
    "a value too long": (Kind.PUT, wire.Put([b"bad"], [1], wire.PutOptions()), (b"xx",)),
    "a frame too many": (Kind.PUT, wire.Put([b"bad"], [1], wire.PutOptions()), (b"x", b"x")),
    "sizes for fewer keys": (Kind.PUT, wire.Put([b"bad", b"b"], [1], wire.PutOptions()), (b"x",)),
    "sizes for more keys": (Kind.PUT, wire.Put([b"bad"], [1, 1], wire.PutOptions()), (b"xx",)),
    "an alloc over value_bytes_max": (
        Kind.ALLOC, wire.Alloc([b"bad"], [(1 << 30) + 1], wire.PutOptions()), (),
    ),
    "an alloc without a size": (Kind.ALLOC, wire.Alloc([b"bad"], [], wire.PutOptions()), ()),
    "an answer as a request": (Kind.VALUES, wire.Values(b"", [], []), ()),
    "a kind that nobody serves": (Kind.PONG, wire.Empty(), ()),
    "operations of somebody who is no node": (Kind.REPLICATE, wire.Replicate([]), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_cannot_be_right_is_refused_and_changes_nothing(
    peer: RawPeer, kv: Client, name: str
) -> None:
    kind, body, payload = BAD_REQUESTS[name]
    kv.delete("bad")
    before = figure(kv, "requests_refused_total")
    answer = peer.ask(kind, body, *payload)
    assert answer.kind == Kind.ERROR
    assert answer.body.fault == Fault.BAD_REQUEST
    assert figure(kv, "requests_refused_total") == before + 1
    assert not kv.exists("bad")


def test_a_value_may_come_in_several_frames(peer: RawPeer, kv: Client) -> None:
    put = wire.Put([b"parts", b"whole"], [3, 2], wire.PutOptions())
    assert peer.ask(Kind.PUT, put, b"a", b"bcd", b"e").body.statuses == b""
    assert kv.batch_get(["parts", "whole"]) == [b"abc", b"de"]


def test_another_version_is_told_which_one_this_is(peer: RawPeer) -> None:
    peer.send(head(Kind.GET, packed([b"k"], False), version=VERSION + 1))
    answer, _ = peer.receive()
    assert answer.body.fault == Fault.VERSION
    assert f"this is version {VERSION}" in answer.body.message


def test_an_unknown_kind_is_answered(peer: RawPeer) -> None:
    peer.send(head(250, b"\x90"))
    assert peer.receive()[0].body.fault == Fault.BAD_REQUEST


@pytest.mark.parametrize("frame", [b"", b"\x01", b"x" * 19], ids=["empty", "one byte", "19 bytes"])
def test_less_than_a_head_is_counted_and_not_answered(
    peer: RawPeer, kv: Client, frame: bytes
) -> None:
    before = figure(kv, "garbage_total")
    peer.send(frame)
    wait_for(lambda: figure(kv, "garbage_total") == before + 1, "it is counted")
    assert peer.silent(0.1)


def test_a_head_over_its_limit_is_answered(peer: RawPeer) -> None:
    """32 MiB and one byte."""
    peer.send(head(Kind.GET, bytes(32 * MiB + 1 - PREFIX.size)))
    answer, _ = peer.receive()
    assert answer.body.fault == Fault.BAD_REQUEST
    assert f"is over {32 * MiB}" in answer.body.message


def test_a_frame_over_the_limit_ends_the_connection(endpoint: str, cluster: Cluster) -> None:
    with RawPeer(endpoint, cluster.name) as peer:
        peer.send(head(Kind.PING, b"\x90"), bytes(65 * MiB))
        assert peer.silent(1.0)


def test_without_hello_there_is_no_session(endpoint: str, cluster: Cluster) -> None:
    with RawPeer(endpoint, cluster.name, hello=False) as peer:
        answer = peer.ask(Kind.GET, wire.Get([b"k"]))
        assert answer.body.fault == Fault.NO_SESSION
        answer = peer.ask(Kind.HELLO, wire.Hello("another"), request=0)
        assert answer.body.fault == Fault.CLUSTER


def test_a_client_cannot_hand_over_buckets(peer: RawPeer, kv: Client, cluster: Cluster) -> None:
    """Nor one that says it is a node."""
    kv.put("mine", b"1")
    entry = wire.Entry(b"mine", 1)
    for nonce, member in enumerate((None, Member(NodeId("n0"), 1), Member(NodeId("nx"), 1))):
        peer.ask(Kind.HELLO, wire.Hello(cluster.name, member), request=0)
        for bucket in (0, 63, 64, 65535):
            body = wire.Snapshot(bucket, 1, nonce, 0, [entry], True)
            answer = peer.ask(Kind.SNAPSHOT, body, b"x")
            assert answer.kind == Kind.ERROR or answer.body.status != Status.OK
    assert kv.get("mine") == b"1"


def test_bytes_outside_of_an_allocation_are_refused(peer: RawPeer, kv: Client) -> None:
    alloc = peer.ask(Kind.ALLOC, wire.Alloc([b"alloc"], [100], wire.PutOptions()))
    id = alloc.body.ids[0]
    for offset, length in ((1, 100), (101, 0), (100, 1), (1 << 61, 1)):
        answer = peer.ask(Kind.WRITE, wire.Write(id, offset), bytes(length))
        assert answer.kind == Kind.ERROR, (offset, length)
    assert peer.ask(Kind.WRITE, wire.Write(id + 1000, 0), b"x").body.statuses == bytes(
        [Status.CONFLICT]
    )
    early = peer.ask(Kind.COMMIT, wire.Commit([id]), request=2).body.statuses
    assert early == bytes([Status.INVALID])
    assert not kv.exists("alloc")


def test_bytes_behind_a_value_are_not_read(peer: RawPeer, kv: Client) -> None:
    kv.put("short", b"x" * 100)
    token = peer.ask(Kind.OPEN, wire.Open([b"short"])).body.tokens[0]
    for offset, length in ((0, 101), (100, 1), (1 << 61, 1)):
        assert peer.ask(Kind.READ, wire.Read(token, offset, length)).kind == Kind.ERROR
    answer = peer.ask(Kind.READ, wire.Read(token + 1000, 0, 1))
    assert answer.body.statuses == bytes([Status.CONFLICT])
    assert peer.ask(Kind.RELEASE, wire.Release([token, token])).body.statuses[1] == Status.CONFLICT


def test_what_one_session_opened_another_cannot_use(
    peer: RawPeer, kv: Client, endpoint: str, cluster: Cluster
) -> None:
    kv.put("mine", b"x")
    token = peer.ask(Kind.OPEN, wire.Open([b"mine"])).body.tokens[0]
    id = peer.ask(Kind.ALLOC, wire.Alloc([b"mine too"], [1], wire.PutOptions())).body.ids[0]
    with RawPeer(endpoint, cluster.name) as other:
        conflict = bytes([Status.CONFLICT])
        assert other.ask(Kind.READ, wire.Read(token, 0, 1)).body.statuses == conflict
        assert other.ask(Kind.WRITE, wire.Write(id, 0), b"y").body.statuses == conflict
        assert other.ask(Kind.COMMIT, wire.Commit([id])).body.statuses == conflict
    assert peer.ask(Kind.ABORT, wire.Abort([id])).body.statuses == b""


# -- a repeated request


def test_a_repeated_write_runs_once_and_gets_the_same_answer(
    endpoint: str, cluster: Cluster, kv: Client
) -> None:
    """Also on a new connection of the same session."""
    session = b"T" * OWNER_BYTES + b"1234567"
    put = wire.Put([b"once"], [1], wire.PutOptions(if_absent=True))
    delete = wire.Delete([b"gone"])
    kv.put("gone", b"")
    with RawPeer(endpoint, cluster.name, session) as peer:
        assert peer.ask(Kind.PUT, put, b"1", request=10).body.statuses == b""
        assert peer.ask(Kind.PUT, put, b"1", request=10).body.statuses == b""
        assert peer.ask(Kind.DELETE, delete, request=11).body.statuses == b""
    kv.put("gone", b"again")
    with RawPeer(endpoint, cluster.name, session) as peer:
        assert peer.ask(Kind.PUT, put, b"2", request=10).body.statuses == b""
        assert peer.ask(Kind.DELETE, delete, request=11).body.statuses == b""
        assert peer.ask(Kind.PUT, put, b"2", request=12).body.statuses == bytes([Status.EXISTS])
    assert kv.get("once") == b"1"
    assert kv.get("gone") == b"again"
    with RawPeer(endpoint, cluster.name) as other:
        assert other.ask(Kind.DELETE, delete, request=11).body.statuses == b""
    assert kv.batch_delete(["once", "gone"]) == [True, False]


# -- anything at all, on every port


def ports(cluster: Cluster) -> dict[str, tuple[str, int]]:
    record = next(iter(cluster.view().nodes.values()))
    named = {"control": record.control, "gossip": record.gossip, "data": record.data}
    return {name: stream.parse_endpoint(e[0]) for name, e in named.items() if e}


ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
ZMTP_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HUGE_FRAME = b"\x02" + (1 << 62).to_bytes(8, "big")

NONSENSE = {
    "nothing": b"",
    "one byte": b"\x00",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a greeting and no more": ZMTP_GREETING,
    "a frame of 4 EiB announced": ZMTP_GREETING + ZMTP_READY + HUGE_FRAME + bytes(1000),
    "a command of 4 EiB announced": ZMTP_GREETING + b"\x06" + (1 << 62).to_bytes(8, "big"),
    "a preface with another token": stream.preface(b"s" * 16, b"t" * 16),
    "half a preface": stream.MAGIC,
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_on_a_port_disturbs_nobody(cluster: Cluster, kv: Client, name: str) -> None:
    for address in ports(cluster).values():
        socks = [socket.create_connection(address, 5) for _ in range(5)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(NONSENSE[name])
        assert kv.put("beside", name.encode()) == 1
        assert kv.get("beside") == name.encode()
        for sock in socks:
            sock.close()


def test_random_messages_disturb_nobody(cluster: Cluster, endpoint: str, kv: Client) -> None:
    """Some begin as right ones do."""
    seed = new_seed()
    rng = random.Random(seed)
    kinds = [k for k in Kind if k not in (Kind.BYE, Kind.DELETE_RANGE, Kind.DELETE, Kind.PUT)]
    kv.put("beside", b"1")
    with RawPeer(endpoint, cluster.name) as peer:
        for i in range(3000):
            body = rng.randbytes(rng.randrange(60))
            frame = (
                body if i % 3 == 0 else head(rng.choice(kinds), body, request=rng.getrandbits(64))
            )
            peer.send(frame, *[rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(3))])
            while peer.socket.poll(0):
                peer.receive()
    for address in ports(cluster).values():
        for _ in range(30):
            with (
                socket.create_connection(address, 5) as sock,
                contextlib.suppress(OSError),
            ):
                for _ in range(rng.randrange(4)):
                    sock.sendall(rng.randbytes(rng.randrange(2000)))
    assert kv.get("beside") == b"1"


def test_a_flipped_bit_of_a_right_message_disturbs_nobody(
    cluster: Cluster, endpoint: str, kv: Client
) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    kv.put("beside", b"1")
    right = [
        wire.encode(Kind.GET, 1, 0, wire.Get([b"beside", b"other"])),
        wire.encode(Kind.ALLOC, 2, 0, wire.Alloc([b"flip"], [100], wire.PutOptions())),
        wire.encode(Kind.SCAN, 3, 0, wire.Scan([0, 1], b"", b"x", 10)),
        wire.encode(Kind.SNAPSHOT, 4, 0, wire.Snapshot(0, 1, 2, 0, [wire.Entry(b"k", 0)])),
        wire.encode(Kind.HELLO, 5, 0, wire.Hello(cluster.name)),
    ]
    with RawPeer(endpoint, cluster.name) as peer:
        for _ in range(3000):
            frame = bytearray(rng.choice(right))
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            if frame[1] in (Kind.DELETE, Kind.DELETE_RANGE, Kind.PUT):
                continue
            peer.send(bytes(frame))
            while peer.socket.poll(0):
                peer.receive()
    assert kv.get("beside") == b"1"


# -- the data connection


def data_connection(cluster: Cluster, endpoint: str) -> tuple[RawPeer, socket.socket]:
    """A session, and its data connection."""
    session = b"D" * OWNER_BYTES + b"%07d" % (time.monotonic_ns() % 10_000_000)
    peer = RawPeer(endpoint, cluster.name, session, hello=False)
    welcome: wire.Welcome = peer.ask(Kind.HELLO, wire.Hello(cluster.name), request=0).body
    sock = socket.create_connection(stream.parse_endpoint(welcome.data[0]), 5)
    sock.sendall(stream.preface(session, welcome.token))
    return peer, sock


def closed_by_peer(sock: socket.socket, timeout_s: float = 10.0) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(65536):
            continue
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


DATA_NONSENSE = {
    "a head of 4 GiB announced": stream.SIZES.pack(0xFFFF_FFFF, 0),
    "a payload of 16 EiB announced": stream.SIZES.pack(40, (1 << 64) - 1)
    + wire.encode(Kind.PUT, 1, 0, wire.Put([b"k"], [(1 << 62) - 1], wire.PutOptions())),
    "a head of no bytes": stream.SIZES.pack(0, 0),
    "a head of nonsense": stream.SIZES.pack(100, 0) + bytes(100),
}


@pytest.mark.parametrize("name", DATA_NONSENSE)
def test_nonsense_on_a_data_connection_ends_it(cluster: Cluster, endpoint: str, name: str) -> None:
    peer, sock = data_connection(cluster, endpoint)
    with peer, sock:
        sock.sendall(DATA_NONSENSE[name])
        assert closed_by_peer(sock)


def test_a_message_that_stops_in_the_middle_is_not_stored(
    cluster: Cluster, endpoint: str, kv: Client
) -> None:
    body = wire.Put([b"half"], [MiB], wire.PutOptions())
    begin = stream.message(Kind.PUT, 1, 0, body, MiB)
    peer, sock = data_connection(cluster, endpoint)
    with peer:
        with sock:
            sock.sendall(begin + bytes(MiB // 2))
        wait_for(lambda: figure(kv, "allocations") == 0, "the half put is taken back")
        assert not kv.exists("half")


def test_a_data_connection_that_does_not_read_its_answers_holds_up_nobody(
    cluster: Cluster, endpoint: str, kv: Client
) -> None:
    kv.put("much", bytes(8 * MiB))
    get = stream.message(Kind.GET, 1, 0, wire.Get([b"much"]), 0)
    peer, sock = data_connection(cluster, endpoint)
    with peer, sock:
        sock.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            for _ in range(1000):
                sock.sendall(get)
        assert kv.get("much") == bytes(8 * MiB)
        assert kv.put("much", b"") == 1
    wait_for(lambda: figure(kv, "memory_retiring_bytes") == 0, "what it held is free")


# -- nothing grows


def test_garbage_does_not_make_a_node_grow(cluster: Cluster, endpoint: str, kv: Client) -> None:
    node = psutil.Process(cluster["n0"].pid)

    def attack() -> int:
        for _ in range(5):
            with RawPeer(endpoint, cluster.name) as peer:
                peer.send(head(Kind.GET, bytes(30 * MiB)))
                peer.receive()
                for _ in range(50):
                    peer.send(head(Kind.PUT, b"\xdd\xff\xff\xff\xff" + bytes(MiB)), bytes(MiB))
                    peer.receive()
                peer.send(head(Kind.PING, b"\x90"), bytes(65 * MiB))
        for address in ports(cluster).values():
            for _ in range(50):
                with socket.create_connection(address, 5) as sock:
                    sock.sendall(ZMTP_GREETING + ZMTP_READY + HUGE_FRAME)
        return int(node.memory_info().rss)

    first = attack()
    for _ in range(3):
        last = attack()
    assert last - first < 48 * MiB


def test_requests_whose_answers_nobody_reads_are_bounded(
    cluster: Cluster, endpoint: str, kv: Client
) -> None:
    """The queues fill and requests wait in the sender; the node keeps its size and its temper."""
    node = psutil.Process(cluster["n0"].pid)
    before = node.memory_info().rss
    kv.put("much", bytes(4 * MiB))
    with RawPeer(endpoint, cluster.name, queue_max=1) as peer:
        for i in range(2000):
            frame = wire.encode(Kind.GET, i + 1, 0, wire.Get([b"much"]))
            try:
                peer.socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                break
        began = time.monotonic()
        assert kv.get("much") == bytes(4 * MiB)
        assert time.monotonic() - began < 2.0
        assert node.memory_info().rss - before < 64 * MiB
    kv.put("much", b"")
