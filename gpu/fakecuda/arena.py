"""The memory of the fake driver: one reserved range of addresses, handed out once.

What it owns: an anonymous mapping that costs memory only where it was written, and the table of
allocations in it. Device and pinned allocations both live here, so a kernel may follow a pinned
address as it may on a machine with unified addressing.

Invariants: an address is never handed out twice; at least `GAP` bytes that belong to nobody lie
between two allocations; fresh bytes are 0xFF (NaN in every float format), so that what nobody wrote
shows in results; a freed range gives its pages back and stays refused for ever.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["device", "pinned"]
MAP_NORESERVE: Final = 0x4000
"""Linux: reserve addresses, not memory (named in mmap only from Python 3.13 on)."""
ALIGNMENT: Final = 512
GAP: Final = 512
FRESH: Final = 0xFF
ARENA_BYTES: Final = 1 << 35
FRESH_LIMIT: Final = 64 << 20
"""Larger allocations keep zero pages beyond this many bytes: they would only cost memory."""

Addresses = npt.NDArray[np.uint64]


class AccessError(Exception):
    """A kernel did something a GPU would not survive, or must not do; ``code`` is the CUresult."""

    def __init__(self, text: str, code: int = 719) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class Allocation:
    """One allocation; ``live`` until it is freed."""

    start: int
    nbytes: int
    kind: Kind
    live: bool = True

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.start + self.nbytes


class Arena:
    """Allocations of one fake device.

    Args:
        limit: bytes of device memory that may be alive at once.
        nbytes: address space to reserve; all of it is used once, then allocations fail.
    """

    def __init__(self, limit: int, nbytes: int = ARENA_BYTES) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._views: dict[int, npt.NDArray[np.unsignedinteger]] = {}
        self.nbytes = nbytes
        self.limit = limit
        self.used = 0
        self._next = -(-self.base // ALIGNMENT) * ALIGNMENT + GAP
        self._starts: list[int] = []
        self._all: list[Allocation] = []
        self._table: tuple[Addresses, Addresses] | None = None

    def alloc(self, nbytes: int, kind: Kind) -> Allocation | None:
        """A fresh range, or ``None`` when there is no room."""
        span = -(-nbytes // ALIGNMENT) * ALIGNMENT
        over = kind == "device" and self.used + nbytes > self.limit
        if over or self._next + span + GAP > self.base + self.nbytes:
            return None
        made = Allocation(self._next, nbytes, kind)
        self._next += span + GAP
        if kind == "device":
            self.used += nbytes
        at = made.start - self.base
        self.bytes[at : at + min(nbytes, FRESH_LIMIT)] = FRESH
        self._starts.append(made.start)
        self._all.append(made)
        self._table = None
        return made

    def free(self, start: int, kind: Kind) -> bool:
        """Give a range back; false if it is not the start of a live allocation of this kind."""
        found = self.covers(start)
        if found is None or found.start != start or found.kind != kind or not found.live:
            return False
        found.live = False
        if kind == "device":
            self.used -= found.nbytes
        self._table = None
        first = -(-(start - self.base) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (found.end - self.base) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        return True

    def live(self) -> list[Allocation]:
        """What was not freed, oldest first."""
        return [one for one in self._all if one.live]

    def covers(self, addr: int) -> Allocation | None:
        """The allocation, live or freed, that holds this address."""
        at = bisect_right(self._starts, addr) - 1
        if at >= 0 and addr < self._all[at].end:
            return self._all[at]
        return None

    def contains(self, addr: int) -> bool:
        """True if the address is the arena's, allocated or not."""
        return self.base <= addr < self.base + self.nbytes

    def judge(self, addr: int, nbytes: int, kind: Kind | None, what: str) -> None:
        """Raise `AccessError` unless one live allocation holds ``addr..addr+nbytes``."""
        found = self.covers(addr)
        if (
            found is not None
            and found.live
            and addr + nbytes <= found.end
            and kind in (None, found.kind)
        ):
            return
        raise AccessError(f"{what}: {self.describe(addr, nbytes)}", 700)

    def describe(self, addr: int, nbytes: int) -> str:
        """What is wrong with a range, in words."""
        found = self.covers(addr)
        if found is not None and not found.live:
            return f"{addr:#x}+{nbytes} is used after free"
        if found is not None and addr + nbytes <= found.end:
            return f"{addr:#x}+{nbytes} is {found.kind} memory"
        at = bisect_right(self._starts, addr) - 1
        if at < 0:
            return f"{addr:#x}+{nbytes} is outside every allocation"
        near = self._all[at]
        past = addr + nbytes - near.end
        return (
            f"{addr:#x}+{nbytes} is out of bounds: {past} bytes past the end of the "
            f"{near.kind} allocation of {near.nbytes} bytes at {near.start:#x}"
        )

    def judge_lanes(self, addr: Addresses, nbytes: int, what: str) -> None:
        """As `judge` and the alignment rule, for the address of every lane."""
        if self._table is None:
            alive = self.live()
            self._table = (
                np.array([one.start for one in alive] or [0], np.uint64),
                np.array([one.end for one in alive] or [0], np.uint64),
            )
        starts, ends = self._table
        at = np.searchsorted(starts, addr, side="right").astype(np.int64) - 1
        good = (at >= 0) & (addr + np.uint64(nbytes) <= ends[np.maximum(at, 0)])
        if not good.all():
            raise AccessError(f"{what}: {self.describe(int(addr[~good][0]), nbytes)}", 700)
        if nbytes > 1 and (addr & np.uint64(nbytes - 1)).any():
            bad = int(addr[(addr & np.uint64(nbytes - 1)) != 0][0])
            raise AccessError(f"{what}: misaligned {nbytes}-byte access at {bad:#x}", 716)

    def view(self, itemsize: int) -> npt.NDArray[np.unsignedinteger]:
        """The whole arena as unsigned integers of this size, from its base."""
        found = self._views.get(itemsize)
        if found is None:
            found = self._views[itemsize] = self.bytes.view(np.dtype(f"u{itemsize}"))
        return found

    def release(self) -> None:
        """Give every page back; the addresses stay the process's own and are never used again."""
        self._map.madvise(mmap.MADV_DONTNEED, 0, self.nbytes)
