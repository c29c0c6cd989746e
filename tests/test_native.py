"""The native module: copies and sockets over pieces of memory.

A run of bytes is compared with what plain Python makes of the same buffers.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from errno import EAGAIN, EBADF, ECONNRESET, EMSGSIZE, EPIPE, ETIMEDOUT
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from p2pkv import _native as native
from p2pkv.errors import ConfigError, InvalidArgument

pytestmark = pytest.mark.skipif(not native.available, reason="the native module was not built")

SECOND = 1_000_000_000
MIB = 1 << 20
Pair = tuple[socket.socket, socket.socket]
runs = st.lists(st.binary(max_size=200), max_size=60)


def within(seconds: float) -> int:
    return time.monotonic_ns() + round(seconds * SECOND)


def cut(buffer: bytearray | bytes | memoryview, count: int, seed: int) -> list[memoryview]:
    """``count`` views that make up the buffer; some of them empty."""
    chance = random.Random(seed)
    places = sorted(chance.choice((0, chance.randrange(len(buffer) + 1))) for _ in range(count - 1))
    edges = [0, *places, len(buffer)]
    view = memoryview(buffer)
    return [view[a:b] for a, b in pairwise(edges)]


def connected(family: str, *, small: bool = True) -> Pair:
    if family == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            a = socket.create_connection(listener.getsockname())
            b, _ = listener.accept()
    size = 4096 if family == "unix" else 16384  # below, TCP sends a window per delayed ACK
    for end in (a, b) if small else ():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    return a, b


@pytest.fixture(params=["unix blocking", "unix non-blocking", "tcp blocking", "tcp non-blocking"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two ends of a stream with tiny buffers, in either mode."""
    family, mode = request.param.split()
    a, b = connected(family)
    with a, b:
        a.setblocking(mode == "blocking")
        b.setblocking(mode == "blocking")
        yield a, b


@pytest.fixture
def plain() -> Iterator[Pair]:
    a, b = connected("tcp")
    with a, b:
        yield a, b


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# Copies


@given(runs, st.integers(1, 60), st.integers(0, 1 << 32), st.sampled_from([0, 1 << 40]))
def test_a_copy_is_the_sources_joined_however_the_targets_are_cut(
    sources: list[bytes], count: int, seed: int, streaming_min: int
) -> None:
    target = bytearray(sum(map(len, sources)))
    native.copy(cut(target, count, seed), sources, streaming_min=streaming_min)
    assert target == b"".join(sources)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize("streaming_min", [0, native.STREAMING_MIN, 1 << 40])
def test_a_large_copy_by_threads_is_right_at_every_seam(threads: int, streaming_min: int) -> None:
    source = random.Random(threads).randbytes(33 * MIB + 4097)
    target = bytearray(len(source) + 2)
    native.copy(
        cut(memoryview(target)[1:-1], 7, threads),
        cut(source, 1000, threads),
        threads=threads,
        streaming_min=streaming_min,
    )
    assert target == b"\0" + source + b"\0"


@pytest.mark.parametrize("shift", [0, 1, 15, 63])
@pytest.mark.parametrize("length", [2048, 2049, 4095, 65536])
def test_streaming_writes_not_a_byte_beside_the_target(shift: int, length: int) -> None:
    source = random.Random(length).randbytes(length)
    target = bytearray(length + 128)
    native.copy([memoryview(target)[shift : shift + length]], [source], streaming_min=0)
    assert target == bytes(shift) + source + bytes(128 - shift)


def test_totals_that_differ_are_refused_and_nothing_is_copied() -> None:
    target = bytearray(3)
    with pytest.raises(InvalidArgument, match="targets of 3 bytes, sources of 4"):
        native.copy([target], [b"ab", b"cd"])
    assert target == bytes(3)


def test_a_copy_runs_without_the_gil() -> None:
    source, target = bytes(16 * MIB), bytearray(16 * MIB)
    started, ran = threading.Lock(), threading.Event()
    interval = sys.getswitchinterval()

    def run() -> None:
        with started:
            ran.set()

    started.acquire()
    thread = beside(run)
    sys.setswitchinterval(60)  # from here on the other thread gets only what a call gives away
    try:
        started.release()
        until = time.monotonic() + 20
        while not ran.is_set() and time.monotonic() < until:
            native.copy([target], [source])
        ran_meanwhile = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert ran_meanwhile


# Pieces


def test_pieces_know_their_number_and_bytes() -> None:
    pieces = native.Pieces.sources([b"ab", b"", memoryview(b"cde")])
    assert (len(pieces), pieces.nbytes, pieces.writable) == (3, 5, False)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([bytearray(1), b"x"], r"buffers\[1\]: read-only"),
        ([memoryview(bytearray(1)).toreadonly()], r"buffers\[0\]: read-only"),
        ([memoryview(bytearray(9))[::2]], r"buffers\[0\]: not contiguous"),
        ([bytearray(1), 7], r"buffers\[1\]: .*int"),
        (7, "buffers: "),
    ],
)
def test_what_cannot_be_a_target_is_named(buffers: list[bytearray], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        native.Pieces.targets(buffers)


def test_refused_buffers_are_let_go() -> None:
    held = bytearray(8)
    with pytest.raises(InvalidArgument):
        native.Pieces.targets([held, b"read-only"])
    held.extend(b"!")  # BufferError if it were still exported


def test_pieces_keep_their_buffers_alive_and_in_place() -> None:
    held = bytearray(b"held")
    pieces = native.Pieces.sources([held, bytes([1, 2])])
    with pytest.raises(BufferError):
        held.extend(b"!")
    target = bytearray(6)
    native.copy([target], pieces)
    assert target == b"held\1\2"
    del pieces
    held.extend(b"!")


def test_read_only_pieces_are_no_targets() -> None:
    sources = native.Pieces.sources([b"ab"])
    with pytest.raises(InvalidArgument, match="read-only"):
        native.copy(sources, [b"cd"])
    with pytest.raises(InvalidArgument, match="read-only"):
        native.recv_all(0, sources, 0)
    with pytest.raises(InvalidArgument, match="read-only"):
        native.recv_some(0, sources)


@given(runs, st.integers(-70, 70), st.integers(-70, 70))
def test_a_part_is_what_a_slice_is(buffers: list[bytes], first: int, last: int) -> None:
    part = native.Pieces.sources(buffers).part(first, last)
    target = bytearray(part.nbytes)
    native.copy([target], part)
    assert target == b"".join(buffers[first:last])
    assert len(part) == len(buffers[first:last])


def test_raw_addresses_are_taken_as_they_are() -> None:
    memory = (native._ffi.new("char[]", 8), bytearray(8))
    address = int(native._ffi.cast("uintptr_t", memory[0]))
    native.copy(native.Pieces.raw([address + 4, address], [4, 4]), [b"efghabcd"])
    native.copy([memory[1]], native.Pieces.raw([address], [8], writable=False))
    assert memory[1] == b"abcdefgh"


@pytest.mark.parametrize(
    ("addresses", "lengths", "message"),
    [
        ([0], [1], "address is 0"),
        ([8, 8], [1], "2 addresses but 1 lengths"),
        ([8], [-1], "negative|unsigned"),
        ([8], [1 << 64], "large|big"),
        ([8, 8], [1 << 62, 1 << 62], r"over 2\*\*63"),
        ([8], ["a"], "int"),
        ([1 << 63], [1 << 63], "not within"),
    ],
)
def test_impossible_addresses_are_refused(
    addresses: list[int], lengths: list[int], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        native.Pieces.raw(addresses, lengths)


def test_a_region_gives_parts_by_offset() -> None:
    region = native.Region(bytearray(b"0123456789"))
    target = bytearray(7)
    native.copy([target], region.pieces([8, 10, 0], [2, 0, 5]))
    assert target == b"8901234"
    assert region.writable
    assert not native.Region(b"constant").pieces([0], [1]).writable


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (11, 0), (1 << 63, 1 << 63)])
def test_a_part_outside_its_region_is_refused(offset: int, length: int) -> None:
    region = native.Region(bytearray(10))
    with pytest.raises(InvalidArgument, match=r"piece 1: .* not within 10 bytes"):
        region.pieces([0, offset], [1, length])


def test_parts_hold_the_region() -> None:
    memory = bytearray(10)
    pieces = native.Region(memory).pieces([0], [10])
    with pytest.raises(BufferError):
        memory.extend(b"!")
    del pieces
    memory.extend(b"!")


def test_making_pieces_leaks_nothing() -> None:
    def make() -> None:
        for _ in range(1000):
            native.Pieces.sources([memory] * 16).part(3, 9)
            region.pieces([1, 2], [3, 4])
            with pytest.raises(InvalidArgument):
                region.pieces([1, 200], [3, 4])
            with pytest.raises(InvalidArgument):
                native.Pieces.targets([bytearray(1), memory])

    memory = bytes(100)
    region = native.Region(memory)
    tracemalloc.start()
    try:
        make()
        gc.collect()
        before, references = tracemalloc.get_traced_memory()[0], sys.getrefcount(memory)
        make()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sys.getrefcount(memory) == references
    assert after - before < 16_000  # less than any leak in each of the 1,000 rounds


# Sockets


@settings(deadline=None, max_examples=60)
@given(runs, st.integers(1, 60), st.integers(0, 1 << 32), st.booleans())
def test_what_is_sent_in_pieces_arrives_in_others(
    sources: list[bytes], count: int, seed: int, blocking: bool
) -> None:
    a, b = connected("unix")
    target = bytearray(sum(map(len, sources)))
    total = len(target)
    with a, b:
        a.setblocking(blocking)
        b.setblocking(blocking)
        sent: list[tuple[int, int]] = []
        thread = beside(lambda: sent.append(native.send_all(a.fileno(), sources, within(20))))
        got = native.recv_all(b.fileno(), cut(target, count, seed), within(20))
        thread.join()
    assert (sent, got) == ([(total, 0)], (total, 0))
    assert target == b"".join(sources)


def test_thousands_of_pieces_pass_through_tiny_buffers(pair: Pair) -> None:
    a, b = pair
    source = random.Random(1).randbytes(3 * MIB)
    target = bytearray(len(source))
    sent: list[tuple[int, int]] = []
    pieces = native.Pieces.sources(cut(source, 5000, 2))
    thread = beside(lambda: sent.append(native.send_all(a.fileno(), pieces, within(30))))
    got = native.recv_all(b.fileno(), cut(target, 3000, 3), within(30), spin_ns=20_000)
    thread.join()
    assert (sent, got) == ([(len(source), 0)], (len(source), 0))
    assert target == source


def test_a_transfer_over_one_system_call_s_limit_goes_on() -> None:
    a, b = connected("tcp", small=False)
    source = random.Random(5).randbytes(MIB) * 150
    target = bytearray(len(source))
    with a, b:
        thread = beside(lambda: native.send_all(a.fileno(), [source], within(60)))
        got = native.recv_all(b.fileno(), [target], within(60))
        thread.join()
    assert got == (len(source), 0)
    assert target == source


def test_the_standard_library_understands_what_is_sent_and_the_other_way_round(
    plain: Pair,
) -> None:
    a, b = plain
    native.send_all(a.fileno(), [b"ab", b"", b"cd"], within(5))
    target = [bytearray(1), bytearray(3)]
    b.recvmsg_into(target, 0, socket.MSG_WAITALL)
    b.sendmsg([b"ef", b"g"])
    answer = bytearray(3)
    assert native.recv_all(a.fileno(), [answer], within(5)) == (3, 0)
    assert (target, answer) == ([b"a", b"bcd"], b"efg")


def test_nothing_to_move_needs_no_socket() -> None:
    assert native.send_all(-1, [b"", b""], 0) == (0, 0)
    assert native.recv_all(-1, [], 0) == (0, 0)
    assert native.send_some(-1, []) == 0
    assert native.recv_some(-1, [bytearray()]) == 0


def test_a_receive_stops_at_its_deadline_and_tells_how_far_it_came(pair: Pair) -> None:
    a, b = pair
    a.send(b"12345")
    target = bytearray(100)
    start = time.monotonic()
    assert native.recv_all(b.fileno(), [target], within(0.2), spin_ns=1000) == (5, ETIMEDOUT)
    assert 0.19 < time.monotonic() - start < 5
    assert target[:5] == b"12345"


def test_a_send_to_one_that_does_not_read_stops_at_its_deadline(pair: Pair) -> None:
    a, _ = pair
    start = time.monotonic()
    sent, error = native.send_all(a.fileno(), [bytes(8 * MIB)], within(0.2))
    assert error == ETIMEDOUT
    assert 0 < sent < 8 * MIB
    assert 0.19 < time.monotonic() - start < 5


def test_a_transfer_that_stopped_goes_on_where_it_was(pair: Pair) -> None:
    a, b = pair
    target = bytearray(6)
    a.send(b"abc")
    done, error = native.recv_all(b.fileno(), [target], within(0.02))
    assert (done, error) == (3, ETIMEDOUT)
    a.send(b"def")
    assert native.recv_all(b.fileno(), [target], within(5), start=done) == (6, 0)
    assert target == b"abcdef"


def test_a_trickle_does_not_stretch_the_deadline(pair: Pair) -> None:
    a, b = pair
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.005):
            a.send(b"x")

    thread = beside(trickle)
    start = time.monotonic()
    got, error = native.recv_all(b.fileno(), [bytearray(MIB)], within(0.5))
    took = time.monotonic() - start
    stop.set()
    thread.join()
    assert error == ETIMEDOUT
    assert 0 < got < MIB
    assert took < 5


def test_a_deadline_in_the_past_allows_what_needs_no_waiting(pair: Pair) -> None:
    a, b = pair
    assert native.send_all(a.fileno(), [b"abc"], 0) == (3, 0)
    until = time.monotonic() + 5
    target, done, error = bytearray(3), 0, ETIMEDOUT
    while error == ETIMEDOUT and time.monotonic() < until:
        done, error = native.recv_all(b.fileno(), [target], 0, start=done)
    assert (target, error) == (b"abc", 0)
    assert native.recv_all(b.fileno(), [target], 0) == (0, ETIMEDOUT)


def test_an_orderly_end_is_told_from_an_error(pair: Pair) -> None:
    a, b = pair
    a.send(b"123")
    a.close()
    assert native.recv_all(b.fileno(), [bytearray(10)], within(5)) == (3, native.CLOSED)
    assert native.recv_some(b.fileno(), [bytearray(10)]) == -native.CLOSED


def test_sending_to_a_closed_peer_is_an_error_and_no_signal(plain: Pair) -> None:
    a, b = plain
    b.close()
    sent, error = native.send_all(a.fileno(), [bytes(MIB)], within(5))
    assert error in (EPIPE, ECONNRESET)
    assert sent < MIB
    assert native.describe(error) == os.strerror(error)


def test_a_bad_descriptor_is_an_error() -> None:
    assert native.recv_all(-1, [bytearray(1)], within(1)) == (0, EBADF)
    assert native.send_some(-1, [b"x"]) == -EBADF


DYING = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(bytes(int(sys.argv[2])))
sys.stdin.read()
"""


@pytest.mark.parametrize("blocking", [True, False])
def test_a_peer_killed_in_the_middle_ends_the_receive_at_once(blocking: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", DYING, str(port), "100000"]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE)
        listener.settimeout(60)
        sock, _ = listener.accept()
    target = native.Pieces.targets([bytearray(4096)] * 100)
    with sock:
        sock.setblocking(blocking)
        first = native.recv_all(sock.fileno(), target.part(0, 20), within(60))
        thread = beside(peer.kill)
        start = time.monotonic()
        got, error = native.recv_all(sock.fileno(), target, within(60), start=first[0])
        took = time.monotonic() - start
        thread.join()
    peer.communicate()
    assert first == (20 * 4096, 0)
    assert (got, error) in ((100000, native.CLOSED), (100000, ECONNRESET))
    assert took < 30


@pytest.mark.parametrize("blocking", [True, False])
def test_a_peer_killed_in_the_middle_ends_the_send_at_once(blocking: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", DYING, str(port), "1"]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE)
        listener.settimeout(60)
        sock, _ = listener.accept()
    with sock:
        sock.setblocking(blocking)
        native.recv_all(sock.fileno(), [bytearray(1)], within(60))
        thread = beside(peer.kill)
        sent, error = native.send_all(sock.fileno(), [bytes(64 * MIB)], within(60))
        thread.join()
    peer.communicate()
    assert error in (EPIPE, ECONNRESET)
    assert sent < 64 * MIB


def test_a_receive_waits_without_the_gil(pair: Pair) -> None:
    a, b = pair
    target = bytearray(3)
    asked = threading.Event()

    def answer() -> None:
        asked.wait(10)
        a.send(b"abc")

    beside(answer)
    asked.set()
    assert native.recv_all(b.fileno(), [target], within(20)) == (3, 0)
    assert target == b"abc"


@pytest.fixture
def signals() -> Iterator[Callable[[float], list[int]]]:
    """SIGUSR1 to the main thread every so many seconds; the list grows with each one handled."""
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    stop, threads = threading.Event(), list[threading.Thread]()

    def start(seconds: float) -> list[int]:
        def send() -> None:
            while not stop.wait(seconds):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        threads.append(beside(send))
        return handled

    yield start
    stop.set()
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


def test_signals_are_handled_in_the_middle_and_change_nothing(
    pair: Pair, signals: Callable[[float], list[int]]
) -> None:
    a, b = pair
    source = random.Random(6).randbytes(MIB)
    target = bytearray(len(source))
    seen: list[int] = []

    def send() -> None:
        for n, view in enumerate(cut(source, 20, 7)):
            count = len(handled)
            until = time.monotonic() + 10
            while n < 10 and len(handled) == count and time.monotonic() < until:
                time.sleep(0.001)
            seen.append(len(handled))
            native.send_all(a.fileno(), [view], within(20))

    handled = signals(0.002)
    thread = beside(send)
    got = native.recv_all(b.fileno(), cut(target, 50, 8), within(60))
    thread.join()
    assert got == (len(source), 0)
    assert target == source
    assert seen[9] > seen[0]  # all in the one call


def test_signals_do_not_stretch_the_deadline(
    pair: Pair, signals: Callable[[float], list[int]]
) -> None:
    signals(0.002)
    start = time.monotonic()
    assert native.recv_all(pair[1].fileno(), [bytearray(1)], within(0.3)) == (0, ETIMEDOUT)
    assert 0.29 < time.monotonic() - start < 5


def test_what_a_handler_raises_ends_the_wait(pair: Pair) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    waiting = threading.Event()

    def send() -> None:
        waiting.wait(10)
        until = time.monotonic() + 20
        while waiting.is_set() and time.monotonic() < until:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            time.sleep(0.05)

    before = signal.signal(signal.SIGUSR2, interrupt)
    thread = beside(send)
    try:
        with pytest.raises(Interrupted):  # noqa: PT012
            waiting.set()
            native.recv_all(pair[1].fileno(), [bytearray(1)], within(20))
    finally:
        waiting.clear()
        signal.signal(signal.SIGUSR2, lambda *_: None)
        thread.join()
        signal.signal(signal.SIGUSR2, before)


# One system call


def test_some_takes_what_fits_and_does_not_wait(pair: Pair) -> None:
    a, b = pair
    source = random.Random(9).randbytes(MIB)
    target = bytearray(len(source))
    sources = native.Pieces.sources(cut(source, 3000, 10))
    targets = native.Pieces.targets(cut(target, 2000, 11))
    sent = got = fulls = 0
    until = time.monotonic() + 30
    while got < len(source) and time.monotonic() < until:
        n = native.send_some(a.fileno(), sources, sent)
        fulls += n == -EAGAIN
        sent += max(n, 0)
        n = native.recv_some(b.fileno(), targets, got)
        assert n > 0 or n == -EAGAIN
        got += max(n, 0)
    assert (sent, got) == (len(source), len(source))
    assert target == source
    assert native.recv_some(b.fileno(), targets) == -EAGAIN
    assert native.recv_some(b.fileno(), targets, got) == 0


# A request and the head of its answer


def answer(head: bytes, payload: bytes = b"") -> bytes:
    return len(head).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + head + payload


def test_an_exchange_gives_the_head_and_leaves_the_payload(pair: Pair) -> None:
    a, b = pair
    request, head, payload = bytearray(7), bytearray(64), bytearray(5)

    def serve() -> None:
        native.recv_all(b.fileno(), [request], within(10))
        for byte in answer(b"head", b"bytes"):
            native.send_all(b.fileno(), [bytes([byte])], within(10))

    thread = beside(serve)
    exchange = native.Exchange(head)
    assert exchange.call(a.fileno(), [b"req", b"", b"uest"], within(10), spin_ns=1000) == 0
    assert (exchange.sent, exchange.head_length, exchange.payload_length) == (7, 4, 5)
    assert native.recv_all(a.fileno(), [payload], within(10)) == (5, 0)
    thread.join()
    assert (request, head[:4], payload) == (b"request", b"head", b"bytes")


def test_an_exchange_can_be_used_again_and_for_receiving_alone(plain: Pair) -> None:
    a, b = plain
    head = bytearray(64)
    exchange = native.Exchange(head)
    for text in (b"first", b"", b"third one"):
        b.sendall(answer(text))
        assert exchange.call(a.fileno(), None, within(5)) == 0
        assert head[: exchange.head_length] == text


def test_a_head_over_its_limit_is_refused_unread(plain: Pair) -> None:
    a, b = plain
    head = bytearray(8)
    exchange = native.Exchange(head)
    b.sendall(answer(b"123456789"))
    assert exchange.call(a.fileno(), [b"x"], within(5)) == EMSGSIZE
    assert exchange.head_length == 9
    assert head == bytes(8)


@pytest.mark.parametrize("there", [0, 5, 12, 14])
def test_an_answer_that_does_not_come_whole_ends_with_its_reason(pair: Pair, there: int) -> None:
    a, b = pair
    exchange = native.Exchange(bytearray(64))
    b.send(answer(b"head")[:there])
    assert exchange.call(a.fileno(), [b"x"], within(0.1)) == ETIMEDOUT
    b.recv(10)
    b.send(answer(b"head")[:there])
    b.close()
    fresh = exchange.call(a.fileno(), None, within(5))
    assert fresh in (0, native.CLOSED)  # 0: what came before makes up a head with what came now


def test_a_request_that_cannot_be_sent_tells_how_much_has_left(plain: Pair) -> None:
    a, _ = plain
    exchange = native.Exchange(bytearray(8))
    assert exchange.call(a.fileno(), [bytes(8 * MIB)], within(0.1)) == ETIMEDOUT
    assert 0 < exchange.sent < 8 * MIB


def test_signals_do_not_break_an_exchange(
    pair: Pair, signals: Callable[[float], list[int]]
) -> None:
    a, b = pair
    handled = signals(0.001)
    head, text = bytearray(MIB), random.Random(12).randbytes(200_000)

    def serve() -> None:
        native.recv_all(b.fileno(), [bytearray(MIB)], within(20))
        until = time.monotonic() + 10
        while len(handled) < 10 and time.monotonic() < until:
            time.sleep(0.001)
        native.send_all(b.fileno(), [answer(text)], within(20))

    thread = beside(serve)
    exchange = native.Exchange(head)
    assert exchange.call(a.fileno(), [bytes(MIB)], within(30)) == 0
    thread.join()
    assert len(handled) >= 10
    assert head[: exchange.head_length] == text


# Where it is missing

MISSING = """
import sys
sys.modules["p2pkv._native._core"] = None
from p2pkv import _native
from p2pkv.errors import ConfigError
assert not _native.available
for use in (_native.require, lambda: _native.Pieces.sources([b""]), lambda: _native.Region(b""),
            lambda: _native.copy([], []), lambda: _native.send_some(0, [b"x"])):
    try:
        use()
    except ConfigError as e:
        assert "pip install" in str(e), e
    else:
        raise SystemExit(f"{use} did not raise")
"""


def test_without_the_extension_the_module_imports_and_says_how_to_build_it() -> None:
    subprocess.run([sys.executable, "-c", MISSING], check=True, timeout=60)


@pytest.mark.parametrize(
    ("value", "checksum"),
    [
        (b"", 0x2D06800538D394C2),
        (b"a", 0xE6C632B61E964E1F),
        (b"abc", 0x78AF5F94892F3950),
        (b"Nobody inspects the spammish repetition", 0x6CB00603B5CC47E9),
    ],
)
def test_the_checksum_is_xxh3(value: bytes, checksum: int) -> None:
    assert native.checksums([value], [len(value)]) == [checksum]


LENGTHS = st.one_of(st.integers(0, 260), st.integers(0, 5000))


@given(st.lists(LENGTHS, max_size=6), st.integers(1, 12), st.integers())
@settings(max_examples=300)
def test_checksums_are_those_of_the_reference_however_values_are_cut(
    sizes: list[int], count: int, seed: int
) -> None:
    data = random.Random(seed).randbytes(sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wanted = [xxh3_64_intdigest(data[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    pieces, target = cut(data, count, seed), bytearray(len(data))
    assert native.checksums(pieces, sizes) == wanted
    assert native.checksums(pieces, sizes, portable=True) == wanted
    assert native.copy_checksums(cut(target, count, ~seed), pieces, sizes) == wanted
    assert target == data


def test_every_length_up_to_two_blocks_has_its_checksum() -> None:
    data = random.Random(1).randbytes(2200)
    for size in range(len(data)):
        wanted = [xxh3_64_intdigest(data[:size])]
        assert native.checksums([data[:size]], [size]) == wanted, size
        assert native.checksums([data[:size]], [size], portable=True) == wanted, size


def test_a_copy_around_the_caches_has_the_same_checksum() -> None:
    data, target = os.urandom(MIB + 77), bytearray(MIB + 77)
    sums = native.copy_checksums([target], [data], [len(data)], streaming_min=1)
    assert target == data
    assert sums == [xxh3_64_intdigest(data)]


def test_sizes_that_are_not_those_of_the_pieces_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sizes of 4 bytes together, pieces of 3"):
        native.checksums([b"abc"], [2, 2])
    with pytest.raises(InvalidArgument, match="pieces of 3 and 3"):
        native.copy_checksums([bytearray(3)], [b"abc"], [1])
    with pytest.raises(InvalidArgument, match="sizes"):
        native.checksums([b"abc"], [-3])


def test_errors_are_put_in_words() -> None:
    assert native.describe(-native.CLOSED) == "the peer closed the connection"
    assert native.describe(ETIMEDOUT) == "the deadline has passed"
    native.require()


def test_require_raises_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "available", False)
    with pytest.raises(ConfigError, match="not available"):
        native.require()
