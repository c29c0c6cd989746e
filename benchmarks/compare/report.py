"""Tables of rows, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .work import KIB, MIB

Row = dict[str, Any]
LIMITS = ("socket", "memcpy")


def table(rows: Sequence[Row]) -> str:
    """Median microseconds of a call, in brackets GB/s, or calls a second where clients are many.

    The last column is the best p2pkv over the best peer in rates: above 1, p2pkv is faster.
    """
    names = list(dict.fromkeys(r["store"] for r in rows))
    lines = ["| call | " + " | ".join(names) + " | p2pkv / best peer |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for place in dict.fromkeys(map(place_of, rows)):
        here = {r["store"]: r for r in rows if place_of(r) == place}
        cells = [cell(here[n]) if n in here else "–" for n in names]
        ratio = against_peers(list(here.values()))
        lines.append(f"| {title(*place)} | {' | '.join(cells)} | {ratio:.2f} |" if ratio else
                     f"| {title(*place)} | {' | '.join(cells)} | – |")  # fmt: skip
    return "\n".join(lines)


def place_of(row: Row) -> tuple[str, int, int, int]:
    return row["workload"], row["size_bytes"], row["keys"], row["clients"]


def title(workload: str, size: int, keys: int, clients: int) -> str:
    if workload in ("exists", "match"):
        return f"{workload} of {keys} keys"
    by = f", {clients} clients" if clients > 1 else ""
    return f"{workload} {keys} × {human(size)}{by}"


def human(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def cell(row: Row) -> str:
    speed = f" ({row['gb_per_s']:.2f})" if row["gb_per_s"] else ""
    return f"{row['p50_us']:.0f}{speed}"


def against_peers(here: Sequence[Row]) -> float | None:
    ours = [r["keys_per_s"] for r in here if is_ours(r["store"])]
    peers = [r["keys_per_s"] for r in here if is_peer(r["store"])]
    return max(ours) / max(peers) if ours and peers else None


def is_ours(store: str) -> bool:
    return store.startswith("p2pkv")


def is_peer(store: str) -> bool:
    return not (is_ours(store) or store in LIMITS or "cop" in store)


def sections(rows: Sequence[Row]) -> str:
    """The tables of all parts."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    return "\n\n".join(f"### {name}\n\n{table(part)}" for name, part in parts.items())
