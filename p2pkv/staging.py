"""Tensors of GPUs on their way: through pinned host memory, in groups that overlap.

While one group is being put, the next is being copied from the GPU; while one is being copied to
the GPU, the next is being fetched. A group is what fits into a stage, or one tensor that is larger.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from p2pkv import arrays, cuda
from p2pkv.arrays import HOST, TensorMemory
from p2pkv.buffers import address_of
from p2pkv.cuda import Run
from p2pkv.errors import P2PKVError, TensorMismatch
from p2pkv.parts import Parts
from p2pkv.tensor_header import TensorHeader, decode

STAGE_BYTES = 32 << 20
STAGES_KEPT = 4
"""Stages that wait for their next use, in the whole process."""

GROUP_KEYS = 16
"""Tensors that are fetched together where their sizes are not known before."""

DEVICE_RUNS_MAX = 256
"""A tensor with more runs of elements is made contiguous on the GPU, where its framework can."""

_stages: list[memoryview] = []
_lock = threading.Lock()


def _take_stage() -> memoryview:
    with _lock:
        if _stages:
            return _stages.pop()
    return cuda.driver().pinned(STAGE_BYTES)


def _give_back(stages: Sequence[memoryview]) -> None:
    with _lock:
        _stages.extend(stages)
        del _stages[STAGES_KEPT:]


def forget_stages() -> None:
    """Give back the pinned memory that waits for its next use."""
    with _lock:
        _stages.clear()


def groups(sizes: Sequence[int], keys_max: int, bytes_max: int) -> list[slice]:
    """Neighbours of ``bytes_max`` together, at most ``keys_max`` of them; or one alone."""
    result: list[slice] = []
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and (total + size > bytes_max or i - first == keys_max):
            result.append(slice(first, i))
            first, total = i, 0
        total += size
    if len(sizes) > first:
        result.append(slice(first, len(sizes)))
    return result


class Outgoing:
    """A tensor that is to be put: in host memory already, or with its runs on a GPU.

    Raises InvalidArgument if it cannot be stored.
    """

    def __init__(self, tensor: Any) -> None:
        memory = arrays.memory_of(tensor)
        self.staged_bytes = 0
        if memory.device == HOST:
            header, parts = arrays.host_parts(memory)
            self.parts: Parts = (memoryview(header.encode()), *parts)
            return
        self._memory = _with_few_runs(tensor, memory)
        self._header = self._memory.header.encode()
        self.staged_bytes = len(self._header) + self._memory.layout.nbytes

    def begin(self, stage: memoryview) -> None:
        """Begin to copy from the GPU, behind what is under way on the tensor's stream."""
        self.parts = stage[: self.staged_bytes]
        runs = self.opened(self.parts, address_of(stage))
        cuda.driver().gather(self._memory.device, runs, self._memory.stream)

    def opened(self, value: memoryview, address: int) -> list[Run]:
        """Write the header of the value that lies at ``address``; the copies that are left."""
        start = len(self._header)
        value[:start] = self._header
        return runs_of(self._memory, address + start)

    @property
    def stream(self) -> tuple[int, int]:
        return self._memory.device, self._memory.stream


def _with_few_runs(tensor: Any, memory: TensorMemory) -> TensorMemory:
    if memory.layout.reversed or len(memory.layout.runs()[1]) > DEVICE_RUNS_MAX:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and isinstance(tensor, torch.Tensor):
            return arrays.memory_of(tensor.contiguous())
        if cupy is not None and isinstance(tensor, cupy.ndarray):
            return arrays.memory_of(cupy.ascontiguousarray(tensor))
    return memory


class Uploads:
    """The values of tensors that are to be put, group by group: ``next`` until it gives None.

    ``abandon`` when something went wrong before.
    """

    def __init__(self, tensors: Sequence[Outgoing]) -> None:
        self._all = tensors
        sizes = [one.staged_bytes for one in self._all]
        self.on_device = any(sizes)
        self._groups = groups(sizes, len(sizes) or 1, STAGE_BYTES)
        self._stages: list[memoryview] = []
        self._at = 0
        self._waits: list[Callable[[], None]] = []

    def next(self) -> tuple[slice, list[Parts]] | None:
        """The next group and its values. The one before has been put then."""
        if self._at == len(self._groups):
            _give_back(self._stages)
            self._stages = []
            return None
        if self._at == 0:
            self._begin(0)
        for wait in self._waits:
            wait()
        self._waits = []
        part = self._groups[self._at]
        self._at += 1
        if self._at < len(self._groups):
            self._begin(self._at)
        return part, [one.parts for one in self._all[part]]

    def abandon(self) -> None:
        """Wait for what is under way. The stages are not used again: bytes may still be leaving."""
        self._stages = []
        for wait in self._waits:
            wait()
        self._waits = []

    def _begin(self, group: int) -> None:
        staged = [one for one in self._all[self._groups[group]] if one.staged_bytes]
        if not staged:
            return
        room, at = self._stage(group, sum(one.staged_bytes for one in staged)), 0
        for one in staged:
            one.begin(room[at : at + one.staged_bytes])
            at += one.staged_bytes
        self._waits = [cuda.driver().mark(*stream) for stream in {one.stream for one in staged}]

    def _stage(self, group: int, size: int) -> memoryview:
        if size > STAGE_BYTES:
            return cuda.driver().pinned(size)
        while len(self._stages) <= group % 2:
            self._stages.append(_take_stage())
        return self._stages[group % 2]


class Downloads:
    """Values of tensors that are to go to GPUs, group by group.

    For each of ``groups``: ``begin``, fetch its values into what ``make`` gives, ``land`` them.
    Then ``finish``; or ``abandon`` when something went wrong. Without ``outs`` the tensors are made
    by ``framework`` on ``device``.
    """

    def __init__(self, count: int, outs: Sequence[Any] | None, framework: str, device: int) -> None:
        self._outs = outs
        self._targets = None if outs is None else [arrays.memory_of(o, writing=True) for o in outs]
        self._framework = framework
        self._device = device
        sizes = [m.layout.nbytes + 64 for m in self._targets] if self._targets else [0] * count
        self.groups = groups(sizes, count if self._targets else GROUP_KEYS, STAGE_BYTES)
        self._stages: list[memoryview] = []
        self._busy: list[list[Callable[[], None]]] = [[], []]
        self._group = -1
        self._used = 0
        self._large: list[memoryview] = []

    def begin(self) -> None:
        """Have a stage for the next group: its tensors of the time before have arrived."""
        self._group += 1
        self._wait(self._group % 2)
        self._used = 0
        if len(self._stages) < 2:
            self._stages.append(_take_stage())

    def make(self, size: int) -> memoryview:
        """Memory for one value."""
        stage, at = self._stages[self._group % 2], self._used
        if at + size > len(stage):
            self._large.append(cuda.driver().pinned(size))
            return self._large[-1]
        self._used = at + -(-size // 64) * 64
        return stage[at : at + size]

    def land(self, part: slice, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Begin to copy the group's values to their GPU; the tensors, None, or what went wrong."""
        results: list[Any] = []
        streams: set[tuple[int, int]] = set()
        for i, name, value in zip(range(part.start, part.stop), names, values, strict=True):
            if not isinstance(value, memoryview):
                results.append(value)
                continue
            try:
                tensor, memory = self._land_one(i, name, value)
            except P2PKVError as e:
                results.append(e)
            else:
                results.append(tensor)
                streams.add((memory.device, memory.stream))
        self._busy[self._group % 2] = [cuda.driver().mark(*stream) for stream in streams]
        return results

    def _land_one(self, i: int, name: str, value: memoryview) -> tuple[Any, TensorMemory]:
        header = decode(value, len(value), name)
        data = value[len(value) - header.layout.nbytes :]
        if self._targets is None or self._outs is None:
            tensor = arrays.device_array(self._framework, header, self._device)
            memory = arrays.memory_of(tensor)
            _copy_runs(memory, data)
            return tensor, memory
        tensor, memory = self._outs[i], self._targets[i]
        check_same(name, header, memory)
        if memory.header == header and not scattered(memory):
            _copy_runs(memory, data)
        else:
            _assign(tensor, header, data, memory)
        return tensor, memory

    def finish(self) -> None:
        """Wait until all tensors have arrived."""
        self._wait(0)
        self._wait(1)
        _give_back(self._stages)
        self._stages, self._large = [], []

    def abandon(self) -> None:
        """Wait for what is under way. The stages are not used again: bytes may still be coming."""
        self._stages, self._large = [], []
        self._wait(0)
        self._wait(1)

    def _wait(self, half: int) -> None:
        for wait in self._busy[half]:
            wait()
        self._busy[half] = []


def check_same(name: str, header: TensorHeader, memory: TensorMemory) -> None:
    """Raises TensorMismatch unless the stored tensor has this dtype and shape."""
    if header.dtype != memory.dtype or header.shape != memory.layout.shape:
        wanted = f"{memory.dtype}{list(memory.layout.shape)}"
        raise TensorMismatch(f"{name}: is a tensor {header}, out is {wanted}")


def scattered(memory: TensorMemory) -> bool:
    """Whether it has so many runs of elements that they are not copied one by one."""
    return memory.layout.reversed or len(memory.layout.runs()[1]) > DEVICE_RUNS_MAX


def _copy_runs(memory: TensorMemory, data: memoryview) -> None:
    cuda.driver().scatter(memory.device, runs_of(memory, address_of(data)), memory.stream)


def runs_of(memory: TensorMemory, address: int) -> list[Run]:
    """The copies between a GPU's tensor and its packed elements at ``address``."""
    length, starts = memory.layout.runs()
    begin = memory.address
    return [(address + i * length, begin + start, length) for i, start in enumerate(starts)]


def _assign(out: Any, header: TensorHeader, data: memoryview, memory: TensorMemory) -> None:
    """By way of a tensor as it is stored, from which the framework copies on the GPU."""
    framework = arrays.framework_of(out)
    between = arrays.device_array(framework, header, memory.device)
    _copy_runs(arrays.memory_of(between), data)
    if framework == "torch":
        out.copy_(between)
    else:
        out[...] = between
