"""Groups of LoRA kernels on a tensor space's stream, for any number of rows.

What it owns: the kernels' scratch planes (`DeviceGroups`) and nothing else. The kernels find
weights through the pool's tables: that is what a graph captures.
"""

from __future__ import annotations

from typing import Final

import torch

from ..device import Device, Stream
from ..kernels.affine import AffineSlice
from ..kernels.affine_device import DeviceAffineGroup
from ..kernels.bgmv import MAX_SLICES, LoraSlice
from ..kernels.lookup_device import DeviceLookupGroup
from ..kernels.lora_device import DeviceLoraGroup, planes_bytes
from ..lora.dims import LoraModule
from ..lora.layout import SlotLayout

KERNEL_ROWS: Final = 1024
"""Rows of one launch; more take several, so that the planes stay small."""


def widest_input(layout: SlotLayout) -> int:
    """The longest input of a pair, in elements: an embedding has none, its rows are looked up."""
    return max(p.k_in for p in layout.pairs if p.module is not LoraModule.EMBED_TOKENS)


class DeviceGroups:
    """Makes the LoRA groups of one model; see `gpu.model.groups.GroupMaker`.

    Args:
        stream: every launch goes on it.
        dtype: bfloat16 or float32.
        max_rows: most rows of a step.
        widest: the longest input of a group, in elements; see `widest_input`.
        rank: padded rank of the pool.

    Raises:
        DeviceError: bad-argument, and what `Device.alloc` raises.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        dtype: torch.dtype,
        *,
        max_rows: int,
        widest: int,
        rank: int,
    ) -> None:
        self._device, self._stream, self._dtype = device, stream, dtype
        self._widest = widest
        self.rows = min(max_rows, KERNEL_ROWS)
        # The splits of a shorter input may be finer, and hence more.
        each = (planes_bytes(1, MAX_SLICES, rank, k_in) for k_in in (widest, min(widest, 4096)))
        self._nbytes = self.rows * max(each)
        self._planes: int | None = device.alloc(self._nbytes, label="lora planes")

    def of_rank(self, rank: int) -> DeviceGroups:
        """The same for another padded rank, beside these. Raises as the class."""
        return DeviceGroups(
            self._device,
            self._stream,
            self._dtype,
            max_rows=self.rows,
            widest=self._widest,
            rank=rank,
        )

    def lora_group(
        self, slices: tuple[LoraSlice, ...], *, k_in: int, rank: int, max_loras: int
    ) -> StreamGroup:
        """A group on the stream. Raises DeviceError as `DeviceLoraGroup`."""
        assert self._planes is not None
        group = DeviceLoraGroup(
            self._device,
            slices,
            k_in=k_in,
            rank=rank,
            max_loras=max_loras,
            planes=self._planes,
            planes_nbytes=self._nbytes,
            dtype=self._dtype,
        )
        return StreamGroup(group, self._stream, self.rows, self._dtype.itemsize)

    def affine_group(self, slices: tuple[AffineSlice, ...], *, max_loras: int) -> StreamAffine:
        """The vectors of a group on the stream. Raises DeviceError as `DeviceAffineGroup`."""
        group = DeviceAffineGroup(self._device, slices, max_loras=max_loras, dtype=self._dtype)
        return StreamAffine(group, self._stream, self.rows, self._dtype.itemsize)

    def lookup_group(
        self, part: LoraSlice, *, vocab: int, rank: int, max_loras: int
    ) -> StreamLookup:
        """The embedding's pair on the stream. Raises DeviceError as `DeviceLookupGroup`."""
        assert self._planes is not None
        group = DeviceLookupGroup(
            self._device,
            part,
            vocab=vocab,
            rank=rank,
            max_loras=max_loras,
            planes=self._planes,
            planes_nbytes=self._nbytes,
            dtype=self._dtype,
        )
        return StreamLookup(group, self._stream, self.rows, self._dtype.itemsize)

    def close(self) -> None:
        """Free the planes, once. What the device does not take back may be asked for again."""
        if self._planes is not None:
            self._device.free(self._planes)
            self._planes = None


class StreamGroup:
    """A `DeviceLoraGroup` on its stream, many rows in several launches."""

    def __init__(self, group: DeviceLoraGroup, stream: Stream, rows: int, item: int) -> None:
        self._group, self._stream, self._rows, self._item = group, stream, rows, item

    def apply(
        self,
        x_addr: int,
        x_stride: int,
        out_addr: int,
        out_stride: int,
        row_slot_addr: int,
        n_rows: int,
    ) -> None:
        """See `gpu.model.groups.Delta`."""
        for at in range(0, n_rows, self._rows):
            self._group.apply(
                x_addr + at * x_stride * self._item,
                x_stride,
                out_addr + at * out_stride * self._item,
                out_stride,
                row_slot_addr + 4 * at,
                min(self._rows, n_rows - at),
                self._stream,
            )


class StreamAffine:
    """A `DeviceAffineGroup` on its stream, many rows in several launches."""

    def __init__(self, group: DeviceAffineGroup, stream: Stream, rows: int, item: int) -> None:
        self._group, self._stream, self._rows, self._item = group, stream, rows, item

    def apply(self, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int) -> None:
        """See `gpu.model.groups.Affine`."""
        for at in range(0, n_rows, self._rows):
            self._group.apply(
                out_addr + at * out_stride * self._item,
                out_stride,
                row_slot_addr + 4 * at,
                min(self._rows, n_rows - at),
                self._stream,
            )


class StreamLookup:
    """A `DeviceLookupGroup` on its stream, many rows in several launches."""

    def __init__(self, group: DeviceLookupGroup, stream: Stream, rows: int, item: int) -> None:
        self._group, self._stream, self._rows, self._item = group, stream, rows, item

    def apply(
        self, tokens_addr: int, out_addr: int, out_stride: int, row_slot_addr: int, n_rows: int
    ) -> None:
        """See `gpu.model.groups.Lookup`."""
        for at in range(0, n_rows, self._rows):
            self._group.apply(
                tokens_addr + 8 * at,
                out_addr + at * out_stride * self._item,
                out_stride,
                row_slot_addr + 4 * at,
                min(self._rows, n_rows - at),
                self._stream,
            )
