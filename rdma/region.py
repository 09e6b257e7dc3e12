"""Shared memory that a verbs device can register: one region, and an arena of blocks.

A read-only file mapping cannot be registered, so bytes that others may read, or that a device
writes, live in an anonymous shared file mapped read-write. The pages are touched when a region is
made: registering untouched pages would stop every thread for as long as that takes.

What it owns: the mappings. Invariants: memory is never unmapped while it is held (a posted read, a
payload being sent); blocks of an arena never overlap, and one goes back when the last array over it
is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import insort
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, InternalError

BLOCK_ALIGN: Final = 4096


class Region:
    """``nbytes`` of shared memory. Not zeroed by contract; its pages are present.

    Raises:
        CapacityError: host-memory, when the system has none.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.rkeys: tuple[int, ...] = ()
        """On each device it is registered with, in the order of the devices."""
        self._held = 0
        self._lock = threading.Lock()
        try:
            handle = os.memfd_create("rota-region", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(handle, 0, max(1, nbytes))
                self._map: mmap.mmap | None = mmap.mmap(handle, max(1, nbytes))
            finally:
                os.close(handle)
        except OSError as error:
            raise CapacityError(
                "no host memory for a shared region", code="host-memory", found=nbytes
            ) from error
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)[:nbytes]
        self.address = int(self._array.ctypes.data)
        whole = np.frombuffer(self._map, np.uint8)
        whole[:: mmap.PAGESIZE] |= 0  # a write, so that registering finds every page present

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 ``[nbytes]``, a view. Raises InternalError memory-closed."""
        if self._array is None:
            raise InternalError("the region is closed", code="memory-closed")
        return self._array

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._array is None

    def hold(self) -> None:
        """Keep it mapped until `let_go`. Raises InternalError memory-closed."""
        with self._lock:
            if self._array is None:
                raise InternalError("the region is closed", code="memory-closed")
            self._held += 1

    def let_go(self) -> None:
        """Undo one `hold`."""
        with self._lock:
            if self._held < 1:
                raise InternalError("let go of memory that is not held", code="memory-not-held")
            self._held -= 1

    def close(self) -> None:
        """Give the memory back. Idempotent.

        Raises:
            InternalError: memory-in-use, while it is held; nothing is freed then.
        """
        with self._lock:
            if self._held:
                raise InternalError(
                    "memory may not be freed while a transfer uses it",
                    code="memory-in-use",
                    found=f"{self._held} holders",
                )
            self._array = None
            if self._map is not None:
                # Arrays over it that someone still has keep the mapping alive by themselves.
                self._map = None


class Arena:
    """Blocks out of one region, registered once for the life of the process.

    Args:
        nbytes: size of the region.
    """

    def __init__(self, nbytes: int) -> None:
        self.region = Region(nbytes)
        # Finalizers run wherever the last reference dies, even inside `allocate` on this thread.
        self._lock = threading.RLock()
        self._free = [(0, nbytes)]

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A block as uint8 ``[nbytes]``; it goes back when no array over it is left.

        Raises:
            CapacityError: arena-full, with a retry hint.
        """
        size = -(-max(1, nbytes) // BLOCK_ALIGN) * BLOCK_ALIGN
        with self._lock:
            for index, (start, length) in enumerate(self._free):
                if length >= size or (length >= nbytes and start + length == self.region.nbytes):
                    size = min(size, length)
                    if length == size:
                        del self._free[index]
                    else:
                        self._free[index] = (start + size, length - size)
                    break
            else:
                raise CapacityError(
                    "the staging arena has no block that large",
                    code="arena-full",
                    expected=f"at most {self.largest} bytes now",
                    found=nbytes,
                    retry_after_s=0.5,
                )
            self.region.hold()
        kind = ctypes.c_uint8 * max(1, nbytes)
        block = kind.from_buffer(self.region.array.data, start)
        weakref.finalize(block, self._give_back, start, size)
        return np.frombuffer(memoryview(block), np.uint8)[:nbytes]

    @property
    def largest(self) -> int:
        """Bytes of the largest free block."""
        with self._lock:
            return max((length for _, length in self._free), default=0)

    def contains(self, array: npt.NDArray[np.uint8]) -> bool:
        """The array's bytes lie in this arena."""
        offset = int(array.ctypes.data) - self.region.address
        return 0 <= offset and offset + array.nbytes <= self.region.nbytes

    def _give_back(self, start: int, size: int) -> None:
        with self._lock:
            insort(self._free, (start, size))
            merged: list[tuple[int, int]] = []
            for begin, length in self._free:
                if merged and merged[-1][0] + merged[-1][1] == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((begin, length))
            self._free = merged
            self.region.let_go()

    def close(self) -> None:
        """Raises InternalError memory-in-use while a block is out."""
        self.region.close()
