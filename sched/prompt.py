"""How soon the loop's thread gets the interpreter back from threads that compute in Python.

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


def settle_heap() -> None:
    """Take what is alive now (modules, weights, tables) out of the garbage collector's rounds.

    A full round over everything torch imports stops every thread for 15 to 25 ms, and staging's
    many small objects bring rounds about. For who owns the process, once, when it is ready.
    """
    gc.collect()
    gc.freeze()
