"""Deltas on a tensor space: the LoRA kernels on raw pointers, and GEMMs on the slots' own memory.

What it owns: the kernels' scratch planes (`DeviceGroups`) and nothing else. Rows that feed one
token go through the kernels, which find weights through the pool's tables: that is what a graph
captures. Chunks of a prompt, whose tokens all have one slot, go through two GEMMs a module.

Invariants: both ways round where `gpu.kernels.bgmv` says; a token is served by exactly one of them;
base tokens by neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...errors import DeviceError
from ..device import Device, Stream
from ..kernels.affine import AffineGroup, AffineSlice
from ..kernels.bgmv import MAX_SLICES, LoraSlice
from ..kernels.lora_device import DeviceLoraGroup, planes_bytes
from ..lora.pool import LoraPool
from ..tensors import TensorSpace
from .adapters import GROUPS, LayerPlan

GEMM_TOKENS: Final = 16
"""Chunks of at least this many tokens take the GEMMs."""
KERNEL_ROWS: Final = 1024
"""Rows of one launch; more take several, so that the planes stay small."""


class DeviceGroups:
    """Makes the LoRA groups of one model; see `gpu.model.adapters.GroupMaker`.

    Args:
        stream: every launch goes on it.
        dtype: bfloat16 or float32.
        max_rows: most rows of a step.
        widest: the longest input of a group, in elements.
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

    def affine_group(self, slices: tuple[AffineSlice, ...], *, max_loras: int) -> AffineGroup:
        """Refuse: DoRA's factors and biases have no kernel here, and layouts have no room for them.

        Raises:
            DeviceError: affine-not-on-device.
        """
        raise DeviceError(
            "factors and biases of adapters do not run on an accelerator yet",
            code="affine-not-on-device",
        )

    def close(self) -> None:
        """Free the planes, once."""
        planes, self._planes = self._planes, None
        if planes is not None:
            self._device.free(planes)


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
        """See `gpu.model.adapters.Group`."""
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``begin..end - 1`` of the step, all of one slot."""

    slot: int
    begin: int
    end: int


def split_rows(lengths: Sequence[int], slots: Sequence[int]) -> tuple[list[int], tuple[Chunk, ...]]:
    """Which tokens the kernels serve and which the GEMMs.

    Args:
        lengths: tokens of each row.
        slots: slot of each row.

    Returns:
        (slot of each token for the kernels, -1 where a GEMM or nobody serves it; the chunks).
    """
    kernel: list[int] = []
    chunks: list[Chunk] = []
    for count, slot in zip(lengths, slots, strict=True):
        if slot >= 0 and count >= GEMM_TOKENS:
            chunks.append(Chunk(slot, len(kernel), len(kernel) + count))
            slot = -1
        kernel += [slot] * count
    return kernel, tuple(chunks)


class SlotViews:
    """A and B of every (slot, pair), as tensors over the pool. Made once each, on first use.

    The tensors do not keep the pool alive: `clear` before it is closed.
    """

    def __init__(self, pool: LoraPool, space: TensorSpace, dtype: torch.dtype) -> None:
        self._pool, self._space, self._dtype = pool, space, dtype
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, slot: int, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[R, in]`` and B ``[out, R]``."""
        found = self._made.get((slot, pair))
        if found is None:
            base, layout = self._pool.slot_address(slot), self._pool.layout
            place = layout.pairs[pair]
            rank = place.stride
            view = self._space.view
            found = (
                view(base + place.a_off, (rank, place.k_in), self._dtype),
                view(base + place.b_off, (place.n_out, rank), self._dtype),
            )
            self._made[slot, pair] = found
        return found

    def clear(self) -> None:
        """Drop the tensors."""
        self._made.clear()


class StepDeltas:
    """The deltas of one step; see `torch_llama.Deltas`.

    Args:
        plan: groups to launch per layer, or ``None`` when no row goes through the kernels.
        row_slots: address of int32 ``[n]``, what `split_rows` gave (unused without a plan).
        chunks: for the GEMMs.
    """

    def __init__(
        self,
        pool: LoraPool,
        views: SlotViews,
        space: TensorSpace,
        stream: Stream,
        plan: tuple[LayerPlan, ...] | None,
        row_slots: int,
        chunks: tuple[Chunk, ...],
    ) -> None:
        self._pool, self._views, self._space, self._stream = pool, views, space, stream
        self._plan, self._row_slots, self._chunks = plan, row_slots, chunks

    def add(self, layer: int, group: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `torch_llama.Deltas.add`; both tensors have contiguous columns."""
        launch = None if self._plan is None else self._plan[layer][group]
        if launch is not None:
            launch.apply(
                x.data_ptr(),
                x.stride(0),
                out.data_ptr(),
                out.stride(0),
                self._row_slots,
                x.shape[0],
            )
            self._space.join(self._stream)
        for chunk in self._chunks:
            self._multiply(layer, group, chunk, x, out)

    def _multiply(
        self, layer: int, group: int, chunk: Chunk, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        layout, column = self._pool.layout, 0
        rows = x[chunk.begin : chunk.end]
        for module in GROUPS[group]:
            pair = layout.pair_index[layer, module]
            width = layout.pairs[pair].n_out
            if self._pool.present(chunk.slot, pair):
                a, b = self._views.get(chunk.slot, pair)
                delta = (rows @ a.t()) @ b.t()
                target = out[chunk.begin : chunk.end, column : column + width]
                scale = self._pool.scale(chunk.slot, pair)
                target.copy_(target.float() + scale * delta.float())
            column += width
