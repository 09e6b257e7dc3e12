"""The peer protocol, version 2, without I/O: the rules of the client's and of the peer's end.

The handshake is Hello, Challenge, Prove, Welcome: each end proves the shared secret by HMAC-SHA256
over both nonces, and from then on every header and body carries a tag under a key made of both.
Then the client asks and the peer answers, each question by its id; `ANSWERS` says with what. A
client may ask at once: without a secret it says its whole part of the handshake beforehand, with
one its questions go with its proof, as soon as there is a Challenge.

What it owns: whose turn it is. Invariants: no request before what the handshake has to say first,
and no answer before Welcome; no answer without a request; a payload is exactly as long as was
asked; nothing waits without a deadline.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

from ..errors import WireError
from . import messages as m
from .frames2 import Event, PayloadDone, Received, Times, Wire2

__all__ = ["PayloadDone", "Received", "Times", "Wire2Client", "Wire2Server", "prove"]


def prove(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """HMAC-SHA256 that ``role`` (``b"client"`` or ``b"server"``) shows, or the key (``b"key"``)."""
    text = b"rota-peer-2 " + role + b" " + client_nonce + server_nonce
    return hmac.new(secret, text, hashlib.sha256).digest()


class Wire2Client(Wire2):
    """The client's end.

    Args:
        nonce: 32 random bytes.
        secret: shared with the peer, or ``None``.
        name: for the peer's log.
        times: time-outs.
        now: the clock's reading.
    """

    _is_client = True

    def __init__(
        self, nonce: bytes, secret: bytes | None, name: str, times: Times, now: float
    ) -> None:
        super().__init__(times, now)
        self._nonce, self._secret = nonce, secret
        self._server_nonce: bytes | None = None
        self._proved = False
        self._held: list[tuple[int, int, bytes]] = []
        self._asked: dict[int, type[m.Message]] = {}
        self._sinks: dict[int, memoryview] = {}
        self._landing: tuple[int, memoryview] | None = None
        self.landed_bytes = 0
        """Of the payload that is landing, or landed last."""
        self._next = 1
        self._queue(0, m.Hello(nonce, name[:64]))

    def request(self, message: m.Message, now: float, sink: memoryview | None = None) -> int:
        """Queue a request; its id. ``sink``: where the payload of a `Read` goes (its exact size),
        or that of a `Fetch`, should one come (its largest size).

        Raises:
            WireError: wire-closed; or the error that came before.
        """
        self._check_alive()
        if isinstance(message, m.Read) and (sink is None or len(sink) != message.nbytes):
            raise WireError("the sink is not as long as the read", code="wire-payload-length")
        if self._secret is None:
            self._prove(b"")
        request, self._next = self._next, self._next % 0xFFFFFFFF + 1
        number, body = self._body(message)
        if self._proved:
            self._frame(request, number, body)
        else:
            self._held.append((request, number, body))
        self._asked[request] = type(message)
        if sink is not None:
            self._sinks[request] = sink
        if self.welcomed:  # until then the handshake's time runs
            self._deadline = now + self.times.reply
        return request

    def landing(self) -> memoryview | None:
        """Where payload bytes may be received directly, or ``None``; then say `landed`."""
        return None if self._in or self._landing is None else self._landing[1]

    def landed(self, count: int, now: float) -> PayloadDone | None:
        """``count`` bytes were received into `landing`."""
        assert self._landing is not None
        request, rest = self._landing
        rest = rest[count:]
        self.landed_bytes += count
        self._deadline = now + self.times.stall
        if len(rest):
            self._landing = (request, rest)
            return None
        self._landing = None
        self._deadline = now + self.times.reply if self._asked else None
        return PayloadDone(request)

    def _payload_open(self) -> bool:
        return self._landing is not None

    def _owes(self) -> bool:
        return bool(self._landing is not None or self._asked or not self.welcomed)

    def _take_payload(self, now: float) -> PayloadDone | None:
        if self._landing is None or not self._in:
            return None
        rest = self._landing[1]
        count = min(len(rest), len(self._in))
        rest[:count] = self._in[:count]
        del self._in[:count]
        return self.landed(count, now)

    def _check_payload(self, struct_: type[m.Message], request: int, payload: int) -> None:
        sink = self._sinks.get(request) if struct_ in (m.Data, m.Fetched) else None
        wanted = 0 if sink is None else len(sink)
        if payload != wanted and (payload > wanted or struct_ is not m.Fetched):
            raise self._fail("wire-payload-length", "not the payload asked for", wanted, payload)

    def _on_message(
        self, request: int, message: m.Message, payload: int, now: float
    ) -> Iterator[Event]:
        answered = self.welcomed and request in self._asked
        if isinstance(message, m.Refused) and (request == 0 or answered):
            self._asked.pop(request, None)
            self._sinks.pop(request, None)
            self._deadline = now + self.times.reply if self._asked else None
            yield Received(request, message)
        elif not self.welcomed:
            self._handshake(request, message)
            if self.welcomed:
                self._deadline = now + self.times.reply if self._asked else None
                yield Received(request, message)
        elif request in self._asked and type(message) is m.ANSWERS[self._asked[request]]:
            if isinstance(message, m.Fetched) and payload:
                image = 0 if message.packed is None else message.packed.nbytes
                if payload != image:
                    raise self._fail("wire-payload-length", "not the image told of", image, payload)
            del self._asked[request]
            sink = self._sinks.pop(request, None)
            self._deadline = now + self.times.reply if self._asked else None
            yield Received(request, message, payload)
            if sink is not None:
                self.landed_bytes = 0
                if payload:
                    self._landing = (request, sink[:payload])
                    self._deadline = now + self.times.stall
                else:
                    yield PayloadDone(request)
        else:
            raise self._fail(
                "wire-unexpected",
                "not an answer to any request",
                None,
                f"{type(message).__name__} {request}",
            )

    def _handshake(self, request: int, message: m.Message) -> None:
        if request == 0 and isinstance(message, m.Challenge) and self._server_nonce is None:
            if message.auth and self._secret is None:
                raise self._fail("wire-auth-required", "the peer asks for a secret")
            if not message.auth and self._secret is not None:
                raise self._fail("wire-auth-missing", "the peer does not prove the secret")
            self._server_nonce = message.nonce
            mac = b""
            if self._secret is not None:
                mac = prove(self._secret, b"client", self._nonce, message.nonce)
            self._prove(mac)
        elif request == 0 and isinstance(message, m.Welcome) and self._server_nonce is not None:
            if self._secret is not None:
                wanted = prove(self._secret, b"server", self._nonce, self._server_nonce)
                if not hmac.compare_digest(message.mac, wanted):
                    raise self._fail("wire-auth-failed", "the peer does not know the secret")
                self._key_in = self._key_out
            self.welcomed = True
        else:
            raise self._fail(
                "wire-unexpected", "not a step of the handshake", None, type(message).__name__
            )

    def _prove(self, mac: bytes) -> None:
        """Once."""
        if not self._proved:
            self._proved = True
            self._queue(0, m.Prove(mac))
            if self._secret is not None and self._server_nonce is not None:
                self._key_out = prove(self._secret, b"key", self._nonce, self._server_nonce)
            for held in self._held:
                self._frame(*held)
            self._held.clear()


class Wire2Server(Wire2):
    """The peer's end.

    Args:
        nonce: 32 random bytes.
        secret: what clients must prove, or ``None`` to serve anyone.
        times: time-outs.
        now: the clock's reading.
        verbs: one-sided reads are offered.
        read_bytes: largest single `Read`.
        max_requests: requests a client may have open at once.
    """

    _is_client = False

    def __init__(
        self,
        nonce: bytes,
        secret: bytes | None,
        times: Times,
        now: float,
        *,
        verbs: bool = False,
        read_bytes: int = 1 << 40,
        max_requests: int = 16,
    ) -> None:
        super().__init__(times, now)
        self._nonce, self._secret = nonce, secret
        self._verbs, self._read_bytes, self._max = verbs, read_bytes, max_requests
        self._client_nonce: bytes | None = None
        self._open: dict[int, type[m.Message]] = {}
        self._owed = 0
        self.client_name = ""

    def reply(self, request: int, message: m.Message, now: float, payload: int = 0) -> None:
        """Queue the answer to an open request. ``payload`` bytes must then be sent, said with
        `payload_sent`, before any other answer."""
        asked = self._open.pop(request, None)
        refusal = isinstance(message, m.Refused)
        if self._owed or (not refusal and (asked is None or type(message) is not m.ANSWERS[asked])):
            raise WireError("an answer out of turn", code="wire-unexpected", found=request)
        self._owed = payload
        self._queue(request, message, payload)
        self._deadline = None if self._open or payload else now + self.times.idle

    def payload_sent(self, count: int, now: float) -> None:
        """``count`` more bytes of the owed payload were sent."""
        assert 0 <= count <= self._owed
        self._owed -= count
        if not self._owed and not self._open:
            self._deadline = now + self.times.idle

    def _on_message(
        self, request: int, message: m.Message, payload: int, now: float
    ) -> Iterator[Event]:
        if not self.welcomed:
            self._handshake(request, message, now)
        elif type(message) not in m.ANSWERS or request == 0 or request in self._open:
            raise self._fail(
                "wire-unexpected", "not a request", None, f"{type(message).__name__} {request}"
            )
        elif len(self._open) >= self._max:
            raise self._fail("wire-too-many-requests", "too many at once", self._max)
        else:
            self._open[request] = type(message)
            self._deadline = None
            yield Received(request, message)

    def _handshake(self, request: int, message: m.Message, now: float) -> None:
        if request == 0 and isinstance(message, m.Hello) and self._client_nonce is None:
            self._client_nonce, self.client_name = message.nonce, message.name
            self._queue(0, m.Challenge(self._nonce, self._secret is not None))
        elif request == 0 and isinstance(message, m.Prove) and self._client_nonce is not None:
            mac = key = b""
            if self._secret is not None:
                wanted = prove(self._secret, b"client", self._client_nonce, self._nonce)
                if not hmac.compare_digest(message.mac, wanted):
                    raise self._fail("wire-auth-failed", "the client does not know the secret")
                mac = prove(self._secret, b"server", self._client_nonce, self._nonce)
                key = prove(self._secret, b"key", self._client_nonce, self._nonce)
            self._queue(0, m.Welcome(mac, self._verbs, self._read_bytes))
            self._key_in = self._key_out = key or None
            self.welcomed = True
            self._deadline = now + self.times.idle
        else:
            raise self._fail(
                "wire-unexpected", "not a step of the handshake", None, type(message).__name__
            )
