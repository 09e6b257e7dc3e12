"""Calling into the event loop from another thread, without blocking that thread.

anyio's ``from_thread.run`` waits for the loop to answer; the device thread must not. Both backends
have a fire-and-forget call; this is the one place that knows their names.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

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
    context = contextvars.copy_context()

    def call(callback: Callable[[], None]) -> None:
        try:
            post(partial(context.run, callback))
        except RuntimeError:  # asyncio: loop closed; trio: RunFinishedError
            _log.warning("the event loop ended before the engine's device thread")

    return call
