"""Tokens and the gaps between them, second by second, for as long as a page shows.

Owns a ring of :data:`SECONDS` bins. Invariant: memory is fixed; gaps are kept as counts in
buckets that grow by a quarter, so a quantile is off by 12 % at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

SECONDS = 300
_FIRST_S = 1e-4
_RATIO = 1.25
_PER_LOG = 1 / math.log(_RATIO)
_BUCKETS = 60  # the last one begins at about a minute


class _Bin:
    __slots__ = ("gaps", "second", "tokens")

    def __init__(self) -> None:
        self.second = -1
        self.tokens = 0
        self.gaps = [0] * _BUCKETS


class Pulse:
    """See the module. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bins = [_Bin() for _ in range(SECONDS)]

    def add(self, tokens: int, gap_s: float | None) -> None:
        """``tokens`` have come now, each ``gap_s`` after the one before it."""
        second = int(self._clock())
        found = self._bins[second % SECONDS]
        if found.second != second:
            found.second, found.tokens, found.gaps = second, 0, [0] * _BUCKETS
        found.tokens += tokens
        if gap_s is not None:
            found.gaps[_bucket(gap_s)] += tokens

    def since(self, second: int) -> dict[str, object]:
        """Whole seconds after ``second`` (the newest is the last one that is over): tokens, and
        the median and 99th percentile of the gaps in milliseconds (``None`` without one)."""
        now = int(self._clock())
        if second >= now:  # of another server, or of this machine before it was started again
            second = -1
        first = max(second + 1, now - SECONDS + 1, 0)
        bins = []
        for wanted in range(first, now):
            found = self._bins[wanted % SECONDS]
            if found.second == wanted:
                row = [found.tokens, _quantile(found.gaps, 0.5), _quantile(found.gaps, 0.99)]
            else:
                row = [0, None, None]
            bins.append(row)
        return {"first": first, "bins": bins}


def _bucket(gap_s: float) -> int:
    if gap_s <= _FIRST_S:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(gap_s / _FIRST_S) * _PER_LOG))


def _quantile(counts: list[int], share: float) -> float | None:
    """The middle (geometric) of the bucket the quantile is in, in milliseconds."""
    total = sum(counts)
    if not total:
        return None
    below = itertools.accumulate(counts)
    index = next(i for i, reached in enumerate(below) if reached >= share * total)
    middle = _FIRST_S * _RATIO ** (index - 0.5) if index else _FIRST_S
    return round(middle * 1e3, 3)
