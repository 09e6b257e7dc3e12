"""Real progress, measured: when sequences ended, commands were answered, how long a step takes.

Owns the measurements that ``retry`` turns into hints. Invariants: bounded memory; every time comes
from the caller, so that a replay measures the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW = 32
_NEW_STEP_WEIGHT = 0.2


class Progress:
    """``ended``: when the last :data:`WINDOW` sequences that had run ended; ``answered``: the same
    of commands; ``step_s``: moving average of the seconds from one finished step to the next (or
    from its planning, whichever was later), ``None`` before the first. All times in seconds."""

    def __init__(self) -> None:
        self.ended: deque[float] = deque(maxlen=WINDOW)
        self.answered: deque[float] = deque(maxlen=WINDOW)
        self.step_s: float | None = None
        self._last_step = 0.0

    def step_over(self, planned: float, now: float) -> None:
        took = max(0.0, now - max(planned, self._last_step))
        self._last_step = now
        if self.step_s is None:
            self.step_s = took
        else:
            self.step_s += _NEW_STEP_WEIGHT * (took - self.step_s)


def mean_gap(times: Sequence[float], now: float) -> float | None:
    """Mean seconds between the events of ``times`` (oldest first), with ``now`` as one more that is
    just due: so the gap grows when nothing happens any more. ``None`` without any."""
    return (now - times[0]) / len(times) if times else None
