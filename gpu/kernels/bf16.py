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
    from .lanes_dot import (
        has_dot,
        st_i64,
        vdot,
        vld_raw,
        vld_raw_columns4,
        vld_raw_columns8,
        vld_raw_part,
        vround_raw,
        vst_rounded,
        vst_rounded_pairs,
        vsums,
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
    from .lanes_tiles import (
        has_tiles,
        tile_config,
        tile_release,
        tile_step1,
        tile_step4,
        tile_step22,
        tile_store1,
        tile_store4,
        tile_zero1,
        tile_zero4,
        why_no_tiles,
    )

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

    def kernel(function: Callable[..., Any]) -> Any:
        """Leave the function as it is."""
        function.device = function  # type: ignore[attr-defined]  # as Compiled has it
        return function

    inlined = kernel

    def has_dot() -> bool:
        """No kernel, no pairs."""
        return False

    def why_no_tiles() -> str | None:
        """No kernel, no tiles."""
        return "numba is not installed"

    def has_tiles() -> bool:
        """No kernel, no tiles."""
        return False

    def __getattr__(name: str) -> None:
        """Stand in for the operations a kernel file imports by name."""
        if name.startswith("__"):
            raise AttributeError(name)


__all__ = [
    "AVAILABLE",
    "has_dot",
    "has_tiles",
    "inlined",
    "kernel",
    "ld",
    "ld_i32",
    "ld_i64",
    "prefetch",
    "st",
    "st_i32",
    "st_i64",
    "tile_config",
    "tile_release",
    "tile_step1",
    "tile_step4",
    "tile_step22",
    "tile_store1",
    "tile_store4",
    "tile_zero1",
    "tile_zero4",
    "vadd",
    "vdiv",
    "vdot",
    "vexp",
    "vfirst",
    "vfma",
    "vld",
    "vld_columns",
    "vld_pairs",
    "vld_part",
    "vld_raw",
    "vld_raw_columns4",
    "vld_raw_columns8",
    "vld_raw_part",
    "vld_upto",
    "vmax",
    "vmaximum",
    "vmul",
    "vround",
    "vround_raw",
    "vsplat",
    "vst",
    "vst_pairs",
    "vst_part",
    "vst_rounded",
    "vst_rounded_pairs",
    "vst_upto",
    "vsub",
    "vsum",
    "vsums",
    "why_no_tiles",
    "width",
]
