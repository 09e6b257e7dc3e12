"""Entry points of the fake driver: capture and graphs.

Owns nothing: functions over `FakeDriver`, and `ENTRIES`.
"""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .api_device import INT, PINT, POUT, PSIZE, PTR, U64, Entry
from .driver import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD,
    ILLEGAL_STATE,
    MODE_RELAXED,
    FakeDriver,
)
from .queue_model import Capture, Recorded, Work

UPDATE_FAILURE: Final = 910


def capture_begin(d: FakeDriver, handle: int | None, mode: int) -> int:
    """cuStreamBeginCapture."""
    stream = d.get(d.streams, handle)
    if stream.capture is not None or not 0 <= mode <= MODE_RELAXED:
        return ILLEGAL_STATE
    capture = Capture(stream, mode)
    capture.join(stream)
    d.captures.append(capture)
    return 0


def capture_end(d: FakeDriver, handle: int | None, out: Any) -> int:
    """cuStreamEndCapture."""
    stream = d.get(d.streams, handle)
    capture = stream.capture
    out[0] = None
    if capture is None:
        return ILLEGAL_STATE
    if capture.mode != MODE_RELAXED and capture.thread != threading.get_ident():
        capture.invalid = True
        return CAPTURE_WRONG_THREAD
    if capture.origin is not stream:
        capture.invalid = True
        return CAPTURE_UNMATCHED
    d.captures.remove(capture)
    capture.finish()
    if capture.invalid:
        return CAPTURE_INVALIDATED
    if capture.unjoined():
        return CAPTURE_UNJOINED
    graph = d.new_handle()
    trails = tuple(capture.trails.values())
    d.graphs[graph] = Recorded(tuple(capture.nodes), trails)
    out[0] = graph
    return 0


def capture_status(d: FakeDriver, handle: int | None, out: Any) -> None:
    """cuStreamIsCapturing: 0 no, 1 active, 2 invalidated."""
    capture = d.get(d.streams, handle).capture
    out[0] = 0 if capture is None else 2 if capture.invalid else 1


def graph_instantiate(d: FakeDriver, out: Any, graph: int | None, flags: int) -> None:
    """cuGraphInstantiateWithFlags."""
    nodes = d.get(d.graphs, graph)
    handle = d.new_handle()
    d.execs[handle] = nodes
    out[0] = handle


def graph_upload(d: FakeDriver, graph_exec: int | None, handle: int | None) -> None:
    """cuGraphUpload."""
    d.get(d.execs, graph_exec)
    d.outside_capture(d.get(d.streams, handle))


def graph_launch(d: FakeDriver, graph_exec: int | None, handle: int | None) -> int:
    """cuGraphLaunch: the nodes run in capture order when the stream does."""
    recorded, stream = d.get(d.execs, graph_exec), d.get(d.streams, handle)
    if stream.capture is not None:
        stream.capture.invalid = True
        return CAPTURE_UNSUPPORTED

    def run() -> None:
        # A graph begins after, and ends before, all else on the stream.
        for trail in (*recorded.trails, stream.trail):
            trail.clear()
        for node in recorded.nodes:
            node.run()

    stream.push(Work("graph", graph_exec, run))
    return 0


def graph_update(d: FakeDriver, graph_exec: int | None, graph: int | None, info: int) -> int:
    """cuGraphExecUpdate: same kinds of nodes and the same kernels, other arguments."""
    executable, update = d.get(d.execs, graph_exec), d.get(d.graphs, graph)
    old, new = executable.nodes, update.nodes
    result = c.cast(info, c.POINTER(INT))

    def shape(node: Work) -> tuple[str, object]:
        return node.kind, node.what[0] if isinstance(node.what, tuple) else node.what

    same = len(old) == len(new) and all(
        a.kind == b.kind and (a.kind != "kernel" or shape(a) == shape(b))
        for a, b in zip(old, new, strict=False)
    )
    result[0] = 0 if same else 2
    if not same:
        return UPDATE_FAILURE
    d.execs[graph_exec or 0] = update
    return 0


def graph_nodes(d: FakeDriver, graph: int | None, out: Any, count: Any) -> None:
    """cuGraphGetNodes: the number of nodes only."""
    count[0] = len(d.get(d.graphs, graph).nodes)


def graph_destroy(d: FakeDriver, graph: int | None) -> None:
    """cuGraphDestroy."""
    d.get(d.graphs, graph)
    del d.graphs[graph or 0]


def exec_destroy(d: FakeDriver, graph_exec: int | None) -> None:
    """cuGraphExecDestroy: launches already queued keep their nodes."""
    d.get(d.execs, graph_exec)
    del d.execs[graph_exec or 0]


ENTRIES: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "cuStreamBeginCapture": Entry((PTR, INT), capture_begin),
        "cuStreamEndCapture": Entry((PTR, POUT), capture_end),
        "cuStreamIsCapturing": Entry((PTR, PINT), capture_status),
        "cuGraphInstantiateWithFlags": Entry((POUT, PTR, U64), graph_instantiate),
        "cuGraphUpload": Entry((PTR, PTR), graph_upload),
        "cuGraphLaunch": Entry((PTR, PTR), graph_launch),
        "cuGraphExecUpdate": Entry((PTR, PTR, PTR), graph_update),
        "cuGraphGetNodes": Entry((PTR, PTR, PSIZE), graph_nodes),
        "cuGraphDestroy": Entry((PTR,), graph_destroy),
        "cuGraphExecDestroy": Entry((PTR,), exec_destroy),
    }
)
