"""One node in this process, from its start to the signal that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

from p2pkv.commands.output import print_json
from p2pkv.config import NodeConfig
from p2pkv.node import Node

log = logging.getLogger("p2pkv.node")


async def serve(config: NodeConfig, as_json: bool) -> bool:
    """Run the node until a signal or a failure; returns whether its buckets were handed over."""
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
    orders.close()
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

    def close(self) -> None:
        """Nothing is left to be interrupted: a signal now must not spoil the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_terminate(self) -> None:
        if self.leave.is_set():
            self.stop.set()
        self.leave.set()

    def _on_interrupt(self) -> None:
        self.stop.set()
        self.leave.set()


async def _first(task: asyncio.Task[None] | asyncio.Task[bool], event: asyncio.Event) -> None:
    """Wait for the task or the event, whichever comes first."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


def _announce(node: Node, as_json: bool) -> None:
    log.info("%s serves at %s", node.member, node.endpoint)
    if as_json:
        event = {"event": "ready", "member": str(node.member), "endpoint": node.endpoint}
        print_json({**event, "pid": os.getpid()})


async def _drain(node: Node, stop: asyncio.Event) -> bool:
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
    return drained
