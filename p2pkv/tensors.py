"""Putting and getting tensors: the calls of both clients.

A tensor is stored as a small header and its elements, packed in the order in which they lie in
memory (see ``tensor_header``, ``layouts``). Host tensors are gathered from where they are and
scattered to where they shall be; those of GPUs go straight from and to the memory of nodes on this
host (``direct``), or else through pinned memory (``staging``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from p2pkv import arrays
from p2pkv.arguments import Key, encode_keys, pairs_of, put_options
from p2pkv.arrays import HOST, TensorMemory
from p2pkv.direct import STAGED, DeviceValues, DirectGets, direct_puts
from p2pkv.errors import BatchError, InvalidArgument, P2PKVError, TooLarge
from p2pkv.operations import Operations
from p2pkv.outcomes import name_of
from p2pkv.parts import Parts
from p2pkv.routing import Operation
from p2pkv.staging import Downloads, Outgoing, Uploads, check_same
from p2pkv.tensor_header import TensorHeader, decode
from p2pkv.wire import PutOptions

T = TypeVar("T")


class Wanted:
    """How tensors are to be had: into ``outs``, or made by a framework on a device.

    Raises InvalidArgument for what does not fit together, ConfigError for a framework that is
    missing.
    """

    def __init__(
        self,
        count: int,
        outs: Sequence[Any] | None,
        device: Any,
        like: Any,
        framework: str | None,
    ) -> None:
        self.outs = outs
        self.memories: list[TensorMemory] = []
        if outs is None:
            self.framework, self.device = arrays.place_of(device, like, framework)
            arrays.imported(self.framework)
            return
        if device is not None or like is not None or framework is not None:
            raise InvalidArgument("out: is given, so device, like and framework must not be")
        if len(outs) != count:
            raise InvalidArgument(f"outs: {len(outs)} for {count} keys")
        self.memories = [arrays.memory_of(out, writing=True) for out in outs]
        devices = {memory.device for memory in self.memories}
        if len(devices) > 1:
            raise InvalidArgument("outs: must all be on the host, or all on one GPU")
        self.framework, self.device = "numpy", devices.pop() if devices else HOST


def get_on_host(
    ops: Operations, keys: list[bytes], wanted: Wanted, timeout: float | None
) -> Operation[list[Any]]:
    """Outcome of each key: the tensor, None, or the exception."""
    if wanted.outs is None:
        views = yield from _outcomes(ops.batch_get_fresh(keys, arrays.fresh_bytes, timeout))
        return [
            _made(wanted.framework, name_of(key), view)
            for key, view in zip(keys, views, strict=True)
        ]
    begin = ops.clock()
    results = yield from _scattered(ops, keys, wanted, timeout)
    again = [i for i, result in enumerate(results) if result is _OTHERWISE]
    if again:
        left = _left(ops, begin, timeout)
        names = [keys[i] for i in again]
        views = yield from _outcomes(ops.batch_get_fresh(names, arrays.fresh_bytes, left))
        for i, view in zip(again, views, strict=True):
            results[i] = _assigned(name_of(keys[i]), view, wanted.memories[i], wanted.outs[i])
    return results


_OTHERWISE = object()
"""A value that is to be fetched whole: it is not what ``out`` looks like, or goes there in bits."""


def _scattered(
    ops: Operations, keys: list[bytes], wanted: Wanted, timeout: float | None
) -> Operation[list[Any]]:
    """Straight into the outs, where they are such that their runs can be filled."""
    assert wanted.outs is not None
    results: list[Any] = [_OTHERWISE] * len(keys)
    targets = [arrays.host_targets(memory) for memory in wanted.memories]
    direct = [i for i, target in enumerate(targets) if target is not None]
    expected = [wanted.memories[i].header.encode() for i in direct]
    headers = [bytearray(len(header)) for header in expected]
    parts = [(h, *(targets[i] or ())) for h, i in zip(headers, direct, strict=True)]
    sizes = yield from _outcomes(ops.batch_get_into([keys[i] for i in direct], parts, timeout))
    for i, size, header, right in zip(direct, sizes, headers, expected, strict=True):
        if size is None or (isinstance(size, P2PKVError) and not isinstance(size, TooLarge)):
            results[i] = size
        elif header == right and size == len(right) + wanted.memories[i].layout.nbytes:
            results[i] = wanted.outs[i]
    return results


def _made(framework: str, name: str, view: Any) -> Any:
    if not isinstance(view, memoryview):
        return view
    try:
        header, data = _taken_apart(name, view)
        return arrays.host_array(framework, header, data)
    except P2PKVError as e:
        return e


def _assigned(name: str, view: Any, memory: TensorMemory, out: Any) -> Any:
    if not isinstance(view, memoryview):
        return view
    try:
        header, data = _taken_apart(name, view)
        check_same(name, header, memory)
        stored = arrays.over(header, data)
    except P2PKVError as e:
        return e
    arrays.assign(memory, stored)
    return out


def _taken_apart(name: str, view: memoryview) -> tuple[TensorHeader, memoryview]:
    header = decode(view, len(view), name)
    return header, view[len(view) - header.layout.nbytes :]


def _outcomes(operation: Operation[list[Any]]) -> Operation[list[Any]]:
    try:
        return (yield from operation)
    except BatchError as e:
        return e.results


def _left(ops: Operations, begin: int, timeout: float | None) -> float:
    whole = ops.config.timeout_s if timeout is None else timeout
    return max(0.001, whole - (ops.clock() - begin) / 1e9)


def _batch(results: list[Any]) -> list[Any]:
    if any(isinstance(result, P2PKVError) for result in results):
        raise BatchError(results)
    return results


def _single(results: list[Any]) -> Any:
    if isinstance(results[0], P2PKVError):
        raise results[0]
    return results[0]


class _Puts:
    """Tensors that are to be put: which go straight to their owners, and what became of each."""

    def __init__(self, ops: Operations, keys: list[bytes], tensors: Sequence[Any]) -> None:
        self._ops = ops
        self._keys = keys
        self._tensors = [Outgoing(tensor) for tensor in tensors]
        self.direct: list[int] = []
        if any(tensor.staged_bytes for tensor in self._tensors):
            bound = ops.limits.message_bytes_max
            self.direct = direct_puts(self._tensors, keys, ops.memories(keys), bound)
        self.staged = sorted(set(range(len(keys))).difference(self.direct))
        self.uploads = Uploads([self._tensors[i] for i in self.staged])
        self.results: list[Any] = [None] * len(keys)

    def put_direct(self, options: PutOptions, timeout: float | None) -> Operation[list[Any]]:
        tensors = [self._tensors[i] for i in self.direct]
        sizes, source = [tensor.staged_bytes for tensor in tensors], DeviceValues(tensors)
        return _outcomes(
            self._ops.batch_put_source(
                [self._keys[i] for i in self.direct], sizes, source, options, timeout
            )
        )

    def put_staged(
        self, items: list[int], values: list[Parts], options: PutOptions, timeout: float | None
    ) -> Operation[list[Any]]:
        keys = [self._keys[i] for i in items]
        return _outcomes(self._ops.batch_put_from(keys, values, options, timeout))

    def take(self, items: list[int], results: list[Any]) -> None:
        for i, result in zip(items, results, strict=True):
            self.results[i] = result


class _Gets:
    """Tensors that are to go to a GPU: straight from where they lie, as far as may be."""

    def __init__(self, ops: Operations, keys: list[bytes], wanted: Wanted) -> None:
        self._keys = keys
        self._wanted = wanted
        self.results: list[Any] = [STAGED] * len(keys)
        places = ops.places(keys)
        outs, memories = wanted.outs, wanted.memories
        self.direct: DirectGets | None = None
        if any(places):
            self.direct = DirectGets(keys, places, outs, memories, wanted.framework, wanted.device)

    def rest(self) -> tuple[list[int], list[bytes], Downloads]:
        """What is left to be staged: the numbers, the keys."""
        wanted = self._wanted
        left = [i for i, result in enumerate(self.results) if result is STAGED]
        outs = None if wanted.outs is None else [wanted.outs[i] for i in left]
        downloads = Downloads(len(left), outs, wanted.framework, wanted.device)
        return left, [self._keys[i] for i in left], downloads

    def take(self, items: list[int], results: list[Any]) -> None:
        for i, result in zip(items, results, strict=True):
            self.results[i] = result


class BlockingDriver(Protocol):
    """Carries out an operation's effects in the calling thread."""

    def run(self, operation: Operation[T]) -> T: ...

    def close(self) -> None: ...


class AwaitedDriver(Protocol):
    """Carries out an operation's effects on the event loop."""

    async def run(self, operation: Operation[T]) -> T: ...

    async def aclose(self) -> None: ...


class TensorCalls:
    """Tensors, for the blocking client."""

    _ops: Operations
    _driver: BlockingDriver

    def _forget(self, keys: Iterable[Key]) -> None:
        raise NotImplementedError

    def put_tensor(self, key: Key, tensor: Any, *, if_absent: bool = False,
                   write_once: bool = False, soft_pin: bool = False, hard_pin: bool = False,
                   ttl: float | None = None, timeout: float | None = None) -> int:  # fmt: skip
        """``put`` of a tensor with its dtype, shape and strides.

        Of numpy, torch, cupy, or anything with DLPack or an array interface; on the host or on a
        GPU, contiguous or not. A GPU's tensor is read after what is under way on its stream.
        Raises InvalidArgument for a tensor that cannot be stored (one that requires grad: give
        ``tensor.detach()``), DeviceError.
        """
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        return int(_single(self._put_tensors([key], [tensor], options, timeout)))

    def batch_put_tensor(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]], *,
                         if_absent: bool = False, write_once: bool = False,
                         soft_pin: bool = False, hard_pin: bool = False,
                         ttl: float | None = None,
                         timeout: float | None = None) -> list[int]:  # fmt: skip
        """``put_tensor`` of many (a mapping, or pairs). Returns the copies of each, in order.

        Tensors of GPUs that go through pinned memory go in groups of 32 MiB, and ``timeout`` is
        that of each group.
        """
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        keys, tensors = pairs_of(items)
        return _batch(self._put_tensors(keys, tensors, options, timeout))

    def _put_tensors(
        self, keys: list[Any], tensors: list[Any], options: PutOptions, timeout: float | None
    ) -> list[Any]:
        encoded = encode_keys(keys, self._ops.limits)
        puts = _Puts(self._ops, encoded, tensors)
        self._forget(encoded)
        if puts.direct:
            puts.take(puts.direct, self._driver.run(puts.put_direct(options, timeout)))
        try:
            while (group := puts.uploads.next()) is not None:
                items, values = puts.staged[group[0]], group[1]
                put = puts.put_staged(items, values, options, timeout)
                puts.take(items, self._driver.run(put))
        except BaseException:
            puts.uploads.abandon()
            raise
        return puts.results

    def get_tensor(self, key: Key, *, out: Any = None, device: Any = None, like: Any = None,
                   framework: str | None = None, timeout: float | None = None) -> Any:  # fmt: skip
        """The tensor, or None if the key is not there.

        ``out``: the tensor into which it goes, and which is returned; contiguous or not. Else a new
        one is made, with the strides it was put with, by ``framework`` ("numpy", the default,
        "torch" or "cupy") on ``device`` ("cpu", "cuda", "cuda:1", a number); or as ``like`` is.
        It has arrived when the call returns. Raises TensorMismatch if ``out`` has another dtype or
        shape (it may have been written to then), or if the value is no tensor; CorruptValue,
        ConfigError for a framework that is missing, DeviceError.
        """
        outs = None if out is None else [out]
        return _single(self._get_tensors([key], outs, device, like, framework, timeout))

    def batch_get_tensor(self, keys: Iterable[Key], *, outs: Sequence[Any] | None = None,
                         device: Any = None, like: Any = None, framework: str | None = None,
                         timeout: float | None = None) -> list[Any]:  # fmt: skip
        """``get_tensor`` of many: one of ``outs`` for each key, or all made in the same way.

        Tensors of GPUs that go through pinned memory come in groups of 32 MiB, and ``timeout`` is
        that of each group.
        """
        return _batch(self._get_tensors(keys, outs, device, like, framework, timeout))

    def _get_tensors(
        self,
        keys: Iterable[Key],
        outs: Sequence[Any] | None,
        device: Any,
        like: Any,
        framework: str | None,
        timeout: float | None,
    ) -> list[Any]:
        encoded = encode_keys(keys, self._ops.limits)
        wanted = Wanted(len(encoded), outs, device, like, framework)
        if wanted.device == HOST:
            return self._driver.run(get_on_host(self._ops, encoded, wanted, timeout))
        gets = _Gets(self._ops, encoded, wanted)
        if gets.direct is not None:
            gets.results = gets.direct.run()
        left, names, downloads = gets.rest()
        try:
            for part in downloads.groups:
                downloads.begin()
                get = self._ops.batch_get_fresh(names[part], downloads.make, timeout)
                values = self._driver.run(_outcomes(get))
                landed = downloads.land(part, [name_of(k) for k in names[part]], values)
                gets.take(left[part], landed)
            downloads.finish()
        except BaseException:
            downloads.abandon()
            raise
        return gets.results


async def _to_the_end(call: Callable[[], T]) -> T:
    """Its result, on a thread. It is waited for also if that is cancelled: it uses memory of the
    caller's."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def _next(uploads: Uploads) -> tuple[slice, list[Parts]] | None:
    return await asyncio.to_thread(uploads.next) if uploads.on_device else uploads.next()


class AsyncTensorCalls:
    """Tensors, for the asyncio client. What waits for a GPU runs on a thread."""

    _ops: Operations
    _driver: AwaitedDriver

    def _forget(self, keys: Iterable[Key]) -> None:
        raise NotImplementedError

    async def put_tensor(self, key: Key, tensor: Any, *, if_absent: bool = False,
                         write_once: bool = False, soft_pin: bool = False,
                         hard_pin: bool = False, ttl: float | None = None,
                         timeout: float | None = None) -> int:  # fmt: skip
        """See ``Client.put_tensor``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        return int(_single(await self._put_tensors([key], [tensor], options, timeout)))

    async def batch_put_tensor(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]], *,
                               if_absent: bool = False, write_once: bool = False,
                               soft_pin: bool = False, hard_pin: bool = False,
                               ttl: float | None = None,
                               timeout: float | None = None) -> list[int]:  # fmt: skip
        """See ``Client.batch_put_tensor``."""
        options = put_options(if_absent, write_once, soft_pin, hard_pin, ttl)
        keys, tensors = pairs_of(items)
        return _batch(await self._put_tensors(keys, tensors, options, timeout))

    async def _put_tensors(
        self, keys: list[Any], tensors: list[Any], options: PutOptions, timeout: float | None
    ) -> list[Any]:
        encoded = encode_keys(keys, self._ops.limits)
        puts = _Puts(self._ops, encoded, tensors)
        self._forget(encoded)
        if puts.direct:
            puts.take(puts.direct, await self._driver.run(puts.put_direct(options, timeout)))
        try:
            while (group := await _next(puts.uploads)) is not None:
                items, values = puts.staged[group[0]], group[1]
                put = puts.put_staged(items, values, options, timeout)
                puts.take(items, await self._driver.run(put))
        except BaseException:
            puts.uploads.abandon()
            raise
        return puts.results

    async def get_tensor(self, key: Key, *, out: Any = None, device: Any = None, like: Any = None,
                         framework: str | None = None,
                         timeout: float | None = None) -> Any:  # fmt: skip
        """See ``Client.get_tensor``."""
        outs = None if out is None else [out]
        return _single(await self._get_tensors([key], outs, device, like, framework, timeout))

    async def batch_get_tensor(self, keys: Iterable[Key], *, outs: Sequence[Any] | None = None,
                               device: Any = None, like: Any = None, framework: str | None = None,
                               timeout: float | None = None) -> list[Any]:  # fmt: skip
        """See ``Client.batch_get_tensor``."""
        return _batch(await self._get_tensors(keys, outs, device, like, framework, timeout))

    async def _get_tensors(
        self,
        keys: Iterable[Key],
        outs: Sequence[Any] | None,
        device: Any,
        like: Any,
        framework: str | None,
        timeout: float | None,
    ) -> list[Any]:
        encoded = encode_keys(keys, self._ops.limits)
        wanted = Wanted(len(encoded), outs, device, like, framework)
        if wanted.device == HOST:
            return await self._driver.run(get_on_host(self._ops, encoded, wanted, timeout))
        gets = _Gets(self._ops, encoded, wanted)
        if gets.direct is not None:
            gets.results = await _to_the_end(gets.direct.run)
        left, names, downloads = gets.rest()
        try:
            for part in downloads.groups:
                await asyncio.to_thread(downloads.begin)
                get = self._ops.batch_get_fresh(names[part], downloads.make, timeout)
                values = await self._driver.run(_outcomes(get))
                named = [name_of(k) for k in names[part]]
                landed = await asyncio.to_thread(downloads.land, part, named, values)
                gets.take(left[part], landed)
            await asyncio.to_thread(downloads.finish)
        except BaseException:
            downloads.abandon()
            raise
        return gets.results
