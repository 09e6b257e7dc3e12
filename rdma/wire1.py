"""The peer protocol, version 1, without I/O: both ends of an exchange set up for RDMA reads.

Little endian, no magic, no authentication, no checksum; understood so that peers and clients of
that kind can be used, and never the default. The exchange: id, manifest (JSON), mode, rails, the
server's queue pairs and regions, the client's queue pairs, status; then one-sided reads.

What it owns: the order of the exchange and every bound in it. Invariants: any bytes give events or
one `WireError`, raised again ever after; no length is believed before it is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import WireError
from .manifest1 import Manifest1, parse_manifest

MAX_ID_BYTES: Final = 8192
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_RAILS: Final = 8
MAX_REGIONS: Final = 4096
MODE_VERBS: Final = 1
_U32 = struct.Struct("<I")
_QP = struct.Struct("<II16s")
_REGION = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class QueuePair1:
    """One end of one rail: ``gid`` is 16 bytes."""

    qpn: int
    psn: int
    gid: bytes


@dataclass(frozen=True, slots=True)
class ServerRail1:
    """A server's rail: its queue pair and, per shard, (address, rkey)."""

    pair: QueuePair1
    regions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """Server event: a client asks for this id; answer with `Wire1Server.send_manifest`."""

    model_id: str


@dataclass(frozen=True, slots=True)
class RailsWanted:
    """Server event: make this many queue pairs; answer with `Wire1Server.send_rails`."""

    count: int


@dataclass(frozen=True, slots=True)
class ClientRails:
    """Server event: the client's queue pairs; connect and `Wire1Server.send_status`."""

    pairs: tuple[QueuePair1, ...]


@dataclass(frozen=True, slots=True)
class GotManifest:
    """Client event: the manifest, checked in itself; go on with `Wire1Client.choose_rails`."""

    manifest: Manifest1


@dataclass(frozen=True, slots=True)
class ServerRails:
    """Client event: the server's rails; go on with `Wire1Client.send_rails`."""

    rails: tuple[ServerRail1, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Client event: both ends are connected; READs may begin."""


Event = Asked | RailsWanted | ClientRails | GotManifest | ServerRails | Ready


class _Wire1:
    """What both ends share: a buffer, a step, an error that stays."""

    def __init__(self) -> None:
        self._in = bytearray()
        self._out: list[bytes] = []
        self._error: WireError | None = None
        self._ended = self._closed = False
        self._step = "begin"

    def receive_data(self, data: bytes | bytearray) -> None:
        """Bytes from the other end; empty says that it has closed.

        Raises:
            WireError: wire1-closed after the end; or the error that came before.
        """
        if self._error is not None:
            raise self._error
        if self._ended or self._closed:
            raise WireError("bytes after the end of the connection", code="wire1-closed")
        if not data:
            self._ended = True
        self._in += data

    def events(self) -> Iterator[Event]:
        """What has arrived whole.

        Raises:
            WireError: wire1-bad-length, wire1-bad-id, wire1-bad-mode, wire1-bad-rails,
                wire1-bad-manifest, wire1-refused, wire1-unexpected, wire1-truncated.
        """
        if self._error is not None:
            raise self._error
        try:
            while not self._closed and (event := self._next()) is not None:
                yield event
            if self._in and self._waiting():
                raise WireError("bytes out of turn", code="wire1-unexpected", found=self._step)
            if self._ended and (self._in or not self._may_end()):
                raise WireError("the connection ended too early", code="wire1-truncated")
        except WireError as error:
            self._error = error
            self._in.clear()
            raise

    def data_to_send(self) -> bytes:
        """Everything queued, once."""
        out, self._out = self._out, []
        return b"".join(out)

    def close(self) -> None:
        """Take nothing more; what is queued may still be sent."""
        self._closed = True
        self._in.clear()

    @property
    def buffered(self) -> int:
        """Bytes received and not yet understood."""
        return len(self._in)

    def _next(self) -> Event | None:
        raise NotImplementedError  # each end has its own

    def _waiting(self) -> bool:
        """This end has to speak next: bytes now are out of turn."""
        raise NotImplementedError  # each end has its own

    def _may_end(self) -> bool:
        return self._step == "done"

    def _turn(self, step: str, then: str, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        if self._step != step:
            raise WireError("called out of turn", code="wire1-unexpected", found=self._step)
        self._step = then
        self._out.append(data)

    def _take(self, count: int) -> bytes:
        data = bytes(self._in[:count])
        del self._in[:count]
        return data

    def _counted(self, low: int, high: int) -> bytes | None:
        """A u32 length in bounds and that many bytes, or ``None`` when they are not there yet."""
        if len(self._in) < 4:
            return None
        (count,) = _U32.unpack_from(self._in)
        if not low <= count <= high:
            raise WireError(
                "a length out of bounds",
                code="wire1-bad-length",
                expected=f"{low}..{high}",
                found=count,
            )
        return self._take(4 + count)[4:] if len(self._in) >= 4 + count else None


def _pack_pairs(pairs: Sequence[QueuePair1]) -> bytes:
    return b"".join(_QP.pack(p.qpn, p.psn, p.gid) for p in pairs)


class Wire1Client(_Wire1):
    """The client's end: asks for ``model_id`` (1..8192 UTF-8 bytes)."""

    def __init__(self, model_id: str, *, max_manifest: int = 16 << 20) -> None:
        super().__init__()
        raw = model_id.encode()
        if not 1 <= len(raw) <= MAX_ID_BYTES:
            raise WireError("an id of 1..8192 bytes", code="wire1-bad-id", found=len(raw))
        self._max_manifest = min(max_manifest, MAX_MANIFEST_BYTES)
        self._rails = self._shards = 0
        self._turn("begin", "manifest", _U32.pack(len(raw)) + raw)

    def choose_rails(self, count: int) -> None:
        """Ask for verbs with ``count`` rails (1..8)."""
        if not 1 <= count <= MAX_RAILS:
            raise WireError("1..8 rails", code="wire1-bad-rails", found=count)
        self._rails = count
        self._turn("mode", "server-rails", bytes((MODE_VERBS, count)))

    def send_rails(self, pairs: Sequence[QueuePair1]) -> None:
        """This end's queue pairs, one a rail."""
        if len(pairs) != self._rails:
            raise WireError("one queue pair a rail", code="wire1-bad-rails", found=len(pairs))
        self._turn("own-rails", "status", bytes((len(pairs),)) + _pack_pairs(pairs))

    def _waiting(self) -> bool:
        return self._step in ("mode", "own-rails", "done")

    def _next(self) -> Event | None:
        if self._step == "manifest":
            raw = self._counted(0, self._max_manifest)
            if raw is None:
                return None
            manifest = parse_manifest(raw)
            self._shards, self._step = len(manifest.shard_lens), "mode"
            return GotManifest(manifest)
        if self._step == "server-rails":
            rails = self._server_rails()
            if rails is not None:
                self._step = "own-rails"
                return ServerRails(rails)
        if self._step == "status" and self._in:
            status = self._take(1)[0]
            if status:
                raise WireError("the server refused", code="wire1-refused", found=status)
            self._step = "done"
            return Ready()
        return None

    def _server_rails(self) -> tuple[ServerRail1, ...] | None:
        data = self._in
        if not data:
            return None
        if data[0] != self._rails:
            raise WireError(
                "another number of rails",
                code="wire1-bad-rails",
                expected=self._rails,
                found=data[0],
            )
        place, rails = 1, []
        for _ in range(self._rails):
            if len(data) < place + _QP.size + 4:
                return None
            pair = QueuePair1(*_QP.unpack_from(data, place))
            (count,) = _U32.unpack_from(data, place + _QP.size)
            # Checked against the manifest before anything of ours is sent.
            if not 1 <= count <= MAX_REGIONS or count != self._shards:
                raise WireError(
                    "not one region a shard",
                    code="wire1-bad-rails",
                    expected=self._shards,
                    found=count,
                )
            place += _QP.size + 4
            if len(data) < place + count * _REGION.size:
                return None
            regions = tuple(
                _REGION.unpack_from(data, place + i * _REGION.size) for i in range(count)
            )
            rails.append(ServerRail1(pair, regions))
            place += count * _REGION.size
        self._take(place)
        return tuple(rails)


class Wire1Server(_Wire1):
    """The server's end."""

    def __init__(self) -> None:
        super().__init__()
        self._rails = 0
        self._step = "id"

    def send_manifest(self, manifest: Manifest1) -> None:
        """Answer `Asked`."""
        raw = manifest.to_json()
        if len(raw) > MAX_MANIFEST_BYTES:
            raise WireError("the manifest is too large", code="wire1-bad-length", found=len(raw))
        self._turn("manifest", "mode", _U32.pack(len(raw)) + raw)

    def send_rails(self, rails: Sequence[ServerRail1]) -> None:
        """Answer `RailsWanted`: as many rails, each with one region a shard."""
        if len(rails) != self._rails:
            raise WireError("as many rails as asked", code="wire1-bad-rails", found=len(rails))
        parts = [bytes((len(rails),))]
        for rail in rails:
            parts.append(_pack_pairs([rail.pair]) + _U32.pack(len(rail.regions)))
            parts += [_REGION.pack(*region) for region in rail.regions]
        self._turn("own-rails", "client-rails", b"".join(parts))

    def send_status(self, ok: bool) -> None:
        """Answer `ClientRails`."""
        self._turn("status", "done", bytes((0 if ok else 1,)))

    def _waiting(self) -> bool:
        return self._step in ("manifest", "own-rails", "status", "done")

    def _next(self) -> Event | None:
        if self._step == "id":
            raw = self._counted(1, MAX_ID_BYTES)
            if raw is None:
                return None
            try:
                model_id = raw.decode("utf-8")
            except UnicodeDecodeError:
                raise WireError("the id is not UTF-8", code="wire1-bad-id") from None
            self._step = "manifest"
            return Asked(model_id)
        if self._step == "mode" and self._in:
            if self._in[0] != MODE_VERBS:
                raise WireError(
                    "only verbs are served in version 1",
                    code="wire1-bad-mode",
                    expected=MODE_VERBS,
                    found=self._in[0],
                )
            if len(self._in) < 2:
                return None
            self._rails = self._take(2)[1]
            if not 1 <= self._rails <= MAX_RAILS:
                raise WireError("1..8 rails", code="wire1-bad-rails", found=self._rails)
            self._step = "own-rails"
            return RailsWanted(self._rails)
        if self._step == "client-rails" and self._in:
            if self._in[0] != self._rails:
                raise WireError(
                    "another number of rails",
                    code="wire1-bad-rails",
                    expected=self._rails,
                    found=self._in[0],
                )
            if len(self._in) < 1 + self._rails * _QP.size:
                return None
            raw = self._take(1 + self._rails * _QP.size)
            self._step = "status"
            return ClientRails(tuple(QueuePair1(*part) for part in _QP.iter_unpack(raw[1:])))
        return None
