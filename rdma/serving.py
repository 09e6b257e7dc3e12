"""One client's connection to a weight peer, from its first byte to its last.

Blocking, on a thread of its own: a question wakes the thread that answers it, and nobody else.

What it owns: one socket and its protocol. Invariants: nothing waits without a deadline; no more
threads than `permits` work on disk or pack at once; a client that is slow, silent or hostile costs
its own thread alone; `leave` ends an idle one at once and a busy one after its answer, `cut` ends
both, `dismiss` an idle one or none.
"""

from __future__ import annotations

import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from ..errors import RotaError, WireError
from . import messages as m
from .desk import Desk, refusal
from .desk1 import Desk1
from .frames2 import Received, Times
from .wire1 import Wire1Server
from .wire2 import Wire2Server

_RECV_BYTES: Final = 64 << 10
_SEND_BYTES: Final = 1 << 20
"""Given to the system at a time: one that preempts nobody inside a call lets no other thread have
the core until it is done, and to a client on the same host that never stops reading it goes on."""
_ALONG_BYTES: Final = 256 << 10
_SLOW: Final = (m.Open, m.Fetch, m.Pack, m.Connect)
"""Questions that may take the disk, much of a core, or a device."""

Count = Callable[[str, int], None]
"""Adds to a counter of the peer, by its name."""


class Serving:
    """One connection.

    Args:
        sock: accepted; closed by the caller.
        desk: answers its questions; closed by the caller.
        secret: what the client must prove, or ``None``.
        times: time-outs.
        permits: of slow questions at once, over all connections.
        count: told of requests and bytes.
        verbs: one-sided reads are offered.
        desk1: makes the desk of a version-1 client, where those are understood.
    """

    def __init__(
        self,
        sock: socket.socket,
        desk: Desk,
        secret: bytes | None,
        times: Times,
        permits: threading.Semaphore,
        count: Count,
        *,
        verbs: bool = False,
        desk1: Callable[[], Desk1] | None = None,
    ) -> None:
        self._socket, self._desk, self._secret, self._times = sock, desk, secret, times
        self._permits, self._count, self._verbs, self._desk1 = permits, count, verbs, desk1
        self._leaving = self._dismissed = False
        self._unsent = b""
        # Held for a few instructions at a time: a client asks, or is dismissed.
        self._turn = threading.Lock()
        self.idle_since: float | None = None
        """Monotonic seconds, while it waits for another question and has nothing open."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A send blocks in the kernel until all is taken, or nothing was for this long.
        seconds, rest = divmod(times.stall, 1)
        limit = struct.pack("@ll", int(seconds), max(1, int(rest * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def leave(self) -> None:
        """End it once it waits for its client; from any thread."""
        self._leaving = True
        self._shut(socket.SHUT_RD)

    def dismiss(self, after_s: float) -> bool:
        """End it, if it has been idle for so long; from any thread.

        It has nothing open, so no queue pair of its can be reading. Nothing it asks from now on is
        heard: who keeps connections then makes a new one.
        """
        with self._turn:
            if self.idle_since is None or time.monotonic() - self.idle_since < after_s:
                return False
            self.idle_since, self._dismissed = None, True
        self.leave()
        return True

    def cut(self) -> None:
        """End it as soon as nothing but the network is waited for; from any thread."""
        self._leaving = True
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:
            pass  # gone already

    def run(self) -> None:
        """Until the client goes, or `leave`.

        Raises:
            WireError: the client breaks the protocol.
            TimeoutError: it says nothing, or takes nothing, for too long.
            OSError: the connection is lost.
        """
        data = self._receive(time.monotonic() + self._times.handshake)
        if not data:
            return
        if self._desk1 is not None and data[:4] != b"rota"[: len(data)]:
            self._run1(data, self._desk1())
            return
        nonce, now = secrets.token_bytes(32), time.monotonic()
        proto = Wire2Server(nonce, self._secret, self._times, now, verbs=self._verbs)
        while data is not None:
            proto.receive_data(data)
            answered = False
            try:
                for event in proto.events(time.monotonic()):
                    if isinstance(event, Received):
                        self._answer(proto, event)
                        answered = True
                self._say(proto)
            except WireError as error:
                # What came before is said first: it may tell the client more.
                say_no(self._socket, error, self._times, self._said(proto))
                raise
            if proto.ended:
                return
            if answered and self._desk.holds_nothing:
                self.idle_since = time.monotonic()
            data = self._receive(proto.timeout_at())

    def _receive(self, deadline: float | None) -> bytes | None:
        """Bytes; empty at the end; ``None`` when it is to leave."""
        while not self._leaving:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(None if left is None else math.ceil(left * 1000)):
                raise TimeoutError("nothing came in time")
            try:
                data = self._socket.recv(_RECV_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            with self._turn:
                self.idle_since = None
                if self._dismissed:
                    return None
            if data or not self._leaving:
                return data
        return None

    def _answer(self, proto: Wire2Server, event: Received) -> None:
        self._count("requests", 1)
        # Before it takes long the client hears what there is to say: its welcome, mostly.
        waits = partial(self._say_now, proto)
        slow = isinstance(event.message, _SLOW)
        if slow and not self._permits.acquire(blocking=False):
            waits()
            self._permits.acquire()
        try:
            answer = self._desk.handle(event.message, waits)
        finally:
            if slow:
                self._permits.release()
        payload = answer.payload
        size = 0 if payload is None else len(payload)
        proto.reply(event.request, answer.message, time.monotonic(), size)
        if isinstance(answer.message, m.Released):
            return  # nobody waits for it; it goes with what is said next, or before the next wait
        self._send(self._said(proto), payload)
        if size:
            proto.payload_sent(size, time.monotonic())

    def _say(self, proto: Wire2Server) -> None:
        """What there is to say."""
        if said := self._said(proto):
            self._send(said)

    def _say_now(self, proto: Wire2Server) -> None:
        """What there is to say, as far as the system takes it at once; the rest is said later: who
        reads nothing must not keep the locks that are held here from the others."""
        if said := self._said(proto):
            try:
                count = self._socket.send(said, socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
            self._count("bytes_sent", count)
            self._unsent = said[count:]

    def _said(self, proto: Wire2Server) -> bytes:
        """What is not sent yet, once."""
        said, self._unsent = self._unsent + proto.data_to_send(), b""
        return said

    def _send(self, said: bytes, payload: memoryview | None = None) -> None:
        """All of it, as long as some of it moves."""
        rest, first = memoryview(b"") if payload is None else payload, memoryview(said)
        while len(first) or len(rest):
            # What was said goes ahead, so that the client looks at it while it is sent the bytes.
            piece = rest[: _ALONG_BYTES if len(first) else _SEND_BYTES]
            try:
                count = self._socket.sendmsg((first, piece))
            except BlockingIOError:
                raise TimeoutError("nothing moved in time") from None
            self._count("bytes_sent", count)
            taken = min(count, len(first))
            first, rest = first[taken:], rest[count - taken :]

    def _run1(self, first: bytes, desk: Desk1) -> None:
        proto, data = Wire1Server(), first
        try:
            while data:
                proto.receive_data(data)
                for event in proto.events():
                    with self._permits:
                        desk.handle(proto, event)
                if said := proto.data_to_send():
                    self._send(said)
                limit = self._times.idle if desk.connected else self._times.handshake
                data = self._receive(time.monotonic() + limit) or b""
        finally:
            desk.close()


def say_no(sock: socket.socket, error: RotaError, times: Times, before: bytes = b"") -> None:
    """A refusal of the whole connection, after ``before``, as far as the socket takes it at
    once."""
    proto = Wire2Server(bytes(32), None, times, 0.0)
    proto.reply(0, refusal(error), 0.0)
    try:
        sock.send(before + proto.data_to_send(), socket.MSG_DONTWAIT)
    except OSError:
        pass
