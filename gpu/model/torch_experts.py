"""Deltas of routed experts on a tensor space: each place's pair is gathered from its token's slot.

What it owns: tensors over the pool's slots and tables. A place is one token's choice of one expert;
its A and B are copied out of its slot and multiplied, `AT_ONCE` places at a time. Invariants:
shapes follow from the number of places alone, so a decode step can be captured; places whose token
is on base, or whose adapter has no pair there, keep their values whatever the memory holds; rounds
where `gpu.kernels.bgmv` says.

Cost: a copy of ``R (k_in + n_out)`` elements a place and module, also for rows on base in a step
with adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..lora.dims import LoraModule
from ..lora.pool import LoraPool
from ..tensors import TensorSpace
from .adapters import OF_EXPERT

AT_ONCE: Final = 256
"""Places whose pairs are copied out together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """One module of one layer: A ``[slots, experts, R, k_in]``, B ``[slots, experts, n_out, R]``;
    cells (0 = no pair) and scales ``[experts, slots]``."""

    a: torch.Tensor
    b: torch.Tensor
    cells: torch.Tensor
    scales: torch.Tensor


class ExpertPairs:
    """The experts' pairs of every slot of a pool with room for them.

    The tensors do not keep the pool alive.
    """

    def __init__(self, pool: LoraPool, space: TensorSpace, dtype: torch.dtype) -> None:
        self._pool, self._space = pool, space
        count = pool.max_loras * pool.layout.slot_bytes // dtype.itemsize
        self._whole = space.view(pool.address, (count,), dtype)
        self._item = dtype.itemsize
        self._made: dict[tuple[int, LoraModule], _Pairs] = {}

    def add(
        self,
        layer: int,
        half: int,
        x: torch.Tensor,
        out: torch.Tensor,
        experts: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """``out += scale * x A^T B^T`` of each place, for `OF_EXPERT` ``[half]`` side by side.

        Args:
            x: ``[places, k_in]``. out: ``[places, width]``.
            experts: int64 ``[places]``. slots: the same, -1 = base.
        """
        column = 0
        for module in OF_EXPERT[half]:
            pairs = self._of(layer, module)
            width = pairs.b.shape[2]
            for begin in range(0, x.shape[0], AT_ONCE):
                part = slice(begin, begin + AT_ONCE)
                target = out[part, column : column + width]
                _add(pairs, x[part], target, experts[part], slots[part])
            column += width

    def _of(self, layer: int, module: LoraModule) -> _Pairs:
        found = self._made.get((layer, module))
        if found is None:
            layout, slots = self._pool.layout, self._pool.max_loras
            experts, index = layout.dims.experts, layout.pair_index[layer, module]
            place = layout.pairs[index]
            # Experts of one module lie side by side, each A before its B.
            rank = place.stride
            step = rank * (place.k_in + place.n_out)

            def view(offset: int, rows: int, columns: int) -> torch.Tensor:
                strides = (layout.slot_bytes // self._item, step, columns, 1)
                shape = (slots, experts, rows, columns)
                return self._whole.as_strided(shape, strides, offset // self._item)

            a_table, _, scales = self._pool.pair_tables(index)
            found = _Pairs(
                view(place.a_off, rank, place.k_in),
                view(place.b_off, place.n_out, rank),
                self._space.view(a_table, (experts, slots), torch.int64),
                self._space.view(scales, (experts, slots), torch.float32),
            )
            self._made[layer, module] = found
        return found


def _add(
    pairs: _Pairs,
    x: torch.Tensor,
    out: torch.Tensor,
    experts: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    own = slots.clamp(min=0)
    there = (pairs.cells[experts, own] != 0) & (slots >= 0)
    shrunk = pairs.a[own, experts] @ x[:, :, None]
    delta = (pairs.b[own, experts] @ shrunk)[:, :, 0]
    scaled = pairs.scales[experts, own][:, None] * delta.float()
    out.copy_(torch.where(there[:, None], (out.float() + scaled).to(out.dtype), out))
