"""``p2pkv bench``: measure a running cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from p2pkv.commands.output import FAILED, print_json, print_table, say, size
from p2pkv.commands.parameters import Json, number, whole, with_connection
from p2pkv.config import ClientConfig, parse_size


@with_connection
def bench(
    config: ClientConfig,
    *,
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Some of put, get, get_into, batch_put, batch_get, batch_get_into, exists, match. "
            "Default: all.",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="Of the values. Default: 128 B to 4 MiB."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N", help="Keys in a batch, 1 to 4096.")] = "32",
    clients: Annotated[
        str, typer.Option(metavar="N,...", help="Client processes; each number is a run.")
    ] = "1",
    seconds: Annotated[
        str, typer.Option(metavar="SECONDS", help="For each measurement, up to 3600.")
    ] = "1",
    as_json: Json = False,
) -> None:
    """Measure a running cluster; all bytes that are read are verified.

    What is in the store may be evicted by it. With --json: {"rows": [{"workload", "size_bytes",
    "batch", "clients", "path", "ops_per_s", "gb_per_s", "p50_us", "p99_us", "errors"}]}. Exit code
    1 if there were errors.
    """
    from p2pkv.bench import SIZES, WORKLOADS, run

    rows = run(
        config,
        workloads=_split(workloads) or WORKLOADS,
        sizes=[parse_size(text, "sizes") for text in _split(sizes)] or SIZES,
        batch=whole("batch", batch, 1, 4096),
        clients=[whole("clients", text, 1, 256) for text in _split(clients)],
        seconds=number("seconds", seconds, 0.01, 3600),
        progress=say,
    )
    shown = [_plain(row) for row in rows]
    if as_json:
        print_json({"rows": shown})
    else:
        _print_rows(shown)
    if any(row["errors"] for row in shown):
        raise typer.Exit(FAILED)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _plain(row: Any) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(row)
    return plain


def _print_rows(rows: list[dict[str, Any]]) -> None:
    columns = ("workload", "size>", "batch>", "clients>", "path", "ops/s>", "GB/s>", "p50 µs>",
               "p99 µs>", "errors>")  # fmt: skip
    print_table(
        "",
        columns,
        [
            (
                r["workload"],
                size(r["size_bytes"]),
                r["batch"],
                r["clients"],
                r["path"],
                f"{r['ops_per_s']:,.0f}",
                f"{r['gb_per_s']:.3f}",
                f"{r['p50_us']:,.0f}",
                f"{r['p99_us']:,.0f}",
                r["errors"],
            )
            for r in rows
        ],
    )
