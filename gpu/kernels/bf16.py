"""The vector operations kernels are written in, or harmless nothings where numba is missing.

`AVAILABLE` tells which. Without numba a decorated kernel stays a plain function that nobody calls
(`HostKernels` picks the torch references), so that every file can still be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from .lanes import (
        inlined,
        kernel,
        ld,
        ld_i32,
        ld_i64,
        prefetch,
        st,
        st_i32,
        vld,
        vld_columns,
        vld_pairs,
        vld_part,
        vld_upto,
        vst,
        vst_pairs,
        vst_part,
        vst_upto,
        width,
    )
    from .lanes_math import (
        vadd,
        vdiv,
        vexp,
        vfirst,
        vfma,
        vmax,
        vmaximum,
        vmul,
        vround,
        vsplat,
        vsub,
        vsum,
    )

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

    def kernel(function: Callable[..., Any]) -> Any:
        """Leave the function as it is."""
        return function

    inlined = kernel

    def __getattr__(name: str) -> None:
        """Stand in for the operations a kernel file imports by name."""
        if name.startswith("__"):
            raise AttributeError(name)


__all__ = [
    "AVAILABLE",
    "inlined",
    "kernel",
    "ld",
    "ld_i32",
    "ld_i64",
    "prefetch",
    "st",
    "st_i32",
    "vadd",
    "vdiv",
    "vexp",
    "vfirst",
    "vfma",
    "vld",
    "vld_columns",
    "vld_pairs",
    "vld_part",
    "vld_upto",
    "vmax",
    "vmaximum",
    "vmul",
    "vround",
    "vsplat",
    "vst",
    "vst_pairs",
    "vst_part",
    "vst_upto",
    "vsub",
    "vsum",
    "width",
]
