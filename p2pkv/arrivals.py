"""Values that arrive, compared with the checksums that came with them before they are kept."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.checksums import checksums_of
from p2pkv.errors import ProtocolError
from p2pkv.objects import Object
from p2pkv.parts import Parts
from p2pkv.store import Store
from p2pkv.wire import Checksums, Status


class Arrivals:
    """``policy`` says which values are compared: none, those that were sent, or also those that
    their client wrote into the arena by itself."""

    def __init__(self, store: Store, policy: Checksums) -> None:
        self.policy = policy
        self.corrupt_total = 0
        """Values that did not arrive as they were sent."""
        self._store = store

    def corrupt_of(self, values: Sequence[Parts], sums: Sequence[int]) -> set[int]:
        """Positions of values that are not as sent; a sum of 0 is none."""
        if not (sums and self.policy):
            return set()
        real = checksums_of(values)
        corrupt = {i for i, (a, b) in enumerate(zip(sums, real, strict=True)) if a and a != b}
        self.corrupt_total += len(corrupt)
        return corrupt

    def corrupt_among(
        self, made: Sequence[Object | Status | None], least: Checksums
    ) -> set[Object | Status | None]:
        """Those whose bytes in the arena are not as sent, if the policy is at least ``least``.

        Their allocations end here.
        """
        if self.policy < least:
            return set()
        summed = [item for item in made if isinstance(item, Object) and item.checksum]
        corrupt = self._store.differing(summed, [item.checksum for item in summed])
        self._store.abort_batch(corrupt)
        self.corrupt_total += len(corrupt)
        return set(corrupt)


def check_sums(sums: Sequence[int], keys: int) -> None:
    """Raises ProtocolError unless there is one for each key, or none at all."""
    if len(sums) not in (0, keys):
        raise ProtocolError(f"{len(sums)} checksums for {keys} keys")


def note_sums(items: Sequence[Object | Status], sums: Sequence[int]) -> None:
    """Keep the checksums that came with values until these are visible."""
    for item, checksum in zip(items, sums, strict=True) if sums else ():
        if isinstance(item, Object):
            item.checksum = checksum
