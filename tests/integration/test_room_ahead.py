"""Room ahead of puts, with real processes: clients that are killed or stopped as they fill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import figure

from p2pkv import Client, _native
from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing.cluster import Cluster, wait_for

pytestmark = pytest.mark.skipif(not _native.available, reason="the native extension is not built")

KIB, MIB = 1 << 10, 1 << 20

WRITER = """
import sys
from p2pkv import Client
from p2pkv.shared_memory import SharedArena

endpoint, cluster = sys.argv[1:]
with Client([endpoint], cluster=cluster, timeout=60.0) as kv:
    for i in range(4):
        kv.put("before", bytes([i]) * (1 << 20))
    write = SharedArena.write

    def in_two_steps(arena, offsets, sources):
        (offset,), (source,) = offsets, sources
        write(arena, [offset], [source[: len(source) // 2]])
        print("half", flush=True)
        sys.stdin.readline()
        write(arena, [offset], [source])

    SharedArena.write = in_two_steps
    kv.put("mine", b"m" * (1 << 20))
    print("whole", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(etcd: EtcdCluster) -> Iterator[Cluster]:
    with Cluster(1, etcd=etcd) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client
        client.delete_range(b"")


@pytest.fixture
def writer(cluster: Cluster, etcd: EtcdCluster) -> Iterator[subprocess.Popen[str]]:
    """A client that stands in the middle of its copy until a line comes."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, etcd.endpoints[0], cluster.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.communicate()


def test_of_a_client_that_is_killed_while_it_fills_its_room_nothing_stays(
    kv: Client, writer: subprocess.Popen[str]
) -> None:
    assert figure(kv, "memory_rooms_bytes") >= MIB
    writer.send_signal(signal.SIGKILL)
    wait_for(lambda: not figure(kv, "memory_rooms_bytes"), "the room to be free", 20)
    assert kv.get("mine") is None
    assert kv.get("before") == bytes([3]) * MIB
    kv.delete_range(b"")
    assert figure(kv, "memory_used_bytes") == 0


def test_a_client_that_is_stopped_while_it_fills_its_room_harms_nobody_and_goes_on(
    kv: Client, writer: subprocess.Popen[str]
) -> None:
    os.kill(writer.pid, signal.SIGSTOP)
    others = {f"o{i}": bytes([i]) * MIB for i in range(100)}
    for key, value in others.items():  # more than the node's memory
        kv.put(key, value)
    os.kill(writer.pid, signal.SIGCONT)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write("go on\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "whole\n"
    assert kv.get("mine") == b"m" * MIB
    there = [key for key in others if kv.exists(key)]
    assert len(there) > 40
    assert all(kv.get(key) == others[key] for key in there)
