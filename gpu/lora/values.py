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
_AT_ONCE: Final = 1 << 19
"""Bytes looked at at a time."""


def check_finite(tensors: Sequence[Tensor], elem: Elem) -> None:
    """Refuse NaN, infinity, and float32 that would become infinite.

    Looks at each run of tensors of equal dtype as a whole, and at the tensors of a run that is not
    right one by one.
    """
    start = 0
    while start < len(tensors):
        first, end, stop = tensors[start], tensors[start].end, start + 1
        dtype, block = first.dtype, first.block
        while stop < len(tensors):
            tensor = tensors[stop]
            if tensor.begin != end or tensor.block is not block or tensor.dtype != dtype:
                break
            end, stop = tensor.end, stop + 1
        if _peak(block, first.begin, end, dtype) >= peak_limit(dtype, elem):
            _refuse_first(tensors[start:stop], elem)
        start = stop


def _refuse_first(run: Sequence[Tensor], elem: Elem) -> None:
    """Refuse the first tensor that is not right."""
    for tensor in run:
        found = tensor_peak(tensor)
        if found < peak_limit(tensor.dtype, elem):
            continue
        inside = found < _NON_FINITE[tensor.dtype]
        raise RejectError(
            "a tensor holds a value BF16 cannot hold" if inside else "a tensor is not finite",
            code="non-finite",
            subject=tensor.key,
            expected="finite values",
            found="overflow" if inside else "NaN or infinity",
        )


def peak_limit(dtype: str, elem: Elem) -> int:
    """Bits of |x| from which a value of this file dtype is refused: not finite in ``elem``."""
    return _F32_OVER_BF16 if dtype == "F32" and elem is Elem.BF16 else _NON_FINITE[dtype]


def tensor_peak(tensor: Tensor) -> int:
    """Bits of max |x| of a tensor; 0 of an empty one."""
    return _peak(tensor.block, tensor.begin, tensor.end, tensor.dtype)


def _peak(block: npt.NDArray[np.uint8], begin: int, end: int, dtype: str) -> int:
    """Bits of max |x| of bytes ``begin`` to ``end`` of ``block``, some at a time: the second look
    at them finds them in the processor's cache."""
    kind, found = np.uint32 if dtype == "F32" else np.uint16, 0
    for start in range(begin, end, _AT_ONCE):
        found = max(found, peak(block[start : min(start + _AT_ONCE, end)].view(kind)))
    return found


def peak(values: npt.NDArray[np.generic]) -> int:
    """Bits of max |x| of values in a file's dtype (two or four bytes each); 0 of none.

    Seen as integers, the largest magnitude among values >= 0 is the signed maximum and among values
    < 0 the unsigned maximum, so no temporary is needed.
    """
    if not values.size:
        return 0
    wide = values.itemsize == 4
    positive = int(values.view(np.int32 if wide else np.int16).max())
    negative = int(values.view(np.uint32 if wide else np.uint16).max())
    return max(positive, negative - (1 << (31 if wide else 15)), 0)
