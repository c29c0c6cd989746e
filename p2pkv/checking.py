"""What a client does about a value that is not what its checksum says. Pure.

It asks the owner to look at its own bytes. Where they are corrupt, the owner drops the value, and
the caller is told where it was. Where they are not, the bytes changed on their way: they are read
once more, and if that goes wrong, too, the caller is told so. Corrupt bytes are never a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv import wire
from p2pkv.batches import GetBatch, check_number, expect
from p2pkv.errors import CorruptValue
from p2pkv.keyed import Keyed, keyed
from p2pkv.outcomes import name_of
from p2pkv.routing import Context, Operation, Reply, Request
from p2pkv.types import Member
from p2pkv.wire import Kind, Status


class CheckBatch(Keyed):
    """Each owner looks whether its values are what their checksums say, and drops the others.

    Results: None, or the CorruptValue of a dropped one. ``owners``: who was asked last.
    """

    kind = Kind.CHECK

    def __init__(self, keys: Sequence[bytes], buckets: Sequence[int]) -> None:
        super().__init__(keys, buckets)
        self.owners: dict[int, Member] = {}
        self._offsets: dict[int, int] = {}

    def request(self, to: Member, items: Sequence[int]) -> Request:
        self.owners.update(dict.fromkeys(items, to))
        return Request(to, Kind.CHECK, wire.Check(self.keys_of(items)))

    def absorb(self, items: Sequence[int], reply: Reply) -> bytes:
        body: wire.Checked = expect(reply, Kind.CHECKED)
        check_number("places", len(body.offsets), len(items))
        self._offsets.update(zip(items, body.offsets, strict=True))
        return body.statuses

    def settle(self, item: int, status: int) -> None:
        if status == Status.CORRUPT:
            place = f"{self._place(item)}, arena offset {self._offsets[item]}"
            self.results[item] = corrupt_value(
                self.keys[item],
                f"was corrupt in the memory of {place}, and has been dropped",
                place,
            )
        elif status != Status.MISS:
            super().settle(item, status)

    def on_the_way(self, item: int) -> CorruptValue:
        """The exception for a value that its owner has, but which did not arrive, twice."""
        place = f"wire from {self._place(item)}"
        return corrupt_value(self.keys[item], f"was corrupted on the way ({place}), twice", place)

    def _place(self, item: int) -> str:
        return f"{self.owners.get(item, 'its owner')}, bucket {self.buckets[item]}"


def corrupt_value(key: bytes, what: str, place: str) -> CorruptValue:
    """The exception for a value that is not what its checksum says."""
    return CorruptValue(f"{name_of(key)}: its value {what}", key, place)


def recheck(ctx: Context, op: GetBatch) -> Operation[None]:
    """Give each of the batch's suspects its outcome."""
    suspects = sorted(op.suspects)
    check = CheckBatch([op.keys[i] for i in suspects], [op.buckets[i] for i in suspects])
    yield from keyed(ctx, check)
    again: dict[int, int] = {}
    for position, (i, verdict) in enumerate(zip(suspects, check.results, strict=True)):
        if isinstance(verdict, CorruptValue):
            op.results[i] = verdict
        else:
            op.results[i] = None
            again[i] = position
    if not again:
        return
    op.suspects = []
    yield from keyed(ctx, op, list(again))
    for i in op.suspects:
        op.results[i] = check.on_the_way(again[i])


def ask_owner(ctx: Context, key: bytes, bucket: int) -> Operation[CheckBatch]:
    """The check of one value. Raises CorruptValue if the owner has dropped it."""
    check = CheckBatch([key], [bucket])
    yield from keyed(ctx, check)
    if isinstance(check.results[0], CorruptValue):
        raise check.results[0]
    return check
