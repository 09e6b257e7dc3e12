"""The protocol of one connection, without I/O: handshake, then typed messages.

Owns the handshake state of one end. Invariants: no message but the handshake's own is given out or
accepted before it is done; bytes that are no message raise a named WireError, and then the session
is over.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from ...errors import RotaError, WireError
from ..failures import to_error, to_failure
from . import wire
from .framing import Framing
from .limits import IpcLimits

_In = TypeVar("_In")
_encode = msgspec.msgpack.Encoder().encode


def same_secret(given: str | None, wanted: str) -> bool:
    """Whether two secrets are equal, in time that tells nothing about either."""
    one = hashlib.sha256((given or "").encode("utf-8", "surrogatepass")).digest()
    two = hashlib.sha256(wanted.encode("utf-8", "surrogatepass")).digest()
    return hmac.compare_digest(one, two) and given is not None


class _Session(Generic[_In]):
    """What both ends do alike. Verbs: ``receive_data``, ``events``, ``data_to_send``, ``close``,
    and ``send``."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_In], receive: int, send: int) -> None:
        self._decoder = decoder
        self.frames = Framing(receive, send)
        self.ready = False

    def receive_data(self, data: bytes) -> None:
        """Bytes from the other end, ``b""`` at its end. Raises WireError."""
        self.frames.receive_data(data)

    def events(self) -> Iterator[_In]:
        """The messages that are complete, oldest first.

        Raises:
            WireError: ``wire-malformed`` for bytes that are no message, and what framing and
                handshake raise.
        """
        for payload in self.frames.events():
            if not self.ready:
                message = self._first(payload)
            else:
                message = _decode(self._decoder, payload)
                if isinstance(message, (wire.Hello, wire.Welcome)):
                    raise WireError("a second handshake", code="wire-order")
            yield message

    def _first(self, payload: bytes) -> _In:
        raise NotImplementedError  # each end has its own

    def send(self, message: Any) -> None:
        """Queue a message. Raises WireError ``frame-too-large``."""
        self.frames.send(_encode(message))

    def data_to_send(self) -> bytes:
        return self.frames.data_to_send()

    def close(self) -> None:
        self.frames.close()


def _decode(decoder: msgspec.msgpack.Decoder[_In], payload: bytes) -> _In:
    # RecursionError: nesting as deep as the frame is long. RotaError: values a struct refuses,
    # which the other end could not have built.
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RotaError) as error:
        raise WireError(
            "the bytes are no message of this protocol", code="wire-malformed", found=str(error)
        ) from error


class ServerSession(_Session[Any]):
    """The engine's end. After Hello is given out by ``events``, send a Welcome."""

    def __init__(self, schema: str, limits: IpcLimits, token: str | None) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(wire.ToServer)
        super().__init__(decoder, limits.max_hello, limits.max_reply)
        self._schema = schema
        self._limits = limits
        self._token = token

    def _first(self, payload: bytes) -> Any:
        try:
            hello = self._check(_decode(msgspec.msgpack.Decoder(wire.Hello), payload))
        except WireError as error:
            self.send(wire.Refused(to_failure(error)))
            self.frames.close()
            raise
        self.ready = True
        self.frames.max_receive = self._limits.max_frame
        return hello

    def _check(self, hello: wire.Hello) -> wire.Hello:
        if hello.magic != wire.MAGIC:
            raise WireError("not a rota client", code="wire-magic", expected=wire.MAGIC)
        # The secret comes first: a stranger learns nothing about this build.
        if self._token is not None and not same_secret(hello.token, self._token):
            raise WireError("the token is not the server's", code="unauthorized")
        if hello.version != wire.VERSION:
            raise WireError(
                "another version of the protocol",
                code="version-mismatch",
                expected=wire.VERSION,
                found=hello.version,
            )
        if hello.schema != self._schema:
            raise WireError(
                "another build of rota: the messages differ",
                code="schema-mismatch",
                expected=self._schema[:16],
                found=hello.schema[:16],
            )
        return hello


class ClientSession(_Session[Any]):
    """The frontend's end. Its Hello is queued at once; ``events`` gives Welcome first."""

    def __init__(self, schema: str, limits: IpcLimits, token: str | None) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(wire.ToClient)
        super().__init__(decoder, limits.max_reply, limits.max_frame)
        self.send(wire.Hello(wire.MAGIC, wire.VERSION, schema, token))

    def _first(self, payload: bytes) -> Any:
        message = _decode(msgspec.msgpack.Decoder(wire.Welcome | wire.Refused), payload)
        if isinstance(message, wire.Refused):
            raise to_error(message.failure)
        self.ready = True
        return message
