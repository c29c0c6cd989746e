"""A node: puts the parts together, feeds them with events, and owns every task.

Nothing is decided here. How a request comes is in ``frontend``, what it does in ``handlers``, what
a record means in ``ownership``, where buckets belong in ``planner``, who may be trusted to be alive
in ``membership``; this module builds them, and carries their words between sockets and etcd.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from p2pkv import _native, clock, ring, wire
from p2pkv._native.index import Writer
from p2pkv.arena import Arena
from p2pkv.async_client import AsyncClient
from p2pkv.async_driver import AsyncDriver
from p2pkv.authority import Authority, EtcdAuthority
from p2pkv.checksums import ARRIVING
from p2pkv.comparing import Comparing
from p2pkv.config import ClientConfig, NodeConfig
from p2pkv.draining import Draining
from p2pkv.errors import AuthorityUnavailable, Conflict, P2PKVError
from p2pkv.fabric import Fabric, OneSided
from p2pkv.frontend import Frontend
from p2pkv.handlers import Handlers
from p2pkv.heartbeats import Heartbeats
from p2pkv.hostlock import HostLock
from p2pkv.journal import Journal
from p2pkv.leading import Settings, Timing
from p2pkv.learning import Learning
from p2pkv.listeners import Listeners
from p2pkv.liveness import PACKET, Liveness
from p2pkv.load import Load
from p2pkv.membership import HEARTBEAT, Contacts
from p2pkv.mover import Mover
from p2pkv.ownership import Ownership
from p2pkv.paths import Ability
from p2pkv.planner import PlannerLimits
from p2pkv.planning import Planning
from p2pkv.records import Meta, View
from p2pkv.replicas import BATCH_BYTES, Pace, Replicas
from p2pkv.replicated import TALK
from p2pkv.replicator import Replicator
from p2pkv.roster import Event, Left
from p2pkv.routing import Router
from p2pkv.scrub import Scrub
from p2pkv.sessions import Response, Session, Sessions
from p2pkv.store import Store
from p2pkv.swim import Swim
from p2pkv.swim_messages import Digest
from p2pkv.types import Member, NodeId
from p2pkv.wire import Checksums, Kind

log = logging.getLogger("p2pkv.node")

HOUSEKEEPING_S = 0.1
CONTACTS_PER_LIMIT = 4
"""So often a contact with etcd is made within ``peer_contact_s``, for others to know of it."""


class Node:
    """One node of a cluster. ``async with Node(config) as node:`` serves until the block ends.

    It holds ``memory_limit_bytes``, serves its share of the buckets, and offers the client's calls
    in process: ``node.client()``. Raises ConfigError, ClusterMismatch, AuthorityUnavailable from
    ``start``.
    """

    def __init__(self, config: NodeConfig, authority: Authority | None = None) -> None:
        self.config = config
        self.member: Member | None = None
        self.endpoint = ""
        self._authority = authority
        self._random = random.Random()
        self._stopping = asyncio.Event()
        self._renewed = asyncio.Event()
        self._ready: asyncio.Future[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._published: Writer | None = None
        self._started_ns = 0

    # -- life

    async def start(self) -> None:
        """Join the cluster; returns when this node answers requests."""
        self._ready = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._run(), name=f"p2pkv-node-{self.config.node_id}")
        ready = self._ready
        await asyncio.wait({self._main, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._main.done():
            ready.cancel()
            await self._main

    async def stop(self) -> None:
        """Leave at once; the buckets' content is lost. See ``drain``."""
        self._stopping.set()
        if self._main is not None:
            await self._main

    async def wait(self) -> None:
        """Until the node has stopped. Raises what ended it, if it was not ``stop``."""
        if self._main is not None:
            await asyncio.shield(self._main)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Give all buckets to the others, so that ``stop`` loses nothing.

        Returns whether that was reached; False after ``timeout_s`` (default: drain_timeout_s) or
        when nobody is there to take them.
        """
        limit = self.config.drain_timeout_s if timeout_s is None else timeout_s
        return await self._draining.drain(limit)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        await self.stop()

    # -- building up and taking down, in a fixed order

    async def _run(self) -> None:
        config = self.config
        authority = self._authority = self._authority or EtcdAuthority(
            config.etcd,
            config.cluster,
            on_superseded=self._stopping.set,
            on_renewed=self._renewed.set,
            contact_every_s=config.peer_contact_s / CONTACTS_PER_LIMIT,
        )
        await authority.open()
        try:
            meta = await authority.ensure_meta(
                Meta(
                    bucket_count=config.bucket_count,
                    hash_scheme=ring.HASH_SCHEME,
                    replication_factor=config.replication_factor,
                    min_in_sync=config.min_in_sync,
                    fingerprint=secrets.token_hex(8),
                )
            )
            lock = HostLock.acquire(meta.fingerprint, config.node_id)
            try:
                await self._run_alone(authority, meta)
            finally:
                lock.release()
        finally:
            await authority.close()

    async def _run_alone(self, authority: Authority, meta: Meta) -> None:
        config = self.config
        # On a thread: the session in etcd is to be kept alive meanwhile.
        arena = await asyncio.to_thread(
            Arena.create,
            config.memory_limit_bytes,
            config.node_id,
            huge_pages=config.huge_pages,
            prefault=config.prefault,
            index_bytes=config.index_bytes if _native.available else 0,
        )
        try:
            self._fabric = await Fabric.open(config.ucx, arena)
            try:
                self._published = publish_in(arena, meta.bucket_count)
                await self._run_with(authority, meta, arena)
            finally:
                self._hide()
                if self._fabric is not None:
                    await self._fabric.close()
        finally:
            arena.close()

    def _hide(self) -> None:
        """Whoever reads on its own asks from here on."""
        if self._published is not None:
            self._published.close()

    async def _run_with(self, authority: Authority, meta: Meta, arena: Arena) -> None:
        listeners = self._listeners = Listeners(
            self.config,
            meta.fingerprint.encode(),
            gossip=(
                {
                    HEARTBEAT: lambda frame: self._heartbeats.take(frame),
                    PACKET: lambda frame: self.liveness.take(frame),
                },
                lambda member: self.liveness.broke(member),
            ),
            talks=(
                {TALK: lambda frame: self._replicator.take(frame)},
                lambda member: self._replicator.broke(member),
            ),
            reads=self._published is not None,
        )
        try:
            self.endpoint = listeners.control_endpoint
            node = NodeId(self.config.node_id)
            boot = await authority.register(node, listeners.record())
            try:
                self.member = member = Member(node, boot)
                self._compose(authority, member, meta, arena, await authority.load())
                try:
                    await self._serve(authority)
                finally:
                    self._hide()
                    await self._driver.aclose()
            finally:
                await _quietly(authority.resign())
                await _quietly(authority.deregister())
        finally:
            listeners.close()

    def _compose(
        self, authority: Authority, member: Member, meta: Meta, arena: Arena, view: View
    ) -> None:
        """Make all parts, each of those that it stands on."""
        config, limits, listeners = self.config, self.config.limits, self._listeners
        self._contacts = Contacts(config, member)
        swim = Swim(config.swim, member, listeners.gossip_endpoint, self._random, clock.monotonic())
        self.liveness = Liveness(swim, listeners.gossip, self._digest)
        self.liveness.subscribe(self._on_member)
        self._heartbeats = Heartbeats(
            authority, self._contacts, self.liveness, listeners.gossip, config.heartbeat_s
        )
        self._ownership = Ownership(member, view, meta.fingerprint)
        self._router = Router()
        store, journal = self._keep(member, meta, arena)
        self._learning = Learning(store, self._replicas)
        self._learning.check = config.checksums in ARRIVING
        self._scrub = Scrub(store, give=config.checksums != "never")
        self._handlers = Handlers(
            journal, limits, meta.bucket_count, self._may_serve,
            {Kind.STATS: self._on_stats},
            ARRIVING.get(config.checksums, Checksums.NONE),
            config.view_quota_bytes,
            clock.seconds(config.ucx_quarantine_s),
        )  # fmt: skip
        self._frontend = Frontend(
            config, self._handlers, self._sessions, self._ownership, listeners.server,
            self._welcome(member, arena),
        )  # fmt: skip
        self._driver = AsyncDriver(
            ClientConfig(cluster=config.cluster, seeds=(self.endpoint,), limits=limits),
            self._router,
            listeners.context,
            member,
            self._frontend.local,
            lambda _: [],
            self._fabric.engine if self._fabric is not None else None,
        )
        self._mover = Mover(
            config, store, self._replicas, self._driver, self._random,
            lambda: self._replicator.wake(),
        )  # fmt: skip
        self._replicator = Replicator(
            config, journal, self._learning, self._ownership, self._driver, listeners.talks,
            self._mover, authority, self._random,
        )  # fmt: skip
        journal.wake = self._replicator.wake
        self._comparing = Comparing(config, journal, self._driver, self._random)
        self._load = Load(store, listeners.data, self._driver)
        self._planning = Planning(
            authority, self._ownership, self._contacts,
            PlannerLimits(rebuild_delay_s=config.rebuild_delay_s),
        )  # fmt: skip
        self._draining = Draining(authority, self._ownership, self._random)
        one_sided = OneSided(self._fabric, self._sessions, store)
        for part in (
            self._frontend, self._learning, self._scrub, self._comparing, self._draining, one_sided,
        ):  # fmt: skip
            self._handlers.answer_also(part.handlers)
        self._ownership.on_change = self._on_ring_change
        self._ownership.on_news = lambda news: self._replicas.adopt(news, clock.monotonic())
        self._register_contacts(gap=True)
        self._ownership.begin()

    def _keep(self, member: Member, meta: Meta, arena: Arena) -> tuple[Store, Journal]:
        """What holds the objects, and writes them on all copies."""
        config = self.config
        store = self._store = Store(
            arena,
            metadata_limit_bytes=config.metadata_bytes,
            hard_pin_quota=config.hard_pin_quota,
            key_bytes_max=config.limits.key_bytes_max,
            value_bytes_max=config.limits.value_bytes_max,
            published=self._published,
        )
        self._sessions = Sessions(
            store,
            ttl_ns=clock.seconds(config.session_ttl_s),
            alloc_ns=clock.seconds(config.alloc_deadline_s),
            read_ns=clock.seconds(config.read_deadline_s),
            sessions_max=config.sessions_max,
            answers_max=2 * config.limits.inflight_max,
        )
        if self._fabric is not None:
            self._sessions.on_end = self._fabric.forget
        journal = self._journal = Journal(store, self._sessions, clock.monotonic)
        journal.replicas = self._replicas = Replicas(
            Settings(
                me=member,
                min_in_sync=meta.min_in_sync,
                timing=Timing(slow_ns=clock.seconds(config.slow_s)),
            ),
            Pace(
                beacon_ns=clock.seconds(config.beacon_s),
                batch_bytes=min(BATCH_BYTES, config.limits.message_bytes_max),
                copies_max=config.moves_max,
            ),
            clock.seconds(config.lease_s),
            journal,
            self._ownership.member_of,
            self._may_serve,
        )
        return store, journal

    def _welcome(self, member: Member, arena: Arena) -> wire.Welcome:
        """What clients are told as their sessions begin."""
        limits = self.config.limits
        return wire.Welcome(
            member,
            round(self.config.session_ttl_s * 1000),
            {
                "key_bytes_max": limits.key_bytes_max,
                "value_bytes_max": limits.value_bytes_max,
                "batch_keys_max": limits.batch_keys_max,
                "message_bytes_max": limits.message_bytes_max,
                "inflight_max": limits.inflight_max,
            },
            (self._listeners.data_endpoint,),
            arena=(str(arena.path), arena.size, arena.proof),
            index=(*arena.index_place, clock.namespace()) if self._published is not None else None,
            reads=self._listeners.reads_place,
            ucx=Ability.NONE if self._fabric is None else self._fabric.ability,
        )

    async def _serve(self, authority: Authority) -> None:
        """Run all tasks until ``stop``, or until one of them fails."""
        self._started_ns = clock.monotonic()
        self._listeners.start(self._frontend, self._store.arena, self._published)
        assert self._ready is not None
        async with asyncio.TaskGroup() as group:
            jobs: list[Callable[[], Coroutine[Any, Any, None]]] = [
                self._follow, self._keep_house, self._heartbeats.run, self._planning.run,
                self._affirm, self._draining.run, self._replicator.run, self._comparing.run,
                self._scrub.run, self.liveness.run,
            ]  # fmt: skip
            tasks = [group.create_task(job(), name=job.__qualname__) for job in jobs]
            if not self._ready.done():
                self._ready.set_result(None)
            await self._stopping.wait()
            self.liveness.leave()
            for task in tasks:
                task.cancel()
        if authority.superseded:
            raise Conflict(
                f"node {self.config.node_id!r} was started elsewhere or forgotten by an operator; "
                "this process has stopped"
            )

    def _authority_of(self) -> Authority:
        assert self._authority is not None
        return self._authority

    # -- tasks

    async def _follow(self) -> None:
        """Take in what changes in etcd."""
        view = self._ownership.view
        async with aclosing(self._authority_of().follow(view)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                self._ownership.take_delta(delta)
                if delta.nodes or delta.gap:
                    self._register_contacts(delta.gap)
                else:
                    self._contacts.unchanged(self._ownership.view.revision)

    async def _keep_house(self) -> None:
        while True:
            now = clock.monotonic()
            self._frontend.keep_alive(now)
            self._journal.reap(now)
            self._sessions.reap(now)
            self._handlers.sharing.quarantine.reap(now)
            self._listeners.data.drop_stalled(now)
            self._open_gates()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _open_gates(self) -> None:
        """Let others read what we serve, for as long as we may.

        Gates are closed where a bucket ceases to be served; this only ever opens them.
        """
        if self._published is not None:
            until = self._contacts.serves_until(self._contact_ns())
            self._published.open_gates(
                self._replicas.served_until(until, self._ownership.bucket_count)
            )

    async def _affirm(self) -> None:
        """After our session in etcd was lost and renewed: write again what we own."""
        while True:
            await self._renewed.wait()
            self._renewed.clear()
            asked_ns = clock.monotonic()
            changes = self._ownership.affirmations()
            while changes:
                try:
                    outcomes = await self._authority_of().update_buckets(changes)
                except AuthorityUnavailable:
                    await asyncio.sleep(self._random.uniform(0.1, 0.2))
                    continue
                self._ownership.take_records((o.bucket, o.current) for o in outcomes)
                unknown = {o.bucket for o in outcomes if o.unknown}
                changes = [c for c in changes if c.bucket in unknown]
            if not self._renewed.is_set():
                self._authority_of().affirm(asked_ns)

    # -- events

    def _on_ring_change(self) -> None:
        self._router.install(self._ownership.table())
        self._planning.wake()
        self._replicator.wake()

    def _register_contacts(self, gap: bool) -> None:
        view = self._ownership.view
        members = [Member(n, r.boot) for n, r in view.nodes.items()]
        self._contacts.register(members, view.revision, gap)
        self._replicator.forget_superseded()
        known = {m: self._ownership.address_of(m) for m in self._contacts.peers()}
        addresses = {m: r.gossip[0] for m, r in known.items() if r and r.gossip}
        met = {e.member: e.address for e in self.liveness.entries()}
        self._listeners.gossip.connect(met | addresses)
        self.liveness.register({m: addresses[m] for m in members if m in addresses})
        talks = {m: r.replication[0] for m, r in known.items() if r and r.replication}
        self._listeners.talks.connect(talks)

    def _on_member(self, event: Event) -> None:
        """Somebody is suspected, dead, gone or back: a reason to look, and no more than that."""
        self._planning.wake()
        if isinstance(event, Left):
            self._replicas.suspect(event.member)

    def _digest(self) -> Digest:
        revision = self._contacts.told_revision(clock.monotonic())
        return self._load.digest(int(revision), clock.monotonic())

    def _contact_ns(self) -> int:
        return self._authority_of().contact_ns

    def _may_serve(self, now: int) -> bool:
        return self._contacts.may_serve(now, self._contact_ns())

    # -- what others see and ask

    def _on_stats(self, session: Session, body: wire.Empty, frames: Any, now: int) -> Response:
        return Kind.NODE_STATS, self.stats(), ()

    def stats(self) -> wire.NodeStats:
        """Labels and figures of this node; units end the names, counters end in ``_total``."""
        from p2pkv.figures import collect

        assert self.member is not None
        return collect(self)

    def client(self, timeout: float = 5.0) -> AsyncClient:
        """The client's calls, from within this process: no socket for this node's own share."""
        return AsyncClient._hosted(*self.hosting(timeout))

    def hosting(self, timeout: float) -> tuple[ClientConfig, Router, AsyncDriver]:
        """What a client in this process is made of."""
        config = ClientConfig(
            cluster=self.config.cluster,
            seeds=(self.endpoint,),
            timeout_s=timeout,
            limits=self.config.limits,
            checksums=self.config.checksums,
        )
        return config, self._router, self._driver


def publish_in(arena: Arena, buckets: int) -> Writer | None:
    """The published index behind the arena's memory, if there is room for one."""
    memory = arena.map_index()
    return None if memory is None else Writer(memory, buckets)


async def _quietly(ending: Coroutine[Any, Any, None]) -> None:
    """Say good-bye to etcd, if it is there."""
    try:
        async with asyncio.timeout(2.0):
            await ending
    except (P2PKVError, TimeoutError) as e:
        log.info("could not tell etcd: %s", e)
