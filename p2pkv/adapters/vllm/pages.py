"""The engine's cache as pages of bytes, and the host memory through which they go.

A block has a page in the memory of each layer. A value in the store is the pages of one block, one
layer after the other. They are gathered into rows of a staging buffer, which is what a GPU needs
anyway (pinned, one transfer for many blocks), and scattered from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from p2pkv.errors import ConfigError

DEVICES = ("cpu", "cuda")


class Staging(Protocol):
    """Rows of host memory, each with room for a block."""

    rows: int

    def row(self, index: int) -> memoryview: ...


class Pages(Protocol):
    """Memory of the engine. Any thread may copy, each with a buffer of its own."""

    block_bytes: int

    def now(self) -> Any:
        """A point in time of the device: what was started before is done by then."""

    def staging(self, rows: int) -> Staging: ...

    def gather(self, blocks: Sequence[int], into: Any, after: Any) -> None:
        """Copy blocks into the first rows of a buffer; ``after``: a point in time."""

    def scatter(self, source: Any, blocks: Sequence[int], after: Any) -> None:
        """Copy the first rows of a buffer into blocks, likewise."""


class TorchStaging:
    def __init__(self, rows: int, row_bytes: int, pinned: bool) -> None:
        import torch

        self.rows = rows
        self.tensor = torch.zeros((rows, row_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._view = memoryview(self.tensor.numpy().reshape(-1))
        self._row_bytes = row_bytes

    def row(self, index: int) -> memoryview:
        return self._view[index * self._row_bytes : (index + 1) * self._row_bytes]


class TorchPages:
    """Tensors of torch, in host memory or on a CUDA device."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """``layers``: of each its bytes, (blocks, page)."""
        import torch

        self._layers = list(layers)
        self.device = self._layers[0].device
        ends, end = [], 0
        for layer in self._layers:
            ends.append((end, end + int(layer.shape[1])))
            end += int(layer.shape[1])
        self._columns = ends
        self.block_bytes = end
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None

    def now(self) -> Any:
        if not self._cuda:
            return None
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def staging(self, rows: int) -> TorchStaging:
        return TorchStaging(rows, self.block_bytes, self._cuda)

    def gather(self, blocks: Sequence[int], into: TorchStaging, after: Any) -> None:
        self._copy(blocks, into, after, inward=False)

    def scatter(self, source: TorchStaging, blocks: Sequence[int], after: Any) -> None:
        self._copy(blocks, source, after, inward=True)

    def _copy(self, blocks: Sequence[int], staging: TorchStaging, after: Any, inward: bool) -> None:
        import torch

        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
            rows = staging.tensor[: len(blocks)]
            for layer, (low, high) in zip(self._layers, self._columns, strict=True):
                if inward:
                    layer.index_copy_(
                        0, index, rows[:, low:high].to(self.device, non_blocking=True)
                    )
                else:
                    rows[:, low:high].copy_(layer.index_select(0, index), non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()


def pages_of(
    caches: Mapping[str, Any], names: Sequence[str], blocks: int, page: Mapping[str, int]
) -> TorchPages:
    """The memory of these layers. Layers that share their memory count once.

    ``caches``: tensors whose first dimension is blocks, or an even part of one each. ``page``:
    bytes of a block in each layer. Raises ConfigError for memory in which blocks do not lie whole.
    """
    layers: dict[tuple[int, int], Any] = {}
    for name in names:
        cache = caches[name]
        layers.setdefault(
            (cache.data_ptr(), cache.stride(0)), _bytes_of(name, cache, blocks, page[name])
        )
    return TorchPages(list(layers.values()))


def _bytes_of(name: str, cache: Any, blocks: int, page: int) -> Any:
    import torch

    if cache.device.type not in DEVICES:
        raise ConfigError(f"layer {name}: on {cache.device}, must be one of {', '.join(DEVICES)}")
    parts, rest = divmod(cache.shape[0], blocks)
    if rest or not parts or _extent(cache[:parts]) > page:
        raise ConfigError(
            f"layer {name}: {tuple(cache.shape)} with strides {cache.stride()} is not {blocks} "
            f"blocks of {page} bytes each"
        )
    size = cache.element_size()
    stride = cache.stride(0) * parts * size
    empty = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return empty.set_(
        cache.untyped_storage(), cache.storage_offset() * size, (blocks, page), (stride, 1)
    )


def _extent(tensor: Any) -> int:
    """Bytes from its first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int((1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size())
