"""Pictures of a run of ``peers.py``, for people.

    pip install '.[bench]'
    python benchmarks/plot.py out.json            # writes PNG files to docs/images

Bandwidth of batches by size of the values, latency of single calls, and the rates of p2pkv over
those of the best peer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from compare.report import against_peers, human, is_ours, place_of, title

matplotlib.use("Agg")
from matplotlib import pyplot

Row = dict[str, Any]
IMAGES = Path(__file__).parent.parent / "docs" / "images"
OURS = {"p2pkv-auto": "#b3261e", "p2pkv-tcp": "#e8710a", "p2pkv-zmq": "#e8b30a",
        "p2pkv-ucx": "#8e24aa"}  # fmt: skip
PEERS = {"mooncake-shm": "#0b57d0", "mooncake-tcp": "#669df6", "redis-unix": "#137333",
         "redis": "#5bb974", "memcached-pylibmc": "#5f6368",
         "memcached-pymemcache": "#9aa0a6"}  # fmt: skip
LIMITS = {"memcpy": "#202124", "socket": "#bdc1c6"}
COLORS = OURS | PEERS | LIMITS
READS = ("batch_get_into", "batch_get")
"""A store's best call for reading a batch is drawn."""


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def best_by_size(
    rows: Sequence[Row], workloads: Sequence[str], field: str
) -> dict[str, dict[int, float]]:
    """For each store the best of the workloads at each size; a rate, or a time if it ends in us."""
    better = min if field.endswith("us") else max
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["workload"] in workloads:
            sizes = found.setdefault(row["store"], {})
            size, value = row["size_bytes"], row[field]
            sizes[size] = better(sizes.get(size, value), value)
    return found


def lines(axes: Any, found: dict[str, dict[int, float]], label: str) -> None:
    for store in [s for s in COLORS if s in found]:
        sizes = sorted(found[store])
        style = "--" if store in LIMITS else "-"
        width = 2.4 if is_ours(store) else 1.4
        axes.plot(sizes, [found[store][s] for s in sizes], style, color=COLORS[store],
                  linewidth=width, marker="o", markersize=4, label=store)  # fmt: skip
    every = sorted({size for sizes in found.values() for size in sizes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [human(size) for size in every])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(label)
    axes.grid(True, which="both", axis="y", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def bandwidth(rows: Sequence[Row]) -> Any:
    figure, (reads, writes) = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    calls = of_part(rows, "calls")
    lines(reads, best_by_size(calls, READS, "gb_per_s"), "GB/s")
    lines(writes, best_by_size(calls, ["batch_put"], "gb_per_s"), "")
    reads.set_title("batch get")
    writes.set_title("batch put")
    for axes in (reads, writes):
        axes.set_xlabel("bytes of a value; 32 in a batch, 128 of 4 KiB")
    reads.legend(frameon=False, fontsize=8)
    return figure


def latency(rows: Sequence[Row]) -> Any:
    figure, (gets, puts) = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    calls = of_part(rows, "calls")
    lines(gets, best_by_size(calls, ["get", "get_into"], "p50_us"), "median µs of a call")
    lines(puts, best_by_size(calls, ["put"], "p50_us"), "")
    gets.set_title("one get")
    puts.set_title("one put")
    for axes in (gets, puts):
        axes.set_xlabel("bytes of the value")
    gets.legend(frameon=False, fontsize=8)
    return figure


def ratios(rows: Sequence[Row]) -> Any:
    """Bars of p2pkv's best path over the best peer, one for each workload that both have."""
    places = dict.fromkeys(place_of(r) for r in rows if r["part"] in ("calls", "sequences"))
    found = [(title(*p), against_peers([r for r in rows if place_of(r) == p])) for p in places]
    bars = [(name, value) for name, value in reversed(found) if value]
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.25 * len(bars)))
    colors = [OURS["p2pkv-auto"] if value >= 1 else "#9aa0a6" for _, value in bars]
    widths = [value - 1 for _, value in bars]
    axes.barh([name for name, _ in bars], widths, left=1, color=colors)
    for at, (_, value) in enumerate(bars):
        side = "left" if value >= 1 else "right"
        axes.text(value, at, f" {value:.2g}× ", va="center", ha=side, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("p2pkv's rate over the best peer's (above 1: p2pkv is faster)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


PLOTS = {"bandwidth": bandwidth, "latency": latency, "ratios": ratios}


def write(rows: Sequence[Row], directory: Path) -> list[Path]:
    """One PNG file for each plot."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, plot in PLOTS.items():
        figure = plot(rows)
        files.append(directory / f"peers-{name}.png")
        figure.savefig(files[-1], dpi=130, bbox_inches="tight")
        pyplot.close(figure)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", metavar="FILE", help="of peers.py --json")
    parser.add_argument("--to", type=Path, default=IMAGES, help="directory (default: docs/images)")
    options = parser.parse_args()
    for file in write(json.loads(Path(options.json).read_text())["rows"], options.to):
        print(file)


if __name__ == "__main__":
    main()
