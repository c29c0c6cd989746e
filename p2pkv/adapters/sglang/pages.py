"""Where the bytes of pages lie in a host pool of SGLang's.

A pool tells addresses, or it copies a page to and from a flat tensor. ``DirectPages`` takes the
first way, ``FlatPages`` the second; what they store is not the same, so it has other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from p2pkv.adapters.sglang.identity import PoolFacts
from p2pkv.errors import InvalidArgument

Place = tuple[int, int]
"""Address and bytes."""


class HostPool(Protocol):
    """What is used of SGLang's HostKVCache."""

    page_size: int
    layout: str
    dtype: Any

    def get_page_buffer_meta(self, indices: Any) -> tuple[Sequence[Any], Sequence[Any]]: ...
    def get_split_heads_page_buffer_meta(
        self, indices: Any, split_factor: int
    ) -> tuple[Sequence[Any], Sequence[Any]]: ...
    def get_data_page(self, index: Any, flat: bool = True) -> Any: ...
    def get_dummy_flat_data_page(self) -> Any: ...
    def set_from_flat_data_page(self, index: Any, data_page: Any) -> None: ...


class DirectPages:
    """Pages as addresses: ``pieces`` values for each, of one or several parts."""

    def __init__(self, name: str, pool: HostPool, pieces: int = 1) -> None:
        self._pool = pool
        self.pieces = pieces
        self.page_tokens = page_tokens(pool)
        first = self._places(_indices(self.page_tokens), 1)[0]
        self.facts = facts(name, pool, "direct", tuple(size for _, size in first))

    def values(self, indices: Any, pages: int) -> list[list[Place]]:
        """The parts of each value. Raises InvalidArgument."""
        return self._places(indices, pages)

    def targets(self, indices: Any, pages: int) -> tuple[list[Any], Sequence[Any]]:
        """Where values are to be put, and what ``loaded`` needs then. Raises InvalidArgument."""
        return list(self.values(indices, pages)), ()

    def loaded(self, indices: Any, kept: Sequence[Any], there: Sequence[bool]) -> None:
        """These pages have come."""

    def _places(self, indices: Any, pages: int) -> list[list[Place]]:
        if pages * self.page_tokens != len(indices):
            raise InvalidArgument(
                f"host_indices: {len(indices)} for {pages} pages of {self.page_tokens} tokens"
            )
        pool = self._pool
        addresses, sizes = (
            pool.get_page_buffer_meta(indices)
            if self.pieces == 1
            else pool.get_split_heads_page_buffer_meta(indices, self.pieces)
        )
        places = [list(_parts(a, s)) for a, s in zip(addresses, sizes, strict=True)]
        values = pages * self.pieces
        each, rest = divmod(len(places), values)
        if rest or not each:
            raise InvalidArgument(f"host pool: {len(places)} addresses for {values} values")
        return [
            [part for places_ in places[i : i + each] for part in places_]
            for i in range(0, len(places), each)
        ]


class FlatPages:
    """Pages as flat tensors, copied by the pool."""

    pieces = 1

    def __init__(self, name: str, pool: HostPool) -> None:
        self._pool = pool
        self.page_tokens = page_tokens(pool)
        size = as_buffer(pool.get_dummy_flat_data_page()).nbytes
        self.facts = facts(name, pool, "flat", (size,))

    def values(self, indices: Any, pages: int) -> list[memoryview]:
        pool = self._pool
        return [as_buffer(pool.get_data_page(i, flat=True)) for i in self._starts(indices, pages)]

    def targets(self, indices: Any, pages: int) -> tuple[list[Any], Sequence[Any]]:
        self._starts(indices, pages)
        kept = [self._pool.get_dummy_flat_data_page() for _ in range(pages)]
        return list(map(as_buffer, kept)), kept

    def loaded(self, indices: Any, kept: Sequence[Any], there: Sequence[bool]) -> None:
        starts = self._starts(indices, len(there))
        for start, page, is_there in zip(starts, kept, there, strict=True):
            if is_there:
                self._pool.set_from_flat_data_page(start, page)

    def _starts(self, indices: Any, pages: int) -> list[int]:
        tokens = self.page_tokens
        if pages * tokens != len(indices):
            raise InvalidArgument(
                f"host_indices: {len(indices)} for {pages} pages of {tokens} tokens"
            )
        return [int(i) for i in indices[::tokens]]


Pages = DirectPages | FlatPages


def pages_of(name: str, pool: HostPool, direct: bool, pieces: int = 1) -> Pages:
    """By address if that is asked for and the pool can tell addresses in its layout."""
    if direct:
        try:
            return DirectPages(name, pool, pieces)
        except (NotImplementedError, ValueError, AttributeError, AssertionError):
            pass
    return FlatPages(name, pool)


def page_tokens(pool: Any) -> int:
    """Indices of a page, for which a rank may hold only a share of the tokens."""
    return int(getattr(pool, "logical_page_size", None) or pool.page_size or 1)


def facts(name: str, pool: Any, way: str, sizes: tuple[int, ...]) -> PoolFacts:
    tag = getattr(pool, "storage_format_tag", None)
    layout = "/".join(filter(None, (str(pool.layout), way, tag)))
    dtype = str(pool.dtype).removeprefix("torch.")
    return PoolFacts(name, type(pool).__name__, dtype, layout, page_tokens(pool), sizes)


def buffers(pool: Any) -> list[Place]:
    """The memory of a pool, pieces that overlap as one."""
    found = getattr(pool, "get_hybrid_pool_buffer", None)
    tensors = [*(found() if found is not None else ()), *_listed(getattr(pool, "kv_buffer", None))]
    spans = sorted((int(t.data_ptr()), _bytes(t)) for t in tensors if t is not None and _bytes(t))
    merged: list[Place] = []
    for address, size in spans:
        start, length = merged[-1] if merged else (0, 0)
        if address < start + length:
            merged[-1] = (start, max(start + length, address + size) - start)
        else:
            merged.append((address, size))
    return merged


def as_buffer(tensor: Any) -> memoryview:
    """The bytes of a host tensor, flat; of a copy if it is not contiguous."""
    import torch

    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _listed(buffer: Any) -> Iterable[Any]:
    return buffer if isinstance(buffer, (list, tuple)) else (buffer,)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _indices(tokens: int) -> Any:
    import torch

    return torch.arange(tokens, dtype=torch.int64)


def _parts(address: Any, size: Any) -> Iterable[Place]:
    if isinstance(address, Sequence):
        return zip(map(int, address), map(int, size), strict=True)
    return ((int(address), int(size)),)


__all__ = ["DirectPages", "FlatPages", "HostPool", "Pages", "as_buffer", "buffers", "pages_of"]
