"""The messages of the peer protocol, version 2: what may be said, and how large each may be.

What it owns: the structs (msgpack arrays), their kinds and their bounds. Invariants: every string,
byte string and list has a largest length, checked while decoding; a kind has one struct and one
direction; a decoded message needs no further length check.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ..gpu.lora.report import LoadReport

VERSION: Final = 2
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
MAX_ID_BYTES: Final = 255
MAX_RAILS: Final = 8
MAX_SHARDS: Final = 64
MAX_IDS: Final = 65_536
CHUNK_BYTES: Final = 1 << 20
"""Bytes covered by one digest of a packed image, and the largest single RDMA READ."""

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(max_length=MAC_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES)]
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Meta(max_length=600)]
Code = Annotated[str, Meta(min_length=1, max_length=64)]
Size = Annotated[int, Meta(ge=0, le=1 << 48)]
U64 = Annotated[bytes, Meta(min_length=8, max_length=8)]
U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
DimValue = (
    bool
    | Annotated[int, Meta(ge=0, le=1 << 24)]
    | Annotated[str, Meta(max_length=64)]
    | Annotated[list[Annotated[int, Meta(ge=0, le=1 << 24)] | str], Meta(max_length=1024)]
)


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """Client, first: its nonce and the name it gives itself in the peer's log."""

    nonce: Nonce
    name: Annotated[str, Meta(max_length=64)]


class Challenge(Message, frozen=True):
    """Server: its nonce, and whether the client must prove that it knows the secret."""

    nonce: Nonce
    auth: bool


class Prove(Message, frozen=True):
    """Client: HMAC-SHA256 over both nonces, or empty where no secret is asked for."""

    mac: Mac


class Welcome(Message, frozen=True):
    """Server: its own HMAC over both nonces; whether it can serve one-sided reads."""

    mac: Mac
    verbs: bool
    read_bytes: Size


class ListIds(Message, frozen=True):
    """Client: which adapters are there?"""


class Ids(Message, frozen=True):
    """Server: the ids served, sorted."""

    ids: Annotated[list[Name], Meta(max_length=MAX_IDS)]


class Open(Message, frozen=True):
    """Client: hold the current generation of an adapter until `Release` or the end."""

    adapter: Name


class Region(Message, frozen=True):
    """Where a one-sided read may read: address (little-endian u64), and the rkey on each of the
    server's devices."""

    address: U64
    rkeys: Annotated[list[U32], Meta(min_length=1, max_length=MAX_RAILS)]


class Manifest(Message, frozen=True):
    """Server: one generation: the config itself, the size of each shard, and their digest.

    ``digest`` is SHA-256 of the config bytes followed by the bytes of every shard. ``regions`` has
    one entry a shard once verbs are connected, else none.
    """

    adapter: Name
    generation: U32
    digest: Hex
    config: Annotated[bytes, Meta(max_length=1 << 20)]
    shards: Annotated[list[Size], Meta(min_length=1, max_length=MAX_SHARDS)]
    regions: Annotated[list[Region], Meta(max_length=MAX_SHARDS)]


class LayoutSpec(Message, frozen=True):
    """A slot layout, as its constructor takes it."""

    dims: Annotated[dict[Annotated[str, Meta(max_length=32)], DimValue], Meta(max_length=64)]
    max_rank: Annotated[int, Meta(ge=1, le=4096)]
    elem: Annotated[str, Meta(max_length=8)]
    overlay_rows: Annotated[int, Meta(ge=0, le=1 << 20)]
    affine: bool
    expert_rank: Annotated[int, Meta(ge=0, le=4096)] = 0
    embedding_rank: Annotated[int, Meta(ge=0, le=4096)] = 0


class Pack(Message, frozen=True):
    """Client: pack an open generation for this layout (once; the peer keeps the image).

    ``hashes``: names of the hashes it can check chunks with, the one it likes best first.
    """

    digest: Hex
    fingerprint: Hex
    layout: LayoutSpec
    hashes: Annotated[list[Annotated[str, Meta(max_length=16)]], Meta(min_length=1, max_length=8)]


class Packed(Message, frozen=True):
    """Server: a packed image. ``chunks``: the digest by ``hash`` of each `CHUNK_BYTES` of it, and
    by some of one thing more (`hashes.told_digest`), joined; ``hash`` is one of those the client
    named.

    ``scales``: float32 little endian per pair; ``ranks``: u16 little endian per pair; ``affine``: a
    byte per pair, 1 where it has a factor and an offset, or nothing for a layout without.
    """

    digest: Hex
    fingerprint: Hex
    nbytes: Size
    hash: Annotated[str, Meta(max_length=16)]
    chunks: Annotated[bytes, Meta(max_length=1 << 20)]
    scales: Annotated[bytes, Meta(max_length=1 << 20)]
    ranks: Annotated[bytes, Meta(max_length=1 << 19)]
    affine: Annotated[bytes, Meta(max_length=1 << 18)]
    embed_rows: U32
    head_rows: U32
    report: LoadReport
    region: Region | None


class Read(Message, frozen=True):
    """Client: send bytes of an open generation: a shard, or (``shard`` -1) a packed image."""

    digest: Hex
    shard: Annotated[int, Meta(ge=-1, lt=MAX_SHARDS)]
    fingerprint: Annotated[str, Meta(max_length=64)]
    offset: Size
    nbytes: Size


class Data(Message, frozen=True):
    """Server: the bytes asked for follow as this frame's payload."""


class Fetch(Message, frozen=True):
    """Client: `Open`, and at once what there is of a packed image: one question in all.

    ``fingerprint``, ``hashes``: as of `Pack`. ``files_at_least``: no image of an adapter whose
    shards have fewer bytes. ``room``: the most bytes of an image that comes along (0: none does).
    """

    adapter: Name
    fingerprint: Hex
    hashes: Annotated[list[Annotated[str, Meta(max_length=16)]], Meta(min_length=1, max_length=8)]
    files_at_least: Size
    room: Size


class Fetched(Message, frozen=True):
    """Server: the generation opened, and its image where one is packed; the image's bytes follow as
    this frame's payload where there is room for them and no queue pair can read them."""

    manifest: Manifest
    packed: Packed | None


class Release(Message, frozen=True):
    """Client: a generation is no longer needed."""

    digest: Hex


class Released(Message, frozen=True):
    """Server: it is let go."""


class Rail(Message, frozen=True):
    """One end of one queue pair. ``mtu`` is the verbs enumeration (1..5), ``depth`` reads at once.

    ``gid``: 16 bytes, network order. ``device``: which of its end's devices it is on: the client's
    n-th is joined to the server's n-th (modulo their number), and its rkey is the n-th of a region.
    """

    qpn: Annotated[int, Meta(ge=0, lt=1 << 24)]
    psn: Annotated[int, Meta(ge=0, lt=1 << 24)]
    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    mtu: Annotated[int, Meta(ge=1, le=5)]
    depth: Annotated[int, Meta(ge=1, le=255)]
    device: Annotated[int, Meta(ge=0, lt=MAX_RAILS)]


class Connect(Message, frozen=True):
    """Client: its queue pairs; the peer answers with as many of its own."""

    rails: Annotated[list[Rail], Meta(min_length=1, max_length=MAX_RAILS)]


class Connected(Message, frozen=True):
    """Server: its queue pairs, in the order of the client's, ready to be read from."""

    rails: Annotated[list[Rail], Meta(min_length=1, max_length=MAX_RAILS)]


class Status(Message, frozen=True):
    """Client: the peer's counters."""


class Counters(Message, frozen=True):
    """Server: counters and gauges by name."""

    values: Annotated[dict[Annotated[str, Meta(max_length=64)], int | float], Meta(max_length=64)]


class Refused(Message, frozen=True):
    """Server: a request (or, for request 0, the connection) is refused by name."""

    kind: Annotated[str, Meta(max_length=32)]
    code: Code
    message: Text
    subject: Text | None
    expected: Text | None
    found: Text | None
    retry_after_s: Annotated[float, Meta(ge=0, le=86_400)] | None


class Kind(Struct, frozen=True):
    """How one message travels: its struct, who sends it, its largest body in bytes."""

    struct: type[Message]
    from_client: bool
    max_body: int


KINDS: Final[dict[int, Kind]] = {
    1: Kind(Hello, True, 256),
    2: Kind(Challenge, False, 256),
    3: Kind(Prove, True, 256),
    4: Kind(Welcome, False, 256),
    5: Kind(ListIds, True, 16),
    6: Kind(Ids, False, 16 << 20),
    7: Kind(Open, True, 2048),
    8: Kind(Manifest, False, 2 << 20),
    9: Kind(Pack, True, 128 << 10),
    10: Kind(Packed, False, 4 << 20),
    11: Kind(Read, True, 512),
    12: Kind(Data, False, 16),
    13: Kind(Release, True, 128),
    14: Kind(Released, False, 16),
    15: Kind(Connect, True, 1024),
    16: Kind(Connected, False, 1024),
    17: Kind(Status, True, 16),
    18: Kind(Counters, False, 16 << 10),
    19: Kind(Refused, False, 16 << 10),
    20: Kind(Fetch, True, 2048),
    21: Kind(Fetched, False, 6 << 20),
}
NUMBERS: Final[dict[type[Message], int]] = {kind.struct: n for n, kind in KINDS.items()}
ANSWERS: Final[dict[type[Message], type[Message]]] = {
    ListIds: Ids,
    Open: Manifest,
    Pack: Packed,
    Read: Data,
    Fetch: Fetched,
    Release: Released,
    Connect: Connected,
    Status: Counters,
}
"""What each request is answered with, unless it is `Refused`."""

DECODERS: Final = {n: msgspec.msgpack.Decoder(kind.struct) for n, kind in KINDS.items()}
encode: Final = msgspec.msgpack.Encoder().encode
