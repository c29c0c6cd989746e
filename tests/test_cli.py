"""The command line: what it refuses, what it prints, and what it does to real processes."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from p2pkv import cuda, errors, ucx_library
from p2pkv.cli import app
from p2pkv.commands import checks, measure, state, survey
from p2pkv.commands.connection import client_config
from p2pkv.commands.output import exit_code
from p2pkv.commands.parameters import field_options
from p2pkv.config import NodeConfig
from p2pkv.etcd_server import EtcdCluster
from p2pkv.orphans import remove_ownerless
from p2pkv.processes import start_time
from p2pkv.records import BucketRecord, Meta, NodeRecord, Versioned, View
from p2pkv.testing.cluster import Cluster
from p2pkv.testing.fakecuda import FakeCuda
from p2pkv.types import BootId, BucketId, Epoch, Member, NodeId, Revision

TIMEOUT_S = 60.0
NOBODY = "http://127.0.0.1:1"


def invoke(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(arguments), **options)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster and no setting of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("P2PKV_") and name != "P2PKV_ETCD":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def wait_until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return result


COMMANDS: list[Command] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A test that fails half-way leaves no process."""
    before = len(COMMANDS)
    yield
    for command in COMMANDS[before:]:
        if command.process.poll() is None:
            command.end(signal.SIGTERM if "up" in command.process.args else signal.SIGKILL)
    del COMMANDS[before:]


class Command:
    """``p2pkv`` as a process; its lines of JSON can be waited for."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "p2pkv.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environ or {})},
            text=True,
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        COMMANDS.append(self)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def line(self) -> Any:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, "".join(self.errors)
        return json.loads(text)

    def said(self, text: str) -> bool:
        return text in "".join(self.errors)

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            self.process.stdout.close()
            self.process.stderr.close()


# -- help and refusals ----------------------------------------------------------------------------


def test_help_comes_at_once() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "p2pkv.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Exit codes: 0 done" in " ".join(done.stdout.split())
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent_s < 0.8  # 0.3 on an idle machine; measured as processor time, since others run


def test_help_does_not_import_what_is_slow() -> None:
    program = (
        "import sys, p2pkv.cli; print({'grpc', 'zmq', 'asyncio'} & set(sys.modules) or 'none')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "none"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["up", "--nodes", "0"], ["nodes", "'0'", "1 to 64"]),
        (["up", "--nodes", "many"], ["nodes", "'many'", "1 to 64"]),
        (["up", "--memory", "lots"], ["memory", "'lots'", "64MiB"]),
        (["up", "--memory", "4096"], ["memory_limit_bytes", "4096", ">= 1048576"]),
        (["up", "--memory", "900t"], ["memory", "'900t'", "must be at most"]),
        (["up", "--bucket-count", "100"], ["bucket_count", "100", "a power of two"]),
        (["up", "--cluster", "a/b"], ["cluster", "'a/b'", "1 to 64 of"]),
        (["node", "--bucket-count", "1000"], ["bucket_count", "1000", "a power of two"]),
        (["node", "--memory-limit-bytes", "1k"], ["memory_limit_bytes", "1024", ">= 1048576"]),
        (["node", "--bind", "0.0.0.0"], ["advertise", "an address"]),
        (["node", "--bind", "here"], ["bind", "'here'", "IPv4 or IPv6"]),
        (["node", "--node-id", "a b"], ["node_id", "'a b'", "matching"]),
        (["node", "--etcd-loss", "pray"], ["etcd_loss", "'pray'", "serve|fence"]),
        (["node", "--weight=-1"], ["weight", "'-1'", ">= 0"]),
        (["node", "--etcd-session-ttl-s", "1"], ["session_ttl_s", "'1'", ">= 2"]),
        (["node", "--log-level", "loud"], ["--log-level", "'loud'", "debug, info"]),
        (["node", "--config", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
        (["put", "k", "v", "--ttl", "soon"], ["ttl", "'soon'", "a number from"]),
        (["put", "k", "v", "--file", "f"], ["VALUE and --file", "one of them"]),
        (["put", "k", "--file", "/nowhere"], ["--file", "'/nowhere'", "No such file"]),
        (["get", "xyz", "--hex"], ["KEY", "'xyz'", "hexadecimal"]),
        (["delete"], ["KEY... and --prefix"]),
        (["scan", "--limit", "0"], ["limit", "'0'", "a whole number from 1"]),
        (["scan", "--values"], ["--values", "needs --json"]),
        (["get", "k", "--timeout", "0"], ["timeout_s", "'0'", "> 0"]),
        (["get", "k", "--path", "pigeon"], ["path", "'pigeon'", "auto|tcp|zmq"]),
        (["get", "k", "--etcd-endpoints", NOBODY, "--seeds", "tcp://a:1"], ["seeds", "not both"]),
        (["ring", "show", "--seeds", "tcp://127.0.0.1:1"], ["needs etcd", "--etcd-endpoints"]),
        (["bench", "--workloads", "dance"], ["workload", "'dance'", "must be one of"]),
        (["bench", "--clients", "1,x"], ["clients", "'x'", "from 1 to 256"]),
        (["bench", "--batch", "0"], ["batch", "'0'", "1 to 4096"]),
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_refused_with_field_value_and_what_is_allowed(
    arguments: list[str], parts: list[str]
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.stderr


def test_an_option_that_does_not_exist_is_refused() -> None:
    assert invoke("get", "k", "--colour").exit_code == 2


def test_every_field_of_a_node_is_an_option() -> None:
    names = {p.name for p in field_options(NodeConfig)}
    assert {"memory_limit_bytes", "etcd__endpoints", "limits__value_bytes_max"} <= names
    help_text = invoke("node", "--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    for name in names:
        assert "--" + name.replace("__", "-").replace("_", "-") in help_text


# -- errors, exit codes, configuration ------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.OutOfMemory("x"), 1),
        (errors.Conflict("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.TooLarge("x"), 2),
        (errors.ClusterMismatch("x"), 2),
        (errors.Miss("x"), 3),
        (errors.Unreachable("x"), 4),
        (errors.DeadlineExceeded("x"), 4),
        (errors.AuthorityUnavailable("x"), 4),
        (errors.Stalled("x"), 4),
        (errors.Indeterminate("x"), 5),
        (errors.BatchError([errors.Miss("x")]), 1),
        (errors.BatchError([errors.Indeterminate("x")]), 5),
    ],
)
def test_an_error_has_its_exit_code(error: errors.P2PKVError, code: int) -> None:
    assert exit_code(error) == code


def test_with_json_an_error_is_json_as_well() -> None:
    result = invoke("get", "k", "--etcd-endpoints", NOBODY, "--timeout", "0.3", "--json")
    assert result.exit_code == 4
    said = json.loads(result.stdout)
    assert said["exit_code"] == 4
    assert said["error"] in ("Unreachable", "DeadlineExceeded", "AuthorityUnavailable")
    assert said["message"] in result.stderr


def options(**given: str | None) -> dict[str, str | None]:
    names = ("etcd_endpoints", "seeds", "cluster", "timeout", "path", "config")
    return {name: given.get(name) for name in names}


def test_an_option_is_stronger_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_SEEDS", "tcp://a:1")
    monkeypatch.setenv("P2PKV_CLUSTER", "other")
    assert client_config(options()).seeds == ("tcp://a:1",)
    config = client_config(options(etcd_endpoints="http://b:1,http://c:1", cluster="mine"))
    assert config.etcd is not None
    assert config.etcd.endpoints == ("http://b:1", "http://c:1")
    assert (config.seeds, config.cluster) == ((), "mine")


def test_seeds_put_aside_an_etcd_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_ETCD__ENDPOINTS", NOBODY)
    config = client_config(options(seeds="tcp://a:1"))
    assert (config.etcd, config.seeds) == (None, ("tcp://a:1",))


def test_a_file_may_say_where_the_cluster_is(tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    file.write_text('cluster = "c"\n[etcd]\nendpoints = ["http://d:1"]\nca_file = "ca.pem"\n')
    config = client_config(options(config=str(file)))
    assert config.etcd is not None
    assert (config.cluster, config.etcd.ca_file) == ("c", "ca.pem")


def test_without_anything_the_etcd_on_this_machine_is_meant() -> None:
    config = client_config(options())
    assert config.etcd is not None
    assert config.etcd.endpoints == ("http://127.0.0.1:2379",)


# -- the state of a local cluster -----------------------------------------------------------------


def test_a_state_file_without_its_process_is_no_running_cluster() -> None:
    state.directory("c").mkdir(parents=True)
    state.write(state.State("c", os.getpid(), ("http://a:1",), ready=True))
    assert state.running("c") is None
    lock = state.Lock.take("c")
    assert lock is not None
    assert state.Lock.take("c") is None
    running = state.running("c")
    assert running is not None
    assert running.endpoints == ("http://a:1",)
    lock.release()
    assert state.running("c") is None


def test_a_process_id_that_was_given_again_is_not_the_old_process() -> None:
    started = start_time(os.getpid()) or 0
    assert state.Process("n1", os.getpid(), started, "").alive
    assert not state.Process("n1", os.getpid(), started - 1, "").alive


def test_an_unreadable_state_file_is_as_none() -> None:
    state.directory("c").mkdir(parents=True)
    (state.directory("c") / "state.json").write_text("{")
    assert state.read("c") is None


# -- what status makes of the records -------------------------------------------------------------


def record(primary: str, assigned: str) -> Versioned:
    member = Member.parse(primary)
    changed = BucketRecord(epoch=Epoch(1), generation=1, primary=member, in_sync=(member,),
                           assigned=(NodeId(assigned),))  # fmt: skip
    return Versioned(changed, Revision(1))


def a_view() -> View:
    view = View(meta=Meta(bucket_count=8, hash_scheme="h", fingerprint="f"))
    for name, boot in (("a", 2), ("b", 1)):
        view.nodes[NodeId(name)] = NodeRecord(boot=BootId(boot), control=(f"tcp://{name}:1",))
    places = [("a@2", "a"), ("a@2", "b"), ("b@1", "b"), ("a@1", "a"), ("gone@1", "a")]
    for bucket, place in enumerate(places):
        view.buckets[BucketId(bucket)] = record(*place)
    return view


def test_buckets_are_counted_by_what_is_wrong_with_them() -> None:
    counted = survey.count_buckets(a_view())
    assert counted == survey.Buckets(
        total=8, without_owner=3, moving=1, lost_owner=2, short_of_copies=2
    )


def test_shares_tell_what_arrives_and_leaves() -> None:
    shares = survey.shares(a_view())
    assert shares[NodeId("a")] == survey.Share(owned=3, assigned=3, arriving=1, leaving=1)
    assert shares[NodeId("b")] == survey.Share(owned=1, assigned=2, arriving=1)
    assert shares[NodeId("gone")] == survey.Share(owned=1, leaving=1)


@pytest.mark.parametrize(
    ("version", "word"),
    [("3.6.14", ""), ("3.7.0", ""), ("3.6.13", "3.6.14 or later is recommended"),
     ("3.4.23", "answer a read from the past"), ("3.5.1", "corrupt"), ("3.5.28", "3.6.14"),
     ("unknown", "not known here")],
)  # fmt: skip
def test_doctor_has_advice_on_the_version_of_etcd(version: str, word: str) -> None:
    advice = checks.etcd_advice(version)
    assert word in advice
    assert bool(advice) == bool(word)


@pytest.mark.parametrize(("registers", "state"), [(True, "ok"), (False, "note")])
def test_doctor_says_whether_cuda_registers_shared_memory(registers: bool, state: str) -> None:
    gpu = FakeCuda(registers)
    with cuda.using(gpu):
        check = next(c for c in checks.machine(1 << 20) if c.check == "gpu")
    assert check.state == state
    assert ("operation not supported" in check.found) != registers
    assert bool(check.remedy) != registers
    assert gpu.registered_bytes == 0
    assert gpu.faults == []


def test_doctor_says_what_this_machine_lacks() -> None:
    result = invoke("doctor", "--json", "--memory", "900t", "--etcd-endpoints", NOBODY,
                    "--timeout", "0.3")  # fmt: skip
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    found = {check["check"]: check for check in said["checks"]}
    assert found["msgspec"]["state"] == "ok"
    assert found["/dev/shm"]["state"] == "failed"
    assert "remount" in found["/dev/shm"]["remedy"]
    assert found[f"etcd {NOBODY}"]["state"] == "failed"
    assert said["failed"] == sum(check["state"] == "failed" for check in said["checks"])


# -- up and down ----------------------------------------------------------------------------------


def up(*more: str) -> Command:
    return Command("up", "--json", "--memory", "32MiB", "--bucket-count", "16", *more)


def pids_of(ready: dict[str, Any]) -> dict[str, int]:
    return {process["name"]: process["pid"] for process in ready["processes"]}


def gone(pid: int) -> bool:
    return start_time(pid) is None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two nodes, in the foreground of a process of its own."""
    home = tmp_path_factory.mktemp("state")
    command = Command(
        "up", "--json", "--nodes", "2", "--memory", "32MiB", "--bucket-count", "16", "--cluster",
        "shared", environ={"XDG_STATE_HOME": str(home)},
    )  # fmt: skip
    try:
        ready = command.line()
        ready["home"] = str(home)
        ready["options"] = ["--cluster", "shared", "--etcd-endpoints", *ready["etcd_endpoints"]]
        yield ready
    finally:
        assert command.end(signal.SIGTERM) == 0
    assert all(gone(pid) for pid in pids_of(ready).values())


def test_up_tells_how_to_connect_and_ctrl_c_ends_everything() -> None:
    command = Command("up", "--nodes", "1", "--memory", "32MiB", "--bucket-count", "16")
    assert command.process.stdout is not None
    lines: list[str] = []
    while not any("kv.get" in line for line in lines):
        lines.append(command.process.stdout.readline())
        assert lines[-1], "".join(command.errors)
    text = "".join(lines)
    running = state.running("default")
    assert running is not None
    assert running.endpoints[0] in text
    assert f"p2pkv.Client(etcd_endpoints={list(running.endpoints)!r}" in text
    assert command.end(signal.SIGINT) == 0
    assert all(not process.alive for process in running.processes)
    assert state.read("default") is None


def test_detached_it_stays_until_down_and_a_second_one_is_refused() -> None:
    arguments = ["up", "--nodes", "2", "--memory", "32MiB", "--bucket-count", "16"]
    command = Command(*arguments, "--detach", "--json")
    ready = command.line()
    assert command.end() == 0
    assert set(pids_of(ready)) == {"etcd", "n1", "n2"}
    try:
        second = invoke(*arguments)
        assert second.exit_code == 1
        assert "runs here already" in second.stderr
        assert invoke("put", "a", "1").exit_code == 0  # finds the cluster by itself
        assert invoke("get", "a").stdout == "1"
    finally:
        stopped = invoke("down", "--json").stdout
    assert set(json.loads(stopped)["stopped"]) == {"etcd", "n1", "n2"}
    assert all(gone(pid) for pid in pids_of(ready).values())
    assert invoke("down").exit_code == 3


def test_a_node_that_dies_is_reported_with_its_log() -> None:
    command = up("--nodes", "2")
    pids = pids_of(command.line())
    os.kill(pids["n2"], signal.SIGKILL)
    wait_until(lambda: command.said("node n2 has ended (signal SIGKILL)"))
    wait_until(lambda: command.said("n2@1 serves at"))
    assert not gone(pids["n1"])
    assert command.end(signal.SIGTERM) == 1
    assert gone(pids["n1"])


def test_an_etcd_that_dies_is_reported_and_nodes_go_on() -> None:
    command = up("--nodes", "1")
    ready = command.line()
    pids = pids_of(ready)
    os.kill(pids["etcd"], signal.SIGKILL)
    wait_until(lambda: command.said("etcd has ended"))
    assert not gone(pids["n1"])
    assert command.end(signal.SIGINT) == 1


def test_a_killed_up_takes_its_children_along_and_the_next_removes_what_they_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL, which it can do nothing about."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = up("--nodes", "2")
    pids = pids_of(command.line())
    assert [p.name[:11] for p in tmp_path.glob("p2pkv-etcd-*")] == ["p2pkv-etcd-"]
    arenas = [p for p in Path("/dev/shm").glob("p2pkv-n*") if str(pids["n1"]) in p.name]
    assert len(arenas) == 1
    command.process.kill()
    command.end()
    wait_until(lambda: all(gone(pid) for pid in pids.values()), 5)
    left = set(tmp_path.glob("p2pkv-etcd-*"))
    assert len(left) == 1
    again = up("--nodes", "1")
    pids_of(again.line())
    assert not left & set(tmp_path.glob("p2pkv-etcd-*"))
    assert not arenas[0].exists()
    assert again.end(signal.SIGINT) == 0
    assert not list(tmp_path.glob("p2pkv-etcd-*"))


def test_etcds_data_outlives_its_owner_as_long_as_a_member_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import os, sys; from p2pkv.etcd_server import EtcdCluster; "
        "print(EtcdCluster().start().members[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environ)
    pid = int(said.stdout)
    try:
        assert remove_ownerless("p2pkv-etcd-") == []
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: remove_ownerless("p2pkv-etcd-"), 5)
    assert not list(tmp_path.glob("p2pkv-etcd-*"))


def test_up_uses_a_running_etcd_and_leaves_it() -> None:
    with EtcdCluster() as etcd:
        command = up("--nodes", "1", "--etcd", etcd.endpoints[0], "--cluster", "guest")
        ready = command.line()
        assert ready["etcd_endpoints"] == list(etcd.endpoints)
        assert set(pids_of(ready)) == {"n1"}
        assert command.end(signal.SIGTERM) == 0
        assert etcd.members[0].healthy()


def test_up_with_an_etcd_that_is_not_there_is_refused_and_leaves_nothing() -> None:
    result = Command("up", "--etcd", NOBODY, "--nodes", "1", "--memory", "32MiB", "--json")
    assert result.line()["exit_code"] == 4
    assert result.end() == 4
    assert state.read("default") is None


# -- a node ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


def node(etcd: EtcdCluster, cluster: str, node_id: str, *more: str) -> Command:
    return Command(
        "node", "--json", "--cluster", cluster, "--node-id", node_id, "--memory-limit-bytes",
        "32MiB", "--etcd-endpoints", etcd.endpoints[0], *more,
    )  # fmt: skip


def owned(etcd: EtcdCluster, cluster: str) -> dict[str, int]:
    """Buckets of each registered node; empty if not all have an owner."""
    result = invoke(
        "ring", "show", "--json", "--cluster", cluster, "--etcd-endpoints", *etcd.endpoints
    )
    said = json.loads(result.stdout)
    counts = {n["node"]: n["owned"] for n in said.get("nodes", ()) if n["registered"]}
    return counts if sum(counts.values()) == said.get("bucket_count") else {}


def both_own(etcd: EtcdCluster, cluster: str) -> dict[str, int]:
    counts = owned(etcd, cluster)
    return counts if counts.get("a") and counts.get("b") else {}


def test_sigterm_hands_the_buckets_over_before_the_node_ends(etcd: EtcdCluster) -> None:
    name, buckets = "drains", ("--bucket-count", "8")
    first = node(etcd, name, "a", *buckets)
    assert first.line()["event"] == "ready"
    second = node(etcd, name, "b", *buckets)
    assert second.line()["member"] == "b@1"
    wait_until(lambda: both_own(etcd, name))
    where = ["--cluster", name, "--etcd-endpoints", *etcd.endpoints]
    for number in range(40):
        assert invoke("put", f"key-{number}", str(number), *where).exit_code == 0
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGTERM)
    assert first.line() == {"event": "stopped", "drained": True}
    assert first.end() == 0
    for number in range(40):
        assert invoke("get", f"key-{number}", *where).stdout == str(number)
    assert second.end(signal.SIGINT) == 0


def test_a_second_signal_ends_a_drain_that_cannot_succeed(etcd: EtcdCluster) -> None:
    name = "stuck"
    options = ("--bucket-count", "4096", "--drain-timeout-s", "600")
    first, second = node(etcd, name, "a", *options), None
    try:
        first.line()
        second = node(etcd, name, "b", *options)
        second.line()
        wait_until(lambda: owned(etcd, name).get("a"))
        first.process.send_signal(signal.SIGTERM)
        wait_until(lambda: first.said("handing the buckets over"))
        assert first.process.poll() is None
        first.process.send_signal(signal.SIGTERM)
        assert first.line() == {"event": "stopped", "drained": False}
    finally:
        assert first.end() == 0
        assert second is not None
        assert second.end(signal.SIGINT) == 0


def test_a_node_takes_file_environment_and_options_in_this_order(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'zone = "from file"\nhost = "from file"\nnode_id = "from-file"\n'
        'memory_limit_bytes = "16MiB"\n[etcd]\nendpoints = ["http://127.0.0.1:1"]\n'
    )
    command = Command(
        "node", "--json", "--config", str(file), "--node-id", "from-option", "--cluster", "order",
        environ={"P2PKV_HOST": "from environment", "P2PKV_NODE_ID": "from-environment",
                 "P2PKV_ETCD__ENDPOINTS": etcd.endpoints[0]},
    )  # fmt: skip
    try:
        ready = command.line()
        assert ready["member"] == "from-option@1"
        status = json.loads(invoke("status", "--json", "--seeds", ready["endpoint"], "--cluster",
                                   "order").stdout)  # fmt: skip
        (shown,) = status["nodes"]
        assert (shown["host"], shown["zone"]) == ("from environment", "from file")
        assert shown["memory_limit_bytes"] == 16 << 20
        assert status["buckets"] is None
    finally:
        assert command.end(signal.SIGINT) == 0


def test_a_node_that_does_not_fit_the_cluster_says_so(etcd: EtcdCluster) -> None:
    first = node(etcd, "fits", "a", "--bucket-count", "8")
    try:
        first.line()
        second = node(etcd, "fits", "b", "--bucket-count", "16")
        said = second.line()
        assert second.end() == 2
        assert said["error"] == "ClusterMismatch"
        assert "bucket_count = 8" in said["message"]
    finally:
        assert first.end(signal.SIGINT) == 0


def launch(home: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    script = Path(__file__).parent.parent / "scripts" / "launch_node.sh"
    return subprocess.Popen(
        ["bash", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "P2PKV_HOME": home, **environ},
        text=True,
    )


def test_the_wrapper_names_the_host_and_becomes_the_node(etcd: EtcdCluster) -> None:
    process = launch(
        sys.prefix, "--json", "--cluster", "launched", "--etcd-endpoints", etcd.endpoints[0],
        "--memory-limit-bytes", "16MiB", SLURMD_NODENAME="rack1-7", SLURM_NTASKS_PER_NODE="2",
        SLURM_LOCALID="1",
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["member"], ready["pid"]) == ("rack1-7.1@1", process.pid)
            seeds = ("--seeds", ready["endpoint"], "--cluster", "launched")
            (shown,) = json.loads(invoke("status", "--json", *seeds).stdout)["nodes"]
            assert shown["host"] == "rack1-7"
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def test_the_wrapper_refuses_a_home_without_p2pkv(tmp_path: Path) -> None:
    with launch(str(tmp_path)) as process:
        assert process.stderr is not None
        assert f"P2PKV_HOME = {tmp_path}" in process.stderr.read()
        assert process.wait(TIMEOUT_S) == 2


# -- client commands, against a running cluster ---------------------------------------------------


def run(cluster: dict[str, Any], *arguments: str, **options: Any) -> Any:
    return invoke(*arguments, *cluster["options"], **options)


def test_status_shows_every_node(cluster: dict[str, Any]) -> None:
    said = json.loads(run(cluster, "status", "--json").stdout)
    assert said["buckets"] == {
        "total": 16, "without_owner": 0, "moving": 0, "lost_owner": 0, "short_of_copies": 0
    }  # fmt: skip
    assert [n["member"] for n in said["nodes"]] == ["n1@1", "n2@1"]
    for shown in said["nodes"]:
        assert shown["reachable"]
        assert shown["serving"]
        assert shown["memory_limit_bytes"] == 32 << 20
        assert 0 <= shown["etcd_contact_age_s"] < 10
    table = run(cluster, "status").stdout
    assert "n1@1" in table
    assert "16 in place" in table


def test_status_of_a_cluster_that_is_not_there(cluster: dict[str, Any]) -> None:
    result = invoke("status", "--cluster", "none", "--etcd-endpoints", *cluster["etcd_endpoints"])
    assert result.exit_code == 3
    assert "no cluster 'none'" in result.stderr


def test_ring_show_tells_each_bucket(cluster: dict[str, Any]) -> None:
    said = json.loads(run(cluster, "ring", "show", "--buckets", "--json").stdout)
    assert sum(n["owned"] for n in said["nodes"]) == 16
    assert [b["bucket"] for b in said["buckets"]] == list(range(16))
    assert set(said["buckets"][0]) == {"bucket", "epoch", "generation", "primary", "assigned",
                                       "moving"}  # fmt: skip
    assert "buckets" not in json.loads(run(cluster, "ring", "show", "--json").stdout)
    assert "arriving" in run(cluster, "ring", "show").stdout


def test_values_come_from_argument_stdin_and_file(cluster: dict[str, Any], tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    file = tmp_path / "value"
    file.write_bytes(content)
    assert run(cluster, "put", "v:argument", "ä").exit_code == 0
    assert run(cluster, "put", "v:stdin", input=content).exit_code == 0
    assert run(cluster, "put", "v:file", "--file", str(file)).exit_code == 0
    assert run(cluster, "get", "v:argument").stdout_bytes == "ä".encode()
    assert run(cluster, "get", "v:stdin").stdout_bytes == content
    target = tmp_path / "out"
    assert run(cluster, "get", "v:file", "--output", str(target)).stdout_bytes == b""
    assert target.read_bytes() == content


def test_get_in_json_has_the_value_and_tells_a_miss(cluster: dict[str, Any]) -> None:
    run(cluster, "put", "j", "")
    assert json.loads(run(cluster, "get", "j", "--json").stdout) == {
        "key": "j", "key_hex": "6a", "found": True, "bytes": 0, "value_base64": "",
    }  # fmt: skip
    miss = run(cluster, "get", "nope", "--json")
    assert (miss.exit_code, json.loads(miss.stdout)["found"]) == (3, False)
    assert run(cluster, "get", "nope").exit_code == 3


def test_put_if_absent_does_not_replace(cluster: dict[str, Any]) -> None:
    assert run(cluster, "put", "once", "1", "--if-absent").exit_code == 0
    second = run(cluster, "put", "once", "2", "--if-absent", "--json")
    assert (second.exit_code, json.loads(second.stdout)["copies"]) == (1, 0)
    assert run(cluster, "get", "once").stdout == "1"


def test_a_value_with_a_ttl_expires(cluster: dict[str, Any]) -> None:
    assert run(cluster, "put", "short", "1", "--ttl", "0.3").exit_code == 0
    wait_until(lambda: run(cluster, "get", "short").exit_code == 3)


def test_binary_keys_go_in_hexadecimal(cluster: dict[str, Any]) -> None:
    assert run(cluster, "put", "ff00fe", "v", "--hex").exit_code == 0
    (shown,) = json.loads(run(cluster, "exists", "ff00fe", "--hex", "--json").stdout)["keys"]
    assert shown == {"key": "\\xff\x00\\xfe", "key_hex": "ff00fe", "exists": True}


def test_exists_and_delete_report_each_key(cluster: dict[str, Any]) -> None:
    run(cluster, "put", "d1", "1")
    run(cluster, "put", "d2", "2")
    assert run(cluster, "exists", "d1", "d2").exit_code == 0
    assert run(cluster, "exists", "d1", "none").exit_code == 3
    deleted = run(cluster, "delete", "d1", "none", "--json")
    assert deleted.exit_code == 3
    assert [k["deleted"] for k in json.loads(deleted.stdout)["keys"]] == [True, False]
    assert json.loads(run(cluster, "delete", "--prefix", "d", "--json").stdout) == {"deleted": 1}


def test_scan_lists_what_has_the_prefix(cluster: dict[str, Any]) -> None:
    for number in range(5):
        run(cluster, "put", f"s:{number}", "x" * number)
    lines = run(cluster, "scan", "--prefix", "s:", "--json").stdout.splitlines()
    assert {(e["key"], e["bytes"]) for e in map(json.loads, lines)} == {
        (f"s:{n}", n) for n in range(5)
    }
    assert len(run(cluster, "scan", "--prefix", "s:", "--limit", "2").stdout.splitlines()) == 2
    values = run(cluster, "scan", "--prefix", "s:4", "--json", "--values").stdout
    assert base64.b64decode(json.loads(values)["value_base64"]) == b"xxxx"


def test_doctor_finds_nothing_wrong_with_a_running_cluster(cluster: dict[str, Any]) -> None:
    result = run(cluster, "doctor", "--memory", "1MiB", "--json")
    found = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0, result.output
    assert {found[name]["state"] for name in ("node n1@1", "node n2@1", "ring")} == {"ok"}
    assert "ms" in found["node n1@1"]["found"]


def test_doctor_measures_each_path_to_each_node_and_says_which_is_chosen(
    cluster: dict[str, Any],
) -> None:
    result = run(cluster, "doctor", "--memory", "1MiB", "--json")
    paths = json.loads(result.stdout)["paths"]
    found = {(p["node"], p["path"]): p for p in paths}
    assert set(found) >= {(n, p) for n in ("n1@1", "n2@1") for p in ("shm", "tcp")}
    assert {p["path"] for p in paths if p["chosen"]} == {"shm"}
    assert all("mapped" in p["why"] for p in paths if p["chosen"])
    for path in paths:
        assert not path["error"]
        assert path["round_trip_us"] > 0
        assert min(path["get_bytes_per_s"], path["put_bytes_per_s"]) > 0
    scanned = run(cluster, "scan", "--prefix", "p2pkv-doctor", "--json")
    assert scanned.stdout == "", "what was measured with is gone"


def test_doctor_measures_ucx_where_nodes_offer_it(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    if not ucx_library.doctor().usable:
        pytest.skip("no UCX here")
    with Cluster(1, etcd=etcd, ucx="on") as cluster:
        where = ["--cluster", cluster.name, "--etcd-endpoints", *etcd.endpoints]
        command = [sys.executable, "-m", "p2pkv.cli", "doctor", "--memory", "1MiB", "--json"]
        said = subprocess.run([*command, *where], capture_output=True, text=True, timeout=60)
    paths = {p["path"]: p for p in json.loads(said.stdout)["paths"]}
    assert set(paths) == {"shm", "tcp", "ucx"}
    assert [name for name, path in paths.items() if path["chosen"]] == ["shm"]
    assert paths["ucx"]["get_bytes_per_s"] > 0


def test_doctor_does_not_measure_when_told_not_to(cluster: dict[str, Any]) -> None:
    result = run(cluster, "doctor", "--memory", "1MiB", "--no-measure", "--json")
    assert json.loads(result.stdout)["paths"] == []


@pytest.mark.parametrize(
    ("path", "host", "word"),
    [("shm", "here", ""), ("ucx", "elsewhere", ""), ("tcp", "here", "--ipc=host"),
     ("tcp", "elsewhere", "RDMA"), ("zmq", "elsewhere", "firewall")],
)  # fmt: skip
def test_doctor_says_what_would_make_a_better_path(
    path: str, host: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    check = measure.check_of(measure.Way(node="n@1", path=path, chosen=True, why="so"), host)
    assert word in check.remedy
    assert check.state == ("note" if word else "ok")
    unchosen = measure.check_of(measure.Way(node="n@1", path=path, chosen=False), host)
    assert (unchosen.state, unchosen.remedy) == ("ok", "")


def test_doctor_fails_where_the_chosen_path_does_not_work() -> None:
    broken = measure.Way(node="n@1", path="auto", chosen=True, error="gone")
    other = measure.Way(node="n@1", path="ucx", chosen=False, error="gone")
    assert [measure.check_of(way, "").state for way in (broken, other)] == ["failed", "note"]


def test_forget_asks_first_and_knows_its_nodes(cluster: dict[str, Any]) -> None:
    unknown = run(cluster, "forget", "nobody", "--yes")
    assert (unknown.exit_code, "never registered" in unknown.stderr) == (3, True)
    unasked = run(cluster, "forget", "n1")
    assert unasked.exit_code == 2
    assert "seems to be alive" in unasked.stderr
    assert "--yes" in unasked.stderr


def test_forget_lets_a_dead_node_s_buckets_start_again(etcd: EtcdCluster) -> None:
    name = "forgets"
    options = ("--bucket-count", "8", "--reset-after-s", "3600")
    survivor, victim = node(etcd, name, "a", *options), node(etcd, name, "b", *options)
    try:
        survivor.line()
        victim.line()
        before = wait_until(lambda: both_own(etcd, name))
        victim.end(signal.SIGKILL)
        where = ["--cluster", name, "--etcd-endpoints", *etcd.endpoints]
        said = json.loads(invoke("forget", "b", "--yes", "--json", *where).stdout)
        assert said == {"node": "b", "boot": 2, "buckets": before["b"]}
        wait_until(lambda: owned(etcd, name) == {"a": 8})
    finally:
        assert survivor.end(signal.SIGINT) == 0


def test_bench_prints_rows(cluster: dict[str, Any]) -> None:
    result = run(cluster, "bench", "--sizes", "4KiB", "--workloads", "put,batch_get_into",
                 "--batch", "8", "--seconds", "0.1", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [r["workload"] for r in rows] == ["put", "batch_get_into"]
    assert set(rows[0]) == {"workload", "size_bytes", "batch", "clients", "path", "ops_per_s",
                            "gb_per_s", "p50_us", "p99_us", "errors"}  # fmt: skip
    assert all(r["errors"] == 0 and r["ops_per_s"] > 0 for r in rows)


def test_state_survives_a_round_trip(tmp_path: Path) -> None:
    before = state.State("c", 1, ("http://a:1",), (state.Process("n1", 2, 3, "log"),), True)
    assert msgspec.json.decode(msgspec.json.encode(before), type=state.State) == before
