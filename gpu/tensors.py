"""Tensor spaces: torch tensors over a device's raw memory, and torch work on its streams.

What it is: the seam between addresses (which kernels, pool and graphs take) and torch (which does
the base model's math on a device). Three spaces do the same: `HostSpace` here, `CudaSpace` in
`cuda_tensors`, and `fakecuda.torch_queue.QueueSpace` for the test driver. It owns no memory.

Invariants: a view never keeps its memory alive (drop it before the memory is freed); torch work
done inside `computing` is ordered with everything queued on that stream, as `join` says; what torch
allocates inside `recording` stays where it is until `forget`, since a graph holds its address.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ..errors import DeviceError
from .device import Device, Stream
from .kernels.memory import view_at


class TensorSpace(Protocol):
    """Torch on one `Device`. Used by the device thread only."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""
        ...

    @property
    def captures(self) -> bool:
        """True if torch work can be captured in the device's graphs."""
        ...

    @property
    def grouped(self) -> bool:
        """True if torch's grouped_mm of bfloat16 runs without the host's help there."""
        ...

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A writable contiguous tensor over device memory.

        Args:
            address: of the first element, aligned to the element.
            shape: sizes; no bounds are checked.
            dtype: float64, float32, bfloat16, int32, int64 or uint8.
        """
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values on `torch_device`, in memory torch owns. Complete at return."""
        ...

    def computing(self, stream: Stream) -> AbstractContextManager[None]:
        """Torch work of this thread goes on ``stream`` inside."""
        ...

    def join(self, stream: Stream) -> None:
        """Call between work queued on the device's stream and torch work that reads its results.

        Nothing where both share a queue; elsewhere it waits for the stream.
        """
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Around torch work that a capture records, inside `computing`."""
        ...

    def forget(self) -> None:
        """Let go of the memory of recordings. Destroy the graphs first."""
        ...


class HostSpace:
    """Torch on the CPU over a host-addressable device.

    Args:
        device: whose memory the CPU may dereference.

    Raises:
        DeviceError: not-host-addressable.
    """

    captures = False
    grouped = True

    def __init__(self, device: Device) -> None:
        if not device.host_addressable:
            raise DeviceError(
                "views need memory the CPU can read",
                code="not-host-addressable",
                subject=device.name,
            )
        self._device = device
        self.torch_device = torch.device("cpu")

    def view(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `TensorSpace.view`."""
        return view_at(address, shape, dtype)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: it is there already."""
        return tensor

    def computing(self, stream: Stream) -> AbstractContextManager[None]:
        """Nothing to set: torch works at the call."""
        return nullcontext()

    def join(self, stream: Stream) -> None:
        """Wait for the stream."""
        self._device.synchronize(stream)

    def recording(self) -> AbstractContextManager[None]:
        """Never needed: nothing is captured."""
        return nullcontext()

    def forget(self) -> None:
        """Nothing is kept."""


def open_space(device: Device) -> TensorSpace:
    """The space of a device: CPU tensors where the CPU can read its memory, else CUDA tensors.

    Raises:
        DeviceError: cuda-unavailable, when this torch has no CUDA.
    """
    if device.host_addressable:
        return HostSpace(device)
    # Late: it needs the CUDA device, whose import costs time.
    from .cuda_tensors import CudaSpace

    return CudaSpace(device)
