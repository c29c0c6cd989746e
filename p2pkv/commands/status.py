"""``p2pkv status``, ``p2pkv ring show``, ``p2pkv forget``: the cluster as etcd and nodes see it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2pkv.commands.output import (
    FAILED,
    MISS,
    UNREACHABLE,
    USAGE,
    Failure,
    print_json,
    print_table,
    progress,
    say,
    size,
)
from p2pkv.commands.parameters import Json, with_connection
from p2pkv.config import ClientConfig

if TYPE_CHECKING:
    from p2pkv.commands.survey import Said
    from p2pkv.records import View

ring = typer.Typer(no_args_is_help=True, help="Which node owns which buckets.")

_FIGURES = (
    "buckets_owned",
    "buckets_backed_up",
    "buckets_copying",
    "objects",
    "memory_used_bytes",
    "memory_limit_bytes",
    "hits_total",
    "misses_total",
    "etcd_contact_age_s",
    "uptime_s",
)


@with_connection
def status(config: ClientConfig, *, as_json: Json = False) -> None:
    """Show the nodes, what they hold, and whether every bucket has an owner.

    With --json: {"cluster", "planner", "nodes": [...], "gone", "buckets": {"total",
    "without_owner", "moving", "lost_owner"}}; with --seeds, without etcd, "buckets" and "planner"
    are null. "seen_as" of a node counts what the others take it for: "alive", "suspect", "dead",
    "left"; "gone" has the members that are not asked and that others still know, in the same way.
    """
    from p2pkv.commands import survey

    with progress("asking etcd and the nodes"):
        view = survey.read_view(config) if config.etcd is not None else None
        places = survey.control_endpoints(view) if view else {e: e for e in config.seeds}
        said = survey.ask_nodes(config, list(places.values()))
    nodes = [_node(str(who), place, said[place], view) for who, place in places.items()]
    gone = _opinions(said.values())
    for node in nodes:
        node["seen_as"] = gone.pop(node["member"], {})
    buckets = survey.count_buckets(view) if view else None
    planner = str(view.planner) if view and view.planner else None
    if as_json:
        print_json({"cluster": config.cluster, "planner": planner, "nodes": nodes,
                    "gone": gone, "buckets": buckets})  # fmt: skip
    else:
        _print_status(config.cluster, nodes, gone, buckets)
    if nodes and not any(node["reachable"] for node in nodes):
        raise typer.Exit(UNREACHABLE)


def _opinions(said: Iterable[Said]) -> dict[str | None, dict[str, int]]:
    """What the nodes that answered take each other member for: how many say so."""
    opinions: dict[str | None, dict[str, int]] = {}
    for answer in said:
        members = answer.stats.labels.get("members", "") if answer.stats else ""
        for opinion in filter(None, members.split(",")):
            member, _, status = opinion.partition("=")
            counts = opinions.setdefault(member, {})
            counts[status] = counts.get(status, 0) + 1
    return opinions


def _in_words(seen_as: dict[str, int]) -> str:
    """``alive``; ``2 dead, 1 suspect`` where they differ."""
    if len(seen_as) < 2:
        return next(iter(seen_as), "")
    return ", ".join(f"{count} {status}" for status, count in sorted(seen_as.items()))


def _node(who: str, place: str, said: Said, view: View | None) -> dict[str, Any]:
    stats = said.stats
    figures = stats.figures if stats else {}
    labels = stats.labels if stats else {}
    member = str(stats.member) if stats else who if view else None
    node = member.rpartition("@")[0] if member else None
    record = view.nodes.get(node) if view and node else None  # type: ignore[call-overload]
    return {
        "member": member,
        "endpoint": place,
        "reachable": stats is not None,
        "reason": said.reason,
        "serving": labels.get("serving") == "true",
        "draining": record.draining if record else None,
        "host": labels.get("host", record.host if record else None),
        "zone": labels.get("zone", record.zone if record else None),
        "version": labels.get("version"),
        **{name: _plain(name, figures.get(name)) for name in _FIGURES},
    }


def _plain(name: str, value: float | None) -> float | int | None:
    """Counts are whole numbers; seconds are not."""
    return value if value is None or name.endswith("_s") else int(value)


_COLUMNS = ("member", "endpoint", "state", "seen as", "buckets>", "objects>", "memory>", "hits>",
            "misses>", "etcd contact>")  # fmt: skip


def _print_status(
    cluster: str, nodes: list[dict[str, Any]], gone: dict[str | None, dict[str, int]], buckets: Any
) -> None:
    print_table(f"cluster {cluster}", _COLUMNS, [_row(node) for node in nodes])
    for member, seen_as in gone.items():
        print(f"{member} is not registered, and seen as {_in_words(seen_as)}")
    if buckets is None:
        return
    troubles = (buckets.without_owner, buckets.moving, buckets.lost_owner)
    print(
        f"{buckets.total} buckets: {buckets.total - sum(troubles)} in place, "
        f"{buckets.moving} moving, {buckets.without_owner} without owner, "
        f"{buckets.lost_owner} whose owner is gone, {buckets.short_of_copies} short of copies"
    )


def _row(node: dict[str, Any]) -> tuple[object, ...]:
    if not node["reachable"]:
        reason = f"unreachable: {node['reason']}"
        return (node["member"] or "?", node["endpoint"], reason, _in_words(node["seen_as"]))
    state = "serving" if node["serving"] else "not serving"
    used, limit = size(node["memory_used_bytes"]), size(node["memory_limit_bytes"])
    return (
        node["member"],
        node["endpoint"],
        "draining" if node["draining"] else state,
        _in_words(node["seen_as"]),
        f"{int(node['buckets_owned'])}+{int(node['buckets_backed_up'])}",
        int(node["objects"]),
        f"{used} of {limit}",
        int(node["hits_total"]),
        int(node["misses_total"]),
        f"{node['etcd_contact_age_s']:.1f} s ago",
    )


@with_connection
def show(
    config: ClientConfig,
    *,
    buckets: Annotated[
        bool, typer.Option("--buckets", help="Also the record of every bucket.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how many buckets each node owns, is meant to own, and has on the move.

    With --json: {"cluster", "bucket_count", "hash_scheme", "revision", "nodes": [{"node",
    "registered", "owned", "assigned", "arriving", "leaving"}]}, and with --buckets "buckets":
    [{"bucket", "epoch", "generation", "primary", "assigned", "moving"}].
    """
    from p2pkv.commands import survey

    with progress("asking etcd"):
        view = survey.read_view(config)
    assert view.meta is not None
    nodes = [
        {
            "node": node,
            "registered": node in view.nodes,
            "owned": share.owned,
            "assigned": share.assigned,
            "arriving": share.arriving,
            "leaving": share.leaving,
        }
        for node, share in survey.shares(view).items()
    ]
    records = _records(view) if buckets else []
    if as_json:
        shown = {
            "cluster": config.cluster,
            "bucket_count": view.meta.bucket_count,
            "hash_scheme": view.meta.hash_scheme,
            "revision": view.revision,
            "nodes": nodes,
        }
        print_json({**shown, "buckets": records} if buckets else shown)
        return
    title = f"cluster {config.cluster}: {view.meta.bucket_count} buckets"
    columns = ("node", "registered", "owned>", "assigned>", "arriving>", "leaving>")
    rows = [("yes" if v is True else "no" if v is False else v for v in n.values()) for n in nodes]
    print_table(title, columns, [tuple(row) for row in rows])
    if buckets:
        names = ("bucket>", "epoch>", "generation>", "primary", "assigned", "moving")
        print_table("", names, [_record_row(r) for r in records])


def _records(view: View) -> list[dict[str, Any]]:
    from p2pkv.commands.survey import moving

    return [
        {
            "bucket": bucket,
            "epoch": versioned.record.epoch,
            "generation": versioned.record.generation,
            "primary": str(versioned.record.primary),
            "assigned": list(versioned.record.assigned),
            "moving": moving(versioned.record),
        }
        for bucket, versioned in sorted(view.buckets.items())
    ]


def _record_row(record: dict[str, Any]) -> tuple[object, ...]:
    *first, assigned, is_moving = record.values()
    return (*first, ", ".join(assigned), "yes" if is_moving else "")


_FORGET = """\
Forgetting node {node!r} of cluster {cluster!r} is your word that no process which ran as it comes
back with what it held. Its {owned} buckets may then start again, empty, at once, instead of after
the time it takes to be sure. What only this node held is lost; a process that does come back as
{node!r} stops by itself."""


@with_connection
def forget(
    config: ClientConfig,
    *,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's id.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Declare that a dead node never comes back, so that its buckets start again at once.

    With --json: {"node", "boot", "buckets"}. Asks first, unless --yes is given.
    """
    from p2pkv.commands import survey

    view = survey.read_view(config)
    if node not in view.boots:
        raise Failure(f"node {node!r} was never registered in cluster {config.cluster!r}", MISS)
    share = survey.shares(view).get(node)  # type: ignore[call-overload]
    owned = share.owned if share else 0
    if not yes:
        say(_FORGET.format(node=node, cluster=config.cluster, owned=owned))
        if node in view.nodes:
            say(f"WARNING: {node!r} is registered at this moment, so it seems to be alive.")
        _confirm(f"Forget {node!r}?")
    boot = _forget(config, node)
    if as_json:
        print_json({"node": node, "boot": boot, "buckets": owned})
    else:
        print(f"{node!r} is forgotten; its next life is {node}@{boot + 1} or later")


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise Failure("stdin is no terminal to ask on: say --yes", USAGE)
    if not typer.confirm(question, err=True):
        raise Failure("nothing was changed", FAILED)


def _forget(config: ClientConfig, node: str) -> int:
    import asyncio

    from p2pkv.authority import EtcdAuthority
    from p2pkv.types import NodeId

    async def forget() -> int:
        assert config.etcd is not None
        async with EtcdAuthority(config.etcd, config.cluster) as authority:
            return await authority.forget(NodeId(node))

    return asyncio.run(forget())
