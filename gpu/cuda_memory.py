"""What a CUDA device knows of its allocations: ranges, labels, what was freed.

What it owns: the ranges (`ranges.Ranges`). It allocates nothing itself. The driver hands freed
addresses out again, so a range is dead only while nobody new holds it.
"""

from __future__ import annotations

import sys
from bisect import bisect_right

from .device import ALIGNMENT
from .ranges import Kind, Range, Ranges, not_a_start, rounded, unusable


class CudaHeap(Ranges[Range]):
    """The ranges of one device. ``limit``: bytes they may take together, ``None`` = no limit."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(sys.maxsize if limit is None else limit)

    def add(self, start: int, nbytes: int, kind: Kind, label: str) -> None:
        """Enter what the driver gave for a reservation."""
        with self._lock:
            self._insert(start, Range(start, nbytes, kind, label, next(self._serials)))

    def owned(self, addr: int, kind: Kind) -> Range:
        """The live block that starts at an address. Codes: double-free, bad-address."""
        block = self._live.get(addr)
        if block is not None and block.kind == kind:
            return block
        freed = self._recent.get(addr) if block is None else None
        raise not_a_start(addr, kind, freed, self.covers(addr))

    def remove(self, block: Range) -> None:
        """Forget a block before the driver is asked to take it back: from here on it is dead."""
        with self._lock:
            del self._live[block.start]
            block.live = False
            self.used -= rounded(block.nbytes)
            self.frees += 1
            self._take_out(block.start, block)

    def restore(self, block: Range) -> None:
        """Enter a block again that the driver would not take back."""
        with self._lock:
            block.live = True
            self.used += rounded(block.nbytes)
            self._insert(block.start, block)

    def find(self, addr: int, nbytes: int, kind: Kind) -> Range:
        """The live block of this kind that holds all of ``addr..addr+nbytes``.

        Raises:
            DeviceError: bad-address, out-of-bounds or use-after-free, with the block's label.
        """
        starts, blocks = self._table
        at = bisect_right(starts, addr) - 1
        if at >= 0:
            block = blocks[at]
            if block.kind == kind and 0 <= nbytes <= block.end - addr:
                return block
        # The end of a block belongs to it here: a range may be empty there, and an overrun that
        # starts there is named after it, unless somebody used to have what comes next.
        before = blocks[at] if at >= 0 and addr <= blocks[at].end + ALIGNMENT else None
        inside, freed = self.covers(addr), self.freed(addr)
        near = inside if inside is not None or freed is not None else before
        raise unusable(addr, nbytes, kind, near, freed)

    def covers(self, addr: int) -> Range | None:
        """The live block that holds this address."""
        starts, blocks = self._table
        at = bisect_right(starts, addr) - 1
        return blocks[at] if at >= 0 and addr < blocks[at].end else None

    def freed(self, addr: int) -> Range | None:
        """The remembered freed block that held this address."""
        return self._recently(addr)

    def blocks(self) -> tuple[Range, ...]:
        """Live blocks, oldest first."""
        with self._lock:
            return tuple(self._live.values())
