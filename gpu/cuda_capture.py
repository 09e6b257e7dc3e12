"""Capture and graphs of the CUDA device.

What it owns: nothing of its own; operations on the tables of `cuda_base`. Invariants: whatever goes
wrong while a capture ends, the driver's capture is over afterwards and no graph of it is left; a
graph remembers the allocations its nodes name, so that a replay over freed memory is refused here
and never reaches the GPU.
"""

from __future__ import annotations

import threading

from ..errors import DeviceError
from .cuda_base import CudaBase, CudaCapture, HeldGraph
from .device import CaptureMode, Exec, Graph, Stream


class CudaGraphs(CudaBase):
    """The part of `CudaDevice` that captures and replays."""

    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread-local") -> None:
        """See `Device.begin_capture`."""
        with self._lock:
            lane = self._may_begin(stream, mode)
            modes = self._driver.CUstreamCaptureMode
            chosen = (
                modes.CU_STREAM_CAPTURE_MODE_GLOBAL
                if mode == "global"
                else modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            )
            self._call("cuStreamBeginCapture", lane.handle, chosen, subject=lane.label)
            self._capture = CudaCapture(stream, mode)

    def end_capture(self, stream: Stream) -> Graph:
        """See `Device.end_capture`. Whatever it raises but capture-violation ends the capture."""
        with self._lock:
            lane, capture = self._may_end(stream)
            if capture.broken is not None:
                self._drop_driver_capture(lane)
                raise self._invalidated(capture)
            left = capture.unjoined()
            try:
                raw = self._call("cuStreamEndCapture", lane.handle, subject=lane.label)
            except DeviceError as error:
                self._drop_driver_capture(lane)
                if left is not None and error.code == "capture-unjoined":
                    error = self._unjoined(left, error.found)
                raise error from None
            graph = Graph(self._new_handle())
            self._graphs[graph] = HeldGraph(f"graph {graph}", raw, tuple(capture.held.values()))
            return graph

    def abort_capture_if_active(self, stream: Stream) -> bool:
        """See `Device.abort_capture_if_active`. Call it from the thread that began the capture."""
        with self._lock:
            self._lane(stream)
            capture = self._capture
            if capture is None or stream not in capture.clocks:
                return False
            if threading.get_ident() != capture.thread:
                raise self._violation("abort by another thread", None, capture)
            self._capture = None
            self._drop_driver_capture(self._lanes[capture.origin])
            return True

    def instantiate(self, graph: Graph) -> Exec:
        """See `Device.instantiate`."""
        with self._lock:
            held = self._get(self._graphs, graph)
            raw = self._call("cuGraphInstantiate", held.handle, 0, subject=held.label)
            made = Exec(self._new_handle())
            self._execs[made] = HeldGraph(f"exec {made}", raw, held.blocks)
            return made

    def update(self, graph_exec: Exec, graph: Graph) -> None:
        """See `Device.update` (cuGraphExecUpdate)."""
        with self._lock:
            held, source = self._get(self._execs, graph_exec), self._get(self._graphs, graph)
            self._call("cuGraphExecUpdate", held.handle, source.handle, subject=held.label)
            held.blocks, held.valid_at = source.blocks, -1

    def upload(self, graph_exec: Exec, stream: Stream) -> None:
        """See `Device.upload`."""
        lane = self._lane(stream)
        self._not_captured(stream, "upload")
        held = self._get(self._execs, graph_exec)
        self._call("cuGraphUpload", held.handle, lane.handle, subject=held.label)

    def replay(self, graph_exec: Exec, stream: Stream) -> None:
        """See `Device.replay`."""
        held = self._get(self._execs, graph_exec)
        lane = self._lane(stream)
        self._not_captured(stream, "replay")
        if held.valid_at != self._heap.frees:
            frees = self._heap.frees
            for block in held.blocks:
                if not block.live:
                    raise DeviceError(
                        f"{held.label} touches freed memory",
                        code="use-after-free",
                        subject=block.label,
                    )
            held.valid_at = frees
        self._call("cuGraphLaunch", held.handle, lane.handle, subject=held.label)

    def destroy_graph(self, graph: Graph) -> None:
        """See `Device.destroy_graph`."""
        with self._lock:
            self._forget("cuGraphDestroy", self._get(self._graphs, graph))
            del self._graphs[graph]

    def destroy_exec(self, graph_exec: Exec) -> None:
        """See `Device.destroy_exec`."""
        with self._lock:
            self._forget("cuGraphExecDestroy", self._get(self._execs, graph_exec))
            del self._execs[graph_exec]
