"""Cancelling a coroutine at one await of its choice and no other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio


class CancelAt:
    """Awaits a coroutine and cancels ``scope`` at its ``nth`` suspension (from 1), exactly.
    ``count``: suspensions so far."""

    def __init__(self, inner: Awaitable[Any], nth: int, scope: anyio.CancelScope) -> None:
        self._inner, self._nth, self._scope = inner, nth, scope
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        # Of a coroutine it is a generator, whatever Awaitable promises.
        inner: Any = self._inner.__await__()
        value, error = None, None
        while True:
            try:
                asked = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self._nth:
                self._scope.cancel()
            value, error = None, None
            try:
                value = yield asked
            except BaseException as raised:  # thrown into the coroutine above
                error = raised


async def cancelled_at(nth: int, make: Callable[[], Awaitable[Any]]) -> bool:
    """Whether the coroutine reached its ``nth`` suspension, and was cancelled there."""
    with anyio.CancelScope() as scope:
        await CancelAt(make(), nth, scope)
    return scope.cancel_called
