"""Values in memory that the caller has registered, by address: zero copy, batches, ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from p2pkv.adapters.mooncake.codes import codes, sizes
from p2pkv.adapters.mooncake.memory import check_mapped
from p2pkv.adapters.mooncake.types import ReplicateConfig
from p2pkv.adapters.mooncake.values import ValueCalls
from p2pkv.errors import InvalidArgument, P2PKVError

Addresses = Sequence[int]


class PointerCalls(ValueCalls):
    """An address outside of registered memory is refused with -600, for its key alone."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Let addresses within this memory be used. 0, or -600: it is no memory that can be read,
        or overlaps what is registered."""
        try:
            self._ready()
            check_mapped(buffer_ptr, size)
            self._memory.register(buffer_ptr, size)
        except P2PKVError as e:
            return self._refuse("register_buffer", e)
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0, or -600 where no registered memory begins there."""
        try:
            self._memory.unregister(buffer_ptr)
        except P2PKVError as e:
            return self._refuse("unregister_buffer", e)
        return 0

    # -- one key

    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """``put`` of ``size`` bytes there."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """``put_from`` that replaces."""
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """``put`` of the metadata and, after it, the data, as one value."""
        return self.batch_put_from_multi_buffers(
            [key], [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]], config
        )[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """The value's size, once it lies there; or a negative code, where ``size`` is less, too."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    # -- batches

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Addresses,
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``put_from`` of many: the code of each."""
        return self._put_from("batch_put_from", keys, buffer_ptrs, sizes, config, True)

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Addresses,
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``upsert_from`` of many."""
        return self._put_from("batch_upsert_from", keys, buffer_ptrs, sizes, config, False)

    def _put_from(
        self,
        what: str,
        keys: Sequence[str],
        buffer_ptrs: Sequence[Any],
        sizes: Sequence[Any],
        config: ReplicateConfig | None,
        if_absent: bool,
    ) -> list[int]:
        options = self._options(config)
        outcomes = self._batch(
            what, keys, (buffer_ptrs, sizes), self._source,
            lambda cache, names, values: cache.store(
                names, values, if_absent=if_absent, **options
            ),
        )  # fmt: skip
        return codes(outcomes)

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Addresses, sizes: Sequence[int]
    ) -> list[int]:
        """``get_into`` of many: size or code of each."""
        return self._get_into("batch_get_into", keys, buffer_ptrs, sizes)

    def _get_into(
        self, what: str, keys: Sequence[str], buffer_ptrs: Sequence[Any], room: Sequence[Any]
    ) -> list[int]:
        outcomes = self._batch(
            what, keys, (buffer_ptrs, room), self._target,
            lambda cache, names, targets: cache.load(names, targets),
        )  # fmt: skip
        return sizes(outcomes)

    # -- several buffers a key

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Addresses],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``put`` of values that lie in several places, gathered: the code of each."""
        what = "batch_put_from_multi_buffers"
        return self._put_from(what, keys, all_buffer_ptrs, all_sizes, config, True)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Addresses],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """``get_into`` of values that are scattered over several places: size or code of each."""
        return self._get_into("batch_get_into_multi_buffers", keys, all_buffer_ptrs, all_sizes)

    # -- addresses to memory

    def _source(self, address: Any, size: Any) -> memoryview | list[memoryview]:
        place = self._target(address, size)
        return self._value(place) if isinstance(place, memoryview) else self._parts(place)

    def _target(self, address: Any, size: Any) -> memoryview | list[memoryview]:
        """One address and size, or several. Raises InvalidArgument."""
        if isinstance(address, int):
            return self._memory.view(address, size)
        if len(address) != len(size):
            raise InvalidArgument(f"{len(address)} addresses for {len(size)} sizes")
        return [self._memory.view(a, s) for a, s in zip(address, size, strict=True)]

    # -- ranges of values

    def get_into_ranges(
        self,
        buffer_ptrs: Addresses,
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """For each buffer, each of its keys, and each range of that: bytes copied, or a code.

        A range is ``size`` bytes of the value from ``src_offset`` on, which go to ``dst_offset``
        of the buffer.
        """
        results = _frame(all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        lists = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        if any(len(each) != len(buffer_ptrs) for each in lists):
            return results
        ranges = list(_ranges(results, buffer_ptrs, *lists))
        outcomes = self._read_ranges(
            "get_into_ranges",
            [r[3] for r in ranges],
            [r[4] for r in ranges],
            [r[5] for r in ranges],
        )
        for (buffer, key, i, *_), outcome in zip(ranges, outcomes, strict=True):
            results[buffer][key][i] = outcome
        return results

    def _read_ranges(
        self,
        what: str,
        keys: Sequence[str],
        places: Sequence[tuple[int, int]],
        sources: Sequence[tuple[int, int]],
    ) -> list[int]:
        """Bytes of values (offset and size) to memory (address and size): sizes, or codes."""

        def prepare(place: tuple[int, int], source: tuple[int, int]) -> tuple[Any, Any]:
            if min(source) < 0:
                raise InvalidArgument(f"range {source}: must not be negative")
            return self._memory.view(*place), source

        outcomes = self._batch(
            what, keys, (places, sources), prepare,
            lambda cache, names, prepared: cache.load(
                names, [target for target, _ in prepared], ranges=[r for _, r in prepared]
            ),
        )  # fmt: skip
        return sizes(outcomes)


_BAD = codes([InvalidArgument()])[0]


def _frame(
    all_keys: Sequence[Any], *lists: Sequence[Sequence[Sequence[int]]]
) -> list[list[list[int]]]:
    """A result for each range, all bad as yet. Where lists differ in length, the longest counts."""
    return [
        [
            [_BAD] * max((len(each[b][k]) for each in lists if b < len(each) and k < len(each[b])),
                         default=0)
            for k in range(len(keys))
        ]
        for b, keys in enumerate(all_keys)
    ]  # fmt: skip


def _ranges(
    results: list[list[list[int]]],
    buffer_ptrs: Addresses,
    all_keys: Sequence[Sequence[str]],
    all_dst: Sequence[Sequence[Sequence[int]]],
    all_src: Sequence[Sequence[Sequence[int]]],
    all_sizes: Sequence[Sequence[Sequence[int]]],
) -> Iterator[tuple[int, int, int, str, tuple[int, int], tuple[int, int]]]:
    """Of the lists that fit together: buffer, key, range; name, place in memory, part of value."""
    for b, pointer in enumerate(buffer_ptrs):
        if not len(all_keys[b]) == len(all_dst[b]) == len(all_src[b]) == len(all_sizes[b]):
            continue
        for k, name in enumerate(all_keys[b]):
            dst, src, room = all_dst[b][k], all_src[b][k], all_sizes[b][k]
            if not len(dst) == len(src) == len(room):
                continue
            for i, (to, start, size) in enumerate(zip(dst, src, room, strict=True)):
                yield b, k, i, name, (pointer + to, size), (start, size)
