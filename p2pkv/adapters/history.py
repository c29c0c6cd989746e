"""What this process did with keys lately, to say why one is not there. Pure."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class Fate(enum.Enum):
    """What became of a key, as far as this process had to do with it."""

    STORED = "stored"
    DROPPED = "its put was dropped"
    FAILED = "its put failed"
    DELETED = "deleted"


class Note(NamedTuple):
    """The last that was done with a key."""

    fate: Fate
    at: int
    """Monotonic nanoseconds."""
    ttl_ns: int = 0
    """0: it does not expire."""
    generation: int = -1
    """Of its bucket at that time; -1: not known."""
    detail: str = ""


class History:
    """The last notes of ``keys_max`` keys; older ones are forgotten."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._notes: OrderedDict[bytes, Note] = OrderedDict()
        self.forgotten_total = 0

    def note(self, keys: Iterable[bytes], note: Note) -> None:
        """The same of many keys."""
        notes = self._notes
        for key in keys:
            notes[key] = note
            notes.move_to_end(key)
        while len(notes) > self._keys_max:
            notes.popitem(last=False)
            self.forgotten_total += 1

    def of(self, key: bytes) -> Note | None:
        return self._notes.get(key)


class Reason(enum.Enum):
    """Why a key is a miss."""

    PRESENT = "present"
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    LOST = "lost with its node"
    PUT_DROPPED = "put was dropped"
    PUT_FAILED = "put failed"
    UNREACHABLE = "owner unreachable"
    BREAKER_OPEN = "breaker open"


class WhyMiss(NamedTuple):
    """The reason, and a sentence for people."""

    reason: Reason
    text: str


def explain(note: Note | None, generation: int, forgotten: int, now: int) -> WhyMiss:
    """Why a key is not there, though its owner answers.

    ``generation`` is that of its bucket now, -1 if it is not known; ``forgotten`` is how many keys
    the history had to forget.
    """
    if note is None:
        text = "this process has not stored it, and nobody else's copy is there"
        if forgotten:
            text += f" (or did so before the last {forgotten} keys that were forgotten since)"
        return WhyMiss(Reason.NEVER_STORED, text)
    ago = f"{max(0, now - note.at) / 1e9:.1f} s ago"
    if note.fate is Fate.DROPPED:
        return WhyMiss(Reason.PUT_DROPPED, f"its put was dropped {ago}: {note.detail}")
    if note.fate is Fate.FAILED:
        return WhyMiss(Reason.PUT_FAILED, f"its put failed {ago}: {note.detail}")
    if note.fate is Fate.DELETED:
        return WhyMiss(Reason.DELETED, f"this process deleted it {ago}")
    if note.ttl_ns and now - note.at >= note.ttl_ns:
        text = f"stored {ago} with a time to live of {note.ttl_ns / 1e9:g} s"
        return WhyMiss(Reason.EXPIRED, text)
    if -1 < note.generation < generation:
        text = f"stored {ago}; since then its bucket was started anew, since its node was gone"
        return WhyMiss(Reason.LOST, text)
    return WhyMiss(Reason.EVICTED, f"stored {ago}, and evicted or deleted by another since")
