"""etcd as the nodes see it: guarded transactions, sessions, and a history that can be followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2pkv.records import BucketChange, Meta, NodeRecord, Versioned, View
from p2pkv.types import BootId, BucketId, Member, NodeId, Revision

from .plan import BUCKETS, RESET_NS, SESSION_NS, Plan
from .world import World

Event = tuple[Revision, str, Any, Any]
"""Revision, field of a View, key in it, value or None."""


class EtcdModel:
    """One etcd that loses nothing. ``on_record`` is told of each new bucket record."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.view = View(
            revision=Revision(1),
            meta=Meta(
                bucket_count=BUCKETS,
                hash_scheme="sim",
                replication_factor=plan.replication_factor,
                min_in_sync=plan.min_in_sync,
                fingerprint="sim",
            ),
        )
        self.events: list[Event] = []
        self.down = False
        self.cut: set[int] = set()
        """Numbers of the nodes that do not reach it."""
        self.on_record: Callable[[BucketId, Versioned | None, Versioned], None] = lambda *_: None
        self._sessions: dict[Member, int] = {}
        self._gone_ns: dict[Member, int] = {}

    def reached_by(self, number: int) -> bool:
        return not self.down and number not in self.cut

    # -- nodes

    def register(self, node: NodeId) -> Member:
        """A new life begins."""
        member = Member(node, BootId(self.view.boots.get(node, 0) + 1))
        self._put("boots", node, member.boot)
        self._open_session(member, draining=False)
        return member

    def keep_alive(self, member: Member) -> int:
        """Extend the member's session, or open it again if it lapsed; the revision after it."""
        if self.view.boots.get(member.node) != member.boot:
            return self.view.revision
        if member in self._sessions:
            self._sessions[member] = self.world.now + SESSION_NS
        else:
            self._open_session(member, draining=False)
        return self.view.revision

    def drain(self, node: NodeId, draining: bool) -> None:
        record = self.view.nodes.get(node)
        if record is not None:
            self._put("nodes", node, NodeRecord(boot=record.boot, control=(), draining=draining))

    def _open_session(self, member: Member, draining: bool) -> None:
        old = Member(member.node, BootId(member.boot - 1))
        self._sessions.pop(old, None)
        self._gone_ns.pop(member, None)
        self._sessions[member] = self.world.now + SESSION_NS
        self._put("nodes", member.node, NodeRecord(boot=member.boot, control=(), draining=draining))
        self.world.after(SESSION_NS, self._expire, member)

    def _expire(self, member: Member) -> None:
        end = self._sessions.get(member)
        if end is None:
            return
        if end > self.world.now or self.down:
            # while etcd is down nobody's time runs out
            self.world.after(max(end - self.world.now, SESSION_NS // 4), self._expire, member)
            return
        del self._sessions[member]
        self._gone_ns[member] = self.world.now
        if self.view.nodes[member.node].boot == member.boot:
            self._put("nodes", member.node, None)

    def lost(self) -> set[Member]:
        """Members that the Reset rule gives up."""
        return {m for m, since in self._gone_ns.items() if self.world.now - since > RESET_NS}

    # -- buckets

    def change(self, change: BucketChange) -> Versioned | None:
        """Carry out a guarded change if its guard holds; what stands there after it."""
        current = self.view.buckets.get(change.bucket)
        if (current.mod_revision if current else 0) == change.expected:
            revision = Revision(self.view.revision + 1)
            new = Versioned(change.record, revision)
            self._put("buckets", change.bucket, new)
            self.on_record(change.bucket, current, new)
            current = new
        return current

    def restart_lost(self, change: BucketChange) -> None:
        """A planner's change. It gives up members only while they have no session."""
        current = self.view.buckets.get(change.bucket)
        if current is not None and current.record.generation < change.record.generation:
            named = (*current.record.in_sync, *current.record.eligible)
            if any(member in self._sessions for member in named):
                return
        self.change(change)

    def _put(self, field: str, key: Any, value: Any) -> None:
        revision = Revision(self.view.revision + 1)
        self.view.revision = revision
        self.events.append((revision, field, key, value))
        target = getattr(self.view, field)
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value

    def snapshot(self) -> View:
        """Everything at this moment."""
        view = self.view
        return View(
            revision=view.revision,
            meta=view.meta,
            nodes=dict(view.nodes),
            boots=dict(view.boots),
            buckets=dict(view.buckets),
        )
