"""A thin asyncio client of etcd's v3 API, for what p2pkv needs of it.

It differs from a general client in what it promises under failure:

* Several endpoints. One is asked at a time; the one that fails or stays silent for
  ``attempt_timeout_s`` is left for the next, so a stopped or cut-off member costs one attempt.
* Each call ends within ``total_timeout_s``, with a definite answer or AuthorityUnavailable.
* A watch loses no event: it resumes after the last *delivered* event, never at a revision from a
  header (which may be ahead of events still to come).
* ``last_contact_ns`` may be relied on for fencing.

**Calls whose outcome is unknown.** An attempt without an answer may or may not have been carried
out. It is repeated, unchanged, until an answer comes or time is up. For reads this is harmless; for
a transaction it is safe only if it is *guarded*: its guard must fail once its own puts are done
(``if_revision(key, r)`` and a put of that key, say), so that it is carried out at most once,
whichever attempt arrives first. The price is that a failed guard may be the work of an earlier
attempt of this same call. ``Txn.repeated`` says that there was one. The caller reads, in the
failure branch, what stands there now; a value that it alone can have written means that it won.
After AuthorityUnavailable the last attempt may still be carried out later: issue the same guarded
transaction again to find out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc
import grpc.aio

from p2pkv import _etcd_pb2 as pb
from p2pkv.clock import SECOND_NS, Clock, monotonic, seconds
from p2pkv.config import EtcdConfig
from p2pkv.errors import AuthorityUnavailable, ConfigError, InvalidArgument
from p2pkv.etcd_channels import Answer, Channels, Metadata, Rpc
from p2pkv.etcd_watch import Broken, Compacted, Denied, WatchStream, prefix_end

log = logging.getLogger(__name__)

OPERATIONS_MAX = 128
"""etcd's default limit for the guards, and for the operations, of one transaction."""
REQUEST_BYTES_MAX = 1536 * 1024
"""etcd's default limit for one request."""
PAGE_KEYS = 1000
_RESTARTED_READS_MAX = 3
_DENIALS_MAX = 2

# A member that has lost the quorum then answers with an error at once, and ends its watches.
_REQUIRE_LEADER = ("hasleader", "true")


class LeaseLost(Exception):
    """The lease does not exist (any more), and with it none of its keys."""


class Lease(NamedTuple):
    """A granted lease: keys put under it vanish ``ttl_s`` after the last keep-alive."""

    id: int
    ttl_s: int


class Range(NamedTuple):
    """Keys and values as of ``revision``."""

    revision: int
    kvs: list[pb.KeyValue]


class Txn(NamedTuple):
    """What became of a transaction."""

    succeeded: bool
    """Whether the guards held, so that the success branch was carried out."""
    revision: int
    """The store's revision then; after a put, the ``mod_revision`` of what was put."""
    reads: list[list[pb.KeyValue]]
    """The answer to each operation of the branch: what a ``get`` found, else nothing."""
    repeated: bool
    """An earlier attempt of this call may have been carried out."""


# -- building blocks of transactions


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Write ``key``."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def get(key: bytes) -> pb.RequestOp:
    """Read ``key``."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def delete(key: bytes) -> pb.RequestOp:
    """Delete ``key``."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def if_revision(key: bytes, revision: int) -> pb.Compare:
    """Guard: ``key`` was last changed at ``revision``; 0: it does not exist."""
    return pb.Compare(
        key=key, target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=revision
    )


def if_value(key: bytes, value: bytes) -> pb.Compare:
    """Guard: ``key`` exists and has this value."""
    return pb.Compare(key=key, target=pb.Compare.VALUE, result=pb.Compare.EQUAL, value=value)


# -- the client


_RANGE = Rpc("KV/Range", pb.RangeResponse)
_PUT = Rpc("KV/Put", pb.PutResponse)
_DELETE = Rpc("KV/DeleteRange", pb.DeleteRangeResponse)
_TXN = Rpc("KV/Txn", pb.TxnResponse)
_COMPACT = Rpc("KV/Compact", pb.CompactionResponse)
_GRANT = Rpc("Lease/LeaseGrant", pb.LeaseGrantResponse)
_REVOKE = Rpc("Lease/LeaseRevoke", pb.LeaseRevokeResponse)
_KEEP_ALIVE = Rpc("Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
_AUTHENTICATE = Rpc("Auth/Authenticate", pb.AuthenticateResponse)
_STATUS = Rpc("Maintenance/Status", pb.StatusResponse)

Attempt = Callable[[Any, float, Metadata], Awaitable[Answer]]
"""One try: over this channel, with this timeout in seconds and this metadata."""


class EtcdClient:
    """Talks to one etcd cluster. ``open`` it in the event loop that uses it, and ``close`` it.

    Each call raises AuthorityUnavailable when no endpoint gave a definite answer within
    ``config.total_timeout_s`` (or ``total_s``), ConfigError when etcd refuses the user, and
    InvalidArgument when it refuses the request. Raises ConfigError for a bad configuration.
    """

    def __init__(
        self,
        config: EtcdConfig,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng or random.Random()
        self._endpoints = Channels(config)
        self._targets = self._endpoints.targets
        self._channels: list[Any] = []
        self._preferred = self._rng.randrange(len(self._targets))
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        self._last_contact_ns: int | None = None
        self._closed = False

    @property
    def last_contact_ns(self) -> int | None:
        """When the latest answered request was *sent*, monotonic; None before the first one.

        Only answers that need the cluster's leader count: reads, transactions, leases and their
        keep-alives; no refusals and nothing from watches. Hence the leader was there at that time
        or later. (A leader that is being deposed may answer keep-alives for one more election
        timeout, about a second; limits derived from this need that much slack.)
        """
        return self._last_contact_ns

    async def open(self) -> None:
        """Make the channels. Sends nothing, so it succeeds even while etcd is down."""
        self._channels = self._endpoints.open()

    async def close(self) -> None:
        """Close the channels. Calls under way end with AuthorityUnavailable."""
        self._closed = True
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> EtcdClient:
        await self.open()
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.close()

    # -- keys

    async def get(self, key: bytes) -> pb.KeyValue | None:
        """A linearizable read of one key."""
        answer, _ = await self._unary(_RANGE, pb.RangeRequest(key=key))
        return answer.kvs[0] if answer.kvs else None

    async def get_prefix(self, prefix: bytes) -> Range:
        """All keys that begin with ``prefix``, as of one revision, read in pages."""
        for _ in range(_RESTARTED_READS_MAX):
            try:
                return await self._read_pages(prefix)
            except Compacted:
                continue  # compacted between two pages: the next try reads a newer revision
        raise AuthorityUnavailable(f"{prefix!r} was compacted again and again while it was read")

    async def _read_pages(self, prefix: bytes) -> Range:
        start, end, revision = prefix, prefix_end(prefix), 0
        kvs: list[pb.KeyValue] = []
        while True:
            request = pb.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS, revision=revision)
            answer, _ = await self._unary(_RANGE, request)
            revision = revision or answer.header.revision
            kvs.extend(answer.kvs)
            if not answer.more or not answer.kvs:
                return Range(revision, kvs)
            start = answer.kvs[-1].key + b"\0"

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write a key; returns the revision. May be carried out more than once."""
        answer, _ = await self._unary(_PUT, pb.PutRequest(key=key, value=value, lease=lease))
        return answer.header.revision

    async def delete(self, key: bytes) -> int:
        """Delete a key; returns the revision. May be carried out more than once."""
        answer, _ = await self._unary(_DELETE, pb.DeleteRangeRequest(key=key))
        return answer.header.revision

    async def txn(
        self,
        guards: Sequence[pb.Compare],
        success: Sequence[pb.RequestOp],
        failure: Sequence[pb.RequestOp] = (),
        *,
        total_s: float | None = None,
    ) -> Txn:
        """Carry out ``success`` if all guards hold, else ``failure``; at most 128 of each.

        Repeated until the outcome is definite: see the module's text for what that asks of the
        guards. Raises LeaseLost if a put names a lease that is gone.
        """
        request = pb.TxnRequest(compare=guards, success=success, failure=failure)
        answer, repeated = await self._unary(_TXN, request, total_s)
        reads = [list(r.response_range.kvs) for r in answer.responses]
        return Txn(answer.succeeded, answer.header.revision, reads, repeated)

    async def compact(self, revision: int) -> None:
        """Forget all history before ``revision``. Raises Compacted if that is done already."""
        await self._unary(_COMPACT, pb.CompactionRequest(revision=revision, physical=True))

    async def status(self) -> pb.StatusResponse:
        """Version and size of the member that is asked at present."""
        answer, _ = await self._retry(_unary_attempt(_STATUS, pb.StatusRequest()), counts=False)
        return answer

    # -- leases

    async def grant(self, ttl_s: int) -> Lease:
        """A new lease; etcd may choose a longer time. A lost answer leaves one to run out."""
        answer, _ = await self._unary(_GRANT, pb.LeaseGrantRequest(TTL=ttl_s))
        return Lease(answer.ID, answer.TTL)

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. One that is gone already is no error."""
        try:
            await self._unary(_REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            return

    async def keep_alive(self, lease: int, *, total_s: float | None = None) -> int:
        """Renew a lease once; returns the seconds it has left: 0 if it is gone."""
        request = pb.LeaseKeepAliveRequest(ID=lease)

        async def attempt(
            channel: Any, timeout_s: float, metadata: Metadata
        ) -> pb.LeaseKeepAliveResponse:
            call = _KEEP_ALIVE.bind(channel.stream_stream)(timeout=timeout_s, metadata=metadata)
            try:
                await call.write(request)
                answer = await call.read()
            finally:
                call.cancel()
            if not isinstance(answer, pb.LeaseKeepAliveResponse):
                raise Broken("the keep-alive stream ended without an answer")
            return answer

        answer, _ = await self._retry(attempt, total_s)
        return max(0, answer.TTL)

    async def hold(
        self,
        lease: Lease,
        alive: Callable[[int], None] = lambda _: None,
        every_s: float = math.inf,
    ) -> None:
        """Keep a lease alive; returns when etcd says that it is gone, and only then.

        It is renewed after a third of its time, or after ``every_s`` if that is less.

        While etcd does not answer it goes on trying: the lease may have outlived the outage.
        ``alive`` is told, after each answer that shows the lease alive, when it was asked for.
        """
        pause_s = min(lease.ttl_s / 3, every_s)
        while True:
            await asyncio.sleep(pause_s * self._rng.uniform(0.8, 1.0))
            asked_ns = self._clock()
            try:
                ttl_s = await self.keep_alive(lease.id, total_s=lease.ttl_s)
            except AuthorityUnavailable as e:
                log.warning("lease %x was not renewed: %s", lease.id, e)
                pause_s = min(1.0, lease.ttl_s / 10)
                continue
            if ttl_s == 0:
                return
            alive(asked_ns)
            pause_s = min(ttl_s / 3, every_s)

    # -- watching

    async def watch(
        self, prefix: bytes, start_revision: int
    ) -> AsyncGenerator[list[pb.Event], None]:
        """Each change of keys under ``prefix`` from ``start_revision`` on, in order, once.

        A batch holds whole revisions. The watch goes on through lost members and outages, for as
        long as it is iterated: an endpoint that does not even answer a request for progress is
        left for the next. Close it (``contextlib.aclosing``) to end the stream at once. Raises
        Compacted when events it still has to deliver are gone, ConfigError when access is denied.
        """
        if start_revision < 1:
            # 0 means "now" to etcd: what happens while the watch is being resumed would be lost.
            raise InvalidArgument(f"start_revision = {start_revision}: must be at least 1")
        revision, failures, denials = start_revision, 0, 0
        while True:
            index = self._preferred
            stream: WatchStream | None = None
            try:
                metadata = await self._metadata(self._config.total_timeout_s)
                stream = WatchStream(self._channel(index), metadata, self._config)
                await stream.open(prefix, revision)
                denials = 0
                while True:
                    events = await stream.next_batch()
                    failures = 0
                    yield events
                    revision = events[-1].kv.mod_revision + 1
            except Denied as e:
                denials += 1
                self._renew_token(e, denials)
            except (Broken, AuthorityUnavailable, grpc.aio.AioRpcError) as e:
                self._refuse_closed()
                self._judge(e)
                log.info("watch of %r at %s: %s", prefix, self._targets[index], _reason(e))
            except asyncio.CancelledError:
                self._refuse_closed()
                raise
            finally:
                if stream is not None:
                    await stream.close()
            self._leave(index)
            await asyncio.sleep(self._pause_s(failures))
            failures += 1

    # -- one call, over several endpoints

    async def _unary(
        self, rpc: Rpc[Answer], request: object, total_s: float | None = None
    ) -> tuple[Answer, bool]:
        return await self._retry(_unary_attempt(rpc, request), total_s)

    async def _retry(
        self,
        attempt: Attempt[Answer],
        total_s: float | None = None,
        *,
        counts: bool = True,
        authenticate: bool = True,
    ) -> tuple[Answer, bool]:
        """The answer, and whether an earlier attempt remained without one."""
        end = self._clock() + seconds(total_s or self._config.total_timeout_s)
        failures, reason = 0, "no time for an attempt"
        while (left_s := (end - self._clock()) / SECOND_NS) > 0:
            index = self._preferred
            try:
                metadata = await self._metadata(left_s) if authenticate else (_REQUIRE_LEADER,)
                sent = self._clock()
                timeout_s = min(self._config.attempt_timeout_s, (end - sent) / SECOND_NS)
                answer = await attempt(self._channel(index), max(timeout_s, 0.001), metadata)
            except (Broken, grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
                self._refuse_closed()
                self._judge(e)
                reason = f"{self._targets[index]}: {_reason(e)}"
            except asyncio.CancelledError:
                self._refuse_closed()
                raise
            else:
                if counts:
                    self._last_contact_ns = max(sent, self._last_contact_ns or sent)
                return answer, failures > 0
            self._leave(index)
            left_s = max(0.0, (end - self._clock()) / SECOND_NS)
            await asyncio.sleep(min(self._pause_s(failures), left_s))
            failures += 1
        raise AuthorityUnavailable(
            f"etcd gave no answer in {total_s or self._config.total_timeout_s:g} s "
            f"and {failures} attempts; last: {reason}"
        )

    def _channel(self, index: int) -> Any:
        if not self._channels:
            raise AuthorityUnavailable("the etcd client is not open")
        return self._channels[index]

    def _leave(self, index: int) -> None:
        """Ask another endpoint from now on, unless somebody has moved on already."""
        if self._preferred == index:
            self._preferred = (index + 1) % len(self._targets)

    def _pause_s(self, failures: int) -> float:
        return min(0.05 * 2.0 ** min(failures, 10), 0.5) * self._rng.uniform(0.5, 1.0)

    def _refuse_closed(self) -> None:
        """End what is under way on a closed client. grpc reports a closed channel as a
        cancellation, which a task must not mistake for its own."""
        if not self._closed:
            return
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        raise AuthorityUnavailable("the etcd client was closed") from None

    # -- who we are

    async def _metadata(self, total_s: float) -> Metadata:
        if not self._config.user:
            return (_REQUIRE_LEADER,)
        if self._token is None:
            try:
                async with asyncio.timeout(total_s), self._authenticating:
                    if self._token is None:
                        self._token = await self._authenticate(total_s)
            except TimeoutError:
                raise AuthorityUnavailable("etcd did not authenticate us in time") from None
        return (_REQUIRE_LEADER, ("token", self._token)) if self._token else (_REQUIRE_LEADER,)

    async def _authenticate(self, total_s: float) -> str:
        request = pb.AuthenticateRequest(name=self._config.user, password=self._config.password)
        attempt = _unary_attempt(_AUTHENTICATE, request)
        try:
            answer, _ = await self._retry(attempt, total_s, authenticate=False)
        except _AuthenticationOffError:
            return ""
        return answer.token

    def _renew_token(self, error: Denied, denials: int) -> None:
        """A watch was denied: because the token is no longer known to a restarted member?"""
        if not self._config.user or denials > _DENIALS_MAX:
            self._denied(str(error))
        self._token = None

    def _judge(self, error: Exception) -> None:
        """Return if another attempt may help; else raise what the caller should see."""
        if not isinstance(error, grpc.aio.AioRpcError):
            return
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details:
            self._token = None
        elif details == _NO_USER and self._config.user:
            self._token = None  # authentication was switched on since we asked
        elif details == _AUTHENTICATION_OFF:
            raise _AuthenticationOffError from None
        elif code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
            raise Compacted from None
        elif code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            raise LeaseLost(details) from None
        elif code is grpc.StatusCode.PERMISSION_DENIED or details in _WRONG_USER:
            self._denied(details)
        elif code in _REFUSED:
            raise InvalidArgument(f"etcd refuses the request: {details}") from None

    def _denied(self, details: str) -> NoReturn:
        raise ConfigError(
            f"etcd.user = {self._config.user!r}: etcd denies access ({details})"
        ) from None


_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}
_AUTHENTICATION_OFF = "etcdserver: authentication is not enabled"
_NO_USER = "etcdserver: user name is empty"
_WRONG_USER = {
    _NO_USER,
    "etcdserver: authentication failed, invalid user ID or password",
}


class _AuthenticationOffError(Exception):
    """etcd has users but does not ask for them, or has none."""


def _unary_attempt(rpc: Rpc[Answer], request: object) -> Attempt[Answer]:
    async def attempt(channel: Any, timeout_s: float, metadata: Metadata) -> Answer:
        call = rpc.bind(channel.unary_unary)
        answer: Answer = await call(request, timeout=timeout_s, metadata=metadata)
        return answer

    return attempt


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error)


__all__ = [
    "Compacted",
    "EtcdClient",
    "Lease",
    "LeaseLost",
    "Range",
    "Txn",
    "delete",
    "get",
    "if_revision",
    "if_value",
    "prefix_end",
    "put",
]
