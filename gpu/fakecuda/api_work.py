"""Entry points of the fake driver: streams, events, copies, launches, capture and graphs.

Owns nothing: functions over `FakeDriver`, and `ENTRIES`.
"""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .api_device import INT, POUT, PSIZE, PTR, SIZE, U64, UINT, Entry
from .driver import (
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD,
    CAPTURED_EVENT,
    ILLEGAL_STATE,
    INVALID_VALUE,
    MODE_RELAXED,
    NOT_READY,
    DriverError,
    FakeDriver,
)
from .ptx_parse import PARAM_BYTES
from .queue_model import QUERIES_BEFORE_DONE, Capture, Event, Stream, Wait, Work, drain

UPDATE_FAILURE: Final = 910
DEFAULT_SHARED: Final = 48 << 10
"""Shared bytes a block may have before its kernel opts in to more."""
MAX_GRID: Final = (2**31 - 1, 65535, 65535)


def stream_create(d: FakeDriver, out: Any, flags: int) -> None:
    """cuStreamCreate."""
    d.need_context()
    handle = d.new_handle()
    d.streams[handle] = Stream(handle)
    out[0] = handle


def stream_destroy(d: FakeDriver, handle: int | None) -> None:
    """cuStreamDestroy: what is queued still runs (here: now)."""
    stream = d.get(d.streams, handle)
    d.outside_capture(stream)
    del d.streams[stream.handle]
    d.finish(stream)


def stream_synchronize(d: FakeDriver, handle: int | None) -> None:
    """cuStreamSynchronize."""
    stream = d.get(d.streams, handle)
    d.outside_capture(stream)
    d.unsafe()
    d.finish(stream)


def stream_query(d: FakeDriver, handle: int | None) -> int:
    """cuStreamQuery: pending work is found unfinished twice, then run."""
    stream = d.get(d.streams, handle)
    d.outside_capture(stream)
    if stream.done < stream.queued:
        stream.queries += 1
        if stream.queries <= QUERIES_BEFORE_DONE:
            return NOT_READY
        d.finish(stream)
    stream.queries = 0
    return 0


def stream_wait(d: FakeDriver, handle: int | None, event_handle: int | None, flags: int) -> int:
    """cuStreamWaitEvent."""
    stream, event = d.get(d.streams, handle), d.get(d.events, event_handle)
    capture = event.capture
    if capture is not None:
        if capture not in d.captures:
            return CAPTURED_EVENT
        if capture.invalid:
            return CAPTURE_INVALIDATED
        if stream.capture not in (None, capture):
            capture.invalid = True
            return CAPTURE_MERGE
        clock = capture.join(stream)
        for member, done in event.clock.items():
            clock[member] = max(clock.get(member, 0), done)
        return 0
    if stream.capture is not None:
        if event.stream is None:
            return 0
        stream.capture.invalid = True
        return CAPTURE_ISOLATION
    if event.stream is not None and not event.passed:
        stream.push(Wait(event.stream, event.place))
    return 0


def event_create(d: FakeDriver, out: Any, flags: int) -> None:
    """cuEventCreate."""
    d.need_context()
    handle = d.new_handle()
    d.events[handle] = Event(handle)
    out[0] = handle


def event_record(d: FakeDriver, event_handle: int | None, handle: int | None) -> int:
    """cuEventRecord."""
    event, stream = d.get(d.events, event_handle), d.get(d.streams, handle)
    event.queries = 0
    capture = stream.capture
    if capture is not None:
        if capture.invalid:
            return CAPTURE_INVALIDATED
        event.capture, event.clock = capture, dict(capture.clocks[stream.handle])
        return 0
    event.capture, event.stream, event.place = None, stream, stream.queued
    return 0


def _outside_event(d: FakeDriver, handle: int | None) -> Event:
    event = d.get(d.events, handle)
    if event.capture is not None:
        if event.capture in d.captures:
            event.capture.invalid = True
        raise DriverError(CAPTURED_EVENT)
    return event


def event_query(d: FakeDriver, handle: int | None) -> int:
    """cuEventQuery."""
    event = _outside_event(d, handle)
    if not event.passed:
        event.queries += 1
        if event.queries <= QUERIES_BEFORE_DONE:
            return NOT_READY
        assert event.stream is not None
        drain(event.stream, event.place)
    event.queries = 0
    return 0


def event_synchronize(d: FakeDriver, handle: int | None) -> None:
    """cuEventSynchronize."""
    event = _outside_event(d, handle)
    d.unsafe()
    if event.stream is not None:
        drain(event.stream, event.place)


def event_destroy(d: FakeDriver, handle: int | None) -> None:
    """cuEventDestroy: waits queued on it stand."""
    del d.events[d.get(d.events, handle).handle]


def event_elapsed(d: FakeDriver, out: Any, first: int | None, second: int | None) -> int:
    """cuEventElapsedTime: a clock that shows one microsecond for each piece of work."""
    events = [_outside_event(d, handle) for handle in (first, second)]
    for event in events:
        if event.stream is None:
            return 400
        if not event.passed:
            return NOT_READY
    out[0] = (events[1].place - events[0].place) * 1e-3
    return 0


def _range(d: FakeDriver, address: int, nbytes: int) -> None:
    """A device range must be one live allocation's when it is asked for."""
    found = d.arena.covers(address)
    if found is None or not found.live or address + nbytes > found.end or found.kind != "device":
        raise DriverError(INVALID_VALUE)


def _pageable(d: FakeDriver, stream: Stream, address: int, nbytes: int) -> bool:
    if not d.arena.contains(address):
        d.outside_capture(stream)
        return True
    found = d.arena.covers(address)
    if found is None or not found.live or address + nbytes > found.end or found.kind != "pinned":
        raise DriverError(INVALID_VALUE)
    return False


def _copy(d: FakeDriver, dst: int, src: int, nbytes: int, payload: bytes | None) -> Work:
    def run() -> None:
        for address in (dst, src):
            if d.arena.contains(address) and not (address == src and payload is not None):
                d.arena.judge(address, nbytes, None, "copy")
        c.memmove(dst, payload if payload is not None else src, nbytes)

    return Work("memcpy", (dst, src, nbytes), run)


def copy_to_device(d: FakeDriver, dst: int, src: int | None, nbytes: int, h: int | None) -> None:
    """cuMemcpyHtoDAsync: a pageable source is read now, a pinned one when the copy runs."""
    stream = d.get(d.streams, h)
    if nbytes == 0:
        return
    _range(d, dst, nbytes)
    pageable = _pageable(d, stream, src or 0, nbytes)
    payload = c.string_at(src or 0, nbytes) if pageable else None
    d.submit(stream, _copy(d, dst, src or 0, nbytes, payload))


def copy_to_host(d: FakeDriver, dst: int | None, src: int, nbytes: int, h: int | None) -> None:
    """cuMemcpyDtoHAsync: a pageable target is complete at return."""
    stream = d.get(d.streams, h)
    if nbytes == 0:
        return
    _range(d, src, nbytes)
    pageable = _pageable(d, stream, dst or 0, nbytes)
    d.submit(stream, _copy(d, dst or 0, src, nbytes, None))
    if pageable:
        d.finish(stream)


def copy_on_device(d: FakeDriver, dst: int, src: int, nbytes: int, handle: int | None) -> None:
    """cuMemcpyDtoDAsync."""
    stream = d.get(d.streams, handle)
    if nbytes == 0:
        return
    _range(d, dst, nbytes)
    _range(d, src, nbytes)
    d.submit(stream, _copy(d, dst, src, nbytes, None))


def memset(d: FakeDriver, dst: int, byte: int, nbytes: int, handle: int | None) -> None:
    """cuMemsetD8Async."""
    stream = d.get(d.streams, handle)
    if nbytes == 0:
        return
    _range(d, dst, nbytes)

    def run() -> None:
        d.arena.judge(dst, nbytes, "device", "memset")
        c.memset(dst, byte, nbytes)

    d.submit(stream, Work("memset", (dst, byte, nbytes), run))


def launch(
    d: FakeDriver,
    function: int | None,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared: int,
    handle: int | None,
    params: int | None,
    extra: int | None,
) -> int:
    """cuLaunchKernel: the arguments are read here, the kernel runs when the stream does."""
    _, program = d.get(d.functions, function)
    stream = d.get(d.streams, handle)
    grid, block = (gx, gy, gz), (bx, by, bz)
    if any(not 1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
        return INVALID_VALUE
    if min(block) < 1 or bx * by * bz > 1024 or bz > 64:
        return INVALID_VALUE
    if bx * by * bz > program.code.max_threads:
        return 701
    if shared > d.shared_limits.get(function or 0, DEFAULT_SHARED - program.code.shared_bytes):
        return INVALID_VALUE
    kinds = program.code.params
    if kinds and not params:
        return INVALID_VALUE
    pointers = c.cast(params, POUT) if params else None
    args = []
    for at, (kind, _name) in enumerate(kinds):
        address = pointers[at] if pointers is not None else None
        if not address:
            return INVALID_VALUE
        args.append(c.string_at(address, PARAM_BYTES[kind]))

    def run() -> None:
        program.launch(grid, block, args, shared, d.arena, backwards=d.backwards)

    d.submit(stream, Work("kernel", (program.code.name, grid, block), run))
    return 0


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
    d.graphs[graph] = tuple(capture.nodes)
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
    nodes, stream = d.get(d.execs, graph_exec), d.get(d.streams, handle)
    if stream.capture is not None:
        stream.capture.invalid = True
        return CAPTURE_UNSUPPORTED

    def run() -> None:
        for node in nodes:
            node.run()

    stream.push(Work("graph", graph_exec, run))
    return 0


def graph_update(d: FakeDriver, graph_exec: int | None, graph: int | None, info: int) -> int:
    """cuGraphExecUpdate: same kinds of nodes and the same kernels, other arguments."""
    old, new = d.get(d.execs, graph_exec), d.get(d.graphs, graph)
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
    d.execs[graph_exec or 0] = new
    return 0


def graph_nodes(d: FakeDriver, graph: int | None, out: Any, count: Any) -> None:
    """cuGraphGetNodes: the number of nodes only."""
    count[0] = len(d.get(d.graphs, graph))


def graph_destroy(d: FakeDriver, graph: int | None) -> None:
    """cuGraphDestroy."""
    d.get(d.graphs, graph)
    del d.graphs[graph or 0]


def exec_destroy(d: FakeDriver, graph_exec: int | None) -> None:
    """cuGraphExecDestroy: launches already queued keep their nodes."""
    d.get(d.execs, graph_exec)
    del d.execs[graph_exec or 0]


POINTER_INT, FLOAT = c.POINTER(INT), c.POINTER(c.c_float)
ENTRIES: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "cuStreamCreate": Entry((POUT, UINT), stream_create),
        "cuStreamDestroy": Entry((PTR,), stream_destroy),
        "cuStreamSynchronize": Entry((PTR,), stream_synchronize),
        "cuStreamQuery": Entry((PTR,), stream_query),
        "cuStreamWaitEvent": Entry((PTR, PTR, UINT), stream_wait),
        "cuEventCreate": Entry((POUT, UINT), event_create),
        "cuEventRecord": Entry((PTR, PTR), event_record),
        "cuEventQuery": Entry((PTR,), event_query),
        "cuEventSynchronize": Entry((PTR,), event_synchronize),
        "cuEventDestroy": Entry((PTR,), event_destroy),
        "cuEventElapsedTime": Entry((FLOAT, PTR, PTR), event_elapsed),
        "cuMemcpyHtoDAsync": Entry((U64, PTR, SIZE, PTR), copy_to_device),
        "cuMemcpyDtoHAsync": Entry((PTR, U64, SIZE, PTR), copy_to_host),
        "cuMemcpyDtoDAsync": Entry((U64, U64, SIZE, PTR), copy_on_device),
        "cuMemsetD8Async": Entry((U64, c.c_ubyte, SIZE, PTR), memset),
        "cuLaunchKernel": Entry((PTR, *(UINT,) * 7, PTR, PTR, PTR), launch),
        "cuStreamBeginCapture": Entry((PTR, INT), capture_begin),
        "cuStreamEndCapture": Entry((PTR, POUT), capture_end),
        "cuStreamIsCapturing": Entry((PTR, POINTER_INT), capture_status),
        "cuGraphInstantiateWithFlags": Entry((POUT, PTR, U64), graph_instantiate),
        "cuGraphUpload": Entry((PTR, PTR), graph_upload),
        "cuGraphLaunch": Entry((PTR, PTR), graph_launch),
        "cuGraphExecUpdate": Entry((PTR, PTR, PTR), graph_update),
        "cuGraphGetNodes": Entry((PTR, PTR, PSIZE), graph_nodes),
        "cuGraphDestroy": Entry((PTR,), graph_destroy),
        "cuGraphExecDestroy": Entry((PTR,), exec_destroy),
    }
)
