"""Host buffers that files are read into and slots are packed in.

Owns nothing: a buffer lives as long as an array over it. Invariant: it begins a page, since kernels
of the host may read weights straight from it. The C library's heap is asked, not the system: pages
just given back are cheap to take again, and fresh ones may cost more than what is written there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

PAGE: Final = 4096


def blank(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised uint8 ``[nbytes]``. Raises MemoryError."""
    whole = np.empty(nbytes + PAGE, np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % PAGE
    return whole[start : start + nbytes]
