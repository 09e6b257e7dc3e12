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
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from ..host_memory import HUGE_PAGE

logger = logging.getLogger("rota.gpu.kernels.hugepages")

NEAR: Final = 1 << 20
"""Blocks with less than this between them are taken as one: a heap lays them side by side."""
LIMIT_S: Final = 2.0
"""Seconds a start may take longer for it."""
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
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if first < last:
            found.append((first, last))
    return found


def settle(
    blocks: Iterable[tuple[int, int]],
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Move what the blocks hold onto huge pages, where it is not yet; returns how many there are.

    The system copies each page, a few milliseconds at worst. What is not done within ``limit_s``
    seconds of ``clock`` is left to the system's own pace, which has been asked for all of it.
    """
    if sys.platform != "linux":
        return 0
    libc: Any = ctypes.CDLL(None, use_errno=True)
    found = extents(blocks)
    for first, last in found:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _HUGEPAGE)
    pages = [page for first, last in found for page in range(first, last, HUGE_PAGE)]
    moved, end = 0, clock() + limit_s
    for page in pages:
        if clock() >= end:
            break
        moved += libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), _COLLAPSE) == 0
    logger.debug("%d of %d huge pages", moved, len(pages))
    return moved
