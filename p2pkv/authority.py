"""The authority: who decides which buckets exist, who owns them, and which nodes there are.

``Authority`` is what the rest of p2pkv relies on; ``EtcdAuthority`` keeps it in etcd. Every change
is guarded by what the caller has seen, so that of two contenders one learns that it lost. Nothing
here grants mutual exclusion by time: whoever acts on a record puts its epoch into each message, and
the receiver checks it.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from p2pkv import etcd_buckets, etcd_view
from p2pkv.clock import Clock, monotonic
from p2pkv.config import EtcdConfig
from p2pkv.errors import ClusterMismatch, InvalidArgument
from p2pkv.etcd import EtcdClient, LeaseLost, delete, get, if_revision, if_value, put
from p2pkv.etcd_buckets import Outcome, Result
from p2pkv.etcd_session import Session
from p2pkv.records import BucketChange, Delta, Meta, NodeRecord, View
from p2pkv.types import BootId, Member, NodeId


class Authority(Protocol):
    """What a node needs. Each method raises AuthorityUnavailable if there is no definite answer."""

    async def open(self) -> None:
        """Make ready; succeeds even while the authority is down."""

    async def close(self) -> None:
        """Let go of everything. A session runs out by itself: see ``deregister``."""

    async def ensure_meta(self, wanted: Meta) -> Meta:
        """Create the cluster with these parameters, or join the one that exists.

        Returns the parameters in force: replication_factor, min_in_sync and fingerprint are those
        of the existing cluster. Raises ClusterMismatch if its bucket_count, hash_scheme or
        format_version is another.
        """
        ...

    async def register(self, node: NodeId, record: NodeRecord) -> BootId:
        """Start a new life of ``node``: its next boot, and ``record`` with it under a session.

        Waits up to the session's TTL + 2 s for a predecessor's session to run out. Raises
        ConfigError if it does not: then another live process has this node id. The session is
        kept alive, and renewed with the same boot if it is lost, until ``close``.
        """
        ...

    async def update_node(self, **changes: Any) -> None:
        """Publish other values in our record (``draining=True``). Raises Conflict if superseded."""

    async def deregister(self) -> None:
        """End the session now."""

    async def load(self) -> View:
        """Everything, at one revision."""
        ...

    def follow(self, view: View) -> AsyncIterator[Delta]:
        """The changes after ``view``, without end and without a gap.

        Close it (``contextlib.aclosing``) when done.
        """
        ...

    async def update_buckets(self, changes: Sequence[BucketChange]) -> list[Outcome]:
        """Change buckets, each under its own guard; outcomes in the order of ``changes``."""
        ...

    async def campaign(self, member: Member) -> bool:
        """Whether ``member`` is the planner now, under our session. May be called repeatedly."""
        ...

    async def resign(self) -> None:
        """Stop being the planner, if we are."""

    async def forget(self, node: NodeId) -> BootId:
        """The operator's word that no life of ``node`` so far comes back; returns the new boot.

        A process that is still there as that node becomes ``superseded``. Raises InvalidArgument
        for a node that was never registered.
        """
        ...

    @property
    def superseded(self) -> bool:
        """Our boot is no longer the highest of our node: stop."""
        ...

    @property
    def contact_ns(self) -> int:
        """The latest time at which our session was certainly alive: when a request was *sent*
        whose answer showed it. Monotonic; 0 before the first.

        Stands still once the session was lost and renewed, until ``affirm``.
        """
        ...

    def affirm(self, asked_ns: int) -> None:
        """After a renewal: all records that we own were written again, beginning at ``asked_ns``.

        So whoever decided before that our buckets start again fails at their guards.
        """

    @property
    def last_contact_ns(self) -> int | None:
        """When the latest answered request was sent, monotonic; None before the first."""
        ...


class EtcdAuthority:
    """The authority in etcd, below ``/p2pkv/<cluster>/``.

    ``on_superseded`` is called once, ``on_renewed`` whenever the session was lost and made anew,
    both from the event loop. The session is renewed, and so ``contact_ns``, at least each
    ``contact_every_s``. Raises ConfigError for a bad configuration. See Authority for the
    methods.
    """

    def __init__(
        self,
        config: EtcdConfig,
        cluster: str,
        *,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
        on_superseded: Callable[[], None] = lambda: None,
        on_renewed: Callable[[], None] = lambda: None,
        contact_every_s: float = math.inf,
    ) -> None:
        self._cluster = cluster
        self._keys = etcd_view.Keys(cluster)
        self._decoder = etcd_view.Decoder(self._keys)
        self._rng = rng or random.Random()
        self._client = EtcdClient(config, clock, self._rng)
        self._session = Session(
            self._client,
            self._keys,
            config.session_ttl_s,
            clock,
            self._rng,
            on_superseded,
            on_renewed,
            contact_every_s,
        )
        self._node = NodeId("")
        self._campaigned: bytes = b""

    @property
    def last_contact_ns(self) -> int | None:
        """See EtcdClient.last_contact_ns."""
        return self._client.last_contact_ns

    @property
    def contact_ns(self) -> int:
        """See Authority."""
        return self._session.contact_ns

    def affirm(self, asked_ns: int) -> None:
        self._session.affirm(asked_ns)

    @property
    def superseded(self) -> bool:
        """Our boot is no longer the highest of our node."""
        return self._session.superseded

    @property
    def malformed_records(self) -> int:
        """Records in etcd that were passed over because they could not be read."""
        return self._decoder.malformed

    @property
    def session_losses(self) -> int:
        """How often the session was lost while this process lived."""
        return self._session.losses

    async def open(self) -> None:
        await self._client.open()

    async def close(self) -> None:
        await self._session.close()
        await self._client.close()

    async def __aenter__(self) -> EtcdAuthority:
        await self.open()
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.close()

    # -- the cluster

    async def ensure_meta(self, wanted: Meta) -> Meta:
        key = self._keys.meta
        done = await self._client.txn(
            [if_revision(key, 0)], [put(key, msgspec.json.encode(wanted))], [get(key)]
        )
        if done.succeeded:
            return wanted
        return _joined(self._cluster, done.reads[0][0].value, wanted)

    async def load(self) -> View:
        view = await etcd_view.load(self._client, self._keys, self._decoder, View())
        self._observe_boots(view.boots)
        return view

    async def follow(self, view: View) -> AsyncGenerator[Delta, None]:
        changes = etcd_view.follow(
            self._client, self._keys, self._decoder, view, self._rng, self._observe_boots
        )
        async with aclosing(changes):
            async for delta in changes:
                yield delta

    async def update_buckets(self, changes: Sequence[BucketChange]) -> list[Outcome]:
        return await etcd_buckets.update(self._client, self._keys, self._decoder, changes)

    # -- nodes

    async def register(self, node: NodeId, record: NodeRecord) -> BootId:
        self._node = node
        return await self._session.register(node, record)

    async def update_node(self, **changes: Any) -> None:
        await self._session.update(changes)

    async def deregister(self) -> None:
        await self._session.end()

    def _observe_boots(self, boots: Mapping[NodeId, BootId | None]) -> None:
        if self._node in boots:
            self._session.observe(boots[self._node])

    async def forget(self, node: NodeId) -> BootId:
        """Repeating it after an unknown outcome is harmless: any boot above the one that was read
        is the proof that is wanted, whoever wrote it."""
        key = self._keys.boot(node)
        kv = await self._client.get(key)
        if kv is None:
            raise InvalidArgument(f"node {node!r} was never registered in {self._cluster!r}")
        boot = BootId(etcd_view.boot_of(kv) + 1)
        done = await self._client.txn(
            [if_revision(key, kv.mod_revision)], [put(key, b"%d" % boot)], [get(key)]
        )
        return boot if done.succeeded else etcd_view.boot_of(done.reads[0][0])

    # -- the planner

    async def campaign(self, member: Member) -> bool:
        key, lease = self._keys.planner, self._session.lease
        value = msgspec.json.encode(member)
        try:
            done = await self._client.txn(
                [if_revision(key, 0)], [put(key, value, lease)], [get(key)]
            )
        except LeaseLost:
            return False
        ours = done.succeeded or any(
            kv.lease == lease and kv.value == value for kv in done.reads[0]
        )
        self._campaigned = value if ours else b""
        return ours

    async def resign(self) -> None:
        if self._campaigned:
            key = self._keys.planner
            await self._client.txn([if_value(key, self._campaigned)], [delete(key)])
            self._campaigned = b""


class _Format(msgspec.Struct):
    """The one field that every version of Meta has."""

    format_version: int


def _joined(cluster: str, text: bytes, wanted: Meta) -> Meta:
    """The parameters of the existing cluster, if they fit. Raises ClusterMismatch."""
    try:
        _compare(cluster, msgspec.json.decode(text, type=_Format), wanted, "format_version")
        existing = msgspec.json.decode(text, type=Meta)
    except msgspec.DecodeError as e:
        raise ClusterMismatch(
            f"cluster {cluster!r}: its meta record in etcd cannot be read ({e}); repair it, "
            "or set another cluster name"
        ) from None
    _compare(cluster, existing, wanted, "bucket_count")
    _compare(cluster, existing, wanted, "hash_scheme")
    return existing


def _compare(cluster: str, existing: Meta | _Format, wanted: Meta, field: str) -> None:
    theirs, ours = getattr(existing, field), getattr(wanted, field)
    if theirs == ours:
        return
    remedy = (
        f"set bucket_count = {theirs} here"
        if field == "bucket_count"
        else "run the version of p2pkv that created it"
    )
    raise ClusterMismatch(
        f"cluster {cluster!r} was created with {field} = {theirs!r}, this node has {ours!r}: "
        f"{remedy}, or set another cluster name"
    )


async def discover(config: EtcdConfig, cluster: str) -> View:
    """Read the cluster's state once. Raises AuthorityUnavailable, ConfigError."""
    async with EtcdAuthority(config, cluster) as authority:
        return await authority.load()


__all__ = ["Authority", "Delta", "EtcdAuthority", "Outcome", "Result", "discover"]
