"""What a CUDA device knows of its allocations: ranges, labels, what was freed.

What it owns: the table of live ranges and a bounded memory of freed ones. It allocates nothing
itself. The driver hands freed addresses out again, so a range is dead only while nobody new holds
it.

Invariants: the table is an immutable snapshot replaced as a whole, so look-ups take no lock;
`used` is the sum of the rounded sizes of the live blocks.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import Final, Literal

from ..errors import DeviceError
from .device import ALIGNMENT

Kind = Literal["device", "pinned"]
REMEMBERED_FREES: Final = 1024


class CudaBlock:
    """One allocation. ``live`` until it is freed."""

    __slots__ = ("end", "kind", "label", "live", "nbytes", "serial", "start")

    def __init__(self, start: int, nbytes: int, kind: Kind, label: str, serial: int) -> None:
        self.start = start
        self.end = start + nbytes
        self.nbytes = nbytes
        self.kind: Kind = kind
        self.label = label
        self.serial = serial
        self.live = True


def rounded(nbytes: int) -> int:
    """Bytes an allocation takes of the limit."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class CudaHeap:
    """The ranges of one device. ``limit``: bytes they may take together, ``None`` = no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        self.frees = 0
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._live: OrderedDict[int, CudaBlock] = OrderedDict()
        self._freed: OrderedDict[int, CudaBlock] = OrderedDict()
        self._table: tuple[list[int], list[CudaBlock]] = ([], [])

    def reserve(self, nbytes: int, kind: Kind, label: str) -> None:
        """Count an allocation against the limit. Codes: bad-argument, out-of-memory."""
        if nbytes <= 0 or not label:
            raise DeviceError(
                "an allocation needs a label and at least one byte",
                code="bad-argument",
                subject=label,
                expected="> 0",
                found=nbytes,
            )
        with self._lock:
            if self.limit is not None and self.used + rounded(nbytes) > self.limit:
                raise DeviceError(
                    f"out of {kind} memory",
                    code="out-of-memory",
                    subject=label,
                    expected=f"at most {self.limit - self.used} bytes",
                    found=nbytes,
                )
            self.used += rounded(nbytes)

    def unreserve(self, nbytes: int) -> None:
        """Take back `reserve` for an allocation that was refused."""
        with self._lock:
            self.used -= rounded(nbytes)

    def add(self, start: int, nbytes: int, kind: Kind, label: str) -> None:
        """Enter what the driver gave for a reservation."""
        with self._lock:
            self._enter(CudaBlock(start, nbytes, kind, label, next(self._serials)))

    def _enter(self, block: CudaBlock) -> None:
        start = block.start
        self._live[start] = block
        self._freed.pop(start, None)
        starts, blocks = self._table
        at = bisect_right(starts, start)
        self._table = ([*starts[:at], start, *starts[at:]], [*blocks[:at], block, *blocks[at:]])

    def owned(self, addr: int, kind: Kind) -> CudaBlock:
        """The live block that starts at an address. Codes: double-free, bad-address."""
        block = self._live.get(addr)
        if block is not None and block.kind == kind:
            return block
        freed = self._freed.get(addr)
        if block is None and freed is not None and freed.kind == kind:
            raise DeviceError("freed twice", code="double-free", subject=freed.label)
        inside = self.covers(addr)
        raise DeviceError(
            f"{addr:#x} is not the start of a live {kind} allocation",
            code="bad-address",
            subject=inside.label if inside is not None else None,
        )

    def remove(self, block: CudaBlock) -> None:
        """Forget a block before the driver is asked to take it back: from here on it is dead."""
        with self._lock:
            del self._live[block.start]
            starts, blocks = self._table
            at = bisect_right(starts, block.start) - 1
            self._table = (starts[:at] + starts[at + 1 :], blocks[:at] + blocks[at + 1 :])
            block.live = False
            self.used -= rounded(block.nbytes)
            self.frees += 1
            self._freed[block.start] = block
            if len(self._freed) > REMEMBERED_FREES:
                self._freed.popitem(last=False)

    def restore(self, block: CudaBlock) -> None:
        """Enter a block again that the driver would not take back."""
        with self._lock:
            block.live = True
            self.used += rounded(block.nbytes)
            self._enter(block)

    def find(self, addr: int, nbytes: int, kind: Kind) -> CudaBlock:
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
        raise self._refusal(addr, nbytes, kind)

    def covers(self, addr: int) -> CudaBlock | None:
        """The live block that holds this address."""
        starts, blocks = self._table
        at = bisect_right(starts, addr) - 1
        return blocks[at] if at >= 0 and addr < blocks[at].end else None

    def freed(self, addr: int) -> CudaBlock | None:
        """The remembered freed block that held this address."""
        for block in reversed(self._freed.values()):
            if block.start <= addr < block.end:
                return block
        return None

    def blocks(self) -> tuple[CudaBlock, ...]:
        """Live blocks, oldest first."""
        with self._lock:
            return tuple(self._live.values())

    def _refusal(self, addr: int, nbytes: int, kind: Kind) -> DeviceError:
        if nbytes < 0:
            return DeviceError("a negative size", code="bad-argument", found=nbytes)
        # The end of a block belongs to it here: a range may be empty there, and an overrun that
        # starts there is named after it.
        starts, blocks = self._table
        at = bisect_right(starts, addr) - 1
        near = blocks[at] if at >= 0 and addr <= blocks[at].end + ALIGNMENT else None
        block = self.covers(addr)
        if block is None:
            freed = self.freed(addr)
            if freed is not None:
                return DeviceError("used after free", code="use-after-free", subject=freed.label)
            if near is None:
                return DeviceError(f"{addr:#x} is in no allocation", code="bad-address")
            block = near
        if block.kind != kind:
            return DeviceError(
                f"{addr:#x} is {block.kind} memory",
                code="bad-address",
                subject=block.label,
                expected=kind,
                found=block.kind,
            )
        return DeviceError(
            "a range leaves its allocation",
            code="out-of-bounds",
            subject=block.label,
            expected=f"inside {block.nbytes} bytes",
            found=f"{nbytes} bytes at offset {addr - block.start}",
        )
