"""The objects that callers pass in and get back. Pure."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class SoftPinAction(enum.Enum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(enum.Enum):
    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(enum.Enum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(enum.Enum):
    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(enum.Enum):
    PENDING = 0
    PROCESSING = 1
    SUCCESS = 2
    FAILED = 3


class ReplicateConfig:
    """How an object is to be kept. All fields may be set; pins are what p2pkv acts on.

    ``with_hard_pin`` and ``soft_pin_action`` (or its older form, ``with_soft_pin``) become the
    pins of p2pkv. The cluster decides how many copies there are and where: the other fields are
    taken and have no effect.
    """

    __slots__ = (
        "data_type", "dfs_replica_num", "group_ids", "nof_replica_num",
        "prefer_alloc_in_same_node", "preferred_nof_segments", "preferred_segments",
        "replica_num", "soft_pin_action", "soft_pin_ttl_ms", "with_hard_pin",
    )  # fmt: skip

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: int | None = None
        self.with_hard_pin = False
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: list[str] | None = None

    @property
    def preferred_segment(self) -> str:
        """The first of ``preferred_segments``."""
        return self.preferred_segments[0] if self.preferred_segments else ""

    @preferred_segment.setter
    def preferred_segment(self, name: str) -> None:
        self.preferred_segments = [name] if name else []

    @property
    def with_soft_pin(self) -> bool:
        """Whether ``soft_pin_action`` is ENABLE."""
        return self.soft_pin_action is SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, wanted: bool) -> None:
        self.soft_pin_action = SoftPinAction.ENABLE if wanted else SoftPinAction.PRESERVE

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {_shown(getattr(self, name))}" for name in self.__slots__)
        return f"ReplicateConfig: {{ {fields} }}"


def _shown(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else value


class BufferDescriptor(NamedTuple):
    """Where the bytes of a copy are; ``transport_endpoint`` names its node."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0
    protocol: str = "tcp"


class MemoryDescriptor(NamedTuple):
    buffer_descriptor: BufferDescriptor


class DiskDescriptor(NamedTuple):
    file_path: str
    object_size: int


class ReplicaDescriptor(NamedTuple):
    """One copy of an object, always whole and in memory."""

    memory: MemoryDescriptor
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return True

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return self.memory

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Raises RuntimeError: no copy is on disk."""
        raise RuntimeError("this copy is in memory")


class QueryTaskResponse(NamedTuple):
    """Never returned: there are no tasks to copy or to move objects."""

    id: tuple[int, int]
    type: TaskType
    status: TaskStatus
    created_at_ms_epoch: int
    last_updated_at_ms_epoch: int
    assigned_client: tuple[int, int]
    message: str
