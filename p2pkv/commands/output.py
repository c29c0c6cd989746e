"""What commands print: tables and sentences for people, JSON for programs; and exit codes."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from p2pkv import errors

OK = 0
FAILED = 1
USAGE = 2
MISS = 3
UNREACHABLE = 4
INDETERMINATE = 5
INTERRUPTED = 130

EXIT_CODES = {
    OK: "done",
    FAILED: "the operation failed, or a check found something wrong",
    USAGE: "a wrong option or configuration; nothing was done",
    MISS: "the key, node or cluster is not there",
    UNREACHABLE: "etcd or the nodes could not be reached, or may not serve, before the deadline",
    INDETERMINATE: "a write was sent and not answered: it may or may not have taken effect",
    INTERRUPTED: "interrupted",
}

_CODES: list[tuple[type[BaseException], int]] = [
    (errors.Miss, MISS),
    (errors.ClusterMismatch, USAGE),
    (errors.InvalidArgument, USAGE),
    (errors.Unreachable, UNREACHABLE),
    (errors.AuthorityUnavailable, UNREACHABLE),
    (errors.DeadlineExceeded, UNREACHABLE),
    (errors.Stalled, UNREACHABLE),
    (errors.Indeterminate, INDETERMINATE),
]

PROGRESS_AFTER_S = 1.0


class Failure(Exception):
    """A command ends with a sentence for the user and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def exit_code(error: BaseException) -> int:
    """The exit code that stands for ``error``."""
    if isinstance(error, Failure):
        return error.code
    if isinstance(error, errors.BatchError):
        return INDETERMINATE if error.indeterminate else FAILED
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a command: errors become a sentence on stderr and an exit code.

    With ``--json`` they become ``{"error", "message", "exit_code"}`` on stdout as well.
    """

    @functools.wraps(function)
    def run(*args: Any, **given: Any) -> None:
        try:
            function(*args, **given)
        except (errors.P2PKVError, Failure) as e:
            code = exit_code(e)
            say(f"p2pkv: {e}")
            if given.get("as_json"):
                kind = type(e).__name__
                print_json({"error": kind, "message": str(e), "exit_code": code})
            raise typer.Exit(code) from None

    signature = inspect.signature(function, eval_str=True)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A sentence on stderr, where it does not mix with the output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout. Columns whose name ends in ``>`` are aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """A spinner on stderr, on a terminal only, once the block has taken over a second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(text)
    timer = threading.Timer(PROGRESS_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def size(number: float) -> str:
    """``3.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
