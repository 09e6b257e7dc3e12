"""The requests of one connection, and one pass over what they have ready.

Owns each request's credit and which of them may have something to send. No task and no I/O: a step
of the engine marks requests, one :meth:`Outflow.collect` turns what they all have into a few
messages. Invariants: of one request never more than its credit is sent, its events in order, and
its end once, last; what credit or the output buffer do not allow stays in the engine's own streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import RotaError, WireError
from ..face import Polled
from ..failures import to_failure
from ..streams import GenerationEvent
from ..wake import Bell
from . import wire

_BATCH = 256
_ALL = 1 << 30


class Request:
    """A request, its credit, and the generation it reads (``None`` until it has begun)."""

    __slots__ = ("cancelled", "credit", "generation", "ident")

    def __init__(self, ident: int, credit: int) -> None:
        self.ident = ident
        self.credit = credit
        self.cancelled = False
        self.generation: Polled | None = None


class Outflow:
    """See the module.

    Args:
        send: queues a message for the connection.
        pending: bytes queued and not yet handed to the socket.
        high_water: of ``pending``, above which a pass ends.
        max_credit: events one request may have to its credit.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        pending: Callable[[], int],
        high_water: int,
        max_credit: int,
    ) -> None:
        self._send = send
        self._pending = pending
        self._high_water = high_water
        self._max_credit = max_credit
        self._requests: dict[int, Request] = {}
        self._ready: dict[int, Request] = {}
        #: Rung whenever there may be something to collect.
        self.bell = Bell()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, ident: int, credit: int) -> Request:
        """A request of the frontend's. Raises WireError ``wire-order`` if the id is in use."""
        if ident in self._requests:
            raise WireError("the request id is in use", code="wire-order")
        request = Request(ident, min(max(0, credit), self._max_credit))
        self._requests[ident] = request
        return request

    def begin(self, request: Request, generation: Polled) -> None:
        """The request's events come from ``generation`` from now on."""
        request.generation = generation
        generation.on_ready(partial(self._mark, request))

    def credit(self, ident: int, events: int) -> None:
        """The frontend has read. Raises WireError ``wire-malformed``."""
        request = self._requests.get(ident)
        if request is None:
            return
        if events < 0:
            raise WireError("negative credit", code="wire-malformed")
        if request.credit == 0:  # else nothing waits for it
            self._mark(request)
        request.credit = min(request.credit + events, self._max_credit)

    def cancel(self, ident: int) -> None:
        """Nobody reads the request any more: only its last events are of interest."""
        request = self._requests.get(ident)
        if request is None:
            return
        request.cancelled = True
        if request.generation is not None:
            request.generation.cancel()
            self._mark(request)

    def end(self, request: Request, error: Exception | None) -> None:
        """The request is over before it had a generation."""
        self._send(self._over(request, error))
        self.bell.ring()

    def close(self) -> None:
        """The frontend is gone: every request of it is cancelled."""
        requests, self._requests = self._requests, {}
        self._ready.clear()
        for request in requests.values():
            if request.generation is not None:
                request.generation.cancel()

    def collect(self) -> None:
        """One pass: queue what the requests have ready, each in its turn, as far as credit and the
        output buffer go; what is left stays ready."""
        if not self._ready:
            return
        ready, self._ready = self._ready, {}
        owners: list[int] = []
        events: list[GenerationEvent] = []
        ends: list[wire.Ended] = []
        turns = iter(ready.values())
        full = self._pending() > self._high_water
        while not full and (request := next(turns, None)) is not None:
            if self._requests.get(request.ident) is request and request.generation is not None:
                ended = self._take(request, request.generation, owners, events)
                if ended is not None:
                    ends.append(ended)
            if len(events) >= _BATCH:
                self._emit(owners, events, ends)
                full = self._pending() > self._high_water
        self._emit(owners, events, ends)
        if full:  # those that have not had their turn come first in the next pass
            self._ready = {r.ident: r for r in turns} | self._ready

    def _mark(self, request: Request) -> None:
        self._ready[request.ident] = request
        self.bell.ring()

    def _take(
        self,
        request: Request,
        generation: Polled,
        owners: list[int],
        events: list[GenerationEvent],
    ) -> wire.Ended | None:
        """Take what one request has; its end if that was all."""
        try:
            if request.cancelled:
                # Nobody counts on the rest any more; the last one says how it ended.
                limit = _ALL
                taken = [e for e in generation.poll(limit) if e.finish_reason is not None]
            else:
                limit = request.credit if request.credit < _BATCH else _BATCH
                taken = generation.poll(limit)
        except RotaError as error:
            generation.cancel()  # the other samples
            return self._over(request, error)
        if taken:
            request.credit = max(0, request.credit - len(taken))
            owners += [request.ident] * len(taken)
            events += taken
            if len(taken) == limit and request.credit:
                self._ready[request.ident] = request  # again, after the others had their turn
        if generation.over:
            return self._over(request, None)
        return None

    def _emit(
        self, owners: list[int], events: list[GenerationEvent], ends: list[wire.Ended]
    ) -> None:
        if events:
            self._tokens(tuple(owners), tuple(events))
        for ended in ends:
            self._send(ended)
        owners.clear()
        events.clear()
        ends.clear()

    def _tokens(self, owners: tuple[int, ...], events: tuple[GenerationEvent, ...]) -> None:
        """Raises WireError ``frame-too-large`` if one event alone is."""
        try:
            self._send(wire.Tokens(owners, events))
        except WireError:
            if len(events) == 1:
                raise
            half = len(events) // 2
            self._tokens(owners[:half], events[:half])
            self._tokens(owners[half:], events[half:])

    def _over(self, request: Request, error: Exception | None) -> wire.Ended:
        self._requests.pop(request.ident, None)
        self._ready.pop(request.ident, None)
        return wire.Ended(request.ident, None if error is None else to_failure(error))
