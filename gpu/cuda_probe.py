"""Is there a CUDA device this process can use? Never raises, never hangs, starts nothing.

Owns nothing. The order matters: package, driver library, driver answer, device count; each missing
piece is named. The test driver (`gpu.fakecuda`) counts as no device unless it is asked for, so that
a test that loaded it changes nothing for the rest of its process.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final

from .cuda_errors import error_name

SONAME: Final = "libcuda.so.1"
TEST_MARK: Final = "rota_fakecuda_set_hook"


def is_test_driver() -> bool:
    """True if the driver library of this process is the test driver."""
    try:
        return hasattr(ctypes.CDLL(SONAME), TEST_MARK)
    except OSError:
        return False


def why_unavailable(*, test_driver: bool = False) -> str | None:
    """The first missing piece, or ``None`` when a device can be opened.

    Args:
        test_driver: accept the test driver, and nothing else.
    """
    try:
        driver = driver_module()
    except ImportError:
        return "the package cuda-bindings is not installed (pip install 'rota[cuda]')"
    found = is_test_driver()
    if found != test_driver:
        if test_driver:
            return "the test driver is not loaded"
        return "the driver library of this process is the test driver (no GPU)"
    try:
        (result,) = driver.cuInit(0)
        if int(result):
            return f"the driver said {error_name(result)} to cuInit"
        result, count = driver.cuDeviceGetCount()
    except RuntimeError as error:
        return f"the NVIDIA driver cannot be used: {error}"
    if int(result):
        return f"the driver said {error_name(result)} to cuDeviceGetCount"
    return None if count > 0 else "the driver sees no CUDA device"


def driver_module() -> Any:
    """``cuda.bindings.driver``; its functions raise RuntimeError where there is no driver."""
    # By name: the module is compiled, and type checkers cannot see into it.
    return importlib.import_module("cuda.bindings.driver")
