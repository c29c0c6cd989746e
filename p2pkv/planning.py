"""Planning where buckets belong, on the one node that is elected to."""

from __future__ import annotations

import asyncio
import logging

from p2pkv import clock
from p2pkv.authority import Authority
from p2pkv.errors import AuthorityUnavailable
from p2pkv.membership import Contacts
from p2pkv.ownership import Ownership
from p2pkv.planner import Planner, PlannerLimits, holders, registered
from p2pkv.records import BucketChange

log = logging.getLogger("p2pkv.node")

INTERVAL_S = 0.5
PAUSE_S = 0.05
"""Between two rounds of planning that follow each other."""


class Planning:
    """Gives the planner what it is to know, and carries its proposals to etcd."""

    def __init__(
        self, authority: Authority, ownership: Ownership, contacts: Contacts, limits: PlannerLimits
    ) -> None:
        self._authority = authority
        self._ownership = ownership
        self._contacts = contacts
        self._planner = Planner(limits)
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        """Something has changed."""
        self._wanted.set()

    async def run(self) -> None:
        """Stand for election, and plan while elected, until cancelled."""
        while True:
            try:
                if await self._authority.campaign(self._ownership.me):
                    await self._propose(self._changes())
            except AuthorityUnavailable as e:
                log.warning("planning waits for etcd: %s", e)
            self._wanted.clear()
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(PAUSE_S)

    def _changes(self) -> list[BucketChange]:
        view = self._ownership.view
        now = clock.monotonic()
        lost = self._contacts.lost(now, holders(view))
        return self._planner.step(view, registered(view), lost, now)

    async def _propose(self, changes: list[BucketChange]) -> None:
        if not changes:
            return
        outcomes = await self._authority.update_buckets(changes)
        self._ownership.take_records((o.bucket, o.current) for o in outcomes)
