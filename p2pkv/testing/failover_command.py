"""The command line of the fault harness: ``scripts/failover.py``."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from p2pkv.commands.output import command, print_json
from p2pkv.config import EtcdConfig
from p2pkv.errors import ConfigError
from p2pkv.testing import namespaces
from p2pkv.testing.failover import Plan, Report, Watch, run
from p2pkv.testing.faultplan import FaultKind, parse
from p2pkv.testing.observer import Observer
from p2pkv.testing.targets import Commands, OperatedCluster, OwnCluster

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_OWN = "A cluster of its own"
_YOURS = "A running cluster"


@app.command()
@command
def failover(
    faults: Annotated[
        str,
        typer.Option(
            metavar="KIND=COUNT,...", help=", ".join(kind.value for kind in FaultKind) + "."
        ),
    ] = "kill=3,stop=1,etcd_kill=1",
    seconds: Annotated[float, typer.Option(help="Load lasts at least so long.")] = 60.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the faults' order, victims and lengths; else random.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Operations a second, at most.")] = 1000.0,
    rate_min: Annotated[float, typer.Option(help="With fewer the run has failed.")] = 100.0,
    processes: Annotated[int, typer.Option(help="Of clients.")] = 2,
    threads: Annotated[int, typer.Option(help="In each process.")] = 4,
    timeout: Annotated[float, typer.Option(help="Of one operation, in seconds.")] = 3.0,
    repair_timeout: Annotated[float, typer.Option(help="Seconds for a repair, at most.")] = 90.0,
    longest: Annotated[float, typer.Option(help="Seconds that a fault lasts, at most.")] = 8.0,
    lasting: Annotated[
        float, typer.Option(help="Seconds that each fault lasts; 0: as the seed says.")
    ] = 0.0,
    history: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Keep what clients did and saw.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    nodes: Annotated[
        str, typer.Option(help="How many; of a running cluster: the ids that may be hurt.")
    ] = "",
    replicas: Annotated[int, typer.Option(help="Copies.", rich_help_panel=_OWN)] = 1,
    min_in_sync: Annotated[
        int, typer.Option(help="Copies that a write must have.", rich_help_panel=_OWN)
    ] = 1,
    etcd_members: Annotated[int, typer.Option(rich_help_panel=_OWN)] = 1,
    fast: Annotated[
        bool, typer.Option("--fast", help="Short deadlines, as in tests.", rich_help_panel=_OWN)
    ] = False,
    etcd: Annotated[
        str, typer.Option(metavar="URL,...", help="Its etcd.", rich_help_panel=_YOURS)
    ] = "",
    cluster: Annotated[str, typer.Option(rich_help_panel=_YOURS)] = "default",
    kill_command: Annotated[
        str, typer.Option(help="With {node}, {host}; no shell.", rich_help_panel=_YOURS)
    ] = "",
    start_command: Annotated[str, typer.Option(rich_help_panel=_YOURS)] = "",
    stop_command: Annotated[str, typer.Option(help="SIGSTOP.", rich_help_panel=_YOURS)] = "",
    resume_command: Annotated[str, typer.Option(help="SIGCONT.", rich_help_panel=_YOURS)] = "",
    etcd_kill_command: Annotated[str, typer.Option(rich_help_panel=_YOURS)] = "",
    etcd_start_command: Annotated[str, typer.Option(rich_help_panel=_YOURS)] = "",
    etcd_stop_command: Annotated[str, typer.Option(rich_help_panel=_YOURS)] = "",
    etcd_resume_command: Annotated[str, typer.Option(rich_help_panel=_YOURS)] = "",
) -> None:
    """Hurt a cluster under load, and judge what its clients saw."""
    wanted = Plan(
        seconds=seconds,
        faults=parse(faults),
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
        processes=processes,
        threads=threads,
        operations_per_s=rate,
        operations_per_s_min=rate_min,
        timeout_s=timeout,
        repair_timeout_s=repair_timeout,
        fault_s_max=longest,
        fault_s=lasting,
    )
    print(f"seed = {wanted.seed}", file=sys.stderr, flush=True)
    with _watch() as watch:
        if etcd:
            commands = Commands(
                kill=kill_command,
                start=start_command,
                stop=stop_command,
                resume=resume_command,
                etcd_kill=etcd_kill_command,
                etcd_start=etcd_start_command,
                etcd_stop=etcd_stop_command,
                etcd_resume=etcd_resume_command,
            )
            theirs = _operated(etcd, cluster, _ids(nodes), commands)
            report = run(wanted, theirs, cluster, _made(history), watch)
        else:
            copies = {"replicas": replicas, "min_in_sync": min_in_sync}
            report = _run_own(wanted, nodes, copies, etcd_members, fast, history, watch)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report)
    if not report.passed:
        raise typer.Exit(1)


def _run_own(
    wanted: Plan, nodes: str, copies: dict[str, int], etcd_members: int, fast: bool,
    history: Path | None, watch: Watch,
) -> Report:  # fmt: skip
    if nodes and not nodes.isdigit():
        raise ConfigError(f"nodes = {nodes!r}: must be a number, unless etcd is given")
    count = int(nodes or "3")
    if not 1 <= count <= 32:
        raise ConfigError(f"nodes = {count}: must be from 1 to 32")
    cut = bool(wanted.faults.get(FaultKind.PARTITION)) and not namespaces.why_not()
    watch.say("starting a cluster")
    with OwnCluster(count, etcd_members=etcd_members, partitions=cut, fast=fast, **copies) as own:
        return run(wanted, own, own.cluster_name, _made(history), watch)


def _operated(etcd: str, cluster: str, nodes: list[str], commands: Commands) -> OperatedCluster:
    config = EtcdConfig(endpoints=tuple(etcd.split(",")))
    with Observer(config, cluster) as observer:
        hosts = observer.hosts()
    if missing := set(nodes) - hosts.keys():
        raise ConfigError(f"nodes = {sorted(missing)}: are not registered in {cluster!r}")
    chosen = {name: host for name, host in hosts.items() if not nodes or name in nodes}
    if not chosen:
        raise ConfigError(f"cluster = {cluster!r}: has no nodes")
    return OperatedCluster(config, cluster, chosen, commands)


def _ids(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _made(directory: Path | None) -> Path | None:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    return directory


# -- what people see


class _Lines(Watch):
    """Events as lines on standard error; on a terminal the counts too, in one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> _Lines:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def counts(self, operations: int, errors: int, elapsed_s: float, faults: int) -> None:
        if self._status:
            self._status.update(
                f"{elapsed_s:.0f} s, {operations} operations ({operations / elapsed_s:.0f}/s), "
                f"{errors} errors, {faults} faults"
            )


@contextmanager
def _watch() -> Iterator[Watch]:
    with _Lines(Console(stderr=True)) as lines:
        yield lines


def _print(report: Report) -> None:
    table = Table(title=f"{'passed' if report.passed else 'FAILED'}, seed {report.seed}")
    table.add_column("what")
    table.add_column("figure")
    hidden = {"findings", "violations", "events", "passed", "reasons", "seed"}
    fields: dict[str, Any] = msgspec.to_builtins(report)
    for name, value in fields.items():
        if name not in hidden:
            table.add_row(name, _shown(value))
    console = Console()
    console.print(table)
    for finding in report.findings:
        console.print(finding, highlight=False, markup=False, soft_wrap=True)
    for key, text in list(report.violations.items())[:3]:
        console.print(f"{key}: {text}", highlight=False, markup=False, soft_wrap=True)
    for reason in report.reasons:
        console.print(f"FAILED: {reason}", highlight=False, markup=False, soft_wrap=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return str(value)


def main() -> None:
    """Run the command line of this process, and exit with its code.

    SIGTERM ends it like an interrupt does: nothing is left running.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="failover")


__all__ = ["app", "main"]
