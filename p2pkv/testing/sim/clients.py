"""Clients that read and write, and what each of them saw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2pkv.replicated import Op, OpKind
from p2pkv.testing.linearizability import Kind, Operation
from p2pkv.types import BucketId

from . import plan as measures
from .audit import Violation

if TYPE_CHECKING:
    from .node import Life, SimNode, Surroundings

NOT_HERE = "not here"

WEIGHTS = {
    "get": 8, "put": 8, "put_if_absent": 3, "delete": 3, "delete_range": 1, "expire": 1,
}  # fmt: skip


def key_of(bucket: int, number: int) -> bytes:
    return b"b%d/k%d" % (bucket, number)


class Call:
    """One call of a client, from its sending until the client knows or gives up."""

    __slots__ = ("called", "client", "generation", "key", "kind", "returned", "value")

    def __init__(self, client: str, kind: str, key: bytes, value: Any, called: int) -> None:
        self.client = client
        self.kind = kind
        self.key = key
        self.value = value
        self.called = called
        self.returned: int | None = None
        self.generation = 0


class Records:
    """The history of each key in each generation of its bucket."""

    def __init__(self) -> None:
        self.histories: dict[tuple[int, int, bytes], list[list[Any]]] = {}
        self.acknowledged = 0
        self.reads = 0
        self.closed = False
        """Whether nothing more is given up."""

    def begin(
        self,
        bucket: int,
        generation: int,
        kind: Kind,
        key: bytes,
        value: Any,
        called: int,
        who: str,
    ) -> list[Any]:
        """An operation has begun to have effect; ``[-2]`` is its return, ``[-1]`` its result."""
        row = [who, kind, value, called, None, None]
        self.histories.setdefault((bucket, generation, key), []).append(row)
        return row

    def evict(self, life: Life, bucket: BucketId, key: bytes) -> None:
        """A node gives a value up."""
        if not self.closed:
            Served(life, self, str(life.me), life.world.now, [], None).evict(bucket, key)

    def operations(self) -> dict[tuple[int, int, bytes], list[Operation]]:
        found = {}
        for place, rows in self.histories.items():
            found[place] = [
                Operation(kind, called, returned, value, result, who)
                for who, kind, value, called, returned, result in rows
            ]
        return found


class Client:
    """Calls one node after the other, in a loop; each call has at most one outcome."""

    def __init__(self, around: Surroundings, nodes: list[SimNode], records: Records, number: int):
        self.around = around
        self.world = around.world
        self.nodes = nodes
        self.records = records
        self.name = f"c{number}"
        self.stopped = False
        self._guess: dict[int, int] = {}
        self._values = 0
        self._pace_ns = around.world.rng.choice([4, 10, 25]) * 1_000_000
        self.world.after(self.world.rng.random() * 100e6, self._call)

    def _call(self) -> None:
        if self.stopped:
            return
        rng = self.world.rng
        kinds = list(WEIGHTS)
        kind = rng.choices(kinds, list(WEIGHTS.values()))[0]
        self.call(kind, rng.randrange(measures.BUCKETS), rng.randrange(measures.KEYS))

    def call(self, kind: str, bucket: int, number: int) -> None:
        rng, world = self.world.rng, self.world
        target = self._guess.get(bucket)
        if target is None or rng.random() < 0.05:
            target = rng.randrange(len(self.nodes))
        self._values += 1
        called = world.now
        state: dict[str, Any] = {"open": True, "rows": []}

        def finish(result: Any) -> None:
            if not state["open"]:
                return
            state["open"] = False
            self._guess[bucket] = target
            if result is NOT_HERE or result is None:
                self._guess.pop(bucket, None)
            else:
                self._returned(state["rows"], result)
            world.after(rng.expovariate(1.0) * self._pace_ns, self._call)

        def reply(result: Any) -> None:
            if rng.random() >= self.around.network.loss:
                world.after(self.around.network.delay_ns(), finish, result)

        def arrive() -> None:
            node = self.nodes[target]
            if node.life is not None:
                node.do(node.life, serve, node.life)

        def serve(life: Life) -> None:
            Served(life, self.records, self.name, called, state["rows"], reply).serve(
                kind, BucketId(bucket), number, f"{self.name}.{self._values}"
            )

        if rng.random() >= self.around.network.loss:
            world.after(self.around.network.delay_ns(), arrive)
        world.after(measures.CLIENT_TIMEOUT_NS, finish, None)

    def _returned(self, rows: list[list[Any]], result: Any) -> None:
        for row, outcome in zip(rows, result, strict=True):
            row[-2], row[-1] = self.world.now, outcome
            self.records.acknowledged += 1


class Served:
    """One request at a node: decides what it does, and answers once that is committed."""

    def __init__(
        self, life: Life, records: Records, client: str, called: int, rows: list[Any], reply: Any
    ) -> None:
        self.life = life
        self.records = records
        self.client = client
        self.called = called
        self.rows = rows
        self.reply = reply

    def serve(self, kind: str, bucket: BucketId, number: int, value: str) -> None:
        life = self.life
        replica = life.replicas.get(bucket)
        if replica is None or life.fenced(life.now):
            self.reply(NOT_HERE)
            return
        self.bucket, self.replica, self.key = bucket, replica, key_of(bucket, number)
        if kind == "get":
            self._get()
        elif not replica.writable:
            self.reply(NOT_HERE)
        else:
            getattr(self, f"_{kind}")(value)
            life.flush()

    def _row(self, kind: Kind, key: bytes, value: Any = None) -> list[Any]:
        row = self.records.begin(
            self.bucket, self.replica.generation, kind, key, value, self.called, self.client
        )
        self.rows.append(row)
        return row

    def _get(self) -> None:
        if not self.life.may_read(self.bucket):
            self.reply(NOT_HERE)
            return
        self.life.auditor.may_read(self.life, self.bucket)
        found = self.life.objects.stores[self.bucket].get(self.key)
        self._read(Kind.GET, found[0] if found else None)

    def _read(self, kind: Kind, result: Any, value: Any = None) -> None:
        """Answer at once: nothing is changed."""
        self._row(kind, self.key, value)
        self.records.reads += 1
        self.reply([result])

    def _put(self, value: str) -> None:
        self._row(Kind.PUT, self.key, value)
        self._submit(Op(OpKind.PUT, self.key, size=1), value, [True])

    def _put_if_absent(self, value: str) -> None:
        before, entry = self.life.pending_value(self.bucket, self.key)
        if before is not None:
            self._unchanged(Kind.PUT_IF_ABSENT, entry, value)
        else:
            self._row(Kind.PUT_IF_ABSENT, self.key, value)
            self._submit(Op(OpKind.PUT, self.key, size=1), value, [True])

    def _delete(self, _: str) -> None:
        before, entry = self.life.pending_value(self.bucket, self.key)
        if before is None:
            self._unchanged(Kind.DELETE, entry)
        else:
            self._row(Kind.DELETE, self.key)
            self._submit(Op(OpKind.DELETE, self.key), None, [True])

    def _unchanged(self, kind: Kind, entry: Any, value: Any = None) -> None:
        """Refused because of what is there: true once that is committed, or if we may read."""
        if entry is not None:
            self._row(kind, self.key, value)
            entry.ticket.tell.append(self._answer([False]))
        elif self.life.may_read(self.bucket):
            self._read(kind, False, value)
        else:
            self.reply(NOT_HERE)

    def _delete_range(self, _: str) -> None:
        there = []
        for number in range(measures.KEYS):
            key = key_of(self.bucket, number)
            there.append(self.life.pending_value(self.bucket, key)[0] is not None)
            self._row(Kind.DELETE, key)
        self._submit(Op(OpKind.DELETE_RANGE, b"b%d/" % self.bucket), None, there)

    def _expire(self, _: str) -> None:
        self._submit(Op(OpKind.EXPIRE, self.key, ttl_ms=50), None, [])

    def evict(self, bucket: BucketId, key: bytes) -> None:
        """The node itself gives a value up: a delete that returns when it is committed."""
        self.bucket, self.replica = bucket, self.life.replicas.by_bucket[bucket]
        row = self._row(Kind.DELETE, key)

        def tell(committed: bool) -> None:
            if committed:
                row[-2], row[-1] = self.life.world.now, True

        self.life.submit(self.bucket, Op(OpKind.EVICT, key), None, tell)

    def _submit(self, op: Op, value: Any, results: list[Any]) -> None:
        self.life.submit(self.bucket, op, value, self._answer(results))

    def _answer(self, results: list[Any]) -> Any:
        return lambda committed: self.reply(results if committed else None)


def check_histories(records: Records) -> None:
    """Raises Violation if what clients saw of a key cannot be explained by one register."""
    from p2pkv.testing.linearizability import check

    for place, operations in records.operations().items():
        known = [
            op for op in operations
            if op.returned is not None or op.kind in (Kind.PUT, Kind.DELETE, Kind.PUT_IF_ABSENT)
        ]  # fmt: skip
        violation = check(known)
        if violation is not None:
            raise Violation(f"history: bucket, generation, key {place}: {violation}")
