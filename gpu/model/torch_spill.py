"""KV blocks of a tensor space in pinned host memory.

What it owns: a stream for the copies, two events, a few blocks of device memory that copies pass
through, and the pinned memory, which grows as it is needed and is kept until `close`. A spilled
block is gathered on the compute stream, which steps that come later may then overwrite it behind,
and leaves on the copy stream; a restored one comes the same way. Invariants: pinned blocks are
written and read on the copy stream alone, so one that was given up may be taken again at once;
device memory in between changes hands by events, which are recorded when it is wanted: what a
copy that failed half way left in a stream is behind whoever has the memory next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import torch

from ..device import Device, Stream
from ..tensors import TensorSpace
from .torch_kv import TorchKv

PASSING: Final = 16
"""Blocks on their way at a time, and pinned blocks taken at a time."""


class PinnedCopies:
    """See `gpu.model.spill.BlockCopies`; a copy is the address of each block.

    Args:
        stream: the compute stream. Use the copies inside ``space.computing`` of it.
        limit: blocks held at once, 1 or more.

    Raises:
        DeviceError: what the allocations raise.
    """

    def __init__(
        self, device: Device, space: TensorSpace, stream: Stream, kv: TorchKv, limit: int
    ) -> None:
        self._device, self._space, self._stream, self._kv = device, space, stream, kv
        self.num_blocks = kv.num_blocks
        layers, two, total, *cell = kv.blocks.shape
        self._each = kv.nbytes // total
        self._passing = min(PASSING, limit)
        self._free: list[int] = []
        self._closing = ExitStack()
        try:
            self._copy = device.create_stream(label="kv copies")
            self._closing.callback(device.destroy_stream, self._copy)
            self._on_device = device.create_event(label="kv blocks on the device")
            self._closing.callback(device.destroy_event, self._on_device)
            self._copied = device.create_event(label="kv blocks copied")
            self._closing.callback(device.destroy_event, self._copied)
            self._at = device.alloc(self._passing * self._each, label="kv blocks on their way")
            self._closing.callback(device.free, self._at)
            shape = (self._passing, layers, two, *cell)
            self._between = space.view(self._at, shape, kv.blocks.dtype)
        except BaseException:
            self._closing.close()
            raise

    def take(self, blocks: Sequence[int]) -> list[int]:
        """See `BlockCopies.take`. Raises DeviceError out-of-memory, and what copies raise."""
        device, held = self._device, self._pinned(len(blocks))
        try:
            for begin in range(0, len(blocks), self._passing):
                part = blocks[begin : begin + self._passing]
                self._pass_to_compute()
                chosen = self._kv.blocks.index_select(2, self._index(part))
                self._between[: len(part)].copy_(chosen.movedim(2, 0))
                self._pass_to_copy()
                for place, address in enumerate(held[begin : begin + len(part)]):
                    source = self._at + place * self._each
                    device.copy_d2h(address, source, self._each, self._copy)
        except BaseException:
            self.drop(held)
            raise
        return held

    def put(self, held: list[int], places: Sequence[tuple[int, int]]) -> None:
        """See `BlockCopies.put`. Raises DeviceError, what copies raise."""
        device = self._device
        for begin in range(0, len(places), self._passing):
            part = places[begin : begin + self._passing]
            self._pass_to_copy()
            for place, (source, _) in enumerate(part):
                target = self._at + place * self._each
                device.copy_h2d(target, held[source], self._each, self._copy)
            self._pass_to_compute()
            targets = self._index([block for _, block in part])
            self._kv.blocks.index_copy_(2, targets, self._between[: len(part)].movedim(0, 2))

    def drop(self, held: list[int]) -> None:
        """See `BlockCopies.drop`."""
        self._free += held

    def _pass_to_copy(self) -> None:
        """The copy stream goes on behind the compute stream's work so far."""
        self._device.record_event(self._on_device, self._stream)
        self._device.wait_event(self._on_device, self._copy)

    def _pass_to_compute(self) -> None:
        """The compute stream goes on behind all copies so far, also those of a call that failed."""
        self._device.record_event(self._copied, self._copy)
        self._device.wait_event(self._copied, self._stream)
        self._space.join(self._stream)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks).to(self._space.torch_device)

    def _pinned(self, count: int) -> list[int]:
        while len(self._free) < count:
            address = self._device.pinned_alloc(PASSING * self._each, label="spilled kv blocks")
            self._closing.callback(self._device.pinned_free, address)
            self._free += [address + i * self._each for i in range(PASSING)]
        held, self._free = self._free[-count:], self._free[:-count]
        return held

    def close(self) -> None:
        """End the copies and free everything, once. The compute stream's work has ended."""
        if hasattr(self, "_between"):
            del self._between
            self._closing.callback(self._device.synchronize, self._copy)
        self._closing.close()
