"""``p2pkv mooncake-shim``: a program that was written for Mooncake Store, over a p2pkv cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from p2pkv.commands.output import USAGE, Failure
from p2pkv.commands.parameters import variable, with_connection
from p2pkv.config import ClientConfig

SHIM = Path(__file__).parent.parent / "adapters" / "shim"
"""A directory with a package ``mooncake``."""


@with_connection
def mooncake_shim(
    config: ClientConfig,
    *,
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND [ARGUMENT]...", help="The program and its arguments."),
    ],
) -> None:
    """Run a program for which mooncake.store is p2pkv's.

    In the program, and in every process that it starts, "from mooncake.store import
    MooncakeDistributedStore" gives the class of p2pkv, whether Mooncake is installed or not; its
    other modules are found as ever. The program finds the cluster that the options here name.

    p2pkv must be installed for the Python that runs the program. The exit code is the program's.
    """
    environ = {**os.environ, **environment(config)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SHIM), os.environ.get("PYTHONPATH"))))
    try:
        os.execvpe(program[0], program, environ)
    except OSError as e:
        raise Failure(f"{program[0]}: {e.strerror}", USAGE) from None


def environment(config: msgspec.Struct, path: tuple[str, ...] = ()) -> dict[str, str]:
    """The variables by which a process of p2pkv has the same configuration."""
    values: dict[str, str] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            values |= environment(value, (*path, name))
        elif value is not None:
            shown = ",".join(value) if isinstance(value, tuple) else str(value)
            values[variable(".".join((*path, name)))] = shown
    return values
