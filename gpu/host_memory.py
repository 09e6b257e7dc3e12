"""The heap of the host device: anonymous private mappings, and what is judged of addresses.

What it owns: every mapping, and the ranges (`ranges.Ranges`). Each allocation is its own mapping,
so that freeing returns its memory to the system. Invariant of a checked heap: a freed range stays
mapped (poisoned while it is in quarantine) and is never handed out again, and the redzones before
and after each block hold `REDZONE` from allocation to free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections import deque
from pathlib import Path
from typing import Final

from ..errors import DeviceError
from .device import ALIGNMENT
from .ranges import Kind, Range, Ranges, not_a_start, rounded, unusable

FRESH_BYTE: Final = 0xA5
FREED_BYTE: Final = 0xDD
REDZONE: Final = bytes([0xFB]) * ALIGNMENT
QUARANTINE_BYTES: Final = 256 << 20
"""Freed bytes that stay poisoned.

Older ones give their pages back and keep only their address range.
"""
HUGE_PAGE: Final = 2 << 20


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes this process can hope for: MemAvailable where the kernel tells, else free pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    physical = os.sysconf("SC_PHYS_PAGES") * page
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[0] == "MemAvailable:" and fields[2] == "kB":
                return min(physical, int(fields[1]) * 1024)
    except (OSError, ValueError):
        pass  # no procfs, or a form we do not know: fall back to what POSIX tells
    return min(physical, os.sysconf("SC_AVPHYS_PAGES") * page)


class Block(Range):
    """One allocation: its user range, and the mapping around it."""

    __slots__ = ("map_end", "map_start", "mapping")

    def __init__(
        self,
        mapping: mmap.mmap,
        map_start: int,
        start: int,
        nbytes: int,
        kind: Kind,
        label: str,
        serial: int,
    ) -> None:
        super().__init__(start, nbytes, kind, label, serial)
        self.mapping = mapping
        self.map_start = map_start
        self.map_end = map_start + len(mapping)


class Heap(Ranges[Block]):
    """Allocations of one host device.

    Args:
        limit: bytes all live blocks together may take.
        checked: redzones, poison, and ranges that are never reused.
        quarantine_bytes: freed bytes that stay poisoned (checked only).
    """

    def __init__(
        self, limit: int, *, checked: bool, quarantine_bytes: int = QUARANTINE_BYTES
    ) -> None:
        super().__init__(limit)
        self.checked = checked
        self._quarantine: deque[Block] = deque()
        self._quarantined = 0
        self._quarantine_bytes = quarantine_bytes

    def alloc(self, nbytes: int, kind: Kind, label: str) -> int:
        """Map a block. Codes: bad-argument, out-of-memory."""
        self.reserve(nbytes, kind, label)
        size = rounded(nbytes)
        try:
            mapping = mmap.mmap(
                -1,
                size + 2 * ALIGNMENT if self.checked else size,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except (OSError, OverflowError, ValueError) as error:
            self.unreserve(nbytes)
            raise DeviceError(
                f"the system refused {kind} memory: {error}",
                code="out-of-memory",
                subject=label,
                found=nbytes,
            ) from error
        map_start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if self.checked:
            start = map_start + ALIGNMENT
            ctypes.memset(map_start, REDZONE[0], len(mapping))
            ctypes.memset(start, FRESH_BYTE, nbytes)
        else:
            start = map_start
            if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        block = Block(mapping, map_start, start, nbytes, kind, label, next(self._serials))
        with self._lock:
            self._insert(map_start, block)
        return start

    def free(self, addr: int, kind: Kind) -> None:
        """Give a block back.

        Codes: double-free, bad-address, redzone-broken (freed all the same).
        """
        with self._lock:
            block = self._live.get(addr)
            if block is None or block.kind != kind:
                raise self._free_refusal(addr, kind)
            del self._live[addr]
            block.live = False
            self.frees += 1
            self.used -= rounded(block.nbytes)
            damage = self._redzone_damage(block)
            if self.checked:
                self._to_quarantine(block)
            else:
                self._forget(block)
        if damage is not None:
            raise damage

    def find(self, addr: int, nbytes: int, kind: Kind | None = None) -> Block:
        """The live block that holds all of ``addr..addr+nbytes``.

        Raises:
            DeviceError: bad-address, out-of-bounds or use-after-free, with the block's label.
        """
        starts, blocks = self._table
        at = bisect_right(starts, addr) - 1
        if at >= 0:
            block = blocks[at]
            if (
                block.live
                and block.start <= addr
                and 0 <= nbytes <= block.end - addr
                and (kind is None or block.kind == kind)
            ):
                return block
        raise self._refusal(addr, nbytes, kind)

    def covers(self, addr: int) -> Block | None:
        """The block, live or freed, whose mapping holds this address."""
        starts, blocks = self._table
        at = bisect_right(starts, addr) - 1
        if at >= 0 and addr < blocks[at].map_end:
            return blocks[at]
        return None

    def close(self) -> DeviceError | None:
        """Unmap everything; returns the first broken redzone."""
        with self._lock:
            damage: DeviceError | None = None
            for block in self._live.values():
                damage = damage or self._redzone_damage(block)
            for block in self._table[1]:
                block.live = False
                block.mapping.close()
            self._live.clear()
            self._table = ([], [])
            self._quarantine.clear()
            self._recent.clear()
            self._quarantined = self.used = 0
            self.frees += 1
        return damage

    def _to_quarantine(self, block: Block) -> None:
        ctypes.memset(block.map_start, FREED_BYTE, len(block.mapping))
        self._quarantine.append(block)
        self._quarantined += len(block.mapping)
        while self._quarantined > self._quarantine_bytes:
            oldest = self._quarantine.popleft()
            self._quarantined -= len(oldest.mapping)
            oldest.mapping.madvise(mmap.MADV_DONTNEED)  # pages go back, the range stays ours

    def _forget(self, block: Block) -> None:
        self._take_out(block.map_start, block)
        block.mapping.close()

    def _redzone_damage(self, block: Block) -> DeviceError | None:
        if not self.checked:
            return None
        before = ctypes.string_at(block.map_start, ALIGNMENT)
        after = ctypes.string_at(block.end, block.map_end - block.end)
        if before == REDZONE and after.count(REDZONE[0]) == len(after):
            return None
        side = "before" if before != REDZONE else "after"
        return DeviceError(
            f"bytes just {side} the allocation were overwritten",
            code="redzone-broken",
            subject=block.label,
        )

    def _freed(self, addr: int) -> Block | None:
        block = self.covers(addr)
        if block is not None and not block.live:
            return block
        return self._recently(addr)

    def _free_refusal(self, addr: int, kind: Kind) -> DeviceError:
        return not_a_start(addr, kind, self._freed(addr), self.covers(addr))

    def _refusal(self, addr: int, nbytes: int, kind: Kind | None) -> DeviceError:
        block = self.covers(addr)
        near = block if block is not None and block.live else None
        return unusable(addr, nbytes, kind, near, self._freed(addr))
