"""The weight peer: serves adapter directories to engines.

Control over TCP; bytes by the same connection, or by one-sided reads where both ends have verbs.

What it owns: the listening socket and one task a connection. Invariants: the loop never blocks
(disk and packing run on threads, sockets are non-blocking); connections, requests, memory and time
are bounded; a client that is slow, silent, hostile or gone costs only its own connection; `stop`
ends everything within its grace.
"""

from __future__ import annotations

import logging
import math
import secrets
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread

from ..errors import CapacityError, RotaError, WireError
from .desk import Desk, Rails, refusal
from .desk1 import Desk1, PreparedRails
from .frames2 import Received, Times
from .store import Registrar, Store, StoreLimits
from .wire1 import Wire1Server
from .wire2 import Wire2Server

log = logging.getLogger("rota.rdma.peer")
_RECV_BYTES: Final = 64 << 10
_SEND_BYTES: Final = 1 << 20
_SLICE_S: Final = 0.05


class VerbsHost(Rails, PreparedRails, Registrar, Protocol):
    """A verbs device as the peer uses it."""

    def close(self) -> None:
        """Give the device back."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Bounds of a peer: clients at once, threads for disk and packing, seconds, and the store's."""

    connections: int = 64
    workers: int = 4
    max_open: int = 8
    times: Times = field(default_factory=Times)
    store: StoreLimits = field(default_factory=StoreLimits)


class WeightPeer:
    """A peer over ``directories`` (id -> adapter directory).

    Args:
        directories: the only ones ever opened.
        secret: shared with the engines, or ``None`` to serve anyone who can connect.
        limits: bounds.
        verbs: a device for one-sided reads, or ``None`` for TCP alone; closed by `close`.
        version1: understand version-1 clients too (needs verbs, and no secret).
    """

    def __init__(
        self,
        directories: Mapping[str, Path],
        *,
        secret: bytes | None = None,
        limits: PeerLimits | None = None,
        verbs: VerbsHost | None = None,
        version1: bool = False,
    ) -> None:
        self.limits = PeerLimits() if limits is None else limits
        self._secret, self._verbs = secret, verbs
        self._version1 = version1 and verbs is not None and secret is None
        self.store = Store(directories, self.limits.store, verbs)
        self._counts: dict[str, int | float] = dict.fromkeys(
            ("connections", "connections_now", "refused", "requests", "bytes_sent", "errors"), 0
        )
        self._waiting: set[anyio.CancelScope] = set()
        self._senders = anyio.CapacityLimiter(self.limits.connections)
        self._stopping = anyio.Event()
        self._listener: socket.socket | None = None

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Bind; (host, port) as bound. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        return str(bound[0]), int(bound[1])

    def counters(self) -> dict[str, int | float]:
        """Counters of connections and bytes; `Store.counters` has the rest."""
        return dict(self._counts)

    async def serve(self, *, grace_s: float = 5.0) -> None:
        """Serve until `stop`; then idle clients go at once and busy ones within ``grace_s``."""
        assert self._listener is not None, "listen first"
        limiter = anyio.CapacityLimiter(self.limits.workers)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._accept, group, limiter)
                await self._stopping.wait()
                group.cancel_scope.deadline = anyio.current_time() + grace_s
        finally:
            self._listener.close()
            self.store.close()
            if self._verbs is not None:
                self._verbs.close()
            log.info("peer stopped: %s", self._counts)

    def stop(self) -> None:
        """Take no more; called on the loop."""
        self._stopping.set()
        for scope in list(self._waiting):
            scope.cancel()

    async def _accept(self, group: anyio.abc.TaskGroup, limiter: anyio.CapacityLimiter) -> None:
        assert self._listener is not None
        while await self._readable(self._listener, None):
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                log.warning("accept failed: %s", error)
                await anyio.sleep(0.1)  # out of descriptors: let some close
                continue
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._counts["connections_now"] >= self.limits.connections:
                self._counts["refused"] += 1
                self._turn_away(client)
                continue
            self._counts["connections"] += 1
            self._counts["connections_now"] += 1
            group.start_soon(self._connection, client, limiter)

    async def _readable(self, sock: socket.socket, deadline: float | None) -> bool:
        """Wait for bytes or a client; False once the peer is stopping. Raises TimeoutError."""
        if self._stopping.is_set():
            return False
        with anyio.CancelScope(deadline=math.inf if deadline is None else deadline) as scope:
            self._waiting.add(scope)
            try:
                await anyio.wait_readable(sock)
            finally:
                self._waiting.discard(scope)
        if not scope.cancelled_caught:
            return True
        if self._stopping.is_set():
            return False
        raise TimeoutError("nothing came in time")

    def _turn_away(self, client: socket.socket) -> None:
        proto = Wire2Server(secrets.token_bytes(32), None, self.limits.times, 0.0)
        busy = CapacityError(
            "the peer has all the clients it takes",
            code="peer-busy",
            expected=self.limits.connections,
            retry_after_s=1.0,
        )
        proto.reply(0, refusal(busy), 0.0)
        try:
            client.send(proto.data_to_send())
        except OSError:
            pass
        client.close()

    async def _connection(self, client: socket.socket, limiter: anyio.CapacityLimiter) -> None:
        desk = Desk(self.store, self._verbs, self.counters, max_open=self.limits.max_open)
        try:
            await _Connection(self, client, desk, limiter).run()
        except (WireError, TimeoutError) as error:
            self._counts["errors"] += 1
            log.warning("connection ended: %s", str(error) or "nothing moved in time")
        except OSError as error:
            log.info("connection lost: %s", error)
        except Exception:  # a bug here costs one connection, not the peer
            self._counts["errors"] += 1
            log.exception("a connection broke a rule of the peer itself")
        finally:
            client.close()
            try:
                with anyio.CancelScope(shield=True):
                    # Off the loop: closing may free and unregister much memory.
                    await anyio.to_thread.run_sync(desk.close)
            finally:
                # Only now: until then its queue pairs and leases are there.
                self._counts["connections_now"] -= 1


class _Connection:
    """One client: its socket, its protocol, its desk."""

    def __init__(
        self, peer: WeightPeer, client: socket.socket, desk: Desk, limiter: anyio.CapacityLimiter
    ) -> None:
        self._peer, self._socket, self._desk, self._limiter = peer, client, desk, limiter
        self._times = peer.limits.times

    async def run(self) -> None:
        first = await self._receive(anyio.current_time() + self._times.handshake)
        if not first:
            return
        if first[:4] != b"rota"[: len(first)] and self._peer._version1:
            await self._run1(first)
            return
        now = anyio.current_time()
        proto = Wire2Server(
            secrets.token_bytes(32),
            self._peer._secret,
            self._times,
            now,
            verbs=self._peer._verbs is not None,
        )
        data = first
        while True:
            proto.receive_data(data)
            try:
                for event in proto.events(anyio.current_time()):
                    if isinstance(event, Received):
                        await self._answer(proto, event)
                await self._send(proto.data_to_send())
            except WireError as error:
                await self._say_goodbye(error)
                raise
            if proto.ended:
                return
            received = await self._receive(proto.timeout_at())
            if received is None:  # stopping, and nothing is asked
                return
            data = received

    async def _receive(self, deadline: float | None) -> bytes | None:
        """Bytes; empty at the end; ``None`` when the peer is stopping. Raises TimeoutError."""
        while await self._peer._readable(self._socket, deadline):
            try:
                return self._socket.recv(_RECV_BYTES)
            except BlockingIOError:
                continue
        return None

    async def _answer(self, proto: Wire2Server, event: Received) -> None:
        self._peer._counts["requests"] += 1
        answer = self._desk.at_once(event.message)
        if answer is None:
            answer = await anyio.to_thread.run_sync(
                self._desk.handle, event.message, limiter=self._limiter
            )
        now = anyio.current_time()
        payload = answer.payload
        proto.reply(event.request, answer.message, now, 0 if payload is None else len(payload))
        await self._send(proto.data_to_send())
        if payload is not None:
            await self._send_payload(payload)
            proto.payload_sent(len(payload), anyio.current_time())

    async def _send(self, data: bytes | memoryview) -> None:
        """Everything, as long as some of it moves within the stall time. Raises TimeoutError."""
        view = memoryview(data)
        while len(view):
            try:
                count = self._socket.send(view[:_SEND_BYTES])
            except BlockingIOError:
                with anyio.fail_after(self._times.stall):
                    await anyio.wait_writable(self._socket)
                continue
            self._peer._counts["bytes_sent"] += count
            view = view[count:]
            await anyio.lowlevel.checkpoint()

    async def _send_payload(self, payload: memoryview) -> None:
        """Large ones from a thread: a loop's turn for each piece the socket takes costs more than
        sending it."""
        if len(payload) <= _SEND_BYTES:
            await self._send(payload)
            return
        sent = [0]
        try:
            await anyio.to_thread.run_sync(
                _pump, self._socket, payload, self._times.stall, sent, limiter=self._peer._senders
            )
        finally:
            self._peer._counts["bytes_sent"] += sent[0]

    async def _say_goodbye(self, error: RotaError) -> None:
        """Tell the client why, as far as the socket takes it at once."""
        proto = Wire2Server(bytes(32), None, self._times, 0.0)
        proto.reply(0, refusal(error), 0.0)
        try:
            self._socket.send(proto.data_to_send())
        except OSError:
            pass

    async def _run1(self, first: bytes) -> None:
        verbs = self._peer._verbs
        assert verbs is not None
        proto, desk = Wire1Server(), Desk1(self._peer.store, verbs)
        data = first
        try:
            while True:
                proto.receive_data(data)
                for event in proto.events():
                    await anyio.to_thread.run_sync(desk.handle, proto, event, limiter=self._limiter)
                await self._send(proto.data_to_send())
                limit = self._times.idle if desk.connected else self._times.handshake
                received = await self._receive(anyio.current_time() + limit)
                if not received:
                    return
                data = received
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(desk.close)


def _pump(sock: socket.socket, payload: memoryview, stall: float, sent: list[int]) -> None:
    """Send it all, on a worker thread; ``sent[0]`` counts. Ends early when its task is cancelled.

    Raises:
        TimeoutError: nothing moved for ``stall`` seconds.
    """
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    moved = time.monotonic()
    while sent[0] < len(payload):
        anyio.from_thread.check_cancelled()
        try:
            sent[0] += sock.send(payload[sent[0] :])
        except BlockingIOError:
            if time.monotonic() - moved > stall:
                raise TimeoutError("nothing moved in time") from None
            poll.poll(_SLICE_S * 1000)
        else:
            moved = time.monotonic()
