"""The interface of Mooncake Store, for programs that were written for it.

``MooncakeDistributedStore`` has the signatures and return codes of ``mooncake.store`` 0.3.13 that
engines and their users rely on, over a p2pkv cluster. ``p2pkv mooncake-shim -- command`` lets
``from mooncake.store import MooncakeDistributedStore`` mean this class.
"""

from p2pkv.adapters.mooncake.codes import ErrorCode
from p2pkv.adapters.mooncake.memory import BufferHandle, MooncakeHostMemAllocator
from p2pkv.adapters.mooncake.store import MooncakeDistributedStore, bind_to_numa_node
from p2pkv.adapters.mooncake.types import (
    BufferDescriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)

__all__ = [
    "BufferDescriptor",
    "BufferHandle",
    "DiskDescriptor",
    "ErrorCode",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "QueryTaskResponse",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "bind_to_numa_node",
]
