"""Options that several commands share, and options made from the fields of a configuration.

typer reads a command's options from the signature of its function. What is shared is added to the
signature here, and handed to the function as one object.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from p2pkv.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
LocalName = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="The cluster's name. (P2PKV_CLUSTER; default: default)"
    ),
]

_Function = Callable[..., None]


def with_parameters(
    parameters: list[inspect.Parameter], collect: Callable[[dict[str, Any]], Any]
) -> Callable[[_Function], _Function]:
    """The decorated function's first argument is ``collect`` of what the parameters got."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            shared = {p.name: given.pop(p.name) for p in parameters}
            function(collect(shared), **given)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        merged = [*own, *parameters]
        command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in merged}
        del command.__wrapped__
        return command

    return decorate


def option(name: str, kind: Any, *flags: str, **more: Any) -> inspect.Parameter:
    """An option, by default not given, as a parameter of a signature."""
    annotation = Annotated[kind, typer.Option(*flags, **more)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


# -- numbers, read here so that a refusal shows field, value and range -----------------------------


def number(field: str, text: str, low: float, high: float) -> float:
    """A number from ``low`` to ``high``. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(f"{field} = {text!r}: must be a number from {low:g} to {high:g}")
    return value


def whole(field: str, text: str, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``. Raises ConfigError."""
    value = int(text) if text.isdecimal() and len(text) < 20 else low - 1
    if not low <= value <= high:
        raise ConfigError(f"{field} = {text!r}: must be a whole number from {low} to {high}")
    return value


# -- the connection of a client command -----------------------------------------------------------


def _connection(
    name: str, kind: Any, flag: str, metavar: str, help_text: str, variable: str = ""
) -> inspect.Parameter:
    text = f"{help_text} (environment: {variable})" if variable else help_text
    return option(name, kind, flag, metavar=metavar, help=text, rich_help_panel="Connection")


CONNECTION = [
    _connection(
        "etcd_endpoints", str | None, "--etcd-endpoints", "URL,...",
        "The etcd in which the nodes are found. Default: that of the cluster which `p2pkv up` "
        "runs here, else http://127.0.0.1:2379.", "P2PKV_ETCD__ENDPOINTS",
    ),
    _connection(
        "seeds", str | None, "--seeds", "TCP,...",
        "Instead of etcd: control endpoints of some nodes.", "P2PKV_SEEDS",
    ),
    _connection(
        "cluster", str | None, "--cluster", "NAME",
        "The cluster's name. Default: default.", "P2PKV_CLUSTER",
    ),
    _connection(
        "timeout", str | None, "--timeout", "SECONDS",
        "Deadline of each operation. Default: 5.", "P2PKV_TIMEOUT_S",
    ),
    _connection(
        "path", str | None, "--path", "auto|tcp|zmq",
        "How bytes travel: by the best way there is, without shared memory, or by ZeroMQ alone. "
        "Default: auto.", "P2PKV_PATH",
    ),
    _connection(
        "config", str | None, "--config", "FILE", "TOML file with the fields of ClientConfig.",
    ),
]  # fmt: skip


def with_connection(function: _Function) -> _Function:
    """The command's first argument is a ClientConfig, from the options for connecting."""

    def collect(given: dict[str, Any]) -> Any:
        from p2pkv.commands.connection import client_config

        return client_config(given)

    return with_parameters(CONNECTION, collect)(function)


# -- every field of a configuration ---------------------------------------------------------------


def fields(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The dotted name and the default of each field of a struct, and of the structs in it."""
    import msgspec

    for field in msgspec.structs.fields(kind):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if isinstance(default, msgspec.Struct):
            yield from fields(type(default), (*path, field.name))
        else:
            yield ".".join((*path, field.name)), default


def field_options(kind: Any) -> list[inspect.Parameter]:
    """An option for each field: ``--etcd-session-ttl-s`` is the field ``etcd.session_ttl_s``."""
    return [_field_option(name, default) for name, default in fields(kind)]


def variable(name: str) -> str:
    """The environment variable of a field."""
    return "P2PKV_" + name.replace(".", "__").upper()


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace(".", "-").replace("_", "-")


def _field_option(name: str, default: Any) -> inspect.Parameter:
    argument = name.replace(".", "__")
    parent, _, _ = name.rpartition(".")
    more = {
        "help": f"({variable(name)}; default: {shown(default)})",
        "rich_help_panel": f"Fields of {parent}" if parent else "Fields of NodeConfig",
    }
    if isinstance(default, bool):
        flags = f"{flag(name)}/--no-{flag(name)[2:]}"
        return option(argument, bool | None, flags, **more)
    return option(argument, str | None, flag(name), metavar=_metavar(name, default), **more)


def _metavar(name: str, default: Any) -> str:
    if "bytes" in name:
        return "SIZE"
    if isinstance(default, tuple):
        return "A,B,..."
    if isinstance(default, str):
        return "TEXT"
    return "SECONDS" if name.endswith("_s") else "NUMBER"


def dotted(given: Mapping[str, Any]) -> dict[str, Any]:
    """From the names of arguments back to the names of fields."""
    return {name.replace("__", "."): value for name, value in given.items()}


def shown(default: Any) -> str:
    """A default as one would write it."""
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default) or "none"
