"""Bulk bytes in native code: copies, checksums and sockets, one call per batch, without the GIL.

``available`` tells whether the extension was built. Where it was not, everything that uses it has
a way by the standard library; ``require`` raises for those who want no other.

A batch is a ``Pieces``: memory in any number of parts, taken as one run of bytes in their order.
A call holds its ``Pieces``, and they hold their buffers, which cannot be resized or unmapped
meanwhile.

Nothing that can happen on a socket is raised: transfers return ``(bytes, error)``, with bytes
counted from the start of the pieces, error 0 when all is done, else an errno, ETIMEDOUT at the
deadline, or CLOSED when the peer ended its side in good order; ``describe`` puts it in words. A
connection whose transfer failed is somewhere inside a message: close it. To interrupt a transfer
from another thread use ``shutdown`` on its socket, not ``close``. Deadlines are nanoseconds of
``time.monotonic_ns``.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Sequence
from errno import EFAULT, EINTR, ETIMEDOUT
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from p2pkv.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Batch: TypeAlias = "Pieces | Sequence[Buffer]"

ABI: Final = 4
CLOSED: Final = 4096
"""Error of a receive: the peer closed the connection before the end."""

STREAMING_MIN: Final = 4 << 20
"""From here on a copy goes around the caches, which halves its traffic. Source and target together
are then more than a core's own cache holds, so that memory is what a plain copy waits for."""

_ANYWHERE: Final = ctypes.c_size_t(-1).value
_missing: str | None = None
"""Why there is no extension."""

try:
    from p2pkv._native._core import ffi as _ffi
    from p2pkv._native._core import lib as _lib
except ImportError as e:
    _missing = str(e)
else:
    if ABI != _lib.P2PKV_ABI:
        _missing = f"it was built from other sources (version {_lib.P2PKV_ABI}, wanted {ABI})"

available: Final = _missing is None


def require() -> None:
    """Raises ConfigError, with how to build it, where the extension is missing."""
    if not available:
        raise ConfigError(
            f"p2pkv's native extension is not available: {_missing}. Install a C compiler and "
            "Python's headers, then reinstall: pip install --force-reinstall --no-deps "
            "--no-binary p2pkv p2pkv (in a source tree: pip install -e .)"
        )


class _Missing:
    """In the place of the extension: each use says how to build it."""

    def __getattr__(self, name: str) -> Any:
        require()
        raise AttributeError(name)


if not available:
    _ffi = _lib = _Missing()
core: Final[tuple[Any, Any]] = (_ffi, _lib)
"""For the modules of this package."""


def _python_function(which: int, *types: type) -> Callable[..., Any]:
    """A C function that wants the GIL; one that raises ConfigError without the extension."""
    if not available:
        return lambda *_: require()
    return ctypes.PYFUNCTYPE(ctypes.py_object, *types)(_lib.p2pkv_python_function(which))


_of_buffers = _python_function(0, ctypes.py_object, ctypes.c_int)
_of_places = _python_function(
    1, ctypes.c_size_t, ctypes.c_size_t, ctypes.py_object, ctypes.py_object
)
_of_part = _python_function(2, ctypes.c_size_t, ctypes.c_ssize_t, ctypes.c_ssize_t)
_free = _python_function(3, ctypes.c_size_t)
_buckets = _python_function(13, ctypes.py_object, ctypes.c_ulonglong)


def buckets_of(keys: list[bytes], bucket_count: int) -> list[int]:
    """The bucket of each key, see ``ring.bucket_of``. Raises TypeError for what is no key."""
    buckets: list[int] = _buckets(keys, bucket_count)
    return buckets


class Pieces:
    """Memory in parts, taken as one run of ``nbytes`` bytes. Not changed once made.

    Make it by ``sources``, ``targets``, ``raw`` or ``Region.pieces``.
    """

    __slots__ = ("_address", "_count", "_keep", "nbytes", "writable")

    def __init__(self, made: tuple[int, int], count: int, writable: bool, keep: object) -> None:
        self._address, self.nbytes = made
        self._count = count
        self._keep = keep
        self.writable = writable

    @classmethod
    def sources(cls, buffers: Sequence[Buffer]) -> Pieces:
        """Buffers to read from. Raises InvalidArgument unless each is one contiguous run."""
        return cls(_acquired(buffers, False), len(buffers), False, None)

    @classmethod
    def targets(cls, buffers: Sequence[Buffer]) -> Pieces:
        """Buffers to write to. Raises InvalidArgument also where one is read-only."""
        return cls(_acquired(buffers, True), len(buffers), True, None)

    @classmethod
    def raw(
        cls,
        addresses: Sequence[int],
        lengths: Sequence[int],
        *,
        writable: bool = True,
        keep: object = None,
    ) -> Pieces:
        """Memory by address, of which nothing is checked but that no address is 0.

        ``keep`` is held as long as the pieces are: whatever keeps the memory in place.
        """
        return cls(_placed(0, _ANYWHERE, addresses, lengths), len(addresses), writable, keep)

    def part(self, first: int, last: int) -> Pieces:
        """Pieces ``first`` up to, not including, ``last``; indices as in a slice."""
        first, last, _ = slice(first, last).indices(self._count)
        last = max(first, last)
        return Pieces(_of_part(self._address, first, last), last - first, self.writable, self)

    def __len__(self) -> int:
        return self._count

    def __del__(self, free: Callable[[int], object] = _free) -> None:
        address = getattr(self, "_address", 0)
        if address:
            free(address)


class Region:
    """One buffer of which batches take parts by offset: an arena, or an engine's pool.

    Offsets and lengths may come from a peer: those that do not lie within are refused.
    """

    __slots__ = ("_address", "_hold", "nbytes", "writable")

    def __init__(self, buffer: Buffer) -> None:
        require()
        self._hold = _ffi.from_buffer(buffer)
        self._address = int(_ffi.cast("uintptr_t", self._hold))
        self.nbytes = len(self._hold)
        self.writable = not memoryview(buffer).readonly

    def pieces(self, offsets: Sequence[int], lengths: Sequence[int]) -> Pieces:
        """The parts at these offsets, which hold the buffer. Raises InvalidArgument."""
        made = _placed(self._address, self.nbytes, offsets, lengths)
        return Pieces(made, len(offsets), self.writable, self._hold)


def copy(
    targets: Batch, sources: Batch, *, threads: int = 1, streaming_min: int = STREAMING_MIN
) -> None:
    """Copies the sources' run of bytes over the targets'; the parts may be cut differently.

    Targets and sources must not overlap. ``threads``: at most so many, each with at least 4 MiB;
    more than one pays only where one core cannot use up the memory's bandwidth. ``streaming_min``:
    see STREAMING_MIN. Raises InvalidArgument, with nothing copied, for totals that differ and
    targets that are read-only.
    """
    into, out_of = _targets(targets), _sources(sources)
    error = _lib.p2pkv_copy(into._address, out_of._address, threads, streaming_min)
    if error:
        raise InvalidArgument(
            "copy: an address is 0"
            if error == EFAULT
            else f"copy: targets of {into.nbytes} bytes, sources of {out_of.nbytes}"
        )


def checksums(batch: Batch, sizes: Sequence[int], *, portable: bool = False) -> list[int]:
    """XXH3 (64 bits) of each of the values, of these sizes, that the pieces hold in a row.

    The pieces may be cut in any way. ``portable`` does without the processor's vector instructions.
    Raises InvalidArgument if the sizes are not all that the pieces hold.
    """
    pieces = _sources(batch)
    lengths, sums = _sizes(sizes), array("Q", bytes(8 * len(sizes)))
    error = _lib.p2pkv_checksums(
        pieces._address,
        _ffi.from_buffer("uint64_t[]", lengths),
        len(lengths),
        _ffi.from_buffer("uint64_t[]", sums),
        portable,
    )
    if error:
        raise _refused("checksums", error, lengths, pieces)
    return sums.tolist()


def copy_checksums(
    targets: Batch, sources: Batch, sizes: Sequence[int], *, streaming_min: int = STREAMING_MIN
) -> list[int]:
    """``copy`` by one thread, and ``checksums`` of what the sources hold, in one pass."""
    into, out_of = _targets(targets), _sources(sources)
    lengths, sums = _sizes(sizes), array("Q", bytes(8 * len(sizes)))
    error = _lib.p2pkv_copy_checksums(
        into._address,
        out_of._address,
        _ffi.from_buffer("uint64_t[]", lengths),
        len(lengths),
        _ffi.from_buffer("uint64_t[]", sums),
        streaming_min,
    )
    if error:
        raise _refused("copy_checksums", error, lengths, into, out_of)
    return sums.tolist()


def _sizes(sizes: Sequence[int]) -> array[int]:
    try:
        return array("Q", sizes)
    except (TypeError, OverflowError) as e:
        raise InvalidArgument(f"sizes: {e}") from e


def _refused(what: str, error: int, sizes: array[int], *batches: Pieces) -> InvalidArgument:
    if error == EFAULT:
        return InvalidArgument(f"{what}: an address is 0")
    held = " and ".join(str(pieces.nbytes) for pieces in batches)
    return InvalidArgument(f"{what}: sizes of {sum(sizes)} bytes together, pieces of {held}")


def send_all(
    fd: int, batch: Batch, deadline_ns: int, spin_ns: int = 0, start: int = 0
) -> tuple[int, int]:
    """Sends everything from byte ``start`` on; ``(bytes, error)``.

    The socket may be in either mode. Before it sleeps it polls for ``spin_ns``. A deadline in the
    past allows what can be done without waiting.
    """
    pieces = _sources(batch)
    return _to_the_end(_lib.p2pkv_send_all, fd, pieces, start, deadline_ns, spin_ns)


def recv_all(
    fd: int, batch: Batch, deadline_ns: int, spin_ns: int = 0, start: int = 0
) -> tuple[int, int]:
    """Receives until the pieces are full; as ``send_all``."""
    pieces = _targets(batch)
    return _to_the_end(_lib.p2pkv_recv_all, fd, pieces, start, deadline_ns, spin_ns)


def send_some(fd: int, batch: Batch, start: int = 0) -> int:
    """One system call that does not wait: bytes sent, or the error, negative (``-EAGAIN``).

    At most 1,024 pieces are taken, so that less than the rest may be no sign of a full socket.
    """
    pieces = _sources(batch)  # held by its name until the call is over
    sent: int = _lib.p2pkv_send_some(fd, pieces._address, start)
    return sent


def recv_some(fd: int, batch: Batch, start: int = 0) -> int:
    """One system call that does not wait: bytes received, or the error, negative."""
    pieces = _targets(batch)
    received: int = _lib.p2pkv_recv_some(fd, pieces._address, start)
    return received


class Exchange:
    """Requests on one connection, one at a time, each with the head of its answer.

    An answer is a prefix ``<IQ`` (head length, payload length), the head, and the payload, which is
    left on the socket for ``recv_all``. The head is received into ``head``, one writable buffer
    whose size is the limit.
    """

    __slots__ = ("_head", "_state")

    def __init__(self, head: Buffer) -> None:
        require()
        self._head = Pieces.targets([head])
        self._state = _ffi.new("p2pkv_exchange *")

    def call(self, fd: int, request: Batch | None, deadline_ns: int, spin_ns: int = 0) -> int:
        """Sends the request (None: nothing) and receives prefix and head; the error, or 0.

        EMSGSIZE: the head is larger than the buffer; ``head_length`` tells. While the request is
        sent there is no spin.
        """
        pieces = None if request is None else _sources(request)
        address = 0 if pieces is None else pieces._address
        state, head = self._state, self._head._address
        state.sent = state.received = 0
        while True:
            error: int = _lib.p2pkv_call(fd, address, head, state, deadline_ns, spin_ns)
            if error != EINTR:
                return error

    @property
    def sent(self) -> int:
        """Bytes of the request that have left: 0 means that the peer cannot have seen any."""
        return int(self._state.sent)

    @property
    def head_length(self) -> int:
        """Bytes of the head, as the prefix says. Meaningless after errors other than EMSGSIZE."""
        return int(self._state.head_length)

    @property
    def payload_length(self) -> int:
        """Bytes of the payload, as the prefix says: not checked against anything."""
        return int(self._state.payload_length)


def describe(error: int) -> str:
    """An error of a transfer, of either sign, in words."""
    error = abs(error)
    if error == CLOSED:
        return "the peer closed the connection"
    return "the deadline has passed" if error == ETIMEDOUT else os.strerror(error)


def _to_the_end(
    transfer: Callable[..., Any],
    fd: int,
    pieces: Pieces,
    start: int,
    deadline_ns: int,
    spin_ns: int,
) -> tuple[int, int]:
    """Goes on after each signal: its handler has run in between, and may have raised."""
    while True:
        made = transfer(fd, pieces._address, start, deadline_ns, spin_ns)
        start, error = made.bytes, made.error
        if error != EINTR:
            return start, error


def _sources(batch: Batch) -> Pieces:
    return batch if isinstance(batch, Pieces) else Pieces.sources(batch)


def _targets(batch: Batch) -> Pieces:
    if not isinstance(batch, Pieces):
        return Pieces.targets(batch)
    if not batch.writable:
        raise InvalidArgument("targets: the pieces are read-only")
    return batch


def _acquired(buffers: Sequence[Buffer], writable: bool) -> tuple[int, int]:
    try:
        made: tuple[int, int] = _of_buffers(buffers, writable)
    except ConfigError:
        raise
    except (BufferError, TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(_refusal(buffers, writable, e)) from e
    return made


def _refusal(buffers: Any, writable: bool, error: Exception) -> str:
    """Which buffer it is, and what is wrong with it."""
    if isinstance(buffers, Sequence):
        for i, buffer in enumerate(buffers):
            try:
                view = memoryview(buffer)
            except (BufferError, TypeError, ValueError) as e:
                return f"buffers[{i}]: {e}"
            if not view.c_contiguous:
                return f"buffers[{i}]: not contiguous"
            if writable and view.readonly:
                return f"buffers[{i}]: read-only, cannot be a target"
    return f"buffers: {error}"


def _placed(
    base: int, limit: int, offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[int, int]:
    try:
        made: tuple[int, int] = _of_places(base, limit, offsets, lengths)
    except ConfigError:
        raise
    except (IndexError, TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(f"addresses, lengths: {e}") from e
    return made
