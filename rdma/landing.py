"""Bytes on their way from a peer into their buffers.

What it owns: a promotion's targets while they are filled. Invariants: what a peer says is checked
before what it sends is used; an image is made only of bytes whose digests are right.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, RejectError, WireError
from ..gpu.lora import safefile
from ..gpu.lora.buffers import blank
from ..gpu.lora.config import parse_config
from ..gpu.lora.image import SlotImage
from ..gpu.lora.layout import SlotLayout
from ..gpu.lora.pack import reuse_buffer
from ..gpu.lora.stage import Held, StagedAdapter, StageLimits
from ..gpu.lora.targets import check_targets
from . import messages as m
from .hashes import KNOWN, offered
from .layouts import check_packed, layout_spec
from .link import Spare
from .pool import Session
from .verify import ChunkVerifier

log = logging.getLogger("rota.rdma.landing")
Buffer = npt.NDArray[np.uint8] | bytearray | memoryview
Progress = Callable[[int, int], None]
_KNOWN_BYTES: Final = 16 << 10
"""Of the largest config that is remembered."""
_ANNEX_ALONG: Final = 64 << 20
"""An image with a larger annex does not come along with the answer, before its size is known."""
_SMALL_BYTES: Final = 4 << 20
"""Up to as many the thread that receives an image checks it as well: another wakes too late."""
_ALONE_BYTES: Final = 64 << 20
"""As many, where the other thread would have to be made."""
_PHASES: Final = ("resolve", "pack", "transfer", "verify")


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a promotion asks for, and when (by ``clock``) it began; see `stage`."""

    layout: SlotLayout
    limits: StageLimits
    buffer: Buffer | None
    held: Held | None
    clock: Callable[[], float]
    begun: float


def checked(manifest: m.Message, adapter: str, limits: safefile.FileLimits) -> m.Manifest:
    """The adapter's manifest, within the limits. Raises RejectError config-too-large,
    file-too-large, bad-index; WireError wire-unexpected."""
    assert isinstance(manifest, m.Manifest)
    if manifest.adapter != adapter:
        raise WireError(
            "the peer opened another adapter than was asked for",
            code="wire-unexpected",
            expected=adapter,
            found=manifest.adapter,
        )
    safefile.check_sizes(len(manifest.config), sum(manifest.shards), limits)
    if len(manifest.shards) > limits.shards:
        raise RejectError(
            "too many shards",
            code="bad-index",
            subject=adapter,
            expected=f"at most {limits.shards}",
            found=len(manifest.shards),
        )
    return manifest


def opened(session: Session, adapter: str, limits: safefile.FileLimits) -> m.Manifest:
    """Open the adapter, and no more; its manifest. Raises as `checked`, and RotaError as the peer
    refuses."""
    manifest = checked(session.link.call(m.Open(adapter)), adapter, limits)
    session.opened.append(manifest.digest)
    return manifest


@dataclass(frozen=True, slots=True, eq=False)
class Carrier:
    """Moves bytes over one session: by its rails where they can read, else by its connection.

    ``stall``: seconds without a byte; ``progress``: told (bytes there, bytes in all).
    """

    session: Session
    stall: float
    progress: Progress | None

    def target(
        self, nbytes: int, region: m.Region | None, wanted: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        """Where bytes land: registered memory for one-sided reads, else what the caller gave."""
        transport = self.session.transport
        if self.session.rails is not None and region is not None and transport is not None:
            try:
                return transport.allocate(nbytes)
            except CapacityError as error:
                log.warning("reading by TCP: %s", error)
        return blank(nbytes) if wanted is None else wanted

    def bring(
        self,
        ask: m.Read,
        region: m.Region | None,
        target: npt.NDArray[np.uint8],
        advance: Callable[[int], None],
        before: int,
        total: int,
        spare: Spare | None = None,
    ) -> None:
        """Fill ``target`` with what ``ask`` names. Raises as `client.Peer.read`.

        ``spare``: see `link.Link.call`.
        """

        def landed(count: int) -> None:
            advance(count)
            self.tell(before + count, total)

        session = self.session
        transport, rails = session.transport, session.rails
        one_sided = rails is not None and transport is not None and transport.contains(target)
        if region is not None and rails is not None and one_sided:
            address = int.from_bytes(region.address, "little")
            rails.read(
                target,
                address,
                region.rkeys,
                session.deadline,
                session.cancelled,
                landed,
                stall=self.stall,
            )
        else:
            session.link.call(ask, target.data, landed, spare=spare)

    def tell(self, count: int, total: int) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(count, total)


class ImageLanding:
    """One adapter's packed image: asked for, received, verified.

    Args:
        carrier: over the promotion's session.
        adapter: its id.
        files_at_least: bytes of files from which an image is wanted.
        sure: take only hashes that nobody can forge.
        want: layout, limits and buffer.
    """

    def __init__(
        self, carrier: Carrier, adapter: str, files_at_least: int, want: Wanted, *, sure: bool
    ) -> None:
        self._carrier, self._adapter, self._want = carrier, adapter, want
        self._least, self._hashes = files_at_least, offered(sure=sure)
        self._session = carrier.session
        if want.buffer is not None:  # a wrong one is refused before anything is asked
            reuse_buffer(want.buffer, want.layout.slot_bytes)
        self._target: npt.NDArray[np.uint8] | None = None
        self._manifest: m.Manifest | None = None
        self._packed: m.Packed | None = None
        self._facts: SlotImage | None = None
        self._verifier: ChunkVerifier | None = None
        self._there = 0
        self._told = self._want.begun

    def ask(self) -> m.Manifest:
        """Open the adapter; the image comes along where it is packed already and nothing held can
        stand for it. Where something can, nothing is said of an image before `pack`."""
        layout, session, want = self._want.layout, self._session, self._want
        if want.held is not None:
            self._manifest = opened(session, self._adapter, want.limits.files)
            self._told = want.clock()
            return self._manifest
        room = 0
        if session.rails is None:
            limit = want.limits.annex_bytes
            annex = min(layout.max_annex_bytes, _ANNEX_ALONG)
            room = layout.slot_bytes + (annex if limit is None else min(annex, limit))
            if want.buffer is None:
                self._target = blank(room)
            else:
                room = min(room, len(want.buffer))
                self._target = reuse_buffer(want.buffer, room)
        ask = m.Fetch(self._adapter, layout.fingerprint(), self._hashes, self._least, room)
        sink = None if self._target is None else self._target.data
        session.link.call(ask, sink, self._landed, self._on_fetched, self._spare)
        assert self._manifest is not None
        return self._manifest

    def pack(self) -> None:
        """Have the peer pack it, unless it has. Raises RotaError as it refuses, and RejectError as
        the config's audit does here."""
        if self._packed is None:
            assert self._manifest is not None
            layout = self._want.layout
            self._audit()
            ask = m.Pack(
                self._manifest.digest, layout.fingerprint(), layout_spec(layout), self._hashes
            )
            answer = self._session.link.call(ask)
            assert isinstance(answer, m.Packed)
            self._take(answer)

    def finish(self) -> StagedAdapter:
        """The image, verified; received first, where it did not come along."""
        packed, facts, clock = self._packed, self._facts, self._want.clock
        assert packed is not None and facts is not None
        wanted = None
        if self._want.buffer is not None:
            wanted = reuse_buffer(self._want.buffer, packed.nbytes)
        times = [self._want.begun, self._told, self._told]
        target = self._target
        if not self._there:
            times[2] = clock()
            region = packed.region if self._session.rails is not None else None
            if target is None:
                target = self._carrier.target(packed.nbytes, region, wanted)
            ask = m.Read(packed.digest, -1, packed.fingerprint, 0, packed.nbytes)
            verifier = self._verify(target)
            total = packed.nbytes
            self._carrier.bring(ask, region, target, verifier.advance, 0, total, verifier.help)
        times.append(clock())
        assert self._verifier is not None and target is not None
        self._verifier.finish()
        if wanted is not None and wanted.ctypes.data != target.ctypes.data:
            wanted[:] = target
            target = wanted
        times.append(clock())
        seconds = {n: b - a for n, a, b in zip(_PHASES, times, times[1:], strict=False)}
        transport = self._session.transport
        lent = wanted is not None or (transport is not None and transport.contains(target))
        image = dataclasses.replace(facts, buffer=target, digest=packed.digest, lent=lent)
        report = dataclasses.replace(packed.report, seconds=seconds)
        return StagedAdapter(image, report, packed.digest)

    def _on_fetched(self, answer: m.Message) -> None:
        assert isinstance(answer, m.Fetched)
        self._manifest = checked(answer.manifest, self._adapter, self._want.limits.files)
        self._session.opened.append(self._manifest.digest)
        if answer.packed is not None:
            self._audit()
            self._take(answer.packed)
        self._told = self._want.clock()

    def _take(self, packed: m.Packed) -> None:
        """Believe what is said of an image, once it can be true."""
        assert self._manifest is not None
        want = self._want
        limit = want.limits.annex_bytes
        self._facts = check_packed(packed, self._manifest.digest, want.layout, self._hashes, limit)
        self._packed = packed
        if self._target is not None:
            long_enough = len(self._target) >= packed.nbytes
            self._target = self._target[: packed.nbytes] if long_enough else None

    def _audit(self) -> None:
        """The config, as it is from disk."""
        assert self._manifest is not None
        config, limit = self._manifest.config, self._want.limits.files.config_bytes
        known = _audit_once if len(config) <= _KNOWN_BYTES else _audit
        known(config, limit, self._want.layout)

    def _landed(self, count: int) -> None:
        """Bytes that came with the answer. Without an image they are nothing, and stay so."""
        if self._packed is not None and self._target is not None and count:
            self._there = count
            self._verify(self._target).advance(count)
            self._carrier.tell(count, self._target.nbytes)

    def _spare(self) -> bool:
        """A piece of checking, while nothing arrives."""
        return self._verifier is not None and self._verifier.help()

    def _verify(self, target: npt.NDArray[np.uint8]) -> ChunkVerifier:
        if self._verifier is None:
            assert self._packed is not None
            hash_, digests = KNOWN[self._packed.hash], self._packed.chunks
            threads, lent, nbytes = 2, None, target.nbytes
            if not (hash_.slow or hash_.quick) and self._session.rails is None:
                # A fast hash keeps up with a connection, and the peer may want a core as well.
                lent = self._session.beside() if nbytes > _SMALL_BYTES else None
                threads = 0 if lent is None and nbytes <= _ALONE_BYTES else 1
            self._verifier = ChunkVerifier(target, digests, hash_, threads, lent)
        return self._verifier

    def close(self) -> None:
        """End what verifies it. Idempotent."""
        if self._verifier is not None:
            self._verifier.close()


def _audit(config: bytes, limit: int, layout: SlotLayout) -> None:
    check_targets(parse_config(config, max_bytes=limit), layout)


_audit_once: Final = lru_cache(64)(_audit)
"""Adapters of one training script have one config; a refusal is not remembered."""
