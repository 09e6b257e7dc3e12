"""Host buffers that files are read into and slots are packed in.

What it owns: the mappings of large buffers, those in use and a bounded rest that waits for its next
use. Invariants: a buffer begins a page, since kernels of the host may read weights straight from
it; whoever drops the last array over a large one never waits for the system to take it back (for
200 MB of small pages that is 5 ms, on an event loop's thread perhaps, and with the interpreter
held); what waits stays within its bounds.

A buffer that waited has its pages: taking fresh ones costs more than what is written there. The C
library keeps small ones as well as we could.

A large buffer begins a huge page and has its last one to itself, so that all of it gets them: a
step reads every adapter in use once, and with small pages much of that time goes into finding
addresses.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..host_memory import HUGE_PAGE

PAGE: Final = 4096
MAPPED: Final = 1 << 20
"""Bytes from which a buffer is a mapping of its own."""
LARGE: Final = 4 * HUGE_PAGE
"""Bytes from which a buffer takes whole huge pages; it wastes less than one of them."""
KEPT_BYTES: Final = 256 << 20
KEPT_COUNT: Final = 64
"""What may wait for its next use: the bytes of one staging of a large adapter, about."""


def _rounded(nbytes: int) -> tuple[int, int]:
    """Whole pages, and how large those are."""
    align = HUGE_PAGE if nbytes >= LARGE else PAGE
    return -(-nbytes // align) * align, align


class _Mapping:
    """``nbytes`` from ``start`` on, private to this process; what is over them is theirs."""

    __slots__ = ("nbytes", "pages", "start")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, align = _rounded(nbytes)
        # The system begins a mapping at any page; one that is not touched costs nothing.
        size = self.nbytes + align - PAGE
        try:
            self.pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"no {size} bytes of host memory") from error
        if size >= 2 * HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a system without them
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.start = begin + -begin % align


class _Use:
    """What an array over a mapping is based on; gone with the last of them."""

    __slots__ = ("__array_interface__", "_give_back", "_mapping")

    def __init__(
        self, mapping: _Mapping, nbytes: int, give_back: Callable[[_Mapping], None]
    ) -> None:
        self._mapping, self._give_back = mapping, give_back
        self.__array_interface__: dict[str, Any] = {
            "data": (mapping.start, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back(self._mapping)


def _unmap(mapping: _Mapping) -> None:
    mapping.pages.close()  # gives up the interpreter meanwhile


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for its next use, and how many mappings that is."""

    nbytes: int
    count: int


class Buffers:
    """Large buffers, safe for many threads.

    Args:
        keep_bytes: of mappings that wait for their next use; the longest unused go first.
        keep_count: of such mappings.
        unmap: gives one to the system; called on a thread of its own.
    """

    def __init__(
        self,
        keep_bytes: int = KEPT_BYTES,
        keep_count: int = KEPT_COUNT,
        unmap: Callable[[_Mapping], None] = _unmap,
    ) -> None:
        self._keep_bytes, self._keep_count, self._unmap = keep_bytes, keep_count, unmap
        # An array dies anywhere, even where the collector runs with this very lock held: what is
        # given back is noted without it, and sorted by whoever has it.
        self._lock = threading.Lock()
        self._back: deque[_Mapping] = deque()
        self._kept: deque[_Mapping] = deque()
        self._kept_bytes = 0
        self._over: deque[_Mapping] = deque()
        self._unmapping = False

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Uninitialised uint8 ``[nbytes]``; on what waited, where an eighth more at most is there.
        Raises MemoryError, when there is too little even without what waits."""
        with self._lock:
            found = self._fitting(nbytes)
        self._sort()
        mapping = self._fresh(nbytes) if found is None else found
        return np.asarray(_Use(mapping, nbytes, self._give_back))

    def _fresh(self, nbytes: int) -> _Mapping:
        try:
            return _Mapping(nbytes)
        except MemoryError:
            if not self._give_all_up():
                raise
        return _Mapping(nbytes)

    def _give_all_up(self) -> bool:
        """Unmap all that waits, while the caller does; False if there was nothing."""
        with self._lock:
            mappings = [*self._kept, *self._over]
            self._kept.clear()
            self._over.clear()
            self._kept_bytes = 0
        self._sort()
        for mapping in mappings:
            self._unmap(mapping)
        return bool(mappings)

    @property
    def waiting(self) -> Waiting:
        """How much waits now."""
        with self._lock:
            return Waiting(self._kept_bytes, len(self._kept))

    def forked(self) -> None:
        """In a child process: whatever thread had the lock, or unmapped, is not there."""
        self._lock, self._unmapping = threading.Lock(), False
        self._kept_bytes = sum(mapping.nbytes for mapping in self._kept)

    def _fitting(self, nbytes: int) -> _Mapping | None:
        """The one used last that fits, no longer waiting (under the lock)."""
        size, _ = _rounded(nbytes)
        for mapping in reversed(self._kept):
            if size <= mapping.nbytes <= size + size // 8:
                self._kept.remove(mapping)
                self._kept_bytes -= mapping.nbytes
                return mapping
        return None

    def _give_back(self, mapping: _Mapping) -> None:
        self._back.append(mapping)
        self._sort()

    def _sort(self) -> None:
        """Keep what came back, and hand on what is too much. Waits for nobody: who has the lock
        looks again once it is free."""
        while self._back and self._lock.acquire(blocking=False):
            try:
                while self._back:
                    mapping = self._back.popleft()
                    self._kept.append(mapping)
                    self._kept_bytes += mapping.nbytes
                while self._kept_bytes > self._keep_bytes or len(self._kept) > self._keep_count:
                    mapping = self._kept.popleft()
                    self._kept_bytes -= mapping.nbytes
                    self._over.append(mapping)
                begin = bool(self._over) and not self._unmapping
                self._unmapping |= begin
            finally:
                self._lock.release()
            if begin:
                self._begin()

    def _begin(self) -> None:
        try:
            # `Thread.start` would wait for the thread, and takes locks that may be held here.
            _thread.start_new_thread(self._give_up, ())
        except RuntimeError:  # no more threads, or the interpreter is ending
            self._give_up()

    def _give_up(self) -> None:
        """Unmap until nothing is too much."""
        while True:
            with self._lock:
                mapping = self._over.popleft() if self._over else None
                self._unmapping = mapping is not None
            self._sort()
            if mapping is None:
                return
            self._unmap(mapping)


_BUFFERS: Final = Buffers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_BUFFERS.forked)


def blank(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised uint8 ``[nbytes]``. Raises MemoryError."""
    if nbytes >= MAPPED:
        return _BUFFERS.take(nbytes)
    whole = np.empty(-(-nbytes // PAGE) * PAGE + PAGE, np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % PAGE
    return whole[start : start + nbytes]
