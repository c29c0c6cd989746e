"""``p2pkv doctor``: is this machine, and the cluster it talks to, fit for service?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from p2pkv.commands.output import FAILED, print_json, print_table, progress
from p2pkv.commands.parameters import Json, with_connection
from p2pkv.config import ClientConfig, parse_size

if TYPE_CHECKING:
    from p2pkv.commands.checks import Check


@with_connection
def doctor(
    config: ClientConfig,
    *,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="What a node here is to hold (memory_limit_bytes).")
    ] = "1GiB",
    as_json: Json = False,
) -> None:
    """Check this machine, etcd and the nodes; say what to do about each shortcoming.

    With --json: {"checks": [{"check", "state", "found", "remedy"}], "failed"}. A state is "ok",
    "note" (it works, and could be better) or "failed". Exit code 1 if anything failed.
    """
    from p2pkv.commands import checks as look

    memory_bytes = parse_size(memory, "memory")
    with progress("checking"):
        checks = [*look.machine(memory_bytes), *look.cluster(config)]
    failed = sum(check.state == "failed" for check in checks)
    if as_json:
        print_json({"checks": checks, "failed": failed})
    else:
        _print_checks(checks)
    if failed:
        raise typer.Exit(FAILED)


def _print_checks(checks: list[Check]) -> None:
    print_table("", ("check", "state", "found"), [(c.check, c.state, c.found) for c in checks])
    for check in checks:
        if check.remedy:
            print(f"{check.check}: {check.remedy}")
