"""The host device: the Device protocol on ordinary memory, and the referee of the tests.

What it owns: the operations; what they work on is in `host_base` (tables, rules), `host_memory`
(the heap), `host_streams` (streams, events) and `host_capture` (capture, graphs). Two modes:

* serving (``checked=False``): work runs at the call, in the calling thread; copies and memsets are
  bounds-checked, allocations and handles are accounted, a launch adds well under a microsecond;
* checked (``checked=True``): work waits in its stream until something needs it; launches are
  checked through their address arguments and footprint; freed memory is poisoned and never reused;
  redzones; leaks raise.

Serving memory is unmapped by `free` and `close`: a tensor view on it is dead from then on.

Invariants: capture rules are the same in both modes; after `close` every table is empty. One lock
guards the tables; serving copies and kernels run outside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import DeviceError
from .device import CaptureMode, Dim3, Event, Exec, Graph, Kernel, KernelSpec, Stream
from .host_base import HostBase
from .host_capture import (
    Capture,
    CopyNode,
    HostGraph,
    LaunchNode,
    MemsetNode,
    ReplayNode,
)
from .host_launch import check_launch, check_spec
from .host_streams import QUERIES_BEFORE_DONE, EventState, Lane, Wait, drain, enqueue


@dataclass(frozen=True, slots=True)
class HostKernel:
    """A kernel the host device can call."""

    spec: KernelSpec
    host: Callable[..., object]


class HostDevice(HostBase):
    """The host as a `Device`.

    Args:
        checked: defer work and check everything (tests), or run at the call (serving).
        memory_limit: bytes that device and pinned allocations together may take; default: what the
            system says is available now.
        allow_foreign: checked launches accept addresses that are in no allocation of this device
            (tensors another library owns); such memory cannot be checked.
        quarantine_bytes: freed bytes a checked device keeps poisoned; older ones give their pages
            back and keep only their address range.

    Raises:
        DeviceError: bad-argument, for a limit that is not positive.
    """

    # Memory

    def alloc(self, nbytes: int, *, label: str) -> int:
        """See `Device.alloc`. Checked: filled with 0xA5."""
        self._safe_call("alloc")
        return self._heap.alloc(nbytes, "device", label)

    def free(self, addr: int) -> None:
        """See `Device.free`."""
        self._safe_call("free")
        self._heap.free(addr, "device")

    def pinned_alloc(self, nbytes: int, *, label: str) -> int:
        """See `Device.pinned_alloc`. Not page-locked here, and counted against the same limit."""
        self._safe_call("pinned_alloc")
        return self._heap.alloc(nbytes, "pinned", label)

    def pinned_free(self, addr: int) -> None:
        """See `Device.pinned_free`."""
        self._safe_call("pinned_free")
        self._heap.free(addr, "pinned")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes, total being the limit."""
        self._enter()
        return self._heap.limit - self._heap.used, self._heap.limit

    def memset(self, addr: int, byte: int, nbytes: int, stream: Stream) -> None:
        """See `Device.memset`."""
        if not 0 <= byte <= 255:
            raise DeviceError("bad byte", code="bad-argument", expected="0..255", found=byte)
        self._submit(MemsetNode(addr, byte, nbytes), stream)

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_h2d`. Checked: a pinned source is read when the copy runs."""
        self._lane(stream)
        payload: bytes | None = None
        if self._pageable(src, nbytes, stream) and not self._direct:
            self._heap.find(dst, nbytes, "device")
            payload = ctypes.string_at(src, nbytes)
        self._submit(CopyNode(dst, src, nbytes, True, False, payload), stream)

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_d2h`."""
        lane = self._lane(stream)
        pageable = self._pageable(dst, nbytes, stream)
        self._submit(CopyNode(dst, src, nbytes, False, True), stream)
        if pageable and not self._direct:
            with self._lock:
                drain(lane, lane.queued, self._heap)

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_d2d`."""
        if dst < src + nbytes and src < dst + nbytes:
            raise DeviceError(
                "source and destination overlap",
                code="bad-argument",
                subject=self._heap.find(dst, nbytes, "device").label,
            )
        self._submit(CopyNode(dst, src, nbytes, True, True), stream)

    # Streams and events

    def create_stream(self, *, label: str = "") -> Stream:
        """See `Device.create_stream`."""
        with self._lock:
            self._enter()
            handle = Stream(self._new_handle())
            self._lanes[handle] = Lane(label or f"stream {handle}")
        return handle

    def destroy_stream(self, stream: Stream) -> None:
        """See `Device.destroy_stream`."""
        with self._lock:
            lane = self._lane(stream)
            self._not_captured(stream, "destroy_stream")
            del self._lanes[stream]
            drain(lane, lane.queued, self._heap)

    def synchronize(self, stream: Stream) -> None:
        """See `Device.synchronize`."""
        with self._lock:
            lane = self._lane(stream)
            self._not_captured(stream, "synchronize")
            self._safe_call("synchronize")
            drain(lane, lane.queued, self._heap)

    def query(self, stream: Stream) -> bool:
        """See `Device.query`. Checked: pending work is found unfinished twice, then run."""
        with self._lock:
            lane = self._lane(stream)
            self._not_captured(stream, "query")
            self._safe_call("query")
            if lane.done < lane.queued:
                lane.queries += 1
                if lane.queries <= QUERIES_BEFORE_DONE:
                    return False
                drain(lane, lane.queued, self._heap)
            lane.queries = 0
            return True

    def create_event(self, *, label: str = "") -> Event:
        """See `Device.create_event`."""
        with self._lock:
            self._enter()
            handle = Event(self._new_handle())
            self._events[handle] = EventState(label or f"event {handle}")
        return handle

    def record_event(self, event: Event, stream: Stream) -> None:
        """See `Device.record_event`."""
        with self._lock:
            lane = self._lane(stream)
            state = self._get(self._events, event)
            capture = self._capture_of(stream)
            state.queries = 0
            state.capture = capture
            if capture is not None:
                capture.record(event, stream)
            else:
                state.lane, state.place = lane, lane.queued

    def wait_event(self, event: Event, stream: Stream) -> None:
        """See `Device.wait_event`."""
        with self._lock:
            lane = self._lane(stream)
            state = self._get(self._events, event)
            capture = self._capture_of(stream)
            if state.capture is not None and state.capture is self._capture:
                if state.capture.broken is not None:
                    raise self._invalidated(state.capture)
                state.capture.join(event, stream)
            elif state.capture is not None:
                raise self._violation("wait for an event of an ended capture", state.label, capture)
            elif capture is not None:
                if state.lane is not None:
                    raise self._violation(
                        "wait for an event recorded outside the capture", state.label, capture
                    )
            elif state.lane is not None and not state.passed:
                enqueue(lane, Wait(state.lane, state.place), self._heap)

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`."""
        with self._lock:
            state = self._outside_event(event, "query_event")
            if not state.passed:
                state.queries += 1
                if state.queries <= QUERIES_BEFORE_DONE:
                    return False
                self._drain_event(state)
            state.queries = 0
            return True

    def synchronize_event(self, event: Event) -> None:
        """See `Device.synchronize_event`."""
        with self._lock:
            self._drain_event(self._outside_event(event, "synchronize_event"))

    def destroy_event(self, event: Event) -> None:
        """See `Device.destroy_event`."""
        with self._lock:
            self._get(self._events, event)
            del self._events[event]

    # Kernels

    def load_kernel(self, spec: KernelSpec) -> HostKernel:
        """See `Device.load_kernel`."""
        self._safe_call("load_kernel")
        return HostKernel(spec, check_spec(spec))

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
        if not isinstance(kernel, HostKernel):
            raise DeviceError("not a kernel of this device", code="bad-handle")
        if self._direct and self._capture is None and stream in self._lanes:
            try:
                kernel.host(*args)
            except DeviceError:
                raise
            except Exception as error:  # a kernel is a program: named, never passed on
                raise DeviceError(
                    f"the kernel raised {type(error).__name__}: {error}",
                    code="launch-failed",
                    subject=kernel.spec.name,
                ) from error
            return
        self._lane(stream)
        if self.checked or len(args) != len(kernel.spec.params):
            check_launch(kernel.spec, grid, block, args, shared_bytes)
        foreign = self._allow_foreign or self._direct
        self._submit(LaunchNode(kernel.spec, tuple(args), foreign), stream)

    # Capture and graphs

    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread-local") -> None:
        """See `Device.begin_capture`."""
        with self._lock:
            self._may_begin(stream, mode)
            self._capture = Capture(stream, mode)

    def end_capture(self, stream: Stream) -> Graph:
        """See `Device.end_capture`."""
        with self._lock:
            _, capture = self._may_end(stream)
            if capture.broken is not None:
                raise self._invalidated(capture)
            left = capture.unjoined()
            if left is not None:
                raise self._unjoined(left)
            handle = Graph(self._new_handle())
            self._graphs[handle] = HostGraph(
                f"graph {handle}", tuple(capture.nodes), tuple(capture.blocks.values())
            )
            return handle

    def abort_capture_if_active(self, stream: Stream) -> bool:
        """See `Device.abort_capture_if_active`."""
        with self._lock:
            self._lane(stream)
            if self._capture is None or stream not in self._capture.clocks:
                return False
            self._capture = None
            return True

    def instantiate(self, graph: Graph) -> Exec:
        """See `Device.instantiate`."""
        with self._lock:
            source = self._get(self._graphs, graph)
            handle = Exec(self._new_handle())
            self._execs[handle] = HostGraph(f"exec {handle}", source.nodes, source.blocks)
            return handle

    def update(self, graph_exec: Exec, graph: Graph) -> None:
        """See `Device.update`."""
        with self._lock:
            held, source = self._get(self._execs, graph_exec), self._get(self._graphs, graph)
            if held.work() != source.work():
                raise DeviceError(
                    f"{held.label} does other work",
                    code="graph-mismatch",
                    subject=source.label,
                    expected=f"{len(held.nodes)} nodes",
                    found=f"{len(source.nodes)} nodes",
                )
            # Another object: replays in a queue have the old one.
            self._execs[graph_exec] = HostGraph(held.label, source.nodes, source.blocks)

    def upload(self, graph_exec: Exec, stream: Stream) -> None:
        """See `Device.upload`. Nothing to prepare here."""
        self._lane(stream)
        self._not_captured(stream, "upload")
        self._get(self._execs, graph_exec)

    def replay(self, graph_exec: Exec, stream: Stream) -> None:
        """See `Device.replay`."""
        state = self._get(self._execs, graph_exec)
        self._lane(stream)
        self._not_captured(stream, "replay")
        self._submit(ReplayNode(state, self._heap, self.checked), stream)

    def destroy_graph(self, graph: Graph) -> None:
        """See `Device.destroy_graph`."""
        with self._lock:
            self._get(self._graphs, graph)
            del self._graphs[graph]

    def destroy_exec(self, graph_exec: Exec) -> None:
        """See `Device.destroy_exec`."""
        with self._lock:
            self._get(self._execs, graph_exec)
            del self._execs[graph_exec]
