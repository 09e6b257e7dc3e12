"""The annex arena: which bytes of it each slot's adapter has.

What an adapter has of experts, token matrices and token overlay lies in one extent of its own.
Owns the extents, by slot, the one *claim*: the bytes that are kept free, or being freed, for
one waiting job, and what a new arena *keeps* for those who were pinned in the old one. Pure and
deterministic: the same calls give the same offsets. Invariants: extents lie within the arena and
never overlap; holes need no books, they are what lies between extents; only its own job is placed
inside the claim, or inside what is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .story import Log

#: How dear it is to empty the extent of a slot; the dearest in a window counts.
Weight = tuple[int, int]
FREE: Weight = (0, 0)


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """``nbytes`` bytes from ``offset``."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: Extent) -> bool:
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Claim:
    """What is kept for job ``job``: nobody else is placed there."""

    job: int
    extent: Extent


class Arena:
    """``total`` bytes. ``total`` and all sizes are multiples of one alignment, so offsets are."""

    def __init__(self, total: int, log: Log) -> None:
        self.total = total
        self.claim: Claim | None = None
        #: By job, from before anything else was placed.
        self.kept: dict[int, Extent] = {}
        self._extents: dict[int, Extent] = {}
        self._log = log

    def of(self, slot: int) -> Extent | None:
        """The extent of a slot's adapter."""
        return self._extents.get(slot)

    def inside(self, window: Extent) -> list[int]:
        """The slots with bytes in ``window``, by offset."""
        held = sorted((e, s) for s, e in self._extents.items() if e.overlaps(window))
        return [slot for _, slot in held]

    def take(self, slot: int, extent: Extent) -> None:
        """Give ``extent`` to ``slot``. Raises InternalError if that is not free."""
        subject = f"slot {slot}"
        if not 0 <= extent.offset < extent.end <= self.total:
            raise self._log.broken(subject, f"{extent} is not in the arena")
        if slot in self._extents or self.inside(extent):
            raise self._log.broken(subject, f"{extent} is taken")
        self._extents[slot] = extent

    def give_back(self, slot: int) -> bool:
        """Free what ``slot`` has, if anything; whether it had."""
        return self._extents.pop(slot, None) is not None

    def window(
        self,
        nbytes: int,
        weight: Callable[[int], Weight | None],
        job: int = -1,
        *,
        ever: bool = False,
    ) -> Extent | None:
        """Where ``nbytes`` would lie if the extents in the way went: the hole that fits best, else
        the place whose dearest extent is the cheapest. ``weight``: of a slot's extent, ``None`` if
        it must stay. What is claimed by or kept for another job than ``job`` stays too (-1: that is
        no matter); ``ever``: a claim, which ends, does not."""
        held = sorted((e, s) for s, e in self._extents.items())
        weights = [weight(slot) for _, slot in held]
        starts, ends = [e.offset for e, _ in held], [e.end for e, _ in held]
        best: tuple[tuple[Weight, int, int, int], Extent] | None = None
        for low, high in self._open(job, ever):
            for offset in self._places(low, high, nbytes, starts, ends):
                first = bisect_right(ends, offset)
                last = bisect_left(starts, offset + nbytes)
                found = weights[first:last]
                known = [w for w in found if w is not None]
                if len(known) < len(found):
                    continue
                hole = 0
                if not found:
                    before = max([low, *ends[first - 1 : first]]) if first else low
                    after = min([high, *starts[last : last + 1]])
                    hole = after - before
                cost = (max(known, default=FREE), len(found), hole, offset)
                if best is None or cost < best[0]:
                    best = cost, Extent(offset, nbytes)
        return None if best is None else best[1]

    def _open(self, job: int, ever: bool) -> Iterator[tuple[int, int]]:
        """The ranges that ``job`` may be placed in."""
        begin = 0
        if job >= 0:
            others = [extent for other, extent in self.kept.items() if other != job]
            if self.claim is not None and self.claim.job != job and not ever:
                others.append(self.claim.extent)
            for extent in sorted(others):
                yield begin, extent.offset
                begin = extent.end
        yield begin, self.total

    @staticmethod
    def _places(low: int, high: int, nbytes: int, starts: list[int], ends: list[int]) -> list[int]:
        """Offsets worth a look: a window moved to the next extent's edge meets no other ones."""
        edges = {low, high - nbytes, *ends, *(start - nbytes for start in starts)}
        return sorted(offset for offset in edges if low <= offset and offset + nbytes <= high)

    def keep_for(self, job: int, extent: Extent) -> None:
        """Claim ``extent`` for ``job``. Raises InternalError if there is a claim already."""
        if self.claim is not None:
            raise self._log.broken("arena", f"job {self.claim.job} has the claim")
        self.claim = Claim(job, extent)
        self._log.add("arena", f"{extent.nbytes} bytes at {extent.offset} claimed by job {job}")

    def keep(self, sizes: dict[int, int]) -> None:
        """Keep this many bytes for each of these jobs. Raises InternalError unless the arena is
        empty and they fit."""
        end = 0
        for job, nbytes in sizes.items():
            self.kept[job] = Extent(end, nbytes)
            end += nbytes
        if self._extents or end > self.total:
            raise self._log.broken("arena", f"keeps {end} of {self.total} bytes")

    def unclaim(self, job: int) -> bool:
        """End what is claimed by or kept for ``job``; whether anything was."""
        if self.kept.pop(job, None) is not None:
            return True
        if self.claim is None or self.claim.job != job:
            return False
        self.claim = None
        self._log.add("arena", f"claim of job {job} ended")
        return True

    @property
    def used(self) -> int:
        """Bytes given out."""
        return sum(e.nbytes for e in self._extents.values())

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest extent that could be given out as it is."""
        end, largest = 0, 0
        for extent in sorted(self._extents.values()):
            end, largest = extent.end, max(largest, extent.offset - end)
        return max(largest, self.total - end)

    def check(self, wanted: dict[int, int]) -> None:
        """``wanted``: slot -> bytes its adapter needs, of slots that hold or await one."""
        if {s: e.nbytes for s, e in self._extents.items()} != wanted:
            raise self._log.broken("arena", "extents and adapters disagree")
        end = 0
        for extent in sorted(self._extents.values()):
            if extent.offset < end:
                raise self._log.broken("arena", f"{extent} overlaps what lies before it")
            end = extent.end
        if end > self.total:
            raise self._log.broken("arena", f"given out to {end} of {self.total} bytes")
