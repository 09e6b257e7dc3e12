"""Host buffers that files are read into and slots are packed in.

Owns nothing: a buffer lives as long as an array over it. Invariant: it begins a page, since kernels
of the host may read weights straight from it. The C library's heap is asked, not the system: pages
just given back are cheap to take again, and fresh ones may cost more than what is written there.

numpy asks the system for huge pages under arrays of 4 MiB or more. A large buffer begins one and
has its last one to itself, so that all of it gets them: a step reads every adapter in use once, and
with small pages much of that time goes into finding addresses.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..host_memory import HUGE_PAGE

PAGE: Final = 4096
LARGE: Final = 4 * HUGE_PAGE
"""Bytes from which a buffer takes whole huge pages; it wastes less than one of them."""


def blank(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised uint8 ``[nbytes]``. Raises MemoryError."""
    page = HUGE_PAGE if nbytes >= LARGE else PAGE
    whole = np.empty(-(-nbytes // page) * page + page, np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % page
    return whole[start : start + nbytes]
