"""Tensors, whole and cut into shards for tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pkv import arrays
from p2pkv.adapters.cache import Cache
from p2pkv.adapters.mooncake.base import NOTHING
from p2pkv.adapters.mooncake.codes import codes
from p2pkv.adapters.mooncake.sessions import SessionCalls
from p2pkv.adapters.mooncake.types import ReplicateConfig
from p2pkv.errors import InvalidArgument, Miss, P2PKVError
from p2pkv.tensor_header import decode


class TensorCalls(SessionCalls):
    """Tensors are of torch where it is installed, else of numpy. ``None`` is a miss or a failure.

    They are stored with dtype, shape and strides, in the format of p2pkv (``Client.put_tensor``).
    A shard of tensor parallelism has the key ``<key>_tp_<rank>``.
    """

    def put_tensor(self, key: str, tensor: Any) -> int:
        """0 or a code; the old one is kept where the key is there."""
        return self._put_tensors("put_tensor", [key], [tensor])[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """``put_tensor`` of many."""
        return self._put_tensors("batch_put_tensor", keys, tensors_list)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """``put_tensor`` with a configuration."""
        return self._put_tensors("pub_tensor", [key], [tensor], config)[0]

    def batch_pub_tensor(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``pub_tensor`` of many."""
        return self._put_tensors("batch_pub_tensor", keys, tensors_list, config)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """``put_tensor`` that replaces."""
        return self._put_tensors("upsert_tensor", [key], [tensor], replace=True)[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """``upsert_tensor`` of many."""
        return self._put_tensors("batch_upsert_tensor", keys, tensors_list, replace=True)

    def upsert_pub_tensor(
        self, key: str, tensor: Any, config: ReplicateConfig | None = None
    ) -> int:
        """``pub_tensor`` that replaces."""
        return self._put_tensors("upsert_pub_tensor", [key], [tensor], config, replace=True)[0]

    def batch_upsert_pub_tensor(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``upsert_pub_tensor`` of many."""
        return self._put_tensors(
            "batch_upsert_pub_tensor", keys, tensors_list, config, replace=True
        )

    def get_tensor(self, key: str) -> Any:
        """The tensor, or None."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """``get_tensor`` of many."""
        framework = _framework()

        def fetch(cache: Cache, names: list[bytes], _: list[Any]) -> Sequence[Any]:
            timeout = cache.config.unsized_timeout_s
            return cache.ask(
                names,
                lambda items: cache.client.batch_get_tensor(
                    [names[i] for i in items], framework=framework, timeout=timeout
                ),
            )

        outcomes = self._batch("get_tensor", keys, NOTHING, None, fetch)
        return [None if isinstance(o, P2PKVError) else o for o in outcomes]

    def _put_tensors(
        self,
        what: str,
        keys: Sequence[str],
        tensors: Sequence[Any],
        config: ReplicateConfig | None = None,
        replace: bool = False,
    ) -> list[int]:
        options = {"if_absent": not replace, **self._options(config)}

        def put(cache: Cache, names: list[bytes], values: list[Any]) -> Sequence[Any]:
            timeout = cache.patience(sum(arrays.memory_of(v).layout.nbytes for v in values))
            return cache.ask(
                names,
                lambda items: cache.client.batch_put_tensor(
                    [(names[i], values[i]) for i in items], timeout=timeout, **options
                ),
            )

        return codes(self._batch(what, keys, (tensors,), _storable, put))

    # -- in the caller's memory

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Into a tensor of the same dtype and shape, on a GPU or not: 0 or a code."""
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors: Sequence[Any]) -> list[int]:
        """``get_tensor_into_cuda`` of many, all on one device."""

        def fetch(cache: Cache, names: list[bytes], outs: list[Any]) -> Sequence[Any]:
            timeout = cache.patience(sum(arrays.memory_of(v).layout.nbytes for v in outs))
            return cache.ask(
                names,
                lambda items: cache.client.batch_get_tensor(
                    [names[i] for i in items], outs=[outs[i] for i in items], timeout=timeout
                ),
            )

        outcomes = self._batch("get_tensor_into_cuda", keys, (tensors,), _storable, fetch)
        return codes(Miss() if o is None else o for o in outcomes)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Into registered memory, header first: a tensor over it, or None.

        The tensor is valid as long as the memory is.
        """
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """``get_tensor_into`` of many."""
        framework = _framework()

        def fetch(cache: Cache, names: list[bytes], targets: list[Any]) -> list[Any]:
            loaded = cache.load(names, targets)
            return [
                _over(framework, name, target, size) if isinstance(size, int) else size
                for name, target, size in zip(names, targets, loaded, strict=True)
            ]

        columns = (buffer_ptrs, sizes)
        outcomes = self._batch("get_tensor_into", keys, columns, self._memory.view, fetch)
        return [None if isinstance(o, P2PKVError) else o for o in outcomes]

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """From registered memory, as ``get_tensor_into`` left it there: 0 or a code."""
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """``put_tensor_from`` of many."""
        return self._put_tensors_from("put_tensor_from", keys, buffer_ptrs, sizes, False)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """``put_tensor_from`` that replaces."""
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """``upsert_tensor_from`` of many."""
        return self._put_tensors_from("upsert_tensor_from", keys, buffer_ptrs, sizes, True)

    def _put_tensors_from(
        self,
        what: str,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        replace: bool,
    ) -> list[int]:
        outcomes = self._batch(
            what, keys, (buffer_ptrs, sizes), self._encoded_tensor,
            lambda cache, names, values: cache.store(names, values, if_absent=not replace),
        )  # fmt: skip
        return codes(outcomes)

    def _encoded_tensor(self, address: int, size: int) -> memoryview:
        """The bytes there, if they are a tensor. Raises InvalidArgument."""
        view = self._memory.view(address, size)
        try:
            decode(view, len(view), f"the {size} bytes at {address:#x}")
        except P2PKVError as e:
            raise InvalidArgument(str(e)) from None
        return view

    # -- shards

    def put_tensor_with_tp(
        self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Cut into ``tp_size`` shards along a dimension, all of which are stored: 0 or a code.

        ``tp_rank`` makes no difference.
        """
        return self.pub_tensor_with_tp(key, tensor, None, tp_rank, tp_size, split_dim)

    def batch_put_tensor_with_tp(
        self, base_keys: Sequence[str], tensors_list: Sequence[Any], tp_rank: int = 0,
        tp_size: int = 1, split_dim: int = 0,
    ) -> list[int]:  # fmt: skip
        """``put_tensor_with_tp`` of many."""
        return self.batch_pub_tensor_with_tp(
            base_keys, tensors_list, None, tp_rank, tp_size, split_dim
        )

    def pub_tensor_with_tp(
        self, key: str, tensor: Any, config: ReplicateConfig | None = None, tp_rank: int = 0,
        tp_size: int = 1, split_dim: int = 0,
    ) -> int:  # fmt: skip
        """``put_tensor_with_tp`` with a configuration."""
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[
            0
        ]

    def batch_pub_tensor_with_tp(
        self, base_keys: Sequence[str], tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None, tp_rank: int = 0, tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:  # fmt: skip
        """``pub_tensor_with_tp`` of many."""
        what, results = "put_tensor_with_tp", list[int]()
        if len(base_keys) != len(tensors_list):
            return self._put_tensors(what, base_keys, tensors_list, config)
        for key, tensor in zip(base_keys, tensors_list, strict=True):
            try:
                names, shards = _shards(key, tensor, tp_size, split_dim)
            except InvalidArgument as e:
                results.append(self._refuse(what, e))
                continue
            done = self._put_tensors(what, names, shards, config)
            results.append(next((code for code in done if code), 0))
        return results

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """The shard of a rank, or None."""
        return self.get_tensor(shard_key(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Any]:
        """``get_tensor_with_tp`` of many."""
        return self.batch_get_tensor([shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1,
        split_dim: int = 0,
    ) -> Any:  # fmt: skip
        """``get_tensor_into`` of a rank's shard."""
        return self.get_tensor_into(shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self, base_keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int],
        tp_rank: int = 0, tp_size: int = 1,
    ) -> list[Any]:  # fmt: skip
        """``get_tensor_with_tp_into`` of many."""
        names = [shard_key(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(names, buffer_ptrs, sizes)


def shard_key(key: str, rank: int, size: int) -> str:
    """The key of a shard; a tensor in one piece has its own."""
    return f"{key}_tp_{rank}" if size > 1 else key


def _framework() -> str:
    try:
        arrays.imported("torch")
    except P2PKVError:
        return "numpy"
    return "torch"


def _storable(tensor: Any) -> Any:
    """Raises InvalidArgument for what is no tensor."""
    arrays.memory_of(tensor)
    return tensor


def _over(framework: str, name: bytes, target: memoryview, size: int) -> Any:
    view = target[:size]
    try:
        header = decode(view, size, f"key {name!r}")
        return arrays.host_array(framework, header, view[size - header.layout.nbytes :])
    except P2PKVError as e:
        return e


def _shards(key: str, tensor: Any, size: int, dimension: int) -> tuple[list[str], list[Any]]:
    """Keys and shards. Parts are as even as they can be, the last ones smaller, as torch's chunks.

    Raises InvalidArgument.
    """
    _storable(tensor)
    if size <= 1:
        return [key], [tensor]
    if not -len(tensor.shape) <= dimension < len(tensor.shape):
        raise InvalidArgument(f"split_dim = {dimension}: the tensor has {len(tensor.shape)}")
    dimension %= len(tensor.shape)
    extent = tensor.shape[dimension]
    step = -(-extent // size)
    if step * (size - 1) >= extent:
        raise InvalidArgument(f"tp_size = {size}: {extent} elements do not make so many shards")
    before = (slice(None),) * dimension
    shards = [tensor[(*before, slice(at, at + step))] for at in range(0, extent, step)]
    return [shard_key(key, rank, size) for rank in range(size)], shards
