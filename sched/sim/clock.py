"""Virtual time on both backends, and seeded task order on trio.

Owns the loops a simulated run lives on: an idle loop jumps to its next timer, so a run takes no
wall time to wait, and its clock can be made to jump, as a suspended machine's does.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import anyio

Backend = Literal["asyncio", "trio"]
T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """Never waits for a timer: an idle loop jumps to it. Real I/O (a wake-up from another thread)
    is polled for; with nothing due at all it waits for I/O as usual."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance
        self.busy: Callable[[], bool] = lambda: False

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
        self.jumping = JumpingSelector(self.jump)
        super().__init__(self.jumping)
        # One float ulp passes asyncio's default 1e-9 at large times; due timers would never fire.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the clock (also back, which a real monotonic clock never does)."""
        self._now = max(0.0, self._now + seconds)


@contextmanager
def _seeded_trio(seed: int) -> Iterator[None]:
    """trio shuffles ready tasks; from a seed, the shuffle is the same each time.

    The two names are private to trio (present in 0.30 to 0.35 at least); both are put back.
    """
    import random

    import trio._core._run as run

    run_module: Any = run
    before = run_module._ALLOW_DETERMINISTIC_SCHEDULING, run_module._r
    run_module._ALLOW_DETERMINISTIC_SCHEDULING = True
    run_module._r = random.Random(seed)
    try:
        yield
    finally:
        run_module._ALLOW_DETERMINISTIC_SCHEDULING, run_module._r = before


def run_virtual(
    main: Callable[[Callable[[float], None]], Awaitable[T]], backend: Backend, seed: int = 0
) -> T:
    """Run ``main(jump)`` to its end in virtual time; ``jump(seconds)`` moves the clock.

    ``seed`` orders ready tasks on trio; on asyncio they run in the order they became ready. The
    same ``main`` and seed give the same run.
    """
    if backend == "asyncio":
        loops: list[VirtualLoop] = []

        def make() -> VirtualLoop:
            loops.append(VirtualLoop())
            return loops[-1]

        def jump(seconds: float) -> None:
            loops[-1].jump(seconds)

        return anyio.run(main, jump, backend="asyncio", backend_options={"loop_factory": make})
    import trio.testing

    clock = trio.testing.MockClock(autojump_threshold=0)

    def forward(seconds: float) -> None:
        clock.jump(max(0.0, seconds))

    with _seeded_trio(seed):
        return anyio.run(main, forward, backend="trio", backend_options={"clock": clock})
