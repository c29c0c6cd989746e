"""``p2pkv node``: one node in this process."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from p2pkv.commands.output import OK, USAGE, Failure, print_json
from p2pkv.commands.parameters import Json, dotted, field_options, option, with_parameters
from p2pkv.config import NodeConfig, load

LEVELS = ("debug", "info", "warning", "error")
LogLevel = Annotated[str, typer.Option(metavar="|".join(LEVELS), help="What goes to stderr.")]

_FILE = option("config", str | None, "--config", metavar="FILE", help="TOML file with the fields.")


def _collect(given: dict[str, Any]) -> NodeConfig:
    file = given.pop("config")
    return load(NodeConfig, dotted(given), file)


@with_parameters([_FILE, *field_options(NodeConfig)], _collect)
def node(config: NodeConfig, *, log_level: LogLevel = "info", as_json: Json = False) -> None:
    """Run one node of a cluster in the foreground; one for each host is usual.

    Each field comes from its option, else from its environment variable, else from --config,
    else from its default. Sizes: 4096, 64MiB, 1g.

    SIGTERM hands all buckets over to the other nodes (at most --drain-timeout-s), then stops.
    SIGINT, or a second SIGTERM, stops at once; what the node held is then lost.
    With --json a line {"event": "ready", "member", "endpoint", "pid"} says when it serves, and
    {"event": "stopped", "drained"} that it has ended.
    """
    import asyncio

    from p2pkv.commands.serving import serve
    from p2pkv.hosted import new_event_loop

    start_logging(log_level)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        drained = runner.run(serve(config, as_json))
    if as_json:
        print_json({"event": "stopped", "drained": drained})
    raise typer.Exit(OK)


def start_logging(level: str) -> None:
    """Plain lines on stderr."""
    if level not in LEVELS:
        raise Failure(f"--log-level = {level!r}: must be one of {', '.join(LEVELS)}", USAGE)
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
