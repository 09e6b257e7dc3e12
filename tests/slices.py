"""What the system says of a thread's slices, by the C library alone."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

GETATTR = {"x86_64": 315, "aarch64": 275}
SETATTR = {"x86_64": 314, "aarch64": 274}


def slice_s(thread: int = 0) -> float:
    """Seconds, of a thread by its native id; default the calling one. Not those of a real-time
    policy."""
    attr = ctypes.create_string_buffer(48)
    assert not ctypes.CDLL(None).syscall(GETATTR[platform.machine()], thread, attr, 48, 0)
    return float(struct.unpack_from("=Q", attr, 24)[0]) / 1e9


def no_better_than_others() -> None:
    """The calling thread's nice value is not below 0, as it is if the tests were started so."""
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))


@cache
def usual_s() -> float:
    """That of a thread that never asked for another. Skips where the system has none to ask for."""
    if sys.platform != "linux" or platform.machine() not in GETATTR:
        pytest.skip("no slices to ask for: not Linux on x86-64 or arm64")
    if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH):
        pytest.skip("no slices to ask for: these tests run under a policy without any")

    def asked() -> tuple[float, float]:
        before, nice = slice_s(), os.getpriority(os.PRIO_PROCESS, 0)
        attr = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, 7_000_000, 0, 0)
        ctypes.CDLL(None).syscall(SETATTR[platform.machine()], 0, attr, 0)
        return before, slice_s()

    with ThreadPoolExecutor(1) as pool:
        before, after = pool.submit(asked).result()
    if after != 0.007:
        pytest.skip(
            "the system has no slices to ask for: Linux before 6.12, or a filter forbids it"
        )
    return before
