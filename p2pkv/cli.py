"""The command ``p2pkv``. What each command does stands in ``p2pkv.commands``.

Modules that take long to import (sockets, gRPC, tables) are imported where they are used, so that
``p2pkv --help`` answers at once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from p2pkv._version import __version__
from p2pkv.commands import bench, data, doctor, drain, mooncake, node, scrub, status, up
from p2pkv.commands.output import EXIT_CODES, INTERRUPTED, command

_EPILOG = "Exit codes: " + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items()) + "."
_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="p2pkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
    epilog=_EPILOG,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """A peer-to-peer store for the KV cache of LLM inference."""


def _help(function: Callable[..., Any]) -> str:
    """The docstring with each paragraph on one line, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _add(group: typer.Typer, name: str, function: Callable[..., None]) -> None:
    group.command(name, help=_help(function), context_settings=_SETTINGS)(command(function))


for _name, _function in {
    "up": up.up,
    "down": up.down,
    "node": node.node,
    "status": status.status,
    "get": data.get,
    "put": data.put,
    "exists": data.exists,
    "delete": data.delete,
    "scan": data.scan,
    "bench": bench.bench,
    "doctor": doctor.doctor,
    "drain": drain.drain,
    "forget": status.forget,
    "scrub": scrub.scrub,
    "mooncake-shim": mooncake.mooncake_shim,
}.items():
    _add(app, _name, _function)
_add(status.ring, "show", status.show)
app.add_typer(status.ring, name="ring")


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    try:
        app(prog_name="p2pkv")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
