"""The fault harness against real clusters: it finds what is lost, and nothing where nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import new_seed

from p2pkv.etcd_server import EtcdCluster
from p2pkv.testing import namespaces
from p2pkv.testing.cluster import Cluster
from p2pkv.testing.failover import Plan, Report, run
from p2pkv.testing.faultplan import parse
from p2pkv.testing.namespaces import Namespaces
from p2pkv.testing.targets import OwnCluster

SCRIPT = Path(__file__).parents[2] / "scripts" / "failover.py"
FAULT_S_MAX = 1.5
"""Shorter than what it takes until a bucket of one copy is started anew."""


def hurt(faults: str, *, seconds: float = 4.0, replicas: int = 1, partitions: bool = False,
         **fields: Any) -> Report:  # fmt: skip
    plan = Plan(
        faults=parse(faults),
        seconds=seconds,
        seed=new_seed(),
        operations_per_s=400,
        fault_s_max=FAULT_S_MAX,
        **fields,
    )
    with OwnCluster(3, replicas=replicas, fast=True, partitions=partitions) as target:
        report = run(plan, target, target.cluster_name)
    print(msgspec.json.encode(msgspec.structs.replace(report, violations={})).decode())
    return report


def test_without_faults_nothing_is_found() -> None:
    report = hurt("", seconds=2.0)
    assert report.passed, report.reasons
    assert report.operations > 500
    assert report.errors == {}


def test_a_kill_loses_acknowledged_writes_of_the_only_copy_and_this_is_found() -> None:
    report = hurt("kill=1")
    assert not report.passed
    assert report.faults == {"kill": 1}
    assert report.acked_lost > 0
    assert report.failed_write_once_reads > 0
    assert report.not_linearizable > 0
    assert report.stale_reads == report.damaged_values == report.undecided == 0
    assert report.first_ack_after_kill_s["count"] > 0
    assert report.first_ack_after_kill_s["max"] < 30
    assert report.repair_s["count"] == 1


@pytest.mark.slow
def test_what_one_copy_survives_is_found_to_be_survived() -> None:
    """A node and etcd that are stopped and go on; etcd that is killed and starts again."""
    report = hurt("stop=1,etcd_stop=1,etcd_kill=1")
    assert report.faults == {"stop": 1, "etcd_stop": 1, "etcd_kill": 1} or report.skipped
    assert report.acked_lost == report.stale_reads == report.not_linearizable == 0
    assert report.damaged_values == report.undecided == 0


@pytest.mark.slow
def test_with_two_copies_a_kill_loses_nothing() -> None:
    report = hurt("kill=2", replicas=2)
    assert report.passed, report.reasons
    assert report.faults == {"kill": 2}
    assert report.replicas == 2
    assert report.first_ack_after_kill_s["count"] > 0


@pytest.mark.slow
def test_with_two_copies_a_kill_while_etcd_is_stopped_loses_nothing() -> None:
    report = hurt("kill_without_etcd=1", replicas=2)
    assert report.passed, report.reasons
    assert report.faults == {"kill_without_etcd": 1}


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
def test_a_partition_makes_nothing_stale() -> None:
    report = hurt("partition=2", partitions=True)
    assert report.faults == {"partition": 2}
    assert not report.skipped
    assert report.stale_reads == report.acked_lost == report.not_linearizable == 0


def test_a_run_with_too_little_load_has_failed() -> None:
    report = hurt("", seconds=1.0, operations_per_s_min=100_000)
    assert not report.passed
    assert "operations a second prove nothing" in report.reasons[0]


def test_a_node_that_ends_by_itself_is_reported() -> None:
    with OwnCluster(3, fast=True) as target:
        assert target.ended() == {}
        target.kill("n1")
        assert list(target.ended()) == ["n1"]
        assert "n1@1 serves" in target.ended()["n1"]


# -- a cluster that somebody else runs


@pytest.fixture
def theirs(etcd: EtcdCluster, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(3, etcd=etcd) as cluster:
        for node in cluster:
            (tmp_path / node.name).write_text(str(node.pid))
        yield cluster


def test_an_operator_s_cluster_is_hurt_by_its_own_commands(theirs: Cluster, tmp_path: Path) -> None:
    def signal(name: str) -> str:
        act = f"echo {name} {{node}} >>{tmp_path}/did; kill -{name} $(cat {tmp_path}/{{node}})"
        return f"sh -c '{act}'"

    done = subprocess.run(
        [
            sys.executable, SCRIPT, "--json", "--seconds=2", "--faults=stop=2,kill=1",
            f"--etcd={theirs.etcd.endpoints[0]}", f"--cluster={theirs.name}", "--nodes=n1",
            f"--stop-command={signal('STOP')}", f"--resume-command={signal('CONT')}",
            "--rate=300", f"--longest={FAULT_S_MAX}", f"--history={tmp_path / 'history'}",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["faults"] == {"stop": 2}
    assert "no commands were given" in report["skipped"]["kill"]
    assert (tmp_path / "did").read_text().split() == ["STOP", "n1", "CONT", "n1"] * 2
    assert report["acked_lost"] == report["not_linearizable"] == 0, report
    assert done.returncode == (0 if report["passed"] else 1)
    assert list((tmp_path / "history").glob("*.history.jsonl"))


# -- machines that cannot hear each other


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0)"
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
def test_cut_machines_do_not_reach_each_other_and_others_do() -> None:
    with Namespaces() as network:
        a, b = network.add("a"), network.add("b")
        listen = [*network.prefix("b"), sys.executable, "-c", LISTEN, b]
        with subprocess.Popen(listen, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
            assert listener.stdout is not None
            port = listener.stdout.readline().decode().strip()

            def reaches(prefix: tuple[str, ...]) -> bool:
                command = [*prefix, sys.executable, "-c", CONNECT, b, port]
                return not subprocess.run(command, capture_output=True, check=False).returncode

            assert reaches(network.prefix("a"))
            assert reaches(())
            network.cut(a, b)
            assert not reaches(network.prefix("a"))
            assert reaches(())
            network.heal()
            network.cut(b, a)
            assert not reaches(network.prefix("a"))
            network.heal()
            assert reaches(network.prefix("a"))
            listener.communicate()
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert network.prefix("a")[3] not in left
    assert os.listdir("/sys/class/net").count(f"p2pkv{network.prefix('a')[3].split('-')[1]}") == 0
