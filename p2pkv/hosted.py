"""A node inside a blocking program: its event loop runs on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

from p2pkv.async_driver import AsyncDriver
from p2pkv.client import Client
from p2pkv.config import NodeConfig
from p2pkv.errors import ClosedClient, ForkedClient
from p2pkv.node import Node
from p2pkv.routing import Operation

T = TypeVar("T")

STOPPED_CHECK_S = 1.0
"""How often a waiting call looks whether the loop that should answer it is still there."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopDriver:
    """Runs operations on the node's loop; the calling thread waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: AsyncDriver) -> None:
        self._loop = loop
        self._driver = driver
        self._pid = os.getpid()

    def run(self, operation: Operation[T]) -> T:
        if os.getpid() != self._pid:
            raise ForkedClient("the node of this client runs in the parent process")
        if self._driver.closed or self._loop.is_closed():
            raise ClosedClient("the node of this client has stopped")
        if _running_loop() is self._loop:
            raise RuntimeError("a blocking call on the node's own event loop would wait for itself")
        coroutine = self._driver.run(operation)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop was closed this moment
            coroutine.close()
            raise ClosedClient("the node of this client has stopped") from None
        return self._result(future)

    def _result(self, future: Future[T]) -> T:
        while not self._loop.is_closed():
            try:
                return future.result(STOPPED_CHECK_S)
            except CancelledError:
                break
            except TimeoutError:  # no result yet, or the operation's own
                if future.done():
                    return future.result()
        raise ClosedClient("the node of this client has stopped")

    def close(self) -> None:
        """The sockets are the node's."""


class NodeThread:
    """``Node`` for programs without an event loop.

    ``with NodeThread(config) as node: kv = node.client()`` serves the node's share until the block
    ends and gives a ``Client`` whose calls need no socket for that share. Raises what
    ``Node.start`` raises.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="p2pkv-node", daemon=True)
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        """The node; belongs to the thread's loop."""
        if self._node is None:
            raise ClosedClient("the node is not running")
        return self._node

    def start(self) -> None:
        """Join the cluster; returns when the node answers requests."""
        self._thread.start()
        try:
            self._call(self._start)
        except BaseException:
            self._end()
            raise

    async def _start(self) -> None:
        node = Node(self._config)
        await node.start()
        self._node = node

    def client(self, timeout: float = 5.0) -> Client:
        """The client's calls in process, for any thread."""
        config, router, driver = self.node.hosting(timeout)
        return Client._hosted(config, router, LoopDriver(self._loop, driver))

    def drain(self, timeout_s: float | None = None) -> bool:
        """See ``Node.drain``."""
        node = self.node
        return self._call(lambda: node.drain(timeout_s))

    def stop(self) -> None:
        """Leave at once. See ``Node.stop``."""
        node, self._node = self._node, None
        if node is not None:
            try:
                self._call(node.stop)
            finally:
                self._end()

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            while tasks := asyncio.all_tasks(self._loop):  # calls that the node will not answer
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.stop()
