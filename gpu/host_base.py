"""What the parts of the host device share: how work is submitted, and the end.

What it owns: the heap; the tables and rules are `device_rules`'; `HostDevice` adds the operations.
Invariant: `close` empties every table whatever fails on the way.
"""

from __future__ import annotations

import logging

from ..errors import DeviceError
from .device import Event, Stream
from .device_rules import DeviceRules
from .host_capture import Capture, HostGraph, Node
from .host_memory import QUARANTINE_BYTES, Heap, available_memory
from .host_streams import EventState, Lane, drain, enqueue

log = logging.getLogger("rota.gpu.host")


class HostBase(DeviceRules[Lane, EventState, HostGraph, Capture]):
    """State and rules of a host device; see `HostDevice` for the arguments."""

    name = "host"
    host_addressable = True

    def __init__(
        self,
        *,
        checked: bool = False,
        memory_limit: int | None = None,
        allow_foreign: bool = False,
        quarantine_bytes: int = QUARANTINE_BYTES,
    ) -> None:
        limit = available_memory() if memory_limit is None else memory_limit
        if limit <= 0:
            raise DeviceError("bad memory limit", code="bad-argument", expected="> 0", found=limit)
        super().__init__()
        self.checked = checked
        self._direct = not checked
        self._allow_foreign = allow_foreign
        self._heap = Heap(limit, checked=checked, quarantine_bytes=quarantine_bytes)

    # Life time

    def live_labels(self) -> tuple[str, ...]:
        """Labels of allocations, then of streams, events, graphs and execs; each oldest first."""
        with self._lock:
            return (*self._heap.labels(), *self._handle_labels())

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
            try:
                for lane in self._lanes.values():
                    while lane.queue:  # a failure drops the queue, so this ends
                        try:
                            drain(lane, lane.queued, self._heap)
                        except DeviceError as error:
                            failures.append(error)
            finally:
                leaked = self.live_labels()
                for table in (self._lanes, self._events, self._graphs, self._execs):
                    table.clear()
                damage = self._heap.close()
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

    def _enter(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed", code="device-closed", subject=self.name)

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
            enqueue(lane, node, self._heap)

    def _pageable(self, addr: int, nbytes: int, stream: Stream) -> bool:
        """True if a host address is not the device's.

        Refused in a capture, where nothing keeps it alive.
        """
        if nbytes < 0 or not 0 < addr < 1 << 64:
            raise DeviceError("bad host range", code="bad-argument", found=f"{addr:#x}+{nbytes}")
        if self._heap.covers(addr) is not None:
            return False  # the copy's own check says whether it is pinned and long enough
        with self._lock:
            capture = self._capture_of(stream)
            if capture is not None:
                raise self._violation(
                    "a copy with pageable host memory", self._lane(stream).label, capture
                )
        return True

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
