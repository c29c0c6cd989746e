"""Whether what clients saw of one key can be explained by one register, step by step. Pure.

A history is linearizable if each operation can be given an instant between its call and its return
so that, done in the order of these instants, all give the results that were seen (Herlihy and Wing,
1990). Keys are independent of each other, so each is checked on its own.

The search is that of Wing and Gong (1993) in the just-in-time form of Lowe ("Testing for
linearizability", 2017): go through calls and returns in order of time and keep every
*configuration* that could be the truth: the register's value, and which of the operations under way
have had their instant. An operation has to have had it when it returns; what leaves no
configuration is the violation. Three things keep the configurations few:

- What changes nothing (a read, a put that was refused) has its instant as soon as it fits.
- An operation without a known outcome may have its instant at any time after its call, or never.
  Those that do the same are counted, not told apart; values that nobody has read are all alike.
- A configuration is dropped if another with the same value and operations done needed no more of
  the operations with unknown outcome.

    violation = check(history)
    if violation:
        print(violation)
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from operator import le
from typing import NamedTuple

CONFIGURATIONS_MAX = 20_000
SHOWN_MAX = 24


class Kind(enum.Enum):
    """What may be done to a register."""

    GET = "get"
    PUT = "put"
    PUT_IF_ABSENT = "put_if_absent"
    DELETE = "delete"


class Operation(NamedTuple):
    """One call and what came of it.

    ``result``: of GET the value, or None for a miss; of PUT_IF_ABSENT and DELETE whether they
    changed anything; not looked at for PUT. ``returned`` None: the outcome is not known, the
    operation may have its effect at any time after ``called``, once, or never. Times are
    monotonic nanoseconds of one clock.
    """

    kind: Kind
    called: int
    returned: int | None
    value: Hashable = None
    """What a put wants to store. Not None: that stands for "not there"."""
    result: Hashable = None
    client: str = ""

    def __str__(self) -> str:
        value = f" {self.value}" if self.kind in (Kind.PUT, Kind.PUT_IF_ABSENT) else ""
        outcome = "?" if self.returned is None else "ok" if self.kind is Kind.PUT else self.result
        return f"{self.client or '-':>8}  {self.kind.value}{value} -> {outcome}"


class Violation(NamedTuple):
    """The first operation whose result cannot be explained, and what led to it."""

    operation: Operation
    possible: tuple[Hashable, ...]
    """The values that the register could have had just before ``operation`` returned."""
    window: tuple[Operation, ...]
    """What is worth looking at, in order of the calls; ``operation`` is among them."""

    def __str__(self) -> str:
        start = self.window[0].called
        values = ", ".join(sorted(map(str, self.possible)))
        lines = [f"{_line(op, start)}{'   <<<' if op is self.operation else ''}"
                 for op in self.window]  # fmt: skip
        head = f"not linearizable; before the marked operation the value could be: {values}"
        return "\n".join([head, *lines])


class TooComplex(Exception):
    """More configurations than the limit: neither right nor wrong was shown."""


def check(
    history: Sequence[Operation],
    *,
    initial: Hashable = None,
    evictions: bool = False,
    configurations_max: int = CONFIGURATIONS_MAX,
) -> Violation | None:
    """The first violation in the history of one key, or None if it is linearizable.

    ``initial``: the value before the first call; None: not there. ``evictions``: the value may
    vanish at any time (and does not come back by itself), as it may in a cache that makes room.
    Raises TooComplex.
    """
    return _Search(history, initial, evictions, configurations_max).run()


class _Configuration(NamedTuple):
    """One way things may stand: the register, who of the open operations is done, and how many
    of each class of those with unknown outcome were used."""

    value: Hashable
    done: int
    used: tuple[int, ...]


_UNREAD = ("a value that nobody read",)
"""Stands for each value that no get has returned."""


class _Search:
    def __init__(
        self, history: Sequence[Operation], initial: Hashable, evictions: bool, limit: int
    ) -> None:
        self._history = history
        self._evictions = evictions
        self._limit = limit
        read = {op.result for op in history if op.kind is Kind.GET}
        self._values = [op.value if op.value in read else _UNREAD for op in history]
        self._initial = initial if initial is None or initial in read else _UNREAD
        self._open: dict[int, int] = {}
        """Operations under way with a known outcome: index -> bit in ``done``."""
        self._free_bits: list[int] = []
        unknown = {
            (op.kind, value): i
            for i, (op, value) in enumerate(zip(history, self._values, strict=True))
            if op.returned is None and self._matters(op.kind)
        }
        self._classes = list(unknown)
        self._class_of = {c: n for n, c in enumerate(self._classes)}
        self._called = [0] * len(unknown)
        """Of each class of operations with unknown outcome: how many were called so far."""
        self._live: list[int] = []
        """The classes of which some were called."""

    def run(self) -> Violation | None:
        configurations = [_Configuration(self._initial, 0, (0,) * len(self._classes))]
        for returns, index in _events(self._history):
            if not returns:
                self._call(index)
                continue
            bit = self._open[index]
            after = self._with(index, configurations)
            if not after:
                return self._violation(index, configurations)
            self._close(index)
            configurations = _undominated(after, ~bit)
        return None

    def _call(self, index: int) -> None:
        op = self._history[index]
        if op.returned is None:
            if self._matters(op.kind):
                number = self._class_of[op.kind, self._values[index]]
                if not self._called[number]:
                    self._live.append(number)
                self._called[number] += 1
            return
        self._open[index] = self._free_bits.pop() if self._free_bits else 1 << len(self._open)

    def _matters(self, kind: Kind) -> bool:
        """Whether such an operation can explain anything when its outcome is unknown."""
        return kind is not Kind.GET and not (kind is Kind.DELETE and self._evictions)

    def _close(self, index: int) -> None:
        self._free_bits.append(self._open.pop(index))

    def _with(self, index: int, configurations: Iterable[_Configuration]) -> list[_Configuration]:
        """All that the configurations can become by the time at which ``index`` is done."""
        bit = self._open[index]
        front = _Front()
        waiting = deque(c for c in map(self._observed, configurations) if front.add(c))
        reached = []
        while waiting:
            configuration = waiting.popleft()
            if configuration.done & bit:
                reached.append(configuration)
            else:
                waiting += filter(front.add, self._successors(configuration))
            if front.size > self._limit:
                raise TooComplex(f"more than {self._limit} configurations")
        return reached

    def _successors(self, configuration: _Configuration) -> Iterable[_Configuration]:
        """One more operation has its instant."""
        value, done, used = configuration
        for index, bit in self._open.items():
            if not done & bit:
                op = self._history[index]
                allowed, new = self._effect(op.kind, self._values[index], op.result, value)
                if allowed:
                    yield self._observed(_Configuration(new, done | bit, used))
        for number in self._live:
            if used[number] < self._called[number]:
                kind, wanted = self._classes[number]
                new = self._blind_effect(kind, wanted, value)
                if new != value:
                    more = (*used[:number], used[number] + 1, *used[number + 1 :])
                    yield self._observed(_Configuration(new, done, more))

    def _effect(
        self, kind: Kind, wanted: Hashable, result: Hashable, value: Hashable
    ) -> tuple[bool, Hashable]:
        """Whether the result can be had at this value, and the value afterwards."""
        if kind is Kind.PUT:
            return True, wanted
        if kind is Kind.GET:
            return result == value or (result is None and self._evictions), result
        absent = value is None or self._evictions
        if kind is Kind.PUT_IF_ABSENT:
            return (absent, wanted) if result else (value is not None, value)
        return (value is not None, None) if result else (absent, None)

    def _blind_effect(self, kind: Kind, wanted: Hashable, value: Hashable) -> Hashable:
        """The value after an operation whose result nobody knows, if it did what it can do."""
        if kind is Kind.PUT_IF_ABSENT and value is not None and not self._evictions:
            return value
        return None if kind is Kind.DELETE else wanted

    def _observed(self, configuration: _Configuration) -> _Configuration:
        """The same, with all that changes nothing done: there is no reason to wait with it."""
        value, done, used = configuration
        for index, bit in self._open.items():
            if not done & bit:
                op = self._history[index]
                if op.kind is Kind.GET or not (op.kind is Kind.PUT or op.result):
                    allowed, new = self._effect(op.kind, self._values[index], op.result, value)
                    if allowed and new == value:
                        done |= bit
        return _Configuration(value, done, used)

    def _violation(self, index: int, before: Iterable[_Configuration]) -> Violation:
        possible = tuple({c.value for c in before})
        shown = tuple("nothing" if v is None else v[0] if v is _UNREAD else v for v in possible)
        return Violation(self._history[index], shown, _window(self._history, index))


def _events(history: Sequence[Operation]) -> list[tuple[int, int]]:
    """``(0, index)`` for each call and ``(1, index)`` for each return, in order of time.

    At the same time calls come first: operations that touch each other count as concurrent.
    """
    calls = [(op.called, 0, i) for i, op in enumerate(history)]
    returns = [(op.returned, 1, i) for i, op in enumerate(history) if op.returned is not None]
    return [(kind, index) for _, kind, index in sorted(calls + returns)]


class _Front:
    """Configurations, without those that can do no more than one that came before them."""

    def __init__(self) -> None:
        self.size = 0
        self._used: dict[tuple[Hashable, int], list[tuple[int, ...]]] = {}

    def add(self, configuration: _Configuration) -> bool:
        """Whether it was worth taking in."""
        value, done, used = configuration
        others = self._used.setdefault((value, done), [])
        if others and any(all(map(le, other, used)) for other in others):
            return False
        others.append(used)
        self.size += 1
        return True


def _undominated(configurations: list[_Configuration], mask: int) -> list[_Configuration]:
    """With ``done`` masked, and without those that can do no more than another one."""
    front = _Front()
    masked = (_Configuration(value, done & mask, used) for value, done, used in configurations)
    return [c for c in sorted(masked, key=lambda c: sum(c.used)) if front.add(c)]


def _window(history: Sequence[Operation], index: int) -> tuple[Operation, ...]:
    """The operation, those around it, and those that had to do with the value it returned."""
    op = history[index]
    assert op.returned is not None
    before = [o for o in history if o.called <= op.returned]
    before.sort(key=lambda o: o.called)
    related = [o for o in before if op.result is not None and op.result in (o.value, o.result)]
    recent = [o for o in before if o not in related][-SHOWN_MAX:]
    chosen = {id(o) for o in (*related[:SHOWN_MAX], *recent, op)}
    return tuple(o for o in before if id(o) in chosen)


def _line(op: Operation, start: int) -> str:
    begin = (op.called - start) / 1e9
    end = "   …     " if op.returned is None else f"{(op.returned - start) / 1e9:9.6f}"
    return f"  {begin:9.6f} s to {end} s  {op}"


__all__ = ["CONFIGURATIONS_MAX", "Kind", "Operation", "TooComplex", "Violation", "check"]
