"""The figures of a node, by name. Units end the names; what only rises ends in ``_total``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pkv import clock, wire
from p2pkv._version import __version__
from p2pkv.objects import Reason
from p2pkv.paths import Ability
from p2pkv.swim_messages import Status
from p2pkv.wire import Kind

if TYPE_CHECKING:
    from p2pkv.node import Node


def collect(node: Node) -> wire.NodeStats:
    """Everything that ``p2pkv status`` and the metrics show."""
    now = clock.monotonic()
    store = node._store.stats()
    counters = store.counters
    contact = node._contact_ns()
    fabric = node._fabric
    assert node.member is not None
    swim, entries = node.liveness.swim, node.liveness.entries()
    labels = {
        "version": __version__,
        "endpoint": node.endpoint,
        "host": node.config.host,
        "zone": node.config.zone,
        "arena": str(node._store.arena.path),
        "ucx": (Ability.NONE if fabric is None else fabric.ability).name.lower(),
        "planner": str(node._ownership.view.planner == node.member).lower(),
        "serving": str(node._may_serve(now)).lower(),
        "members": ",".join(f"{e.member}={e.status.name.lower()}" for e in entries),
    }
    figures: dict[str, float] = {
        "uptime_s": (now - node._started_ns) / 1e9,
        "etcd_contact_age_s": (now - contact) / 1e9 if contact else -1.0,
        "members_seen": swim.present,
        "members_suspected": sum(e.status == Status.SUSPECT for e in entries),
        "members_dead": sum(e.status == Status.DEAD for e in entries),
        "members_left": sum(e.status == Status.LEFT for e in entries),
        "heartbeats_sent_total": node._heartbeats.sent_total,
        "gossip_awareness": swim.awareness,
        "gossip_away_total": swim.away_total,
        "gossip_refuted_total": swim.refuted_total,
        "gossip_sent_total": swim.sent_total,
        "gossip_dropped_total": node._listeners.gossip.dropped,
        "gossip_refused_total": node._listeners.gossip.refused,
        "buckets_owned": node._ownership.owned,
        "buckets_backed_up": node._ownership.held - node._ownership.owned,
        "buckets_served": len(node._replicas.served),
        "buckets_waiting": len(node._replicas.waiting),
        "buckets_copying": node._mover.under_way,
        "buckets_learning": len(node._learning.under_way),
        "buckets_taken_away_total": node._replicas.lost_buckets,
        "buckets_copied_total": node._mover.copied_total,
        "buckets_copied_bytes_total": node._mover.copied_bytes_total,
        "buckets_copy_failures_total": node._mover.failed_total,
        "buckets_promoted_total": node._replicas.promotions,
        "copies_dropped_total": node._journal.copies_dropped,
        "copies_missing": node._comparing.missing,
        "copies_compared_total": node._comparing.compared_total,
        "copies_differing_total": node._comparing.differing_total,
        "copies_stale_total": node._comparing.stale_total,
        "copies_extra_total": node._comparing.extra_total,
        "copies_resent_total": node._comparing.resent_total,
        "copies_resent_bytes_total": node._comparing.resent_bytes_total,
        "copies_restored_total": node._comparing.restored_total,
        "batches_replicated_total": node._replicator.batches_total,
        "batches_lost_total": node._replicator.batches_lost_total,
        "operations_replicated_total": node._replicator.prepared_total,
        "bytes_replicated_total": node._replicator.prepared_bytes_total,
        "values_staged": len(node._journal.oversized),
        "bytes_staged_total": node._journal.oversized.staged_bytes,
        "sessions": len(node._sessions),
        "sessions_reaped_total": node._sessions.reaped,
        "data_connections": len(node._listeners.data),
        "data_connections_dropped_total": node._listeners.data.dropped,
        "ucx_clients": fabric.clients if fabric is not None else 0,
        "ucx_pushes_total": fabric.pushes_total if fabric is not None else 0,
        "ucx_pushed_bytes_total": fabric.pushed_bytes_total if fabric is not None else 0,
        "ucx_push_failures_total": fabric.push_failures_total if fabric is not None else 0,
        "ucx_values_held_total": node._handlers.reading.held_total,
        "ucx_values_allocated_total": node._handlers.allocating.remote_total,
        "ucx_quarantine_bytes": node._handlers.sharing.quarantine.held_bytes,
        "ucx_quarantine_unproven_bytes": node._handlers.sharing.quarantine.unproven_bytes,
        "pins": len(node._sessions.pins),
        "objects": store.objects,
        "allocations": store.allocated,
        "value_bytes": store.value_bytes,
        "memory_limit_bytes": store.size_bytes,
        "memory_used_bytes": store.used_bytes,
        "memory_free_bytes": store.free_bytes,
        "memory_largest_free_bytes": store.largest_free_bytes,
        "memory_retiring_bytes": store.retiring_bytes,
        "memory_rooms_bytes": store.rooms_bytes,
        "memory_fragmentation_ratio": store.fragmentation,
        "hard_pinned_bytes": store.hard_pinned_bytes,
        "hard_pin_quota_bytes": store.hard_pin_quota_bytes,
        "metadata_bytes": store.metadata_bytes,
        "metadata_limit_bytes": store.metadata_limit_bytes,
        "hits_total": counters.hits,
        "misses_total": counters.misses,
        "puts_total": counters.puts,
        "put_bytes_total": counters.put_bytes,
        "refused_memory_total": counters.refused_memory,
        "refused_quota_total": counters.refused_quota,
        "refused_size_total": counters.refused_size,
        "corrupt_arrivals_total": node._handlers.arrivals.corrupt_total
        + node._learning.corrupt_arrivals,
        "scrubs_total": node._scrub.runs,
        "scrub_checked_bytes": node._scrub.checked_bytes,
        "garbage_total": node._frontend.garbage,
        "requests_refused_total": node._handlers.admission.refused,
        "answers_dropped_total": node._listeners.server.dropped,
    }
    if node._published is not None:
        index = node._published.figures()
        figures["index_slots"] = index.slots
        figures["index_objects"] = index.published
        figures["index_refused_objects"] = index.refused
        figures["index_hits_total"] = index.hits + index.present
        figures["index_misses_total"] = index.misses + index.absent
        figures["hits_total"] += index.hits
        figures["misses_total"] += index.misses
        figures["index_torn_total"] = index.torn
    if node._listeners.reads is not None:
        reads = node._listeners.reads.figures()
        figures |= {
            "read_connections": reads.connections,
            "read_connections_dropped_total": reads.dropped,
            "read_requests_total": reads.requests,
            "read_values_total": reads.values,
            "read_value_bytes_total": reads.bytes,
            "read_flags_total": reads.flags,
            "read_misses_total": reads.misses + reads.absent,
            "read_asks_total": reads.asks,
        }
        figures["hits_total"] += reads.values
        figures["misses_total"] += reads.misses
    for reason in Reason:
        figures[f"objects_{reason.name.lower()}_total"] = counters.lost[reason]
    for kind, count in node._handlers.requests.items():
        figures[f"requests_{Kind(kind).name.lower()}_total"] = count
    return wire.NodeStats(node.member, labels, figures)
