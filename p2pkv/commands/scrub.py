"""``p2pkv scrub``: nodes check what they hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from p2pkv.commands.data import open_client
from p2pkv.commands.output import FAILED, UNREACHABLE, Failure, print_json, print_table, say, size
from p2pkv.commands.parameters import Json, with_connection
from p2pkv.config import ClientConfig, parse_size

if TYPE_CHECKING:
    from p2pkv.client import Client
    from p2pkv.wire import Scrubbed

POLL_S = 0.5
RATE = "256MiB"


@with_connection
def scrub(
    config: ClientConfig,
    *,
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="Ids of nodes. Default: all.")
    ] = None,
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE", help="Bytes per second, of each node.")
    ] = RATE,
    follow: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the end, and tell how far it is.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Let nodes compare all their objects with their checksums, and drop those that differ.

    A scrub that is under way already is joined, at its own rate. Code 1 if something was corrupt.
    With --json: {"nodes": [{"member", "runs", "running", "objects", "checked", "checked_bytes",
    "without", "corrupt"}]}.
    """
    bytes_per_s = max(1, parse_size(rate, "rate"))
    with open_client(config) as client:
        said = client.scrub(nodes or (), bytes_per_s=bytes_per_s)
        if not said:
            raise Failure("no node answers", UNREACHABLE)
        if follow:
            said = _to_the_end(client, nodes or [], said)
    if as_json:
        print_json({"nodes": [_row(member, told) for member, told in said.items()]})
    else:
        _print(said)
    if any(told.corrupt for told in said.values()):
        raise typer.Exit(FAILED)


def _to_the_end(
    client: Client, nodes: list[str], said: Mapping[str, Scrubbed]
) -> dict[str, Scrubbed]:
    """Ask until none is running. A node that leaves meanwhile keeps what it said last."""
    latest = dict(said)
    while running := [m for m in latest if latest[m].running]:
        if sys.stderr.isatty():
            say("; ".join(f"{m}: {latest[m].checked} of {latest[m].objects}" for m in running))
        time.sleep(POLL_S)
        told = client.scrub(nodes)
        if lost := [m for m in running if m not in told]:
            raise Failure(f"{', '.join(lost)} no longer answers", UNREACHABLE)
        latest.update(told)
    return latest


def _row(member: str, told: Scrubbed) -> dict[str, Any]:
    return {"member": member, **msgspec.structs.asdict(told)}


def _print(said: Mapping[str, Scrubbed]) -> None:
    columns = ["node", "state", "objects>", "checked>", "bytes>", "without checksum>", "corrupt>"]
    print_table(
        "Scrub",
        columns,
        (
            (m, "running" if t.running else "done", t.objects, t.checked, size(t.checked_bytes),
             t.without, t.corrupt)
            for m, t in said.items()
        ),
    )  # fmt: skip
