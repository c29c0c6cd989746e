"""A client whose calls are recorded, each with its times and whatever came of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from p2pkv import clock
from p2pkv.async_client import AsyncClient
from p2pkv.errors import BatchError, P2PKVError
from p2pkv.testing import selfdescribing
from p2pkv.testing.history import Record, Recorder
from p2pkv.testing.linearizability import Kind

T = TypeVar("T")


class RecordedClient:
    """Keys and tags in, records out; no call raises. ``kv`` has the calls of Client.

    A call that fails is recorded with its error; errors that are not p2pkv's own count as an
    unknown outcome.
    """

    def __init__(self, kv: Any, recorder: Recorder, timeout_s: float) -> None:
        self._kv = kv
        self._recorder = recorder
        self._timeout_s = timeout_s

    def get(self, key: str, **options: Any) -> Record:
        return self._get([key], lambda t: [self._kv.get(key, timeout=t, **options)])[0]

    def batch_get(self, keys: Sequence[str], **options: Any) -> list[Record]:
        return self._get(keys, lambda t: self._kv.batch_get(keys, timeout=t, **options))

    def put(self, key: str, tag: str, size: int, **options: Any) -> Record:
        value = selfdescribing.make(key, tag, size)
        kind = Kind.PUT_IF_ABSENT if options.get("if_absent") else Kind.PUT
        return self._write(
            kind, {key: tag}, lambda t: [self._kv.put(key, value, timeout=t, **options)]
        )[0]

    def batch_put(self, tags: Mapping[str, str], size: int) -> list[Record]:
        values = {key: selfdescribing.make(key, tag, size) for key, tag in tags.items()}
        return self._write(Kind.PUT, tags, lambda t: self._kv.batch_put(values, timeout=t))

    def delete(self, key: str) -> Record:
        return self._write(Kind.DELETE, {key: ""}, lambda t: [self._kv.delete(key, timeout=t)])[0]

    def _get(self, keys: Sequence[str], call: Callable[[float], list[Any]]) -> list[Record]:
        called, results, returned = self._timed(call, len(keys))
        records = []
        for key, result in zip(keys, results, strict=True):
            common = _common(self._recorder.client, Kind.GET, key, called, returned, result)
            if isinstance(result, Exception) or result is None:
                records.append(Record(**common))
                continue
            tag, fault = selfdescribing.read(key, result)
            records.append(Record(**common, result=tag, fault=fault.value if fault else ""))
        return self._record(records)

    def _write(
        self, kind: Kind, tags: Mapping[str, str], call: Callable[[float], list[Any]]
    ) -> list[Record]:
        called, results, returned = self._timed(call, len(tags))
        records = []
        for (key, tag), result in zip(tags.items(), results, strict=True):
            common = _common(self._recorder.client, kind, key, called, returned, result)
            done = None if isinstance(result, Exception) else bool(result)
            records.append(Record(**common, value=tag, result=done))
        return self._record(records)

    def _timed(self, call: Callable[[float], list[Any]], count: int) -> tuple[int, list[Any], int]:
        called = clock.monotonic()
        try:
            results = call(self._timeout_s)
        except BatchError as e:
            results = e.results
        except Exception as e:
            results = [e] * count
        return called, results, clock.monotonic()

    def _record(self, records: list[Record]) -> list[Record]:
        for record in records:
            self._recorder.add(record)
        return records


def _common(
    client: str, kind: Kind, key: str, called: int, returned: int, result: Any
) -> dict[str, Any]:
    fields = {"client": client, "kind": kind, "key": key, "called": called, "returned": returned}
    if isinstance(result, Exception):
        ours = isinstance(result, P2PKVError)
        fields["error"] = type(result).__name__
        fields["message"] = str(result)[:200]
        fields["unknown"] = getattr(result, "may_have_taken_effect", False) if ours else True
    return fields


class LoopThread:
    """An event loop on a thread of its own, for asyncio objects in blocking code."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Run it there; its result. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class Blocking:
    """An AsyncClient, on a loop of its own, whose calls block."""

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._loop = LoopThread()
        self._client = self._loop.run(_made(make))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._client, name)
        return lambda *a, **k: self._loop.run(call(*a, **k))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()


async def _made(make: Callable[[], AsyncClient]) -> AsyncClient:
    return make()


__all__ = ["Blocking", "LoopThread", "RecordedClient"]
