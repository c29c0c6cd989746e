"""Batches over keys: sent to all owners at once, and again until each key has its outcome. Pure.

Rules of retrying, for each request that got no answer:

* A read may be sent again, to anyone.
* A write is sent again *as the same request* to the same member: the member keeps its recent
  answers and does not run it twice. If it no longer keeps them, or has begun the session anew, the
  outcome is Indeterminate.
* When that member has left the ring, or cannot be reached and the bucket has another owner, the
  write may be sent to that owner only if running twice does no harm (``repeatable``), or if the
  bucket was started anew since the last attempt (its generation rose, so that whatever an attempt
  did is gone); else its outcome is Indeterminate.
* An answer that makes no sense is an error for its keys, and no reason to ask again; for a write
  the outcome is Indeterminate.
* Everything ends at the deadline, and waits between rounds with jitter. A round that made progress
  needs no wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from p2pkv import wire
from p2pkv.errors import P2PKVError, ProtocolError
from p2pkv.outcomes import (
    DEADLINE,
    DEFERRED,
    PASSING_FAULTS,
    RETRY,
    error_of,
    gave_up,
    indeterminate,
    name_of,
    refusal,
)
from p2pkv.routing import (
    Answer,
    Context,
    Lost,
    Operation,
    Peer,
    Reply,
    Request,
    Table,
    reason_of,
)
from p2pkv.types import Member
from p2pkv.wire import Fault, Kind, Status

LOSSES_MAX = 2
"""A member to which so many connections in a row broke is taken for gone, if the ring agrees."""


class Keyed:
    """A batch of one kind over keys: how it is asked, and how an answer is taken in.

    ``results[i]`` is the outcome for key i: a value, or a P2PKVError.
    """

    kind: Kind
    mutating = False
    any_copy = False
    """Whether a backup may be asked when the owner does not answer."""
    repeatable = False
    """Whether running it twice does no harm, whatever happens between."""
    bound = False
    """Whether it can only go to one member; where it would go to another it ends with CONFLICT."""
    sizes: Sequence[int] | None = None
    """Payload bytes of each key, where the request carries values."""

    def __init__(self, keys: Sequence[bytes], buckets: Sequence[int]) -> None:
        self.keys = keys
        self.buckets = buckets
        self.results: list[Any] = [None] * len(keys)

    def keys_of(self, items: Sequence[int]) -> list[bytes]:
        keys = self.keys
        return list(keys) if len(items) == len(keys) else [keys[i] for i in items]

    def put_results(self, items: Sequence[int], results: list[Any]) -> None:
        """Outcomes of ``items``, which ascend."""
        if len(items) == len(self.results):
            self.results = results
            return
        for i, result in zip(items, results, strict=True):
            self.results[i] = result

    def request(self, to: Member, items: Sequence[int]) -> Request:
        raise NotImplementedError

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        """Take in the answer for ``items``. Returns the status of each; empty: all are done.

        Raises ProtocolError if it makes no sense.
        """
        raise NotImplementedError

    def settle(self, item: int, status: int) -> None:
        """Take in a final status other than OK."""
        self.results[item] = error_of(status, self.keys[item])


class _Sent:
    """A request under way: the items it carries and the generations of their buckets."""

    __slots__ = ("generations", "items", "losses", "request", "unsure")

    def __init__(self, request: Request, items: Sequence[int], generations: list[int]) -> None:
        self.request = request
        self.items = items
        self.generations = generations
        self.losses = 0
        """How often in a row it got no answer."""
        self.unsure = False
        """Whether an earlier attempt may have run."""


def keyed(ctx: Context, op: Keyed, items: Sequence[int] | None = None) -> Operation[None]:
    """Run a batch until each key, or those of ``items``, has its outcome in ``op.results``."""
    table = ctx.router.table
    if table is None or ctx.router.silent:
        table = yield from ctx.table()
    if not op.mutating:
        ctx.hurry(op.any_copy)
    run = _Run(op, ctx.limits, range(len(op.keys)) if items is None else items)
    while True:
        sent = run.requests(table)
        answers: list[Answer] = []
        if sent:
            answers = yield from ctx.exchange([s.request for s in sent])
        run.take(sent, answers)
        if not (run.pending or run.unanswered):
            return
        if run.disturbed and not run.may_ask_copies(table):
            yield from ctx.backoff()
            try:
                yield from ctx.refresh(_who_answered(sent, answers))
            except P2PKVError as e:
                run.end(e)
                return
            table = ctx.router.table or table
            run.reconsider(table)
        if ctx.expired():
            run.give_up()
            return


def _who_answered(sent: Sequence[_Sent], answers: Sequence[Answer]) -> dict[Peer, bool]:
    return {s.request.to: isinstance(a, Reply) for s, a in zip(sent, answers, strict=True)}


class _Run:
    """The items of one batch on their way: not asked, asked without an answer, done."""

    def __init__(self, op: Keyed, limits: Any, items: Sequence[int]) -> None:
        self.op = op
        self.limits = limits
        self.pending: Sequence[int] = items
        self.unanswered: list[_Sent] = []
        self.disturbed = False
        self.deferred = False
        """Whether the last answers left something for the owner itself to answer."""
        self.why: dict[int, str] = {}
        self.lost: set[Peer] = set()
        """Who gave no answer to a read."""
        self.freshly_lost = False

    def requests(self, table: Table) -> list[_Sent]:
        """One request per owner (several where a message's limits ask for it), and the repeats."""
        op, sent = self.op, self.unanswered
        self.pending = sorted(self.pending)  # so that as many items as keys are all in order
        homeless: Sequence[int] = ()
        around = op.any_copy and self.lost and table.backups
        groups = (
            table.split_around(op.buckets, self.pending, self.lost)
            if around
            else table.split(op.buckets, self.pending)
        )
        for owner, items in groups.items():
            if owner < 0:
                homeless = items
                self.why.update(dict.fromkeys(items, "no owner"))
                continue
            for part in _parts(items, op.sizes, self.limits):
                generations = self._generations(table, part) if op.mutating else []
                request = op.request(table.members[owner], part)
                request.direct = self.deferred
                sent.append(_Sent(request, part, generations))
        self.pending, self.unanswered, self.disturbed = list(homeless), [], bool(homeless)
        self.deferred = False
        return sent

    def _generations(self, table: Table, items: Sequence[int]) -> list[int]:
        buckets = self.op.buckets
        return [table.generations[buckets[i]] for i in items]

    def may_ask_copies(self, table: Table) -> bool:
        """Whether somebody was lost just now whose copies can be asked at once."""
        fresh, self.freshly_lost = self.freshly_lost, False
        return fresh and self.op.any_copy and bool(table.backups)

    def take(self, sent: Sequence[_Sent], answers: Sequence[Answer]) -> None:
        for one, answer in zip(sent, answers, strict=True):
            if isinstance(answer, Lost):
                self._lost(one, answer)
            elif answer.kind == Kind.ERROR:
                self._refused(one, answer.body)
            else:
                try:
                    statuses = self.op.absorb(one.items, answer)
                    if statuses:
                        self._settle(one.items, statuses)
                except ProtocolError as e:
                    self._fail(one.items, str(e))

    def _lost(self, one: _Sent, answer: Lost) -> None:
        self.disturbed = True
        if self.op.mutating and (one.unsure or one.request.sent):
            one.unsure = True
            one.losses += 0 if answer.deadline else 1
            self.unanswered.append(one)
        else:
            self.freshly_lost |= one.request.to not in self.lost
            self.lost.add(one.request.to)
            self._again(one.items, reason_of(answer))

    def _again(self, items: Iterable[int], reason: str) -> None:
        items = list(items)
        if self.op.bound:
            for i in items:
                self.op.settle(i, Status.CONFLICT)
            return
        self.pending = [*self.pending, *items]
        self.why.update(dict.fromkeys(items, reason))

    def _refused(self, one: _Sent, error: wire.Error) -> None:
        fault = error.fault
        forgotten = one.unsure and fault == Fault.NO_SESSION
        if forgotten or fault in (Fault.FORGOTTEN, Fault.INTERNAL):
            self._fail(one.items, error.message)
        elif fault not in PASSING_FAULTS:
            for i in one.items:
                self.op.results[i] = refusal(error, name_of(self.op.keys[i]))
        else:
            self.disturbed = True
            if one.unsure:
                self.unanswered.append(one)
            else:
                self._again(one.items, error.message)

    def _fail(self, items: Iterable[int], why: str) -> None:
        """The answer does not tell what was done."""
        for i in items:
            name = name_of(self.op.keys[i])
            self.op.results[i] = (
                indeterminate(why, name) if self.op.mutating else ProtocolError(f"{name}: {why}")
            )

    def _settle(self, items: Sequence[int], statuses: bytes) -> None:
        if len(statuses) != len(items):
            raise ProtocolError(f"{len(statuses)} statuses for {len(items)} keys")
        if Status.OK not in statuses and Status.DEFERRED in statuses:
            self.disturbed = True
        for i, status in zip(items, statuses, strict=True):
            if status in RETRY:
                self.disturbed = True
                self._again((i,), Status(status).name.lower())
            elif status == Status.DEFERRED:
                self.deferred = True
                self._again((i,), DEFERRED)
            elif status:
                self.op.settle(i, status)

    def reconsider(self, table: Table) -> None:
        """Writes without an answer that their member will not give; see the module's rules."""
        still: list[_Sent] = []
        for one in self.unanswered:
            if one.request.to in table.endpoints and not self._replaced(one, table):
                one.generations = self._generations(table, one.items)
                still.append(one)
                continue
            now = self._generations(table, one.items)
            for i, before, after in zip(one.items, one.generations, now, strict=True):
                if after > before or self.op.repeatable:
                    self._again((i,), "its owner left")
                else:
                    self._fail((i,), f"{one.request.to} left without an answer")
        self.unanswered = still

    def _replaced(self, one: _Sent, table: Table) -> bool:
        """Whether its member cannot be reached and is the owner of none of its buckets."""
        if one.losses < LOSSES_MAX:
            return False
        buckets = self.op.buckets
        return all(table.owner(buckets[i]) != one.request.to for i in one.items)

    def give_up(self) -> None:
        """The deadline has passed."""
        for one in self.unanswered:
            self._fail(one.items, "no answer before the deadline")
        for i in self.pending:
            self.op.results[i] = gave_up(self.why.get(i, DEADLINE), name_of(self.op.keys[i]))

    def end(self, error: P2PKVError) -> None:
        """There is no going on."""
        for one in self.unanswered:
            self._fail(one.items, str(error))
        for i in self.pending:
            self.op.results[i] = error


def _parts(
    items: Sequence[int], sizes: Sequence[int] | None, limits: Any
) -> Iterable[Sequence[int]]:
    keys_max, bytes_max = limits.batch_keys_max, limits.message_bytes_max
    of_these = sizes if sizes is None or len(sizes) == len(items) else [sizes[i] for i in items]
    if sizes is None or of_these is None or sum(of_these) <= bytes_max:
        return [items[i : i + keys_max] for i in range(0, len(items), keys_max)]
    parts: list[Sequence[int]] = []
    part: list[int] = []
    total = 0
    for i in items:
        if part and (total + sizes[i] > bytes_max or len(part) == keys_max):
            parts.append(part)
            part, total = [], 0
        part.append(i)
        total += sizes[i]
    return [*parts, part]
