"""Entry points of the fake driver: streams, events, copies, launches.

Owns nothing: functions over `FakeDriver`, and `ENTRIES`.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .api_device import POUT, PTR, SIZE, U64, UINT, Entry
from .driver import (
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURED_EVENT,
    INVALID_VALUE,
    NOT_READY,
    NOT_SUPPORTED,
    DriverError,
    FakeDriver,
)
from .ptx_exec import Dim3
from .ptx_parse import PARAM_BYTES
from .queue_model import QUERIES_BEFORE_DONE, Event, Stream, Wait, Work, drain

DEFAULT_SHARED: Final = 48 << 10
"""Shared bytes a block may have before its kernel opts in to more."""
MAX_GRID: Final = (2**31 - 1, 65535, 65535)
PROGRAMMATIC_SERIALIZATION: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


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


class LaunchAttribute(c.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes whose first int is what is modelled."""

    _fields_ = (("id", c.c_int), ("pad", c.c_int), ("value", c.c_int), ("rest", c.c_int * 15))


class LaunchConfig(c.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", UINT * 3),
        ("block", UINT * 3),
        ("shared", UINT),
        ("stream", PTR),
        ("attributes", c.POINTER(LaunchAttribute)),
        ("count", UINT),
    )


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
    return _launch(d, function, (gx, gy, gz), (bx, by, bz), shared, handle, params, early=False)


def launch_ex(
    d: FakeDriver, config: int | None, function: int | None, params: int | None, extra: int | None
) -> int:
    """cuLaunchKernelEx, with programmatic stream serialisation or no attribute."""
    if not config:
        return INVALID_VALUE
    asked = LaunchConfig.from_address(config)
    early = False
    for attribute in asked.attributes[: asked.count]:
        if attribute.id != PROGRAMMATIC_SERIALIZATION:
            return NOT_SUPPORTED
        early = attribute.value != 0
    if early and d.capability < (9, 0):
        return NOT_SUPPORTED
    grid, block = tuple(asked.grid), tuple(asked.block)
    return _launch(d, function, grid, block, asked.shared, asked.stream, params, early=early)


def _launch(
    d: FakeDriver,
    function: int | None,
    grid: Dim3,
    block: Dim3,
    shared: int,
    handle: int | None,
    params: int | None,
    *,
    early: bool,
) -> int:
    _, program = d.get(d.functions, function)
    stream = d.get(d.streams, handle)
    if any(not 1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
        return INVALID_VALUE
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > 1024 or block[2] > 64:
        return INVALID_VALUE
    if threads > program.code.max_threads:
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
    trail = d.trail(stream)

    def run() -> None:
        ahead = trail if early else None
        stores = program.launch(
            grid, block, args, shared, d.arena, backwards=d.backwards, ahead=ahead
        )
        trail.follow(stores, early)

    d.submit(stream, Work("kernel", (program.code.name, grid, block), run))
    return 0


FLOAT = c.POINTER(c.c_float)
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
        "cuLaunchKernelEx": Entry((PTR, PTR, PTR, PTR), launch_ex),
    }
)
