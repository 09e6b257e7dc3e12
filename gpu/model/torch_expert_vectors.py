"""DoRA's factors and biases of routed experts on a tensor space: y = mul * y + add of each place.

What it owns: tensors over the pool's memory and tables. A place is one token's choice of one
expert; its vectors are copied from where the tables say that its token's adapter has them,
`AT_ONCE` places at a time. Invariants: shapes follow from the number of places alone, so a decode
step can be captured; places whose token is on base, or whose adapter has no vectors there, keep
their values whatever the memory holds; rounds where `gpu.kernels.affine` says.
"""

from __future__ import annotations

from typing import Final

import torch

from ..lora.annex import ALIGN
from ..lora.dims import LoraModule
from ..lora.layout import affine_step
from ..lora.pool import LoraPool
from ..tensors import TensorSpace
from .adapters import OF_EXPERT

AT_ONCE: Final = 2048
"""Places whose vectors are copied out together."""
_STEP: Final = ALIGN // 4


class ExpertVectors:
    """The experts' vectors of every slot of a pool whose layout has room for them.

    The tensors do not keep the pool alive.
    """

    def __init__(self, pool: LoraPool, space: TensorSpace) -> None:
        self._pool, self._space = pool, space
        self._base = pool.address
        self._whole = space.view(self._base, (pool.nbytes // 4,), torch.float32)
        self._cells: dict[tuple[int, LoraModule], torch.Tensor] = {}

    def apply(
        self,
        layer: int,
        half: int,
        out: torch.Tensor,
        experts: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """``out = mul * out + add`` of each place, for `OF_EXPERT` ``[half]`` side by side.

        Args:
            out: ``[places, width]``.
            experts: int64 ``[places]``. slots: the same, -1 = base.
        """
        layout, column = self._pool.layout, 0
        for module in OF_EXPERT[half]:
            n_out = layout.dims.shape(module)[0]
            cells = self._of(layer, module)
            for begin in range(0, out.shape[0], AT_ONCE):
                part = slice(begin, begin + AT_ONCE)
                target = out[part, column : column + n_out]
                self._apply(cells, n_out, target, experts[part], slots[part])
            column += n_out

    def _of(self, layer: int, module: LoraModule) -> torch.Tensor:
        """Addresses of mul, int64 ``[experts, slots]``, 0 = none."""
        found = self._cells.get((layer, module))
        if found is None:
            layout = self._pool.layout
            table = self._pool.affine_table(layout.pair_index[layer, module])
            shape = (layout.dims.experts, self._pool.max_loras)
            found = self._cells[layer, module] = self._space.view(table, shape, torch.int64)
        return found

    def _apply(
        self,
        cells: torch.Tensor,
        n_out: int,
        out: torch.Tensor,
        experts: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        own = cells[experts, slots.clamp(min=0)]
        there = (own != 0) & (slots >= 0)
        starts = (own - self._base).clamp(min=0) // ALIGN  # of what is not there, any will do
        behind = (len(self._whole) - n_out) // _STEP + 1
        # What lies behind every 16th byte; rows overlap.
        values = self._whole.as_strided((behind, n_out), (_STEP, 1))
        mul = values.index_select(0, starts)
        add = values.index_select(0, (starts + affine_step(n_out) // ALIGN).clamp(max=behind - 1))
        made = (out.float() * mul + add).to(out.dtype)
        out.copy_(torch.where(there[:, None], made, out))
