"""What a history says about the store: what was lost, stale, torn, or cannot be explained. Pure.

Two kinds of evidence are looked for. The checker of linearizability decides on the registers
whether *any* order explains what was seen. The counts here are narrower, and name the damage: each
is certain whatever order one assumes.

- *Lost*: an acknowledged write, of which a later operation found nothing, with no delete that could
  have come in between; or which the final reading finds replaced by something older.
- *Stale*: a read that returned a value which an acknowledged operation had replaced before the read
  began.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from p2pkv.testing.history import Record
from p2pkv.testing.linearizability import Kind, Operation, TooComplex, check

AUDITOR = "audit"
"""The client that reads every key once at the end."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must not be."""

    what: str
    key: str
    operation: Record
    """The one that shows it."""
    write: Record | None = None
    """The write that was lost, or the one that had replaced the value."""

    def __str__(self) -> str:
        because = f"\n    since {_told(self.write)}" if self.write else ""
        return f"{self.what}: {self.key}\n    {_told(self.operation)}{because}"


def _told(record: Record) -> str:
    outcome = record.error or f"-> {record.result}"
    times = f"{record.called / 1e9:.6f} to {record.returned / 1e9:.6f} s"
    return f"{times}  {record.client}  {record.kind.value} {record.value} {outcome}".rstrip()


class Verdict(msgspec.Struct, kw_only=True):
    """All findings about a history."""

    lost: list[Finding] = []
    stale: list[Finding] = []
    failed_reads: list[Finding] = []
    """Reads of a block that was acknowledged and not deleted, which gave an error or nothing."""
    damaged: list[Finding] = []
    """Values that are torn, or of another key, and reads that found them corrupt."""
    unexplained: dict[str, str] = {}
    """Of each register whose history is not linearizable: the violation, for people."""
    undecided: list[str] = []
    """Registers whose history is too complex to be checked."""

    @property
    def good(self) -> bool:
        return not any(msgspec.structs.astuple(self))


def judge(
    histories: dict[str, list[Record]], *, is_block: Sequence[str] = ("w/",), evicted: bool = False
) -> Verdict:
    """The verdict on the histories of all keys. ``evicted``: values may have made room for others,
    so that a miss proves nothing."""
    verdict = Verdict()
    for key, records in histories.items():
        block = key.startswith(tuple(is_block))
        verdict.damaged += damaged(key, records)
        verdict.stale += stale(key, records)
        if not evicted:
            verdict.lost += lost(key, records)
        if block:
            verdict.failed_reads += failed_reads(key, records, evicted)
        else:
            _check(verdict, key, records, evicted)
    return verdict


def _check(verdict: Verdict, key: str, records: Sequence[Record], evicted: bool) -> None:
    try:
        violation = check(operations(records), evictions=evicted)
    except TooComplex:
        verdict.undecided.append(key)
        return
    if violation:
        verdict.unexplained[key] = str(violation)


def operations(records: Iterable[Record]) -> list[Operation]:
    """What the checker is given."""
    return [op for r in records if not r.fault and (op := r.operation()) is not None]


def damaged(key: str, records: Iterable[Record]) -> list[Finding]:
    """Values with wrong bytes."""
    return [
        Finding(what=r.fault or "corrupt", key=key, operation=r)
        for r in records
        if r.fault or r.error == "CorruptValue"
    ]


def lost(key: str, records: Sequence[Record]) -> list[Finding]:
    """The acknowledged writes that are gone; each counts once."""
    writes = _Latest(r for r in records if _stored(r))
    deletes = _Reach(r for r in records if _may_delete(r))
    found: dict[int, Finding] = {}
    for record in records:
        if not record.acknowledged or not _found_nothing(record):
            continue
        write = writes.returned_before(record.called)
        if write is not None and not deletes.reaches(write.called, record.returned):
            what = "lost write"
            finding = Finding(what=what, key=key, operation=record, write=write)
            found.setdefault(write.called, finding)
    for finding in stale(key, [*records]):
        write = finding.write
        if finding.operation.client == AUDITOR and write is not None and _stored(write):
            found.setdefault(write.called, msgspec.structs.replace(finding, what="lost write"))
    return list(found.values())


def stale(key: str, records: Sequence[Record]) -> list[Finding]:
    """The reads of what had been replaced before they began."""
    settled = _Latest(r for r in records if r.acknowledged and _settles(r))
    by_tag = {r.value: r for r in records if r.value}
    found = []
    for record in records:
        writer = by_tag.get(str(record.result)) if record.kind is Kind.GET else None
        if writer is None or record.fault or not writer.acknowledged:
            continue
        later = settled.returned_before(record.called)
        if later is not None and later.called > writer.returned:
            found.append(Finding(what="stale read", key=key, operation=record, write=later))
    return found


def failed_reads(key: str, records: Sequence[Record], evicted: bool) -> list[Finding]:
    """The reads of a block that had to find it and did not."""
    writes = _Latest(r for r in records if _stored(r))
    deletes = _Reach(r for r in records if _may_delete(r))
    found = []
    for record in records:
        if record.kind is not Kind.GET or (record.acknowledged and record.result is not None):
            continue
        write = writes.returned_before(record.called)
        there = write is not None and not deletes.reaches(write.called, record.returned)
        if there and not (evicted and record.acknowledged):
            found.append(
                Finding(what="failed read of a block", key=key, operation=record, write=write)
            )
    return found


def _stored(record: Record) -> bool:
    """Whether the write is known to have stored its value."""
    if record.kind is Kind.PUT:
        return record.acknowledged
    return record.kind is Kind.PUT_IF_ABSENT and record.result is True


def _settles(record: Record) -> bool:
    """Whether no older value is there after it."""
    return _stored(record) or record.kind is Kind.DELETE


def _may_delete(record: Record) -> bool:
    return record.kind is Kind.DELETE and (record.unknown or record.result is True)


def _found_nothing(record: Record) -> bool:
    return {
        Kind.GET: record.result is None,
        Kind.PUT_IF_ABSENT: record.result is True,
        Kind.DELETE: record.result is False,
    }.get(record.kind, False)


def _called_later(one: Record, other: Record) -> Record:
    return one if one.called > other.called else other


class _Latest:
    """Of operations that had returned by some time: the one that was called last."""

    def __init__(self, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=lambda r: r.returned)
        self._returned = [r.returned for r in ordered]
        self._latest = list(accumulate(ordered, _called_later))

    def returned_before(self, time: int) -> Record | None:
        n = bisect_left(self._returned, time)
        return self._latest[n - 1] if n else None


class _Reach:
    """How far operations that were called by some time may reach; unknown ones have no end."""

    def __init__(self, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=lambda r: r.called)
        self._called = [r.called for r in ordered]
        ends = (float("inf") if r.error else r.returned for r in ordered)
        self._end = list(accumulate(ends, max))

    def reaches(self, begin: int, end: int) -> bool:
        """Whether any that was called up to ``end`` may have its effect after ``begin``."""
        n = bisect_left(self._called, end + 1)
        return bool(n) and self._end[n - 1] >= begin


__all__ = [
    "AUDITOR",
    "Finding",
    "Verdict",
    "damaged",
    "failed_reads",
    "judge",
    "lost",
    "operations",
    "stale",
]
