"""An adapter on a weight peer, as a source for staging.

What it owns: nothing between promotions (a `PeerPool` may keep connections). Invariants: one
connection per promotion, and plan and bytes come from one manifest; the config is audited here as
it is from disk; bytes are believed only once their digest is right; a failure at any point touches
no slot and leaves no connection, thread or queue pair behind.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Hashable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from math import ceil
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, RotaError, StagingError, WireError
from ..gpu.lora import safefile
from ..gpu.lora.layout import SlotLayout
from ..gpu.lora.overlay import BaseRows
from ..gpu.lora.source import RawAdapter
from ..gpu.lora.stage import Held, StagedAdapter, StageLimits, stage
from . import messages as m
from .address import parse_address
from .frames2 import Times
from .landing import Buffer, Carrier, ImageLanding, Progress, Wanted, opened
from .layouts import DigestedAdapter, HeldSource
from .link import Link, SocketStream, Stream
from .onesided import Cancelled, OneSided, OneSidedRails
from .pool import PeerPool, Session
from .verify import WholeVerifier

log = logging.getLogger("rota.rdma.client")
_T = TypeVar("_T")
_PACKED_UP_TO: Final = 2.0
"""A packed image is fetched while it is at most this many times the files' size: it saves the
conversion, but carries the padding up to the pool's rank."""


_ALWAYS: Final = frozenset(("overlay-no-base", "affine-no-base", "peer-memory-full"))
_FILES_INSTEAD: Final = {
    "always": _ALWAYS,
    "auto": _ALWAYS | {"bad-layout", "fingerprint-mismatch"},
}
"""Why a peer may not pack although the adapter can be served: its files come instead."""


class _Files(NamedTuple):
    """The files' bytes, and when the adapter was open."""

    raw: RawAdapter
    resolved: float


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
        pool: keeps connections from one promotion to the next; default a new one each.
        connect: makes the connection; default TCP to ``address``, the only kind a pool keeps.
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
    progress: Progress | None = None
    pool: PeerPool | None = None
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
        return self._over(None, lambda s: self._read_raw(s, opened(s, self.adapter, limits)))

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
        want = Wanted(layout, limits, buffer, held, clock, clock())
        found = self._over(cancelled, lambda session: self._stage_over(session, want))
        if isinstance(found, StagedAdapter):
            return found
        read = clock()
        staged = stage(
            HeldSource(found.raw),
            layout,
            limits,
            base_rows,
            clock=clock,
            cancelled=cancelled,
            buffer=buffer,
        )
        seconds = {"resolve": found.resolved - want.begun, "transfer": read - found.resolved}
        return _timed(staged, seconds | dict(staged.report.seconds))

    def counters(self) -> dict[str, int | float]:
        """The peer's own numbers: counts since its start (``opens``, ``packs``, ``bytes_sent``,
        ``errors``...) and what it holds now (``region_bytes``, ``leases``, ``connections_now``...).

        Raises:
            StagingError: peer-unreachable, peer-lost, peer-timeout.
            CapacityError: peer-busy.
            WireError: the peer breaks the protocol, or the secret is wrong.
        """
        answer = self._over(None, lambda session: session.link.call(m.Status()))
        assert isinstance(answer, m.Counters)  # the link takes no other answer
        return dict(answer.values)

    def _stage_over(self, session: Session, want: Wanted) -> StagedAdapter | _Files:
        """What the peer's image gives, or the files."""
        layout, carrier = want.layout, self._carrier(session)
        with ExitStack() as stack:
            landing, least = None, 0
            if self.packed == "never":
                manifest = opened(session, self.adapter, want.limits.files)
            else:
                least = 0 if self.packed == "always" else ceil(layout.slot_bytes / _PACKED_UP_TO)
                landing = ImageLanding(
                    carrier, self.adapter, least, want, sure=self.secret is not None
                )
                manifest = stack.enter_context(closing(landing)).ask()
            known = None if want.held is None else want.held(manifest.digest)
            if known is not None and known.image.fingerprint == layout.fingerprint():
                return known
            resolved = want.clock()
            if landing is not None and sum(manifest.shards) >= least:
                try:
                    landing.pack()
                except RotaError as error:
                    if error.code not in _FILES_INSTEAD[self.packed]:
                        raise
                    log.info("no packed image of %s (%s): its files instead", self.adapter, error)
                else:
                    return landing.finish()
            return _Files(self._read_raw(session, manifest), resolved)

    def _over(self, cancelled: Cancelled | None, work: Callable[[Session], _T]) -> _T:
        """``work`` over a connection of its own, kept from before or new."""
        deadline = self.clock() + self.deadline_s
        pool, key = self.pool, (self.address, self.secret, self.transport, self.rails, self.times)
        if self.connect is not None or pool is None:
            made = self.connect or self._socket
            return self._use(self._connected(made(deadline, cancelled), deadline, cancelled), work)
        while (kept := pool.take(key, deadline, cancelled)) is not None:
            session, stream = kept
            try:
                result = self._use(session, work, keep=True)
            except StagingError as error:
                # The peer may have hung up just as it was asked: that is known of no new one.
                if error.code != "peer-lost" or session.link.heard:
                    raise
                continue
            pool.give(key, session, stream)
            return result
        stream = self._socket(deadline, cancelled)
        session = self._connected(stream, deadline, cancelled)
        result = self._use(session, work, keep=session.keepable)
        if session.keepable:
            pool.give(key, session, stream)
        return result

    def _use(self, session: Session, work: Callable[[Session], _T], *, keep: bool = False) -> _T:
        """``work``, and the session closed after it, or after its failure if it is to be kept."""
        try:
            result = work(session)
        except BaseException as error:
            # An error that someone keeps would keep the arena's block through its frames.
            traceback.clear_frames(error.__traceback__)
            session.close()
            raise
        if not keep:
            session.close()
        return result

    def _socket(self, deadline: float, cancelled: Cancelled | None) -> SocketStream:
        return SocketStream(
            parse_address(self.address),
            self.times.handshake,
            cancelled,
            self.clock,
            self.times.stall,
        )

    def _connected(self, stream: Stream, deadline: float, cancelled: Cancelled | None) -> Session:
        try:
            link = Link(
                stream,
                secrets.token_bytes(32),
                self.secret,
                self.times,
                deadline,
                self.clock,
                ahead=self.transport is None,
            )
            rails: OneSidedRails | None = None
            welcome = link.welcome
            if self.transport is not None and welcome is not None and welcome.verbs:
                rails = self._connect_rails(link, self.transport)
        except BaseException:
            stream.close()
            raise
        return Session(link, stream, rails, self.transport, deadline, cancelled)

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

    def _carrier(self, session: Session) -> Carrier:
        return Carrier(session, self.times.stall, self.progress)

    def _read_raw(self, session: Session, manifest: m.Manifest) -> DigestedAdapter:
        """Every shard, verified against the manifest's digest."""
        carrier = self._carrier(session)
        shards: list[npt.NDArray[np.uint8]] = []
        total, before = sum(manifest.shards), 0
        with closing(WholeVerifier(manifest.config)) as verifier:
            for index, nbytes in enumerate(manifest.shards):
                region = manifest.regions[index] if index < len(manifest.regions) else None
                target = carrier.target(nbytes, region, None)
                verifier.begin(target)
                ask = m.Read(manifest.digest, index, "", 0, nbytes)
                carrier.bring(ask, region, target, verifier.advance, before, total)
                verifier.advance(nbytes)
                shards.append(target)
                before += nbytes
            verifier.finish(manifest.digest)
        return DigestedAdapter(manifest.config, tuple(shards), manifest.digest)


def _timed(staged: StagedAdapter, seconds: dict[str, float]) -> StagedAdapter:
    return dataclasses.replace(staged, report=dataclasses.replace(staged.report, seconds=seconds))
