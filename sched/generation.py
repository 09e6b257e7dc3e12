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
    cancelled. Of several samples, all end; an error of one is raised when the events before it
    have been read."""

    def __init__(self, shell: Shell, *streams: Stream) -> None:
        self._shell = shell
        self._streams = streams
        self._outlet = streams[0].outlet

    @property
    def id(self) -> int:
        """The sequence id (of the first sample), as in ``engine.story("seq <id>")``."""
        return self._streams[0].seq

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        try:
            taken = await self._outlet.take(1)
        except BaseException:
            self.cancel()
            raise
        if not taken:
            raise StopAsyncIteration
        return taken[0]

    @property
    def over(self) -> bool:
        """Ended, and everything has been read."""
        return self._outlet.over

    def on_ready(self, call: Callable[[], None]) -> None:
        """``call()`` on the loop's thread whenever :meth:`poll` has something to give."""
        self._outlet.on_ready(call)

    def poll(self, limit: int) -> list[GenerationEvent]:
        """Up to ``limit`` events without waiting; see :meth:`Outlet.poll`."""
        return self._outlet.poll(limit)

    async def take(self, limit: int) -> list[GenerationEvent]:
        """The next events, one at least and ``limit`` at most, as many as are at hand; empty after
        the last. For readers that hand events on in bulk."""
        try:
            return await self._outlet.take(limit)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request if it has not ended; its last event then says ``cancelled``."""
        for stream in self._streams:
            if not stream.ended:
                self._shell.cancel(stream.seq)

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
        for stream in self._streams:
            if not stream.ended:
                self._shell.cancel_soon(stream.seq)
