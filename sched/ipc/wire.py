"""Every message of the IPC protocol, in one file.

Tagged, array-like MessagePack structs (msgspec), so a message is ``[tag, field, field, ...]``.
Invariants: ``Hello`` keeps its tag and its first fields for ever (versions are compared in it);
everything else may change, which changes :func:`schema_hash`, and both ends must have the same.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec

from ...gpu.lora.report import LoadReport
from ...gpu.model.params import SamplingParams
from ..core.events import Failure
from ..core.snapshot import Stats
from ..streams import GenerationEvent

MAGIC = "rota-ipc"
VERSION = 1


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of the messages; has no tag of its own."""


# handshake and life -----------------------------------------------------------------------------
class Hello(_Message, tag=1, frozen=True):
    """First message of a client. ``token``: the shared secret of a server that asks for one."""

    magic: str
    version: int
    schema: str
    token: str | None = None


class ModelCard(msgspec.Struct, frozen=True, array_like=True):
    """What the engine serves. ``context_length``: tokens of one sequence; ``num_blocks`` blocks of
    ``block_size`` tokens of KV memory; ``eos_ids``: token ids that end a sequence;
    ``attention``: how it attends, "host" or an accelerator's way."""

    family: str
    dtype: str
    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    eos_ids: tuple[int, ...]
    attention: str = ""


class Welcome(_Message, tag=2, frozen=True):
    """The server's answer to a good Hello. ``engine``: version of rota that serves.
    ``chunk``: upload bytes of one Chunk at most. ``max_credit``: of one request."""

    version: int
    engine: str
    card: ModelCard
    stats: Stats
    chunk: int
    max_credit: int


class Refused(_Message, tag=3, frozen=True):
    """The connection is over, and why. Sent by the server before it closes."""

    failure: Failure


class Ping(_Message, tag=4, frozen=True):
    """Are you there? Answered by a Pong of the same number."""

    number: int


class Pong(_Message, tag=5, frozen=True):
    number: int


# requests ---------------------------------------------------------------------------------------
class Generate(_Message, tag=10, frozen=True):
    """Start a request; ``request`` is chosen by the client, not used before on this connection.
    ``credit``: events the server may send before it is granted more (see Credit)."""

    request: int
    prompt: str | tuple[int, ...]
    adapter: str | None
    use_default: bool
    sampling: SamplingParams
    priority: int
    deadline_s: float | None
    credit: int


class Cancel(_Message, tag=11, frozen=True):
    """Nobody reads this request any more. Harmless if it has ended."""

    request: int


class Credit(_Message, tag=12, frozen=True):
    """The client has read: ``events`` more may be sent."""

    request: int
    events: int


class Tokens(_Message, tag=20, frozen=True):
    """Events of any requests, each request's in order: ``events[i]`` is of ``requests[i]``."""

    requests: tuple[int, ...]
    events: tuple[GenerationEvent, ...]


class Ended(_Message, tag=21, frozen=True):
    """The request is over, after its last event; ``failure`` if it ended in an error."""

    request: int
    failure: Failure | None = None


# adapter bytes ----------------------------------------------------------------------------------
class Upload(_Message, tag=30, frozen=True):
    """Begin to send an adapter's bytes: ``tensors`` bytes of safetensors follow in Chunks."""

    upload: int
    tensors: int
    config: bytes


class Chunk(_Message, tag=31, frozen=True):
    """The next bytes of an upload, in order."""

    upload: int
    data: bytes


class DropUpload(_Message, tag=32, frozen=True):
    """The upload is not wanted any more; used ones are dropped by themselves."""

    upload: int


# commands and questions -------------------------------------------------------------------------
class Place(msgspec.Struct, frozen=True, tag="dir", array_like=True):
    """A source: a directory on the engine's machine."""

    path: str


class Uploaded(msgspec.Struct, frozen=True, tag="upload", array_like=True):
    """A source: a finished upload of this connection; the command uses it up."""

    upload: int


class FromPeer(msgspec.Struct, frozen=True, tag="peer", array_like=True):
    """A source: an adapter of a weight peer, as ``rota.Peer``; the engine fetches it itself."""

    address: str
    adapter: str
    secret: bytes | None
    packed: Literal["auto", "always", "never"]
    rails: int
    deadline_s: float


Source = Place | Uploaded | FromPeer


class Adapter(msgspec.Struct, frozen=True, tag="adapter", array_like=True):
    """An adapter command, named as the method of :class:`~rota.sched.engine.Engine`."""

    verb: Literal["load", "register", "replace", "promote", "swap", "prefetch"]
    name: str
    source: Source | None
    slot: int = -1
    pin: bool = False


class Named(msgspec.Struct, frozen=True, tag="named", array_like=True):
    """Commands that need a name only; ``rotate`` may have none (base)."""

    verb: Literal["rotate", "pin", "unpin"]
    name: str | None


class Unload(msgspec.Struct, frozen=True, tag="unload", array_like=True):
    name: str
    deadline_s: float
    cancel_late: bool


class Resize(msgspec.Struct, frozen=True, tag="resize", array_like=True):
    """``None``: as it is."""

    max_loras: int | None
    max_lora_rank: int | None
    deadline_s: float


class GetStats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """A fresh snapshot; the answer is its ``stats``."""


class GetStory(msgspec.Struct, frozen=True, tag="story", array_like=True):
    """The log lines of ``"seq 3"``, ``"slot 1"`` or ``"adapter sql"``."""

    subject: str


class GetStaged(msgspec.Struct, frozen=True, tag="staged", array_like=True):
    """What staging saw of an adapter: a Seen, or Nothing."""

    name: str


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", array_like=True):
    """Token ids of a chat, by the model's template. ``messages``: JSON bytes of a list."""

    messages: bytes


class Encode(msgspec.Struct, frozen=True, tag="encode", array_like=True):
    """Token ids of a text."""

    text: str


class Pieces(msgspec.Struct, frozen=True, tag="pieces", array_like=True):
    """The bytes of tokens, one by one (for logprobs)."""

    ids: tuple[int, ...]


Verb = (
    Adapter
    | Named
    | Unload
    | Resize
    | GetStats
    | GetStory
    | GetStaged
    | ChatPrompt
    | Encode
    | Pieces
)


class Call(_Message, tag=40, frozen=True):
    """A command or question; ``call`` is chosen by the client. Answered by one Result."""

    call: int
    verb: Verb


class CancelCall(_Message, tag=41, frozen=True):
    """Nobody waits for this answer any more; the work may go on."""

    call: int


class Outcome(msgspec.Struct, frozen=True, tag="outcome", array_like=True):
    """An :class:`~rota.sched.face.AdapterReply`, field by field."""

    outcome: str
    name: str | None
    slot: int
    generation: int
    adapter_id: int
    evicted: str | None
    report: LoadReport | None
    seconds: float


class Seen(msgspec.Struct, frozen=True, tag="seen", array_like=True):
    """A :class:`~rota.sched.seen.StagedReport`, field by field."""

    digest: str
    report: LoadReport | None


class Lines(msgspec.Struct, frozen=True, tag="lines", array_like=True):
    lines: tuple[str, ...]


class Ids(msgspec.Struct, frozen=True, tag="ids", array_like=True):
    ids: tuple[int, ...]


class Bytes(msgspec.Struct, frozen=True, tag="bytes", array_like=True):
    items: tuple[bytes, ...]


class Nothing(msgspec.Struct, frozen=True, tag="nothing", array_like=True):
    """The answer is in the Result's other fields."""


Answer = Outcome | Seen | Lines | Ids | Bytes | Nothing


class Result(_Message, tag=42, frozen=True):
    """The one answer to a Call: an ``answer`` or a ``failure``. ``stats``: a snapshot taken after
    the command, so that the client sees what it did; ``None`` where it would be large."""

    call: int
    answer: Answer
    failure: Failure | None = None
    stats: Stats | None = None


ToServer = (
    Hello
    | Ping
    | Pong
    | Generate
    | Cancel
    | Credit
    | Upload
    | Chunk
    | DropUpload
    | Call
    | CancelCall
)
ToClient = Welcome | Refused | Ping | Pong | Tokens | Ended | Result


def _bare(schema: Any) -> Any:
    """A JSON schema without the words meant for people."""
    if isinstance(schema, dict):
        return {k: _bare(v) for k, v in schema.items() if k not in ("description", "title")}
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    return schema


def schema_hash() -> str:
    """SHA-256 (hex) over the JSON schemas of all messages both ways; docstrings do not count."""
    _, components = msgspec.json.schema_components([ToServer, ToClient])
    text = json.dumps(_bare(components), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
