"""``p2pkv doctor``: is this machine, and the cluster it talks to, fit for service?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from p2pkv.commands.output import FAILED, print_json, print_table, progress
from p2pkv.commands.parameters import Json, with_connection
from p2pkv.config import ClientConfig, parse_size
from p2pkv.errors import P2PKVError

if TYPE_CHECKING:
    from p2pkv.commands.checks import Check
    from p2pkv.commands.measure import Way


@with_connection
def doctor(
    config: ClientConfig,
    *,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="What a node here is to hold (memory_limit_bytes).")
    ] = "1GiB",
    measure: Annotated[
        bool, typer.Option(help="Measure each path to each node, with values of 16 MiB in all.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Check this machine, etcd and the nodes; say what to do about each shortcoming.

    Measures bandwidth and round trip to each node by shared memory, TCP and UCX, as far as they are
    there, and says which of them clients here take and why. For that it puts 16 MiB into each node,
    which may evict others, and deletes them.

    With --json: {"checks": [{"check", "state", "found", "remedy"}], "paths": [{"node", "path",
    "chosen", "why", "round_trip_us", "get_bytes_per_s", "put_bytes_per_s", "error"}], "failed"}.
    A state is "ok", "note" (it works, and could be better) or "failed". Exit code 1 if anything
    failed.
    """
    from p2pkv.commands import checks as look

    memory_bytes = parse_size(memory, "memory")
    paths: list[Way] = []
    with progress("checking"):
        checks = [*look.machine(memory_bytes), *look.cluster(config)]
        if measure and any(c.state == "ok" for c in checks if c.check.startswith("node ")):
            paths = _measure(config, checks)
    failed = sum(check.state == "failed" for check in checks)
    if as_json:
        print_json({"checks": checks, "paths": paths, "failed": failed})
    else:
        _print_checks(checks)
    if failed:
        raise typer.Exit(FAILED)


def _measure(config: ClientConfig, checks: list[Check]) -> list[Way]:
    """The paths to the nodes; adds a check of each."""
    from p2pkv.client import Client
    from p2pkv.commands import measure
    from p2pkv.commands.checks import Check

    try:
        with Client.from_config(config) as kv:
            hosts = {str(s.member): s.labels.get("host", "") for s in kv.stats().values()}
        ways = measure.ways(config)
    except P2PKVError as e:
        remedy = "measured is only where reads and writes work: see the checks above"
        checks.append(Check("paths", "failed", str(e), remedy))
        return []
    checks += [measure.check_of(way, hosts.get(way.node, "")) for way in ways]
    return ways


def _print_checks(checks: list[Check]) -> None:
    print_table("", ("check", "state", "found"), [(c.check, c.state, c.found) for c in checks])
    for check in checks:
        if check.remedy:
            print(f"{check.check}: {check.remedy}")
