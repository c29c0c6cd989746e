"""One cluster's keys in etcd: their names, their decoding, and how to read and follow them."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from p2pkv import _etcd_pb2 as pb
from p2pkv.errors import AuthorityUnavailable, ConfigError
from p2pkv.etcd import Compacted, EtcdClient
from p2pkv.records import (
    BucketRecord,
    Delta,
    Meta,
    NodeRecord,
    Versioned,
    View,
    apply,
    difference,
)
from p2pkv.types import BootId, BucketId, Member, NodeId, Revision

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BUCKETS_MAX = 65536


class Keys:
    """The names of one cluster's keys. Raises ConfigError for a bad cluster name."""

    def __init__(self, cluster: str) -> None:
        if not NAME.fullmatch(cluster):
            raise ConfigError(f"cluster = {cluster!r}: must be 1 to 64 of a-z A-Z 0-9 . _ -")
        self.prefix = f"/p2pkv/{cluster}/".encode()
        self.meta = self.prefix + b"meta"
        self.planner = self.prefix + b"planner"

    def node(self, node: NodeId) -> bytes:
        return self.prefix + f"nodes/{node}".encode()

    def boot(self, node: NodeId) -> bytes:
        return self.prefix + f"boots/{node}".encode()

    def bucket(self, bucket: BucketId) -> bytes:
        return self.prefix + b"buckets/%d" % bucket


class Decoder:
    """From etcd's keys and events to a View and its Deltas.

    A record that cannot be read, because it was written by hand or by another version, must not
    stop the cluster: it is logged, counted in ``malformed``, and passed over, which leaves the
    record before it in force.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.malformed = 0

    def view(self, revision: int, kvs: Iterable[pb.KeyValue], before: View) -> View:
        """All of ``kvs``; from ``before`` only what stands there for records passed over."""
        view = View(revision=Revision(revision))
        for kv in kvs:
            place = self._place(kv.key)
            if place is not None:
                _set(view, place, self._value(place[0], kv, _get(before, place)))
        return view

    def delta(self, events: Iterable[pb.Event]) -> Delta:
        """The last state of each key among ``events``, of which there is at least one."""
        changes = _Changes()
        for event in events:
            changes.revision = Revision(event.kv.mod_revision)
            place = self._place(event.kv.key)
            if place is None:
                continue
            changes.gap |= place[0] == "nodes" and place[1] in changes.nodes
            if event.type == pb.Event.DELETE:
                _set(changes, place, None)
            elif (value := self._value(place[0], event.kv, None)) is not None:
                _set(changes, place, value)
        return changes.freeze()

    def versioned(self, kvs: list[pb.KeyValue]) -> Versioned | None:
        """The bucket record that a read found."""
        return self._value("buckets", kvs[0], None) if kvs else None

    def _place(self, key: bytes) -> tuple[str, Any] | None:
        """The field of a View, and the key in it if it is a dictionary."""
        kind, _, name = key.removeprefix(self._keys.prefix).decode(errors="replace").partition("/")
        if kind in ("meta", "planner") and not name:
            return kind, None
        if kind in ("nodes", "boots") and NAME.fullmatch(name):
            return kind, NodeId(name)
        if kind == "buckets" and name.isascii() and name.isdigit() and len(name) < 6:
            bucket = int(name)
            if bucket < _BUCKETS_MAX and str(bucket) == name:
                return kind, BucketId(bucket)
        self._pass_over(key, "not a key of p2pkv's")
        return None

    def _value(self, kind: str, kv: pb.KeyValue, otherwise: Any) -> Any:
        try:
            value = msgspec.json.decode(kv.value, type=_TYPES[kind])
        except msgspec.DecodeError as e:
            self._pass_over(kv.key, str(e))
            return otherwise
        return Versioned(value, Revision(kv.mod_revision)) if kind == "buckets" else value

    def _pass_over(self, key: bytes, reason: str) -> None:
        self.malformed += 1
        log.warning("passed over %r in etcd: %s", key, reason)


_TYPES: dict[str, Any] = {
    "meta": Meta,
    "nodes": NodeRecord,
    "boots": BootId,
    "buckets": BucketRecord,
    "planner": Member,
}


class _Changes(msgspec.Struct):
    """A Delta in the making."""

    revision: Revision = Revision(0)
    gap: bool = False
    meta: Meta | msgspec.UnsetType | None = msgspec.UNSET
    nodes: dict[NodeId, NodeRecord | None] = msgspec.field(default_factory=dict)
    boots: dict[NodeId, BootId | None] = msgspec.field(default_factory=dict)
    buckets: dict[BucketId, Versioned | None] = msgspec.field(default_factory=dict)
    planner: Member | msgspec.UnsetType | None = msgspec.UNSET

    def freeze(self) -> Delta:
        return Delta(**{name: getattr(self, name) for name in self.__struct_fields__})


def _set(target: View | _Changes, place: tuple[str, Any], value: Any) -> None:
    kind, name = place
    if name is None:
        setattr(target, kind, value)
    elif value is not None or isinstance(target, _Changes):
        getattr(target, kind)[name] = value


def _get(view: View, place: tuple[str, Any]) -> Any:
    kind, name = place
    return getattr(view, kind) if name is None else getattr(view, kind).get(name)


async def load(client: EtcdClient, keys: Keys, decoder: Decoder, before: View) -> View:
    """Everything of the cluster at one revision. Raises AuthorityUnavailable."""
    found = await client.get_prefix(keys.prefix)
    return decoder.view(found.revision, found.kvs, before)


async def follow(
    client: EtcdClient,
    keys: Keys,
    decoder: Decoder,
    view: View,
    rng: random.Random,
    on_boots: Callable[[Mapping[NodeId, BootId | None]], None],
) -> AsyncGenerator[Delta, None]:
    """The changes after ``view``, for as long as it is iterated; ``view`` itself is left alone.

    Where etcd no longer has the history, everything is read again and the delta is what differs.
    """
    state = copy(view)
    while True:
        try:
            async with aclosing(client.watch(keys.prefix, state.revision + 1)) as batches:
                async for events in batches:
                    delta = decoder.delta(events)
                    apply(state, delta)
                    on_boots(delta.boots)
                    if delta:
                        yield delta
        except Compacted as e:
            log.info("%s; reading everything again", e)
        fresh = await _load_in_the_end(client, keys, decoder, state, rng)
        delta = msgspec.structs.replace(difference(state, fresh), gap=True)
        state = fresh
        on_boots(delta.boots)
        if delta:
            yield delta


async def _load_in_the_end(
    client: EtcdClient, keys: Keys, decoder: Decoder, before: View, rng: random.Random
) -> View:
    """Outages end; whoever follows has nothing better to do than to wait, at a modest rate."""
    while True:
        try:
            return await load(client, keys, decoder, before)
        except AuthorityUnavailable as e:
            log.warning("could not read the cluster's state: %s", e)
            await asyncio.sleep(rng.uniform(0.5, 1.0))


def boot_of(kv: pb.KeyValue) -> BootId:
    """The value of a ``boots/<id>``. Raises ConfigError if it is not a number."""
    try:
        return msgspec.json.decode(kv.value, type=BootId)
    except msgspec.DecodeError:
        raise ConfigError(f"{kv.key!r} in etcd is {kv.value!r}: must be a number") from None


def copy(view: View) -> View:
    """A view that can be changed without changing ``view``."""
    return View(
        revision=view.revision,
        meta=view.meta,
        nodes=dict(view.nodes),
        boots=dict(view.boots),
        buckets=dict(view.buckets),
        planner=view.planner,
    )
