"""What clients did and what came of it: one record for each key of each call.

Records are kept as lines of JSON, in files that a later run of the judge can read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from p2pkv.testing.linearizability import Kind, Operation

SUFFIX = ".history.jsonl"


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One operation on one key. Times are monotonic nanoseconds of this host.

    A write that ended with ``error`` was not done, unless it is ``unknown``: then it may have its
    effect at any time after ``called``, or never.
    """

    client: str
    kind: Kind
    key: str
    called: int
    returned: int
    value: str = ""
    """Of a put: the tag of the value (see ``selfdescribing``)."""
    result: str | bool | None = None
    """Of a get the tag that was found, or None; of a conditional put or a delete whether it
    changed anything."""
    error: str = ""
    message: str = ""
    unknown: bool = False
    fault: str = ""
    """What is wrong with the bytes that were read."""

    @property
    def acknowledged(self) -> bool:
        return not self.error

    def operation(self) -> Operation | None:
        """What the checker is to know of it; None: a read without an answer, or a write that
        is promised not to have been done."""
        if self.error and (self.kind is Kind.GET or not self.unknown):
            return None
        returned = None if self.error else self.returned
        return Operation(
            self.kind, self.called, returned, self.value or None, self.result, self.client
        )


def by_key(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each key, in order of their calls."""
    keys: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        keys[record.key].append(record)
    for of_key in keys.values():
        of_key.sort(key=lambda r: r.called)
    return keys


def read(directory: Path) -> Iterator[Record]:
    """All records of the history files in a directory."""
    decode = msgspec.json.Decoder(Record).decode
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with path.open("rb") as lines:
            yield from map(decode, lines)


class Recorder:
    """Writes the records of one client thread to a file of its own. A context manager."""

    def __init__(self, directory: Path, client: str) -> None:
        self.client = client
        self.operations = 0
        self.errors = 0
        self._file = (directory / f"{client}{SUFFIX}").open("ab", buffering=1 << 16)
        self._encode = msgspec.json.Encoder().encode

    def add(self, record: Record) -> None:
        self.operations += 1
        self.errors += bool(record.error)
        self._file.write(self._encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


__all__ = ["SUFFIX", "Record", "Recorder", "by_key", "read"]
