"""How soon the loop's thread gets the interpreter, and a core, back from threads that compute.

Owns nothing; sets the interpreter's switch interval for a while. A thread that asks for the GIL
waits out the interval (5 ms by default) before the holder is made to yield, and a turn of an event
loop asks twice: auditing an adapter of thousands of tensors on a staging thread would make every
turn 10 ms late.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ..gpu.host_threads import SHORT_S, ask_for_slices

SWITCH_S: Final = 0.0005
"""Seconds until a thread that holds the interpreter is asked to let another one have it."""


@contextmanager
def prompt_switching(seconds: float = SWITCH_S) -> Iterator[None]:
    """Within, threads yield after ``seconds`` at most (sooner where the process had it so)."""
    before = sys.getswitchinterval()
    if before <= seconds:  # someone else will put it back
        yield
        return
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def settle_process() -> None:
    """For who owns the process, once, on the loop's thread, when it is ready: its heap is settled,
    and this thread gets a core at once, as a rule, from those that have one for long."""
    settle_heap()
    ask_for_slices(SHORT_S, inherited=False)


def settle_heap() -> None:
    """Take what is alive now (modules, weights, tables) out of the garbage collector's rounds.

    A full round over everything torch imports stops every thread for 15 to 25 ms, and what a
    server allocates while it serves brings rounds about.
    """
    gc.collect()
    gc.freeze()
