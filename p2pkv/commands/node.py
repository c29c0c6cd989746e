"""``p2pkv node``: one node in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import Annotated, Any

import typer

from p2pkv.commands.output import OK, USAGE, Failure, print_json
from p2pkv.commands.parameters import Json, dotted, field_options, option, with_parameters
from p2pkv.config import NodeConfig, load

log = logging.getLogger("p2pkv.node")

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
    from p2pkv.hosted import new_event_loop

    start_logging(log_level)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        drained = runner.run(_serve(config, as_json))
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


async def _serve(config: NodeConfig, as_json: bool) -> bool:
    """Run the node until a signal or a failure; returns whether its buckets were handed over."""
    from p2pkv.node import Node

    node = Node(config)
    orders = _Orders()
    starting = asyncio.create_task(node.start())
    await _first(starting, orders.leave)
    if not starting.done():
        await node.stop()
        await starting
        return False
    await starting
    _announce(node, as_json)
    running = asyncio.create_task(node.wait())
    await _first(running, orders.leave)
    drained = False
    if not running.done() and not orders.stop.is_set():
        drained = await _drain(node, orders.stop)
    await node.stop()
    await running
    log.info("stopped")
    return drained


class _Orders:
    """What the signals ask for: to leave in order, or to stop at once."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_terminate(self) -> None:
        if self.leave.is_set():
            self.stop.set()
        self.leave.set()

    def _on_interrupt(self) -> None:
        self.stop.set()
        self.leave.set()


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait for the task or the event, whichever comes first."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


def _announce(node: Any, as_json: bool) -> None:
    log.info("%s serves at %s", node.member, node.endpoint)
    if as_json:
        event = {"event": "ready", "member": str(node.member), "endpoint": node.endpoint}
        print_json({**event, "pid": os.getpid()})


async def _drain(node: Any, stop: asyncio.Event) -> bool:
    log.info("handing the buckets over; a second signal stops at once")
    draining = asyncio.create_task(node.drain())
    await _first(draining, stop)
    if not draining.done():
        draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
        return False
    drained = draining.result()
    if not drained:
        held = int(node.stats().figures["buckets_owned"])
        log.warning("%d buckets were not handed over; what they held is lost", held)
    return bool(drained)
