"""The half in the scheduler: which blocks of which request are loaded, and which are saved.

Of a request there are, in this order: blocks that the engine has itself; blocks that are found in
the store, and loaded; the rest, which is computed, and saved when it is full. A request waits
beside the others while it is looked up and loaded. What fails is computed: a load is tried once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from p2pkv.adapters.keys import BlockKeys, Fingerprint
from p2pkv.adapters.vllm.lookups import Found, Lookups
from p2pkv.adapters.vllm.options import Options
from p2pkv.adapters.vllm.pins import Pins
from p2pkv.adapters.vllm.plans import StepPlan, Transfer, runs_of
from p2pkv.clock import SECOND_NS

HANDOVER_FIRST_NS = 5_000_000
HANDOVER_LAST_NS = 100_000_000
"""Between two lookups of a consumer that waits for blocks; doubled each time."""

FINGERPRINT_PARAM, BLOCKS_PARAM = "p2pkv_fingerprint", "p2pkv_blocks"
"""In a request's ``kv_transfer_params``: what a producer tells the consumer."""


class Request(Protocol):
    """vLLM's."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    """Of its full blocks, chained."""
    kv_transfer_params: dict[str, Any] | None


class Tracked:
    """What is known of a request that was scheduled."""

    __slots__ = ("load_blocks", "load_start", "loaded_at", "request", "saved")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.saved = 0
        """Blocks from the start that are in the store, or on their way to it."""
        self.loaded_at = -1
        """How often it had been preempted when it was loaded; -1: never."""
        self.load_start = 0
        self.load_blocks: list[int] = []


class Handover:
    """A consumer's waiting for what a producer is saving."""

    __slots__ = ("deadline", "next_at", "pause")

    def __init__(self, now: int, timeout_ns: int) -> None:
        self.deadline = now + timeout_ns
        self.pause = HANDOVER_FIRST_NS
        self.next_at = now + self.pause

    def again(self, now: int) -> None:
        self.pause = min(2 * self.pause, HANDOVER_LAST_NS)
        self.next_at = now + self.pause


class Scheduling:
    """``now`` is monotonic nanoseconds. Called by one thread."""

    def __init__(
        self,
        lookups: Lookups,
        options: Options,
        block_tokens: int,
        *,
        reads: bool = True,
        writes: bool = True,
        hands_over: bool = False,
    ) -> None:
        """``hands_over``: another engine goes on with the requests of this one."""
        self._lookups = lookups
        self._options = options
        self._block = block_tokens
        self._reads = reads
        self._writes = writes
        self._hands_over = hands_over
        self._fingerprint: Fingerprint | None = None
        self._keys: list[BlockKeys] = []
        self._pins: Pins | None = None
        self._tracked: dict[str, Tracked] = {}
        self._own: dict[str, int] = {}
        """Blocks that the engine has of requests that are not allocated yet."""
        self._handovers: dict[str, Handover] = {}
        self._loads: list[Transfer] = []
        self._jobs = 0
        self.saves_dropped_blocks = 0
        """Not saved for want of room, since ``take_dropped``."""
        self.refused: Callable[[str, str], None] = lambda request, digest: None
        """Is told of requests whose producer has another fingerprint."""

    def begin(self, fingerprint: Fingerprint, ranks: Iterable[int], pins: Pins) -> None:
        """Everything is known: from now on blocks are loaded and saved.

        Told again, as after a sleep of the engine, it changes nothing: blocks may be held.
        """
        if self._pins is not None:
            return
        group = self._options.blocks_per_group
        self._keys = [BlockKeys(fingerprint, rank, group) for rank in sorted(set(ranks))]
        self._fingerprint = fingerprint
        self._pins = pins

    @property
    def busy(self) -> bool:
        """Whether saves are under way."""
        return bool(self._pins)

    @property
    def prefix(self) -> str:
        """That of all keys with this fingerprint; empty before ``begin``."""
        return self._keys[0].prefix if self._keys else ""

    # -- what can be loaded

    def matched(self, request: Request, computed_tokens: int, now: int) -> int | None:
        """Tokens that can be loaded beyond those that the engine has; None: ask again later."""
        usable = min((request.num_tokens - 1) // self._block, len(request.block_hashes))
        own = self._own[request.request_id] = computed_tokens // self._block
        if not self._may_load(request) or own >= usable:
            return 0
        found = self._lookups.found(
            request.request_id, lambda: self._keys_of(request.block_hashes), len(self._keys)
        )
        if found is None or self._waits(request, found, min(self._promised(request), usable), now):
            return None
        more = min(found.blocks, usable) - own
        return more * self._block if more >= self._options.load_blocks_min else 0

    def _may_load(self, request: Request) -> bool:
        if not self._reads or not self._keys:
            return False
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.loaded_at == request.num_preemptions:
            return False
        digest = (request.kv_transfer_params or {}).get(FINGERPRINT_PARAM)
        if digest is not None and digest != self._keys[0].digest:
            self.refused(request.request_id, str(digest))
            return False
        return True

    def _keys_of(self, chain: Sequence[bytes]) -> list[bytes]:
        """Keys of a sequence, those of all ranks of a block side by side."""
        hashes = [bytes(block) for block in chain]
        ranks = [keys.of(hashes) for keys in self._keys]
        return (
            ranks[0]
            if len(ranks) == 1
            else [k for block in zip(*ranks, strict=True) for k in block]
        )

    @staticmethod
    def _promised(request: Request) -> int:
        """Blocks that a producer said it was saving."""
        blocks = (request.kv_transfer_params or {}).get(BLOCKS_PARAM, 0)
        return blocks if isinstance(blocks, int) else 0

    def _waits(self, request: Request, found: Found, promised: int, now: int) -> bool:
        """Whether to look up again, and later: the producer is not done."""
        name = request.request_id
        if found.blocks >= promised or not found.complete:
            return False
        timeout_ns = round(self._options.handover_timeout_s * SECOND_NS)
        handover = self._handovers.setdefault(name, Handover(now, timeout_ns))
        if now >= handover.deadline:
            return False
        if now >= handover.next_at:
            handover.again(now)
            self._lookups.forget(name)
        return True

    # -- blocks were allocated

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """The request got these blocks, from its first on; so many tokens are to be loaded."""
        name = request.request_id
        tracked = self._tracked.get(name)
        if tracked is None:
            tracked = self._tracked[name] = Tracked(request)
        self._handovers.pop(name, None)
        own = self._own.pop(name, None)
        if external_tokens and own is not None:
            self._load(tracked, blocks, own, own + external_tokens // self._block)
        elif own is not None:
            tracked.saved = self._stored(name, own)
        self._lookups.forget(name)

    def _stored(self, name: str, own: int) -> int:
        """Blocks from the start that need not be saved.

        The engine may have blocks that the store has not, or has no more: they are saved then.
        """
        found = self._lookups.known(name)
        return found.blocks if found is not None and found.complete else own

    def _load(self, tracked: Tracked, blocks: Sequence[int], start: int, stop: int) -> None:
        request = tracked.request
        tracked.loaded_at = request.num_preemptions
        tracked.load_start = start
        tracked.load_blocks = list(blocks[start:stop])
        tracked.saved = stop
        runs = runs_of(request.block_hashes, blocks, start, stop, self._options.blocks_per_group)
        self._loads.append(Transfer(self._job(), request.request_id, runs))

    def _job(self) -> int:
        self._jobs += 1
        return self._jobs

    # -- a step

    def plan(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int] | None]
    ) -> StepPlan:
        """What is to be done in a step that computes so many tokens of each request."""
        loads, self._loads = self._loads, []
        saves = []
        if self._writes and self._pins is not None:
            for name, tokens in scheduled.items():
                save = self._save(name, tokens, blocks_of)
                if save is not None:
                    saves.append(save)
        return StepPlan(self._fingerprint, loads, saves)

    def _save(
        self, name: str, tokens: int, blocks_of: Callable[[str], Sequence[int] | None]
    ) -> Transfer | None:
        """What is full after this step and was not before."""
        tracked = self._tracked.get(name)
        if tracked is None:
            return None
        request, start = tracked.request, tracked.saved
        full = (request.num_computed_tokens + tokens) // self._block
        if not self._options.save_generated:
            full = min(full, request.num_prompt_tokens // self._block)
        full = min(full, len(request.block_hashes))
        if full <= start:
            return None
        blocks = blocks_of(name) or ()
        tracked.saved = full
        return self._hold(request, blocks, start, min(full, len(blocks)))

    def _hold(
        self, request: Request, blocks: Sequence[int], start: int, full: int
    ) -> Transfer | None:
        assert self._pins is not None
        while start < full and blocks[start] in self._pins:
            start += 1  # on behalf of another request that begins alike
        stop = min(full, start + self._pins.room)
        self.saves_dropped_blocks += max(0, full - stop)
        if stop <= start:
            return None
        group = self._options.blocks_per_group
        job = self._job()
        runs = runs_of(request.block_hashes, blocks, start, stop, group)
        save = Transfer(job, request.request_id, runs)
        self._pins.take(job, save.blocks)
        return save

    def take_dropped(self) -> int:
        dropped, self.saves_dropped_blocks = self.saves_dropped_blocks, 0
        return dropped

    # -- what became of it

    def arrived(self, failed: Iterable[int], saves: Mapping[int, int]) -> None:
        """Blocks that could not be loaded, and how many workers are done with which saves."""
        for job, workers in saves.items():
            if self._pins is not None:
                self._pins.done(job, workers)
        failed = set(failed)
        if failed:
            for tracked in self._tracked.values():
                self._load_failed(tracked, failed)

    @staticmethod
    def _load_failed(tracked: Tracked, failed: set[int]) -> None:
        """From the first that failed on, its blocks are computed, so they are saved again."""
        for i, block in enumerate(tracked.load_blocks):
            if block in failed:
                tracked.saved = min(tracked.saved, tracked.load_start + i)
                return

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request has ended: what its consumer is to be told, if it has one."""
        name = request.request_id
        tracked = self._tracked.pop(name, None)
        self._own.pop(name, None)
        self._handovers.pop(name, None)
        self._lookups.finished(name)
        if not self._hands_over or tracked is None or not self._keys:
            return None
        return {FINGERPRINT_PARAM: self._keys[0].digest, BLOCKS_PARAM: tracked.saved}
