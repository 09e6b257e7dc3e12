"""How long commits, their barriers and the phases of staging take.

Owns the counts. Written by two threads that never write the same histogram (commits: the device
thread; phases: the loop), read by the loop; a reader may miss the newest value, never see half a
list. Decides nothing: a clock in here never changes what the engine does.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .core.spread import EDGES_S, PHASES, Spread, Times


class Histogram:
    """Counts in fixed buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(EDGES_S, seconds)] += 1
        self._total_s += seconds

    def spread(self) -> Spread:
        return Spread(tuple(self._counts), self._total_s)


class TimedCommit:
    """A device job with its two times. ``func``: what it calls, as a partial's (a simulated device
    tells by it how long the job takes)."""

    def __init__(
        self, job: partial[Any], clock: Callable[[], float], barrier: Histogram, work: Histogram
    ) -> None:
        self.func = job.func
        self._job = job
        self._clock = clock
        self._barrier = barrier
        self._work = work
        self._decided = clock()

    def __call__(self) -> Any:
        begin = self._clock()
        self._barrier.add(begin - self._decided)
        try:
            return self._job()
        finally:
            self._work.add(self._clock() - begin)


class Timings:
    """See the module. ``clock``: seconds, monotonic, the same on every thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._barrier = Histogram()
        self._commit = Histogram()
        self._phases = {name: Histogram() for name in PHASES}

    def commit(self, job: partial[Any]) -> TimedCommit:
        """``job``, timed: it has been decided now and will run on the device thread."""
        return TimedCommit(job, self._clock, self._barrier, self._commit)

    def staged(self, seconds: Mapping[str, float]) -> None:
        """A stage is over; phases without a name in :data:`PHASES` are not counted."""
        for name, histogram in self._phases.items():
            if name in seconds:
                histogram.add(seconds[name])

    def snapshot(self) -> Times:
        """A frozen copy."""
        phases = tuple(histogram.spread() for histogram in self._phases.values())
        return Times(self._barrier.spread(), self._commit.spread(), phases)
