"""What a launch may look like: parameter letters, argument ranges, grid and block limits.

Owns nothing (functions). The limits are those of the CUDA driver on compute capability 9.0, so that
a launch a checked host device accepts is one the driver accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..errors import DeviceError
from .device import Dim3, KernelSpec

MAX_GRID: Final = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Final = (1024, 1024, 64)
MAX_THREADS: Final = 1024
MAX_SHARED_BYTES: Final = 227 << 10
MAX_PARAMS: Final = 64
INTEGER_RANGES: Final = {
    "p": (0, 2**64 - 1),
    "i": (-(2**31), 2**31 - 1),
    "l": (-(2**63), 2**63 - 1),
}


def _refuse(spec: KernelSpec, message: str, expected: object, found: object) -> DeviceError:
    return DeviceError(
        message, code="bad-argument", subject=spec.name, expected=expected, found=found
    )


def check_spec(spec: KernelSpec) -> Callable[..., object]:
    """The spec's host callable. Codes: bad-argument (no callable, an unknown letter, too many)."""
    if spec.host is None:
        raise _refuse(spec, "the kernel has no host form", "a callable", None)
    unknown = set(spec.params) - {*INTEGER_RANGES, "f"}
    if unknown or len(spec.params) > MAX_PARAMS:
        raise _refuse(
            spec, "bad parameter letters", f"at most {MAX_PARAMS} of p i l f", spec.params
        )
    return spec.host


def check_launch(
    spec: KernelSpec, grid: Dim3, block: Dim3, args: Sequence[int | float], shared_bytes: int
) -> None:
    """Judge one launch. Codes: bad-argument."""
    if len(args) != len(spec.params):
        raise _refuse(spec, "wrong number of arguments", len(spec.params), len(args))
    for at, (letter, value) in enumerate(zip(spec.params, args, strict=True)):
        if letter == "f":
            good = isinstance(value, float | int)
            wanted = "a float"
        else:
            low, high = INTEGER_RANGES[letter]
            good = isinstance(value, int) and low <= value <= high
            wanted = f"an int in {low}..{high}"
        if not good:
            raise _refuse(spec, f"bad argument {at}", wanted, repr(value))
    for name, dims, limits in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        if len(dims) != 3 or not all(
            1 <= size <= most for size, most in zip(dims, limits, strict=True)
        ):
            raise _refuse(spec, f"bad {name}", f"1..{limits}", dims)
    if block[0] * block[1] * block[2] > MAX_THREADS:
        raise _refuse(spec, "too many threads in a block", MAX_THREADS, block)
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise _refuse(spec, "bad shared memory size", f"0..{MAX_SHARED_BYTES}", shared_bytes)
