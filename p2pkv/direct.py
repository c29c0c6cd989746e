"""Tensors of GPUs straight from and to the memory of nodes on this host, without pinned memory.

A put has the node make room, copies there, waits for the GPU, and commits. A get finds the value by
the node's index, copies from there, waits for the GPU, and then looks whether the header before the
value is still that of the version that was found: as in ``shared_memory``, only that what is
between finding and looking is the GPU's work. What cannot be had like this goes through
``staging``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from p2pkv import arrays, cuda, gpu_arena
from p2pkv.arrays import TensorMemory
from p2pkv.errors import DeviceError, P2PKVError
from p2pkv.outcomes import name_of
from p2pkv.routing import Place
from p2pkv.shared_memory import SHARED_PUT_MIN, SharedArena
from p2pkv.staging import Outgoing, runs_of, scattered
from p2pkv.tensor_header import HEADER_BYTES_MAX, TensorHeader, decode

STAGED: Final = object()
"""The result of a get that is to be done by ``staging``."""

Stream = tuple[int, int]
"""Device, and stream."""


# --- putting


class DeviceValues:
    """The values of some GPUs' tensors, as the ``Source`` of a request."""

    def __init__(self, tensors: Sequence[Outgoing], failures: list[DeviceError] | None = None):
        self._tensors = tensors
        self.failures: list[DeviceError] = [] if failures is None else failures
        """What the GPU's driver refused; then nothing is tried again."""

    def part(self, items: Sequence[int]) -> DeviceValues:
        if self.failures:
            raise self.failures[0]
        return DeviceValues([self._tensors[i] for i in items], self.failures)

    def staged(self) -> list[memoryview]:
        """In pinned memory of their own."""
        room = cuda.driver().pinned(sum(tensor.staged_bytes for tensor in self._tensors))
        values: list[memoryview] = []
        for tensor in self._tensors:
            values.append(room[: tensor.staged_bytes])
            room = room[tensor.staged_bytes :]
        self._guarded(range(len(values)), lambda i: self._tensors[i].begin(values[i]))
        return values

    def write(self, memory: SharedArena, made: Sequence[int], offsets: Sequence[int]) -> None:
        reached = gpu_arena.of(memory)
        sizes = [self._tensors[i].staged_bytes for i in made]
        if not reached.reach(zip(offsets, sizes, strict=True)):
            values = self.staged()
            memory.write(offsets, [values[i] for i in made])
            return
        rooms = dict(zip(made, offsets, strict=True))

        def begin(i: int) -> None:
            tensor, at = self._tensors[i], rooms[i]
            value = memory.view[at : at + tensor.staged_bytes]
            runs = tensor.opened(value, reached.address + at)
            cuda.driver().gather(tensor.stream[0], reached.cut(runs), tensor.stream[1])

        self._guarded(made, begin)

    def _guarded(self, items: Sequence[int], begin: Any) -> None:
        """Begin these copies, and wait for all that were begun, whatever happens."""
        begun: set[Stream] = set()
        try:
            try:
                for i in items:
                    begun.add(self._tensors[i].stream)
                    begin(i)
            finally:
                cuda.wait_for(begun)
        except DeviceError as e:
            self.failures.append(e)
            raise


def direct_puts(
    tensors: Sequence[Outgoing], keys: Sequence[bytes], memories: Sequence[Any], bytes_max: int
) -> list[int]:
    """Which of these tensors are to be put straight to the memory of their owners, if known.

    Not where one key comes twice, as the last one is to stay.
    """
    if not any(memories) or len(set(keys)) < len(keys):
        return []
    chosen = [
        i
        for i, (tensor, memory) in enumerate(zip(tensors, memories, strict=True))
        if memory is not None and 0 < tensor.staged_bytes <= bytes_max
    ]
    totals: dict[Any, int] = {}
    for i in chosen:
        totals[memories[i]] = totals.get(memories[i], 0) + tensors[i].staged_bytes
    usable = {m for m, n in totals.items() if n >= SHARED_PUT_MIN and not gpu_arena.of(m).refused}
    return [i for i in chosen if memories[i] in usable]


# --- getting


class _Landing(NamedTuple):
    """A value on its way to a GPU."""

    item: int
    key: bytes
    place: Place
    tensor: Any
    memory: TensorMemory


class DirectGets:
    """Values that lie where ``places`` say, to go to tensors of a GPU."""

    def __init__(
        self,
        keys: Sequence[bytes],
        places: Sequence[Place | None],
        outs: Sequence[Any] | None,
        memories: Sequence[TensorMemory],
        framework: str,
        device: int,
    ) -> None:
        self._keys = keys
        self._places = places
        self._outs = outs
        self._memories = memories
        self._framework = framework
        self._device = device

    def run(self) -> list[Any]:
        """The tensors, which have arrived, and STAGED. Raises DeviceError."""
        results: list[Any] = [STAGED] * len(self._keys)
        streams: set[Stream] = set()
        landing: list[_Landing] = []
        try:
            for i, place in enumerate(self._places):
                found = None if place is None else self._prepared(i, place)
                if found is not None:
                    streams.add((found.memory.device, found.memory.stream))
                    _begin(found)
                    landing.append(found)
        finally:  # the memory of the node must stay mapped until then
            cuda.wait_for(streams)
        for one in landing:
            if _unchanged(one.key, one.place):
                results[one.item] = one.tensor
        return results

    def _prepared(self, i: int, place: Place) -> _Landing | None:
        """None: what is there is to be had otherwise, or is wrong, which staging then tells."""
        if not gpu_arena.of(place.memory).reach([(place.offset, place.size)]):
            return None
        if self._outs is not None:
            memory = self._memories[i]
            wanted = memory.header.encode()
            same = place.size == len(wanted) + memory.layout.nbytes
            if not same or scattered(memory) or _start(place, len(wanted)) != wanted:
                return None
            return _Landing(i, self._keys[i], place, self._outs[i], memory)
        header = self._header(i, place)
        if header is None:
            return None
        try:
            tensor = arrays.device_array(self._framework, header, self._device)
        except P2PKVError:
            return None
        return _Landing(i, self._keys[i], place, tensor, arrays.memory_of(tensor))

    def _header(self, i: int, place: Place) -> TensorHeader | None:
        start = _start(place, min(place.size, HEADER_BYTES_MAX))
        if not _unchanged(self._keys[i], place):
            return None
        try:
            return decode(start, place.size, name_of(self._keys[i]))
        except P2PKVError:
            return None


def _start(place: Place, size: int) -> bytes:
    return bytes(place.memory.view[place.offset : place.offset + size])


def _unchanged(key: bytes, place: Place) -> bool:
    memory: SharedArena = place.memory
    return memory.unchanged(key, place.offset, place.size, place.version)


def _begin(one: _Landing) -> None:
    reached = gpu_arena.of(one.place.memory)
    data = reached.address + one.place.offset + one.place.size - one.memory.layout.nbytes
    runs = reached.cut(runs_of(one.memory, data))
    cuda.driver().scatter(one.memory.device, runs, one.memory.stream)
