"""The state of the fake driver, and the rules every entry point shares.

What it owns: the arena, every handle table, the faults to inject, the count of calls, and the story
of what went wrong. Entry points are in `api_device`, `api_work` and `api_graph`; `load` hangs them
into the stub.

Invariants: handles are never reused; one lock guards everything; after an error that destroys a
context every call that needs one returns that error, as a real driver does until the process ends.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from .arena import AccessError, Arena
from .overlap import Trail
from .ptx_exec import Program
from .queue_model import Capture, Event, Recorded, Stream, Work, drain

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
ILLEGAL_STATE: Final = 401
NOT_FOUND: Final = 500
NOT_READY: Final = 600
NOT_SUPPORTED: Final = 801
CAPTURE_UNSUPPORTED: Final = 900
CAPTURE_INVALIDATED: Final = 901
CAPTURE_MERGE: Final = 902
CAPTURE_UNMATCHED: Final = 903
CAPTURE_UNJOINED: Final = 904
CAPTURE_ISOLATION: Final = 905
CAPTURE_IMPLICIT: Final = 906
CAPTURED_EVENT: Final = 907
CAPTURE_WRONG_THREAD: Final = 908
UNKNOWN: Final = 999

STICKY: Final = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})
"""Results after which a context is lost."""
MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED = 0, 1, 2

T = TypeVar("T")


class DriverError(Exception):
    """An entry point refuses with this CUresult."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


@dataclass(frozen=True)
class Fault:
    """Make the ``nth`` call (from 1) of a driver function return ``code`` and do nothing."""

    function: str
    nth: int
    code: int = UNKNOWN


class FakeDriver:
    """One fake machine with one GPU.

    Args:
        total_memory: bytes of device memory.
        capability: compute capability the device reports.
        processors: multiprocessors the device reports.
        devices: 0 makes cuInit report CUDA_ERROR_NO_DEVICE.
        faults: errors to inject.
        backwards: run the blocks of every kernel from last to first.
    """

    def __init__(
        self,
        *,
        total_memory: int = 4 << 30,
        capability: tuple[int, int] = (9, 0),
        processors: int = 132,
        devices: int = 1,
        faults: Iterable[Fault] = (),
        backwards: bool = False,
    ) -> None:
        self.total_memory = total_memory
        self.capability = capability
        self.processors = processors
        self.devices = devices
        self.backwards = backwards
        self.lock = threading.RLock()
        self.arena = Arena(total_memory)
        self.calls: Counter[str] = Counter()
        self.faults = {(fault.function, fault.nth): fault for fault in faults}
        self.fired: list[Fault] = []
        self.story: list[str] = []
        self.sticky = 0
        self.retained = 0
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.modules: dict[int, Mapping[str, Program]] = {}
        self.functions: dict[int, tuple[int, Program]] = {}
        self.shared_limits: dict[int, int] = {}
        self.graphs: dict[int, Recorded] = {}
        self.execs: dict[int, Recorded] = {}
        self.captures: list[Capture] = []
        self._handles = itertools.count(0x10000, 0x10)
        self._current = threading.local()

    # What tests read

    def live(self) -> dict[str, int]:
        """How many of each thing are alive; empty when all was given back."""
        kinds = Counter(one.kind for one in self.arena.live())
        counts = {
            "device memory": kinds["device"],
            "pinned memory": kinds["pinned"],
            "streams": len(self.streams),
            "events": len(self.events),
            "modules": len(self.modules),
            "graphs": len(self.graphs),
            "execs": len(self.execs),
            "captures": len(self.captures),
            "contexts": self.retained,
        }
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """Give the arena's pages back."""
        self.arena.release()

    # Calls

    def call(self, name: str, entry: Callable[..., int | None], args: tuple[object, ...]) -> int:
        """Run one entry point under the lock; every exception becomes a CUresult."""
        with self.lock:
            self.calls[name] += 1
            fault = self.faults.get((name, self.calls[name]))
            if fault is not None:
                self.fired.append(fault)
                return self.fail(fault.code)
            try:
                return entry(self, *args) or 0
            except DriverError as error:
                return error.code
            except AccessError as error:
                self.story.append(str(error))
                return self.fail(error.code)
            except BaseException as error:
                # Nothing may cross into C; a bug of the model is an unknown error with a story.
                self.story.append(f"{name}: {type(error).__name__}: {error}")
                return UNKNOWN

    def fail(self, code: int) -> int:
        """Note a failure; some lose the context."""
        if code in STICKY and not self.sticky:
            self.sticky = code
            for stream in self.streams.values():
                stream.queue.clear()
                stream.done = stream.queued
        return code

    # Rules

    def new_handle(self) -> int:
        """A number that was never a handle."""
        return next(self._handles)

    def set_current(self, context: int) -> None:
        """cuCtxSetCurrent of this thread."""
        self._current.context = context

    @property
    def current(self) -> int:
        """The current context of this thread, 0 = none."""
        return getattr(self._current, "context", 0)

    def need_context(self) -> None:
        """Refuse without a current context, or with one that is lost."""
        if not self.current or not self.retained:
            raise DriverError(INVALID_CONTEXT)
        if self.sticky:
            raise DriverError(self.sticky)

    def get(self, table: dict[int, T], handle: int | None, code: int = INVALID_HANDLE) -> T:
        """Look a handle up, with a usable context."""
        self.need_context()
        found = table.get(handle or 0)
        if found is None:
            raise DriverError(code)
        return found

    def unsafe(self) -> None:
        """A call that may block or synchronise: not while a capture forbids it to this thread."""
        self.need_context()
        thread = threading.get_ident()
        broken = False
        for capture in self.captures:
            if capture.mode == MODE_GLOBAL or (
                capture.mode == MODE_THREAD_LOCAL and capture.thread == thread
            ):
                capture.invalid = broken = True
        if broken:
            raise DriverError(CAPTURE_UNSUPPORTED)

    def outside_capture(self, stream: Stream) -> None:
        """A call no stream in a capture takes; it invalidates the capture."""
        if stream.capture is not None:
            stream.capture.invalid = True
            raise DriverError(CAPTURE_UNSUPPORTED)

    def trail(self, stream: Stream) -> Trail:
        """Where work queued or recorded on the stream now will leave what it stores."""
        return stream.trail if stream.capture is None else stream.capture.trails[stream.handle]

    def submit(self, stream: Stream, work: Work) -> None:
        """Queue work, or record it. What follows anything but a kernel begins when that ended."""
        capture = stream.capture
        if work.kind != "kernel":
            work = replace(work, run=_then(work.run, self.trail(stream).clear))
        if capture is None:
            stream.push(work)
        elif capture.invalid:
            raise DriverError(CAPTURE_INVALIDATED)
        else:
            capture.add(stream, work)

    def finish(self, stream: Stream) -> None:
        """Run all of a stream."""
        drain(stream, stream.queued)


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run
