"""What the engine's end does for a Call: one wire verb to one method of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from ...errors import CommandError, RequestError
from ...gpu.lora.source import BytesSource
from ..face import AdapterReply
from ..paths import allowed_directory
from ..text.pieces import token_bytes
from . import wire

if TYPE_CHECKING:
    from ...rdma.pool import PeerPool

_T = TypeVar("_T")
_MAX_PIECES = 65_536


class Uploads:
    """Adapter bytes on their way in, of one connection.

    Invariant: the sizes announced add up to ``max_bytes`` at most; bytes beyond an announced size
    are a WireError of the caller's making (see :meth:`chunk`).
    """

    def __init__(self, max_uploads: int, max_bytes: int) -> None:
        self._max_uploads = max_uploads
        self._max_bytes = max_bytes
        self._open: dict[int, tuple[bytearray, int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, message: wire.Upload) -> str | None:
        """Make room; a text says why not."""
        if message.upload in self._open:
            return "the upload has begun already"
        total = sum(size for _, size, _ in self._open.values()) + message.tensors
        if len(self._open) >= self._max_uploads or message.tensors < 0 or total > self._max_bytes:
            return f"at most {self._max_uploads} uploads of {self._max_bytes} bytes together"
        self._open[message.upload] = (bytearray(), message.tensors, message.config)
        return None

    def chunk(self, message: wire.Chunk) -> str | None:
        """Take the next bytes; a text says why not."""
        found = self._open.get(message.upload)
        if found is None:
            return "no such upload"
        data, size, _ = found
        if len(data) + len(message.data) > size:
            return f"more bytes than the {size} announced"
        data += message.data
        return None

    def drop(self, upload: int) -> None:
        self._open.pop(upload, None)

    def take(self, upload: int) -> BytesSource:
        """The finished upload, once. Raises CommandError ``bad-upload``."""
        found = self._open.pop(upload, None)
        if found is None:
            raise CommandError("no such upload", code="bad-upload", subject=str(upload))
        data, size, config = found
        if len(data) != size:
            raise CommandError(
                "the upload is not complete",
                code="bad-upload",
                subject=str(upload),
                expected=f"{size} bytes",
                found=len(data),
            )
        return BytesSource(data, config)


def to_outcome(reply: AdapterReply) -> wire.Outcome:
    return wire.Outcome(*(getattr(reply, name) for name in wire.Outcome.__struct_fields__))


class Sources:
    """What frontends may name, and the connections to weight peers that their promotions share.

    Owns those; given back by :meth:`close`, when nothing is staged any more.

    Args:
        roots: directories adapters may be loaded from; ``None``: any.
        peers: weight peers (``host:port``) that may be named; ``None``: any.
    """

    def __init__(self, roots: Sequence[str] | None = None, peers: Sequence[str] | None = None):
        self._roots = None if roots is None else tuple(roots)
        self._peers = None if peers is None else tuple(peers)
        self._pool: PeerPool | None = None

    def of(self, source: wire.Source | None, uploads: Uploads) -> Any:
        """Raises CommandError ``path-not-allowed``, ``peer-not-allowed``, ``bad-upload``."""
        match source:
            case None:
                return None
            case wire.Place(path):
                return allowed_directory(path, self._roots)
            case wire.Uploaded(upload):
                return uploads.take(upload)
            case wire.FromPeer():
                return self._peer(source)

    def _peer(self, source: wire.FromPeer) -> Any:
        from ...rdma.client import Peer
        from ...rdma.pool import PeerPool

        if self._peers is not None and source.address not in self._peers:
            raise CommandError(
                "the weight peer is not in the allow-list",
                code="peer-not-allowed",
                subject=source.address,
            )
        if self._pool is None:
            self._pool = PeerPool()
        return Peer(
            source.address,
            source.adapter,
            secret=source.secret,
            packed=source.packed,
            rails=source.rails,
            deadline_s=source.deadline_s,
            pool=self._pool,
        )

    def close(self) -> None:
        """Hang up; a promotion under way ends its own connection. Idempotent."""
        if self._pool is not None:
            self._pool.close()


def _needed(source: _T | None) -> _T:
    if source is None:
        raise CommandError("the command needs a source", code="no-source")
    return source


async def _adapter(engine: Any, verb: wire.Adapter, source: Any) -> AdapterReply:
    run: Mapping[str, Callable[[], Any]] = {
        "load": lambda: engine.load(verb.name, _needed(source), pin=verb.pin),
        "register": lambda: engine.register(verb.name, _needed(source)),
        "replace": lambda: engine.replace(verb.name, _needed(source)),
        "promote": lambda: engine.promote(verb.name, source),
        "swap": lambda: engine.swap(verb.name, source, verb.slot),
        "prefetch": lambda: engine.prefetch(verb.name, source),
    }
    reply: AdapterReply = await run[verb.verb]()
    return reply


async def _named(engine: Any, verb: wire.Named) -> AdapterReply:
    if verb.verb == "rotate":
        reply: AdapterReply = await engine.rotate(verb.name)
    elif verb.name is None:
        raise CommandError("the command needs a name", code="bad-name")
    else:
        reply = await (engine.pin if verb.verb == "pin" else engine.unpin)(verb.name)
    return reply


async def in_thread(job: Callable[..., _T], *args: Any) -> _T:
    """Text work off the loop: a long prompt must not hold up everybody's tokens."""
    return await anyio.to_thread.run_sync(partial(job, *args))


def _messages(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "the messages are not JSON", code="bad-messages", subject="messages", found=str(error)
        ) from error


async def answer(engine: Any, verb: wire.Verb, uploads: Uploads, sources: Sources) -> wire.Answer:
    """Carry out one verb. Raises RotaError."""
    match verb:
        case wire.Adapter():
            source = sources.of(verb.source, uploads)
            return to_outcome(await _adapter(engine, verb, source))
        case wire.Named():
            return to_outcome(await _named(engine, verb))
        case wire.Unload(name, deadline_s, cancel_late):
            reply = await engine.unload(name, deadline_s=deadline_s, cancel_late=cancel_late)
            return to_outcome(reply)
        case wire.Resize(max_loras, rank, deadline_s):
            reply = await engine.resize(
                max_loras=max_loras, max_lora_rank=rank, deadline_s=deadline_s
            )
            return to_outcome(reply)
        case wire.GetStats():
            engine.stats()  # raises if the engine is over; the snapshot travels beside the answer
            return wire.Nothing()
        case wire.GetStory(subject):
            return wire.Lines(tuple(engine.story(subject)))
        case wire.GetStaged(name):
            seen = engine.staged(name)
            return wire.Nothing() if seen is None else wire.Seen(seen.digest, seen.report)
        case wire.ChatPrompt(messages):
            return wire.Ids(tuple(await in_thread(engine.chat_prompt, _messages(messages))))
        case wire.Encode(text):
            return wire.Ids(tuple(await in_thread(engine.tokenizer.encode, text)))
        case wire.Pieces(ids):
            if len(ids) > _MAX_PIECES:
                raise RequestError(
                    "too many tokens at once",
                    code="too-many-tokens",
                    expected=f"at most {_MAX_PIECES}",
                    found=len(ids),
                )
            return wire.Bytes(tuple(token_bytes(engine.tokenizer, i) for i in ids))
