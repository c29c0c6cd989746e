"""The UCX path, over TCP: engines in real processes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash

from p2pkv.errors import (
    ClosedClient,
    ConfigError,
    Conflict,
    InvalidArgument,
    ProtocolError,
    TooLarge,
)
from p2pkv.ucx_library import doctor, options_for
from p2pkv.ucx_transfer import (
    Busy,
    Peer,
    PeerLost,
    RemoteRegion,
    Transfer,
    TransferTimeout,
    UcxConfig,
    UcxEngine,
    UcxUnavailable,
)

FACTS = doctor({"TLS": "tcp"})
pytestmark = pytest.mark.skipif(not FACTS.usable, reason=f"no UCX here: {FACTS.why_not}")

KiB, MiB = 1 << 10, 1 << 20
TCP: dict[str, Any] = {"options": {"TLS": "tcp"}}
SMALL_CHUNKS = {**TCP, "chunk_bytes": 64 * KiB}


class Process:
    """tests/ucx_peer.py, running."""

    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self._process = process
        self.address = bytes.fromhex(hello["address"])
        self.handle = bytes.fromhex(hello["handle"])
        self.memory: int = hello["memory"]

    @classmethod
    async def start(cls, size: int, seed: int, config: dict[str, Any]) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("ucx_peer.py"))),
            *(str(size), str(seed), json.dumps(config)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(20):
                hello = json.loads(await process.stdout.readline())
        except BaseException:
            process.kill()
            raise
        return cls(process, hello)

    async def ask(self, do: str, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        async with asyncio.timeout(20):
            answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Ours:
    """An engine here with registered memory."""

    def __init__(self, size: int, **config: Any) -> None:
        self.engine = UcxEngine(UcxConfig(**{**TCP, **config}))
        self.memory = bytearray(size)
        self.region = self.engine.register(self.memory)

    def whole(self, remote: RemoteRegion, length: int, *, at: int = 0) -> tuple[int, ...]:
        return (self.region.address + at, remote.key, remote.address + at, length)


Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts peers, which are gone after the test."""
    started: list[Process] = []

    async def begin(size: int = 4 * MiB, seed: int = 1, **config: Any) -> Process:
        process = await Process.start(size, seed, {**TCP, **config})
        started.append(process)
        return process

    yield begin
    for process in started:
        await process.kill()


@pytest.fixture
async def engines() -> AsyncIterator[Callable[..., Ours]]:
    """Makes engines in this process, which are closed after the test."""
    made: list[Ours] = []

    def make(size: int = 4 * MiB, **config: Any) -> Ours:
        ours = Ours(size, **config)
        made.append(ours)
        return ours

    yield make
    for ours in made:
        await ours.engine.close()


def scattered(rng: random.Random, count: int, size: int) -> list[tuple[int, int, int]]:
    """``(local offset, remote offset, length)`` of pieces that do not overlap on either side."""
    slot = size // count
    there = rng.sample(range(count), count)
    pieces = []
    for here, place in enumerate(there):
        length = rng.randint(1, slot)
        shift = slot - length
        pieces.append(
            (here * slot + rng.randint(0, shift), place * slot + rng.randint(0, shift), length)
        )
    return pieces


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(0.005)


# -- moving bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 33, 1024])
@pytest.mark.parametrize("chunk_bytes", [64 * KiB, 1 << 30])
async def test_a_batch_of_scattered_pieces_is_written_exactly(
    start: Start, engines: Callable[..., Ours], count: int, chunk_bytes: int
) -> None:
    size, rng = 4 * MiB, random.Random(count)
    theirs = await start(size, seed=7, chunk_bytes=chunk_bytes)
    ours = engines(size, chunk_bytes=chunk_bytes)
    ours.memory[:] = rng.randbytes(size)
    expected = bytearray(random.Random(7).randbytes(size))
    peer = ours.engine.connect(theirs.address, "theirs")
    remote = peer.attach(theirs.handle)

    pieces = scattered(rng, count, size)
    moved = await ours.engine.write(
        peer,
        [(ours.region.address + a, remote.key, remote.address + b, n) for a, b, n in pieces],
    )

    for a, b, n in pieces:
        expected[b : b + n] = ours.memory[a : a + n]
    assert moved == sum(n for _, _, n in pieces)
    assert (await theirs.ask("sum"))["sum"] == xxhash.xxh3_64_hexdigest(expected)


@pytest.mark.parametrize("count", [1, 2, 33, 1024])
@pytest.mark.parametrize("chunk_bytes", [64 * KiB, 1 << 30])
async def test_a_batch_of_scattered_pieces_is_read_exactly(
    start: Start, engines: Callable[..., Ours], count: int, chunk_bytes: int
) -> None:
    size, rng = 4 * MiB, random.Random(count)
    theirs = await start(size, seed=7, chunk_bytes=chunk_bytes)
    there = random.Random(7).randbytes(size)
    ours = engines(size, chunk_bytes=chunk_bytes)
    expected = bytearray(size)
    peer = ours.engine.connect(theirs.address, "theirs")
    remote = peer.attach(theirs.handle)

    pieces = scattered(rng, count, size)
    await ours.engine.read(
        peer,
        [(ours.region.address + a, remote.key, remote.address + b, n) for a, b, n in pieces],
    )

    for a, b, n in pieces:
        expected[a : a + n] = there[b : b + n]
    assert ours.memory == expected


async def test_the_holder_pushes_into_memory_that_the_reader_registered(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(seed=3), engines()
    there = random.Random(3).randbytes(4 * MiB)

    for at in (0, 1 * MiB, 3 * MiB):
        answer = await theirs.ask(
            "push",
            address=ours.engine.address.hex(),
            handle=ours.region.handle.hex(),
            pieces=[(at, ours.region.address + at, 512 * KiB)],
        )
        assert answer["bytes"] == 512 * KiB
        assert ours.memory[at : at + 512 * KiB] == there[at : at + 512 * KiB]


async def test_local_and_remote_chunks_of_different_sizes_are_bridged(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs = await start(1 * MiB, chunk_bytes=12 * KiB)
    ours = engines(1 * MiB, chunk_bytes=20 * KiB)
    ours.memory[:] = random.Random(5).randbytes(1 * MiB)
    peer = ours.engine.connect(theirs.address, "theirs")

    await ours.engine.write(peer, [ours.whole(peer.attach(theirs.handle), 1 * MiB)])

    assert (await theirs.ask("sum"))["sum"] == xxhash.xxh3_64_hexdigest(ours.memory)


async def test_pieces_may_lie_in_several_regions_on_both_sides(
    start: Start, engines: Callable[..., Ours]
) -> None:
    ours, theirs = engines(), engines()
    more_here, more_there = bytearray(b"x" * 1000), bytearray(1000)
    here, there = ours.engine.register(more_here), theirs.engine.register(more_there)
    ours.memory[:4] = b"abcd"
    peer = ours.engine.connect(theirs.engine.address, "theirs")
    first, second = peer.attach(theirs.region.handle), peer.attach(there.handle)

    await ours.engine.write(
        peer,
        [
            (here.address, first.key, first.address + 10, 1000),
            (ours.region.address, second.key, second.address, 4),
        ],
    )

    assert theirs.memory[10:1010] == more_here
    assert more_there[:4] == b"abcd"


async def test_pieces_may_be_given_as_one_buffer_of_numbers(engines: Callable[..., Ours]) -> None:
    ours, theirs = engines(), engines()
    ours.memory[:] = random.Random(6).randbytes(4 * MiB)
    peer = ours.engine.connect(theirs.engine.address, "theirs")
    remote = peer.attach(theirs.region.handle)
    pieces = (ours.whole(remote, 64 * KiB, at=i * 64 * KiB) for i in range(64))

    await ours.engine.write(peer, array("Q", itertools.chain.from_iterable(pieces)))

    assert theirs.memory == ours.memory


async def test_batches_to_many_peers_run_at_once(
    start: Start, engines: Callable[..., Ours]
) -> None:
    many = await asyncio.gather(*(start(1 * MiB, seed=i) for i in range(6)))
    ours = engines(6 * MiB)
    peers = [ours.engine.connect(p.address, f"p{i}") for i, p in enumerate(many)]
    remotes = [peer.attach(p.handle) for peer, p in zip(peers, many, strict=True)]

    transfers = [
        ours.engine.read(
            peer, [(ours.region.address + i * MiB, remote.key, remote.address, 1 * MiB)]
        )
        for i, (peer, remote) in enumerate(zip(peers, remotes, strict=True))
    ]
    assert await asyncio.gather(*transfers) == [1 * MiB] * 6

    for i in range(6):
        assert ours.memory[i * MiB : (i + 1) * MiB] == random.Random(i).randbytes(1 * MiB)
    assert ours.engine.counts() == {"links": 6, "batches": 0, "regions": 1, "peers": 6}


async def test_other_tasks_run_while_a_large_transfer_does(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(64 * MiB), engines(64 * MiB)
    peer = ours.engine.connect(theirs.address, "theirs")
    transfer = ours.engine.write(peer, [ours.whole(peer.attach(theirs.handle), 64 * MiB)])

    ticks, worst, last = 0, 0.0, time.monotonic()
    while not transfer.done():
        await asyncio.sleep(0)
        now = time.monotonic()
        ticks, worst, last = ticks + 1, max(worst, now - last), now

    assert await transfer == 64 * MiB
    assert ticks > 10
    assert worst < 0.25


def test_it_runs_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        ours, theirs = Ours(1 * MiB), Ours(1 * MiB)
        ours.memory[:] = random.Random(8).randbytes(1 * MiB)
        peer = ours.engine.connect(theirs.engine.address, "theirs")
        await ours.engine.write(peer, [ours.whole(peer.attach(theirs.region.handle), 1 * MiB)])
        assert theirs.memory == ours.memory
        await ours.engine.close()
        await theirs.engine.close()

    uvloop.run(main())


# -- failures -------------------------------------------------------------------------------------


async def big_write(
    ours: Ours, theirs: Process, name: str, timeout: float = 30.0, times: int = 400
) -> tuple[Transfer, Peer]:
    """A transfer that is under way for long: many times the whole memory."""
    peer = ours.engine.connect(theirs.address, name)
    remote = peer.attach(theirs.handle)
    await ours.engine.write(peer, [ours.whole(remote, 1)])
    pieces = [ours.whole(remote, len(ours.memory))] * times
    transfer = ours.engine.write(peer, pieces, timeout=timeout)
    await asyncio.sleep(0)
    assert not transfer.done()
    return transfer, peer


async def test_a_peer_killed_in_the_middle_is_noticed_and_named(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(), engines()
    transfer, peer = await big_write(ours, theirs, "node-7")

    killed = time.monotonic()
    await theirs.kill()
    with pytest.raises(PeerLost, match=r"peer 'node-7': write of 400 pieces") as caught:
        await transfer

    assert time.monotonic() - killed < 2
    assert caught.value.peer == "node-7"
    assert not peer.connected


async def test_an_idle_peer_that_dies_fails_no_later_than_the_next_batch(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(), engines()
    peer = ours.engine.connect(theirs.address, "node-7")
    remote = peer.attach(theirs.handle)
    await ours.engine.write(peer, [ours.whole(remote, 1000)])
    await theirs.kill()

    await until(lambda: not peer.connected, 2)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="node-7"):
        await ours.engine.write(peer, [ours.whole(remote, 1000)])
    assert time.monotonic() - began < 2


async def test_a_restarted_peer_is_served_under_its_new_address(
    start: Start, engines: Callable[..., Ours]
) -> None:
    first, ours = await start(), engines()
    transfer, peer = await big_write(ours, first, "node-7")
    await first.kill()
    with pytest.raises(PeerLost):
        await transfer
    peer.close()

    second = await start(seed=9)
    again = ours.engine.connect(second.address, "node-7")
    await ours.engine.read(again, [ours.whole(again.attach(second.handle), 4 * MiB)])

    assert ours.memory == random.Random(9).randbytes(4 * MiB)
    await until(lambda: ours.engine.counts()["links"] == 1)


async def test_one_peers_death_leaves_the_others_alone(
    start: Start, engines: Callable[..., Ours]
) -> None:
    dying, living, ours = await start(), await start(seed=2), engines()
    transfer, _ = await big_write(ours, dying, "dying")
    other, peer = await big_write(ours, living, "living", times=50)
    await dying.kill()

    with pytest.raises(PeerLost, match="dying"):
        await transfer
    assert await other == 50 * 4 * MiB
    assert peer.connected


async def test_a_stopped_peer_costs_the_deadline_and_no_more(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(), engines()
    theirs.signal(signal.SIGSTOP)
    peer = ours.engine.connect(theirs.address, "node-7")
    remote = peer.attach(theirs.handle)

    for verb in (ours.engine.write, ours.engine.read):
        began = time.monotonic()
        with pytest.raises(TransferTimeout, match="peer 'node-7'") as caught:
            await verb(peer, [ours.whole(remote, 4 * MiB)], timeout=0.3)
        assert 0.25 < time.monotonic() - began < 1.5
        assert not caught.value.memory_in_use


async def test_after_a_deadline_the_endpoint_is_made_anew(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(seed=4), engines()
    transfer, peer = await big_write(ours, theirs, "node-7", timeout=0.5)
    theirs.signal(signal.SIGSTOP)
    with pytest.raises(TransferTimeout):
        await transfer
    assert not peer.connected

    theirs.signal(signal.SIGCONT)
    ours.memory[:] = random.Random(11).randbytes(4 * MiB)
    remote = peer.attach(theirs.handle)
    await ours.engine.write(peer, [ours.whole(remote, 4 * MiB)], timeout=20)

    assert (await theirs.ask("sum"))["sum"] == xxhash.xxh3_64_hexdigest(ours.memory)


async def test_memory_is_free_once_a_transfer_has_timed_out(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(), engines()
    transfer, _ = await big_write(ours, theirs, "node-7", timeout=0.3)
    theirs.signal(signal.SIGSTOP)
    with pytest.raises(Conflict, match="under way"):
        ours.region.close()
    with pytest.raises(TransferTimeout):
        await transfer

    ours.region.close()
    assert ours.engine.counts()["regions"] == 0


async def test_cancelling_waits_until_ucx_has_let_go_of_the_memory(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(), engines()
    transfer, peer = await big_write(ours, theirs, "node-7")
    theirs.signal(signal.SIGSTOP)
    waiter = asyncio.ensure_future(asyncio.wait_for(transfer, 0.2))
    with pytest.raises(TimeoutError):
        await waiter

    assert transfer.cancelled()
    assert not peer.connected
    ours.region.close()


async def test_closing_a_peer_fails_its_batches(start: Start, engines: Callable[..., Ours]) -> None:
    theirs, ours = await start(), engines()
    transfer, peer = await big_write(ours, theirs, "node-7")
    peer.close()
    with pytest.raises(PeerLost, match="closed here"):
        await transfer
    with pytest.raises(InvalidArgument, match="closed"):
        ours.engine.write(peer, [(1, 0, 1, 1)])


async def test_closing_the_engine_fails_what_is_under_way(start: Start) -> None:
    theirs, ours = await start(), Ours(4 * MiB)
    transfer, _ = await big_write(ours, theirs, "node-7")
    theirs.signal(signal.SIGSTOP)
    began = time.monotonic()
    await ours.engine.close()

    assert time.monotonic() - began < 3
    with pytest.raises(PeerLost, match="engine was closed"):
        await transfer
    with pytest.raises(ClosedClient):
        ours.engine.register(bytearray(10))
    await ours.engine.close()


# -- bad input ------------------------------------------------------------------------------------


async def test_a_wrong_piece_is_named_and_nothing_is_sent(
    start: Start, engines: Callable[..., Ours]
) -> None:
    theirs, ours = await start(seed=5), engines()
    before = (await theirs.ask("sum"))["sum"]
    peer = ours.engine.connect(theirs.address, "theirs")
    remote = peer.attach(theirs.handle)
    here, there, size = ours.region.address, remote.address, 4 * MiB
    wrong = {
        "not inside one registered region": [
            (here - 1, remote.key, there, 10),
            (here + size - 9, remote.key, there, 10),
            (here + 1, remote.key, there, size),
            (2**64 - 5, remote.key, there, 10),
        ],
        "are not inside region": [
            (here, remote.key, there - 1, 10),
            (here, remote.key, there + size - 9, 10),
            (here, remote.key, 2**64 - 5, 10),
        ],
        "is not attached": [(here, remote.key + 1, there, 10), (here, 2**63, there, 10)],
        "has no bytes": [(here, remote.key, there, 0)],
    }
    for message, pieces in wrong.items():
        for piece in pieces:
            batch = [ours.whole(remote, 1000)] * 3 + [piece]
            with pytest.raises(InvalidArgument, match=rf"pieces\[3\]: .*{message}"):
                ours.engine.write(peer, batch)

    assert ours.engine.counts()["batches"] == 0
    await ours.engine.read(peer, [ours.whole(remote, 1)])
    assert (await theirs.ask("sum"))["sum"] == before


async def test_pieces_of_another_shape_are_refused(engines: Callable[..., Ours]) -> None:
    ours, theirs = engines(), engines()
    peer = ours.engine.connect(theirs.engine.address, "theirs")
    for pieces in ([], [(1, 2, 3)], [(1, 2, 3, -4)], [(1, 2, 3, 2**64)], [(1, 2, 3, "x")]):
        with pytest.raises(InvalidArgument, match="pieces"):
            ours.engine.write(peer, pieces)  # type: ignore[arg-type]
    for numbers in (array("Q", [1, 2, 3]), array("I", [1, 2, 3, 4]), b"x" * 32):
        with pytest.raises(InvalidArgument, match="pieces"):
            ours.engine.write(peer, numbers)


async def test_memory_that_cannot_be_registered_is_refused(engines: Callable[..., Ours]) -> None:
    ours = engines()
    base = ours.region.address
    for memory, error in [
        (b"read-only", InvalidArgument),
        (bytearray(), InvalidArgument),
        (memoryview(bytearray(100))[::2], InvalidArgument),
        ((0, 10, "host"), InvalidArgument),
        ((2**64 - 1, 10, "host"), InvalidArgument),
        ((base, 10, "tape"), InvalidArgument),
        ((base + 4 * MiB - 1, 10, "host"), Conflict),
        ((base - 9, 10, "host"), Conflict),
        ((base, 1 << 62, "host"), TooLarge),
    ]:
        with pytest.raises(error):
            ours.engine.register(memory)  # type: ignore[arg-type]
    assert ours.engine.counts()["regions"] == 1


async def test_limits_of_the_configuration_hold(start: Start, engines: Callable[..., Ours]) -> None:
    theirs = await start()
    ours = engines(pieces_max=400, batches_max=1, peers_max=2, regions_per_peer_max=1)
    transfer, peer = await big_write(ours, theirs, "node-7")
    with pytest.raises(Busy, match="batches_max"):
        ours.engine.write(peer, [(1, 0, 1, 1)])
    with pytest.raises(TooLarge, match="pieces"):
        ours.engine.write(peer, [(1, 0, 1, 1)] * 401)
    with pytest.raises(TooLarge, match="regions_per_peer_max"):
        peer.attach(theirs.handle)
    ours.engine.connect(theirs.address, "second")
    with pytest.raises(TooLarge, match="peers_max"):
        ours.engine.connect(theirs.address, "third")
    transfer.cancel()
    with suppress(asyncio.CancelledError):
        await transfer


async def test_damaged_addresses_and_handles_are_refused(engines: Callable[..., Ours]) -> None:
    ours = engines()
    address, handle = ours.engine.address, ours.region.handle
    peer = ours.engine.connect(address, "self")
    for bad in (address[:-1], address[:-1] + bytes([address[-1] ^ 1]), b"", handle):
        with pytest.raises(ProtocolError):
            ours.engine.connect(bad, "bad")
    for bad in (handle[:-1], b"x" + handle[1:], handle + b"x", address):
        with pytest.raises(ProtocolError):
            peer.attach(bad)


async def test_a_detached_region_is_refused_and_its_number_used_again(
    engines: Callable[..., Ours],
) -> None:
    ours, theirs = engines(), engines()
    peer = ours.engine.connect(theirs.engine.address, "theirs")
    remote = peer.attach(theirs.region.handle)
    transfer = ours.engine.write(peer, [ours.whole(remote, 4 * MiB)])
    if not transfer.done():
        with pytest.raises(Conflict, match="under way"):
            peer.detach(remote)
    await transfer
    peer.detach(remote)
    with pytest.raises(InvalidArgument, match="not attached"):
        ours.engine.write(peer, [ours.whole(remote, 1)])
    assert peer.attach(theirs.region.handle).key == remote.key


async def test_wrong_options_are_named(engines: Callable[..., Ours]) -> None:
    with pytest.raises(UcxUnavailable, match="ucp_init: No such device"):
        engines(options={"TLS": "nonsense"})
    with pytest.raises(ConfigError, match="spin_us"):
        engines(spin_us=-1)
    with pytest.raises(ConfigError, match="options"):
        engines(options={"TLS": "t\0cp"})


async def test_only_registration_leaves_the_loops_thread(engines: Callable[..., Ours]) -> None:
    ours = engines()
    region = await asyncio.to_thread(ours.engine.register, bytearray(1000))
    await asyncio.to_thread(region.close)
    with pytest.raises(InvalidArgument, match="thread"):
        await asyncio.to_thread(ours.engine.connect, ours.engine.address, "x")


async def test_registration_from_threads_beside_batches_is_safe(
    engines: Callable[..., Ours],
) -> None:
    ours, theirs = engines(), engines()
    peer = ours.engine.connect(theirs.engine.address, "theirs")
    remote = peer.attach(theirs.region.handle)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for region in [ours.engine.register(bytearray(1000)) for _ in range(20)]:
                region.close()

    workers = [asyncio.create_task(asyncio.to_thread(churn)) for _ in range(2)]
    for _ in range(100):
        await ours.engine.write(peer, [ours.whole(remote, 10, at=i * 1000) for i in range(50)])
    stop.set()
    await asyncio.gather(*workers)
    assert ours.engine.counts()["regions"] == 1


# -- nothing is left ------------------------------------------------------------------------------


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def threads_of_ucx() -> int:
    ours = {thread.native_id for thread in threading.enumerate()}
    return len({int(name) for name in os.listdir("/proc/self/task")} - ours)


async def test_engines_leave_no_descriptors_or_threads() -> None:
    async def use() -> None:
        ours, theirs = Ours(64 * KiB), Ours(64 * KiB)
        peer = ours.engine.connect(theirs.engine.address, "theirs")
        remote = peer.attach(theirs.region.handle)
        assert await ours.engine.write(peer, [ours.whole(remote, 64 * KiB)]) == 64 * KiB
        await ours.engine.close()
        await theirs.engine.close()

    await use()
    before, threads = descriptors(), threads_of_ucx()
    for _ in range(10):
        await use()
    assert descriptors() <= before
    assert threads_of_ucx() <= threads


async def test_an_engine_whose_closing_is_cancelled_leaves_nothing(start: Start) -> None:
    theirs, before = await start(), descriptors()
    ours = Ours(4 * MiB)
    transfer, _ = await big_write(ours, theirs, "node-7")
    theirs.signal(signal.SIGSTOP)
    closing = asyncio.create_task(ours.engine.close())
    await asyncio.sleep(0)
    closing.cancel()
    with suppress(asyncio.CancelledError):
        await closing

    with pytest.raises((PeerLost, TransferTimeout)):
        await transfer
    await until(lambda: descriptors() <= before)


async def test_peers_that_come_and_go_leave_nothing(engines: Callable[..., Ours]) -> None:
    ours = engines(64 * KiB)

    async def visit(dies_in_the_middle: bool) -> None:
        theirs = Ours(64 * KiB)
        peer = ours.engine.connect(theirs.engine.address, "visitor")
        remote = peer.attach(theirs.region.handle)
        await ours.engine.write(peer, [ours.whole(remote, 64 * KiB)])
        transfer = ours.engine.write(peer, [ours.whole(remote, 64 * KiB)] * 64)
        if dies_in_the_middle:
            await theirs.engine.close()
            with suppress(PeerLost):
                await transfer
        else:
            await transfer
            await theirs.engine.close()
        peer.close()

    await visit(True)
    await until(lambda: ours.engine.counts()["links"] == 0)
    before = descriptors()
    for i in range(40):
        await visit(i % 2 == 0)
    await until(lambda: ours.engine.counts()["links"] == 0)
    assert ours.engine.counts() == {"links": 0, "batches": 0, "regions": 1, "peers": 0}
    await until(lambda: descriptors() <= before)


# -- the library ----------------------------------------------------------------------------------


def test_doctor_tells_which_library_and_why_no_rdma() -> None:
    assert Path(FACTS.library).name.startswith("libucp.so")
    assert FACTS.version.startswith("1.")
    assert {t.split("/")[0] for t in FACTS.transports} == {"tcp"}
    assert not FACTS.rdma
    assert FACTS.rdma_reason


@pytest.mark.parametrize("wanted", ["auto", "ucx", "on"])
def test_auto_leaves_no_transport_over_which_access_is_emulated(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    transports = doctor(options_for(wanted)).transports
    assert any(t.startswith("tcp/") for t in transports) == (wanted != "auto")


def test_transports_that_the_environment_names_are_taken_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert options_for("auto") == {}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_a_named_library_that_is_not_there_is_reported_and_none_else_taken() -> None:
    code = "from p2pkv.ucx_library import doctor; print(doctor().why_not)"
    said = run_python(code, P2PKV_UCX_LIBRARY="/no/such/libucp.so.0").stdout
    assert "/no/such/libucp.so.0" in said
    assert "P2PKV_UCX_LIBRARY" in said


def test_ucx_keeps_off_standard_output_and_the_environment() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "from p2pkv.ucx_library import doctor; doctor({'TLS': 'nonsense'})\n"
        "assert dict(os.environ) == before"
    )
    run = run_python(code)
    assert run.stdout == ""
    assert "nonsense" in run.stderr
