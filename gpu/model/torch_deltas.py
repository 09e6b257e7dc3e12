"""The deltas of one step on a tensor space, with DoRA's factors and biases, by kind of token.

What it owns: tensors over the slots' memory. Rows that feed one token go through the LoRA kernels.
Chunks of a prompt, whose tokens all have one slot, go through two GEMMs a module. Routed experts go
through `gpu.model.torch_experts`, whatever the rows.

Invariants: all ways round where `gpu.kernels.bgmv` says; a token is served by exactly one of the
first two; base tokens by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..device import Stream
from ..lora.layout import affine_step
from ..lora.pool import LoraPool
from ..tensors import TensorSpace
from .adapters import GROUPS, LayerPlan
from .torch_expert_vectors import ExpertVectors
from .torch_experts import ExpertPairs
from .torch_model import Places

GEMM_TOKENS: Final = 16
"""Chunks of at least this many tokens take the GEMMs."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``begin..end - 1`` of the step, all of one slot (-1: base, nothing to do)."""

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
        if count >= GEMM_TOKENS:
            chunks.append(Chunk(slot, len(kernel), len(kernel) + count))
            slot = -1
        kernel += [slot] * count
    return kernel, tuple(chunks)


def between(chunks: Sequence[Chunk], n: int) -> tuple[int, int]:
    """The tokens of a step of ``n`` the kernels run over, first and last + 1: all but the chunks it
    begins and ends with, whose blocks would start only to find that they have nothing to do."""
    first, last = 0, n
    for chunk in chunks:
        if chunk.begin == first:
            first = chunk.end
    for chunk in reversed(chunks):
        if chunk.end == last and chunk.begin >= first:
            last = chunk.begin
    return first, last


class SlotViews:
    """A and B of every (slot, pair), as tensors over the pool. Made once each, on first use.

    The tensors do not keep the pool alive: `clear` before it is closed.

    Attributes:
        experts: the pairs of routed experts; ``None`` in a pool without an arena for them.
        expert_vectors: their vectors, likewise.
    """

    def __init__(self, pool: LoraPool, space: TensorSpace, dtype: torch.dtype) -> None:
        self._pool, self._space, self._dtype = pool, space, dtype
        dims = pool.layout.dims
        routed = dims.expert_adapters and pool.arena_bytes
        self.experts = ExpertPairs(pool, space, dtype) if routed else None
        self.expert_vectors: ExpertVectors | None = None
        if self.experts is not None and pool.layout.affine:
            self.expert_vectors = ExpertVectors(pool, space)
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

    def vectors(self, slot: int, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
        """mul and add, float32 ``[out]``; only for layouts with an affine region."""
        layout = self._pool.layout
        at, n_out = self._pool.slot_address(slot), layout.pairs[pair].n_out
        at += layout.affine_offsets[pair]
        view = self._space.view
        return (
            view(at, (n_out,), torch.float32),
            view(at + affine_step(n_out), (n_out,), torch.float32),
        )

    def clear(self) -> None:
        """Drop the tensors."""
        self._made.clear()
        self.experts = self.expert_vectors = None


class StepDeltas:
    """The deltas of one step; see `torch_model.Deltas`.

    Args:
        plan: groups to launch per layer, or ``None`` when no row goes through the kernels.
        row_slots: address of int32 ``[n]``, what `split_rows` gave (unused without a plan).
        chunks: for the GEMMs.
        slots: int64 ``[n]`` on the device, each token's own slot (unused without experts).
        experts: (layer, half) whose routed experts have pairs.
        shifted: (layer, half) whose routed experts have vectors.
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
        slots: torch.Tensor,
        experts: frozenset[tuple[int, int]],
        shifted: frozenset[tuple[int, int]],
    ) -> None:
        self._pool, self._views, self._space, self._stream = pool, views, space, stream
        self._plan, self._row_slots, self._chunks = plan, row_slots, chunks
        self._slots, self._experts, self._shifted = slots, experts, shifted
        self._first, self._last = between(chunks, slots.shape[0])

    def add(self, layer: int, group: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `torch_model.Deltas.add`; both tensors have contiguous columns."""
        launch = None if self._plan is None else self._plan[layer][group]
        first, rows = self._first, self._last - self._first
        if launch is not None and rows > 0:
            launch.apply(
                x.data_ptr() + first * x.stride(0) * x.element_size(),
                x.stride(0),
                out.data_ptr() + first * out.stride(0) * out.element_size(),
                out.stride(0),
                self._row_slots + 4 * first,
                rows,
            )
            self._space.join(self._stream)
        for chunk in self._chunks:
            if chunk.slot >= 0:
                self._multiply(layer, group, chunk, x, out)

    def add_experts(
        self, layer: int, half: int, x: torch.Tensor, out: torch.Tensor, places: Places
    ) -> None:
        """See `torch_model.Deltas.add_experts`."""
        if (layer, half) in self._experts and self._views.experts is not None:
            slots = self._slots.index_select(0, places.tokens)
            self._views.experts.add(layer, half, x, out, places.experts, slots)
            vectors = self._views.expert_vectors
            if vectors is not None and (layer, half) in self._shifted:
                vectors.apply(layer, half, out, places.experts, slots)

    def _multiply(
        self, layer: int, group: int, chunk: Chunk, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        layout, column = self._pool.layout, 0
        rows = x[chunk.begin : chunk.end]
        for module in GROUPS[group]:
            pair = layout.pair_index[layer, module]
            width = layout.pairs[pair].n_out
            target = out[chunk.begin : chunk.end, column : column + width]
            if self._pool.present(chunk.slot, pair):
                a, b = self._views.get(chunk.slot, pair)
                delta = (rows @ a.t()) @ b.t()
                scale = self._pool.scale(chunk.slot, pair)
                target.copy_(target.float() + scale * delta.float())
            if self._pool.vectors(chunk.slot, pair):
                mul, add = self._views.vectors(chunk.slot, pair)
                target.copy_(target.float() * mul + add)
            column += width
