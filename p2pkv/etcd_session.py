"""A node's registration in etcd, kept alive while the process lives."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from p2pkv import _etcd_pb2 as pb
from p2pkv.clock import Clock, seconds
from p2pkv.errors import ConfigError, Conflict, InvalidArgument, P2PKVError
from p2pkv.etcd import EtcdClient, Lease, LeaseLost, get, if_revision, if_value, put
from p2pkv.etcd_view import NAME, Keys, boot_of
from p2pkv.records import NodeRecord
from p2pkv.types import BootId, NodeId

log = logging.getLogger(__name__)

_VACANCY_SLACK_S = 2.0


class _Registry(NamedTuple):
    """What etcd has of one node id."""

    boot: BootId
    boot_revision: int
    node: pb.KeyValue | None


class Session:
    """``nodes/<id>`` under a lease of ours, and ``boots/<id>``, which proves which life we are.

    The lease may be lost while the process lives: all of them go when the leader's disk stalls, or
    when this process was paused. What is in memory is still there, so the same boot is registered
    again, under the guard that ``boots/<id>`` still is ours. If it is higher, somebody else is this
    node now, or an operator has forgotten us: ``superseded`` is set for good, the lease is left to
    run out, and ``on_superseded`` is called once.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        ttl_s: int,
        clock: Clock,
        rng: random.Random,
        on_superseded: Callable[[], None],
        on_renewed: Callable[[], None],
        contact_every_s: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._ttl_s = ttl_s
        self._clock = clock
        self._rng = rng
        self._on_superseded = on_superseded
        self._on_renewed = on_renewed
        self._contact_every_s = contact_every_s
        self._changing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._node = NodeId("")
        self._record: NodeRecord | None = None
        self._lease: Lease | None = None
        self._affirmed = True
        self.superseded = False
        self.losses = 0
        self.contact_ns = 0
        """See Authority.contact_ns."""

    @property
    def lease(self) -> int:
        """The lease's id. Raises Conflict if there is no session."""
        if self._lease is None or self.superseded:
            raise Conflict("this node has no session in etcd")
        return self._lease.id

    def affirm(self, asked_ns: int) -> None:
        """See Authority.affirm."""
        self._affirmed = True
        self._alive(asked_ns)

    def _alive(self, asked_ns: int) -> None:
        if self._affirmed:
            self.contact_ns = max(self.contact_ns, asked_ns)

    # -- coming and going

    async def register(self, node: NodeId, record: NodeRecord) -> BootId:
        """Take the next boot and publish ``record`` with it; see Authority.register."""
        if self._lease is not None:
            raise InvalidArgument(f"node {self._node} is registered already")
        if self.superseded:
            raise Conflict(f"node {self._node} was superseded: it needs a new process")
        if not NAME.fullmatch(node):
            raise ConfigError(f"node_id = {node!r}: must be 1 to 64 of a-z A-Z 0-9 . _ -")
        self._node = node
        deadline = self._clock() + seconds(self._ttl_s + _VACANCY_SLACK_S)
        while True:
            found = await self._read()
            if found.node is None and await self._claim(found, record):
                break
            if self._clock() > deadline:
                raise _name_taken(node, found.node)
            await asyncio.sleep(self._rng.uniform(0.1, 0.2))
        self._task = asyncio.create_task(self._keep(), name=f"etcd session of {node}")
        return self._own.boot

    async def end(self) -> None:
        """Give the session back: the node's record and all else under the lease go now."""
        await self.close()
        lease, self._lease, self._record = self._lease, None, None
        if lease is not None:
            await self._client.revoke(lease.id)

    async def close(self) -> None:
        """Stop keeping the session alive; it runs out by itself."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def update(self, changes: dict[str, Any]) -> None:
        """Publish the record with other values; see Authority.update_node."""
        if "boot" in changes:
            raise InvalidArgument("boot: must not be changed")
        async with self._changing:
            lease = self.lease
            self._record = _changed(self._own, changes)
            try:
                published = await self._publish(lease)
            except LeaseLost:
                published = await self._renew()
        if not published:
            raise Conflict(f"node {self._node} was superseded")

    def observe(self, boot: BootId | None) -> None:
        """``boots/<id>`` was seen with this value."""
        if self._record is not None and boot is not None and boot > self._record.boot:
            self._supersede(boot)

    # -- steps

    @property
    def _own(self) -> NodeRecord:
        if self._record is None:
            raise Conflict("this node is not registered")
        return self._record

    async def _read(self) -> _Registry:
        boot_key, node_key = self._keys.boot(self._node), self._keys.node(self._node)
        boots, nodes = (await self._client.txn([], [get(boot_key), get(node_key)])).reads
        boot, revision = (boot_of(boots[0]), boots[0].mod_revision) if boots else (BootId(0), 0)
        return _Registry(boot, revision, nodes[0] if nodes else None)

    async def _claim(self, found: _Registry, record: NodeRecord) -> bool:
        """One guarded transaction. That the record found after a failed guard is under the lease
        made here proves that it was written by an earlier attempt of ours: nobody else has it."""
        lease = await self._client.grant(self._ttl_s)
        claimed = msgspec.structs.replace(record, boot=BootId(found.boot + 1))
        boot_key, node_key = self._keys.boot(self._node), self._keys.node(self._node)
        asked_ns = self._clock()
        value = msgspec.json.encode(claimed)
        try:
            done = await self._client.txn(
                [if_revision(boot_key, found.boot_revision), if_revision(node_key, 0)],
                [put(boot_key, b"%d" % claimed.boot), put(node_key, value, lease.id)],
                [get(node_key)],
            )
        except LeaseLost:
            return False
        if not done.succeeded and not any(kv.lease == lease.id for kv in done.reads[0]):
            await self._client.revoke(lease.id)
            return False
        self._record, self._lease = claimed, lease
        self._alive(asked_ns)
        return True

    async def _publish(self, lease: int) -> bool:
        """Put our record under ``lease`` if our boot is still the highest."""
        own = self._own
        boot_key, node_key = self._keys.boot(self._node), self._keys.node(self._node)
        done = await self._client.txn(
            [if_value(boot_key, b"%d" % own.boot)],
            [put(node_key, msgspec.json.encode(own), lease)],
            [get(boot_key)],
        )
        if not done.succeeded:
            self._explain_failed_guard(done.reads[0])
        return done.succeeded

    def _explain_failed_guard(self, boots: list[pb.KeyValue]) -> None:
        boot = boot_of(boots[0]) if boots else BootId(0)
        if boot > self._own.boot:
            self._supersede(boot)
            return
        log.error(
            "boots/%s is %d, ours is %d: was etcd restored?", self._node, boot, self._own.boot
        )

    async def _renew(self) -> bool:
        """Register the same boot again, under a new lease."""
        self._affirmed = False
        lease = await self._client.grant(self._ttl_s)
        if not await self._publish(lease.id):
            await self._client.revoke(lease.id)
            return False
        self._lease = lease
        self.losses += 1
        self._on_renewed()
        return True

    def _supersede(self, boot: BootId) -> None:
        if self.superseded:
            return
        self.superseded = True
        log.error("node %s@%d is superseded by boot %d", self._node, self._own.boot, boot)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._on_superseded()

    # -- keeping it

    async def _keep(self) -> None:
        lost: Lease | None = None
        while not self.superseded and (lease := self._lease) is not None:
            try:
                if lease is not lost:
                    await self._client.hold(lease, self._alive, self._contact_every_s)
                    lost = lease
                await self._restore(lease)
            except (P2PKVError, LeaseLost) as e:
                log.warning("the session of node %s: %s", self._node, e)
            await asyncio.sleep(self._rng.uniform(0.1, 0.5))

    async def _restore(self, lost: Lease) -> None:
        """Under the lock: ``update`` may have noticed the loss first and have dealt with it."""
        async with self._changing:
            if self._lease is lost and await self._renew():
                log.warning("node %s had lost its session; it is registered again", self._node)


def _changed(record: NodeRecord, changes: dict[str, Any]) -> NodeRecord:
    try:
        return msgspec.convert(msgspec.to_builtins(record) | changes, NodeRecord)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"node record: {e}") from None


def _name_taken(node: NodeId, kv: pb.KeyValue | None) -> ConfigError:
    try:
        other = msgspec.json.decode(kv.value if kv else b"", type=NodeRecord)
        who = f"boot {other.boot} at {', '.join(other.control)}"
    except msgspec.DecodeError:
        who = "unreadable record"
    return ConfigError(
        f"node_id = {node!r}: must be unique, and a live process has it ({who}); "
        "give this one another node_id or stop that one"
    )
