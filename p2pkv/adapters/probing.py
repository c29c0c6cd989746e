"""The breakers of one client, and the thread that probes whom they keep from being asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

from p2pkv import clock
from p2pkv.adapters.breaker import BreakerPolicy, Breakers, Trouble
from p2pkv.client import Client
from p2pkv.errors import (
    AuthorityUnavailable,
    BatchError,
    ClusterMismatch,
    DeadlineExceeded,
    Indeterminate,
    P2PKVError,
    ProtocolError,
    Stalled,
    Unreachable,
)
from p2pkv.routing import Location
from p2pkv.types import Member

log = logging.getLogger(__name__)

TROUBLE = (
    Unreachable,
    DeadlineExceeded,
    Stalled,
    Indeterminate,
    AuthorityUnavailable,
    ClusterMismatch,
    ProtocolError,
)
"""Errors that say something of a peer and nothing of the key."""

Peer = Member | None
"""None: nobody is known to ask, so it is the cluster as a whole that is in trouble."""


class NotAsked(Unreachable):
    """The key's owner has failed several times and is not asked for now. Nothing was sent."""


class Guard:
    """Which peers are not to be asked, as learned from the outcomes of calls.

    Any thread may use it. A thread that probes is started with the first breaker that opens.
    """

    def __init__(self, client: Client, policy: BreakerPolicy) -> None:
        self._client = client
        self._timeout_s = policy.probe_ns / clock.SECOND_NS
        self._breakers: Breakers[Peer] = Breakers(policy, Random())
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __bool__(self) -> bool:
        """Whether there is trouble with anybody; else no key needs a look."""
        return bool(self._breakers)

    def refused(self, keys: Sequence[Any]) -> dict[int, NotAsked]:
        """The keys that are not to be asked for, by index, and why."""
        places = self._client.locate(keys)
        peers = {_peer(place) for place in places}
        with self._changed:
            troubles = {peer: t for peer in peers if (t := self._breakers.trouble(peer))}
        if not troubles:
            return {}
        now = clock.monotonic()
        errors = {peer: NotAsked(_sentence(peer, t, now)) for peer, t in troubles.items()}
        found = ((i, _peer(place)) for i, place in enumerate(places))
        return {i: errors[peer] for i, peer in found if peer in errors}

    def learn(self, keys: Sequence[Any], results: Sequence[Any]) -> None:
        """Take in the outcomes of keys that were asked for."""
        if not self._breakers and not any(issubclass(t, TROUBLE) for t in set(map(type, results))):
            return
        failed = [i for i, r in enumerate(results) if isinstance(r, TROUBLE)]
        peers = [_peer(place) for place in self._client.locate(keys)]
        bad = {peers[i]: i for i in failed if not isinstance(results[i], NotAsked)}
        refused = {peers[i] for i in failed}
        with self._changed:
            self._breakers.succeeded(set(peers) - refused)
            for peer, i in bad.items():
                self._failed(peer, keys[i], results[i])

    def _failed(self, peer: Peer, key: Any, error: P2PKVError) -> None:
        reason = f"{type(error).__name__}: {error}"
        name = key.encode() if isinstance(key, str) else bytes(key)
        if self._breakers.failed(peer, name, reason, clock.monotonic()):
            log.warning("%s is not asked for now: %s", _name(peer), reason)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._probe_all, name="p2pkv-probes", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    # -- the thread

    def _probe_all(self) -> None:
        while (due := self._wait()) is not None:
            outcomes = self._ask([key for _, key in due])
            with self._changed:
                for (peer, _), outcome in zip(due, outcomes, strict=True):
                    self._take(peer, outcome)

    def _wait(self) -> list[tuple[Peer, bytes]] | None:
        """Until probes are due. None: it is over."""
        with self._changed:
            while not self._closed:
                now = clock.monotonic()
                if due := self._breakers.probes(now):
                    return due
                at = self._breakers.next_probe()
                self._changed.wait(None if at is None else max(0.001, (at - now) / 1e9))
            return None

    def _ask(self, keys: list[bytes]) -> Sequence[Any]:
        try:
            return self._client.batch_exists(keys, timeout=self._timeout_s)
        except BatchError as e:
            return e.results
        except P2PKVError as e:
            return [e] * len(keys)

    def _take(self, peer: Peer, outcome: Any) -> None:
        if isinstance(outcome, P2PKVError):
            reason = f"{type(outcome).__name__}: {outcome}"
            self._breakers.probe_failed(peer, reason, clock.monotonic())
        else:
            self._breakers.succeeded((peer,))
            log.info("%s answers, and is asked again", _name(peer))

    # -- looking, ending

    def figures(self) -> dict[str, int]:
        """Counts, by name."""
        with self._changed:
            return {
                "peers_refused": self._breakers.refused(),
                "breakers_opened_total": self._breakers.opened_total,
            }

    def close(self, timeout_s: float) -> bool:
        """Stop probing. Whether the thread ended in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True


def _peer(place: Location | None) -> Peer:
    return place.member if place is not None else None


def _name(peer: Peer) -> str:
    return "the cluster" if peer is None else str(peer)


def _sentence(peer: Peer, trouble: Trouble, now: int) -> str:
    return (
        f"{_name(peer)} has not been asked for {(now - trouble.since) / 1e9:.1f} s, "
        f"{trouble.probes} probes failed since; last: {trouble.reason}"
    )


__all__ = ["TROUBLE", "Guard", "NotAsked"]
