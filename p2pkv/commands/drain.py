"""``p2pkv drain``: a node gives everything away, and stays."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from p2pkv.commands.data import open_client
from p2pkv.commands.output import FAILED, MISS, Failure, print_json, say
from p2pkv.commands.parameters import Json, with_connection
from p2pkv.config import ClientConfig
from p2pkv.records import View
from p2pkv.types import NodeId

POLL_S = 0.2


@with_connection
def drain(
    config: ClientConfig,
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's id.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take buckets again.")] = False,
    follow: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the node holds nothing.")
    ] = True,
    limit_s: Annotated[
        float, typer.Option("--limit", metavar="SECONDS", help="Wait at most so long.")
    ] = 3600.0,
    as_json: Json = False,
) -> None:
    """Let a node give all its buckets and copies to the others; it goes on running.

    Nothing is lost and no request fails. Code 1 if it still holds something at the end.
    With --json: {"node", "draining", "primary", "copies"}.
    """
    from p2pkv.commands import survey

    view = survey.read_view(config)
    if NodeId(node) not in view.nodes:
        raise Failure(f"node {node!r} is not up in cluster {config.cluster!r}", MISS)
    with open_client(config) as client:
        client.drain(node, draining=not undo)
    deadline = time.monotonic() + limit_s
    primary, copies = held(view, node)
    while follow and not undo:
        primary, copies = held(survey.read_view(config), node)
        if sys.stderr.isatty():
            say(f"{node} is primary of {primary} buckets and holds {copies} copies")
        if not primary + copies or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    if as_json:
        print_json({"node": node, "draining": not undo, "primary": primary, "copies": copies})
    elif undo:
        print(f"{node} takes buckets again")
    elif primary + copies:
        print(f"{node} is primary of {primary} buckets and holds {copies} copies")
    else:
        print(f"{node} holds nothing; it can be stopped")
    if follow and not undo and primary + copies:
        raise typer.Exit(FAILED)


def held(view: View, node: str) -> tuple[int, int]:
    """How many buckets a node is primary of, and of how many others it holds a copy."""
    records = [v.record for v in view.buckets.values()]
    primary = sum(r.primary.node == node for r in records)
    copies = sum(r.primary.node != node and any(m.node == node for m in r.in_sync) for r in records)
    return primary, copies
