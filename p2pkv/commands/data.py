"""``p2pkv get``, ``put``, ``exists``, ``delete``, ``scan``: keys and values from a shell."""

from __future__ import annotations

import base64
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2pkv.commands.output import FAILED, MISS, USAGE, Failure, print_json, progress, say
from p2pkv.commands.parameters import Json, number, whole, with_connection
from p2pkv.config import ClientConfig

if TYPE_CHECKING:
    from p2pkv.client import Client


Key = Annotated[str, typer.Argument(metavar="KEY", help="UTF-8, or with --hex hexadecimal.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="One or more keys.")]
TTL_MAX_S = 1e8
Hex = Annotated[bool, typer.Option("--hex", help="Keys are given in hexadecimal.")]


def open_client(config: ClientConfig) -> Client:
    """A client for the options of a command. Raises ConfigError."""
    from p2pkv.client import Client

    return Client.from_config(config)


def _key(text: str, is_hex: bool) -> bytes:
    if not is_hex:
        return text.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Failure(f"KEY = {text!r}: must be hexadecimal digits, with --hex", USAGE) from None


def _names(key: bytes) -> dict[str, str]:
    return {"key": key.decode("utf-8", "backslashreplace"), "key_hex": key.hex()}


@with_connection
def put(
    config: ClientConfig,
    *,
    key: Key,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="Default: read from stdin.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="PATH", help="Store this file's content.")
    ] = None,
    is_hex: Hex = False,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="Only if the key is not there (else code 1).")
    ] = False,
    write_once: Annotated[
        bool, typer.Option("--write-once", help="The content of this key will never differ.")
    ] = False,
    soft_pin: Annotated[bool, typer.Option("--soft-pin", help="Evict it last.")] = False,
    hard_pin: Annotated[
        bool, typer.Option("--hard-pin", help="Never evict it, within the node's quota.")
    ] = False,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="SECONDS", help="Until it expires.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Store a value: from the argument, a file, or stdin."""
    ttl_s = None if ttl is None else number("ttl", ttl, 0.001, TTL_MAX_S)
    data = _value(value, file, config.limits.value_bytes_max)
    name = _key(key, is_hex)
    with open_client(config) as kv, progress(f"storing {len(data)} bytes"):
        copies = kv.put(name, data, if_absent=if_absent, write_once=write_once,
                        soft_pin=soft_pin, hard_pin=hard_pin, ttl=ttl_s)  # fmt: skip
    if as_json:
        print_json({**_names(name), "bytes": len(data), "copies": copies})
    elif not copies:
        say("not stored: the key is there already")
    raise typer.Exit(0 if copies else FAILED)


def _value(value: str | None, file: str | None, limit: int) -> bytes:
    if value is not None and file is not None:
        raise Failure("VALUE and --file: give one of them", USAGE)
    if value is not None:
        return value.encode("utf-8", "surrogateescape")
    if file is None:
        if sys.stdin.isatty():
            say("reading the value from the terminal, until Ctrl-D")
        return _limited(sys.stdin.buffer.read(limit + 1), "stdin", limit)
    try:
        with Path(file).open("rb") as source:
            return _limited(source.read(limit + 1), file, limit)
    except OSError as e:
        raise Failure(f"--file = {file!r}: {e.strerror}", USAGE) from None


def _limited(data: bytes, source: str, limit: int) -> bytes:
    if len(data) > limit:
        raise Failure(f"{source}: over value_bytes_max = {limit} bytes", USAGE)
    return data


@with_connection
def get(
    config: ClientConfig,
    *,
    key: Key,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="PATH", help="Write it to a file.")
    ] = None,
    is_hex: Hex = False,
    as_json: Json = False,
) -> None:
    """Write a value, as it is, to stdout or a file. Exit code 3 if the key is not there."""
    name = _key(key, is_hex)
    with open_client(config) as kv, progress("reading"):
        value = kv.get(name)
    if value is not None and output is not None:
        _write(output, value)
    if as_json:
        _print_value(name, value, inline=output is None)
    elif value is not None and output is None:
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    if value is None:
        if not as_json:
            say(f"key {key!r} is not there")
        raise typer.Exit(MISS)


def _write(path: str, value: bytes) -> None:
    try:
        Path(path).write_bytes(value)
    except OSError as e:
        raise Failure(f"--output = {path!r}: {e.strerror}", USAGE) from None


def _print_value(key: bytes, value: bytes | None, inline: bool) -> None:
    shown: dict[str, Any] = {**_names(key), "found": value is not None}
    shown["bytes"] = len(value) if value is not None else None
    text = base64.b64encode(value).decode() if value is not None and inline else None
    print_json({**shown, "value_base64": text})


@with_connection
def exists(config: ClientConfig, *, keys: Keys, is_hex: Hex = False, as_json: Json = False) -> None:
    """Say which keys are there. Exit code 3 unless all are."""
    names = [_key(key, is_hex) for key in keys]
    with open_client(config) as kv, progress("asking"):
        found = kv.batch_exists(names)
    _print_flags(names, found, as_json, "exists", ("there", "not there"))
    raise typer.Exit(0 if all(found) else MISS)


@with_connection
def delete(
    config: ClientConfig,
    *,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY...")] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="Instead of keys: all that begin so.")
    ] = None,
    is_hex: Hex = False,
    as_json: Json = False,
) -> None:
    """Delete keys, or all keys with a prefix. Exit code 3 unless each key was there."""
    if bool(keys) == (prefix is not None):
        raise Failure("KEY... and --prefix: give one of them", USAGE)
    with open_client(config) as kv, progress("deleting"):
        if prefix is not None:
            count = kv.delete_range(_key(prefix, is_hex))
            if as_json:
                print_json({"deleted": count})
            else:
                print(f"{count} deleted")
            return
        names = [_key(key, is_hex) for key in keys or ()]
        found = kv.batch_delete(names)
    _print_flags(names, found, as_json, "deleted", ("deleted", "was not there"))
    raise typer.Exit(0 if all(found) else MISS)


def _print_flags(
    keys: list[bytes], flags: list[bool], as_json: bool, field: str, words: tuple[str, str]
) -> None:
    if as_json:
        results = [{**_names(k), field: f} for k, f in zip(keys, flags, strict=True)]
        print_json({"keys": results})
        return
    for key, flag in zip(keys, flags, strict=True):
        print(f"{_names(key)['key']}\t{words[0] if flag else words[1]}")


@with_connection
def scan(
    config: ClientConfig,
    *,
    prefix: Annotated[str, typer.Option("--prefix", help="Only keys that begin so.")] = "",
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="N", help="Stop after so many.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="With --json: the values too.")] = False,
    is_hex: Hex = False,
    as_json: Json = False,
) -> None:
    """List keys and the sizes of their values, in no particular order.

    With --json one line for each key: {"key", "key_hex", "bytes"}, and with --values also
    "value_base64".
    """
    if values and not as_json:
        raise Failure("--values: needs --json", USAGE)
    count = None if limit is None else whole("limit", limit, 1, 1 << 40)
    start = _key(prefix, is_hex)
    with open_client(config) as kv:
        if values:
            for key, value in islice(kv.scan(start), count):
                text = base64.b64encode(value).decode()
                print_json({**_names(key), "bytes": len(value), "value_base64": text})
            return
        for key, size in islice(kv.scan_keys(start), count):
            if as_json:
                print_json({**_names(key), "bytes": size})
            else:
                print(f"{_names(key)['key']}\t{size}")
