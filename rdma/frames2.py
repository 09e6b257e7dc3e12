"""Frames of the peer protocol, version 2, without I/O: what both ends share.

A frame is a 24-byte header (magic, version, kind, flags, request id, body length, payload length;
little endian), in an authenticated connection a 16-byte tag, the msgpack body, and for `Data` the
payload. Payload bytes carry no tag: they are checked against digests that did.

What it owns: buffers, tags, deadlines and the error that stays. Invariants: any bytes give events
or one `WireError`, after which the same error is raised for ever; a length over its bound is
refused before the bytes arrive; payload is never buffered.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from ..errors import WireError
from . import messages as m

MAGIC: Final = b"rota"
"""As a version-1 length this would be 1.6 GB, far over that version's limit: no confusion."""
HEADER: Final = struct.Struct("<4sBBHIIQ")
TAG_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. ``handshake``: until Welcome; ``reply``: from request to answer; ``idle``: without a
    request before the peer hangs up; ``stall``: without one byte of a payload moving."""

    handshake: float = 5.0
    reply: float = 60.0
    idle: float = 120.0
    stall: float = 10.0


@dataclass(frozen=True, slots=True)
class Received:
    """A whole message. ``payload``: bytes that follow it (`Data` only, else 0)."""

    request: int
    message: m.Message
    payload: int = 0


@dataclass(frozen=True, slots=True)
class PayloadDone:
    """The payload of a `Data` answer has landed whole."""

    request: int


Event = Received | PayloadDone


class Wire2:
    """What both ends share: frames in, frames out, tags, errors that stay."""

    _is_client: bool

    def __init__(self, times: Times, now: float) -> None:
        self.times = times
        self._in = bytearray()
        self._out: list[bytes] = []
        # They begin with the handshake, which each end finishes at another moment.
        self._key_in: bytes | None = None
        self._key_out: bytes | None = None
        self._sent = self._got = 0
        self._error: WireError | None = None
        self._ended = self._closed = False
        self._deadline: float | None = now + times.handshake
        self.welcomed = False

    # -- in

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes from the other end; empty says that it has closed.

        Raises:
            WireError: wire-closed after the end; or the error that came before.
        """
        self._check_alive()
        if self._ended or self._closed:
            raise WireError("bytes after the end of the connection", code="wire-closed")
        if not len(data):
            self._ended = True
        self._in += data

    def events(self, now: float) -> Iterator[Event]:
        """Whole messages and finished payloads, oldest first.

        Raises:
            WireError: wire-bad-magic, wire-bad-version, wire-unknown-kind, wire-bad-flags,
                wire-body-too-large, wire-payload-length, wire-bad-tag, wire-bad-body,
                wire-unexpected, wire-truncated, wire-auth-failed, wire-auth-required,
                wire-auth-missing, wire-too-many-requests.
        """
        self._check_alive()
        while not self._closed:
            if (done := self._take_payload(now)) is not None:
                yield done
            if self._payload_open():
                break
            taken = self._take_frame()
            if taken is None:
                break
            yield from self._on_message(*taken, now)
        if self._ended and (self._in or self._owes()):
            raise self._fail("wire-truncated", "the connection ended inside a frame")

    def _take_frame(self) -> tuple[int, m.Message, int] | None:
        data = self._in
        if data[:4] != MAGIC[: len(data)]:
            raise self._fail("wire-bad-magic", "not the peer protocol", MAGIC, bytes(data[:4]))
        if len(data) < HEADER.size:
            return None
        _, version, number, flags, request, body_bytes, payload = HEADER.unpack_from(data)
        if version != m.VERSION:
            raise self._fail("wire-bad-version", "another version", m.VERSION, version)
        kind = m.KINDS.get(number)
        if kind is None or kind.from_client == self._is_client:
            raise self._fail("wire-unknown-kind", "a kind this end does not take", None, number)
        if flags:
            raise self._fail("wire-bad-flags", "unknown flags", 0, flags)
        if body_bytes > kind.max_body:
            raise self._fail("wire-body-too-large", "too long a body", kind.max_body, body_bytes)
        self._check_payload(kind.struct, request, payload)
        key = self._key_in
        tag_bytes = 0 if key is None else TAG_BYTES
        start = HEADER.size + tag_bytes
        if len(data) < start + body_bytes:
            return None
        header, body = bytes(data[: HEADER.size]), bytes(data[start : start + body_bytes])
        if key is not None:
            tag = bytes(data[HEADER.size : start])
            wanted = _tag(key, not self._is_client, self._got, header + body)
            if not hmac.compare_digest(tag, wanted):
                raise self._fail("wire-bad-tag", "a frame was changed on the way, or replayed")
            self._got += 1
        del data[: start + body_bytes]
        try:
            return request, m.DECODERS[number].decode(body), payload
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._fail(
                "wire-bad-body",
                "a body that does not decode",
                kind.struct.__name__,
                str(error)[:200],
            ) from None

    # -- out

    def data_to_send(self) -> bytes:
        """Everything queued, once."""
        out, self._out = self._out, []
        return b"".join(out)

    def close(self) -> None:
        """Take nothing more; what is queued may still be sent."""
        self._closed = True
        self._deadline = None
        self._in.clear()

    def _queue(self, request: int, message: m.Message, payload: int = 0) -> None:
        self._frame(request, *self._body(message), payload)

    def _body(self, message: m.Message) -> tuple[int, bytes]:
        """Its kind and bytes."""
        self._check_alive()
        if self._closed:
            raise WireError("the connection is closed", code="wire-closed")
        number, body = m.NUMBERS[type(message)], m.encode(message)
        if len(body) > m.KINDS[number].max_body:
            raise WireError(
                "the message is too large to send",
                code="wire-body-too-large",
                expected=m.KINDS[number].max_body,
                found=len(body),
            )
        return number, body

    def _frame(self, request: int, number: int, body: bytes, payload: int = 0) -> None:
        header = HEADER.pack(MAGIC, m.VERSION, number, 0, request, len(body), payload)
        tag = b""
        if self._key_out is not None:
            tag = _tag(self._key_out, self._is_client, self._sent, header + body)
            self._sent += 1
        self._out.append(header + tag + body)

    @property
    def ended(self) -> bool:
        """The other end has closed."""
        return self._ended

    @property
    def buffered(self) -> int:
        """Bytes received and not yet understood."""
        return len(self._in)

    # -- time and errors

    def timeout_at(self) -> float | None:
        """When `handle_timeout` must be called, or ``None``."""
        return self._deadline

    def handle_timeout(self, now: float) -> None:
        """Raises WireError wire-timeout once the deadline is past; does nothing before."""
        self._check_alive()
        if self._deadline is not None and now >= self._deadline:
            raise self._fail("wire-timeout", "the other end took too long")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(
        self, code: str, why: str, expected: object = None, found: object = None
    ) -> WireError:
        self._error = WireError(why, code=code, expected=expected, found=found)
        self._deadline = None
        self._in.clear()
        return self._error

    # -- what the ends do differently

    def _payload_open(self) -> bool:
        return False

    def _owes(self) -> bool:
        """The other end may not hang up now."""
        return False

    def _take_payload(self, now: float) -> PayloadDone | None:
        return None

    def _check_payload(self, struct_: type[m.Message], request: int, payload: int) -> None:
        if payload:
            raise self._fail("wire-payload-length", "no payload is due", 0, payload)

    def _on_message(
        self, request: int, message: m.Message, payload: int, now: float
    ) -> Iterator[Event]:
        raise NotImplementedError  # each end has its own


def _tag(key: bytes, from_client: bool, sequence: int, text: bytes) -> bytes:
    way = b"c" if from_client else b"s"
    made = hmac.new(key, way + sequence.to_bytes(8, "little") + text, hashlib.sha256)
    return made.digest()[:TAG_BYTES]
