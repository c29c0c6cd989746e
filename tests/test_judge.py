"""What counts as lost, stale, failed and damaged; and what proves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pkv.testing import history
from p2pkv.testing.history import Record, Recorder, by_key
from p2pkv.testing.judge import AUDITOR, failed_reads, judge, lost, stale
from p2pkv.testing.linearizability import Kind


def rec(kind: Kind, called: int, returned: int, **more: Any) -> Record:
    fields = {"client": "c", "key": "r/1", **more}
    return Record(kind=kind, called=called, returned=returned, **fields)


def put(tag: str, called: int, returned: int, **more: Any) -> Record:
    return rec(Kind.PUT, called, returned, value=tag, result=True, **more)


def if_absent(tag: str, called: int, returned: int, stored: bool, **more: Any) -> Record:
    return rec(Kind.PUT_IF_ABSENT, called, returned, value=tag, result=stored, **more)


def get(tag: str | None, called: int, returned: int, **more: Any) -> Record:
    return rec(Kind.GET, called, returned, result=tag, **more)


def delete(called: int, returned: int, there: bool = True, **more: Any) -> Record:
    return rec(Kind.DELETE, called, returned, result=there, **more)


UNKNOWN = {"error": "Indeterminate", "unknown": True}
FAILED = {"error": "Unreachable"}

LOST = {
    "a miss": [put("a", 0, 1), get(None, 2, 3)],
    "the last of several": [put("a", 0, 1), put("b", 2, 3), get(None, 4, 5)],
    "put again after a delete": [delete(0, 1), put("a", 2, 3), get(None, 4, 5)],
    "a conditional put that stored": [if_absent("a", 0, 1, True), get(None, 2, 3)],
    "seen by a conditional put": [put("a", 0, 1), if_absent("b", 2, 3, True)],
    "seen by a delete": [put("a", 0, 1), delete(2, 3, there=False)],
    "a delete that was not done": [put("a", 0, 1), delete(2, 3, False, **FAILED), get(None, 4, 5)],
    "a delete that came later": [put("a", 0, 1), get(None, 2, 3), delete(4, 5)],
    "an older value at the end": [
        put("a", 0, 1), put("b", 2, 3), get("a", 4, 5, client=AUDITOR),
    ],
}  # fmt: skip
NOT_LOST = {
    "found": [put("a", 0, 1), get("a", 2, 3)],
    "never acknowledged": [put("a", 0, 1, **UNKNOWN), get(None, 2, 3)],
    "read before the answer": [put("a", 0, 5), get(None, 4, 6)],
    "deleted": [put("a", 0, 1), delete(2, 3), get(None, 4, 5)],
    "deleted beside the put": [put("a", 0, 5), delete(1, 4), get(None, 6, 7)],
    "being deleted": [put("a", 0, 1), get(None, 2, 9), delete(3, 8)],
    "perhaps deleted long ago": [delete(0, 1, **UNKNOWN), put("a", 2, 3), get(None, 4, 5)],
    "a read that failed": [put("a", 0, 1), get(None, 2, 3, **FAILED)],
    "a conditional put that was refused": [if_absent("a", 0, 1, False), get(None, 2, 3)],
}  # fmt: skip


@pytest.mark.parametrize("records", LOST.values(), ids=LOST.keys())
def test_is_a_lost_write(records: list[Record]) -> None:
    assert len(lost("r/1", records)) == 1


@pytest.mark.parametrize("records", NOT_LOST.values(), ids=NOT_LOST.keys())
def test_is_no_lost_write(records: list[Record]) -> None:
    assert lost("r/1", records) == []


def test_a_lost_write_counts_once_however_often_it_is_missed() -> None:
    records = [put("a", 0, 1), *(get(None, n, n + 1) for n in range(2, 20, 2))]
    assert len(lost("r/1", records)) == 1
    records += [put("b", 30, 31), get(None, 32, 33)]
    assert [f.write.value for f in lost("r/1", records) if f.write] == ["a", "b"]


STALE = {
    "overwritten": [put("a", 0, 1), put("b", 2, 3), get("a", 4, 5)],
    "deleted": [put("a", 0, 1), delete(2, 3), get("a", 4, 5)],
    "deleted although it was not there": [put("a", 0, 1), delete(2, 3, False), get("a", 4, 5)],
}
NOT_STALE = {
    "the newest": [put("a", 0, 1), put("b", 2, 3), get("b", 4, 5)],
    "writes side by side": [put("a", 0, 3), put("b", 2, 4), get("a", 5, 6)],
    "an overwrite under way": [put("a", 0, 1), put("b", 2, 9), get("a", 3, 4)],
    "an unknown overwrite": [put("a", 0, 1), put("b", 2, 3, **UNKNOWN), get("a", 4, 5)],
    "an unknown write comes late": [put("a", 0, 1, **UNKNOWN), put("b", 2, 3), get("a", 4, 5)],
    "a refused conditional put": [put("a", 0, 1), if_absent("b", 2, 3, False), get("a", 4, 5)],
}


@pytest.mark.parametrize("records", STALE.values(), ids=STALE.keys())
def test_is_a_stale_read(records: list[Record]) -> None:
    assert len(stale("r/1", records)) == 1


@pytest.mark.parametrize("records", NOT_STALE.values(), ids=NOT_STALE.keys())
def test_is_no_stale_read(records: list[Record]) -> None:
    assert stale("r/1", records) == []


def test_a_block_s_read_fails_by_an_error_or_by_a_miss() -> None:
    records = [put("a", 0, 1), get("a", 2, 3), get(None, 4, 5), get(None, 6, 7, **FAILED)]
    assert len(failed_reads("w/1", records, evicted=False)) == 2
    assert len(failed_reads("w/1", records, evicted=True)) == 1
    assert failed_reads("w/1", [*records[1:], *records[:0]], evicted=False) == []
    deleted = [put("a", 0, 1), delete(2, 3), get(None, 4, 5), get(None, 6, 7, **FAILED)]
    assert failed_reads("w/1", deleted, evicted=False) == []


# -- verdicts


def test_a_history_without_faults_is_good() -> None:
    records = [put("a", 0, 1), get("a", 2, 3), delete(4, 5), get(None, 6, 7)]
    assert judge(by_key(records)).good


def test_a_register_that_nothing_explains_is_reported_with_its_history() -> None:
    verdict = judge(by_key([put("a", 0, 1), get("b", 2, 3)]))
    assert not verdict.good
    assert "get -> b   <<<" in verdict.unexplained["r/1"]


def test_a_write_that_was_promised_not_done_must_not_be_seen() -> None:
    verdict = judge(by_key([put("a", 0, 1, **FAILED), get("a", 2, 3)]))
    assert "r/1" in verdict.unexplained


def test_where_values_were_evicted_a_miss_proves_nothing() -> None:
    records = [put("a", 0, 1), get(None, 2, 3)]
    assert not judge(by_key(records)).good
    assert judge(by_key(records), evicted=True).good


def test_damaged_values_are_reported() -> None:
    records = [
        put("a", 0, 1),
        get("x", 2, 3, fault="torn"),
        get(None, 4, 5, error="CorruptValue"),
    ]
    verdict = judge(by_key(records))
    assert [f.what for f in verdict.damaged] == ["torn", "corrupt"]
    assert not verdict.unexplained


def test_a_finding_tells_what_happened_and_why_it_must_not() -> None:
    write = put("c1-7", 1_000_000_000, 1_002_000_000, client="c1")
    miss = get(None, 2_000_000_000, 2_001_000_000, client="c2")
    assert str(lost("r/1", [write, miss])[0]) == (
        "lost write: r/1\n"
        "    2.000000 to 2.001000 s  c2  get  -> None\n"
        "    since 1.000000 to 1.002000 s  c1  put c1-7 -> True"
    )


def test_records_come_back_from_their_files(tmp_path: Path) -> None:
    kept = [put("a", 0, 1), get(None, 2, 3, **FAILED), delete(4, 5, there=False)]
    recorder = Recorder(tmp_path, "c")
    for record in kept:
        recorder.add(record)
    recorder.close()
    assert list(history.read(tmp_path)) == kept
    assert (recorder.operations, recorder.errors) == (3, 1)
