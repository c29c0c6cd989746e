"""What one peer has to be told goes in messages that it takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import zmq
from nodeside import A, B, C
from replicating import Cluster, Node, keys_in

from p2pkv import clock
from p2pkv.async_driver import AsyncDriver
from p2pkv.config import ClientConfig, Limits, NodeConfig
from p2pkv.errors import ProtocolError
from p2pkv.gossip import Gossip
from p2pkv.instructions import Entry
from p2pkv.ownership import Ownership
from p2pkv.records import View
from p2pkv.replicas import Batch
from p2pkv.replicated import Beacon, Grant, Op, OpKind, Prepare, Talk, decode, encode
from p2pkv.replicator import OP_BYTES_MAX, Replicator, fitting
from p2pkv.routing import Router
from p2pkv.types import BootId

HEAD = 100 * OP_BYTES_MAX


def batch(*sizes: list[int], origins: bool = False) -> Batch:
    """PUTs of these sizes, one list for each bucket."""
    prepares, entries = [], []
    for bucket, some in enumerate(sizes):
        ops = [Op(int(OpKind.PUT), b"%d-%d" % (bucket, i), size) for i, size in enumerate(some)]
        first = 10 * bucket + 1
        prepares.append(
            Prepare(bucket, 5, first - 1, first, ops, [4] * len(ops) if origins else [])
        )
        entries += [Entry(first + i, 5, op, None) for i, op in enumerate(ops)]
    return Batch(B, prepares, entries)


def sizes_of(part: Batch) -> list[int]:
    return [op.size for prepare in part.prepares for op in prepare.ops]


def test_a_batch_within_the_limits_stays_as_it_is() -> None:
    whole = batch([10, 20], [30])
    assert fitting(whole, 60, HEAD) == [whole]


def test_values_over_the_limit_together_go_in_several_messages() -> None:
    parts = fitting(batch([10, 20], [30, 40], [50]), 60, HEAD)
    assert [sizes_of(part) for part in parts] == [[10, 20, 30], [40], [50]]
    assert [[p.bucket for p in part.prepares] for part in parts] == [[0, 1], [1], [2]]
    assert [p.first for part in parts for p in part.prepares] == [1, 11, 12, 21]


def test_a_value_that_fits_no_message_goes_alone() -> None:
    parts = fitting(batch([10, 99, 10]), 60, HEAD)
    assert [sizes_of(part) for part in parts] == [[10], [99], [10]]


def test_many_operations_do_not_make_a_head_too_large() -> None:
    parts = fitting(batch([0] * 5, [0] * 5), 60, 4 * OP_BYTES_MAX)
    assert [len(part.entries) for part in parts] == [4, 4, 2]


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_make_the_whole_in_its_order(seed: int) -> None:
    print("seed", seed)
    rand = random.Random(seed)
    sizes = [
        [rand.choice([0, 5, 30, 61, 99]) for _ in range(rand.randint(1, 8))]
        for _ in range(rand.randint(1, 4))
    ]
    whole = batch(*sizes, origins=rand.random() < 0.5)
    parts = fitting(whole, 60, rand.randint(1, 6) * OP_BYTES_MAX)
    assert [e for part in parts for e in part.entries] == whole.entries
    for part in parts:
        assert [op for p in part.prepares for op in p.ops] == [e.op for e in part.entries]
        assert [p.first + i for p in part.prepares for i in range(len(p.ops))] == [
            e.seq for e in part.entries
        ]
        assert all(len(p.origins) in (0, len(p.ops)) for p in part.prepares)
        assert all(p.ops for p in part.prepares)
        assert len(part.entries) == 1 or sum(sizes_of(part)) <= 60


def test_what_replicas_say_survives_its_encoding() -> None:
    talk = Talk(A, B, Beacon(7, {3: 4}), Grant(5, [1, 2]))
    assert decode(encode(talk)) == talk


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        encode(Talk(A, B))[:-1],
        encode(Talk(A, B)) + b"\0",
        encode(Talk(A, B, Beacon(7, {1 << 20: 4}))),
        encode(Talk(A, B, Beacon(-1, {}))),
    ],
    ids=["nothing", "garbage", "cut off", "too long", "no such bucket", "negative"],
)
def test_what_is_no_message_between_replicas_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="between replicas"):
        decode(frame)


# -- a replicator without peers


@contextmanager
def replicator_of(node: Node, view: View) -> Iterator[Replicator]:
    context: zmq.Context[Any] = zmq.Context()
    sockets = Gossip(context, Limits(), b"token", {}, lambda member: None)
    driver = AsyncDriver(ClientConfig(seeds=("tcp://127.0.0.1:1",)), Router(), member=A)
    mover: Any = None
    silent: Any = Silent()
    yield Replicator(
        NodeConfig(), node.journal, node.learning, Ownership(A, view, "f"), driver, sockets,
        mover, silent, random.Random(1),
    )  # fmt: skip
    driver.close()
    sockets.close()
    context.term()


async def test_what_comes_up_while_the_node_stops_begins_nothing() -> None:
    with ExitStack() as stack, Cluster(stack) as cluster:
        cluster.now = clock.monotonic()
        node = cluster.start(A, B)
        with replicator_of(node, View()) as replicator:
            running = asyncio.create_task(replicator.run())
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.sleep(0)
            node.put(*keys_in(0, 1))
            replicator.broke(C)
            replicator.wake()
            replicator.flush()
            with suppress(asyncio.CancelledError):
                await running
            replicator.broke(C)
            assert replicator.batches_total == 0
            assert node.replicas.has_unsent


async def test_nothing_is_kept_of_a_life_that_a_newer_one_followed() -> None:
    with ExitStack() as stack, Cluster(stack) as cluster:
        node = cluster.start(A, B)
        cluster.tick()
        assert B in node.replicas.remembered
        view = View(boots={B.node: B.boot})
        with replicator_of(node, view) as replicator:
            replicator.forget_superseded()
            assert B in node.replicas.remembered
            view.boots[B.node] = BootId(B.boot + 1)
            replicator.forget_superseded()
            assert B not in node.replicas.remembered


class Silent:
    """An etcd that was never heard of."""

    last_contact_ns = None
