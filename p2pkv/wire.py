"""Messages as values, and their frames. Pure.

A message is one *head* frame and any number of *payload* frames::

    head     version u8 · kind u8 · flags u16 · request id u64 · ring revision u64 · MessagePack
    payload  value bytes, back to back or at the stated positions. In an answer no value spans two
             frames; in a put it may, as its parts leave from where they lie in the client's memory

Head and body travel in one frame because each frame costs a small message about two microseconds.
The ring revision of a reply tells the client that its table is old without a field in every body.

Nothing is allocated by an announced size: a body is checked while it is decoded (types, lengths,
unknown fields refused), and positions in payloads are checked against the frames that came.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Annotated, Any

import msgspec
from msgspec import Meta as Limit

from p2pkv.errors import ProtocolError
from p2pkv.parts import Parts
from p2pkv.replicated import Op, Prepare, PrepareAck
from p2pkv.types import Member

VERSION = 1
PREFIX = Struct("<BBHQQ")
PREFIX_BYTES = PREFIX.size

Buffer = memoryview | bytes | bytearray

KEY_BYTES_MAX = 1024
BATCH_KEYS_MAX = 65536
UCX_ADDRESS_BYTES_MAX = 64 << 10
UCX_REGION_BYTES_MAX = 16 << 20
Key = Annotated[bytes, Limit(min_length=1, max_length=KEY_BYTES_MAX)]
Keys = Annotated[list[Key], Limit(max_length=BATCH_KEYS_MAX)]
Size = Annotated[int, Limit(ge=0, lt=1 << 62)]
Sizes = Annotated[list[Size], Limit(max_length=BATCH_KEYS_MAX)]
Lengths = Annotated[
    list[Annotated[int, Limit(ge=-1, lt=1 << 62)]], Limit(max_length=BATCH_KEYS_MAX)
]
"""-1: up to the end."""
Ids = Annotated[list[int], Limit(max_length=BATCH_KEYS_MAX)]
Sums = Annotated[list[Annotated[int, Limit(ge=0)]], Limit(max_length=BATCH_KEYS_MAX)]
"""XXH3 (64 bits) of each value; 0: none."""
Bucket = Annotated[int, Limit(ge=0, lt=BATCH_KEYS_MAX)]
Prefix = Annotated[bytes, Limit(max_length=KEY_BYTES_MAX)]
Name = Annotated[str, Limit(max_length=256)]
Count = Annotated[int, Limit(ge=0)]
Code = Annotated[int, Limit(ge=0, le=255)]
Stamp = Annotated[int, Limit(ge=0)]
"""64 bits: the name of a write, or a sum or hash (``digests``)."""
"""A Status."""


class Status(IntEnum):
    """The outcome of an operation for one key."""

    OK = 0
    MISS = 1
    NOT_PRIMARY = 2
    """Ask for the ring and go to the bucket's owner."""
    MOVING = 3
    """The bucket is being handed over; ask again in a moment."""
    STALLED = 4
    """The owner may not serve at the moment."""
    EXISTS = 5
    OUT_OF_MEMORY = 6
    QUOTA = 7
    TOO_LARGE = 8
    CONFLICT = 9
    CORRUPT = 10
    INVALID = 11
    INDETERMINATE = 12
    DEFERRED = 13
    """Did not fit into this answer; ask again for the rest."""
    LARGE = 14
    """The value is larger than a message: open it and read it in pieces."""
    RANGE = 15
    """The range reaches beyond the value."""
    NOT_ENOUGH_REPLICAS = 16
    """Fewer members in sync have it, or could, than the cluster or the caller asks for."""


class Checksums(IntEnum):
    """Of which values checksums matter."""

    NONE = 0
    SENT = 1
    """Of those whose bytes travel: not of those that are read where they lie."""
    ALL = 2


class Kind(IntEnum):
    """What a message is. A request is answered by the kind named in ``ANSWERS`` or by ERROR."""

    ERROR = 0
    HELLO = 1
    WELCOME = 2
    BYE = 3
    PING = 4
    PONG = 5
    GET = 10
    PUT = 11
    EXISTS = 12
    MATCH = 13
    DELETE = 14
    ALLOC = 20
    WRITE = 21
    COMMIT = 22
    ABORT = 23
    OPEN = 24
    READ = 25
    RELEASE = 26
    PUSH = 27
    LEASE = 28
    FILLED = 29
    SCAN = 30
    DELETE_RANGE = 31
    PIN = 32
    UNPIN = 33
    EXPIRE = 34
    STATS = 35
    ROUTES = 36
    DRAIN = 37
    CHECK = 38
    SCRUB = 39
    ATTACH = 40
    VALUES = 50
    STATUSES = 51
    MATCHED = 52
    ALLOCATED = 53
    OPENED = 54
    PAGE = 55
    DELETED = 56
    NODE_STATS = 57
    TABLE = 58
    CHECKED = 59
    SCRUBBED = 60
    ATTACHED = 61
    SNAPSHOT = 70
    SNAPSHOT_ACK = 71
    REPLICATE = 72
    REPLICATED = 73
    COMPARE = 74
    COMPARED = 75
    FETCH = 76
    FETCHED = 77
    DROPPED = 78
    STAGE = 79
    HEARTBEAT = 80
    STAGED = 81


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all message bodies."""


class Empty(Body, frozen=True):
    pass


class Fault(IntEnum):
    """Why a whole request was refused."""

    NO_SESSION = 1
    BAD_REQUEST = 2
    VERSION = 3
    CLUSTER = 4
    SESSIONS_MAX = 5
    NOT_READY = 6
    INTERNAL = 7
    FORGOTTEN = 8
    """A repeated write whose first answer is no longer kept: it may have run, or not."""


class Error(Body, frozen=True):
    fault: int
    message: Annotated[str, Limit(max_length=1024)]


class Hello(Body, frozen=True):
    """First message of a session. The session's id is the socket's routing id."""

    cluster: Name
    member: Member | None = None
    """Set when a node speaks."""
    used: Annotated[int, Limit(ge=0, lt=1 << 62)] = 0
    """The highest request number that this session has used. If the node does not know the session
    any more, a write up to it may have run, and is refused."""


class Welcome(Body, frozen=True):
    member: Member
    session_ttl_ms: int
    limits: dict[Name, int]
    data: tuple[Name, ...] = ()
    """Endpoints of the data connection, best first."""
    token: Annotated[bytes, Limit(max_length=64)] = b""
    """Admits this session's data connection."""
    arena: tuple[Name, Size, Annotated[bytes, Limit(max_length=64)]] | None = None
    """File, bytes and proof of the node's memory, for a client that can map it."""
    index: tuple[Size, Size, Name] | None = None
    """Offset and bytes of the published index in that file, and whose clock its times are of."""
    reads: tuple[Name, Annotated[bytes, Limit(max_length=64)]] | None = None
    """Endpoint and token of the node's read connections."""
    ucx: Annotated[int, Limit(ge=0, le=2)] = 0
    """What the node's UCX can do: a ``paths.Ability``."""


class Attach(Body, frozen=True):
    """A client introduces its UCX engine. On control connections only: both hold capabilities."""

    address: Annotated[bytes, Limit(max_length=UCX_ADDRESS_BYTES_MAX)]
    region: Annotated[bytes, Limit(max_length=UCX_REGION_BYTES_MAX)]
    """The memory that the node may write to (PUSH)."""


class Attached(Body, frozen=True):
    """The node's engine, and its arena for one-sided access."""

    address: Annotated[bytes, Limit(max_length=UCX_ADDRESS_BYTES_MAX)]
    region: Annotated[bytes, Limit(max_length=UCX_REGION_BYTES_MAX)]
    arena_bytes: Size
    hold_ms: Annotated[int, Limit(ge=1, lt=1 << 53)]
    """So long a token holds, counted from when the request was sent."""
    pull: bool
    """Whether the node's hardware answers one-sided reads."""


class Get(Body, frozen=True):
    keys: Keys
    tell_once: bool = False
    """Whether the answer shall tell which objects are write-once (for a near cache)."""
    locate: bool = False
    """The client can reach the arena: where large values lie is enough."""
    starts: Sizes = []
    """For each key the first byte that is wanted. Empty: whole values."""
    lengths: Lengths = []
    """With ``starts``: how many bytes."""
    any_copy: bool = False
    """Asked of a backup: what it has of objects that are written once is enough."""
    checksums: Code = Checksums.NONE
    """Which values' checksums the answer shall have. Not for ranges."""
    hold: bool = False
    """With ``locate``: the values stay where they are until the answer's token is released, or
    its time is over."""


class PutOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a put stores. The same for all keys of one message."""

    if_absent: bool = False
    write_once: bool = False
    soft_pin: bool = False
    hard_pin: bool = False
    ttl_ms: Annotated[int, Limit(ge=0, lt=1 << 53)] = 0
    """0: for ever."""
    min_replicas: Annotated[int, Limit(ge=0, le=255)] = 0
    """So many members in sync must have it; 0: what the cluster's min_in_sync says."""


PLAIN = PutOptions()
"""A put without options."""


class Put(Body, frozen=True):
    """Payload: the values packed back to back."""

    keys: Keys
    sizes: Sizes
    options: PutOptions
    checksums: Sums = []


class Exists(Body, frozen=True):
    keys: Keys
    touch: bool = False
    """Whether it counts as a use, for eviction."""


class Match(Body, frozen=True):
    keys: Keys


class Delete(Body, frozen=True):
    keys: Keys


class Alloc(Body, frozen=True):
    keys: Keys
    sizes: Sizes
    options: PutOptions
    shared: bool = False
    """The client has mapped the arena and fills the extents itself. On data connections only:
    the extents are used for nothing else before they are committed, aborted, or the connection
    closes, however long the client is paused."""
    remote: bool = False
    """With ``shared``: by one-sided writes from another host, of which some may be under way when
    the connection closes."""


class Write(Body, frozen=True):
    """Payload: bytes for allocation ``id`` from ``offset`` on."""

    id: int
    offset: Size


class Commit(Body, frozen=True):
    ids: Ids
    filled: bool = False
    """The client wrote the bytes into the arena itself."""
    checksums: Sums = []


class Lease(Body, frozen=True):
    """Asks for room in the arena ahead of puts, which the client fills itself. On data connections
    only, of which each has one room at most: that which it had is given back."""

    size: Size
    """Bytes, with a header and its rounding for each value."""


class Filled(Body, frozen=True):
    """A put of values that lie in the room of this connection, one after the other.

    Each has a header of 64 bytes before it, and begins at a multiple of that.
    """

    keys: Keys
    sizes: Sizes
    options: PutOptions
    start: Size
    """Where the room begins, as both sides know."""
    next: Size
    """How much room is wanted for what may come next; 0: none."""
    checksums: Sums = []


class Abort(Body, frozen=True):
    ids: Ids
    late: bool = False
    """The client's writes to these were given up, and may still arrive."""


class Open(Body, frozen=True):
    keys: Keys
    view: bool = False
    """The client has mapped the arena: it looks at the values there until it releases them."""


class Read(Body, frozen=True):
    token: int
    offset: Size
    length: Size


class Release(Body, frozen=True):
    tokens: Ids


class Push(Body, frozen=True):
    """The node shall write what ``token`` holds to the client's memory. On data connections only.

    For each piece: which of the token's objects, from where (0 is its header), how many bytes, and
    where to in the region that the client has introduced.
    """

    token: int
    items: Sizes
    starts: Sizes
    sizes: Sizes
    targets: Sizes


class Scan(Body, frozen=True):
    """Keys with ``prefix`` of these buckets, in order of bucket list and key, after ``after``.

    ``after`` concerns the first bucket only.
    """

    buckets: Annotated[list[Bucket], Limit(min_length=1, max_length=BATCH_KEYS_MAX)]
    after: Prefix
    prefix: Prefix
    limit: Annotated[int, Limit(ge=1, le=BATCH_KEYS_MAX)]


class DeleteRange(Body, frozen=True):
    buckets: Annotated[list[Bucket], Limit(min_length=1, max_length=BATCH_KEYS_MAX)]
    prefix: Prefix
    limit: Annotated[int, Limit(ge=1, le=BATCH_KEYS_MAX)]


class Pin(Body, frozen=True):
    """Keeps keys from eviction for ``ttl_ms``, at most as long as the session lives."""

    keys: Keys
    ttl_ms: Annotated[int, Limit(ge=1, lt=1 << 53)]


class Unpin(Body, frozen=True):
    keys: Keys


class Expire(Body, frozen=True):
    keys: Keys
    ttl_ms: Annotated[int, Limit(ge=0, lt=1 << 53)]


class Check(Body, frozen=True):
    """Asks whether values are still what their checksums say; those that are not are dropped."""

    keys: Keys


class Scrub(Body, frozen=True):
    """Starts checking all objects of the node, unless that is under way."""

    bytes_per_s: Annotated[int, Limit(ge=0, lt=1 << 62)] = 0
    """0: start nothing, only tell how far it is."""


class Routes(Body, frozen=True):
    """Asks for the ring, unless it is still at ``revision``."""

    revision: int


class Values(Body, frozen=True):
    """Payload: the values. ``statuses`` empty: all OK. ``starts`` empty: packed back to back."""

    statuses: bytes
    sizes: Sizes
    starts: Sizes
    once: bytes = b""
    """With ``tell_once``: 1 for each write-once object. Empty: none is."""
    offsets: Sizes = []
    """With ``locate``: where in the arena each value lies that is not in the payload, else 0."""
    versions: Sizes = []
    """With ``locate``: what the header before the value says as long as it is the same."""
    totals: Sizes = []
    """For ranges: the size of each whole value; ``sizes`` are those of the ranges."""
    checksums: Sums = []
    """As asked for."""
    token: int = 0
    """With ``hold``: what keeps the values with offsets where they are, in the order of keys."""


class Statuses(Body, frozen=True):
    """One status byte per key; empty: all OK."""

    statuses: bytes
    copies: bytes = b""
    """Of puts: how many members in sync have each. Empty: one, where it was written."""
    room: tuple[Size, Size] = (0, 0)
    """Of LEASE and FILLED: offset in the arena, and bytes, of memory that is the client's to fill
    with what it puts next."""


class Matched(Body, frozen=True):
    """The first ``count`` keys are there; ``status`` says why it ended at the next."""

    count: Count
    status: Code


class Allocated(Body, frozen=True):
    """``ids``, ``offsets`` in the arena; 0 where ``statuses`` is not OK."""

    statuses: bytes
    ids: Ids
    offsets: Sizes


class Opened(Body, frozen=True):
    statuses: bytes
    tokens: Ids
    sizes: Sizes
    checksums: Sums = []
    offsets: Sizes = []
    """Of views: where the values lie."""


class Checked(Body, frozen=True):
    """CORRUPT: was dropped. ``offsets``: where each value lay in the arena, 0: nowhere."""

    statuses: bytes
    offsets: Sizes


class Scrubbed(Body, frozen=True):
    """The scrub that is under way, or the last one. ``runs`` 0: there was none."""

    runs: Count
    running: bool
    objects: Count
    """To be looked at, as counted when it began."""
    checked: Count
    checked_bytes: Count
    without: Count
    """Objects that had no checksum."""
    corrupt: Count
    """Objects that were dropped."""


class Page(Body, frozen=True):
    """``finished`` buckets from the start are through; ``status`` tells of the next one."""

    keys: Keys
    sizes: Sizes
    finished: Count
    status: Code


class Deleted(Body, frozen=True):
    count: Count
    finished: Count
    status: Code


class Table(Body, frozen=True):
    """The ring as clients need it. ``owners[b]`` indexes ``members``; -1: no owner."""

    fingerprint: Name
    revision: int
    bucket_count: int
    members: list[Member]
    endpoints: list[tuple[Name, ...]]
    owners: Annotated[list[int], Limit(max_length=BATCH_KEYS_MAX)]
    generations: Annotated[list[int], Limit(max_length=BATCH_KEYS_MAX)]
    backups: Annotated[list[list[int]], Limit(max_length=BATCH_KEYS_MAX)] = []
    """By bucket the other members in sync. Empty: there are none."""


class Drain(Body, frozen=True):
    """Give everything away, or (not ``draining``) take buckets again. Answered by PONG."""

    draining: bool = True


class NodeStats(Body, frozen=True):
    """What one node says of itself. Names of figures end in their unit."""

    member: Member
    labels: dict[str, str]
    figures: dict[str, float]


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One object of a bucket that moves; ``size`` -1: the key is gone."""

    key: Key
    size: Annotated[int, Limit(ge=-1, lt=1 << 62)]
    ttl_ms: Annotated[int, Limit(ge=0, lt=1 << 53)] = 0
    flags: Annotated[int, Limit(ge=0)] = 0
    checksum: Annotated[int, Limit(ge=0)] = 0
    start: Size = 0
    """Position of this piece in the value, for values larger than one message."""
    piece: Annotated[int, Limit(ge=-1, lt=1 << 62)] = -1
    """Bytes of the value in this message; -1: all."""
    stamp: Stamp = 0


class Snapshot(Body, frozen=True):
    """A piece of a bucket, from its owner to its next owner. Payload: the values."""

    bucket: Bucket
    epoch: int
    nonce: int
    seq: int
    entries: Annotated[list[Entry], Limit(max_length=BATCH_KEYS_MAX)]
    last: bool = False
    base: Annotated[int, Limit(ge=0, lt=1 << 62)] = 0
    """With ``last``: the operation that the objects are as of."""


class SnapshotAck(Body, frozen=True):
    bucket: Bucket
    nonce: int
    seq: int
    status: Code
    dropped: int = 0
    """Objects that found no room."""


class Replicate(Body, frozen=True):
    """Operations of several buckets from their primary. Payload: the values of the puts, packed,
    but for those with an offset."""

    prepares: Annotated[list[Prepare], Limit(max_length=BATCH_KEYS_MAX)]
    source: tuple[Name, Size, Annotated[bytes, Limit(max_length=64)]] | None = None
    """File, bytes and proof of the sender's memory, for a peer on its host."""
    offsets: Sizes = []
    """With ``source``: where in it the value of each put lies; 0: it is in the payload."""
    versions: Sizes = []
    """What the header before each says as long as it is the same."""
    staged: bool = False
    """It is one put, whose value was staged before."""


class Stage(Body, frozen=True):
    """A piece of a value that no message holds, of an operation to be prepared. Payload: its bytes
    from ``start`` on; none: asks for room."""

    bucket: Bucket
    epoch: Annotated[int, Limit(ge=0, lt=1 << 62)]
    seq: Annotated[int, Limit(ge=0, lt=1 << 62)]
    op: Op
    start: Size = 0


class Staged(Body, frozen=True):
    """How much of it is there. OUT_OF_MEMORY: there is no room. CONFLICT: the operation does not
    follow on what is here."""

    status: Code
    filled: Size = 0


class Replicated(Body, frozen=True):
    """What is prepared now."""

    acks: Annotated[list[PrepareAck], Limit(max_length=BATCH_KEYS_MAX)]


class Compare(Body, frozen=True):
    """Asks a copy what it noted at an operation of the bucket's log."""

    bucket: Bucket
    position: Stamp


class Compared(Body, frozen=True):
    """What a copy noted. Payload: for a slice, key hash and stamp of each object in it.

    ``status`` MOVING: it has not come so far, or no longer knows."""

    status: Code
    objects: Count = 0
    digest: Stamp = 0
    room: Size = 0
    """Bytes that may still be stored there without evicting anything."""
    largest: Size = 0
    """Bytes of the largest extent that is free."""


class Fetch(Body, frozen=True):
    """Asks a copy for the objects whose keys have these hashes."""

    bucket: Bucket
    hashes: Annotated[list[Stamp], Limit(max_length=BATCH_KEYS_MAX)]
    values: bool = False
    """Whether their values are sent along, as far as they fit into a message."""
    start: Size = 0
    """Of one value: from which byte on."""


class Fetched(Body, frozen=True):
    """Those that are there. Payload: the values, packed, if they were asked for."""

    entries: Annotated[list[Entry], Limit(max_length=BATCH_KEYS_MAX)]


class Dropped(Body, frozen=True):
    """Tells primaries how many copies this node had to give up, by bucket."""

    copies: Annotated[dict[Bucket, Count], Limit(max_length=BATCH_KEYS_MAX)]


BODIES: dict[Kind, type[Body]] = {
    Kind.ERROR: Error,
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.BYE: Empty,
    Kind.PING: Empty,
    Kind.PONG: Empty,
    Kind.GET: Get,
    Kind.PUT: Put,
    Kind.EXISTS: Exists,
    Kind.MATCH: Match,
    Kind.DELETE: Delete,
    Kind.ALLOC: Alloc,
    Kind.WRITE: Write,
    Kind.COMMIT: Commit,
    Kind.LEASE: Lease,
    Kind.FILLED: Filled,
    Kind.ABORT: Abort,
    Kind.OPEN: Open,
    Kind.READ: Read,
    Kind.RELEASE: Release,
    Kind.PUSH: Push,
    Kind.SCAN: Scan,
    Kind.DELETE_RANGE: DeleteRange,
    Kind.PIN: Pin,
    Kind.UNPIN: Unpin,
    Kind.EXPIRE: Expire,
    Kind.STATS: Empty,
    Kind.ROUTES: Routes,
    Kind.DRAIN: Drain,
    Kind.CHECK: Check,
    Kind.SCRUB: Scrub,
    Kind.ATTACH: Attach,
    Kind.VALUES: Values,
    Kind.STATUSES: Statuses,
    Kind.MATCHED: Matched,
    Kind.ALLOCATED: Allocated,
    Kind.OPENED: Opened,
    Kind.PAGE: Page,
    Kind.DELETED: Deleted,
    Kind.NODE_STATS: NodeStats,
    Kind.TABLE: Table,
    Kind.CHECKED: Checked,
    Kind.SCRUBBED: Scrubbed,
    Kind.ATTACHED: Attached,
    Kind.SNAPSHOT: Snapshot,
    Kind.SNAPSHOT_ACK: SnapshotAck,
    Kind.REPLICATE: Replicate,
    Kind.REPLICATED: Replicated,
    Kind.COMPARE: Compare,
    Kind.COMPARED: Compared,
    Kind.FETCH: Fetch,
    Kind.FETCHED: Fetched,
    Kind.DROPPED: Dropped,
    Kind.STAGE: Stage,
    Kind.STAGED: Staged,
}

MUTATING = frozenset(
    {
        Kind.PUT, Kind.FILLED, Kind.DELETE, Kind.COMMIT, Kind.DELETE_RANGE, Kind.PIN, Kind.UNPIN,
        Kind.EXPIRE,
    }
)  # fmt: skip
"""Requests that must not run twice: their answers are kept for a retry."""

_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
    int(kind): msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()
}
_encoder = msgspec.msgpack.Encoder()


class Head(msgspec.Struct, frozen=True, gc=False):
    """A decoded head frame."""

    kind: int
    request: int
    revision: int
    body: Any


def encode(kind: Kind, request: int, revision: int, body: Body) -> bytes:
    """The head frame of a message."""
    return PREFIX.pack(VERSION, kind, 0, request, revision) + _encoder.encode(body)


def peek(frame: Buffer) -> tuple[int, int, int]:
    """(version, kind, request id) of a head frame, whatever its version. Raises ProtocolError."""
    if len(frame) < PREFIX_BYTES:
        raise ProtocolError(f"a head of {len(frame)} bytes is shorter than {PREFIX_BYTES}")
    version, kind, _, request, _ = PREFIX.unpack_from(frame)
    return version, kind, request


def decode(frame: Buffer, head_bytes_max: int) -> Head:
    """Check and decode a head frame. Raises ProtocolError."""
    if len(frame) > head_bytes_max:
        raise ProtocolError(f"a head of {len(frame)} bytes is over {head_bytes_max}")
    if len(frame) < PREFIX_BYTES:
        raise ProtocolError(f"a head of {len(frame)} bytes is shorter than {PREFIX_BYTES}")
    version, kind, _, request, revision = PREFIX.unpack_from(frame)
    if version != VERSION:
        raise ProtocolError(f"protocol version {version}; this is version {VERSION}")
    decoder = _decoders.get(kind)
    if decoder is None:
        raise ProtocolError(f"unknown message kind {kind}")
    try:
        body = decoder.decode(memoryview(frame)[PREFIX_BYTES:])
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"{Kind(kind).name}: {e}") from None
    return Head(kind, request, revision, body)


def packed(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[memoryview]:
    """Views of values that lie back to back, none across a frame's end. Raises ProtocolError."""
    views: list[memoryview] = []
    rest = iter(frames)
    view, at, end = memoryview(b""), 0, 0
    for size in sizes:
        if size and at + size > end:
            if at != end:
                raise ProtocolError("a value spans two payload frames")
            view, at = memoryview(next(rest, b"")), 0
            end = len(view)
            if size > end:
                raise ProtocolError(f"a payload frame of {end} bytes for a value of {size}")
        views.append(view[at : at + size])
        at += size
    if at != end or next(rest, None) is not None:
        raise ProtocolError("the payload is longer than the announced values")
    return views


def gathered(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Parts]:
    """Values that lie back to back, also across the ends of frames. Raises ProtocolError."""
    values: list[Parts] = []
    rest = iter(frames)
    view, at, end = memoryview(b""), 0, 0
    for size in sizes:
        if at + size <= end:
            values.append(view[at : at + size])
            at += size
            continue
        pieces = [view[at:]] if at < end else []
        missing = size - (end - at)
        while missing:
            frame = next(rest, None)
            if frame is None:
                raise ProtocolError(f"a payload {missing} bytes too short for a value of {size}")
            view = memoryview(frame)
            end = len(view)
            at = min(missing, end)
            missing -= at
            if at:
                pieces.append(view[:at])
        values.append(pieces[0] if len(pieces) == 1 else tuple(pieces))
    if at != end or any(map(len, rest)):
        raise ProtocolError("the payload is longer than the announced values")
    return values


def placed(
    frames: Sequence[Buffer], sizes: Sequence[int], starts: Sequence[int]
) -> list[memoryview]:
    """Views of values at ``starts`` (ascending) in the payload. Raises ProtocolError."""
    if not starts:
        return packed(frames, sizes)
    if len(starts) != len(sizes):
        raise ProtocolError(f"{len(starts)} positions for {len(sizes)} values")
    if len(frames) == 1:
        return _placed_in_one(memoryview(frames[0]), sizes, starts)
    views: list[memoryview] = []
    rest = iter(frames)
    view, base, end = memoryview(b""), 0, 0
    for size, start in zip(sizes, starts, strict=True):
        while size and start >= end:
            frame = next(rest, None)
            if frame is None:
                raise ProtocolError("a value lies outside of the payload")
            view, base = memoryview(frame), end
            end = base + len(view)
        if size and (start < base or start + size > end):
            raise ProtocolError("a value spans two payload frames")
        views.append(view[start - base : start - base + size] if size else view[:0])
    return views


def _placed_in_one(
    view: memoryview, sizes: Sequence[int], starts: Sequence[int]
) -> list[memoryview]:
    views = [view[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    if min(starts) < 0 or any(len(v) != n for v, n in zip(views, sizes, strict=True)):
        raise ProtocolError("a value lies outside of the payload")
    return views
