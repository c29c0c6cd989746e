"""Which keys of a request may be served here and now: limits, ownership, fence and grants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pkv import answers, ring, wire
from p2pkv.config import Limits
from p2pkv.errors import ProtocolError
from p2pkv.replicas import Replicas
from p2pkv.sessions import Response
from p2pkv.wire import Fault, Kind, Status


class Admission:
    """Asked at every request. ``may_serve(now)`` is the self-fence rule."""

    def __init__(
        self,
        replicas: Replicas,
        limits: Limits,
        bucket_count: int,
        may_serve: Callable[[int], bool],
    ) -> None:
        self.limits = limits
        self.bucket_count = bucket_count
        self.primary = replicas.served
        """Buckets that this node is the primary of."""
        self.refused = 0
        """Requests that were refused as a whole."""
        self._replicas = replicas
        self._may_serve = may_serve

    def refuse(self, fault: Fault, message: str) -> Response:
        """The answer to a request that is not run."""
        self.refused += 1
        return Kind.ERROR, wire.Error(fault, message[:1024]), ()

    def admit(self, keys: Sequence[bytes], now: int) -> tuple[list[int], bytes]:
        """Buckets of the keys, and a status for each that may not be served (empty: all may)."""
        limits = self.limits
        if len(keys) > limits.batch_keys_max:
            raise ProtocolError(f"{len(keys)} keys, limit batch_keys_max = {limits.batch_keys_max}")
        if limits.key_bytes_max < wire.KEY_BYTES_MAX and keys:
            longest = max(map(len, keys))
            if longest > limits.key_bytes_max:
                raise ProtocolError(f"a key of {longest} bytes, limit {limits.key_bytes_max}")
        buckets = ring.buckets_of(keys, self.bucket_count)
        if self.all_readable(now) and self.primary.issuperset(buckets):
            return buckets, b""
        statuses = bytes([self.bucket_status(b, now) for b in buckets])
        return buckets, statuses if any(statuses) else b""

    def all_readable(self, now: int) -> bool:
        """Whether whatever this node is primary of may be read, fence and grants considered."""
        replicas = self._replicas
        granted = now < replicas.reads_until or now < replicas.read_limit(now)
        return granted and self._may_serve(now)

    def bucket_status(self, bucket: int, now: int) -> Status:
        """A node that is fenced still serves what living copies let it serve: then nobody starts
        the bucket anew."""
        replicas = self._replicas
        status = replicas.status(bucket, now)
        if not status and not self._may_serve(now) and not replicas.has_rivals(bucket):
            return Status.STALLED
        return status

    def each(
        self,
        keys: Sequence[bytes],
        now: int,
        run: Callable[[list[int], Sequence[int], Sequence[bytes]], Sequence[int]],
    ) -> tuple[int, Any, Sequence[Any]]:
        """Statuses of ``run(items, buckets, keys)`` for the keys that may be served."""
        buckets, refused = self.admit(keys, now)
        if not refused:
            statuses = run(list(range(len(keys))), buckets, keys)
            return answers.statuses(statuses)
        items = [i for i, status in enumerate(refused) if not status]
        merged = bytearray(refused)
        done = run(items, [buckets[i] for i in items], [keys[i] for i in items])
        for i, status in zip(items, done, strict=True):
            merged[i] = status
        return answers.statuses(merged)

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """Raises ProtocolError if one of the values is too large."""
        bound = self.limits.value_bytes_max
        if sizes and max(sizes) > bound:
            raise ProtocolError(f"a value of {max(sizes)} bytes, limit value_bytes_max = {bound}")
