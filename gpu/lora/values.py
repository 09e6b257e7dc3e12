"""Values: refusing what is not finite, and telling a factor of zeros from one at work.

What it owns: the one pass over every value of an adapter. Invariant: nothing that is NaN, infinite,
or would become infinite in the slot's element type passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import RejectError
from .layout import Elem
from .safefile import Tensor

# Bits of |x| (sign removed) from which a value is infinite or NaN, per file dtype.
_NON_FINITE: Final = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
# float32 from here on rounds to infinity in BF16 (half a step above the largest BF16).
_F32_OVER_BF16: Final = 0x7F7F8000


def check_finite(tensors: Sequence[Tensor], elem: Elem) -> dict[int, int]:
    """Refuse NaN, infinity, and float32 that would become infinite. id(tensor) -> bits of max |x|.

    One pass over each run of equal dtype: seen as integers, the largest magnitude among values >= 0
    is the signed maximum and among values < 0 the unsigned maximum, so no temporary is needed.
    """
    peaks = {id(t): 0 for t in tensors if t.begin == t.end}
    live = [t for t in tensors if t.begin != t.end]
    start = 0
    while start < len(live):
        first, stop = live[start], start + 1
        while (
            stop < len(live)
            and live[stop].dtype == first.dtype
            and live[stop].block is first.block
            and live[stop].begin == live[stop - 1].end
        ):
            stop += 1
        run = live[start:stop]
        peaks.update(zip(map(id, run), _peaks(run), strict=True))
        start = stop
    for tensor in tensors:
        found = peaks[id(tensor)]
        if found >= peak_limit(tensor.dtype, elem):
            inside = found < _NON_FINITE[tensor.dtype]
            raise RejectError(
                "a tensor holds a value BF16 cannot hold" if inside else "a tensor is not finite",
                code="non-finite",
                subject=tensor.key,
                expected="finite values",
                found="overflow" if inside else "NaN or infinity",
            )
    return peaks


def peak_limit(dtype: str, elem: Elem) -> int:
    """Bits of |x| from which a value of this file dtype is refused: not finite in ``elem``."""
    return _F32_OVER_BF16 if dtype == "F32" and elem is Elem.BF16 else _NON_FINITE[dtype]


def peak(values: npt.NDArray[np.generic]) -> int:
    """Bits of max |x| of values in a file's dtype (two or four bytes each); 0 of none."""
    if not values.size:
        return 0
    wide = values.itemsize == 4
    positive = int(values.view(np.int32 if wide else np.int16).max())
    negative = int(values.view(np.uint32 if wide else np.uint16).max())
    return max(positive, negative - (1 << (31 if wide else 15)), 0)


def _peaks(run: Sequence[Tensor]) -> list[int]:
    """Bits of max |x| of each tensor of a contiguous run of one dtype, none of them empty."""
    wide = run[0].dtype == "F32"
    signed, unsigned = (np.int32, np.uint32) if wide else (np.int16, np.uint16)
    values = run[0].block[run[0].begin : run[-1].end]
    starts = [(t.begin - run[0].begin) // (4 if wide else 2) for t in run]
    positive = np.maximum.reduceat(values.view(signed), starts)
    negative = np.maximum.reduceat(values.view(unsigned), starts)
    sign = 1 << (31 if wide else 15)
    largest = np.maximum(positive.astype(np.int64), negative.astype(np.int64) - sign)
    return [int(peak) for peak in largest.clip(0)]
