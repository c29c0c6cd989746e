"""Writes docs/configuration.md from the structs in p2pkv/config.py, or checks it (--check)."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from p2pkv import config
from p2pkv.commands.parameters import flag, shown, variable

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

Made by `scripts/gen_configuration.py` from `p2pkv/config.py`; do not edit.

A value is taken from, strongest first: a keyword argument or an option of `p2pkv node`, an
environment variable, a TOML file (`--config`), the default. The option, the variable and the place
in the file all follow from the field's name:

| field | option | environment | TOML |
|---|---|---|---|
| `memory_limit_bytes` | `--memory-limit-bytes 64GiB` | `P2PKV_MEMORY_LIMIT_BYTES=64GiB` | \
`memory_limit_bytes = "64GiB"` |
| `etcd.endpoints` | `--etcd-endpoints http://a:2379,http://b:2379` | \
`P2PKV_ETCD__ENDPOINTS=http://a:2379,http://b:2379` | `[etcd]` and \
`endpoints = ["http://a:2379", "http://b:2379"]` |

Units are the end of a name: `_s` seconds, `_bytes` bytes. Sizes may be written `4096`, `64MiB`,
`1.5g`; units are powers of 1,024. A wrong value is refused with the field, the value and what is
allowed, before anything is started.
"""

SECTIONS: list[tuple[str, str, str, type[msgspec.Struct]]] = [
    ("A node", "`NodeConfig`: `p2pkv node`, `p2pkv.Node`.", "", config.NodeConfig),
    (
        "etcd",
        "`EtcdConfig`: the field `etcd` of a node and of a client. Certificates are for "
        "`https://` endpoints.",
        "etcd",
        config.EtcdConfig,
    ),
    (
        "Limits",
        "`Limits`: the field `limits` of a node and of a client. Both sides check them before "
        "anything is allocated.",
        "limits",
        config.Limits,
    ),
    (
        "Who is alive",
        "`SwimConfig`: the field `swim` of a node. The nodes of a cluster should agree on it.",
        "swim",
        config.SwimConfig,
    ),
    (
        "A client",
        "`ClientConfig`: the client commands of `p2pkv`. `p2pkv.Client` and `p2pkv.AsyncClient` "
        "take the same as arguments, see their docstrings.",
        "",
        config.ClientConfig,
    ),
]

ANY_HOST = "this host's name"
DEFAULTS = {"node_id": ANY_HOST, "host": ANY_HOST}


def remarks(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The sentences that stand below the fields in the source."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, remark in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(remark, ast.Expr) and isinstance(remark.value, ast.Constant)
        if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = " ".join(str(remark.value.value).split()).replace("``", "`")
    return found


def allowed(hint: Any) -> str:
    """What a field's type lets through, in words."""
    if get_origin(hint) is not Annotated:
        words = {bool: "true or false", int: "a whole number", str: "text", float: "a number"}
        return words.get(hint, "a list of text" if get_origin(hint) is tuple else "")
    base, *metas = get_args(hint)
    parts = []
    for meta in metas:
        if meta.pattern:
            parts.append(f"text: `{meta.pattern}`".replace("|", "\\|"))
        low, high = (meta.ge, meta.gt), (meta.le, meta.lt)
        parts += [f"{s} {v:,}" for s, v in zip(("≥", ">"), low, strict=True) if v is not None]
        parts += [f"{s} {v:,}" for s, v in zip(("≤", "<"), high, strict=True) if v is not None]
    return ", ".join(parts) or allowed(base)


def default(field: msgspec.structs.FieldInfo) -> str:
    if field.name in DEFAULTS:
        return DEFAULTS[field.name]
    text = shown(field.default)
    if "bytes" not in field.name or not field.default:
        return text
    for unit, factor in (("GiB", config.GiB), ("MiB", config.MiB), ("KiB", config.KiB)):
        if field.default % factor == 0:
            return f"{field.default // factor} {unit}"
    return text


def rows(prefix: str, kind: type[msgspec.Struct]) -> list[str]:
    hints = get_type_hints(kind, include_extras=True)
    meaning = remarks(kind)
    lines = ["| field | default | allowed | |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        if field.name in ("etcd", "limits", "swim"):
            lines.append(f"| `{field.name}.…` | | see below | |")
            continue
        name = f"{prefix}.{field.name}" if prefix else field.name
        cells = (
            f"`{name}`",
            default(field),
            allowed(hints[field.name]),
            meaning.get(field.name, ""),
        )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def page() -> str:
    parts = [INTRODUCTION]
    for title, text, prefix, kind in SECTIONS:
        parts.append(f"## {title}\n\n{text}\n\n" + "\n".join(rows(prefix, kind)) + "\n")
    example = "etcd.session_ttl_s"
    parts.append(
        "## Names\n\n"
        f"Of a field in a table, such as `{example}`, the option is `{flag(example)}` and the "
        f"variable `{variable(example)}`. A variable that names no field is not looked at; an "
        "unknown field in a file, or an unknown option, is refused.\n"
    )
    return "\n".join(parts)


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() != page():
            sys.exit(f"{PAGE} is not up to date: run scripts/gen_configuration.py")
        return
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
