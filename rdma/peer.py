"""The weight peer: serves adapter directories to engines.

Control over TCP; bytes by the same connection, or by one-sided reads where both ends have verbs.

What it owns: the listening socket, and the threads that serve its clients. Each thread waits for a
client and then serves it (`serving.Serving`), so that no question changes threads; one more than
there are clients always waits. Invariants: the event loop never waits for a client, the disk or a
lock that is held over either; connections, requests, memory and time are bounded; a client that is
slow, silent, hostile or gone costs only its own connection; `stop` ends everything within its
grace.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.to_thread

from ..errors import CapacityError, WireError
from ..gpu.host_threads import LONG_S, ask_for_slices
from .desk import Desk, Rails
from .desk1 import Desk1, PreparedRails
from .frames2 import Times
from .serving import Serving, say_no
from .store import Registrar, Store, StoreLimits

log = logging.getLogger("rota.rdma.peer")
_SPARE: Final = 4
"""Threads that wait for a client at most; more of them end when their client goes."""
_BACKLOG: Final = 64
_ROOM_S: Final = 1.0
"""For which a client waits at most until one that was dismissed has given everything back."""


class VerbsHost(Rails, PreparedRails, Registrar, Protocol):
    """A verbs device as the peer uses it."""

    def close(self) -> None:
        """Give the device back."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Bounds of a peer: clients at once (each has a thread), seconds after which one that is idle
    with nothing open makes room for another when all are taken, how many of their questions may use
    the disk or pack at once, generations a client may hold, seconds, and the store's."""

    connections: int = 64
    dismiss_after_s: float = 1.0
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
        verbs: a device for one-sided reads, or ``None`` for TCP alone; closed by `serve`.
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
        self._permits = threading.Semaphore(self.limits.workers)
        # Held for a few instructions at a time: it guards the four that follow.
        self._changed = threading.Condition()
        self._counts: dict[str, int | float] = dict.fromkeys(
            ("connections", "connections_now", "refused", "requests", "bytes_sent", "errors"), 0
        )
        self._serving: set[Serving] = set()
        self._threads: set[threading.Thread] = set()
        self._spare = 0
        self._stopping = threading.Event()
        self._told_to_stop = anyio.Event()
        self._listener: socket.socket | None = None

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Bind; (host, port) as bound. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        bound = self._listener.getsockname()
        return str(bound[0]), int(bound[1])

    def counters(self) -> dict[str, int | float]:
        """Counters of connections and bytes; `Store.counters` has the rest."""
        with self._changed:
            return dict(self._counts)

    async def serve(self, *, grace_s: float = 5.0) -> None:
        """Serve until `stop`; then idle clients go at once and busy ones within ``grace_s``."""
        assert self._listener is not None, "listen first"
        with self._changed:
            self._hire(self._listener)
        try:
            await self._told_to_stop.wait()
            await anyio.to_thread.run_sync(self._wait, grace_s, abandon_on_cancel=True)
        finally:
            self.stop()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._end)
            log.info("peer stopped: %s", self.counters())

    def stop(self) -> None:
        """Take no more; called on the loop. Idempotent."""
        if self._listener is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._told_to_stop.set()
        with self._changed:
            for one in self._serving:
                one.leave()
        _wake(self._listener)

    # -- ending, on a thread that is not the loop's

    def _wait(self, grace_s: float) -> None:
        """Until every client has gone, ``grace_s`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._serving, grace_s)

    def _end(self) -> None:
        """Cut off who is still there, and free everything."""
        assert self._listener is not None
        with self._changed:
            left = list(self._threads)
            for one in self._serving:
                one.cut()
        for thread in left:
            thread.join()
        self._listener.close()
        self.store.close()
        if self._verbs is not None:
            self._verbs.close()

    # -- the threads

    def _hire(self, listener: socket.socket) -> None:
        """One more thread that waits for a client (under the lock, so that it starts when it is
        known). Raises RuntimeError: the system has no more."""
        made = threading.Thread(target=self._work, args=(listener,), name="rota-peer", daemon=True)
        made.start()
        self._threads.add(made)
        self._spare += 1

    def _hire_if_possible(self, listener: socket.socket) -> None:
        try:
            self._hire(listener)
        except RuntimeError as error:
            log.warning("%s: the next client waits until one of these goes", error)

    def _work(self, listener: socket.socket) -> None:
        ask_for_slices(LONG_S)  # it copies for long, and an engine's loop may be on this host
        try:
            while (client := self._next(listener)) is not None:
                self._serve(client)
                with self._changed:
                    if self._spare >= _SPARE:
                        return
                    self._spare += 1
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self, listener: socket.socket) -> socket.socket | None:
        """A client to serve; ``None`` once the peer is stopping."""
        while not self._stopping.is_set():
            try:
                client, _ = listener.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    log.warning("accept failed: %s", error)
                    self._stopping.wait(0.1)  # out of descriptors: let some close
                continue
            with self._changed:
                welcome = self._has_room() or self._make_room()
                if welcome:
                    self._counts["connections"] += 1
                    self._counts["connections_now"] += 1
                    self._spare -= 1
                    if not self._spare:
                        self._hire_if_possible(listener)
                else:
                    self._counts["refused"] += 1
            if welcome:
                return client
            self._turn_away(client)
        return None

    def _has_room(self) -> bool:
        return self._counts["connections_now"] < self.limits.connections

    def _make_room(self) -> bool:
        """Dismiss who has been idle longest, if anyone has for long enough (under the lock, which
        is given up until everything of theirs is given back)."""
        idle = {one: since for one in self._serving if (since := one.idle_since) is not None}
        for one in sorted(idle, key=idle.__getitem__):
            if one.dismiss(self.limits.dismiss_after_s):
                return self._changed.wait_for(self._has_room, _ROOM_S)
        return False

    def _turn_away(self, client: socket.socket) -> None:
        busy = CapacityError(
            "the peer has all the clients it takes",
            code="peer-busy",
            expected=self.limits.connections,
            retry_after_s=1.0,
        )
        with client:
            say_no(client, busy, self.limits.times)

    def _serve(self, client: socket.socket) -> None:
        desk = Desk(
            self.store,
            self._verbs,
            self.counters,
            max_open=self.limits.max_open,
            sure=self._secret is not None,
        )
        one: Serving | None = None
        try:
            one = self._started(client, desk)
            one.run()
        except (WireError, TimeoutError) as error:
            self._count("errors", 1)
            log.warning("connection ended: %s", str(error) or "nothing moved in time")
        except OSError as error:
            log.info("connection lost: %s", error)
        except Exception:  # a bug here costs one connection, not the peer
            self._count("errors", 1)
            log.exception("a connection broke a rule of the peer itself")
        finally:
            client.close()
            try:
                desk.close()
            finally:
                with self._changed:
                    # Only now: until then its queue pairs and leases are there.
                    self._counts["connections_now"] -= 1
                    if one is not None:
                        self._serving.discard(one)
                    self._changed.notify_all()

    def _started(self, client: socket.socket, desk: Desk) -> Serving:
        verbs = self._verbs
        one = Serving(
            client,
            desk,
            self._secret,
            self.limits.times,
            self._permits,
            self._count,
            verbs=verbs is not None,
            desk1=partial(Desk1, self.store, verbs) if verbs and self._version1 else None,
        )
        with self._changed:
            self._serving.add(one)
            if self._stopping.is_set():
                one.leave()
        return one

    def _count(self, name: str, more: int) -> None:
        with self._changed:
            self._counts[name] += more


def _wake(listener: socket.socket) -> None:
    """Every thread that waits in ``accept`` gets an error at once."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
