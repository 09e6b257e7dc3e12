"""Threads that reckon digests beside the work that waits for them.

Owns nothing. They give way to the process's other threads: an event loop that wants a core for a
moment should not wait out a hash's turn for it.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ..gpu.host_threads import LONG_S, ask_for_slices

NICER: Final = 10
"""Added to the thread's nice value."""


def digest_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads (made as they are needed) step back."""
    return ThreadPoolExecutor(threads, name, initializer=_step_back)


def _step_back() -> None:
    # On Linux a thread has a nice value of its own, and an id that works as a process's.
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
    except OSError:
        pass  # as polite as the system allows
    ask_for_slices(LONG_S)
