"""The CUDA device: the Device protocol on the driver API (cuda.bindings.driver).

What it owns: the operations; context, tables and rules are in `cuda_base`, graphs in
`cuda_capture`, launch forms in `cuda_kernel`, address ranges in `cuda_memory`, compilation in
`cuda_nvrtc`. No runtime API and no torch: it shares pointers and streams with torch through the
primary context.

Invariants: streams are non-blocking; a launch allocates nothing; the lock is never held while a
call waits for the GPU.

Source of the calls: CUDA driver API reference, 13.0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..errors import DeviceError
from .cuda_base import Held, HeldEvent
from .cuda_capture import CudaGraphs
from .cuda_kernel import OVERLAP_SINCE, SLOTS, CudaKernel
from .device import Dim3, Event, Kernel, KernelSpec, Stream
from .host_launch import MAX_PARAMS, check_launch
from .ranges import Kind, Range


class CudaDevice(CudaGraphs):
    """A GPU as a `Device`.

    Args:
        ordinal: which device the driver shows.
        test_driver: run on `gpu.fakecuda` instead of a GPU (it must be loaded already).
        memory_limit: bytes that device and pinned allocations together may take; default: no limit
            but the driver's.
        cache_dir: folder for compiled kernels; ``None`` compiles anew in each process.
        checked: leaks raise at close, and launches refuse addresses that are known to be freed.
        timing: events carry time stamps, for `elapsed_ms`.
        probed: `cuda_probe.why_unavailable` found a device just now.

    Raises:
        DeviceError: cuda-unavailable (says why), bad-argument, driver-error.
    """

    def alloc(self, nbytes: int, *, label: str) -> int:
        """See `Device.alloc`."""
        return self._take("alloc", "cuMemAlloc", (nbytes,), nbytes, "device", label)

    def free(self, addr: int) -> None:
        """See `Device.free`."""
        self._give("free", "cuMemFree", addr, "device")

    def pinned_alloc(self, nbytes: int, *, label: str) -> int:
        """See `Device.pinned_alloc`."""
        return self._take("pinned_alloc", "cuMemHostAlloc", (nbytes, 0), nbytes, "pinned", label)

    def pinned_free(self, addr: int) -> None:
        """See `Device.pinned_free`."""
        self._give("pinned_free", "cuMemFreeHost", addr, "pinned")

    def _take(
        self, op: str, call: str, args: tuple[int, ...], nbytes: int, kind: Kind, label: str
    ) -> int:
        with self._lock:
            self._safe_call(op)
        # Outside the lock: the driver may wait for the GPU to find or take back memory.
        self._heap.reserve(nbytes, kind, label)
        try:
            addr = int(self._call(call, *args, subject=label))
        except BaseException:
            self._heap.unreserve(nbytes)
            raise
        self._heap.add(addr, nbytes, kind, label)
        return addr

    def _give(self, op: str, call: str, addr: int, kind: Kind) -> None:
        with self._lock:
            if self._dead is None:
                self._safe_call(op)
            block = self._heap.owned(addr, kind)
            self._heap.remove(block)
        try:
            self._forget(call, Held(block.label, addr))
        except BaseException:
            if self._dead is None:
                self._heap.restore(block)
            raise

    def memory_info(self) -> tuple[int, int]:
        """See `Device.memory_info`: the driver's figures, cut to the limit."""
        self._enter()
        result, free, total = self._driver.cuMemGetInfo()
        if int(result):
            raise self._failed("cuMemGetInfo", result, self.name)
        limit = self._heap.limit
        return min(limit - self._heap.used, int(free)), min(limit, int(total))

    def memset(self, addr: int, byte: int, nbytes: int, stream: Stream) -> None:
        """See `Device.memset`."""
        if not 0 <= byte <= 255:
            raise DeviceError("bad byte", code="bad-argument", expected="0..255", found=byte)
        lane = self._ready_lane(stream)
        block = self._heap.find(addr, nbytes, "device")
        self._work(stream, [block])
        if nbytes:
            self._call("cuMemsetD8Async", addr, byte, nbytes, lane.handle, subject=block.label)

    def copy_h2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_h2d`."""
        lane = self._ready_lane(stream)
        host = self._host_side(src, nbytes, stream)
        block = self._heap.find(dst, nbytes, "device")
        self._work(stream, [block, *host])
        if nbytes:
            self._call("cuMemcpyHtoDAsync", dst, src, nbytes, lane.handle, subject=block.label)

    def copy_d2h(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_d2h`. The driver waits for copies to pageable memory."""
        lane = self._ready_lane(stream)
        host = self._host_side(dst, nbytes, stream)
        block = self._heap.find(src, nbytes, "device")
        self._work(stream, [block, *host])
        if nbytes:
            self._call("cuMemcpyDtoHAsync", dst, src, nbytes, lane.handle, subject=block.label)

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """See `Device.copy_d2d`."""
        lane = self._ready_lane(stream)
        target = self._heap.find(dst, nbytes, "device")
        source = self._heap.find(src, nbytes, "device")
        if dst < src + nbytes and src < dst + nbytes:
            raise DeviceError(
                "source and destination overlap", code="bad-argument", subject=target.label
            )
        self._work(stream, [target, source])
        if nbytes:
            self._call("cuMemcpyDtoDAsync", dst, src, nbytes, lane.handle, subject=target.label)

    def _host_side(self, addr: int, nbytes: int, stream: Stream) -> list[Range]:
        """The pinned block of a host range; pageable memory is refused in a capture."""
        if nbytes < 0 or not 0 < addr < 1 << 64:
            raise DeviceError("bad host range", code="bad-argument", found=f"{addr:#x}+{nbytes}")
        if self._heap.covers(addr) is not None:
            return [self._heap.find(addr, nbytes, "pinned")]
        freed = self._heap.freed(addr)
        if freed is not None and freed.kind == "pinned":
            raise DeviceError("used after free", code="use-after-free", subject=freed.label)
        with self._lock:
            capture = self._capture_of(stream)
            if capture is not None:
                raise self._violation(
                    "a copy with pageable host memory", self._lane(stream).label, capture
                )
        return []

    def _ready_lane(self, stream: Stream) -> Held:
        """A stream that takes work now: the device is usable, no broken capture holds it."""
        lane = self._lane(stream)
        self._enter()
        if self._capture is not None:
            with self._lock:
                self._capture_of(stream)
        return lane

    def _work(self, stream: Stream, blocks: list[Range]) -> None:
        """Note work in the capture, if the stream is in one."""
        if self._capture is not None:
            with self._lock:
                capture = self._capture_of(stream)
                if capture is not None:
                    capture.note(stream, blocks)

    def create_stream(self, *, label: str = "") -> Stream:
        """See `Device.create_stream`."""
        with self._lock:
            flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            handle = self._call("cuStreamCreate", int(flag), subject=label or None)
            stream = Stream(self._new_handle())
            self._lanes[stream] = Held(label or f"stream {stream}", handle)
            return stream

    def destroy_stream(self, stream: Stream) -> None:
        """See `Device.destroy_stream`."""
        with self._lock:
            lane = self._lane(stream)
            self._not_captured(stream, "destroy_stream")
            self._forget("cuStreamDestroy", lane)
            del self._lanes[stream]

    def stream_handle(self, stream: Stream) -> int:
        """The CUstream as an integer, for torch's ExternalStream. The device keeps owning it."""
        return int(self._lane(stream).handle)

    def synchronize(self, stream: Stream) -> None:
        """See `Device.synchronize`. What failed work raises is device-dead."""
        with self._lock:
            lane = self._lane(stream)
            self._not_captured(stream, "synchronize")
            self._safe_call("synchronize")
        self._call("cuStreamSynchronize", lane.handle, subject=lane.label)

    def query(self, stream: Stream) -> bool:
        """See `Device.query`."""
        with self._lock:
            lane = self._lane(stream)
            self._not_captured(stream, "query")
            self._safe_call("query")
        return self._ready("cuStreamQuery", lane)

    def _ready(self, call: str, held: Held) -> bool:
        self._enter()
        (result,) = getattr(self._driver, call)(held.handle)
        if int(result) == int(self._driver.CUresult.CUDA_ERROR_NOT_READY):
            return False
        if int(result):
            raise self._failed(call, result, held.label)
        return True

    def create_event(self, *, label: str = "") -> Event:
        """See `Device.create_event`."""
        with self._lock:
            flags = self._driver.CUevent_flags
            flag = flags.CU_EVENT_DEFAULT if self._timing else flags.CU_EVENT_DISABLE_TIMING
            handle = self._call("cuEventCreate", int(flag), subject=label or None)
            event = Event(self._new_handle())
            self._events[event] = HeldEvent(label or f"event {event}", handle)
            return event

    def record_event(self, event: Event, stream: Stream) -> None:
        """See `Device.record_event`."""
        with self._lock:
            lane = self._lane(stream)
            held = self._get(self._events, event)
            capture = self._capture_of(stream)
            self._call("cuEventRecord", held.handle, lane.handle, subject=held.label)
            held.capture = capture
            if capture is not None:
                capture.record(event, stream)

    def wait_event(self, event: Event, stream: Stream) -> None:
        """See `Device.wait_event`."""
        with self._lock:
            lane = self._lane(stream)
            held = self._get(self._events, event)
            capture = self._capture_of(stream)
            inside = held.capture
            if inside is not None and inside is not self._capture:
                raise self._violation("wait for an event of an ended capture", held.label, capture)
            if inside is not None and inside.broken is not None:
                raise self._invalidated(inside)
            if inside is None and capture is not None:
                raise self._violation(
                    "wait for an event recorded outside the capture", held.label, capture
                )
            self._call("cuStreamWaitEvent", lane.handle, held.handle, 0, subject=held.label)
            if inside is not None:
                inside.join(event, stream)

    def query_event(self, event: Event) -> bool:
        """See `Device.query_event`."""
        return self._ready("cuEventQuery", self._outside_event(event, "query_event"))

    def synchronize_event(self, event: Event) -> None:
        """See `Device.synchronize_event`."""
        held = self._outside_event(event, "synchronize_event")
        self._call("cuEventSynchronize", held.handle, subject=held.label)

    def _outside_event(self, event: Event, op: str) -> HeldEvent:
        with self._lock:
            held = self._get(self._events, event)
            if held.capture is not None:
                active = held.capture if held.capture is self._capture else None
                raise self._violation(f"{op} of an event recorded in a capture", held.label, active)
            self._safe_call(op)
            return held

    def elapsed_ms(self, first: Event, second: Event) -> float:
        """Milliseconds between two passed events of a device opened with ``timing``."""
        a, b = self._get(self._events, first), self._get(self._events, second)
        return float(self._call("cuEventElapsedTime", a.handle, b.handle, subject=b.label))

    def destroy_event(self, event: Event) -> None:
        """See `Device.destroy_event`."""
        with self._lock:
            self._forget("cuEventDestroy", self._get(self._events, event))
            del self._events[event]

    def load_kernel(self, spec: KernelSpec) -> CudaKernel:
        """See `Device.load_kernel`. Kernels of one source share a module until close."""
        with self._lock:
            self._safe_call("load_kernel")
            unknown = set(spec.params) - set(SLOTS)
            if spec.cuda_source is None or unknown or len(spec.params) > MAX_PARAMS:
                raise DeviceError(
                    "no CUDA form, or bad parameter letters",
                    code="bad-argument",
                    subject=spec.name,
                    expected=f"cuda_source, and at most {MAX_PARAMS} of p i l f",
                    found=spec.params,
                )
            source = spec.cuda_source
            module = self._modules.get(source)
            if module is None:
                image = self.compiler.compile(source, spec.name)
                module = self._call("cuModuleLoadData", image.code, subject=spec.name)
                self._modules[source] = module
            function = self._call(
                "cuModuleGetFunction", module, spec.name.encode(), subject=spec.name
            )
            overlap = spec.overlaps and self.capability >= OVERLAP_SINCE
            return CudaKernel(spec, function, self._driver, overlap=overlap)

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
        if not isinstance(kernel, CudaKernel):
            raise DeviceError("not a kernel of this device", code="bad-handle")
        lane = self._ready_lane(stream)
        spec = kernel.spec
        with self._lock:
            try:
                kernel.pack(args)
            except (struct.error, OverflowError, TypeError) as error:
                check_launch(spec, grid, block, args, shared_bytes)
                raise DeviceError(
                    f"bad arguments: {error}", code="bad-argument", subject=spec.name
                ) from error
            if self.checked or self._capture is not None:
                check_launch(spec, grid, block, args, shared_bytes)
                self._work(stream, self._named(spec, args))
            if shared_bytes > kernel.shared_limit:
                what = self._driver.CUfunction_attribute
                self._call(
                    "cuFuncSetAttribute",
                    kernel.function,
                    what.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes,
                    subject=spec.name,
                )
                kernel.shared_limit = shared_bytes
            call, values = kernel.call(grid, block, shared_bytes, lane.handle)
            self._raw(call, *values, subject=spec.name)

    def _named(self, spec: KernelSpec, args: Sequence[int | float]) -> list[Range]:
        """The blocks of the address arguments; an address known to be freed is refused."""
        blocks = []
        for letter, value in zip(spec.params, args, strict=True):
            if letter == "p" and value:
                block = self._heap.covers(int(value))
                freed = self._heap.freed(int(value)) if block is None else None
                if freed is not None:
                    error = DeviceError(
                        "used after free", code="use-after-free", subject=freed.label
                    )
                    error.add_note(f"in the arguments of kernel {spec.name}")
                    raise error
                if block is not None:
                    blocks.append(block)
        return blocks
