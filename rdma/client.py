"""An adapter on a weight peer, as a source for staging.

What it owns: nothing between promotions. Invariants: one connection per promotion, and plan and
bytes come from one manifest; the config is audited here as it is from disk; bytes are believed only
once their digest is right; a failure at any point touches no slot and leaves no connection, thread
or queue pair behind.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, RejectError, RequestError, RotaError, StagingError, WireError
from ..gpu.lora import safefile
from ..gpu.lora.audit import check_targets
from ..gpu.lora.config import parse_config
from ..gpu.lora.image import SlotImage
from ..gpu.lora.layout import SlotLayout
from ..gpu.lora.overlay import BaseRows
from ..gpu.lora.pack import reuse_buffer
from ..gpu.lora.source import RawAdapter
from ..gpu.lora.stage import Held, StagedAdapter, StageLimits, stage
from . import messages as m
from .address import parse_address
from .frames2 import Times
from .hashes import KNOWN
from .layouts import DigestedAdapter, HeldSource, check_packed, layout_spec
from .link import Link, SocketStream, Stream
from .onesided import Cancelled, OneSided, OneSidedRails
from .verify import ChunkVerifier, WholeVerifier

log = logging.getLogger("rota.rdma.client")

Buffer = npt.NDArray[np.uint8] | bytearray | memoryview
_PACKED_UP_TO: Final = 2.0
"""A packed image is fetched while it is at most this many times the files' size: it saves the
conversion, but carries the padding up to the pool's rank."""


_ALWAYS: Final = frozenset(("overlay-no-base", "affine-no-base", "peer-memory-full"))
_FILES_INSTEAD: Final = {
    "always": _ALWAYS,
    "auto": _ALWAYS | {"bad-layout", "fingerprint-mismatch"},
}
"""Why a peer may not pack although the adapter can be served: its files come instead."""


@dataclass(frozen=True, slots=True, eq=False)
class _Session:
    """One promotion's connection and, where both ends have verbs, its rails."""

    link: Link
    rails: OneSidedRails | None
    transport: OneSided | None
    deadline: float
    cancelled: Cancelled | None


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """An adapter by id on a peer at ``"host:port"``.

    Attributes:
        address: of the peer.
        adapter: the id it serves it under.
        secret: shared with the peer, or ``None``.
        packed: fetch the image packed by the peer: ``auto`` (where it is not much larger than the
            files), ``always`` (but for what needs the base model's matrices), ``never``.
        transport: a verbs device (`verbs.open_client`), or ``None`` for TCP.
        rails: queue pairs to read through, 1..8.
        deadline_s: seconds a promotion may take in all.
        times: time-outs within it.
        progress: told (bytes there, bytes in all) from the staging thread.
        connect: makes the connection; default TCP to ``address``.
        clock: monotonic seconds.
    """

    address: str
    adapter: str
    secret: bytes | None = field(default=None, repr=False)
    packed: Literal["auto", "always", "never"] = "auto"
    transport: OneSided | None = None
    rails: int = 1
    deadline_s: float = 120.0
    times: Times = field(default_factory=Times)
    progress: Callable[[int, int], None] | None = None
    connect: Callable[[float, Cancelled | None], Stream] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        parse_address(self.address)
        size = len(self.adapter.encode())
        if not 1 <= size <= m.MAX_ID_BYTES:
            raise RequestError(
                "an adapter id is 1..255 bytes", code="bad-adapter-id", found=f"{size} bytes"
            )
        if not 1 <= self.rails <= m.MAX_RAILS:
            raise RequestError("1..8 rails", code="bad-rails", found=self.rails)

    @property
    def place(self) -> Hashable:
        """What two sources of one adapter have in common; how its bytes come makes no difference.

        The secret is part of it: one who guesses it must not stand in for one who knows it.
        """
        return ("peer", self.address, self.adapter, self.secret, self.connect)

    def read(self, limits: safefile.FileLimits) -> RawAdapter:
        """The files' bytes, digest checked; see `AdapterSource.read`.

        Raises:
            RejectError: the adapter's own fault, as from disk.
            StagingError: peer-unreachable, peer-lost, peer-timeout, digest-mismatch,
                rdma-read-failed.
            RequestError: unknown-adapter.
            CapacityError: peer-busy, peer-memory-full.
            WireError: the peer breaks the protocol, or the secret is wrong.
        """
        with self._session(None) as session:
            return self._read_raw(session, self._open(session, limits))

    def stage_for(
        self,
        layout: SlotLayout,
        limits: StageLimits,
        base_rows: BaseRows | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cancelled: Cancelled | None = None,
        buffer: Buffer | None = None,
        held: Held | None = None,
    ) -> StagedAdapter:
        """Stage over one connection, from a packed image where that is the shorter way.

        What ``held`` gives for the digest of the peer's current generation is the answer as it is:
        one question, no bytes.

        Raises:
            As `read`, and: RejectError, everything the audit refuses; StagingError stage-cancelled.
        """
        begun = clock()
        with self._session(cancelled) as session:
            manifest = self._open(session, limits.files)
            known = None if held is None else held(manifest.digest)
            if known is not None and known.image.fingerprint == layout.fingerprint():
                return known
            resolved = clock()
            if self._wants_image(manifest, layout):
                config = parse_config(manifest.config, max_bytes=limits.files.config_bytes)
                check_targets(config, layout)
                try:
                    packed = self._pack(session, manifest, layout)
                except RotaError as error:
                    if error.code not in _FILES_INSTEAD[self.packed]:
                        raise
                    log.info("no packed image of %s (%s): its files instead", self.adapter, error)
                else:
                    times = [begun, resolved, clock()]
                    return self._land(session, packed, layout, buffer, clock, times)
            raw = self._read_raw(session, manifest)
        read = clock()
        staged = stage(
            HeldSource(raw),
            layout,
            limits,
            base_rows,
            clock=clock,
            cancelled=cancelled,
            buffer=buffer,
        )
        seconds = {"resolve": resolved - begun, "transfer": read - resolved}
        return _timed(staged, seconds | dict(staged.report.seconds))

    @contextmanager
    def _session(self, cancelled: Cancelled | None) -> Iterator[_Session]:
        deadline = self.clock() + self.deadline_s
        if self.connect is not None:
            stream = self.connect(deadline, cancelled)
        else:
            stream = SocketStream(
                parse_address(self.address), self.times.handshake, cancelled, self.clock
            )
        rails: OneSidedRails | None = None
        try:
            link = Link(
                stream, secrets.token_bytes(32), self.secret, self.times, deadline, self.clock
            )
            if self.transport is not None and link.welcome.verbs:
                rails = self._connect_rails(link, self.transport)
            try:
                yield _Session(link, rails, self.transport, deadline, cancelled)
            except BaseException as error:
                # An error that someone keeps would keep the arena's block through its frames.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                if rails is not None:
                    rails.close()
        finally:
            stream.close()

    def _connect_rails(self, link: Link, transport: OneSided) -> OneSidedRails | None:
        try:
            rails = transport.open(self.rails)
        except RotaError as error:
            log.warning("no verbs for this promotion, TCP instead: %s", error)
            return None
        try:
            answer = link.call(m.Connect(rails.rails))
            assert isinstance(answer, m.Connected)
            rails.connect(answer.rails)
        except (StagingError, WireError):
            rails.close()
            raise
        except RotaError as error:
            rails.close()
            log.warning("no verbs with this peer, TCP instead: %s", error)
            return None
        except BaseException:
            rails.close()
            raise
        return rails

    def _open(self, session: _Session, limits: safefile.FileLimits) -> m.Manifest:
        manifest = session.link.call(m.Open(self.adapter))
        assert isinstance(manifest, m.Manifest)
        safefile.check_sizes(len(manifest.config), sum(manifest.shards), limits)
        if len(manifest.shards) > limits.shards:
            raise RejectError(
                "too many shards",
                code="bad-index",
                subject=self.adapter,
                expected=f"at most {limits.shards}",
                found=len(manifest.shards),
            )
        return manifest

    def _wants_image(self, manifest: m.Manifest, layout: SlotLayout) -> bool:
        if self.packed == "auto":
            return layout.slot_bytes <= _PACKED_UP_TO * sum(manifest.shards)
        return self.packed == "always"

    def _pack(self, session: _Session, manifest: m.Manifest, layout: SlotLayout) -> m.Packed:
        fingerprint = layout.fingerprint()
        packed = session.link.call(
            m.Pack(manifest.digest, fingerprint, layout_spec(layout), list(KNOWN))
        )
        assert isinstance(packed, m.Packed)
        check_packed(packed, manifest.digest, layout)
        return packed

    def _land(
        self,
        session: _Session,
        packed: m.Packed,
        layout: SlotLayout,
        buffer: Buffer | None,
        clock: Callable[[], float],
        times: list[float],
    ) -> StagedAdapter:
        """The packed image, read into its buffer and verified."""
        wanted = None if buffer is None else reuse_buffer(layout, buffer)
        region = packed.region if session.rails is not None else None
        target = self._target(session, packed.nbytes, region, wanted)
        ask = m.Read(packed.digest, -1, packed.fingerprint, 0, packed.nbytes)
        with ChunkVerifier(target, packed.chunks, KNOWN[packed.hash]) as verifier:
            self._fetch(session, ask, region, target, verifier.advance, 0, packed.nbytes)
            times.append(clock())
            verifier.finish()
        if wanted is not None and wanted is not target:
            wanted[:] = target
            target = wanted
        times.append(clock())
        ranks = tuple(np.frombuffer(packed.ranks, "<u2").tolist())
        scales = np.frombuffer(packed.scales, "<f4").astype(np.float32)
        scales.flags.writeable = False
        image = SlotImage(
            buffer=target,
            present=tuple(rank > 0 for rank in ranks),
            scales=scales,
            ranks=ranks,
            digest=packed.digest,
            fingerprint=packed.fingerprint,
            embed_rows=packed.embed_rows,
            head_rows=packed.head_rows,
            affine=tuple(map(bool, packed.affine)),
        )
        names = ("resolve", "pack", "transfer", "verify")
        seconds = {n: b - a for n, a, b in zip(names, times, times[1:], strict=False)}
        return _timed(StagedAdapter(image, packed.report, packed.digest), seconds)

    def _read_raw(self, session: _Session, manifest: m.Manifest) -> DigestedAdapter:
        """Every shard, verified against the manifest's digest."""
        shards: list[npt.NDArray[np.uint8]] = []
        total, before = sum(manifest.shards), 0
        with WholeVerifier(manifest.config) as verifier:
            for index, nbytes in enumerate(manifest.shards):
                region = manifest.regions[index] if index < len(manifest.regions) else None
                target = self._target(session, nbytes, region, None)
                verifier.begin(target)
                ask = m.Read(manifest.digest, index, "", 0, nbytes)
                self._fetch(session, ask, region, target, verifier.advance, before, total)
                verifier.advance(nbytes)
                shards.append(target)
                before += nbytes
            verifier.finish(manifest.digest)
        return DigestedAdapter(manifest.config, tuple(shards), manifest.digest)

    def _target(
        self,
        session: _Session,
        nbytes: int,
        region: m.Region | None,
        wanted: npt.NDArray[np.uint8] | None,
    ) -> npt.NDArray[np.uint8]:
        """Where bytes land: registered memory for one-sided reads, else what the caller gave."""
        if session.rails is not None and region is not None and session.transport is not None:
            try:
                return session.transport.allocate(nbytes)
            except CapacityError as error:
                log.warning("reading by TCP: %s", error)
        return np.empty(nbytes, np.uint8) if wanted is None else wanted

    def _fetch(
        self,
        session: _Session,
        ask: m.Read,
        region: m.Region | None,
        target: npt.NDArray[np.uint8],
        advance: Callable[[int], None],
        before: int,
        total: int,
    ) -> None:
        def landed(count: int) -> None:
            advance(count)
            if self.progress is not None:
                self.progress(before + count, total)

        transport, rails = session.transport, session.rails
        one_sided = rails is not None and transport is not None and transport.contains(target)
        if region is not None and rails is not None and one_sided:
            address = int.from_bytes(region.address, "little")
            rails.read(
                target,
                address,
                region.rkey,
                session.deadline,
                session.cancelled,
                landed,
                stall=self.times.stall,
            )
        else:
            session.link.call(ask, target.data, landed)


def _timed(staged: StagedAdapter, seconds: dict[str, float]) -> StagedAdapter:
    return dataclasses.replace(staged, report=dataclasses.replace(staged.report, seconds=seconds))
