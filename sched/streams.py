"""One request's way out: from sampled tokens to the events its caller reads.

A stream holds at most ``max_tokens`` + 1 events (that is its limit), so the engine never waits for
a slow reader. Text handling (detokenizer, stop strings) happens here, on the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import msgspec

from ..errors import RotaError


class TextSink(Protocol):
    """Tokens to text with stop strings (``sched.text``)."""

    def push(self, token: int) -> tuple[str, bool]:
        """The text this token releases, and whether a stop string matched (then it is the last)."""
        ...

    def finish(self) -> str:
        """What was held back, when the sequence ends without a match."""
        ...


class GenerationEvent(msgspec.Struct, frozen=True, array_like=True):
    """One step of a generation.

    ``token_id``: the new token, or ``None`` for a closing event without one. ``text``: the text it
    adds (may be empty: half a character, or held back by a stop string). ``finish_reason``: on the
    last event only: ``stop``, ``length``, ``cancelled`` or ``deadline``. ``adapter_id``: identity
    of the version that made the token, 0 = base. ``index``: 0 for the first new token.
    ``logprob``, ``top_logprobs``: natural logs, when asked for.
    """

    token_id: int | None
    text: str
    finish_reason: str | None
    adapter_id: int
    index: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Stream:
    """Filled by the shell, read by one consumer."""

    def __init__(
        self,
        seq: int,
        text: TextSink | None,
        on_stop: Callable[[int], None],
    ) -> None:
        self.seq = seq
        self._text = text
        self._on_stop = on_stop
        self._stopped = False
        self._events: deque[GenerationEvent] = deque()
        self._last: GenerationEvent | None = None
        self._error: RotaError | None = None
        self._ended = False
        self._index = 0
        self._wake = anyio.Event()
        self._on_ready: Callable[[], None] | None = None

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
        self._settle_last()
        self._last = GenerationEvent(
            token, text, None, adapter_id, self._index, logprob, tuple(top)
        )
        self._index += 1

    def push_end(self, reason: str, adapter_id: int, error: RotaError | None) -> None:
        """The terminal event, exactly once."""
        assert not self._ended, "a stream ends once"
        self._ended = True
        self._error = error
        last, self._last = self._last, None
        if error is not None:
            if last is not None:
                self._events.append(last)
        else:
            tail = self._tail()
            if last is not None:
                self._events.append(
                    msgspec.structs.replace(last, text=last.text + tail, finish_reason=reason)
                )
            else:
                self._events.append(GenerationEvent(None, tail, reason, adapter_id, self._index))
        self._ready()

    def flush(self) -> None:
        """End of a turn: what was pushed may be read."""
        self._settle_last()

    def _settle_last(self) -> None:
        if self._last is not None:
            self._events.append(self._last)
            self._last = None
            self._ready()

    def _ready(self) -> None:
        self._wake.set()
        if self._on_ready is not None:
            self._on_ready()

    def _tail(self) -> str:
        return "" if self._stopped or self._text is None else self._text.finish()

    @property
    def over(self) -> bool:
        """Ended, and everything has been read."""
        return self._ended and not self._events and self._error is None

    def on_ready(self, call: Callable[[], None]) -> None:
        """``call()`` whenever there is more for :meth:`poll` (now, too, if there is): for one
        reader of many streams, that a task for each would slow down."""
        self._on_ready = call
        if self._events or self._ended:
            call()

    def poll(self, limit: int) -> list[GenerationEvent]:
        """Up to ``limit`` events without waiting, none if there are none now. Raises the error
        that ended the stream, after the last of its events."""
        events = self._events
        if not events and self._error is not None:
            error, self._error = self._error, None
            raise error
        return [events.popleft() for _ in range(min(limit, len(events)))]

    async def take(self, limit: int) -> list[GenerationEvent]:
        """At least one event and at most ``limit``: what can be read without waiting twice; empty
        after the last. Raises the error that ended the stream."""
        first = await self.next()
        if first is None:
            return []
        taken = [first]
        while self._events and len(taken) < limit:
            taken.append(self._events.popleft())
        return taken

    async def next(self) -> GenerationEvent | None:
        """The next event, or ``None`` after the last. Raises the error that ended the stream."""
        while True:
            if self._events:
                return self._events.popleft()
            if self._ended:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                return None
            if self._wake.is_set():  # else another reader waits on it, and must be woken too
                self._wake = anyio.Event()
            await self._wake.wait()
