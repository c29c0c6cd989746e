"""What several of the integration tests use: clients of each kind, traffic, raw peers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Self

import zmq

from p2pkv import AsyncClient, Client, ClientConfig, Node, wire
from p2pkv.testing.cluster import Cluster, wait_for
from p2pkv.transport import receive_frames
from p2pkv.wire import Kind


class LoopThread:
    """An event loop on a thread of its own, for asyncio objects in blocking tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any, timeout_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Blocking:
    """An AsyncClient whose calls block, so that one test serves both clients."""

    def __init__(self, client: AsyncClient, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._client, name)
        return lambda *a, **k: self._loop.run(call(*a, **k))

    def scan(self, *a: Any, **k: Any) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._loop.run(_collected(self._client.scan(*a, **k))))

    def scan_keys(self, *a: Any, **k: Any) -> Iterator[tuple[bytes, int]]:
        return iter(self._loop.run(_collected(self._client.scan_keys(*a, **k))))


async def _collected(items: Any) -> list[Any]:
    return [item async for item in items]


KINDS = ["Client", "AsyncClient"]


@contextmanager
def client_of(
    kind: str, cluster: Cluster, near_cache_bytes: int = 0, **changes: Any
) -> Iterator[Any]:
    """A client of this kind, with calls that block; ``changes`` are fields of ClientConfig."""
    with configured(kind, cluster.client_config(**changes), near_cache_bytes) as kv:
        yield kv


@contextmanager
def configured(kind: str, config: ClientConfig, near_cache_bytes: int = 0) -> Iterator[Any]:
    """The same, with this configuration."""
    if kind == "Client":
        with Client.from_config(config, near_cache_bytes=near_cache_bytes) as kv:
            yield kv
        return
    loop = LoopThread()
    asynchronous = AsyncClient.from_config(config, near_cache_bytes=near_cache_bytes)
    try:
        yield Blocking(asynchronous, loop)
    finally:
        loop.run(asynchronous.close())
        loop.close()


@contextmanager
def embedded_node(cluster: Cluster, name: str, **changes: Any) -> Iterator[tuple[Node, LoopThread]]:
    """A node of the cluster in this process."""
    loop = LoopThread()
    try:
        node: Node = loop.run(_started(cluster, name, changes))
        yield node, loop
        loop.run(node.stop())
    finally:
        loop.close()


async def _started(cluster: Cluster, name: str, changes: dict[str, Any]) -> Node:
    node = Node(cluster.node_config(name, **changes))
    await node.start()
    return node


# -- traffic


class Caller(threading.Thread):
    """Puts, gets and deletes keys of its own, and checks each answer against what it did.

    Nobody else touches its keys, so each answer is known beforehand. It ends at the first
    failure, and keeps it.
    """

    def __init__(
        self,
        kv: Any,
        name: str,
        seed: int,
        keys: int,
        stopped: threading.Event,
        copies: Collection[int] = (1,),
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.kv = kv
        self.copies = copies
        """What a put may answer."""
        self.model: dict[str, bytes] = {}
        self.operations = 0
        self.failure = ""
        self._random = random.Random(f"{name}/{seed}")
        self._keys = [f"{name}/{i}" for i in range(keys)]
        self._stopped = stopped
        self._version = 0

    def run(self) -> None:
        acts = [self._put, self._get, self._batch_put, self._batch_get, self._exists, self._delete,
                self._large]  # fmt: skip
        weights = [8, 12, 2, 4, 4, 2, 1]
        try:
            while not self._stopped.is_set():
                self._random.choices(acts, weights)[0]()
                self.operations += 1
        except Exception:
            self.failure = traceback.format_exc()

    def check_all(self) -> None:
        """Every key is as its last write left it."""
        values = self.kv.batch_get(self._keys)
        wrong = [k for k, v in zip(self._keys, values, strict=True) if v != self.model.get(k)]
        assert not wrong, (
            f"{len(wrong)} of {len(self._keys)} keys are not as they were put: {wrong[:5]}"
        )

    def _value(self, key: str, size: int = 0) -> bytes:
        self._version += 1
        text = f"{key}={self._version};".encode()
        return text * (1 + (size or self._random.choice((0, 100, 4000, 40_000))) // len(text))

    def _some(self) -> list[str]:
        return self._random.sample(self._keys, 20)

    def _put(self) -> None:
        key = self._random.choice(self._keys)
        value = self._value(key)
        assert self.kv.put(key, value) in self.copies
        self.model[key] = value

    def _large(self) -> None:
        key = self._random.choice(self._keys[:3])
        value = self._value(key, 600_000)
        assert self.kv.put(key, value) in self.copies
        self.model[key] = value

    def _get(self) -> None:
        key = self._random.choice(self._keys)
        assert self.kv.get(key) == self.model.get(key), f"get({key!r})"

    def _batch_put(self) -> None:
        values = {key: self._value(key, 100) for key in self._some()}
        copies = self.kv.batch_put(values)
        assert len(copies) == len(values)
        assert set(copies).issubset(self.copies), copies
        self.model.update(values)

    def _batch_get(self) -> None:
        keys = self._some()
        assert self.kv.batch_get(keys) == [self.model.get(k) for k in keys], f"batch_get({keys})"

    def _exists(self) -> None:
        keys = self._some()
        assert self.kv.batch_exists(keys) == [k in self.model for k in keys]

    def _delete(self) -> None:
        key = self._random.choice(self._keys)
        assert self.kv.delete(key) is (self.model.pop(key, None) is not None), f"delete({key!r})"


class Traffic:
    """Callers of both kinds at work. At its end no call may have failed and no key be wrong.

    with Traffic(cluster, seed) as traffic:
        ...                                 # trouble
        traffic.go_on()                     # until each caller has done more since
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        *,
        keys: int = 200,
        timeout: float = 20.0,
        copies: Collection[int] = (1,),
        path: str = "auto",
    ) -> None:
        self.endpoints = [r.control[0] for r in cluster.view().nodes.values()]
        """Of the nodes that were there at the start, for clients that cannot ask etcd."""
        self._stopped = threading.Event()
        self._loop = LoopThread()
        changes: Any = {"timeout": timeout, "path": path}
        self._clients = [cluster.client(**changes), cluster.async_client(**changes)]
        clients = {
            "blocking-0": self._clients[0],
            "blocking-1": self._clients[0],
            "asyncio-0": Blocking(self._clients[1], self._loop),
        }
        self.callers = [
            Caller(kv, name, seed, keys, self._stopped, copies) for name, kv in clients.items()
        ]

    def go_on(self, operations: int = 100, timeout_s: float = 30.0) -> None:
        """Wait until each caller has done so many more."""
        goals = {c: c.operations + operations for c in self.callers}
        wait_for(
            lambda: (
                any(c.failure for c in goals) or all(c.operations >= n for c, n in goals.items())
            ),
            f"the callers come no further: {[c.operations for c in goals]}",
            timeout_s,
        )
        self.check()

    def check(self) -> None:
        """Raises AssertionError if a call has failed."""
        failures = [c.failure for c in self.callers if c.failure]
        assert not failures, "\n".join(failures)

    def __enter__(self) -> Self:
        for caller in self.callers:
            caller.start()
        self.go_on()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stopped.set()
        try:
            for caller in self.callers:
                caller.join(60)
            if error is None:
                self.check()
                for caller in self.callers:
                    caller.check_all()
        finally:
            self._clients[0].close()
            self._loop.run(self._clients[1].close())
            self._loop.close()


# -- peers that speak the protocol by hand


class RawPeer:
    """A session with one node, frame by frame."""

    def __init__(
        self,
        endpoint: str,
        cluster: str,
        session: bytes = b"",
        hello: bool = True,
        queue_max: int = 1000,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.RCVHWM, queue_max)
        if session:
            self.socket.setsockopt(zmq.ROUTING_ID, session)
        self.socket.connect(endpoint)
        if hello:
            self.ask(Kind.HELLO, wire.Hello(cluster), request=0)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def ask(self, kind: Kind, body: wire.Body, *payload: bytes, request: int = 1) -> wire.Head:
        """Send a request, and the head of what comes back."""
        self.send(wire.encode(kind, request, 0, body), *payload)
        return self.receive()[0]

    def receive(self, timeout_s: float = 10.0) -> tuple[wire.Head, list[Any]]:
        """The next answer. Raises TimeoutError."""
        if not self.socket.poll(int(timeout_s * 1000)):
            raise TimeoutError("no answer")
        frames = receive_frames(self.socket)
        assert frames is not None
        return wire.decode(frames[0], 1 << 25), frames[1:]

    def silent(self, timeout_s: float = 0.5) -> bool:
        """Whether no answer comes for so long."""
        return not self.socket.poll(int(timeout_s * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.socket.close(0)
        self._context.term()


def new_seed() -> int:
    """A seed, printed, so that a failure can be had again."""
    seed = time.time_ns() & 0xFFFF_FFFF
    print(f"seed = {seed}")
    return seed


def figure(kv: Any, name: str) -> float:
    """A figure, summed over all nodes."""
    return sum(stats.figures.get(name, 0) for stats in kv.stats().values())


__all__ = [
    "KINDS",
    "Blocking",
    "Client",
    "LoopThread",
    "RawPeer",
    "Traffic",
    "client_of",
    "embedded_node",
    "figure",
    "new_seed",
]
