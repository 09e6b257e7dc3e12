"""Frames over a byte stream, without I/O.

A frame is a little-endian u32 length and that many bytes of payload. Owns both directions' buffers.
Invariants: the receive buffer never holds more than one frame of the largest size and what one
``receive_data`` brought; a length over the limit is refused before its payload arrives; after an
error nothing more is taken or given.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ...errors import WireError

_HEADER = struct.Struct("<I")


class Framing:
    """Four verbs: :meth:`receive_data`, :meth:`events`, :meth:`data_to_send`, :meth:`close`, and
    :meth:`send` to fill what goes out.

    Args:
        max_receive: bytes of payload accepted in one frame; may be raised later.
        max_send: bytes of payload sent in one frame.
    """

    def __init__(self, max_receive: int, max_send: int) -> None:
        self.max_receive = max_receive
        self.max_send = max_send
        self._in = bytearray()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._error: WireError | None = None
        self._closed = False
        self.ended = False

    @property
    def buffered(self) -> int:
        """Bytes received and not yet given out as a frame."""
        return len(self._in)

    @property
    def pending(self) -> int:
        """Bytes waiting to be sent."""
        return self._out_bytes

    def receive_data(self, data: bytes) -> None:
        """Bytes from the other end; ``b""`` says that it has closed.

        Raises:
            WireError: ``wire-closed`` after the end, or the error that came before.
        """
        if self._error is not None:
            raise self._error
        if self.ended or self._closed:
            raise WireError("bytes after the end of the connection", code="wire-closed")
        if not data:
            self.ended = True
        self._in += data

    def events(self) -> Iterator[bytes]:
        """The payloads that are complete, oldest first.

        Raises:
            WireError: ``frame-too-large``, ``frame-empty``; ``frame-truncated`` when the other end
                closed inside a frame.
        """
        start, data = 0, self._in
        try:
            while len(data) - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(data, start)
                self._check(size)
                end = start + _HEADER.size + size
                if len(data) < end:
                    break
                payload = bytes(data[start + _HEADER.size : end])
                start = end
                yield payload
        finally:
            del data[:start]
        if self.ended and data:
            raise self._fail(
                WireError(
                    "the connection ended inside a frame",
                    code="frame-truncated",
                    found=f"{len(data)} bytes of it",
                )
            )

    def _check(self, size: int) -> None:
        if size == 0:
            raise self._fail(WireError("a frame without payload", code="frame-empty"))
        if size > self.max_receive:
            raise self._fail(
                WireError(
                    "a frame is too large",
                    code="frame-too-large",
                    expected=f"at most {self.max_receive} bytes",
                    found=size,
                )
            )

    def _fail(self, error: WireError) -> WireError:
        self._error = error
        return error

    def send(self, payload: bytes) -> None:
        """Queue one frame. After :meth:`close` nothing is queued.

        Raises:
            WireError: ``frame-too-large``.
        """
        if len(payload) > self.max_send:
            raise WireError(
                "the message is too large to send",
                code="frame-too-large",
                expected=f"at most {self.max_send} bytes",
                found=len(payload),
            )
        if self._closed:
            return
        self._out.append(_HEADER.pack(len(payload)))
        self._out.append(payload)
        self._out_bytes += _HEADER.size + len(payload)

    def data_to_send(self) -> bytes:
        """Everything queued, once."""
        out, self._out, self._out_bytes = self._out, [], 0
        return b"".join(out)

    def close(self) -> None:
        """Take nothing more; what is queued may still be sent."""
        self._closed = True
        self._in.clear()
