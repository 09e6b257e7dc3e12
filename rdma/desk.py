"""One client's questions, answered from the store.

What it owns: the leases and queue pairs of one connection. Invariants: a client reaches only what
it opened itself; every refusal becomes a `Refused` message with its class, code and fields; `close`
gives every lease back exactly once, after the queue pairs that could read it are gone. Calls may
block (disk, packing) and come one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from ..errors import (
    CLASSES,
    CapacityError,
    EngineClosedError,
    RequestError,
    RotaError,
    StagingError,
    WireError,
    class_name,
)
from . import messages as m
from .hashes import KNOWN, choose, told_digest
from .layouts import layout_of
from .region import Region
from .store import Generation, PackedImage, Store


def refusal(error: RotaError) -> m.Refused:
    """An error as it travels."""

    def short(text: str | None) -> str | None:
        return None if text is None else text[:600]

    return m.Refused(
        class_name(error),
        error.code[:64],
        error.message[:600],
        short(error.subject),
        short(error.expected),
        short(error.found),
        error.retry_after_s,
    )


def raised(refused: m.Refused) -> RotaError:
    """The error a `Refused` stands for."""
    return CLASSES.get(refused.kind, StagingError)(
        refused.message,
        code=refused.code,
        subject=refused.subject,
        expected=refused.expected,
        found=refused.found,
        retry_after_s=refused.retry_after_s,
    )


class QueuePairs(Protocol):
    """The peer's ends of one client's rails."""

    def close(self) -> None:
        """Destroy them; nothing can read any more."""
        ...


class Rails(Protocol):
    """What a desk needs of a verbs device."""

    def accept(self, rails: list[m.Rail]) -> tuple[list[m.Rail], QueuePairs]:
        """Queue pairs connected to the client's. Raises RotaError."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A message, and the bytes that follow it (for `Data`)."""

    message: m.Message
    payload: memoryview | None = None


class Desk:
    """Answers one connection.

    Args:
        store: the adapters.
        rails: a verbs device, or ``None``.
        counters: more numbers for `Status`.
        max_open: generations one client may hold.
        sure: only hashes that nobody can forge; where digests are authentic.
    """

    def __init__(
        self,
        store: Store,
        rails: Rails | None = None,
        counters: Callable[[], Mapping[str, int | float]] | None = None,
        *,
        max_open: int = 8,
        sure: bool = False,
    ) -> None:
        self._store, self._rails, self._max_open, self._sure = store, rails, max_open, sure
        self._counters = counters
        self._held: dict[str, list[Generation]] = {}
        self._pairs: QueuePairs | None = None
        self._closed = False

    def handle(self, message: m.Message, waits: Callable[[], None] = lambda: None) -> Answer:
        """The answer to a request; never raises for what a client can cause. ``waits``: called
        before it takes long, under locks that others may want."""
        try:
            if self._closed:
                raise EngineClosedError("the peer is stopping", code="peer-stopping")
            return self._answer(message, waits)
        except RotaError as error:
            return Answer(refusal(error))

    @property
    def holds_nothing(self) -> bool:
        """The client has nothing open, and so may read nothing by its queue pairs either."""
        return not self._held

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._closed = True
        if self._pairs is not None:
            self._pairs.close()
            self._pairs = None
        held, self._held = self._held, {}
        for generations in held.values():
            for generation in generations:
                self._store.release(generation)

    def _answer(self, message: m.Message, waits: Callable[[], None]) -> Answer:
        match message:
            case m.ListIds():
                return Answer(m.Ids(self._store.ids()))
            case m.Open():
                return Answer(self._open(message.adapter, waits))
            case m.Fetch():
                return self._fetch(message, waits)
            case m.Pack():
                return Answer(self._pack(message))
            case m.Read():
                return self._read(message)
            case m.Release():
                self._release(message.digest)
                return Answer(m.Released())
            case m.Connect():
                return Answer(self._connect(message))
            case m.Status():
                more: dict[str, Any] = dict(self._counters()) if self._counters else {}
                return Answer(m.Counters(self._store.counters() | more))
        raise WireError("not a request", code="wire-unexpected", found=type(message).__name__)

    def _open(self, adapter: str, waits: Callable[[], None]) -> m.Manifest:
        if sum(map(len, self._held.values())) >= self._max_open:
            raise CapacityError(
                "too many adapters held by one client",
                code="too-many-open",
                expected=f"at most {self._max_open}",
            )
        generation = self._store.open(adapter, waits)
        self._held.setdefault(generation.digest, []).append(generation)
        regions = [self._region(shard) for shard in generation.shards]
        return m.Manifest(
            adapter,
            generation.number,
            generation.digest,
            generation.raw.config,
            [shard.nbytes for shard in generation.shards],
            [region for region in regions if region is not None] if None not in regions else [],
        )

    def _find(self, digest: str) -> Generation:
        held = self._held.get(digest)
        if not held:
            raise RequestError("not a generation this client holds", code="not-open")
        return held[-1]

    def _pack(self, message: m.Pack) -> m.Packed:
        generation = self._find(message.digest)
        name = choose(message.hashes, sure=self._sure)
        packed = self._store.packed(generation, message.fingerprint)
        if packed is None:
            layout = layout_of(message.layout, message.fingerprint, self._store.limits.budget)
            packed = self._store.pack(generation, layout)
        return self._told(generation, packed, name)

    def _fetch(self, message: m.Fetch, waits: Callable[[], None]) -> Answer:
        name = choose(message.hashes, sure=self._sure)
        manifest = self._open(message.adapter, waits)
        generation = self._find(manifest.digest)
        packed: PackedImage | None = None
        if sum(manifest.shards) >= message.files_at_least:
            packed = self._store.packed(generation, message.fingerprint)
        if packed is None:
            return Answer(m.Fetched(manifest, None))
        if name not in packed.told:
            waits()  # all of it is hashed
        told, payload = self._told(generation, packed, name), None
        if told.region is None and message.room >= packed.region.nbytes:
            payload = packed.region.array.data
        return Answer(m.Fetched(manifest, told), payload)

    def _told(self, generation: Generation, packed: PackedImage, name: str) -> m.Packed:
        """What a client is told of an image, with digests by the hash ``name``."""
        told = packed.told.get(name)
        if told is None:
            image = packed.image
            told = m.Packed(
                generation.digest,
                image.fingerprint,
                image.nbytes,
                name,
                packed.chunks(name),
                image.scales.astype("<f4").tobytes(),
                np.asarray(image.ranks, "<u2").tobytes(),
                bytes(image.affine),
                image.embed_rows,
                image.head_rows,
                packed.report,
                None,
            )
            if KNOWN[name].told:
                chunks = told.chunks + told_digest(told)
                told = msgspec.structs.replace(told, chunks=chunks)
            packed.told[name] = told
        region = self._region(packed.region)
        return told if region is None else msgspec.structs.replace(told, region=region)

    def _read(self, message: m.Read) -> Answer:
        generation = self._find(message.digest)
        region: Region | None = None
        if message.shard >= 0:
            if message.shard < len(generation.shards):
                region = generation.shards[message.shard]
        else:
            packed: PackedImage | None = generation.images.get(message.fingerprint)
            region = None if packed is None else packed.region
        if region is None:
            raise RequestError("nothing of this name to read", code="not-open")
        end = message.offset + message.nbytes
        if end > region.nbytes:
            raise RequestError(
                "a read past the end",
                code="read-out-of-range",
                expected=f"at most {region.nbytes}",
                found=end,
            )
        return Answer(m.Data(), region.array[message.offset : end].data)

    def _release(self, digest: str) -> None:
        generation = self._find(digest)
        self._held[digest].pop()
        if not self._held[digest]:
            del self._held[digest]
        self._store.release(generation)

    def _connect(self, message: m.Connect) -> m.Connected:
        if self._rails is None:
            raise RequestError("this peer has no verbs device", code="no-verbs")
        if self._pairs is not None:
            self._pairs.close()
            self._pairs = None
        rails, self._pairs = self._rails.accept(message.rails)
        return m.Connected(rails)

    def _region(self, region: Region) -> m.Region | None:
        if self._pairs is None or not region.rkeys:
            return None
        return m.Region(region.address.to_bytes(8, "little"), list(region.rkeys))
