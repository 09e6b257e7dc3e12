"""The heap of the host device: anonymous private mappings, and the tables that judge addresses.

What it owns: every mapping, the byte count against the limit, and the sorted table of address
ranges. Each allocation is its own mapping, so that freeing returns its memory to the system.

Invariants:

* the table is an immutable snapshot replaced as a whole under a lock, so lookups take no lock;
* `used` equals the sum of the rounded sizes of the live blocks;
* checked: a freed range stays mapped (poisoned while it is in quarantine) and is never handed out
  again, and the redzones before and after each block hold `REDZONE` from allocation to free.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from pathlib import Path
from typing import Final, Literal

from ..errors import DeviceError
from .device import ALIGNMENT

Kind = Literal["device", "pinned"]

FRESH_BYTE: Final = 0xA5
FREED_BYTE: Final = 0xDD
REDZONE: Final = bytes([0xFB]) * ALIGNMENT
QUARANTINE_BYTES: Final = 256 << 20
"""Freed bytes that stay poisoned.

Older ones give their pages back and keep only their address range.
"""
REMEMBERED_FREES: Final = 1024
"""Freed ranges an unchecked heap can still name in an error."""
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


class Block:
    """One allocation: its user range, and the mapping around it."""

    __slots__ = (
        "end",
        "kind",
        "label",
        "live",
        "map_end",
        "map_start",
        "mapping",
        "nbytes",
        "serial",
        "start",
    )

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
        self.mapping = mapping
        self.map_start = map_start
        self.map_end = map_start + len(mapping)
        self.start = start
        self.end = start + nbytes
        self.nbytes = nbytes
        self.kind: Kind = kind
        self.label = label
        self.serial = serial
        self.live = True


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Heap:
    """Allocations of one host device.

    Args:
        limit: bytes all live blocks together may take.
        checked: redzones, poison, and ranges that are never reused.
        quarantine_bytes: freed bytes that stay poisoned (checked only).
    """

    def __init__(
        self, limit: int, *, checked: bool, quarantine_bytes: int = QUARANTINE_BYTES
    ) -> None:
        self.limit = limit
        self.checked = checked
        self.used = 0
        self.frees = (
            0  # counts frees, so that a graph validated before the last free is known to be stale
        )
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._table: tuple[list[int], list[Block]] = ([], [])
        self._quarantine: deque[Block] = deque()
        self._quarantined = 0
        self._quarantine_bytes = quarantine_bytes
        self._recent: OrderedDict[int, Block] = OrderedDict()

    def alloc(self, nbytes: int, kind: Kind, label: str) -> int:
        """Map a block. Codes: bad-argument, out-of-memory."""
        if nbytes <= 0 or not label:
            raise DeviceError(
                "an allocation needs a label and at least one byte",
                code="bad-argument",
                subject=label,
                expected="> 0",
                found=nbytes,
            )
        size = _rounded(nbytes)
        with self._lock:
            if self.used + size > self.limit:
                raise DeviceError(
                    f"out of {kind} memory",
                    code="out-of-memory",
                    subject=label,
                    expected=f"at most {self.limit - self.used} bytes",
                    found=nbytes,
                )
            self.used += size
        try:
            mapping = mmap.mmap(
                -1,
                size + 2 * ALIGNMENT if self.checked else size,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except (OSError, OverflowError, ValueError) as error:
            with self._lock:
                self.used -= size
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
            self._blocks[start] = block
            self._recent.pop(start, None)
            starts, blocks = self._table
            at = bisect_right(starts, map_start)
            self._table = (
                [*starts[:at], map_start, *starts[at:]],
                [*blocks[:at], block, *blocks[at:]],
            )
        return start

    def free(self, addr: int, kind: Kind) -> None:
        """Give a block back.

        Codes: double-free, bad-address, redzone-broken (freed all the same).
        """
        with self._lock:
            block = self._blocks.get(addr)
            if block is None or block.kind != kind:
                raise self._free_refusal(addr, kind)
            del self._blocks[addr]
            block.live = False
            self.frees += 1
            self.used -= _rounded(block.nbytes)
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

    def labels(self) -> tuple[str, ...]:
        """Labels of the live blocks, oldest first."""
        with self._lock:
            return tuple(block.label for block in self._blocks.values())

    def close(self) -> DeviceError | None:
        """Unmap everything; returns the first broken redzone."""
        with self._lock:
            damage: DeviceError | None = None
            for block in self._blocks.values():
                damage = damage or self._redzone_damage(block)
            for block in self._table[1]:
                block.live = False
                block.mapping.close()
            self._blocks.clear()
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
        starts, blocks = self._table
        at = bisect_right(starts, block.map_start) - 1
        self._table = (starts[:at] + starts[at + 1 :], blocks[:at] + blocks[at + 1 :])
        block.mapping.close()
        self._recent[block.start] = block
        if len(self._recent) > REMEMBERED_FREES:
            self._recent.popitem(last=False)

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
        for block in reversed(self._recent.values()):
            if block.start <= addr < block.end:
                return block
        return None

    def _free_refusal(self, addr: int, kind: Kind) -> DeviceError:
        freed = self._freed(addr)
        if freed is not None and freed.start == addr and freed.kind == kind:
            return DeviceError("freed twice", code="double-free", subject=freed.label)
        inside = self.covers(addr)
        return DeviceError(
            f"{addr:#x} is not the start of a live {kind} allocation",
            code="bad-address",
            subject=inside.label if inside is not None else None,
        )

    def _refusal(self, addr: int, nbytes: int, kind: Kind | None) -> DeviceError:
        block = self.covers(addr)
        if nbytes < 0:
            return DeviceError("a negative size", code="bad-argument", found=nbytes)
        if block is None or not block.live:
            freed = self._freed(addr)
            if freed is None:
                return DeviceError(f"{addr:#x} is in no allocation", code="bad-address")
            return DeviceError("used after free", code="use-after-free", subject=freed.label)
        if kind is not None and block.kind != kind:
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
