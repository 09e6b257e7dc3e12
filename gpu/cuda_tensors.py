"""The CUDA tensor space: the one file that calls ``torch.cuda``.

What it owns: torch's handles on the device's streams, and the private memory pool its recordings
allocate from. Invariants: torch and `CudaDevice` share the primary context, so addresses and
streams mean the same to both; torch memory that a graph holds lies in the private pool, whose
blocks no eager work gets and which lives until `forget`.

How capture is safe: the driver captures (`Device.begin_capture`, thread-local), torch's allocator
is told by `use_mem_pool` to serve this thread from the pool, and when the pool must grow it lifts
the capture's ban on cudaMalloc itself (``cudaMallocMaybeCapturing`` of its caching allocator).
Intermediates of graphs in one pool may share memory: they are replayed on one stream, one after the
other, and nothing but memory of the device's own outlives a replay.

Sources: torch.cuda.ExternalStream, torch.cuda.MemPool and use_mem_pool ("CUDA semantics: CUDA
graphs; memory management" of the torch 2.13 documentation), and version 3 of numba's CUDA array
interface. The latter has no name for bf16: those views are made as int16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from ..errors import DeviceError
from .cuda import CudaDevice
from .device import Device, Stream

TYPES: Final = {
    torch.float64: ("<f8", None),
    torch.float32: ("<f4", None),
    torch.bfloat16: ("<i2", torch.bfloat16),
    torch.int32: ("<i4", None),
    torch.int64: ("<i8", None),
    torch.uint8: ("|u1", None),
}
"""Type string of the interface, and what to view the result as."""


def why_no_torch_cuda() -> str | None:
    """Why this torch cannot use CUDA, or ``None``."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device"
    return None


class _Memory:
    """Device memory as numba's CUDA array interface."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaSpace:
    """Torch on one `CudaDevice`; see `gpu.tensors.TensorSpace`.

    Args:
        device: a `CudaDevice`, open.

    Raises:
        DeviceError: cuda-unavailable, with the reason.
    """

    captures = True

    def __init__(self, device: Device) -> None:
        why = why_no_torch_cuda()
        if why is None and not isinstance(device, CudaDevice):
            why = "the device is not a CUDA device"
        if why is not None:
            raise DeviceError(
                f"no model can run on this device: {why}",
                code="cuda-unavailable",
                subject=device.name,
            )
        assert isinstance(device, CudaDevice)
        self._device = device
        self.torch_device = torch.device(device.name)
        # Elsewhere torch reads the groups' ends on the host and multiplies them one by one.
        self.grouped = torch.cuda.get_device_capability(self.torch_device)[0] in (9, 10)
        self._streams: dict[Stream, Any] = {}
        self._pool: Any = None

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `TensorSpace.view`."""
        if 0 in shape:  # a pointer of an empty range may not be looked up
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        kind, seen_as = TYPES[dtype]
        made = torch.as_tensor(_Memory(address, shape, kind), device=self.torch_device)
        return made if seen_as is None else made.view(seen_as)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `TensorSpace.upload`; torch waits for a copy from pageable memory itself."""
        return tensor.to(self.torch_device, copy=True)

    def computing(self, stream: Stream) -> AbstractContextManager[None]:
        """See `TensorSpace.computing`."""
        found = self._streams.get(stream)
        if found is None:
            handle = self._device.stream_handle(stream)
            make: Any = torch.cuda.ExternalStream
            found = make(handle, device=self.torch_device)
            self._streams[stream] = found
        made: AbstractContextManager[None] = torch.cuda.stream(found)
        return made

    def join(self, stream: Stream) -> None:
        """Nothing: torch works on the same stream."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """See `TensorSpace.recording`."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device=self.torch_device):
            yield

    def forget(self) -> None:
        """See `TensorSpace.forget`."""
        self._pool = None
