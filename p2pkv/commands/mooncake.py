"""``p2pkv mooncake-shim``: a program that was written for Mooncake Store, over a p2pkv cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from p2pkv.commands.output import USAGE, Failure
from p2pkv.commands.parameters import with_connection
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


def environment(config: ClientConfig) -> dict[str, str]:
    """The variables by which a process of p2pkv finds the same cluster."""
    values: dict[str, Any] = {
        "P2PKV_CLUSTER": config.cluster,
        "P2PKV_TIMEOUT_S": config.timeout_s,
        "P2PKV_PATH": config.path,
        "P2PKV_SEEDS": ",".join(config.seeds),
    }
    if config.etcd is not None:
        for name in config.etcd.__struct_fields__:
            value = getattr(config.etcd, name)
            values[f"P2PKV_ETCD__{name.upper()}"] = (
                ",".join(value) if isinstance(value, tuple) else value
            )
    return {name: str(value) for name, value in values.items()}
