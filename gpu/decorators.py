"""Devices around a device: one that fails on purpose, one that writes down what is asked of it.

What it owns: call counts and a trace sink; the device inside keeps everything else. Both implement
the whole `Device` protocol, so they nest, and they wrap any implementation.

Invariants: an injected fault is raised before the inner device is asked, so it has no effect there;
a trace names addresses by label and offset, never by number, so that two runs can be compared as
text.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ..errors import DeviceError
from .device import CaptureMode, Device, Dim3, Event, Exec, Graph, Kernel, KernelSpec, Stream

R = TypeVar("R")

OPERATIONS: Final = (
    "alloc",
    "free",
    "pinned_alloc",
    "pinned_free",
    "memset",
    "copy_h2d",
    "copy_d2h",
    "copy_d2d",
    "create_stream",
    "destroy_stream",
    "synchronize",
    "query",
    "create_event",
    "record_event",
    "wait_event",
    "query_event",
    "synchronize_event",
    "destroy_event",
    "load_kernel",
    "launch",
    "begin_capture",
    "end_capture",
    "abort_capture_if_active",
    "instantiate",
    "update",
    "upload",
    "replay",
    "destroy_graph",
    "destroy_exec",
    "close",
)
"""Operations a fault can name and a trace shows: all that may fail or change something."""


class At(int):
    """An address among the words of a call."""


def _launch_words(
    kernel: Kernel, grid: Dim3, block: Dim3, args: Sequence[int | float], stream: Stream
) -> list[object]:
    letters = kernel.spec.params.ljust(len(args), "?")
    words: list[object] = [kernel.spec.name, grid, block]
    for letter, value in zip(letters, args, strict=False):
        words.append(At(int(value)) if letter == "p" else value)
    return [*words, stream]


class ForwardingDevice:
    """Passes every operation on; `_around` is where a subclass steps in."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner

    def _around(self, op: str, words: Sequence[object], call: Callable[[], R]) -> R:
        """Do ``call``, which asks the inner device for ``op``; ``words`` are its arguments."""
        return call()

    @property
    def name(self) -> str:
        """Name of the inner device."""
        return self.inner.name

    @property
    def host_addressable(self) -> bool:
        """As the inner device."""
        return self.inner.host_addressable

    def memory_info(self) -> tuple[int, int]:
        """As the inner device; never fails on purpose, never traced."""
        return self.inner.memory_info()

    def live_labels(self) -> tuple[str, ...]:
        """As the inner device; never fails on purpose, never traced."""
        return self.inner.live_labels()

    def alloc(self, nbytes: int, *, label: str) -> int:
        """See `Device.alloc`."""
        return self._around("alloc", [nbytes, label], lambda: self.inner.alloc(nbytes, label=label))

    def free(self, addr: int) -> None:
        """See `Device.free`."""
        return self._around("free", [At(addr)], lambda: self.inner.free(addr))

    def pinned_alloc(self, nbytes: int, *, label: str) -> int:
        """See `Device.pinned_alloc`."""
        return self._around(
            "pinned_alloc", [nbytes, label], lambda: self.inner.pinned_alloc(nbytes, label=label)
        )

    def pinned_free(self, addr: int) -> None:
        """See `Device.pinned_free`."""
        return self._around("pinned_free", [At(addr)], lambda: self.inner.pinned_free(addr))

    def memset(self, addr: int, byte: int, nbytes: int, stream: Stream) -> None:
        """See `Device.memset`."""
        return self._around(
            "memset",
            [At(addr), byte, nbytes, stream],
            lambda: self.inner.memset(addr, byte, nbytes, stream),
        )

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_h2d`."""
        return self._around(
            "copy_h2d",
            [At(dst), At(src), nbytes, stream],
            lambda: self.inner.copy_h2d(dst, src, nbytes, stream),
        )

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_d2h`."""
        return self._around(
            "copy_d2h",
            [At(dst), At(src), nbytes, stream],
            lambda: self.inner.copy_d2h(dst, src, nbytes, stream),
        )

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_d2d`."""
        return self._around(
            "copy_d2d",
            [At(dst), At(src), nbytes, stream],
            lambda: self.inner.copy_d2d(dst, src, nbytes, stream),
        )

    def create_stream(self, *, label: str = "") -> Stream:
        """See `Device.create_stream`."""
        return self._around("create_stream", [label], lambda: self.inner.create_stream(label=label))

    def destroy_stream(self, stream: Stream) -> None:
        """See `Device.destroy_stream`."""
        return self._around("destroy_stream", [stream], lambda: self.inner.destroy_stream(stream))

    def synchronize(self, stream: Stream) -> None:
        """See `Device.synchronize`."""
        return self._around("synchronize", [stream], lambda: self.inner.synchronize(stream))

    def query(self, stream: Stream) -> bool:
        """See `Device.query`."""
        return self._around("query", [stream], lambda: self.inner.query(stream))

    def create_event(self, *, label: str = "") -> Event:
        """See `Device.create_event`."""
        return self._around("create_event", [label], lambda: self.inner.create_event(label=label))

    def record_event(self, event: Event, stream: Stream) -> None:
        """See `Device.record_event`."""
        return self._around(
            "record_event", [event, stream], lambda: self.inner.record_event(event, stream)
        )

    def wait_event(self, event: Event, stream: Stream) -> None:
        """See `Device.wait_event`."""
        return self._around(
            "wait_event", [event, stream], lambda: self.inner.wait_event(event, stream)
        )

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`."""
        return self._around("query_event", [event], lambda: self.inner.query_event(event))

    def synchronize_event(self, event: Event) -> None:
        """See `Device.synchronize_event`."""
        return self._around(
            "synchronize_event", [event], lambda: self.inner.synchronize_event(event)
        )

    def destroy_event(self, event: Event) -> None:
        """See `Device.destroy_event`."""
        return self._around("destroy_event", [event], lambda: self.inner.destroy_event(event))

    def load_kernel(self, spec: KernelSpec) -> Kernel:
        """See `Device.load_kernel`."""
        return self._around("load_kernel", [spec.name], lambda: self.inner.load_kernel(spec))

    def launch(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[int | float],
        stream: Stream,
        shared_bytes: int = 0,
    ) -> None:
        """See `Device.launch`."""
        return self._around(
            "launch",
            _launch_words(kernel, grid, block, args, stream),
            lambda: self.inner.launch(kernel, grid, block, args, stream, shared_bytes),
        )

    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread-local") -> None:
        """See `Device.begin_capture`."""
        return self._around(
            "begin_capture", [stream, mode], lambda: self.inner.begin_capture(stream, mode)
        )

    def end_capture(self, stream: Stream) -> Graph:
        """See `Device.end_capture`."""
        return self._around("end_capture", [stream], lambda: self.inner.end_capture(stream))

    def abort_capture_if_active(self, stream: Stream) -> bool:
        """See `Device.abort_capture_if_active`."""
        return self._around(
            "abort_capture_if_active", [stream], lambda: self.inner.abort_capture_if_active(stream)
        )

    def instantiate(self, graph: Graph) -> Exec:
        """See `Device.instantiate`."""
        return self._around("instantiate", [graph], lambda: self.inner.instantiate(graph))

    def update(self, graph_exec: Exec, graph: Graph) -> None:
        """See `Device.update`."""
        return self._around(
            "update", [graph_exec, graph], lambda: self.inner.update(graph_exec, graph)
        )

    def upload(self, graph_exec: Exec, stream: Stream) -> None:
        """See `Device.upload`."""
        return self._around(
            "upload", [graph_exec, stream], lambda: self.inner.upload(graph_exec, stream)
        )

    def replay(self, graph_exec: Exec, stream: Stream) -> None:
        """See `Device.replay`."""
        return self._around(
            "replay", [graph_exec, stream], lambda: self.inner.replay(graph_exec, stream)
        )

    def destroy_graph(self, graph: Graph) -> None:
        """See `Device.destroy_graph`."""
        return self._around("destroy_graph", [graph], lambda: self.inner.destroy_graph(graph))

    def destroy_exec(self, graph_exec: Exec) -> None:
        """See `Device.destroy_exec`."""
        return self._around(
            "destroy_exec", [graph_exec], lambda: self.inner.destroy_exec(graph_exec)
        )

    def close(self) -> None:
        """See `Device.close`."""
        return self._around("close", [], lambda: self.inner.close())


@dataclass(frozen=True, slots=True)
class Fault:
    """Fail the ``nth`` call (from 1) of ``op`` with ``code``."""

    op: str
    nth: int
    code: str = "injected"


class FaultyDevice(ForwardingDevice):
    """A device whose chosen calls fail.

    Args:
        inner: the device that does the work.
        faults: which calls fail.

    Raises:
        DeviceError: bad-argument, for an operation that does not exist or a call number below 1.
    """

    def __init__(self, inner: Device, faults: Iterable[Fault]) -> None:
        super().__init__(inner)
        self._faults = {(fault.op, fault.nth): fault for fault in faults}
        for op, nth in self._faults:
            if op not in OPERATIONS or nth < 1:
                raise DeviceError("no such call", code="bad-argument", subject=op, found=nth)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.fired: list[Fault] = []
        """Faults raised so far, in order."""

    def calls(self, op: str) -> int:
        """How often ``op`` was asked for."""
        return self._calls[op]

    def _around(self, op: str, words: Sequence[object], call: Callable[[], R]) -> R:
        with self._lock:
            self._calls[op] += 1
            fault = self._faults.get((op, self._calls[op]))
            if fault is not None:
                self.fired.append(fault)
        if fault is not None:
            raise DeviceError(
                f"{op} call {fault.nth} failed on purpose", code=fault.code, subject=op
            )
        return call()


class TracingDevice(ForwardingDevice):
    """A device that writes one line a call: ``op words... -> result``, or ``op words... ! code``.

    Args:
        inner: the device that does the work.
        sink: takes each line, without a line end; called under a lock, in call-completion order.
    """

    def __init__(self, inner: Device, sink: Callable[[str], object]) -> None:
        super().__init__(inner)
        self._sink = sink
        self._named: dict[int, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def _word(self, word: object) -> str:
        if not isinstance(word, At):
            return str(word).replace(" ", "")
        if word == 0:
            return "null"
        for start, (nbytes, label) in self._named.items():
            if start <= word < start + nbytes:
                return f"{label}+{word - start:#x}" if word > start else label
        return "elsewhere"

    def _around(self, op: str, words: Sequence[object], call: Callable[[], R]) -> R:
        freed: tuple[int, str] | None = None
        with self._lock:
            line = " ".join([op, *map(self._word, words)])
            if op in ("free", "pinned_free"):  # before the call: another thread may get the address
                freed = self._named.pop(int(str(words[0])), None)
        try:
            result = call()
        except DeviceError as error:
            if freed is not None:
                with self._lock:
                    self._named[int(str(words[0]))] = freed
            self._emit(f"{line} ! {error.code}")
            raise
        if op in ("alloc", "pinned_alloc"):
            with self._lock:
                self._named[int(str(result))] = (int(str(words[0])), str(words[1]))
        shown = op in ("alloc", "pinned_alloc", "load_kernel") or result is None
        self._emit(line if shown else f"{line} -> {result}")
        return result

    def _emit(self, line: str) -> None:
        with self._lock:
            self._sink(line)
