"""Waking what runs on the event loop: from another thread, and from one task to many.

anyio's ``from_thread.run`` waits for the loop to answer; the device thread must not. Both backends
have a fire-and-forget call. anyio's ``Event`` is spent once set, so that a reader of tokens would
pay for a new one at each token; :class:`Bell` costs a future. This is the one place that knows the
backends' own names.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import anyio
from anyio.lowlevel import current_token

_log = logging.getLogger("rota.sched.wake")


def loop_poster() -> Callable[[Callable[[], None]], None]:
    """A function that runs a callback on the current event loop, callable from any thread.

    A callback posted after the loop has ended is dropped, with a log line: nobody is left to hear.
    """
    native: Any = current_token().native_token
    post = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
    # A callback posted from a foreign thread would run in that thread's context, in which anyio
    # does not know its loop.
    context = _context()

    def call(callback: Callable[[], None]) -> None:
        try:
            post(partial(context.run, callback))
        except RuntimeError:  # asyncio: loop closed; trio: RunFinishedError
            _log.warning("the event loop ended before the engine's device thread")

    return call


def _context() -> contextvars.Context:
    """A copy of the current context in which anyio knows its loop outside of tasks as well.

    ``asyncio.run``, unlike ``anyio.run``, says it nowhere: sniffio, where it is installed, looks
    for a current task, and a callback has none.
    """
    context = contextvars.copy_context()
    try:
        import sniffio
    except ImportError:
        return context  # then anyio looks for a running loop, which a callback has
    context.run(sniffio.current_async_library_cvar.set, sniffio.current_async_library())
    return context


class _Place:
    """The part of a future that :class:`Bell` needs, on loops that have none."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, _: None) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._event.wait().__await__()


class Bell:
    """Where tasks of one event loop wait until it is rung, as often as they like.

    A ring wakes all who wait at that moment, in the order they came, and is not remembered: look
    for what you wait for, then :meth:`wait`, with no ``await`` in between.
    """

    __slots__ = ("_new_place", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._new_place: Any = None

    def ring(self) -> None:
        """Wake all who wait. On the loop's thread only; never runs any of them itself."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for place in waiting:
                if not place.done():  # else its task is being cancelled
                    place.set_result(None)

    async def wait(self) -> None:
        """Wait for the next ring. May be cancelled, which leaves nothing behind."""
        if self._new_place is None:
            self._new_place = getattr(current_token().native_token, "create_future", _Place)
        place = self._new_place()
        self._waiting.append(place)
        try:
            await place
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
            raise
