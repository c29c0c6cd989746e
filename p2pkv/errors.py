"""What can go wrong, each under its own name.

::

    P2PKVError
    ├── InvalidArgument (ValueError)  bad input; nothing was sent
    │   ├── TooLarge                  a key, value, batch or message over its limit
    │   ├── OutOfRange (IndexError)   a byte range reaches beyond the value; ``size`` is the value's
    │   ├── TensorMismatch            what is stored is not the tensor that was asked for
    │   └── ConfigError               a configuration field; names field, value and what is allowed
    ├── Miss (KeyError)               the key is not there (pin, unpin, expire, kv[key])
    ├── Unreachable (ConnectionError) no owner could be asked before the deadline
    ├── DeadlineExceeded (TimeoutError)  no answer in time; a read, or a write that cannot have run
    ├── Indeterminate                 a write that may or may not have run
    ├── NotEnoughReplicas             fewer copies in sync than asked for; it may be written
    ├── Stalled                       the owner is there but may not serve now (fenced, lost bucket)
    ├── OutOfMemory (MemoryError)     nothing evictable could make room
    │   └── QuotaExceeded             the quota of pinned bytes
    ├── CorruptValue                  bytes differ from what was written
    ├── Conflict                      an alloc, token or session that is no longer there
    ├── ProtocolError                 a peer does not speak this protocol or version
    ├── ClusterMismatch               the cluster was created with other fixed parameters
    ├── AuthorityUnavailable          etcd does not answer
    ├── DeviceError (RuntimeError)    a GPU's driver refused a copy
    ├── ForkedClient / ClosedClient   the client cannot be used here / any more
    └── BatchError                    some keys of a batch failed; ``results`` has each outcome

``may_have_taken_effect`` says whether the operation may have changed the store. Only Indeterminate
and NotEnoughReplicas (and a BatchError that holds one) have it set: all others promise that nothing
was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class P2PKVError(Exception):
    """Base of everything that p2pkv raises on purpose."""

    may_have_taken_effect: ClassVar[bool] = False

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class InvalidArgument(P2PKVError, ValueError):
    """An argument is not acceptable; the message names it and the limit. Nothing was sent."""


class TooLarge(InvalidArgument):
    """A key, value, batch or message is over its limit."""


class OutOfRange(InvalidArgument, IndexError):
    """A range of bytes reaches beyond the value, which has ``size`` bytes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.size: int = args[1] if len(args) > 1 else 0


class TensorMismatch(InvalidArgument):
    """The stored value is no tensor, or has another dtype or shape; the message names both."""


class ConfigError(InvalidArgument):
    """A configuration field has a value that is not allowed."""


class Miss(P2PKVError, KeyError):
    """The key is not in the store."""


class Unreachable(P2PKVError, ConnectionError):
    """The owner could not be reached before the deadline."""


class DeadlineExceeded(P2PKVError, TimeoutError):
    """No answer before the deadline; nothing was changed."""


class Indeterminate(P2PKVError):
    """The write was sent and no answer came: it may have taken effect, once, or may not have."""

    may_have_taken_effect = True


class NotEnoughReplicas(P2PKVError):
    """Fewer members in sync have the write, or could, than the cluster's ``min_in_sync`` or the
    call's ``min_replicas`` ask for. It may be written on those that are there."""

    may_have_taken_effect = True


class Stalled(P2PKVError):
    """The bucket's owner may not serve at the moment (fenced, lost, or being moved)."""


class OutOfMemory(P2PKVError, MemoryError):
    """No room, and nothing that could be evicted for it."""


class QuotaExceeded(OutOfMemory):
    """The quota of hard-pinned bytes is used up."""


class CorruptValue(P2PKVError):
    """The bytes are not those that were written. None of them are returned; what is left in a
    buffer of the caller's is not the value.

    ``key``, and ``place``: the node with bucket and offset in its arena, or the way from it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.key: bytes = args[1] if len(args) > 1 else b""
        self.place: str = args[2] if len(args) > 2 else ""


class Conflict(P2PKVError):
    """An allocation, token or session is not (or no longer) there."""


class ProtocolError(P2PKVError):
    """A peer sent what this version does not understand."""


class ClusterMismatch(P2PKVError):
    """The cluster exists with other fixed parameters; the message says which."""


class AuthorityUnavailable(P2PKVError):
    """etcd gave no definite answer before the deadline."""


class DeviceError(P2PKVError, RuntimeError):
    """The GPU's driver refused; the message has its reason."""


class ForkedClient(P2PKVError, RuntimeError):
    """A client was used in a process forked from the one that made it. Make a new one there."""


class ClosedClient(P2PKVError, RuntimeError):
    """The client was closed."""


class BatchError(P2PKVError):
    """Some keys of a batch failed.

    ``results`` has one entry for each key in the order of the call: what the call would have
    returned for it, or the exception. The message tells how many failed, and the first reason.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)
        failures = [r for r in self.results if isinstance(r, P2PKVError)]
        first = failures[0] if failures else None
        super().__init__(
            f"{len(failures)} of {len(self.results)} keys failed; first: "
            f"{type(first).__name__}: {first}"
        )
        self.failures = failures

    @property
    def indeterminate(self) -> bool:
        """Whether any key's write may or may not have taken effect."""
        return any(f.may_have_taken_effect for f in self.failures)
