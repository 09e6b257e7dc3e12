"""Is there a CUDA device this process can use? Never raises, never hangs, starts nothing here.

Owns nothing. The order matters: package, driver library, driver answer, device count; each missing
piece is named. A driver that is broken may never return from its first call, or end the process:
it is asked in a process of its own first, which has a time limit. The test driver (`gpu.fakecuda`)
counts as no device unless it is asked for, so that a test that loaded it changes nothing for the
rest of its process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from typing import Any, Final

from .cuda_errors import error_name

SONAME: Final = "libcuda.so.1"
TEST_MARK: Final = "rota_fakecuda_set_hook"
PROBE_SECONDS: Final = 30.0
"""A driver that is well may take several seconds to start many GPUs."""
GIVE_UP_SECONDS: Final = 1.0
"""How long a killed process is waited for: one that hangs in the kernel does not end."""

# Prints what is missing, or nothing. Only the standard library: it starts in a few milliseconds.
SCRIPT: Final = f"""
import ctypes
def name(result):
    text = ctypes.c_char_p()
    try:
        known = cuda.cuGetErrorName(result, ctypes.byref(text)) == 0
    except AttributeError:
        known = False
    return text.value.decode() if known and text.value else "CUresult %d" % result
def answer():
    result = cuda.cuInit(0)
    if result:
        return "the driver said " + name(result) + " to cuInit"
    count = ctypes.c_int()
    result = cuda.cuDeviceGetCount(ctypes.byref(count))
    if result:
        return "the driver said " + name(result) + " to cuDeviceGetCount"
    return "" if count.value > 0 else "the driver sees no CUDA device"
try:
    cuda = ctypes.CDLL({SONAME!r})
    print(answer())
except (OSError, AttributeError) as error:
    print("the NVIDIA driver cannot be used:", error)
"""


def is_test_driver() -> bool:
    """True if the driver library of this process is the test driver. Loads nothing."""
    try:
        loaded = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return hasattr(loaded, TEST_MARK)


def why_unavailable(
    *, test_driver: bool = False, apart: bool = True, limit_s: float = PROBE_SECONDS
) -> str | None:
    """The first missing piece, or ``None`` when a device can be opened.

    Args:
        test_driver: accept the test driver, and nothing else.
        apart: ask the driver in a process of its own first; ``False`` where that was done.
        limit_s: seconds that process may take.
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
    if apart and not test_driver:
        why = _ask_apart(limit_s)
        if why is not None:
            return why
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


def _ask_apart(limit_s: float) -> str | None:
    """What another process says of the driver; ``None`` if it is well, or nobody can be asked."""
    if not sys.executable:  # an embedded interpreter
        return None
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SCRIPT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        return f"no process can be started to ask the NVIDIA driver: {error}"
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.communicate(timeout=GIVE_UP_SECONDS)
        except subprocess.TimeoutExpired:
            if child.stdout is not None:
                child.stdout.close()
        return f"the NVIDIA driver did not answer within {limit_s:g} s"
    if child.returncode:
        return f"the NVIDIA driver ended the process that asked it (status {child.returncode})"
    return said.strip() or None


def driver_module() -> Any:
    """``cuda.bindings.driver``; its functions raise RuntimeError where there is no driver."""
    # By name: the module is compiled, and type checkers cannot see into it.
    return importlib.import_module("cuda.bindings.driver")
