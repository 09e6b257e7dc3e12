"""One request's way out: from sampled tokens to the events its caller reads.

Each sample has a stream; the streams of one request end in one outlet, which has one reader. A
stream gives at most ``max_tokens`` + 1 events (that is the outlet's limit), so the engine never
waits for a slow reader. Text handling (detokenizer, stop strings) happens here, on the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..errors import RotaError
from .wake import Bell


class TextSink(Protocol):
    """Tokens to text with stop strings (``sched.text``)."""

    def push(self, token: int) -> tuple[str, bool]:
        """The text this token releases, and whether a stop string matched (then it is the last)."""
        ...

    def finish(self) -> str:
        """What was held back, when the sequence ends without a match."""
        ...


# gc=False: it holds numbers and text only, so it is in no cycle, and there is one for each token.
class GenerationEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of a generation.

    ``token_id``: the new token, or ``None`` for a closing event without one. ``text``: the text it
    adds (may be empty: half a character, or held back by a stop string). ``finish_reason``: on the
    last event only: ``stop``, ``length``, ``cancelled`` or ``deadline``. ``adapter_id``: identity
    of the version that made the token, 0 = base. ``index``: 0 for the first new token.
    ``sample``: which of the ``n`` samples of its prompt; each has a last event of its own.
    ``logprob``, ``top_logprobs``: natural logs, when asked for.
    """

    token_id: int | None
    text: str
    finish_reason: str | None
    adapter_id: int
    index: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    sample: int = 0


class Outlet:
    """The events of one request, from the streams of its samples to the one who reads them."""

    def __init__(self) -> None:
        self._events: deque[GenerationEvent] = deque()
        self._errors: deque[RotaError] = deque()
        self._open = 0
        self._bell = Bell()
        self._on_ready: Callable[[], None] | None = None

    # called by streams --------------------------------------------------------------------------
    def opened(self) -> None:
        self._open += 1

    def put(self, event: GenerationEvent) -> None:
        self._events.append(event)
        self._ready()

    def closed(self, error: RotaError | None) -> None:
        """A stream has ended, in ``error`` if it is one."""
        self._open -= 1
        if error is not None:
            self._errors.append(error)
        self._ready()

    def _ready(self) -> None:
        self._bell.ring()
        if self._on_ready is not None:
            self._on_ready()

    # reading ------------------------------------------------------------------------------------
    @property
    def ended(self) -> bool:
        """No event will come any more."""
        return self._open == 0

    @property
    def over(self) -> bool:
        """Ended, and everything has been read."""
        return not (self._open or self._events or self._errors)

    def on_ready(self, call: Callable[[], None]) -> None:
        """``call()`` whenever there is more for :meth:`poll` (now, too, if there is): for one
        reader of many requests, that a task for each would slow down. What :meth:`poll` leaves
        because of its limit is not told again; an error behind the events it gave is."""
        self._on_ready = call
        if self._events or self._errors or self.ended:
            call()

    def poll(self, limit: int) -> list[GenerationEvent]:
        """Up to ``limit`` events without waiting, none if there are none now. Raises an error that
        ended a sample, once, after the events at hand."""
        events = self._events
        if not events and self._errors:
            raise self._errors.popleft()
        if len(events) <= limit:
            taken = list(events)
            events.clear()
            if self._errors and self._on_ready is not None:
                self._on_ready()
            return taken
        return [events.popleft() for _ in range(limit)]

    async def take(self, limit: int) -> list[GenerationEvent]:
        """At least one event and at most ``limit``: what can be read without waiting twice; empty
        after the last. Raises as :meth:`poll`."""
        while not self._events:
            if self._errors:
                raise self._errors.popleft()
            if self.ended:
                return []
            await self._bell.wait()
        return self.poll(limit)


class Stream:
    """One sample, filled by the shell; read through :attr:`outlet`."""

    def __init__(
        self,
        seq: int,
        text: TextSink | None,
        on_stop: Callable[[int], None],
        outlet: Outlet | None = None,
        sample: int = 0,
    ) -> None:
        self.seq = seq
        self.outlet = outlet if outlet is not None else Outlet()
        self.outlet.opened()
        self._sample = sample
        self._text = text
        self._on_stop = on_stop
        self._stopped = False
        self._last: GenerationEvent | None = None
        self._ended = False
        self._index = 0

    @property
    def ended(self) -> bool:
        return self._ended

    def push_token(
        self,
        token: int,
        adapter_id: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
    ) -> None:
        """A sampled token. Nothing is read before :meth:`flush`, so that an end in the same turn
        can put its reason on this event."""
        if self._stopped:
            return
        text, hit = self._text.push(token) if self._text is not None else ("", False)
        if hit:
            self._stopped = True
            self._on_stop(self.seq)
        self.flush()
        self._last = GenerationEvent(
            token, text, None, adapter_id, self._index, logprob, tuple(top), self._sample
        )
        self._index += 1

    def push_end(self, reason: str, adapter_id: int, error: RotaError | None) -> None:
        """The terminal event, exactly once."""
        assert not self._ended, "a stream ends once"
        self._ended = True
        last, self._last = self._last, None
        if error is not None:
            if last is not None:
                self.outlet.put(last)
        else:
            tail = self._tail()
            if last is not None:
                last = msgspec.structs.replace(last, text=last.text + tail, finish_reason=reason)
            else:
                last = GenerationEvent(
                    None, tail, reason, adapter_id, self._index, sample=self._sample
                )
            self.outlet.put(last)
        self.outlet.closed(error)

    def flush(self) -> None:
        """End of a turn: what was pushed may be read."""
        if self._last is not None:
            last, self._last = self._last, None
            self.outlet.put(last)

    def _tail(self) -> str:
        return "" if self._stopped or self._text is None else self._text.finish()
