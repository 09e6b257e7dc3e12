"""The host device: the Device protocol on ordinary memory, and the referee of the tests.

What it owns: a heap (`host_memory`), streams and events (`host_streams`), the capture and its
graphs (`host_capture`), and the handle tables. Two modes:

* serving (``checked=False``): work runs at the call, in the calling thread; copies and memsets are
  bounds-checked, allocations and handles are accounted, a launch adds well under a microsecond;
* checked (``checked=True``): work waits in its stream until something needs it; launches are
  checked through their address arguments and footprint; freed memory is poisoned and never reused;
  redzones; leaks raise.

Invariants: capture rules are the same in both modes; after `close` every table is empty. One lock
guards the tables; serving copies and kernels run outside it.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import DeviceError
from .device import CaptureMode, Dim3, Event, Exec, Graph, Kernel, KernelSpec, Stream
from .host_capture import (
    Capture,
    CopyNode,
    HostGraph,
    LaunchNode,
    MemsetNode,
    Node,
    ReplayNode,
)
from .host_launch import check_launch, check_spec
from .host_memory import Heap, available_memory
from .host_streams import QUERIES_BEFORE_DONE, EventState, Lane, Wait, drain

log = logging.getLogger("rota.gpu.host")

H = TypeVar("H", Stream, Event, Graph, Exec)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostKernel:
    """A kernel the host device can call."""

    spec: KernelSpec
    host: Callable[..., object]


class HostDevice:
    """The host as a `Device`.

    Args:
        checked: defer work and check everything (tests), or run at the call (serving).
        memory_limit: bytes that device and pinned allocations together may take; default: what the
            system says is available now.
        allow_foreign: checked launches accept addresses that are in no allocation of this device
            (tensors another library owns); such memory cannot be checked.

    Raises:
        DeviceError: bad-argument, for a limit that is not positive.
    """

    name = "host"
    host_addressable = True

    def __init__(
        self,
        *,
        checked: bool = False,
        memory_limit: int | None = None,
        allow_foreign: bool = False,
    ) -> None:
        limit = available_memory() if memory_limit is None else memory_limit
        if limit <= 0:
            raise DeviceError("bad memory limit", code="bad-argument", expected="> 0", found=limit)
        self.checked = checked
        self._direct = not checked
        self._allow_foreign = allow_foreign
        self._heap = Heap(limit, checked=checked)
        self._lock = threading.RLock()
        self._closed = False
        self._handles = itertools.count(1)
        self._last_handle = 0
        self._lanes: dict[Stream, Lane] = {}
        self._events: dict[Event, EventState] = {}
        self._graphs: dict[Graph, HostGraph] = {}
        self._execs: dict[Exec, HostGraph] = {}
        self._capture: Capture | None = None

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
        self._open()
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
                lane.push(Wait(state.lane, state.place))

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
            except Exception as error:
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
            lane = self._lane(stream)
            if mode not in ("global", "thread-local"):
                raise DeviceError("unknown capture mode", code="bad-argument", found=mode)
            if self._capture is not None:
                raise DeviceError(
                    "a capture is active already", code="capture-violation", subject=lane.label
                )
            self._capture = Capture(stream, mode)

    def end_capture(self, stream: Stream) -> Graph:
        """See `Device.end_capture`."""
        with self._lock:
            lane = self._lane(stream)
            capture = self._capture
            if capture is None or capture.origin != stream:
                raise DeviceError(
                    "this stream began no capture", code="not-capturing", subject=lane.label
                )
            if threading.get_ident() != capture.thread:
                raise self._violation("end_capture by another thread", lane.label, capture)
            self._capture = None
            if capture.broken is not None:
                raise self._invalidated(capture)
            left = capture.unjoined()
            if left is not None:
                label = self._lanes[left].label if left in self._lanes else f"stream {left}"
                raise DeviceError(
                    "a stream joined the capture and was not joined back",
                    code="capture-unjoined",
                    subject=label,
                )
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

    # Life time

    def live_labels(self) -> tuple[str, ...]:
        """Labels of allocations, then of streams, events, graphs and execs; each oldest first."""
        with self._lock:
            tables = (self._lanes, self._events, self._graphs, self._execs)
            handles = (entry.label for table in tables for entry in table.values())
            return (*self._heap.labels(), *handles)

    def close(self) -> None:
        """See `Device.close`.

        Everything is freed, then a checked device raises, a serving one logs.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._capture = None
            failures: list[DeviceError] = []
            for lane in self._lanes.values():
                try:
                    drain(lane, lane.queued, self._heap)
                except DeviceError as error:
                    failures.append(error)
            leaked = self.live_labels()
            for table in (self._lanes, self._events, self._graphs, self._execs):
                table.clear()
            _, damage = self._heap.close()
        if damage is not None:
            failures.append(damage)
        if leaked:
            if self.checked:
                failures.append(
                    DeviceError("alive at close", code="leak", subject=", ".join(leaked))
                )
            else:
                log.warning("alive at close, freed now: %s", ", ".join(leaked))
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also at close: {other}")
            raise failures[0]

    # Shared rules

    def _open(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed", code="device-closed", subject=self.name)

    def _new_handle(self) -> int:
        self._open()
        self._last_handle = next(self._handles)
        return self._last_handle

    def _lane(self, stream: Stream) -> Lane:
        lane = self._lanes.get(stream)
        return lane if lane is not None else self._get(self._lanes, stream)

    def _get(self, table: dict[H, T], handle: H) -> T:
        entry = table.get(handle)
        if entry is not None:
            return entry
        self._open()
        tables = (self._lanes, self._events, self._graphs, self._execs)
        of_other_kind = any(handle in other for other in tables)
        if 0 < handle <= self._last_handle and not of_other_kind:
            raise DeviceError(
                "the handle was destroyed", code="destroyed-handle", subject=str(handle)
            )
        raise DeviceError("no such handle", code="bad-handle", subject=str(handle))

    def _submit(self, node: Node, stream: Stream) -> None:
        """Run, queue or capture one piece of work."""
        lane = self._lane(stream)
        if self._capture is not None:
            with self._lock:
                capture = self._capture_of(stream)
                if capture is not None:
                    node.check(self._heap, running=False)
                    capture.add(stream, node, self._heap)
                    return
        if self._direct:
            node.check(self._heap, running=True)
            node.run()
            return
        with self._lock:
            node.check(self._heap, running=False)
            lane.push(node)

    def _pageable(self, addr: int, nbytes: int, stream: Stream) -> bool:
        """True if a host address is not the device's.

        Refused in a capture, where nothing keeps it alive.
        """
        if nbytes < 0 or not 0 < addr < 1 << 64:
            raise DeviceError("bad host range", code="bad-argument", found=f"{addr:#x}+{nbytes}")
        if self._heap.covers(addr) is not None:
            self._heap.find(addr, nbytes, "pinned")
            return False
        with self._lock:
            capture = self._capture_of(stream)
            if capture is not None:
                raise self._violation(
                    "a copy with pageable host memory", self._lane(stream).label, capture
                )
        return True

    def _capture_of(self, stream: Stream) -> Capture | None:
        """The capture this stream takes part in; raises if an earlier violation broke it."""
        capture = self._capture
        if capture is None or stream not in capture.clocks:
            return None
        if capture.broken is not None:
            raise self._invalidated(capture)
        return capture

    def _safe_call(self, op: str) -> None:
        """Refuse a call that no capture permits to this thread."""
        self._open()
        capture = self._capture
        if capture is not None and capture.bans(threading.get_ident()):
            raise self._violation(op, None, capture)

    def _not_captured(self, stream: Stream, op: str) -> None:
        capture = self._capture
        if capture is not None and stream in capture.clocks:
            raise self._violation(op, self._lane(stream).label, capture)

    def _outside_event(self, event: Event, op: str) -> EventState:
        state = self._get(self._events, event)
        if state.capture is not None:
            active = state.capture if state.capture is self._capture else None
            raise self._violation(f"{op} of an event recorded in a capture", state.label, active)
        self._safe_call(op)
        return state

    def _drain_event(self, state: EventState) -> None:
        if state.lane is not None:
            drain(state.lane, state.place, self._heap)

    def _violation(self, op: str, subject: str | None, capture: Capture | None) -> DeviceError:
        if capture is not None:
            capture.broken = capture.broken or op
        return DeviceError(
            f"{op} is not permitted by stream capture", code="capture-violation", subject=subject
        )

    def _invalidated(self, capture: Capture) -> DeviceError:
        return DeviceError(
            f"the capture was invalidated by: {capture.broken}",
            code="capture-invalidated",
            subject=self._lanes[capture.origin].label,
        )
