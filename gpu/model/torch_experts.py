"""Deltas of routed experts on a tensor space: each place's pair is gathered from the arena.

What it owns: tensors over the pool's arena and tables. A place is one token's choice of one expert;
its A and B are copied from where the tables say that they lie in the annex of its token's adapter,
and multiplied, `AT_ONCE` places at a time. Invariants:
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

from ..lora.annex import ALIGN
from ..lora.dims import LoraModule
from ..lora.pool import LoraPool
from ..tensors import TensorSpace
from .adapters import OF_EXPERT

AT_ONCE: Final = 256
"""Places whose pairs are copied out together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """One module of one layer: ``[starts, R * k_in]`` and ``[starts, n_out * R]``, what lies behind
    every 16th byte of the arena (rows overlap); cells (0 = no pair) of A and of B, and scales,
    ``[experts, slots]``."""

    rank: int
    k_in: int
    n_out: int
    a: torch.Tensor
    b: torch.Tensor
    a_cells: torch.Tensor
    b_cells: torch.Tensor
    scales: torch.Tensor


class ExpertPairs:
    """The experts' pairs of every slot of a pool whose layout has them.

    The tensors do not keep the pool alive.
    """

    def __init__(self, pool: LoraPool, space: TensorSpace, dtype: torch.dtype) -> None:
        self._pool, self._space = pool, space
        self._whole = space.view(pool.arena_address, (pool.arena_bytes // dtype.itemsize,), dtype)
        self._step = ALIGN // dtype.itemsize
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
            if pairs is None:  # then nobody has one
                return
            for begin in range(0, x.shape[0], AT_ONCE):
                part = slice(begin, begin + AT_ONCE)
                target = out[part, column : column + pairs.n_out]
                self._add(pairs, x[part], target, experts[part], slots[part])
            column += pairs.n_out

    def _of(self, layer: int, module: LoraModule) -> _Pairs | None:
        """``None`` in an arena too small for any such pair."""
        found = self._made.get((layer, module))
        if found is not None:
            return found
        layout, slots = self._pool.layout, self._pool.max_loras
        experts, index = layout.dims.experts, layout.pair_index[layer, module]
        place = layout.pairs[index]
        rank = place.stride
        sizes = (rank * place.k_in, place.n_out * rank)
        if sum(sizes) > len(self._whole):
            return None

        def behind_each(size: int) -> torch.Tensor:
            starts = (len(self._whole) - size) // self._step + 1
            return self._whole.as_strided((starts, size), (self._step, 1))

        view = self._space.view
        a_table, b_table, scales = self._pool.pair_tables(index)
        found = _Pairs(
            rank,
            place.k_in,
            place.n_out,
            behind_each(sizes[0]),
            behind_each(sizes[1]),
            view(a_table, (experts, slots), torch.int64),
            view(b_table, (experts, slots), torch.int64),
            view(scales, (experts, slots), torch.float32),
        )
        self._made[layer, module] = found
        return found

    def _add(
        self,
        pairs: _Pairs,
        x: torch.Tensor,
        out: torch.Tensor,
        experts: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        own = slots.clamp(min=0)
        cells = pairs.a_cells[experts, own]
        there = (cells != 0) & (slots >= 0)
        a = pairs.a.index_select(0, self._start(cells)).view(-1, pairs.rank, pairs.k_in)
        shrunk = a @ x[:, :, None]
        starts = self._start(pairs.b_cells[experts, own])
        b = pairs.b.index_select(0, starts).view(-1, pairs.n_out, pairs.rank)
        delta = (b @ shrunk)[:, :, 0]
        scaled = pairs.scales[experts, own][:, None] * delta.float()
        out.copy_(torch.where(there[:, None], (out.float() + scaled).to(out.dtype), out))

    def _start(self, cells: torch.Tensor) -> torch.Tensor:
        """Rows of what lies behind each start; of what is not there, the first, as good as any."""
        return (cells - self._pool.arena_address).clamp(min=0) // ALIGN
