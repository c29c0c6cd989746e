"""A node: puts the parts together, feeds them with events, and owns every task.

Nothing is decided here. What a request does is in ``handlers``, what a record means in
``ownership``, where buckets belong in ``planner``, who may be trusted to be alive in
``membership``; this module carries their words to sockets and etcd.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from p2pkv import _native, clock, membership, ring, wire
from p2pkv._native.index import Writer
from p2pkv.arena import Arena
from p2pkv.async_client import AsyncClient
from p2pkv.async_driver import AsyncDriver
from p2pkv.authority import Authority, EtcdAuthority
from p2pkv.buffers import Lending, Run
from p2pkv.checksums import ARRIVING
from p2pkv.comparing import Comparing
from p2pkv.config import ClientConfig, NodeConfig
from p2pkv.data_server import DataServer
from p2pkv.data_server import Filling as FillingLike
from p2pkv.errors import AuthorityUnavailable, Conflict, P2PKVError, ProtocolError
from p2pkv.fabric import Fabric
from p2pkv.gossip import SOCKETS_MAX, Gossip
from p2pkv.handlers import Handlers
from p2pkv.hostlock import HostLock
from p2pkv.journal import Journal
from p2pkv.learning import Learning
from p2pkv.liveness import PACKET, Liveness
from p2pkv.load import Load
from p2pkv.membership import HEARTBEAT, Contacts
from p2pkv.mover import Mover
from p2pkv.ownership import Ownership
from p2pkv.paths import Ability
from p2pkv.payload import FRAMES, STREAM
from p2pkv.planner import Planner, PlannerLimits, holders, registered
from p2pkv.read_server import ReadServer
from p2pkv.records import BucketChange, Meta, NodeRecord
from p2pkv.replicas import Pace, Replicas
from p2pkv.replicated import TALK
from p2pkv.replication import Settings, Timing
from p2pkv.replicator import Replicator
from p2pkv.roster import Event, Left
from p2pkv.routing import Reply, Request, Router
from p2pkv.scrub import Scrub
from p2pkv.sessions import Deferred, Response, Session, Sessions
from p2pkv.store import Store
from p2pkv.swim import Swim
from p2pkv.swim_messages import Digest
from p2pkv.transport import ServerSocket, endpoint_of, new_client_id, new_session
from p2pkv.types import Member, NodeId, Revision
from p2pkv.ucx_transfer import Busy
from p2pkv.wire import Checksums, Fault, Kind

log = logging.getLogger("p2pkv.node")

HOUSEKEEPING_S = 0.1
CONTACTS_PER_LIMIT = 4
"""So often a contact with etcd is made within ``peer_contact_s``, for others to know of it."""
PLAN_INTERVAL_S = 0.5
PLAN_PAUSE_S = 0.05
"""Between two rounds of planning that follow each other."""


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
        self._draining = False
        self._draining_asked = asyncio.Event()
        self._ready: asyncio.Future[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._published: Writer | None = None
        self._reads: ReadServer | None = None
        self._garbage = 0
        self._heartbeats = 0
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
        try:
            async with asyncio.timeout(limit):
                await self._authority_of().update_node(draining=True)
                while self._ownership.held:
                    if not self._others():
                        return False
                    await asyncio.sleep(0.05)
        except (TimeoutError, AuthorityUnavailable, Conflict):
            return not self._ownership.held
        return True

    def _others(self) -> bool:
        nodes = self._ownership.view.nodes
        return any(n != self.config.node_id and not r.draining for n, r in nodes.items())

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
        config = self.config
        store = Store(
            arena,
            metadata_limit_bytes=config.metadata_bytes,
            hard_pin_quota=config.hard_pin_quota,
            key_bytes_max=config.limits.key_bytes_max,
            value_bytes_max=config.limits.value_bytes_max,
            published=self._published,
        )
        context: zmq.Context[Any] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_MAX + 2 * config.sessions_max)
        server = ServerSocket(context, config.limits, self._on_message)
        token = meta.fingerprint.encode()
        gossip = Gossip(
            context,
            config.limits,
            token,
            {HEARTBEAT: self._on_heartbeat, PACKET: lambda frame: self.liveness.take(frame)},
            lambda member: self.liveness.broke(member),
        )
        talks = Gossip(
            context,
            config.limits,
            token,
            {TALK: lambda frame: self._replicator.take(frame)},
            lambda member: self._replicator.broke(member),
        )
        self._data = DataServer(
            config.limits, self, clock.seconds(config.read_deadline_s), 2 * config.sessions_max
        )
        if self._published is not None and config.read_threads:
            self._reads = ReadServer(config.bind, config.read_threads)
        try:
            port = server.bind(config.bind, config.control_port)
            self._gossip_endpoint = endpoint_of(config.advertised, gossip.bind(config.bind))
            talk_port = talks.bind(config.bind)
            self._data_endpoint = endpoint_of(config.advertised, self._data.bind(config.bind))
            self.endpoint = endpoint_of(config.advertised, port)
            record = NodeRecord(
                boot=_NO_BOOT,
                control=(self.endpoint,),
                gossip=(self._gossip_endpoint,),
                data=(self._data_endpoint,),
                replication=(endpoint_of(config.advertised, talk_port),),
                weight=config.weight,
                host=config.host,
                zone=config.zone,
                capacity_bytes=config.memory_limit_bytes,
            )
            boot = await authority.register(NodeId(config.node_id), record)
            try:
                self.member = member = Member(NodeId(config.node_id), boot)
                view = await authority.load()
                self._compose(member, meta, store, context, server, gossip, talks, view)
                try:
                    await self._serve(authority)
                finally:
                    self._hide()
                    await self._driver.aclose()
            finally:
                await _quietly(authority.resign())
                await _quietly(authority.deregister())
        finally:
            if self._reads is not None:
                self._reads.close()
            self._data.close()
            server.close()
            gossip.close()
            talks.close()
            context.term()

    def _compose(self, member: Member, meta: Meta, store: Store, context: zmq.Context[Any],
                 server: ServerSocket, gossip: Gossip, talks: Gossip,
                 view: Any) -> None:  # fmt: skip
        config, limits = self.config, self.config.limits
        self._store, self._server, self._gossip, self._talks = store, server, gossip, talks
        self._zmq = context
        self._lending = Lending()
        self._contacts = Contacts(config, member)
        swim = Swim(config.swim, member, self._gossip_endpoint, self._random, clock.monotonic())
        self.liveness = Liveness(swim, gossip, self._digest)
        self.liveness.subscribe(self._on_member)
        self._ownership = Ownership(member, view, meta.fingerprint)
        self._router = Router()
        self._sessions = Sessions(
            store,
            ttl_ns=clock.seconds(config.session_ttl_s),
            alloc_ns=clock.seconds(config.alloc_deadline_s),
            read_ns=clock.seconds(config.read_deadline_s),
            sessions_max=config.sessions_max,
            answers_max=2 * limits.inflight_max,
        )
        journal = self._journal = Journal(store, self._sessions, clock.monotonic)
        journal.replicas = self._replicas = Replicas(
            Settings(
                me=member,
                min_in_sync=meta.min_in_sync,
                timing=Timing(slow_ns=clock.seconds(config.slow_s)),
            ),
            Pace(beacon_ns=clock.seconds(config.beacon_s), copies_max=config.moves_max),
            clock.seconds(config.lease_s),
            journal,
            self._ownership.member_of,
            self._may_serve,
        )
        self._learning = Learning(store, self._replicas)
        self._handlers = Handlers(
            journal, limits, meta.bucket_count, self._may_serve,
            {
                Kind.ROUTES: self._on_routes,
                Kind.STATS: self._on_stats,
                Kind.SNAPSHOT: self._on_snapshot,
                Kind.SCRUB: self._on_scrub,
                Kind.DRAIN: self._on_drain,
                Kind.ATTACH: self._on_attach,
                Kind.PUSH: self._on_push,
            },
            ARRIVING.get(config.checksums, Checksums.NONE),
            config.view_quota_bytes,
            clock.seconds(config.ucx_quarantine_s),
        )  # fmt: skip
        if self._fabric is not None:
            self._sessions.on_end = self._fabric.forget
        self._scrub = Scrub(store, give=config.checksums != "never")
        self._learning.check = bool(self._handlers.arrivals.policy)
        self._own_session = self._sessions.begin(
            new_session(new_client_id(b"l")), member, clock.monotonic()
        )
        self._client_config = ClientConfig(
            cluster=config.cluster, seeds=(self.endpoint,), limits=limits
        )
        self._driver = AsyncDriver(
            self._client_config,
            self._router,
            context,
            member,
            self._local,
            lambda _: [],
            self._fabric.engine if self._fabric is not None else None,
        )
        self._mover = Mover(
            config, store, self._replicas, self._driver, self._random,
            lambda: self._replicator.wake(),
        )  # fmt: skip
        self._replicator = Replicator(
            config, journal, self._learning, self._ownership, self._driver, talks, self._mover,
            self._authority_of(), self._random,
        )  # fmt: skip
        journal.wake = self._replicator.wake
        self._comparing = Comparing(config, journal, self._driver, self._random)
        self._handlers.answer_also(self._comparing.handlers)
        self._load = Load(store, self._data, self._driver)
        self._planner = Planner(PlannerLimits(rebuild_delay_s=config.rebuild_delay_s))
        self._plan_wanted = asyncio.Event()
        self._ownership.on_change = self._on_ring_change
        self._ownership.on_news = lambda news: self._replicas.adopt(news, clock.monotonic())
        self._register_contacts(gap=True)
        self._ownership.begin()

    async def _serve(self, authority: Authority) -> None:
        """Run all tasks until ``stop``, or until one of them fails."""
        self._started_ns = clock.monotonic()
        self._server.start()
        self._data.start()
        self._start_reads()
        self._gossip.start()
        self._talks.start()
        assert self._ready is not None
        async with asyncio.TaskGroup() as group:
            jobs: list[Callable[[], Coroutine[Any, Any, None]]] = [
                self._follow, self._beat, self._keep_house, self._plan, self._affirm,
                self._replicator.run, self._comparing.run, self._scrub.run, self._tell_draining,
                self.liveness.run,
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

    def _start_reads(self) -> None:
        if self._reads is None or self._published is None:
            return
        config, arena = self.config, self._store.arena
        self._reads.start(
            self._published.address,
            (arena.address, arena.size),
            payload_max=config.limits.message_bytes_max,
            stall_ns=clock.seconds(config.read_deadline_s),
            connections_max=2 * config.sessions_max,
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

    async def _beat(self) -> None:
        """Ask the others about etcd, when their word is needed."""
        while True:
            for entry in self.liveness.entries():
                self._contacts.told(entry.member, Revision(entry.digest.revision))
            heartbeat = self._contacts.beat(clock.monotonic(), self._contact_ns())
            if heartbeat is not None:
                self._heartbeats += 1
                self._gossip.send_all(HEARTBEAT, membership.encode(heartbeat))
            await asyncio.sleep(self.config.heartbeat_s)

    async def _keep_house(self) -> None:
        while True:
            now = clock.monotonic()
            if self._own_session is not None:
                self._own_session.last_seen = now
            self._journal.reap(now)
            self._sessions.reap(now)
            self._handlers.sharing.quarantine.reap(now)
            self._data.drop_stalled(now)
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

    async def _plan(self) -> None:
        """Plan placement, if this node is the one elected to."""
        authority = self._authority_of()
        assert self.member is not None
        while True:
            try:
                if await authority.campaign(self.member):
                    await self._propose(self._changes())
            except AuthorityUnavailable as e:
                log.warning("planning waits for etcd: %s", e)
            self._plan_wanted.clear()
            try:
                async with asyncio.timeout(PLAN_INTERVAL_S):
                    await self._plan_wanted.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(PLAN_PAUSE_S)

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

    async def _tell_draining(self) -> None:
        """Write into our record whether others asked this node to give everything away."""
        while True:
            await self._draining_asked.wait()
            self._draining_asked.clear()
            try:
                await self._authority_of().update_node(draining=self._draining)
            except AuthorityUnavailable as e:
                log.warning("draining waits for etcd: %s", e)
                self._draining_asked.set()
                await asyncio.sleep(self._random.uniform(0.5, 1.0))

    def _changes(self) -> list[BucketChange]:
        view = self._ownership.view
        now = clock.monotonic()
        lost = self._contacts.lost(now, holders(view))
        return self._planner.step(view, registered(view), lost, now)

    async def _propose(self, changes: list[BucketChange]) -> None:
        if not changes:
            return
        outcomes = await self._authority_of().update_buckets(changes)
        self._ownership.take_records((o.bucket, o.current) for o in outcomes)

    # -- events

    def _on_ring_change(self) -> None:
        self._router.install(self._ownership.table())
        self._plan_wanted.set()
        self._replicator.wake()

    def _register_contacts(self, gap: bool) -> None:
        view = self._ownership.view
        members = [Member(n, r.boot) for n, r in view.nodes.items()]
        self._contacts.register(members, view.revision, gap)
        self._replicator.forget_superseded()
        known = {m: self._ownership.address_of(m) for m in self._contacts.peers()}
        addresses = {m: r.gossip[0] for m, r in known.items() if r and r.gossip}
        self._gossip.connect({e.member: e.address for e in self.liveness.entries()} | addresses)
        self.liveness.register({m: addresses[m] for m in members if m in addresses})
        self._talks.connect({m: r.replication[0] for m, r in known.items() if r and r.replication})

    def _on_heartbeat(self, frame: bytes) -> None:
        heartbeat, now = membership.decode(frame), clock.monotonic()
        if self._contacts.heard(heartbeat, now):
            answer = self._contacts.answer(heartbeat, now, self._contact_ns())
            if answer is not None:
                self._heartbeats += 1
                self._gossip.send(heartbeat.sender, HEARTBEAT, membership.encode(answer))

    def _on_member(self, event: Event) -> None:
        """Somebody is suspected, dead, gone or back: a reason to look, and no more than that."""
        self._plan_wanted.set()
        if isinstance(event, Left):
            self._replicas.suspect(event.member)

    def _digest(self) -> Digest:
        revision = self._contacts.told_revision(clock.monotonic())
        return self._load.digest(int(revision), clock.monotonic())

    def _contact_ns(self) -> int:
        return self._authority_of().contact_ns

    def _may_serve(self, now: int) -> bool:
        return self._contacts.may_serve(now, self._contact_ns())

    # -- requests

    def _on_message(self, session_id: bytes, frames: list[wire.Buffer]) -> None:
        now = clock.monotonic()
        try:
            head = wire.decode(frames[0], self.config.limits.head_bytes_max)
        except ProtocolError as e:
            self._on_garbage(session_id, frames[0], e)
            return
        response: Response | Deferred
        session = self._sessions.get(session_id)
        if head.kind == Kind.HELLO:
            response = self._greet(session_id, head.body, now)
        elif head.kind == Kind.BYE:
            if session is not None:
                self._sessions.end(session)
            return
        elif session is None:
            response = self._handlers.refuse(Fault.NO_SESSION, "no session; say HELLO first")
        else:
            response = self._handle(session, head.kind, head.request, head.body, frames[1:], now)
        if isinstance(response, Deferred):
            response.then(lambda answer: self._answer(session_id, head.request, answer))
        else:
            self._answer(session_id, head.request, response)

    def _answer(self, session_id: bytes, request: int, response: Response) -> None:
        kind, body, payload = response
        frame = wire.encode(Kind(kind), request, int(self._ownership.revision), body)
        self._server.send(session_id, frame, payload)

    def _handle(self, session: Session, kind: int, request: int, body: Any,
                frames: Sequence[wire.Buffer], now: int) -> Response | Deferred:  # fmt: skip
        try:
            return self._handlers.handle(session, kind, request, body, frames, now)
        except Busy as e:
            return self._handlers.refuse(Fault.NOT_READY, str(e))
        except Exception:
            log.exception("a request of kind %s failed", Kind(kind).name)
            return self._handlers.refuse(
                Fault.INTERNAL, f"{Kind(kind).name} failed in the node; its log says why"
            )

    def _on_garbage(self, session_id: bytes, frame: wire.Buffer, error: ProtocolError) -> None:
        self._garbage += 1
        try:
            version, _, request = wire.peek(frame)
        except ProtocolError:
            return
        fault = Fault.VERSION if version != wire.VERSION else Fault.BAD_REQUEST
        body = wire.Error(fault, str(error)[:1024])
        self._server.send(session_id, wire.encode(Kind.ERROR, request, 0, body))

    def _greet(self, session_id: bytes, body: wire.Hello, now: int) -> Response:
        if body.cluster != self.config.cluster:
            return self._handlers.refuse(
                Fault.CLUSTER, f"this is cluster {self.config.cluster!r}, not {body.cluster!r}"
            )
        session = self._sessions.begin(session_id, body.member, now, body.used)
        if session is None:
            return self._handlers.refuse(
                Fault.SESSIONS_MAX, f"sessions_max = {self.config.sessions_max} is reached"
            )
        limits = self.config.limits
        assert self.member is not None
        known = {
            "key_bytes_max": limits.key_bytes_max,
            "value_bytes_max": limits.value_bytes_max,
            "batch_keys_max": limits.batch_keys_max,
            "message_bytes_max": limits.message_bytes_max,
            "inflight_max": limits.inflight_max,
        }
        ttl_ms = round(self.config.session_ttl_s * 1000)
        arena = self._store.arena
        welcome = wire.Welcome(
            self.member,
            ttl_ms,
            known,
            (self._data_endpoint,),
            session.token,
            (str(arena.path), arena.size, arena.proof),
            (*arena.index_place, clock.namespace()) if self._published is not None else None,
            self._reads_place(),
            Ability.NONE if self._fabric is None else self._fabric.ability,
        )
        return Kind.WELCOME, welcome, ()

    def _reads_place(self) -> tuple[str, bytes] | None:
        """Endpoint and token of the read connections."""
        if self._reads is None:
            return None
        return endpoint_of(self.config.advertised, self._reads.port), self._reads.token

    # -- requests over data connections

    def admit(self, session_id: bytes, token: bytes) -> bool:
        session = self._sessions.get(session_id)
        return session is not None and secrets.compare_digest(session.token, token)

    def begin(self, session_id: bytes, head: wire.Head, payload_bytes: int) -> FillingLike | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        now = clock.monotonic()
        return self._handlers.begin(session, head.kind, head.request, head.body, payload_bytes, now)

    def unshare(self, shared: dict[int, Any], proven: bool) -> None:
        self._handlers.sharing.unshare_all(shared, proven)

    def respond(
        self,
        session_id: bytes,
        head: wire.Head,
        frames: Sequence[wire.Buffer],
        shared: dict[int, Any],
    ) -> Response | Deferred:
        session = self._sessions.get(session_id)
        if session is None:
            return self._handlers.refuse(Fault.NO_SESSION, "no session; say HELLO first")
        session.packing, session.shared = STREAM, shared
        try:
            return self._handle(
                session, head.kind, head.request, head.body, frames, clock.monotonic()
            )
        finally:
            session.packing, session.shared = FRAMES, None

    def revision(self) -> int:
        return int(self._ownership.revision)

    def _local(self, request: Request, answer: Callable[[Reply], None]) -> None:
        """A request of this process to its own node."""
        assert self._own_session is not None
        now = clock.monotonic()
        request.prepare()
        body: Any = request.body
        if request.kind == Kind.GET and body.checksums == Checksums.SENT:
            body = msgspec.structs.replace(body, checksums=Checksums.NONE)  # nothing is sent
        response = self._handle(
            self._own_session, request.kind, 0, body, list(request.payload), now
        )
        self._own_session.answers.clear()
        if isinstance(response, Deferred):
            response.then(lambda late: answer(self._reply(late)))
        else:
            answer(self._reply(response))

    def _reply(self, response: Response) -> Reply:
        kind, body, payload = response
        frames = [self._lending.lend(p) if isinstance(p, Run) else p for p in payload]
        return Reply(kind, body, frames, int(self._ownership.revision))

    def _on_routes(self, session: Session, body: wire.Routes, frames: Any, now: int) -> Response:
        table = self._ownership.table()
        if body.revision > table.revision:
            table = wire.Table(
                table.fingerprint, table.revision, table.bucket_count, [], [], [], []
            )
        return Kind.TABLE, table, ()

    def _on_snapshot(
        self, session: Session, body: wire.Snapshot, frames: Any, now: int
    ) -> Response:
        ack = self._learning.take(body, session.member, frames, now)
        return Kind.SNAPSHOT_ACK, ack, ()

    def _on_drain(self, session: Session, body: wire.Drain, frames: Any, now: int) -> Response:
        self._draining = body.draining
        self._draining_asked.set()
        return Kind.PONG, wire.Empty(), ()

    def _on_scrub(self, session: Session, body: wire.Scrub, frames: Any, now: int) -> Response:
        return Kind.SCRUBBED, self._scrub.ask(body.bytes_per_s), ()

    # -- one-sided access from other hosts

    def _on_attach(self, session: Session, body: wire.Attach, frames: Any, now: int) -> Response:
        if self._fabric is None or session.shared is not None:
            where = "this node has no UCX" if self._fabric is None else "on control connections"
            return self._handlers.refuse(Fault.BAD_REQUEST, f"ATTACH: {where}")
        hold_ms = max(1, self._sessions.hold_ns // clock.MILLISECOND_NS)
        return Kind.ATTACHED, self._fabric.attach(session, body, hold_ms), ()

    def _on_push(
        self, session: Session, body: wire.Push, frames: Any, now: int
    ) -> Response | Deferred:
        if self._fabric is None or session.shared is None:
            where = "this node has no UCX" if self._fabric is None else "on data connections only"
            return self._handlers.refuse(Fault.BAD_REQUEST, f"PUSH: {where}")
        return self._fabric.push(session, body, self._sessions, self._store, now)

    # -- what others see

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


_NO_BOOT: Any = 0


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
