"""One request as an async iterator whose end, however it comes, ends the request."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from .shell import Shell
from .streams import GenerationEvent, Stream


class Generation:
    """Iterate with ``async for``. Leaving the loop cancels the request: when the iterator is
    dropped, on :meth:`cancel`, :meth:`aclose`, ``async with`` exit, or when the reading task is
    cancelled."""

    def __init__(self, shell: Shell, stream: Stream) -> None:
        self._shell = shell
        self._stream = stream

    @property
    def id(self) -> int:
        """The sequence id, as in ``engine.story("seq <id>")``."""
        return self._stream.seq

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        try:
            event = await self._stream.next()
        except BaseException:
            self.cancel()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    @property
    def over(self) -> bool:
        """Ended, and everything has been read."""
        return self._stream.over

    def on_ready(self, call: Callable[[], None]) -> None:
        """``call()`` on the loop's thread whenever :meth:`poll` has something to give."""
        self._stream.on_ready(call)

    def poll(self, limit: int) -> list[GenerationEvent]:
        """Up to ``limit`` events without waiting; see :meth:`Stream.poll`."""
        return self._stream.poll(limit)

    async def take(self, limit: int) -> list[GenerationEvent]:
        """The next events, one at least and ``limit`` at most, as many as are at hand; empty after
        the last. For readers that hand events on in bulk."""
        try:
            return await self._stream.take(limit)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request if it has not ended; its last event then says ``cancelled``."""
        if not self._stream.ended:
            self._shell.cancel(self._stream.seq)

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not self._stream.ended:
            self._shell.cancel_soon(self._stream.seq)
