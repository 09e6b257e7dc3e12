"""Huge pages under memory that is read in every step.

Owns nothing. Invariant: the bytes do not change; where the system has no huge pages, or none left,
nothing happens. A step reads all weights once, and with small pages much of that time goes into
finding addresses.

Numbers of the advice: Linux, include/uapi/asm-generic/mman-common.h.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable
from typing import Any, Final

logger = logging.getLogger("rota.gpu.kernels.hugepages")

PAGE: Final = 2 << 20
NEAR: Final = 1 << 20
"""Blocks with less than this between them are taken as one: a heap lays them side by side."""
_HUGEPAGE, _COLLAPSE = 14, 25


def extents(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Whole huge pages inside the blocks and the short gaps between them, as (start, end).

    Args:
        blocks: (address, bytes), in any order.
    """
    found: list[tuple[int, int]] = []
    merged: list[tuple[int, int]] = []
    for start, nbytes in sorted(blocks):
        if merged and start - merged[-1][1] <= NEAR:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + nbytes))
        else:
            merged.append((start, start + nbytes))
    for start, end in merged:
        first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
        if first < last:
            found.append((first, last))
    return found


def settle(blocks: Iterable[tuple[int, int]]) -> int:
    """Move what the blocks hold onto huge pages, where it is not yet; returns how many there are.

    Takes a moment for each (the system copies it).
    """
    if sys.platform != "linux":
        return 0
    libc: Any = ctypes.CDLL(None, use_errno=True)
    moved = asked = 0
    for first, last in extents(blocks):
        for page in range(first, last, PAGE):
            address, size = ctypes.c_void_p(page), ctypes.c_size_t(PAGE)
            asked += 1
            if libc.madvise(address, size, _HUGEPAGE) == 0:
                moved += libc.madvise(address, size, _COLLAPSE) == 0
    logger.debug("%d of %d huge pages", moved, asked)
    return moved
