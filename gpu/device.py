"""The Device protocol: the few operations every accelerator room needs, as plain integers.

What it is: one typed contract with equal implementations (`gpu.host.HostDevice`, and the CUDA
backend on the driver API), so that pool, kernels, graphs and runner are written once. It owns no
state.

Invariants every implementation keeps:

* addresses are plain ints, sizes are bytes, and an allocation never moves;
* handles (stream, event, graph, exec) are opaque ints that are never reused while the device is
  open;
* work on one stream runs in call order; two streams are ordered only by events;
* each refusal is a `DeviceError` whose code is a key of `DEVICE_CODES` and whose ``subject`` is the
  label of the allocation (or the name of the handle or kernel) at fault;
* `close` frees everything exactly once and may be called again.

The contents of a fresh allocation are undefined. A checked host device fills it with 0xA5, so that
reading memory nobody wrote is seen; never rely on zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NewType, Protocol

from ..errors import DeviceError

log = logging.getLogger("rota.gpu.device")

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Graph = NewType("Graph", int)
Exec = NewType("Exec", int)

Dim3 = tuple[int, int, int]
Access = tuple[int, int, Literal["r", "w"]]
"""One range a kernel touches: (address, bytes, "r" or "w")."""
Footprint = Callable[[tuple[int | float, ...]], Iterable[Access]]
CaptureMode = Literal["global", "thread-local"]

ALIGNMENT: Final = 256
"""Every device allocation starts on a multiple of this many bytes (what cuMemAlloc promises)."""

DEVICE_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bad-argument": "a size, byte, parameter or mode outside what the operation takes",
        "bad-address": "an address that no allocation of the right kind holds",
        "bad-handle": "an int that was never a handle of this kind",
        "destroyed-handle": "a stream, event, graph or exec that was destroyed",
        "out-of-memory": "the allocation would pass the memory limit, or the system refused it",
        "out-of-bounds": "a range that starts inside an allocation and leaves it",
        "use-after-free": "a range of an allocation that was freed",
        "double-free": "an address that was freed before",
        "redzone-broken": "bytes just outside an allocation were overwritten (checked devices)",
        "launch-failed": "a kernel raised, or the driver refused the launch",
        "capture-violation": "an operation no stream capture permits; it invalidates the capture",
        "capture-invalidated": "the capture was invalidated by an earlier violation",
        "capture-unjoined": "a stream joined the capture and its origin did not wait for it",
        "capture-too-large": "more nodes than one graph may hold",
        "not-capturing": "end_capture on a stream that did not begin a capture",
        "graph-mismatch": "an exec cannot take over a graph that does other work than its own",
        "leak": "allocations or handles were alive at close",
        "device-closed": "the device is closed",
        "cuda-unavailable": "no CUDA device can be used here, and why",
        "device-dead": "an earlier error destroyed the device's context; only close is left",
        "driver-error": "the driver refused for a reason of its own; its name is in found",
        "injected": "a fault asked for by a test or the simulator",
    }
)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel by name: the same launch signature on every device.

    Attributes:
        name: stable name, e.g. ``"bgmv_shrink"``.
        params: one letter an argument: ``p`` address (u64, 0 allowed), ``i`` int32, ``l`` int64,
            ``f`` float32.
        host: callable for the host device; called as ``host(*args)``, ignores grid and block.
        cuda_source: CUDA C++ text holding ``extern "C" __global__`` *name*, or ``None``.
        footprint: optional ``footprint(args) -> [(address, bytes, "r" | "w")]``, used by checked
            devices just before the kernel runs (so it may read device tables that earlier work on
            the stream filled).
        overlaps: on a GPU that can (compute capability 9.0), begin while the kernel launched before
            it on the stream still runs. The kernel then waits itself (``griddepcontrol.wait``)
            before it stores anything or reads what that kernel writes, some block of it always
            does, and it never reads that through the read-only path.
    """

    name: str
    params: str
    host: Callable[..., object] | None = None
    cuda_source: str | None = None
    footprint: Footprint | None = None
    overlaps: bool = False


class Kernel(Protocol):
    """A loaded kernel; lives until the device closes."""

    @property
    def spec(self) -> KernelSpec:
        """What was loaded."""
        ...


class Device(Protocol):
    """One accelerator, or the host in its place.

    Threads: one owner thread launches, captures and replays; staging workers may allocate pinned
    memory and copy on streams of their own. A stream is used by one thread at a time.

    Every method raises `DeviceError` with code ``device-closed`` after `close`, ``bad-handle`` or
    ``destroyed-handle`` for a wrong handle, and the codes named at each method.

    Capture follows the driver's rules. While a capture is active these calls are violations: they
    raise ``capture-violation`` and invalidate the capture (`end_capture` then raises
    ``capture-invalidated``):

    * `synchronize`, `query`, `destroy_stream` or `replay` of a stream in the capture, by any
      thread;
    * `alloc`, `free`, `pinned_alloc`, `pinned_free`, `load_kernel`, `synchronize`, `query`,
      `synchronize_event`, `query_event` in general: by any thread in ``"global"`` mode, by the
      capturing thread in ``"thread-local"``;
    * `wait_event` of a stream in the capture on an event recorded outside it;
    * copies between a stream in the capture and pageable host memory (nothing keeps it alive until
      replay).

    Events recorded in a capture can be waited for inside it only; they cannot be synchronised or
    queried until they are recorded again outside. One capture at a time per device: a second
    `begin_capture` is refused.
    """

    @property
    def name(self) -> str:
        """Human-readable name, e.g. ``"host"``."""
        ...

    @property
    def host_addressable(self) -> bool:
        """True if the CPU may dereference device addresses."""
        ...

    def alloc(self, nbytes: int, *, label: str) -> int:
        """Allocate device memory: aligned to `ALIGNMENT`, contents undefined.

        Codes: out-of-memory, bad-argument.
        """
        ...

    def free(self, addr: int) -> None:
        """Give back what `alloc` returned.

        Finish the work that uses it first. Codes: double-free, bad-address.
        """
        ...

    def pinned_alloc(self, nbytes: int, *, label: str) -> int:
        """Allocate page-locked host memory.

        The CPU may dereference it, and copies from it are asynchronous.
        """
        ...

    def pinned_free(self, addr: int) -> None:
        """Give back what `pinned_alloc` returned."""
        ...

    def memset(self, addr: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Fill with ``byte`` (0..255).

        Codes: out-of-bounds, use-after-free, bad-address, bad-argument.
        """
        ...

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Copy host to device.

        Pageable ``src`` has been read when the call returns; pinned ``src`` is read when the copy
        runs, so it must not change until the stream has passed it.
        """
        ...

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Copy device to host.

        Pageable ``dst`` is complete at return; pinned ``dst`` after synchronisation.
        """
        ...

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Copy inside the device; the ranges must not overlap (bad-argument)."""
        ...

    def create_stream(self, *, label: str = "") -> Stream:
        """Create a stream that synchronises with no other (CU_STREAM_NON_BLOCKING)."""
        ...

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream; its queued work is still done."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Wait until the stream's work is done. Raises what that work raised."""
        ...

    def query(self, stream: Stream) -> bool:
        """True if the stream's work is done; never waits."""
        ...

    def create_event(self, *, label: str = "") -> Event:
        """Create an event without timing. An event never recorded counts as done."""
        ...

    def record_event(self, event: Event, stream: Stream) -> None:
        """Place the event after all work on the stream so far, replacing its earlier place."""
        ...

    def wait_event(self, event: Event, stream: Stream) -> None:
        """Later work of the stream runs after the event's place as of this call.

        The host does not wait.
        """
        ...

    def query_event(self, event: Event) -> bool:
        """True if the event's place has been passed; never waits."""
        ...

    def synchronize_event(self, event: Event) -> None:
        """Wait until the event's place has been passed."""
        ...

    def destroy_event(self, event: Event) -> None:
        """Destroy an event; waits already queued on it stand."""
        ...

    def load_kernel(self, spec: KernelSpec) -> Kernel:
        """Make a kernel launchable.

        Codes: bad-argument (no code for this device, unknown parameter letter).
        """
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[int | float],
        stream: Stream,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel on the stream; ``args`` are copied at the call.

        Codes: launch-failed, bad-argument.
        """
        ...

    def begin_capture(self, stream: Stream, mode: CaptureMode = "thread-local") -> None:
        """Record the stream's work in a graph instead of running it, until `end_capture`."""
        ...

    def end_capture(self, stream: Stream) -> Graph:
        """End the capture begun on this stream.

        Codes: not-capturing; capture-violation from another thread than began it (the capture is
        then invalid, and still to be ended); capture-invalidated and capture-unjoined, after which
        the capture is over.
        """
        ...

    def abort_capture_if_active(self, stream: Stream) -> bool:
        """Drop the capture this stream takes part in; False if there is none. Never a violation."""
        ...

    def instantiate(self, graph: Graph) -> Exec:
        """Make a graph replayable; the exec is independent of the graph from here on."""
        ...

    def update(self, graph_exec: Exec, graph: Graph) -> None:
        """Give an exec the arguments of another graph that does the same work: the same kernels,
        copies and fills in the same order. Replays queued before keep what they had.

        Codes: graph-mismatch (the exec is unchanged), destroyed-handle, bad-handle.
        """
        ...

    def upload(self, graph_exec: Exec, stream: Stream) -> None:
        """Do the first replay's preparation now."""
        ...

    def replay(self, graph_exec: Exec, stream: Stream) -> None:
        """Run a graph on the stream.

        A freed allocation it touches fails as use-after-free, with its label.
        """
        ...

    def destroy_graph(self, graph: Graph) -> None:
        """Destroy a graph."""
        ...

    def destroy_exec(self, graph_exec: Exec) -> None:
        """Destroy an exec; replays already queued are still done."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    def live_labels(self) -> tuple[str, ...]:
        """Labels of all live allocations and handles, oldest first; empty when nothing is left."""
        ...

    def close(self) -> None:
        """Finish all work and free everything, exactly once; idempotent.

        End the threads that use the device first. What was alive is freed and named: a checked
        device raises ``leak`` (after freeing), a serving one logs a warning.
        """
        ...


def open_device(spec: Literal["auto", "cpu", "cuda"] = "auto") -> Device:
    """Open ``"cpu"`` (the host), ``"cuda"`` (a GPU or a named refusal) or ``"auto"``: the best.

    ``"auto"`` takes the GPU where the driver shows one and torch can use it, and else the host,
    with one log line that says why. Compiled kernels are cached in ``~/.cache/rota/kernels``.

    Raises:
        DeviceError: ``cuda-unavailable`` (says why) or ``bad-argument`` (unknown spec); with
            ``"cuda"`` and ``"auto"`` also what opening a GPU that is there raises.
    """
    # Late: the protocol must be importable by its own implementations, and CUDA costs time.
    if spec not in ("auto", "cpu", "cuda"):
        raise DeviceError(
            "unknown device",
            code="bad-argument",
            expected="'auto', 'cpu' or 'cuda'",
            found=repr(spec),
        )
    if spec != "cpu":
        from .cuda_probe import why_unavailable

        why = why_unavailable()
        if why is None:
            from .cuda import CudaDevice
            from .cuda_tensors import why_no_torch_cuda

            why = why_no_torch_cuda()
            if why is None:
                return CudaDevice(
                    cache_dir=Path.home() / ".cache" / "rota" / "kernels", probed=True
                )
        if spec == "cuda":
            raise DeviceError(
                f"no CUDA device can be used: {why}", code="cuda-unavailable", subject="cuda"
            )
        log.info("the host serves, no CUDA device can be used: %s", why)
    from .host import HostDevice

    return HostDevice()
