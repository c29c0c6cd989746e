"""The harness's parts that need no cluster: plans, counts of copies, figures, commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from p2pkv import ring
from p2pkv.config import EtcdConfig
from p2pkv.errors import ConfigError
from p2pkv.records import BucketRecord, Meta, NodeRecord, Versioned, View
from p2pkv.testing.failover import Plan, unavailable
from p2pkv.testing.faultplan import DURATIONS_S, Cut, FaultKind, parse, plan
from p2pkv.testing.history import Record
from p2pkv.testing.linearizability import Kind
from p2pkv.testing.observer import lacking
from p2pkv.testing.probe import keys_of_buckets, quantiles
from p2pkv.testing.targets import Commands, OperatedCluster, _directions
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

SCRIPT = Path(__file__).parent.parent / "scripts" / "failover.py"


# -- plans


def test_counts_of_faults_are_read() -> None:
    assert parse("kill=30, partition=3") == {FaultKind.KILL: 30, FaultKind.PARTITION: 3}
    assert parse("") == {}


@pytest.mark.parametrize("text", ["kil=3", "kill", "kill=x", "kill=-1", "kill=10001"])
def test_counts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="faults = "):
        parse(text)


COUNTS = parse("kill=20,stop=10,etcd_kill=5,etcd_stop=5,kill_without_etcd=4,partition=10")


def test_a_seed_gives_the_same_faults_again() -> None:
    assert plan(COUNTS, Random(5), 1.0) == plan(COUNTS, Random(5), 1.0)
    assert plan(COUNTS, Random(5), 1.0) != plan(COUNTS, Random(6), 1.0)


def test_all_faults_may_be_told_to_last_the_same_time() -> None:
    faults = plan(COUNTS, Random(5), 1.0, 8.0, 60.0)
    assert {fault.duration_s for fault in faults} == {60.0}


def test_a_plan_has_what_was_asked_for_within_bounds() -> None:
    faults = plan(COUNTS, Random(1), 1.0)
    assert {kind: sum(f.kind is kind for f in faults) for kind in COUNTS} == COUNTS
    for fault in faults:
        low, high = DURATIONS_S[fault.kind]
        assert low <= fault.duration_s <= high
        assert 0.2 <= fault.pause_s <= 1.8
        names = ["a", "b", "c"]
        assert fault.pick(names) in names
        assert fault.pick_other(names) in set(names) - {fault.pick(names)}


@pytest.mark.parametrize(
    "field", [{"seconds": 0}, {"threads": 65}, {"timeout_s": float("nan")}, {"registers": 0}]
)
def test_a_run_that_makes_no_sense_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        Plan(**field)


def test_each_cut_drops_the_packets_that_it_says() -> None:
    nodes = ["a", "b", "c"]
    assert _directions(Cut.NODE_TO_NODE, "a", "b", nodes) == [("a", "b")]
    assert _directions(Cut.NODE_FROM_NODE, "a", "b", nodes) == [("a", "b"), ("b", "a")]
    assert _directions(Cut.NODE_FROM_ETCD, "a", "b", nodes) == [("a", "etcd"), ("etcd", "a")]
    away = {receiver for sender, receiver in _directions(Cut.NODE_FROM_ALL, "a", "b", nodes)
            if sender == "a"}  # fmt: skip
    assert away == {"b", "c", "etcd", "clients"}
    among = {name for pair in _directions(Cut.NODE_FROM_NODES, "a", "b", nodes) for name in pair}
    assert among == {"a", "b", "c"}


# -- copies


def member(name: str, boot: int = 1) -> Member:
    return Member(NodeId(name), BootId(boot))


def cluster(replicas: int, *buckets: tuple[Member, ...], nodes: str = "abc") -> View:
    """Buckets by their in-sync members, the primary first."""
    records = {
        BucketId(n): Versioned(
            BucketRecord(
                epoch=Epoch(1),
                generation=1,
                primary=members[0],
                in_sync=members,
                assigned=tuple(m.node for m in members),
            ),
            Revision(1),
        )
        for n, members in enumerate(buckets)
    }
    meta = Meta(
        bucket_count=len(buckets), hash_scheme="x", replication_factor=replicas, fingerprint="f"
    )
    registered = {NodeId(n): NodeRecord(boot=BootId(1), control=()) for n in nodes}
    return View(meta=meta, nodes=registered, buckets=records)


A, B, C = member("a"), member("b"), member("c")


def test_a_whole_cluster_lacks_nothing() -> None:
    assert lacking(cluster(2, (A, B), (B, C))) == {}
    assert lacking(cluster(1, (A,), (B,))) == {}


def test_buckets_lack_copies_that_are_too_few_dead_or_of_an_older_boot() -> None:
    assert lacking(cluster(2, (A, B), (B,))) == {1: "epoch 1, primary b@1, in sync b@1"}
    assert lacking(cluster(2, (A, B), (B, C)), dead={A}).keys() == {0}
    assert lacking(cluster(2, (A, B), (member("b", 0), C))).keys() == {1}
    assert lacking(cluster(3, (A, B), (B, A))).keys() == {0, 1}


def test_no_more_copies_are_wanted_than_there_are_nodes() -> None:
    assert lacking(cluster(3, (A, B), (B, A), nodes="ab")) == {}


def test_buckets_without_a_record_are_lacking() -> None:
    view = cluster(1, (A,), (B,))
    del view.buckets[BucketId(1)]
    assert lacking(view) == {1: "no record"}
    assert lacking(View())


# -- figures


def test_each_bucket_has_a_key_of_its_own() -> None:
    keys = keys_of_buckets(64)
    assert {ring.bucket_of(key.encode(), 64) for key in keys.values()} == set(range(64))


def test_quantiles_are_by_nearest_rank() -> None:
    assert quantiles([]) == {"p50": None, "p99": None, "max": None, "count": 0}
    assert quantiles([3.0]) == {"p50": 3.0, "p99": 3.0, "max": 3.0, "count": 1}
    many = quantiles([float(n) for n in range(1, 201)])
    assert many == {"p50": 100.0, "p99": 198.0, "max": 200.0, "count": 200}


def test_a_bucket_is_unavailable_from_its_first_failure_to_its_next_success() -> None:
    def asked(called: int, returned: int, error: str = "") -> Record:
        return Record(client="c", kind=Kind.GET, key="k", called=called * 10**9,
                      returned=returned * 10**9, error=error)  # fmt: skip

    records = [
        asked(0, 1),
        asked(2, 5, "Unreachable"),
        asked(1, 5),  # was under way before
        asked(5, 6, "Unreachable"),
        asked(6, 7),
        asked(8, 9),
    ]
    assert list(unavailable(records, 8)) == [5.0]
    assert list(unavailable([*records, asked(3, 4)], 8)) == [2.0, 2.0]
    assert list(unavailable(records[:2], 8)) == []


# -- an operator's cluster


def operated(**commands: str) -> OperatedCluster:
    return OperatedCluster(EtcdConfig(), "c", {"n1": "host1"}, Commands(**commands))


def test_commands_get_the_node_and_its_host(tmp_path: Path) -> None:
    target = operated(kill=f"touch '{tmp_path}/killed {{node}} on {{host}}'", start="true")
    assert target.refuses(FaultKind.KILL) == ""
    target.kill("n1")
    assert [p.name for p in tmp_path.iterdir()] == ["killed n1 on host1"]


def test_a_command_that_fails_says_so() -> None:
    with pytest.raises(ConfigError, match=r"ls /nowhere/n1: exit code 2: .*No such file"):
        operated(kill="ls /nowhere/{node}").kill("n1")


def test_a_template_with_other_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kill_command = .*only \{node\}, \{host\}"):
        Commands(kill="ssh {address}")


def test_faults_without_commands_are_refused() -> None:
    target = operated(kill="true")
    for kind in FaultKind:
        assert target.refuses(kind)


# -- the command line


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "explode=1"], "'explode' must be one of kill, stop"),
        (["--nodes", "0"], "nodes = 0: must be from 1 to 32"),
        (["--nodes", "a,b"], "must be a number, unless etcd is given"),
        (["--seconds", "0"], "seconds = 0.0: must be from 0.1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(
    arguments: list[str], message: str
) -> None:
    done = script("--json", *arguments)
    assert done.returncode == 2
    assert message in json.loads(done.stdout)["message"]
