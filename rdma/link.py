"""The client's connection to a peer: blocking, on a worker thread, with deadlines and a way out.

What it owns: one socket and its protocol. Invariants: no call outlives its deadline by more than a
poll slice; a cancelled call ends within a slice; payload bytes go from the socket straight to
where they belong.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Final, Protocol

from ..errors import StagingError, WireError
from . import messages as m
from .desk import raised
from .frames2 import PayloadDone, Received, Times
from .wire2 import Wire2Client

SLICE_S: Final = 0.05
"""How often a blocked call asks whether it is cancelled."""
_RECV_BYTES: Final = 64 << 10
_HEAD_BYTES: Final = 8 << 10
"""Received at a time before a payload: what comes of that too is copied once more."""
_INTO_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 4 << 20
_SMALL_INTO_BYTES: Final = 256 << 10
"""Of a payload of `_SMALL_BYTES` at most, so that much of it is still being sent meanwhile."""
_AHEAD_BYTES: Final = 4 << 20
"""What may arrive while the last piece is checked."""
_LATER: Final = getattr(socket, "MSG_MORE", 0)
_SLICE: Final = struct.pack("@ll", 0, int(SLICE_S * 1e6))
"""A ``struct timeval``."""


Spare = Callable[[], bool]
"""Does a little work; False: there is none."""


class Stream(Protocol):
    """A byte stream with deadlines (by the link's clock)."""

    def send(self, data: bytes, deadline: float, *, later: bool = False) -> None:
        """All of it. Raises StagingError peer-lost, peer-timeout, stage-cancelled.

        ``later``: with what is sent next, or after the fifth of a second, whichever is first.
        """
        ...

    def receive(
        self, view: memoryview, deadline: float, *, fill: bool = False, spare: Spare | None = None
    ) -> int:
        """At least one byte into ``view``; 0 at the end. Raises as `send`, and what ``spare`` does.

        ``fill``: the other end owes as much as ``view`` takes; wait a slice for it. ``spare``:
        called while nothing is there, for as long as it has done something.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class KeptStream(Stream, Protocol):
    """A stream that may carry one promotion after another."""

    def renew(self, cancelled: Callable[[], bool] | None) -> None:
        """From now on ``cancelled`` is asked."""
        ...

    def glance(self, view: memoryview) -> int | None:
        """What is there already, into ``view``; 0 at the end, ``None`` when there is nothing."""
        ...


def lost(error: OSError) -> StagingError:
    """The connection is gone."""
    reason = error.strerror or type(error).__name__
    return StagingError(f"the connection to the peer is lost: {reason}", code="peer-lost")


class SocketStream:
    """A TCP connection.

    Args:
        address: host and port.
        timeout: seconds for connecting.
        cancelled: asked every `SLICE_S` of waiting.
        clock: monotonic seconds.
        stall: seconds after which bytes that the peer's host does not acknowledge mean it is gone.

    Raises:
        StagingError: peer-unreachable, peer-timeout, stage-cancelled.
    """

    def __init__(
        self,
        address: tuple[str, int],
        timeout: float,
        cancelled: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        stall: float = 10.0,
    ) -> None:
        self._cancelled, self._clock = cancelled, clock
        try:
            self._socket = socket.create_connection(address, timeout)
        except TimeoutError:
            raise StagingError(
                "the peer does not answer", code="peer-timeout", subject=_where(address)
            ) from None
        except OSError as error:
            raise StagingError(
                f"the peer cannot be reached: {error.strerror or type(error).__name__}",
                code="peer-unreachable",
                subject=_where(address),
            ) from error
        # Sends are polled for. A receive blocks in the kernel, a slice at a time: one call a chunk
        # however small the pieces that arrive.
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        user_timeout = max(1, int(stall * 1000))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout)
        self._poll = select.poll()
        # Makes room for as much, so that a pause here is none over there, and unlike SO_RCVBUF
        # leaves it to the system to make more.
        self._low_water = 0
        self._wake_at(_AHEAD_BYTES)
        self._wake_at(1)

    def send(self, data: bytes, deadline: float, *, later: bool = False) -> None:
        """See `Stream.send`."""
        view, flags = memoryview(data), socket.MSG_DONTWAIT | (_LATER if later else 0)
        while len(view):
            try:
                view = view[self._socket.send(view, flags) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise lost(error) from error

    def receive(
        self, view: memoryview, deadline: float, *, fill: bool = False, spare: Spare | None = None
    ) -> int:
        """See `Stream.receive`."""
        view, wait = view[:_INTO_BYTES], socket.MSG_WAITALL if fill else 0
        self._wake_at(len(view) if fill else 1)
        while True:
            self._check(deadline)
            try:
                flags = wait if spare is None else socket.MSG_DONTWAIT
                return self._socket.recv_into(view, 0, flags)
            except BlockingIOError:  # nothing there, or in this slice
                if spare is not None and not spare():
                    spare = None
            except OSError as error:
                raise lost(error) from error

    def _wake_at(self, count: int) -> None:
        """Be woken once ``count`` bytes are there: waking for each segment costs both ends more
        than moving it."""
        if count != self._low_water:
            self._low_water = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def renew(self, cancelled: Callable[[], bool] | None) -> None:
        """See `KeptStream.renew`."""
        self._cancelled = cancelled

    def glance(self, view: memoryview) -> int | None:
        """See `KeptStream.glance`."""
        try:
            return self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def close(self) -> None:
        """See `Stream.close`."""
        self._socket.close()

    def _wait(self, events: int, deadline: float) -> None:
        self._poll.register(self._socket, events)
        while True:
            left = self._check(deadline)
            if self._poll.poll(min(left, SLICE_S) * 1000 + 1):
                return

    def _check(self, deadline: float) -> float:
        """Seconds left. Raises StagingError stage-cancelled, peer-timeout."""
        if self._cancelled is not None and self._cancelled():
            raise StagingError("staging was cancelled", code="stage-cancelled")
        left = deadline - self._clock()
        if left <= 0:
            raise StagingError("the peer took too long", code="peer-timeout")
        return left


def _where(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


class Link:
    """Questions to a peer, one at a time.

    Args:
        stream: connected; closed by `close`.
        nonce: 32 random bytes.
        secret: shared with the peer, or ``None``.
        times: time-outs of the protocol.
        deadline: when everything must be over, by ``clock``.
        clock: monotonic seconds.
        ahead: do not wait for the peer's welcome: it comes with the first answer, and one round
            trip does it all, or two where there is a secret.

    Raises (every call):
        StagingError: peer-lost, peer-timeout, stage-cancelled.
        WireError: the peer breaks the protocol; wire-auth-required, wire-auth-missing,
            wire-auth-failed.
        RotaError: whatever the peer refuses with, in the peer's class and code.
    """

    def __init__(
        self,
        stream: Stream,
        nonce: bytes,
        secret: bytes | None,
        times: Times,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        ahead: bool = False,
    ) -> None:
        self._stream, self._clock, self._deadline = stream, clock, deadline
        self._proto = Wire2Client(nonce, secret, "rota", times, clock())
        self._buffer = memoryview(bytearray(_RECV_BYTES))
        self._landed: Callable[[int], None] | None = None
        self._spare: Spare | None = None
        self._answered: Callable[[m.Message], None] | None = None
        self.heard = False
        """The peer has said something since this promotion began."""
        self.welcome: m.Welcome | None = None
        if not ahead:
            self._run(0)

    def call(
        self,
        message: m.Message,
        sink: memoryview | None = None,
        landed: Callable[[int], None] | None = None,
        answered: Callable[[m.Message], None] | None = None,
        spare: Spare | None = None,
    ) -> m.Message:
        """The answer to ``message``; of a `Read`, once its payload is whole in ``sink``.

        ``answered`` is given the answer before its payload is received, ``landed`` is told how many
        bytes of that are there so far, ``spare`` uses the time in which none come; what they raise
        leaves the link unfit for another call.
        """
        self._landed, self._answered, self._spare = landed, answered, spare
        try:
            return self._run(self._proto.request(message, self._clock(), sink), sink is not None)
        finally:
            self._landed = self._answered = self._spare = None  # they hold what is landing

    def say(self, message: m.Message) -> None:
        """Ask, soon, without waiting for the answer, which is dropped when it comes.

        Sent at once it would wake the peer just when the caller has what it came for.
        """
        self._proto.request(message, self._clock())
        self._stream.send(self._proto.data_to_send(), self._until(), later=True)

    def renew(self, stream: KeptStream, deadline: float) -> bool:
        """Ready for another promotion over ``stream`` (the link's own) until ``deadline``.

        False, when the peer has hung up or said what nobody asked.
        """
        self._deadline, self.heard = deadline, False
        try:
            while (count := stream.glance(self._buffer)) is not None:
                self._proto.receive_data(self._buffer[:count])
                # Answers to what was said without waiting; anything else is a farewell.
                if not count or any(not e.request for e in self._proto.events(self._clock())):
                    return False
        except WireError:
            return False
        return True

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._proto.close()
        self._stream.close()

    def _run(self, request: int, payload: bool = False) -> m.Message:
        try:
            return self._exchange(request, payload)
        except WireError as error:
            if error.code == "wire-timeout":
                raise StagingError("the peer took too long", code="peer-timeout") from error
            if error.code == "wire-truncated":
                raise StagingError("the peer hung up", code="peer-lost") from error
            raise

    def _exchange(self, request: int, payload: bool) -> m.Message:
        answer: m.Message | None = None
        piece = _INTO_BYTES
        while True:
            self._flush()
            for event in self._proto.events(self._clock()):
                if event.request not in (request, 0):
                    # The answer to what was said without waiting, before this promotion.
                    self.heard = self._proto.buffered > 0
                    continue
                if isinstance(event, Received):
                    if isinstance(event.message, m.Refused):
                        raise raised(event.message)
                    if isinstance(event.message, m.Welcome):
                        self.welcome = event.message
                        if request:
                            continue
                    answer = event.message
                    if event.payload <= _SMALL_BYTES:
                        piece = _SMALL_INTO_BYTES
                    if self._answered is not None:
                        self._answered(answer)
                done = isinstance(event, PayloadDone) if payload else answer is not None
                if done and answer is not None:
                    self._tell()
                    return answer
            self._flush()
            view = self._proto.landing()
            if view is None:
                view = self._buffer[:_HEAD_BYTES] if payload else self._buffer
                count = self._stream.receive(view, self._until())
                self.heard |= count > 0
                self._proto.receive_data(view[:count])
            elif count := self._stream.receive(
                view[:piece], self._until(), fill=True, spare=self._spare
            ):
                finished = self._proto.landed(count, self._clock())
                self._tell()
                if finished is not None and answer is not None:
                    return answer
            else:
                self._proto.receive_data(b"")

    def _flush(self) -> None:
        if data := self._proto.data_to_send():
            self._stream.send(data, self._until())

    def _tell(self) -> None:
        if self._landed is not None:
            self._landed(self._proto.landed_bytes)

    def _until(self) -> float:
        at = self._proto.timeout_at()
        return self._deadline if at is None else min(at, self._deadline)
