"""Connections to peers: one promotion's, and those kept for the next.

What it owns: between promotions, the kept connections, their queue pairs and threads. Invariants: a
promotion has a connection to itself; one that saw an error is never kept; what a promotion opened
is released before its connection is kept; no more are kept than asked for, none longer than its
idle time once the pool is used again or closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..errors import RequestError, RotaError
from . import messages as m
from .background import digest_pool
from .link import KeptStream, Link, Stream
from .onesided import Cancelled, OneSided, OneSidedRails


@dataclass(slots=True, eq=False)
class Session:
    """One promotion's connection and, where both ends have verbs, its rails.

    Attributes:
        link: the conversation over ``stream``.
        rails: connected, or ``None`` for TCP.
        transport: the verbs device, if there is one.
        deadline: of the promotion, by its clock.
        cancelled: of the promotion.
        opened: digests of the generations it holds on the peer.
        renewed: it was kept from a promotion before.
    """

    link: Link
    stream: Stream
    rails: OneSidedRails | None
    transport: OneSided | None
    deadline: float
    cancelled: Cancelled | None
    opened: list[str] = field(default_factory=list)
    renewed: bool = False
    _beside: ThreadPoolExecutor | None = None

    def beside(self) -> ThreadPoolExecutor | None:
        """A thread that checks digests, for as long as a kept connection lives. A new connection
        has none: it would be there too late."""
        if self._beside is None and self.renewed:
            self._beside = digest_pool(1, "rota-verify")
        return self._beside

    @property
    def keepable(self) -> bool:
        """It may serve another promotion: verbs that were refused are asked for anew."""
        return self.rails is not None or self.transport is None

    def rest(self) -> None:
        """Give back what is open on the peer. Raises RotaError: it cannot be kept."""
        opened, self.opened, self.cancelled = self.opened, [], None
        for digest in opened:
            self.link.say(m.Release(digest))

    def renew(self, stream: KeptStream, deadline: float, cancelled: Cancelled | None) -> bool:
        """Ready for another promotion; False when the peer has hung up."""
        stream.renew(cancelled)
        self.deadline, self.cancelled, self.renewed = deadline, cancelled, True
        return self.link.renew(stream, deadline)

    def close(self) -> None:
        """Rails, then the connection, then its thread. Idempotent."""
        if self.rails is not None:
            self.rails.close()
        self.stream.close()
        if self._beside is not None:
            self._beside.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    session: Session
    stream: KeptStream
    until: float


class PeerPool:
    """Connections that wait for the next promotion, for `client.Peer`'s ``pool``; safe for many
    threads. Close it before the verbs device it was used with.

    Args:
        keep: connections kept at once, over all peers; the longest unused goes first.
        idle_s: seconds one is kept. Less than the peer's own patience (120 s).
        clock: monotonic seconds.

    Raises:
        RequestError: bad-pool.
    """

    def __init__(
        self, keep: int = 16, idle_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0 <= keep <= 1024 or not 0 < idle_s <= 3600:
            raise RequestError(
                "a pool keeps 0..1024 connections for up to an hour",
                code="bad-pool",
                found=f"{keep} for {idle_s} s",
            )
        self._keep, self._idle_s, self._clock = keep, idle_s, clock
        self._lock = threading.Lock()
        self._kept: dict[Hashable, list[_Kept]] = {}
        self._closed = False

    def __len__(self) -> int:
        """Connections kept now."""
        with self._lock:
            return sum(map(len, self._kept.values()))

    def take(
        self, key: Hashable, deadline: float, cancelled: Cancelled | None
    ) -> tuple[Session, KeptStream] | None:
        """A kept connection to ``key``, ready for a promotion; ``None``: make one."""
        while True:
            over: list[Session] = []
            with self._lock:
                self._expire(over)
                kept = self._kept.get(key)
                found = kept.pop() if kept else None
                if kept is not None and not kept:
                    del self._kept[key]
            for session in over:
                session.close()
            if found is None:
                return None
            if found.session.renew(found.stream, deadline, cancelled):
                return found.session, found.stream
            found.session.close()

    def give(self, key: Hashable, session: Session, stream: KeptStream) -> None:
        """Keep it, or close it."""
        over: list[Session] = []
        try:
            session.rest()
        except RotaError:
            session.close()
            return
        with self._lock:
            if self._closed or not self._keep:
                over.append(session)
            else:
                made = _Kept(session, stream, self._clock() + self._idle_s)
                self._kept.setdefault(key, []).append(made)
                self._expire(over)
        for one in over:
            one.close()

    def close(self) -> None:
        """Close all that are kept, and keep no more. Idempotent."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, {}
        for one in (k for many in kept.values() for k in many):
            one.session.close()

    def _expire(self, over: list[Session]) -> None:
        """Take out what is too old or too many (under the lock; closed after it)."""
        now = self._clock()
        count = sum(map(len, self._kept.values()))
        if count <= self._keep and all(o.until > now for many in self._kept.values() for o in many):
            return
        for one, key in sorted(
            ((one, key) for key, many in self._kept.items() for one in many),
            key=lambda item: item[0].until,
        ):
            if one.until > now and count <= self._keep:
                break
            self._kept[key].remove(one)
            count -= 1
            if not self._kept[key]:
                del self._kept[key]
            over.append(one.session)
