"""The trace file: every event the core saw, with its time and a digest of what it decided.

One JSON value a line. First a header (format, version, config); then ``[time, event, digest,
effects]``; ``effects`` only when asked for. Token ids are in it: treat it like the requests. A
recorder stops at its byte limit with a last line whose event is null; what is before it is good.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...errors import RequestError
from ..core import CoreConfig
from ..core import effects as fx
from ..core import events as ev

_log = logging.getLogger("rota.sched.replay")

FORMAT = "rota-trace"
VERSION = 1


class Header(msgspec.Struct, frozen=True):
    format: str
    version: int
    config: CoreConfig


class Line(msgspec.Struct, frozen=True, array_like=True):
    """``event`` ``None``: the recorder reached its limit here. ``effects`` ``None``: not kept."""

    now: float
    event: ev.Event | None
    digest: int
    effects: tuple[fx.Effect, ...] | None = None


_encoder = msgspec.json.Encoder()


def digest_of(effects: Sequence[fx.Effect]) -> int:
    """CRC-32 of the effects as JSON: equal decisions have equal digests."""
    return zlib.crc32(_encoder.encode(effects))


class Recorder:
    """A shell observer. ``max_bytes`` bounds the file; ``keep_effects`` makes differences readable
    (about four times the size). Close it, or use it as a context manager."""

    def __init__(
        self,
        path: str | Path,
        config: CoreConfig,
        *,
        max_bytes: int = 256 << 20,
        keep_effects: bool = False,
    ) -> None:
        self._file: BinaryIO | None = open(path, "wb")
        self._left = max_bytes
        self._keep = keep_effects
        self.events = 0
        self._write(_encoder.encode(Header(FORMAT, VERSION, config)))

    def __call__(self, event: ev.Event, effects: list[fx.Effect], now: float) -> None:
        if self._file is None:
            return
        kept = tuple(effects) if self._keep else None
        data = _encoder.encode(Line(now, event, digest_of(effects), kept))
        last = len(data) + 64 > self._left
        if last:
            data = _encoder.encode(Line(now, None, 0))
        try:
            self._write(data)
            if last:
                self.close()
        except OSError as error:
            self._stop(error)
            return
        self.events += not last

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data + b"\n")
        self._left -= len(data) + 1

    def _stop(self, error: OSError) -> None:
        """A full disk ends the recording, never the engine."""
        _log.error("recording stops: %s", error)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Flush and close; harmless twice. What can't be written is logged, not raised."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._stop(error)
                return
            self._file.close()
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: str | Path) -> tuple[Header, Iterator[tuple[int, Line]]]:
    """The header and the numbered lines (from 2, as editors count). Raises RequestError
    ``bad-trace`` for anything else, with the line at fault."""
    lines = Path(path).open("rb")
    try:
        header = _decode(lines.readline(), Header, 1)
        if header.format != FORMAT or header.version != VERSION:
            raise RequestError(
                "not a trace this version reads",
                code="bad-trace",
                expected=f"{FORMAT} {VERSION}",
                found=f"{header.format} {header.version}",
            )
    except BaseException:
        lines.close()
        raise

    def rest() -> Iterator[tuple[int, Line]]:
        decoder = msgspec.json.Decoder(Line)
        with lines:
            for number, data in enumerate(lines, 2):
                try:
                    line = decoder.decode(data)
                except msgspec.MsgspecError as error:
                    raise _bad(number, error) from error
                if line.event is None:
                    return
                yield number, line

    return header, rest()


def _decode(data: bytes, kind: type[Header], number: int) -> Header:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise _bad(number, error) from error


def _bad(number: int, error: Exception) -> RequestError:
    return RequestError(f"not a trace line: {error}", code="bad-trace", subject=f"line {number}")
