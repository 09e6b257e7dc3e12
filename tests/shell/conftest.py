"""Both event loops under virtual time: a test that sleeps a year ends at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits for a timer: an idle loop jumps to it. Real I/O (a wake-up from another thread)
    is polled for; with nothing due at all it waits for I/O as usual."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance
        self.busy = lambda: False

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None or self.busy():
            # A worker or device thread is at work: it will wake the loop; time stands still.
            return super().select(timeout if timeout is None else 0.05)
        self._advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock starts at 0 and jumps to the next timer when idle."""

    def __init__(self) -> None:
        self._now = 0.0
        self.jumping = _JumpingSelector(self._jump)
        super().__init__(self.jumping)
        # One float ulp passes asyncio's default 1e-9 at large times; due timers would never fire.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualLoop}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
