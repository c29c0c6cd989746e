from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pkv.arena import (
    BULK_BYTES,
    PROOF_BYTES,
    Arena,
    huge_pages_enabled,
    remove_stale,
)
from p2pkv.errors import ConfigError
from p2pkv.processes import start_time

MIB = 1 << 20
DEAD_PID = 2**22 + 1  # above the kernel's largest


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(4 * MIB, "test") as arena:
        yield arena


def random_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def test_the_file_is_private_and_named_after_the_process(arena: Arena) -> None:
    status = arena.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert arena.size == len(arena.view) == 4 * MIB
    assert status.st_size == arena.size + PROOF_BYTES
    prefix = f"p2pkv-test-{os.getpid()}-{start_time(os.getpid())}-"
    assert arena.path.name.startswith(prefix)


def test_two_arenas_of_one_process_have_two_files(arena: Arena) -> None:
    with Arena.create(MIB, "test") as other:
        assert other.path != arena.path
        assert other.path.exists()
        assert arena.path.exists()


def test_what_is_written_can_be_read_through_the_file_and_the_address(arena: Arena) -> None:
    arena.write(100, b"hello")
    assert arena.path.read_bytes()[100:105] == b"hello"
    assert ctypes.string_at(arena.address + 100, 5) == b"hello"


SIZES = [0, 1, 63, BULK_BYTES - 1, BULK_BYTES, BULK_BYTES + 1, 2 * MIB]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_write_copies_any_buffer(arena: Arena, kind: type, size: int) -> None:
    data = random_bytes(size, seed=size)
    arena.write(77, kind(data))
    assert arena.view[77 : 77 + size] == data
    assert bytes(arena.view[:77]) == bytes(77)
    assert not any(arena.view[77 + size : 77 + size + 64])


def test_write_copies_a_read_only_slice_and_wider_items(arena: Arena) -> None:
    data = random_bytes(MIB)
    arena.write(0, memoryview(data)[3 : 3 + BULK_BYTES])
    assert arena.view[:BULK_BYTES] == data[3 : 3 + BULK_BYTES]
    arena.write(0, memoryview(data).cast("Q"))
    assert arena.view[:MIB] == data


@pytest.mark.parametrize("size", [64, BULK_BYTES])
def test_a_write_that_ends_at_the_end_fits_and_one_byte_more_does_not(
    arena: Arena, size: int
) -> None:
    data = random_bytes(size)
    arena.write(arena.size - size, data)
    assert arena.view[-size:] == data
    before = bytes(arena.view[-2 * size :])
    with pytest.raises(ValueError, match=f"{size} bytes at offset {arena.size - size + 1}"):
        arena.write(arena.size - size + 1, data)
    with pytest.raises(ValueError, match="at offset -1"):
        arena.write(-1, data)
    assert arena.view[-2 * size :] == before


@pytest.mark.parametrize("size", [128, 2 * BULK_BYTES])
def test_a_buffer_with_gaps_is_refused(arena: Arena, size: int) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        arena.write(0, memoryview(random_bytes(size))[::2])
    assert not any(arena.view[:size])


def ticks_during_a_write(arena: Arena, source: bytearray) -> int:
    """How often another thread runs meanwhile; one that waits for the GIL gets two at most."""
    stamps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            stamps.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    arena.write(0, source)
    end = time.perf_counter()
    stop.set()
    thread.join()
    return sum(start < stamp < end for stamp in stamps)


def test_a_large_write_lets_other_threads_run() -> None:
    size = 256 * MIB
    with Arena.create(size, "gil", prefault=True) as arena:
        source = bytearray(size)
        tries = 10  # the other thread also needs a free core
        assert any(ticks_during_a_write(arena, source) > 2 for _ in range(tries))


def test_close_removes_the_file_and_may_be_called_again(arena: Arena) -> None:
    arena.close()
    assert not arena.path.exists()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.write(0, b"x")
    with pytest.raises(ValueError, match="closed"):
        arena.write(0, bytes(BULK_BYTES))


def test_views_that_are_still_held_survive_the_close() -> None:
    arena = Arena.create(MIB, "held")
    arena.write(64, b"in flight")
    view = arena.view[64:73]
    whole = (ctypes.c_char * MIB).from_buffer(arena.view)
    arena.close()
    assert not arena.path.exists()
    assert bytes(view) == b"in flight"
    assert whole[64:73] == b"in flight"


def test_the_memory_goes_with_the_last_view() -> None:
    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    arena = Arena.create(MIB, "last")
    path = arena.path
    view = arena.view[:8]
    arena.close()
    del arena
    assert mapped()
    view.release()
    del view
    assert not mapped()


def test_prefault_takes_the_memory_at_once() -> None:
    with Arena.create(4 * MIB, "lazy") as lazy, Arena.create(4 * MIB, prefault=True) as eager:
        assert lazy.path.stat().st_blocks * 512 <= mmap.PAGESIZE  # of the proof alone
        assert eager.path.stat().st_blocks * 512 >= 4 * MIB


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_not_positive_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"memory_limit_bytes = {size}: must be positive"):
        Arena.create(size)


def test_a_size_beyond_what_the_file_system_has_free_is_refused() -> None:
    figures = os.statvfs("/dev/shm")
    size = (figures.f_blocks + 1) * figures.f_frsize
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(ConfigError, match=rf"memory_limit_bytes = {size}: /dev/shm has \d+ bytes"):
        Arena.create(size, "toolarge")
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "toolarge" in n]


@pytest.mark.parametrize("hint", ["a/b", "x" * 65, "ä", "a b"])
def test_a_hint_that_is_no_name_is_refused(hint: str) -> None:
    with pytest.raises(ConfigError, match="name_hint"):
        Arena.create(MIB, hint)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Arena.create(MIB, directory=tmp_path / "nowhere")


def test_nothing_is_left_behind_when_the_file_cannot_grow(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + PROOF_BYTES, limits[1]))
    try:
        with pytest.raises(ConfigError, match=f"memory_limit_bytes = {MIB + 1}: .*too large"):
            Arena.create(MIB + 1, directory=tmp_path)
        Arena.create(MIB, directory=tmp_path).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_removed_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take a file for a dead one's in the instant before it is locked."""
    flock = fcntl.flock
    taken: list[Path] = []

    def meddle(fd: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", meddle)
    with Arena.create(MIB, directory=tmp_path) as arena:
        assert list(tmp_path.iterdir()) == [arena.path] != taken


def test_files_that_are_always_removed_are_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_all(fd: int, operation: int) -> None:
        for path in tmp_path.iterdir():
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", remove_all)
    with pytest.raises(ConfigError, match="removed at once by another process"):
        Arena.create(MIB, directory=tmp_path)


def test_without_huge_pages_small_ones_are_taken_and_the_switch_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Arena.create(4 * MIB, huge_pages=True) as arena:
        arena.write(0, b"x")
        assert arena.view[0] == ord("x")
    warned = "write 'advise' to /sys/kernel/mm/transparent_hugepage/shmem_enabled" in caplog.text
    assert warned != huge_pages_enabled()


def test_other_threads_run_while_memory_is_prefaulted() -> None:
    """They would stand still for as long as it takes, if the GIL were kept."""
    ticks, stop = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begun = time.monotonic()
        with Arena.create(1024 * MIB, "prefault", prefault=True) as arena:
            ended = time.monotonic()
            assert arena.path.stat().st_blocks * 512 >= 1024 * MIB
    finally:
        stop.set()
        thread.join()
    meanwhile = [t for t in ticks if begun < t < ended]
    longest = max(b - a for a, b in itertools.pairwise([begun, *meanwhile, ended]))
    assert longest < (ended - begun) / 2, f"{longest:.3f} of {ended - begun:.3f} s"


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        ("", False),
    ],
)
def test_the_switch_for_huge_pages_is_read(tmp_path: Path, text: str, enabled: bool) -> None:
    switch = tmp_path / "shmem_enabled"
    switch.write_text(text)
    assert huge_pages_enabled(switch) is enabled
    assert huge_pages_enabled(tmp_path / "missing") is False


CHILD = """
import sys, time
from p2pkv.arena import Arena
arena = Arena.create(1 << 20, "child", directory=sys.argv[1])
print(arena.path, flush=True)
time.sleep(600)
"""


def child(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_file_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path) -> None:
    process, path = child(tmp_path)
    with process:
        assert path.exists()
        assert remove_stale(tmp_path) == []
        process.send_signal(signal.SIGKILL)
    assert path.exists()
    with Arena.create(MIB, directory=tmp_path) as arena:
        assert not path.exists()
        assert arena.path.exists()


def test_the_file_of_a_stopped_process_stays(tmp_path: Path) -> None:
    process, path = child(tmp_path)
    with process:
        process.send_signal(signal.SIGSTOP)
        assert remove_stale(tmp_path) == []
        process.kill()
    assert remove_stale(tmp_path) == [path]


def test_a_reused_pid_does_not_protect_a_file(tmp_path: Path) -> None:
    stale = tmp_path / f"p2pkv-x-{os.getpid()}-{(start_time(os.getpid()) or 0) + 1}-0"
    stale.touch()
    assert remove_stale(tmp_path) == [stale]


def test_a_locked_file_stays_although_its_process_cannot_be_seen(tmp_path: Path) -> None:
    """As with containers that share /dev/shm but not their process ids."""
    process, path = child(tmp_path)
    with process:
        renamed = path.rename(tmp_path / f"p2pkv-other-{DEAD_PID}-1-0")
        assert remove_stale(tmp_path) == []
        assert renamed.exists()
        process.kill()
    assert remove_stale(tmp_path) == [renamed]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    names = [f"p2pkv-{DEAD_PID}-1-0", f"other-{DEAD_PID}-1-0", f"p2pkv-x-{DEAD_PID}-1-0.bak"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / f"p2pkv-link-{DEAD_PID}-1-0").symlink_to(tmp_path / names[0])
    (tmp_path / f"p2pkv-dir-{DEAD_PID}-1-0").mkdir()
    assert remove_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 5
