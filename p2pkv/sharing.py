"""Memory of the arena that clients fill or look at themselves, without the node's help.

What a client may touch is held (a token each) until it says that it has ended, or its connection
does: ``shared``, by id, belongs to the connection that asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pkv import wire
from p2pkv.admission import Admission
from p2pkv.objects import Object, State
from p2pkv.quarantine import Quarantine
from p2pkv.sessions import TOKENS_MAX, Response, Session, Sessions, Shared
from p2pkv.store import Store
from p2pkv.wire import Kind, Status


class Sharing:
    """``view_quota_bytes``: what one client may look at (0: a quarter of the arena)."""

    def __init__(
        self,
        admission: Admission,
        store: Store,
        sessions: Sessions,
        quarantine: Quarantine,
        view_quota_bytes: int,
    ) -> None:
        self.quarantine = quarantine
        self._admission = admission
        self._store = store
        self._sessions = sessions
        self._view_quota_bytes = view_quota_bytes or store.arena.size // 4

    # -- to be filled

    def share(self, shared: Shared, items: dict[int, Object]) -> None:
        """Hold the extents for as long as the client may write to them."""
        self._store.acquire_batch(list(items.values()))
        shared.update(items)

    def unshare(self, shared: Shared, ids: Iterable[int]) -> None:
        """The client writes to these no more."""
        ids = [id for id in ids if id in shared]
        self.quarantine.remote.difference_update(ids)
        if ids:
            self._store.release_batch([shared.pop(id) for id in ids])

    def unshare_late(self, shared: Shared, ids: Iterable[int], proven: bool) -> None:
        """As ``unshare``, where writes from another host may still arrive."""
        late = [id for id in ids if id in shared and id in self.quarantine.remote]
        self.quarantine.remote.difference_update(late)
        if late:
            self.quarantine.add([shared.pop(id) for id in late], proven)

    def unshare_all(self, shared: Shared, proven: bool = True) -> None:
        """Its connection is closed: what the client has not committed it never will.

        ``proven``: by the client's side.
        """
        if shared.room is not None:
            self._store.close_room(shared.room)
            shared.room = None
        self._store.abort_batch(list(shared.values()))
        self.unshare_late(shared, list(shared), proven)
        self.unshare(shared, list(shared))

    # -- to be looked at

    def view(self, session: Session, body: wire.Open, now: int) -> Response:
        """Values that a client on this host looks at in the arena, until it releases them, or its
        connection is gone."""
        shared = session.shared
        assert shared is not None
        count = len(body.keys)
        tokens, sizes, offsets = [0] * count, [0] * count, [0] * count
        room = self._view_quota_bytes - sum(
            [o.extent_bytes for o in shared.values() if o.state is not State.ALLOCATED]
        )

        def run(items: list[int], buckets: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
            nonlocal room
            found = self._store.get_batch(buckets, keys, now)
            statuses = bytearray()
            viewed: list[tuple[int, Object]] = []
            for i, item in zip(items, found, strict=True):
                fits = item is not None and item.extent_bytes <= room and len(shared) < TOKENS_MAX
                if item is not None and fits:
                    room -= item.extent_bytes
                    viewed.append((i, item))
                statuses.append(
                    Status.MISS if item is None else Status.OK if fits else Status.QUOTA
                )
            self._store.acquire_batch([item for _, item in viewed])
            for (i, item), id in zip(viewed, self._sessions.numbers(len(viewed)), strict=True):
                shared[id] = item
                tokens[i], sizes[i], offsets[i] = id, item.size, item.offset
            return statuses

        _, answer, _ = self._admission.each(body.keys, now, run)
        return Kind.OPENED, wire.Opened(answer.statuses, tokens, sizes, offsets=offsets), ()

    def release_views(self, shared: Shared, ids: Iterable[int]) -> bool:
        """Whether there were views among these."""
        items = [(id, shared.get(id)) for id in ids]
        views = [id for id, o in items if o is not None and o.state is not State.ALLOCATED]
        if views:
            self.unshare(shared, views)
        return bool(views)
