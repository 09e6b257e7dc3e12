"""How long a thread keeps a core while others want it, as far as the system lets us ask.

Owns nothing. Linux (6.12 and later) takes a *slice* for each thread: one that wakes and asks for
short ones gets the core at once, as a rule, from one that runs and asks for long ones; otherwise it
often waits for the system's next tick, 4 ms away perhaps. Over time each gets as much as it did.
Asking needs no privilege, and never fails: on other systems, and where a filter refuses it, nothing
changes.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from typing import Final

LONG_S: Final = 0.02
"""Slice of a thread that computes or copies for long."""
SHORT_S: Final = 0.0001
"""Slice of a thread that has little to do, and must do it soon; the shortest there is."""
_CALLS: Final = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""Numbers of sched_getattr and sched_setattr (Linux, include/uapi/asm-generic/unistd.h and
arch/x86/entry/syscalls/syscall_64.tbl)."""
_ATTR: Final = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, first version (include/uapi/linux/sched/types.h): size, policy, flags, nice,
priority, runtime (ns; of an ordinary thread its slice), deadline, period."""
_ORDINARY: Final = (0, 3)
"""SCHED_OTHER, SCHED_BATCH: the policies with slices."""
_RESET_ON_FORK: Final = 1


def ask_for_slices(seconds: float, *, inherited: bool = True) -> bool:
    """The calling thread's slices are to be of so many seconds; False where it cannot be asked for.

    (Linux before 6.12 takes it and does nothing.)

    ``inherited``: threads and processes it starts from now on get them too, as they do its nice
    value; else the usual ones. (Not where its nice value is below 0, which they would lose.)
    """
    numbers = _CALLS.get(platform.machine())
    if numbers is None or sys.platform != "linux":
        return False
    try:
        call = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):  # all of it in one file, or a C library without the call
        return False
    attr = ctypes.create_string_buffer(_ATTR.size)
    if call(numbers[0], 0, attr, _ATTR.size, 0):
        return False
    size, policy, flags, nice, priority, *_ = _ATTR.unpack(attr.raw)
    if policy not in _ORDINARY:
        return False
    if not inherited and nice >= 0:
        flags |= _RESET_ON_FORK
    attr.raw = _ATTR.pack(size, policy, flags, nice, priority, round(seconds * 1e9), 0, 0)
    return not call(numbers[1], 0, attr, 0)
