"""Where objects are, and what one may ask for in vain."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.adapters.mooncake.codes import ErrorCode
from p2pkv.adapters.mooncake.tensors import TensorCalls
from p2pkv.adapters.mooncake.types import (
    BufferDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
)

Uuid = tuple[int, int]
NO_TASK: Uuid = (0, 0)


class ReplicaCalls(TensorCalls):
    """The cluster decides where copies are: tasks to copy or to move one are refused."""

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The copies of an object; empty for a miss and for every failure."""
        return self.batch_get_replica_desc([key])[key]

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The copies of each key."""
        sizes = self._sizes("get_replica_desc", keys)
        result: dict[str, list[ReplicaDescriptor]] = {key: [] for key in keys}
        there = [
            (key, size) for key, size in zip(keys, sizes, strict=True) if isinstance(size, int)
        ]
        if there:
            names = [self._name(key) for key, _ in there]
            places = self._ready().client.locate(names)
            for (key, size), place in zip(there, places, strict=True):
                node = str(place.member.node) if place is not None else ""
                memory = MemoryDescriptor(BufferDescriptor(size, node))
                result[key] = [ReplicaDescriptor(memory)]
        return result

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove objects, or those alone that lie on the node ``segment_name``: which were."""
        found = self.batch_get_replica_desc(keys)
        chosen = [
            key
            for key in keys
            if found[key]
            and segment_name
            in ("", found[key][0].get_memory_descriptor().buffer_descriptor.transport_endpoint)
        ]
        return [
            key for key, code in zip(chosen, self.batch_remove(chosen), strict=True) if code == 0
        ]

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[Uuid, int]:
        """Refused with -600."""
        return self._no_task("create_copy_task")

    def create_move_task(self, key: str, source: str, target: str) -> tuple[Uuid, int]:
        """Refused with -600."""
        return self._no_task("create_move_task")

    def query_task(self, task_id: Uuid) -> tuple[QueryTaskResponse | None, int]:
        """There is none: -704."""
        return None, int(ErrorCode.OBJECT_NOT_FOUND)

    def _no_task(self, what: str) -> tuple[Uuid, int]:
        self._notices.tell(what, "refused", "the cluster decides where copies are")
        return NO_TASK, int(ErrorCode.INVALID_PARAMS)
