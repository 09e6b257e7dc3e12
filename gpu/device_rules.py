"""What every device judges alike: handles of one counter, and what a capture permits.

What it owns: the handle tables, the one active capture and the lock over them; a device adds the
operations. Invariants: handles come from one counter and are never reused; a capture is broken at
the first violation and stays broken; the rules are judged here, so that they are the same on the
host and on every driver.
"""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from ..errors import DeviceError
from .device import CaptureMode, Event, Exec, Graph, Stream
from .host_capture import Capture

H = TypeVar("H", Stream, Event, Graph, Exec)
T = TypeVar("T")


class Labelled(Protocol):
    """An entry of a table."""

    @property
    def label(self) -> str: ...


LaneT = TypeVar("LaneT", bound=Labelled)
EventT = TypeVar("EventT", bound=Labelled)
GraphT = TypeVar("GraphT", bound=Labelled)
CaptureT = TypeVar("CaptureT", bound=Capture)


class DeviceRules(Generic[LaneT, EventT, GraphT, CaptureT]):
    """Tables and rules of one device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._last_handle = 0
        self._lanes: dict[Stream, LaneT] = {}
        self._events: dict[Event, EventT] = {}
        self._graphs: dict[Graph, GraphT] = {}
        self._execs: dict[Exec, GraphT] = {}
        self._capture: CaptureT | None = None

    def _enter(self) -> None:
        """Refuse where no operation is possible any more."""
        raise NotImplementedError  # each device has its own

    # Handles

    def _new_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    def _handle_labels(self) -> list[str]:
        """Of streams, events, graphs and execs; each oldest first."""
        tables = (self._lanes, self._events, self._graphs, self._execs)
        return [entry.label for table in tables for entry in table.values()]

    def _lane(self, stream: Stream) -> LaneT:
        lane = self._lanes.get(stream)
        return lane if lane is not None else self._get(self._lanes, stream)

    def _get(self, table: dict[H, T], handle: H) -> T:
        """The entry. Codes: device-closed, destroyed-handle, bad-handle."""
        entry = table.get(handle)
        if entry is not None:
            return entry
        if self._closed:
            self._enter()
        tables = (self._lanes, self._events, self._graphs, self._execs)
        if 0 < handle <= self._last_handle and not any(handle in other for other in tables):
            raise DeviceError(
                "the handle was destroyed", code="destroyed-handle", subject=str(handle)
            )
        raise DeviceError("no such handle", code="bad-handle", subject=str(handle))

    # Captures

    def _may_begin(self, stream: Stream, mode: CaptureMode) -> LaneT:
        """The stream on which a capture may begin. Codes: bad-argument, capture-violation."""
        lane = self._lane(stream)
        if mode not in ("global", "thread-local"):
            raise DeviceError("unknown capture mode", code="bad-argument", found=mode)
        if self._capture is not None:
            raise DeviceError(
                "a capture is active already", code="capture-violation", subject=lane.label
            )
        return lane

    def _may_end(self, stream: Stream) -> tuple[LaneT, CaptureT]:
        """The stream and its capture, which is over; it may be broken. Codes: not-capturing,
        capture-violation."""
        lane = self._lane(stream)
        capture = self._capture
        if capture is None or capture.origin != stream:
            raise DeviceError(
                "this stream began no capture", code="not-capturing", subject=lane.label
            )
        if threading.get_ident() != capture.thread:
            raise self._violation("end_capture by another thread", lane.label, capture)
        self._capture = None
        return lane, capture

    def _capture_of(self, stream: Stream) -> CaptureT | None:
        """The capture this stream takes part in; raises if an earlier violation broke it."""
        capture = self._capture
        if capture is None or stream not in capture.clocks:
            return None
        if capture.broken is not None:
            raise self._invalidated(capture)
        return capture

    def _safe_call(self, op: str) -> None:
        """Refuse a call that no capture permits to this thread."""
        self._enter()
        capture = self._capture
        if capture is not None and capture.bans(threading.get_ident()):
            raise self._violation(op, None, capture)

    def _not_captured(self, stream: Stream, op: str) -> None:
        capture = self._capture
        if capture is not None and stream in capture.clocks:
            raise self._violation(op, self._lane(stream).label, capture)

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

    def _unjoined(self, left: Stream, found: str | None = None) -> DeviceError:
        """The refusal of a capture that ``left`` joined and never left."""
        return DeviceError(
            "a stream joined the capture and was not joined back",
            code="capture-unjoined",
            subject=self._lanes[left].label if left in self._lanes else f"stream {left}",
            found=found,
        )
