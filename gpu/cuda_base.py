"""What the parts of the CUDA device share: the context, calls of the driver, and the end.

What it owns: the retained primary context (the one torch uses too) and the loaded modules; the
tables and rules are `device_rules`'; `CudaDevice` adds the operations.

Invariants:

* the rules of capture are judged before the driver is asked; its own refusals break the capture as
  well;
* a result that destroys the context marks the device dead: every later operation is refused with
  the first cause, give-backs only forget, and `close` still works;
* `close` gives everything back in order (execs, graphs, events, modules, memory, streams, context)
  and goes on after every failure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DeviceError
from . import host_capture
from .cuda_errors import driver_error, error_name
from .cuda_memory import CudaHeap
from .cuda_nvrtc import Compiler
from .cuda_probe import driver_module, why_unavailable
from .device import Stream
from .device_rules import DeviceRules
from .ranges import Range

log = logging.getLogger("rota.gpu.cuda")


@dataclass(slots=True, eq=False)
class Held:
    """A driver handle and its label."""

    label: str
    handle: Any


@dataclass(slots=True, eq=False)
class HeldEvent(Held):
    """An event, and the capture it was last recorded in."""

    capture: CudaCapture | None = None


@dataclass(slots=True, eq=False)
class HeldGraph(Held):
    """A graph or exec, and the allocations its nodes name; ``valid_at`` as in `host_capture`."""

    blocks: tuple[Range, ...] = ()
    valid_at: int = -1


@dataclass(slots=True)
class CudaCapture(host_capture.Capture):
    """The active capture: members and clocks as on the host; the driver keeps the nodes."""

    count: int = 0
    held: dict[int, Range] = field(default_factory=dict)

    def note(self, stream: Stream, blocks: list[Range]) -> None:
        """One more node on a member stream. Code: capture-too-large."""
        if self.count >= host_capture.MAX_NODES:
            self.broken = self.broken or "too many nodes"
            raise DeviceError(
                "too many nodes in one capture",
                code="capture-too-large",
                expected=host_capture.MAX_NODES,
            )
        self.count += 1
        self.clocks[stream][stream] += 1
        for block in blocks:
            self.held[block.serial] = block


class CudaBase(DeviceRules[Held, HeldEvent, HeldGraph, CudaCapture]):
    """State and rules of a CUDA device; see `CudaDevice` for the arguments."""

    host_addressable = False

    def __init__(
        self,
        ordinal: int = 0,
        *,
        test_driver: bool = False,
        memory_limit: int | None = None,
        cache_dir: Path | None = None,
        checked: bool = False,
        timing: bool = False,
        probed: bool = False,
    ) -> None:
        if memory_limit is not None and memory_limit <= 0:
            raise DeviceError(
                "bad memory limit", code="bad-argument", expected="> 0", found=memory_limit
            )
        why = why_unavailable(test_driver=test_driver, apart=not probed)
        if why is not None:
            raise DeviceError(
                f"no CUDA device can be used: {why}", code="cuda-unavailable", subject="cuda"
            )
        super().__init__()
        self.checked = checked
        self._timing = timing
        self._driver = driver_module()
        self._heap = CudaHeap(memory_limit)
        self._local = threading.local()
        self._dead: DeviceError | None = None
        self._modules: dict[str, Any] = {}
        self.name = f"cuda:{ordinal}"
        self._gpu = self._raw("cuDeviceGet", ordinal)
        self._context = self._raw("cuDevicePrimaryCtxRetain", self._gpu)
        try:
            self._enter()
            attribute = self._driver.CUdevice_attribute
            self.capability: tuple[int, int] = (
                self._raw(
                    "cuDeviceGetAttribute",
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    self._gpu,
                ),
                self._raw(
                    "cuDeviceGetAttribute",
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                    self._gpu,
                ),
            )
            self.processors: int = self._raw(
                "cuDeviceGetAttribute",
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                self._gpu,
            )
            text = self._raw("cuDeviceGetName", 128, self._gpu)
            self.model = text.split(b"\0")[0].decode(errors="replace").strip()
            self.compiler = Compiler(
                self.capability, form="ptx" if test_driver else "cubin", cache_dir=cache_dir
            )
        except BaseException:
            self._closed = True
            self._release()
            raise

    # Calling the driver

    def _raw(self, name: str, *args: Any, subject: str | None = None) -> Any:
        """Call the driver; its value, or the refusal as `DeviceError`."""
        try:
            result = getattr(self._driver, name)(*args)
        except RuntimeError as error:  # the driver lacks the function
            raise DeviceError(
                f"{name} cannot be called: {error}", code="driver-error", subject=subject
            ) from error
        except (OverflowError, TypeError) as error:
            raise DeviceError(
                f"{name}: {error}", code="bad-argument", subject=subject, found=args
            ) from error
        if int(result[0]):
            raise self._failed(name, result[0], subject)
        return result[1] if len(result) > 1 else None

    def _failed(self, call: str, result: Any, subject: str | None) -> DeviceError:
        """The refusal for a result; it may break the capture or the device."""
        error = driver_error(call, result, subject)
        if error.code == "device-dead" and self._dead is None:
            self._dead = error
            log.error("the CUDA context is lost: %s said %s", call, error.found)
        if error.code.startswith("capture-") and self._capture is not None:
            self._capture.broken = self._capture.broken or call
        return error

    def _enter(self) -> None:
        """Refuse on a closed or dead device; make the context current in this thread."""
        if self._closed:
            raise DeviceError("the device is closed", code="device-closed", subject=self.name)
        if self._dead is not None:
            raise DeviceError(
                f"the device was lost earlier: {self._dead.message}",
                code="device-dead",
                subject=self._dead.subject,
                found=self._dead.found,
            )
        if not getattr(self._local, "current", False):
            self._raw("cuCtxSetCurrent", self._context)
            self._local.current = True

    def _call(self, name: str, *args: Any, subject: str | None = None) -> Any:
        self._enter()
        return self._raw(name, *args, subject=subject)

    # Giving back

    def _drop_driver_capture(self, lane: Held) -> None:
        """End the driver's capture on a stream and destroy what it recorded; never raises."""
        for _ in range(2):
            try:
                graph = self._raw("cuStreamEndCapture", lane.handle, subject=lane.label)
                if graph is not None and int(graph):
                    self._raw("cuGraphDestroy", graph, subject=lane.label)
                return
            except DeviceError as error:
                log.debug("dropping a capture: %s", error)
            try:
                if int(self._raw("cuStreamIsCapturing", lane.handle)) == 0:
                    return
            except DeviceError as error:
                log.debug("dropping a capture: %s", error)

    def _forget(self, call: str, held: Held) -> None:
        """Destroy a driver handle; on a lost context there is nothing left to destroy."""
        if self._closed or self._dead is None:
            self._call(call, held.handle, subject=held.label)

    # Life time

    def live_labels(self) -> tuple[str, ...]:
        """Labels of allocations, then of streams, events, graphs and execs; each oldest first."""
        with self._lock:
            return (*(block.label for block in self._heap.blocks()), *self._handle_labels())

    def close(self) -> None:
        """See `Device.close`.

        Everything is given back, then a checked device raises for leaks, a serving one logs. What
        the driver refused on the way, or queued work raised, is raised at the end.
        """
        with self._lock:
            if self._closed:
                return
            failures: list[DeviceError] = []

            def attempt(action: Callable[[], object]) -> None:
                try:
                    action()
                except DeviceError as error:
                    failures.append(error)

            leaked = self.live_labels()
            if self._dead is None:
                attempt(self._enter)
            if self._capture is not None:
                self._drop_driver_capture(self._lanes[self._capture.origin])
                self._capture = None
            for lane in self._lanes.values():
                if self._dead is None:
                    attempt(
                        partial(self._raw, "cuStreamSynchronize", lane.handle, subject=lane.label)
                    )
            for call, handle, label in self._give_backs():
                if self._dead is None:
                    attempt(partial(self._raw, call, handle, subject=label))
            for table in (self._lanes, self._events, self._graphs, self._execs, self._modules):
                table.clear()
            for block in self._heap.blocks():
                self._heap.remove(block)
            self._closed = True
            attempt(self._release)
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

    def _give_backs(self) -> list[tuple[str, Any, str]]:
        calls: list[tuple[str, Any, str]] = []
        for call, table in (
            ("cuGraphExecDestroy", self._execs),
            ("cuGraphDestroy", self._graphs),
            ("cuEventDestroy", self._events),
        ):
            calls += [(call, held.handle, held.label) for held in table.values()]
        calls += [("cuModuleUnload", module, "module") for module in self._modules.values()]
        for block in self._heap.blocks():
            call = "cuMemFree" if block.kind == "device" else "cuMemFreeHost"
            calls.append((call, block.start, block.label))
        return calls + [
            ("cuStreamDestroy", held.handle, held.label) for held in self._lanes.values()
        ]

    def _release(self) -> None:
        """Release the primary context, with one more try: a context must not outlive its owner."""
        for last in (False, True):
            (result,) = self._driver.cuDevicePrimaryCtxRelease(self._gpu)
            if not int(result):
                return
            log.warning("cuDevicePrimaryCtxRelease said %s", error_name(result))
            if last and self._dead is None:  # a lost context goes with the process
                raise self._failed("cuDevicePrimaryCtxRelease", result, self.name)
